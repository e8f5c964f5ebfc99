"""Tables and pictures of what was measured."""

import datetime
import os
import re
import subprocess
from pathlib import Path

import torch

from benchmarks import device as device_of
from benchmarks.harness import LEFT_OUT, ROOT, Bench, Row

RESULTS = Path(__file__).parent / "results"
BASELINE = "reference (eager)"
OURS, PEERS, BARE = "#1f6fb2", "#9aa5b1", "#d9822b"


def commit() -> str:
    """The commit that the code is at, and whether files differ from it."""
    try:
        options = {"cwd": ROOT, "text": True, "stderr": subprocess.DEVNULL}
        head = subprocess.check_output(["git", "rev-parse", "--short=12", "HEAD"], **options).strip()
        changed = subprocess.check_output(
            ["git", "status", "--porcelain", "--", "vapo", "vapo_kernels", "benchmarks/*.py"], **options
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + (" with changes" if changed.strip() else "")


def environment(device: str, command: str) -> dict[str, str]:
    """What a reader needs to print the table again."""
    found = {
        "device": device_of.name(device),
        "system": f"{os.uname().sysname} {os.uname().machine}",
        "versions": device_of.versions(),
        "threads": f"{torch.get_num_threads()}",
        "load": f"{os.getloadavg()[0]:.1f} when it began",
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "command": command,
    }
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            found["driver"] = subprocess.check_output(query, text=True).splitlines()[0]
        except (OSError, subprocess.CalledProcessError, IndexError):
            found["driver"] = "unknown"
    return found


def listed(environment: dict[str, str], limits: dict[str, float]) -> str:
    """The environment and the device's own figures as a list."""
    lines = [*environment.items(), ("measured limits", device_of.limits_sentence(limits))]
    return "\n".join(f"- {name}: {value}" for name, value in lines)


def markdown(bench: Bench, rows: list[Row], copy: float) -> str:
    """The table of one benchmark, with the share of the device's copy bandwidth; a note names what it leaves out."""
    columns = ["shape", "dtype", "provider", "part", "median ms", "20–80 %", "× reference", "peak MiB", "error"]
    with_bytes = any(row.bytes_moved for row in rows)
    columns += ["GB/s", "of copy"] * with_bytes
    lines = [f"### {bench.title}", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    baseline = {(r.shape, r.dtype, r.mode): r.median_ms for r in rows if r.provider == BASELINE}
    tried = [row for row in rows if row.failure != LEFT_OUT]
    lines += ["| " + " | ".join(_cells(row, baseline, with_bytes, copy)) + " |" for row in tried]
    return "\n".join([*lines, "", f"{bench.note}{_left_out(rows)}", ""])


def _left_out(rows: list[Row]) -> str:
    """A sentence that names what the budget had no time for, if anything."""
    missing: dict[str, list[str]] = {}
    for row in rows:
        if row.failure == LEFT_OUT:
            missing.setdefault(row.provider, []).append(f"{row.shape}, {row.dtype}")
    names = [f"{provider} ({'; '.join(shapes)})" for provider, shapes in missing.items()]
    return f" The time was over before these were measured: {'; '.join(names)}." if names else ""


def _cells(row: Row, baseline: dict, with_bytes: bool, copy: float) -> list[str]:
    cells = [row.shape, row.dtype, row.provider]
    if row.median_ms is None:
        return [*cells, "–", row.failure, *[""] * (4 + 2 * with_bytes)]
    reference = baseline.get((row.shape, row.dtype, row.mode))
    cells += [row.mode, _short(row.median_ms), f"{_short(row.low_ms)}–{_short(row.high_ms)}"]
    cells.append(f"{row.median_ms / reference:.3g}" if reference else "–")
    cells.append("–" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.0f}")
    cells.append("–" if row.error is None else f"{row.error:.0e}")
    if with_bytes:
        rate = row.bytes_moved / row.median_ms * 1000 if row.bytes_moved else None
        cells += [f"{rate / 1e9:.1f}", f"{rate / copy:.0%}"] if rate else ["–", "–"]
    return cells


def _short(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def picture(bench: Bench, rows: list[Row], file: Path) -> bool:
    """Draw median times with their 20/80 quantiles, and peaks, one panel a shape and part; False if none was timed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in rows if row.median_ms is not None]
    panels = list(dict.fromkeys((row.shape, row.dtype, row.mode) for row in rows))
    if not panels:
        return False
    with_peak = any(row.peak_bytes for row in rows)
    tallest = max(sum((r.shape, r.dtype, r.mode) == panel for r in rows) for panel in panels)
    size = (11, len(panels) * (0.9 + 0.3 * tallest))
    figure, axes = plt.subplots(len(panels), 1 + with_peak, figsize=size, squeeze=False, layout="constrained")
    for panel, line in zip(panels, axes, strict=True):
        shown = [row for row in rows if (row.shape, row.dtype, row.mode) == panel][::-1]
        colours = [OURS if r.provider.startswith("ours") else BARE if r.error is None else PEERS for r in shown]
        names, medians = [row.provider for row in shown], [row.median_ms for row in shown]
        spread = [[r.median_ms - r.low_ms for r in shown], [r.high_ms - r.median_ms for r in shown]]
        line[0].barh(names, medians, xerr=spread, color=colours, error_kw={"linewidth": 1})
        line[0].set(title=" · ".join(panel), xlabel="ms (median, 20–80 %)")
        if with_peak:
            line[1].barh(names, [(row.peak_bytes or 0) / 2**20 for row in shown], color=colours)
            line[1].set(xlabel="peak memory, MiB", yticks=[])
    figure.suptitle(bench.title)
    figure.savefig(file, dpi=110)
    plt.close(figure)
    return True


def slug(text: str) -> str:
    """Words for a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
