"""``vapo evaluate``: what a run's own evaluation said is said again, and settings have their say."""

import json

import pytest

import vapo.evaluate_model
from vapo.cli import main
from vapo.config import Config
from vapo.evaluate_model import evaluate_model
from vapo.trainer import train

SETTINGS = {
    "task": "",
    "reward": "",
    "problems": 4,
    "samples": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "max_new_tokens": 0,
    "seed": 0,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a run whose policy has learned to answer at times, by its warm start."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    config = Config(
        warm_start_steps=60,
        warm_start_batch=16,
        give_up=0.9,
        value_pretraining=False,
        steps=1,
        num_prompts=2,
        group_size=2,
        mini_batches=1,
        max_new_tokens=30,
        eval_problems=16,
        eval_samples=4,
        threads=1,
        device="cpu",
    )
    train(config, folder)
    return folder


def last_evaluation(folder):
    """The held-out numbers in the last line of the run's metrics."""
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return {name: value for name, value in last.items() if name.startswith("val/")}


def test_a_runs_last_evaluation_is_said_again(folder):
    expected = last_evaluation(folder)
    assert 0 < expected["val/accuracy_sampled"] < 1
    assert evaluate_model(str(folder), **SETTINGS | {"problems": 16, "samples": 4}) == pytest.approx(expected)


def test_another_seed_samples_others(folder):
    first, again, other = (
        evaluate_model(str(folder), **SETTINGS | {"problems": 16, "samples": 4, "seed": seed}) for seed in (0, 0, 1)
    )
    assert first == again != other
    assert first["val/accuracy_greedy"] == other["val/accuracy_greedy"]


def test_settings_of_the_sampling_arrive(folder, monkeypatch):
    seen = {}
    monkeypatch.setattr(vapo.evaluate_model, "evaluate", lambda *_, **settings: seen.update(settings) or {})
    evaluate_model(str(folder), **SETTINGS | {"samples": 3, "temperature": 0.5, "top_p": 0.7})
    sampling = seen["sampling"]
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p, seen["samples"]) == (30, 0.5, 0.7, 3)
    evaluate_model(str(folder), **SETTINGS | {"max_new_tokens": 9})
    assert seen["sampling"].max_new_tokens == 9


def test_a_model_that_is_no_run_wants_a_task(folder):
    with pytest.raises(ValueError, match="task must be given for a model that is no run; got none for"):
        evaluate_model(str(folder / "policy"), **SETTINGS)
    settings = {"task": "running-total", "problems": 16, "samples": 4, "max_new_tokens": 30}
    expected = last_evaluation(folder)
    assert evaluate_model(str(folder / "policy"), **SETTINGS | settings) == pytest.approx(expected)


def test_a_run_that_evaluated_on_another_task_is_evaluated_there(folder, monkeypatch, tmp_path):
    saved = json.loads((folder / "config.json").read_text())
    (tmp_path / "policy").symlink_to(folder / "policy")
    (tmp_path / "config.json").write_text(json.dumps(saved | {"task": "train.jsonl", "eval_task": "test.jsonl"}))
    loaded = []

    def record(name, *, reward, split):
        loaded.append((name, split))
        raise ValueError("enough")

    monkeypatch.setattr(vapo.evaluate_model, "load_task", record)
    for task in ("", "train.jsonl", "other.jsonl"):
        with pytest.raises(ValueError, match="enough"):
            evaluate_model(str(tmp_path), **SETTINGS | {"task": task})
    # The rows that the run trained on, asked for by name, keep their own split.
    assert loaded == [("test.jsonl", "held-out"), ("train.jsonl", "eighth"), ("other.jsonl", "held-out")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"problems": 0}, "problems must be >= 1; got 0"),
        ({"samples": 0}, "samples must be >= 1; got 0"),
        ({"temperature": 0.0}, "temperature must be > 0 in evaluation; got 0.0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\]; got 1.5"),
        ({"task": "chess"}, "task must be one of "),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda; got 'tpu'"),
    ],
)
def test_bad_settings_are_named(folder, changes, message):
    with pytest.raises(ValueError, match=message):
        evaluate_model(str(folder), **SETTINGS | changes)


def test_the_command_prints_the_numbers(folder, capsys):
    arguments = ["evaluate", str(folder), "--problems", "16", "--samples", "4", "--device", "cpu"]
    assert main(arguments) == 0
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert {name: float(value) for name, value in printed.items()} == pytest.approx(last_evaluation(folder), rel=1e-3)
