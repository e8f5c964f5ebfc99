"""One optimiser step of the policy, one of the critic. Micro-batches and ranks add up to the undivided step exactly."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vapo.config import Config
from vapo.models.forward import even_micro_batches, state_features, state_values, token_indices, token_logits
from vapo.models.load import plain_head
from vapo.models.sharding import clip_grad_norm, inside, sum_over_ranks
from vapo.types import Batch
from vapo_kernels import linear_policy_loss, policy_loss, value_loss


def update_policy(
    policy: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: Batch, rows: Tensor, config: Config
) -> dict[str, float]:
    """Take one step on L = L_PPO + μ L_NLL (Eq. 3, 16, 17) over the responses ``rows``.

    Args:
        policy: The policy.
        optimizer: Its optimiser.
        batch: All responses of the rollout.
        rows: [R] int64. The responses of this mini-batch; with several ranks, this rank's share of it.
        config: Clip range, μ, temperature and the switches that govern them.

    Returns:
        The loss terms over the whole mini-batch and the gradient's norm before clipping.
    """
    totals = sum_over_ranks(accumulate_policy_loss(policy, batch, rows, config))
    grad_norm = clipped_step(policy, optimizer, config)
    return dict(zip(_POLICY_METRICS, totals.tolist(), strict=True)) | {"actor/grad_norm": grad_norm}


def accumulate_policy_loss(policy: PreTrainedModel, batch: Batch, rows: Tensor, config: Config) -> Tensor:
    """Add the gradient of Eq. 17 over ``rows`` to the parameters, one micro-batch at a time.

    Returns:
        [7] float32: the terms named in ``_POLICY_METRICS``, each divided by the counts of the whole mini-batch; they
        are this rank's part of it.
    """
    rollout, counts = batch.rollout, count_tokens(batch, rows)
    totals = torch.zeros(len(_POLICY_METRICS), device=policy.device)
    for micro_rows, trains in even_micro_batches(rollout, rows, config.micro_batch_tokens):
        out = inside(policy, _policy_loss, batch, micro_rows, trains, counts, config)
        out.loss.backward()  # Eq. 17
        terms = (out.policy, out.positive_nll, out.kl, out.entropy, out.approx_kl, out.clip_fraction, out.loss)
        totals += torch.stack(terms).detach()
    return totals


def count_tokens(batch: Batch, rows: Tensor) -> Tensor:
    """Count over the whole mini-batch and all ranks: [3] int64, tokens, tokens of correct responses, responses."""
    rollout = batch.rollout
    lengths = torch.segment_reduce(batch.mask.float(), "sum", lengths=rollout.lengths).long()[rows]
    return sum_over_ranks(torch.stack((lengths.sum(), (lengths * rollout.is_correct[rows]).sum(), (lengths > 0).sum())))


def _policy_loss(
    policy: PreTrainedModel, batch: Batch, rows: Tensor, trains: bool, counts: Tensor, config: Config
) -> object:
    """Eq. 17 over the responses ``rows``: from hidden states where the model's head is a plain matrix."""
    rollout, (num_tokens, num_correct_tokens, num_responses) = batch.rollout, counts
    tokens, lengths = token_indices(rollout.cu_seqlens, rows), rollout.lengths[rows]
    weights = None if config.token_level_loss else response_mean_weights(lengths, num_tokens, num_responses)
    arguments = (
        rollout.token_ids[tokens],
        batch.old_logprobs[tokens],
        batch.advantages[tokens],
        batch.mask[tokens] & trains,
    )
    settings = dict(
        is_correct=rollout.is_correct[rows].repeat_interleave(lengths),
        clip_low=config.clip_low,
        clip_high=config.used_clip_high,
        dual_clip=config.dual_clip,
        nll_weight=config.used_nll_weight,
        temperature=config.temperature,
        num_tokens=num_tokens,
        num_correct_tokens=num_correct_tokens,
        ref_logprobs=batch.ref_logprobs[tokens] if config.kl_weight else None,
        kl_weight=config.kl_weight,
        entropy_weight=config.entropy_weight,
        token_weights=weights,
    )
    head = plain_head(policy)
    if head is None:
        return policy_loss(token_logits(policy, rollout, rows), *arguments, **settings)
    return linear_policy_loss(
        state_features(policy, rollout, rows), head.weight, *arguments, bias=head.bias, **settings
    )


def response_mean_weights(lengths: Tensor, num_tokens: Tensor, num_responses: Tensor) -> Tensor:
    """Weight of each token that turns a mean over tokens into a mean over responses of means over their tokens.

    Args:
        lengths: [R] int64. Lengths of the responses whose tokens are weighted.
        num_tokens: Tokens of the whole optimiser step.
        num_responses: B, the responses of the whole optimiser step.

    Returns:
        [sum of lengths] float32: num_tokens / (B · l).

    Example:
        >>> response_mean_weights(torch.tensor([1, 3]), torch.tensor(4), torch.tensor(2))
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
    totals = sum_over_ranks(accumulate_value_loss(critic, batch, rows, config, value_clip=value_clip))
    grad_norm = clipped_step(critic, optimizer, config)
    loss, clip_fraction = totals.tolist()
    return {"critic/vf_loss": loss, "critic/vf_clipfrac": clip_fraction, "critic/grad_norm": grad_norm}


def accumulate_value_loss(
    critic: PreTrainedModel, batch: Batch, rows: Tensor, config: Config, *, value_clip: float | None
) -> Tensor:
    """Add the gradient of Eq. 10 over ``rows`` to the parameters; returns [2] float32: loss and clip fraction."""
    num_tokens = count_tokens(batch, rows)[0]
    totals = torch.zeros(2, device=critic.device)
    for micro_rows, trains in even_micro_batches(batch.rollout, rows, config.micro_batch_tokens):
        out = inside(critic, _value_loss, batch, micro_rows, trains, num_tokens, value_clip)
        out.loss.backward()  # Eq. 10
        totals += torch.stack((out.loss, out.clip_fraction)).detach()
    return totals


def _value_loss(
    critic: PreTrainedModel, batch: Batch, rows: Tensor, trains: bool, num_tokens: Tensor, value_clip: float | None
) -> object:
    tokens = token_indices(batch.rollout.cu_seqlens, rows)
    return value_loss(
        state_values(critic, batch.rollout, rows),
        batch.returns[tokens],
        batch.mask[tokens] & trains,
        old_values=None if value_clip is None else batch.old_values[tokens],
        clip=value_clip,
        num_tokens=num_tokens,
    )


def split_rows(num_rows: int, num_parts: int, generator: torch.Generator) -> list[Tensor]:
    """Shuffle the numbers below ``num_rows`` and cut them into ``num_parts`` parts whose sizes differ by at most 1."""
    return list(torch.randperm(num_rows, generator=generator).tensor_split(num_parts))


def mean_metrics(metrics: list[dict[str, float]]) -> dict[str, float]:
    """Average each metric over the optimiser steps of a rollout."""
    return {name: sum(each[name] for each in metrics) / len(metrics) for name in metrics[0]} if metrics else {}


_POLICY_METRICS = (
    "actor/pg_loss",
    "actor/nll_loss",
    "actor/kl",
    "actor/entropy",
    "actor/ppo_kl",
    "actor/pg_clipfrac",
    "actor/loss",
)


def clipped_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, config: Config) -> float:
    """Clip the gradient, step, clear; returns the norm before clipping.

    Raises:
        FloatingPointError: If the norm is not finite; the step would make every weight NaN.
    """
    grad_norm = clip_grad_norm(model, config.max_grad_norm)
    if not math.isfinite(grad_norm):
        raise FloatingPointError(f"the gradient of {type(model).__name__} must be finite; got a norm of {grad_norm}")
    optimizer.step()
    optimizer.zero_grad()
    return grad_norm


def set_lr(optimizer: torch.optim.Optimizer, lr: float, step: int = 1, warmup: int = 0) -> float:
    """Set the learning rate of ``step``, from 1: a linear rise over ``warmup`` steps, then constant; returns it."""
    lr *= min(1.0, step / warmup) if warmup else 1.0
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr
