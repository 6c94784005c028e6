"""The traced probe: workload -> profile, without a GPU and without weights.

The real model class is built on the meta device, its parameters become fake CPU tensors, and one training step runs under
the recorder. Long runs of identical blocks are traced through five of them (`thinning`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from probes import build, thinning
from probes.discover import discover
from probes.profile import Profile
from probes.recorder import Recorder
from probes.step import forward_loss
from probes.store import versions
from probes.structure import Block, Chain, Structure
from probes.target import Target
from probes.targets import CudaFunctions, cuda_scratch
from probes.workload import Workload, WorkloadError


class TraceError(RuntimeError):
    """The model could not be traced."""


def trace(workload: Workload, target: Target, *, whole: bool = False) -> Profile:
    """Traces one training step.

    Args:
        whole: trace every block, even where a run of identical ones could be traced through five.

    Raises:
        TraceError: the model's forward or backward does not run on fake tensors.
        WorkloadError: LoRA targets that match nothing; an attention backend that does not take the model.
    """
    with torch.device("meta"):
        base = build.build_base(workload)
    structure = discover(base, workload.family.regions)
    runs = [] if whole else thinning.find_runs(base, structure)
    # Meta tensors are three times as fast as fake ones but have no CPU dispatch; both shortcuts may fail, the last way may not.
    attempts = [(runs, True), (runs, False), ([], True), ([], False)]
    if target.kind == "cpu":
        attempts = [a for a in attempts if not a[1]]
    attempts = list({(bool(r), m): (r, m) for r, m in attempts}.values())
    sizes, parameters = _base_sizes(base, workload)
    notes: list[str] = []
    for chosen, on_meta in attempts:
        try:
            found = _trace(workload, target, base, structure, chosen, on_meta)
        except (WorkloadError, MemoryError):
            raise
        except Exception as error:
            if (chosen, on_meta) == attempts[-1]:
                raise TraceError(f"{workload.model} could not be traced: {type(error).__name__}: {error}") from error
            way = f"{'five blocks of each run' if chosen else 'every block'} on {'meta' if on_meta else 'fake'} tensors"
            notes.append(f"tracing {way} failed ({type(error).__name__}: {error})")
            with torch.device("meta"):
                base = build.build_base(workload)
            continue
        return dataclasses.replace(found, base_sizes=sizes, parameters=parameters, notes=tuple(notes))
    raise AssertionError("unreachable")


def _base_sizes(model: nn.Module, workload: Workload) -> tuple[tuple[tuple[int, int], ...], int]:
    counted: Counter[int] = Counter()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if workload.adapter == "full":
        tensors = list(model.named_buffers())
    for name, t in tensors:
        dtype = build.parameter_dtype(model, name, t.detach(), workload, torch.float32)
        counted[t.numel() * dtype.itemsize] += 1
    return tuple(sorted(counted.items())), sum(p.numel() for p in model.parameters())


def _trace(
    workload: Workload,
    target: Target,
    base: nn.Module,
    structure: Structure,
    runs: list[thinning.Run],
    on_meta: bool,
) -> Profile:
    kept = thinning.thin(base, runs)
    model = base
    build.inject_adapter(model, workload)
    fake = None if on_meta else FakeTensorMode(allow_non_fake_inputs=True)
    _empty(model, fake, workload)
    model.train()
    recorder = Recorder("meta" if on_meta else "cpu", cuda_scratch if target.kind == "cuda" else None)
    names = {thinning.original_name(n, kept): n for n, _ in model.named_modules()}
    links = _Links()
    for chain in structure.chains:
        for block in chain.blocks:
            if block.name not in names:
                continue
            module = model.get_submodule(names[block.name])
            links.watch(block.name, module)
            start = block.trainer_ffn_start
            recorder.watch_module(block.name, module, reads_from=start)
            inner = {*block.attention, *(m for run in block.feed_forward for m in run)}
            if start:
                inner.add(f"{block.name}.{start}")
            for name in sorted(inner):
                if name in names and name != block.name:
                    recorder.watch_module(name, model.get_submodule(names[name]))
    with fake or contextlib.nullcontext():
        with torch.device("meta") if on_meta else contextlib.nullcontext():
            inputs, wanted = build.make_inputs(workload, model)
        autocast = None if workload.precision == "fp32" else torch.bfloat16
        job = build.Job(model, inputs, wanted, workload.family.output_stack, autocast)
        leaves = [t for t in [*pytree.tree_leaves(inputs), wanted] if isinstance(t, torch.Tensor)]
        input_bytes = tuple(t.untyped_storage().nbytes() for t in leaves)
        functions = CudaFunctions(target) if target.kind == "cuda" else contextlib.nullcontext()
        with recorder, _meta_autocast():
            with functions, recorder.saved_tensors():
                loss = forward_loss(job)
            backward_start = recorder.now
            loss.backward()
            optimizer_start = recorder.now
        trained = [(thinning.original_name(n, kept), p) for n, p in job.trainable()]
        untrained = sum(p.grad is None for _, p in trained)
        if untrained == len(trained):
            raise TraceError("no trained parameter receives a gradient")
        tape = recorder.tape(backward_start, optimizer_start)
        del loss
    sizes = dict(trained)
    for run in runs:
        tape = thinning.expand(tape, run)
        for copy, source in thinning.repeat_names(list(sizes), run):
            sizes[copy] = sizes[source]
    counted = Counter((p.numel(), p.element_size()) for p in sizes.values())
    return Profile(
        workload=workload,
        source="traced",
        target=target.key(),
        versions=versions(),
        structure=links.linked(structure),
        tape=tape,
        base_sizes=(),
        trained_sizes=tuple((n, size, count) for (n, size), count in sorted(counted.items())),
        input_bytes=input_bytes,
        parameters=0,
    )


@contextlib.contextmanager
def _meta_autocast() -> Iterator[None]:
    """Lets `torch.autocast` take the device type ``meta``: it then sets the CPU's state, which `CudaFunctions` reads."""
    original = torch.autocast

    def autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return original("cpu" if device_type == "meta" else device_type, *args, **kwargs)

    modules = [m for m in (torch, torch.amp) if m.autocast is original]
    for m in modules:
        m.autocast = autocast
    try:
        yield
    finally:
        for m in modules:
            m.autocast = original


def _empty(model: nn.Module, fake: FakeTensorMode | None, workload: Workload) -> None:
    """Replaces every parameter and buffer by a meta (or fake CPU) tensor of the dtype that it has in training."""
    done: dict[int, Any] = {}
    for prefix, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            for key, t in list(table.items()):
                if t is None:
                    continue
                if id(t) not in done:
                    name = f"{prefix}.{key}" if prefix else key
                    dtype = build.parameter_dtype(model, name, t, workload, torch.float32)
                    data: torch.Tensor = torch.empty(t.shape, dtype=dtype, device="meta")
                    if fake is not None:
                        data = FakeTensor(fake, data, device=torch.device("cpu"))
                    if isinstance(t, nn.Parameter):
                        data = nn.Parameter(data, requires_grad=t.requires_grad)
                    done[id(t)] = (data, t)
                table[key] = done[id(t)][0]


class _Links:
    """Watches which blocks hand their outputs, unchanged, to the next one."""

    def __init__(self) -> None:
        self._order: list[str] = []
        self._outputs: dict[str, list[tuple[weakref.ref[torch.Tensor], int]]] = {}
        self._inputs: dict[str, list[weakref.ref[torch.Tensor]]] = {}
        self._joined: dict[tuple[str, str], bool] = {}

    def watch(self, name: str, module: nn.Module) -> None:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            if self._order:
                previous = self._order[-1]
                outputs = [(r(), v) for r, v in self._outputs[previous]]
                before = [r() for r in self._inputs[previous]]
                unchanged = all(o is not None and any(o is t for t in tensors) and o._version == v for o, v in outputs)
                rest = [t for t in tensors if not any(o is t for o, _ in outputs)]
                self._joined[previous, name] = unchanged and all(any(t is b for b in before) for t in rest)
            self._order.append(name)
            self._inputs[name] = [weakref.ref(t) for t in tensors]

        def leave(_: nn.Module, args: Any, output: Any) -> None:
            tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
            self._outputs[name] = [(weakref.ref(t), t._version) for t in tensors]

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave)

    def linked(self, structure: Structure) -> Structure:
        """The structure with `linked` filled in from what was seen. Blocks left out of the trace are like their twins."""
        chains = []
        called = set(self._order)
        for chain in structure.chains:
            blocks: tuple[Block, ...] = chain.blocks
            seen = [b.name for b in blocks if b.name in called]
            ok = bool(seen) and all(self._joined.get(pair, False) for pair in itertools.pairwise(seen))
            chains.append(Chain(chain.path, blocks, ok, chain.groupable))
        return Structure(tuple(chains))
