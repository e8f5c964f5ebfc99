"""Reward functions from a user's file, called as verl or TRL call them, or with completion and answer.

    compute_score(data_source, solution_str, ground_truth, extra_info)     verl's: one response
    f(prompts, completions, **columns)                                     TRL's: all responses at once
    reward(completion, answer, **row)                                      one response

The names of its parameters tell which form a function has. It returns a finite number, and a response is correct if
that is at least 1; or a dict with ``score`` and ``is_correct``, or verl's ``acc``. In TRL's form it returns a list of
these, and completions are text, or messages where the prompts are messages. In the other two forms a response is text,
and as many are scored at once as there are cores.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from vapo.tasks import Problem, Verdict
from vapo.tasks.worker import Verifier

FORMS = (
    "compute_score(data_source, solution_str, ground_truth, extra_info), f(prompts, completions, **columns)"
    " or reward(completion, answer, **row)"
)


def load_reward_function(reference: str, columns: Sequence[str] = ()) -> Verifier:
    """Import a function and find out its form.

    Args:
        reference: "file.py:function".
        columns: Names of the data's columns, which the function may ask for.

    Raises:
        ValueError: If there is no such file or function, its form is unknown, or it needs a column that the data
            lacks.
    """
    path, _, name = reference.rpartition(":")
    function = getattr(_import(Path(path), reference), name, None)
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise ValueError(f"reward {reference!r} must name a plain function; {path} has {function!r} under that name")
    names = inspect.signature(function).parameters.keys()
    if {"solution_str", "ground_truth"} <= names:
        known, score = {"data_source", "solution_str", "ground_truth", "extra_info"}, _one_by_one(_verl_arguments)
    elif "completions" in names:
        known, score = {"prompts", "completions", "answer", *columns}, _score_batch
    elif "completion" in names:
        known, score = {"prompt", "completion", "answer", *columns}, _one_by_one(_row_arguments)
    else:
        raise ValueError(f"reward {reference!r} must be {FORMS}; got {name}{inspect.signature(function)}")
    if missing := _required(function) - known:
        raise ValueError(
            f"the parameters of reward {reference!r} must be among {', '.join(sorted(known))};"
            f" got {', '.join(sorted(missing))}"
        )
    return Verifier(partial(score, function), takes_batch=score is _score_batch)


def to_verdict(result: object) -> Verdict:
    """Convert what a reward function returned.

    Raises:
        TypeError: If it is neither a number nor a dict with ``score``.
        ValueError: If the score is not finite.

    Example:
        >>> to_verdict(0.5), to_verdict({"score": -1.0, "acc": True})
        (Verdict(score=0.5, is_correct=False, error=None), Verdict(score=-1.0, is_correct=True, error=None))
    """
    score, is_correct = result, None
    if isinstance(result, Mapping):
        score = result.get("score")
        is_correct = result.get("is_correct", result.get("acc"))
    if score is None or isinstance(score, (str, bytes)):
        raise TypeError(f"a reward function must return a number or a dict with a number as score; got {result!r}")
    score = float(score)
    if not math.isfinite(score):
        raise ValueError(f"a reward function must return a finite score; got {result!r}")
    return Verdict(score, float(score if is_correct is None else is_correct) >= 1.0)


def _import(path: Path, reference: str) -> object:
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f'reward must be "file.py:function" with an existing file; got {reference!r}')
    # The function may import what lies beside it, but must not hide a library that way.
    sys.path.append(str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(f"reward_function_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _required(function: Callable) -> set[str]:
    """The parameters that have no default."""
    parameters = inspect.signature(function).parameters.values()
    optional = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {each.name for each in parameters if each.default is each.empty and each.kind not in optional}


def _call(function: Callable, arguments: dict[str, object]) -> object:
    """Call the function with those of the arguments that it takes."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function(**arguments)
    return function(**{name: value for name, value in arguments.items() if name in parameters})


def _one_by_one(arguments: Callable[[Problem, str], dict[str, object]]) -> Callable:
    """Score a batch by a function of one response, called with ``arguments``."""

    def score(function: Callable, problems: Sequence[Problem], responses: Sequence[str]) -> list[Verdict]:
        pairs = zip(problems, responses, strict=True)
        return [to_verdict(_call(function, arguments(*pair))) for pair in pairs]

    return score


def _verl_arguments(problem: Problem, response: str) -> dict[str, object]:
    reward_model = problem.row.get("reward_model")
    return {
        "data_source": problem.data_source,
        "solution_str": response,
        "ground_truth": reward_model["ground_truth"] if reward_model else problem.answer,
        "extra_info": problem.row.get("extra_info") or {},
    }


def _row_arguments(problem: Problem, response: str) -> dict[str, object]:
    return {**problem.row, "prompt": problem.prompt, "completion": response, "answer": problem.answer}


def _score_batch(function: Callable, problems: Sequence[Problem], responses: Sequence[str]) -> list[Verdict]:
    rows = [{"answer": problem.answer, **problem.row} for problem in problems]
    names = {name for row in rows for name in row} - {"prompt", "completion"}
    arguments = {name: [row.get(name) for row in rows] for name in names}
    arguments["prompts"] = [problem.prompt for problem in problems]
    arguments["completions"] = [
        response if isinstance(problem.prompt, str) else [{"role": "assistant", "content": response}]
        for problem, response in zip(problems, responses, strict=True)
    ]
    results = list(_call(function, arguments))
    if len(results) != len(problems):
        raise ValueError(f"a reward function must return {len(problems)} scores, one a completion; got {len(results)}")
    return [to_verdict(result) for result in results]
