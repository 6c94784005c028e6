"""Step time: a roofline for each kernel, the host's launch rate beside it, recomputation and host copies on top.

Seconds everywhere. GPU time is the sum over kernels of max(work / rate, bytes / bandwidth) + a fixed tail; host time is
what eager PyTorch needs to issue them, plus what checkpoint hooks cost in Python. A step takes the larger of the two, blended
where they are close. The few rates are physical and shared by all models; `data/calibration.json` holds them with their source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from estimators import calibration
from estimators.devices import Device
from estimators.memory import Memory
from probes.profile import Profile
from probes.tape import ATTENTION, ATTENTION_BACKWARD, CONVOLUTION, GEMM, MEMORY, REDUCTION, Floats, Ints


@dataclass(frozen=True)
class Rates:
    """How much of a device's data-sheet rates real kernels reach, and what the host costs."""

    gemm: float
    """Share of the dense matrix rate."""
    convolution: float
    attention: float
    """Share of it in an attention kernel's matrix products, forward."""
    attention_backward: float
    softmax_width: float
    """Head size at which an attention kernel's exponentials take as long as its matrix products."""
    memory: float
    """Share of the memory bandwidth."""
    cache_speedup: float
    """How much faster than that traffic is that the L2 cache serves; its share falls linearly to 0 at twice the cache."""
    legacy_mma_on_hopper: float
    """Share of Hopper's dense rate that kernels written for the older matrix instructions reach (FlashAttention 2)."""
    reduction_bytes_per_second: float
    """What one multiprocessor reads: the rate of a matrix product whose result is a single tile."""
    matrix_on_ada: float
    """Share of what Hopper sustains of its matrix rate that Ada cards sustain of theirs."""
    kernel_tail_seconds: float
    """GPU time of the smallest kernel."""
    launch_seconds: float
    """Host time to issue one operator in eager PyTorch."""
    hook_seconds: float
    """Host time of one saved-tensor hook in Python (checkpoint pack, re-pack and unpack)."""
    copy_seconds: float
    """Host time around one offloaded tensor: event, stream bookkeeping, pinned buffer, both ways."""
    exposed_copy_out: float
    """Share of device-to-host copies that computation does not hide although they have a stream of their own."""
    streamed_quantised_bytes_per_second: float
    """Rate at which quantised weights come from the host, which RamTorch cannot do beside the computation."""
    blend: float
    """Exponent of the norm that joins GPU and host time; large: a hard maximum."""


def default_rates() -> Rates:
    """The calibrated rates."""
    return Rates(**calibration.current()[0].rates)


@dataclass(frozen=True)
class StepTime:
    """Seconds."""

    total: float
    gpu: float
    host: float
    recompute: float
    """GPU time of recomputation, contained in `gpu`."""
    copies: float
    """Time of host copies that computation does not hide, added to the total."""

    @property
    def launch_bound(self) -> bool:
        return self.host > self.gpu


MEASURED_DEVICE = "device"
"""Key of the device's own rates in a measured profile."""


def _with_measured(device: Device, rates: Rates, seen: Mapping[str, float]) -> tuple[Device, Rates]:
    """The device with the rates that a measured probe reached on it, which need no share taken off any more."""
    memory = seen.get("memory_bytes_per_second")
    compute = seen.get("bf16_flops")
    changed = dataclasses.replace(
        device,
        bf16_flops=compute / rates.gemm if compute else device.bf16_flops,
        memory_bytes_per_second=memory / rates.memory if memory else device.memory_bytes_per_second,
        host_to_device_bytes_per_second=seen.get("host_to_device_bytes_per_second")
        or device.host_to_device_bytes_per_second,
        device_to_host_bytes_per_second=seen.get("device_to_host_bytes_per_second")
        or device.device_to_host_bytes_per_second,
    )
    return changed, rates


@dataclass(frozen=True)
class Kernels:
    """Parallel arrays, as on the tape."""

    kind: NDArray[np.int8]
    flops: Floats
    bytes: Floats
    head: Ints

    def seconds(self, device: Device, r: Rates, compute: float) -> Floats:
        """GPU time of each kernel. `compute`: FLOP/s of the device at the kernels' precision."""
        shares = {
            GEMM: r.gemm,
            REDUCTION: r.gemm,
            CONVOLUTION: r.convolution,
            ATTENTION: r.attention,
            ATTENTION_BACKWARD: r.attention_backward,
        }
        share = np.ones(len(self.kind))
        for kind, value in shares.items():
            share[self.kind == kind] = value
        attention = (self.kind == ATTENTION) | (self.kind == ATTENTION_BACKWARD)
        share[attention] *= self.head[attention] / (self.head[attention] + r.softmax_width)
        if device.architecture == "Hopper":
            share[attention] *= r.legacy_mma_on_hopper
        elif device.architecture == "Ada":
            share[self.kind != MEMORY] *= r.matrix_on_ada
        cached = np.clip(1 - self.bytes / (2 * device.l2_bytes), 0, 1) if device.l2_bytes else np.zeros(len(self.kind))
        slowness = 1 - cached * (1 - 1 / r.cache_speedup)
        assert device.memory_bytes_per_second is not None
        bandwidth = device.memory_bytes_per_second * r.memory / slowness
        bandwidth = np.where(self.kind == REDUCTION, np.minimum(bandwidth, r.reduction_bytes_per_second), bandwidth)
        found: Floats = np.maximum(self.flops / (compute * share), self.bytes / bandwidth) + r.kernel_tail_seconds
        return found


@dataclass(frozen=True)
class Load:
    """What a step asks of host and links, beside its kernels."""

    launches: int
    hooks: int
    copied_tensors: int
    to_host: int
    """Bytes."""
    from_host: int
    copies_out_overlap: bool
    trained_elements: int
    streamed: int
    """Bytes of weights that every pass brings in from the host beside the computation."""
    streamed_quantised: int = 0
    """Bytes of quantised weights that every pass waits for."""
    copy_groups: int = 1
    """Copies back come in so many groups."""
    copies_beside: bool = False
    """Copies in both directions run beside the computation, back one group early."""
    swapped_out: int = 0
    """Bytes of weights whose copies are waited for."""
    swapped_in: int = 0
    waits: float = 1.0
    """Share of the copies in that cannot run beside the computation."""
    swapped_share: float = 0.0
    """Of the computation that the swapped blocks do, beside which the others run."""

    def joined(self, once: float, recompute: float, forward: float, device: Device, r: Rates) -> StepTime:
        """The step's time from the GPU time of its kernels, all run `once`, and of what runs again.

        Args:
            forward: GPU time of the forward pass alone, seconds like the others.
        """
        assert device.memory_bytes_per_second is not None
        gpu = once + recompute + 28.0 * self.trained_elements / (device.memory_bytes_per_second * r.memory)
        host = self.launches * r.launch_seconds + self.hooks * r.hook_seconds + self.copied_tensors * r.copy_seconds
        copies = out = back = 0.0
        link = device.memory_bytes_per_second
        up = device.host_to_device_bytes_per_second or link
        if self.to_host or self.from_host:
            out = self.to_host / (device.device_to_host_bytes_per_second or link)
            back = self.from_host / up
            copies = back + out * (r.exposed_copy_out if self.copies_out_overlap else 1.0)
        passes = 2 + (recompute / forward if forward else 0.0)  # over the weights
        if self.streamed:  # one layer ahead of the computation
            gpu = max(gpu, passes * self.streamed / up)
        total = (gpu**r.blend + host**r.blend) ** (1 / r.blend)
        if self.copies_beside and copies:
            # waited for: the first group of backward, and what the link cannot move while forward and backward compute
            hidden = total * forward / gpu
            copies = max(0.0, out - hidden) + max(back - (total - hidden), back / self.copy_groups)
        copies += passes * self.streamed_quantised / r.streamed_quantised_bytes_per_second
        swapped = self.swapped_in / up
        copies += max(swapped * self.waits, swapped - (1 - self.waits) * self.swapped_share * total)
        copies += self.swapped_out / (device.device_to_host_bytes_per_second or link)
        return StepTime(total + copies, gpu, host, recompute, copies)


@dataclass(frozen=True)
class Work:
    """One schedule's step without the rates: timed again and again while they are fitted."""

    device: Device
    compute: float
    kernels: Kernels
    """Each distinct kernel once."""
    counts: Floats
    """How often it runs, recomputation left out; then recomputed; then in the forward pass."""
    again: Floats
    forward: Floats
    load: Load

    def step(self, rates: Rates) -> StepTime:
        """The step's time at these rates."""
        seconds = self.kernels.seconds(self.device, rates, self.compute)
        once, again, forward = (float(seconds @ n) for n in (self.counts, self.again, self.forward))
        return self.load.joined(once, again, forward, self.device, rates)


class Clock:
    """A profile's kernels timed on one device; prepared once, used for many schedules."""

    def __init__(self, profile: Profile, device: Device, rates: Rates | None = None) -> None:
        r = rates or default_rates()
        if rates is None and (seen := profile.measured.get(MEASURED_DEVICE)) is not None:
            device, r = _with_measured(device, r, seen)
        self.rates, self.device, self.profile = r, device, profile
        tape = profile.tape
        half = profile.workload.precision != "fp32"
        first, second = device.bf16_flops, device.fp16_flops
        if profile.workload.precision == "fp16":
            first, second = second, first
        compute = (first or second or device.fp32_flops) if half else device.fp32_flops
        self.available = compute is not None and device.memory_bytes_per_second is not None
        if not self.available:
            return
        assert compute is not None
        self._compute = compute
        kernels = Kernels(tape.op_kind, tape.op_flops, tape.op_bytes, tape.op_head)
        self._cumulative = np.concatenate([[0.0], np.cumsum(kernels.seconds(device, r, compute))])
        self._op_at = tape.op_at
        self._forward_ops = int(np.searchsorted(tape.op_at, tape.backward_start))

    def _again(self, memory: Memory) -> tuple[list[tuple[int, int]], int]:
        """Ranges of kernels that run again, and saved tensors packed meanwhile."""
        tape = self.profile.tape
        bounds = np.array(
            [
                (start, max(start, min(end, span.stop + 1)), end)
                for span in memory.recomputed
                for start, end in span.ranges
            ],
            np.int64,
        ).reshape(-1, 3)
        low, high = np.searchsorted(self._op_at, bounds[:, 0]), np.searchsorted(self._op_at, bounds[:, 1])
        ranges = list(zip(low.tolist(), high.tolist(), strict=True))
        saved = int((np.searchsorted(tape.saved_at, bounds[:, 2]) - np.searchsorted(tape.saved_at, bounds[:, 0])).sum())
        return ranges, saved

    def _load(
        self, memory: Memory, again: int, saved: int, copies_out_overlap: bool, copies_beside: bool = False
    ) -> Load:
        return Load(
            launches=len(self._op_at) + again,
            hooks=3 * saved,
            copied_tensors=memory.copied_tensors,
            to_host=memory.to_host,
            from_host=memory.from_host,
            copies_out_overlap=copies_out_overlap,
            trained_elements=self.profile.trained_elements,
            copy_groups=memory.copy_groups,
            copies_beside=copies_beside,
            streamed=self.profile.host_weight_bytes - self.profile.host_quantized_bytes,
            streamed_quantised=self.profile.host_quantized_bytes,
            swapped_out=memory.weights_to_host,
            swapped_in=memory.weights_from_host,
            waits=memory.waits,
            swapped_share=self._share(memory.swapped_calls),
        )

    def _share(self, calls: Sequence[tuple[int, int]]) -> float:
        """Share of the forward pass's GPU time that lies in some calls."""
        forward = self._cumulative[self._forward_ops]
        inside = np.searchsorted(self._op_at, np.array(calls, np.int64).reshape(-1, 2))
        seconds = float((self._cumulative[inside[:, 1]] - self._cumulative[inside[:, 0]]).sum())
        return seconds / float(forward) if forward else 0.0

    def step(self, memory: Memory, *, copies_out_overlap: bool = False, copies_beside: bool = False) -> StepTime | None:
        """Time of one step under the schedule that `memory` was simulated for. None: the device's rates are not known.

        Args:
            copies_out_overlap: device-to-host copies run beside the computation (a stream of their own); copies back are
                always waited for.
            copies_beside: copies in both directions run beside the computation, back one group early: only the first group and
                what the link cannot move during forward and backward is waited for.
        """
        if not self.available:
            return None
        ranges, saved = self._again(memory)
        recompute = sum(float(self._cumulative[hi] - self._cumulative[lo]) for lo, hi in ranges)
        load = self._load(memory, sum(hi - lo for lo, hi in ranges), saved, copies_out_overlap, copies_beside)
        once, forward = float(self._cumulative[-1]), float(self._cumulative[self._forward_ops])
        return load.joined(once, recompute, forward, self.device, self.rates)

    def work(self, memory: Memory, *, copies_out_overlap: bool = False) -> Work | None:
        """The same step with its rates left open."""
        if not self.available:
            return None
        tape = self.profile.tape
        rows = np.stack(
            [tape.op_kind.astype(np.float64), tape.op_flops, tape.op_bytes, tape.op_head.astype(np.float64)]
        )
        distinct, which = np.unique(rows, axis=1, return_inverse=True)
        which = which.reshape(-1)
        size = distinct.shape[1]
        ranges, saved = self._again(memory)
        again: Floats = np.zeros(size)
        for lo, hi in ranges:
            again += np.bincount(which[lo:hi], minlength=size)
        return Work(
            device=self.device,
            compute=self._compute,
            kernels=Kernels(distinct[0].astype(np.int8), distinct[1], distinct[2], distinct[3].astype(np.int64)),
            counts=np.bincount(which, minlength=size).astype(np.float64),
            again=again,
            forward=np.bincount(which[: self._forward_ops], minlength=size).astype(np.float64),
            load=self._load(memory, sum(hi - lo for lo, hi in ranges), saved, copies_out_overlap),
        )


def rates_from(values: Mapping[str, float]) -> Rates:
    """Rates with some values replaced, for calibration."""
    return Rates(**{**calibration.packaged().rates, **values})
