"""Dynamic sampling on groups made by hand: which are kept, in what order, and when sampling ends."""

from dataclasses import fields, replace

import pytest
import torch

from vapo.rollout import dynamic_sampling
from vapo.rollout.collect import Collected, pack
from vapo.rollout.dynamic_sampling import informative_groups, sample_informative
from vapo.tasks import Problem
from vapo.types import Rollout

MIXED, RIGHT, WRONG = [True, False], [True, True], [False, False]


def group(number, kind, scores=(0.0, 0.0)):
    """Two responses to prompt ``number``; their tokens, lengths and texts tell which they are."""
    responses = [torch.full((number % 3 + 1,), 10 * number), torch.full((2,), 10 * number + 1)]
    rollout = pack(
        [torch.full((number % 2 + 1,), number)] * 2,
        responses,
        torch.tensor(scores),
        torch.tensor(kind),
        torch.tensor([False, number == 1]),
        2,
        torch.device("cpu"),
    )
    rollout = replace(rollout, engine_logprobs=-rollout.token_ids.float())
    texts, errors = [f"{number}a", f"{number}b"], [f"error {number}"] if number == 0 else []
    return Collected([Problem(str(number), "")], rollout, texts, errors)


class Source:
    """Deals the groups in order, ``per_round`` at a time."""

    def __init__(self, kinds, per_round):
        self.groups = [group(number, kind) for number, kind in enumerate(kinds)]
        self.per_round, self.dealt = per_round, 0

    def next_problems(self):
        start, self.dealt = self.dealt, self.dealt + self.per_round
        return [Problem(str(number), "") for number in range(start, self.dealt)]

    def collect(self, problems):
        return Collected.cat([self.groups[int(problem.prompt)] for problem in problems])

    def sample(self, num_prompts, max_rounds):
        return sample_informative(self.next_problems, self.collect, num_prompts=num_prompts, max_rounds=max_rounds)


def assert_agrees(sampled, source, expected):
    """Problems, texts and tokens all tell of the groups ``expected``, in this order."""
    expected = Collected.cat([source.groups[number] for number in expected])
    assert (sampled.problems, sampled.texts) == (expected.problems, expected.texts)
    for field in fields(Rollout):
        kept, wanted = getattr(sampled.rollout, field.name), getattr(expected.rollout, field.name)
        assert torch.equal(torch.as_tensor(kept), torch.as_tensor(wanted)), field.name
        assert getattr(kept, "dtype", None) == getattr(wanted, "dtype", None), field.name


@pytest.mark.parametrize(
    ("kinds", "per_round", "num_prompts", "max_rounds", "expected", "rounds", "informative"),
    [
        # One round is enough where all groups are informative.
        ([MIXED] * 4, 2, 2, 5, [0, 1], 1, 1.0),
        # Further rounds replace groups without a difference.
        ([RIGHT, MIXED, WRONG, MIXED, MIXED, MIXED], 2, 2, 5, [1, 3], 2, 0.5),
        # What is too much is left out in order.
        ([RIGHT, MIXED, WRONG, MIXED, MIXED, MIXED], 3, 3, 5, [1, 3, 4], 2, 4 / 6),
        # After the last round others fill the batch, in the order of sampling.
        ([RIGHT, WRONG, WRONG, MIXED, RIGHT, RIGHT], 3, 3, 2, [0, 1, 3], 2, 1 / 6),
        # One round takes what it gives.
        ([RIGHT, MIXED, WRONG], 3, 3, 1, [0, 1, 2], 1, 1 / 3),
        ([RIGHT, MIXED], 1, 1, 2, [1], 2, 0.5),
    ],
)
def test_which_groups_are_kept(kinds, per_round, num_prompts, max_rounds, expected, rounds, informative):
    source = Source(kinds, per_round)
    sampled, metrics = source.sample(num_prompts, max_rounds)
    assert metrics == {"rollout/rounds": rounds, "rollout/informative_groups": pytest.approx(informative)}
    assert source.dealt == rounds * per_round
    assert_agrees(sampled, source, expected)
    # Errors of every round are told of, also where the group is left out.
    assert sampled.errors == ["error 0"]


def test_groups_are_judged_by_the_verifiers_result_and_not_by_scores():
    differing_scores = [group(0, RIGHT, scores=(1.0, 0.2)), group(1, WRONG, scores=(0.0, 0.5))]
    equal_scores = [group(2, MIXED, scores=(1.0, 1.0)), group(3, MIXED, scores=(-1.0, -1.0))]
    rollout = Collected.cat(differing_scores + equal_scores).rollout
    assert informative_groups(rollout).tolist() == [False, False, True, True]


@pytest.mark.parametrize(("rounds_of_others", "rounds"), [(1, 1), (3, 3), (9, 4)])
def test_a_rank_that_has_its_share_waits_for_the_others(monkeypatch, rounds_of_others, rounds):
    source, asked, collected = Source([MIXED] * 8, per_round=2), [], []

    def most(missing):
        asked.append(missing)
        return max(missing, int(len(asked) <= rounds_of_others))

    def collect(problems):
        collected.append([problem.prompt for problem in problems])
        return source.collect(problems)

    monkeypatch.setattr(dynamic_sampling, "max_over_ranks", most)
    sampled, metrics = sample_informative(source.next_problems, collect, num_prompts=2, max_rounds=4)
    # It takes problems and asks as often as the others, but samples once.
    assert (metrics["rollout/rounds"], source.dealt, collected) == (rounds, 2 * rounds, [["0", "1"]])
    assert len(asked) == min(rounds + 1, 4)
    assert metrics["rollout/informative_groups"] == 1.0
    assert_agrees(sampled, source, [0, 1])


def test_select_keeps_the_order_asked_for():
    taken = Collected.cat([group(number, MIXED) for number in range(3)]).select([2, 0])
    assert taken.texts == ["2a", "2b", "0a", "0b"] and [each.prompt for each in taken.problems] == ["2", "0"]
    assert taken.rollout.token_ids.tolist() == [20, 20, 20, 21, 21, 0, 1, 1]
    assert taken.rollout.cu_seqlens.tolist() == [0, 3, 5, 6, 8]
    assert taken.rollout.prompt_ids.tolist() == [2, 2, 0, 0]
    assert taken.rollout.select(torch.tensor([], dtype=torch.long)).cu_seqlens.tolist() == [0]
