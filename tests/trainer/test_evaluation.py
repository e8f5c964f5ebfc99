"""avg@k, pass@j, maj@k and greedy accuracy: by hand, against brute force, and through real sampling."""

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from vapo.evaluation import accuracy_figures, evaluate, majority_is_correct, mean_figures, pass_at
from vapo.rollout.sampling import Sampling
from vapo.tasks import Problem, Verdict


class FirstWord:
    """A verifier that accepts one first word and takes the last word as the final answer."""

    name = "first-word"

    def __init__(self, word, error=None):
        self.word, self.error = word, error

    def score(self, problems, responses):
        right = [response.split()[:1] == [self.word] for response in responses]
        return [Verdict(float(each), each, self.error) for each in right]

    def final_answer(self, response):
        return response.split()[-1] if response.split() else None


@pytest.fixture
def sampling(task):
    return Sampling(max_new_tokens=6, stop_token_ids=(task.tokenizer.eos_token_id,))


@pytest.fixture
def one_word_policy(policy, task):
    """After "=" comes "#", the likeliest by far, then the end, whatever stands before."""
    weights = torch.zeros(len(task.tokenizer), len(task.tokenizer))
    weights[task.tokenizer.convert_tokens_to_ids("="), task.tokenizer.convert_tokens_to_ids("#")] = 3.0
    weights[:, task.tokenizer.eos_token_id] += 2.0
    policy.forward = lambda input_ids, **_: SimpleNamespace(logits=weights[input_ids])
    return policy


def run(policy, task, verifier, problems, sampling, samples=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return evaluate(policy, task.tokenizer, verifier, problems, sampling=sampling, samples=samples, generator=generator)


def test_pass_at_equals_the_share_of_all_draws_with_a_correct_one():
    for num_samples in range(1, 8):
        for num_correct, draws in itertools.product(range(num_samples + 1), range(1, num_samples + 1)):
            verdicts = [True] * num_correct + [False] * (num_samples - num_correct)
            all_draws = list(itertools.combinations(verdicts, draws))
            assert pass_at(draws, num_samples, num_correct) == pytest.approx(sum(map(any, all_draws)) / len(all_draws))


def test_pass_at_is_unbiased():
    # The mean over all 2^5 outcomes of five samples, each correct with probability 0.3, is 1 − 0.7³ for three draws.
    outcomes = list(itertools.product((True, False), repeat=5))
    weights = [0.3 ** sum(outcome) * 0.7 ** (5 - sum(outcome)) for outcome in outcomes]
    mean = sum(weight * pass_at(3, 5, sum(outcome)) for weight, outcome in zip(weights, outcomes, strict=True))
    assert mean == pytest.approx(1 - 0.7**3)


def test_pass_at_of_many_samples_keeps_its_accuracy():
    assert pass_at(1, 4096, 1) == pytest.approx(1 / 4096, rel=1e-9)
    assert pass_at(2048, 4096, 1) == pytest.approx(0.5, rel=1e-12)


@pytest.mark.parametrize(
    ("num_samples", "names"),
    [
        (1, []),
        (2, ["pass@2", "maj@2"]),
        (3, ["pass@2", "pass@3", "maj@3"]),
        (6, ["pass@2", "pass@4", "pass@6", "maj@6"]),
        (8, ["pass@2", "pass@4", "pass@8", "maj@8"]),
    ],
)
def test_which_figures_k_samples_give(num_samples, names):
    figures = accuracy_figures([True] * num_samples, ["7"] * num_samples)
    assert figures == {"accuracy_sampled": 1.0} | dict.fromkeys(names, 1.0)


def test_figures_of_one_problem_by_hand():
    # One of four is correct: pass@2 = 1 − 3/6. "3" has two votes.
    figures = accuracy_figures([False, True, False, False], ["3", "7", "3", None])
    assert figures == {"accuracy_sampled": 0.25, "pass@2": 0.5, "pass@4": 1.0, "maj@4": 0.0}


@pytest.mark.parametrize(
    ("answers", "correct", "expected"),
    [
        (["7", "3", "7"], "7", True),
        (["7", "3", "3"], "7", False),
        (["7", "3"], "7", True),
        (["3", "7"], "7", False),
        (["3", "7", "7", "3", "9"], "7", False),
        ([None, None, None, "7"], "7", True),
        ([None, None], "7", False),
    ],
)
def test_the_majority_answers(answers, correct, expected):
    assert majority_is_correct([answer == correct for answer in answers], answers) is expected


def test_means_by_data_source():
    rows = torch.tensor([[1.0, 4.0], [0.0, 8.0], [0.0, 3.0]], dtype=torch.float64)
    names = ["accuracy_sampled", "response_length"]
    whole = {"val/accuracy_sampled": 1 / 3, "val/response_length": 5.0}
    assert mean_figures(names, rows, ["gsm8k"] * 3) == pytest.approx(whole)
    assert mean_figures(names, rows, [""] * 3) == pytest.approx(whole)
    assert mean_figures(names, rows, ["openai/gsm8k", "openai/gsm8k", ""]) == pytest.approx(
        whole
        | {"val/openai/gsm8k/accuracy_sampled": 0.5, "val/openai/gsm8k/response_length": 6.0}
        | {"val/unnamed/accuracy_sampled": 0.0, "val/unnamed/response_length": 3.0}
    )


def test_greedy_and_sampled_are_told_apart(one_word_policy, task, sampling):
    problems = task.problems(40, random.Random(0), held_out=True)
    metrics = run(one_word_policy, task, FirstWord("#"), problems, sampling)
    assert metrics["val/accuracy_greedy"] == 1
    assert 0 < metrics["val/accuracy_sampled"] < 1
    assert "val/maj@1" not in metrics and "val/pass@1" not in metrics


def test_several_samples(one_word_policy, task, sampling):
    problems = task.problems(40, random.Random(0), held_out=True)
    sampling = replace(sampling, max_new_tokens=200)
    metrics = run(one_word_policy, task, FirstWord("#"), problems, sampling, samples=8)
    # "#" has e³ of the 19 + e² + e³ parts of probability after "=", where 19 words are left.
    share = torch.tensor([3.0, 2.0] + [0.0] * (len(task.tokenizer) - 2)).softmax(0)[0].item()
    assert metrics["val/accuracy_sampled"] == pytest.approx(share, abs=4 * (share * (1 - share) / 320) ** 0.5)
    assert metrics["val/pass@2"] == pytest.approx(1 - (1 - share) ** 2, abs=0.12)
    passes = [metrics[name] for name in ("val/accuracy_sampled", "val/pass@2", "val/pass@4", "val/pass@8")]
    assert passes == sorted(passes)
    assert metrics["val/maj@8"] > metrics["val/accuracy_sampled"]
    assert metrics == run(one_word_policy, task, FirstWord("#"), problems, sampling, samples=8)
    assert metrics != run(one_word_policy, task, FirstWord("#"), problems, sampling, samples=8, seed=1)


def test_what_the_limit_cuts_is_counted_and_has_no_vote(policy, task, sampling):
    problems = task.problems(5, random.Random(0), held_out=True)
    # The likeliest token is the first, for ever: no response ends before the limit.
    logits = torch.nn.functional.one_hot(torch.tensor(0), len(task.tokenizer)) * 1e4
    policy.forward = lambda input_ids, **_: SimpleNamespace(logits=logits.expand(*input_ids.shape, -1))
    word = task.tokenizer.decode([0])
    metrics = run(policy, task, FirstWord(word), problems, sampling, samples=2)
    expected = {"accuracy_sampled": 0, "pass@2": 0, "maj@2": 0, "accuracy_greedy": 0, "response_length": 6}
    assert metrics == {f"val/{name}": value for name, value in expected.items()} | {"val/truncated": 1, "val/errors": 0}


def test_each_data_source_apart(one_word_policy, task, sampling):
    texts = [problem.prompt for problem in task.problems(6, random.Random(0), held_out=True)]
    problems = [Problem(text, "", source) for text, source in zip(texts, "aabbbb", strict=True)]
    metrics = run(one_word_policy, task, FirstWord("#"), problems, sampling, samples=2)
    for name in ("accuracy_sampled", "pass@2", "maj@2", "response_length", "truncated", "accuracy_greedy"):
        mean = (2 * metrics[f"val/a/{name}"] + 4 * metrics[f"val/b/{name}"]) / 6
        assert metrics[f"val/{name}"] == pytest.approx(mean)


def test_failures_of_the_verifier_are_counted(one_word_policy, task, sampling):
    problems = task.problems(3, random.Random(0), held_out=True)
    metrics = run(one_word_policy, task, FirstWord("#", error="Traceback"), problems, sampling, samples=2)
    # What the limit cut is not shown to the verifier.
    assert metrics["val/errors"] == pytest.approx(6 * (1 - metrics["val/truncated"]) + 3)
    assert metrics["val/accuracy_sampled"] == metrics["val/accuracy_greedy"] == 0


def test_ranks_share_the_problems(one_word_policy, task, sampling, monkeypatch):
    """Two ranks, one after the other: what each would send is put together as the gather would."""
    texts = [problem.prompt for problem in task.problems(5, random.Random(0), held_out=True)]
    problems = [Problem(text, "", source) for text, source in zip(texts, "aabbb", strict=True)]
    verifier = FirstWord("#")
    sent = []
    monkeypatch.setattr("vapo.evaluation.world_size", lambda: 2)

    def gather(rows):
        sent.append(rows)
        return torch.cat([*sent, rows.new_zeros(5 - sum(map(len, sent)), rows.shape[1])])

    monkeypatch.setattr("vapo.evaluation.gather_over_ranks", gather)
    for number in range(2):
        monkeypatch.setattr("vapo.evaluation.rank", lambda number=number: number)
        metrics = run(one_word_policy, task, verifier, problems, sampling)
    assert [len(rows) for rows in sent] == [3, 2]
    # Rank 0 had problems 0, 2 and 4.
    length = torch.cat([sent[0][:, 2], sent[1][:, 2]])[[0, 3, 1, 4, 2]]
    assert metrics["val/a/response_length"] == pytest.approx(length[:2].mean().item())
    assert metrics["val/b/response_length"] == pytest.approx(length[2:].mean().item())


def test_rejects_bad_input(policy, task, sampling, monkeypatch):
    problems = task.problems(1, random.Random(0), held_out=True)
    with pytest.raises(ValueError, match="problems must be at least 1 for each of 1 ranks; got 0"):
        run(policy, task, task, [], sampling)
    with pytest.raises(ValueError, match="samples must be >= 1; got 0"):
        run(policy, task, task, problems, sampling, samples=0)
    greedy = replace(sampling, temperature=0.0)
    with pytest.raises(ValueError, match=r"sampling.temperature must be > 0 in evaluation; got 0\.0"):
        run(policy, task, task, problems, greedy)
    monkeypatch.setattr("vapo.evaluation.world_size", lambda: 2)
    with pytest.raises(ValueError, match="for each of 2 ranks; got 1"):
        run(policy, task, task, problems, sampling)
