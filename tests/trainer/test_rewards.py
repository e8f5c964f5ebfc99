"""Rewards sit on the last sampled token; the verifier's result is kept apart from them."""

import math

import pytest
import torch

from vapo.rollout.rewards import terminal_rewards, verify
from vapo.tasks import Problem, Verdict


@pytest.mark.parametrize(
    ("scores", "mask", "cu_seqlens", "expected"),
    [
        ([True, False, True], [1, 1, 1, 1, 1, 1], [0, 1, 3, 6], [1, 0, 0, 0, 0, 1]),
        # A hole, an end that was not sampled, an empty sequence, one without a sampled token, a NaN for it.
        ([1.5, 2.0, 3.0, math.nan], [1, 0, 1, 0, 0, 1, 0], [0, 4, 4, 6, 7], [0, 0, 1.5, 0, 0, 3, 0]),
        ([1.0, 2.0, 3.0], [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 1.0, 1.0]], None, [[0, 1, 0], [0] * 3, [0, 0, 3]]),
        ([], [], [0], []),
    ],
)
def test_reward_is_on_the_last_sampled_token(scores, mask, cu_seqlens, expected):
    rewards = terminal_rewards(
        torch.tensor(scores), torch.tensor(mask), None if cu_seqlens is None else torch.tensor(cu_seqlens)
    )
    assert rewards.tolist() == expected
    assert rewards.dtype == torch.float32


class Echo:
    """Scores a response by what it says, and keeps what it was asked."""

    def score(self, problems, responses):
        self.asked = list(zip([problem.answer for problem in problems], responses, strict=True))
        results = {"half": Verdict(0.5, False), "fine": Verdict(2.0, True), "broken": Verdict(7.0, True, "Traceback")}
        return [results[response] for response in responses]


def test_truncated_response_is_wrong_even_if_it_ends_in_the_answer(task):
    problems = [Problem("", "4")] * 3
    scores, is_correct, errors = verify(task, problems, ["# 4", "# 4", "# 5"], torch.tensor([False, True, False]))
    assert scores.tolist() == [1, 0, 0]
    assert is_correct.tolist() == [True, False, False]
    assert errors == []


def test_scores_and_correctness_are_the_verifiers_own_and_an_error_is_worth_nothing():
    task, problems = Echo(), [Problem("", answer) for answer in "abcd"]
    responses = ["half", "broken", "fine", "fine"]
    scores, is_correct, errors = verify(task, problems, responses, torch.tensor([False, False, False, True]))
    assert scores.tolist() == [0.5, 0, 2, 0]
    assert scores.dtype == torch.float32
    assert is_correct.tolist() == [False, False, True, False]
    assert errors == ["Traceback"]
    assert task.asked == [("a", "half"), ("b", "broken"), ("c", "fine")]


@pytest.mark.parametrize("score", [1e39, -1e39, float("inf"), float("nan")])
def test_a_score_that_no_float32_holds_is_an_error_of_its_row(score):
    class Large:
        def score(self, problems, responses):
            return [Verdict(score, True), Verdict(3e38, True)]

    scores, is_correct, errors = verify(Large(), [Problem("", "")] * 2, ["a", "b"], torch.zeros(2, dtype=torch.bool))
    assert scores.tolist() == [0, pytest.approx(3e38)]
    assert is_correct.tolist() == [False, True]
    assert errors == [f"a score must be a finite float32; got {score}"]


def test_rejects_bad_input(task):
    ones = torch.ones(2)
    with pytest.raises(ValueError, match=r"scores must be \[S\] and cu_seqlens \[S\+1\]; got \(2,\) and \(2,\)"):
        terminal_rewards(ones, ones, torch.tensor([0, 2]))
    with pytest.raises(ValueError, match=r"mask must be \[N\] with cu_seqlens or \[S, T\] without; got \(2,\)"):
        terminal_rewards(ones, ones)
    with pytest.raises(ValueError, match="must have the same length; got 1, 2 and 1"):
        verify(task, [Problem("", "4")], ["", ""], torch.tensor([False]))
