"""`write_curves`: the picture of a run. `compare`: the picture and table of several."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from vapo.config import Config
from vapo.presets import PRESETS
from vapo.record.comparison import PANELS as COMPARED
from vapo.record.comparison import compare, comparison_figure, describe_settings, read_runs
from vapo.record.curves import PANELS, phase_stretches, write_curves
from vapo.record.records import read_metrics

WIDTH, HEIGHT = 1200, 912


def write_run(folder: Path, records: list[dict], **settings: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    (folder / "config.json").write_text(json.dumps(settings), "utf-8")
    return folder


def evaluated(*accuracies: float | None, every: int = 10) -> list[dict]:
    """A warm start of 9 s, then an evaluation every so many RL steps, each step taking 2 s."""
    records = [{"phase": "warm_start", "step": 5, "timing_s/elapsed": 9.0}]
    for number, accuracy in enumerate(accuracies):
        step = number * every
        metrics = {"val/accuracy_sampled": accuracy, "val/response_length": 20.0 + step, "actor/entropy": 0.5}
        records.append({"phase": "vapo", "step": step, "timing_s/elapsed": 9.0 + 2 * step} | metrics)
    return records


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def full_run() -> list[dict]:
    """Every metric that a panel shows, in every phase."""
    names = {name for plan in PANELS for line in plan.lines for name in (line.metric, *(line.band or ()))}
    places = [("warm_start", 10), ("warm_start", 20), ("value_pretraining", 1), ("vapo", 1), ("vapo", 2)]
    return [{"phase": phase, "step": step} | dict.fromkeys(names, step / 20) for phase, step in places]


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """The picture of a run that has every metric."""
    path = write_curves(write_run(tmp_path_factory.mktemp("curves") / "run", full_run()))
    assert path.name == "curves.png" and imread(path).shape[:2] == (HEIGHT, WIDTH)
    return imread(path)


@pytest.mark.parametrize("plan", PANELS, ids=lambda plan: plan.title)
def test_each_panel_shows_its_metrics(tmp_path: Path, curves: np.ndarray, plan) -> None:
    names = {name for line in plan.lines for name in (line.metric, *(line.band or ()))}
    write_run(tmp_path / "run", [{k: v for k, v in r.items() if k not in names} for r in full_run()])
    changed = (curves != imread(write_curves(tmp_path / "run"))).any(axis=2)
    row, column = divmod(PANELS.index(plan), 3)
    panel = changed[row * HEIGHT // 3 : (row + 1) * HEIGHT // 3, column * WIDTH // 3 : (column + 1) * WIDTH // 3]
    assert panel.sum() > 100


@pytest.mark.parametrize("values", [(1.0, None, 2.0), (None,), (0.25,)])
def test_null_is_a_gap_and_one_step_is_drawn(tmp_path: Path, values: tuple[float | None, ...]) -> None:
    records = [{"phase": "vapo", "step": step, "actor/entropy": value} for step, value in enumerate(values)]
    assert write_curves(write_run(tmp_path, records)).exists()


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


def test_rejects_bad_input(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=r"folder: expected a run's folder with metrics\.jsonl"):
            write_curves(folder)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="folder: expected metrics, got an empty"):
        write_curves(tmp_path)
    good = '{"phase": "vapo", "step": 1}\n'
    for bad in ("{", "[]", "3", '{"step": 1}', '{"phase": "rl", "step": 1}', '{"phase": "vapo", "step": "1"}'):
        (tmp_path / "metrics.jsonl").write_text(f"{good}{bad}\n")
        with pytest.raises(ValueError, match="expected an object with phase and step in line 2"):
            read_metrics(tmp_path)
    assert not (tmp_path / "curves.png").exists()


def test_a_line_cut_while_it_was_written_is_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, full_run())
    for part in (b'{"phase": "vapo", "st', "λ".encode()[:1]):
        with (tmp_path / "metrics.jsonl").open("ab") as file:
            file.write(part)
        assert read_metrics(tmp_path) == full_run()


def test_the_table_of_two_runs(tmp_path: Path) -> None:
    ours = write_run(tmp_path / "ours", evaluated(0.25, 0.75, 0.5), seed=1, steps=20)
    theirs = write_run(tmp_path / "the|irs", evaluated(0.125, 0.25), seed=1, steps=40, **PRESETS["ppo"])
    table = compare([ours, theirs], tmp_path / "pictures" / "both.png")
    assert table.splitlines()[3].startswith("| the\\|irs | ppo, steps=40  | 10/40 ")
    assert len({len(line) for line in table.splitlines()}) == 1
    assert cells(table.replace("\\|", "/")) == [
        ["run", "settings", "RL steps", "accuracy before", "at best", "at last", "length", "time"],
        ["-" * len(cell) for cell in table.splitlines()[0].strip("|").split("|") for cell in [cell[1:-1]]],
        ["ours", "vapo, steps=20", "20/20", "0.250", "0.750 at 10", "0.500 at 20", "20.0 → 40.0", "0:49"],
        ["the/irs", "ppo, steps=40", "10/40", "0.125", "0.250 at 10", "0.250 at 10", "20.0 → 30.0", "0:29"],
    ]
    assert imread(tmp_path / "pictures" / "both.png").shape[1] == WIDTH


@pytest.mark.parametrize(
    ("configs", "expected"),
    [
        ([Config(), Config()], ["vapo", "vapo"]),
        ([Config(seed=0), Config(seed=1)], ["vapo, seed=0", "vapo, seed=1"]),
        ([Config(), Config(clip_higher=False)], ["vapo", "vapo, clip_higher=False"]),
        ([Config(**PRESETS["ppo"]), Config(positive_nll=False)], ["ppo", "vapo, positive_nll=False"]),
        ([Config(alpha=0.1), Config(**PRESETS["ppo"])], ["vapo, alpha=0.1", "ppo"]),
        ([Config(**settings) for settings in PRESETS.values()], list(PRESETS)),
    ],
)
def test_settings_are_told_by_what_differs(configs: list[Config], expected: list[str]) -> None:
    assert describe_settings(configs) == expected


def test_runs_with_less_than_others_are_compared(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    # A setting of another version, and a run that ended without an evaluation.
    whole = write_run(tmp_path / "whole", evaluated(0.25, 0.75), steps=10, alhpa=1)
    last = {"phase": "vapo", "step": 12, "timing_s/elapsed": 3700.0}
    cut = write_run(tmp_path / "cut", [*evaluated(None, None), last], steps=20)
    early = write_run(tmp_path / "early", evaluated()[:1], steps=10)
    empty = write_run(tmp_path / "empty", [], steps=10)
    rows = cells(compare([whole, cut, early, empty], picture))[2:]
    assert rows[0][2:] == ["10/10", "0.250", "0.750 at 10", "0.750 at 10", "20.0 → 30.0", "0:29"]
    assert rows[1][2:] == ["12/20", "–", "–", "–", "20.0 → 30.0", "1:01:40"]
    assert rows[2][2:] == ["0/10", "–", "–", "–", "–", "0:09"]
    assert rows[3][2:] == ["0/10", "–", "–", "–", "–", "0:00"]
    assert cells(compare([empty], picture))[2][2:] == rows[3][2:]


def test_the_time_of_a_run_is_that_of_its_last_line(tmp_path: Path) -> None:
    elapsed = (1.0, 60.0, 62.0, 95.0, None)
    records = [{"phase": "vapo", "step": step, "timing_s/elapsed": time} for step, time in enumerate(elapsed)]
    assert cells(compare([write_run(tmp_path / "run", records)], tmp_path / "picture.png"))[2][-1] == "1:35"


def test_equal_names_are_told_apart(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / parent / "seed0", evaluated(0.5)) for parent in ("a", "b")]
    assert [row[0] for row in cells(compare(folders, tmp_path / "picture.png"))[2:]] == ["a/seed0", "b/seed0"]


def test_each_panel_compares_its_metric(tmp_path: Path) -> None:
    steps, runs = range(1, 6), []
    for run in (1, 2):
        values = [{panel.metric: 1 / (step + 10 * i + run) for i, panel in enumerate(COMPARED)} for step in steps]
        records = [{"phase": "vapo", "step": step} | metrics for step, metrics in zip(steps, values, strict=True)]
        runs.append(write_run(tmp_path / str(run), records))
    figure = comparison_figure(read_runs(runs))
    for i, (axes, panel) in enumerate(zip(figure.axes, COMPARED, strict=True)):
        assert axes.get_title(loc="left") == panel.title
        for run, line in enumerate(axes.lines, 1):
            assert line.get_color() == figure.axes[0].lines[run - 1].get_color()
            assert list(line.get_xdata()) == list(steps)
            assert list(line.get_ydata()) == [1 / (step + 10 * i + run) for step in steps]
        assert len({line.get_color() for line in axes.lines}) == len(axes.lines) == 2


def test_axes_are_honest(tmp_path: Path) -> None:
    """The same steps in every panel; shares from 0 to 1 and lengths from 0; what is cut off is said."""
    explained = [{"critic/vf_explained_var": value} for value in (-40.0, 0.5)]
    records = [{"phase": "vapo", "step": step} | metrics for step, metrics in enumerate(explained)]
    runs = read_runs([write_run(tmp_path / "a", evaluated(0.5, 0.6)), write_run(tmp_path / "b", records)])
    axes = {panel.metric: axes for panel, axes in zip(COMPARED, comparison_figure(runs).axes, strict=True)}
    assert len({each.get_xlim() for each in axes.values()}) == 1
    assert axes["val/accuracy_sampled"].get_ylim() == (0, 1.03)
    assert axes["actor/entropy"].get_ylim()[0] == 0
    assert axes["critic/vf_explained_var"].get_ylim() == (-1, 1.03)
    assert axes["critic/vf_explained_var"].get_title(loc="left") == "explained variance of the critic (cut at -1)"
    assert [text.get_text() for text in axes["critic/vf_explained_var_within"].texts] == ["not logged"]


def test_a_long_record_is_smoothed_before_its_single_steps(tmp_path: Path) -> None:
    values = np.random.default_rng(0).random(100)
    records = [{"phase": "vapo", "step": step, "critic/score/mean": value} for step, value in enumerate(values)]
    figure = comparison_figure(read_runs([write_run(tmp_path / "run", records)]))
    single, smooth = figure.axes[2].lines
    assert np.array_equal(single.get_ydata(), values) and single.get_alpha() < 0.5
    expected = [values[max(0, end - 5) : end].mean() for end in range(1, 101)]
    assert np.allclose(smooth.get_ydata(), expected)
    assert "mean of the last twentieth" in figure.get_supxlabel()


def test_many_runs_have_styles_of_their_own(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / str(number), evaluated(0.1, 0.02 * number)) for number in range(23)]
    lines = comparison_figure(read_runs(folders)).axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 23


def test_a_picture_may_be_a_drawing(tmp_path: Path) -> None:
    compare([write_run(tmp_path / "run", evaluated(0.5))], tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").read_text("utf-8").startswith("<?xml")


def test_compare_rejects_bad_input(tmp_path: Path) -> None:
    run, picture = write_run(tmp_path / "run", evaluated(0.5)), tmp_path / "picture.png"
    (tmp_path / "no_run").mkdir()
    for runs, target, message in (
        ([], picture, "runs must name at least 1 folder; got none"),
        ([run, tmp_path / "no_run" / ".." / "run"], picture, "runs must be different folders"),
        ([run, tmp_path / "no_run"], picture, r"folder: expected a run's folder with metrics\.jsonl, got .*no_run"),
        ([run, tmp_path / "nowhere"], picture, r"folder: expected a run's folder with metrics\.jsonl"),
        ([run], tmp_path / "picture.gif", r"picture must end in one of \.png, \.svg, \.pdf"),
        ([run], tmp_path / "picture", "picture must end in one of"),
    ):
        with pytest.raises(ValueError, match=message):
            compare(runs, target)
    for text in ("[]", "{", None):
        (run / "config.json").write_text(text) if text else (run / "config.json").unlink()
        with pytest.raises(ValueError, match=r"config\.json(: | must hold the settings of a run)"):
            compare([run], picture)
    assert not list(tmp_path.glob("picture*"))
