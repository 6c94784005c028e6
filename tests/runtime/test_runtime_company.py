"""The runtime beside what people use with it: adapters, scalers, quantised and streamed weights, several models, several processes."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from late_device import LateDevice
from peft.tuners.tuners_utils import BaseTunerLayer
from runtime_models import REAL, Block, Stack, assert_same, loss_of, result_of, sd3, step, tensor, with_lora
from test_runtime_attention import Block as AttentionBlock
from torch import nn

from advisor.runtime import RuntimeRefused, apply, remove
from advisor.runtime import offload as offload_module
from estimators.schedule import Backend, Schedule
from probes import lokr
from probes.discover import discover

SCHEDULES = [
    Schedule(Backend.TORCH),
    Schedule(Backend.TORCH, 2),
    Schedule(Backend.UNSLOTH, 2),
    Schedule(Backend.TORCH, 2, 3, offload_attention=True),
    Schedule(offload_attention=True),
]
EVERY = pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
X = {"x": tensor(2, 6, 8)}


def model_of(depth: int = 4) -> Stack:
    return Stack(depth, AttentionBlock)


# --- adapters ---------------------------------------------------------------------------------------------------------


@EVERY
def test_adapters_can_be_switched_off_and_on_between_steps(schedule: Schedule) -> None:
    """Fault class 9."""
    case = sd3()
    model, inputs = case.model, case.inputs(case.size)
    layers = [m for m in model.modules() if isinstance(m, BaseTunerLayer)]

    def switched(on: bool) -> Any:
        for layer in layers:
            layer.enable_adapters(on)
        model.proj_out.requires_grad_(True)
        return step(model, inputs)

    plain = [switched(on) for on in (True, False, True)]
    with apply(model, schedule):
        for on, want in zip((True, False, True), plain, strict=True):
            assert_same(switched(on), want)


@pytest.mark.parametrize("schedule", SCHEDULES[:3], ids=lambda s: s.name)
def test_an_adapter_switched_off_before_backward_is_never_silent(schedule: Schedule) -> None:
    """Fault class 9: PyTorch notices that other tensors were saved."""
    case = sd3()
    layers = [m for m in case.model.modules() if isinstance(m, BaseTunerLayer)]
    with apply(case.model, schedule):
        loss = loss_of(case.model(**case.inputs(case.size)))
        for layer in layers:
            layer._disable_adapters = True
        with pytest.raises(torch.utils.checkpoint.CheckpointError):
            loss.backward()


class Stateful(Block):
    """Scales by how often it was called, as a load counter or a cache would."""

    calls = 0

    def forward(self, x: torch.Tensor, temb: torch.Tensor | None = None) -> torch.Tensor:
        self.calls += 1
        return super().forward(x, temb) * (1 + 0.1 * self.calls)


@pytest.mark.parametrize("schedule", SCHEDULES[:3], ids=lambda s: s.name)
def test_a_debug_mode_compares_values_not_only_shapes(schedule: Schedule) -> None:
    """Fault class 8: a stateful block saves tensors of the same shape with other values."""
    model = Stack(4, Stateful)
    with (
        apply(model, schedule, check_values=True),
        pytest.raises(RuntimeRefused, match=r"returns other values when it is"),
    ):
        step(model, {"x": tensor(3, 8)})
    for fine in (Stack(4), model_of()):
        inputs = {"x": tensor(3, 8)} if isinstance(fine.blocks[0], Block) else X
        plain = step(fine, inputs)
        with apply(fine, schedule, check_values=True):
            assert_same(step(fine, inputs), plain)


class Router(nn.Module):
    """Sends each token to one of two experts by a score with ties, in proportion to how many went there."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.score = nn.LayerNorm(8), nn.Linear(8, 2)
        self.ff = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x).flatten(0, -2)
        with torch.no_grad():
            chosen = self.score(h).round().argmax(-1)
        out = torch.zeros_like(h)
        for i, expert in enumerate(self.ff):
            mine = (chosen == i).nonzero().squeeze(-1)
            out = out.index_add(0, mine, expert(h[mine]))
        return x + out.view_as(x)


@EVERY
def test_routing_with_ties_is_replayed(schedule: Schedule) -> None:
    """Fault class 8."""
    if schedule.offload_attention:
        return
    model = Stack(4, Router)
    plain = step(model, X)
    with apply(model, schedule, check_values=True):
        assert_same(step(model, X), plain)


@EVERY
def test_lokr_adapters(schedule: Schedule) -> None:
    case = REAL["sd3"]()
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(0)
    model = SD3Transformer2DModel.from_config(case.model.config)
    model.requires_grad_(False)
    targets = ("to_q", "to_k", "to_v", "to_out.0")
    assert lokr.inject(model, targets, lambda _, base: lokr.LokrLinear(base, rank=2, factor=4, full_matrix=False)) > 8
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.1)
    model.train()
    plain = step(model, case.inputs(case.size))
    with apply(model, schedule):
        assert_same(step(model, case.inputs(case.size)), plain)


# --- mixed precision, scaling, accumulation ---------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("where", ["outside", "inside", "off in backward"])
def test_autocast_anywhere(schedule: Schedule, where: str) -> None:
    """Fault class 7."""
    model = model_of()

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x)

    def run() -> Any:
        model.zero_grad()
        torch.manual_seed(3)
        if where == "inside":
            loss = loss_of(Inside()(**X))
            loss.backward()
        else:
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model(**X))
                with torch.autocast("cpu", enabled=where == "outside"):
                    loss.backward()
        return result_of(model, loss)

    plain = run()
    with apply(model, schedule):
        assert_same(run(), plain)


@EVERY
def test_gradient_scaling_and_accumulation(schedule: Schedule) -> None:
    def train(scheduled: bool) -> list[torch.Tensor]:
        model = model_of()
        torch.manual_seed(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        with apply(model, schedule) if scheduled else contextlib.nullcontext():
            for i in range(6):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = loss_of(model(tensor(2, 6, 8, seed=i))) / 2
                scaler.scale(loss).backward()
                if i % 2:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad(set_to_none=i % 4 == 1)
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train(True), train(False), strict=True))


# --- weights that are not simply there --------------------------------------------------------------------------------


class Int8Linear(nn.Module):
    """Weights in int8, made float in every call."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("q", (linear.weight.detach() / scale).round().to(torch.int8))
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.q.to(x.dtype) * self.scale.to(x.dtype), self.bias)


class Streamed(torch.autograd.Function):
    """A linear layer whose weights are copied into one shared buffer in forward and again in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.buffer = weight, buffer
        buffer.copy_(weight)
        return x @ buffer.T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.saved_tensors  # noqa: B018 - asked for as a real layer would
        ctx.buffer.copy_(ctx.weight)
        return grads[0] @ ctx.buffer, None, None


class StreamedLinear(nn.Module):
    shared: dict[tuple[int, ...], torch.Tensor] = {}  # noqa: RUF012

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.host = [linear.weight.detach().clone()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = tuple(self.host[0].shape)
        out: torch.Tensor = Streamed.apply(x, self.host[0], self.shared.setdefault(shape, torch.empty(shape)))
        return out


def _replaced(kind: Callable[[nn.Linear], nn.Module]) -> Stack:
    """Every other linear layer of the blocks replaced; the rest is trained."""
    model = model_of()
    for block in model.blocks:
        block.attn.to_k = kind(block.attn.to_k)
        block.ff[0] = kind(block.ff[0])
    return model


@EVERY
@pytest.mark.parametrize("kind", [Int8Linear, StreamedLinear])
def test_weights_that_are_made_or_streamed_in_every_call(schedule: Schedule, kind: Callable[[nn.Linear], Any]) -> None:
    """Fault classes 10, 28, 29."""
    model = _replaced(kind)
    for autocast in (False, True) if kind is Int8Linear else (False,):
        plain = step(model, X, autocast)
        with apply(model, schedule):
            assert_same(step(model, X, autocast), plain)
            assert_same(step(model, X, autocast), plain)


@pytest.mark.parametrize("library", ["torchao", "bitsandbytes", "optimum.quanto"])
def test_quantised_bases_where_installed(library: str) -> None:
    """Fault class 29."""
    pytest.importorskip(library)
    model = Stack(3)
    model.requires_grad_(False)
    if library == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig())
    elif library == "optimum.quanto":
        from optimum.quanto import freeze, qint8, quantize

        quantize(model, weights=qint8)
        freeze(model)
    model.embed.requires_grad_(True)
    plain = step(model, {"x": tensor(3, 8)})
    for schedule in SCHEDULES[:3]:
        with apply(model, schedule):
            assert_same(step(model, {"x": tensor(3, 8)}), plain)


@EVERY
def test_blocks_whose_weights_wait_on_the_host(schedule: Schedule) -> None:
    """Fault class 28: block-level offloading puts its hooks around the block's forward, so a replay goes through them."""
    from diffusers.hooks import apply_group_offloading

    model = model_of()
    plain = step(model, X)
    apply_group_offloading(
        model, torch.device("cpu"), torch.device("cpu"), offload_type="block_level", num_blocks_per_group=1
    )
    with apply(model, schedule):
        for _ in range(2):
            got = step(model, X)
            assert torch.equal(got.loss, plain.loss)
            assert all(torch.equal(got.grads[n], g) for n, g in plain.grads.items())


# --- several models, steps and shapes ---------------------------------------------------------------------------------


def test_several_models_at_once_do_not_touch_each_other() -> None:
    models = [model_of(), model_of(), Stack(4)]
    inputs = [X, X, {"x": tensor(3, 8)}]
    plain = [step(m, x) for m, x in zip(models, inputs, strict=True)]
    schedules = [SCHEDULES[3], SCHEDULES[2], SCHEDULES[1]]
    handles = [apply(m, s) for m, s in zip(models, schedules, strict=True)]
    for m, x, want in zip(models, inputs, plain, strict=True):
        assert_same(step(m, x), want)
    models[0].zero_grad()
    models[1].zero_grad()
    torch.manual_seed(3)
    together = loss_of(models[1](models[0](**X)))
    together.backward()
    got = [p.grad.clone() for m in models[:2] for p in m.parameters() if p.grad is not None]
    handles[0].remove()
    assert handles[1].active
    for m in models:
        remove(m)
        m.zero_grad()
    torch.manual_seed(3)
    loss_of(models[1](models[0](**X))).backward()
    want = [p.grad for m in models[:2] for p in m.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_copy_of_a_model_with_offloaded_attention_is_independent() -> None:
    """Fault class 30."""
    model = model_of()
    plain = step(model, X)
    with apply(model, SCHEDULES[3]) as handle:
        step(model, X)
        twin = copy.deepcopy(model)
        done = copy.copy(handle.counters)
        assert_same(step(twin, X), plain)
        assert handle.counters == done
        assert list(twin.state_dict()) == list(model.state_dict())


def _alive() -> tuple[int, int]:
    """Tensors alive and the bytes of their storages."""
    gc.collect()
    found = {}
    for o in gc.get_objects():
        if type(o) in (torch.Tensor, nn.Parameter):
            found[o.untyped_storage()._cdata] = o.untyped_storage().nbytes()
    return len(found), sum(found.values())


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late copies"])
@pytest.mark.parametrize("schedule", SCHEDULES[2:4], ids=lambda s: s.name)
def test_two_hundred_steps_of_alternating_shapes_stay_flat(
    schedule: Schedule, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault classes 20, 31."""
    device = LateDevice()
    if late:
        monkeypatch.setattr(offload_module, "device_for", lambda _: device)
    model = with_lora(model_of(), ["to_q", "to_k", "to_v"])
    shapes = [{"x": tensor(2, n, 8)} for n in (6, 9, 4, 7)]
    with apply(model, schedule) as handle:
        for i in range(20):
            step(model, shapes[i % 4])
        before, pinned = _alive(), handle.counters.pinned_bytes
        for i in range(180):
            step(model, shapes[i % 4])
        assert _alive() == before
        assert handle.counters.pinned_bytes == pinned
        assert handle.counters.host_bytes == 0
    assert (pinned > 0) == late
    assert not device.live


def test_tensors_after_the_last_block_are_where_they_were() -> None:
    """Fault class 16: the final layer gets a result on the model's device, and inputs that stay are the caller's own."""
    model = model_of()
    seen: list[torch.Tensor] = []
    model.blocks[-1].register_forward_hook(lambda m, a, out: seen.append(out))
    with torch.no_grad():
        model(**X)
    with apply(model, Schedule(Backend.UNSLOTH, 2, offload_attention=True)):
        out = model(**X)
        loss_of(out).backward()
    assert {t.device for t in seen} == {X["x"].device}
    assert all(p.grad is None or p.grad.device == p.device for p in model.parameters())


# --- several processes ------------------------------------------------------------------------------------------------


def _rank(rank: int, folder: str, unused: bool) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = []
    try:
        for schedule in [Schedule(), *SCHEDULES]:
            model = model_of(3)
            model.spare = nn.Linear(2, 2) if unused else None
            wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=unused)
            with apply(wrapped, schedule) as handle:
                for i in range(2):
                    got = step(wrapped, {"x": tensor(2, 6, 8, seed=10 * i + rank)})
            found.append([float(g.double().sum()) for g in got.grads.values()])
            assert schedule.backend is Backend.NONE or handle.counters.units_recomputed == 2 * len(handle.units)
    finally:
        torch.distributed.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


@pytest.mark.slow
@pytest.mark.parametrize("unused", [False, True])
def test_two_processes_reduce_the_same_gradients_as_without_a_schedule(tmp_path: Path, unused: bool) -> None:
    """Fault class 26."""
    command = [sys.executable, __file__, str(tmp_path), str(int(unused))]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in (0, 1)]
    try:
        assert [r.wait(timeout=120) for r in ranks] == [0, 0]
    finally:
        for r in ranks:
            r.kill()
    by_rank = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert by_rank[0] == by_rank[1], "both ranks hold the mean of both gradients"
    assert len(by_rank[0]) == 1 + len(SCHEDULES)
    assert all(found == by_rank[0][0] for found in by_rank[0])


@pytest.fixture
def _one_process(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_one_process")
def test_models_sharded_by_fully_shard_are_refused() -> None:
    """Fault class 27: FSDP's own hooks gather parameters around a module's call; a replay would not pass through them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    model = model_of()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    with pytest.raises(RuntimeRefused, match="sharded"):
        apply(model, SCHEDULES[0])
    with pytest.raises(RuntimeRefused, match="sharded"):
        apply(model, SCHEDULES[-1])


def test_the_structure_that_is_found_names_attention() -> None:
    assert all(b.attention for b in discover(model_of()).blocks)


if __name__ == "__main__":
    _rank(int(sys.argv[3]), sys.argv[1], bool(int(sys.argv[2])))


def test_group_offload_brings_weights_in_for_recomputation_and_never_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why it is not planned for (`probes.workload.GROUP_OFFLOAD`)."""
    from diffusers.hooks import apply_group_offloading
    from diffusers.hooks.group_offloading import ModuleGroup

    moves: list[tuple[str, bool]] = []

    def watch(name: str) -> None:
        original = getattr(ModuleGroup, name)

        def move(group: Any) -> None:
            moves.append((name, torch._C._current_graph_task_id() != -1))
            original(group)

        monkeypatch.setattr(ModuleGroup, name, move)

    watch("onload_")
    watch("offload_")
    case = REAL["sd3"]()
    apply_group_offloading(case.model, torch.device("cpu"), torch.device("cpu"), "block_level", num_blocks_per_group=1)
    case.model.enable_gradient_checkpointing()  # type: ignore[operator]
    moves.clear()
    step(case.model, case.inputs(case.size))
    assert moves.count(("offload_", False)) >= 4
    assert moves.count(("onload_", True)) == 4
    assert ("offload_", True) not in moves
