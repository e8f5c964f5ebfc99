"""Policy and critic: a causal language model, and a scalar head on a backbone of its own."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from vapo.models.sharding import fill_later, is_empty
from vapo.models.weights import parameters_on_meta, reader_of, weight_files
from vapo.tasks import Task

TINY = "tiny"


def load_policy(
    model: str, task: Task, *, seed: int, attention: str, gradient_checkpointing: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the policy and its tokenizer, which has a pad token.

    All dropout is 0: log-probs of the same weights must not differ from one forward pass to the next.

    Args:
        model: "tiny" for :func:`tiny_policy` with the task's own tokenizer, else a hub id or a folder.
        task: Only its ``tokenizer`` is used, and only for "tiny".
        seed: Seed of the random weights of "tiny".
        attention: As transformers names it: "sdpa", "flash_attention_2" or "eager".
        gradient_checkpointing: Recompute the layers in the backward pass; the model is then in training mode.

    Returns:
        A model with float32 parameters on the CPU, and its tokenizer. Where there is a process group the parameters are
        empty, if the files of the model allow it; :func:`vapo.models.sharding.shard` reads them.

    Raises:
        ValueError: If there is no such model, it lacks weights, its vocabulary is smaller than the tokenizer's, or it
            does not support the attention or gradient checkpointing.
    """
    if model == TINY:
        tokenizer = getattr(task, "tokenizer", None)
        if tokenizer is None:
            raise ValueError(f"model must be a hub id or a folder where the task brings no tokenizer; got {model!r}")
        policy = tiny_policy(tokenizer, seed)
        policy.set_attn_implementation(attention)
    else:
        config = _read(AutoConfig.from_pretrained, model)
        arguments = (AutoModelForCausalLM, model, config, attention)
        policy = _load_empty(*arguments) or _load(*arguments)
        tokenizer = read_tokenizer(model)
    check_embeddings(policy, tokenizer)
    return set_gradient_checkpointing(policy, gradient_checkpointing), tokenizer


def check_embeddings(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a policy that embeds fewer tokens than its tokenizer has.

    Raises:
        ValueError: If it does.
    """
    rows = policy.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise ValueError(f"the model must embed all {len(tokenizer)} tokens of its tokenizer; got {rows} embeddings")


def tiny_policy(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Build a Qwen3 of 0.2 million parameters with random weights; the same seed gives the same weights.

    Weights are initialised with standard deviation 0.08, not transformers' 0.02: at this width the smaller one learns
    to copy but no arithmetic in the steps of a warm start.
    """
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        # vLLM has no kernel for smaller heads.
        head_dim=32,
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


def with_pad_token(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Let a tokenizer without a pad token pad with its end-of-sequence token.

    Raises:
        ValueError: If it has neither.
    """
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError("the tokenizer must have a pad or an end-of-sequence token; got neither")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def critic_from_policy(policy: PreTrainedModel) -> PreTrainedModel:
    """Build a critic: a scalar head of zeros on a copy of the policy's backbone, so that V = 0 everywhere.

    Args:
        policy: Any causal language model whose family has a token-classification head in transformers.

    Returns:
        A model with a ``base_model`` of its own and the head that :func:`value_head` finds. Attention, dtype, device
        and gradient checkpointing are the policy's. It is empty where the policy is: shard that one first.

    Raises:
        ValueError: If the family has no such head.
    """
    config = critic_config(policy.config)
    # All random weights of the new model are replaced; making them must not advance the global generator.
    with parameters_on_meta() if is_empty(policy) else torch.random.fork_rng(devices=[]):
        critic = AutoModelForTokenClassification.from_config(
            config, dtype=policy.dtype, attn_implementation=policy.config._attn_implementation
        )
    set_gradient_checkpointing(critic, is_checkpointed(policy))

    def fill(critic: PreTrainedModel) -> None:
        copy_parameters(policy.base_model, critic.base_model)
        head = value_head(critic)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)

    if is_empty(policy):
        fill_later(critic, fill)
        return critic
    fill(critic)
    return critic.to(policy.device)


def reference_of(policy: PreTrainedModel) -> PreTrainedModel:
    """Build a frozen copy of the policy; empty where the policy is: shard that one first."""
    reference = copy.deepcopy(policy).requires_grad_(False)
    if is_empty(policy):
        fill_later(reference, partial(copy_parameters, policy))
    return reference


@torch.no_grad()
def copy_parameters(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Give ``target``, sharded as ``source`` is, the parameters of ``source``."""
    for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
        mine.copy_(theirs)


def load_critic(source: str | Path, *, attention: str, gradient_checkpointing: bool) -> PreTrainedModel:
    """Load a critic with float32 parameters on the CPU, all dropout 0.

    Args:
        source: Folder or hub id of a value model (token classification, 1 label) or of a reward model (sequence
            classification, 1 label; its head has no bias, so the bias is 0); or the folder of an earlier run, from
            which ``critic/`` is loaded, or else ``pretrained_critic/``.
        attention: As for :func:`load_policy`.
        gradient_checkpointing: Recompute the layers in the backward pass; the model is then in training mode.

    Raises:
        ValueError: If there is no such critic, it has another number of labels, or it lacks weights of its backbone or
            head, which would be random.
    """
    source, config, kind = read_critic_config(source)
    with torch.device("meta"):
        head = _head_name(AutoModelForTokenClassification.from_config(config))
    arguments, may_lack = (AutoModelForTokenClassification, source, config, attention), {f"{head}.bias"}
    # Reward models call their head "score" in every family.
    renamed, key_mapping = {}, {}
    if kind.endswith("ForSequenceClassification"):
        renamed = {f"{head}.weight": "score.weight", f"{head}.bias": "score.bias"}
        key_mapping = {r"^score\.": f"{head}."}
    critic = _load_empty(*arguments, renamed, may_lack) or _load(*arguments, key_mapping, may_lack)
    return set_gradient_checkpointing(critic, gradient_checkpointing)


def read_critic_config(source: str | Path) -> tuple[str | Path, PreTrainedConfig, str]:
    """Where the critic that `load_critic` loads stands, its config, and the class that its weights were saved from.

    Raises:
        ValueError: As `load_critic`, but for the weights.
    """
    source = _critic_folder(source)
    config = read_config(source)
    kind = (config.architectures or ["no model class"])[0]
    if not kind.endswith(("ForTokenClassification", "ForSequenceClassification")) or config.num_labels != 1:
        raise ValueError(
            "a critic must be a token or sequence classifier with 1 label;"
            f" got {kind} with {config.num_labels} in {source}"
        )
    return source, critic_config(config), kind


def read_config(source: str | Path) -> PreTrainedConfig:
    """Read the config.json of a model.

    Raises:
        ValueError: If there is none.
    """
    return _read(AutoConfig.from_pretrained, source)


def read_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """Read a tokenizer, which has a pad token.

    Raises:
        ValueError: If there is none.
    """
    return with_pad_token(_read(AutoTokenizer.from_pretrained, source))


def value_head(critic: PreTrainedModel) -> nn.Linear:
    """The scalar head of a critic, named ``score`` in some families and ``classifier`` in others."""
    return getattr(critic, _head_name(critic))


def stop_token_ids(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, extra: Sequence[str] = ()
) -> tuple[int, ...]:
    """Tokens that end a response: the end-of-sequence tokens of model and tokenizer, and ``extra`` ones.

    Args:
        policy: Its generation config may name several.
        tokenizer: Names one or none.
        extra: Further strings, each of which must be one token.

    Raises:
        ValueError: If a string is not exactly one token, or nothing would ever end a response.
    """
    named = policy.generation_config.eos_token_id
    found = {*(named if isinstance(named, Sequence) else [named]), tokenizer.eos_token_id} - {None}
    found |= {_only_token(tokenizer, text) for text in extra}
    if not found:
        raise ValueError("a model must have an end-of-sequence or a stop token; got none")
    return tuple(sorted(found))


def max_positions(policy: PreTrainedModel) -> float:
    """Most tokens of a sequence that the model has positions for; infinite if its config names none."""
    config = policy.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    # YaRN and its kind stretch the original positions; not every config counts the stretched ones.
    stretched = (rope.get("original_max_position_embeddings") or 0) * (rope.get("factor") or 1)
    return max(getattr(config, "max_position_embeddings", None) or math.inf, stretched)


def _critic_folder(source: str | Path) -> str | Path:
    """The critic's folder in the folder of an earlier run; ``source`` itself if it is no run's folder."""
    for name in ("critic", "pretrained_critic"):
        if (Path(source) / name / "config.json").is_file():
            return Path(source) / name
    if (Path(source) / "metrics.jsonl").is_file():
        raise ValueError(f"a run must have a critic for another to start from it; got {source}, which has none")
    return source


def critic_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of a critic on a backbone: one label, a bias, no dropout before the head.

    Raises:
        ValueError: If the family has no token-classification head.
    """
    if type(config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        raise ValueError(
            "a critic's backbone must be of a family with a token-classification head in transformers;"
            f" got {config.model_type!r}"
        )
    config = copy.deepcopy(config)
    config.num_labels = 1
    config.token_classification_bias, config.classifier_dropout = True, 0.0
    return config


def _head_name(critic: PreTrainedModel) -> str:
    for name in ("score", "classifier"):
        if isinstance(getattr(critic, name, None), nn.Linear):
            return name
    raise ValueError(f"a critic's head must be one nn.Linear; got none in {type(critic).__name__}")


def _load(
    loader: type,
    source: str | Path,
    config: PreTrainedConfig,
    attention: str,
    key_mapping: dict[str, str] | None = None,
    may_lack: set[str] = frozenset(),
) -> PreTrainedModel:
    """Load a model in float32 without dropout; missing weights, except ``may_lack``, are an error."""
    model, loading = _read(
        loader.from_pretrained,
        source,
        config=_without_dropout(config),
        dtype=torch.float32,
        attn_implementation=attention,
        key_mapping=key_mapping or None,
        output_loading_info=True,
    )
    missing = sorted(set(loading["missing_keys"]) - set(may_lack))
    if missing:
        raise ValueError(f"a checkpoint must hold all weights of {type(model).__name__}; {source} lacks {missing}")
    return model


def _load_empty(
    loader: type,
    source: str | Path,
    config: PreTrainedConfig,
    attention: str,
    renamed: Mapping[str, str] | None = None,
    may_lack: set[str] = frozenset(),
) -> PreTrainedModel | None:
    """The same model without data, to be read once it is sharded.

    None without a process group, or where the files do not fit tensor by tensor.
    """
    if not dist.is_initialized():
        return None
    folder = _read(weight_files, source)
    if folder is None:
        return None
    with parameters_on_meta():
        model = loader.from_config(_without_dropout(config), dtype=torch.float32, attn_implementation=attention)
    read = reader_of(model, folder, renamed or {}, may_lack)
    if read is None:
        return None
    if (folder / "generation_config.json").is_file() and model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    fill_later(model, read)
    return model


def _read(from_pretrained: Callable[..., Any], source: str | Path, **arguments: Any) -> Any:
    """Call a ``from_pretrained``; its errors become one sentence."""
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise ValueError(f"a model's folder must hold a config.json; got {source}")
    try:
        # Missing weights are initialised at random; that must not advance the global generator.
        with torch.random.fork_rng(devices=[]):
            return from_pretrained(source, **arguments)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"a model must be a folder or a hub id that loads; got {str(source)!r}: {reason}") from error


def _without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    config = copy.deepcopy(config)
    for part in (config, config.get_text_config()):
        for name, value in vars(part).items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    return config


def set_gradient_checkpointing(model: PreTrainedModel, gradient_checkpointing: bool) -> PreTrainedModel:
    """Switch gradient checkpointing on or off; it works only in training mode."""
    if gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise ValueError(
                f"gradient_checkpointing must be False for {type(model).__name__}, which has none; got True"
            )
        # transformers 5.23 renamed it.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model.train(gradient_checkpointing)


def is_checkpointed(model: PreTrainedModel) -> bool:
    """Whether gradient checkpointing is on; transformers 5.23 renamed the model's own property."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def _only_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    try:
        ids = tokenizer.encode(text, add_special_tokens=False)
    except Exception:
        # The tokenizers library raises a bare Exception for an unknown word if there is no unknown token.
        ids = []
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        raise ValueError(f"a stop string must be one token of the tokenizer; got {text!r}, tokens {ids}")
    return ids[0]
