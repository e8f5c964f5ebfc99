"""What a run leaves in its folder: ``config.json``, ``metrics.jsonl``, ``samples.jsonl``, ``curves.png``.

Every metric is explained in ``docs/metrics.md``. Two equal runs write the same ``metrics.jsonl`` apart from the keys
that begin with ``timing_s/`` or ``perf/``, and so does a run that was interrupted and resumed.
"""

from __future__ import annotations

import math
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from vapo.models.sharding import on_first_rank
from vapo.record.curves import write_curves
from vapo.record.live_view import Progress, View
from vapo.record.records import CONFIG, METRICS, SAMPLES, append_line, cut_after, write_config
from vapo.record.trackers import Trackers
from vapo.types import PHASES


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
        config: dict[str, Any],
        total_steps: int,
        resume_after: tuple[str, int] | None = None,
        trackers: Trackers | None = None,
    ) -> None:
        """Write ``config.json`` to a new folder or, with ``resume_after``, to that of the run that goes on. Collective.

        Args:
            folder: Where the run's files go; made if it does not exist.
            config: The resolved settings, which fit JSON.
            total_steps: Steps of all phases together, for the time left.
            resume_after: Phase and step of the last lines to keep of an earlier run; those after it, and one that was
                cut while it was written, are dropped. None for a new run.
            trackers: Where metrics go besides; closed on leaving.

        Raises:
            ValueError: If the folder cannot be made, holds the ``metrics.jsonl`` of an earlier run and none is to be
                resumed, or holds no ``config.json`` of the run to resume.
            OSError: If a file cannot be written.
        """
        self.folder = Path(folder)
        self.progress = Progress(total_steps)
        self._trackers = trackers or Trackers({})
        self._noted: set[str] = set()
        self._view: View | None = None
        on_first_rank(lambda: self._open(config, resume_after))

    def _open(self, config: dict[str, Any], resume_after: tuple[str, int] | None) -> None:
        if resume_after is None and (self.folder / METRICS).exists():
            raise ValueError(f"folder: expected one without an earlier run, got {self.folder}, which has {METRICS}")
        if resume_after is not None and not (self.folder / CONFIG).is_file():
            raise ValueError(f"folder: expected one with an earlier run, got {self.folder}, which has no {CONFIG}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            text = f"folder: expected a folder that can be made, got {self.folder} ({error.strerror})"
            raise ValueError(text) from None
        write_config(self.folder, config)
        kept: list[dict[str, Any]] = []
        if resume_after is not None:
            kept = cut_after(self.folder / METRICS, *resume_after)
            cut_after(self.folder / SAMPLES, *resume_after)
            self.progress = _resumed_progress(self.progress.total_steps, resume_after, kept)
        mode = "w" if resume_after is None else "a"
        self._metrics = (self.folder / METRICS).open(mode, encoding="utf-8")
        self._samples = (self.folder / SAMPLES).open(mode, encoding="utf-8")
        self._view = View(self.progress, kept)

    def __enter__(self) -> RunLog:
        if self._view:
            self._view.open()
        return self

    def __exit__(self, exc_type: type | None, exc: BaseException | None, traceback: object) -> None:
        if self._view is None:
            return
        self._view.close()
        self._trackers.close()
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
            metrics: Name to number, as in ``docs/metrics.md``. NaN and infinities are written as null, and a note names
                each such metric once.

        Raises:
            OSError: If the line cannot be written. What is there of it is dropped when the run is resumed.
        """
        self.progress.advance(phase, step)
        if self._view is None:
            return
        bad = {name for name, value in metrics.items() if not math.isfinite(value)} - self._noted
        line = {"phase": phase, "step": step, "timing_s/elapsed": self.progress.elapsed, **metrics}
        append_line(self._metrics, line)
        self._trackers.log(self.progress.steps_done, metrics)
        self._view.log(metrics)
        if bad:
            self._noted |= bad
            self.note(f"not finite at step {step} of {PHASES[phase]}, null in {METRICS}: {', '.join(sorted(bad))}")

    def samples(self, phase: str, step: int, rows: list[dict[str, Any]]) -> None:
        """Append responses to ``samples.jsonl``; the live view shows the first of them.

        Args:
            phase: As in `log`.
            step: As in `log`.
            rows: One dict a response: prompt, response, reward, is_correct, advantage_min, advantage_max.

        Raises:
            OSError: As in `log`.
        """
        if self._view is None:
            return
        for row in rows:
            append_line(self._samples, {"phase": phase, "step": step, **row})
        if rows:
            self._view.sample = rows[0]

    def note(self, text: str, kind: str = "") -> None:
        """Tell the person something that deserves attention, once: the same text, or any text of the same kind."""
        if self._view and (kind or text) not in self._noted:
            self._noted.add(kind or text)
            self._view.note(text)

    def summary(self, rows: list[tuple[str, str, str]]) -> None:
        """Close the live view and show the final table.

        Args:
            rows: Quantity, its value before the run, its value after it.
        """
        if self._view:
            self._view.close()
            self._view.summary(rows)


def _resumed_progress(total_steps: int, resume_after: tuple[str, int], kept: list[dict[str, Any]]) -> Progress:
    phase, step = resume_after
    steps = {record["phase"]: record["step"] for record in kept}
    return Progress(
        total_steps,
        phase=phase,
        step=step,
        steps_before=sum(count for name, count in steps.items() if name != phase),
        elapsed=kept[-1]["timing_s/elapsed"] if kept else 0.0,
    )
