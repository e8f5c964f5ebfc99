"""The equations in plain PyTorch: the truth that every kernel is held to.

Each function has the arguments and the result of its twin in `vapo_kernels`, computes in the dtype of
its inputs up to float64, differentiates through autograd, and is written as the equation reads. None
of it is fast. Eq. numbers are those of ``docs/maths.md``.
"""

import itertools

import torch
from torch import Tensor

from vapo_kernels.ops.gae import ALPHA, GAE
from vapo_kernels.ops.policy_loss import MAX_LOG_RATIO, PolicyLoss
from vapo_kernels.ops.token_logprobs import TokenLogprobs
from vapo_kernels.ops.value_loss import ValueLoss


class _Clamp(torch.autograd.Function):
    """x in [low, high], with slope 1 at the bounds too: PyTorch's own clamp has slope 0 there from 2.14 on.

    The slope 0 outside is a factor, not a choice: what breaks the loss breaks the gradient, because 0 · NaN is NaN.
    """

    @staticmethod
    def forward(ctx, x, low, high):
        ctx.is_inside = ~((x < low) | (x > high))
        return torch.clamp(x, low, high)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.is_inside, None, None


_clamp = _Clamp.apply


def _log_ratio(logprobs, others):
    """log π − log π′ in [−20, 20]; NaN where it is infinite, but for a token that π forbids (log π = −inf)."""
    broken = (logprobs == torch.inf) | others.isinf()
    return _clamp(logprobs - others + torch.where(broken, torch.nan, 0.0), -MAX_LOG_RATIO, MAX_LOG_RATIO)


def length_adaptive_lambda(lengths, *, alpha=ALPHA):
    """λ_policy = clamp(1 − 1/(α l), 0, 1), and 0 for l = 0 (Eq. 15)."""
    lengths = torch.as_tensor(lengths)
    lengths = lengths if lengths.dtype == torch.float64 else lengths.float()
    return torch.where(lengths > 0, (1 - 1 / (alpha * lengths)).clamp(0, 1), 0.0)


def packed_gae(
    rewards,
    values,
    cu_seqlens,
    *,
    mask=None,
    gamma=1.0,
    lam_policy=None,
    lam_critic=1.0,
    alpha=ALPHA,
    bootstrap_values=None,
):
    """Â (Eq. 13) with λ_policy and R̂ = Â + V (Eq. 9) with λ_critic, one token at a time from the end."""
    if lam_policy is not None and alpha != ALPHA:
        raise ValueError(f"alpha: expected its default beside lam_policy: it has no effect, got {alpha}")
    mask = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask.bool()
    dtype = torch.float64 if rewards.dtype == torch.float64 else torch.float32
    advantages, returns = torch.zeros_like(rewards, dtype=dtype), torch.zeros_like(rewards, dtype=dtype)
    bounds = cu_seqlens.tolist()
    for s, (start, end) in enumerate(itertools.pairwise(bounds)):
        tokens = [t for t in range(start, end) if mask[t]]
        lam_p = (
            length_adaptive_lambda(torch.tensor(len(tokens), dtype=dtype), alpha=alpha)
            if lam_policy is None
            else lam_policy
        )
        lam_p = float(lam_p[s] if isinstance(lam_p, Tensor) and lam_p.dim() else lam_p)
        lam_c = float(lam_critic[s] if isinstance(lam_critic, Tensor) and lam_critic.dim() else lam_critic)
        next_value = torch.zeros((), dtype=dtype) if bootstrap_values is None else bootstrap_values[s].to(dtype)
        advantage_p = advantage_c = 0.0
        for t in reversed(tokens):
            value = values[t].to(dtype)
            delta = rewards[t].to(dtype) + gamma * next_value - value  # Eq. 6, 8
            advantage_p = delta + gamma * lam_p * advantage_p  # Eq. 13
            advantage_c = delta + gamma * lam_c * advantage_c
            advantages[t], returns[t] = advantage_p, advantage_c + value  # Eq. 9
            next_value = value
    return GAE(advantages, returns)


def padded_gae(rewards, values, mask, **kwargs):
    """`packed_gae` of the rows of a padded batch."""
    b, t = rewards.shape
    cu_seqlens = torch.arange(b + 1) * t
    packed = packed_gae(rewards.reshape(-1), values.reshape(-1), cu_seqlens, mask=mask.reshape(-1), **kwargs)
    return GAE(packed.advantages.view(b, t), packed.returns.view(b, t))


def token_logprobs(logits, token_ids, *, mask=None, temperature=1.0):
    """log π(a|s) = log softmax(z/τ)[a] and −Σ_j p_j log p_j; 0 where ``mask`` is False."""
    mask = torch.ones_like(token_ids, dtype=torch.bool) if mask is None else mask.bool()
    if isinstance(temperature, Tensor):
        temperature = temperature.masked_fill(~mask, 1.0).unsqueeze(-1)
    logits = logits.masked_fill(~mask.unsqueeze(-1), 0.0)
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    logprobs = log_p.gather(-1, token_ids.masked_fill(~mask, 0).long().unsqueeze(-1)).squeeze(-1)
    # p log p → 0 as p → 0, in value and in gradient.
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1)
    return TokenLogprobs(logprobs.masked_fill(~mask, 0.0), entropy.masked_fill(~mask, 0.0))


def linear_token_logprobs(hidden, weight, token_ids, *, bias=None, mask=None, temperature=1.0):
    """`token_logprobs` of the logits hidden Wᵀ + bias."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return token_logprobs(logits, token_ids, mask=mask, temperature=temperature)


def logprob_policy_loss(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    *,
    entropy=None,
    is_correct=None,
    clip_low=0.2,
    clip_high=0.28,
    dual_clip=None,
    nll_weight=0.1,
    num_tokens=None,
    num_correct_tokens=None,
    ref_logprobs=None,
    kl_weight=0.0,
    entropy_weight=0.0,
    token_weights=None,
):
    """L = L_PPO + μ L_NLL (Eq. 17), + KL, − entropy bonus; token means over the whole optimiser step."""
    mask = mask.bool()
    correct = torch.zeros_like(mask) if is_correct is None else is_correct.bool() & mask
    count = mask.sum().to(logprobs.dtype)
    correct_count = correct.sum().to(logprobs.dtype)
    tokens = torch.as_tensor(count if num_tokens is None else num_tokens).clamp(min=1)
    correct_tokens = torch.as_tensor(correct_count if num_correct_tokens is None else num_correct_tokens).clamp(min=1)

    def masked(x, where=mask):
        return logprobs.new_zeros(mask.shape) if x is None else x.masked_fill(~where, 0.0).to(logprobs.dtype)

    logprobs, old_logprobs, advantages = masked(logprobs), masked(old_logprobs), masked(advantages)
    weights = mask.to(logprobs.dtype) if token_weights is None else masked(token_weights)

    log_ratio = _log_ratio(logprobs, old_logprobs)
    ratio = log_ratio.exp()  # Eq. 4
    unclipped, clipped = ratio * advantages, _clamp(ratio, 1 - clip_low, 1 + clip_high) * advantages
    surrogate = torch.minimum(unclipped, clipped)  # Eq. 3
    is_clipped = clipped < unclipped
    if dual_clip is not None:
        is_bounded = (advantages < 0) & (surrogate < dual_clip * advantages)
        is_clipped = is_clipped | is_bounded
        surrogate = torch.where(is_bounded, _clamp(ratio, 0.0, dual_clip) * advantages, surrogate)
    policy = -(weights * surrogate).sum() / tokens
    positive_nll = -masked(logprobs, correct).sum() / correct_tokens  # Eq. 16

    kl = logprobs.new_zeros(())
    if ref_logprobs is not None:
        log_ref_ratio = -_log_ratio(logprobs, masked(ref_logprobs))
        kl = masked(torch.expm1(log_ref_ratio) - log_ref_ratio).sum() / tokens
    mean_entropy = masked(entropy).sum() / tokens
    loss = policy + nll_weight * positive_nll + kl_weight * kl - entropy_weight * mean_entropy  # Eq. 17
    approx_kl = masked(torch.expm1(log_ratio) - log_ratio).sum() / tokens
    clip_fraction = (is_clipped & mask).sum().to(logprobs.dtype) / tokens
    statistics = (policy, positive_nll, kl, mean_entropy, clip_fraction, approx_kl, count, correct_count, logprobs)
    return PolicyLoss(loss, *(x.detach() for x in statistics))


def policy_loss(logits, token_ids, old_logprobs, advantages, mask, *, temperature=1.0, inplace=False, **kwargs):
    """`logprob_policy_loss` of the log-probs and entropies of ``logits``; ``inplace`` changes nothing here."""
    logprobs, entropy = token_logprobs(logits, token_ids, mask=mask, temperature=temperature)
    return logprob_policy_loss(logprobs, old_logprobs, advantages, mask, entropy=entropy, **kwargs)


def linear_policy_loss(hidden, weight, token_ids, old_logprobs, advantages, mask, *, bias=None, **kwargs):
    """`policy_loss` of the logits hidden Wᵀ + bias."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return policy_loss(logits, token_ids, old_logprobs, advantages, mask, **kwargs)


def value_loss(values, returns, mask, *, old_values=None, clip=None, num_tokens=None):
    """Mean over tokens of ½ (V − R̂)² (Eq. 10), or of the larger of it and that of V clipped around old V."""
    mask = mask.bool()
    count = torch.as_tensor(mask.sum() if num_tokens is None else num_tokens).clamp(min=1)
    values, returns = values.masked_fill(~mask, 0.0), returns.masked_fill(~mask, 0.0).to(values.dtype)
    losses, is_clipped = (values - returns).square() / 2, torch.zeros_like(mask)
    if clip is not None:
        old_values = old_values.masked_fill(~mask, 0.0).to(values.dtype)
        clipped = _clamp(values, old_values - clip, old_values + clip)
        clipped_losses = (clipped - returns).square() / 2
        is_clipped = ~(clipped_losses <= losses)
        losses = torch.maximum(losses, clipped_losses)
    return ValueLoss(losses.sum() / count, (is_clipped & mask).sum().to(values.dtype) / count)


def value_moments(values, returns, mask):
    """[n, ΣR̂, ΣR̂², Σ(R̂ − V), Σ(R̂ − V)²] over True tokens, float64."""
    returns, values = returns[mask.bool()].double(), values[mask.bool()].double()
    error = returns - values
    return torch.stack(
        [error.new_tensor(len(error)), returns.sum(), returns.square().sum(), error.sum(), error.square().sum()]
    )


def explained_variance(values, returns, mask):
    """1 − Var(R̂ − V) / Var(R̂) over True tokens; 0 where the returns do not vary."""
    returns, values = returns[mask.bool()].double(), values[mask.bool()].double()
    if len(returns) == 0 or returns.var(correction=0) == 0:
        return 0.0 * (returns - values).sum()
    return 1 - (returns - values).var(correction=0) / returns.var(correction=0)


def masked_whiten(x, mask, *, shift_mean=True):
    """(x − mean) / √(var + 1e-8) over True positions, var with n − 1 (at least 1); 0 elsewhere."""
    mask = mask.bool()
    x = x.masked_fill(~mask, 0.0)
    count = mask.sum().clamp(min=1)
    mean = x.sum() / count
    var = ((x - mean) * mask).square().sum() / (count - 1).clamp(min=1)
    return ((x - mean * shift_mean) * torch.rsqrt(var + 1e-8)).masked_fill(~mask, 0.0)
