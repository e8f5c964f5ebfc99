"""Where the tests run: one fixture chooses the implementation and the device.

On a machine without a GPU the Triton kernels run interpreted, which must be chosen before triton is
imported; the ops themselves are switched between the two paths by the one rule in `_dispatch`.
"""

import os
import sys

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime import interpreter

from vapo_kernels import _dispatch, _formed_gradient, _linear_chunks, _row_softmax
from vapo_kernels.ops import value_loss, whiten
from vapo_kernels.ops.gae import blocked_scan
from vapo_kernels.ops.gae import kernel as gae_kernel
from vapo_kernels.ops.policy_loss import from_logprobs

_dispatch.INTERPRET = False
MODULES_WITH_BLOCK = [_formed_gradient, from_logprobs, value_loss, whiten]


def pytest_collection_modifyitems(config, items):
    """Leave out what needs a device where there is none."""
    left_out = [item for item in items if "gpu" in item.keywords and not torch.cuda.is_available()]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill every torch.empty with NaN (or the largest integer), so that an element nobody writes is seen."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def use_small_blocks(monkeypatch) -> None:
    """Several blocks, steps and programs for small inputs; the interpreter costs milliseconds a block."""
    monkeypatch.setattr(_row_softmax, "BLOCK_V", 64)
    monkeypatch.setattr(gae_kernel, "SHORT_BLOCK", 16)
    monkeypatch.setattr(gae_kernel, "LONG_BLOCK", 32)
    monkeypatch.setattr(gae_kernel, "ROW_WIDTH", 8)
    monkeypatch.setattr(_row_softmax, "CHUNK_ELEMENTS", 256)
    monkeypatch.setattr(_linear_chunks, "LOGITS_BUFFER_BYTES", 2048)
    monkeypatch.setattr(_linear_chunks, "WEIGHT_ROWS", 16)
    monkeypatch.setattr(whiten, "CPU_BLOCK", 48)
    for name, value in (("SCAN_ROWS", 4), ("BLOCK_TOKENS", 48), ("MEAN_RUN", 3)):
        monkeypatch.setattr(blocked_scan, name, value)
    for module in MODULES_WITH_BLOCK:
        monkeypatch.setattr(module, "BLOCK", 32)


def convert_as_hardware_does(convert_float):
    """The interpreter cuts a float32 off to a bfloat16; every GPU rounds it to the nearest."""

    def convert(data, source, target, rounding_mode):
        if (source.name, target.name) == ("fp32", "bf16"):
            return torch.from_numpy(data.view("float32").copy()).bfloat16().view(torch.uint16).numpy()
        return convert_float(data, source, target, rounding_mode)

    return convert


@pytest.fixture(params=["torch", "triton"])
def device(request, monkeypatch) -> torch.device:
    """The device to put inputs on; the parameter says which implementation computes there."""
    use_small_blocks(monkeypatch)
    if request.param == "torch":
        return torch.device("cpu")
    if torch.cuda.is_available():
        if "ttsem" in sys.modules:
            # Tensors that pretend to be on a device: the CPU has no product of bfloat16 into float32.
            monkeypatch.setattr(_linear_chunks, "_add_product", lambda a, b, c: a.addmm_(b.float(), c.float()))
        return torch.device("cuda")
    monkeypatch.setattr(interpreter, "_convert_float", convert_as_hardware_does(interpreter._convert_float))
    monkeypatch.setattr(_dispatch, "INTERPRET", True)
    return torch.device("cpu")
