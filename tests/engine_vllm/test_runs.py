"""Whole runs with engine vllm, each in processes of its own: they learn, resume to the bit, and end cleanly."""

import os
import subprocess
import sys

import pytest
from training_runs import lines_without_times

VAPO = ("-m", "vapo", "train")
SMALL = (
    *("--steps", "4", "--num-prompts", "4", "--group-size", "4", "--mini-batches", "2", "--checkpoint-every", "1"),
    *("--warm-start-steps", "30", "--warm-start-clean-steps", "0", "--pretraining-steps", "2", "--eval-problems", "8"),
    *("--pretraining-prompts", "8", "--eval-every", "2", "--keep-checkpoints", "20"),
)


def run(*arguments):
    """Run Python with these arguments to its clean end."""
    # The ops take their CPU path, not the interpreter that other tests ask for.
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    ended = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=900, env=environment)
    printed = ended.stdout + ended.stderr
    assert ended.returncode == 0, printed[-3000:]
    for word in ("Traceback", "destroy_process_group", "leaked"):
        assert word not in printed, printed[-3000:]
    return printed


def test_it_learns_what_the_loop_learns(tmp_path):
    for engine in ("loop", "vllm"):
        run(*VAPO, "--engine", engine, "--out", str(tmp_path / engine))
    loop, vllm = (lines_without_times(tmp_path / engine)[-1] for engine in ("loop", "vllm"))
    assert vllm["val/accuracy_sampled"] > 0.85
    assert abs(vllm["val/accuracy_sampled"] - loop["val/accuracy_sampled"]) < 0.1
    steps = [line for line in lines_without_times(tmp_path / "vllm") if line["phase"] == "vapo" and line["step"]]
    # Every step samples from the weights of the step before.
    assert max(line["rollout/logprob_diff/max"] for line in steps) < 5e-5
    assert max(line["rollout/k3"] for line in steps) < 1e-9


def test_two_ranks_learn(tmp_path):
    run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(*VAPO, "--engine", "vllm", "--threads", "1", "--out", str(tmp_path / "run")),
    )
    last = lines_without_times(tmp_path / "run")[-1]
    assert last["val/accuracy_sampled"] > 0.85 and last["rollout/logprob_diff/max"] < 5e-5


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_is_the_same_run_to_the_bit(tmp_path, ranks):
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2") if ranks == 2 else ()
    whole, part = tmp_path / "whole", tmp_path / "part"
    settings = ("--engine", "vllm", "--threads", "1", *SMALL)
    run(*launch, *VAPO, *settings, "--out", str(whole))
    run(*launch, *VAPO, *settings, "--steps", "2", "--out", str(part))
    run(*launch, *VAPO, "--resume", str(part), "--steps", "4")
    assert lines_without_times(part) == lines_without_times(whole)
