"""Weights of sharded models: read and written a tensor at a time, so that no rank ever holds a model whole.

A model is built with its parameters on the meta device, sharded, and then filled by what `fill_later` left for it. On
one rank without a process group models are loaded and saved by transformers alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import snapshot_download, split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from vapo.models.sharding import architecture, full_state_dict, rank, whole


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Let every parameter that is made in the block be without data; buffers have theirs."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        # One that is there already may be tied to another: it must stay the same object.
        if parameter is not None and not parameter.is_meta:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    nn.Module.register_parameter = register_on_meta
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        nn.Module.register_parameter = register


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a model, each tied tensor under its first name alone."""
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - dict(model.named_parameters()).keys()
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def keeps_names(model: PreTrainedModel) -> bool:
    """Whether transformers writes the weights of this architecture under the names that they have."""
    names = {name: torch.empty(tensor.shape, device="meta") for name, tensor in model.state_dict().items()}
    return revert_weight_conversion(model, names).keys() == names.keys()


def weight_files(source: str | Path) -> Path | None:
    """The folder of a model's safetensors files, downloaded if ``source`` is an id of the hub; None if it has none."""
    if not Path(source).is_dir():
        source = snapshot_download(str(source), allow_patterns=["*.json", "model*.safetensors"])
    return Path(source) if list(Path(source).glob("*.safetensors")) else None


def reader_of(model: PreTrainedModel, folder: Path, renamed: Mapping[str, str], may_lack: set[str]) -> Callable | None:
    """A function that reads a rank's shards of every tensor from safetensors files; None if they do not fit by name.

    Args:
        model: Empty, not yet sharded.
        folder: With the files.
        renamed: Names in the model to names in the files, where they differ.
        may_lack: Names in the model of tensors that are 0 where the files have none.
    """
    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    wanted = {name: renamed.get(name, name) for name in own_tensors(model)}
    lacking = {name for name, stored in wanted.items() if stored not in found}
    names = {name: stored for name, stored in wanted.items() if name not in lacking}
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    fits = all(found[s].size == shapes[n] and len(found[s].chunks) == 1 for n, s in names.items())
    if not (fits and lacking <= may_lack and keeps_names(model)):
        return None

    def read(model: nn.Module) -> None:
        tensors = model.state_dict()
        for name in lacking:
            tensors[name].zero_()
        wanted = {stored: tensors[name] for name, stored in names.items()}
        dcp.load(wanted, storage_reader=HuggingFaceStorageReader(str(folder)))

    return read


def save_model(model: PreTrainedModel, folder: Path, max_file_size: str | int = "5GB") -> None:
    """Write a model as transformers' folder: of a sharded one, rank 0 holds as much as a file. Collective.

    Raises:
        OSError, SafetensorError: On rank 0, after the last tensor, if it could not write.
    """
    if not keeps_names(model):
        state = full_state_dict(model)
        if rank() == 0:
            model.save_pretrained(folder, state_dict=state)
        return
    tensors = own_tensors(model)
    meta = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    split = split_torch_state_dict_into_shards(meta, max_shard_size=max_file_size)
    is_writer, failure = rank() == 0, None
    if is_writer:
        failure = _attempt(lambda: _write_configs(model, folder, split), failure)
    for file, names in split.filename_to_tensors.items():
        content = {}
        for name in names:
            tensor = whole(tensors[name])
            if is_writer and failure is None:
                content[name] = tensor.cpu().contiguous()
        if is_writer:
            failure = _attempt(lambda: save_file(content, folder / file, {"format": "pt"}), failure)  # noqa: B023
    if failure is not None:
        raise failure


def _attempt(action: Callable[[], None], failure: Exception | None) -> Exception | None:
    """Act unless something failed before: the other ranks still wait for this one in the collectives to come."""
    if failure is None:
        try:
            action()
        except Exception as error:
            return error
    return failure


def _write_configs(model: PreTrainedModel, folder: Path, split) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    model.config.architectures = [architecture(model)]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
