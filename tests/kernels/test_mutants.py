"""What only a broken line of a kernel would show: each test kills a mutant of `make mutate` that others let live."""

import math

import pytest
import torch

from vapo_kernels import logprob_policy_loss, token_logprobs


@pytest.mark.parametrize("shape", [(2, 3), (3, 2)])
def test_rows_of_a_slice_are_read_where_they_lie(device, shape):
    logits = torch.randn(shape[0], shape[1] + 2, 70, device=device)[:, 1:-1]
    ids = torch.randint(70, shape, device=device)
    assert torch.equal(token_logprobs(logits, ids).logprobs, token_logprobs(logits.contiguous(), ids).logprobs)


def test_log_of_a_half_to_the_last_bit(device):
    out = token_logprobs(torch.zeros(1, 2, device=device), torch.tensor([1], device=device))
    assert out.logprobs.item() == pytest.approx(-math.log(2), rel=8e-8)


def test_impossible_token_adds_no_entropy(device):
    logits = torch.tensor([[0.0, -200.0, -300.0]], device=device)
    assert token_logprobs(logits, torch.tensor([1], device=device)).entropy.item() == 0.0
    logits = torch.tensor([[0.0, -torch.inf]], device=device)
    assert token_logprobs(logits, torch.tensor([1], device=device)).entropy.item() == 0.0


def test_slopes_are_whole_at_the_bound_of_the_log_ratio(device):
    leaf = torch.full((2,), -1.0, device=device).requires_grad_()
    zeros, ones = torch.zeros(2, device=device), torch.ones(2, device=device)
    # Ratio e²⁰ and a negative advantage: no clip binds, so only the bound itself could cut the slope.
    old = torch.tensor([-21.0, -21.5], device=device)
    (grad,) = torch.autograd.grad(logprob_policy_loss(leaf, old, -ones, ones).loss, leaf)
    assert grad.tolist() == pytest.approx([math.exp(20) / 2, 0.0], rel=1e-5)
    ref = torch.tensor([19.0, 19.5], device=device)
    out = logprob_policy_loss(leaf, leaf.detach(), zeros, ones, ref_logprobs=ref, kl_weight=1.0)
    (grad,) = torch.autograd.grad(out.loss, leaf)
    assert grad.tolist() == pytest.approx([-math.expm1(20) / 2, 0.0], rel=1e-5)
