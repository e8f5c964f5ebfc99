"""Knights and knaves: the language, the puzzles, the demonstrations and the verifier."""

import random
from collections import Counter
from itertools import product

import pytest

from vapo.tasks import Problem
from vapo.tasks.knights_knaves import KnightsKnaves

PROBLEM = Problem("B: A is knave . C: D is knight . A: C same B . D: A is knave . ?", "B- C- A+ D-", "4 islanders")
WORKED = (
    "if B+ A is knave knave A- C same B diff B+ C- D is knight knave D- A is knave knight A+ A- no if B-"
    " A is knave knight A+ C same B same B- C- D is knight knave D- A is knave knight A+ A+ ok so B- C- A+ D- <eos>"
)


@pytest.fixture(scope="module")
def islands():
    return KnightsKnaves()


def worlds(prompt):
    """Every assignment that the sentences allow, found from the prompt's text alone."""
    sentences = [sentence.split() for sentence in prompt.removesuffix(" ?").removesuffix(" .").split(" . ")]
    names = [sentence[0][0] for sentence in sentences]
    for knights in product((True, False), repeat=len(names)):
        is_knight = dict(zip(names, knights, strict=True))
        said = [
            is_knight[subject] == {"knight": True, "knave": False}[other]
            if relation == "is"
            else (is_knight[subject] == is_knight[other]) == (relation == "same")
            for _, subject, relation, other in sentences
        ]
        if said == list(knights):
            yield " ".join(name + ("+" if is_knight[name] else "-") for name in names)


def test_clean_demonstration_is_the_worked_one(islands):
    assert islands.demonstration(PROBLEM, random.Random(0)) == WORKED
    assert len(WORKED.split()) == 56


def test_every_puzzle_has_one_solution_which_is_the_answer(islands):
    problems = islands.problems(500, random.Random(0))
    for problem in problems:
        assert list(worlds(problem.prompt)) == [problem.answer]
        assert problem.data_source == f"{len(problem.answer.split())} islanders"
    sizes = Counter(problem.data_source for problem in problems)
    assert sizes.keys() == {"3 islanders", "4 islanders"}
    assert 200 < sizes["3 islanders"] < 300
    assert {problem.prompt[0] for problem in problems} == set("ABCD")


def test_clean_demonstrations_are_right_and_as_long_as_their_branches(islands):
    rng, lengths = random.Random(0), {}
    for problem in islands.problems(500, rng):
        text = islands.demonstration(problem, rng)
        assert islands.score([problem], [text.removesuffix(" <eos>")]) == [(1.0, True, None)]
        words = text.split()
        lengths.setdefault((problem.data_source, words.count("if")), set()).add(len(words))
    bounds = {key: (min(of), max(of)) for key, of in lengths.items()}
    assert bounds == {
        ("3 islanders", 1): (25, 27),
        ("3 islanders", 2): (45, 49),
        ("4 islanders", 1): (31, 34),
        ("4 islanders", 2): (56, 62),
    }


def test_giving_up_at_once_guesses_whom_it_does_not_know(islands):
    rng = random.Random(0)
    texts = {islands.demonstration(PROBLEM, rng, give_up=1.0) for _ in range(200)}
    assert texts == {f"if B+ so B+ C{c} A{a} D{d} <eos>" for c, a, d in product("+-", repeat=3)}


def test_every_error_is_shown_and_carried_on(islands):
    words = islands.demonstration(PROBLEM, random.Random(0), error=1.0).split()
    assert words[:14] == ["if", "B+", "A", "is", "knave", "knight", "A+", "C", "same", "B", "diff", "B+", "C-", "D"]


def test_noisy_demonstrations_are_right_about_a_third_of_the_time(islands):
    rng = random.Random(0)
    problems = islands.problems(1000, rng)
    texts = [islands.demonstration(problem, rng, give_up=0.3, error=0.05) for problem in problems]
    right = sum(verdict.is_correct for verdict in islands.score(problems, [text[: -len(" <eos>")] for text in texts]))
    assert 280 < right < 400


@pytest.mark.parametrize(
    ("response", "all_right", "per_islander"),
    [
        ("so B- C- A+ D-", 1.0, 1.0),
        ("if B- so B- C- A+ D-", 1.0, 1.0),
        ("so B- C- A+ D+", 0.0, 0.75),
        ("so B+ C+ A- D+", 0.0, 0.0),
        ("so C- B- A+ D-", 0.0, 0.5),
        ("B- C- A+ D-", 0.0, 0.0),
        ("so B- C- A+ D- D-", 0.0, 0.0),
        ("so B- C- A+", 0.0, 0.0),
        ("so so B- C- A+ D-", 1.0, 1.0),
        ("so", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_verifier(islands, response, all_right, per_islander):
    assert islands.score([PROBLEM], [response]) == [(all_right, all_right == 1, None)]
    assert KnightsKnaves("per-islander").score([PROBLEM], [response]) == [(per_islander, all_right == 1, None)]


def test_a_vote_compares_what_follows_so(islands):
    texts = ("if B+ so B+ A-", "so B+ so B-", "so", "if B+ ok", "")
    assert [islands.final_answer(text) for text in texts] == ["B+ A-", "B-", None, None, None]
