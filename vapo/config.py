"""The one configuration: every setting of a run, with its unit, its equation and the paper's value."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a training run. Equation numbers are those of docs/maths.md."""

    # Where things come from.
    task: str = "running-total"
    """Prompts and their verifier: "running-total" or "knights-knaves" (embedded), "reasoning-gym:NAME", or row files
    (.parquet or .jsonl, several with commas between)."""
    eval_task: str = ""
    """Held-out problems, named as ``task`` is; empty: the part of ``task`` that training never sees."""
    reward: str = ""
    """How responses are scored: empty for the task's own way, "math", or "file.py:function"."""
    reward_timeout: float = 10.0
    """Seconds that a verifier may take for one response, or a function in TRL's form for a batch, > 0; after that the
    reward is 0."""
    model: str = "tiny"
    """The policy: "tiny" for a small Qwen3 with random weights (embedded tasks only), else a hub id or a folder."""
    critic: str = ""
    """The critic's start: empty for a copy of the policy (after its warm start) under a head of zeros, else a hub id or
    folder of a value or reward model, or the folder of an earlier run."""
    seed: int = 0
    """Seed of every generator of the run; the same seed repeats a run bit for bit on the same machine."""

    # How it is computed.
    device: str = "auto"
    """Where the models live: "cpu", "cuda", or "auto" for a GPU if there is one."""
    threads: int = 0
    """CPU threads; 0 leaves PyTorch's own choice."""
    dtype: str = "float32"
    """What the models compute in: "float32" or "bfloat16". Parameters and optimiser states are float32 in both."""
    attention: str = "sdpa"
    """Attention of the models: "sdpa", "eager", or "flash_attention_2" (packed rows; needs the extra ``flash``)."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward: less memory, a third more compute."""
    micro_batch_tokens: int = 16384
    """Most tokens in a model at once, padding included; changes memory and speed, and results by rounding only."""

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

    advantage_estimator: str = "gae"
    """"gae" with a critic, or "group": a response's score less its group's mean, over its standard deviation."""
    use_values: bool = True
    """Let GAE see the critic's values; off: zeros in their place, all else as it is (the control for the critic)."""
    gamma: float = 1.0
    """Discount γ per token, in (0, 1] (Eq. 5, 6). Paper: 1.0."""
    lam_policy: float = 0.95
    """λ of the advantages where length_adaptive_gae is off, in [0, 1] (Eq. 5). Paper's baseline: 0.95."""
    lam_critic: float = 1.0
    """λ of the critic's target, in [0, 1] (Eq. 9). Paper: 1.0."""
    alpha: float = 0.05
    """α of Eq. 15, > 0; λ_policy is 0 up to 1/α tokens, so short responses want about 1. Paper: 0.05."""
    clip_low: float = 0.2
    """ε_low: the ratio is clipped below at 1 − ε_low, in (0, 1) (Eq. 3). Paper: 0.2."""
    clip_high: float = 0.28
    """ε_high: the ratio is clipped above at 1 + ε_high, >= clip_low (Eq. 3). Paper: 0.28."""
    dual_clip: float | None = None
    """Bound, > 1, of the ratio where the advantage is negative; None: none. Paper: not stated."""
    nll_weight: float = 0.1
    """μ: weight of the positive-example loss, >= 0 (Eq. 17). Paper: 0.1."""
    kl_weight: float = 0.0
    """Weight in the loss of the KL divergence (k3) from the policy before RL, >= 0. Paper: 0."""
    kl_reward_weight: float = 0.0
    """β: weight, in each token's reward, of its log-ratio to the policy before RL, >= 0 (Eq. 1, 2). Paper: 0."""
    entropy_weight: float = 0.0
    """Weight of the entropy bonus, >= 0. Paper: not stated."""
    value_clip: float | None = None
    """Values are clipped to this distance from their old ones, > 0; None: unclipped. Paper: not stated."""
    whiten_advantages: bool = True
    """Give the advantages of a step mean 0 and variance 1. Paper: not stated."""

    # Rollouts.
    steps: int = 200
    """RL steps: one rollout and its optimiser steps each."""
    num_prompts: int = 512
    """Prompts per RL step. Paper: 512."""
    group_size: int = 16
    """Responses per prompt. Paper: 16."""
    dynamic_sampling: bool = False
    """Sample further prompts in the place of those whose responses are all correct or all wrong. DAPO: on."""
    max_sampling_rounds: int = 5
    """Rounds of dynamic sampling in a step; then groups without a difference fill the batch."""
    max_new_tokens: int = 8192
    """Tokens after which a response is cut; it then counts as wrong."""
    truncated: str = "zero"
    """What the end of a cut response means: "zero" (V(s_l) = 0), "bootstrap" (the critic's V(s_l)), "penalty" (DAPO's
    overlong shaping besides), or "mask" (it does not train). Paper: not stated."""
    overlong_buffer: int | None = None
    """Last tokens before max_new_tokens over which the penalty grows from 0 to 1; None: a fifth of them, as in DAPO."""
    temperature: float = 1.0
    """Sampling temperature, > 0; the loss sees the same scaled logits. Paper: 1.0."""
    top_p: float = 1.0
    """Sample from the likeliest tokens of this mass, in (0, 1]; below 1 the ratio is biased by the mass cut off."""
    top_k: int = 0
    """Sample from so many likeliest tokens; 0: all. Biases the ratio as top_p does."""
    stop: tuple[str, ...] = ()
    """Tokens that end a response, besides the model's own."""
    rollout_batch_size: int = 0
    """Most responses that a rank samples at once, for the memory of their caches, but never less than those to one
    prompt; 0: all. Continuous batching (engine "transformers" on CUDA) fits itself to the memory instead."""
    engine: str = "loop"
    """What samples: "loop" (a cache that drops finished rows) or "transformers" (its own generation)."""

    # Optimisation.
    mini_batches: int = 16
    """Optimiser steps per pass, each on its own share of the responses. Paper: 16."""
    actor_epochs: int = 1
    """Passes of the policy over each rollout. Paper: not stated."""
    critic_epochs: int = 1
    """Passes of the critic over each rollout. Paper: not stated."""
    actor_lr: float = 1e-6
    """AdamW learning rate of the policy, > 0. Paper: 1e-6."""
    critic_lr: float = 2e-6
    """AdamW learning rate of the critic, in value pretraining too, > 0. Paper: 2e-6."""
    actor_lr_warmup: int = 0
    """RL steps over which the policy's learning rate rises linearly. Paper: a warm-up of unstated length."""
    critic_lr_warmup: int = 0
    """The same of the critic; in value pretraining, steps of that phase."""
    weight_decay: float = 0.01
    """AdamW weight decay of both models, >= 0. Paper: not stated."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm, > 0. Paper: not stated."""
    max_skipped_steps: int = 5
    """Optimiser steps of a model skipped in a row, for a loss or gradient that is not finite, that end the run."""

    # Value pretraining.
    pretraining_steps: int = 50
    """Most rollouts of value pretraining. Paper: 50 steps."""
    pretraining_prompts: int = 512
    """Responses per rollout of value pretraining, each to its own prompt."""
    pretraining_epochs: int = 1
    """Passes of the critic over each of these rollouts."""
    pretraining_mini_batches: int = 1
    """Optimiser steps per such pass."""
    pretraining_target: float = 0.5
    """Value pretraining stops early once the explained variance of a fresh rollout reaches this, in (0, 1]."""

    # Warm start of the tiny model.
    warm_start_steps: int = 0
    """Supervised steps on demonstrations before anything else; 0: none."""
    warm_start_clean_steps: int = 0
    """How many of these, the first ones, see faultless demonstrations only."""
    warm_start_steady_steps: int = 0
    """Supervised steps before the learning rate falls; the first 20, over which it rises, always count."""
    warm_start_batch: int = 64
    """Demonstrations per supervised step."""
    warm_start_lr: float = 3e-3
    """Peak AdamW learning rate of the supervised steps, > 0."""
    give_up: float = 0.3
    """Probability, before each step of a later demonstration, of giving up and guessing, in [0, 1]."""
    error: float = 0.05
    """Probability of a mistake in each step of a later demonstration, in [0, 1]."""

    # Evaluation and record.
    eval_problems: int = 200
    """Held-out problems of each evaluation."""
    eval_samples: int = 1
    """Responses to each of them, k of avg@k, pass@k and maj@k; one greedy response besides."""
    eval_top_p: float = 1.0
    """top_p of evaluation, in (0, 1]. Paper: 0.7."""
    eval_every: int = 10
    """RL steps between evaluations; there is always one before and one after."""
    logged_samples: int = 4
    """Responses written to samples.jsonl after each rollout."""
    checkpoint_every: int = 10
    """Steps of any phase between checkpoints; there is one at each phase's end besides."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept."""
    trackers: tuple[str, ...] = ()
    """Where metrics go besides metrics.jsonl: "tensorboard", "trackio", "wandb" (extra ``track``)."""

    def __post_init__(self) -> None:
        """Check every field and what must hold between them; the first that is wrong raises ValueError."""
        for field in fields(self):
            _check(field.name, str(field.type), getattr(self, field.name))
        for name, holds, relation in (
            (
                "clip_high",
                not self.clip_higher or self.clip_high >= self.clip_low,
                f">= clip_low = {self.clip_low}",
            ),
            (
                "overlong_buffer",
                self.truncated != "penalty" or self.used_overlong_buffer <= self.max_new_tokens,
                f"<= max_new_tokens = {self.max_new_tokens}",
            ),
            (
                "attention",
                self.attention != "flash_attention_2" or self.dtype == "bfloat16",
                "sdpa or eager where dtype is float32, which flash attention does not take",
            ),
            ("dual_clip", self.dual_clip is None or self.dual_clip > 1, "None or > 1"),
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
        ):
            if not holds:
                raise ValueError(f"{name} must be {relation}; got {getattr(self, name)}")
        if (self.advantage_estimator == "group" or self.dynamic_sampling) and self.responses_per_prompt < 2:
            raise ValueError(
                "group_size must be >= 2, with group_sampling, for advantage_estimator='group' and dynamic_sampling;"
                f" got {self.group_size} and group_sampling={self.group_sampling}"
            )

    @property
    def has_critic(self) -> bool:
        """Whether there is a critic: with GAE, not with group advantages."""
        return self.advantage_estimator == "gae"

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
    def pretrains_values(self) -> bool:
        """Whether the run has a phase of value pretraining."""
        return self.value_pretraining and self.has_critic

    @property
    def total_steps(self) -> int:
        """Steps of all phases together."""
        return self.warm_start_steps + self.pretrains_values * self.pretraining_steps + self.steps


_MAY_BE_ZERO = (
    *("seed", "threads", "steps", "warm_start_steps", "warm_start_clean_steps", "warm_start_steady_steps"),
    *("logged_samples", "top_k", "actor_lr_warmup", "critic_lr_warmup", "rollout_batch_size"),
)
_CHOICES = {
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("float32", "bfloat16"),
    "attention": ("sdpa", "eager", "flash_attention_2"),
    "advantage_estimator": ("gae", "group"),
    "truncated": ("zero", "bootstrap", "penalty", "mask"),
    "engine": ("loop", "transformers"),
}
_FROM_ZERO_TO_ONE = ("lam_policy", "lam_critic", "give_up", "error")
_SHARES = ("gamma", "pretraining_target", "top_p", "eval_top_p")
_NOT_NEGATIVE = ("clip_high", "nll_weight", "kl_weight", "kl_reward_weight", "entropy_weight", "weight_decay")


def _check(name: str, kind: str, value: object) -> None:
    """Raise ValueError if ``value`` is not one that the field ``name``, annotated ``kind``, may have."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    number = float(value) if is_int or isinstance(value, float) else math.nan
    if name in _CHOICES:
        expected, valid = f"one of {', '.join(_CHOICES[name])}", value in _CHOICES[name]
    elif kind == "str":
        expected, valid = (
            "a text",
            isinstance(value, str) and (bool(value) or name in ("eval_task", "reward", "critic")),
        )
    elif kind.startswith("tuple"):
        expected, valid = "a tuple of texts", isinstance(value, tuple) and all(isinstance(v, str) and v for v in value)
    elif kind == "bool":
        expected, valid = "True or False", isinstance(value, bool)
    elif kind == "int | None":
        expected, valid = "None or an integer >= 1", value is None or (is_int and value >= 1)
    elif kind == "int":
        least = 0 if name in _MAY_BE_ZERO else 1
        expected, valid = f"an integer >= {least}", is_int and value >= least
    elif name in _FROM_ZERO_TO_ONE:
        expected, valid = "a number in [0, 1]", 0 <= number <= 1
    elif name in _SHARES:
        expected, valid = "a number in (0, 1]", 0 < number <= 1
    elif name == "clip_low":
        expected, valid = "a number in (0, 1)", 0 < number < 1
    elif name in _NOT_NEGATIVE:
        expected, valid = "a finite number >= 0", 0 <= number < math.inf
    else:
        expected, valid = "a finite number > 0", 0 < number < math.inf or (kind.endswith("None") and value is None)
    if not valid:
        raise ValueError(f"{name} must be {expected}; got {value!r}")
