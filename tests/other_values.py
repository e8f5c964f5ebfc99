"""Another value of a setting, of its kind."""

from __future__ import annotations

from vapo.config import Config

_CHOICES = {
    "dtype": "bfloat16",
    "attention": "eager",
    "advantage_estimator": "group",
    "truncated": "mask",
    "engine": "transformers",
}


def other_value(config: Config, name: str) -> object:
    """A value of the field ``name`` that ``config`` does not have; not every one goes with its other settings."""
    value = getattr(config, name)
    if name in _CHOICES:
        return _CHOICES[name]
    if name in ("overlong_buffer", "micro_batch_tokens"):
        return 7
    if name == "importance_cap":
        return 3.0
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return ("another",)
    if isinstance(value, str):
        return "another"
    return 0.625 if value is None or isinstance(value, float) else value + 1
