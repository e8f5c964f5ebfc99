"""The one tolerance of the project: a kernel may err as PyTorch errs, against a truth in float64."""

import torch
from torch import Tensor

# Rounding of float32 itself, relative to the largest entry: what remains where PyTorch happens to be exact.
FLOOR = 1e-6


def assert_within_budget(
    actual: Tensor,
    baseline: Tensor,
    exact: Tensor,
    *,
    factor: float = 2.0,
    floor: float = FLOOR,
    name: str = "output",
    scale: float | None = None,
) -> None:
    """Allow ``actual`` at most ``factor`` times the error of ``baseline``, plus ``floor``.

    Errors are the largest over the tensor; ``exact`` is the reference in float64, ``baseline`` the reference in the
    working dtype. What is not finite in ``exact`` must be the same in ``actual``. ``floor`` is relative to the largest
    entry, or to ``scale`` if that is larger: a sum whose terms cancel needs the size of its terms.
    """
    actual, baseline, exact = (x.detach().double().cpu() for x in (actual, baseline, exact))
    assert actual.shape == exact.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    finite = exact.isfinite()
    torch.testing.assert_close(
        actual[~finite], exact[~finite], rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{name}: {m}"
    )
    if not finite.any():
        return
    error = (actual - exact)[finite].abs().max().item()
    baseline_error = (baseline - exact)[finite].abs().nan_to_num(0, 0, 0).max().item()
    scale = max(scale or 1e-30, exact[finite].abs().max().item())
    budget = factor * baseline_error + floor * scale
    assert error <= budget, f"{name}: error {error:.3e} > budget {budget:.3e} (PyTorch errs {baseline_error:.3e})"


def assert_gradient(actual: Tensor, baseline: Tensor, exact: Tensor, *, name: str = "gradient") -> None:
    """As `assert_within_budget` for float32; a gradient in bfloat16 or float16 may be rounded twice, entry by entry.

    Once when it is formed, once when it is multiplied by the upstream gradient: each at most half an ulp.
    """
    if actual.dtype in (torch.float32, torch.float64):
        assert_within_budget(actual, baseline, exact, name=name)
        return
    info = torch.finfo(actual.dtype)
    actual, exact = actual.detach().double().cpu(), exact.detach().double().cpu()
    assert actual.shape == exact.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    if exact.numel() == 0:
        return
    budget = info.eps * exact.abs() + FLOOR * exact.abs().max() + info.smallest_normal * info.eps
    excess = ((actual - exact).abs() / budget).max().item()
    assert excess <= 1, f"{name}: an entry errs {excess:.2f} times its budget of two roundings to {info.dtype}"


def assert_fields(actual, baseline, exact) -> None:
    """Check a `PolicyLoss`: means of terms of order 1, which may cancel, and the log-probs."""
    for name in exact._fields:
        x = getattr(actual, name)
        assert x.dtype == torch.float32, f"{name}: {x.dtype}"
        assert_within_budget(x, getattr(baseline, name), getattr(exact, name), name=name, scale=1.0)
