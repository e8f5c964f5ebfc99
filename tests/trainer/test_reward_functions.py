"""Rewards in a process of their own: three forms of functions, and verifiers that raise, hang or die."""

import os
import subprocess
import sys
import time
from functools import partial

import pytest

from vapo.tasks import Problem, load_task
from vapo.tasks.reward_functions import load_reward_function, to_verdict
from vapo.tasks.worker import VerifierProcess

FUNCTIONS = """
import ctypes, os, signal, sys, time
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

def fragile(completion, answer):
    print("said", flush=True)
    if completion == "raise":
        raise KeyError("no such thing")
    if completion == "exit":
        sys.exit(3)
    if completion == "die":
        os._exit(3)
    if completion == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if completion == "crash":
        ctypes.string_at(0)
    if completion == "hang":
        time.sleep(1000)
    if completion == "hang in C":
        ctypes.PyDLL(None).sleep(1000)  # With the interpreter's lock: no other Python thread runs.
    if completion == "nan":
        return float("nan")
    if completion == "none":
        return None
    return 1.0 if completion == answer else 0.25

def fragile_batch(completions, answer, **columns):
    assert len(answer) == len(completions)
    return [fragile(*pair) for pair in zip(completions, answer)]

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
    return folder / "mine.py"


@pytest.fixture(scope="module")
def fragile(functions):
    return load_task("running-total", reward=f"{functions}:fragile", reward_timeout=2.0)


def start(functions, name, columns=("level",)):
    return VerifierProcess(partial(load_reward_function, f"{functions}:{name}", columns), timeout=20.0)


def test_verls_form(functions):
    row = {"reward_model": {"ground_truth": [1]}, "extra_info": {"index": 3}}
    problems = [Problem("p", "[1]", "s", row), Problem("p", "[1]", "other", row)]
    assert start(functions, "compute_score").score(problems, ["abc", ""]) == [(3.0, True, None), (0.0, False, None)]


def test_trls_form_gets_all_at_once_and_messages_where_prompts_are(functions):
    verifier = start(functions, "lengths")
    texts = [Problem("p", "", row={"prompt": "p", "level": level}) for level in (0, 1)]
    chats = [Problem([{"role": "user", "content": "p"}], "", row={"level": level}) for level in (0, 1)]
    for problems in (texts, chats):
        assert verifier.score(problems, ["abc", "ab"]) == [(0.3, False, None), (1.2, True, None)]
    assert start(functions, "only_completions").score(texts, ["", ""]) == [(1.0, True, None)] * 2


def test_form_by_completion_and_answer(functions):
    problem = Problem("p", "yes", row={"prompt": "other", "answer": "no", "level": 7})
    verdicts = start(functions, "reward").score([problem] * 2, ["yes", "no"])
    assert verdicts == [(-1.0, True, None), (-1.0, False, None)]


@pytest.mark.parametrize(
    ("completion", "says"),
    [
        ("raise", "KeyError: 'no such thing'"),
        ("exit", "SystemExit: 3"),
        ("die", "the verifier's process died: exit code 3"),
        ("kill", "the verifier's process died: SIGKILL"),
        ("crash", "the verifier's process died: SIGSEGV"),
        ("hang", "the verifier timed out after 2 s"),
        ("hang in C", "the verifier timed out after 2 s"),
        ("nan", "a reward function must return a finite score; got nan"),
        ("none", "a reward function must return a number or a dict with a number as score; got None"),
    ],
)
def test_a_failing_verifier_costs_its_row_only(fragile, completion, says):
    before, failed, after = fragile.score([Problem("", "4")] * 3, ["4", completion, "5"])
    assert (before, after) == ((1.0, True, None), (0.25, False, None))
    assert (failed.score, failed.is_correct) == (0.0, False)
    assert says in failed.error


def test_a_failing_batch_is_taken_row_by_row(functions):
    task = load_task("running-total", reward=f"{functions}:fragile_batch", reward_timeout=2.0)
    verdicts = task.score([Problem("", "4")] * 4, ["4", "raise", "hang", "5"])
    assert [verdict[:2] for verdict in verdicts] == [(1.0, True), (0.0, False), (0.0, False), (0.25, False)]
    assert [bool(verdict.error) for verdict in verdicts] == [False, True, True, False]
    too_few = start(functions, "too_few")
    assert too_few.score([Problem("", "")] * 2, ["", ""]) == [(1.0, True, None)] * 2


def test_an_embedded_task_keeps_its_problems(fragile, task):
    assert fragile.name == task.name
    assert fragile.tokenizer.get_vocab() == task.tokenizer.get_vocab()
    assert fragile.final_answer("# 3") == "3"


def test_the_process_ends_with_its_owner_and_with_what_it_started(functions):
    verifier = start(functions, "reward")
    process = verifier._process
    del verifier
    assert process.poll() is not None


def test_the_process_is_started_again_after_it_was_closed(functions):
    verifier = start(functions, "only_completions")
    verifier.close()
    assert verifier.score([Problem("", "")], [""]) == [(1.0, True, None)]


def test_an_interrupted_call_leaves_no_answer_for_the_next(functions, monkeypatch):
    verifier = start(functions, "fragile")
    with monkeypatch.context() as patch:
        patch.setattr(verifier, "_connection", Interrupted(verifier._connection))
        with pytest.raises(KeyboardInterrupt):
            verifier.score([Problem("", "4")], ["4"])
    assert verifier.score([Problem("", "4")], ["5"]) == [(0.25, False, None)]


class Interrupted:
    """A connection whose owner is interrupted while it waits."""

    def __init__(self, connection):
        self.send, self.close = connection.send, connection.close

    def poll(self, timeout):
        raise KeyboardInterrupt


SCRIPT = """
import sys
from vapo.tasks import Problem, load_task
print("once")
task = load_task("running-total", reward=sys.argv[1])
print(task.score([Problem("", "4")], ["4"])[0].score, task._verifier._process.pid)
"""


def test_works_in_a_script_without_a_main_guard_and_ends_with_it(functions, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script, f"{functions}:fragile"], capture_output=True, text=True, timeout=120, check=True
    )
    once, result = done.stdout.splitlines()
    score, pid = result.split()
    assert (once, score) == ("once", "1.0")
    assert "said" in done.stderr
    assert not os.path.exists(f"/proc/{pid}") or sys.platform != "linux"


def test_a_killed_parent_leaves_no_process(functions, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + "sys.stdout.flush(); import time; time.sleep(1000)")
    parent = subprocess.Popen([sys.executable, script, f"{functions}:fragile"], stdout=subprocess.PIPE, text=True)
    parent.stdout.readline()
    pid = int(parent.stdout.readline().split()[1])
    parent.kill()
    parent.wait()
    parent.stdout.close()
    while is_running(pid):  # It ends when it sees its connection closed; a hanging test says that it does not.
        time.sleep(0.01)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (1, (1.0, True)),
        (0.99, (0.99, False)),
        (True, (1.0, True)),
        ({"score": 0.2, "is_correct": True}, (0.2, True)),
        ({"score": 1.0, "acc": False}, (1.0, False)),
        ({"score": 1.0, "acc": 0.5}, (1.0, False)),
        ({"score": 2.0, "pred": "4"}, (2.0, True)),
    ],
)
def test_what_a_function_may_return(result, verdict):
    assert to_verdict(result) == (*verdict, None)


@pytest.mark.parametrize("result", ["1.0", None, [1.0], {"reward": 1.0}, {"score": None}])
def test_what_it_must_not_return(result):
    with pytest.raises(TypeError):
        to_verdict(result)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("nowhere.py:f", "with an existing file; got 'nowhere.py:f'"),
        ("{folder}:f", "with an existing file"),
        ("{folder}/mine.py:missing", "must name a plain function; .*mine.py has None under that name"),
        ("{folder}/mine.py:NUMBER", "has 3 under that name"),
        ("{folder}/mine.py:later", "must name a plain function"),
        ("{folder}/mine.py:unknown", r"must be compute_score\(data_source.*got unknown\(text\)"),
        ("{folder}/mine.py:needs_column", "must be among answer, completions, prompts; got difficulty"),
        ("{folder}/broken.py:f", "No module named 'no_such_module'"),
        ("best", "reward of running-total must be math or \"file.py:function\"; got 'best'"),
    ],
)
def test_bad_functions_are_refused_before_training(functions, reward, message):
    with pytest.raises(ValueError, match=message):
        load_task("running-total", reward=reward.format(folder=functions.parent))


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("inf"), float("nan")])
def test_rejects_bad_timeouts(functions, timeout):
    with pytest.raises(ValueError, match="reward_timeout must be a finite number of seconds > 0; got"):
        load_task("running-total", reward=f"{functions}:fragile", reward_timeout=timeout)
