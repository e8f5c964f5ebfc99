"""Value pretraining: Monte-Carlo targets, a frozen policy, a start at the mean reward."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

import vapo.learning.value_pretraining
from vapo.learning.value_pretraining import center_critic, monte_carlo_batch, pretraining_step
from vapo.models.forward import rollout_values
from vapo.models.load import critic_from_policy, value_head
from vapo.rollout.collect import Collected


def fit_returns(critic, optimizer, rollout, config, generator):
    """As a step of the phase does, on a given rollout."""
    batch = monte_carlo_batch(critic, rollout, config)
    return vapo.learning.value_pretraining.fit_returns(critic, optimizer, batch, config, generator, Counter())


def shuffling():
    return torch.Generator().manual_seed(0)


def test_policy_stays_as_it_is_and_the_critic_does_not(learner_of, small_config, monkeypatch, rollout):
    monkeypatch.setattr(vapo.learning.value_pretraining, "collect", lambda *_, **__: Collected(rollout, [], []))
    learner = learner_of(replace(small_config, critic_lr=1e-3), "value_pretraining")
    before = {name: weight.clone() for name, weight in learner.policy.state_dict().items()}
    pretraining_step(learner, 1, small_config)
    assert all(torch.equal(weight, before[name]) for name, weight in learner.policy.state_dict().items())
    assert value_head(learner.critic).weight.any()


def test_a_step_samples_one_response_to_each_of_its_prompts(learner_of, small_config, monkeypatch):
    seen = {}
    collect = vapo.learning.value_pretraining.collect

    def record(*arguments, **settings):
        seen.update(settings, problems=arguments[3])
        return collect(*arguments, **settings)

    monkeypatch.setattr(vapo.learning.value_pretraining, "collect", record)
    learner = learner_of(small_config, "value_pretraining")
    report = pretraining_step(learner, 1, small_config)
    assert len(seen["problems"]) == 4 and seen["group_size"] == 1
    assert seen["sampling"] is learner.sampling and seen["generator"] is learner.generators.sampling
    assert report.errors == []
    assert report.metrics.keys() == {
        "critic/skipped_steps",
        "critic/pretrain/vf_explained_var",
        "critic/pretrain/vf_loss",
        "critic/pretrain/score",
        "response_length/mean",
    }


def test_the_first_step_begins_at_the_mean_reward_and_warms_up(learner_of, small_config, monkeypatch, rollout):
    monkeypatch.setattr(vapo.learning.value_pretraining, "collect", lambda *_, **__: Collected(rollout, [], ["failed"]))
    config = replace(small_config, critic_lr=0.4, critic_lr_warmup=4)
    seen = []

    def record(critic, optimizer, *_):
        seen.append((value_head(critic).bias.item(), optimizer.param_groups[0]["lr"]))
        return {"critic/skipped_steps": 0.0}

    monkeypatch.setattr(vapo.learning.value_pretraining, "fit_returns", record)
    learner = learner_of(config, "value_pretraining")
    assert pretraining_step(learner, 1, config).errors == ["failed"]
    with torch.no_grad():
        value_head(learner.critic).bias.fill_(0.125)
    pretraining_step(learner, 2, config)
    assert seen == [(0.5, pytest.approx(0.1)), (0.125, pytest.approx(0.2))]


def test_a_critic_that_is_given_keeps_its_bias(learner_of, small_config, monkeypatch, rollout):
    monkeypatch.setattr(vapo.learning.value_pretraining, "collect", lambda *_, **__: Collected(rollout, [], []))
    monkeypatch.setattr(vapo.learning.value_pretraining, "fit_returns", lambda *_: {"critic/skipped_steps": 0.0})
    learner = learner_of(small_config, "value_pretraining")
    pretraining_step(learner, 1, replace(small_config, critic="earlier/run"))
    assert value_head(learner.critic).bias.item() == 0.0


def test_a_centred_critic_says_the_mean_score_everywhere(policy, rollout, small_config):
    critic = critic_from_policy(policy)
    rewards = rollout.rewards.clone()
    rewards[2] = 3.0
    center_critic(critic, replace(rollout, rewards=rewards))
    assert torch.equal(rollout_values(critic, rollout, small_config), torch.full((11,), 1.0))


@pytest.mark.parametrize(
    "changes",
    [{}, {"lam_critic": 0.3}, {"decoupled_gae": False}, {"kl_reward_weight": 0.5}, {"whiten_advantages": False}],
)
def test_targets_are_the_terminal_rewards_whatever_the_settings_of_rl_are(policy, rollout, small_config, changes):
    config = replace(small_config, pretraining_mini_batches=1, pretraining_epochs=80, **changes)
    critic = critic_from_policy(policy)
    fit_returns(critic, torch.optim.AdamW(critic.parameters(), lr=3e-3), rollout, config, shuffling())
    values = rollout_values(critic, rollout, config)
    expected = rollout.scores.repeat_interleave(rollout.lengths)
    torch.testing.assert_close(values, expected, atol=0.15, rtol=0)


def first_loss(policy, rollout, config):
    """Mean of ½ R̂² over the tokens that train: the loss of the first step of a critic that says 0."""
    critic = critic_from_policy(policy)
    optimizer = torch.optim.SGD(critic.parameters(), lr=1e-9)
    config = replace(config, pretraining_mini_batches=1)
    return fit_returns(critic, optimizer, rollout, config, shuffling())["critic/pretrain/vf_loss"]


@pytest.mark.parametrize(
    ("truncated", "expected"),
    [
        # Three tokens of score 1; the six after them 0 but for what the setting says; five cut ones.
        ("zero", 0.5 * 3 / 11),
        ("bootstrap", 0.5 * 3 / 11),
        ("mask", 0.5 * 3 / 6),
        # Lengths 3, 1, 2, 5 of at most 5, over a buffer of 4: penalties ½, 0, ¼ and 1.
        ("penalty", 0.5 * (3 * 0.5**2 + 2 * 0.25**2 + 5 * 1.0) / 11),
    ],
)
def test_what_the_end_of_a_cut_response_means(policy, rollout, small_config, truncated, expected):
    cut = torch.tensor([False, False, False, True])
    rewards = rollout.rewards.clone()
    rewards[-1] = 0.0
    rollout = replace(rollout, is_truncated=cut, is_correct=rollout.is_correct & ~cut, rewards=rewards)
    config = replace(small_config, truncated=truncated, max_new_tokens=5, overlong_buffer=4)
    assert first_loss(policy, rollout, config) == pytest.approx(expected, rel=1e-5)


def test_value_clip_is_off(policy, rollout, small_config):
    unclipped, clipped = critic_from_policy(policy), critic_from_policy(policy)
    for critic, config in ((unclipped, small_config), (clipped, replace(small_config, value_clip=1e-6))):
        optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-3)
        fit_returns(critic, optimizer, rollout, config, shuffling())
    assert torch.equal(value_head(unclipped).weight, value_head(clipped).weight)
    assert value_head(unclipped).weight.any()


def test_epochs_and_mini_batches_are_those_of_the_phase(policy, rollout, small_config):
    critic = critic_from_policy(policy)
    optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-3)
    config = replace(small_config, pretraining_epochs=3, pretraining_mini_batches=2, critic_epochs=5, mini_batches=4)
    fit_returns(critic, optimizer, rollout, config, shuffling())
    assert {int(state["step"]) for state in optimizer.state.values()} == {6}


def test_explained_variance_is_that_before_training_on_the_rollout(policy, rollout, small_config):
    critic = critic_from_policy(policy)
    optimizer = torch.optim.AdamW(critic.parameters(), lr=3e-3)
    config, generator = replace(small_config, pretraining_epochs=40), shuffling()
    first, second = (fit_returns(critic, optimizer, rollout, config, generator) for _ in range(2))
    assert first["critic/pretrain/vf_explained_var"] == 0
    assert second["critic/pretrain/vf_explained_var"] > 0.5
    assert first["critic/pretrain/score"] == 0.5
    assert first["response_length/mean"] == 2.75
