"""A run interrupted anywhere and resumed ends as one that was not: the same record and weights, bit for bit."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from training_runs import LIVELY, assert_lively, assert_same_result, lines_without_times

import vapo.trainer
from vapo.config import Config
from vapo.learning.learner import Learner
from vapo.models.load import tiny_policy
from vapo.presets import PRESETS
from vapo.trainer import train

STEPS = {"warm_start": "warm_start_step", "value_pretraining": "pretraining_step", "vapo": "vapo_step"}
ROWS = "".join(f'{{"prompt": "{number} +1 =", "answer": "0"}}\n' for number in range(8))
REWARD_FUNCTION = """
import zlib

def score(completion, answer, prompt, **row):
    return {"score": zlib.crc32(f"{prompt}{completion}".encode()) % 3, "is_correct": len(completion) % 4 > 0}
"""


class Stopped(Exception):
    """Stands for whatever ends a run."""


pytestmark = pytest.mark.usefixtures("lively_runs")


@pytest.fixture
def settings(small_settings):
    """Two steps of every phase, and a checkpoint after each."""
    return small_settings | LIVELY


@pytest.fixture
def rows_settings(settings, tmp_path, task):
    """The same on seven training rows of a file, ``sums.jsonl``, with a model and a reward function from files."""
    model, rows, reward = tmp_path / "model", tmp_path / "sums.jsonl", tmp_path / "reward.py"
    tiny_policy(task.tokenizer, seed=0).save_pretrained(model)
    task.tokenizer.save_pretrained(model)
    rows.write_text(ROWS)
    reward.write_text(REWARD_FUNCTION)
    files = {"task": str(rows), "model": str(model), "reward": f"{reward}:score"}
    return settings | files | {"num_prompts": 3, "steps": 4, "warm_start_steps": 0, "warm_start_clean_steps": 0}


class Interruptions:
    """Stops a run once at each point: a step is done but not recorded, recorded but not saved, or all is done."""

    def __init__(self, monkeypatch, only: set[tuple[str, str, int]] | None = None) -> None:
        self.only, self.met = only, []
        for phase, name in STEPS.items():
            function = getattr(vapo.trainer, name)
            monkeypatch.setattr(vapo.trainer, name, partial(self._step_and_stop, phase, function))
        save, export = Learner.save, Learner.export

        def save_or_stop(learner, folder, config):
            self._stop_at("before saving", learner.phase, learner.step)
            save(learner, folder, config)

        def export_and_stop(learner, folder):
            export(learner, folder)
            self._stop_at("exported", learner.phase, learner.step)

        monkeypatch.setattr(Learner, "save", save_or_stop)
        monkeypatch.setattr(Learner, "export", export_and_stop)

    def run(self, config: Config, folder: Path) -> dict[str, float]:
        """Resume a run as often as it stops; returns its last held-out metrics."""
        while True:
            count = len(self.met)
            try:
                return train(config, folder, resume=count > 0)
            except Stopped:
                assert len(self.met) == count + 1

    def _step_and_stop(self, phase, function, learner, step, config):
        found = function(learner, step, config)
        self._stop_at("step done", phase, step)
        return found

    def _stop_at(self, *point) -> None:
        if point not in self.met and (self.only is None or point in self.only):
            self.met.append(point)
            raise Stopped(point)


@pytest.mark.parametrize(
    ("preset", "changes", "num_points"),
    [
        # Two steps of each of three phases, a checkpoint after each, and the end.
        ("vapo", {}, 6 + 6 + 1),
        # Passes and mini-batches; the middle of a phase is kept, but not every step.
        ("vapo", {"actor_epochs": 2, "critic_epochs": 3, "checkpoint_every": 2, "warm_start_steps": 3}, 7 + 4 + 1),
        ("ppo", {"kl_weight": 0.1, "kl_reward_weight": 0.1, "value_clip": 0.1}, 4 + 4 + 1),
        ("dapo", {"overlong_buffer": 3, "max_sampling_rounds": 3, "warm_start_steps": 0}, 2 + 2 + 1),
    ],
)
def test_from_everywhere(settings, tmp_path, monkeypatch, preset, changes, num_points):
    config = Config(**settings | PRESETS[preset] | changes)
    after = train(config, tmp_path / "whole")
    assert_lively(tmp_path / "whole")
    interruptions = Interruptions(monkeypatch)
    assert interruptions.run(config, tmp_path / "broken") == after
    assert len(interruptions.met) == num_points, interruptions.met
    assert_same_result(tmp_path / "broken", tmp_path / "whole")


def test_from_every_position_in_the_data(rows_settings, tmp_path, monkeypatch):
    """Rows of a file are sampled without replacement: seven of them, by threes, so that epochs end within steps."""
    config = Config(**rows_settings)
    train(config, tmp_path / "whole")
    assert_lively(tmp_path / "whole")
    points = {("step done", "value_pretraining", 2), ("step done", "vapo", 2), ("before saving", "vapo", 3)}
    (interruptions := Interruptions(monkeypatch, points)).run(config, tmp_path / "broken")
    assert set(interruptions.met) == points
    assert_same_result(tmp_path / "broken", tmp_path / "whole")


def test_an_early_end_of_value_pretraining_is_one_when_it_is_resumed(settings, tmp_path, monkeypatch):
    config = Config(**settings | {"pretraining_steps": 3, "pretraining_target": 0.01})
    step_function, explained = vapo.trainer.pretraining_step, {1: -0.5, 2: 0.5, 3: 0.6}

    def pretraining_step(learner, step, config):
        report = step_function(learner, step, config)
        report.metrics["critic/pretrain/vf_explained_var"] = explained[step]
        return report

    monkeypatch.setattr(vapo.trainer, "pretraining_step", pretraining_step)
    train(config, tmp_path / "whole")
    pretraining = {("step done", "value_pretraining", 2), ("before saving", "value_pretraining", 2)}
    points = pretraining | {("step done", "vapo", 1)}
    (interruptions := Interruptions(monkeypatch, points)).run(config, tmp_path / "broken")
    assert set(interruptions.met) == points
    assert_same_result(tmp_path / "broken", tmp_path / "whole")
    assert [each["step"] for each in lines_without_times(tmp_path / "broken")] == [1, 2, 1, 2, 0, 1, 2]


def test_a_critic_pretrained_alone_goes_on_and_hands_over(settings, tmp_path, monkeypatch):
    config = Config(**settings)
    train(config, tmp_path / "whole", last_phase="value_pretraining")
    assert not list((tmp_path / "whole" / "checkpoints").glob("2-vapo-*"))
    broken = tmp_path / "broken"
    Interruptions(monkeypatch, {("step done", "value_pretraining", 2)})
    with pytest.raises(Stopped):
        train(config, broken, last_phase="value_pretraining")
    train(config, broken, resume=True, last_phase="value_pretraining")
    assert_same_result(broken, tmp_path / "whole")
    # RL may follow in the same folder, and is that of a run that never paused.
    train(config, broken, resume=True)
    train(config, tmp_path / "all")
    assert_same_result(broken, tmp_path / "all")


def test_more_steps_go_on_where_the_run_ended(settings, tmp_path):
    config = Config(**settings)
    after = train(config, tmp_path / "long")
    folder = tmp_path / "short"
    train(replace(config, steps=1), folder)
    assert json.loads((folder / "config.json").read_text())["steps"] == 1
    assert train(config, folder, resume=True) == after
    assert json.loads((folder / "config.json").read_text())["steps"] == 2
    assert_same_result(folder, tmp_path / "long")
    # Once more: there is nothing left to do, and the last evaluation is still known.
    assert train(config, folder, resume=True) == after
    assert_same_result(folder, tmp_path / "long")


def test_a_run_from_another_device_goes_on_with_samples_of_its_own(settings, tmp_path):
    config = Config(**settings)
    train(replace(config, steps=1), tmp_path / "run")
    state = tmp_path / "run" / "checkpoints" / "2-vapo-000001" / "state.json"
    content = json.loads(state.read_text())
    # As a GPU leaves it: its generators have a state of 16 bytes.
    content["state"]["device"] = "cuda"
    content["state"]["generators"][0]["sampling"] = "AAAAAAAAAAAAAAAAAAAAAA=="
    state.write_text(json.dumps(content))
    train(config, tmp_path / "run", resume=True)
    assert lines_without_times(tmp_path / "run")[-1]["step"] == 2


def test_only_a_run_can_be_resumed(settings, tmp_path):
    with pytest.raises(ValueError, match=r"run must hold a run to resume; got no config\.json there"):
        train(Config(**settings), tmp_path / "run", resume=True)
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_resumed_on_other_data(rows_settings, tmp_path):
    """An embedded task has no data; a file's rows are recognised."""
    config = Config(**rows_settings | {"steps": 1, "value_pretraining": False})
    train(config, tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "before")
    (tmp_path / "sums.jsonl").write_text(ROWS.replace("+1", "+2"))
    with pytest.raises(ValueError, match="must hold the same prompts as when the run was saved"):
        train(replace(config, steps=2), tmp_path / "run", resume=True)
    assert_same_result(tmp_path / "run", tmp_path / "before")
    assert torch.get_num_threads() == 1
