"""The Python API: `plan(...)`, and the plan that it returns."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from advisor.phases import Phase, asked_phases
from decision_rules.ladder import Choice, Objective, choose
from decision_rules.optimum import optimum
from decision_rules.support import (
    Executor,
    as_run,
    job_candidates,
    job_check,
    job_semantics,
    smaller_weights,
    training_mode_note,
    weights_note,
    weights_refused,
)
from estimators import calibration, devices, optimizers, swapping
from estimators.devices import Device, DeviceKind
from estimators.estimate import GIB, Estimate, Estimator
from estimators.memory import Replay
from estimators.schedule import Schedule
from estimators.simulations import Simulations
from probes import collecting, outside, store
from probes.companions import Run
from probes.profile import FORWARD, Profile
from probes.structure import Structure
from probes.target import Target
from probes.workload import (
    MOST_BLOCKS,
    REQUEST_KEYS,
    Workload,
    WorkloadError,
    check_compile,
    check_supported,
    from_request,
)

PLAN_FORMAT = 1
SWAP_ADVICE = "--weights-offload blocks:"
"""How the reason begins that says how many blocks would have to be swapped."""
RIVALS = 4
"""How many of the largest buckets are evaluated."""


class PlanError(ValueError):
    """A plan file cannot be used; the message says why."""


@dataclass(frozen=True)
class BucketPeak:
    """What one aspect bucket needs with the plan's schedule (the smallest one, where nothing fits)."""

    bucket: str
    peak: int
    """Allocated bytes."""
    fits: bool


@dataclass(frozen=True)
class Plan:
    """Workload, device, estimates of every schedule, the chosen one and why."""

    workload: Workload
    device: Device
    executor: Executor
    objective: Objective
    profile_source: str
    structure: Structure
    schedules: tuple[Estimate, ...]
    choice: Choice
    warnings: tuple[str, ...]
    versions: Mapping[str, str]
    buckets: tuple[BucketPeak, ...] = ()
    """Of the workload's buckets those that were evaluated, the worst one (which the plan is for) first. Empty: only one size."""

    phases: tuple[Phase, ...] = ()
    """Phases beside the training step that were asked about."""

    @property
    def recommended(self) -> Estimate | None:
        """None: nothing fits."""
        return self.choice.chosen

    @property
    def schedule(self) -> Schedule:
        """The recommended schedule, for `apply`.

        Raises:
            PlanError: nothing fits.
        """
        if self.choice.chosen is None:
            raise PlanError(self.choice.reasons[0])
        return self.choice.chosen.schedule

    @property
    def export(self) -> dict[str, Any] | None:
        """The trainer's JSON keys for the recommended schedule; None: it is a per-block schedule, which they cannot express."""
        from advisor.exporters import simpletuner

        return simpletuner(self.schedule, self.workload.weights_offload) if self.schedule.actions is None else None

    def to_json(self) -> dict[str, Any]:
        """The answer in the product's JSON contract."""
        recommended: dict[str, Any] | None = None
        if self.choice.chosen is not None:
            recommended = {**self.choice.chosen.to_json(), "export": self.export, "reasons": list(self.choice.reasons)}
        return {
            "workload": self.workload.describe(),
            "device": {
                "name": self.device.name,
                "usable_gib": round(self.device.usable_bytes / GIB, 2),
                "kind": str(self.device.kind),
                "note": self.device.note,
            },
            "executor": str(self.executor),
            "objective": str(self.objective),
            "profile": self.profile_source,
            "schedules": [e.to_json() for e in self.schedules],
            "recommended": recommended,
            "reasons": list(self.choice.reasons),
            "faster": None if self.choice.faster is None else self.choice.faster.schedule.name,
            "warnings": list(self.warnings),
            "versions": dict(self.versions),
            **self._buckets_json(),
            **self._phases_json(),
        }

    @property
    def largest_phase(self) -> str | None:
        """Which of the phases has the largest peak, the recommended training step (``training``; the smallest one where nothing
        fits) among them. None: no phase was asked about."""
        step = self.recommended or min((e for e in self.schedules if e.supported), key=lambda e: e.peak, default=None)
        if not self.phases or step is None:
            return None
        peaks = {"training": step.peak, **{p.name: p.estimate.peak for p in self.phases}}
        return max(peaks, key=lambda name: peaks[name])

    def _phases_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.phases:
            found = {"phases": [p.to_json() for p in self.phases], "largest_phase": self.largest_phase}
        if kept := self.workload.kept_companions:
            found["kept"] = [
                {"kind": c.kind, "name": c.name, "gib": round(size / GIB, 4), "source": c.source} for c, size in kept
            ]
        return found

    def _buckets_json(self) -> dict[str, Any]:
        if not self.buckets:
            return {}
        evaluated = [{"bucket": b.bucket, "peak_gib": round(b.peak / GIB, 4), "fits": b.fits} for b in self.buckets]
        return {"buckets": {"worst": self.buckets[0].bucket, "all": len(self.workload.buckets), "evaluated": evaluated}}

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON, whole or not at all.

        Raises:
            OSError: the file cannot be written.
        """
        content = {"plan_format": PLAN_FORMAT, **self.to_json()}
        store.atomic_write(Path(path), (json.dumps(content, indent=2) + "\n").encode())


def device_for(
    *, gpu: str | None = None, vram_gib: float | None = None, detect: Callable[[], Device | None] | None = None
) -> Device | None:
    """The device that an answer is for: named, hypothetical, or the GPU that is present. None: none of these.

    Raises:
        DeviceError: unknown name or impossible memory.
        WorkloadError: both a name and a memory size.
    """
    if gpu is not None and vram_gib is not None:
        raise WorkloadError("--gpu and --vram exclude each other; give one")
    if gpu is not None:
        return devices.find_gpu(gpu)
    if vram_gib is not None:
        return devices.from_vram(vram_gib)
    return detect() if detect is not None else None


def target_of(workload: Workload, device: Device) -> Target:
    """The kind of device that a trace is made for."""
    capability = device.capability or (8, 0)
    return Target("cpu") if device.kind is DeviceKind.CPU else Target("cuda", capability, workload.attention)


def _traced_name(workload: Workload, forward_only: bool) -> str:
    size = f"{workload.seconds} s" if workload.family.kind == "audio" else workload.resolution
    step = "validation" if forward_only else workload.adapter
    return f"{workload.model} {workload.variant} {size}, {workload.precision}, {step}"


def profile_for(
    workload: Workload,
    device: Device,
    warn: Callable[[str], None],
    *,
    refresh: bool = False,
    progress: Callable[[str], Any] = contextlib.nullcontext,
    forward_only: bool = False,
) -> Profile:
    """The workload's profile for a kind of device: measured, where `advise probe` has stored one made on a card of that name;
    else traced, from the cache or now.

    Args:
        progress: makes of the name of what is traced a context manager that is entered only when that has to be done.
        forward_only: of one forward pass without gradients.

    Raises:
        TraceError, WorkloadError: the model cannot be traced as asked.
    """
    target = target_of(workload, device)

    def build() -> Profile:
        with progress(_traced_name(workload, forward_only)), contextlib.redirect_stdout(sys.stderr):
            # a model of the user's own may print
            from probes.traced import trace

            return trace(workload, target, forward_only=forward_only)

    if forward_only:
        return store.get(workload, target.key(), FORWARD, build, warn, refresh=refresh)
    measured = None if refresh else store.stored(workload, target.key(), "measured")
    if measured is not None and any(name in note for name in (device.name, *device.aliases) for note in measured.notes):
        return measured
    return store.get(workload, target.key(), "traced", build, warn, refresh=refresh)


@dataclass
class Session:
    """Answers many requests; keeps profiles and simulations between them."""

    refresh: bool = False
    progress: Callable[[str], Any] = contextlib.nullcontext

    def __post_init__(self) -> None:
        self._profiles: dict[tuple[Any, ...], tuple[Profile, tuple[str, ...]]] = {}
        self._replays: dict[tuple[Any, ...], Replay] = {}
        self._companions: dict[tuple[Run, str], tuple[Profile, tuple[str, ...]]] = {}
        self._simulations: dict[tuple[Any, ...], Simulations] = {}

    def profile(
        self, workload: Workload, device: Device, executor: Executor, *, forward_only: bool = False
    ) -> tuple[tuple[Any, ...], Profile, tuple[str, ...]]:
        """(key of the trace, profile, warnings about it), once for all jobs and cards that share a trace.

        Args:
            forward_only: of one forward pass without gradients.

        Raises:
            TraceError, WorkloadError: the model cannot be traced as asked.
        """
        asked, workload = workload, as_run(executor, workload)
        check_compile(workload)
        modern = (device.capability or (8, 0)) >= (8, 0)
        key = (workload.traced(), device.kind is DeviceKind.CPU, modern, forward_only)
        if key not in self._profiles:
            if len(self._profiles) >= 64:
                oldest = next(iter(self._profiles))
                self._profiles.pop(oldest)
                self._replays.pop(oldest, None)
                self._simulations.pop(oldest, None)
            warnings: list[str] = []
            profile = profile_for(
                workload,
                device,
                warnings.append,
                refresh=self.refresh,
                progress=self.progress,
                forward_only=forward_only,
            )
            self._profiles[key] = (profile, tuple(warnings))
        profile, warned = self._profiles[key]
        return key, dataclasses.replace(profile, workload=asked), warned

    def plan(
        self,
        workload: Workload,
        device: Device,
        executor: Executor = Executor.BUNDLED,
        objective: Objective = Objective.LADDER,
        *,
        headroom: int = 0,
        host_ram: int | None = None,
        schedules: Sequence[Schedule] | None = None,
        advising: bool = True,
    ) -> Plan:
        """Estimates every schedule (or the given ones) and chooses. Of several aspect buckets, for the one that needs most.

        Args:
            advising: where nothing fits, how many blocks would have to be swapped is found out and said.

        Raises:
            TraceError, WorkloadError, ScheduleError: the request cannot be answered.
        """

        def plan_for(sized: Workload) -> Plan:
            with collecting.paused():
                return self._plan(sized, device, executor, objective, headroom, host_ram, schedules, advising)

        if len(workload.buckets) < 2:
            return plan_for(workload)
        rivals = workload.largest_buckets(RIVALS)
        chosen, tried = 0, {0: plan_for(rivals[0])}
        while True:
            answer = tried[chosen]
            judged = answer.recommended or min(
                (e for e in answer.schedules if e.supported), key=lambda e: e.peak, default=None
            )
            if judged is None:
                return answer
            needs = []
            for i, rival in enumerate(rivals):
                e = judged if i == chosen else self._one(rival, device, executor, judged.schedule, headroom, host_ram)
                needs.append(BucketPeak(rival.bucket, e.peak, e.fits))
            worst = max(range(len(rivals)), key=lambda i: (not needs[i].fits, needs[i].peak, i == chosen))
            if worst == chosen or worst in tried:
                break
            chosen, tried[worst] = worst, plan_for(rivals[worst])
        order = sorted(needs, key=lambda n: (n is not needs[chosen], n.fits, -n.peak))
        return dataclasses.replace(
            answer, buckets=tuple(order), warnings=(*answer.warnings, *_bucket_notes(workload, order, judged.schedule))
        )

    def _one(
        self,
        workload: Workload,
        device: Device,
        executor: Executor,
        schedule: Schedule,
        headroom: int,
        host_ram: int | None,
    ) -> Estimate:
        """One supported schedule of one workload."""
        _, estimator, save = self._estimator(workload, device, executor, headroom, host_ram)
        verdict = job_check(executor, workload, estimator.profile.structure, schedule)
        found = estimator.estimate(verdict.effective)
        save()
        return found

    def _estimator(
        self, workload: Workload, device: Device, executor: Executor, headroom: int, host_ram: int | None
    ) -> tuple[tuple[str, ...], Estimator, Callable[[], None]]:
        """(warnings about the profile, an estimator, what stores its simulations)."""
        key, profile, warnings = self.profile(workload, device, executor)
        if key not in self._simulations:
            name = store.key(as_run(executor, workload), profile.target, profile.source)
            self._simulations[key] = Simulations.read(name, profile.tape)
        known = self._simulations[key]
        estimator = Estimator(
            profile,
            device,
            job_semantics(executor, workload),
            headroom=headroom,
            host_ram=host_ram,
            reserved_cache=known.reserved,
            step_cache=known.steps,
            replay=self._replays.get(key),
        )
        self._replays[key] = estimator.replay
        trouble = () if known.trouble is None else (known.trouble,)
        return (*warnings, *trouble), estimator, known.save

    def _plan(
        self,
        workload: Workload,
        device: Device,
        executor: Executor,
        objective: Objective,
        headroom: int,
        host_ram: int | None,
        schedules: Sequence[Schedule] | None,
        advising: bool,
    ) -> Plan:
        """`plan` for the workload's own size."""
        if (refused := weights_refused(executor, workload.weights_offload, workload.precision)) is not None:
            raise WorkloadError(refused)
        warnings, estimator, save = self._estimator(workload, device, executor, headroom, host_ram)
        profile = estimator.profile
        wanted = list(schedules) if schedules is not None else job_candidates(executor, workload, profile.structure)
        estimates: list[Estimate] = []
        for schedule in wanted:
            verdict = job_check(executor, workload, profile.structure, schedule)
            if not verdict.supported:
                estimates.append(Estimate(schedule, False, verdict.reason))
                continue
            found = estimator.estimate(verdict.effective, notes=verdict.notes)
            estimates.append(dataclasses.replace(found, schedule=schedule))
        found_reasons: tuple[str, ...] = ()
        if objective is Objective.OPTIMUM and schedules is None:
            if executor is Executor.BUNDLED:
                best, found_reasons = optimum(estimator, profile.structure)
                if best is not None:
                    estimates.append(best)
            else:
                found_reasons = (f"{executor} has no per-block schedules: the fastest of those that it has",)
        save()
        choice = choose(estimates, objective, estimator.capacity, smaller_weights(executor, workload))
        if choice.chosen is None and advising:
            advice = self._swap_advice(workload, device, executor, headroom, host_ram)
            choice = dataclasses.replace(choice, reasons=(*choice.reasons, *advice))
        notes = [*workload.family.notes, *warnings, *profile.notes]
        notes += optimizers.notes(workload.optimizer, profile.trained_shapes)
        own, trouble = calibration.current()
        if trouble is not None:
            notes.append(trouble)
        elif own is not calibration.packaged():
            notes.append(
                f"step times and bands are from your own calibration ({own.source}); advise calibrate --reset forgets it"
            )
        if device.note:
            notes.append(device.note)
        doubts = weights_note(executor, workload), training_mode_note(executor, workload)
        notes += [text for text in doubts if text is not None]
        if estimator.swap is not None:
            notes += swapping.notes(estimator.swap, workload.swapped_blocks)
        if device.windows and (
            closest := choice.chosen or min(estimates, key=lambda e: (not e.supported, e.peak), default=None)
        ):
            notes += _windows_notes(closest, estimator.capacity)
        phases, about = asked_phases(self, workload, device, executor, headroom)
        notes += about
        notes += [f"{p.name} does not fit: {p.text}" for p in phases if not p.estimate.fits]
        return Plan(
            phases=phases,
            workload=workload,
            device=device,
            executor=executor,
            objective=objective,
            profile_source=profile.source,
            structure=profile.structure,
            schedules=tuple(estimates),
            choice=dataclasses.replace(choice, reasons=(*choice.reasons, *found_reasons)),
            warnings=tuple(dict.fromkeys(notes)),
            versions=profile.versions,
        )

    def replay(self, key: tuple[Any, ...]) -> Replay | None:
        """An earlier estimator's replay of a trace."""
        return self._replays.get(key)

    def keep_replay(self, key: tuple[Any, ...], replay: Replay) -> None:
        """For the next estimator of that trace."""
        self._replays[key] = replay

    def companion(self, run: Run, workload: Workload, device: Device) -> tuple[Profile, tuple[str, ...]]:
        """(profile of one call of a VAE or text encoder, warnings about it), once for all jobs that share it.

        Raises:
            TraceError, WorkloadError: it cannot be traced as asked.
        """
        target = target_of(workload, device)
        key = (run, target.key())
        if key not in self._companions:

            def build() -> Profile:
                what = f"{run.companion.name}, which {'decodes' if run.decode else 'encodes'} {run.batch}"
                with self.progress(what), contextlib.redirect_stdout(sys.stderr):
                    from probes.companion_traces import trace

                    return trace(run, target, workload)

            warnings: list[str] = []
            name = store.companion_key(run, target.key())
            profile = store.get_named(name, workload, build, warnings.append, refresh=self.refresh)
            if len(self._companions) >= 64:
                self._companions.pop(next(iter(self._companions)))
            self._companions[key] = profile, tuple(warnings)
        return self._companions[key]

    def _swap_advice(
        self, workload: Workload, device: Device, executor: Executor, headroom: int, host_ram: int | None
    ) -> tuple[str, ...]:
        """Where nothing fits: how many blocks would have to wait on the host. Empty: they cannot, or wait already."""
        if workload.weights_offload != "none" or weights_refused(executor, "blocks:1", workload.precision) is not None:
            return ()

        def swapping(count: int) -> tuple[Estimator, Callable[[], None]]:
            swapped = dataclasses.replace(workload, weights_offload=f"blocks:{count}")
            check_supported(swapped)
            _, estimator, save = self._estimator(swapped, device, executor, headroom, host_ram)
            return estimator, save

        def estimate(count: int) -> Estimate:
            estimator, save = swapping(count)
            found = estimator.estimate(schedule)
            save()
            return found

        try:
            most, _ = swapping(MOST_BLOCKS)
        except WorkloadError:
            return ()
        if most.swap is None:
            return ()
        structure, count = most.profile.structure, len(most.swap.blocks)
        wanted = job_candidates(executor, most.profile.workload, structure)
        schedule = min(wanted, key=lambda s: most.measure(s).peak)
        found = estimate(count)
        if not found.fits:
            return (
                f"{SWAP_ADVICE}{count}, all that can be swapped, needs {found.peak / GIB:.1f} GiB "
                f"({schedule.name}), which does not fit either",
            )
        fails = 0
        while count - fails > 1:
            middle = (count + fails) // 2
            tried = estimate(middle)
            if tried.fits:
                count, found = middle, tried
            else:
                fails = middle
        seconds = "" if found.step_seconds is None else f", {found.step_seconds:.3g} s a step"
        return (
            f"{SWAP_ADVICE}{count} fits, the smallest number of blocks that does: peak {found.peak / GIB:.1f} GiB with "
            f"{schedule.name}, {found.host / GIB:.1f} GiB of host memory{seconds}",
        )


def _windows_notes(estimate: Estimate, capacity: int) -> tuple[str, ...]:
    """What running out of memory looks like under Windows, where a step is near that."""
    if not estimate.supported or estimate.peak_high <= capacity:
        return ()
    return (
        "Windows: unless it is told not to, NVIDIA's driver moves what does not fit on the card to system memory instead of failing, so "
        "a step that needs more than the card has becomes many times slower and not out of memory. This one may: its band reaches "
        f"{estimate.peak_high / GIB:.1f} GiB and {capacity / GIB:.1f} GiB can be used. Set the driver's CUDA sysmem fallback policy to "
        "'prefer no sysmem fallback', and leave room for what the desktop draws with (--headroom)",
    )


def _bucket_notes(workload: Workload, needs: Sequence[BucketPeak], schedule: Schedule) -> tuple[str, ...]:
    """What a plan for several buckets says about them."""
    worst, *others = needs
    shown = ", ".join(f"{n.bucket} {n.peak / GIB:.2f}" for n in others)
    rest = len(workload.buckets) - len(needs)
    text = f"planned for {worst.bucket}, the worst of {len(workload.buckets)} buckets: {worst.peak / GIB:.2f} GiB with {schedule.name}"
    if shown:
        text += f" ({shown})"
    if rest:
        text += f"; the other {rest} are those turned or smaller"
    return (
        text,
        "changing buckets leaves cached memory of other shapes in the allocator; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
        "keeps that small",
    )


def plan(
    model: str | None = None,
    *,
    model_class: str | None = None,
    model_config: str | Path | None = None,
    gpu: str | None = None,
    vram_gib: float | None = None,
    executor: str = "bundled",
    objective: str = "ladder",
    headroom_gib: float = 0.0,
    host_ram_gib: float | None = None,
    schedules: Sequence[Schedule] | None = None,
    **options: Any,
) -> Plan:
    """Predicts every schedule of a training job on a device and picks one.

    Args:
        model: a name as `advise models` lists it, a Hugging Face id, or a folder with a diffusers config.json.
        model_class: a class of your own instead, ``package.module:Class``; its module is imported.
        model_config: TOML or JSON file with the constructor arguments (and inputs) of `model_class`.
        gpu: a card's name; or `vram_gib`: its memory. Neither: the GPU of this machine.
        executor: bundled, simpletuner or diffusers.
        objective: ladder, fastest, smallest or optimum.
        headroom_gib: memory to leave free on the device.
        host_ram_gib: memory that offloading may use on the host.
        schedules: only these; default: all that the executor supports for the model.
        options: the command's other options by name (variant, resolution, frames, batch, rank, precision, ...).

    Raises:
        UnknownModelError, WorkloadError, DeviceError, TraceError: with one clear line.
    """
    from advisor.present import detect_gpu

    if (model is None) == (model_class is None):
        raise WorkloadError("plan() needs either model or model_class")
    if model_class is not None:
        outside.allow(model_class)
    named = {
        "model": model,
        "model_class": model_class,
        "model_config": None if model_config is None else str(model_config),
    }
    if unknown := sorted(set(options) - set(REQUEST_KEYS)):
        raise WorkloadError(f"plan() has no option {unknown[0]!r}; valid: gpu, vram_gib, {', '.join(REQUEST_KEYS[1:])}")
    device = device_for(gpu=gpu, vram_gib=vram_gib, detect=detect_gpu)
    if device is None:
        raise WorkloadError("this machine has no GPU; say which card to plan for with gpu= or vram_gib=")
    return Session().plan(
        from_request({**named, **options}),
        device,
        Executor(executor),
        Objective(objective),
        headroom=round(headroom_gib * GIB),
        host_ram=None if host_ram_gib is None else round(host_ram_gib * GIB),
        schedules=schedules,
    )
