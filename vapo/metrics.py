"""What a run leaves in its folder: ``config.json``, ``metrics.jsonl``, ``samples.jsonl``, ``curves.png``.

Every metric is explained in ``docs/metrics.md``. Two equal runs write the same ``metrics.jsonl`` apart from the keys
that begin with ``timing_s/`` or ``perf/``.
"""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from vapo.live_view import PHASES, LiveView, PlainView, Progress, is_terminal
from vapo.report import write_curves

SAMPLE_FIELDS = ("prompt", "response", "reward", "is_correct", "advantage_min", "advantage_max")


class RunLog:
    """Record a run in its folder and show it while it goes on.

    A context manager: on leaving it, also by an exception or Ctrl-C, the view is closed, the files are complete up to
    the last line logged and ``curves.png`` is drawn. The view is a live table on a terminal, else a line per step.

    Attributes:
        progress: Steps and time. Lower ``progress.total_steps`` when a phase ends early, so that the time left holds.
    """

    def __init__(self, folder: Path, *, config: dict, total_steps: int) -> None:
        """Create the folder and write ``config.json`` there.

        Args:
            folder: Where the run's files go; made if it does not exist.
            config: The resolved settings, written as JSON (paths as text).
            total_steps: Steps of all phases together, for the time left.

        Raises:
            ValueError: If ``total_steps`` is no positive number, ``config`` does not fit JSON, or the folder holds the
                ``metrics.jsonl`` of an earlier run.
        """
        if isinstance(total_steps, bool) or not isinstance(total_steps, int) or total_steps < 1:
            raise ValueError(f"total_steps: expected a positive int, got {total_steps!r}")
        self.folder = Path(folder)
        if (self.folder / "metrics.jsonl").exists():
            raise ValueError(f"folder: expected one without an earlier run, got {self.folder}, which has metrics.jsonl")
        text = _config_json(config)
        _create_folder(self.folder)
        (self.folder / "config.json").write_text(text, encoding="utf-8")
        self._metrics = (self.folder / "metrics.jsonl").open("w", encoding="utf-8")
        self._samples = (self.folder / "samples.jsonl").open("w", encoding="utf-8")
        self.progress = Progress(total_steps)
        self._view = LiveView(self.progress) if is_terminal(sys.stdout) else PlainView(self.progress)
        self._notes: set[str] = set()

    def __enter__(self) -> "RunLog":
        self._view.open()
        return self

    def __exit__(self, exc_type: type | None, exc: BaseException | None, traceback: object) -> None:
        self._view.close()
        self._samples.close()
        self._metrics.close()
        if (self.folder / "metrics.jsonl").stat().st_size == 0:
            return
        try:
            write_curves(self.folder)
        except Exception as error:
            # The failure that ended the run matters more than a missing picture.
            if exc is None:
                raise
            self.note(f"curves.png was not written: {error}")

    def log(self, phase: str, step: int, metrics: dict[str, float]) -> None:
        """Append one line to ``metrics.jsonl`` and show it.

        Args:
            phase: "warm_start", "value_pretraining" or "vapo".
            step: Steps of this phase that are done, from 0.
            metrics: Name to number, as in ``docs/metrics.md``. NaN and infinities are written as null.

        Raises:
            ValueError: If the phase is unknown, the step negative, or a metric no number.
        """
        _check_place(phase, step)
        _check_metrics(metrics)
        self.progress.advance(phase, step)
        elapsed = {"timing_s/elapsed": time.monotonic() - self.progress.began}
        _append(self._metrics, {"phase": phase, "step": step, **elapsed, **metrics})
        self._view.log(metrics)

    def samples(self, phase: str, step: int, rows: list[dict[str, Any]]) -> None:
        """Append responses to ``samples.jsonl``; the live view shows the first of them.

        Args:
            phase: As in `log`.
            step: As in `log`.
            rows: One dict a response: prompt, response, reward, is_correct, advantage_min, advantage_max.

        Raises:
            ValueError: If the phase is unknown, the step negative, or a row lacks a field or does not fit JSON.
        """
        _check_place(phase, step)
        for row in rows:
            missing = [field for field in SAMPLE_FIELDS if field not in row]
            if missing:
                raise ValueError(f"rows: expected the fields {', '.join(SAMPLE_FIELDS)}, got none for {missing[0]}")
            _append(self._samples, {"phase": phase, "step": step, **row})
        if rows:
            self._view.sample(rows[0])

    def note(self, text: str) -> None:
        """Tell the person something that deserves attention; the same text is told once."""
        if text not in self._notes:
            self._notes.add(text)
            self._view.note(text)

    def summary(self, rows: list[tuple[str, str, str]]) -> None:
        """Close the live view and show the final table.

        Args:
            rows: Quantity, its value before the run, its value after it.
        """
        self._view.close()
        self._view.summary(rows)


def _config_json(config: dict) -> str:
    try:
        return json.dumps(config, indent=2, allow_nan=False, default=_path_text) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(f"config: expected values that fit JSON: {error}") from None


def _path_text(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"got {type(value).__name__}")


def _create_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"folder: expected a folder that can be made, got {folder} ({error.strerror})") from None


def _check_place(phase: str, step: int) -> None:
    if phase not in PHASES:
        raise ValueError(f"phase: expected one of {', '.join(PHASES)}, got {phase!r}")
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"step: expected an int from 0, got {step!r}")


def _check_metrics(metrics: dict[str, float]) -> None:
    for name, value in metrics.items():
        if name in ("phase", "step"):
            raise ValueError(f"metrics: {name!r} is taken by the line's own field")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"metrics: expected a float for {name!r}, got {type(value).__name__}")


def _append(file: Any, record: dict[str, Any]) -> None:
    record = {name: _finite_or_none(value) for name, value in record.items()}
    try:
        line = json.dumps(record, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"rows: expected values that fit JSON: {error}") from None
    file.write(line + "\n")
    file.flush()


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
