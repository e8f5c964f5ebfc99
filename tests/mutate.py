"""Break the kernels one line at a time: each break must fail a test.

    make mutate                                      every kernel
    make mutate ARGS='--file gae --limit 20'         some of them

One mutation at a time is made inside the ``@triton.jit`` functions of a copy of the tree (an operator, a comparison,
a constant, an index, a mask, a minimum), and the tests of that file run on it, interpreted. A mutant that no test fails
is a survivor, and the exit code is 1; one that still runs after more than twice the tests' CPU time is noticed. One
that computes the same is not run: ``mutants_explained.txt`` says why.
"""

import argparse
import ast
import math
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
EXPLAINED = Path(__file__).with_name("mutants_explained.txt")
# Tests of the faults of logits: broad, so the last to be asked.
FAULTS = [
    *(f"faults_{kind}" for kind in ("terms", "infinite", "layout", "precision", "gradient", "normaliser", "offsets")),
    "nan_is_heard",
]
# Kernel file → the test files that must notice, fastest first, and which tests of test_watcher.
TESTS = {
    "ops/whiten.py": (["whiten", "value_loss"], "token_ops"),
    "ops/value_loss.py": (["value_loss", "nan_is_heard"], "token_ops"),
    "ops/gae/kernel.py": (["gae", "faults_gae", "nan_is_heard"], "gae or lambda"),
    "ops/policy_loss/from_logprobs.py": (["logprob_policy_loss", "nan_is_heard"], "token_ops"),
    "ops/policy_loss/terms.py": (["logprob_policy_loss", "policy_loss", *FAULTS], "token_ops"),
    "ops/policy_loss/from_logits.py": (["policy_loss", *FAULTS], "policy_loss or masked"),
    "_formed_gradient.py": (["formed_gradient", "policy_loss", *FAULTS], "policy_loss"),
    "ops/token_logprobs.py": (["token_logprobs", *FAULTS], "token_logprobs or masked"),
    "_row_softmax.py": (["token_logprobs", "policy_loss", *FAULTS], "token_logprobs or masked"),
}
OPERATORS = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="),
}  # fmt: skip
SWAPPED = {"minimum": "maximum", "maximum": "minimum", "max": "min", "min": "max"}
CONSTANTS = {"0": "1", "1": "0", "0.0": "1.0", "1.0": "0.0", "True": "False", "False": "True"}
CPU_LIMIT_FACTOR, CPU_LIMIT_FLOOR = 2, 20


class Mutant(NamedTuple):
    """A kernel file with bytes ``start : end`` replaced."""

    file: str
    function: str
    start: int
    end: int
    text: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]

    def lines(self, source: bytes) -> tuple[str, str]:
        """The line where the mutation starts, before and after."""
        number = source.count(b"\n", 0, self.start)
        return tuple(text.decode().split("\n")[number].strip() for text in (source, self.apply(source)))

    def key(self, source: bytes) -> tuple[str, ...]:
        return (self.file, self.function, *self.lines(source))


class Finder(ast.NodeVisitor):
    """Collects the mutants of one kernel function."""

    def __init__(self, file: str, function: str, source: bytes):
        self.file, self.function, self.source, self.mutants = file, function, source, []
        self.line_starts = [0]
        for line in source.splitlines(keepends=True):
            self.line_starts.append(self.line_starts[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        start = self.line_starts[node.lineno - 1] + node.col_offset
        return start, self.line_starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.source[start:end].decode()

    def add(self, start: int, end: int, text: str) -> None:
        self.mutants.append(Mutant(self.file, self.function, start, end, text))

    def swap_operator(self, left: ast.AST, operator: ast.AST, right: ast.AST) -> None:
        if type(operator) in OPERATORS:
            old, new = OPERATORS[type(operator)]
            between = self.span(left)[1]
            at = between + self.source[between : self.span(right)[0]].index(old.encode())
            self.add(at, at + len(old), new)

    def visit_BinOp(self, node):
        self.swap_operator(node.left, node.op, node.right)
        self.generic_visit(node)

    def visit_AugAssign(self, node):
        self.swap_operator(node.target, node.op, node.value)
        self.generic_visit(node)

    def visit_Compare(self, node):
        self.swap_operator(node.left, node.ops[0], node.comparators[0])
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        if isinstance(node.op, ast.USub):
            start = self.span(node)[0]
            self.add(start, start + 1, "")
        self.generic_visit(node)

    def visit_Constant(self, node):
        if self.text(node) in CONSTANTS:
            self.add(*self.span(node), CONSTANTS[self.text(node)])

    def visit_Call(self, node):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name in SWAPPED:
            end = self.span(node.func)[1]
            self.add(end - len(name), end, SWAPPED[name])
        if name == "where":
            (start, middle), (_, end) = self.span(node.args[1]), self.span(node.args[2])
            between = self.source[middle : self.span(node.args[2])[0]].decode()
            self.add(start, end, self.text(node.args[2]) + between + self.text(node.args[1]))
        if name in ("load", "store"):
            end = self.span(node.args[0])[1]
            self.add(end, end, " + 1")
            for keyword in node.keywords:
                if keyword.arg == "mask":
                    text = self.text(keyword.value)
                    self.add(*self.span(keyword.value), f"({text}) == ({text})")
        self.generic_visit(node)


def find_mutants(tree: Path, file: str) -> list[Mutant]:
    """Every mutant of the kernels in a file, in the order of the source."""
    source = (tree / "vapo_kernels" / file).read_bytes()
    mutants = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
            finder = Finder(file, node.name, source)
            for statement in node.body:
                if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                    finder.visit(statement)
            mutants += finder.mutants
    return sorted(mutants, key=lambda mutant: (mutant.start, mutant.end))


def copy_tree(scratch: str) -> Path:
    """A copy of what the kernel tests need, for one worker."""
    tree = Path(tempfile.mkdtemp(dir=scratch))
    for name in ("vapo_kernels", "benchmarks", "tests", "pyproject.toml"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "trainer"))
        elif source.exists():
            shutil.copy(source, tree / name)
    return tree


def test_in_child(tree: Path, file: str, cpu_limit: float) -> tuple[str, float]:
    """Run the tests of a file on the tree: "passed", "failed" or "timed out", and the CPU seconds they took.

    The limit is one of CPU time, so that a busy machine makes no mutant look endless.
    """
    names, watched = TESTS[file]
    selected = f"triton or test_mutants or (test_watcher and ({watched}))"
    child = os.fork()
    if child == 0:
        # The interpreter, torch and pytest are loaded already; the kernels are not.
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(cpu_limit), math.ceil(cpu_limit)))
        os.chdir(tree)
        sys.path.insert(0, str(tree))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1), os.dup2(quiet, 2)
        import pytest

        options = ["-x", "-q", "-k", selected, "-p", "no:cacheprovider", "-p", "_hypothesis_pytestplugin"]
        # The op's own tests notice most, so that the rest need not even be collected.
        for stage in (names[:1], ["mutants", "watcher"], names[1:]):
            paths = [str(tree / "tests" / "kernels" / f"test_{name}.py") for name in stage]
            if paths and pytest.main([*options, "--hypothesis-seed=0", *paths]) != 0:
                os._exit(1)
        os._exit(0)
    _, status, usage = os.wait4(child, 0)
    seconds = usage.ru_utime + usage.ru_stime
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return "timed out", seconds
    return "passed" if os.waitstatus_to_exitcode(status) == 0 else "failed", seconds


def start_worker(scratch: str) -> None:
    global worker_tree
    worker_tree = copy_tree(scratch)


def run_mutant(task: tuple[Mutant, float]) -> str:
    mutant, cpu_limit = task
    path = worker_tree / "vapo_kernels" / mutant.file
    source = path.read_bytes()
    path.write_bytes(mutant.apply(source))
    try:
        return test_in_child(worker_tree, mutant.file, cpu_limit)[0]
    finally:
        path.write_bytes(source)


def read_explained() -> dict[tuple[str, ...], str]:
    """Key of each explained survivor → why no test can fail it."""
    if not EXPLAINED.exists():
        return {}
    entries = re.findall(r"^(\S+) (\w+)\n- (.*)\n\+ (.*)\n  (.*)$", EXPLAINED.read_text(encoding="utf-8"), re.MULTILINE)
    return {tuple(entry[:4]): entry[4] for entry in entries}


def main() -> int:
    """Run the mutants and report the survivors; 1 if one is not explained."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", help="only kernel files whose path contains this")
    parser.add_argument("--limit", type=int, help="at most so many mutants a file, spread evenly")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    sys.dont_write_bytecode = True
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch._inductor  # noqa: F401
    import triton.runtime.interpreter  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        return run_all(arguments, scratch)


def run_all(arguments: argparse.Namespace, scratch: str) -> int:
    """`main` with its arguments parsed, and a directory for copies of the tree."""
    explained, survivors, count = read_explained(), 0, 0
    context, baseline_tree = multiprocessing.get_context("fork"), copy_tree(scratch)
    with context.Pool(arguments.workers, start_worker, (scratch,)) as pool:
        for file in TESTS:
            if arguments.file and arguments.file not in file:
                continue
            source = (baseline_tree / "vapo_kernels" / file).read_bytes()
            mutants = [m for m in find_mutants(baseline_tree, file) if m.key(source) not in explained]
            if arguments.limit and len(mutants) > arguments.limit:
                mutants = [mutants[i * len(mutants) // arguments.limit] for i in range(arguments.limit)]
            outcome, seconds = test_in_child(baseline_tree, file, 3600)
            if outcome != "passed":
                print(f"{file}: its tests fail without a mutation", flush=True)
                return 1
            print(f"{file}: {len(mutants)} mutants, {seconds:.0f} CPU seconds of tests", flush=True)
            cpu_limit = CPU_LIMIT_FLOOR + CPU_LIMIT_FACTOR * seconds
            outcomes = pool.imap(run_mutant, [(mutant, cpu_limit) for mutant in mutants])
            for mutant, outcome in zip(mutants, outcomes, strict=True):
                count += 1
                print(f"\r{count}", end="", file=sys.stderr, flush=True)
                if outcome == "passed":
                    survivors += 1
                    print("{} {}\n- {}\n+ {}\n  SURVIVED".format(*mutant.key(source)), flush=True)
    print(f"{count} mutants, {survivors} survivors, {len(explained)} explained before")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
