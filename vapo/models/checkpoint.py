"""Checkpoints of a run: models and optimisers as torch.distributed.checkpoint writes them, all else as JSON beside.

A checkpoint is written to a folder that gets its final name when it is complete. A run that is killed, or that finds
the disk full, therefore keeps the earlier ones. A checkpoint can be read on any number of ranks.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_model_state_dict
from torch.optim import Optimizer

from vapo.models.sharding import on_first_rank

FOLDER = "checkpoints"
# Written last: a folder without it is no checkpoint.
STATE = "state.json"
UNFINISHED = ".unfinished"


def save_checkpoint(
    run: Path,
    step_name: str,
    *,
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    state: Mapping[str, Any],
    keep: int,
) -> None:
    """Write ``run/checkpoints/step_name`` and remove the oldest checkpoints beyond ``keep``; collective.

    The files are on the disk before the folder gets its name. The disk must have room for ``keep`` + 1 checkpoints.

    Args:
        run: The run's folder.
        step_name: Name of the checkpoint's folder, such as "vapo-12"; a checkpoint of that name is replaced.
        models: Name to model, sharded or not.
        optimizers: Name to optimiser; each belongs to the model of the same name.
        state: What else the run needs to go on, fit for JSON; that of rank 0 is written.
        keep: How many of the newest checkpoints stay, at least 1.

    Raises:
        ValueError: If ``keep`` is below 1, ``step_name`` is no name of a folder, an optimiser has no model of its name,
            or ``state`` does not fit JSON.
        OSError: If the checkpoint cannot be written, on every rank. The earlier ones are all there, and complete.
    """
    if keep < 1:
        raise ValueError(f"keep must be >= 1; got {keep}")
    if not step_name or Path(step_name).name != step_name or step_name.endswith(UNFINISHED):
        raise ValueError(f"step_name must be the name of a folder; got {step_name!r}")
    if not optimizers.keys() <= models.keys():
        raise ValueError(f"optimizers must have the names of models, {sorted(models)}; got {sorted(optimizers)}")
    # An optimiser that has not stepped has no state; torch would have it take a step to get one.
    stepped = {name: each for name, each in optimizers.items() if each.state}
    tensors = {
        "models": {name: get_model_state_dict(model) for name, model in models.items()},
        "optimizers": {name: get_optimizer_state_dict(models[name], each)["state"] for name, each in stepped.items()},
    }
    groups = {name: [_without_parameters(group) for group in each.param_groups] for name, each in optimizers.items()}
    content = {"groups": groups, "state": dict(state)}
    try:
        json.dumps(content, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"state must fit JSON; {error}") from None
    folder = Path(run) / FOLDER
    final, unfinished = folder / step_name, folder / f"{step_name}{UNFINISHED}"
    try:
        on_first_rank(lambda: _start(folder, unfinished))
        with _quietly():
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(unfinished))
        on_first_rank(lambda: _finish(unfinished, final, content))
    except (OSError, RuntimeError, CheckpointException) as error:
        on_first_rank(lambda: shutil.rmtree(unfinished, ignore_errors=True))
        raise _write_error(final, error) from error
    on_first_rank(lambda: _remove_old(folder, keep))


def latest_checkpoint(run: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None where there is none."""
    complete = _complete(Path(run) / FOLDER)
    return complete[-1] if complete else None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The ``state`` that a checkpoint was saved with.

    Raises:
        ValueError: If the folder holds no complete checkpoint.
    """
    return _content(checkpoint)["state"]


def load_checkpoint(checkpoint: Path, *, models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]) -> None:
    """Load the weights and the optimisers' states of a checkpoint; collective.

    Args:
        checkpoint: As `latest_checkpoint` gives it; written by any number of ranks.
        models: Name to model, sharded or not, of the same shapes as when it was saved. Others in the checkpoint are
            ignored.
        optimizers: Name to optimiser over the parameters of the model of that name. It loses its own state and the
            gradients; one that had not stepped when it was saved is as new.

    Raises:
        ValueError: If the folder holds no complete checkpoint, or one that does not fit these models and optimisers.
    """
    groups = _content(checkpoint)["groups"]
    reader = dcp.FileSystemReader(checkpoint)
    saved = reader.read_metadata().state_dict_metadata
    weights = {name: get_model_state_dict(model) for name, model in models.items()}
    states = {name: _blank_state(models[name], each, f"optimizers.{name}", saved) for name, each in optimizers.items()}
    wanted = {"models": weights, "optimizers": states}
    unmatched = _unmatched(saved, wanted)
    unmatched |= {name for name, each in optimizers.items() if len(groups.get(name, ())) != len(each.param_groups)}
    if unmatched:
        first, *others = sorted(unmatched)
        raise ValueError(f"{checkpoint} must fit these models and optimizers; {first} and {len(others)} others do not")
    with _quietly():
        dcp.load(wanted, storage_reader=reader)
    for name, model in models.items():
        set_model_state_dict(model, weights[name])
    for name, optimizer in optimizers.items():
        for group, stored in zip(optimizer.param_groups, groups[name], strict=True):
            # What is fused depends on this run's device.
            stored = {key: value for key, value in stored.items() if key != "fused"}
            # JSON has no tuples.
            group |= {key: tuple(value) if isinstance(value, list) else value for key, value in stored.items()}


@contextmanager
def _quietly() -> Iterator[None]:
    """Without torch's warning that a process without a group saves and loads alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _start(folder: Path, unfinished: Path) -> None:
    """Make the folder to write to; remove what a killed run left."""
    folder.mkdir(parents=True, exist_ok=True)
    complete = _complete(folder)
    for each in folder.iterdir():
        if each.is_dir() and each not in complete:
            shutil.rmtree(each)
    unfinished.mkdir()


def _finish(unfinished: Path, final: Path, content: dict[str, Any]) -> None:
    """Write the file that marks the folder as complete and, once all is on the disk, give the folder its name."""
    complete = _complete(final.parent)
    number = _content(complete[-1])["number"] + 1 if complete else 1
    with (unfinished / STATE).open("w", encoding="utf-8") as file:
        json.dump({"number": number, **content}, file)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(unfinished)
    replaced = final.with_name(f"{final.name}.replaced{UNFINISHED}")
    if final.exists():
        final.rename(replaced)
    unfinished.rename(final)
    _sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_error(final: Path, error: BaseException) -> BaseException:
    """What to raise for a failed write: the first cause, on whichever rank, in one sentence."""
    if isinstance(error, CheckpointException):
        causes = [cause for cause, _ in error.failures.values()]
        error = next((each for each in causes if isinstance(each, KeyboardInterrupt)), causes[0])
    if isinstance(error, KeyboardInterrupt):
        return error
    return OSError(getattr(error, "errno", None), f"the checkpoint {final} could not be written: {error}")


def _remove_old(folder: Path, keep: int) -> None:
    for each in _complete(folder)[:-keep]:
        # First the file that marks it as complete: half of a checkpoint must not look like one.
        (each / STATE).unlink()
        shutil.rmtree(each)


def _complete(folder: Path) -> list[Path]:
    """Complete checkpoints, the oldest first."""
    numbers = {}
    for each in folder.iterdir() if folder.is_dir() else ():
        if each.is_dir() and not each.name.endswith(UNFINISHED):
            with suppress(ValueError):
                numbers[each] = _content(each)["number"]
    return sorted(numbers, key=numbers.__getitem__)


def _content(checkpoint: Path) -> dict[str, Any]:
    try:
        return json.loads((Path(checkpoint) / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ValueError(f"checkpoint must be a folder with a complete {STATE}; got {checkpoint}") from None


def _blank_state(model: nn.Module, optimizer: Optimizer, prefix: str, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The optimiser's own tensors, by the names of their parameters, to read a saved state into.

    torch has an optimiser without a state take a step of zeros, which gives one to every parameter. Those that had none
    when they were saved, because they never had a gradient or the optimiser never stepped, lose it again. That and
    reading in place are instead of set_optimizer_state_dict, which torch 2.7 has for complete states only.
    """
    optimizer.state.clear()
    optimizer.zero_grad()
    state = get_optimizer_state_dict(model, optimizer)["state"]
    for key, parameter in model.named_parameters():
        if f"{prefix}.{key}.step" not in saved:
            optimizer.state.pop(parameter, None)
            state.pop(key, None)
    return state


def _unmatched(saved: Mapping[str, Any], wanted: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Tensors of the ``wanted`` models and optimisers that only one side has, or both in different shapes."""
    tensors = _by_name(wanted)
    mine = tuple(f"{kind}.{name}." for kind, each in wanted.items() for name in each)
    unmatched = {key for key in saved if key.startswith(mine)} ^ tensors.keys()
    return unmatched | {key for key in saved.keys() & tensors.keys() if saved[key].size != tensors[key].shape}


def _by_name(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """The tensors of nested dicts under their whole names, as a checkpoint has them."""
    tensors: dict[str, Tensor] = {}
    for key, each in tree.items():
        tensors |= _by_name(each, f"{prefix}{key}.") if isinstance(each, Mapping) else {f"{prefix}{key}": each}
    return tensors


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
