"""The learner: phases begin afresh, every use of randomness has its own, the models are those that a run needs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vectors import weights

from vapo.learning.learner import adamw, choose_device, make_generators, seed_for
from vapo.models.load import load_critic, value_head
from vapo.types import PHASES

CPU = torch.device("cpu")


def draws(generators):
    """A random number of each generator, by its name."""
    return {
        "data": generators.data.random(),
        "sampling": torch.rand((), generator=generators.sampling).item(),
        "shuffling": torch.rand((), generator=generators.shuffling).item(),
    }


def step(optimizer):
    """Give every parameter a gradient and take a step, so that the optimiser remembers something."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def has_backbone_of(critic, policy):
    return torch.equal(weights(critic.base_model), weights(policy.base_model))


@pytest.fixture
def given(small_config, critic, tmp_path):
    """A config that names a critic, and that critic."""
    critic.save_pretrained(tmp_path / "given" / "critic")
    return replace(small_config, critic=str(tmp_path / "given")), critic


def test_each_phase_trains_its_models_at_their_learning_rates(learner_of, small_config):
    config = replace(small_config, warm_start_lr=0.1, actor_lr=0.2, critic_lr=0.3, weight_decay=0.4)
    learner, found = learner_of(config), {}
    for phase in PHASES:
        learner.begin(phase, config)
        for name, optimizer in learner.optimizers.items():
            (group,) = optimizer.param_groups
            found[phase, name] = (group["lr"], group["betas"][1], group["weight_decay"])
            assert {id(p) for p in group["params"]} == {id(p) for p in learner.models[name].parameters()}
    assert found == {
        ("warm_start", "policy"): (0.1, 0.98, 0.4),
        ("value_pretraining", "critic"): (0.3, 0.999, 0.4),
        ("vapo", "policy"): (0.2, 0.999, 0.4),
        ("vapo", "critic"): (0.3, 0.999, 0.4),
    }


def test_a_phase_begins_with_fresh_optimisers_and_generators(learner_of, small_config):
    learner = learner_of(small_config, "value_pretraining")
    first = draws(learner.generators)
    step(learner.critic_optimizer)
    learner.step, critic = 7, weights(learner.critic)
    learner.begin("vapo", small_config)
    assert learner.step == 0
    assert not learner.critic_optimizer.state and not learner.policy_optimizer.state
    assert torch.equal(weights(learner.critic), critic)
    second = draws(learner.generators)
    # No rollout of the earlier phase is repeated, and the phase is the same however many steps came before it.
    assert not first.items() & second.items()
    assert second == draws(learner_of(small_config, "vapo").generators)
    learner.begin("value_pretraining", small_config)
    assert draws(learner.generators) == first


def test_generators_differ_between_phases_seeds_and_uses(learner_of, small_config):
    learner, seen = learner_of(small_config), []
    for phase in PHASES:
        for seed in (0, 1):
            learner.begin(phase, replace(small_config, seed=seed))
            seen += draws(learner.generators).values()
    assert len(set(seen)) == 3 * 2 * 3


def test_ranks_share_data_and_shuffles_and_have_samples_of_their_own(monkeypatch):
    first = draws(make_generators("vapo 0", CPU))
    monkeypatch.setattr("vapo.learning.learner.rank", lambda: 1)
    second = draws(make_generators("vapo 0", CPU))
    assert {name: first[name] == second[name] for name in first} == {"data": True, "sampling": False, "shuffling": True}


def test_each_purpose_has_a_seed_of_its_own():
    seeds = [seed_for(purpose, seed) for purpose in ("data", "sampling", "shuffling") for seed in range(3)]
    assert len(set(seeds)) == 9
    # A resumed run finds the same seeds in another process.
    assert seed_for("data", 0) == 2564829376


def test_is_past_follows_the_order_of_phases(learner_of, small_config):
    learner = learner_of(small_config)
    learner.phase = ""
    assert not any(map(learner.is_past, PHASES))
    learner.begin("value_pretraining", small_config)
    assert [learner.is_past(phase) for phase in PHASES] == [True, False, False]


@pytest.mark.parametrize(
    ("changes", "models"),
    [
        ({}, {"policy", "critic"}),
        ({"kl_weight": 0.1}, {"policy", "critic", "reference"}),
        ({"kl_reward_weight": 0.1}, {"policy", "critic", "reference"}),
        ({"advantage_estimator": "group"}, {"policy"}),
        ({"advantage_estimator": "group", "kl_weight": 0.1}, {"policy", "reference"}),
    ],
)
def test_models_are_those_that_the_run_needs(learner_of, small_config, tmp_path, changes, models):
    learner = learner_of(replace(small_config, **changes))
    assert set(learner.models) == models
    assert set(learner.optimizers) == models - {"reference"}
    learner.export(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == models - {"reference"}


def test_the_reference_is_a_frozen_copy_of_the_policy_as_rl_begins(learner_of, small_config):
    config = replace(small_config, kl_weight=0.1)
    learner = learner_of(config, "warm_start")
    step(learner.policy_optimizer)
    learner.begin("vapo", config)
    before = weights(learner.policy)
    step(learner.policy_optimizer)
    assert torch.equal(weights(learner.reference), before) and not torch.equal(weights(learner.policy), before)
    assert not any(parameter.requires_grad for parameter in learner.reference.parameters())


@pytest.mark.parametrize("phase", ["value_pretraining", "vapo"])
def test_the_critic_starts_from_the_backbone_of_the_warm_started_policy(learner_of, small_config, phase):
    learner = learner_of(small_config, "warm_start")
    step(learner.policy_optimizer)
    assert not has_backbone_of(learner.critic, learner.policy)
    learner.begin(phase, small_config)
    assert has_backbone_of(learner.critic, learner.policy)
    assert not value_head(learner.critic).weight.any()
    # From then on it is its own.
    step(learner.critic_optimizer)
    learner.begin("vapo", small_config)
    assert not has_backbone_of(learner.critic, learner.policy)


def test_a_given_critic_stays_as_it_is(learner_of, given):
    config, critic = given
    learner = learner_of(config, "warm_start")
    step(learner.policy_optimizer)
    learner.begin("value_pretraining", config)
    assert torch.equal(weights(learner.critic), weights(critic))


def test_more_new_tokens_than_positions_are_refused(learner_of, small_config):
    learner_of(replace(small_config, max_new_tokens=1023))
    with pytest.raises(ValueError, match="max_new_tokens must be below the model's 1024 positions; got 1024"):
        learner_of(replace(small_config, max_new_tokens=1024))


def test_an_importance_cap_wants_an_engine_that_tells_its_logprobs(learner_of, small_config):
    config = replace(small_config, importance_cap=2.0)
    learner_of(replace(config, engine="loop"))
    with pytest.raises(ValueError, match="importance_cap must be auto or None with engine transformers on a CPU"):
        learner_of(replace(config, engine="transformers"))


def test_sampling_is_that_of_the_config(learner_of, small_config):
    learner = learner_of(replace(small_config, temperature=0.7, top_p=0.9, top_k=5, stop=("#",)))
    sampling, tokenizer = learner.sampling, learner.tokenizer
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (6, 0.7, 0.9, 5)
    assert set(sampling.stop_token_ids) == {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("#")}


def test_export_leaves_models_that_load(learner_of, small_config, tmp_path):
    learner = learner_of(small_config)
    step(learner.critic_optimizer)
    learner.export(tmp_path)
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert torch.equal(weights(policy), weights(learner.policy))
    assert len(AutoTokenizer.from_pretrained(tmp_path / "policy")) == len(learner.tokenizer)
    critic = load_critic(tmp_path / "critic", attention="sdpa", gradient_checkpointing=False)
    assert torch.equal(weights(critic), weights(learner.critic))


def test_device_is_checked(small_config, monkeypatch):
    def chosen(device):
        return choose_device(SimpleNamespace(device=device)).type

    assert choose_device(small_config) == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (chosen("auto"), chosen("cpu")) == ("cpu", "cpu")
    with pytest.raises(ValueError, match="device must be auto or cpu where PyTorch sees no GPU; got 'cuda'"):
        chosen("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (chosen("auto"), chosen("cpu"), chosen("cuda")) == ("cuda", "cpu", "cuda")


@pytest.mark.parametrize(("device", "fused"), [("cpu", None), ("cuda", True)])
def test_adamw_is_fused_on_a_gpu(policy, device, fused):
    model = SimpleNamespace(device=torch.device(device), parameters=policy.parameters)
    (group,) = adamw(model, lr=0.1, betas=(0.9, 0.98)).param_groups
    assert (group["fused"], group["lr"], group["betas"]) == (fused, 0.1, (0.9, 0.98))
