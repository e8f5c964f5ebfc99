"""The benchmarks through pytest-benchmark, on the smallest shape of each: ``pytest benchmarks/ --benchmark-json=…``.

The tables come from ``python -m benchmarks.run``; this is for those who compare runs with pytest-benchmark's own tools.
"""

import functools

import pytest
import torch

pytest.importorskip("pytest_benchmark")
from benchmarks.worker import TOLERANCE, answer, backward, error_against, load

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("gae", "token_logprobs", "policy_loss", "linear_policy_loss")


PAIRS = [(name, provider) for name in NAMES for provider in load(name).providers]


@functools.lru_cache(maxsize=1)
def case(name: str):
    """(bench, shape, inputs, truth), made once for all providers of a bench."""
    bench = load(name)
    shape = min(bench.shapes(DEVICE, False), key=lambda shape: bench.bytes_moved(shape, "both") or shape["V"])
    inputs = bench.make_inputs(shape, DEVICE)
    return bench, shape, inputs, bench.truth(inputs)


@pytest.mark.parametrize(("name", "provider"), PAIRS, ids=[f"{name}: {provider}" for name, provider in PAIRS])
def test_speed(benchmark, name, provider):
    bench, shape, inputs, truth = case(name)
    try:
        run = bench.providers[provider]()
        error = error_against(truth, answer(bench, run, inputs))
    except (ImportError, RuntimeError) as absent:
        pytest.skip(str(absent))
    assert error is None or error <= TOLERANCE[shape.dtype]

    def call():
        backward(bench, inputs, run(inputs))
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    benchmark.group = f"{bench.name}, {shape.label}, {shape.dtype}"
    benchmark.extra_info["error"] = error
    benchmark.pedantic(call, rounds=5, warmup_rounds=1)
