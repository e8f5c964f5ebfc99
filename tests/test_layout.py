"""Imports go one way: down the list of rooms, never up, and never round in a circle."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# From the ground up; a room may import itself and what stands before it.
ROOMS = [
    *(
        "vapo.types",
        "vapo.config",
        "vapo.tasks",
        "vapo.settings_file",
        "vapo.presets",
        "vapo.models",
        "vapo.rollout",
        "vapo.learning",
    ),
    *("vapo.evaluation", "vapo.record", "vapo.stopping", "vapo.trainer", "vapo.cli", "vapo.__main__"),
]
# Who may import a room, where that is not everything above it, and what a room may import, where that is not all below.
ONLY = {"vapo.record": {"vapo.record", "vapo.trainer", "vapo.cli"}}
BELOW = {"vapo.record": {"vapo.record", "vapo.types", "vapo.config", "vapo.presets", "vapo.models"}}
# What the adapters may know of the trainer: they run where it is not installed.
FOR_INTEGRATIONS = {"vapo.integrations", "vapo.rollout.rewards"}


def modules(package: str) -> dict[str, Path]:
    """Names and files of the modules of a package."""
    paths = sorted((ROOT / package).rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return dict(zip(names, paths, strict=True))


ALL = {name: path for package in ("vapo", "vapo_kernels", "benchmarks") for name, path in modules(package).items()}


def imports(name: str) -> set[str]:
    """The modules of this repository that a module imports, inside functions too, but not for annotations alone."""
    tree, found = ast.parse(ALL[name].read_text()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return {each for each in found if each in ALL and each != name}


def room(name: str) -> str:
    return ".".join(name.split(".")[:2])


@pytest.mark.parametrize("name", [name for name in ALL if room(name) in ROOMS])
def test_a_room_imports_what_is_below_it(name):
    own = room(name)
    for other in {room(each) for each in imports(name)} & set(ROOMS):
        assert ROOMS.index(other) <= ROOMS.index(own), f"{name} imports {other}, which is above it"
        assert other in BELOW.get(own, {other}), f"{name} imports {other}"
        assert own in ONLY.get(other, {own}), f"{name} imports {other}, which is for {sorted(ONLY[other])}"
    assert not any(each.startswith("vapo.integrations") for each in imports(name))


def test_every_module_has_a_room():
    rooms = {room(name) for name in modules("vapo")} - {"vapo", "vapo.integrations"}
    assert rooms == set(ROOMS)


def test_ops_and_adapters_know_nothing_of_the_trainer():
    for name in modules("vapo_kernels"):
        assert all(each.startswith("vapo_kernels") for each in imports(name)), name
    for name in (each for each in ALL if each.startswith("vapo.integrations")):
        of_the_trainer = {each for each in imports(name) if each.startswith("vapo.")} - {"vapo.rollout"}
        assert all(each in FOR_INTEGRATIONS or room(each) in FOR_INTEGRATIONS for each in of_the_trainer), name


def test_no_circles():
    """Modules that can be removed one after the other, each when all that it imports are gone."""
    # A package's face hands names on, and each of its modules is reached through it.
    left = {name: {each for each in imports(name) if not name.startswith(f"{each}.")} for name in ALL}
    while ready := {name for name, others in left.items() if not others & left.keys()}:
        left = {name: others for name, others in left.items() if name not in ready}
    assert not left, f"these import each other: {sorted(left)}"


def test_no_function_shadows_the_module_of_its_name():
    """``vapo_kernels.x`` is a public op, and ``vapo_kernels.ops.x`` the module that it is in."""
    public = {alias.asname or alias.name for node in ast.parse(ALL["vapo_kernels"].read_text()).body
              if isinstance(node, ast.ImportFrom) for alias in node.names}  # fmt: skip
    assert len(public) > 10
    for package in ALL:
        inside = {name.rpartition(".")[2] for name in ALL if name.rpartition(".")[0] == package}
        tree = ast.parse(ALL[package].read_text()) if ALL[package].name == "__init__.py" else ast.Module([], [])
        handed_on = {alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom)
                     for alias in node.names}  # fmt: skip
        assert not inside & handed_on, f"{package} hands on {inside & handed_on}, which are modules too"
