"""What a run leaves in its folder, and what it prints meanwhile."""

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest

from vapo.live_view import Progress, clock, sparkline
from vapo.metrics import RunLog

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
    return RunLog(folder, config={"seed": 3, "out": folder}, total_steps=4, **settings)


def lines(path: Path) -> list[dict]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text("utf-8").splitlines()]


def test_a_run_leaves_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "first"
    with run_log(folder) as log:
        log.log("warm_start", 1, {"warm_start/loss": 2.5})
        log.samples("vapo", 1, [SAMPLE, SAMPLE | {"response": "λ", "is_correct": False}])
        log.log("vapo", 1, STEP)

    assert json.loads((folder / "config.json").read_text()) == {"seed": 3, "out": str(folder)}
    first, second = lines(folder / "metrics.jsonl")
    assert first.pop("timing_s/elapsed") >= 0
    assert first == {"phase": "warm_start", "step": 1, "warm_start/loss": 2.5}
    assert {name: second[name] for name in STEP} == STEP
    assert lines(folder / "samples.jsonl") == [
        {"phase": "vapo", "step": 1, **SAMPLE},
        {"phase": "vapo", "step": 1, **SAMPLE, "response": "λ", "is_correct": False},
    ]
    assert (folder / "curves.png").stat().st_size > 0


def test_equal_runs_differ_in_times_only(tmp_path: Path) -> None:
    contents = []
    for name in "ab":
        with run_log(tmp_path / name) as log:
            log.log("vapo", 1, STEP | {"timing_s/gen": np.random.rand(), "perf/throughput": np.random.rand()})
        records = lines(tmp_path / name / "metrics.jsonl")
        contents.append([{k: v for k, v in r.items() if not k.startswith(("timing_s/", "perf/"))} for r in records])
    assert contents[0] == contents[1]


def test_every_line_is_on_disk_at_once(tmp_path: Path) -> None:
    with run_log(tmp_path) as log:
        log.log("vapo", 1, STEP)
        log.samples("vapo", 1, [SAMPLE])
        assert len(lines(tmp_path / "metrics.jsonl")) == len(lines(tmp_path / "samples.jsonl")) == 1


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

    monkeypatch.setattr("vapo.metrics.write_curves", fail)
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


def test_what_is_not_finite_becomes_null(tmp_path: Path) -> None:
    values = {"nan": math.nan, "inf": math.inf, "minus": -math.inf, "zero": 0.0, "count": 3}
    with run_log(tmp_path) as log:
        log.log("vapo", 1, values)
        log.samples("vapo", 1, [SAMPLE | {"advantage_min": math.nan}])
    (record,) = lines(tmp_path / "metrics.jsonl")
    assert [record[name] for name in values] == [None, None, None, 0.0, 3]
    assert lines(tmp_path / "samples.jsonl")[0]["advantage_min"] is None


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


def test_a_terminal_shows_the_table_and_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    with run_log(tmp_path) as log:
        log.log("vapo", 1, STEP)
        log.samples("vapo", 1, [SAMPLE | {"response": "3 \x1b[2J # 3"}])
        log.note("mean λ is low")
        log.summary([("accuracy", "0.250", "0.875")])
    printed = terminal.getvalue()
    assert [value for value in SHOWN if value not in printed] == []
    assert "VAPO, step 1" in printed and "1/4 steps" in printed and "left" in printed
    assert "1 +2 =" in printed and "note: mean λ is low" in printed
    assert "\x1b[2J" not in printed, "a response cleared the screen"
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert printed.count(hide) == printed.count(show) > 0
    assert printed.rindex("quantity") > printed.rindex("tokens/s"), "the summary comes last"


def test_an_interrupted_terminal_gets_its_cursor_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    with pytest.raises(KeyboardInterrupt), run_log(tmp_path) as log:
        log.log("vapo", 1, STEP)
        raise KeyboardInterrupt
    assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h") == 1


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


def test_clock_and_sparkline() -> None:
    assert [clock(seconds) for seconds in (0, 59.6, 3599, 3600)] == ["0:00", "1:00", "59:59", "1:00:00"]
    assert len(sparkline([float(i) for i in range(100)], width=32)) == 32
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([math.nan]) == " "


@pytest.mark.parametrize("value", ["0.5", None, True, np.float32(1.0), [1.0]])
def test_a_metric_is_a_number(tmp_path: Path, value: object) -> None:
    with run_log(tmp_path) as log, pytest.raises(ValueError, match=f"'actor/entropy', got {type(value).__name__}"):
        log.log("vapo", 1, {"actor/entropy": value})
    assert lines(tmp_path / "metrics.jsonl") == []


def test_rejects_bad_input(tmp_path: Path) -> None:
    with run_log(tmp_path / "good") as log:
        for call, message in (
            (lambda: log.log("rl", 1, {}), "phase: expected one of warm_start, .*, got 'rl'"),
            (lambda: log.log("vapo", -1, {}), "step: expected an int from 0, got -1"),
            (lambda: log.log("vapo", 1.0, {}), "step: expected an int from 0, got 1.0"),
            (lambda: log.log("vapo", 1, {"step": 1.0}), "metrics: 'step' is taken"),
            (lambda: log.samples("vapo", 1, [{"prompt": ""}]), "rows: .* got none for response"),
            (lambda: log.samples("vapo", 1, [SAMPLE | {"reward": object()}]), "rows: expected values that fit JSON"),
        ):
            with pytest.raises(ValueError, match=message):
                call()
        log.log("vapo", 1, STEP)
    with pytest.raises(ValueError, match="folder: expected one without an earlier run"):
        run_log(tmp_path / "good")
    with pytest.raises(ValueError, match="folder: expected a folder that can be made"):
        run_log(tmp_path / "good" / "config.json" / "under")
    with pytest.raises(ValueError, match="total_steps: expected a positive int, got 0"):
        RunLog(tmp_path / "new", config={}, total_steps=0)
    with pytest.raises(ValueError, match="config: expected values that fit JSON"):
        RunLog(tmp_path / "new", config={"task": object()}, total_steps=1)
    assert not (tmp_path / "new").exists()
