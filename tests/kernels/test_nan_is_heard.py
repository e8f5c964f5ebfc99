"""A NaN or an infinity in one unmasked element breaks loss and gradient as the reference's autograd says.

The other tokens keep their gradients, and the same element changes no bit where it is masked. A log π of −inf alone is
a number: the token has become impossible, and its ratio is e⁻²⁰.
"""

import pytest
import torch
from draws import cast, on, packed_inputs, run
from oracle import assert_gradient, assert_within_budget

import vapo_kernels
from vapo_kernels import reference

NAN, INF = float("nan"), float("inf")
POISONS = [NAN, INF, -INF]
# One token of each kind: log ratio, advantage, is correct, log π_ref − log π. The last one is masked.
KINDS = {
    "inside the clip": (0.1, 1.0, False, 0.3),
    "clipped above": (0.5, 1.0, True, -25.0),
    "clipped below": (-0.5, -1.0, False, 25.0),
    "dual clip": (2.0, -1.0, True, 0.3),
    "beyond the bound": (25.0, -1.0, False, 0.3),
    "without advantage": (0.1, 0.0, False, 0.0),
    "masked": (0.1, 1.0, True, 0.3),
}
N, V, H = len(KINDS), 9, 4
MASK = torch.arange(N) < N - 1
PER_TOKEN = ["old_logprobs", "advantages", "token_weights", "ref_logprobs"]
ALL_TERMS = {"dual_clip": 3.0, "kl_weight": 0.1, "entropy_weight": 0.1}


def policy_inputs(form: str) -> dict:
    """Arguments of a policy loss of the tokens in KINDS."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(N, H, generator=draw), torch.randn(V, H, generator=draw)
    bias, token_ids = torch.randn(V, generator=draw), torch.randint(V, (N,), generator=draw)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logprobs, entropy = reference.token_logprobs(logits, token_ids)
    log_ratio, advantages, is_correct, ref = (torch.tensor(column) for column in zip(*KINDS.values(), strict=True))
    head = {"hidden": hidden, "weight": weight, "bias": bias, "token_ids": token_ids}
    distributions = {
        "policy_loss": {"logits": logits, "token_ids": token_ids},
        "linear_policy_loss": head,
        "logprob_policy_loss": {"logprobs": logprobs, "entropy": entropy},
    }
    return {
        **distributions[form],
        "old_logprobs": logprobs - log_ratio,
        "advantages": advantages,
        "mask": MASK,
        "is_correct": is_correct,
        "token_weights": torch.linspace(0.5, 1.5, N),
        "ref_logprobs": logprobs + ref,
    }


def value_inputs() -> dict:
    """Values inside their clip, outside it with the larger error, and outside it with the smaller error."""
    old_values = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0])
    values, returns = old_values + torch.tensor([0.1, 0.9, 0.9, -0.9, -0.9, 0.0, 0.1]), torch.ones(N)
    return {
        "values": values,
        "returns": returns * torch.tensor([1, 1, -1, 1, -1, 1, 1]),
        "mask": MASK,
        "old_values": old_values,
    }


def token_inputs(head: bool) -> dict:
    """Arguments of `token_logprobs` and an upstream gradient, which is 0 for the tokens 0 and 1."""
    inputs = policy_inputs("linear_policy_loss" if head else "policy_loss")
    names = ("hidden", "weight", "bias", "token_ids", "mask") if head else ("logits", "token_ids", "mask")
    upstream = torch.linspace(-1.0, 1.0, N).masked_fill(torch.arange(N) < 2, 0.0)
    return {**{name: inputs[name] for name in names}, "dlogprobs": upstream, "dentropy": upstream.flip(0) * upstream}


def in_place(logits, **arguments):
    return vapo_kernels.policy_loss(logits * 1, **arguments, inplace=True)


def run_token_logprobs(op, inputs: dict, wrt: list[str]):
    inputs = dict(inputs)
    upstream = [inputs.pop(name) for name in UPSTREAM]
    leaves = {name: inputs[name].clone().requires_grad_() for name in wrt}
    out = op(**{**inputs, **leaves})
    return out, dict(zip(wrt, torch.autograd.grad(list(out), list(leaves.values()), upstream), strict=True))


UPSTREAM = ["dlogprobs", "dentropy"]
HEAD = ["hidden", "weight", "bias"]
# op: (its function where it is none of vapo_kernels', inputs, differentiated arguments, other broken arguments)
CASES = {
    "policy_loss": (None, policy_inputs("policy_loss"), ["logits"], PER_TOKEN),
    "policy_loss, all terms": (None, {**policy_inputs("policy_loss"), **ALL_TERMS}, ["logits"], PER_TOKEN),
    "policy_loss, in place": (in_place, {**policy_inputs("policy_loss"), **ALL_TERMS}, ["logits"], PER_TOKEN),
    "linear_policy_loss": (None, policy_inputs("linear_policy_loss"), HEAD, PER_TOKEN),
    "logprob_policy_loss": (None, policy_inputs("logprob_policy_loss"), ["logprobs"], [*PER_TOKEN, "entropy"]),
    "logprob_policy_loss, all terms": (
        None,
        {**policy_inputs("logprob_policy_loss"), **ALL_TERMS},
        ["logprobs", "entropy"],
        PER_TOKEN,
    ),
    "value_loss": (None, {**value_inputs(), "old_values": None}, ["values"], ["returns"]),
    "value_loss, clip": (None, {**value_inputs(), "clip": 0.2}, ["values"], ["returns", "old_values"]),
    "token_logprobs": (None, token_inputs(head=False), ["logits"], UPSTREAM),
    "linear_token_logprobs": (None, token_inputs(head=True), HEAD, UPSTREAM),
}


def results(op, case: str, inputs: dict, wrt: list[str]) -> dict:
    """Every field of the result and every gradient, by name."""
    out, gradients = (run_token_logprobs if "token_logprobs" in case else run)(op, inputs, wrt)
    return {**out._asdict(), **{f"d{name}": gradient for name, gradient in gradients.items()}}


def elements(name: str, inputs: dict):
    """(token, index of an unmasked element): each token's; of logits its own and another column; of a head one."""
    if name in ("weight", "bias"):
        yield None, (3, 1)[: inputs[name].dim()]
        return
    for t in range(N - 1):
        if name == "logits":
            own = int(inputs["token_ids"][t])
            yield from ((t, (t, column)) for column in (own, (own + 1) % V))
        else:
            yield t, (t, 1)[: inputs[name].dim()]


def poisoned(inputs: dict, name: str, at, poison: float) -> dict:
    x = inputs[name].clone()
    x[at] = poison
    return {**inputs, name: x}


def finite_rows(x):
    return x.isfinite().all(-1) if x.dim() > 1 else x.isfinite()


def is_heard(name: str, poison: float) -> bool:
    """−inf is a number as log π and as a logit."""
    return poison != -INF or name not in ("logits", "logprobs", "bias")


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize(("case", "name"), [(case, name) for case, x in CASES.items() for name in x[2] + x[3]])
def test_losses_and_log_probs(device, case, name, poison):
    op, inputs, wrt, _ = CASES[case]
    public_name = case.split(",")[0]
    op, truth = op or getattr(vapo_kernels, public_name), getattr(reference, public_name)
    clean = results(op, case, on(device, **inputs), wrt)
    for token, at in elements(name, inputs):
        broken = poisoned(inputs, name, at, poison)
        actual = results(op, case, on(device, **broken), wrt)
        exact, baseline = (results(truth, case, cast(broken, dtype), wrt) for dtype in (torch.float64, torch.float32))
        if is_heard(name, poison):
            # The loss is linear in the entropy, and the log-probs do not depend on an upstream gradient.
            first, gradient = next(iter(actual.values())), actual[f"d{wrt[0]}"]
            assert name in UPSTREAM or not first.isfinite().all(), at
            assert name == "entropy" or not gradient[slice(None) if token is None else token].isfinite().all(), at
        for field, x in actual.items():
            x, true = x.cpu(), exact[field]
            good = finite_rows(true)
            assert torch.equal(finite_rows(x), good), (at, field, x, true)
            if field.startswith("d"):
                assert_gradient(x[good], baseline[field][good], true[good], name=f"{field} {at}")
            else:
                assert_within_budget(x[good], baseline[field][good], true[good], scale=1.0, name=f"{field} {at}")
    if name not in ("weight", "bias"):
        masked = results(op, case, on(device, **poisoned(inputs, name, N - 1, poison)), wrt)
        assert all(torch.equal(masked[field], clean[field]) for field in clean)


@pytest.mark.parametrize("lam", [None, 0.0, 1.0])
@pytest.mark.parametrize("poison", POISONS)
def test_gae(device, poison, lam):
    """It is heard at its own token and at all before it in its sequence, and nowhere else."""
    lengths = [5, 20, 0, 3, 40]
    inputs = {
        **packed_inputs(lengths, slack=2),
        "lam_policy": lam,
        "lam_critic": 0.9 if lam is None else lam,
        "gamma": 0.9,
    }
    inputs["mask"][[0, 5, 20, 26, 45]] = True
    clean = vapo_kernels.packed_gae(**on(device, **inputs))
    unmasked = [t for t in (0, 4, 5, 20, 26, 45) if inputs["mask"][t]]
    places = [(name, t) for name in ("rewards", "values") for t in unmasked]
    for name, t in [*places, ("bootstrap_values", 1), ("bootstrap_values", 4)]:
        broken = poisoned(inputs, name, t, poison)
        actual = vapo_kernels.packed_gae(**on(device, **broken))
        exact, baseline = (reference.packed_gae(**cast(broken, dtype)) for dtype in (torch.float64, torch.float32))
        for x, base, true in zip(actual, baseline, exact, strict=True):
            good = true.isfinite()
            assert not good.all()
            assert torch.equal(x.isfinite().cpu(), good), (name, t)
            assert_within_budget(x.cpu()[good], base[good], true[good], name=f"{name} {t}")
    masked = {**inputs, "rewards": inputs["rewards"].masked_fill(~inputs["mask"], poison)}
    masked["values"] = inputs["values"].masked_fill(~inputs["mask"], poison)
    assert all(torch.equal(a, b) for a, b in zip(vapo_kernels.packed_gae(**on(device, **masked)), clean, strict=True))


STATISTICS = {
    "masked_whiten": (["x"], {}),
    "masked_whiten, without shift": (["x"], {"shift_mean": False}),
    "value_moments": (["values", "returns"], {}),
    "explained_variance": (["values", "returns"], {}),
}


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("case", STATISTICS)
def test_whitening_and_explained_variance(device, case, constant, poison):
    names, settings = STATISTICS[case]
    name = case.split(",")[0]
    op, truth = getattr(vapo_kernels, name), getattr(reference, name)
    values = {"x": torch.linspace(-1, 1, N), "values": torch.linspace(-2, 1, N), "returns": torch.linspace(1, -1, N)}
    inputs = {name: torch.ones(N) if constant else values[name] for name in names} | {"mask": MASK, **settings}
    clean = op(**on(device, **inputs))
    for name in names:
        for t in range(N - 1):
            broken = poisoned(inputs, name, t, poison)
            actual, exact = op(**on(device, **broken)).cpu(), truth(**cast(broken, torch.float64))
            assert not exact.isfinite().all()
            assert torch.equal(actual.isfinite(), exact.isfinite()), (name, t)
        assert torch.equal(op(**on(device, **poisoned(inputs, name, N - 1, poison))), clean)
