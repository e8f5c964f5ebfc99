"""Log-probability of each token and entropy of each distribution, from logits (Eq. 2, 4).

Shapes: N rows (tokens), V columns (vocabulary), y the token's column, z = logits / τ.

The row arithmetic is in ``_row_softmax.py``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vapo_kernels._arguments import (
    INDEX_DTYPES,
    as_mask,
    expect,
    expect_mask,
    expect_number,
    expect_tensor,
    expect_values,
    flat,
)
from vapo_kernels._dispatch import on_device_of, tl, triton, use_triton
from vapo_kernels._formed_gradient import refuse_second_derivative
from vapo_kernels._row_softmax import (
    expect_ids_inside,
    is_aligned,
    launch_parameters,
    row_chunks,
    row_ptr_of,
    row_statistics,
    row_strides,
    statistics_of_chunk,
    write_gradient_of_rows,
    write_row_gradient,
)


class TokenLogprobs(NamedTuple):
    """Log-probs and entropies in nats, float32, exactly 0 where the mask is False."""

    logprobs: Tensor
    entropy: Tensor


def token_logprobs(
    logits: Tensor, token_ids: Tensor, *, mask: Tensor | None = None, temperature: float | Tensor = 1.0
) -> TokenLogprobs:
    """Log-probability of each token and entropy of its distribution, without a [N, V] temporary.

        log π(a|s) = z_a − log Σ_j exp z_j,    Ent = −Σ_j p_j log p_j,    z = logits / τ    (Eq. 2, 4)

    Both results are differentiable with respect to ``logits``. The logits are read once forward, read once and
    written once backward; arithmetic is float32 whatever comes in. A log-prob is never above 0, and that of
    a confident token keeps its relative accuracy down to 1 − p = 1e-30. A logit of −inf has probability 0
    and gradient 0. A row where ``mask`` is False is not read: 0 forward, gradient 0. ``logits[..., t, :]``
    must be the distribution that ``token_ids[..., t]`` was sampled from: shift before the call.

    Args:
        logits: [..., V] floating. May be a slice or a view; rows are read in place where V is contiguous.
        token_ids: [...] int32 or int64, in [0, V) where ``mask`` is True.
        mask: [...] bool, integer or float 0/1, True on rows to compute. None: all of them.
        temperature: τ > 0, a number or [...] floating (per token; read where ``mask`` is True). The
            results are those of the scaled logits: pass the temperature that sampled the tokens.

    Returns:
        Log-probs and entropies, [...] float32, exactly 0 where ``mask`` is False.

    Raises:
        ValueError: If a shape, dtype, device or range is not as above. On CUDA tensors a token id outside
            [0, V) gives NaN instead, and nothing is read outside the row.

    Example:
        >>> logits = torch.log(torch.tensor([[0.5, 0.25, 0.25]]))
        >>> out = token_logprobs(logits, torch.tensor([1]))
        >>> out.logprobs, out.entropy
        (tensor([-1.3863]), tensor([1.0397]))

    Source: PPO, arXiv:1707.06347.
    """
    expect_rows(logits, token_ids, mask, temperature)
    temperature_tensor, inv_temperature = split_temperature(temperature)
    logprobs, entropy, _ = token_logprobs_op(
        logits, flat(token_ids), None if mask is None else as_mask(mask), temperature_tensor, inv_temperature
    )
    return TokenLogprobs(logprobs.view(token_ids.shape), entropy.view(token_ids.shape))


def expect_rows(logits: Tensor, token_ids: Tensor, mask: Tensor | None, temperature: float | Tensor) -> None:
    """The checks shared by every op that starts from logits."""
    expect(
        isinstance(logits, Tensor) and logits.dim() >= 1, "logits", "a tensor of shape [..., V]", type(logits).__name__
    )
    expect_tensor(logits, "logits", like=logits)
    expect(logits.shape[-1] > 0, "logits", "at least one column", tuple(logits.shape))
    shape = logits.shape[:-1]
    expect_tensor(token_ids, "token_ids", like=logits, shape=shape, dtypes=INDEX_DTYPES)
    if mask is not None:
        expect_mask(mask, "mask", like=logits, shape=shape)
    expect_temperature(temperature, mask, like=logits, shape=shape)


def expect_temperature(temperature: float | Tensor, mask: Tensor | None, *, like: Tensor, shape: torch.Size) -> None:
    """Check τ: a number > 0, or one for each token, > 0 where the mask is True."""
    if isinstance(temperature, Tensor):
        expect_tensor(temperature, "temperature", like=like, shape=shape)
        good = (temperature > 0) & (temperature < torch.inf)
        good = good if mask is None else good | (mask == 0)
        expect_values(temperature, good, "temperature", "finite numbers > 0 where the mask is True")
    else:
        expect_number(temperature, "temperature", "a number > 0 or a tensor [...]", low=0, open_low=True)


def split_temperature(temperature: float | Tensor) -> tuple[Tensor | None, float]:
    """Per-token temperatures, or None and 1/τ."""
    return (flat(temperature), 1.0) if isinstance(temperature, Tensor) else (None, 1.0 / float(temperature))


@triton.jit(
    do_not_specialize=["num_rows", "inner_rows", "stride_outer", "stride_inner"],
    do_not_specialize_on_alignment=[
        "token_ids_ptr", "mask_ptr", "temperature_ptr", "logprobs_ptr", "entropy_ptr", "statistics_ptr",
    ],
)  # fmt: skip
def _token_logprobs_kernel(
    logits_ptr,  # [N, V]
    token_ids_ptr,  # [N]
    mask_ptr,  # [N] bool, or None
    temperature_ptr,  # [N], or None
    logprobs_ptr,  # [N] float32
    entropy_ptr,  # [N] float32
    statistics_ptr,  # [3, N] float32: reference column, log-sum-exp above it, 1 − p_y
    num_rows: tl.int64,
    inner_rows: tl.int32,
    stride_outer: tl.int64,
    stride_inner: tl.int64,
    inv_temperature,
    V,
    ALIGNED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program computes one row."""
    row = tl.program_id(0).to(tl.int64)
    logprob = 0.0
    entropy = 0.0
    peak = 0.0
    log_sum = 0.0
    p_other = 0.0
    sampled = True
    if HAS_MASK:
        sampled = tl.load(mask_ptr + row) != 0
    if sampled:
        if HAS_TEMPERATURE:
            inv_temperature = 1.0 / tl.load(temperature_ptr + row).to(tl.float32)
        row_ptr = row_ptr_of(logits_ptr, row, inner_rows, stride_outer, stride_inner, ALIGNED)
        token = tl.load(token_ids_ptr + row)
        logprob, entropy, peak, log_sum, p_other = row_statistics(row_ptr, token, inv_temperature, V, BLOCK)
    tl.store(logprobs_ptr + row, logprob)
    tl.store(entropy_ptr + row, entropy)
    num_rows = num_rows.to(tl.int64)
    tl.store(statistics_ptr + row, peak)
    tl.store(statistics_ptr + num_rows + row, log_sum)
    tl.store(statistics_ptr + 2 * num_rows + row, p_other)


@triton.jit(
    do_not_specialize=["num_rows", "inner_rows", "stride_outer", "stride_inner"],
    do_not_specialize_on_alignment=[
        "dlogprobs_ptr", "dentropy_ptr", "token_ids_ptr", "mask_ptr", "temperature_ptr", "entropy_ptr",
        "statistics_ptr",
    ],
)  # fmt: skip
def _token_logprobs_backward_kernel(
    dlogprobs_ptr,  # [N]
    dentropy_ptr,  # [N]
    logits_ptr,  # [N, V]
    token_ids_ptr,  # [N]
    mask_ptr,  # [N] bool, or None
    temperature_ptr,  # [N], or None
    entropy_ptr,  # [N] float32
    statistics_ptr,  # [3, N] float32
    dlogits_ptr,  # [N, V], contiguous
    num_rows: tl.int64,
    inner_rows: tl.int32,
    stride_outer: tl.int64,
    stride_inner: tl.int64,
    inv_temperature,
    V,
    ALIGNED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program computes the gradient of one row."""
    row = tl.program_id(0).to(tl.int64)
    a = 0.0
    b = 0.0
    sampled = True
    if HAS_MASK:
        sampled = tl.load(mask_ptr + row) != 0
    if sampled:
        a = -tl.load(dlogprobs_ptr + row).to(tl.float32)
        b = -tl.load(dentropy_ptr + row).to(tl.float32)
        if HAS_TEMPERATURE:
            inv_temperature = 1.0 / tl.load(temperature_ptr + row).to(tl.float32)
    num_rows = num_rows.to(tl.int64)
    row_ptr = row_ptr_of(logits_ptr, row, inner_rows, stride_outer, stride_inner, ALIGNED)
    out_ptr = row_ptr_of(dlogits_ptr, row, 1, V, 0, ALIGNED)
    write_row_gradient(
        row_ptr, out_ptr, tl.load(token_ids_ptr + row), a, b, tl.load(entropy_ptr + row),
        tl.load(statistics_ptr + row), tl.load(statistics_ptr + num_rows + row),
        tl.load(statistics_ptr + 2 * num_rows + row), inv_temperature, V, BLOCK,
    )  # fmt: skip


@torch.library.custom_op("vapo_kernels::token_logprobs", mutates_args=())
def token_logprobs_op(
    logits: Tensor, token_ids: Tensor, mask: Tensor | None, temperatures: Tensor | None, inv_temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs [N], entropies [N] and the rest of `row_statistics` [3, N] of the rows of logits [..., V]."""
    expect_ids_inside(token_ids, mask, logits.shape[-1])
    return compute_statistics(logits, token_ids, mask, temperatures, inv_temperature)


@token_logprobs_op.register_fake
def _(logits, token_ids, *_):
    rows = torch.empty_like(token_ids, dtype=torch.float32)
    return rows, torch.empty_like(rows), rows.new_empty(3, rows.shape[0])


def compute_statistics(logits, token_ids, mask, temperatures, inv_temperature) -> tuple[Tensor, Tensor, Tensor]:
    """The results of `token_logprobs_op`, whose checks have been made."""
    num_rows, V = token_ids.numel(), logits.shape[-1]
    if not use_triton(logits):
        return _token_logprobs_torch(logits, token_ids, mask, temperatures, inv_temperature)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    entropy, statistics = torch.empty_like(logprobs), logprobs.new_empty(3, num_rows)
    rows, inner_rows, stride_outer, stride_inner = row_strides(logits)
    if num_rows > 0:
        with on_device_of(logits):
            _token_logprobs_kernel[(num_rows,)](
                rows, token_ids, mask, temperatures, logprobs, entropy, statistics, num_rows,
                inner_rows, stride_outer, stride_inner, inv_temperature, V,
                ALIGNED=is_aligned(stride_outer, stride_inner), HAS_MASK=mask is not None,
                HAS_TEMPERATURE=temperatures is not None, **launch_parameters(V),
            )  # fmt: skip
    return logprobs, entropy, statistics


@torch.library.custom_op("vapo_kernels::token_logprobs_backward", mutates_args=())
def token_logprobs_backward_op(
    dlogprobs: Tensor,
    dentropy: Tensor,
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    temperatures: Tensor | None,
    inv_temperature: float,
    entropy: Tensor,
    statistics: Tensor,
) -> Tensor:
    """∂L/∂logits, contiguous."""
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    write_gradient(
        dlogits, dlogprobs, dentropy, logits, token_ids, mask, temperatures, inv_temperature, entropy, statistics
    )
    return dlogits


@token_logprobs_backward_op.register_fake
def _(dlogprobs, dentropy, logits, *_):
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def write_gradient(
    dlogits, dlogprobs, dentropy, logits, token_ids, mask, temperatures, inv_temperature, entropy, statistics
) -> None:
    """∂L/∂logits from upstream gradients [N], into contiguous ``dlogits``, which may be ``logits``."""
    num_rows, V = token_ids.numel(), logits.shape[-1]
    # An expanded upstream gradient has stride 0.
    dlogprobs, dentropy = dlogprobs.contiguous(), dentropy.contiguous()
    if not use_triton(logits):
        for rows, at in row_chunks(logits):
            sampled = slice(None) if mask is None else mask[at]
            tau = inv_temperature if temperatures is None else 1 / temperatures[at].float()
            a, b = -dlogprobs[at].float(), -dentropy[at].float()
            if mask is not None:
                a, b = a.masked_fill(~sampled, 0.0), b.masked_fill(~sampled, 0.0)
            out = dlogits.view(-1, V)[at]
            write_gradient_of_rows(rows, out, token_ids[at], a, b, entropy[at], *statistics[:, at], tau)
        return
    rows, inner_rows, stride_outer, stride_inner = row_strides(logits)
    if num_rows > 0:
        with on_device_of(logits):
            _token_logprobs_backward_kernel[(num_rows,)](
                dlogprobs, dentropy, rows, token_ids, mask, temperatures, entropy, statistics, dlogits, num_rows,
                inner_rows, stride_outer, stride_inner, inv_temperature, V,
                ALIGNED=is_aligned(stride_outer, stride_inner, V),
                HAS_MASK=mask is not None, HAS_TEMPERATURE=temperatures is not None, **launch_parameters(V),
            )  # fmt: skip


def _save_for_backward(ctx, inputs, output):
    logits, token_ids, mask, temperatures, ctx.inv_temperature = inputs
    _, entropy, statistics = output
    ctx.save_for_backward(logits, token_ids, mask, temperatures, entropy, statistics)


def _backward(ctx, dlogprobs, dentropy, _):
    refuse_second_derivative("token_logprobs")
    logits, token_ids, mask, temperatures, entropy, statistics = ctx.saved_tensors
    dlogits = token_logprobs_backward_op(
        dlogprobs, dentropy, logits, token_ids, mask, temperatures, ctx.inv_temperature, entropy, statistics
    )
    return dlogits, None, None, None, None


token_logprobs_op.register_autograd(_backward, setup_context=_save_for_backward)


def _token_logprobs_torch(logits, token_ids, mask, temperatures, inv_temperature) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel's results in PyTorch, a chunk of True rows at a time."""
    results = torch.zeros(5, token_ids.numel())
    for rows, at in row_chunks(logits):
        tau = inv_temperature if temperatures is None else 1 / temperatures[at].float()
        ids, positions = token_ids[at], torch.arange(at.start, at.stop)
        if mask is not None and not mask[at].all():
            keep = mask[at].nonzero().squeeze(1)
            rows, ids, positions = rows[keep], ids[keep], positions[keep]
            tau = tau[keep] if isinstance(tau, Tensor) else tau
        if len(rows) > 0:
            results[:, positions] = torch.stack(statistics_of_chunk(rows, ids, tau))
    return results[0].clone(), results[1].clone(), results[2:].clone()
