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
from probes.tape import NEVER, Call, Flags, Ints


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

    block: Managed
    start: int
    end: int
    """New positions."""
    units: tuple[int, ...]
    """Units whose recomputation it serves."""


@dataclass(frozen=True)
class Managed:
    """A swapped block as the tape has it: the same for every schedule."""

    calls: tuple[Call, ...]
    number: Ints
    """Of each weight that moves: its position among the block's weights."""
    size: Ints
    """Bytes of each."""
    trained: Flags
    described: Flags
    """A quantised one. Every package keeps it for the product in backward, which the trace does not show."""
    saved: Ints
    """Numbers of what is saved while the block runs."""
    saved_weight: Ints
    """For each: which of the moving weights it is, or -1."""

    @staticmethod
    def of(profile: Profile, name: str, how: Swapping) -> Managed:
        """Reads it from a profile."""
        tape = profile.tape
        calls = tape.calls.get(name, ())
        weights = profile.block_weights.get(name, ())
        number = np.array([i for i, w in enumerate(weights) if w[1] in how.moves], np.int64)
        parts = [np.arange(*np.searchsorted(tape.saved_at, (c.start, c.end))) for c in calls]
        saved = np.concatenate([np.zeros(0, np.int64), *parts])
        place = np.full(len(weights) + 1, -1, np.int64)
        place[number] = np.arange(len(number))
        weight = tape.saved_weight[saved]
        return Managed(
            calls,
            number,
            np.array([weights[i][0] for i in number], np.int64),
            np.array([weights[i][1] == TRAINED for i in number], bool),
            np.array([weights[i][1] == DESCRIBED for i in number], bool),
            saved,
            place[np.where(weight < len(weights), weight, -1)],
        )


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
        blocks: those of the swap, in its order.
        ahead: copies run beside the computation.
    """

    def __init__(self, place: Placement, how: Swapping, blocks: Sequence[Managed], *, ahead: bool) -> None:
        self._place, self._tape = place, place.tape
        self._lives: list[tuple[Ints, Ints, Ints, Flags]] = []
        self.to_host = 0
        """Bytes copied out in a step."""
        self.from_host = 0
        self.waits = 0
        """Times that a copy back is waited for from its start, of those that could run beside the computation."""
        self.calls: list[tuple[int, int]] = []
        """[start, end) of the blocks in the forward pass; tape positions."""
        uses: list[_Use] = []
        for block in blocks:
            if not block.calls or not len(block.number):
                continue
            self.calls += [(c.start, c.end) for c in block.calls]
            if how is Swapping.TRAINER:
                self._trainers(block)
            else:
                uses += self._uses(block)
        self.uses = len(uses)
        """Times that our runtime brings a block."""
        self._bring(sorted(uses, key=lambda use: use.start), ahead)
        none = np.zeros(0, np.int64)
        columns = zip((none, none, none, none.astype(bool)), *self._lives, strict=True)
        self.birth, self.death, self.size, self.trained = (np.concatenate(column) for column in columns)
        """Of every copy of a weight on the device: new positions from which and until which it is there, bytes, whether it is trained."""

    def _add(self, block: Managed, birth: Ints | int, death: Ints | int) -> None:
        """A copy of each of a block's weights."""
        births = np.broadcast_to(np.asarray(birth, np.int64), block.size.shape)
        self._lives.append((births, np.maximum(death, births + 1), block.size, block.trained))

    def _last_release(self, block: Managed, counted: Flags) -> Ints:
        """New positions at which backward is done with each weight, by those of what the block saved that count (all of them, for a
        quantised one); 0: none of them is it."""
        released = self._tape.released_at[block.saved]
        mine = counted & (block.saved_weight >= 0)
        last = np.full(len(block.size), -1, np.int64)
        np.maximum.at(last, block.saved_weight[mine], released[mine])
        last[block.described] = released[counted].max(initial=-1)
        return np.where(last >= 0, self._place.new(np.maximum(last, 0)), 0)

    def _trainers(self, block: Managed) -> None:
        p, calls = self._place, block.calls
        unit = p.saved_unit[block.saved]
        out = p.new_at(calls[-1].end)
        asked = self._tape.unpacked_at[block.saved[unit < 0]]
        entries = [p.new_at(int(asked.min()))] if len(asked) and asked.min() < NEVER else []
        entries += [p.replay_of(u, calls[0].start) for u in self._replayed(unit)]
        until = np.maximum(out, self._last_release(block, unit < 0))
        if entries:
            self._add(block, 0, until)
            self._add(block, min(entries), int(NEVER))
        else:
            self._add(block, p.new_at(calls[0].start), until)
        total = int(block.size.sum())
        self.to_host += total
        self.from_host += total

    def _replayed(self, saved_unit: Ints) -> list[int]:
        """Units in which something of a block was saved and that run again."""
        return [u for u in sorted(set(saved_unit.tolist())) if u >= 0 and self._place.replayed_[u]]

    def _uses(self, block: Managed) -> list[_Use]:
        """When our runtime brings a block."""
        p, t = self._place, self._tape
        unit = p.saved_unit[block.saved]
        references = block.saved[(unit < 0) & (block.saved_weight >= 0)]
        found = [_Use(block, p.new_at(c.start), p.new_at(c.end), ()) for c in block.calls]
        replays = [
            _Use(block, p.replay_of(u, start), p.replay_of(u, end), (u,))
            for u in self._replayed(unit)
            for start, end in self._inside(u, block.calls)
        ]
        asked = t.unpacked_at[references]
        if len(asked) and asked.min() < NEVER:  # while references are left, the block stays
            last = p.new_at(int(t.released_at[references].max()))
            joined = [r for r in replays if r.start <= last]
            starts = [p.new_at(int(asked.min())), *(r.start for r in joined)]
            ends = [last, *(r.end for r in joined)]
            found.append(_Use(block, min(starts), max(ends), tuple(u for r in joined for u in r.units)))
            replays = [r for r in replays if r.start > last]
        return found + replays

    def _bring(self, uses: Sequence[_Use], ahead: bool) -> None:
        """Copies of blocks for their uses; what recomputation saves of them stays until backward has used it."""
        before: _Use | None = None
        for use in uses:
            block = use.block
            early = ahead and before is not None and before.block is not block
            start = before.start if early and before is not None else use.start
            self.waits += not early
            unit = self._place.saved_unit[block.saved]
            again = np.zeros(len(unit), bool)
            for u in use.units:
                again |= unit == u
            self._add(block, start, np.maximum(use.end, self._last_release(block, again)))
            self.from_host += int(block.size.sum())
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
