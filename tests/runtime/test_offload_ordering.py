"""The host offload engine on a device whose copies happen as late as possible: order, lifetimes, pool, fetching ahead."""

from __future__ import annotations

import weakref

import pytest
import torch
from late_device import Hazard, LateDevice
from runtime_models import Stack, assert_same, loss_of, step, tensor
from test_runtime_offload import SHAPES

from advisor.runtime import RuntimeRefused, apply
from advisor.runtime import offload as offload_module
from advisor.runtime.counters import Counters
from advisor.runtime.offload import TIMED_PASSES, WARM_UP_PASSES, Engine, HostCopy, Moved
from advisor.runtime.pool import GRANULE_BYTES, Pool, slab_of
from estimators.schedule import Backend, Schedule

UNSLOTH = Schedule(Backend.UNSLOTH)
X = {"x": tensor(64, 8)}
BOUNDARY = X["x"].nbytes


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    """Every engine that is made uses this device for CPU tensors."""
    device = LateDevice()
    monkeypatch.setattr(offload_module, "device_for", lambda _: device)
    return device


def _engine(device: LateDevice, **options: object) -> Engine:
    return Engine(Counters(), make_device=lambda _: device, **options)  # type: ignore[arg-type]


# --- the stand-in itself ----------------------------------------------------------------------------------------------


def test_the_late_device_notices_a_read_before_the_copy_is_waited_for() -> None:
    device = LateDevice()
    host, source, target = device.pinned(32), tensor(8), torch.empty(8)
    assert host is not None
    device.copy_out(host.view(torch.float32), source, None)
    event = device.copy_in(target, host.view(torch.float32), device.queues["out"][-1])
    assert target.isnan().all()
    device.wait(event)
    assert torch.equal(target, source)


def test_the_late_device_notices_a_freed_source_and_a_buffer_used_too_early() -> None:
    device = LateDevice()
    host = device.pinned(32)
    assert host is not None
    source = tensor(8)
    event = device.copy_out(host.view(torch.float32), source, None)
    with pytest.raises(Hazard, match="used again"):
        device.copy_in(torch.empty(8), host.view(torch.float32), None)
    del source
    with pytest.raises(Hazard, match="freed"):
        device.wait(event)


# --- order and lifetimes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_values_come_back_through_late_copies(shape: str) -> None:
    """Fault classes 17, 19."""
    original = SHAPES[shape](tensor(4, 5, 6))
    engine = _engine(LateDevice())
    moved = engine.put(original)
    restored = engine.get(moved)
    assert torch.equal(restored, original)
    assert restored.stride() == original.stride()


@pytest.mark.parametrize("buckets", [12, 1, 0])
@pytest.mark.parametrize("interval", [None, 2, 3])
def test_late_copies_change_no_bit_over_many_steps(late: LateDevice, buckets: int, interval: int | None) -> None:
    """Fault class 17: memory freed or used again while a copy is under way raises, an early read gives NaN."""
    model = Stack(7)
    shapes = [X, {"x": tensor(48, 8)}]
    plain = [step(model, x) for x in shapes]
    with apply(model, Schedule(Backend.UNSLOTH, interval, pin_memory_max_buckets=buckets)) as handle:
        for i in range(20):
            assert_same(step(model, shapes[i % 2]), plain[i % 2])
    c = handle.counters
    assert c.host_bytes == 0
    assert c.bytes_fetched == c.bytes_offloaded > 0
    assert (c.pageable_copies == 0) == (buckets > 0)
    assert c.pinned_bytes == 0
    assert c.fetched_ahead >= 20 * (len(handle.units) - 1)


def test_a_source_is_held_until_the_next_group_and_no_longer(late: LateDevice) -> None:
    """Fault classes 17, 20: without waiting on the host, at most one group's sources outlive their blocks."""
    engine = _engine(late)
    alive = []
    for i in range(4):
        source = tensor(16, seed=i)
        engine.put(source)
        storage = source.untyped_storage()
        alive.append(weakref.ref(storage))
        del source, storage
        assert [r() is not None for r in alive] == [False] * i + [True]
    engine.settle()
    assert alive[-1]() is None


def test_backward_holds_at_most_two_groups_on_the_device(late: LateDevice) -> None:
    """Fault class 22."""
    model = Stack(12)
    with apply(model, UNSLOTH):
        step(model, X)
    assert late.live_peak == 2 * BOUNDARY


def test_an_input_changed_while_it_is_copied_is_an_error(late: LateDevice) -> None:
    """Fault classes 10, 17."""
    engine = _engine(late)
    source = tensor(16)
    moved = engine.put(source)
    source.add_(1)
    with pytest.raises(RuntimeRefused, match=r"shape \(16,\) was changed in place after a block saved it"):
        engine.get(moved)


def test_a_graph_that_is_dropped_in_the_middle_of_backward_leaves_nothing(late: LateDevice) -> None:
    """Fault class 20: copies that nobody waits for any more give their memory back in order."""
    model = Stack(5)
    plain = step(model, X)
    with apply(model, UNSLOTH) as handle:
        hook = model.blocks[2].attn.register_full_backward_hook(_fail)
        for _ in range(3):
            with pytest.raises(ArithmeticError):
                step(model, X)
        hook.remove()
        assert handle.counters.host_bytes == 0
        assert_same(step(model, X), plain)
    assert not late.live


def _fail(*_: object) -> None:
    raise ArithmeticError


def test_memory_that_is_short_only_stops_fetching_ahead(late: LateDevice) -> None:
    """Fault class 22: never an error out of it."""
    model = Stack(6)
    plain = step(model, X)
    with apply(model, UNSLOTH) as handle:
        start, calls = handle._engine._start, [0]

        def scarce(copy: HostCopy) -> tuple[torch.Tensor, object]:
            calls[0] += 1
            if copy is not wanted[-1]:
                raise torch.OutOfMemoryError("none left")
            return start(copy)

        get, wanted = handle._engine.get, [None]

        def asked(moved: Moved) -> torch.Tensor:
            wanted.append(moved.copy)  # type: ignore[arg-type]
            return get(moved)

        handle._engine._start, handle._engine.get = scarce, asked  # type: ignore[method-assign]
        assert_same(step(model, X), plain)
        assert handle.counters.fetched_ahead == 0
        assert calls[0] > 6
    assert any("no memory to fetch tensors ahead" in n for n in handle.notes)


def test_retained_graphs_fetch_again(late: LateDevice) -> None:
    """Fault class 24."""
    model = Stack(4).eval()
    with apply(model, UNSLOTH) as handle:
        out = loss_of(model(**X))
        first = torch.autograd.grad(out, list(model.parameters()), retain_graph=True)
        second = torch.autograd.grad(out, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert handle.counters.bytes_fetched == 2 * handle.counters.bytes_offloaded


def test_two_forwards_before_their_backwards(late: LateDevice) -> None:
    """Nothing of one pass is fetched because of the other."""
    model = Stack(4)

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(0)
        losses = [loss_of(model(tensor(n, 8))) for n in (32, 48)]
        for loss in reversed(losses):
            loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = run()
    with apply(model, UNSLOTH):
        assert all(torch.equal(a, b) for a, b in zip(run(), plain, strict=True))


# --- one storage, one copy --------------------------------------------------------------------------------------------


def test_views_of_one_storage_are_copied_together() -> None:
    """Fault class 18: query, key and value are thirds of one tensor."""
    engine = _engine(LateDevice())
    qkv = tensor(6, 30)
    views = [*qkv.chunk(3, -1), qkv.view(3, 60), qkv.t()]
    moved = engine.put_together(views)
    assert engine.counters.bytes_offloaded == qkv.nbytes
    for m, v in zip(moved, views, strict=True):
        got = engine.get(m)
        assert torch.equal(got, v)
        assert got.stride() == v.stride()
    assert engine.counters.bytes_fetched == qkv.nbytes


def test_views_far_apart_in_one_storage_are_copied_apart() -> None:
    """Fault class 18."""
    engine = _engine(LateDevice())
    base = tensor(100, 8)
    views = [base[0], base[-1], base[-1], base[40:60, ::2]]
    moved = engine.put_together(views)
    assert engine.counters.bytes_offloaded == 8 * 4 + 8 * 4 + 20 * 4 * 4
    assert all(torch.equal(engine.get(m), v) for m, v in zip(moved, views, strict=True))


def test_a_storage_at_a_used_address_is_not_taken_for_the_old_one() -> None:
    """Fault class 18."""
    engine = _engine(LateDevice())
    moved: list[tuple[Moved, torch.Tensor]] = []
    for i in range(50):
        t = tensor(1000, seed=i)
        moved.append((engine.put(t), t.clone()))
        engine.settle()
        del t
    assert all(torch.equal(engine.get(m), want) for m, want in moved)
    t = tensor(8)
    first = engine.put(t)
    t += 1
    assert engine.put(t).copy is not first.copy


# --- pool -------------------------------------------------------------------------------------------------------------


def _pool(device: LateDevice, buckets: int = 12, most_bytes: int = 2**30) -> Pool:
    return Pool(device, buckets, most_bytes, Counters())


def test_slabs_waste_little() -> None:
    """Fault class 21: page-locking rounds up to a power of two."""
    for size in range(GRANULE_BYTES, 400 * GRANULE_BYTES, GRANULE_BYTES):
        n, whole = slab_of(size)
        assert whole & (whole - 1) == 0
        assert n * size <= whole
        assert n * size >= 0.8 * whole


def test_the_pool_is_capped_in_sizes_and_in_bytes() -> None:
    """Fault class 21."""
    pool = _pool(LateDevice(), buckets=2)
    first, second = pool.lend(512), pool.lend(1024)
    assert first is not None
    assert second is not None
    assert pool.lend(2048) is None
    pool.give_back(first, None)
    assert pool.lend(2048) is not None, "an idle size makes room for a new one"
    small = _pool(LateDevice(), most_bytes=4096)
    assert [small.lend(1024) is not None for _ in range(6)] == [True] * 4 + [False] * 2
    assert small.counters.pinned_bytes_peak == small.nbytes == 4096


def test_buffers_are_used_again() -> None:
    pool = _pool(LateDevice())
    for _ in range(100):
        leases = [pool.lend(3000) for _ in range(5)]
        for lease in leases:
            assert lease is not None
            pool.give_back(lease, None)
    assert pool.nbytes <= 2 * 5 * 3072


def test_a_pool_without_sizes_gives_pageable_memory() -> None:
    """The control's value 0."""
    device = LateDevice()
    assert _pool(device, buckets=0).lend(512) is None
    assert not device.pinned_ranges


def test_when_page_locking_fails_pageable_memory_is_used() -> None:
    """Fault class 21."""
    device = LateDevice(most_pinned=1024)
    engine = _engine(device)
    tensors = [tensor(64, seed=i) for i in range(8)]
    moved = [engine.put(t) for t in tensors]
    assert engine.counters.pageable_copies == 8 - 1024 // 256 // 2
    assert all(torch.equal(engine.get(m), t) for m, t in zip(moved, tensors, strict=True))


def test_remove_gives_page_locked_memory_back(late: LateDevice) -> None:
    """Fault classes 20, 21."""
    model = Stack(4)
    handle = apply(model, UNSLOTH)
    step(model, X)
    assert handle.counters.pinned_bytes >= 4 * BOUNDARY
    loss = loss_of(model(**X))
    handle.remove()
    assert handle.counters.pinned_bytes == 0
    assert late.trims == 1
    loss.backward()
    assert handle.counters.host_bytes == 0


def test_odd_sizes_and_mixed_types_share_the_pool() -> None:
    """Fault class 23."""
    engine = _engine(LateDevice())
    originals = [
        t for n in range(1, 60, 7) for t in (tensor(n), tensor(n).bfloat16(), tensor(n) > 0, tensor(n).double())
    ]
    for _ in range(3):
        moved = [engine.put(t) for t in originals]
        assert all(torch.equal(engine.get(m), t) for m, t in zip(moved, originals, strict=True))
        del moved


# --- the learned order ------------------------------------------------------------------------------------------------


def _crosswise(engine: Engine) -> None:
    """A pass whose backward asks for the first group first."""
    engine.start_pass()
    moved = [engine.put(tensor(16, seed=i)) for i in range(4)]
    for m in moved:
        engine.get(m)


@pytest.mark.parametrize(("with_it", "without", "kept"), [(0.9, 1.0, True), (0.99, 1.0, False), (1.2, 1.0, False)])
def test_the_learned_order_is_kept_only_where_it_is_faster(with_it: float, without: float, kept: bool) -> None:
    notes: list[str] = []
    device = LateDevice(step_seconds=[without if i % 2 else with_it for i in range(100)])
    engine = _engine(device, prefetch=True, note=notes.append)
    for _ in range(WARM_UP_PASSES + 2 * TIMED_PASSES + 3):
        _crosswise(engine)
    assert engine._tuner is not None
    assert engine._tuner.decided is kept
    assert len(notes) == 1
    assert ("is kept" in notes[0]) == kept
    before = engine.counters.fetched_ahead
    _crosswise(engine)
    assert engine.counters.fetched_ahead - before == (3 if kept else 0)


def test_a_learned_order_that_is_that_of_backward_is_not_timed(late: LateDevice) -> None:
    late.step_seconds = []
    model = Stack(4)
    with apply(model, Schedule(Backend.UNSLOTH, prefetch=True)) as handle:
        for _ in range(WARM_UP_PASSES + 2):
            step(model, X)
    assert any("is the order of backward" in n for n in handle.notes)


def test_a_device_without_a_clock_turns_the_learned_order_off(late: LateDevice) -> None:
    """Never an exception out of tuning."""
    model = Stack(4)
    plain = step(model, X)
    with apply(model, Schedule(Backend.UNSLOTH, prefetch=True)) as handle:
        for _ in range(4):
            assert_same(step(model, X), plain)
    assert any("could not be timed (no clock)" in n for n in handle.notes)
