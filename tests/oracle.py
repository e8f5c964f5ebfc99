"""The one tolerance of the project: a kernel may err as PyTorch errs, against a truth in float64."""

import torch
from torch import Tensor

# Rounding of float32 itself, relative to the largest entry: what remains where PyTorch happens to be exact.
FLOOR = 1e-6


def assert_within_budget(
    actual: Tensor, baseline: Tensor, exact: Tensor, *, factor: float = 2.0, floor: float = FLOOR, name: str = "output"
) -> None:
    """Allow ``actual`` at most ``factor`` times the error of ``baseline``, plus ``floor``.

    Errors are the largest over the tensor; ``exact`` is the reference in float64, ``baseline`` the reference in the
    working dtype. What is not finite in ``exact`` must be the same in ``actual``.
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
    budget = factor * baseline_error + floor * exact[finite].abs().max().clamp(min=1e-30).item()
    assert error <= budget, f"{name}: error {error:.3e} > budget {budget:.3e} (PyTorch errs {baseline_error:.3e})"
