"""--dry-run: what a run would need, and what it lacks, before any weights are read."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from training_runs import options
from transformers import Qwen2Config, Qwen2ForCausalLM

from vapo.cli import main
from vapo.config import Config
from vapo.learning.learner import make_learner
from vapo.models.load import critic_from_policy, tiny_policy
from vapo.models.memory import memory_of, memory_table, models_without_weights, num_parameters
from vapo.presets import preset

# Embeddings 21 · 96, tied; two layers of four 96 × 96 matrices, two norms of 32 and two of 96, three 96 × 256 matrices;
# the last norm. The critic has a head of 96 + 1 besides.
TINY = 21 * 96 + 2 * (4 * 96 * 96 + 2 * 32 + 2 * 96 + 3 * 96 * 256) + 96
CRITIC = TINY + 97
# 68 float32 bytes a token, hidden unit and layer, 2 layers of 96.
ACTIVATIONS = 68 * 96 * 2 * 2048


@pytest.mark.parametrize(
    ("given", "ranks", "last_phase", "expected"),
    [
        ({}, 1, "vapo", [16 * TINY, 16 * CRITIC, ACTIVATIONS]),
        ({"name": "ppo"}, 1, "vapo", [16 * TINY, 16 * CRITIC, 4 * TINY, ACTIVATIONS]),
        ({}, 4, "vapo", [4 * TINY, 4 * CRITIC, 4 * TINY, ACTIVATIONS]),
        ({"shard_ranks": 2}, 4, "vapo", [8 * TINY, 8 * CRITIC, 4 * TINY, ACTIVATIONS]),
        ({"reduce_gradients": "mini_batch"}, 2, "vapo", [8 * TINY, 8 * CRITIC, 4 * TINY, 4 * CRITIC + ACTIVATIONS]),
        ({"dtype": "bfloat16"}, 1, "vapo", [16 * TINY, 16 * CRITIC, 2 * TINY, ACTIVATIONS // 2]),
        ({"name": "dapo", "dtype": "bfloat16"}, 2, "vapo", [8 * TINY, 2 * TINY, ACTIVATIONS // 2]),
        # The warm start trains the policy; without one it stays as it is until RL.
        ({}, 1, "value_pretraining", [16 * TINY, 16 * CRITIC, ACTIVATIONS]),
        ({"warm_start_steps": 0}, 1, "value_pretraining", [4 * TINY, 16 * CRITIC, ACTIVATIONS]),
        # 2 layers of 4 bytes kept, and the inner 68 of one layer.
        ({"gradient_checkpointing": True}, 1, "vapo", [16 * TINY, 16 * CRITIC, 96 * (4 * 2 + 68) * 2048]),
    ],
)
def test_memory_of_tiny_by_hand(task, given, ranks, last_phase, expected):
    config = preset(**{"name": "vapo", "dtype": "float32", **given})
    config = replace(config, engine="loop", attention="sdpa", device="cpu")
    policy, critic, _ = models_without_weights(config, task)
    parts = memory_of(config, policy, critic, ranks=ranks, last_phase=last_phase)
    assert [part.num_bytes for part in parts] == expected


def test_models_without_weights_are_those_that_a_run_loads(task, small_config):
    learner = make_learner(small_config, task, torch.device("cpu"))
    config = replace(small_config, dtype="float32", attention="sdpa", engine="loop")
    policy, critic, _ = models_without_weights(config, task)
    assert policy.device.type == critic.device.type == "meta"
    assert num_parameters(policy) == num_parameters(learner.policy)
    assert num_parameters(critic) == num_parameters(learner.critic)


def test_a_node_of_gpus_as_the_docs_print_it():
    model = Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        policy = Qwen2ForCausalLM(model)
        critic = critic_from_policy(policy)
    config = Config(
        model="Qwen/Qwen2.5-7B",
        dtype="bfloat16",
        gradient_checkpointing=True,
        engine="transformers",
        micro_batch_tokens=16384,
    )
    table = memory_table(memory_of(config, policy, critic, ranks=8))
    assert table in (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, task):
    """A model of the hub's kind: its weights are no weights."""
    folder = tmp_path_factory.mktemp("model")
    tiny_policy(task.tokenizer, 0).save_pretrained(folder)
    task.tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"not to be read")
    return folder


def test_weights_are_not_read(model_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    settings = {"model": str(model_folder), "device": "cpu", "num_prompts": 4, "max_new_tokens": 9}
    assert main(["train", "--dry-run", *options(settings)]) == 0
    out, said = capsys.readouterr()
    assert json.loads(out)["model"] == str(model_folder)
    assert f"policy: weights, gradient, two moments, float32, {TINY:,} × 16 B / 2 ranks" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "{tmp}/none"}, "a model must be a folder or a hub id that loads; got '{tmp}/none'"),
        ({"model": "{tmp}"}, "a model's folder must hold a config.json; got {tmp}"),
        ({"task": "{tmp}/none.jsonl"}, "task"),
        ({"critic": "{tmp}"}, "a model's folder must hold a config.json; got {tmp}"),
        ({"critic": "{model}"}, "a critic must be a token or sequence classifier with 1 label; got Qwen3ForCausalLM"),
        ({"trackers": ("wandb",)}, "trackers must be installed"),
        ({"max_new_tokens": 1024}, "max_new_tokens must be below the model's 1024 positions; got 1024"),
        ({"stop": ("two words",)}, "a stop string must be one token of the tokenizer; got 'two words'"),
        ({"engine": "vllm"}, "engine 'vllm' needs the extra vllm: pip install 'vapo[vllm]'"),
        ({"attention": "flash_attention_2", "dtype": "bfloat16"}, "a model must be one that can be built"),
        ({"engine": "transformers", "importance_cap": 2.0}, "importance_cap must be auto or None"),
        ({"shard_ranks": 3}, "shard_ranks must divide the number of ranks, 2; got 3"),
        ({"num_prompts": 1, "mini_batches": 1}, "num_prompts must be >= the number of ranks, 2; got 1"),
    ],
)
def test_what_a_run_lacks_is_said_before_it(model_folder, tmp_path, capsys, monkeypatch, given, message):
    if (given.get("trackers") and find_spec("wandb")) or (given.get("engine") == "vllm" and find_spec("vllm")):
        pytest.skip("the package is installed here")
    monkeypatch.setenv("WORLD_SIZE", "2")
    names = {"tmp": tmp_path, "model": model_folder}
    given = {k: v.format(**names) if isinstance(v, str) else v for k, v in given.items()}
    assert main(["train", "--dry-run", "--device", "cpu", *options(given)]) == 2
    out, said = capsys.readouterr()
    assert out == "" and said.startswith("vapo: ") and message.format(**names) in said and said.count("\n") == 1
