"""Engine "loop": a loop over a key-value cache that drops the rows that are done."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel, TopKLogitsWarper, TopPLogitsWarper

from vapo.types import Response

if TYPE_CHECKING:
    from vapo.rollout.sampling import Sampling

# From this vocabulary on a CPU's multinomial, with a random number for each entry, is slower than inverting the CDF.
LARGE_VOCABULARY, BLOCK = 4096, 64


def sample_in_loop(
    policy: PreTrainedModel,
    prompts: Sequence[Tensor],
    group_size: int,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> list[Response]:
    """Engine "loop": one forward pass per token over the rows that go on."""
    input_ids, is_token = left_padded(prompts)
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
    logprobs = torch.zeros((num_rows, sampling.max_new_tokens))
    num_tokens = torch.full((num_rows,), sampling.max_new_tokens)
    alive = torch.arange(num_rows)
    for step in range(sampling.max_new_tokens):
        token, probability = _choose(logits, sampling, generator)
        tokens[alive, step], logprobs[alive, step] = token.cpu(), probability.log().cpu()
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
    lengths = num_tokens.tolist()
    return [Response(*(row[:length] for row in rows)) for *rows, length in zip(tokens, logprobs, lengths, strict=True)]


def left_padded(prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Prompts as rows that end together, [P, T] int64, and where they hold tokens, [P, T] bool."""
    width, lengths = max(map(len, prompts)), torch.tensor([len(prompt) for prompt in prompts])
    input_ids = torch.stack([pad(prompt, (width - len(prompt), 0)) for prompt in prompts])
    return input_ids, torch.arange(width) >= width - lengths[:, None]


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


def _choose(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Next token of each row, [B] int64, and the probability with which it was chosen, [B] float32."""
    if sampling.temperature == 0:
        return logits.argmax(-1), logits.new_ones(len(logits))
    cuts = LogitsProcessorList()
    if sampling.top_k:
        cuts.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        cuts.append(TopPLogitsWarper(sampling.top_p))
    scores = cuts(None, logits / sampling.temperature)
    probabilities = scores.softmax(-1)
    token = _sample(probabilities, generator)
    return token.squeeze(1), probabilities.gather(1, token).squeeze(1)


def _sample(probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
    """A token of each row of ``probabilities`` [B, V], [B, 1] int64.

    On a CPU the CDF of a large vocabulary is inverted, over blocks and then inside the block that is found.
    """
    num_rows, num_tokens = probabilities.shape
    if probabilities.device.type != "cpu" or num_tokens < LARGE_VOCABULARY:
        return torch.multinomial(probabilities, 1, generator=generator)
    blocks = pad(probabilities, (0, -num_tokens % BLOCK)).view(num_rows, -1, BLOCK)
    ends = blocks.sum(2).cumsum(1, dtype=torch.float64)
    if not bool(ends[:, -1].isfinite().all()):
        raise RuntimeError("the probabilities of the next token must be finite; got nan or inf")
    u = torch.rand((num_rows, 1), generator=generator, dtype=torch.float64) * ends[:, -1:]
    block = _first_above(ends, u)
    inside = blocks[torch.arange(num_rows), block.squeeze(1)].cumsum(1, dtype=torch.float64)
    return block * BLOCK + _first_above(inside, u - pad(ends, (1, 0)).gather(1, block))


def _first_above(cdf: Tensor, u: Tensor) -> Tensor:
    """First entry in each row of ``cdf`` [B, n] above ``u`` [B, 1], or above the largest number below the row's total.

    Such an entry is larger than the one before it: what has probability 0 is never found.
    """
    total = cdf[:, -1:]
    return torch.searchsorted(cdf, torch.minimum(u, total.nextafter(torch.zeros_like(total))), right=True)
