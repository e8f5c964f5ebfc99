"""The two sides of a task: problems to train on and problems held out, told apart by the prompt alone."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable

from vapo.tasks import Problem

PATIENCE = 1000  # Draws without a new problem after which there are taken to be no more.


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
    num_held_out: int | None = None,
) -> list[Problem]:
    """Draw problems from one side of the split.

    Args:
        draw: Makes one problem of either side.
        count: How many, at least 0. Held-out problems are all different; the others may repeat.
        rng: Source of randomness.
        held_out: Draw from the eighth that training never sees.
        num_held_out: The most that may be asked for of it, where that is known.

    Raises:
        ValueError: If ``count`` is negative, larger than ``num_held_out`` for held-out problems, or larger than what a
            thousand draws in a row can add to.
    """
    if count < 0 or (held_out and num_held_out is not None and count > num_held_out):
        most = "" if num_held_out is None else f" and <= {num_held_out} for held-out problems"
        raise ValueError(f"count must be >= 0{most}; got {count}")
    drawn: list[Problem] = []
    seen: set[str] = set()
    last = tries = 0
    while len(drawn) < count:
        problem, tries = draw(rng), tries + 1
        prompt = str(problem.prompt)
        if is_held_out(problem.prompt) == held_out and not (held_out and prompt in seen):
            seen.add(prompt)
            drawn.append(problem)
            last = tries
        elif tries - last >= PATIENCE:
            side = "held-out" if held_out else "training"
            raise ValueError(f"count must be at most {len(drawn)}, the {side} problems that were found; got {count}")
    return drawn
