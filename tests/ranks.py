"""Run a function of a test in several processes that form a process group, as torchrun would start them."""

from __future__ import annotations

import importlib.util
import io
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

# Far more than any test takes.
SECONDS = 300
# A server imports once and forks each rank from there.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["pytest", "torch.distributed.fsdp", "torch.distributed.checkpoint", "vapo.models.load", "vapo_kernels"]
)


def run_on_ranks(num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``function(*args)`` on each of ``num_ranks`` ranks (gloo).

    Args:
        num_ranks: Number of processes.
        function: A function at the top of a test's module.
        *args: What pickles.

    Returns:
        What each rank returned, in the order of the ranks. What a rank raised is raised as an AssertionError.
    """
    address = (function.__code__.co_filename, function.__name__)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes, results = [], []
    for rank in range(num_ranks):
        result, write = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_rank, args=(write, rank, num_ranks, port, address, args), daemon=True)
        process.start()
        write.close()
        processes.append(process)
        results.append(result)
    try:
        return _collect(results)
    finally:
        for process in processes:
            process.kill()
            process.join()


def start_alone(function: Callable[..., Any], *args: Any) -> tuple[multiprocessing.Process, Connection]:
    """Start ``function(*args, connection)`` in a process without a group; returns the process and the other end."""
    address = (function.__code__.co_filename, function.__name__)
    here, there = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_alone, args=(there, address, args), daemon=True)
    process.start()
    there.close()
    return process, here


def _alone(connection: Connection, address: tuple[str, str], args: tuple) -> None:
    _compute_as_tests_do()
    getattr(_load(address[0]), address[1])(*args, connection)


def _collect(results: list[Connection]) -> list[Any]:
    values: dict[int, Any] = {}
    while len(values) < len(results):
        waiting = [result for number, result in enumerate(results) if number not in values]
        answered = wait(waiting, SECONDS)
        assert answered, f"no rank said anything for {SECONDS} s: they wait for each other"
        for result in answered:
            number = results.index(result)
            try:
                error, values[number] = torch.load(io.BytesIO(result.recv_bytes()), weights_only=False)
            except EOFError:
                error = "the process ended without a word"
            assert error is None, f"rank {number}: {error}"
    return [values[number] for number in range(len(results))]


def _rank(write: Connection, rank: int, num_ranks: int, port: int, address: tuple[str, str], args: tuple) -> None:
    from vapo.models import sharding

    _compute_as_tests_do()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    try:
        with sharding.distributed(torch.device("cpu"), alone=False):
            value = getattr(_load(address[0]), address[1])(*args)
    except BaseException:
        _send(write, traceback.format_exc(), None)
        raise
    _send(write, None, value)


def _compute_as_tests_do() -> None:
    """As in conftest.py, of which the server knows only the environment."""
    from vapo_kernels import _dispatch

    _dispatch.INTERPRET = False


def _send(write: Connection, error: str | None, value: Any) -> None:
    # As bytes: multiprocessing would share the tensors' memory with a process that is gone by then.
    buffer = io.BytesIO()
    torch.save((error, value), buffer)
    write.send_bytes(buffer.getvalue())


def _load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("module_of_rank", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
