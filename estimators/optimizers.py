"""Optimizer state and the transients of its step, in bytes, from the actual shapes of the trained parameters.

The facts (`probes.optimizer_facts`) say which tensors an optimizer keeps; what they weigh is computed here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from probes.optimizer_facts import PAGED_FROM, OptimizerFacts, table

Trained = tuple[tuple[int, ...], int, int]
"""Shape, bytes an element, how many parameters of that kind."""

_SIZES = {"float32": 4, "bfloat16": 2, "uint8": 1}
_LARGEST_AXIS = 10_000


class OptimizerError(ValueError):
    """No figures for that optimizer."""


def facts(name: str) -> OptimizerFacts:
    """What is known of one optimizer.

    Raises:
        OptimizerError: nothing.
    """
    found = table().get(name)
    if found is None:
        raise OptimizerError(f"no figures for optimizer {name!r}; docs/training_setups.md lists those that have some")
    return found


def _tensors(entry: str, shape: tuple[int, ...], element_bytes: int) -> list[int]:
    """Bytes of the tensors that one entry of a state list stands for."""
    count = math.prod(shape)
    kind, _, dtype = entry.partition(":")
    size = _SIZES.get(dtype or kind, element_bytes)
    match kind:
        case "param" | "float32" | "bfloat16" | "uint8":
            return [count * size]
        case "kahan":
            return [count * size] if element_bytes == 2 else []
        case "rows":
            return [count // shape[-1] * size]
        case "cols":
            return [count // shape[-2] * size]
        case "minor":
            return [count // d * size for d in sorted(shape)[-2:]]
        case "axes":
            return [d * d * size for d in shape if d <= _LARGEST_AXIS for _ in range(2)]
        case "slice11":
            return [-(-count // 11) * size]
        case "block256" | "block2048":
            return [count, 4 * -(-count // int(kind.removeprefix("block")))]
        case "half128":
            return [-(-count // 2), 4 * -(-count // 128)]
        case "group32":
            groups = count // shape[-1] * -(-shape[-1] // 32)
            return [count, 4 * groups, 4 * groups]
        case "map256" | "map16":
            return [4 * int(kind.removeprefix("map"))]
        case "scalar":
            return [4]
    raise OptimizerError(f"unknown state {entry!r}")


def state_tensors(name: str, shape: tuple[int, ...], element_bytes: int, *, on_cpu: bool = False) -> list[int]:
    """Bytes of each tensor that is kept for one parameter, in PyTorch's allocator or in managed memory.

    Args:
        on_cpu: the run is on a CPU, where PyTorch's optimizers keep their step counters in memory that is counted.

    Raises:
        OptimizerError: no figures for that optimizer.
    """
    f = facts(name)
    count = math.prod(shape)
    entries = f.state
    if len(shape) < 2 and f.flat is not None:
        entries = f.flat
    elif f.small is not None and (count < f.small_below or count % f.small_multiple):
        entries = f.small
    made = [size for entry in entries for size in _tensors(entry, shape, element_bytes)]
    return made + [4] * (f.cpu[0] if on_cpu and f.cpu else 0)


def _is_paged(f: OptimizerFacts, shape: tuple[int, ...], size: int) -> bool:
    """Whether one state tensor is in managed memory: of a large parameter, and no table of scales."""
    count = math.prod(shape)
    return f.paged and count >= PAGED_FROM and size >= count


def state_sizes(name: str, trained: Iterable[Trained], *, on_cpu: bool = False) -> list[tuple[int, int]]:
    """(bytes of one tensor, how many) of the optimizer state in PyTorch's allocator.

    Raises:
        OptimizerError: no figures for that optimizer.
    """
    f = facts(name)
    return [
        (size, count)
        for shape, element, count in trained
        for size in state_tensors(name, shape, element, on_cpu=on_cpu)
        if not _is_paged(f, shape, size)
    ]


def paged_bytes(name: str, trained: Iterable[Trained]) -> int:
    """Optimizer state in CUDA's managed memory, which moves between host and card and is in no allocator's count.

    Raises:
        OptimizerError: no figures for that optimizer.
    """
    f = facts(name)
    return sum(
        size * count
        for shape, element, count in trained
        for size in state_tensors(name, shape, element)
        if _is_paged(f, shape, size)
    )


def notes(name: str, trained: Iterable[Trained]) -> list[str]:
    """What a reader of an estimate should know about the optimizer.

    Raises:
        OptimizerError: no figures for that optimizer.
    """
    found = [note] if (note := facts(name).note) else []
    if paged := paged_bytes(name, trained):
        found.append(
            f"{paged / 2**30:.2f} GiB of optimizer state is paged: it is counted as host memory, and moves to the card in the "
            "optimizer's step as far as there is room"
        )
    return found


def step_transient(name: str, trained: Iterable[Trained], *, on_cpu: bool = False) -> int:
    """Bytes allocated and freed inside the optimizer's step, at their largest.

    Raises:
        OptimizerError: no figures for that optimizer.
    """
    f = facts(name)
    largest = everything = 0.0
    for shape, element, count in trained:
        elements = math.prod(shape)
        if on_cpu and f.cpu:  # PyTorch steps one parameter at a time there
            largest = max(largest, elements * element * f.cpu[1])
        elif f.transient_scope == "largest":
            largest = max(largest, elements * f.transient_bytes[0 if element == 2 else 1])
        elif f.transient_scope == "all":
            everything += elements * count * f.transient_bytes[0 if element == 2 else 1]
    return round(max(largest, everything))
