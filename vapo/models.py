"""Policy and critic: a causal language model, and a backbone of its own under a scalar head."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import (
    AutoModelForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)


def tiny_policy(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Build a Qwen3 of 0.2 million parameters with random weights; the same for the same seed.

    Weights are drawn with standard deviation 0.08, not transformers' 0.02: at this width the smaller one learns to copy
    but no arithmetic in the steps of a warm start.
    """
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=24,
        max_position_embeddings=1024,
        initializer_range=0.08,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def critic_from_policy(policy: PreTrainedModel) -> PreTrainedModel:
    """Build a critic: a copy of the policy's backbone under a scalar head of zeros, so that V = 0 everywhere.

    Args:
        policy: Any causal language model whose family has a token-classification head in transformers.

    Returns:
        A model with a ``base_model`` of its own and the head ``score``.
    """
    config = copy.deepcopy(policy.config)
    config.num_labels = 1
    # The random weights of the new model are all replaced; drawing them must not disturb anybody's random numbers.
    with torch.random.fork_rng(devices=[]):
        critic = AutoModelForTokenClassification.from_config(config)
    critic.base_model.load_state_dict(policy.base_model.state_dict())
    torch.nn.init.zeros_(critic.score.weight)
    torch.nn.init.zeros_(critic.score.bias)
    return critic.to(policy.device)


def load_critic(folder: Path, device: torch.device) -> PreTrainedModel:
    """Load a critic that ``save_pretrained`` wrote.

    Raises:
        ValueError: If the folder holds no critic, or one without its backbone or scalar head; such weights would
            silently be random.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"the critic's folder must hold a config.json; got {folder}")
    critic, loading = AutoModelForTokenClassification.from_pretrained(folder, output_loading_info=True)
    if loading["missing_keys"] or critic.config.num_labels != 1:
        raise ValueError(
            f"{folder} must hold a backbone and a head with 1 label; got {critic.config.num_labels} labels,"
            f" missing {sorted(loading['missing_keys'])}"
        )
    return critic.to(device)
