"""The embedded job learns: its own settings, cut after 10 RL steps."""

import json

import pytest

from vapo.presets import preset
from vapo.trainer import train


def test_held_out_accuracy_rises_within_ten_steps(tmp_path):
    train(preset("vapo", seed=0, steps=10, eval_problems=200, device="cpu", threads=1), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]

    accuracy = {line["step"]: line["val/accuracy_sampled"] for line in lines if "val/accuracy_sampled" in line}
    # Where it starts depends on how the machine rounds (0.2 to 0.4 were seen); that it rises does not.
    assert accuracy[10] > accuracy[0] + 0.25

    # It learns to reason to the end instead of giving up.
    lengths = {line["step"]: line["response_length/mean"] for line in lines if line["phase"] == "vapo" and line["step"]}
    assert lengths[10] > 1.5 * lengths[1]

    # Value pretraining finds in the text what predicts the reward.
    explained = [line["critic/pretrain/vf_explained_var"] for line in lines if line["phase"] == "value_pretraining"]
    assert explained[0] == pytest.approx(0, abs=1e-6)
    assert sum(explained[4:]) / len(explained[4:]) > 0.03
