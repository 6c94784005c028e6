"""Out of memory: which schedule a run goes on with."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch

from estimators.estimate import Estimate
from estimators.schedule import Schedule

_CPU_MESSAGES = ("DefaultCPUAllocator", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _CPU_MESSAGES)


def smaller(estimates: Sequence[Estimate], current: Schedule, room: int | None) -> list[Estimate]:
    """The schedules to try after `current` ran out of memory, in order.

    From the plan's table: supported, predicted to fit the planned card (all, where not even the current one was), and with a lower
    peak. The largest first, because it costs the least time; of equal ones the faster first.

    Args:
        room: bytes that this device can give to PyTorch; schedules that are predicted to need more come last. None: unknown.
    """
    now = next((e for e in estimates if e.schedule == current), None)
    if now is None:
        return []
    found = [e for e in estimates if e.supported and e.peak < now.peak and (e.fits or not now.fits)]

    def order(e: Estimate) -> tuple[bool, int, float]:
        return (room is not None and e.reserved > room, -e.peak, e.step_seconds or 0.0)

    return sorted(found, key=order)


def room_on(device: torch.device) -> int | None:
    """Bytes that PyTorch could hold on a CUDA device: what is free and what it holds already. None on a CPU."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.mem_get_info(device)[0]) + int(torch.cuda.memory_reserved(device))


def give_back() -> None:
    """Frees what a failed step has left behind."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
