"""Sampling: whatever the engine, it is what the model says token by token, up to the first stop token or the limit."""

import itertools
import math
from dataclasses import fields
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from families import FAMILIES, VOCABULARY, tiny_model
from transformers.generation import ContinuousBatchingConfig

from vapo.config import Config
from vapo.models.load import is_checkpointed, max_positions, set_gradient_checkpointing
from vapo.rollout import sampling as sampling_module
from vapo.rollout.loop import sample_in_loop
from vapo.rollout.sampling import Sampling, sample, with_engine
from vapo.rollout.transformers import generate_continuously, generate_padded
from vapo.types import Response

ALL_THREE = {"temperature": 1.5, "top_k": 4, "top_p": 0.8}
STOPS = (1, 4, 7, 10, 13)
PROMPTS = [torch.tensor([5, 9, 3, 20]), torch.tensor([8, 2]), torch.tensor([6, 6, 6])]
ENGINES = {"loop": sample_in_loop, "generate": generate_padded, "continuous": generate_continuously}
ENGINES_OF = [(engine, family) for engine in ENGINES for family in FAMILIES]


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.fixture(autouse=True)
def small_paged_cache(monkeypatch):
    """Continuous batching takes what memory there is unless it is told how much it needs."""
    # transformers 5.23 renamed it.
    names = {field.name for field in fields(ContinuousBatchingConfig)}
    page = "page_size" if "page_size" in names else "block_size"
    small = partial(ContinuousBatchingConfig, num_blocks=64, max_batch_tokens=256, **{page: 16})
    monkeypatch.setattr("vapo.rollout.transformers.ContinuousBatchingConfig", small)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(engine, policy, prompts, sampling, *, group_size=1, generator=None):
    return [response.token_ids for response in ENGINES[engine](policy, prompts, group_size, sampling, generator)]


def greedy_alone(policy, prompt, max_new_tokens):
    """Greedy response to one prompt by whole passes without a cache."""
    ids = prompt
    for _ in range(max_new_tokens):
        token = policy(input_ids=ids[None], use_cache=False).logits[0, -1].argmax()
        ids = torch.cat([ids, token[None]])
        if int(token) in STOPS:
            break
    return ids[len(prompt) :].tolist()


@pytest.mark.parametrize(("engine", "family"), ENGINES_OF)
def test_greedy_with_cache_and_padding_equals_each_prompt_alone(engine, family):
    policy = tiny_model(family)
    prompts = [torch.randint(2, VOCABULARY, (1 + number % 7,), generator=seeded(number)) for number in range(24)]
    responses = draw(engine, policy, prompts, Sampling(12, STOPS, temperature=0.0))
    assert [response.tolist() for response in responses] == [greedy_alone(policy, prompt, 12) for prompt in prompts]
    # Rows end at different steps, by several stop tokens and by the limit.
    assert len({len(response) for response in responses}) > 3
    ends = {int(response[-1]) for response in responses}
    assert len(ends & set(STOPS)) > 1 and ends - set(STOPS)


@pytest.mark.parametrize("engine", ENGINES)
def test_responses_end_at_the_first_stop_token_or_at_the_limit(engine):
    responses = draw(engine, tiny_model("qwen3"), PROMPTS, Sampling(5, STOPS), group_size=30, generator=seeded())
    assert len(responses) == 90
    cut = [response for response in responses if int(response[-1]) not in STOPS]
    done = [response for response in responses if int(response[-1]) in STOPS]
    assert cut and done
    assert all(len(response) == 5 for response in cut)
    assert not any(int(token) in STOPS for response in responses for token in response[:-1])
    assert len({int(response[-1]) for response in done}) > 1
    assert all(response.dtype == torch.long for response in responses)


@pytest.mark.parametrize("engine", ["loop", "continuous"])
@pytest.mark.parametrize(("family", "temperature"), [("qwen3", 1.0), ("llama", 0.6)])
def test_an_engine_tells_the_logprobs_that_it_sampled_with(engine, family, temperature):
    policy = tiny_model(family)
    for prompt in PROMPTS:
        sampling = Sampling(9, STOPS, temperature=temperature)
        for token_ids, logprobs in ENGINES[engine](policy, [prompt], 5, sampling, seeded()):
            logits = policy(torch.cat([prompt, token_ids])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
            expected = (logits / temperature).log_softmax(-1).gather(1, token_ids[:, None]).squeeze(1)
            torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)


def exact_distribution(policy, prompt, sampling):
    """Probability of each possible response, by enumeration and the definitions of temperature, top-k and top-p."""
    found, open_ends = {}, [((), 1.0)]
    while open_ends:
        tokens, probability = open_ends.pop()
        if len(tokens) == sampling.max_new_tokens or (tokens and tokens[-1] in sampling.stop_token_ids):
            found[tokens] = probability
            continue
        ids = torch.cat([prompt, torch.tensor(tokens, dtype=torch.long)])[None]
        logits = policy(input_ids=ids, use_cache=False).logits[0, -1].tolist()
        scaled = [math.exp(logit / sampling.temperature) for logit in logits]
        ranked = sorted(range(len(scaled)), key=scaled.__getitem__, reverse=True)
        ranked = ranked[: sampling.top_k or None]
        total, kept, mass = sum(scaled[token] for token in ranked), [], 0.0
        for token in ranked:
            if mass >= sampling.top_p * total:
                break
            kept.append(token)
            mass += scaled[token]
        open_ends += [((*tokens, token), probability * scaled[token] / mass) for token in kept]
    return found


@pytest.mark.parametrize(
    ("engine", "changes"),
    [
        *itertools.product(("loop", "generate"), ({}, {"temperature": 0.6}, {"top_k": 2}, {"top_p": 0.7}, ALL_THREE)),
        *itertools.product(("large vocabulary",), ({}, {"top_k": 2}, ALL_THREE)),
        ("continuous", ALL_THREE),
    ],
    ids=str,
)
def test_responses_follow_the_exact_distribution(engine, changes, monkeypatch):
    if engine == "large vocabulary":
        monkeypatch.setattr("vapo.rollout.loop.LARGE_VOCABULARY", 1)
        monkeypatch.setattr("vapo.rollout.loop.BLOCK", 4)
        engine = "loop"
    policy = tiny_model("llama", vocab_size=6, initializer_range=0.12)
    sampling, prompts = Sampling(3, (1,), **changes), [torch.tensor([3, 2, 5]), torch.tensor([4])]
    draws = 1500
    responses = draw(engine, policy, prompts, sampling, group_size=draws, generator=seeded())
    for number, prompt in enumerate(prompts):
        expected = exact_distribution(policy, prompt, sampling)
        assert math.isclose(sum(expected.values()), 1, abs_tol=1e-9)
        counts = dict.fromkeys(expected, 0)
        for response in responses[number * draws : (number + 1) * draws]:
            counts[tuple(response.tolist())] += 1
        # Chi-squared over responses that are expected often enough; the rest share one cell.
        often = [response for response, probability in expected.items() if probability * draws >= 5]
        cells = [(counts[response], expected[response] * draws) for response in often]
        rest = draws - sum(count for count, _ in cells), draws - sum(mean for _, mean in cells)
        cells += [rest] if rest[1] > 1 else []
        chi_squared = sum((count - mean) ** 2 / mean for count, mean in cells)
        freedom = len(cells) - 1
        assert freedom >= 3
        assert chi_squared < freedom + 4.5 * math.sqrt(2 * freedom) + 5
        assert len({response for response, count in counts.items() if count}) > len(often) / 2


@pytest.mark.parametrize("limit", [1, VOCABULARY + 1])
def test_nan_logits_are_an_error(limit, monkeypatch):
    monkeypatch.setattr("vapo.rollout.loop.LARGE_VOCABULARY", limit)
    policy = tiny_model("llama")
    policy.get_output_embeddings().weight.data[3] = math.nan
    with pytest.raises(RuntimeError, match="nan"):
        draw("loop", policy, PROMPTS, Sampling(2, STOPS), generator=seeded())


@pytest.mark.parametrize("engine", ["loop", "generate"])
def test_same_generator_same_responses(engine):
    policy = tiny_model("qwen3")

    def responses(generator):
        return [ids.tolist() for ids in draw(engine, policy, PROMPTS, Sampling(8, STOPS), generator=generator)]

    generator = seeded()
    first, second = responses(generator), responses(generator)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        assert responses(seeded()) == first
    assert second != first
    assert responses(seeded(1)) != first


@pytest.mark.parametrize("engine", ENGINES)
def test_no_trace_in_the_global_generator(engine):
    state = torch.get_rng_state()
    draw(engine, tiny_model("qwen3"), PROMPTS, Sampling(8, STOPS), generator=seeded())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(("engine", "temperature"), [("generate", 1.0), ("generate", 0.0), ("continuous", 0.0)])
def test_the_models_own_generation_defaults_change_nothing(engine, temperature):
    policy, sampling = tiny_model("qwen3"), Sampling(8, STOPS, temperature)
    expected = draw(engine, policy, PROMPTS, sampling, group_size=4, generator=seeded())
    defaults = policy.generation_config
    defaults.repetition_penalty, defaults.top_k, defaults.min_p, defaults.min_new_tokens = 9.0, 1, 0.9, 8
    defaults.suppress_tokens, defaults.eos_token_id = [int(ids[0]) for ids in expected], 9
    responses = draw(engine, policy, PROMPTS, sampling, group_size=4, generator=seeded())
    assert [ids.tolist() for ids in responses] == [ids.tolist() for ids in expected]
    assert policy.generation_config is defaults


@pytest.mark.parametrize("engine", ENGINES)
def test_sampling_in_training_mode_with_gradient_checkpointing_changes_nothing(engine):
    policy = tiny_model("gpt2")
    sampling = Sampling(8, STOPS, temperature=0.0, engine="loop" if engine == "loop" else "transformers")
    expected = [greedy_alone(policy, prompt, 8) for prompt in PROMPTS]
    set_gradient_checkpointing(policy, True)
    assert [response.token_ids.tolist() for response in sample(policy, PROMPTS, sampling=sampling)] == expected
    assert policy.training and is_checkpointed(policy)


def test_continuous_batching_leaves_the_attention_as_it_was():
    policy = tiny_model("llama", "eager")
    responses = draw("continuous", policy, PROMPTS, Sampling(8, STOPS, temperature=0.0))
    assert [ids.tolist() for ids in responses] == [greedy_alone(policy, prompt, 8) for prompt in PROMPTS]
    assert policy.config._attn_implementation == "eager"


def test_continuous_batching_that_fails_is_an_error(monkeypatch):
    policy = tiny_model("llama")
    monkeypatch.setattr(policy, "generate_batch", lambda inputs, *_: {})
    with pytest.raises(RuntimeError, match="continuous batching gave 0 of 3 responses"):
        draw("continuous", policy, PROMPTS, Sampling(8, STOPS, temperature=0.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be >= 1; got 0"),
        ({"stop_token_ids": ()}, "stop_token_ids must hold at least 1 token; got none"),
        ({"temperature": -1.0}, "temperature must be >= 0 and finite; got -1.0"),
        ({"temperature": math.nan}, "temperature must be >= 0 and finite; got nan"),
        ({"temperature": math.inf}, "temperature must be >= 0 and finite; got inf"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\]; got 0.0"),
        ({"top_p": 1.1}, r"top_p must be in \(0, 1\]; got 1.1"),
        ({"top_k": -1}, "top_k must be >= 0; got -1"),
        ({"engine": "sglang"}, "engine must be one of loop, transformers, vllm; got 'sglang'"),
    ],
)
def test_sampling_rejects_bad_numbers(changes, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**{"max_new_tokens": 4, "stop_token_ids": (1,)} | changes)


@pytest.mark.parametrize("engine", ["loop", "transformers"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": []}, r"prompts must be at least 1 non-empty tensor; got lengths \[\]"),
        ({"prompts": [torch.tensor([])]}, r"prompts must be at least 1 non-empty tensor; got lengths \[0\]"),
        ({"group_size": 0}, "group_size must be >= 1; got 0"),
        ({"generator": None}, "generator must be a torch.Generator where temperature > 0; got None"),
        ({"prompts": [torch.ones(61).long()]}, r"must be at most the model's 64 positions; got 61 \+ 4"),
    ],
)
def test_rejects_bad_input_before_sampling(engine, changes, message, monkeypatch):
    policy = tiny_model("gpt2")
    monkeypatch.setattr(policy, "forward", None)
    arguments = {"prompts": PROMPTS, "group_size": 1, "generator": seeded()} | changes
    with pytest.raises(ValueError, match=message):
        sample(policy, arguments.pop("prompts"), sampling=Sampling(4, (1,), engine=engine), **arguments)


@pytest.mark.parametrize(
    ("engine", "device", "batch_size", "expected"),
    [
        ("loop", "cpu", 5, [2, 2, 1]),
        ("loop", "cuda", 5, [2, 2, 1]),
        ("loop", "cpu", 1, [1] * 5),
        ("loop", "cpu", 0, [5]),
        ("transformers", "cpu", 5, [2, 2, 1]),
        ("transformers", "cuda", 5, [5]),
    ],
)
def test_all_engines_but_continuous_batching_obey_the_batch_size(engine, device, batch_size, expected, monkeypatch):
    policy, seen = tiny_model("gpt2"), []

    def record(name, policy, prompts, group_size, sampling, generator):
        seen.append((name, len(prompts)))
        return [Response(torch.tensor([1]), None)] * (len(prompts) * group_size)

    for name in ("sample_in_loop", "generate_padded", "generate_continuously"):
        monkeypatch.setattr(sampling_module, name, partial(record, name))
    monkeypatch.setattr(type(policy), "device", SimpleNamespace(type=device))
    sampling = Sampling(4, (1,), engine=engine, batch_size=batch_size)
    prompts = [torch.tensor([5, 9])] * 5
    assert len(sample(policy, prompts, group_size=2, sampling=sampling, generator=seeded())) == 10
    name = {"loop": "sample_in_loop", "cpu": "generate_padded", "cuda": "generate_continuously"}
    assert seen == [(name["loop" if engine == "loop" else device], count) for count in expected]


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("gpt2", {}, 64),
        ("llama", {}, 64),
        ("qwen3", {"rope_parameters": YARN}, 256),
        ("bloom", {"attention": "eager", "max_position_embeddings": None}, math.inf),
    ],
)
def test_positions_count_what_rope_scaling_adds(family, changes, expected):
    assert max_positions(tiny_model(family, **changes)) == expected


def test_vllm_must_be_installed_and_started():
    policy, sampling = tiny_model("llama"), Sampling(4, (1,), engine="vllm")
    with pytest.raises(ValueError, match="needs the extra vllm"):
        with_engine(sampling, policy, Config(engine="vllm", dtype="float32"))
    with pytest.raises(ValueError, match="must be started by with_engine"):
        sample(policy, PROMPTS, sampling=sampling, generator=seeded())


def test_a_prompt_and_its_response_may_fill_the_positions():
    policy = tiny_model("gpt2")
    responses = sample(policy, [torch.full((60,), 5)], sampling=Sampling(4, (1,)), generator=seeded())
    assert 1 <= len(responses[0].token_ids) <= 4
