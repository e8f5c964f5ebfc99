"""Checks that every op makes of its arguments before any work, and the forms that kernels take them in."""

import math

import torch
from torch import Tensor

INDEX_DTYPES = (torch.int64, torch.int32)
MASK_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def expect(condition: bool, name: str, expected: str, got: object) -> None:
    """Raise the ValueError that every bad argument ends in."""
    if not condition:
        raise ValueError(f"{name}: expected {expected}, got {got}")


def expect_tensor(
    x: object, name: str, *, like: Tensor, shape: torch.Size | tuple | None = None, dtypes: tuple | None = None
) -> None:
    """Check that ``x`` is a tensor on the device of ``like``, of the shape and one of the dtypes (None: floating)."""
    expect(isinstance(x, Tensor), name, "a tensor", type(x).__name__)
    expect(x.device == like.device, name, f"a tensor on {like.device}", f"one on {x.device}")
    if shape is not None:
        expect(tuple(x.shape) == tuple(shape), name, f"shape {tuple(shape)}", tuple(x.shape))
    if dtypes is None:
        expect(x.is_floating_point(), name, "a floating dtype", x.dtype)
    else:
        expect(x.dtype in dtypes, name, "one of " + ", ".join(str(d).removeprefix("torch.") for d in dtypes), x.dtype)


def expect_mask(x: object, name: str, *, like: Tensor, shape: torch.Size | tuple) -> None:
    """Check a mask: bool, integer or float 0/1 of the given shape."""
    expect(isinstance(x, Tensor), name, "a tensor", type(x).__name__)
    dtypes = (x.dtype,) if x.is_floating_point() else MASK_DTYPES
    expect_tensor(x, name, like=like, shape=shape, dtypes=dtypes)
    if x.dtype != torch.bool:
        expect_values(x, (x == 0) | (x == 1), name, "0 and 1 alone (an additive mask is none)")


def expect_values(x: Tensor, good: Tensor, name: str, expected: str) -> None:
    """Check the values of a CPU tensor outside a compiled function: elsewhere that would wait for the device."""
    if x.device.type != "cpu" or torch.compiler.is_compiling() or bool(good.all()):
        return
    expect(False, name, expected, x[~good][0].item())


def expect_number(
    x: object, name: str, expected: str, *, low: float = -math.inf, high: float = math.inf, open_low: bool = False
) -> None:
    """Check that ``x`` is a finite number in [low, high], or (low, high]."""
    is_number = isinstance(x, int | float | torch.SymInt | torch.SymFloat) and not isinstance(x, bool)
    # Comparisons alone: a compiler can trace them, unlike math.isfinite. NaN fails them.
    if not (is_number and -math.inf < x < math.inf and (low < x if open_low else low <= x) and x <= high):
        expect(False, name, expected, repr(x))


def expect_count(x: object, name: str, *, like: Tensor) -> None:
    """Check a token count of the optimiser step: None, a number ≥ 0, or a 0-dim tensor on the device of ``like``."""
    if isinstance(x, Tensor):
        expect(x.dim() == 0, name, "a 0-dim tensor", f"shape {tuple(x.shape)}")
        expect(x.device == like.device, name, f"a tensor on {like.device}", f"one on {x.device}")
    elif x is not None:
        expect_number(x, name, "None, a number ≥ 0 or a 0-dim tensor", low=0)


def as_mask(x: Tensor) -> Tensor:
    """A flat contiguous bool tensor, True where ``x`` is not 0."""
    return (x if x.dtype == torch.bool else x != 0).reshape(-1).contiguous()


def flat(x: Tensor | None) -> Tensor | None:
    """``x`` without its gradient, as one contiguous dimension."""
    return None if x is None else x.detach().reshape(-1).contiguous()


def as_denominator(count: int | float | Tensor | None, own: Tensor) -> Tensor:
    """The count that a mean divides by, float32 0-dim on the device of ``own``, at least 1; no host sync."""
    if count is None:
        count = own
    elif not isinstance(count, Tensor):
        count = torch.full((), float(count), dtype=torch.float32, device=own.device)
    return count.detach().to(torch.float32).clamp(min=1)
