"""Held-out accuracy of a policy: avg@k, pass@j, maj@k and greedy, over all problems and for each data source."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vapo.config import Config
from vapo.learning.learner import DTYPES, HELD_OUT_SEED, choose_device, seed_for
from vapo.models.auto import resolve_auto
from vapo.models.load import load_policy
from vapo.models.output_head import plain_head
from vapo.models.sharding import distributed, gather_over_ranks, rank, shard, sum_over_ranks, world_size
from vapo.rollout.collect import Collected, collect
from vapo.rollout.sampling import Sampling, ready_to_sample, sampling_of, with_engine
from vapo.tasks import Problem, Task, load_task
from vapo.tasks.rows import SUFFIXES


def evaluate(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    problems: Sequence[Problem],
    *,
    sampling: Sampling,
    samples: int,
    generator: torch.Generator,
) -> dict[str, float]:
    """Answer each problem ``samples`` times by sampling and once greedily.

    Every rank is given all problems, answers its share of them and returns the figures of all.

    Args:
        policy: The model; under FSDP2 its parameters must be gathered.
        tokenizer: Its tokenizer.
        task: The verifier.
        problems: Held-out problems.
        sampling: How responses are sampled; the greedy ones differ in their temperature, 0, only.
        samples: k, responses to each problem.
        generator: Source of randomness; with the same seed two policies get the same random numbers.

    Returns:
        Means over the problems: ``val/accuracy_sampled`` (avg@k), ``val/pass@j`` for j = 2, 4, 8 … and k,
        ``val/maj@k`` if k > 1, ``val/accuracy_greedy``, and of the sampled responses ``val/response_length`` in tokens
        and ``val/truncated``, the share that the length limit truncated. With several data sources, the same for
        each under ``val/<source>/…``; those without a source are ``unnamed``. ``val/errors`` counts the
        responses, sampled or greedy, on which the verifier failed.

    Raises:
        ValueError: If there are fewer problems than ranks, ``samples`` is less than 1, or the temperature is not above
            0, where all samples of a problem would be one.
    """
    if len(problems) < world_size():
        raise ValueError(f"problems must be at least 1 for each of {world_size()} ranks; got {len(problems)}")
    if samples < 1:
        raise ValueError(f"samples must be >= 1; got {samples}")
    if not sampling.temperature > 0:
        raise ValueError(f"sampling.temperature must be > 0 in evaluation; got {sampling.temperature}")

    mine = problems[rank() :: world_size()]
    sampled = collect(policy, tokenizer, task, mine, group_size=samples, sampling=sampling, generator=generator)
    greedy_sampling = replace(sampling, temperature=0.0)
    greedy = collect(policy, tokenizer, task, mine, group_size=1, sampling=greedy_sampling, generator=generator)

    figures = problem_figures(task, sampled, greedy, samples)
    rows = torch.tensor([list(each.values()) for each in figures], dtype=torch.float64)
    sources = [problem.data_source for number in range(world_size()) for problem in problems[number :: world_size()]]
    num_errors = torch.tensor(len(sampled.errors) + len(greedy.errors))
    metrics = mean_figures(list(figures[0]), gather_over_ranks(rows), sources)
    return metrics | {"val/errors": float(sum_over_ranks(num_errors))}


def problem_figures(task: Task, sampled: Collected, greedy: Collected, samples: int) -> list[dict[str, float]]:
    """The figures of each problem: what its ``samples`` sampled responses and its greedy one came to."""
    correct, truncated = sampled.rollout.is_correct.tolist(), sampled.rollout.is_truncated.tolist()
    lengths, greedy_correct = sampled.rollout.lengths.tolist(), greedy.rollout.is_correct.tolist()
    # A truncated response has no answer.
    answers = [
        None if is_cut else task.final_answer(text) for text, is_cut in zip(sampled.texts, truncated, strict=True)
    ]
    groups = (slice(first, first + samples) for first in range(0, len(correct), samples))
    return [
        accuracy_figures(correct[group], answers[group])
        | {
            "accuracy_greedy": float(is_right),
            "response_length": sum(lengths[group]) / samples,
            "truncated": sum(truncated[group]) / samples,
        }
        for group, is_right in zip(groups, greedy_correct, strict=True)
    ]


def accuracy_figures(is_correct: Sequence[bool], answers: Sequence[str | None]) -> dict[str, float]:
    """avg@k, pass@j and maj@k of one problem from the verifier's results on its k sampled responses.

    Args:
        is_correct: k results of the verifier.
        answers: The k final answers that vote; None does not vote.

    Returns:
        ``accuracy_sampled``; ``pass@j`` for j = 2, 4, 8 … below k and for k itself; ``maj@k`` if k > 1.

    Example:
        >>> accuracy_figures([True, False, False, True], ["7", "3", "3", "7"])
        {'accuracy_sampled': 0.5, 'pass@2': 0.8333333333333334, 'pass@4': 1.0, 'maj@4': 1.0}
    """
    num_samples, num_correct = len(is_correct), sum(is_correct)
    figures = {"accuracy_sampled": num_correct / num_samples}
    if num_samples > 1:
        powers_of_two = {2**power for power in range(1, num_samples.bit_length())}
        for draws in sorted(powers_of_two | {num_samples}):
            figures[f"pass@{draws}"] = pass_at(draws, num_samples, num_correct)
        figures[f"maj@{num_samples}"] = float(majority_is_correct(is_correct, answers))
    return figures


def pass_at(draws: int, num_samples: int, num_correct: int) -> float:
    """Probability that at least one of ``draws`` responses, drawn without replacement, is correct.

    Its mean over problems estimates pass@j without bias: 1 − C(k − c, j) / C(k, j), with c of k samples correct.

    Args:
        draws: j, from 1 to k.
        num_samples: k.
        num_correct: c, from 0 to k.

    Example:
        >>> pass_at(2, num_samples=4, num_correct=1)
        0.5

    Source: Chen et al. 2021, Evaluating large language models trained on code, Eq. 1. https://arxiv.org/abs/2107.03374
    """
    return 1 - math.comb(num_samples - num_correct, draws) / math.comb(num_samples, draws)


def majority_is_correct(is_correct: Sequence[bool], answers: Sequence[str | None]) -> bool:
    """Say whether the most frequent answer is correct; False if there is none.

    Of answers equally frequent the one sampled first wins: samples are exchangeable, so this choice is fair and does
    not depend on the verifier. The answer is as correct as the first response that gave it.

    Args:
        is_correct: k results of the verifier.
        answers: The k final answers; None does not vote.

    Example:
        >>> majority_is_correct([False, True, True, False], ["3", "7", "7", None])
        True
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return False
    # Equal counts keep the order of their first occurrence.
    winner, _ = votes.most_common(1)[0]
    return is_correct[list(answers).index(winner)]


def mean_figures(names: Sequence[str], rows: Tensor, sources: Sequence[str]) -> dict[str, float]:
    """Average the figures of P problems, over all and, if there are several data sources, over those of each.

    Args:
        names: M names.
        rows: [P, M] float64. The figures of each problem.
        sources: P data sources.

    Example:
        >>> mean_figures(["truncated"], torch.tensor([[0.0], [1.0]]), ["aime", "amc"])
        {'val/truncated': 0.5, 'val/aime/truncated': 0.0, 'val/amc/truncated': 1.0}
    """
    metrics = _means("val", names, rows)
    labels = [source or "unnamed" for source in sources]
    for label in sorted(set(labels)) if len(set(labels)) > 1 else []:
        chosen = torch.tensor([each == label for each in labels])
        metrics |= _means(f"val/{label}", names, rows[chosen])
    return metrics


def _means(prefix: str, names: Sequence[str], rows: Tensor) -> dict[str, float]:
    return {f"{prefix}/{name}": mean for name, mean in zip(names, rows.mean(0).tolist(), strict=True)}


def evaluate_model(source: str, **given: object) -> dict[str, float]:
    """Answer held-out problems ``eval_samples`` times each.

    Args:
        source: Folder of a finished run, whose settings hold, or a hub id or folder of a model.
        given: Fields of :class:`vapo.config.Config` that are to be otherwise: ``task``, ``reward``, ``eval_problems``,
            ``eval_samples``, ``eval_top_p``, ``temperature``, ``max_new_tokens``, ``seed``, ``device``, ``dtype``,
            ``attention``, ``engine``, ``rollout_batch_size``.

    Returns:
        As :func:`vapo.evaluation.evaluate`.

    Raises:
        ValueError: If there is no such model or task, or a value is out of range.
    """
    saved = read_settings(Path(source))
    if not saved and "task" not in given:
        raise ValueError(f"task must be given for a model that is no run; got none for {source}")
    config = Config(**saved | given)
    name = config.task if "task" in given else config.eval_task or config.task
    if saved.get("eval_task") and name.endswith(SUFFIXES) and _is_same(name, saved["task"]):
        raise ValueError(f"task must be one that the run did not train on; got {name}, of which it held nothing out")
    # All rows of a file that the run did not train on are held out.
    split = "eighth" if _is_same(name, saved.get("task")) else "held-out"
    device = choose_device(config)
    config, _ = resolve_auto(config, device)
    with distributed(device, alone=config.needs_group) as device, ExitStack() as at_end:
        task = load_task(name, reward=config.reward, reward_timeout=config.reward_timeout, split=split)
        policy, tokenizer = load_policy(
            str(Path(source) / "policy") if saved else source,
            task,
            seed=0,
            attention=config.attention,
            gradient_checkpointing=False,
        )
        shard(policy, DTYPES[config.dtype], device)
        plain_head(policy)
        sampling = replace(sampling_of(config, policy, tokenizer), top_p=config.eval_top_p, top_k=0)
        sampling = with_engine(sampling, policy, config)
        at_end.callback(sampling.close)
        with ready_to_sample(policy, sampling):
            return evaluate(
                policy,
                tokenizer,
                task,
                task.problems(config.eval_problems, random.Random(HELD_OUT_SEED), held_out=True),
                sampling=sampling,
                samples=config.eval_samples,
                generator=torch.Generator(device).manual_seed(seed_for(f"evaluation {config.seed}", rank())),
            )


def read_settings(run: Path) -> dict[str, object]:
    """The settings of a run; empty for a folder or a name that is none.

    Raises:
        ValueError: If the run has no policy yet.
    """
    if not (run / "metrics.jsonl").is_file():
        return {}
    if not (run / "policy").is_dir():
        raise ValueError(f"a run must have ended with its policy/ to be evaluated; got {run}, which has none yet")
    return asdict(Config.from_json(run / "config.json", unknown="drop"))


def _is_same(name: str, other: str | None) -> bool:
    """Whether two tasks are one, files by where they lie."""
    if other is None:
        return False
    return name == other or [Path(path).resolve() for path in name.split(",")] == [
        Path(path).resolve() for path in other.split(",")
    ]
