"""Value pretraining: a critic learns the returns of a frozen policy before RL trusts it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from vapo.advantages import build_batch, rollout_values
from vapo.config import Config
from vapo.packing import all_rows
from vapo.rollout import collect
from vapo.tasks import Task
from vapo.types import Rollout
from vapo.update import mean_metrics, split_rows, update_critic
from vapo_kernels import explained_variance


def pretrain_values(
    critic: PreTrainedModel,
    policy: PreTrainedModel,
    task: Task,
    config: Config,
    *,
    data: random.Random,
    sampling: torch.Generator,
    shuffling: torch.Generator,
) -> Iterator[dict[str, float]]:
    """Fit ``critic`` to Monte-Carlo returns (Eq. 9 and 10 with λ = 1) of fresh rollouts, yielding metrics of each.

    Stops after the rollout whose returns the critic, before training on it, explains to ``pretraining_target``, or
    after ``pretraining_steps``. The policy does not change, and the value loss is not clipped.
    """
    optimizer = torch.optim.AdamW(critic.parameters(), lr=config.critic_lr)
    for _ in range(config.pretraining_steps):
        problems = task.problems(config.pretraining_prompts, data)
        rollout, _ = collect(
            policy,
            task,
            problems,
            group_size=1,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            generator=sampling,
        )
        metrics = fit_returns(critic, optimizer, rollout, config, shuffling)
        yield metrics
        if metrics["critic/pretrain/vf_explained_var"] >= config.pretraining_target:
            return


def fit_returns(
    critic: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    config: Config,
    shuffling: torch.Generator,
) -> dict[str, float]:
    """Train the critic on one rollout; the explained variance is that on the rollout before it."""
    values = rollout_values(critic, rollout, config)
    monte_carlo = replace(config, decoupled_gae=True, lam_critic=1.0)
    batch = build_batch(rollout, torch.zeros_like(values), values, monte_carlo)
    fresh = explained_variance(values, batch.returns, torch.ones_like(values, dtype=torch.bool)).item()
    updates = [
        update_critic(critic, optimizer, batch, rows.to(critic.device), config, value_clip=None)
        for _ in range(config.pretraining_epochs)
        for rows in split_rows(len(all_rows(rollout)), config.pretraining_mini_batches, shuffling)
    ]
    return {
        "critic/pretrain/vf_explained_var": fresh,
        "critic/pretrain/vf_loss": mean_metrics(updates)["critic/vf_loss"],
        "critic/pretrain/score": rollout.scores.mean().item(),
        "response_length/mean": rollout.lengths.float().mean().item(),
    }
