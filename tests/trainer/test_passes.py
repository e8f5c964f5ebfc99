"""Log-probs and values of a rollout: the model's own, whatever the micro-batches."""

from dataclasses import replace

import pytest
import torch

from vapo.config import Config
from vapo.models.forward import rollout_logprobs, rollout_values, truncated_values
from vapo.models.load import plain_head


def sequence(rollout, row):
    """Prompt and response of one row, and the length of the prompt."""
    prompt = rollout.prompt_ids[rollout.prompt_cu_seqlens[row] : rollout.prompt_cu_seqlens[row + 1]]
    response = rollout.token_ids[rollout.cu_seqlens[row] : rollout.cu_seqlens[row + 1]]
    return torch.cat([prompt, response]), len(prompt)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("micro_batch_tokens", [1, 10_000])
@pytest.mark.parametrize("is_plain", [True, False])
def test_logprobs_are_the_models_at_the_sampling_temperature(
    policy, rollout, temperature, micro_batch_tokens, is_plain
):
    expected = []
    for row in range(4):
        ids, start = sequence(rollout, row)
        logprobs = (policy(input_ids=ids[None]).logits[0, start - 1 : -1] / temperature).log_softmax(-1)
        expected.append(logprobs.gather(-1, ids[start:, None]).squeeze(-1))
    policy.has_plain_head = is_plain
    config = Config(temperature=temperature, micro_batch_tokens=micro_batch_tokens)
    logprobs = rollout_logprobs(policy, rollout, config)
    torch.testing.assert_close(logprobs, torch.cat(expected).detach(), atol=1e-5, rtol=0)
    assert not logprobs.requires_grad


def test_a_head_that_caps_its_logits_goes_through_the_model(policy, rollout):
    plain = rollout_logprobs(policy, rollout, Config())
    forward = policy.forward

    def capped(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = 0.5 * torch.tanh(out.logits / 0.5)
        return out

    policy.forward = capped
    del policy.has_plain_head
    assert plain_head(policy) is None
    logprobs = rollout_logprobs(policy, rollout, Config())
    ids, start = sequence(rollout, 3)
    expected = policy(input_ids=ids[None]).logits[0, start - 1 : -1].log_softmax(-1).gather(-1, ids[start:, None])
    torch.testing.assert_close(logprobs[6:], expected.detach().squeeze(-1), atol=1e-5, rtol=0)
    assert not torch.allclose(logprobs, plain, atol=1e-2)


@pytest.mark.parametrize("micro_batch_tokens", [1, 10_000])
def test_values_are_the_critics_before_each_token(critic, rollout, micro_batch_tokens):
    expected = []
    for row in range(4):
        ids, start = sequence(rollout, row)
        expected.append(critic.eval()(input_ids=ids[None]).logits[0, start - 1 : -1, 0])
    values = rollout_values(critic, rollout, Config(micro_batch_tokens=micro_batch_tokens))
    torch.testing.assert_close(values, torch.cat(expected).detach(), atol=1e-5, rtol=0)
    assert values.std() > 0.01
    assert not values.requires_grad


@pytest.mark.parametrize("micro_batch_tokens", [1, 10_000])
def test_truncated_values_are_those_after_the_last_token_of_cut_responses(critic, rollout, micro_batch_tokens):
    rollout = replace(rollout, is_truncated=torch.tensor([False, True, False, True]))
    expected = torch.zeros(4)
    for row in (1, 3):
        expected[row] = critic.eval()(input_ids=sequence(rollout, row)[0][None]).logits[0, -1, 0].detach()
    values = truncated_values(critic, rollout, Config(micro_batch_tokens=micro_batch_tokens))
    torch.testing.assert_close(values, expected, atol=1e-5, rtol=0)
    assert values[1].abs() > 1e-3 and values[3].abs() > 1e-3
