"""The straight line as a whole, at a size that takes seconds."""

import json
import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import vapo.trainer
import vapo.value_pretraining
from vapo.metrics import RunLog
from vapo.models import critic_from_policy, load_critic, tiny_policy
from vapo.tasks.running_total import RunningTotal
from vapo.trainer import (
    batch_metrics,
    choose_device,
    make_generators,
    make_learner,
    sample_rows,
    seed_for,
    small_lambda_warning,
    train,
    vapo_step,
)
from vapo.types import Batch

STEP_METRICS = {
    "actor/pg_loss",
    "actor/nll_loss",
    "actor/entropy",
    "actor/ppo_kl",
    "actor/pg_clipfrac",
    "actor/grad_norm",
    "critic/vf_loss",
    "critic/vf_explained_var",
    "critic/grad_norm",
    "critic/rewards/mean",
    "critic/score/mean",
    "critic/lambda_policy/mean",
    "critic/lambda_policy/min",
    "critic/lambda_policy/max",
    "response_length/mean",
    "response_length/max",
    "response_length/min",
    "response_length/clip_ratio",
    "timing_s/gen",
    "timing_s/old_log_prob",
    "timing_s/adv",
    "timing_s/update_actor",
    "timing_s/update_critic",
    "timing_s/step",
    "perf/throughput",
}


def read_metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_times(folder):
    lines = read_metrics(folder)
    return [{k: v for k, v in line.items() if not k.startswith(("timing_s/", "perf/"))} for line in lines]


def test_a_run_leaves_its_record_and_its_models(small_config, task, tmp_path):
    folder = tmp_path / "run"
    after = train(small_config, folder)
    lines = read_metrics(folder)
    places = [(line["phase"], line["step"]) for line in lines]
    assert places == [
        ("warm_start", 1),
        ("warm_start", 2),
        ("value_pretraining", 1),
        ("vapo", 0),
        ("vapo", 1),
        ("vapo", 2),
    ]
    assert lines[-1].keys() >= STEP_METRICS | after.keys()
    assert {name: lines[-1][name] for name in after} == after
    assert json.loads((folder / "config.json").read_text())["num_prompts"] == 2
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 2 * 4
    assert {"prompt", "response", "reward", "is_correct", "advantage_min", "advantage_max"} <= samples[0].keys()
    assert (folder / "curves.png").stat().st_size > 0
    policy = AutoModelForCausalLM.from_pretrained(folder / "policy")
    assert policy.num_parameters() == tiny_policy(task.tokenizer, 0).num_parameters()
    assert len(AutoTokenizer.from_pretrained(folder / "policy")) == len(task.tokenizer)
    assert load_critic(folder / "critic", torch.device("cpu")).score.weight.shape == (1, 96)


def test_same_seed_same_metrics_and_another_seed_others(small_config, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.rand(seed + len(name))  # the global generator plays no part
        train(replace(small_config, seed=seed), tmp_path / name)
    assert without_times(tmp_path / "a") == without_times(tmp_path / "b")
    assert without_times(tmp_path / "a") != without_times(tmp_path / "c")


def test_without_value_pretraining_the_phase_is_left_out(small_config, tmp_path):
    train(replace(small_config, value_pretraining=False, steps=1), tmp_path / "run")
    assert {line["phase"] for line in read_metrics(tmp_path / "run")} == {"warm_start", "vapo"}
    assert not (tmp_path / "run" / "pretrained_critic").exists()


def test_rl_starts_from_the_pretrained_critic_with_fresh_optimisers(small_config, tmp_path, monkeypatch):
    handed_over = []

    def record(policy, critic, config):
        learner = make_learner(policy, critic, config)
        handed_over.append({name: weight.clone() for name, weight in critic.state_dict().items()})
        assert not learner.critic_optimizer.state
        return learner

    # Every finished response is correct, so that there is something to learn.
    monkeypatch.setattr(RunningTotal, "is_correct", lambda *_: True)
    monkeypatch.setattr(vapo.trainer, "make_learner", record)
    train(replace(small_config, pretraining_prompts=16), tmp_path / "run")
    checkpoint = load_critic(tmp_path / "run" / "pretrained_critic", torch.device("cpu")).state_dict()
    final = load_critic(tmp_path / "run" / "critic", torch.device("cpu")).state_dict()
    assert all(torch.equal(weight, handed_over[0][name]) for name, weight in checkpoint.items())
    assert checkpoint["score.weight"].any()
    assert not torch.equal(checkpoint["score.weight"], final["score.weight"])


def test_a_folder_with_a_run_is_refused(small_config, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl"):
        train(small_config, tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"


@pytest.mark.parametrize(("alpha", "is_warned"), [(0.05, True), (1e6, False)])
def test_a_small_lambda_is_pointed_out(small_config, tmp_path, capsys, alpha, is_warned):
    train(replace(small_config, alpha=alpha), tmp_path / "run")
    output = " ".join(capsys.readouterr().out.split())
    # Once, however many batches it holds for.
    assert output.count("mean λ_policy of a batch fell below 0.5") == is_warned


def test_the_warning_names_its_cause(small_config):
    fixed = replace(small_config, length_adaptive_gae=False, lam_policy=0.2)
    assert "(α = 0.05 is small for responses this short; see critic/lambda_policy/mean)" in small_lambda_warning(
        small_config
    )
    assert "(lam_policy = 0.2 for all; see critic/lambda_policy/mean)" in small_lambda_warning(fixed)


def test_a_step_moves_both_models_by_their_own_optimisers(policy, task, small_config):
    learner = make_learner(policy, critic_from_policy(policy), small_config)
    assert learner.policy_optimizer.param_groups[0]["lr"] == small_config.actor_lr
    assert learner.critic_optimizer.param_groups[0]["lr"] == small_config.critic_lr
    before = policy.lm_head.weight.clone()
    metrics, samples = vapo_step(learner, task, small_config, make_generators(0, torch.device("cpu")))
    assert not torch.equal(policy.lm_head.weight, before)
    assert metrics.keys() >= STEP_METRICS
    assert len(samples) == 4
    steps = [
        {int(state["step"]) for state in optimizer.state.values()}
        for optimizer in (learner.policy_optimizer, learner.critic_optimizer)
    ]
    assert steps == [{small_config.mini_batches}] * 2


def test_batch_metrics_by_hand(rollout):
    returns = torch.tensor([1.0] * 3 + [0.0] * 3 + [1.0] * 5)
    lam = torch.tensor([0.5, 0.0, 0.25, 0.75])
    metrics = batch_metrics(Batch(rollout, returns, returns, returns, returns, lam))
    assert metrics == pytest.approx(
        {
            "critic/score/mean": 0.5,
            "critic/rewards/mean": 0.5,
            "critic/vf_explained_var": 1.0,
            "critic/lambda_policy/mean": 0.375,
            "critic/lambda_policy/min": 0.0,
            "critic/lambda_policy/max": 0.75,
            "response_length/mean": 2.75,
            "response_length/min": 1,
            "response_length/max": 5,
            "response_length/clip_ratio": 0.0,
        }
    )


def test_sample_rows_pair_prompts_with_their_responses(rollout, task, small_config):
    problems = task.problems(2, random.Random(0))
    advantages = torch.arange(11.0)
    batch = Batch(rollout, advantages, advantages, advantages, advantages, torch.zeros(4))
    rows = sample_rows(batch, problems, ["a", "b", "c", "d"], replace(small_config, logged_samples=2))
    assert [(row["prompt"], row["response"]) for row in rows] == [(problems[0].prompt, "a"), (problems[1].prompt, "c")]
    assert [(row["reward"], row["is_correct"]) for row in rows] == [(1.0, True), (0.0, False)]
    assert [(row["advantage_min"], row["advantage_max"]) for row in rows] == [(0.0, 2.0), (4.0, 5.0)]
    assert sample_rows(batch, problems, ["a", "b", "c", "d"], replace(small_config, logged_samples=0)) == []


def test_each_purpose_has_a_seed_of_its_own():
    seeds = [seed_for(purpose, seed) for purpose in ("data", "sampling", "shuffling") for seed in range(3)]
    assert len(set(seeds)) == 9


def test_generators_repeat_with_the_seed_and_change_with_it():
    def draws(seed):
        generators = make_generators(seed, torch.device("cpu"))
        tensors = [torch.rand(1, generator=each).item() for each in (generators.sampling, generators.shuffling)]
        return [generators.data.random(), *tensors]

    assert draws(0) == draws(0)
    assert len({*draws(0), *draws(1)}) == 6


def test_steps_left_out_by_an_early_end_are_not_waited_for(small_config, tmp_path, monkeypatch):
    logs = []

    class KeptLog(RunLog):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            logs.append(self)

    monkeypatch.setattr(vapo.trainer, "RunLog", KeptLog)
    train(replace(small_config, pretraining_steps=3, pretraining_target=1e-9), tmp_path / "all")
    monkeypatch.setattr(vapo.value_pretraining, "explained_variance", lambda *_: torch.tensor(0.7))
    train(replace(small_config, pretraining_steps=3), tmp_path / "one")
    assert [log.progress.steps_done for log in logs] == [2 + 3 + 2, 2 + 1 + 2]
    assert [log.progress.total_steps for log in logs] == [2 + 3 + 2, 2 + 1 + 2]


def test_device_is_checked(small_config, monkeypatch):
    assert choose_device(small_config) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(replace(small_config, device="auto")) == torch.device("cpu")
    with pytest.raises(ValueError, match="device must be auto or cpu where PyTorch sees no GPU; got 'cuda'"):
        choose_device(replace(small_config, device="cuda"))
