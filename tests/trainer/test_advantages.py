"""Rollout → Batch on hand-made tokens, and how well the values of a batch explain its returns."""

from dataclasses import replace

import pytest
import torch
from oracle import assert_within_budget

from vapo.config import Config
from vapo.learning import advantages
from vapo.learning.advantages import (
    build_batch,
    explained_variances,
    group_advantages,
    importance_weights,
    overlong_penalty,
    policy_lambda,
    shaped_rewards,
    training_mask,
    whiten,
)
from vapo.rollout.collect import pack
from vapo.types import Batch
from vapo_kernels import masked_whiten, reference

PLAIN = Config(whiten_advantages=False, length_adaptive_gae=False, lam_policy=0.5, lam_critic=1.0)
VALUES = torch.tensor([0.25, 0.5, 0.75])


def packed(lengths, scores, *, is_correct=None, is_truncated=None, group_size=1):
    """Responses of given lengths and scores; a score above 0 is correct unless it is said otherwise."""
    prompts, responses = [torch.tensor([3])] * len(lengths), [torch.full((length,), 4) for length in lengths]
    scores = torch.tensor(scores)
    is_correct = scores > 0 if is_correct is None else torch.tensor(is_correct)
    is_truncated = torch.tensor(is_truncated or [False] * len(lengths))
    return pack(prompts, responses, scores, is_correct, is_truncated, group_size, torch.device("cpu"))


def two_responses():
    """A correct response of two tokens and a cut one of one token."""
    return packed([2, 1], [1.0, 0.0], is_truncated=[False, True])


def batch_of(config, rollout=None, values=VALUES, **others):
    """The batch of a rollout, two_responses() unless it is given."""
    rollout = two_responses() if rollout is None else rollout
    others.setdefault("old_logprobs", torch.zeros(len(rollout.token_ids)))
    return build_batch(rollout, config, values=values, **others)


def test_advantages_and_returns_by_hand():
    batch = batch_of(PLAIN)
    # δ = (0.5 − 0.25, 1 − 0.5) and, the cut response being terminal, 0 − 0.75.
    torch.testing.assert_close(batch.advantages, torch.tensor([0.25 + 0.5 * 0.5, 0.5, -0.75]))
    torch.testing.assert_close(batch.returns, torch.tensor([1.0, 1.0, 0.0]))
    assert batch.lam_policy.tolist() == [0.5, 0.5]
    assert torch.equal(batch.old_values, VALUES)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"importance_cap": 2.0}, [0.5, 2.0, 1.0]),
        ({"importance_cap": 0.75}, [0.5, 0.75, 0.75]),
        ({"engine": "vllm"}, [0.5, 2.0, 1.0]),
        ({"engine": "vllm", "importance_cap": None}, None),
        ({"engine": "loop"}, None),
    ],
    ids=str,
)
def test_importance_weights_by_hand(settings, expected):
    # Ratios 0.5, 8 and 1 (Eq. 18).
    old_logprobs, engine_logprobs = torch.tensor([0.25, 0.8, 0.5]).log(), torch.tensor([0.5, 0.1, 0.5]).log()
    rollout = replace(two_responses(), engine_logprobs=engine_logprobs)
    weights = importance_weights(rollout, Config(**settings), old_logprobs)
    if expected is None:
        assert weights is None
    else:
        torch.testing.assert_close(weights, torch.tensor(expected))
    assert importance_weights(two_responses(), Config(**settings), old_logprobs) is None


def test_gamma_discounts_the_reward_by_hand():
    batch = batch_of(replace(PLAIN, gamma=0.5))
    # δ = (0.5 · 0.5 − 0.25, 1 − 0.5), decayed by γλ = 0.25 and by γ.
    torch.testing.assert_close(batch.advantages, torch.tensor([0.25 * 0.5, 0.5, -0.75]))
    torch.testing.assert_close(batch.returns, torch.tensor([0.5, 1.0, 0.0]))


def test_worked_example():
    config = replace(PLAIN, lam_policy=0.95, decoupled_gae=False)
    batch = batch_of(config, packed([5], [1.0]), torch.zeros(5))
    expected = torch.tensor([0.81450625, 0.857375, 0.9025, 0.95, 1.0])
    torch.testing.assert_close(batch.advantages, expected)
    torch.testing.assert_close(batch.returns, expected)


def test_whitening_shifts_and_scales_the_whole_batch():
    plain = batch_of(PLAIN)
    white = batch_of(replace(PLAIN, whiten_advantages=True))
    centred = plain.advantages - plain.advantages.mean()
    torch.testing.assert_close(white.advantages, centred / plain.advantages.std(), atol=1e-5, rtol=0)
    assert torch.equal(white.returns, plain.returns)


def test_whitening_is_over_the_tokens_that_train():
    x, mask = torch.tensor([1.0, 5.0, 3.0, -99.0]), torch.tensor([True, True, True, False])
    white = whiten(x, mask)
    torch.testing.assert_close(white, torch.tensor([-1.0, 1.0, 0.0, 0.0]), atol=1e-5, rtol=0)
    assert torch.equal(white, masked_whiten(x, mask))


@pytest.mark.parametrize("cut", [0, 1, 7, 20])
def test_whitening_on_two_ranks_is_that_of_the_whole(cut, monkeypatch):
    x = 3 + 2 * torch.randn(20, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(20) % 3 != 1
    moments = []
    monkeypatch.setattr(advantages, "sum_over_ranks", lambda tensor: moments.append(tensor) or tensor)
    parts = [(x[:cut], mask[:cut]), (x[cut:], mask[cut:])]
    for part in parts:
        whiten(*part)
    monkeypatch.setattr(advantages, "sum_over_ranks", lambda tensor: sum(moments))
    exact = reference.masked_whiten(x.double(), mask)
    assert_within_budget(torch.cat([whiten(*part) for part in parts]), reference.masked_whiten(x, mask), exact)


@pytest.mark.parametrize(("alpha", "expected"), [(1.0, [0.0, 0.5, 0.9]), (0.05, [0.0, 0.0, 0.0])])
def test_lambda_follows_each_length(alpha, expected):
    lam = policy_lambda(torch.tensor([1, 2, 10]), Config(alpha=alpha))
    torch.testing.assert_close(lam, torch.tensor(expected))


def test_kl_penalty_by_hand():
    # β (log π_old − log π_ref) is taken from the reward of every token (Eq. 1, 2), the last one's among them.
    old, ref = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -1.0, -3.0])
    config = replace(PLAIN, kl_reward_weight=0.1)
    batch = batch_of(config, old_logprobs=old, ref_logprobs=ref)
    torch.testing.assert_close(batch.rewards, torch.tensor([-0.05, 1.0 + 0.1, 0.0]))
    torch.testing.assert_close(batch.returns, torch.tensor([1.05, 1.1, 0.0]))
    # The verifier's scores are what they were.
    assert batch.rollout.scores.tolist() == [1.0, 0.0]


def test_without_shaping_the_rewards_are_the_verifiers():
    rollout = two_responses()
    assert torch.equal(shaped_rewards(rollout, PLAIN), torch.tensor([0.0, 1.0, 0.0]))


def test_overlong_penalty_by_hand():
    # Limit 10, buffer 4: free up to 6 tokens, then a quarter more for each.
    penalties = overlong_penalty(torch.tensor([1, 6, 7, 8, 10]), max_new_tokens=10, buffer=4)
    assert penalties.tolist() == [0.0, 0.0, -0.25, -0.5, -1.0]


def test_overlong_penalty_is_on_the_last_token_whether_cut_or_not():
    rollout = packed([3, 4], [1.0, 0.0], is_truncated=[False, True])
    config = replace(PLAIN, truncated="penalty", max_new_tokens=4, overlong_buffer=2)
    before = rollout.rewards.clone()
    rewards = shaped_rewards(rollout, config)
    assert rewards.tolist() == [0.0, 0.0, 1.0 - 0.5, 0.0, 0.0, 0.0, -1.0]
    assert torch.equal(rollout.rewards, before)
    batch = batch_of(config, rollout, torch.zeros(7))
    torch.testing.assert_close(batch.returns, torch.tensor([0.5] * 3 + [-1.0] * 4))


def test_group_advantages_by_hand():
    # Means 0.5 and 2, standard deviations (n − 1) √½ and 2.
    advantages = group_advantages(torch.tensor([1.0, 0.0, 4.0, 0.0, 2.0, 2.0]), 2)
    root_half = 0.5 / 0.5**0.5
    expected = torch.tensor([root_half, -root_half, 2 / 8**0.5, -2 / 8**0.5, 0.0, 0.0])
    torch.testing.assert_close(advantages, expected, atol=1e-5, rtol=0)
    three = group_advantages(torch.tensor([3.0, 1.0, -1.0]), 3)
    torch.testing.assert_close(three, torch.tensor([1.0, 0.0, -1.0]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("score", [0.1, -0.7, 1 / 3])
def test_equal_scores_that_no_float_has_exactly_give_no_advantage(score):
    # Their mean is off by a rounding, a standard deviation of it as well.
    scores = torch.full((16,), score)
    assert scores.mean() != scores[0]
    assert group_advantages(scores, 16).tolist() == [0.0] * 16
    mixed = group_advantages(torch.cat([scores, torch.tensor([1.0] + [0.0] * 15)]), 16)
    assert not mixed[:16].any() and mixed[16:].all()


def test_group_estimator_gives_every_token_its_responses_advantage():
    rollout = packed([2, 1, 1, 3], [1.0, 0.0, 0.0, 0.0], group_size=2)
    config = replace(PLAIN, advantage_estimator="group")
    batch = batch_of(config, rollout, None)
    expected = torch.tensor([0.70711, 0.70711, -0.70711, 0.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(batch.advantages, expected, atol=1e-5, rtol=0)
    assert batch.returns.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert batch.lam_policy is None


def test_group_estimator_compares_shaped_rewards():
    rollout = packed([1, 2], [1.0, 1.0], group_size=2)
    config = replace(PLAIN, advantage_estimator="group", truncated="penalty", max_new_tokens=2, overlong_buffer=1)
    batch = batch_of(config, rollout, None)
    torch.testing.assert_close(batch.advantages, torch.tensor([0.70711, -0.70711, -0.70711]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("truncated", ["zero", "bootstrap", "penalty", "mask"])
def test_only_mask_keeps_cut_responses_from_training(truncated):
    mask = training_mask(two_responses(), replace(PLAIN, truncated=truncated))
    assert mask.tolist() == [True, True, truncated != "mask"]


def test_masked_tokens_have_no_say_in_the_advantages_of_others():
    config = replace(PLAIN, truncated="mask", whiten_advantages=True)
    batch, far = (batch_of(config, values=torch.tensor([0.25, 0.5, value])) for value in (0.75, 99.0))
    torch.testing.assert_close(batch.advantages[:2], far.advantages[:2])
    # Mean 0 over the two that train: (0.5, 0.5) has no variance, so both are 0 exactly.
    torch.testing.assert_close(batch.advantages, torch.zeros(3), atol=1e-6, rtol=0)


def test_bootstrap_values_reach_cut_responses_only():
    rollout = packed([2, 2], [1.0, 0.0], is_truncated=[False, True])
    values = torch.tensor([0.5, 0.5, 0.5, 0.5])
    final = torch.tensor([0.0, 0.8])
    plain = batch_of(PLAIN, rollout, values)
    batch = batch_of(replace(PLAIN, truncated="bootstrap"), rollout, values, bootstrap_values=final)
    assert torch.equal(batch.advantages[:2], plain.advantages[:2])
    assert torch.equal(batch.returns[:2], plain.returns[:2])
    # δ of the last token is 0 + 0.8 − 0.5, that of the one before 0.
    torch.testing.assert_close(batch.advantages[2:], torch.tensor([0.15, 0.3]))
    torch.testing.assert_close(batch.returns[2:], torch.tensor([0.8, 0.8]))


@pytest.mark.parametrize("changes", [{}, {"decoupled_gae": False}, {"gamma": 0.9, "whiten_advantages": True}])
def test_without_use_values_gae_sees_zeros_and_all_else_is_the_same(changes):
    config = replace(PLAIN, **changes)
    off = batch_of(replace(config, use_values=False))
    zeros = batch_of(config, values=torch.zeros(3))
    for name in ("mask", "old_logprobs", "rewards", "advantages", "returns", "lam_policy"):
        assert torch.equal(getattr(off, name), getattr(zeros, name)), name
    # The critic still trains, and its metrics tell of what it says.
    assert torch.equal(off.old_values, VALUES)
    assert not torch.equal(off.advantages, batch_of(config).advantages)


def returns_batch(lengths, returns, values, *, group_size=2, mask=None):
    """A batch in which all tokens of a response share a return; ``values`` are per token."""
    rollout = packed(lengths, returns, group_size=group_size)
    per_token = torch.tensor(returns).repeat_interleave(torch.tensor(lengths))
    mask = torch.ones(len(per_token), dtype=torch.bool) if mask is None else torch.tensor(mask)
    zeros = torch.zeros(len(per_token))
    return Batch(rollout, mask, zeros, None, torch.tensor(values), zeros, zeros, per_token, None)


@pytest.mark.parametrize(
    ("lengths", "returns", "values", "expected"),
    [
        # An easy prompt of returns 11 and 9, a hard one of 1 and −1; the critic knows each group's mean, 10 and 0.
        # Var(R̂ − V) is that of (1, −1, 1, −1); R̂ deviates from its mean 5 by (6, 4, −4, −6): 4 of 104.
        ([1, 1, 1, 1], [11.0, 9.0, 1.0, -1.0], [10.0, 10.0, 0.0, 0.0], (1 - 4 / 104, 0.0)),
        # Errors (½, −½, ½, −½) about means of 0: a quarter of the spread within.
        ([1, 1, 1, 1], [11.0, 9.0, 1.0, -1.0], [10.5, 9.5, 0.5, -0.5], (1 - 1 / 104, 0.75)),
        # Perfect order within the groups, but each group is off by another amount: e = (−3, −3, 3, 3), 9 of ¼.
        ([1, 1, 1, 1], [1.0, 0.0, 1.0, 0.0], [4.0, 3.0, -2.0, -3.0], (1 - 36, 1.0)),
        # Tokens weigh the group's mean: a return 1 on three tokens, 0 on one; mean ¾.
        # e = (½, 1, 1, 0) about ⅝: Σ = 44/64. Spread 3/16 + 9/16 = 3/4.
        ([3, 1], [1.0, 0.0], [0.5, 0.0, 0.0, 0.0], (1 - 44 / 48, 1 - 44 / 48)),
    ],
)
def test_explained_variances_by_hand(lengths, returns, values, expected):
    assert explained_variances(returns_batch(lengths, returns, values)) == pytest.approx(expected)


def test_masked_tokens_do_not_count():
    masked = returns_batch(
        [1, 1, 2], [1.0, 0.0, 9.0], [1.0, 0.5, 77.0, -5.0], group_size=3, mask=[True, True, False, False]
    )
    alone = returns_batch([1, 1], [1.0, 0.0], [1.0, 0.5])
    assert explained_variances(masked) == pytest.approx(explained_variances(alone))
    assert explained_variances(alone) == pytest.approx((0.75, 0.75))


@pytest.mark.parametrize("value", [0.0, 0.3])
def test_returns_that_do_not_vary_within_groups_give_0(value):
    # Between the prompts they do vary.
    between = returns_batch([2, 1, 1, 3], [0.1, 0.1, 0.7, 0.7], [value] * 7)
    assert explained_variances(between)[1] == 0.0
    assert explained_variances(returns_batch([2, 1], [0.1, 0.1], [value] * 3)) == (0.0, 0.0)


def test_no_token_gives_0():
    assert explained_variances(returns_batch([1, 1], [1.0, 0.0], [1.0, 0.0], mask=[False, False])) == (0.0, 0.0)
