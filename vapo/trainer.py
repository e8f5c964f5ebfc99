"""The whole run, a straight line: warm start, evaluation, value pretraining, VAPO, evaluation."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from vapo.advantages import build_batch, rollout_logprobs, rollout_values
from vapo.config import Config
from vapo.evaluation import evaluate
from vapo.metrics import RunLog
from vapo.models import critic_from_policy, load_critic, tiny_policy
from vapo.rollout import collect
from vapo.tasks import Problem, Task, load_task
from vapo.types import Batch
from vapo.update import mean_metrics, split_rows, update_critic, update_policy
from vapo.value_pretraining import pretrain_values
from vapo.warm_start import warm_start
from vapo_kernels import explained_variance

HELD_OUT_SEED = 0


@dataclass(slots=True)
class Generators:
    """One source of randomness for each purpose, so that changing one use leaves the others alone."""

    data: random.Random
    sampling: torch.Generator
    shuffling: torch.Generator


@dataclass(slots=True)
class Learner:
    """What RL changes: two models, each with its own optimiser."""

    policy: PreTrainedModel
    critic: PreTrainedModel
    policy_optimizer: torch.optim.Optimizer
    critic_optimizer: torch.optim.Optimizer


def train(config: Config, folder: Path) -> dict[str, float]:
    """Run the whole job and leave its record and models in ``folder``.

    Returns:
        Held-out accuracy and response length after training, as :func:`vapo.evaluation.evaluate` names them.

    Raises:
        ValueError: If the device is not there, or ``folder`` already holds a run.
    """
    began = time.perf_counter()
    device = choose_device(config)
    if config.threads:
        torch.set_num_threads(config.threads)
    task = load_task(config.task)
    held_out = task.problems(config.eval_problems, random.Random(HELD_OUT_SEED), held_out=True)
    generators = make_generators(config.seed, device)
    policy = tiny_policy(task.tokenizer, seed_for("init", config.seed)).to(device)

    with RunLog(folder, config=asdict(config), total_steps=config.total_steps) as log:
        for step, metrics in enumerate(warm_start(policy, task, config, generators.data), 1):
            log.log("warm_start", step, metrics)
        before = held_out_metrics(policy, task, held_out, config)

        critic = critic_from_policy(policy)
        if config.value_pretraining:
            critic = pretrained_critic(critic, policy, task, config, generators, folder / "pretrained_critic", log)
        learner = make_learner(policy, critic, config)

        log.log("vapo", 0, before)
        after = before
        for step in range(1, config.steps + 1):
            metrics, samples = vapo_step(learner, task, config, generators)
            if step % config.eval_every == 0 or step == config.steps:
                after = held_out_metrics(policy, task, held_out, config)
                metrics |= after
            log.log("vapo", step, metrics)
            log.samples("vapo", step, samples)
            if metrics["critic/lambda_policy/mean"] < 0.5:
                log.note(small_lambda_warning(config))

        save_models(learner, task, folder)
        log.summary(summary_rows(before, after, config, time.perf_counter() - began))
    return after


def vapo_step(
    learner: Learner, task: Task, config: Config, generators: Generators
) -> tuple[dict[str, float], list[dict[str, object]]]:
    """Collect one rollout and take the optimiser steps on it.

    Returns:
        The step's metrics under verl's names, and the samples to record.
    """
    metrics: dict[str, float] = {}
    problems = task.problems(config.num_responses // config.responses_per_prompt, generators.data)
    with timed(metrics, "step"):
        with timed(metrics, "gen"):
            rollout, texts = collect(
                learner.policy,
                task,
                problems,
                group_size=config.responses_per_prompt,
                max_new_tokens=config.max_new_tokens,
                temperature=config.temperature,
                generator=generators.sampling,
            )
        with timed(metrics, "old_log_prob"):
            old_logprobs = rollout_logprobs(learner.policy, rollout, config)
        with timed(metrics, "values"):
            old_values = rollout_values(learner.critic, rollout, config)
        with timed(metrics, "adv"):
            batch = build_batch(rollout, old_logprobs, old_values, config)

        mini_batches = [
            rows.to(learner.policy.device)
            for _ in range(config.epochs)
            for rows in split_rows(config.num_responses, config.mini_batches, generators.shuffling)
        ]
        with timed(metrics, "update_actor"):
            actor = [
                update_policy(learner.policy, learner.policy_optimizer, batch, rows, config) for rows in mini_batches
            ]
        with timed(metrics, "update_critic"):
            critic = [
                update_critic(
                    learner.critic, learner.critic_optimizer, batch, rows, config, value_clip=config.value_clip
                )
                for rows in mini_batches
            ]
    num_tokens = len(rollout.prompt_ids) + len(rollout.token_ids)
    metrics["perf/throughput"] = num_tokens / metrics["timing_s/step"]
    metrics |= mean_metrics(actor) | mean_metrics(critic) | batch_metrics(batch)
    return metrics, sample_rows(batch, problems, texts, config)


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Describe a batch: rewards, lengths, λ_policy, and how well the critic explained the returns beforehand."""
    rollout, lengths = batch.rollout, batch.rollout.lengths.float()
    everywhere = torch.ones_like(batch.returns, dtype=torch.bool)
    return {
        "critic/score/mean": rollout.is_correct.float().mean().item(),
        "critic/rewards/mean": rollout.scores.mean().item(),
        "critic/vf_explained_var": explained_variance(batch.old_values, batch.returns, everywhere).item(),
        "critic/lambda_policy/mean": batch.lam_policy.mean().item(),
        "critic/lambda_policy/min": batch.lam_policy.min().item(),
        "critic/lambda_policy/max": batch.lam_policy.max().item(),
        "response_length/mean": lengths.mean().item(),
        "response_length/min": lengths.min().item(),
        "response_length/max": lengths.max().item(),
        "response_length/clip_ratio": (~rollout.is_finished).float().mean().item(),
    }


def sample_rows(batch: Batch, problems: list[Problem], texts: list[str], config: Config) -> list[dict[str, object]]:
    """Pick ``logged_samples`` responses, evenly spread over the batch, for the record."""
    num_responses, bounds = len(texts), batch.rollout.cu_seqlens.tolist()
    chosen = [
        number * num_responses // config.logged_samples for number in range(min(config.logged_samples, num_responses))
    ]
    scores, is_correct = batch.rollout.scores.tolist(), batch.rollout.is_correct.tolist()
    rows = []
    for row in chosen:
        advantages = batch.advantages[bounds[row] : bounds[row + 1]]
        rows.append(
            {
                "prompt": problems[row * len(problems) // num_responses].prompt,
                "response": texts[row],
                "reward": scores[row],
                "is_correct": is_correct[row],
                "advantage_min": advantages.min().item(),
                "advantage_max": advantages.max().item(),
            }
        )
    return rows


def pretrained_critic(
    critic: PreTrainedModel,
    policy: PreTrainedModel,
    task: Task,
    config: Config,
    generators: Generators,
    folder: Path,
    log: RunLog,
) -> PreTrainedModel:
    """Pretrain the critic, write its checkpoint to ``folder`` and give back what was written."""
    phase = pretrain_values(
        critic, policy, task, config, data=generators.data, sampling=generators.sampling, shuffling=generators.shuffling
    )
    for step, metrics in enumerate(phase, 1):
        log.log("value_pretraining", step, metrics)
    explained = metrics["critic/pretrain/vf_explained_var"]
    if explained < config.pretraining_target:
        log.note(
            f"value pretraining ended at its limit of {step} rollouts: explained variance {explained:.2f},"
            f" target {config.pretraining_target:g}"
        )
    log.progress.total_steps -= config.pretraining_steps - step
    critic.save_pretrained(folder)
    return load_critic(folder, policy.device)


def make_learner(policy: PreTrainedModel, critic: PreTrainedModel, config: Config) -> Learner:
    """Give both models fresh optimisers: the moments of earlier phases say nothing about RL's gradients."""
    return Learner(
        policy,
        critic,
        torch.optim.AdamW(policy.parameters(), lr=config.actor_lr),
        torch.optim.AdamW(critic.parameters(), lr=config.critic_lr),
    )


def held_out_metrics(policy: PreTrainedModel, task: Task, problems: list[Problem], config: Config) -> dict[str, float]:
    """Evaluate with the run's own evaluation seed, so that every evaluation of a run meets the same random numbers."""
    return evaluate(policy, task, problems, config, seed_for("evaluation", config.seed))


def make_generators(seed: int, device: torch.device) -> Generators:
    """Seed one generator for each purpose from the run's seed."""
    return Generators(
        data=random.Random(seed_for("data", seed)),
        sampling=torch.Generator(device).manual_seed(seed_for("sampling", seed)),
        shuffling=torch.Generator().manual_seed(seed_for("shuffling", seed)),
    )


def seed_for(purpose: str, seed: int) -> int:
    """Derive the seed of one purpose from that of the run."""
    return zlib.crc32(f"{purpose} {seed}".encode())


def choose_device(config: Config) -> torch.device:
    """Resolve ``config.device``.

    Raises:
        ValueError: If it is "cuda" where PyTorch sees no GPU.
    """
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ValueError("device must be auto or cpu where PyTorch sees no GPU; got 'cuda'")
    return torch.device("cuda" if available and config.device != "cpu" else "cpu")


def save_models(learner: Learner, task: Task, folder: Path) -> None:
    """Write ``policy/``, with its tokenizer, and ``critic/`` as transformers' folders."""
    learner.policy.save_pretrained(folder / "policy")
    task.tokenizer.save_pretrained(folder / "policy")
    learner.critic.save_pretrained(folder / "critic")


def small_lambda_warning(config: Config) -> str:
    """Say what a small λ_policy means for a run."""
    cause = f"lam_policy = {config.lam_policy:g} for all"
    if config.length_adaptive_gae:
        cause = f"α = {config.alpha:g} is small for responses this short"
    return (
        "the mean λ_policy of a batch fell below 0.5: rewards reach early tokens through the critic alone"
        f" ({cause}; see critic/lambda_policy/mean)"
    )


def summary_rows(
    before: dict[str, float], after: dict[str, float], config: Config, seconds: float
) -> list[tuple[str, str, str]]:
    """The final table: quantity, before RL, after RL."""
    rows = [
        (f"held-out accuracy, sampled at T = {config.temperature:g}", "val/accuracy_sampled", ".3f"),
        ("held-out accuracy, greedy", "val/accuracy_greedy", ".3f"),
        ("response length, sampled, tokens", "val/response_length", ".1f"),
    ]
    table = [(text, format(before[name], digits), format(after[name], digits)) for text, name, digits in rows]
    return [*table, ("time of the whole run, seconds", "", f"{seconds:.0f}")]


@contextmanager
def timed(metrics: dict[str, float], name: str) -> Iterator[None]:
    """Record the seconds that the block takes as ``timing_s/<name>``."""
    began = time.perf_counter()
    yield
    metrics[f"timing_s/{name}"] = time.perf_counter() - began
