"""Presets: named sets of settings. Two presets differ in their settings only, never in code.

A preset says which algorithm runs; an embedded task brings the sizes at which a small model learns it in minutes. What
is given wins over both.
"""

from __future__ import annotations

from vapo.config import Config
from vapo.effects import has_effect, refuse_ineffective

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

# Responses of the embedded tasks have about 40 tokens, where the paper's α = 0.05 gives a λ_policy of 0.5, and 20 where
# RL starts, where it gives 0: the advantages would hang on a weak critic alone. α = 1 gives the λ that the paper has at
# 800 tokens. The model is too small to feed more than two threads.
_EMBEDDED = {
    "alpha": 1.0,
    "threads": 2,
    "steps": 40,
    "num_prompts": 32,
    "group_size": 8,
    "mini_batches": 2,
    "max_new_tokens": 110,
    "micro_batch_tokens": 2048,
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


def preset(name: str = "vapo", **given: object) -> Config:
    """Build the config of a preset on a task, changed by what is given.

    Args:
        name: One of ``PRESETS``.
        given: Fields of :class:`vapo.config.Config`, ``task`` among them.

    Raises:
        ValueError: If there is no such preset, a field's value is wrong, or a field given has no effect beside the
            others.

    Example:
        >>> preset("ppo", seed=3).token_level_loss
        False
        >>> preset("grpo", lam_critic=0.9)
        Traceback (most recent call last):
        ValueError: lam_critic has no effect where advantage_estimator is 'group'; got 0.9
    """
    if name not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}; got {name!r}")
    sizes = EMBEDDED_SIZES.get(given.get("task", Config.task), {}) if given.get("model", Config.model) == "tiny" else {}
    config = Config(**sizes | PRESETS[name] | given)
    refuse_ineffective(config, given)
    # A size that the task brings and nothing uses falls back to its default, so that what is shown is what holds.
    used = {field: value for field, value in sizes.items() if has_effect(config, field)}
    return Config(**used | PRESETS[name] | given)
