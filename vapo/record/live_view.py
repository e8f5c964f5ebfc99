"""What a person sees while a run goes on: a live table on a terminal, else one line per logged step."""

import math
import os
import sys
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vapo.types import PHASES


class Quantity(NamedTuple):
    """A row of the live view: its label, its short label in plain lines, the metrics that it may come from."""

    label: str
    short: str
    names: tuple[str, ...]
    format: str


SHOWN = (
    Quantity("loss (warm start)", "loss", ("warm_start/loss",), ".3f"),
    Quantity("reward", "reward", ("critic/rewards/mean", "critic/pretrain/score"), ".3f"),
    Quantity("accuracy, sampled", "accuracy", ("val/accuracy_sampled",), ".3f"),
    Quantity("accuracy, greedy", "greedy", ("val/accuracy_greedy",), ".3f"),
    Quantity("explained variance", "EV", ("critic/vf_explained_var", "critic/pretrain/vf_explained_var"), ".3f"),
    Quantity("response length", "length", ("response_length/mean",), ".1f"),
    Quantity("entropy", "entropy", ("actor/entropy",), ".3f"),
    Quantity("KL", "KL", ("actor/ppo_kl",), ".5f"),
    Quantity("clip fraction", "clip", ("actor/pg_clipfrac",), ".4f"),
    Quantity("tokens/s", "tokens/s", ("perf/throughput",), ",.0f"),
)


class Progress:
    """Steps done over all phases, and the time that the rest takes at the present phase's pace.

    Attributes:
        total_steps: Steps of all phases together.
        phase: The present phase.
        step: Steps of it that are done.
    """

    def __init__(
        self, total_steps: int, *, phase: str = "", step: int = 0, steps_before: int = 0, elapsed: float = 0.0
    ) -> None:
        """Start at the beginning, or where a resumed run goes on.

        Args:
            total_steps: Steps of all phases together.
            phase: The phase that is resumed.
            step: Steps of it that are done.
            steps_before: Steps of the phases before it.
            elapsed: Seconds that the run has taken so far.
        """
        self.total_steps = total_steps
        self.phase, self.step = phase, step
        self._steps_before = steps_before
        self._first_step = step
        self._phase_began = self._last = time.monotonic()
        self._began = self._last - elapsed

    def advance(self, phase: str, step: int) -> None:
        """Note that ``step`` steps of ``phase`` are done."""
        if phase != self.phase:
            self._steps_before += self.step
            self._phase_began, self._first_step = self._last, 0
        self.phase, self.step, self._last = phase, step, time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds that the run has taken, without the time between an interruption and its resumption."""
        return time.monotonic() - self._began

    @property
    def steps_done(self) -> int:
        """Steps done over all phases."""
        return self._steps_before + self.step

    @property
    def time_left(self) -> str:
        """Time left as text; before the last phase only a bound, since its steps cost more than the earlier ones'."""
        steps_timed = self.step - self._first_step
        if steps_timed <= 0:
            return "?"
        pace = (self._last - self._phase_began) / steps_timed
        seconds = pace * max(0, self.total_steps - self.steps_done)
        return clock(seconds) if self.phase == "vapo" else f"≥ {clock(seconds)}"


class View:
    """A table drawn anew in place on a terminal; elsewhere a readable line per step, without control characters.

    Attributes:
        sample: A record of ``samples.jsonl`` that the table shows below, if any.
    """

    def __init__(self, progress: Progress, earlier: Iterable[dict[str, float]] = ()) -> None:
        """Take up the metrics of the steps before a resumption."""
        self.sample: dict[str, Any] | None = None
        self._progress = progress
        self._history: dict[Quantity, list[float]] = {}
        for metrics in earlier:
            self._add(metrics)
        is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        # Outside a terminal FORCE_COLOR in the environment would bring escape codes into log files.
        plain = {} if is_terminal else {"force_terminal": False, "no_color": True}
        self._console = Console(markup=False, highlight=False, emoji=False, **plain)
        self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=2)
        self._is_live = is_terminal

    def open(self) -> None:
        """Begin to draw."""
        if self._is_live:
            self._live.start()

    def close(self) -> None:
        """Leave the last state on the screen and give the terminal back."""
        if self._is_live:
            self._live.stop()

    def log(self, metrics: dict[str, float]) -> None:
        """Show the quantities that this step has; of the many short steps of the warm start, print every tenth."""
        values, progress = self._add(metrics), self._progress
        if self._is_live or (progress.phase == "warm_start" and progress.step % 10):
            return
        shown = [f"{quantity.short} {value:{quantity.format}}" for quantity, value in values.items()]
        step = f"{clock(progress.elapsed):>6}  {PHASES[progress.phase]} {progress.step}"
        share = f"[{progress.steps_done}/{progress.total_steps}]"
        self._print("  ".join([step, share, *shown, f"time left {progress.time_left}"]))

    def note(self, text: str) -> None:
        """Print a warning, on a terminal above the table."""
        self._print(Text(f"note: {text}", style="yellow"))

    def summary(self, rows: list[tuple[str, str, str]]) -> None:
        """Print the final table."""
        table = Table("quantity", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("before", justify="right")
        table.add_column("after", justify="right")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        self._print(table)

    def _add(self, metrics: dict[str, float]) -> dict[Quantity, float]:
        """Take up the quantities that a step has, and return them."""
        values = {}
        for quantity in SHOWN:
            for name in quantity.names:
                if metrics.get(name) is not None:
                    values[quantity] = metrics[name]
                    self._history.setdefault(quantity, []).append(metrics[name])
        return values

    def _print(self, shown: str | Text | Table) -> None:
        self._console.print(shown, soft_wrap=not self._is_live and not isinstance(shown, Table))
        self._console.file.flush()

    def _render(self) -> Group:
        progress = self._progress
        title = f"{PHASES.get(progress.phase, 'starting')}, step {progress.step}"
        share = f"{progress.steps_done}/{progress.total_steps} steps in all"
        times = f"{clock(progress.elapsed)} gone, time left {progress.time_left}"
        head = Text.assemble((title, "bold"), f"  {share}  {times}")
        return Group(head, self._table(), *([_sample_panel(self.sample)] if self.sample else []))

    def _table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("quantity", no_wrap=True)
        table.add_column("first", justify="right", style="dim", no_wrap=True)
        table.add_column("now", justify="right", style="bold", no_wrap=True)
        table.add_column("course", no_wrap=True)
        width = 0 if self._console.options.ascii_only else min(32, self._console.width - 48)
        for quantity in SHOWN:
            values = self._history.get(quantity, [])[:]
            if values:
                ends = (f"{value:{quantity.format}}" for value in (values[0], values[-1]))
                table.add_row(quantity.label, *ends, sparkline(values, width) if width > 0 else "")
        return table


def clock(seconds: float) -> str:
    """Seconds as minutes and seconds, or hours, minutes and seconds.

    Example:
        >>> clock(83.4), clock(3723)
        ('1:23', '1:02:03')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def sparkline(values: list[float], width: int = 32) -> str:
    """The course of a quantity in one line of text: means of equal stretches, from the least to the greatest.

    Example:
        >>> sparkline([0.0, 0.5, 1.0, float("nan")])
        '▁▄█ '
    """
    parts = np.array_split(np.asarray(values, dtype=float), min(width, len(values)))
    means = [float(np.mean(part)) for part in parts]
    finite = [mean for mean in means if math.isfinite(mean)]
    if not finite:
        return " " * len(means)
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join("▁▂▃▄▅▆▇█"[int(7 * (mean - low) / span)] if math.isfinite(mean) else " " for mean in means)


def _sample_panel(row: dict[str, Any]) -> Panel:
    text = Text.assemble((row["prompt"], "dim"), "\n", row["response"][:400])
    text.plain = "".join(char if char.isprintable() or char == "\n" else "?" for char in text.plain)
    result = "correct" if row["is_correct"] else "wrong"
    return Panel(text, title=f"a response: {result}, reward {row['reward']:g}", title_align="left", box=box.ROUNDED)
