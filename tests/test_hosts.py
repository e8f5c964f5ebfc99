"""A host that is missing or has changed ends in one error that names what works; this needs no host."""

import subprocess
import sys

import pytest

from vapo.integrations import SUPPORTED, UnsupportedHost, host_attribute


@pytest.mark.parametrize("host", SUPPORTED)
def test_missing_host_names_package_and_version(host):
    program = (
        "from importlib import metadata\n"
        "def missing(name): raise metadata.PackageNotFoundError(name)\n"
        "metadata.version = missing\n"
        f"import vapo.integrations.{host}"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == (
        f"vapo.integrations.UnsupportedHost: vapo.integrations.{host} supports {host} {SUPPORTED[host]}:"
        f" expected {host} to be installed, got no such package;"
        f" pip install {host}=={SUPPORTED[host]} gives the supported version"
    )


def test_changed_host_names_what_moved(monkeypatch):
    monkeypatch.setitem(SUPPORTED, "pytest", "1.0")
    assert host_attribute("pytest", "pytest:raises", ("expected_exception",)) is pytest.raises
    with pytest.raises(UnsupportedHost, match=r"supports pytest 1.0: .* has no attribute 'lowers' from pytest \d"):
        host_attribute("pytest", "pytest:lowers")
    with pytest.raises(UnsupportedHost, match=r"expected pytest:raises\(expected, match\), got \(expected_exception, "):
        host_attribute("pytest", "pytest:raises", ("expected", "match"))
    with pytest.raises(
        UnsupportedHost, match=r"No module named 'pytest.inside' from pytest \d.*pip install pytest==1.0"
    ):
        host_attribute("pytest", "pytest.inside:raises")
