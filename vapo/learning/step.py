"""One step of RL: a rollout, and the optimiser steps on it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from vapo.config import Config
from vapo.learning.advantages import build_batch, explained_variances
from vapo.learning.learner import Learner
from vapo.learning.samples import evenly_spread, response_records, skipped_responses
from vapo.learning.update import mini_batches, set_lr, take_steps, update_critic, update_policy
from vapo.learning.value_pretraining import center_critic
from vapo.models.forward import bootstrap_values, rollout_logprobs, rollout_values
from vapo.models.sharding import gather_over_ranks, mean_over_ranks, share_of, sum_over_ranks
from vapo.rollout.collect import Collected, collect
from vapo.rollout.dynamic_sampling import sample_informative
from vapo.rollout.sampling import ready_to_sample
from vapo.tasks import Problem
from vapo.types import Batch, Rollout, StepReport


def vapo_step(learner: Learner, step: int, config: Config) -> StepReport:
    """Collect one rollout and take the optimiser steps on it; metrics have verl's names."""
    metrics: dict[str, float] = {}
    with timed(metrics, "step"):
        with timed(metrics, "gen"):
            (problems, rollout, texts, errors), sampling = sample_groups(learner, config)
        passes = model_passes(learner, rollout, step, config, metrics)
        with timed(metrics, "adv"):
            batch = build_batch(rollout, config, **passes)
        metrics |= update_models(learner, batch, step, config, metrics)
    num_tokens = sum_over_ranks(torch.tensor(len(rollout.prompt_ids) + len(rollout.token_ids))).item()
    metrics["perf/throughput"] = num_tokens / metrics["timing_s/step"]
    metrics |= batch_metrics(batch, config) | sampling
    metrics["reward/errors"] = float(sum_over_ranks(torch.tensor(len(errors))))
    responses = response_records(batch, problems, texts)
    samples, skipped = evenly_spread(responses, config.logged_samples), ""
    if metrics["actor/skipped_steps"] or metrics.get("critic/skipped_steps"):
        skipped, culprits = skipped_responses(learner, batch, responses, config)
        samples = culprits + samples
    return StepReport(metrics, samples, errors, skipped)


def sample_groups(learner: Learner, config: Config) -> tuple[Collected, dict[str, float]]:
    """Sample and verify this rank's share of the step's responses; with dynamic sampling in rounds, told by metrics."""
    num_prompts = config.num_responses // config.responses_per_prompt

    def next_problems() -> list[Problem]:
        return share_of(learner.task.problems(num_prompts, learner.generators.data))

    def respond(problems: list[Problem]) -> Collected:
        return collect(
            learner.policy,
            learner.tokenizer,
            learner.task,
            problems,
            group_size=config.responses_per_prompt,
            sampling=learner.sampling,
            generator=learner.generators.sampling,
        )

    with ready_to_sample(learner.policy, learner.sampling):
        if not config.dynamic_sampling:
            return respond(next_problems()), {}
        own_prompts, max_rounds = len(share_of(range(num_prompts))), config.max_sampling_rounds
        return sample_informative(next_problems, respond, num_prompts=own_prompts, max_rounds=max_rounds)


def model_passes(
    learner: Learner, rollout: Rollout, step: int, config: Config, metrics: dict[str, float]
) -> dict[str, Tensor]:
    """What policy, reference and critic say of the rollout before any step on it: arguments of `build_batch`."""
    passes = {}
    with timed(metrics, "old_log_prob"):
        passes["old_logprobs"] = rollout_logprobs(learner.policy, rollout, config)
    if config.has_reference:
        with timed(metrics, "ref"):
            passes["ref_logprobs"] = rollout_logprobs(learner.reference, rollout, config)
    if config.has_critic:
        with timed(metrics, "values"):
            if step == 1 and not config.pretrains_values and not config.critic:
                center_critic(learner.critic, rollout)
            passes["values"] = rollout_values(learner.critic, rollout, config)
            if config.truncated == "bootstrap":
                passes["bootstrap_values"] = bootstrap_values(learner.critic, rollout, config)
    return passes


def update_models(
    learner: Learner, batch: Batch, step: int, config: Config, metrics: dict[str, float]
) -> dict[str, float]:
    """Take the optimiser steps of the policy, then those of the critic; returns their metrics."""
    generator, limit = learner.generators.shuffling, config.max_skipped_steps
    parts = mini_batches(batch, config.mini_batches, config.actor_epochs, generator)
    with timed(metrics, "update_actor"):
        updated = {"actor/lr": set_lr(learner.policy_optimizer, config.actor_lr, step, config.actor_lr_warmup)}
        update = partial(update_policy, learner.policy, learner.policy_optimizer, batch, config=config)
        updated |= take_steps("actor", update, parts, learner.skips, limit)
    if not config.has_critic:
        return updated
    if config.critic_epochs != config.actor_epochs:
        parts = mini_batches(batch, config.mini_batches, config.critic_epochs, generator)
    with timed(metrics, "update_critic"):
        updated["critic/lr"] = set_lr(learner.critic_optimizer, config.critic_lr, step, config.critic_lr_warmup)
        update = partial(
            update_critic, learner.critic, learner.critic_optimizer, batch, config=config, value_clip=config.value_clip
        )
        updated |= take_steps("critic", update, parts, learner.skips, limit)
    return updated


def batch_metrics(batch: Batch, config: Config) -> dict[str, float]:
    """Describe a batch over all ranks: rewards, lengths, λ_policy, and how well the critic explained the returns."""
    rollout = batch.rollout
    lengths = gather_over_ranks(rollout.lengths.float())
    metrics = {
        "critic/score/mean": mean_over_ranks(rollout.scores),
        "critic/accuracy/mean": mean_over_ranks(rollout.is_correct.float()),
        "critic/rewards/mean": mean_over_ranks(torch.segment_reduce(batch.rewards, "sum", lengths=rollout.lengths)),
        "response_length/mean": lengths.mean().item(),
        "response_length/min": lengths.min().item(),
        "response_length/max": lengths.max().item(),
        "response_length/clip_ratio": mean_over_ranks(rollout.is_truncated.float()),
    }
    if config.has_critic:
        lam_policy = gather_over_ranks(batch.lam_policy)
        explained, within = explained_variances(batch)
        metrics |= {
            "critic/vf_explained_var": explained,
            "critic/vf_explained_var_within": within,
            "critic/lambda_policy/mean": lam_policy.mean().item(),
            "critic/lambda_policy/min": lam_policy.min().item(),
            "critic/lambda_policy/max": lam_policy.max().item(),
        }
    metrics |= mismatch_metrics(batch)
    if config.kl_reward_weight:
        difference = (batch.old_logprobs - batch.ref_logprobs) * config.kl_reward_weight
        metrics["critic/kl_penalty"] = mean_over_ranks(torch.segment_reduce(difference, "sum", lengths=rollout.lengths))
    return metrics


def mismatch_metrics(batch: Batch) -> dict[str, float]:
    """How far the engine's log-probs are from the trainer's, over the tokens of all ranks; empty where it told none."""
    if batch.rollout.engine_logprobs is None:
        return {}
    log_ratio = (batch.old_logprobs - batch.rollout.engine_logprobs).double()
    return {
        "rollout/logprob_diff/mean": mean_over_ranks(log_ratio.abs()),
        "rollout/logprob_diff/max": gather_over_ranks(log_ratio.abs().max()[None]).max().item(),
        "rollout/k3": mean_over_ranks(log_ratio.expm1() - log_ratio),
    }


def small_lambda_warning(config: Config) -> str:
    """Say what a small λ_policy means for a run."""
    cause = f"lam_policy = {config.lam_policy:g} for all"
    if config.length_adaptive_gae:
        cause = f"α = {config.alpha:g} is small for responses this short"
    return (
        "the mean λ_policy of a batch fell below 0.5: rewards reach early tokens through the critic alone"
        f" ({cause}; see critic/lambda_policy/mean)"
    )


@contextmanager
def timed(metrics: dict[str, float], name: str) -> Iterator[None]:
    """Record the seconds that the block takes as ``timing_s/<name>``, with what it left to the GPU to do."""
    began = time.perf_counter()
    yield
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    metrics[f"timing_s/{name}"] = time.perf_counter() - began
