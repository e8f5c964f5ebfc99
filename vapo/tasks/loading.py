"""Build a task from its name and the name of its reward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from vapo.tasks import EMBEDDED_TASKS, Task
from vapo.tasks.knights_knaves import KnightsKnaves
from vapo.tasks.math import boxed_answer, final_answer, math_verifier
from vapo.tasks.reasoning_gym import ReasoningGym, gym_verifier
from vapo.tasks.reward_functions import load_reward_function
from vapo.tasks.rows import SUFFIXES, Rows, read_problems
from vapo.tasks.running_total import RunningTotal
from vapo.tasks.worker import Verifier, VerifierPool

GYM = "reasoning-gym:"
MATH = "math"
GIVEN = f'{MATH} or "file.py:function"'


def load(name: str, *, reward: str, reward_timeout: float, split: str) -> Task:
    """Build a task, as :func:`vapo.tasks.load_task` says."""
    if name in EMBEDDED_TASKS:
        return _embedded(name, reward, reward_timeout)
    if name.startswith(GYM):
        return _gym(name, reward, reward_timeout)
    if name.endswith(SUFFIXES):
        return _rows(name, reward or MATH, reward_timeout, split)
    raise ValueError(
        f"task must be one of {', '.join(EMBEDDED_TASKS)}, {GYM}<dataset>, or {' or '.join(SUFFIXES)} files with commas"
        f" between them; got {name!r}"
    )


def _embedded(name: str, reward: str, timeout: float) -> Task:
    build = _builder(reward)
    own = "" if build else reward
    if name == KnightsKnaves.name:
        task = KnightsKnaves(own) if own else KnightsKnaves()
    elif own:
        raise ValueError(f"reward of {name} must be {GIVEN}; got {reward!r}")
    else:
        task = RunningTotal()
    if build:
        task.score = VerifierPool(build, timeout=timeout).score
    return task


def _gym(name: str, reward: str, timeout: float) -> Task:
    build = _builder(reward, ("question", "answer", "metadata")) or partial(
        gym_verifier, name.removeprefix(GYM), reward
    )
    return ReasoningGym(name, VerifierPool(build, timeout=timeout))


def _rows(name: str, reward: str, timeout: float, split: str) -> Task:
    problems = read_problems([Path(path) for path in name.split(",")], needs_answer=reward == MATH)
    build = _builder(reward, {column for problem in problems for column in problem.row})
    if build is None:
        raise ValueError(f"reward must be {GIVEN}; got {reward!r}")
    vote = final_answer if reward == MATH else boxed_answer
    return Rows(name, problems, VerifierPool(build, timeout=timeout), vote=vote, split=split)


def _builder(reward: str, columns: Iterable[str] = ()) -> Callable[[], Verifier] | None:
    """What builds a verifier that is of no task: math, or the user's function; None for any other reward."""
    if reward == MATH:
        return math_verifier
    return partial(load_reward_function, reward, tuple(columns)) if ":" in reward else None
