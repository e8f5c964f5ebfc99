"""The command line around real runs: what ends one, in a sentence each."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from families import tiny_model
from training_runs import options

from vapo.cli import main
from vapo.tasks import load_task


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
        # An interrupt inside an interpreted kernel would come out as the interpreter's own error.
        env=os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"},
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
    expected = f"vapo: interrupted; `vapo train --resume {folder}` goes on from its newest checkpoint"
    assert errors.strip().splitlines()[-1] == expected
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["phase"] == "vapo"
    assert (folder / "curves.png").stat().st_size > 0
    assert (folder / "config.json").is_file()


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
