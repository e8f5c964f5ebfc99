"""Real kills and real failing writes: the earlier checkpoint stays, the run says so and goes on from there."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import random
import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from ranks import start_alone
from training_runs import LIVELY, assert_lively, assert_same_result, lines_without_times, options, score

import vapo.trainer
from vapo.cli import main
from vapo.learning.learner import Learner
from vapo.tasks.running_total import RunningTotal


@pytest.fixture(autouse=True)
def lively_runs(monkeypatch):
    monkeypatch.setattr(RunningTotal, "score", score)
    monkeypatch.setattr("vapo.record.run_log.write_curves", lambda folder: None)


@pytest.fixture
def command(small_settings):
    return ["train", *options(small_settings | LIVELY)]


@pytest.fixture
def whole(command, tmp_path):
    """The folder of a run that nothing disturbed."""
    assert main([*command, "--out", str(tmp_path / "whole")]) == 0
    assert_lively(tmp_path / "whole")
    return tmp_path / "whole"


def checkpoints(folder: Path) -> list[str]:
    return sorted(each.name for each in (folder / "checkpoints").iterdir())


def run_until_killed(arguments: list[str], folder: str, place: str, count: int, connection: Connection) -> None:
    """Run the command in this process and kill it at the ``count``-th event of the kind ``place``.

    "file": once the run has its settings, something in its folder is opened, renamed, made or removed.
    "tensor": the next tensor of a checkpoint is written.
    """
    RunningTotal.score = score
    torch.use_deterministic_algorithms(True)
    seen = 0

    def die_at_count() -> None:
        nonlocal seen
        seen += 1
        if seen == count:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(event: str, arguments: tuple) -> None:
        is_change = event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")
        if is_change and folder in str(arguments[0]) and os.path.exists(f"{folder}/config.json"):
            die_at_count()

    if place == "file":
        sys.addaudithook(watch)
    else:
        save_tensor = torch.save
        torch.save = lambda *args, **kwargs: (die_at_count(), save_tensor(*args, **kwargs))
    with contextlib.redirect_stdout(io.StringIO()):
        status = main(arguments)
    connection.send(status)


def killed(arguments: list[str], folder: Path, place: str, count: int) -> bool:
    """Whether the command was killed before it came to its end."""
    process, connection = start_alone(run_until_killed, arguments, str(folder), place, count)
    process.join()
    if process.exitcode == -signal.SIGKILL:
        return True
    assert process.exitcode == 0 and connection.recv() == 0
    return False


def test_killed_at_random_moments(command, whole, tmp_path):
    folder, rng = tmp_path / "broken", random.Random(0)
    arguments = [*command, "--out", str(folder)]
    for _ in range(3):
        # A checkpoint takes a dozen of these events.
        assert killed(arguments, folder, "file", rng.randrange(1, 50))
        arguments = ["train", "--resume", str(folder)]
    assert main(arguments) == 0
    assert_same_result(folder, whole)


def test_killed_in_the_middle_of_a_checkpoint(command, whole, tmp_path):
    folder = tmp_path / "broken"
    # The policy has 22 tensors; with the optimiser and the critic a checkpoint of the warm start has over 100.
    assert killed([*command, "--out", str(folder)], folder, "tensor", 130)
    assert checkpoints(folder) == ["0-warm_start-000001", "0-warm_start-000002.unfinished"]
    assert main(["train", "--resume", str(folder)]) == 0
    assert_same_result(folder, whole)
    assert checkpoints(folder) == ["2-vapo-000001", "2-vapo-000002"]


@pytest.fixture
def limit_files():
    """Function that sets the size at which files end from now on, as on a full disk; None lifts the limit."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limit(size: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits if size is None else (size, limits[1]))

    yield limit
    limit(None)
    signal.signal(signal.SIGXFSZ, handler)


def call_at(monkeypatch, owner: object, name: str, step: int, action) -> None:
    """Have ``action`` done before the method or step function ``name`` runs for the ``step``-th time."""
    function, calls = getattr(owner, name), []

    def wrapped(*args, **kwargs):
        calls.append(name)
        if len(calls) == step:
            action()
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapped)


def assert_stopped_in_a_sentence(errors: str, folder: Path, reason: str) -> None:
    assert errors.startswith("vapo: the run stopped: ")
    assert errors.endswith(f"; `vapo train --resume {folder}` goes on from its newest checkpoint\n")
    assert reason in errors and errors.count("\n") == 1


@pytest.mark.parametrize("is_limit", [True, False])
def test_no_room_for_a_checkpoint(command, whole, tmp_path, monkeypatch, capsys, limit_files, is_limit):
    folder, flush = tmp_path / "run", os.fsync

    def no_room(descriptor):
        if "distcp" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(descriptor)

    def fill_disk():
        limit_files(50_000) if is_limit else monkeypatch.setattr(os, "fsync", no_room)

    call_at(monkeypatch, vapo.trainer, "pretraining_step", 2, fill_disk)
    assert main([*command, "--out", str(folder)]) == 1
    limit_files(None)
    monkeypatch.setattr(os, "fsync", flush)
    what = f"the checkpoint {folder}/checkpoints/1-value_pretraining-000002 could not be written"
    errors = capsys.readouterr().err
    assert_stopped_in_a_sentence(errors, folder, what)
    assert ("No space left on device" in errors) != is_limit
    assert checkpoints(folder) == ["0-warm_start-000002", "1-value_pretraining-000001"]
    assert main(["train", "--resume", str(folder)]) == 0
    assert_same_result(folder, whole)


def test_no_room_for_the_first_checkpoint(command, whole, tmp_path, capsys, limit_files):
    folder = tmp_path / "run"
    limit_files(50_000)
    assert main([*command, "--out", str(folder)]) == 1
    limit_files(None)
    assert_stopped_in_a_sentence(capsys.readouterr().err, folder, "0-warm_start-000001 could not be written")
    assert checkpoints(folder) == []
    assert main(["train", "--resume", str(folder)]) == 0
    assert_same_result(folder, whole)


def test_no_room_for_a_line(command, whole, tmp_path, monkeypatch, capsys, limit_files):
    folder = tmp_path / "run"
    lines = folder / "metrics.jsonl"
    call_at(monkeypatch, vapo.trainer, "vapo_step", 2, lambda: limit_files(lines.stat().st_size + 50))
    assert main([*command, "--out", str(folder)]) == 1
    limit_files(None)
    assert_stopped_in_a_sentence(capsys.readouterr().err, folder, "File too large")
    with pytest.raises(json.JSONDecodeError):
        lines_without_times(folder)
    assert main(["train", "--resume", str(folder)]) == 0
    assert_same_result(folder, whole)


def test_no_room_for_a_model(command, whole, tmp_path, monkeypatch, capsys, limit_files):
    folder = tmp_path / "run"
    call_at(monkeypatch, Learner, "export", 1, lambda: limit_files(50_000))
    assert main([*command, "--out", str(folder)]) == 1
    limit_files(None)
    assert_stopped_in_a_sentence(capsys.readouterr().err, folder, f"{folder}/policy could not be written")
    assert main(["train", "--resume", str(folder)]) == 0
    assert_same_result(folder, whole)


def test_no_room_for_the_settings_of_a_longer_run(whole, capsys, limit_files):
    settings = (whole / "config.json").read_text()
    limit_files(100)
    assert main(["train", "--resume", str(whole), "--steps", "3"]) == 1
    limit_files(None)
    assert_stopped_in_a_sentence(capsys.readouterr().err, whole, "File too large")
    assert (whole / "config.json").read_text() == settings
    assert main(["train", "--resume", str(whole), "--steps", "3"]) == 0
    assert [each["step"] for each in lines_without_times(whole)][-1] == 3
    assert json.loads((whole / "config.json").read_text()) == json.loads(settings) | {"steps": 3}


def test_a_changed_setting_is_refused_by_its_name(whole, capsys):
    before = {each: each.read_bytes() for each in whole.rglob("*") if each.is_file()}
    capsys.readouterr()
    assert main(["train", "--resume", str(whole), "--gamma", "0.5", "--no-positive-nll", "--steps", "3"]) == 2
    assert capsys.readouterr().err == (
        "vapo: a resumed run keeps its settings, but gamma (the run has 1.0, got 0.5),"
        " positive_nll (the run has True, got False) would change\n"
    )
    assert {each: each.read_bytes() for each in whole.rglob("*") if each.is_file()} == before
    # The same value is no change.
    assert main(["train", "--resume", str(whole), "--gamma", "1.0"]) == 0
