"""What the device itself can do: copy bandwidth and GEMM rate, the two figures that every time is held against.

python -m benchmarks.device --device cuda
"""

import argparse
import importlib.metadata
import os
import platform
import statistics
import time
from pathlib import Path

import torch


def name(device: str) -> str:
    """The device in a few words."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    return f"{model}, {os.cpu_count()} cores"


def versions() -> str:
    """Versions of Python, torch, triton and the peers that are installed."""
    found = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    for package in ("triton", "trl", "liger-kernel", "verl", "torchrl", "flash-attn", "transformers", "numpy"):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {package}")
    if torch.version.cuda or torch.version.hip:
        found.append(f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}")
    return ", ".join(found)


def seconds_of(call, device: str, repetitions: int = 10) -> float:
    """Median time of a call."""
    call()
    times = []
    for _ in range(repetitions):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def copy_bandwidth(device: str, smoke: bool = False) -> float:
    """Bytes per second of a copy within the device's memory, read and written bytes together."""
    size = 1 << (20 if smoke else 30 if device == "cuda" else 28)
    source = torch.zeros(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds_of(lambda: target.copy_(source), device)


def gemm_rate(device: str, dtype: torch.dtype, smoke: bool = False) -> float:
    """FLOPs per second of a square matrix product (float32 without TF32)."""
    n = 256 if smoke else 8192 if device == "cuda" else 2048
    left, right = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / seconds_of(lambda: left @ right, device)


def limits(device: str, smoke: bool = False) -> dict[str, float]:
    """The measured limits: copy in bytes/s, products in FLOP/s."""
    found = {
        "copy": copy_bandwidth(device, smoke),
        "gemm_float32": gemm_rate(device, torch.float32, smoke),
        "gemm_bfloat16": gemm_rate(device, torch.bfloat16, smoke),
    }
    if device == "cuda":
        torch.cuda.empty_cache()
    return found


def limits_sentence(limits: dict[str, float]) -> str:
    """The device's own figures in words."""
    rates = [
        f"{kind.removeprefix('gemm_')} {rate / 1e12:.3g} TFLOP/s" for kind, rate in limits.items() if kind != "copy"
    ]
    return f"copy {limits['copy'] / 1e9:.1f} GB/s (read and write), matrix product {', '.join(rates)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args().device
    print(f"{name(device)}: {limits_sentence(limits(device))}")


if __name__ == "__main__":
    main()
