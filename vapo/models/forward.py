"""Model passes over sampled responses: only the states in which a token was sampled reach a head.

A micro-batch of responses becomes right-padded rows: under causal attention no real token ever sees padding on its
right, so no mask is needed, and rows of like length waste little. For flash attention it becomes one packed row without
padding, in which each sequence's positions start at 0. Either way what leaves the backbone is packed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from vapo.config import Config
from vapo.models.load import plain_head, value_head
from vapo.models.sharding import inside, max_over_ranks
from vapo.types import Rollout
from vapo_kernels import linear_token_logprobs, token_logprobs


@dataclass(frozen=True, slots=True)
class Inputs:
    """Tokens as a backbone takes them, and n states of interest among them.

    Attributes:
        input_ids: [B, T] int64.
        position_ids: [B, T] int64, or None where every row is one sequence.
        row: [n] int64. Row of each state.
        column: [n] int64. Column of each state.
    """

    input_ids: Tensor
    position_ids: Tensor | None
    row: Tensor
    column: Tensor

    @property
    def arguments(self) -> dict[str, object]:
        """Arguments of the forward pass. With a cache, attention would leak between packed sequences."""
        positions = {} if self.position_ids is None else {"position_ids": self.position_ids}
        return {"input_ids": self.input_ids, "use_cache": False, **positions}


def token_logits(policy: PreTrainedModel, rollout: Rollout, rows: Tensor) -> Tensor:
    """Logits of the distributions that the responses ``rows`` were sampled from, through the model's own forward.

    Args:
        policy: A causal language model; soft caps, scales and adapters of its head all have their say.
        rollout: The responses.
        rows: [R] int64. Which responses.

    Returns:
        [n, V]: a row for each token of these responses, in the order of :func:`token_indices`.

    Raises:
        ValueError: If a prompt is empty: the first token of its response would have no state.
    """
    return logits_at(policy, sampled_states(policy, rollout, rows))


def state_values(critic: PreTrainedModel, rollout: Rollout, rows: Tensor) -> Tensor:
    """V(s_t) of every state s_t in which a token of the responses ``rows`` was sampled, [n] float32."""
    return _values(critic, features_at(critic, sampled_states(critic, rollout, rows)))


def final_values(critic: PreTrainedModel, rollout: Rollout, rows: Tensor) -> Tensor:
    """V(s_l) of the state after the last token of each of the responses ``rows``, [R] float32."""
    return _values(critic, features_at(critic, final_states(critic, rollout, rows)))


def state_features(model: PreTrainedModel, rollout: Rollout, rows: Tensor) -> Tensor:
    """Hidden state from which each token of the responses ``rows`` is predicted, [n, H]."""
    return features_at(model, sampled_states(model, rollout, rows))


def features_at(model: PreTrainedModel, inputs: Inputs) -> Tensor:
    """Hidden states of the backbone where ``inputs`` says, [n, H]."""
    return model.base_model(**inputs.arguments).last_hidden_state[inputs.row, inputs.column]


def logits_at(policy: PreTrainedModel, inputs: Inputs) -> Tensor:
    """Logits of the model where ``inputs`` says, [n, V]; none are computed elsewhere."""
    with _head_sees_only(policy.get_output_embeddings(), inputs):
        # Not the module's call: inside a sharded root's forward that would begin another one.
        return policy.forward(**inputs.arguments).logits


def sampled_states(model: PreTrainedModel, rollout: Rollout, rows: Tensor) -> Inputs:
    """The states in which the tokens of the responses ``rows`` were sampled, laid out for the model's attention."""
    inputs = padded_inputs(rollout, rows)
    return packed_inputs(inputs, sequence_lengths(rollout, rows) - 1) if takes_packed_rows(model) else inputs


def final_states(model: PreTrainedModel, rollout: Rollout, rows: Tensor) -> Inputs:
    """The states after the last tokens of the responses ``rows``, laid out for the model's attention."""
    lengths = sequence_lengths(rollout, rows)
    sequences = torch.arange(len(rows), device=rows.device)
    inputs = Inputs(_padded_ids(rollout, rows), None, sequences, lengths - 1)
    return packed_inputs(inputs, lengths) if takes_packed_rows(model) else inputs


def takes_packed_rows(model: PreTrainedModel) -> bool:
    """Whether the model's attention runs over packed sequences without building a mask of all pairs."""
    return model.config._attn_implementation == "flash_attention_2"


def padded_inputs(rollout: Rollout, rows: Tensor) -> Inputs:
    """The responses ``rows``, each after its prompt, padded on the right; no token is predicted from the last one."""
    _, row, offset = _enumerate(rollout.cu_seqlens, rows)
    column = rollout.prompt_cu_seqlens.diff()[rows][row] + offset - 1
    return Inputs(_padded_ids(rollout, rows)[:, :-1], None, row, column)


def packed_inputs(padded: Inputs, lengths: Tensor) -> Inputs:
    """Lay right-padded sequences of ``lengths`` [R] end to end in one row, positions starting anew at each.

    Example:
        >>> padded = Inputs(torch.tensor([[5, 6, 7], [8, 9, 0]]), None, torch.tensor([0, 1]), torch.tensor([2, 1]))
        >>> packed = packed_inputs(padded, torch.tensor([3, 2]))
        >>> packed.input_ids.tolist(), packed.position_ids.tolist(), packed.column.tolist()
        ([[5, 6, 7, 8, 9]], [[0, 1, 2, 0, 1]], [2, 4])
    """
    offsets = torch.arange(padded.input_ids.shape[1], device=lengths.device)
    is_token = offsets < lengths[:, None]
    position_ids = offsets.expand_as(is_token)[is_token]
    starts = lengths.cumsum(0) - lengths
    column = starts[padded.row] + padded.column
    return Inputs(padded.input_ids[is_token][None], position_ids[None], torch.zeros_like(column), column)


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
    widths, order = sequence_lengths(rollout, rows).sort(stable=True)
    parts, start = [], 0
    for end, width in enumerate(widths.tolist()):
        if end > start and (end + 1 - start) * width > max_tokens:
            parts.append(rows[order[start:end]])
            start = end
    return [*parts, rows[order[start:]]] if len(rows) else []


def even_micro_batches(rollout: Rollout, rows: Tensor, max_tokens: int) -> Iterator[tuple[Tensor, bool]]:
    """Yield :func:`micro_batches`, as many on every rank, since ranks can only go through a sharded model together.

    Yields:
        Rows [r] int64, and whether they count: a rank that has no more repeats its first response and must ignore it.
    """
    parts = micro_batches(rollout, rows, max_tokens)
    # Asked before the first one: a rank that asks after its last would wait for others that wait for it.
    num_parts = max_over_ranks(len(parts))
    yield from ((part, True) for part in parts)
    yield from ((all_rows(rollout)[:1], False) for _ in range(num_parts - len(parts)))


def all_rows(rollout: Rollout) -> Tensor:
    """[S] int64. Every response of a rollout."""
    return torch.arange(len(rollout.is_correct), device=rollout.token_ids.device)


def sequence_lengths(rollout: Rollout, rows: Tensor) -> Tensor:
    """[R] int64. Tokens of the responses ``rows`` with their prompts."""
    return (rollout.prompt_cu_seqlens.diff() + rollout.lengths)[rows]


def _values(critic: PreTrainedModel, features: Tensor) -> Tensor:
    """Values [n] float32 of states [n, H], by float32 arithmetic whatever the features come in."""
    with torch.autocast(features.device.type, enabled=False):
        # Not a view: FSDP2 warns of those.
        return value_head(critic)(features.float()).squeeze(-1).clone()


@contextmanager
def _head_sees_only(head: nn.Module, inputs: Inputs) -> Iterator[None]:
    """Hand the output head [n, H] of the [B, T, H] hidden states, so that it computes no logits that nobody wants."""
    hook = head.register_forward_pre_hook(lambda _, hidden: (hidden[0][inputs.row, inputs.column],))
    try:
        yield
    finally:
        hook.remove()


def _padded_ids(rollout: Rollout, rows: Tensor) -> Tensor:
    """Prompts and responses as right-padded rows, [R, T] int64."""
    prompt_indices, prompt_row, prompt_offset = _enumerate(rollout.prompt_cu_seqlens, rows)
    indices, row, offset = _enumerate(rollout.cu_seqlens, rows)
    prompt_lengths = rollout.prompt_cu_seqlens.diff()[rows]
    if bool((prompt_lengths < 1).any()):
        raise ValueError(f"every prompt must have at least 1 token; got lengths {prompt_lengths.tolist()}")
    input_ids = rollout.token_ids.new_zeros(len(rows), int(sequence_lengths(rollout, rows).max()))
    input_ids[prompt_row, prompt_offset] = rollout.prompt_ids[prompt_indices]
    input_ids[row, prompt_lengths[row] + offset] = rollout.token_ids[indices]
    return input_ids


def _enumerate(cu_seqlens: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Place in the packed tensor, number in ``rows`` and offset in its sequence, of each token of ``rows``."""
    lengths = cu_seqlens.diff()[rows]
    row = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), lengths)
    offset = torch.arange(len(row), device=rows.device) - (lengths.cumsum(0) - lengths)[row]
    return cu_seqlens[rows][row] + offset, row, offset


@dataclass(frozen=True, slots=True)
class Passes:
    """What the models say of S responses, N tokens.

    Attributes:
        old_logprobs: [N] float32. log π_old of the sampled tokens, Eq. 4.
        ref_logprobs: [N] float32 or None. The same of the policy before RL, Eq. 2.
        values: [N] float32 or None. V(s_t) before each sampled token.
        final_values: [S] float32 or None. V(s_l) of cut responses, 0 of others.
    """

    old_logprobs: Tensor
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    final_values: Tensor | None = None


@torch.no_grad()
def rollout_logprobs(policy: PreTrainedModel, rollout: Rollout, config: Config) -> Tensor:
    """log π of every sampled token at the sampling temperature, [N] float32, without gradient."""
    logprobs = torch.zeros_like(rollout.rewards)
    for rows, counts in even_micro_batches(rollout, all_rows(rollout), config.micro_batch_tokens):
        tokens = token_indices(rollout.cu_seqlens, rows)
        found = inside(policy, _logprobs, rollout, rows, tokens, config.temperature)
        if counts:
            logprobs[tokens] = found
    return logprobs


def _logprobs(policy: PreTrainedModel, rollout: Rollout, rows: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    token_ids, head = rollout.token_ids[tokens], plain_head(policy)
    if head is None:
        return token_logprobs(token_logits(policy, rollout, rows), token_ids, temperature=temperature).logprobs
    features = state_features(policy, rollout, rows)
    return linear_token_logprobs(features, head.weight, token_ids, bias=head.bias, temperature=temperature).logprobs


@torch.no_grad()
def rollout_values(critic: PreTrainedModel, rollout: Rollout, config: Config) -> Tensor:
    """V(s_t) of the state before every sampled token, [N] float32, without gradient."""
    values = torch.zeros_like(rollout.rewards)
    for rows, counts in even_micro_batches(rollout, all_rows(rollout), config.micro_batch_tokens):
        found = inside(critic, state_values, rollout, rows)
        if counts:
            values[token_indices(rollout.cu_seqlens, rows)] = found
    return values


@torch.no_grad()
def truncated_values(critic: PreTrainedModel, rollout: Rollout, config: Config) -> Tensor:
    """V(s_l), the bootstrap of cut responses and 0 for others, [S] float32, without gradient."""
    values = torch.zeros(len(rollout.is_truncated), device=rollout.rewards.device)
    truncated = all_rows(rollout)[rollout.is_truncated]
    for rows, counts in even_micro_batches(rollout, truncated, config.micro_batch_tokens):
        found = inside(critic, final_values, rollout, rows)
        if counts:
            values[rows] = found
    return values
