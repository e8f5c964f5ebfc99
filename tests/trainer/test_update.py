"""One optimiser step: any split into micro-batches adds up to the undivided step."""

from dataclasses import replace

import pytest
import torch

from vapo.advantages import rollout_logprobs
from vapo.config import Config
from vapo.models import critic_from_policy
from vapo.packing import all_rows
from vapo.types import Batch
from vapo.update import (
    accumulate_policy_loss,
    accumulate_value_loss,
    mean_metrics,
    split_rows,
    update_critic,
    update_policy,
)

TERMS = ("pg_loss", "nll_loss", "entropy", "ppo_kl", "pg_clipfrac", "loss")
UNDIVIDED = 10_000


@pytest.fixture
def batch(policy, rollout):
    """Old log-probs a little off the policy's, so that ratios differ from 1 and some are clipped."""
    generator = torch.Generator().manual_seed(0)

    def noise():
        return torch.randn(11, generator=generator)

    old_logprobs = rollout_logprobs(policy, rollout, Config()) + 0.3 * noise()
    return Batch(rollout, old_logprobs, 0.1 * noise(), noise(), noise(), torch.zeros(4))


@pytest.fixture
def critic(policy):
    critic = critic_from_policy(policy)
    torch.nn.init.normal_(critic.score.weight, std=0.02, generator=torch.Generator().manual_seed(0))
    return critic


def policy_step(policy, batch, rows=None, **settings):
    """Loss terms by name, and the gradient as one vector."""
    policy.zero_grad()
    rows = all_rows(batch.rollout) if rows is None else rows
    terms = accumulate_policy_loss(policy, batch, rows, Config(**settings))
    gradient = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
    return dict(zip(TERMS, terms.tolist(), strict=True)), gradient


def value_step(critic, batch, *, value_clip=None, **settings):
    critic.zero_grad()
    terms = accumulate_value_loss(critic, batch, all_rows(batch.rollout), Config(**settings), value_clip=value_clip)
    return terms, torch.cat([parameter.grad.flatten() for parameter in critic.parameters()])


# One response each, two and two, three and one: rows of 6, 3, 6 and 8 tokens.
@pytest.mark.parametrize("micro_batch_tokens", [1, 13, 18])
@pytest.mark.parametrize("token_level_loss", [True, False])
def test_policy_and_nll_micro_batches_add_up(policy, batch, micro_batch_tokens, token_level_loss):
    settings = {"token_level_loss": token_level_loss, "nll_weight": 0.5}
    whole, gradient = policy_step(policy, batch, micro_batch_tokens=UNDIVIDED, **settings)
    parts, summed = policy_step(policy, batch, micro_batch_tokens=micro_batch_tokens, **settings)
    assert parts == pytest.approx(whole, abs=1e-6)
    assert (summed - gradient).abs().max() < 1e-6 * max(1.0, gradient.abs().max().item())
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize("micro_batch_tokens", [1, 13, 18])
@pytest.mark.parametrize("value_clip", [None, 0.1])
def test_value_micro_batches_add_up(critic, batch, micro_batch_tokens, value_clip):
    whole, gradient = value_step(critic, batch, value_clip=value_clip, micro_batch_tokens=UNDIVIDED)
    parts, summed = value_step(critic, batch, value_clip=value_clip, micro_batch_tokens=micro_batch_tokens)
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=0)
    assert (summed - gradient).abs().max() < 1e-6 * max(1.0, gradient.abs().max().item())
    assert gradient.abs().max() > 1e-3


def test_nll_covers_the_correct_responses_only(policy, batch):
    logprobs = rollout_logprobs(policy, batch.rollout, Config())
    terms, _ = policy_step(policy, batch)
    # The first response has tokens 0 to 2, the last 6 to 10.
    expected = -torch.cat([logprobs[:3], logprobs[6:]]).mean()
    assert terms["nll_loss"] == pytest.approx(expected.item(), abs=1e-6)
    assert terms["loss"] == pytest.approx(terms["pg_loss"] + 0.1 * terms["nll_loss"], abs=1e-6)


def test_without_a_correct_response_the_nll_is_zero(policy, batch):
    terms, gradient = policy_step(policy, batch, rows=torch.tensor([1, 2]))
    unweighted, same = policy_step(policy, batch, rows=torch.tensor([1, 2]), positive_nll=False)
    assert terms["nll_loss"] == 0
    assert terms == unweighted
    assert torch.equal(gradient, same)


def test_the_ratio_is_1_at_any_temperature_before_the_first_step(policy, batch):
    old_logprobs = rollout_logprobs(policy, batch.rollout, Config(temperature=0.5))
    batch = replace(batch, old_logprobs=old_logprobs)
    terms, _ = policy_step(policy, batch, temperature=0.5)
    assert terms["ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert terms["pg_loss"] == pytest.approx(-batch.advantages.mean().item(), abs=1e-5)


def test_a_mini_batch_is_the_mean_over_its_own_tokens(policy, batch):
    first, _ = policy_step(policy, batch, rows=torch.tensor([0, 2]))
    second, _ = policy_step(policy, batch, rows=torch.tensor([1, 3]))
    both, _ = policy_step(policy, batch)
    assert both["pg_loss"] == pytest.approx((5 * first["pg_loss"] + 6 * second["pg_loss"]) / 11, abs=1e-6)


def test_update_policy_moves_towards_what_was_better_than_expected(policy, batch):
    before = rollout_logprobs(policy, batch.rollout, Config())
    signs = torch.tensor([1.0, 1, 1, -1, -1, -1, 1, 1, 1, 1, 1])
    batch = replace(batch, old_logprobs=before, advantages=signs)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
    metrics = update_policy(policy, optimizer, batch, all_rows(batch.rollout), Config(positive_nll=False))
    after = rollout_logprobs(policy, batch.rollout, Config())
    assert ((after - before) * signs).sum() > 0
    assert metrics["actor/pg_loss"] == pytest.approx(-signs.mean().item(), abs=1e-6)
    assert metrics["actor/ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["actor/pg_clipfrac"] == 0
    assert metrics["actor/grad_norm"] > 0
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_gradient_is_clipped_to_the_norm(policy, batch):
    start = torch.cat([parameter.detach().flatten().clone() for parameter in policy.parameters()])
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    metrics = update_policy(policy, optimizer, batch, all_rows(batch.rollout), Config(max_grad_norm=1e-3))
    moved = torch.cat([parameter.detach().flatten() for parameter in policy.parameters()]) - start
    assert metrics["actor/grad_norm"] > 1e-3
    assert moved.norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_update_critic_approaches_the_returns(critic, batch):
    optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-3)
    rows = all_rows(batch.rollout)
    losses = [
        update_critic(critic, optimizer, batch, rows, Config(), value_clip=None)["critic/vf_loss"] for _ in range(10)
    ]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(("num_rows", "num_parts"), [(8, 2), (7, 3), (3, 3)])
def test_split_rows_is_a_shuffled_partition(num_rows, num_parts):
    parts = split_rows(num_rows, num_parts, torch.Generator().manual_seed(0))
    assert sorted(torch.cat(parts).tolist()) == list(range(num_rows))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert len(parts) == num_parts


def test_split_rows_shuffles():
    assert split_rows(100, 1, torch.Generator().manual_seed(0))[0].tolist() != list(range(100))


def test_mean_metrics():
    assert mean_metrics([{"a": 1.0, "b": 0.0}, {"a": 3.0, "b": 1.0}]) == {"a": 2.0, "b": 0.5}
    assert mean_metrics([]) == {}
