"""The critic's loss, and how much of the returns it explains (Eq. 10).

Shapes: any leading shape [...]; the kernels see N tokens in a row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vapo_kernels import _formed_gradient
from vapo_kernels._arguments import (
    as_denominator,
    as_mask,
    expect,
    expect_count,
    expect_mask,
    expect_number,
    expect_tensor,
    flat,
)
from vapo_kernels._dispatch import on_device_of, tl, triton, use_triton
from vapo_kernels.ops.whiten import masked_moments

BLOCK = 1024
# Returns whose variance is below this share of their mean square differ by float32 rounding alone.
ROUNDING = 1e-12


class ValueLoss(NamedTuple):
    """The loss, with a gradient to the values, and the share of tokens that the value clip stopped."""

    loss: Tensor
    clip_fraction: Tensor


def value_loss(
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    old_values: Tensor | None = None,
    clip: float | None = None,
    num_tokens: float | Tensor | None = None,
) -> ValueLoss:
    """Squared error of the critic, averaged over the tokens of the optimiser step.

        L_V = (1/num_tokens) Σ_t ½ (V(s_t) − R̂_t)²                                              (Eq. 10)
        clipped: ½ max((V − R̂)², (clip(V, V_old − c, V_old + c) − R̂)²)

    R̂_t is constant: the values inside it come from the rollout, so Eq. 12 (½ Â²) has no useful gradient and
    is never used. A masked position is not read and gets gradient 0; a count below 1 divides by 1. Backward may
    run more than once.

    Args:
        values: [...] floating. V(s_t), with a gradient.
        returns: [...] floating. R̂_t, the target of Eq. 9 with λ_critic.
        mask: [...] bool, integer or float 0/1, True on tokens that the policy sampled.
        old_values: [...] floating. V(s_t) at the rollout; needed with ``clip`` and refused without.
        clip: c > 0, or None for no clip (VAPO's value pretraining needs none).
        num_tokens: True tokens of the whole optimiser step: a number or a 0-dim tensor. None: this call's own.

    Returns:
        ``loss`` and ``clip_fraction`` (share of tokens where the clipped error is the larger), [] float32.

    Raises:
        ValueError: If a shape, dtype, device or range is not as above.

    Example:
        Five tokens with values 0 and returns 0.95ᵏ.

        >>> returns = 0.95 ** torch.arange(4.0, -1.0, -1.0)
        >>> value_loss(torch.zeros(5), returns, torch.ones(5)).loss
        tensor(0.4116)

    Source: PPO, arXiv:1707.06347; value clip, https://github.com/openai/baselines.
    """
    expect(isinstance(values, Tensor), "values", "a tensor", type(values).__name__)
    expect_tensor(values, "values", like=values)
    expect_tensor(returns, "returns", like=values, shape=values.shape)
    expect_mask(mask, "mask", like=values, shape=values.shape)
    expect_count(num_tokens, "num_tokens", like=values)
    if clip is not None:
        expect_number(clip, "clip", "None or a number > 0", low=0, open_low=True)
        expect_tensor(old_values, "old_values", like=values, shape=values.shape)
    expect(clip is not None or old_values is None, "old_values", "None without clip", "a tensor")
    sampled = as_mask(mask)
    tokens = as_denominator(num_tokens, sampled.sum(dtype=torch.float32))
    terms, dvalues = value_loss_op(flat(values), flat(returns), sampled, flat(old_values), tokens, float(clip or 0.0))
    loss, clip_fraction = (terms.sum(1) / tokens).unbind()
    if torch.is_grad_enabled() and values.requires_grad:
        loss = _formed_gradient.attach(loss, [values], [dvalues.view(values.shape)])
    return ValueLoss(loss, clip_fraction)


def value_moments(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Sums from which the explained variance follows, and which add over micro-batches and ranks.

        [n, Σ R̂, Σ R̂², Σ (R̂ − V), Σ (R̂ − V)²]

    An average of explained variances over micro-batches is not the explained variance of the batch: add the
    moments, then call `explained_variance_from`. No gradient; masked positions are not read.

    Args:
        values: [...] floating. V(s_t).
        returns: [...] floating. R̂_t.
        mask: [...] bool, integer or float 0/1, True on tokens that the policy sampled.

    Returns:
        [5] float64.

    Raises:
        ValueError: If a shape, dtype or device is not as above.

    Example:
        >>> value_moments(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0]), torch.tensor([True, True]))
        tensor([ 2.,  6., 20.,  3.,  5.], dtype=torch.float64)

    Source: sums of squares in float64.
    """
    expect(isinstance(values, Tensor), "values", "a tensor", type(values).__name__)
    expect_tensor(values, "values", like=values)
    expect_tensor(returns, "returns", like=values, shape=values.shape)
    expect_mask(mask, "mask", like=values, shape=values.shape)
    return masked_moments(flat(returns), as_mask(mask), flat(values))


def explained_variance_from(moments: Tensor) -> Tensor:
    """1 − Var(R̂ − V) / Var(R̂) from the sums of `value_moments`.

    1 is a perfect critic, 0 one that knows the mean only, below 0 one worse than that. 0 where the returns do not vary
    (nothing to explain) or there is no token.

    Args:
        moments: [5] float64, as `value_moments` returns, or a sum of such.

    Returns:
        [] float64.

    Raises:
        ValueError: If ``moments`` is not [5] float64.

    Example:
        >>> explained_variance_from(torch.tensor([2.0, 6.0, 20.0, 3.0, 5.0], dtype=torch.float64))
        tensor(0.7500, dtype=torch.float64)

    Source: as `value_moments`.
    """
    expect(isinstance(moments, Tensor), "moments", "a tensor", type(moments).__name__)
    expect_tensor(moments, "moments", like=moments, shape=(5,), dtypes=(torch.float64,))
    n, total, square, error, error_square = moments.unbind()
    n = n.clamp(min=1)
    variance = square / n - (total / n).square()
    unexplained = (error_square / n - (error / n).square()).clamp(min=0)
    constant = variance <= ROUNDING * (square / n)
    return torch.where(constant, 0.0 * unexplained, 1 - unexplained / torch.where(constant, 1.0, variance))


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Share of the returns' variance that the critic explains: 1 − Var(R̂ − V) / Var(R̂).

    No gradient. 0 where the returns do not vary or nothing is True.

    Args:
        values: [...] floating. V(s_t).
        returns: [...] floating. R̂_t.
        mask: [...] bool, integer or float 0/1, True on tokens that the policy sampled.

    Returns:
        [] float64, at most 1.

    Raises:
        ValueError: If a shape, dtype or device is not as above.

    Example:
        >>> returns, mask = torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.ones(4)
        >>> explained_variance(torch.tensor([0.5, 0.5, 0.5, 0.5]), returns, mask)
        tensor(0., dtype=torch.float64)
        >>> explained_variance(returns, returns, mask)
        tensor(1., dtype=torch.float64)

    Source: as `value_moments`.
    """
    return explained_variance_from(value_moments(values, returns, mask))


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=[
        "values_ptr", "returns_ptr", "mask_ptr", "old_values_ptr", "num_tokens_ptr", "terms_ptr", "dvalues_ptr",
    ],
)  # fmt: skip
def _value_loss_kernel(
    values_ptr,  # [N]
    returns_ptr,  # [N]
    mask_ptr,  # [N] bool
    old_values_ptr,  # [N], or None
    num_tokens_ptr,  # [] float32
    terms_ptr,  # [2, N] float32: error, is clipped
    dvalues_ptr,  # [N] float32
    num_rows: tl.int64,
    clip,
    HAS_CLIP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program computes the errors and gradients of BLOCK tokens."""
    num_rows = num_rows.to(tl.int64)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_rows
    sampled = tl.load(mask_ptr + offsets, mask=inside, other=0) != 0
    value = tl.load(values_ptr + offsets, mask=sampled, other=0.0).to(tl.float32)
    returns = tl.load(returns_ptr + offsets, mask=sampled, other=0.0).to(tl.float32)
    difference = value - returns
    error = 0.5 * difference * difference  # Eq. 10
    slope = difference
    is_clipped = tl.zeros((BLOCK,), tl.int1)
    if HAS_CLIP:
        old_value = tl.load(old_values_ptr + offsets, mask=sampled, other=0.0).to(tl.float32)
        # The bounds are clamped to, not the difference added back: a value inside them stays itself, bit by bit.
        clipped = tl.where(value > old_value + clip, old_value + clip, value)
        clipped = tl.where(value < old_value - clip, old_value - clip, clipped)
        # A NaN fails every comparison: it is put back, so that it is heard.
        clipped_difference = tl.where(old_value == old_value, clipped, old_value) - returns
        clipped_error = 0.5 * clipped_difference * clipped_difference
        is_clipped = (clipped_error <= error) == 0
        error = tl.where(is_clipped, clipped_error, error)
        slope = tl.where(is_clipped, 0.0 * clipped_difference, slope)
    tl.store(terms_ptr + offsets, error, mask=inside)
    tl.store(terms_ptr + num_rows + offsets, is_clipped.to(tl.float32), mask=inside)
    tl.store(dvalues_ptr + offsets, slope / tl.load(num_tokens_ptr), mask=inside)


@torch.library.custom_op("vapo_kernels::value_loss", mutates_args=())
def value_loss_op(
    values: Tensor, returns: Tensor, mask: Tensor, old_values: Tensor | None, num_tokens: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """(error, is clipped) [2, N] and ∂loss/∂values [N], float32."""
    num_rows = values.numel()
    if not use_triton(values):
        return _value_loss_torch(values, returns, mask, old_values, num_tokens, clip)
    terms = torch.empty(2, num_rows, dtype=torch.float32, device=values.device)
    dvalues = terms.new_empty(num_rows)
    if num_rows > 0:
        with on_device_of(values):
            _value_loss_kernel[(triton.cdiv(num_rows, BLOCK),)](
                values, returns, mask, old_values, num_tokens, terms, dvalues, num_rows, clip,
                HAS_CLIP=old_values is not None, BLOCK=BLOCK,
            )  # fmt: skip
    return terms, dvalues


@value_loss_op.register_fake
def _(values, *_):
    dvalues = torch.empty_like(values, dtype=torch.float32)
    return dvalues.new_empty(2, values.shape[0]), dvalues


def _value_loss_torch(values, returns, mask, old_values, num_tokens, clip) -> tuple[Tensor, Tensor]:
    """The kernel's results in PyTorch."""
    values, returns = values.float().masked_fill(~mask, 0.0), returns.float().masked_fill(~mask, 0.0)
    difference = values - returns
    error, slope, is_clipped = difference.square() / 2, difference, torch.zeros_like(mask)
    if old_values is not None:
        old_values = old_values.float().masked_fill(~mask, 0.0)
        clipped_difference = values.clamp(old_values - clip, old_values + clip) - returns
        clipped_error = clipped_difference.square() / 2
        is_clipped = ~(clipped_error <= error)
        slope = torch.where(is_clipped, 0.0 * clipped_difference, slope)
        error = torch.where(is_clipped, clipped_error, error)
    return torch.stack([error, is_clipped.float()]), slope / num_tokens
