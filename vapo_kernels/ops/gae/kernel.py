"""The Triton kernel of `packed_gae` and `padded_gae`, and the custom op that launches it.

Shapes: N tokens of S sequences end to end.
"""

import torch
from torch import Tensor

from vapo_kernels._arguments import expect
from vapo_kernels._dispatch import on_device_of, tl, triton, use_triton
from vapo_kernels.ops.gae.blocked_scan import gae_torch

# A sequence of at most SHORT_BLOCK tokens is one step of a program; a longer one takes LONG_BLOCK a step.
SHORT_BLOCK, LONG_BLOCK = 256, 2048
# A block is scanned as rows of as many tokens as a warp has lanes.
ROW_WIDTH = 32


@triton.jit
def _compose(decay_later, add_later, decay, add):
    """The affine map of a token after that of all later tokens."""
    return decay * decay_later, add + decay * add_later


@triton.jit
def _scan(value, reward, sampled, carry, lam, gamma, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """B_{t+1} of every token of a [ROWS, WIDTH] block, and B of its first token, from the B after the block.

    Rows are scanned first, each by one warp, then their totals: one scan over all lanes spills registers.
    """
    decay = tl.where(sampled, gamma * lam, 1.0)
    add = tl.where(sampled, (1.0 - lam) * value + lam * reward, 0.0)
    decay, add = tl.associative_scan((decay, add), 1, _compose, reverse=True)
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)[None, :]
    is_first = column == 0
    row_decay, row_add = tl.sum(tl.where(is_first, decay, 0.0), 1), tl.sum(tl.where(is_first, add, 0.0), 1)
    row_decay, row_add = tl.associative_scan((row_decay, row_add), 0, _compose, reverse=True)
    b_row = row_add + row_decay * carry
    after = tl.where(row == ROWS - 1, carry, tl.gather(b_row, tl.minimum(row + 1, ROWS - 1), 0))[:, None]
    b = add + decay * after
    later = tl.gather(b, tl.broadcast_to(tl.minimum(column + 1, WIDTH - 1), (ROWS, WIDTH)), 1)
    return tl.where(column == WIDTH - 1, after, later), tl.sum(tl.where(row == 0, b_row, 0.0), 0)


@triton.jit
def _token_positions(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    return tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _load_sampled(mask_ptr, offsets, inside, HAS_MASK: tl.constexpr):
    return (tl.load(mask_ptr + offsets, mask=inside, other=0) != 0) if HAS_MASK else inside


@triton.jit
def _gae_block(
    rewards_ptr,  # [N]
    values_ptr,  # [N]
    advantages_ptr,  # [N]
    returns_ptr,  # [N]
    offsets,
    inside,
    sampled,
    carry_policy,
    carry_critic,
    lam_policy,
    lam_critic,
    gamma,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Advantages and returns of one block; returns the B of its first token for both λ."""
    reward = tl.load(rewards_ptr + offsets, mask=sampled, other=0.0).to(tl.float32)
    value = tl.load(values_ptr + offsets, mask=sampled, other=0.0).to(tl.float32)
    later_policy, carry_policy = _scan(value, reward, sampled, carry_policy, lam_policy, gamma, ROWS, WIDTH)
    later_critic, carry_critic = _scan(value, reward, sampled, carry_critic, lam_critic, gamma, ROWS, WIDTH)
    tl.store(advantages_ptr + offsets, tl.where(sampled, reward + gamma * later_policy - value, 0.0), mask=inside)
    # R̂_t does not depend on V(s_t), but a V(s_t) that is not finite must be heard: 0 · NaN is NaN.
    tl.store(returns_ptr + offsets, tl.where(sampled, reward + gamma * later_critic + 0.0 * value, 0.0), mask=inside)
    return carry_policy, carry_critic


@triton.jit
def _adaptive_lambda(length, alpha):
    """Eq. 15, clamped: 1 − 1/(α l) ≤ 1, and −∞ for an empty response, where no token asks for it."""
    return tl.maximum(1.0 - 1.0 / (alpha * length.to(tl.float32)), 0.0)


# A sequence starts anywhere in a packing, so loads are 32 bits wide whatever the alignment of the tensors.
@triton.jit(
    do_not_specialize=["num_tokens", "num_sequences", "row_length"],
    do_not_specialize_on_alignment=[
        "rewards_ptr", "values_ptr", "mask_ptr", "cu_seqlens_ptr", "lam_policy_ptr", "lam_critic_ptr", "bootstrap_ptr",
        "advantages_ptr", "returns_ptr",
    ],
)  # fmt: skip
def _gae_kernel(
    rewards_ptr,  # [N]
    values_ptr,  # [N]
    mask_ptr,  # [N] bool, or None
    cu_seqlens_ptr,  # [S + 1], or None for rows of row_length tokens
    lam_policy_ptr,  # [S], or None
    lam_critic_ptr,  # [S], or None
    bootstrap_ptr,  # [S], or None
    advantages_ptr,  # [N] float32
    returns_ptr,  # [N] float32
    num_tokens: tl.int64,
    num_sequences: tl.int64,
    row_length: tl.int64,
    gamma,
    lam_policy,
    lam_critic,
    alpha,
    HAS_MASK: tl.constexpr,
    PADDED: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    LAM_POLICY_TENSOR: tl.constexpr,
    LAM_CRITIC_TENSOR: tl.constexpr,
    HAS_BOOTSTRAP: tl.constexpr,
    SHORT: tl.constexpr,
    LONG: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program runs one sequence from its end, a block a step; the program after the last zeroes the slack."""
    sequence = tl.program_id(0).to(tl.int64)
    num_tokens = num_tokens.to(tl.int64)
    if PADDED:
        start = sequence * row_length
        end = tl.minimum(start + row_length, num_tokens)
    else:
        # A cu_seqlens that lies must not lead outside the tensors.
        start = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + sequence).to(tl.int64), 0), num_tokens)
        end = num_tokens
        if sequence < num_sequences:
            end = tl.minimum(tl.load(cu_seqlens_ptr + sequence + 1).to(tl.int64), num_tokens)

    if sequence == num_sequences:
        for first in range(start, end, LONG):
            offsets = first + tl.arange(0, LONG)
            tl.store(advantages_ptr + offsets, tl.zeros((LONG,), tl.float32), mask=offsets < end)
            tl.store(returns_ptr + offsets, tl.zeros((LONG,), tl.float32), mask=offsets < end)
        return

    if LAM_POLICY_TENSOR:
        lam_policy = tl.load(lam_policy_ptr + sequence).to(tl.float32)
    if LAM_CRITIC_TENSOR:
        lam_critic = tl.load(lam_critic_ptr + sequence).to(tl.float32)
    carry = 0.0
    if HAS_BOOTSTRAP:
        carry = tl.load(bootstrap_ptr + sequence).to(tl.float32)

    if end - start <= SHORT:
        offsets = start + _token_positions(SHORT // WIDTH, WIDTH)
        inside = offsets < end
        sampled = _load_sampled(mask_ptr, offsets, inside, HAS_MASK)
        if ADAPTIVE:
            lam_policy = _adaptive_lambda(tl.sum(tl.sum(sampled.to(tl.int32), 1), 0), alpha)
        _gae_block(
            rewards_ptr, values_ptr, advantages_ptr, returns_ptr, offsets, inside, sampled,
            carry, carry, lam_policy, lam_critic, gamma, SHORT // WIDTH, WIDTH,
        )  # fmt: skip
    else:
        if ADAPTIVE:
            length = (end - start).to(tl.int32)
            if HAS_MASK:
                length = tl.zeros((), tl.int32)
                for first in range(start, end, LONG):
                    offsets = first + tl.arange(0, LONG)
                    length += tl.sum(_load_sampled(mask_ptr, offsets, offsets < end, HAS_MASK).to(tl.int32), 0)
            lam_policy = _adaptive_lambda(length, alpha)
        carry_policy = carry
        carry_critic = carry
        num_blocks = tl.cdiv(end - start, LONG)
        for step in range(0, num_blocks):
            offsets = start + (num_blocks - 1 - step) * LONG + _token_positions(LONG // WIDTH, WIDTH)
            inside = offsets < end
            sampled = _load_sampled(mask_ptr, offsets, inside, HAS_MASK)
            carry_policy, carry_critic = _gae_block(
                rewards_ptr, values_ptr, advantages_ptr, returns_ptr, offsets, inside, sampled,
                carry_policy, carry_critic, lam_policy, lam_critic, gamma, LONG // WIDTH, WIDTH,
            )  # fmt: skip


@torch.library.custom_op("vapo_kernels::gae", mutates_args=())
def gae_op(
    rewards: Tensor,
    values: Tensor,
    cu_seqlens: Tensor | None,
    mask: Tensor | None,
    lam_policies: Tensor | None,
    lam_critics: Tensor | None,
    bootstrap_values: Tensor | None,
    num_sequences: int,
    gamma: float,
    lam_policy: float,
    lam_critic: float,
    alpha: float,
) -> tuple[Tensor, Tensor]:
    """Flat tensors in, flat float32 out; rows of equal length without ``cu_seqlens``; Eq. 15 where lam_policy < 0."""
    num_tokens = rewards.numel()
    if not rewards.is_cuda:
        _expect_packing(cu_seqlens, num_tokens)
    if not use_triton(rewards):
        return gae_torch(
            rewards, values, cu_seqlens, mask, lam_policies, lam_critics, bootstrap_values,
            num_sequences, gamma, lam_policy, lam_critic, alpha,
        )  # fmt: skip
    advantages = torch.empty(num_tokens, dtype=torch.float32, device=rewards.device)
    returns = torch.empty_like(advantages)
    if num_tokens > 0:
        with on_device_of(rewards):
            _gae_kernel[(num_sequences + (cu_seqlens is not None),)](
                rewards, values, mask, cu_seqlens, lam_policies, lam_critics, bootstrap_values, advantages, returns,
                num_tokens, num_sequences, num_tokens // max(num_sequences, 1), gamma, lam_policy, lam_critic, alpha,
                HAS_MASK=mask is not None, PADDED=cu_seqlens is None, ADAPTIVE=lam_policies is None and lam_policy < 0,
                LAM_POLICY_TENSOR=lam_policies is not None, LAM_CRITIC_TENSOR=lam_critics is not None,
                HAS_BOOTSTRAP=bootstrap_values is not None, SHORT=SHORT_BLOCK, LONG=LONG_BLOCK, WIDTH=ROW_WIDTH,
                num_warps=8,
            )  # fmt: skip
    return advantages, returns


@gae_op.register_fake
def _(rewards, values, *_):
    return torch.empty_like(rewards, dtype=torch.float32), torch.empty_like(rewards, dtype=torch.float32)


def _expect_packing(cu_seqlens: Tensor | None, num_tokens: int) -> None:
    if cu_seqlens is None:
        return
    lengths = cu_seqlens.diff()
    good = cu_seqlens[0] == 0 and cu_seqlens[-1] <= num_tokens and not bool((lengths < 0).any())
    shown = cu_seqlens.tolist() if len(cu_seqlens) <= 8 else [*cu_seqlens[:4].tolist(), "…", *cu_seqlens[-3:].tolist()]
    expect(bool(good), "cu_seqlens", f"offsets from 0 that never decrease and end at most at N = {num_tokens}", shown)
