"""Checkpoints of a run: models and optimisers as torch.distributed.checkpoint writes them, the rest as JSON beside.

A checkpoint is written in a folder of its own that gets its name when it is complete, so a run that is killed at any
moment, or finds its disk full, has the earlier ones. It may be read on any number of ranks.
"""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.optim import Optimizer

from vapo.models.sharding import on_first_rank

FOLDER = "checkpoints"
# Written last: a folder without it is no checkpoint.
STATE = "state.json"
UNFINISHED = ".unfinished"

OptimizerState = dict[nn.Parameter, dict[str, Tensor]]


def save_checkpoint(
    run: Path,
    step_name: str,
    *,
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    state: Mapping[str, Any],
    keep: int,
) -> None:
    """Write ``run/checkpoints/step_name`` and remove the oldest ones beyond ``keep``; collective.

    The files are on the disk when the folder gets its name. Room for one checkpoint more than ``keep`` is needed.

    Args:
        run: The run's folder.
        step_name: Name of the checkpoint's folder, such as "vapo-12"; one of that name is replaced.
        models: Name to model, sharded or not.
        optimizers: Name to optimiser; each belongs to the model of the same name.
        state: What else the run needs to go on, fit for JSON; that of rank 0 is written.
        keep: How many of the newest checkpoints stay, at least 1.

    Raises:
        ValueError: If ``keep`` is below 1, ``step_name`` is no name of a folder, an optimiser has no model of its name,
            or ``state`` does not fit JSON.
        OSError: If the checkpoint cannot be written, on every rank. The earlier ones are all there, and complete.
    """
    _check(step_name, models, optimizers, keep)
    content = {"groups": _parameter_groups(optimizers), "state": dict(state)}
    _json_text(content)
    folder = Path(run) / FOLDER
    final, unfinished = folder / step_name, folder / f"{step_name}{UNFINISHED}"
    tensors = _model_tensors(models) | _optimizer_tensors(
        models, {name: each.state for name, each in optimizers.items()}
    )
    try:
        on_first_rank(lambda: _start(folder, unfinished))
        with _quietly():
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(unfinished), no_dist=not dist.is_initialized())
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
    """Put the weights and the optimisers' states of a checkpoint in place; collective.

    Args:
        checkpoint: As `latest_checkpoint` gives it; written by any number of ranks.
        models: Name to model, sharded or not, of the same shapes as when it was saved. Others in the checkpoint are
            left there.
        optimizers: Name to optimiser over the parameters of the model of that name. An optimiser that had not stepped
            when it was saved is as new.

    Raises:
        ValueError: If the folder holds no complete checkpoint, or one that does not fit these models and optimisers.
    """
    groups = _content(checkpoint)["groups"]
    reader = dcp.FileSystemReader(checkpoint)
    saved = reader.read_metadata().state_dict_metadata
    weights = _model_tensors(models)
    states = {name: _blank_state(saved, name, models[name]) for name in optimizers}
    wanted = weights | _optimizer_tensors(models, states)
    _check_fit(checkpoint, saved, wanted, models, optimizers, groups)
    with _quietly():
        dcp.load(wanted, storage_reader=reader, no_dist=not dist.is_initialized())
    for name, model in models.items():
        prefix = _model_prefix(name)
        mine = {key.removeprefix(prefix): wanted[key] for key in weights if key.startswith(prefix)}
        set_model_state_dict(model, mine)
    for name, optimizer in optimizers.items():
        _load_optimizer(optimizer, states[name], groups[name])


def generator_states(generators: Mapping[str, random.Random | torch.Generator]) -> dict[str, Any]:
    """States of sources of randomness, fit for JSON.

    Example:
        >>> before = generator_states({"data": (rng := random.Random(0))})
        >>> drawn = rng.random()
        >>> restore_generators({"data": rng}, before)
        >>> rng.random() == drawn
        True
    """
    return {name: _generator_state(generator) for name, generator in generators.items()}


def restore_generators(generators: Mapping[str, random.Random | torch.Generator], states: Mapping[str, Any]) -> None:
    """Put sources of randomness back to where `generator_states` found them.

    Raises:
        ValueError: If a state is missing.
    """
    for name, generator in generators.items():
        if name not in states:
            raise ValueError(f"states must hold {name!r}; got {sorted(states)}")
        state = states[name]
        if isinstance(generator, random.Random):
            generator.setstate((state[0], tuple(state[1]), state[2]))
        else:
            generator.set_state(torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8))


def _generator_state(generator: random.Random | torch.Generator) -> Any:
    if isinstance(generator, random.Random):
        version, numbers, gauss = generator.getstate()
        return [version, list(numbers), gauss]
    return base64.b64encode(generator.get_state().numpy().tobytes()).decode()


def _check(step_name: str, models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer], keep: int) -> None:
    if keep < 1:
        raise ValueError(f"keep must be >= 1; got {keep}")
    if not step_name or Path(step_name).name != step_name or step_name.endswith(UNFINISHED):
        raise ValueError(f"step_name must be the name of a folder; got {step_name!r}")
    for name in optimizers:
        if name not in models:
            raise ValueError(f"optimizers must have the names of models, {sorted(models)}; got {name!r}")


@contextmanager
def _quietly() -> Iterator[None]:
    """Without torch's warning that no process group is one process: it is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _json_text(content: Mapping[str, Any]) -> str:
    try:
        return json.dumps(content, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"state must fit JSON; {error}") from None


def _start(folder: Path, unfinished: Path) -> None:
    """Make the folder to write in; clear away what a killed run left."""
    folder.mkdir(parents=True, exist_ok=True)
    complete = _complete(folder)
    for each in folder.iterdir():
        if each.is_dir() and each not in complete:
            shutil.rmtree(each)
    unfinished.mkdir()


def _finish(unfinished: Path, final: Path, content: dict[str, Any]) -> None:
    """Mark the folder as complete and, when the disk holds all of it, give it its name."""
    complete = _complete(final.parent)
    number = _content(complete[-1])["number"] + 1 if complete else 1
    with (unfinished / STATE).open("w", encoding="utf-8") as file:
        file.write(_json_text({"number": number, **content}))
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
    """What to raise for a failed write: what went wrong first, on whichever rank, in one line."""
    if isinstance(error, CheckpointException):
        causes = [cause for cause, _ in error.failures.values()]
        error = next((each for each in causes if isinstance(each, KeyboardInterrupt)), causes[0])
    if isinstance(error, KeyboardInterrupt):
        return error
    return OSError(getattr(error, "errno", None), f"the checkpoint {final} could not be written: {error}")


def _remove_old(folder: Path, keep: int) -> None:
    for each in _complete(folder)[:-keep]:
        # Without its mark first: half of a checkpoint must not look like one.
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
        raise ValueError(f"checkpoint must be a folder with a whole {STATE}; got {checkpoint}") from None


def _model_prefix(name: str) -> str:
    return f"models.{name}."


def _optimizer_prefix(name: str) -> str:
    return f"optimizers.{name}."


def _model_tensors(models: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    return {
        f"{_model_prefix(name)}{key}": tensor
        for name, model in models.items()
        for key, tensor in get_model_state_dict(model).items()
    }


def _optimizer_tensors(models: Mapping[str, nn.Module], states: Mapping[str, OptimizerState]) -> dict[str, Tensor]:
    """The optimisers' tensors under the names of their parameters.

    torch's get_optimizer_state_dict would have an optimiser that has not stepped take a step.
    """
    return {
        f"{_optimizer_prefix(name)}{parameter_name}.{field}": tensor
        for name, state in states.items()
        for parameter_name, parameter in models[name].named_parameters()
        for field, tensor in state.get(parameter, {}).items()
    }


def _blank_state(saved: Mapping[str, Any], name: str, model: nn.Module) -> OptimizerState:
    """Tensors to read an optimiser's state into; one as large as its parameter is sharded as that is."""
    owners = {f"{_optimizer_prefix(name)}{key}": parameter for key, parameter in model.named_parameters()}
    blank: OptimizerState = {}
    for key, stored in saved.items():
        owner, _, field = key.rpartition(".")
        if owner in owners:
            parameter, dtype = owners[owner], stored.properties.dtype
            is_scalar = len(stored.size) == 0
            tensor = torch.zeros((), dtype=dtype) if is_scalar else torch.zeros_like(parameter, dtype=dtype)
            blank.setdefault(parameter, {})[field] = tensor
    return blank


def _check_fit(
    checkpoint: Path,
    saved: Mapping[str, Any],
    wanted: Mapping[str, Tensor],
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    groups: Mapping[str, list[dict[str, Any]]],
) -> None:
    prefixes = tuple(map(_model_prefix, models)) + tuple(map(_optimizer_prefix, optimizers))
    unmatched = {key for key in saved if key.startswith(prefixes)} ^ wanted.keys()
    unmatched |= {key for key in saved.keys() & wanted.keys() if saved[key].size != wanted[key].shape}
    unmatched |= {name for name, each in optimizers.items() if len(groups.get(name, ())) != len(each.param_groups)}
    if unmatched:
        first, *others = sorted(unmatched)
        raise ValueError(f"{checkpoint} must fit these models and optimizers; {first} and {len(others)} others do not")


def _parameter_groups(optimizers: Mapping[str, Optimizer]) -> dict[str, list[dict[str, Any]]]:
    """Learning rates and all else that an optimiser keeps for each group of parameters."""
    return {name: [_without_parameters(group) for group in each.param_groups] for name, each in optimizers.items()}


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _load_optimizer(optimizer: Optimizer, state: OptimizerState, groups: list[dict[str, Any]]) -> None:
    content = optimizer.state_dict()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    content["state"] = {number: state[each] for number, each in enumerate(parameters) if each in state}
    for group, stored in zip(content["param_groups"], groups, strict=True):
        group |= {key: tuple(value) if isinstance(value, list) else value for key, value in stored.items()}
    optimizer.load_state_dict(content)
