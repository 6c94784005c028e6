"""Signals that come where Python would swallow an exception."""

import os
import signal
import time

import pytest

from advisor.interruption import Stopped, terminated_cleanly


class Slow:
    """Its finalizer takes a signal."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)


def test_a_signal_in_a_finalizer_is_not_lost() -> None:
    reached = []

    def work() -> None:
        with terminated_cleanly():
            Slow()
            time.sleep(5)
            reached.append("the end")

    began = time.monotonic()
    with pytest.raises(Stopped) as stopped:
        work()
    assert stopped.value.status == 143
    assert not reached
    assert time.monotonic() - began < 3
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def _signalled() -> None:
    with terminated_cleanly():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)


def test_a_signal_elsewhere_stops_at_once() -> None:
    with pytest.raises(Stopped):
        _signalled()
