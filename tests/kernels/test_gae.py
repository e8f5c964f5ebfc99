"""packed_gae, padded_gae and length_adaptive_lambda (Eq. 5-9, 13-15)."""

import itertools

import pytest
import torch
from draws import DTYPES, cast, on, packed_inputs
from oracle import assert_within_budget

from vapo_kernels import length_adaptive_lambda, packed_gae, padded_gae, reference
from vapo_kernels.ops import gae

# With blocks of 16 (one step) and 32 (many steps).
PACKINGS = [
    [1],  # one token
    [7],
    [16, 1],  # exactly one short block
    [17, 3],  # one token more than a short block: the looping path, one step
    [31, 0, 33, 2],  # below and above a long block; an empty sequence between
    [0, 70, 0],  # three long blocks between empty sequences
    [0],  # a sequence, no token
    [],  # no sequence
]
SETTINGS = {
    "defaults": {},
    "alpha": {"alpha": 0.4, "lam_critic": 0.9},
    "numbers": {"gamma": 0.97, "lam_policy": 0.9, "lam_critic": 0.6},
    "tensors": {"gamma": 0.9, "lam_policy": torch.Tensor, "lam_critic": torch.Tensor},
}


def settings_for(name: str, num_sequences: int, device) -> dict:
    """A setting, with one λ in [0, 1] for each sequence in the place of torch.Tensor."""
    draw = torch.Generator().manual_seed(3)
    return {
        key: torch.rand(num_sequences, generator=draw).to(device) if value is torch.Tensor else value
        for key, value in SETTINGS[name].items()
    }


def assert_gae(actual, inputs: dict, **settings):
    exact = reference.packed_gae(**cast({**inputs, **settings}, torch.float64))
    baseline = reference.packed_gae(**cast({**inputs, **settings}, torch.float32))
    for name in gae.GAE._fields:
        assert getattr(actual, name).dtype == torch.float32
        assert_within_budget(getattr(actual, name), getattr(baseline, name), getattr(exact, name), name=name)


def test_worked_example(device):
    rewards = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0], device=device)
    expected = torch.tensor([0.95**k for k in (4, 3, 2, 1, 0)], dtype=torch.float64)
    cu_seqlens = torch.tensor([0, 5], device=device)
    out = packed_gae(rewards, torch.zeros_like(rewards), cu_seqlens, lam_policy=0.95, lam_critic=0.95)
    for x in out:
        assert_within_budget(x, expected.float(), expected)
        assert [round(a, 4) for a in x.tolist()] == [0.8145, 0.8574, 0.9025, 0.95, 1.0]

    # γ = ½, λ_policy = ½, λ_critic = 1, bootstrap 8; the third token is masked. By hand, from the end:
    # δ = 1 + ½·8 − 4 = 1, then 2 + ½·4 − 2 = 2:  Â = 2 + ¼·1 = 2.25, R̂ = (2 + ½·1) + 2 = 4.5.
    out = packed_gae(
        torch.tensor([2.0, 1.0, 99.0], device=device),
        torch.tensor([2.0, 4.0, 99.0], device=device),
        torch.tensor([0, 3], device=device),
        mask=torch.tensor([1, 1, 0], device=device),
        gamma=0.5,
        lam_policy=0.5,
        bootstrap_values=torch.tensor([8.0], device=device),
    )
    assert out.advantages.tolist() == [2.25, 1.0, 0.0]
    assert out.returns.tolist() == [4.5, 5.0, 0.0]


def test_length_adaptive_lambda():
    lengths = torch.tensor([[0, 1, 19], [20, 40, 10_240]])
    expected = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.5, 1 - 1 / 512]])
    assert torch.equal(length_adaptive_lambda(lengths), expected)
    assert torch.equal(length_adaptive_lambda(lengths.int()), expected)
    assert torch.equal(length_adaptive_lambda(lengths.float()), expected)
    # A bfloat16 λ of 1 − 1/512 would be 1.
    assert length_adaptive_lambda(torch.tensor([10_240.0], dtype=torch.bfloat16)).item() == 1 - 1 / 512
    exact = 1 - 1 / (0.3 * torch.arange(1, 50, dtype=torch.float64))
    assert_within_budget(length_adaptive_lambda(torch.arange(1, 50), alpha=0.3), exact.float(), exact.clamp(min=0))
    assert length_adaptive_lambda(torch.tensor([100.0], dtype=torch.float64)).dtype == torch.float64
    for bad, name, got in [
        ([1, 2], "lengths", "list"),
        (torch.tensor([True]), "lengths", "torch.bool"),
        (torch.tensor([1j]), "lengths", "complex"),
    ]:
        with pytest.raises(ValueError, match=rf"^{name}: expected .*, got .*{got}"):
            length_adaptive_lambda(bad)
    for alpha in (0.0, -1.0, float("nan"), float("inf"), "0.05"):
        with pytest.raises(ValueError, match=rf"^alpha: expected a number > 0, got .*{alpha}"):
            length_adaptive_lambda(lengths, alpha=alpha)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("lengths", PACKINGS, ids=str)
def test_matches_reference(device, lengths, setting):
    for dtype in DTYPES:
        for slack in (0, 5):
            inputs = packed_inputs(lengths, dtype=dtype, device=device, slack=slack)
            settings = settings_for(setting, len(lengths), device)
            assert_gae(packed_gae(**inputs, **settings), inputs, **settings)
        # The same without the optional arguments.
        del inputs["mask"], inputs["bootstrap_values"]
        assert_gae(packed_gae(**inputs, **settings), inputs, **settings)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 16), (2, 17), (1, 65), (0, 4), (3, 0)], ids=str)
def test_padded_matches_reference(device, shape, setting):
    num_rows, num_slots = shape
    inputs = packed_inputs([num_slots] * num_rows, device=device)
    del inputs["cu_seqlens"]
    inputs.update({name: inputs[name].view(shape) for name in ("rewards", "values", "mask")})
    settings = settings_for(setting, num_rows, device)
    actual = padded_gae(**inputs, **settings)
    exact, baseline = (
        reference.padded_gae(**cast({**inputs, **settings}, dtype)) for dtype in (torch.float64, torch.float32)
    )
    for name in gae.GAE._fields:
        assert getattr(actual, name).shape == shape
        assert_within_budget(getattr(actual, name), getattr(baseline, name), getattr(exact, name), name=name)


@pytest.mark.parametrize("lengths", [[5], [16, 3, 40]], ids=str)
def test_identities(device, lengths):
    inputs = packed_inputs(lengths, device=device)
    bounds, bootstrap = inputs["cu_seqlens"].tolist(), inputs["bootstrap_values"]
    # Small integers: their sums are exact in float32, so any influence of the critic would show.
    rewards = torch.randint(-4, 5, inputs["rewards"].shape).float().to(device)
    bootstrap = torch.randint(-4, 5, bootstrap.shape).float().to(device)
    suffix = torch.cat(
        [rewards[a:b].flip(0).cumsum(0).flip(0) + bootstrap[s] for s, (a, b) in enumerate(itertools.pairwise(bounds))]
    )
    critics = (torch.zeros_like(rewards), inputs["values"], 1e30 * inputs["values"])
    for values in critics:
        out = packed_gae(rewards, values, inputs["cu_seqlens"], lam_policy=1.0, bootstrap_values=bootstrap)
        assert torch.equal(out.returns, suffix)  # λ = γ = 1 is Monte Carlo
        assert torch.equal(out.advantages, suffix - values)

    # λ = 0 is δ, one token at a time.
    values = inputs["values"].double().cpu()
    delta = inputs["rewards"].double().cpu() - values
    for s, (a, b) in enumerate(itertools.pairwise(bounds)):
        delta[a:b] += 0.9 * torch.cat([values[a + 1 : b], inputs["bootstrap_values"][s : s + 1].double().cpu()])
    out = packed_gae(
        inputs["rewards"],
        inputs["values"],
        inputs["cu_seqlens"],
        gamma=0.9,
        lam_policy=0.0,
        lam_critic=0.0,
        bootstrap_values=inputs["bootstrap_values"],
    )
    assert_within_budget(out.advantages, delta.float(), delta)
    assert_within_budget(out.returns, (delta + values).float(), delta + values)

    # γ = 0: only the token's own reward.
    out = packed_gae(**{**inputs, "rewards": rewards}, gamma=0.0)
    assert torch.equal(out.returns, rewards * inputs["mask"])

    # One λ for both: R̂ = Â + V (Eq. 9).
    out = packed_gae(**inputs, lam_policy=0.7, lam_critic=0.7)
    exact = reference.packed_gae(**cast(inputs, torch.float64), lam_policy=0.7, lam_critic=0.7).returns
    assert_within_budget(out.advantages + inputs["values"] * inputs["mask"], exact.float(), exact)


def test_masked_tokens_are_as_if_removed(device):
    lengths = [5, 20, 40]
    inputs = packed_inputs(lengths, device=device)
    mask = inputs["mask"]
    kept = torch.tensor([int(part.sum()) for part in mask.split(lengths)])
    short = {name: inputs[name][mask] for name in ("rewards", "values")}
    short["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.int64), kept.cumsum(0)]).to(device)
    short["bootstrap_values"] = inputs["bootstrap_values"]
    out = packed_gae(**inputs, gamma=0.9)
    assert_gae(gae.GAE(out.advantages[mask], out.returns[mask]), short, gamma=0.9)
    assert not out.advantages[~mask].any() and not out.returns[~mask].any()


def test_padding_side_does_not_matter(device):
    inputs = packed_inputs([6, 20], device=device)
    del inputs["mask"]
    exact = packed_gae(**inputs)
    rewards, values = (torch.full((2, 24), 7.0, device=device) for _ in range(2))
    for place in (lambda n: slice(0, n), lambda n: slice(24 - n, 24), lambda n: slice(2, 2 + n)):
        mask = torch.zeros(2, 24, dtype=torch.bool, device=device)
        for row, n in enumerate((6, 20)):
            mask[row, place(n)] = True
        rewards[mask], values[mask] = inputs["rewards"], inputs["values"]
        out = padded_gae(rewards, values, mask, bootstrap_values=inputs["bootstrap_values"])
        for actual, baseline in zip(out, exact, strict=True):
            assert_within_budget(actual[mask], baseline, baseline)
            assert not actual[~mask].any()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_masked_is_never_read(device, poison):
    inputs = packed_inputs([5, 16, 40, 3], device=device, slack=4)
    inputs["mask"][-7:-4] = False  # a sequence without a True token
    end = inputs["cu_seqlens"][-1]
    unread = ~inputs["mask"]
    unread[end:] = True
    clean = packed_gae(**{**inputs, **{k: inputs[k].masked_fill(unread, 0) for k in ("rewards", "values")}})
    dirty = packed_gae(**{**inputs, **{k: inputs[k].masked_fill(unread, poison) for k in ("rewards", "values")}})
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a, b)
        assert not b[unread].any()
        assert b[~unread].any()

    rewards = torch.full((2, 5), poison, device=device)
    mask = torch.zeros(2, 5, device=device)
    rewards[0, 1:3], mask[0, 1:3] = 1.0, 1.0
    out = padded_gae(rewards, rewards.clone(), mask, lam_policy=1.0)
    assert out.returns.tolist() == [[0, 2, 1, 0, 0], [0] * 5]
    assert out.advantages.tolist() == [[0, 1, 0, 0, 0], [0] * 5]


def test_registration(device):
    inputs = packed_inputs([5, 20], device=device, slack=2)
    lams = torch.rand(2, device=device)
    tensors = inputs["rewards"], inputs["values"], inputs["cu_seqlens"]
    for arguments in (
        (*tensors, inputs["mask"], None, None, inputs["bootstrap_values"], 2, 0.9, -1.0, 1.0, 0.05),
        (*tensors, None, lams, lams.clone(), None, 2, 0.9, 0.0, 0.0, 0.05),
        (inputs["rewards"], inputs["values"], None, None, None, None, None, 3, 1.0, 0.9, 1.0, 0.05),
    ):
        torch.library.opcheck(gae.gae_op, arguments)

    compiled = torch.compile(packed_gae, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([5, 20], [3, 1, 18]):
        inputs = packed_inputs(lengths, device=device)
        for a, b in zip(compiled(**inputs, gamma=0.9), packed_gae(**inputs, gamma=0.9), strict=True):
            assert torch.equal(a, b)


GOOD = {
    "rewards": torch.zeros(4),
    "values": torch.zeros(4),
    "cu_seqlens": torch.tensor([0, 1, 4]),
    "mask": torch.ones(4),
}
BAD = [
    ("rewards", torch.zeros(2, 2), r"\[N\]", r"\(2, 2\)"),
    ("rewards", [0.0] * 4, "a tensor", "list"),
    ("rewards", torch.zeros(4, dtype=torch.int64), "floating", "int64"),
    ("values", torch.zeros(3), r"\(4,\)", r"\(3,\)"),
    ("values", torch.zeros(4, dtype=torch.int32), "floating", "int32"),
    ("values", torch.zeros(4, device="meta"), "cpu|cuda", "meta"),
    ("cu_seqlens", torch.tensor([0.0, 4.0]), "int64", "float32"),
    ("cu_seqlens", torch.tensor([[0, 4]]), r"\[S \+ 1\]", r"\(1, 2\)"),
    ("cu_seqlens", torch.zeros(0, dtype=torch.int64), r"\[S \+ 1\]", r"\(0,\)"),
    ("cu_seqlens", torch.zeros(3, dtype=torch.int64, device="meta"), "cpu|cuda", "meta"),
    ("mask", torch.ones(5), r"\(4,\)", r"\(5,\)"),
    ("mask", torch.ones(4, dtype=torch.complex64), "bool", "complex64"),
    ("mask", torch.ones(4, device="meta"), "cpu|cuda", "meta"),
    ("gamma", 1.5, r"\[0, 1\]", "1.5"),
    ("gamma", -0.1, r"\[0, 1\]", "-0.1"),
    ("gamma", float("nan"), r"\[0, 1\]", "nan"),
    ("gamma", torch.tensor(0.9), r"\[0, 1\]", "tensor"),
    ("alpha", 0.0, "> 0", "0.0"),
    ("lam_policy", 1.01, r"\[0, 1\]", "1.01"),
    ("lam_policy", torch.rand(3), r"\(2,\)", r"\(3,\)"),
    ("lam_policy", torch.ones(2, dtype=torch.int64), "floating", "int64"),
    ("lam_critic", -0.5, r"\[0, 1\]", "-0.5"),
    ("lam_critic", None, r"\[0, 1\]", "None"),
    ("lam_critic", torch.rand(2, device="meta"), "cpu|cuda", "meta"),
    ("bootstrap_values", torch.zeros(4), r"\(2,\)", r"\(4,\)"),
    ("bootstrap_values", torch.zeros(2, dtype=torch.bool), "floating", "bool"),
    ("bootstrap_values", torch.zeros(2, device="meta"), "cpu|cuda", "meta"),
]


@pytest.mark.parametrize(("name", "value", "expected", "got"), BAD)
def test_rejects_bad_input(device, monkeypatch, name, value, expected, got):
    monkeypatch.setattr(gae, "gae_op", None)
    bad = value.to(device) if isinstance(value, torch.Tensor) and not value.is_meta else value
    with pytest.raises(ValueError, match=rf"^{name}: expected .*({expected}).*, got .*{got}"):
        packed_gae(**{**on(device, **GOOD), name: bad})
    if name in ("rewards", "values", "cu_seqlens", "mask"):
        return
    rows = {"rewards": torch.zeros(2, 3), "values": torch.zeros(2, 3), "mask": torch.ones(2, 3)}
    with pytest.raises(ValueError, match=rf"^{name}: expected .*({expected}).*, got .*{got}"):
        padded_gae(**{**on(device, **rows), name: bad})


def test_padded_rejects_bad_input(device, monkeypatch):
    monkeypatch.setattr(gae, "gae_op", None)
    good = on(device, rewards=torch.zeros(2, 3), values=torch.zeros(2, 3), mask=torch.ones(2, 3))
    for name, value, got in [
        ("rewards", torch.zeros(6), r"\(6,\)"),
        ("values", torch.zeros(3, 2), r"\(3, 2\)"),
        ("mask", torch.ones(2, 4), r"\(2, 4\)"),
        ("mask", None, "NoneType"),
    ]:
        bad = value if value is None else value.to(device)
        with pytest.raises(ValueError, match=rf"^{name}: expected .*, got .*{got}"):
            padded_gae(**{**good, name: bad})


@pytest.mark.parametrize("implementation", [gae, reference])
@pytest.mark.parametrize("lam_policy", [0.05, 1.0, torch.Tensor])
def test_rejects_alpha_beside_lambda(device, implementation, lam_policy):
    """Eq. 15 is not asked for, so α would be ignored."""
    lam_policy = torch.rand(2, device=device) if lam_policy is torch.Tensor else lam_policy
    rows = {"rewards": torch.zeros(2, 3), "values": torch.zeros(2, 3), "mask": torch.ones(2, 3)}
    for op, inputs in ((implementation.packed_gae, GOOD), (implementation.padded_gae, rows)):
        inputs = on(device, **inputs)
        with pytest.raises(ValueError, match=r"^alpha: expected its default beside lam_policy.*, got 0\.4"):
            op(**{**inputs, "lam_policy": lam_policy, "alpha": 0.4})
        op(**{**inputs, "lam_policy": lam_policy})
        op(**{**inputs, "alpha": 0.4})


@pytest.mark.parametrize("offsets", [[1, 4], [0, 5], [0, 3, 2], [0, 3, 2, 4], [-1, 4]], ids=str)
def test_rejects_offsets_that_lie(device, offsets):
    if device.type != "cpu":
        pytest.skip("offsets on a GPU are not read by the host")
    with pytest.raises(ValueError, match=r"^cu_seqlens: expected offsets from 0 .* N = 4, got \["):
        packed_gae(torch.zeros(4), torch.zeros(4), torch.tensor(offsets))
