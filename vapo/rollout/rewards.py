"""From a verifier's results to rewards on tokens. Light to import: the integrations need `terminal_rewards` alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vapo.tasks import Problem, Task

LARGEST_SCORE = torch.finfo(torch.float32).max


def verify(
    task: Task, problems: Sequence[Problem], responses: Sequence[str], is_truncated: Tensor
) -> tuple[Tensor, Tensor, list[str]]:
    """Have each response scored. One that the length limit cut is wrong and scores 0; the verifier never sees it.

    Args:
        task: Whose verifier is asked.
        problems: S problems.
        responses: S texts without special tokens.
        is_truncated: [S] bool.

    Returns:
        Scores [S] float32, is_correct [S] bool, and what went wrong in the verifier: a text for each response that
        it failed on or gave a score that no float32 holds, which scores 0 and is wrong.

    Raises:
        ValueError: If the three do not have the same length.
    """
    if not len(problems) == len(responses) == len(is_truncated):
        raise ValueError(
            "problems, responses and is_truncated must have the same length;"
            f" got {len(problems)}, {len(responses)} and {len(is_truncated)}"
        )
    scores = torch.zeros(len(problems))
    is_correct = torch.zeros(len(problems), dtype=torch.bool)
    finished = (~is_truncated).nonzero().squeeze(1).tolist()
    results = task.score([problems[row] for row in finished], [responses[row] for row in finished])
    errors = []
    for row, result in zip(finished, results, strict=True):
        error = result.error
        if error is None and not abs(result.score) <= LARGEST_SCORE:
            error = f"a score must be a finite float32; got {result.score}"
        if error is None:
            scores[row], is_correct[row] = result.score, result.is_correct
        else:
            errors.append(error)
    return scores.to(is_truncated.device), is_correct.to(is_truncated.device), errors


def terminal_rewards(scores: Tensor, mask: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Put each response's score on its last sampled token, 0 elsewhere (Eq. 8); a response without one gets none.

    Args:
        scores: [S] floating or bool. The score of each response.
        mask: [N], or [S, T] without ``cu_seqlens``: bool, integer or float 0/1, True on tokens that the policy sampled.
        cu_seqlens: [S+1] int32 or int64. Bounds of the responses in a packed ``mask``.

    Returns:
        float32, of the shape of ``mask``.

    Raises:
        ValueError: If the shapes do not agree.

    Example:
        >>> terminal_rewards(torch.tensor([1.0, 2.0]), torch.tensor([1, 1, 0, 1]), torch.tensor([0, 3, 4]))
        tensor([0., 1., 0., 2.])
        >>> terminal_rewards(torch.tensor([1.0, 2.0]), torch.tensor([[1, 1, 0], [0, 0, 0]]))
        tensor([[0., 1., 0.],
                [0., 0., 0.]])
    """
    if cu_seqlens is None and mask.dim() == 2:
        cu_seqlens = torch.arange(len(mask) + 1, device=mask.device) * mask.shape[1]
    elif cu_seqlens is None or mask.dim() != 1:
        raise ValueError(f"mask must be [N] with cu_seqlens or [S, T] without; got {tuple(mask.shape)}")
    if scores.dim() != 1 or cu_seqlens.shape != (scores.numel() + 1,):
        raise ValueError(
            f"scores must be [S] and cu_seqlens [S+1]; got {tuple(scores.shape)} and {tuple(cu_seqlens.shape)}"
        )
    is_sampled, num_responses = mask.reshape(-1) != 0, len(scores)
    response = torch.arange(num_responses, device=mask.device).repeat_interleave(
        cu_seqlens.diff(), output_size=len(is_sampled)
    )
    counts = torch.nn.functional.pad(is_sampled.cumsum(0), (1, 0))
    is_last = is_sampled & (counts[1:] == counts[cu_seqlens[1:]][response])
    return torch.where(is_last, scores.float()[response], 0.0).view(mask.shape)
