"""One step of RL: what it samples, asks, trains and tells."""

import random
from dataclasses import replace

import pytest
import torch

import vapo.learning.step
from vapo.learning.samples import evenly_spread, response_records, skipped_responses
from vapo.learning.step import (
    batch_metrics,
    model_passes,
    sample_groups,
    sampling_metrics,
    small_lambda_warning,
    update_models,
    vapo_step,
)
from vapo.models.load import value_head
from vapo.rollout.collect import Collected
from vapo.rollout.dynamic_sampling import Sampled
from vapo.tasks import Verdict

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


class EveryOther:
    """The embedded task with a verifier that says right and wrong in turn, and scores both 1."""

    def __init__(self, task, *, error=False):
        self.task, self.error, self.name, self.tokenizer = task, error, task.name, task.tokenizer

    def __getattr__(self, name):
        return getattr(self.task, name)

    def score(self, problems, responses):
        failed = "Traceback: it broke" if self.error else None
        return [Verdict(1.0, number % 2 == 0, failed) for number in range(len(responses))]


def judged(learner, *, error=False):
    """The learner with responses of one token, every one finished, that EveryOther judges."""
    learner.sampling = replace(learner.sampling, stop_token_ids=tuple(range(len(learner.tokenizer))))
    learner.task = EveryOther(learner.task, error=error)
    return learner


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
def test_a_step_tells_of_what_it_did_and_of_nothing_else(learner_of, small_config, changes, expected):
    config = replace(small_config, **changes)
    report = vapo_step(learner_of(config), 1, config)
    assert report.metrics.keys() == expected
    assert len(report.samples) == 4 and report.errors == [] and report.skipped == ""


def test_a_step_moves_both_models_by_their_own_optimisers(learner_of, small_config):
    config = replace(small_config, actor_epochs=1, critic_epochs=3, mini_batches=2, actor_lr=1e-3, critic_lr=1e-3)
    learner = judged(learner_of(config))
    before = {name: model.base_model.norm.weight.clone() for name, model in learner.models.items()}
    vapo_step(learner, 1, config)
    assert all(not torch.equal(learner.models[name].base_model.norm.weight, before[name]) for name in before)
    # Passes times mini-batches.
    steps = {
        name: {int(state["step"]) for state in optimizer.state.values()}
        for name, optimizer in learner.optimizers.items()
    }
    assert steps == {"policy": {2}, "critic": {6}}


def test_both_models_take_the_same_mini_batches_where_they_pass_as_often(learner_of, small_config, monkeypatch):
    seen = {"policy": [], "critic": []}

    def taken(name):
        return {f"{name}/skipped_steps": 0.0}

    monkeypatch.setattr(
        vapo.learning.step,
        "update_policy",
        lambda *a, **_: seen["policy"].append(a[-1].rows.tolist()) or taken("actor"),
    )
    monkeypatch.setattr(
        vapo.learning.step,
        "update_critic",
        lambda *a, **_: seen["critic"].append(a[-1].rows.tolist()) or taken("critic"),
    )
    for epochs, is_same in ((2, True), (3, False)):
        config = replace(small_config, actor_epochs=2, critic_epochs=epochs)
        learner = learner_of(config)
        sampled = sample_groups(learner, config)
        passes = model_passes(learner, sampled.collected.rollout, 1, config, {})
        batch = vapo.learning.step.build_batch(sampled.collected.rollout, passes, config)
        seen["policy"].clear()
        seen["critic"].clear()
        update_models(learner, batch, 1, config, {})
        assert (seen["policy"] == seen["critic"]) == is_same
        for model, num_epochs in (("policy", 2), ("critic", epochs)):
            parts = seen[model]
            assert len(parts) == 2 * num_epochs
            assert all(sorted(parts[i] + parts[i + 1]) == [0, 1, 2, 3] for i in range(0, len(parts), 2))


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
def test_a_new_critic_begins_at_the_mean_reward(learner_of, small_config, changes, step, is_centred, rollout):
    learner = learner_of(replace(small_config, value_pretraining=False))
    passes = model_passes(learner, rollout, step, replace(small_config, **changes), {})
    # Two of the four responses score 1, and the head is 0.
    assert torch.equal(passes.values, torch.full((11,), 0.5 * is_centred))
    assert value_head(learner.critic).bias.item() == 0.5 * is_centred


def test_the_reference_and_the_bootstrap_are_asked_where_they_are_wanted(learner_of, small_config, rollout):
    rollout = replace(rollout, is_truncated=torch.tensor([False, True, False, False]))
    config = replace(small_config, kl_weight=0.1, truncated="bootstrap", value_pretraining=False)
    learner = learner_of(config)
    with torch.no_grad():
        learner.reference.lm_head.weight.mul_(2)
    passes = model_passes(learner, rollout, 1, config, {})
    assert not torch.allclose(passes.ref_logprobs, passes.old_logprobs, atol=0.01)
    assert passes.final_values.tolist() == [0.0, 0.5, 0.0, 0.0]
    plain = model_passes(learner, rollout, 1, replace(config, kl_weight=0.0, truncated="zero"), {})
    assert plain.ref_logprobs is None and plain.final_values is None


def test_groups_stand_side_by_side(learner_of, small_config):
    learner = learner_of(small_config)
    sampled = sample_groups(learner, small_config)
    rollout = sampled.collected.rollout
    assert len(sampled.problems) == 2 and rollout.group_size == 2 and sampled.rounds == 1
    prompts = [
        learner.tokenizer.decode(ids) for ids in rollout.prompt_ids.split(rollout.prompt_cu_seqlens.diff().tolist())
    ]
    assert prompts == [problem.prompt for problem in sampled.problems for _ in range(2)]


def test_without_group_sampling_as_many_responses_have_prompts_of_their_own(learner_of, small_config):
    config = replace(small_config, group_sampling=False)
    sampled = sample_groups(learner_of(config), config)
    assert len(sampled.problems) == 4 and sampled.collected.rollout.group_size == 1


def test_dynamic_sampling_refills_by_correctness_and_not_by_score(learner_of, small_config):
    # The verifier scores all responses 1 and calls the first of two correct.
    config = replace(small_config, dynamic_sampling=True, max_sampling_rounds=3)
    learner = judged(learner_of(config))
    sampled = sample_groups(learner, config)
    assert (sampled.rounds, sampled.informative) == (1, 1.0)
    # By the task's own verifier no single token is correct: all rounds are used, and the batch is full.
    learner.task = learner.task.task
    sampled = sample_groups(learner, config)
    assert (sampled.rounds, sampled.informative) == (3, 0.0)
    assert len(sampled.collected.texts) == 4
    assert sample_groups(learner, replace(config, dynamic_sampling=False)).rounds == 1


def test_failed_verifiers_are_counted_and_told_of(learner_of, small_config):
    learner = judged(learner_of(small_config), error=True)
    report = vapo_step(learner, 1, small_config)
    assert report.errors == ["Traceback: it broke"] * 4
    assert report.metrics["reward/errors"] == 4
    assert report.metrics["critic/score/mean"] == 0


def test_score_and_accuracy_are_told_apart(learner_of, small_config):
    learner = judged(learner_of(small_config))
    metrics = vapo_step(learner, 1, small_config).metrics
    assert (metrics["critic/score/mean"], metrics["critic/accuracy/mean"]) == (1.0, 0.5)


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


def test_kl_penalty_is_that_of_a_response(batch_of, small_config):
    config = replace(small_config, kl_reward_weight=0.1)
    batch = batch_of(old_logprobs=torch.full((11,), -1.0), ref_logprobs=torch.full((11,), -3.0))
    assert batch_metrics(batch, config)["critic/kl_penalty"] == pytest.approx(0.1 * 2 * 11 / 4)


def test_sampling_metrics_by_hand(small_config, rollout):
    sampled = Sampled([], Collected(rollout, [], ["a", "b"]), rounds=3, informative=0.25)
    assert sampling_metrics(sampled, small_config) == {"reward/errors": 2.0}
    dynamic = replace(small_config, dynamic_sampling=True)
    expected = {"reward/errors": 2.0, "rollout/rounds": 3.0, "rollout/informative_groups": 0.25}
    assert sampling_metrics(sampled, dynamic) == expected


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
    ("fields", "masked", "name", "responses"),
    [
        ({"old_logprobs": 4}, False, "old_logprobs", ["c"]),
        ({"ref_logprobs": 0}, False, "ref_logprobs", ["a"]),
        # What comes first in the computation is the cause of the rest.
        ({"advantages": 1, "old_values": 10, "returns": 9}, False, "old_values", ["d"]),
        ({"returns": 3}, False, "returns", ["b"]),
        ({"rewards": 10, "returns": 3}, False, "rewards", ["d"]),
        ({"advantages": 4}, True, "", []),
        ({"weights": None}, False, "logprobs", ["a", "b", "c", "d"]),
        ({"critic": None}, False, "values", ["a", "b", "c", "d"]),
        ({}, False, "", []),
    ],
)
def test_the_cause_of_a_skip_is_named_with_its_responses(
    learner_of, batch_of, task, small_config, fields, masked, name, responses
):
    learner = learner_of(small_config)
    values = {"ref_logprobs": torch.zeros(11)}
    for field, at in fields.items():
        if at is None:
            model = learner.policy if field == "weights" else learner.critic
            model.base_model.norm.weight.data[0] = float("nan")
        else:
            values[field] = torch.zeros(11)
            values[field][at] = float("nan")
    batch = batch_of(**values)
    if masked:
        batch = replace(batch, mask=torch.tensor([True] * 4 + [False] * 2 + [True] * 5))
    records = response_records(batch, task.problems(2, random.Random(0)), ["a", "b", "c", "d"])
    text, culprits = skipped_responses(learner, batch, records, small_config)
    assert [each["response"] for each in culprits] == responses
    assert all(each["not_finite"] == name for each in culprits)
    if name:
        assert text.startswith(f"{name} is not finite in {len(responses)} responses") and responses[0] in text
    else:
        assert "overflowed" in text


def test_the_warning_names_its_cause(small_config):
    adaptive = small_lambda_warning(small_config)
    fixed = small_lambda_warning(replace(small_config, length_adaptive_gae=False, lam_policy=0.2))
    assert "(α = 0.05 is small for responses this short; see critic/lambda_policy/mean)" in adaptive
    assert "(lam_policy = 0.2 for all; see critic/lambda_policy/mean)" in fixed
