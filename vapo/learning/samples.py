"""The responses that a step records: some of all, and those that made it skip an optimiser step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor

from vapo.config import Config
from vapo.learning.learner import Learner
from vapo.models.forward import rollout_logprobs, rollout_values
from vapo.models.sharding import gather_objects, sum_over_ranks
from vapo.tasks import Problem
from vapo.types import Batch

# Of the responses that made a step skip.
MOST_RECORDED = 8

T = TypeVar("T")


def response_records(batch: Batch, problems: list[Problem], texts: list[str]) -> list[dict[str, object]]:
    """The record of each response, as ``samples.jsonl`` has it; those to one problem stand side by side."""
    rollout, group_size = batch.rollout, len(texts) // len(problems)
    least, most = (torch.segment_reduce(batch.advantages, kind, lengths=rollout.lengths) for kind in ("min", "max"))
    prompts = [problem.prompt for problem in problems for _ in range(group_size)]
    columns = (prompts, texts, *(x.tolist() for x in (rollout.scores, rollout.is_correct, least, most)))
    names = ("prompt", "response", "reward", "is_correct", "advantage_min", "advantage_max")
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


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
    """Find why steps on a batch were skipped; collective.

    Args:
        learner: Its models run once more, since what is not finite may be in their weights.
        batch: What they were trained on.
        samples: A record of each of this rank's responses, as ``samples.jsonl`` has it.
        config: The run's settings.

    Returns:
        A sentence, and the records of the responses that it means, of all ranks, at most ``MOST_RECORDED``; each has
        the name of what is not finite as ``not_finite``.
    """
    for name, x in _in_order_of_computation(learner, batch, config):
        is_bad = ~x.isfinite() & batch.mask
        is_bad = torch.segment_reduce(is_bad.float(), "max", lengths=batch.rollout.lengths)
        count = int(sum_over_ranks(is_bad.sum()))
        if count:
            rows = is_bad.nonzero().flatten().tolist()[:MOST_RECORDED]
            parts = gather_objects([samples[row] | {"not_finite": name} for row in rows])
            bad = [sample for part in parts for sample in part][:MOST_RECORDED]
            first = f"{str(bad[0]['prompt'])[:200]!r} → {str(bad[0]['response'])[:200]!r}"
            return (
                f"{name} is not finite in {count} responses ({len(bad)} are in samples.jsonl; the first: {first})",
                bad,
            )
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
