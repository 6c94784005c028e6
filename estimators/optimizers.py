"""Optimizer state and the transients of its step, from `data/optimizers.csv` (each row with its source)."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from probes import resources


class OptimizerError(ValueError):
    """No figures for that optimizer."""


@dataclass(frozen=True)
class OptimizerFacts:
    """Bytes a trained element."""

    state_bytes: float
    state_bytes_per_tensor: int
    transient_bytes: float
    transient_scope: str
    """``largest``: one parameter at a time; ``all``: a list copy over all parameters; ``none``."""
    source: str


@cache
def _table() -> dict[tuple[str, int], OptimizerFacts]:
    rows = csv.DictReader(resources.text("optimizers.csv").splitlines())
    return {
        (r["name"], int(r["parameter_bytes"])): OptimizerFacts(
            float(r["state_bytes"]),
            int(r["state_bytes_per_tensor"]),
            float(r["transient_bytes"]),
            r["transient_scope"],
            r["source"],
        )
        for r in rows
    }


def facts(name: str, parameter_bytes: int, *, on_cpu: bool = False) -> OptimizerFacts:
    """Figures of one optimizer for parameters of 2 or 4 bytes.

    Args:
        on_cpu: the run is on a CPU, where PyTorch's AdamW steps one parameter at a time with two temporaries and keeps a
            4-byte step counter a parameter (measured).

    Raises:
        OptimizerError: unknown name or size.
    """
    if on_cpu and name == "adamw":
        return OptimizerFacts(
            2.0 * parameter_bytes, 4, 2.0 * parameter_bytes, "largest", "torch.optim.AdamW on a CPU, for-loop"
        )
    found = _table().get((name, parameter_bytes))
    if found is None:
        names = sorted({n for n, _ in _table()})
        raise OptimizerError(
            f"no figures for optimizer {name!r} with {parameter_bytes}-byte parameters; known: {', '.join(names)}"
        )
    return found


def state_sizes(name: str, trained: Iterable[tuple[int, int, int]], *, on_cpu: bool = False) -> list[tuple[int, int]]:
    """(bytes, how many) of optimizer state, one entry a kind of parameter.

    Args:
        trained: (elements, bytes an element, how many).
    """
    out = []
    for elements, size, count in trained:
        f = facts(name, size, on_cpu=on_cpu)
        out.append((round(elements * f.state_bytes) + f.state_bytes_per_tensor, count))
    return out


def step_transient(name: str, trained: Iterable[tuple[int, int, int]], *, on_cpu: bool = False) -> int:
    """Bytes allocated and freed inside the optimizer's step, at their largest."""
    largest = everything = 0.0
    for elements, size, count in trained:
        f = facts(name, size, on_cpu=on_cpu)
        if f.transient_scope == "largest":
            largest = max(largest, elements * f.transient_bytes)
        elif f.transient_scope == "all":
            everything += elements * f.transient_bytes * count
    return round(max(largest, everything))
