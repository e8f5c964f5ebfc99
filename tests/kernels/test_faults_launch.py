"""Faults of launches: kernels on the wrong device, and what a compiler makes of them."""

import contextlib
import types

import pytest
import torch
from draws import packed_inputs, policy_inputs, run, value_inputs
from losses import LOSSES, losses

from vapo_kernels import (
    _dispatch,
    _formed_gradient,
    linear_token_logprobs,
    masked_whiten,
    packed_gae,
    policy_loss,
    token_logprobs,
)
from vapo_kernels.ops import token_logprobs as token_logprobs_module
from vapo_kernels.ops import value_loss, whiten
from vapo_kernels.ops.gae import kernel as gae_kernel
from vapo_kernels.ops.policy_loss import from_logits, from_logprobs

MODULES = (_formed_gradient, gae_kernel, from_logits, from_logprobs, token_logprobs_module, value_loss, whiten)


class DeviceKept:
    """Takes the place of a kernel, and keeps the device that was current when it was launched."""

    def __init__(self, current: list):
        self.current, self.devices = current, []

    def __getitem__(self, grid):
        return lambda *_, **__: self.devices.append(self.current[-1] if self.current else None)


def test_wrong_device_is_never_launched_on(monkeypatch):
    """Triton launches on the current device, so each launch stands where that of its tensors is current."""
    current, kernels = [], {}

    @contextlib.contextmanager
    def on_device_of(x):
        current.append(x.device)
        yield
        current.pop()

    monkeypatch.setattr(_dispatch, "INTERPRET", True)
    for module in MODULES:
        monkeypatch.setattr(module, "on_device_of", on_device_of)
        for name in [name for name in vars(module) if name.startswith("_") and name.endswith("_kernel")]:
            kernels[name] = DeviceKept(current)
            monkeypatch.setattr(module, name, kernels[name])
    for op, inputs, wrt in losses("cpu").values():
        run(op, inputs, wrt)
    logits = torch.randn(3, 7, requires_grad=True)
    token_logprobs(logits, torch.tensor([0, 3, 6])).logprobs.sum().backward()
    linear_token_logprobs(logits, torch.randn(4, 7), torch.tensor([0, 3, 2])).logprobs.sum().backward()
    packed_gae(**packed_inputs([5, 20]))
    masked_whiten(torch.randn(7), torch.ones(7))
    assert len(kernels) == 9 and all(kernel.devices for kernel in kernels.values())
    for name, kernel in kernels.items():
        assert set(kernel.devices) == {torch.device("cpu")}, name


def test_wrong_device_is_left_for_that_of_the_tensor(monkeypatch):
    entered = []
    monkeypatch.setattr(_dispatch, "device", lambda device: contextlib.nullcontext(entered.append(device)))
    third = torch.device("cuda", 3)
    with _dispatch.on_device_of(types.SimpleNamespace(is_cuda=True, device=third)):
        assert entered == [third]


@pytest.mark.parametrize("name", LOSSES)
def test_registration_compiles_to_one_graph_with_the_same_bits(device, name):
    """Python floats inside the loss are no float64 in the graph, and a new length gives no wrong value."""
    op, _, wrt = losses(device)[name]

    def doubled(**inputs):
        return op(**inputs).loss * 2.0

    compiled = torch.compile(doubled, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (5, 9):
        inputs = losses(device, n)[name][1]
        leaf = inputs[wrt].clone().requires_grad_()
        loss = compiled(**{**inputs, wrt: leaf})
        (grad,) = torch.autograd.grad(loss, leaf)
        out, grads = run(op, inputs, wrt, upstream=2.0)
        assert loss.dtype == torch.float32
        assert torch.equal(loss, out.loss * 2.0) and torch.equal(grad, grads[wrt])


def test_registration_tells_a_compiler_that_inplace_mutates(device):
    """A read of the logits before stays before, and one after finds the gradient."""
    inputs = policy_inputs((4,), 70, device=device)
    rest = {name: x for name, x in inputs.items() if name != "logits"}

    def step(leaf):
        logits = leaf * 1
        before = logits.sum()
        loss = policy_loss(logits, **rest, inplace=True).loss
        return loss, before, logits.detach().clone()

    leaf = inputs["logits"].requires_grad_()
    loss, before, after = torch.compile(step, fullgraph=True, backend="aot_eager")(leaf)
    (grad,) = torch.autograd.grad(loss, leaf)
    _, grads = run(policy_loss, inputs, "logits")
    assert torch.equal(before, leaf.sum())
    assert torch.equal(after, grads["logits"]) and torch.equal(grad, grads["logits"])


@pytest.mark.parametrize("n", range(1, 9))
def test_few_tokens_are_enough_for_a_block(device, monkeypatch, n):
    """With the blocks of production: no tile is too small for a length of 1."""

    for name, value in (("SHORT_BLOCK", 256), ("LONG_BLOCK", 2048), ("ROW_WIDTH", 32)):
        monkeypatch.setattr(gae_kernel, name, value)
    inputs = packed_inputs([n], device=device)
    twice = {**inputs, "cu_seqlens": inputs["cu_seqlens"].to(torch.int32)}
    for a, b in zip(packed_gae(**inputs), packed_gae(**twice), strict=True):
        assert a.shape == (n,) and torch.equal(a, b) and not a[~inputs["mask"]].any()
    whitened = value_inputs((n,), device=device)
    assert masked_whiten(whitened["values"], whitened["mask"]).isfinite().all()
