"""`advise max`: the largest batch, frame count, resolution or rank that still fits a card, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from advisor.api import Plan
from probes.catalogue import Family
from probes.workload import MAX_FRAMES, MAX_PIXELS, MAX_RANK, Workload, WorkloadError, from_request

VARIED = ("batch", "frames", "resolution", "rank")
FINE_RANK = 8
"""Ranks from here on are tried in multiples of it."""
MOST_BATCH = 4096
MOST_TRIED = 24
"""Jobs traced in one search; a safeguard, a search needs five to twelve."""


@dataclass(frozen=True)
class Tried:
    """One value of what varies, with the answer for it."""

    value: str
    plan: Plan

    @property
    def fits(self) -> bool:
        return self.plan.recommended is not None

    def to_json(self) -> dict[str, Any]:
        chosen = self.plan.recommended
        return {"value": self.value, "fits": self.fits, "recommended": None if chosen is None else chosen.to_json()}


@dataclass(frozen=True)
class Largest:
    """The outcome of a search."""

    vary: str
    tried: tuple[Tried, ...]
    """In rising order of the value."""
    best: Tried | None
    """None: not even the smallest value fits."""
    limit: str | None
    """Why there is nothing larger to try, where it is not the card."""

    def to_json(self) -> dict[str, Any]:
        return {
            "vary": self.vary,
            "largest": None if self.best is None else self.best.value,
            "limit": self.limit,
            "tried": [t.to_json() for t in self.tried],
            "answer": None if self.best is None else self.best.plan.to_json(),
        }


def values(vary: str, workload: Workload) -> list[Any]:
    """What can be tried, rising: all that the family may take (single values may still be refused).

    Raises:
        WorkloadError: the family has no such thing to vary.
    """
    family = workload.family
    if vary == "batch":
        return list(range(1, (family.max_batch or MOST_BATCH) + 1))
    if vary == "rank":
        if workload.adapter == "full":
            raise WorkloadError("--vary rank: --adapter full has no rank")
        if workload.lokr_full_matrix and workload.adapter == "lokr":
            raise WorkloadError(
                "--vary rank: --lokr-full-matrix has no rank; leave it out, or vary batch or resolution"
            )
        return [*range(1, FINE_RANK), *range(FINE_RANK, MAX_RANK + 1, FINE_RANK)]
    if vary == "frames":
        if family.kind != "video":
            raise WorkloadError(f"--vary frames: {family.name} is an {family.kind} model")
        return list(range(family.first_frames, (family.max_frames or MAX_FRAMES) + 1, family.temporal_factor))
    if family.kind == "audio":
        raise WorkloadError(f"--vary resolution: {family.name} is an audio model")
    return _sizes(workload, family)


def _sizes(workload: Workload, family: Family) -> list[str]:
    """Sizes of the workload's aspect ratio, one a multiple of the longer side."""
    step = family.pixel_multiple
    ratio = min(workload.width, workload.height) / max(workload.width, workload.height)
    found: list[str] = []
    for long in range(step, (family.max_side or MAX_PIXELS) + 1, step):
        short = max(step, step * round(long * ratio / step))
        if short < family.min_side or (family.max_pixels and long * short > family.max_pixels):
            continue
        wide = workload.width >= workload.height
        found.append(f"{long}x{short}" if wide else f"{short}x{long}")
    return found


def search(
    request: Mapping[str, Any],
    vary: str,
    plan_for: Callable[[Workload], Plan],
    say: Callable[[str], None] = lambda _: None,
) -> Largest:
    """Finds the largest value under which some schedule fits; starts at the request's own (or the model's default).

    Args:
        request: as for `advise`; its entry for what varies is where the search starts.
        plan_for: answers one job.

    Raises:
        WorkloadError: nothing to vary, or a request that is not valid.
    """
    start = from_request(request)
    if start.buckets and vary in ("resolution", "frames"):
        raise WorkloadError(f"--vary {vary} goes with one size: leave the buckets out, or vary batch or rank")
    choices = values(vary, start)
    seen: dict[int, Tried | None] = {}

    def attempt(index: int) -> Tried | None:
        """None: the family does not take the value."""
        if index not in seen:
            value = choices[index]
            try:
                workload = from_request({**request, vary: value})
            except WorkloadError:
                seen[index] = None
            else:
                say(f"trying {vary} {value}")
                seen[index] = Tried(str(value), plan_for(workload))
        return seen[index]

    here = {
        "batch": start.batch,
        "frames": start.frames,
        "rank": start.rank,
        "resolution": f"{start.width}x{start.height}",
    }[vary]
    first = _nearest(choices, here, vary)
    low, high = _bracket(first, len(choices), attempt, vary, choices)
    halve = False
    while high - low > 1 and sum(t is not None for t in seen.values()) < MOST_TRIED:
        guess = (low + high) // 2 if halve else _guess(low, high, seen, vary, choices)
        halve = not halve
        middle = min(high - 1, max(low + 1, guess))
        found = attempt(middle)
        if found is None:
            # not a value of this family: the next smaller one that is, else treated as too large
            smaller = next((i for i in range(middle - 1, low, -1) if attempt(i) is not None), None)
            if smaller is None:
                high = min(high, middle) if middle - low <= 1 else middle
                if high - low <= 1:
                    break
                continue
            middle, found = smaller, seen[smaller]
        assert found is not None
        if found.fits:
            low = middle
        else:
            high = middle
    best = seen.get(low) if low >= 0 else None
    tried = tuple(t for _, t in sorted(seen.items()) if t is not None)
    limit = None
    if low == len(choices) - 1 or (low >= 0 and high < len(choices) and seen.get(high) is None):
        who = "the model takes" if vary != "rank" else "this command tries"
        limit = f"{who} nothing larger than {choices[low]}"
    return Largest(vary, tried, best, limit)


def _amount(value: Any, vary: str) -> float:
    """What memory grows with."""
    if vary != "resolution":
        return float(value)
    width, _, height = str(value).partition("x")
    return float(width) * float(height)


def _nearest(choices: Sequence[Any], here: Any, vary: str) -> int:
    wanted = _amount(here, vary)
    return min(range(len(choices)), key=lambda i: (abs(_amount(choices[i], vary) - wanted), i))


def _bracket(
    first: int, count: int, attempt: Callable[[int], Tried | None], vary: str, choices: Sequence[Any]
) -> tuple[int, int]:
    """(index that fits or -1, index that does not or `count`)."""
    found = attempt(first)
    if found is not None and found.fits:
        low = first
        while low < count - 1:
            grown = 2 * _amount(choices[low], vary)
            higher = max(low + 1, next((i for i in range(low, count) if _amount(choices[i], vary) >= grown), count - 1))
            found = attempt(higher)
            if found is None or not found.fits:
                return low, higher
            low = higher
        return low, count
    high = first
    while high > 0:
        lower = min(high - 1, _nearest(choices, _shrunk(choices[high], vary), vary))
        found = attempt(lower)
        if found is not None and found.fits:
            return lower, high
        high = lower
    return -1, high


def _shrunk(value: Any, vary: str) -> Any:
    if vary != "resolution":
        return float(value) / 2
    width, _, height = str(value).partition("x")
    return f"{float(width) / math.sqrt(2)}x{float(height) / math.sqrt(2)}"


def _guess(low: int, high: int, seen: Mapping[int, Tried | None], vary: str, choices: Sequence[Any]) -> int:
    """Where the smallest schedule's peak would meet the card's memory, were it to grow evenly; else the middle."""
    ends = [seen.get(low), seen.get(high)]
    peaks = []
    for tried in ends:
        known = [e.peak for e in tried.plan.schedules if e.supported] if tried is not None else []
        if not known:
            return (low + high) // 2
        peaks.append(min(known))
    assert ends[0] is not None
    device = ends[0].plan.device
    capacity = device.usable_bytes - device.context_bytes
    a, b = (_amount(choices[i], vary) for i in (low, high))
    if peaks[1] <= peaks[0]:
        return (low + high) // 2
    target = a + (capacity - peaks[0]) * (b - a) / (peaks[1] - peaks[0])
    inside = [i for i in range(low + 1, high) if _amount(choices[i], vary) <= target]
    return inside[-1] if inside else low + 1
