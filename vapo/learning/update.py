"""One optimiser step of the policy, one of the critic. Micro-batches and ranks add up to the undivided step exactly."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vapo.config import Config
from vapo.models.forward import MicroBatch, over_micro_batches, state_features, state_values, token_logits, tokens_of
from vapo.models.output_head import plain_head
from vapo.models.sharding import clip_grad_norm, sum_over_ranks
from vapo.types import Batch
from vapo_kernels import linear_policy_loss, policy_loss, value_loss


class MiniBatch(NamedTuple):
    """The responses of one optimiser step.

    Attributes:
        rows: [R] int64. This rank's responses.
        counts: [3] int64. Tokens that train, those of correct responses, and responses that train, over all ranks.
    """

    rows: Tensor
    counts: Tensor


def mini_batches(batch: Batch, num_parts: int, epochs: int, generator: torch.Generator) -> list[MiniBatch]:
    """Shuffle the responses in each epoch and split them into ``num_parts`` optimiser steps."""
    num_rows = len(batch.rollout.lengths)
    parts = [rows.to(batch.mask.device) for _ in range(epochs) for rows in split_rows(num_rows, num_parts, generator)]
    return [MiniBatch(rows, counts) for rows, counts in zip(parts, count_tokens(batch, parts), strict=True)]


def count_tokens(batch: Batch, parts: Sequence[Tensor]) -> Tensor:
    """The counts of a :class:`MiniBatch` for each of its rows in ``parts``, [len(parts), 3] int64."""
    rollout = batch.rollout
    lengths = torch.segment_reduce(batch.mask.float(), "sum", lengths=rollout.lengths).long()
    per_response = torch.stack((lengths, lengths * rollout.is_correct, (lengths > 0).long()), 1)
    return sum_over_ranks(torch.stack([per_response[rows].sum(0) for rows in parts]))


def take_steps(
    name: str, update: Callable[[MiniBatch], dict[str, float]], parts: Sequence[MiniBatch], skips: Counter, limit: int
) -> dict[str, float]:
    """Take one optimiser step for each mini-batch, or fewer where ``limit`` in a row are skipped.

    Args:
        name: "actor" or "critic", the prefix of the metrics.
        update: Takes one step; returns its metrics, of which ``<name>/skipped_steps`` is 0 or 1.
        parts: The mini-batches.
        skips: By name, how many steps in a row were skipped up to now; counted on.
        limit: ``max_skipped_steps``.

    Returns:
        The mean of each metric over the steps that were taken, and the number of steps that were skipped.
    """
    steps: list[dict[str, float]] = []
    for part in parts:
        steps.append(update(part))
        skips[name] = skips[name] + 1 if steps[-1][f"{name}/skipped_steps"] else 0
        if skips[name] >= limit:
            break
    num_skipped = sum(step.pop(f"{name}/skipped_steps") for step in steps)
    taken = [step for step in steps if step]
    means = {metric: sum(step[metric] for step in taken) / len(taken) for metric in taken[0]} if taken else {}
    return means | {f"{name}/skipped_steps": num_skipped}


def update_policy(
    policy: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: Batch, mini_batch: MiniBatch, config: Config
) -> dict[str, float]:
    """Take one step on L = L_PPO + μ L_NLL (Eq. 3, 16, 17) over a mini-batch.

    Args:
        policy: The policy.
        optimizer: Its optimiser.
        batch: All responses of the rollout.
        mini_batch: Those of this step.
        config: Clip range, μ, temperature and the switches that govern them.

    Returns:
        The loss terms over the whole mini-batch, the gradient's norm before clipping and ``actor/skipped_steps``, as
        :func:`step_if_finite` gives them.
    """
    totals = sum_over_ranks(accumulate_policy_loss(policy, batch, mini_batch, config))
    return step_if_finite("actor", policy, optimizer, dict(zip(_POLICY_METRICS, totals.tolist(), strict=True)), config)


def accumulate_policy_loss(policy: PreTrainedModel, batch: Batch, mini_batch: MiniBatch, config: Config) -> Tensor:
    """Add the gradient of Eq. 17 over a mini-batch to the parameters, one micro-batch at a time.

    Returns:
        [7] float32: the terms named in ``_POLICY_METRICS``, each divided by the counts of the whole mini-batch; they
        are this rank's part of it.
    """
    rows, counts = mini_batch
    totals = torch.zeros(len(_POLICY_METRICS), device=policy.device)
    args = (config, batch, counts, config)
    for _, _, out in over_micro_batches(policy, _policy_loss, batch.rollout, rows, *args):
        out.loss.backward()  # Eq. 17
        terms = (out.policy, out.positive_nll, out.kl, out.entropy, out.approx_kl, out.clip_fraction, out.loss)
        totals += torch.stack(terms).detach()
    return totals


def _policy_loss(
    policy: PreTrainedModel, part: MicroBatch, is_own: bool, batch: Batch, counts: Tensor, config: Config
) -> object:
    """Eq. 17 over the responses ``part``: from hidden states where the model's head is a plain matrix."""
    rollout, (num_tokens, num_correct_tokens, num_responses) = batch.rollout, counts
    tokens, lengths = tokens_of(rollout, part), rollout.lengths[part.rows]
    weights = None
    if not config.token_level_loss:
        weights = response_mean_weights(lengths, num_tokens, num_responses, part.num_tokens)
    if batch.importance_weights is not None:
        importance = batch.importance_weights[tokens]  # Eq. 18
        weights = importance if weights is None else weights * importance
    arguments = (
        rollout.token_ids[tokens],
        batch.old_logprobs[tokens],
        batch.advantages[tokens],
        batch.mask[tokens] & is_own,
    )
    settings = dict(
        is_correct=rollout.is_correct[part.rows].repeat_interleave(lengths, output_size=part.num_tokens),
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
        return policy_loss(token_logits(policy, rollout, part), *arguments, **settings)
    return linear_policy_loss(
        state_features(policy, rollout, part), head.weight, *arguments, bias=head.bias, **settings
    )


def response_mean_weights(
    lengths: Tensor, num_tokens: Tensor, num_responses: Tensor, size: int | None = None
) -> Tensor:
    """Weight of each token that turns a mean over tokens into a mean over responses of means over their tokens.

    Args:
        lengths: [R] int64. Lengths of the responses whose tokens are weighted.
        num_tokens: Tokens of the whole optimiser step.
        num_responses: B, the responses of the whole optimiser step.
        size: Sum of ``lengths``; without it the host waits for the device.

    Returns:
        [sum of lengths] float32: num_tokens / (B · l).

    Example:
        >>> response_mean_weights(torch.tensor([1, 3]), torch.tensor(4), torch.tensor(2))
        tensor([2.0000, 0.6667, 0.6667, 0.6667])
    """
    return (num_tokens / (num_responses * lengths)).repeat_interleave(lengths, output_size=size)


def update_critic(
    critic: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    mini_batch: MiniBatch,
    config: Config,
    *,
    value_clip: float | None,
) -> dict[str, float]:
    """Take one step on the mean of ½ (V(s_t) − R̂_t)² (Eq. 10) over the tokens of a mini-batch."""
    totals = sum_over_ranks(accumulate_value_loss(critic, batch, mini_batch, config, value_clip=value_clip))
    loss, clip_fraction = totals.tolist()
    metrics = {"critic/vf_loss": loss, "critic/vf_clipfrac": clip_fraction}
    return step_if_finite("critic", critic, optimizer, metrics, config)


def accumulate_value_loss(
    critic: PreTrainedModel, batch: Batch, mini_batch: MiniBatch, config: Config, *, value_clip: float | None
) -> Tensor:
    """Add the gradient of Eq. 10 over a mini-batch to the parameters; returns [2] float32: loss and clip fraction."""
    rows, (num_tokens, *_) = mini_batch
    totals = torch.zeros(2, device=critic.device)
    args = (config, batch, num_tokens, value_clip)
    for _, _, out in over_micro_batches(critic, _value_loss, batch.rollout, rows, *args):
        out.loss.backward()  # Eq. 10
        totals += torch.stack((out.loss, out.clip_fraction)).detach()
    return totals


def _value_loss(
    critic: PreTrainedModel, part: MicroBatch, is_own: bool, batch: Batch, num_tokens: Tensor, value_clip: float | None
) -> object:
    tokens = tokens_of(batch.rollout, part)
    return value_loss(
        state_values(critic, batch.rollout, part),
        batch.returns[tokens],
        batch.mask[tokens] & is_own,
        old_values=None if value_clip is None else batch.old_values[tokens],
        clip=value_clip,
        num_tokens=num_tokens,
    )


def split_rows(num_rows: int, num_parts: int, generator: torch.Generator) -> list[Tensor]:
    """Shuffle the numbers below ``num_rows`` and split them into parts whose sizes differ by at most 1."""
    return list(torch.randperm(num_rows, generator=generator).tensor_split(num_parts))


_POLICY_METRICS = (
    "actor/pg_loss",
    "actor/nll_loss",
    "actor/kl",
    "actor/entropy",
    "actor/ppo_kl",
    "actor/pg_clipfrac",
    "actor/loss",
)


def step_if_finite(
    name: str, model: PreTrainedModel, optimizer: torch.optim.Optimizer, metrics: dict[str, float], config: Config
) -> dict[str, float]:
    """Clip the gradient, step, clear; where a metric or the gradient's norm is not finite, only clear.

    Such a step would make every weight NaN. All ranks see the same numbers, so they skip together.

    Args:
        name: "actor" or "critic", the prefix of the metrics.
        model: The model whose gradient was formed.
        optimizer: Its optimiser.
        metrics: Loss terms over all ranks.
        config: ``max_grad_norm`` is used.

    Returns:
        ``metrics``, the norm before clipping and ``<name>/skipped_steps`` = 0; the last alone, 1, if it was skipped.
    """
    grad_norm = clip_grad_norm(model, config.max_grad_norm)
    is_finite = all(map(math.isfinite, (*metrics.values(), grad_norm)))
    if is_finite:
        optimizer.step()
    optimizer.zero_grad()
    if not is_finite:
        return {f"{name}/skipped_steps": 1.0}
    return metrics | {f"{name}/grad_norm": grad_norm, f"{name}/skipped_steps": 0.0}


def set_lr(optimizer: torch.optim.Optimizer, lr: float, step: int = 1, warmup: int = 0) -> float:
    """Set the learning rate of ``step``, from 1: a linear rise over ``warmup`` steps, then constant; returns it."""
    lr *= min(1.0, step / warmup) if warmup else 1.0
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr
