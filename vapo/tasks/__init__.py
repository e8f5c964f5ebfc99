"""Tasks: where prompts, demonstrations and verified answers come from."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

EMBEDDED_TASKS = ("running-total", "knights-knaves")
ISLANDER_REWARDS = ("all-right", "per-islander")  # of knights and knaves, embedded or of reasoning-gym


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with its checkable answer.

    Attributes:
        prompt: Text, or chat messages with ``role`` and ``content``.
        answer: What the verifier compares a response with; may be empty where a reward function needs none.
        data_source: Where it comes from; evaluation reports each source by itself.
        row: All columns of a data row, for reward functions.
    """

    prompt: str | list[dict[str, str]]
    answer: str
    data_source: str = ""
    row: dict[str, object] = field(default_factory=dict)


class Verdict(NamedTuple):
    """The verifier's result for one response.

    Attributes:
        score: The reward, which goes on the last sampled token.
        is_correct: Whether the answer is right; not derived from the sign of the score.
        error: What went wrong, where the verifier failed (then the score is 0): its traceback, or that it timed out.
    """

    score: float
    is_correct: bool
    error: str | None = None


class Task(Protocol):
    """What the trainer needs from a task."""

    name: str

    def problems(self, count: int, rng: random.Random, *, held_out: bool = False) -> list[Problem]:
        """Return problems; held-out ones and those to train on never share a prompt."""

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Verdict]:
        """Verify one finished response for each problem, given without special tokens."""

    def final_answer(self, response: str) -> str | None:
        """Return what a vote among responses compares; None for no vote."""

    def state_dict(self) -> dict:
        """Return, as JSON, the position in the data; empty if problems depend on ``rng`` alone."""

    def load_state_dict(self, state: dict) -> None:
        """Continue from a position that :meth:`state_dict` returned."""


class EmbeddedTask(Task, Protocol):
    """A task with a small language of its own, in which a small model is trained from scratch."""

    tokenizer: PreTrainedTokenizerFast

    def demonstration(self, problem: Problem, rng: random.Random, *, give_up: float = 0.0, error: float = 0.0) -> str:
        """Write a response to imitate, the end-of-sequence token included."""


def load_task(name: str, *, reward: str = "", reward_timeout: float = 10.0, split: str = "eighth") -> Task:
    """Build a task.

    Args:
        name: "running-total", "knights-knaves", "reasoning-gym:<dataset>", or .parquet and .jsonl files with commas
            between them.
        reward: "" is the task's own, "math" for files. Others: "math"; one of ``ISLANDER_REWARDS`` for knights and
            knaves; the user's own function as "file.py:function".
        reward_timeout: Seconds that the verifier may take for a response or, in TRL's form, for a batch.
        split: What is held out of files: an "eighth" of the prompts; "train": none; "held-out": all.

    Raises:
        ValueError: If there is no such task or reward, the data are malformed, or a package is missing.
    """
    from vapo.tasks.loading import load

    return load(name, reward=reward, reward_timeout=reward_timeout, split=split)
