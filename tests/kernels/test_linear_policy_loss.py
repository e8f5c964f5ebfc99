"""linear_policy_loss: Eq. 17 from hidden states, a chunk of logits at a time."""

import pytest
import torch
from draws import DTYPES, cast, linear_inputs, on, references, run, split
from oracle import assert_fields, assert_within_budget

from vapo_kernels import _linear_chunks, linear_policy_loss, linear_token_logprobs, policy_loss, reference
from vapo_kernels.ops.policy_loss.from_hidden import linear_policy_loss_op

# (leading shape, H, V): one of each; less than a block; several chunks of rows and of W, blocks and tails in V; one row
# without a leading dimension.
SHAPES = [((1,), 1, 1), ((3,), 5, 7), ((7,), 8, 65), ((2, 3), 3, 130), ((), 4, 9)]
SETTINGS = {
    "all terms": {"dual_clip": 1.5, "nll_weight": 0.3, "kl_weight": 0.2, "entropy_weight": 0.05, "temperature": 0.7},
    "counts": {"num_tokens": 9, "num_correct_tokens": torch.tensor(4.0)},
}
WRT = ["hidden", "weight", "bias"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Two float32 rows of 65 columns a chunk."""
    monkeypatch.setattr(_linear_chunks, "LOGITS_BUFFER_BYTES", 600)
    monkeypatch.setattr(_linear_chunks, "WEIGHT_ROWS", 16)


def eager(hidden, weight, bias=None, **rest):
    """What PyTorch users write: logits in the working dtype, the rest in float32 or wider."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return reference.policy_loss(logits.float() if logits.dtype != torch.float64 else logits, **rest)


def working(inputs: dict) -> dict:
    """The inputs on the CPU in the dtypes they have."""
    return {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}


def test_worked_example(device):
    # Logits are log p of ¼ ¾ for the first token and of ½ ½ for the second; both ratios 1; advantages 2 and 0.
    log = torch.tensor([0.25, 0.75]).log()
    inputs = on(
        device,
        hidden=torch.tensor([[1.0, 0.0], [0.0, 1.0]]),
        weight=torch.stack([log, torch.zeros(2)], dim=1),
        bias=torch.zeros(2),
        token_ids=torch.tensor([0, 1]),
        old_logprobs=torch.tensor([0.25, 0.5]).log(),
        advantages=torch.tensor([2.0, 0.0]),
        mask=torch.ones(2),
    )
    out, grads = run(linear_policy_loss, inputs, WRT)
    exact = torch.tensor(-1.0, dtype=torch.float64)
    assert_within_budget(out.loss, exact.float(), exact)
    # ∂loss/∂z = −1·(¾, −¾) for the first token and 0 for the second.
    exact = torch.tensor([[-0.75, 0.0], [0.75, 0.0]], dtype=torch.float64)
    assert_within_budget(grads["weight"], exact.float(), exact)
    assert_within_budget(grads["bias"], exact[:, 0].float(), exact[:, 0])
    exact = torch.stack([-0.75 * (log[0] - log[1]), torch.tensor(0.0)]).double()
    assert_within_budget(grads["hidden"][0], exact.float(), exact)
    assert not grads["hidden"][1].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("shape", "H", "V"), SHAPES, ids=str)
def test_matches_reference(device, shape, H, V, setting, dtype):
    inputs = {**linear_inputs(shape, H, V, dtype=dtype, device=device), **on(device, **SETTINGS[setting])}
    out, grads = run(linear_policy_loss, inputs, WRT, upstream=-2.5)
    exact, exact_grads = run(reference.linear_policy_loss, cast(inputs, torch.float64), WRT, upstream=-2.5)
    baseline, baseline_grads = run(eager, working(inputs), WRT, upstream=-2.5)
    assert_fields(out, baseline, exact)
    for name, grad in grads.items():
        assert grad.dtype == dtype
        # A sum of rounded products may cancel: a float16 or bfloat16 entry has an ulp of its own.
        floor = max(1e-6, torch.finfo(dtype).eps)
        assert_within_budget(grad, baseline_grads[name], exact_grads[name], floor=floor, name=f"gradient of {name}")

    without = linear_policy_loss(**inputs)
    assert not without.loss.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(out, without, strict=True))
    # Frozen parts change nothing for the others.
    for name in WRT:
        _, alone = run(linear_policy_loss, inputs, name, upstream=-2.5)
        assert torch.equal(alone[name], grads[name])


def test_identities(device):
    inputs = {**linear_inputs((6,), 8, 65, device=device), "kl_weight": 0.2, "entropy_weight": 0.05}
    mask = inputs["mask"] = torch.tensor([1, 1, 0, 1, 1, 1], device=device).bool()
    inputs |= {"num_tokens": int(mask.sum()), "num_correct_tokens": int((mask & inputs["is_correct"]).sum())}
    whole, grads = run(linear_policy_loss, inputs, WRT)
    (_, exact), (_, baseline) = references(reference.linear_policy_loss, inputs, WRT)
    assert_within_budget(grads["hidden"], baseline["hidden"], exact["hidden"], name="hidden")

    # Micro-batches add up. The head is whole in each of them.
    head = {name: inputs[name] for name in ("weight", "bias")}
    rest = {name: x for name, x in inputs.items() if name not in head}
    for sizes in ([2, 4], [1, 5], [3, 3]):
        parts = [run(linear_policy_loss, {**part, **head}, WRT) for part in split(rest, sizes)]
        total = sum(out.loss.double() for out, _ in parts)
        assert_within_budget(whole.loss, total.float(), total, scale=1.0)
        hidden = torch.cat([g["hidden"] for _, g in parts])
        # A product of fewer rows may be summed in another order: each is held to the truth.
        assert_within_budget(hidden, baseline["hidden"], exact["hidden"], name="hidden")
        for name in head:
            total = sum(g[name].double() for _, g in parts)
            assert_within_budget(grads[name], total.float(), total, name=name)

    # Masked rows are as if they were not there.
    kept = {n: x[mask] if isinstance(x, torch.Tensor) and n not in head else x for n, x in inputs.items()}
    out, kept_grads = run(linear_policy_loss, kept, WRT)
    assert_within_budget(out.loss, whole.loss, whole.loss)
    assert_within_budget(kept_grads["weight"], grads["weight"], grads["weight"])
    assert not grads["hidden"][~mask].any()

    # Ratio 1 against the twin that gives log-probs alone.
    old = linear_token_logprobs(inputs["hidden"], **head, token_ids=inputs["token_ids"], mask=mask)
    out = linear_policy_loss(
        **{
            **rest,
            **head,
            "old_logprobs": old.logprobs,
            "kl_weight": 0.0,
            "is_correct": None,
            "num_correct_tokens": None,
            "token_weights": None,
            "entropy_weight": 0.0,
        }
    )
    assert torch.equal(out.logprobs, old.logprobs)
    assert (out.approx_kl, out.clip_fraction) == (0, 0)
    mean = -inputs["advantages"][mask].double().mean()
    assert_within_budget(out.loss, mean.float(), mean, scale=1.0)

    # From hidden states or from their logits: the same loss.
    logits = torch.nn.functional.linear(inputs["hidden"], inputs["weight"], inputs["bias"])
    from_logits = policy_loss(logits, **{n: x for n, x in rest.items() if n != "hidden"})
    for name in whole._fields:
        assert_within_budget(getattr(whole, name), getattr(from_logits, name), getattr(from_logits, name), name=name)

    # A tied weight: the gradients of both uses add up.
    tied = inputs["weight"].clone().requires_grad_()
    embedded = tied[inputs["token_ids"]]
    loss = linear_policy_loss(**{**rest, "hidden": embedded, "weight": tied, "bias": inputs["bias"]}).loss
    (grad,) = torch.autograd.grad(loss, tied)
    exact_inputs = cast({**rest, **head}, torch.float64)
    exact_tied = exact_inputs.pop("weight").requires_grad_()
    exact_inputs["hidden"] = exact_tied[exact_inputs["token_ids"]]
    exact_loss = reference.linear_policy_loss(weight=exact_tied, **exact_inputs).loss
    (exact,) = torch.autograd.grad(exact_loss, exact_tied)
    assert_within_budget(grad, exact.float(), exact)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_masked_is_never_read(device, poison):
    inputs = {**linear_inputs((6,), 8, 65, device=device), "kl_weight": 0.2, "entropy_weight": 0.05}
    mask = inputs["mask"] = torch.tensor([True, False, True, False, False, True], device=device)
    dirty_ids = inputs["token_ids"].clone()
    dirty_ids[~mask] = torch.tensor([-100, 65, 2**62], device=device)
    per_token = ("old_logprobs", "advantages", "token_weights", "ref_logprobs")
    results = []
    for fill, ids, correct in ((0.0, inputs["token_ids"], False), (poison, dirty_ids, True)):
        filled = {**inputs, **{name: inputs[name].masked_fill(~mask, fill) for name in per_token}}
        filled["hidden"] = inputs["hidden"].masked_fill(~mask.unsqueeze(1), fill)
        filled["is_correct"] = inputs["is_correct"].masked_fill(~mask, correct)
        out, grads = run(linear_policy_loss, {**filled, "token_ids": ids}, WRT)
        results.append((*out, *grads.values()))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)
    assert not results[1][-3][~mask].any() and results[1][-3][mask].all()


def test_registration(device):
    inputs = linear_inputs((5,), 4, 65, device=device)
    names = ("old_logprobs", "advantages", "mask", "is_correct", "token_weights", "ref_logprobs")
    divisors = torch.tensor([3.0, 2.0, 1.0], device=device)
    numbers = [0.2, 0.28, 3.0, 0.1, 0.2, 0.05]
    head = inputs["hidden"], inputs["weight"]
    for needed in ([True, True, True], [True, False, False]):
        arguments = (inputs["token_ids"], *(inputs[n] for n in names), None, 1.4, divisors, numbers, needed)
        torch.library.opcheck(linear_policy_loss_op, (*head, inputs["bias"], *arguments))
    compiled = torch.compile(linear_policy_loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for n, V, clip_high in ((5, 65, 0.28), (3, 70, 0.5)):
        inputs = {**linear_inputs((n,), 4, V, device=device), "clip_high": clip_high}
        (a, grads_a), (b, grads_b) = (run(op, inputs, WRT, upstream=3.0) for op in (compiled, linear_policy_loss))
        assert all(torch.equal(x, y) for x, y in zip((*a, *grads_a.values()), (*b, *grads_b.values()), strict=True))


BAD = [
    ("hidden", [[0.0]], "a tensor", "list"),
    ("hidden", torch.zeros(()), r"\[\.\.\., H\]", ""),
    ("hidden", torch.zeros(3, 4, dtype=torch.int64), "floating", "int64"),
    ("weight", torch.zeros(5, 3), r"\[V, 4\]", r"\(5, 3\)"),
    ("weight", torch.zeros(0, 4), r"\[V, 4\]", r"\(0, 4\)"),
    ("weight", torch.zeros(4), r"\[V, 4\]", r"\(4,\)"),
    ("weight", torch.zeros(5, 4, dtype=torch.bfloat16), "float32", "bfloat16"),
    ("weight", torch.zeros(5, 4, device="meta"), "cpu|cuda", "meta"),
    ("bias", torch.zeros(4), r"\(5,\)", r"\(4,\)"),
    ("bias", torch.zeros(5, dtype=torch.float64), "float32", "float64"),
    ("bias", torch.zeros(5, device="meta"), "cpu|cuda", "meta"),
    ("token_ids", torch.zeros(2, dtype=torch.int64), r"\(3,\)", r"\(2,\)"),
    ("token_ids", torch.zeros(3), "int64", "float32"),
    ("temperature", -1.0, "> 0", "-1.0"),
    ("temperature", torch.ones(3, 1), r"\(3,\)", r"\(3, 1\)"),
    ("old_logprobs", None, "a tensor", "NoneType"),
    ("advantages", torch.zeros(2), r"\(3,\)", r"\(2,\)"),
    ("mask", torch.ones(3, device="meta"), "cpu|cuda", "meta"),
    ("is_correct", torch.ones(2), r"\(3,\)", r"\(2,\)"),
    ("token_weights", torch.ones(1), r"\(3,\)", r"\(1,\)"),
    ("ref_logprobs", torch.zeros(2), r"\(3,\)", r"\(2,\)"),
    ("num_tokens", -1, "≥ 0", "-1"),
    ("num_correct_tokens", 2, "is_correct", "None"),
    ("clip_low", 1.1, r"\[0, 1\]", "1.1"),
    ("clip_high", -0.1, "≥ 0", "-0.1"),
    ("dual_clip", 0.9, "> 1", "0.9"),
    ("nll_weight", -0.1, "≥ 0", "-0.1"),
    ("kl_weight", 0.1, "without ref_logprobs", "0.1"),
    ("entropy_weight", float("inf"), "a number", "inf"),
]


@pytest.mark.parametrize(("name", "value", "expected", "got"), BAD)
def test_rejects_bad_input(device, monkeypatch, name, value, expected, got):
    monkeypatch.setattr("vapo_kernels.ops.policy_loss.from_hidden.linear_policy_loss_op", None)
    three = torch.zeros(3)
    good = {"token_ids": three.long(), "old_logprobs": three, "advantages": three, "mask": torch.ones(3)}
    good = on(device, hidden=torch.zeros(3, 4), weight=torch.zeros(5, 4), **good)
    bad = value.to(device) if isinstance(value, torch.Tensor) and not value.is_meta else value
    with pytest.raises(ValueError, match=rf"^{name}: expected .*({expected}).*, got .*{got}"):
        linear_policy_loss(**{**good, name: bad})


def test_logits_never_exist_at_once(device, monkeypatch):
    """No allocation reaches N·V elements, forward or backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    n, H, V = 8, 4, 300

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else (out,):
                if isinstance(x, torch.Tensor):
                    self.numel = max(self.numel, x.numel())
            return out

    monkeypatch.setattr(_linear_chunks, "LOGITS_BUFFER_BYTES", 2 * V * 4)
    inputs = linear_inputs((n,), H, V, device=device)
    with Largest() as largest:
        run(linear_policy_loss, inputs, WRT)
    assert 2 * V <= largest.numel <= H * V < n * V
