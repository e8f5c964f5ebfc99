"""Rewards sit on the last sampled token; the verifier's result is kept apart from them."""

import pytest
import torch

from vapo.rollout.rewards import terminal_rewards, verify
from vapo.tasks import Problem, Verdict


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_reward_is_on_the_last_sampled_token_of_its_response(dtype):
    # Responses of 1, 2, 3, 0 and 2 tokens; of the last two none is sampled.
    mask, bounds = torch.tensor([1, 1, 1, 1, 1, 0, 0, 0]).to(dtype), torch.tensor([0, 1, 3, 6, 6, 8])
    rewards = terminal_rewards(torch.tensor([3.0, 0.0, 2.0, 7.0, 9.0]), mask, bounds)
    assert rewards.tolist() == [3, 0, 0, 0, 2, 0, 0, 0]
    assert rewards.dtype == torch.float32
    assert terminal_rewards(torch.tensor([True, False]), torch.ones(3), torch.tensor([0, 1, 3])).tolist() == [1, 0, 0]
    rows = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).to(dtype)
    assert terminal_rewards(torch.tensor([1.0, 2.0, 3.0]), rows).tolist() == [[0, 0, 1, 0], [0] * 4, [0, 0, 0, 3]]


class Echo:
    """Scores a response by what it says, and keeps what it was asked."""

    def score(self, problems, responses):
        self.asked = list(zip([problem.answer for problem in problems], responses, strict=True))
        verdicts = {"half": Verdict(0.5, False), "fine": Verdict(2.0, True), "broken": Verdict(7.0, True, "Traceback")}
        return [verdicts[response] for response in responses]


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
    bounds = torch.tensor([0, 2])
    for arguments, expected in (
        ((torch.ones(2), torch.ones(2), bounds), r"scores must be [S] and cu_seqlens [S+1]; got (2,) and (2,)"),
        ((torch.ones(1), torch.ones(2)), "mask must be [N] with cu_seqlens or [S, T] without; got (2,)"),
        ((torch.ones(1), torch.ones(1, 2), bounds), "mask must be [N] with cu_seqlens or [S, T] without; got (1, 2)"),
    ):
        with pytest.raises(ValueError) as error:
            terminal_rewards(*arguments)
        assert str(error.value) == expected
    with pytest.raises(ValueError, match="must have the same length; got 1, 2 and 1"):
        verify(task, [Problem("", "4")], ["", ""], torch.tensor([False]))
