"""Faults of advantage estimation: masked values, holes, neighbours, λ near 1."""

import pytest
import torch
from draws import cast, packed_inputs
from oracle import assert_within_budget

from vapo_kernels import packed_gae, padded_gae, reference

NAN, INF = float("nan"), float("inf")


def test_masked_critic_value_does_not_bootstrap(device):
    """A garbage value behind the last sampled token: Â of a lone reward 1 is 1 and 0.95, not 5.7."""
    rewards = torch.tensor([0.0, 1.0, 0.0], device=device)
    values = torch.tensor([0.0, 0.0, 100.0], device=device)
    mask = torch.tensor([1, 1, 0], device=device)
    out = packed_gae(rewards, values, torch.tensor([0, 3], device=device), mask=mask, lam_policy=0.95)
    assert out.advantages.tolist() == pytest.approx([0.95, 1.0, 0.0], rel=1e-6)
    assert out.returns.tolist() == [1.0, 1.0, 0.0]


def test_interior_holes_do_not_decay(device):
    """A tool's output between two sampled tokens, longer than a block, is no step in time."""
    n = 80
    rewards, values, mask = (torch.zeros(n, device=device) for _ in range(3))
    mask[[0, 40, 79]], rewards[79] = 1.0, 1.0
    values[[0, 40, 79]] = torch.tensor([0.5, 0.25, 0.125], device=device)
    out = packed_gae(rewards, values, torch.tensor([0, n], device=device), mask=mask, gamma=0.5, lam_policy=0.5)
    deltas = [0.5 * 0.25 - 0.5, 0.5 * 0.125 - 0.25, 1 - 0.125]
    expected = [deltas[0] + 0.25 * deltas[1] + 0.0625 * deltas[2], deltas[1] + 0.25 * deltas[2], deltas[2]]
    assert out.advantages[mask.bool()].tolist() == expected
    assert out.returns[mask.bool()].tolist() == [0.25, 0.5, 1.0]


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_sequences_do_not_leak_into_each_other(device, poison):
    """Not even a reward of NaN: 0 times a neighbour's NaN would be NaN."""
    lengths = [5, 20, 0, 3, 40]
    inputs = packed_inputs(lengths, device=device)
    inputs["mask"] = torch.ones_like(inputs["mask"])
    clean = packed_gae(**inputs)
    exact = reference.packed_gae(**cast(inputs, torch.float64))
    rows = {name: inputs[name][5:65].view(3, 20) for name in ("rewards", "values", "mask")}
    exact_rows = reference.padded_gae(**cast(rows, torch.float64))

    def poisoned(name, place, x):
        return {**x, name: x[name].index_fill(0, torch.tensor([place], device=device), poison)}

    for name, place in (("rewards", 10), ("values", 10), ("bootstrap_values", 1)):
        dirty = packed_gae(**poisoned(name, place, inputs))
        for a, b, truth in zip(clean, dirty, exact, strict=True):
            others = torch.ones(68, dtype=torch.bool)
            others[5:25] = False
            assert_within_budget(b[others], a[others], truth[others])
            assert not b[5:10].isfinite().any()
    rewards = rows["rewards"].clone()
    rewards[1, 7] = poison
    for b, truth in zip(padded_gae(**{**rows, "rewards": rewards}), exact_rows, strict=True):
        assert_within_budget(b[::2], truth[::2].float(), truth[::2])
        assert not b[1, :8].isfinite().any()


def test_lambda_near_1_in_bfloat16(monkeypatch, device):
    """At l = 10,240 λ is 1 − 1/512, which bfloat16 rounds to 1."""
    from vapo_kernels.ops.gae import blocked_scan, kernel

    monkeypatch.setattr(kernel, "LONG_BLOCK", 1024)
    for name, value in (("SCAN_ROWS", 64), ("BLOCK_TOKENS", 4096)):
        monkeypatch.setattr(blocked_scan, name, value)
    n = 10_240
    rewards, values = torch.zeros(n, dtype=torch.bfloat16), torch.zeros(n, dtype=torch.bfloat16)
    rewards[-1] = 1
    out = packed_gae(rewards.to(device), values.to(device), torch.tensor([0, n], device=device))
    exact = (1 - 1 / 512) ** torch.arange(n - 1, -1, -1, dtype=torch.float64)
    baseline = torch.tensor(1 - 1 / 512) ** torch.arange(n - 1, -1, -1)
    assert_within_budget(out.advantages, baseline, exact, floor=1e-5)
    assert out.advantages[0].item() == pytest.approx((1 - 1 / 512) ** (n - 1), rel=1e-3)
    assert torch.equal(out.returns.cpu(), torch.ones(n))


def test_value_of_the_next_state_is_the_next_tokens(device):
    """Off by one in either direction would take V(s_t) or V(s_{t+2}); the last state's value is the bootstrap."""
    rewards = torch.tensor([1.0, 2.0, 4.0], device=device)
    values = torch.tensor([8.0, 16.0, 32.0], device=device)
    bounds, bootstrap = torch.tensor([0, 3], device=device), torch.tensor([64.0], device=device)
    out = packed_gae(rewards, values, bounds, lam_policy=0.0, lam_critic=0.0, bootstrap_values=bootstrap)
    assert out.advantages.tolist() == [1 + 16 - 8, 2 + 32 - 16, 4 + 64 - 32]
    assert out.returns.tolist() == [1 + 16, 2 + 32, 4 + 64]


@pytest.mark.parametrize("padding", [1, 16, 40])
def test_padding_changes_no_advantage(device, padding):
    inputs = packed_inputs([20], device=device)
    rows = {name: inputs[name].view(1, 20) for name in ("rewards", "values", "mask")}
    plain = padded_gae(**rows)
    for sides in ((0, padding), (padding, 0), (3, padding)):
        wide = {name: torch.nn.functional.pad(x.float(), sides, value=NAN) for name, x in rows.items()}
        wide["mask"] = wide["mask"].nan_to_num(0)
        out = padded_gae(**wide)
        exact = reference.padded_gae(**cast(rows, torch.float64))
        for a, b, truth in zip(plain, out, exact, strict=True):
            assert_within_budget(b[:, sides[0] : sides[0] + 20], a, truth)
