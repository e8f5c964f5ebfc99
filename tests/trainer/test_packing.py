"""Model passes: each token's state, whatever else is in the micro-batch, and nothing but those states."""

import pytest
import torch

from vapo.models import critic_from_policy
from vapo.packing import all_rows, micro_batches, state_features, state_values, token_indices, token_logits
from vapo.rollout import pack


def test_token_indices_follow_the_order_of_rows():
    assert token_indices(torch.tensor([0, 3, 4, 6]), torch.tensor([2, 0])).tolist() == [4, 5, 0, 1, 2]
    assert token_indices(torch.tensor([0, 3]), torch.tensor([], dtype=torch.long)).tolist() == []


def test_logits_are_those_of_each_response_alone(policy, rollout):
    rows = torch.tensor([3, 0, 1])
    expected = []
    for row in rows.tolist():
        prompt = rollout.prompt_ids[rollout.prompt_cu_seqlens[row] : rollout.prompt_cu_seqlens[row + 1]]
        response = rollout.token_ids[rollout.cu_seqlens[row] : rollout.cu_seqlens[row + 1]]
        logits = policy(input_ids=torch.cat([prompt, response])[None], use_cache=False).logits[0]
        expected.append(logits[len(prompt) - 1 : -1])
    torch.testing.assert_close(token_logits(policy, rollout, rows), torch.cat(expected), atol=1e-5, rtol=0)


def test_the_head_sees_no_prompt_token_and_no_padding(policy, rollout):
    seen = []
    policy.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
    token_logits(policy, rollout, all_rows(rollout))
    assert seen == [(11, 96)]


def test_values_are_a_number_per_token_in_the_same_order(policy, rollout):
    critic = critic_from_policy(policy)
    torch.nn.init.ones_(critic.score.weight)
    features = state_features(critic, rollout, torch.tensor([2, 1]))
    values = state_values(critic, rollout, torch.tensor([2, 1]))
    torch.testing.assert_close(values, features.sum(-1))
    assert values.shape == (3,)


@pytest.mark.parametrize("max_tokens", [1, 7, 14, 15, 1000])
def test_micro_batches_partition_the_rows_within_the_budget(rollout, max_tokens):
    rows = torch.tensor([3, 0, 2])
    parts = micro_batches(rollout, rows, max_tokens)
    widths = (rollout.prompt_cu_seqlens.diff() + rollout.lengths).tolist()
    assert sorted(torch.cat(parts).tolist()) == [0, 2, 3]
    assert [widths[row] for part in parts for row in part] == [6, 7, 8]
    assert all(len(part) == 1 or len(part) * max(widths[row] for row in part) <= max_tokens for part in parts)
    assert len(parts) == {1: 3, 7: 3, 14: 2, 15: 2, 1000: 1}[max_tokens]


def test_no_rows_make_no_micro_batch(rollout):
    assert micro_batches(rollout, torch.tensor([], dtype=torch.long), 100) == []


def test_rejects_bad_input(policy, rollout):
    with pytest.raises(ValueError, match="max_tokens must be >= 1; got 0"):
        micro_batches(rollout, all_rows(rollout), 0)
    flags = torch.ones(1, dtype=torch.bool)
    no_prompt = pack([torch.tensor([], dtype=torch.long)], [torch.tensor([3])], flags, flags, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"every prompt must have at least 1 token; got lengths \[0\]"):
        token_logits(policy, no_prompt, torch.tensor([0]))
