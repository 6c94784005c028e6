"""How sure an estimate is: relative bands from the residuals against published measurements."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache

from probes import resources


@dataclass(frozen=True)
class Bands:
    """95 % bands as shares of the estimate."""

    peak_below: float
    """The measured peak may be this much below the estimate."""
    peak_above: float
    time_below: float
    time_above: float
    source: str

    def peak(self, estimate: int) -> tuple[int, int]:
        """(low, high) in bytes."""
        return round(estimate * (1 - self.peak_below)), round(estimate * (1 + self.peak_above))

    def time(self, estimate: float) -> tuple[float, float]:
        """(low, high) in seconds."""
        return estimate * (1 - self.time_below), estimate * (1 + self.time_above)


@cache
def bands_for(quantised: bool) -> Bands:
    """The bands that come with this version, for a 16- or 32-bit base or for a quantised one."""
    return Bands(**json.loads(resources.text("bands.json"))["quantised" if quantised else "float"])
