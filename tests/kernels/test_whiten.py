"""masked_whiten."""

import pytest
import torch
from draws import DTYPES, cast, on, value_inputs
from oracle import assert_within_budget

from vapo_kernels import masked_whiten, reference
from vapo_kernels.ops import whiten
from vapo_kernels.ops.whiten import moments_op, whiten_op

# Blocks of 32: one place, two, less than a block, exactly one, one more, several with a tail, no dimension.
SHAPES = [(1,), (2,), (7,), (32,), (33,), (3, 37), ()]


def inputs_for(shape, dtype=torch.float32, device="cpu") -> dict:
    inputs = value_inputs(shape, dtype=dtype, device=device)
    return {"x": 3 * inputs["values"] + 1, "mask": inputs["mask"]}


def test_worked_example(device):
    # Mean 3, variance 4 (n − 1 = 2).
    x = torch.tensor([1.0, 77.0, 3.0, 5.0], device=device)
    mask = torch.tensor([1, 0, 1, 1], device=device)
    assert masked_whiten(x, mask).tolist() == [-1.0, 0.0, 0.0, 1.0]
    assert masked_whiten(x, mask, shift_mean=False).tolist() == [0.5, 0.0, 1.5, 2.5]
    # One place: variance 0 over a divisor of 1, so only the floor 1e-8 is left.
    out = masked_whiten(x, torch.tensor([0, 0, 1, 0], device=device), shift_mean=False)
    assert out.tolist() == [0.0, 0.0, pytest.approx(3e4, rel=1e-6), 0.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift_mean", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(device, shape, shift_mean, dtype):
    inputs = inputs_for(shape, dtype, device)
    actual = masked_whiten(**inputs, shift_mean=shift_mean)
    exact, baseline = (
        reference.masked_whiten(**cast(inputs, working), shift_mean=shift_mean)
        for working in (torch.float64, torch.float32)
    )
    assert actual.dtype == torch.float32
    assert_within_budget(actual, baseline, exact)


def test_identities(device):
    inputs = inputs_for((5, 20), device=device)
    x, mask = inputs["x"], inputs["mask"]
    out = masked_whiten(x, mask)
    kept = out[mask].double()
    n = len(kept)
    assert kept.mean().abs() < 1e-6
    assert kept.var().item() == pytest.approx(1, abs=1e-5)
    assert not out[~mask].any()
    # Shifts and positive scales of the input change nothing; masked places are as if removed.
    assert_within_budget(masked_whiten(4 * x, mask), out, out)
    assert_within_budget(masked_whiten(x[mask], torch.ones(n, device=device)), out[mask], out[mask])
    # A large common offset does not cancel the squares: no worse than PyTorch, which subtracts first.
    far = {"x": x + 4096, "mask": mask}
    exact, baseline = (reference.masked_whiten(**cast(far, dtype)) for dtype in (torch.float64, torch.float32))
    assert_within_budget(masked_whiten(**far), baseline, exact)
    # Without the shift the mean keeps its sign and size.
    unshifted = masked_whiten(x, mask, shift_mean=False)[mask].double().mean()
    exact = x[mask].double().mean() / x[mask].double().std()
    assert_within_budget(unshifted, exact.float(), exact)
    # Equal places have no variance: 0 with the shift.
    assert not masked_whiten(torch.full_like(x, 0.3), mask).any()
    assert not masked_whiten(x, torch.zeros_like(mask)).any()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_masked_is_never_read(device, poison):
    inputs = inputs_for((70,), device=device)
    x, mask = inputs["x"], inputs["mask"]
    clean = masked_whiten(x.masked_fill(~mask, 0), mask)
    dirty = masked_whiten(x.masked_fill(~mask, poison), mask)
    assert torch.equal(clean, dirty)
    assert not dirty[~mask].any() and dirty[mask].any()
    assert not masked_whiten(torch.full_like(x, poison), torch.zeros_like(mask)).any()


def test_number_of_threads_changes_no_bit():
    """Over several blocks of the CPU path, each too small to be shared between threads."""
    n = 3 * whiten.CPU_BLOCK + 5
    x, mask = torch.randn(n), torch.rand(n) < 0.55
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append((moments_op(x, mask, x.flip(0)), masked_whiten(x, mask)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    exact = reference.value_moments(x.flip(0), x, mask)
    torch.testing.assert_close(results[0][0][:, 0], exact, rtol=1e-12, atol=1e-9)


def test_registration(device):
    inputs = inputs_for((70,), device=device)
    x, mask = inputs["x"], inputs["mask"]
    torch.library.opcheck(whiten_op, (x, mask, torch.tensor([1.0, 0.5], device=device)))
    torch.library.opcheck(moments_op, (x, mask, None))
    compiled = torch.compile(masked_whiten, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((70,), (33,)):
        inputs = inputs_for(shape, device=device)
        assert torch.equal(compiled(**inputs), masked_whiten(**inputs))


@pytest.mark.parametrize(
    ("name", "value", "expected", "got"),
    [
        ("x", [1.0], "a tensor", "list"),
        ("x", torch.ones(3, dtype=torch.int64), "floating", "int64"),
        ("mask", torch.ones(1, 3), r"\(3,\)", r"\(1, 3\)"),
        ("mask", torch.ones(3, dtype=torch.complex64), "bool", "complex64"),
        ("mask", torch.ones(3, device="meta"), "cpu|cuda", "meta"),
        ("mask", None, "a tensor", "NoneType"),
    ],
)
def test_rejects_bad_input(device, monkeypatch, name, value, expected, got):
    monkeypatch.setattr("vapo_kernels.ops.whiten.moments_op", None)
    bad = value.to(device) if isinstance(value, torch.Tensor) and not value.is_meta else value
    with pytest.raises(ValueError, match=rf"^{name}: expected .*({expected}).*, got .*{got}"):
        masked_whiten(**{**on(device, x=torch.ones(3), mask=torch.ones(3)), name: bad})
