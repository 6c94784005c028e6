"""Blocks whose weights wait on the host: when each weight is on the device.

Two ways to do it:

* `Swapping.TRAINER`: SimpleTuner's (Musubi) block swap. A block is moved in as a whole (adapter and buffers too) before its forward
  and copied out after it. In backward it is moved in again and stays, until its forward of the next step is over. What is simulated
  is a step after the first. Assumed: a weight that autograd saved in forward keeps its copy on the device until backward has used
  it, beside the one that the block gets (`module.to` gives a parameter new memory; the graph holds the old); copies are waited for.
* `Swapping.BUNDLED`: our runtime's (`advisor.runtime.swapping`). Only frozen parameters move. Each use brings a copy, which is dropped
  after it: nothing is copied out, and what autograd saves of a weight is a reference. In backward a block comes back when something
  of it is asked for, and goes when that has been released. On a device whose copies run beside the computation each block comes one
  use early.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from estimators.placement import Placement
from probes.profile import BUFFER, DESCRIBED, FROZEN, TRAINED, Profile, Weight
from probes.structure import Structure
from probes.tape import NEVER, Call, Ints


class Swapping(StrEnum):
    """Whose block swap."""

    TRAINER = "trainer"
    BUNDLED = "bundled"

    @property
    def moves(self) -> tuple[int, ...]:
        """Kinds of weights that move."""
        return (FROZEN, TRAINED, BUFFER, DESCRIBED) if self is Swapping.TRAINER else (FROZEN,)


@dataclass(frozen=True)
class Swap:
    """Which blocks are swapped, and how."""

    blocks: tuple[str, ...]
    how: Swapping


@dataclass(frozen=True)
class _Use:
    """One time that a block is brought."""

    block: str
    start: int
    end: int
    """New positions."""
    units: tuple[int, ...]
    """Units whose recomputation it serves."""


@dataclass(frozen=True)
class Life:
    """One copy of one weight on the device, from one new position to another."""

    birth: int
    death: int
    size: int
    """Bytes."""
    trained: bool


def managed_blocks(structure: Structure, count: int) -> tuple[str, ...]:
    """The last `count` blocks of the model, all but the first at most. Blocks that a trainer never groups (refiners) are not in the
    lists that it swaps."""
    names = [b.name for chain in structure.chains if chain.groupable for b in chain.blocks]
    count = min(count, len(names) - 1)
    return tuple(names[len(names) - count :]) if count > 0 else ()


def notes(swap: Swap, asked: int) -> list[str]:
    """What an answer with swapped blocks says about them."""
    found = []
    if asked > len(swap.blocks):
        found.append(
            f"--weights-offload blocks:{asked}: the model has {len(swap.blocks)} blocks to swap, its first one stays"
        )
    if swap.how is Swapping.TRAINER:
        found.append(
            "block swap as SimpleTuner does it: blocks that backward has brought in stay on the card until their next forward, so the "
            "peak is near that of the whole model; weights that autograd saved keep their old copies beside them (assumed from "
            "PyTorch's rules, not measured); copies are waited for, at the rate of page-locked memory"
        )
    else:
        found.append(
            "swapped blocks wait in page-locked host memory; their copies are assumed to run at the card's host link rate "
            "(not measured)"
        )
    return found


def moved_weights(profile: Profile, swap: Swap) -> Iterator[Weight]:
    """All weights that wait on the host between their uses."""
    for name in swap.blocks:
        yield from (w for w in profile.block_weights.get(name, ()) if w[1] in swap.how.moves)


class SwappedWeights:
    """The managed blocks' weights during one step.

    Args:
        ahead: copies run beside the computation.
    """

    def __init__(self, place: Placement, profile: Profile, swap: Swap, *, ahead: bool) -> None:
        self._place, self._tape, self._profile, self._swap = place, place.tape, profile, swap
        self.lives: list[Life] = []
        self.to_host = 0
        """Bytes copied out in a step."""
        self.from_host = 0
        self.waits = 0
        """Times that a copy back is waited for from its start, of those that could run beside the computation."""
        self.calls: list[tuple[int, int]] = []
        """[start, end) of the blocks in the forward pass; tape positions."""
        uses: list[_Use] = []
        for name in swap.blocks:
            calls = self._tape.calls.get(name, ())
            if not calls or not self._moving(name):
                continue
            self.calls += [(c.start, c.end) for c in calls]
            if swap.how is Swapping.TRAINER:
                self._trainers(self._moving(name), calls)
            else:
                uses += self._uses(name, calls)
        self.uses = len(uses)
        """Times that our runtime brings a block."""
        self._bring(sorted(uses, key=lambda use: use.start), ahead)

    def _moving(self, name: str) -> list[tuple[int, Weight]]:
        """(number, weight) of a block's weights that move."""
        weights = enumerate(self._profile.block_weights.get(name, ()))
        return [(i, w) for i, w in weights if w[1] in self._swap.how.moves]

    def _saved(self, calls: Sequence[Call]) -> Ints:
        """Numbers of what is saved while a block runs."""
        parts = [np.arange(*np.searchsorted(self._tape.saved_at, (c.start, c.end))) for c in calls]
        return np.concatenate(parts)

    def _add(self, birth: int, death: int, weight: Weight) -> None:
        self.lives.append(Life(birth, max(death, birth + 1), weight[0], weight[1] == TRAINED))

    def _last_release(self, saved: Ints, weight: int, kind: int) -> int:
        """New position at which backward is done with a weight; 0: it was not saved. A quantised one: with all of these, as every
        package keeps it for the product in backward, which the trace does not show."""
        mine = saved if kind == DESCRIBED else saved[self._tape.saved_weight[saved] == weight]
        released = self._tape.released_at[mine]
        return self._place.new_at(int(released.max())) if len(mine) else 0

    def _trainers(self, weights: Sequence[tuple[int, Weight]], calls: Sequence[Call]) -> None:
        p = self._place
        saved = self._saved(calls)
        kept = saved[p.saved_unit[saved] < 0]
        out = p.new_at(calls[-1].end)
        asked = self._tape.unpacked_at[kept]
        entries = [p.new_at(int(asked.min()))] if len(asked) and asked.min() < NEVER else []
        entries += [p.replay_of(u, calls[0].start) for u in self._replayed(saved)]
        for i, weight in weights:
            until = max(out, self._last_release(kept, i, weight[1]))
            if entries:
                self._add(0, until, weight)
                self._add(min(entries), int(NEVER), weight)
            else:
                self._add(p.new_at(calls[0].start), until, weight)
        total = sum(w[0] for _, w in weights)
        self.to_host += total
        self.from_host += total

    def _replayed(self, saved: Ints) -> list[int]:
        """Units in which something of the block was saved and that run again."""
        units = np.unique(self._place.saved_unit[saved])
        return [int(u) for u in units if u >= 0 and self._place.replayed_[u]]

    def _uses(self, name: str, calls: Sequence[Call]) -> list[_Use]:
        """When our runtime brings a block."""
        p, t = self._place, self._tape
        saved = self._saved(calls)
        moving = [i for i, _ in self._moving(name)]
        references = saved[(p.saved_unit[saved] < 0) & np.isin(t.saved_weight[saved], moving)]
        found = [_Use(name, p.new_at(c.start), p.new_at(c.end), ()) for c in calls]
        replays = [
            _Use(name, p.replay_of(u, start), p.replay_of(u, end), (u,))
            for u in self._replayed(saved)
            for start, end in self._inside(u, calls)
        ]
        asked = t.unpacked_at[references]
        if len(asked) and asked.min() < NEVER:  # while references are left, the block stays
            last = p.new_at(int(t.released_at[references].max()))
            joined = [r for r in replays if r.start <= last]
            starts = [p.new_at(int(asked.min())), *(r.start for r in joined)]
            ends = [last, *(r.end for r in joined)]
            found.append(_Use(name, min(starts), max(ends), tuple(u for r in joined for u in r.units)))
            replays = [r for r in replays if r not in joined]
        return found + replays

    def _bring(self, uses: Sequence[_Use], ahead: bool) -> None:
        """Copies of blocks for their uses; what recomputation saves of them stays until backward has used it."""
        before: _Use | None = None
        for use in uses:
            early = ahead and before is not None and before.block != use.block
            start = before.start if early and before is not None else use.start
            self.waits += not early
            saved = self._saved(self._tape.calls[use.block])
            mine = saved[np.isin(self._place.saved_unit[saved], use.units)] if use.units else saved[:0]
            for i, weight in self._moving(use.block):
                self._add(start, max(use.end, self._last_release(mine, i, weight[1])), weight)
                self.from_host += weight[0]
            before = use

    def _inside(self, unit: int, calls: Sequence[Call]) -> list[tuple[int, int]]:
        """Tape positions between which a unit's recomputation is in the block."""
        found = []
        for start, end in self._place.units[unit].ranges:
            for call in calls:
                low, high = max(start, call.start), min(end, call.end)
                if low < high:
                    found.append((low, high))
        return found


def sizes_left(all_sizes: Sequence[tuple[int, int]], moved: Sequence[int]) -> list[tuple[int, int]]:
    """(bytes, how many) without the moved tensors."""
    left: Counter[int] = Counter()
    for size, count in all_sizes:
        left[size] += count
    left.subtract(Counter(moved))
    return [(size, count) for size, count in sorted(left.items()) if count > 0]
