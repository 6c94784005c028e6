"""Block swap: no bit changes, weights are on the device only while they are used, and the model is as it was afterwards."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from late_device import LateDevice
from runtime_models import REAL, Stack, assert_same, result_of, step, tensor, with_lora
from torch import nn

from advisor.runtime import RuntimeRefused, apply, swapping
from estimators.schedule import Action, Backend, Schedule

X = {"x": tensor(32, 8)}
SCHEDULES = [
    Schedule(),
    Schedule(Backend.TORCH),
    Schedule(Backend.TORCH, 2),
    Schedule(Backend.TORCH, 2, 3),
    Schedule(Backend.UNSLOTH),
    Schedule(Backend.TORCH_FFN),
    Schedule(Backend.UNSLOTH_FFN),
]


def stack(depth: int = 6) -> nn.Module:
    return with_lora(Stack(depth), ["attn", "ff.3"])


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    device = LateDevice()
    monkeypatch.setattr(swapping, "device_for", lambda _: device)
    return device


def frozen(block: nn.Module) -> Iterator[nn.Parameter]:
    return (p for p in block.parameters() if not p.requires_grad)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
@pytest.mark.parametrize("name", REAL)
def test_no_bit_changes_on_real_models(name: str, schedule: Schedule) -> None:
    case = REAL[name]()
    plain = step(case.model, case.inputs(case.size))
    with apply(case.model, schedule, swap_blocks=100) as handle:
        for _ in range(2):
            assert_same(step(case.model, case.inputs(case.size)), plain)
    assert handle.counters.weights_brought > 0
    assert_same(step(case.model, case.inputs(case.size)), plain)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
def test_late_copies_change_no_bit_over_many_steps(late: LateDevice, schedule: Schedule) -> None:
    """Fault classes 10, 17: memory freed or used again while a copy is under way raises, an early read gives NaN."""
    model = stack()
    shapes = [X, {"x": tensor(48, 8)}]
    plain = [step(model, x) for x in shapes]
    with apply(model, schedule, swap_blocks=4) as handle:
        for i in range(20):
            assert_same(step(model, shapes[i % 2]), plain[i % 2])
            if i % 5 == 4:
                with torch.no_grad():  # a validation pass, after which the learned order is wrong once
                    model(**X)
    c = handle.counters
    assert 0 < c.weights_ahead < c.weights_brought


def test_with_autocast_and_gradients_accumulated_over_two_forwards(late: LateDevice) -> None:
    """Fault class 28."""
    model = stack()

    def accumulated() -> dict[str, torch.Tensor]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16):
            losses = [model(**X).float().pow(2).mean(), model(x=X["x"] * 2).float().mean()]
        for loss in losses:
            loss.backward()
        return result_of(model, losses[0]).grads

    plain = accumulated()
    with apply(model, Schedule.per_block([Action.KEEP, Action.RECOMPUTE, Action.RECOMPUTE_FFN] * 2), swap_blocks=5):
        for _ in range(3):
            found = accumulated()
            assert found.keys() == plain.keys()
            assert all(torch.equal(found[n], plain[n]) for n in plain)


def test_only_the_last_blocks_are_swapped_and_never_the_first() -> None:
    model = stack(4)
    with apply(model, Schedule(), swap_blocks=2) as handle:
        assert [b.name for b in handle._swapper.blocks] == ["blocks.2", "blocks.3"]  # type: ignore[union-attr]
    with apply(model, Schedule(), swap_blocks=100) as handle:
        assert [b.name for b in handle._swapper.blocks] == ["blocks.1", "blocks.2", "blocks.3"]  # type: ignore[union-attr]


@pytest.mark.parametrize("schedule", [Schedule(), Schedule(Backend.TORCH), Schedule(Backend.TORCH_FFN)])
def test_at_most_two_blocks_are_on_the_device_and_none_between_steps(late: LateDevice, schedule: Schedule) -> None:
    """Fault classes 15, 20, 22."""
    model = stack(8)
    one = sum(p.nbytes for p in frozen(model.blocks[1]))  # type: ignore[index]
    with apply(model, schedule, swap_blocks=7):
        for _ in range(4):
            step(model, X)
            gc.collect()
            assert sum(late.live.values()) == 0
        assert one < late.live_peak <= 2 * one


def test_saved_tensors_do_not_keep_a_copy_alive(late: LateDevice) -> None:
    model = stack()
    with apply(model, Schedule(), swap_blocks=5):
        loss = model(**X).sum()
        assert sum(late.live.values()) == 0
        loss.backward()
        assert sum(late.live.values()) == 0


def test_trained_weights_buffers_and_shared_weights_stay(late: LateDevice) -> None:
    model = stack()
    model.blocks[4].norm = model.blocks[5].norm  # type: ignore[index,union-attr]
    before = {n: p.data_ptr() for n, p in model.named_parameters()}
    with apply(model, Schedule(Backend.TORCH), swap_blocks=2):
        moved = {n for n, p in model.named_parameters() if p.data_ptr() != before[n]}
        assert moved
        assert all(n.startswith(("blocks.4", "blocks.5")) and "lora" not in n and "norm" not in n for n in moved)


def test_a_backward_after_removal_and_a_second_backward_are_the_same(late: LateDevice) -> None:
    """Fault class 24."""
    model = stack()
    plain = step(model, X)
    for schedule in (Schedule(), Schedule(Backend.TORCH_FFN)):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        handle = apply(model, schedule, swap_blocks=5)
        loss = model(**X).pow(2).mean()
        loss.backward(retain_graph=True)
        assert_same(result_of(model, loss), plain)
        model.zero_grad(set_to_none=True)
        handle.remove()
        loss.backward()
        assert_same(result_of(model, loss), plain)
        assert not any("forward" in m.__dict__ for m in model.modules())


def test_an_exception_in_a_block_leaves_its_weights_on_the_host(late: LateDevice) -> None:
    model = stack()
    plain = step(model, X)
    with apply(model, Schedule(Backend.TORCH), swap_blocks=5):
        with pytest.raises(RuntimeError):
            model(x=X["x"], temb=torch.zeros(3, 3, 3, 3, 5))
        gc.collect()
        assert sum(late.live.values()) == 0
        assert_same(step(model, X), plain)


def test_what_gets_no_page_locked_memory_is_said_and_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault class 21."""
    device = LateDevice(most_pinned=0)
    monkeypatch.setattr(swapping, "device_for", lambda _: device)
    model = stack()
    plain = step(model, X)
    with apply(model, Schedule(), swap_blocks=5) as handle:
        assert_same(step(model, X), plain)
        assert any("no page-locked host memory" in n for n in handle.notes)


def test_applying_again_replaces_the_swap_and_a_copy_is_independent(late: LateDevice) -> None:
    """Fault class 30."""
    model = stack()
    plain = step(model, X)
    apply(model, Schedule(Backend.TORCH), swap_blocks=5)
    twin = copy.deepcopy(model)
    handle = apply(model, Schedule(), swap_blocks=1)
    assert_same(step(model, X), plain)
    assert_same(step(twin, X), plain)
    assert len(handle._swapper.blocks) == 1  # type: ignore[union-attr]
    handle.remove()


def test_the_graph_of_a_discarded_loss_frees_the_copies(late: LateDevice) -> None:
    model = stack()
    with apply(model, Schedule(), swap_blocks=5) as handle:
        loss = model(**X).sum()
        loss.backward(retain_graph=True)
        blocks = [weakref.ref(b) for b in handle._swapper.blocks]  # type: ignore[union-attr]
        del loss
        gc.collect()
        assert sum(late.live.values()) == 0
        assert all(b().references == 0 for b in blocks)  # type: ignore[union-attr]


def test_what_cannot_be_swapped_is_refused() -> None:
    with pytest.raises(RuntimeRefused, match="no block has frozen weights"):
        apply(Stack(4), Schedule(), swap_blocks=2)
    with pytest.raises(RuntimeRefused, match="attention offload does not go with swapped blocks"):
        apply(REAL["sd3"]().model, Schedule(offload_attention=True), swap_blocks=2)
    model = stack()
    model.blocks[5].compile()  # type: ignore[index,operator]
    with pytest.raises(RuntimeRefused, match=r"blocks\.5 is compiled"):
        apply(model, Schedule(), swap_blocks=2)
