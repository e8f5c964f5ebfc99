"""Every field is checked, and the switches give the settings that are used."""

from dataclasses import FrozenInstanceError, fields

import pytest

from vapo.config import Config

BAD = {"bool": "yes", "int": -1, "float": float("nan"), "str": "nonsense", "float | None": -1.0}


@pytest.mark.parametrize(("name", "kind"), [(field.name, field.type) for field in fields(Config)])
def test_every_field_rejects_a_bad_value_by_name(name, kind):
    with pytest.raises(ValueError, match=rf"^{name} must be .*; got"):
        Config(**{name: BAD[kind]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_high": 0.1}, "clip_high must be >= clip_low = 0.2; got 0.1"),
        ({"warm_start_clean_steps": 300}, "warm_start_clean_steps must be <= warm_start_steps = 220; got 300"),
        ({"mini_batches": 257}, "mini_batches must be <= num_prompts × group_size = 256; got 257"),
        ({"pretraining_mini_batches": 257}, "pretraining_mini_batches must be <= pretraining_prompts = 256; got 257"),
        ({"gamma": 0.0}, "gamma must be a number in (0, 1]; got 0.0"),
        ({"lam_critic": 1.01}, "lam_critic must be a number in [0, 1]; got 1.01"),
        ({"clip_low": 1.0}, "clip_low must be a number in (0, 1); got 1.0"),
        ({"alpha": float("inf")}, "alpha must be a finite number > 0; got inf"),
        ({"steps": True}, "steps must be an integer >= 1; got True"),
        ({"steps": 0}, "steps must be an integer >= 1; got 0"),
        ({"task": "sudoku"}, "task must be one of running-total; got 'sudoku'"),
    ],
)
def test_rejects_values_out_of_range(changes, message):
    with pytest.raises(ValueError) as error:
        Config(**changes)
    assert str(error.value) == message


def test_library_default_of_alpha_is_the_papers():
    assert Config().alpha == 0.05


def test_config_is_frozen():
    with pytest.raises(FrozenInstanceError):
        Config().seed = 1


def test_total_steps_counts_every_phase():
    assert Config(steps=5).total_steps == 220 + 8 + 5
    assert Config(steps=5, value_pretraining=False).total_steps == 220 + 5
