"""One checkpoint over one or several modules, where the modules are called one by one by code that knows nothing of it.

A unit of one module is an ordinary non-reentrant `torch.utils.checkpoint.checkpoint` around the module's forward.

A unit of several modules (a segment of blocks, a run of feed-forward submodules) is one checkpoint too. The first module
opens it; each following one runs where the model calls it, with its saved tensors going into the same checkpoint; in
backward the whole sequence is replayed from the first one's inputs. That is right only if what the model hands to the next
module is, unchanged, what the previous one returned. So before a module joins, its arguments are compared with that:
every tensor output of the previous module must be among its arguments, the same object in the same version, and every other
tensor must be an input of the open checkpoint, or else a parameter or a tensor made in inference mode (which no checkpoint
can save and which is kept by reference). A module for which this does not hold is never guessed about: it opens a
checkpoint of its own, from then on always, and a note says why. Forward hooks of others, tensors that the model collects
between blocks, arguments that differ from block to block and changes in place are all handled by that.

Memory: between the calls a unit holds weak references only; the checkpoint holds its inputs, the non-tensor arguments, and
per further module a copy of the random state. An open checkpoint is closed by its last module, by the end of the model's
forward (also by an exception), or by the next call of its first module.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from advisor.runtime.arguments import Layout, flatten, tensors, version
from advisor.runtime.attention import Records, Region
from advisor.runtime.counters import Counters, RuntimeRefused
from advisor.runtime.offload import Engine
from advisor.runtime.random_state import RandomState

Forward = Callable[..., Any]
Hook = Callable[[Any], Any]


@dataclass(frozen=True)
class Member:
    """One module of a unit."""

    name: str
    module: nn.Module
    forward: Forward
    """What the module's `forward` was before, or its compiled call."""
    compiled: bool = False
    region: Region | None = None
    """The attention inside, if its saved tensors go to the host."""


@dataclass(frozen=True)
class _Input:
    """An argument leaf that is an input of the checkpoint."""

    index: int


@dataclass(frozen=True)
class _Link:
    """An argument leaf that is a tensor output of the module before."""

    index: int


@dataclass(frozen=True)
class _Value:
    """An argument leaf that is no activation, by reference."""

    value: Any


_Source = _Input | _Link | _Value


class _Seen:
    """Tensors as they were at one moment, without keeping them alive."""

    __slots__ = ("_entries",)

    def __init__(self, values: Sequence[torch.Tensor]) -> None:
        self._entries = [(weakref.ref(t), version(t)) for t in values]

    def find(self, tensor: torch.Tensor) -> int | None:
        """Position of the same object in the same version."""
        for i, (reference, seen) in enumerate(self._entries):
            if reference() is tensor:
                return i if version(tensor) == seen else None
        return None

    def missing(self, values: Sequence[Any]) -> int:
        """How many of the tensors are not among `values`."""
        return sum(1 for reference, _ in self._entries if (t := reference()) is None or not any(t is v for v in values))

    def changed(self) -> bool:
        return any((t := reference()) is not None and version(t) != seen for reference, seen in self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(frozen=True)
class _Call:
    """One module call as it is to be replayed."""

    member: Member
    layout: Layout
    sources: tuple[_Source, ...]
    training: bool
    random: RandomState | None
    """None for the first call, whose random state the checkpoint restores."""
    records: Records | None = None
    """What the attention inside did, if a replay does not run it."""
    values: list[torch.Tensor] | None = None
    """What the call returned, where replays are compared with it."""

    def first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call in forward."""
        result = self._run(args, kwargs)
        if self.values is not None:
            self.values.extend(t.detach().clone() for t in tensors(result))
        return result

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.member.region is None or self.records is None:
            return self.member.forward(*args, **kwargs)
        with self.member.region.first(self.records):
            return self.member.forward(*args, **kwargs)

    def replay(self, inputs: Sequence[Any], outputs: Sequence[torch.Tensor]) -> Any:
        if self.member.module.training is not self.training:
            was, now = ("train", "eval") if self.training else ("eval", "train")
            raise RuntimeRefused(
                f"{self.member.name} ran in {was} mode and is in {now} mode in backward; switch modes after backward"
            )
        leaves = [
            inputs[s.index] if isinstance(s, _Input) else outputs[s.index] if isinstance(s, _Link) else s.value
            for s in self.sources
        ]
        args, kwargs = self.layout.rebuild(leaves)
        if self.random is not None:
            self.random.restore()
        if self.member.region is None or self.records is None:
            result = self.member.forward(*args, **kwargs)
        else:
            with self.member.region.again(self.records):
                result = self.member.forward(*args, **kwargs)
        if self.values is not None:
            self._compare(tensors(result))
        return result

    def _compare(self, found: Sequence[torch.Tensor]) -> None:
        assert self.values is not None
        if len(found) != len(self.values) or not all(map(_same_values, found, self.values)):
            raise RuntimeRefused(
                f"{self.member.name} returns other values when it is replayed: it depends on something that changed since "
                "forward (an adapter switched, a cache, a counter, routing with ties); leave it out with a per-block schedule"
            )


class _Tape:
    """The function that a checkpoint runs: the first call itself in forward, all recorded calls in a replay."""

    def __init__(self, call: _Call, arguments: tuple[Any, Any], spans: bool, counters: Counters) -> None:
        self.calls = [call]
        self.hooks: tuple[Hook, Hook] | None = None
        """The checkpoint's own saved-tensor hooks, taken while it is open; only for a checkpoint that may span modules."""
        self._arguments: tuple[Any, Any] | None = arguments
        self._spans = spans
        self._counters = counters

    def __call__(self, *inputs: Any) -> Any:
        if self._arguments is not None:
            (args, kwargs), self._arguments = self._arguments, None
            if self._spans:
                self.hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
            return self.calls[0].first(args, kwargs)
        self._counters.units_recomputed += 1
        outputs: list[torch.Tensor] = []
        for call in self.calls:
            self._counters.blocks_recomputed += 1
            result = call.replay(inputs, outputs)
            outputs = tensors(result) if call is not self.calls[-1] else []
        return None


@dataclass
class _Open:
    """A checkpoint that the next module may join."""

    tape: _Tape
    hooks: tuple[Hook, Hook]
    last: int
    outputs: _Seen
    inputs: _Seen
    autocast: tuple[Any, ...]

    def match(self, leaves: Sequence[Any], autocast: tuple[Any, ...]) -> tuple[_Source, ...] | str:
        """Where the next module's arguments come from, or why it cannot join."""
        if autocast != self.autocast:
            return "autocast was switched between the blocks"
        if not len(self.outputs):
            return "the previous block returned no tensor"
        if missing := self.outputs.missing(leaves):
            return f"{missing} of the previous block's {len(self.outputs)} outputs are not handed on unchanged"
        sources: list[_Source] = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                sources.append(_Value(leaf))
            elif (at := self.outputs.find(leaf)) is not None:
                sources.append(_Link(at))
            elif (at := self.inputs.find(leaf)) is not None:
                sources.append(_Input(at))
            elif isinstance(leaf, nn.Parameter) or leaf.is_inference():
                sources.append(_Value(leaf))
            else:
                shape = tuple(leaf.shape)
                return (
                    f"an argument of shape {shape} is neither the previous block's unchanged output nor common to both"
                )
        return tuple(sources)


@dataclass
class RunningUnit:
    """The modules of one checkpoint unit and the state of its current checkpoint."""

    counters: Counters
    note: Callable[[str], None]
    engine: Engine | None
    """Where the checkpoint's inputs go; None: they stay on the device."""
    members: list[Member] = field(default_factory=list)
    check_values: bool = False
    """Compare what a replay returns with what forward returned; to find faults, costs memory."""
    starts: set[int] = field(default_factory=set)
    """Positions that were found not to be joinable and always open a checkpoint of their own."""
    _open: _Open | None = None

    def close(self) -> None:
        """Lets nothing join the current checkpoint any more."""
        self._open = None

    def call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs member `index` with gradients enabled.

        Raises:
            RuntimeRefused: the module changes an input of its checkpoint in place.
        """
        member = self.members[index]
        if member.module._compiled_call_impl is not None and not member.compiled:
            self.note(f"{member.name} was compiled after apply and runs uncompiled; compile first, then apply")
        opened, self._open = self._open, None
        leaves, layout = flatten((args, kwargs))
        arguments = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        autocast = _autocast(arguments) if len(self.members) > 1 else ()
        if opened is not None and opened.last + 1 == index:
            sources = opened.match(leaves, autocast)
            if not isinstance(sources, str):
                random = RandomState(arguments)
                values: list[torch.Tensor] | None = [] if self.check_values else None
                call = _Call(member, layout, sources, member.module.training, random, _records(member), values)
                return self._join(opened, index, call, args, kwargs)
            self.starts.add(index)
            self.note(f"{member.name} starts a checkpoint of its own: {sources}")
        return self._begin(index, leaves, layout, args, kwargs, autocast)

    def _begin(
        self,
        index: int,
        leaves: Sequence[Any],
        layout: Layout,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        autocast: tuple[Any, ...],
    ) -> Any:
        member = self.members[index]
        inputs = {id(t): t for t in leaves if isinstance(t, torch.Tensor) and not t.is_inference()}
        position = {key: i for i, key in enumerate(inputs)}
        sources: tuple[_Source, ...] = tuple(
            _Input(position[id(leaf)]) if id(leaf) in position else _Value(leaf) for leaf in leaves
        )
        spans = self._may_go_on(index)
        values: list[torch.Tensor] | None = [] if self.check_values else None
        first = _Call(member, layout, sources, member.module.training, None, _records(member), values)
        tape = _Tape(first, (args, kwargs), spans, self.counters)
        seen = _Seen(list(inputs.values()))
        with (
            self.engine.saving() if self.engine is not None else contextlib.nullcontext(),
            set_checkpoint_early_stop(False) if self.check_values else contextlib.nullcontext(),
        ):
            result = checkpoint(tape, *inputs.values(), use_reentrant=False)
        self.counters.checkpoint_calls += 1
        self.counters.blocks_checkpointed += 1
        self._refuse_changed(seen, member)
        hooks, tape.hooks = tape.hooks, None
        if spans and hooks is not None:
            self._open = _Open(tape, hooks, index, _Seen(tensors(result)), seen, autocast)
        return result

    def _join(self, opened: _Open, index: int, call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(*opened.hooks):
            result = call.first(args, kwargs)
        opened.tape.calls.append(call)
        self.counters.blocks_checkpointed += 1
        self._refuse_changed(opened.inputs, call.member)
        if self._may_go_on(index):
            opened.last, opened.outputs = index, _Seen(tensors(result))
            self._open = opened
        return result

    def _may_go_on(self, index: int) -> bool:
        return index + 1 < len(self.members) and index + 1 not in self.starts

    def _refuse_changed(self, seen: _Seen, member: Member) -> None:
        if seen.changed():
            raise RuntimeRefused(
                f"{member.name} changes one of its inputs in place and so cannot be recomputed; "
                "leave it out with a per-block schedule ('keep' for this block)"
            )


def _same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())


def _records(member: Member) -> Records | None:
    return None if member.region is None else Records()


def _autocast(arguments: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    kinds = sorted({"cpu", *(t.device.type for t in arguments if t.device.type != "meta")})
    return (
        torch.is_autocast_cache_enabled(),
        *((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds),
    )
