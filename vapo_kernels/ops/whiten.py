"""Masked mean and variance.

Shapes: any leading shape [...]; the kernels see N tokens in a row.
"""

import torch
from torch import Tensor

from vapo_kernels._arguments import as_mask, expect, expect_mask, expect_tensor, flat
from vapo_kernels._dispatch import on_device_of, tl, triton, use_triton

BLOCK = 1024
# Tokens of a block on the CPU path: a cache holds it, and PyTorch sums so few in one order for any number of threads.
CPU_BLOCK = 1 << 15
EPSILON = 1e-8


def masked_whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """Scale the True positions to variance 1 and, with ``shift_mean``, mean 0.

        y = (x − mean) / √(var + 1e-8),    mean, var over True positions

    var divides by n − 1 (by 1 where n = 1). Without ``shift_mean`` the mean is divided too, not removed. The
    moments are summed in float64. Tokens where ``mask`` is False are not read. No gradient. The statistics are those of
    this call alone: whiten a batch before it is cut into micro-batches.

    Args:
        x: [...] floating, such as advantages.
        mask: [...] bool, integer or float 0/1, True on tokens that the policy sampled.
        shift_mean: Whether the mean is taken away.

    Returns:
        [...] float32, 0 where ``mask`` is False.

    Raises:
        ValueError: If a shape, dtype or device is not as above.

    Example:
        >>> masked_whiten(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]))
        tensor([-0.7071,  0.7071,  0.0000])

    Source: advantage normalisation, https://github.com/openai/baselines.
    """
    expect(isinstance(x, Tensor), "x", "a tensor", type(x).__name__)
    expect_tensor(x, "x", like=x)
    expect_mask(mask, "mask", like=x, shape=x.shape)
    values, sampled = flat(x), as_mask(mask)
    return whiten_by(masked_moments(values, sampled, None), values, sampled, shift_mean).view(x.shape)


def whiten_by(moments: Tensor, x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """`masked_whiten` of a flat tensor by the moments of a larger whole of which it is a part."""
    n, total, square, _, _ = moments.unbind()
    n = n.clamp(min=1)
    mean = total / n
    variance = (square - total * mean).clamp(min=0) / (n - 1).clamp(min=1)
    scale = torch.rsqrt(variance + EPSILON)
    return whiten_op(x, mask, torch.stack([mean * shift_mean, scale]).float())


def masked_moments(x: Tensor, mask: Tensor, y: Tensor | None) -> Tensor:
    """[n, Σx, Σx², Σ(x − y), Σ(x − y)²] over True positions of flat tensors, float64; y = x where None."""
    return moments_op(x, mask, y).sum(1)


@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["x_ptr", "y_ptr", "mask_ptr", "moments_ptr"]
)
def _moments_kernel(
    x_ptr,  # [N]
    y_ptr,  # [N], or None
    mask_ptr,  # [N] bool
    moments_ptr,  # [5, programs] float64
    num_rows: tl.int64,
    HAS_Y: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program sums BLOCK tokens."""
    program = tl.program_id(0).to(tl.int64)
    offsets = program * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_rows
    sampled = tl.load(mask_ptr + offsets, mask=inside, other=0) != 0
    x = tl.load(x_ptr + offsets, mask=sampled, other=0.0).to(tl.float64)
    out_ptr = moments_ptr + program
    stride = tl.num_programs(0)
    tl.store(out_ptr, tl.sum(sampled.to(tl.float64), 0))
    tl.store(out_ptr + stride, tl.sum(x, 0))
    tl.store(out_ptr + 2 * stride, tl.sum(x * x, 0))
    error = tl.zeros((BLOCK,), tl.float64)
    if HAS_Y:
        error = x - tl.load(y_ptr + offsets, mask=sampled, other=0.0).to(tl.float64)
    tl.store(out_ptr + 3 * stride, tl.sum(error, 0))
    tl.store(out_ptr + 4 * stride, tl.sum(error * error, 0))


@torch.library.custom_op("vapo_kernels::masked_moments", mutates_args=())
def moments_op(x: Tensor, mask: Tensor, y: Tensor | None) -> Tensor:
    """Partial sums [5, blocks] of `masked_moments`."""
    if not use_triton(x):
        return _moments_torch(x, mask, y).unsqueeze(1)
    num_blocks = triton.cdiv(x.numel(), BLOCK)
    moments = torch.empty(5, num_blocks, dtype=torch.float64, device=x.device)
    if num_blocks > 0:
        with on_device_of(x):
            _moments_kernel[(num_blocks,)](
                x, y, mask, moments, x.numel(), HAS_Y=y is not None, BLOCK=BLOCK, num_warps=8
            )
    return moments


def _moments_torch(x: Tensor, mask: Tensor, y: Tensor | None) -> Tensor:
    """The kernel's five sums in PyTorch, a block of tokens at a time."""
    moments = torch.zeros(5, dtype=torch.float64)
    for start in range(0, x.numel(), CPU_BLOCK):
        at = slice(start, start + CPU_BLOCK)
        kept = torch.where(mask[at], x[at], 0.0).double()
        error = kept.new_zeros(()) if y is None else kept - torch.where(mask[at], y[at], 0.0).double()
        moments += torch.stack([mask[at].sum(), kept.sum(), kept.square().sum(), error.sum(), error.square().sum()])
    return moments


@moments_op.register_fake
def _(x, mask, y):
    blocks = (x.numel() + BLOCK - 1) // BLOCK if use_triton(x) else 1
    return torch.empty(5, blocks, dtype=torch.float64, device=x.device)


@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["x_ptr", "mask_ptr", "shift_scale_ptr", "out_ptr"]
)
def _whiten_kernel(
    x_ptr,  # [N]
    mask_ptr,  # [N] bool
    shift_scale_ptr,  # [2] float32
    out_ptr,  # [N] float32
    num_rows: tl.int64,
    BLOCK: tl.constexpr,
):
    """One program shifts and scales BLOCK tokens."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_rows
    sampled = tl.load(mask_ptr + offsets, mask=inside, other=0) != 0
    x = tl.load(x_ptr + offsets, mask=sampled, other=0.0).to(tl.float32)
    y = (x - tl.load(shift_scale_ptr)) * tl.load(shift_scale_ptr + 1)
    tl.store(out_ptr + offsets, tl.where(sampled, y, 0.0), mask=inside)


@torch.library.custom_op("vapo_kernels::whiten", mutates_args=())
def whiten_op(x: Tensor, mask: Tensor, shift_scale: Tensor) -> Tensor:
    """(x − shift)·scale at True positions, 0 elsewhere."""
    if not use_triton(x):
        return _whiten_torch(x, mask, *shift_scale)
    out = torch.empty(x.numel(), dtype=torch.float32, device=x.device)
    if x.numel() > 0:
        with on_device_of(x):
            _whiten_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, mask, shift_scale, out, x.numel(), BLOCK=BLOCK)
    return out


def _whiten_torch(x: Tensor, mask: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """The kernel's result in PyTorch, a block of tokens at a time."""
    out = torch.empty(x.numel())
    for start in range(0, x.numel(), CPU_BLOCK):
        at = slice(start, start + CPU_BLOCK)
        out[at] = torch.where(mask[at], (x[at].float() - shift) * scale, 0.0)
    return out


@whiten_op.register_fake
def _(x, mask, shift_scale):
    return torch.empty_like(x, dtype=torch.float32)
