"""Ctrl-C and SIGTERM: the run stops at the next step boundary with a checkpoint; a second signal stops it at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from vapo.models.sharding import max_over_ranks

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class RunStopped(KeyboardInterrupt):
    """A run ended by a signal after a step, with a checkpoint of that step.

    Attributes:
        number: The signal.
    """

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


class StopSignals:
    """Keeps the first signal for the next step boundary; the second one interrupts at once.

    A context manager. Outside the main thread signals stay as they are.
    """

    def __init__(self) -> None:
        self._received = 0
        self._earlier: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._earlier = {number: signal.signal(number, self._keep) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def on_any_rank(self) -> int:
        """The signal that a rank has received, 0 for none. Collective: all ranks stop after the same step."""
        return max_over_ranks(self._received)

    def _keep(self, number: int, frame: FrameType | None) -> None:
        if self._received:
            raise KeyboardInterrupt(f"{signal.Signals(number).name} came a second time")
        self._received = number
        # Not print: the signal may have come in the middle of one.
        os.write(2, b"\nstopping after this step; once more stops at once\n")
