"""Moves what attention saves for backward to the host, and lets recomputation skip attention.

**What moves.** While an attention submodule runs, everything that it saves is noted. At the end of its *block* - when the block's
own variables are gone - each storage that nothing else holds goes to the host, with a history or without (dropout masks and
log-sum-exps too). What somebody else holds as well (weights, rotary tables, a tensor that the feed-forward side also saved)
would not be freed by moving it, so it stays.

**Inside a checkpoint** a tensor is recomputed or offloaded, never both. What attention saves of its own arguments is left to the
checkpoint, which makes the arguments anew in any case. What it makes itself goes to the host, and so do its results: in
a replay the call is not run, its results come from the host, and the random state behind it is set as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from advisor.runtime.arguments import Layout, flatten, version
from advisor.runtime.counters import RuntimeRefused
from advisor.runtime.offload import Engine, Kept, Moved, movable
from advisor.runtime.random_state import RandomState


class Saved:
    """A tensor that attention saved; on the host once its block is over and nothing else holds its storage."""

    __slots__ = ("__weakref__", "packed")

    def __init__(self, tensor: torch.Tensor) -> None:
        # an alias of its own, so that references to the storage can be told apart
        self.packed: Kept | Moved = Kept(tensor.detach(), version(tensor))

    @property
    def changed(self) -> bool:
        return isinstance(self.packed, Kept) and version(self.packed.tensor) != self.packed.version


@dataclass(frozen=True)
class _Argument:
    """A tensor in the storage of an argument of the call."""

    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Elements from the argument's first one."""

    def of(self, arguments: Sequence[torch.Tensor]) -> torch.Tensor:
        given = arguments[self.index].detach()
        return given.as_strided(self.size, self.stride, given.storage_offset() + self.offset)


@dataclass(frozen=True)
class _Delegated:
    """What the checkpoint around the call made of a saved tensor."""

    packed: Any
    unpack: Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class _Result:
    """A tensor that the call returned."""

    value: Saved | _Argument
    requires_grad: bool


@dataclass
class _Record:
    """One call of an attention submodule inside a checkpoint, as a replay needs it."""

    name: str
    saves: list[_Argument] = field(default_factory=list)
    """In the order in which the checkpoint got them."""
    results: list[Any] = field(default_factory=list)
    """Leaves of the result; a `_Result` where it was a tensor."""
    layout: Layout | None = None
    before: RandomState | None = None
    random: RandomState | None = None
    """Before and after the call; None: it drew no random numbers, or (before) the results are there."""
    runs_again: bool = False
    """Its block changed a result in place, so that a replay has to compute it."""


class _Fetched(torch.autograd.Function):
    """A result from the host, with a history as the real one has, so that what follows saves the same tensors."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return make()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError("no gradient goes through a replay")


@dataclass
class Records:
    """The attention calls of one call of a block that is inside a checkpoint."""

    calls: list[_Record] = field(default_factory=list)


@dataclass
class _Run:
    """A block that is running."""

    records: Records | None
    """None: the block is not inside a checkpoint."""
    replay_at: int | None = None
    """In a replay: the next call's number."""
    pending: list[Saved] = field(default_factory=list)


class Region:
    """The attention submodules of one block."""

    def __init__(self, name: str, engine: Engine, note: Callable[[str], None]) -> None:
        self.name, self.engine, self.note = name, engine, note
        self._runs: list[_Run] = []
        self._changed: set[str] = set()
        """Attention submodules whose results the block changes in place."""

    # the block --------------------------------------------------------------------------------------------------------

    def run_block(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a block that is outside checkpoints."""
        with self.first(None):
            return forward(*args, **kwargs)

    @contextlib.contextmanager
    def first(self, records: Records | None) -> Iterator[None]:
        """Around a block's call in forward; inside a checkpoint, its attention calls are noted in `records`."""
        run = _Run(records)
        self._runs.append(run)
        try:
            yield
        finally:
            self._runs.pop()
        pending = list(run.pending)
        run.pending.clear()  # the hooks of every saved tensor refer to it
        for record in records.calls if records is not None else ():
            self._check_results(record)
        _settle(pending, self.engine)

    def _check_results(self, record: _Record) -> None:
        """Whether the results are as attention returned them, now that the block is over."""
        results = [r.value for r in record.results if isinstance(r, _Result) and isinstance(r.value, Saved)]
        if any(r.changed for r in results):
            record.runs_again = True
            self._changed.add(record.name)
            self.note(
                f"{record.name}: its block changes what it returns in place, so a copy is made on the device first"
            )
        else:
            record.before = None

    @contextlib.contextmanager
    def again(self, records: Records) -> Iterator[None]:
        """Around a block's call in a replay."""
        self._runs.append(_Run(records, 0))
        try:
            yield
        finally:
            self._runs.pop()

    # attention --------------------------------------------------------------------------------------------------------

    def call(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an attention submodule, or in a replay takes its results from the host.

        Raises:
            RuntimeRefused: inside a checkpoint, it changes an argument in place; or a replay does not call what was called.
        """
        if not self._runs:
            self.note(f"{name} is also called outside its block {self.name}; what it saves there stays on the device")
            return forward(*args, **kwargs)
        run = self._runs[-1]
        if run.replay_at is not None:
            return self._skip(name, run, forward, args, kwargs)
        self.engine.counters.attention_calls += 1
        if run.records is None:
            with torch.autograd.graph.saved_tensors_hooks(_noting(run.pending), self._unpack):
                return forward(*args, **kwargs)
        return self._record(name, run, forward, args, kwargs)

    def _unpack(self, saved: Saved | _Delegated | Kept) -> torch.Tensor:
        if isinstance(saved, Saved):
            return self.engine.unpack(saved.packed)
        return saved.get() if isinstance(saved, Kept) else saved.unpack(saved.packed)

    def _record(
        self, name: str, run: _Run, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        assert run.records is not None
        arguments = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        of = _ArgumentFinder(arguments)
        record = _Record(name)
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        note = _noting(run.pending)

        def pack(tensor: torch.Tensor) -> Any:
            found = of.find(tensor) if hooks is not None else None
            if found is None or hooks is None:
                return note(tensor)
            record.saves.append(found)
            return _Delegated(hooks[0](tensor), hooks[1])

        before = RandomState(arguments)
        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            result = forward(*args, **kwargs)
        if of.changed():
            raise RuntimeRefused(
                f"{name} changes one of its arguments in place, so recomputation cannot skip it; "
                "leave gradient_checkpointing_offload_attention off"
            )
        after = RandomState(arguments)
        if not after.same_as(before):
            record.before, record.random = before, after
        leaves, record.layout = flatten(result)
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                record.results.append(leaf)
                continue
            value: Saved | _Argument | None = of.find(leaf)
            if value is None:
                value = Saved(leaf.detach().clone() if name in self._changed else leaf)
                run.pending.append(value)
            record.results.append(_Result(value, leaf.requires_grad))
        of.clear()  # the hooks of every saved tensor refer to it
        run.records.calls.append(record)
        return result

    def _skip(
        self, name: str, run: _Run, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        assert run.records is not None
        assert run.replay_at is not None
        calls = run.records.calls
        if run.replay_at >= len(calls) or calls[run.replay_at].name != name:
            raise RuntimeRefused(
                f"{self.name} calls its attention submodules in another order when it is replayed; "
                "leave gradient_checkpointing_offload_attention off"
            )
        record = calls[run.replay_at]
        run.replay_at += 1
        arguments = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is not None:
            for saved in record.saves:
                with torch.no_grad():
                    tensor = saved.of(arguments)
                hooks[0](tensor)
        computed: Sequence[Any] = ()
        if record.runs_again:
            if record.before is not None:
                record.before.restore()
            with torch.no_grad():
                computed = flatten(forward(*args, **kwargs))[0]
        else:
            self.engine.counters.attention_skipped += 1
        leaves = [
            self._again(leaf, arguments, computed[i] if computed else None) if isinstance(leaf, _Result) else leaf
            for i, leaf in enumerate(record.results)
        ]
        if record.random is not None:
            record.random.restore()
        assert record.layout is not None
        return record.layout.rebuild(leaves)

    def _again(self, result: _Result, arguments: Sequence[torch.Tensor], computed: torch.Tensor | None) -> torch.Tensor:
        value = result.value
        if isinstance(value, _Argument):
            given = arguments[value.index]
            whole = (given.size(), given.stride(), 0) == (value.size, value.stride, value.offset)
            return given if whole else given.as_strided(value.size, value.stride, given.storage_offset() + value.offset)

        def make() -> torch.Tensor:
            return self.engine.unpack(value.packed).detach() if computed is None else computed

        if not result.requires_grad:
            return make()
        fetched: torch.Tensor = _Fetched.apply(torch.empty(0, requires_grad=True), make)
        return fetched


@cache
def _uncounted() -> int:
    """References that a storage shows beyond the tensors that share it."""
    with _disable_current_modes():
        tensor = torch.empty(1, device="cpu")
        return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1


def _held_elsewhere(key: int, aliases: int) -> bool:
    """Whether something beyond our own aliases holds a storage."""
    return torch._C._storage_Use_Count(key) > aliases + _uncounted()


def _noting(pending: list[Saved]) -> Callable[[torch.Tensor], Saved | Kept]:
    def pack(tensor: torch.Tensor) -> Saved | Kept:
        if isinstance(tensor, nn.Parameter) or not movable(tensor):
            return Kept.of(tensor)
        saved = Saved(tensor)
        pending.append(saved)
        return saved

    return pack


class _ArgumentFinder:
    """Recognises tensors that lie within an argument of a call."""

    def __init__(self, arguments: Sequence[torch.Tensor]) -> None:
        self._arguments: Sequence[torch.Tensor] = arguments
        self._versions = [version(t) for t in arguments]
        self._by_storage: dict[int, list[int]] = {}
        for i, t in enumerate(arguments):
            if not isinstance(t, nn.Parameter) and movable(t):
                self._by_storage.setdefault(t.untyped_storage()._cdata, []).append(i)

    def find(self, tensor: torch.Tensor) -> _Argument | None:
        if not movable(tensor):
            return None
        for i in self._by_storage.get(tensor.untyped_storage()._cdata, ()):
            given = self._arguments[i]
            if given.dtype is tensor.dtype and version(given) == self._versions[i]:
                low, high = _bounds(given)
                first, last = _bounds(tensor)
                if low <= first and last <= high:
                    return _Argument(
                        i, tensor.size(), tensor.stride(), tensor.storage_offset() - given.storage_offset()
                    )
        return None

    def changed(self) -> bool:
        return any(version(t) != v for t, v in zip(self._arguments, self._versions, strict=True))

    def clear(self) -> None:
        self._arguments = ()
        self._by_storage.clear()


def _bounds(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.storage_offset()
    return start, start + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True) if n)


def _settle(pending: list[Saved], engine: Engine) -> None:
    """Moves what nothing else holds, one storage after the other."""
    by_storage: dict[int, list[Saved]] = {}
    for saved in pending:
        if isinstance(saved.packed, Kept):
            by_storage.setdefault(saved.packed.tensor.untyped_storage()._cdata, []).append(saved)
    chosen = [
        saves
        for key, saves in by_storage.items()
        if not any(s.changed for s in saves) and not _held_elsewhere(key, len(saves))
    ]
    if not chosen:
        return
    group = engine.group()
    for saves in chosen:
        moved = engine.put_together([s.packed.get() for s in saves if isinstance(s.packed, Kept)], group)
        for saved, place in zip(saves, moved, strict=True):
            saved.packed = place
