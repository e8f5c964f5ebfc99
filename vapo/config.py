"""The one configuration: every setting of a run, with its unit, its equation and the paper's value."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from vapo.tasks import TASK_NAMES


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a training run. Equation numbers are those of docs/maths.md."""

    task: str = "running-total"
    """Where prompts and their verifier come from."""
    seed: int = 0
    """Seed of every generator of the run; the same seed repeats a run bit for bit on the same machine."""
    device: str = "auto"
    """Where the models live: "cpu", "cuda", or "auto" for a GPU if there is one."""
    threads: int = 2
    """CPU threads; 0 leaves PyTorch's own choice. The embedded model is too small to feed more than 2."""

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
    nll_weight: float = 0.1
    """μ: weight of the positive-example loss, >= 0 (Eq. 17). Paper: 0.1."""
    value_clip: float | None = None
    """Values are clipped to this distance from their old ones, > 0; None: unclipped. Paper: not stated."""
    whiten_advantages: bool = True
    """Give the advantages of a step mean 0 and variance 1. Paper: not stated."""

    steps: int = 40
    """RL steps: one rollout and epochs × mini_batches optimiser steps each."""
    num_prompts: int = 32
    """Prompts per RL step. Paper: 512."""
    group_size: int = 8
    """Responses per prompt. Paper: 16."""
    max_new_tokens: int = 110
    """Tokens after which a response is cut; it then counts as wrong."""
    temperature: float = 1.0
    """Sampling temperature, > 0; the loss sees the same scaled logits. Paper: 1.0."""
    epochs: int = 1
    """Passes over each rollout. Paper: not stated."""
    mini_batches: int = 2
    """Optimiser steps per pass, each on its own share of the responses. Paper: 16."""
    actor_lr: float = 3e-4
    """AdamW learning rate of the policy, > 0. Paper: 1e-6."""
    critic_lr: float = 1e-3
    """AdamW learning rate of the critic, in value pretraining too, > 0. Paper: 2e-6."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm, > 0. Paper: not stated."""
    micro_batch_tokens: int = 2048
    """Most tokens in a model at once, padding included; changes memory and speed, and results by rounding only."""

    warm_start_steps: int = 220
    """Supervised steps on demonstrations before anything else; 0: start from random weights."""
    warm_start_clean_steps: int = 150
    """How many of these, the first ones, see faultless demonstrations only."""
    warm_start_batch: int = 64
    """Demonstrations per supervised step."""
    warm_start_lr: float = 3e-3
    """Peak AdamW learning rate of the supervised steps, > 0."""
    give_up: float = 0.3
    """Probability, before each step of a later demonstration, of giving up and guessing, in [0, 1]."""
    error: float = 0.05
    """Probability of a mistake in each step of a later demonstration, in [0, 1]."""

    pretraining_steps: int = 8
    """Most rollouts of value pretraining. Paper: 50 steps."""
    pretraining_prompts: int = 256
    """Responses per rollout of value pretraining, each to its own prompt."""
    pretraining_epochs: int = 2
    """Passes of the critic over each of these rollouts."""
    pretraining_mini_batches: int = 4
    """Optimiser steps per such pass."""
    pretraining_target: float = 0.5
    """Value pretraining stops early once the explained variance of a fresh rollout reaches this, in (0, 1]."""

    eval_problems: int = 400
    """Held-out problems of each evaluation, one response each."""
    eval_every: int = 10
    """RL steps between evaluations; there is always one before and one after."""
    logged_samples: int = 4
    """Responses written to samples.jsonl after each rollout."""

    def __post_init__(self) -> None:
        """Check every field; the first that is wrong raises ValueError."""
        for field in fields(self):
            _check(field.name, str(field.type), getattr(self, field.name))
        if self.clip_high < self.clip_low:
            raise ValueError(f"clip_high must be >= clip_low = {self.clip_low}; got {self.clip_high}")
        if self.warm_start_clean_steps > self.warm_start_steps:
            raise ValueError(
                f"warm_start_clean_steps must be <= warm_start_steps = {self.warm_start_steps};"
                f" got {self.warm_start_clean_steps}"
            )
        if self.mini_batches > self.num_responses:
            raise ValueError(
                f"mini_batches must be <= num_prompts × group_size = {self.num_responses}; got {self.mini_batches}"
            )
        if self.pretraining_mini_batches > self.pretraining_prompts:
            raise ValueError(
                f"pretraining_mini_batches must be <= pretraining_prompts = {self.pretraining_prompts};"
                f" got {self.pretraining_mini_batches}"
            )

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
    def total_steps(self) -> int:
        """Steps of all phases together."""
        return self.warm_start_steps + self.value_pretraining * self.pretraining_steps + self.steps


_MAY_BE_ZERO = ("seed", "threads", "warm_start_steps", "warm_start_clean_steps", "logged_samples")
_CHOICES = {"task": TASK_NAMES, "device": ("auto", "cpu", "cuda")}


def _check(name: str, kind: str, value: object) -> None:
    """Raise ValueError if ``value`` is not one that the field ``name``, annotated ``kind``, may have."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    number = float(value) if is_int or isinstance(value, float) else math.nan
    if name in _CHOICES:
        expected, valid = f"one of {', '.join(_CHOICES[name])}", value in _CHOICES[name]
    elif kind == "bool":
        expected, valid = "True or False", isinstance(value, bool)
    elif kind == "int":
        least = 0 if name in _MAY_BE_ZERO else 1
        expected, valid = f"an integer >= {least}", is_int and value >= least
    elif name in ("lam_policy", "lam_critic", "give_up", "error"):
        expected, valid = "a number in [0, 1]", 0 <= number <= 1
    elif name in ("gamma", "pretraining_target"):
        expected, valid = "a number in (0, 1]", 0 < number <= 1
    elif name == "clip_low":
        expected, valid = "a number in (0, 1)", 0 < number < 1
    elif name in ("clip_high", "nll_weight"):
        expected, valid = "a finite number >= 0", 0 <= number < math.inf
    else:
        expected, valid = "a finite number > 0", 0 < number < math.inf or (name == "value_clip" and value is None)
    if not valid:
        raise ValueError(f"{name} must be {expected}; got {value!r}")
