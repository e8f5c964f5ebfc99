"""The ops inside other trainers: one module a host, imported only where that host is installed.

Each module relies on private parts of its host, so it looks at them when it is imported: what has moved ends in one
`UnsupportedHost` that names the version that works, never in a wrong number later.
"""

from __future__ import annotations

import inspect
from importlib import import_module, metadata
from typing import Any

SUPPORTED = {"verl": "0.9.1", "trl": "1.16.0"}


class UnsupportedHost(ImportError):
    """The host is not installed, or is a version whose functions are not those that the integration was written for."""


def host_attribute(host: str, path: str, parameters: tuple[str, ...] | None = None) -> Any:
    """Import what ``path`` names in an installed host and check that it is still what it was.

    Args:
        host: Distribution, a key of ``SUPPORTED``.
        path: Module, a colon, and the attribute inside it, such as ``"trl:GRPOTrainer.compute_loss"``.
        parameters: Names that the function's parameters must begin with, or None where it is no function.

    Raises:
        UnsupportedHost: If the host is missing, or the attribute is missing or takes other parameters.
    """
    module, _, attribute = path.partition(":")
    try:
        installed = metadata.version(host)
    except metadata.PackageNotFoundError:
        raise UnsupportedHost(_message(host, f"expected {host} to be installed, got no such package")) from None
    try:
        found = import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise UnsupportedHost(_message(host, f"expected {path}, got {error} from {host} {installed}")) from error
    if parameters is not None:
        names = tuple(inspect.signature(found).parameters)
        if names[: len(parameters)] != parameters:
            raise UnsupportedHost(
                _message(host, f"expected {path}{_listed(parameters)}, got {_listed(names)} from {host} {installed}")
            )
    return found


def _message(host: str, problem: str) -> str:
    return (
        f"vapo.integrations.{host} supports {host} {SUPPORTED[host]}: {problem};"
        f" pip install {host}=={SUPPORTED[host]} gives the supported version"
    )


def _listed(names: tuple[str, ...]) -> str:
    return f"({', '.join(names)})"
