"""Held-out accuracy of a policy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from vapo.config import Config
from vapo.rollout import collect
from vapo.tasks import Problem, Task


def evaluate(
    policy: PreTrainedModel, task: Task, problems: Sequence[Problem], config: Config, seed: int
) -> dict[str, float]:
    """Answer each problem once by sampling and once greedily.

    Args:
        policy: The model.
        task: Its verifier.
        problems: Held-out problems.
        config: ``temperature`` and ``max_new_tokens`` are used.
        seed: Seed of the sampling; with the same seed two policies meet the same random numbers.

    Returns:
        ``val/accuracy_sampled`` at the training temperature, ``val/accuracy_greedy``, and the sampled responses' mean
        length ``val/response_length``.
    """
    generator = torch.Generator(policy.device).manual_seed(seed)
    rollouts = [
        collect(
            policy,
            task,
            problems,
            group_size=1,
            max_new_tokens=config.max_new_tokens,
            temperature=temperature,
            generator=generator,
        )[0]
        for temperature in (config.temperature, 0.0)
    ]
    sampled, greedy = rollouts
    return {
        "val/accuracy_sampled": sampled.is_correct.float().mean().item(),
        "val/accuracy_greedy": greedy.is_correct.float().mean().item(),
        "val/response_length": sampled.lengths.float().mean().item(),
    }
