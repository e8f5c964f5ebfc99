"""Tasks from files: JSONL or Parquet, one problem a row, in verl's or TRL's form.

    verl  {"data_source": …, "prompt": [messages], "reward_model": {"ground_truth": …}, "extra_info": {…}}
    TRL   {"prompt": text or [messages], "answer" or "solution" or "ground_truth": …, any other columns}

A message is ``{"role": …, "content": …}``. All rows are read and checked before anything else happens.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from vapo.tasks import Problem, Verdict
from vapo.tasks.split import prompt_crc32
from vapo.tasks.worker import VerifierPool

SUFFIXES = (".parquet", ".jsonl")
ANSWER_COLUMNS = ("answer", "solution", "ground_truth")
SPLITS = ("eighth", "train", "held-out")


class Rows:
    """Problems from files.

    Training samples them without replacement, epoch after epoch. Of n different prompts, the max(1, n // 8) with the
    lowest CRC-32 are held out, with all rows that repeat them.
    """

    def __init__(
        self,
        name: str,
        problems: Sequence[Problem],
        verifier: VerifierPool,
        *,
        vote: Callable[[str], str | None],
        split: str = "eighth",
    ) -> None:
        """Split the problems.

        Args:
            name: The files' names.
            problems: All of them, from :func:`read_problems`.
            verifier: Scores the responses.
            vote: Extracts the answer that a vote among responses compares.
            split: What is held out: an "eighth" of the prompts; "train": none; "held-out": all.

        Raises:
            ValueError: If ``split`` is unknown, or there are too few different prompts to split.
        """
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}; got {split!r}")
        self.name, self._verifier, self.final_answer = name, verifier, vote
        different = {_key(problem): problem for problem in problems}
        least = 2 if split == "eighth" else 1
        if len(different) < least:
            raise ValueError(f"{name} must hold at least {least} different prompts; got {len(different)}")
        num_held_out = {"eighth": max(1, len(different) // 8), "train": 0, "held-out": len(different)}[split]
        held_out = sorted(different)[:num_held_out]
        self._held_out = [different[key] for key in held_out]
        is_held_out = set(held_out)
        self._train = [problem for problem in problems if _key(problem) not in is_held_out]
        self.rows = list(problems)
        self._crc32 = zlib.crc32(json.dumps([key for key, _ in map(_key, problems)]).encode())
        self._epoch_seed, self._position, self._order = 0, len(self._train), []

    def problems(self, count: int, rng: random.Random, *, held_out: bool = False) -> list[Problem]:
        """Sample problems; of held-out ones, at most as many as there are.

        Args:
            count: How many, at least 0. Held-out problems are all different.
            rng: Source of randomness: orders each epoch, or chooses among the held-out problems.
            held_out: Sample from the problems that training never sees.

        Raises:
            ValueError: If ``count`` is negative, or that side has no problem.
        """
        side = self._held_out if held_out else self._train
        if count < 0 or not side:
            raise ValueError(f"count must be >= 0, of at least 1 problem; got {count} of {len(side)}")
        if held_out:
            return rng.sample(side, min(count, len(side)))
        return [self._next(rng) for _ in range(count)]

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Verdict]:
        """Score responses by the verifier."""
        return self._verifier.score(problems, responses)

    def state_dict(self) -> dict:
        """Return the epoch's seed, the position in the epoch, and a checksum of the prompts."""
        return {"crc32": self._crc32, "epoch_seed": self._epoch_seed, "position": self._position}

    def load_state_dict(self, state: dict) -> None:
        """Continue from a position that :meth:`state_dict` returned.

        Raises:
            ValueError: If the data have changed since.
        """
        if state["crc32"] != self._crc32:
            raise ValueError(f"{self.name} must hold the same prompts as when the run was saved; got others")
        self._position = state["position"]
        self._begin_epoch(state["epoch_seed"])

    def _next(self, rng: random.Random) -> Problem:
        if self._position == len(self._train):
            self._position = 0
            self._begin_epoch(rng.getrandbits(32))
        self._position += 1
        return self._train[self._order[self._position - 1]]

    def _begin_epoch(self, seed: int) -> None:
        self._epoch_seed, self._order = seed, list(range(len(self._train)))
        random.Random(seed).shuffle(self._order)


def read_problems(paths: Sequence[Path], *, needs_answer: bool) -> list[Problem]:
    """Read and check files.

    Args:
        paths: Each ends in .parquet or .jsonl.
        needs_answer: Refuse rows without an answer. Otherwise it is empty, but once a row has one, all later ones must.

    Raises:
        ValueError: If a file is missing or of another format than its name says, or a row is malformed. The message
            names the file and the row (in JSONL, the line), counted from 1.
    """
    problems = []
    for path in paths:
        if path.suffix not in SUFFIXES or not path.is_file():
            raise ValueError(f"task must be an existing {' or '.join(SUFFIXES)} file; got {str(path)!r}")
        for number, row in _read_parquet(path) if path.suffix == ".parquet" else _read_jsonl(path):
            try:
                problem = to_problem(row, data_source=path.stem, needs_answer=needs_answer)
            except ValueError as error:
                raise ValueError(f"{path}: row {number}: {error}") from None
            needs_answer = needs_answer or bool(problem.answer)
            problems.append(problem)
    return problems


def to_problem(row: object, *, data_source: str, needs_answer: bool = True) -> Problem:
    """Convert a row in verl's or TRL's form to a problem.

    Args:
        row: Values by column.
        data_source: Used where the row has none.
        needs_answer: Refuse a row without an answer.

    Raises:
        ValueError: If something is missing or of a wrong type; the message says what was expected.

    Example:
        >>> to_problem({"prompt": "1 + 1?", "answer": 2}, data_source="sums").answer
        '2'
    """
    if not isinstance(row, dict):
        raise ValueError(f"a row must be an object with columns; got {_short(row)}")
    source = row.get("data_source")
    if not isinstance(source, str | None):
        raise ValueError(f"data_source must be text; got {_short(source)}")
    return Problem(_prompt(row.get("prompt")), _answer(row, needs_answer), source or data_source, row)


def _prompt(value: object) -> str | list[dict[str, str]]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(map(_is_message, value)):
        return [{name: part for name, part in message.items() if part is not None} for message in value]
    raise ValueError(f"prompt must be text or a list of messages with role and content as text; got {_short(value)}")


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))


def _answer(row: dict[str, object], needs_answer: bool) -> str:
    if "reward_model" in row:
        reward_model = row["reward_model"]
        answer = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
        expected, got = "reward_model must have a ground_truth", reward_model
    else:
        answer = next((row[name] for name in ANSWER_COLUMNS if row.get(name) is not None), None)
        expected, got = f"there must be an answer in one of {', '.join(ANSWER_COLUMNS)}", sorted(row)
    if answer in (None, ""):
        if needs_answer:
            raise ValueError(f"{expected}; got {_short(got)}")
        return ""
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)


def _read_jsonl(path: Path) -> Iterator[tuple[int, object]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except ValueError as error:
                    message = f"{path}: row {number}: a row must be JSON; got {_short(line)} ({error})"
                    raise ValueError(message) from None


def _read_parquet(path: Path) -> Iterator[tuple[int, object]]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"Parquet files need pyarrow: pip install 'vapo[tasks]' ({error})") from error
    try:
        rows = pyarrow.parquet.read_table(path, use_threads=False).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} must be a Parquet file; got another ({error})") from None
    return enumerate(rows, 1)


def _key(problem: Problem) -> tuple[int, str]:
    return prompt_crc32(problem.prompt), str(problem.prompt)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
