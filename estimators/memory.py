"""Peak memory of a schedule: the step's tape, replayed with every checkpoint's recomputation put where it happens.

All sizes are bytes, all positions are event numbers. What is simulated, per checkpoint unit (non-reentrant checkpoint of
PyTorch): in the forward pass nothing that is saved inside is held, but the tensor arguments are; at the first saved tensor
that backward asks for, the unit's forward runs again up to its last saved tensor; every recomputed saved tensor is held
until backward has used it, the arguments until the unit's last one is released.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from estimators.schedule import Resolution, Unit
from probes.profile import Profile
from probes.tape import NEVER, Ints, Tape

RNG_STATE_BYTES = 5056
"""The CPU generator's state, stored on the host for every module in a checkpoint (torch.get_rng_state)."""


class SimulationError(RuntimeError):
    """A schedule names modules that the profile does not have."""


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

    @property
    def total(self) -> int:
        return self.weights + self.adapter + self.optimizer + self.inputs + self.workspace


Counter = Callable[[Ints], Ints]
"""Requested bytes -> bytes that a device counts as allocated (`Device`'s rounding)."""


def exact(sizes: Ints) -> Ints:
    """A CPU's allocator counts what was asked for."""
    return sizes


def _unit_ranges(tape: Tape, unit: Unit) -> list[tuple[int, int]]:
    ranges = []
    for module in unit.modules:
        call = tape.calls.get(module)
        if call is None:
            raise SimulationError(f"the profile has no call of {module}")
        start = call.start
        if unit.from_child is not None:
            child = tape.calls.get(f"{module}.{unit.from_child}")
            if child is None:
                raise SimulationError(f"the profile has no call of {module}.{unit.from_child}")
            start = child.start
        ranges.append((start, call.end))
    return ranges


def _unit_arguments(tape: Tape, unit: Unit) -> list[tuple[int, bool, int]]:
    """(storage, movable, bytes) of the tensors that the unit's checkpoint holds. Two views of one storage are two entries."""
    module = unit.modules[0]
    call = tape.calls[module]
    found = list(zip(call.arguments, call.movable, call.argument_bytes, strict=True))
    if unit.from_child is not None:
        given = set(call.arguments)
        reads = tape.inner_reads.get(f"{module}@{unit.from_child}", ())
        found += [(sid, True, int(tape.size[sid])) for sid in reads if sid not in given]
    return found


class Replay:
    """A profile prepared for many simulations on one kind of device.

    Args:
        counted: how the device counts an allocation.
    """

    def __init__(self, profile: Profile, counted: Counter) -> None:
        self.profile = profile
        self.tape = profile.tape
        self.counted = counted
        self.size = counted(profile.tape.size)
        self.saved_size = counted(profile.tape.saved_bytes)
        self.gradient = (profile.tape.death >= NEVER) & (profile.tape.birth >= profile.tape.backward_start)
        self._known: dict[tuple[Resolution, int, bool], tuple[Memory, Resident]] = {}

    def run(self, resolution: Resolution, resident: Resident) -> Memory:
        """Simulates one step, once for all devices: what is resident during the whole step only adds to it.

        Raises:
            SimulationError: the resolution does not belong to this profile.
        """
        key = (resolution, resident.optimizer_transient, resident.device_is_host)
        if key not in self._known:
            self._known[key] = self._run(resolution, resident)[0], resident
        found, before = self._known[key]
        if resident == before:
            return found
        parts = {name: getattr(resident, name) for name in ("weights", "adapter", "optimizer", "inputs", "workspace")}
        return replace(found, peak=found.peak - before.total + resident.total, breakdown={**found.breakdown, **parts})

    def events(self, resolution: Resolution, resident: Resident) -> tuple[Ints, Ints]:
        """The step as a stream for the allocator's simulation: (ids, +bytes when allocated, -bytes when freed), in order.
        Sizes are as requested."""
        births, deaths, sizes = self._run(resolution, resident, uncounted=True)[1]
        ids = np.arange(len(sizes))
        dies = deaths < NEVER
        at = np.concatenate([births, deaths[dies]])
        order = np.argsort(
            at * 2 + np.concatenate([np.ones(len(births), np.int64), np.zeros(int(dies.sum()), np.int64)]),
            kind="stable",
        )
        return np.concatenate([ids, ids[dies]])[order], np.concatenate([sizes, -sizes[dies]])[order]

    def _run(
        self, resolution: Resolution, resident: Resident, *, uncounted: bool = False
    ) -> tuple[Memory, tuple[Ints, Ints, Ints]]:
        sizes_of = self.tape.size if uncounted else self.size
        saved_sizes = self.tape.saved_bytes if uncounted else self.saved_size
        t = self.tape
        units = resolution.units
        n_units = len(units)
        flat: list[tuple[int, int, int]] = []
        for u, unit in enumerate(units):
            flat.extend((start, end, u) for start, end in _unit_ranges(t, unit))
        flat.sort()
        range_start = np.array([f[0] for f in flat], np.int64)
        range_end = np.array([f[1] for f in flat], np.int64)
        range_unit = np.array([f[2] for f in flat], np.int64)
        before = np.zeros(len(flat), np.int64)
        running = [0] * n_units
        for r, (start, end, u) in enumerate(flat):
            before[r] = running[u]
            running[u] += end - start

        def locate(p: Ints) -> tuple[Ints, Ints]:
            """(unit or -1, range index) of positions."""
            if not len(flat):
                return np.full(len(p), -1, np.int64), np.zeros(len(p), np.int64)
            r = np.searchsorted(range_start, p, side="right") - 1
            safe = np.maximum(r, 0)
            inside = (r >= 0) & (p < range_end[safe])
            return np.where(inside, range_unit[safe], -1), safe

        saved_unit, _ = locate(t.saved_at)
        birth_unit, birth_range = locate(t.birth)
        resident_save = t.saved_storage < 0
        attention = np.zeros(len(t.saved_at), bool)
        for name in resolution.offloaded_attention:
            if (call := t.calls.get(name)) is not None:
                lo, hi = np.searchsorted(t.saved_at, (call.start, call.end))
                attention[lo:hi] = True
        saved_unit[attention] = -1

        in_unit = saved_unit >= 0
        stop = np.full(n_units, -1, np.int64)
        trigger = np.full(n_units, NEVER, np.int64)
        finish = np.full(n_units, -1, np.int64)
        np.maximum.at(stop, saved_unit[in_unit], t.saved_at[in_unit])
        np.minimum.at(trigger, saved_unit[in_unit], t.unpacked_at[in_unit])
        np.maximum.at(finish, saved_unit[in_unit], np.where(t.released_at[in_unit] < NEVER, t.released_at[in_unit], -1))
        replayed = (trigger < NEVER) & (stop >= 0)

        # where every replay goes
        length = np.zeros(n_units, np.int64)
        if n_units:
            stop_safe = np.maximum(stop, 0)
            _, stop_range = locate(stop_safe)
            length = np.where(replayed, before[stop_range] + stop_safe - range_start[stop_range] + 1, 0)
        order = np.argsort(trigger, kind="stable")[: int(replayed.sum())]
        sorted_trigger = trigger[order]
        cumulative = np.concatenate([[0], np.cumsum(length[order])])
        replay_start = np.zeros(n_units, np.int64)
        replay_start[order] = sorted_trigger + cumulative[:-1]

        def new(p: Ints) -> Ints:
            return p + cumulative[np.searchsorted(sorted_trigger, p, side="right")]

        positions = int(t.length + cumulative[-1] + 2)
        events_at: list[Ints] = []
        events_by: list[Ints] = []
        lives: list[tuple[Ints, Ints, Ints]] = []

        def live(birth: Ints, death: Ints, size: Ints) -> None:
            lives.append((birth, death, size))
            events_at.append(birth)
            events_by.append(size)
            dies = death < NEVER
            events_at.append(death[dies])
            events_by.append(-size[dies])

        # the forward pass's own storages
        death = t.death.copy()
        holds = ~resident_save & ~in_unit & ~(attention & t.saved_movable)
        np.maximum.at(death, t.saved_storage[holds], t.released_at[holds])

        to_host = from_host = copied = 0
        host_events: list[tuple[int, int]] = []
        offloaded_pair: set[tuple[int, int]] = set()
        held_sid: list[int] = []
        held_until: list[int] = []
        copies: list[tuple[int, int, int]] = []
        for u, unit in enumerate(units):
            if finish[u] < 0:
                continue
            start = int(t.calls[unit.modules[0]].start)
            for sid, movable, size in _unit_arguments(t, unit):
                if unit.offload_inputs and movable:
                    amount = size if uncounted else int(self.counted(np.array([size], np.int64))[0])
                    to_host += size
                    copied += 1
                    host_events += [(start, size), (int(finish[u]), -size)]
                    offloaded_pair.add((u, sid))
                    if replayed[u]:
                        from_host += size
                        copies.append((u, sid, amount))
                else:
                    held_sid.append(sid)
                    held_until.append(int(finish[u]))
            if resident.device_is_host:
                states = RNG_STATE_BYTES * len(unit.modules)
                host_events += [(start, states), (int(finish[u]), -states)]
        if held_sid:
            np.maximum.at(death, np.array(held_sid), np.array(held_until))

        # saved inside a unit, born outside: held by the unit's frame, unless the argument is on the host
        inner = in_unit & ~resident_save
        inner_storage = t.saved_storage[inner]
        inner_unit = saved_unit[inner]
        inner_release = t.released_at[inner]
        foreign = birth_unit[inner_storage] != inner_unit
        if offloaded_pair:
            away = np.fromiter(
                (
                    (int(u), int(s)) in offloaded_pair
                    for u, s in zip(inner_unit[foreign], inner_storage[foreign], strict=True)
                ),
                bool,
                int(foreign.sum()),
            )
        else:
            away = np.zeros(int(foreign.sum()), bool)
        np.maximum.at(death, inner_storage[foreign][~away], inner_release[foreign][~away])
        live(new(t.birth), np.where(death < NEVER, new(np.minimum(death, t.length)), NEVER), sizes_of)

        # the recomputed ones
        again = (
            (birth_unit >= 0) & (t.birth <= stop[np.maximum(birth_unit, 0)]) & replayed[np.maximum(birth_unit, 0)]
            if n_units
            else None
        )
        if again is not None and again.any():
            ids = np.flatnonzero(again)
            u_of = birth_unit[ids]
            base = replay_start[u_of] + before[birth_range[ids]] - range_start[birth_range[ids]]
            birth2 = base + t.birth[ids]
            # a death between two of the unit's ranges (the caller's loop moving on) happens at the end of the earlier one
            death_range = np.maximum(np.searchsorted(range_start, t.death[ids], side="right") - 1, 0)
            last = replay_start[u_of] + length[u_of]
            local_death = np.where(
                range_unit[death_range] == u_of,
                replay_start[u_of]
                + before[death_range]
                + np.minimum(t.death[ids], range_end[death_range])
                - range_start[death_range],
                last,
            )
            death2 = np.minimum(local_death, last)
            native = ~foreign
            until = np.full(len(t.size), -1, np.int64)
            np.maximum.at(until, inner_storage[native], new(np.minimum(inner_release[native], t.length)))
            death2 = np.maximum(death2, until[ids])
            live(birth2, np.maximum(death2, birth2 + 1), sizes_of[ids])
        if copies:
            until_copy: dict[tuple[int, int], int] = {}
            for owner, sid, release in zip(
                inner_unit[foreign][away], inner_storage[foreign][away], inner_release[foreign][away], strict=True
            ):
                key = (int(owner), int(sid))
                until_copy[key] = max(until_copy.get(key, 0), int(release))
            owners = np.array([owner for owner, _, _ in copies], np.int64)
            held = new(np.array([until_copy.get((owner, sid), 0) for owner, sid, _ in copies], np.int64))
            ends = replay_start[owners] + length[owners]
            live(replay_start[owners], np.maximum(held, ends), np.array([amount for _, _, amount in copies], np.int64))

        # attention saves on the host
        moved = np.flatnonzero(attention & t.saved_movable & ~resident_save)
        if len(moved):
            moved_size = saved_sizes[moved]
            back = t.unpacked_at[moved] < NEVER
            to_host += int(t.saved_bytes[moved].sum())
            recomputed_too = locate(t.saved_at[moved])[0] >= 0
            copied += len(moved) + int(recomputed_too.sum())
            to_host += int(t.saved_bytes[moved][recomputed_too].sum())
            from_host += int(t.saved_bytes[moved][back].sum())
            host_events += [(int(p), int(s)) for p, s in zip(t.saved_at[moved], t.saved_bytes[moved], strict=True)]
            host_events += [(int(p), -int(s)) for p, s in zip(t.released_at[moved], t.saved_bytes[moved], strict=True)]
            live(
                new(t.unpacked_at[moved][back]), new(np.minimum(t.released_at[moved][back], t.length)), moved_size[back]
            )

        host_peak = 0
        if host_events:
            at = new(np.array([p for p, _ in host_events], np.int64))
            by = np.array([s for _, s in host_events], np.int64)
            host_curve = np.cumsum(np.bincount(at, weights=by, minlength=positions))
            host_peak = int(host_curve.max())
            if resident.device_is_host:
                events_at.append(at)
                events_by.append(by)

        curve = np.cumsum(
            np.bincount(np.concatenate(events_at), weights=np.concatenate(events_by), minlength=positions)
        )
        at_peak = int(curve.argmax())
        step_peak = int(curve[at_peak])
        at_optimizer = int(curve[-1]) + resident.optimizer_transient
        gradients_all = int(self.size[self.gradient].sum())
        if at_optimizer > step_peak:
            phase, step_peak = "optimizer", at_optimizer
            gradients, saved = gradients_all, 0
        else:
            phase = "forward" if at_peak < int(new(np.array([t.backward_start]))[0]) else "backward"
            alive = (new(t.birth) <= at_peak) & (
                np.where(death < NEVER, new(np.minimum(death, t.length)), NEVER) > at_peak
            )
            gradients = int(self.size[alive & self.gradient].sum())
            held_only = alive & (np.where(t.death < NEVER, new(np.minimum(t.death, t.length)), NEVER) <= at_peak)
            saved = int(self.size[held_only].sum())
        breakdown = {
            "weights": resident.weights,
            "adapter": resident.adapter,
            "gradients": gradients,
            "optimizer": resident.optimizer,
            "saved": saved,
            "transient": step_peak - gradients - saved,
            "inputs": resident.inputs,
            "workspace": resident.workspace,
        }
        spans = tuple(
            Span(tuple((s, e) for s, e, owner in flat if owner == u), int(stop[u]))
            for u in range(n_units)
            if replayed[u]
        )
        memory = Memory(resident.total + step_peak, phase, breakdown, host_peak, to_host, from_host, copied, spans)
        streams = tuple(np.concatenate([life[i] for life in lives]) for i in range(3))
        return memory, (streams[0], streams[1], streams[2])
