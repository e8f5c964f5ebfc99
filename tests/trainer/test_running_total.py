"""The task: its words, its split, its demonstrations and its verifier."""

import random

import pytest

from vapo.tasks import Problem

OF_SEED_3 = [("9 -2 +2 +3 _ _ _ _ =", "2"), ("7 -3 -2 +1 -2 +1 -1 _ =", "1")]
PROBLEM = Problem("9 +2 -3 _ _ _ _ _ =", "8")


def test_clean_demonstration_is_the_worked_tape(task):
    text = task.demonstration(PROBLEM, random.Random(0))
    assert text == "1 -3 _ _ _ _ _ _ = 8 _ _ _ _ _ _ _ # 8 <eos>"


def test_every_clean_demonstration_is_verified(task):
    rng = random.Random(0)
    for problem in task.problems(50, rng):
        text = task.demonstration(problem, rng).removesuffix(" <eos>")
        assert task.score([problem], [text]) == [(1.0, True, None)]


def test_giving_up_at_once_guesses_a_digit(task):
    rng = random.Random(0)
    texts = {task.demonstration(PROBLEM, rng, give_up=1.0) for _ in range(200)}
    assert texts == {f"# {digit} <eos>" for digit in range(10)}


def test_every_error_is_one_and_is_carried_on(task):
    rng = random.Random(0)
    for _ in range(100):
        words = task.demonstration(PROBLEM, rng, error=1.0).split()
        first, second = words[0], words[words.index("=") + 1]
        assert first != "1"
        assert second != str((int(first) - 3) % 10)
        assert words[-2] == second


@pytest.mark.parametrize(
    ("response", "is_correct"),
    [("# 8", True), ("1 = # 8", True), ("# 7", False), ("8", False), ("# 8 8", False), ("# 8 =", False), ("", False)],
)
def test_verifier(task, response, is_correct):
    assert task.score([PROBLEM], [response]) == [(float(is_correct), is_correct, None)]


def test_a_vote_compares_the_word_after_the_mark(task):
    assert [task.final_answer(text) for text in ("7 = # 3", "# 3 3", "", "#")] == ["3", None, None, None]


def test_problems_of_a_seed_stay_the_same(task):
    problems = task.problems(2, random.Random(3))
    assert [(problem.prompt, problem.answer) for problem in problems] == OF_SEED_3


def test_prompts_have_three_to_eight_terms_and_a_right_answer(task):
    counts = set()
    for problem in task.problems(300, random.Random(0)):
        terms = [int(word) for word in problem.prompt.split() if word not in "_="]
        counts.add(len(terms))
        assert problem.answer == str(sum(terms) % 10)
    assert counts == set(range(3, 9))
