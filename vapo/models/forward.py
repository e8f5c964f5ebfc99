"""Forward passes over sampled responses: only the states in which a token was sampled reach a head.

A micro-batch of responses becomes right-padded rows: under causal attention no real token ever sees padding on its
right, so no mask is needed, and rows of like length waste little. For flash attention it becomes one packed row without
padding, in which each sequence's positions start at 0. Either way what leaves the backbone is packed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from operator import add
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from vapo.config import Config
from vapo.models.load import value_head
from vapo.models.output_head import plain_head
from vapo.models.sharding import inside, max_over_ranks, set_gradient_reduction
from vapo.types import Rollout, bounds, token_indices
from vapo_kernels import linear_token_logprobs, token_logprobs

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Responses that go through a model together, with the sizes that lay them out.

    The sizes are numbers, so that nothing between the plan and the metrics waits for the device.

    Attributes:
        rows: [r] int64. Which responses.
        num_tokens: Sampled tokens of these responses.
        total: The same with their prompts.
        width: Tokens of the longest response with its prompt.
    """

    rows: Tensor
    num_tokens: int
    total: int
    width: int


def over_micro_batches(
    model: PreTrainedModel, body: Callable[..., T], rollout: Rollout, rows: Tensor, config: Config, *args: Any
) -> Iterator[tuple[MicroBatch, bool, T]]:
    """Call ``body(model, part, is_own, *args)`` on one micro-batch of responses after the other, inside the forward.

    Ranks can only go through a sharded model together, so each makes as many calls. A rank that has no more rows of its
    own repeats its first response with ``is_own`` False, which must count for nothing.

    Args:
        model: The model; see :func:`vapo.models.sharding.inside`.
        body: What is computed of a micro-batch.
        rollout: The responses.
        rows: [R] int64. Which responses.
        config: The size of micro-batches, and when gradients are summed over ranks.
        *args: Handed over to ``body``.

    Yields:
        The micro-batch, ``is_own`` and what ``body`` returned. Call backward on it before the next one.
    """
    parts = micro_batches(rollout, rows, config.used_micro_batch_tokens)
    # Asked before the first one: a rank that asks after its last would wait for others that wait for it.
    num_calls = max_over_ranks(len(parts))
    repeated = [] if len(parts) == num_calls else [micro_batch(rollout, all_rows(rollout)[:1])]
    for number in range(num_calls):
        is_own = number < len(parts)
        part = parts[number] if is_own else repeated[0]
        set_gradient_reduction(model, config.reduce_gradients == "micro_batch" or number == num_calls - 1)
        yield part, is_own, inside(model, body, part, is_own, *args)


def micro_batches(rollout: Rollout, rows: Tensor, max_tokens: int) -> list[MicroBatch]:
    """Cut the responses ``rows`` into micro-batches of like length. Waits for the device once.

    Args:
        rollout: The responses.
        rows: [R] int64. Which responses.
        max_tokens: Most tokens of a micro-batch, prompts and padding included; a longer response goes alone.

    Returns:
        A partition of ``rows``, shortest responses first.

    Raises:
        ValueError: If ``max_tokens`` is not positive, or a prompt is empty.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be >= 1; got {max_tokens}")
    rows = rows[sequence_lengths(rollout, rows).argsort(stable=True)]
    prompts, responses = _lengths(rollout, rows)
    widths = list(map(add, prompts, responses))
    starts = [0] if widths else []
    for number, width in enumerate(widths):
        if number > starts[-1] and (number + 1 - starts[-1]) * width > max_tokens:
            starts.append(number)
    return [
        MicroBatch(rows[start:end], sum(responses[start:end]), sum(widths[start:end]), widths[end - 1])
        for start, end in pairwise([*starts, len(widths)])
    ]


def micro_batch(rollout: Rollout, rows: Tensor) -> MicroBatch:
    """The responses ``rows`` [R] int64, R >= 1, in that order as one micro-batch. Waits for the device once.

    Raises:
        ValueError: If a prompt is empty.
    """
    prompts, responses = _lengths(rollout, rows)
    return MicroBatch(rows, sum(responses), sum(prompts) + sum(responses), max(map(add, prompts, responses)))


def _lengths(rollout: Rollout, rows: Tensor) -> tuple[list[int], list[int]]:
    """Lengths of the prompts and of the responses ``rows``."""
    prompts, responses = torch.stack((rollout.prompt_lengths, rollout.lengths))[:, rows].tolist()
    if min(prompts, default=1) < 1:
        # The first token of the response would have no state.
        raise ValueError(f"every prompt must have at least 1 token; got lengths {prompts}")
    return prompts, responses


def all_rows(rollout: Rollout) -> Tensor:
    """[S] int64. Every response of a rollout."""
    return torch.arange(len(rollout.is_correct), device=rollout.token_ids.device)


def tokens_of(rollout: Rollout, part: MicroBatch) -> Tensor:
    """Positions in [N] tensors of the tokens of the responses ``part``, response after response, [num_tokens] int64."""
    return token_indices(rollout.cu_seqlens, part.rows, part.num_tokens)


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
    """What ``read(model, rollout, part)`` gives of each micro-batch, [N] or [S] float32; 0 for all other responses."""
    results = torch.zeros(len(rollout.token_ids) if per_token else len(rollout.lengths), device=rows.device)

    def body(model: PreTrainedModel, part: MicroBatch, is_own: bool) -> Tensor:
        return read(model, rollout, part)

    for part, is_own, found in over_micro_batches(model, body, rollout, rows, config):
        if is_own:
            results[tokens_of(rollout, part) if per_token else part.rows] = found
    return results


def _logprobs(policy: PreTrainedModel, rollout: Rollout, part: MicroBatch, temperature: float) -> Tensor:
    token_ids, head = rollout.token_ids[tokens_of(rollout, part)], plain_head(policy)
    if head is None:
        return token_logprobs(token_logits(policy, rollout, part), token_ids, temperature=temperature).logprobs
    features = state_features(policy, rollout, part)
    return linear_token_logprobs(features, head.weight, token_ids, bias=head.bias, temperature=temperature).logprobs


def token_logits(policy: PreTrainedModel, rollout: Rollout, part: MicroBatch) -> Tensor:
    """Logits of the distributions that the responses ``part`` were sampled from, through the model's own forward.

    Args:
        policy: A causal language model; soft caps, scales and adapters of its head all have their say.
        rollout: The responses.
        part: Which responses.

    Returns:
        [n, V]: a row for each token of these responses, in the order of :func:`tokens_of`.
    """
    return logits_at(policy, sampled_states(policy, rollout, part))


def state_values(critic: PreTrainedModel, rollout: Rollout, part: MicroBatch) -> Tensor:
    """V(s_t) of every state s_t in which a token of the responses ``part`` was sampled, [n] float32."""
    return _values(critic, features_at(critic, sampled_states(critic, rollout, part)))


def final_values(critic: PreTrainedModel, rollout: Rollout, part: MicroBatch) -> Tensor:
    """V(s_l) of the state after the last token of each of the responses ``part``, [r] float32."""
    return _values(critic, features_at(critic, final_states(critic, rollout, part)))


def state_features(model: PreTrainedModel, rollout: Rollout, part: MicroBatch) -> Tensor:
    """Hidden state from which each token of the responses ``part`` is predicted, [n, H]."""
    return features_at(model, sampled_states(model, rollout, part))


@dataclass(frozen=True, slots=True)
class Inputs:
    """Tokens as a backbone takes them, and n states of interest among them.

    Attributes:
        input_ids: [B, T] int64.
        row: [n] int64. Row of each state.
        column: [n] int64. Column of each state.
        packing: Where one row holds several sequences, the arguments that say which; see :func:`packed_inputs`.
    """

    input_ids: Tensor
    row: Tensor
    column: Tensor
    packing: dict[str, object] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, object]:
        """Arguments of the forward pass. With a cache, attention would leak between packed sequences."""
        return {"input_ids": self.input_ids, "use_cache": False, **self.packing}


def features_at(model: PreTrainedModel, inputs: Inputs) -> Tensor:
    """Hidden states of the backbone where ``inputs`` says, [n, H]."""
    return model.base_model(**inputs.arguments).last_hidden_state[inputs.row, inputs.column]


def logits_at(policy: PreTrainedModel, inputs: Inputs) -> Tensor:
    """Logits of the model where ``inputs`` says, [n, V]; none are computed elsewhere."""
    with _head_sees_only(policy.get_output_embeddings(), inputs):
        # Not the module's call: inside a sharded root's forward that would begin another one.
        return policy.forward(**inputs.arguments).logits


def sampled_states(model: PreTrainedModel, rollout: Rollout, part: MicroBatch) -> Inputs:
    """The states in which the tokens of the responses ``part`` were sampled, laid out for the model's attention."""
    inputs = padded_inputs(rollout, part)
    if not takes_packed_rows(model):
        return inputs
    return packed_inputs(inputs, sequence_lengths(rollout, part.rows) - 1, part.total - len(part.rows))


def final_states(model: PreTrainedModel, rollout: Rollout, part: MicroBatch) -> Inputs:
    """The states after the last tokens of the responses ``part``, laid out for the model's attention."""
    lengths = sequence_lengths(rollout, part.rows)
    sequences = torch.arange(len(part.rows), device=lengths.device)
    inputs = Inputs(_padded(rollout, part), sequences, lengths - 1)
    return packed_inputs(inputs, lengths, part.total) if takes_packed_rows(model) else inputs


def takes_packed_rows(model: PreTrainedModel) -> bool:
    """Whether the model's attention runs over packed sequences without building a mask of all pairs."""
    return model.config._attn_implementation == "flash_attention_2"


def padded_inputs(rollout: Rollout, part: MicroBatch) -> Inputs:
    """The responses ``part``, each after its prompt, padded on the right; no token is predicted from the last one."""
    row, offset = _sequences(rollout.lengths[part.rows], part.num_tokens)
    return Inputs(_padded(rollout, part)[:, :-1], row, rollout.prompt_lengths[part.rows][row] + offset - 1)


def packed_inputs(padded: Inputs, lengths: Tensor, total: int) -> Inputs:
    """Lay right-padded sequences of ``lengths`` [R], ``total`` tokens, end to end in one row.

    Positions start anew at each. Flash attention also gets the bounds, which it would else look for in every layer.

    Example:
        >>> padded = Inputs(torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([0, 1]), torch.tensor([2, 1]))
        >>> packed = packed_inputs(padded, torch.tensor([3, 2]), 5)
        >>> packed.input_ids.tolist(), packed.packing["position_ids"].tolist(), packed.column.tolist()
        ([[5, 6, 7, 8, 9]], [[0, 1, 2, 0, 1]], [2, 4])
    """
    row, offset = _sequences(lengths, total)
    cu_seqlens, width = bounds(lengths), padded.input_ids.shape[1]
    column = cu_seqlens[padded.row] + padded.column
    packing = {
        "position_ids": offset[None],
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), cu_seqlens.int()),
        **dict.fromkeys(("max_length_q", "max_length_k"), width),
    }
    return Inputs(padded.input_ids[row, offset][None], torch.zeros_like(column), column, packing)


def _padded(rollout: Rollout, part: MicroBatch) -> Tensor:
    """Prompts and responses as right-padded rows, [r, width] int64."""
    rows = part.rows[:, None]
    column = torch.arange(part.width, device=rows.device)
    offset = column - rollout.prompt_lengths[rows]
    is_prompt, is_response = offset < 0, (offset >= 0) & (offset < rollout.lengths[rows])
    prompt = rollout.prompt_ids[torch.where(is_prompt, rollout.prompt_cu_seqlens[rows] + column, 0)]
    response = rollout.token_ids[torch.where(is_response, rollout.cu_seqlens[rows] + offset, 0)]
    return torch.where(is_prompt, prompt, response * is_response)


def _sequences(lengths: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """For each of the ``total`` tokens of sequences laid end to end: its sequence, and its position there."""
    row = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths, output_size=total)
    return row, torch.arange(total, device=lengths.device) - bounds(lengths)[row]


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
