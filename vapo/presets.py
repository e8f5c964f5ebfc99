"""Presets: named sets of overrides. Two presets differ in their settings only, never in code."""

from __future__ import annotations

from vapo.config import Config

PPO = {
    "value_pretraining": False,
    "decoupled_gae": False,
    "length_adaptive_gae": False,
    "clip_higher": False,
    "token_level_loss": False,
    "positive_nll": False,
    "group_sampling": False,
}

PRESETS = {
    # All seven parts, at the size of the embedded job. Its responses have about 40 tokens, where the paper's α = 0.05
    # gives a λ_policy of 0.5, and 20 where RL starts, where it gives 0: the advantages would hang on a weak critic
    # alone. α = 1 gives the λ that the paper has at 800 tokens.
    "embedded": {"alpha": 1.0},
    # All seven parts with the paper's α; meant for responses of hundreds of tokens and more.
    "vapo": {},
    # VC-PPO (arXiv 2503.01491): PPO with a pretrained critic and decoupled λ.
    "vc_ppo": PPO | {"value_pretraining": True, "decoupled_gae": True},
    # Vanilla PPO: λ = 0.95 for both, symmetric clip, response-level mean, one response to a prompt.
    "ppo": PPO,
}


def preset(name: str, **overrides: object) -> Config:
    """Build the config of a preset, changed by ``overrides``.

    Raises:
        ValueError: If there is no such preset, or a field's value is wrong.

    Example:
        >>> preset("ppo", seed=3).token_level_loss
        False
    """
    if name not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}; got {name!r}")
    return Config(**PRESETS[name] | overrides)
