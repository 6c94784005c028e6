"""What each executor does with each control, family by family. The trainer's matrix is `data/support.csv`."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from estimators.estimate import Semantics
from estimators.schedule import Backend, IntervalForm, Schedule, resolve
from probes import resources
from probes.structure import Structure


class Executor(StrEnum):
    """Who runs the schedule."""

    BUNDLED = "bundled"
    SIMPLETUNER = "simpletuner"
    DIFFUSERS = "diffusers"


@dataclass(frozen=True)
class TrainerSupport:
    """One family's row of the trainer's support matrix."""

    interval_form: IntervalForm
    interval: bool
    stride: bool
    unsloth: str
    """``yes``, ``ignored`` (runs as torch) or ``only with interval>1``."""
    ffn: bool
    attention_offload: bool
    note: str


@dataclass(frozen=True)
class Verdict:
    """Whether an executor runs a schedule on a model, and as what."""

    supported: bool
    reason: str | None
    """Why not, with what would work."""
    effective: Schedule
    """What really runs: an option that the executor drops is gone from it."""
    notes: tuple[str, ...] = ()
    """What the executor ignores or replaces."""


@cache
def _matrix() -> dict[str, TrainerSupport]:
    forms = {
        "segmented chunks": IntervalForm.SEGMENTS,
        "per-block modulo": IntervalForm.EVERY_KTH,
        "every block only": IntervalForm.IGNORED,
        "none": IntervalForm.IGNORED,
    }
    return {
        r["family"]: TrainerSupport(
            interval_form=forms[r["schedule"]],
            interval=r["interval_safety"] == "True",
            stride=r["stride_safety"] == "True",
            unsloth=r["unsloth_layer"],
            ffn=r["ffn"] == "yes",
            attention_offload=r["attention_offload"] == "yes",
            note=r["note"],
        )
        for r in csv.DictReader(resources.text("support.csv").splitlines())
    }


_UNKNOWN = TrainerSupport(IntervalForm.IGNORED, False, False, "ignored", False, False, "not in the trainer's matrix")


def trainer_support(family: str) -> TrainerSupport:
    """The trainer's row for a family; nothing but plain checkpointing for one that it does not have."""
    return _matrix().get(family, _UNKNOWN)


def semantics(executor: Executor, family: str) -> Semantics:
    """How the executor reads the controls for this family."""
    match executor:
        case Executor.BUNDLED:
            return Semantics()
        case Executor.DIFFUSERS:
            return Semantics(interval_form=IntervalForm.IGNORED)
        case Executor.SIMPLETUNER:
            row = trainer_support(family)
            # With a feed-forward backend Flux, Chroma and H3 let the interval choose blocks; the others ignore it.
            selects = family in ("flux", "chroma", "minimaxh3")
            return Semantics(
                row.interval_form, interval_selects_ffn=selects, trainer_ffn_scope=True, copies_out_overlap=True
            )


def check(executor: Executor, family: str, structure: Structure, schedule: Schedule) -> Verdict:
    """Whether `executor` runs `schedule` on a model of `family`, and what it makes of it."""
    match executor:
        case Executor.BUNDLED:
            return _bundled(structure, schedule)
        case Executor.DIFFUSERS:
            return _diffusers(schedule)
        case Executor.SIMPLETUNER:
            return _simpletuner(family, structure, schedule)


def _no(schedule: Schedule, reason: str) -> Verdict:
    return Verdict(False, reason, schedule)


def _bundled(structure: Structure, schedule: Schedule) -> Verdict:
    if schedule.offload_attention:
        return _no(schedule, "the bundled runtime does not offload attention yet; --executor simpletuner does")
    if schedule.backend.feed_forward_only and not structure.has_feed_forward:
        return _no(schedule, f"{schedule.backend}: no block has a separate feed-forward side; torch works")
    return Verdict(True, None, schedule)


def _diffusers(schedule: Schedule) -> Verdict:
    if schedule.actions is not None:
        return _no(schedule, "diffusers checkpoints all blocks or none; --executor bundled runs per-block schedules")
    if schedule.backend not in (Backend.NONE, Backend.TORCH):
        return _no(schedule, f"diffusers has no {schedule.backend} backend; torch works, or --executor bundled")
    if schedule.interval is not None:
        return _no(schedule, "diffusers has no interval or stride; torch without them works, or --executor bundled")
    if schedule.offload_attention:
        return _no(schedule, "diffusers does not offload attention; --executor simpletuner does")
    return Verdict(True, None, schedule)


def _simpletuner(family: str, structure: Structure, schedule: Schedule) -> Verdict:
    row = trainer_support(family)
    if schedule.actions is not None:
        return _no(schedule, "SimpleTuner has no per-block schedules; --executor bundled runs them")
    if schedule.offload_attention and not row.attention_offload:
        return _no(schedule, f"SimpleTuner rejects attention offload for {family}; leave it off")
    if schedule.backend.feed_forward_only and not row.ffn:
        return _no(schedule, f"SimpleTuner rejects {schedule.backend} for {family}; torch works")
    notes: list[str] = []
    backend, interval, stride = schedule.backend, schedule.interval, schedule.stride
    if interval is not None and not row.interval:
        notes.append(f"SimpleTuner warns and drops the interval for {family}: this runs as {backend} on every block")
        interval = stride = None
    if stride is not None and not row.stride:
        notes.append(f"SimpleTuner warns and drops the stride for {family}")
        stride = None
    if backend is Backend.UNSLOTH and (
        row.unsloth == "ignored" or (row.unsloth.startswith("only") and interval is None)
    ):
        notes.append(f"SimpleTuner runs unsloth as torch for {family}: checkpoint inputs stay on the GPU")
        backend = Backend.TORCH
    effective = Schedule(
        backend, interval, stride, schedule.offload_attention, schedule.pin_memory_max_buckets, schedule.prefetch
    )
    return Verdict(True, None, effective, tuple(notes))


INTERVALS: tuple[tuple[int, int | None], ...] = (
    (2, None), (3, None), (4, None), (6, None), (2, 3), (3, 4), (2, 4), (3, 6), (2, 6), (2, 8), (4, 16),
)  # fmt: skip
"""(interval, stride) pairs that the ladder tries; from most to least recomputation where a stride leaves gaps."""


def candidates(executor: Executor, family: str, structure: Structure) -> list[Schedule]:
    """Every schedule worth comparing for this family in the order of the ladder: supported ones only, and of several that do
    the same to this model only the first."""
    whole = [Schedule(Backend.TORCH), *(Schedule(Backend.TORCH, k, s) for k, s in INTERVALS)]
    offloaded = [Schedule(Backend.UNSLOTH), *(Schedule(Backend.UNSLOTH, k, s) for k, s in INTERVALS)]
    wanted = [
        Schedule(),
        Schedule(Backend.TORCH_FFN),
        *whole,
        Schedule(Backend.UNSLOTH_FFN),
        *offloaded,
        Schedule(offload_attention=True),
        Schedule(Backend.TORCH, offload_attention=True),
        Schedule(Backend.TORCH, 2, 4, offload_attention=True),
    ]
    meaning = semantics(executor, family)
    kept: list[Schedule] = []
    effects: set[tuple[object, ...]] = set()
    for schedule in wanted:
        verdict = check(executor, family, structure, schedule)
        if not verdict.supported or verdict.effective != schedule:
            continue
        done = resolve(
            schedule,
            structure,
            meaning.interval_form,
            interval_selects_ffn=meaning.interval_selects_ffn,
            trainer_ffn_scope=meaning.trainer_ffn_scope,
        )
        effect = (done.units, done.offloaded_attention)
        if effect not in effects:
            kept.append(schedule)
            effects.add(effect)
    return kept
