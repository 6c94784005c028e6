"""Where nothing fits: the nearest change of the job that does, found by estimating it. Bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from advisor import largest
from advisor.api import Plan
from decision_rules.ladder import FIXED_PARTS
from estimators.estimate import Estimate
from probes.workload import Workload, WorkloadError, from_request

MOST_TRACED = 2
"""Changes that need a trace of their own; one takes up to seven seconds."""
LEAN_OPTIMIZER = "adamw8bit"
BASES = {"int8-torchao": 8, "nf4": 4}
"""Quantised bases that are tried, with their bits a weight: no weight can be smaller."""
_LEAST_SHARE = 0.5
"""A smaller picture or batch than this share of the one asked for is another job, not a change."""


@dataclass(frozen=True)
class Change:
    """Options that would have to be given, and the answer with them."""

    options: Mapping[str, Any]
    """By the request's key."""
    plan: Plan

    @property
    def text(self) -> str:
        """As on the command line."""
        return " ".join(f"--{key.replace('_', '-')} {value}" for key, value in self.options.items())


@dataclass(frozen=True)
class Nearest:
    """What was found."""

    change: Change | None
    """None: no change that was tried fits."""
    tried: tuple[Change, ...]
    """All that were estimated, in order."""

    def to_json(self) -> dict[str, Any]:
        """The ``nearest`` of an answer in which nothing fits."""
        found = self.change.plan.recommended if self.change is not None else None
        return {
            "options": None if self.change is None else dict(self.change.options),
            "recommended": None if found is None else found.to_json(),
            "tried": [dict(t.options) for t in self.tried],
        }


def nearest(request: Mapping[str, Any], answer: Plan, headroom: int, plan_for: Callable[[Workload], Plan]) -> Nearest:
    """Tries changes one after the other until one fits: an optimizer with less state (the same profile), a quantised base, base weights on
    the host, LoRA instead of a full fine-tune, a smaller batch or picture, also together with these. What arithmetic rules out is not
    tried.

    Args:
        request: the job as it was asked for.
        answer: its plan, in which nothing fits.
        headroom: bytes to leave free.
        plan_for: answers one job.
    """
    usable = [e for e in answer.schedules if e.supported]
    tried: list[Change] = []
    if not usable:
        return Nearest(None, ())
    smallest = min(usable, key=lambda e: e.peak)
    capacity = answer.device.usable_bytes - answer.device.context_bytes - headroom
    traced = {answer.workload.traced()}
    for options in _candidates(request, answer.workload, smallest, capacity):
        try:
            job = from_request({**request, **options})
            if len(traced | {job.traced()}) > 1 + MOST_TRACED:
                continue
            traced.add(job.traced())
            change = Change(options, plan_for(job))
        except WorkloadError:
            continue  # not for this model or adapter
        tried.append(change)
        if change.plan.recommended is not None:
            return Nearest(change, tuple(tried))
    return Nearest(None, tuple(tried))


def _candidates(request: Mapping[str, Any], job: Workload, least: Estimate, capacity: int) -> Iterator[dict[str, Any]]:
    """Changes that could bring the smallest schedule's peak under the capacity, the mildest first."""
    parts = dict(least.breakdown)
    over = least.peak - capacity
    lean: dict[str, Any] = {"optimizer": LEAN_OPTIMIZER} if job.optimizer not in (LEAN_OPTIMIZER, "lion8bit") else {}
    spared = parts.get("optimizer", 0) if lean else 0
    if over <= spared and spared > 0:
        yield lean
    if len(job.buckets) > 1:
        return  # each would be traced at several sizes
    if job.adapter == "full":
        yield {"adapter": "lora"}
    weights = parts.get("weights", 0)
    if job.precision in ("bf16", "bf16-upcast", "fp16") and job.adapter != "full":
        for base, bits in BASES.items():
            saved = weights * (16 - bits) // 16
            if over <= saved:
                yield {"precision": base}
            if lean and over <= saved + spared:
                yield {"precision": base, **lean}
    if job.weights_offload == "none" and job.adapter != "full" and over <= weights:
        yield {"weights_offload": "ramtorch"}
    movable: list[dict[str, Any]] = (
        [{}, {"precision": "nf4"}, {"weights_offload": "ramtorch"}] if job.adapter != "full" else [{}]
    )
    fixed = sum(parts.get(name, 0) for name in FIXED_PARTS)
    for options in movable:
        kept = fixed - (weights if "weights_offload" in options else weights * 3 // 4 if options else 0)
        if capacity > kept:
            for size in _smaller(job, (capacity - kept) / max(1, least.peak - fixed)):
                yield {**options, **size}


def _smaller(job: Workload, share: float) -> Iterator[dict[str, Any]]:
    """A smaller batch, else a smaller picture, at this share of what grows with them, and a little less."""
    for part in (0.95 * share, 0.75 * share):
        if part < _LEAST_SHARE or part >= 1:
            continue
        if job.batch > 1:
            if (batch := int(job.batch * part)) >= 1:
                yield {"batch": batch}
            continue
        if job.family.kind == "audio":
            continue
        fitting = [size for size in largest.values("resolution", job) if _pixels(size) <= part * job.width * job.height]
        if fitting:
            yield {"resolution": fitting[-1]}


def _pixels(size: str) -> int:
    width, _, height = size.partition("x")
    return int(width) * int(height)
