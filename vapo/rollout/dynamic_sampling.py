"""Dynamic sampling (DAPO): a batch of prompts whose responses are neither all correct nor all wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vapo.models.forward import token_indices
from vapo.models.sharding import max_over_ranks, mean_over_ranks
from vapo.rollout.collect import Collected
from vapo.tasks import Problem
from vapo.types import Rollout


class Sampled(NamedTuple):
    """The responses that a step trains on.

    Attributes:
        problems: P problems.
        collected: Their P · group_size responses, texts and errors.
        rounds: How often was sampled, on the rank that sampled most.
        informative: Share of all sampled groups, over all ranks, in which responses differ in being correct.
    """

    problems: list[Problem]
    collected: Collected
    rounds: int
    informative: float


def sample_informative(
    draw: Callable[[], list[Problem]],
    collect: Callable[[list[Problem]], Collected],
    *,
    num_prompts: int,
    max_rounds: int,
) -> Sampled:
    """Sample rounds of prompts until ``num_prompts`` groups are informative on every rank.

    A group is judged by the verifier's word, not by shaped rewards. After ``max_rounds`` rounds the batch is filled
    with groups that were sampled but teach nothing: their group advantages are zero. A rank that has its share waits
    for the others.

    Args:
        draw: Gives the problems of a round.
        collect: Samples and verifies the responses to problems.
        num_prompts: Groups that the batch shall have.
        max_rounds: Most rounds, >= 1; 1 takes what the first round gives.
    """
    problems: list[Problem] = []
    parts: list[Collected] = []
    missing, rounds = num_prompts, 0
    while rounds < max_rounds and max_over_ranks(missing) > 0:
        rounds += 1
        # Ranks draw from the same data in step, whether they take their part or not.
        drawn = draw()
        if missing > 0:
            problems += drawn
            parts.append(collect(drawn))
            is_informative = torch.cat([informative_groups(part.rollout) for part in parts])
            missing = num_prompts - int(is_informative.sum())
    # Informative groups first, each kind in the order in which it was sampled.
    chosen = (~is_informative).long().argsort(stable=True)[:num_prompts].sort().values.tolist()
    return Sampled(
        [problems[group] for group in chosen],
        take_groups(join(parts), chosen),
        rounds,
        mean_over_ranks(is_informative.float()),
    )


def informative_groups(rollout: Rollout) -> Tensor:
    """[P] bool on the CPU. Groups with correct and wrong responses both."""
    correct = rollout.is_correct.view(-1, rollout.group_size).cpu()
    return correct.any(1) & ~correct.all(1)


def take_groups(collected: Collected, groups: Sequence[int]) -> Collected:
    """Keep the groups numbered ``groups``, in that order."""
    rollout, size = collected.rollout, collected.rollout.group_size
    rows = (torch.tensor(groups)[:, None] * size + torch.arange(size)).view(-1).to(rollout.token_ids.device)
    tokens = token_indices(rollout.cu_seqlens, rows)
    kept = Rollout(
        prompt_ids=rollout.prompt_ids[token_indices(rollout.prompt_cu_seqlens, rows)],
        prompt_cu_seqlens=_bounds(rollout.prompt_cu_seqlens.diff()[rows]),
        token_ids=rollout.token_ids[tokens],
        cu_seqlens=_bounds(rollout.lengths[rows]),
        rewards=rollout.rewards[tokens],
        is_correct=rollout.is_correct[rows],
        is_truncated=rollout.is_truncated[rows],
        group_size=size,
    )
    return Collected(kept, [collected.texts[row] for row in rows.tolist()], collected.errors)


def join(parts: Sequence[Collected]) -> Collected:
    """Lay rollouts of the same group size end to end."""
    rollouts = [part.rollout for part in parts]
    joined = Rollout(
        prompt_ids=torch.cat([rollout.prompt_ids for rollout in rollouts]),
        prompt_cu_seqlens=_bounds(torch.cat([rollout.prompt_cu_seqlens.diff() for rollout in rollouts])),
        token_ids=torch.cat([rollout.token_ids for rollout in rollouts]),
        cu_seqlens=_bounds(torch.cat([rollout.lengths for rollout in rollouts])),
        rewards=torch.cat([rollout.rewards for rollout in rollouts]),
        is_correct=torch.cat([rollout.is_correct for rollout in rollouts]),
        is_truncated=torch.cat([rollout.is_truncated for rollout in rollouts]),
        group_size=rollouts[0].group_size,
    )
    texts = [text for part in parts for text in part.texts]
    return Collected(joined, texts, [error for part in parts for error in part.errors])


def _bounds(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
