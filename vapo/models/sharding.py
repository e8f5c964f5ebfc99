"""Many ranks: the process group, models sharded with FSDP2, and sums, maxima and rows over all ranks.

Without a process group there is one rank, and no function here communicates or shards.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

# Ranks wait for the responses and verifiers of the slowest one, much longer than torch's default.
TIMEOUT = timedelta(hours=2)

T = TypeVar("T")


@contextmanager
def distributed(device: torch.device, alone: bool) -> Iterator[torch.device]:
    """Join the process group that torchrun describes in the environment, and leave it at the end of the block.

    Within another such block nothing is joined or left.

    Args:
        device: "cuda" takes the GPU numbered LOCAL_RANK and NCCL, with gloo for tensors on the CPU; "cpu" takes gloo.
        alone: Whether to form a group of one process without torchrun: mixed precision needs sharding.

    Yields:
        This rank's device.
    """
    is_inner = dist.is_initialized()
    if not is_inner:
        _join(device, alone)
    try:
        yield torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
    finally:
        if not is_inner and dist.is_initialized():
            dist.destroy_process_group()


def rank() -> int:
    """Number of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def device_mesh(device: torch.device, shard_ranks: int = 0) -> DeviceMesh | None:
    """The ranks as FSDP2 lays them out: one row that shards, or with ``shard_ranks`` replicas of such rows (HSDP).

    Rows are consecutive ranks, which torchrun puts on one node as far as they fit. Models of one run share a mesh, and
    with it its communicators.

    Args:
        device: Where the shards will be.
        shard_ranks: Ranks that hold one copy of a model together; 0: all.

    Returns:
        The mesh; None without a process group.

    Raises:
        ValueError: If ``shard_ranks`` does not divide the number of ranks.
    """
    check_shard_ranks(shard_ranks, world_size())
    if not dist.is_initialized():
        return None
    if shard_ranks in (0, world_size()):
        return init_device_mesh(device.type, (world_size(),))
    return init_device_mesh(
        device.type, (world_size() // shard_ranks, shard_ranks), mesh_dim_names=("replicate", "shard")
    )


def check_shard_ranks(shard_ranks: int, ranks: int) -> None:
    """Refuse rows that leave ranks over.

    Raises:
        ValueError: If ``shard_ranks``, where it is not 0, does not divide the number of ranks.
    """
    if shard_ranks and ranks % shard_ranks:
        raise ValueError(f"shard_ranks must divide the number of ranks, {ranks}; got {shard_ranks}")


def shard(
    model: nn.Module,
    compute_dtype: torch.dtype,
    device: torch.device,
    exact: nn.Module | None = None,
    mesh: DeviceMesh | None = None,
) -> None:
    """Shard the parameters of a model over the ranks, in place: each decoder layer by itself, the rest with the root.

    Parameters, gradients and optimiser states are float32 shards (DTensors). Gradients are summed, not averaged, over
    ranks, in float32: a loss divided by the counts of all ranks together has the gradient of the whole step. An empty
    model is filled. Without a process group the model only moves to the device.

    Args:
        model: A transformers model whose forward runs its layers one after the other; its parameters float32, equal on
            all ranks. Build its optimiser afterwards.
        compute_dtype: Dtype in which the layers compute; parameters are cast to it when they are gathered.
        device: Where the shards go; a model that is still on the CPU goes there a layer at a time.
        exact: A module whose parameters stay float32 when they are gathered, such as a scalar head.
        mesh: From :func:`device_mesh`; None: all ranks share one copy.

    Raises:
        ValueError: If a parameter that trains is not float32, or torch is too old.
    """
    if not dist.is_initialized():
        model.to(device)
        return
    if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        raise ValueError(
            f"several ranks and bfloat16 need a torch that sums gradients in FSDP2; got {torch.__version__}"
        )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise ValueError(f"parameters that train must be float32 to be sharded; got {parameter.dtype} for {name}")
    precision = MixedPrecisionPolicy()
    if compute_dtype != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    # Without a mesh FSDP2 takes the accelerator that there is, whatever the device.
    mesh = mesh or device_mesh(device)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    if exact is not None:
        fully_shard(exact, mesh=mesh, mp_policy=MixedPrecisionPolicy())
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    for module in _sharded_modules(model):
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    if is_empty(model):
        _materialise(model, device)
    model.run_inside = MethodType(_run, model)
    register_fsdp_forward_method(model, "run_inside")
    model.is_gathered = False


def is_empty(model: nn.Module) -> bool:
    """Whether the parameters still have no data."""
    return any(parameter.is_meta for parameter in model.parameters())


def fill_later(model: nn.Module, fill: Callable[[nn.Module], None]) -> None:
    """Leave a function that gives the parameters of an empty model their values once `shard` has made room for them."""
    model.fill_parameters = fill


@torch.no_grad()
def _materialise(model: nn.Module, device: torch.device) -> None:
    """Give the parameters of an empty model room on ``device``, sharded as they are, and their values."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    places = defaultdict(list)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places[parameter].append((module, name))
    model.to_empty(device=device)
    for (module, name), *tied in places.values():
        for other, other_name in tied:
            other._parameters[other_name] = module._parameters[name]
    for name, buffer in buffers.items():
        model.get_buffer(name).copy_(buffer)
    model.fill_parameters(model)
    del model.fill_parameters


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that are sharded one by one: those that the model's class says not to split, else its first list."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    named = [layer for layers in lists for layer in layers if type(layer).__name__ in names]
    return named or (lists[0] if lists else [])


def inside(model: nn.Module, body: Callable[..., T], *args: Any) -> T:
    """Call ``body(model, *args)`` within the forward pass of a model, sharded or not.

    Within it ``body`` may call ``model.base_model``, the output head and the score head, and use the weights of
    embeddings and heads as whole, plain tensors. Call backward on the result. Every rank must make the same number of
    calls in the same order, each with a backward or without. A rank that has no rows left runs the body on any row with
    a mask that is False everywhere.

    Args:
        model: The model.
        body: Takes the model and ``args``; returns tensors, or tuples, dicts or dataclasses of them.
        *args: Passed on as they are; nothing is cast.

    Returns:
        What ``body`` returns.
    """
    if not isinstance(model, FSDPModule):
        return body(model, *args)
    # FSDP casts tensors among the arguments of a forward pass to the compute dtype; a closure hides them.
    out = model.run_inside(partial(body, model, *args))
    if not torch.is_grad_enabled() and not model.is_gathered:
        # No backward will do it, and a later forward pass would use the stale copy after an optimiser step.
        model.reshard()
    return out


def set_gradient_reduction(model: nn.Module, reduce: bool) -> None:
    """Say whether backward passes sum gradients over ranks, or only add to whole ones on each rank."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(reduce)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Keep all parameters whole on every rank, in the compute dtype, for sampling.

    Entering is collective. Within the block, forward passes without gradients do not communicate, so ranks may make
    different numbers of them, through `inside` or without. The copies are freed at the end of the block.
    """
    if not isinstance(model, FSDPModule) or model.is_gathered:
        yield
        return
    _keep_gathered(model, True)
    try:
        # FSDP takes the first module that runs as the root; if only base_model ran, that would be a layer.
        with torch.no_grad():
            inside(model, lambda model: None)
        for module in _sharded_modules(model):
            module.unshard()
        yield
    finally:
        _keep_gathered(model, False)
        for module in _sharded_modules(model):
            module.reshard()


def clip_grad_norm(model: nn.Module, max_norm: float) -> float:
    """Scale the gradient so that its norm over all ranks is at most ``max_norm``; return the norm before."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return whole(norm).item()


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor in one piece, which is collective; any other as it is.

    Example:
        >>> whole(torch.tensor([1, 2]))
        tensor([1, 2])
    """
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def architecture(model: nn.Module) -> str:
    """Name of a model's class; FSDP2 makes one of its own of it."""
    return type(model).__name__.removeprefix("FSDP")


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters and buffers on the CPU; collective, and empty except on rank 0."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Sum of the ranks' tensors, which have the same shape and dtype; on every rank.

    Example:
        >>> sum_over_ranks(torch.tensor([1.5, 2.0]))
        tensor([1.5000, 2.0000])
    """
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total


def max_over_ranks(number: int) -> int:
    """Maximum of the ranks' numbers, on every rank."""
    largest = torch.tensor(number)
    if dist.is_initialized():
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def gather_over_ranks(tensor: Tensor) -> Tensor:
    """The ranks' tensors, concatenated along their first dimension, on every rank.

    Args:
        tensor: [n, ...]. n may differ between ranks and be 0; the other dimensions and the dtype are the same.

    Returns:
        [sum of n, ...], in the order of the ranks.

    Example:
        >>> gather_over_ranks(torch.tensor([3, 1]))
        tensor([3, 1])
    """
    tensor = tensor.detach()
    if not dist.is_initialized():
        return tensor.clone()
    lengths = [torch.zeros((), dtype=torch.int64) for _ in range(world_size())]
    dist.all_gather(lengths, torch.tensor(len(tensor)))
    padded = tensor.new_zeros(max(map(int, lengths)), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return torch.cat([part[: int(length)] for part, length in zip(parts, lengths, strict=True)])


def mean_over_ranks(tensor: Tensor) -> float:
    """Mean of all elements of the ranks' tensors; 0 if there are none."""
    total, count = sum_over_ranks(
        torch.stack((tensor.double().sum(), tensor.new_tensor(tensor.numel(), dtype=torch.float64)))
    ).tolist()
    return total / count if count else 0.0


def gather_objects(item: T) -> list[T]:
    """The ranks' objects, which must pickle, in the order of the ranks, on every rank."""
    if not dist.is_initialized():
        return [item]
    items: list[T] = [item] * world_size()
    dist.all_gather_object(items, item)
    return items


def share_of(items: Sequence[T]) -> list[T]:
    """This rank's share of items that all ranks hold; the shares' sizes differ by at most one.

    Example:
        >>> share_of("abc")
        ['a', 'b', 'c']
    """
    return list(items[rank() :: world_size()])


def on_first_rank(action: Callable[[], T]) -> T:
    """Call a function on rank 0 while the others wait; every rank gets its result or its exception.

    Args:
        action: Called on rank 0 alone. Its result or exception must pickle.
    """
    if not dist.is_initialized():
        return action()
    outcome: list[Any] = [None, None]
    if rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def _join(device: torch.device, alone: bool) -> None:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(backend, timeout=TIMEOUT)
    elif alone:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _run(model: nn.Module, call: Callable[[], T]) -> T:
    return call()


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _keep_gathered(model: nn.Module, keep: bool) -> None:
    model.is_gathered = keep
    for module in _sharded_modules(model):
        if module is not model:
            module.set_reshard_after_forward(not keep, recurse=False)
