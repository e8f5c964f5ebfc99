"""logprob_policy_loss: the clipped surrogate and its companions from log-probs (Eq. 3, 4, 16, 17)."""

import math

import pytest
import torch
from draws import DTYPES, on, policy_inputs, references, run, split
from oracle import assert_fields, assert_gradient, assert_within_budget

from vapo_kernels import logprob_policy_loss, reference
from vapo_kernels.ops.policy_loss.from_logprobs import logprob_policy_loss_op

# Blocks of 32: one token, less than a block, exactly one, one more, several with a tail in two dimensions, none.
SHAPES = [(1,), (7,), (32,), (33,), (3, 37), ()]
FULL = {
    "clip_low": 0.1,
    "clip_high": 0.3,
    "dual_clip": 1.5,
    "nll_weight": 0.3,
    "kl_weight": 0.2,
    "entropy_weight": 0.05,
    "num_tokens": 50,
    "num_correct_tokens": torch.tensor(9),
}
# What each setting leaves out of the arguments.
SETTINGS = {
    "all terms": (FULL, ()),
    "defaults": ({}, ("entropy", "token_weights", "ref_logprobs")),
    "no correct": ({"clip_high": 0.05}, ("is_correct", "ref_logprobs", "entropy")),
    "KL alone": ({"kl_weight": 1.0, "nll_weight": 0.0}, ("is_correct", "token_weights", "entropy")),
    "entropy alone": ({"entropy_weight": -0.5}, ("is_correct", "token_weights", "ref_logprobs")),
}


def inputs_for(shape, setting="all terms", *, dtype=torch.float32, device="cpu", seed=0) -> dict:
    inputs = policy_inputs(shape, 9, seed=seed)
    draw = torch.Generator().manual_seed(seed + 1)
    inputs["logprobs"] = -2 * torch.rand(shape, generator=draw)
    inputs["old_logprobs"] = inputs["logprobs"] + 0.4 * torch.randn(shape, generator=draw)
    inputs["ref_logprobs"] = inputs["logprobs"] + 0.7 * torch.randn(shape, generator=draw)
    inputs["entropy"] = 3 * torch.rand(shape, generator=draw)
    settings, left_out = SETTINGS[setting]
    for name in ("logits", "token_ids", *left_out):
        del inputs[name]
    inputs = {n: x.to(dtype) if x.is_floating_point() else x for n, x in inputs.items()}
    return on(device, **inputs, **settings)


def test_worked_example(device):
    # Ratios 1, 2, 2, ½, ½, 4 with advantages 1, 1, −1, 1, −1, −1; clips 0.8 and 1.28, dual clip 3; the last is masked.
    # Surrogates: 1; 1.28 (clipped); −2; ½; −0.8 (clipped); then −3 (bounded) for a seventh token of ratio 4.
    ratios = torch.tensor([1.0, 2.0, 2.0, 0.5, 0.5, 4.0, 4.0])
    inputs = on(
        device,
        logprobs=torch.full((7,), -1.0),
        old_logprobs=-1 - ratios.log(),
        advantages=torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0, -1.0, -1.0]),
        mask=torch.tensor([1, 1, 1, 1, 1, 0, 1]),
        is_correct=torch.tensor([1, 1, 0, 0, 0, 1, 0]),
        dual_clip=3.0,
        num_tokens=10,
        num_correct_tokens=4,
    )
    out, grads = run(logprob_policy_loss, inputs, "logprobs")

    def assert_close(actual, expected):
        exact = torch.as_tensor(expected, dtype=torch.float64)
        assert_within_budget(actual, exact.float(), exact)

    surrogates = [1, 1.28, -2, 0.5, -0.8, -3]
    assert_close(out.policy, -sum(surrogates) / 10)
    assert_close(out.positive_nll, 2 / 4)
    assert_close(out.loss, -sum(surrogates) / 10 + 0.1 * 2 / 4)
    assert_close(out.clip_fraction, 3 / 10)
    assert (out.num_tokens, out.num_correct_tokens, out.kl, out.entropy) == (6, 2, 0, 0)
    # k3 of x = log r: r − 1 − log r.
    k3 = [r - 1 - math.log(r) for r in (1, 2, 2, 0.5, 0.5, 4)]
    assert_close(out.approx_kl, sum(k3) / 10)
    slopes = [-1 / 10, 0, 2 / 10, -0.5 / 10, 0, 0, 0]
    nll_slopes = [-0.1 / 4, -0.1 / 4, 0, 0, 0, 0, 0]
    assert_close(grads["logprobs"], [a + b for a, b in zip(slopes, nll_slopes, strict=True)])
    assert_close(out.logprobs, [-1.0] * 5 + [0.0, -1.0])


def test_kl_and_entropy_by_hand(device):
    inputs = on(
        device,
        logprobs=torch.tensor([-1.0, -1.0]),
        old_logprobs=torch.tensor([-1.0, -1.0]),
        advantages=torch.zeros(2),
        mask=torch.ones(2),
        entropy=torch.tensor([2.0, 0.5]),
        ref_logprobs=torch.tensor([-1.0 + math.log(2), -1.0 - math.log(2)]),
        kl_weight=3.0,
        entropy_weight=0.25,
    )
    out, grads = run(logprob_policy_loss, inputs, ["logprobs", "entropy"])
    kl = (2 - 1 - math.log(2) + 0.5 - 1 + math.log(2)) / 2
    assert out.kl.item() == pytest.approx(kl, rel=1e-6)
    assert out.entropy.item() == 1.25
    assert out.loss.item() == pytest.approx(3 * kl - 0.25 * 1.25, rel=1e-6)
    # ∂k3/∂log π = 1 − π_ref/π.
    assert grads["logprobs"].tolist() == pytest.approx([3 * (1 - 2) / 2, 3 * (1 - 0.5) / 2], rel=1e-6)
    assert grads["entropy"].tolist() == [-0.125, -0.125]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(device, shape, setting, dtype):
    inputs = inputs_for(shape, setting, dtype=dtype, device=device)
    wrt = ["logprobs", "entropy"] if "entropy" in inputs else "logprobs"
    out, grads = run(logprob_policy_loss, inputs, wrt, upstream=-2.0)
    (exact, exact_grads), (baseline, baseline_grads) = references(
        reference.logprob_policy_loss, inputs, wrt, upstream=-2.0
    )
    assert_fields(out, baseline, exact)
    for name, grad in grads.items():
        assert grad.dtype == dtype and grad.shape == shape
        assert_gradient(grad, baseline_grads[name], exact_grads[name], name=f"gradient of {name}")
    without = logprob_policy_loss(**inputs)
    assert not without.loss.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(out, without, strict=True))


def test_identities(device):
    inputs = inputs_for((60,), device=device)
    mask = inputs["mask"]
    inputs |= {"num_tokens": int(mask.sum()), "num_correct_tokens": int((mask & inputs["is_correct"]).sum())}
    wrt = ["logprobs", "entropy"]
    whole, grads = run(logprob_policy_loss, inputs, wrt)

    # The step's own counts are the default.
    own = {n: x for n, x in inputs.items() if n not in ("num_tokens", "num_correct_tokens")}
    assert all(torch.equal(a, b) for a, b in zip(logprob_policy_loss(**own), whole, strict=True))

    # Micro-batches add up, losses and gradients, however the step is cut.
    for sizes in ([20, 40], [1, 58, 1], [15] * 4):
        parts = [run(logprob_policy_loss, part, wrt) for part in split(inputs, sizes)]
        for name in whole._fields[:-1]:
            total = sum(getattr(out, name).double() for out, _ in parts)
            assert_within_budget(getattr(whole, name), total.float(), total, name=name)
        for name in wrt:
            assert torch.equal(torch.cat([g[name] for _, g in parts]), grads[name])

    # Masked tokens are as if they were not there.
    kept = {n: x[mask] if isinstance(x, torch.Tensor) and x.dim() else x for n, x in inputs.items()}
    out, kept_grads = run(logprob_policy_loss, kept, wrt)
    for name in whole._fields[:-1]:
        assert_within_budget(getattr(out, name), getattr(whole, name), getattr(whole, name), name=name)
    for name in wrt:
        assert torch.equal(kept_grads[name], grads[name][mask])

    # Ratio 1: the policy term is −mean(Â), nothing is clipped, and both KL estimates of a policy with itself are 0.
    same = inputs["logprobs"]
    out = logprob_policy_loss(same, same.clone(), inputs["advantages"], mask, ref_logprobs=same.clone())
    mean = -inputs["advantages"][mask].double().mean()
    assert_within_budget(out.policy, mean.float(), mean)
    assert (out.clip_fraction, out.approx_kl, out.kl) == (0, 0, 0)

    # Without a correct token the NLL is 0, and its weight does not matter.
    none = {**own, "is_correct": torch.zeros_like(mask)}
    out, none_grads = run(logprob_policy_loss, {**none, "nll_weight": 1e3}, wrt)
    assert (out.positive_nll, out.num_correct_tokens) == (0, 0)
    del none["is_correct"]
    _, absent_grads = run(logprob_policy_loss, none, wrt)
    assert torch.equal(none_grads["logprobs"], absent_grads["logprobs"])

    # k3 is never below 0, also where e^x − 1 − x is rounding alone.
    near = same + torch.linspace(-1e-3, 1e-3, 60, device=device)
    one = torch.ones(1, device=device)
    pairs = zip(same.split(1), near.split(1), strict=True)
    approx = torch.stack([logprob_policy_loss(a, b, b, one).approx_kl for a, b in pairs]).cpu().double()
    x = (same - near).double().cpu()
    exact = torch.expm1(x) - x
    assert (approx >= 0).all()
    assert ((approx - exact).abs() <= 1e-5 * exact + 1e-16).all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_masked_is_never_read(device, poison):
    inputs = inputs_for((40,), device=device)
    mask = inputs["mask"]
    results = []
    for fill, correct in ((0.0, False), (poison, True)):
        per_token = ("logprobs", "old_logprobs", "advantages", "entropy", "token_weights", "ref_logprobs")
        filled = {**inputs, **{name: inputs[name].masked_fill(~mask, fill) for name in per_token}}
        filled["is_correct"] = inputs["is_correct"].masked_fill(~mask, correct)
        out, grads = run(logprob_policy_loss, filled, ["logprobs", "entropy"])
        results.append((*out, grads["logprobs"], grads["entropy"]))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)
    for per_token in results[1][-3:]:
        assert not per_token[~mask].any() and per_token[mask].any()


def test_registration(device):
    inputs = inputs_for((40,), device=device)
    tensors = [inputs[n] for n in ("old_logprobs", "advantages", "mask", "is_correct", "token_weights", "ref_logprobs")]
    divisors = torch.tensor([30.0, 20.0, 1.0], device=device)
    numbers = [0.2, 0.28, 3.0, 0.1, 0.2, 0.05]
    arguments = (inputs["logprobs"], inputs["entropy"], *tensors, divisors, numbers)
    torch.library.opcheck(logprob_policy_loss_op, arguments)
    arguments = (inputs["logprobs"], None, *tensors[:3], None, None, None, divisors, numbers)
    torch.library.opcheck(logprob_policy_loss_op, arguments)

    compiled = torch.compile(logprob_policy_loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape, clip_high in (((40,), 0.28), ((33,), 0.5)):
        inputs = {**inputs_for(shape, device=device), "clip_high": clip_high}
        (a, grads_a), (b, grads_b) = (
            run(op, inputs, ["logprobs", "entropy"], upstream=3.0) for op in (compiled, logprob_policy_loss)
        )
        assert all(torch.equal(x, y) for x, y in zip((*a, *grads_a.values()), (*b, *grads_b.values()), strict=True))


# Shared by all forms of the policy loss: three tokens.
BAD_TOKENS = [
    ("old_logprobs", torch.zeros(2), r"\(3,\)", r"\(2,\)"),
    ("old_logprobs", None, "a tensor", "NoneType"),
    ("old_logprobs", torch.zeros(3, dtype=torch.int64), "floating", "int64"),
    ("old_logprobs", torch.zeros(3, device="meta"), "cpu|cuda", "meta"),
    ("advantages", torch.zeros(3, 1), r"\(3,\)", r"\(3, 1\)"),
    ("advantages", torch.zeros(3, dtype=torch.bool), "floating", "bool"),
    ("mask", torch.ones(4), r"\(3,\)", r"\(4,\)"),
    ("mask", None, "a tensor", "NoneType"),
    ("mask", torch.ones(3, dtype=torch.complex64), "bool", "complex64"),
    ("is_correct", torch.ones(2), r"\(3,\)", r"\(2,\)"),
    ("is_correct", True, "a tensor", "bool"),
    ("token_weights", torch.ones(1), r"\(3,\)", r"\(1,\)"),
    ("token_weights", torch.ones(3, device="meta"), "cpu|cuda", "meta"),
    ("ref_logprobs", torch.zeros(3, 3), r"\(3,\)", r"\(3, 3\)"),
    ("num_tokens", -1, "≥ 0", "-1"),
    ("num_tokens", torch.ones(3), "0-dim", r"\(3,\)"),
    ("num_tokens", "3", "≥ 0", "3"),
    ("num_correct_tokens", 2, "is_correct", "None"),
    ("clip_low", 1.1, r"\[0, 1\]", "1.1"),
    ("clip_low", -0.1, r"\[0, 1\]", "-0.1"),
    ("clip_low", None, r"\[0, 1\]", "None"),
    ("clip_high", -0.1, "≥ 0", "-0.1"),
    ("clip_high", float("nan"), "≥ 0", "nan"),
    ("dual_clip", 1.0, "> 1", "1.0"),
    ("nll_weight", -0.1, "≥ 0", "-0.1"),
    ("kl_weight", -1.0, "≥ 0", "-1.0"),
    ("kl_weight", 0.1, "without ref_logprobs", "0.1"),
    ("entropy_weight", float("inf"), "a number", "inf"),
]
BAD = [
    *BAD_TOKENS[:-1],
    ("logprobs", [0.0], "a tensor", "list"),
    ("logprobs", torch.zeros(3, dtype=torch.int64), "floating", "int64"),
    ("entropy", torch.zeros(2), r"\(3,\)", r"\(2,\)"),
    ("entropy", torch.zeros(3, device="meta"), "cpu|cuda", "meta"),
    ("entropy_weight", 0.1, "without entropy", "0.1"),
]


@pytest.mark.parametrize(("name", "value", "expected", "got"), BAD)
def test_rejects_bad_input(device, monkeypatch, name, value, expected, got):
    monkeypatch.setattr("vapo_kernels.ops.policy_loss.from_logprobs.logprob_policy_loss_op", None)
    three = torch.zeros(3)
    good = on(device, logprobs=three, old_logprobs=three, advantages=three, mask=torch.ones(3))
    bad = value.to(device) if isinstance(value, torch.Tensor) and not value.is_meta else value
    with pytest.raises(ValueError, match=rf"^{name}: expected .*({expected}).*, got .*{got}"):
        logprob_policy_loss(**{**good, name: bad})
