"""Runs that meet a batch without a finite loss: they skip it, say so, and go on; too many such steps end them."""

import json
import math

import pytest
import torch
from ranks import run_on_ranks
from training_runs import assert_same_result

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

    def poisoned(*arguments):
        nonlocal number
        number += 1
        batch = build_batch(*arguments)
        if number in steps and rank() == on_rank:
            getattr(batch, field)[0] = math.nan
        return batch

    monkeypatch.setattr(vapo.learning.step, "build_batch", poisoned)


def lines(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.mark.parametrize(("field", "skipping"), [("old_logprobs", "actor"), ("returns", "critic")])
def test_a_poisoned_batch_is_skipped_and_the_run_goes_on(tmp_path, monkeypatch, capsys, field, skipping):
    poison(monkeypatch, {2}, field)
    train(Config(**SETTINGS), tmp_path / "run")
    steps = {line["step"]: line for line in lines(tmp_path / "run", "metrics.jsonl") if line["step"]}
    skipped = {name: [steps[step][f"{name}/skipped_steps"] for step in (1, 2, 3)] for name in ("actor", "critic")}
    # The response is in one of the two mini-batches; the other is trained on.
    expected = {"actor": [0, 0, 0], "critic": [0, 0, 0]} | {skipping: [0, 1, 0]}
    assert skipped == expected
    assert all(
        math.isfinite(step["actor/grad_norm"]) and math.isfinite(step["critic/vf_loss"]) for step in steps.values()
    )
    (culprit,) = [row for row in lines(tmp_path / "run", "samples.jsonl") if "not_finite" in row]
    assert (culprit["step"], culprit["not_finite"]) == (2, field)
    told = " ".join(capsys.readouterr().out.split())
    assert (
        f"step 2 of VAPO: optimiser steps were skipped, 1 of the {skipping}: {field} is not finite in 1 response"
        in told
    )


def test_a_run_resumed_after_a_poisoned_batch_ends_as_one_that_was_not_interrupted(tmp_path, monkeypatch):
    config = Config(**SETTINGS | {"eval_every": 1})
    poison(monkeypatch, {2})
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(vapo.trainer, "held_out_metrics", interrupt_at(3))
        train(config, tmp_path / "broken")
    train(config, tmp_path / "broken", resume=True)
    poison(monkeypatch, {2})
    train(config, tmp_path / "undisturbed")
    assert_same_result(tmp_path / "broken", tmp_path / "undisturbed")


def interrupt_at(count):
    """Evaluation that is interrupted the second time after ``count``."""
    evaluate, calls = vapo.trainer.held_out_metrics, []

    def held_out_metrics(*arguments):
        calls.append(1)
        if len(calls) == count + 1:
            raise KeyboardInterrupt
        return evaluate(*arguments)

    return held_out_metrics


def test_too_many_in_a_row_end_the_run_with_a_checkpoint_from_which_it_goes_on(tmp_path, monkeypatch, capsys):
    # Both mini-batches of every batch from the second on.
    settings = SETTINGS | {"mini_batches": 1, "max_skipped_steps": 2, "steps": 6}
    poison(monkeypatch, {2, 3, 4})
    folder = tmp_path / "run"
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items() if not isinstance(value, bool)]
    assert main(["train", "--warm-start-steps=0", "--no-value-pretraining", "--out", str(folder), *options]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "vapo: the run stopped: 2 optimiser steps of the actor in a row were skipped, without a finite loss and"
        " gradient; the checkpoint of vapo, step 3, has the models as they were before them;"
        f" `vapo train --resume {folder}` goes on from its newest checkpoint"
    )
    assert latest_checkpoint(folder).name.endswith("vapo-000003")
    # The fourth batch is poisoned too, and it is another one than those that ended the run.
    assert main(["train", "--resume", str(folder)]) == 0
    skipped = [line["actor/skipped_steps"] for line in lines(folder, "metrics.jsonl") if line["step"]]
    assert skipped == [0, 1, 1, 1, 0, 0]


def train_on_ranks(folder):
    with pytest.MonkeyPatch.context() as monkeypatch:
        poison(monkeypatch, {2}, on_rank=1)
        train(Config(**SETTINGS), folder)


def test_ranks_skip_together_where_one_is_poisoned(tmp_path):
    run_on_ranks(2, train_on_ranks, tmp_path / "run")
    steps = [line for line in lines(tmp_path / "run", "metrics.jsonl") if line["step"]]
    assert [line["actor/skipped_steps"] for line in steps] == [0, 1, 0]
    assert all(math.isfinite(line["actor/loss"]) for line in steps)
    (culprit,) = [row for row in lines(tmp_path / "run", "samples.jsonl") if "not_finite" in row]
    assert culprit["step"] == 2


@pytest.mark.parametrize("phase", ["warm_start", "value_pretraining"])
def test_the_phases_before_rl_skip_too(tmp_path, monkeypatch, phase):
    changes = {"warm_start": {"warm_start_steps": 3}, "value_pretraining": {"value_pretraining": True}}[phase]
    calls = []

    def norm(model, max_norm):
        calls.append(1)
        return math.nan if len(calls) == 2 else torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()

    monkeypatch.setattr("vapo.learning.update.clip_grad_norm", norm)
    config = Config(**SETTINGS | {"steps": 0, "pretraining_steps": 3, "pretraining_prompts": 2} | changes)
    train(config, tmp_path / "run")
    found = [line for line in lines(tmp_path / "run", "metrics.jsonl") if line["phase"] == phase]
    name = "actor" if phase == "warm_start" else "critic"
    assert [line[f"{name}/skipped_steps"] for line in found] == [0, 1, 0]
