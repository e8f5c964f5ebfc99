"""What a run leaves in its folder: ``config.json``, ``metrics.jsonl``, ``samples.jsonl``, ``curves.png``.

Every metric is explained in ``docs/metrics.md``. Two equal runs write the same ``metrics.jsonl`` apart from the keys
that begin with ``timing_s/`` or ``perf/``, and so does a run that was interrupted and resumed.
"""

from __future__ import annotations

import json
import math
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, TextIO

from vapo.models.sharding import on_first_rank
from vapo.record.curves import write_curves
from vapo.record.live_view import LiveView, PlainView, Progress, QuietView, is_terminal
from vapo.record.trackers import Trackers
from vapo.types import PHASES

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
SAMPLE_FIELDS = ("prompt", "response", "reward", "is_correct", "advantage_min", "advantage_max")


class RunLog:
    """Record a run in its folder and show it while it goes on; on ranks other than the first, do neither.

    A context manager: on leaving it, also by an exception or Ctrl-C, the view is closed, the files are complete up to
    the last line logged and ``curves.png`` is drawn. The view is a live table on a terminal, else a line per step.

    Attributes:
        progress: Steps and time. Lower ``progress.total_steps`` when a phase ends early, so that the time left holds.
    """

    def __init__(
        self,
        folder: Path,
        *,
        config: dict,
        total_steps: int,
        resume_after: tuple[str, int] | None = None,
        trackers: Trackers | None = None,
    ) -> None:
        """Write ``config.json`` to a new folder or, with ``resume_after``, to that of the run that goes on. Collective.

        Args:
            folder: Where the run's files go; made if it does not exist.
            config: The resolved settings, written as JSON (paths as text).
            total_steps: Steps of all phases together, for the time left.
            resume_after: Phase and step of the last lines to keep of an earlier run; those after it, and one that was
                cut while it was written, are dropped. None for a new run.
            trackers: Where metrics go besides; closed on leaving.

        Raises:
            ValueError: If ``total_steps`` is no positive number, ``config`` does not fit JSON, ``resume_after`` is no
                place in a run, or the folder holds the ``metrics.jsonl`` of an earlier run and none is to be resumed,
                or the other way round.
            OSError: If a file cannot be written.
        """
        if isinstance(total_steps, bool) or not isinstance(total_steps, int) or total_steps < 1:
            raise ValueError(f"total_steps: expected a positive int, got {total_steps!r}")
        if resume_after is not None:
            _check_place(*resume_after)
        self.folder = Path(folder)
        self._text = _config_json(config)
        self._trackers = trackers
        self._notes: set[str] = set()
        self._metrics = self._samples = None
        self.progress = Progress(total_steps)
        self._view: QuietView | LiveView | PlainView = QuietView()
        on_first_rank(lambda: self._open(resume_after))

    def _open(self, resume_after: tuple[str, int] | None) -> None:
        kept = self._start() if resume_after is None else self._resume(resume_after)
        self._metrics = (self.folder / METRICS).open("a", encoding="utf-8")
        self._samples = (self.folder / SAMPLES).open("a", encoding="utf-8")
        if resume_after is not None:
            self.progress = _resumed_progress(self.progress.total_steps, resume_after, kept)
        self._view = LiveView(self.progress, kept) if is_terminal(sys.stdout) else PlainView(self.progress)

    def _start(self) -> list[dict[str, Any]]:
        if (self.folder / METRICS).exists():
            raise ValueError(f"folder: expected one without an earlier run, got {self.folder}, which has {METRICS}")
        _create_folder(self.folder)
        (self.folder / SAMPLES).unlink(missing_ok=True)
        self._write_config()
        return []

    def _resume(self, place: tuple[str, int]) -> list[dict[str, Any]]:
        if not (self.folder / "config.json").is_file():
            raise ValueError(f"folder: expected one with an earlier run, got {self.folder}, which has no config.json")
        self._write_config()
        kept = _cut_after(self.folder / METRICS, place)
        _cut_after(self.folder / SAMPLES, place)
        return kept

    def _write_config(self) -> None:
        # Beside and renamed: a run that is killed, or finds its disk full, keeps settings to resume with.
        unfinished = self.folder / "config.json.unfinished"
        unfinished.write_text(self._text, encoding="utf-8")
        unfinished.replace(self.folder / "config.json")

    def __enter__(self) -> RunLog:
        self._view.open()
        return self

    def __exit__(self, exc_type: type | None, exc: BaseException | None, traceback: object) -> None:
        self._view.close()
        if self._trackers is not None:
            self._trackers.close()
        if self._metrics is None:
            return
        for file in (self._samples, self._metrics):
            # A disk that was full while a line was written may still be; that ended the run.
            with suppress(OSError) if exc else nullcontext():
                file.close()
        if (self.folder / METRICS).stat().st_size == 0:
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
            OSError: If the line cannot be written. What is there of it is dropped when the run is resumed.
        """
        _check_place(phase, step)
        _check_metrics(metrics)
        self.progress.advance(phase, step)
        elapsed = {"timing_s/elapsed": self.progress.elapsed}
        _append(self._metrics, {"phase": phase, "step": step, **elapsed, **metrics})
        if self._trackers is not None:
            self._trackers.log(self.progress.steps_done, metrics)
        self._view.log(metrics)

    def samples(self, phase: str, step: int, rows: list[dict[str, Any]]) -> None:
        """Append responses to ``samples.jsonl``; the live view shows the first of them.

        Args:
            phase: As in `log`.
            step: As in `log`.
            rows: One dict a response: prompt, response, reward, is_correct, advantage_min, advantage_max.

        Raises:
            ValueError: If the phase is unknown, the step negative, or a row lacks a field or does not fit JSON.
            OSError: As in `log`.
        """
        _check_place(phase, step)
        for row in rows:
            missing = [field for field in SAMPLE_FIELDS if field not in row]
            if missing:
                raise ValueError(f"rows: expected the fields {', '.join(SAMPLE_FIELDS)}, got none for {missing[0]}")
            _append(self._samples, {"phase": phase, "step": step, **row})
        if rows:
            self._view.sample(rows[0])

    def note(self, text: str, kind: str = "") -> None:
        """Tell the person something that deserves attention, once: the same text, or any text of the same kind."""
        if (kind or text) not in self._notes:
            self._notes.add(kind or text)
            self._view.note(text)

    def summary(self, rows: list[tuple[str, str, str]]) -> None:
        """Close the live view and show the final table.

        Args:
            rows: Quantity, its value before the run, its value after it.
        """
        self._view.close()
        self._view.summary(rows)


def _cut_after(path: Path, place: tuple[str, int]) -> list[dict[str, Any]]:
    """Shorten a file of lines to those that are whole and not after a place in the run; returns them."""
    kept: list[dict[str, Any]] = []
    if not path.exists():
        return kept
    size = 0
    with path.open("r+b") as file:
        for line in file:
            record = _record(line)
            if record is None or _order(record["phase"], record["step"]) > _order(*place):
                break
            kept.append(record)
            size += len(line)
        file.truncate(size)
    return kept


def _record(line: bytes) -> dict[str, Any] | None:
    """What `_append` wrote, or None for a line that was cut."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return record if isinstance(record, dict) and {"phase", "step"} <= record.keys() else None


def _order(phase: str, step: int) -> tuple[int, int]:
    return list(PHASES).index(phase), step


def _resumed_progress(total_steps: int, place: tuple[str, int], kept: list[dict[str, Any]]) -> Progress:
    phase, step = place
    steps = {record["phase"]: record["step"] for record in kept}
    return Progress(
        total_steps,
        phase=phase,
        step=step,
        steps_before=sum(count for name, count in steps.items() if name != phase),
        elapsed=kept[-1]["timing_s/elapsed"] if kept else 0.0,
    )


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


def _append(file: TextIO | None, record: dict[str, Any]) -> None:
    record = {name: _finite_or_none(value) for name, value in record.items()}
    try:
        line = json.dumps(record, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"rows: expected values that fit JSON: {error}") from None
    if file is not None:
        file.write(line + "\n")
        file.flush()


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
