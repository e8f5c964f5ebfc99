"""The reward math: where the answer stands in a response, and when two answers are the same."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from vapo.tasks import Problem
from vapo.tasks.math import final_answer, math_verifier, reference_answer, score


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{4}", "4"),
        (r"\boxed{3} then \boxed{\frac{1}{2}} = 0.5", r"\frac{1}{2}"),
        (r"\boxed{ \{1, 2\} }", r"\{1, 2\}"),
        (r"\boxed{4", "4"),
        ("It costs $1,234.50.", "1234.50"),
        ("Between 3 and -7", "-7"),
        ("10-3", "3"),
        ("a ratio of 3/4.", "3/4"),
        ("about .5", ".5"),
        ("1, 2, 3.", "3"),
        ("x2 = 12,", "12"),
        ("none", None),
        ("", None),
    ],
)
def test_final_answer_is_boxed_or_else_the_last_number(response, answer):
    assert final_answer(response) == answer


@pytest.mark.parametrize(
    ("column", "answer"),
    [("7 * 6 = 42\n#### 42", "42"), (r"We get \boxed{42}.", "42"), (r"\frac{1}{2}", r"\frac{1}{2}")],
)
def test_the_answer_of_a_row_may_be_a_solution(column, answer):
    assert reference_answer(column) == answer


@pytest.mark.parametrize(
    ("answer", "response", "is_correct"),
    [
        ("42", r"\boxed{42}", True),
        ("42", "It is 42.0 in all", True),
        ("42", "It is 42, not 41", False),
        (r"\frac{1}{2}", r"\boxed{0.5}", True),
        ("1/2", r"\boxed{\frac{2}{4}}", True),
        ("1000", "1,000 apples", True),
        ("2x + 2", r"\boxed{2(x+1)}", True),
        ("2x + 2", r"\boxed{2x}", False),
        ("(1, 2)", r"\boxed{(2, 1)}", False),
        ("Paris", r"\boxed{Paris}", True),
        ("42", "no answer", False),
        ("42", "", False),
        ("42", r"\boxed{\frac{}{}{{}}", False),
    ],
)
def test_answers_are_compared_as_mathematics(answer, response, is_correct):
    assert score([Problem("", answer)], [response]) == [(float(is_correct), is_correct, None)]


def test_verifies_outside_of_the_main_thread():
    with ThreadPoolExecutor(1) as threads:
        verify = threads.submit(math_verifier().score, [Problem("", "1/2")], [r"\boxed{0.5}"])
    assert verify.result() == [(1.0, True, None)]
