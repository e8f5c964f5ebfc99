"""Where the tests run: one fixture chooses the implementation and the device.

On a machine without a GPU the Triton kernels run interpreted, which must be chosen before triton is
imported; the ops themselves are switched between the two paths by the one rule in `_dispatch`.
"""

import importlib
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest

from vapo_kernels import _dispatch, row_softmax
from vapo_kernels.gae import blocked_scan
from vapo_kernels.gae import kernel as gae_kernel

_dispatch.INTERPRET = False
# By name: `vapo_kernels.value_loss` is the function.
MODULES_WITH_BLOCK = [
    importlib.import_module(f"vapo_kernels.{name}")
    for name in ("_formed_gradient", "policy_loss.from_logprobs", "value_loss", "whiten")
]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill every torch.empty with NaN (or the largest integer), so that an element nobody writes is seen."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def use_small_blocks(monkeypatch) -> None:
    """Several blocks, steps and programs for small inputs; the interpreter costs milliseconds a block."""
    monkeypatch.setattr(row_softmax, "BLOCK_V", 64)
    monkeypatch.setattr(gae_kernel, "SHORT_BLOCK", 16)
    monkeypatch.setattr(gae_kernel, "LONG_BLOCK", 32)
    monkeypatch.setattr(row_softmax, "CHUNK_ELEMENTS", 256)
    for name, value in (("SCAN_ROWS", 4), ("BLOCK_TOKENS", 100), ("MEAN_RUN", 3)):
        monkeypatch.setattr(blocked_scan, name, value)
    for module in MODULES_WITH_BLOCK:
        monkeypatch.setattr(module, "BLOCK", 32)


@pytest.fixture(params=["torch", "triton"])
def device(request, monkeypatch) -> torch.device:
    """The device to put inputs on; the parameter says which implementation computes there."""
    if request.param == "torch":
        monkeypatch.setattr(row_softmax, "CHUNK_ELEMENTS", 256)
        monkeypatch.setattr(blocked_scan, "SCAN_ROWS", 4)
        monkeypatch.setattr(blocked_scan, "BLOCK_TOKENS", 48)
        monkeypatch.setattr(blocked_scan, "MEAN_RUN", 4)
        return torch.device("cpu")
    use_small_blocks(monkeypatch)
    if torch.cuda.is_available():
        return torch.device("cuda")
    monkeypatch.setattr(_dispatch, "INTERPRET", True)
    return torch.device("cpu")
