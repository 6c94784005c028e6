"""Attention's saved tensors on the host, alone and inside checkpoints."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from late_device import LateDevice
from runtime_models import Stack, assert_same, loss_of, result_of, step, tensor, with_lora
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from advisor.runtime import RuntimeRefused, apply
from advisor.runtime import offload as offload_module
from estimators.schedule import Backend, Schedule
from probes.structure import Block as BlockName
from probes.structure import Chain, Structure

ALONE = Schedule(offload_attention=True)
WITH = [
    ALONE,
    Schedule(Backend.TORCH, offload_attention=True),
    Schedule(Backend.TORCH, 2, offload_attention=True),
    Schedule(Backend.TORCH, 2, 3, offload_attention=True),
    Schedule(Backend.UNSLOTH, 3, offload_attention=True),
    Schedule(Backend.TORCH_FFN, offload_attention=True),
    Schedule(Backend.UNSLOTH_FFN, offload_attention=True),
]
EVERY = pytest.mark.parametrize("schedule", WITH, ids=lambda s: s.name)
CHECKPOINTED = pytest.mark.parametrize("schedule", WITH[1:5], ids=lambda s: s.name)
X = {"x": tensor(2, 6, 8)}


class Attention(nn.Module):
    """Heads, dropout on the result, and a second result that is an argument."""

    ran = 0

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.to_out = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3))

    def forward(self, x: torch.Tensor, *, context: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, Any]:
        self.ran += 1
        q, k, v = (f(t).unflatten(-1, (2, 4)).transpose(1, 2) for f, t in zip(
            (self.to_q, self.to_k, self.to_v), (x, context, context), strict=True))  # fmt: skip
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.to_out(y.transpose(1, 2).flatten(2)) * scale, {"context": context, "none": None}


class Block(nn.Module):
    """Draws random numbers before, in and after attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(8), Attention()
        self.drop = nn.Dropout(0.2)
        self.gate = nn.Parameter(torch.ones(8))
        self.ff = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        h = self.drop(self.norm(x))
        y, other = self.attn(h, context=h * 2)
        x = x + self.gate * y + other["context"]
        return x + self.ff(x)


def model_of(depth: int = 5, block: type[nn.Module] = Block) -> Stack:
    return Stack(depth, block)


@EVERY
@pytest.mark.parametrize("autocast", [False, True])
def test_no_bit_changes(schedule: Schedule, autocast: bool) -> None:
    """Fault classes 6, 7, 14: random numbers are drawn before, in and after the attention that a replay skips."""
    model = model_of()
    plain = step(model, X, autocast)
    with apply(model, schedule) as handle:
        for _ in range(2):
            assert_same(step(model, X, autocast), plain)
    assert handle.counters.attention_calls == 2 * 5
    assert handle.counters.bytes_fetched == handle.counters.bytes_offloaded > 0
    assert handle.counters.host_bytes == 0


@CHECKPOINTED
def test_recomputation_does_not_run_attention(schedule: Schedule) -> None:
    """Fault class 14: nothing is offloaded and recomputed."""
    model = model_of()
    with apply(model, schedule) as handle:
        step(model, X)
    assert [b.attn.ran for b in model.blocks] == [1] * 5
    whole = sum(len(u.members) for u in handle.units)
    assert handle.counters.blocks_recomputed == handle.counters.attention_skipped == whole


def test_attention_offload_alone_works_without_checkpointing() -> None:
    """Fault class 15: what is freed on the device is what appears on the host."""
    model = model_of()
    plain_saved = _saved_bytes(model)
    with apply(model, ALONE) as handle:
        moved_saved = _saved_bytes(model)
        assert handle.counters.host_bytes_peak == plain_saved - moved_saved > 0


def _saved_bytes(model: nn.Module) -> int:
    """Bytes of storages alive after forward that were not before, on the "device" (host copies are not counted)."""
    live: dict[int, int] = {}
    host: set[int] = set()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for t in pytree.tree_leaves(out):
                if isinstance(t, torch.Tensor) and (key := (s := t.untyped_storage())._cdata) not in live:
                    live[key] = s.nbytes()
                    weakref.finalize(s, live.pop, key, None)
            if func is torch.ops.aten.copy_.default:
                host.add(out.untyped_storage()._cdata)
            return out

    with Count():
        torch.manual_seed(0)
        out = model(**X)
        total = sum(n for key, n in live.items() if key not in host)
    del out
    return total


def test_arguments_of_attention_are_not_kept_alive() -> None:
    """Fault class 20: a hook that refers to the arguments would keep them until the graph goes."""
    model = model_of()
    watched: list[weakref.ref[torch.Tensor]] = []
    with apply(model, Schedule(Backend.TORCH, offload_attention=True)):
        hooks = [
            b.attn.register_forward_pre_hook(lambda m, args: watched.append(weakref.ref(args[0]))) for b in model.blocks
        ]
        out = model(**X)
        assert len(watched) == 5
        assert not any(r() is not None for r in watched)
        loss_of(out).backward()
        for h in hooks:
            h.remove()


@EVERY
def test_everything_goes_by_reference_counts(schedule: Schedule) -> None:
    """Fault class 20."""
    model = model_of()
    with apply(model, schedule) as handle:
        step(model, X)
        gc.collect()
        gc.disable()
        try:
            out = model(**X)
            assert handle.counters.host_bytes > 0
            del out
            assert handle.counters.host_bytes == 0
            loss_of(model(**X)).backward()
            assert handle.counters.host_bytes == 0
        finally:
            gc.enable()


@EVERY
def test_retained_graphs_and_second_derivatives(schedule: Schedule) -> None:
    """Fault class 24."""
    model = model_of(3).eval()

    def twice() -> Any:
        model.zero_grad()
        out = model(**X)
        first, second = out.sum(), loss_of(out)
        first.backward(retain_graph=True)
        second.backward()
        return result_of(model, second)

    def penalty() -> Any:
        model.zero_grad()
        x = X["x"].clone().requires_grad_()
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            (grad,) = torch.autograd.grad(loss_of(model(x)), x, create_graph=True)
        loss = loss_of(grad)
        loss.backward()
        return result_of(model, loss)

    plain = twice(), penalty()
    with apply(model, schedule):
        assert_same(twice(), plain[0])
        assert_same(penalty(), plain[1])


@EVERY
@pytest.mark.parametrize("buckets", [0, 2, 12])
def test_copies_that_happen_late_change_no_bit(
    schedule: Schedule, buckets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault class 17."""
    device = LateDevice()
    monkeypatch.setattr(offload_module, "device_for", lambda _: device)
    model = model_of(6)
    shapes = [X, {"x": tensor(2, 9, 8)}]
    plain = [step(model, x) for x in shapes]
    options = {**schedule.__dict__, "pin_memory_max_buckets": buckets}
    with apply(model, Schedule(**options)) as handle:
        for i in range(8):
            assert_same(step(model, shapes[i % 2]), plain[i % 2])
    c = handle.counters
    assert c.host_bytes == 0
    assert c.bytes_fetched == c.bytes_offloaded
    assert c.fetched_ahead > c.tensors_fetched / 2
    assert not device.live


def test_frozen_attention_and_first_blocks_without_history() -> None:
    """Fault classes 1, 2: what needs no gradient in attention is handled too."""
    for depth_trained in (0, 3):
        model = model_of(4)
        model.requires_grad_(False)
        model.blocks[depth_trained].ff.requires_grad_(True)
        plain = step(model, X)
        for schedule in WITH:
            with apply(model, schedule):
                assert_same(step(model, X), plain)


def test_lora_dropout_masks_move_too() -> None:
    model = with_lora(model_of(), ["to_q", "to_k", "to_v"], dropout=0.5)
    plain = step(model, X)
    for schedule in WITH:
        with apply(model, schedule):
            assert_same(step(model, X), plain)


class Shares(Block):
    """The feed-forward side saves attention's argument too."""

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        h = self.norm(x).exp()
        y, _ = self.attn(h, context=h)
        return x + y + self.ff(h)


def test_a_tensor_that_somebody_else_keeps_is_not_copied() -> None:
    """Kept or offloaded, never both."""
    model = model_of(3, Shares)
    plain = step(model, X)
    moved = []
    for kind in (Block, Shares):
        other = model_of(3, kind)
        with apply(other, ALONE) as handle:
            step(other, X)
        moved.append(handle.counters.bytes_offloaded)
    # Block's attention alone holds its two arguments, Shares' holds none of its own
    assert moved[0] - moved[1] == 3 * 2 * X["x"].nbytes
    for schedule in WITH:
        with apply(model, schedule):
            assert_same(step(model, X), plain)


class WritesArgument(Block):
    def __init__(self) -> None:
        super().__init__()

        class Writes(Attention):
            def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
                x.mul_(2)
                return super().forward(x, **kwargs)

        self.attn = Writes()

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        h = self.norm(x) * 1
        y, _ = self.attn(h, context=x)
        return x + y + self.ff(h)


def test_attention_that_writes_into_its_argument_is_refused_inside_a_checkpoint() -> None:
    """Fault class 10."""
    model = model_of(2, WritesArgument)
    plain = step(model, X)
    with apply(model, ALONE):
        assert_same(step(model, X), plain)
    with (
        apply(model, WITH[1]),
        pytest.raises(RuntimeRefused, match=r"blocks\.0\.attn changes one of its arguments in place"),
    ):
        step(model, X)


class AddsInPlace(Block):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        y, _ = self.attn(self.norm(x), context=x)
        y += x
        return y + self.ff(y)


@EVERY
def test_an_in_place_residual_on_the_result(schedule: Schedule) -> None:
    """Fault class 10."""
    model = model_of(3, AddsInPlace)
    plain = step(model, X)
    with apply(model, schedule):
        assert_same(step(model, X), plain)


def test_a_saved_tensor_that_is_overwritten_is_an_error() -> None:
    """Fault class 10: saved-tensor hooks switch PyTorch's own check off."""

    class Overwrites(Block):
        def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            h = self.norm(x).exp()
            y, _ = self.attn(h, context=h)
            h.mul_(2)
            return x + y

    model = model_of(2, Overwrites)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model, X)
    with apply(model, ALONE), pytest.raises(RuntimeRefused, match="was changed in place"):
        step(model, X)


def test_attention_called_outside_its_block_runs_as_it_is_and_a_note_says_so() -> None:
    class Outside(Stack):
        def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            h = self.embed(x)
            h = h + self.blocks[0].attn(h, context=h)[0]
            return self.blocks[0](h)

    model = Outside(1, Block)
    plain = step(model, X)
    with apply(model, ALONE) as handle:
        assert_same(step(model, X), plain)
    assert any("also called outside its block" in n for n in handle.notes)


def test_refusals_name_the_reason() -> None:
    """Fault class 11."""
    with pytest.raises(RuntimeRefused, match="no block of Linear has an attention submodule"):
        apply(nn.Linear(2, 2), ALONE)
    model = model_of(2)
    model.blocks[1].compile(backend="eager")
    with pytest.raises(RuntimeRefused, match=r"blocks\.1 is compiled"):
        apply(model, ALONE)


def test_without_gradients_nothing_moves() -> None:
    """Fault class 12."""
    model = model_of()
    with apply(model, WITH[1]) as handle, torch.no_grad():
        model(**X)
    assert handle.counters == type(handle.counters)()


def test_removal_takes_every_trace_off() -> None:
    model = model_of()
    before = {n: set(m.__dict__) for n, m in model.named_modules()}
    for schedule in WITH:
        apply(model, schedule).remove()
        assert {n: set(m.__dict__) for n, m in model.named_modules()} == before


@EVERY
def test_fake_tensors_follow_the_same_path(schedule: Schedule) -> None:
    real, fake = model_of(3), None
    with apply(real, schedule) as handle:
        step(real, X)
    with FakeTensorMode(), torch.device("cpu"):
        fake = model_of(3)
        with apply(fake, schedule) as traced:
            loss_of(fake(torch.randn(2, 6, 8))).backward()
    assert traced.counters == handle.counters


def test_a_structure_can_name_the_attention() -> None:
    model = model_of(2)
    blocks = tuple(BlockName(f"blocks.{i}", "Block", (), (f"blocks.{i}.attn",)) for i in range(2))
    with apply(model, WITH[1], structure=Structure((Chain("blocks", blocks, None),))) as handle:
        step(model, X)
    assert handle.counters.attention_skipped == 2
