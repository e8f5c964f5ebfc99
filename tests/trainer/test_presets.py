"""Presets are overrides of the one config."""

from dataclasses import asdict

import pytest

from vapo.config import Config
from vapo.presets import PRESETS, preset

SWITCHES = {name for name, value in asdict(Config()).items() if isinstance(value, bool)} - {"whiten_advantages"}


@pytest.mark.parametrize(
    ("name", "switches_on"),
    [
        ("embedded", SWITCHES),
        ("vapo", SWITCHES),
        ("vc_ppo", {"value_pretraining", "decoupled_gae"}),
        ("ppo", set()),
    ],
)
def test_preset_sets_the_switches(name, switches_on):
    config = asdict(preset(name))
    assert {switch for switch in SWITCHES if config[switch]} == switches_on


def test_there_are_seven_switches():
    assert len(SWITCHES) == 7


def test_alpha_is_the_papers_except_in_the_embedded_job():
    assert {name: preset(name).alpha for name in PRESETS} == {
        "embedded": 1.0,
        "vapo": 0.05,
        "vc_ppo": 0.05,
        "ppo": 0.05,
    }


def test_overrides_win():
    assert preset("ppo", positive_nll=True, seed=3) == Config(**PRESETS["ppo"] | {"positive_nll": True, "seed": 3})


def test_unknown_preset_is_named():
    with pytest.raises(ValueError, match="preset must be one of embedded, vapo, vc_ppo, ppo; got 'vappo'"):
        preset("vappo")
