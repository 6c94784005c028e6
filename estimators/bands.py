"""How sure an estimate is: relative bands from the residuals against published measurements."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache

from probes import resources
from probes.workload import Workload


@dataclass(frozen=True)
class Bands:
    """95 % bands as shares of the estimate."""

    peak_below: float
    """The measured peak may be this much below the estimate."""
    peak_above: float
    time_below: float
    time_above: float
    source: str
    unreliable: bool = False
    """Published rows of this kind miss by more than the widest band; the estimate is a rough guess."""

    def peak(self, estimate: int) -> tuple[int, int]:
        """(low, high) in bytes."""
        return round(estimate * (1 - self.peak_below)), round(estimate * (1 + self.peak_above))

    def time(self, estimate: float) -> tuple[float, float]:
        """(low, high) in seconds."""
        return estimate * (1 - self.time_below), estimate * (1 + self.time_above)


def kind(workload: Workload) -> str:
    """The kind of job whose published residuals make its band."""
    if workload.weights_offload != "none":
        return "offloaded weights"
    base = "float base" if workload.precision in ("bf16", "fp16", "fp32") else "quantised base"
    return f"{'lokr' if workload.adapter == 'lokr' else 'lora'}, {base}"


@cache
def bands_for(name: str) -> Bands:
    """The bands that come with this version for a kind of job (see :func:`kind`)."""
    return Bands(**json.loads(resources.text("bands.json"))[name])
