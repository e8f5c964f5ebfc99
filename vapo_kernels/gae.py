"""Packed, variable-length, length-adaptive generalised advantage estimation (Eq. 5–9, 13–15).

Shapes: N tokens of S sequences end to end; B rows of T slots.

Kernel and CPU path both run Eq. 13 as one first-order recursion. With B_t = V(s_t) + λ Â_t,

    B_t = (1 − λ) V(s_t) + λ r_t + γ λ B_{t+1},    B_l = V(s_l)
    Â_t = r_t + γ B_{t+1} − V(s_t),    R̂_t = r_t + γ B_{t+1}

so a token is one affine map of B, a masked token is the identity, and maps compose associatively.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vapo_kernels._arguments import INDEX_DTYPES, as_mask, expect, expect_mask, expect_number, expect_tensor, flat
from vapo_kernels._dispatch import on_device_of, tl, triton, use_triton

# A sequence of at most SHORT_BLOCK tokens is one step of a program; a longer one takes LONG_BLOCK a step.
SHORT_BLOCK, LONG_BLOCK = 256, 4096
# Rows of the CPU path's blocked scan: its Python loop runs over these, never over time.
SCAN_ROWS = 64


class GAE(NamedTuple):
    """Advantages and returns, float32, exactly 0 where the mask is False."""

    advantages: Tensor
    returns: Tensor


def length_adaptive_lambda(lengths: Tensor, *, alpha: float = 0.05) -> Tensor:
    """λ_policy of each response from its length: the λ whose weights sum to α l.

        Σₖ λᵏ = 1/(1 − λ) = α l   ⟹   λ = 1 − 1/(α l)     (Eq. 14, 15)

    Eq. 15 is negative for α l < 1 (l < 20 at α = 0.05), so the result is clamped to [0, 1]; an empty
    response (l = 0) gets 0. No gradient.

    Args:
        lengths: [...] integer or float. Sampled tokens of each response (not prompt, not tool output).
        alpha: α > 0; the paper uses 0.05.

    Returns:
        [...] float32 (float64 for float64 lengths).

    Raises:
        ValueError: If ``lengths`` is no real tensor or ``alpha`` is not positive.

    Example:
        >>> length_adaptive_lambda(torch.tensor([0, 10, 40, 400]))
        tensor([0.0000, 0.0000, 0.5000, 0.9500])

    Source: VAPO, arXiv:2504.05118, length-adaptive GAE.
    """
    expect(isinstance(lengths, Tensor), "lengths", "a tensor", type(lengths).__name__)
    expect(
        not lengths.is_complex() and lengths.dtype != torch.bool, "lengths", "an integer or float dtype", lengths.dtype
    )
    expect_number(alpha, "alpha", "a number > 0", low=0, open_low=True)
    lengths = lengths.detach().to(torch.float64 if lengths.dtype == torch.float64 else torch.float32)
    return torch.where(lengths > 0, (1 - 1 / (alpha * lengths)).clamp(0, 1), 0.0)


def packed_gae(
    rewards: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    *,
    mask: Tensor | None = None,
    gamma: float = 1.0,
    lam_policy: float | Tensor | None = None,
    lam_critic: float | Tensor = 1.0,
    alpha: float = 0.05,
    bootstrap_values: Tensor | None = None,
) -> GAE:
    """Estimate advantages and returns of packed responses, each with its own λ, in one launch.

        δ_t = r_t + γ V(s_{t+1}) − V(s_t)            (Eq. 6, 8)
        Â_t = δ_t + γ λ_policy Â_{t+1}               (Eq. 13)
        R̂_t = V(s_t) + Σₖ (γ λ_critic)ᵏ δ_{t+k}      (Eq. 5, 9)

    Advantages and returns use different λ, so R̂ − V is not Â. V(s_l) after the last token is 0, or
    ``bootstrap_values`` for a response that was cut off. With λ_critic = γ = 1 the returns are the suffix
    sums of the rewards (plus the bootstrap), whatever the critic says. A token where ``mask`` is False is
    skipped without decay or δ: the recursion is that of the sequence without it, and neither its value nor
    its reward is read. So a verifier's reward belongs on the last *sampled* token. A sequence without a True
    token yields zeros, as do tokens behind ``cu_seqlens[-1]``. Nothing here carries a gradient. The recursion
    runs in float32 whatever comes in: in bfloat16 a λ near 1 would round to 1.

    Args:
        rewards: [N] floating. r_t.
        values: [N] floating. V(s_t), the critic's estimate before token t is sampled.
        cu_seqlens: [S + 1] int32 or int64. Sequence s is tokens ``cu_seqlens[s] : cu_seqlens[s + 1]``;
            starts at 0, never decreases, ends at most at N. Checked on the CPU only.
        mask: [N] bool, integer or float 0/1, True on tokens that the policy sampled. None: all of them.
        gamma: Discount γ in [0, 1].
        lam_policy: None: Eq. 15 from each sequence's own count of True tokens, computed in the kernel;
            a float in [0, 1]; or [S] floating.
        lam_critic: Float in [0, 1], or [S] floating.
        alpha: α of Eq. 15; used where ``lam_policy`` is None.
        bootstrap_values: [S] floating. V(s_l) of truncated sequences, 0 for finished ones. None: all 0.

    Returns:
        Advantages and returns, [N] float32, exactly 0 where ``mask`` is False.

    Raises:
        ValueError: If a shape, dtype, device or range is not as above.

    Example:
        One reward, at the last of five tokens; values 0; λ = 0.95 for both.

        >>> rewards = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0])
        >>> out = packed_gae(rewards, torch.zeros(5), torch.tensor([0, 5]), lam_policy=0.95, lam_critic=0.95)
        >>> out.advantages
        tensor([0.8145, 0.8574, 0.9025, 0.9500, 1.0000])
        >>> torch.equal(out.advantages, out.returns)
        True

    Source: GAE, arXiv:1506.02438; decoupled λ, arXiv:2503.01491; length-adaptive λ, arXiv:2504.05118.
    """
    expect(isinstance(rewards, Tensor) and rewards.dim() == 1, "rewards", "a tensor of shape [N]", _shape_of(rewards))
    expect_tensor(rewards, "rewards", like=rewards)
    expect_tensor(values, "values", like=rewards, shape=rewards.shape)
    expect_tensor(cu_seqlens, "cu_seqlens", like=rewards, dtypes=INDEX_DTYPES)
    expect(cu_seqlens.dim() == 1 and len(cu_seqlens) >= 1, "cu_seqlens", "shape [S + 1]", tuple(cu_seqlens.shape))
    if mask is not None:
        expect_mask(mask, "mask", like=rewards, shape=rewards.shape)
    num_sequences = len(cu_seqlens) - 1
    _expect_coefficients(gamma, lam_policy, lam_critic, alpha, bootstrap_values, num_sequences, like=rewards)
    return _gae(
        rewards, values, cu_seqlens, mask, gamma, lam_policy, lam_critic, alpha, bootstrap_values, num_sequences
    )


def padded_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam_policy: float | Tensor | None = None,
    lam_critic: float | Tensor = 1.0,
    alpha: float = 0.05,
    bootstrap_values: Tensor | None = None,
) -> GAE:
    """Estimate advantages and returns of a padded batch: `packed_gae` of its rows.

    Padding on either side and holes inside are places where ``mask`` is False; they are never read.

    Args:
        rewards: [B, T] floating. r_t.
        values: [B, T] floating. V(s_t), before token t.
        mask: [B, T] bool, integer or float 0/1, True on tokens that the policy sampled.
        gamma: Discount γ in [0, 1].
        lam_policy: None (Eq. 15), a float in [0, 1], or [B] floating.
        lam_critic: Float in [0, 1], or [B] floating.
        alpha: α of Eq. 15.
        bootstrap_values: [B] floating, V(s_l) of truncated rows. None: all 0.

    Returns:
        Advantages and returns, [B, T] float32, exactly 0 where ``mask`` is False.

    Raises:
        ValueError: If a shape, dtype, device or range is not as above.

    Example:
        With λ_critic = γ = 1 the returns are the reward-to-go, whatever the values are.

        >>> rewards, mask = torch.tensor([[0.0, 1.0, 9.0]]), torch.tensor([[True, True, False]])
        >>> padded_gae(rewards, torch.rand(1, 3), mask).returns
        tensor([[1., 1., 0.]])

    Source: as `packed_gae`.
    """
    expect(
        isinstance(rewards, Tensor) and rewards.dim() == 2, "rewards", "a tensor of shape [B, T]", _shape_of(rewards)
    )
    expect_tensor(rewards, "rewards", like=rewards)
    expect_tensor(values, "values", like=rewards, shape=rewards.shape)
    expect_mask(mask, "mask", like=rewards, shape=rewards.shape)
    num_rows = len(rewards)
    _expect_coefficients(gamma, lam_policy, lam_critic, alpha, bootstrap_values, num_rows, like=rewards)
    out = _gae(rewards, values, None, mask, gamma, lam_policy, lam_critic, alpha, bootstrap_values, num_rows)
    return GAE(out.advantages.view(rewards.shape), out.returns.view(rewards.shape))


def _shape_of(x: object) -> object:
    return tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__


def _expect_coefficients(gamma, lam_policy, lam_critic, alpha, bootstrap_values, num_sequences, *, like):
    expect_number(gamma, "gamma", "a number in [0, 1]", low=0, high=1)
    expect_number(alpha, "alpha", "a number > 0", low=0, open_low=True)
    for name, lam in (("lam_policy", lam_policy), ("lam_critic", lam_critic)):
        if isinstance(lam, Tensor):
            expect_tensor(lam, name, like=like, shape=(num_sequences,))
        elif lam is not None or name == "lam_critic":
            expect_number(lam, name, "a number in [0, 1] or a tensor [S]", low=0, high=1)
    if bootstrap_values is not None:
        expect_tensor(bootstrap_values, "bootstrap_values", like=like, shape=(num_sequences,))


def _gae(
    rewards, values, cu_seqlens, mask, gamma, lam_policy, lam_critic, alpha, bootstrap_values, num_sequences
) -> GAE:
    def split(lam):
        return (flat(lam), 0.0) if isinstance(lam, Tensor) else (None, -1.0 if lam is None else float(lam))

    (policy_tensor, policy_number), (critic_tensor, critic_number) = split(lam_policy), split(lam_critic)
    return GAE(
        *gae_op(
            flat(rewards),
            flat(values),
            None if cu_seqlens is None else cu_seqlens.contiguous(),
            None if mask is None else as_mask(mask),
            policy_tensor,
            critic_tensor,
            flat(bootstrap_values),
            num_sequences,
            float(gamma),
            policy_number,
            critic_number,
            float(alpha),
        )
    )


@triton.jit
def _compose(decay_later, add_later, decay, add):
    """The affine map of a token after that of everything behind it."""
    return decay * decay_later, add + decay * add_later


@triton.jit
def _scan(value, reward, sampled, carry, lam, gamma, lane, BLOCK: tl.constexpr):
    """B_{t+1} of every token of a block, and B of its first token, from the B behind the block."""
    decay = tl.where(sampled, gamma * lam, 1.0)
    add = tl.where(sampled, (1.0 - lam) * value + lam * reward, 0.0)
    decay, add = tl.associative_scan((decay, add), 0, _compose, reverse=True)
    b = add + decay * carry
    later = tl.gather(b, tl.minimum(lane + 1, BLOCK - 1), 0)
    return tl.where(lane == BLOCK - 1, carry, later), tl.sum(tl.where(lane == 0, b, 0.0), 0)


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
    BLOCK: tl.constexpr,
):
    """Advantages and returns of one block; returns the B of its first token for both λ."""
    lane = tl.arange(0, BLOCK)
    reward = tl.load(rewards_ptr + offsets, mask=sampled, other=0.0).to(tl.float32)
    value = tl.load(values_ptr + offsets, mask=sampled, other=0.0).to(tl.float32)
    later_policy, carry_policy = _scan(value, reward, sampled, carry_policy, lam_policy, gamma, lane, BLOCK)
    later_critic, carry_critic = _scan(value, reward, sampled, carry_critic, lam_critic, gamma, lane, BLOCK)
    tl.store(advantages_ptr + offsets, tl.where(sampled, reward + gamma * later_policy - value, 0.0), mask=inside)
    tl.store(returns_ptr + offsets, tl.where(sampled, reward + gamma * later_critic, 0.0), mask=inside)
    return carry_policy, carry_critic


@triton.jit
def _adaptive_lambda(length, alpha):
    """Eq. 15, clamped; 0 for an empty response."""
    length = length.to(tl.float32)
    lam = 1.0 - 1.0 / (alpha * tl.maximum(length, 1.0))
    return tl.where(length > 0, tl.minimum(tl.maximum(lam, 0.0), 1.0), 0.0)


@triton.jit(do_not_specialize=["num_tokens", "num_sequences", "row_length"])
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
    num_tokens,
    num_sequences,
    row_length,
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
        offsets = start + tl.arange(0, SHORT)
        inside = offsets < end
        sampled = _load_sampled(mask_ptr, offsets, inside, HAS_MASK)
        if ADAPTIVE:
            lam_policy = _adaptive_lambda(tl.sum(sampled.to(tl.int32), 0), alpha)
        _gae_block(
            rewards_ptr, values_ptr, advantages_ptr, returns_ptr, offsets, inside, sampled,
            carry, carry, lam_policy, lam_critic, gamma, SHORT,
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
        carry_policy = carry + 0.0
        carry_critic = carry + 0.0
        num_blocks = tl.cdiv(end - start, LONG)
        for step in range(0, num_blocks):
            offsets = start + (num_blocks - 1 - step) * LONG + tl.arange(0, LONG)
            inside = offsets < end
            sampled = _load_sampled(mask_ptr, offsets, inside, HAS_MASK)
            carry_policy, carry_critic = _gae_block(
                rewards_ptr, values_ptr, advantages_ptr, returns_ptr, offsets, inside, sampled,
                carry_policy, carry_critic, lam_policy, lam_critic, gamma, LONG,
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
    """Flat tensors in, flat float32 out; rows of equal length where ``cu_seqlens`` is None; Eq. 15 where lam_policy < 0."""
    num_tokens = rewards.numel()
    if not rewards.is_cuda:
        _expect_packing(cu_seqlens, num_tokens)
    if not use_triton(rewards):
        return _gae_torch(
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
                HAS_BOOTSTRAP=bootstrap_values is not None, SHORT=SHORT_BLOCK, LONG=LONG_BLOCK, num_warps=8,
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


def _gae_torch(
    rewards, values, cu_seqlens, mask, lam_policies, lam_critics, bootstrap_values,
    num_sequences, gamma, lam_policy, lam_critic, alpha,
):  # fmt: skip
    """The same recursion on the True tokens alone, as a blocked scan."""
    num_tokens = rewards.numel()
    if cu_seqlens is None:
        cu_seqlens = torch.arange(num_sequences + 1) * (num_tokens // max(num_sequences, 1))
    cu_seqlens, num_packed = cu_seqlens.long(), int(cu_seqlens[-1])
    index = None
    if mask is not None:
        index = mask[:num_packed].nonzero().squeeze(1)
        cu_seqlens = torch.searchsorted(index, cu_seqlens)
    elif num_packed < num_tokens:
        index = torch.arange(num_packed)
    r = (rewards if index is None else rewards[index]).float()
    v = (values if index is None else values[index]).float()
    lengths = cu_seqlens.diff()
    if lam_policies is None and lam_policy < 0:
        lam_policies = length_adaptive_lambda(lengths, alpha=alpha)
    ends = (cu_seqlens[1:] - 1)[lengths > 0]
    bootstrap = torch.zeros(len(ends)) if bootstrap_values is None else bootstrap_values.float()[lengths > 0]

    def reward_to_go(lam_tensor, lam_number):
        if len(r) == 0:
            return r
        lam = lam_number if lam_tensor is None else lam_tensor.float().repeat_interleave(lengths, output_size=len(r))
        add = torch.lerp(v, r, lam)
        decay = torch.full_like(r, gamma * lam) if lam_tensor is None else lam.mul_(gamma)
        add[ends] += decay[ends] * bootstrap
        decay[ends] = 0.0
        later = torch.empty_like(r)
        later[:-1] = _reverse_scan(add, decay)[1:]
        later[ends] = bootstrap
        return later.mul_(gamma).add_(r)

    advantages, returns = reward_to_go(lam_policies, lam_policy).sub_(v), reward_to_go(lam_critics, lam_critic)
    if index is None:
        return advantages, returns
    outputs = torch.zeros(2, num_tokens)
    outputs[0, index], outputs[1, index] = advantages, returns
    return outputs[0].clone(), outputs[1].clone()


def _reverse_scan(add: Tensor, decay: Tensor) -> Tensor:
    """B_t = add_t + decay_t B_{t+1} from the end, by composing (decay, add) pairs, never dividing by powers."""
    num_chunks = -(-len(add) // SCAN_ROWS)
    padding = num_chunks * SCAN_ROWS - len(add)
    # [SCAN_ROWS, num_chunks]: step k of every chunk at once, contiguous.
    add = torch.nn.functional.pad(add, (0, padding)).view(num_chunks, SCAN_ROWS).t().contiguous()
    decay = torch.nn.functional.pad(decay, (0, padding)).view(num_chunks, SCAN_ROWS).t().contiguous()
    for k in reversed(range(SCAN_ROWS - 1)):
        torch.addcmul(add[k], decay[k], add[k + 1], out=add[k])
        torch.mul(decay[k], decay[k + 1], out=decay[k])
    if num_chunks > 1:
        carry = add.new_zeros(num_chunks)
        carry[:-1] = _reverse_scan(add[0], decay[0])[1:]
        add.addcmul_(decay, carry)
    return add.t().reshape(-1)[: num_chunks * SCAN_ROWS - padding]
