"""The allocator simulation against hand-computed cases and against a literal transcription of PyTorch's C++ code."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimators.allocator import (
    AllocatorError,
    AllocatorResult,
    allocated_peak_only,
    allocated_timeline,
    block_bytes,
    simulate,
)

KIB = 1 << 10
MIB = 1 << 20


def run(*events: tuple[int, int], cap: int | None = None, expandable: bool = False) -> AllocatorResult:
    ids, sizes = zip(*events, strict=True) if events else ((), ())
    return simulate(ids, sizes, cap_bytes=cap, expandable_segments=expandable)


# Segment sizes and rounding ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_bytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),
        (12 * MIB - 1, 12 * MIB, 12 * MIB),
        (27 * MIB, 28 * MIB, 28 * MIB),
        (28 * MIB, 28 * MIB, 28 * MIB),
    ],
)
def test_a_request_gets_its_block_and_its_segment(request_bytes: int, allocated: int, reserved: int) -> None:
    result = run((0, request_bytes))
    assert (result.allocated_peak, result.reserved_peak) == (allocated, reserved)


def test_nothing_needs_nothing() -> None:
    assert run() == AllocatorResult(0, 0, 0, 0, out_of_memory=False, retries=0)
    assert run((0, 0)) == run()
    assert run().fragmentation == 0
    assert allocated_peak_only([], []) == 0


def test_two_small_requests_share_a_segment() -> None:
    assert run((0, MIB), (1, MIB)).reserved_peak == 2 * MIB
    assert run((0, MIB), (1, MIB), (2, 512)).reserved_peak == 4 * MIB


def test_small_and_large_requests_never_share_a_segment() -> None:
    result = run((0, 2 * MIB), (1, MIB))
    assert result.reserved_peak == 22 * MIB


def test_requests_between_one_and_ten_mib_share_twenty() -> None:
    assert run((0, 9 * MIB), (1, 9 * MIB)).reserved_peak == 20 * MIB
    assert run((0, 9 * MIB), (1, 9 * MIB), (2, 3 * MIB)).reserved_peak == 40 * MIB


# Splitting -----------------------------------------------------------------------------------------------------------


def test_the_large_pool_splits_off_more_than_one_mib() -> None:
    result = run((0, 20 * MIB), (0, -1), (1, 19 * MIB - 512), (2, MIB + 512))
    assert result.reserved_peak == 20 * MIB
    assert result.allocated_end == 20 * MIB


def test_the_large_pool_keeps_a_rest_of_one_mib_inside_the_block() -> None:
    result = run((0, 20 * MIB), (0, -1), (1, 19 * MIB), (2, MIB + 512))
    assert result.reserved_peak == 40 * MIB
    assert result.allocated_end == 20 * MIB + MIB + 512


def test_the_small_pool_splits_off_512_bytes() -> None:
    result = run((0, MIB), (1, MIB), (0, -1), (2, MIB - 512), (3, 512))
    assert result.reserved_peak == 2 * MIB
    assert result.allocated_end == 2 * MIB


# Best fit ------------------------------------------------------------------------------------------------------------


def test_the_smallest_block_that_fits_is_taken() -> None:
    held = [(0, 40 * MIB), (1, 20 * MIB), (2, 30 * MIB), (0, -1), (1, -1), (2, -1)]
    result = run(*held, (3, 16 * MIB), (4, 40 * MIB), (5, 30 * MIB))
    assert result.reserved_peak == 90 * MIB


def test_among_equal_blocks_the_lowest_address_is_taken() -> None:
    """Both segments start with a hole of 6 MiB; id 6 fills the first one, so the second grows to the 12 MiB of id 7."""
    fill = [(0, 6 * MIB), (1, 6 * MIB), (2, 8 * MIB), (3, 6 * MIB), (4, 6 * MIB), (5, 8 * MIB)]
    holes = [(0, -1), (3, -1), (6, 6 * MIB)]
    result = run(*fill, *holes, (4, -1), (7, 12 * MIB))
    assert result.reserved_peak == 40 * MIB


# Merging -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_free_neighbours_merge_in_any_order(order: tuple[int, ...]) -> None:
    fill = [(0, 5 * MIB), (1, 5 * MIB), (2, 5 * MIB)]
    result = run(*fill, *((i, -1) for i in order), (3, 20 * MIB))
    assert result.reserved_peak == 20 * MIB


def test_blocks_of_different_segments_do_not_merge() -> None:
    result = run((0, 12 * MIB), (1, 12 * MIB), (0, -1), (1, -1), (2, 24 * MIB))
    assert result.reserved_peak == 48 * MIB


def test_a_used_neighbour_blocks_the_merge() -> None:
    result = run((0, 5 * MIB), (1, 5 * MIB), (2, 9 * MIB), (0, -1), (2, -1), (3, 15 * MIB))
    assert result.reserved_peak == 36 * MIB


# The cap -------------------------------------------------------------------------------------------------------------


def test_at_the_cap_free_segments_are_released_and_the_request_tried_again() -> None:
    result = run((0, 40 * MIB), (0, -1), (1, 60 * MIB), cap=64 * MIB)
    assert not result.out_of_memory
    assert (result.retries, result.reserved_peak, result.reserved_end) == (1, 60 * MIB, 60 * MIB)


def test_the_same_stream_without_a_cap_reserves_both() -> None:
    assert run((0, 40 * MIB), (0, -1), (1, 60 * MIB)).reserved_peak == 100 * MIB


def test_a_retry_releases_every_free_segment_of_both_pools() -> None:
    result = run((0, 512), (1, 12 * MIB), (2, 14 * MIB), (0, -1), (1, -1), (2, -1), (3, 20 * MIB), cap=30 * MIB)
    assert result.reserved_end == 20 * MIB


def test_a_segment_in_partial_use_is_not_released() -> None:
    result = run((0, 2 * MIB), (1, 30 * MIB), (1, -1), (2, 60 * MIB), cap=64 * MIB)
    assert result.out_of_memory
    assert result.failed_event == 3
    assert (result.retries, result.reserved_end, result.allocated_end) == (1, 20 * MIB, 2 * MIB)


def test_memory_that_exactly_reaches_the_cap_fits() -> None:
    assert not run((0, 30 * MIB), (1, 34 * MIB), cap=64 * MIB).out_of_memory
    assert run((0, 30 * MIB), (1, 34 * MIB), cap=64 * MIB - 1).out_of_memory


def test_a_cap_of_zero_fails_the_first_allocation() -> None:
    for expandable in (False, True):
        result = run((7, 0), (0, 1), cap=0, expandable=expandable)
        assert (result.out_of_memory, result.failed_event, result.reserved_peak) == (True, 1, 0)


# Expandable segments -------------------------------------------------------------------------------------------------


def test_expandable_pages_are_two_and_twenty_mib() -> None:
    assert run((0, 1), expandable=True).reserved_peak == 2 * MIB
    assert run((0, 2 * MIB), expandable=True).reserved_peak == 20 * MIB
    assert run((0, 27 * MIB), (1, 13 * MIB), expandable=True).reserved_peak == 40 * MIB
    assert run((0, 27 * MIB), (1, 13 * MIB + 1), expandable=True).reserved_peak == 60 * MIB


def test_expandable_segments_split_any_rest() -> None:
    assert run((0, 27 * MIB), expandable=True).allocated_peak == 27 * MIB


def test_an_expandable_segment_grows_from_its_free_end() -> None:
    result = run((0, 40 * MIB), (0, -1), (1, 60 * MIB), expandable=True)
    assert result.reserved_peak == 60 * MIB


def test_the_growing_end_is_taken_last() -> None:
    """Free: 14 MiB below id 1, 12 MiB at the growing end. A request of 10 MiB takes the inner one; 20 MiB then needs one page."""
    fill = [(0, 14 * MIB), (1, 14 * MIB), (0, -1), (2, 10 * MIB)]
    assert run(*fill, (3, 32 * MIB), expandable=True).reserved_peak == 60 * MIB


def test_at_the_cap_whole_free_pages_are_unmapped() -> None:
    fill = [(0, 40 * MIB), (1, 10 * MIB), (0, -1), (2, 50 * MIB)]
    assert run(*fill, expandable=True).reserved_peak == 100 * MIB
    capped = run(*fill, cap=80 * MIB, expandable=True)
    assert not capped.out_of_memory
    assert (capped.retries, capped.reserved_end) == (1, 60 * MIB)


def test_unmapped_pages_are_mapped_again() -> None:
    fill = [(0, 40 * MIB), (1, 10 * MIB), (0, -1), (2, 50 * MIB), (2, -1), (3, 40 * MIB), (4, 10 * MIB)]
    result = run(*fill, cap=80 * MIB, expandable=True)
    assert not result.out_of_memory
    assert result.reserved_peak <= 80 * MIB


# Without placing blocks ----------------------------------------------------------------------------------------------


def test_block_bytes_counts_the_unsplit_rest_of_large_segments() -> None:
    requests = [0, 1, MIB + 1, 10 * MIB - 1, 11 * MIB - 512, 11 * MIB, 27 * MIB]
    plain = [0, 512, MIB + 512, 10 * MIB, 11 * MIB - 512, 12 * MIB, 28 * MIB]
    assert block_bytes(requests).tolist() == plain
    assert block_bytes(requests, expandable_segments=True).tolist() == plain[:5] + [11 * MIB, 27 * MIB]


def test_the_timeline_ignores_the_size_of_a_free() -> None:
    assert allocated_timeline([0, 1, 0, 1], [600, 512, -1, -512]).tolist() == [1024, 1536, 512, 0]


# Errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "sizes", "message"),
    [
        ([0, 0], [1, 1], "event 1: id 0 is allocated while in use"),
        ([3], [-1], "event 0: id 3 is freed while not in use"),
        ([0, 0, 0], [1, -1, -1], "event 2: id 0 is freed while not in use"),
        ([0], [1, 2], "1 ids for 2 sizes"),
        ([0], [1.5], "integers expected"),
        ([[0]], [[1]], "one dimension"),
    ],
)
def test_a_stream_that_is_none_is_refused(ids: list, sizes: list, message: str) -> None:
    with pytest.raises(AllocatorError, match=message):
        simulate(ids, sizes)
    with pytest.raises(AllocatorError, match=message):
        allocated_peak_only(ids, sizes)


def test_a_negative_cap_is_refused() -> None:
    with pytest.raises(AllocatorError, match="cap_bytes is -1"):
        run((0, 1), cap=-1)


def test_an_id_may_be_used_again_after_its_free() -> None:
    assert run((0, 512), (0, -1), (0, 1024), (0, -1)).allocated_end == 0


# Against the C++ code ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Block:
    ptr: int
    size: int
    pool: Pool
    allocated: bool = False
    mapped: bool = True
    prev: Block | None = None
    next: Block | None = None


@dataclass(eq=False)
class Pool:
    is_small: bool
    blocks: list[Block] = field(default_factory=list)
    unmapped: list[Block] = field(default_factory=list)

    def sorted_blocks(self) -> list[Block]:
        return sorted(self.blocks, key=lambda b: (b.size, b.ptr))


class Reference:
    """DeviceCachingAllocator, method by method, with linked blocks and no regard for speed."""

    ADDRESS_SPACE = 1 << 50

    def __init__(self, cap: int | None, expandable: bool) -> None:
        self.cap = cap if cap is not None else 1 << 60
        self.expandable = expandable
        self.small, self.large = Pool(True), Pool(False)
        self.next_ptr = {True: 1 << 52, False: 0}
        self.allocated = self.allocated_peak = self.reserved = self.reserved_peak = self.retries = 0

    def malloc(self, orig_size: int) -> Block | None:
        size = max(512, -(-orig_size // 512) * 512)
        pool = self.small if size <= MIB else self.large
        block = self.get_free_block(pool, size) or self.alloc_block(pool, size)
        if block is None:
            self.retries += 1
            self.release_blocks(self.large)
            self.release_blocks(self.small)
            block = self.alloc_block(pool, size)
        if block is None:
            return None
        rest = block.size - size
        if rest >= 512 if pool.is_small or self.expandable else rest > MIB:
            remaining = block
            block = Block(remaining.ptr, size, pool, prev=remaining.prev, next=remaining)
            if block.prev:
                block.prev.next = block
            remaining.prev = block
            remaining.ptr += size
            remaining.size -= size
            pool.blocks.append(remaining)
        block.allocated = True
        self.allocated += block.size
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        return block

    def get_free_block(self, pool: Pool, size: int) -> Block | None:
        candidates = [b for b in pool.sorted_blocks() if b.size >= size]
        if not candidates:
            return None
        i = 0

        def expandable_size(b: Block) -> int:
            return b.size + (b.next.size if b.next and not b.next.mapped else 0)

        if self.expandable:
            while i + 1 < len(candidates) and expandable_size(candidates[i + 1]) < expandable_size(candidates[i]):
                i += 1
        pool.blocks.remove(candidates[i])
        return candidates[i]

    def reserve(self, size: int) -> bool:
        if self.reserved + size > self.cap:
            return False
        self.reserved += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        return True

    def alloc_block(self, pool: Pool, size: int) -> Block | None:
        if self.expandable:
            return self.try_allocate_expandable_block(pool, size)
        if size <= MIB:
            alloc_size = 2 * MIB
        elif size < 10 * MIB:
            alloc_size = 20 * MIB
        else:
            alloc_size = -(-size // (2 * MIB)) * 2 * MIB
        if not self.reserve(alloc_size):
            return None
        block = Block(self.next_ptr[pool.is_small], alloc_size, pool)
        self.next_ptr[pool.is_small] += alloc_size
        return block

    def find_expandable_block(self, pool: Pool, size: int) -> Block:
        for c in sorted(pool.unmapped, key=lambda b: b.ptr):
            if c.prev and not c.prev.allocated:
                c = c.prev
            total, b = 0, c
            while total < size and b and not b.allocated:
                total += b.size
                b = b.next
            if total >= size:
                return c
        assert not pool.unmapped
        block = Block(self.next_ptr[pool.is_small], self.ADDRESS_SPACE, pool, mapped=False)
        pool.unmapped.append(block)
        return block

    def map_block(self, block: Block, size: int) -> bool:
        page = (2 if block.pool.is_small else 20) * MIB
        assert block.ptr % page == self.next_ptr[block.pool.is_small] % page
        mapped = -(-size // page) * page
        if not self.reserve(mapped):
            return False
        block.pool.unmapped.remove(block)
        block.mapped = True
        if mapped < block.size:
            remaining = Block(block.ptr + mapped, block.size - mapped, block.pool, mapped=False)
            self.splice(remaining, block, block.next)
            block.pool.unmapped.append(remaining)
            block.size = mapped
        self.merge(block, block.prev)
        self.merge(block, block.next)
        block.pool.blocks.append(block)
        return True

    def try_allocate_expandable_block(self, pool: Pool, size: int) -> Block | None:
        candidate = self.find_expandable_block(pool, size)
        if not candidate.mapped and not self.map_block(candidate, min(candidate.size, size)):
            return None
        while candidate.size < size:
            following = candidate.next
            assert following
            if not self.map_block(following, min(size - candidate.size, following.size)):
                return None
            candidate = following
        pool.blocks.remove(candidate)
        return candidate

    def free(self, block: Block) -> None:
        block.allocated = False
        self.allocated -= block.size
        self.merge(block, block.prev)
        self.merge(block, block.next)
        block.pool.blocks.append(block)

    def merge(self, dst: Block, src: Block | None) -> None:
        if src is None or src.allocated or dst.mapped != src.mapped:
            return
        if dst.prev is src:
            dst.ptr = src.ptr
            dst.prev = src.prev
            if dst.prev:
                dst.prev.next = dst
        else:
            dst.next = src.next
            if dst.next:
                dst.next.prev = dst
        dst.size += src.size
        (src.pool.blocks if src.mapped else src.pool.unmapped).remove(src)

    @staticmethod
    def splice(block: Block, before: Block | None, after: Block | None) -> None:
        block.prev, block.next = before, after
        if before:
            before.next = block
        if after:
            after.prev = block

    def release_blocks(self, pool: Pool) -> None:
        for block in pool.sorted_blocks():
            if self.expandable:
                self.unmap_block(block)
            elif block.prev is None and block.next is None:
                pool.blocks.remove(block)
                self.reserved -= block.size

    def unmap_block(self, block: Block) -> None:
        pool = block.pool
        page = (2 if pool.is_small else 20) * MIB
        base = self.next_ptr[pool.is_small]
        begin = -(-(block.ptr - base) // page) * page + base
        end = (block.ptr + block.size - base) // page * page + base
        if begin >= end:
            return
        pool.blocks.remove(block)
        if begin > block.ptr:
            before = Block(block.ptr, begin - block.ptr, pool)
            self.splice(before, block.prev, block)
            pool.blocks.append(before)
        if block.ptr + block.size > end:
            after = Block(end, block.ptr + block.size - end, pool)
            self.splice(after, block, block.next)
            pool.blocks.append(after)
        block.ptr, block.size, block.mapped = begin, end - begin, False
        self.merge(block, block.prev)
        self.merge(block, block.next)
        pool.unmapped.append(block)
        self.reserved -= end - begin


def reference(events: list[tuple[int, int]], cap: int | None, expandable: bool) -> AllocatorResult:
    """Runs the transcription and checks after each event that no two blocks overlap and that reserved covers allocated."""
    allocator = Reference(cap, expandable)
    live: dict[int, Block] = {}
    failed = None
    for index, (name, size) in enumerate(events):
        if size > 0:
            block = allocator.malloc(size)
            if block is None:
                failed = index
                break
            live[name] = block
        elif size < 0:
            allocator.free(live.pop(name))
        spans = sorted((b.ptr, b.ptr + b.size) for b in live.values())
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert allocator.allocated <= allocator.reserved <= allocator.cap
    return AllocatorResult(
        allocator.allocated_peak,
        allocator.allocated,
        allocator.reserved_peak,
        allocator.reserved,
        out_of_memory=failed is not None,
        retries=allocator.retries,
        failed_event=failed,
    )


SIZES = st.one_of(
    st.integers(1, 4096),
    st.integers(1, MIB),
    st.integers(MIB - 1024, MIB + 1024),
    st.integers(MIB, 30 * MIB),
    st.integers(1, 40).map(lambda n: n * MIB),
    st.sampled_from([10 * MIB - 512, 10 * MIB, 20 * MIB, 27 * MIB, 19 * MIB - 512, 1536 * KIB]),
)


@st.composite
def streams(draw: st.DrawFn, free_all: bool = False) -> list[tuple[int, int]]:
    """Allocations and frees in any order, ids reused."""
    events: list[tuple[int, int]] = []
    live: dict[int, int] = {}
    for _ in range(draw(st.integers(1, 60))):
        if live and draw(st.booleans()):
            name = draw(st.sampled_from(sorted(live)))
            events.append((name, -live.pop(name)))
        else:
            name = next(i for i in range(len(live) + 1) if i not in live)
            live[name] = draw(SIZES)
            events.append((name, live[name]))
    if free_all:
        events += [(name, -size) for name, size in live.items()]
    return events


CAPS = st.one_of(st.none(), st.integers(0, 300 * MIB))


@settings(max_examples=400, deadline=None)
@given(streams(), CAPS, st.booleans())
def test_every_stream_gives_what_the_transcribed_allocator_gives(
    events: list[tuple[int, int]], cap: int | None, expandable: bool
) -> None:
    assert run(*events, cap=cap, expandable=expandable) == reference(events, cap, expandable)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(60, 400), st.booleans())
def test_long_streams_near_the_cap_too(seed: int, cap_mib: int, expandable: bool) -> None:
    events = random_stream(seed, 600)
    cap = cap_mib * MIB
    assert run(*events, cap=cap, expandable=expandable) == reference(events, cap, expandable)


def random_stream(seed: int, count: int) -> list[tuple[int, int]]:
    rng = np.random.default_rng(seed)
    events: list[tuple[int, int]] = []
    live: list[tuple[int, int]] = []
    for name in range(count):
        while live and (len(live) > 12 or rng.random() < 0.45):
            victim, size = live.pop(int(rng.integers(len(live))))
            events.append((victim, -size))
        size = int(2 ** rng.uniform(8, 25.5))
        live.append((name, size))
        events.append((name, size))
    return events


# Properties ----------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(streams(free_all=True), CAPS, st.booleans())
def test_reserved_covers_allocated_stays_below_the_cap_and_everything_comes_back(
    events: list[tuple[int, int]], cap: int | None, expandable: bool
) -> None:
    result = run(*events, cap=cap, expandable=expandable)
    assert result.allocated_peak <= result.reserved_peak
    assert result.reserved_end <= result.reserved_peak
    assert 0 <= result.fragmentation < 1
    if cap is not None:
        assert result.reserved_peak <= cap
    if not result.out_of_memory:
        assert result.allocated_end == 0


@settings(deadline=None)
@given(streams(), st.booleans())
def test_a_cap_at_the_reserved_peak_changes_nothing(events: list[tuple[int, int]], expandable: bool) -> None:
    free = run(*events, expandable=expandable)
    assert run(*events, cap=free.reserved_peak, expandable=expandable) == free


@settings(deadline=None)
@given(streams())
def test_the_vectorised_peak_is_exact_with_expandable_segments(events: list[tuple[int, int]]) -> None:
    ids, sizes = zip(*events, strict=True)
    simulated = run(*events, expandable=True)
    assert allocated_peak_only(ids, sizes, expandable_segments=True) == simulated.allocated_peak
    assert allocated_timeline(ids, sizes, expandable_segments=True)[-1] == simulated.allocated_end


@settings(deadline=None)
@given(streams())
def test_the_vectorised_peak_is_within_one_mib_a_block_without_them(events: list[tuple[int, int]]) -> None:
    ids, sizes = zip(*events, strict=True)
    in_use = np.cumsum(np.sign(sizes)).max()
    exact = allocated_peak_only(ids, sizes, expandable_segments=True)
    simulated = run(*events).allocated_peak
    assert exact <= simulated <= exact + in_use * MIB
    assert abs(allocated_peak_only(ids, sizes) - simulated) <= in_use * MIB


@settings(deadline=None)
@given(st.lists(st.integers(MIB + 1, 40 * MIB), min_size=1, max_size=40), st.integers(0, 40))
def test_last_in_first_out_with_expandable_segments_reserves_the_peak_rounded_to_a_page(
    requests: list[int], kept: int
) -> None:
    """A stack never fragments: reserved is allocated, rounded up to 20 MiB."""
    names = list(enumerate(requests))
    pops = [(name, -size) for name, size in reversed(names[kept:])]
    result = run(*names, *pops, *[(100 + name, size) for name, size in names[kept:]], expandable=True)
    page = 20 * MIB
    assert result.reserved_peak == -(-result.allocated_peak // page) * page


@pytest.mark.parametrize("seed", range(8))
def test_expandable_segments_reserve_no_more_than_plain_ones(seed: int) -> None:
    """Up to one page of each pool, on a long mixed stream."""
    events = random_stream(seed, 1500)
    plain, expandable = run(*events), run(*events, expandable=True)
    assert expandable.reserved_peak <= plain.reserved_peak + 22 * MIB
    assert expandable.allocated_peak <= plain.allocated_peak


def test_sixty_thousand_events_take_a_fraction_of_a_second() -> None:
    """Ten times the usual duration, so that a busy machine does not fail it."""
    events = random_stream(0, 30_000)
    ids, sizes = (np.array(column) for column in zip(*events, strict=True))
    started = time.process_time()
    simulate(ids.astype(np.int32), sizes, cap_bytes=1 << 40)
    assert time.process_time() - started < 1.5
