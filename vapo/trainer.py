"""The whole run, a straight line: warm start, evaluation, value pretraining, VAPO, evaluation."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from vapo.config import Config
from vapo.evaluation import evaluate
from vapo.learning.learner import (
    HELD_OUT_SEED,
    Learner,
    check_engine,
    check_models,
    choose_device,
    export,
    make_learner,
    seed_for,
)
from vapo.learning.step import small_lambda_warning, vapo_step
from vapo.learning.value_pretraining import pretraining_step
from vapo.learning.warm_start import warm_start_step
from vapo.models.auto import micro_batch_tokens, resolve_auto
from vapo.models.checkpoint import latest_checkpoint
from vapo.models.memory import Part, memory_of, models_without_weights
from vapo.models.output_head import plain_head
from vapo.models.sharding import check_shard_ranks, distributed, rank, world_size
from vapo.record.run_log import RunLog
from vapo.record.trackers import check_trackers, open_trackers
from vapo.rollout.collect import check_prompts
from vapo.rollout.sampling import ready_to_sample
from vapo.stopping import RunStopped, StopSignals
from vapo.tasks import Problem, Task, load_task
from vapo.types import PHASES, StepReport

# Rounding in bfloat16 gives a few hundredths.
LARGE_LOGPROB_DIFF = 0.2


class HeldOut(NamedTuple):
    """Problems that training never sees, and the task that verifies the responses to them."""

    task: Task
    problems: list[Problem]


def train(config: Config, folder: Path, *, resume: bool = False, last_phase: str = "vapo") -> dict[str, float]:
    """Run the whole job and leave its record, checkpoints and models in ``folder``.

    Args:
        config: Every setting.
        folder: New or empty; with ``resume``, that of the run to go on with.
        resume: Go on from the newest checkpoint; a run that was stopped before its first one starts again.
        last_phase: "value_pretraining" ends the run with the critic.

    Returns:
        The last held-out metrics, as :func:`vapo.evaluation.evaluate` names them.

    Raises:
        ValueError: If the device, the model, the data or the trackers are not there, ``folder`` already holds a run, or
            there is none to resume.
        RunStopped: After Ctrl-C or SIGTERM, once the step that it came in has a checkpoint.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    device = choose_device(config)
    config, reasons = resolve_auto(config, device)
    if resume and not (folder / "config.json").is_file():
        raise ValueError(f"{folder} must hold a run to resume; got no config.json there")
    checkpoint = latest_checkpoint(folder) if resume else None
    with distributed(device, config.needs_group) as device, ExitStack() as at_end, StopSignals() as signals:
        check_trackers(config.trackers)
        task, held_out = load_tasks(config)
        check_shares(config, held_out, world_size())
        learner = make_learner(config, task, device)
        at_end.callback(learner.sampling.close)
        if config.micro_batch_tokens == "auto" and device.type == "cuda":
            free_bytes, _ = torch.cuda.mem_get_info(device)
            tokens = micro_batch_tokens(learner.policy.config, config, free_bytes)
            config = replace(config, micro_batch_tokens=tokens)
            reasons["micro_batch_tokens"] = f"{free_bytes / 1e9:.0f} GB are free beside the models"
        # Files are known as a whole; generated problems are checked as they come.
        known = [*getattr(task, "rows", ()), *held_out.problems]
        check_prompts(learner.policy, learner.tokenizer, known, config.max_new_tokens)
        if checkpoint:
            learner.restore(checkpoint, config)
        trackers = open_trackers(config.trackers if rank() == 0 else (), folder, asdict(config))
        place = (learner.phase or next(iter(PHASES)), learner.step) if resume else None
        total_steps = config.total_steps if last_phase == "vapo" else config.total_steps - config.steps
        with RunLog(
            folder, config=asdict(config), total_steps=total_steps, resume_after=place, trackers=trackers
        ) as log:
            if reasons:
                log.note(
                    "chosen for this machine: "
                    + ", ".join(f"{k} {getattr(config, k)} ({v})" for k, v in reasons.items())
                )
            if config.engine == "loop" and device.type == "cuda":
                log.note("engine transformers (continuous batching) and engine vllm are faster on a GPU than loop")
            if len(held_out.problems) < config.eval_problems:
                log.note(f"evaluation has {len(held_out.problems)} held-out problems, all that there are")
            if plain_head(learner.policy) is None:
                log.note("the policy's head is more than a matrix: its loss goes through whole logits of a micro-batch")
            run_phases(learner, held_out, config, folder, log, last_phase, signals)
            learner.export(folder)
            if last_phase == "vapo":
                log.summary(summary_rows(learner.before, learner.after, config, log.progress.elapsed))
    return learner.after


def check_run(config: Config, *, ranks: int, last_phase: str = "vapo") -> list[Part]:
    """Find out whether a run could start, without reading weights: its data, models, trackers and packages.

    Args:
        config: Every setting.
        ranks: Processes of the run.
        last_phase: As for :func:`train`.

    Returns:
        The memory that each rank needs; see :func:`vapo.models.memory.memory_of`.

    Raises:
        ValueError: As :func:`train`, but for what only the weights show.
    """
    device = choose_device(config)
    config, _ = resolve_auto(config, device)
    config = replace(config, device=device.type)
    check_engine(config, device)
    if config.engine == "vllm" and not find_spec("vllm"):
        raise ValueError("engine 'vllm' needs the extra vllm: pip install 'vapo[vllm]'")
    check_shard_ranks(config.shard_ranks, ranks)
    check_trackers(config.trackers)
    task, held_out = load_tasks(config)
    check_shares(config, held_out, ranks)
    policy, critic, tokenizer = models_without_weights(config, task)
    check_models(config, policy, critic, tokenizer)
    check_prompts(policy, tokenizer, [*getattr(task, "rows", ()), *held_out.problems], config.max_new_tokens)
    return memory_of(config, policy, critic, ranks=ranks, last_phase=last_phase)


def run_phases(
    learner: Learner,
    held_out: HeldOut,
    config: Config,
    folder: Path,
    log: RunLog,
    last_phase: str,
    signals: StopSignals,
) -> None:
    """Take the phases that are still to do, one after the other."""
    for step in steps(learner, "warm_start", config.warm_start_steps, config, folder, signals):
        record("warm_start", step, warm_start_step(learner, step, config), log)
    if not learner.before:
        learner.before = learner.after = held_out_metrics(learner, held_out, config)

    if config.pretrains_values:
        for step in steps(learner, "value_pretraining", config.pretraining_steps, config, folder, signals):
            report = pretraining_step(learner, step, config)
            record("value_pretraining", step, report, log)
            explained = report.metrics["critic/pretrain/vf_explained_var"]
            learner.phase_is_over = explained >= config.pretraining_target
            if step == config.pretraining_steps and not learner.phase_is_over:
                log.note(
                    f"value pretraining ended at its limit of {step} rollouts: explained variance {explained:.2f},"
                    f" target {config.pretraining_target:g}"
                )
        if not learner.is_past("value_pretraining"):
            export(learner.critic, folder / "pretrained_critic")
    if last_phase == "value_pretraining":
        return

    # An early end of value pretraining leaves steps out.
    log.progress.total_steps = log.progress.steps_done + config.steps - learner.steps_of("vapo")
    if learner.phase != "vapo":
        log.log("vapo", 0, learner.before)
    for step in steps(learner, "vapo", config.steps, config, folder, signals):
        report = vapo_step(learner, step, config)
        if step % config.eval_every == 0 or step == config.steps:
            learner.after = held_out_metrics(learner, held_out, config)
            report.metrics.update(learner.after)
        record("vapo", step, report, log)
        if report.metrics.get("critic/lambda_policy/mean", 1.0) < 0.5:
            log.note(small_lambda_warning(config))
        if report.metrics.get("rollout/logprob_diff/mean", 0.0) > LARGE_LOGPROB_DIFF:
            log.note(
                f"the engine's log-probs differ from the policy's by more than {LARGE_LOGPROB_DIFF} on average: it"
                " samples from another distribution (see rollout/logprob_diff/mean)"
            )


def steps(
    learner: Learner, phase: str, count: int, config: Config, folder: Path, signals: StopSignals
) -> Iterator[int]:
    """Number the steps of a phase that are still to do, from 1.

    A phase ends early where the learner's ``phase_is_over`` is set. Checkpoints follow each
    ``checkpoint_every`` steps and the last one.

    Raises:
        FloatingPointError: After ``max_skipped_steps`` optimiser steps in a row that were skipped. The models are as
            before these steps, the data after them: a resumed run gets other batches.
        RunStopped: After a signal, once the step has its checkpoint.
    """
    if learner.is_past(phase) or not count:
        return
    if learner.phase != phase:
        learner.begin(phase, config)
    if learner.phase_is_over:
        return
    for step in range(learner.step + 1, count + 1):
        yield step
        learner.step = step
        broken = [name for name, in_a_row in learner.skips.items() if in_a_row >= config.max_skipped_steps]
        stopped = signals.on_any_rank()
        if stopped or broken or learner.phase_is_over or step % config.checkpoint_every == 0 or step == count:
            learner.save(folder, config)
        if broken:
            raise FloatingPointError(
                f"{config.max_skipped_steps} optimiser steps of the {broken[0]} in a row were skipped, without a finite"
                f" loss and gradient; the checkpoint of {phase}, step {step}, has the models as they were before them"
            )
        if stopped:
            name = signal.Signals(stopped).name
            raise RunStopped(stopped, f"stopped by {name} after step {step} of {PHASES[phase]}, with a checkpoint")
        if learner.phase_is_over:
            return


def check_shares(config: Config, held_out: HeldOut, ranks: int) -> None:
    """Refuse a run in which a rank would have nothing to do.

    Raises:
        ValueError: If there are fewer prompts, demonstrations or held-out problems than ranks, or fewer responses than
            mini-batches on a rank.
    """
    counts = {name: getattr(config, name) for name in ("num_prompts", "pretraining_prompts", "warm_start_batch")}
    counts["the number of held-out problems"] = len(held_out.problems)
    counts["num_prompts × group_size / mini_batches"] = config.num_responses // config.mini_batches
    counts["pretraining_prompts / pretraining_mini_batches"] = (
        config.pretraining_prompts // config.pretraining_mini_batches
    )
    for name, count in counts.items():
        if count < ranks:
            raise ValueError(f"{name} must be >= the number of ranks, {ranks}; got {count}")


def load_tasks(config: Config) -> tuple[Task, HeldOut]:
    """The task to train on, and the problems of every evaluation, the same for every seed."""
    options = {"reward": config.reward, "reward_timeout": config.reward_timeout}
    task = load_task(config.task, split="train" if config.eval_task else "eighth", **options)
    source = load_task(config.eval_task, split="held-out", **options) if config.eval_task else task
    problems = source.problems(config.eval_problems, random.Random(HELD_OUT_SEED), held_out=True)
    return task, HeldOut(source, problems)


def held_out_metrics(learner: Learner, held_out: HeldOut, config: Config) -> dict[str, float]:
    """Evaluate with the run's own evaluation seed, so that every evaluation of a run uses the same random numbers."""
    generator = torch.Generator(learner.policy.device).manual_seed(seed_for(f"evaluation {config.seed}", rank()))
    with ready_to_sample(learner.policy, learner.sampling):
        return evaluate(
            learner.policy,
            learner.tokenizer,
            held_out.task,
            held_out.problems,
            sampling=replace(learner.sampling, top_p=config.eval_top_p, top_k=0),
            samples=config.eval_samples,
            generator=generator,
        )


def record(phase: str, step: int, report: StepReport, log: RunLog) -> None:
    """Log a step, and note what went wrong in it: verifiers that failed, and optimiser steps that were skipped."""
    log.log(phase, step, report.metrics)
    log.samples(phase, step, report.samples)
    if report.errors:
        text = "a verifier failed; its responses get the reward 0 (reward/errors counts them). The first one:"
        log.note(f"{text}\n{report.errors[0]}", kind="verifier")
    if report.skipped:
        counts = {name: report.metrics.get(f"{name}/skipped_steps", 0) for name in ("actor", "critic")}
        models = " and ".join(f"{count:.0f} of the {name}" for name, count in counts.items() if count)
        log.note(f"step {step} of {PHASES[phase]}: optimiser steps were skipped, {models}: {report.skipped}")


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
