"""Each VAPO part has one switch; turning it off changes the quantity that it governs and nothing else."""

import random
from dataclasses import replace

import pytest
import torch

from vapo.advantages import build_batch, rollout_logprobs
from vapo.config import Config
from vapo.models import critic_from_policy
from vapo.packing import all_rows
from vapo.trainer import Generators, make_learner, vapo_step
from vapo.types import Batch
from vapo.update import accumulate_policy_loss, accumulate_value_loss

ON = Config(
    num_prompts=3,
    group_size=2,
    max_new_tokens=3,
    logged_samples=6,
    alpha=1.0,
    nll_weight=0.5,
    whiten_advantages=False,
)

# Log-probs of the rollout's 11 tokens are those of the policy minus these: ratios 1.25 and 0.9 among others, so that
# some tokens lie between the two upper bounds of the clip.
LOG_RATIOS = torch.tensor([1.25, 1.0, 1.0, 1.25, 0.9, 1.0, 1.0, 1.1, 0.5, 1.25, 1.0]).log()
ADVANTAGES = torch.tensor([1.0, -1.0, 2.0, 1.0, -0.5, 1.5, -2.0, 1.0, 0.5, 2.0, 1.0])
VALUES = torch.linspace(0.1, 0.6, 11)


@pytest.fixture
def quantities(policy, rollout, task):
    """Function from a config to every quantity that a part of VAPO may govern."""
    logprobs = rollout_logprobs(policy, rollout, ON)
    fixed = Batch(rollout, logprobs - LOG_RATIOS, VALUES, ADVANTAGES, VALUES.flip(0), torch.zeros(4))
    critic = critic_from_policy(policy)
    torch.nn.init.normal_(critic.score.weight, std=0.02, generator=torch.Generator().manual_seed(0))

    def measure(config):
        batch = build_batch(rollout, logprobs, VALUES, config)
        rows = all_rows(rollout)
        policy.zero_grad()
        policy_terms = accumulate_policy_loss(policy, fixed, rows, config).tolist()
        gradient = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
        critic.zero_grad()
        value_terms = accumulate_value_loss(critic, fixed, rows, config, value_clip=config.value_clip)
        policy.zero_grad()
        critic.zero_grad()
        names = ("policy loss", "positive NLL", "entropy", "KL", "clip fraction", "loss")
        return {
            "phases": config.total_steps - config.warm_start_steps - config.steps,
            "prompts of each response": prompts_of_a_step(config, task, policy, critic),
            "λ_policy": batch.lam_policy.tolist(),
            "advantages": batch.advantages.tolist(),
            "returns": batch.returns.tolist(),
            "value loss": value_terms.tolist(),
            "gradient": gradient.tolist(),
            **dict(zip(names, policy_terms, strict=True)),
        }

    return measure


def prompts_of_a_step(config, task, policy, critic):
    """How often each prompt is answered in one step of the trainer, in order."""
    learner = make_learner(policy, critic, replace(config, actor_lr=1e-12, critic_lr=1e-12))
    for optimizer in (learner.policy_optimizer, learner.critic_optimizer):
        optimizer.param_groups[0]["weight_decay"] = 0.0
    start = {name: weight.clone() for name, weight in policy.state_dict().items()}
    generators = Generators(random.Random(0), torch.Generator().manual_seed(0), torch.Generator().manual_seed(0))
    _, samples = vapo_step(learner, task, config, generators)
    policy.load_state_dict(start)
    prompts = [sample["prompt"] for sample in samples]
    return [prompts.count(prompt) for prompt in prompts]


@pytest.mark.parametrize(
    ("switch", "governed"),
    [
        ("value_pretraining", {"phases"}),
        ("decoupled_gae", {"returns"}),
        ("length_adaptive_gae", {"λ_policy", "advantages"}),
        ("clip_higher", {"clip fraction", "policy loss", "loss", "gradient"}),
        ("token_level_loss", {"policy loss", "loss", "gradient"}),
        ("positive_nll", {"loss", "gradient"}),
        ("group_sampling", {"prompts of each response"}),
    ],
)
def test_switch_changes_what_it_governs_and_nothing_else(quantities, switch, governed):
    on, off = quantities(ON), quantities(replace(ON, **{switch: False}))
    assert {name for name in on if on[name] != off[name]} == governed


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
    assert quantities(ON)["prompts of each response"] == [2] * 6
    assert quantities(replace(ON, group_sampling=False))["prompts of each response"] == [1] * 6
