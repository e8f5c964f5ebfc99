"""Value pretraining: a critic learns the returns of a frozen policy before RL trusts it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import torch
from transformers import PreTrainedModel

from vapo.config import Config
from vapo.learning.advantages import build_batch, explained_variances
from vapo.learning.learner import Learner
from vapo.learning.samples import response_records, skipped_responses
from vapo.learning.update import mini_batches, set_lr, take_steps, update_critic
from vapo.models.forward import rollout_values
from vapo.models.load import value_head
from vapo.models.sharding import mean_over_ranks, share_of
from vapo.rollout.collect import collect
from vapo.rollout.sampling import ready_to_sample
from vapo.types import Batch, Rollout, StepReport


def pretraining_step(learner: Learner, step: int, config: Config) -> StepReport:
    """Fit the critic to Monte-Carlo returns (Eq. 9 and 10 with λ = 1) of one fresh rollout of the frozen policy.

    The phase ends after the rollout whose returns the critic, before training on it, explains to
    ``pretraining_target``, or after ``pretraining_steps``. The value loss is not clipped.

    Args:
        learner: In the phase "value_pretraining".
        step: From 1.
        config: The settings of the phase.
    """
    problems = share_of(learner.task.problems(config.pretraining_prompts, learner.generators.data))
    with ready_to_sample(learner.policy, learner.sampling):
        problems, rollout, texts, errors = collect(
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
    batch = monte_carlo_batch(learner.critic, rollout, config)
    generator = learner.generators.shuffling
    metrics = fit_returns(learner.critic, learner.critic_optimizer, batch, config, generator, learner.skips)
    samples, skipped = [], ""
    if metrics["critic/skipped_steps"]:
        skipped, samples = skipped_responses(learner, batch, response_records(batch, problems, texts), config)
    return StepReport(metrics, samples, errors, skipped)


@torch.no_grad()
def center_critic(critic: PreTrainedModel, rollout: Rollout) -> None:
    """Let a critic whose head is zero start from the mean score, so that no update is spent on the mean."""
    value_head(critic).bias.fill_(mean_over_ranks(rollout.scores))


def monte_carlo_batch(critic: PreTrainedModel, rollout: Rollout, config: Config) -> Batch:
    """A batch whose returns are the rewards to come (λ_critic = 1), whatever the settings of RL are."""
    values = rollout_values(critic, rollout, config)
    truncated = "zero" if config.truncated == "bootstrap" else config.truncated
    monte_carlo = replace(
        config,
        decoupled_gae=True,
        lam_critic=1.0,
        truncated=truncated,
        kl_reward_weight=0.0,
        whiten_advantages=False,
        importance_cap=None,
    )
    return build_batch(rollout, monte_carlo, old_logprobs=torch.zeros_like(values), values=values)


def fit_returns(
    critic: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    config: Config,
    generator: torch.Generator,
    skips: Counter,
) -> dict[str, float]:
    """Train the critic on one batch; the explained variance is that before it."""
    rollout, (explained, _) = batch.rollout, explained_variances(batch)
    parts = mini_batches(batch, config.pretraining_mini_batches, config.pretraining_epochs, generator)
    update = partial(update_critic, critic, optimizer, batch, config=config, value_clip=None)
    updated = take_steps("critic", update, parts, skips, config.max_skipped_steps)
    loss = {"critic/pretrain/vf_loss": updated["critic/vf_loss"]} if "critic/vf_loss" in updated else {}
    return loss | {
        "critic/pretrain/vf_explained_var": explained,
        "critic/pretrain/score": mean_over_ranks(rollout.scores),
        "critic/skipped_steps": updated["critic/skipped_steps"],
        "response_length/mean": mean_over_ranks(rollout.lengths.float()),
    }
