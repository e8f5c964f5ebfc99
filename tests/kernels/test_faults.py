"""One test for each kind of fault that fused losses and GAE kernels have shipped with elsewhere."""

import importlib
import math
import mmap

import pytest
import torch
from draws import cast, linear_inputs, packed_inputs, policy_inputs, run, value_inputs
from oracle import assert_gradient, assert_within_budget

from vapo_kernels import (
    _dispatch,
    explained_variance,
    linear_policy_loss,
    linear_token_logprobs,
    logprob_policy_loss,
    masked_whiten,
    packed_gae,
    padded_gae,
    policy_loss,
    reference,
    row_softmax,
    token_logprobs,
    value_loss,
)

NAN, INF = float("nan"), float("inf")


def policy_loss_inputs(shape, V, device, **settings) -> dict:
    return {**policy_inputs(shape, V, device=device), **settings}


def logprob_inputs(shape, device, **settings) -> dict:
    inputs = policy_inputs(shape, 9, device=device)
    logprobs = inputs.pop("logits").log_softmax(-1)
    inputs["logprobs"] = logprobs.gather(-1, inputs.pop("token_ids").unsqueeze(-1)).squeeze(-1)
    return {**inputs, **settings}


def losses(device, n=5) -> dict:
    """Every loss with a gradient: its op, inputs, and what it differentiates."""
    return {
        "policy_loss": (policy_loss, policy_loss_inputs((n,), 70, device), "logits"),
        "linear_policy_loss": (linear_policy_loss, linear_inputs((n,), 4, 70, device=device), "hidden"),
        "logprob_policy_loss": (logprob_policy_loss, logprob_inputs((n,), device), "logprobs"),
        "value_loss": (value_loss, {**value_inputs((n,), device=device), "clip": 0.2}, "values"),
    }


LOSSES = list(losses("cpu"))
RUN_ONCE = ["policy_loss", "linear_policy_loss"]


# Normaliser under accumulation.


@pytest.mark.parametrize("name", LOSSES)
def test_normaliser_is_that_of_the_whole_step(device, name):
    """A micro-batch divides by the step's count, not by its own, and never by both."""
    op, inputs, wrt = losses(device)[name]
    own = int(inputs["mask"].sum())
    out, _ = run(op, inputs, wrt)
    inputs.pop("is_correct", None)
    plain, plain_grads = run(op, inputs, wrt)
    # Ten times the count: a tenth of the loss and of the gradient, to the bit of a division.
    for count in (10 * own, torch.tensor(10 * own, device=device), torch.tensor(10.0 * own, device=device)):
        tenth, tenth_grads = run(op, {**inputs, "num_tokens": count}, wrt)
        assert_within_budget(10 * tenth.loss, plain.loss, plain.loss)
        assert_within_budget(10 * tenth_grads[wrt], plain_grads[wrt], plain_grads[wrt])
    if name != "value_loss":
        # The positive NLL has a denominator of its own.
        inputs = losses(device)[name][1]
        half, _ = run(op, {**inputs, "num_correct_tokens": 2 * int(out.num_correct_tokens)}, wrt)
        assert_within_budget(2 * half.positive_nll, out.positive_nll, out.positive_nll)
        assert torch.equal(half.policy, out.policy)


# All-masked batch.


@pytest.mark.parametrize("name", LOSSES)
def test_all_masked_batch(device, name):
    op, inputs, wrt = losses(device)[name]
    inputs["mask"] = torch.zeros_like(inputs["mask"])
    poisoned = {**inputs, wrt: torch.full_like(inputs[wrt], NAN)}
    for count in (None, 0, torch.tensor(0, device=device), 7):
        out, grads = run(op, {**poisoned, "num_tokens": count}, wrt)
        assert all(not x.any() for x in out)
        assert not grads[wrt].any()


def test_all_masked_batch_without_a_gradient(device):
    x, mask = torch.full((5,), NAN, device=device), torch.zeros(5, device=device)
    assert not masked_whiten(x, mask).any()
    assert explained_variance(x, x, mask) == 0
    logits = torch.full((5, 3), NAN, device=device)
    for result in token_logprobs(logits, torch.full((5,), -100, device=device), mask=mask):
        assert not result.any()


# Stride-0 upstream gradient, and one upstream gradient for each row.


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


# In-place gradient corrupts logits.


def test_inplace_gradient_is_noticed_by_autograd(device):
    inputs = policy_loss_inputs((5,), 70, device)
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
    inputs = policy_loss_inputs((2, 3), 70, device)
    inputs["logits"] = whole[:, :-1].clone()
    _, expected = run(policy_loss, inputs, "logits", upstream=3.0)
    base = whole.clone().requires_grad_()
    padded = base * 1
    out = policy_loss(**{**inputs, "logits": padded[:, :-1]}, inplace=True)
    (3 * out.loss).backward()
    assert torch.equal(base.grad[:, :-1], expected["logits"])
    assert not base.grad[:, -1].any()
    assert torch.equal(padded[:, -1], whole[:, -1])


# Backward a second time, and derivatives of derivatives.


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


# Grid limits and offsets.


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
    monkeypatch.setattr(importlib.import_module(f"vapo_kernels.{module}"), kernel, launches)
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


# −inf logits.


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
    inputs = policy_loss_inputs((3,), V, device, entropy_weight=0.3, kl_weight=0.1)
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


# exp overflow of ratio and KL.


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


# Vocabulary shapes.


@pytest.mark.parametrize("V", [1, 2, 63, 65, 127, 129, 200])
def test_vocabulary_that_is_no_power_of_two(device, V):
    """Columns behind the row, NaN and +inf here, take part in nothing."""
    inputs = policy_loss_inputs((3,), V, device, entropy_weight=0.1)
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


# Layouts.


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
    monkeypatch.setattr(row_softmax, "CHUNK_ELEMENTS", chunk)
    inputs = policy_loss_inputs((2, 3), 70, device, entropy_weight=0.1)
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


# Empty inputs.


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_no_tokens(device, shape):
    for op, inputs, wrt in (
        (policy_loss, policy_loss_inputs(shape, 7, device), "logits"),
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
        (policy_loss, policy_loss_inputs((5,), 7, device)),
        (logprob_policy_loss, logprob_inputs((5,), device)),
        (value_loss, {**value_inputs((5,), device=device), "clip": 0.2}),
        (packed_gae, packed_inputs([5, 20], device=device)),
    ):
        masks = {n: inputs[n].to(dtype) for n in ("mask", "is_correct") if n in inputs}
        assert all(torch.equal(a, b) for a, b in zip(op(**inputs), op(**{**inputs, **masks}), strict=True))


# GAE semantics.


def test_masked_critic_value_does_not_bootstrap(device):
    """A garbage value behind the last sampled token: Â of a lone reward 1 is 1 and 0.95, not 5.7."""
    rewards = torch.tensor([0.0, 1.0, 0.0], device=device)
    values = torch.tensor([0.0, 0.0, 100.0], device=device)
    mask = torch.tensor([1, 1, 0], device=device)
    out = packed_gae(rewards, values, torch.tensor([0, 3], device=device), mask=mask, lam_policy=0.95)
    assert out.advantages.tolist() == pytest.approx([0.95, 1.0, 0.0], rel=1e-6)
    assert out.returns.tolist() == [1.0, 1.0, 0.0]


def test_interior_holes_do_not_decay(device):
    """A tool's output between two sampled tokens, longer than a block, is no step in time."""
    n = 80
    rewards, values, mask = (torch.zeros(n, device=device) for _ in range(3))
    mask[[0, 40, 79]], rewards[79] = 1.0, 1.0
    values[[0, 40, 79]] = torch.tensor([0.5, 0.25, 0.125], device=device)
    out = packed_gae(rewards, values, torch.tensor([0, n], device=device), mask=mask, gamma=0.5, lam_policy=0.5)
    deltas = [0.5 * 0.25 - 0.5, 0.5 * 0.125 - 0.25, 1 - 0.125]
    expected = [deltas[0] + 0.25 * deltas[1] + 0.0625 * deltas[2], deltas[1] + 0.25 * deltas[2], deltas[2]]
    assert out.advantages[mask.bool()].tolist() == expected
    assert out.returns[mask.bool()].tolist() == [0.25, 0.5, 1.0]


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_sequences_do_not_leak_into_each_other(device, poison):
    """Not even a reward of NaN: 0 times a neighbour's NaN would be NaN."""
    lengths = [5, 20, 0, 3, 40]
    inputs = packed_inputs(lengths, device=device)
    inputs["mask"] = torch.ones_like(inputs["mask"])
    clean = packed_gae(**inputs)
    exact = reference.packed_gae(**cast(inputs, torch.float64))
    rows = {name: inputs[name][5:65].view(3, 20) for name in ("rewards", "values", "mask")}
    exact_rows = reference.padded_gae(**cast(rows, torch.float64))

    def poisoned(name, place, x):
        return {**x, name: x[name].index_fill(0, torch.tensor([place], device=device), poison)}

    for name, place in (("rewards", 10), ("values", 10), ("bootstrap_values", 1)):
        dirty = packed_gae(**poisoned(name, place, inputs))
        for a, b, truth in zip(clean, dirty, exact, strict=True):
            others = torch.ones(68, dtype=torch.bool)
            others[5:25] = False
            assert_within_budget(b[others], a[others], truth[others])
            assert not b[5:10].isfinite().any()
    rewards = rows["rewards"].clone()
    rewards[1, 7] = poison
    for b, truth in zip(padded_gae(**{**rows, "rewards": rewards}), exact_rows, strict=True):
        assert_within_budget(b[::2], truth[::2].float(), truth[::2])
        assert not b[1, :8].isfinite().any()


def test_lambda_near_1_in_bfloat16(monkeypatch, device):
    """At l = 10,240 λ is 1 − 1/512, which bfloat16 rounds to 1."""
    from vapo_kernels.gae import blocked_scan, kernel

    monkeypatch.setattr(kernel, "LONG_BLOCK", 1024)
    for name, value in (("SCAN_ROWS", 64), ("BLOCK_TOKENS", 4096)):
        monkeypatch.setattr(blocked_scan, name, value)
    n = 10_240
    rewards, values = torch.zeros(n, dtype=torch.bfloat16), torch.zeros(n, dtype=torch.bfloat16)
    rewards[-1] = 1
    out = packed_gae(rewards.to(device), values.to(device), torch.tensor([0, n], device=device))
    exact = (1 - 1 / 512) ** torch.arange(n - 1, -1, -1, dtype=torch.float64)
    baseline = torch.tensor(1 - 1 / 512) ** torch.arange(n - 1, -1, -1)
    assert_within_budget(out.advantages, baseline, exact, floor=1e-5)
    assert out.advantages[0].item() == pytest.approx((1 - 1 / 512) ** (n - 1), rel=1e-3)
    assert torch.equal(out.returns.cpu(), torch.ones(n))


# Confident tokens.


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


# Temperature.


def test_temperature_scales_the_gradient(device):
    """∂/∂logits carries 1/τ, once; a number and a tensor of it are the same, and each token has its own."""
    inputs = policy_loss_inputs((4,), 70, device, entropy_weight=0.3)
    taus = torch.tensor([0.5, 1.0, 2.0, 4.0], device=device)
    _, grads = run(policy_loss, {**inputs, "temperature": taus}, "logits")
    _, scaled = run(policy_loss, {**inputs, "logits": inputs["logits"] / taus.unsqueeze(1)}, "logits")
    assert torch.equal(grads["logits"], scaled["logits"] / taus.unsqueeze(1))
    out, grads = run(policy_loss, {**inputs, "temperature": 0.5}, "logits")
    other, other_grads = run(policy_loss, {**inputs, "temperature": torch.full_like(taus, 0.5)}, "logits")
    assert all(torch.equal(a, b) for a, b in zip(out, other, strict=True))
    assert torch.equal(grads["logits"], other_grads["logits"])


# The same bits.


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


# Autocast.


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


# One tensor in the place of two arguments.


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


# Terms of the loss.


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


# float16.


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
