"""Peak memory of a schedule: the step's tape, replayed with every checkpoint's recomputation put where it happens.

All sizes are bytes, all positions are event numbers. What is simulated, per checkpoint unit (non-reentrant checkpoint of
PyTorch): in the forward pass nothing that is saved inside is held, but the tensor arguments are; at the first saved tensor
that backward asks for, the unit's forward runs again up to its last saved tensor; every recomputed saved tensor is held
until backward has used it, the arguments until the unit's last one is released.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from estimators.host_copies import AttentionCopies, Fetch, HostCopy, Pieces, run_ahead
from estimators.placement import Placement, SimulationError
from estimators.schedule import Resolution
from estimators.swapping import Managed, Swap, SwappedWeights, Swapping
from probes.profile import Profile
from probes.tape import NEVER, Ints

__all__ = ["Memory", "Replay", "Resident", "SimulationError", "Span", "exact"]

RNG_STATE_BYTES = 5056
"""The CPU generator's state, stored on the host for every module in a checkpoint (torch.get_rng_state), once more while a checkpoint
is replayed, and behind every skipped attention with dropout."""


@dataclass(frozen=True)
class Span:
    """One unit's recomputation, for the step-time model: forward positions [start, stop] run again."""

    ranges: tuple[tuple[int, int], ...]
    stop: int


@dataclass(frozen=True)
class Memory:
    """Result of a simulation, bytes."""

    peak: int
    """Largest allocated memory on the device, everything included."""
    phase: str
    """Where: forward, backward or optimizer."""
    breakdown: Mapping[str, int]
    """What is allocated at the peak: weights, adapter, gradients, optimizer, saved, transient, workspace, inputs."""
    host_peak: int
    """Largest memory held on the host for offloaded tensors."""
    to_host: int
    """Bytes copied from the device to the host in a step."""
    from_host: int
    """Bytes copied back."""
    copied_tensors: int
    """How many tensors are copied to the host in a step."""
    recomputed: tuple[Span, ...]
    copy_groups: int = 1
    """Groups in which copies come back; all but the first can do so beside the computation."""
    weights_to_host: int = 0
    """Bytes of swapped blocks copied out in a step."""
    weights_from_host: int = 0
    swapped_calls: tuple[tuple[int, int], ...] = ()
    """[start, end) of the swapped blocks in the forward pass; tape positions."""
    waits: float = 1.0
    """Share of their copies back that cannot run beside the computation."""


@dataclass(frozen=True)
class Resident:
    """What is on the device during the whole step, bytes (already rounded as the device does)."""

    weights: int
    adapter: int
    optimizer: int
    inputs: int
    workspace: int
    optimizer_transient: int
    """Extra at the optimizer step."""
    device_is_host: bool
    """A CPU run: host copies count as device memory."""
    gradients_held: bool = False
    """Gradients of earlier batches are there from the start (accumulation)."""
    kept: int = 0
    """What the user keeps on the device besides."""
    swap: Swap | None = None
    """Blocks whose weights come and go; `weights` and `adapter` do not count them (on a CPU, they count what waits on the host)."""

    @property
    def total(self) -> int:
        return self.weights + self.adapter + self.optimizer + self.inputs + self.workspace + self.kept


Counter = Callable[[Ints], Ints]
"""Requested bytes -> bytes that a device counts as allocated (`Device`'s rounding)."""


def exact(sizes: Ints) -> Ints:
    """A CPU's allocator counts what was asked for."""
    return sizes


_Lives = tuple[Ints, Ints, Ints, Ints]
"""Births, deaths (new positions), bytes as requested and as counted."""


class _Ledger:
    """Collects when what is allocated.

    Args:
        counted: how the device counts an allocation.
    """

    def __init__(self, counted: Counter) -> None:
        self._counted = counted
        self._births: list[Ints] = []
        self._deaths: list[Ints] = []
        self._sizes: list[Ints] = []
        self._counts: list[Ints] = []

    def add(self, birth: Ints, death: Ints, size: Ints, counts: Ints | None = None) -> None:
        """
        Args:
            birth: and `death`: new positions; a death of NEVER is none.
            size: as requested.
            counts: as the device counts it, where that is known.
        """
        self._births.append(birth)
        self._deaths.append(death)
        self._sizes.append(size)
        self._counts.append(self._counted(size) if counts is None else counts)

    @cached_property
    def lives(self) -> _Lives:
        """All of them, once all are there."""
        none = np.zeros(0, np.int64)
        births, deaths, sizes, counts = (
            np.concatenate([none, *column]) for column in (self._births, self._deaths, self._sizes, self._counts)
        )
        return births, deaths, sizes, counts

    def curve(self, length: int) -> Ints:
        """Bytes allocated after each event."""
        births, deaths, _, sizes = self.lives
        if not len(births):
            return np.zeros(length, np.int64)
        dies = deaths < NEVER
        change = np.bincount(births, weights=sizes, minlength=length)
        change -= np.bincount(deaths[dies], weights=sizes[dies], minlength=length)
        return np.cumsum(change).astype(np.int64)


@dataclass(frozen=True)
class _Key:
    """What a simulated step depends on, beside the profile and how the device counts."""

    resolution: Resolution
    device_is_host: bool
    gradients_held: bool
    swap: Swap | None


@dataclass(frozen=True)
class _Peaks:
    """One schedule's step, without what is resident during all of it."""

    passes: Memory
    """At the largest of forward and backward."""
    end: Memory
    """At the optimizer's step, without what that needs besides."""

    def to_json(self) -> list[Any]:
        """As lists, numbers and texts: the values of `passes`, then those of `end` that differ."""
        spans = [[span.ranges, span.stop] for span in self.passes.recomputed]
        values = vars(self.passes) | {"recomputed": spans, "breakdown": dict(self.passes.breakdown)}
        return [values, {name: vars(self.end)[name] for name in _AT_END}]

    @staticmethod
    def from_json(stored: Sequence[Any]) -> _Peaks:
        """The same again."""
        values, at_end = stored
        spans = tuple(Span(tuple((start, end) for start, end in ranges), stop) for ranges, stop in values["recomputed"])
        calls = tuple((start, end) for start, end in values["swapped_calls"])
        passes = Memory(**values | {"recomputed": spans, "swapped_calls": calls})
        return _Peaks(passes, replace(passes, **at_end))


_AT_END = ("peak", "phase", "breakdown")
"""What of a step's end differs from its passes."""


@dataclass
class _Traffic:
    """Copies between device and host."""

    to_host: int = 0
    from_host: int = 0
    tensors: int = 0
    groups: int = 1


class Replay:
    """A profile prepared for many simulations on one kind of device.

    Args:
        counted: how the device counts an allocation.
        stored: results of earlier simulations, read and added to (`Simulations.steps`).
    """

    def __init__(self, profile: Profile, counted: Counter, stored: dict[str, Any] | None = None) -> None:
        self.profile = profile
        self.tape = profile.tape
        self.counted = counted
        self.size = counted(profile.tape.size)
        self.gradient = (profile.tape.death >= NEVER) & (profile.tape.birth >= profile.tape.backward_start)
        self.pieces = Pieces(profile.tape)
        self._stored = {} if stored is None else stored
        self._known: dict[_Key, _Peaks] = {}
        self._last: tuple[_Key, _Lives] | None = None
        """What was simulated last: the allocator's stream of it is often asked for next."""
        self._managed: dict[tuple[str, Swapping], Managed] = {}

    def managed(self, swap: Swap) -> list[Managed]:
        """The swapped blocks as the tape has them."""
        for name in swap.blocks:
            if (name, swap.how) not in self._managed:
                self._managed[name, swap.how] = Managed.of(self.profile, name, swap.how)
        return [self._managed[name, swap.how] for name in swap.blocks]

    def run(self, resolution: Resolution, resident: Resident, *, stored: bool = False) -> Memory:
        """Simulates one step, once for all devices: what is resident during the whole step only adds to it.

        Args:
            stored: the result is looked for among the stored ones, and added to them.

        Raises:
            SimulationError: the resolution does not belong to this profile.
        """
        key = self._key(resolution, resident)
        if key not in self._known:
            self._known[key] = self._found(key) if stored else self._simulate(key)
        peaks = self._known[key]
        found, extra = peaks.passes, 0
        if peaks.end.peak + resident.optimizer_transient > found.peak:
            found, extra = peaks.end, resident.optimizer_transient
        parts = {
            name: found.breakdown[name] + getattr(resident, name)
            for name in ("weights", "adapter", "optimizer", "inputs", "workspace")
        }
        parts["transient"] = found.breakdown["transient"] + extra
        parts |= {"kept": resident.kept} if resident.kept else {}
        return replace(found, peak=found.peak + resident.total + extra, breakdown={**found.breakdown, **parts})

    def events(self, resolution: Resolution, resident: Resident) -> tuple[Ints, Ints]:
        """The step as a stream for the allocator's simulation: (ids, +bytes when allocated, -bytes when freed), in order.
        Sizes are as requested."""
        key = self._key(resolution, resident)
        if self._last is not None and self._last[0] == key:
            births, deaths, sizes, _ = self._last[1]
        else:
            births, deaths, sizes, _ = _Step(self, key).device.lives
        ids = np.arange(len(sizes))
        dies = deaths < NEVER
        frees_first = np.concatenate([2 * births + 1, 2 * deaths[dies]])
        order = np.argsort(frees_first, kind="stable")
        return np.concatenate([ids, ids[dies]])[order], np.concatenate([sizes, -sizes[dies]])[order]

    def _key(self, resolution: Resolution, resident: Resident) -> _Key:
        return _Key(resolution, resident.device_is_host, resident.gradients_held, resident.swap)

    def _simulate(self, key: _Key) -> _Peaks:
        step = _Step(self, key)
        self._last = key, step.device.lives
        return step.peaks()

    def _found(self, key: _Key) -> _Peaks:
        """The stored result, or a new one, then stored."""
        name = hashlib.sha256(repr(key).encode()).hexdigest()[:24]
        if name in self._stored:
            with contextlib.suppress(TypeError, ValueError, LookupError, AttributeError):  # of another form: made anew
                return _Peaks.from_json(self._stored[name])
        made = self._simulate(key)
        self._stored[name] = made.to_json()
        return made


class _Step:
    """One simulated step: fills the device's and the host's ledger."""

    def __init__(self, replay: Replay, key: _Key) -> None:
        self.replay, self.key = replay, key
        self.tape = replay.tape
        self.place = Placement(replay.tape, key.resolution)
        self.size = replay.size
        self.device, self.host, self.traffic = _Ledger(replay.counted), _Ledger(exact), _Traffic()
        t, p = self.tape, self.place
        self._stays = t.saved_storage < 0
        inside = (p.saved_unit >= 0) & ~self._stays
        self._storage, self._unit, self._release = t.saved_storage[inside], p.saved_unit[inside], t.released_at[inside]
        self._own = p.birth_unit[self._storage] == self._unit
        """Of the tensors saved inside units: born in the same unit, so that recomputation makes them anew."""
        self._chosen = AttentionCopies(p, replay.pieces)
        self._returned = np.isin(self._storage, list(self._chosen.returned))
        """Of the tensors saved inside units: results of attention that recomputation takes from the host."""
        self._forward()
        self._recompute()
        if not p.bundled:
            self._attention()
        self.swapped = (
            None
            if key.swap is None
            else SwappedWeights(p, key.swap.how, replay.managed(key.swap), ahead=not key.device_is_host)
        )
        if self.swapped is not None:
            self.device.add(self.swapped.birth, self.swapped.death, self.swapped.size)
        if key.device_is_host:
            self.device.add(*self.host.lives)

    def _forward(self) -> None:
        """Storages of the recorded step: held by Python, by what is saved outside checkpoints, and by checkpoint arguments."""
        t, p = self.tape, self.place
        death = t.death.copy()
        leaves = self._chosen.moved if p.bundled else p.attention & t.saved_movable
        holds = ~self._stays & (p.saved_unit < 0) & ~leaves
        np.maximum.at(death, t.saved_storage[holds], t.released_at[holds])
        on_host = self._arguments(death)
        foreign = ~self._own & ~self._returned
        if len(on_host):
            foreign &= ~np.isin(self._pair(self._unit, self._storage), on_host)
        np.maximum.at(death, self._storage[foreign], self._release[foreign])
        self.death = death
        gone = p.new(death)
        for copy in self._copied:
            if copy.is_original:
                gone[copy.storage] = max(gone[copy.storage], copy.copied)
        born = p.new(t.birth)
        if self.key.gradients_held:
            # a new gradient is added to the one that is there, then goes
            added = self.replay.gradient
            gone = np.where(added, born + 1, gone)
            held = self.tape.size[added]
            self.device.add(np.zeros_like(held), np.full_like(held, NEVER), held, self.size[added])
        self.device.add(born, gone, self.tape.size, self.size)

    def _pair(self, unit: Ints, storage: Ints) -> Ints:
        """One number for a unit and a storage."""
        return unit * len(self.size) + storage

    def _arguments(self, death: Ints) -> Ints:
        """Lets every unit hold its arguments (raising `death`) or copy them to the host; returns the copied pairs."""
        p = self.place
        self._copied: list[HostCopy] = []
        on_host: list[tuple[int, int, int, int, int]] = []
        held: list[tuple[int, int]] = []
        states: list[tuple[int, int, int]] = []
        for u, made in enumerate(p.units):
            finish = int(p.finish_[u])
            if finish < 0:
                continue
            for sid, movable, size, extent in made.arguments:
                if made.offload_inputs and movable:
                    on_host.append((u, sid, made.start, size, extent))
                else:
                    held.append((sid, finish))
            states.append((made.start, finish, RNG_STATE_BYTES * len(made.modules)))
        if held:
            sids, until = np.array(held, np.int64).T
            np.maximum.at(death, sids, until)
        if self.key.device_is_host and self.replay.profile.workload.lora_dropout > 0:
            for call in p.calls:
                if call.unit >= 0 and p.finish_[call.unit] >= 0:
                    states.append((call.end, int(p.finish_[call.unit]), RNG_STATE_BYTES))
        if self.key.device_is_host and states:
            starts, finishes, sizes = np.array(states, np.int64).T
            self.host.add(p.new(starts), p.new(finishes), sizes)
            begin, length = p.replay_start_[p.replayed_], p.length_[p.replayed_]
            self.host.add(begin, begin + length, np.full(len(begin), RNG_STATE_BYTES, np.int64))
        if p.bundled:
            self._copy_once(on_host)
        if not on_host:
            return np.zeros(0, np.int64)
        copies = np.array(on_host, np.int64)
        if not p.bundled:
            self._inputs_on_host(copies)
        return self._pair(copies[:, 0], copies[:, 1])

    def _copy_once(self, on_host: list[tuple[int, int, int, int, int]]) -> None:
        """Everything that our runtime moves: checkpoint inputs (rows of unit, storage, start, bytes, bytes with gaps) and attention's."""
        p = self.place
        found = self._chosen.copies()
        in_turn = self._chosen.in_turn(found) if self.key.device_is_host else []
        known = {(c.storage, 0): c for c in found if c.restored <= c.size}
        views: dict[tuple[int, int], int] = {}
        rows = np.array(on_host, np.int64).reshape(-1, 5)
        moments = np.stack([rows[:, 2], p.finish_[rows[:, 0]], self._last_use(rows[:, 0], rows[:, 1])], 1)
        for (u, sid, start, size, extent), (at, finish, held) in zip(on_host, p.new(moments).tolist(), strict=True):
            fetches = []
            if p.replayed_[u]:
                begin = int(p.replay_start_[u])
                fetches = [Fetch(begin, max(held, begin + int(p.length_[u])), start)]
            nth = views.get((u, sid), 0)  # several views of one storage among a unit's arguments are copied one by one
            views[u, sid] = nth + 1
            copy = known.get((sid, nth))
            if copy is None or copy.size < size:
                # the original goes when Python lets go of it
                known[sid, nth] = HostCopy(sid, size, start, at, finish, fetches, restored=extent)
                found.append(known[sid, nth])
                continue
            copy.copied, copy.released = min(copy.copied, at), max(copy.released, finish)
            copy.fetches += fetches
        if not self.key.device_is_host:
            run_ahead(found)
        self._copied = found
        if self.key.device_is_host:
            moments, extra = np.array(in_turn, np.int64).reshape(-1, 2).T
            self.host.add(moments, moments + 1, extra)
        rows = np.array([(c.copied, c.released, c.size) for c in found], np.int64).reshape(-1, 3)
        self.host.add(rows[:, 0], rows[:, 1], rows[:, 2])
        back = np.array([(f.start, f.end, c.device_size) for c in found for f in c.fetches], np.int64).reshape(-1, 3)
        self.device.add(back[:, 0], back[:, 1], back[:, 2])
        self.traffic.to_host += int(rows[:, 2].sum())
        self.traffic.from_host += sum(c.size * len(c.fetches) for c in found)
        self.traffic.tensors += len(found)
        self.traffic.groups = max(1, len({f.group for c in found for f in c.fetches}))

    def _last_use(self, unit: Ints, storage: Ints) -> Ints:
        """Tape positions at which backward is done with what units saved of storages; 0: nothing."""
        asked = np.zeros(len(self.size), bool)
        asked[storage] = True
        mine = asked[self._storage]
        pairs, where = np.unique(self._pair(self._unit[mine], self._storage[mine]), return_inverse=True)
        last = np.zeros(len(pairs) + 1, np.int64)
        np.maximum.at(last, where, self._release[mine])
        wanted = self._pair(unit, storage)
        at = np.searchsorted(pairs, wanted)
        return np.where(np.append(pairs, -1)[at] == wanted, last[at], 0)

    def _inputs_on_host(self, copies: Ints) -> None:
        """Host copies of checkpoint inputs, and the device copies that recomputation makes of them.

        Args:
            copies: rows of (unit, storage, start of the call, bytes, bytes with gaps: these copies have none).
        """
        p = self.place
        unit, sid, start, size, _ = copies.T
        self.host.add(p.new(start), p.new(p.finish_[unit]), size)
        self.traffic.to_host += int(size.sum())
        self.traffic.tensors += len(size)
        back = p.replayed_[unit]
        unit, sid, size = unit[back], sid[back], size[back]
        self.traffic.from_host += int(size.sum())
        held = p.new(self._last_use(unit, sid))
        first = p.replay_start_[unit]
        self.device.add(first, np.maximum(held, first + p.length_[unit]), size)

    def _recompute(self) -> None:
        """Second copies of storages, held until backward has used what was saved of them."""
        ids, birth, death = self.place.recomputed()
        until = np.full(len(self.size), -1, np.int64)
        released = self.place.new(np.minimum(self._release[self._own], self.tape.length))
        np.maximum.at(until, self._storage[self._own], released)
        self.device.add(birth, np.maximum(death, until[ids]), self.tape.size[ids], self.size[ids])

    def _attention(self) -> None:
        """Attention saves that wait on the host: copied at once, again in recomputation, and fetched one by one."""
        t, p = self.tape, self.place
        moved = np.flatnonzero(p.attention & t.saved_movable & ~self._stays)
        if not len(moved):
            return
        size = t.saved_bytes[moved]
        twice = p.locate(t.saved_at[moved])[0] >= 0
        self.traffic.to_host += int(size.sum() + size[twice].sum())
        self.traffic.tensors += len(moved) + int(twice.sum())
        self.host.add(p.new(t.saved_at[moved]), p.new(t.released_at[moved]), size)
        back = t.unpacked_at[moved] < NEVER
        self.traffic.from_host += int(size[back].sum())
        fetched = moved[back]
        self.device.add(p.new(t.unpacked_at[fetched]), p.new(t.released_at[fetched]), size[back])

    def peaks(self) -> _Peaks:
        """The two moments that may be the peak, and what each consists of."""
        t, p = self.tape, self.place
        curve = self.device.curve(p.length)
        at = int(curve.argmax())
        alive = (p.new(t.birth) <= at) & (p.new(self.death) > at)
        there = self.replay.gradient if self.key.gradients_held else alive & self.replay.gradient
        saved = int(self.size[alive & (p.new(t.death) <= at)].sum())
        ranges: list[list[tuple[int, int]]] = [[] for _ in p.units]
        for start, end, u in zip(p.range_start.tolist(), p.range_end.tolist(), p.range_unit.tolist(), strict=True):
            ranges[u].append((start, end))
        host = self.host.curve(p.length)
        passes = Memory(
            peak=int(curve[at]),
            phase="forward" if at < p.new_at(t.backward_start) else "backward",
            breakdown=self._breakdown(at, int(curve[at]), int(self.size[there].sum()), saved),
            host_peak=int(host.max(initial=0)),
            to_host=self.traffic.to_host,
            from_host=self.traffic.from_host,
            copied_tensors=self.traffic.tensors,
            recomputed=tuple(Span(tuple(r), int(p.stop_[u])) for u, r in enumerate(ranges) if p.replayed_[u]),
            copy_groups=self.traffic.groups,
            weights_to_host=self.swapped.to_host if self.swapped else 0,
            weights_from_host=self.swapped.from_host if self.swapped else 0,
            swapped_calls=tuple(self.swapped.calls) if self.swapped else (),
            waits=self.swapped.waits / self.swapped.uses if self.swapped and self.swapped.uses else 1.0,
        )
        left = int(curve[-1])
        gradients = int(self.size[self.replay.gradient].sum())
        end = replace(
            passes,
            peak=left,
            phase="optimizer",
            breakdown=self._breakdown(p.length - 1, left, gradients, 0),
        )
        return _Peaks(passes, end)

    def _breakdown(self, moment: int, allocated: int, gradients: int, saved: int) -> dict[str, int]:
        """Bytes at a new position."""
        swapped = adapters = 0
        if (w := self.swapped) is not None:
            here = (w.birth <= moment) & (moment < w.death)
            swapped = int(self.replay.counted(w.size[here & ~w.trained]).sum())
            adapters = int(self.replay.counted(w.size[here & w.trained]).sum())
        return {
            "weights": swapped,
            "adapter": adapters,
            "gradients": gradients,
            "optimizer": 0,
            "saved": saved,
            "transient": allocated - gradients - saved - swapped - adapters,
            "inputs": 0,
            "workspace": 0,
        }
