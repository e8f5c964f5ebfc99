"""Random packings, masks, dtypes, layouts and settings against the reference in float64."""

import pytest
import torch
from draws import DTYPES, cast, on, packed_inputs, policy_inputs, references, run, value_inputs
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from oracle import assert_fields, assert_gradient, assert_within_budget

from vapo_kernels import (
    explained_variance,
    logprob_policy_loss,
    masked_whiten,
    packed_gae,
    policy_loss,
    reference,
    token_logprobs,
    value_loss,
)

# Interpreted programs cost milliseconds each, so the examples are few; the PyTorch path is drawn from more widely.
EXAMPLES = {"torch": 40, "triton": 6}


def examples(test):
    """Run a property as often as its implementation can afford: the same examples every time."""

    @pytest.mark.parametrize("device", EXAMPLES, indirect=True)
    def drawn(device, request):
        profile = settings(
            deadline=None,
            derandomize=True,
            database=None,
            max_examples=EXAMPLES[request.node.callspec.params["device"]],
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate,),
        )
        profile(given(data=st.data())(lambda data: test(device, data)))()

    drawn.__name__, drawn.__doc__ = test.__name__, test.__doc__
    return drawn


dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**16)
flags = st.booleans()
coefficients = st.floats(0, 1, width=32)


def maybe(data, strategy):
    return data.draw(st.none() | strategy)


def with_strides(data, x: torch.Tensor) -> torch.Tensor:
    """The same values, perhaps with gaps between the elements or with dimensions in another order."""
    kind = data.draw(st.sampled_from(["as is", "gaps", "transposed"]))
    if kind == "gaps" and x.dim() > 0:
        room = torch.zeros(*x.shape[:-1], 2 * x.shape[-1] + 1, dtype=x.dtype, device=x.device)
        view = room[..., : 2 * x.shape[-1] : 2]
        view.copy_(x)
        return view
    if kind == "transposed" and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return x


@examples
def test_packed_gae(device, data):
    lengths = data.draw(st.lists(st.integers(0, 40), max_size=5))
    inputs = packed_inputs(
        lengths, dtype=data.draw(dtypes), device=device, seed=data.draw(seeds), slack=data.draw(st.integers(0, 9))
    )
    inputs["mask"] = inputs["mask"] | data.draw(flags)
    inputs = {name: with_strides(data, x) for name, x in inputs.items()}
    for name in ("mask", "bootstrap_values"):
        if data.draw(flags):
            del inputs[name]
    lams = torch.rand(len(lengths), generator=torch.Generator().manual_seed(1)).to(device)
    lam_policy, lam_critic = maybe(data, coefficients), data.draw(coefficients)
    arguments = {
        **inputs,
        "gamma": data.draw(coefficients),
        "lam_policy": lams if data.draw(flags) else lam_policy,
        "lam_critic": lams if data.draw(flags) else lam_critic,
    }
    if arguments["lam_policy"] is None:
        arguments["alpha"] = data.draw(st.sampled_from([0.05, 0.4, 1.5]))
    actual = packed_gae(**arguments)
    exact, baseline = (reference.packed_gae(**cast(arguments, d)) for d in (torch.float64, torch.float32))
    for name in actual._fields:
        assert_within_budget(getattr(actual, name), getattr(baseline, name), getattr(exact, name), name=name)


def drawn_settings(data) -> dict:
    """Numbers of the policy loss."""
    return {
        "clip_low": data.draw(st.sampled_from([0.0, 0.2, 1.0])),
        "clip_high": data.draw(st.sampled_from([0.0, 0.28, 5.0])),
        "dual_clip": maybe(data, st.sampled_from([1.1, 3.0])),
        "nll_weight": data.draw(st.sampled_from([0.0, 0.1, 2.0])),
        "num_tokens": maybe(data, st.integers(1, 50)),
    }


def without_some(data, inputs: dict, names) -> dict:
    return {name: x for name, x in inputs.items() if name not in names or data.draw(flags)}


@examples
def test_policy_loss(device, data):
    shape = data.draw(st.lists(st.integers(1, 3), max_size=2).map(tuple))
    V = data.draw(st.sampled_from([1, 2, 31, 64, 65, 100, 130]))
    inputs = policy_inputs(shape, V, dtype=data.draw(dtypes), device=device, seed=data.draw(seeds))
    inputs = without_some(data, inputs, ("is_correct", "token_weights", "ref_logprobs"))
    inputs = {name: with_strides(data, x) for name, x in inputs.items()}
    arguments = {**inputs, **drawn_settings(data), "entropy_weight": data.draw(st.sampled_from([0.0, 0.1]))}
    arguments["kl_weight"] = 0.3 if "ref_logprobs" in inputs else 0.0
    arguments["temperature"] = data.draw(st.sampled_from([1.0, 0.6, 2.0]))
    upstream = data.draw(st.sampled_from([1.0, -2.5]))
    (exact, exact_grads), (baseline, baseline_grads) = references(
        reference.policy_loss, arguments, "logits", upstream=upstream
    )
    out, grads = run(policy_loss, arguments, "logits", upstream=upstream)
    assert_fields(out, baseline, exact)
    assert_gradient(grads["logits"], baseline_grads["logits"], exact_grads["logits"])
    # The same bits whether a gradient is wanted or not, and from the op that gives the log-probs alone.
    logprobs = token_logprobs(
        inputs["logits"], inputs["token_ids"], mask=inputs["mask"], temperature=arguments["temperature"]
    ).logprobs
    assert torch.equal(out.logprobs, logprobs)
    assert torch.equal(policy_loss(**arguments).loss, out.loss)


@examples
def test_logprob_policy_loss(device, data):
    shape = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=2).map(tuple))
    dtype = data.draw(dtypes)
    inputs = policy_inputs(shape, 5, seed=data.draw(seeds))
    logprobs = inputs.pop("logits").log_softmax(-1)
    inputs["logprobs"] = logprobs.gather(-1, inputs.pop("token_ids").unsqueeze(-1)).squeeze(-1)
    inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    inputs = without_some(data, on(device, **inputs), ("is_correct", "token_weights", "ref_logprobs"))
    inputs = {name: with_strides(data, x) for name, x in inputs.items()}
    arguments = {**inputs, **drawn_settings(data), "kl_weight": 0.3 if "ref_logprobs" in inputs else 0.0}
    (exact, exact_grads), (baseline, baseline_grads) = references(
        reference.logprob_policy_loss, arguments, "logprobs", upstream=-2.5
    )
    out, grads = run(logprob_policy_loss, arguments, "logprobs", upstream=-2.5)
    assert_fields(out, baseline, exact)
    assert_gradient(grads["logprobs"], baseline_grads["logprobs"], exact_grads["logprobs"])


@examples
def test_value_loss_and_statistics(device, data):
    shape = data.draw(st.lists(st.integers(1, 12), max_size=2).map(tuple))
    inputs = value_inputs(shape, dtype=data.draw(dtypes), device=device, seed=data.draw(seeds))
    inputs = {name: with_strides(data, x) for name, x in inputs.items()}
    triple = {name: inputs[name] for name in ("values", "returns", "mask")}
    clip = maybe(data, st.sampled_from([0.1, 1.0]))
    arguments = {**inputs, "clip": clip} if clip else triple
    (exact, exact_grads), (baseline, baseline_grads) = references(reference.value_loss, arguments, "values")
    out, grads = run(value_loss, arguments, "values")
    for name in out._fields:
        assert_within_budget(getattr(out, name), getattr(baseline, name), getattr(exact, name), name=name)
    assert_gradient(grads["values"], baseline_grads["values"], exact_grads["values"])

    share = reference.explained_variance(**cast(triple, torch.float64))
    assert_within_budget(explained_variance(**triple), share, share, scale=1.0)
    arguments = {"x": inputs["returns"], "mask": inputs["mask"], "shift_mean": data.draw(flags)}
    exact, baseline = (reference.masked_whiten(**cast(arguments, d)) for d in (torch.float64, torch.float32))
    # Two equal or nearly equal places leave a variance of rounding alone.
    assert_within_budget(masked_whiten(**arguments), baseline, exact, scale=1.0)
