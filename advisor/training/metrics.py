"""Metrics of a run as JSON lines: one object a step, and one an event. Every line is on disk when the next step begins.

A step: ``step``, ``loss``, ``seconds``, ``lr``, ``schedule``, ``allocated_bytes`` and ``reserved_bytes`` (PyTorch's peaks during the
step; null without a CUDA device). An event has ``event`` and ``step``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

from probes import store
from probes.workload import WorkloadError


class Metrics:
    """A metrics file: checked when made, written to from `start` on.

    Args:
        path: None: nothing is written.
        after: steps that are kept of a file that is there: those up to this one; later lines belong to steps that are run again.

    Raises:
        WorkloadError: the file holds something else, or cannot be read.
    """

    def __init__(self, path: Path | None, *, after: int = 0) -> None:
        self.path = path
        self.failed: str | None = None
        """Why writing stopped."""
        self._file: TextIO | None = None
        self._kept: list[str] = []
        if path is None:
            return
        try:
            self._kept = [line for line in _lines(path) if json.loads(line)["step"] <= after]
        except OSError as error:
            raise WorkloadError(f"--metrics {path}: cannot be read ({error.strerror})") from None

    def start(self) -> None:
        """Opens the file; what an earlier run wrote after the kept steps goes.

        Raises:
            WorkloadError: it cannot be written.
        """
        if self.path is None:
            return
        try:
            store.atomic_write(self.path, "".join(f"{line}\n" for line in self._kept).encode())
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise WorkloadError(f"--metrics {self.path}: cannot be written ({error.strerror})") from None

    def write(self, **values: Any) -> None:
        """Adds a line. A disk that is full ends the metrics, not the run: see `failed`."""
        if self._file is None or self.failed is not None:
            return
        try:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()
        except OSError as error:
            self.failed = f"--metrics {self.path}: no longer written ({error.strerror})"

    def close(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self.failed = self.failed or f"--metrics {self.path}: not complete ({error.strerror})"
            self._file = None


def _lines(path: Path) -> list[str]:
    """The lines of an earlier run; a last one that was cut off is left out.

    Raises:
        WorkloadError: the file is no metrics file.
    """
    if not path.exists():
        return []
    try:
        lines = path.read_text("utf-8").splitlines()
    except UnicodeDecodeError:
        raise WorkloadError(f"--metrics {path}: the file holds something else; give another name") from None
    for number, line in enumerate(lines, 1):
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            step = None
        if isinstance(step, bool) or not isinstance(step, int):
            if number == len(lines) > 1:
                return lines[:-1]
            raise WorkloadError(f"--metrics {path}: line {number} is no line of metrics; give another name")
    return lines
