"""Traces a long run of identical blocks through five of them and writes the tape that all of them would have given.

Of a run of n identical blocks 0..n-1 the trace keeps 0, 1, 2, n-2 and n-1. The tapes of the three inner ones must be the same
event for event; then block 2's part is repeated for 3..n-3, forward and backward. Whatever does not fit that pattern (a
reference that reaches over more than one block, an uneven part) raises `UnevenError`, and the caller traces the whole model.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from probes.structure import Structure
from probes.tape import NEVER, Call, Ints, Tape

KEPT = 5


class UnevenError(RuntimeError):
    """The blocks of a run do not repeat each other exactly."""


@dataclass(frozen=True)
class Run:
    """Blocks `first`..`last` of the list `path`, all alike."""

    path: str
    first: int
    last: int

    @property
    def extras(self) -> int:
        """Blocks that the trace leaves out."""
        return self.last - self.first + 1 - KEPT

    def is_told_apart_by(self, name: str) -> bool:
        """Whether the end of a module's name says which block of the list it is in."""
        return re.search(rf"(^|\.){re.escape(self.path.rpartition('.')[2])}\.[0-9]", name) is not None

    @property
    def kept(self) -> tuple[int, ...]:
        a, b = self.first, self.last
        return (a, a + 1, a + 2, b - 1, b)


_LABEL = re.compile(r"(^|_)(id|idx|index|layer|number)($|_)")


def signature(block: nn.Module, index: int) -> tuple[object, ...]:
    """Equal for blocks that compute the same: class, parameters and plain attributes, all the way down. An attribute that
    only says which block it is (``layer_id = index``) does not count."""
    plain = (bool, int, float, str, type(None))
    parts: list[object] = []
    for name, module in block.named_modules():
        values = tuple(
            (k, "its index" if type(v) is int and v == index and _LABEL.search(k) else v)
            for k, v in sorted(module.__dict__.items())
            if (isinstance(v, plain) or (isinstance(v, tuple) and all(isinstance(x, plain) for x in v)))
            and not k.startswith("_")
        )
        parts.append((name, type(module), values))
    parts.append(tuple((n, tuple(p.shape), p.dtype) for n, p in block.named_parameters()))
    return tuple(parts)


def find_runs(model: nn.Module, structure: Structure, names: Sequence[str] = ()) -> list[Run]:
    """Runs of more than `KEPT` + 1 identical, consecutive blocks.

    Args:
        names: ends of names of modules to which something will be done; a list of which one names a block has no run.
    """
    runs = []
    for chain in structure.chains:
        blocks = model.get_submodule(chain.path)
        if not isinstance(blocks, nn.ModuleList) or len(chain.blocks) != len(blocks):
            continue
        signatures = [signature(b, i) for i, b in enumerate(blocks)]
        start = 0
        for i in range(1, len(signatures) + 1):
            if i == len(signatures) or signatures[i] != signatures[start]:
                if i - start > KEPT + 1:
                    runs.append(Run(chain.path, start, i - 1))
                start = i
    return [r for r in runs if not any(r.is_told_apart_by(n) for n in names)]


def later(runs: Sequence[Run]) -> list[Run]:
    """The runs from their second block on, for where only the first is unlike the others: it may get its input in another dtype.
    Empty where one is too short for that."""
    found = [dataclasses.replace(r, first=r.first + 1) for r in runs]
    return found if all(r.extras > 0 for r in found) else []


def thin(model: nn.Module, runs: Sequence[Run]) -> dict[str, list[int]]:
    """Drops the blocks that the trace leaves out. Returns, by list path, the original index of every block that stays."""
    kept: dict[str, list[int]] = {}
    for path in dict.fromkeys(r.path for r in runs):
        blocks = model.get_submodule(path)
        assert isinstance(blocks, nn.ModuleList)
        dropped = {i for r in runs if r.path == path for i in range(r.first + 3, r.last - 1)}
        kept[path] = [i for i in range(len(blocks)) if i not in dropped]
        parent_path, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent_path), name, nn.ModuleList([blocks[i] for i in kept[path]]))
    return kept


def original_name(name: str, kept: dict[str, list[int]]) -> str:
    """The name that a module or parameter of the thinned model has in the whole model."""
    for path, indices in kept.items():
        if name.startswith(path + "."):
            index, dot, rest = name[len(path) + 1 :].partition(".")
            return f"{path}.{indices[int(index)]}{dot}{rest}"
    return name


def repeat_names(names: Sequence[str], run: Run) -> list[tuple[str, str]]:
    """(name of a left-out block's member, name of the member that it repeats) for all names inside block `first + 2`."""
    template = f"{run.path}.{run.first + 2}"
    out = []
    for i in range(run.first + 3, run.last - 1):
        for name in names:
            if name == template or name.startswith(template + "."):
                out.append((f"{run.path}.{i}{name[len(template) :]}", name))
    return out


def expand(tape: Tape, run: Run) -> Tape:
    """The tape with the left-out blocks of `run` filled in.

    Raises:
        UnevenError: see the module's text.
    """
    m = run.extras
    starts = []
    for i in run.kept:
        calls_of = tape.calls.get(f"{run.path}.{i}", ())
        if not calls_of:
            raise UnevenError(f"{run.path}.{i} was not called")
        if len(calls_of) > 1:
            raise UnevenError(f"{run.path}.{i} was called {len(calls_of)} times")
        starts.append(calls_of[0].start)
    ends = [tape.calls[f"{run.path}.{i}"][0].end for i in run.kept]
    if sorted(starts) != starts:
        raise UnevenError(f"{run.path} is not called in order")

    def first_unpack(i: int) -> int:
        inside = (tape.saved_at >= starts[i]) & (tape.saved_at < ends[i]) & (tape.unpacked_at < NEVER)
        if not inside.any():
            raise UnevenError(f"{run.path}: a block has no backward")
        return int(tape.unpacked_at[inside].min())

    backs = [first_unpack(i) for i in range(KEPT)]
    if sorted(backs, reverse=True) != backs:
        raise UnevenError(f"{run.path}: backward does not run in reverse order")

    # chunk j of the forward (c) and backward (d) pass, for the three inner blocks
    c = {j: (starts[j], starts[j + 1]) for j in (1, 2, 3)}
    d = {j: (backs[j], backs[j - 1]) for j in (1, 2, 3)}
    len_c, len_d = c[2][1] - c[2][0], d[2][1] - d[2][0]
    for what, chunks in (("forward", c), ("backward", d)):
        if len({high - low for low, high in chunks.values()}) != 1:
            raise UnevenError(
                f"{run.path}: {what} parts differ in length: {[high - low for low, high in chunks.values()]}"
            )

    def chunk_of(p: Ints) -> Ints:
        """1, 2, 3: inner forward parts; 11, 12, 13: inner backward parts; 0: elsewhere; -1: an outer block's forward part."""
        out = np.zeros(len(p), np.int64)
        out[(p >= starts[0]) & (p < starts[1]) | (p >= starts[4]) & (p < ends[4])] = -1
        out[(p >= backs[4]) & (p < backs[3])] = -2
        for j in (1, 2, 3):
            out[(p >= c[j][0]) & (p < c[j][1])] = j
            out[(p >= d[j][0]) & (p < d[j][1])] = 10 + j
        return out

    birth_chunk = chunk_of(tape.birth)
    members = {k: np.flatnonzero(birth_chunk == k) for k in (1, 2, 3, 11, 12, 13)}
    for base, chunks in ((0, c), (10, d)):
        reference = members[base + 2]
        for j in (1, 3):
            same = members[base + j]
            if len(same) != len(reference) or not (
                np.array_equal(tape.size[same], tape.size[reference])
                and np.array_equal(tape.birth[same] - chunks[j][0], tape.birth[reference] - chunks[2][0])
            ):
                raise UnevenError(f"{run.path}: blocks allocate differently")
    rank = np.full(len(tape.size), -1, np.int64)
    for ids in members.values():
        rank[ids] = np.arange(len(ids))

    block_of_chunk = {1: 1, 2: 2, 3: 3, 11: 1, 12: 2, 13: 3}

    def shift(p: Ints) -> Ints:
        out = p + np.where(p >= starts[3], m * len_c, 0) + np.where(p >= backs[2], m * len_d, 0)
        return np.where(p >= NEVER, NEVER, out)

    def place(kind: int, offset: Ints, block: int) -> Ints:
        """New position of an offset in the part of `block`: 1, 2, 3 as kept, or 2 + k/… given as 100 + k for extra k."""
        if block >= 100:
            k = block - 100
            if kind == 0:
                return starts[3] + (k - 1) * len_c + offset
            return backs[2] + m * len_c + (m - k) * len_d + offset
        low = (c if kind == 0 else d)[block][0]
        return shift(low + offset)

    order = [1, 2, *(100 + k for k in range(1, m + 1)), 3]
    position_of = {b: i for i, b in enumerate(order)}

    def neighbour(block: int, delta: int) -> int:
        at = position_of[block] + delta
        if not 0 <= at < len(order):
            raise UnevenError(f"{run.path}: a reference reaches past the run")
        return order[at]

    def move(p: Ints, anchor: int, block: int) -> Ints:
        """Positions `p` referred to by an entity of kept block `anchor`, for its copy in `block`."""
        out = shift(p)
        chunk = chunk_of(p)
        if block >= 100 and (chunk < 0).any():
            raise UnevenError(f"{run.path}: a reference reaches over more than one block")
        for value in np.unique(chunk):
            if value <= 0:
                continue
            kind, target = int(value) // 10, block_of_chunk[int(value)]
            delta = target - anchor
            if abs(delta) > 1:
                raise UnevenError(f"{run.path}: a reference reaches over more than one block")
            at = chunk == value
            low = (c if kind == 0 else d)[target][0]
            out[at] = place(kind, p[at] - low, neighbour(block, delta) if delta else block)
        return out

    def anchors(chunk: Ints) -> list[tuple[int, Ints]]:
        """(kept block, indices) of the entities that belong to an inner block."""
        return [(j, np.flatnonzero((chunk == j) | (chunk == 10 + j))) for j in (1, 2, 3)]

    # storages: first those traced, then the copies of block 2's, extra by extra
    template = np.flatnonzero((birth_chunk == 2) | (birth_chunk == 12))
    template_rank = np.full(len(tape.size), -1, np.int64)
    template_rank[template] = np.arange(len(template))
    n = len(tape.size)
    birth, death = shift(tape.birth), shift(tape.death)
    for j, ids in anchors(birth_chunk):
        birth[ids], death[ids] = move(tape.birth[ids], j, j), move(tape.death[ids], j, j)
    births, deaths, sizes, scratches = [birth], [death], [tape.size], [tape.scratch]
    for k in range(1, m + 1):
        births.append(move(tape.birth[template], 2, 100 + k))
        deaths.append(move(tape.death[template], 2, 100 + k))
        sizes.append(tape.size[template])
        scratches.append(tape.scratch[template])

    twin_in_template = np.full(len(tape.size), -1, np.int64)
    for base in (0, 10):
        for j in (1, 2, 3):
            twin_in_template[members[base + j]] = template_rank[members[base + 2]]

    def storage(ids: Ints, anchor: int, block: int) -> Ints:
        """Storage ids referred to by an entity of kept block `anchor`, for its copy in `block`."""
        out = ids.copy()
        for i, sid in enumerate(ids):
            if sid < 0 or (chunk := int(birth_chunk[sid])) <= 0:
                if sid >= 0 and chunk < 0 and block >= 100:
                    raise UnevenError(f"{run.path}: a reference reaches over more than one block")
                continue
            delta = block_of_chunk[chunk] - anchor
            if abs(delta) > 1:
                raise UnevenError(f"{run.path}: a reference reaches over more than one block")
            target = neighbour(block, delta) if delta else block
            twin = int(twin_in_template[sid])
            if target >= 100:
                out[i] = n + (target - 101) * len(template) + twin
            else:
                out[i] = members[(chunk // 10) * 10 + target][rank[sid]]
        return out

    # saved tensors
    saved_chunk = chunk_of(tape.saved_at)
    saved_storage = tape.saved_storage.copy()
    saved_at, unpacked_at, released_at = shift(tape.saved_at), shift(tape.unpacked_at), shift(tape.released_at)
    for j, ids in anchors(saved_chunk):
        saved_storage[ids] = storage(tape.saved_storage[ids], j, j)
        saved_at[ids], unpacked_at[ids], released_at[ids] = (
            move(a[ids], j, j) for a in (tape.saved_at, tape.unpacked_at, tape.released_at)
        )
    tokens = np.flatnonzero(saved_chunk == 2)
    extras = range(1, m + 1)
    saved_storage = np.concatenate([saved_storage, *(storage(tape.saved_storage[tokens], 2, 100 + k) for k in extras)])
    saved_at, unpacked_at, released_at = (
        np.concatenate([base, *(move(original[tokens], 2, 100 + k) for k in extras)])
        for base, original in (
            (saved_at, tape.saved_at),
            (unpacked_at, tape.unpacked_at),
            (released_at, tape.released_at),
        )
    )
    token_index = np.concatenate([np.arange(len(tape.saved_at)), *([tokens] * m)])
    in_order = np.argsort(saved_at, kind="stable")

    # kernels
    op_chunk = chunk_of(tape.op_at)
    op_at = shift(tape.op_at)
    for j, ids in anchors(op_chunk):
        op_at[ids] = move(tape.op_at[ids], j, j)
    ops = np.flatnonzero((op_chunk == 2) | (op_chunk == 12))
    op_ats = [op_at] + [move(tape.op_at[ops], 2, 100 + k) for k in range(1, m + 1)]
    op_index = np.concatenate([np.arange(len(tape.op_at))] + [ops] * m)
    op_order = np.argsort(np.concatenate(op_ats), kind="stable")

    # module calls
    calls: dict[str, tuple[Call, ...]] = {}
    inner_reads: dict[str, tuple[int, ...]] = {}
    inner = {f"{run.path}.{i}": j for j, i in enumerate(run.kept) if 1 <= j <= 3}

    def owner(name: str) -> int | None:
        index = name[len(run.path) + 1 :].partition(".")[0].partition("@")[0] if name.startswith(run.path + ".") else ""
        return inner.get(f"{run.path}.{index}")

    def moved_call(call: Call, anchor: int, block: int) -> Call:
        at = move(np.array([call.start, call.end - 1], np.int64), anchor, block)

        def moved(sids: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(int(s) for s in storage(np.array(sids, np.int64), anchor, block))

        return dataclasses.replace(
            call,
            start=int(at[0]),
            end=int(at[1]) + 1,
            arguments=moved(call.arguments),
            results=moved(call.results),
        )

    for name, made in tape.calls.items():
        mine = owner(name)
        if mine is None:
            at = shift(np.array([[c.start, c.end] for c in made], np.int64))
            calls[name] = tuple(
                dataclasses.replace(c, start=int(start), end=int(end)) for c, (start, end) in zip(made, at, strict=True)
            )
        else:
            calls[name] = tuple(moved_call(c, mine, mine) for c in made)
    for name, source in repeat_names(list(tape.calls), run):
        k = int(name[len(run.path) + 1 :].partition(".")[0]) - run.first - 2
        calls[name] = tuple(moved_call(c, 2, 100 + k) for c in tape.calls[source])
    for key, sids in tape.inner_reads.items():
        mine = owner(key)
        inner_reads[key] = (
            sids if mine is None else tuple(int(s) for s in storage(np.array(sids, np.int64), mine, mine))
        )
        if mine == 2:
            for k in range(1, m + 1):
                renamed = key.replace(f"{run.path}.{run.first + 2}@", f"{run.path}.{run.first + 2 + k}@")
                inner_reads[renamed] = tuple(int(s) for s in storage(np.array(sids, np.int64), 2, 100 + k))

    bounds = shift(np.array([tape.length, tape.backward_start, tape.optimizer_start], np.int64))
    return Tape(
        length=int(bounds[0]),
        backward_start=int(bounds[1]),
        optimizer_start=int(bounds[2]),
        size=np.concatenate(sizes),
        birth=np.concatenate(births),
        death=np.concatenate(deaths),
        scratch=np.concatenate(scratches),
        saved_storage=saved_storage[in_order],
        saved_at=saved_at[in_order],
        unpacked_at=unpacked_at[in_order],
        released_at=released_at[in_order],
        saved_movable=tape.saved_movable[token_index][in_order],
        saved_bytes=tape.saved_bytes[token_index][in_order],
        saved_view=tape.saved_view[token_index][in_order],
        saved_weight=tape.saved_weight[token_index][in_order],
        view_start=tape.view_start,
        view_extent=tape.view_extent,
        view_bytes=tape.view_bytes,
        view_type=tape.view_type,
        op_at=np.concatenate(op_ats)[op_order],
        op_kind=tape.op_kind[op_index][op_order],
        op_flops=tape.op_flops[op_index][op_order],
        op_bytes=tape.op_bytes[op_index][op_order],
        op_head=tape.op_head[op_index][op_order],
        calls=calls,
        inner_reads=inner_reads,
    )
