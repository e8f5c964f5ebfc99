"""Problems and verifiers of reasoning-gym: the split, the answer in the response, correct only at score 1."""

import random

import pytest

from vapo.tasks import load_task
from vapo.tasks.reasoning_gym import INSTRUCTION, final_answer, islanders_right


@pytest.fixture(scope="module")
def islands():
    return load_task("reasoning-gym:knights_knaves")


@pytest.fixture(scope="module")
def credit():
    return load_task("reasoning-gym:knights_knaves", reward="per-islander")


@pytest.fixture(scope="module")
def ladders():
    return load_task("reasoning-gym:spell_backward")


def test_a_problem_is_a_question_to_a_chat_model(islands):
    (problem,) = islands.problems(1, random.Random(0))
    (message,) = problem.prompt
    assert message == {"role": "user", "content": f"{problem.row['question']}\n\n{INSTRUCTION}"}
    assert problem.data_source == "knights_knaves"
    assert problem.answer == problem.row["answer"]
    assert islands.score([problem], [f"So <answer>{problem.answer}</answer>"]) == [(1.0, True, None)]


def test_knights_and_knaves_all_right_or_by_the_islander(islands, credit):
    (problem,) = islands.problems(1, random.Random(0))
    roles = problem.row["metadata"]["knight_knave_terms"]
    names, solution = problem.row["metadata"]["names"], problem.row["metadata"]["solution"]

    def answer(*is_right):
        said = [
            f"{name} is {roles['a_knight' if knight == right else 'a_knave']}"
            for name, knight, right in zip(names, solution, is_right, strict=True)
        ]
        return f"<answer>{', and '.join(said)}.</answer>"

    responses = [answer(True, True), answer(True, False), answer(False, False), "", "<answer>no</answer>"]
    all_right = [(1.0, True, None)] + [(0.0, False, None)] * 4
    assert islands.score([problem] * 5, responses) == all_right
    per_islander = [(1.0, True, None), (0.5, False, None)] + [(0.0, False, None)] * 3
    assert credit.score([problem] * 5, responses) == per_islander


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        ("Jack is a knight and Noah is a knave", 1.0),
        ("noah is a KNAVE, jack is a knight", 1.0),
        ("Jack is a knight", 0.5),
        ("Jack is a knight, Jack is a knave, Noah is a knave", 0.5),
        ("Jack is a knave and Noah is a knight", 0.0),
        ("", 0.0),
    ],
)
def test_share_of_islanders(answer, share):
    assert islanders_right(answer, "Jack is a knight, and Noah is a knave.") == share


def test_a_partial_score_is_a_reward_but_not_correct(ladders):
    (problem,) = ladders.problems(1, random.Random(0))
    wrong = problem.answer[:-1]
    right, partial = ladders.score([problem] * 2, [problem.answer, wrong])
    assert right == (1.0, True, None)
    assert 0 < partial.score < 1
    assert not partial.is_correct


def test_datasets_that_depend_on_their_size_are_sampled_too():
    task = load_task("reasoning-gym:gsm_symbolic")
    problems = task.problems(4, random.Random(0))
    assert len({str(problem.prompt) for problem in problems}) == 4
    verdicts = task.score(problems, [f"<answer>{problem.answer}</answer>" for problem in problems])
    assert verdicts == [(1.0, True, None)] * 4


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<answer>7</answer>", "7"),
        ("<answer>6</answer> or <answer>\n 7\n</answer>.", "7"),
        ("First\n\n 7 \n\n", "7"),
        ("<answer>7", "<answer>7"),
        ("<answer></answer>", ""),
        ("", None),
        ("\n", None),
    ],
)
def test_final_answer(response, answer):
    assert final_answer(response) == answer


def test_another_reward_may_be_given(tmp_path):
    (tmp_path / "mine.py").write_text("def f(completions, metadata, **_): return [len(m['names']) for m in metadata]")
    task = load_task("reasoning-gym:knights_knaves", reward=f"{tmp_path}/mine.py:f")
    assert task.score(task.problems(1, random.Random(0)), ["x"]) == [(2.0, True, None)]
    task = load_task("reasoning-gym:chain_sum", reward="math")
    (problem,) = task.problems(1, random.Random(0))
    assert task.score([problem], [f"That is \\boxed{{{problem.answer}}}"]) == [(1.0, True, None)]
