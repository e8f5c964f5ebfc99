"""One way to run every benchmark: each provider in its own process, right answers first, then times and memory.

A benchmark is a `Bench`: shapes, inputs, the truth in float64, the bytes its op must move, and providers by name.
`rows` measures it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
ROW_MARK = "ROW "
TRUTH = "truth"
LEFT_OUT = "not measured: the time of this section was over"


@dataclass(frozen=True)
class Shape:
    """One input size: what the table calls it, the numbers that make it, and the dtype of the large inputs."""

    label: str
    sizes: dict
    dtype: str = "float32"

    def __getitem__(self, name: str):
        return self.sizes[name]


@dataclass(frozen=True)
class Bench:
    """What is measured, and nothing about how.

    Attributes:
        name: Of the module (``bench_<name>.py``) and of the result files.
        title: What the table shows.
        shapes: (device, smoke) to the input sizes.
        make_inputs: (shape, device) to the arguments of the providers; ``inputs["upstream"]`` maps the outputs that
            carry a gradient to their upstream gradients.
        truth: Inputs to what the providers return, in float64; ``d<input>`` is a gradient (see `sketch`).
        providers: Name to a loader of the function under test, which imports what it needs.
        wrt: Inputs whose gradients are taken.
        modes: Device to the parts that are timed: "forward", "backward", "both".
        bytes_moved: (shape, mode) to the bytes that the op has to move; None where no such bound is meant.
        note: A sentence under the table.
    """

    name: str
    title: str
    shapes: Callable[[str, bool], list[Shape]]
    make_inputs: Callable[[Shape, str], dict]
    truth: Callable[[dict], dict[str, Tensor]]
    providers: dict[str, Callable[[], Callable[[dict], dict]]]
    wrt: tuple[str, ...]
    modes: dict[str, tuple[str, ...]]
    bytes_moved: Callable[[Shape, str], int | None]
    note: str = ""


@dataclass
class Row:
    """One line of a table: what a provider did on a shape; ``failure`` says why there is no time."""

    bench: str
    shape: str
    dtype: str
    provider: str
    mode: str = ""
    median_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    repetitions: int = 0
    peak_bytes: int | None = None
    error: float | None = None
    bytes_moved: int | None = None
    failure: str = ""


@dataclass
class Settings:
    """How to run: where, how long, how large."""

    device: str = "cpu"
    smoke: bool = False
    seconds: float = 3.0
    budget: float = 86400.0
    only: tuple[str, ...] = field(default=())


def sketch(gradient: Tensor) -> Tensor:
    """A matrix [N, M] times one fixed random vector, float64 [N]: an error in any row shows, at N numbers' cost."""
    width = gradient.shape[-1]
    generator = torch.Generator().manual_seed(width)
    direction = torch.randn(width, generator=generator, dtype=torch.float64).to(gradient.device)
    return torch.cat([rows.double() @ direction for rows in gradient.reshape(-1, width).split(256)])


def rows(bench: Bench, settings: Settings) -> Iterator[Row]:
    """Measure every provider, each in a process of its own, on every shape; a failure is a row, and the run goes on."""
    deadline = time.monotonic() + settings.budget
    shapes = bench.shapes(settings.device, settings.smoke)
    numbers = list(range(len(shapes)))
    names = [name for name in bench.providers if not settings.only or name in settings.only]
    with tempfile.TemporaryDirectory() as folder:
        failed = {(row.shape, row.dtype): row for row in _work(bench, TRUTH, numbers, settings, folder, deadline)}
        for done, name in enumerate(names):
            # Ours and the reference, whose ratio is quoted, may take what they need; the others share what is left,
            # and one that is slow takes no more than thrice its share.
            left = deadline - time.monotonic()
            share = left if name in ("ours", "reference (eager)") else 3 * left / (len(names) - done)
            until = time.monotonic() + min(left, share)
            for row in _work(bench, name, numbers, settings, folder, until):
                if (row.shape, row.dtype) in failed:
                    failure = failed[row.shape, row.dtype].failure
                    failure = failure if failure == LEFT_OUT else f"no truth: {failure}"
                    row = Row(row.bench, row.shape, row.dtype, name, failure=failure)
                yield row


def _work(bench: Bench, name: str, numbers: list[int], settings: Settings, folder: str, until: float) -> Iterator[Row]:
    """The rows of one provider, from as many processes as it kills."""
    shapes, left = bench.shapes(settings.device, settings.smoke), list(numbers)
    while left:
        if until - time.monotonic() <= 0:
            yield from (Row(bench.name, shapes[i].label, shapes[i].dtype, name, failure=LEFT_OUT) for i in left)
            return
        job = {"bench": bench.name, "provider": name, "shapes": left, "folder": folder} | asdict(settings)
        command = [sys.executable, "-m", "benchmarks.worker", json.dumps(job)]
        with tempfile.TemporaryFile("w+") as errors:
            output, death = _run(command, errors, until - time.monotonic())
        reported = [
            json.loads(line.removeprefix(ROW_MARK)) for line in output.splitlines() if line.startswith(ROW_MARK)
        ]
        for report in reported:
            left = [i for i in left if i != report["index"]]
            yield from (Row(**row) for row in report["rows"])
        if left and death:
            yield Row(bench.name, shapes[left[0]].label, shapes[left[0]].dtype, name, failure=death)
            left = left[1:]


def _run(command: list[str], errors, seconds: float) -> tuple[str, str]:
    """(standard output, why it ended badly or "") of a command that gets so long."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as late:
        output = late.stdout or b""
        return output.decode() if isinstance(output, bytes) else output, f"stopped after {seconds:.0f} s"
    errors.seek(0)
    last = (errors.read().strip().splitlines() or [""])[-1]
    # A worker that ends well without a report would be started for ever.
    return done.stdout, f"exit {done.returncode}: {last[:200]}"


def settings_from(parser: argparse.ArgumentParser) -> Settings:
    """Parse the options that all benchmarks share."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes and a moment each: does it run?")
    parser.add_argument("--seconds", type=float, default=3.0, help="time a row measures, after at least 5 repetitions")
    parser.add_argument(
        "--budget", type=float, default=86400.0, help="seconds for all rows; a table names what it leaves out"
    )
    parser.add_argument("--only", action="append", default=[], metavar="PROVIDER", help="one of the providers")
    arguments = parser.parse_args()
    seconds = 0.05 if arguments.smoke else arguments.seconds
    return Settings(arguments.device, arguments.smoke, seconds, arguments.budget, tuple(arguments.only))
