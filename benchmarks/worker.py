"""The process that measures one provider; started by `benchmarks.harness`, it prints a line of JSON per shape."""

import ctypes
import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness import ROW_MARK, TRUTH, Bench, Row, Settings, Shape, sketch

# Largest error relative to the largest entry of the truth, beyond which an answer is called wrong.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 5e-3}
# Ours and the reference, whose ratio is quoted, are repeated more than the rest where a call takes seconds.
MIN_REPETITIONS, FEW_REPETITIONS, MAX_REPETITIONS = 5, 3, 50


def load(name: str) -> Bench:
    """The benchmark of a name."""
    return importlib.import_module(f"benchmarks.bench_{name}").BENCH


def answer(bench: Bench, run: Callable[[dict], dict], inputs: dict) -> dict[str, Tensor]:
    """What a provider returns, and its gradients as ``d<input>``; those of ``<prefix>loss`` as ``<prefix>d<input>``."""
    outputs = run(inputs)
    prefix = next((name.removesuffix("loss") for name in outputs if name.endswith("_loss")), "")
    names = [f"{prefix}d{name}" for name in bench.wrt]
    return outputs | dict(zip(names, backward(bench, inputs, outputs), strict=False))


def backward(bench: Bench, inputs: dict, outputs: dict) -> tuple[Tensor, ...]:
    """Gradients to ``bench.wrt``; none for a provider that returns nothing to differentiate."""
    names = [name for name in inputs.get("upstream", {}) if name in outputs]
    if not names:
        return ()
    leaves, upstream = [inputs[name] for name in bench.wrt], [inputs["upstream"][name] for name in names]
    return torch.autograd.grad([outputs[name] for name in names], leaves, upstream)


def error_against(truth: dict[str, Tensor], answered: dict[str, Tensor]) -> float | None:
    """Largest error of any output, relative to the largest entry of its truth; None where nothing is comparable."""
    errors = []
    for name, exact in truth.items():
        if name not in answered:
            continue
        exact, actual = exact.to(answered[name].device), answered[name].detach()
        actual = sketch(actual) if actual.shape != exact.shape else actual.double()
        size = exact.abs().max().clamp(min=1e-30)
        errors.append(((actual - exact).abs().max() / size).item())
    return max(errors, default=None, key=lambda error: (error != error, error))


def timed_calls(
    bench: Bench, run, inputs: dict, mode: str, enough: int, settings: Settings
) -> tuple[list[float], int | None]:
    """Milliseconds of each repetition and the peak of the leanest one, in bytes beyond what lay there before."""
    seconds, peaks, began = [], [], time.monotonic()
    meter = CudaMeter() if settings.device == "cuda" else CpuMeter()
    while len(seconds) < enough or (time.monotonic() - began < settings.seconds and len(seconds) < MAX_REPETITIONS):
        outputs = run(inputs) if mode == "backward" else None
        meter.start()
        outputs = outputs or run(inputs)
        gradients = backward(bench, inputs, outputs) if mode != "forward" else ()
        spent, peak = meter.stop()
        seconds.append(spent)
        peaks.append(peak)
        del outputs, gradients
    return [1000 * s for s in seconds], min((peak for peak in peaks if peak is not None), default=None)


class CpuMeter:
    """Wall time, and the process's resident high-water mark over the resident set at the start (Linux only)."""

    def start(self) -> None:
        gc.collect()
        self.before = None
        if Path("/proc/self/clear_refs").exists():
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            self.before = self._status("VmRSS")
        self.began = time.perf_counter()

    def stop(self) -> tuple[float, int | None]:
        spent = time.perf_counter() - self.began
        return spent, None if self.before is None else self._status("VmHWM") - self.before

    @staticmethod
    def _status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


class CudaMeter:
    """Time between two events after a cold L2, and the allocator's peak over what was allocated at the start."""

    def __init__(self) -> None:
        # Larger than any L2; filling it also lets the host run ahead, so that launches are not what is timed.
        self.flush = torch.empty(1 << 28, dtype=torch.int8, device="cuda")

    def start(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated()
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self.flush.zero_()
        self.events[0].record()

    def stop(self) -> tuple[float, int | None]:
        self.events[1].record()
        torch.cuda.synchronize()
        spent = self.events[0].elapsed_time(self.events[1]) / 1000
        return spent, torch.cuda.max_memory_allocated() - self.before


def measure(bench: Bench, shape: Shape, provider: str, settings: Settings, folder: Path, number: int) -> list[Row]:
    """The rows of one provider on one shape: right first, then fast."""
    blank = Row(bench.name, shape.label, shape.dtype, provider)
    truth_file, inputs_file = folder / f"truth{number}.pt", folder / f"inputs{number}.pt"
    try:
        if provider == TRUTH:
            inputs = bench.make_inputs(shape, settings.device)
            torch.save(bench.truth(inputs), truth_file)
            if settings.device == "cpu":
                # Sampling them takes a CPU longer than reading them.
                torch.save(inputs, inputs_file)
            return []
        run = bench.providers[provider]()
        inputs = torch.load(inputs_file) if inputs_file.exists() else bench.make_inputs(shape, settings.device)
        answered = answer(bench, run, inputs)
        blank.error = error_against(torch.load(truth_file), answered)
        del answered
        if blank.error is not None and not blank.error <= TOLERANCE[shape.dtype]:
            blank.failure = f"wrong: error {blank.error:.1e}"
            return [blank]
        modes = bench.modes["cuda" if settings.smoke else settings.device]
        return [_timed_row(bench, shape, run, inputs, mode, blank, settings) for mode in modes]
    except ImportError as absent:
        blank.failure = f"not installed: {absent}"
    except torch.OutOfMemoryError:
        blank.failure = "out of memory"
    except Exception as broken:
        if _is_fatal(broken):
            raise
        blank.failure = f"{type(broken).__name__}: {' '.join(str(broken).split())[:160]}"
    return [blank]


def _is_fatal(broken: Exception) -> bool:
    """After an illegal access the device's context is lost, and only a new process goes on."""
    return any(words in str(broken) for words in ("illegal memory access", "device-side assert", "misaligned address"))


def _timed_row(bench: Bench, shape: Shape, run, inputs: dict, mode: str, blank: Row, settings: Settings) -> Row:
    quoted = blank.provider.startswith(("ours", "reference"))
    enough = 2 if settings.smoke else MIN_REPETITIONS if quoted else FEW_REPETITIONS
    times, peak = timed_calls(bench, run, inputs, mode, enough, settings)
    low, *_, high = statistics.quantiles(times, n=5, method="inclusive")
    return Row(
        **asdict(blank)
        | {
            "mode": mode,
            "median_ms": statistics.median(times),
            "low_ms": low,
            "high_ms": high,
            "repetitions": len(times),
            "peak_bytes": peak,
            "bytes_moved": bench.bytes_moved(shape, mode),
        }
    )


def main() -> None:
    job = json.loads(sys.argv[1])
    bench, folder = load(job.pop("bench")), Path(job.pop("folder"))
    provider, numbers = job.pop("provider"), job.pop("shapes")
    settings = Settings(**job)
    shapes = bench.shapes(settings.device, settings.smoke)
    for number in numbers:
        rows = measure(bench, shapes[number], provider, settings, folder, number)
        print(ROW_MARK + json.dumps({"index": number, "rows": [asdict(row) for row in rows]}), flush=True)
        gc.collect()
        if settings.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
