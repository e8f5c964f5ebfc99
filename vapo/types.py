"""What flows between the steps of the trainer. Every tensor over tokens is packed: S responses end to end, N tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

# The phases of a run in their order, with the names that a person reads.
PHASES = {"warm_start": "warm start", "value_pretraining": "value pretraining", "vapo": "VAPO"}


class Response(NamedTuple):
    """One response as an engine sampled it.

    Attributes:
        token_ids: [l] int64 on the CPU, the stop token included.
        logprobs: [l] float32, the engine's own log-probs of the distributions that the tokens were sampled from; None
            where the engine does not tell.
    """

    token_ids: Tensor
    logprobs: Tensor | None


@dataclass(frozen=True, slots=True)
class Rollout:
    """Sampled responses with their rewards; prompts are kept apart, since no op ever sees them.

    Attributes:
        prompt_ids: [M] int64. The prompt of each response, end to end.
        prompt_cu_seqlens: [S+1] int64. Bounds of the prompts in ``prompt_ids``.
        token_ids: [N] int64. The sampled tokens, the stop token included.
        cu_seqlens: [S+1] int64. Bounds of the responses in every [N] tensor.
        rewards: [N] float32. Zero except, perhaps, at each response's last sampled token.
        is_correct: [S] bool. The verifier's result.
        is_truncated: [S] bool. The length limit cut the response.
        group_size: Responses to each prompt; they stand side by side.
        engine_logprobs: [N] float32 or None. The engine's own log-probs of the sampled tokens, where it tells them.
    """

    prompt_ids: Tensor
    prompt_cu_seqlens: Tensor
    token_ids: Tensor
    cu_seqlens: Tensor
    rewards: Tensor
    is_correct: Tensor
    is_truncated: Tensor
    group_size: int
    engine_logprobs: Tensor | None = None

    @property
    def lengths(self) -> Tensor:
        """[S] int64. Sampled tokens of each response."""
        return self.cu_seqlens.diff()

    @property
    def prompt_lengths(self) -> Tensor:
        """[S] int64. Tokens of each response's prompt."""
        return self.prompt_cu_seqlens.diff()

    @property
    def scores(self) -> Tensor:
        """[S] float32. Sum of each response's rewards."""
        return torch.segment_reduce(self.rewards, "sum", lengths=self.lengths)

    def select(self, rows: Tensor) -> Rollout:
        """Copy the responses ``rows`` [R] int64, in that order; whole groups, so that ``group_size`` stays true."""
        tokens = token_indices(self.cu_seqlens, rows)
        return Rollout(
            prompt_ids=self.prompt_ids[token_indices(self.prompt_cu_seqlens, rows)],
            prompt_cu_seqlens=bounds(self.prompt_lengths[rows]),
            token_ids=self.token_ids[tokens],
            cu_seqlens=bounds(self.lengths[rows]),
            rewards=self.rewards[tokens],
            is_correct=self.is_correct[rows],
            is_truncated=self.is_truncated[rows],
            group_size=self.group_size,
            engine_logprobs=None if self.engine_logprobs is None else self.engine_logprobs[tokens],
        )

    @staticmethod
    def cat(rollouts: Sequence[Rollout]) -> Rollout:
        """Lay rollouts of the same group size end to end."""

        def joined(name: str) -> Tensor:
            return torch.cat([getattr(rollout, name) for rollout in rollouts])

        return Rollout(
            prompt_ids=joined("prompt_ids"),
            prompt_cu_seqlens=bounds(joined("prompt_lengths")),
            token_ids=joined("token_ids"),
            cu_seqlens=bounds(joined("lengths")),
            rewards=joined("rewards"),
            is_correct=joined("is_correct"),
            is_truncated=joined("is_truncated"),
            group_size=rollouts[0].group_size,
            engine_logprobs=None if rollouts[0].engine_logprobs is None else joined("engine_logprobs"),
        )


def bounds(lengths: Tensor) -> Tensor:
    """``cu_seqlens`` of sequences of these lengths, [S] to [S+1] int64.

    Example:
        >>> bounds(torch.tensor([2, 1]))
        tensor([0, 2, 3])
    """
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def token_indices(cu_seqlens: Tensor, rows: Tensor, num_tokens: int | None = None) -> Tensor:
    """Positions, in a packed tensor, of the tokens of the sequences ``rows``, row after row.

    ``num_tokens`` is the number of these tokens; without it the host waits for the device.

    Example:
        >>> token_indices(torch.tensor([0, 2, 3, 5]), torch.tensor([2, 0]))
        tensor([3, 4, 0, 1])
    """
    lengths = cu_seqlens.diff()[rows]
    shifts = (cu_seqlens[rows] - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths, output_size=num_tokens)
    return shifts + torch.arange(len(shifts), device=shifts.device)


@dataclass(frozen=True, slots=True)
class Batch:
    """A rollout with all that the optimiser steps need to know; nothing here carries a gradient.

    Attributes:
        rollout: The responses.
        mask: [N] bool. Tokens that train.
        old_logprobs: [N] float32. log π_old of the sampled tokens, Eq. 4.
        ref_logprobs: [N] float32 or None. Those of the reference policy, where a KL term wants them, Eq. 2.
        old_values: [N] float32. V(s_t) when the responses were collected.
        rewards: [N] float32. The rollout's rewards after all shaping.
        advantages: [N] float32. Eq. 5 with each response's λ_policy, whitened if the config says so.
        returns: [N] float32. Eq. 9 with λ_critic.
        lam_policy: [S] float32 or None. λ of each response's advantages, Eq. 15; None with group advantages.
        importance_weights: [N] float32 or None. Truncated importance weights, Eq. 18; None where all are 1.
    """

    rollout: Rollout
    mask: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor | None
    old_values: Tensor
    rewards: Tensor
    advantages: Tensor
    returns: Tensor
    lam_policy: Tensor | None
    importance_weights: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step of any phase tells of itself.

    Attributes:
        metrics: Name to number, as in docs/metrics.md.
        samples: Responses to record.
        errors: Tracebacks of verifiers that failed.
        skipped: Why optimiser steps were skipped; empty if none was.
    """

    metrics: dict[str, float]
    samples: list[dict[str, object]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    skipped: str = ""
