"""Engine vllm beside the model itself: the same log-probs after every change of weights, our stops, our seeds."""

from contextlib import contextmanager

import pytest
import torch
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3Config

from vapo.models.sharding import distributed
from vapo.rollout.sampling import Sampling, ready_to_sample, sample
from vapo.rollout.vllm import VllmEngine

VOCABULARY = 64
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    max_position_embeddings=512,
    initializer_range=0.2,
    eos_token_id=1,
)
CONFIGS = {
    "qwen3, tied head": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
}
# Longer than a block of the prefix cache.
PROMPTS = [torch.arange(length) % 61 + 2 for length in (3, 150, 40)]
CPU = torch.device("cpu")


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@contextmanager
def engine_of(config, dtype="float32", **settings):
    """A policy of random weights, and how the engine samples from it."""
    torch.manual_seed(0)
    with distributed(CPU, alone=True):
        policy = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        engine = VllmEngine(policy, dtype=dtype, memory=0.1, max_responses=0)
        sampling = Sampling(
            **{"max_new_tokens": 24, "stop_token_ids": (5,), "engine": "vllm", "vllm": engine} | settings
        )
        try:
            yield policy, sampling
        finally:
            sampling.close()


def drawn(policy, sampling, seed=0, group_size=4):
    with ready_to_sample(policy, sampling):
        return sample(policy, PROMPTS, group_size=group_size, sampling=sampling, generator=seeded(seed))


@torch.no_grad()
def models_logprobs(policy, prompt, token_ids, temperature):
    logits = policy(torch.cat([prompt, token_ids])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    return log_softmax(logits.float() / temperature, -1).gather(1, token_ids[:, None]).squeeze(1)


@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_are_the_models_after_every_change_of_weights(name):
    with engine_of(CONFIGS[name], temperature=0.7) as (policy, sampling):
        for change in (0.0, 0.05, 0.2):
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter += change * torch.randn(parameter.shape, generator=seeded(7))
            responses = drawn(policy, sampling)
            assert len(responses) == 12
            for prompt, response in zip([prompt for prompt in PROMPTS for _ in range(4)], responses, strict=True):
                expected = models_logprobs(policy, prompt, response.token_ids, sampling.temperature)
                torch.testing.assert_close(response.logprobs, expected, rtol=0, atol=5e-5)


def test_responses_end_at_our_stop_tokens_alone():
    with engine_of(CONFIGS["llama"], stop_token_ids=(5, 9)) as (policy, sampling):
        responses = [response.token_ids.tolist() for response in drawn(policy, sampling, group_size=40)]
    assert all(not {5, 9} & set(ids[:-1]) for ids in responses)
    ends = [ids[-1] for ids in responses if len(ids) < 24]
    assert {5, 9} == set(ends) and any(ids[-1] not in (5, 9) and len(ids) == 24 for ids in responses)
    # The model's own end-of-sequence token is a token like others.
    assert any(1 in ids[:-1] for ids in responses)


def test_the_same_generator_gives_the_same_bits_and_leaves_the_global_one_alone():
    with engine_of(CONFIGS["qwen3, tied head"]) as (policy, sampling):
        state = torch.get_rng_state()
        first, again, other = (drawn(policy, sampling, seed) for seed in (3, 3, 4))
        assert torch.equal(torch.get_rng_state(), state)
    for mine, theirs in zip(first, again, strict=True):
        assert torch.equal(mine.token_ids, theirs.token_ids) and torch.equal(mine.logprobs, theirs.logprobs)
    assert any(not torch.equal(mine.token_ids, theirs.token_ids) for mine, theirs in zip(first, other, strict=True))


def test_greedy_responses_and_those_of_top_k_1_are_the_loops():
    with engine_of(CONFIGS["llama"], temperature=0.0) as (policy, greedy):
        likeliest = Sampling(24, (5,), top_k=1, engine="vllm", vllm=greedy.vllm)
        loop = Sampling(24, (5,), temperature=0.0)
        answers = [
            [response.token_ids.tolist() for response in drawn(policy, sampling, group_size=1)]
            for sampling in (greedy, likeliest, loop)
        ]
    assert answers[0] == answers[1] == answers[2]


def test_bfloat16_differs_by_its_rounding():
    with engine_of(CONFIGS["llama"], dtype="bfloat16") as (policy, sampling):
        responses = drawn(policy, sampling)
        prompts = [prompt for prompt in PROMPTS for _ in range(4)]
        gaps = [
            (response.logprobs - models_logprobs(policy, prompt, response.token_ids, 1.0)).abs()
            for prompt, response in zip(prompts, responses, strict=True)
        ]
    assert 1e-4 < torch.cat(gaps).mean() < 0.1


def test_weights_that_vllm_would_name_otherwise_are_refused():
    sizes = {key: value for key, value in SIZES.items() if key != "initializer_range"}
    policy = AutoModelForCausalLM.from_config(MixtralConfig(**sizes, num_local_experts=2))
    with pytest.raises(ValueError, match="loop or transformers for MixtralForCausalLM"):
        VllmEngine(policy, dtype="float32", memory=0.1, max_responses=0)
