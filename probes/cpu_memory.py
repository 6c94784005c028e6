"""Measured allocated memory of a CPU run, from the profiler's allocator events (not from this project's own recorder)."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from probes.build import Job


@dataclass(frozen=True)
class CpuPeak:
    """Bytes."""

    peak: int
    """Resident storages plus the largest sum of allocator events."""
    resident: int
    left: int
    """What the events leave allocated; not 0 means that the call kept memory."""


def resident_bytes(job: Job, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of every storage that is alive between two steps: parameters, buffers, optimizer state, the batch."""
    seen: dict[int, int] = {}

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, dict):
            for v in value.values():
                add(v)
        elif isinstance(value, (list, tuple)):
            for v in value:
                add(v)

    for t in [*job.model.parameters(), *job.model.buffers()]:
        add(t.data)
        add(t.grad)
    add(job.inputs)
    add(job.target)
    for state in optimizer.state.values():
        add(state)
    return sum(seen.values())


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Keeps the profiler library's own start and stop lines, which it writes to file descriptor 2, off the terminal."""
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:
        yield
        return
    try:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 2)
        os.close(sink)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def profiled_peak(run: Callable[[], object], resident: int) -> CpuPeak:
    """Runs `run` under `torch.profiler` and sums its CPU allocator events in time order.

    Args:
        run: one training step; called once.
        resident: bytes that are allocated before it starts (`resident_bytes`).
    """
    gc.collect()
    with (
        _silent_stderr(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile,
    ):
        run()
    events = [
        (e.start_ns(), e.nbytes())
        for e in profile.profiler.kineto_results.events()
        if e.name() == "[memory]" and e.device_type() == torch.autograd.DeviceType.CPU
    ]
    events.sort(key=lambda e: e[0])
    current = peak = 0
    for _, size in events:
        current += size
        peak = max(peak, current)
    return CpuPeak(resident + peak, resident, current)
