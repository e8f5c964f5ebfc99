"""What only a broken line of a kernel would show: each test kills a mutant of `make mutate` that others let live."""

import math

import pytest
import torch

from vapo_kernels import token_logprobs


@pytest.mark.parametrize("shape", [(2, 3), (3, 2)])
def test_rows_of_a_slice_are_read_where_they_lie(device, shape):
    logits = torch.randn(shape[0], shape[1] + 2, 70, device=device)[:, 1:-1]
    ids = torch.randint(70, shape, device=device)
    assert torch.equal(token_logprobs(logits, ids).logprobs, token_logprobs(logits.contiguous(), ids).logprobs)


def test_log_of_a_half_to_the_last_bit(device):
    out = token_logprobs(torch.zeros(1, 2, device=device), torch.tensor([1], device=device))
    assert out.logprobs.item() == pytest.approx(-math.log(2), rel=8e-8)


def test_impossible_token_adds_no_entropy(device):
    logits = torch.tensor([[0.0, -200.0, -300.0]], device=device)
    assert token_logprobs(logits, torch.tensor([1], device=device)).entropy.item() == 0.0
    logits = torch.tensor([[0.0, -torch.inf]], device=device)
    assert token_logprobs(logits, torch.tensor([1], device=device)).entropy.item() == 0.0
