"""The command line: settings and one-line complaints."""

import json
import sys
from dataclasses import asdict, fields

import pytest
from other_values import other_value
from training_runs import options

import vapo.__main__
import vapo.trainer
from vapo.cli import RESUMABLE, main
from vapo.config import Config
from vapo.presets import PRESETS, RL_ONLY, preset
from vapo.record.run_log import RunLog


@pytest.fixture
def runs(monkeypatch):
    """What `train` was called with, instead of a run: a list of (config, folder, resume, last phase)."""
    calls = []
    monkeypatch.setattr(
        vapo.trainer,
        "train",
        lambda config, folder, *, resume, last_phase: calls.append((config, folder, resume, last_phase)),
    )
    return calls


@pytest.fixture
def earlier_run(tmp_path):
    """The folder of a run with a few settings of its own."""
    config = preset("ppo", seed=5, stop=("#",), trackers=("tensorboard",))
    with RunLog(tmp_path / "run", config=asdict(config), total_steps=1):
        pass
    return tmp_path / "run", config


@pytest.mark.parametrize("name", PRESETS)
def test_dry_run_prints_the_settings_of_a_preset(capsys, monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--dry-run", "--preset", name]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(asdict(preset(name))))
    assert list(tmp_path.iterdir()) == []


def test_without_a_preset_it_is_vapo(capsys):
    assert main(["train", "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(asdict(preset("vapo"))))


@pytest.mark.parametrize("order", [["--preset", "ppo", "--kl-weight", "2"], ["--kl-weight=2", "--preset=ppo"]])
def test_options_win_over_the_preset(capsys, order):
    assert main(["train", "--dry-run", "--no-whiten-advantages", *order]) == 0
    expected = preset("ppo", kl_weight=2.0, whiten_advantages=False)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(asdict(expected)))


@pytest.mark.parametrize(
    "given",
    [
        {"task": "knights-knaves", "seed": 3},
        {"task": "rows.jsonl", "model": "a/model", "attention": "eager"},
        {"dual_clip": 3.0, "value_clip": 0.5, "stop": ("#", "="), "trackers": ("tensorboard", "trackio")},
        {"group_sampling": False, "dtype": "bfloat16"},
    ],
)
def test_what_is_given_reaches_the_run(runs, tmp_path, given):
    assert main(["train", "--out", str(tmp_path / "run"), *options(given)]) == 0
    assert runs == [(preset("vapo", **given), tmp_path / "run", False, "vapo")]


NO_CRITIC = "pretrain-value needs a critic and value_pretraining; the preset or the options switch it off"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "command must be train, pretrain-value, evaluate or report; got 'trian'"),
        (["train", "--group-size", "0"], "group_size must be greater than 0; got 0"),
        (["train", "--alpha", "nan"], "alpha must be a finite number; got nan"),
        (
            ["train", "--preset", "grpo", "--alpha", "2"],
            "settings must have an effect; got alpha=2.0 where advantage_estimator is 'group'",
        ),
        (["pretrain-value", "--preset", "dapo"], NO_CRITIC),
        (["pretrain-value", "--no-value-pretraining"], NO_CRITIC),
        (
            ["evaluate", "R", "--task", "running-total", "--problems", "0"],
            "eval_problems must be greater than 0; got 0",
        ),
        (
            ["evaluate", "R", "--task", "running-total", "--samples", "0"],
            "eval_samples must be greater than 0; got 0",
        ),
        (["report"], "runs must name at least 1 folder; got none"),
        (["evaluate", "R"], "task must be given for a model that is no run; got none for R"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, monkeypatch, tmp_path, arguments, message, runs):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"vapo: {message}") and captured.err.count("\n") == 1
    assert captured.out == ""
    assert runs == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["train", "--preset", "vappo"], ["--preset", "vapo", "dapo"]),
        (["train", "--alpah", "1"], ["--alpah", "--alpha"]),
        (["train", "--alpha", "x"], ["--alpha", "'x'"]),
        (["train", "--alpha"], ["--alpha"]),
        (["train", "--seed", "1.5"], ["--seed", "'1.5'"]),
        (["train", "--engine", "vlm"], ["--engine", "loop", "transformers"]),
        (["evaluate"], ["vapo evaluate", "Folder of a finished run"]),
    ],
)
def test_an_option_that_cannot_be_read_is_named_with_what_was_expected(capsys, arguments, named, runs):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    captured = capsys.readouterr()
    assert stop.value.code == 2 and captured.out == "" and runs == []
    assert all(text in captured.err for text in named)


def test_a_used_folder_is_refused_and_left_alone(capsys, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("mine")
    assert main(["train", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"vapo: --out must be a new or an empty folder; got {tmp_path}, which exists\n"
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("metrics.jsonl", "mine")]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--eval-problems", "5000"], "count must be >= 0 and <= 4000 for held-out problems; got 5000"),
        (["--trackers", "excel"], "trackers must be among tensorboard, trackio, wandb, each once; got excel"),
        (["--task", "chess", "--model", "tiny"], "task must be one of running-total, knights-knaves, reasoning-gym:"),
        (["--stop", "no such word"], "a stop string must be one token of the tokenizer; got 'no such word'"),
        (["--critic", "no/such/critic/here"], "a model must be a folder or a hub id that loads; got 'no/such"),
    ],
)
def test_settings_that_the_task_or_the_model_refuses_are_a_typo_too(capsys, tmp_path, given, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["train", *given, "--out", str(tmp_path / "run")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"vapo: {message}")
    assert not (tmp_path / "run").exists()


def test_a_defect_during_the_run_keeps_its_traceback(monkeypatch, tmp_path):
    def broken(config, folder, *, resume, last_phase):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise ValueError("mask must be bool")

    monkeypatch.setattr(vapo.trainer, "train", broken)
    with pytest.raises(RuntimeError, match=r"the run in .* failed") as error:
        main(["train", "--out", str(tmp_path / "run")])
    assert str(error.value.__cause__) == "mask must be bool"


@pytest.mark.parametrize("command", ["train", "pretrain-value"])
def test_help_lists_every_setting(capsys, command):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in text for name in asdict(Config()))
    assert all(f"--{name}" in text for name in ("preset", "out", "resume", "dry-run"))


def test_usage_names_every_command(capsys):
    assert main(["--help"]) == main([]) == 0
    text = capsys.readouterr().out
    assert all(f"vapo {command}" in text for command in ("train", "pretrain-value", "evaluate", "report"))
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip()[0].isdigit()


def test_a_run_without_out_gets_a_fresh_folder(monkeypatch, tmp_path, runs):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "running-total-ppo-seed0").mkdir(parents=True)
    for arguments in (
        ["--preset", "ppo"],
        ["--seed", "2"],
        ["--task", "reasoning-gym:basic_arithmetic", "--model", "a/model"],
        ["--task", "data/a.jsonl,data/b.jsonl", "--model", "a/model"],
    ):
        assert main(["train", *arguments]) == 0
    assert [folder.as_posix() for _, folder, *_ in runs] == [
        "runs/running-total-ppo-seed0-2",
        "runs/running-total-vapo-seed2",
        "runs/basic_arithmetic-vapo-seed0",
        "runs/a-vapo-seed0",
    ]


def test_pretrain_value_ends_with_the_critic(runs, tmp_path):
    assert main(["pretrain-value", "--out", str(tmp_path / "run"), "--seed", "4"]) == 0
    assert runs == [(preset("vapo", seed=4), tmp_path / "run", False, "value_pretraining")]


@pytest.mark.parametrize("field", RL_ONLY)
def test_pretrain_value_refuses_what_only_rl_uses(runs, capsys, tmp_path, field):
    value = {"clip_low": 0.1, "dual_clip": 3.0}.get(field) or other_value(Config(), field)
    assert main(["pretrain-value", "--out", str(tmp_path / "run"), *options({field: value})]) == 2
    expected = f"settings must have an effect; got {field}={value!r} where a run ends with value pretraining"
    assert capsys.readouterr().err == f"vapo: {expected}\n"
    assert runs == []


def test_a_resumed_run_keeps_its_settings(earlier_run, runs):
    folder, config = earlier_run
    assert main(["train", "--resume", str(folder)]) == 0
    assert runs == [(config, folder, True, "vapo")]


CHANGES = {
    "max_skipped_steps": 2,
    "steps": 77,
    "eval_every": 3,
    "checkpoint_every": 7,
    "keep_checkpoints": 5,
    "logged_samples": 9,
    "trackers": ("trackio",),
    "device": "cpu",
    "threads": 1,
    "reward_timeout": 3.0,
    "eval_problems": 5,
    "eval_samples": 6,
    "eval_top_p": 0.7,
    "micro_batch_tokens": 99,
    "rollout_batch_size": 8,
    "gradient_checkpointing": True,
    "shard_ranks": 2,
    "reduce_gradients": "mini_batch",
}


@pytest.mark.parametrize("field", RESUMABLE)
def test_what_does_not_change_the_results_may_be_given_anew(earlier_run, runs, field):
    folder, config = earlier_run
    assert main(["train", "--resume", str(folder), *options({field: CHANGES[field]})]) == 0
    assert asdict(runs[0][0]) == asdict(config) | {field: CHANGES[field]}


@pytest.mark.parametrize("field", sorted({field.name for field in fields(Config)} - set(RESUMABLE)))
def test_what_changes_the_results_is_refused_by_name(earlier_run, runs, capsys, field):
    folder, config = earlier_run
    saved, given = getattr(config, field), other_value(config, field)
    assert main(["train", "--resume", str(folder), *options({field: given})]) == 2
    expected = f"a resumed run keeps its settings, but {field} (the run has {saved!r}, got {given!r}) would change"
    assert capsys.readouterr().err == f"vapo: {expected}\n"
    assert runs == []


def test_every_field_that_would_change_is_named(earlier_run, capsys):
    folder, config = earlier_run
    given = {"seed": 6, "gamma": 0.5, "steps": 3}
    assert main(["train", "--resume", str(folder), *options(given)]) == 2
    error = capsys.readouterr().err
    assert "seed (the run has 5, got 6), gamma (the run has 1.0, got 0.5) would change" in error
    assert "steps" not in error
    # The value that the run has may be said again.
    assert main(["train", "--resume", str(folder), "--seed", "5", "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(asdict(config)))


@pytest.mark.parametrize("extra", [["--preset", "ppo"], ["--preset=ppo"], ["--out", "elsewhere"]])
def test_resume_takes_no_other_preset_or_folder(earlier_run, runs, capsys, extra):
    folder, _ = earlier_run
    assert main(["train", "--resume", str(folder), *extra]) == 2
    expected = "--resume takes the run's own settings and folder; got --preset, --config or --out with it"
    assert capsys.readouterr().err == f"vapo: {expected}\n"
    assert runs == []


def test_a_folder_without_a_run_is_not_resumed(capsys, tmp_path):
    assert main(["train", "--resume", str(tmp_path)]) == 2
    expected = f"--resume must be the folder of a run; got {tmp_path}, which has no config.json"
    assert capsys.readouterr().err == f"vapo: {expected}\n"


def test_settings_that_nobody_knows_are_named_where_a_run_goes_on(earlier_run, runs, capsys):
    folder, _ = earlier_run
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(saved | {"lambda": 0.9, "alhpa": 1}))
    assert main(["train", "--resume", str(folder)]) == 2
    expected = f"{folder}/config.json: settings must be fields of Config; got alhpa, lambda"
    assert capsys.readouterr().err == f"vapo: {expected}\n"
    assert runs == []


def test_evaluate_prints_a_line_for_each_number(capsys, monkeypatch):
    seen = []

    def evaluated(source, **settings):
        seen.append((source, settings))
        return {"val/accuracy_sampled": 0.123456, "val/pass@2": 1.0}

    monkeypatch.setattr("vapo.evaluation.evaluate_model", evaluated)
    assert main(["evaluate", "some/run"]) == 0
    assert capsys.readouterr().out == "val/accuracy_sampled  0.1235\nval/pass@2            1\n"
    given = {"problems": 7, "samples": 2, "top_p": 0.7, "temperature": 0.5, "max_new_tokens": 9, "seed": 0}
    given |= {"task": "T", "reward": "", "device": "cpu", "dtype": "bfloat16", "attention": "eager"}
    given |= {"engine": "transformers", "rollout_batch_size": 0}
    assert main(["evaluate", "some/run", *options(given)]) == 0
    names = {"problems": "eval_problems", "samples": "eval_samples", "top_p": "eval_top_p"}
    # Under the names of Config; what is left out is left to the run, what is empty or 0 is not.
    assert seen == [("some/run", {}), ("some/run", {names.get(name, name): value for name, value in given.items()})]


def test_report_compares_runs(capsys, monkeypatch):
    monkeypatch.setattr(
        "vapo.record.comparison.compare", lambda runs, picture: f"{[str(run) for run in runs]} {picture}"
    )
    assert main(["report", "runs/a", "runs/b", "--out", "both.png"]) == 0
    assert capsys.readouterr().out == "['runs/a', 'runs/b'] both.png\npicture: both.png\n"


@pytest.mark.parametrize(("requirement", "is_the_trainers"), [('tyro>=1; extra == "train"', True), ("numpy", False)])
def test_a_package_of_the_trainer_that_is_missing_is_named_with_its_extra(
    capsys, monkeypatch, requirement, is_the_trainers
):
    monkeypatch.setattr(vapo.__main__, "requires", lambda _: [requirement])
    monkeypatch.setitem(sys.modules, "tyro", None)
    monkeypatch.delitem(sys.modules, "vapo.cli")
    if is_the_trainers:
        assert vapo.__main__.main() == 2
        assert capsys.readouterr().err == "vapo: the trainer needs tyro: pip install 'vapo[train]'\n"
    else:
        with pytest.raises(ModuleNotFoundError, match="tyro"):
            vapo.__main__.main()
