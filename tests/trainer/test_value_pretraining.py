"""Value pretraining: Monte-Carlo targets, a frozen policy, a start at the mean reward."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from vectors import weights

import vapo.learning.value_pretraining
from vapo.learning.value_pretraining import center_critic, monte_carlo_batch, pretraining_step
from vapo.models.forward import rollout_values
from vapo.models.load import critic_from_policy, value_head


def fit_returns(critic, rollout, config, *, optimizer=None):
    """As a step of the phase does, on a given rollout."""
    optimizer = optimizer or torch.optim.AdamW(critic.parameters(), lr=3e-3)
    batch, generator = monte_carlo_batch(critic, rollout, config), torch.Generator().manual_seed(0)
    return vapo.learning.value_pretraining.fit_returns(critic, optimizer, batch, config, generator, Counter())


def test_a_step_samples_one_response_to_each_prompt_and_trains_the_critic_alone(learner_of, judged, small_config):
    config = replace(small_config, critic_lr=1e-3)
    learner = judged(learner_of(config, "value_pretraining"))
    score, seen, before = learner.task.score, [], weights(learner.policy)

    def record(problems, responses):
        seen.extend(zip([problem.prompt for problem in problems], responses, strict=True))
        return score(problems, responses)

    learner.task.score, state = record, learner.generators.sampling.get_state()
    report = pretraining_step(learner, 1, config)
    assert len({prompt for prompt, _ in seen}) == len(seen) == 4
    # The learner's own sampling has responses of one token, and its own generator.
    assert report.metrics["response_length/mean"] == 1
    assert not torch.equal(learner.generators.sampling.get_state(), state)
    assert torch.equal(weights(learner.policy), before)
    assert value_head(learner.critic).weight.any()
    assert report.errors == []
    assert report.metrics.keys() == {
        "critic/skipped_steps",
        "critic/pretrain/vf_explained_var",
        "critic/pretrain/vf_loss",
        "critic/pretrain/score",
        "response_length/mean",
    }


@pytest.mark.parametrize(("given", "first_bias"), [("", 1.0), ("earlier/run", 0.0)])
def test_a_new_critic_begins_at_the_mean_reward_and_its_learning_rate_warms_up(
    learner_of, judged, small_config, given, first_bias
):
    config = replace(small_config, critic_lr=4e-9, critic_lr_warmup=4, critic=given)
    learner, found = judged(learner_of(small_config, "value_pretraining")), []
    bias = value_head(learner.critic).bias
    for step in (1, 2):
        pretraining_step(learner, step, config)
        found.append((bias.item(), learner.critic_optimizer.param_groups[0]["lr"]))
        bias.data.fill_(0.125)
    expected = [(first_bias, 1e-9), (0.125, 2e-9)]
    assert found == [(pytest.approx(value, abs=1e-7), pytest.approx(lr)) for value, lr in expected]


def test_failed_verifiers_are_told_of(learner_of, judged, small_config):
    learner = judged(learner_of(small_config, "value_pretraining"), error="it broke")
    assert pretraining_step(learner, 1, small_config).errors == ["it broke"] * 4


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
def test_targets_are_the_terminal_rewards_whatever_the_settings_of_rl_are(critic, rollout, small_config, changes):
    batch = monte_carlo_batch(critic, rollout, replace(small_config, **changes))
    torch.testing.assert_close(batch.returns, rollout.scores.repeat_interleave(rollout.lengths))


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
    settings = {"truncated": truncated, "max_new_tokens": 5, "overlong_buffer": 4, "pretraining_mini_batches": 1}
    config = replace(small_config, **settings)
    metrics = fit_returns(critic_from_policy(policy), rollout, config)
    # Mean of ½ R̂² over the tokens that train: the first step of a critic that says 0.
    assert metrics["critic/pretrain/vf_loss"] == pytest.approx(expected, rel=1e-5)


def test_value_clip_is_off(policy, rollout, small_config):
    unclipped, clipped = critic_from_policy(policy), critic_from_policy(policy)
    fit_returns(unclipped, rollout, small_config)
    fit_returns(clipped, rollout, replace(small_config, value_clip=1e-6))
    assert torch.equal(value_head(unclipped).weight, value_head(clipped).weight)
    assert value_head(unclipped).weight.any()


def test_epochs_and_mini_batches_are_those_of_the_phase(policy, rollout, small_config):
    critic = critic_from_policy(policy)
    optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-3)
    config = replace(small_config, pretraining_epochs=3, pretraining_mini_batches=2, critic_epochs=5, mini_batches=4)
    fit_returns(critic, rollout, config, optimizer=optimizer)
    assert {int(state["step"]) for state in optimizer.state.values()} == {6}


def test_the_critic_learns_its_targets_and_is_measured_before_it_trains(policy, rollout, small_config):
    critic, config = (
        critic_from_policy(policy),
        replace(small_config, pretraining_epochs=40, pretraining_mini_batches=1),
    )
    first, second = (fit_returns(critic, rollout, config) for _ in range(2))
    assert first["critic/pretrain/vf_explained_var"] == 0
    assert second["critic/pretrain/vf_explained_var"] > 0.5
    assert first["critic/pretrain/score"] == 0.5
    assert first["response_length/mean"] == 2.75
    expected = rollout.scores.repeat_interleave(rollout.lengths)
    torch.testing.assert_close(rollout_values(critic, rollout, config), expected, atol=0.15, rtol=0)
