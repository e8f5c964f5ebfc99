"""Workers for verifiers: processes of their own, so that one that raises, hangs or dies costs a row and not the run.

A worker starts afresh: it imports the verifier and nothing that the parent has, so torch is not in it and the parent
needs no ``__main__`` guard. After a verifier hung or died, its worker starts again. The parent keeps the time: a
verifier that hangs in C code is ended too, with the processes that it started.

Pools of processes from libraries (multiprocessing, pebble) import the parent's ``__main__`` again, kill a worker but
not what it started, and leave a busy worker alive after a parent that was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import signal
import subprocess
import sys
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

from vapo.tasks import Problem, Verdict

START_SECONDS = 120.0
GRACE_SECONDS = 2.0
_START = "import sys; sys.path[:] = sys.argv[2:]; from vapo.tasks.worker import serve; serve(int(sys.argv[1]))"


class Verifier(NamedTuple):
    """What a worker runs.

    Attributes:
        score: Gives one result for each problem and its response.
        takes_batch: Give it all responses at once instead of one at a time.
    """

    score: Callable[[Sequence[Problem], Sequence[str]], list[Verdict]]
    takes_batch: bool = False


Request = tuple[Sequence[Problem], Sequence[str]] | None
Answer = list[Verdict] | bool | str


class VerifierPool:
    """A verifier in as many workers as this rank has cores; they end with this object or with the process that has it.

    The first worker starts at once, the others when there are responses for them. A verifier that takes a batch has one
    worker: it may hold a model.
    """

    def __init__(self, build: Callable[[], Verifier], *, timeout: float) -> None:
        """Start the first worker and build the verifier in it.

        Args:
            build: Makes the verifier; a module's function or a partial of one, since it is pickled.
            timeout: Seconds that one call of the verifier may take, be it for a row or for a batch.

        Raises:
            ValueError: If ``timeout`` is not positive and finite, or ``build`` raises.
        """
        if not (timeout > 0 and math.isfinite(timeout)):
            raise ValueError(f"reward_timeout must be a finite number of seconds > 0; got {timeout}")
        self._workers = [_Worker(build, timeout)]
        weakref.finalize(self, _end, self._workers)
        (self._takes_batch,) = self._ask([None])
        if isinstance(self._takes_batch, str):
            raise ValueError(self._takes_batch)
        if not self._takes_batch:
            self._workers += [_Worker(build, timeout) for _ in range(num_workers() - 1)]

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Verdict]:
        """Score each response; a row on which the verifier fails gets 0 and says why.

        A verifier that takes a batch gets all rows in one call. If that fails, it gets them one at a time.
        """
        rows = [([problem], [response]) for problem, response in zip(problems, responses, strict=True)]
        if self._takes_batch and len(rows) > 1:
            (verdicts,) = self._ask([(problems, responses)])
            if not isinstance(verdicts, str):
                return verdicts
        answers = self._ask(rows)
        return [Verdict(0.0, False, answer) if isinstance(answer, str) else answer[0] for answer in answers]

    def close(self) -> None:
        """End the workers; the next call of :meth:`score` starts others."""
        _end(self._workers)

    def _ask(self, requests: Sequence[Request]) -> list[Answer]:
        """Have requests answered, as many at once as there are workers; the answers are in the requests' order."""
        answers: list[Answer] = [""] * len(requests)
        waiting, idle = deque(enumerate(requests)), self._workers[::-1]
        busy: dict[_Worker, int] = {}
        try:
            while waiting or busy:
                while waiting and idle:
                    worker, (number, request) = idle.pop(), waiting.popleft()
                    worker.ask(request)
                    busy[worker] = number
                seconds = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
                ready = wait([worker.connection for worker in busy if worker.answer is None], seconds)
                for worker in list(busy):
                    if worker.answer is None and (worker.connection in ready or time.monotonic() >= worker.deadline):
                        worker.go_on(worker.connection in ready)
                    if worker.answer is not None:
                        answers[busy.pop(worker)] = worker.answer
                        idle.append(worker)
        except BaseException:
            for worker in self._workers:
                worker.kill()  # An answer that nobody waited for must not be taken for the next one.
            raise
        return answers


def num_workers() -> int:
    """Return this rank's share of the cores that the process may use, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class _Worker:
    """A process that is started when it is first asked, and again after it has ended.

    Attributes:
        answer: What came of the request: the verifier's results or, as a text, what went wrong; None until it is known.
        deadline: Until when to wait for a message, on the monotonic clock.
    """

    def __init__(self, build: Callable[[], Verifier], timeout: float) -> None:
        self._build, self._timeout = build, timeout
        self._process: subprocess.Popen | None = None
        self._group: int | None = None

    def ask(self, request: Request) -> None:
        """Send a request; None asks whether the verifier takes a batch."""
        self.answer: Answer | None = None
        self._steps = self._answered(request)
        self.go_on(None)

    def go_on(self, has_come: bool | None) -> None:
        """Continue after a message has come or the time has run out: to the next wait or to the answer."""
        try:
            self.deadline = time.monotonic() + self._steps.send(has_come)
        except StopIteration as end:
            self.answer, self.deadline = end.value, 0.0

    def _answered(self, request: Request) -> Generator[float, bool | None, Answer]:
        """Yield how many seconds to wait, receive whether a message has come, and return the answer."""
        when = ""
        try:
            if self._process is None or self._process.poll() is not None:
                self._start()
                when = " as it started"
                self.connection.send(self._build)
                if not (yield START_SECONDS):
                    self.kill()
                    return f"the verifier did not start in {START_SECONDS:g} s"
                reply = self.connection.recv()
                if isinstance(reply, str):
                    self.kill()
                if isinstance(reply, str) or request is None:
                    return reply
                when = ""
            self.connection.send(request)
            if (yield self._timeout):
                return self.connection.recv()
            error = f"the verifier timed out after {self._timeout:g} s"
        except (EOFError, ConnectionError):
            error = f"the verifier's process died{when}: {self._how_it_ended()}"
        except Exception:  # What cannot be pickled, or a process that the system refuses.
            error = traceback.format_exc()
        self.kill()
        return error

    def _start(self) -> None:
        _end([self])  # What an earlier process left.
        self.connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno()), *sys.path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,
                stdout=2,  # What a verifier prints must not get between the lines of the run's own output.
                start_new_session=True,
            )
        self._group = self._process.pid

    def kill(self) -> None:
        """End the process and what it started."""
        if self._group is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._group, signal.SIGKILL)
            self._group = None  # Another process may get the number.
            self._process.wait()

    def close(self) -> None:
        """Let the process end by itself when it next looks for a request."""
        if self._process is not None:
            self.connection.close()

    def end(self, seconds: float) -> None:
        """Wait for the process to end, and end what is left of it and of what it started."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
            self.kill()
            self._process.stdin.close()
            self._process = None

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _end(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.close()
    deadline = time.monotonic() + GRACE_SECONDS
    for worker in workers:
        worker.end(max(0.0, deadline - time.monotonic()))


def serve(descriptor: int) -> None:
    """Build a verifier and answer with its results, or the traceback where it raises, until the parent is gone."""
    os.set_inheritable(descriptor, False)
    _end_with_parent()
    with Connection(descriptor) as connection, contextlib.suppress(EOFError, BrokenPipeError):
        try:
            verifier = connection.recv()()
        except ValueError as error:
            return connection.send(str(error))
        except BaseException:
            return connection.send(traceback.format_exc())
        connection.send(verifier.takes_batch)
        pid = os.getpid()
        while True:
            verdicts = _verdicts(verifier, *connection.recv())
            if os.getpid() != pid:
                os._exit(0)  # A child that the verifier forked and let return: the answer is its parent's to give.
            connection.send(verdicts)


def _end_with_parent() -> None:
    """Have Linux kill this process, and what it starts, as soon as the parent's end of stdin closes.

    It closes however the parent ends, and a verifier that hangs cannot delay it.
    """
    parent = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(parent, fcntl.F_SETOWN, -os.getpid())
        fcntl.fcntl(parent, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(parent, fcntl.F_SETFL, os.O_ASYNC)
    if select.select([parent], [], [], 0)[0]:
        os._exit(1)  # It had closed before.


def _verdicts(verifier: Verifier, problems: Sequence[Problem], responses: Sequence[str]) -> list[Verdict] | str:
    try:
        return verifier.score(problems, responses)
    except BaseException:
        return traceback.format_exc()
    finally:
        signal.alarm(0)  # One that a verifier forgot would end the next row.
