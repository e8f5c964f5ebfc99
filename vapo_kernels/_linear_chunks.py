"""Logits of a linear head, a chunk of rows at a time, and the gradients that go back through it.

Shapes: N rows, H hidden features, V columns; logits = hidden Wᵀ + bias.

A chunk's logits live in one buffer of at most LOGITS_BUFFER_BYTES, which the next chunk reuses: no [N, V]
tensor exists. The GEMMs are the vendor's.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from vapo_kernels._arguments import expect, expect_tensor

LOGITS_BUFFER_BYTES = 1 << 28
# Rows of W whose gradient is formed at once, which bounds the product's temporary.
WEIGHT_ROWS = 1 << 14


class LinearGradients(NamedTuple):
    """∂L/∂hidden in its dtype, ∂L/∂W and ∂L/∂bias in float32; None where not asked for."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    def needed(self, sum_dtype: torch.dtype) -> list[Tensor]:
        """Those that were asked for, sums over tokens in ``sum_dtype``."""
        return [x if x is self.hidden else x.to(sum_dtype) for x in self if x is not None]


def expect_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """The checks of a linear head."""
    expect(
        isinstance(hidden, Tensor) and hidden.dim() >= 1, "hidden", "a tensor of shape [..., H]", type(hidden).__name__
    )
    expect_tensor(hidden, "hidden", like=hidden)
    expect_tensor(weight, "weight", like=hidden, dtypes=(hidden.dtype,))
    good = weight.dim() == 2 and weight.shape[1] == hidden.shape[-1] and weight.shape[0] > 0
    expect(good, "weight", f"shape [V, {hidden.shape[-1]}]", tuple(weight.shape))
    if bias is not None:
        expect_tensor(bias, "bias", like=hidden, shape=weight.shape[:1], dtypes=(hidden.dtype,))


def autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors as an enabled ``torch.autocast`` region would give them to a linear layer."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x.to(dtype) if x is not None and x.is_floating_point() else x for x in tensors)


def rows_per_chunk(num_columns: int, dtype: torch.dtype) -> int:
    """Rows whose logits fit the buffer: a multiple of 128 where there are so many, at least 1."""
    rows = max(1, LOGITS_BUFFER_BYTES // (num_columns * dtype.itemsize))
    return rows - rows % 128 if rows >= 128 else rows


def logits_chunks(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[tuple[Tensor, slice]]:
    """Yield the logits of each chunk of rows of hidden [N, H], in a buffer that the next chunk overwrites."""
    num_rows, step = len(hidden), rows_per_chunk(len(weight), hidden.dtype)
    buffer = hidden.new_empty(min(step, num_rows), len(weight))
    for start in range(0, num_rows, step):
        at = slice(start, min(start + step, num_rows))
        logits = buffer[: at.stop - start]
        if bias is None:
            torch.mm(hidden[at], weight.t(), out=logits)
        else:
            torch.addmm(bias, hidden[at], weight.t(), out=logits)
        yield logits, at


def part(x: Tensor | None, at: slice) -> Tensor | None:
    """A chunk's rows of a per-token argument that may be absent."""
    return None if x is None else x[at]


def empty_gradients(hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: list[bool]) -> LinearGradients:
    """Room for the gradients that are needed: of hidden, weight, bias."""
    float32 = {"dtype": torch.float32}
    return LinearGradients(
        torch.empty_like(hidden) if needed[0] else None,
        torch.zeros_like(weight, **float32) if needed[1] else None,
        torch.zeros_like(bias, **float32) if needed[2] else None,
    )


def fake_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: list[bool], sum_dtype: torch.dtype
) -> list[Tensor]:
    """Shapes and dtypes of `LinearGradients.needed`."""
    dtypes = (hidden.dtype, sum_dtype, sum_dtype)
    inputs = zip((hidden, weight, bias), dtypes, needed, strict=True)
    return [torch.empty_like(x, dtype=dtype) for x, dtype, is_needed in inputs if is_needed]


def accumulate(
    gradients: LinearGradients, dlogits: Tensor, hidden: Tensor, weight: Tensor, mask: Tensor | None, at: slice
) -> None:
    """Add a chunk's share: ∂hidden = ∂logits W, ∂W += ∂logitsᵀ hidden in float32, ∂bias += Σ ∂logits."""
    if gradients.hidden is not None:
        torch.mm(dlogits, weight, out=gradients.hidden[at])
    if gradients.weight is not None:
        rows = hidden[at]
        if mask is not None:
            # The zero gradient of a masked row times a NaN in its hidden state would be NaN.
            rows = rows.masked_fill(~mask[at].unsqueeze(1), 0.0)
        for start in range(0, len(weight), WEIGHT_ROWS):
            columns = slice(start, start + WEIGHT_ROWS)
            _add_product(gradients.weight[columns], dlogits[:, columns].t(), rows)
    if gradients.bias is not None:
        gradients.bias.add_(dlogits.sum(0, dtype=torch.float32))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left right, in float32."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif left.is_cuda and torch.version.hip is None and hasattr(torch.ops.aten.mm, "dtype"):
        total.add_(torch.mm(left, right, out_dtype=torch.float32))
    elif left.is_cuda:
        total.add_(left @ right)
    else:
        total.addmm_(left.float(), right.float())
