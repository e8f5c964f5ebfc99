"""The softmax of one row of logits: its statistics, and the gradient of what depends on it.

Shapes: N rows (tokens), V columns (vocabulary), y the token's column, z = logits / τ.

Every op that starts from logits calls these, so there is one log-sum-exp loop and one gradient loop:

    d = log Σ_{j≠y} exp(z_j − z_y),    log p_y = −softplus(d),    1 − p_y = σ(d)
    ∂L/∂z_j = a (p_j − 1[j = y]) + b p_j (log p_j + Ent),    a = −∂L/∂log p_y,  b = −∂L/∂Ent

The sum over the *other* columns keeps log p_y and 1 − p_y accurate to their own size when p_y is near 1.
"""

import torch
from torch import Tensor

from vapo_kernels._arguments import expect
from vapo_kernels._dispatch import tl, triton

# Columns that a program holds at once.
BLOCK_V = 4096
WARP_LANES = 64 if torch.version.hip else 32
# Elements of a chunk of rows on the CPU path: 4 MiB of float32.
CHUNK_ELEMENTS = 1 << 20


def row_strides(logits: Tensor) -> tuple[Tensor, int, int, int]:
    """``logits`` and (I, outer stride, inner stride): row r starts at (r // I)·outer + (r % I)·inner stride.

    Slices such as ``logits[:, :-1]`` are read where they lie; only a layout that needs more than two
    strides, or has columns apart, is copied.
    """
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        logits = logits.contiguous()
    if logits.dim() == 1:
        return logits, 1, 0, 0
    if logits.dim() == 3 and 1 not in logits.shape[:2] and logits.stride(0) != logits.stride(1) * logits.shape[1]:
        return logits, max(logits.shape[1], 1), logits.stride(0), logits.stride(1)
    if logits.dim() > 2:
        rows = logits.reshape(-1, logits.shape[-1])
        return rows, max(len(rows), 1), 0, rows.stride(0)
    return logits, max(len(logits), 1), 0, logits.stride(0)


@triton.jit
def row_ptr_of(ptr, row, inner_rows, stride_outer, stride_inner, ALIGNED: tl.constexpr):
    """Start of a row, in 64-bit arithmetic; ALIGNED lets the compiler use 128-bit loads and stores."""
    # A 64-bit division is a function call on NVIDIA; a grid has fewer than 2³¹ rows, so 32 bits hold the row.
    row = row.to(tl.int32)
    offset = (row // inner_rows).to(tl.int64) * stride_outer + (row % inner_rows).to(tl.int64) * stride_inner
    return ptr + (tl.multiple_of(offset, 16) if ALIGNED else offset)


@triton.jit
def log1p_unit(x):
    """log(1 + x) for x in [0, 1] to float32 accuracy: 2 atanh(s), s = x/(2 + x) ≤ 1/3, by its series."""
    s = x / (2.0 + x)
    q = s * s
    series = 1.0 / 13.0
    series = series * q + 1.0 / 11.0
    series = series * q + 1.0 / 9.0
    series = series * q + 1.0 / 7.0
    series = series * q + 1.0 / 5.0
    series = series * q + 1.0 / 3.0
    return 2.0 * s * (series * q + 1.0)


@triton.jit
def row_statistics(row_ptr, token, inv_temperature, V, BLOCK: tl.constexpr):
    """(log p_y, Ent, reference column, log-sum-exp above it, 1 − p_y) of one row: the only log-sum-exp loop."""
    columns = tl.arange(0, BLOCK)
    # A token id outside the row is not read; the NaN in its place reaches every result. The load stands before
    # the loop because the loop's reductions are barriers: after them a gradient may overwrite the row.
    z_token = (
        tl.load(row_ptr + token, mask=(token >= 0) & (token < V), other=float("nan")).to(tl.float32) * inv_temperature
    )
    # As in any softmax +inf is NaN, which the sum over the other columns would not show.
    z_token = tl.where(z_token == float("inf"), float("nan"), z_token)
    token = token.to(tl.int32)
    max_other = -float("inf")
    # Per lane Σ exp(z − m) and Σ exp(z − m)(z − m) over the other columns, m their maximum so far.
    sums = tl.zeros((BLOCK,), tl.float32)
    moments = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, V, BLOCK):
        offsets = first + columns
        z = tl.load(row_ptr + offsets, mask=offsets < V, other=-float("inf")).to(tl.float32) * inv_temperature
        z = tl.where(offsets == token, -float("inf"), z)
        new_max = tl.maximum(max_other, tl.max(z, 0))
        # Until a finite column comes, m = 0 serves: −inf − (−inf) would be NaN.
        m = tl.where(new_max == -float("inf"), 0.0, new_max)
        # exp(−1e4) is 0 already, and a shift of −inf would make 0 · (−inf).
        shift = tl.maximum(max_other - m, -1e4)
        e = tl.exp(z - m)
        scale = tl.exp(shift)
        moments = scale * (moments + shift * sums) + tl.where(e == 0.0, 0.0, e * (z - m))
        sums = scale * sums + e
        max_other = new_max
    # 0 without any other finite column, at least 1 with one. Its logarithm and its inverse are not used where it is 0.
    other = tl.sum(sums, 0)
    log_other = tl.log(other)
    d = tl.where(other == 0.0, -float("inf") - z_token, (max_other - z_token) + log_other)
    tail = tl.exp(-tl.abs(d))
    log1p_tail = log1p_unit(tail)
    logprob = 0.0 - (tl.where(d > 0.0, d, 0.0) + log1p_tail)
    p_other = tl.where(d > 0.0, 1.0, tail) / (1.0 + tail)
    p_token = tl.where(d > 0.0, tail, 1.0) / (1.0 + tail)
    # The log-sum-exp is kept relative to a column: as a number by itself it would round at the size of the logits.
    peak = tl.where(d > 0.0, max_other, z_token)
    log_sum = tl.where(d > 0.0, log_other + log1p_tail, 0.0 - logprob)
    mean_other = tl.sum(moments, 0) / other
    entropy = tl.where(p_token == 0.0, 0.0, -p_token * logprob)
    entropy += tl.where(p_other == 0.0, 0.0, p_other * (((peak - max_other) + log_sum) - mean_other))
    return logprob, entropy, peak, log_sum, p_other


@triton.jit
def write_row_gradient(
    row_ptr, out_ptr, token, a, b, entropy, peak, log_sum, p_other, inv_temperature, V, BLOCK: tl.constexpr
):
    """∂L/∂logits of one row from its scalars; a row with a = b = 0 is zeroed and not read, if its softmax is no NaN."""
    columns = tl.arange(0, BLOCK)
    token = token.to(tl.int32)
    dtype = out_ptr.dtype.element_ty
    if (a == 0.0) & (b == 0.0) & (log_sum == log_sum):
        for first in range(0, V, BLOCK):
            offsets = first + columns
            tl.store(out_ptr + offsets, tl.zeros((BLOCK,), dtype), mask=offsets < V)
    else:
        # From the end, where a sweep that came just before has left the row in cache.
        num_blocks = tl.cdiv(V, BLOCK)
        for step in range(0, num_blocks):
            offsets = (num_blocks - 1 - step) * BLOCK + columns
            z = tl.load(row_ptr + offsets, mask=offsets < V, other=-float("inf")).to(tl.float32) * inv_temperature
            logp = (z - peak) - log_sum
            p = tl.exp(logp)
            p_minus_onehot = tl.where(offsets == token, -p_other, p)
            dz = a * p_minus_onehot + b * tl.where(p == 0.0, 0.0, p * (logp + entropy))
            tl.store(out_ptr + offsets, (dz * inv_temperature).to(dtype), mask=offsets < V)


def launch_parameters(V: int) -> dict:
    """Block and warps for rows of V columns; with 8 columns a thread no variant spills or needs over 64 registers."""
    block = min(BLOCK_V, triton.next_power_of_2(V))
    return {"BLOCK": block, "num_warps": max(1, block // (8 * WARP_LANES))}


def is_aligned(*strides: int) -> bool:
    """Whether every row starts at a multiple of 16 elements."""
    return all(stride % 16 == 0 for stride in strides)


def expect_ids_inside(token_ids: Tensor, mask: Tensor | None, V: int) -> None:
    """On the CPU, refuse an unmasked token id outside [0, V); elsewhere that would wait for the device."""
    if token_ids.is_cuda:
        return
    outside = (token_ids < 0) | (token_ids >= V)
    outside = outside if mask is None else outside & mask
    if outside.any():
        expect(False, "token_ids", f"ids in [0, {V}) where the mask is True", int(token_ids[outside][0]))


def row_chunks(logits: Tensor):
    """Yield ([n, V] view of logits, slice of its rows): chunks that a cache holds, read where they lie."""
    V = logits.shape[-1]
    views = logits.unbind(0) if row_strides(logits)[2] else [logits.reshape(-1, V)]
    rows_per_chunk, start = max(1, CHUNK_ELEMENTS // V), 0
    for view in views:
        for rows in view.split(rows_per_chunk):
            yield rows, slice(start, start + len(rows))
            start += len(rows)


def statistics_of_chunk(rows: Tensor, token_ids: Tensor, inv_temperature: float | Tensor) -> tuple[Tensor, ...]:
    """`row_statistics` of a chunk of rows in PyTorch."""
    if len(rows) == 1:
        # A lone row would be summed in another order than the same row among others.
        return tuple(x[:1] for x in statistics_of_chunk(rows.expand(2, -1), token_ids.expand(2), inv_temperature))
    column = token_ids.long().unsqueeze(1)
    z = scaled(rows, inv_temperature)
    z_token = z.gather(1, column).squeeze(1)
    z_token = z_token.masked_fill(z_token == torch.inf, torch.nan)
    z.scatter_(1, column, -torch.inf)
    m = z.amax(1)
    m = m.masked_fill(m == -torch.inf, 0.0)
    z -= m.unsqueeze(1)
    e = z.exp()
    other = e.sum(1)
    # exp(−1e4) is 0 already, and 0 · (−inf) would be NaN.
    moment = z.clamp_(min=-1e4).mul_(e).sum(1)

    log_other = other.masked_fill(other == 0, 1.0).log()
    d = torch.where(other == 0, -torch.inf - z_token, (m - z_token) + log_other)
    tail = (-d.abs()).exp()
    logprob = 0.0 - (d.clamp(min=0) + tail.log1p())
    p_other, p_token = torch.where(d > 0, 1.0, tail) / (1 + tail), torch.where(d > 0, tail, 1.0) / (1 + tail)
    peak, log_sum = torch.where(d > 0, m, z_token), torch.where(d > 0, log_other + tail.log1p(), 0.0 - logprob)
    mean_other = moment / other.masked_fill(other == 0, 1.0)
    entropy = torch.where(p_token == 0, 0.0, -p_token * logprob)
    entropy += torch.where(p_other == 0, 0.0, p_other * (((peak - m) + log_sum) - mean_other))
    return logprob, entropy, peak, log_sum, p_other


def write_gradient_of_rows(rows, out, token_ids, a, b, entropy, peak, log_sum, p_other, inv_temperature) -> None:
    """`write_row_gradient` of a chunk of rows in PyTorch."""
    column = token_ids.long().unsqueeze(1)
    zero = (a == 0) & (b == 0) & ~log_sum.isnan()
    column = column.masked_fill(zero.unsqueeze(1), 0)
    logp = scaled(rows, inv_temperature).sub_(peak.unsqueeze(1)).sub_(log_sum.unsqueeze(1))
    p = logp.exp()
    dz = p * a.unsqueeze(1)
    dz.scatter_(1, column, (-a * p_other).unsqueeze(1))
    if bool((b != 0).any()):
        dz += logp.clamp_(min=-1e4).add_(entropy.unsqueeze(1)).mul_(p).mul_(b.unsqueeze(1))
    dz *= inv_temperature.unsqueeze(1) if isinstance(inv_temperature, Tensor) else inv_temperature
    out.copy_(dz.masked_fill_(zero.unsqueeze(1), 0.0))


def scaled(rows: Tensor, inv_temperature: float | Tensor) -> Tensor:
    """A fresh float32 copy of the rows, divided by the temperature."""
    # Columns side by side: PyTorch sums columns that lie apart in another order.
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    return rows.float() * (inv_temperature.unsqueeze(1) if isinstance(inv_temperature, Tensor) else inv_temperature)
