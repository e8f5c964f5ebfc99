"""``vapo evaluate``: the held-out numbers of a finished run or of any model."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch

from vapo.config import Config
from vapo.evaluation import evaluate
from vapo.learner import HELD_OUT_SEED, choose_device, seed_for
from vapo.models import load_policy, stop_token_ids
from vapo.rollout import Sampling
from vapo.tasks import load_task


def evaluate_model(
    run: str,
    *,
    task: str,
    reward: str,
    problems: int,
    samples: int,
    temperature: float,
    top_p: float,
    max_new_tokens: int,
    seed: int,
    device: str,
) -> dict[str, float]:
    """Answer held-out problems ``samples`` times each.

    Args:
        run: Folder of a run, or a hub id or folder of a model.
        task: Prompts and verifier; may be empty for a run.
        reward: How responses are scored; empty: as the run has it, or the task's own way.
        problems: How many problems.
        samples: Responses to each.
        temperature: Of the sampling, > 0.
        top_p: Of the sampling, in (0, 1].
        max_new_tokens: Where a response is cut; 0: as the run has it, or 8192.
        seed: Of the sampling.
        device: "auto", "cpu" or "cuda".

    Returns:
        As :func:`vapo.evaluation.evaluate`.

    Raises:
        ValueError: If there is no such model or task, or a number is out of range.
    """
    for name, value in (("problems", problems), ("samples", samples)):
        if value < 1:
            raise ValueError(f"{name} must be >= 1; got {value}")
    settings = Path(run) / "config.json"
    is_run = (Path(run) / "policy").is_dir()
    saved = json.loads(settings.read_text(encoding="utf-8")) if is_run else {}
    name = task or saved.get("eval_task") or saved.get("task", "")
    if not name:
        raise ValueError(f"task must be given for a model that is no run; got none for {run}")
    place = choose_device(Config(device=device))
    # Another file than the run's is held out as a whole.
    split = "held-out" if name != saved.get("task") else "eighth"
    loaded = load_task(name, reward=reward or saved.get("reward", ""), split=split)
    policy, tokenizer = load_policy(
        str(Path(run) / "policy") if is_run else run, loaded, seed=0, attention="sdpa", gradient_checkpointing=False
    )
    sampling = Sampling(
        max_new_tokens=max_new_tokens or saved.get("max_new_tokens", Config.max_new_tokens),
        stop_token_ids=stop_token_ids(policy, tokenizer, saved.get("stop", ())),
        temperature=temperature,
        top_p=top_p,
    )
    return evaluate(
        policy.to(place),
        tokenizer,
        loaded,
        loaded.problems(problems, random.Random(HELD_OUT_SEED), held_out=True),
        sampling=sampling,
        samples=samples,
        generator=torch.Generator(place).manual_seed(seed_for("evaluation", seed)),
    )
