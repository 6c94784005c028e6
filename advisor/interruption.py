"""Ctrl-C and SIGTERM in a run: the step, or the file being written, is finished first."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
AGAIN_SECONDS = 0.02
"""A signal that came where nothing can be raised is looked at again after so long."""


class Stopped(KeyboardInterrupt):
    """A run was asked to stop, and has. The message says what is left.

    Args:
        number: the signal.
        left: what is there now, for the message.
    """

    def __init__(self, number: int, left: str = "") -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}" + (f" {left}" if left else ""))
        self.number = number
        self.left = left

    @property
    def status(self) -> int:
        """The exit status that shells expect: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + self.number


@contextlib.contextmanager
def terminated_cleanly() -> Iterator[None]:
    """SIGTERM raises `Stopped` in here, so that what is half done is cleaned up as after Ctrl-C. Does nothing outside the main
    thread, and where somebody else handles the signal or ignores it."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if _in_a_finalizer(frame) and hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
            return
        raise Stopped(signal.SIGTERM)

    others: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL}
    signal.signal(signal.SIGTERM, stop)
    if hasattr(signal, "SIGALRM") and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
        others[signal.SIGALRM] = signal.SIG_DFL
        signal.signal(signal.SIGALRM, stop)
    try:
        yield
    finally:
        if len(others) > 1:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in others.items():
            signal.signal(number, handler)


def _in_a_finalizer(frame: FrameType | None) -> bool:
    """Whether Python would swallow an exception raised here: it ignores those of ``__del__``."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


class Interruption:
    """Notes a signal instead of dying from it, while `deferred`; elsewhere, and for a second signal, `Stopped` is raised at once.

    A context manager; outside the main thread, where Python allows no handlers, it does nothing.

    Args:
        say: told that the run is stopping.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._before: dict[int, Any] = {}
        self._deferred = False
        self.asked: int | None = None
        """The signal that asked the run to stop."""

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """In here, the first signal waits until somebody looks at `asked`."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._deferred and self.asked is None:
            self.asked = number
            with contextlib.suppress(RuntimeError):  # the stream may be in use where the signal came
                self._say("stopping after this step; once more to stop at once")
            return
        raise Stopped(number)
