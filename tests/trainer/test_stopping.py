"""A signal waits for the end of the step, on all ranks; a second one does not wait."""

import os
import signal
import threading

import pytest
from ranks import run_on_ranks

from vapo.models.sharding import rank
from vapo.stopping import StopSignals


def signalled_on_the_second_rank():
    with StopSignals() as signals:
        found = [signals.on_any_rank()]
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return [*found, signals.on_any_rank()]


def test_a_signal_on_one_rank_stops_them_all_after_the_same_step():
    assert run_on_ranks(2, signalled_on_the_second_rank) == [[0, signal.SIGTERM]] * 2


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_interrupts_and_the_handlers_are_put_back(second, capfd):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt), StopSignals():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), second)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert capfd.readouterr().err.count("stopping after this step") == 1


def test_outside_the_main_thread_signals_stay_as_they_are():
    handlers = []

    def enter():
        with StopSignals() as signals:
            handlers.append((signal.getsignal(signal.SIGTERM), signals.on_any_rank()))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handlers == [(before, 0)]
