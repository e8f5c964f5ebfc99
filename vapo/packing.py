"""Model passes over sampled responses: only the states in which a token was sampled reach a head.

A micro-batch of responses becomes right-padded rows. Under causal attention no real token ever sees padding on its
right, so no mask is needed, and rows of like length waste little; what leaves the backbone is packed again.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vapo.types import Rollout


def token_logits(policy: PreTrainedModel, rollout: Rollout, rows: Tensor) -> Tensor:
    """Logits of the distributions that the responses ``rows`` were sampled from.

    Args:
        policy: A causal language model.
        rollout: The responses.
        rows: [R] int64. Which responses.

    Returns:
        [n, V]: a row for each token of these responses, in the order of :func:`token_indices`.
    """
    return policy.get_output_embeddings()(state_features(policy, rollout, rows))


def state_values(critic: PreTrainedModel, rollout: Rollout, rows: Tensor) -> Tensor:
    """V(s_t) of every state s_t in which a token of the responses ``rows`` was sampled, [n] float32."""
    return critic.score(state_features(critic, rollout, rows)).squeeze(-1).float()


def state_features(model: PreTrainedModel, rollout: Rollout, rows: Tensor) -> Tensor:
    """Hidden state from which each token of the responses ``rows`` is predicted, [n, H].

    Raises:
        ValueError: If a prompt is empty: the first token of its response would have no state.
    """
    prompt_indices, prompt_row, prompt_offset = _enumerate(rollout.prompt_cu_seqlens, rows)
    indices, row, offset = _enumerate(rollout.cu_seqlens, rows)
    prompt_lengths = rollout.prompt_cu_seqlens.diff()[rows]
    if bool((prompt_lengths < 1).any()):
        raise ValueError(f"every prompt must have at least 1 token; got lengths {prompt_lengths.tolist()}")
    column = prompt_lengths[row] + offset
    width = int((prompt_lengths + rollout.lengths[rows]).max())
    input_ids = rollout.token_ids.new_zeros(len(rows), width)
    input_ids[prompt_row, prompt_offset] = rollout.prompt_ids[prompt_indices]
    input_ids[row, column] = rollout.token_ids[indices]
    # No token is predicted from the last one.
    hidden = model.base_model(input_ids=input_ids[:, :-1], use_cache=False).last_hidden_state
    return hidden[row, column - 1]


def token_indices(cu_seqlens: Tensor, rows: Tensor) -> Tensor:
    """Places, in a packed tensor, of the tokens of the sequences ``rows``, row after row.

    Example:
        >>> token_indices(torch.tensor([0, 2, 3, 5]), torch.tensor([2, 0]))
        tensor([3, 4, 0, 1])
    """
    return _enumerate(cu_seqlens, rows)[0]


def micro_batches(rollout: Rollout, rows: Tensor, max_tokens: int) -> list[Tensor]:
    """Cut the responses ``rows`` into micro-batches of like length.

    Args:
        rollout: The responses.
        rows: [R] int64. Which responses.
        max_tokens: Most tokens of a micro-batch, prompts and padding included; a longer response goes alone.

    Returns:
        A partition of ``rows``, shortest responses first.

    Raises:
        ValueError: If ``max_tokens`` is not positive.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be >= 1; got {max_tokens}")
    widths = (rollout.prompt_cu_seqlens.diff() + rollout.lengths)[rows]
    widths, order = widths.sort(stable=True)
    parts, start = [], 0
    for end, width in enumerate(widths.tolist()):
        if end > start and (end + 1 - start) * width > max_tokens:
            parts.append(rows[order[start:end]])
            start = end
    return [*parts, rows[order[start:]]] if len(rows) else []


def all_rows(rollout: Rollout) -> Tensor:
    """[S] int64. Every response of a rollout."""
    return torch.arange(len(rollout.is_correct), device=rollout.token_ids.device)


def _enumerate(cu_seqlens: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Place in the packed tensor, number in ``rows`` and offset in its sequence, of each token of ``rows``."""
    lengths = cu_seqlens.diff()[rows]
    row = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), lengths)
    offset = torch.arange(len(row), device=rows.device) - (lengths.cumsum(0) - lengths)[row]
    return cu_seqlens[rows][row] + offset, row, offset
