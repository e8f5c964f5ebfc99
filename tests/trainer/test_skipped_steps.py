"""Runs that meet a batch without a finite loss: they skip it, say so, and go on; too many such steps end them."""

import math

import pytest
import torch
from ranks import run_on_ranks
from training_runs import assert_same_result, lines, options, run

import vapo.learning.step
import vapo.trainer
from vapo.cli import main
from vapo.config import Config
from vapo.models.checkpoint import latest_checkpoint
from vapo.models.sharding import rank
from vapo.trainer import train

SETTINGS = {
    "num_prompts": 2,
    "group_size": 2,
    "mini_batches": 2,
    "max_new_tokens": 6,
    "steps": 3,
    "actor_lr": 1e-3,
    "value_pretraining": False,
    "eval_problems": 2,
    "checkpoint_every": 1,
    "keep_checkpoints": 9,
    "threads": 1,
    "device": "cpu",
}
build_batch = vapo.learning.step.build_batch


def poison(monkeypatch, steps, field="old_logprobs", on_rank=0):
    """Make the first response of the batches numbered ``steps`` not finite."""
    number = 0

    def poisoned(*arguments, **named):
        nonlocal number
        number += 1
        batch = build_batch(*arguments, **named)
        if number in steps and rank() == on_rank:
            getattr(batch, field)[0] = math.nan
        return batch

    monkeypatch.setattr(vapo.learning.step, "build_batch", poisoned)


def skipped(folder, name, phase="vapo"):
    """The skipped steps of a model in each step of a phase."""
    found = [line for line in lines(folder) if line["phase"] == phase and line["step"]]
    return [line[f"{name}/skipped_steps"] for line in found]


def culprit(folder):
    """Step and cause of the only response that is recorded as one that made a step skip."""
    (row,) = [row for row in lines(folder, "samples.jsonl") if "not_finite" in row]
    return row["step"], row["not_finite"]


@pytest.mark.parametrize(
    ("field", "name", "other"), [("old_logprobs", "actor", "critic"), ("returns", "critic", "actor")]
)
def test_a_poisoned_batch_is_skipped_and_the_run_goes_on(tmp_path, monkeypatch, field, name, other):
    poison(monkeypatch, {2}, field)
    printed = run(Config(**SETTINGS), tmp_path).printed
    # The response is in one of the two mini-batches; the other is trained on.
    assert (skipped(tmp_path, name), skipped(tmp_path, other)) == ([0, 1, 0], [0, 0, 0])
    steps = [line for line in lines(tmp_path) if line["step"]]
    assert all(math.isfinite(line["actor/grad_norm"]) and math.isfinite(line["critic/vf_loss"]) for line in steps)
    assert culprit(tmp_path) == (2, field)
    assert f"step 2 of VAPO: optimiser steps were skipped, 1 of the {name}: {field} is not finite in 1 res" in printed


def test_a_run_resumed_after_a_poisoned_batch_ends_as_one_that_was_not_interrupted(tmp_path, monkeypatch):
    config, evaluate, calls = Config(**SETTINGS | {"eval_every": 1}), vapo.trainer.held_out_metrics, []

    def interrupted(*arguments):
        calls.append(1)
        # The first is before RL, the fourth after its third step.
        if len(calls) == 4:
            raise KeyboardInterrupt
        return evaluate(*arguments)

    poison(monkeypatch, {2})
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(vapo.trainer, "held_out_metrics", interrupted)
        train(config, tmp_path / "broken")
    train(config, tmp_path / "broken", resume=True)
    poison(monkeypatch, {2})
    train(config, tmp_path / "undisturbed")
    assert_same_result(tmp_path / "broken", tmp_path / "undisturbed")


def test_too_many_in_a_row_end_the_run_with_a_checkpoint_from_which_it_goes_on(tmp_path, monkeypatch, capsys):
    # One optimiser step a batch.
    settings = SETTINGS | {"warm_start_steps": 0, "mini_batches": 1, "max_skipped_steps": 2, "steps": 6}
    poison(monkeypatch, {2, 3, 4})
    folder = tmp_path / "run"
    assert main(["train", "--out", str(folder), *options(settings)]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "vapo: the run stopped: 2 optimiser steps of the actor in a row were skipped, without a finite loss and"
        " gradient; the checkpoint of vapo, step 3, has the models as they were before them;"
        f" `vapo train --resume {folder}` goes on from its newest checkpoint"
    )
    assert latest_checkpoint(folder).name.endswith("vapo-000003")
    # The fourth batch is poisoned too, and it is another one than those that ended the run.
    assert main(["train", "--resume", str(folder)]) == 0
    assert skipped(folder, "actor") == [0, 1, 1, 1, 0, 0]


def train_on_ranks(folder):
    with pytest.MonkeyPatch.context() as monkeypatch:
        poison(monkeypatch, {2}, on_rank=1)
        train(Config(**SETTINGS), folder)


def test_ranks_skip_together_where_one_is_poisoned(tmp_path):
    run_on_ranks(2, train_on_ranks, tmp_path / "run")
    assert skipped(tmp_path / "run", "actor") == [0, 1, 0]
    assert all(math.isfinite(line["actor/loss"]) for line in lines(tmp_path / "run") if line["step"])
    assert culprit(tmp_path / "run")[0] == 2


@pytest.mark.parametrize(
    ("phase", "name", "changes"),
    [
        ("warm_start", "actor", {"warm_start_steps": 3}),
        ("value_pretraining", "critic", {"value_pretraining": True, "pretraining_steps": 3, "pretraining_prompts": 2}),
    ],
)
def test_the_phases_before_rl_skip_too(tmp_path, monkeypatch, phase, name, changes):
    calls = []

    def norm(model, max_norm):
        calls.append(1)
        return math.nan if len(calls) == 2 else torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()

    monkeypatch.setattr("vapo.learning.update.clip_grad_norm", norm)
    train(Config(**SETTINGS | {"steps": 0} | changes), tmp_path)
    assert skipped(tmp_path, name, phase) == [0, 1, 0]
