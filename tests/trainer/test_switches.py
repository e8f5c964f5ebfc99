"""Each switch and option changes the quantity that it governs and nothing else."""

from dataclasses import replace

import pytest
import torch

from vapo.config import Config
from vapo.learning.advantages import build_batch
from vapo.learning.step import sample_groups
from vapo.learning.update import accumulate_policy_loss, accumulate_value_loss, mini_batches
from vapo.models.forward import rollout_logprobs

ON = Config(
    num_prompts=3,
    group_size=2,
    max_new_tokens=5,
    mini_batches=2,
    overlong_buffer=4,
    alpha=1.0,
    nll_weight=0.5,
    whiten_advantages=False,
    device="cpu",
)

# Log-probs of the rollout's 11 tokens are those of the policy minus these: ratios 1.25 and 0.9 among others, so that
# some tokens lie between the two upper bounds of the clip.
LOG_RATIOS = torch.tensor([1.25, 1.0, 1.0, 1.25, 0.9, 1.0, 1.1, 1.1, 0.5, 1.25, 1.0]).log()
ADVANTAGES = torch.tensor([1.0, -1.0, 2.0, 1.0, -0.5, 1.5, -2.0, 1.0, 0.5, 2.0, 1.0])
VALUES = torch.linspace(0.1, 0.6, 11)
TERMS = ("policy loss", "positive NLL", "KL", "entropy", "old KL", "clip fraction", "loss")


@pytest.fixture
def quantities(policy, critic, rollout, batch_of, learner_of):
    """Function from a config to every quantity that a switch or an option may govern."""
    logprobs = rollout_logprobs(policy, rollout, ON)
    # The third response, of two tokens, was cut.
    rollout = replace(rollout, is_truncated=torch.tensor([False, False, True, False]))
    final_values = torch.tensor([0.0, 0.0, 0.7, 0.0])
    fixed = {"old_logprobs": logprobs - LOG_RATIOS, "ref_logprobs": logprobs + 0.3, "old_values": VALUES}
    fixed |= {"rollout": rollout, "advantages": ADVANTAGES, "returns": VALUES.flip(0)}

    def measure(config):
        bootstrap = final_values if config.truncated == "bootstrap" else None
        batch = build_batch(
            rollout,
            config,
            old_logprobs=logprobs,
            ref_logprobs=logprobs + 0.1 * VALUES,
            values=VALUES if config.has_critic else None,
            bootstrap_values=bootstrap,
        )
        given = batch_of(**fixed, mask=batch.mask)
        (part,) = mini_batches(given, 1, 1, torch.Generator())
        policy.zero_grad()
        policy_terms = accumulate_policy_loss(policy, given, part, config).tolist()
        gradient = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
        critic.zero_grad()
        value_terms = accumulate_value_loss(critic, given, part, config, value_clip=config.value_clip)
        sampled, sampling = sample_groups(learner_of(config), config)
        return {
            "phases": config.total_steps - config.warm_start_steps - config.steps,
            "prompts of a step": len(sampled.problems),
            "rounds of sampling": sampling.get("rollout/rounds"),
            "training mask": batch.mask.tolist(),
            "rewards": batch.rewards.tolist(),
            "λ_policy": None if batch.lam_policy is None else batch.lam_policy.tolist(),
            "advantages": batch.advantages.tolist(),
            "returns": batch.returns.tolist(),
            "value loss": value_terms.tolist(),
            "gradient": gradient.tolist(),
            **dict(zip(TERMS, policy_terms, strict=True)),
        }

    return measure


@pytest.mark.parametrize(
    ("switch", "governed"),
    [
        ("value_pretraining", {"phases"}),
        ("decoupled_gae", {"returns"}),
        ("length_adaptive_gae", {"λ_policy", "advantages"}),
        ("clip_higher", {"clip fraction", "policy loss", "loss", "gradient"}),
        ("token_level_loss", {"policy loss", "loss", "gradient"}),
        ("positive_nll", {"loss", "gradient"}),
        ("group_sampling", {"prompts of a step"}),
    ],
)
def test_switch_changes_what_it_governs_and_nothing_else(quantities, switch, governed):
    on, off = quantities(ON), quantities(replace(ON, **{switch: False}))
    assert {name for name in on if on[name] != off[name]} == governed


@pytest.mark.parametrize(
    ("changes", "governed"),
    [
        ({"use_values": False}, {"advantages"}),
        ({"advantage_estimator": "group"}, {"phases", "λ_policy", "advantages"}),
        ({"whiten_advantages": True}, {"advantages"}),
        ({"gamma": 0.9}, {"advantages", "returns"}),
        ({"lam_critic": 0.5}, {"returns"}),
        ({"alpha": 0.7}, {"λ_policy", "advantages"}),
        ({"kl_reward_weight": 0.1}, {"rewards", "advantages", "returns"}),
        ({"kl_weight": 0.1}, {"KL", "loss", "gradient"}),
        ({"entropy_weight": 0.1}, {"loss", "gradient"}),
        ({"dual_clip": 1.05}, {"policy loss", "clip fraction", "loss", "gradient"}),
        ({"value_clip": 0.01}, {"value loss"}),
        ({"clip_low": 0.05}, {"policy loss", "clip fraction", "loss", "gradient"}),
        ({"truncated": "bootstrap"}, {"advantages", "returns"}),
        ({"truncated": "penalty"}, {"rewards", "advantages", "returns"}),
        ({"dynamic_sampling": True}, {"rounds of sampling"}),
    ],
)
def test_option_changes_what_it_governs_and_nothing_else(quantities, changes, governed):
    on, off = quantities(ON), quantities(replace(ON, **changes))
    assert {name for name in on if on[name] != off[name]} == governed


def test_mask_takes_cut_responses_out_of_every_mean(quantities):
    on, off = quantities(ON), quantities(replace(ON, truncated="mask"))
    changed = {name for name in on if on[name] != off[name]}
    # The cut response is wrong, so it is no positive example, and its return is 0 either way.
    means = {"policy loss", "entropy", "old KL", "loss", "gradient", "value loss"}
    assert changed == means | {"training mask", "advantages"}
    assert off["training mask"] == [True] * 4 + [False] * 2 + [True] * 5
    assert off["advantages"][:4] == on["advantages"][:4] and off["advantages"][6:] == on["advantages"][6:]
    assert off["advantages"][4:6] == [0.0, 0.0]


def test_without_decoupling_the_returns_use_the_policys_lambda(quantities):
    off = quantities(replace(ON, decoupled_gae=False))
    expected = torch.tensor(off["advantages"]) + VALUES
    torch.testing.assert_close(torch.tensor(off["returns"]), expected)


def test_without_length_adaptation_lambda_is_the_same_for_all(quantities):
    off = quantities(replace(ON, length_adaptive_gae=False))
    assert off["λ_policy"] == pytest.approx([0.95] * 4)


def test_without_clip_higher_the_upper_bound_is_that_of_clip_low(quantities):
    on, off = quantities(ON), quantities(replace(ON, clip_higher=False))
    # Ratio 1.25 on tokens 0, 3 and 9, of advantage 1, 1 and 2: inside 1.28, cut at 1.2.
    assert off["policy loss"] - on["policy loss"] == pytest.approx(0.05 * (1 + 1 + 2) / 11, abs=1e-5)
    assert off["clip fraction"] - on["clip fraction"] == pytest.approx(3 / 11, abs=1e-6)


def test_without_token_level_loss_each_response_counts_the_same(quantities):
    off = quantities(replace(ON, token_level_loss=False))
    ratio = LOG_RATIOS.exp()
    surrogate = torch.minimum(ratio * ADVANTAGES, ratio.clamp(0.8, 1.28) * ADVANTAGES)
    means = [part.mean() for part in surrogate.split([3, 1, 2, 5])]
    assert off["policy loss"] == pytest.approx(-torch.stack(means).mean().item(), abs=1e-5)


def test_without_positive_nll_the_loss_is_that_of_the_policy(quantities):
    on, off = quantities(ON), quantities(replace(ON, positive_nll=False))
    assert off["loss"] == off["policy loss"]
    assert on["loss"] == pytest.approx(on["policy loss"] + 0.5 * on["positive NLL"], abs=1e-5)


def test_without_group_sampling_as_many_responses_have_prompts_of_their_own(quantities):
    assert quantities(ON)["prompts of a step"] == 3
    assert quantities(replace(ON, group_sampling=False))["prompts of a step"] == 6


def test_with_use_values_off_the_advantages_are_the_discounted_rewards(quantities):
    off = quantities(replace(ON, use_values=False, length_adaptive_gae=False, lam_policy=0.5))
    expected = [0.25, 0.5, 1.0, 0.0, 0.0, 0.0, 0.0625, 0.125, 0.25, 0.5, 1.0]
    assert off["advantages"] == pytest.approx(expected)
    assert off["value loss"] == quantities(ON)["value loss"]
