"""Knights and knaves: knights tell the truth, knaves lie; find out who is who, a statement at a time.

    prompt     B: A is knave . C: D is knight . A: C same B . D: A is knave . ?
    response   if B+ A is knave knave A- C same B diff B+ C- D is knight knave D- A is knave knight A+ A- no
               if B- A is knave knight A+ C same B same B- C- D is knight knave D- A is knave knight A+ A+ ok
               so B- C- A+ D- <eos>

``B+`` says that B is a knight, ``B-`` that B is a knave. A response assumes the first islander to be a knight. Each
statement on the way is copied; then comes what it means from such a speaker (a knave's is negated), the known value
that it refers to, if any, and the value derived. The last statement is about a known islander: the derived value, the
known one, then ``ok``, or ``no`` and the other assumption. The answer follows ``so``, in the prompt's order. A response
may give up before any statement and guess whom it does not know yet.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise, product

from vapo.tasks import ISLANDER_REWARDS, Problem, Verdict
from vapo.tasks.split import GeneratedTask
from vapo.tasks.words import EOS, word_tokenizer

NAMES = ("A", "B", "C", "D")
MIN_ISLANDERS = 3
KNIGHT, KNAVE = "+", "-"
NEGATED = {"same": "diff", "diff": "same", "knight": "knave", "knave": "knight"}
WORDS = (
    *(f"{name}:" for name in NAMES),
    *NAMES,
    *(name + value for name in NAMES for value in (KNIGHT, KNAVE)),
    *("is", *NEGATED, ".", "?", "if", "ok", "no", "so"),
)

Statement = tuple[str, str, str]  # ("A", "is", "knave") or ("B", "same", "C")
Sentences = dict[str, Statement]  # by speaker, in the prompt's order


class KnightsKnaves(GeneratedTask):
    """The task ``knights-knaves``: prompts, demonstrations, verifier and tokenizer.

    Problems have three or four islanders.

    Example:
        >>> KnightsKnaves().problems(1, random.Random(0))[0].prompt
        'C: A diff C . A: B diff A . B: A same C . ?'
    """

    name = "knights-knaves"
    num_held_out = 2000

    def __init__(self, reward: str = "all-right") -> None:
        """Set the reward: "all-right", 1 or 0, or "per-islander", the share of islanders that are right.

        Raises:
            ValueError: If there is no such reward.
        """
        if reward not in ISLANDER_REWARDS:
            raise ValueError(f"reward must be one of {', '.join(ISLANDER_REWARDS)}; got {reward!r}")
        self.reward = reward
        self.tokenizer = word_tokenizer(WORDS)

    def demonstration(self, problem: Problem, rng: random.Random, *, give_up: float = 0.0, error: float = 0.0) -> str:
        """Write a response to ``problem``, the end-of-sequence token included.

        Args:
            problem: The problem to answer.
            rng: Source of randomness.
            give_up: Probability, before each statement, of guessing the islanders that are not known yet.
            error: Probability, at each statement, of reading it as its opposite and continuing from that.

        Example:
            >>> problem = Problem("C: A diff C . A: B diff C . B: C diff A . ?", "C+ A- B+")
            >>> KnightsKnaves().demonstration(problem, random.Random(0), give_up=1.0)
            'if C+ so C+ A- B+ <eos>'
        """
        sentences = _sentences(problem.prompt)
        head = next(iter(sentences))
        words: list[str] = []
        for assumed in (KNIGHT, KNAVE):
            words += ["if", head + assumed]
            known = {head: assumed}
            if _propagate(sentences, known, words, rng, give_up, error) != "no":
                break
        values = (name + (known.get(name) or rng.choice((KNIGHT, KNAVE))) for name in sentences)
        return " ".join([*words, "so", *values, EOS])

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Verdict]:
        """Score responses, given without their end-of-sequence token; right ones end in ``so`` and the answer.

        Example:
            >>> KnightsKnaves().score([Problem("", "B- A+ C+")], ["so B- A+ C-"])
            [Verdict(score=0.0, is_correct=False, error=None)]
            >>> KnightsKnaves("per-islander").score([Problem("", "B- A+ C+ D+")], ["so B- A+ C- D+"])
            [Verdict(score=0.75, is_correct=False, error=None)]
        """
        return [self._verdict(*pair) for pair in zip(problems, responses, strict=True)]

    def final_answer(self, response: str) -> str | None:
        """Return the words after the last ``so``.

        Example:
            >>> KnightsKnaves().final_answer("if B+ so B+ A+ C-")
            'B+ A+ C-'
        """
        _, so, answer = f" {response}".rpartition(" so ")
        return answer if so else None

    def _generate(self, rng: random.Random) -> Problem:
        """A puzzle with exactly one solution."""
        while True:
            sentences = _sample_sentences(rng)
            solutions = solve(sentences)
            if len(solutions) == 1:
                prompt = " ".join(f"{speaker}: {' '.join(words)} ." for speaker, words in sentences.items())
                answer = " ".join(name + solutions[0][name] for name in sentences)
                return Problem(f"{prompt} ?", answer, data_source=f"{len(sentences)} islanders")

    def _verdict(self, problem: Problem, response: str) -> Verdict:
        right = problem.answer.split()
        given = (self.final_answer(response) or "").split()
        if len(given) != len(right):
            return Verdict(0.0, False)
        share = sum(map(str.__eq__, given, right)) / len(right)
        return Verdict(share if self.reward == "per-islander" else float(share == 1.0), share == 1.0)


def _sample_sentences(rng: random.Random) -> Sentences:
    """A chain in which each speaks about the next and the last about earlier ones; its head comes first."""
    chain = list(NAMES[: rng.randint(MIN_ISLANDERS, len(NAMES))])
    rng.shuffle(chain)
    said: Sentences = {}
    for number, (speaker, subject) in enumerate(pairwise(chain)):
        said[speaker] = _sample_statement(rng, subject, chain[: number + 1])
    *earlier, last = chain
    subject = rng.choice(earlier)
    said[last] = _sample_statement(rng, subject, [name for name in earlier if name != subject])
    rest = chain[1:]
    rng.shuffle(rest)
    return {speaker: said[speaker] for speaker in (chain[0], *rest)}


def _sample_statement(rng: random.Random, subject: str, others: Sequence[str]) -> Statement:
    if rng.random() < 0.5:
        return subject, "is", rng.choice(("knight", "knave"))
    return subject, rng.choice(("same", "diff")), rng.choice(others)


def solve(sentences: Sentences) -> list[dict[str, str]]:
    """Find, by trying all, every assignment under which exactly the knights' statements are true.

    Example:
        >>> solve({"A": ("B", "is", "knave"), "B": ("A", "same", "B")})
        [{'A': '+', 'B': '-'}]
    """
    worlds = (dict(zip(sentences, values, strict=True)) for values in product((KNIGHT, KNAVE), repeat=len(sentences)))
    return [
        world
        for world in worlds
        if all((world[speaker] == KNIGHT) == _is_true(words, world) for speaker, words in sentences.items())
    ]


def _is_true(statement: Statement, world: dict[str, str]) -> bool:
    subject, relation, other = statement
    if relation == "is":
        return (world[subject] == KNIGHT) == (other == "knight")
    return (world[subject] == world[other]) == (relation == "same")


def _sentences(prompt: str) -> Sentences:
    words = prompt.removesuffix("?").split()
    return {words[at].removesuffix(":"): tuple(words[at + 1 : at + 4]) for at in range(0, len(words), 5)}


def _propagate(
    sentences: Sentences, known: dict[str, str], words: list[str], rng: random.Random, give_up: float, error: float
) -> str | None:
    """Follow the statements from the one islander in ``known``, to which those derived are added.

    Returns:
        "ok" or "no", as the last statement agrees with what is known; None after giving up.
    """
    (speaker,) = known
    while rng.random() >= give_up:
        subject, relation, other = sentences[speaker]
        meaning = other if relation == "is" else relation
        if known[speaker] == KNAVE:
            meaning = NEGATED[meaning]
        if rng.random() < error:
            meaning = NEGATED[meaning]
        words += [subject, relation, other, meaning]
        if relation != "is":
            words.append(other + known[other])
        value = _derived(meaning, known.get(other))
        words.append(subject + value)
        if subject in known:
            outcome = "ok" if value == known[subject] else "no"
            words += [subject + known[subject], outcome]
            return outcome
        known[subject] = value
        speaker = subject
    return None


def _derived(meaning: str, other: str | None) -> str:
    """The value of the subject of a statement with this meaning; ``other`` is that of the islander compared with."""
    if meaning in ("knight", "knave"):
        return KNIGHT if meaning == "knight" else KNAVE
    return KNIGHT if (meaning == "same") == (other == KNIGHT) else KNAVE
