"""A user's reward functions: their three forms, and verifiers that raise, hang, die or leave things behind."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from vapo.tasks import Problem, load_task, worker
from vapo.tasks.reward_functions import load_reward_function, to_verdict
from vapo.tasks.worker import VerifierPool

FUNCTIONS = """
import ctypes, os, signal, subprocess, sys, threading, time
import beside

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(solution_str), "acc": (data_source, ground_truth, extra_info) == ("s", [1], {"index": 3})}

def lengths(prompts, completions, level, **columns):
    assert len(prompts) == len(completions) == len(level)
    sizes = [len(c if isinstance(c, str) else c[0]["content"]) for c in completions]
    return [n / beside.TEN + l for n, l in zip(sizes, level)]

def reward(completion, answer, level, **row):
    return {"score": -1.0, "is_correct": completion == answer and level == 7 and row["prompt"] == "p"}

def only_completions(completions):
    return [1.0] * len(completions)

class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(one)

def hang():
    time.sleep(1000)

def fork(then):
    child = os.fork()
    if child == 0:
        then()
    return child

def meet(number):
    folder = os.environ["MEETING"]
    open(f"{folder}/{os.getpid()}", "w").close()
    while len(os.listdir(folder)) < number:
        time.sleep(0.01)
    return 0.5

DEEDS = {
    "raise": lambda: {}["no such thing"],
    "raise an odd error": lambda: (_ for _ in ()).throw(Odd(1, 2)),
    "exit": lambda: sys.exit(3),
    "interrupt": lambda: (_ for _ in ()).throw(KeyboardInterrupt),
    "die": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda: ctypes.string_at(0),
    "close": lambda: os.closerange(3, 100),
    "hang": hang,
    "hang in C": lambda: ctypes.PyDLL(None).sleep(1000),  # With the interpreter's lock: no other thread runs.
    "hang in children": lambda: (fork(hang), subprocess.run(["sh", "-c", f"touch $MEETING/{os.getpid()}; sleep 1000"])),
    "alarm": lambda: (signal.signal(signal.SIGALRM, lambda *_: 1 / 0), signal.alarm(1), hang()),
    "nan": lambda: float("nan"),
    "none": lambda: None,
    "lock": threading.Lock,
    "forget an alarm": lambda: (signal.signal(signal.SIGALRM, signal.SIG_DFL), signal.setitimer(0, 0.2), 0.5)[-1],
    "forget a child": lambda: (fork(lambda: None), 0.5)[-1],
    "wait": lambda: time.sleep(0.4) or 0.5,
    "print": lambda: print("said", flush=True) or 0.5,
    "read": lambda: len(sys.stdin.read()) + 0.5,
    "torch": lambda: ("torch" in sys.modules) + 0.5,
    "meet": lambda: meet(4),
    "pid": os.getpid,
}

def hostile(completion, answer):
    return DEEDS[completion]() if completion in DEEDS else 1.0 if completion == answer else 0.25

def hostile_batch(completions, answer, **columns):
    assert len(answer) == len(completions)
    return [hostile(*pair) for pair in zip(completions, answer)]

def too_few(completions, **columns):
    return [1.0]

def unknown(text):
    return 1.0

async def later(completion, answer):
    return 1.0

def needs_column(completions, difficulty):
    return [0.0 for _ in completions]

NUMBER = 3
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "beside.py").write_text("TEN = 10\n")
    (folder / "mine.py").write_text(FUNCTIONS)
    (folder / "broken.py").write_text("import no_such_module\n")
    (folder / "dies.py").write_text("import os; os._exit(3)\n")
    return folder / "mine.py"


@pytest.fixture
def meeting(tmp_path, monkeypatch):
    """A folder in which verifiers leave the ids of their processes."""
    monkeypatch.setenv("MEETING", str(tmp_path))
    return tmp_path


def start(functions, name, columns=("level",), timeout=20.0):
    return VerifierPool(partial(load_reward_function, f"{functions}:{name}", columns), timeout=timeout)


def ask(pool, *responses):
    return [verdict.score for verdict in pool.score([Problem("", "4")] * len(responses), responses)]


def runs(group):
    """Whether a process of the group runs."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, number = path.read_text().rpartition(")")[2].split()[:3]
            if int(number) == group and state != "Z":
                return True
    return False


def wait_until(condition):
    while not condition():  # A test that hangs says that it never comes true.
        time.sleep(0.01)


def wait_until_all_ended(meeting):
    wait_until(lambda: not any(runs(int(path.name)) for path in meeting.iterdir()))


CHAT = [{"role": "user", "content": "p"}]
VERL = {"reward_model": {"ground_truth": [1]}, "extra_info": {"index": 3}}
ROW = Problem("p", "yes", row={"prompt": "other", "answer": "no", "level": 7})


@pytest.mark.parametrize(
    ("name", "problems", "responses", "results"),
    [
        ("compute_score", [Problem("p", "[1]", s, VERL) for s in ("s", "o")], ["abc", ""], [(3.0, True), (0.0, False)]),
        ("reward", [ROW, ROW], ["yes", "no"], [(-1.0, True), (-1.0, False)]),
        *(
            (
                "lengths",
                [Problem(p, "", row={"prompt": p, "level": n}) for n in (0, 1)],
                ["abc", "ab"],
                [(0.3, False), (1.2, True)],
            )
            for p in ("p", CHAT)
        ),
        ("only_completions", [ROW, ROW], ["", ""], [(1.0, True)] * 2),
    ],
)
def test_forms_of_verl_of_trl_and_by_completion_and_answer(functions, name, problems, responses, results):
    assert start(functions, name).score(problems, responses) == [(*result, None) for result in results]


FAILURES = {
    "raise": "KeyError: 'no such thing'",
    "raise an odd error": "Odd: 1",
    "exit": "SystemExit: 3",
    "interrupt": "KeyboardInterrupt",
    "die": "the verifier's process died: exit code 3",
    "kill": "the verifier's process died: SIGKILL",
    "crash": "the verifier's process died: SIGSEGV",
    "close": "the verifier's process died: exit code 1",
    "hang": "the verifier timed out after 2 s",
    "hang in C": "the verifier timed out after 2 s",
    "hang in children": "the verifier timed out after 2 s",
    "alarm": "ZeroDivisionError",
    "nan": "a reward function must return a finite score; got nan",
    "none": "a reward function must return a number or a dict with a number as score; got None",
    "lock": "must be a string or a real number, not '_thread.lock'",
}


def test_a_failing_verifier_costs_its_row_only(functions, meeting):
    responses = [text for deed in FAILURES for text in ("4", deed, "5")]
    verdicts = start(functions, "hostile", timeout=2.0).score([Problem("", "4")] * len(responses), responses)
    assert set(verdicts[::3]) == {(1.0, True, None)} and set(verdicts[2::3]) == {(0.25, False, None)}
    for says, failed in zip(FAILURES.values(), verdicts[1::3], strict=True):
        assert says in failed.error and failed[:2] == (0.0, False)
    wait_until_all_ended(meeting)


def test_what_a_verifier_leaves_behind_costs_no_other_row(functions, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000000")  # One worker for all of them.
    responses = ("forget an alarm", "wait", "forget a child", "4", "print", "read", "torch", "5")
    assert ask(start(functions, "hostile"), *responses) == [0.5, 0.5, 0.5, 1.0, 0.5, 0.5, 0.5, 0.25]


def test_a_failing_batch_is_taken_row_by_row(functions):
    pool = start(functions, "hostile_batch", timeout=2.0)
    verdicts = pool.score([Problem("", "4")] * 4, ["4", "raise", "hang", "5"])
    assert [verdict[:2] for verdict in verdicts] == [(1.0, True), (0.0, False), (0.0, False), (0.25, False)]
    assert [bool(verdict.error) for verdict in verdicts] == [False, True, True, False]
    assert ask(start(functions, "too_few"), "", "") == [1.0, 1.0]


def test_what_cannot_be_sent_to_a_verifier_costs_its_row_only(functions):
    problems = [Problem("", "4"), Problem("", "4", row={"lock": threading.Lock()}), Problem("", "4")]
    before, failed, after = start(functions, "hostile").score(problems, ["4", "4", "5"])
    assert (before.score, failed.score, after.score) == (1.0, 0.0, 0.25)
    assert "cannot pickle '_thread.lock' object" in failed.error


def test_responses_are_scored_at_once_and_in_order(functions, meeting, monkeypatch):
    monkeypatch.setattr(worker, "num_workers", lambda: 4)
    pool = start(functions, "hostile")
    assert ask(pool, "4", "meet", "meet", "5", "meet", "4", "meet") == [1.0, 0.5, 0.5, 0.25, 0.5, 1.0, 0.5]


def test_a_verifier_that_takes_a_batch_has_one_worker(functions, monkeypatch):
    monkeypatch.setattr(worker, "num_workers", lambda: 4)
    failed, wait, *pids = ask(start(functions, "hostile_batch"), "raise", "wait", *["pid"] * 4)
    assert (failed, wait, len(set(pids))) == (0.0, 0.5, 1)


def test_a_verifier_that_can_no_longer_be_built_costs_rows_until_it_can(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000000")
    path = tmp_path / "mine.py"
    path.write_text("import os\ndef f(completion, answer): return os._exit(3) if completion == 'die' else 1.0")
    pool = start(path, "f")
    assert ask(pool, "4", "die") == [1.0, 0.0]
    moved = path.rename(tmp_path / "moved.py")
    errors = [verdict.error for verdict in pool.score([Problem("", "4")] * 3, ["4"] * 3)]
    assert all("with an existing file" in error for error in errors)
    moved.rename(path)
    assert ask(pool, "4", "4") == [1.0, 1.0]


def test_ranks_share_the_cores(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    cores = worker.num_workers()
    assert cores == len(os.sched_getaffinity(0))
    for ranks in (1, 2, 3, 1000):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert worker.num_workers() == max(1, cores // ranks)


def test_workers_end_with_their_pool_and_start_again_after_it_was_closed(functions):
    pool = start(functions, "hostile")
    (first,) = ask(pool, "pid")
    pool.close()
    assert not runs(first)
    (second,) = ask(pool, "pid")
    assert runs(second)
    del pool
    assert not runs(second)


@pytest.mark.parametrize("name", ["hostile", "hostile_batch"])
def test_an_interrupted_call_leaves_no_answer_for_the_next(functions, meeting, name):
    pool = start(functions, name)

    def interrupt():
        wait_until(lambda: list(meeting.iterdir()))
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        ask(pool, "4", *["hang in children"] * 3)
    thread.join()
    wait_until_all_ended(meeting)
    assert ask(pool, "5", "4", "4") == [0.25, 1.0, 1.0]


SCRIPT = """
import sys
from vapo.tasks import Problem, load_task, worker
print("once", flush=True)
task = load_task("running-total", reward=sys.argv[1], reward_timeout=100.0)
print([verdict.score for verdict in task.score([Problem("", "4")] * 3, sys.argv[2:])])
"""


@pytest.mark.parametrize("end", [None, signal.SIGINT, signal.SIGKILL])
def test_works_in_a_script_without_a_main_guard_and_ends_with_it(functions, meeting, end):
    responses = ["hang in children"] * 3 if end else ["4", "print", "pid"]
    (meeting / "script.py").write_text(SCRIPT)
    folder = meeting / "pids"
    folder.mkdir()
    script = subprocess.Popen(
        [sys.executable, meeting / "script.py", f"{functions}:hostile", *responses],
        env={**os.environ, "MEETING": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if end:
        wait_until(lambda: list(folder.iterdir()))
        script.send_signal(end)
    said, errors = script.communicate()
    once, *scores = said.splitlines()
    assert (once, script.returncode) == ("once", -end if end else 0)
    assert errors.count("Traceback") == (end == signal.SIGINT)
    if not end:
        *first, pid = json.loads(scores[0])
        assert (first, errors) == ([1.0, 0.5], "said\n")
        assert not runs(int(pid))
    wait_until_all_ended(folder)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (1, (1.0, True)),
        (0.99, (0.99, False)),
        (True, (1.0, True)),
        ({"score": 0.2, "is_correct": True}, (0.2, True)),
        ({"score": 1.0, "acc": False}, (1.0, False)),
        ({"score": 1.0, "acc": 0.5}, (1.0, False)),
        ({"score": 2.0, "pred": "4"}, (2.0, True)),
        *((result, None) for result in ("1.0", None, [1.0], {"reward": 1.0}, {"score": None})),
    ],
)
def test_what_a_function_may_return_and_what_not(result, expected):
    if expected is None:
        with pytest.raises(TypeError):
            to_verdict(result)
    else:
        assert to_verdict(result) == (*expected, None)


@pytest.mark.parametrize(
    ("reward", "timeout", "message"),
    [
        ("nowhere.py:f", 2.0, "with an existing file; got 'nowhere.py:f'"),
        ("{folder}:f", 2.0, "with an existing file"),
        ("{folder}/mine.py:missing", 2.0, "must name a plain function; .*mine.py has None under that name"),
        ("{folder}/mine.py:NUMBER", 2.0, "has 3 under that name"),
        ("{folder}/mine.py:later", 2.0, "must name a plain function"),
        ("{folder}/mine.py:unknown", 2.0, r"must be compute_score\(data_source.*got unknown\(text\)"),
        ("{folder}/mine.py:needs_column", 2.0, "must be among answer, completions, prompts; got difficulty"),
        ("{folder}/broken.py:f", 2.0, "No module named 'no_such_module'"),
        ("{folder}/dies.py:f", 2.0, "the verifier's process died as it started: exit code 3"),
        *(
            ("{folder}/mine.py:hostile", timeout, "reward_timeout must be a finite number of seconds > 0; got")
            for timeout in (0.0, -1.0, float("inf"), float("nan"))
        ),
    ],
)
def test_bad_functions_and_timeouts_are_refused_before_training(functions, reward, timeout, message):
    with pytest.raises(ValueError, match=message):
        load_task("running-total", reward=reward.format(folder=functions.parent), reward_timeout=timeout)


def test_an_embedded_task_keeps_its_problems(functions, task):
    rewarded = load_task("running-total", reward=f"{functions}:hostile")
    assert rewarded.name == task.name
    assert rewarded.tokenizer.get_vocab() == task.tokenizer.get_vocab()
    assert rewarded.problems(2, random.Random(0)) == task.problems(2, random.Random(0))
    assert (rewarded.final_answer("# 3"), rewarded.score([Problem("", "4")], ["5"])) == ("3", [(0.25, False, None)])
