"""Facts about optimizers: what each keeps for a parameter and needs while it steps, from `data/optimizers.csv`.

State is written there as a list of tensors (`STATE`), because what some optimizers keep depends on a parameter's shape.
Imports neither torch nor numpy.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache

from probes import resources

STATE = {
    "param": "a tensor of the parameter's shape in the parameter's dtype",
    "kahan": "the same, for 16-bit parameters alone",
    "float32": "a tensor of the parameter's shape in float32 (so `bfloat16`, `uint8`)",
    "rows:float32": "one value for every row of the last dimension (so `rows:param`)",
    "cols:float32": "one value for every column of the last two dimensions (so `cols:param`)",
    "minor:float32": "one value for every element but those of the largest dimension, and but those of the second largest",
    "axes:float32": "two square matrices for every dimension of at most 10000 (so `axes:param`)",
    "slice11:bfloat16": "every 11th element (so `slice11:param`)",
    "block256": "8-bit values and a float32 scale for every 256",
    "block2048": "8-bit values and a float32 scale for every 2048",
    "half128": "4-bit values and a float32 scale for every 128",
    "group32": "8-bit values, a float32 scale and zero point for every 32 of the last dimension (or all of a shorter one)",
    "map256": "256 float32 values (so `map16`)",
    "scalar": "one float32",
}
"""What an entry of a state list can be."""


@dataclass(frozen=True)
class OptimizerFacts:
    """One optimizer."""

    name: str
    aliases: tuple[str, ...]
    """Names that other trainers and packages have for it, in lower case."""
    state: tuple[str, ...]
    """Tensors that are kept for a parameter (`STATE`)."""
    flat: tuple[str, ...] | None
    """For a parameter of one dimension; None: as `state`."""
    small: tuple[str, ...] | None
    """For a parameter of fewer than `small_below` elements, or of a number that `small_multiple` does not divide."""
    small_below: int
    small_multiple: int
    transient_bytes: tuple[float, float]
    """A trained element, inside the step: for 2-byte and for 4-byte parameters."""
    transient_scope: str
    """``largest``: one parameter at a time; ``all``: a list copy over all parameters; ``none``."""
    cpu: tuple[int, float] | None
    """Of PyTorch's own, which a run here really uses: float32 scalars that a CPU keeps for a parameter beside `state`, and
    copies of one parameter that its step makes on a CPU. None: a run has AdamW in its place."""
    paged: bool
    """State tensors of at least `PAGED_FROM` elements are in CUDA's managed memory, outside PyTorch's allocator."""
    note: str
    """What an answer with this optimizer says about it; may be empty."""
    source: str


PAGED_FROM = 100_000


def _list(text: str) -> tuple[str, ...]:
    return tuple(text.split())


@cache
def table() -> dict[str, OptimizerFacts]:
    """By name, in the order of the file."""
    return {
        r["name"]: OptimizerFacts(
            name=r["name"],
            aliases=_list(r["aliases"]),
            state=_list(r["state"]),
            flat=_list(r["flat"]) if r["flat"] else None,
            small=_list(r["small"]) if r["small"] else None,
            small_below=int(r["small_below"] or 0),
            small_multiple=int(r["small_multiple"] or 1),
            transient_bytes=(float(r["transient_2"]), float(r["transient_4"])),
            transient_scope=r["transient_scope"],
            cpu=(int(r["cpu_scalars"]), float(r["cpu_copies"])) if r["cpu_scalars"] else None,
            paged=r["paged"] == "1",
            note=r["note"],
            source=r["source"],
        )
        for r in csv.DictReader(resources.text("optimizers.csv").splitlines())
    }


@cache
def _aliases() -> dict[str, str]:
    return {alias: facts.name for facts in table().values() for alias in facts.aliases}


def canonical(name: str) -> str | None:
    """The name in the table of an optimizer, given that or one of its aliases (in any case); None: not known."""
    lower = name.lower()
    return lower if lower in table() else _aliases().get(lower)


def spellings() -> tuple[str, ...]:
    """Every name that `canonical` takes, in lower case."""
    return (*table(), *_aliases())
