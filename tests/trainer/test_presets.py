"""Presets are overrides of the one config; embedded tasks bring their sizes."""

from dataclasses import asdict, fields

import pytest

from vapo.config import Config
from vapo.presets import EMBEDDED_SIZES, PRESETS, preset

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
