"""Value pretraining: Monte-Carlo targets, a frozen policy, and an end by explained variance or by steps."""

import random
from dataclasses import replace

import pytest
import torch

import vapo.value_pretraining
from vapo.advantages import rollout_values
from vapo.models import critic_from_policy
from vapo.value_pretraining import fit_returns, pretrain_values


def run(critic, policy, task, config):
    return list(
        pretrain_values(
            critic,
            policy,
            task,
            config,
            data=random.Random(0),
            sampling=torch.Generator().manual_seed(0),
            shuffling=torch.Generator().manual_seed(0),
        )
    )


def test_policy_stays_as_it_is_and_the_critic_does_not(policy, task, small_config):
    critic = critic_from_policy(policy)
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    run(critic, policy, task, small_config)
    assert all(torch.equal(weight, before[name]) for name, weight in policy.state_dict().items())
    assert not torch.equal(critic.base_model.norm.weight, before["model.norm.weight"])


@pytest.mark.parametrize("changes", [{}, {"lam_critic": 0.3}, {"decoupled_gae": False}])
def test_targets_are_the_terminal_rewards_whatever_lambda_is(policy, rollout, small_config, changes):
    config = replace(small_config, pretraining_mini_batches=1, pretraining_epochs=80, **changes)
    critic = critic_from_policy(policy)
    fit_returns(
        critic, torch.optim.AdamW(critic.parameters(), lr=3e-3), rollout, config, torch.Generator().manual_seed(0)
    )
    values = rollout_values(critic, rollout, config)
    expected = rollout.scores.repeat_interleave(rollout.lengths)
    torch.testing.assert_close(values, expected, atol=0.15, rtol=0)


def test_value_clip_is_off(policy, rollout, small_config):
    unclipped, clipped = critic_from_policy(policy), critic_from_policy(policy)
    for critic, config in ((unclipped, small_config), (clipped, replace(small_config, value_clip=1e-6))):
        optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-3)
        fit_returns(critic, optimizer, rollout, config, torch.Generator().manual_seed(0))
    assert torch.equal(unclipped.score.weight, clipped.score.weight)


def test_explained_variance_is_that_before_training_on_the_rollout(policy, rollout, small_config):
    critic = critic_from_policy(policy)
    optimizer = torch.optim.AdamW(critic.parameters(), lr=3e-3)
    config = replace(small_config, pretraining_epochs=40)
    shuffling = torch.Generator().manual_seed(0)
    first, second = (fit_returns(critic, optimizer, rollout, config, shuffling) for _ in range(2))
    assert first["critic/pretrain/vf_explained_var"] == 0
    assert second["critic/pretrain/vf_explained_var"] > 0.5


@pytest.mark.parametrize(("explained", "num_rollouts"), [([0.1, 0.4, 0.7, 0.9], 3), ([0.1] * 4, 4)])
def test_stops_on_explained_variance_or_on_the_step_limit(
    policy, task, small_config, monkeypatch, explained, num_rollouts
):
    remaining = iter(explained)
    monkeypatch.setattr(
        vapo.value_pretraining, "fit_returns", lambda *_: {"critic/pretrain/vf_explained_var": next(remaining)}
    )
    config = replace(small_config, pretraining_steps=4, pretraining_target=0.6)
    assert len(run(critic_from_policy(policy), policy, task, config)) == num_rollouts
