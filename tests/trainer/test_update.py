"""One optimiser step: any split into micro-batches adds up to the undivided step."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from vectors import gradient, weights

from vapo.config import Config
from vapo.learning.update import (
    MiniBatch,
    accumulate_policy_loss,
    accumulate_value_loss,
    count_tokens,
    mini_batches,
    response_mean_weights,
    set_lr,
    split_rows,
    take_steps,
    update_critic,
    update_policy,
)
from vapo.models.forward import all_rows, rollout_logprobs
from vapo.models.output_head import plain_head

TERMS = ("pg_loss", "nll_loss", "kl", "entropy", "ppo_kl", "pg_clipfrac", "loss")
UNDIVIDED = 10_000


@pytest.fixture
def batch(policy, rollout, batch_of):
    """Old log-probs a little off the policy's, so that ratios differ from 1 and some are clipped."""
    generator = torch.Generator().manual_seed(0)

    def noise():
        return torch.randn(11, generator=generator)

    old_logprobs = rollout_logprobs(policy, rollout, Config()) + 0.3 * noise()
    return batch_of(
        old_logprobs=old_logprobs,
        ref_logprobs=old_logprobs + 0.4 * noise(),
        old_values=0.1 * noise(),
        advantages=noise(),
        returns=noise(),
    )


def part(batch, rows=None):
    """The mini-batch of some rows, or all."""
    rows = all_rows(batch.rollout) if rows is None else rows
    return MiniBatch(rows, count_tokens(batch, [rows])[0])


def policy_step(policy, batch, rows=None, **settings):
    """Loss terms by name, and the gradient as one vector."""
    policy.zero_grad()
    terms = accumulate_policy_loss(policy, batch, part(batch, rows), Config(**settings))
    return dict(zip(TERMS, terms.tolist(), strict=True)), gradient(policy)


def value_step(critic, batch, rows=None, *, value_clip=None, **settings):
    """The same of the critic."""
    critic.zero_grad()
    terms = accumulate_value_loss(critic, batch, part(batch, rows), Config(**settings), value_clip=value_clip)
    return dict(zip(("loss", "clip_fraction"), terms.tolist(), strict=True)), gradient(critic)


def assert_same_step(found, expected, atol=1e-6):
    """Two steps have the same terms and the same gradient."""
    assert found[0] == pytest.approx(expected[0], abs=atol)
    assert (found[1] - expected[1]).abs().max() < atol * max(1.0, expected[1].abs().max().item())


# One response each, two and two, three and one: rows of 6, 3, 6 and 8 tokens.
@pytest.mark.parametrize("micro_batch_tokens", [1, 13, 18])
@pytest.mark.parametrize(
    ("step", "settings"),
    [
        (policy_step, {"token_level_loss": True, "nll_weight": 0.5}),
        (policy_step, {"token_level_loss": False, "nll_weight": 0.5}),
        (value_step, {"value_clip": None}),
        (value_step, {"value_clip": 0.1}),
    ],
)
def test_micro_batches_add_up(policy, critic, batch, micro_batch_tokens, step, settings):
    model = policy if step is policy_step else critic
    whole = step(model, batch, micro_batch_tokens=UNDIVIDED, **settings)
    assert_same_step(step(model, batch, micro_batch_tokens=micro_batch_tokens, **settings), whole)
    assert whole[1].abs().max() > 1e-3


def logprobs_of(policy, batch):
    return rollout_logprobs(policy, batch.rollout, Config())


def test_nll_covers_the_correct_responses_only(policy, batch):
    logprobs = logprobs_of(policy, batch)
    terms, _ = policy_step(policy, batch)
    # The first response has tokens 0 to 2, the last 6 to 10.
    expected = -torch.cat([logprobs[:3], logprobs[6:]]).mean()
    assert terms["nll_loss"] == pytest.approx(expected.item(), abs=1e-6)
    assert terms["loss"] == pytest.approx(terms["pg_loss"] + 0.1 * terms["nll_loss"], abs=1e-6)
    # The second and the third are wrong.
    wrong, same = (policy_step(policy, batch, torch.tensor([1, 2]), positive_nll=nll) for nll in (True, False))
    assert wrong[0]["nll_loss"] == 0
    assert wrong[0] == same[0] and torch.equal(wrong[1], same[1])


def test_the_ratio_is_1_at_any_temperature_before_the_first_step(policy, batch):
    old_logprobs = rollout_logprobs(policy, batch.rollout, Config(temperature=0.5))
    terms, _ = policy_step(policy, replace(batch, old_logprobs=old_logprobs), temperature=0.5)
    assert terms["ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert terms["pg_loss"] == pytest.approx(-batch.advantages.mean().item(), abs=1e-5)


def test_a_mini_batch_is_the_mean_over_its_own_tokens(policy, batch):
    first, second, both = (
        policy_step(policy, batch, rows)[0] for rows in (torch.tensor([0, 2]), torch.tensor([1, 3]), None)
    )
    assert both["pg_loss"] == pytest.approx((5 * first["pg_loss"] + 6 * second["pg_loss"]) / 11, abs=1e-6)


def test_update_policy_moves_towards_what_was_better_than_expected(policy, batch):
    before = logprobs_of(policy, batch)
    signs = torch.tensor([1.0, 1, 1, -1, -1, -1, 1, 1, 1, 1, 1])
    batch = replace(batch, old_logprobs=before, advantages=signs)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
    metrics = update_policy(policy, optimizer, batch, part(batch), Config(positive_nll=False))
    assert ((logprobs_of(policy, batch) - before) * signs).sum() > 0
    assert metrics["actor/pg_loss"] == pytest.approx(-signs.mean().item(), abs=1e-6)
    assert metrics["actor/ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["actor/pg_clipfrac"] == 0
    assert metrics["actor/grad_norm"] > 0
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_gradient_is_clipped_to_the_norm(policy, batch):
    start, optimizer = weights(policy), torch.optim.SGD(policy.parameters(), lr=1.0)
    metrics = update_policy(policy, optimizer, batch, part(batch), Config(max_grad_norm=1e-3))
    assert metrics["actor/grad_norm"] > 1e-3
    assert (weights(policy) - start).norm().item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "field", "bad"),
    [
        ("actor", "advantages", math.nan),
        ("actor", "advantages", math.inf),
        ("actor", "old_logprobs", math.nan),
        ("actor", "ref_logprobs", math.nan),
        ("critic", "returns", math.nan),
        ("critic", "returns", math.inf),
        ("critic", "old_values", math.nan),
    ],
)
def test_a_step_that_is_not_finite_is_skipped_and_the_next_one_is_taken(policy, critic, batch, name, field, bad):
    model = {"actor": policy, "critic": critic}[name]
    optimizer, before = torch.optim.AdamW(model.parameters(), lr=0.1), weights(model)

    def step(batch):
        config = Config(kl_weight=0.1)
        if name == "actor":
            return update_policy(policy, optimizer, batch, part(batch), config)
        return update_critic(critic, optimizer, batch, part(batch), config, value_clip=0.2)

    broken = getattr(batch, field).clone()
    broken[4] = bad
    assert step(replace(batch, **{field: broken})) == {f"{name}/skipped_steps": 1.0}
    assert torch.equal(weights(model), before)
    assert not optimizer.state and all(parameter.grad is None for parameter in model.parameters())
    metrics = step(batch)
    assert metrics[f"{name}/skipped_steps"] == 0 and all(map(math.isfinite, metrics.values()))
    assert not torch.equal(weights(model), before)


@pytest.mark.parametrize(
    ("outcomes", "earlier", "expected", "in_a_row"),
    [
        # A number is the loss of a step that was taken, None a step that was skipped; the limit is 3.
        ([1.0, 3.0], 0, {"critic/vf_loss": 2.0, "critic/skipped_steps": 0}, 0),
        ([1.0, None, 3.0], 2, {"critic/vf_loss": 2.0, "critic/skipped_steps": 1}, 0),
        ([1.0, None], 0, {"critic/vf_loss": 1.0, "critic/skipped_steps": 1}, 1),
        ([None, None, 1.0], 0, {"critic/vf_loss": 1.0, "critic/skipped_steps": 2}, 0),
        ([None, None, 1.0], 1, {"critic/skipped_steps": 2}, 3),
        ([None, None, None, None], 0, {"critic/skipped_steps": 3}, 3),
    ],
)
def test_take_steps_averages_what_was_taken_and_ends_at_the_limit(outcomes, earlier, expected, in_a_row):
    skips = Counter(critic=earlier, actor=1)

    def update(loss):
        return {"critic/skipped_steps": 1.0} if loss is None else {"critic/vf_loss": loss, "critic/skipped_steps": 0.0}

    assert take_steps("critic", update, outcomes, skips, 3) == expected
    assert skips == Counter(critic=in_a_row, actor=1)


def test_update_critic_approaches_the_returns(critic, batch):
    optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-3)
    steps = [update_critic(critic, optimizer, batch, part(batch), Config(), value_clip=None) for _ in range(10)]
    assert steps[-1]["critic/vf_loss"] < 0.7 * steps[0]["critic/vf_loss"]


@pytest.mark.parametrize(("num_rows", "num_parts"), [(8, 2), (7, 3), (3, 3), (100, 1)])
def test_split_rows_is_a_shuffled_partition(num_rows, num_parts):
    parts = split_rows(num_rows, num_parts, torch.Generator().manual_seed(0))
    rows = torch.cat(parts).tolist()
    assert sorted(rows) == list(range(num_rows)) != rows
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert len(parts) == num_parts


def test_mini_batches_are_a_partition_in_each_epoch_with_their_counts(batch):
    parts = mini_batches(batch, 2, 3, torch.Generator().manual_seed(0))
    assert len(parts) == 6
    for first, second in zip(parts[::2], parts[1::2], strict=True):
        assert sorted(first.rows.tolist() + second.rows.tolist()) == [0, 1, 2, 3]
        assert (first.counts + second.counts).tolist() == [11, 8, 4]
    assert all(torch.equal(each.counts, part(batch, each.rows).counts) for each in parts)


def test_count_tokens_by_hand(batch):
    everything, two = all_rows(batch.rollout), torch.tensor([1, 3])
    assert count_tokens(batch, [everything, two]).tolist() == [[11, 8, 4], [6, 5, 2]]
    masked = replace(batch, mask=torch.tensor([True] * 6 + [False] * 5))
    assert count_tokens(masked, [everything]).tolist() == [[6, 3, 3]]


@pytest.mark.parametrize("token_level_loss", [True, False])
def test_importance_weights_scale_the_policys_term_alone(policy, batch, token_level_loss):
    plain, _ = policy_step(policy, batch, token_level_loss=token_level_loss)
    weights = torch.full_like(batch.old_logprobs, 0.5)
    halved, _ = policy_step(policy, replace(batch, importance_weights=weights), token_level_loss=token_level_loss)
    assert halved["pg_loss"] == pytest.approx(0.5 * plain["pg_loss"]) and plain["pg_loss"]
    assert halved["nll_loss"] == plain["nll_loss"]
    # Only the weighted response counts.
    weights = (torch.arange(len(weights)) < 3).float()
    first, _ = policy_step(policy, replace(batch, importance_weights=weights), token_level_loss=token_level_loss)
    masked = replace(batch, advantages=torch.where(weights > 0, batch.advantages, 0.0))
    alone, _ = policy_step(policy, masked, token_level_loss=token_level_loss)
    assert first["pg_loss"] == pytest.approx(alone["pg_loss"])


def test_response_mean_weights_give_each_response_the_same_weight():
    found = response_mean_weights(torch.tensor([1, 4]), torch.tensor(9), torch.tensor(3))
    torch.testing.assert_close(found, torch.tensor([3.0, 0.75, 0.75, 0.75, 0.75]))


# All but the third response.
MASK = torch.tensor([True] * 4 + [False] * 2 + [True] * 5)


@pytest.mark.parametrize(
    ("step", "settings"),
    [
        (policy_step, {"token_level_loss": True, "kl_weight": 0.1, "entropy_weight": 0.1}),
        (policy_step, {"token_level_loss": False, "kl_weight": 0.1, "entropy_weight": 0.1}),
        (value_step, {}),
    ],
)
def test_masked_responses_do_not_count_and_give_no_gradient(policy, critic, batch, step, settings):
    model = policy if step is policy_step else critic
    # Masked inputs may be anything.
    anything = {name: getattr(batch, name).masked_fill(~MASK, 1e4) for name in ("advantages", "returns")}
    masked = replace(batch, mask=MASK, **anything)
    assert_same_step(step(model, masked, **settings), step(model, batch, torch.tensor([0, 1, 3]), **settings))
    nothing, zero = step(model, masked, torch.tensor([2]), **settings)
    assert not zero.any()
    assert all(term == 0 for term in nothing.values())


def test_the_mean_over_responses_counts_those_that_train(policy, batch):
    advantages = torch.tensor([1.0] * 3 + [-2.0] + [50.0] * 2 + [4.0] * 5)
    batch = replace(batch, old_logprobs=logprobs_of(policy, batch), advantages=advantages, mask=MASK)
    # Three responses of 3, 1 and 5 tokens train.
    for token_level_loss, expected in ((False, -(1 - 2 + 4) / 3), (True, -(3 - 2 + 20) / 9)):
        terms, _ = policy_step(policy, batch, token_level_loss=token_level_loss)
        assert terms["pg_loss"] == pytest.approx(expected, abs=1e-5)


def test_entropy_is_paid_for(policy, batch):
    terms, _ = policy_step(policy, batch)
    paid, _ = policy_step(policy, batch, entropy_weight=0.3)
    # The untrained policy is nearly uniform over 21 words.
    assert 2.0 < terms["entropy"] < math.log(21)
    assert paid["loss"] == pytest.approx(terms["loss"] - 0.3 * terms["entropy"], abs=1e-5)
    assert {**paid, "loss": 0} == {**terms, "loss": 0}


def test_kl_to_the_reference_by_hand(policy, batch):
    difference = batch.ref_logprobs - logprobs_of(policy, batch)
    k3 = (difference.exp() - 1 - difference).mean().item()
    plain, _ = policy_step(policy, batch)
    terms, _ = policy_step(policy, batch, kl_weight=0.5)
    assert plain["kl"] == 0
    assert terms["kl"] == pytest.approx(k3, abs=1e-5)
    assert terms["loss"] == pytest.approx(plain["loss"] + 0.5 * k3, abs=1e-5)


def test_dual_clip_bounds_the_loss_of_bad_tokens_that_became_likely(policy, batch):
    # One token of advantage −1 and ratio 4.
    old = logprobs_of(policy, batch) - torch.tensor([4.0] + [1.0] * 10).log()
    batch = replace(batch, old_logprobs=old, advantages=torch.tensor([-1.0] + [0.0] * 10))
    for dual_clip, loss, has_gradient in ((None, 4 / 11, True), (3.0, 3 / 11, False)):
        terms, gradient = policy_step(policy, batch, positive_nll=False, dual_clip=dual_clip)
        assert terms["pg_loss"] == pytest.approx(loss, abs=1e-5)
        assert gradient.any() == has_gradient


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"token_level_loss": False, "temperature": 0.7, "micro_batch_tokens": 13},
        {"kl_weight": 0.2, "entropy_weight": 0.1, "dual_clip": 2.0, "nll_weight": 0.5},
    ],
)
def test_logits_give_the_same_loss_and_gradient_as_the_plain_head(policy, batch, settings):
    assert plain_head(policy) is policy.lm_head
    plain = policy_step(policy, batch, **settings)
    # What a head with an adapter or a cap is taken for.
    policy.has_plain_head = False
    assert plain_head(policy) is None
    assert_same_step(policy_step(policy, batch, **settings), plain, atol=1e-5)
    assert plain[1].abs().max() > 1e-3


def test_a_wrapped_head_trains_through_its_own_forward(policy, batch):
    class Halved(torch.nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden) / 2

    # Logits halved, as by a scale or an adapter: the same as the plain head at temperature 2.
    expected = policy_step(policy, batch, temperature=2.0)
    policy.lm_head.__class__ = Halved
    assert plain_head(policy) is None
    assert_same_step(policy_step(policy, batch, temperature=1.0), expected, atol=1e-5)


def test_learning_rate_warms_up_linearly_to_its_value(policy):
    optimizer = torch.optim.SGD(policy.parameters(), lr=7.0)
    rates = [set_lr(optimizer, 0.4, step, warmup=4) for step in range(1, 7)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.4)
    assert set_lr(optimizer, 0.2, 1, 0) == set_lr(optimizer, 0.2) == 0.2
