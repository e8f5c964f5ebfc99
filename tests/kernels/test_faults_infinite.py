"""Faults of numbers out of range: −inf and huge logits, exp that overflows, float16."""

import math

import pytest
import torch
from draws import cast, policy_inputs, run
from oracle import assert_gradient, assert_within_budget

from vapo_kernels import logprob_policy_loss, policy_loss, reference, token_logprobs

INF = float("inf")


def forbidden(kind: str, V: int) -> torch.Tensor:
    """Columns of −inf: a single one, the first block, the last block, or all but one."""
    columns = torch.zeros(V, dtype=torch.bool)
    if kind == "single":
        columns[5] = True
    elif kind == "first block":
        columns[:64] = True
    elif kind == "last block":
        columns[-70:] = True
    elif kind == "all but one":
        columns[:] = True
        columns[70] = False
    return columns


@pytest.mark.parametrize("kind", ["single", "first block", "last block", "all but one"])
def test_infinite_logits(device, kind):
    V = 200
    columns = forbidden(kind, V)
    inputs = {**policy_inputs((3,), V, device=device), "entropy_weight": 0.3, "kl_weight": 0.1}
    inputs["mask"] = torch.ones_like(inputs["mask"])
    inputs["logits"] = inputs["logits"].masked_fill(columns.to(device), -INF)
    inputs["token_ids"] = torch.full((3,), 70, device=device)
    out, grads = run(policy_loss, inputs, "logits")
    # The distribution is that of the other columns alone.
    rest = {**inputs, "logits": inputs["logits"][:, ~columns.to(device)]}
    rest["token_ids"] = torch.full((3,), int((~columns)[:70].sum()), device=device)
    exact, exact_grads = run(reference.policy_loss, cast(rest, torch.float64), "logits")
    assert all(x.isfinite().all() for x in out)
    assert grads["logits"].isfinite().all()
    for name in ("loss", "entropy", "logprobs"):
        value = getattr(exact, name)
        assert_within_budget(getattr(out, name), value.float(), value, scale=1.0, name=name)
    assert not grads["logits"][:, columns.to(device)].any()
    exact_grad = exact_grads["logits"]
    assert_within_budget(grads["logits"][:, ~columns.to(device)], exact_grad.float(), exact_grad, scale=1e-2)


def test_forbidden_token_has_probability_zero(device):
    """A sampled token of probability 0 keeps the clipped loss, the entropy and every gradient finite."""
    logits = torch.tensor([[0.0, -INF, 1.0]], device=device).requires_grad_()
    ids, one = torch.tensor([1], device=device), torch.ones(1, device=device)
    assert token_logprobs(logits, ids).logprobs.item() == -INF
    for advantage in (1.0, -1.0):
        out = policy_loss(logits, ids, -one, advantage * one, one, ref_logprobs=-one, kl_weight=0.1, entropy_weight=0.1)
        (grad,) = torch.autograd.grad(out.loss, logits)
        assert out.loss.isfinite() and out.entropy.isfinite() and grad.isfinite().all()


def test_strongly_negative_and_large_logits(device):
    """A running maximum that starts at 0 loses a row whose logits all lie far below; so does a naive exp far above."""
    inputs = policy_inputs((3,), 130, device=device)
    whole = inputs["logits"].round()
    expected = token_logprobs(whole, inputs["token_ids"])
    for shift in (-30_000.0, 30_000.0):
        actual = token_logprobs(whole + shift, inputs["token_ids"])
        for a, b in zip(actual, expected, strict=True):
            assert torch.equal(a, b)
    # A row whose maximum grows by thousands from block to block.
    steep = torch.arange(130, device=device).float() * 50
    out = token_logprobs(steep.expand(2, 130), torch.tensor([129, 0], device=device))
    assert out.logprobs.tolist() == pytest.approx([-math.exp(-50), -50.0 * 129], rel=1e-6)
    exact = 51 * math.exp(-50)
    assert out.entropy.tolist() == pytest.approx([exact, exact], rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gap", [30.0, 200.0, 1e5, 3e38])
def test_overflow_of_ratio_and_kl(device, gap, dtype):
    inputs = {**policy_inputs((4,), 70, dtype=dtype, device=device), "kl_weight": 0.5, "dual_clip": 3.0}
    ones = torch.ones(4, device=device)
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0], device=device)
    inputs |= {"mask": ones, "advantages": signs, "old_logprobs": gap * signs.flip(0), "ref_logprobs": -gap * signs}
    for dual_clip in (None, 3.0):
        inputs["dual_clip"] = dual_clip
        for op, wrt, arguments in (
            (policy_loss, "logits", inputs),
            (logprob_policy_loss, "logprobs", {**inputs, "logprobs": -ones}),
        ):
            unused = ("logits", "token_ids") if wrt == "logprobs" else ()
            out, grads = run(op, {n: x for n, x in arguments.items() if n not in unused}, wrt)
            assert all(x.isfinite().all() for x in out)
            assert grads[wrt].isfinite().all()


def test_bound_of_the_log_ratio(device):
    """Beyond ±20 the ratio stands still and has no gradient; the same for the KL term."""
    logprobs = torch.tensor([-1.0, -1.0, -1.0], device=device).requires_grad_()
    mask, down = torch.ones(3, device=device), -torch.ones(3, device=device)
    old = torch.tensor([-20.0, -22.0, -500.0], device=device)
    out = logprob_policy_loss(logprobs, old, down, mask)
    (grad,) = torch.autograd.grad(out.loss, logprobs)
    exact = torch.tensor([math.exp(19) / 3, 0, 0], dtype=torch.float64)
    assert_within_budget(grad, exact.float(), exact)
    exact = torch.tensor((math.exp(19) + 2 * math.exp(20)) / 3, dtype=torch.float64)
    assert_within_budget(out.policy, exact.float(), exact)
    ref = torch.tensor([-1.0, 21.0, -500.0], device=device)
    out = logprob_policy_loss(logprobs, logprobs.detach(), 0 * mask, mask, ref_logprobs=ref, kl_weight=1.0)
    (grad,) = torch.autograd.grad(out.loss, logprobs)
    assert not grad.any()
    exact = torch.tensor((math.expm1(20) - 20 + math.expm1(-20) + 20) / 3, dtype=torch.float64)
    assert_within_budget(out.kl, exact.float(), exact)


def test_float16_gradient_does_not_underflow(device):
    """The mean over a million tokens makes gradients that float16 cannot hold before the loss scale reaches them."""
    inputs = {**policy_inputs((4,), 70, dtype=torch.float16, device=device), "num_tokens": 2**20}
    del inputs["is_correct"]
    _, grads = run(policy_loss, inputs, "logits", upstream=2.0**20)
    del inputs["num_tokens"]
    exact_inputs = {**cast(inputs, torch.float64), "num_tokens": 1}
    _, exact = run(reference.policy_loss, exact_inputs, "logits")
    assert_gradient(grads["logits"], exact["logits"], exact["logits"])


def test_float16_gradient_does_not_overflow(device):
    """A few correct tokens among a million: the stored gradient must fit both terms."""
    inputs = {**policy_inputs((4,), 70, dtype=torch.float16, device=device), "num_tokens": 2**20, "nll_weight": 1.0}
    ones = torch.ones_like(inputs["mask"])
    inputs |= {"mask": ones, "is_correct": ones, "num_correct_tokens": 4}
    _, grads = run(policy_loss, inputs, "logits")
    _, exact = run(reference.policy_loss, cast(inputs, torch.float64), "logits")
    assert grads["logits"].isfinite().all()
    assert_gradient(grads["logits"], exact["logits"], exact["logits"])
