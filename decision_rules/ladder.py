"""The documented ladder, and the two other objectives. Input: estimates; output: one of them, with a reason for each rung."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from estimators.estimate import GIB, Estimate
from estimators.schedule import Backend, Schedule


class Objective(StrEnum):
    """What to choose by."""

    LADDER = "ladder"
    """The first rung that fits, then an interval and a stride where they buy time back."""
    FASTEST = "fastest"
    """The shortest predicted step of all that fit."""
    SMALLEST = "smallest"
    """The lowest predicted peak."""
    OPTIMUM = "optimum"
    """The shortest predicted step of all that fit, a decision for every block included (bundled runtime only)."""


@dataclass(frozen=True)
class Choice:
    """What was chosen and why."""

    chosen: Estimate | None
    """None: nothing fits."""
    reasons: tuple[str, ...]
    faster: Estimate | None = None
    """A schedule that fits and is predicted faster than the ladder's answer."""


RUNGS = (Backend.NONE, Backend.TORCH_FFN, Backend.TORCH, Backend.UNSLOTH_FFN, Backend.UNSLOTH)
SAFE = 0.95
"""An interval or stride only buys time back where the fit is at least this probable; a tight fit is named, not chosen."""
NOTICEABLE = 0.01
"""Relative difference in predicted step time below which two schedules count as equally fast."""


def _gib(value: int) -> str:
    return f"{value / GIB:.1f} GiB"


def _seconds(estimate: Estimate) -> str:
    return "unknown time" if estimate.step_seconds is None else f"{estimate.step_seconds:.3g} s a step"


def _gain(now: Estimate, other: Estimate) -> float:
    """Share of the step time that `other` saves; 0 when unknown."""
    if not now.step_seconds or other.step_seconds is None:
        return 0.0
    return 1 - other.step_seconds / now.step_seconds


def _key(estimate: Estimate) -> tuple[float, int]:
    return (estimate.step_seconds if estimate.step_seconds is not None else float("inf"), estimate.peak)


def choose(
    estimates: Sequence[Estimate], objective: Objective, capacity: int, smaller_weights: str = "smaller weights"
) -> Choice:
    """Picks one estimate.

    Args:
        estimates: all schedules of the family, unsupported ones included.
        capacity: bytes that the allocator may reserve on the device.
        smaller_weights: what would make the base weights smaller, for the reasons where nothing fits.
    """
    usable = [e for e in estimates if e.supported]
    fitting = [e for e in usable if e.fits]
    if not fitting:
        return Choice(None, _why_nothing_fits(usable, capacity, smaller_weights))
    if objective is Objective.SMALLEST:
        best = min(fitting, key=lambda e: (e.peak, _key(e)))
        return Choice(best, (f"{best.schedule.name} has the lowest predicted peak, {_gib(best.peak)}",))
    if objective in (Objective.FASTEST, Objective.OPTIMUM):
        best = min(fitting, key=_key)
        return Choice(
            best, (f"{best.schedule.name} is the fastest of {len(fitting)} schedules that fit, {_seconds(best)}",)
        )
    return _ladder(usable, capacity)


def _against(estimate: Estimate, capacity: int) -> str:
    if estimate.peak > capacity:
        return f"peak {_gib(estimate.peak)} of {_gib(capacity)}"
    if estimate.reserved > capacity:
        return f"peak {_gib(estimate.peak)}, but the allocator needs {_gib(estimate.reserved)} of {_gib(capacity)}"
    return estimate.notes[-1] if estimate.notes else "the allocator cannot place it"


def _host(estimate: Estimate) -> str:
    return f", {_gib(estimate.host)} of host memory" if estimate.host else ""


def _ladder(usable: Sequence[Estimate], capacity: int) -> Choice:
    by_schedule: Mapping[Schedule, Estimate] = {e.schedule: e for e in usable}
    fitting = [e for e in usable if e.fits]
    reasons: list[str] = []
    reached: Estimate | None = None
    lowest: int | None = None
    for backend in RUNGS:
        rung = by_schedule.get(Schedule(backend))
        name = "no checkpointing" if backend is Backend.NONE else backend.value
        if rung is None:
            reasons.append(f"{name}: skipped, not supported for this model here")
            continue
        if lowest is not None and rung.peak >= lowest:
            reasons.append(
                f"{name}: skipped, its peak of {_gib(rung.peak)} is not below the previous rung's {_gib(lowest)}"
            )
            continue
        lowest = rung.peak
        if rung.fits:
            tightly = "" if rung.fit_probability >= SAFE else f", a tight fit ({rung.fit_probability:.0%} likely)"
            reasons.append(f"{name}: fits, peak {_gib(rung.peak)} of {_gib(capacity)}, {_seconds(rung)}{tightly}")
            reached = rung
            break
        reasons.append(f"{name}: does not fit, {_against(rung, capacity)}")
    if reached is None:
        reached = min(fitting, key=lambda e: (e.peak, _key(e)))
        reasons.append(f"{reached.schedule.name}: the only kind of schedule that fits, peak {_gib(reached.peak)}")
    chosen = reached
    backend = reached.schedule.backend
    if backend is not Backend.NONE:
        variants = [
            e
            for e in fitting
            if e.schedule.backend is backend
            and e.schedule.interval
            and e.schedule.offload_attention == reached.schedule.offload_attention
        ]
        tries = (
            ("interval", [e for e in variants if e.schedule.stride is None]),
            ("segment_stride", [e for e in variants if e.schedule.stride is not None]),
        )
        for knob, group in tries:
            tight = [e for e in group if e.fit_probability < SAFE]
            group = [e for e in group if e.fit_probability >= SAFE]
            if tight and _gain(chosen, quickest := min(tight, key=_key)) > NOTICEABLE:
                reasons.append(
                    f"{quickest.schedule.name}: would save {_gain(chosen, quickest):.0%} of the step time, but is a tight fit "
                    f"(peak {_gib(quickest.peak)}, {quickest.fit_probability:.0%} likely to fit)"
                )
            if not group:
                continue
            best = min(group, key=_key)
            if (gain := _gain(chosen, best)) > NOTICEABLE:
                reasons.append(
                    f"{best.schedule.name}: {knob} saves {gain:.0%} of the step time and still fits, peak {_gib(best.peak)}"
                )
                chosen = best
            else:
                safely = " safely" if tight else ""
                reasons.append(f"{knob}: none that fits{safely} is noticeably faster than {chosen.schedule.name}")
    fastest = min(fitting, key=_key)
    faster = fastest if _gain(chosen, fastest) > NOTICEABLE else None
    if faster is not None and not any(reason.startswith(f"{faster.schedule.name}:") for reason in reasons):
        tightly = ", a tight fit" if faster.fit_probability < SAFE else ""
        reasons.append(
            f"{faster.schedule.name} also fits and is predicted {_gain(chosen, faster):.0%} faster "
            f"({_seconds(faster)}, peak {_gib(faster.peak)}{_host(faster)}{tightly}); --objective fastest takes it"
        )
    return Choice(chosen, tuple(reasons), faster)


FIXED_PARTS = ("weights", "adapter", "gradients", "optimizer", "workspace", "kept")
"""Of a peak, what neither checkpointing nor a smaller batch or picture lowers."""
_KNOBS = {
    "adapter": "a lower --rank",
    "gradients": "training fewer parameters (--adapter lora, a lower --rank)",
    "optimizer": "an optimizer with less state (--optimizer adamw8bit, optimi-lion)",
    "saved": "a smaller batch, resolution or number of frames",
    "transient": "a smaller batch, resolution or number of frames",
    "inputs": "a smaller batch",
    "workspace": "a card with more memory",
    "kept": "keeping less beside the model (--keep-resident, --resident-gib)",
}


def _why_nothing_fits(usable: Sequence[Estimate], capacity: int, smaller_weights: str) -> tuple[str, ...]:
    if not usable:
        return ("no schedule is supported for this model by this executor",)
    best = min(usable, key=lambda e: e.peak)
    largest = max(best.breakdown.items(), key=lambda kv: kv[1])
    over = best.peak - capacity
    if over > 0:
        lines = [
            f"nothing fits: the smallest schedule, {best.schedule.name}, needs {_gib(best.peak)} and {_gib(capacity)} are usable "
            f"({_gib(over)} too much)"
        ]
    else:
        why = best.notes[-1] if best.notes else "the allocator cannot place it"
        lines = [
            f"nothing fits: the smallest schedule, {best.schedule.name}, needs {_gib(best.peak)} of {_gib(capacity)}: {why}"
        ]
    part, size = largest
    knob = smaller_weights if part == "weights" else _KNOBS[part]
    if part in FIXED_PARTS:
        lines.append(
            f"the largest part of its peak is {part} ({_gib(size)}), which checkpointing cannot lower; {knob} can"
        )
    else:
        lines.append(f"the largest part of its peak is {part} ({_gib(size)}); {knob} lowers it")
    kept = best.breakdown.get("kept", 0)
    if part != "kept" and 0 < over <= kept:
        lines.append(
            f"{_gib(kept)} of it is kept beside the model (--keep-resident, --resident-gib); without that it would be {_gib(best.peak - kept)}"
        )
    return tuple(lines)
