"""The two sides of a task: problems to train on and held-out problems; the prompt alone decides."""

from __future__ import annotations

import json
import random
import zlib

from vapo.tasks import Problem

PATIENCE = 1000  # Samples in a row without a new problem, after which we take it that there are no more.


def prompt_crc32(prompt: str | list[dict[str, str]]) -> int:
    """Return the CRC-32 of a prompt, or of the JSON text of its messages; the same on every machine."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False, sort_keys=True)
    return zlib.crc32(text.encode())


def is_held_out(prompt: str | list[dict[str, str]]) -> bool:
    """Return whether a prompt is in the eighth of all prompts that training never sees."""
    return prompt_crc32(prompt) % 8 == 0


class GeneratedTask:
    """A task that generates its problems; on which side of the split one is depends on its prompt alone.

    Attributes:
        num_held_out: How many held-out problems may be asked for at most, where that is known.
    """

    num_held_out: int | None = None

    def problems(self, count: int, rng: random.Random, *, held_out: bool = False) -> list[Problem]:
        """Sample problems from one side of the split.

        Args:
            count: How many, at least 0. Held-out problems are all different; the others may repeat.
            rng: Source of randomness.
            held_out: Sample from the eighth of all prompts that training never sees.

        Raises:
            ValueError: If ``count`` is negative, or larger than the number of different held-out problems: it is above
                ``num_held_out``, or a thousand samples in a row bring nothing new.
        """
        if count < 0 or (held_out and self.num_held_out is not None and count > self.num_held_out):
            most = "" if self.num_held_out is None else f" and <= {self.num_held_out} for held-out problems"
            raise ValueError(f"count must be >= 0{most}; got {count}")
        problems: list[Problem] = []
        seen: set[str] = set()
        failures = 0
        while len(problems) < count:
            problem = self._generate(rng)
            prompt = str(problem.prompt)
            if is_held_out(problem.prompt) == held_out and not (held_out and prompt in seen):
                seen.add(prompt)
                problems.append(problem)
                failures = 0
                continue
            failures += 1
            if failures == PATIENCE:
                side = "held-out" if held_out else "training"
                raise ValueError(f"count must be at most {len(problems)}, the {side} problems found; got {count}")
        return problems

    def state_dict(self) -> dict:
        """Return nothing: problems depend on ``rng`` alone."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Do nothing: there is no state."""

    def _generate(self, rng: random.Random) -> Problem:
        """One problem of either side."""
        raise NotImplementedError
