"""From the verifier's word to rewards on packed tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
    verdicts = task.score([problems[row] for row in finished], [responses[row] for row in finished])
    errors = []
    for row, verdict in zip(finished, verdicts, strict=True):
        error = verdict.error
        if error is None and not abs(verdict.score) <= LARGEST_SCORE:
            error = f"a score must be a finite float32; got {verdict.score}"
        if error is None:
            scores[row], is_correct[row] = verdict.score, verdict.is_correct
        else:
            errors.append(error)
    return scores.to(is_truncated.device), is_correct.to(is_truncated.device), errors


def terminal_rewards(scores: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Place each response's score on its last sampled token, zero elsewhere (Eq. 8).

    Args:
        scores: [S] float32 or bool. The verifier's score of each response.
        cu_seqlens: [S+1] int64. Bounds of the responses, each with one token or more.

    Returns:
        [N] float32.

    Raises:
        ValueError: If the shapes do not agree or a response is empty, since it has no token to carry its reward.

    Example:
        >>> terminal_rewards(torch.tensor([1.0, 2.0]), torch.tensor([0, 2, 3]))
        tensor([0., 1., 2.])
    """
    if scores.dim() != 1 or cu_seqlens.shape != (scores.numel() + 1,):
        raise ValueError(
            f"scores must be [S] and cu_seqlens [S+1]; got {tuple(scores.shape)} and {tuple(cu_seqlens.shape)}"
        )
    if bool((cu_seqlens.diff() < 1).any()):
        raise ValueError(f"every response must have at least 1 token; got lengths {cu_seqlens.diff().tolist()}")
    rewards = torch.zeros(int(cu_seqlens[-1]), device=scores.device)
    rewards[cu_seqlens[1:] - 1] = scores.float()
    return rewards
