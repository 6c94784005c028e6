"""What the host offload engine needs of a device: memory on the host, two copy queues beside the computation, and events.

`CpuDevice` does everything at once. `CudaDevice` issues copies on streams of its own. The engine's ordering rules are written
against `Device` alone, so they can be tested without a GPU.
"""

from __future__ import annotations

import abc
import os
from dataclasses import dataclass
from typing import Any

import torch

Event = Any
"""Marks the end of a copy on its queue. None: the copy is already done."""


class Device(abc.ABC):
    """Copies between one device and the host. *The computation* is the stream that is current in the calling thread."""

    asynchronous: bool
    """Copies run beside the computation, so it is worth starting them early."""

    @abc.abstractmethod
    def pinned(self, size: int) -> torch.Tensor | None:
        """`size` bytes (uint8) of page-locked memory; None: there is none to be had."""

    @abc.abstractmethod
    def copy_out(self, host: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        """Starts copying device memory to the host, once the computation queued so far and `after` are done.

        Until the computation has waited for the returned event, `source` must stay alive and unchanged. A pageable `host`
        is filled before this returns.
        """

    @abc.abstractmethod
    def copy_in(self, target: torch.Tensor, host: torch.Tensor, after: Event) -> Event:
        """Starts copying back, once the computation queued so far (which may have used `target`'s memory before) and `after`
        are done. Until the computation has waited for the returned event, `target` must stay alive and not be read."""

    @abc.abstractmethod
    def wait(self, event: Event) -> None:
        """Lets the computation, not the host, wait for a copy."""

    @abc.abstractmethod
    def release(self, event: Event) -> None:
        """Lets the computation that started a copy wait for it, so that it may use the memory for something else."""

    @abc.abstractmethod
    def finish(self, event: Event) -> None:
        """Lets the host wait for a copy."""

    @abc.abstractmethod
    def mark(self) -> Any:
        """A point in the computation, for `seconds`."""

    @abc.abstractmethod
    def seconds(self, start: Any, end: Any) -> float:
        """Time between two marks; may wait for them."""

    @abc.abstractmethod
    def trim(self) -> None:
        """Gives page-locked memory that is no longer used back to the system."""


class CpuDevice(Device):
    """Also for meta and fake tensors: copies are clones, made at once."""

    asynchronous = False

    def pinned(self, size: int) -> torch.Tensor | None:
        return None

    def copy_out(self, host: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        host.copy_(source)

    def copy_in(self, target: torch.Tensor, host: torch.Tensor, after: Event) -> Event:
        target.copy_(host)

    def wait(self, event: Event) -> None:
        pass

    def release(self, event: Event) -> None:
        pass

    def finish(self, event: Event) -> None:
        pass

    def mark(self) -> Any:
        return None

    def seconds(self, start: Any, end: Any) -> float:
        return 0.0

    def trim(self) -> None:
        pass


@dataclass(frozen=True)
class _CudaCopy:
    """A copy under way."""

    event: torch.cuda.Event
    started_by: torch.cuda.Stream
    """The computation's stream, whose memory is copied."""


class CudaDevice(Device):
    """One CUDA device with one stream in each direction."""

    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def pinned(self, size: int) -> torch.Tensor | None:
        try:
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError:
            return None

    def copy_out(self, host: torch.Tensor, source: torch.Tensor, after: Event) -> Event:
        if not host.is_pinned():
            host.copy_(source)
            return None
        return self._copy(self._out, host, source, after)

    def copy_in(self, target: torch.Tensor, host: torch.Tensor, after: Event) -> Event:
        if not host.is_pinned():
            target.copy_(host)
            return None
        return self._copy(self._in, target, host, after)

    def _copy(self, stream: torch.cuda.Stream, to: torch.Tensor, origin: torch.Tensor, after: Event) -> Event:
        computation = torch.cuda.current_stream(self.device)
        stream.wait_stream(computation)
        if after is not None:
            stream.wait_event(after.event)
        with torch.cuda.stream(stream):
            to.copy_(origin, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return _CudaCopy(event, computation)

    def wait(self, event: Event) -> None:
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event.event)

    def release(self, event: Event) -> None:
        if event is not None:
            event.started_by.wait_event(event.event)

    def finish(self, event: Event) -> None:
        if event is not None:
            event.event.synchronize()

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def trim(self) -> None:
        if (empty := getattr(torch._C, "_host_emptyCache", None)) is not None:
            empty()


def device_for(device: torch.device) -> Device:
    """The implementation for a tensor's device; devices without one of their own copy synchronously."""
    return CudaDevice(device) if device.type == "cuda" else CpuDevice()


def host_memory_bytes() -> int:
    """Physical memory of this machine; 0 where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0
