"""What one token adds to the policy loss, and their sums over tokens (Eq. 3, 4, 16, 17).

Every token's share of the loss and its derivative depend on the log-prob alone, so the ops from logits,
from hidden states and from log-probs meet here.
"""

from typing import NamedTuple

import torch
from torch import Tensor

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
from vapo_kernels._dispatch import tl, triton

# |log ratio| beyond this is a broken batch; e^20 is finite, so no inf · 0 appears in backward.
MAX_LOG_RATIO = 20.0
MAX_LOG_RATIO_CONSTEXPR = tl.constexpr(MAX_LOG_RATIO) if tl.constexpr else MAX_LOG_RATIO
# Rows of the tensor of terms, in the order of the fields of `PolicyLoss`.
NUM_TERMS = 6


class PolicyLoss(NamedTuple):
    """The loss and what it is made of; ``loss`` is the one field with a gradient.

    Attributes:
        loss: [] The number to minimise (Eq. 17).
        policy: [] −L^CLIP, the token mean of the clipped surrogate (Eq. 3).
        positive_nll: [] NLL of the correct tokens (Eq. 16).
        kl: [] k3 estimate of the KL divergence from ``ref_logprobs``; 0 without them.
        entropy: [] Mean entropy in nats.
        clip_fraction: [] Share of tokens whose surrogate a clip holds.
        approx_kl: [] k3 estimate of KL(π_old ‖ π_θ).
        num_tokens: [] This call's own count of True tokens.
        num_correct_tokens: [] This call's own count of True and correct tokens.
        logprobs: [...] log π_θ(a_t|s_t), 0 where the mask is False.
    """

    loss: Tensor
    policy: Tensor
    positive_nll: Tensor
    kl: Tensor
    entropy: Tensor
    clip_fraction: Tensor
    approx_kl: Tensor
    num_tokens: Tensor
    num_correct_tokens: Tensor
    logprobs: Tensor


class Tokens(NamedTuple):
    """Per-token arguments; as the kernels take them, [N], contiguous and without gradients."""

    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    is_correct: Tensor | None
    token_weights: Tensor | None
    ref_logprobs: Tensor | None


class Coefficients(NamedTuple):
    """The loss's numbers; ``dual_clip`` is 0 where there is none."""

    clip_low: float
    clip_high: float
    dual_clip: float
    nll_weight: float
    kl_weight: float
    entropy_weight: float


class Inputs(NamedTuple):
    """What every form of the policy loss makes of its arguments.

    Attributes:
        tokens: The per-token arguments.
        counts: This call's own counts of True tokens and of correct ones, [] float32 each.
        denominators: As `step_denominators` gives them.
        coefficients: The loss's numbers.
    """

    tokens: Tokens
    counts: tuple[Tensor, Tensor]
    denominators: Tensor
    coefficients: Coefficients


def checked_inputs(
    tokens: Tokens, *, num_tokens, num_correct_tokens, like: Tensor, shape: torch.Size, dtype: torch.dtype, **numbers
) -> Inputs:
    """Check the arguments that all forms of the policy loss share, then lay them out for the kernels.

    Args:
        tokens: The per-token arguments as they came, [...] each.
        num_tokens: True tokens of the whole optimiser step, or None.
        num_correct_tokens: Correct ones, or None.
        like: A tensor on the device that all must be on.
        shape: [...].
        dtype: Of the stored gradient.
        **numbers: The fields of `Coefficients`; ``dual_clip`` may be None.
    """
    expect_tokens(tokens, num_tokens, num_correct_tokens, like=like, shape=shape)
    coefficients = checked_coefficients(**numbers, ref_logprobs=tokens.ref_logprobs)
    old_logprobs, advantages, mask, is_correct, token_weights, ref_logprobs = tokens
    correct = None if is_correct is None else as_mask(is_correct)
    tokens = Tokens(
        flat(old_logprobs), flat(advantages), as_mask(mask), correct, flat(token_weights), flat(ref_logprobs)
    )
    counts = count_tokens(tokens)
    return Inputs(tokens, counts, step_denominators(counts, num_tokens, num_correct_tokens, dtype), coefficients)


def expect_tokens(tokens: Tokens, num_tokens, num_correct_tokens, *, like: Tensor, shape: torch.Size) -> None:
    """The checks of the per-token arguments and of the counts."""
    for name in ("old_logprobs", "advantages", "token_weights", "ref_logprobs"):
        x = getattr(tokens, name)
        if x is not None or name in ("old_logprobs", "advantages"):
            expect_tensor(x, name, like=like, shape=shape)
    expect_mask(tokens.mask, "mask", like=like, shape=shape)
    if tokens.is_correct is not None:
        expect_mask(tokens.is_correct, "is_correct", like=like, shape=shape)
    expect_count(num_tokens, "num_tokens", like=like)
    expect_count(num_correct_tokens, "num_correct_tokens", like=like)
    if num_correct_tokens is not None:
        expect(tokens.is_correct is not None, "num_correct_tokens", "is_correct beside it", "is_correct=None")


def checked_coefficients(
    *, clip_low, clip_high, dual_clip, nll_weight, kl_weight, entropy_weight, ref_logprobs
) -> Coefficients:
    """The checked numbers of the loss."""
    expect_number(clip_low, "clip_low", "a number in [0, 1]", low=0, high=1)
    expect_number(clip_high, "clip_high", "a number ≥ 0", low=0)
    if dual_clip is not None:
        expect_number(dual_clip, "dual_clip", "None or a number > 1", low=1, open_low=True)
    expect_number(nll_weight, "nll_weight", "a number ≥ 0", low=0)
    expect_number(kl_weight, "kl_weight", "a number ≥ 0", low=0)
    expect_number(entropy_weight, "entropy_weight", "a number")
    expect(kl_weight == 0 or ref_logprobs is not None, "kl_weight", "0 without ref_logprobs", kl_weight)
    numbers = (clip_low, clip_high, dual_clip or 0.0, nll_weight, kl_weight, entropy_weight)
    return Coefficients(*map(float, numbers))


def count_tokens(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """This call's own counts of True tokens and of correct ones, float32 0-dim."""
    count = tokens.mask.sum(dtype=torch.float32)
    if tokens.is_correct is None:
        return count, torch.zeros_like(count)
    return count, (tokens.mask & tokens.is_correct).sum(dtype=torch.float32)


def step_denominators(counts: tuple[Tensor, Tensor], num_tokens, num_correct_tokens, dtype: torch.dtype) -> Tensor:
    """[3] float32: the step's tokens, its correct tokens, and the factor that the stored gradient carries.

    A float16 gradient of a mean over many tokens would underflow before a loss scale reaches it: it is stored
    times the number of tokens, or less where that would let the NLL term of a few correct tokens overflow.
    """
    tokens = as_denominator(num_tokens, counts[0])
    correct_tokens = as_denominator(num_correct_tokens, counts[1])
    scale = torch.ones_like(tokens)
    if dtype == torch.float16:
        # Without a correct token here no NLL term can overflow.
        scale = torch.where(counts[1] > 0, torch.minimum(tokens, 1024 * correct_tokens), tokens)
    return torch.stack([tokens, correct_tokens, scale])


def reduce_terms(
    terms: Tensor, denominators: Tensor, coefficients: Coefficients, counts: tuple[Tensor, Tensor], logprobs: Tensor
) -> PolicyLoss:
    """Token sums [6, N] → the loss (Eq. 17) and its parts; no gradient yet."""
    policy, nll, kl, entropy, clipped, approx_kl = terms.sum(1).unbind()
    tokens, correct_tokens, _ = denominators.unbind()
    policy, positive_nll, kl, entropy = policy / tokens, nll / correct_tokens, kl / tokens, entropy / tokens
    loss = policy + coefficients.nll_weight * positive_nll  # Eq. 17
    loss = loss + coefficients.kl_weight * kl - coefficients.entropy_weight * entropy
    return PolicyLoss(loss, policy, positive_nll, kl, entropy, clipped / tokens, approx_kl / tokens, *counts, logprobs)


@triton.jit
def _log_ratio(logprob, other):
    """log π − log π′; NaN where it is infinite, but for a token that π forbids: log π = −inf is a number."""
    is_broken = (logprob == float("inf")) | (tl.abs(other) == float("inf"))
    return tl.where(is_broken, float("nan"), logprob - other)


@triton.jit
def _bounded(x):
    """x in [−20, 20]; NaN stays NaN."""
    x = tl.where(x > MAX_LOG_RATIO_CONSTEXPR, MAX_LOG_RATIO_CONSTEXPR, x)
    return tl.where(x < -MAX_LOG_RATIO_CONSTEXPR, -MAX_LOG_RATIO_CONSTEXPR, x)


@triton.jit
def _k3(x):
    """eˣ − 1 − x ≥ 0; near 0 by its series, where the difference would be rounding alone."""
    series = 1.0 / 5040.0
    series = series * x + 1.0 / 720.0
    series = series * x + 1.0 / 120.0
    series = series * x + 1.0 / 24.0
    series = series * x + 1.0 / 6.0
    series = series * x + 0.5
    return tl.where(tl.abs(x) < 0.25, x * x * series, tl.exp(x) - 1.0 - x)


@triton.jit
def token_terms(
    logprob, tokens_at, inside, old_logprobs_ptr, advantages_ptr, is_correct_ptr, token_weights_ptr, ref_logprobs_ptr,
    denominators_ptr, clip_low, clip_high, dual_clip, nll_weight, kl_weight,
    HAS_CORRECT: tl.constexpr, HAS_WEIGHTS: tl.constexpr, HAS_REF: tl.constexpr, HAS_DUAL_CLIP: tl.constexpr,
):  # fmt: skip
    """(policy, NLL, KL, is clipped, approximate KL, ∂loss/∂logprob) of tokens at ``tokens_at`` where ``inside``."""
    old_logprob = tl.load(old_logprobs_ptr + tokens_at, mask=inside, other=0.0).to(tl.float32)
    advantage = tl.load(advantages_ptr + tokens_at, mask=inside, other=0.0).to(tl.float32)
    inv_tokens = 1.0 / tl.load(denominators_ptr)
    weight = 1.0
    if HAS_WEIGHTS:
        weight = tl.load(token_weights_ptr + tokens_at, mask=inside, other=0.0).to(tl.float32)

    difference = _log_ratio(logprob, old_logprob)
    log_ratio = _bounded(difference)
    ratio = tl.exp(log_ratio)  # Eq. 4
    unclipped = ratio * advantage
    bounded_ratio = tl.where(
        ratio > 1.0 + clip_high, 1.0 + clip_high, tl.where(ratio < 1.0 - clip_low, 1.0 - clip_low, ratio)
    )
    clipped = bounded_ratio * advantage
    is_clipped = clipped < unclipped
    surrogate = tl.where(is_clipped, clipped, unclipped)  # Eq. 3
    if HAS_DUAL_CLIP:
        is_bounded = (advantage < 0.0) & (surrogate < dual_clip * advantage)
        surrogate = tl.where(is_bounded, dual_clip * advantage, surrogate)
        is_clipped = is_clipped | is_bounded
    policy = -weight * surrogate
    # A factor, not a choice: 0 · NaN is NaN, so that what breaks the loss breaks the gradient too.
    slope = tl.where(is_clipped | (tl.abs(difference) > MAX_LOG_RATIO_CONSTEXPR), 0.0, 1.0)
    dlogprob = 0.0 - weight * unclipped * inv_tokens * slope

    nll = 0.0
    if HAS_CORRECT:
        correct = tl.load(is_correct_ptr + tokens_at, mask=inside, other=0) != 0
        nll = tl.where(correct, -logprob, 0.0)
        dlogprob -= tl.where(correct, nll_weight / tl.load(denominators_ptr + 1), 0.0)  # Eq. 16
    kl = 0.0
    if HAS_REF:
        ref_logprob = tl.load(ref_logprobs_ptr + tokens_at, mask=inside, other=0.0).to(tl.float32)
        difference = _log_ratio(logprob, ref_logprob)
        log_ref_ratio = -_bounded(difference)
        kl = _k3(log_ref_ratio)
        slope = tl.where(tl.abs(difference) > MAX_LOG_RATIO_CONSTEXPR, 0.0, -(kl + log_ref_ratio))
        dlogprob += kl_weight * inv_tokens * slope
    return policy, nll, kl, is_clipped.to(tl.float32), _k3(log_ratio), dlogprob


def token_terms_torch(
    logprobs: Tensor, tokens: Tokens, at: slice, denominators: Tensor, coefficients: Coefficients
) -> tuple[Tensor, Tensor]:
    """The kernel's five terms [5, n] and ∂loss/∂logprob [n] of the tokens at a slice, in PyTorch; 0 where masked."""
    masked_out = ~tokens.mask[at]

    def part(x: Tensor) -> Tensor:
        return x[at].float().masked_fill(masked_out, 0.0)

    logprobs, advantages = logprobs.masked_fill(masked_out, 0.0), part(tokens.advantages)
    difference = _log_ratio_torch(logprobs, part(tokens.old_logprobs))
    log_ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()  # Eq. 4
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - coefficients.clip_low, 1 + coefficients.clip_high) * advantages
    is_clipped = clipped < unclipped
    surrogate = torch.where(is_clipped, clipped, unclipped)  # Eq. 3
    if coefficients.dual_clip > 0:
        bound = coefficients.dual_clip * advantages
        is_bounded = (advantages < 0) & (surrogate < bound)
        surrogate, is_clipped = torch.where(is_bounded, bound, surrogate), is_clipped | is_bounded
    weights = torch.ones_like(ratio) if tokens.token_weights is None else part(tokens.token_weights)
    dlogprobs = 0.0 - weights * unclipped / denominators[0] * ~(is_clipped | (difference.abs() > MAX_LOG_RATIO))

    nll, kl = torch.zeros_like(ratio), torch.zeros_like(ratio)
    if tokens.is_correct is not None:
        correct = tokens.is_correct[at] & ~masked_out
        nll = torch.where(correct, -logprobs, 0.0)
        dlogprobs -= correct * (coefficients.nll_weight / denominators[1])  # Eq. 16
    if tokens.ref_logprobs is not None:
        difference = _log_ratio_torch(logprobs, part(tokens.ref_logprobs))
        log_ref_ratio = -difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        kl = _k3_torch(log_ref_ratio)
        slope = torch.where(difference.abs() > MAX_LOG_RATIO, 0.0, -torch.expm1(log_ref_ratio))
        dlogprobs += coefficients.kl_weight / denominators[0] * slope
    approx_kl = _k3_torch(log_ratio)
    return torch.stack([-weights * surrogate, nll, kl, is_clipped.float(), approx_kl]), dlogprobs


def _log_ratio_torch(logprobs: Tensor, others: Tensor) -> Tensor:
    return torch.where((logprobs == torch.inf) | others.isinf(), torch.nan, logprobs - others)


def _k3_torch(x: Tensor) -> Tensor:
    series = torch.full_like(x, 1 / 5040)
    for coefficient in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5):
        series = series * x + coefficient
    return torch.where(x.abs() < 0.25, x * x * series, torch.expm1(x) - x)
