"""The two sides of a task: problems to train on and problems held out, told apart by the prompt alone."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable

from vapo.tasks import Problem


def prompt_crc32(prompt: str | list[dict[str, str]]) -> int:
    """Return the CRC-32 of a prompt, the same on every machine; that of messages is of their JSON text."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False, sort_keys=True)
    return zlib.crc32(text.encode())


def is_held_out(prompt: str | list[dict[str, str]]) -> bool:
    """Say whether a prompt is in the eighth of all prompts that training never sees."""
    return prompt_crc32(prompt) % 8 == 0


def draw_problems(
    draw: Callable[[random.Random], Problem],
    count: int,
    rng: random.Random,
    *,
    held_out: bool,
    num_held_out: int,
) -> list[Problem]:
    """Draw problems from one side of the split.

    Args:
        draw: Makes one problem of either side.
        count: How many, at least 0. Held-out problems are all different; the others may repeat.
        rng: Source of randomness.
        held_out: Draw from the eighth that training never sees.
        num_held_out: The most that may be asked for of it.

    Raises:
        ValueError: If ``count`` is negative, or larger than ``num_held_out`` for held-out problems.
    """
    if count < 0 or (held_out and count > num_held_out):
        raise ValueError(f"count must be in [0, {num_held_out}] for held-out problems and >= 0 otherwise; got {count}")
    found: dict[str, Problem] = {}
    drawn: list[Problem] = []
    while len(found if held_out else drawn) < count:
        problem = draw(rng)
        if is_held_out(problem.prompt) == held_out:
            found[str(problem.prompt)] = problem
            drawn.append(problem)
    return list(found.values()) if held_out else drawn
