"""The straight line as a whole, at a size that takes seconds."""

import json
import random
from dataclasses import replace

import pytest
import torch
from families import tiny_model
from other_values import other_value
from training_runs import lines, lines_without_times, phases_and_steps, run
from transformers import AutoModelForCausalLM, AutoTokenizer
from vectors import weights

import vapo.trainer
from vapo.config import Config
from vapo.models.auto import resolve_auto
from vapo.models.checkpoint import latest_checkpoint, read_state
from vapo.models.load import load_critic, tiny_policy, value_head
from vapo.presets import PRESETS, RL_ONLY, preset
from vapo.tasks import Problem, Verdict
from vapo.tasks.running_total import RunningTotal
from vapo.trainer import HeldOut, check_shares, held_out_metrics, load_tasks, train
from vapo.types import StepReport

WARM_START = [("warm_start", 1), ("warm_start", 2)]


def pretraining(count):
    return [("value_pretraining", step + 1) for step in range(count)]


def rl(count):
    return [("vapo", step) for step in range(count + 1)]


def critic_in(folder):
    return load_critic(folder, attention="sdpa", gradient_checkpointing=False)


@pytest.fixture
def verifier(monkeypatch):
    """Function that replaces the verifier by one that gives the verdict ``judge(response)``."""

    def replace_by(judge):
        monkeypatch.setattr(RunningTotal, "score", lambda _, problems, texts: [judge(text) for text in texts])

    return replace_by


@pytest.fixture(scope="module")
def small_run(small_config, tmp_path_factory):
    """A run with nothing special."""
    return run(small_config, tmp_path_factory.mktemp("runs") / "small")


@pytest.fixture(scope="module")
def other_run(small_config, task, tmp_path_factory):
    """A run in bfloat16 of a model whose logits are capped; α keeps λ_policy near 1."""
    folder = tmp_path_factory.mktemp("runs")
    tiny_model("gemma2").save_pretrained(folder / "model")
    task.tokenizer.save_pretrained(folder / "model")
    model = {"model": str(folder / "model"), "attention": "eager", "dtype": "bfloat16", "warm_start_steps": 0}
    return run(replace(small_config, **model, alpha=1e6, steps=5, eval_every=2), folder / "run")


@pytest.fixture(scope="module")
def critic_run(small_config, tmp_path_factory):
    """A run that ends with value pretraining, in which there was something to learn."""
    config = replace(small_config, pretraining_prompts=16, critic_lr=1e-3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunningTotal, "score", lambda _, problems, texts: [Verdict(1.0, True) for _ in texts])
        return run(config, tmp_path_factory.mktemp("runs") / "critic", last_phase="value_pretraining")


def test_a_run_leaves_its_record_and_its_models(small_run, small_config, task):
    folder, last = small_run.folder, lines(small_run.folder)[-1]
    assert phases_and_steps(folder) == WARM_START + pretraining(1) + rl(2)
    assert small_run.after and {name: last[name] for name in small_run.after} == small_run.after
    # What the machine decided is written down.
    assert Config.from_json(folder / "config.json") == resolve_auto(small_config, torch.device("cpu"))[0]
    samples = lines(folder, "samples.jsonl")
    assert len(samples) == 2 * 4
    assert {"prompt", "response", "reward", "is_correct", "advantage_min", "advantage_max"} <= samples[0].keys()
    assert (folder / "curves.png").stat().st_size > 0
    assert any((folder / "checkpoints").iterdir())
    policy = AutoModelForCausalLM.from_pretrained(folder / "policy")
    assert policy.num_parameters() == tiny_policy(task.tokenizer, 0).num_parameters()
    assert len(AutoTokenizer.from_pretrained(folder / "policy")) == len(task.tokenizer)
    assert value_head(critic_in(folder / "critic")).weight.shape == (1, 96)


def test_same_seed_same_metrics_and_another_seed_others(small_run, small_config, tmp_path):
    expected = lines_without_times(small_run.folder)
    for seed, is_same in ((0, True), (1, False)):
        torch.rand(seed + 1)  # the global generator plays no part
        folder = tmp_path / f"{seed}"
        train(replace(small_config, seed=seed), folder)
        assert (lines_without_times(folder) == expected) == is_same


def test_a_run_in_bfloat16_trains_float32_parameters(other_run):
    policy = AutoModelForCausalLM.from_pretrained(other_run.folder / "policy", dtype="auto")
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    assert not torch.distributed.is_initialized()


def test_evaluations_are_every_so_many_steps_and_at_both_ends(other_run):
    evaluated = [line["step"] for line in lines(other_run.folder) if "val/accuracy_sampled" in line]
    assert evaluated == [0, 2, 4, 5]
    assert phases_and_steps(other_run.folder) == pretraining(1) + rl(5)


def test_notes_are_printed_once_where_they_hold(small_run, other_run):
    # However many batches or micro-batches they hold for.
    small_lambda = "mean λ_policy of a batch fell below 0.5"
    not_plain = "the policy's head is more than a matrix: its loss goes through whole logits"
    counts = [[each.printed.count(note) for note in (small_lambda, not_plain)] for each in (small_run, other_run)]
    assert counts == [[1, 0], [0, 1]]


@pytest.mark.parametrize(
    ("name", "changes", "phases"),
    [
        *((name, {}, WARM_START + pretraining(name in ("vapo", "vc_ppo")) + rl(1)) for name in PRESETS),
        ("vapo", {"value_pretraining": False}, WARM_START + rl(1)),
        ("vapo", {"advantage_estimator": "group"}, WARM_START + rl(1)),
        ("vapo", {"warm_start_steps": 0}, pretraining(1) + rl(1)),
        ("vapo", {"steps": 0}, WARM_START + pretraining(1) + rl(0)),
    ],
)
def test_every_preset_runs_and_a_phase_that_is_switched_off_is_left_out(
    name, changes, phases, small_settings, tmp_path
):
    pretrains = ("value_pretraining", 1) in phases
    if changes:
        config = Config(**small_settings | {"steps": 1} | changes)
    else:
        # A preset refuses what has no effect in it.
        given = {field: value for field, value in small_settings.items() if pretrains or "pretraining" not in field}
        config = preset(name, **given | {"steps": 1})
    train(config, tmp_path)
    assert phases_and_steps(tmp_path) == phases
    assert (tmp_path / "critic").exists() == config.has_critic
    assert (tmp_path / "pretrained_critic").exists() == pretrains


def test_value_pretraining_ends_the_run_with_its_critic(critic_run):
    assert phases_and_steps(critic_run.folder) == WARM_START + pretraining(1)
    # RL's steps are not waited for.
    assert critic_run.progress.total_steps == critic_run.progress.steps_done == 3
    assert value_head(critic_in(critic_run.folder / "pretrained_critic")).weight.any()


def no_step(learner, step, config):
    """Replaces a step of RL; the optimisers are fresh."""
    assert not learner.critic_optimizer.state and not learner.policy_optimizer.state
    return StepReport({})


def interrupt(*_):
    raise KeyboardInterrupt


def test_rl_starts_from_the_pretrained_critic_with_fresh_optimisers(small_config, tmp_path, monkeypatch, verifier):
    verifier(lambda text: Verdict(1.0, True))
    config = replace(small_config, pretraining_prompts=16, critic_lr=1e-3, steps=1)
    for name, is_same in (("trained", False), ("handed over", True)):
        train(config, tmp_path / name)
        before, after = (critic_in(tmp_path / name / folder) for folder in ("pretrained_critic", "critic"))
        assert value_head(before).weight.any()
        assert torch.equal(weights(before), weights(after)) == is_same
        monkeypatch.setattr(vapo.trainer, "vapo_step", no_step)


@pytest.mark.parametrize("place", [".", "pretrained_critic"])
def test_a_pretrained_critic_is_where_another_run_starts(small_config, critic_run, tmp_path, place):
    given = {"critic": str(critic_run.folder / place), "value_pretraining": False}
    # Without a step of RL the run leaves the critic as it was loaded.
    train(replace(small_config, **given, steps=0), tmp_path)
    wanted = critic_in(critic_run.folder / "pretrained_critic")
    assert torch.equal(weights(critic_in(tmp_path / "critic")), weights(wanted))


@pytest.mark.parametrize(
    ("explained", "num_rollouts"), [([0.1, 0.7, 0.9], 2), ([0.1, 0.1, 0.1, 0.7], 4), ([0.1] * 4, 4)]
)
def test_value_pretraining_stops_on_explained_variance_or_on_the_step_limit_also_for_a_resumed_run(
    small_config, tmp_path, monkeypatch, explained, num_rollouts
):
    is_over = explained[num_rollouts - 1] > 0.6
    config = replace(small_config, pretraining_steps=4, pretraining_target=0.6, checkpoint_every=3)

    def pretraining_step(learner, step, config):
        return StepReport({"critic/pretrain/vf_explained_var": explained[step - 1]})

    monkeypatch.setattr(vapo.trainer, "pretraining_step", pretraining_step)
    monkeypatch.setattr(vapo.trainer, "vapo_step", no_step)
    whole = run(config, tmp_path / "whole")
    # Steps that an early end leaves out are not waited for.
    assert whole.progress.steps_done == whole.progress.total_steps == 2 + num_rollouts + 2
    note = "value pretraining ended at its limit of 4 rollouts: explained variance 0.10, target 0.6"
    assert whole.printed.count(note) == (not is_over)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(vapo.trainer, "vapo_step", interrupt)
        train(config, tmp_path / "resumed")
    state = read_state(latest_checkpoint(tmp_path / "resumed"))
    assert (state["phase"], state["step"], state["phase_is_over"]) == ("value_pretraining", num_rollouts, is_over)
    # A further rollout would find nothing left to explain.
    train(config, tmp_path / "resumed", resume=True)
    for name in ("whole", "resumed"):
        assert phases_and_steps(tmp_path / name) == WARM_START + pretraining(num_rollouts) + rl(2)


def test_held_out_problems_are_those_of_their_own_task(small_config, tmp_path):
    for name, count in (("train", 16), ("test", 5)):
        rows = [{"prompt": f"{name} {number}", "answer": str(number)} for number in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = {"task": str(tmp_path / "train.jsonl"), "eval_task": str(tmp_path / "test.jsonl")}
    task, held_out = load_tasks(replace(small_config, **paths, eval_problems=5))
    assert task is not held_out.task
    assert sorted(problem.prompt for problem in held_out.problems) == [f"test {number}" for number in range(5)]
    # All rows of the other file train.
    trained = {problem.prompt for problem in task.problems(16, random.Random(0))}
    assert len(trained) == 16


def test_held_out_problems_of_the_same_task_are_the_same_for_every_seed(small_config):
    task, held_out = load_tasks(small_config)
    assert task is held_out.task and len(held_out.problems) == 4
    assert load_tasks(replace(small_config, seed=1))[1].problems == held_out.problems


def test_every_evaluation_meets_the_same_random_numbers(small_config, learner_of):
    config = replace(small_config, eval_problems=20)
    learner, held_out = learner_of(config), load_tasks(config)[1]
    first = held_out_metrics(learner, held_out, config)
    torch.rand(1, generator=learner.generators.sampling)
    assert held_out_metrics(learner, held_out, config) == first
    assert held_out_metrics(learner, held_out, replace(config, seed=1)) != first


def test_evaluation_samples_as_its_own_settings_say(small_config, learner_of, monkeypatch):
    config = replace(small_config, eval_top_p=0.7, top_p=0.9, top_k=3, temperature=0.8, eval_samples=2)
    seen = {}
    monkeypatch.setattr(vapo.trainer, "evaluate", lambda *_, **settings: seen.update(settings) or {})
    held_out_metrics(learner_of(config), load_tasks(config)[1], config)
    sampling = seen["sampling"]
    assert (sampling.top_p, sampling.top_k, sampling.temperature, seen["samples"]) == (0.7, 0, 0.8, 2)


def test_responses_to_held_out_problems_are_scored_by_their_own_task(small_config, learner_of):
    learner, lenient = learner_of(small_config), RunningTotal()
    lenient.score = lambda problems, responses: [Verdict(1.0, True) for _ in responses]
    learner.sampling = replace(learner.sampling, stop_token_ids=tuple(range(21)))
    held_out = HeldOut(lenient, [Problem("5 +2 =", "7")] * 3)
    assert held_out_metrics(learner, held_out, small_config)["val/accuracy_sampled"] == 1.0


def test_a_folder_must_be_new_or_with_resume_hold_a_run(small_config, tmp_path):
    with pytest.raises(ValueError, match=r"must hold a run to resume; got no config\.json there"):
        train(small_config, tmp_path, resume=True)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl"):
        train(small_config, tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"


def test_a_verifier_that_fails_is_told_of_and_does_not_end_the_run(small_config, tmp_path, task, verifier):
    verifier(lambda text: Verdict(0.0, False, "Traceback: no such column"))
    # Every token ends a response, so that the verifier sees it.
    stop = tuple(word for word in task.tokenizer.get_vocab() if word != "<unk>")
    printed = run(replace(small_config, stop=stop), tmp_path / "run").printed
    assert printed.count("a verifier failed; its responses get the reward 0") == 1
    assert printed.count("Traceback: no such column") == 1
    assert lines(tmp_path / "run")[-1]["reward/errors"] == 4


@pytest.mark.parametrize(
    ("changes", "num_held_out", "name", "got"),
    [
        ({"num_prompts": 2}, 4, "num_prompts", 2),
        ({"pretraining_prompts": 2}, 4, "pretraining_prompts", 2),
        ({"warm_start_batch": 2}, 4, "warm_start_batch", 2),
        ({}, 2, "the number of held-out problems", 2),
        # 3 · 2 responses are 2 mini-batches of 3, but 3 of 2.
        ({"mini_batches": 3}, 4, "num_prompts × group_size / mini_batches", 2),
        ({"pretraining_mini_batches": 2}, 4, "pretraining_prompts / pretraining_mini_batches", 1),
    ],
)
def test_a_rank_without_work_is_refused(small_config, changes, num_held_out, name, got):
    def check(count, ranks=3, **changes):
        enough = {"num_prompts": 3, "pretraining_prompts": 3, "pretraining_mini_batches": 1, "warm_start_batch": 3}
        check_shares(replace(small_config, **enough | changes), HeldOut(None, [Problem("", "")] * count), ranks)

    check(1, ranks=1, **changes)
    check(3)
    with pytest.raises(ValueError) as error:
        check(num_held_out, **changes)
    assert str(error.value) == f"{name} must be >= the number of ranks, 3; got {got}"


def test_pretraining_never_looks_at_what_only_rl_uses(small_config, tmp_path, verifier):
    # Rewards that differ, and a truncation that a length decides.
    verifier(lambda text: Verdict(len(text) % 3, False))
    config = replace(small_config, pretraining_steps=2, critic_lr=1e-2, stop=("#", "1", "2", "3", "4", "5"))
    changes = {name: other_value(config, name) for name in RL_ONLY} | {"dual_clip": 2.0}
    assert all(value != getattr(config, name) for name, value in changes.items())
    # Dynamic sampling wants groups.
    alone = {"group_sampling": changes.pop("group_sampling")}

    def pretrained(name, **changes):
        train(replace(config, **changes), tmp_path / name, last_phase="value_pretraining")
        weights = (tmp_path / name / "pretrained_critic" / "model.safetensors").read_bytes()
        return lines_without_times(tmp_path / name), weights

    expected = pretrained("run")
    assert expected[0][-1]["critic/pretrain/vf_loss"] > 0
    assert pretrained("changed", **changes) == pretrained("alone", **alone) == expected
    assert pretrained("other", gamma=0.5) != expected
