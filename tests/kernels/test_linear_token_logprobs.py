"""linear_token_logprobs: log-probs and entropies from hidden states (Eq. 2, 4)."""

import math

import pytest
import torch
from draws import DTYPES, cast, linear_inputs, on
from oracle import assert_within_budget

from vapo_kernels import _linear_chunks, linear_token_logprobs, reference, token_logprobs
from vapo_kernels.ops.linear_token_logprobs import linear_token_logprobs_backward_op, linear_token_logprobs_op

# (leading shape, H, V): one of each; less than a block; several chunks of rows and of W; two leading dimensions; none.
SHAPES = [((1,), 1, 1), ((3,), 5, 7), ((7,), 8, 65), ((2, 3), 3, 130), ((), 4, 9)]
NAMES = ("logprobs", "entropy", "hidden", "weight", "bias")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Two float32 rows of 65 columns a chunk."""
    monkeypatch.setattr(_linear_chunks, "LOGITS_BUFFER_BYTES", 600)
    monkeypatch.setattr(_linear_chunks, "WEIGHT_ROWS", 16)


def arguments(shape, H, V, *, dtype=torch.float32, device="cpu", temperature=1.0) -> tuple[dict, list]:
    """Arguments, and an upstream gradient for either result."""
    inputs = linear_inputs(shape, H, V, dtype=dtype, device=device)
    upstreams = [inputs["advantages"], inputs["token_weights"]]
    inputs = {name: inputs[name] for name in ("hidden", "weight", "bias", "token_ids", "mask")}
    return {**inputs, **on(device, temperature=temperature)}, upstreams


def differentiate(op, inputs, upstreams):
    """(log-probs, entropy, gradients of their weighted sum to hidden, weight, bias)."""
    leaves = {name: inputs[name].detach().clone().requires_grad_() for name in NAMES[2:]}
    out = op(**{**inputs, **leaves})
    loss = sum((x * u.to(x)).sum() for x, u in zip(out, upstreams, strict=True))
    return *out, *torch.autograd.grad(loss, list(leaves.values()))


def eager(hidden, weight, bias, **rest):
    """What PyTorch users write: logits in the working dtype, the rest in float32."""
    return reference.token_logprobs(torch.nn.functional.linear(hidden, weight, bias).float(), **rest)


def test_worked_example(device):
    # The head picks one of two distributions: ½ ¼ ¼ and ¹⁄₁₀ ¹⁄₁₀ ⅘, given by their logs.
    p = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], device=device)
    out = linear_token_logprobs(torch.eye(2, device=device), p.log().t(), torch.tensor([1, 2], device=device))
    exact = torch.tensor([0.25, 0.8], dtype=torch.float64).log()
    assert_within_budget(out.logprobs, exact.float(), exact)
    exact = torch.tensor([1.5 * math.log(2), -0.2 * math.log(0.1) - 0.8 * math.log(0.8)], dtype=torch.float64)
    assert_within_budget(out.entropy, exact.float(), exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "H", "V"), SHAPES, ids=str)
def test_matches_reference(device, shape, H, V, dtype):
    for temperature in (1.0, 0.5 + torch.rand(shape)):
        inputs, upstreams = arguments(shape, H, V, dtype=dtype, device=device, temperature=temperature)
        actual = differentiate(linear_token_logprobs, inputs, upstreams)
        assert [x.dtype for x in actual] == [torch.float32] * 2 + [dtype] * 3
        upstreams = [u.cpu() for u in upstreams]
        exact = differentiate(reference.linear_token_logprobs, cast(inputs, torch.float64), upstreams)
        working = {n: x.cpu() if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}
        baseline = differentiate(eager, working, upstreams)
        for name, *triple in zip(NAMES, actual, baseline, exact, strict=True):
            # A sum of rounded products may cancel: a float16 or bfloat16 entry has an ulp of its own.
            floor = max(1e-6, torch.finfo(triple[0].dtype).eps)
            assert_within_budget(*triple, name=name, floor=floor, scale=1e-2 if name == "entropy" else None)


def test_identities(device):
    inputs, upstreams = arguments((6,), 8, 65, device=device, temperature=0.7)
    whole = differentiate(linear_token_logprobs, inputs, upstreams)
    logits = torch.nn.functional.linear(inputs["hidden"], inputs["weight"], inputs["bias"])
    from_logits = token_logprobs(logits, inputs["token_ids"], mask=inputs["mask"], temperature=0.7)
    for actual, expected in zip(whole, from_logits, strict=False):
        assert_within_budget(actual, expected, expected)

    # No bias is a bias of zero, and no mask one of ones.
    no_bias = linear_token_logprobs(inputs["hidden"], inputs["weight"], inputs["token_ids"])
    zero = torch.zeros_like(inputs["bias"])
    ones = torch.ones_like(inputs["mask"])
    with_zero = linear_token_logprobs(inputs["hidden"], inputs["weight"], inputs["token_ids"], bias=zero, mask=ones)
    for a, b in zip(no_bias, with_zero, strict=True):
        assert_within_budget(a, b, b)

    # Masked rows are as if they were not there.
    mask = inputs["mask"] = torch.tensor([1, 0, 1, 1, 0, 1], device=device).bool()
    masked = differentiate(linear_token_logprobs, inputs, upstreams)
    kept = {n: inputs[n][mask] if n in ("hidden", "token_ids", "mask") else x for n, x in inputs.items()}
    for name, a, b in zip(
        NAMES, masked, differentiate(linear_token_logprobs, kept, [u[mask] for u in upstreams]), strict=True
    ):
        a = a if name in ("weight", "bias") else a[mask]
        assert_within_budget(a, b, b, name=name)
    for x in masked[:3]:
        assert not x[~mask].any()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_masked_is_never_read(device, poison):
    temperature = 0.5 + torch.rand(6)
    inputs, upstreams = arguments((6,), 8, 65, device=device, temperature=temperature)
    mask = inputs["mask"] = torch.tensor([True, False, True, False, False, True], device=device)
    dirty_ids = inputs["token_ids"].clone()
    dirty_ids[~mask] = torch.tensor([-100, 65, 2**62], device=device)
    results = []
    for fill, ids in ((1.0, inputs["token_ids"]), (poison, dirty_ids)):
        filled = {**inputs, "hidden": inputs["hidden"].masked_fill(~mask.unsqueeze(1), fill), "token_ids": ids}
        filled["temperature"] = inputs["temperature"].masked_fill(~mask, fill)
        results.append(differentiate(linear_token_logprobs, filled, [u.masked_fill(~mask, fill) for u in upstreams]))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)
    assert not results[1][2][~mask].any() and results[1][2][mask].all()


def test_registration(device):
    inputs, _ = arguments((5,), 4, 65, device=device)
    hidden, weight, bias = (inputs[n].requires_grad_() for n in ("hidden", "weight", "bias"))
    tail = (inputs["token_ids"], inputs["mask"], None, 1.4)
    torch.library.opcheck(linear_token_logprobs_op, (hidden, weight, bias, *tail))
    torch.library.opcheck(linear_token_logprobs_op, (hidden, weight, None, inputs["token_ids"].int(), None, None, 1.0))
    detached = [x.detach() for x in (hidden, weight, bias)]
    _, entropy, statistics = linear_token_logprobs_op(*detached, *tail)
    rows = torch.randn(5, device=device)
    backward = (rows, rows.clone(), *detached, *tail, entropy, statistics, [True, False, True])
    torch.library.opcheck(linear_token_logprobs_backward_op, backward)

    compiled = torch.compile(linear_token_logprobs, fullgraph=True, dynamic=True, backend="aot_eager")
    for n, V in ((5, 65), (3, 70)):
        inputs, upstreams = arguments((n,), 4, V, device=device, temperature=0.7)
        a, b = (differentiate(op, inputs, upstreams) for op in (compiled, linear_token_logprobs))
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


BAD = [
    ("hidden", [[0.0]], "a tensor", "list"),
    ("hidden", torch.zeros(3, 4, dtype=torch.int64), "floating", "int64"),
    ("weight", torch.zeros(5, 3), r"\[V, 4\]", r"\(5, 3\)"),
    ("weight", torch.zeros(5, 4, dtype=torch.float16), "float32", "float16"),
    ("weight", torch.zeros(5, 4, device="meta"), "cpu|cuda", "meta"),
    ("bias", torch.zeros(5, 1), r"\(5,\)", r"\(5, 1\)"),
    ("token_ids", torch.zeros(3, 1, dtype=torch.int64), r"\(3,\)", r"\(3, 1\)"),
    ("token_ids", torch.zeros(3), "int64", "float32"),
    ("mask", torch.ones(2), r"\(3,\)", r"\(2,\)"),
    ("mask", torch.ones(3, device="meta"), "cpu|cuda", "meta"),
    ("temperature", 0, "> 0", "0"),
    ("temperature", torch.ones(2), r"\(3,\)", r"\(2,\)"),
]


@pytest.mark.parametrize(("name", "value", "expected", "got"), BAD)
def test_rejects_bad_input(device, monkeypatch, name, value, expected, got):
    monkeypatch.setattr("vapo_kernels.ops.linear_token_logprobs.linear_token_logprobs_op", None)
    good = {"hidden": torch.zeros(3, 4), "weight": torch.zeros(5, 4), "token_ids": torch.zeros(3, dtype=torch.int64)}
    bad = value.to(device) if isinstance(value, torch.Tensor) and not value.is_meta else value
    with pytest.raises(ValueError, match=rf"^{name}: expected .*({expected}).*, got .*{got}"):
        linear_token_logprobs(**{**on(device, **good), name: bad})
