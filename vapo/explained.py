"""How much of the variance of the returns the critic explained before it trained on them."""

from __future__ import annotations

import torch
from torch import Tensor

from vapo.sharding import sum_over_ranks
from vapo.types import Batch
from vapo_kernels import explained_variance_from, value_moments


def explained_variances(batch: Batch) -> tuple[float, float]:
    """Explained variance over all tokens of a batch, and within the groups of responses to one prompt.

        1 − Var(R̂ − V)/Var(R̂),    1 − Σ (e − ē_g)²/Σ (R̂ − R̂_g)²    with e = R̂ − V and means over the tokens of group g

    The first can be high only because prompts differ in difficulty; the second is what a critic adds over a baseline
    that knows each group's mean. Sums run over all ranks.

    Returns:
        Both, at most 1; 0 where the returns do not vary.
    """
    total = explained_variance_from(sum_over_ranks(value_moments(batch.old_values, batch.returns, batch.mask)))
    rollout = batch.rollout
    group = torch.arange(len(rollout.lengths), device=batch.mask.device) // rollout.group_size
    group = group.repeat_interleave(rollout.lengths)[batch.mask]
    returns, values = batch.returns[batch.mask].double(), batch.old_values[batch.mask].double()
    sums = (_within(returns - values, group), _within(returns, group), returns.square().sum())
    errors, spread, square = sum_over_ranks(torch.stack(sums)).tolist()
    return total.item(), 1 - errors / spread if spread > 1e-12 * square else 0.0


def _within(x: Tensor, group: Tensor) -> Tensor:
    """Σ (x − x̄_g)², [] float64."""
    size = int(group.max()) + 1 if len(group) else 0
    counts = torch.zeros(size, dtype=x.dtype, device=x.device).index_add_(0, group, torch.ones_like(x))
    means = torch.zeros(size, dtype=x.dtype, device=x.device).index_add_(0, group, x) / counts
    return (x - means[group]).square().sum()
