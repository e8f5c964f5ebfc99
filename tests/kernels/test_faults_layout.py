"""Faults of shape and memory: vocabularies, strides, empty inputs, dtypes of masks."""

import pytest
import torch
from draws import linear_inputs, packed_inputs, policy_inputs, run, value_inputs
from losses import logprob_inputs
from oracle import assert_within_budget

from vapo_kernels import (
    _dispatch,
    _row_softmax,
    explained_variance,
    linear_policy_loss,
    logprob_policy_loss,
    masked_whiten,
    packed_gae,
    padded_gae,
    policy_loss,
    reference,
    token_logprobs,
    value_loss,
)

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("V", [1, 2, 63, 65, 127, 129, 200])
def test_vocabulary_that_is_no_power_of_two(device, V):
    """Columns behind the row, NaN and +inf here, take part in nothing."""
    inputs = {**policy_inputs((3,), V, device=device), "entropy_weight": 0.1}
    room = torch.full((3, V + 130), NAN, device=device)
    room[:, V + 1 :: 2] = INF
    room[:, :V] = inputs["logits"]
    out, grads = run(policy_loss, inputs, "logits")
    leaf = room[:, :V].requires_grad_()
    other = policy_loss(**{**inputs, "logits": leaf})
    (grad,) = torch.autograd.grad(other.loss, leaf)
    assert all(torch.equal(a, b) for a, b in zip(out, other, strict=True))
    assert torch.equal(grad, grads["logits"])
    if V == 1:
        assert not out.logprobs.any() and out.entropy == 0 and not grad.any()
        assert not torch.signbit(out.logprobs).any()


def layouts(x: torch.Tensor) -> dict:
    """The values of [2, 3, V] logits in other places of memory."""
    V = x.shape[-1]

    def room():
        return torch.full((2, 4, 2 * V + 1), NAN, device=x.device)

    views = {
        "sliced rows": room()[:, :-1, :V],
        "shifted": room()[:, 1:, 1 : V + 1],
        "columns apart": room()[:, :-1, : 2 * V : 2],
        "batch last": torch.full((3, 2, V), NAN, device=x.device).transpose(0, 1),
        "columns first": torch.full((V, 2, 3), NAN, device=x.device).permute(1, 2, 0),
        "batch apart": torch.full((4, 3, V), NAN, device=x.device)[::2],
        "rows apart": torch.full((2, 6, V), NAN, device=x.device)[:, ::2],
    }
    for view in views.values():
        view.copy_(x)
    return views


@pytest.mark.parametrize("chunk", [256, 1 << 20])
@pytest.mark.parametrize("kind", list(layouts(torch.zeros(2, 3, 70))))
def test_layout_of_logits(device, kind, chunk, monkeypatch):
    """With chunks of the CPU path that end within a sequence, and one that holds them all."""
    if _dispatch.INTERPRET and chunk != 256:
        pytest.skip("the kernel has no chunks")
    monkeypatch.setattr(_row_softmax, "CHUNK_ELEMENTS", chunk)
    inputs = {**policy_inputs((2, 3), 70, device=device), "entropy_weight": 0.1}
    view = layouts(inputs["logits"])[kind].requires_grad_()
    assert not view.is_contiguous()
    out, grads = run(policy_loss, inputs, "logits", upstream=3.0)
    other = policy_loss(**{**inputs, "logits": view})
    (grad,) = torch.autograd.grad(other.loss, view, torch.tensor(3.0, device=device))
    assert all(torch.equal(a, b) for a, b in zip(out, other, strict=True))
    assert torch.equal(grad, grads["logits"])

    results = []
    for logits in (inputs["logits"].requires_grad_(), view):
        result = token_logprobs(logits, inputs["token_ids"], mask=inputs["mask"])
        results.append((*result, torch.autograd.grad(sum(result).sum(), logits)[0]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_expanded_inputs(device):
    """One row, one advantage, one mask for all tokens: stride 0."""
    row = torch.randn(1, 70).to(device).requires_grad_()
    ids = torch.tensor([3], device=device).expand(4)
    old, advantage, mask = (torch.full((1,), x, device=device).expand(4) for x in (-4.0, 0.7, 1.0))
    loss = policy_loss(row.expand(4, 70), ids, old, advantage, mask, is_correct=mask, token_weights=mask).loss
    (grad,) = torch.autograd.grad(loss, row)
    exact_row = row.detach().double().cpu().requires_grad_()
    one = torch.ones(1, dtype=torch.float64)
    exact = reference.policy_loss(exact_row, torch.tensor([3]), -4 * one, 0.7 * one, one, is_correct=one).loss
    assert_within_budget(loss, exact.float(), exact)
    (exact_grad,) = torch.autograd.grad(exact, exact_row)
    assert_within_budget(grad, exact_grad.float(), exact_grad)


def test_layout_of_token_tensors(device):
    """Strided, transposed and sliced per-token tensors, in every op that takes them."""

    def strided(x):
        if not isinstance(x, torch.Tensor) or x.dim() != 2:
            return x
        return x.t().contiguous().t() if x.shape[0] > 1 else x

    def every_other(x):
        if not isinstance(x, torch.Tensor) or x.dim() != 1:
            return x
        room = torch.zeros(2 * len(x), dtype=x.dtype, device=x.device)
        room[::2] = x
        return room[::2]

    for op, inputs, wrt in (
        (logprob_policy_loss, logprob_inputs((3, 5), device), "logprobs"),
        (value_loss, {**value_inputs((3, 5), device=device), "clip": 0.2}, "values"),
    ):
        out, grads = run(op, inputs, wrt)
        leaf = strided(inputs[wrt]).requires_grad_()
        other = op(**{**{n: strided(x) for n, x in inputs.items()}, wrt: leaf})
        assert all(torch.equal(a, b) for a, b in zip(out, other, strict=True))
        assert torch.equal(torch.autograd.grad(other.loss, leaf)[0], grads[wrt])
    inputs = packed_inputs([5, 20], device=device)
    inputs["lam_policy"] = torch.rand(2).to(device)
    for a, b in zip(packed_gae(**inputs), packed_gae(**{n: every_other(x) for n, x in inputs.items()}), strict=True):
        assert torch.equal(a, b)
    x, mask = torch.randn(3, 5).to(device), torch.rand(3, 5).to(device) < 0.7
    assert torch.equal(masked_whiten(x, mask), masked_whiten(strided(x), strided(mask)))
    padded = {n: v.view(5, 5) for n, v in inputs.items() if n in ("rewards", "values", "mask")}
    for a, b in zip(padded_gae(**padded), padded_gae(**{n: strided(v) for n, v in padded.items()}), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_no_tokens(device, shape):
    for op, inputs, wrt in (
        (policy_loss, policy_inputs(shape, 7, device=device), "logits"),
        (linear_policy_loss, linear_inputs(shape, 4, 7, device=device), "weight"),
        (logprob_policy_loss, logprob_inputs(shape, device), "logprobs"),
        (value_loss, {**value_inputs(shape, device=device), "clip": 0.1}, "values"),
    ):
        out, grads = run(op, inputs, wrt)
        assert all(not x.any() for x in out)
        assert grads[wrt].shape == inputs[wrt].shape and not grads[wrt].any()
    logits = torch.zeros(*shape, 7, device=device)
    assert token_logprobs(logits, logits[..., 0].long()).entropy.shape == shape
    assert masked_whiten(logits[..., 0], logits[..., 0]).shape == shape
    assert explained_variance(logits[..., 0], logits[..., 0], logits[..., 0]) == 0


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_empty_sequences_and_slack(device, index_dtype):
    inputs = packed_inputs([0, 5, 0, 0, 20, 0], device=device, slack=3)
    inputs["cu_seqlens"] = inputs["cu_seqlens"].to(index_dtype)
    out = packed_gae(**inputs)
    plain = packed_inputs([5, 20], device=device, slack=3)
    plain.update({name: inputs[name] for name in ("rewards", "values", "mask")})
    plain["bootstrap_values"] = inputs["bootstrap_values"][[1, 4]]
    for a, b in zip(out, packed_gae(**plain), strict=True):
        assert torch.equal(a, b)
        assert not a[-3:].any()
    # Slack alone, and nothing at all.
    for n in (0, 40):
        x = torch.full((n,), NAN, device=device)
        for bounds in ([0], [0, 0, 0]):
            out = packed_gae(x, x, torch.tensor(bounds, dtype=index_dtype, device=device))
            assert out.advantages.shape == (n,) and not out.advantages.any() and not out.returns.any()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float64])
def test_dtype_of_masks(device, dtype):
    for op, inputs in (
        (policy_loss, policy_inputs((5,), 7, device=device)),
        (logprob_policy_loss, logprob_inputs((5,), device)),
        (value_loss, {**value_inputs((5,), device=device), "clip": 0.2}),
        (packed_gae, packed_inputs([5, 20], device=device)),
    ):
        masks = {n: inputs[n].to(dtype) for n in ("mask", "is_correct") if n in inputs}
        assert all(torch.equal(a, b) for a, b in zip(op(**inputs), op(**{**inputs, **masks}), strict=True))
