"""Whole runs in tests: what they leave, and rewards that differ although nothing was learned."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from vapo.tasks import Verdict

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


def options(settings: dict) -> list[str]:
    """Settings as they are given on the command line."""
    words = []
    for name, value in settings.items():
        words += [f"--{name.replace('_', '-')}", *(value if isinstance(value, tuple) else [str(value)])]
    return words


def score(self, problems, responses) -> list[Verdict]:
    """In the place of a task's method: rewards 0, 1 and 2 that hang on the response."""
    pairs = zip(problems, responses, strict=True)
    numbers = [zlib.crc32(f"{problem.prompt}{response}".encode()) for problem, response in pairs]
    return [Verdict(float(number % 3), number % 2 == 0) for number in numbers]


def lines_without_times(folder: Path) -> list[dict]:
    """The lines of ``metrics.jsonl`` without what differs from run to run."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in each.items() if not k.startswith(("timing_s/", "perf/"))} for each in records]


def result(folder: Path) -> dict[str, object]:
    """All that a run leaves but times, settings and checkpoints."""
    weights = {str(each.relative_to(folder)): each.read_bytes() for each in sorted(folder.glob("*/model.safetensors"))}
    return {"metrics": lines_without_times(folder), "samples": (folder / "samples.jsonl").read_text(), **weights}


def assert_same_result(folder: Path, expected: Path) -> None:
    """Two runs left the same, bit for bit."""
    found, wanted = result(folder), result(expected)
    assert len(found["metrics"]) == len(wanted["metrics"])
    for line, wanted_line in zip(found["metrics"], wanted["metrics"], strict=True):
        different = {name: (line.get(name), wanted_line.get(name)) for name in line.keys() | wanted_line.keys()}
        different = {name: (value, wanted) for name, (value, wanted) in different.items() if value != wanted}
        assert not different, different
    assert [name for name in wanted if found.get(name) != wanted[name]] == []
    assert found.keys() == wanted.keys()


def assert_lively(folder: Path) -> None:
    """Rewards differ and gradients are not 0: a result that nothing can change would prove nothing."""
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert len({each["reward"] for each in samples}) > 1
    assert len({each["response"] for each in samples}) > 2
    steps = [each for each in lines_without_times(folder) if each["phase"] == "vapo" and each["step"] > 0]
    assert all(each["actor/grad_norm"] > 0 for each in steps)
