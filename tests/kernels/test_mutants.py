"""What only a broken line of a kernel would show: each test kills a mutant of `make mutate` that others let live."""

import math

import pytest
import torch

from vapo_kernels import _dispatch, logprob_policy_loss, reference, token_logprobs
from vapo_kernels.ops.token_logprobs import compute_statistics, token_logprobs_op


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


def test_equal_odds_whose_logit_is_not_the_largest_of_the_others(device):
    """p = ½ exactly: the log-sum-exp changes the column that it is kept relative to."""
    leaf = torch.tensor([[math.log(2), 0.0, 0.0]], device=device).requires_grad_()
    out = token_logprobs(leaf, torch.tensor([0], device=device))
    assert out.logprobs.item() == pytest.approx(-math.log(2), rel=1e-6)
    assert out.entropy.item() == pytest.approx(1.5 * math.log(2), rel=1e-6)
    (grad,) = torch.autograd.grad(out.logprobs, leaf)
    assert grad[0].tolist() == pytest.approx([0.5, -0.25, -0.25], rel=1e-6)


def test_entropy_gradient_of_a_token_whose_probability_rounds_to_1(device):
    gap = torch.tensor([[20.0, 0.0, 0.0]])
    leaf, ids = gap.to(device).requires_grad_(), torch.tensor([0])
    (grad,) = torch.autograd.grad(token_logprobs(leaf, ids.to(device)).entropy, leaf)
    exact_leaf = gap.double().requires_grad_()
    (exact,) = torch.autograd.grad(reference.token_logprobs(exact_leaf, ids).entropy, exact_leaf)
    assert grad[0].tolist() == pytest.approx(exact[0].tolist(), rel=1e-5)


def test_row_without_a_possible_token_is_nan(device):
    out = token_logprobs(torch.full((1, 70), -torch.inf, device=device), torch.tensor([3], device=device))
    assert out.logprobs.isnan().all() and out.entropy.isnan().all()


@pytest.mark.parametrize("outside", [-1, 70])
def test_token_id_outside_its_row_reads_no_other(device, outside):
    """Where the host cannot refuse it, it is NaN."""
    logits, ids = torch.randn(3, 70, device=device), torch.tensor([1, outside, 2], device=device)
    if _dispatch.use_triton(logits):
        logprobs, entropy, _ = compute_statistics(logits, ids, None, None, 1.0)
        assert logprobs.isnan().tolist() == entropy.isnan().tolist() == [False, True, False]
    else:
        with pytest.raises(ValueError, match="token_ids"):
            token_logprobs(logits, ids)


def test_statistics_of_a_masked_row_are_0(device):
    logits, mask = torch.randn(3, 70, device=device), torch.tensor([True, False, True], device=device)
    for x in token_logprobs_op(logits, torch.tensor([1, 2, 3], device=device), mask, None, 1.0):
        assert not x[..., 1].any() and x[..., 0].all()


@pytest.mark.parametrize("sign", [1, -1])
def test_kl_near_the_end_of_its_series(device, sign):
    """The last terms weigh 4e-7 and 1e-5 there; a mean over many tokens has less rounding than that."""
    x = sign * torch.linspace(0.235, 0.2499, 512)
    zeros, ones = torch.zeros(512, device=device), torch.ones(512, device=device)
    out = logprob_policy_loss(zeros, -x.to(device), zeros, ones, ref_logprobs=x.to(device))
    exact = (torch.expm1(x.double()) - x.double()).mean().item()
    assert out.kl.item() == pytest.approx(exact, rel=1.5e-7)
    assert out.approx_kl.item() == pytest.approx(exact, rel=1.5e-7)


def test_slope_is_whole_at_the_dual_clip_itself(device):
    leaf = torch.full((1,), -1.0, device=device).requires_grad_()
    old, one = torch.full((1,), -2.0, device=device), torch.ones(1, device=device)
    ratio = logprob_policy_loss(leaf, old, -one, one).policy.item()
    out = logprob_policy_loss(leaf, old, -one, one, dual_clip=ratio)
    (grad,) = torch.autograd.grad(out.loss, leaf)
    assert (out.policy.item(), out.clip_fraction.item()) == (ratio, 0.0)
    assert grad.item() == pytest.approx(math.e, rel=1e-6)
