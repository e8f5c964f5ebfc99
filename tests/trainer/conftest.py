"""What the trainer's tests share: a task, an untrained policy, a critic, a small config and a rollout made by hand."""

import random
from dataclasses import replace

import pytest
import torch
from training_runs import make_lively

from vapo.config import Config
from vapo.learning.learner import make_learner
from vapo.models.load import critic_from_policy, tiny_policy, value_head
from vapo.rollout.collect import pack
from vapo.tasks import Verdict, load_task
from vapo.types import Batch

SMALL = {
    "num_prompts": 2,
    "group_size": 2,
    "mini_batches": 2,
    "max_new_tokens": 6,
    "steps": 2,
    "warm_start_steps": 2,
    "warm_start_clean_steps": 1,
    "warm_start_batch": 2,
    "pretraining_steps": 1,
    "pretraining_prompts": 4,
    "pretraining_mini_batches": 2,
    "eval_problems": 4,
    "eval_every": 1,
    "threads": 1,
    "device": "cpu",
}


@pytest.fixture(scope="session")
def task():
    return load_task("running-total")


@pytest.fixture
def policy(task):
    return tiny_policy(task.tokenizer, seed=0)


@pytest.fixture
def critic(policy):
    """A critic whose values differ from state to state."""
    critic = critic_from_policy(policy)
    torch.nn.init.normal_(value_head(critic).weight, std=0.02, generator=torch.Generator().manual_seed(0))
    return critic


@pytest.fixture(scope="session")
def small_settings():
    """Settings under which a whole run takes seconds."""
    return dict(SMALL)


@pytest.fixture(scope="module")
def lively_runs():
    """The runs of a module are as `make_lively` makes them."""
    with pytest.MonkeyPatch.context() as patch:
        make_lively(patch)
        yield


@pytest.fixture(scope="session")
def small_config(small_settings):
    return Config(**small_settings)


@pytest.fixture
def learner_of():
    """Function from a config to a learner in the phase "vapo", or another one, with a task of its own."""

    def build(config, phase="vapo"):
        learner = make_learner(config, load_task(config.task), torch.device("cpu"))
        learner.begin(phase, config)
        return learner

    return build


@pytest.fixture
def judged():
    """Function that gives a learner responses of one token; all score 1, the first, third … of a call are correct."""

    def change(learner, error=None):
        def score(problems, responses):
            return [Verdict(1.0, number % 2 == 0, error) for number in range(len(responses))]

        learner.sampling = replace(learner.sampling, stop_token_ids=tuple(range(len(learner.tokenizer))))
        learner.task.score = score
        return learner

    return change


@pytest.fixture
def rollout():
    """Four finished responses of 3, 1, 2 and 5 tokens to prompts of two lengths; the first and the last are correct."""
    rng = random.Random(0)
    prompts = [torch.tensor([rng.randrange(2, 21) for _ in range(length)]) for length in (4, 2, 4, 3)]
    responses = [torch.tensor([rng.randrange(2, 21) for _ in range(length)]) for length in (3, 1, 2, 5)]
    is_correct, is_truncated = torch.tensor([True, False, False, True]), torch.zeros(4, dtype=torch.bool)
    return pack(prompts, responses, is_correct.float(), is_correct, is_truncated, 2, torch.device("cpu"))


@pytest.fixture
def batch_of(rollout):
    """Function from fields of a Batch to one over ``rollout``; what is not given is 0, and every token trains."""

    def build(**fields):
        zeros = torch.zeros(len(rollout.token_ids))
        names = ("old_logprobs", "old_values", "rewards", "advantages", "returns")
        empty = dict.fromkeys(names, zeros) | {"ref_logprobs": None, "lam_policy": torch.zeros(4)}
        return Batch(**{"rollout": rollout, "mask": torch.ones_like(zeros, dtype=torch.bool), **empty, **fields})

    return build
