"""Tasks ``reasoning-gym:<dataset>``: problems that reasoning-gym generates, and its verifiers."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import partial

from vapo.tasks import ISLANDER_REWARDS, Problem, Verdict
from vapo.tasks.split import GeneratedTask
from vapo.tasks.worker import Verifier, VerifierPool

KNIGHTS_KNAVES = "knights_knaves"
INSTRUCTION = "Give the final answer between <answer> and </answer>."
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ROLE = re.compile(r"(\w+) is (?:an? )?(\w+)")


class ReasoningGym(GeneratedTask):
    """One dataset of reasoning-gym, with its default settings.

    A problem's ``row`` is the dataset's entry: question, answer and metadata. Five datasets (codeio, knight_swap,
    isomorphic_strings, polynomial_multiplication, ransom_note) also depend on Python's hash seed: with them, set
    PYTHONHASHSEED for a run that can be repeated, or that has several ranks.
    """

    def __init__(self, name: str, verifier: VerifierPool) -> None:
        """Check that the dataset exists.

        Args:
            name: "reasoning-gym:<dataset>".
            verifier: Runs :func:`gym_verifier` or a user's function.

        Raises:
            ValueError: If reasoning-gym is not installed or has no such dataset.
        """
        self.name, self._verifier = name, verifier
        self._dataset = name.partition(":")[2]
        _create(self._dataset, seed=0)

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Verdict]:
        """Score responses by the dataset's verifier; one is correct only at score 1."""
        return self._verifier.score(problems, responses)

    def final_answer(self, response: str) -> str | None:
        """Return what stands between the last ``<answer>`` and ``</answer>``, or else the last line."""
        return final_answer(response)

    def _generate(self, rng: random.Random) -> Problem:
        # A dataset of its own for each problem: not all can be indexed beyond their size.
        entry = _create(self._dataset, seed=rng.getrandbits(31))[0]
        prompt = [{"role": "user", "content": f"{entry['question']}\n\n{INSTRUCTION}"}]
        answer = "" if entry["answer"] is None else str(entry["answer"])
        return Problem(prompt, answer, self._dataset, entry)


def gym_verifier(dataset: str, reward: str = "") -> Verifier:
    """Build the verifier of a dataset.

    Args:
        dataset: Its name in reasoning-gym.
        reward: "" is the dataset's own score; for ``knights_knaves`` it means "all-right", 1 or 0, and there is
            "per-islander", the share of islanders that are right.

    Raises:
        ValueError: If there is no such dataset or reward.
    """
    rewards = ISLANDER_REWARDS if dataset == KNIGHTS_KNAVES else ()
    if reward and reward not in rewards:
        names = ", ".join((*rewards, "math")) + ' or "file.py:function"'
        raise ValueError(f"reward of reasoning-gym:{dataset} must be {names}; got {reward!r}")
    if rewards and not reward:
        reward = "all-right"
    return Verifier(partial(_score, _create(dataset, seed=0), reward))


def final_answer(response: str) -> str | None:
    """Return what stands between the last ``<answer>`` and ``</answer>``, or else the last line that is not blank.

    Example:
        >>> final_answer("So it is <answer> 7 </answer>."), final_answer("7 or 8?\\n8\\n")
        ('7', '8')
    """
    tagged = _ANSWER.findall(response)
    lines = tagged[-1:] or response.strip().splitlines()
    return lines[-1].strip() if lines else None


def islanders_right(answer: str, reference: str) -> float:
    """Return the share of islanders whose stated role is right; one with contradictory statements counts as wrong.

    Example:
        >>> islanders_right("Jack is a knave and Noah is a knave", "Jack is a knight, and Noah is a knave.")
        0.5
    """
    given, right = (set(_ROLE.findall(text.lower())) for text in (answer, reference))
    stated = {name: {role for other, role in given if other == name} for name, _ in right}
    return sum(stated[name] == {role} for name, role in right) / len(right)


def _score(dataset: object, reward: str, problems: Sequence[Problem], responses: Sequence[str]) -> list[Verdict]:
    return [_verdict(dataset, reward, *pair) for pair in zip(problems, responses, strict=True)]


def _verdict(dataset: object, reward: str, problem: Problem, response: str) -> Verdict:
    answer = final_answer(response)
    score = float(dataset.score_answer(answer, problem.row))
    is_correct = score == 1.0
    if reward == "all-right":
        score = float(is_correct)
    elif reward == "per-islander" and not is_correct:
        score = islanders_right(answer or "", problem.answer)
    return Verdict(score, is_correct)


def _create(name: str, *, seed: int) -> object:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(f"reasoning-gym:{name} needs reasoning-gym: pip install 'vapo[tasks]' ({error})") from error
    if name not in DATASETS:
        raise ValueError(f"dataset of reasoning-gym must be one of {', '.join(sorted(DATASETS))}; got {name!r}")
    return reasoning_gym.create_dataset(name, seed=seed, size=1)
