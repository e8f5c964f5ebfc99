"""The files in a run's folder, line by line: each line of `METRICS` and `SAMPLES` is an object with phase and step."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TextIO

from vapo.types import PHASES

CONFIG, METRICS, SAMPLES = "config.json", "metrics.jsonl", "samples.jsonl"


def append_line(file: TextIO, record: dict[str, Any]) -> None:
    """Write one line at once; NaN and infinities, which JSON does not have, become null."""
    finite = {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in record.items()}
    file.write(json.dumps(finite, ensure_ascii=False, allow_nan=False) + "\n")
    file.flush()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's ``metrics.jsonl``; a last line that was cut while it was written is left out.

    Raises:
        ValueError: If the file is missing, or a line is not one that `vapo.record.run_log.RunLog` writes.
    """
    path = Path(folder) / METRICS
    if not path.is_file():
        raise ValueError(f"folder: expected a run's folder with {METRICS}, got {folder}")
    *lines, _ = path.read_bytes().split(b"\n")
    records = [_record(line) for line in lines]
    if None in records:
        number = records.index(None)
        got = lines[number].decode(errors="replace")[:80]
        raise ValueError(f"folder: expected an object with phase and step in line {number + 1} of {path}, got {got!r}")
    return records


def cut_after(path: Path, phase: str, step: int) -> list[dict[str, Any]]:
    """Shorten a file to its lines up to a step of a phase; the first line that is not whole ends it too.

    Returns:
        The lines that stay; none if there is no such file.
    """
    kept: list[dict[str, Any]] = []
    if not path.exists():
        return kept
    size = 0
    with path.open("r+b") as file:
        for line in file:
            record = _record(line) if line.endswith(b"\n") else None
            if record is None or _position(record["phase"], record["step"]) > _position(phase, step):
                break
            kept.append(record)
            size += len(line)
        file.truncate(size)
    return kept


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write ``config.json``: beside and renamed, so that a run that is killed keeps settings to resume with."""
    unfinished = folder / f"{CONFIG}.unfinished"
    unfinished.write_text(json.dumps(config, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    unfinished.replace(folder / CONFIG)


def _record(line: bytes) -> dict[str, Any] | None:
    """What `append_line` wrote, or None for anything else."""
    try:
        record = json.loads(line)
        return record if record["phase"] in PHASES and isinstance(record["step"], int) else None
    except (ValueError, KeyError, TypeError):
        return None


def _position(phase: str, step: int) -> tuple[int, int]:
    return list(PHASES).index(phase), step
