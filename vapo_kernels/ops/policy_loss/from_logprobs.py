"""The policy loss from log-probs that somebody else computed."""

import torch
from torch import Tensor

from vapo_kernels import _formed_gradient
from vapo_kernels._arguments import expect, expect_tensor, flat
from vapo_kernels._dispatch import on_device_of, tl, triton, use_triton
from vapo_kernels.ops.policy_loss.terms import (
    NUM_TERMS,
    Coefficients,
    PolicyLoss,
    Tokens,
    checked_inputs,
    reduce_terms,
    token_terms,
    token_terms_torch,
)

# Tokens of one program.
BLOCK = 1024


def logprob_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    entropy: Tensor | None = None,
    is_correct: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    nll_weight: float = 0.1,
    num_tokens: float | Tensor | None = None,
    num_correct_tokens: float | Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    kl_weight: float = 0.0,
    entropy_weight: float = 0.0,
    token_weights: Tensor | None = None,
) -> PolicyLoss:
    """`policy_loss` (Eq. 3, 4, 16, 17) from log-probs: for engines that hand out log-probs, not logits.

    Every term, count and convention is that of `policy_loss`. The gradient goes to ``logprobs`` and, with an
    ``entropy_weight``, to ``entropy``; a masked position is never read and gets gradient 0. Backward may run
    more than once.

    Args:
        logprobs: [...] floating. log π_θ(a_t|s_t), with a gradient.
        old_logprobs: [...] floating. log π_old(a_t|s_t).
        advantages: [...] floating. Â_t.
        mask: [...] bool, integer or float 0/1, True on tokens that the policy sampled.
        entropy: [...] floating. Entropy of each token's distribution. None: reported as 0.
        is_correct: As in `policy_loss`, like all that follow.
        clip_low: ε_low.
        clip_high: ε_high.
        dual_clip: c > 1, or None.
        nll_weight: μ.
        num_tokens: True tokens of the whole optimiser step.
        num_correct_tokens: Correct tokens of the whole optimiser step.
        ref_logprobs: [...] floating. log π_ref(a_t|s_t).
        kl_weight: β.
        entropy_weight: Weight of the entropy bonus; needs ``entropy``.
        token_weights: [...] floating. Constant factor on the policy term.

    Returns:
        As `policy_loss`; ``logprobs`` is the argument in float32, 0 where ``mask`` is False, without gradient.

    Raises:
        ValueError: If a shape, dtype, device or range is not as above.

    Example:
        The second token has moved past 1 + ε_high: its surrogate is clipped and has no gradient.

        >>> logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
        >>> mask = torch.tensor([True, True])
        >>> out = logprob_policy_loss(logprobs, torch.tensor([-1.0, -2.0]), torch.ones(2), mask)
        >>> out.clip_fraction
        tensor(0.5000)
        >>> out.loss.backward()
        >>> logprobs.grad
        tensor([-0.5000,  0.0000])

    Source: as `policy_loss`.
    """
    expect(isinstance(logprobs, Tensor), "logprobs", "a tensor", type(logprobs).__name__)
    expect_tensor(logprobs, "logprobs", like=logprobs)
    if entropy is not None:
        expect_tensor(entropy, "entropy", like=logprobs, shape=logprobs.shape)
    expect(entropy_weight == 0 or entropy is not None, "entropy_weight", "0 without entropy", entropy_weight)
    # float32: token-sized gradients are multiplied by the upstream gradient before they are rounded.
    tokens, counts, denominators, coefficients = checked_inputs(
        Tokens(old_logprobs, advantages, mask, is_correct, token_weights, ref_logprobs),
        like=logprobs, shape=logprobs.shape, dtype=torch.float32,
        num_tokens=num_tokens, num_correct_tokens=num_correct_tokens,
        clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, nll_weight=nll_weight, kl_weight=kl_weight,
        entropy_weight=entropy_weight,
    )  # fmt: skip
    terms, clean, dlogprobs = logprob_policy_loss_op(
        flat(logprobs), flat(entropy), *tokens, denominators, list(coefficients)
    )
    out = reduce_terms(terms, denominators, coefficients, counts, clean.view(logprobs.shape))
    if not torch.is_grad_enabled():
        return out
    inputs, gradients = [], []
    if logprobs.requires_grad:
        inputs, gradients = [logprobs], [dlogprobs.view(logprobs.shape)]
    if entropy is not None and entropy.requires_grad:
        dentropy = tokens.mask.view(logprobs.shape) * (-coefficients.entropy_weight / denominators[0])
        inputs, gradients = [*inputs, entropy], [*gradients, dentropy]
    return out._replace(loss=_formed_gradient.attach(out.loss, inputs, gradients)) if inputs else out


# The mask of the last block ends anywhere, so loads are 32 bits wide whatever the alignment.
@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=[
        "logprobs_ptr", "entropy_ptr", "old_logprobs_ptr", "advantages_ptr", "mask_ptr", "is_correct_ptr",
        "token_weights_ptr", "ref_logprobs_ptr", "denominators_ptr", "terms_ptr", "clean_ptr", "dlogprobs_ptr",
    ],
)  # fmt: skip
def _logprob_policy_loss_kernel(
    logprobs_ptr,  # [N]
    entropy_ptr,  # [N], or None
    old_logprobs_ptr,  # [N]
    advantages_ptr,  # [N]
    mask_ptr,  # [N] bool
    is_correct_ptr,  # [N] bool, or None
    token_weights_ptr,  # [N], or None
    ref_logprobs_ptr,  # [N], or None
    denominators_ptr,  # [3] float32
    terms_ptr,  # [6, N] float32
    clean_ptr,  # [N] float32
    dlogprobs_ptr,  # [N] float32
    num_rows: tl.int64,
    clip_low,
    clip_high,
    dual_clip,
    nll_weight,
    kl_weight,
    HAS_ENTROPY: tl.constexpr,
    HAS_CORRECT: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_REF: tl.constexpr,
    HAS_DUAL_CLIP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program computes the terms and gradients of BLOCK tokens."""
    num_rows = num_rows.to(tl.int64)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_rows
    sampled = tl.load(mask_ptr + offsets, mask=inside, other=0) != 0
    logprob = tl.load(logprobs_ptr + offsets, mask=sampled, other=0.0).to(tl.float32)
    policy, nll, kl, clipped, approx_kl, dlogprob = token_terms(
        logprob, offsets, sampled, old_logprobs_ptr, advantages_ptr, is_correct_ptr, token_weights_ptr,
        ref_logprobs_ptr, denominators_ptr, clip_low, clip_high, dual_clip, nll_weight, kl_weight,
        HAS_CORRECT, HAS_WEIGHTS, HAS_REF, HAS_DUAL_CLIP,
    )  # fmt: skip
    entropy = tl.zeros((BLOCK,), tl.float32)
    if HAS_ENTROPY:
        entropy = tl.load(entropy_ptr + offsets, mask=sampled, other=0.0).to(tl.float32)
    tl.store(terms_ptr + offsets, tl.where(sampled, policy, 0.0), mask=inside)
    tl.store(terms_ptr + num_rows + offsets, tl.where(sampled, nll, 0.0), mask=inside)
    tl.store(terms_ptr + 2 * num_rows + offsets, tl.where(sampled, kl, 0.0), mask=inside)
    tl.store(terms_ptr + 3 * num_rows + offsets, entropy, mask=inside)
    tl.store(terms_ptr + 4 * num_rows + offsets, tl.where(sampled, clipped, 0.0), mask=inside)
    tl.store(terms_ptr + 5 * num_rows + offsets, tl.where(sampled, approx_kl, 0.0), mask=inside)
    tl.store(clean_ptr + offsets, logprob, mask=inside)
    tl.store(dlogprobs_ptr + offsets, tl.where(sampled, dlogprob, 0.0), mask=inside)


@torch.library.custom_op("vapo_kernels::logprob_policy_loss", mutates_args=())
def logprob_policy_loss_op(
    logprobs: Tensor,
    entropy: Tensor | None,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    is_correct: Tensor | None,
    token_weights: Tensor | None,
    ref_logprobs: Tensor | None,
    denominators: Tensor,
    coefficients: list[float],
) -> tuple[Tensor, Tensor, Tensor]:
    """Terms [6, N], log-probs [N] without their masked positions, and ∂loss/∂logprobs [N], float32."""
    tokens = Tokens(old_logprobs, advantages, mask, is_correct, token_weights, ref_logprobs)
    coefficients, num_rows = Coefficients(*coefficients), logprobs.numel()
    if not use_triton(logprobs):
        clean = logprobs.float().masked_fill(~mask, 0.0)
        values, dlogprobs = token_terms_torch(clean, tokens, slice(None), denominators, coefficients)
        entropy = torch.zeros_like(clean) if entropy is None else entropy.float().masked_fill(~mask, 0.0)
        return torch.cat([values[:3], entropy.unsqueeze(0), values[3:]]), clean, dlogprobs.masked_fill(~mask, 0.0)
    terms = torch.empty(NUM_TERMS, num_rows, dtype=torch.float32, device=logprobs.device)
    clean, dlogprobs = terms.new_empty(num_rows), terms.new_empty(num_rows)
    if num_rows > 0:
        with on_device_of(logprobs):
            _logprob_policy_loss_kernel[(triton.cdiv(num_rows, BLOCK),)](
                logprobs, entropy, *tokens, denominators, terms, clean, dlogprobs, num_rows, *coefficients[:5],
                HAS_ENTROPY=entropy is not None, HAS_CORRECT=is_correct is not None,
                HAS_WEIGHTS=token_weights is not None, HAS_REF=ref_logprobs is not None,
                HAS_DUAL_CLIP=coefficients.dual_clip > 0, BLOCK=BLOCK, num_warps=8,
            )  # fmt: skip
    return terms, clean, dlogprobs


@logprob_policy_loss_op.register_fake
def _(logprobs, *_):
    clean = torch.empty_like(logprobs, dtype=torch.float32)
    return clean.new_empty(NUM_TERMS, logprobs.shape[0]), clean, torch.empty_like(clean)
