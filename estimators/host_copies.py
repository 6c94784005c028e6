"""What our runtime copies to the host: checkpoint inputs and what attention keeps for backward, each storage once.

Rules as in `advisor.runtime.attention`: at the end of a block, a storage that only its attention's saved tensors (and the results of
skipped calls) hold moves; one that anything else holds stays. Positions are tape positions where not said otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from estimators.placement import Placement
from probes.tape import NEVER, Flags, Ints, Tape


@dataclass(slots=True)
class HostCopy:
    """One storage on the host. All positions are new positions."""

    storage: int
    size: int
    """Bytes."""
    group: int
    """Copies of one group come back together; groups are numbered in forward order."""
    copied: int
    """When it is copied out, and the original is let go."""
    released: int
    """When the host memory is."""
    fetches: list[Fetch]
    is_original: bool = True
    """False: another group made the copy."""
    restored: int = 0
    """Bytes that it takes on the device when it comes back, where its gaps come back too; 0: as many as on the host."""

    @property
    def device_size(self) -> int:
        return max(self.size, self.restored)


@dataclass(slots=True)
class Fetch:
    """One copy back."""

    start: int
    end: int
    """When the device memory is let go again."""
    group: int


@dataclass(frozen=True)
class _Piece:
    """A part of a storage that is copied by itself."""

    size: int
    """Bytes on the host."""
    restored: int
    """Bytes on the device."""
    released: int
    """When backward is done with its saved tensors; 0: it has none."""
    asked: int
    """When backward first asks for one."""
    returned: bool
    """A result of a skipped call is in it."""


class Pieces:
    """What of a storage is copied together, for one tape; remembered from schedule to schedule."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], list[_Piece]] = {}

    def of(self, saves: Sequence[int], results: Sequence[int]) -> list[_Piece]:
        """The stretch that holds all views, or view by view where less is copied so.

        Args:
            saves: saved tensors on one storage that move.
            results: views that skipped calls return.
        """
        key = tuple(saves), tuple(results)
        if key not in self._known:
            self._known[key] = self._make(saves, results)
        return self._known[key]

    def _make(self, saves: Sequence[int], results: Sequence[int]) -> list[_Piece]:
        t = self._tape
        members: dict[int, list[int]] = {}
        for i in saves:
            members.setdefault(int(t.saved_view[i]), []).append(i)
        for view in results:
            members.setdefault(view, [])

        def piece(size: int, restored: int, views: Sequence[int]) -> _Piece:
            held = [i for v in views for i in members[v]]
            released = max((int(t.released_at[i]) for i in held), default=0)
            asked = min((int(t.unpacked_at[i]) for i in held), default=int(NEVER))
            return _Piece(size, restored, released, asked, any(v in results for v in views))

        pieces = []
        for kind in dict.fromkeys(int(t.view_type[v]) for v in members):
            views = [v for v in members if t.view_type[v] == kind]
            low = min(int(t.view_start[v]) for v in views)
            high = max(int(t.view_start[v] + t.view_extent[v]) for v in views)
            if high - low <= sum(int(t.view_bytes[v]) for v in views):
                pieces.append(piece(high - low, high - low, views))
            else:
                pieces += [piece(int(t.view_bytes[v]), int(t.view_extent[v]), [v]) for v in views]
        return pieces


class AttentionCopies:
    """The storages that attention offload moves, for one placement.

    Args:
        pieces: of the same tape.
    """

    def __init__(self, place: Placement, pieces: Pieces | None = None) -> None:
        self.place, tape = place, place.tape
        self._pieces = pieces or Pieces(tape)
        self.moved: Flags = np.zeros(len(tape.saved_at), bool)
        """Saved tensors that wait on the host."""
        self.returned: dict[int, int] = {}
        """Results of skipped calls: storage -> number of the call."""
        self._result_views: dict[int, list[int]] = {}
        self.let_go: dict[int, int] = {}
        """Storages that moved: end of the block."""
        if place.calls:
            self._choose()

    def _choose(self) -> None:
        p, t = self.place, self.place.tape
        starts = np.array([c.start for c in p.calls], np.int64)
        ends = np.array([c.end for c in p.calls], np.int64)
        block_ends = np.array([c.block_end for c in p.calls], np.int64)
        which = np.maximum(np.searchsorted(starts, t.saved_at, side="right") - 1, 0)
        pending = p.attention & (t.saved_storage >= 0) & (t.saved_at < ends[which])
        for i, call in enumerate(p.calls):
            if call.unit < 0:
                continue
            for sid, view in call.results:
                if t.birth[sid] > call.start and t.death[sid] <= call.block_end:
                    self.returned[sid] = i
                    self._result_views.setdefault(sid, []).append(view)
        saved_until = block_ends[which]
        sids = t.saved_storage[pending]
        if not len(sids) and not self.returned:
            return
        stays = self._held_elsewhere(pending, sids, saved_until[pending])
        chosen = np.flatnonzero(pending)[~stays]
        self.moved[chosen] = True
        self.let_go = dict(zip(t.saved_storage[chosen].tolist(), saved_until[chosen].tolist(), strict=True))
        for sid, i in self.returned.items():
            self.let_go.setdefault(sid, p.calls[i].block_end)

    def _held_elsewhere(self, pending: Flags, sids: Ints, at: Ints) -> Flags:
        """For saved tensors on storages `sids`: whether something else holds the storage at a position."""
        p, t = self.place, self.place.tape
        held: Flags = t.death[sids] > at
        others = ~pending & (p.saved_unit < 0) & (t.saved_storage >= 0)
        first = np.full(len(t.size), NEVER, np.int64)
        last = np.full(len(t.size), -1, np.int64)
        np.minimum.at(first, t.saved_storage[others], t.saved_at[others])
        np.maximum.at(last, t.saved_storage[others], t.released_at[others])
        for u, made in enumerate(p.units):
            if p.finish_[u] >= 0 and not made.offload_inputs:
                for sid, *_ in made.arguments:
                    first[sid] = min(first[sid], made.start)
                    last[sid] = max(last[sid], int(p.finish_[u]))
        return held | ((first[sids] <= at) & (last[sids] > at))

    def copies(self) -> list[HostCopy]:
        """The copies of every storage that moves, storage by storage."""
        p, t = self.place, self.place.tape
        by_storage: dict[int, list[int]] = {sid: [] for sid in self.let_go}
        moved = np.flatnonzero(self.moved)
        for i, sid in zip(moved.tolist(), t.saved_storage[moved].tolist(), strict=True):
            by_storage[sid].append(i)
        parts = [
            (sid, piece)
            for sid, saves in by_storage.items()
            for piece in self._pieces.of(saves, self._result_views.get(sid, ()))
        ]
        moments = np.array([(self.let_go[sid], part.released, part.asked) for sid, part in parts], np.int64)
        downstream = self._downstream()
        return [
            self._copy(sid, piece, copied, until, asked, downstream.get(sid, 0))
            for (sid, piece), (copied, until, asked) in zip(parts, p.new(moments.reshape(-1, 3)).tolist(), strict=True)
        ]

    def _downstream(self) -> dict[int, int]:
        """Results of skipped calls that others save too: when backward is done with them."""
        p, t = self.place, self.place.tape
        found: dict[int, int] = {}
        if not self.returned:
            return found
        mine = np.flatnonzero(np.isin(t.saved_storage, list(self.returned)) & (p.saved_unit >= 0))
        for sid, released in zip(t.saved_storage[mine].tolist(), t.released_at[mine].tolist(), strict=True):
            found[sid] = max(found.get(sid, 0), released)
        return found

    def _copy(self, sid: int, piece: _Piece, copied: int, until: int, asked: int, downstream: int) -> HostCopy:
        """
        Args:
            copied: and `until`, `asked`: new positions at which it is let go, backward is done with it, and asks for it.
            downstream: tape position.
        """
        p, t = self.place, self.place.tape
        start = asked if asked < NEVER else None
        released = until
        if piece.returned:
            call = p.calls[self.returned[sid]]
            released = p.new_at(max(piece.released, int(p.finish_[call.unit])))
            if p.replayed_[call.unit] and p.stop_[call.unit] > call.end:
                start = p.replay_of(call.unit, call.end)
                until = max(until, p.replay_of(call.unit, int(t.death[sid])), p.new_at(downstream), start + 1)
        group = self.let_go[sid]
        fetches = [] if start is None else [Fetch(start, until, group)]
        return HostCopy(sid, piece.size, group, copied, released, fetches, restored=piece.restored)

    def in_turn(self, copies: Sequence[HostCopy]) -> list[tuple[int, int]]:
        """(new position, bytes) at which, where host and device are one memory, more is held for a moment than before or after: a
        block's storages are copied one after the other, each before its original is let go."""
        size = self.place.tape.size
        blocks: dict[int, dict[int, int]] = {}
        for copy in copies:
            storages = blocks.setdefault(copy.copied, {})
            storages[copy.storage] = storages.get(copy.storage, 0) + copy.size
        found = []
        for moment, storages in blocks.items():
            held = most = 0
            for sid, copied in storages.items():
                held += copied
                most = max(most, held)
                held -= int(size[sid])
            found.append((moment, most - held))
        return found


def run_ahead(copies: Sequence[HostCopy]) -> None:
    """Adjusts for a device whose copies run beside the computation: a source lives until the next group's are copied, and a group
    comes back when backward asks for the group behind it."""
    groups = sorted({c.group for c in copies})
    left = {c.group: c.copied for c in copies}
    asked: dict[int, int] = {}
    for c in copies:
        for f in c.fetches:
            asked[f.group] = min(asked.get(f.group, int(NEVER)), f.start)
    first_asked = min(asked.values(), default=0)
    following = dict(itertools.pairwise(groups))
    for c in copies:
        behind = following.get(c.group)
        if c.is_original:
            c.copied = max(c.copied, left[behind] if behind is not None else first_asked)
    order = sorted(asked)
    ahead = dict(itertools.pairwise(order))
    for c in copies:
        for f in c.fetches:
            start = asked[f.group]
            if f.group in ahead:
                start = min(start, asked[ahead[f.group]])
            f.start = min(f.start, start)
