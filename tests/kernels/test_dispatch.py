"""The one rule: Triton for CUDA tensors, PyTorch for CPU tensors, and for everything where triton is missing."""

import subprocess
import sys

import torch

from vapo_kernels import _dispatch

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
import vapo_kernels
assert not vapo_kernels._dispatch.HAS_TRITON
logits = torch.zeros(2, 4, requires_grad=True)
old = torch.full((2,), 0.25).log()
out = vapo_kernels.policy_loss(logits, torch.tensor([1, 2]), old, torch.ones(2), torch.ones(2))
out.loss.backward()
print(round(out.loss.item(), 6), [round(x, 6) for x in logits.grad[0].tolist()])
print(vapo_kernels.packed_gae(torch.ones(3), torch.zeros(3), torch.tensor([0, 3])).returns.tolist())
"""


def test_the_package_works_where_triton_cannot_be_installed():
    result = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["-1.0 [0.125, -0.375, 0.125, 0.125]", "[3.0, 2.0, 1.0]"]


def test_cpu_tensors_take_pytorch_unless_interpreting(monkeypatch):
    x = torch.zeros(1)
    monkeypatch.setattr(_dispatch, "INTERPRET", False)
    assert not _dispatch.use_triton(x)
    monkeypatch.setattr(_dispatch, "INTERPRET", True)
    assert _dispatch.use_triton(x) == _dispatch.HAS_TRITON
