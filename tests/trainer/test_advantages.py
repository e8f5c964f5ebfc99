"""Rollout → Batch on hand-made tokens."""

from dataclasses import replace

import pytest
import torch

from vapo.advantages import build_batch, policy_lambda, rollout_logprobs, rollout_values
from vapo.config import Config
from vapo.models import critic_from_policy
from vapo.rollout import pack
from vapo.update import response_mean_weights

PLAIN = Config(whiten_advantages=False, length_adaptive_gae=False, lam_policy=0.5, lam_critic=1.0)


def two_responses():
    """A correct response of two tokens and a cut one of one token."""
    prompts, responses = [torch.tensor([3])] * 2, [torch.tensor([4, 1]), torch.tensor([5])]
    return pack(prompts, responses, torch.tensor([True, False]), torch.tensor([True, False]), torch.device("cpu"))


def test_advantages_and_returns_by_hand():
    values = torch.tensor([0.25, 0.5, 0.75])
    batch = build_batch(two_responses(), torch.zeros(3), values, PLAIN)
    # δ = (0.5 − 0.25, 1 − 0.5) and, the cut response being terminal, 0 − 0.75.
    torch.testing.assert_close(batch.advantages, torch.tensor([0.25 + 0.5 * 0.5, 0.5, -0.75]))
    torch.testing.assert_close(batch.returns, torch.tensor([1.0, 1.0, 0.0]))
    assert batch.lam_policy.tolist() == [0.5, 0.5]


def test_gamma_discounts_the_reward_by_hand():
    config = replace(PLAIN, gamma=0.5)
    batch = build_batch(two_responses(), torch.zeros(3), torch.tensor([0.25, 0.5, 0.75]), config)
    # δ = (0.5 · 0.5 − 0.25, 1 − 0.5), decayed by γλ = 0.25 and by γ.
    torch.testing.assert_close(batch.advantages, torch.tensor([0.25 * 0.5, 0.5, -0.75]))
    torch.testing.assert_close(batch.returns, torch.tensor([0.5, 1.0, 0.0]))


def test_worked_example():
    prompts, responses = [torch.tensor([3])], [torch.tensor([4, 4, 4, 4, 1])]
    flags = torch.tensor([True])
    rollout = pack(prompts, responses, flags, flags, torch.device("cpu"))
    config = replace(PLAIN, lam_policy=0.95, decoupled_gae=False)
    batch = build_batch(rollout, torch.zeros(5), torch.zeros(5), config)
    expected = torch.tensor([0.81450625, 0.857375, 0.9025, 0.95, 1.0])
    torch.testing.assert_close(batch.advantages, expected)
    torch.testing.assert_close(batch.returns, expected)


def test_whitening_shifts_and_scales_the_whole_batch():
    values = torch.tensor([0.25, 0.5, 0.75])
    plain = build_batch(two_responses(), torch.zeros(3), values, PLAIN)
    white = build_batch(two_responses(), torch.zeros(3), values, replace(PLAIN, whiten_advantages=True))
    centred = plain.advantages - plain.advantages.mean()
    torch.testing.assert_close(white.advantages, centred / plain.advantages.std(), atol=1e-5, rtol=0)
    assert torch.equal(white.returns, plain.returns)


@pytest.mark.parametrize(("alpha", "expected"), [(1.0, [0.0, 0.5, 0.9]), (0.05, [0.0, 0.0, 0.0])])
def test_lambda_follows_each_length(alpha, expected):
    lam = policy_lambda(torch.tensor([1, 2, 10]), Config(alpha=alpha))
    torch.testing.assert_close(lam, torch.tensor(expected))


def test_old_logprobs_and_values_do_not_depend_on_the_micro_batches(policy, rollout):
    critic = critic_from_policy(policy)
    torch.nn.init.ones_(critic.score.weight)
    one, many = Config(), Config(micro_batch_tokens=1)
    logprobs = rollout_logprobs(policy, rollout, one)
    values = rollout_values(critic, rollout, one)
    torch.testing.assert_close(rollout_logprobs(policy, rollout, many), logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(rollout_values(critic, rollout, many), values, atol=1e-4, rtol=0)
    assert not logprobs.requires_grad and not values.requires_grad
    assert (logprobs < 0).all()


def test_old_logprobs_are_at_the_sampling_temperature(policy, rollout):
    row, start = 1, int(rollout.cu_seqlens[1])
    prompt = rollout.prompt_ids[rollout.prompt_cu_seqlens[row] : rollout.prompt_cu_seqlens[row + 1]]
    logits = policy(input_ids=prompt[None]).logits[0, -1]
    expected = (logits / 0.5).log_softmax(-1)[rollout.token_ids[start]]
    logprobs = rollout_logprobs(policy, rollout, Config(temperature=0.5))
    torch.testing.assert_close(logprobs[start], expected.detach(), atol=1e-5, rtol=0)


def test_response_mean_weights_give_each_response_the_same_say():
    weights = response_mean_weights(torch.tensor([1, 4]), torch.tensor(9), 3)
    torch.testing.assert_close(weights, torch.tensor([3.0, 0.75, 0.75, 0.75, 0.75]))
