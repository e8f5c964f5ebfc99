"""Faults of the backward pass: upstream gradients, gradients in place, derivatives of derivatives, autocast."""

import pytest
import torch
from draws import linear_inputs, policy_inputs, run
from losses import LOSSES, losses
from oracle import assert_gradient, assert_within_budget

from vapo_kernels import (
    linear_token_logprobs,
    logprob_policy_loss,
    masked_whiten,
    packed_gae,
    policy_loss,
    reference,
    token_logprobs,
    value_loss,
)

RUN_ONCE = ["policy_loss", "linear_policy_loss"]


def test_upstream_gradient_of_stride_0(device):
    """`sum()` hands back one number expanded over all rows; reading it as a row of memory runs off its end."""
    inputs = policy_inputs((5,), 70, device=device)
    linear = linear_inputs((5,), 4, 70, device=device)
    ids = inputs["token_ids"]
    for weights in (torch.full((5,), 3.0), torch.tensor([1.0, -2.0, 0.0, 3.0, 0.5])):
        weights = weights.to(device)
        leaf = inputs["logits"].clone().requires_grad_()
        out = token_logprobs(leaf, ids)
        upstream = weights[:1].expand(5) if (weights == weights[0]).all() else weights
        (grad,) = torch.autograd.grad([out.logprobs, out.entropy], leaf, [upstream, upstream])
        exact_leaf = inputs["logits"].double().cpu().requires_grad_()
        exact_out = reference.token_logprobs(exact_leaf, ids.cpu())
        (exact,) = torch.autograd.grad(sum(exact_out), exact_leaf, weights.double().cpu())
        assert_within_budget(grad, exact.float(), exact)

        hidden = linear["hidden"].clone().requires_grad_()
        out = linear_token_logprobs(hidden, linear["weight"], linear["token_ids"])
        (grad,) = torch.autograd.grad(out.logprobs, hidden, upstream)
        exact_hidden = linear["hidden"].double().cpu().requires_grad_()
        exact_out = reference.linear_token_logprobs(
            exact_hidden, linear["weight"].double().cpu(), linear["token_ids"].cpu()
        )
        (exact,) = torch.autograd.grad(exact_out.logprobs, exact_hidden, weights.double().cpu())
        assert_within_budget(grad, exact.float(), exact)


def test_inplace_gradient_is_noticed_by_autograd(device):
    inputs = policy_inputs((5,), 70, device=device)
    leaf = inputs["logits"].clone().requires_grad_()
    logits = leaf * 1
    saved_by_another = logits.square().sum()
    version = logits._version
    out = policy_loss(**{**inputs, "logits": logits}, inplace=True)
    assert logits._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (out.loss + saved_by_another).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_does_not_corrupt_the_logits(device, dtype):
    """Unless asked to: `.float()` of a float32 tensor is the tensor itself."""
    inputs = {**policy_inputs((5,), 70, dtype=dtype, device=device)}
    before = inputs["logits"].clone()
    leaf = inputs["logits"].requires_grad_()
    out = policy_loss(**inputs)
    (3 * out.loss).backward()
    token_logprobs(leaf, inputs["token_ids"]).logprobs.sum().backward()
    assert torch.equal(leaf.detach(), before)
    # And the logits may be used again: each use has its own gradient.
    first = run(policy_loss, inputs, "logits", upstream=3.0)[1]["logits"]
    second = torch.autograd.grad(token_logprobs(leaf, inputs["token_ids"]).logprobs.sum(), leaf)[0]
    assert torch.equal(leaf.grad, first + second)


def test_inplace_into_a_slice_leaves_the_rest(device):
    whole = torch.randn(2, 4, 70).to(device)
    inputs = policy_inputs((2, 3), 70, device=device)
    inputs["logits"] = whole[:, :-1].clone()
    _, expected = run(policy_loss, inputs, "logits", upstream=3.0)
    base = whole.clone().requires_grad_()
    padded = base * 1
    out = policy_loss(**{**inputs, "logits": padded[:, :-1]}, inplace=True)
    (3 * out.loss).backward()
    assert torch.equal(base.grad[:, :-1], expected["logits"])
    assert not base.grad[:, -1].any()
    assert torch.equal(padded[:, -1], whole[:, -1])


@pytest.mark.parametrize("name", LOSSES)
def test_second_backward_is_right_or_refused(device, name):
    op, inputs, wrt = losses(device)[name]
    leaf = inputs[wrt].clone().requires_grad_()
    out = op(**{**inputs, wrt: leaf})
    (first,) = torch.autograd.grad(out.loss, leaf, torch.tensor(2.0, device=device), retain_graph=True)
    first = first.clone()
    if name in RUN_ONCE:
        with pytest.raises(RuntimeError, match="call the loss again"):
            torch.autograd.grad(out.loss, leaf)
    else:
        (second,) = torch.autograd.grad(out.loss, leaf, torch.tensor(4.0, device=device))
        assert torch.equal(second, 2 * first)


@pytest.mark.parametrize("name", [*LOSSES, "token_logprobs", "linear_token_logprobs"])
def test_second_derivative_is_refused(device, name):
    if name in LOSSES:
        op, inputs, wrt = losses(device)[name]
        leaf = inputs[wrt].clone().requires_grad_()
        out = op(**{**inputs, wrt: leaf}).loss
    elif name == "token_logprobs":
        leaf = torch.randn(3, 7).to(device).requires_grad_()
        out = token_logprobs(leaf, torch.tensor([0, 3, 6], device=device)).logprobs.sum()
    else:
        leaf = torch.randn(3, 4).to(device).requires_grad_()
        out = linear_token_logprobs(
            leaf, torch.randn(7, 4).to(device), torch.tensor([0, 3, 6], device=device)
        ).entropy.sum()
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(out, leaf, create_graph=True)


@pytest.mark.parametrize("name", [*LOSSES, "token_logprobs"])
def test_functional_grad_is_right_or_refused(device, name):
    if name == "token_logprobs":
        inputs = policy_inputs((5,), 70, device=device)
        ids, wrt = inputs["token_ids"], "logits"

        def loss(x):
            return token_logprobs(x, ids).logprobs.sum()
    else:
        op, inputs, wrt = losses(device)[name]

        def loss(x):
            return op(**{**inputs, wrt: x}).loss

    leaf = inputs[wrt].clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    try:
        actual = torch.func.grad(loss)(inputs[wrt])
    except RuntimeError as error:
        assert "second derivative" in str(error) or "functorch" in str(error)
    else:
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", LOSSES)
def test_autocast_changes_no_loss(device, name):
    """Arithmetic is float32 whatever the region says; a linear head is cast as `torch.nn.Linear` is."""
    op, inputs, wrt = losses(device)[name]
    expected_inputs = inputs
    if name == "linear_policy_loss":
        head = ("hidden", "weight", "bias")
        expected_inputs = {n: x.bfloat16() if n in head else x for n, x in inputs.items()}
    expected, expected_grads = run(op, expected_inputs, wrt)
    with torch.autocast(device.type, torch.bfloat16):
        out, grads = run(op, inputs, wrt)
    assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))
    assert grads[wrt].dtype == torch.float32
    assert_gradient(grads[wrt].to(expected_grads[wrt].dtype), expected_grads[wrt], expected_grads[wrt])


def test_same_tensor_for_two_arguments(device):
    x = torch.randn(25).to(device)
    bounds = torch.tensor([0, 5, 25], device=device)
    ones = (x > 0).float()
    same = packed_gae(ones, ones, bounds, mask=ones)
    for a, b in zip(same, packed_gae(ones, ones.clone(), bounds, mask=x > 0), strict=True):
        assert torch.equal(a, b)
    mask = torch.ones(25, device=device)
    # Only the first of the two carries a gradient: the other is a constant of the rollout.
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(value_loss(leaf, leaf, mask, old_values=leaf, clip=0.1).loss, leaf)
    assert not grad.any()
    leaf = x.clone().requires_grad_()
    out = logprob_policy_loss(leaf, leaf, x, mask, ref_logprobs=leaf, kl_weight=1.0)
    assert (out.approx_kl, out.kl) == (0, 0)
    assert_within_budget(torch.autograd.grad(out.loss, leaf)[0], -x / 25, -x / 25)
    # Log-probs that are their own entropy: the sum of both gradients.
    leaf = x.clone().requires_grad_()
    out = logprob_policy_loss(leaf, x, x, mask, entropy=leaf, entropy_weight=0.5)
    assert_within_budget(torch.autograd.grad(out.loss, leaf)[0], (-x - 0.5) / 25, (-x - 0.5) / 25)
    assert torch.equal(masked_whiten(mask, mask), torch.zeros_like(mask))
