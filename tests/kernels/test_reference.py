"""The reference itself: its gradients against finite differences, its values against formulas written another way."""

import math

import pytest
import torch
from draws import cast, linear_inputs, packed_inputs, policy_inputs, value_inputs

from vapo_kernels import reference


def close(actual, expected):
    actual, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def advantages_by_powers(rewards, values, bootstrap, gamma, lam):
    """Eq. 5 as the sum over k that it is, one response at a time."""
    length = len(rewards)
    after = [*values[1:], bootstrap][:length]
    delta = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    return [sum((gamma * lam) ** k * delta[t + k] for k in range(length - t)) for t in range(length)]


@pytest.mark.parametrize("alpha", [0.05, 0.4])
def test_gae_is_the_sum_of_eq_5(alpha):
    lengths = [1, 6, 0, 30]
    inputs = cast(packed_inputs(lengths), torch.float64)
    out = reference.packed_gae(**inputs, gamma=0.9, lam_critic=0.8, alpha=alpha)
    start = 0
    for s, length in enumerate(lengths):
        at = [t for t in range(start, start + length) if inputs["mask"][t]]
        rewards, values = inputs["rewards"][at].tolist(), inputs["values"][at].tolist()
        bootstrap = inputs["bootstrap_values"][s].item()
        lam = max(0.0, 1 - 1 / (alpha * len(at))) if at else 0.0
        close(out.advantages[at], advantages_by_powers(rewards, values, bootstrap, 0.9, lam))
        critic = advantages_by_powers(rewards, values, bootstrap, 0.9, 0.8)
        close(out.returns[at], [a + v for a, v in zip(critic, values, strict=True)])
        start += length
    assert not out.advantages[~inputs["mask"]].any() and not out.returns[~inputs["mask"]].any()
    padded = {name: inputs[name][:36].view(6, 6) for name in ("rewards", "values", "mask")}
    rows = reference.padded_gae(**padded, lam_policy=0.5)
    for b in range(6):
        row = {name: x[b] for name, x in padded.items()}
        one = reference.packed_gae(**row, cu_seqlens=torch.tensor([0, 6]), lam_policy=0.5)
        close(rows.advantages[b], one.advantages)
        close(rows.returns[b], one.returns)


def test_length_adaptive_lambda_sums_to_alpha_times_length():
    lengths = torch.tensor([0.0, 5.0, 20.0, 50.0, 400.0], dtype=torch.float64)
    lams = reference.length_adaptive_lambda(lengths)
    assert lams[:3].tolist() == [0, 0, 0]
    for length, lam in zip(lengths[3:].tolist(), lams[3:].tolist(), strict=True):
        assert sum(lam**k for k in range(20_000)) == pytest.approx(0.05 * length, rel=1e-9)  # Eq. 14


def test_token_logprobs_by_hand():
    logits = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64)
    total = sum(math.exp(z / 2) for z in (1, 2, 4))
    p = [math.exp(z / 2) / total for z in (1, 2, 4)]
    out = reference.token_logprobs(logits, torch.tensor([1]), temperature=2.0)
    close(out.logprobs, [math.log(p[1])])
    close(out.entropy, [-sum(x * math.log(x) for x in p)])


def loss_by_loop(logprobs, entropy, inputs, settings) -> float:
    """Eq. 17 a token at a time, in plain Python."""
    policy = nll = kl = bonus = 0.0
    columns = [inputs[n].tolist() for n in ("old_logprobs", "advantages", "mask", "is_correct", "token_weights")]
    refs = inputs["ref_logprobs"].tolist()
    for new, ent, ref, old, advantage, sampled, correct, weight in zip(
        logprobs.tolist(), entropy.tolist(), refs, *columns, strict=True
    ):
        if not sampled:
            continue
        ratio = math.exp(new - old)
        low, high = 1 - settings["clip_low"], 1 + settings["clip_high"]
        surrogate = min(ratio * advantage, min(max(ratio, low), high) * advantage)
        if advantage < 0:
            surrogate = max(surrogate, settings["dual_clip"] * advantage)
        policy -= weight * surrogate / settings["num_tokens"]
        nll -= correct * new / settings["num_correct_tokens"]
        kl += (math.exp(ref - new) - 1 - (ref - new)) / settings["num_tokens"]
        bonus += ent / settings["num_tokens"]
    return policy + settings["nll_weight"] * nll + settings["kl_weight"] * kl - settings["entropy_weight"] * bonus


SETTINGS = {
    "clip_low": 0.1,
    "clip_high": 0.3,
    "dual_clip": 1.5,
    "nll_weight": 0.3,
    "kl_weight": 0.2,
    "entropy_weight": 0.05,
    "num_tokens": 9,
    "num_correct_tokens": 4,
}


def test_policy_loss_is_eq_17():
    inputs = cast(policy_inputs((40,), 5), torch.float64)
    logprobs, entropy = reference.token_logprobs(inputs["logits"], inputs["token_ids"])
    out = reference.policy_loss(**inputs, **SETTINGS)
    close(out.loss, loss_by_loop(logprobs, entropy, inputs, SETTINGS))
    rest = {n: x for n, x in inputs.items() if n not in ("logits", "token_ids")}
    close(reference.logprob_policy_loss(logprobs, entropy=entropy, **rest, **SETTINGS).loss, out.loss.item())
    head = cast(linear_inputs((40,), 3, 5), torch.float64)
    out = reference.linear_policy_loss(**head, **SETTINGS)
    logits = head["hidden"] @ head["weight"].T + head["bias"]
    rest = {n: x for n, x in head.items() if n not in ("hidden", "weight", "bias")}
    close(reference.policy_loss(logits, **rest, **SETTINGS).loss, out.loss.item())


def test_value_loss_is_eq_10():
    inputs = cast(value_inputs((40,)), torch.float64)
    names = ("values", "returns", "old_values", "mask")
    errors, clipped = [], 0
    for value, target, old, sampled in zip(*(inputs[n].tolist() for n in names), strict=True):
        if sampled:
            bounded = min(max(value, old - 0.2), old + 0.2)
            errors.append(max((value - target) ** 2, (bounded - target) ** 2) / 2)
            clipped += (bounded - target) ** 2 > (value - target) ** 2
    out = reference.value_loss(**inputs, clip=0.2, num_tokens=7)
    close(out.loss, sum(errors) / 7)
    close(out.clip_fraction, clipped / 7)


def test_statistics_by_hand():
    inputs = cast(value_inputs((40,)), torch.float64)
    mask = inputs["mask"]
    values, returns = inputs["values"][mask], inputs["returns"][mask]
    close(
        reference.explained_variance(inputs["values"], inputs["returns"], mask),
        (1 - torch.var(returns - values) / torch.var(returns)).item(),
    )
    moments = reference.value_moments(inputs["values"], inputs["returns"], mask)
    errors = returns - values
    close(moments, [len(errors), returns.sum(), (returns**2).sum(), errors.sum(), (errors**2).sum()])
    expected = torch.zeros(40, dtype=torch.float64)
    expected[mask] = (values - values.mean()) / (values.var() + 1e-8).sqrt()
    close(reference.masked_whiten(inputs["values"], mask), expected)


@pytest.mark.parametrize("settings", [{}, SETTINGS], ids=["defaults", "all terms"])
def test_gradcheck_of_the_policy_losses(settings):
    inputs = cast(policy_inputs((2, 3), 5), torch.float64)
    rest = {n: x for n, x in inputs.items() if n != "logits"}
    temperature = 0.5 + torch.rand(2, 3, dtype=torch.float64)

    def from_logits(logits):
        return reference.policy_loss(logits, **rest, **settings, temperature=temperature).loss

    assert torch.autograd.gradcheck(from_logits, inputs["logits"].requires_grad_())

    head = cast(linear_inputs((3,), 2, 5), torch.float64)
    names = ("hidden", "weight", "bias")
    tail = {n: x for n, x in head.items() if n not in names}

    def from_hidden(hidden, weight, bias):
        return reference.linear_policy_loss(hidden, weight, bias=bias, **tail, **settings).loss

    assert torch.autograd.gradcheck(from_hidden, [head[n].requires_grad_() for n in names])

    def from_logprobs(logprobs, entropy):
        tail = {n: x for n, x in rest.items() if n != "token_ids"}
        return reference.logprob_policy_loss(logprobs, entropy=entropy, **tail, **settings).loss

    logprobs, entropy = reference.token_logprobs(inputs["logits"].detach(), inputs["token_ids"])
    if not settings:  # without its weight the entropy has no part in the loss
        entropy = entropy.detach()
        assert torch.autograd.gradcheck(lambda x: from_logprobs(x, entropy), logprobs.requires_grad_())
    else:
        assert torch.autograd.gradcheck(from_logprobs, [logprobs.requires_grad_(), entropy.requires_grad_()])


def test_gradcheck_of_token_logprobs_and_value_loss():
    inputs = cast(policy_inputs((2, 3), 5), torch.float64)
    logits = inputs["logits"].requires_grad_()
    mask = inputs["mask"]
    assert torch.autograd.gradcheck(
        lambda x: tuple(reference.token_logprobs(x, inputs["token_ids"], mask=mask, temperature=0.7)), logits
    )
    # A forbidden column: p log p and its slope are 0 there, not NaN.
    forbidden = torch.zeros(2, 3, 5, dtype=torch.bool)
    forbidden[..., 4] = True
    ids = inputs["token_ids"] % 4
    assert torch.autograd.gradcheck(
        lambda x: tuple(reference.token_logprobs(x.masked_fill(forbidden, -math.inf), ids)), logits
    )
    inputs = cast(value_inputs((9,)), torch.float64)
    values = inputs.pop("values").requires_grad_()
    for clip in (None, 0.2):
        tail = {**inputs, "clip": clip} if clip else {n: x for n, x in inputs.items() if n != "old_values"}
        assert torch.autograd.gradcheck(lambda x, tail=tail: reference.value_loss(x, **tail).loss, values)
