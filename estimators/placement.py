"""Where a schedule's checkpoints lie on the tape, and where their recomputations go.

Positions are event numbers. *Tape positions* count the recorded step, *new positions* the step with every recomputation inserted.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from estimators.schedule import Offloading, Resolution, Unit
from probes.tape import ATTENTION, NEVER, Call, Flags, Ints, Tape


class SimulationError(RuntimeError):
    """A schedule names modules that the profile does not have."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of the step. A unit whose module a block calls twice makes two of them."""

    offload_inputs: bool
    modules: tuple[str, ...]
    start: int
    """When its first module is called."""
    calls: tuple[int, ...]
    """When each of its modules is called."""
    ranges: tuple[tuple[int, int], ...]
    """[start, end) of each of its modules in the forward pass."""
    arguments: tuple[tuple[int, bool, int, int], ...]
    """(storage, movable, bytes, bytes with the gaps between its elements) of the tensors that it holds. Two views of one storage are
    two entries."""


def checkpoints(tape: Tape, unit: Unit) -> list[Checkpoint]:
    """The unit's checkpoints, as the runtime opens them: a call of the module behind the last one joins the open checkpoint,
    any other call begins one.

    Raises:
        SimulationError: a module was not called.
    """
    for module in unit.modules:
        if not tape.calls.get(module):
            raise SimulationError(f"the profile has no call of {module}")
    made = sorted(
        ((call, i) for i, module in enumerate(unit.modules) for call in tape.calls[module]), key=lambda c: c[0].start
    )
    groups: list[list[tuple[Call, int]]] = []
    for call, i in made:
        if groups and groups[-1][-1][1] + 1 == i:
            groups[-1].append((call, i))
        else:
            groups.append([(call, i)])
    return [_checkpoint(tape, unit, group) for group in groups]


def _checkpoint(tape: Tape, unit: Unit, group: Sequence[tuple[Call, int]]) -> Checkpoint:
    first, module = group[0][0], unit.modules[group[0][1]]
    start = first.start
    extents = [int(tape.view_extent[v]) for v in first.argument_views]
    arguments = list(zip(first.arguments, first.movable, first.argument_bytes, extents, strict=True))
    if unit.from_child is not None:
        name = f"{module}.{unit.from_child}"
        inside = [c.start for c in tape.calls.get(name, ()) if first.start <= c.start < first.end]
        if not inside:
            raise SimulationError(f"the profile has no call of {name}")
        start = inside[0]
        reads = tape.inner_reads.get(f"{module}@{unit.from_child}", ())
        given = set(first.arguments)
        arguments = [entry for entry in arguments if entry[0] in reads]
        arguments += [
            (sid, True, int(tape.size[sid]), int(tape.size[sid]))
            for sid in reads
            if sid not in given and first.start <= tape.birth[sid] < first.end
        ]
    return Checkpoint(
        unit.offload_inputs,
        tuple(unit.modules[i] for _, i in group),
        first.start,
        tuple(c.start for c, _ in group),
        tuple((start if c is first else c.start, c.end) for c, _ in group),
        tuple(arguments),
    )


def _without(whole: tuple[int, int, int], skipped: Sequence[AttentionCall]) -> Iterator[tuple[int, int, int]]:
    """A (start, end, unit) range without the calls that its recomputation skips."""
    start, end, unit = whole
    for call in skipped:
        if call.unit == unit and start <= call.start and call.end <= end:
            yield start, call.start, unit
            start = call.end
    yield start, end, unit


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention submodule whose saved tensors go to the host."""

    start: int
    end: int
    block_end: int
    """When its block returns."""
    arguments: tuple[int, ...]
    """Storages."""
    results: tuple[tuple[int, int], ...]
    """(storage, view) of what it returned."""
    unit: int
    """Unit whose recomputation skips it, or -1."""


class Placement:
    """One schedule on one tape. Arrays ending in an underscore are one entry a unit; the others one a saved tensor or storage."""

    def __init__(self, tape: Tape, resolution: Resolution) -> None:
        self.tape = tape
        self.bundled = resolution.offloading is Offloading.BUNDLED
        self.units = [made for unit in resolution.units for made in checkpoints(tape, unit)]
        self.calls = self._attention_calls(resolution)
        """With `Offloading.BUNDLED`: the offloaded attention calls, in order."""
        self._lay_ranges()
        self.attention = self._attention_saves(resolution)
        """Saved tensors that attention offload takes out of the checkpoints' hands."""
        self.saved_unit = np.where(self.attention, -1, self.locate(tape.saved_at)[0])
        """Unit whose checkpoint handles a saved tensor, or -1."""
        for call in self.calls:
            if call.unit >= 0:
                self._hand_over_arguments(call)
        self.birth_unit, self._birth_range = self.locate(tape.birth)
        """Unit in whose forward part a storage is born, or -1."""
        self._find_bounds()
        self._place_replays()

    def _attention_calls(self, resolution: Resolution) -> list[AttentionCall]:
        if resolution.offloading is not Offloading.BUNDLED:
            return []
        owner = {
            (name, start): u
            for u, made in enumerate(self.units)
            for name, start in zip(made.modules, made.calls, strict=True)
        }
        found = []
        for name, block in zip(resolution.offloaded_attention, resolution.attention_blocks, strict=True):
            for around in self.tape.calls.get(block, ()):
                for call in self.tape.calls.get(name, ()):
                    if around.start <= call.start < around.end:
                        results = tuple(zip(call.results, call.result_views, strict=True))
                        unit = owner.get((block, around.start), -1)
                        found.append(AttentionCall(call.start, call.end, around.end, call.arguments, results, unit))
        return sorted(found, key=lambda c: c.start)

    def _hand_over_arguments(self, call: AttentionCall) -> None:
        """What skipped attention saves of its own arguments is the checkpoint's."""
        low, high = np.searchsorted(self.tape.saved_at, (call.start, call.end))
        given = np.zeros(len(self.tape.saved_at), bool)
        given[low:high] = np.isin(self.tape.saved_storage[low:high], call.arguments)
        self.attention &= ~given
        self.saved_unit[given] = call.unit

    def _lay_ranges(self) -> None:
        flat = sorted((start, end, u) for u, made in enumerate(self.units) for start, end in made.ranges)
        skipped = [c for c in self.calls if c.unit >= 0]
        if skipped:
            flat = [piece for whole in flat for piece in _without(whole, skipped)]
        self.range_start = np.array([f[0] for f in flat], np.int64)
        self.range_end = np.array([f[1] for f in flat], np.int64)
        self.range_unit = np.array([f[2] for f in flat], np.int64)
        self.offset = np.zeros(len(flat), np.int64)
        """Events of the same unit in earlier ranges."""
        done = [0] * len(self.units)
        for r, (start, end, u) in enumerate(flat):
            self.offset[r] = done[u]
            done[u] += end - start

    def _attention_saves(self, resolution: Resolution) -> Flags:
        found = np.zeros(len(self.tape.saved_at), bool)
        spans: Iterable[tuple[int, int]] = ((call.start, call.end) for call in self.calls)
        if not self.bundled:
            spans = self._wrapped(resolution)
        for span in spans:
            low, high = np.searchsorted(self.tape.saved_at, span)
            found[low:high] = True
        if resolution.offloading is Offloading.KERNEL:
            found &= self._kernel_saves()
        return found

    def _wrapped(self, resolution: Resolution) -> Iterator[tuple[int, int]]:
        """What the executor's hooks are around: the attention modules, or their blocks up to the end of attention."""
        calls = self.tape.calls
        if not resolution.attention_from_block:
            for name in resolution.offloaded_attention:
                yield from ((call.start, call.end) for call in calls.get(name, ()))
            return
        for name, block in zip(resolution.offloaded_attention, resolution.attention_blocks, strict=True):
            for call in calls.get(name, ()):
                around = (b.start for b in calls.get(block, ()) if b.start <= call.start < b.end)
                yield max(around, default=call.start), call.end

    def _kernel_saves(self) -> Flags:
        """What attention kernels themselves save: the unbroken runs of saved tensors just before and just after each."""
        found = np.zeros(len(self.tape.saved_at), bool)
        saved = self.tape.saved_at
        for at in self.tape.op_at[self.tape.op_kind == ATTENTION]:
            middle = int(np.searchsorted(saved, at))
            low = high = middle
            while low > 0 and saved[low - 1] == at - (middle - low) - 1:
                low -= 1
            while high < len(saved) and saved[high] == at + (high - middle) + 1:
                high += 1
            found[low:high] = True
        return found

    def _find_bounds(self) -> None:
        t, n = self.tape, len(self.units)
        inside = self.saved_unit >= 0
        owner = self.saved_unit[inside]
        self.stop_ = np.full(n, -1, np.int64)
        """Position of the unit's last saved tensor: recomputation ends there."""
        trigger = np.full(n, NEVER, np.int64)
        self.finish_ = np.full(n, -1, np.int64)
        """When backward releases its last saved tensor; -1: it saves none."""
        released = np.where(t.released_at < NEVER, t.released_at, -1)
        np.maximum.at(self.stop_, owner, t.saved_at[inside])
        np.minimum.at(trigger, owner, t.unpacked_at[inside])
        np.maximum.at(self.finish_, owner, released[inside])
        self.replayed_ = (trigger < NEVER) & (self.stop_ >= 0)
        self._trigger = trigger

    def _place_replays(self) -> None:
        n = len(self.units)
        self.length_ = np.zeros(n, np.int64)
        """Events of the recomputation."""
        if n:
            stop = np.maximum(self.stop_, 0)
            r = self.locate(stop)[1]
            done = np.minimum(stop + 1, self.range_end[r]) - self.range_start[r]
            self.length_ = np.where(self.replayed_, self.offset[r] + done, 0)
        order = np.argsort(self._trigger, kind="stable")[: int(self.replayed_.sum())]
        self._inserted_at = self._trigger[order]
        self._inserted = np.concatenate([[0], np.cumsum(self.length_[order])])
        self._steps: tuple[list[int], list[int]] | None = None
        """The same two as lists, for single positions."""
        self.replay_start_ = np.zeros(n, np.int64)
        """New position at which the recomputation starts."""
        self.replay_start_[order] = self._inserted_at + self._inserted[:-1]

    @property
    def length(self) -> int:
        """Events of the whole step."""
        return int(self.tape.length + self._inserted[-1] + 2)

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """(unit or -1, range) of tape positions."""
        if not len(self.range_start):
            return np.full(len(positions), -1, np.int64), np.zeros(len(positions), np.int64)
        r = np.searchsorted(self.range_start, positions, side="right") - 1
        safe = np.maximum(r, 0)
        inside = (r >= 0) & (positions < self.range_end[safe])
        return np.where(inside, self.range_unit[safe], -1), safe

    def new(self, positions: Ints) -> Ints:
        """Tape positions as new positions; NEVER stays."""
        moved = positions + self._inserted[np.searchsorted(self._inserted_at, positions, side="right")]
        return np.where(positions < NEVER, moved, NEVER)

    def new_at(self, position: int) -> int:
        """One tape position as a new position."""
        if position >= NEVER:
            return int(NEVER)
        if self._steps is None:
            self._steps = (self._inserted_at.tolist(), self._inserted.tolist())
        at, inserted = self._steps
        return position + inserted[bisect.bisect_right(at, position)]

    def replay_of(self, unit: int, position: int) -> int:
        """New position at which a unit's recomputation comes to a tape position of its forward part."""
        r = max(int(np.searchsorted(self.range_start, position, side="right")) - 1, 0)
        start, last = int(self.replay_start_[unit]), int(self.replay_start_[unit] + self.length_[unit])
        if self.range_unit[r] != unit:
            return last
        within = int(self.offset[r]) + min(position, int(self.range_end[r])) - int(self.range_start[r])
        return min(start + within, last)

    def recomputed(self) -> tuple[Ints, Ints, Ints]:
        """(storage, birth, death by Python) of the second copies of storages that recomputation makes; new positions."""
        t = self.tape
        if not len(self.units):
            none = np.zeros(0, np.int64)
            return none, none, none
        unit = np.maximum(self.birth_unit, 0)
        ids = np.flatnonzero((self.birth_unit >= 0) & self.replayed_[unit] & (t.birth <= self.stop_[unit]))
        owner, r = self.birth_unit[ids], self._birth_range[ids]
        start, last = self.replay_start_[owner], self.replay_start_[owner] + self.length_[owner]
        birth = start + self.offset[r] + t.birth[ids] - self.range_start[r]
        # a death between two of the unit's ranges (the caller's loop moving on) happens at the end of the earlier one
        r = np.maximum(np.searchsorted(self.range_start, t.death[ids], side="right") - 1, 0)
        within = start + self.offset[r] + np.minimum(t.death[ids], self.range_end[r]) - self.range_start[r]
        death = np.minimum(np.where(self.range_unit[r] == owner, within, last), last)
        return ids, birth, np.maximum(death, birth + 1)
