"""One optimiser step of the policy, one of the critic. Micro-batches add up to the undivided step exactly."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vapo.config import Config
from vapo.packing import micro_batches, state_values, token_indices, token_logits
from vapo.types import Batch
from vapo_kernels import policy_loss, value_loss


def update_policy(
    policy: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: Batch, rows: Tensor, config: Config
) -> dict[str, float]:
    """Take one step on L = L_PPO + μ L_NLL (Eq. 3, 16, 17) over the responses ``rows``.

    Args:
        policy: The policy.
        optimizer: Its optimiser.
        batch: All responses of the rollout.
        rows: [R] int64. The responses of this mini-batch.
        config: Clip range, μ, temperature and the switches that govern them.

    Returns:
        The loss terms over the whole mini-batch and the gradient's norm before clipping.
    """
    totals = accumulate_policy_loss(policy, batch, rows, config)
    grad_norm = _step(policy, optimizer, config)
    return dict(zip(_POLICY_METRICS, totals.tolist(), strict=True)) | {"actor/grad_norm": grad_norm}


def accumulate_policy_loss(policy: PreTrainedModel, batch: Batch, rows: Tensor, config: Config) -> Tensor:
    """Add the gradient of Eq. 17 over ``rows`` to the parameters, one micro-batch at a time.

    Returns:
        [6] float32: the terms named in ``_POLICY_METRICS``, each divided by the counts of the whole mini-batch.
    """
    rollout = batch.rollout
    lengths, is_correct = rollout.lengths[rows], rollout.is_correct[rows]
    num_tokens, num_correct_tokens = lengths.sum(), (lengths * is_correct).sum()
    totals = torch.zeros(len(_POLICY_METRICS), device=policy.device)
    for micro_rows in micro_batches(rollout, rows, config.micro_batch_tokens):
        tokens = token_indices(rollout.cu_seqlens, micro_rows)
        micro_lengths = rollout.lengths[micro_rows]
        weights = None if config.token_level_loss else response_mean_weights(micro_lengths, num_tokens, len(rows))
        out = policy_loss(
            token_logits(policy, rollout, micro_rows),
            rollout.token_ids[tokens],
            batch.old_logprobs[tokens],
            batch.advantages[tokens],
            torch.ones_like(tokens, dtype=torch.bool),
            is_correct=rollout.is_correct[micro_rows].repeat_interleave(micro_lengths),
            clip_low=config.clip_low,
            clip_high=config.used_clip_high,
            nll_weight=config.used_nll_weight,
            temperature=config.temperature,
            num_tokens=num_tokens,
            num_correct_tokens=num_correct_tokens,
            token_weights=weights,
        )
        out.loss.backward()  # Eq. 17
        terms = (out.policy, out.positive_nll, out.entropy, out.approx_kl, out.clip_fraction, out.loss)
        totals += torch.stack(terms).detach()
    return totals


def response_mean_weights(lengths: Tensor, num_tokens: Tensor, num_responses: int) -> Tensor:
    """Weight of each token that turns a mean over tokens into a mean over responses of means over their tokens.

    Args:
        lengths: [R] int64. Lengths of the responses whose tokens are weighted.
        num_tokens: Tokens of the whole optimiser step.
        num_responses: B, the responses of the whole optimiser step.

    Returns:
        [sum of lengths] float32: num_tokens / (B · l).

    Example:
        >>> response_mean_weights(torch.tensor([1, 3]), torch.tensor(4), 2)
        tensor([2.0000, 0.6667, 0.6667, 0.6667])
    """
    return (num_tokens / (num_responses * lengths)).repeat_interleave(lengths)


def update_critic(
    critic: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    rows: Tensor,
    config: Config,
    *,
    value_clip: float | None,
) -> dict[str, float]:
    """Take one step on the mean of ½ (V(s_t) − R̂_t)² (Eq. 10) over the tokens of the responses ``rows``."""
    totals = accumulate_value_loss(critic, batch, rows, config, value_clip=value_clip)
    grad_norm = _step(critic, optimizer, config)
    loss, clip_fraction = totals.tolist()
    return {"critic/vf_loss": loss, "critic/vf_clipfrac": clip_fraction, "critic/grad_norm": grad_norm}


def accumulate_value_loss(
    critic: PreTrainedModel, batch: Batch, rows: Tensor, config: Config, *, value_clip: float | None
) -> Tensor:
    """Add the gradient of Eq. 10 over ``rows`` to the parameters; returns [2] float32: loss and clip fraction."""
    rollout = batch.rollout
    num_tokens = rollout.lengths[rows].sum()
    totals = torch.zeros(2, device=critic.device)
    for micro_rows in micro_batches(rollout, rows, config.micro_batch_tokens):
        tokens = token_indices(rollout.cu_seqlens, micro_rows)
        out = value_loss(
            state_values(critic, rollout, micro_rows),
            batch.returns[tokens],
            torch.ones_like(tokens, dtype=torch.bool),
            old_values=None if value_clip is None else batch.old_values[tokens],
            clip=value_clip,
            num_tokens=num_tokens,
        )
        out.loss.backward()  # Eq. 10
        totals += torch.stack((out.loss, out.clip_fraction)).detach()
    return totals


def split_rows(num_rows: int, num_parts: int, generator: torch.Generator) -> list[Tensor]:
    """Shuffle the numbers below ``num_rows`` and cut them into ``num_parts`` parts whose sizes differ by at most 1."""
    return list(torch.randperm(num_rows, generator=generator).tensor_split(num_parts))


def mean_metrics(metrics: list[dict[str, float]]) -> dict[str, float]:
    """Average each metric over the optimiser steps of a rollout."""
    return {name: sum(each[name] for each in metrics) / len(metrics) for name in metrics[0]} if metrics else {}


_POLICY_METRICS = (
    "actor/pg_loss",
    "actor/nll_loss",
    "actor/entropy",
    "actor/ppo_kl",
    "actor/pg_clipfrac",
    "actor/loss",
)


def _step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, config: Config) -> float:
    """Clip the gradient, step, clear; returns the norm before clipping."""
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return grad_norm.item()
