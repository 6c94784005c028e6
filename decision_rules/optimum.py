"""The per-block schedule with the fewest predicted seconds that fits. Bytes and seconds.

A block's decision changes the peak and the step time by about as much whatever its neighbours do, because a peak is what waits for
backward plus one block at work. So the choice is a knapsack: for every kind of block, the actions on the lower convex hull of (bytes
still held, seconds) are worth taking, and the cheapest seconds per byte come first. The hull is measured by replaying schedules in which
some blocks of a kind take an action; the answer is found by replaying mixes along the hull, and is a replayed, fitting schedule in
any case; exchanges of a few blocks between two actions then take out what did not add up. Among equal blocks, the early ones give up memory: what late blocks keep is gone before an early block is recomputed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from estimators.estimate import Estimate, Estimator
from estimators.schedule import Action, Schedule
from probes.structure import Block, Structure

MOST_REPLAYS = 600
"""Replays that are made at most; one takes milliseconds."""
FINAL_TRIES = 24
"""Full estimates (with the allocator's simulation) that are made at most."""
EXCHANGES = 3
"""Searches by exchange, each within less memory than the one before, until one fits."""


@dataclass(frozen=True)
class _Kind:
    """Blocks that cost the same."""

    blocks: tuple[int, ...]
    """Positions among all blocks, in call order."""
    actions: tuple[Action, ...]


@dataclass(frozen=True)
class _Move:
    """One block of a kind goes from one action to the next one on the kind's hull."""

    kind: int
    level: int
    """Place of the new action on the hull."""
    seconds_per_byte: float


def optimum(estimator: Estimator, structure: Structure) -> tuple[Estimate | None, tuple[str, ...]]:
    """The fastest per-block schedule that fits, and how it was found.

    Returns:
        (None, why) when there is nothing to decide, the device's rates are unknown, or nothing fits.
    """
    blocks = structure.blocks
    if not blocks:
        return None, ("optimum: the model has no blocks to decide about",)
    search = _Search(estimator, blocks)
    if search.seconds(search.kept) is None:
        return None, ("optimum: the step time is unknown on this device, so there is nothing to minimise",)
    return search.run()


class _Search:
    def __init__(self, estimator: Estimator, blocks: Sequence[Block]) -> None:
        self.estimator, self.blocks = estimator, blocks
        self.kept = (Action.KEEP,) * len(blocks)
        self.kinds = _kinds(blocks)
        self.replays = 0
        self._saved: list[dict[Action, int]] = [{} for _ in self.kinds]
        """Bytes that an action frees for a block, by kind."""

    def seconds(self, actions: tuple[Action, ...]) -> float | None:
        return self._measure(actions)[1]

    def _measure(self, actions: tuple[Action, ...]) -> tuple[int, float | None]:
        self.replays += 1
        found = self.estimator.measure(Schedule(actions=actions))
        return found.peak, found.step_seconds

    def run(self) -> tuple[Estimate | None, tuple[str, ...]]:
        hulls = [self._hull(kind) for kind in self.kinds]
        moves = _moves(hulls, self.kinds)
        low, high = 0, len(moves)
        capacity = self.estimator.likely_capacity
        while low < high:
            middle = (low + high) // 2
            if self._measure(self._after(moves[:middle], hulls))[0] <= capacity:
                high = middle
            else:
                low = middle + 1
        taken = moves[:low]
        best: Estimate | None = None
        for _ in range(FINAL_TRIES):
            found = self.estimator.estimate(Schedule(actions=self._after(taken, hulls)))
            if found.fits:
                best = found
                break
            if len(taken) == len(moves):
                break
            taken = moves[: len(taken) + max(1, len(moves) // FINAL_TRIES)]
        if best is None:
            return None, (f"optimum: no per-block schedule fits ({self.replays} replays)",)
        best, taken = self._undo(best, taken, hulls)
        best = self._exchange(best)
        per_kind = [
            f"{len(kind.blocks)} {self.blocks[kind.blocks[0]].kind}: {_counted(best.schedule, kind)}"
            for kind in self.kinds
        ]
        return best, (
            f"optimum: {'; '.join(per_kind)} (early blocks first)",
            f"optimum: the fewest predicted seconds along the hull of {sum(map(len, hulls))} kinds of decision, "
            f"{self.replays} replays; {best.step_seconds or 0:.3g} s a step, peak {best.peak / 2**30:.1f} GiB",
        )

    def _hull(self, kind: _Kind) -> list[tuple[Action, int, float]]:
        """(action, bytes saved by a block, seconds added by it) from KEEP on, ever more bytes at ever more seconds per byte."""
        base_peak, base_seconds = self._measure(self.kept)
        half = kind.blocks[: max(1, len(kind.blocks) // 2)]
        points = [(Action.KEEP, 0, 0.0)]
        for action in kind.actions:
            if action is Action.KEEP:
                continue
            peak, seconds = self._measure(self._with(half, action))
            saved = (base_peak - peak) // len(half)
            added = ((seconds or 0.0) - (base_seconds or 0.0)) / len(half)
            self._saved[self.kinds.index(kind)][action] = saved
            if saved > 0:
                points.append((action, saved, added))
        return _lower_hull(points)

    def _with(self, positions: Sequence[int], action: Action) -> tuple[Action, ...]:
        actions = list(self.kept)
        for i in positions:
            actions[i] = action
        return tuple(actions)

    def _after(self, moves: Sequence[_Move], hulls: list[list[tuple[Action, int, float]]]) -> tuple[Action, ...]:
        """Actions of all blocks: of each kind, the earliest block takes the highest level."""
        actions = list(self.kept)
        for k, kind in enumerate(self.kinds):
            for level in range(1, len(hulls[k])):
                n = sum(m.kind == k and m.level == level for m in moves)
                for i in kind.blocks[:n]:
                    actions[i] = hulls[k][level][0]
        return tuple(actions)

    def _exchange(self, best: Estimate) -> Estimate:
        """Moves blocks of a kind from one action to another while that is faster and fits. Costs do not quite add up: copies
        that the link cannot hide become dear all at once."""
        room = int(self.estimator.likely_capacity * best.peak / max(best.reserved, 1))
        for _ in range(EXCHANGES):
            found = self.estimator.estimate(Schedule(actions=self._exchanged(best, room)))
            if found.fits:
                return found if (found.step_seconds or 0.0) < (best.step_seconds or 0.0) else best
            room = min(room, found.peak) * 99 // 100  # it leaves more of what is reserved unused
        return best

    def _exchanged(self, best: Estimate, room: int) -> tuple[Action, ...]:
        """The fastest that exchanges lead to with a peak of at most `room` bytes."""
        counts: list[dict[Action, int]] = []
        for kind in self.kinds:
            own = [(best.schedule.actions or ())[i] for i in kind.blocks]
            counts.append({a: own.count(a) for a in kind.actions})
        fastest = best.step_seconds or 0.0
        steps = sorted({max(1, len(self.blocks) // 6), max(1, len(self.blocks) // 12), 1}, reverse=True)
        for size in steps:
            improved = True
            while improved and self.replays < MOST_REPLAYS:
                improved = False
                for k, kind in enumerate(self.kinds):
                    for a, b in itertools.permutations(kind.actions, 2):
                        n = min(size, counts[k][a])
                        if n == 0 or self.replays >= MOST_REPLAYS:
                            continue
                        trial = [dict(c) for c in counts]
                        trial[k][a] -= n
                        trial[k][b] += n
                        peak, seconds = self._measure(self._placed(trial))
                        if peak <= room and seconds is not None and seconds < fastest * (1 - 1e-4):
                            counts, fastest, improved = trial, seconds, True
        return self._placed(counts)

    def _placed(self, counts: Sequence[dict[Action, int]]) -> tuple[Action, ...]:
        """Actions of all blocks: the early ones of a kind take what frees the most."""
        actions = list(self.kept)
        for k, kind in enumerate(self.kinds):
            order = sorted(kind.actions, key=lambda a: -self._saved[k].get(a, 0))
            placed = [a for a in order for _ in range(counts[k][a])]
            for i, a in zip(kind.blocks, placed, strict=True):
                actions[i] = a
        return tuple(actions)

    def _undo(
        self, best: Estimate, taken: list[_Move], hulls: list[list[tuple[Action, int, float]]]
    ) -> tuple[Estimate, list[_Move]]:
        """Takes moves back, the dearest first, while the schedule still fits: moves are whole blocks, and the last one may
        have freed more than was missing."""
        capacity = self.estimator.likely_capacity
        for move in sorted(set(taken), key=lambda m: -m.seconds_per_byte):
            fewer = list(taken)
            fewer.remove(move)
            actions = self._after(fewer, hulls)
            peak, seconds = self._measure(actions)
            if peak > capacity or seconds is None or seconds >= (best.step_seconds or 0.0):
                continue
            found = self.estimator.estimate(Schedule(actions=actions))
            if found.fits:
                best, taken = found, fewer
        return best, taken


def _kinds(blocks: Sequence[Block]) -> list[_Kind]:
    groups: dict[tuple[str, str, bool, bool], list[int]] = {}
    for i, block in enumerate(blocks):
        chain = block.name.rpartition(".")[0]
        groups.setdefault((chain, block.kind, bool(block.feed_forward), bool(block.attention)), []).append(i)
    return [_Kind(tuple(g), tuple(a for a in Action if a.suits(blocks[g[0]]))) for g in groups.values()]


def _lower_hull(points: Sequence[tuple[Action, int, float]]) -> list[tuple[Action, int, float]]:
    """The points that no mix of two others beats, by bytes saved; starts at KEEP."""
    hull: list[tuple[Action, int, float]] = []
    for point in sorted(points, key=lambda p: (p[1], p[2])):
        while hull and point[2] <= hull[-1][2] and hull[-1][0] is not Action.KEEP:
            hull.pop()
        while len(hull) > 1 and _slope(hull[-2], point) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        if not hull or point[1] > hull[-1][1]:
            hull.append(point)
    return hull


def _slope(a: tuple[Action, int, float], b: tuple[Action, int, float]) -> float:
    return (b[2] - a[2]) / (b[1] - a[1]) if b[1] > a[1] else float("inf")


def _moves(hulls: list[list[tuple[Action, int, float]]], kinds: Sequence[_Kind]) -> list[_Move]:
    moves = [
        _Move(k, level, _slope(hull[level - 1], hull[level]))
        for k, hull in enumerate(hulls)
        for level in range(1, len(hull))
        for _ in kinds[k].blocks
    ]
    return sorted(moves, key=lambda m: m.seconds_per_byte)


def _counted(schedule: Schedule, kind: _Kind) -> str:
    actions = [schedule.actions[i] for i in kind.blocks] if schedule.actions else []
    return ", ".join(f"{actions.count(a)} {a.value}" for a in dict.fromkeys(actions))
