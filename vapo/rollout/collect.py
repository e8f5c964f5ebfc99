"""Rollouts: prompts to tokens, responses sampled and verified, and all of it packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vapo.models.load import max_positions
from vapo.rollout.rewards import terminal_rewards, verify
from vapo.rollout.sampling import Sampling, sample
from vapo.tasks import Problem, Task
from vapo.types import Rollout, bounds

TEMPLATE_TOKENS = 256


class Collected(NamedTuple):
    """Sampled and verified responses.

    Attributes:
        problems: P problems.
        rollout: Their S = P · group_size responses, those to one problem side by side.
        texts: The S responses as texts, without special tokens.
        errors: A traceback for each response whose verifier failed.
    """

    problems: list[Problem]
    rollout: Rollout
    texts: list[str]
    errors: list[str]

    def select(self, groups: Sequence[int]) -> Collected:
        """The problems ``groups`` with their responses, in that order; all errors stay."""
        size = self.rollout.group_size
        rows = [group * size + number for group in groups for number in range(size)]
        rollout = self.rollout.select(torch.tensor(rows, device=self.rollout.token_ids.device))
        return Collected(
            [self.problems[group] for group in groups], rollout, [self.texts[row] for row in rows], self.errors
        )

    @staticmethod
    def cat(parts: Sequence[Collected]) -> Collected:
        """Lay parts of the same group size end to end."""
        problems, texts, errors = (
            [item for part in parts for item in getattr(part, name)] for name in ("problems", "texts", "errors")
        )
        return Collected(problems, Rollout.cat([part.rollout for part in parts]), texts, errors)


def collect(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    problems: Sequence[Problem],
    *,
    group_size: int,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> Collected:
    """Sample ``group_size`` responses to each problem and have them verified.

    Raises:
        ValueError: If there is no problem, or as :func:`encode_prompts` and :func:`sample` do.
    """
    if not problems:
        raise ValueError("problems must hold at least 1 problem; got none")
    prompts = encode_prompts(tokenizer, problems)
    responses = sample(policy, prompts, group_size=group_size, sampling=sampling, generator=generator)
    token_ids = [response.token_ids for response in responses]
    prompts = [prompt for prompt in prompts for _ in range(group_size)]
    asked = [problem for problem in problems for _ in range(group_size)]
    is_truncated = torch.tensor([int(ids[-1]) not in sampling.stop_token_ids for ids in token_ids])
    texts = tokenizer.batch_decode(token_ids, skip_special_tokens=True)
    scores, is_correct, errors = verify(task, asked, texts, is_truncated)
    rollout = pack(prompts, token_ids, scores, is_correct, is_truncated, group_size, policy.device)
    if responses[0].logprobs is not None:
        logprobs = torch.cat([response.logprobs for response in responses])
        rollout = replace(rollout, engine_logprobs=logprobs.to(policy.device))
    return Collected(list(problems), rollout, texts, errors)


def encode_prompts(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> list[Tensor]:
    """Turn each problem's prompt into tokens: text as it is, messages through the chat template.

    Returns:
        A tensor [p] int64 for each problem; after messages it ends where the assistant's turn begins.

    Raises:
        ValueError: If a prompt holds messages and the tokenizer has no chat template.
    """
    return [torch.tensor(_encode(tokenizer, problem.prompt), dtype=torch.long) for problem in problems]


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, str]]) -> list[int]:
    if isinstance(prompt, str):
        try:
            return tokenizer(prompt).input_ids
        except Exception as error:
            # A tokenizer of few words raises exceptions of no particular class.
            raise ValueError(f"the tokenizer must know the words of {prompt[:80]!r}; it says: {error}") from error
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer must have a chat template where prompts are messages; got none")
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)


def pack(
    prompts: Sequence[Tensor],
    responses: Sequence[Tensor],
    scores: Tensor,
    is_correct: Tensor,
    is_truncated: Tensor,
    group_size: int,
    device: torch.device,
) -> Rollout:
    """Lay S prompts and responses end to end, with each response's score on its last token.

    Raises:
        ValueError: If a response is empty, since it has no token to carry its reward.
    """
    lengths = torch.tensor([len(response) for response in responses])
    if bool((lengths < 1).any()):
        raise ValueError(f"every response must have at least 1 token; got lengths {lengths.tolist()}")
    token_ids, cu_seqlens = torch.cat(list(responses)), bounds(lengths)
    return Rollout(
        prompt_ids=torch.cat(list(prompts)).to(device),
        prompt_cu_seqlens=bounds(torch.tensor([len(prompt) for prompt in prompts])).to(device),
        token_ids=token_ids.to(device),
        cu_seqlens=cu_seqlens.to(device),
        rewards=terminal_rewards(scores, torch.ones_like(token_ids), cu_seqlens).to(device),
        is_correct=is_correct.to(device),
        is_truncated=is_truncated.to(device),
        group_size=group_size,
    )


def check_prompts(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], max_new_tokens: int
) -> None:
    """Refuse prompts that cannot be encoded or leave no room for a response, before anything is trained.

    Raises:
        ValueError: If one has too many tokens, or holds messages and the tokenizer has no chat template.
    """
    if not tokenizer.chat_template and any(not isinstance(problem.prompt, str) for problem in problems):
        raise ValueError("the tokenizer must have a chat template where prompts are messages; got none")
    room = max_positions(policy) - max_new_tokens
    for problem in problems:
        text = problem.prompt if isinstance(problem.prompt, str) else str(problem.prompt)
        # No text has more tokens than bytes, but for what the chat template adds.
        if len(text.encode()) + TEMPLATE_TOKENS <= room:
            continue
        length = len(encode_prompts(tokenizer, [problem])[0])
        if length > room:
            raise ValueError(
                f"a prompt must leave room for {max_new_tokens} new tokens in the model's {max_positions(policy)}"
                f" positions; got {length} tokens in {text[:80]!r}"
            )
