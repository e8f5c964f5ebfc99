"""The responses that a step records: some of all, and those that made it skip an optimiser step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor

from vapo.config import Config
from vapo.learning.learner import Learner
from vapo.models.forward import rollout_logprobs, rollout_values
from vapo.models.sharding import gather_objects, max_over_ranks
from vapo.tasks import Problem
from vapo.types import Batch

# Of the responses that made a step skip.
MOST_RECORDED = 8

T = TypeVar("T")


def response_records(batch: Batch, problems: list[Problem], texts: list[str]) -> list[dict[str, object]]:
    """The record of each response, as ``samples.jsonl`` has it; those to one problem stand side by side."""
    rollout, group_size = batch.rollout, len(texts) // len(problems)
    advantages = batch.advantages.split(rollout.lengths.tolist())
    columns = zip(texts, rollout.scores.tolist(), rollout.is_correct.tolist(), advantages, strict=True)
    return [
        {
            "prompt": problems[row // group_size].prompt,
            "response": text,
            "reward": score,
            "is_correct": is_correct,
            "advantage_min": each.min().item(),
            "advantage_max": each.max().item(),
        }
        for row, (text, score, is_correct, each) in enumerate(columns)
    ]


def evenly_spread(items: list[T], count: int) -> list[T]:
    """Pick ``count`` items, evenly spread; all if there are fewer.

    Example:
        >>> evenly_spread(list("abcdef"), 2)
        ['a', 'd']
    """
    count = min(count, len(items))
    return [items[number * len(items) // count] for number in range(count)]


def skipped_responses(
    learner: Learner, batch: Batch, samples: list[dict[str, object]], config: Config
) -> tuple[str, list[dict[str, object]]]:
    """Say why steps on a batch were skipped; collective.

    Args:
        learner: Its models are asked again, since what is not finite may be in their weights.
        batch: What they were trained on.
        samples: A record of each of this rank's responses, as ``samples.jsonl`` has it.
        config: The run's settings.

    Returns:
        A sentence, and the records of the responses that it means, of all ranks, at most ``MOST_RECORDED``; each has
        the name of what is not finite as ``not_finite``.
    """
    for name, x in _in_order_of_computation(learner, batch, config):
        is_bad = ~x.isfinite() & batch.mask
        rows = torch.segment_reduce(is_bad.float(), "max", lengths=batch.rollout.lengths, initial=0).nonzero()
        if max_over_ranks(len(rows)):
            found = gather_objects([samples[row] | {"not_finite": name} for row in rows.flatten().tolist()])
            bad = [sample for part in found for sample in part]
            first = f"{str(bad[0]['prompt'])[:200]!r} → {str(bad[0]['response'])[:200]!r}"
            recorded = f"samples.jsonl has {min(len(bad), MOST_RECORDED)} of them; the first: {first}"
            return f"{name} is not finite in {len(bad)} responses ({recorded})", bad[:MOST_RECORDED]
    return "all inputs, log-probs and values are finite: the loss or the gradient overflowed", []


def _in_order_of_computation(learner: Learner, batch: Batch, config: Config) -> Iterator[tuple[str, Tensor]]:
    """What a step depends on, [N] each: one value that is not finite spreads to all that follow."""
    yield "old_logprobs", batch.old_logprobs
    if batch.ref_logprobs is not None:
        yield "ref_logprobs", batch.ref_logprobs
    yield "rewards", batch.rewards
    yield "old_values", batch.old_values
    yield "returns", batch.returns
    yield "advantages", batch.advantages
    yield "logprobs", rollout_logprobs(learner.policy, batch.rollout, config)
    if learner.critic is not None:
        yield "values", rollout_values(learner.critic, batch.rollout, config)
