"""What "auto" means on this machine: dtype, attention, engine and the size of micro-batches."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import torch
from transformers import PreTrainedConfig

from vapo.config import Config
from vapo.models.sharding import max_over_ranks

# Bytes of activations that a layer keeps for backward, per token and hidden unit, in 16-bit arithmetic and without a
# matrix of attention scores (Korthikanti et al. 2022, Eq. 2, https://arxiv.org/abs/2205.05198).
ACTIVATION_BYTES = 34
# Share of the free memory for activations; gathered layers, chunks of logits and fragments take the rest.
ACTIVATION_SHARE = 0.4


def resolve_auto(config: Config, device: torch.device) -> tuple[Config, dict[str, str]]:
    """Choose dtype, attention and engine where they are "auto".

    Args:
        config: The settings.
        device: Where the models will be.

    Returns:
        The settings without these "auto", and for each field that was chosen, why.

    Example:
        >>> config, reasons = resolve_auto(Config(engine="transformers"), torch.device("cpu"))
        >>> config.dtype, config.attention, config.engine, reasons
        ('float32', 'sdpa', 'transformers', {'dtype': 'a CPU', 'attention': 'a CPU'})
    """
    on_gpu, reasons, values = device.type == "cuda", {}, {}
    for name, choose in (("dtype", _dtype), ("attention", _attention), ("engine", _engine)):
        if getattr(config, name) == "auto":
            values[name], reasons[name] = choose(config, on_gpu)
            # The attention depends on the dtype.
            config = replace(config, **values)
    return config, reasons


def _dtype(config: Config, on_gpu: bool) -> tuple[str, str]:
    if config.attention == "flash_attention_2":
        return "bfloat16", "flash attention takes no float32"
    if not on_gpu:
        return "float32", "a CPU"
    # Emulated, it would be slower than float32.
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bfloat16", "the GPU has it"
    return "float32", "the GPU has no bfloat16"


def _attention(config: Config, on_gpu: bool) -> tuple[str, str]:
    if not on_gpu:
        return "sdpa", "a CPU"
    if config.dtype == "float32":
        return "sdpa", "flash attention takes no float32"
    if find_spec("flash_attn"):
        return "flash_attention_2", "flash-attn is installed"
    return "sdpa", "flash-attn is not installed"


def _engine(config: Config, on_gpu: bool) -> tuple[str, str]:
    if not on_gpu:
        return "loop", "a CPU"
    if find_spec("vllm"):
        return "vllm", "vLLM is installed"
    return "transformers", "vLLM is not installed"


def micro_batch_tokens(model: PreTrainedConfig, config: Config, free_bytes: int) -> int:
    """Tokens whose activations fit into a share of a GPU's free memory; the same on every rank.

    A token takes what :func:`activation_bytes` says.

    Args:
        model: The larger model's config.
        config: Dtype and gradient checkpointing.
        free_bytes: Memory that is free once the models are loaded.

    Returns:
        A multiple of 1,024, at least 1,024.

    Example:
        >>> from transformers import Qwen3Config
        >>> model = Qwen3Config(num_hidden_layers=36, hidden_size=4096)
        >>> micro_batch_tokens(model, Config(dtype="bfloat16"), 80 * 10**9)
        6144
        >>> micro_batch_tokens(model, Config(dtype="bfloat16", gradient_checkpointing=True), 80 * 10**9)
        72704
    """
    tokens = int(ACTIVATION_SHARE * free_bytes) // activation_bytes(model, config)
    return -max_over_ranks(-max(1, tokens // 1024)) * 1024


def activation_bytes(model: PreTrainedConfig, config: Config) -> int:
    """Bytes that a token's activations take until the backward pass.

    34 · hidden in each layer, twice that in float32; with gradient checkpointing 2 · hidden (4 in float32) in each
    layer and 34 · hidden (68) in one of them at a time.

    Args:
        model: The model's config.
        config: Dtype and gradient checkpointing.
    """
    model = model.get_text_config()
    layers, width = model.num_hidden_layers, 2 if config.dtype == "bfloat16" else 4
    per_layer = ACTIVATION_BYTES * width // 2
    return model.hidden_size * (width * layers + per_layer if config.gradient_checkpointing else per_layer * layers)
