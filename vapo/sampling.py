"""Sampling: a loop over a key-value cache that drops the rows that are done, or transformers' own generation."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import ContinuousBatchingConfig

from vapo.config import Config
from vapo.models import stop_token_ids

ENGINES = ("loop", "transformers")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How responses are drawn.

    The log-probs of training are those of the whole distribution at ``temperature``. Tokens drawn under ``top_p`` < 1
    or ``top_k`` > 0 come from what survives the cut, renormalised, so their likelihood is off by the surviving mass:
    leave both as they are for training, and use them for evaluation alone.

    The same generator gives the same responses, except from continuous batching on CUDA, where the order in which
    requests share a batch depends on time.

    Attributes:
        max_new_tokens: Where a response is cut.
        stop_token_ids: A response ends with any of these, which is part of it.
        temperature: Divides the logits; 0 takes the likeliest token instead of sampling.
        top_p: Keeps the likeliest tokens that together reach this probability.
        top_k: Keeps this many of the likeliest tokens, before ``top_p``; 0 keeps all.
        engine: "loop" is ours; "transformers" is ``policy.generate``, on CUDA with continuous batching.
        batch_size: Most responses drawn at once, at least those to one prompt; 0 draws all. Continuous batching fits
            its cache to the memory that is free, and draws all in any case.

    Raises:
        ValueError: If a number is out of range, there is no stop token or no such engine.
    """

    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    engine: str = "loop"
    batch_size: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be >= 1; got {self.max_new_tokens}")
        if not self.stop_token_ids:
            raise ValueError("stop_token_ids must hold at least 1 token; got none")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be >= 0 and finite; got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1]; got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0; got {self.top_k}")
        if self.batch_size < 0:
            raise ValueError(f"batch_size must be >= 0; got {self.batch_size}")
        if self.engine not in ENGINES:
            raise ValueError(f"engine must be one of {', '.join(ENGINES)}; got {self.engine!r}")


def sampling_of(config: Config, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Sampling:
    """How a run samples its training rollouts."""
    return Sampling(
        max_new_tokens=config.max_new_tokens,
        stop_token_ids=stop_token_ids(policy, tokenizer, config.stop),
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        engine=config.engine,
        batch_size=config.rollout_batch_size,
    )


@torch.no_grad()
def sample(
    policy: PreTrainedModel,
    prompts: Sequence[Tensor],
    *,
    group_size: int = 1,
    sampling: Sampling,
    generator: torch.Generator | None = None,
) -> list[Tensor]:
    """Sample responses to prompts of any lengths.

    Args:
        policy: A causal language model.
        prompts: P tensors [p] int64, p >= 1.
        group_size: Responses to each prompt.
        sampling: How they are drawn.
        generator: Source of randomness, on the policy's device; may be left out at temperature 0 only.

    Returns:
        P · group_size tensors [l] int64 on the CPU, 1 <= l <= max_new_tokens, those of one prompt side by side.

    Raises:
        ValueError: If there is no prompt, one is empty or leaves no room for ``max_new_tokens`` in the model's
            positions, ``group_size`` is not positive or the generator is missing.
    """
    _check_prompts(policy, prompts, sampling.max_new_tokens)
    if group_size < 1:
        raise ValueError(f"group_size must be >= 1; got {group_size}")
    if sampling.temperature > 0 and generator is None:
        raise ValueError("generator must be a torch.Generator where temperature > 0; got None")
    if sampling.engine == "loop":
        draw = sample_in_loop
    elif policy.device.type == "cuda":
        draw = generate_continuously
    else:
        draw = generate_padded
    is_limited = sampling.batch_size and draw is not generate_continuously
    at_once = max(1, sampling.batch_size // group_size) if is_limited else len(prompts)
    responses = []
    with _evaluating(policy):
        for first in range(0, len(prompts), at_once):
            responses += draw(policy, prompts[first : first + at_once], group_size, sampling, generator)
    return responses


def sample_in_loop(
    policy: PreTrainedModel,
    prompts: Sequence[Tensor],
    group_size: int,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> list[Tensor]:
    """Engine "loop": one forward pass per token over the rows that go on."""
    input_ids, is_token = _left_padded(prompts)
    positions = (is_token.cumsum(1) - 1).clamp(min=0)
    # Without padding the causal mask is all there is, and attention is faster for knowing it.
    mask = None if bool(is_token.all()) else is_token.to(policy.device)

    cache = DynamicCache(config=policy.config)
    logits = _next_logits(policy, cache, input_ids.to(policy.device), positions.to(policy.device), mask)
    cache.batch_repeat_interleave(group_size)
    logits = logits.repeat_interleave(group_size, 0)
    positions = (positions[:, -1] + 1).repeat_interleave(group_size).to(policy.device)
    mask = None if mask is None else mask.repeat_interleave(group_size, 0)

    num_rows, stop_token_ids = len(logits), torch.tensor(sampling.stop_token_ids, device=policy.device)
    tokens = torch.zeros((num_rows, sampling.max_new_tokens), dtype=torch.long)
    num_tokens = torch.full((num_rows,), sampling.max_new_tokens)
    alive = torch.arange(num_rows)
    for step in range(sampling.max_new_tokens):
        token = _choose(logits, sampling, generator)
        tokens[alive, step] = token.cpu()
        goes_on = ~torch.isin(token, stop_token_ids)
        if not bool(goes_on.all()):
            num_tokens[alive[~goes_on.cpu()]] = step + 1
            alive, token, positions = alive[goes_on.cpu()], token[goes_on], positions[goes_on]
            mask = None if mask is None else mask[goes_on]
            cache.batch_select_indices(goes_on.nonzero().squeeze(1))
        if not len(alive) or step + 1 == sampling.max_new_tokens:
            break
        if mask is not None:
            mask = pad(mask, (0, 1), value=True)
        logits = _next_logits(policy, cache, token[:, None], positions[:, None], mask)
        positions = positions + 1
    return [row[:length] for row, length in zip(tokens, num_tokens.tolist(), strict=True)]


def generate_padded(
    policy: PreTrainedModel,
    prompts: Sequence[Tensor],
    group_size: int,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> list[Tensor]:
    """Engine "transformers": ``policy.generate`` over a left-padded batch."""
    rows = [prompt for prompt in prompts for _ in range(group_size)]
    input_ids, is_token = (tensor.to(policy.device) for tensor in _left_padded(rows))
    with _transformers_settings(policy, sampling, generator) as (settings, _):
        # Ranks sample on their own: none waits for another's longest response.
        sequences = policy.generate(input_ids, settings, attention_mask=is_token.long(), synced_gpus=False)
    return [_cut(row, sampling) for row in sequences[:, input_ids.shape[1] :].cpu()]


def generate_continuously(
    policy: PreTrainedModel,
    prompts: Sequence[Tensor],
    group_size: int,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> list[Tensor]:
    """Engine "transformers" on CUDA: continuous batching over a paged cache, so that no row waits for the longest."""
    inputs = [prompt.tolist() for prompt in prompts for _ in range(group_size)]
    with _transformers_settings(policy, sampling, generator) as (settings, seed):
        outputs = policy.generate_batch(
            inputs,
            settings,
            # Tokens are drawn with the attention that the policy trains with.
            # Under FSDP2 a forward waits for other streams, which no graph that is captured may do.
            ContinuousBatchingConfig(seed=seed, auto_switch_to_flash=False, use_cuda_graph=False),
        )
    errors = [output.error for output in outputs.values() if output.error is not None]
    if errors or len(outputs) != len(inputs):
        raise RuntimeError(f"continuous batching gave {len(outputs)} of {len(inputs)} responses; errors: {errors[:1]}")
    return [_cut(torch.tensor(output.generated_tokens), sampling) for output in outputs.values()]


@contextmanager
def _transformers_settings(
    policy: PreTrainedModel, sampling: Sampling, generator: torch.Generator | None
) -> Iterator[tuple[GenerationConfig, int]]:
    """Settings and a seed for ``generate``; the model's own defaults and the global generators are as before after it.

    A hub model's defaults (a repetition penalty, top-k 20 …) would change the distribution behind the trainer's back.
    """
    settings = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=list(sampling.stop_token_ids),
        pad_token_id=sampling.stop_token_ids[0],
        do_sample=sampling.temperature > 0,
    )
    seed = 0
    if sampling.temperature > 0:
        settings.temperature, settings.top_p, settings.top_k = sampling.temperature, sampling.top_p, sampling.top_k
        seed = int(torch.randint(2**31, (1,), generator=generator, device=generator.device))
    defaults, policy.generation_config = policy.generation_config, GenerationConfig()
    try:
        with torch.random.fork_rng(devices=[policy.device] if policy.device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield settings, seed
    finally:
        policy.generation_config = defaults


def _left_padded(prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Prompts as rows that end together, [P, T] int64, and where they hold tokens, [P, T] bool."""
    width, lengths = max(map(len, prompts)), torch.tensor([len(prompt) for prompt in prompts])
    input_ids = torch.stack([pad(prompt, (width - len(prompt), 0)) for prompt in prompts])
    return input_ids, torch.arange(width) >= width - lengths[:, None]


def _cut(tokens: Tensor, sampling: Sampling) -> Tensor:
    """End a response at its first stop token, which stays, or at the limit."""
    tokens = tokens[: sampling.max_new_tokens]
    stops = torch.isin(tokens, torch.tensor(sampling.stop_token_ids)).nonzero()
    return tokens[: int(stops[0]) + 1] if len(stops) else tokens


def _next_logits(
    policy: PreTrainedModel, cache: DynamicCache, input_ids: Tensor, positions: Tensor, mask: Tensor | None
) -> Tensor:
    """Logits [B, V] float32 of the token after ``input_ids``; the cache grows by them."""
    accepted = inspect.signature(policy.forward).parameters
    # transformers 5.24 renamed the argument in some models.
    arguments = {"cache" if "cache" in accepted else "past_key_values": cache}
    if "position_ids" in accepted:
        arguments["position_ids"] = positions
    if "logits_to_keep" in accepted:
        arguments["logits_to_keep"] = 1
    logits = policy(input_ids=input_ids, attention_mask=mask, use_cache=True, **arguments).logits
    return logits[:, -1].float()


def _choose(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> Tensor:
    """Next token of each row, [B] int64."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    cuts = LogitsProcessorList()
    if sampling.top_k:
        cuts.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        cuts.append(TopPLogitsWarper(sampling.top_p))
    scores = cuts(None, logits / sampling.temperature)
    return torch.multinomial(scores.softmax(-1), 1, generator=generator).squeeze(1)


@contextmanager
def _evaluating(policy: PreTrainedModel) -> Iterator[None]:
    """Put the policy in evaluation mode: gradient checkpointing, where it is on, would forbid the cache."""
    was_training = policy.training
    policy.eval()
    try:
        yield
    finally:
        policy.train(was_training)


def _check_prompts(policy: PreTrainedModel, prompts: Sequence[Tensor], max_new_tokens: int) -> None:
    if not prompts or min(map(len, prompts)) < 1:
        raise ValueError(f"prompts must be at least 1 non-empty tensor; got lengths {[len(p) for p in prompts]}")
    limit = max_positions(policy)
    longest = max(map(len, prompts))
    if longest + max_new_tokens > limit:
        raise ValueError(
            f"prompt and max_new_tokens together must be at most the model's {limit} positions;"
            f" got {longest} + {max_new_tokens}"
        )


def max_positions(policy: PreTrainedModel) -> float:
    """Most tokens of a sequence that the model has positions for; infinite if its config names none."""
    config = policy.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    # YaRN and its kind stretch the original positions; not every config counts the stretched ones.
    stretched = (rope.get("original_max_position_embeddings") or 0) * (rope.get("factor") or 1)
    return max(getattr(config, "max_position_embeddings", None) or math.inf, stretched)
