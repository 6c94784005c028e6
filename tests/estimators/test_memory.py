"""The memory simulation: against peaks worked out by hand, and against real CPU runs of `torch.utils.checkpoint`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from estimators.memory import RNG_STATE_BYTES, Memory, Replay, Resident, SimulationError, exact
from estimators.schedule import Resolution, Unit
from probes.build import Job
from probes.cpu_memory import profiled_peak, resident_bytes
from probes.profile import Profile
from probes.recorder import Recorder
from probes.structure import Structure
from probes.tape import NEVER, Tape
from probes.workload import from_request

NOTHING = Resident(0, 0, 0, 0, 0, 0, device_is_host=False)


def profile_of(tape: Tape) -> Profile:
    """A profile of which only the tape matters."""
    return Profile(from_request({"model": "flux"}), "traced", "cpu", {}, Structure(()), tape, (), (), (), 0)


def resolution(*units: Unit, attention: Sequence[str] = ()) -> Resolution:
    return Resolution(units, tuple(m for u in units for m in u.modules), tuple(attention))


def record(model: nn.Module, x: torch.Tensor, watched: Sequence[str], device: str) -> Tape:
    """The tape of one step of `model`, whose loss is the sum of its output."""
    recorder = Recorder(device)
    for name in watched:
        recorder.watch_module(name, model.get_submodule(name))
    with recorder:
        with recorder.saved_tensors():
            loss = model(x).sum()
        start = recorder.now + 1
        loss.backward()
        end = recorder.now
        tape = recorder.tape(start, end)
    return tape


# By hand: two blocks, each linear - GELU - linear, everything trained, no biases ----------------------------------------

BATCH, NARROW, WIDE = 64, 4, 32
V = BATCH * NARROW * 4
"""Bytes of a block's input or output."""
U = BATCH * WIDE * 4
"""Bytes of what its first linear or its GELU returns."""
P = NARROW * WIDE * 4
"""Bytes of one weight."""
ENDS = 8
"""The loss, and the gradient that backward starts from; both live to the end of backward."""


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        def block() -> nn.Module:
            return nn.Sequential(nn.Linear(NARROW, WIDE, bias=False), nn.GELU(), nn.Linear(WIDE, NARROW, bias=False))

        self.blocks = nn.ModuleList([block(), block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        for block in self.blocks:
            x = block(x)
        return x


@cache
def mlp() -> Replay:
    with torch.device("meta"):
        model, x = _Mlp(), torch.empty(BATCH, NARROW)
    return Replay(profile_of(record(model, x, ["blocks.0", "blocks.1"], "meta")), exact)


BLOCKS = (Unit(("blocks.0",)), Unit(("blocks.1",)))
SEGMENT = Unit(("blocks.0", "blocks.1"))


def test_without_checkpoints_the_peak_is_where_backward_starts() -> None:
    # kept: x0, h0, a0, x1, h1, a1; then the last linear's two gradients, the loss and its gradient
    memory = mlp().run(resolution(), NOTHING)
    assert memory.peak == 2 * V + 4 * U + U + P + ENDS
    assert memory.phase == "backward"
    assert memory.recomputed == ()


def test_with_a_checkpoint_for_each_block_the_peak_is_in_the_first_ones_backward() -> None:
    # kept: x0; recomputed: h0, a0; the second linear's incoming and two outgoing gradients; block 1's two gradients
    memory = mlp().run(resolution(*BLOCKS), NOTHING)
    assert memory.peak == V + 2 * U + V + U + P + 2 * P + ENDS
    assert memory.phase == "backward"
    assert len(memory.recomputed) == 2


def test_with_one_checkpoint_for_both_blocks_everything_is_live_again_in_backward() -> None:
    # both blocks are recomputed before any backward: as without checkpoints
    memory = mlp().run(resolution(SEGMENT), NOTHING)
    assert memory.peak == 2 * V + 4 * U + U + P + ENDS
    (span,) = memory.recomputed
    assert len(span.ranges) == 2


def test_with_only_the_first_block_checkpointed_the_second_keeps_its_tensors() -> None:
    memory = mlp().run(resolution(BLOCKS[0]), NOTHING)
    # block 1's backward: x0 and x1 (kept as inputs), h1, a1 and the last linear's two gradients
    last = 2 * V + 2 * U + U + P + ENDS
    first = V + 2 * U + V + U + P + 2 * P + ENDS
    assert memory.peak == max(last, first)


def test_the_last_linear_of_a_block_is_not_run_again() -> None:
    replay = mlp()
    (span, _) = replay.run(resolution(*BLOCKS), NOTHING).recomputed
    tape = replay.tape
    (low, high), gemms = span.ranges[0], tape.op_at[tape.op_kind == 0]
    assert ((gemms >= low) & (gemms < high)).sum() == 2
    assert ((gemms >= low) & (gemms <= span.stop)).sum() == 1


def test_offloading_moves_only_inputs_that_carry_a_grad_fn() -> None:
    units = [dataclasses.replace(u, offload_inputs=True) for u in BLOCKS]
    memory = mlp().run(resolution(*units), NOTHING)
    # x0 comes from the batch and stays, x1 goes and comes back
    assert (memory.to_host, memory.from_host, memory.host_peak, memory.copied_tensors) == (V, V, V, 1)


def test_offloaded_inputs_do_not_count_on_the_device_before_backward_reaches_them() -> None:
    # a wide input and no work inside: forward's end decides
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(6)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    with torch.device("meta"):
        model, x = Wide(), torch.empty(4096, 64)
    names = [f"blocks.{i}" for i in range(6)]
    replay = Replay(profile_of(record(model, x, names, "meta")), exact)
    size, weight = 4096 * 64 * 4, 64 * 64 * 4
    kept = replay.run(resolution(*(Unit((n,)) for n in names)), NOTHING)
    moved = replay.run(resolution(*(Unit((n,), True) for n in names)), NOTHING)
    # at the fifth block: its input and the three below, both gradients, two weights' gradients
    assert kept.peak == 6 * size + 2 * weight + ENDS
    # at the second block: the input that was fetched, both gradients, five weights' gradients
    assert moved.peak == 3 * size + 5 * weight + ENDS
    assert moved.host_peak == 5 * size


def test_on_a_cpu_host_copies_and_random_states_count_as_device_memory() -> None:
    host = dataclasses.replace(NOTHING, device_is_host=True)
    # in block 1's backward both units' states are there; so that is the peak and not block 0's
    assert mlp().run(resolution(*BLOCKS), host).peak == 2 * V + 3 * U + P + ENDS + 2 * RNG_STATE_BYTES
    # x1 is cloned to the host, and again back
    moved = [dataclasses.replace(u, offload_inputs=True) for u in BLOCKS]
    assert mlp().run(resolution(*moved), host).peak == 3 * V + 3 * U + P + ENDS + 2 * RNG_STATE_BYTES


def test_on_a_cpu_a_segment_stores_a_random_state_for_each_of_its_modules() -> None:
    host = dataclasses.replace(NOTHING, device_is_host=True)
    segment = resolution(SEGMENT)
    assert mlp().run(segment, host).peak == mlp().run(segment, NOTHING).peak + 2 * RNG_STATE_BYTES


def test_what_is_resident_is_added_to_the_peak_and_shown_in_the_breakdown() -> None:
    resident = Resident(1000, 200, 30, 4, 50_000, 0, device_is_host=False)
    memory = mlp().run(resolution(*BLOCKS), resident)
    assert memory.peak == mlp().run(resolution(*BLOCKS), NOTHING).peak + 51_234
    assert {k: memory.breakdown[k] for k in ("weights", "adapter", "optimizer", "inputs", "workspace")} == {
        "weights": 1000,
        "adapter": 200,
        "optimizer": 30,
        "inputs": 4,
        "workspace": 50_000,
    }


@pytest.mark.parametrize("units", [(), BLOCKS, (SEGMENT,), (BLOCKS[1],)], ids=["none", "blocks", "segment", "one"])
def test_the_breakdown_adds_up_to_the_peak(units: tuple[Unit, ...]) -> None:
    memory = mlp().run(resolution(*units), Resident(1000, 200, 30, 4, 50_000, 0, device_is_host=False))
    assert sum(memory.breakdown.values()) == memory.peak
    assert all(v >= 0 for v in memory.breakdown.values())


def test_the_breakdown_tells_gradients_from_saved_tensors() -> None:
    memory = mlp().run(resolution(), NOTHING)
    assert memory.breakdown["gradients"] == P
    # x0, h0, a0, x1, h1, a1
    assert memory.breakdown["saved"] == 2 * V + 4 * U


def test_a_large_optimizer_transient_makes_the_optimizer_the_peak() -> None:
    memory = mlp().run(resolution(), dataclasses.replace(NOTHING, optimizer_transient=10**9))
    assert memory.phase == "optimizer"
    # all gradients are there, and the loss
    assert memory.peak == 10**9 + 4 * P + ENDS // 2
    assert memory.breakdown["gradients"] == 4 * P
    assert sum(memory.breakdown.values()) == memory.peak


def test_the_devices_rounding_applies_to_every_allocation() -> None:
    rounded = Replay(mlp().profile, lambda sizes: -(-sizes // 512) * 512)
    memory = rounded.run(resolution(), NOTHING)
    # all tensors are multiples of 512 already; the loss and its gradient are not
    assert memory.peak == 2 * V + 4 * U + U + P + 2 * 512


def test_a_unit_of_an_unknown_module_is_refused_by_name() -> None:
    with pytest.raises(SimulationError, match=r"blocks\.7"):
        mlp().run(resolution(Unit(("blocks.7",))), NOTHING)
    with pytest.raises(SimulationError, match=r"blocks\.0\.ff"):
        mlp().run(resolution(Unit(("blocks.0",), from_child="ff")), NOTHING)


@pytest.mark.parametrize("units", [(), BLOCKS, (SEGMENT,)], ids=["none", "blocks", "segment"])
def test_the_stream_for_the_allocator_has_the_same_peak_and_frees_only_what_it_allocated(
    units: tuple[Unit, ...],
) -> None:
    replay = mlp()
    ids, signed = replay.events(resolution(*units), NOTHING)
    assert np.cumsum(signed).max() == replay.run(resolution(*units), NOTHING).peak
    live: dict[int, int] = {}
    for i, size in zip(ids.tolist(), signed.tolist(), strict=True):
        if size >= 0 and i not in live:
            live[i] = size
        else:
            assert live.pop(i) == -size
    # gradients and the loss are left
    assert sorted(live.values()) == [ENDS // 2, P, P, P, P]


# Against real runs ---------------------------------------------------------------------------------------------------

TOKENS, WIDTH, HEADS, N_BLOCKS = 192, 64, 4, 6


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = _Attention()
        self.ff = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))
        self.feed_forward_unit: Unit | None = None
        """Checkpoints the feed-forward side: from `norm2` on or, without `from_child`, only `ff`."""
        self.offload_attention = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        with _on_host(list(self.attn.parameters())) if self.offload_attention else contextlib.nullcontext():
            attended = self.attn(normed)
        x = x + attended
        del attended
        unit = self.feed_forward_unit
        if unit is not None and unit.from_child is not None:
            return _checkpointed([_Tail(self)], unit.offload_inputs, x)
        normed = self.norm2(x)
        return x + (self.ff(normed) if unit is None else _checkpointed([self.ff], unit.offload_inputs, normed))


class _Tail(nn.Module):
    def __init__(self, block: _Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.block.ff(self.block.norm2(x))


class _Stack(nn.Module):
    """Executes `units` itself with `torch.utils.checkpoint`: the reference that the simulation is compared with."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        make = {"transformer": _Block, "mlp": partial(_mlp_block)}[kind]
        self.embed, self.norm = nn.Linear(16, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList([make() for _ in range(N_BLOCKS)])
        self.units: tuple[Unit, ...] = ()

    def forward(self, x: torch.Tensor, return_dict: bool = True) -> Any:
        x = self.embed(x)
        inner = {u.modules[0].removesuffix(".ff"): u for u in self.units if _is_inner(u)}
        starts = {int(u.modules[0].split(".")[1]): u for u in self.units if not _is_inner(u)}
        for i, block in enumerate(self.blocks):
            if isinstance(block, _Block):
                block.feed_forward_unit = inner.get(f"blocks.{i}")
        i = 0
        while i < N_BLOCKS:
            if i in starts:
                members = [self.get_submodule(m) for m in starts[i].modules]
                x = _checkpointed(members, starts[i].offload_inputs, x)
                i += len(members)
                continue
            x = self.blocks[i](x)
            i += 1
        return (self.norm(x),)


def _is_inner(unit: Unit) -> bool:
    return unit.from_child is not None or unit.modules[0].endswith(".ff")


def _mlp_block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH))


def _on_host(keep: Sequence[torch.Tensor] = ()) -> torch.autograd.graph.saved_tensors_hooks:
    """Saved tensors with a grad_fn as copies, except views of `keep`; on a CPU, host and device are one memory."""
    resident = {t.data_ptr() for t in keep}

    def pack(t: torch.Tensor) -> tuple[bool, torch.Tensor]:
        return (True, t.detach().clone()) if t.grad_fn is not None and t.data_ptr() not in resident else (False, t)

    def unpack(held: tuple[bool, torch.Tensor]) -> torch.Tensor:
        return held[1].clone() if held[0] else held[1]

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _checkpointed(members: Sequence[nn.Module], offload: bool, x: torch.Tensor) -> torch.Tensor:
    states: dict[int, torch.Tensor] = {}

    def run(y: torch.Tensor) -> torch.Tensor:
        for i, m in enumerate(members):
            if i and i not in states:
                states[i] = torch.get_rng_state()  # as the bundled runtime does for every further module
            y = m(y)
        return y

    with _on_host() if offload else contextlib.nullcontext():
        return checkpoint(run, x, use_reentrant=False)


@cache
def real_job(kind: str) -> tuple[Job, torch.optim.Optimizer]:
    model = _Stack(kind)
    x = torch.randn(2, TOKENS, 16)
    job = Job(model, {"x": x}, torch.randn(2, TOKENS, WIDTH), output_stack=False, autocast=None)
    optimizer = torch.optim.SGD(list(model.parameters()), lr=1e-6)
    _step(job, optimizer)
    return job, optimizer


def _step(job: Job, optimizer: torch.optim.Optimizer) -> None:
    # a sum, because PyTorch's mse_loss returns a scalar whose storage has as many elements as its input
    job.model(**job.inputs)[0].sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@cache
def simulated(kind: str) -> Replay:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = _Stack(kind)
        recorder = Recorder("cpu")
        for i in range(N_BLOCKS):
            inner = ["attn", "norm2", "ff"] if kind == "transformer" else []
            recorder.watch_module(f"blocks.{i}", model.blocks[i], "norm2" if inner else None)
            for name in inner:
                recorder.watch_module(f"blocks.{i}.{name}", model.blocks[i].get_submodule(name))
        x = torch.empty(2, TOKENS, 16)
        with recorder:
            with recorder.saved_tensors():
                loss = model(x)[0].sum()
            start = recorder.now + 1
            loss.backward()
            tape = recorder.tape(start, recorder.now)
    return Replay(profile_of(tape), exact)


def _compare(kind: str, units: tuple[Unit, ...], attention: bool = False) -> None:
    job, optimizer = real_job(kind)
    assert isinstance(job.model, _Stack)
    job.model.units = units
    for block in job.model.blocks:
        block.offload_attention = attention  # type: ignore[assignment]
    names = [f"blocks.{i}.attn" for i in range(N_BLOCKS)] if attention else []
    resident = resident_bytes(job, optimizer)
    measured = profiled_peak(lambda: _step(job, optimizer), resident)
    memory = simulated(kind).run(
        resolution(*units, attention=names), Resident(resident, 0, 0, 0, 0, 0, device_is_host=True)
    )
    assert measured.left == 0
    # the step's own part, without what is resident in any case
    assert memory.peak - resident == pytest.approx(measured.peak - resident, rel=0.001)


def _units(groups: Sequence[Sequence[int]], offload: bool = False) -> tuple[Unit, ...]:
    return tuple(Unit(tuple(f"blocks.{i}" for i in g), offload) for g in groups)


def _ffn(blocks: Sequence[int], offload: bool = False) -> tuple[Unit, ...]:
    return tuple(Unit((f"blocks.{i}.ff",), offload) for i in blocks)


def _tails(blocks: Sequence[int], offload: bool = False) -> tuple[Unit, ...]:
    return tuple(Unit((f"blocks.{i}",), offload, "norm2") for i in blocks)


WHOLE = {
    "none": (),
    "every block": _units([[i] for i in range(N_BLOCKS)]),
    "every second block": _units([[0], [2], [4]]),
    "segments of two": _units([[0, 1], [2, 3], [4, 5]]),
    "segments of two with a gap": _units([[0, 1], [3, 4]]),
    "segment of four and the rest": _units([[0, 1, 2, 3], [4, 5]]),
    "everything in one": _units([list(range(N_BLOCKS))]),
    "inputs on the host": _units([[i] for i in range(N_BLOCKS)], offload=True),
    "segments of two, inputs on the host": _units([[0, 1], [2, 3], [4, 5]], offload=True),
}
FFN = {
    "feed-forward only": _ffn(range(N_BLOCKS)),
    "feed-forward of every second block": _ffn([0, 2, 4]),
    "feed-forward only, inputs on the host": _ffn(range(N_BLOCKS), offload=True),
    "from the norm on": _tails(range(N_BLOCKS)),
    "mixed": _units([[0, 1]]) + _ffn([2, 3], True) + _units([[4]], True),
}


@pytest.mark.parametrize("units", WHOLE.values(), ids=WHOLE.keys())
@pytest.mark.parametrize("kind", ["mlp", "transformer"])
def test_the_simulated_peak_is_the_measured_one(kind: str, units: tuple[Unit, ...]) -> None:
    _compare(kind, units)


@pytest.mark.parametrize("units", FFN.values(), ids=FFN.keys())
def test_the_simulated_peak_is_the_measured_one_with_feed_forward_checkpoints(units: tuple[Unit, ...]) -> None:
    _compare("transformer", units)


def test_the_simulated_peak_is_the_measured_one_from_the_norm_on_with_inputs_on_the_host() -> None:
    _compare("transformer", _tails(range(N_BLOCKS), offload=True))


@pytest.mark.parametrize("name", ["none", "feed-forward only"])
def test_the_simulated_peak_is_the_measured_one_with_attentions_saved_tensors_on_the_host(name: str) -> None:
    _compare("transformer", (WHOLE | FFN)[name], attention=True)


@st.composite
def _plans(draw: st.DrawFn) -> tuple[Unit, ...]:
    """Blocks from first to last: kept, in a checkpoint of one to four, or with a checkpointed feed-forward side."""
    units: list[Unit] = []
    i = 0
    while i < N_BLOCKS:
        what, offload = draw(st.sampled_from(["keep", "whole", "ffn", "tail"])), draw(st.booleans())
        length = draw(st.integers(1, min(4, N_BLOCKS - i))) if what == "whole" else 1
        if what == "whole":
            units += _units([range(i, i + length)], offload)
        elif what == "ffn":
            units += _ffn([i], offload)
        elif what == "tail":
            units += _tails([i])
        i += length
    return tuple(units)


@given(units=_plans())
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_simulated_peak_is_the_measured_one_for_any_mixture(units: tuple[Unit, ...]) -> None:
    _compare("transformer", units)


@given(units=_plans(), more=st.integers(0, N_BLOCKS - 1))
@settings(max_examples=50, deadline=None)
def test_peak_breakdown_and_stream_agree_for_any_mixture(units: tuple[Unit, ...], more: int) -> None:
    replay = simulated("transformer")
    plan = resolution(*units)
    memory: Memory = replay.run(plan, NOTHING)
    assert sum(memory.breakdown.values()) == memory.peak
    assert min(memory.breakdown.values()) >= 0
    assert np.cumsum(replay.events(plan, NOTHING)[1]).max() == memory.peak
    assert len(memory.recomputed) == len(units)
    assert memory.from_host <= memory.to_host
    # at least what lives past the step
    assert memory.peak >= int(replay.size[replay.tape.death >= NEVER].sum())
