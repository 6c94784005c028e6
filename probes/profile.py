"""What a probe found out about a workload. Plain values and arrays; stored as JSON and npz, never as code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from probes.structure import Structure
from probes.tape import Tape
from probes.workload import Workload

FORWARD = "forward"
"""`Profile.source` of a trace of one forward pass without gradients."""
FROZEN, TRAINED, BUFFER, DESCRIBED = 0, 1, 2, 3

Weight = tuple[int, int]
"""(bytes, kind: `FROZEN`, `TRAINED`, `BUFFER`, or `DESCRIBED`: a quantised one) of a tensor of a block."""


@dataclass
class Profile:
    """Everything an estimate needs to know about a workload on a kind of device."""

    workload: Workload
    source: str
    """``traced``, ``measured`` or `FORWARD`."""
    target: str
    """The kind of device that it holds for (`Target.key`)."""
    versions: Mapping[str, str]
    structure: Structure
    tape: Tape
    base_sizes: tuple[tuple[int, int], ...]
    """Frozen parameters and buffers: (bytes of one tensor, how many of that size)."""
    trained_shapes: tuple[tuple[tuple[int, ...], int, int], ...]
    """Trained parameters: (shape, bytes an element, how many of that kind)."""
    input_bytes: tuple[int, ...]
    """The batch and the target, one entry a tensor."""
    parameters: int
    """Of the base model."""
    host_weight_bytes: int = 0
    """Weights that wait in host memory and pass through the device in every forward and backward."""
    host_quantized_bytes: int = 0
    """Of them, in a quantised form."""
    block_weights: Mapping[str, tuple[Weight, ...]] = field(default_factory=dict)
    """By block, its parameters and buffers; those that other modules have too are left out."""
    notes: tuple[str, ...] = ()
    """Assumptions and fallbacks of the probe."""
    measured: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By kind of block, what a measured probe saw (bytes and seconds)."""

    @property
    def trained_sizes(self) -> tuple[tuple[int, int, int], ...]:
        """Trained parameters: (elements, bytes an element, how many of that kind)."""
        return tuple((math.prod(shape), size, count) for shape, size, count in self.trained_shapes)

    @property
    def trained_elements(self) -> int:
        return sum(n * count for n, _, count in self.trained_sizes)
