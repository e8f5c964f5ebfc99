"""Running total: keep a sum modulo 10 on a tape, one term a step.

    prompt     5 +2 -1 -1 +3 _ _ _ =
    response   7 -1 -1 +3 _ _ _ _ = 6 -1 +3 _ _ _ _ _ = 5 +3 _ _ _ _ _ _ = 8 _ _ _ _ _ _ _ # 8 <eos>

Every step rewrites the tape of eight cells with the first term applied, and the answer follows ``#``. A response may
give up after any step and guess. A policy that imitates such responses can reason to the end but rarely does:
reinforcement learning has to find out that reasoning pays.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from vapo.tasks import Problem, Verdict
from vapo.tasks.split import GeneratedTask
from vapo.tasks.words import EOS, word_tokenizer

CELLS = 8
MIN_TERMS = 3
DIGITS = tuple(str(digit) for digit in range(10))
TERMS = ("+1", "+2", "+3", "-1", "-2", "-3")
BLANK, STEP, ANSWER = "_", "=", "#"
WORDS = (*DIGITS, *TERMS, BLANK, STEP, ANSWER)


class RunningTotal(GeneratedTask):
    """The task ``running-total``: prompts, demonstrations, verifier and tokenizer.

    Example:
        >>> RunningTotal().problems(1, random.Random(0))[0].prompt
        '6 +1 +3 -2 -1 -1 _ _ ='
    """

    name = "running-total"
    num_held_out = 4000

    def __init__(self) -> None:
        self.tokenizer = word_tokenizer(WORDS)

    def demonstration(self, problem: Problem, rng: random.Random, *, give_up: float = 0.0, error: float = 0.0) -> str:
        """Write a response to ``problem``, the end-of-sequence token included.

        Args:
            problem: The problem to answer.
            rng: Source of randomness.
            give_up: Probability, before each step, of guessing a digit and ending there.
            error: Probability, at each step, of writing a wrong running total and continuing from it.

        Example:
            >>> task = RunningTotal()
            >>> task.demonstration(Problem("5 +2 -1 _ _ _ _ _ =", "6"), random.Random(0))
            '7 -1 _ _ _ _ _ _ = 6 _ _ _ _ _ _ _ # 6 <eos>'
        """
        total, *terms = [word for word in problem.prompt.split() if word not in (BLANK, STEP)]
        words: list[str] = []
        while terms:
            if rng.random() < give_up:
                return " ".join([*words, ANSWER, rng.choice(DIGITS), EOS])
            total = _add(total, terms.pop(0))
            if rng.random() < error:
                total = rng.choice([digit for digit in DIGITS if digit != total])
            words += [*_tape([total, *terms]), STEP if terms else ANSWER]
        return " ".join([*words, total, EOS])

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Verdict]:
        """Give 1 to a response (without its end-of-sequence token) that ends in ``#`` and the right digit, else 0.

        Example:
            >>> RunningTotal().score([Problem("5 +2 -1 _ _ _ _ _ =", "6")], ["# 6"])
            [Verdict(score=1.0, is_correct=True, error=None)]
        """
        correct = [self.final_answer(text) == problem.answer for problem, text in zip(problems, responses, strict=True)]
        return [Verdict(float(is_correct), is_correct) for is_correct in correct]

    def final_answer(self, response: str) -> str | None:
        """Return the last word if ``#`` stands before it.

        Example:
            >>> RunningTotal().final_answer("7 -1 _ _ _ _ _ _ # 6")
            '6'
        """
        words = response.split()
        return words[-1] if words[-2:-1] == [ANSWER] else None

    def _generate(self, rng: random.Random) -> Problem:
        num_terms = rng.randint(MIN_TERMS, CELLS) - 1
        first, terms = rng.choice(DIGITS), [rng.choice(TERMS) for _ in range(num_terms)]
        answer = first
        for term in terms:
            answer = _add(answer, term)
        return Problem(" ".join([*_tape([first, *terms]), STEP]), answer)


def _add(total: str, term: str) -> str:
    return str((int(total) + int(term)) % 10)


def _tape(words: list[str]) -> list[str]:
    return words + [BLANK] * (CELLS - len(words))
