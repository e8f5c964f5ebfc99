"""Engine "transformers": the models' own generation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import ContinuousBatchingConfig

from vapo.rollout.loop import left_padded
from vapo.types import Response

if TYPE_CHECKING:
    from vapo.rollout.sampling import Sampling


# Tokens are sampled with the attention that the policy trains with; before 5.23 transformers never switched.
_KEEP_ATTENTION = {
    field.name: False for field in fields(ContinuousBatchingConfig) if field.name == "auto_switch_to_flash"
}


def generate_padded(
    policy: PreTrainedModel,
    prompts: Sequence[Tensor],
    group_size: int,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> list[Response]:
    """Engine "transformers" on the CPU: ``policy.generate`` over a left-padded batch.

    Continuous batching is far slower there, and its cache takes gigabytes unless it is told how large to be.
    """
    rows = [prompt for prompt in prompts for _ in range(group_size)]
    input_ids, is_token = (tensor.to(policy.device) for tensor in left_padded(rows))
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
) -> list[Response]:
    """Engine "transformers" on CUDA: continuous batching over a paged cache, so that no row waits for the longest."""
    inputs = [prompt.tolist() for prompt in prompts for _ in range(group_size)]
    with _transformers_settings(policy, sampling, generator) as (settings, seed):
        outputs = policy.generate_batch(
            inputs,
            settings,
            # Under FSDP2 a forward waits for other streams, which no graph that is captured may do.
            ContinuousBatchingConfig(seed=seed, use_cuda_graph=False, return_logprobs=True, **_KEEP_ATTENTION),
        )
    errors = [output.error for output in outputs.values() if output.error is not None]
    if errors or len(outputs) != len(inputs):
        raise RuntimeError(f"continuous batching gave {len(outputs)} of {len(inputs)} responses; errors: {errors[:1]}")
    return [
        _cut(torch.tensor(output.generated_tokens), sampling, torch.tensor(output.logprobs))
        for output in outputs.values()
    ]


@contextmanager
def _transformers_settings(
    policy: PreTrainedModel, sampling: Sampling, generator: torch.Generator | None
) -> Iterator[tuple[GenerationConfig, int]]:
    """Settings and a seed for ``generate``; afterwards the model's defaults and the global generators are as before.

    A hub model's defaults (a repetition penalty, top-k 20 …) would change what is sampled from.
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


def _cut(tokens: Tensor, sampling: Sampling, logprobs: Tensor | None = None) -> Response:
    """A response ends at its first stop token, which stays, or at the limit."""
    tokens = tokens[: sampling.max_new_tokens]
    stops = torch.isin(tokens, torch.tensor(sampling.stop_token_ids)).nonzero()
    length = int(stops[0]) + 1 if len(stops) else len(tokens)
    return Response(tokens[:length], None if logprobs is None else logprobs[:length])
