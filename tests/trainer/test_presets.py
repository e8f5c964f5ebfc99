"""Presets are overrides of the one config; embedded tasks bring their sizes; what has no effect is refused."""

from dataclasses import asdict, fields

import pytest
from training_runs import options

from vapo.cli import main
from vapo.config import Config
from vapo.presets import EMBEDDED_SIZES, PRESETS, RULES, has_effect, preset, refuse_ineffective

# The seven parts of VAPO.
PARTS = {
    "value_pretraining",
    "decoupled_gae",
    "length_adaptive_gae",
    "clip_higher",
    "token_level_loss",
    "positive_nll",
    "group_sampling",
}
REAL = {"task": "reasoning-gym:basic_arithmetic", "model": "some/model"}


@pytest.mark.parametrize(
    ("name", "parts_on", "others"),
    [
        ("vapo", PARTS, {}),
        ("vc_ppo", {"value_pretraining", "decoupled_gae"}, {}),
        ("ppo", set(), {"kl_reward_weight": 0.001}),
        (
            "grpo",
            {"group_sampling"},
            {"advantage_estimator": "group", "whiten_advantages": False, "kl_weight": 0.001},
        ),
        (
            "dapo",
            {"group_sampling", "clip_higher", "token_level_loss"},
            {
                "advantage_estimator": "group",
                "whiten_advantages": False,
                "dynamic_sampling": True,
                "truncated": "penalty",
            },
        ),
    ],
)
def test_preset_sets_its_algorithm_and_nothing_else(name, parts_on, others):
    config, plain = asdict(preset(name, **REAL)), asdict(Config(**REAL))
    assert {part for part in PARTS if config[part]} == parts_on
    assert {field: value for field, value in config.items() if field not in PARTS and value != plain[field]} == others


def test_there_is_a_test_for_every_preset():
    assert set(PRESETS) == {"vapo", "vc_ppo", "ppo", "grpo", "dapo"}


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("task", EMBEDDED_SIZES)
def test_an_embedded_task_brings_sizes_and_no_algorithm(name, task):
    config, plain = asdict(preset(name, task=task)), asdict(preset(name, **REAL))
    changed = {field for field in config if config[field] != plain[field]} - {"task", "model"}
    algorithm = {field for values in PRESETS.values() for field in values}
    assert not changed & algorithm
    assert config["num_prompts"] == 32 and config["warm_start_steps"] == {"running-total": 220}.get(task, 440)


def test_alpha_is_the_papers_except_in_the_embedded_job():
    assert preset().alpha == 1.0
    assert preset(**REAL).alpha == 0.05


def test_another_model_leaves_the_sizes_of_the_tiny_one():
    assert preset("vapo", model="some/model") == Config(model="some/model")


def test_overrides_win_over_preset_and_task():
    config = preset("ppo", positive_nll=True, seed=3, steps=7)
    assert (config.positive_nll, config.seed, config.steps, config.token_level_loss) == (True, 3, 7, False)
    assert preset("vapo", alpha=0.3).alpha == 0.3


@pytest.mark.parametrize(
    ("name", "given", "unused"),
    [
        ("ppo", {}, {"alpha", "pretraining_steps", "pretraining_prompts"}),
        ("grpo", {}, {"alpha", "critic_lr", "pretraining_steps", "pretraining_epochs"}),
        ("dapo", {}, {"alpha", "critic_lr", "pretraining_mini_batches"}),
        ("vapo", {"warm_start_steps": 0}, {"warm_start_clean_steps"}),
    ],
)
def test_a_size_of_the_task_without_use_falls_back_to_its_default(name, given, unused):
    sizes, config, plain = EMBEDDED_SIZES["running-total"], preset(name, **given), Config()
    # A default that is the task's size as well would show nothing.
    assert all(sizes[field] != getattr(plain, field) for field in unused)
    assert {field: getattr(config, field) for field in unused} == {field: getattr(plain, field) for field in unused}


def test_a_size_with_use_is_the_tasks():
    assert preset("dapo").max_new_tokens == 110
    assert preset("vc_ppo").pretraining_steps == 8


def test_presets_name_fields_of_the_config():
    names = {field.name for field in fields(Config)}
    assert all(set(values) <= names for values in [*PRESETS.values(), *EMBEDDED_SIZES.values()])


def test_unknown_preset_is_named():
    with pytest.raises(ValueError, match="preset must be one of vapo, vc_ppo, ppo, grpo, dapo; got 'vappo'"):
        preset("vappo")


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
    ("engine is not 'vllm'", {}, {"engine_memory": 0.3}),
    ("dynamic_sampling is off", {}, {"max_sampling_rounds": 3}),
    ("truncated is not 'penalty'", {"truncated": "mask"}, {"overlong_buffer": 5}),
    ("model is not 'tiny'", HUB, {"warm_start_steps": 5, **WARM_START}),
    ("warm_start_steps is 0", {"warm_start_steps": 0}, WARM_START),
]
SINGLE = [(reason, base, field, value) for reason, base, fields in CASES for field, value in fields.items()]


@pytest.mark.parametrize(("reason", "base", "field", "value"), SINGLE)
def test_a_setting_without_effect_is_refused_by_name(reason, base, field, value, capsys):
    message = f"settings must have an effect; got {field}={value!r} where {reason}"
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


def test_all_settings_without_effect_are_named_at_once():
    with pytest.raises(ValueError) as error:
        preset("grpo", alpha=0.3, nll_weight=0.2, critic_lr=0.1, seed=4)
    group = "where advantage_estimator is 'group'"
    expected = f"alpha=0.3 {group}, nll_weight=0.2 where positive_nll is off, critic_lr=0.1 {group}"
    assert str(error.value) == f"settings must have an effect; got {expected}"


@pytest.mark.parametrize("without", [{"use_values": False}, {"advantage_estimator": "group"}])
def test_bootstrap_needs_a_critic_whose_values_are_used(without, capsys):
    given, message = {"truncated": "bootstrap", **without}, "truncated must be zero, penalty or mask without a critic"
    with pytest.raises(ValueError, match=f"^{message}"):
        preset("vapo", **given)
    assert main(["train", "--dry-run", *options(given)]) == 2
    assert capsys.readouterr().err.startswith(f"vapo: {message}")


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
