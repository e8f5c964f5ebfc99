"""A process of its own for verifiers, so that one that raises, hangs or dies costs a row and not the run.

The process is started afresh (nothing of the parent is imported again, so a parent needs no ``__main__`` guard) and,
after a verifier hung or died, started again. Time is kept outside of it: a verifier that hangs in C code is ended too.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NamedTuple

from vapo.tasks import Problem, Verdict

START_SECONDS = 120.0
_START = "import sys; sys.path[:] = sys.argv[2:]; from vapo.tasks.worker import serve; serve(int(sys.argv[1]))"


class Verifier(NamedTuple):
    """What the process runs.

    Attributes:
        score: Gives one verdict for each problem and its response.
        takes_batch: Give it all responses at once instead of one at a time.
    """

    score: Callable[[Sequence[Problem], Sequence[str]], list[Verdict]]
    takes_batch: bool = False


class VerifierProcess:
    """A verifier in a process of its own, which ends with this object or with the parent."""

    def __init__(self, build: Callable[[], Verifier], *, timeout: float) -> None:
        """Start the process and build the verifier in it.

        Args:
            build: Makes the verifier; a module's function or a partial of one, since it is pickled.
            timeout: Seconds that one call of the verifier may take, be it for a row or for a batch.

        Raises:
            ValueError: If ``timeout`` is not positive and finite, or ``build`` raises.
        """
        if not (timeout > 0 and math.isfinite(timeout)):
            raise ValueError(f"reward_timeout must be a finite number of seconds > 0; got {timeout}")
        self._build, self._timeout = build, timeout
        self._start()

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Verdict]:
        """Score each response; a row on which the verifier fails gets 0 and says why.

        A verifier that takes a batch gets all rows in one call. If that fails, it gets them one at a time.
        """
        if self._takes_batch and len(problems) > 1:
            verdicts = self._ask(problems, responses)
            if not isinstance(verdicts, str):
                return verdicts
        return [self._score_row(*pair) for pair in zip(problems, responses, strict=True)]

    def close(self) -> None:
        """End the process; the next call of :meth:`score` starts another."""
        self._end()

    def _score_row(self, problem: Problem, response: str) -> Verdict:
        verdicts = self._ask([problem], [response])
        return Verdict(0.0, False, verdicts) if isinstance(verdicts, str) else verdicts[0]

    def _ask(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Verdict] | str:
        """The verdicts, or what went wrong."""
        if not self._end.alive or self._process.poll() is not None:
            try:
                self.close()
                self._start()
            except ValueError as error:
                return str(error)
        try:
            self._connection.send((problems, responses))
            if self._connection.poll(self._timeout):
                return self._connection.recv()
            _kill_group(self._process)
            error = f"the verifier timed out after {self._timeout:g} s"
        except (EOFError, OSError):
            error = f"the verifier's process died: {self._wait()}"
        except BaseException:
            _kill_group(self._process)  # An answer that nobody waited for must not be taken for the next one.
            self.close()
            raise
        self.close()
        return error

    def _start(self) -> None:
        ours, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno()), *sys.path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # What a verifier prints must not get between the lines of the run's own output.
                start_new_session=True,
            )
        self._connection = ours
        self._end = weakref.finalize(self, _end, self._process, ours)
        try:
            ours.send((self._build, self._timeout))
            reply = ours.recv() if ours.poll(START_SECONDS) else f"the verifier did not start in {START_SECONDS:g} s"
        except (EOFError, OSError):
            reply = f"the verifier's process died as it started: {self._wait()}"
        if isinstance(reply, str):
            self.close()
            raise ValueError(reply)
        self._takes_batch = reply

    def _wait(self) -> str:
        """How the process ended."""
        try:
            code = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _end(process: subprocess.Popen, connection: Connection) -> None:
    """Let the process end by itself, then end what is left of it and of what it started."""
    connection.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=2)
    _kill_group(process)
    process.wait()


def _kill_group(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def serve(descriptor: int) -> None:
    """Build a verifier and answer with its verdicts, or the traceback where it raises, until the parent is gone."""
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    build, timeout = connection.recv()
    try:
        verifier = build()
    except ValueError as error:
        return connection.send(str(error))
    except BaseException:
        return connection.send(traceback.format_exc())
    connection.send(verifier.takes_batch)
    with open(os.devnull, "w") as nowhere, contextlib.suppress(EOFError):
        while True:
            problems, responses = connection.recv()
            # The parent keeps the time; this ends a call that hangs after the parent was killed.
            faulthandler.dump_traceback_later(timeout + 5, exit=True, file=nowhere)
            connection.send(_verdicts(verifier, problems, responses))
            faulthandler.cancel_dump_traceback_later()


def _verdicts(verifier: Verifier, problems: Sequence[Problem], responses: Sequence[str]) -> list[Verdict] | str:
    try:
        return verifier.score(problems, responses)
    except BaseException:
        return traceback.format_exc()
