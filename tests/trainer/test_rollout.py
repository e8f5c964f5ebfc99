"""Sampling: with cache, left padding and dropped rows it is what the model says token by token."""

import random

import pytest
import torch

from vapo.rollout import collect, pack, sample

EOS = 1
PROMPTS = [torch.tensor([5, 9, 3, 20]), torch.tensor([7, 2]), torch.tensor([4, 4, 4])]


def greedy_alone(policy, prompt, max_new_tokens):
    """Greedy response to one prompt by whole passes without a cache."""
    ids = prompt
    for _ in range(max_new_tokens):
        token = policy(input_ids=ids[None], use_cache=False).logits[0, -1].argmax()
        ids = torch.cat([ids, token[None]])
        if token == EOS:
            break
    return ids[len(prompt) :].tolist()


def favour_eos(policy, amount):
    """Make the end of a sequence likelier in some states than in others."""
    with torch.no_grad():
        direction = torch.randn(96, generator=torch.Generator().manual_seed(3))
        policy.lm_head.weight[EOS] += amount * direction


def test_greedy_with_cache_and_padding_equals_each_prompt_alone(policy):
    favour_eos(policy, 0.12)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 21, (1 + number % 7,), generator=generator) for number in range(24)]
    responses = sample(policy, prompts, max_new_tokens=12, eos_token_id=EOS, temperature=0.0)
    assert [response.tolist() for response in responses] == [greedy_alone(policy, prompt, 12) for prompt in prompts]
    # Rows end at different steps, so some are dropped while others go on.
    assert len({len(response) for response in responses}) > 3


def test_responses_end_at_the_first_eos_or_at_the_limit(policy):
    favour_eos(policy, 0.2)
    generator = torch.Generator().manual_seed(0)
    responses = sample(policy, PROMPTS, group_size=20, max_new_tokens=5, eos_token_id=EOS, generator=generator)
    assert len(responses) == 60
    cut = [response for response in responses if response[-1] != EOS]
    done = [response for response in responses if response[-1] == EOS]
    assert cut and done
    assert all(len(response) == 5 for response in cut)
    assert all(EOS not in response[:-1] for response in responses)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_first_tokens_follow_the_policys_distribution(policy, temperature):
    generator = torch.Generator().manual_seed(0)
    draws = 4000
    responses = sample(
        policy,
        [PROMPTS[0]],
        group_size=draws,
        max_new_tokens=1,
        eos_token_id=EOS,
        temperature=temperature,
        generator=generator,
    )
    counts = torch.stack(responses).flatten().bincount(minlength=21)
    expected = (policy(input_ids=PROMPTS[0][None]).logits[0, -1].detach() / temperature).softmax(-1)
    error = (counts / draws - expected).abs()
    assert (error < 5 * (expected * (1 - expected) / draws).sqrt() + 1e-3).all()


def test_same_generator_same_responses(policy):
    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        responses = sample(policy, PROMPTS, max_new_tokens=8, eos_token_id=EOS, generator=generator)
        return [response.tolist() for response in responses]

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)


def test_collect_groups_responses_by_prompt_and_rewards_the_last_token(policy, task):
    problems = task.problems(3, random.Random(0))
    rollout, texts = collect(
        policy,
        task,
        problems,
        group_size=2,
        max_new_tokens=4,
        temperature=1.0,
        generator=torch.Generator().manual_seed(0),
    )
    prompts = rollout.prompt_ids.view(6, -1)
    assert [task.tokenizer.decode(prompt) for prompt in prompts] == [p.prompt for p in problems for _ in range(2)]
    assert len(texts) == len(rollout.is_correct) == 6
    assert torch.equal(rollout.scores, rollout.is_correct.float())
    last = rollout.token_ids[rollout.cu_seqlens[1:] - 1]
    assert torch.equal(rollout.is_finished, last == task.tokenizer.eos_token_id)


def test_pack_places_everything_by_hand():
    flags = torch.tensor([True, False])
    rollout = pack(
        [torch.tensor([3, 4]), torch.tensor([5])],
        [torch.tensor([6]), torch.tensor([7, 1])],
        flags,
        ~flags,
        torch.device("cpu"),
    )
    assert rollout.prompt_ids.tolist() == [3, 4, 5]
    assert rollout.prompt_cu_seqlens.tolist() == [0, 2, 3]
    assert rollout.token_ids.tolist() == [6, 7, 1]
    assert rollout.cu_seqlens.tolist() == [0, 1, 3]
    assert rollout.rewards.tolist() == [1, 0, 0]
    assert rollout.lengths.tolist() == [1, 2]
    assert rollout.scores.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": []}, r"prompts must be at least 1 non-empty tensor; got lengths \[\]"),
        ({"prompts": [torch.tensor([])]}, r"prompts must be at least 1 non-empty tensor; got lengths \[0\]"),
        ({"group_size": 0}, "group_size and max_new_tokens must be >= 1; got 0 and 4"),
        ({"max_new_tokens": 0}, "group_size and max_new_tokens must be >= 1; got 1 and 0"),
        ({"temperature": -1.0}, "temperature must be >= 0; got -1.0"),
        ({"generator": None}, "generator must be a torch.Generator where temperature > 0; got None"),
    ],
)
def test_rejects_bad_input(policy, changes, message):
    arguments = {"group_size": 1, "max_new_tokens": 4, "temperature": 1.0, "generator": torch.Generator()} | changes
    prompts = arguments.pop("prompts", PROMPTS)
    with pytest.raises(ValueError, match=message):
        sample(policy, prompts, eos_token_id=EOS, **arguments)


def test_collect_rejects_no_problems(policy, task):
    with pytest.raises(ValueError, match="problems must hold at least 1 problem; got none"):
        collect(policy, task, [], group_size=1, max_new_tokens=1, temperature=0.0, generator=torch.Generator())
