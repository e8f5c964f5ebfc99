"""``vapo evaluate``: the held-out numbers of a finished run or of any model."""

from __future__ import annotations

import json
import random
from dataclasses import fields, replace
from pathlib import Path

import torch

from vapo.config import Config
from vapo.evaluation import evaluate
from vapo.learner import DTYPES, HELD_OUT_SEED, choose_device, seed_for
from vapo.models import load_policy, plain_head
from vapo.sampling import sampling_of
from vapo.sharding import distributed, gathered, rank, shard
from vapo.tasks import load_task
from vapo.tasks.rows import SUFFIXES


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
    with distributed(choose_device(config), alone=config.dtype == "bfloat16") as device:
        task = load_task(name, reward=config.reward, reward_timeout=config.reward_timeout, split=split)
        policy, tokenizer = load_policy(
            str(Path(source) / "policy") if saved else source,
            task,
            seed=0,
            attention=config.attention,
            gradient_checkpointing=False,
        )
        plain_head(policy)
        shard(policy, DTYPES[config.dtype], device)
        sampling = replace(sampling_of(config, policy, tokenizer), top_p=config.eval_top_p, top_k=0)
        with gathered(policy):
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
    saved = json.loads((run / "config.json").read_text(encoding="utf-8"))
    known = {field.name for field in fields(Config)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items() if name in known}


def _is_same(name: str, other: str | None) -> bool:
    """Whether two tasks are one, files by where they lie."""
    if other is None:
        return False
    return name == other or [Path(path).resolve() for path in name.split(",")] == [
        Path(path).resolve() for path in other.split(",")
    ]
