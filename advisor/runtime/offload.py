"""Keeps tensors in host memory between forward and backward.

What moves is decided by the caller: `Engine.saving` moves a checkpoint's inputs that have a grad_fn (activations); leaves -
parameters, rotary tables, text embeddings without a trained layer before them - stay where they are, by reference. What attention
saves is chosen in `advisor.runtime.attention`.

**One storage, one copy.** Tensors that share a storage are copied together, and a tensor that several checkpoints take is
copied once for all of them. Sizes, strides and the alignment of the first element modulo 16 bytes are restored exactly, so
that kernels choose the same path. Expanded dimensions are copied once; tensors with gaps are copied without them.

**Order of things on a device whose copies run beside the computation.** A copy out starts when the computation has made its source,
into page-locked memory while the pool has some (`advisor.runtime.pool`), else into pageable memory, which waits. The source is
held until the next group (a checkpoint's inputs, a block's attention) has been copied out as well; then the computation waits for
the copy and the source is freed in the computation's order, which needs no wait on the host and no allocator bookkeeping. When
backward first asks for a tensor of a group, the rest of the group and the whole group before it start on their way back, and
nothing further: at most two groups are on the device. With `prefetch`, the group that came next in the step before is
taken instead of the one before, if steps measurably take less time with it.

**Lifetimes.** A host copy lives until the last saved tensor that needs it is released. The device copy lives from the
first request until every saved tensor of the group has been asked for. A second backward through the same graph fetches again.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from advisor.runtime.arguments import version
from advisor.runtime.counters import Counters, RuntimeRefused
from advisor.runtime.devices import Device, Event, device_for, host_memory_bytes
from advisor.runtime.pool import Lease, Pool

ALIGNMENT_BYTES = 16
WARM_UP_PASSES = 3
TIMED_PASSES = 4
"""Passes timed with and as many without the learned order."""
WORTHWHILE = 0.98
"""The learned order is kept if a step takes less than this share of the time without it."""


class Group:
    """Host copies that are needed at about the same time."""

    __slots__ = ("__weakref__", "copies", "index", "of", "touched")

    def __init__(self, of: _Pass) -> None:
        self.of = of
        self.index = len(of.groups)
        self.copies: list[weakref.ref[HostCopy]] = []
        self.touched = False
        of.groups.append(weakref.ref(self))


class _Pass:
    """One forward pass of the model and the backward through it."""

    def __init__(self) -> None:
        self.groups: list[weakref.ref[Group]] = []
        self.touched: list[int] = []
        """Indices of the groups in the order in which backward first asked for them."""
        self.known: dict[int, weakref.ref[HostCopy]] = {}
        """Copies by the address of the storage that they were made of."""


class HostCopy:
    """A stretch of one storage in host memory, with what is needed to restore it."""

    __slots__ = (
        "__weakref__", "ahead", "alive", "buffer", "device", "engine", "extent", "flat", "lead", "lease", "low",
        "origin", "ready", "sparse", "spoiled", "used", "version", "waiting",
    )  # fmt: skip

    def __init__(self, engine: Engine, source: torch.Tensor, low: int, extent: int, sparse: bool) -> None:
        self.engine = engine
        self.device = source.device
        self.low, self.extent = low, extent
        """The stretch's first element in the original storage, and its length in elements."""
        self.lead = low % max(1, ALIGNMENT_BYTES // source.element_size())
        """Elements before the first one in the restored storage."""
        self.sparse = (source.size(), source.stride()) if sparse else None
        """Size and stride of the only tensor of the stretch, where it has gaps."""
        self.origin = weakref.ref(source.untyped_storage())
        self.version = version(source)
        self.spoiled = False
        """The source was changed while it was being copied."""
        self.lease, self.buffer = engine.host_buffer(source)
        self.ready: Event = None
        """The copy out."""
        self.used: Event = None
        """The last copy in either direction."""
        self.ahead: tuple[torch.Tensor, Event] | None = None
        """A copy back that nobody has asked for yet."""
        self.flat: torch.Tensor | None = None
        self.alive: dict[int, Group] = {}
        """Saved tensors that need this copy, by identity, and their groups."""
        self.waiting: set[int] = set()
        c = engine.counters
        c.tensors_offloaded += 1
        c.bytes_offloaded += self.nbytes
        c.host_bytes += self.nbytes
        c.host_bytes_peak = max(c.host_bytes_peak, c.host_bytes)

    @property
    def nbytes(self) -> int:
        return self.buffer.numel() * self.buffer.element_size()

    def covers(self, low: int, extent: int) -> bool:
        return self.sparse is None and self.low <= low and low + extent <= self.low + self.extent

    def __del__(self) -> None:
        if not hasattr(self, "buffer"):
            return
        self.engine.counters.host_bytes -= self.nbytes
        if self.ahead is not None:
            self.engine.device(self.device).release(self.ahead[1])
        if self.lease is not None:
            self.engine.pool(self.device).give_back(self.lease, self.used)


class Moved:
    """A saved tensor that is on the host: a view of a `HostCopy`."""

    __slots__ = ("__weakref__", "copy", "group", "offset", "size", "stride")

    def __init__(self, copy: HostCopy, tensor: torch.Tensor, group: Group) -> None:
        self.copy, self.group = copy, group
        self.size, self.stride = tensor.size(), tensor.stride()
        self.offset = copy.lead + tensor.storage_offset() - copy.low
        copy.alive[id(self)] = group

    @property
    def nbytes(self) -> int:
        return self.copy.nbytes

    def __del__(self) -> None:
        if hasattr(self, "offset"):
            self.copy.alive.pop(id(self), None)
            self.copy.waiting.discard(id(self))
            if not self.copy.waiting:
                self.copy.flat = None


@dataclass(frozen=True)
class Kept:
    """A saved tensor that stays on its device. Saved-tensor hooks switch PyTorch's own check for in-place changes off."""

    tensor: torch.Tensor
    """Without history, as the node that saves its own result would else keep itself alive."""
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Kept:
        return cls(tensor.detach() if tensor.grad_fn is not None else tensor, version(tensor))

    def get(self) -> torch.Tensor:
        if version(self.tensor) != self.version:
            raise RuntimeRefused(
                f"a saved tensor of a block (shape {tuple(self.tensor.shape)}) was changed in place between forward "
                "and backward; write the new value to a new tensor"
            )
        return self.tensor


@dataclass
class _Leaving:
    """Sources of one group that are being copied out."""

    group: Group
    event: Event
    device: Device
    entries: list[tuple[torch.Tensor, weakref.ref[HostCopy]]] = field(default_factory=list)


class Engine:
    """Moves tensors to the host and back, and counts.

    Args:
        counters: what is counted.
        most_buckets: sizes for which page-locked memory is kept; 0: only pageable memory.
        most_bytes: page-locked memory for each device; None: half of the machine's memory.
        prefetch: learn the order of the steps before, and use it where that is faster.
        note: told what was decided about that, and when memory was short.
        make_device: the implementation for a device.
    """

    def __init__(
        self,
        counters: Counters,
        *,
        most_buckets: int = 12,
        most_bytes: int | None = None,
        prefetch: bool = False,
        note: Callable[[str], None] = lambda text: None,
        make_device: Callable[[torch.device], Device] | None = None,
    ) -> None:
        self.counters = counters
        self._note = note
        self._most_buckets = most_buckets
        self._most_bytes = host_memory_bytes() // 2 if most_bytes is None else most_bytes
        self._make_device = make_device or device_for
        self._devices: dict[torch.device, tuple[Device, Pool]] = {}
        self._leaving: deque[_Leaving] = deque()
        self._pass = _Pass()
        self._tuner = _Tuner(note) if prefetch else None

    # devices ----------------------------------------------------------------------------------------------------------

    def device(self, device: torch.device) -> Device:
        return self._of(device)[0]

    def pool(self, device: torch.device) -> Pool:
        return self._of(device)[1]

    def _of(self, device: torch.device) -> tuple[Device, Pool]:
        if device not in self._devices:
            made = self._make_device(device)
            self._devices[device] = made, Pool(made, self._most_buckets, self._most_bytes, self.counters)
        return self._devices[device]

    def host_buffer(self, like: torch.Tensor) -> tuple[Lease | None, torch.Tensor]:
        """Host memory for a dense copy of `like`, from the pool if it has some."""
        size = like.numel() * like.element_size()
        device, pool = self._of(like.device)
        if (lease := pool.lend(size)) is not None:
            return lease, lease.buffer[:size].view(like.dtype).view(like.shape)
        self.counters.pageable_copies += int(device.asynchronous and size > 0)
        where = like.device if like.device.type == "meta" else torch.device("cpu")
        return None, torch.empty(like.shape, dtype=like.dtype, device=where)

    # passes -----------------------------------------------------------------------------------------------------------

    def start_pass(self) -> None:
        """A forward pass begins: nothing is fetched ahead across passes."""
        self.settle()
        if self._tuner is not None and self._devices:
            self._tuner.next_pass(self._pass.touched, next(iter(self._devices.values()))[0])
        self._pass = _Pass()

    def group(self) -> Group:
        """A new group of the current pass."""
        return Group(self._pass)

    def settle(self, but: int = 0) -> None:
        """Lets the computation wait for copies out, except those of the last `but` groups, and frees their sources."""
        while len(self._leaving) > but:
            old = self._leaving.popleft()
            for source, reference in old.entries:
                if (copy := reference()) is not None and version(source) != copy.version:
                    copy.spoiled = True
            old.device.release(old.event)

    def close(self) -> None:
        """Gives memory back; tensors on the host can still be fetched."""
        self.settle()
        for _, pool in self._devices.values():
            pool.close()

    # out --------------------------------------------------------------------------------------------------------------

    def put(self, tensor: torch.Tensor, group: Group | None = None) -> Moved:
        """Copies one tensor to the host. The caller may drop it at once, but not overwrite it."""
        return self.put_together([tensor], group)[0]

    def put_together(self, tensors: Sequence[torch.Tensor], group: Group | None = None) -> list[Moved]:
        """Copies tensors to the host, each storage once."""
        group = group or self.group()
        stretches: dict[tuple[int, torch.dtype], list[int]] = {}
        for i, t in enumerate(tensors):
            stretches.setdefault((t.untyped_storage()._cdata, t.dtype), []).append(i)
        out: dict[int, Moved] = {}
        for members in stretches.values():
            views = [tensors[i] for i in members]
            for i, copy in zip(members, self._copies(views, group), strict=True):
                out[i] = Moved(copy, tensors[i], group)
        if len(self._leaving) > 1:
            self.settle(but=1)
        return [out[i] for i in range(len(tensors))]

    def _copies(self, views: list[torch.Tensor], group: Group) -> list[HostCopy]:
        """A copy for every view of one storage; several views may share one."""
        spans = [_span(v) for v in views]
        known = [self._known(v, *s) for v, s in zip(views, spans, strict=True)]
        fresh = [i for i, c in enumerate(known) if c is None]
        if fresh:
            low = min(spans[i][0] for i in fresh)
            high = max(sum(spans[i]) for i in fresh)
            distinct = {(v.storage_offset(), v.size(), v.stride()): _elements(v) for v in (views[i] for i in fresh)}
            if high - low <= sum(distinct.values()):
                shared = self._copy(
                    views[fresh[0]].detach().as_strided((high - low,), (1,), low), low, high - low, group
                )
                known = [shared if c is None else c for c in known]
            else:
                single: dict[tuple[Any, ...], HostCopy] = {}
                for i in fresh:
                    v, (start, extent) = views[i], spans[i]
                    key = (v.storage_offset(), v.size(), v.stride())
                    if key not in single:
                        if extent <= v.numel():
                            flat = v.detach().as_strided((extent,), (1,), start)
                            single[key] = self._copy(flat, start, extent, group)
                        else:
                            single[key] = self._copy(v.detach(), start, extent, group, sparse=True)
                    known[i] = single[key]
        found = [c for c in known if c is not None]
        listed = {id(r()) for r in group.copies}
        for c in dict.fromkeys(found):
            if id(c) not in listed:
                group.copies.append(weakref.ref(c))
        return found

    def _known(self, view: torch.Tensor, low: int, extent: int) -> HostCopy | None:
        """An earlier copy of this pass that holds the view's elements."""
        storage = view.untyped_storage()
        reference = self._pass.known.get(storage._cdata)
        copy = reference() if reference is not None else None
        if copy is None or copy.origin() is not storage or copy.version != version(view):
            return None
        return copy if copy.buffer.dtype == view.dtype and copy.covers(low, extent) else None

    def _copy(self, source: torch.Tensor, low: int, extent: int, group: Group, sparse: bool = False) -> HostCopy:
        copy = HostCopy(self, source, low, extent, sparse)
        device = self.device(source.device)
        with torch.no_grad():
            after = copy.lease.after if copy.lease is not None else None
            copy.ready = copy.used = device.copy_out(copy.buffer, source, after)
        if copy.ready is not None:
            last = self._leaving[-1] if self._leaving else None
            if last is None or last.device is not device or last.group is not group:
                last = _Leaving(group, copy.ready, device)
                self._leaving.append(last)
            last.event = copy.ready
            last.entries.append((source, weakref.ref(copy)))
        if not sparse:
            self._pass.known[source.untyped_storage()._cdata] = weakref.ref(copy)
        return copy

    # back -------------------------------------------------------------------------------------------------------------

    def get(self, moved: Moved) -> torch.Tensor:
        """The tensor on its original device, ready for use on the current stream.

        Raises:
            RuntimeRefused: it was overwritten while it was being copied.
        """
        copy = moved.copy
        if self._leaving:
            self.settle()
        if copy.spoiled:
            raise RuntimeRefused(
                f"a tensor of shape {tuple(moved.size)} was changed in place after a block saved it; "
                "write the new value to a new tensor"
            )
        if copy.flat is None:
            device = self.device(copy.device)
            if copy.ahead is None:
                copy.ahead = self._start(copy)
            else:
                self.counters.fetched_ahead += 1
            copy.flat, event = copy.ahead
            copy.ahead = None
            if device.asynchronous:
                self._look_ahead(moved.group)
            device.wait(event)
            copy.waiting = {i for i, g in copy.alive.items() if g is moved.group}
        with torch.no_grad():
            tensor = copy.flat.as_strided(moved.size, moved.stride, moved.offset)
        copy.waiting.discard(id(moved))
        if not copy.waiting:
            copy.flat = None
        return tensor

    def _start(self, copy: HostCopy) -> tuple[torch.Tensor, Event]:
        """Starts the copy back."""
        with torch.no_grad():
            flat = torch.empty(copy.lead + copy.extent, dtype=copy.buffer.dtype, device=copy.device)
            if copy.sparse is None:
                target = flat.narrow(0, copy.lead, copy.extent)
            else:
                target = flat.as_strided(*copy.sparse, copy.lead)
            copy.used = self.device(copy.device).copy_in(target, copy.buffer, copy.used)
        self.counters.tensors_fetched += 1
        self.counters.bytes_fetched += copy.nbytes
        return flat, copy.used

    def _look_ahead(self, group: Group) -> None:
        if group.touched:
            return
        group.touched = True
        group.of.touched.append(group.index)
        wanted = [group]
        following = self._tuner.after(group.index) if self._tuner is not None else group.index - 1
        if 0 <= following < len(group.of.groups) and (other := group.of.groups[following]()) is not None:
            wanted.append(other)
        for g in wanted:
            if g is not group and g.touched:
                continue
            for reference in g.copies:
                copy = reference()
                if copy is not None and copy.flat is None and copy.ahead is None:
                    try:
                        copy.ahead = self._start(copy)
                    except torch.OutOfMemoryError:
                        self._note(
                            "there was no memory to fetch tensors ahead of use; they were fetched when asked for"
                        )
                        return

    # checkpoint inputs ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Context in which tensors with a history that are saved for backward go to the host, as one group."""
        group = self.group()

        def pack(tensor: torch.Tensor) -> Moved | Kept:
            if tensor.grad_fn is not None and movable(tensor):
                return self.put(tensor, group)
            return Kept.of(tensor)

        with torch.autograd.graph.saved_tensors_hooks(pack, self.unpack):
            yield

    def unpack(self, packed: Moved | Kept) -> torch.Tensor:
        return self.get(packed) if isinstance(packed, Moved) else packed.get()


class _Tuner:
    """Learns in which order groups are asked for, and keeps that only where steps get faster by it."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._next: dict[int, int] = {}
        self._marks: list[Any] = []
        self._seconds: dict[bool, list[float]] = {True: [], False: []}
        self._on = False
        self.decided: bool | None = None

    def after(self, index: int) -> int:
        return self._next.get(index, index - 1) if self._on else index - 1

    def next_pass(self, touched: list[int], device: Device) -> None:
        """A pass ended, having asked for groups in this order."""
        if self.decided is False:
            return
        self._next = dict(itertools.pairwise(touched)) or self._next
        if self.decided is not None:
            return
        try:
            self._time(device)
        except RuntimeError as error:
            self._decide(False, f"could not be timed ({error})")

    def _time(self, device: Device) -> None:
        self._marks.append(device.mark())
        if len(self._marks) <= WARM_UP_PASSES:
            return
        if all(b == a - 1 for a, b in self._next.items()):
            self._decide(False, "is the order of backward, which is used anyway")
            return
        if len(self._marks) > WARM_UP_PASSES + 1:
            self._seconds[self._on].append(device.seconds(self._marks[-2], self._marks[-1]))
        if min(map(len, self._seconds.values())) < TIMED_PASSES:
            self._on = not self._on
            return
        with_it, without = (statistics.median(self._seconds[on]) for on in (True, False))
        shown = f"{with_it * 1e3:.3g} ms a step with it, {without * 1e3:.3g} ms without"
        self._decide(with_it < WORTHWHILE * without, shown)

    def _decide(self, keep: bool, why: str) -> None:
        self.decided = self._on = keep
        self._marks.clear()
        self._note(f"prefetch: the learned order is {'kept' if keep else 'not used'}: {why}")


def movable(tensor: torch.Tensor) -> bool:
    """Whether the engine can copy and restore this kind of tensor."""
    return (
        tensor.layout is torch.strided
        and not is_traceable_wrapper_subclass(tensor)
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """(first element in the storage, elements from there to the last one)."""
    if tensor.numel() == 0:
        return tensor.storage_offset(), 0
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.storage_offset(), extent


def _elements(tensor: torch.Tensor) -> int:
    """Elements of storage that a tensor occupies: an expanded one fewer than it shows, one with gaps as many as it shows."""
    return min(tensor.numel(), _span(tensor)[1])
