"""A loss with a gradient that was formed beside it: the ops that attach and rescale it."""

import pytest
import torch

from vapo_kernels import _formed_gradient
from vapo_kernels._formed_gradient import _attach_op, attach, rescale_op


def test_attach_divides_by_scale_and_keeps_the_value(device):
    x = torch.zeros(3, device=device).requires_grad_()
    gradient = torch.tensor([1.0, -2.0, 4.0], device=device)
    for in_place in (False, True):
        scale = torch.tensor(8.0, device=device)
        loss = attach(torch.tensor(7.0, device=device), [x], [gradient.clone()], scale=scale, in_place=in_place)
        assert loss.item() == 7
        (grad,) = torch.autograd.grad(loss, x, torch.tensor(2.0, device=device))
        assert grad.tolist() == [0.25, -0.5, 1.0]


def test_a_factor_of_one_touches_nothing(device):
    """NaN times 1 is NaN still, but a signalling pattern or −0 would not survive arithmetic: the bits stay."""
    bits = torch.tensor([0x7FA00001, -(2**31), 0x3F800000], dtype=torch.int32, device=device)
    x = bits.clone().view(torch.float32)
    rescale_op(x, torch.ones((), device=device))
    assert torch.equal(x.view(torch.int32), bits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["one", "a block", "tail", "sliced rows", "batch last", "single row"])
def test_rescale(device, dtype, kind):
    """Blocks of 32: every element once, none outside."""
    room = torch.randn(2, 4, 70).to(device, dtype)
    before = room.clone()
    x = {
        "one": room[0, 0, :1],
        "a block": room.view(-1)[:32],
        "tail": room.view(-1)[:33],
        "sliced rows": room[:, :-1, :65],
        "batch last": room.transpose(0, 1),
        "single row": room[1, 2],
    }[kind]
    expected = (x.float() * -2.5).to(dtype)
    version = x._version
    rescale_op(x, torch.tensor(-2.5, device=device))
    assert torch.equal(x, expected)
    assert x._version > version
    untouched = room.clone()
    untouched.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(
        before.as_strided(x.shape, x.stride(), x.storage_offset())
    )
    assert torch.equal(untouched, before)


def test_registration(device):
    x = torch.randn(40, device=device)
    factor = torch.tensor(2.0, device=device)
    torch.library.opcheck(rescale_op, (x, factor))
    torch.library.opcheck(rescale_op, (torch.randn(3, 70, device=device)[:, :65], factor))
    leaf = torch.randn(40, device=device).requires_grad_()
    loss, one = torch.tensor(1.0, device=device), torch.ones((), device=device)
    # The gradient it registers is not that of its forward, which returns its input: schema and fakes are checked.
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    for in_place in (False, True):
        torch.library.opcheck(_attach_op, (loss, [leaf], [x], one, in_place), test_utils=tests)


def test_empty_gradient(device):
    empty = torch.zeros(0, 5, device=device)
    rescale_op(empty, torch.tensor(2.0, device=device))
    leaf = torch.zeros(0, 5, device=device).requires_grad_()
    loss = _formed_gradient.attach(torch.zeros((), device=device), [leaf], [empty], in_place=True)
    assert torch.autograd.grad(loss, leaf)[0].shape == (0, 5)
