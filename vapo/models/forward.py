"""Forward passes over sampled responses: only the states in which a token was sampled reach a head.

A micro-batch of responses becomes right-padded rows: under causal attention no real token ever sees padding on its
right, so no mask is needed, and rows of like length waste little. For flash attention it becomes one packed row without
padding, in which each sequence's positions start at 0. Either way what leaves the backbone is packed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from vapo.config import Config
from vapo.models.load import value_head
from vapo.models.output_head import plain_head
from vapo.models.sharding import inside, max_over_ranks
from vapo.types import Rollout, token_indices
from vapo_kernels import linear_token_logprobs, token_logprobs

T = TypeVar("T")


def over_micro_batches(
    model: PreTrainedModel, body: Callable[..., T], rollout: Rollout, rows: Tensor, max_tokens: int, *args: Any
) -> Iterator[tuple[Tensor, bool, T]]:
    """Call ``body(model, rows, is_own, *args)`` on one micro-batch of responses after the other, inside the forward.

    Ranks can only go through a sharded model together, so each makes as many calls. A rank that has no more rows of its
    own repeats its first response with ``is_own`` False, which must count for nothing.

    Args:
        model: The model; see :func:`vapo.models.sharding.inside`.
        body: What is computed of a micro-batch.
        rollout: The responses.
        rows: [R] int64. Which responses.
        max_tokens: Most tokens of a micro-batch, as in :func:`micro_batches`.
        *args: Handed over to ``body``.

    Yields:
        Rows [r] int64, ``is_own`` and what ``body`` returned. Call backward on it before the next one.
    """
    parts = micro_batches(rollout, rows, max_tokens)
    # Asked before the first one: a rank that asks after its last would wait for others that wait for it.
    for number in range(max_over_ranks(len(parts))):
        is_own = number < len(parts)
        part = parts[number] if is_own else all_rows(rollout)[:1]
        yield part, is_own, inside(model, body, part, is_own, *args)


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


def all_rows(rollout: Rollout) -> Tensor:
    """[S] int64. Every response of a rollout."""
    return torch.arange(len(rollout.is_correct), device=rollout.token_ids.device)


def sequence_lengths(rollout: Rollout, rows: Tensor) -> Tensor:
    """[R] int64. Tokens of the responses ``rows`` with their prompts."""
    return (rollout.prompt_lengths + rollout.lengths)[rows]


def rollout_logprobs(policy: PreTrainedModel, rollout: Rollout, config: Config) -> Tensor:
    """log π of every sampled token at the sampling temperature, [N] float32, without gradient."""
    read = partial(_logprobs, temperature=config.temperature)
    return _results(policy, read, rollout, all_rows(rollout), config, per_token=True)


def rollout_values(critic: PreTrainedModel, rollout: Rollout, config: Config) -> Tensor:
    """V(s_t) of the state before every sampled token, [N] float32, without gradient."""
    return _results(critic, state_values, rollout, all_rows(rollout), config, per_token=True)


def bootstrap_values(critic: PreTrainedModel, rollout: Rollout, config: Config) -> Tensor:
    """V(s_l) after the last token of truncated responses, 0 for others, [S] float32, without gradient."""
    truncated = all_rows(rollout)[rollout.is_truncated]
    return _results(critic, final_values, rollout, truncated, config, per_token=False)


@torch.no_grad()
def _results(
    model: PreTrainedModel, read: Callable[..., Tensor], rollout: Rollout, rows: Tensor, config: Config, per_token: bool
) -> Tensor:
    """What ``read(model, rollout, rows)`` gives, in micro-batches, [N] or [S] float32; 0 for all other responses."""
    results = torch.zeros(len(rollout.token_ids) if per_token else len(rollout.lengths), device=rows.device)

    def body(model: PreTrainedModel, rows: Tensor, is_own: bool) -> Tensor:
        return read(model, rollout, rows)

    for part, is_own, found in over_micro_batches(model, body, rollout, rows, config.used_micro_batch_tokens):
        if is_own:
            results[token_indices(rollout.cu_seqlens, part) if per_token else part] = found
    return results


def _logprobs(policy: PreTrainedModel, rollout: Rollout, rows: Tensor, temperature: float) -> Tensor:
    token_ids, head = rollout.token_ids[token_indices(rollout.cu_seqlens, rows)], plain_head(policy)
    if head is None:
        return token_logprobs(token_logits(policy, rollout, rows), token_ids, temperature=temperature).logprobs
    features = state_features(policy, rollout, rows)
    return linear_token_logprobs(features, head.weight, token_ids, bias=head.bias, temperature=temperature).logprobs


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
    inputs = Inputs(_padded(rollout, rows)[0], None, sequences, lengths - 1)
    return packed_inputs(inputs, lengths) if takes_packed_rows(model) else inputs


def takes_packed_rows(model: PreTrainedModel) -> bool:
    """Whether the model's attention runs over packed sequences without building a mask of all pairs."""
    return model.config._attn_implementation == "flash_attention_2"


def padded_inputs(rollout: Rollout, rows: Tensor) -> Inputs:
    """The responses ``rows``, each after its prompt, padded on the right; no token is predicted from the last one."""
    input_ids, is_response = _padded(rollout, rows)
    row, column = is_response.nonzero(as_tuple=True)
    return Inputs(input_ids[:, :-1], None, row, column - 1)


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


def _padded(rollout: Rollout, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Prompts and responses as right-padded rows, [R, T] int64, and where the responses are, [R, T] bool."""
    prompt_lengths, lengths = rollout.prompt_lengths[rows, None], sequence_lengths(rollout, rows)[:, None]
    if bool((prompt_lengths < 1).any()):
        raise ValueError(f"every prompt must have at least 1 token; got lengths {prompt_lengths.flatten().tolist()}")
    columns = torch.arange(int(lengths.max()), device=rows.device)
    is_prompt, is_token = columns < prompt_lengths, columns < lengths
    input_ids = rollout.token_ids.new_zeros(is_token.shape)
    input_ids[is_prompt] = rollout.prompt_ids[token_indices(rollout.prompt_cu_seqlens, rows)]
    input_ids[is_token & ~is_prompt] = rollout.token_ids[token_indices(rollout.cu_seqlens, rows)]
    return input_ids, is_token & ~is_prompt


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
