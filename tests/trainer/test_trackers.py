"""Trackers: tensorboard's files read back; trackio and wandb as modules that record how they are called."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vapo.record.trackers import open_trackers

CONFIG = {"seed": 3, "stop": ("</answer>",), "data": Path("rows.parquet")}
SETTINGS = {"seed": 3, "stop": ["</answer>"], "data": "rows.parquet"}


@pytest.fixture
def fakes(monkeypatch):
    """``trackio`` and ``wandb`` that note every call; ``calls`` holds them."""
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    calls = []

    def fake(name):
        def init(**settings):
            calls.append((name, "init", settings))
            return SimpleNamespace(
                log=lambda metrics, step: calls.append((name, "log", step, metrics)),
                finish=lambda: calls.append((name, "finish")),
            )

        module = ModuleType(name)
        module.init = init
        return module

    modules = {name: fake(name) for name in ("trackio", "wandb")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(calls=calls, **modules)


def events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder / "tensorboard")).Reload()


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = events(folder)
    return {name: [(event.step, event.value) for event in found.Scalars(name)] for name in found.Tags()["scalars"]}


def test_tensorboard_holds_all_phases_on_one_axis_and_the_settings(tmp_path: Path) -> None:
    trackers = open_trackers(["tensorboard"], tmp_path, CONFIG)
    trackers.log(1, {"warm_start/loss": 2.5})
    trackers.log(2, {"response_length/mean": 18.0})
    trackers.log(2, {"val/accuracy_sampled": 0.25})
    trackers.log(3, {"response_length/mean": 20.0, "actor/entropy": 0.5})
    # Written at once, for a run that is killed.
    assert scalars(tmp_path)["actor/entropy"] == [(3, 0.5)]
    trackers.close()
    assert scalars(tmp_path) == {
        "warm_start/loss": [(1, 2.5)],
        "response_length/mean": [(2, 18.0), (3, 20.0)],
        "val/accuracy_sampled": [(2, 0.25)],
        "actor/entropy": [(3, 0.5)],
    }
    (event,) = events(tmp_path).Tensors("config/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert json.loads(text.strip("`json\n")) == SETTINGS


def test_tensorboard_forgets_what_a_resumed_run_does_again(tmp_path: Path) -> None:
    first = open_trackers(["tensorboard"], tmp_path, CONFIG)
    for step in (1, 2, 3, 4):
        first.log(step, {"actor/entropy": float(step)})
    again = open_trackers(["tensorboard"], tmp_path, CONFIG)
    again.log(3, {"actor/entropy": 30.0})
    again.close()
    assert scalars(tmp_path) == {"actor/entropy": [(1, 1.0), (2, 2.0), (3, 30.0)]}


def test_trackio_and_wandb_are_told_the_run(tmp_path: Path, fakes) -> None:
    folder = tmp_path / "seed3"
    trackers = open_trackers(["trackio", "wandb"], folder, CONFIG)
    trackers.log(1, {"actor/entropy": 0.5})
    trackers.close()
    trackers.log(2, {"actor/entropy": 0.4})
    identity = (folder / "tracker_id").read_text()
    assert fakes.calls == [
        ("trackio", "init", {"project": "vapo", "name": f"seed3-{identity}", "config": SETTINGS, "resume": "allow"}),
        (
            *("wandb", "init"),
            {"project": "vapo", "name": "seed3", "id": identity, "dir": folder, "config": SETTINGS, "resume": "allow"},
        ),
        ("trackio", "log", 1, {"actor/entropy": 0.5}),
        ("wandb", "log", 1, {"actor/entropy": 0.5}),
        ("trackio", "finish"),
        ("wandb", "finish"),
    ]


def test_a_run_keeps_its_identity_and_shares_it_with_no_other(tmp_path: Path, fakes, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "puzzles")
    for folder in (tmp_path / "a" / "run", tmp_path / "a" / "run", tmp_path / "b" / "run"):
        open_trackers(["wandb"], folder, CONFIG).close()
    first, again, other = (call[2]["id"] for call in fakes.calls if call[1] == "init")
    assert first == again != other
    assert {call[2]["project"] for call in fakes.calls if call[1] == "init"} == {"puzzles"}


def test_a_tracker_that_fails_is_left_out(tmp_path: Path, fakes) -> None:
    run = SimpleNamespace(log=lambda metrics, step: 1 / 0, finish=lambda: 1 / 0)
    fakes.trackio.init = lambda **_: run
    trackers = open_trackers(["trackio", "wandb", "tensorboard"], tmp_path, CONFIG)
    with pytest.warns(RuntimeWarning, match="tracker trackio is left out from here on: ZeroDivisionError") as warned:
        trackers.log(1, {"actor/entropy": 0.5})
        trackers.log(2, {"actor/entropy": 0.25})
        trackers.close()
    assert len(warned) == 1
    assert [call[1:3] for call in fakes.calls if call[1] == "log"] == [("log", 1), ("log", 2)]
    assert scalars(tmp_path) == {"actor/entropy": [(1, 0.5), (2, 0.25)]}


def test_a_tracker_that_fails_to_close_is_named(tmp_path: Path, fakes) -> None:
    fakes.trackio.init = lambda **_: SimpleNamespace(log=lambda metrics, step: None, finish=lambda: 1 / 0)
    trackers = open_trackers(["trackio", "wandb"], tmp_path, CONFIG)
    with pytest.warns(RuntimeWarning, match="tracker trackio"):
        trackers.close()
    assert fakes.calls[-1] == ("wandb", "finish")


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_a_missing_package_is_named_before_anything_is_opened(tmp_path: Path, monkeypatch, fakes, name) -> None:
    # None in sys.modules is how Python marks a module that cannot be imported.
    monkeypatch.setitem(sys.modules, name, None)
    names = ["wandb" if name != "wandb" else "trackio", name]
    with pytest.raises(ValueError, match=rf"by pip install 'vapo\[track\]'; '{name}' gave") as raised:
        open_trackers(names, tmp_path / "run", CONFIG)
    assert isinstance(raised.value.__cause__, ImportError)
    assert fakes.calls == [] and not (tmp_path / "run").exists()


def test_one_that_cannot_start_takes_the_others_along(tmp_path: Path, fakes) -> None:
    def refuse(**_):
        raise RuntimeError("not logged in")

    fakes.wandb.init = refuse
    with pytest.raises(ValueError, match=r"trackers must be able to start; wandb gave RuntimeError\('not logged in'\)"):
        open_trackers(["trackio", "wandb"], tmp_path, CONFIG)
    assert fakes.calls[-1] == ("trackio", "finish")


def test_rejects_bad_input(tmp_path: Path) -> None:
    for names in (["tensorboard", "mlflow"], ["tensorboard", "tensorboard"]):
        message = f"trackers must be among tensorboard, trackio, wandb, each once; got {', '.join(names)}"
        with pytest.raises(ValueError, match=message):
            open_trackers(names, tmp_path, CONFIG)
    assert list(tmp_path.iterdir()) == []
