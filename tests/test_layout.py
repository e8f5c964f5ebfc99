"""Imports run one way: each room knows those below it, `record` hangs beside, and no two modules import each other."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# From the top to the ground; those of one line know only what is below them, and their own room.
ROOMS = (
    ("__main__",),
    ("cli",),
    ("trainer",),
    ("evaluation",),
    ("learning",),
    ("rollout",),
    ("models",),
    ("tasks", "config", "presets", "types"),
)
HEIGHT = {room: -number for number, rooms in enumerate(ROOMS) for room in rooms}
GROUND = set(ROOMS[-1])
EXCEPTIONS = {
    # A package offers what a module of its own holds, imported when it is called.
    ("vapo.tasks", "vapo.tasks.loading"),
    # The first of several ranks opens the log.
    ("vapo.record.run_log", "vapo.models.sharding"),
}


def modules_of(package: str) -> dict[str, Path]:
    """Every module of a package by its dotted name."""
    files = {path.relative_to(ROOT).with_suffix(""): path for path in (ROOT / package).rglob("*.py")}
    return {".".join(name.parts).removesuffix(".__init__"): path for name, path in files.items()}


MODULES = modules_of("vapo") | modules_of("vapo_kernels") | modules_of("benchmarks")


@cache
def imports_of(module: str) -> frozenset[str]:
    """Modules of the repository that ``module`` imports anywhere but under TYPE_CHECKING."""
    return frozenset(_imports(module, ast.parse(MODULES[module].read_text(encoding="utf-8"))) - {module})


def _imports(module: str, node: ast.AST) -> set[str]:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return set().union(*(_imports(module, child) for child in node.orelse))
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{module}: imports are absolute"
        # `from a import b` imports a.b where that is a module, and from a itself where it is not.
        names = [name if name in MODULES else node.module for name in (f"{node.module}.{a.name}" for a in node.names)]
    else:
        return set().union(*(_imports(module, child) for child in ast.iter_child_nodes(node)))
    # A benchmark that runs as a script finds its neighbours without their package.
    neighbours = {f"benchmarks.{name}" for name in names} if module.startswith("benchmarks.") else set()
    return {name for name in {*names, *neighbours} if name in MODULES}


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def ways(prefix: str) -> list[tuple[str, str]]:
    return [
        (module, other) for module in MODULES if f"{module}.".startswith(f"{prefix}.") for other in imports_of(module)
    ]


def test_imports_are_found():
    assert "vapo.models.forward" in imports_of("vapo.learning.update")
    assert "vapo_kernels" in imports_of("vapo.integrations.verl")
    # Inside a function it counts as well.
    inner = ast.parse("def f():\n    from vapo.learning import step\n    import vapo.types")
    assert _imports("vapo.x", inner) == {"vapo.learning.step", "vapo.types"}
    hidden = ast.parse("if TYPE_CHECKING:\n    import vapo.types\nelse:\n    import vapo.config")
    assert _imports("vapo.x", hidden) == {"vapo.config"}


def test_rooms_import_downwards():
    wrong = []
    for module, other in ways("vapo"):
        room, below = room_of(module), room_of(other)
        if not below or not other.startswith("vapo.") or room == below or room == "integrations":
            continue
        if room == "record":
            allowed = below in GROUND
        elif below == "record":
            allowed = room in ("trainer", "cli")
        else:
            allowed = below in HEIGHT and (HEIGHT[below] < HEIGHT[room] or {room, below} <= GROUND)
        if not allowed and (module, other) not in EXCEPTIONS:
            wrong.append(f"{module} imports {other}")
    assert not wrong
    assert all(other in imports_of(module) for module, other in EXCEPTIONS)


def test_every_room_has_its_height():
    rooms = {room_of(module) for module in MODULES if module.startswith("vapo.")}
    assert rooms == {*HEIGHT, "record", "integrations"}


def test_integrations_need_the_kernels_and_the_rewards_alone():
    others = {other for _, other in ways("vapo.integrations")}
    assert {other for other in others if not other.startswith(("vapo_kernels", "vapo.integrations"))} <= {
        "vapo.rollout.rewards"
    }
    assert not any(other.startswith("vapo.") for other in imports_of("vapo.rollout.rewards"))


def test_the_kernels_know_nothing_of_the_trainer():
    assert not [way for way in ways("vapo_kernels") if not way[1].startswith("vapo_kernels")]


@pytest.mark.parametrize("package", ["vapo", "vapo_kernels"])
def test_no_module_imports_one_that_imports_it(package):
    modules = [module for module in MODULES if f"{module}.".startswith(f"{package}.")]
    graph = {module: {other for other in imports_of(module) if (module, other) not in EXCEPTIONS} for module in modules}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))
