"""Every field is checked, and the switches give the settings that are used."""

from dataclasses import FrozenInstanceError, fields

import pytest

from vapo.config import Config

BAD = {
    "int | None": 0,
    "bool": "yes",
    "int": -1,
    "float": float("nan"),
    "str": 3,
    "float | None": -1.0,
    "tuple[str, ...]": ["a list"],
}


@pytest.mark.parametrize(("name", "kind"), [(field.name, field.type) for field in fields(Config)])
def test_every_field_rejects_a_bad_value_by_name(name, kind):
    with pytest.raises(ValueError, match=rf"^{name} must be .*; got"):
        Config(**{name: BAD[kind]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_high": 0.1}, "clip_high must be >= clip_low = 0.2; got 0.1"),
        (
            {"attention": "flash_attention_2"},
            "attention must be sdpa or eager where dtype is float32, which flash attention does not take;"
            " got flash_attention_2",
        ),
        (
            {"truncated": "penalty", "max_new_tokens": 1000, "overlong_buffer": 1024},
            "overlong_buffer must be <= max_new_tokens = 1000; got 1024",
        ),
        ({"dual_clip": 1.0}, "dual_clip must be None or > 1; got 1.0"),
        (
            {"warm_start_steps": 20, "warm_start_steady_steps": 20},
            "warm_start_steady_steps must be < warm_start_steps = 20; got 20",
        ),
        (
            {"warm_start_steps": 220, "warm_start_clean_steps": 300},
            "warm_start_clean_steps must be <= warm_start_steps = 220; got 300",
        ),
        (
            {"num_prompts": 4, "group_size": 3, "mini_batches": 13},
            "mini_batches must be <= num_prompts × group_size = 12; got 13",
        ),
        ({"pretraining_mini_batches": 513}, "pretraining_mini_batches must be <= pretraining_prompts = 512; got 513"),
        ({"gamma": 0.0}, "gamma must be a number in (0, 1]; got 0.0"),
        ({"gamma": 1.01}, "gamma must be a number in (0, 1]; got 1.01"),
        ({"top_p": 0.0}, "top_p must be a number in (0, 1]; got 0.0"),
        ({"lam_critic": 1.01}, "lam_critic must be a number in [0, 1]; got 1.01"),
        ({"clip_low": 1.0}, "clip_low must be a number in (0, 1); got 1.0"),
        ({"kl_weight": -0.1}, "kl_weight must be a finite number >= 0; got -0.1"),
        ({"alpha": float("inf")}, "alpha must be a finite number > 0; got inf"),
        ({"alpha": 0}, "alpha must be a finite number > 0; got 0"),
        ({"value_clip": 0.0}, "value_clip must be a finite number > 0; got 0.0"),
        ({"steps": True}, "steps must be an integer >= 0; got True"),
        ({"num_prompts": 0}, "num_prompts must be an integer >= 1; got 0"),
        ({"task": ""}, "task must be a text; got ''"),
        ({"trackers": ("wandb", 1)}, "trackers must be a tuple of texts; got ('wandb', 1)"),
        ({"stop": ("",)}, "stop must be a tuple of texts; got ('',)"),
        ({"dtype": "float16"}, "dtype must be one of float32, bfloat16; got 'float16'"),
        ({"truncated": "drop"}, "truncated must be one of zero, bootstrap, penalty, mask; got 'drop'"),
        ({"advantage_estimator": "rloo"}, "advantage_estimator must be one of gae, group; got 'rloo'"),
    ],
)
def test_rejects_values_out_of_range(changes, message):
    with pytest.raises(ValueError) as error:
        Config(**changes)
    assert str(error.value) == message


@pytest.mark.parametrize("changes", [{"advantage_estimator": "group"}, {"dynamic_sampling": True}])
@pytest.mark.parametrize("alone", [{"group_size": 1}, {"group_sampling": False}])
def test_what_compares_within_a_group_needs_one(changes, alone):
    Config(**changes)
    with pytest.raises(ValueError, match=r"^group_size must be >= 2, with group_sampling, for"):
        Config(**changes, **alone)


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 0, "lam_policy": 0.0, "lam_critic": 1.0, "give_up": 1, "top_k": 0},
        {"gamma": 1, "top_p": 1e-9, "clip_low": 0.3, "clip_high": 0.3},
        {"eval_task": "", "reward": "", "critic": "", "dual_clip": None, "value_clip": None},
        {"trackers": ("tensorboard", "wandb"), "stop": ("</answer>",)},
        {"truncated": "penalty", "max_new_tokens": 1024, "overlong_buffer": 1024},
        {"truncated": "zero", "max_new_tokens": 9, "overlong_buffer": 1024},
        {"clip_higher": False, "clip_low": 0.3},
    ],
)
def test_accepts_the_ends_of_each_range(changes):
    Config(**changes)


def test_the_defaults_are_the_papers():
    config = Config()
    expected = {
        "gamma": 1.0,
        "alpha": 0.05,
        "lam_critic": 1.0,
        "clip_low": 0.2,
        "clip_high": 0.28,
        "nll_weight": 0.1,
        "num_prompts": 512,
        "group_size": 16,
        "mini_batches": 16,
        "actor_lr": 1e-6,
        "critic_lr": 2e-6,
        "pretraining_steps": 50,
        "temperature": 1.0,
        "kl_weight": 0.0,
        "kl_reward_weight": 0.0,
    }
    assert {name: getattr(config, name) for name in expected} == expected


def test_config_is_frozen():
    with pytest.raises(FrozenInstanceError):
        Config().seed = 1


def test_total_steps_counts_every_phase_that_there_is():
    phases = {"steps": 5, "pretraining_steps": 8, "warm_start_steps": 220}
    assert Config(**phases).total_steps == 220 + 8 + 5
    assert Config(**phases, value_pretraining=False).total_steps == 220 + 5
    assert Config(**phases, advantage_estimator="group").total_steps == 220 + 5


def test_switches_give_the_settings_that_are_used():
    on, off = Config(), Config(clip_higher=False, positive_nll=False, group_sampling=False)
    assert (on.used_clip_high, on.used_nll_weight, on.responses_per_prompt) == (0.28, 0.1, 16)
    assert (off.used_clip_high, off.used_nll_weight, off.responses_per_prompt) == (0.2, 0.0, 1)
    assert on.num_responses == off.num_responses == 512 * 16


@pytest.mark.parametrize(
    ("changes", "has_reference"), [({}, False), ({"kl_weight": 0.1}, True), ({"kl_reward_weight": 0.1}, True)]
)
def test_a_reference_is_kept_where_a_kl_term_wants_it(changes, has_reference):
    assert Config(**changes).has_reference == has_reference


def test_the_overlong_penalty_grows_over_a_fifth_of_the_limit_unless_it_is_given():
    assert Config(max_new_tokens=110).used_overlong_buffer == 22
    assert Config(max_new_tokens=3).used_overlong_buffer == 1
    assert Config(max_new_tokens=110, overlong_buffer=30).used_overlong_buffer == 30
