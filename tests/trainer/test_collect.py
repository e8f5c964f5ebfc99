"""Collecting: prompts to tokens, responses verified and packed."""

import pytest
import torch
from families import tiny_model
from transformers import PreTrainedTokenizerFast

from vapo.rollout import collect as collect_module
from vapo.rollout.collect import check_prompts, collect, encode_prompts, pack
from vapo.rollout.sampling import Sampling
from vapo.tasks import Problem, Verdict
from vapo.tasks.running_total import RunningTotal


def seeded():
    return torch.Generator().manual_seed(0)


class Flaky(RunningTotal):
    """A task whose verifier fails on responses of one token and likes every other one half."""

    def score(self, problems, responses):
        return [
            Verdict(0.5, True) if len(response.split()) > 1 else Verdict(0.0, False, f"Traceback: {problem.prompt}")
            for problem, response in zip(problems, responses, strict=True)
        ]


def test_collect_groups_responses_by_prompt_and_puts_scores_on_the_last_token():
    task, policy = Flaky(), tiny_model("qwen3")
    problems = [Problem(prompt, "") for prompt in ("5 +2 =", "7 -1 -1 =")]
    sampling = Sampling(4, (1, 4))
    asked, rollout, texts, errors = collect(
        policy, task.tokenizer, task, problems, group_size=16, sampling=sampling, generator=seeded()
    )
    assert asked == problems and rollout.group_size == 16
    prompts = rollout.prompt_ids.split(rollout.prompt_lengths.tolist())
    assert [task.tokenizer.decode(prompt) for prompt in prompts] == [p.prompt for p in problems for _ in range(16)]
    last = rollout.token_ids[rollout.cu_seqlens[1:] - 1]
    assert torch.equal(rollout.is_truncated, (last != 1) & (last != 4))
    assert (rollout.lengths[rollout.is_truncated] == 4).all()
    words = torch.tensor([len(text.split()) for text in texts])
    # Special tokens are no words; a stop token that is an ordinary one stays.
    assert torch.equal(
        words,
        rollout.lengths
        - torch.segment_reduce(
            torch.isin(rollout.token_ids, torch.tensor([0, 1])).float(), "sum", lengths=rollout.lengths
        ).long(),
    )
    right = (words > 1) & ~rollout.is_truncated
    assert right.any() and rollout.is_truncated.any() and len(errors) > 0
    assert torch.equal(rollout.is_correct, right)
    assert torch.equal(rollout.scores, 0.5 * right)
    assert torch.equal(rollout.rewards[rollout.cu_seqlens[1:] - 1], 0.5 * right)
    assert len(errors) == int((~right & ~rollout.is_truncated).sum())
    assert set(errors) <= {f"Traceback: {problem.prompt}" for problem in problems}


def test_collect_rejects_no_problems():
    task = RunningTotal()
    with pytest.raises(ValueError, match="problems must hold at least 1 problem; got none"):
        collect(None, task.tokenizer, task, [], group_size=1, sampling=Sampling(1, (1,)), generator=seeded())


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """The words of running-total, with a template in which = begins a turn and # ends it."""
    tokenizer = RunningTotal().tokenizer
    tokenizer.chat_template = (
        "{% for message in messages %}= {{ message.content }} # {% endfor %}{% if add_generation_prompt %}= {% endif %}"
    )
    return tokenizer


def test_messages_go_through_the_chat_template_and_text_goes_as_it_is():
    messages = [{"role": "system", "content": "5"}, {"role": "user", "content": "+1 +2"}]
    tokenizer = chat_tokenizer()
    from_text, from_messages = encode_prompts(tokenizer, [Problem("+1 +2", ""), Problem(messages, "")])
    assert tokenizer.decode(from_text) == "+1 +2"
    assert tokenizer.decode(from_messages) == "= 5 # = +1 +2 # ="
    assert from_text.dtype == from_messages.dtype == torch.long
    with pytest.raises(ValueError, match="must have a chat template where prompts are messages; got none"):
        encode_prompts(RunningTotal().tokenizer, [Problem(messages, "")])


def test_pack_by_hand():
    rollout = pack(
        [torch.tensor([3, 4]), torch.tensor([5])],
        [torch.tensor([6]), torch.tensor([7, 1])],
        torch.tensor([0.25, -1.0]),
        torch.tensor([True, False]),
        torch.tensor([True, False]),
        2,
        torch.device("cpu"),
    )
    assert rollout.prompt_ids.tolist() == [3, 4, 5]
    assert rollout.prompt_cu_seqlens.tolist() == [0, 2, 3]
    assert rollout.token_ids.tolist() == [6, 7, 1]
    assert rollout.cu_seqlens.tolist() == [0, 1, 3]
    assert rollout.rewards.tolist() == [0.25, 0, -1]
    assert rollout.lengths.tolist() == [1, 2]
    assert rollout.scores.tolist() == [0.25, -1]
    assert rollout.is_correct.tolist() == rollout.is_truncated.tolist() == [True, False]
    assert rollout.group_size == 2
    with pytest.raises(ValueError, match=r"every response must have at least 1 token; got lengths \[1, 0\]"):
        flags = torch.ones(2, dtype=torch.bool)
        pack(
            [torch.tensor([3])] * 2, [torch.tensor([3]), torch.tensor([])], flags, flags, flags, 1, torch.device("cpu")
        )


def test_prompts_are_checked_before_training_and_long_ones_alone_are_encoded(monkeypatch):
    policy, task = tiny_model("gpt2", max_position_embeddings=400), RunningTotal()
    fitting = Problem(" ".join(["+1"] * 40), "")
    full, long = (Problem(" ".join(["+1"] * count), "") for count in (60, 61))
    check_prompts(policy, task.tokenizer, [fitting, full], 340)
    with pytest.raises(ValueError, match=r"for 340 new tokens in the model's 400 positions; got 61 tokens in '\+1 \+1"):
        check_prompts(policy, task.tokenizer, [full, long, full], 340)
    messages = Problem([{"role": "user", "content": long.prompt}], "")
    with pytest.raises(ValueError, match="got 64 tokens in"):
        check_prompts(policy, chat_tokenizer(), [messages], 340)
    # A prompt of few bytes has few tokens.
    monkeypatch.setattr(collect_module, "encode_prompts", None)
    check_prompts(policy, task.tokenizer, [Problem("+1 +1", "")], 100)
