"""The policy loss from hidden states: logits and their gradient exist a chunk of rows at a time."""

import torch
from torch import Tensor

from vapo_kernels import _formed_gradient
from vapo_kernels._arguments import INDEX_DTYPES, expect_mask, expect_tensor, flat
from vapo_kernels._linear_chunks import (
    accumulate,
    autocast,
    empty_gradients,
    expect_linear,
    fake_gradients,
    logits_chunks,
    part,
)
from vapo_kernels._row_softmax import expect_ids_inside
from vapo_kernels.ops.policy_loss.from_logits import compute_rows
from vapo_kernels.ops.policy_loss.terms import (
    NUM_TERMS,
    Coefficients,
    PolicyLoss,
    Tokens,
    checked_inputs,
    reduce_terms,
)
from vapo_kernels.ops.token_logprobs import expect_temperature, split_temperature


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    bias: Tensor | None = None,
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
) -> PolicyLoss:
    """`policy_loss` (Eq. 3, 4, 16, 17) of the logits hidden Wᵀ + bias, which never exist at once.

    A chunk of rows is multiplied into one buffer of at most 256 MiB (``_linear_chunks.LOGITS_BUFFER_BYTES``),
    turned into the gradient of the loss in place, multiplied back, and forgotten: 6·V·H FLOPs a token, nothing
    computed twice. The gradients of ``weight`` and ``bias`` are summed in float32; one that needs none costs
    nothing. Backward multiplies the finished gradients by the upstream gradient where they lie, so it runs once.

    Every term, count and convention is that of `policy_loss`; the logits have the dtype of ``hidden``, as those of
    ``torch.nn.functional.linear`` do. Inside ``torch.autocast`` hidden, weight and bias are cast as for a linear layer.

    Args:
        hidden: [..., H] floating; ``hidden[..., t, :]`` gives the distribution that token t was sampled from.
        weight: [V, H], dtype of ``hidden``. The head's matrix, whole (not a shard); may be tied to an embedding.
        token_ids: [...] int32 or int64, in [0, V) where ``mask`` is True.
        old_logprobs: [...] floating. log π_old(a_t|s_t), at the same temperature.
        advantages: [...] floating. Â_t.
        mask: [...] bool, integer or float 0/1, True on tokens that the policy sampled.
        bias: [V], dtype of ``hidden``, or None.
        is_correct: As in `policy_loss`, like all that follow.
        clip_low: ε_low.
        clip_high: ε_high.
        dual_clip: c > 1, or None.
        nll_weight: μ.
        temperature: τ > 0, a number or [...] floating.
        num_tokens: True tokens of the whole optimiser step.
        num_correct_tokens: Correct tokens of the whole optimiser step.
        ref_logprobs: [...] floating. log π_ref(a_t|s_t).
        kl_weight: β.
        entropy_weight: Weight of the entropy bonus.
        token_weights: [...] floating. Constant factor on the policy term.

    Returns:
        As `policy_loss`.

    Raises:
        ValueError: If a shape, dtype, device or range is not as above.

    Example:
        >>> hidden, weight = torch.eye(2, requires_grad=True), torch.zeros(4, 2, requires_grad=True)
        >>> old = torch.full((2,), 0.25).log()
        >>> out = linear_policy_loss(hidden, weight, torch.tensor([1, 2]), old, torch.ones(2), torch.ones(2))
        >>> out.loss.backward()
        >>> weight.grad
        tensor([[ 0.1250,  0.1250],
                [-0.3750,  0.1250],
                [ 0.1250, -0.3750],
                [ 0.1250,  0.1250]])

    Source: as `policy_loss`; gradients in forward, Liger Kernel, arXiv:2410.10989.
    """
    expect_linear(hidden, weight, bias)
    shape = hidden.shape[:-1]
    expect_tensor(token_ids, "token_ids", like=hidden, shape=shape, dtypes=INDEX_DTYPES)
    expect_mask(mask, "mask", like=hidden, shape=shape)
    expect_temperature(temperature, mask, like=hidden, shape=shape)
    hidden, weight, bias = autocast(hidden, weight, bias)
    rows = hidden.reshape(-1, hidden.shape[-1])
    tokens, counts, denominators, coefficients = checked_inputs(
        Tokens(old_logprobs, advantages, mask, is_correct, token_weights, ref_logprobs),
        like=hidden, shape=shape, dtype=hidden.dtype,
        num_tokens=num_tokens, num_correct_tokens=num_correct_tokens,
        clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, nll_weight=nll_weight, kl_weight=kl_weight,
        entropy_weight=entropy_weight,
    )  # fmt: skip
    inputs = (rows, weight, bias)
    needed = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs]
    terms, logprobs, gradients = linear_policy_loss_op(
        *(None if x is None else x.detach() for x in inputs), flat(token_ids), *tokens,
        *split_temperature(temperature), denominators, list(coefficients), needed,
    )  # fmt: skip
    out = reduce_terms(terms, denominators, coefficients, counts, logprobs.view(shape))
    if not any(needed):
        return out
    inputs = [x for x, is_needed in zip(inputs, needed, strict=True) if is_needed]
    return out._replace(loss=_formed_gradient.attach(out.loss, inputs, gradients, scale=denominators[2], in_place=True))


@torch.library.custom_op("vapo_kernels::linear_policy_loss", mutates_args=())
def linear_policy_loss_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    is_correct: Tensor | None,
    token_weights: Tensor | None,
    ref_logprobs: Tensor | None,
    temperatures: Tensor | None,
    inv_temperature: float,
    denominators: Tensor,
    coefficients: list[float],
    needed: list[bool],
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Terms [6, N], log-probs [N], and the needed ones of ∂loss/∂hidden, ∂loss/∂weight, ∂loss/∂bias."""
    expect_ids_inside(token_ids, mask, len(weight))
    tokens = Tokens(old_logprobs, advantages, mask, is_correct, token_weights, ref_logprobs)
    coefficients = Coefficients(*coefficients)
    terms = torch.empty(NUM_TERMS, len(hidden), dtype=torch.float32, device=hidden.device)
    logprobs, gradients = terms.new_empty(len(hidden)), empty_gradients(hidden, weight, bias, needed)
    for logits, at in logits_chunks(hidden, weight, bias):
        terms[:, at], logprobs[at] = compute_rows(
            logits, logits if any(needed) else None, token_ids[at], Tokens(*(part(x, at) for x in tokens)),
            part(temperatures, at), inv_temperature, denominators, coefficients,
        )  # fmt: skip
        accumulate(gradients, logits, hidden, weight, mask, at)
    return terms, logprobs, gradients.needed(_sum_dtype(hidden))


@linear_policy_loss_op.register_fake
def _(hidden, weight, bias, token_ids, *rest):
    logprobs = torch.empty_like(token_ids, dtype=torch.float32)
    gradients = fake_gradients(hidden, weight, bias, rest[-1], _sum_dtype(hidden))
    return logprobs.new_empty(NUM_TERMS, token_ids.shape[0]), logprobs, gradients


def _sum_dtype(hidden: Tensor) -> torch.dtype:
    """float16 can hold a sum over tokens once it has met the upstream gradient, not with the stored scale in it."""
    return torch.float32 if hidden.dtype == torch.float16 else hidden.dtype
