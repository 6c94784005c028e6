"""Block swap: the frozen weights of some blocks wait in host memory and are on the device only while they are used.

Frozen weights never change, so nothing is ever copied out: each use brings a copy of the block's, which is let go after it.

* **Forward.** The copy is there while the block runs. What autograd saves of a weight is packed as a reference (which weight, shape,
  strides, offset), so no saved tensor keeps the copy alive. Inside a checkpoint nothing is saved, and no hook is needed.
* **Recomputation** calls the block, or the feed-forward side that it recomputes, and so brings a copy again; what is saved of it is
  held until backward has used it.
* **Backward** of what is not recomputed asks for the references: the first one brings the block back, and it goes with the last one.

The same kernels see the same values in tensors of the same shape and strides, so no result changes.

On a device whose copies run beside the computation, the block that was brought next in the pass before is brought one block early
(forward, recomputation and backward are one sequence, learned in the first pass). So two swapped blocks are on the device at most,
beside what references to a recomputed block hold. A wrong guess is dropped, and costs its copy.

Other weights stay: trained ones (they change), buffers, and parameters that several blocks share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from advisor.runtime.counters import Counters, RuntimeRefused
from advisor.runtime.devices import Device, Event, device_for, host_memory_bytes
from advisor.runtime.offload import Kept
from probes.discover import owned_tensors


class _Reference:
    """A saved view of a swapped weight."""

    __slots__ = ("block", "index", "offset", "size", "stride")

    def __init__(self, block: SwappedBlock, index: int, view: torch.Tensor) -> None:
        self.block, self.index = block, index
        self.size, self.stride, self.offset = view.size(), view.stride(), view.storage_offset()
        block.references += 1

    def get(self) -> torch.Tensor:
        return self.block.copies()[self.index].as_strided(self.size, self.stride, self.offset)

    def __del__(self) -> None:
        self.block.forget()


@dataclass(frozen=True)
class _Delegated:
    """What the saved-tensor hooks around the block made of a tensor that is no weight."""

    packed: Any
    unpack: Callable[[Any], torch.Tensor]

    def get(self) -> torch.Tensor:
        return self.unpack(self.packed)


class SwappedBlock:
    """One block, its weights on the host, and their copies while there are any."""

    def __init__(
        self, name: str, parameters: Sequence[nn.Parameter], hosts: Sequence[torch.Tensor], swapper: Swapper
    ) -> None:
        self.name, self.parameters, self.hosts, self.swapper = name, parameters, hosts, swapper
        self.references = 0
        """Saved views that backward has not released yet."""
        self._depth = 0
        """Calls of the block or of modules in it that are running."""
        self._copies: list[torch.Tensor] = []
        self._positions: dict[int, int] = {}
        """By address of a copy's storage, its number."""
        for p, host in zip(parameters, hosts, strict=True):
            p.data = host

    def run(
        self, forward: Callable[..., Any], in_checkpoint: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls the block, or a module in it, with its weights on the device."""
        self._depth += 1
        try:
            for p, copy in zip(self.parameters, self.copies(), strict=True):
                p.data = copy
            if self._depth > 1 or in_checkpoint or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            with torch.autograd.graph.saved_tensors_hooks(self._packing(), _unpack):
                return forward(*args, **kwargs)
        finally:
            self._depth -= 1
            if not self._depth:
                for p, host in zip(self.parameters, self.hosts, strict=True):
                    p.data = host
                if not (self.references and _in_backward()):
                    self._drop()

    def copies(self) -> list[torch.Tensor]:
        """The weights on the device; brought if they are not there."""
        if not self._copies:
            self._copies = self.swapper.bring(self)
            self._positions = {c.untyped_storage()._cdata: i for i, c in enumerate(self._copies)}
        return self._copies

    def forget(self) -> None:
        """One reference less."""
        self.references -= 1
        if not self.references and not self._depth:
            self._drop()

    def stay(self) -> None:
        """Ends the swap: the weights go to the device for good."""
        for p, copy in zip(self.parameters, self.copies(), strict=True):
            p.data = copy
        self._drop()

    def _drop(self) -> None:
        self._copies, self._positions = [], {}

    def _packing(self) -> Callable[[torch.Tensor], Any]:
        around = torch._C._autograd._top_saved_tensors_default_hooks(True)

        def pack(tensor: torch.Tensor) -> Any:
            index = None if tensor.layout is not torch.strided else self._positions.get(tensor.untyped_storage()._cdata)
            if index is not None and tensor.dtype is self._copies[index].dtype:
                return _Reference(self, index, tensor)
            return Kept.of(tensor) if around is None else _Delegated(around[0](tensor), around[1])

        return pack


def _unpack(saved: _Reference | Kept | _Delegated) -> torch.Tensor:
    return saved.get()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


@dataclass
class _Ahead:
    """A block on its way, which nobody has asked for yet."""

    block: SwappedBlock
    copies: list[torch.Tensor]
    events: list[Event]


class Swapper:
    """Brings blocks to one device.

    Args:
        device: where the model computes.
        pinned_bytes: page-locked host memory that weights may take; None: half of the machine's. What does not fit is pageable.
        queue: the device's copy queues; None: those of `device`.
    """

    def __init__(
        self,
        device: torch.device,
        counters: Counters,
        note: Callable[[str], None],
        pinned_bytes: int | None = None,
        queue: Device | None = None,
    ) -> None:
        self.device, self.counters = device, counters
        self.blocks: list[SwappedBlock] = []
        self._queue = queue or device_for(device)
        self._note = note
        self._pinned_left = host_memory_bytes() // 2 if pinned_bytes is None else pinned_bytes
        self._ahead: _Ahead | None = None
        self._before: list[SwappedBlock] = []
        """Blocks in the order in which the pass before brought them."""
        self._now: list[SwappedBlock] = []
        self._turned = False
        """This pass has come to its backward."""

    def add(self, name: str, parameters: Sequence[nn.Parameter]) -> SwappedBlock:
        """Sends a block's weights to the host."""
        block = SwappedBlock(name, parameters, [self._host(p) for p in parameters], self)
        self.blocks.append(block)
        return block

    def _host(self, p: nn.Parameter) -> torch.Tensor:
        if not self._queue.asynchronous:
            return p.data
        size = p.nbytes
        if size <= self._pinned_left and p.is_contiguous() and (memory := self._queue.pinned(size)) is not None:
            self._pinned_left -= size
            return memory.view(p.dtype).view(p.shape).copy_(p.data)
        self._note(
            "some swapped weights got no page-locked host memory; their copies are slower and hold the computation up"
        )
        return p.data.to("cpu", copy=True)

    def bring(self, block: SwappedBlock) -> list[torch.Tensor]:
        """The block's weights on the device, ready for the computation."""
        backward = _in_backward()
        if not backward and (self._turned or (self._now and self._now[0] is block)):
            self._before, self._now = self._now, []
        self._turned = backward
        self._now.append(block)
        ahead, self._ahead = self._ahead, None
        found = ahead if ahead is not None and ahead.block is block else None
        if ahead is not None and found is None:
            self._wait(ahead)  # a wrong guess: its memory must not be used again before the copy is done
        if found is None:
            found = self._start(block)
        else:
            self.counters.weights_ahead += 1
        self._wait(found)
        at = len(self._now)
        if self._queue.asynchronous and at < len(self._before) and self._before[at - 1] is block:
            following = self._before[at]
            if following is not block and not following._copies:
                self._ahead = self._start(following)
        return found.copies

    def _start(self, block: SwappedBlock) -> _Ahead:
        with torch.no_grad():
            copies = [torch.empty_like(host, device=self.device, pin_memory=False) for host in block.hosts]
            events = [self._queue.copy_in(c, h, None) for c, h in zip(copies, block.hosts, strict=True)]
        self.counters.weights_brought += 1
        self.counters.weight_bytes_brought += sum(c.nbytes for c in copies)
        return _Ahead(block, copies, events)

    def _wait(self, ahead: _Ahead) -> None:
        for event in ahead.events:
            self._queue.wait(event)

    def close(self) -> None:
        """Ends the swap. A backward pass through an earlier forward still works."""
        for block in self.blocks:
            block.stay()
        if self._ahead is not None:
            self._wait(self._ahead)
            self._ahead = None


def swappable(root: nn.Module, names: Sequence[str]) -> dict[str, list[nn.Parameter]]:
    """By block, the frozen parameters that no other part of the model has.

    Raises:
        RuntimeRefused: there is none; or a block is compiled, or a weight is of a kind that cannot be copied piece by piece.
    """
    found = {
        block: [t for t in tensors if isinstance(t, nn.Parameter) and not t.requires_grad]
        for block, tensors in owned_tensors(root, names).items()
    }
    for block, parameters in found.items():
        module = root.get_submodule(block)
        if any(m._compiled_call_impl is not None or type(m).__name__ == "OptimizedModule" for m in module.modules()):
            raise RuntimeRefused(
                f"{block} is compiled, and its weights cannot come and go; do not compile it, or do not swap"
            )
        if any(type(p.data) is not torch.Tensor or type(p) is not nn.Parameter for p in parameters):
            raise RuntimeRefused(f"{block} has quantised weights, which cannot be swapped; use an unquantised base")
    if not any(found.values()):
        raise RuntimeRefused("no block has frozen weights of its own: there is nothing to swap; train an adapter")
    return found
