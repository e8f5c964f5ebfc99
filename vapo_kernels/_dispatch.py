"""Triton or PyTorch: the one rule.

A tensor on a CUDA (or ROCm) device goes to the Triton kernel; a CPU tensor goes to the vectorised
PyTorch path, unless ``TRITON_INTERPRET=1`` was set before the import, which runs the kernels
themselves on CPU tensors.
"""

import contextlib
import os

from torch import Tensor
from torch.cuda import device

try:
    import triton
    import triton.language as tl
except ImportError:
    # Where triton cannot be installed (macOS, Windows) the kernels stay undecorated and are never called.
    class _Absent:
        constexpr = None

        def __getattr__(self, name):
            return _Absent()

        def jit(self, fn=None, **_):
            return (lambda f: f) if fn is None else fn

    triton, tl, HAS_TRITON = _Absent(), _Absent(), False
else:
    HAS_TRITON = True

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


def use_triton(x: Tensor) -> bool:
    """True where the Triton kernel computes on ``x``, False where PyTorch does."""
    return HAS_TRITON and (x.is_cuda or INTERPRET)


def on_device_of(x: Tensor):
    """Make the device of ``x`` current: Triton launches on the current device, not on its arguments'."""
    return device(x.device) if x.is_cuda else contextlib.nullcontext()
