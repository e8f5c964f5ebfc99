"""How responses are sampled, and the one function that samples them with any engine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vapo.config import Config, Engine
from vapo.models.load import max_positions, stop_token_ids
from vapo.models.sharding import gathered
from vapo.rollout.loop import sample_in_loop
from vapo.rollout.transformers import generate_continuously, generate_padded
from vapo.rollout.vllm import VllmEngine
from vapo.types import Response

ENGINES = tuple(name for name in get_args(Engine) if name != "auto")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How responses are sampled.

    The log-probs of training are those of the whole distribution at ``temperature``. With ``top_p`` < 1 or
    ``top_k`` > 0 tokens are sampled from the likeliest ones alone, renormalised, and training would use wrong
    likelihoods: leave both as they are for training, and use them for evaluation alone.

    The same generator gives the same responses, except from continuous batching on CUDA, where the order in which
    requests share a batch depends on time.

    Attributes:
        max_new_tokens: Where a response is cut.
        stop_token_ids: A response ends with any of these, which is part of it.
        temperature: Divides the logits; 0 takes the likeliest token instead of sampling.
        top_p: Keeps the likeliest tokens that together reach this probability.
        top_k: Keeps this many of the likeliest tokens, before ``top_p``; 0 keeps all.
        engine: "loop" is ours; "transformers" is ``policy.generate``, on CUDA continuous batching; "vllm" is vLLM.
        batch_size: Most responses sampled at once, at least those to one prompt; 0 samples all. Continuous batching
            fits its cache to the memory that is free, and samples all in any case.
        vllm: The engine itself, where ``engine`` is "vllm"; see :func:`with_engine`.

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
    vllm: VllmEngine | None = field(default=None, repr=False, compare=False)

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

    def close(self) -> None:
        """End the engine, if it is one to be ended; the last thing that a run does."""
        if self.vllm is not None:
            self.vllm.close()


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


def with_engine(sampling: Sampling, policy: PreTrainedModel, config: Config) -> Sampling:
    """Start the engine of this rank where it is one to be started; close it at the end of the run.

    Args:
        sampling: How responses are sampled.
        policy: The policy, where its parameters will stay: on its device, sharded.
        config: The engine's dtype and memory.

    Raises:
        ValueError: If the engine is not installed or cannot run the policy.
    """
    if sampling.engine != "vllm":
        return sampling
    engine = VllmEngine(
        policy, dtype=config.dtype, memory=config.engine_memory, max_responses=config.rollout_batch_size
    )
    return replace(sampling, vllm=engine)


def ready_to_sample(policy: PreTrainedModel, sampling: Sampling) -> AbstractContextManager[None]:
    """Have the policy's present weights whole where the engine reads them, for the block. Collective on entry."""
    return gathered(policy) if sampling.vllm is None else sampling.vllm.loaded(policy)


@torch.no_grad()
def sample(
    policy: PreTrainedModel,
    prompts: Sequence[Tensor],
    *,
    group_size: int = 1,
    sampling: Sampling,
    generator: torch.Generator | None = None,
) -> list[Response]:
    """Sample responses to prompts of any lengths.

    Inside :func:`ready_to_sample`, where the policy is sharded or the engine is vLLM.

    Args:
        policy: A causal language model.
        prompts: P tensors [p] int64, p >= 1.
        group_size: Responses to each prompt.
        sampling: How they are sampled.
        generator: Source of randomness, on the policy's device; may be left out at temperature 0 only.

    Returns:
        P · group_size responses of 1 to max_new_tokens tokens, those to one prompt side by side.

    Raises:
        ValueError: If there is no prompt, one is empty or leaves no room for ``max_new_tokens`` in the model's
            positions, ``group_size`` is not positive, the generator is missing or vLLM was not started.
    """
    _check_prompts(policy, prompts, sampling.max_new_tokens)
    if group_size < 1:
        raise ValueError(f"group_size must be >= 1; got {group_size}")
    if sampling.temperature > 0 and generator is None:
        raise ValueError("generator must be a torch.Generator where temperature > 0; got None")
    if sampling.engine == "vllm":
        if sampling.vllm is None:
            raise ValueError("engine 'vllm' must be started by with_engine; got none")
        return sampling.vllm.sample(prompts, group_size, sampling, generator)
    if sampling.engine == "loop":
        engine = sample_in_loop
    elif policy.device.type == "cuda":
        engine = generate_continuously
    else:
        engine = generate_padded
    is_limited = sampling.batch_size and engine is not generate_continuously
    at_once = max(1, sampling.batch_size // group_size) if is_limited else len(prompts)
    responses = []
    with _evaluating(policy):
        for first in range(0, len(prompts), at_once):
            responses += engine(policy, prompts[first : first + at_once], group_size, sampling, generator)
    return responses


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
