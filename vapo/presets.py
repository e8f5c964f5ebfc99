"""Presets: named sets of settings. Two presets differ in their settings only, never in code.

A preset says which algorithm runs; an embedded task brings the sizes at which a small model learns it in minutes.
Settings given explicitly override both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from vapo.config import Config

_PLAIN = {
    "value_pretraining": False,
    "decoupled_gae": False,
    "length_adaptive_gae": False,
    "clip_higher": False,
    "token_level_loss": False,
    "positive_nll": False,
}
_NO_CRITIC = _PLAIN | {"advantage_estimator": "group", "whiten_advantages": False}

PRESETS: dict[str, dict[str, object]] = {
    # All seven parts.
    "vapo": {},
    # VC-PPO (arXiv 2503.01491): PPO with a pretrained critic and decoupled λ.
    "vc_ppo": _PLAIN | {"value_pretraining": True, "decoupled_gae": True, "group_sampling": False},
    # Vanilla PPO: λ = 0.95 for both, symmetric clip, response-level mean, KL in the reward, one response to a prompt.
    "ppo": _PLAIN | {"group_sampling": False, "kl_reward_weight": 0.001},
    # GRPO (arXiv 2402.03300): advantages from the group, response-level mean, KL in the loss.
    "grpo": _NO_CRITIC | {"kl_weight": 0.001},
    # DAPO (arXiv 2503.14476): Clip-Higher, dynamic sampling, token-level mean, overlong shaping, no KL.
    "dapo": _NO_CRITIC
    | {"clip_higher": True, "token_level_loss": True, "dynamic_sampling": True, "truncated": "penalty"},
}

# Responses of the embedded tasks have about 40 tokens, and 20 at the start of RL, where the paper's α = 0.05 gives a
# λ_policy of 0.5 and 0: the advantages would depend on a weak critic alone. α = 1 gives the λ that the paper has at 800
# tokens. The model is too small for more than two threads.
_EMBEDDED = {
    "alpha": 1.0,
    "threads": 2,
    "steps": 40,
    "num_prompts": 32,
    "group_size": 8,
    "mini_batches": 2,
    "max_new_tokens": 110,
    "micro_batch_tokens": 2048,
    "dtype": "float32",
    "attention": "sdpa",
    "engine": "loop",
    "actor_lr": 3e-4,
    "critic_lr": 1e-3,
    "pretraining_steps": 8,
    "pretraining_prompts": 256,
    "pretraining_epochs": 2,
    "pretraining_mini_batches": 4,
    "warm_start_steps": 220,
    "warm_start_clean_steps": 150,
    "eval_problems": 400,
}

EMBEDDED_SIZES: dict[str, dict[str, object]] = {
    "running-total": _EMBEDDED,
    # Implications take longer to learn than sums.
    "knights-knaves": _EMBEDDED
    | {"warm_start_steps": 440, "warm_start_clean_steps": 380, "warm_start_steady_steps": 300, "steps": 30},
}


def preset(
    name: str = "vapo", *, last_phase: str = "vapo", from_file: Mapping[str, object] | None = None, **given: object
) -> Config:
    """Build the config of a preset on a task, overridden by the settings of a file, and these by the settings given.

    Args:
        name: One of ``PRESETS``.
        last_phase: Where the run ends: "vapo" or "value_pretraining".
        from_file: Fields of :class:`vapo.config.Config`. It may describe a whole run: those that only later phases use
            may stand in it, and so may defaults that have no effect.
        given: Fields of :class:`vapo.config.Config`, ``task`` among them.

    Raises:
        ValueError: If there is no such preset, a value is wrong, or a setting given has no effect with the others.

    Example:
        >>> preset("ppo", seed=3).token_level_loss
        False
        >>> preset("grpo", lam_critic=0.9)
        Traceback (most recent call last):
        ValueError: settings must have an effect; got lam_critic=0.9 where advantage_estimator is 'group'
    """
    if name not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}; got {name!r}")
    both = {**(from_file or {}), **given}
    sizes = EMBEDDED_SIZES.get(both.get("task", Config.task), {}) if both.get("model", Config.model) == "tiny" else {}
    config = Config(**sizes | PRESETS[name] | both)
    refuse_ineffective(config, given, last_phase=last_phase)
    defaults = sizes | PRESETS[name]
    changed = {k: v for k, v in both.items() if v not in (getattr(Config, k), defaults.get(k))}
    refuse_ineffective(config, changed)
    # A size of the task that nothing uses falls back to its default, so that what is shown is what holds.
    used = {field: value for field, value in sizes.items() if has_effect(config, field)}
    return Config(**used | PRESETS[name] | both)


class Rule(NamedTuple):
    """``fields`` have no effect where ``where`` holds, which ``reason`` says in words."""

    fields: tuple[str, ...]
    where: Callable[[Config], bool]
    reason: str


_PRETRAINING = (
    *("pretraining_steps", "pretraining_prompts", "pretraining_epochs"),
    *("pretraining_mini_batches", "pretraining_target"),
)
_GAE = (
    *("value_pretraining", "decoupled_gae", "length_adaptive_gae", "use_values", "gamma", "lam_policy", "lam_critic"),
    *("alpha", "value_clip", "critic", "critic_epochs", "critic_lr", "critic_lr_warmup", *_PRETRAINING),
)
_WARM_START = (
    *("warm_start_clean_steps", "warm_start_steady_steps", "warm_start_batch", "warm_start_lr", "give_up", "error"),
)

RULES = (
    Rule(_GAE, lambda c: c.advantage_estimator == "group", "advantage_estimator is 'group'"),
    Rule(_PRETRAINING, lambda c: not c.value_pretraining, "value_pretraining is off"),
    Rule(("alpha",), lambda c: not c.length_adaptive_gae, "length_adaptive_gae is off"),
    Rule(("lam_policy",), lambda c: c.length_adaptive_gae, "length_adaptive_gae is on"),
    Rule(("lam_critic",), lambda c: not c.decoupled_gae, "decoupled_gae is off"),
    Rule(("clip_high",), lambda c: not c.clip_higher, "clip_higher is off"),
    Rule(("nll_weight",), lambda c: not c.positive_nll, "positive_nll is off"),
    Rule(("engine_memory",), lambda c: c.engine not in ("vllm", "auto"), "engine is not 'vllm'"),
    Rule(("max_sampling_rounds",), lambda c: not c.dynamic_sampling, "dynamic_sampling is off"),
    Rule(("overlong_buffer",), lambda c: c.truncated != "penalty", "truncated is not 'penalty'"),
    Rule(("warm_start_steps", *_WARM_START), lambda c: c.model != "tiny", "model is not 'tiny'"),
    Rule(_WARM_START, lambda c: c.warm_start_steps == 0, "warm_start_steps is 0"),
)

# Settings that value pretraining, the warm start and the evaluation before RL do not use.
RL_ONLY = (
    *("decoupled_gae", "length_adaptive_gae", "clip_higher", "token_level_loss", "positive_nll", "group_sampling"),
    *("use_values", "lam_policy", "lam_critic", "alpha", "clip_low", "clip_high", "dual_clip", "nll_weight"),
    *("importance_cap", "kl_weight", "kl_reward_weight", "entropy_weight", "value_clip", "whiten_advantages"),
    *("steps", "num_prompts", "group_size", "dynamic_sampling", "max_sampling_rounds"),
    *("mini_batches", "actor_epochs", "critic_epochs", "actor_lr", "actor_lr_warmup"),
    *("eval_every", "logged_samples"),
)

# Settings that switch themselves off at 0.
_OFF_AT_0 = ("nll_weight", "warm_start_steps")


def has_effect(config: Config, field: str) -> bool:
    """Say whether ``field`` changes anything, given the other settings of ``config``.

    Example:
        >>> has_effect(Config(length_adaptive_gae=False), "alpha")
        False
    """
    return _reason_without_effect(config, field) is None


def refuse_ineffective(config: Config, given: Mapping[str, object], *, last_phase: str = "vapo") -> None:
    """Check that every setting given has an effect in ``config``; one that is switched off or empty may stand.

    Args:
        config: All settings of the run.
        given: Those given explicitly.
        last_phase: As :func:`preset` has it.

    Raises:
        ValueError: If some have none; it names all of these.
    """
    reasons = {
        field: _reason_without_effect(config, field)
        for field, value in given.items()
        if value not in ("", None) and value is not False and not (value == 0 and field in _OFF_AT_0)
    }
    if last_phase == "value_pretraining":
        reasons |= {field: "a run ends with value pretraining" for field in given if field in RL_ONLY}
    ineffective = [f"{field}={given[field]!r} where {reason}" for field, reason in reasons.items() if reason]
    if ineffective:
        raise ValueError(f"settings must have an effect; got {', '.join(ineffective)}")


def _reason_without_effect(config: Config, field: str) -> str | None:
    return next((rule.reason for rule in RULES if field in rule.fields and rule.where(config)), None)
