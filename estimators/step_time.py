"""Step time: a roofline for each kernel, the host's launch rate beside it, recomputation and host copies on top.

Seconds everywhere. GPU time is the sum over kernels of max(work / rate, bytes / bandwidth) + a fixed tail; host time is
what eager PyTorch needs to issue them, plus what checkpoint hooks cost in Python. A step takes the larger of the two, blended
where they are close. The few rates are physical and shared by all models; `data/step_time.json` holds them with their source.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from estimators.devices import Device
from estimators.memory import Memory
from probes import resources
from probes.profile import Profile
from probes.tape import ATTENTION, ATTENTION_BACKWARD, CONVOLUTION, GEMM, Floats


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
    blend: float
    """Exponent of the norm that joins GPU and host time; large: a hard maximum."""


@cache
def default_rates() -> Rates:
    """The calibrated rates."""
    return Rates(**json.loads(resources.text("step_time.json"))["rates"])


@dataclass(frozen=True)
class StepTime:
    """Seconds."""

    total: float
    gpu: float
    host: float
    recompute: float
    """GPU time of recomputation, contained in `gpu`."""
    copies: float
    """Time of host copies, added to the total: the runtime waits for them."""

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


class Clock:
    """A profile's kernels timed on one device; prepared once, used for many schedules."""

    def __init__(self, profile: Profile, device: Device, rates: Rates | None = None) -> None:
        r = rates or default_rates()
        if rates is None and (seen := profile.measured.get(MEASURED_DEVICE)) is not None:
            device, r = _with_measured(device, r, seen)
        self.rates, self.device, self.profile = r, device, profile
        tape = profile.tape
        half = profile.workload.precision != "fp32"
        compute = (device.bf16_flops or device.fp16_flops or device.fp32_flops) if half else device.fp32_flops
        self.available = compute is not None and device.memory_bytes_per_second is not None
        if not self.available:
            return
        assert compute is not None
        assert device.memory_bytes_per_second is not None
        shares = {
            GEMM: r.gemm,
            CONVOLUTION: r.convolution,
            ATTENTION: r.attention,
            ATTENTION_BACKWARD: r.attention_backward,
        }
        share = np.ones(len(tape.op_kind))
        for kind, value in shares.items():
            share[tape.op_kind == kind] = value
        attention = (tape.op_kind == ATTENTION) | (tape.op_kind == ATTENTION_BACKWARD)
        share[attention] *= tape.op_head[attention] / (tape.op_head[attention] + r.softmax_width)
        if device.architecture == "Hopper":
            share[attention] *= r.legacy_mma_on_hopper
        cached = (
            np.clip(1 - tape.op_bytes / (2 * device.l2_bytes), 0, 1) if device.l2_bytes else np.zeros(len(tape.op_kind))
        )
        slowness = 1 - cached * (1 - 1 / r.cache_speedup)
        bandwidth = device.memory_bytes_per_second * r.memory / slowness
        kernel: Floats = (
            np.maximum(tape.op_flops / (compute * share), tape.op_bytes / bandwidth) + r.kernel_tail_seconds
        )
        self._cumulative = np.concatenate([[0.0], np.cumsum(kernel)])
        self._op_at = tape.op_at
        self._forward_ops = int(np.searchsorted(tape.op_at, tape.backward_start))

    def _between(self, start: int, end: int) -> tuple[float, int]:
        lo, hi = (int(i) for i in np.searchsorted(self._op_at, (start, end)))
        return float(self._cumulative[hi] - self._cumulative[lo]), hi - lo

    def step(self, memory: Memory, *, copies_out_overlap: bool = False) -> StepTime | None:
        """Time of one step under the schedule that `memory` was simulated for. None: the device's rates are not known.

        Args:
            copies_out_overlap: device-to-host copies run beside the computation (a stream of their own); copies back are
                always waited for.
        """
        if not self.available:
            return None
        tape, r = self.profile.tape, self.rates
        gpu, kernels = float(self._cumulative[-1]), len(self._op_at)
        recompute, hooks, again = 0.0, 0, 0
        for span in memory.recomputed:
            for start, end in span.ranges:
                seconds, count = self._between(start, max(start, min(end, span.stop + 1)))
                recompute += seconds
                again += count
                lo, hi = np.searchsorted(tape.saved_at, (start, end))
                hooks += 3 * int(hi - lo)
        elements = self.profile.trained_elements
        assert self.device.memory_bytes_per_second is not None
        optimizer = 28.0 * elements / (self.device.memory_bytes_per_second * r.memory)
        gpu += recompute + optimizer
        host = (kernels + again) * r.launch_seconds + hooks * r.hook_seconds + memory.copied_tensors * r.copy_seconds
        copies = 0.0
        if memory.to_host or memory.from_host:
            down, up = self.device.device_to_host_bytes_per_second, self.device.host_to_device_bytes_per_second
            link = self.device.memory_bytes_per_second
            out = memory.to_host / (down or link)
            copies = memory.from_host / (up or link) + out * (r.exposed_copy_out if copies_out_overlap else 1.0)
        if self.profile.host_weight_bytes:
            # every pass over the weights streams them in, one layer ahead of the computation
            passes = 2 + (recompute / self._cumulative[self._forward_ops] if self._forward_ops else 0.0)
            up = self.device.host_to_device_bytes_per_second or self.device.memory_bytes_per_second
            gpu = max(gpu, passes * self.profile.host_weight_bytes / up)
        joined = (gpu**r.blend + host**r.blend) ** (1 / r.blend)
        return StepTime(joined + copies, gpu, host, recompute, copies)


def rates_from(values: Mapping[str, float]) -> Rates:
    """Rates with some values replaced, for calibration."""
    base = json.loads(resources.text("step_time.json"))["rates"]
    return Rates(**{**base, **values})
