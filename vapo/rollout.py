"""Sampling: a loop over a key-value cache that drops the rows that are done."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from vapo.rewards import terminal_rewards, verify
from vapo.tasks import Problem, Task
from vapo.types import Rollout


def collect(
    policy: PreTrainedModel,
    task: Task,
    problems: Sequence[Problem],
    *,
    group_size: int,
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator,
) -> tuple[Rollout, list[str]]:
    """Sample ``group_size`` responses to each problem and have them verified.

    Returns:
        The rollout of S = len(problems) · group_size responses, those to one problem side by side, and their texts.

    Raises:
        ValueError: If there is no problem, or as :func:`sample` does.
    """
    if not problems:
        raise ValueError("problems must hold at least 1 problem; got none")
    prompts = [torch.tensor(ids) for ids in task.tokenizer([problem.prompt for problem in problems]).input_ids]
    responses = sample(
        policy,
        prompts,
        group_size=group_size,
        max_new_tokens=max_new_tokens,
        eos_token_id=task.tokenizer.eos_token_id,
        temperature=temperature,
        generator=generator,
    )
    problems = [problem for problem in problems for _ in range(group_size)]
    prompts = [prompt for prompt in prompts for _ in range(group_size)]
    is_finished = torch.tensor([ids[-1] == task.tokenizer.eos_token_id for ids in responses])
    texts = task.tokenizer.batch_decode(responses, skip_special_tokens=True)
    is_correct = verify(task, problems, texts, is_finished)
    rollout = pack(prompts, responses, is_correct, is_finished, policy.device)
    return rollout, texts


def pack(
    prompts: Sequence[Tensor],
    responses: Sequence[Tensor],
    is_correct: Tensor,
    is_finished: Tensor,
    device: torch.device,
) -> Rollout:
    """Lay S prompts and responses end to end and reward 1 for each correct one, on its last token."""
    cu_seqlens = _bounds(responses)
    return Rollout(
        prompt_ids=torch.cat(list(prompts)).to(device),
        prompt_cu_seqlens=_bounds(prompts).to(device),
        token_ids=torch.cat(list(responses)).to(device),
        cu_seqlens=cu_seqlens.to(device),
        rewards=terminal_rewards(is_correct, cu_seqlens).to(device),
        is_correct=is_correct.to(device),
        is_finished=is_finished.to(device),
    )


@torch.no_grad()
def sample(
    policy: PreTrainedModel,
    prompts: Sequence[Tensor],
    *,
    group_size: int = 1,
    max_new_tokens: int,
    eos_token_id: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> list[Tensor]:
    """Sample responses to prompts of any lengths.

    Prompts of unequal length are padded on the left, masked there and given positions that start at their first token.

    Args:
        policy: A causal language model.
        prompts: P tensors [p] int64, p >= 1.
        group_size: Responses to each prompt.
        max_new_tokens: Where a response is cut.
        eos_token_id: The token that ends a response; it is part of it.
        temperature: Divides the logits; 0 takes the likeliest token instead of sampling.
        generator: Source of randomness; may be left out at temperature 0 only.

    Returns:
        P · group_size tensors [l] int64 on the CPU, 1 <= l <= max_new_tokens, those of one prompt side by side.

    Raises:
        ValueError: If there is no prompt, one is empty, a number is out of range or the generator is missing.
    """
    _check_sampling(prompts, group_size, max_new_tokens, temperature, generator)
    width, lengths = max(map(len, prompts)), torch.tensor([len(prompt) for prompt in prompts])
    input_ids = torch.stack([torch.nn.functional.pad(prompt, (width - len(prompt), 0)) for prompt in prompts])
    is_token = torch.arange(width) >= width - lengths[:, None]
    positions = (torch.arange(width) - (width - lengths[:, None])).clamp(min=0)
    # Without padding the causal mask is all there is, and attention is faster for knowing it.
    mask = None if bool(is_token.all()) else is_token.to(policy.device)

    cache = DynamicCache(config=policy.config)
    logits = _next_logits(policy, cache, input_ids.to(policy.device), positions.to(policy.device), mask)
    cache.batch_repeat_interleave(group_size)
    logits, positions = logits.repeat_interleave(group_size, 0), lengths.repeat_interleave(group_size).to(policy.device)
    mask = None if mask is None else mask.repeat_interleave(group_size, 0)

    num_rows = len(logits)
    tokens = torch.full((num_rows, max_new_tokens), eos_token_id)
    num_tokens = torch.full((num_rows,), max_new_tokens)
    alive = torch.arange(num_rows)
    for step in range(max_new_tokens):
        token = _choose(logits, temperature, generator)
        tokens[alive, step] = token.cpu()
        goes_on = token != eos_token_id
        if not bool(goes_on.all()):
            num_tokens[alive[~goes_on.cpu()]] = step + 1
            alive, token, positions = alive[goes_on.cpu()], token[goes_on], positions[goes_on]
            mask = None if mask is None else mask[goes_on]
            cache.batch_select_indices(goes_on.nonzero().squeeze(1))
        if not len(alive) or step + 1 == max_new_tokens:
            break
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, 1), value=True)
        logits = _next_logits(policy, cache, token[:, None], positions[:, None], mask)
        positions = positions + 1
    return [row[:length] for row, length in zip(tokens, num_tokens.tolist(), strict=True)]


def _next_logits(
    policy: PreTrainedModel, cache: DynamicCache, input_ids: Tensor, positions: Tensor, mask: Tensor | None
) -> Tensor:
    """Logits [B, V] float32 of the token after ``input_ids``; the cache grows by them."""
    backbone = policy.base_model
    # transformers 5.24 renamed the argument.
    name = "cache" if "cache" in inspect.signature(backbone.forward).parameters else "past_key_values"
    hidden = backbone(
        input_ids=input_ids, position_ids=positions, attention_mask=mask, use_cache=True, **{name: cache}
    ).last_hidden_state
    return policy.get_output_embeddings()(hidden[:, -1]).float()


def _choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """Next token of each row, [B] int64."""
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator).squeeze(1)


def _bounds(sequences: Sequence[Tensor]) -> Tensor:
    return torch.tensor([0, *(len(sequence) for sequence in sequences)]).cumsum(0)


def _check_sampling(
    prompts: Sequence[Tensor],
    group_size: int,
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator | None,
) -> None:
    if not prompts or min(map(len, prompts)) < 1:
        raise ValueError(f"prompts must be at least 1 non-empty tensor; got lengths {[len(p) for p in prompts]}")
    if group_size < 1 or max_new_tokens < 1:
        raise ValueError(f"group_size and max_new_tokens must be >= 1; got {group_size} and {max_new_tokens}")
    if not temperature >= 0:
        raise ValueError(f"temperature must be >= 0; got {temperature}")
    if temperature > 0 and generator is None:
        raise ValueError("generator must be a torch.Generator where temperature > 0; got None")
