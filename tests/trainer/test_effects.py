"""A setting that changes nothing beside the others is refused by name, wherever it is given."""

from dataclasses import asdict

import pytest

from vapo.cli import main
from vapo.config import Config
from vapo.presets import EMBEDDED_SIZES, PRESETS, RULES, has_effect, preset, refuse_ineffective

PRETRAINING = {
    "pretraining_steps": 9,
    "pretraining_prompts": 100,
    "pretraining_epochs": 3,
    "pretraining_mini_batches": 2,
    "pretraining_target": 0.7,
}
WARM_START = {
    "warm_start_clean_steps": 1,
    "warm_start_steady_steps": 1,
    "warm_start_batch": 8,
    "warm_start_lr": 0.01,
    "give_up": 0.2,
    "error": 0.1,
}
GAE = PRETRAINING | {
    "value_pretraining": True,
    "decoupled_gae": True,
    "length_adaptive_gae": True,
    "use_values": True,
    "gamma": 0.9,
    "lam_policy": 0.9,
    "lam_critic": 0.9,
    "alpha": 0.3,
    "value_clip": 0.2,
    "critic": "a/critic",
    "critic_epochs": 2,
    "critic_lr": 0.01,
    "critic_lr_warmup": 3,
}
HUB = {"model": "a/model", "task": "rows.jsonl"}

# What is given → each setting that then has no effect, and the reason in words.
CASES = [
    ("advantage_estimator is 'group'", {"advantage_estimator": "group"}, GAE),
    ("value_pretraining is off", {"value_pretraining": False}, PRETRAINING),
    ("length_adaptive_gae is off", {"length_adaptive_gae": False}, {"alpha": 0.3}),
    ("length_adaptive_gae is on", {}, {"lam_policy": 0.9}),
    ("decoupled_gae is off", {"decoupled_gae": False}, {"lam_critic": 0.9}),
    ("clip_higher is off", {"clip_higher": False}, {"clip_high": 0.3}),
    ("positive_nll is off", {"positive_nll": False}, {"nll_weight": 0.2}),
    ("dynamic_sampling is off", {}, {"max_sampling_rounds": 3}),
    ("truncated is not 'penalty'", {"truncated": "mask"}, {"overlong_buffer": 5}),
    ("model is not 'tiny'", HUB, {"warm_start_steps": 5, **WARM_START}),
    ("warm_start_steps is 0", {"warm_start_steps": 0}, WARM_START | {"warm_start_clean_steps": 0}),
    ("an embedded task verifies responses itself", {}, {"reward_timeout": 3.0}),
]
SINGLE = [(reason, base, field, value) for reason, base, fields in CASES for field, value in fields.items()]


def options(settings):
    words = []
    for name, value in settings.items():
        option = name.replace("_", "-")
        words += (
            [f"--{option}" if value else f"--no-{option}"] if isinstance(value, bool) else [f"--{option}", str(value)]
        )
    return words


@pytest.mark.parametrize(("reason", "base", "field", "value"), SINGLE)
def test_a_setting_without_effect_is_refused_by_name(reason, base, field, value, capsys):
    message = f"{field} has no effect where {reason}; got {value!r}"
    preset("vapo", **base)
    with pytest.raises(ValueError) as error:
        preset("vapo", **base, **{field: value})
    assert str(error.value) == message
    assert main(["train", "--dry-run", *options(base | {field: value})]) == 2
    assert capsys.readouterr() == ("", f"vapo: {message}\n")


def test_every_rule_has_a_case_for_each_of_its_fields():
    cases = {(reason, field) for reason, _, field, _ in SINGLE}
    assert {(rule.reason, field) for rule in RULES for field in rule.fields} <= cases


@pytest.mark.parametrize(
    "given",
    [
        {"advantage_estimator": "group", "value_pretraining": False, "decoupled_gae": False},
        {"advantage_estimator": "group", "critic": "", "value_clip": None},
        {"positive_nll": False, "nll_weight": 0.0},
        {"model": "a/model", "task": "rows.jsonl", "warm_start_steps": 0},
        {"gradient_checkpointing": False},
    ],
)
def test_switching_off_what_is_off_may_stand(given):
    preset("vapo", **given)


@pytest.mark.parametrize(
    "given",
    [
        {"length_adaptive_gae": False, "lam_policy": 0.9},
        {"dynamic_sampling": True, "max_sampling_rounds": 3},
        {"truncated": "penalty", "overlong_buffer": 5},
        {**HUB, "attention": "eager", "gradient_checkpointing": True, "reward_timeout": 3.0},
        {"task": "knights-knaves", "reward": "math", "reward_timeout": 3.0},
        {"task": "knights-knaves", "reward": "file.py:score", "reward_timeout": 3.0},
        {"alpha": 0.3, "lam_critic": 0.9, "clip_high": 0.3, "nll_weight": 0.2, **PRETRAINING, **WARM_START},
        {"truncated": "bootstrap"},
    ],
)
def test_a_setting_with_effect_is_taken(given):
    config = asdict(preset("vapo", **given))
    assert {field: config[field] for field in given} == given


def test_an_embedded_tasks_own_rewards_have_no_timeout():
    with pytest.raises(ValueError, match=r"^reward_timeout has no effect where an embedded task verifies"):
        preset("vapo", task="knights-knaves", reward="per-islander", reward_timeout=3.0)


@pytest.mark.parametrize("without", [{"use_values": False}, {"advantage_estimator": "group"}])
def test_bootstrap_wants_a_critic_whose_values_are_used(without, capsys):
    given = {"truncated": "bootstrap", **without}
    with pytest.raises(ValueError, match=r"^truncated = 'bootstrap' has no effect without a critic .* got adv.*, use_"):
        preset("vapo", **given)
    assert main(["train", "--dry-run", *options(given)]) == 2
    assert capsys.readouterr().err.startswith("vapo: truncated = 'bootstrap' has no effect")


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("place", [*({"task": task} for task in EMBEDDED_SIZES), HUB])
def test_presets_are_clean(name, place):
    # What differs from the defaults has an effect, unless it only switches something off.
    config = preset(name, **place)
    changed = {field: value for field, value in asdict(config).items() if value != getattr(Config(), field)}
    refuse_ineffective(config, changed)


def test_has_effect_says_what_the_rules_say():
    config = Config(length_adaptive_gae=False, advantage_estimator="group")
    assert not has_effect(config, "alpha")
    assert not has_effect(config, "lam_policy")
    assert has_effect(config, "clip_high")
    assert has_effect(Config(length_adaptive_gae=False), "lam_policy")


def test_zeros_in_the_place_of_values_are_asked_for():
    with pytest.raises(ValueError, match="use_values has no effect where advantage_estimator is 'group'; got False"):
        preset("grpo", use_values=False)
