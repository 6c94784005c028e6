"""Page-locked host memory that is used again from step to step, capped in sizes and in bytes.

A *bucket* holds buffers of one size. Locking pages costs milliseconds and rounds up to a power of two, so buffers of a bucket are
cut from slabs that waste little. A buffer carries the event of the last copy that touched it; the next copy waits for that on the
device, so nothing is overwritten early and the host never waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from advisor.runtime.counters import Counters
from advisor.runtime.devices import Device, Event

GRANULE_BYTES = 512
"""Buffer sizes are multiples of this."""
MOST_IN_SLAB = 8
ACCEPTED_WASTE = 0.125


def slab_of(size: int) -> tuple[int, int]:
    """(buffers, bytes) of a slab for buffers of `size` bytes: a power of two that they fill well, with as few as possible."""
    best, least = (1, 1 << (size - 1).bit_length()), 1.0
    for n in range(1, MOST_IN_SLAB + 1):
        whole = 1 << (n * size - 1).bit_length()
        waste = 1 - n * size / whole
        if waste < least:
            best, least = (n, whole), waste
        if waste <= ACCEPTED_WASTE:
            break
    return best


@dataclass
class _Bucket:
    size: int
    slabs: list[torch.Tensor] = field(default_factory=list)
    free: list[tuple[torch.Tensor, Event]] = field(default_factory=list)
    lent: int = 0
    used: int = 0
    """When it was last asked for."""

    @property
    def nbytes(self) -> int:
        return sum(s.numel() for s in self.slabs)


@dataclass
class Lease:
    """A buffer on loan; give it back with `Pool.give_back`."""

    buffer: torch.Tensor
    """uint8, at least as long as asked for."""
    bucket: int
    after: Event
    """The next copy that touches the buffer has to wait for this."""


class Pool:
    """Buffers for one device.

    Args:
        most_buckets: sizes for which memory is kept; 0: no page-locked memory at all.
        most_bytes: page-locked memory in all.
    """

    def __init__(self, device: Device, most_buckets: int, most_bytes: int, counters: Counters) -> None:
        self.device, self.most_buckets, self.most_bytes, self.counters = device, most_buckets, most_bytes, counters
        self._buckets: dict[int, _Bucket] = {}
        self._clock = 0
        self._refused = False
        """The system gave no page-locked memory; it is not asked again."""

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self._buckets.values())

    def lend(self, size: int) -> Lease | None:
        """A page-locked buffer of at least `size` bytes; None: use pageable memory."""
        if not self.device.asynchronous or self.most_buckets == 0 or size == 0:
            return None
        self._clock += 1
        key = -(-size // GRANULE_BYTES) * GRANULE_BYTES
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= self.most_buckets and not self._evict():
                return None
            bucket = self._buckets[key] = _Bucket(key)
        bucket.used = self._clock
        if not bucket.free and not self._grow(bucket):
            if not bucket.slabs:
                del self._buckets[key]
            return None
        buffer, after = bucket.free.pop()
        bucket.lent += 1
        return Lease(buffer, key, after)

    def give_back(self, lease: Lease, after: Event) -> None:
        """Takes a buffer back; `after` is the last copy that touches it."""
        bucket = self._buckets.get(lease.bucket)
        if bucket is None or not any(_inside(lease.buffer, slab) for slab in bucket.slabs):
            self.device.finish(after)
            return
        bucket.lent -= 1
        bucket.free.append((lease.buffer, after))

    def close(self) -> None:
        """Frees everything that is not on loan; a buffer on loan goes when its lease does."""
        for key in list(self._buckets):
            self._drop(key)
        self.device.trim()

    def _grow(self, bucket: _Bucket) -> bool:
        if self._refused:
            return False
        count, whole = slab_of(bucket.size)
        single = 1 << (bucket.size - 1).bit_length()
        while self.nbytes + whole > self.most_bytes:
            if whole > single:
                count, whole = 1, single
            elif not self._evict(other_than=bucket.size):
                return False
        slab = self.device.pinned(whole)
        if slab is None:
            self._refused = True
            return False
        bucket.slabs.append(slab)
        bucket.free += [(slab[i * bucket.size : (i + 1) * bucket.size], None) for i in range(count)]
        self.counters.pinned_bytes += whole
        self.counters.pinned_bytes_peak = max(self.counters.pinned_bytes_peak, self.counters.pinned_bytes)
        return True

    def _evict(self, other_than: int = 0) -> bool:
        """Frees the bucket that was not asked for the longest, of those with nothing on loan."""
        idle = [b for b in self._buckets.values() if not b.lent and b.size != other_than]
        if not idle:
            return False
        self._drop(min(idle, key=lambda b: b.used).size)
        return True

    def _drop(self, key: int) -> None:
        bucket = self._buckets.pop(key)
        for _, after in bucket.free:
            self.device.finish(after)
        self.counters.pinned_bytes -= bucket.nbytes


def _inside(buffer: torch.Tensor, slab: torch.Tensor) -> bool:
    return slab.data_ptr() <= buffer.data_ptr() < slab.data_ptr() + slab.numel()
