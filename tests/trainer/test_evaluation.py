"""avg@k, pass@j, maj@k and greedy accuracy: by hand, by brute force, by real sampling; then ``vapo evaluate``."""

import itertools
import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from training_runs import lines

import vapo.evaluation
from vapo.cli import main
from vapo.config import Config
from vapo.evaluation import accuracy_figures, evaluate, evaluate_model, majority_is_correct, mean_figures, pass_at
from vapo.rollout.sampling import Sampling
from vapo.tasks import Problem, Verdict
from vapo.trainer import train


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


@pytest.fixture
def problems(task):
    """Function that gives so many held-out problems, with a letter each for their data sources, if there are any."""

    def draw(count, sources=None):
        drawn = task.problems(count, random.Random(0), held_out=True)
        return [Problem(each.prompt, "", source) for each, source in zip(drawn, sources or [""] * count, strict=True)]

    return draw


@pytest.fixture
def answer(task, sampling):
    """Function that evaluates a policy; the verifier accepts "#" as the first word."""

    def evaluated(policy, problems, samples=1, *, verifier=None, seed=0, **changes):
        settings = {"samples": samples, "sampling": replace(sampling, **changes)}
        generator = torch.Generator().manual_seed(seed)
        verifier = verifier or FirstWord("#")
        return evaluate(policy, task.tokenizer, verifier, problems, generator=generator, **settings)

    return evaluated


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


def test_greedy_and_sampled_are_told_apart(one_word_policy, problems, answer):
    metrics = answer(one_word_policy, problems(40))
    assert metrics["val/accuracy_greedy"] == 1
    assert 0 < metrics["val/accuracy_sampled"] < 1
    assert "val/maj@1" not in metrics and "val/pass@1" not in metrics


def test_several_samples(one_word_policy, task, problems, answer):
    metrics = answer(one_word_policy, problems(40), 8, max_new_tokens=200)
    # "#" has e³ of the 19 + e² + e³ parts of probability after "=", where 19 words are left.
    share = torch.tensor([3.0, 2.0] + [0.0] * (len(task.tokenizer) - 2)).softmax(0)[0].item()
    assert metrics["val/accuracy_sampled"] == pytest.approx(share, abs=4 * (share * (1 - share) / 320) ** 0.5)
    assert metrics["val/pass@2"] == pytest.approx(1 - (1 - share) ** 2, abs=0.12)
    passes = [metrics[name] for name in ("val/accuracy_sampled", "val/pass@2", "val/pass@4", "val/pass@8")]
    assert passes == sorted(passes)
    assert metrics["val/maj@8"] > metrics["val/accuracy_sampled"]
    assert metrics == answer(one_word_policy, problems(40), 8, max_new_tokens=200)
    assert metrics != answer(one_word_policy, problems(40), 8, max_new_tokens=200, seed=1)


def test_what_the_limit_cuts_is_counted_and_has_no_vote(policy, task, problems, answer):
    # The likeliest token is the first, for ever: no response ends before the limit.
    logits = torch.nn.functional.one_hot(torch.tensor(0), len(task.tokenizer)) * 1e4
    policy.forward = lambda input_ids, **_: SimpleNamespace(logits=logits.expand(*input_ids.shape, -1))
    metrics = answer(policy, problems(5), 2, verifier=FirstWord(task.tokenizer.decode([0])))
    expected = {"accuracy_sampled": 0, "pass@2": 0, "maj@2": 0, "accuracy_greedy": 0, "response_length": 6}
    assert metrics == {f"val/{name}": value for name, value in expected.items()} | {"val/truncated": 1, "val/errors": 0}


def test_each_data_source_apart(one_word_policy, problems, answer):
    metrics = answer(one_word_policy, problems(6, "aabbbb"), 2)
    for name in ("accuracy_sampled", "pass@2", "maj@2", "response_length", "truncated", "accuracy_greedy"):
        mean = (2 * metrics[f"val/a/{name}"] + 4 * metrics[f"val/b/{name}"]) / 6
        assert metrics[f"val/{name}"] == pytest.approx(mean)


def test_failures_of_the_verifier_are_counted(one_word_policy, problems, answer):
    metrics = answer(one_word_policy, problems(3), 2, verifier=FirstWord("#", error="Traceback"))
    # The verifier is not shown what the limit cut.
    assert metrics["val/errors"] == pytest.approx(6 * (1 - metrics["val/truncated"]) + 3)
    assert metrics["val/accuracy_sampled"] == metrics["val/accuracy_greedy"] == 0


def test_ranks_share_the_problems(one_word_policy, problems, answer, monkeypatch):
    """Two ranks, one after the other: what each would send is put together as the gather would."""
    sent = []
    monkeypatch.setattr("vapo.evaluation.world_size", lambda: 2)

    def gather(rows):
        sent.append(rows)
        return torch.cat([*sent, rows.new_zeros(5 - sum(map(len, sent)), rows.shape[1])])

    monkeypatch.setattr("vapo.evaluation.gather_over_ranks", gather)
    for number in range(2):
        monkeypatch.setattr("vapo.evaluation.rank", lambda number=number: number)
        metrics = answer(one_word_policy, problems(5, "aabbb"))
    assert [len(rows) for rows in sent] == [3, 2]
    # Rank 0 had problems 0, 2 and 4.
    length = torch.cat([sent[0][:, 2], sent[1][:, 2]])[[0, 3, 1, 4, 2]]
    assert metrics["val/a/response_length"] == pytest.approx(length[:2].mean().item())
    assert metrics["val/b/response_length"] == pytest.approx(length[2:].mean().item())


@pytest.mark.parametrize(
    ("num_problems", "samples", "changes", "num_ranks", "message"),
    [
        (0, 1, {}, 1, "problems must be at least 1 for each of 1 ranks; got 0"),
        (1, 1, {}, 2, "problems must be at least 1 for each of 2 ranks; got 1"),
        (1, 0, {}, 1, "samples must be >= 1; got 0"),
        (1, 1, {"temperature": 0.0}, 1, r"sampling.temperature must be > 0 in evaluation; got 0\.0"),
    ],
)
def test_rejects_bad_input(policy, problems, answer, monkeypatch, num_problems, samples, changes, num_ranks, message):
    monkeypatch.setattr("vapo.evaluation.world_size", lambda: num_ranks)
    with pytest.raises(ValueError, match=message):
        answer(policy, problems(num_problems), samples, **changes)


RUN = {
    "warm_start_steps": 60,
    "warm_start_batch": 16,
    "give_up": 0.9,
    "value_pretraining": False,
    "steps": 1,
    "num_prompts": 2,
    "group_size": 2,
    "mini_batches": 1,
    "max_new_tokens": 30,
    "eval_problems": 16,
    "eval_samples": 4,
    "eval_top_p": 0.9,
    "threads": 1,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a run whose policy has learned, by its warm start, to answer at times."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(Config(**RUN), folder)
    return folder


@pytest.fixture(scope="module")
def last_evaluation(folder):
    """The held-out numbers in the last line of the run's metrics."""
    return {name: value for name, value in lines(folder)[-1].items() if name.startswith("val/")}


def test_a_runs_last_evaluation_is_said_again(folder, last_evaluation, capsys):
    assert 0 < last_evaluation["val/accuracy_sampled"] < 1
    assert evaluate_model(str(folder)) == last_evaluation
    # A model alone is told what a run says of itself.
    settings = {name: RUN[name] for name in ("eval_problems", "eval_samples", "eval_top_p", "max_new_tokens", "device")}
    assert evaluate_model(str(folder / "policy"), task="running-total", **settings) == last_evaluation
    assert main(["evaluate", str(folder)]) == 0
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert {name: float(value) for name, value in printed.items()} == pytest.approx(last_evaluation, rel=1e-3)


def test_another_seed_samples_other_responses(folder, last_evaluation):
    other = evaluate_model(str(folder), seed=1)
    assert other != last_evaluation == evaluate_model(str(folder), seed=0)
    assert other["val/accuracy_greedy"] == last_evaluation["val/accuracy_greedy"]


def test_settings_are_those_of_the_run_or_those_that_are_given(folder, monkeypatch):
    def settings_used(**given):
        seen = {}

        def record(policy, tokenizer, task, problems, *, sampling, samples, generator):
            logits = policy(input_ids=torch.tensor([[5, 9]])).logits
            names = ("max_new_tokens", "temperature", "top_p", "top_k", "engine", "batch_size")
            seen.update({name: getattr(sampling, name) for name in names}, samples=samples, dtype=logits.dtype)
            seen.update(num_problems=len(problems), attention=policy.config._attn_implementation)
            return {}

        monkeypatch.setattr(vapo.evaluation, "evaluate", record)
        evaluate_model(str(folder), **given)
        return seen

    of_the_run = settings_used()
    assert of_the_run == {
        "max_new_tokens": 30,
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": 0,
        "engine": "loop",
        "batch_size": 0,
        "samples": 4,
        "num_problems": 16,
        "attention": "sdpa",
        "dtype": torch.float32,
    }
    given = {"max_new_tokens": 9, "temperature": 0.5, "engine": "transformers", "attention": "eager"}
    renamed = {"eval_top_p": 0.7, "eval_samples": 3, "eval_problems": 5, "rollout_batch_size": 8}
    changed = {"top_p": 0.7, "samples": 3, "num_problems": 5, "batch_size": 8}
    assert settings_used(**given, **renamed) == of_the_run | given | changed
    assert settings_used(dtype="bfloat16") == of_the_run | {"dtype": torch.bfloat16}


def test_a_run_without_its_policy_is_none_yet(folder, tmp_path, capsys):
    for name in ("config.json", "metrics.jsonl"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    message = f"a run must have ended with its policy/ to be evaluated; got {tmp_path}, which has none yet"
    assert main(["evaluate", str(tmp_path)]) == 2
    assert capsys.readouterr() == ("", f"vapo: {message}\n")


@pytest.fixture
def loads(folder, tmp_path, monkeypatch):
    """Function that says which task, and which split of it, is loaded to evaluate a run with other settings."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy").symlink_to(folder / "policy")
    (tmp_path / "metrics.jsonl").write_text("")
    saved, loaded = json.loads((folder / "config.json").read_text()), []

    def load_task(name, *, reward, reward_timeout, split):
        loaded.append((name, split))
        raise ValueError("enough")

    def loads(changes, **given):
        (tmp_path / "config.json").write_text(json.dumps(saved | changes))
        monkeypatch.setattr(vapo.evaluation, "load_task", load_task)
        with pytest.raises(ValueError, match="enough"):
            evaluate_model(str(tmp_path), **given)
        return loaded.pop()

    return loads


def test_a_run_that_evaluated_on_another_task_is_evaluated_there(loads):
    changes = {"task": "train.jsonl", "eval_task": "test.jsonl"}
    assert loads(changes) == ("test.jsonl", "held-out")
    assert loads(changes, task="other.jsonl") == ("other.jsonl", "held-out")
    with pytest.raises(ValueError, match=r"did not train on; got train\.jsonl"):
        evaluate_model(".", task="train.jsonl")


def test_the_files_that_a_run_trained_on_hold_out_their_eighth_by_any_name(tmp_path, loads):
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    for name, split in (
        ("data/a.jsonl,data/b.jsonl", "eighth"),
        ("./data/a.jsonl,link/../data/b.jsonl", "eighth"),
        (f"{tmp_path}/data/a.jsonl,link/b.jsonl", "eighth"),
        ("data/a.jsonl", "held-out"),
        ("data/a.jsonl,data/c.jsonl", "held-out"),
    ):
        assert loads({"task": "data/a.jsonl,data/b.jsonl"}, task=name) == (name, split)


@pytest.mark.parametrize(
    ("place", "given", "message"),
    [
        ("policy", {}, "task must be given for a model that is no run; got none for"),
        (".", {"eval_problems": 0}, "eval_problems must be greater than 0; got 0"),
        (".", {"eval_samples": 0}, "eval_samples must be greater than 0; got 0"),
        (".", {"temperature": 0.0}, "temperature must be greater than 0; got 0.0"),
        (".", {"eval_top_p": 1.5}, r"eval_top_p must be less than or equal to 1; got 1.5"),
        (".", {"task": "chess"}, "task must be one of "),
        (".", {"device": "tpu"}, "device must be 'auto', 'cpu' or 'cuda'; got 'tpu'"),
    ],
)
def test_bad_settings_are_named(folder, place, given, message):
    with pytest.raises(ValueError, match=message):
        evaluate_model(str(folder / place), **given)
