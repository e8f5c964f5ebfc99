"""Running total: keep a sum modulo 10 on a tape, one term a step.

    prompt     5 +2 -1 -1 +3 _ _ _ =
    response   7 -1 -1 +3 _ _ _ _ = 6 -1 +3 _ _ _ _ _ = 5 +3 _ _ _ _ _ _ = 8 _ _ _ _ _ _ _ # 8 <eos>

Every step rewrites the tape of eight cells with the first term applied, and the answer follows ``#``. A response may
give up after any step and guess. A policy that imitates such responses knows how to reason to the end but rarely does:
what is left for reinforcement learning is to find out that reasoning pays.
"""

from __future__ import annotations

import random
import zlib

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from vapo.tasks import Problem

CELLS = 8
MIN_TERMS = 3
DIGITS = tuple(str(digit) for digit in range(10))
TERMS = ("+1", "+2", "+3", "-1", "-2", "-3")
BLANK, STEP, ANSWER, PAD, EOS = "_", "=", "#", "<pad>", "<eos>"
VOCABULARY = (PAD, EOS, *DIGITS, *TERMS, BLANK, STEP, ANSWER)


class RunningTotal:
    """The task ``running-total``: prompts, demonstrations, verifier and tokenizer."""

    name = "running-total"

    def __init__(self) -> None:
        self.tokenizer = word_tokenizer()

    def problems(self, count: int, rng: random.Random, *, held_out: bool = False) -> list[Problem]:
        """Draw problems from one side of a split that depends on the prompt alone.

        Args:
            count: How many, at least 0. Held-out problems are all different; the others may repeat.
            rng: Source of randomness.
            held_out: Draw from the eighth of all prompts that training never sees.

        Raises:
            ValueError: If ``count`` is negative, or larger than the 4000 different problems that may be held out.

        Example:
            >>> task = RunningTotal()
            >>> task.problems(1, random.Random(0))[0].prompt
            '6 +1 +3 -2 -1 -1 _ _ ='
        """
        if count < 0 or (held_out and count > 4000):
            raise ValueError(f"count must be in [0, 4000] for held-out problems and >= 0 otherwise; got {count}")
        found: dict[str, Problem] = {}
        drawn: list[Problem] = []
        while len(found if held_out else drawn) < count:
            problem = _draw(rng)
            if is_held_out(problem.prompt) == held_out:
                found[problem.prompt] = problem
                drawn.append(problem)
        return list(found.values()) if held_out else drawn

    def demonstration(self, problem: Problem, rng: random.Random, *, give_up: float = 0.0, error: float = 0.0) -> str:
        """Write a response to ``problem``, the end-of-sequence token included.

        Args:
            problem: What is answered.
            rng: Source of randomness.
            give_up: Probability, before each step, of guessing a digit instead of going on.
            error: Probability, at each step, of writing a wrong running total and going on from it.

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

    def is_correct(self, problem: Problem, response: str) -> bool:
        """Say whether ``response`` (without its end-of-sequence token) ends in ``#`` and the right digit.

        Example:
            >>> RunningTotal().is_correct(Problem("5 +2 -1 _ _ _ _ _ =", "6"), "# 6")
            True
        """
        return response.split()[-2:] == [ANSWER, problem.answer]


def is_held_out(prompt: str) -> bool:
    """Say on which side of the split a prompt lies; the same on every machine and for every seed."""
    return zlib.crc32(prompt.encode()) % 8 == 0


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer: one token for each of the 21 words, separated by spaces."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(VOCABULARY)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def _draw(rng: random.Random) -> Problem:
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
