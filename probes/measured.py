"""The measured probe: the traced profile, and what one block of each kind really needs and takes on a device.

A forward pass of the model on tensors without data tells with what each kind of block is called. Then one such block at a
time is built for real (random weights in the training dtypes, its adapter injected), called as a training step calls it, and
measured. So a model of any size can be probed where one of its blocks fits. Beside the blocks the device's own rates are
measured: matrix products, memory traffic, launches, copies to and from the host.

Bytes are what PyTorch's allocator counts on CUDA, and what it was asked for on a CPU; seconds are medians.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from probes import build, collecting, quantized, stand_ins, thinning, traced
from probes.discover import discover
from probes.profile import Profile
from probes.recorder import Recorder
from probes.step import forward_loss
from probes.structure import Structure
from probes.target import Target
from probes.targets import CudaFunctions
from probes.workload import Workload, WorkloadError

DEVICE_KEY = "device"
"""Key of the device's own rates in `Profile.measured`; the others are ``chain path/kind`` (see `block_key`)."""

WARM_UPS = 2
"""Runs before anything is measured: library workspaces, algorithm choices, clocks."""


class MeasureError(RuntimeError):
    """The device or the workload cannot be measured."""


# Meters --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """Bytes above what was allocated before."""

    left: int
    """Still allocated afterwards."""
    peak: int


class DeviceMeter(ABC):
    """Counts a device's memory, time and kernels."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    @abstractmethod
    def name(self) -> str:
        """For people."""

    @abstractmethod
    def usage(self, run: Callable[[], object]) -> Usage:
        """What one call of `run` allocates. Whatever it returns has to be kept elsewhere to count as left."""

    @abstractmethod
    def mark(self) -> Any:
        """A moment in the device's work so far."""

    @abstractmethod
    def between(self, start: Any, end: Any) -> float:
        """Seconds from one `mark` to a later one."""

    @abstractmethod
    def kernels(self, run: Callable[[], object]) -> int:
        """How many kernels one call of `run` starts."""

    @abstractmethod
    def link_rates(self) -> dict[str, float]:
        """Bytes per second between pinned host memory and the device, both ways; empty where there is no link."""

    def release(self) -> None:  # noqa: B027 - nothing to do on a device that caches nothing
        """Gives cached memory back."""


class CpuMeter(DeviceMeter):
    """Memory from the profiler's allocator events; a kernel is an operator that computes something.

    The profiler does not see that memory is freed which was allocated outside of any `usage`.
    """

    @property
    def name(self) -> str:
        return "cpu"

    def usage(self, run: Callable[[], object]) -> Usage:
        with (
            collecting.paused(),
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile,
        ):
            run()
        events = [
            (e.start_ns(), e.nbytes())
            for e in profile.profiler.kineto_results.events()
            if e.name() == "[memory]" and e.device_type() == torch.autograd.DeviceType.CPU
        ]
        current = peak = 0
        for _, size in sorted(events, key=lambda e: e[0]):
            current += size
            peak = max(peak, current)
        return Usage(current, peak)

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, start: float, end: float) -> float:
        return end - start

    def kernels(self, run: Callable[[], object]) -> int:
        with Recorder("cpu") as recorder:
            run()
        return len(recorder.op_at)

    def link_rates(self) -> dict[str, float]:
        return {}


class CudaMeter(DeviceMeter):
    """Memory from the caching allocator's counters, time from CUDA events, kernels from the profiler."""

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    def usage(self, run: Callable[[], object]) -> Usage:
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        torch.cuda.synchronize(self.device)
        after, peak = torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_allocated(self.device)
        return Usage(after - before, peak - before)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def kernels(self, run: Callable[[], object]) -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize(self.device)
        on_device = (e for e in profile.events() or () if e.device_type == torch.autograd.DeviceType.CUDA)
        return sum(not e.name.startswith(("Memcpy", "Memset")) for e in on_device)

    def link_rates(self) -> dict[str, float]:
        size = 256 * 2**20
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        here = torch.empty(size, dtype=torch.uint8, device=self.device)
        down = self._best(lambda: host.copy_(here, non_blocking=True))
        up = self._best(lambda: here.copy_(host, non_blocking=True))
        return {"device_to_host_bytes_per_second": size / down, "host_to_device_bytes_per_second": size / up}

    def _best(self, run: Callable[[], object]) -> float:
        return min(_seconds(self, run) for _ in range(5))

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


def meter_for(device: str | torch.device) -> DeviceMeter:
    """The meter of a device.

    Raises:
        MeasureError: not a CPU or a CUDA device that is present.
    """
    try:
        found = torch.device(device)
    except RuntimeError:
        raise MeasureError(f"{device!r} is no device; valid: cuda, cuda:N, cpu") from None
    if found.type == "cpu":
        return CpuMeter(found)
    if found.type != "cuda":
        raise MeasureError(f"device {found} cannot be measured; valid: cuda, cuda:N, cpu")
    if not torch.cuda.is_available():
        raise MeasureError("no CUDA device is present; the traced probe needs none")
    if found.index is not None and found.index >= torch.cuda.device_count():
        raise MeasureError(f"device {found} is not present; there are {torch.cuda.device_count()}")
    return CudaMeter(torch.device("cuda", found.index or 0))


def _seconds(meter: DeviceMeter, run: Callable[[], object]) -> float:
    start = meter.mark()
    run()
    return meter.between(start, meter.mark())


# Rates of the device -------------------------------------------------------------------------------------------------

_BUDGET_SECONDS = 0.1
"""For one rate, warm-up not counted."""


def measure_rates(device: str | torch.device) -> dict[str, float]:
    """What the device reaches in short runs (under a second on a CPU): ``fp32_flops`` and ``bf16_flops`` of a matrix product
    (a multiplication and its addition are two), ``memory_bytes_per_second`` of a copy (read and write both counted), and
    ``launch_seconds``, the host's time to issue one small operator.

    Raises:
        MeasureError: see `meter_for`.
    """
    meter = meter_for(device)
    on_cpu = meter.device.type == "cpu"
    found = {
        f"{name}_flops": _matmul_flops(meter, dtype, side)
        for name, dtype, side in (
            ("fp32", torch.float32, 512 if on_cpu else 4096),
            ("bf16", torch.bfloat16, 128 if on_cpu else 8192),
        )
    }
    size = 2 ** (24 if on_cpu else 30)
    source, copy = (torch.empty(size, dtype=torch.uint8, device=meter.device) for _ in range(2))
    source.zero_()
    found["memory_bytes_per_second"] = 2 * size / _best_of(meter, lambda: copy.copy_(source), _BUDGET_SECONDS)
    found["launch_seconds"] = _launch_seconds(meter)
    meter.release()
    return found


def _matmul_flops(meter: DeviceMeter, dtype: torch.dtype, side: int) -> float:
    a, b = (torch.ones(side, side, dtype=dtype, device=meter.device) for _ in range(2))
    out = torch.empty_like(a)
    return float(2 * side**3 / _best_of(meter, lambda: torch.mm(a, b, out=out), _BUDGET_SECONDS))


def _best_of(meter: DeviceMeter, run: Callable[[], object], budget_seconds: float) -> float:
    """Shortest of up to 20 runs, as many as the budget allows but at least one after a warm-up."""
    run()
    best = float("inf")
    begun = time.perf_counter()
    for _ in range(20):
        best = min(best, _seconds(meter, run))
        if time.perf_counter() - begun > budget_seconds:
            break
    return max(best, 1e-9)


def _launch_seconds(meter: DeviceMeter) -> float:
    """Median over batches of operators so small that only issuing them counts; fewer than a CUDA queue holds."""
    x = torch.zeros(16, device=meter.device)
    batch, times = 200, []
    for _ in range(5):
        _seconds(meter, lambda: None)
        begun = time.perf_counter()
        for _ in range(batch):
            x = x + 1.0
        times.append((time.perf_counter() - begun) / batch)
        meter.between(meter.mark(), meter.mark())
    return statistics.median(times)


# How blocks are called -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorSpec:
    """An argument without its data."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    carries_gradient: bool

    def make(self, device: torch.device, generator: torch.Generator) -> torch.Tensor:
        """Random floats, zero integers, masks that let everything through."""
        extent = 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True)) if 0 not in self.size else 0
        data = torch.empty(extent, dtype=self.dtype, device=device)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            data.normal_(generator=generator)
        else:
            data.fill_(self.dtype is torch.bool)
        return data.as_strided(self.size, self.stride).requires_grad_(self.carries_gradient)


@dataclass
class BlockCall:
    """One block of a kind, and the arguments that it is called with."""

    key: str
    name: str
    """Qualified name of the block in the whole model."""
    module: nn.Module
    """Without data."""
    leaves: list[Any]
    """`TensorSpec` where the argument holds a tensor of which only the form is known."""
    layout: pytree.TreeSpec

    def signature(self) -> tuple[object, ...]:
        """Equal for calls that cost the same."""
        known = tuple(
            v if isinstance(v, TensorSpec) else (tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else repr(v)
            for v in self.leaves
        )
        return (*_kind_of(self.module), known, self.layout)

    def arguments(self, device: torch.device, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Fresh arguments on a device."""
        generator = torch.Generator(device).manual_seed(seed)
        leaves = [
            v.make(device, generator)
            if isinstance(v, TensorSpec)
            else v.to(device)
            if isinstance(v, torch.Tensor)
            else v
            for v in self.leaves
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.layout)
        return args, kwargs


def _kind_of(block: nn.Module) -> tuple[object, ...]:
    """`thinning.signature`, whatever the block's number is."""
    found: list[Any] = list(thinning.signature(block, -1))
    *modules, parameters = found
    plain = [
        (name, kind, tuple((k, None if type(v) is int and thinning._LABEL.search(k) else v) for k, v in values))
        for name, kind, values in modules
    ]
    return (*plain, parameters)


def block_key(path: str, kind: str, first: int | None = None) -> str:
    """Key of a kind of block in `Profile.measured`; `first` is the index of its first block where a list has several kinds
    of one class."""
    return f"{path}/{kind}" if first is None else f"{path}/{kind}@{first}"


def block_calls(workload: Workload, target: Target) -> list[BlockCall]:
    """One call of each kind of block, in call order. Blocks of one list are of one kind when class, parameters and plain
    attributes are equal; of several alike the middle one is taken, whose inputs carry gradients as most do.

    Raises:
        MeasureError: the forward pass does not run without real tensors.
        WorkloadError: see `traced.trace`.
    """
    failure: Exception | None = None
    for thinned in (True, False):
        for way in _ways(workload, target):
            try:
                return _calls(workload, target, way, thinned)
            except (WorkloadError, MemoryError):
                raise
            except Exception as error:  # noqa: BLE001 - a model's code may fail in any way on tensors without data
                failure = error
    raise MeasureError(f"{workload.model} does not run without data: {type(failure).__name__}: {failure}") from failure


def _ways(workload: Workload, target: Target) -> list[traced.Way]:
    if target.kind == "cpu":
        return [traced.FAKE, *([traced.REAL] if workload.reduced else [])]
    return [traced.META, traced.VALUES, traced.FAKE]


def _calls(workload: Workload, target: Target, way: traced.Way, thinned: bool) -> list[BlockCall]:
    with torch.device("meta"):
        model = build.build_base(workload)
    structure = discover(model, workload.family.regions)
    kept = thinning.thin(model, thinning.find_runs(model, structure, workload.module_names)) if thinned else {}
    fake = FakeTensorMode(allow_non_fake_inputs=True) if way == traced.FAKE else None
    known = stand_ins.KnownValues(traced.one_in(workload, model)) if way == traced.VALUES else None
    if way == traced.REAL:
        job = build.real_job(workload)
        kept = {}
    else:
        build.inject_adapter(model, workload)
        traced.placeholders(model, fake, workload)
    with fake or contextlib.nullcontext():
        if way != traced.REAL:
            with torch.device("meta") if way.on_meta else contextlib.nullcontext():
                inputs, wanted = build.make_inputs(workload, model, known_values=way.known_values)
            job = build.Job(model, inputs, wanted, workload.family.output_stack, _autocast(workload))
        job.model.train()
        watcher = _Watcher(job.model, structure, kept)
        functions = CudaFunctions(target) if target.kind == "cuda" else contextlib.nullcontext()
        with watcher, known or contextlib.nullcontext(), traced.meta_autocast(), functions:
            forward_loss(job)
    return watcher.one_of_each_kind()


class _Watcher:
    """Notes with what the blocks of a model are called, as a context manager around its forward pass."""

    def __init__(self, model: nn.Module, structure: Structure, kept: dict[str, list[int]]) -> None:
        self.names = {thinning.original_name(n, kept): n for n, _ in model.named_modules()}
        self.model, self.structure = model, structure
        self._found: dict[str, BlockCall] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> _Watcher:
        for chain in self.structure.chains:
            for block in chain.blocks:
                if block.name in self.names:
                    module = self.model.get_submodule(self.names[block.name])
                    self._watch(block.name, module)
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _watch(self, name: str, module: nn.Module) -> None:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            leaves, layout = pytree.tree_flatten((args, kwargs))
            self._found[name] = BlockCall(name, name, module, [_without_data(v) for v in leaves], layout)

        self._hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))

    def one_of_each_kind(self) -> list[BlockCall]:
        calls = []
        for chain in self.structure.chains:
            groups: dict[tuple[object, ...], list[int]] = {}
            for i, block in enumerate(chain.blocks):
                if block.name in self._found:
                    groups.setdefault(_kind_of(self._found[block.name].module), []).append(i)
            for j, members in enumerate(groups.values()):
                block = chain.blocks[members[len(members) // 2]]
                key = block_key(chain.path, block.kind, members[0] if j else None)
                calls.append(dataclasses.replace(self._found[block.name], key=key))
        return calls


def _without_data(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.device.type == "cpu" and type(value) is torch.Tensor and not value.is_floating_point():
        return value.detach().clone()
    return TensorSpec(tuple(value.size()), tuple(value.stride()), value.dtype, value.requires_grad)


# One block -----------------------------------------------------------------------------------------------------------


def _autocast(workload: Workload) -> torch.dtype | None:
    return build.autocast_dtype(workload)


_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


@contextlib.contextmanager
def _real(module: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """The module with small random values on the device; afterwards it is without data again."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    done: dict[int, torch.Tensor] = {}

    def filled(t: torch.Tensor) -> torch.Tensor:
        if id(t) not in done:
            data = torch.empty(t.shape, dtype=t.dtype, device=device)
            if t.is_floating_point() and isinstance(t, nn.Parameter):
                data.normal_(std=0.02)
            else:
                data.zero_()
            done[id(t)] = nn.Parameter(data, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else data
        return done[id(t)]

    try:
        with torch.no_grad():
            for m in module.modules():
                for table in (m._parameters, m._buffers, m.__dict__):
                    for key, t in list(table.items()):
                        if isinstance(t, torch.Tensor):
                            before.append((table, key, t))
                            table[key] = filled(t)
        yield module
    finally:
        for table, key, t in before:
            table[key] = t


class _Step:
    """Forward and backward of one real block, as often as wanted."""

    def __init__(self, module: nn.Module, call: BlockCall, device: torch.device, workload: Workload) -> None:
        self.module, self.device, self.workload = module, device, workload
        self.args, self.kwargs = call.arguments(device, seed=0)
        self.outputs: list[torch.Tensor] = []
        self.result: Any = None
        self.gradients: list[torch.Tensor] = []

    def forward(self) -> None:
        dtype = _autocast(self.workload)
        chosen = _BACKENDS.get(self.workload.attention)
        with (
            torch.autocast(self.device.type, dtype) if dtype is not None else contextlib.nullcontext(),
            sdpa_kernel([chosen]) if chosen is not None else contextlib.nullcontext(),
        ):
            self.result = self.module(*self.args, **self.kwargs)
        found = [t for t in pytree.tree_leaves(self.result) if isinstance(t, torch.Tensor)]
        self.outputs = [t for t in found if t.requires_grad]

    def output_bytes(self) -> int:
        """Of the outputs' storages that are not the arguments'."""
        given = _storages((self.args, self.kwargs))
        return sum(size for key, size in _storages(self.result).items() if key not in given)

    def prepare(self) -> None:
        """The gradients that the rest of the model would hand in."""
        self.gradients = [torch.ones_like(t) for t in self.outputs]

    def backward(self) -> None:
        self.result = None
        outputs, self.outputs = self.outputs, []
        torch.autograd.backward(outputs, self.gradients)

    def clear(self) -> None:
        """Drops gradients and outputs."""
        self.result, self.outputs, self.gradients = None, [], []
        for t in [*self.module.parameters(), *pytree.tree_leaves((self.args, self.kwargs))]:
            if isinstance(t, torch.Tensor):
                t.grad = None

    def run(self) -> None:
        self.forward()
        self.prepare()
        self.backward()
        self.clear()


def _storages(values: Any) -> dict[int, int]:
    tensors = [t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def measure_block(call: BlockCall, meter: DeviceMeter, workload: Workload, repeats: int) -> dict[str, float]:
    """Builds one block and measures its forward and backward.

    Returns:
        ``saved_bytes`` (what the forward leaves for backward), ``output_bytes``, ``forward_peak_bytes`` (above what was there
        before the forward), ``backward_peak_bytes`` (above what was there before the backward), ``gradient_bytes`` (what the
        backward leaves of gradients, less what it frees), ``weight_bytes``, ``forward_seconds``, ``backward_seconds``,
        ``forward_kernels``, ``backward_kernels``.

    Raises:
        MeasureError: the block does not run, or does not fit.
    """
    try:
        with _real(call.module, meter.device) as module:
            step = _Step(module, call, meter.device, workload)
            step.forward()
            if not step.outputs:
                raise MeasureError(f"block {call.key}: no output carries a gradient, so there is nothing to train")
            step.clear()
            for _ in range(WARM_UPS):
                step.run()
            found = {**_memory(step, meter), **_times(step, meter, repeats)}
            found["weight_bytes"] = float(sum(_storages([*module.parameters(), *module.buffers()]).values()))
            del step
    except MeasureError:
        raise
    except torch.OutOfMemoryError as error:
        raise MeasureError(f"one block {call.key} does not fit on {meter.name}: {str(error).splitlines()[0]}") from None
    except (RuntimeError, TypeError, ValueError) as error:
        raise MeasureError(f"block {call.key} does not run by itself: {type(error).__name__}: {error}") from error
    finally:
        meter.release()
    return found


def _memory(step: _Step, meter: DeviceMeter) -> dict[str, float]:
    forward = meter.usage(step.forward)
    outputs = step.output_bytes()
    step.prepare()
    backward = meter.usage(step.backward)
    step.clear()
    saved = forward.left - outputs
    return {
        "saved_bytes": float(saved),
        "output_bytes": float(outputs),
        "forward_peak_bytes": float(forward.peak),
        "backward_peak_bytes": float(backward.peak),
        "gradient_bytes": float(backward.left + saved + outputs),
    }


def _times(step: _Step, meter: DeviceMeter, repeats: int) -> dict[str, float]:
    forward, backward = [], []
    for _ in range(repeats):
        start = meter.mark()
        step.forward()
        forward.append((start, meter.mark()))
        step.prepare()
        start = meter.mark()
        step.backward()
        backward.append((start, meter.mark()))
        step.clear()
    kernels = {"forward_kernels": float(meter.kernels(step.forward))}
    step.prepare()
    kernels["backward_kernels"] = float(meter.kernels(step.backward))
    step.clear()
    return {
        "forward_seconds": statistics.median(meter.between(a, b) for a, b in forward),
        "backward_seconds": statistics.median(meter.between(a, b) for a, b in backward),
        **kernels,
    }


# The probe -----------------------------------------------------------------------------------------------------------


def target_of(meter: DeviceMeter, workload: Workload) -> Target:
    """What a trace for the meter's device is made for."""
    if meter.device.type == "cpu":
        return Target("cpu")
    return Target("cuda", torch.cuda.get_device_capability(meter.device), workload.attention)


def measure(workload: Workload, *, device: str = "cuda", repeats: int = 5) -> Profile:
    """The traced profile with `Profile.measured` filled in: by kind of block what `measure_block` returns, and under
    `DEVICE_KEY` the device's rates (`measure_rates`, and on CUDA the link to the host both ways).

    Args:
        repeats: timed runs of each block; the median counts.

    Raises:
        MeasureError: no such device; a quantised base; a block that does not fit or does not run by itself.
        TraceError, WorkloadError: see `traced.trace`.
    """
    if repeats < 1:
        raise MeasureError(f"repeats must be at least 1, not {repeats}")
    meter = meter_for(device)
    if workload.compiles:
        raise MeasureError(
            "--compile regional cannot be probed: blocks are measured as they are, uncompiled; --compile none can"
        )
    if workload.precision in quantized.table():
        raise MeasureError(
            f"--precision {workload.precision} cannot be measured: its kernels come from a package of their own"
        )
    target = target_of(meter, workload)
    profile = traced.trace(workload, target)
    calls = block_calls(workload, target)
    known: dict[tuple[object, ...], Mapping[str, float]] = {}
    found: dict[str, Mapping[str, float]] = {DEVICE_KEY: {**measure_rates(meter.device), **meter.link_rates()}}
    for call in calls:
        signature = call.signature()
        if signature not in known:
            known[signature] = measure_block(call, meter, workload, repeats)
        found[call.key] = known[signature]
    note = f"{len(known)} kinds of block measured on {meter.name}, {_plural(repeats, 'run')} each"
    return dataclasses.replace(profile, source="measured", measured=found, notes=(*profile.notes, note))


def _plural(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


def blocks_measured(profile: Profile) -> Sequence[str]:
    """Keys of the kinds of block in a measured profile."""
    return [key for key in profile.measured if key != DEVICE_KEY]
