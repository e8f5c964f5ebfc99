"""Faults of large inputs: grids of more than 65,535 programs, offsets beyond 2³¹."""

import importlib
import mmap

import pytest
import torch
from draws import cast, packed_inputs, policy_inputs, run, value_inputs
from losses import logprob_inputs
from oracle import assert_within_budget

from vapo_kernels import (
    _dispatch,
    explained_variance,
    logprob_policy_loss,
    masked_whiten,
    packed_gae,
    padded_gae,
    policy_loss,
    reference,
    token_logprobs,
    value_loss,
)


class Launches:
    """Takes the place of a kernel, and keeps the grids that it was to run on."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *args, **kwargs: None


@pytest.mark.parametrize(
    ("module", "kernel"),
    [("token_logprobs", "_token_logprobs_kernel"), ("policy_loss.from_logits", "_policy_loss_kernel")],
)
def test_more_than_65535_rows_in_a_grid(monkeypatch, module, kernel):
    """Only the first dimension of a grid takes more than 65,535 programs."""
    n, launches = 70_000, Launches()
    monkeypatch.setattr(_dispatch, "INTERPRET", True)
    monkeypatch.setattr(importlib.import_module(f"vapo_kernels.ops.{module}"), kernel, launches)
    logits, ids = torch.zeros(n, 2), torch.zeros(n, dtype=torch.int64)
    if kernel == "_token_logprobs_kernel":
        token_logprobs(logits, ids)
    else:
        policy_loss(logits, ids, logits[:, 0], logits[:, 0], torch.ones(n))
    assert launches.grids == [(n,)]


def test_more_than_65535_rows():
    n = 70_000
    inputs = policy_inputs((n,), 3)
    out, grads = run(policy_loss, inputs, "logits")
    exact, exact_grads = run(reference.policy_loss, cast(inputs, torch.float64), "logits")
    baseline, baseline_grads = run(reference.policy_loss, inputs, "logits")
    assert_within_budget(out.loss, baseline.loss, exact.loss, scale=1.0)
    assert_within_budget(grads["logits"], baseline_grads["logits"], exact_grads["logits"])


def far_apart(shape, strides, offset: int) -> torch.Tensor:
    """A float16 tensor of zeros in a mapping whose pages cost nothing until they are written."""
    numel = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    storage = torch.frombuffer(mmap.mmap(-1, 2 * numel, flags=flags), dtype=torch.float16).untyped_storage()
    return torch.empty(0, dtype=torch.float16).set_(storage, offset, shape, strides)


class Model(torch.autograd.Function):
    """Gives out a tensor where it lies, not as a view, and keeps the gradient that comes back."""

    @staticmethod
    def forward(ctx, weight, x):
        return torch.empty(0, dtype=x.dtype).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())

    @staticmethod
    def backward(ctx, gradient):
        Model.gradient = gradient
        return None, None


@pytest.mark.parametrize("dimensions", [2, 3])
def test_offsets_beyond_2_to_the_31(device, dimensions):
    """Rows 1.2·10⁹ elements apart; an offset wrapped to 32 bits would still lie inside the mapping, and read zeros."""
    if device.type != "cpu":
        pytest.skip("pages that are not written cost nothing in host memory only")
    stride, V = 1_200_000_000, 70
    assert 2 * stride > 2**31
    shape, strides = ((3,), (stride, 1)) if dimensions == 2 else ((3, 2), (stride, 1024, 1))
    inputs = {**policy_inputs(shape, V, dtype=torch.float16), "mask": torch.ones(shape)}
    del inputs["is_correct"]
    logits = far_apart((*shape, V), strides, 2**31)
    logits.copy_(inputs["logits"])

    near = {**inputs, "logits": inputs["logits"].clone().requires_grad_()}
    far = {**inputs, "logits": logits.requires_grad_()}

    def logprobs(logits, token_ids, **_):
        return token_logprobs(logits, token_ids).logprobs.sum()

    for op in (logprobs, lambda **x: policy_loss(**x).loss):
        (expected,) = torch.autograd.grad(op(**near), near["logits"])
        (actual,) = torch.autograd.grad(op(**far), far["logits"])
        assert torch.equal(actual, expected) and expected.any()
    # In place the gradient is written, and scaled, at the same offsets.
    (expected,) = torch.autograd.grad(policy_loss(**near).loss, near["logits"], torch.tensor(3.0))
    over = policy_loss(**{**inputs, "logits": Model.apply(torch.zeros((), requires_grad=True), logits)}, inplace=True)
    over.loss.backward(torch.tensor(3.0))
    actual = Model.gradient
    assert torch.equal(actual, expected)
    assert torch.equal(logits.detach(), expected)


def test_offsets_of_flat_tensors_are_64_bits(monkeypatch):
    """Every vector of offsets into a tensor of N elements is int64, seen where the interpreter adds it to a pointer."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter is chosen where there is no GPU")
    from triton.runtime.interpreter import InterpreterBuilder

    seen, add = [], InterpreterBuilder.create_addptr

    def watched(self, ptr, offset):
        seen.append(offset.data.dtype if offset.data.size > 1 else None)
        return add(self, ptr, offset)

    monkeypatch.setattr(InterpreterBuilder, "create_addptr", watched)
    monkeypatch.setattr(_dispatch, "INTERPRET", True)
    packed_gae(**packed_inputs([5, 20]))
    padded_gae(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3))
    value_loss(**{**value_inputs((7,)), "clip": 0.1})
    explained_variance(**{n: x for n, x in value_inputs((7,)).items() if n != "old_values"})
    masked_whiten(torch.randn(7), torch.ones(7))
    logprob_policy_loss(**logprob_inputs((7,), "cpu"))
    vectors = [str(dtype) for dtype in seen if dtype is not None]
    assert vectors and set(vectors) == {"int64"}
