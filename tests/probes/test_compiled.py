"""Compiled blocks: which operators share a kernel, what forward saves, and the peak of a real run with Inductor."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pytest
import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from advisor.verification import compare_on_cpu
from estimators.devices import find_gpu
from estimators.estimate import Estimator, Semantics
from estimators.schedule import Backend, Schedule
from probes import kernels
from probes.build import real_job
from probes.compiled import CompiledBlocks
from probes.kernels import Plan
from probes.recorder import Recorder
from probes.step import forward_loss
from probes.tape import NEVER
from probes.target import Target
from probes.traced import trace
from probes.workload import NotYetError, from_request, reduced_copy

ROWS, WIDTH = 512, 64
X, W = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH)


def planned(function: Callable[..., Any], *inputs: torch.Tensor, on_cpu: bool = False) -> Plan:
    graph: fx.Graph = make_fx(lambda *t: (function(*t),), decomposition_table=select_decomp_table())(*inputs).graph
    graph.eliminate_dead_code()
    return Plan(graph, on_cpu=on_cpu)


def fused(plan: Plan) -> list[tuple[int, int]]:
    """(reads, writes) of every fused kernel."""
    return [(len(s.reads), len(s.writes)) for s in plan.steps if s.node is None]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, w: torch.nn.functional.gelu(x) * 2 + 1, [(1, 1)]),
        (lambda x, w: torch.nn.functional.layer_norm(x, (WIDTH,)) * w[0], [(2, 1)]),
        (lambda x, w: torch.nn.functional.rms_norm((x @ w).sigmoid(), (WIDTH,)), [(1, 1)]),
        (lambda x, w: ((x + 1) @ w).relu() * x, [(1, 1), (2, 1)]),
        (lambda x, w: torch.ops.aten.native_dropout(x @ w, 0.1, True)[0] * x, [(2, 1)]),
        (lambda x, w: (x @ w) @ w, []),
    ],
    ids=["elementwise", "layer norm", "product, then RMSNorm", "around a product", "dropout", "products"],
)
def test_what_hangs_together_is_one_kernel_that_reads_and_writes_once(
    function: Callable[..., Any], expected: list[tuple[int, int]]
) -> None:
    assert fused(planned(function, X, W)) == expected


def test_a_cheap_value_is_computed_again_by_each_reader_a_dear_one_is_written() -> None:
    def cheap(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x.to(torch.float64).neg()
        return (y.to(torch.float32) @ w) * y.to(torch.float32)

    def dear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x
        for i in range(40):
            y = y * i
        return (y.neg() @ w) * y

    assert fused(planned(cheap, X, W)) == [(1, 1), (2, 1)]
    assert (1, 2) in fused(planned(dear, X, W))


def test_a_kernel_writes_over_what_it_is_the_last_to_read() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).exp()

    held = kernels.run(planned(function, X, W), [X, W], lambda _: None)[0]
    product = next(s for s in planned(function, X, W).steps if s.node is None)
    assert product.spare == product.reads
    assert held.shape == X.shape


def test_a_graphs_inputs_go_when_they_are_used_up() -> None:
    plan = planned(lambda x, w: ((x @ w) @ w) @ w, X, W)
    alive: list[bool] = []
    x = X.clone()
    import weakref

    watch = weakref.ref(x)
    last = plan.steps[-1].node
    assert last is not None
    original = last.target

    def look(*args: Any, **kwargs: Any) -> Any:
        alive.append(watch() is not None)
        return original(*args, **kwargs)  # type: ignore[operator]

    last.target = look
    values = [x, W]
    del x
    kernels.run(plan, values, lambda _: None)
    assert (alive, values) == ([False], [])


# against real compiled runs ------------------------------------------------------------------------------------------


def saved_by_real_blocks(model: str) -> dict[str, int]:
    """Bytes that each block's compiled forward saves and has made itself, in a real run with PyTorch's partitioner."""
    torch._dynamo.reset()
    workload = reduced_copy(from_request({"model": model, "compile": "regional"}))
    job = real_job(workload)
    backend = aot_autograd(
        fw_compiler=lambda module, _: module.forward,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    structure = trace(workload, Target("cpu")).structure
    found: dict[str, dict[int, int]] = {}
    resident = {p.untyped_storage().data_ptr() for p in job.model.parameters()}
    running: list[str] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if running and storage.data_ptr() not in resident:
            found.setdefault(running[-1], {})[storage.data_ptr()] = storage.nbytes()
        return tensor

    def enter(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            running.append(name)
            resident.update(
                t.untyped_storage().data_ptr()
                for t in torch.utils._pytree.tree_leaves((args, kwargs))
                if isinstance(t, torch.Tensor)
            )

        return hook

    for block in structure.blocks:
        module = job.model.get_submodule(block.name)
        module.compile(backend=backend)
        module.register_forward_pre_hook(torch.compiler.disable(enter(block.name)), with_kwargs=True)
        module.register_forward_hook(torch.compiler.disable(lambda *_: running.pop() and None))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        forward_loss(job)
    return {name: sum(sizes.values()) for name, sizes in found.items()}


@pytest.mark.parametrize("model", ["krea2", pytest.param("flux", marks=pytest.mark.slow)])
def test_a_compiled_block_saves_what_pytorchs_partitioner_lets_a_real_one_save(model: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        real = saved_by_real_blocks(model)
    tape = trace(reduced_copy(from_request({"model": model, "compile": "regional"})), Target("cpu")).tape
    eager = trace(reduced_copy(from_request({"model": model})), Target("cpu")).tape
    assert set(real) == set(tape.calls)
    for name, measured in real.items():

        def own(t: Any, name: str = name) -> int:
            (call,) = t.calls[name]
            inside = (t.saved_at >= call.start) & (t.saved_at < call.end)
            storages = np.unique(t.saved_storage[inside])
            return sum(int(t.size[s]) for s in storages if s >= 0 and call.start <= t.birth[s] < call.end)

        assert own(tape) == pytest.approx(measured, rel=0.02)
        assert own(tape) < 0.95 * own(eager)


COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
SCHEDULES = [Schedule(), Schedule(Backend.TORCH), Schedule(Backend.TORCH, 2, 3), Schedule(Backend.UNSLOTH)]


@pytest.mark.slow
@COMPILER
@pytest.mark.parametrize("model", ["krea2", "flux", "sd3"])
def test_peaks_are_those_of_real_runs_with_inductor_and_schedules_change_no_number(model: str) -> None:
    """Fault class 25: checkpoints around compiled blocks."""
    torch._dynamo.reset()
    workload = reduced_copy(from_request({"model": model, "compile": "regional"}))
    for c in compare_on_cpu(workload, lambda _: SCHEDULES):
        assert c.exact
        # beside host copies: AOTAutograd lets go of a block's saved tensors at once, which the tape does not know apart
        assert abs(c.error) < (0.03 if c.schedule.backend is Backend.UNSLOTH else 0.02), c
        assert (c.recomputed > 0) == (c.schedule.backend is not Backend.NONE)


# the trace -----------------------------------------------------------------------------------------------------------


def test_five_compiled_blocks_of_a_run_tell_the_same_as_all() -> None:
    workload = from_request({"model": "krea2", "resolution": 256, "compile": "regional"})
    thinned, whole = trace(workload, Target("cuda")), trace(workload, Target("cuda"), whole=True)
    assert thinned.notes == whole.notes == ()
    for schedule in SCHEDULES:
        a, b = (Estimator(p, find_gpu("H100"), Semantics()).estimate(schedule) for p in (thinned, whole))
        assert (a.peak, a.host) == (b.peak, b.host)
        assert a.step_seconds == pytest.approx(b.step_seconds)


def test_a_compiled_model_keeps_less_and_launches_less_than_an_eager_one() -> None:
    eager, compiled = (
        trace(from_request({"model": "krea2", "resolution": 256, "compile": c}), Target("cuda"))
        for c in ("none", "regional")
    )
    assert len(compiled.tape.op_at) < 0.7 * len(eager.tape.op_at)
    assert compiled.tape.op_flops.sum() == pytest.approx(eager.tape.op_flops.sum())
    peaks = [Estimator(p, find_gpu("H100"), Semantics()).estimate(Schedule()).peak for p in (eager, compiled)]
    assert peaks[1] < peaks[0]
    assert not any(b.attention or b.feed_forward for b in compiled.structure.blocks)
    assert (compiled.tape.death[compiled.tape.saved_storage[compiled.tape.saved_storage >= 0]] < NEVER).any()


class _NoGraph(nn.Module):
    """Fails when it is captured, and works afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 1:
            raise RuntimeError("no graph of this")
        out: torch.Tensor = self.linear(x)
        return out


def test_a_block_that_cannot_be_compiled_runs_eagerly_and_is_named() -> None:
    block, recorder = _NoGraph(), Recorder("cpu")
    blocks = CompiledBlocks(recorder, None)
    blocks.compile(block, 0)
    with recorder, recorder.saved_tensors():
        block(torch.randn(2, 4, requires_grad=True)).sum().backward()
    (note,) = blocks.notes
    assert note.startswith("_NoGraph could not be compiled here (RuntimeError: no graph of this)")
    assert block.linear.weight.grad is not None


@pytest.mark.parametrize(
    ("option", "value"), [("precision", "int8-sdnq"), ("weights_offload", "ramtorch"), ("weights_offload", "blocks:3")]
)
def test_stand_ins_are_not_compiled(option: str, value: str) -> None:
    workload = from_request({"model": "krea2", "resolution": 256, "compile": "regional", option: value})
    with pytest.raises(NotYetError, match=r"--compile regional with --.* cannot be estimated yet.*--compile none can"):
        trace(workload, Target("cuda"))


def test_a_graph_without_a_cut_leaves_nothing_in_the_users_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_cut(*_: Any) -> None:
        raise networkx.NetworkXUnbounded("Infinite capacity path")

    monkeypatch.setattr(networkx, "minimum_cut", no_cut)
    monkeypatch.chdir(tmp_path)
    block, recorder = nn.Linear(4, 4), Recorder("cpu")
    blocks = CompiledBlocks(recorder, None)
    blocks.compile(block, 0)
    with recorder, recorder.saved_tensors():
        block(torch.randn(2, 4, requires_grad=True)).sum().backward()
    (note,) = blocks.notes
    assert note.startswith("Linear could not be compiled here")
    assert list(tmp_path.iterdir()) == []
