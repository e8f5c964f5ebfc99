"""token_logprobs: log-probs and entropies from logits (Eq. 2, 4)."""

import math

import pytest
import torch
from draws import DTYPES, ROW_SHAPES, cast, on, policy_inputs
from oracle import assert_gradient, assert_within_budget

from vapo_kernels import policy_loss, reference, token_logprobs
from vapo_kernels.ops.token_logprobs import token_logprobs_backward_op, token_logprobs_op


def differentiate(op, logits, token_ids, upstreams, **settings):
    """(log-probs, entropy, gradient of their weighted sum)."""
    logits = logits.detach().clone().requires_grad_()
    out = op(logits, token_ids, **settings)
    loss = sum((x * u.to(x)).sum() for x, u in zip(out, upstreams, strict=True))
    return *out, torch.autograd.grad(loss, logits)[0]


def assert_matches_reference(logits, token_ids, upstreams, **settings):
    actual = differentiate(token_logprobs, logits, token_ids, upstreams, **settings)
    assert [x.dtype for x in actual] == [torch.float32, torch.float32, logits.dtype]

    def at(dtype):
        arguments = cast({"logits": logits, "token_ids": token_ids, **settings}, dtype)
        return differentiate(reference.token_logprobs, upstreams=[u.cpu() for u in upstreams], **arguments)

    exact, baseline = at(torch.float64), at(torch.float32)
    for name, *triple in zip(("logprobs", "entropy"), actual, baseline, exact, strict=False):
        assert_within_budget(*triple, name=name)
    assert_gradient(actual[2], baseline[2], exact[2])


def test_worked_example(device):
    # p = ½ ¼ ¼ 0: log-probs −ln 2, −ln 4; entropy 1.5 ln 2, by hand.
    logits = torch.tensor([[0.5, 0.25, 0.25, 0.0]], device=device).log().expand(2, 4)
    token_ids = torch.tensor([0, 2], device=device)
    logprobs, entropy, gradient = differentiate(
        token_logprobs, logits, token_ids, (torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    )
    expected = torch.tensor([-math.log(2), -math.log(4)], dtype=torch.float64)
    assert_within_budget(logprobs, expected.float(), expected)
    expected = torch.full((2,), 1.5 * math.log(2), dtype=torch.float64)
    assert_within_budget(entropy, expected.float(), expected)
    # ∂log p_0/∂z = 1[j = 0] − p;  ∂Ent/∂z = −p (log p + Ent) = −p·ln 2·(½ or −½).
    half = math.log(2) / 2
    expected = torch.tensor(
        [[0.5, -0.25, -0.25, 0.0], [-half / 2, half / 4, half / 4, 0.0]],
        dtype=torch.float64,
    )
    assert_within_budget(gradient, expected.float(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "V"), ROW_SHAPES, ids=str)
def test_matches_reference(device, shape, V, dtype):
    inputs = policy_inputs(shape, V, dtype=dtype, device=device)
    logits, token_ids, mask = inputs["logits"], inputs["token_ids"], inputs["mask"]
    upstreams = inputs["advantages"], inputs["token_weights"]
    assert_matches_reference(logits, token_ids, upstreams)
    assert_matches_reference(logits, token_ids, upstreams, mask=mask, temperature=0.7)
    temperature = 0.5 + torch.rand(shape).to(device)
    assert_matches_reference(logits, token_ids.int(), upstreams, mask=mask.float(), temperature=temperature)
    # One output at a time: neither gradient hides behind the other.
    zeros = torch.zeros_like(upstreams[0])
    assert_matches_reference(logits, token_ids, (upstreams[0], zeros))
    assert_matches_reference(logits, token_ids, (zeros, upstreams[1]), temperature=temperature)


def test_identities(device):
    inputs = policy_inputs((2, 3), 130, device=device)
    logits, token_ids, mask = inputs["logits"], inputs["token_ids"], inputs["mask"]
    out = token_logprobs(logits, token_ids)

    # The losses see the very same log-probs, with a gradient or without: the first ratio is exactly 1.
    arguments = {name: inputs[name] for name in ("logits", "token_ids", "old_logprobs", "advantages")}
    everywhere = torch.ones_like(mask)
    for logits_of_loss in (logits, logits.clone().requires_grad_()):
        loss = policy_loss(**{**arguments, "logits": logits_of_loss}, mask=everywhere)
        assert torch.equal(loss.logprobs, out.logprobs)
        masked = policy_loss(**{**arguments, "logits": logits_of_loss}, mask=mask, temperature=0.7)
        assert torch.equal(masked.logprobs, token_logprobs(logits, token_ids, mask=mask, temperature=0.7).logprobs)
        assert torch.equal(masked.logprobs != 0, mask)

    # Probabilities of all tokens of a row sum to 1, and their entropy is its mean surprise.
    row = logits[0, 0].expand(130, 130)
    log_p, entropy = token_logprobs(row, torch.arange(130, device=device)) if device.type == "cuda" else out_rows(row)
    assert_within_budget(log_p.double().exp().sum(), torch.ones(()), torch.ones(()))
    surprise = -(log_p.double().exp() * log_p).sum()
    assert_within_budget(entropy[0], surprise.float(), surprise)

    # A shift of all logits by an exactly representable number, and a temperature that scales them back.
    whole = logits.round()
    assert torch.equal(token_logprobs(whole + 64, token_ids).logprobs, token_logprobs(whole, token_ids).logprobs)
    assert torch.equal(token_logprobs(2 * logits, token_ids, temperature=2.0).logprobs, out.logprobs)
    per_token = torch.full(token_ids.shape, 2.0, device=device)
    assert torch.equal(token_logprobs(2 * logits, token_ids, temperature=per_token).entropy, out.entropy)

    # The gradient of a row sums to 0, and that of log p is 1 − p at the token.
    _, _, gradient = differentiate(token_logprobs, logits, token_ids, (torch.ones(2, 3), torch.zeros(2, 3)))
    assert_within_budget(gradient.sum(-1) + 1, torch.ones(2, 3), torch.ones(2, 3))
    at_token = gradient.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    exact = -torch.expm1(reference.token_logprobs(logits.double().cpu(), token_ids.cpu()).logprobs)
    assert_within_budget(at_token, exact.float(), exact)


def out_rows(row):
    """Log-probs of every token of one distribution, a few rows at a time."""
    at = torch.tensor([0, 63, 64, 129])
    exact = reference.token_logprobs(row.double(), torch.arange(130))
    out = token_logprobs(row[: len(at)], at)
    assert_within_budget(out.logprobs, exact.logprobs[at].float(), exact.logprobs[at])
    return exact.logprobs.float().index_put((at,), out.logprobs), out.entropy


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_masked_is_never_read(device, poison):
    inputs = policy_inputs((6,), 70, device=device)
    inputs["mask"] = mask = torch.tensor([True, False, True, False, False, True], device=device)
    temperature = 0.5 + torch.rand(6).to(device)
    clean_ids, dirty_ids = inputs["token_ids"].clone(), inputs["token_ids"].clone()
    dirty_ids[~mask] = torch.tensor([-100, 70, 2**62], device=device)
    upstreams = inputs["advantages"].masked_fill(~mask, poison), inputs["token_weights"].masked_fill(~mask, poison)
    results = [
        differentiate(
            token_logprobs,
            inputs["logits"].masked_fill(~mask.unsqueeze(-1), fill),
            ids,
            [x.masked_fill(~mask, fill) for x in upstreams],
            mask=mask,
            temperature=temperature.masked_fill(~mask, fill),
        )
        for fill, ids in ((1.0, clean_ids), (poison, dirty_ids))
    ]
    # The sum over log-probs times poison is not finite, but every gradient is.
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)
        assert not dirty[~mask].any()
        assert dirty[mask].any()


def test_registration(device):
    inputs = policy_inputs((4,), 70, device=device)
    logits, token_ids, mask = inputs["logits"], inputs["token_ids"], inputs["mask"]
    temperatures = torch.full((4,), 0.7, device=device)
    for arguments in (
        (logits.requires_grad_(), token_ids, mask, None, 1.5),
        (logits.detach().bfloat16().requires_grad_(), token_ids.int(), None, temperatures, 1.0),
        (logits.detach().view(2, 2, 70)[:, :1], token_ids[:2], None, None, 1.0),
    ):
        torch.library.opcheck(token_logprobs_op, arguments)
        _, entropy, statistics = token_logprobs_op(*arguments)
        rows = torch.randn(len(entropy), device=device)
        backward = (rows, rows.clone(), arguments[0].detach(), *arguments[1:], entropy.detach(), statistics.detach())
        torch.library.opcheck(token_logprobs_backward_op, backward)

    def step(logits, token_ids, mask, temperature):
        out = token_logprobs(logits, token_ids, mask=mask, temperature=temperature)
        return out.logprobs, out.entropy, (out.logprobs * 2 + out.entropy).sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for n, V, temperature in ((4, 70, 0.7), (3, 65, 1.3)):
        inputs = policy_inputs((n,), V, device=device)
        results = []
        for function in (compiled, step):
            leaf = inputs["logits"].clone().requires_grad_()
            out = function(leaf, inputs["token_ids"], inputs["mask"], temperature)
            out[2].backward()
            results.append((*out, leaf.grad))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)


BAD = [
    ("logits", torch.zeros(()), r"\[\.\.\., V\]", ""),
    ("logits", [[0.0] * 5] * 3, "a tensor", "list"),
    ("logits", torch.zeros(3, 5, dtype=torch.int64), "floating", "int64"),
    ("logits", torch.zeros(3, 0), "at least one column", r"\(3, 0\)"),
    ("token_ids", torch.zeros(2, dtype=torch.int64), r"\(3,\)", r"\(2,\)"),
    ("token_ids", torch.zeros(3, 1, dtype=torch.int64), r"\(3,\)", r"\(3, 1\)"),
    ("token_ids", torch.zeros(3), "int64", "float32"),
    ("token_ids", torch.zeros(3, dtype=torch.int64, device="meta"), "cpu|cuda", "meta"),
    ("mask", torch.ones(3, 5), r"\(3,\)", r"\(3, 5\)"),
    ("mask", torch.ones(3, dtype=torch.complex64), "bool", "complex64"),
    ("mask", torch.ones(3, device="meta"), "cpu|cuda", "meta"),
    ("temperature", 0.0, "> 0", "0.0"),
    ("temperature", -1, "> 0", "-1"),
    ("temperature", float("inf"), "> 0", "inf"),
    ("temperature", None, "> 0", "None"),
    ("temperature", torch.ones(3, 1), r"\(3,\)", r"\(3, 1\)"),
    ("temperature", torch.ones(3, dtype=torch.int64), "floating", "int64"),
    ("temperature", torch.ones(3, device="meta"), "cpu|cuda", "meta"),
]


@pytest.mark.parametrize(("name", "value", "expected", "got"), BAD)
def test_rejects_bad_input(device, monkeypatch, name, value, expected, got):
    monkeypatch.setattr("vapo_kernels.ops.token_logprobs.token_logprobs_op", None)
    good = on(device, logits=torch.zeros(3, 5), token_ids=torch.zeros(3, dtype=torch.int64))
    bad = value.to(device) if isinstance(value, torch.Tensor) and not value.is_meta else value
    with pytest.raises(ValueError, match=rf"^{name}: expected .*({expected}).*, got .*{got}"):
        token_logprobs(**{**good, name: bad})


@pytest.mark.parametrize("bad_id", [-1, 5, -100, 2**40])
def test_token_id_outside_the_vocabulary(device, bad_id):
    token_ids = torch.tensor([1, bad_id, 2], device=device)
    logits = torch.randn(3, 5).to(device)
    mask = torch.tensor([1, 0, 1], device=device)
    assert token_logprobs(logits, token_ids, mask=mask).logprobs[1] == 0
    if device.type == "cpu":
        with pytest.raises(ValueError, match=rf"^token_ids: expected ids in \[0, 5\).*, got {bad_id}"):
            token_logprobs(logits, token_ids)
    else:
        assert token_logprobs(logits, token_ids).logprobs.isnan().tolist() == [False, True, False]
