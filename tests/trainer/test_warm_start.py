"""Supervised steps: their schedule, their data and that they are learned from."""

import random
from dataclasses import replace

import pytest
import torch

from vapo.advantages import rollout_logprobs
from vapo.warm_start import draw_demonstrations, imitation_step, lr_share, warm_start


def test_learning_rate_rises_and_falls_linearly():
    shares = [lr_share(step, 220) for step in range(220)]
    assert shares[:20] == pytest.approx([(step + 1) / 20 for step in range(20)])
    assert shares[120] == pytest.approx(1 - 0.85 * 100 / 200)
    assert lr_share(220, 220) == pytest.approx(0.15)


def test_demonstrations_carry_their_problems_and_end_in_eos(task):
    rollout = draw_demonstrations(task, 3, random.Random(0), 0.0, 0.0, torch.device("cpu"))
    problems = task.problems(3, random.Random(0))
    prompts = [task.tokenizer.decode(ids) for ids in rollout.prompt_ids.view(3, -1)]
    assert prompts == [problem.prompt for problem in problems]
    assert (rollout.token_ids[rollout.cu_seqlens[1:] - 1] == task.tokenizer.eos_token_id).all()


@pytest.mark.parametrize("micro_batch_tokens", [1, 10_000])
def test_imitation_step_returns_the_mean_over_tokens_and_lowers_it(policy, task, small_config, micro_batch_tokens):
    config = replace(small_config, micro_batch_tokens=micro_batch_tokens)
    demonstrations = draw_demonstrations(task, 4, random.Random(0), 0.0, 0.0, policy.device)
    expected = -rollout_logprobs(policy, demonstrations, config).mean().item()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    losses = [imitation_step(policy, optimizer, demonstrations, config) for _ in range(5)]
    assert losses[0] == pytest.approx(expected, abs=1e-5)
    assert losses[-1] < losses[0] - 0.1


def test_faultless_demonstrations_come_first(policy, task, small_config, monkeypatch):
    faults = []

    def record(problem, rng, *, give_up, error):
        faults.append((give_up, error))
        return "# 1 <eos>"

    monkeypatch.setattr(task, "demonstration", record, raising=False)
    config = replace(small_config, warm_start_steps=3, warm_start_clean_steps=2, warm_start_batch=1)
    metrics = list(warm_start(policy, task, config, random.Random(0)))
    assert faults == [(0.0, 0.0), (0.0, 0.0), (0.3, 0.05)]
    assert [each["warm_start/lr"] for each in metrics] == pytest.approx([3e-3 * share for share in (0.05, 0.1, 0.15)])


def test_no_steps_change_nothing(policy, task, small_config):
    config = replace(small_config, warm_start_steps=0, warm_start_clean_steps=0)
    assert list(warm_start(policy, task, config, random.Random(0))) == []
