"""`advise verify`: a short real training run of a plan, predicted against measured.

On a CUDA device the planned job itself runs. Without one a reduced copy of the model (same class, fewer and narrower blocks, a
smaller shape, float32) runs on the CPU under the same schedule, and what is compared is the prediction *for that copy on the CPU*,
made by the same estimator. Either way the real class, a real LoRA and a real optimizer train with the bundled runtime.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from advisor.per_block import check, for_copy
from advisor.pretrained import load_state, pretrained_config
from advisor.runtime import apply, compile_blocks
from estimators import devices
from estimators.calibration import Band, Bands
from estimators.devices import Device
from estimators.estimate import GIB, Estimate, Estimator, Semantics
from estimators.schedule import Schedule
from estimators.step_time import Clock, rates_from
from estimators.swapping import managed_blocks
from probes import store
from probes.build import Job, device_job, real_job
from probes.cpu_memory import profiled_peak, resident_bytes
from probes.profile import Profile
from probes.step import gradient_pass, make_optimizer, runs_as_named, train_step
from probes.target import Target
from probes.traced import trace
from probes.workload import Workload, reduced_copy

CPU_MEMORY_BAND = 0.02
"""On a CPU every allocation can be counted, so the prediction has to be this close."""
COMPILED_CPU_MEMORY_BAND = 0.05
"""The same of compiled blocks, where it is assumed which operators share a kernel."""
WARM_UP = 2
SEED = 1234
"""Of dropout, where two runs are compared."""


class Verifiable(Protocol):
    """What verification needs of a plan."""

    @property
    def workload(self) -> Workload: ...
    @property
    def schedule(self) -> Schedule: ...


@dataclass(frozen=True)
class Receipt:
    """The record of a verifying run. Bytes and seconds."""

    workload: Workload
    """What ran; `reduced` says that it is the small copy."""
    schedule: Schedule
    device: str
    steps: int
    predicted: Mapping[str, float | None]
    """peak, peak_low, peak_high, reserved, host, step_seconds, step_seconds_low, step_seconds_high."""
    measured: Mapping[str, float | None]
    """peak, reserved, step_seconds (median)."""
    exact: bool | None
    """Loss and every gradient bit-equal to a run without the schedule. None: not checked (it needs a second run in memory)."""
    losses: tuple[float, ...]
    counters: Mapping[str, int]
    notes: tuple[str, ...]
    versions: Mapping[str, str]
    made: str
    """UTC."""
    host: Mapping[str, str] = field(default_factory=dict)

    def _inside(self, name: str) -> bool | None:
        low, high, value = (
            self.predicted.get(f"{name}_low"),
            self.predicted.get(f"{name}_high"),
            self.measured.get(name),
        )
        if low is None or high is None or value is None:
            return None
        return low <= value <= high

    @property
    def memory_within(self) -> bool:
        return self._inside("peak") is not False

    @property
    def time_within(self) -> bool:
        return self._inside("step_seconds") is not False

    @property
    def within_band(self) -> bool:
        """Peak and step time inside their bands, and the numbers unchanged by the schedule."""
        return self.memory_within and self.time_within and self.exact is not False

    def to_json(self) -> dict[str, Any]:
        return {
            "receipt_format": 1,
            "workload": self.workload.describe(),
            "reduced_copy": self.workload.reduced,
            "schedule": self.schedule.name,
            "controls": None if self.schedule.actions is not None else self.schedule.to_controls(),
            **({} if self.schedule.actions is None else {"actions": [str(a) for a in self.schedule.actions]}),
            "device": self.device,
            "steps": self.steps,
            "predicted": _in_gib(self.predicted),
            "measured": _in_gib(self.measured),
            "within_band": self.within_band,
            "memory_within_band": self.memory_within,
            "time_within_band": self.time_within,
            "exact": self.exact,
            "losses": list(self.losses),
            "counters": dict(self.counters),
            "notes": list(self.notes),
            "versions": dict(self.versions),
            "host": dict(self.host),
            "made": self.made,
        }

    def lines(self) -> list[str]:
        """For people."""
        unit, scale = ("MiB", 2**20) if (self.measured["peak"] or 0) < GIB else ("GiB", GIB)

        def size(value: float | None) -> str:
            return "-" if value is None else f"{value / scale:.2f}"

        def seconds(value: float | None) -> str:
            return "-" if value is None else f"{value:.4g}"

        p, m = self.predicted, self.measured
        w = self.workload
        out = [
            f"{w.model} {w.variant}, {w.resolution}"
            + (f" x {w.frames} frames" if w.frames > 1 else "")
            + f", batch {w.batch}, {self.schedule.name}, {self.steps} timed steps on {self.device}"
        ]
        out += [f"note: {note}" for note in self.notes]
        peak, peak_measured = p["peak"], m["peak"]
        if peak and peak_measured:
            verdict = "inside" if self.memory_within else "OUTSIDE"
            out.append(
                f"peak allocated  predicted {size(peak)} {unit} (band {size(p['peak_low'])} to {size(p['peak_high'])})  "
                f"measured {size(peak_measured)} {unit}  {peak / peak_measured - 1:+.2%}  {verdict}"
            )
        if p.get("reserved") and m.get("reserved"):
            out.append(f"reserved        predicted {size(p['reserved'])} {unit}  measured {size(m['reserved'])} {unit}")
        step, step_measured = p["step_seconds"], m["step_seconds"]
        if step and step_measured:
            band, verdict = "", "not judged on a CPU"
            if p["step_seconds_low"] is not None:
                band = f" (band {seconds(p['step_seconds_low'])} to {seconds(p['step_seconds_high'])})"
                verdict = "inside" if self.time_within else "OUTSIDE"
            out.append(
                f"step time       predicted {seconds(step)} s{band}  measured {seconds(step_measured)} s  "
                f"{step / step_measured - 1:+.0%}  {verdict}"
            )
        elif step_measured:
            out.append(f"step time       not predicted here  measured {seconds(step_measured)} s")
        if self.exact is not None:
            out.append(
                "numbers         loss and every gradient are bit-equal to a run without the schedule"
                if self.exact
                else "numbers         DIFFER from a run without the schedule"
            )
        return out

    def save(self, path: Path) -> None:
        """Writes the receipt as JSON, whole or not at all.

        Raises:
            OSError: the file cannot be written.
        """
        store.atomic_write(path, (json.dumps(self.to_json(), indent=2) + "\n").encode())


def _in_gib(values: Mapping[str, float | None]) -> dict[str, float | None]:
    out: dict[str, float | None] = {}
    for name, value in values.items():
        if name.startswith("step_seconds"):
            out[name] = value
        else:
            out[f"{name}_gib"] = None if value is None else round(value / GIB, 6)
    return out


def verify(
    plan: Verifiable,
    *,
    steps: int = 8,
    pretrained: str | None = None,
    device: str = "auto",
    progress: Callable[[str], None] | None = None,
) -> Receipt:
    """Trains for a few steps and compares.

    Args:
        steps: timed steps, after two to warm up.
        pretrained: a diffusers model folder or Hugging Face id whose weights are trained; None: random weights.
        device: auto, cpu or cuda.
        progress: told what is happening, one line at a time.

    Raises:
        WorkloadError: the request cannot be run here; the message says what would work.
        RuntimeRefused: the runtime cannot execute the schedule.
    """
    say = progress or (lambda _: None)
    check(plan)
    use_cuda = torch.cuda.is_available() if device == "auto" else device == "cuda"
    config = None if pretrained is None else pretrained_config(pretrained, plan.workload)
    planned, notes = plan.workload, []
    if planned.streamed_percent:
        notes.append(
            f"--weights-offload {planned.weights_offload}: this runtime keeps the weights on the device, and so does the prediction "
            "that the run is compared with"
        )
        planned = dataclasses.replace(planned, weights_offload="none")
    if use_cuda:
        workload = dataclasses.replace(
            planned, config_json=config or "", resident_gib=0.0, keep_resident=()
        )  # nothing else is loaded
        found = _verify_cuda(workload, plan.schedule, steps, pretrained, say)
    else:
        workload = dataclasses.replace(reduced_copy(planned), config_json=config or "")
        found = _verify_cpu(workload, plan.schedule, steps, pretrained, say)
    return dataclasses.replace(found, notes=(*found.notes, *notes))


def _copy(workload: Workload) -> str:
    if workload.family.reduced.config:
        return f"a reduced copy of {workload.model} (fewer and narrower blocks"
    return f"a reduced copy of {workload.model} (the whole model at a smaller shape"


def _verify_cpu(
    workload: Workload, schedule: Schedule, steps: int, pretrained: str | None, say: Callable[[str], None]
) -> Receipt:
    if pretrained is None:
        notes = [
            f"no CUDA device: {_copy(workload)}, {workload.resolution}, float32) runs on the CPU; predicted and measured both "
            "are for that copy"
        ]
    else:
        notes = [f"no CUDA device: the given weights run on the CPU at {workload.resolution}, float32"]
    say("tracing")
    profile = trace(workload, Target("cpu"))
    schedule, more = for_copy(schedule, profile.structure)
    notes += more
    say("measuring this CPU")
    machine, clock = cpu_clock(profile)
    width = COMPILED_CPU_MEMORY_BAND if workload.compiles else CPU_MEMORY_BAND
    bands = Bands(Band.symmetric(width), Band.symmetric(width), "this run")
    estimate = Estimator(profile, machine, Semantics(), bands=bands, clock=clock).estimate(schedule)
    # milliseconds of dispatch on whatever else the machine does: shown, but no verdict
    estimate = dataclasses.replace(estimate, step_seconds_low=None, step_seconds_high=None)
    say("building the model")
    state = None if pretrained is None else load_state(pretrained, workload)
    job = real_job(workload, state=state)
    if workload.compiles:
        say("compiling the blocks (the first steps take long)")
        compile_blocks(job.model, profile.structure, "cpu")
    parameters = [p for _, p in job.trainable()]
    optimizer = make_optimizer(workload.optimizer, parameters)
    say("checking the numbers against a run without a schedule")
    reference = _loss_and_gradients(job, parameters, workload.accumulate)
    with apply(job.model, schedule, structure=profile.structure, swap_blocks=workload.swapped_blocks) as handle:
        scheduled = _loss_and_gradients(job, parameters, workload.accumulate)
        exact = _equal(reference, scheduled)
        del reference, scheduled
        losses = [float(train_step(job, optimizer, workload.accumulate)) for _ in range(WARM_UP)]
        say("measuring memory")
        peak = profiled_peak(
            lambda: train_step(job, optimizer, workload.accumulate), resident_bytes(job, optimizer)
        ).peak
        seconds = []
        for i in range(steps):
            say(f"step {i + 1} of {steps}")
            start = time.perf_counter()
            losses.append(float(train_step(job, optimizer, workload.accumulate)))
            seconds.append(time.perf_counter() - start)
        counters = dataclasses.asdict(handle.counters)
        notes += handle.notes
    measured = {"peak": float(peak), "reserved": None, "step_seconds": statistics.median(seconds) / workload.accumulate}
    return _receipt(
        workload,
        schedule,
        f"CPU ({platform.processor() or platform.machine()})",
        steps,
        estimate,
        measured,
        exact,
        losses,
        counters,
        notes,
    )


def _verify_cuda(
    workload: Workload, schedule: Schedule, steps: int, pretrained: str | None, say: Callable[[str], None]
) -> Receipt:
    notes: list[str] = []
    if workload.ema:
        notes.append("the run keeps no running average, and the prediction that it is compared with counts none")
    workload = dataclasses.replace(workload, ema=False, accumulate=min(workload.accumulate, 2))  # more need no more
    properties = torch.cuda.get_device_properties(0)
    gpu = devices.detected_gpu(properties.name, properties.total_memory, (properties.major, properties.minor))
    say("tracing")
    profile = trace(workload, Target("cuda", (properties.major, properties.minor), workload.attention))
    estimate = Estimator(profile, gpu, Semantics()).estimate(schedule)
    if not runs_as_named(workload.optimizer):
        workload = dataclasses.replace(workload, optimizer="adamw")
        estimate = Estimator(dataclasses.replace(profile, workload=workload), gpu, Semantics()).estimate(schedule)
        notes.append("the run uses torch.optim.AdamW, and so does the prediction that it is compared with")
    say("building the model")
    state = None if pretrained is None else load_state(pretrained, workload)
    waiting = managed_blocks(profile.structure, workload.swapped_blocks)
    job = device_job(workload, "cuda", state=state, host_blocks=waiting)
    if workload.compiles:
        say("compiling the blocks (the first steps take long)")
        compile_blocks(job.model, profile.structure, "cuda")
    parameters = [p for _, p in job.trainable()]
    optimizer = make_optimizer(workload.optimizer, parameters)
    with apply(job.model, schedule, structure=profile.structure, swap_blocks=workload.swapped_blocks) as handle:
        losses = [float(train_step(job, optimizer, workload.accumulate)) for _ in range(WARM_UP)]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        seconds = []
        for i in range(steps):
            say(f"step {i + 1} of {steps}")
            start = time.perf_counter()
            losses.append(float(train_step(job, optimizer, workload.accumulate)))
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        counters = dataclasses.asdict(handle.counters)
        notes += handle.notes
    measured = {
        "peak": float(torch.cuda.max_memory_allocated()),
        "reserved": float(torch.cuda.max_memory_reserved()),
        "step_seconds": statistics.median(seconds) / workload.accumulate,
    }
    return _receipt(workload, schedule, gpu.name, steps, estimate, measured, None, losses, counters, notes)


@dataclass(frozen=True)
class Comparison:
    """One schedule of a CPU run, predicted against the profiler."""

    schedule: Schedule
    predicted: int
    """Peak allocated bytes."""
    measured: int
    exact: bool
    """Loss and every gradient bit-equal to the run without a schedule."""
    recomputed: int
    """Checkpoint units that ran again."""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def compare_on_cpu(workload: Workload, schedules: Callable[[Profile], Sequence[Schedule]]) -> list[Comparison]:
    """Runs a (reduced) workload on the CPU under many schedules with one model.

    Args:
        schedules: chooses them, given the profile.
    """
    profile = trace(workload, Target("cpu"))
    estimator = Estimator(profile, devices.cpu_device(), Semantics())
    job = real_job(workload)
    if workload.compiles:
        compile_blocks(job.model, profile.structure, "cpu")
    parameters = [p for _, p in job.trainable()]
    optimizer = make_optimizer(workload.optimizer, parameters)
    train_step(job, optimizer, workload.accumulate)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    resident = resident_bytes(job, optimizer)
    reference = _loss_and_gradients(job, parameters, workload.accumulate)
    found = []
    gradients: list[torch.Tensor | None] = []
    losses: list[torch.Tensor] = []

    def step() -> None:
        torch.manual_seed(SEED)
        losses.append(train_step(job, optimizer, workload.accumulate))

    # the step drops its gradients at its very end, so holding them here does not change its peak
    keeping = optimizer.register_step_pre_hook(lambda *_: gradients.extend(p.grad for p in parameters))
    for schedule in schedules(profile):
        with apply(job.model, schedule, structure=profile.structure, swap_blocks=workload.swapped_blocks) as handle:
            peak = profiled_peak(step, resident).peak
            recomputed = handle.counters.units_recomputed
        exact = _equal(reference, (losses[0], gradients))
        found.append(Comparison(schedule, estimator.estimate(schedule).peak, peak, exact, recomputed))
        gradients.clear()
        losses.clear()
    keeping.remove()
    return found


def cpu_clock(profile: Profile) -> tuple[Device, Clock]:
    """This machine's CPU as a device, with rates measured now, and a clock over the profile's kernels."""
    from probes.measured import measure_rates

    rates = measure_rates("cpu")
    machine = devices.cpu_device(
        bf16_flops=rates.get("bf16_flops"),
        fp32_flops=rates.get("fp32_flops"),
        memory_bytes_per_second=rates.get("memory_bytes_per_second"),
    )
    measured = rates_from(
        {
            "gemm": 1.0,
            "convolution": 1.0,
            "attention": 0.5,
            "memory": 1.0,
            "cache_speedup": 1.0,
            "kernel_tail_seconds": 0.0,
            "launch_seconds": rates["launch_seconds"],
            "blend": 1.0,
        }
    )
    return machine, Clock(profile, machine, measured)


Gradients = tuple[torch.Tensor, list[torch.Tensor | None]]


def _loss_and_gradients(job: Job, parameters: list[torch.nn.Parameter], accumulate: int) -> Gradients:
    torch.manual_seed(SEED)
    loss = gradient_pass(job, accumulate)
    gradients = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    return loss, gradients


def _equal(a: Gradients, b: Gradients) -> bool:
    pairs = zip(a[1], b[1], strict=True)
    return torch.equal(a[0], b[0]) and all(
        (x is None and y is None) or (x is not None and y is not None and torch.equal(x, y)) for x, y in pairs
    )


def _receipt(
    workload: Workload,
    schedule: Schedule,
    device: str,
    steps: int,
    estimate: Estimate,
    measured: Mapping[str, float | None],
    exact: bool | None,
    losses: list[float],
    counters: Mapping[str, int],
    notes: list[str],
) -> Receipt:
    predicted: dict[str, float | None] = {
        "peak": float(estimate.peak),
        "peak_low": float(estimate.peak_low),
        "peak_high": float(estimate.peak_high),
        "reserved": float(estimate.reserved),
        "host": float(estimate.host),
        "step_seconds": estimate.step_seconds,
        "step_seconds_low": estimate.step_seconds_low,
        "step_seconds_high": estimate.step_seconds_high,
    }
    return Receipt(
        workload=workload,
        schedule=schedule,
        device=device,
        steps=steps,
        predicted=predicted,
        measured=measured,
        exact=exact,
        losses=tuple(losses),
        counters=counters,
        notes=tuple(dict.fromkeys([*workload.family.notes, *notes, *estimate.notes])),
        versions={**store.versions(), "python": platform.python_version()},
        made=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        host={"system": platform.platform(), "threads": str(torch.get_num_threads())},
    )
