"""Settings from a file: read as they are written, below the command line, and refused in a sentence."""

import json
from dataclasses import asdict

import pytest

from vapo.cli import main
from vapo.presets import preset
from vapo.settings_file import read_settings_file


def resolved(capsys, *arguments, command="train"):
    """What --dry-run prints."""
    assert main([command, *arguments, "--dry-run"]) == 0
    return json.loads(capsys.readouterr().out)


def plain(config):
    return json.loads(json.dumps(asdict(config)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("actor_lr: 1e-6\nalpha: .5\nseed: 3", {"actor_lr": 1e-6, "alpha": 0.5, "seed": 3}),
        ("critic_lr: 2E+1\nclip_high: 1e22", {"critic_lr": 20.0, "clip_high": 1e22}),
        ("stop: ['#', '=']\ntrackers: [tensorboard]", {"stop": ("#", "="), "trackers": ("tensorboard",)}),
        ("positive_nll: false\nvalue_clip: null\ntask: knights-knaves", None),
        (json.dumps({"actor_lr": 1e-06, "gamma": 1.0, "steps": 7}), {"actor_lr": 1e-6, "gamma": 1.0, "steps": 7}),
    ],
)
def test_values_are_read_as_they_are_meant(tmp_path, capsys, text, expected):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    expected = expected or {"positive_nll": False, "value_clip": None, "task": "knights-knaves"}
    assert read_settings_file(path) == expected
    assert resolved(capsys, "--config", str(path)) == plain(preset("vapo", **expected))


def test_the_command_line_wins_over_the_file_and_the_file_over_the_preset(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("preset: grpo\nseed: 4\nsteps: 9\ngroup_size: 4\n")
    given = resolved(capsys, "--config", str(path), "--steps", "3")
    assert given == plain(preset("grpo", seed=4, steps=3, group_size=4))
    assert resolved(capsys, "--config", str(path), "--preset", "dapo") == plain(
        preset("dapo", seed=4, steps=9, group_size=4)
    )


@pytest.mark.parametrize("name", ["vapo", "ppo", "grpo", "dapo"])
@pytest.mark.parametrize("task", ["running-total", "knights-knaves"])
def test_a_runs_own_config_json_gives_the_same_run(tmp_path, capsys, name, task):
    config = preset(name, task=task, seed=3, steps=11, temperature=0.9)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(asdict(config)))
    assert resolved(capsys, "--config", str(path), "--preset", name) == plain(config)
    if config.pretrains_values:
        assert resolved(capsys, "--config", str(path), "--preset", name, command="pretrain-value") == plain(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "--config must be a file of settings; got {path}: No such file or directory"),
        ("- 1\n- 2", "--config must map names of settings to values; got list in {path}"),
        ("", "--config must map names of settings to values; got NoneType in {path}"),
        ("a: [", "--config must be a YAML or JSON file; got {path}: while parsing"),
        ("lambda: 0.9", "settings must be fields of Config; got lambda (with the settings of {path})"),
        ("gamma: high", "gamma must be a valid number; got 'high' (with the settings of {path})"),
        ("preset: best", "preset must be one of vapo, vc_ppo, ppo, grpo, dapo; got 'best' (with"),
        (
            "preset: grpo\nalpha: 0.3",
            "settings must have an effect; got alpha=0.3 where advantage_estimator is 'group'",
        ),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_a_sentence(tmp_path, capsys, text, message):
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_text(text)
    assert main(["train", "--config", str(path), "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("vapo: " + message.format(path=path)) and error.count("\n") == 1


def test_a_run_that_goes_on_takes_no_file(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(asdict(preset("vapo"))))
    (tmp_path / "run.yaml").write_text("seed: 3")
    assert main(["train", "--resume", str(tmp_path), "--config", str(tmp_path / "run.yaml")]) == 2
    assert "--resume takes the run's own settings and folder" in capsys.readouterr().err
