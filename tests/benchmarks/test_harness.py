"""The harness itself: wrong answers have no time, failures stay in the table, truths are true."""

from pathlib import Path

import pytest
import torch

from benchmarks import bench_gae, tables, worker
from benchmarks.harness import LEFT_OUT, TRUTH, Bench, Row, Settings, Shape, rows, sketch
from vapo_kernels import reference

SMOKE = Settings(smoke=True, seconds=0.01)


def bench_of(providers: dict) -> Bench:
    """Twice a vector, by these providers."""
    return Bench(
        name="double",
        title="Twice",
        shapes=lambda device, smoke: [Shape("4", {"n": 4})],
        make_inputs=lambda shape, device: {"x": torch.arange(4.0)},
        truth=lambda inputs: {"y": 2 * inputs["x"].double()},
        providers=providers,
        wrt=(),
        modes={"cpu": ("forward",), "cuda": ("forward",)},
        bytes_moved=lambda shape, mode: 32,
    )


def absent():
    raise ImportError("no such package")


def measured(bench: Bench, provider: str, folder: Path) -> Row:
    shape = bench.shapes("cpu", True)[0]
    assert worker.measure(bench, shape, TRUTH, SMOKE, folder, 0) == []
    (row,) = worker.measure(bench, shape, provider, SMOKE, folder, 0)
    return row


def test_wrong_answer_has_no_time(tmp_path):
    bench = bench_of(
        {
            "right": lambda: lambda inputs: {"y": 2 * inputs["x"]},
            "wrong": lambda: lambda inputs: {"y": 2 * inputs["x"] + 0.01},
            "nan": lambda: lambda inputs: {"y": inputs["x"] / 0},
            "absent": absent,
        }
    )
    right = measured(bench, "right", tmp_path)
    assert right.error == 0 and right.median_ms > 0 and right.repetitions >= 2
    for name, words in (
        ("wrong", "wrong: error"),
        ("nan", "wrong: error"),
        ("absent", "not installed: no such package"),
    ):
        row = measured(bench, name, tmp_path)
        assert row.median_ms is None and row.failure.startswith(words)
        assert row.failure in tables.markdown(bench, [right, row], copy=1e9)


def test_gradient_of_a_wrong_row_shows_in_its_sketch():
    gradient = torch.randn(5, 300)
    changed = gradient.clone()
    changed[3, 299] += 0.1
    off = sketch(changed) != sketch(gradient)
    assert off.tolist() == [False, False, False, True, False]


def test_cpu_peak_is_what_a_call_adds():
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the kernel keeps no resettable high-water mark")
    meter = worker.CpuMeter()
    meter.start()
    torch.ones(1 << 24).sum()
    _, peak = meter.stop()
    assert 0.9 < peak / 2**26 < 1.2


def test_column_loop_and_chunked_scan_are_the_equations():
    inputs = bench_gae.make_inputs(Shape("", {"S": 3, "T": 300, "mixed": False}), "cpu")
    mask = inputs["mask"]
    exact = reference.padded_gae(
        inputs["rewards"].double(), inputs["values"].double(), mask, lam_policy=0.95, lam_critic=0.95
    )
    for name in ("reference (eager)", "chunked matmul scan (as slime, own code)"):
        found = bench_gae.BENCH.providers[name]()(inputs)
        torch.testing.assert_close(found["advantages"].double(), exact.advantages, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found["returns"].double(), exact.returns, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gae", "policy_loss"])
def test_ours_in_a_process_of_its_own(name):
    provider = {"gae": "ours, packed", "policy_loss": "ours"}[name]
    found = list(rows(worker.load(name), Settings(smoke=True, seconds=0.01, only=(provider,))))
    assert found and all(row.error < 0.01 and row.median_ms > 0 for row in found), found


def test_a_note_names_what_an_exhausted_budget_leaves_out():
    bench = worker.load("gae")
    (row,) = rows(bench, Settings(smoke=True, budget=0.0, only=("verl",)))
    assert row.median_ms is None and row.failure == LEFT_OUT
    table = tables.markdown(bench, [row], copy=1e9)
    assert "| verl" not in table
    assert f"before these were measured: verl ({row.shape}, {row.dtype})." in table
