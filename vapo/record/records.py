"""What a run's folder holds, read back."""

import json
from pathlib import Path
from typing import Any

from vapo.types import PHASES


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's ``metrics.jsonl``; a last line that was cut while it was written is left out.

    Raises:
        ValueError: If the file is missing, or a line is not one that `vapo.record.run_log.RunLog` writes.
    """
    path = Path(folder) / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"folder: expected a run's folder with metrics.jsonl, got {folder}")
    *lines, _ = path.read_text("utf-8", errors="replace").split("\n")
    return [_record(path, number, line) for number, line in enumerate(lines, 1)]


def read_config(folder: Path) -> dict[str, Any]:
    """The settings in a run's ``config.json``; empty if there is none.

    Raises:
        ValueError: If the file is no JSON object.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text("utf-8"))
        if isinstance(config, dict):
            return config
    except ValueError:
        pass
    raise ValueError(f"folder: expected the settings of a run in {path}, got no JSON object")


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
        if record["phase"] in PHASES and isinstance(record["step"], int):
            return record
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"folder: expected an object with phase and step in line {number} of {path}, got {line[:80]!r}")
