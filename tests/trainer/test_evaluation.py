"""Held-out accuracy, sampled and greedy."""

import random

import torch

from vapo.evaluation import evaluate


class AlwaysOne:
    """A verifier that accepts one first word."""

    def __init__(self, task, word):
        self.tokenizer, self.word = task.tokenizer, word

    def is_correct(self, problem, response):
        return response.split()[:1] == [self.word]


def test_accuracy_is_the_share_the_verifier_accepts(policy, task, small_config):
    problems = task.problems(6, random.Random(0), held_out=True)
    with torch.no_grad():
        policy.lm_head.weight.zero_()
        policy.model.norm.weight.zero_()
    # All logits are 0: the greedy token is the first, <pad>, for ever, so no response is ever finished.
    metrics = evaluate(policy, AlwaysOne(task, "#"), problems, small_config, seed=0)
    assert metrics["val/accuracy_greedy"] == 0
    assert metrics == evaluate(policy, AlwaysOne(task, "#"), problems, small_config, seed=0)
    assert 1 <= metrics["val/response_length"] <= 6


def test_greedy_and_sampled_are_told_apart(policy, task, small_config):
    problems = task.problems(40, random.Random(0), held_out=True)
    # Tie the logits to the last token alone: after "=" comes "#", the likeliest by far, then the end.
    weights = torch.zeros(21, 21)
    weights[task.tokenizer.convert_tokens_to_ids("="), task.tokenizer.convert_tokens_to_ids("#")] = 3.0
    weights[:, task.tokenizer.eos_token_id] += 2.0
    policy.base_model.forward = lambda input_ids, cache=None, **_: type(
        "Output", (), {"last_hidden_state": weights[input_ids]}
    )
    policy.lm_head = torch.nn.Identity()
    policy.get_output_embeddings = lambda: torch.nn.Identity()
    metrics = evaluate(policy, AlwaysOne(task, "#"), problems, small_config, seed=0)
    assert metrics["val/accuracy_greedy"] == 1
    assert 0 < metrics["val/accuracy_sampled"] < 1
