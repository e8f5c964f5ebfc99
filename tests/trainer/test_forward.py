"""Forward passes: each token's state, whatever else is in the micro-batch, and nothing but those states."""

from dataclasses import replace

import pytest
import torch
from families import ATTENTIONS, FAMILIES, VOCABULARY, tiny_model

from vapo.config import Config
from vapo.models import forward
from vapo.models.forward import (
    all_rows,
    bootstrap_values,
    features_at,
    final_values,
    logits_at,
    micro_batch,
    micro_batches,
    over_micro_batches,
    packed_inputs,
    padded_inputs,
    rollout_logprobs,
    rollout_values,
    sequence_lengths,
    state_features,
    state_values,
    token_logits,
)
from vapo.models.load import critic_from_policy, value_head
from vapo.models.output_head import plain_head
from vapo.models.sharding import distributed, inside
from vapo.rollout.collect import pack

PROMPT_LENGTHS, RESPONSE_LENGTHS = (4, 1, 6, 3), (3, 1, 2, 7)
ROWS = torch.tensor([3, 0, 1])


@pytest.fixture
def rollout():
    """Responses of 3, 1, 2 and 7 tokens to prompts of 4, 1, 6 and 3."""
    generator = torch.Generator().manual_seed(0)
    prompts, responses = (
        [torch.randint(2, VOCABULARY, (length,), generator=generator) for length in lengths]
        for lengths in (PROMPT_LENGTHS, RESPONSE_LENGTHS)
    )
    flags = torch.ones(4, dtype=torch.bool)
    return pack(prompts, responses, torch.zeros(4), flags, flags, 1, torch.device("cpu"))


def sequences(rollout, rows):
    """Prompt and response of each row as one tensor, with the length of the prompt."""
    prompts = rollout.prompt_ids.split(list(PROMPT_LENGTHS))
    responses = rollout.token_ids.split(list(RESPONSE_LENGTHS))
    return [(torch.cat([prompts[row], responses[row]]), PROMPT_LENGTHS[row]) for row in rows.tolist()]


def one_by_one(read, rollout, rows):
    """What ``read`` says of the states that predict each response's tokens, from one unpadded pass per response."""
    return torch.cat([read(ids[None])[0, length - 1 : -1] for ids, length in sequences(rollout, rows)])


def logits_alone(policy):
    return lambda ids: policy(input_ids=ids, use_cache=False).logits


def features_alone(policy):
    return lambda ids: policy.base_model(input_ids=ids, use_cache=False).last_hidden_state


def scored_critic(policy):
    """A critic whose head is not zero."""
    critic = critic_from_policy(policy)
    head, generator = value_head(critic), torch.Generator().manual_seed(0)
    torch.nn.init.normal_(head.weight, generator=generator)
    torch.nn.init.normal_(head.bias, generator=generator)
    return critic.eval()


@pytest.mark.parametrize(
    ("family", "attention"), [(family, attention) for family in FAMILIES for attention in ATTENTIONS[family]]
)
def test_padded_and_packed_rows_are_each_response_alone(family, attention, rollout):
    policy = tiny_model(family, attention)
    padded = padded_inputs(rollout, micro_batch(rollout, ROWS))
    packed = packed_inputs(padded, sequence_lengths(rollout, ROWS) - 1, 16)
    assert packed.input_ids.shape == (1, 9 + 6 + 1)
    for read, read_at, alone in (
        (state_features, features_at, features_alone),
        (token_logits, logits_at, logits_alone),
    ):
        expected = one_by_one(alone(policy), rollout, ROWS)
        for found in (
            read(policy, rollout, micro_batch(rollout, ROWS)),
            read_at(policy, padded),
            read_at(policy, packed),
        ):
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


def test_gradients_through_a_packed_row_are_those_through_padded_rows(rollout):
    policy, grads = tiny_model("qwen3"), []
    padded = padded_inputs(rollout, micro_batch(rollout, ROWS))
    for inputs in (padded, packed_inputs(padded, sequence_lengths(rollout, ROWS) - 1, 16)):
        policy.zero_grad()
        logits_at(policy, inputs).square().mean().backward()
        grads.append([parameter.grad.clone() for parameter in policy.parameters()])
    for packed, of_padded in zip(*grads, strict=True):
        torch.testing.assert_close(packed, of_padded, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("packs", [False, True])
def test_the_models_attention_chooses_the_layout(packs, rollout, monkeypatch):
    policy, seen = tiny_model("llama"), []
    expected = one_by_one(features_alone(policy), rollout, ROWS)
    policy.base_model.register_forward_pre_hook(
        lambda _, args, arguments: seen.append((arguments["input_ids"].shape, arguments["use_cache"])), with_kwargs=True
    )
    if packs:
        monkeypatch.setattr(forward, "takes_packed_rows", lambda model: True)
    torch.testing.assert_close(
        state_features(policy, rollout, micro_batch(rollout, ROWS)), expected, atol=2e-5, rtol=1e-5
    )
    assert seen == [((1, 16) if packs else (3, 9), False)]


def test_only_flash_attention_takes_packed_rows():
    policy = tiny_model("llama")
    assert not forward.takes_packed_rows(policy)
    policy.config._attn_implementation_internal = "flash_attention_2"
    assert forward.takes_packed_rows(policy)


@pytest.mark.gpu
def test_flash_attention_over_a_packed_row_is_each_response_alone(rollout):
    pytest.importorskip("flash_attn")
    policy = tiny_model("llama", "flash_attention_2").to("cuda", torch.bfloat16)
    on_device = pack(
        rollout.prompt_ids.split(list(PROMPT_LENGTHS)),
        rollout.token_ids.split(list(RESPONSE_LENGTHS)),
        torch.zeros(4),
        rollout.is_correct,
        rollout.is_truncated,
        1,
        policy.device,
    )
    expected = one_by_one(lambda ids: logits_alone(policy)(ids.cuda()), rollout, ROWS)
    torch.testing.assert_close(
        token_logits(policy, on_device, micro_batch(on_device, ROWS.cuda())), expected, atol=5e-2, rtol=5e-2
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_sees_no_prompt_token_and_no_padding(family, rollout):
    policy, seen = tiny_model(family), []
    policy.get_output_embeddings().register_forward_hook(lambda _, inputs, output: seen.append(output.shape))
    token_logits(policy, rollout, micro_batch(rollout, all_rows(rollout)))
    assert seen == [(13, VOCABULARY)]
    # Later passes are whole again.
    assert policy(input_ids=torch.tensor([[3, 4]])).logits.shape == (1, 2, VOCABULARY)


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_a_number_per_state(family, packs, rollout, monkeypatch):
    monkeypatch.setattr(forward, "takes_packed_rows", lambda model: packs)
    critic = scored_critic(tiny_model(family))

    def alone(ids):
        return critic(input_ids=ids, use_cache=False).logits

    values = state_values(critic, rollout, micro_batch(rollout, ROWS))
    torch.testing.assert_close(values, one_by_one(alone, rollout, ROWS)[:, 0], atol=2e-5, rtol=1e-5)
    last = torch.stack([alone(ids[None])[0, -1, 0] for ids, _ in sequences(rollout, ROWS)])
    torch.testing.assert_close(final_values(critic, rollout, micro_batch(rollout, ROWS)), last, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("under_autocast", [False, True])
def test_values_of_bfloat16_features_are_computed_in_float32(under_autocast, rollout):
    critic = scored_critic(tiny_model("qwen3"))
    critic.base_model.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=under_autocast):
        features = state_features(critic, rollout, micro_batch(rollout, ROWS))
        values = state_values(critic, rollout, micro_batch(rollout, ROWS))
    assert features.dtype == torch.bfloat16
    assert values.dtype == torch.float32
    exact = features.double() @ critic.score.weight[0].double() + critic.score.bias.double()
    torch.testing.assert_close(values.double(), exact, atol=1e-5, rtol=1e-6)


def test_the_scalar_head_stays_float32_under_bfloat16(rollout, small_config, learner_of):
    with distributed(torch.device("cpu"), alone=True):
        critic = learner_of(replace(small_config, dtype="bfloat16")).critic
        torch.nn.init.constant_(value_head(critic).bias, 0.37)
        features, values = (
            inside(critic, read, rollout, micro_batch(rollout, ROWS)) for read in (state_features, state_values)
        )
        last = inside(critic, final_values, rollout, micro_batch(rollout, ROWS))
        assert features.dtype == torch.bfloat16
        # A bfloat16 would be 0.3691.
        assert torch.equal(values, torch.full((11,), 0.37)) and torch.equal(last, torch.full((3,), 0.37))
        (257.0 * values).sum().backward()
        assert value_head(critic).bias.grad.full_tensor().tolist() == [257.0 * 11]
        found = value_head(critic).weight.grad.full_tensor()[0]
        torch.testing.assert_close(found.double(), 257 * features.double().sum(0), rtol=1e-6, atol=1e-3)


def sizes(rollout, rows):
    """Sampled tokens, tokens with prompts, and tokens of the longest."""
    widths = sequence_lengths(rollout, rows)
    return rollout.lengths[rows].sum(), widths.sum(), widths.max()


@pytest.mark.parametrize("max_tokens", [1, 7, 14, 20, 1000])
def test_micro_batches_partition_the_rows_within_the_budget(rollout, max_tokens):
    assert micro_batches(rollout, torch.tensor([], dtype=torch.long), max_tokens) == []
    rows = torch.tensor([3, 0, 2])
    plan = micro_batches(rollout, rows, max_tokens)
    # As if each had been asked for by itself.
    assert all((p.num_tokens, p.total, p.width) == sizes(rollout, p.rows) for p in plan)
    parts = [part.rows for part in plan]
    widths = [prompt + response for prompt, response in zip(PROMPT_LENGTHS, RESPONSE_LENGTHS, strict=True)]
    assert sorted(torch.cat(parts).tolist()) == [0, 2, 3]
    assert [widths[row] for part in parts for row in part] == [7, 8, 10]
    assert all(len(part) == 1 or len(part) * max(widths[row] for row in part) <= max_tokens for part in parts)
    assert len(parts) == {1: 3, 7: 3, 14: 3, 20: 2, 1000: 1}[max_tokens]


@pytest.mark.parametrize(
    ("rows", "most", "expected"),
    [
        ([3, 0, 2], 2, [([0, 2], True), ([3], True)]),
        ([3, 0, 2], 4, [([0, 2], True), ([3], True), ([0], False), ([0], False)]),
        ([], 0, []),
        ([], 1, [([0], False)]),
    ],
)
def test_a_rank_with_fewer_micro_batches_repeats_a_response_that_is_not_its_own(
    rollout, critic_and_values, monkeypatch, rows, most, expected
):
    monkeypatch.setattr(forward, "max_over_ranks", lambda number: max(number, most))
    rows, calls = torch.tensor(rows, dtype=torch.long), []

    def body(model, part, is_own, *args):
        calls.append((part.rows.tolist(), is_own))
        return model, args

    found = list(over_micro_batches("model", body, rollout, rows, Config(micro_batch_tokens=20), 1, 2))
    assert calls == expected == [(part.rows.tolist(), is_own) for part, is_own, _ in found]
    assert all(out == ("model", (1, 2)) for *_, out in found)
    # What is not its own changes no result.
    critic, values = critic_and_values
    torch.testing.assert_close(rollout_values(critic, rollout, Config(micro_batch_tokens=20)), values)


@pytest.mark.parametrize("micro_batch_tokens", [1, 10_000])
@pytest.mark.parametrize(("temperature", "head"), [(1.0, "plain"), (0.5, "plain"), (0.5, "whole"), (1.0, "capped")])
def test_logprobs_are_the_models_at_the_sampling_temperature(rollout, temperature, head, micro_batch_tokens):
    policy = tiny_model("qwen3")
    plain_head(policy)
    if head == "whole":
        policy.has_plain_head = False
    if head == "capped":
        own_forward = policy.forward

        def capped(*args, **kwargs):
            out = own_forward(*args, **kwargs)
            out.logits = 0.5 * torch.tanh(out.logits / 0.5)
            return out

        policy.forward = capped
        del policy.has_plain_head
    assert (plain_head(policy) is not None) == (head == "plain")
    logits = one_by_one(logits_alone(policy), rollout, all_rows(rollout)) / temperature
    config = Config(temperature=temperature, micro_batch_tokens=micro_batch_tokens)
    logprobs = rollout_logprobs(policy, rollout, config)
    expected = logits.log_softmax(-1).gather(-1, rollout.token_ids[:, None]).squeeze(-1)
    torch.testing.assert_close(logprobs, expected.detach(), atol=1e-5, rtol=0)
    assert not logprobs.requires_grad


@pytest.fixture
def critic_and_values(rollout):
    """A critic and what it says of every token's state, each response alone."""
    critic = scored_critic(tiny_model("qwen3"))
    return critic, one_by_one(logits_alone(critic), rollout, all_rows(rollout))[:, 0].detach()


@pytest.mark.parametrize("micro_batch_tokens", [1, 10_000])
def test_values_are_before_each_token_and_after_the_last_of_truncated_responses(
    rollout, critic_and_values, micro_batch_tokens
):
    critic, expected = critic_and_values
    config = Config(micro_batch_tokens=micro_batch_tokens)
    values = rollout_values(critic, rollout, config)
    torch.testing.assert_close(values, expected, atol=2e-5, rtol=1e-5)
    assert values.std() > 0.01 and not values.requires_grad
    rollout = replace(rollout, is_truncated=torch.tensor([False, True, False, True]))
    last = [logits_alone(critic)(ids[None])[0, -1, 0].item() for ids, _ in sequences(rollout, all_rows(rollout))]
    expected = torch.tensor(last) * rollout.is_truncated
    found = bootstrap_values(critic, rollout, config)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    assert not found.requires_grad and found.count_nonzero() == 2


def test_rejects_bad_input(rollout):
    with pytest.raises(ValueError, match="max_tokens must be >= 1; got 0"):
        micro_batches(rollout, all_rows(rollout), 0)
    flags = torch.ones(1, dtype=torch.bool)
    empty = torch.tensor([], dtype=torch.long)
    no_prompt = pack([empty], [torch.tensor([3])], torch.zeros(1), flags, flags, 1, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"every prompt must have at least 1 token; got lengths \[0\]"):
        micro_batches(no_prompt, torch.tensor([0]), 10)
