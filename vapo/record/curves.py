"""``curves.png``: a run's metrics as small panels over its phases."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vapo.record.records import read_metrics
from vapo.types import PHASES


class Line(NamedTuple):
    """A curve of a panel: its metric, its name if the panel has two, the metrics of a band around it."""

    metric: str
    label: str | None = None
    band: tuple[str, str] | None = None


class Panel(NamedTuple):
    """What one panel shows; ``limits`` fixes the vertical axis where the quantity itself has bounds."""

    title: str
    lines: tuple[Line, ...]
    limits: tuple[float, float] | None = None


LENGTH_RANGE = ("response_length/min", "response_length/max")
LAMBDA_RANGE = ("critic/lambda_policy/min", "critic/lambda_policy/max")
PANELS = (
    Panel(
        "accuracy on held-out problems",
        (Line("val/accuracy_sampled", "sampled"), Line("val/accuracy_greedy", "greedy")),
        (0.0, 1.03),
    ),
    Panel("reward, mean", (Line("critic/rewards/mean", "RL"), Line("critic/pretrain/score", "pretraining"))),
    Panel("response length (band: min to max)", (Line("response_length/mean", band=LENGTH_RANGE),)),
    Panel("entropy, nats per token", (Line("actor/entropy"),)),
    Panel(
        "explained variance of the critic",
        (
            Line("critic/vf_explained_var", "RL"),
            Line("critic/pretrain/vf_explained_var", "pretraining"),
            Line("critic/vf_explained_var_within", "RL, within groups"),
        ),
    ),
    Panel("λ of the policy (band: min to max)", (Line("critic/lambda_policy/mean", band=LAMBDA_RANGE),), (0.0, 1.03)),
    Panel("clip fraction", (Line("actor/pg_clipfrac"),)),
    Panel("KL to the policy that sampled", (Line("actor/ppo_kl"),)),
    Panel("loss of the warm start", (Line("warm_start/loss"),)),
)
COLOURS = ("#1f5f99", "#d9822b", "#5b8c5a")
SHADES = {"warm_start": "#eceff2", "value_pretraining": "#dfe7ee", "vapo": "#ffffff"}
INK = "#333f48"
QUIET = "#7b878f"


class Stretch(NamedTuple):
    """The part of the horizontal axis that a phase takes, whatever the number of its steps."""

    phase: str
    left: float
    right: float
    last_step: int


def write_curves(folder: Path) -> Path:
    """Draw a run's metrics as small panels over the phases that it went through.

    Every phase takes a fixed part of the axis, because a warm start has many cheap steps and VAPO few expensive ones.

    Args:
        folder: A run's folder with ``metrics.jsonl``; ``curves.png`` is written beside it.

    Returns:
        The path of ``curves.png``.

    Raises:
        ValueError: If ``metrics.jsonl`` is missing, empty, or not made of lines that `RunLog` writes.
    """
    folder = Path(folder)
    records = read_metrics(folder)
    if not records:
        raise ValueError(f"folder: expected metrics, got an empty {folder / 'metrics.jsonl'}")
    stretches = phase_stretches(records)
    figure = Figure(figsize=(10, 7.6), dpi=120, facecolor="white", layout="constrained")
    figure.suptitle(_title(folder, records), x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK)
    grid = grid_of_panels(figure, [panel.title for panel in PANELS], "step within the phase")
    for axes, panel in zip(grid, PANELS, strict=True):
        _show_phases(axes, stretches)
        _draw_panel(axes, panel, records, stretches)
    path = folder / "curves.png"
    figure.savefig(path)
    return path


def phase_stretches(records: list[dict[str, Any]]) -> list[Stretch]:
    """The parts of the axis from 0 to 1: VAPO takes four times the width of each phase before it."""
    steps = {phase: [record["step"] for record in records if record["phase"] == phase] for phase in PHASES}
    widths = {phase: 4.0 if phase == "vapo" else 1.0 for phase in PHASES if steps[phase]}
    edges = np.cumsum([0.0, *widths.values()]) / sum(widths.values())
    return [
        Stretch(phase, left, right, max(1, *steps[phase]))
        for phase, left, right in zip(widths, edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    ]


def grid_of_panels(figure: Figure, titles: Sequence[str], x_label: str) -> list[Axes]:
    """Nine panels of the same look: quiet ticks and a horizontal grid below the curves."""
    grid = figure.subplots(3, 3)
    for axes, title in zip(grid.flat, titles, strict=True):
        set_title(axes, title)
        axes.tick_params(labelsize=7.5, colors="#5c6870", length=2.5)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.locator_params(axis="y", nbins=6)
        axes.grid(axis="y", color="#d9dfe3", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#b8c1c7")
    for axes in grid[-1]:
        axes.set_xlabel(x_label, fontsize=7.5, color=QUIET)
    return list(grid.flat)


def set_title(axes: Axes, title: str) -> None:
    """Write the title of a panel, above the names of the phases."""
    axes.set_title(title, fontsize=9.5, loc="left", color=INK, pad=14)


def draw_line(axes: Axes, x: Sequence[float], y: Sequence[float], **style: Any) -> None:
    """Draw a curve; one of few points shows each of them."""
    axes.plot(x, y, lw=1.4, marker="o" if len(x) <= 16 else None, markersize=2.6, **style)


def say_not_logged(axes: Axes) -> None:
    """Say in a panel that it has nothing to show."""
    axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", va="center", color=QUIET)
    axes.set_yticks([])


def _title(folder: Path, records: list[dict[str, Any]]) -> str:
    sampled = [value for record in records if (value := record.get("val/accuracy_sampled")) is not None]
    course = f": sampled held-out accuracy {sampled[0]:.3f} → {sampled[-1]:.3f}" if sampled else ""
    return f"{folder.resolve().name}{course}"


def _show_phases(axes: Axes, stretches: list[Stretch]) -> None:
    """Shade and name the phases; ticks stand at the last step of each phase and at the quarters of VAPO."""
    ticks = {}
    for stretch in stretches:
        axes.axvspan(stretch.left, stretch.right, color=SHADES[stretch.phase], zorder=0, linewidth=0)
        middle = (stretch.left + stretch.right) / 2
        name = PHASES[stretch.phase].replace("value pretraining", "critic")
        axes.text(middle, 1.02, name, transform=axes.get_xaxis_transform(), ha="center", fontsize=6.5, color=QUIET)
        quarters = (1, 2, 3, 4) if stretch.phase == "vapo" and stretch.last_step >= 8 else (4,)
        steps = [round(stretch.last_step * quarter / 4) for quarter in quarters]
        ticks |= {_x(stretch, step): str(step) for step in steps}
    axes.set_xlim(0, 1)
    axes.set_xticks(list(ticks), list(ticks.values()))


def _draw_panel(axes: Axes, panel: Panel, records: list[dict[str, Any]], stretches: list[Stretch]) -> None:
    lines = zip(panel.lines, COLOURS, strict=False)
    drawn = sum(_draw_metric(axes, line, colour, records, stretches) for line, colour in lines)
    if not drawn:
        return say_not_logged(axes)
    if drawn > 1:
        axes.legend(fontsize=7.5, frameon=False, labelcolor=INK, handlelength=1.2)
    if panel.limits is not None:
        axes.set_ylim(panel.limits)


def _x(stretch: Stretch, step: int) -> float:
    return stretch.left + (stretch.right - stretch.left) * step / stretch.last_step


def _draw_metric(axes: Axes, line: Line, colour: str, records: list[dict[str, Any]], stretches: list[Stretch]) -> bool:
    """Draw each phase's part, and a dotted line from one to the next; say whether any phase has this metric."""
    end: tuple[float, float] | None = None
    for stretch in stretches:
        logged = [record for record in records if record["phase"] == stretch.phase and line.metric in record]
        if not logged:
            continue
        x, y = [_x(stretch, record["step"]) for record in logged], _column(logged, line.metric)
        if end is not None:
            axes.plot([end[0], x[0]], [end[1], y[0]], color=colour, lw=0.9, ls=":")
        draw_line(axes, x, y, color=colour, label=line.label if end is None else None)
        if line.band is not None:
            axes.fill_between(x, *(_column(logged, name) for name in line.band), color=colour, alpha=0.15, linewidth=0)
        end = x[-1], y[-1]
    return end is not None


def _column(records: list[dict[str, Any]], name: str) -> list[float]:
    values = (record.get(name) for record in records)
    return [math.nan if value is None else value for value in values]
