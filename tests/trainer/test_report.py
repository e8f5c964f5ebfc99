"""`write_curves`: the picture of a run."""

import json
import math
from pathlib import Path

import pytest
from matplotlib.image import imread

from vapo.report import PANELS, phase_stretches, read_metrics, write_curves

WIDTH, HEIGHT = 1200, 912


def write_metrics(folder: Path, records: list[dict]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")


def full_run() -> list[dict]:
    """Every metric that a panel shows, in every phase."""
    names = {name for plan in PANELS for line in plan.lines for name in (line.metric, *(line.band or ()))}
    places = [("warm_start", 10), ("warm_start", 20), ("value_pretraining", 1), ("vapo", 1), ("vapo", 2)]
    return [{"phase": phase, "step": step} | dict.fromkeys(names, step / 20) for phase, step in places]


def test_draws_a_picture_of_a_readable_size(tmp_path: Path) -> None:
    write_metrics(tmp_path, full_run())
    path = write_curves(tmp_path)
    assert path == tmp_path / "curves.png"
    assert imread(path).shape[:2] == (HEIGHT, WIDTH)


@pytest.mark.parametrize("plan", PANELS, ids=lambda plan: plan.title)
def test_each_panel_shows_its_metrics(tmp_path: Path, plan) -> None:
    names = {name for line in plan.lines for name in (line.metric, *(line.band or ()))}
    write_metrics(tmp_path / "with", full_run())
    write_metrics(tmp_path / "none", [{k: v for k, v in r.items() if k not in names} for r in full_run()])
    with_it, none = (imread(write_curves(tmp_path / name)) for name in ("with", "none"))
    changed = (with_it != none).any(axis=2)
    row, column = divmod(PANELS.index(plan), 3)
    panel = changed[row * HEIGHT // 3 : (row + 1) * HEIGHT // 3, column * WIDTH // 3 : (column + 1) * WIDTH // 3]
    assert panel.sum() > 100


def test_null_is_a_gap(tmp_path: Path) -> None:
    records = [{"phase": "vapo", "step": step, "actor/entropy": value} for step, value in enumerate((1.0, None, 2.0))]
    write_metrics(tmp_path, records)
    assert write_curves(tmp_path).exists()
    write_metrics(tmp_path, records[1:2])
    assert write_curves(tmp_path).exists()


@pytest.mark.parametrize(
    ("phases", "edges"),
    [
        (["vapo"], [(0, 1)]),
        (["value_pretraining"], [(0, 1)]),
        (["warm_start", "vapo"], [(0, 0.2), (0.2, 1)]),
        (["warm_start", "value_pretraining", "vapo"], [(0, 1 / 6), (1 / 6, 1 / 3), (1 / 3, 1)]),
    ],
)
def test_phases_share_the_axis(phases: list[str], edges: list[tuple[float, float]]) -> None:
    stretches = phase_stretches([{"phase": phase, "step": step} for phase in phases for step in (0, 7)])
    assert [stretch.phase for stretch in stretches] == phases
    assert [stretch.last_step for stretch in stretches] == [7] * len(phases)
    for stretch, (left, right) in zip(stretches, edges, strict=True):
        assert math.isclose(stretch.left, left) and math.isclose(stretch.right, right)


def test_a_run_of_one_step_zero_is_drawn(tmp_path: Path) -> None:
    write_metrics(tmp_path, [{"phase": "vapo", "step": 0, "val/accuracy_sampled": 0.25}])
    assert write_curves(tmp_path).exists()


def test_rejects_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"folder: expected a run's folder with metrics\.jsonl"):
        write_curves(tmp_path)
    with pytest.raises(ValueError, match=r"folder: expected a run's folder with metrics\.jsonl"):
        write_curves(tmp_path / "nowhere")
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="folder: expected metrics, got an empty"):
        write_curves(tmp_path)
    good = '{"phase": "vapo", "step": 1}\n'
    for bad in ("{", "[]", "3", '{"step": 1}', '{"phase": "rl", "step": 1}', '{"phase": "vapo", "step": "1"}'):
        (tmp_path / "metrics.jsonl").write_text(good + bad)
        with pytest.raises(ValueError, match="expected an object with phase and step in line 2"):
            read_metrics(tmp_path)
    assert not (tmp_path / "curves.png").exists()
