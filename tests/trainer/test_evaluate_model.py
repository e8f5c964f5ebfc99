"""``vapo evaluate``: what a run's own evaluation said is said again, and settings have their say."""

import json

import pytest
import torch

import vapo.evaluation
from vapo.cli import main
from vapo.config import Config
from vapo.evaluation import evaluate_model
from vapo.trainer import train


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
        eval_top_p=0.9,
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
    assert evaluate_model(str(folder)) == expected


def test_another_seed_samples_others(folder):
    first, again, other = (evaluate_model(str(folder), seed=seed) for seed in (0, 0, 1))
    assert first == again != other
    assert first["val/accuracy_greedy"] == other["val/accuracy_greedy"]


def test_settings_are_the_runs_or_those_that_are_given(folder, monkeypatch):
    seen = {}

    def record(policy, tokenizer, task, problems, **settings):
        seen.update(settings, num_problems=len(problems), attention=policy.config._attn_implementation)
        return {}

    def read():
        names = ("max_new_tokens", "temperature", "top_p", "top_k", "engine", "batch_size")
        values = {name: getattr(seen["sampling"], name) for name in names}
        return values | {name: seen[name] for name in ("samples", "num_problems", "attention")}

    monkeypatch.setattr(vapo.evaluation, "evaluate", record)
    evaluate_model(str(folder))
    as_the_run_has_it = {
        "max_new_tokens": 30,
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": 0,
        "engine": "loop",
        "batch_size": 0,
        "samples": 4,
        "num_problems": 16,
        "attention": "sdpa",
    }
    assert read() == as_the_run_has_it
    given = {"max_new_tokens": 9, "temperature": 0.5, "engine": "transformers", "attention": "eager"}
    renamed = {"eval_top_p": 0.7, "eval_samples": 3, "eval_problems": 5, "rollout_batch_size": 8}
    evaluate_model(str(folder), **given, **renamed)
    changed = given | {"top_p": 0.7, "samples": 3, "num_problems": 5, "batch_size": 8}
    assert read() == as_the_run_has_it | changed


def test_bfloat16_computes_in_it(folder, monkeypatch):
    seen = []

    def record(policy, *_, **settings):
        seen.append(policy(input_ids=torch.tensor([[5, 9]])).logits.dtype)
        return {}

    monkeypatch.setattr(vapo.evaluation, "evaluate", record)
    for dtype in ("float32", "bfloat16"):
        evaluate_model(str(folder), dtype=dtype)
    assert seen == [torch.float32, torch.bfloat16]


def test_a_model_that_is_no_run_wants_a_task(folder):
    with pytest.raises(ValueError, match="task must be given for a model that is no run; got none for"):
        evaluate_model(str(folder / "policy"))
    # What else the run has is said here.
    settings = {"task": "running-total", "eval_problems": 16, "eval_samples": 4, "eval_top_p": 0.9}
    found = evaluate_model(str(folder / "policy"), **settings, max_new_tokens=30, device="cpu")
    assert found == last_evaluation(folder)


def test_a_run_without_its_policy_is_none_yet(folder, tmp_path, capsys):
    for name in ("config.json", "metrics.jsonl"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    message = f"a run must have ended with its policy/ to be evaluated; got {tmp_path}, which has none yet"
    assert main(["evaluate", str(tmp_path)]) == 2
    assert capsys.readouterr() == ("", f"vapo: {message}\n")


@pytest.fixture
def loaded(monkeypatch):
    """Names and splits of the tasks that an evaluation loads; it ends there."""
    loaded = []

    def record(name, *, reward, reward_timeout, split):
        loaded.append((name, split))
        raise ValueError("enough")

    monkeypatch.setattr(vapo.evaluation, "load_task", record)
    return loaded


def changed_run(folder, place, **changes):
    """The run in another folder, with other settings in its record."""
    saved = json.loads((folder / "config.json").read_text())
    place.mkdir()
    (place / "policy").symlink_to(folder / "policy")
    (place / "metrics.jsonl").write_text("")
    (place / "config.json").write_text(json.dumps(saved | changes))
    return str(place)


def test_a_run_that_evaluated_on_another_task_is_evaluated_there(folder, tmp_path, loaded):
    run = changed_run(folder, tmp_path / "run", task="train.jsonl", eval_task="test.jsonl")
    for given in ({}, {"task": "other.jsonl"}):
        with pytest.raises(ValueError, match="enough"):
            evaluate_model(run, **given)
    assert loaded == [("test.jsonl", "held-out"), ("other.jsonl", "held-out")]
    with pytest.raises(ValueError, match=r"did not train on; got train\.jsonl"):
        evaluate_model(run, task="train.jsonl")


def test_the_file_that_a_run_trained_on_holds_out_its_eighth_by_any_name(folder, tmp_path, loaded, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    run = changed_run(folder, tmp_path / "run", task="data/a.jsonl,data/b.jsonl")
    monkeypatch.chdir(tmp_path)
    names = {
        "data/a.jsonl,data/b.jsonl": "eighth",
        "./data/a.jsonl,run/../data/b.jsonl": "eighth",
        f"{tmp_path}/data/a.jsonl,link/b.jsonl": "eighth",
        "data/a.jsonl": "held-out",
        "data/a.jsonl,data/c.jsonl": "held-out",
    }
    for name in names:
        with pytest.raises(ValueError, match="enough"):
            evaluate_model(run, task=name)
    assert loaded == list(names.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval_problems": 0}, "eval_problems must be an integer >= 1; got 0"),
        ({"eval_samples": 0}, "eval_samples must be an integer >= 1; got 0"),
        ({"temperature": 0.0}, "temperature must be a finite number > 0; got 0.0"),
        ({"eval_top_p": 1.5}, r"eval_top_p must be a number in \(0, 1\]; got 1.5"),
        ({"task": "chess"}, "task must be one of "),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda; got 'tpu'"),
    ],
)
def test_bad_settings_are_named(folder, changes, message):
    with pytest.raises(ValueError, match=message):
        evaluate_model(str(folder), **changes)


def test_the_command_prints_the_numbers(folder, capsys):
    assert main(["evaluate", str(folder)]) == 0
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert {name: float(value) for name, value in printed.items()} == pytest.approx(last_evaluation(folder), rel=1e-3)
