"""value_loss, value_moments, explained_variance (Eq. 10)."""

import pytest
import torch
from draws import DTYPES, cast, on, references, run, split, value_inputs
from oracle import assert_gradient, assert_within_budget

from vapo_kernels import (
    explained_variance,
    explained_variance_from,
    reference,
    value_loss,
    value_moments,
)
from vapo_kernels.ops.value_loss import value_loss_op
from vapo_kernels.ops.whiten import moments_op

# Blocks of 32: one place, less than a block, exactly one, one more, several with a tail, two leading dimensions.
SHAPES = [(1,), (7,), (32,), (33,), (3, 37), ()]
SETTINGS = {
    "plain": {},
    "clip": {"clip": 0.2},
    "count": {"clip": 0.5, "num_tokens": 41},
    "tensor count": {"num_tokens": torch.tensor(17)},
}


def inputs_for(shape, setting: str, dtype=torch.float32, device="cpu") -> dict:
    inputs = value_inputs(shape, dtype=dtype, device=device)
    if "clip" not in SETTINGS[setting]:
        del inputs["old_values"]
    return {**inputs, **on(device, **SETTINGS[setting])}


def test_worked_example(device):
    returns = torch.tensor([0.95**k for k in (4, 3, 2, 1, 0)], dtype=torch.float64)
    mask = torch.ones(5, dtype=torch.bool, device=device)
    arguments = {"values": torch.zeros(5, device=device), "returns": returns.float().to(device), "mask": mask}
    out, grads = run(value_loss, arguments, "values")
    exact = torch.tensor(0.4115518629550934, dtype=torch.float64)
    assert_within_budget(out.loss, exact.float(), exact)
    assert_within_budget(grads["values"], (-returns / 5).float(), -returns / 5)
    assert out.clip_fraction == 0

    # V 3, R̂ 0, V_old 1, c ½: clipped to 1½, ½·9 > ½·2¼, so nothing is clipped away. V −1, R̂ 0, V_old 1: clipped to
    # ½, ½ > ⅛. V −1, R̂ −2, V_old 1: clipped to ½, whose error ½·6¼ is the larger and has no gradient.
    arguments = on(
        device,
        values=torch.tensor([3.0, -1.0, -1.0, 99.0]),
        returns=torch.tensor([0.0, 0.0, -2.0, 0.0]),
        old_values=torch.tensor([1.0, 1.0, 1.0, 0.0]),
        mask=torch.tensor([1, 1, 1, 0]),
    )
    out, grads = run(value_loss, {**arguments, "clip": 0.5, "num_tokens": 4}, "values")
    assert out.loss == (4.5 + 0.5 + 3.125) / 4
    assert out.clip_fraction == 0.25
    assert grads["values"].tolist() == [0.75, -0.25, 0.0, 0.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(device, shape, setting, dtype):
    inputs = inputs_for(shape, setting, dtype, device)
    out, grads = run(value_loss, inputs, "values", upstream=-3.0)
    (exact, exact_grads), (baseline, baseline_grads) = references(reference.value_loss, inputs, "values", upstream=-3.0)
    for name in out._fields:
        actual = getattr(out, name)
        assert actual.dtype == torch.float32 and actual.shape == ()
        assert_within_budget(actual, getattr(baseline, name), getattr(exact, name), name=name)
    assert grads["values"].dtype == dtype
    assert_gradient(grads["values"], baseline_grads["values"], exact_grads["values"])
    without = value_loss(**inputs)
    assert not without.loss.requires_grad and torch.equal(without.loss, out.loss)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_moments_match_reference(device, shape, dtype):
    inputs = inputs_for(shape, "plain", dtype, device)
    moments = value_moments(**inputs)
    exact = reference.value_moments(**cast(inputs, torch.float64))
    assert moments.dtype == torch.float64 and moments.shape == (5,)
    torch.testing.assert_close(moments.cpu(), exact, rtol=1e-12, atol=1e-12)
    share = explained_variance(**inputs)
    exact = reference.explained_variance(**cast(inputs, torch.float64))
    torch.testing.assert_close(share.cpu(), exact, rtol=1e-10, atol=1e-10)


def test_explained_variance_by_hand(device):
    returns = torch.tensor([0.0, 2.0, 4.0, 6.0, 99.0], device=device)
    mask = torch.tensor([1, 1, 1, 1, 0], device=device)

    def explained(values):
        return explained_variance(torch.tensor([*values, 7.0], device=device), returns, mask).item()

    assert explained([0.0, 2.0, 4.0, 6.0]) == 1
    assert explained([1.0, 3.0, 5.0, 7.0]) == 1  # a constant offset leaves no variance
    assert explained([3.0, 3.0, 3.0, 3.0]) == 0
    assert explained([0.0, 1.0, 2.0, 3.0]) == pytest.approx(0.75, abs=1e-15)  # 1 − Var(R̂/2)/Var(R̂)
    assert explained([6.0, 4.0, 2.0, 0.0]) == -3  # 1 − Var(2 R̂)/Var(R̂)
    # Returns that do not vary, or no token: nothing to explain.
    constant = torch.full_like(returns, 1e4)
    assert explained_variance(returns, constant, mask) == 0
    assert explained_variance(returns, returns, torch.zeros_like(mask)) == 0
    # A return that is not a number is not explained.
    assert explained_variance(returns, returns * float("nan"), mask).isnan()


def test_identities(device):
    inputs = inputs_for((50,), "clip", device=device)
    count = int(inputs["mask"].sum())
    whole, grads = run(value_loss, inputs, "values")
    for cuts in ([20, 30], [1, 48, 1], [50]):
        parts = [run(value_loss, {**part, "num_tokens": count}, "values") for part in split(inputs, cuts)]
        for name in whole._fields:
            total = sum(getattr(out, name).double() for out, _ in parts)
            assert_within_budget(getattr(whole, name), total.float(), total, name=name)
        assert torch.equal(torch.cat([g["values"] for _, g in parts]), grads["values"])

    # Moments of parts add to those of the whole; explained variances do not.
    names = ("values", "returns", "mask")
    parts = zip(*(inputs[name].split([20, 30]) for name in names), strict=True)
    moments = sum(value_moments(*part) for part in parts)
    whole_moments = value_moments(*(inputs[name] for name in names))
    torch.testing.assert_close(moments, whole_moments, rtol=1e-13, atol=1e-13)
    assert explained_variance_from(whole_moments) == explained_variance(*(inputs[name] for name in names))

    # Masked tokens are as if they were not there.
    mask = inputs["mask"]
    kept, kept_grads = run(
        value_loss, {n: x[mask] if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}, "values"
    )
    assert_within_budget(kept.loss, whole.loss, whole.loss)
    assert torch.equal(kept_grads["values"], grads["values"][mask])
    assert not grads["values"][~mask].any()

    # A clip that no value reaches is no clip, and counts no token as clipped.
    far = {**inputs, "old_values": 10 * inputs["old_values"] + 7, "clip": 100.0}
    wide, wide_grads = run(value_loss, far, "values")
    plain, plain_grads = run(value_loss, {n: inputs[n] for n in names}, "values")
    assert wide.clip_fraction == 0
    assert torch.equal(wide.loss, plain.loss)
    assert torch.equal(wide_grads["values"], plain_grads["values"])


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_masked_is_never_read(device, poison):
    inputs = inputs_for((40,), "clip", device=device)
    mask = inputs["mask"]
    tensors = ("values", "returns", "old_values")
    results = []
    for fill in (0.0, poison):
        filled = {**inputs, **{name: inputs[name].masked_fill(~mask, fill) for name in tensors}}
        out, grads = run(value_loss, filled, "values")
        moments = value_moments(filled["values"], filled["returns"], mask)
        results.append((*out, grads["values"], moments))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)
    assert not results[1][2][~mask].any()


def test_registration(device):
    inputs = inputs_for((40,), "clip", device=device)
    count = torch.tensor(30.0, device=device)
    tensors = inputs["values"], inputs["returns"], inputs["mask"]
    torch.library.opcheck(value_loss_op, (*tensors, inputs["old_values"], count, 0.2))
    torch.library.opcheck(value_loss_op, (*tensors, None, count, 0.0))
    torch.library.opcheck(moments_op, (inputs["returns"], inputs["mask"], inputs["values"]))

    def step(values, returns, mask, old_values, clip, num_tokens):
        out = value_loss(values, returns, mask, old_values=old_values, clip=clip, num_tokens=num_tokens)
        return (*out, 3 * out.loss, explained_variance(values, returns, mask))

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape, clip in (((40,), 0.2), ((33,), 0.3)):
        inputs = inputs_for(shape, "clip", device=device)
        results = []
        for function in (compiled, step):
            leaf = inputs["values"].clone().requires_grad_()
            out = function(leaf, inputs["returns"], inputs["mask"], inputs["old_values"], clip, count)
            out[2].backward()
            results.append((*out, leaf.grad))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)


BAD = [
    ("values", 1.0, "a tensor", "float"),
    ("values", torch.zeros(3, dtype=torch.int64), "floating", "int64"),
    ("returns", torch.zeros(2), r"\(3,\)", r"\(2,\)"),
    ("returns", torch.zeros(3, dtype=torch.bool), "floating", "bool"),
    ("returns", torch.zeros(3, device="meta"), "cpu|cuda", "meta"),
    ("mask", torch.ones(3, 1), r"\(3,\)", r"\(3, 1\)"),
    ("mask", None, "a tensor", "NoneType"),
    ("mask", torch.ones(3, device="meta"), "cpu|cuda", "meta"),
]
BAD_OF_LOSS = [
    ("clip", 0.0, "> 0", "0.0"),
    ("clip", float("nan"), "> 0", "nan"),
    ("old_values", None, "a tensor", "NoneType"),
    ("old_values", torch.zeros(4), r"\(3,\)", r"\(4,\)"),
    ("old_values", torch.zeros(3, device="meta"), "cpu|cuda", "meta"),
    ("num_tokens", -1, "≥ 0", "-1"),
    ("num_tokens", float("nan"), "≥ 0", "nan"),
    ("num_tokens", torch.ones(1), "0-dim", r"\(1,\)"),
    ("num_tokens", torch.ones((), device="meta"), "cpu|cuda", "meta"),
]


@pytest.mark.parametrize(("name", "value", "expected", "got"), BAD + BAD_OF_LOSS)
def test_rejects_bad_input(device, monkeypatch, name, value, expected, got):
    monkeypatch.setattr("vapo_kernels.ops.value_loss.value_loss_op", None)
    monkeypatch.setattr("vapo_kernels.ops.value_loss.masked_moments", None)
    three = torch.zeros(3)
    good = on(device, values=three, returns=three, mask=torch.ones(3), old_values=three, clip=0.1)
    bad = value.to(device) if isinstance(value, torch.Tensor) and not value.is_meta else value
    message = rf"^{name}: expected .*({expected}).*, got .*{got}"
    with pytest.raises(ValueError, match=message):
        value_loss(**{**good, name: bad})
    if any(value is case[1] for case in BAD_OF_LOSS):
        return
    good = on(device, values=three, returns=three, mask=torch.ones(3))
    for op in (value_moments, explained_variance):
        with pytest.raises(ValueError, match=message):
            op(**{**good, name: bad})


def test_rejects_old_values_without_clip(device):
    three = torch.zeros(3, device=device)
    with pytest.raises(ValueError, match=r"^old_values: expected None without clip, got a tensor"):
        value_loss(three, three, torch.ones_like(three), old_values=three)


@pytest.mark.parametrize("moments", [[1.0] * 5, torch.zeros(4, dtype=torch.float64), torch.zeros(5)])
def test_rejects_bad_moments(moments):
    with pytest.raises(ValueError, match=r"^moments: expected .*, got "):
        explained_variance_from(moments)
