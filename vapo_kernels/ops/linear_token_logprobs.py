"""Log-probability and entropy of each token from hidden states, without the logits of all tokens (Eq. 2, 4).

Shapes: N rows (tokens), H hidden features, V columns (vocabulary); logits = hidden Wᵀ + bias.
"""

import torch
from torch import Tensor

from vapo_kernels._arguments import INDEX_DTYPES, as_mask, expect_mask, expect_tensor, flat
from vapo_kernels._formed_gradient import refuse_second_derivative
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
from vapo_kernels.ops.token_logprobs import (
    TokenLogprobs,
    compute_statistics,
    expect_temperature,
    split_temperature,
    write_gradient,
)


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
) -> TokenLogprobs:
    """`token_logprobs` of the logits of a linear head, formed and forgotten a chunk of rows at a time.

        log π(a|s) = z_a − log Σ_j exp z_j,    Ent = −Σ_j p_j log p_j,    z = (hidden Wᵀ + bias)/τ   (Eq. 2, 4)

    The logits of a chunk live in one buffer of at most 256 MiB (``_linear_chunks.LOGITS_BUFFER_BYTES``) in the
    dtype of ``hidden``; no [N, V] tensor exists, forward or backward. Both results are differentiable with respect
    to ``hidden``, ``weight`` and ``bias``. Every row may have its own upstream gradient, so backward forms the chunk's
    logits again (8·V·H FLOPs a token in all; `linear_policy_loss` needs 6). Gradients of the weight and the bias are
    summed in float32; one that needs none costs nothing. Masks, −inf and τ as in `token_logprobs`.

    Args:
        hidden: [..., H] floating; ``hidden[..., t, :]`` gives the distribution that token t was sampled from.
        weight: [V, H], dtype of ``hidden``. The head's matrix; may be tied to an embedding.
        token_ids: [...] int32 or int64, in [0, V) where ``mask`` is True.
        bias: [V], dtype of ``hidden``, or None.
        mask: [...] bool, integer or float 0/1, True on rows to compute. None: all of them.
        temperature: τ > 0, a number or [...] floating.

    Returns:
        Log-probs and entropies, [...] float32, exactly 0 where ``mask`` is False.

    Raises:
        ValueError: If a shape, dtype, device or range is not as above.

    Example:
        >>> hidden, weight = torch.eye(2), torch.log(torch.tensor([[0.5, 0.1], [0.25, 0.1], [0.25, 0.8]]))
        >>> linear_token_logprobs(hidden, weight, torch.tensor([1, 2])).logprobs
        tensor([-1.3863, -0.2231])

    Source: as `token_logprobs`.
    """
    expect_linear(hidden, weight, bias)
    shape = hidden.shape[:-1]
    expect_tensor(token_ids, "token_ids", like=hidden, shape=shape, dtypes=INDEX_DTYPES)
    if mask is not None:
        expect_mask(mask, "mask", like=hidden, shape=shape)
    expect_temperature(temperature, mask, like=hidden, shape=shape)
    hidden, weight, bias = autocast(hidden, weight, bias)
    temperatures, inv_temperature = split_temperature(temperature)
    rows, sampled = hidden.reshape(-1, hidden.shape[-1]), None if mask is None else as_mask(mask)
    out = linear_token_logprobs_op(rows, weight, bias, flat(token_ids), sampled, temperatures, inv_temperature)
    return TokenLogprobs(out[0].view(shape), out[1].view(shape))


@torch.library.custom_op("vapo_kernels::linear_token_logprobs", mutates_args=())
def linear_token_logprobs_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    mask: Tensor | None,
    temperatures: Tensor | None,
    inv_temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs [N], entropies [N] and the rest of `row_statistics` [3, N]."""
    expect_ids_inside(token_ids, mask, len(weight))
    results = torch.empty(5, len(hidden), dtype=torch.float32, device=hidden.device)
    for logits, at in logits_chunks(hidden, weight, bias):
        results[0, at], results[1, at], results[2:, at] = compute_statistics(
            logits, token_ids[at], part(mask, at), part(temperatures, at), inv_temperature
        )
    return results[0].clone(), results[1].clone(), results[2:].clone()


@linear_token_logprobs_op.register_fake
def _(hidden, weight, bias, token_ids, *_):
    rows = torch.empty_like(token_ids, dtype=torch.float32)
    return rows, torch.empty_like(rows), rows.new_empty(3, rows.shape[0])


@torch.library.custom_op("vapo_kernels::linear_token_logprobs_backward", mutates_args=())
def linear_token_logprobs_backward_op(
    dlogprobs: Tensor,
    dentropy: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    mask: Tensor | None,
    temperatures: Tensor | None,
    inv_temperature: float,
    entropy: Tensor,
    statistics: Tensor,
    needed: list[bool],
) -> list[Tensor]:
    """The needed ones of ∂L/∂hidden, ∂L/∂weight, ∂L/∂bias."""
    gradients = empty_gradients(hidden, weight, bias, needed)
    for logits, at in logits_chunks(hidden, weight, bias):
        write_gradient(
            logits, dlogprobs[at], dentropy[at], logits, token_ids[at], part(mask, at), part(temperatures, at),
            inv_temperature, entropy[at], statistics[:, at].contiguous(),
        )  # fmt: skip
        accumulate(gradients, logits, hidden, weight, mask, at)
    return gradients.needed(hidden.dtype)


@linear_token_logprobs_backward_op.register_fake
def _(dlogprobs, dentropy, hidden, weight, bias, *rest):
    return fake_gradients(hidden, weight, bias, rest[-1], hidden.dtype)


def _save_for_backward(ctx, inputs, output):
    *tensors, ctx.inv_temperature = inputs
    _, entropy, statistics = output
    ctx.save_for_backward(*tensors, entropy, statistics)


def _backward(ctx, dlogprobs, dentropy, _):
    refuse_second_derivative("linear_token_logprobs")
    hidden, weight, bias, token_ids, mask, temperatures, entropy, statistics = ctx.saved_tensors
    needed = list(ctx.needs_input_grad[:3])
    gradients = iter(
        linear_token_logprobs_backward_op(
            dlogprobs.contiguous(), dentropy.contiguous(), hidden, weight, bias, token_ids, mask, temperatures,
            ctx.inv_temperature, entropy, statistics, needed,
        )
    )  # fmt: skip
    return *(next(gradients) if is_needed else None for is_needed in needed), None, None, None, None


linear_token_logprobs_op.register_autograd(_backward, setup_context=_save_for_backward)
