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

from vapo_kernels._arguments import (
    INDEX_DTYPES,
    as_mask,
    expect,
    expect_mask,
    expect_number,
    expect_tensor,
    expect_values,
    flat,
)
from vapo_kernels.ops.gae.kernel import gae_op

# α of Eq. 15 in the paper.
ALPHA = 0.05


class GAE(NamedTuple):
    """Advantages and returns, float32, exactly 0 where the mask is False."""

    advantages: Tensor
    returns: Tensor


def length_adaptive_lambda(lengths: Tensor, *, alpha: float = ALPHA) -> Tensor:
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
    alpha: float = ALPHA,
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
    token yields zeros, as do tokens after ``cu_seqlens[-1]``. Nothing here carries a gradient. The recursion
    runs in float32 whatever comes in: in bfloat16 a λ near 1 would round to 1. The kernel moves 16 bytes a token
    in float32, one more with a mask, two where Eq. 15 has to count a long masked sequence first. On the CPU a
    sequence's last bit may depend on where it lies in the packing.

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
        alpha: α of Eq. 15; left at its default beside a ``lam_policy``.
        bootstrap_values: [S] floating. V(s_l) of truncated sequences, 0 for finished ones. None: all 0.

    Returns:
        Advantages and returns, [N] float32, exactly 0 where ``mask`` is False.

    Raises:
        ValueError: If a shape, dtype, device or range is not as above, or an ``alpha`` has no effect.

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
    alpha: float = ALPHA,
    bootstrap_values: Tensor | None = None,
) -> GAE:
    """Estimate advantages and returns of a padded batch: `packed_gae` of its rows.

    Padding on either side and holes inside are positions where ``mask`` is False; they are never read.

    Args:
        rewards: [B, T] floating. r_t.
        values: [B, T] floating. V(s_t), before token t.
        mask: [B, T] bool, integer or float 0/1, True on tokens that the policy sampled.
        gamma: Discount γ in [0, 1].
        lam_policy: None (Eq. 15), a float in [0, 1], or [B] floating.
        lam_critic: Float in [0, 1], or [B] floating.
        alpha: α of Eq. 15; left at its default beside a ``lam_policy``.
        bootstrap_values: [B] floating, V(s_l) of truncated rows. None: all 0.

    Returns:
        Advantages and returns, [B, T] float32, exactly 0 where ``mask`` is False.

    Raises:
        ValueError: If a shape, dtype, device or range is not as above, or an ``alpha`` has no effect.

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
    expect(lam_policy is None or alpha == ALPHA, "alpha", "its default beside lam_policy: it has no effect", alpha)
    for name, lam in (("lam_policy", lam_policy), ("lam_critic", lam_critic)):
        if isinstance(lam, Tensor):
            expect_tensor(lam, name, like=like, shape=(num_sequences,))
            expect_values(lam, (lam >= 0) & (lam <= 1), name, "numbers in [0, 1]")
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
