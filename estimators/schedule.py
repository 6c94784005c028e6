"""A schedule (what is kept, recomputed, grouped, offloaded) and its resolution into checkpoint units of one model.

The estimator and the runtime both work from :func:`resolve`, so what is predicted is what is executed.
Semantics follow the documented controls: backend, interval k, segment stride s, attention offload.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from probes.structure import Block, Chain, Structure


class ScheduleError(ValueError):
    """A control has a value that no executor accepts."""


class Backend(StrEnum):
    """Who recomputes what: the whole block or its feed-forward side, with checkpoint inputs on the GPU or on the host."""

    NONE = "none"
    TORCH_FFN = "torch-ffn"
    TORCH = "torch"
    UNSLOTH_FFN = "unsloth-ffn"
    UNSLOTH = "unsloth"

    @property
    def feed_forward_only(self) -> bool:
        return self in (Backend.TORCH_FFN, Backend.UNSLOTH_FFN)

    @property
    def offloads_inputs(self) -> bool:
        return self in (Backend.UNSLOTH, Backend.UNSLOTH_FFN)


class Action(StrEnum):
    """One block's entry in a per-block schedule."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    RECOMPUTE_FFN = "recompute-ffn"
    RECOMPUTE_OFFLOAD = "recompute+offload"
    RECOMPUTE_FFN_OFFLOAD = "recompute-ffn+offload"
    KEEP_ATTENTION_ON_HOST = "keep+offload-attention"
    RECOMPUTE_ATTENTION_ON_HOST = "recompute+offload-attention"
    RECOMPUTE_FFN_ATTENTION_ON_HOST = "recompute-ffn+offload-attention"
    RECOMPUTE_OFFLOAD_ATTENTION_ON_HOST = "recompute+offload+offload-attention"
    RECOMPUTE_FFN_OFFLOAD_ATTENTION_ON_HOST = "recompute-ffn+offload+offload-attention"

    @property
    def parts(self) -> list[str]:
        return self.value.split("+")

    @property
    def recomputes_block(self) -> bool:
        return self.parts[0] == "recompute"

    @property
    def recomputes_feed_forward(self) -> bool:
        """Only the feed-forward side."""
        return self.parts[0] == "recompute-ffn"

    @property
    def offloads_inputs(self) -> bool:
        return "offload" in self.parts

    @property
    def offloads_attention(self) -> bool:
        return "offload-attention" in self.parts

    def suits(self, block: Block) -> bool:
        """Whether the block has the parts that the action names."""
        return (bool(block.feed_forward) or not self.recomputes_feed_forward) and (
            bool(block.attention) or not self.offloads_attention
        )


class IntervalForm(StrEnum):
    """What an interval k means to an executor."""

    SEGMENTS = "segments"
    """k consecutive blocks share one checkpoint; the next one starts a stride later."""
    SEGMENTS_OVERALL = "segments-overall"
    """The same, where the lists of blocks are one sequence: a segment may reach from one into the next."""
    EVERY_KTH = "every-kth"
    """Block i is checkpointed on its own when ``i % k == 0`` (with stride: ``i % stride < k``)."""
    EVERY_KTH_OVERALL = "every-kth-overall"
    """The same, where i counts on from one list of blocks to the next."""
    IGNORED = "ignored"
    """The executor drops the option."""


class Offloading(StrEnum):
    """How an executor moves tensors to the host."""

    HOOKS = "hooks"
    """Every saved tensor with a history is copied when it is saved, for each checkpoint that takes it and again when recomputation
    saves it; copies back are waited for."""
    KERNEL = "kernel"
    """As HOOKS; of attention only what its kernel saves, and not what the projections around it do."""
    BUNDLED = "bundled"
    """A storage is copied once. What attention saves moves at the end of its block, where nothing else holds it; recomputation takes
    attention's results from the host instead of running it. Copies run beside the computation, back one group early."""


CONTROLS = (
    "gradient_checkpointing",
    "gradient_checkpointing_backend",
    "gradient_checkpointing_interval",
    "gradient_checkpointing_segment_stride",
    "gradient_checkpointing_offload_attention",
    "gradient_checkpointing_offload_pin_memory_max_buckets",
    "gradient_checkpointing_offload_prefetch",
)
"""The trainer's keys, in the order of its documentation."""
KEYS = frozenset(CONTROLS)


def _integer(key: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ScheduleError(f"{key} must be an integer of at least {least}, not {value!r}")
    if value < least:
        raise ScheduleError(f"{key} must be at least {least}, not {value}")
    return value


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ScheduleError(f"{key} must be true or false, not {value!r}")
    return value


@dataclass(frozen=True)
class Schedule:
    """One setting of the checkpointing controls, or an explicit action for every block."""

    backend: Backend = Backend.NONE
    interval: int | None = None
    stride: int | None = None
    offload_attention: bool = False
    pin_memory_max_buckets: int = 12
    prefetch: bool = False
    actions: tuple[Action, ...] | None = None
    """Set only by :meth:`per_block`; then the fields above are not used."""

    def __post_init__(self) -> None:
        if self.interval is not None:
            _integer("gradient_checkpointing_interval", self.interval, 1)
            if self.interval == 1:
                object.__setattr__(self, "interval", None)
        if self.stride is not None:
            _integer("gradient_checkpointing_segment_stride", self.stride, 1)
            if self.interval is None:
                object.__setattr__(self, "stride", None)
            elif self.stride < self.interval:
                raise ScheduleError(
                    f"gradient_checkpointing_segment_stride {self.stride} is below the interval {self.interval}; "
                    f"a stride counts from one segment's start to the next, so it is at least {self.interval}"
                )
        if self.backend is Backend.NONE and self.actions is None:
            object.__setattr__(self, "interval", None)
            object.__setattr__(self, "stride", None)

    @classmethod
    def from_controls(cls, controls: Mapping[str, Any]) -> Schedule:
        """Reads the trainer's JSON keys. Absent keys mean the trainer's defaults, but checkpointing is off when
        ``gradient_checkpointing`` is absent.

        Raises:
            ScheduleError: unknown key, or a value out of range.
        """
        for key in controls:
            if key not in KEYS:
                raise ScheduleError(f"unknown schedule control {key!r}; valid: {', '.join(sorted(KEYS))}")
        on = _flag("gradient_checkpointing", controls.get("gradient_checkpointing", False))
        text = "torch" if (given := controls.get("gradient_checkpointing_backend")) is None else given
        names = [b.value for b in Backend if b is not Backend.NONE]
        if text not in names:
            raise ScheduleError(f"gradient_checkpointing_backend {text!r} is unknown; valid: {', '.join(names)}")
        return cls(
            backend=Backend(text) if on else Backend.NONE,
            interval=controls.get("gradient_checkpointing_interval"),
            stride=controls.get("gradient_checkpointing_segment_stride"),
            offload_attention=_flag(
                "gradient_checkpointing_offload_attention",
                controls.get("gradient_checkpointing_offload_attention", False),
            ),
            pin_memory_max_buckets=_integer(
                "gradient_checkpointing_offload_pin_memory_max_buckets",
                controls.get("gradient_checkpointing_offload_pin_memory_max_buckets", 12),
                0,
            ),
            prefetch=_flag(
                "gradient_checkpointing_offload_prefetch",
                controls.get("gradient_checkpointing_offload_prefetch", False),
            ),
        )

    @classmethod
    def per_block(cls, actions: Sequence[str | Action]) -> Schedule:
        """One action a block, in call order over all chains.

        Raises:
            ScheduleError: an unknown action.
        """
        try:
            return cls(actions=tuple(Action(a) for a in actions))
        except ValueError as error:
            raise ScheduleError(f"{error}; valid actions: {', '.join(a.value for a in Action)}") from None

    def to_controls(self) -> dict[str, Any]:
        """The trainer's JSON keys that express this schedule, without keys at their default.

        Raises:
            ScheduleError: a per-block schedule, which no trainer key can express.
        """
        if self.actions is not None:
            raise ScheduleError("a per-block schedule cannot be written as trainer controls")
        out: dict[str, Any] = {"gradient_checkpointing": self.backend is not Backend.NONE}
        if self.backend is not Backend.NONE:
            out["gradient_checkpointing_backend"] = self.backend.value
        if self.interval is not None:
            out["gradient_checkpointing_interval"] = self.interval
        if self.stride is not None:
            out["gradient_checkpointing_segment_stride"] = self.stride
        if self.offload_attention:
            out["gradient_checkpointing_offload_attention"] = True
            if self.pin_memory_max_buckets != 12:
                out["gradient_checkpointing_offload_pin_memory_max_buckets"] = self.pin_memory_max_buckets
            if self.prefetch:
                out["gradient_checkpointing_offload_prefetch"] = True
        return out

    @property
    def name(self) -> str:
        """Short name for tables, e.g. ``torch interval=2 stride=4``."""
        if self.actions is not None:
            recomputed = sum(a.recomputes_block or a.recomputes_feed_forward for a in self.actions)
            attention = sum(a.offloads_attention for a in self.actions)
            more = f", attention of {attention} offloaded" if attention else ""
            return f"per block ({recomputed} of {len(self.actions)} recomputed{more})"
        parts = [self.backend.value]
        if self.interval is not None:
            parts.append(f"interval={self.interval}")
        if self.stride is not None:
            parts.append(f"stride={self.stride}")
        if self.offload_attention:
            parts.append("offload-attention")
        return " ".join(parts)


@dataclass(frozen=True)
class Unit:
    """One checkpoint: modules that run in it, in call order."""

    modules: tuple[str, ...]
    offload_inputs: bool = False
    from_child: str | None = None
    """The checkpoint starts at this child of the (only) module and ends with the module."""


@dataclass(frozen=True)
class Resolution:
    """A schedule applied to one model's structure."""

    units: tuple[Unit, ...]
    recomputed_blocks: tuple[str, ...]
    offloaded_attention: tuple[str, ...] = ()
    """Qualified names of attention modules whose saved tensors go to the host."""
    attention_blocks: tuple[str, ...] = ()
    """For each of them, the block that it is in."""
    offloading: Offloading = Offloading.HOOKS
    attention_from_block: bool = False
    """What the block saves before its attention (norm and modulation) goes with it."""
    notes: tuple[str, ...] = field(default=())
    """What was not done as asked, and why."""


def _positions(chain: Chain, schedule: Schedule, form: IntervalForm, before: int = 0) -> list[list[int]]:
    """Groups of block indices that form one checkpoint each. `before`: blocks of earlier lists, where those count."""
    n = len(chain.blocks)
    k, s = schedule.interval or 1, schedule.stride
    if form is IntervalForm.IGNORED or not chain.groupable or k == 1:
        return [[i] for i in range(n)]
    if form not in (IntervalForm.SEGMENTS, IntervalForm.SEGMENTS_OVERALL):
        return [[i] for i in range(n) if ((i + before) % s < k if s else (i + before) % k == 0)]
    groups = [list(range(start, min(start + k, n))) for start in range(0, n, s or k)]
    if chain.linked is False:
        return [[i] for g in groups for i in g]
    return groups


def _sequences(structure: Structure) -> list[Chain]:
    """The lists whose blocks may be grouped as one, then the others."""
    grouped = [c for c in structure.chains if c.groupable]
    whole = Chain(
        ", ".join(c.path for c in grouped),
        tuple(b for c in grouped for b in c.blocks),
        linked=not any(c.linked is False for c in grouped),
        groupable=True,
    )
    return [whole, *(c for c in structure.chains if not c.groupable)]


def resolve(
    schedule: Schedule,
    structure: Structure,
    interval_form: IntervalForm = IntervalForm.SEGMENTS,
    *,
    interval_selects_ffn: bool = True,
    trainer_ffn_scope: bool = False,
    offloading: Offloading = Offloading.BUNDLED,
    attention_from_block: bool = False,
) -> Resolution:
    """The checkpoint units of `schedule` on a model.

    Args:
        schedule: what to do.
        structure: the model's chains.
        interval_form: what an interval means to the executor (for whole blocks).
        interval_selects_ffn: with a feed-forward backend, an interval (or interval and stride) selects the blocks whose
            feed-forward side is checkpointed, every k-th; False: every block's is.
        trainer_ffn_scope: use `Block.trainer_ffn_start`, where a block has one.
        offloading: how the executor moves tensors.
        attention_from_block: attention offload takes what the block saves before its attention too.

    Raises:
        ScheduleError: a per-block schedule of the wrong length, or one that asks for a feed-forward side that the block
            does not have.
    """
    notes: list[str] = []
    units: list[Unit] = []
    recomputed: list[str] = []

    def feed_forward(block: Block, offload: bool) -> bool:
        if trainer_ffn_scope and block.trainer_ffn_start:
            units.append(Unit((block.name,), offload, block.trainer_ffn_start))
        elif block.feed_forward:
            units.extend(Unit(run, offload) for run in block.feed_forward)
        else:
            return False
        recomputed.append(block.name)
        return True

    def done(attending: list[Block]) -> Resolution:
        pairs = [(a, b.name) for b in attending for a in b.attention]
        return Resolution(
            tuple(units),
            tuple(recomputed),
            tuple(a for a, _ in pairs),
            tuple(b for _, b in pairs),
            offloading,
            attention_from_block,
            tuple(dict.fromkeys(notes)),
        )

    if schedule.actions is not None:
        blocks = structure.blocks
        if len(schedule.actions) != len(blocks):
            raise ScheduleError(
                f"a per-block schedule needs one action for each of the model's {len(blocks)} blocks, got {len(schedule.actions)}"
            )
        for block, action in zip(blocks, schedule.actions, strict=True):
            if action.recomputes_block:
                units.append(Unit((block.name,), action.offloads_inputs))
                recomputed.append(block.name)
            elif action.recomputes_feed_forward and not feed_forward(block, action.offloads_inputs):
                raise ScheduleError(f"block {block.name} ({block.kind}) has no separate feed-forward side to recompute")
            if action.offloads_attention and not block.attention:
                raise ScheduleError(f"block {block.name} ({block.kind}) has no attention submodule to offload")
        return done([b for b, a in zip(blocks, schedule.actions, strict=True) if a.offloads_attention])

    offload = schedule.backend.offloads_inputs
    if schedule.backend.feed_forward_only:
        without: list[str] = []
        for chain in structure.chains:
            chosen = range(len(chain.blocks))
            if interval_selects_ffn and schedule.interval and chain.groupable:
                chosen_groups = _positions(chain, schedule, IntervalForm.EVERY_KTH)
                chosen = [g[0] for g in chosen_groups]  # type: ignore[assignment]
            elif schedule.interval and not interval_selects_ffn and chain.groupable:
                notes.append(f"{chain.path}: the interval is ignored with {schedule.backend.value}")
            for i in chosen:
                if not feed_forward(chain.blocks[i], offload):
                    without.append(chain.blocks[i].kind)
        if without:
            kinds = ", ".join(sorted(set(without)))
            notes.append(f"{len(without)} blocks ({kinds}) have no separate feed-forward side and keep everything")
    elif schedule.backend is not Backend.NONE:
        before = 0
        for chain in _sequences(structure) if interval_form is IntervalForm.SEGMENTS_OVERALL else structure.chains:
            groups = _positions(
                chain, schedule, interval_form, before if interval_form is IntervalForm.EVERY_KTH_OVERALL else 0
            )
            before += len(chain.blocks)
            for group in groups:
                names = tuple(chain.blocks[i].name for i in group)
                units.append(Unit(names, offload))
                recomputed.extend(names)
        if interval_form is IntervalForm.SEGMENTS_OVERALL:
            order = {b.name: i for i, b in enumerate(structure.blocks)}
            units.sort(key=lambda u: order[u.modules[0]])
            recomputed.sort(key=order.__getitem__)
        if schedule.interval and interval_form in (IntervalForm.SEGMENTS, IntervalForm.SEGMENTS_OVERALL):
            loose = [c.path for c in structure.chains if c.linked is False and c.groupable]
            if loose:
                shown = loose[0] if len(loose) == 1 else f"{loose[0]} and {len(loose) - 1} more lists"
                notes.append(f"{shown}: blocks are not directly connected, so each is a checkpoint of its own")
        if schedule.interval and interval_form is IntervalForm.IGNORED:
            notes.append("the executor ignores gradient_checkpointing_interval for this model")
    return done(list(structure.blocks) if schedule.offload_attention else [])
