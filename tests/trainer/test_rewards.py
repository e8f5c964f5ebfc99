"""Rewards sit on the last sampled token; the verifier's word is kept apart from them."""

import pytest
import torch

from vapo.rewards import terminal_rewards, verify
from vapo.tasks import Problem


def test_reward_is_on_the_last_token_of_its_response():
    rewards = terminal_rewards(torch.tensor([True, False, True]), torch.tensor([0, 1, 3, 6]))
    assert rewards.tolist() == [1, 0, 0, 0, 0, 1]
    assert rewards.dtype == torch.float32


def test_unfinished_response_is_wrong_even_if_it_ends_in_the_answer(task):
    problems = [Problem("", "4")] * 3
    correct = verify(task, problems, ["# 4", "# 4", "# 5"], torch.tensor([True, False, True]))
    assert correct.tolist() == [True, False, False]


def test_rejects_bad_input(task):
    with pytest.raises(ValueError, match=r"every response must have at least 1 token; got lengths \[2, 0\]"):
        terminal_rewards(torch.ones(2), torch.tensor([0, 2, 2]))
    with pytest.raises(ValueError, match=r"scores must be \[S\] and cu_seqlens \[S\+1\]; got \(2,\) and \(2,\)"):
        terminal_rewards(torch.ones(2), torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="must have the same length; got 1, 2 and 1"):
        verify(task, [Problem("", "4")], ["", ""], torch.tensor([True]))
