"""Where the installed `advise` starts: imports nothing slow before Ctrl-C and SIGTERM are answered in one line."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "stopped by SIGTERM"}


def main() -> int:
    """Runs the command; returns its exit status."""
    before = {number: signal.getsignal(number) for number in WORDS}
    usual = (signal.default_int_handler, signal.SIG_DFL)
    taken = [
        number for number, handler in before.items() if handler in usual
    ]  # not one that is ignored, as under nohup
    for number in taken:
        signal.signal(number, _leave)
    from advisor import cli

    for number in taken:
        signal.signal(number, before[number])
    return cli.main()


def _leave(number: int, frame: FrameType | None) -> Any:
    """Nothing is written or held yet, so there is nothing to clean up."""
    os.write(2, f"advise: error: {WORDS[signal.Signals(number)]}\n".encode())
    os._exit(128 + number)
