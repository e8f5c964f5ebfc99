"""From the names of a task and a reward to the task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from vapo.tasks import EMBEDDED_TASKS, EmbeddedTask, Problem, Task, Verdict
from vapo.tasks.knights_knaves import KnightsKnaves
from vapo.tasks.math import boxed_answer, final_answer, math_verifier
from vapo.tasks.reasoning_gym import ReasoningGym, gym_verifier
from vapo.tasks.reward_functions import load_reward_function
from vapo.tasks.rows import SUFFIXES, Rows, read_problems
from vapo.tasks.running_total import RunningTotal
from vapo.tasks.worker import Verifier, VerifierPool

GYM = "reasoning-gym:"
MATH = "math"


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


class Rewarded:
    """An embedded task with another verifier than its own."""

    def __init__(self, task: EmbeddedTask, verifier: VerifierPool) -> None:
        self.name, self.tokenizer = task.name, task.tokenizer
        self.problems, self.demonstration, self.final_answer = task.problems, task.demonstration, task.final_answer
        self.state_dict, self.load_state_dict = task.state_dict, task.load_state_dict
        self._verifier = verifier

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Verdict]:
        """Score responses by the other verifier."""
        return self._verifier.score(problems, responses)


def _embedded(name: str, reward: str, timeout: float) -> Task:
    is_users = reward == MATH or ":" in reward
    if name == KnightsKnaves.name:
        task = KnightsKnaves() if is_users or not reward else KnightsKnaves(reward)
    elif is_users or not reward:
        task = RunningTotal()
    else:
        raise ValueError(f'reward of {name} must be {MATH} or "file.py:function"; got {reward!r}')
    return Rewarded(task, VerifierPool(_builder(reward), timeout=timeout)) if is_users else task


def _gym(name: str, reward: str, timeout: float) -> Task:
    if reward == MATH or ":" in reward:
        build = _builder(reward, columns=("question", "answer", "metadata"))
    else:
        build = partial(gym_verifier, name.removeprefix(GYM), reward)
    return ReasoningGym(name, VerifierPool(build, timeout=timeout))


def _rows(name: str, reward: str, timeout: float, split: str) -> Task:
    problems = read_problems([Path(path) for path in name.split(",")], needs_answer=reward == MATH)
    columns = {column for problem in problems for column in problem.row}
    verifier = VerifierPool(_builder(reward, columns), timeout=timeout)
    return Rows(name, problems, verifier, vote=final_answer if reward == MATH else boxed_answer, split=split)


def _builder(reward: str, columns: Iterable[str] = ()) -> Callable[[], Verifier]:
    """What builds the verifier in its process."""
    if reward == MATH:
        return math_verifier
    if ":" in reward:
        return partial(load_reward_function, reward, tuple(columns))
    raise ValueError(f'reward must be {MATH} or "file.py:function"; got {reward!r}')
