"""Supervised steps: their schedule, their data and that they are learned from."""

import random
from dataclasses import replace

import pytest
import torch

from vapo.learning.warm_start import draw_demonstrations, imitation_step, lr_share, warm_start_step
from vapo.models.forward import rollout_logprobs


def demonstrations(task, count, give_up=0.0, error=0.0):
    return draw_demonstrations(task, count, random.Random(0), give_up, error, torch.device("cpu"))


def test_learning_rate_rises_and_falls_linearly():
    shares = [lr_share(step, 220) for step in range(220)]
    assert shares[:20] == pytest.approx([(step + 1) / 20 for step in range(20)])
    assert shares[120] == pytest.approx(1 - 0.85 * 100 / 200)
    assert lr_share(220, 220) == pytest.approx(0.15)


def test_demonstrations_carry_their_problems_and_end_in_eos(task):
    rollout = demonstrations(task, 3)
    prompts = [task.tokenizer.decode(ids) for ids in rollout.prompt_ids.view(3, -1)]
    assert prompts == [problem.prompt for problem in task.problems(3, random.Random(0))]
    assert (rollout.token_ids[rollout.cu_seqlens[1:] - 1] == task.tokenizer.eos_token_id).all()


@pytest.mark.parametrize("micro_batch_tokens", [1, 10_000])
def test_imitation_step_returns_the_mean_over_tokens_and_lowers_it(policy, task, small_config, micro_batch_tokens):
    config, rollout = replace(small_config, micro_batch_tokens=micro_batch_tokens), demonstrations(task, 4)
    expected = -rollout_logprobs(policy, rollout, config).mean().item()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    losses = [imitation_step(policy, optimizer, rollout, config)["warm_start/loss"] for _ in range(5)]
    assert losses[0] == pytest.approx(expected, abs=1e-5)
    assert losses[-1] < losses[0] - 0.1


def test_faultless_demonstrations_come_first(learner_of, small_config):
    config = replace(small_config, warm_start_steps=3, warm_start_clean_steps=2, warm_start_batch=1)
    learner, faults = learner_of(config, "warm_start"), []

    def demonstration(problem, rng, *, give_up, error):
        faults.append((give_up, error))
        return "# 1 <eos>"

    learner.task.demonstration = demonstration
    metrics = [warm_start_step(learner, step, config).metrics for step in (1, 2, 3)]
    assert faults == [(0.0, 0.0), (0.0, 0.0), (0.3, 0.05)]
    # The first three of the 20 steps over which the rate rises.
    assert [each["warm_start/lr"] for each in metrics] == pytest.approx([3e-3 * share for share in (0.05, 0.1, 0.15)])
    assert learner.policy_optimizer.param_groups[0]["lr"] == metrics[-1]["warm_start/lr"]


def test_a_step_trains_the_policy_on_a_batch_of_its_own(learner_of, small_config):
    learner = learner_of(small_config, "warm_start")
    before, state = learner.policy.lm_head.weight.clone(), learner.generators.data.getstate()
    metrics = warm_start_step(learner, 1, small_config).metrics
    assert not torch.equal(learner.policy.lm_head.weight, before)
    assert learner.generators.data.getstate() != state
    assert 1.0 < metrics["warm_start/loss"] < 5.0
    assert metrics.keys() == {"warm_start/loss", "warm_start/lr", "actor/grad_norm", "actor/skipped_steps"}


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_a_batch_without_repeating_it(task, monkeypatch, world_size):
    def responses():
        rollout = demonstrations(task, 5, give_up=0.3, error=0.1)
        return [ids.tolist() for ids in rollout.token_ids.split(rollout.lengths.tolist())]

    whole, parts = responses(), []
    monkeypatch.setattr("vapo.models.sharding.world_size", lambda: world_size)
    for rank in range(world_size):
        monkeypatch.setattr("vapo.models.sharding.rank", lambda rank=rank: rank)
        parts += responses()
    assert sorted(parts) == sorted(whole)
