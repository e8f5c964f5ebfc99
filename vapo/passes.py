"""What the models say of a rollout before any step on it: log-probs and values, without gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vapo.config import Config
from vapo.models import plain_head
from vapo.packing import (
    all_rows,
    even_micro_batches,
    final_values,
    state_features,
    state_values,
    token_indices,
    token_logits,
)
from vapo.sharding import inside
from vapo.types import Rollout
from vapo_kernels import linear_token_logprobs, token_logprobs


@dataclass(frozen=True, slots=True)
class Passes:
    """What the models say of S responses, N tokens.

    Attributes:
        old_logprobs: [N] float32. log π_old of the sampled tokens, Eq. 4.
        ref_logprobs: [N] float32 or None. The same of the policy before RL, Eq. 2.
        values: [N] float32 or None. V(s_t) before each sampled token.
        final_values: [S] float32 or None. V(s_l) of cut responses, 0 of others.
    """

    old_logprobs: Tensor
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    final_values: Tensor | None = None


@torch.no_grad()
def rollout_logprobs(policy: PreTrainedModel, rollout: Rollout, config: Config) -> Tensor:
    """log π of every sampled token at the sampling temperature, [N] float32, without gradient."""
    logprobs = torch.zeros_like(rollout.rewards)
    for rows, counts in even_micro_batches(rollout, all_rows(rollout), config.micro_batch_tokens):
        tokens = token_indices(rollout.cu_seqlens, rows)
        found = inside(policy, _logprobs, rollout, rows, tokens, config.temperature)
        if counts:
            logprobs[tokens] = found
    return logprobs


def _logprobs(policy: PreTrainedModel, rollout: Rollout, rows: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    token_ids, head = rollout.token_ids[tokens], plain_head(policy)
    if head is None:
        return token_logprobs(token_logits(policy, rollout, rows), token_ids, temperature=temperature).logprobs
    features = state_features(policy, rollout, rows)
    return linear_token_logprobs(features, head.weight, token_ids, bias=head.bias, temperature=temperature).logprobs


@torch.no_grad()
def rollout_values(critic: PreTrainedModel, rollout: Rollout, config: Config) -> Tensor:
    """V(s_t) of the state before every sampled token, [N] float32, without gradient."""
    values = torch.zeros_like(rollout.rewards)
    for rows, counts in even_micro_batches(rollout, all_rows(rollout), config.micro_batch_tokens):
        found = inside(critic, state_values, rollout, rows)
        if counts:
            values[token_indices(rollout.cu_seqlens, rows)] = found
    return values


@torch.no_grad()
def truncated_values(critic: PreTrainedModel, rollout: Rollout, config: Config) -> Tensor:
    """V(s_l), the bootstrap of cut responses and 0 for others, [S] float32, without gradient."""
    values = torch.zeros(len(rollout.is_truncated), device=rollout.rewards.device)
    truncated = all_rows(rollout)[rollout.is_truncated]
    for rows, counts in even_micro_batches(rollout, truncated, config.micro_batch_tokens):
        found = inside(critic, final_values, rollout, rows)
        if counts:
            values[rows] = found
    return values
