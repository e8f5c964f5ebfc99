"""One step of RL: what it samples, asks of the models, trains and reports."""

import math
import random
from dataclasses import replace

import pytest
import torch
from vectors import weights

import vapo.learning.step
from vapo.learning.samples import evenly_spread, response_records, skipped_responses
from vapo.learning.step import batch_metrics, mismatch_metrics, small_lambda_warning, timed, update_models, vapo_step
from vapo.models.load import value_head

STEP_METRICS = {
    "actor/pg_loss",
    "actor/nll_loss",
    "actor/kl",
    "actor/entropy",
    "actor/ppo_kl",
    "actor/pg_clipfrac",
    "actor/loss",
    "actor/grad_norm",
    "actor/lr",
    "actor/skipped_steps",
    "critic/score/mean",
    "critic/accuracy/mean",
    "critic/rewards/mean",
    "reward/errors",
    "response_length/mean",
    "response_length/max",
    "response_length/min",
    "response_length/clip_ratio",
    "timing_s/gen",
    "timing_s/old_log_prob",
    "timing_s/adv",
    "timing_s/update_actor",
    "timing_s/step",
    "perf/throughput",
    "rollout/logprob_diff/mean",
    "rollout/logprob_diff/max",
    "rollout/k3",
}
CRITIC_METRICS = {
    "critic/vf_loss",
    "critic/vf_clipfrac",
    "critic/vf_explained_var",
    "critic/vf_explained_var_within",
    "critic/grad_norm",
    "critic/lr",
    "critic/skipped_steps",
    "critic/lambda_policy/mean",
    "critic/lambda_policy/min",
    "critic/lambda_policy/max",
    "timing_s/values",
    "timing_s/update_critic",
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, STEP_METRICS | CRITIC_METRICS),
        ({"advantage_estimator": "group"}, STEP_METRICS),
        ({"kl_weight": 0.1}, STEP_METRICS | CRITIC_METRICS | {"timing_s/ref"}),
        ({"kl_reward_weight": 0.1}, STEP_METRICS | CRITIC_METRICS | {"timing_s/ref", "critic/kl_penalty"}),
        (
            {"advantage_estimator": "group", "dynamic_sampling": True},
            STEP_METRICS | {"rollout/rounds", "rollout/informative_groups"},
        ),
    ],
)
def test_a_step_reports_what_it_did_and_nothing_else(learner_of, small_config, changes, expected):
    config = replace(small_config, **changes)
    report = vapo_step(learner_of(config), 1, config)
    assert report.metrics.keys() == expected
    assert len(report.samples) == 4 and report.errors == [] and report.skipped == ""


def test_a_step_moves_both_models_by_their_own_optimisers(learner_of, judged, small_config):
    config = replace(small_config, actor_epochs=1, critic_epochs=3, mini_batches=2, actor_lr=1e-3, critic_lr=1e-3)
    learner = judged(learner_of(config))
    before = {name: weights(model.base_model) for name, model in learner.models.items()}
    vapo_step(learner, 1, config)
    assert all(not torch.equal(weights(learner.models[name].base_model), start) for name, start in before.items())
    # Epochs times mini-batches.
    for name, expected in (("policy", {2}), ("critic", {6})):
        assert {int(state["step"]) for state in learner.optimizers[name].state.values()} == expected


@pytest.mark.parametrize(("critic_epochs", "is_same"), [(2, True), (3, False)])
def test_both_models_take_the_same_mini_batches_if_they_have_as_many_epochs(
    learner_of, batch_of, small_config, monkeypatch, critic_epochs, is_same
):
    config = replace(small_config, actor_epochs=2, critic_epochs=critic_epochs, value_clip=0.3)
    seen = {"actor": [], "critic": []}

    def record(name):
        def update(model, optimizer, batch, mini_batch, config, value_clip=None):
            assert value_clip == (0.3 if name == "critic" else None)
            seen[name].append(mini_batch.rows.tolist())
            return {f"{name}/skipped_steps": 0.0}

        return update

    monkeypatch.setattr(vapo.learning.step, "update_policy", record("actor"))
    monkeypatch.setattr(vapo.learning.step, "update_critic", record("critic"))
    update_models(learner_of(config), batch_of(), 1, config, {})
    assert (seen["actor"] == seen["critic"]) == is_same
    for name, epochs in (("actor", 2), ("critic", critic_epochs)):
        first, second = seen[name][::2], seen[name][1::2]
        assert [sorted(a + b) for a, b in zip(first, second, strict=True)] == [[0, 1, 2, 3]] * epochs


def test_learning_rates_warm_up_each_over_its_own_steps(learner_of, small_config):
    config = replace(small_config, actor_lr=0.4, actor_lr_warmup=4, critic_lr=0.6, critic_lr_warmup=2)
    learner, rates = learner_of(config), []
    for step in (1, 2, 3):
        metrics = vapo_step(learner, step, config).metrics
        rates.append((metrics["actor/lr"], metrics["critic/lr"]))
        used = [optimizer.param_groups[0]["lr"] for optimizer in learner.optimizers.values()]
        assert used == list(rates[-1])
    assert rates == [pytest.approx(pair) for pair in ((0.1, 0.3), (0.2, 0.6), (0.3, 0.6))]


@pytest.mark.parametrize(
    ("changes", "step", "is_centred"),
    [
        ({"value_pretraining": False}, 1, True),
        ({"value_pretraining": False}, 2, False),
        ({"value_pretraining": True}, 1, False),
        ({"value_pretraining": False, "critic": "given"}, 1, False),
    ],
)
def test_a_new_critic_begins_at_the_mean_reward(learner_of, judged, small_config, changes, step, is_centred):
    config = replace(small_config, critic_lr=1e-9)
    learner = judged(learner_of(config))
    metrics = vapo_step(learner, step, replace(config, **changes)).metrics
    assert value_head(learner.critic).bias.item() == pytest.approx(1.0 if is_centred else 0.0, abs=1e-6)
    # Every return is 1, and the loss ½ (V − 1)².
    assert metrics["critic/vf_loss"] == pytest.approx(0.0 if is_centred else 0.5, abs=1e-6)


def test_the_loss_sees_the_reference_and_not_the_policy(learner_of, small_config):
    config = replace(small_config, kl_weight=0.1, mini_batches=1)
    for factor, has_kl in ((1, False), (2, True)):
        learner = learner_of(config)
        with torch.no_grad():
            learner.reference.lm_head.weight.mul_(factor)
        assert (vapo_step(learner, 1, config).metrics["actor/kl"] > 1e-4) == has_kl


@pytest.mark.parametrize(("truncated", "loss"), [("zero", 0.125), ("bootstrap", 0.0)])
def test_truncated_responses_end_in_the_value_of_the_critic_if_the_config_says_so(
    learner_of, small_config, truncated, loss
):
    config = replace(small_config, truncated=truncated, critic_lr=1e-9)
    learner = learner_of(config)
    # A token that there is not: the limit cuts every response.
    learner.sampling = replace(learner.sampling, stop_token_ids=(len(learner.tokenizer),))
    with torch.no_grad():
        value_head(learner.critic).bias.fill_(0.5)
    metrics = vapo_step(learner, 1, config).metrics
    assert metrics["response_length/clip_ratio"] == 1
    # Returns are 0 or, by the bootstrap, ½; all values are ½.
    assert metrics["critic/vf_loss"] == pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize("group_sampling", [True, False])
def test_responses_to_a_prompt_stand_side_by_side(learner_of, small_config, group_sampling):
    config = replace(small_config, group_sampling=group_sampling)
    prompts = [sample["prompt"] for sample in vapo_step(learner_of(config), 1, config).samples]
    # Without groups as many responses have prompts of their own.
    first, second, third, fourth = prompts
    assert len(set(prompts)) == (2 if group_sampling else 4)
    assert not group_sampling or (first == second and third == fourth)


def test_dynamic_sampling_refills_by_correctness_and_not_by_score(learner_of, judged, small_config):
    config = replace(small_config, dynamic_sampling=True, max_sampling_rounds=3)
    learner = judged(learner_of(config))

    def rounds():
        report = vapo_step(learner, 1, config)
        assert len(report.samples) == 4
        return report.metrics["rollout/rounds"], report.metrics["rollout/informative_groups"]

    # The verifier scores all responses 1 and calls the first of two correct.
    assert rounds() == (1, 1.0)
    # By the task's own verifier no single token is correct: all rounds are used, and the batch is full.
    del learner.task.score
    assert rounds() == (3, 0.0)


def test_score_accuracy_and_failed_verifiers_are_told_apart(learner_of, judged, small_config):
    report = vapo_step(judged(learner_of(small_config)), 1, small_config)
    names = ("critic/score/mean", "critic/accuracy/mean", "reward/errors")
    assert [report.metrics[name] for name in names] == [1.0, 0.5, 0.0]
    report = vapo_step(judged(learner_of(small_config), error="Traceback: it broke"), 1, small_config)
    assert [report.metrics[name] for name in names] == [0.0, 0.0, 4.0]
    assert report.errors == ["Traceback: it broke"] * 4


def test_batch_metrics_by_hand(batch_of, small_config, rollout):
    returns = torch.tensor([1.0] * 3 + [0.0] * 3 + [1.0] * 5)
    shaped = rollout.rewards - 0.1
    truncated = replace(rollout, is_truncated=torch.tensor([False, True, False, False]))
    lam = torch.tensor([0.5, 0.0, 0.25, 0.75])
    batch = batch_of(rollout=truncated, rewards=shaped, returns=returns, old_values=returns, lam_policy=lam)
    assert batch_metrics(batch, small_config) == pytest.approx(
        {
            "critic/score/mean": 0.5,
            "critic/accuracy/mean": 0.5,
            "critic/rewards/mean": 0.5 - 0.1 * 11 / 4,
            "critic/vf_explained_var": 1.0,
            "critic/vf_explained_var_within": 1.0,
            "critic/lambda_policy/mean": 0.375,
            "critic/lambda_policy/min": 0.0,
            "critic/lambda_policy/max": 0.75,
            "response_length/mean": 2.75,
            "response_length/min": 1,
            "response_length/max": 5,
            "response_length/clip_ratio": 0.25,
        }
    )


def test_mismatch_of_the_engine_by_hand(batch_of, rollout):
    assert mismatch_metrics(batch_of()) == {}
    gaps = torch.zeros(11)
    gaps[2], gaps[7] = math.log(2.0), -math.log(4.0)
    batch = batch_of(rollout=replace(rollout, engine_logprobs=-gaps))
    assert mismatch_metrics(batch) == pytest.approx(
        {
            "rollout/logprob_diff/mean": math.log(8.0) / 11,
            "rollout/logprob_diff/max": math.log(4.0),
            "rollout/k3": ((2.0 - 1 - math.log(2.0)) + (0.25 - 1 + math.log(4.0))) / 11,
        }
    )


def test_kl_penalty_is_that_of_a_response(batch_of, small_config):
    config = replace(small_config, kl_reward_weight=0.1)
    batch = batch_of(old_logprobs=torch.full((11,), -1.0), ref_logprobs=torch.full((11,), -3.0))
    assert batch_metrics(batch, config)["critic/kl_penalty"] == pytest.approx(0.1 * 2 * 11 / 4)


def test_records_pair_prompts_with_their_responses(batch_of, task):
    problems, texts = task.problems(4, random.Random(0)), ["a", "b", "c", "d"]
    batch = batch_of(advantages=torch.arange(11.0))
    rows = response_records(batch, problems[:2], texts)
    assert [row["prompt"] for row in rows] == [problems[group].prompt for group in (0, 0, 1, 1)]
    assert [row["response"] for row in rows] == texts
    assert [(row["reward"], row["is_correct"]) for row in rows[:2]] == [(1.0, True), (0.0, False)]
    bounds = [(row["advantage_min"], row["advantage_max"]) for row in rows]
    assert bounds == [(0.0, 2.0), (3.0, 3.0), (4.0, 5.0), (6.0, 10.0)]
    assert [row["prompt"] for row in response_records(batch, problems, texts)] == [each.prompt for each in problems]
    assert [evenly_spread(texts, count) for count in (0, 2, 9)] == [[], ["a", "c"], texts]


@pytest.mark.parametrize(
    ("fields", "name", "responses"),
    [
        ({"old_logprobs": 4}, "old_logprobs", "c"),
        ({"ref_logprobs": 0}, "ref_logprobs", "a"),
        # What comes first in the computation is the cause of the rest.
        ({"advantages": 1, "old_values": 10, "returns": 9}, "old_values", "d"),
        ({"returns": 3}, "returns", "b"),
        ({"rewards": 10, "returns": 3}, "rewards", "d"),
        # That token is masked.
        ({"advantages": 5}, "", ""),
        ({"policy": None}, "logprobs", "abcd"),
        ({"critic": None}, "values", "abcd"),
        ({}, "", ""),
    ],
)
def test_the_cause_of_a_skip_is_named_with_its_responses(
    learner_of, batch_of, task, small_config, fields, name, responses
):
    learner = learner_of(small_config)
    values = {"ref_logprobs": torch.zeros(11), "mask": torch.arange(11) != 5}
    for field, token in fields.items():
        if token is None:
            learner.models[field].base_model.norm.weight.data[0] = float("nan")
        else:
            values[field] = torch.zeros(11).index_fill(0, torch.tensor(token), float("nan"))
    batch = batch_of(**values)
    records = response_records(batch, task.problems(2, random.Random(0)), list("abcd"))
    text, culprits = skipped_responses(learner, batch, records, small_config)
    assert [(each["response"], each["not_finite"]) for each in culprits] == [(text, name) for text in responses]
    if name:
        assert text.startswith(f"{name} is not finite in {len(responses)} responses") and responses[0] in text
    else:
        assert "overflowed" in text


def test_the_warning_names_its_cause(small_config):
    for changes, cause in (
        ({}, "(α = 0.05 is small for responses this short; see critic/lambda_policy/mean)"),
        (
            {"length_adaptive_gae": False, "lam_policy": 0.2},
            "(lam_policy = 0.2 for all; see critic/lambda_policy/mean)",
        ),
    ):
        assert cause in small_lambda_warning(replace(small_config, **changes))


@pytest.mark.parametrize(("on_gpu", "seconds"), [(True, 3.0), (False, 1.0)])
def test_a_clock_is_read_after_the_gpu_has_finished(monkeypatch, on_gpu, seconds):
    now, metrics = [10.0], {}
    monkeypatch.setattr(vapo.learning.step.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: on_gpu)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: now.__setitem__(0, now[0] + 2.0))
    with timed(metrics, "gen"):
        now[0] += 1.0
    assert metrics == {"timing_s/gen": seconds}
