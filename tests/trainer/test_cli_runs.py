"""The command line around real runs: what ends one, in a sentence each."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from families import tiny_model
from training_runs import lines_without_times, options

from vapo.cli import main
from vapo.tasks import load_task


def stopped_run(folder, settings, numbers):
    """Start a run, send it the signals one after the other in its RL phase; exit status and what it said at last."""
    command = [sys.executable, "-m", "vapo", "train", "--out", str(folder), *options(settings | {"steps": 100_000})]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # An interrupt inside an interpreted kernel would come out as the interpreter's own error.
        env=os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"},
        # A test run in the background of a shell ignores SIGINT, and its children would as well.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        samples = folder / "samples.jsonl"
        while process.poll() is None and not (samples.exists() and samples.read_text().count("\n") >= 2):
            time.sleep(0.05)
        for number in numbers:
            process.send_signal(number)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert "Traceback" not in errors
    return process.returncode, errors.strip().splitlines()[-1]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_after_the_step_and_the_run_goes_on_to_the_bit(tmp_path, small_settings, number, status):
    folder, settings = tmp_path / "run", small_settings | {"checkpoint_every": 100_000}
    code, said = stopped_run(folder, settings, [number])
    step = lines_without_times(folder)[-1]["step"]
    assert (code, said) == (
        status,
        f"vapo: stopped by {number.name} after step {step} of VAPO, with a checkpoint; `vapo train --resume {folder}`"
        " goes on",
    )
    assert (folder / "curves.png").stat().st_size > 0
    assert main(["train", "--resume", str(folder), "--steps", str(step + 2)]) == 0
    whole = ["train", "--out", str(tmp_path / "whole"), *options(settings | {"steps": step + 2})]
    assert main(whole) == 0
    assert lines_without_times(folder) == lines_without_times(tmp_path / "whole")


def test_a_second_ctrl_c_stops_at_once(tmp_path, small_settings):
    folder = tmp_path / "run"
    # Prompts enough for a step that takes longer than two signals.
    slow = small_settings | {"num_prompts": 64, "group_size": 8}
    code, said = stopped_run(folder, slow, [signal.SIGINT, signal.SIGTERM])
    assert code == 130
    assert said == f"vapo: interrupted; `vapo train --resume {folder}` goes on from its newest checkpoint"
    assert lines_without_times(folder)[-1]["phase"] == "vapo"


@pytest.fixture
def rows_and_model(tmp_path):
    """A file of rows, one of which has 61 tokens, and the folder of a model with 64 positions."""
    policy = tiny_model("llama")
    policy.save_pretrained(tmp_path / "model")
    load_task("running-total").tokenizer.save_pretrained(tmp_path / "model")
    prompts = [f"{number} +1 =" for number in range(4)] + [" ".join(["+1"] * 61)]
    lines = [json.dumps({"prompt": prompt, "answer": "1"}) for prompt in prompts]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    return ["--task", str(tmp_path / "rows.jsonl"), "--model", str(tmp_path / "model")]


@pytest.mark.parametrize(
    ("max_new_tokens", "message"),
    [
        (64, "max_new_tokens must be below the model's 64 positions; got 64"),
        (4, "a prompt must leave room for 4 new tokens in the model's 64 positions; got 61 tokens in '+1 +1"),
    ],
)
@pytest.mark.parametrize("held_out", [False, True])
def test_sequences_longer_than_the_model_are_refused_before_anything_is_written(
    rows_and_model, tmp_path, capsys, max_new_tokens, message, held_out
):
    if held_out:
        (tmp_path / "train.jsonl").write_text('{"prompt": "1 +1 =", "answer": "2"}')
        rows_and_model = [*rows_and_model, "--task", str(tmp_path / "train.jsonl"), "--eval-task", rows_and_model[1]]
    settings = {"max_new_tokens": max_new_tokens, "device": "cpu", "threads": 1}
    assert main(["train", "--out", str(tmp_path / "run"), *rows_and_model, *options(settings)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors[-1].startswith(f"vapo: {message}")
    assert not (tmp_path / "run").exists()


def test_a_reader_that_leaves_early_is_no_error():
    command = [sys.executable, "-m", "vapo", "train", "--dry-run"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0
