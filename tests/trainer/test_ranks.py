"""Many ranks train as one process does: the same steps on the same data, whole runs, runs that change their ranks."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_on_ranks
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import LIVELY, assert_lively, assert_same_result, lines_without_times, make_lively, options
from transformers import AutoModelForCausalLM

import vapo.learning.step
import vapo.learning.value_pretraining
from vapo.cli import main
from vapo.config import Config
from vapo.evaluation import evaluate
from vapo.learning.advantages import build_batch
from vapo.learning.learner import Learner, make_learner
from vapo.learning.step import model_passes, vapo_step
from vapo.learning.update import accumulate_policy_loss, accumulate_value_loss, mini_batches
from vapo.learning.value_pretraining import pretraining_step
from vapo.learning.warm_start import warm_start_step
from vapo.models import sharding
from vapo.models.load import value_head
from vapo.presets import PRESETS
from vapo.rollout.collect import Collected, pack
from vapo.rollout.sampling import Sampling
from vapo.tasks import Problem, load_task
from vapo.trainer import train

pytestmark = pytest.mark.usefixtures("lively_runs")

SETTINGS = LIVELY | {
    "num_prompts": 4,
    "group_size": 2,
    "mini_batches": 1,
    "max_new_tokens": 6,
    "steps": 2,
    "warm_start_clean_steps": 1,
    "warm_start_batch": 5,
    "pretraining_prompts": 8,
    "eval_problems": 5,
    "eval_every": 1,
    "eval_samples": 2,
    "micro_batch_tokens": 30,
    "threads": 1,
    "device": "cpu",
}
# Four groups: with two ranks two each, with three ranks two, one and one. The one of rank 2 of 3 is cut throughout.
LENGTHS = (3, 1, 6, 5, 6, 6, 2, 4)
CUT = (4, 5)
CASES = {
    "vapo": {"critic_lr": 1e-4},
    "bootstrap": {"truncated": "bootstrap", "length_adaptive_gae": False, "lam_policy": 0.9, "value_clip": 0.1},
    "ppo": PRESETS["ppo"] | {"kl_weight": 0.1, "kl_reward_weight": 0.1, "group_sampling": True},
    "grpo": PRESETS["grpo"] | {"kl_weight": 0.1, "truncated": "mask"},
    "dapo": PRESETS["dapo"] | {"overlong_buffer": 3, "dynamic_sampling": False},
    "epochs": {"actor_epochs": 2, "critic_epochs": 3},
    "one reduction": {"reduce_gradients": "mini_batch"},
}


@functools.cache
def fixed_groups() -> Collected:
    """Four problems with two responses each, the same wherever this is called."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 21, (length,), generator=generator) for length in (4, 2, 5, 3)]
    prompts = [prompt for prompt in prompts for _ in range(2)]
    responses = [torch.randint(2, 21, (length,), generator=generator) for length in LENGTHS]
    is_truncated = torch.tensor([number in CUT for number in range(8)])
    is_correct = torch.tensor([True, False, True, True, False, False, False, True])
    scores = is_correct + torch.arange(8) / 10 * ~is_truncated
    rollout = pack(prompts, responses, scores, is_correct, is_truncated, 2, torch.device("cpu"))
    problems = [Problem(f"problem {number}", "") for number in range(4)]
    return Collected(problems, rollout, [f"response {number}" for number in range(8)], ["failed"])


def share_of_fixed_groups(*args: Any, group_size: int = 2, **kwargs: Any) -> Collected:
    """Replaces sampling: this rank's groups; one verifier failed on each rank."""
    collected = fixed_groups().select(sharding.share_of(range(4)))
    return collected._replace(rollout=replace(collected.rollout, group_size=group_size))


def learner_in(phase: str, config: Config) -> Learner:
    """Models that are not as new: the critic's values differ, and the policy has left its reference."""
    learner = make_learner(config, load_task("running-total"), torch.device("cpu"))
    learner.begin(phase, config)
    for optimizer in learner.optimizers.values():
        # Adam makes a full step of a gradient that is only rounding.
        optimizer.param_groups[0]["eps"] = 1e-4
    with torch.no_grad():
        if learner.reference is not None:
            for parameter in learner.reference.parameters():
                parameter.mul_(1.05)
        if learner.critic is not None:
            # Set alike on all ranks, whichever part of it they hold.
            value_head(learner.critic).weight.fill_(0.05)
            learner.critic.base_model.norm.weight.mul_(1.5)
    return learner


def whole(tensor: Tensor) -> Tensor:
    return sharding.whole(tensor).detach().clone()


def parameters_of(learner: Learner) -> dict[str, Tensor]:
    models = learner.models.items()
    return {f"{name}.{key}": each for name, model in models for key, each in model.named_parameters()}


def weights_of(learner: Learner) -> dict[str, Tensor]:
    return {name: whole(each) for name, each in parameters_of(learner).items()}


def gradients(learner: Learner, config: Config) -> dict[str, Any]:
    """Gradients and loss terms of both models, and the whitened advantages, before any step."""
    rollout = share_of_fixed_groups().rollout
    batch = build_batch(rollout, config, **model_passes(learner, rollout, 1, config, {}))
    (part,) = mini_batches(batch, 1, 1, torch.Generator())
    found = {"policy terms": sharding.sum_over_ranks(accumulate_policy_loss(learner.policy, batch, part, config))}
    if learner.critic is not None:
        terms = accumulate_value_loss(learner.critic, batch, part, config, value_clip=config.value_clip)
        found["critic terms"] = sharding.sum_over_ranks(terms)
    parameters = parameters_of(learner).items()
    found |= {f"gradient of {name}": whole(each.grad) for name, each in parameters if each.grad is not None}
    for model in learner.models.values():
        model.zero_grad()
    # In the order of the groups, whichever rank had them.
    tokens_of_groups = rollout.lengths.view(-1, 2).sum(1).tolist()
    parts = list(zip(sharding.share_of(range(4)), batch.advantages.split(tokens_of_groups), strict=True))
    advantages = sorted((part for rank in sharding.gather_objects(parts) for part in rank), key=lambda part: part[0])
    return found | {"advantages": torch.cat([part for _, part in advantages])}


def untimed(metrics: dict[str, float]) -> dict[str, float]:
    return {name: each for name, each in metrics.items() if not name.startswith(("timing_s/", "perf/"))}


def every_step(shard_ranks: int = 0) -> dict[str, dict[str, Any]]:
    """One step of every kind on the same data: its metrics and the weights it leaves."""
    make_lively(pytest.MonkeyPatch())
    vapo.learning.step.collect = vapo.learning.value_pretraining.collect = share_of_fixed_groups
    found: dict[str, dict[str, Any]] = {}
    settings = SETTINGS | {"shard_ranks": shard_ranks}
    for name, changes in CASES.items():
        config = Config(**settings | changes)
        learner = learner_in("vapo", config)
        before = gradients(learner, config)
        report = vapo_step(learner, 1, config)
        assert len(report.errors) == 1 and report.samples[0]["response"] == f"response {2 * sharding.rank()}"
        metrics = report.metrics
        # Each rank's verifier failed once.
        assert metrics.pop("reward/errors") == sharding.world_size()
        found[name] = before | untimed(metrics) | weights_of(learner)
    config = Config(**settings)
    learner = learner_in("value_pretraining", config)
    found["value_pretraining"] = pretraining_step(learner, 2, config).metrics | weights_of(learner)
    learner = learner_in("warm_start", config)
    found["warm_start"] = warm_start_step(learner, 2, config).metrics | weights_of(learner)
    found["evaluation"] = greedy_evaluation(learner)
    return found


def greedy_evaluation(learner: Learner) -> dict[str, float]:
    """Evaluation of five problems from two sources; greedy throughout, so that it does not depend on the generator."""
    sampling = Sampling(max_new_tokens=6, stop_token_ids=learner.sampling.stop_token_ids, top_k=1)
    problems = [Problem(f"{number} +1 =", "0", "odd" if number % 2 else "even") for number in range(5)]
    with sharding.gathered(learner.policy):
        return evaluate(
            learner.policy,
            learner.tokenizer,
            learner.task,
            problems,
            sampling=sampling,
            samples=2,
            generator=torch.Generator().manual_seed(sharding.rank()),
        )


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, check_dtype=False)


@pytest.fixture(scope="module")
def in_one_process(lively_runs: None) -> dict[str, dict[str, Any]]:
    """Without a process group."""
    with pytest.MonkeyPatch.context() as patch:
        # Afterwards they are what they were, whatever the steps put there.
        for owner in (vapo.learning.step, vapo.learning.value_pretraining):
            patch.setattr(owner, "collect", owner.collect)
        return every_step()


@pytest.mark.parametrize(("num_ranks", "shard_ranks"), [(1, 0), (2, 0), (3, 0), (4, 2)])
def test_ranks_step_as_one_process_does(in_one_process, num_ranks, shard_ranks):
    for each in run_on_ranks(num_ranks, every_step, shard_ranks):
        assert_close(each, in_one_process)


def test_the_compared_steps_are_not_empty(in_one_process):
    for name in CASES:
        found = in_one_process[name]
        assert found["actor/grad_norm"] > 0.01 and found["advantages"].std() > 0.1, name
        assert found["gradient of policy.model.norm.weight"].abs().max() > 0
    assert in_one_process["ppo"]["actor/kl"] > 0 and in_one_process["ppo"]["critic/kl_penalty"] != 0
    assert in_one_process["vapo"]["critic/vf_explained_var"] not in (0.0, 1.0)
    assert 0 < in_one_process["evaluation"]["val/response_length"] <= 6


class ReduceScatters(TorchDispatchMode):
    """Counts a rank's reduce-scatters, of which a sharded module has one for each reduction of its gradient."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "reduce_scatter" in str(function)
        return function(*args, **(kwargs or {}))


def reductions() -> dict[str, int]:
    """Reduce-scatters of the gradients of one mini-batch of four micro-batches, for both models."""
    make_lively(pytest.MonkeyPatch())
    vapo.learning.step.collect = share_of_fixed_groups
    found = {}
    for when in ("micro_batch", "mini_batch"):
        config = Config(**SETTINGS | {"reduce_gradients": when, "micro_batch_tokens": 1})
        learner = learner_in("vapo", config)
        with ReduceScatters() as seen:
            gradients(learner, config)
        found[when] = seen.count
    return found


def test_gradients_are_reduced_once_a_mini_batch_if_wanted():
    for found in run_on_ranks(2, reductions):
        assert found["mini_batch"] > 0 and found["micro_batch"] == 4 * found["mini_batch"]


def runs_on_ranks(folder: Path) -> None:
    """A whole run, one in two parts, one with dynamic sampling, and one that a single process began."""
    make_lively(pytest.MonkeyPatch())
    config = Config(**SETTINGS)
    train(config, folder / "whole")
    train(replace(config, steps=1), folder / "parts")
    train(config, folder / "parts", resume=True)
    train(Config(**SETTINGS | PRESETS["dapo"] | {"overlong_buffer": 3, "steps": 1}), folder / "dapo")
    train(config, folder / "begun_alone", resume=True)


def logged_steps(folder: Path) -> list[tuple[str, int]]:
    return [(each["phase"], each["step"]) for each in lines_without_times(folder)]


def whole_run(steps: int) -> list[tuple[str, int]]:
    """The steps of which a run with two steps of each phase before RL has lines, each once."""
    before = [(phase, step) for phase in ("warm_start", "value_pretraining") for step in (1, 2)]
    return [*before, *(("vapo", step) for step in range(steps + 1))]


def test_whole_runs_on_two_ranks_and_between(tmp_path):
    config = Config(**SETTINGS)
    train(replace(config, steps=1), tmp_path / "begun_alone")
    run_on_ranks(2, runs_on_ranks, tmp_path)

    assert_lively(tmp_path / "whole")
    assert_same_result(tmp_path / "parts", tmp_path / "whole")
    assert logged_steps(tmp_path / "whole") == logged_steps(tmp_path / "begun_alone") == whole_run(2)
    first, second = (lines_without_times(tmp_path / name) for name in ("whole", "begun_alone"))
    # What depends on no sample is the same on any number of ranks, up to rounding.
    assert first[1]["warm_start/loss"] == pytest.approx(second[1]["warm_start/loss"], rel=1e-5)
    assert 0 < lines_without_times(tmp_path / "dapo")[-1]["rollout/informative_groups"] <= 1
    # Each of the two ranks has a generator of its own.
    state = json.loads((tmp_path / "whole" / "checkpoints" / "2-vapo-000002" / "state.json").read_text())
    generators = state["state"]["generators"]
    assert len({each["sampling"] for each in generators}) == len(generators) == 2

    before = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "policy").state_dict()
    train(replace(config, steps=3, actor_lr=1e-12), tmp_path / "whole", resume=True)
    assert logged_steps(tmp_path / "whole") == whole_run(3)
    # One process went on with the weights of two ranks: after a step of almost no length they are the same.
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "policy").state_dict()
    assert_close(after, before)


def run_in_pairs(folder: Path, config: Config) -> None:
    make_lively(pytest.MonkeyPatch())
    train(config, folder)


def test_one_process_goes_on_with_a_run_of_four_ranks_that_sharded_in_pairs(tmp_path):
    config = Config(**SETTINGS | {"shard_ranks": 2, "steps": 1})
    run_on_ranks(4, run_in_pairs, tmp_path, config)
    assert lines_without_times(tmp_path)[-1]["actor/grad_norm"] > 0
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").state_dict()
    with pytest.raises(ValueError, match="shard_ranks must divide the number of ranks, 1; got 2"):
        train(config, tmp_path, resume=True)
    train(replace(config, shard_ranks=0, steps=2, actor_lr=1e-12), tmp_path, resume=True)
    assert logged_steps(tmp_path) == whole_run(2)
    assert_close(AutoModelForCausalLM.from_pretrained(tmp_path / "policy").state_dict(), before)


def test_torchrun_writes_one_run_and_one_process_goes_on_with_it(tmp_path, capsys, monkeypatch):
    """As a user would, without a folder's name: the folder is new, and the same for all ranks."""
    monkeypatch.chdir(tmp_path)
    Path("reward.py").write_text("def score(completion, answer, **row):\n    return len(completion) % 3\n")
    (tmp_path / "runs" / "running-total-vapo-seed0").mkdir(parents=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "vapo", "train"]
    done = subprocess.run(
        [*command, *options(SETTINGS | {"reward": f"{tmp_path}/reward.py:score"})],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    folder = Path("runs/running-total-vapo-seed0-2")
    assert sorted(each.name for each in Path("runs").iterdir()) == ["running-total-vapo-seed0", folder.name]
    assert done.stdout.count("run folder: ") == done.stdout.count("held-out accuracy, greedy") == 1
    assert logged_steps(folder) == whole_run(2)
    # Those of rank 0: each step its four, of two groups.
    assert len((folder / "samples.jsonl").read_text().splitlines()) == 2 * 4
    assert sorted(each.name for each in folder.iterdir()) == [
        *("checkpoints", "config.json", "critic", "curves.png", "metrics.jsonl", "policy", "pretrained_critic"),
        "samples.jsonl",
    ]
    assert main(["train", "--resume", str(folder), "--steps", "3"]) == 0
    assert logged_steps(folder) == whole_run(3)
    assert json.loads((folder / "config.json").read_text())["steps"] == 3


def test_bfloat16_computes_so_and_keeps_float32(tmp_path):
    config = Config(**SETTINGS | {"dtype": "bfloat16"})
    train(config, tmp_path / "run")
    assert logged_steps(tmp_path / "run") == whole_run(2)
    assert_lively(tmp_path / "run")
    for name in ("policy", "critic", "pretrained_critic"):
        weights = load_file(tmp_path / "run" / name / "model.safetensors")
        assert {each.dtype for each in weights.values()} == {torch.float32}
        layer = next(each for key, each in weights.items() if "q_proj" in key)
        assert not torch.equal(layer, layer.bfloat16().float())
    train(replace(config, dtype="float32"), tmp_path / "exact")
    loss, exact = (lines_without_times(tmp_path / name)[0]["warm_start/loss"] for name in ("run", "exact"))
    assert 0 < abs(loss - exact) < 0.05
    assert not torch.distributed.is_initialized()
