"""Dynamic sampling on groups made by hand: which are kept, in what order, and when sampling ends."""

from typing import NamedTuple

import pytest
import torch

from vapo.rollout import dynamic_sampling
from vapo.rollout.collect import Collected, pack
from vapo.rollout.dynamic_sampling import informative_groups, sample_informative
from vapo.tasks import Problem

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
    return Collected(
        [Problem(str(number), "")], rollout, [f"{number}a", f"{number}b"], [f"error {number}"] if number == 0 else []
    )


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
        return outcome(self.next_problems, self.collect, num_prompts=num_prompts, max_rounds=max_rounds)


class Outcome(NamedTuple):
    collected: Collected
    rounds: float
    informative: float


def outcome(*args, **settings):
    collected, metrics = sample_informative(*args, **settings)
    assert metrics.keys() == {"rollout/rounds", "rollout/informative_groups"}
    return Outcome(collected, *metrics.values())


def prompts(sampled):
    return [int(problem.prompt) for problem in sampled.collected.problems]


def assert_agrees(sampled, source):
    """Problems, texts and tokens all tell of the same groups, in the same order."""
    expected = Collected.cat([source.groups[number] for number in prompts(sampled)])
    assert sampled.collected.texts == expected.texts
    for field in (
        "prompt_ids",
        "prompt_cu_seqlens",
        "token_ids",
        "cu_seqlens",
        "rewards",
        "is_correct",
        "is_truncated",
    ):
        kept, wanted = getattr(sampled.collected.rollout, field), getattr(expected.rollout, field)
        assert torch.equal(kept, wanted), field
        assert kept.dtype == wanted.dtype, field
    assert sampled.collected.rollout.group_size == 2


def test_one_round_is_enough_where_all_groups_are_informative():
    source = Source([MIXED] * 4, per_round=2)
    sampled = source.sample(num_prompts=2, max_rounds=5)
    assert (prompts(sampled), sampled.rounds, sampled.informative) == ([0, 1], 1, 1.0)
    assert_agrees(sampled, source)


def test_further_rounds_take_the_place_of_groups_without_a_difference():
    source = Source([RIGHT, MIXED, WRONG, MIXED, MIXED, MIXED], per_round=2)
    sampled = source.sample(num_prompts=2, max_rounds=5)
    assert (prompts(sampled), sampled.rounds, sampled.informative) == ([1, 3], 2, 0.5)
    assert source.dealt == 4
    assert_agrees(sampled, source)


def test_what_is_too_much_is_left_out_in_order():
    source = Source([RIGHT, MIXED, WRONG, MIXED, MIXED, MIXED], per_round=3)
    sampled = source.sample(num_prompts=3, max_rounds=5)
    assert (prompts(sampled), sampled.rounds) == ([1, 3, 4], 2)
    assert sampled.informative == pytest.approx(4 / 6)
    assert_agrees(sampled, source)


def test_after_the_last_round_others_fill_the_batch_in_the_order_of_sampling():
    source = Source([RIGHT, WRONG, WRONG, MIXED, RIGHT, RIGHT], per_round=3)
    sampled = source.sample(num_prompts=3, max_rounds=2)
    # The one informative group and, for want of others, the first two.
    assert (prompts(sampled), sampled.rounds) == ([0, 1, 3], 2)
    assert sampled.informative == pytest.approx(1 / 6)
    assert_agrees(sampled, source)


def test_one_round_takes_what_it_gives():
    source = Source([RIGHT, MIXED, WRONG], per_round=3)
    sampled = source.sample(num_prompts=3, max_rounds=1)
    assert prompts(sampled) == [0, 1, 2]
    assert_agrees(sampled, source)


def test_groups_are_judged_by_the_verifiers_result_and_not_by_scores():
    differing_scores = [group(0, RIGHT, scores=(1.0, 0.2)), group(1, WRONG, scores=(0.0, 0.5))]
    equal_scores = [group(2, MIXED, scores=(1.0, 1.0)), group(3, MIXED, scores=(-1.0, -1.0))]
    rollout = Collected.cat(differing_scores + equal_scores).rollout
    assert informative_groups(rollout).tolist() == [False, False, True, True]


def test_errors_of_every_round_are_told_of():
    source = Source([RIGHT, MIXED], per_round=1)
    sampled = source.sample(num_prompts=1, max_rounds=2)
    assert prompts(sampled) == [1]
    assert sampled.collected.errors == ["error 0"]


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
    sampled = outcome(source.next_problems, collect, num_prompts=2, max_rounds=4)
    # It draws and asks as often as the others, but samples once.
    assert (sampled.rounds, source.dealt, collected) == (rounds, 2 * rounds, [["0", "1"]])
    assert len(asked) == min(rounds + 1, 4)
    assert (prompts(sampled), sampled.informative) == ([0, 1], 1.0)
    assert_agrees(sampled, source)


def test_select_keeps_the_order_asked_for():
    joined = Collected.cat([group(number, MIXED) for number in range(3)])
    taken = joined.select([2, 0])
    assert [problem.prompt for problem in taken.problems] == ["2", "0"]
    assert taken.texts == ["2a", "2b", "0a", "0b"]
    assert taken.rollout.token_ids.tolist() == [20, 20, 20, 21, 21, 0, 1, 1]
    assert taken.rollout.cu_seqlens.tolist() == [0, 3, 5, 6, 8]
    assert taken.rollout.prompt_ids.tolist() == [2, 2, 0, 0]
