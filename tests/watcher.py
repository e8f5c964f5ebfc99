"""A watcher of the interpreted kernels: bytes per tensor, launches, and accesses that must not be.

    with watch() as seen:
        packed_gae(...)
    assert seen.launches == ["_gae_kernel"] and seen.bytes_moved <= 16.5 * N

Inside, a launch fails if it touches an address outside the tensors it was given, if two programs write one
element, or if an output (a tensor made by ``torch.empty`` in the op and filled by the launch) has an
element that no program wrote.
"""

import contextlib
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter


class OutsideAccess(AssertionError):
    """A program touched memory outside the tensors of its launch."""


class DoubleWrite(AssertionError):
    """Two programs wrote one element."""


class UnwrittenElement(AssertionError):
    """An output has an element that no program wrote."""


@dataclass
class Seen:
    """What the launches inside `watch` did."""

    launches: list[str] = field(default_factory=list)
    bytes_read: Counter = field(default_factory=Counter)
    bytes_written: Counter = field(default_factory=Counter)
    num_stores: int = 0

    @property
    def bytes_moved(self) -> int:
        return self.bytes_read.total() + self.bytes_written.total()


@dataclass
class Watched:
    """One tensor argument of a launch: its name, its bytes in memory, and who wrote each of them."""

    name: str
    tensor: Tensor
    writer: np.ndarray

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "Watched":
        return cls(name, tensor, np.full(_extent(tensor), -1, np.int64))

    @property
    def start(self) -> int:
        return self.tensor.data_ptr()

    def holds(self, addresses: np.ndarray, size: int) -> np.ndarray:
        return (addresses >= self.start) & (addresses + size <= self.start + len(self.writer))

    def elements(self) -> np.ndarray:
        """Offset in bytes of each element of the tensor."""
        offsets = torch.zeros(self.tensor.shape, dtype=torch.int64)
        for dim, (length, stride) in enumerate(zip(self.tensor.shape, self.tensor.stride(), strict=True)):
            shape = [1] * self.tensor.dim()
            shape[dim] = length
            offsets += (torch.arange(length) * stride).view(shape)
        return offsets.flatten().numpy() * self.tensor.element_size()


class Launch:
    """The tensors of one launch, and the checks of its loads and stores."""

    def __init__(self, seen: Seen, name: str, arguments: dict[str, Tensor], *, partial: frozenset[str]):
        self.seen, self.name, self.partial = seen, name, partial
        self.tensors = [Watched.of(argument, tensor) for argument, tensor in arguments.items()]
        self.program = 0
        seen.launches.append(name)

    def find(self, addresses: np.ndarray, size: int, action: str) -> list[tuple[Watched, np.ndarray]]:
        """The tensors that hold the addresses; one address belongs to one tensor, the first in the signature."""
        found, left = [], addresses
        for watched in self.tensors:
            held = watched.holds(left, size)
            if held.any():
                found.append((watched, left[held] - watched.start))
                left = left[~held]
        if len(left) > 0:
            raise OutsideAccess(f"{self.name}, program {self.program}: {action} of {len(left)} elements outside")
        return found

    def load(self, addresses: np.ndarray, size: int) -> None:
        for watched, offsets in self.find(addresses, size, "load"):
            self.seen.bytes_read[watched.name] += len(offsets) * size

    def store(self, addresses: np.ndarray, size: int) -> None:
        self.seen.num_stores += 1
        if len(np.unique(addresses)) < len(addresses):
            raise DoubleWrite(f"{self.name}, program {self.program}: one store writes an element twice")
        for watched, offsets in self.find(addresses, size, "store"):
            self.seen.bytes_written[watched.name] += len(offsets) * size
            writers = watched.writer[offsets]
            if ((writers != -1) & (writers != self.program)).any():
                raise DoubleWrite(f"{self.name}, program {self.program}: {watched.name} was written by another program")
            watched.writer[offsets] = self.program

    def finish(self) -> None:
        for watched in self.tensors:
            written = watched.writer[watched.elements()] != -1
            if written.any() and not written.all() and watched.name not in self.partial:
                raise UnwrittenElement(f"{self.name}: {(~written).sum()} elements of {watched.name} were never written")


def _extent(tensor: Tensor) -> int:
    """Bytes from the first element to behind the last."""
    if tensor.numel() == 0:
        return 0
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


@contextlib.contextmanager
def watch(*, partial: tuple[str, ...] = ()):
    """Yield what the interpreted launches inside did, and fail on an access that must not be.

    Args:
        partial: Arguments of which a launch may write a part.
    """
    seen, launch = Seen(), None
    builder, executor = interpreter.interpreter_builder, interpreter.GridExecutor
    load, store = builder.create_masked_load, builder.create_masked_store
    call, init_arguments, set_index = executor.__call__, executor._init_args_hst, builder.set_grid_idx

    def watched_load(ptrs, mask, *rest):
        launch.load(ptrs.data[mask.data].ravel(), ptrs.get_element_ty().primitive_bitwidth // 8 or 1)
        return load(ptrs, mask, *rest)

    def watched_store(ptrs, value, mask, *rest):
        launch.store(ptrs.data[mask.data].ravel(), ptrs.get_element_ty().primitive_bitwidth // 8 or 1)
        return store(ptrs, value, mask, *rest)

    def watched_arguments(self, args, kwargs):
        # The interpreter works on copies of the storages: these are what the pointers point to.
        nonlocal launch
        host_args, host_kwargs = init_arguments(self, args, kwargs)
        named = dict(zip(self.arg_names, host_args, strict=False)) | host_kwargs
        tensors = {name: x for name, x in named.items() if isinstance(x, Tensor)}
        launch = Launch(seen, self.fn.__name__, tensors, partial=frozenset(partial))
        return host_args, host_kwargs

    def watched_index(x, y, z):
        launch.program = x
        set_index(x, y, z)

    def watched_call(self, *args, **kwargs):
        call(self, *args, **kwargs)
        launch.finish()

    builder.create_masked_load, builder.create_masked_store = watched_load, watched_store
    builder.set_grid_idx = watched_index
    executor.__call__, executor._init_args_hst = watched_call, watched_arguments
    try:
        yield seen
    finally:
        del builder.create_masked_load, builder.create_masked_store, builder.set_grid_idx
        executor.__call__, executor._init_args_hst = call, init_arguments
