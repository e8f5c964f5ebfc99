"""A loss whose gradient was formed together with it.

An op that has a row of logits at hand can write ∂loss/∂logits right away instead of reading the row again
in backward. `attach` ties such a gradient to the loss: backward multiplies it by the upstream gradient.
"""

import torch
from torch import Tensor

from vapo_kernels._dispatch import on_device_of, tl, triton, use_triton
from vapo_kernels._row_softmax import is_aligned, row_ptr_of, row_strides

BLOCK = 4096


def attach(
    loss: Tensor, inputs: list[Tensor], gradients: list[Tensor], *, scale: Tensor | None = None, in_place: bool = False
) -> Tensor:
    """``loss`` with ∂loss/∂inputs[i] = gradients[i] / scale.

    With ``in_place`` backward scales the gradients where they lie (and not at all where the factor is 1), so it
    runs once, and the gradients may be written after the call; without, it leaves them and may run again.
    """
    scale = loss.new_ones(()) if scale is None else scale
    return _attach_op(loss.detach(), inputs, [gradient.detach() for gradient in gradients], scale, in_place)


@torch.library.custom_op("vapo_kernels::attach_gradient", mutates_args=())
def _attach_op(loss: Tensor, inputs: list[Tensor], gradients: list[Tensor], scale: Tensor, in_place: bool) -> Tensor:
    return loss.clone()


@_attach_op.register_fake
def _(loss, inputs, gradients, scale, in_place):
    return torch.empty_like(loss)


def _save_for_backward(ctx, inputs, output):
    _, variables, gradients, scale, ctx.in_place = inputs
    ctx.dtypes, ctx.has_run = [x.dtype for x in variables], False
    # As an attribute a gradient may still be written; the graph frees it when backward has given it away.
    ctx.gradients = gradients if ctx.in_place else None
    ctx.save_for_backward(scale, *([] if ctx.in_place else gradients))


def _backward(ctx, dloss):
    if ctx.has_run:
        raise RuntimeError(
            "the gradient of this loss was formed in forward and given away by the first backward: call the loss again"
        )
    refuse_second_derivative("this loss")
    ctx.has_run = ctx.in_place
    scale, *gradients = ctx.saved_tensors
    factor = (dloss / scale).float()
    if ctx.in_place:
        gradients, ctx.gradients = ctx.gradients, None
        for gradient in gradients:
            rescale_op(gradient, factor)
    else:
        gradients = [gradient * factor.to(gradient.dtype) for gradient in gradients]
    gradients = [gradient.to(dtype) for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)]
    return None, gradients, [None] * len(gradients), None, None


def refuse_second_derivative(name: str) -> None:
    """A backward pass that is itself recorded (create_graph=True) would give zeros: refuse it."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(f"{name}: no second derivative; call backward without create_graph")


_attach_op.register_autograd(_backward, setup_context=_save_for_backward)


@triton.jit(
    do_not_specialize=["numel", "inner_rows", "stride_outer", "stride_inner"],
    do_not_specialize_on_alignment=["factor_ptr"],
)
def _rescale_kernel(
    x_ptr,  # [N, V]
    factor_ptr,  # []
    numel: tl.int64,
    inner_rows: tl.int32,
    stride_outer: tl.int64,
    stride_inner: tl.int64,
    V,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program multiplies one row by the factor, or moves nothing where the factor is 1."""
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        row_ptr = row_ptr_of(x_ptr, row, inner_rows, stride_outer, stride_inner, ALIGNED)
        left = numel.to(tl.int64) - row * V
        if ALIGNED:
            left = tl.multiple_of(left, 16)
        for first in range(0, V, BLOCK):
            offsets = first + tl.arange(0, BLOCK)
            inside = (offsets < V) & (offsets < left)
            x = tl.load(row_ptr + offsets, mask=inside, other=0.0).to(tl.float32) * factor
            tl.store(row_ptr + offsets, x.to(x_ptr.dtype.element_ty), mask=inside)


@torch.library.custom_op("vapo_kernels::rescale_", mutates_args=("x",))
def rescale_op(x: Tensor, factor: Tensor) -> None:
    """x ← factor·x, reading and writing nothing where the factor is 1."""
    if x.numel() == 0:
        return
    if not use_triton(x):
        if factor != 1:
            x.mul_(factor.to(x.dtype) if x.dtype == torch.float64 else factor)
        return
    if x.is_contiguous():
        rows, V = -(-x.numel() // BLOCK), BLOCK
        inner_rows, stride_outer, stride_inner = rows, 0, BLOCK
    else:
        V = x.shape[-1]
        rows = x.numel() // V
        _, inner_rows, stride_outer, stride_inner = row_strides(x)
    with on_device_of(x):
        _rescale_kernel[(rows,)](
            x, factor, x.numel(), inner_rows, stride_outer, stride_inner, V,
            ALIGNED=is_aligned(stride_outer, stride_inner, x.shape[-1]), BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip


@rescale_op.register_fake
def _(x, factor):
    return None
