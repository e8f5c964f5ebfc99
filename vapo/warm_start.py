"""Supervised warm start: imitate demonstrations, faultless ones first."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vapo.config import Config
from vapo.packing import all_rows, micro_batches, token_indices, token_logits
from vapo.rollout import pack
from vapo.tasks import Task
from vapo.types import Rollout
from vapo_kernels import token_logprobs

WARM_UP_STEPS = 20
FINAL_LR_SHARE = 0.15


def warm_start(policy: PreTrainedModel, task: Task, config: Config, rng: random.Random) -> Iterator[dict[str, float]]:
    """Train ``policy`` on demonstrations, yielding each step's metrics.

    The first ``warm_start_clean_steps`` see faultless demonstrations, from which arithmetic is learned; the rest see
    ones that give up or err, which make the policy that RL improves. Mixed from the start, neither is learned.
    """
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.warm_start_lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_share(step, config.warm_start_steps))
    for step in range(config.warm_start_steps):
        is_clean = step < config.warm_start_clean_steps
        give_up, error = (0.0, 0.0) if is_clean else (config.give_up, config.error)
        demonstrations = draw_demonstrations(task, config.warm_start_batch, rng, give_up, error, policy.device)
        loss = imitation_step(policy, optimizer, demonstrations, config)
        lr = schedule.get_last_lr()[0]
        schedule.step()
        yield {"warm_start/loss": loss, "warm_start/lr": lr}


def lr_share(step: int, num_steps: int) -> float:
    """Share of the peak learning rate: linear rise over 20 steps, linear fall to 15 % at the end.

    Example:
        >>> [round(lr_share(step, 220), 3) for step in (0, 19, 20, 219)]
        [0.05, 1.0, 1.0, 0.154]
    """
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    return 1 - (1 - FINAL_LR_SHARE) * (step - WARM_UP_STEPS) / (num_steps - WARM_UP_STEPS)


def draw_demonstrations(
    task: Task, count: int, rng: random.Random, give_up: float, error: float, device: torch.device
) -> Rollout:
    """Draw ``count`` training problems and pack a demonstration of each."""
    problems = task.problems(count, rng)
    texts = [task.demonstration(problem, rng, give_up=give_up, error=error) for problem in problems]
    prompts = [torch.tensor(ids) for ids in task.tokenizer([problem.prompt for problem in problems]).input_ids]
    responses = [torch.tensor(ids) for ids in task.tokenizer(texts).input_ids]
    flags = torch.ones(count, dtype=torch.bool)
    return pack(prompts, responses, flags, flags, device)


def imitation_step(
    policy: PreTrainedModel, optimizer: torch.optim.Optimizer, demonstrations: Rollout, config: Config
) -> float:
    """Take one step on the mean of −log π over all tokens of the demonstrations, and return that mean."""
    num_tokens = len(demonstrations.token_ids)
    total = torch.zeros((), device=policy.device)
    for rows in micro_batches(demonstrations, all_rows(demonstrations), config.micro_batch_tokens):
        loss = _negative_log_likelihood(policy, demonstrations, rows) / num_tokens
        loss.backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return total.item()


def _negative_log_likelihood(policy: PreTrainedModel, demonstrations: Rollout, rows: Tensor) -> Tensor:
    tokens = demonstrations.token_ids[token_indices(demonstrations.cu_seqlens, rows)]
    return -token_logprobs(token_logits(policy, demonstrations, rows), tokens).logprobs.sum()
