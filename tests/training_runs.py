"""Whole runs in tests: what they leave, and rewards that differ although nothing was learned."""

from __future__ import annotations

import contextlib
import io
import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import vapo.trainer
from vapo.config import Config
from vapo.record.live_view import Progress
from vapo.record.run_log import RunLog
from vapo.tasks import Verdict
from vapo.tasks.running_total import RunningTotal

# Settings under which all phases of a run have two steps, and an untrained policy ends many responses by itself.
LIVELY = {
    "warm_start_steps": 2,
    "pretraining_steps": 2,
    "pretraining_target": 1.0,
    "checkpoint_every": 1,
    "stop": ("#", "1", "2", "3", "4", "5"),
    "actor_lr": 1e-3,
    "critic_lr": 1e-3,
    "alpha": 1.0,
}


def make_lively(patch: pytest.MonkeyPatch) -> None:
    """Rewards 0, 1 and 2 that depend on the response; no picture of the curves."""
    patch.setattr(RunningTotal, "score", score)
    patch.setattr("vapo.record.run_log.write_curves", lambda folder: None)


class Run(NamedTuple):
    """A run that ended: its folder, what `train` returned, its progress, and what it printed, in one line."""

    folder: Path
    after: dict[str, float]
    progress: Progress
    printed: str


def run(config: Config, folder: Path, **arguments: Any) -> Run:
    """Train as `train` does."""
    logs: list[RunLog] = []
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
        patch.setattr(vapo.trainer, "RunLog", lambda *a, **k: logs.append(RunLog(*a, **k)) or logs[0])
        after = vapo.trainer.train(config, folder, **arguments)
    return Run(folder, after, logs[0].progress, " ".join(output.getvalue().split()))


def options(settings: dict) -> list[str]:
    """Settings as they are given on the command line."""
    words = []
    for name, value in settings.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", *(value if isinstance(value, tuple) else [str(value)])]
    return words


def score(self, problems, responses) -> list[Verdict]:
    """Replaces the task's method; the rewards depend on nothing but prompt and response."""
    pairs = zip(problems, responses, strict=True)
    numbers = [zlib.crc32(f"{problem.prompt}{response}".encode()) for problem, response in pairs]
    return [Verdict(float(number % 3), number % 2 == 0) for number in numbers]


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    """The records in a file of a run."""
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def lines_without_times(folder: Path) -> list[dict]:
    """The lines of ``metrics.jsonl`` without what differs from run to run."""
    return [{k: v for k, v in each.items() if not k.startswith(("timing_s/", "perf/"))} for each in lines(folder)]


def phases_and_steps(folder: Path) -> list[tuple[str, int]]:
    """Phase and step of each line of ``metrics.jsonl``."""
    return [(line["phase"], line["step"]) for line in lines(folder)]


def result(folder: Path) -> dict[str, object]:
    """All that a run leaves, line by line and file by file, except times, settings and checkpoints."""
    lines = {f"line {number}": each for number, each in enumerate(lines_without_times(folder))}
    weights = {str(each.relative_to(folder)): each.read_bytes() for each in sorted(folder.glob("*/model.safetensors"))}
    return {"samples": (folder / "samples.jsonl").read_text(), **lines, **weights}


def assert_same_result(folder: Path, expected: Path) -> None:
    """Two runs left the same, bit for bit."""
    found, wanted = result(folder), result(expected)
    assert found.keys() == wanted.keys()
    different = [name for name, value in wanted.items() if found[name] != value]
    # The bytes of weights are too many for a message.
    assert not different, (different, [(found[name], wanted[name]) for name in different if name.startswith("line")])


def assert_lively(folder: Path) -> None:
    """Rewards differ and gradients are not 0: a result that nothing can change would prove nothing."""
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert len({each["reward"] for each in samples}) > 1
    assert len({each["response"] for each in samples}) > 2
    steps = [each for each in lines_without_times(folder) if each["phase"] == "vapo" and each["step"] > 0]
    assert all(each["actor/grad_norm"] > 0 for each in steps)
