"""The one configuration: every setting of a run, with its unit, its equation and the paper's value."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Annotated, Literal, TypeVar

try:
    from pydantic import (
        ConfigDict,
        Field,
        NonNegativeFloat,
        NonNegativeInt,
        PositiveFloat,
        PositiveInt,
        TypeAdapter,
        ValidationError,
    )
    from pydantic.dataclasses import dataclass
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("the trainer needs pydantic: pip install 'vapo[train]'", name="pydantic") from error

Attention = Literal["auto", "sdpa", "eager", "flash_attention_2"]
Engine = Literal["auto", "loop", "transformers", "vllm"]
Text = Annotated[str, Field(min_length=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Probability = Annotated[float, Field(ge=0, le=1)]

_Settings = TypeVar("_Settings", bound=type)


def _with_errors_in_one_sentence(settings: _Settings) -> _Settings:
    """Let the constructor of a pydantic dataclass raise a plain ValueError of one sentence."""
    checked = settings.__init__

    @wraps(checked)
    def __init__(self: object, **given: object) -> None:
        try:
            checked(self, **given)
        except ValidationError as error:
            raise ValueError(_sentence(error)) from None

    settings.__init__ = __init__
    return settings


def _sentence(error: ValidationError) -> str:
    """Name the first wrong setting, what was expected and what came; or every setting that there is not."""
    errors = error.errors(include_url=False)
    unknown = sorted(str(each["loc"][0]) for each in errors if each["type"] == "unexpected_keyword_argument")
    if unknown:
        return f"settings must be fields of Config; got {', '.join(unknown)}"
    first = errors[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    # Of a field that takes several types the location names a type too.
    field, *inner = first["loc"] or ["settings"]
    name = ".".join([str(field), *(str(part) for part in inner if isinstance(part, int))])
    _, should, expected = first["msg"].partition(" should ")
    return f"{name} must {expected}; got {first['input']!r}" if should else f"{name}: {first['msg']}"


@_with_errors_in_one_sentence
@dataclass(
    frozen=True,
    kw_only=True,
    config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True),
)
class Config:
    """Settings of a training run. Equation numbers are those of docs/maths.md.

    Every field is checked, and what must hold between them; what is wrong raises a ValueError that names the setting.

    Example:
        >>> Config(gamma=1.5)
        Traceback (most recent call last):
        ValueError: gamma must be less than or equal to 1; got 1.5
    """

    # Data and models.
    task: Text = "running-total"
    """Prompts and their verifier: "running-total" or "knights-knaves" (embedded), "reasoning-gym:NAME", or row files
    (.parquet or .jsonl, separated by commas)."""
    eval_task: str = ""
    """Held-out problems, in the form of ``task``; empty: the part of ``task`` that training never sees."""
    reward: str = ""
    """How responses are scored: empty for the task's own verifier, "math", or "file.py:function"."""
    reward_timeout: PositiveFloat = 10.0
    """Time limit in seconds, > 0, of a verifier for one response, or of a function in TRL's form for a batch; after it
    the reward is 0."""
    model: Text = "tiny"
    """The policy: "tiny" for a small Qwen3 with random weights (embedded tasks only), else a hub id or a folder."""
    critic: str = ""
    """Initial critic: empty for a copy of the policy (after its warm start) with a zero head, else a hub id or folder
    of a value or reward model, or the folder of an earlier run."""
    seed: NonNegativeInt = 0
    """Seed of all random generators; the same seed repeats a run bit for bit on the same machine."""

    # Hardware.
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the models: "cpu", "cuda", or "auto" for a GPU if there is one."""
    threads: NonNegativeInt = 0
    """CPU threads; 0: PyTorch's default."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the models: "float32" or "bfloat16". Parameters and optimiser states are float32 in both. "auto":
    bfloat16 on a GPU that has it, float32 on a CPU."""
    attention: Attention = "auto"
    """Attention implementation: "sdpa", "eager", or "flash_attention_2" (packed rows; needs the extra ``flash``).
    "auto": flash attention on a GPU where it is installed, else sdpa."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward: less memory, a third more compute."""
    shard_ranks: NonNegativeInt = 0
    """Ranks that hold one copy of each model together, such as the GPUs of a node; more ranks hold replicas. It divides
    the number of ranks; 0: all ranks. Affects memory and speed, and results by rounding only."""
    micro_batch_tokens: PositiveInt | Literal["auto"] = "auto"
    """Most tokens in a forward pass, padding included; affects memory and speed, and results by rounding only. "auto":
    what fits into a GPU's free memory, 16,384 on a CPU."""
    reduce_gradients: Literal["micro_batch", "mini_batch"] = "micro_batch"
    """When ranks sum their gradients: after each "micro_batch", or once a "mini_batch", for which each rank holds whole
    float32 gradients, 4 bytes a parameter. Affects memory and speed, and results by rounding only."""

    # The seven parts of VAPO.
    value_pretraining: bool = True
    """Fit the critic to a fixed policy's Monte-Carlo returns before RL. Paper: on."""
    decoupled_gae: bool = True
    """Compute returns with lam_critic (Eq. 9); off: with the policy's λ. Paper: on."""
    length_adaptive_gae: bool = True
    """λ_policy = 1 − 1/(α l) for each response (Eq. 15); off: lam_policy for all. Paper: on."""
    clip_higher: bool = True
    """Clip the ratio above at 1 + clip_high (Eq. 3); off: at 1 + clip_low. Paper: on."""
    token_level_loss: bool = True
    """Average the policy loss over all tokens of the step; off: over each response first. Paper: on."""
    positive_nll: bool = True
    """Imitate the correct responses as well (Eq. 16, 17); off: weight 0. Paper: on."""
    group_sampling: bool = True
    """Sample group_size responses to each prompt; off: as many responses, each to its own prompt. Paper: on."""

    advantage_estimator: Literal["gae", "group"] = "gae"
    """"gae" with a critic, or "group": a response's score less its group's mean, over its standard deviation."""
    use_values: bool = True
    """Give GAE the critic's values; off: zeros instead, all else unchanged (the control for the critic)."""
    gamma: Share = 1.0
    """Discount γ per token, in (0, 1] (Eq. 5, 6). Paper: 1.0."""
    lam_policy: Probability = 0.95
    """λ of the advantages where length_adaptive_gae is off, in [0, 1] (Eq. 5). Paper's baseline: 0.95."""
    lam_critic: Probability = 1.0
    """λ of the critic's target, in [0, 1] (Eq. 9). Paper: 1.0."""
    alpha: PositiveFloat = 0.05
    """α of Eq. 15, > 0; λ_policy is 0 up to 1/α tokens, so short responses want about 1. Paper: 0.05."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """ε_low: the ratio is clipped below at 1 − ε_low, in (0, 1) (Eq. 3). Paper: 0.2."""
    clip_high: NonNegativeFloat = 0.28
    """ε_high: the ratio is clipped above at 1 + ε_high, >= clip_low (Eq. 3). Paper: 0.28."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound, > 1, of the ratio where the advantage is negative; None: none. Paper: not stated."""
    nll_weight: NonNegativeFloat = 0.1
    """μ: weight of the positive-example loss, >= 0 (Eq. 17). Paper: 0.1."""
    kl_weight: NonNegativeFloat = 0.0
    """Weight in the loss of the KL divergence (k3) from the policy before RL, >= 0. Paper: 0."""
    kl_reward_weight: NonNegativeFloat = 0.0
    """β: weight, in each token's reward, of its log-ratio to the policy before RL, >= 0 (Eq. 1, 2). Paper: 0."""
    entropy_weight: NonNegativeFloat = 0.0
    """Weight of the entropy bonus, >= 0. Paper: not stated."""
    value_clip: PositiveFloat | None = None
    """Values are clipped to within this distance, > 0, of the old values; None: unclipped. Paper: not stated."""
    whiten_advantages: bool = True
    """Give the advantages of a step mean 0 and variance 1. Paper: not stated."""

    # Rollouts.
    steps: NonNegativeInt = 200
    """RL steps, each one rollout and its optimiser steps."""
    num_prompts: PositiveInt = 512
    """Prompts per RL step. Paper: 512."""
    group_size: PositiveInt = 16
    """Responses per prompt. Paper: 16."""
    dynamic_sampling: bool = False
    """Replace prompts whose responses are all correct or all wrong by further prompts. DAPO: on."""
    max_sampling_rounds: PositiveInt = 5
    """Most rounds of dynamic sampling in a step; after them uninformative groups fill the batch."""
    max_new_tokens: PositiveInt = 8192
    """Length at which a response is truncated; it then counts as wrong."""
    truncated: Literal["zero", "bootstrap", "penalty", "mask"] = "zero"
    """What follows a truncated response: "zero" (V(s_l) = 0), "bootstrap" (the critic's V(s_l)), "penalty" (zero, and
    DAPO's overlong shaping), or "mask" (it is left out of training). Paper: not stated."""
    overlong_buffer: PositiveInt | None = None
    """Last tokens before max_new_tokens over which the penalty grows from 0 to 1; None: a fifth of them, as in DAPO."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature, > 0; the loss uses the same scaled logits. Paper: 1.0."""
    top_p: Share = 1.0
    """Sample from the most likely tokens of this total probability, in (0, 1]; below 1 the ratio is biased."""
    top_k: NonNegativeInt = 0
    """Sample from this many most likely tokens; 0: all. Biases the ratio as top_p does."""
    stop: tuple[Text, ...] = ()
    """Tokens that end a response, in addition to the model's own."""
    rollout_batch_size: NonNegativeInt = 0
    """Most responses that a rank samples at once, which bounds the memory of their caches, but at least those to one
    prompt; 0: all. Continuous batching (engine "transformers" on CUDA) adapts to the free memory instead."""
    engine: Engine = "auto"
    """Sampling engine: "loop" (a cache that drops finished rows), "transformers" (its own generation) or "vllm" (in the
    trainer's process; needs the extra ``vllm``). "auto": on a GPU vllm where it is installed, else transformers; on a
    CPU loop."""
    engine_memory: Share = 0.5
    """Share of a GPU's memory for the weights and the cache of vLLM, in (0, 1]; free while the trainer computes."""
    importance_cap: PositiveFloat | Literal["auto"] | None = "auto"
    """Most that a token's importance weight may be, > 0 (Eq. 18): it corrects for an engine whose log-probs are not the
    trainer's. None: no weights; "auto": 2.0 with vLLM, none with the other engines. Paper: not stated."""

    # Optimisation.
    mini_batches: PositiveInt = 16
    """Optimiser steps per epoch, each on its own share of the responses. Paper: 16."""
    actor_epochs: PositiveInt = 1
    """Epochs of the policy over each rollout. Paper: not stated."""
    critic_epochs: PositiveInt = 1
    """Epochs of the critic over each rollout. Paper: not stated."""
    actor_lr: PositiveFloat = 1e-6
    """AdamW learning rate of the policy, > 0. Paper: 1e-6."""
    critic_lr: PositiveFloat = 2e-6
    """AdamW learning rate of the critic, in value pretraining too, > 0. Paper: 2e-6."""
    actor_lr_warmup: NonNegativeInt = 0
    """RL steps over which the policy's learning rate rises linearly. Paper: a warm-up of unstated length."""
    critic_lr_warmup: NonNegativeInt = 0
    """The same for the critic; in value pretraining, steps of that phase."""
    weight_decay: NonNegativeFloat = 0.01
    """AdamW weight decay of both models, >= 0. Paper: not stated."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this norm, > 0. Paper: not stated."""
    max_skipped_steps: PositiveInt = 5
    """Optimiser steps of a model skipped in a row, for a loss or gradient that is not finite, that end the run."""

    # Value pretraining.
    pretraining_steps: PositiveInt = 50
    """Most steps of value pretraining, each with a rollout of its own. Paper: 50."""
    pretraining_prompts: PositiveInt = 512
    """Responses per step of value pretraining, each to its own prompt."""
    pretraining_epochs: PositiveInt = 1
    """Epochs of the critic over each of these rollouts."""
    pretraining_mini_batches: PositiveInt = 1
    """Optimiser steps per such epoch."""
    pretraining_target: Share = 0.5
    """Explained variance of a fresh rollout, in (0, 1], at which value pretraining stops early."""

    # Warm start of the tiny model.
    warm_start_steps: NonNegativeInt = 0
    """Supervised steps on demonstrations before all other phases; 0: none."""
    warm_start_clean_steps: NonNegativeInt = 0
    """How many of these, from the first, use demonstrations without mistakes."""
    warm_start_steady_steps: NonNegativeInt = 0
    """Supervised steps before the learning rate falls, at least the first 20, over which it rises."""
    warm_start_batch: PositiveInt = 64
    """Demonstrations per supervised step."""
    warm_start_lr: PositiveFloat = 3e-3
    """Peak AdamW learning rate of the supervised steps, > 0."""
    give_up: Probability = 0.3
    """Probability, before each step of a later demonstration, of giving up and guessing, in [0, 1]."""
    error: Probability = 0.05
    """Probability of a mistake in each step of a later demonstration, in [0, 1]."""

    # Evaluation and record.
    eval_problems: PositiveInt = 200
    """Held-out problems of each evaluation."""
    eval_samples: PositiveInt = 1
    """Responses to each of them, the k of avg@k, pass@k and maj@k, in addition to a greedy one."""
    eval_top_p: Share = 1.0
    """top_p of evaluation, in (0, 1]. Paper: 0.7."""
    eval_every: PositiveInt = 10
    """RL steps between evaluations; the policy before and after RL is always evaluated."""
    logged_samples: NonNegativeInt = 4
    """Responses written to samples.jsonl after each rollout."""
    checkpoint_every: PositiveInt = 10
    """Steps of any phase between checkpoints; the end of each phase has one too."""
    keep_checkpoints: PositiveInt = 2
    """How many checkpoints are kept, the newest."""
    trackers: tuple[Text, ...] = ()
    """Where metrics go in addition to metrics.jsonl: "tensorboard", "trackio", "wandb" (extra ``track``)."""

    def __post_init__(self) -> None:
        """Check what must hold between the fields; the first that is wrong raises ValueError."""
        for name, holds, relation in (
            ("clip_high", not self.clip_higher or self.clip_high >= self.clip_low, f">= clip_low = {self.clip_low}"),
            (
                "overlong_buffer",
                self.truncated != "penalty" or self.used_overlong_buffer <= self.max_new_tokens,
                f"<= max_new_tokens = {self.max_new_tokens}",
            ),
            (
                "attention",
                self.attention != "flash_attention_2" or self.dtype != "float32",
                "sdpa or eager where dtype is float32, which flash attention does not take",
            ),
            (
                "truncated",
                self.truncated != "bootstrap" or (self.has_critic and self.use_values),
                "zero, penalty or mask without a critic whose values are used",
            ),
            (
                "warm_start_clean_steps",
                # Without a warm start the clean steps have no effect; a preset refuses them for that if they are given.
                self.warm_start_clean_steps <= self.warm_start_steps or self.warm_start_steps == 0,
                f"<= warm_start_steps = {self.warm_start_steps}",
            ),
            (
                "warm_start_steady_steps",
                self.warm_start_steady_steps < self.warm_start_steps or self.warm_start_steps == 0,
                f"< warm_start_steps = {self.warm_start_steps}",
            ),
            (
                "mini_batches",
                self.mini_batches <= self.num_responses,
                f"<= num_prompts × group_size = {self.num_responses}",
            ),
            (
                "pretraining_mini_batches",
                self.pretraining_mini_batches <= self.pretraining_prompts,
                f"<= pretraining_prompts = {self.pretraining_prompts}",
            ),
            (
                "group_size",
                self.responses_per_prompt > 1 or not (self.advantage_estimator == "group" or self.dynamic_sampling),
                ">= 2, with group_sampling, for advantage_estimator='group' and dynamic_sampling",
            ),
        ):
            if not holds:
                raise ValueError(f"{name} must be {relation}; got {getattr(self, name)}")

    @classmethod
    def from_json(cls, path: Path | str, *, unknown: Literal["refuse", "drop"] = "refuse") -> Config:
        """Read the ``config.json`` of a run.

        Args:
            path: The file.
            unknown: What becomes of settings that this version does not know: "refuse" or "drop".

        Raises:
            ValueError: If the file is missing or no JSON object, a value is wrong, or an unknown setting is refused.
        """
        extra = {"refuse": "forbid", "drop": "ignore"}[unknown]
        try:
            return TypeAdapter(cls).validate_json(Path(path).read_bytes(), extra=extra)
        except OSError as error:
            raise ValueError(f"{path} must hold the settings of a run; got: {error.strerror}") from None
        except ValidationError as error:
            raise ValueError(f"{path}: {_sentence(error)}") from None

    @property
    def used_micro_batch_tokens(self) -> int:
        """Tokens of a micro-batch: micro_batch_tokens, or 16,384 as long as it is "auto"."""
        return 16384 if self.micro_batch_tokens == "auto" else self.micro_batch_tokens

    @property
    def has_critic(self) -> bool:
        """Whether there is a critic: with GAE, not with group advantages."""
        return self.advantage_estimator == "gae"

    @property
    def needs_group(self) -> bool:
        """Whether a single process forms a process group too: mixed precision needs sharding, and vLLM has a group."""
        return self.dtype == "bfloat16" or self.engine == "vllm"

    @property
    def has_reference(self) -> bool:
        """Whether a frozen copy of the policy before RL is needed."""
        return self.kl_weight > 0 or self.kl_reward_weight > 0

    @property
    def num_responses(self) -> int:
        """Responses per RL step, with group sampling or without."""
        return self.num_prompts * self.group_size

    @property
    def responses_per_prompt(self) -> int:
        """Responses to each prompt of an RL step: group_size, or 1 without group sampling."""
        return self.group_size if self.group_sampling else 1

    @property
    def used_clip_high(self) -> float:
        """ε_high of Eq. 3: clip_high, or clip_low without Clip-Higher."""
        return self.clip_high if self.clip_higher else self.clip_low

    @property
    def used_nll_weight(self) -> float:
        """μ of Eq. 17: nll_weight, or 0 without the positive-example loss."""
        return self.nll_weight if self.positive_nll else 0.0

    @property
    def used_overlong_buffer(self) -> int:
        """Tokens over which the overlong penalty grows: overlong_buffer, or a fifth of the limit."""
        return self.overlong_buffer or max(1, self.max_new_tokens // 5)

    @property
    def used_importance_cap(self) -> float | None:
        """Cap of Eq. 18: importance_cap, or where it is "auto" 2.0 for vLLM and none for the other engines."""
        if self.importance_cap == "auto":
            return 2.0 if self.engine == "vllm" else None
        return self.importance_cap

    @property
    def pretrains_values(self) -> bool:
        """Whether the run has a phase of value pretraining."""
        return self.value_pretraining and self.has_critic

    @property
    def total_steps(self) -> int:
        """Steps of all phases together."""
        return self.warm_start_steps + self.pretrains_values * self.pretraining_steps + self.steps
