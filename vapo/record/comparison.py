"""Several runs beside each other: one picture of their RL phases and one table."""

import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from vapo.config import Config
from vapo.presets import PRESETS, has_effect
from vapo.record.curves import INK, QUIET, draw_line, grid_of_panels, say_not_logged, set_title
from vapo.record.live_view import clock
from vapo.record.records import CONFIG, read_metrics

ACCURACY, LENGTH = "val/accuracy_sampled", "val/response_length"
NOT_LOGGED = "–"
SUFFIXES = (".png", ".svg", ".pdf")


class Panel(NamedTuple):
    """What one panel compares. ``limits`` bound the vertical axis; None leaves that end to the data of all runs."""

    title: str
    metric: str
    limits: tuple[float | None, float | None] = (None, None)


PANELS = (
    Panel("held-out accuracy, sampled", ACCURACY, (0.0, 1.03)),
    Panel("held-out accuracy, greedy", "val/accuracy_greedy", (0.0, 1.03)),
    Panel("score in training, mean", "critic/score/mean"),
    Panel("response length, tokens", "response_length/mean", (0.0, None)),
    Panel("responses truncated by the length limit", "response_length/clip_ratio", (0.0, None)),
    Panel("entropy, nats per token", "actor/entropy", (0.0, None)),
    Panel("explained variance of the critic", "critic/vf_explained_var", (None, 1.03)),
    Panel("explained variance within groups", "critic/vf_explained_var_within", (None, 1.03)),
    Panel("KL to the policy that sampled", "actor/ppo_kl", (0.0, None)),
)
# Below this an explained variance says no more than that the critic is useless, and would flatten every other curve.
LEAST_EXPLAINED = -1.0
# Every preset's value of each setting that any preset sets.
_SET = {name for settings in PRESETS.values() for name in settings}
PRESET_SETTINGS = {
    preset: {name: value for name, value in asdict(Config()).items() if name in _SET} | settings
    for preset, settings in PRESETS.items()
}
DASHES = ("-", "--", ":", "-.")
# Longer records are drawn as a mean over this share of their steps, the single steps faint behind it.
SMOOTHED_FROM, SMOOTHED_SHARE = 60, 20


class Run(NamedTuple):
    """A run as it is compared: its name, what sets it apart, its settings and the lines of its RL phase."""

    name: str
    settings: str
    config: Config
    rl: list[dict[str, Any]]
    seconds: float


def compare(runs: Sequence[Path], picture: Path) -> str:
    """Draw the RL phases of several runs into one picture and put their outcomes into one table.

    Runs that were cut short, never evaluated, or lack metrics that others have appear with what they have.

    Args:
        runs: Folders of runs.
        picture: Where the picture goes: .png, .svg or .pdf.

    Returns:
        A Markdown table, one row a run: the nearest preset and the settings in which the runs differ, RL steps done,
        sampled held-out accuracy before RL, at its best and last (with the steps), held-out response length before and
        last, and the time of the whole run.

    Raises:
        ValueError: If there is no run, one is named twice, a folder holds no run, or ``picture`` ends otherwise.
    """
    folders = [Path(run) for run in runs]
    picture = Path(picture)
    if not folders:
        raise ValueError("runs must name at least 1 folder; got none")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError(f"runs must be different folders; got {', '.join(map(str, folders))}")
    if picture.suffix not in SUFFIXES:
        raise ValueError(f"picture must end in one of {', '.join(SUFFIXES)}; got {picture}")
    compared = read_runs(folders)
    figure = comparison_figure(compared)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)
    return _table(compared)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read what is compared of each run; raises the ValueError of `compare` for a folder that holds none."""
    records = [read_metrics(folder) for folder in folders]
    configs = [Config.from_json(folder / CONFIG, unknown="drop") for folder in folders]
    return [
        Run(name, text, config, [line for line in lines if line["phase"] == "vapo"], _seconds(lines))
        for name, text, config, lines in zip(_names(folders), describe_settings(configs), configs, records, strict=True)
    ]


def _names(folders: list[Path]) -> list[str]:
    """The folders' own names, or their paths below the folder common to all where names repeat."""
    folders = [folder.resolve() for folder in folders]
    names = [folder.name for folder in folders]
    if len(set(names)) == len(names):
        return names
    common = Path(os.path.commonpath(folders))
    return [str(folder.relative_to(common)) for folder in folders]


def describe_settings(configs: Sequence[Config]) -> list[str]:
    """Name the preset that each run is nearest to, what it changed of that preset, and what else differs between runs.

    Example:
        >>> describe_settings([Config(seed=0), Config(seed=1, clip_higher=False)])
        ['vapo, seed=0', 'vapo, clip_higher=False, seed=1']
    """
    differing = [name for name in asdict(Config()) if len({getattr(config, name) for config in configs}) > 1]
    return [_describe(config, differing) for config in configs]


def _describe(config: Config, differing: list[str]) -> str:
    changes = {
        preset: {name: getattr(config, name) for name, value in settings.items() if getattr(config, name) != value}
        for preset, settings in PRESET_SETTINGS.items()
    }
    nearest = min(changes, key=lambda preset: len(changes[preset]))
    others = [name for name in differing if name not in PRESET_SETTINGS[nearest] and has_effect(config, name)]
    shown = changes[nearest] | {name: getattr(config, name) for name in others}
    return ", ".join([nearest, *(f"{name}={value}" for name, value in shown.items())])


def _seconds(records: list[dict[str, Any]]) -> float:
    """Time of a run up to its last line; one that was taken up again goes on counting."""
    return max((record.get("timing_s/elapsed") or 0.0 for record in records), default=0.0)


def _column(records: list[dict[str, Any]], name: str) -> dict[int, float]:
    """The steps at which a metric was logged, with its values."""
    return {record["step"]: record[name] for record in records if record.get(name) is not None}


def _table(runs: list[Run]) -> str:
    head = ["run", "settings", "RL steps", "accuracy before", "at best", "at last", "length", "time"]
    rows = [[cell.replace("|", "\\|") for cell in _row(run)] for run in runs]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |" for line in lines
    )


def _row(run: Run) -> list[str]:
    accuracy, length = _column(run.rl, ACCURACY), _column(run.rl, LENGTH)
    done = max((record["step"] for record in run.rl), default=0)
    before, best, last = NOT_LOGGED, NOT_LOGGED, NOT_LOGGED
    if 0 in accuracy:
        before = f"{accuracy[0]:.3f}"
    if accuracy:
        best_step = max(accuracy, key=accuracy.__getitem__)
        best, last = (f"{accuracy[step]:.3f} at {step}" for step in (best_step, max(accuracy)))
    lengths = " → ".join(f"{length[step]:.1f}" for step in sorted({min(length), max(length)})) if length else NOT_LOGGED
    return [run.name, run.settings, f"{done}/{run.config.steps}", before, best, last, lengths, clock(run.seconds)]


def comparison_figure(runs: Sequence[Run]) -> Figure:
    """Draw every panel with a line for each run that logged its metric, all over the same RL steps."""
    figure = Figure(figsize=(10, 7.6 + 0.25 * len(runs)), dpi=120, facecolor="white", layout="constrained")
    colours = colormaps["tab10"].colors
    styles = [{"color": colours[n % 10], "linestyle": DASHES[n // 10 % len(DASHES)]} for n in range(len(runs))]
    last_step = max((record["step"] for run in runs for record in run.rl), default=0)
    grid = grid_of_panels(figure, [panel.title for panel in PANELS], "RL step")
    for axes, panel in zip(grid, PANELS, strict=True):
        _draw_panel(axes, panel, runs, styles)
        axes.set_xlim(-0.01 * last_step, 1.01 * max(1, last_step))
    _draw_legend(figure, runs, styles)
    if last_step >= SMOOTHED_FROM:
        note = f"from {SMOOTHED_FROM} points on, the mean of the last twentieth of them; single steps are faint"
        figure.supxlabel(note, fontsize=7.5, color=QUIET, x=0.01, ha="left")
    return figure


def _draw_legend(figure: Figure, runs: Sequence[Run], styles: list[dict[str, Any]]) -> None:
    handles = [Line2D([], [], lw=2, **style) for style in styles]
    labels = [f"{run.name}: {run.settings}"[:110] for run in runs]
    legend = figure.legend(handles, labels, loc="outside upper left", fontsize=8, frameon=False, labelcolor=INK)
    legend.set_title(f"{len(runs)} runs", {"size": 11, "weight": "bold"})
    legend.set_alignment("left")


def _draw_panel(axes: Axes, panel: Panel, runs: Sequence[Run], styles: list[dict[str, Any]]) -> None:
    columns = [_column(run.rl, panel.metric) for run in runs]
    if not any(columns):
        return say_not_logged(axes)
    for column, style in zip(columns, styles, strict=True):
        if column:
            _draw_metric(axes, np.array(list(column)), np.array(list(column.values())), style)
    low, high = panel.limits
    if low is None and high is not None and axes.get_ylim()[0] < LEAST_EXPLAINED:
        low = LEAST_EXPLAINED
        set_title(axes, f"{panel.title} (cut at {LEAST_EXPLAINED:g})")
    axes.set_ylim(low, high)


def _draw_metric(axes: Axes, steps: np.ndarray, values: np.ndarray, style: dict[str, Any]) -> None:
    if len(steps) >= SMOOTHED_FROM:
        axes.plot(steps, values, lw=0.6, alpha=0.3, **style)
        width = math.ceil(len(steps) / SMOOTHED_SHARE)
        values = np.array([values[max(0, end - width) : end].mean() for end in range(1, len(values) + 1)])
    draw_line(axes, steps, values, **style)
