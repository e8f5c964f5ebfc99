"""Faults of a head that is no plain, whole, unchanged matrix."""

import pytest
import torch
from draws import linear_inputs, run

from vapo_kernels import _linear_chunks, linear_policy_loss, linear_token_logprobs

WRT = ["hidden", "weight", "bias"]


def logprobs_inputs(inputs: dict) -> dict:
    return {name: inputs[name] for name in ("hidden", "weight", "bias", "token_ids", "mask")}


@pytest.mark.parametrize("shard", ["flat", "of the features", "of the vocabulary"])
def test_shard_of_the_head_is_refused(device, shard):
    """FSDP keeps a head flat, or a part of its rows; neither is the head."""
    inputs = linear_inputs((3,), 4, 70, device=device)
    weight = inputs["weight"]
    parts = {"flat": weight.view(-1)[:140], "of the features": weight[:, :2], "of the vocabulary": weight[:35]}
    inputs["weight"] = parts[shard]
    # A bias is a shard like the weight, so that only the weight can tell.
    inputs["bias"] = None if shard == "of the vocabulary" else inputs["bias"]
    inputs["token_ids"] = torch.full((3,), 69, device=device)
    inputs["mask"] = torch.ones_like(inputs["mask"])
    if shard == "of the vocabulary" and device.type != "cpu":
        pytest.skip("token ids on a GPU are not read by the host")
    for op, arguments in ((linear_policy_loss, inputs), (linear_token_logprobs, logprobs_inputs(inputs))):
        with pytest.raises(ValueError, match="token_ids" if shard == "of the vocabulary" else "weight"):
            op(**arguments)


def test_head_changed_before_backward_is_noticed_or_does_not_matter(device):
    """A gather that overlaps may bring the next step's weight: the gradient is of the weight that forward saw."""
    inputs = linear_inputs((3,), 4, 70, device=device)
    _, expected = run(linear_policy_loss, inputs, WRT)
    leaves = {name: inputs[name].clone().requires_grad_() for name in WRT}
    loss = linear_policy_loss(**{**inputs, **leaves}).loss
    out = linear_token_logprobs(**logprobs_inputs({**inputs, **leaves})).logprobs.sum()
    with torch.no_grad():
        leaves["weight"].zero_()
    for grad, name in zip(torch.autograd.grad(loss, list(leaves.values())), WRT, strict=True):
        assert torch.equal(grad, expected[name]), name
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_no_temporary_of_the_size_of_the_head(device, monkeypatch):
    """The gradient of the weight is summed where it lies, a block of its rows at a time."""
    monkeypatch.setattr(_linear_chunks, "WEIGHT_ROWS", 16)
    products, add_product = [], _linear_chunks._add_product

    def watched(total, left, right):
        products.append(total.shape[0])
        add_product(total, left, right)

    monkeypatch.setattr(_linear_chunks, "_add_product", watched)
    _, grads = run(linear_policy_loss, linear_inputs((3,), 4, 70, device=device), WRT)
    assert grads["weight"].any() and len(products) >= 5 and max(products) == 16
