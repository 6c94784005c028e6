"""Which operators of a compiled graph share a kernel, and what of it is ever in memory.

Inductor's scheduler cannot run without its device, so this follows its rules instead: matrix products, convolutions, attention and
whatever Inductor has no code for run as they are; every other operator is inlined into its readers. A value is written to memory if
such a kernel or the graph's caller reads it, if it is a reduction, or if several readers would otherwise repeat more than a few reads
(its `realize_...` settings). Written values of one iteration space that hang together form one kernel;
what only that kernel reads is never in memory. Left out: splitting of long reductions, fusion of a product with what follows it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

_RANDOM = {aten.rand, aten.randn, aten.randint, aten.bernoulli}
"""Inductor draws random numbers inside its kernels."""


MOST_READS, MOST_OPERATORS, MOST_OPERATORS_CPU = 4, 30, 50
"""What several readers may each repeat (Inductor's defaults)."""
_HEAVY = {aten.exp, aten.log, aten.log10, aten.log1p, aten.log2, aten.sigmoid, aten.tanh}
"""On a CPU never repeated."""


@dataclass(frozen=True)
class Step:
    """One kernel of a graph, or a view."""

    node: fx.Node | None
    """Runs as it is; None: a fused kernel."""
    reads: tuple[fx.Node, ...]
    writes: tuple[fx.Node, ...]
    dies: tuple[fx.Node, ...]
    """Read here for the last time."""
    spare: tuple[fx.Node, ...]
    """Reads of a fused kernel whose memory nobody needs any more, and which the graph itself has allocated."""


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _size(node: fx.Node) -> int:
    value = _value(node)
    values = value if isinstance(value, (tuple, list)) else (value,)
    return max((int(v.numel()) for v in values if isinstance(v, torch.Tensor)), default=0)


def _bytes(node: fx.Node) -> int:
    value = _value(node)
    return int(value.numel() * value.element_size()) if isinstance(value, torch.Tensor) else 0


def _is_view(node: fx.Node) -> bool:
    if node.target is aten._unsafe_view.default:
        return True
    schema = getattr(node.target, "_schema", None)
    return (
        schema is not None
        and bool(schema.returns)
        and all(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    )


def _is_reduction(node: fx.Node) -> bool:
    return torch.Tag.reduction in getattr(node.target, "tags", ()) or "softmax_online" in str(node.target)


def _is_heavy(node: fx.Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in _HEAVY


def _runs_alone(node: fx.Node) -> bool:
    """Whether the operator is a kernel of its own."""
    from torch._inductor import lowering

    packet = getattr(node.target, "overloadpacket", None)
    if packet in _RANDOM:
        return False
    return packet in flop_registry or node.target in lowering.fallbacks or node.target not in lowering.lowerings


_Kernel = tuple[int, fx.Node | None, tuple[fx.Node, ...], tuple[fx.Node, ...]]
"""Position, node (None: fused), reads, writes."""


class Plan:
    """The kernels of one graph, in an order in which they can run.

    Args:
        on_cpu: Inductor inlines by other limits there.
    """

    def __init__(self, graph: fx.Graph, *, on_cpu: bool) -> None:
        self.inputs = tuple(n for n in graph.nodes if n.op == "placeholder")
        self.outputs: tuple[Any, ...] = tuple(graph.output_node().args[0])
        self._calls = [n for n in graph.nodes if n.op == "call_function"]
        self._alone = {
            n for n in self._calls if n.target is not operator.getitem and not _is_view(n) and _runs_alone(n)
        }
        self._returned = {n for n in self.outputs if isinstance(n, fx.Node)}
        self._find_written(on_cpu)
        self._find_levels()
        self.steps = self._order(self._group())

    # what is in memory ------------------------------------------------------------------------------------------------

    def _find_written(self, on_cpu: bool) -> None:
        wanted: set[fx.Node] = set()
        """Somebody needs it in memory, directly or through views."""
        for n in reversed(self._calls):
            through = (u in wanted and (_is_view(u) or u.target is operator.getitem) for u in n.users)
            if n in self._returned or any(u in self._alone for u in n.users) or any(through):
                wanted.add(n)
        self.views: set[fx.Node] = set()
        """Views, and parts, of something in memory."""
        self.written: dict[fx.Node, tuple[fx.Node, ...]] = {}
        """Values that fused kernels write, with what each reads."""
        reads: dict[fx.Node, dict[fx.Node, None]] = {}
        count: dict[fx.Node, int] = {}
        heavy: dict[fx.Node, bool] = {}
        most_operators = MOST_OPERATORS_CPU if on_cpu else MOST_OPERATORS
        inlined: set[fx.Node] = set()
        for n in self._calls:
            if n in self._alone:
                continue
            of = n.all_input_nodes
            if (_is_view(n) or n.target is operator.getitem) and not any(i in inlined for i in of):
                self.views.add(n)
                continue
            reads[n] = {r: None for i in of for r in (reads[i] if i in inlined else (i,))}
            count[n] = 1 + sum(count[i] for i in of if i in inlined)
            parts = any(u.target is operator.getitem for u in n.users)
            heavy[n] = on_cpu and (_is_heavy(n) or any(heavy[i] for i in of if i in inlined))
            copied = len(n.users) > 1 and (len(reads[n]) > MOST_READS or count[n] > most_operators or heavy[n])
            reduces = _is_reduction(n) or (n.target is operator.getitem and _is_reduction(of[0]))
            if not parts and not _is_view(n) and (n in wanted or reduces or copied):
                self.written[n] = tuple(reads[n])
            else:
                inlined.add(n)

    def _root(self, node: fx.Node) -> fx.Node:
        while node in self.views:
            node = node.all_input_nodes[0]
        return node

    # what runs together -----------------------------------------------------------------------------------------------

    def _space(self, node: fx.Node) -> int:
        """Elements over which a fused operator iterates."""
        source = node.all_input_nodes[0] if node.target is operator.getitem else node
        if _is_reduction(source):
            return max((_size(i) for i in source.all_input_nodes), default=1)
        return _size(node)

    def _find_levels(self) -> None:
        """Kernels of one level do not wait for each other."""
        self.level: dict[fx.Node, int] = {}
        self.space: dict[fx.Node, int] = {}
        for n in self._calls:
            if n in self.views or (n not in self._alone and n not in self.written):
                continue
            before = [self._root(r) for r in self.written.get(n, n.all_input_nodes)]
            before = [b for b in before if b in self.level]
            if n in self.written:
                space = self._space(n)
                after = {b for b in before if b in self.written and self.space[b] != space and _size(b) == _size(n)}
                last = max((self.level[b] for b in before), default=0)
                joins = [b for b in after if self.level[b] == last]
                if joins and not _is_reduction(n):  # what follows a reduction row by row is part of it
                    space = self.space[joins[0]]
                self.space[n] = space
                self.level[n] = max(
                    (self.level[b] + (b in self._alone or self.space[b] != space) for b in before), default=0
                )
            else:
                self.level[n] = max((self.level[b] + 1 for b in before), default=0)
        self._put_off()

    def _put_off(self) -> None:
        """Moves a value into the kernel of its first reader, if none of its own inputs is made in its present one."""
        first: dict[fx.Node, tuple[int, int]] = {}
        """(level, space) of a value's first reader; level - 1 and no space for a reader that is no fused kernel."""
        for n in reversed(self._calls):
            if n not in self.level:
                continue
            reads = self.written.get(n, n.all_input_nodes)
            if n in self.written and n in first:
                here = (self.level[n], self.space[n])
                inputs = {(self.level[r], self.space[r]) for r in map(self._root, reads) if r in self.written}
                level, space = first[n]
                if level > here[0] and space == self.space[n] and here not in inputs:
                    self.level[n] = level
            at = (self.level[n] - 1, -1) if n in self._alone else (self.level[n], self.space[n])
            for r in map(self._root, reads):
                first[r] = min(at, first.get(r, at))

    def _group(self) -> list[tuple[fx.Node, ...]]:
        """Fused kernels, as what they write."""
        parent: dict[fx.Node, fx.Node] = {n: n for n in self.written}

        def top(n: fx.Node) -> fx.Node:
            while parent[n] is not n:
                n = parent[n]
            return n

        readers: dict[tuple[fx.Node, int, int], fx.Node] = {}
        for n, reads in self.written.items():
            where = (self.level[n], self.space[n])
            for r in {self._root(r) for r in reads}:
                if r in self.written and (self.level[r], self.space[r]) == where:
                    parent[top(n)] = top(r)
                if (other := readers.setdefault((r, *where), n)) is not n:
                    parent[top(n)] = top(other)
        groups: dict[fx.Node, list[fx.Node]] = {}
        for n in self.written:
            groups.setdefault(top(n), []).append(n)
        return [tuple(g) for g in groups.values()]

    def _order(self, groups: list[tuple[fx.Node, ...]]) -> tuple[Step, ...]:
        found: list[_Kernel] = []
        position = {n: i for i, n in enumerate(self._calls)}
        outside = {self._root(n) for n in self._returned}
        for n in self._alone:
            outside.update(map(self._root, n.all_input_nodes))
        reads_of = []
        for g in groups:
            reads = tuple(dict.fromkeys(r for n in g for r in self.written[n] if self._root(r) not in g))
            outside.update(map(self._root, reads))
            reads_of.append(reads)
        for g, reads in zip(groups, reads_of, strict=True):
            writes = tuple(n for n in g if n in outside)
            found.append((min(position[n] for n in g), None, reads, writes))
        for n in self._calls:
            if n in self._alone:
                found.append((position[n], n, tuple(n.all_input_nodes), (n,)))
        return self._with_views(self._schedule(found))

    def _schedule(self, kernels: list[_Kernel]) -> list[_Kernel]:
        """In the graph's order as far as dependences allow."""
        makes = {n: i for i, k in enumerate(kernels) for n in k[3]}
        waits = [
            {makes[r] for r in map(self._root, k[2]) if r in makes and makes[r] != i} for i, k in enumerate(kernels)
        ]
        order: list[_Kernel] = []
        done: set[int] = set()
        left = sorted(range(len(kernels)), key=lambda i: kernels[i][0])
        while left:
            ready = next(i for i in left if waits[i] <= done)
            left.remove(ready)
            done.add(ready)
            order.append(kernels[ready])
        return order

    def _with_views(self, kernels: list[_Kernel]) -> tuple[Step, ...]:
        """Puts every view right before its first reader, and notes where each value is read for the last time."""
        steps: list[tuple[fx.Node | None, tuple[fx.Node, ...], tuple[fx.Node, ...]]] = []
        made: set[fx.Node] = set()

        def make(view: fx.Node) -> None:
            if view in self.views and view not in made:
                (source,) = view.all_input_nodes[:1]
                make(source)
                made.add(view)
                steps.append((view, (source,), (view,)))

        for _, node, reads, writes in kernels:
            for r in reads:
                make(r)
            steps.append((node, reads, writes))
        for n in self._returned:
            make(n)
        last = {r: i for i, (_, reads, _) in enumerate(steps) for r in reads}
        held = {self._root(n) for n in self._returned} | set(self.inputs)
        needed: dict[fx.Node, int] = {}
        for r, i in last.items():
            needed[self._root(r)] = max(i, needed.get(self._root(r), 0))
        out = []
        for i, (node, reads, writes) in enumerate(steps):
            dies = [r for r in reads if last[r] == i and r not in self._returned]
            dies += [w for w in writes if w not in last and w not in self._returned]
            free = {} if node is not None else {self._root(r): r for r in reads}
            spare = tuple(r for root, r in free.items() if root not in held and needed[root] == i)
            out.append(Step(node, reads, writes, tuple(dict.fromkeys(dies)), spare))
        return tuple(out)


def run(plan: Plan, values: list[Any], fused: Callable[[float], None]) -> list[Any]:
    """Runs a plan's kernels; what fused ones write is allocated, not computed.

    Args:
        values: the graph's inputs; the list is emptied, so that what nobody else holds goes when it is used up.
        fused: called for every fused kernel with the bytes that it moves.
    """
    known: dict[fx.Node, Any] = dict(zip(plan.inputs, values, strict=True))
    values.clear()
    device = next(v.device for v in known.values() if isinstance(v, torch.Tensor))
    used = {r for s in plan.steps for r in s.reads}
    for n in plan.inputs:
        if n not in used and n not in plan.outputs:
            del known[n]
    for step in plan.steps:
        if step.node is not None:
            args, kwargs = fx.node.map_arg((step.node.args, step.node.kwargs), lambda n: known[n])
            if "device" in kwargs:
                kwargs = {**kwargs, "device": device}
            known[step.node] = step.node.target(*args, **kwargs)
        else:
            spare = [known[r] for r in step.spare]
            for n in step.writes:
                known[n] = _allocate(_value(n), spare, device)
            fused(float(sum(_bytes(n) for n in (*step.reads, *step.writes))))
            del spare
        for n in step.dies:
            known.pop(n, None)
    return [known[o] if isinstance(o, fx.Node) else o for o in plan.outputs]


def _allocate(like: torch.Tensor, spare: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Memory for what a kernel writes; over an input that goes with it, if it fits exactly (Inductor's `inplace_buffers`)."""
    size, stride = tuple(map(int, like.size())), tuple(map(int, like.stride()))
    needed = like.element_size() * (
        1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if math.prod(size) else 0
    )
    for i, old in enumerate(spare):
        if old.dtype is like.dtype and old.untyped_storage().nbytes() == needed:
            del spare[i]
            return torch.as_strided(old, size, stride, 0)
    return torch.empty_strided(size, stride, dtype=like.dtype, device=device)
