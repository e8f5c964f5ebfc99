"""Every field is checked, and the switches give the settings that are used."""

import json
import pickle
from dataclasses import FrozenInstanceError, asdict, fields, replace
from math import inf, nan

import pytest

from vapo.config import Config

# By the type of the default: values that no such field takes. Types are strict: True is no number, "1" is none either.
BAD = {
    bool: ("yes", 1, None),
    int: (-1, True, "1", 1.5, nan, None),
    float: (nan, inf, -1.0, True, "1", None),
    str: (3, None, True),
    tuple: (["a list"], "text", ("",), ("wandb", 1), None),
    type(None): (nan, -1.0, 0, True, "1"),
}
# Numbers that may be left to the machine.
BAD_OF = {
    "micro_batch_tokens": (0, -1, True, "1", 1.5, nan, None, "many"),
    "importance_cap": (nan, inf, -1.0, 0.0, True, "1", "much"),
}
CASES = [(f.name, value) for f in fields(Config) for value in BAD_OF.get(f.name, BAD[type(f.default)])]


@pytest.mark.parametrize(("name", "value"), CASES)
def test_every_field_rejects_bad_values_by_name(name, value):
    with pytest.raises(ValueError) as error:
        Config(**{name: value})
    assert type(error.value) is ValueError
    assert str(error.value).startswith((f"{name} must ", f"{name}.")) and "; got " in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_high": 0.1}, "clip_high must be >= clip_low = 0.2; got 0.1"),
        (
            {"attention": "flash_attention_2", "dtype": "float32"},
            "attention must be sdpa or eager where dtype is float32, which flash attention does not take;"
            " got flash_attention_2",
        ),
        (
            {"truncated": "penalty", "max_new_tokens": 1000, "overlong_buffer": 1024},
            "overlong_buffer must be <= max_new_tokens = 1000; got 1024",
        ),
        *(
            (
                {"truncated": "bootstrap", **without},
                "truncated must be zero, penalty or mask without a critic whose values are used; got bootstrap",
            )
            for without in ({"use_values": False}, {"advantage_estimator": "group"})
        ),
        ({"dual_clip": 1.0}, "dual_clip must be greater than 1; got 1.0"),
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
        *(
            ({name: value}, f"{name} must be {expected}; got {value!r}")
            for name, value, expected in (
                ("gamma", 0.0, "greater than 0"),
                ("gamma", 1.01, "less than or equal to 1"),
                ("top_p", 0.0, "greater than 0"),
                ("eval_top_p", 1.5, "less than or equal to 1"),
                ("pretraining_target", 0.0, "greater than 0"),
                ("lam_policy", 1.01, "less than or equal to 1"),
                ("lam_critic", 1.01, "less than or equal to 1"),
                ("give_up", -0.1, "greater than or equal to 0"),
                ("error", 1.01, "less than or equal to 1"),
                ("clip_low", 0.0, "greater than 0"),
                ("clip_low", 1.0, "less than 1"),
                ("kl_weight", -0.1, "greater than or equal to 0"),
                ("alpha", inf, "a finite number"),
                ("alpha", 0, "greater than 0"),
                ("value_clip", 0.0, "greater than 0"),
                ("steps", True, "a valid integer"),
                ("num_prompts", 0, "greater than 0"),
                ("max_skipped_steps", 0, "greater than 0"),
                ("device", "tpu", "'auto', 'cpu' or 'cuda'"),
                ("dtype", "float16", "'auto', 'float32' or 'bfloat16'"),
                ("attention", "flash", "'auto', 'sdpa', 'eager' or 'flash_attention_2'"),
                ("engine", "sglang", "'auto', 'loop', 'transformers' or 'vllm'"),
                ("truncated", "drop", "'zero', 'bootstrap', 'penalty' or 'mask'"),
                ("advantage_estimator", "rloo", "'gae' or 'group'"),
            )
        ),
        ({"task": ""}, "task must have at least 1 character; got ''"),
        ({"trackers": ("wandb", 1)}, "trackers.1 must be a valid string; got 1"),
        ({"lambda": 1, "alhpa": 2}, "settings must be fields of Config; got alhpa, lambda"),
    ],
)
def test_rejects_values_out_of_range(changes, message):
    with pytest.raises(ValueError) as error:
        Config(**changes)
    assert str(error.value) == message


@pytest.fixture
def path(tmp_path):
    return tmp_path / "config.json"


@pytest.mark.parametrize("unknown", ["refuse", "drop"])
def test_settings_are_read_back_as_they_were_written(path, unknown):
    config = Config(stop=("#",), dual_clip=3, seed=4)
    path.write_text(json.dumps(asdict(config)))
    assert Config.from_json(path, unknown=unknown) == config == pickle.loads(pickle.dumps(config))
    assert hash(replace(config, seed=5)) != hash(config) == hash(replace(config))
    assert type(config.dual_clip) is float


def test_unknown_settings_are_refused_or_dropped(path):
    path.write_text('{"alhpa": 1, "lambda": 0.9, "seed": 3}')
    with pytest.raises(ValueError, match=r"config\.json: settings must be fields of Config; got alhpa, lambda$"):
        Config.from_json(path)
    assert Config.from_json(path, unknown="drop") == Config(seed=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "settings: Invalid JSON: EOF"),
        ("[1]", "settings must be an object; got [1]"),
        ('{"steps": "1"}', "steps must be a valid integer; got '1'"),
        ('{"alpha": NaN}', "alpha must be a finite number; got nan"),
        ('{"clip_high": 0.1}', "clip_high must be >= clip_low = 0.2; got 0.1"),
    ],
)
@pytest.mark.parametrize("unknown", ["refuse", "drop"])
def test_a_file_with_other_contents_is_refused_with_its_path(path, text, message, unknown):
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        Config.from_json(path, unknown=unknown)
    assert str(error.value).startswith(f"{path}: {message}")


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
