"""Supervised warm start: imitate demonstrations, faultless ones first."""

from __future__ import annotations

import random
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vapo.config import Config
from vapo.learning.learner import Learner
from vapo.learning.update import set_lr, step_if_finite, take_steps
from vapo.models.forward import MicroBatch, all_rows, over_micro_batches, token_logits, tokens_of
from vapo.models.sharding import share_of, sum_over_ranks
from vapo.rollout.collect import pack
from vapo.tasks import EmbeddedTask
from vapo.types import Rollout, StepReport
from vapo_kernels import token_logprobs

WARM_UP_STEPS = 20
FINAL_LR_SHARE = 0.15


def warm_start_step(learner: Learner, step: int, config: Config) -> StepReport:
    """Train the policy on one batch of demonstrations.

    The first ``warm_start_clean_steps`` see faultless ones, from which arithmetic is learned; the rest see ones that
    give up or err, which make the policy that RL improves. Mixed from the start, neither is learned.

    Args:
        learner: In the phase "warm_start".
        step: From 1.
        config: The settings of the warm start.
    """
    lr = config.warm_start_lr * lr_share(step - 1, config.warm_start_steps, config.warm_start_steady_steps)
    set_lr(learner.policy_optimizer, lr)
    give_up, error = (0.0, 0.0) if step <= config.warm_start_clean_steps else (config.give_up, config.error)
    demonstrations = draw_demonstrations(
        learner.task, config.warm_start_batch, learner.generators.data, give_up, error, learner.policy.device
    )
    update = partial(imitation_step, learner.policy, learner.policy_optimizer, config=config)
    metrics = take_steps("actor", update, [demonstrations], learner.skips, config.max_skipped_steps)
    skipped = "the loss of the demonstrations or its gradient is not finite" if metrics["actor/skipped_steps"] else ""
    return StepReport(metrics | {"warm_start/lr": lr}, skipped=skipped)


def lr_share(step: int, num_steps: int, steady_steps: int = 0) -> float:
    """Share of the peak learning rate: linear rise over 20 steps, linear fall to 15 % after the steady ones.

    Example:
        >>> [round(lr_share(step, 220), 3) for step in (0, 19, 20, 219)]
        [0.05, 1.0, 1.0, 0.154]
        >>> [round(lr_share(step, 220, steady_steps=120), 3) for step in (0, 19, 120, 219)]
        [0.05, 1.0, 1.0, 0.159]
    """
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    steady_steps = max(steady_steps, WARM_UP_STEPS)
    return 1 - (1 - FINAL_LR_SHARE) * max(0, step - steady_steps) / (num_steps - steady_steps)


def draw_demonstrations(
    task: EmbeddedTask, count: int, rng: random.Random, give_up: float, error: float, device: torch.device
) -> Rollout:
    """Draw ``count`` training problems and pack a demonstration of each; each rank keeps its share of them."""
    problems = task.problems(count, rng)
    texts = [task.demonstration(problem, rng, give_up=give_up, error=error) for problem in problems]
    prompts = [torch.tensor(ids) for ids in task.tokenizer([problem.prompt for problem in problems]).input_ids]
    responses = [torch.tensor(ids) for ids in task.tokenizer(texts).input_ids]
    prompts, responses = share_of(prompts), share_of(responses)
    correct = torch.ones(len(prompts), dtype=torch.bool)
    return pack(prompts, responses, correct.float(), correct, ~correct, 1, device)


def imitation_step(
    policy: PreTrainedModel, optimizer: torch.optim.Optimizer, demonstrations: Rollout, config: Config
) -> dict[str, float]:
    """Take one step on the mean of −log π over all tokens of the demonstrations; returns that mean in its metrics."""
    num_tokens = sum_over_ranks(demonstrations.lengths.sum())
    total = torch.zeros((), device=policy.device)
    args = (demonstrations, all_rows(demonstrations), config, demonstrations)
    for _, is_own, nll in over_micro_batches(policy, _negative_log_likelihood, *args):
        loss = nll * is_own / num_tokens
        loss.backward()
        total += loss.detach()
    return step_if_finite("actor", policy, optimizer, {"warm_start/loss": sum_over_ranks(total).item()}, config)


def _negative_log_likelihood(
    policy: PreTrainedModel, part: MicroBatch, is_own: bool, demonstrations: Rollout
) -> Tensor:
    tokens = demonstrations.token_ids[tokens_of(demonstrations, part)]
    return -token_logprobs(token_logits(policy, demonstrations, part), tokens).logprobs.sum()
