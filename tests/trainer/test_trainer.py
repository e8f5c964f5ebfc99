"""The straight line as a whole, at a size that takes seconds."""

import json
import random
from dataclasses import replace

import pytest
import torch
from other_values import other_value
from transformers import AutoModelForCausalLM, AutoTokenizer

import vapo.trainer
from vapo.config import Config
from vapo.learning.learner import Learner
from vapo.models.checkpoint import latest_checkpoint, read_state
from vapo.models.load import load_critic, tiny_policy, value_head
from vapo.presets import PRESETS, RL_ONLY, preset
from vapo.record.run_log import RunLog
from vapo.tasks import Problem, Verdict
from vapo.tasks.running_total import RunningTotal
from vapo.trainer import check_shares, held_out_metrics, load_tasks, train
from vapo.types import StepReport

OPTIONS = {"attention": "sdpa", "gradient_checkpointing": False}


def read_metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def saved_config(folder):
    saved = json.loads((folder / "config.json").read_text())
    return {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}


def without_times(folder):
    lines = read_metrics(folder)
    return [{k: v for k, v in line.items() if not k.startswith(("timing_s/", "perf/"))} for line in lines]


def places(folder):
    return [(line["phase"], line["step"]) for line in read_metrics(folder)]


@pytest.fixture
def all_correct(monkeypatch):
    """Every finished response is correct, so that there is something to learn."""
    monkeypatch.setattr(RunningTotal, "score", lambda _, problems, texts: [Verdict(1.0, True) for _ in texts])


@pytest.fixture
def kept_logs(monkeypatch):
    """The logs that runs open."""
    logs = []

    class KeptLog(RunLog):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            logs.append(self)

    monkeypatch.setattr(vapo.trainer, "RunLog", KeptLog)
    return logs


def test_a_run_leaves_its_record_and_its_models(small_config, task, tmp_path):
    folder = tmp_path / "run"
    after = train(small_config, folder)
    lines = read_metrics(folder)
    assert places(folder) == [
        ("warm_start", 1),
        ("warm_start", 2),
        ("value_pretraining", 1),
        ("vapo", 0),
        ("vapo", 1),
        ("vapo", 2),
    ]
    assert {name: lines[-1][name] for name in after} == after
    assert Config(**saved_config(folder)) == small_config
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 2 * 4
    assert {"prompt", "response", "reward", "is_correct", "advantage_min", "advantage_max"} <= samples[0].keys()
    assert (folder / "curves.png").stat().st_size > 0
    assert any((folder / "checkpoints").iterdir())
    policy = AutoModelForCausalLM.from_pretrained(folder / "policy")
    assert policy.num_parameters() == tiny_policy(task.tokenizer, 0).num_parameters()
    assert len(AutoTokenizer.from_pretrained(folder / "policy")) == len(task.tokenizer)
    assert value_head(load_critic(folder / "critic", **OPTIONS)).weight.shape == (1, 96)


def test_same_seed_same_metrics_and_another_seed_others(small_config, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.rand(seed + len(name))  # the global generator plays no part
        train(replace(small_config, seed=seed), tmp_path / name)
    assert without_times(tmp_path / "a") == without_times(tmp_path / "b")
    assert without_times(tmp_path / "a") != without_times(tmp_path / "c")


def pretraining_report(explained):
    return StepReport({"critic/pretrain/vf_explained_var": explained})


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_runs_from_end_to_end(name, small_settings, tmp_path):
    unused = {"vapo": (), "vc_ppo": ()}.get(
        name, ("pretraining_steps", "pretraining_prompts", "pretraining_mini_batches")
    )
    given = {field: value for field, value in small_settings.items() if field not in unused}
    config = preset(name, **given | {"steps": 1, "warm_start_steps": 1})
    train(config, tmp_path / "run")
    assert places(tmp_path / "run")[-1] == ("vapo", 1)
    assert (tmp_path / "run" / "critic").exists() == config.has_critic
    assert (tmp_path / "run" / "pretrained_critic").exists() == (name in ("vapo", "vc_ppo"))


@pytest.mark.parametrize(
    ("changes", "phases"),
    [
        ({"value_pretraining": False}, ["warm_start", "warm_start", "vapo", "vapo"]),
        ({"advantage_estimator": "group"}, ["warm_start", "warm_start", "vapo", "vapo"]),
        ({"warm_start_steps": 0}, ["value_pretraining", "vapo", "vapo"]),
        ({"steps": 0}, ["warm_start", "warm_start", "value_pretraining", "vapo"]),
    ],
)
def test_a_phase_that_is_switched_off_is_left_out(small_config, tmp_path, changes, phases):
    config = replace(small_config, **{"steps": 1, **changes})
    train(config, tmp_path / "run")
    assert [phase for phase, _ in places(tmp_path / "run")] == phases
    assert (tmp_path / "run" / "pretrained_critic").exists() == ("value_pretraining" in phases)


def test_rl_starts_from_the_pretrained_critic_with_fresh_optimisers(small_config, tmp_path, monkeypatch, all_correct):
    begin, handed_over = Learner.begin, []

    def record(learner, phase, config):
        begin(learner, phase, config)
        if phase == "vapo":
            handed_over.append({name: weight.clone() for name, weight in learner.critic.state_dict().items()})
            assert not learner.critic_optimizer.state

    monkeypatch.setattr(Learner, "begin", record)
    train(replace(small_config, pretraining_prompts=16, critic_lr=1e-3), tmp_path / "run")
    checkpoint = load_critic(tmp_path / "run" / "pretrained_critic", **OPTIONS).state_dict()
    final = load_critic(tmp_path / "run" / "critic", **OPTIONS).state_dict()
    assert all(torch.equal(weight, handed_over[0][name]) for name, weight in checkpoint.items())
    assert checkpoint["score.weight"].any()
    assert not torch.equal(checkpoint["score.weight"], final["score.weight"])


@pytest.mark.parametrize("folder", ["critic_run", "critic_run/pretrained_critic"])
def test_a_pretrained_critic_is_where_another_run_starts(small_config, tmp_path, all_correct, monkeypatch, folder):
    config = replace(small_config, pretraining_prompts=16, critic_lr=1e-3)
    train(config, tmp_path / "critic_run", last_phase="value_pretraining")
    # The run ends with the critic; nothing of RL is there.
    assert [phase for phase, _ in places(tmp_path / "critic_run")] == ["warm_start"] * 2 + ["value_pretraining"]
    wanted = load_critic(tmp_path / "critic_run" / "pretrained_critic", **OPTIONS)
    assert value_head(wanted).weight.any()

    make_learner, starts = vapo.trainer.make_learner, []

    def record(*arguments):
        learner = make_learner(*arguments)
        starts.append(value_head(learner.critic).weight.clone())
        return learner

    monkeypatch.setattr(vapo.trainer, "make_learner", record)
    other = replace(config, critic=str(tmp_path / folder), value_pretraining=False, steps=1)
    train(other, tmp_path / "run")
    assert torch.equal(starts[0], value_head(wanted).weight)


@pytest.mark.parametrize(("explained", "num_rollouts"), [([0.1, 0.4, 0.7, 0.9], 3), ([0.1] * 4, 4)])
def test_value_pretraining_stops_on_explained_variance_or_on_the_step_limit(
    small_config, tmp_path, monkeypatch, capsys, explained, num_rollouts, kept_logs
):
    remaining = iter(explained)
    monkeypatch.setattr(vapo.trainer, "pretraining_step", lambda *_: pretraining_report(next(remaining)))
    train(replace(small_config, pretraining_steps=4, pretraining_target=0.6), tmp_path / "run")
    assert [phase for phase, _ in places(tmp_path / "run")].count("value_pretraining") == num_rollouts
    # Steps that an early end leaves out are not waited for.
    (log,) = kept_logs
    assert log.progress.steps_done == log.progress.total_steps == 2 + num_rollouts + 2
    output = " ".join(capsys.readouterr().out.split())
    told = "value pretraining ended at its limit of 4 rollouts: explained variance 0.10, target 0.6"
    assert (told in output) == (num_rollouts == 4)


@pytest.mark.parametrize("explained", [[0.1, 0.7], [0.1, 0.1, 0.1, 0.7]])
def test_a_phase_that_reached_its_target_is_over_for_a_resumed_run(small_config, tmp_path, monkeypatch, explained):
    def interrupt(*_):
        raise KeyboardInterrupt

    remaining = iter(explained)
    monkeypatch.setattr(vapo.trainer, "pretraining_step", lambda *_: pretraining_report(next(remaining)))
    config = replace(small_config, pretraining_steps=4, pretraining_target=0.6, checkpoint_every=3)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(vapo.trainer, "vapo_step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "run")
    state = read_state(latest_checkpoint(tmp_path / "run"))
    last = ("value_pretraining", len(explained), True)
    assert (state["phase"], state["step"], state["phase_is_over"]) == last
    # A further rollout would find nothing left to explain.
    train(config, tmp_path / "run", resume=True)
    expected = [("warm_start", 2), *(("value_pretraining", n + 1) for n in range(len(explained))), ("vapo", 0)]
    assert places(tmp_path / "run") == [("warm_start", 1), *expected, ("vapo", 1), ("vapo", 2)]


def test_evaluations_are_every_so_many_steps_and_at_both_ends(small_config, tmp_path):
    train(replace(small_config, steps=5, eval_every=2, warm_start_steps=0), tmp_path / "run")
    evaluated = [
        (line["phase"], line["step"]) for line in read_metrics(tmp_path / "run") if "val/accuracy_sampled" in line
    ]
    assert evaluated == [("vapo", 0), ("vapo", 2), ("vapo", 4), ("vapo", 5)]


def test_every_evaluation_meets_the_same_random_numbers(small_config, learner_of):
    config = replace(small_config, eval_problems=20)
    learner, held_out = learner_of(config), load_tasks(config)[1]
    first = held_out_metrics(learner, held_out, config)
    torch.rand(1, generator=learner.generators.sampling)
    assert held_out_metrics(learner, held_out, config) == first
    other = replace(config, seed=1)
    assert held_out_metrics(learner, held_out, other) != first
    # Problems do not depend on the seed.
    assert load_tasks(other)[1].problems == held_out.problems


def test_evaluation_has_a_top_p_of_its_own(small_config, learner_of, monkeypatch):
    config = replace(small_config, eval_top_p=0.7, top_p=0.9, top_k=3, temperature=0.8, eval_samples=2)
    seen = {}
    monkeypatch.setattr(vapo.trainer, "evaluate", lambda *_, **settings: seen.update(settings) or {})
    held_out_metrics(learner_of(config), load_tasks(config)[1], config)
    sampling = seen["sampling"]
    assert (sampling.top_p, sampling.top_k, sampling.temperature, seen["samples"]) == (0.7, 0, 0.8, 2)


def test_held_out_problems_are_scored_by_their_own_task(small_config, tmp_path):
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
    task, held_out = load_tasks(small_config)
    assert task is held_out.task and len(held_out.problems) == 4


def test_the_verifier_of_the_held_out_problems_has_its_say(small_config, learner_of):
    class Lenient(RunningTotal):
        def score(self, problems, responses):
            return [Verdict(1.0, True) for _ in responses]

    learner = learner_of(small_config)
    learner.sampling = replace(learner.sampling, stop_token_ids=tuple(range(21)))
    held_out = vapo.trainer.HeldOut(Lenient(), [Problem("5 +2 =", "7")] * 3)
    assert held_out_metrics(learner, held_out, small_config)["val/accuracy_sampled"] == 1.0


def test_a_folder_with_a_run_is_refused(small_config, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl"):
        train(small_config, tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"


def test_a_folder_without_a_run_is_not_resumed(small_config, tmp_path):
    with pytest.raises(ValueError, match=r"must hold a run to resume; got no config\.json there"):
        train(small_config, tmp_path, resume=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("alpha", "is_warned"), [(0.05, True), (1e6, False)])
def test_a_small_lambda_is_pointed_out(small_config, tmp_path, capsys, alpha, is_warned):
    train(replace(small_config, alpha=alpha), tmp_path / "run")
    output = " ".join(capsys.readouterr().out.split())
    # Once, however many batches it holds for.
    assert output.count("mean λ_policy of a batch fell below 0.5") == is_warned


def test_a_verifier_that_fails_is_told_of_and_does_not_end_the_run(small_config, tmp_path, capsys, monkeypatch):
    def failing(self, problems, responses):
        return [Verdict(0.0, False, "Traceback: no such column") for _ in responses]

    monkeypatch.setattr(RunningTotal, "score", failing)
    # Every token ends a response, so that the verifier sees it.
    stop = tuple(RunningTotal().tokenizer.get_vocab())
    train(replace(small_config, stop=tuple(word for word in stop if word != "<unk>")), tmp_path / "run")
    output = " ".join(capsys.readouterr().out.split())
    assert output.count("a verifier failed; its responses get the reward 0") == 1
    assert output.count("Traceback: no such column") == 1
    assert read_metrics(tmp_path / "run")[-1]["reward/errors"] == 4


RANKS = 3
SHARES = {
    "num_prompts": ({"num_prompts": 2}, 4),
    "pretraining_prompts": ({"pretraining_prompts": 2}, 4),
    "warm_start_batch": ({"warm_start_batch": 2}, 4),
    "the number of held-out problems": ({}, 2),
    # 3 · 2 responses are 2 mini-batches of 3, but 3 of 2.
    "num_prompts × group_size / mini_batches": ({"mini_batches": 3}, 4),
    "pretraining_prompts / pretraining_mini_batches": ({"pretraining_mini_batches": 2}, 4),
}


@pytest.mark.parametrize("name", SHARES)
def test_a_rank_without_work_is_refused(small_config, monkeypatch, name):
    enough = {"num_prompts": 3, "pretraining_prompts": 3, "pretraining_mini_batches": 1, "warm_start_batch": 3}
    config = replace(small_config, **enough)
    changes, num_held_out = SHARES[name]

    def held_out(count):
        return vapo.trainer.HeldOut(None, [Problem("", "")] * count)

    check_shares(replace(config, **changes), held_out(1))
    monkeypatch.setattr(vapo.trainer, "world_size", lambda: RANKS)
    check_shares(config, held_out(3))
    with pytest.raises(ValueError) as error:
        check_shares(replace(config, **changes), held_out(num_held_out))
    got = 1 if name == "pretraining_prompts / pretraining_mini_batches" else 2
    assert str(error.value) == f"{name} must be >= the number of ranks, 3; got {got}"


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_head_that_is_not_plain_is_told_of_once(small_config, tmp_path, monkeypatch, capsys, is_plain):
    monkeypatch.setattr("vapo.models.load._logits_are_the_heads", lambda policy, head: is_plain)
    train(small_config, tmp_path / "run")
    output = " ".join(capsys.readouterr().out.split())
    assert output.count("the policy's head is more than a matrix: its loss goes through whole logits") == (not is_plain)


def pretrained(config, folder):
    """What a run that ends with value pretraining leaves."""
    train(config, folder, last_phase="value_pretraining")
    return without_times(folder), (folder / "pretrained_critic" / "model.safetensors").read_bytes()


def test_pretraining_never_looks_at_what_only_rl_uses(small_config, tmp_path, monkeypatch):
    # Rewards that differ, and a truncation that a length decides.
    monkeypatch.setattr(RunningTotal, "score", lambda _, problems, texts: [Verdict(len(t) % 3, False) for t in texts])
    config = replace(small_config, pretraining_steps=2, critic_lr=1e-2, stop=("#", "1", "2", "3", "4", "5"))
    expected = pretrained(config, tmp_path / "run")
    assert expected[0][-1]["critic/pretrain/vf_loss"] > 0
    changes = {name: other_value(config, name) for name in RL_ONLY} | {"dual_clip": 2.0}
    assert all(value != getattr(config, name) for name, value in changes.items())
    # Dynamic sampling wants groups.
    alone = {"group_sampling": changes.pop("group_sampling")}
    assert pretrained(replace(config, **changes), tmp_path / "changed") == expected
    assert pretrained(replace(config, **alone), tmp_path / "alone") == expected
    assert pretrained(replace(config, gamma=0.5), tmp_path / "other") != expected


def test_the_progress_of_pretraining_counts_no_rl_steps(small_config, tmp_path, kept_logs):
    train(small_config, tmp_path / "run", last_phase="value_pretraining")
    (log,) = kept_logs
    assert log.progress.total_steps == log.progress.steps_done == 3


def test_bfloat16_trains_float32_parameters(small_config, tmp_path):
    train(replace(small_config, dtype="bfloat16", steps=1, warm_start_steps=0), tmp_path / "run")
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "policy", dtype="auto")
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    assert not torch.distributed.is_initialized()
