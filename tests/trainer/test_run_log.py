"""What a run leaves in its folder, and what it prints meanwhile."""

import io
import json
import math
import resource
import signal
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from ranks import run_on_ranks

from vapo.models import sharding
from vapo.record.live_view import Progress, clock, sparkline
from vapo.record.run_log import RunLog

SAMPLE = {
    "prompt": "1 +2 =",
    "response": "3 # 3 <eos>",
    "reward": 1.0,
    "is_correct": True,
    "advantage_min": -0.5,
    "advantage_max": 1.5,
}
STEP = {
    "critic/rewards/mean": 0.412,
    "val/accuracy_sampled": 0.625,
    "val/accuracy_greedy": 0.875,
    "critic/vf_explained_var": 0.119,
    "response_length/mean": 38.25,
    "actor/entropy": 0.231,
    "actor/ppo_kl": 0.00123,
    "actor/pg_clipfrac": 0.0345,
    "perf/throughput": 5120.4,
}
SHOWN = ("0.412", "0.625", "0.875", "0.119", "38.2", "0.231", "0.00123", "0.0345", "5,120")


class Terminal(io.StringIO):
    """A stand-in for a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Called in the test itself: pytest sets its own sys.stdout between fixtures and test."""
    stream = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("sys.stdout", stream)
    return stream


def run_log(folder: Path, **settings: object) -> RunLog:
    return RunLog(folder, config={"seed": 3, "stop": ("#",)}, total_steps=4, **settings)


def lines(path: Path) -> list[dict]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text("utf-8").splitlines()]


def test_a_run_leaves_its_files_line_by_line(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "first"
    with run_log(folder) as log:
        log.log("warm_start", 1, {"warm_start/loss": 2.5})
        log.samples("vapo", 1, [SAMPLE, SAMPLE | {"response": "λ", "is_correct": False}])
        log.log("vapo", 1, STEP)
        # On disk at once, for a run that is killed.
        first, second = lines(folder / "metrics.jsonl")
        assert lines(folder / "samples.jsonl") == [
            {"phase": "vapo", "step": 1, **SAMPLE},
            {"phase": "vapo", "step": 1, **SAMPLE, "response": "λ", "is_correct": False},
        ]
    assert first.pop("timing_s/elapsed") >= 0
    assert first == {"phase": "warm_start", "step": 1, "warm_start/loss": 2.5}
    assert second == {"phase": "vapo", "step": 1, "timing_s/elapsed": second["timing_s/elapsed"]} | STEP
    assert json.loads((folder / "config.json").read_text()) == {"seed": 3, "stop": ["#"]}
    assert (folder / "curves.png").stat().st_size > 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_run_leaves_what_it_had(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), run_log(tmp_path) as log:
        log.log("vapo", 1, STEP)
        log.samples("vapo", 1, [SAMPLE])
        raise error
    assert len(lines(tmp_path / "metrics.jsonl")) == len(lines(tmp_path / "samples.jsonl")) == 1
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_picture_does_not_hide_why_the_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(folder: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("vapo.record.run_log.write_curves", fail)
    with pytest.raises(KeyboardInterrupt), run_log(tmp_path / "a") as log:
        log.log("vapo", 1, STEP)
        raise KeyboardInterrupt
    assert "curves.png was not written: disk full" in capsys.readouterr().out
    with pytest.raises(OSError, match="disk full"), run_log(tmp_path / "b") as log:
        log.log("vapo", 1, STEP)


def test_a_run_that_logged_nothing_draws_nothing(tmp_path: Path) -> None:
    with run_log(tmp_path):
        pass
    assert not (tmp_path / "curves.png").exists()


def test_what_is_not_finite_becomes_null_and_is_noted_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"nan": math.nan, "inf": math.inf, "minus": -math.inf, "zero": 0.0, "count": 3}
    with run_log(tmp_path) as log:
        log.log("vapo", 1, values)
        log.log("vapo", 2, values | {"zero": math.nan})
        log.samples("vapo", 1, [SAMPLE | {"advantage_min": math.nan}])
    record, _ = lines(tmp_path / "metrics.jsonl")
    assert [record[name] for name in values] == [None, None, None, 0.0, 3]
    assert lines(tmp_path / "samples.jsonl")[0]["advantage_min"] is None
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("note")] == [
        "note: not finite at step 1 of VAPO, null in metrics.jsonl: inf, minus, nan",
        "note: not finite at step 2 of VAPO, null in metrics.jsonl: zero",
    ]


def test_plain_lines_carry_the_values_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    with RunLog(tmp_path, config={}, total_steps=12) as log:
        log.log("warm_start", 10, {"warm_start/loss": 2.5})
        log.log("warm_start", 11, {"warm_start/loss": 2.4})
        log.log("vapo", 1, STEP)
        log.note("mean λ [policy] is low")
        log.note("mean λ [policy] is low")
        log.summary([("accuracy", "0.250", "0.875")])
    printed = capsys.readouterr().out
    assert all(char.isprintable() or char == "\n" for char in printed)
    warm_start, vapo, note, *summary = printed.splitlines()
    # Every tenth step of the warm start.
    assert "warm start 10" in warm_start and "[10/12]" in warm_start and "loss 2.500" in warm_start
    assert "VAPO 1" in vapo and "[12/12]" in vapo and "left 0:00" in vapo
    assert [value for value in SHOWN if value not in vapo] == []
    assert note == "note: mean λ [policy] is low"
    assert any("accuracy" in line and "0.250" in line and "0.875" in line for line in summary)


@pytest.mark.parametrize("interruption", [None, KeyboardInterrupt])
def test_a_terminal_shows_the_table_and_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruption: type[BaseException] | None
) -> None:
    terminal = use_terminal(monkeypatch)
    with pytest.raises(KeyboardInterrupt) if interruption else nullcontext(), run_log(tmp_path) as log:
        log.log("vapo", 1, STEP)
        log.samples("vapo", 1, [SAMPLE | {"response": "3 \x1b[2J # 3"}])
        log.note("mean λ is low")
        if interruption:
            raise interruption
        log.summary([("accuracy", "0.250", "0.875")])
    printed = terminal.getvalue()
    assert [value for value in SHOWN if value not in printed] == []
    assert "VAPO, step 1" in printed and "1/4 steps" in printed and "left" in printed
    assert "1 +2 =" in printed and "note: mean λ is low" in printed
    assert "\x1b[2J" not in printed, "a response cleared the screen"
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert printed.count(hide) == printed.count(show) > 0
    assert interruption or printed.rindex("quantity") > printed.rindex("tokens/s"), "the summary comes last"


def test_a_dumb_terminal_gets_plain_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    with run_log(tmp_path) as log:
        log.log("vapo", 1, STEP)
    assert "\x1b" not in terminal.getvalue() and "VAPO 1" in terminal.getvalue()


def test_time_left_follows_the_pace_of_the_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    progress = Progress(total_steps=30)
    assert progress.time_left == "?"
    now[0] = 10.0
    progress.advance("warm_start", 20)
    assert progress.time_left == "≥ 0:05"
    now[0] = 50.0
    progress.advance("vapo", 4)
    assert (progress.steps_done, progress.time_left) == (24, "1:00")
    progress.total_steps = 25
    assert progress.time_left == "0:10"
    progress.total_steps = 20
    assert progress.time_left == "0:00"


def test_a_resumed_run_shows_its_place_and_times_only_new_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    progress = Progress(total_steps=30, phase="vapo", step=4, steps_before=20, elapsed=50.0)
    assert (progress.steps_done, progress.time_left, progress.elapsed) == (24, "?", 50.0)
    now[0] = 1007.0
    progress.advance("vapo", 5)
    assert (progress.steps_done, progress.time_left, progress.elapsed) == (25, "0:35", 57.0)
    earlier = Progress(total_steps=30, phase="value_pretraining", step=3, steps_before=10)
    now[0] = 1009.0
    earlier.advance("value_pretraining", 5)
    now[0] = 1011.0
    earlier.advance("vapo", 1)
    assert (earlier.steps_done, earlier.time_left) == (16, "0:28")


STEPS = [("warm_start", 1), ("warm_start", 2), ("value_pretraining", 1), ("vapo", 0), ("vapo", 1), ("vapo", 2)]


def record(log: RunLog, steps: list[tuple[str, int]]) -> None:
    for phase, step in steps:
        log.log(phase, step, {"actor/loss": step / 3, "timing_s/gen": np.random.rand(), "perf/throughput": 1.0})
        log.samples(phase, step, [SAMPLE | {"response": f"λ {phase} {step} {number}"} for number in range(2)])


def without_times(path: Path) -> list[dict]:
    return [{k: v for k, v in each.items() if not k.startswith(("timing_s/", "perf/"))} for each in lines(path)]


@pytest.mark.parametrize(("kept", "logged"), [(1, 1), (1, 6), (2, 3), (3, 3), (3, 5), (4, 6), (5, 5), (6, 6)])
def test_an_interrupted_and_resumed_run_leaves_the_same_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int, logged: int
) -> None:
    """The checkpoint is of the step ``kept``; the run went on to ``logged`` and died in the middle of a line."""
    monkeypatch.setattr("vapo.record.run_log.write_curves", lambda folder: None)
    with run_log(tmp_path / "whole") as log:
        record(log, STEPS)
    broken = tmp_path / "broken"
    with run_log(broken) as log:
        record(log, STEPS[:logged])
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (broken / name).open("ab") as file:
            file.write('{"phase": "vapo", "step": 1, "prompt": "λ'.encode()[:-1])

    place = STEPS[kept - 1]
    with RunLog(broken, config={"seed": 4}, total_steps=9, resume_after=place) as log:
        assert (log.progress.phase, log.progress.step) == place
        record(log, STEPS[kept:])
        assert log.progress.steps_done == 5
    assert json.loads((broken / "config.json").read_text()) == {"seed": 4}
    assert without_times(broken / "metrics.jsonl") == without_times(tmp_path / "whole" / "metrics.jsonl")
    assert lines(broken / "samples.jsonl") == lines(tmp_path / "whole" / "samples.jsonl")


def test_a_phase_may_be_resumed_before_its_first_step(tmp_path: Path) -> None:
    with run_log(tmp_path) as log:
        record(log, STEPS[:2])
    with run_log(tmp_path, resume_after=("value_pretraining", 0)) as log:
        assert (log.progress.phase, log.progress.steps_done) == ("value_pretraining", 2)
        record(log, STEPS[2:])
    assert [(each["phase"], each["step"]) for each in lines(tmp_path / "metrics.jsonl")] == STEPS


def test_the_time_goes_on_from_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with run_log(tmp_path) as log:
        for step in (1, 2):
            now[0] += 10.0
            log.log("vapo", step, {})
    now[0] = 5000.0
    with run_log(tmp_path, resume_after=("vapo", 1)) as log:
        now[0] += 3.0
        log.log("vapo", 2, {})
    assert [each["timing_s/elapsed"] for each in lines(tmp_path / "metrics.jsonl")] == [10.0, 13.0]


def test_a_terminal_shows_the_steps_before_the_resumption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_log(tmp_path) as log:
        log.log("vapo", 1, STEP | {"actor/entropy": math.nan, "critic/rewards/mean": 0.123})
    terminal = use_terminal(monkeypatch)
    with run_log(tmp_path, resume_after=("vapo", 1)) as log:
        log.log("vapo", 2, STEP)
    assert "0.123" in terminal.getvalue() and "2/4 steps" in terminal.getvalue()


def test_a_full_disk_ends_the_run_and_leaves_it_resumable(tmp_path: Path) -> None:
    with run_log(tmp_path) as log:
        log.log("vapo", 1, STEP)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    try:
        with pytest.raises(OSError, match="File too large"), run_log(tmp_path, resume_after=("vapo", 1)) as log:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, limits[1]))
            log.log("vapo", 2, STEP)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "metrics.jsonl").stat().st_size == size + 50, "no part of the line was written"
    with run_log(tmp_path, resume_after=("vapo", 1)) as log:
        log.log("vapo", 2, STEP)
    assert [each["step"] for each in lines(tmp_path / "metrics.jsonl")] == [1, 2]


class Recorder:
    """A stand-in for open trackers."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.calls.append((step, metrics))

    def close(self) -> None:
        self.calls.append("closed")


def test_trackers_get_every_step_on_one_axis_and_are_closed(tmp_path: Path) -> None:
    trackers = Recorder()
    with pytest.raises(KeyboardInterrupt), run_log(tmp_path, trackers=trackers) as log:
        log.log("warm_start", 1, {"warm_start/loss": 2.5})
        log.log("vapo", 0, {})
        log.log("vapo", 1, STEP)
        raise KeyboardInterrupt
    assert trackers.calls == [(1, {"warm_start/loss": 2.5}), (1, {}), (2, STEP), "closed"]


def log_on_rank(folder: str) -> tuple[str, str]:
    printed = io.StringIO()
    with redirect_stdout(printed), run_log(Path(folder)) as log:
        log.log("vapo", 1, STEP | {"actor/loss": float(sharding.rank())})
        log.samples("vapo", 1, [SAMPLE])
        log.note("look")
        log.summary([("accuracy", "0.250", "0.875")])
    try:
        run_log(Path(folder))
    except ValueError as error:
        return printed.getvalue(), str(error)
    return printed.getvalue(), ""


def test_only_the_first_rank_writes_and_shows(tmp_path: Path) -> None:
    (first, refused), (second, refused_too) = run_on_ranks(2, log_on_rank, str(tmp_path))
    assert "VAPO 1" in first and "look" in first and second == ""
    assert refused == refused_too and "without an earlier run" in refused
    (record,) = lines(tmp_path / "metrics.jsonl")
    assert record["actor/loss"] == 0.0
    assert len(lines(tmp_path / "samples.jsonl")) == 1


def test_clock_and_sparkline() -> None:
    assert [clock(seconds) for seconds in (0, 59.6, 3599, 3600)] == ["0:00", "1:00", "59:59", "1:00:00"]
    assert len(sparkline([float(i) for i in range(100)], width=32)) == 32
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([math.nan]) == " "


@pytest.mark.parametrize("value", ["0.5", None, np.float32(1.0), [1.0]])
def test_a_metric_that_is_no_number_is_not_written(tmp_path: Path, value: object) -> None:
    with run_log(tmp_path) as log, pytest.raises(TypeError):
        log.log("vapo", 1, {"actor/entropy": value})
    assert lines(tmp_path / "metrics.jsonl") == []


def test_rejects_bad_input(tmp_path: Path) -> None:
    with run_log(tmp_path / "good") as log:
        log.log("vapo", 1, STEP)
    for folder, settings, message in (
        ("good", {}, "folder: expected one without an earlier run"),
        ("new", {"resume_after": ("vapo", 1)}, r"folder: expected one with an earlier run, got .*/new, which has no"),
        ("good/config.json/under", {}, "folder: expected a folder that can be made"),
    ):
        with pytest.raises(ValueError, match=message):
            run_log(tmp_path / folder, **settings)
    assert not (tmp_path / "new").exists()
