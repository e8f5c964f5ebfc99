"""Inputs, truth and PyTorch baselines that the benches of log-probs and policy losses share.

The loss is the part that every peer has: the clipped surrogate, one advantage a response, a mean over the tokens. Rows
are laid out as the peers ask: B responses of T positions each, the last of which predicts nothing and is masked.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from vapo_kernels import _dispatch

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
ROWS_OF_TRUTH = 64


class Piece(NamedTuple):
    """Some rows of the truth, float64: which, ∂loss/∂logits [n, V], their share of the loss."""

    at: slice
    dlogits: Tensor
    loss: Tensor


def token_inputs(b: int, t: int, V: int, device: str, logits_of_rows: Callable[[slice], Tensor]) -> dict:
    """All per-token arguments [B, T]; responses fill 60 to 100 % and ratios fall on both sides of both clips.

    Args:
        logits_of_rows: The logits of some of the B·T rows.
    """
    draw = torch.Generator(device).manual_seed(0)
    lengths = ((t - 1) * (0.6 + 0.4 * torch.rand(b, generator=draw, device=device))).long().clamp(min=1)
    token_ids = torch.randint(V, (b, t), generator=draw, device=device)
    response_advantages = torch.randn(b, generator=draw, device=device)
    # Ratios of 0.6, 0.9, 1.1 and 1.6: none so near a clip that rounding would decide on which side it lies.
    log_ratios = torch.tensor([-0.5, -0.1, 0.1, 0.5], device=device)[
        torch.randint(4, (b, t), generator=draw, device=device)
    ]
    return {
        "token_ids": token_ids,
        "old_logprobs": _logprobs(logits_of_rows, token_ids) - log_ratios,
        "advantages": response_advantages.unsqueeze(1).expand(b, t).contiguous(),
        "response_advantages": response_advantages,
        "mask": torch.arange(t, device=device) < lengths.unsqueeze(1),
        "is_correct": (response_advantages > 0).unsqueeze(1).expand(b, t).contiguous(),
        "upstream": {"loss": torch.ones((), device=device), "nll_loss": torch.ones((), device=device)},
    }


def _pieces(num_rows: int) -> Iterator[slice]:
    return (slice(start, min(start + ROWS_OF_TRUTH, num_rows)) for start in range(0, num_rows, ROWS_OF_TRUTH))


def _logprobs(logits_of_rows, token_ids: Tensor) -> Tensor:
    ids = token_ids.flatten().unsqueeze(1)
    found = [torch.log_softmax(logits_of_rows(at).float(), -1).gather(1, ids[at]) for at in _pieces(len(ids))]
    return torch.cat(found).view(token_ids.shape)


def need_triton(x: Tensor) -> None:
    """Refuse what a Triton kernel cannot run on."""
    if not (x.is_cuda or _dispatch.use_triton(x)):
        raise RuntimeError("a Triton kernel: needs a GPU")


def arguments(inputs: dict) -> tuple[Tensor, ...]:
    """What every policy loss of ours takes behind the logits."""
    return inputs["token_ids"], inputs["old_logprobs"], inputs["advantages"], inputs["mask"]


def true_pieces(inputs: dict, logits_of_rows: Callable[[slice], Tensor], *, nll: bool = False) -> Iterator[Piece]:
    """The reference's loss in float64, some rows at a time, which bounds the memory."""
    from vapo_kernels import reference

    ids, old, advantages, mask = (x.flatten() for x in arguments(inputs))
    correct = inputs["is_correct"].flatten()
    num_correct = (correct & mask).sum()
    for at in _pieces(len(ids)):
        logits = logits_of_rows(at).double().requires_grad_()
        tokens = (old[at].double(), advantages[at].double(), mask[at])
        options = {"is_correct": correct[at], "num_correct_tokens": num_correct} if nll else {}
        logprobs = torch.log_softmax(logits, -1).gather(1, ids[at].unsqueeze(1)).squeeze(1)
        loss = reference.logprob_policy_loss(logprobs, *tokens, num_tokens=mask.sum(), **options).loss
        yield Piece(at, torch.autograd.grad(loss, logits)[0], loss.detach())


def clipped_loss(logprobs: Tensor, inputs: dict) -> Tensor:
    """The loss of log-probs [B, T] in plain PyTorch, for peers that stop at the log-probs."""
    advantages, mask = inputs["advantages"], inputs["mask"]
    # What a masked row holds must not reach the exponential.
    ratio = (logprobs.float() - inputs["old_logprobs"]).masked_fill(~mask, 0.0).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantages)
    return -(surrogate * mask).sum() / mask.sum()


def plain_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """What most trainers write."""
    return torch.log_softmax(logits.float(), dim=-1).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
