"""Which settings have an effect beside the others. One that has none is refused where it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from vapo.config import Config
from vapo.tasks import EMBEDDED_TASKS


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
    "warm_start_clean_steps",
    "warm_start_steady_steps",
    "warm_start_batch",
    "warm_start_lr",
    "give_up",
    "error",
)

RULES = (
    Rule(_GAE, lambda c: c.advantage_estimator == "group", "advantage_estimator is 'group'"),
    Rule(_PRETRAINING, lambda c: not c.value_pretraining, "value_pretraining is off"),
    Rule(("alpha",), lambda c: not c.length_adaptive_gae, "length_adaptive_gae is off"),
    Rule(("lam_policy",), lambda c: c.length_adaptive_gae, "length_adaptive_gae is on"),
    Rule(("lam_critic",), lambda c: not c.decoupled_gae, "decoupled_gae is off"),
    Rule(("clip_high",), lambda c: not c.clip_higher, "clip_higher is off"),
    Rule(("nll_weight",), lambda c: not c.positive_nll, "positive_nll is off"),
    Rule(("max_sampling_rounds",), lambda c: not c.dynamic_sampling, "dynamic_sampling is off"),
    Rule(("overlong_buffer",), lambda c: c.truncated != "penalty", "truncated is not 'penalty'"),
    Rule(("warm_start_steps", *_WARM_START), lambda c: c.model != "tiny", "model is not 'tiny'"),
    Rule(_WARM_START, lambda c: c.warm_start_steps == 0, "warm_start_steps is 0"),
    Rule(
        ("reward_timeout",),
        lambda c: c.task in EMBEDDED_TASKS and c.reward != "math" and ":" not in c.reward,
        "an embedded task verifies responses itself",
    ),
)

# What value pretraining, and the warm start and the evaluation before it, never look at.
RL_ONLY = (
    *("decoupled_gae", "length_adaptive_gae", "clip_higher", "token_level_loss", "positive_nll", "group_sampling"),
    *("use_values", "lam_policy", "lam_critic", "alpha", "clip_low", "clip_high", "dual_clip", "nll_weight"),
    *("kl_weight", "kl_reward_weight", "entropy_weight", "value_clip", "whiten_advantages"),
    *("steps", "num_prompts", "group_size", "dynamic_sampling", "max_sampling_rounds"),
    *("mini_batches", "actor_epochs", "critic_epochs", "actor_lr", "actor_lr_warmup"),
    *("eval_every", "logged_samples"),
)


def has_effect(config: Config, field: str) -> bool:
    """Say whether ``field`` changes anything beside the other settings of ``config``.

    Example:
        >>> has_effect(Config(length_adaptive_gae=False), "alpha")
        False
    """
    return not any(field in rule.fields and rule.where(config) for rule in RULES)


def refuse_ineffective(config: Config, given: Mapping[str, object]) -> None:
    """Check that every setting given has an effect in ``config``; one that switches something off may stand.

    Raises:
        ValueError: If one has none.
    """
    for rule in RULES:
        for field in rule.fields:
            if field in given and not _is_off(field, given[field]) and rule.where(config):
                raise ValueError(f"{field} has no effect where {rule.reason}; got {given[field]!r}")
    if config.truncated == "bootstrap" and not (config.has_critic and config.use_values):
        raise ValueError(
            "truncated = 'bootstrap' has no effect without a critic whose values are used; got"
            f" advantage_estimator={config.advantage_estimator!r}, use_values={config.use_values}"
        )


def refuse_rl_only(given: Mapping[str, object]) -> None:
    """Check that every setting given has an effect in a run that ends with value pretraining.

    Raises:
        ValueError: If one has none.
    """
    for field, value in given.items():
        if field in RL_ONLY:
            raise ValueError(f"{field} has no effect where a run ends with value pretraining; got {value!r}")


def _is_off(field: str, value: object) -> bool:
    if value in (None, ""):
        return True
    if value is False:
        # Zeros in the place of values are something to ask for.
        return field != "use_values"
    return value == 0 and field in ("nll_weight", "warm_start_steps")
