"""What each executor does with each control, family by family. The trainer's matrix is `data/support.csv`."""

from __future__ import annotations

import csv
import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cache

from estimators.estimate import Semantics
from estimators.schedule import Backend, IntervalForm, Offloading, Schedule, resolve
from estimators.swapping import Swapping
from probes import resources
from probes.structure import Structure
from probes.workload import FLOAT_PRECISIONS, LYCORIS, Workload


class Executor(StrEnum):
    """Who runs the schedule."""

    BUNDLED = "bundled"
    SIMPLETUNER = "simpletuner"
    DIFFUSERS = "diffusers"


class Ffn(StrEnum):
    """Which feed-forward backends the trainer runs."""

    YES = "yes"
    NO = "no"
    UNSLOTH_ONLY = "unsloth-ffn only"
    """torch-ffn stops with an error."""
    AS_WHOLE_BLOCKS = "with interval>1 as whole blocks"
    """Without an interval it stops with an error; with one it runs as the whole-block backend."""


@dataclass(frozen=True)
class TrainerSupport:
    """One row of the trainer's support matrix: a family, or some of its variants."""

    family: str
    variant: str
    """Pattern of variant names; empty: all that no other row of the family names."""
    interval_form: IntervalForm
    checkpoints: bool
    """False: the trainer has no checkpointing for it at all."""
    interval: bool
    stride: bool
    unsloth: str
    """``yes``, ``ignored`` (runs as torch) or ``only with interval>1``."""
    ffn: Ffn
    ffn_scope: str
    """What one feed-forward checkpoint holds."""
    ffn_interval: str
    """What an interval does with a feed-forward backend: ``every k-th``, ``every k-th, stride ignored`` or ``ignored``."""
    attention_offload: bool
    offload_scope: str
    """What attention offload wraps."""
    per_block_when: tuple[str, ...]
    """What makes the trainer leave segments and go block by block."""
    per_block_loop: str
    """What it then does with interval and stride."""
    training_mode: bool
    """It checkpoints in training mode only."""
    diffusers: bool
    """diffusers has a class with gradient checkpointing for it."""
    note: str

    @property
    def form(self) -> IntervalForm:
        """What an interval does in the end: ignored also where the trainer drops the option before the model sees it."""
        return self.interval_form if self.interval else IntervalForm.IGNORED


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
def _matrix() -> tuple[TrainerSupport, ...]:
    forms = {
        "segmented chunks": IntervalForm.SEGMENTS,
        "per-block modulo": IntervalForm.EVERY_KTH,
        "every block only": IntervalForm.IGNORED,
        "none": IntervalForm.IGNORED,
    }
    overall = {
        IntervalForm.SEGMENTS: IntervalForm.SEGMENTS_OVERALL,
        IntervalForm.EVERY_KTH: IntervalForm.EVERY_KTH_OVERALL,
    }
    return tuple(
        TrainerSupport(
            family=r["family"],
            variant=r["variant"],
            interval_form=overall[forms[r["schedule"]]] if r["index"] == "continues" else forms[r["schedule"]],
            checkpoints=r["schedule"] != "none",
            interval=r["interval_safety"] == "True",
            stride=r["stride_safety"] == "True",
            unsloth=r["unsloth_layer"],
            ffn=Ffn(r["ffn"]),
            ffn_scope=r["ffn_scope"],
            ffn_interval=r["ffn_interval"],
            attention_offload=r["attention_offload"] == "yes",
            offload_scope=r["offload_scope"],
            per_block_when=tuple(filter(None, r["per_block_when"].split("; "))),
            per_block_loop=r["per_block_loop"],
            training_mode=r["training_mode"] == "yes",
            diffusers=r["diffusers"] != "no",
            note=r["note"],
        )
        for r in csv.DictReader(resources.text("support.csv").splitlines())
    )


_UNKNOWN = TrainerSupport(
    "", "", IntervalForm.IGNORED, True, False, False, "ignored", Ffn.NO, "", "", False, "", (), "", False, True,
    "not in the trainer's matrix",
)  # fmt: skip


def trainer_support(family: str, variant: str | None = None) -> TrainerSupport:
    """The trainer's row for a variant of a family; nothing but plain checkpointing for one that it does not have."""
    usual = _UNKNOWN
    for row in _matrix():
        if row.family == family:
            if row.variant and variant is not None and fnmatchcase(variant, row.variant):
                return row
            if not row.variant:
                usual = row
    return usual


BLOCK_SWAP = "block swap"
"""Part of what `per_block_when` calls it."""


def weights_refused(executor: Executor, weights_offload: str, precision: str = "bf16") -> str | None:
    """Why the executor does not keep base weights of that precision on the host like that, with what would work; None: it does."""
    kind = weights_offload.partition(":")[0]
    if kind == "blocks" and executor is Executor.BUNDLED and precision not in FLOAT_PRECISIONS:
        return (
            f"--weights-offload {weights_offload} with --precision {precision}: this runtime swaps blocks of unquantised weights; "
            "--precision bf16 or --executor simpletuner does"
        )
    if kind == "none" or executor is not Executor.DIFFUSERS:
        return None
    does = " or ".join((Executor.SIMPLETUNER,) if kind == "ramtorch" else (Executor.SIMPLETUNER, Executor.BUNDLED))
    return f"--weights-offload {weights_offload}: {executor} does not do this; --executor {does} does"


def weights_note(executor: Executor, workload: Workload) -> str | None:
    """What is planned for although the executor's own runs do not do it; None: nothing is."""
    if executor is not Executor.BUNDLED or not workload.streamed_percent:
        return None
    return (
        f"--weights-offload {workload.weights_offload}: RamTorch is SimpleTuner's (--executor simpletuner plans for that trainer); "
        "advise run and advise verify keep the weights on the device, blocks:N is what they do"
    )


def training_mode_note(executor: Executor, workload: Workload) -> str | None:
    """Where the trainer's checkpointing may do nothing. None: nothing is known that says so."""
    if executor is not Executor.SIMPLETUNER or workload.adapter not in LYCORIS:
        return None
    if not trainer_support(workload.model, workload.variant).training_mode:
        return None
    return (
        f"SimpleTuner checkpoints {workload.model} in training mode only; in the published LyCORIS runs of Sana, which has the same "
        "condition, checkpointing changed neither peak nor time, so expect the peak of none until a run shows less"
    )


def smaller_weights(executor: Executor, workload: Workload) -> str:
    """What makes the base weights on the card smaller, of what the executor does and the job may have."""
    if workload.adapter == "full":
        return "an adapter in place of the full fine-tune (--adapter lora)"
    ways = []
    if workload.precision in FLOAT_PRECISIONS:
        ways.append("a quantised base (of 16-bit weights --precision int8-torchao keeps half, nf4 a quarter)")
    if workload.weights_offload == "none":
        kinds = ["ramtorch"] if executor is Executor.SIMPLETUNER else []
        kinds += ["blocks:N"] if weights_refused(executor, "blocks:1", workload.precision) is None else []
        ways += [f"--weights-offload {' or '.join(kinds)}"] if kinds else []
    return " or ".join(ways) or "a smaller model or a card with more memory"


def _per_block(row: TrainerSupport, swapped: bool) -> bool:
    """Whether block swap makes the trainer leave segments."""
    return (
        swapped
        and row.interval_form in (IntervalForm.SEGMENTS, IntervalForm.SEGMENTS_OVERALL)
        and any(BLOCK_SWAP in reason for reason in row.per_block_when)
    )


def semantics(executor: Executor, family: str, variant: str | None = None, *, swapped: bool = False) -> Semantics:
    """How the executor reads the controls for this family.

    Args:
        swapped: blocks wait on the host between their uses.
    """
    match executor:
        case Executor.BUNDLED:
            return Semantics()
        case Executor.DIFFUSERS:
            return Semantics(interval_form=IntervalForm.IGNORED)
        case Executor.SIMPLETUNER:
            row = trainer_support(family, variant)
            return Semantics(
                IntervalForm.EVERY_KTH if _per_block(row, swapped) else row.interval_form,
                interval_selects_ffn=row.ffn_interval.startswith("every"),
                trainer_ffn_scope=True,
                attention_from_block=row.offload_scope == FROM_BLOCK,
                offloading=Offloading.KERNEL if row.offload_scope == KERNEL_ONLY else Offloading.HOOKS,
                copies_out_overlap=True,
                swapping=Swapping.TRAINER,
            )


def job_semantics(executor: Executor, workload: Workload) -> Semantics:
    """`semantics` for one job."""
    return dataclasses.replace(
        semantics(executor, workload.model, workload.variant, swapped=workload.swapped_blocks > 0),
        compile_works=as_run(executor, workload).compile == workload.compile,
    )


def as_run(executor: Executor, workload: Workload) -> Workload:
    """The workload whose trace shows what the executor's step computes.

    SimpleTuner with regional compile: eager. In all published runs that had it on (one model; bf16, int8 and dynamic fp8 base; two
    cards) memory and step time are those of the same job without compile.
    """
    if executor is Executor.SIMPLETUNER and workload.compile != "none":
        return dataclasses.replace(workload, compile="none")
    return workload


def check(
    executor: Executor,
    family: str,
    structure: Structure,
    schedule: Schedule,
    variant: str | None = None,
    *,
    swapped: bool = False,
    compiled: bool = False,
) -> Verdict:
    """Whether `executor` runs `schedule` on a model of `family`, and what it makes of it.

    Args:
        swapped: blocks wait on the host between their uses.
        compiled: the workload has regional compile on.
    """
    match executor:
        case Executor.BUNDLED:
            return (_inside_compiled(schedule) if compiled else None) or _bundled(structure, schedule, swapped)
        case Executor.DIFFUSERS:
            return _diffusers(family, trainer_support(family, variant), schedule)
        case Executor.SIMPLETUNER:
            verdict = _simpletuner(family, trainer_support(family, variant), schedule, swapped)
            return _with_trainers_compile(verdict) if compiled and verdict.supported else verdict


def job_check(executor: Executor, workload: Workload, structure: Structure, schedule: Schedule) -> Verdict:
    """`check` for one job."""
    return check(
        executor,
        workload.model,
        structure,
        schedule,
        workload.variant,
        swapped=workload.swapped_blocks > 0,
        compiled=workload.compiles,
    )


def _inside_compiled(schedule: Schedule) -> Verdict | None:
    """Why a schedule that reaches into blocks cannot run on compiled ones; None: it stays outside."""
    actions = schedule.actions or ()
    if schedule.backend.feed_forward_only or any(a.recomputes_feed_forward for a in actions):
        return _no(
            schedule, "a compiled block has no feed-forward side of its own; torch and unsloth work, or --compile none"
        )
    if schedule.offload_attention or any(a.offloads_attention for a in actions):
        return _no(
            schedule,
            "what attention saves inside a compiled block cannot be told apart; leave its offload off, or --compile none",
        )
    return None


def _with_trainers_compile(verdict: Verdict) -> Verdict:
    """Regional compile in SimpleTuner: in its published runs checkpointing has no effect beside it, attention offload has one."""
    schedule = verdict.effective
    if schedule.backend is Backend.NONE:
        note = "regional compile shows no effect in SimpleTuner's published runs: estimated as eager"
        return dataclasses.replace(verdict, notes=(*verdict.notes, note))
    note = (
        "in SimpleTuner's published runs with regional compile checkpointing has no effect on memory or time, nor has compile: "
        "estimated as eager without checkpointing; --compile none checkpoints"
    )
    effective = dataclasses.replace(schedule, backend=Backend.NONE)
    return dataclasses.replace(verdict, effective=effective, notes=(*verdict.notes, note))


def _no(schedule: Schedule, reason: str) -> Verdict:
    return Verdict(False, reason, schedule)


def _bundled(structure: Structure, schedule: Schedule, swapped: bool) -> Verdict:
    if swapped and (schedule.offload_attention or any(a.offloads_attention for a in schedule.actions or ())):
        return _no(schedule, "attention offload does not go with swapped blocks; leave one of them off")
    if schedule.offload_attention and not any(b.attention for b in structure.blocks):
        return _no(schedule, "no block has an attention submodule whose saved tensors could be offloaded")
    if schedule.backend.feed_forward_only and not structure.has_feed_forward:
        return _no(schedule, f"{schedule.backend}: no block has a separate feed-forward side; torch works")
    return Verdict(True, None, schedule)


def _diffusers(family: str, row: TrainerSupport, schedule: Schedule) -> Verdict:
    if schedule != Schedule() and not row.diffusers:
        return _no(schedule, f"diffusers has no model class for {family}; --executor bundled runs this")
    if schedule.actions is not None:
        return _no(schedule, "diffusers checkpoints all blocks or none; --executor bundled runs per-block schedules")
    if schedule.backend not in (Backend.NONE, Backend.TORCH):
        return _no(schedule, f"diffusers has no {schedule.backend} backend; torch works, or --executor bundled")
    if schedule.interval is not None:
        return _no(schedule, "diffusers has no interval or stride; torch without them works, or --executor bundled")
    if schedule.offload_attention:
        return _no(schedule, "diffusers does not offload attention; --executor bundled does")
    return Verdict(True, None, schedule)


def _simpletuner(family: str, row: TrainerSupport, schedule: Schedule, swapped: bool) -> Verdict:
    if schedule.actions is not None:
        return _no(schedule, "SimpleTuner has no per-block schedules; --executor bundled runs them")
    if schedule.offload_attention and not row.attention_offload:
        return _no(schedule, f"SimpleTuner rejects attention offload for {family}; leave it off")
    backend, interval, stride = schedule.backend, schedule.interval, schedule.stride
    if backend is not Backend.NONE and not row.checkpoints:
        return _no(
            schedule, f"SimpleTuner has no checkpointing for {family}: nothing would change; --executor bundled has"
        )
    notes: list[str] = []
    if interval is not None and not row.interval:
        notes.append(f"SimpleTuner warns and drops the interval for {family}: this runs as {backend} on every block")
        interval = stride = None
    elif interval is not None and row.interval_form is IntervalForm.IGNORED:
        notes.append(f"SimpleTuner does not pass the interval on to {family}: this runs as {backend} on every block")
        interval = stride = None
    if stride is not None and not row.stride:
        notes.append(f"SimpleTuner warns and drops the stride for {family}")
        stride = None
    if interval is not None and not backend.feed_forward_only and _per_block(row, swapped):
        notes.append(f"with swapped blocks SimpleTuner makes no segments for {family}: {row.per_block_loop}")
        if row.per_block_loop == EVERY_BLOCK:
            interval = stride = None
        elif row.per_block_loop.endswith("stride ignored"):
            stride = None
    if backend.feed_forward_only:
        if row.ffn is Ffn.NO:
            return _no(schedule, f"SimpleTuner rejects {backend} for {family}; torch works")
        if row.ffn is Ffn.UNSLOTH_ONLY and backend is Backend.TORCH_FFN:
            return _no(
                schedule, f"SimpleTuner stops with an error in torch-ffn for {family}; unsloth-ffn and torch work"
            )
        if row.ffn is Ffn.AS_WHOLE_BLOCKS:
            if interval is None:
                return _no(schedule, f"SimpleTuner stops with an error in {backend} for {family}; torch works")
            notes.append(f"SimpleTuner runs {backend} with an interval on whole blocks for {family}")
            backend = Backend.UNSLOTH if backend is Backend.UNSLOTH_FFN else Backend.TORCH
        elif interval is not None and row.ffn_interval == "ignored":
            notes.append(
                f"SimpleTuner ignores the interval with {backend} for {family}: every block's feed-forward side is checkpointed"
            )
            interval = stride = None
        elif stride is not None and row.ffn_interval.endswith("stride ignored"):
            notes.append(
                f"SimpleTuner ignores the stride with {backend} for {family}: every {interval}th block is checkpointed"
            )
            stride = None
    if backend is Backend.UNSLOTH and (
        row.unsloth == "ignored" or (row.unsloth.startswith("only") and interval is None)
    ):
        notes.append(f"SimpleTuner runs unsloth as torch for {family}: checkpoint inputs stay on the GPU")
        backend = Backend.TORCH
    if schedule.offload_attention and row.offload_scope == KERNEL_ONLY:
        notes.append(
            f"SimpleTuner offloads only what the attention kernel saves for {family}, not what the projections around it do"
        )
    effective = Schedule(
        backend, interval, stride, schedule.offload_attention, schedule.pin_memory_max_buckets, schedule.prefetch
    )
    return Verdict(True, None, effective, tuple(notes))


EVERY_BLOCK = "every block"
"""A `per_block_loop` that takes neither interval nor stride into account."""
KERNEL_ONLY = "kernel only"
"""An `offload_scope` that wraps the attention kernel and not the projections around it."""
FROM_BLOCK = "attention module with its projections, norm1 and modulation"
"""An `offload_scope` that wraps what the block does before its attention too."""


INTERVALS: tuple[tuple[int, int | None], ...] = (
    (2, None), (3, None), (4, None), (6, None), (2, 3), (3, 4), (2, 4), (3, 6), (2, 6), (2, 8), (4, 16),
)  # fmt: skip
"""(interval, stride) pairs that the ladder tries; from most to least recomputation where a stride leaves gaps."""


def candidates(
    executor: Executor,
    family: str,
    structure: Structure,
    variant: str | None = None,
    *,
    swapped: bool = False,
    compiled: bool = False,
) -> list[Schedule]:
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
        Schedule(Backend.TORCH_FFN, offload_attention=True),
        Schedule(Backend.UNSLOTH_FFN, offload_attention=True),
        Schedule(Backend.UNSLOTH, offload_attention=True),
    ]
    meaning = semantics(executor, family, variant, swapped=swapped)
    kept: list[Schedule] = []
    effects: set[tuple[object, ...]] = set()
    for schedule in wanted:
        verdict = check(executor, family, structure, schedule, variant, swapped=swapped, compiled=compiled)
        if not verdict.supported or verdict.effective != schedule:
            continue
        done = resolve(
            schedule,
            structure,
            meaning.interval_form,
            interval_selects_ffn=meaning.interval_selects_ffn,
            trainer_ffn_scope=meaning.trainer_ffn_scope,
            offloading=meaning.offloading,
        )
        effect = (done.units, done.offloaded_attention)
        if effect not in effects:
            kept.append(schedule)
            effects.add(effect)
    return kept


def job_candidates(executor: Executor, workload: Workload, structure: Structure) -> list[Schedule]:
    """`candidates` for one job."""
    return candidates(
        executor,
        workload.model,
        structure,
        workload.variant,
        swapped=workload.swapped_blocks > 0,
        compiled=workload.compiles,
    )
