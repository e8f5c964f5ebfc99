"""Faults of the normaliser: whose count a mean divides by, and what becomes of a count of 0."""

import pytest
import torch
from draws import run
from losses import LOSSES, losses
from oracle import assert_within_budget

from vapo_kernels import explained_variance, masked_whiten, token_logprobs

NAN = float("nan")


@pytest.mark.parametrize("name", LOSSES)
def test_normaliser_is_that_of_the_whole_step(device, name):
    """A micro-batch divides by the step's count, not by its own, and never by both."""
    op, inputs, wrt = losses(device)[name]
    own = int(inputs["mask"].sum())
    out, _ = run(op, inputs, wrt)
    inputs.pop("is_correct", None)
    plain, plain_grads = run(op, inputs, wrt)
    # Ten times the count: a tenth of the loss and of the gradient, to the bit of a division.
    for count in (10 * own, torch.tensor(10 * own, device=device), torch.tensor(10.0 * own, device=device)):
        tenth, tenth_grads = run(op, {**inputs, "num_tokens": count}, wrt)
        assert_within_budget(10 * tenth.loss, plain.loss, plain.loss)
        assert_within_budget(10 * tenth_grads[wrt], plain_grads[wrt], plain_grads[wrt])
    if name != "value_loss":
        # The positive NLL has a denominator of its own.
        inputs = losses(device)[name][1]
        half, _ = run(op, {**inputs, "num_correct_tokens": 2 * int(out.num_correct_tokens)}, wrt)
        assert_within_budget(2 * half.positive_nll, out.positive_nll, out.positive_nll)
        assert torch.equal(half.policy, out.policy)


@pytest.mark.parametrize("name", LOSSES)
def test_all_masked_batch(device, name):
    op, inputs, wrt = losses(device)[name]
    inputs["mask"] = torch.zeros_like(inputs["mask"])
    poisoned = {**inputs, wrt: torch.full_like(inputs[wrt], NAN)}
    for count in (None, 0, torch.tensor(0, device=device), 7):
        out, grads = run(op, {**poisoned, "num_tokens": count}, wrt)
        assert all(not x.any() for x in out)
        assert not grads[wrt].any()


def test_all_masked_batch_without_a_gradient(device):
    x, mask = torch.full((5,), NAN, device=device), torch.zeros(5, device=device)
    assert not masked_whiten(x, mask).any()
    assert explained_variance(x, x, mask) == 0
    logits = torch.full((5, 3), NAN, device=device)
    for result in token_logprobs(logits, torch.full((5,), -100, device=device), mask=mask):
        assert not result.any()


@pytest.mark.parametrize("name", LOSSES)
def test_normaliser_counts_the_tokens_that_the_sum_holds(device, name):
    """Masked tokens are in neither, whatever they hold; so a loss of equal tokens is that of one."""
    op, inputs, wrt = losses(device, n=6)[name]
    head = {"weight": inputs["weight"], "bias": inputs["bias"]} if name == "linear_policy_loss" else {}
    equal = {n: x[:1].expand_as(x).clone() if isinstance(x, torch.Tensor) else x for n, x in inputs.items()} | head
    one = {n: x[:1] if isinstance(x, torch.Tensor) else x for n, x in equal.items()} | head
    equal["mask"] = torch.tensor([1, 0, 1, 1, 0, 0], device=device)
    equal[wrt][~equal["mask"].bool()] = NAN
    exact, _ = run(op, one, wrt)
    assert_within_budget(run(op, equal, wrt)[0].loss, exact.loss, exact.loss, scale=1.0)
