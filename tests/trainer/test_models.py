"""The policy is repeatable, the critic starts at V = 0 and survives its checkpoint."""

import pytest
import torch

from vapo.models import critic_from_policy, load_critic, tiny_policy
from vapo.packing import all_rows, state_values


def test_same_seed_same_weights_and_no_trace_in_the_global_generator(task):
    state = torch.get_rng_state()
    first, again, other = (tiny_policy(task.tokenizer, seed).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(state, torch.get_rng_state())


def test_new_critic_says_zero_everywhere_and_copies_the_policys_backbone(policy, rollout):
    critic = critic_from_policy(policy)
    weights = critic.base_model.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in policy.base_model.state_dict().items())
    assert torch.equal(state_values(critic, rollout, all_rows(rollout)), torch.zeros(11))
    with torch.no_grad():
        policy.base_model.embed_tokens.weight.zero_()
    assert critic.base_model.embed_tokens.weight.any()


def test_critic_survives_its_checkpoint(policy, rollout, tmp_path):
    critic = critic_from_policy(policy)
    torch.nn.init.normal_(critic.score.weight, generator=torch.Generator().manual_seed(0))
    critic.save_pretrained(tmp_path)
    loaded = load_critic(tmp_path, torch.device("cpu"))
    weights = loaded.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in critic.state_dict().items())
    values = state_values(loaded, rollout, all_rows(rollout))
    # Equal weights may lie at addresses that the matrix product treats differently in the last bit.
    torch.testing.assert_close(values, state_values(critic, rollout, all_rows(rollout)))
    assert values.all()


def test_a_folder_without_a_value_head_is_refused(policy, tmp_path):
    with pytest.raises(ValueError, match=r"must hold a config.json; got .*empty"):
        load_critic(tmp_path / "empty", torch.device("cpu"))
    for num_labels in (2, 1):
        policy.config.num_labels = num_labels
        policy.save_pretrained(tmp_path)
        message = rf"must hold a backbone and a head with 1 label; got {num_labels} labels, missing \[.*score.weight"
        with pytest.raises(ValueError, match=message):
            load_critic(tmp_path, torch.device("cpu"))
