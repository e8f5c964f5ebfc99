"""A file of settings for ``vapo train --config``: YAML, or a run's own config.json."""

from __future__ import annotations

import re
from pathlib import Path

import yaml


class _Loader(yaml.SafeLoader):
    """YAML 1.2's floats: PyYAML reads 1e-6, which has no point, as text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+"), list("-+.0123456789")
)


def read_settings_file(path: str | Path) -> dict[str, object]:
    """Read settings by the names of the fields of `Config`, and perhaps ``preset``.

    Args:
        path: YAML or JSON: one mapping, without levels. Lists stand for settings of several values.

    Raises:
        ValueError: If the file cannot be read or holds no mapping of names to values.
    """
    try:
        content = yaml.load(Path(path).read_bytes(), Loader=_Loader)
    except OSError as error:
        raise ValueError(f"--config must be a file of settings; got {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"--config must be a YAML or JSON file; got {path}: {reason}") from None
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ValueError(f"--config must map names of settings to values; got {type(content).__name__} in {path}")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
