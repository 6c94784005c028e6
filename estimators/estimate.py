"""Profile + schedule + device -> estimate. The one place where memory, allocator, step time and bands come together."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from estimators import allocator, calibration, optimizers
from estimators.calibration import Bands, bands_for, job_kind
from estimators.devices import Device, DeviceKind
from estimators.memory import Memory, Replay, Resident, exact
from estimators.schedule import IntervalForm, Offloading, Resolution, Schedule, resolve
from estimators.step_time import Clock, StepTime
from estimators.swapping import Swap, Swapping, managed_blocks, moved_weights, sizes_left
from probes.profile import FORWARD, TRAINED, Profile

GIB = 2**30


RETRIES = "fits only because the allocator gives cached memory back and tries again, which costs time"


@dataclass(frozen=True)
class Semantics:
    """What the controls mean to an executor and a family."""

    interval_form: IntervalForm = IntervalForm.SEGMENTS
    interval_selects_ffn: bool = True
    trainer_ffn_scope: bool = False
    offloading: Offloading = Offloading.BUNDLED
    attention_from_block: bool = False
    """Attention offload takes what the block saves before its attention too."""
    copies_out_overlap: bool = False
    """Device-to-host copies run on a stream of their own."""
    swapping: Swapping = Swapping.BUNDLED
    compile_works: bool = True
    """Regional compile takes effect where it is asked for."""

    def resolve(self, schedule: Schedule, profile: Profile) -> Resolution:
        return resolve(
            schedule,
            profile.structure,
            self.interval_form,
            interval_selects_ffn=self.interval_selects_ffn,
            trainer_ffn_scope=self.trainer_ffn_scope,
            offloading=self.offloading,
            attention_from_block=self.attention_from_block,
        )


@dataclass(frozen=True)
class Estimate:
    """One schedule on one device. Bytes and seconds."""

    schedule: Schedule
    supported: bool
    reason: str | None
    """Why it is not supported."""
    peak: int = 0
    peak_low: int = 0
    peak_high: int = 0
    reserved: int = 0
    device: int = 0
    """What the driver shows: reserved plus the context."""
    host: int = 0
    step_seconds: float | None = None
    step_seconds_low: float | None = None
    step_seconds_high: float | None = None
    fits: bool = False
    fit_probability: float = 0.0
    phase: str = ""
    """Where in the step the peak is."""
    breakdown: Mapping[str, int] = field(default_factory=dict)
    recompute_seconds: float | None = None
    copy_seconds: float | None = None
    launch_bound: bool = False
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """An entry of ``schedules`` in the product's JSON contract (GiB, seconds)."""

        def gib(value: int) -> float:
            return round(value / GIB, 4)

        def seconds(value: float | None) -> float | None:
            return None if value is None else round(value, 6)

        try:
            controls: dict[str, Any] = self.schedule.to_controls()
        except ValueError:
            controls = {"actions": [str(a) for a in self.schedule.actions or ()]}
        head = {"name": self.schedule.name, "controls": controls, "supported": self.supported, "reason": self.reason}
        if not self.supported:
            empty = dict.fromkeys(
                ("peak_gib", "peak_gib_low", "peak_gib_high", "reserved_gib", "device_gib", "host_gib",
                 "step_seconds", "step_seconds_low", "step_seconds_high", "fits", "fit_probability", "breakdown")
            )  # fmt: skip
            return {**head, **empty, "notes": list(self.notes)}
        return {
            **head,
            "peak_gib": gib(self.peak),
            "peak_gib_low": gib(self.peak_low),
            "peak_gib_high": gib(self.peak_high),
            "reserved_gib": gib(self.reserved),
            "device_gib": gib(self.device),
            "host_gib": gib(self.host),
            "step_seconds": seconds(self.step_seconds),
            "step_seconds_low": seconds(self.step_seconds_low),
            "step_seconds_high": seconds(self.step_seconds_high),
            "fits": self.fits,
            "fit_probability": round(self.fit_probability, 4),
            "breakdown": {k: gib(v) for k, v in self.breakdown.items()},
            "peak_phase": self.phase,
            "recompute_seconds": seconds(self.recompute_seconds),
            "copy_seconds": seconds(self.copy_seconds),
            "launch_bound": self.launch_bound,
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Measure:
    """What a replay alone tells. Bytes and seconds."""

    peak: int
    host: int
    step_seconds: float | None


LIKELY = 0.5
"""A schedule is called a fit from this probability on."""


class Estimator:
    """Estimates many schedules of one profile on one device.

    Args:
        headroom: bytes to leave free on the device.
        host_ram: bytes that offloading may use on the host; None: not checked.
        reserved_cache: results of earlier allocator simulations, read and added to (`Simulations.reserved`).
        step_cache: those of earlier steps (`Simulations.steps`); not used with a `replay`.
        replay: of another estimator for the same tape and kind of device, whose simulations are then used again.
        kept: bytes that stay on the device beside what the profile knows; None: those that its workload says.
        kind: of job, whose bands count; None: the profile's.
    """

    def __init__(
        self,
        profile: Profile,
        device: Device,
        semantics: Semantics,
        *,
        headroom: int = 0,
        host_ram: int | None = None,
        bands: Bands | None = None,
        clock: Clock | None = None,
        reserved_cache: dict[str, Any] | None = None,
        step_cache: dict[str, Any] | None = None,
        replay: Replay | None = None,
        kept: int | None = None,
        kind: str | None = None,
    ) -> None:
        self.profile, self.device, self.semantics = profile, device, semantics
        self.headroom, self.host_ram = headroom, host_ram
        self.on_cpu = device.kind is DeviceKind.CPU
        self.kind = kind or job_kind(profile, compile_works=semantics.compile_works)
        self.card = calibration.card(device.name)
        self.bands = bands or self._bands()
        self._residual = calibration.current()[0].time_residual if clock is None and not self.on_cpu else ()
        self.counted = exact if self.on_cpu else allocator.block_bytes
        self.replay = replay or Replay(profile, self.counted, step_cache)
        self.clock = clock or Clock(profile, device)
        self.swap = self._swap()
        self.kept = profile.workload.kept_bytes if kept is None else kept
        self.resident = self._resident()
        self.reserved_cache = reserved_cache if reserved_cache is not None else {}

    def _bands(self) -> Bands:
        general = bands_for(self.kind)
        if self.card is None:
            return general
        return dataclasses.replace(
            general,
            peak_band=general.peak_band.scaled(self.card.peak_scale),
            time_band=general.time_band.scaled(self.card.time_scale),
        )

    def _swap(self) -> Swap | None:
        blocks = managed_blocks(self.profile.structure, self.profile.workload.swapped_blocks)
        return Swap(blocks, self.semantics.swapping) if blocks else None

    @property
    def weights(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(bytes, how many) of the frozen and of the trained tensors that are on the device during the whole step. On a CPU those that
        wait on the host are, too."""
        p = self.profile
        frozen, trained = list(p.base_sizes), [(n * size, count) for n, size, count in p.trained_sizes]
        if self.swap is None or self.on_cpu:
            return frozen, trained
        moved = list(moved_weights(p, self.swap))
        return (
            sizes_left(frozen, [size for size, kind in moved if kind != TRAINED]),
            sizes_left(trained, [size for size, kind in moved if kind == TRAINED]),
        )

    def _resident(self) -> Resident:
        p = self.profile

        def total(sizes: list[tuple[int, int]]) -> int:
            if not sizes:
                return 0
            counted = self.counted(np.array([s for s, _ in sizes], np.int64))
            return int((counted * np.array([n for _, n in sizes])).sum())

        frozen, trained = self.weights
        is_full = p.workload.adapter == "full"
        optimizer = p.workload.optimizer
        return Resident(
            weights=total(frozen) + (total(trained) if is_full else 0),
            adapter=0 if is_full else total(trained),
            optimizer=total(
                [*optimizers.state_sizes(optimizer, p.trained_shapes, on_cpu=self.on_cpu), *self._averages]
            ),
            inputs=total([(b, 1) for b in p.input_bytes]),
            workspace=self.device.workspace_bytes,
            optimizer_transient=0
            if p.source == FORWARD
            else optimizers.step_transient(optimizer, p.trained_shapes, on_cpu=self.on_cpu),
            device_is_host=self.on_cpu,
            gradients_held=p.workload.accumulate > 1,
            kept=self.counted(np.array([self.kept], np.int64)).item(),
            swap=self.swap,
        )

    @property
    def _averages(self) -> list[tuple[int, int]]:
        """(bytes, how many) of the running averages of what is trained."""
        p = self.profile
        return [(n * size, count) for n, size, count in p.trained_sizes] if p.workload.ema else []

    @property
    def capacity(self) -> int:
        """Bytes that the allocator may reserve."""
        return self.device.usable_bytes - self.device.context_bytes - self.headroom

    @property
    def likely_capacity(self) -> int:
        """The largest peak in bytes that is likely enough to fit, fragmentation aside."""
        return min(self.capacity, int(self.capacity * math.exp(-self.bands.peak_band.at(LIKELY))))

    def measure(self, schedule: Schedule) -> Measure:
        """Peak and step time alone: a replay, without the allocator's simulation.

        Raises:
            ScheduleError: the schedule does not suit the model's structure.
        """
        memory = self._replayed(schedule)[1]
        time = self._time(memory)
        return Measure(memory.peak, memory.host_peak, None if time is None else time.total)

    def _replayed(self, schedule: Schedule) -> tuple[Resolution, Memory]:
        """A schedule's step. Of per-block schedules a search makes hundreds: their steps are not stored."""
        resolution = self.semantics.resolve(schedule, self.profile)
        return resolution, self.replay.run(resolution, self.resident, stored=schedule.actions is None)

    def _time(self, memory: Memory) -> StepTime | None:
        beside = self.semantics.offloading is Offloading.BUNDLED and not self.on_cpu
        return self.clock.step(memory, copies_out_overlap=self.semantics.copies_out_overlap, copies_beside=beside)

    def estimate(self, schedule: Schedule, *, notes: tuple[str, ...] = ()) -> Estimate:
        """Peak, step time and fit of one schedule.

        Raises:
            ScheduleError: the schedule does not suit the model's structure.
        """
        resolution, memory = self._replayed(schedule)
        time = self._time(memory)
        reserved, fits, more = self._reserved(schedule, resolution, memory)
        kept = self.resident.kept  # as the user says: nothing about it is uncertain
        low, high = (edge + kept for edge in self.bands.peak(memory.peak - kept))
        # what the allocator reserves beyond the peak is not free for a peak that turns out higher
        probability = self.bands.fits(memory.peak - kept, self.capacity - kept - max(0, reserved - memory.peak))
        if RETRIES in more:
            probability = min(probability, 0.9)
        if not fits:
            probability = min(probability, 0.5)  # the peak alone may fit where the allocator cannot place it
        all_notes = [*notes, *resolution.notes, *more]
        if fits and probability < LIKELY:
            fits = False
            all_notes.append(
                f"the estimate is below what the card has, but measured runs of this kind of job ({self.kind}) needed more than "
                f"theirs so often that it is only {probability:.0%} likely to fit"
            )
        if self.bands.unreliable:
            all_notes.append(
                f"a rough guess: some published rows of this kind of job ({self.kind}) lie outside any useful band"
            )
        paged = optimizers.paged_bytes(self.profile.workload.optimizer, self.profile.trained_shapes)
        host = memory.host_peak + self.profile.host_weight_bytes + paged + self.swapped_host_bytes()
        if fits and self.host_ram is not None and host > self.host_ram:
            fits, probability = False, 0.0
            all_notes.append(f"needs {host / GIB:.1f} GiB of host memory, {self.host_ram / GIB:.1f} GiB given")
        return Estimate(
            schedule=schedule,
            supported=True,
            reason=None,
            peak=memory.peak,
            peak_low=low,
            peak_high=high,
            reserved=reserved,
            device=reserved + self.device.context_bytes,
            host=host,
            **self._times(time),
            fits=fits,
            fit_probability=probability,
            phase=memory.phase,
            breakdown=memory.breakdown,
            notes=tuple(dict.fromkeys(all_notes)),
        )

    def swapped_host_bytes(self) -> int:
        """What waits on the host. A trainer's copies out are new memory each time, one block's at a time."""
        return 0 if self.swap is None else sum(size for size, _ in moved_weights(self.profile, self.swap))

    def _times(self, time: StepTime | None) -> dict[str, Any]:
        if time is None:
            return {}
        total = time.total
        if self._residual:
            quantised = "quantised" in self.kind
            features = calibration.step_features(time.gpu, time.host, time.recompute, time.copies, quantised)
            moved = self._residual[0] + sum(c * f for c, f in zip(self._residual[1:], features, strict=True))
            total *= math.exp(max(-calibration.LARGEST_RESIDUAL, min(calibration.LARGEST_RESIDUAL, moved)))
        if self.card is not None:
            total *= math.exp(self.card.time_log_ratio)
        low, high = self.bands.time(total)
        return {
            "step_seconds": total,
            "step_seconds_low": low,
            "step_seconds_high": high,
            "recompute_seconds": time.recompute,
            "copy_seconds": time.copies,
            "launch_bound": time.launch_bound,
        }

    def _reserved(self, schedule: Schedule, resolution: Resolution, memory: Memory) -> tuple[int, bool, list[str]]:
        """(bytes reserved, whether the step runs within the capacity, notes)."""
        if self.on_cpu:
            return memory.peak, memory.peak <= self.capacity, []
        if memory.peak > self.capacity:
            return memory.peak, False, []
        what = schedule.name if schedule.actions is None else ",".join(schedule.actions)
        swap = "" if self.swap is None else f"{len(self.swap.blocks)} swapped "
        swap += f"{self.resident.kept} kept " if self.resident.kept else ""
        w = self.profile.workload
        beside = f"{'accumulated ' if w.accumulate > 1 else ''}{'averaged ' if w.ema else ''}"
        key = f"{what}|{self.semantics}|{swap}{beside}{w.optimizer}|{self.resident.workspace}"
        if key not in self.reserved_cache:
            self.reserved_cache[key] = self._simulate(resolution, None)[0]
        reserved = self.reserved_cache[key]
        if reserved <= self.capacity:
            return reserved, True, []
        capped_key = f"{key}|{self.capacity}"
        if capped_key not in self.reserved_cache:
            self.reserved_cache[capped_key] = list(self._simulate(resolution, self.capacity))
        capped, failed = self.reserved_cache[capped_key]
        if failed:
            note = "the allocator's fragmentation does not leave room; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True helps"
            return reserved, False, [note]
        return capped, True, [RETRIES]

    def _simulate(self, resolution: Resolution, cap: int | None) -> tuple[int, bool]:
        """(reserved peak, out of memory) of one step of the caching allocator, weights and states allocated first."""
        p = self.profile
        sizes: list[int] = []
        for size, count in itertools.chain(*self.weights):
            sizes += [size] * count
        for size, count in [*optimizers.state_sizes(p.workload.optimizer, p.trained_shapes), *self._averages]:
            sizes += [size] * count
        sizes += [*p.input_bytes, *self.device.workspaces, *filter(None, [self.resident.kept])]
        resident = np.array(sizes, np.int64)
        ids, signed = self.replay.events(resolution, self.resident)
        first = len(resident)
        all_ids = np.concatenate([np.arange(first), ids + first])
        all_sizes = np.concatenate([resident, signed])
        if self.resident.optimizer_transient:
            last = int(all_ids.max()) + 1
            all_ids = np.concatenate([all_ids, [last, last]])
            t = self.resident.optimizer_transient
            all_sizes = np.concatenate([all_sizes, [t, -t]])
        result = allocator.simulate(all_ids.astype(np.int32), all_sizes, cap_bytes=cap)
        return result.reserved_peak, result.out_of_memory
