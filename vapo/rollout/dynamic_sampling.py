"""Dynamic sampling (DAPO): a batch of prompts whose responses are neither all correct nor all wrong."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vapo.models.sharding import max_over_ranks, mean_over_ranks
from vapo.rollout.collect import Collected
from vapo.tasks import Problem
from vapo.types import Rollout


def sample_informative(
    next_problems: Callable[[], list[Problem]],
    collect: Callable[[list[Problem]], Collected],
    *,
    num_prompts: int,
    max_rounds: int,
) -> tuple[Collected, dict[str, float]]:
    """Sample rounds of prompts until ``num_prompts`` of them are informative on every rank.

    A prompt is informative if some of its responses are correct and some wrong, by the verifier's result, not by shaped
    rewards. After ``max_rounds`` rounds other prompts fill the batch: their group advantages are zero. A rank that has
    its share waits for the others.

    Args:
        next_problems: Gives the problems of a round.
        collect: Samples and verifies the responses to problems.
        num_prompts: Prompts that the batch shall have.
        max_rounds: Most rounds, >= 1.

    Returns:
        The batch, and two metrics: ``rollout/rounds``, how many rounds there were, and ``rollout/informative_groups``,
        the share of informative prompts among all that were sampled on all ranks.
    """
    parts: list[Collected] = []
    missing, rounds = num_prompts, 0
    while rounds < max_rounds and max_over_ranks(missing) > 0:
        rounds += 1
        # The ranks go through the same data in step, whether they sample or wait.
        problems = next_problems()
        if missing > 0:
            parts.append(collect(problems))
            is_informative = torch.cat([informative_groups(part.rollout) for part in parts])
            missing = num_prompts - int(is_informative.sum())
    # Informative prompts first, each kind in the order in which it was sampled.
    chosen = (~is_informative).long().argsort(stable=True)[:num_prompts].sort().values.tolist()
    metrics = {"rollout/rounds": float(rounds), "rollout/informative_groups": mean_over_ranks(is_informative.float())}
    return Collected.cat(parts).select(chosen), metrics


def informative_groups(rollout: Rollout) -> Tensor:
    """[P] bool on the CPU. Groups with both correct and wrong responses."""
    correct = rollout.is_correct.view(-1, rollout.group_size).cpu()
    return correct.any(1) & ~correct.all(1)
