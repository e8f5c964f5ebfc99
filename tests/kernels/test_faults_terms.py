"""Faults of the terms of a loss: which tokens a weight, a clip or a temperature touches."""

import pytest
import torch
from draws import policy_inputs, run
from losses import logprob_inputs
from oracle import assert_within_budget

from vapo_kernels import logprob_policy_loss, policy_loss, reference, value_loss


def test_temperature_scales_the_gradient(device):
    """∂/∂logits carries 1/τ, once; a number and a tensor of it are the same, and each token has its own."""
    inputs = {**policy_inputs((4,), 70, device=device), "entropy_weight": 0.3}
    taus = torch.tensor([0.5, 1.0, 2.0, 4.0], device=device)
    _, grads = run(policy_loss, {**inputs, "temperature": taus}, "logits")
    _, scaled = run(policy_loss, {**inputs, "logits": inputs["logits"] / taus.unsqueeze(1)}, "logits")
    assert torch.equal(grads["logits"], scaled["logits"] / taus.unsqueeze(1))
    out, grads = run(policy_loss, {**inputs, "temperature": 0.5}, "logits")
    other, other_grads = run(policy_loss, {**inputs, "temperature": torch.full_like(taus, 0.5)}, "logits")
    assert all(torch.equal(a, b) for a, b in zip(out, other, strict=True))
    assert torch.equal(grads["logits"], other_grads["logits"])


def test_token_weights_touch_the_policy_term_alone(device):
    inputs = logprob_inputs((33,), device)
    weights = inputs.pop("token_weights")
    out, grads = run(logprob_policy_loss, {**inputs, "nll_weight": 0.0}, "logprobs")
    weighted, weighted_grads = run(
        logprob_policy_loss, {**inputs, "token_weights": weights, "nll_weight": 0.0}, "logprobs"
    )
    assert_within_budget(weighted_grads["logprobs"], grads["logprobs"] * weights, grads["logprobs"] * weights)
    for name in ("positive_nll", "kl", "clip_fraction", "approx_kl", "num_tokens", "logprobs"):
        assert torch.equal(getattr(out, name), getattr(weighted, name))
    # The mean of each response first: weights num_tokens/(B·l) over two responses of 3 and 30 tokens.
    mask = torch.ones(33, device=device)
    per_response = torch.cat([torch.full((3,), 33 / (2 * 3)), torch.full((30,), 33 / (2 * 30))]).to(device)
    advantages, old = inputs["advantages"], inputs["logprobs"]
    sample_level = logprob_policy_loss(old, old, advantages, mask, token_weights=per_response).policy
    exact = -(advantages[:3].double().mean() + advantages[3:].double().mean()) / 2
    assert_within_budget(sample_level, exact.float(), exact, scale=1.0)


def test_dual_clip_bounds_negative_advantages_alone(device):
    ratios = torch.tensor([1.1, 5.0, 5.0, 0.01], device=device)
    advantages = torch.tensor([-1.0, -1.0, 1.0, -1.0], device=device)
    leaf = torch.zeros(4, device=device).requires_grad_()
    arguments = (leaf, -ratios.log(), advantages, torch.ones(4, device=device))
    # Without: −1.1, −5, clipped to 1.28, clipped to −0.8. With c = 3 the second is −3.
    for dual_clip, surrogates, slopes, fraction in (
        (None, [-1.1, -5, 1.28, -0.8], [1.1 / 4, 5 / 4, 0, 0], 0.5),
        (3.0, [-1.1, -3, 1.28, -0.8], [1.1 / 4, 0, 0, 0], 0.75),
    ):
        out = logprob_policy_loss(*arguments, dual_clip=dual_clip)
        assert out.policy.item() == pytest.approx(-sum(surrogates) / 4, rel=1e-6)
        assert out.clip_fraction == fraction
        (grad,) = torch.autograd.grad(out.loss, leaf)
        assert grad.tolist() == pytest.approx(slopes, rel=1e-6)


def test_ties_at_the_clip_boundary(device):
    """At the boundary itself min() ties: the slope is whole, and nothing counts as clipped."""
    leaf = torch.zeros(3, device=device).requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 0.0], device=device)
    mask = torch.ones(3, device=device)
    out = logprob_policy_loss(leaf, torch.zeros(3, device=device), advantages, mask, clip_low=0.0, clip_high=0.0)
    assert out.clip_fraction == 0
    (grad,) = torch.autograd.grad(out.loss, leaf)
    exact_leaf = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    exact = reference.logprob_policy_loss(
        exact_leaf, torch.zeros(3).double(), advantages.cpu().double(), mask.cpu(), clip_low=0.0, clip_high=0.0
    )
    (exact_grad,) = torch.autograd.grad(exact.loss, exact_leaf)
    assert_within_budget(grad, exact_grad.float(), exact_grad)
    assert grad.tolist() == pytest.approx([-1 / 3, 1 / 3, 0])
    # A value at the edge of its clip.
    values = torch.tensor([1.0, 0.5], device=device).requires_grad_()
    out = value_loss(
        values, torch.zeros(2, device=device), mask[:2], old_values=torch.tensor([0.5, 1.0], device=device), clip=0.5
    )
    assert out.clip_fraction == 0
    assert torch.autograd.grad(out.loss, values)[0].tolist() == [0.5, 0.25]


def test_no_label_shift_and_no_mask_shift(device):
    """Row t of every argument is token t: a step of one token alone, and the same token among others masked out."""
    inputs = policy_inputs((4,), 70, device=device)
    for t in range(4):
        alone = {name: x[t : t + 1] for name, x in inputs.items()} | {"mask": torch.ones(1, device=device)}
        among = {**inputs, "mask": torch.arange(4, device=device) == t}
        (out, grads), (other, other_grads) = (run(policy_loss, x, "logits") for x in (alone, among))
        assert torch.equal(out.loss, other.loss)
        assert torch.equal(grads["logits"][0], other_grads["logits"][t])
        exact = torch.log_softmax(inputs["logits"][t].double(), 0)[inputs["token_ids"][t]]
        assert_within_budget(other.logprobs[t], exact.float(), exact)
