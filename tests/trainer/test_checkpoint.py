"""What a checkpoint brings back, on any number of ranks, and what a run that dies while writing one leaves."""

from __future__ import annotations

import errno
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_on_ranks, start_alone
from torch import Tensor, nn
from torch.optim import AdamW

from vapo.models import sharding
from vapo.models.checkpoint import (
    latest_checkpoint,
    load_checkpoint,
    read_state,
    save_checkpoint,
)

STATE = {"phase": "vapo", "step": 12, "lr": 1e-6, "rows": [3, 1]}


class Model(nn.Module):
    """Tied weights, a buffer, a parameter that never gets a gradient; 5 rows do not split evenly over ranks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(5, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(1, 3)
        self.register_buffer("count", torch.tensor(seed))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return self.head(hidden)


def step(model: nn.Module, optimizer: AdamW) -> None:
    model(torch.arange(5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def learners(seed: int, *, steps: int = 0, lr: float = 0.01) -> tuple[dict[str, Any], dict[str, Any]]:
    """A policy whose optimiser has taken ``steps`` steps, a critic whose optimiser none; four ranks shard in pairs."""
    models, cpu = {"policy": Model(seed), "critic": Model(seed + 1)}, torch.device("cpu")
    mesh = sharding.device_mesh(cpu, 2 if sharding.world_size() == 4 else 0)
    for model in models.values():
        sharding.shard(model, torch.float32, cpu, mesh=mesh)
    optimizers = {name: AdamW(model.parameters(), lr=lr) for name, model in models.items()}
    for _ in range(steps):
        step(models["policy"], optimizers["policy"])
    return models, optimizers


def save(
    run: Path, models: dict, optimizers: dict, *, name: str = "vapo-12", state: dict = STATE, keep: int = 2
) -> None:
    save_checkpoint(run, name, models=models, optimizers=optimizers, state=state, keep=keep)


def contents(models: dict, optimizers: dict) -> dict[str, Any]:
    """All numbers of models and optimisers, whole."""
    found: dict[str, Any] = {}
    for name, model in models.items():
        found |= {f"{name}.{key}": tensor for key, tensor in model.state_dict().items()}
        for key, parameter in model.named_parameters():
            found |= {f"{name}.{key}.{field}": x for field, x in optimizers[name].state.get(parameter, {}).items()}
        found[f"{name}.groups"] = [
            {key: value for key, value in group.items() if key != "params"} for group in optimizers[name].param_groups
        ]
    return {key: sharding.whole(x) for key, x in found.items()}


def assert_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same bits."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def names(run: Path) -> list[str]:
    return sorted(each.name for each in (run / "checkpoints").iterdir())


def test_everything_comes_back_bit_for_bit(tmp_path: Path) -> None:
    models, optimizers = learners(0, steps=3)
    before = contents(models, optimizers)
    save(tmp_path, models, optimizers)
    assert_equal(contents(models, optimizers), before)

    restored, restored_optimizers = learners(5, steps=1, lr=0.5)
    step(restored["critic"], restored_optimizers["critic"])
    found = latest_checkpoint(tmp_path)
    load_checkpoint(found, models=restored, optimizers=restored_optimizers)
    assert found == tmp_path / "checkpoints" / "vapo-12" and read_state(found) == STATE
    assert_equal(contents(restored, restored_optimizers), before)
    assert "policy.embedding.weight.exp_avg" in before and "policy.unused.weight.exp_avg" not in before
    assert not restored_optimizers["critic"].state, "an optimiser that had not stepped has a state"
    for name in models:
        step(models[name], optimizers[name])
        step(restored[name], restored_optimizers[name])
    assert_equal(contents(restored, restored_optimizers), contents(models, optimizers))


def test_a_model_may_be_read_alone(tmp_path: Path) -> None:
    models, _ = learners(0, steps=1)
    save(tmp_path, models, {})
    fresh = {"critic": Model(8)}
    load_checkpoint(latest_checkpoint(tmp_path), models=fresh, optimizers={})
    assert_equal(fresh["critic"].state_dict(), models["critic"].state_dict())


def save_on_rank(run: str) -> dict[str, Any]:
    models, optimizers = learners(0, steps=2)
    # Rank 0's state is the run's.
    save(Path(run), models, optimizers, state=STATE | {"rank": sharding.rank()})
    return contents(models, optimizers)


def load_on_rank(run: str) -> dict[str, Any]:
    models, optimizers = learners(7, steps=1)
    found = latest_checkpoint(Path(run))
    load_checkpoint(found, models=models, optimizers=optimizers)
    assert read_state(found) == STATE | {"rank": 0}
    return contents(models, optimizers)


@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2), (2, 3), (4, 1), (2, 4)])
def test_another_number_of_ranks_reads_it(tmp_path: Path, writers: int, readers: int) -> None:
    """One stands for a process without a group."""

    def on_ranks(count: int, function: Any) -> list[dict[str, Any]]:
        return [function(str(tmp_path))] if count == 1 else run_on_ranks(count, function, str(tmp_path))

    written = on_ranks(writers, save_on_rank)
    for each in (*written[1:], *on_ranks(readers, load_on_rank)):
        assert_equal(each, written[0])
    assert names(tmp_path) == ["vapo-12"]


def test_the_last_ones_stay(tmp_path: Path) -> None:
    models, optimizers = learners(0)
    for number, name in enumerate(["warm_start-9", "value_pretraining-3", "vapo-2", "vapo-10"]):
        save(tmp_path, models, optimizers, name=name, state={"number": number}, keep=2)
        assert read_state(latest_checkpoint(tmp_path)) == {"number": number}
    assert names(tmp_path) == ["vapo-10", "vapo-2"]
    save(tmp_path, models, optimizers, name="vapo-2", state={"number": 9}, keep=2)
    assert latest_checkpoint(tmp_path).name == "vapo-2" and names(tmp_path) == ["vapo-10", "vapo-2"]
    save(tmp_path, models, optimizers, name="vapo-2", state={"number": 10}, keep=1)
    assert names(tmp_path) == ["vapo-2"] and read_state(latest_checkpoint(tmp_path)) == {"number": 10}


def test_an_incomplete_folder_is_never_used_and_goes_at_the_next_save(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    models, optimizers = learners(0)
    save(tmp_path, models, optimizers, name="vapo-1")
    folder = tmp_path / "checkpoints"
    (folder / "vapo-2").mkdir()
    (folder / "vapo-3").mkdir()
    (folder / "vapo-3" / "state.json").write_text('{"number": 99, "sta')
    (folder / "vapo-4.unfinished").mkdir()
    (folder / "vapo-4.unfinished" / "state.json").write_text('{"number": 99, "state": {}, "groups": {}}')
    assert latest_checkpoint(tmp_path).name == "vapo-1"
    save(tmp_path, models, optimizers, name="vapo-4")
    assert names(tmp_path) == ["vapo-1", "vapo-4"]


def die_while_writing(run: str, call: int, connection: Connection) -> None:
    """Save a checkpoint, train on, and be killed at the ``call``-th flush to disk of the next one."""
    models, optimizers = learners(0, steps=1)
    save(Path(run), models, optimizers, name="vapo-1")
    step(models["policy"], optimizers["policy"])
    original, calls = os.fsync, []

    def die_at_call(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        original(descriptor)

    os.fsync = die_at_call
    save(Path(run), models, optimizers, name="vapo-2")


# The first flush is that of the tensors, the third that of state.json, the fourth the last before the name is given.
@pytest.mark.parametrize("call", [1, 3, 4])
def test_killed_while_writing_the_previous_one_is_used(tmp_path: Path, call: int) -> None:
    process, _ = start_alone(die_while_writing, str(tmp_path), call)
    process.join()
    assert names(tmp_path) == ["vapo-1", "vapo-2.unfinished"]
    models, optimizers = learners(3)
    found = latest_checkpoint(tmp_path)
    load_checkpoint(found, models=models, optimizers=optimizers)
    assert found.name == "vapo-1"
    assert_equal(contents(models, optimizers), contents(*learners(0, steps=1)))
    save(tmp_path, models, optimizers, name="vapo-2")
    assert names(tmp_path) == ["vapo-1", "vapo-2"]


def fail_to_write(run: str, failing_rank: int, place: str) -> tuple[str, str]:
    models, optimizers = learners(0)
    save(Path(run), models, optimizers, name="vapo-1")
    original = os.fsync

    def full(descriptor: int) -> None:
        if place in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(descriptor)

    if sharding.rank() == failing_rank:
        os.fsync = full
    with pytest.raises(OSError) as error:
        save(Path(run), models, optimizers, name="vapo-2")
    return str(error.value), latest_checkpoint(Path(run)).name


@pytest.mark.parametrize(("rank", "place"), [(1, "distcp"), (0, "metadata"), (0, "state.json")])
def test_a_rank_that_cannot_write_stops_all(tmp_path: Path, rank: int, place: str) -> None:
    for message, latest in run_on_ranks(2, fail_to_write, str(tmp_path), rank, place):
        assert "vapo-2 could not be written" in message and "No space left on device" in message
        assert latest == "vapo-1"
    assert names(tmp_path) == ["vapo-1"]


def test_ctrl_c_while_writing_is_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    models, optimizers = learners(0)
    monkeypatch.setattr("os.fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, models, optimizers)
    assert latest_checkpoint(tmp_path) is None


def test_rejects_bad_input(tmp_path: Path) -> None:
    models, optimizers = learners(0, steps=1)
    for settings, message in (
        ({"keep": 0}, "keep must be >= 1; got 0"),
        ({"name": "../x"}, "step_name must be the name of a folder; got '../x'"),
        ({"name": ""}, "step_name must be"),
        ({"state": {"rng": object()}}, "state must fit JSON"),
        ({"state": {"loss": float("nan")}}, "state must fit JSON"),
    ):
        with pytest.raises(ValueError, match=message):
            save(tmp_path, models, optimizers, **settings)
    with pytest.raises(ValueError, match="optimizers must have the names of models"):
        save(tmp_path, {}, optimizers)
    assert not (tmp_path / "checkpoints").exists()

    save(tmp_path, models, {"policy": optimizers["policy"]})
    found = latest_checkpoint(tmp_path)
    wide = Model(0)
    wide.layers[0] = nn.Linear(4, 6)
    two_groups = AdamW([{"params": [each]} for each in models["policy"].parameters()])
    for loaded, loaded_optimizers, what in (
        ({"policy": wide}, {}, "models.policy.layers.0.bias"),
        ({"actor": Model(0)}, {}, "models.actor"),
        ({"policy": nn.Linear(2, 2)}, {}, "models.policy.bias"),
        (models, {"critic": optimizers["critic"]}, "critic"),
        (models, {"policy": two_groups}, "policy"),
    ):
        with pytest.raises(ValueError, match=rf"must fit these models and optimizers; {what}"):
            load_checkpoint(found, models=loaded, optimizers=loaded_optimizers)
    for call in (read_state, lambda folder: load_checkpoint(folder, models=models, optimizers={})):
        with pytest.raises(ValueError, match=r"checkpoint must be a folder with a complete state\.json"):
            call(tmp_path)


def test_what_is_fused_stays_that_of_the_loading_run(tmp_path):
    models, optimizers = learners(0, steps=1)
    save(tmp_path, models, optimizers)
    optimizers["policy"].param_groups[0] |= {"fused": True, "lr": 0.5}
    load_checkpoint(latest_checkpoint(tmp_path), models=models, optimizers=optimizers)
    group = optimizers["policy"].param_groups[0]
    assert group["fused"] is True and group["lr"] == 0.01
