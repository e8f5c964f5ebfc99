"""Value pretraining: a critic learns the returns of a frozen policy before RL trusts it."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from vapo.config import Config
from vapo.learning.advantages import build_batch, explained_variances
from vapo.learning.learner import Learner
from vapo.learning.update import mean_metrics, set_lr, split_rows, update_critic
from vapo.models.forward import Passes, all_rows, rollout_values
from vapo.models.load import value_head
from vapo.models.sharding import gathered, mean_over_ranks, share_of
from vapo.rollout.collect import collect
from vapo.types import Rollout


def pretraining_step(learner: Learner, step: int, config: Config) -> tuple[dict[str, float], list[str]]:
    """Fit the critic to Monte-Carlo returns (Eq. 9 and 10 with λ = 1) of one fresh rollout of the frozen policy.

    The phase ends after the rollout whose returns the critic, before training on it, explains to
    ``pretraining_target``, or after ``pretraining_steps``. The value loss is not clipped.

    Args:
        learner: In the phase "value_pretraining".
        step: From 1.
        config: The settings of the phase.

    Returns:
        Metrics, and tracebacks of verifiers that failed.
    """
    problems = share_of(learner.task.problems(config.pretraining_prompts, learner.generators.data))
    with gathered(learner.policy):
        rollout, _, errors = collect(
            learner.policy,
            learner.tokenizer,
            learner.task,
            problems,
            group_size=1,
            sampling=learner.sampling,
            generator=learner.generators.sampling,
        )
    if step == 1 and not config.critic:
        center_critic(learner.critic, rollout)
    set_lr(learner.critic_optimizer, config.critic_lr, step, config.critic_lr_warmup)
    metrics = fit_returns(learner.critic, learner.critic_optimizer, rollout, config, learner.generators.shuffling)
    return metrics, errors


@torch.no_grad()
def center_critic(critic: PreTrainedModel, rollout: Rollout) -> None:
    """Let a critic whose head is zero say the mean reward everywhere: the first updates need not find the mean."""
    value_head(critic).bias.fill_(mean_over_ranks(rollout.scores))


def fit_returns(
    critic: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    config: Config,
    shuffling: torch.Generator,
) -> dict[str, float]:
    """Train the critic on one rollout; the explained variance is that on the rollout before it."""
    values = rollout_values(critic, rollout, config)
    truncated = "zero" if config.truncated == "bootstrap" else config.truncated
    monte_carlo = replace(
        config, decoupled_gae=True, lam_critic=1.0, truncated=truncated, kl_reward_weight=0.0, whiten_advantages=False
    )
    batch = build_batch(rollout, Passes(old_logprobs=torch.zeros_like(values), values=values), monte_carlo)
    explained, _ = explained_variances(batch)
    updates = [
        update_critic(critic, optimizer, batch, rows.to(critic.device), config, value_clip=None)
        for _ in range(config.pretraining_epochs)
        for rows in split_rows(len(all_rows(rollout)), config.pretraining_mini_batches, shuffling)
    ]
    return {
        "critic/pretrain/vf_explained_var": explained,
        "critic/pretrain/vf_loss": mean_metrics(updates)["critic/vf_loss"],
        "critic/pretrain/score": mean_over_ranks(rollout.scores),
        "response_length/mean": mean_over_ranks(rollout.lengths.float()),
    }
