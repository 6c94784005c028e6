"""Keeps the inputs of checkpoints in host memory between forward and backward.

What moves: a checkpoint's inputs that have a grad_fn (activations). Leaves - parameters, rotary tables, text embeddings
without a trained layer before them - stay where they are, by reference. Everything that a block saves inside a checkpoint
is the checkpoint's business and never comes here.

Lifetimes: the host copy is made during the checkpoint call and lives until the checkpoint's inputs are released, which is
when the last backward node of the unit has run. The device tensor is dropped at once (the caller's variable may keep it
longer). When the unit is recomputed a fresh device tensor is made, which then lives as long as the recomputed graph needs it.
A second backward through the same graph fetches again. For tensors on the CPU the "host copy" is a clone.

Layout: sizes, strides and the alignment of the first element modulo 16 bytes are restored exactly, so that kernels choose
the same path. Expanded dimensions are copied once; tensors with gaps are copied without them and get them back.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from advisor.runtime.arguments import version
from advisor.runtime.counters import Counters, RuntimeRefused

ALIGNMENT_BYTES = 16


class HostCopy:
    """A tensor's elements in host memory, with what is needed to restore it."""

    __slots__ = ("_counters", "buffer", "device", "extent", "lead", "size", "stride")

    def __init__(self, tensor: torch.Tensor, buffer: torch.Tensor, extent: int, counters: Counters) -> None:
        self.buffer = buffer
        self.extent = extent
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.lead = tensor.storage_offset() % max(1, ALIGNMENT_BYTES // tensor.element_size())
        """Elements before the first one in the restored storage."""
        self.device = tensor.device
        self._counters = counters
        counters.host_bytes += self.nbytes
        counters.host_bytes_peak = max(counters.host_bytes_peak, counters.host_bytes)

    @property
    def nbytes(self) -> int:
        return self.buffer.numel() * self.buffer.element_size()

    def __del__(self) -> None:
        self._counters.host_bytes -= self.nbytes


@dataclass(frozen=True)
class _Kept:
    """An input that stays on its device. Saved-tensor hooks switch PyTorch's own check for in-place changes off."""

    tensor: torch.Tensor
    version: int


class Engine(abc.ABC):
    """Moves tensors to the host and back, and counts."""

    def __init__(self, counters: Counters) -> None:
        self.counters = counters

    @abc.abstractmethod
    def put(self, tensor: torch.Tensor) -> HostCopy:
        """Copies `tensor` to the host. When this returns, the caller may drop or overwrite the tensor."""

    @abc.abstractmethod
    def get(self, copy: HostCopy) -> torch.Tensor:
        """A new tensor on the original device, ready for use on the current stream; `copy` stays valid."""

    def saving(self) -> Any:
        """Context in which tensors saved for backward go through this engine."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> HostCopy | _Kept:
        return self.put(tensor) if _movable(tensor) else _Kept(tensor, version(tensor))

    def _unpack(self, packed: HostCopy | _Kept) -> torch.Tensor:
        if isinstance(packed, HostCopy):
            return self.get(packed)
        if version(packed.tensor) != packed.version:
            raise RuntimeRefused(
                f"an input of a recomputed block (shape {tuple(packed.tensor.shape)}) was changed in place between forward "
                "and backward; write the new value to a new tensor"
            )
        return packed.tensor


class SynchronousEngine(Engine):
    """Copies on the current stream and waits: nothing can be freed or read too early. GPU tensors go to pinned memory
    while there is some, else to pageable memory."""

    def put(self, tensor: torch.Tensor) -> HostCopy:
        with torch.no_grad():
            source, extent = _compact(tensor.detach())
            buffer = self._host_buffer(source)
            buffer.copy_(source)
        copy = HostCopy(tensor, buffer, extent, self.counters)
        self.counters.tensors_offloaded += 1
        self.counters.bytes_offloaded += copy.nbytes
        return copy

    def get(self, copy: HostCopy) -> torch.Tensor:
        with torch.no_grad():
            storage = torch.empty(copy.lead + copy.extent, dtype=copy.buffer.dtype, device=copy.device)
            out = storage.as_strided(copy.size, copy.stride, copy.lead)
            if copy.buffer.dim() == 1 and copy.buffer.numel() == copy.extent:
                storage.narrow(0, copy.lead, copy.extent).copy_(copy.buffer)
            else:
                out.copy_(copy.buffer)
        self.counters.tensors_fetched += 1
        self.counters.bytes_fetched += copy.nbytes
        return out

    def _host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        if like.device.type in ("cpu", "meta"):
            return torch.empty(like.shape, dtype=like.dtype, device=like.device)
        try:
            return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)
        except RuntimeError:
            self.counters.pageable_copies += 1
            return torch.empty(like.shape, dtype=like.dtype, device="cpu")


def _movable(tensor: torch.Tensor) -> bool:
    return (
        tensor.grad_fn is not None
        and tensor.layout is torch.strided
        and not is_traceable_wrapper_subclass(tensor)
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _compact(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What to copy of a tensor, and how many elements of storage it spans. Without gaps: its stretch of storage, flat."""
    if tensor.numel() == 0:
        return tensor.reshape(-1), 0
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    if extent <= tensor.numel():
        return tensor.as_strided((extent,), (1,), tensor.storage_offset()), extent
    return tensor, extent
