"""Tasks: where prompts, demonstrations and verified answers come from."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TASK_NAMES = ("running-total",)


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with its checkable answer."""

    prompt: str
    answer: str


class Task(Protocol):
    """What the trainer needs of a task."""

    name: str
    tokenizer: PreTrainedTokenizerFast

    def problems(self, count: int, rng: random.Random, *, held_out: bool = False) -> list[Problem]:
        """Draw problems; those held out and those trained on never share a prompt."""

    def demonstration(self, problem: Problem, rng: random.Random, *, give_up: float = 0.0, error: float = 0.0) -> str:
        """Write a response to imitate, the end-of-sequence token included."""

    def is_correct(self, problem: Problem, response: str) -> bool:
        """Verify a finished response, given without its end-of-sequence token."""


def load_task(name: str) -> Task:
    """Build the task called ``name``.

    Raises:
        ValueError: If there is no such task.
    """
    if name == "running-total":
        from vapo.tasks.running_total import RunningTotal

        return RunningTotal()
    raise ValueError(f"task must be one of {', '.join(TASK_NAMES)}; got {name!r}")
