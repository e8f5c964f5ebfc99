"""Weights of sharded models: every rank reads its own shards, and no rank ever holds a model whole."""

import threading
import time
from pathlib import Path

import pytest
import torch
from families import FAMILIES, tiny_model
from ranks import run_on_ranks
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from vapo.models import weights
from vapo.models.load import critic_from_policy, load_critic, load_policy, reference_of, value_head
from vapo.models.output_head import plain_head
from vapo.models.sharding import full_state_dict, is_empty, shard
from vapo.tasks import load_task

CPU = torch.device("cpu")
IDS = torch.tensor([[3, 4, 5, 6, 7]])


@pytest.fixture
def saved(tmp_path):
    """Function from a model to the folder that it is saved in, in several files, with a tokenizer."""

    def save(model):
        model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
        load_task("running-total").tokenizer.save_pretrained(tmp_path / "model")
        assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
        return tmp_path / "model"

    return save


def loaded(folder, attention):
    """On a rank: policy, critic and reference as a run loads them; what they come to, and whether they were empty."""
    policy, _ = load_policy(str(folder), None, seed=0, attention=attention, gradient_checkpointing=False)
    critic, reference = critic_from_policy(policy), reference_of(policy)
    were_empty = [is_empty(model) for model in (policy, critic, reference)]
    for model in (policy, critic, reference):
        shard(model, torch.float32, CPU, exact=value_head(critic) if model is critic else None)
    states = [full_state_dict(model) for model in (policy, critic, reference)]
    buffers = {name: buffer.clone() for name, buffer in policy.named_buffers()}
    with torch.no_grad():
        logits = policy(input_ids=IDS, use_cache=False).logits
    return {"were_empty": were_empty, "states": states, "buffers": buffers, "logits": logits} | {
        "plain": [plain_head(model) is not None for model in (policy, reference)],
        "frozen": not any(parameter.requires_grad for parameter in reference.parameters()),
        "stops": policy.generation_config.eos_token_id,
    }


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_that_read_their_shards_have_the_model_that_transformers_loads(saved, family, tied):
    model = tiny_model(family, tie_word_embeddings=tied)
    model.generation_config.eos_token_id = [1, 7]
    folder, attention = saved(model), model.config._attn_implementation
    expected = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
    first, second = run_on_ranks(2, loaded, folder, attention)
    policy, critic, reference = first["states"]
    assert first["were_empty"] == [True] * 3 and first["frozen"] and first["stops"] == [1, 7]
    assert first["plain"] == [plain_head(model) is not None] * 2
    for name, tensor in expected.state_dict().items():
        assert torch.equal(policy[name], tensor) and torch.equal(reference[name], tensor), name
    for name, tensor in expected.base_model.state_dict().items():
        assert torch.equal(critic[f"{expected.base_model_prefix}.{name}"], tensor), name
    assert all(not tensor.any() for name, tensor in critic.items() if name.startswith(("score", "classifier")))
    assert all(torch.equal(first["buffers"][name], buffer) for name, buffer in expected.named_buffers())
    for rank in (first, second):
        torch.testing.assert_close(rank["logits"], expected(IDS, use_cache=False).logits, rtol=0, atol=1e-5)


def critic_values(folder):
    critic = load_critic(folder, attention="sdpa", gradient_checkpointing=False)
    was_empty = is_empty(critic)
    shard(critic, torch.float32, CPU, exact=value_head(critic))
    with torch.no_grad():
        return was_empty, critic(input_ids=IDS, use_cache=False).logits


def test_a_reward_models_head_is_read_and_its_missing_bias_is_0(saved):
    config = tiny_model("llama").config
    config.num_labels = 1
    reward_model = AutoModelForSequenceClassification.from_config(config).eval()
    states = reward_model.base_model(IDS, use_cache=False).last_hidden_state
    folder = saved(reward_model)
    for was_empty, values in run_on_ranks(2, critic_values, folder):
        assert was_empty
        torch.testing.assert_close(values, reward_model.score(states), rtol=0, atol=1e-5)


def test_files_that_lack_a_weight_are_an_error_and_not_a_random_one(saved):
    model = tiny_model("llama")
    folder = saved(model)
    lacking = {name: tensor for name, tensor in model.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    weights.save_file(lacking, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(AssertionError, match="must hold all weights of LlamaForCausalLM"):
        run_on_ranks(2, loaded, folder, "sdpa")


def anonymous_bytes():
    """Memory of this process that no file holds."""
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def peak_of_loading(folder):
    """Most memory of a rank above what it had before, while it loads a policy, and while it saves it."""
    before, peaks, done = anonymous_bytes(), [0], threading.Event()

    def watch():
        while not done.is_set():
            peaks[-1] = max(peaks[-1], anonymous_bytes())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        policy, _ = load_policy(str(folder), None, seed=0, attention="sdpa", gradient_checkpointing=False)
        shard(policy, torch.float32, CPU)
        peaks.append(0)
        weights.save_model(policy, folder / "saved", max_file_size="1MB")
    finally:
        done.set()
        watcher.join()
    largest = max(parameter.numel() for parameter in policy.parameters()) * 4
    own = sum(parameter.to_local().numel() for parameter in policy.parameters()) * 4
    return [peak - before for peak in peaks], largest, own


def test_no_rank_holds_the_model_whole(saved, tmp_path):
    # 0.5 GB in float32.
    config = LlamaConfig(
        vocab_size=21_000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=5, num_attention_heads=8,
        num_key_value_heads=8, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    total = sum(parameter.numel() for parameter in model.parameters()) * 4
    assert total > 0.5e9
    folder = saved(model)
    for (loading, saving), largest, own in run_on_ranks(2, peak_of_loading, folder):
        assert own < 0.51 * total
        # 64 MB for modules that are imported meanwhile.
        assert loading < own + 2 * largest + 2**26, (loading, own, largest)
        # A whole tensor, and the copies that safetensors makes of a file's.
        assert saving < own + 4 * largest + 2**26, (saving, own, largest)
    again = AutoModelForCausalLM.from_pretrained(folder / "saved")
    assert len(list((folder / "saved").glob("*.safetensors"))) > 1
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(again.parameters(), model.parameters(), strict=True))
