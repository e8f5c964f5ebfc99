"""The task: its words, its split, its demonstrations and its verifier."""

import random

import pytest
from transformers import AutoTokenizer

from vapo.tasks import Problem
from vapo.tasks.split import is_held_out

DRAWN = [("9 -2 +2 +3 _ _ _ _ =", "2"), ("7 -3 -2 +1 -2 +1 -1 _ =", "1")]
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


def test_draws_depend_on_the_generator_alone(task):
    drawn = task.problems(2, random.Random(3))
    assert [(problem.prompt, problem.answer) for problem in drawn] == DRAWN
    assert task.state_dict() == {}


def test_split_is_disjoint_and_held_out_problems_differ(task):
    held_out = {problem.prompt for problem in task.problems(400, random.Random(0), held_out=True)}
    trained_on = {problem.prompt for problem in task.problems(2000, random.Random(0))}
    assert len(held_out) == 400
    assert not held_out & trained_on
    assert all(map(is_held_out, held_out)) and not any(map(is_held_out, trained_on))


def test_prompts_have_three_to_eight_terms_and_a_right_answer(task):
    counts = set()
    for problem in task.problems(300, random.Random(0)):
        terms = [int(word) for word in problem.prompt.split() if word not in "_="]
        counts.add(len(terms))
        assert problem.answer == str(sum(terms) % 10)
    assert counts == set(range(3, 9))


def test_tokenizer_has_a_token_for_each_word_and_survives_saving(task, tmp_path):
    assert len(task.tokenizer) == 21
    task.tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = task.demonstration(PROBLEM, random.Random(0))
    ids = task.tokenizer(text).input_ids
    assert len(ids) == len(text.split())
    assert loaded(text).input_ids == ids
    assert loaded.decode(ids) == text
    assert (loaded.eos_token, loaded.pad_token) == ("<eos>", "<pad>")


def test_rejects_bad_counts(task):
    with pytest.raises(ValueError, match=r"count must be .*; got -1"):
        task.problems(-1, random.Random(0))
    with pytest.raises(ValueError, match=r"count must be .*; got 4001"):
        task.problems(4001, random.Random(0), held_out=True)
