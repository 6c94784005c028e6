"""A device whose copies happen as late as its queues allow, and that refuses what would be a race on a real one."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from advisor.runtime.devices import Device


class Hazard(AssertionError):
    """On a real device this would read or overwrite memory at the wrong time."""


@dataclass
class Pending:
    """A copy that was started."""

    queue: str
    to: torch.Tensor | None
    origin: torch.Tensor | None
    host: torch.Tensor
    memory: weakref.ref[Any]
    """The storage on the device; the device does not keep it alive."""
    device_view: tuple[Any, ...]
    after: Pending | None
    done: bool = False
    earlier: list[Pending] = field(default_factory=list)


class LateDevice(Device):
    """Computation happens at once; a copy only when something waits for it or for a later one of the same queue.

    Args:
        most_pinned: bytes of page-locked memory that there are.
        step_seconds: what `seconds` answers, in turn.
    """

    asynchronous = True

    def __init__(self, most_pinned: int = 2**40, step_seconds: list[float] | None = None) -> None:
        self.left = most_pinned
        self.pinned_ranges: list[tuple[int, int]] = []
        self.queues: dict[str, list[Pending]] = {"out": [], "in": []}
        self.live: dict[int, int] = {}
        self.live_peak = 0
        self.step_seconds = step_seconds
        self.trims = 0

    def pinned(self, size: int) -> torch.Tensor | None:
        if size > self.left:
            return None
        self.left -= size
        memory = torch.empty(size, dtype=torch.uint8)
        self.pinned_ranges.append((memory.data_ptr(), memory.data_ptr() + size))
        return memory

    def copy_out(self, host: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        if not self._is_pinned(host):
            host.copy_(source)
            return None
        return self._start("out", host, source, after)

    def copy_in(self, target: torch.Tensor, host: torch.Tensor, after: Any) -> Any:
        storage = target.untyped_storage()
        self.live[id(storage)] = storage.nbytes()
        weakref.finalize(storage, self.live.pop, id(storage), None)
        self.live_peak = max(self.live_peak, sum(self.live.values()))
        if not self._is_pinned(host):
            target.copy_(host)
            return None
        target.fill_(float("nan") if target.dtype.is_floating_point else 77)
        return self._start("in", host, target, after)

    def _is_pinned(self, host: torch.Tensor) -> bool:
        return any(low <= host.data_ptr() < high for low, high in self.pinned_ranges)

    def _start(self, queue: str, host: torch.Tensor, memory: torch.Tensor, after: Pending | None) -> Pending:
        waiting = [p for q in self.queues.values() for p in q if not p.done]
        ordered: list[Pending] = [p for p in waiting if p.queue == queue]
        step = after
        while step is not None:
            ordered += [step, *step.earlier]
            step = step.after
        for p in waiting:
            if _overlap(p.host, host) and not any(p is o for o in ordered) and not (p.queue == queue == "in"):
                raise Hazard("host memory is used again before the copy that uses it is done")
        view = (memory.size(), memory.stride(), memory.storage_offset(), memory.dtype)
        new = Pending(queue, None, None, host, weakref.ref(memory.untyped_storage()), view, after)
        new.earlier = [p for p in self.queues[queue] if not p.done]
        self.queues[queue] = [*new.earlier, new]
        return new

    def _run(self, p: Pending | None) -> None:
        if p is None or p.done:
            return
        for earlier in p.earlier:
            self._run(earlier)
        self._run(p.after)
        p.done = True
        storage = p.memory()
        if storage is None:
            raise Hazard("device memory was freed before the copy that uses it is done")
        size, stride, offset, dtype = p.device_view
        memory = torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)
        if p.queue == "out":
            p.host.copy_(memory)
        else:
            memory.copy_(p.host)

    def wait(self, event: Any) -> None:
        self._run(event)

    def release(self, event: Any) -> None:
        self._run(event)

    def finish(self, event: Any) -> None:
        self._run(event)

    def mark(self) -> Any:
        if self.step_seconds is None:
            raise RuntimeError("no clock")
        return None

    def seconds(self, start: Any, end: Any) -> float:
        assert self.step_seconds is not None
        return self.step_seconds.pop(0)

    def trim(self) -> None:
        self.trims += 1


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes
