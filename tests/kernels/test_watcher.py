"""Bytes and launches of every op against its bound, and no access, double write or gap that must not be."""

import pytest
import torch

from vapo_kernels import (
    _dispatch,
    linear_policy_loss,
    linear_token_logprobs,
    logprob_policy_loss,
    masked_whiten,
    packed_gae,
    padded_gae,
    policy_loss,
    token_logprobs,
    value_loss,
    value_moments,
)
from vapo_kernels._formed_gradient import rescale_op
from vapo_kernels.ops.gae import kernel as gae_kernel

triton, tl = pytest.importorskip("triton"), pytest.importorskip("triton.language")
watcher = pytest.importorskip("watcher")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the watcher patches the interpreter")
watch = watcher.watch

N, V = 6, 700
LOGITS_BYTES = N * V * 4


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(_dispatch, "INTERPRET", True)
    for name, value in (("SHORT_BLOCK", 16), ("LONG_BLOCK", 32), ("ROW_WIDTH", 8)):
        monkeypatch.setattr(gae_kernel, name, value)


def loss_inputs(*, masked: int = 0):
    """Logits and what `policy_loss` takes beside them, the first ``masked`` rows masked."""
    mask = torch.arange(N) >= masked
    return torch.randn(N, V), (torch.randint(V, (N,)), torch.randn(N), torch.randn(N), mask)


def bytes_a_token(seen, num_tokens: int) -> float:
    return seen.bytes_moved / num_tokens


@pytest.mark.parametrize("slack", [0, 5])
@pytest.mark.parametrize("bounds", [[0, 70, 71, 140], [0, 13, 64, 140]])
@pytest.mark.parametrize("has_mask", [False, True])
def test_packed_gae_moves_each_token_once(bounds, has_mask, slack):
    cu_seqlens, n = torch.tensor(bounds, dtype=torch.int32), bounds[-1] + slack
    mask = torch.rand(n) < 0.9 if has_mask else None
    with watch() as seen:
        packed_gae(torch.randn(n), torch.randn(n), cu_seqlens, mask=mask)
    assert seen.launches == ["_gae_kernel"]
    # The mask of a sequence longer than a block is read twice where λ comes from its count: once to count.
    assert bytes_a_token(seen, n) <= 16.5 + 2 * has_mask
    assert seen.bytes_written.total() == 8 * n


def test_packed_gae_takes_a_step_for_each_block_of_a_long_sequence():
    """Two stores a step, wherever the sequence lies: 40 tokens are two blocks of 32."""
    with watch() as seen:
        packed_gae(torch.randn(80), torch.randn(80), torch.tensor([0, 40, 80]))
    assert seen.num_stores == 2 * (2 + 2)


def test_padded_gae_moves_each_token_once():
    shape = (5, gae_kernel.SHORT_BLOCK)
    mask = torch.rand(shape) < 0.9
    with watch() as seen:
        padded_gae(torch.randn(shape), torch.randn(shape), mask)
    assert seen.launches == ["_gae_kernel"]
    assert bytes_a_token(seen, mask.numel()) <= 17
    assert seen.bytes_read["mask_ptr"] == mask.numel()
    assert seen.bytes_read["rewards_ptr"] == seen.bytes_read["values_ptr"] == 4 * mask.sum()


def test_long_sequence_with_a_given_lambda_reads_its_mask_once():
    n = gae_kernel.LONG_BLOCK + 10
    mask = torch.rand(1, n) < 0.9
    with watch() as seen:
        padded_gae(torch.randn(1, n), torch.randn(1, n), mask, lam_policy=0.95)
    assert seen.bytes_read["mask_ptr"] == n


def test_token_logprobs_read_once_forward_and_read_and_write_once_backward():
    logits, (ids, *_) = loss_inputs()
    logits.requires_grad_()
    with watch() as seen:
        out = token_logprobs(logits, ids)
    assert seen.launches == ["_token_logprobs_kernel"]
    assert LOGITS_BYTES <= seen.bytes_read["logits_ptr"] <= 1.02 * LOGITS_BYTES
    assert seen.bytes_moved <= 1.02 * LOGITS_BYTES
    with watch() as seen:
        (out.logprobs.sum() + out.entropy.sum()).backward()
    assert seen.launches == ["_token_logprobs_backward_kernel"]
    assert seen.bytes_read["logits_ptr"] == seen.bytes_written["dlogits_ptr"] == LOGITS_BYTES


@pytest.mark.parametrize("inplace", [False, True])
def test_policy_loss_reads_twice_and_writes_once_with_a_gradient(inplace):
    logits, arguments = loss_inputs()
    logits.requires_grad_()
    with watch() as seen:
        out = policy_loss(logits * 1, *arguments, is_correct=arguments[-1], inplace=inplace)
    assert seen.launches == ["_policy_loss_kernel"]
    assert seen.bytes_read.total() <= 2.02 * LOGITS_BYTES
    assert LOGITS_BYTES <= seen.bytes_written.total() <= 1.02 * LOGITS_BYTES
    with watch() as seen:
        out.loss.backward()
    # The factor is 1: it is read by every program, and nothing else moves.
    assert set(seen.launches) == {"_rescale_kernel"}
    assert set(seen.bytes_read) == {"factor_ptr"} and not seen.bytes_written


def test_policy_loss_gradient_is_rescaled_to_its_end_and_no_further():
    # A part of a block, and rows that lie apart.
    for x in (torch.ones(37), torch.ones(2, 40)[:, :37]):
        with watch() as seen:
            rescale_op(x, torch.tensor(3.0))
        assert seen.bytes_read["x_ptr"] == seen.bytes_written["x_ptr"] == 4 * x.numel()
        assert (x == 3).all()


def test_policy_loss_reads_once_without_a_gradient():
    logits, arguments = loss_inputs()
    with watch() as seen:
        policy_loss(logits, *arguments, is_correct=arguments[-1])
    assert seen.launches == ["_policy_loss_kernel"]
    assert seen.bytes_moved <= 1.02 * LOGITS_BYTES + 9 * 4 * N


def test_masked_rows_are_never_read():
    masked = 4
    logits, arguments = loss_inputs(masked=masked)
    logits.requires_grad_()
    kept = LOGITS_BYTES * (N - masked) // N
    with watch() as seen:
        policy_loss(logits * 1, *arguments, is_correct=arguments[-1]).loss.backward()
    assert seen.bytes_read["logits_ptr"] + seen.bytes_read["dlogits_ptr"] <= 2 * kept + 4 * N
    with watch() as seen:
        out = token_logprobs(logits, arguments[0], mask=arguments[-1])
        (out.logprobs.sum() + out.entropy.sum()).backward()
    assert seen.bytes_read["logits_ptr"] <= 2 * kept + 4 * N


def test_linear_ops_launch_one_kernel_a_chunk():
    hidden, weight = torch.randn(N, 8, requires_grad=True), torch.randn(V, 8, requires_grad=True)
    ids, *rest = loss_inputs()[1]
    with watch() as seen:
        linear_policy_loss(hidden, weight, ids, *rest).loss.backward()
    launches = [launch for launch in seen.launches if launch != "_rescale_kernel"]
    assert set(launches) == {"_policy_loss_kernel"} and len(launches) <= N
    with watch() as seen:
        linear_token_logprobs(hidden, weight, ids)
    assert set(seen.launches) <= {"_token_logprobs_kernel", "_token_logprobs_backward_kernel"}


def test_token_ops_are_one_launch_and_read_sampled_tokens_alone():
    # A read counts for the first argument that holds its address, so each is a tensor of its own.
    x, y, z, entropy, weights, ref = torch.randn(6, 70).unbind()
    mask, correct = torch.rand(70) < 0.5, torch.rand(70) < 0.5
    options = {"is_correct": correct, "entropy": entropy, "token_weights": weights, "ref_logprobs": ref}
    for call, kernel in (
        (lambda: logprob_policy_loss(x, y, z, mask, kl_weight=0.1, **options), "_logprob_policy_loss_kernel"),
        (lambda: value_loss(x, y, mask, old_values=z, clip=0.2), "_value_loss_kernel"),
        (lambda: value_moments(x, y, mask), "_moments_kernel"),
    ):
        with watch() as seen:
            call()
        assert seen.launches == [kernel]
        assert_only_sampled_are_read(seen, mask)
    with watch() as seen:
        masked_whiten(x, mask)
    assert seen.launches == ["_moments_kernel", "_whiten_kernel"]


def assert_only_sampled_are_read(seen, mask):
    """The mask is read whole; of what is [N] beside it, no more than the True places."""
    for name, count in seen.bytes_read.items():
        if name not in ("mask_ptr", "denominators_ptr", "num_tokens_ptr"):
            assert count <= 4 * mask.sum(), name


@triton.jit
def _copy_kernel(x_ptr, out_ptr, n, shift, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets + shift, mask=offsets < n), mask=offsets < n)


@triton.jit
def _overlapping_kernel(out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * (BLOCK - 1) + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, offsets.to(tl.float32), mask=offsets < n)


@triton.jit
def _forgetful_kernel(out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, offsets.to(tl.float32), mask=offsets < n - 1)


def test_watcher_catches_an_access_outside():
    x, out = torch.zeros(8), torch.zeros(8)
    with watch() as seen:
        _copy_kernel[(2,)](x, out, 8, 0, BLOCK=4)
    assert (seen.bytes_read["x_ptr"], seen.bytes_written["out_ptr"]) == (32, 32)
    for shift in (1, -1):
        # Inside the storage, outside the tensor.
        with pytest.raises(Exception, match="OutsideAccess"), watch():
            _copy_kernel[(2,)](torch.zeros(16)[4:12], out, 8, shift, BLOCK=4)
    with pytest.raises(Exception, match="OutsideAccess"), watch():
        _copy_kernel[(3,)](x, out, 9, 0, BLOCK=4)


def test_watcher_catches_a_double_write():
    with pytest.raises(Exception, match="DoubleWrite"), watch():
        _overlapping_kernel[(2,)](torch.zeros(7), 7, BLOCK=4)


def test_watcher_catches_an_unwritten_element():
    with pytest.raises(watcher.UnwrittenElement, match="1 elements of out_ptr"), watch():
        _forgetful_kernel[(2,)](torch.zeros(8), 8, BLOCK=4)
    with watch(partial=("out_ptr",)):
        _forgetful_kernel[(2,)](torch.zeros(8), 8, BLOCK=4)
