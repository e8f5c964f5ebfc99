"""Rollout → Batch: old log-probs and values, then advantages and returns."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vapo.config import Config
from vapo.packing import all_rows, micro_batches, state_values, token_indices, token_logits
from vapo.types import Batch, Rollout
from vapo_kernels import length_adaptive_lambda, masked_whiten, packed_gae, token_logprobs


def build_batch(rollout: Rollout, old_logprobs: Tensor, old_values: Tensor, config: Config) -> Batch:
    """Estimate advantages with λ_policy and returns with λ_critic (Eq. 5, 9, 13–15).

    A response cut by the length limit counts as terminal: V(s_l) = 0 for all.

    Args:
        rollout: S responses, N tokens.
        old_logprobs: [N] float32.
        old_values: [N] float32.
        config: ``gamma``, ``alpha``, both λ, and the switches ``length_adaptive_gae``, ``decoupled_gae`` and
            ``whiten_advantages`` are used.
    """
    lam_policy = policy_lambda(rollout.lengths, config)
    gae = packed_gae(
        rollout.rewards,
        old_values,
        rollout.cu_seqlens,
        gamma=config.gamma,
        lam_policy=lam_policy,
        lam_critic=config.lam_critic if config.decoupled_gae else lam_policy,
    )
    advantages = gae.advantages
    if config.whiten_advantages:
        advantages = masked_whiten(advantages, torch.ones_like(advantages, dtype=torch.bool))
    return Batch(rollout, old_logprobs, old_values, advantages, gae.returns, lam_policy)


def policy_lambda(lengths: Tensor, config: Config) -> Tensor:
    """λ_policy of each response, [S] float32: Eq. 15, or ``lam_policy`` for all without length-adaptive GAE."""
    if config.length_adaptive_gae:
        return length_adaptive_lambda(lengths, alpha=config.alpha)
    return torch.full(lengths.shape, config.lam_policy, device=lengths.device)


@torch.no_grad()
def rollout_logprobs(policy: PreTrainedModel, rollout: Rollout, config: Config) -> Tensor:
    """log π(a_t|s_t) of every sampled token at the sampling temperature, [N] float32, without gradient."""
    logprobs = torch.empty_like(rollout.rewards)
    for rows in micro_batches(rollout, all_rows(rollout), config.micro_batch_tokens):
        tokens = token_indices(rollout.cu_seqlens, rows)
        logits = token_logits(policy, rollout, rows)
        logprobs[tokens] = token_logprobs(logits, rollout.token_ids[tokens], temperature=config.temperature).logprobs
    return logprobs


@torch.no_grad()
def rollout_values(critic: PreTrainedModel, rollout: Rollout, config: Config) -> Tensor:
    """V(s_t) of the state before every sampled token, [N] float32, without gradient."""
    values = torch.empty_like(rollout.rewards)
    for rows in micro_batches(rollout, all_rows(rollout), config.micro_batch_tokens):
        values[token_indices(rollout.cu_seqlens, rows)] = state_values(critic, rollout, rows)
    return values
