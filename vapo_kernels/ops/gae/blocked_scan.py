"""The CPU path of `packed_gae` and `padded_gae`: the kernel's recursion as a blocked scan.

True tokens are brought end to end, then taken a block at a time from the end. A block lies in cache as
[SCAN_ROWS, λ, chunks]: step k of every chunk and of both λ is one row, so Python loops over the rows of a
block and never over time. Chunks are joined by the same scan over their heads.
"""

import numpy as np
import torch
from torch import Tensor

SCAN_ROWS = 64
# Tokens of a block: what the caches hold.
BLOCK_TOKENS = 1 << 19
# A mask with longer runs than this is copied run by run, one with shorter runs token by token.
MEAN_RUN = 128


def gae_torch(
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
    """Advantages and returns, flat float32; arguments as `gae_op`."""
    per_sequence = (lam_policies, lam_critics, bootstrap_values)
    numbers = (gamma, lam_policy, lam_critic, alpha)
    advantages, returns, is_finite = _scan_all(
        rewards, values, cu_seqlens, mask, *per_sequence, num_sequences, *numbers
    )
    if is_finite:
        return advantages, returns
    # A sequence forgets the next one by a decay of 0, but 0 times its NaN is NaN: such sequences are scanned alone.
    row_length = rewards.numel() // num_sequences
    bounds = range(0, rewards.numel() + 1, row_length) if cu_seqlens is None else cu_seqlens.tolist()
    for s, at in enumerate(map(slice, bounds[:-1], bounds[1:])):
        if not bool((advantages[at].sum() + returns[at].sum()).isfinite()):
            own = (None if x is None else x[s : s + 1] for x in per_sequence)
            own_mask = None if mask is None else mask[at]
            advantages[at], returns[at], _ = _scan_all(rewards[at], values[at], None, own_mask, *own, 1, *numbers)
    # R̂_t does not depend on V(s_t), but a V(s_t) that is not finite must be heard.
    broken = ~values[: bounds[-1]].isfinite() & (True if mask is None else mask[: bounds[-1]])
    returns[: bounds[-1]].masked_fill_(broken, torch.nan)
    return advantages, returns


def _scan_all(
    rewards, values, cu_seqlens, mask, lam_policies, lam_critics, bootstrap_values,
    num_sequences, gamma, lam_policy, lam_critic, alpha,
) -> tuple[Tensor, Tensor, bool]:  # fmt: skip
    """All sequences as one recursion, in which the end of a sequence has decay 0; and whether all inputs are finite."""
    num_tokens = rewards.numel()
    if cu_seqlens is None:
        bounds = np.arange(num_sequences + 1) * (num_tokens // max(num_sequences, 1))
    else:
        bounds = cu_seqlens.numpy().astype(np.int64)
    positions = _true_positions(mask, int(bounds[-1]))
    bounds = _true_before(positions, bounds)
    lengths, num_true = np.diff(bounds), int(bounds[-1])
    if lam_policies is not None:
        lam_policy = lam_policies.float().numpy()
    elif lam_policy < 0:
        lam_policy = np.clip(1 - 1 / (np.float32(alpha) * np.maximum(lengths, 1).astype(np.float32)), 0, 1)
    if lam_critics is not None:
        lam_critic = lam_critics.float().numpy()
    ends = torch.from_numpy((bounds[1:] - 1)[lengths > 0])
    bootstraps = torch.zeros(len(ends)) if bootstrap_values is None else bootstrap_values.float()[lengths > 0]

    # numpy's zeros are pages of the system that nobody has touched: padding costs nothing.
    advantages, returns = (torch.from_numpy(np.zeros(num_tokens, np.float32)) for _ in range(2))
    num_chunks = -(-min(BLOCK_TOKENS, num_true) // SCAN_ROWS)
    total = bootstraps.sum()
    carry, workspace = torch.zeros(2), torch.empty(3, 2, (SCAN_ROWS + 1) * num_chunks)
    for stop in range(num_true, 0, -BLOCK_TOKENS):
        at = slice(max(0, stop - BLOCK_TOKENS), stop)
        r, v = _take(rewards, positions, at).float(), _take(values, positions, at).float()
        total = total + r.sum() + v.sum()
        lams = [_per_token(lam, bounds, at) for lam in (lam_policy, lam_critic)]
        first, last = np.searchsorted(ends.numpy(), [at.start, at.stop])
        carry, later = _scan_block(
            r, v, lams, gamma, ends[first:last] - at.start, bootstraps[first:last], carry, workspace
        )
        later.mul_(gamma).add_(r)
        _put(later[1], returns, positions, at)
        _put(later[0].sub_(v), advantages, positions, at)
    return advantages, returns, bool(total.isfinite())


def _scan_block(r, v, lams, gamma, ends, bootstraps, carry, workspace) -> tuple[Tensor, Tensor]:
    """B of the block's first token [2], and B_{t+1} of each token [2, n], for both λ."""
    n = len(r)
    num_chunks = -(-n // SCAN_ROWS)
    size = num_chunks * SCAN_ROWS
    # One row more than SCAN_ROWS: B_{t+1} of the last row is what follows the chunk.
    adds = workspace[0][:, : size + num_chunks].view(2, SCAN_ROWS + 1, num_chunks)
    decays = workspace[1][:, :size].view(2, SCAN_ROWS, num_chunks)
    tokens = workspace[2][:, :size]
    add, decay = tokens
    for i, lam in enumerate(lams):
        torch.lerp(v, r, lam, out=add[:n])
        if isinstance(lam, Tensor):
            torch.mul(lam, gamma, out=decay[:n])
        else:
            decay[:n] = lam * gamma
        # After the block stands the identity; the end of a sequence takes its bootstrap and forgets the next one.
        add[n:], decay[n:] = 0.0, 1.0
        add[ends] += decay[ends] * bootstraps
        decay[ends] = 0.0
        adds[i, :-1].copy_(add.view(-1, SCAN_ROWS).t())
        decays[i].copy_(decay.view(-1, SCAN_ROWS).t())
    _scan_rows(adds, decays, carry)
    for later, b in zip(tokens, adds, strict=True):
        later.view(-1, SCAN_ROWS).copy_(b[1:].t())
    later = tokens[:, :n]
    later[:, ends] = bootstraps
    return adds[:, 0, 0].clone(), later


def _scan_rows(adds: Tensor, decays: Tensor, carry: Tensor) -> None:
    """Turn adds [2, rows + 1, chunks] into B_t = add_t + decay_t B_{t+1}, t = (chunk, row), from the end.

    The last row becomes the B after each chunk. Pairs (decay, add) are composed; a division by powers of the
    decay would overflow.
    """
    *add_rows, carries = adds.unbind(1)
    decay_rows = decays.unbind(1)
    for k in reversed(range(len(decay_rows) - 1)):
        add_rows[k].addcmul_(decay_rows[k], add_rows[k + 1])
        decay_rows[k].mul_(decay_rows[k + 1])
    carries.copy_(_scan_heads(add_rows[0], decay_rows[0], carry))
    adds[:, :-1].addcmul_(decays, carries.unsqueeze(1))


def _scan_heads(adds: Tensor, decays: Tensor, carry: Tensor) -> Tensor:
    """The B after each chunk, from the maps [2, chunks] of whole chunks."""
    num_chunks = adds.shape[1]
    if num_chunks > SCAN_ROWS:
        missing = -num_chunks % SCAN_ROWS
        pad = torch.nn.functional.pad
        adds = pad(adds, (0, missing)).view(2, -1, SCAN_ROWS).transpose(1, 2)
        decays = pad(decays, (0, missing), value=1.0).view(2, -1, SCAN_ROWS).transpose(1, 2).contiguous()
        adds = pad(adds, (0, 0, 0, 1))
        _scan_rows(adds, decays, carry)
        return adds[:, 1:].transpose(1, 2).reshape(2, -1)[:, :num_chunks]
    later, add_columns, decay_columns = [carry], adds.unbind(1), decays.unbind(1)
    for c in reversed(range(1, num_chunks)):
        later.append(torch.addcmul(add_columns[c], decay_columns[c], later[-1]))
    return torch.stack(later[::-1], dim=1)


def _per_token(lam, bounds: np.ndarray, at: slice) -> float | Tensor:
    """λ of the tokens of a block, from one λ or one for each sequence."""
    if isinstance(lam, float):
        return lam
    first, last = np.searchsorted(bounds, at.start, side="right") - 1, np.searchsorted(bounds, at.stop)
    counts = np.diff(np.clip(bounds[first : last + 1], at.start, at.stop))
    return torch.from_numpy(np.repeat(lam[first:last], counts))


def _true_positions(mask: Tensor | None, num_slots: int) -> np.ndarray:
    """Runs of True [runs, 3]: first, one after the last, True positions before; all positions [n] for short runs."""
    if mask is None:
        return np.array([[0, num_slots, 0]])
    true = mask[:num_slots].numpy()
    edges = np.flatnonzero(true[1:] != true[:-1]) + 1
    if len(edges) * MEAN_RUN > num_slots:
        return np.flatnonzero(true)
    first = [0] if num_slots and true[0] else []
    last = [num_slots] if num_slots and true[-1] else []
    starts, stops = np.concatenate([first, edges, last]).astype(np.int64).reshape(-1, 2).T
    return np.stack([starts, stops, np.cumsum(stops - starts) - (stops - starts)], axis=1)


def _true_before(positions: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Number of True positions before each bound."""
    if positions.ndim == 1:
        return np.searchsorted(positions, bounds)
    if len(positions) == 0:
        return np.zeros_like(bounds)
    starts, stops, before = positions.T
    run = np.maximum(np.searchsorted(starts, bounds) - 1, 0)
    return before[run] + np.clip(bounds - starts[run], 0, stops[run] - starts[run])


def _pieces(positions: np.ndarray, at: slice) -> list[tuple[int, int]]:
    """The runs, cut to the True tokens at a slice."""
    starts, stops, before = positions.T
    first, last = np.searchsorted(before, at.start, side="right") - 1, np.searchsorted(before, at.stop)
    starts = starts[first:last] + np.maximum(at.start - before[first:last], 0)
    stops = np.minimum(stops[first:last], positions[first:last, 0] + at.stop - before[first:last])
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def _take(x: Tensor, positions: np.ndarray, at: slice) -> Tensor:
    """The True tokens of ``x`` at a slice, end to end."""
    if positions.ndim == 1:
        return x[torch.from_numpy(positions[at])]
    pieces = [x[start:stop] for start, stop in _pieces(positions, at)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _put(y: Tensor, out: Tensor, positions: np.ndarray, at: slice) -> None:
    """Write the True tokens at a slice to their positions."""
    if positions.ndim == 1:
        out[torch.from_numpy(positions[at])] = y
        return
    done = 0
    for start, stop in _pieces(positions, at):
        out[start:stop] = y[done : done + stop - start]
        done += stop - start
