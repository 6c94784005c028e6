"""What PyTorch's CUDA caching allocator hands out and reserves for a stream of allocations and frees.

A result holds bytes. Inside, sizes and addresses are counted in units of 512 bytes, the allocator's rounding.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (read in torch 2.6; torch 2.14 has the same thresholds) for one
stream and the default configuration:

* A request is rounded up to 512 B. Up to 1 MiB it is served from the small pool, else from the large pool.
* The smallest cached free block that holds it is taken, the lowest address among equals. The rest is split off when it
  is at least 512 B (small pool) or more than 1 MiB (large pool); otherwise it stays inside the block and counts as
  allocated, as in ``torch.cuda.max_memory_allocated``.
* Without such a block a new segment is requested: 2 MiB in the small pool, 20 MiB for requests under 10 MiB, else the
  request rounded up to 2 MiB.
* A freed block merges with the free blocks before and behind it in its segment.
* Where a new segment would exceed the cap, all segments that are one free block are released and the request is tried
  once more; if it still does not fit, the stream ends out of memory.

With ``expandable_segments:True`` each pool is one address range that is mapped in pages of 2 MiB (small) and 20 MiB
(large). A rest of 512 B or more is always split off, a block that touches unmapped pages counts as large as it could
grow, growth fills the lowest sufficient gap, and the retry unmaps the whole pages inside free blocks. The address range
is taken as endless (PyTorch reserves 9/8 of the card's memory for each pool).

Not simulated: several streams, CUDA graphs' private pools, ``max_split_size_mb``, ``roundup_power2_divisions``,
``garbage_collection_threshold``. New segments get ascending addresses, which the driver does not promise; that decides
only between free blocks of equal size.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

ROUNDING_BYTES = 512
"""kMinBlockSize: every block is a multiple of it."""
SMALL_REQUEST_BYTES = 1 << 20
"""kSmallSize: the largest request of the small pool, and the largest rest that the large pool leaves unsplit."""
SMALL_SEGMENT_BYTES = 2 << 20
"""kSmallBuffer: segment and page of the small pool."""
LARGE_SEGMENT_BYTES = 20 << 20
"""large_segment_size: segment for requests under LARGE_REQUEST_BYTES, and page of the large pool."""
LARGE_REQUEST_BYTES = 10 << 20
"""kMinLargeAlloc: from here on a request gets a segment of its own size."""
SEGMENT_ROUNDING_BYTES = 2 << 20
"""kRoundLarge: what such a segment is rounded up to."""

_SMALL = SMALL_REQUEST_BYTES // ROUNDING_BYTES
_SMALL_SEGMENT = SMALL_SEGMENT_BYTES // ROUNDING_BYTES
_LARGE_SEGMENT = LARGE_SEGMENT_BYTES // ROUNDING_BYTES
_LARGE = LARGE_REQUEST_BYTES // ROUNDING_BYTES
_ROUND = SEGMENT_ROUNDING_BYTES // ROUNDING_BYTES

# A block is one integer, size << _SHIFT | address, so that sorted order is (size, address). The small pool's addresses
# start at _SMALL_BASE, far above the large pool's, so both can share the tables of free blocks.
_SHIFT = 48
_MASK = (1 << _SHIFT) - 1
_SMALL_BASE = 1 << 46
_ENDLESS = 1 << 44


class AllocatorError(ValueError):
    """A stream is not a sequence of allocations and frees, or the cap is not a number of bytes."""


@dataclass(frozen=True)
class AllocatorResult:
    """Bytes that one stream of events needs; up to the failing event where memory ran out."""

    allocated_peak: int
    """Largest sum of blocks in use (``torch.cuda.max_memory_allocated``)."""
    allocated_end: int
    """Sum of blocks in use after the last event."""
    reserved_peak: int
    """Largest sum of segments held (``torch.cuda.max_memory_reserved``)."""
    reserved_end: int
    """Sum of segments held after the last event."""
    out_of_memory: bool
    """An allocation did not fit below the cap even after the cached segments were released."""
    retries: int
    """How often cached segments were released to make room (``num_alloc_retries``); each one synchronises the GPU."""
    failed_event: int | None = None
    """Index of the event that ran out of memory."""

    @property
    def fragmentation(self) -> float:
        """Share of the reserved peak that the allocated peak does not explain, 0 to 1."""
        return 1 - self.allocated_peak / self.reserved_peak if self.reserved_peak else 0.0


def simulate(
    ids: ArrayLike, sizes: ArrayLike, *, cap_bytes: int | None = None, expandable_segments: bool = False
) -> AllocatorResult:
    """Runs a stream of events through the allocator.

    Args:
        ids: one integer an event, naming the buffer; an id may be used again after its free.
        sizes: one integer an event: the requested bytes of an allocation, a negative number for a free (its magnitude
            does not count), 0 for an event without effect.
        cap_bytes: the most that may be reserved: the card's usable bytes less context and headroom. None: no limit.
        expandable_segments: PyTorch's option of that name.

    Raises:
        AllocatorError: the arrays are not two equally long runs of integers, an id is allocated while in use or freed
            while not in use, or the cap is negative.
    """
    if cap_bytes is not None and cap_bytes < 0:
        raise AllocatorError(f"cap_bytes is {cap_bytes}; 0 or more bytes expected, or None for no cap")
    cap = sys.maxsize if cap_bytes is None else int(cap_bytes) // ROUNDING_BYTES
    sizes, partners = _paired(ids, sizes)
    units = -(-sizes // ROUNDING_BYTES)
    codes = np.where(sizes < 0, ~partners, units).tolist()
    return _run(codes, _Pages(cap) if expandable_segments else _Segments(cap))


def block_bytes(sizes: ArrayLike, *, expandable_segments: bool = False) -> NDArray[np.int64]:
    """Bytes of the block that a request gets from a segment of its own: what it counts for in the allocated bytes.

    Exact with expandable segments and for the small pool. In the large pool a cached block of another size may leave a
    different unsplit rest (0 to 1 MiB).
    """
    sizes = _integers(sizes, "sizes")
    rounded = -(-sizes // ROUNDING_BYTES) * ROUNDING_BYTES
    if expandable_segments:
        return rounded
    segment = -(-sizes // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES
    unsplit = (sizes >= LARGE_REQUEST_BYTES) & (segment - rounded <= SMALL_REQUEST_BYTES)
    return np.where(unsplit, segment, rounded)


def allocated_timeline(ids: ArrayLike, sizes: ArrayLike, *, expandable_segments: bool = False) -> NDArray[np.int64]:
    """Bytes in use after each event, from :func:`block_bytes` alone, without placing the blocks.

    Arguments and errors as for :func:`simulate`.
    """
    sizes, partners = _paired(ids, sizes)
    blocks = block_bytes(np.maximum(sizes, 0), expandable_segments=expandable_segments)
    return np.cumsum(np.where(sizes < 0, -blocks[partners], blocks))


def allocated_peak_only(ids: ArrayLike, sizes: ArrayLike, *, expandable_segments: bool = False) -> int:
    """Largest sum of blocks in use, in bytes, as :func:`allocated_timeline` counts them.

    Equal to ``simulate(...).allocated_peak`` with expandable segments; without them it differs by the rests that reused
    blocks of the large pool leave unsplit.
    """
    timeline = allocated_timeline(ids, sizes, expandable_segments=expandable_segments)
    return int(timeline.max(initial=0))


def _integers(values: ArrayLike, name: str) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise AllocatorError(f"{name} has {array.ndim} dimensions of {array.dtype}; one dimension of integers expected")
    return array.astype(np.int64)


def _paired(ids: ArrayLike, sizes: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The sizes, and for each free the index of the event that allocated what it frees (0 for other events)."""
    ids, sizes = _integers(ids, "ids"), _integers(sizes, "sizes")
    if ids.shape != sizes.shape:
        raise AllocatorError(f"{ids.size} ids for {sizes.size} sizes; equally many expected")
    effective = np.flatnonzero(sizes)
    order = effective[np.argsort(ids[effective], kind="stable")]
    sorted_ids = ids[order]
    first = np.ones(order.size, dtype=bool)
    first[1:] = sorted_ids[1:] != sorted_ids[:-1]
    allocates = sizes[order] > 0
    expected = np.ones(order.size, dtype=bool)
    expected[1:] = ~allocates[:-1]
    wrong = allocates != (expected | first)
    if wrong.any():
        event = int(order[wrong].min())
        what = "allocated while in use" if sizes[event] > 0 else "freed while not in use"
        raise AllocatorError(f"event {event}: id {ids[event]} is {what}")
    partners = np.zeros(sizes.size, dtype=np.int64)
    frees = np.flatnonzero(~allocates)
    partners[order[frees]] = order[frees - 1]
    return sizes, partners


def _run(codes: list[int], memory: _Segments | _Pages) -> AllocatorResult:
    """Codes: units of an allocation, ``~index`` of the allocation that is freed, or 0.

    One loop without calls or objects per event: it runs tens of thousands of times for every schedule that is judged.
    """
    small_free, large_free, unmapped = memory.small_free, memory.large_free, memory.unmapped
    size_at, start_at_end = memory.size_at, memory.start_at_end
    large_unsplit = memory.large_unsplit
    blocks = [0] * len(codes)
    allocated = peak = 0
    failed_event = None

    for event, code in enumerate(codes):
        if code > 0:
            if code <= _SMALL:
                free, unsplit = small_free, 0
            else:
                free, unsplit = large_free, large_unsplit
            at = bisect_left(free, code << _SHIFT)
            if at < len(free):
                block = free[at]
                if unmapped and (block & _MASK) + (block >> _SHIFT) in unmapped:
                    at = memory.best_fit(free, at)
                    block = free[at]
                del free[at]
            else:
                obtained = memory.obtain(code)
                if obtained is None:
                    failed_event = event
                    break
                block = obtained
            start = block & _MASK
            size = block >> _SHIFT
            del size_at[start]
            rest = size - code
            if rest > unsplit:
                rest_start = start + code
                size_at[rest_start] = rest
                start_at_end[start + size] = rest_start
                insort(free, rest << _SHIFT | rest_start)
                size = code
            else:
                del start_at_end[start + size]
            blocks[event] = size << _SHIFT | start
            allocated += size
            if allocated > peak:
                peak = allocated
        elif code:
            block = blocks[~code]
            size = block >> _SHIFT
            start = block & _MASK
            end = start + size
            allocated -= size
            free = small_free if size <= _SMALL else large_free
            if start in start_at_end:
                before = start_at_end.pop(start)
                del free[bisect_left(free, (start - before) << _SHIFT | before)]
                start = before
            if end in size_at:
                behind = size_at.pop(end)
                del free[bisect_left(free, behind << _SHIFT | end)]
                end += behind
            size = end - start
            size_at[start] = size
            start_at_end[end] = start
            insort(free, size << _SHIFT | start)

    return AllocatorResult(
        allocated_peak=peak * ROUNDING_BYTES,
        allocated_end=allocated * ROUNDING_BYTES,
        reserved_peak=memory.reserved_peak * ROUNDING_BYTES,
        reserved_end=memory.reserved * ROUNDING_BYTES,
        out_of_memory=failed_event is not None,
        retries=memory.retries,
        failed_event=failed_event,
    )


class _Memory:
    """What is reserved below a cap, and the free blocks in it; all in units."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.reserved = self.reserved_peak = self.retries = 0
        self.small_free: list[int] = []
        self.large_free: list[int] = []
        """Free blocks of each pool, sorted by size and address."""
        self.size_at: dict[int, int] = {}
        self.start_at_end: dict[int, int] = {}
        """The same blocks by start and by end."""
        self.unmapped: dict[int, int] = {}
        """Gaps in the address ranges of expandable segments, start to size."""

    def pool(self, start: int) -> list[int]:
        return self.small_free if start >= _SMALL_BASE else self.large_free

    def take(self, start: int) -> int:
        """Removes the free block at `start` and returns its size."""
        size = self.size_at.pop(start)
        del self.start_at_end[start + size]
        pool = self.pool(start)
        del pool[bisect_left(pool, size << _SHIFT | start)]
        return size

    def reserve(self, units: int) -> bool:
        """Counts new memory, unless it would exceed the cap."""
        if self.reserved + units > self.cap:
            return False
        self.reserved += units
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        return True


class _Segments(_Memory):
    """Segments of fixed size, each a driver allocation of its own."""

    large_unsplit = _SMALL

    def __init__(self, cap: int) -> None:
        super().__init__(cap)
        self.segments: dict[int, int] = {}
        """Start to size. One unit is left free between neighbours, so that their blocks never merge."""
        self.next_small, self.next_large = _SMALL_BASE, 0

    def best_fit(self, free: list[int], at: int) -> int:
        return at

    def obtain(self, units: int) -> int | None:
        """A new segment as a block that is in no free list; None where the cap leaves no room for it."""
        if units <= _SMALL:
            size = _SMALL_SEGMENT
        elif units < _LARGE:
            size = _LARGE_SEGMENT
        else:
            size = -(-units // _ROUND) * _ROUND
        if not self.reserve(size):
            self.retries += 1
            self.release()
            if not self.reserve(size):
                return None
        if units <= _SMALL:
            start = self.next_small
            self.next_small += size + 1
        else:
            start = self.next_large
            self.next_large += size + 1
        self.segments[start] = size
        self.size_at[start] = size
        self.start_at_end[start + size] = start
        return size << _SHIFT | start

    def release(self) -> None:
        """Gives back every segment that is one free block."""
        for start, size in list(self.segments.items()):
            if self.size_at.get(start) == size:
                self.take(start)
                del self.segments[start]
                self.reserved -= size


class _Pages(_Memory):
    """Expandable segments: one address range a pool, of which whole pages are mapped."""

    large_unsplit = 0

    def __init__(self, cap: int) -> None:
        super().__init__(cap)
        self.unmapped.update({0: _ENDLESS, _SMALL_BASE: _ENDLESS})

    def best_fit(self, free: list[int], at: int) -> int:
        """Moves on from the free block at index `at` while the next larger one can grow less than it."""
        while at + 1 < len(free) and self._potential(free[at + 1]) < self._potential(free[at]):
            at += 1
        return at

    def obtain(self, units: int) -> int | None:
        """Maps pages until a free block holds `units`; returns it, out of the free lists, or None at the cap."""
        start = self._grow(units)
        if start is None:
            self.retries += 1
            self._release()
            start = self._grow(units)
            if start is None:
                return None
        size = self.size_at[start]
        pool = self.pool(start)
        del pool[bisect_left(pool, size << _SHIFT | start)]
        return size << _SHIFT | start

    def _potential(self, block: int) -> int:
        size = block >> _SHIFT
        return size + self.unmapped.get((block & _MASK) + size, 0)

    def _grow(self, units: int) -> int | None:
        small = units <= _SMALL
        page = _SMALL_SEGMENT if small else _LARGE_SEGMENT
        gaps = sorted(gap for gap in self.unmapped if (gap >= _SMALL_BASE) == small)
        start = next(start for gap in gaps if (start := self._room(gap, units)) is not None)
        while (have := self.size_at.get(start, 0)) < units:
            gap = start + have
            length = self.unmapped[gap]
            mapped = -(-min(units - have, length) // page) * page
            if not self.reserve(mapped):
                return None
            del self.unmapped[gap]
            if length > mapped:
                self.unmapped[gap + mapped] = length - mapped
            start = self._put(gap, mapped)
        return start

    def _room(self, gap: int, units: int) -> int | None:
        """Where `units` fit into the free and unmapped space around a gap, from the free block before it on."""
        start = end = self.start_at_end.get(gap, gap)
        while end - start < units:
            length = self.size_at.get(end) or self.unmapped.get(end)
            if length is None:
                return None
            end += length
        return start

    def _put(self, start: int, size: int) -> int:
        """Adds a free block, merged with its free neighbours; returns the merged block's start."""
        end = start + size
        if start in self.start_at_end:
            before = self.start_at_end[start]
            self.take(before)
            start = before
        if end in self.size_at:
            end += self.take(end)
        self.size_at[start] = end - start
        self.start_at_end[end] = start
        insort(self.pool(start), (end - start) << _SHIFT | start)
        return start

    def _release(self) -> None:
        """Unmaps the whole pages inside free blocks."""
        for block in self.large_free + self.small_free:
            start = block & _MASK
            end = start + (block >> _SHIFT)
            page = _SMALL_SEGMENT if start >= _SMALL_BASE else _LARGE_SEGMENT
            first = -(-start // page) * page
            last = end // page * page
            if first >= last:
                continue
            self.take(start)
            if first > start:
                self._put(start, first - start)
            if end > last:
                self._put(last, end - last)
            self.unmapped[first] = last - first
            self.reserved -= last - first
        for gap in sorted(self.unmapped, reverse=True):
            behind = gap + self.unmapped[gap]
            if behind in self.unmapped:
                self.unmapped[gap] += self.unmapped.pop(behind)
