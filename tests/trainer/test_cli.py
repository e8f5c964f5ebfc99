"""The command line: settings, one-line complaints, and Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import pytest

import vapo.trainer
from vapo.cli import main
from vapo.presets import preset


def options(settings):
    return [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def test_dry_run_prints_the_embedded_jobs_settings(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out) == asdict(preset("embedded"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("order", [["--preset", "ppo", "--alpha", "2"], ["--alpha", "2", "--preset=ppo"]])
def test_options_win_over_the_preset(capsys, order):
    assert main(["train", "--dry-run", "--no-whiten-advantages", *order]) == 0
    assert json.loads(capsys.readouterr().out) == asdict(preset("ppo", alpha=2.0, whiten_advantages=False))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "vapo: command must be train; got 'trian'"),
        (["train", "--preset", "vappo"], "vapo: --preset must be one of embedded, vapo, vc_ppo, ppo; got 'vappo'"),
        (["train", "--alpah", "1"], "vapo: Unrecognized options: --alpah, 1. Perhaps you meant --alpha?"),
        (["train", "--alpha", "x"], "vapo: Error parsing --alpha: could not convert string to float: 'x'"),
        (["train", "--alpha"], "vapo: Missing value for argument '--alpha'. Expected 1 values."),
        (["train", "--group-size", "0"], "vapo: group_size must be an integer >= 1; got 0"),
        (["train", "--task", "chess"], "vapo: task must be one of running-total; got 'chess'"),
        (["train", "--seed", "1.5"], "vapo: Error parsing --seed: invalid literal for int() with base 10: '1.5'"),
    ],
)
def test_a_typo_is_one_line_and_status_2(capsys, arguments, message):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err == message + "\n"
    assert captured.out == ""


def test_a_used_folder_is_refused_and_left_alone(capsys, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("mine")
    assert main(["train", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"vapo: --out must be a new or an empty folder; got {tmp_path}, which exists\n"
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("metrics.jsonl", "mine")]


def test_settings_that_the_task_refuses_are_a_typo_too(capsys, tmp_path):
    assert main(["train", "--eval-problems", "5000", "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == (
        "vapo: count must be in [0, 4000] for held-out problems and >= 0 otherwise; got 5000\n"
    )


def test_a_defect_during_the_run_keeps_its_traceback(monkeypatch, tmp_path):
    def broken(config, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise ValueError("mask must be bool")

    monkeypatch.setattr(vapo.trainer, "train", broken)
    with pytest.raises(RuntimeError, match=r"the run in .* failed") as error:
        main(["train", "--out", str(tmp_path / "run")])
    assert str(error.value.__cause__) == "mask must be bool"


def test_help_lists_every_setting(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in text for name in asdict(preset("embedded")))
    assert main(["--help"]) == 0
    assert "vapo train --dry-run" in capsys.readouterr().out


def test_a_run_without_out_gets_a_fresh_folder(capsys, monkeypatch, tmp_path, small_settings):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert main(["train", "--preset", "ppo", *options(small_settings | {"steps": 1})]) == 0
    folders = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert folders == ["running-total-ppo-seed0", "running-total-ppo-seed0-2"]
    assert "held-out accuracy" in capsys.readouterr().out


def test_ctrl_c_keeps_the_record_and_ends_in_a_sentence(tmp_path, small_settings):
    folder = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "vapo",
        "train",
        "--out",
        str(folder),
        *options(small_settings | {"steps": 100_000}),
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        # A test run in the background of a shell ignores SIGINT, and its children would as well.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        samples = folder / "samples.jsonl"
        while process.poll() is None and not (samples.exists() and samples.read_text().count("\n") >= 2):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert errors.strip().splitlines()[-1] == f"vapo: interrupted; what was measured is in {folder}"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["phase"] == "vapo"
    assert (folder / "curves.png").stat().st_size > 0
    assert (folder / "config.json").is_file()


def test_a_reader_that_leaves_early_is_no_error():
    command = [sys.executable, "-m", "vapo", "train", "--dry-run"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0
