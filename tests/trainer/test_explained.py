"""Explained variance by hand: over all tokens, and within the groups of one prompt."""

import pytest
import torch

from vapo.learning.advantages import explained_variances
from vapo.rollout.collect import pack
from vapo.types import Batch


def batch_of(lengths, returns, values, *, group_size=2, mask=None):
    """A batch in which all tokens of a response share a return; ``values`` are per token."""
    prompts, responses = [torch.tensor([3])] * len(lengths), [torch.full((length,), 4) for length in lengths]
    flags = torch.zeros(len(lengths), dtype=torch.bool)
    rollout = pack(prompts, responses, torch.tensor(returns), flags, flags, group_size, torch.device("cpu"))
    per_token = torch.tensor(returns).repeat_interleave(torch.tensor(lengths))
    mask = torch.ones(len(per_token), dtype=torch.bool) if mask is None else torch.tensor(mask)
    zeros = torch.zeros(len(per_token))
    return Batch(rollout, mask, zeros, None, torch.tensor(values), zeros, zeros, per_token, None)


def test_a_critic_that_knows_only_the_group_mean_explains_nothing_within():
    # An easy prompt of returns 11 and 9, a hard one of 1 and −1. The critic says 10 and 0.
    batch = batch_of([1, 1, 1, 1], [11.0, 9.0, 1.0, -1.0], [10.0, 10.0, 0.0, 0.0])
    # Var(R̂ − V) is that of (1, −1, 1, −1); R̂ deviates from its mean 5 by (6, 4, −4, −6): 4 of 104.
    assert explained_variances(batch) == pytest.approx((1 - 4 / 104, 0.0))


def test_what_is_added_to_the_group_mean_is_explained_within():
    batch = batch_of([1, 1, 1, 1], [11.0, 9.0, 1.0, -1.0], [10.5, 9.5, 0.5, -0.5])
    # Errors (½, −½, ½, −½) about means of 0: a quarter of the spread.
    assert explained_variances(batch) == pytest.approx((1 - 1 / 104, 0.75))


def test_an_offset_of_each_group_counts_overall_and_not_within():
    # Perfect order within the groups, but each group's level is off by another amount.
    batch = batch_of([1, 1, 1, 1], [1.0, 0.0, 1.0, 0.0], [4.0, 3.0, -2.0, -3.0])
    total, within = explained_variances(batch)
    # e = (−3, −3, 3, 3): variance 9 of ¼.
    assert (total, within) == pytest.approx((1 - 36, 1.0))


def test_tokens_weigh_the_groups_mean():
    # One group: a return 1 on three tokens, 0 on one; mean ¾. The critic says ½ on the first token only.
    batch = batch_of([3, 1], [1.0, 0.0], [0.5, 0.0, 0.0, 0.0])
    # e = (½, 1, 1, 0) about ⅝; Σ = 1/64 + 9/64 + 9/64 + 25/64 = 44/64. Spread 3/16 + 9/16 = 3/4.
    expected = 1 - (44 / 64) / (3 / 4)
    assert explained_variances(batch) == pytest.approx((expected, expected))


def test_masked_tokens_do_not_count():
    masked = batch_of([1, 1, 2], [1.0, 0.0, 9.0], [1.0, 0.5, 77.0, -5.0], group_size=3, mask=[True, True, False, False])
    alone = batch_of([1, 1], [1.0, 0.0], [1.0, 0.5])
    assert explained_variances(masked) == pytest.approx(explained_variances(alone))
    assert explained_variances(alone) == pytest.approx((0.75, 0.75))


@pytest.mark.parametrize("value", [0.0, 0.3])
def test_returns_that_do_not_vary_within_groups_give_0(value):
    # Between the prompts they do vary.
    between = batch_of([2, 1, 1, 3], [0.1, 0.1, 0.7, 0.7], [value] * 7)
    assert explained_variances(between)[1] == 0.0
    assert explained_variances(batch_of([2, 1], [0.1, 0.1], [value] * 3)) == (0.0, 0.0)


def test_no_token_gives_0():
    assert explained_variances(batch_of([1, 1], [1.0, 0.0], [1.0, 0.0], mask=[False, False])) == (0.0, 0.0)
