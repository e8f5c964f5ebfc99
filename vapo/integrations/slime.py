"""VAPO's advantages and policy loss for slime, by its two hooks; nothing of slime is imported.

    --custom-advantage-function-path vapo.integrations.slime.advantages_and_returns
    --loss-type custom_loss --custom-loss-function-path vapo.integrations.slime.policy_loss --calculate-per-token-loss

slime's batches do not say which responses were correct, so there is no positive-example NLL here. Both hooks want whole
responses (context parallelism of size 1), the loss whole rows of logits too (tensor parallelism of size 1).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vapo.rollout.rewards import terminal_rewards
from vapo_kernels import packed_gae, token_logprobs
from vapo_kernels import policy_loss as fused_policy_loss


def advantages_and_returns(args: Namespace, rollout_data: dict[str, Any]) -> None:
    """Set ``advantages`` and ``returns`` of one rank's responses, by `packed_gae` (Eq. 5–9, 13–15).

    slime's own puts the reward on the last response token, masked or not, and never looks at the masks. Here masked
    tokens are skipped, and the reward goes to the last token that is not masked.

    Args:
        args: ``gamma`` and ``kl_coef`` are used, and, where a ``--custom-config-path`` sets them, ``vapo_alpha``
            (0.05), ``vapo_lam_policy`` (None: Eq. 15) and ``vapo_lam_critic`` (1.0).
        rollout_data: Per response: ``rewards`` a number, ``values``, ``kl`` and ``loss_masks`` [l]. Gets ``advantages``
            and ``returns``, lists of [l] float32.

    Raises:
        ValueError: If the tensors of a response differ in length, as under context parallelism.
    """
    values, masks = rollout_data["values"], rollout_data["loss_masks"]
    lengths = [len(mask) for mask in masks]
    for name in ("values", "kl"):
        got = [len(x) for x in rollout_data[name]]
        if got != lengths:
            raise ValueError(f"{name}: expected whole responses, as long as loss_masks {lengths}, got {got}")
    packed_values = torch.cat(values).float()
    device = packed_values.device
    mask = torch.cat(masks).to(device) != 0
    cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0)
    rewards = -args.kl_coef * torch.cat(rollout_data["kl"]).to(packed_values)
    scores = torch.as_tensor(rollout_data["rewards"], dtype=torch.float32, device=device)
    rewards = rewards + terminal_rewards(scores, mask, cu_seqlens)
    out = packed_gae(
        rewards,
        packed_values,
        cu_seqlens,
        mask=mask,
        gamma=args.gamma,
        lam_policy=getattr(args, "vapo_lam_policy", None),
        lam_critic=getattr(args, "vapo_lam_critic", 1.0),
        alpha=getattr(args, "vapo_alpha", 0.05),
    )
    rollout_data["advantages"] = list(out.advantages.split(lengths))
    rollout_data["returns"] = list(out.returns.split(lengths))


def policy_loss(
    args: Namespace, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate (Eq. 3, 4) with entropy and KL, from packed logits: the sum over this micro-batch's tokens.

    With ``--calculate-per-token-loss``, Megatron divides that sum by the tokens of the whole step, which is VAPO's
    token-level mean.

    Args:
        args: ``eps_clip``, ``eps_clip_high``, ``eps_clip_c``, ``rollout_temperature``, ``entropy_coef``,
            ``use_kl_loss`` and ``kl_loss_coef`` are used; the KL is k3.
        batch: Per response: ``unconcat_tokens`` [prompt and response], ``total_lengths``, ``response_lengths``,
            ``loss_masks``, ``advantages`` and ``log_probs`` or ``rollout_log_probs`` of the response; without any, the
            policy is taken for the one that sampled.
        logits: [1, T, V]. Responses with their prompts end to end, then perhaps padding.
        sum_of_sample_mean: Not used.

    Returns:
        The loss and slime's metrics, sums like it.

    Raises:
        ValueError: If the run does not use the per-token loss, or cuts responses or logits up.
    """
    _expect_supported(args, batch, logits)
    at = _logits_of_responses(batch, logits.device)

    def scattered(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        return torch.zeros(logits.shape[1], dtype=dtype, device=logits.device).index_copy(
            0, at, torch.cat(parts).to(logits.device, dtype)
        )

    pairs = zip(batch["unconcat_tokens"], batch["response_lengths"], strict=True)
    responses = [tokens[len(tokens) - length :] for tokens, length in pairs]
    token_ids, mask = scattered(responses, torch.int64), scattered(batch["loss_masks"], torch.bool)
    given = batch["rollout_log_probs"] if args.use_rollout_logprobs else batch.get("log_probs")
    if given:
        old_logprobs = scattered(given, torch.float32)
    else:  # slime skips them where the policy has not moved since the rollout.
        old_logprobs = token_logprobs(
            logits[0].detach(), token_ids, mask=mask, temperature=args.rollout_temperature
        ).logprobs
    out = fused_policy_loss(
        logits[0],
        token_ids,
        old_logprobs,
        scattered(batch["advantages"], torch.float32),
        mask,
        clip_low=args.eps_clip,
        clip_high=args.eps_clip_high,
        dual_clip=args.eps_clip_c,
        temperature=args.rollout_temperature,
        num_tokens=1,
        ref_logprobs=scattered(batch["ref_log_probs"], torch.float32) if args.use_kl_loss else None,
        kl_weight=float(args.kl_loss_coef) if args.use_kl_loss else 0.0,
        entropy_weight=args.entropy_coef,
    )
    metrics = {
        "loss": out.loss.detach().clone(),
        "pg_loss": out.policy,
        "entropy_loss": out.entropy,
        "pg_clipfrac": out.clip_fraction,
        "ppo_kl": out.approx_kl,
    }
    return out.loss, metrics | ({"kl_loss": out.kl} if args.use_kl_loss else {})


def _logits_of_responses(batch: dict[str, Any], device: torch.device) -> Tensor:
    """Rows of the packed logits that predict the response tokens: each one position before its token."""
    rows, end = [], 0
    for total, length in zip(batch["total_lengths"], batch["response_lengths"], strict=True):
        end += total
        rows.append(torch.arange(end - length - 1, end - 1, device=device))
    return torch.cat(rows)


def _expect_supported(args: Namespace, batch: dict[str, Any], logits: Tensor) -> None:
    if not args.calculate_per_token_loss:
        raise ValueError("calculate_per_token_loss: expected True, for a mean over tokens, got False")
    for name in ("tensor_model_parallel_size", "context_parallel_size"):
        if getattr(args, name, 1) != 1:
            raise ValueError(f"{name}: expected 1, for whole rows of logits, got {getattr(args, name)}")
    if logits.dim() != 3 or logits.shape[0] != 1 or logits.shape[1] < sum(batch["total_lengths"]):
        raise ValueError(
            f"logits: expected [1, T, V] with T at least {sum(batch['total_lengths'])}, got {tuple(logits.shape)}"
        )
    if args.use_kl_loss and args.kl_loss_type not in ("k3", "low_var_kl"):
        raise ValueError(f"kl_loss_type: expected k3 or low_var_kl, got {args.kl_loss_type}")
