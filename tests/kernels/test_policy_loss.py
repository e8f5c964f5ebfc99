"""policy_loss: the whole of Eq. 17 from logits."""

import pytest
import torch
from draws import DTYPES, ROW_SHAPES, cast, on, policy_inputs, references, run, split
from oracle import assert_fields, assert_gradient, assert_within_budget

from vapo_kernels import logprob_policy_loss, policy_loss, reference, token_logprobs
from vapo_kernels.ops.policy_loss.from_logits import policy_loss_inplace_op, policy_loss_op

SETTINGS = {
    "all terms": {
        "clip_low": 0.1,
        "clip_high": 0.3,
        "dual_clip": 1.5,
        "nll_weight": 0.3,
        "kl_weight": 0.2,
        "entropy_weight": 0.05,
        "temperature": 0.7,
        "num_tokens": 9,
        "num_correct_tokens": torch.tensor(4),
    },
    "defaults": {},
    "per-token temperature": {"temperature": torch.Tensor, "entropy_weight": 0.5, "nll_weight": 2.0},
    "entropy alone": {"entropy_weight": -1.0, "nll_weight": 0.0},
}
OPTIONAL = ("is_correct", "token_weights", "ref_logprobs")


def inputs_for(shape, V, setting="all terms", *, dtype=torch.float32, device="cpu", seed=0) -> dict:
    inputs = policy_inputs(shape, V, dtype=dtype, seed=seed)
    settings = dict(SETTINGS[setting])
    if setting == "defaults":
        inputs = {name: x for name, x in inputs.items() if name not in OPTIONAL}
    if setting == "per-token temperature":
        settings["temperature"] = 0.5 + torch.rand(shape, generator=torch.Generator().manual_seed(5))
    if setting == "entropy alone":
        inputs["advantages"] = torch.zeros_like(inputs["advantages"])
    return on(device, **inputs, **settings)


def run_inplace(inputs: dict, *, upstream: float = 1.0):
    """As `run`, with the gradient written over a copy of the logits."""
    leaf = inputs["logits"].detach().requires_grad_()
    out = policy_loss(**{**inputs, "logits": leaf + 0, "inplace": True})
    (grad,) = torch.autograd.grad(out.loss, leaf, torch.full_like(out.loss, upstream))
    return out, {"logits": grad}


def test_worked_example(device):
    # Three tokens of p = ¼ ¾. The first has ratio 1 and Â 2; the second (p = ¾, old ⅜) has ratio 2 and is clipped to
    # 1.28; the third is masked. The first is correct.
    p = torch.tensor([0.25, 0.75])
    inputs = on(
        device,
        logits=p.log().expand(3, 2).contiguous(),
        token_ids=torch.tensor([0, 1, 0]),
        old_logprobs=torch.tensor([0.25, 0.375, 1.0]).log(),
        advantages=torch.tensor([2.0, 1.0, 5.0]),
        mask=torch.tensor([1, 1, 0]),
        is_correct=torch.tensor([1, 0, 1]),
        nll_weight=0.5,
    )

    def assert_close(actual, expected):
        exact = torch.as_tensor(expected, dtype=torch.float64)
        assert_within_budget(actual, exact.float(), exact)

    log4 = torch.tensor(4.0, dtype=torch.float64).log()
    for out, grads in (run(policy_loss, inputs, "logits"), run_inplace(inputs)):
        assert_close(out.policy, -(2 + 1.28) / 2)
        assert_close(out.positive_nll, log4)
        assert_close(out.loss, -(2 + 1.28) / 2 + 0.5 * log4)
        assert_close(out.clip_fraction, 0.5)
        assert_close(out.entropy, (0.25 * log4 - 0.75 * torch.tensor(0.75, dtype=torch.float64).log()))
        assert (out.num_tokens, out.num_correct_tokens) == (2, 1)
        # ∂loss/∂log p = −1 − ½ for the first; times ∂log p_0/∂z = (¾, −¾).
        assert_close(grads["logits"], [[-1.125, 1.125], [0, 0], [0, 0]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("shape", "V"), ROW_SHAPES, ids=str)
def test_matches_reference(device, shape, V, setting, dtype):
    inputs = inputs_for(shape, V, setting, dtype=dtype, device=device)
    upstream = 1.0 if setting == "defaults" else -2.5
    (exact, exact_grads), (baseline, baseline_grads) = references(
        reference.policy_loss, inputs, "logits", upstream=upstream
    )
    out, grads = run(policy_loss, inputs, "logits", upstream=upstream)
    assert_fields(out, baseline, exact)
    assert grads["logits"].dtype == dtype
    assert_gradient(grads["logits"], baseline_grads["logits"], exact_grads["logits"])

    without = policy_loss(**inputs)
    assert not without.loss.requires_grad
    over, over_grads = run_inplace(inputs, upstream=upstream)
    for other in (without, over):
        assert all(torch.equal(a, b) for a, b in zip(out, other, strict=True))
    assert torch.equal(over_grads["logits"], grads["logits"])


def test_identities(device):
    inputs = inputs_for((6,), 70, device=device)
    mask = inputs["mask"] = torch.tensor([1, 1, 0, 1, 1, 1], device=device).bool()
    correct = inputs["is_correct"] = torch.tensor([1, 0, 1, 0, 1, 1], device=device).bool()
    inputs |= {"num_tokens": int(mask.sum()), "num_correct_tokens": int((mask & correct).sum())}
    whole, grads = run(policy_loss, inputs, "logits")

    own = {n: x for n, x in inputs.items() if n not in ("num_tokens", "num_correct_tokens")}
    assert all(torch.equal(a, b) for a, b in zip(policy_loss(**own), whole, strict=True))

    # Micro-batches add up, losses and gradients, however the step is cut.
    for sizes in ([2, 4], [1] * 6):
        parts = [run(policy_loss, part, "logits") for part in split(inputs, sizes)]
        for name in whole._fields[:-1]:
            total = sum(getattr(out, name).double() for out, _ in parts)
            assert_within_budget(getattr(whole, name), total.float(), total, name=name)
        assert torch.equal(torch.cat([g["logits"] for _, g in parts]), grads["logits"])

    # Masked tokens are as if they were not there.
    kept = {n: x[mask] if isinstance(x, torch.Tensor) and x.dim() else x for n, x in inputs.items()}
    out, kept_grads = run(policy_loss, kept, "logits")
    assert_within_budget(out.loss, whole.loss, whole.loss)
    assert torch.equal(kept_grads["logits"], grads["logits"][mask])

    # Ratio 1: the log-probs of before and now are the same bits, so the policy term is −mean(Â) and no more.
    logits, ids, advantages = inputs["logits"], inputs["token_ids"], inputs["advantages"]
    for temperature in (1.0, 0.7):
        old = token_logprobs(logits, ids, mask=mask, temperature=temperature)
        out = policy_loss(logits, ids, old.logprobs, advantages, mask, temperature=temperature)
        assert torch.equal(out.logprobs, old.logprobs)
        assert (out.approx_kl, out.clip_fraction, out.positive_nll) == (0, 0, 0)
        mean = -advantages[mask].double().mean()
        assert_within_budget(out.loss, mean.float(), mean)
        entropy = old.entropy.double().sum() / mask.sum()
        assert_within_budget(out.entropy, entropy.float(), entropy)

    # The ops in two steps are the op in one.
    two = {n: x for n, x in inputs.items() if n not in ("logits", "token_ids", "temperature")}
    leaf = logits.detach().clone().requires_grad_()
    logprobs, entropy = token_logprobs(leaf, ids, mask=mask, temperature=0.7)
    out = logprob_policy_loss(logprobs, entropy=entropy, **two)
    for name in whole._fields:
        assert_within_budget(getattr(out, name), getattr(whole, name), getattr(whole, name), name=name)
    (grad,) = torch.autograd.grad(out.loss, leaf)
    exact = run(reference.policy_loss, cast(inputs, torch.float64), "logits")[1]["logits"]
    assert_within_budget(grads["logits"], grad, exact)

    # Without a correct token the NLL is 0 and its weight changes nothing.
    none = {**own, "is_correct": torch.zeros_like(mask), "nll_weight": 1e3}
    out, none_grads = run(policy_loss, none, "logits")
    assert (out.positive_nll, out.num_correct_tokens) == (0, 0)
    del none["is_correct"]
    assert torch.equal(none_grads["logits"], run(policy_loss, none, "logits")[1]["logits"])


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_masked_is_never_read(device, poison):
    inputs = inputs_for((6,), 70, "per-token temperature", device=device)
    mask = inputs["mask"] = torch.tensor([True, False, True, False, False, True], device=device)
    inputs["is_correct"] = torch.tensor([True, False, False, False, False, False], device=device)
    dirty_ids = inputs["token_ids"].clone()
    dirty_ids[~mask] = torch.tensor([-100, 70, 2**62], device=device)
    per_token = ("old_logprobs", "advantages", "token_weights", "ref_logprobs", "temperature")

    def filled(fill, ids, correct):
        return {
            **inputs,
            **{name: inputs[name].masked_fill(~mask, fill) for name in per_token},
            "logits": inputs["logits"].masked_fill(~mask.unsqueeze(-1), fill),
            "token_ids": ids,
            "is_correct": inputs["is_correct"].masked_fill(~mask, correct),
            "kl_weight": 0.3,
        }

    clean, dirty = filled(1.0, inputs["token_ids"], False), filled(poison, dirty_ids, True)
    out, grads = run(policy_loss, clean, "logits")
    for other, other_grads in (run(policy_loss, dirty, "logits"), run_inplace(dirty)):
        assert all(torch.equal(a, b) for a, b in zip(out, other, strict=True))
        assert torch.equal(grads["logits"], other_grads["logits"])
        assert not other.logprobs[~mask].any() and not other_grads["logits"][~mask].any()
        assert other_grads["logits"][mask].all()


def test_registration(device):
    inputs = inputs_for((4,), 70, device=device)
    logits, ids = inputs["logits"], inputs["token_ids"]
    tensors = [inputs[n] for n in ("old_logprobs", "advantages", "mask", "is_correct", "token_weights", "ref_logprobs")]
    divisors = torch.tensor([3.0, 2.0, 1.0], device=device)
    numbers = [0.2, 0.28, 3.0, 0.1, 0.2, 0.05]
    temperatures = torch.full((4,), 0.7, device=device)
    full = (logits, ids, *tensors, temperatures, 1.0, divisors, numbers)
    plain = (logits, ids.int(), *tensors[:3], None, None, None, None, 1.4, divisors, numbers)
    for arguments in (full, plain):
        torch.library.opcheck(policy_loss_op, (*arguments, True))
        torch.library.opcheck(policy_loss_op, (*arguments, False))
        torch.library.opcheck(policy_loss_inplace_op, (logits.clone(), *arguments[1:]))

    def over(logits, **rest):
        return policy_loss(logits + 0, inplace=True, **rest)

    for op in (policy_loss, over):
        compiled = torch.compile(op, fullgraph=True, dynamic=True, backend="aot_eager")
        for n, V, clip_high in ((4, 70, 0.28), (3, 65, 0.5)):
            inputs = {**inputs_for((n,), V, device=device), "clip_high": clip_high}
            (a, grads_a), (b, grads_b) = (run(f, inputs, "logits", upstream=3.0) for f in (compiled, policy_loss))
            assert all(torch.equal(x, y) for x, y in zip((*a, *grads_a.values()), (*b, *grads_b.values()), strict=True))


# Three tokens, shared by all forms of the policy loss.
BAD = [
    ("logits", torch.zeros(()), r"\[\.\.\., V\]", ""),
    ("logits", torch.zeros(3, 5, dtype=torch.int64), "floating", "int64"),
    ("logits", torch.zeros(3, 0), "at least one column", r"\(3, 0\)"),
    ("token_ids", torch.zeros(2, dtype=torch.int64), r"\(3,\)", r"\(2,\)"),
    ("token_ids", torch.zeros(3), "int64", "float32"),
    ("token_ids", torch.zeros(3, dtype=torch.int64, device="meta"), "cpu|cuda", "meta"),
    ("temperature", 0.0, "> 0", "0.0"),
    ("temperature", torch.ones(2), r"\(3,\)", r"\(2,\)"),
    ("temperature", torch.ones(3, device="meta"), "cpu|cuda", "meta"),
    ("old_logprobs", torch.zeros(2), r"\(3,\)", r"\(2,\)"),
    ("old_logprobs", None, "a tensor", "NoneType"),
    ("old_logprobs", torch.zeros(3, device="meta"), "cpu|cuda", "meta"),
    ("advantages", torch.zeros(3, 1), r"\(3,\)", r"\(3, 1\)"),
    ("advantages", torch.zeros(3, dtype=torch.int64), "floating", "int64"),
    ("mask", torch.ones(4), r"\(3,\)", r"\(4,\)"),
    ("mask", torch.ones(3, dtype=torch.complex64), "bool", "complex64"),
    ("is_correct", torch.ones(2), r"\(3,\)", r"\(2,\)"),
    ("token_weights", torch.ones(1), r"\(3,\)", r"\(1,\)"),
    ("ref_logprobs", torch.zeros(3, 3), r"\(3,\)", r"\(3, 3\)"),
    ("num_tokens", -1, "≥ 0", "-1"),
    ("num_tokens", torch.ones(3), "0-dim", r"\(3,\)"),
    ("num_correct_tokens", 2, "is_correct", "None"),
    ("clip_low", 1.1, r"\[0, 1\]", "1.1"),
    ("clip_high", -0.1, "≥ 0", "-0.1"),
    ("dual_clip", 1.0, "> 1", "1.0"),
    ("nll_weight", -0.1, "≥ 0", "-0.1"),
    ("kl_weight", 0.1, "without ref_logprobs", "0.1"),
    ("entropy_weight", float("nan"), "a number", "nan"),
]


@pytest.mark.parametrize(("name", "value", "expected", "got"), BAD)
def test_rejects_bad_input(device, monkeypatch, name, value, expected, got):
    monkeypatch.setattr("vapo_kernels.ops.policy_loss.from_logits.policy_loss_op", None)
    three = torch.zeros(3)
    good = {"token_ids": three.long(), "old_logprobs": three, "advantages": three, "mask": torch.ones(3)}
    good = on(device, logits=torch.zeros(3, 5), **good)
    bad = value.to(device) if isinstance(value, torch.Tensor) and not value.is_meta else value
    with pytest.raises(ValueError, match=rf"^{name}: expected .*({expected}).*, got .*{got}"):
        policy_loss(**{**good, name: bad})


def test_rejects_inplace_where_it_would_corrupt(device):
    inputs = inputs_for((4,), 70, "defaults", device=device)
    leaf = inputs["logits"].requires_grad_()
    with pytest.raises(ValueError, match=r"^inplace: expected .*computed by a model, got a leaf"):
        policy_loss(**inputs, inplace=True)
    row = (leaf + 0)[:1]
    for logits in (row.expand(4, 70), (leaf + 0).t().contiguous().t(), torch.cat([leaf, leaf], -1)[:, ::2]):
        before = logits.detach().clone()
        with pytest.raises(ValueError, match=r"^inplace: expected .*apart in memory, got strides"):
            policy_loss(**{**inputs, "logits": logits}, inplace=True)
        assert torch.equal(logits, before)
    # Without a gradient to write, the logits stay as they are.
    before = leaf.detach().clone()
    with torch.no_grad():
        policy_loss(**inputs, inplace=True)
    policy_loss(**{**inputs, "logits": leaf.detach()}, inplace=True)
    assert torch.equal(leaf, before)
