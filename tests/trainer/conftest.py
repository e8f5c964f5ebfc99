"""What the trainer's tests share: a task, an untrained policy, a small config and a rollout made by hand."""

import random

import pytest
import torch

from vapo.config import Config
from vapo.models import tiny_policy
from vapo.rollout import pack
from vapo.tasks import load_task

SMALL = {
    "num_prompts": 2,
    "group_size": 2,
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
def small_settings():
    """Settings under which a whole run takes seconds."""
    return dict(SMALL)


@pytest.fixture
def small_config(small_settings):
    return Config(**small_settings)


@pytest.fixture
def rollout(task):
    """Four finished responses of 3, 1, 2 and 5 tokens to prompts of two lengths; the first and the last are correct."""
    rng = random.Random(0)
    prompts = [torch.tensor([rng.randrange(2, 21) for _ in range(length)]) for length in (4, 2, 4, 3)]
    responses = [torch.tensor([rng.randrange(2, 21) for _ in range(length)]) for length in (3, 1, 2, 5)]
    is_correct, is_finished = torch.tensor([True, False, False, True]), torch.ones(4, dtype=torch.bool)
    return pack(prompts, responses, is_correct, is_finished, torch.device("cpu"))
