"""Tasks: where prompts, demonstrations and verified answers come from."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

EMBEDDED_TASKS = ("running-total", "knights-knaves")


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with its checkable answer.

    Attributes:
        prompt: Text, or chat messages with ``role`` and ``content``.
        answer: What a verifier compares with; may be empty where a reward function needs none.
        data_source: Where it comes from; evaluation reports each source apart.
        row: All columns of a data row, for reward functions.
    """

    prompt: str | list[dict[str, str]]
    answer: str
    data_source: str = ""
    row: dict[str, object] = field(default_factory=dict)


class Verdict(NamedTuple):
    """A verifier's word on one response.

    Attributes:
        score: The reward, which goes on the last sampled token.
        is_correct: Whether the answer is right; not derived from the sign of the score.
        error: Why there is no verdict (then the score is 0): the verifier's traceback, or that it timed out.
    """

    score: float
    is_correct: bool
    error: str | None = None


class Task(Protocol):
    """What the trainer needs of a task."""

    name: str

    def problems(self, count: int, rng: random.Random, *, held_out: bool = False) -> list[Problem]:
        """Draw problems; those held out and those trained on never share a prompt."""

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Verdict]:
        """Verify finished responses, given without special tokens, one for each problem."""

    def final_answer(self, response: str) -> str | None:
        """Return what a vote among responses compares; None abstains."""

    def state_dict(self) -> dict:
        """Return, as JSON, where the task stands in its data; empty if the draws depend on ``rng`` alone."""

    def load_state_dict(self, state: dict) -> None:
        """Go on from where :meth:`state_dict` stood."""


class EmbeddedTask(Task, Protocol):
    """A task that brings its own language, in which a small model is trained from nothing."""

    tokenizer: PreTrainedTokenizerFast

    def demonstration(self, problem: Problem, rng: random.Random, *, give_up: float = 0.0, error: float = 0.0) -> str:
        """Write a response to imitate, the end-of-sequence token included."""


def load_task(name: str, *, reward: str = "", reward_timeout: float = 10.0, split: str = "eighth") -> Task:
    """Build a task.

    Args:
        name: "running-total", "knights-knaves", "reasoning-gym:<dataset>", or .parquet and .jsonl files with commas
            between them.
        reward: "" is the task's own, "math" for files. Others: "math"; "all-right" and "per-islander" for knights and
            knaves of either kind; a function of the user's as "file.py:function".
        reward_timeout: Seconds that a reward may take, for a response or, in TRL's form, for a batch.
        split: What a file holds out: an "eighth" of it; nothing, where "train"; everything, where "held-out".

    Raises:
        ValueError: If there is no such task or reward, the data are malformed, or a package is missing.
    """
    from vapo.tasks.loading import load

    return load(name, reward=reward, reward_timeout=reward_timeout, split=split)
