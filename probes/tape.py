"""The tape of one training step: when every storage is born, let go by Python, saved for backward and released.

The trace runs the step once without any schedule and, for every tensor that autograd saves, keeps only a ticket. So the
tape knows apart when Python drops a storage and when backward has used it, and a simulation can replay any schedule.
Positions are event numbers within the step; sizes are bytes as requested (rounding is the device's business).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

NEVER = np.int64(2**40)
"""Position of a death that does not happen within the step."""

GEMM, CONVOLUTION, ATTENTION, MEMORY, ATTENTION_BACKWARD, REDUCTION = 0, 1, 2, 3, 4, 5
"""Kinds of kernel; a reduction is a matrix product so long and narrow that its result is a single tile, which one
multiprocessor computes alone (the gradient of a LoKr's small factor)."""


@dataclass(frozen=True)
class Call:
    """One call of a module in the forward pass."""

    start: int
    end: int
    arguments: tuple[int, ...]
    """Storages of its tensor arguments."""
    movable: tuple[bool, ...]
    """For each: it carries a grad_fn, so offloading may move it."""
    argument_bytes: tuple[int, ...] = ()
    """For each: bytes of the tensor itself (a view may be smaller than its storage)."""
    results: tuple[int, ...] = ()
    """Storages of the tensors that it returned."""
    result_bytes: tuple[int, ...] = ()
    result_views: tuple[int, ...] = ()
    """For each: which view of its storage it is, a row of the tape's `view_...` columns."""
    argument_views: tuple[int, ...] = ()
    """The same of the arguments."""


@dataclass
class Tape:
    """All arrays are parallel within their group."""

    length: int
    backward_start: int
    optimizer_start: int

    # storages
    size: Ints
    birth: Ints
    death: Ints
    """When Python (and the engine) let go, were nothing saved for backward. NEVER: lives past the step."""
    scratch: Flags
    """Allocated and freed inside one kernel."""

    # saved tensors, in the order in which they were saved
    saved_storage: Ints
    """-1: a weight or an input, resident in any case."""
    saved_at: Ints
    unpacked_at: Ints
    released_at: Ints
    saved_movable: Flags
    """The tensor carried a grad_fn when it was saved."""
    saved_bytes: Ints
    """Bytes of the saved tensor itself."""
    saved_view: Ints
    """Which view of its storage it is, a row of the columns below."""
    saved_weight: Ints
    """Of a block's weight: its position in `Profile.block_weights`; -1: anything else."""

    # views: distinct (offset, shape, strides, type), whatever the storage
    view_start: Ints
    """Bytes from the storage's beginning."""
    view_extent: Ints
    """Bytes from its first to behind its last element."""
    view_bytes: Ints
    """Bytes that it occupies: gaps do not count, and of an expanded view each element once."""
    view_type: Ints
    """Equal for views of one dtype."""

    # kernels
    op_at: Ints
    op_kind: NDArray[np.int8]
    op_flops: Floats
    op_bytes: Floats
    op_head: Ints
    """Head size of an attention kernel; 0 for the others."""

    calls: Mapping[str, tuple[Call, ...]] = field(default_factory=dict)
    """By qualified module name, for the blocks and the regions inside them: every call, in order. A block may call one
    feed-forward for its image and again for its text tokens."""

    inner_reads: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By ``block@child``: storages born in the block before the child's call, or its arguments, that are read from there on."""

    def digest(self) -> str:
        """Of the recorded step: equal for equal columns."""
        found = hashlib.sha256()
        for column in dataclasses.fields(self):
            if isinstance(values := getattr(self, column.name), np.ndarray):
                found.update(np.ascontiguousarray(values).data)
        return found.hexdigest()[:32]
