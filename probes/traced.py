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
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from probes import build, loha, quantized, stand_ins, thinning
from probes.compiled import CompiledBlocks
from probes.discover import discover, owned_tensors
from probes.expressions import evaluate
from probes.profile import BUFFER, DESCRIBED, FORWARD, FROZEN, TRAINED, Profile, Weight
from probes.recorder import Recorder
from probes.step import forward_loss, predict
from probes.store import versions
from probes.structure import Block, Chain, Structure
from probes.target import Target
from probes.targets import CudaFunctions, cpu_scratch, cuda_scratch
from probes.workload import ADAPTER_NAMES, LYCORIS, Workload, WorkloadError, check_compile


class TraceError(RuntimeError):
    """The model could not be traced."""


class Way(NamedTuple):
    """What stands for the tensors of a traced step."""

    on_meta: bool
    """Meta tensors: fast, but no CPU dispatch. Else CPU ones."""
    known_values: bool = False
    """For models that read masks, lengths or token ids: beside meta tensors those are real (`stand_ins.KnownValues`); on the
    CPU all are, which only a small copy can afford."""

    @property
    def text(self) -> str:
        if self.on_meta:
            return "meta tensors beside real whole numbers" if self.known_values else "meta tensors"
        return "real tensors" if self.known_values else "fake tensors"


META, VALUES, FAKE, REAL = Way(True), Way(True, True), Way(False), Way(False, True)


def _attempts(workload: Workload, target: Target, runs: list[thinning.Run]) -> list[tuple[list[thinning.Run], Way]]:
    """Fast ways first; all but the last may fail. A small copy's real step is faster than one on fake tensors."""
    if target.kind == "cpu":
        ways = [FAKE]
    else:
        ways = [VALUES, FAKE] if workload.family.reads_values else [META, VALUES, FAKE]
    found = [(chosen, way) for chosen in ([runs, []] if runs else [[]]) for way in ways]
    if target.kind == "cpu" and workload.reduced and not workload.compiles:
        return [*found, ([], REAL)] if workload.config_json else [([], REAL), *found]
    return found


def trace(workload: Workload, target: Target, *, whole: bool = False, forward_only: bool = False) -> Profile:
    """Traces one training step.

    Args:
        whole: trace every block, even where a run of identical ones could be traced through five.
        forward_only: only a forward pass without gradients, in eval mode, of every block.

    Raises:
        TraceError: the model's forward or backward does not run without real tensors.
        WorkloadError: LoRA targets that match nothing; an attention backend that does not take the model.
    """
    check_compile(workload)
    with torch.device("meta"):
        base = build.build_base(workload)
    structure = discover(base, workload.family.regions)
    if workload.compiles:
        structure = structure.without_regions()
    uneven_weights = 0 < workload.streamed_percent < 100
    runs = [] if whole or forward_only or uneven_weights else thinning.find_runs(base, structure, workload.module_names)
    attempts = _attempts(workload, target, runs)
    sizes, parameters = _base_sizes(base, workload)
    on_host, quantised_on_host = quantized.host_weight_bytes(base, workload)
    notes = stand_ins.notes(type(base))
    if (facts := quantized.table().get(workload.precision)) is not None:
        notes.append(
            f"{facts.precision}: {facts.note}; its kernels are not traced but described, so time and peak are less sure"
        )
    if workload.adapter in LYCORIS and (targets := build.lokr_targets(base, workload)) != workload.lora_targets:
        notes.append(
            f"{ADAPTER_NAMES[workload.adapter]} goes into {', '.join(targets)}: the model has no {' or '.join(workload.lora_targets)} class"
        )
    if workload.adapter in LYCORIS:
        notes += build.unmatched_names(base, workload)
    if workload.adapter == "loha":
        notes.append(loha.NOTE)
    later = thinning.later(runs)
    while attempts:
        chosen, way = attempts.pop(0)
        try:
            found = _trace(workload, target, base, structure, chosen, *way, forward_only=forward_only)
        except (WorkloadError, MemoryError):
            raise
        except Exception as error:
            part = "five blocks of each run" if chosen else "every block"
            if isinstance(error, thinning.UnevenError):
                attempts = [a for a in attempts if a[0] is not chosen]
                if chosen is runs and later:
                    attempts.insert(0, (later, way))
                    part = ""
            if not attempts:
                raise TraceError(f"{workload.model} could not be traced: {type(error).__name__}: {error}") from error
            if part:
                notes.append(f"tracing {part} on {way.text} failed ({type(error).__name__}: {error})")
            with torch.device("meta"):
                base = build.build_base(workload)
            continue
        return dataclasses.replace(
            found,
            base_sizes=sizes,
            parameters=parameters,
            host_weight_bytes=on_host,
            host_quantized_bytes=quantised_on_host,
            notes=(*notes, *found.notes),
        )
    raise AssertionError("unreachable")


def _base_sizes(model: nn.Module, workload: Workload) -> tuple[tuple[tuple[int, int], ...], int]:
    counted: Counter[int] = Counter()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if workload.adapter == "full":
        tensors = list(model.named_buffers())
    described = {f"{n}.weight": facts for n, facts in quantized.described_linears(model, workload).items()}
    for name, t in tensors:
        if name in described:
            counted[round(t.numel() * described[name].weight_bytes)] += 1
            continue
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
    known_values: bool = False,
    forward_only: bool = False,
) -> Profile:
    kept = thinning.thin(base, runs)
    model = base
    way = Way(on_meta, known_values)
    fake = FakeTensorMode(allow_non_fake_inputs=True) if way == FAKE else None
    known = stand_ins.KnownValues(one_in(workload, base)) if way == VALUES else None
    if way == REAL:
        ready = build.real_job(workload)
        model = ready.model
    else:
        quantized.replace(model, workload)
        build.inject_adapter(model, workload)
        placeholders(model, fake, workload)
    model.train(not forward_only)
    counted_devices = {META: ("meta",), VALUES: ("meta", "cpu")}.get(way, ("cpu",))
    recorder = Recorder(
        counted_devices,
        cuda_scratch if target.kind == "cuda" else cpu_scratch,
        keep_values=known_values,
    )
    functions = CudaFunctions(target) if target.kind == "cuda" else None
    compiled = CompiledBlocks(recorder, functions) if workload.compiles else None
    names = {thinning.original_name(n, kept): n for n, _ in model.named_modules()}
    block_weights: dict[str, tuple[Weight, ...]] = {}
    owned = owned_tensors(model, [names[b.name] for b in structure.blocks if b.name in names])
    links = _Links()
    for chain in structure.chains:
        for block in chain.blocks:
            if block.name not in names:
                continue
            module = model.get_submodule(names[block.name])
            links.watch(block.name, module)
            described = {id(m.weight): m.stored_bytes for m in module.modules() if isinstance(m, quantized.StandIn)}
            block_weights[block.name] = tuple(
                (described[id(t)], DESCRIBED) if id(t) in described else (t.untyped_storage().nbytes(), _kind(t))
                for t in owned[names[block.name]]
            )
            recorder.watch_weights(owned[names[block.name]])
            if compiled is not None:  # nothing inside has a call of its own
                recorder.watch_module(block.name, module)
                compiled.compile(module, int(block.name.rpartition(".")[2]))
                continue
            start = block.trainer_ffn_start
            recorder.watch_module(block.name, module, reads_from=start)
            inner = {*block.attention, *(m for run in block.feed_forward for m in run)}
            if start:
                inner.add(f"{block.name}.{start}")
            for name in sorted(inner):
                if name in names and name != block.name:
                    recorder.watch_module(name, model.get_submodule(names[name]))
    with fake or contextlib.nullcontext():
        if way == REAL:
            job = ready
        else:
            with torch.device("meta") if on_meta else contextlib.nullcontext():
                inputs, wanted = build.make_inputs(workload, model, known_values=known_values)
            autocast = build.autocast_dtype(workload)
            job = build.Job(model, inputs, wanted, workload.family.output_stack, autocast)
        leaves = [t for t in [*pytree.tree_leaves(job.inputs), job.target] if isinstance(t, torch.Tensor)]
        input_bytes = tuple(t.untyped_storage().nbytes() for t in leaves)
        with known or contextlib.nullcontext(), recorder, meta_autocast():
            active = functions or contextlib.nullcontext()
            if forward_only:
                with active, torch.no_grad():
                    predict(job)
                backward_start = recorder.now
            else:
                with active, recorder.saved_tensors():
                    loss = forward_loss(job)
                backward_start = recorder.now
                loss.backward()
            optimizer_start = recorder.now
        trained = [(thinning.original_name(n, kept), p) for n, p in job.trainable()]
        untrained = sum(p.grad is None for _, p in trained)
        if untrained == len(trained) and not forward_only:
            raise TraceError("no trained parameter receives a gradient")
        tape = recorder.tape(backward_start, optimizer_start)
        loss = None
    sizes = dict(trained)
    for run in runs:
        tape = thinning.expand(tape, run)
        for copy, source in thinning.repeat_names(list(sizes), run):
            sizes[copy] = sizes[source]
        for copy, source in thinning.repeat_names(list(block_weights), run):
            block_weights[copy] = block_weights[source]
    counted = Counter((tuple(p.shape), p.element_size()) for p in sizes.values())
    return Profile(
        workload=workload,
        source=FORWARD if forward_only else "traced",
        target=target.key(),
        versions=versions(),
        structure=links.linked(structure),
        tape=tape,
        base_sizes=(),
        trained_shapes=tuple((shape, size, count) for (shape, size), count in sorted(counted.items())),
        input_bytes=input_bytes,
        parameters=0,
        block_weights=block_weights,
        notes=(*_assumptions(workload, known), *(compiled.notes if compiled is not None else ())),
    )


def _kind(t: torch.Tensor) -> int:
    if not isinstance(t, nn.Parameter):
        return BUFFER
    return TRAINED if t.requires_grad else FROZEN


def one_in(workload: Workload, model: nn.Module) -> int | None:
    """Of entries selected by values that a trace does not know: one in so many. None: no such place."""
    text = workload.family.unknown_selection
    return evaluate(text, build.symbols(workload, model)) if text else None


def _assumptions(workload: Workload, known: stand_ins.KnownValues | None) -> tuple[str, ...]:
    if known is None or not known.assumed:
        return ()
    return (
        f"{workload.model} routes tokens by values that a trace does not know: balanced routing is assumed "
        f"(one in {known.one_in} of a layer's choices goes to each expert)",
    )


@contextlib.contextmanager
def meta_autocast() -> Iterator[None]:
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


def placeholders(model: nn.Module, fake: FakeTensorMode | None, workload: Workload) -> None:
    """Replaces every parameter and buffer by a meta (or fake CPU) tensor of the dtype that it has in training."""
    replace_tensors(model, fake, lambda name, t: build.parameter_dtype(model, name, t, workload, torch.float32))


def replace_tensors(
    model: nn.Module, fake: FakeTensorMode | None, dtype_of: Callable[[str, torch.Tensor], torch.dtype]
) -> None:
    """Replaces every parameter and buffer by a meta (or fake CPU) tensor.

    So are tables that a module keeps as plain attributes: a run has them on its device, as a meta or CPU trace must have.
    """
    done: dict[int, Any] = {}
    for prefix, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            for key, t in list(table.items()):
                if t is None:
                    continue
                if id(t) not in done:
                    name = f"{prefix}.{key}" if prefix else key
                    data: torch.Tensor = torch.empty(t.shape, dtype=dtype_of(name, t), device="meta")
                    if fake is not None:
                        data = FakeTensor(fake, data, device=torch.device("cpu"))
                    if isinstance(t, nn.Parameter):
                        data = nn.Parameter(data, requires_grad=t.requires_grad)
                    done[id(t)] = (data, t)
                table[key] = done[id(t)][0]
        for key, value in list(module.__dict__.items()):
            if fake is not None and key[0] != "_" and any(map(_plain_meta, pytree.tree_leaves(value))):
                module.__dict__[key] = pytree.tree_map_only(_plain_meta, _faked(fake), value)


def _faked(fake: FakeTensorMode) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda t: FakeTensor(fake, t, device=torch.device("cpu"))


def _plain_meta(value: Any) -> bool:
    return type(value) is torch.Tensor and value.is_meta


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
                fits = unchanged and all(any(t is b for b in before) for t in rest)
                self._joined[previous, name] = self._joined.get((previous, name), True) and fits
            self._order.append(name)
            self._inputs[name] = [weakref.ref(t) for t in tensors]

        def leave(_: nn.Module, args: Any, output: Any) -> None:
            tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
            self._outputs[name] = [(weakref.ref(t), t._version) for t in tensors]

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave)

    def linked(self, structure: Structure) -> Structure:
        """The structure with `linked` filled in from what was seen. Blocks left out of the trace are like their twins; a list
        that this workload does not call (reference images without any) is left out."""
        chains = []
        called = set(self._order)
        for chain in structure.chains:
            blocks: tuple[Block, ...] = chain.blocks
            seen = [b.name for b in blocks if b.name in called]
            if not seen:
                continue
            ok = all(self._joined.get(pair, False) for pair in itertools.pairwise(seen))
            chains.append(Chain(chain.path, blocks, ok, chain.groupable))
        return Structure(tuple(chains))
