"""Runs the command, here or in a process of its own, and the small workload that the tests ask about."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SMALL = ("--model", "z_image", "--resolution", "256", "--caption-tokens", "32", "--rank", "4")
SMALL_REQUEST: dict[str, Any] = {"model": "z_image", "resolution": 256, "caption_tokens": 32, "rank": 4}


@dataclass(frozen=True)
class Done:
    """What a run of the command left."""

    status: int
    out: str
    err: str

    @property
    def flat(self) -> str:
        """Standard output as one line."""
        return " ".join(self.out.split())

    @property
    def error(self) -> str:
        """The only line on standard error, which must be an error."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("advise: error: "), self.err
        return lines[0].removeprefix("advise: error: ")


def environment(cache: Path, **more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FORCE_COLOR", "ADVISE_DEBUG")}
    return {**kept, "ADVISE_CACHE_DIR": str(cache), **more}


def in_process_of_its_own(args: list[str], cache: Path, *, given: str | bytes = b"", **more: str) -> Done:
    text = given.encode() if isinstance(given, str) else given
    done = subprocess.run(
        [sys.executable, "-m", "advisor.cli", *args],
        input=text,
        capture_output=True,
        env=environment(cache, **more),
        timeout=300,
        check=False,
    )
    return Done(done.returncode, done.stdout.decode(), done.stderr.decode())
