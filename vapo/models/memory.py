"""Memory that a run needs on each GPU, calculated from models that are built without weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from vapo.config import Config
from vapo.models.auto import activation_bytes
from vapo.models.load import (
    TINY,
    check_embeddings,
    critic_config,
    read_config,
    read_critic_config,
    read_tokenizer,
    set_gradient_checkpointing,
    tiny_policy,
)
from vapo.tasks import Task

# float32 weights, their gradient, and AdamW's two moments.
TRAINED_BYTES = 16
FROZEN_BYTES = 4


class Models(NamedTuple):
    """Policy and critic on the meta device, and the policy's tokenizer."""

    policy: PreTrainedModel
    critic: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerBase


class Part(NamedTuple):
    """What takes memory on a rank, and how many bytes of it."""

    text: str
    num_bytes: int


def models_without_weights(config: Config, task: Task) -> Models:
    """Build the models of a run from their configs alone.

    Args:
        config: The settings, without "auto".
        task: Brings the tokenizer of the model "tiny".

    Raises:
        ValueError: If a config or the tokenizer cannot be read or they do not fit each other, or the attention or
            gradient checkpointing is not installed or not supported.
    """
    if config.model == TINY:
        if not hasattr(task, "tokenizer"):
            raise ValueError("model must be a hub id or a folder where the task brings no tokenizer; got 'tiny'")
        tokenizer, settings = task.tokenizer, tiny_policy(task.tokenizer, seed=0).config
    else:
        tokenizer, settings = read_tokenizer(config.model), read_config(config.model)
    policy = _on_meta(AutoModelForCausalLM, settings, config.attention)
    check_embeddings(policy, tokenizer)
    critic = None
    if config.has_critic:
        settings = read_critic_config(config.critic)[1] if config.critic else critic_config(policy.config)
        critic = _on_meta(AutoModelForTokenClassification, settings, config.attention)
        set_gradient_checkpointing(critic, config.gradient_checkpointing)
    return Models(set_gradient_checkpointing(policy, config.gradient_checkpointing), critic, tokenizer)


def memory_of(
    config: Config, policy: PreTrainedModel, critic: PreTrainedModel | None, *, ranks: int, last_phase: str = "vapo"
) -> list[Part]:
    """Calculate what a rank holds: first what it holds all the time, then while it samples, then while it updates.

    Let P be the parameters of a model and N the ranks that share them, ``shard_ranks`` if it is given. A model that
    trains takes 16 P / N bytes and a frozen one 4 P / N; the whole policy while sampling takes w P, where w is the
    bytes of the dtype; a gradient that is reduced once a mini-batch takes 4 P. Activations are those of
    :func:`vapo.models.auto.activation_bytes` for one micro-batch. Logits are never whole.

    Args:
        config: The settings, without "auto" but for ``micro_batch_tokens``.
        policy: The policy, with weights or without.
        critic: The critic, or None.
        ranks: Processes of the run.
        last_phase: As :func:`vapo.presets.preset` has it; the policy of a Hugging Face model trains in RL alone.

    Returns:
        The parts. Key-value cache, gathered layers and chunks of logits are left out.

    Example:
        >>> from transformers import Qwen3Config, Qwen3ForCausalLM
        >>> sizes = dict(vocab_size=8, hidden_size=4, intermediate_size=8, num_hidden_layers=1)
        >>> heads = dict(num_attention_heads=1, num_key_value_heads=1, head_dim=4)
        >>> policy = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=True))
        >>> config = Config(dtype="bfloat16", engine="loop", advantage_estimator="group", micro_batch_tokens=1024)
        >>> [part.num_bytes for part in memory_of(config, policy, None, ranks=2)]
        [1696, 424, 139264]
    """
    width = 2 if config.dtype == "bfloat16" else 4
    size, shares = num_parameters(policy), config.shard_ranks or ranks
    trains = last_phase == "vapo" or config.warm_start_steps > 0
    parts = [_state("policy", size, shares, trains)]
    if critic is not None:
        parts.append(_state("critic", num_parameters(critic), shares, True))
    if config.has_reference:
        parts.append(_state("reference", size, shares, False))
    if config.engine == "vllm":
        parts.append(Part(f"while sampling: vLLM's weights, {config.dtype}", width * size))
    elif config.needs_group or ranks > 1:
        parts.append(Part(f"while sampling: the whole policy, {config.dtype}", width * size))
    model = max((each for each in (policy, critic) if each is not None), key=num_parameters)
    is_whole = config.reduce_gradients == "mini_batch" and ranks > 1
    updating = {"the whole gradient, float32": 4 * num_parameters(model)} if is_whole else {}
    if config.micro_batch_tokens != "auto" or config.device == "cpu":
        tokens = config.used_micro_batch_tokens
        updating[f"activations of {tokens:,} tokens, roughly"] = activation_bytes(model.config, config) * tokens
    if updating:
        parts.append(Part(f"while updating: {', '.join(updating)}", sum(updating.values())))
    return parts


def memory_table(parts: list[Part]) -> str:
    """The parts as lines, the larger of sampling and updating at the end added to what is held all the time."""
    passing = [part.num_bytes for part in parts if part.text.startswith("while")]
    together = sum(part.num_bytes for part in parts) - sum(passing) + max(passing, default=0)
    rows = [*parts, Part("together, at the larger of the two", together)]
    width = max(len(part.text) for part in rows)
    lines = [f"  {part.text:{width}}  {_readable(part.num_bytes):>9}" for part in rows]
    return "\n".join(["memory of each rank, calculated:", *lines, "  beside it: key-value cache, gathered layers"])


def num_parameters(model: PreTrainedModel) -> int:
    """Number of parameters, tied ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _state(name: str, size: int, ranks: int, trains: bool) -> Part:
    each = TRAINED_BYTES if trains else FROZEN_BYTES
    what = "weights, gradient, two moments" if trains else "weights"
    shared = f" / {ranks} ranks" if ranks > 1 else ""
    return Part(f"{name}: {what}, float32, {size:,} × {each} B{shared}", -(-size * each // ranks))


def _on_meta(loader: type, config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            return loader.from_config(config, dtype=torch.float32, attn_implementation=attention)
    except (ValueError, ImportError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"a model must be one that can be built; got {config.model_type!r}: {reason}") from error


def _readable(num_bytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"
