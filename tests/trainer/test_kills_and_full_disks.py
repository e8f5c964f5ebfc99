"""Real kills and real failing writes: the earlier checkpoint stays, the run says so and can be resumed from it."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from ranks import start_alone
from training_runs import LIVELY, assert_lively, assert_same_result, lines_without_times, make_lively, options

import vapo.trainer
from vapo.cli import main
from vapo.learning.learner import Learner

pytestmark = pytest.mark.usefixtures("lively_runs")


@pytest.fixture(scope="module")
def command(small_settings):
    return ["train", *options(small_settings | LIVELY)]


@pytest.fixture(scope="module")
def whole(lively_runs, command, tmp_path_factory):
    """The folder of a run that nothing disturbed."""
    torch.use_deterministic_algorithms(True)
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert main([*command, "--out", str(folder)]) == 0
    assert_lively(folder)
    return folder


@pytest.fixture
def copy_of_whole(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def checkpoints(folder: Path) -> list[str]:
    return sorted(each.name for each in (folder / "checkpoints").iterdir())


def run_until_killed(arguments: list[str], folder: str, place: str, count: int, connection: Connection) -> None:
    """Run the command in this process and kill it at the ``count``-th event of the kind ``place``.

    "file": once the run has its settings, something in its folder is opened, renamed, made or removed.
    "tensor": the next tensor of a checkpoint is written.
    """
    make_lively(pytest.MonkeyPatch())
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


def test_killed_again_and_again(command, whole, tmp_path):
    folder, rng = tmp_path / "broken", random.Random(0)
    # The policy has 22 tensors; with the optimiser and the critic a checkpoint of the warm start has over 100.
    assert killed([*command, "--out", str(folder)], folder, "tensor", 130)
    assert checkpoints(folder) == ["0-warm_start-000001", "0-warm_start-000002.unfinished"]
    for _ in range(3):
        # A checkpoint takes a dozen of these events.
        assert killed(["train", "--resume", str(folder)], folder, "file", rng.randrange(1, 50))
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


def assert_stopped_in_a_sentence(errors: str, folder: Path, reason: str) -> None:
    assert errors.startswith("vapo: the run stopped: ")
    assert errors.endswith(f"; `vapo train --resume {folder}` goes on from its newest checkpoint\n")
    assert reason in errors and errors.count("\n") == 1


def no_room(descriptor: int, flush=os.fsync) -> None:
    """In the place of ``os.fsync``: a full disk shows when the tensors are flushed."""
    if "distcp" in os.readlink(f"/proc/self/fd/{descriptor}"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    flush(descriptor)


# Before which call the disk is full: from then on files end at 50,000 bytes, metrics.jsonl after a part of its next
# line, or a flush fails. Then how the error begins or what it holds, and the checkpoints that stay.
FULL = {
    "first checkpoint": (vapo.trainer, "warm_start_step", 1, "{}/checkpoints/0-warm_start-000001 could not be", "", ""),
    "checkpoint": (
        *(vapo.trainer, "pretraining_step", 2, "{}/checkpoints/1-value_pretraining-000002 could not be"),
        *("0-warm_start-000002", "1-value_pretraining-000001"),
    ),
    "flush": (
        *(vapo.trainer, "pretraining_step", 2, "No space left on device"),
        *("0-warm_start-000002", "1-value_pretraining-000001"),
    ),
    "line": (vapo.trainer, "vapo_step", 2, "File too large", "1-value_pretraining-000002", "2-vapo-000001"),
    "model": (Learner, "export", 1, "{}/policy could not be written", "2-vapo-000001", "2-vapo-000002"),
}


@pytest.mark.parametrize("case", FULL)
def test_a_full_disk_stops_the_run_in_a_sentence(command, whole, tmp_path, monkeypatch, capsys, limit_files, case):
    folder, calls = tmp_path / "run", []
    owner, name, call, message, *kept = FULL[case]
    function = getattr(owner, name)

    def fill_disk_and_call(*args, **kwargs):
        calls.append(name)
        if len(calls) == call:
            if case == "flush":
                monkeypatch.setattr(os, "fsync", no_room)
            else:
                limit_files((folder / "metrics.jsonl").stat().st_size + 50 if case == "line" else 50_000)
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, fill_disk_and_call)
    assert main([*command, "--out", str(folder)]) == 1
    limit_files(None)
    monkeypatch.undo()
    assert_stopped_in_a_sentence(capsys.readouterr().err, folder, message.format(folder))
    assert checkpoints(folder) == [each for each in kept if each]
    if case == "line":
        with pytest.raises(json.JSONDecodeError):
            lines_without_times(folder)
    assert main(["train", "--resume", str(folder)]) == 0
    assert_same_result(folder, whole)


def test_no_room_for_the_settings_of_a_longer_run(copy_of_whole, capsys, limit_files):
    command, settings = ["train", "--resume", str(copy_of_whole), "--steps", "3"], copy_of_whole / "config.json"
    before = settings.read_text()
    limit_files(100)
    assert main(command) == 1
    limit_files(None)
    assert_stopped_in_a_sentence(capsys.readouterr().err, copy_of_whole, "File too large")
    assert settings.read_text() == before
    assert main(command) == 0
    assert [each["step"] for each in lines_without_times(copy_of_whole)][-1] == 3
    assert json.loads(settings.read_text()) == json.loads(before) | {"steps": 3}


def test_a_changed_setting_is_refused_by_its_name(copy_of_whole, capsys):
    before = {each: each.read_bytes() for each in copy_of_whole.rglob("*") if each.is_file()}
    command = ["train", "--resume", str(copy_of_whole), "--gamma"]
    assert main([*command, "0.5", "--no-positive-nll", "--steps", "3"]) == 2
    assert capsys.readouterr().err == (
        "vapo: a resumed run keeps its settings, but positive_nll (the run has True, got False),"
        " gamma (the run has 1.0, got 0.5) would change\n"
    )
    assert {each: each.read_bytes() for each in copy_of_whole.rglob("*") if each.is_file()} == before
    # The same value is no change.
    assert main([*command, "1.0"]) == 0
