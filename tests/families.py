"""Tiny causal language models of several families, with random weights that make clear-cut distributions."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 21

_SMALL = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    initializer_range=0.3,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=0,
)
_CHANGES = {
    # A window shorter than the sequences, and a cap that shows.
    "gemma2": dict(sliding_window=4, final_logit_softcapping=2.0, query_pre_attn_scalar=8, tie_word_embeddings=False),
    # GPT-2 knows no grouped queries.
    "gpt2": dict(num_key_value_heads=4),
}
# Gemma 2 caps its attention scores, which SDPA cannot.
ATTENTIONS = {"qwen3": ("sdpa", "eager"), "llama": ("sdpa", "eager"), "gpt2": ("sdpa", "eager"), "gemma2": ("eager",)}
FAMILIES = tuple(ATTENTIONS)


def tiny_model(family: str, attention: str | None = None, **changes: object) -> PreTrainedModel:
    """Build a model of ``family``; the same weights for the same arguments."""
    config = AutoConfig.for_model(family, **{**_SMALL, **_CHANGES.get(family, {}), **changes})
    attention = attention or ATTENTIONS.get(family, ("sdpa",))[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
