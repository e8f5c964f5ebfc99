"""Rollout → Batch: rewards, advantages and returns."""

from __future__ import annotations

import torch
from torch import Tensor

from vapo.config import Config
from vapo.models.sharding import sum_over_ranks
from vapo.rollout.rewards import terminal_rewards
from vapo.types import Batch, Rollout
from vapo_kernels import explained_variance_from, length_adaptive_lambda, packed_gae, value_moments
from vapo_kernels.ops.whiten import masked_moments, whiten_by


def build_batch(
    rollout: Rollout,
    config: Config,
    *,
    old_logprobs: Tensor,
    ref_logprobs: Tensor | None = None,
    values: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
) -> Batch:
    """Shape the rewards, then estimate advantages and returns (Eq. 5, 9, 13–15, or from the group's scores).

    Args:
        rollout: S responses, N tokens.
        config: The settings of the estimator, of truncated responses, of the KL penalty and of whitening.
        old_logprobs: [N] float32. log π_old of the sampled tokens, Eq. 4.
        ref_logprobs: [N] float32 or None. The same of the policy before RL, Eq. 2.
        values: [N] float32 or None. V(s_t) before each sampled token; None is 0.
        bootstrap_values: [S] float32 or None. V(s_l) of truncated responses, 0 of others.
    """
    mask = training_mask(rollout, config)
    rewards = shaped_rewards(rollout, config, old_logprobs, ref_logprobs)
    values = torch.zeros_like(rewards) if values is None else values
    if config.has_critic:
        lam_policy = policy_lambda(rollout.lengths, config)
        gae = packed_gae(
            rewards,
            values if config.use_values else torch.zeros_like(values),
            rollout.cu_seqlens,
            mask=mask,
            gamma=config.gamma,
            lam_policy=lam_policy,
            lam_critic=config.lam_critic if config.decoupled_gae else lam_policy,
            bootstrap_values=bootstrap_values,
        )
        advantages, returns = gae.advantages, gae.returns
    else:
        lam_policy, scores = None, torch.segment_reduce(rewards, "sum", lengths=rollout.lengths)
        advantages = group_advantages(scores, rollout.group_size).repeat_interleave(rollout.lengths)
        returns = scores.repeat_interleave(rollout.lengths)
    if config.whiten_advantages:
        advantages = whiten(advantages, mask)
    return Batch(
        rollout,
        mask,
        old_logprobs,
        ref_logprobs,
        values,
        rewards,
        advantages,
        returns,
        lam_policy,
        importance_weights(rollout, config, old_logprobs),
    )


def training_mask(rollout: Rollout, config: Config) -> Tensor:
    """[N] bool. Tokens that train: all, or those of finished responses where truncated is "mask"."""
    trains = torch.ones_like(rollout.is_truncated) if config.truncated != "mask" else ~rollout.is_truncated
    return trains.repeat_interleave(rollout.lengths)


def shaped_rewards(
    rollout: Rollout, config: Config, old_logprobs: Tensor | None = None, ref_logprobs: Tensor | None = None
) -> Tensor:
    """Rewards per token, [N] float32: the verifier's, the overlong penalty (DAPO) and −β log π_old/π_ref (Eq. 1, 2)."""
    rewards = rollout.rewards
    if config.truncated == "penalty":
        penalty = overlong_penalty(rollout.lengths, config.max_new_tokens, config.used_overlong_buffer)
        rewards = rewards + terminal_rewards(penalty, torch.ones_like(rollout.token_ids), rollout.cu_seqlens)
    if config.kl_reward_weight:
        rewards = rewards - config.kl_reward_weight * (old_logprobs - ref_logprobs)
    return rewards


def importance_weights(rollout: Rollout, config: Config, old_logprobs: Tensor) -> Tensor | None:
    """Truncated importance weights of the policy loss (Eq. 18), [N] float32; None where all are 1.

        w_t = min(π_old(y_t | s_t) / π_engine(y_t | s_t), importance_cap)

    π_old is the trainer's, π_engine what the engine sampled from: the same weights in other arithmetic.
    """
    if config.used_importance_cap is None or rollout.engine_logprobs is None:
        return None
    return (old_logprobs - rollout.engine_logprobs).exp().clamp(max=config.used_importance_cap)


def overlong_penalty(lengths: Tensor, max_new_tokens: int, buffer: int) -> Tensor:
    """Penalise responses that come near the length limit (DAPO's soft overlong punishment).

    Args:
        lengths: [S] int64. Sampled tokens of each response.
        max_new_tokens: The limit.
        buffer: Tokens before the limit over which the penalty grows from 0 to −1.

    Returns:
        [S] float32 in [−1, 0].

    Example:
        >>> overlong_penalty(torch.tensor([10, 80, 90, 100]), max_new_tokens=100, buffer=20).tolist()
        [0.0, 0.0, -0.5, -1.0]
    """
    return ((max_new_tokens - buffer - lengths) / buffer).clamp(-1, 0)


def policy_lambda(lengths: Tensor, config: Config) -> Tensor:
    """λ_policy of each response, [S] float32: Eq. 15, or ``lam_policy`` for all without length-adaptive GAE."""
    if config.length_adaptive_gae:
        return length_adaptive_lambda(lengths, alpha=config.alpha)
    return torch.full(lengths.shape, config.lam_policy, device=lengths.device)


def group_advantages(scores: Tensor, group_size: int) -> Tensor:
    """Score of each response less the mean of its group, over the group's standard deviation (GRPO).

    Args:
        scores: [S] float32. The responses to one prompt stand side by side.
        group_size: Responses to one prompt, >= 2.

    Returns:
        [S] float32: zeros for a group whose scores are all the same.

    Example:
        >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0, 2.0, 2.0, 2.0, 2.0]), 4)
        tensor([ 0.8660, -0.8660, -0.8660,  0.8660,  0.0000,  0.0000,  0.0000,  0.0000])
    """
    groups = scores.view(-1, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    # The mean of equal scores may be off by a rounding, which the division would blow up.
    centred = torch.where(groups.amax(1, keepdim=True) == groups.amin(1, keepdim=True), 0.0, centred)
    return (centred / (groups.std(1, keepdim=True) + 1e-6)).view(-1)


def whiten(advantages: Tensor, mask: Tensor) -> Tensor:
    """Give the advantages under ``mask`` mean 0 and variance 1 over all ranks, as `masked_whiten`; 0 elsewhere."""
    return whiten_by(sum_over_ranks(masked_moments(advantages, mask, None)), advantages, mask)


def explained_variances(batch: Batch) -> tuple[float, float]:
    """Explained variance over all tokens of a batch, and within the groups of responses to one prompt.

        1 − Var(R̂ − V)/Var(R̂),    1 − Σ (e − ē_g)²/Σ (R̂ − R̂_g)²    with e = R̂ − V and means over the tokens of group g

    The first can be high only because prompts differ in difficulty; the second is what a critic adds over a baseline
    that knows each group's mean. Sums run over all ranks.

    Returns:
        Both, at most 1; 0 where the returns do not vary.
    """
    total = explained_variance_from(sum_over_ranks(value_moments(batch.old_values, batch.returns, batch.mask)))
    rollout = batch.rollout
    group = torch.arange(len(rollout.lengths), device=batch.mask.device) // rollout.group_size
    group = group.repeat_interleave(rollout.lengths)[batch.mask]
    returns, values = batch.returns[batch.mask].double(), batch.old_values[batch.mask].double()
    sums = (_within(returns - values, group), _within(returns, group), returns.square().sum())
    errors, spread, square = sum_over_ranks(torch.stack(sums)).tolist()
    return total.item(), 1 - errors / spread if spread > 1e-12 * square else 0.0


def _within(x: Tensor, group: Tensor) -> Tensor:
    """Σ (x − x̄_g)², [] float64."""
    size = int(group.max()) + 1 if len(group) else 0
    counts = torch.zeros(size, dtype=x.dtype, device=x.device).index_add_(0, group, torch.ones_like(x))
    means = torch.zeros(size, dtype=x.dtype, device=x.device).index_add_(0, group, x) / counts
    return (x - means[group]).square().sum()
