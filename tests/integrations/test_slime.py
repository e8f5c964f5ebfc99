"""slime's documented data structures, without slime: lists of responses, and packed logits with prompts."""

from argparse import Namespace

import pytest
import torch

from vapo.integrations import slime
from vapo_kernels import reference

PROMPTS, RESPONSES, VOCABULARY, PADDING = (3, 1, 2), (5, 4, 1), 11, 6
MASKS = [torch.tensor([1, 0, 1, 1, 0]), torch.tensor([1, 1, 1, 1]), torch.tensor([0])]


def arguments(**kwargs) -> Namespace:
    given = {
        "gamma": 1.0,
        "kl_coef": 0.0,
        "eps_clip": 0.2,
        "eps_clip_high": 0.28,
        "eps_clip_c": None,
        "rollout_temperature": 0.7,
        "entropy_coef": 0.0,
        "use_kl_loss": False,
        "use_rollout_logprobs": False,
        "calculate_per_token_loss": True,
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
    }
    return Namespace(**{**given, **kwargs})


def rollout_data() -> dict:
    torch.manual_seed(0)
    return {
        "rewards": [1.0, -1.0, 1.0],
        "values": [torch.randn(length) for length in RESPONSES],
        "kl": [torch.rand(length) for length in RESPONSES],
        "loss_masks": MASKS,
        "response_lengths": list(RESPONSES),
        "total_lengths": [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)],
    }


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("given", [{}, {"vapo_lam_policy": 0.9, "vapo_lam_critic": 0.95}, {"vapo_alpha": 1.0}])
def test_advantages_are_those_of_each_response_alone(kl_coef, given):
    data = rollout_data()
    slime.advantages_and_returns(arguments(kl_coef=kl_coef, **given), data)
    for row, mask in enumerate(MASKS):
        rewards = -kl_coef * data["kl"][row]
        if mask.any():
            rewards[mask.nonzero()[-1]] += data["rewards"][row]
        expected = reference.padded_gae(
            rewards[None],
            data["values"][row][None],
            mask[None],
            lam_policy=given.get("vapo_lam_policy"),
            lam_critic=given.get("vapo_lam_critic", 1.0),
            alpha=given.get("vapo_alpha", 0.05),
        )
        torch.testing.assert_close(data["advantages"][row], expected.advantages[0])
        torch.testing.assert_close(data["returns"][row], expected.returns[0])


def test_masked_is_never_read():
    clean, poisoned = rollout_data(), rollout_data()
    for name in ("values", "kl"):
        poisoned[name] = [x.masked_fill(mask == 0, torch.nan) for x, mask in zip(poisoned[name], MASKS, strict=True)]
    for data in (clean, poisoned):
        slime.advantages_and_returns(arguments(kl_coef=0.1), data)
    for name in ("advantages", "returns"):
        assert all(torch.equal(a, b) for a, b in zip(clean[name], poisoned[name], strict=True))


def test_advantages_reject_context_parallelism():
    data = rollout_data()
    data["values"] = [x[: len(x) // 2] for x in data["values"]]
    with pytest.raises(ValueError, match=r"values: expected whole responses, .* \[5, 4, 1\], got \[2, 2, 0\]"):
        slime.advantages_and_returns(arguments(), data)


def micro_batch() -> tuple[dict, torch.Tensor]:
    data = rollout_data()
    torch.manual_seed(1)
    totals = data["total_lengths"]
    batch = {
        "unconcat_tokens": [torch.randint(VOCABULARY, (total,)) for total in totals],
        "total_lengths": totals,
        "response_lengths": list(RESPONSES),
        "loss_masks": MASKS,
        "advantages": [torch.randn(length) for length in RESPONSES],
        "log_probs": [-2 - torch.rand(length) for length in RESPONSES],
        "ref_log_probs": [-2 - torch.rand(length) for length in RESPONSES],
    }
    return batch, torch.randn(1, sum(totals) + PADDING, VOCABULARY, requires_grad=True)


def by_hand(args, batch, logits):
    """The sum over tokens, one response after the other, as the equations read."""
    total, start = 0.0, 0
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        scaled = logits[0, start + prompt - 1 : start + prompt + response - 1] / args.rollout_temperature
        all_logprobs = scaled.log_softmax(-1)
        logprobs = all_logprobs.gather(1, batch["unconcat_tokens"][row][prompt:, None])[:, 0]
        ratio, advantages = (logprobs - batch["log_probs"][row]).exp(), batch["advantages"][row]
        loss = -torch.min(ratio * advantages, ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high) * advantages)
        loss = loss + args.entropy_coef * (all_logprobs.exp() * all_logprobs).sum(-1)
        if args.use_kl_loss:
            difference = batch["ref_log_probs"][row] - logprobs
            loss = loss + args.kl_loss_coef * (difference.exp() - 1 - difference)
        total = total + (loss * MASKS[row]).sum()
        start += prompt + response
    return total


@pytest.mark.parametrize(
    "given", [{}, {"entropy_coef": 0.02}, {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3"}]
)
def test_policy_loss_is_the_sum_over_tokens(given):
    args, (batch, logits) = arguments(**given), micro_batch()
    loss, metrics = slime.policy_loss(args, batch, logits, None)
    (gradient,) = torch.autograd.grad(loss, logits)
    expected = by_hand(args, batch, logits)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0], rtol=1e-4, atol=1e-6)
    assert {"loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl"} <= set(metrics)
    assert not any(x.requires_grad for x in metrics.values())


def test_policy_loss_reads_the_rollouts_logprobs_if_told_so():
    batch, logits = micro_batch()
    batch["rollout_log_probs"] = batch.pop("log_probs")
    loss, _ = slime.policy_loss(arguments(use_rollout_logprobs=True), batch, logits, None)
    torch.testing.assert_close(loss, slime.policy_loss(arguments(), micro_batch()[0], logits, None)[0])


def test_policy_loss_without_old_logprobs_has_ratio_one():
    batch, logits = micro_batch()
    del batch["log_probs"]
    loss, metrics = slime.policy_loss(arguments(), batch, logits, None)
    expected = -sum((advantages * mask).sum() for advantages, mask in zip(batch["advantages"], MASKS, strict=True))
    torch.testing.assert_close(loss, expected)
    assert metrics["pg_clipfrac"] == metrics["ppo_kl"] == 0
    assert torch.autograd.grad(loss, logits)[0].any()


@pytest.mark.parametrize(
    "given, message",
    [
        ({"calculate_per_token_loss": False}, "calculate_per_token_loss: expected True"),
        ({"tensor_model_parallel_size": 2}, "tensor_model_parallel_size: expected 1, for whole rows of logits, got 2"),
        ({"context_parallel_size": 2}, "context_parallel_size: expected 1"),
        ({"use_kl_loss": True, "kl_loss_type": "k1"}, "kl_loss_type: expected k3 or low_var_kl, got k1"),
    ],
)
def test_policy_loss_rejects_what_it_cannot_do(given, message):
    with pytest.raises(ValueError, match=message):
        slime.policy_loss(arguments(**given), *micro_batch(), None)


def test_policy_loss_rejects_other_logits():
    batch, logits = micro_batch()
    with pytest.raises(ValueError, match=r"logits: expected \[1, T, V\] with T at least 16, got \(1, 5, 11\)"):
        slime.policy_loss(arguments(), batch, logits[:, :5], None)
