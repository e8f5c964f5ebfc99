"""Faults of rounding: confident tokens, sums in a narrow dtype, results that depend on the batch or the run."""

import math

import pytest
import torch
from draws import policy_inputs, run
from losses import LOSSES, losses
from oracle import assert_gradient

from vapo_kernels import _dispatch, linear_policy_loss, policy_loss, token_logprobs


@pytest.mark.parametrize("exponent", [-1, -3, -7, -10, -20, -30])
def test_confident_token_keeps_its_accuracy(device, exponent):
    """log p = log1p(−q) to 1e-4 of its own size, and so the gradient, where p rounds to 1."""
    V = 130
    gap = torch.tensor(-math.log(10.0**exponent / (V - 1)))
    logits = torch.zeros(2, V)
    logits[0, 70], logits[1, 0] = gap, gap
    others = (V - 1) * math.exp(-gap.item())
    for shift in (0.0, 64.0):
        leaf = (logits + shift).to(device).requires_grad_()
        exact = -math.log1p((V - 1) * math.exp(-(leaf[1, 0] - leaf[1, 1]).item()))
        out = token_logprobs(leaf, torch.tensor([70, 0], device=device))
        (grad,) = torch.autograd.grad(out.logprobs.sum(), leaf)
        assert out.logprobs.tolist() == pytest.approx([exact, exact], rel=1e-4)
        assert (out.logprobs < 0).all()
        assert grad[0, 70].item() == pytest.approx(-math.expm1(exact), rel=1e-4)
        assert grad[0, 0].item() == pytest.approx(math.expm1(exact) / (V - 1), rel=1e-4)
        assert grad.sum(-1).abs().max() <= 1e-5 * others
    # The positive NLL on it as well.
    leaf = logits.to(device).requires_grad_()
    ids, ones = torch.tensor([70, 0], device=device), torch.ones(2, device=device)
    out = policy_loss(leaf, ids, 0 * ones, 0 * ones, ones, is_correct=ones, nll_weight=1.0)
    exact = math.log1p(others)
    assert out.loss.item() == pytest.approx(exact, rel=1e-4)
    (grad,) = torch.autograd.grad(out.loss, leaf)
    assert grad[0, 70].item() == pytest.approx(math.expm1(-exact) / 2, rel=1e-4)


def test_log_prob_is_never_above_0(device):
    draw = torch.Generator().manual_seed(1)
    for scale in (1.0, 30.0, 1e3, 1e5):
        logits = scale * torch.randn(8, 70, generator=draw)
        out = token_logprobs(logits.to(device), logits.argmax(-1).to(device))
        assert (out.logprobs <= 0).all() and (out.entropy >= 0).all()
        assert (out.entropy <= math.log(70) * (1 + 1e-6)).all()


def test_weight_gradient_is_summed_in_float32(device):
    """bfloat16 stops counting at 256: a sum over many rows of equal gradients would stand still."""
    n, V = 600, 3
    hidden = torch.ones(n, 1, dtype=torch.bfloat16, device=device)
    weight = torch.zeros(V, 1, dtype=torch.bfloat16, device=device).requires_grad_()
    ids, ones = torch.zeros(n, dtype=torch.int64, device=device), torch.ones(n, device=device)
    if device.type == "cpu" and _dispatch.INTERPRET:
        pytest.skip("600 interpreted programs; the sum is PyTorch's on either path")
    loss = linear_policy_loss(hidden, weight, ids, ones * math.log(1 / 3), ones, ones, num_tokens=1).loss
    (grad,) = torch.autograd.grad(loss, weight)
    exact = torch.tensor([[-400.0], [200.0], [200.0]], dtype=torch.float64)
    assert_gradient(grad, exact.float(), exact)


@pytest.mark.parametrize("name", LOSSES)
def test_same_inputs_same_bits(device, name):
    op, inputs, wrt = losses(device, n=7)[name]
    first, second = (run(op, inputs, wrt) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))
    assert torch.equal(first[1][wrt], second[1][wrt])


def rows_alone_and_together(V: int, n: int, device) -> None:
    inputs = policy_inputs((n,), V, device=device)
    inputs |= {"mask": torch.ones_like(inputs["mask"]), "num_tokens": n, "num_correct_tokens": n, "entropy_weight": 0.1}
    together, grads = run(policy_loss, inputs, "logits")
    logprobs = token_logprobs(inputs["logits"], inputs["token_ids"])
    for at in (slice(0, 1), slice(n - 1, n), slice(1, n - 1), slice(n // 2, n)):
        part = {n_: x[at] if isinstance(x, torch.Tensor) else x for n_, x in inputs.items()}
        out, part_grads = run(policy_loss, part, "logits")
        assert torch.equal(out.logprobs, together.logprobs[at])
        assert torch.equal(part_grads["logits"], grads["logits"][at])
        alone = token_logprobs(part["logits"], part["token_ids"])
        assert torch.equal(alone.logprobs, logprobs.logprobs[at])
        assert torch.equal(alone.entropy, logprobs.entropy[at])


@pytest.mark.parametrize("V", [1, 7, 130])
def test_a_row_does_not_depend_on_its_batch(device, V):
    rows_alone_and_together(V, 7, device)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_does_not_depend_on_its_batch_over_a_large_vocabulary(threads):
    """PyTorch splits a long reduction between threads, and sums a lone row in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows_alone_and_together(33_001, 6, "cpu")
    finally:
        torch.set_num_threads(before)


def test_masking_neighbours_changes_no_bit(device):
    inputs = policy_inputs((7,), 130, device=device)
    everything = token_logprobs(inputs["logits"], inputs["token_ids"])
    for kept in ([1, 0, 1, 1, 0, 1, 1], [0, 0, 0, 1, 0, 0, 0]):
        kept = torch.tensor(kept, device=device)
        some = token_logprobs(inputs["logits"], inputs["token_ids"], mask=kept)
        for a, b in zip(everything, some, strict=True):
            assert torch.equal(a * kept, b)
