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


def write_metrics(folder: Path, records: list[dict]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")


def write_run(folder: Path, records: list[dict], **settings: object) -> Path:
    write_metrics(folder, records)
    (folder / "config.json").write_text(json.dumps(settings), "utf-8")
    return folder


def evaluated(*accuracies: float | None, every: int = 10) -> list[dict]:
    """A warm start of 9 s, then an evaluation every so many RL steps, each step taking 2 s."""
    records = [{"phase": "warm_start", "step": 5, "timing_s/elapsed": 9.0}]
    for number, accuracy in enumerate(accuracies):
        step = number * every
        metrics = {
            "val/accuracy_sampled": accuracy,
            "val/response_length": 20.0 + step,
            "actor/entropy": 1 / (1 + step),
        }
        records.append({"phase": "vapo", "step": step, "timing_s/elapsed": 9.0 + 2 * step} | metrics)
    return records


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


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


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """The picture of a run that has every metric."""
    folder = tmp_path_factory.mktemp("curves") / "run"
    write_metrics(folder, full_run())
    return imread(write_curves(folder))


@pytest.mark.parametrize("plan", PANELS, ids=lambda plan: plan.title)
def test_each_panel_shows_its_metrics(tmp_path: Path, curves: np.ndarray, plan) -> None:
    names = {name for line in plan.lines for name in (line.metric, *(line.band or ()))}
    write_metrics(tmp_path / "run", [{k: v for k, v in r.items() if k not in names} for r in full_run()])
    changed = (curves != imread(write_curves(tmp_path / "run"))).any(axis=2)
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
        (tmp_path / "metrics.jsonl").write_text(f"{good}{bad}\n")
        with pytest.raises(ValueError, match="expected an object with phase and step in line 2"):
            read_metrics(tmp_path)
    assert not (tmp_path / "curves.png").exists()


def test_a_line_cut_while_it_was_written_is_left_out(tmp_path: Path) -> None:
    write_metrics(tmp_path, full_run())
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "vapo", "st')
    assert read_metrics(tmp_path) == full_run()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write("λ".encode()[:1])
    assert read_metrics(tmp_path) == full_run()


def test_the_table_of_two_runs(tmp_path: Path) -> None:
    ours = write_run(tmp_path / "ours", evaluated(0.25, 0.75, 0.5), seed=1, steps=20, **settings_of("vapo"))
    theirs = write_run(tmp_path / "the|irs", evaluated(0.125, 0.25), seed=1, steps=40, **settings_of("ppo"))
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


def settings_of(preset: str) -> dict[str, object]:
    """All settings that any preset sets, as this one has them."""
    config = vars(Config())
    names = {name for settings in PRESETS.values() for name in settings}
    return {name: config[name] for name in names} | PRESETS[preset]


def test_settings_are_told_by_what_differs() -> None:
    vapo, ppo = settings_of("vapo"), settings_of("ppo")
    for configs, expected in (
        ([vapo | {"seed": 0}, vapo | {"seed": 0}], ["vapo", "vapo"]),
        ([vapo | {"seed": 0}, vapo | {"seed": 1}], ["vapo, seed=0", "vapo, seed=1"]),
        ([vapo, vapo | {"clip_higher": False}], ["vapo", "vapo, clip_higher=False"]),
        ([ppo, vapo | {"positive_nll": False}], ["ppo", "vapo, positive_nll=False"]),
        ([settings_of(name) for name in PRESETS], list(PRESETS)),
        # An older version had fewer settings; where there are none, nothing can be said.
        ([vapo | {"top_k": 0, "seed": 0}, vapo | {"seed": 0}, {}], ["vapo, top_k=0", "vapo", "–"]),
    ):
        assert describe_settings(configs) == expected


def test_runs_with_less_than_others_are_compared(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    whole = write_run(tmp_path / "whole", evaluated(0.25, 0.75), steps=10)
    cut = tmp_path / "cut"
    write_metrics(cut, [*evaluated(None, None), {"phase": "vapo", "step": 12, "timing_s/elapsed": 3700.0}])
    early = write_run(tmp_path / "early", evaluated()[:1], steps=10)
    empty = write_run(tmp_path / "empty", [], steps=10)
    rows = cells(compare([whole, cut, early, empty], picture))[2:]
    assert rows[0][2:] == ["10/10", "0.250", "0.750 at 10", "0.750 at 10", "20.0 → 30.0", "0:29"]
    assert rows[1][2:] == ["12", "–", "–", "–", "20.0 → 30.0", "1:01:40"]
    assert rows[2][2:] == ["0/10", "–", "–", "–", "–", "0:09"]
    assert rows[3][2:] == ["0/10", "–", "–", "–", "–", "0:00"]
    assert cells(compare([empty], picture))[2:] == [rows[3]]


def test_the_time_of_a_run_is_that_of_its_last_line(tmp_path: Path) -> None:
    elapsed = (1.0, 60.0, 62.0, 95.0, None)
    records = [{"phase": "vapo", "step": step, "timing_s/elapsed": time} for step, time in enumerate(elapsed)]
    assert cells(compare([write_run(tmp_path / "run", records)], tmp_path / "picture.png"))[2][-1] == "1:35"


def test_equal_names_are_told_apart(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        (tmp_path / parent).mkdir()
        write_run(tmp_path / parent / "seed0", evaluated(0.5))
    table = compare([tmp_path / "a" / "seed0", tmp_path / "b" / "seed0"], tmp_path / "picture.png")
    assert [row[0] for row in cells(table)[2:]] == ["a/seed0", "b/seed0"]


def test_each_panel_compares_its_metric(tmp_path: Path) -> None:
    steps = range(1, 6)
    metrics = [panel.metric for panel in COMPARED]
    for run in (1, 2):
        records = [
            {"phase": "vapo", "step": step}
            | {name: 1 / (step + 10 * place + run) for place, name in enumerate(metrics)}
            for step in steps
        ]
        write_run(tmp_path / str(run), records)
    figure = comparison_figure(read_runs([tmp_path / "1", tmp_path / "2"]))
    for place, (axes, panel) in enumerate(zip(figure.axes, COMPARED, strict=True)):
        assert axes.get_title(loc="left") == panel.title
        for run, line in enumerate(axes.lines, 1):
            assert line.get_color() == figure.axes[0].lines[run - 1].get_color()
            assert list(line.get_xdata()) == list(steps)
            assert list(line.get_ydata()) == [1 / (step + 10 * place + run) for step in steps]
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
    for text in ("[]", "{"):
        (run / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"expected the settings of a run in .*config\.json, got no JSON object"):
            compare([run], picture)
    assert not list(tmp_path.glob("picture*"))
