"""The embedded job learns: its own settings, cut after 10 RL steps."""

import json

import pytest

from vapo.presets import preset
from vapo.trainer import train


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learning") / "run"
    train(preset("embedded", seed=0, steps=10, eval_problems=200, device="cpu", threads=1), folder)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_held_out_accuracy_rises_within_ten_steps(lines):
    accuracy = {line["step"]: line["val/accuracy_sampled"] for line in lines if "val/accuracy_sampled" in line}
    assert accuracy[0] <= 0.35
    assert accuracy[10] > 0.5


def test_the_policy_learns_to_reason_longer(lines):
    lengths = {line["step"]: line["response_length/mean"] for line in lines if line["phase"] == "vapo" and line["step"]}
    assert lengths[10] > 1.5 * lengths[1]


def test_value_pretraining_finds_something_to_predict(lines):
    explained = [line["critic/pretrain/vf_explained_var"] for line in lines if line["phase"] == "value_pretraining"]
    assert explained[0] == 0
    assert sum(explained[4:]) / len(explained[4:]) > 0.03
