"""The engine that keeps checkpoint inputs on the host."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from runtime_models import Stack, assert_same, loss_of, result_of, step, tensor

from advisor.runtime import apply
from advisor.runtime.counters import Counters
from advisor.runtime.offload import ALIGNMENT_BYTES, Engine
from estimators.schedule import Backend, Schedule

SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "channels_last": lambda t: t[None].to(memory_format=torch.channels_last),
    "slice with offset": lambda t: t[:, 1:, :],
    "every second": lambda t: t[:, :, ::2],
    "one column": lambda t: t[:, :, 3],
    "flipped dimensions of a slice": lambda t: t[1:, :, 1:5].permute(2, 0, 1),
    "expanded": lambda t: t[:, :1, :].expand(-1, 7, -1),
    "scalar": lambda t: t[1, 2, 3],
    "empty": lambda t: t[:0],
    "bool": lambda t: t > 0,
    "bfloat16 at an odd offset": lambda t: t.bfloat16()[0, 0, 3:],
    "complex": lambda t: torch.view_as_complex(t.reshape(4, 5, 3, 2)),
}


def _engine() -> Engine:
    return Engine(Counters())


@pytest.mark.parametrize("shape", SHAPES)
def test_values_strides_and_alignment_come_back_exactly(shape: str) -> None:
    """Fault classes 18, 19."""
    original = SHAPES[shape](tensor(4, 5, 6))
    engine = _engine()
    copy = engine.put(original)
    restored = engine.get(copy)
    assert torch.equal(restored, original)
    assert restored.stride() == original.stride()
    assert restored.dtype == original.dtype
    lead = restored.storage_offset() * restored.element_size()
    assert lead == original.storage_offset() * original.element_size() % ALIGNMENT_BYTES
    assert restored.untyped_storage().data_ptr() != original.untyped_storage().data_ptr() or original.numel() == 0


def test_an_expanded_tensor_is_copied_once() -> None:
    """Fault class 18."""
    copy = _engine().put(tensor(4, 1, 6).expand(-1, 100, -1))
    assert copy.nbytes == 4 * 6 * 4


def test_a_slice_is_copied_without_the_rest_of_its_storage() -> None:
    """Fault class 18."""
    assert _engine().put(tensor(100, 6)[10:12]).nbytes == 2 * 6 * 4
    assert _engine().put(tensor(100, 6)[:, :2]).nbytes == 100 * 2 * 4


def test_a_host_copy_does_not_follow_later_changes() -> None:
    """Fault class 18: the address of a freed tensor may be used again."""
    engine, t = _engine(), tensor(3, 4)
    want, copy = t.clone(), engine.put(t)
    t.zero_()
    assert torch.equal(engine.get(copy), want)
    engine.get(copy).zero_()
    assert torch.equal(engine.get(copy), want)


def test_counters_follow_the_copies() -> None:
    engine = _engine()
    first, second = engine.put(tensor(2, 8)), engine.put(tensor(2, 8))
    engine.get(first)
    engine.get(first)
    c = engine.counters
    assert (c.tensors_offloaded, c.bytes_offloaded, c.tensors_fetched, c.bytes_fetched) == (2, 128, 2, 128)
    assert c.host_bytes == 128
    del first, second
    assert c.host_bytes == 0
    assert c.host_bytes_peak == 128


def test_only_activations_move() -> None:
    """Leaves and tensors without a history stay; what a block saves inside its checkpoint never comes to the engine. A tensor
    that all blocks take is copied once."""
    model = Stack(3)
    leaf = tensor(3, 8, seed=1).requires_grad_()
    with apply(model, Schedule(Backend.UNSLOTH)) as handle:
        step(model, {"x": tensor(3, 8), "temb": leaf})
        assert handle.counters.tensors_offloaded == 3
        step(model, {"x": tensor(3, 8), "temb": leaf.sin()})
        assert handle.counters.tensors_offloaded == 3 + 3 + 1


def test_a_tensor_passed_twice_moves_once() -> None:
    """Fault class 18."""

    class Twice(Stack):
        def forward(self, x: torch.Tensor, **kwargs: object) -> torch.Tensor:
            h = self.embed(x)
            for block in self.blocks:
                h = block(h, temb=h)
            return h

    model = Twice(2)
    plain = step(model, {"x": tensor(3, 8)})
    with apply(model, Schedule(Backend.UNSLOTH)) as handle:
        assert_same(step(model, {"x": tensor(3, 8)}), plain)
    assert handle.counters.tensors_offloaded == 2


def test_strided_block_inputs_give_the_same_gradients() -> None:
    """Fault class 19."""

    class Strided(Stack):
        def between(self, i: int, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, h, x], 0)[x.shape[0] : 2 * x.shape[0]] if i % 2 else h.T.contiguous().T

    model = Strided(4)
    plain = step(model, {"x": tensor(3, 8)})
    for schedule in (Schedule(Backend.UNSLOTH), Schedule(Backend.UNSLOTH, 2), Schedule(Backend.UNSLOTH_FFN)):
        with apply(model, schedule):
            assert_same(step(model, {"x": tensor(3, 8)}), plain)


def test_the_host_copies_of_a_step_go_one_unit_at_a_time_in_backward() -> None:
    """Fault class 22: nothing is fetched before its unit is due."""
    model = Stack(4)
    seen: list[tuple[int, int]] = []
    with apply(model, Schedule(Backend.UNSLOTH)) as handle:
        c = handle.counters
        for block in model.blocks:
            block.attn.register_full_backward_hook(lambda *_: seen.append((c.tensors_fetched, c.host_bytes // 96)))
        step(model, {"x": tensor(3, 8)})
    assert seen == [(1, 4), (2, 3), (3, 2), (4, 1)]


def test_fake_tensors_follow_the_same_path() -> None:
    """The runtime can be traced without memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.device("cpu"):
        model = Stack(4)
        with apply(model, Schedule(Backend.UNSLOTH, 2)) as handle:
            loss_of(model(torch.randn(3, 8))).backward()
    assert handle.counters.tensors_fetched == 2
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("schedule", [Schedule(Backend.UNSLOTH), Schedule(Backend.UNSLOTH, 2)], ids=lambda s: s.name)
def test_on_a_gpu_inputs_move_and_gradients_are_the_same(schedule: Schedule) -> None:
    """Fault classes 16, 17, 21."""
    model = Stack(8).cuda()
    inputs = {"x": tensor(4096, 8).cuda()}
    plain = step(model, inputs)
    with apply(model, Schedule(Backend.TORCH, schedule.interval)):
        kept = _bytes_after_forward(model, inputs)
    with apply(model, schedule) as handle:
        moved = _bytes_after_forward(model, inputs)
        for _ in range(20):
            assert_same(step(model, inputs), plain)
    boundary = inputs["x"].nbytes
    assert kept - moved >= (len(handle.units) - 1) * boundary
    assert handle.counters.host_bytes == 0


def _bytes_after_forward(model: Stack, inputs: dict[str, torch.Tensor]) -> int:
    before = torch.cuda.memory_allocated()
    out = model(**inputs)
    used = torch.cuda.memory_allocated() - before
    loss_of(out).backward()
    result_of(model, loss_of(out))
    return used
