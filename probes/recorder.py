"""Records the tape of one training step of a model made of fake tensors.

Counts every storage that an operator returns for the first time and, where the target says so, the scratch that a kernel
allocates and frees inside. It does not see memory outside operators: library workspaces, the CUDA context.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from probes.remembered import Remembered
from probes.tape import ATTENTION, ATTENTION_BACKWARD, CONVOLUTION, GEMM, MEMORY, NEVER, REDUCTION, Call, Ints, Tape

_NO_KERNEL = {
    "aten::empty",
    "aten::empty_strided",
    "aten::empty_like",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::scalar_tensor",
    "aten::_local_scalar_dense",
    "aten::lift_fresh",
    "aten::is_same_size",
    "aten::sym_size",
}

Scratch = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], int]
"""(operator, args, kwargs, outputs) -> bytes that its kernel allocates and frees inside."""


TILE = 32 * 32
"""Elements that one multiprocessor computes."""
LONG = 2**16
"""Terms of a sum from which a product of one tile takes longer than launching it."""


class _Op:
    """What does not change between calls of one operator."""

    __slots__ = ("flops", "is_view", "kernel", "kind")

    def __init__(self, func: Any) -> None:
        schema = func._schema
        name = schema.name
        self.is_view = bool(schema.returns) and all(
            r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
        )
        self.kernel = not self.is_view and name not in _NO_KERNEL and name != "aten::detach"
        self.flops = flop_registry.get(func._overloadpacket)
        if "scaled_dot_product" in name or "_flash_attention" in name:
            self.kind = ATTENTION_BACKWARD if name.endswith("_backward") else ATTENTION
        elif "convolution" in name:
            self.kind = CONVOLUTION
        elif self.flops is not None:
            self.kind = GEMM
        else:
            self.kind = MEMORY


def _is_reduction(work: float, output: Any) -> bool:
    """Whether a matrix product is a long sum into a result of one tile."""
    elements = output.numel() if isinstance(output, torch.Tensor) else 0
    return 0 < elements <= TILE and work > 2.0 * elements * LONG


def _head_size(args: tuple[Any, ...]) -> int:
    return next(int(a.shape[-1]) for a in args if isinstance(a, torch.Tensor))


@cache
def _unshared_counts() -> tuple[int, int]:
    """Reference counts (tensor, storage) that a gradient shows inside a dispatch mode when only the engine holds it."""
    found: list[tuple[int, int]] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.add.Tensor:
                found.append(_counts(args[0]))
            return func(*args, **(kwargs or {}))

    with torch.enable_grad(), Look():
        x = torch.empty(2, device="meta", requires_grad=True) * 1
        (x.sin() * x.cos()).sum().backward()
    return found[0]


def _counts(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Every element of its storage range once, in whatever order of axes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _accumulates_in_place(args: tuple[Any, ...], unshared: tuple[int, int]) -> bool:
    """Whether this addition is the autograd engine's, of two gradients of one tensor, and would reuse the first one's memory.

    It does so when nobody else holds that gradient, but never under a dispatch mode (InputBuffer::accumulate), so a
    recording has to do it itself.
    """
    if len(args) != 2 or torch._C._current_autograd_node() is None:
        return False
    first, second = args
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        return False
    if first.shape != second.shape or first.dtype != second.dtype or not _is_dense(first):
        return False
    tensor, storage = _counts(first)
    return tensor <= unshared[0] and storage <= unshared[1]


class _Ticket:
    """Stands for a saved tensor inside autograd's graph; tells the recorder when the graph lets go of it."""

    __slots__ = ("__weakref__", "device", "dtype", "index", "kept", "recorder", "size", "stride", "values")

    def __init__(self, recorder: Recorder, index: int, tensor: torch.Tensor, resident: bool) -> None:
        self.recorder = recorder
        self.index = index
        self.kept = tensor if resident else None
        self.values: torch.Tensor | None = None
        self.size, self.stride, self.dtype, self.device = tensor.size(), tensor.stride(), tensor.dtype, tensor.device

    def __del__(self) -> None:
        self.recorder._released(self.index)


class Recorder(TorchDispatchMode):
    """Use as a context manager around the step, together with :meth:`saved_tensors`.

    Args:
        devices: types of the devices whose storages are counted; a model's small host tensors beside a GPU are not.
        scratch: what kernels allocate inside.
        keep_values: whole numbers and booleans on the CPU are real, and backward reads them: it gets copies.
    """

    def __init__(self, devices: Collection[str], scratch: Scratch | None = None, keep_values: bool = False) -> None:
        super().__init__()
        self.devices = (devices,) if isinstance(devices, str) else tuple(devices)
        self.keep_values = keep_values
        self._unshared = _unshared_counts()
        self.now = 0
        self.scratch_of = scratch
        self._ids: dict[int, int] = {}
        self._watch: dict[int, weakref.ref[Any]] = {}
        self._ops: dict[Any, _Op] = {}
        self._remembered = (
            None if keep_values else Remembered()
        )  # with values a mode below may act on more than layouts
        self._paused = False
        self.size: list[int] = []
        self.birth: list[int] = []
        self.death: list[int] = []
        self.scratch: list[bool] = []
        self.saved_storage: list[int] = []
        self.saved_at: list[int] = []
        self.unpacked_at: list[int] = []
        self.released_at: list[int] = []
        self.saved_movable: list[bool] = []
        self.saved_bytes: list[int] = []
        self.saved_view: list[int] = []
        self.saved_weight: list[int] = []
        self._weights: dict[int, int] = {}
        self._views: dict[tuple[Any, ...], int] = {}
        self.op_at: list[int] = []
        self.op_kind: list[int] = []
        self.op_flops: list[float] = []
        self.op_head: list[int] = []
        self.op_bytes: list[float] = []
        self.calls: dict[str, list[Call]] = {}
        self.inner_reads: dict[str, tuple[int, ...]] = {}
        self._reading: dict[str, tuple[int, set[int], frozenset[int]]] = {}
        self._active_reads: list[tuple[int, int, set[int], frozenset[int]]] = []

    # storages ---------------------------------------------------------------------------------------------------------

    def _born(self, storage: torch.UntypedStorage, key: int) -> None:
        sid = len(self.size)
        self._ids[key] = sid
        self.size.append(storage.nbytes())
        self.birth.append(self.now)
        self.death.append(int(NEVER))
        self.scratch.append(False)
        self._watch[key] = weakref.ref(storage, lambda _, key=key, sid=sid: self._died(key, sid))  # type: ignore[misc]

    def _died(self, key: int, sid: int) -> None:
        self._ids.pop(key, None)
        self._watch.pop(key, None)
        self.now += 1
        self.death[sid] = self.now

    def _resident(self, storage: torch.UntypedStorage, key: int) -> None:
        self._ids[key] = -1

        def forget(_: object, key: int = key) -> None:
            self._ids.pop(key, None)
            self._watch.pop(key, None)

        self._watch[key] = weakref.ref(storage, forget)

    def _sid(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        sid = self._ids.get(key)
        if sid is None:
            self._resident(storage, key)
            return -1
        return sid

    def _view(self, tensor: torch.Tensor) -> int:
        """The row of a tensor's view."""
        key = (tensor.storage_offset(), tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype)
        return self._views.setdefault(key, len(self._views))

    def _view_columns(self) -> dict[str, Ints]:
        types: dict[torch.dtype, int] = {}
        rows = []
        for offset, size, stride, dtype in self._views:
            extent = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if all(size) else 0
            occupied = min(extent, math.prod(size))
            width = dtype.itemsize
            rows.append((offset * width, extent * width, occupied * width, types.setdefault(dtype, len(types))))
        columns = np.array(rows, np.int64).reshape(-1, 4).T
        return dict(zip(("view_start", "view_extent", "view_bytes", "view_type"), columns, strict=True))

    # operators --------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused or func.namespace == "prim":
            return func(*args, **kwargs)
        op = self._ops.get(func)
        if op is None:
            op = self._ops[func] = _Op(func)
        moved = 0
        inputs = list(_tensors(args))
        for t in inputs:
            sid = self._sid(t)
            if op.kernel:
                moved += t.numel() * t.element_size()
                for low, high, found, arguments in self._active_reads:
                    if low <= sid < high or sid in arguments:
                        found.add(sid)
        if func is torch.ops.aten.add.Tensor and not kwargs and _accumulates_in_place(args, self._unshared):
            func = torch.ops.aten.add_.Tensor
        outputs = func(*args, **kwargs) if self._remembered is None else self._remembered(func, args, kwargs)
        self.now += 1
        for t in _tensors((outputs,)):
            storage = t.untyped_storage()
            key = storage._cdata
            if key not in self._ids:
                if t.device.type in self.devices:
                    self._born(storage, key)
                else:
                    self._resident(storage, key)
            if op.kernel:
                moved += t.numel() * t.element_size()
        if op.kernel:
            if self.scratch_of is not None and (extra := self.scratch_of(func, args, kwargs, outputs)):
                self.size.append(extra)
                self.birth.append(self.now)
                self.death.append(self.now + 1)
                self.scratch.append(True)
                self.now += 1
            self.op_at.append(self.now)
            work = float(op.flops(*args, **kwargs, out_val=outputs)) if op.flops is not None else 0.0
            self.op_kind.append(REDUCTION if op.kind == GEMM and _is_reduction(work, outputs) else op.kind)
            self.op_flops.append(work)
            self.op_bytes.append(float(moved))
            self.op_head.append(_head_size(args) if op.kind in (ATTENTION, ATTENTION_BACKWARD) else 0)
        return outputs

    def kernel(self, moved: float) -> None:
        """Notes an elementwise kernel that is no operator of its own. `moved`: bytes that it reads and writes."""
        if self._paused:
            return
        self.now += 1
        self.op_at.append(self.now)
        self.op_kind.append(MEMORY)
        self.op_flops.append(0.0)
        self.op_bytes.append(moved)
        self.op_head.append(0)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is recorded inside; autograd saves tensors as usual."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    # saved tensors ----------------------------------------------------------------------------------------------------

    def _released(self, index: int) -> None:
        self.now += 1
        self.released_at[index] = max(self.released_at[index], self.now)

    def saved_tensors(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Hooks under which autograd keeps tickets instead of tensors."""

        def pack(tensor: torch.Tensor) -> _Ticket | torch.Tensor:
            if self._paused:
                return tensor
            sid = self._sid(tensor)
            self.now += 1
            index = len(self.saved_at)
            self.saved_storage.append(sid)
            self.saved_at.append(self.now)
            self.unpacked_at.append(int(NEVER))
            self.released_at.append(0)
            self.saved_movable.append(tensor.grad_fn is not None)
            self.saved_bytes.append(tensor.numel() * tensor.element_size())
            self.saved_view.append(self._view(tensor))
            self.saved_weight.append(self._weights.get(tensor.untyped_storage()._cdata, -1) if sid < 0 else -1)
            ticket = _Ticket(self, index, tensor, sid < 0)
            if self.keep_values and sid >= 0 and tensor.device.type == "cpu" and not tensor.is_floating_point():
                ticket.values = self._copy(tensor)
            return ticket

        def unpack(ticket: _Ticket | torch.Tensor) -> torch.Tensor:
            if isinstance(ticket, torch.Tensor):
                return ticket
            self.now += 1
            index = ticket.index
            self.unpacked_at[index] = min(self.unpacked_at[index], self.now)
            if ticket.kept is not None:
                return ticket.kept
            self._paused = True
            try:
                if ticket.values is not None:
                    stand_in = ticket.values.clone()
                else:
                    stand_in = torch.empty_strided(ticket.size, ticket.stride, dtype=ticket.dtype, device=ticket.device)
            finally:
                self._paused = False
            storage = stand_in.untyped_storage()
            key = storage._cdata
            self._ids[key] = self.saved_storage[index]

            def gone(_: object, key: int = key, index: int = index) -> None:
                self._ids.pop(key, None)
                self._watch.pop(key, None)
                self._released(index)

            self._watch[key] = weakref.ref(storage, gone)
            return stand_in

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        self._paused = True
        try:
            return tensor.detach().clone()
        finally:
            self._paused = False

    # modules ----------------------------------------------------------------------------------------------------------

    def watch_weights(self, tensors: Sequence[torch.Tensor]) -> None:
        """Tells saved views of a block's weights apart, by their position in `tensors`."""
        self._weights |= {t.untyped_storage()._cdata: i for i, t in enumerate(tensors)}

    def watch_module(self, name: str, module: nn.Module, reads_from: str | None = None) -> None:
        """Records all of the module's calls; `reads_from` names a child from whose call on the block's own storages that are
        read are collected (see `Tape.inner_reads`)."""

        running: list[int] = []

        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            self.now += 1
            tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            sids = tuple(self._sid(t) for t in tensors)
            keep = [i for i, s in enumerate(sids) if s >= 0]
            calls = self.calls.setdefault(name, [])
            running.append(len(calls))
            calls.append(
                Call(
                    self.now,
                    -1,
                    tuple(sids[i] for i in keep),
                    tuple(tensors[i].grad_fn is not None for i in keep),
                    tuple(tensors[i].numel() * tensors[i].element_size() for i in keep),
                    argument_views=tuple(self._view(tensors[i]) for i in keep),
                )
            )
            if reads_from:
                self._reading[f"{name}@{reads_from}"] = (len(self.size), set(), frozenset(s for s in sids if s >= 0))

        def leave(_: nn.Module, args: Any, output: Any) -> None:
            self.now += 1
            calls, at = self.calls[name], running.pop()
            returned = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
            results = [
                (sid, t.numel() * t.element_size(), self._view(t)) for t in returned if (sid := self._sid(t)) >= 0
            ]
            calls[at] = dataclasses.replace(
                calls[at],
                end=self.now,
                results=tuple(s for s, _, _ in results),
                result_bytes=tuple(n for _, n, _ in results),
                result_views=tuple(v for _, _, v in results),
            )
            if reads_from:
                _, found, _ = self._reading.pop(f"{name}@{reads_from}")
                before = self.inner_reads.get(f"{name}@{reads_from}", ())
                self.inner_reads[f"{name}@{reads_from}"] = tuple(sorted({*before, *found}))
                self._active_reads = [r for r in self._active_reads if r[2] is not found]

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave)
        if reads_from:
            key = f"{name}@{reads_from}"

            def child_enter(_: nn.Module, args: Any) -> None:
                low, found, arguments = self._reading[key]
                self._active_reads.append((low, len(self.size), found, arguments))

            module.get_submodule(reads_from).register_forward_pre_hook(child_enter)

    # result -----------------------------------------------------------------------------------------------------------

    def tape(self, backward_start: int, optimizer_start: int) -> Tape:
        """Everything recorded, as arrays."""
        never = int(NEVER)
        released = [r if r else never for r in self.released_at]
        return Tape(
            length=self.now + 1,
            backward_start=backward_start,
            optimizer_start=optimizer_start,
            size=np.array(self.size, np.int64),
            birth=np.array(self.birth, np.int64),
            death=np.array(self.death, np.int64),
            scratch=np.array(self.scratch, bool),
            saved_storage=np.array(self.saved_storage, np.int64),
            saved_at=np.array(self.saved_at, np.int64),
            unpacked_at=np.array(self.unpacked_at, np.int64),
            released_at=np.array(released, np.int64),
            saved_movable=np.array(self.saved_movable, bool),
            saved_bytes=np.array(self.saved_bytes, np.int64),
            saved_view=np.array(self.saved_view, np.int64),
            saved_weight=np.array(self.saved_weight, np.int64),
            **self._view_columns(),
            op_at=np.array(self.op_at, np.int64),
            op_kind=np.array(self.op_kind, np.int8),
            op_flops=np.array(self.op_flops, np.float64),
            op_bytes=np.array(self.op_bytes, np.float64),
            op_head=np.array(self.op_head, np.int64),
            calls={name: tuple(calls) for name, calls in self.calls.items()},
            inner_reads=dict(self.inner_reads),
        )


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for v in values:
        if isinstance(v, torch.Tensor):
            yield v
        elif isinstance(v, (list, tuple)):
            for inner in v:
                if isinstance(inner, torch.Tensor):
                    yield inner
