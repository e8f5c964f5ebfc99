"""The policy loss from logits: one read without a gradient; two reads and one write with it."""

import torch
from torch import Tensor

from vapo_kernels import _formed_gradient
from vapo_kernels._arguments import expect, flat
from vapo_kernels._dispatch import on_device_of, tl, triton, use_triton
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
from vapo_kernels.ops.token_logprobs import expect_rows, split_temperature


def policy_loss(
    logits: Tensor,
    token_ids: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    is_correct: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    nll_weight: float = 0.1,
    temperature: float | Tensor = 1.0,
    num_tokens: float | Tensor | None = None,
    num_correct_tokens: float | Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    kl_weight: float = 0.0,
    entropy_weight: float = 0.0,
    token_weights: Tensor | None = None,
    inplace: bool = False,
) -> PolicyLoss:
    """VAPO's policy loss from logits: clipped surrogate + positive-example NLL (+ KL, − entropy bonus).

        r_t    = π_θ(a_t|s_t) / π_old(a_t|s_t)                                                   (Eq. 4)
        policy = −(1/num_tokens) Σ_t w_t min(r_t Â_t, clip(r_t, 1 − clip_low, 1 + clip_high) Â_t)  (Eq. 3)
        positive_nll = −(1/num_correct_tokens) Σ_{t correct} log π_θ(a_t|s_t)                     (Eq. 16)
        loss   = policy + nll_weight·positive_nll + kl_weight·kl − entropy_weight·entropy        (Eq. 17)

    The loss is minimised. Every mean divides by ``num_tokens`` or ``num_correct_tokens``, the counts of the
    *whole optimiser step*: then the losses and gradients of micro-batches add up to those of the undivided
    step. A count below 1 divides by 1, so a call without a True (or correct) token gives 0, not NaN.

    Log-probs, ratio, NLL and entropy are all of logits/τ. ``kl`` is the k3 estimator e^x − 1 − x of
    x = log π_ref − log π_θ; ``approx_kl`` the same of x = log r (Eq. 4), an estimate of KL(π_old ‖ π_θ). Log ratios are
    bounded to ±20 before exp, with gradient 0 beyond. An infinite ``old_logprobs`` or ``ref_logprobs`` counts as NaN,
    and what is not finite in an unmasked element breaks loss and gradient; only a sampled token with a logit of −inf
    keeps both finite: its ratio is e⁻²⁰. ``dual_clip`` c bounds min(…) from below by c Â where Â < 0. ``clip_fraction``
    is the share of tokens whose surrogate has no gradient because of either clip.

    The gradient is formed in forward, while a row of logits is in cache; backward multiplies it by the
    upstream gradient where it lies, so it runs once. Only ``loss`` carries a gradient, to ``logits`` alone.
    A row where ``mask`` is False is never read: its gradient is 0.

    Args:
        logits: [..., V] floating; ``logits[..., t, :]`` is the distribution that token t was sampled from.
        token_ids: [...] int32 or int64, in [0, V) where ``mask`` is True.
        old_logprobs: [...] floating. log π_old(a_t|s_t), at the same temperature.
        advantages: [...] floating. Â_t.
        mask: [...] bool, integer or float 0/1, True on tokens that the policy sampled.
        is_correct: [...] mask, True on tokens of correct responses (by the verifier). None: no NLL term.
        clip_low: ε_low in [0, 1]; the paper uses 0.2.
        clip_high: ε_high ≥ 0; Clip-Higher uses 0.28.
        dual_clip: c > 1, or None.
        nll_weight: μ ≥ 0; the paper uses 0.1.
        temperature: τ > 0, a number or [...] floating.
        num_tokens: True tokens of the whole optimiser step, over micro-batches and ranks: a number or a
            0-dim tensor (not synchronised with the host). None: this call's own.
        num_correct_tokens: Likewise, of tokens that are True and correct.
        ref_logprobs: [...] floating. log π_ref(a_t|s_t).
        kl_weight: β ≥ 0; VAPO uses 0.
        entropy_weight: Weight of the entropy bonus; VAPO uses 0.
        token_weights: [...] floating. Constant factor w_t on the policy term: truncated importance weights,
            or num_tokens/(B·l) for a mean per response first. None: 1.
        inplace: Write the gradient over ``logits``: no second [N, V] tensor. Autograd notices: an op that
            saved the logits raises in its backward. Without a gradient the logits stay as they are.

    Returns:
        ``loss`` and its parts, [] float32; ``num_tokens`` and ``num_correct_tokens``, this call's own counts;
        ``logprobs``, [...] float32, 0 where ``mask`` is False.

    Raises:
        ValueError: If a shape, dtype, device or range is not as above, an argument has no effect beside the
            others, or ``inplace`` meets a leaf or logits whose elements share memory.

    Example:
        Two tokens, ratio 1, advantages 1 and 0: the policy term is −mean(Â).

        >>> logits = torch.zeros(2, 4, requires_grad=True)
        >>> ids, old = torch.tensor([1, 2]), torch.full((2,), 0.25).log()
        >>> out = policy_loss(logits, ids, old, torch.tensor([1.0, 0.0]), torch.tensor([True, True]))
        >>> out.loss.item()
        -0.5
        >>> out.loss.backward()
        >>> logits.grad
        tensor([[ 0.1250, -0.3750,  0.1250,  0.1250],
                [ 0.0000,  0.0000,  0.0000,  0.0000]])

    Source: PPO, arXiv:1707.06347; Clip-Higher, DAPO, arXiv:2503.14476; positive-example LM loss, VAPO,
    arXiv:2504.05118; dual clip, arXiv:1912.09729; k3, http://joschu.net/blog/kl-approx.html.
    """
    expect_rows(logits, token_ids, mask, temperature)
    with_gradient = torch.is_grad_enabled() and logits.requires_grad
    if inplace and with_gradient:
        _expect_writable(logits)
    tokens, counts, denominators, coefficients = checked_inputs(
        Tokens(old_logprobs, advantages, mask, is_correct, token_weights, ref_logprobs),
        like=logits, shape=logits.shape[:-1], dtype=logits.dtype,
        num_tokens=num_tokens, num_correct_tokens=num_correct_tokens,
        clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, nll_weight=nll_weight, kl_weight=kl_weight,
        entropy_weight=entropy_weight,
    )  # fmt: skip
    arguments = (flat(token_ids), *tokens, *split_temperature(temperature), denominators, list(coefficients))
    if not (inplace and with_gradient):
        terms, logprobs, dlogits = policy_loss_op(logits.detach(), *arguments, with_gradient)
        out = reduce_terms(terms, denominators, coefficients, counts, logprobs.view(token_ids.shape))
        return out._replace(loss=_tie(out.loss, logits, dlogits, denominators)) if with_gradient else out
    dlogits = logits.detach()
    # Autograd gives a view whose memory changed a new node that copies its whole base: tie before writing. A compiler
    # orders by data and has to see the write first.
    compiling = torch.compiler.is_compiling()
    tie = None if compiling else _tie(denominators.new_zeros(()), logits, dlogits, denominators)
    terms, logprobs = policy_loss_inplace_op(dlogits, *arguments)
    out = reduce_terms(terms, denominators, coefficients, counts, logprobs.view(token_ids.shape))
    return out._replace(loss=_tie(out.loss, logits, dlogits, denominators) if compiling else out.loss + tie)


def _tie(loss: Tensor, logits: Tensor, dlogits: Tensor, denominators: Tensor) -> Tensor:
    return _formed_gradient.attach(loss, [logits], [dlogits], scale=denominators[2], in_place=True)


def _expect_writable(logits: Tensor) -> None:
    expect(not logits.is_leaf, "inplace", "logits computed by a model", "a leaf that requires a gradient")
    _, inner_rows, stride_outer, stride_inner = row_strides(logits)
    in_rows = logits.stride(-1) == 1 and (logits.dim() == 1 or stride_inner >= logits.shape[-1])
    apart = stride_outer == 0 or stride_outer >= inner_rows * stride_inner
    viewable = logits.dim() <= 3 or logits.is_contiguous()
    expect(
        in_rows and apart and viewable, "inplace", "logits whose rows lie apart in memory", f"strides {logits.stride()}"
    )


@triton.jit(
    do_not_specialize=[
        "num_rows", "inner_rows", "stride_outer", "stride_inner",
        "out_inner_rows", "out_stride_outer", "out_stride_inner",
    ],
    do_not_specialize_on_alignment=[
        "token_ids_ptr", "old_logprobs_ptr", "advantages_ptr", "mask_ptr", "is_correct_ptr", "token_weights_ptr",
        "ref_logprobs_ptr", "temperature_ptr", "denominators_ptr", "terms_ptr", "logprobs_ptr",
    ],
)  # fmt: skip
def _policy_loss_kernel(
    logits_ptr,  # [N, V]
    dlogits_ptr,  # [N, V], may be logits
    token_ids_ptr,  # [N]
    old_logprobs_ptr,  # [N]
    advantages_ptr,  # [N]
    mask_ptr,  # [N] bool
    is_correct_ptr,  # [N] bool, or None
    token_weights_ptr,  # [N], or None
    ref_logprobs_ptr,  # [N], or None
    temperature_ptr,  # [N], or None
    denominators_ptr,  # [3] float32
    terms_ptr,  # [6, N] float32
    logprobs_ptr,  # [N] float32
    num_rows: tl.int64,
    inner_rows: tl.int32,
    stride_outer: tl.int64,
    stride_inner: tl.int64,
    out_inner_rows: tl.int32,
    out_stride_outer: tl.int64,
    out_stride_inner: tl.int64,
    inv_temperature,
    clip_low,
    clip_high,
    dual_clip,
    nll_weight,
    kl_weight,
    entropy_weight,
    V,
    ALIGNED: tl.constexpr,
    HAS_CORRECT: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_REF: tl.constexpr,
    HAS_DUAL_CLIP: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program computes one row: statistics, terms, and the gradient right after the first read."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = row_ptr_of(logits_ptr, row, inner_rows, stride_outer, stride_inner, ALIGNED)
    token = tl.load(token_ids_ptr + row)
    sampled = tl.load(mask_ptr + row) != 0
    logprob = 0.0
    entropy = 0.0
    peak = 0.0
    log_sum = 0.0
    p_other = 0.0
    policy = 0.0
    nll = 0.0
    kl = 0.0
    clipped = 0.0
    approx_kl = 0.0
    a = 0.0
    b = 0.0
    if sampled:
        if HAS_TEMPERATURE:
            inv_temperature = 1.0 / tl.load(temperature_ptr + row).to(tl.float32)
        logprob, entropy, peak, log_sum, p_other = row_statistics(row_ptr, token, inv_temperature, V, BLOCK)
        policy, nll, kl, clipped, approx_kl, dlogprob = token_terms(
            logprob, row, sampled, old_logprobs_ptr, advantages_ptr, is_correct_ptr, token_weights_ptr,
            ref_logprobs_ptr, denominators_ptr, clip_low, clip_high, dual_clip, nll_weight, kl_weight,
            HAS_CORRECT, HAS_WEIGHTS, HAS_REF, HAS_DUAL_CLIP,
        )  # fmt: skip
        stored_scale = tl.load(denominators_ptr + 2)
        a = -dlogprob * stored_scale
        b = entropy_weight * stored_scale / tl.load(denominators_ptr)
    tl.store(logprobs_ptr + row, logprob)
    num_rows = num_rows.to(tl.int64)
    tl.store(terms_ptr + row, policy)
    tl.store(terms_ptr + num_rows + row, nll)
    tl.store(terms_ptr + 2 * num_rows + row, kl)
    tl.store(terms_ptr + 3 * num_rows + row, entropy)
    tl.store(terms_ptr + 4 * num_rows + row, clipped)
    tl.store(terms_ptr + 5 * num_rows + row, approx_kl)
    if WITH_GRADIENT:
        out_ptr = row_ptr_of(dlogits_ptr, row, out_inner_rows, out_stride_outer, out_stride_inner, ALIGNED)
        write_row_gradient(row_ptr, out_ptr, token, a, b, entropy, peak, log_sum, p_other, inv_temperature, V, BLOCK)


def compute_rows(
    logits: Tensor,
    dlogits: Tensor | None,
    token_ids: Tensor,
    tokens: Tokens,
    temperatures,
    inv_temperature,
    denominators,
    coefficients,
):
    """Terms [6, N] and log-probs [N]; the gradient goes into ``dlogits``, which may be ``logits``."""
    if not use_triton(logits):
        return _compute_torch(
            logits, dlogits, token_ids, tokens, temperatures, inv_temperature, denominators, coefficients
        )
    num_rows, V = token_ids.numel(), logits.shape[-1]
    terms = torch.empty(NUM_TERMS, num_rows, dtype=torch.float32, device=logits.device)
    logprobs = terms.new_empty(num_rows)
    rows, *strides = row_strides(logits)
    out_rows, *out_strides = (rows, *strides) if dlogits is None else row_strides(dlogits)
    if num_rows > 0:
        with on_device_of(logits):
            _policy_loss_kernel[(num_rows,)](
                rows, out_rows, token_ids, *tokens, temperatures, denominators, terms, logprobs, num_rows,
                *strides, *out_strides, inv_temperature, *coefficients, V,
                ALIGNED=is_aligned(*strides[1:], *out_strides[1:]), HAS_CORRECT=tokens.is_correct is not None,
                HAS_WEIGHTS=tokens.token_weights is not None, HAS_REF=tokens.ref_logprobs is not None,
                HAS_DUAL_CLIP=coefficients.dual_clip > 0, HAS_TEMPERATURE=temperatures is not None,
                WITH_GRADIENT=dlogits is not None, **launch_parameters(V),
            )  # fmt: skip
    return terms, logprobs


def _compute_torch(
    logits, dlogits, token_ids, tokens: Tokens, temperatures, inv_temperature, denominators, coefficients: Coefficients
):
    """The kernel's results in PyTorch, a chunk of rows at a time."""
    terms, logprobs = torch.zeros(NUM_TERMS, token_ids.numel()), torch.zeros(token_ids.numel())
    for rows, at in row_chunks(logits):
        sampled = tokens.mask[at]
        ids = token_ids[at].masked_fill(~sampled, 0)
        tau = inv_temperature if temperatures is None else 1 / temperatures[at].float().masked_fill(~sampled, 1.0)
        statistics = statistics_of_chunk(rows, ids, tau)
        logprob, entropy, *softmax = (x.masked_fill(~sampled, 0.0) for x in statistics)
        values, dlogprob = token_terms_torch(logprob, tokens, at, denominators, coefficients)
        terms[:3, at], terms[3, at], terms[4:, at], logprobs[at] = values[:3], entropy, values[3:], logprob
        if dlogits is not None:
            a = -dlogprob.masked_fill(~sampled, 0.0) * denominators[2]
            b = coefficients.entropy_weight * denominators[2] / denominators[0]
            b = b.expand_as(a).masked_fill(~sampled, 0.0)
            out = rows if dlogits is logits else dlogits.view(-1, logits.shape[-1])[at]
            write_gradient_of_rows(rows, out, ids, a, b, entropy, *softmax, tau)
    return terms, logprobs


# What both ops take beside the logits.
_ARGUMENTS = (
    "Tensor token_ids, Tensor old_logprobs, Tensor advantages, Tensor mask, Tensor? is_correct, Tensor? token_weights, "
    "Tensor? ref_logprobs, Tensor? temperatures, float inv_temperature, Tensor denominators, float[] coefficients"
)


def _compute(
    logits, dlogits, token_ids, old_logprobs, advantages, mask, is_correct, token_weights, ref_logprobs,
    temperatures, inv_temperature, denominators, coefficients,
):  # fmt: skip
    """`compute_rows` of an op's arguments."""
    expect_ids_inside(token_ids, mask, logits.shape[-1])
    tokens = Tokens(old_logprobs, advantages, mask, is_correct, token_weights, ref_logprobs)
    coefficients = Coefficients(*coefficients)
    return compute_rows(logits, dlogits, token_ids, tokens, temperatures, inv_temperature, denominators, coefficients)


def _fake_terms(token_ids):
    logprobs = torch.empty_like(token_ids, dtype=torch.float32)
    return logprobs.new_empty(NUM_TERMS, token_ids.shape[0]), logprobs


@torch.library.custom_op(
    "vapo_kernels::policy_loss",
    mutates_args=(),
    schema=f"(Tensor logits, {_ARGUMENTS}, bool with_gradient) -> (Tensor, Tensor, Tensor)",
)
def policy_loss_op(logits, *rest):
    """Terms [6, N], log-probs [N] and ∂loss/∂logits (empty without ``with_gradient``)."""
    *arguments, with_gradient = rest
    dlogits = torch.empty(logits.shape if with_gradient else (0,), dtype=logits.dtype, device=logits.device)
    return *_compute(logits, dlogits if with_gradient else None, *arguments), dlogits


@policy_loss_op.register_fake
def _(logits, token_ids, *rest):
    dlogits = torch.empty(logits.shape if rest[-1] else (0,), dtype=logits.dtype, device=logits.device)
    return *_fake_terms(token_ids), dlogits


@torch.library.custom_op(
    "vapo_kernels::policy_loss_inplace",
    mutates_args=("logits",),
    schema=f"(Tensor(a!) logits, {_ARGUMENTS}) -> (Tensor, Tensor)",
)
def policy_loss_inplace_op(logits, *arguments):
    """Terms [6, N] and log-probs [N]; logits become ∂loss/∂logits."""
    return _compute(logits, logits, *arguments)


@policy_loss_inplace_op.register_fake
def _(logits, token_ids, *_):
    return _fake_terms(token_ids)
