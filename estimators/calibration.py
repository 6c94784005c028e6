"""What measurements taught: the step-time rates, and how far estimates miss. Readable JSON; reading it needs no fitting library.

The calibration that comes with this version is `data/calibration.json`, made from published measurements. `advise calibrate`
makes another from published rows and receipts of one's own; it then takes the place of the first.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import platformdirs

from probes import resources, store
from probes.profile import Profile
from probes.tape import CONVOLUTION
from probes.workload import FLOAT_PRECISIONS, LYCORIS, Workload

FORMAT = 2
WIDEST = 0.35
"""A wider band of the peak would say nothing; such a kind of job is called a rough guess instead."""
WIDEST_LOG = 20.0
"""No logarithm of measured over estimated in a file is larger."""
NARROWEST = 0.005
CONVOLUTIONAL = 0.1
"""Share of a step's operations from which convolutions count: U-Nets, and transformers that mix with convolutions (Sana)."""
FEATURES = 4
LARGEST_RESIDUAL = 0.3
"""A residual moves no time by more (as a logarithm)."""
CARD_PRIOR = 4.0
"""Receipts of a card count as evidence against this many rows of the general band."""

SEARCH: dict[str, tuple[float, float, float]] = {
    "gemm": (0.7, 0.4, 0.9),
    "convolution": (0.5, 0.2, 0.9),
    "attention": (0.6, 0.1, 1.0),
    "attention_backward": (0.45, 0.1, 1.0),
    "softmax_width": (40.0, 5.0, 150.0),
    "legacy_mma_on_hopper": (0.62, 0.3, 1.0),
    "reduction_bytes_per_second": (2.5e10, 5e9, 2e11),
    "matrix_on_ada": (0.9, 0.5, 1.1),
    "memory": (0.8, 0.4, 0.95),
    "cache_speedup": (2.0, 1.0, 6.0),
    "launch_seconds": (2e-5, 2e-6, 6e-5),
    "hook_seconds": (2e-5, 1e-9, 2e-4),
    "copy_seconds": (5e-5, 1e-9, 1e-3),
    "exposed_copy_out": (0.3, 1e-3, 1.0),
    "streamed_quantised_bytes_per_second": (6e9, 1e9, 6e10),
}
"""Rate: what is expected of such hardware, smallest, largest."""
FIXED = {"kernel_tail_seconds": (1e-9, 1e-3), "blend": (1.0, 100.0)}
"""Rates that are not fitted: smallest, largest."""
BEYOND = 100.0
"""A file's rates may lie outside the search by this factor; what is further out is no rate of any hardware."""


class CalibrationError(ValueError):
    """A calibration file cannot be used."""


@dataclass(frozen=True)
class Band:
    """How the measured value lies around the estimate: log(measured / estimate) at rising levels."""

    levels: tuple[float, ...]
    log_ratios: tuple[float, ...]

    def at(self, level: float) -> float:
        """The log ratio that a share `level` of measurements stays below; linear between the known levels."""
        return _interpolate(level, self.levels, self.log_ratios)

    def below(self, log_ratio: float) -> float:
        """Probability that a measurement lies below this log ratio; beyond the known levels the tails halve with each
        quarter of the band's width."""
        low, high = self.log_ratios[0], self.log_ratios[-1]
        scale = max(high - low, 1e-6) / 4
        if log_ratio < low:
            return self.levels[0] * 0.5 ** ((low - log_ratio) / scale)
        if log_ratio > high:
            return 1 - (1 - self.levels[-1]) * 0.5 ** ((log_ratio - high) / scale)
        return _interpolate(log_ratio, self.log_ratios, self.levels)

    @classmethod
    def symmetric(cls, width: float) -> Band:
        """95 % within a share `width` of the estimate, normally distributed."""
        levels = (0.025, 0.5, 0.975)
        return cls(levels, (-width, 0.0, width))

    def scaled(self, factor: float) -> Band:
        """The same shape, `factor` times as wide."""
        return Band(self.levels, tuple(v * factor for v in self.log_ratios))


@dataclass(frozen=True)
class Bands:
    """Of one kind of job."""

    peak_band: Band
    time_band: Band
    source: str
    unreliable: bool = False
    """More than a tenth of the measured rows of this kind miss by more than the widest band; the estimate is a rough guess."""

    def peak(self, estimate: int) -> tuple[int, int]:
        """95 % band of the peak, (low, high) in bytes; always around the estimate."""
        low, high = self._edges(self.peak_band, math.log1p(WIDEST))
        return round(estimate * math.exp(low)), round(estimate * math.exp(high))

    def time(self, estimate: float) -> tuple[float, float]:
        """95 % band of the step time, (low, high) in seconds; always around the estimate."""
        low, high = self._edges(self.time_band, math.log(2.0))
        return estimate * math.exp(low), estimate * math.exp(high)

    def fits(self, estimate: int, capacity: int) -> float:
        """Probability that the measured peak stays within `capacity` bytes."""
        if capacity <= 0 or estimate <= 0:
            return 0.0
        return self.peak_band.below(math.log(capacity / estimate))

    @staticmethod
    def _edges(band: Band, widest: float) -> tuple[float, float]:
        low, high = min(band.at(0.025), -NARROWEST), max(band.at(0.975), NARROWEST)
        return max(low, -widest), min(high, widest)


@dataclass(frozen=True)
class Card:
    """What receipts of one card say about step times and peaks there."""

    receipts: int
    time_log_ratio: float
    """Mean of log(measured / estimate), held near 0 while receipts are few."""
    time_scale: float
    """Width of the time band there, as a share of the general one."""
    peak_scale: float


@dataclass(frozen=True)
class Calibration:
    """All of it."""

    rates: Mapping[str, float]
    bands: Mapping[str, Bands]
    source: str
    cards: Mapping[str, Card] = field(default_factory=dict)
    time_residual: tuple[float, ...] = ()
    """What a step's kind adds to the log of its time: constant, then one factor a feature of `step_features`. Empty: nothing."""
    errors: Mapping[str, Any] = field(default_factory=dict)
    """Errors on families and cards that were left out of the fit, for the record."""

    def to_json(self) -> dict[str, Any]:
        return {
            "calibration_format": FORMAT,
            "source": self.source,
            "rates": dict(self.rates),
            "bands": {
                kind: {
                    "unreliable": b.unreliable,
                    "source": b.source,
                    "levels": list(b.peak_band.levels),
                    "peak_log_ratios": list(b.peak_band.log_ratios),
                    "time_log_ratios": list(b.time_band.log_ratios),
                }
                for kind, b in self.bands.items()
            },
            "time_residual": list(self.time_residual),
            "cards": {name: vars(card) for name, card in self.cards.items()},
            "errors": dict(self.errors),
        }

    @classmethod
    def from_json(cls, value: Any) -> Calibration:
        """Raises CalibrationError where the value is not one of these."""
        try:
            if value["calibration_format"] != FORMAT:
                raise CalibrationError(
                    f"calibration format {value['calibration_format']!r}, this version reads {FORMAT}"
                )
            bands = {
                kind: Bands(
                    Band(_numbers(b["levels"], 0, 1), _numbers(b["peak_log_ratios"])),
                    Band(_numbers(b["levels"], 0, 1), _numbers(b["time_log_ratios"])),
                    str(b["source"]),
                    bool(b["unreliable"]),
                )
                for kind, b in value["bands"].items()
            }
            for b in bands.values():
                lengths = {len(b.peak_band.levels), len(b.peak_band.log_ratios), len(b.time_band.log_ratios)}
                if len(lengths) != 1 or len(b.peak_band.levels) < 2:
                    raise CalibrationError("a band's levels and values differ in number")
            rates = _rates(value["rates"])
            cards = {
                str(name): Card(
                    int(_number(c["receipts"], 0, 1e9)),
                    _number(c["time_log_ratio"], -WIDEST_LOG, WIDEST_LOG),
                    _number(c["time_scale"], 0, 100),
                    _number(c["peak_scale"], 0, 100),
                )
                for name, c in value["cards"].items()
            }
            residual = tuple(_number(v, -100, 100) for v in value["time_residual"])
            if residual and len(residual) != 1 + FEATURES:
                raise CalibrationError(f"the time residual has {len(residual)} numbers, not {1 + FEATURES}")
            return cls(rates, bands, str(value["source"]), cards, residual, dict(value["errors"]))
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            if isinstance(error, CalibrationError):
                raise
            raise CalibrationError(f"not a calibration: {type(error).__name__}: {error}") from None


def _rates(found: Mapping[str, Any]) -> dict[str, float]:
    limits = {name: (low / BEYOND, high * BEYOND) for name, (_, low, high) in SEARCH.items()} | FIXED
    for name in (*limits, *found):
        if name not in found or name not in limits:
            raise CalibrationError(f"the rate {name!r} is {'missing' if name in limits else 'not known'}")
    try:
        return {name: _number(found[name], *between) for name, between in limits.items()}
    except CalibrationError as error:
        raise CalibrationError(f"a rate is not possible: {error}") from None


def _number(value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CalibrationError(f"{value!r} is not a finite number")
    if not low <= value <= high:
        raise CalibrationError(f"{value:g} is not from {low:g} to {high:g}")
    return float(value)


def _numbers(values: Any, low: float = -WIDEST_LOG, high: float = WIDEST_LOG) -> tuple[float, ...]:
    found = tuple(_number(v, low, high) for v in values)
    if any(b < a for a, b in itertools.pairwise(found)):
        raise CalibrationError("a band's values do not rise")
    return found


def _interpolate(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    if x <= xs[0]:
        return ys[0]
    for i in range(1, len(xs)):
        if x <= xs[i]:
            width = xs[i] - xs[i - 1]
            return ys[i] if width <= 0 else ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / width
    return ys[-1]


def job_kind(profile: Profile, *, compile_works: bool = True) -> str:
    """The kind of job whose residuals make its band.

    Args:
        compile_works: asked-for compile takes effect; otherwise the job counts as eager.
    """
    tape = profile.tape
    work = float(tape.op_flops.sum())
    convolutions = float(tape.op_flops[tape.op_kind == CONVOLUTION].sum())
    workload = profile.workload if compile_works else dataclasses.replace(profile.workload, compile="none")
    return kind(workload, convolutional=convolutions > CONVOLUTIONAL * work)


def kind(workload: Workload, *, convolutional: bool) -> str:
    """The kind of job, for a model of which it is known whether convolutions are a good part of its work."""
    if workload.compiles:
        return COMPILED
    if workload.streamed_percent:
        return "offloaded weights"
    if workload.precision in FLOAT_PRECISIONS:
        base = "float base"
    else:
        base = "dynamically quantised base" if workload.precision == "fp8-torchao" else "quantised base"
    if convolutional:
        return f"convolutional model, {base}"
    return f"{'lokr' if workload.adapter in LYCORIS else 'lora'}, {base}"


def step_features(gpu: float, host: float, recompute: float, copies: float, quantised: bool) -> tuple[float, ...]:
    """What kind of step it is, from its times in seconds."""
    balance = math.log(max(gpu, 1e-9) / max(host, 1e-9))
    whole = max(gpu, host, 1e-9)
    return (max(-2.0, min(2.0, balance)), recompute / max(gpu, 1e-9), copies / (whole + copies), float(quantised))


def own_file() -> Path:
    """Where `advise calibrate` keeps its result: the user's data folder, or ``ADVISE_CACHE_DIR`` where that is set."""
    override = os.environ.get("ADVISE_CACHE_DIR")
    folder = Path(override) if override else Path(platformdirs.user_data_dir("checkpoint-advisor"))
    return folder / "calibration.json"


@cache
def packaged() -> Calibration:
    """The calibration that comes with this version."""
    return Calibration.from_json(json.loads(resources.text("calibration.json")))


MOST_BYTES = 64 << 20
"""No calibration is larger; the packaged one has some KiB."""


@cache
def _own(path: Path, modified: int) -> Calibration:
    try:
        return Calibration.from_json(json.loads(store.read_file(path, MOST_BYTES)))
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        raise CalibrationError(f"{path}: {str(error).splitlines()[0]}") from None


def current() -> tuple[Calibration, str | None]:
    """The user's calibration if there is one, else the packaged one; and a warning where the user's cannot be read."""
    path = own_file()
    try:
        modified = path.stat().st_mtime_ns
    except OSError:
        return packaged(), None
    try:
        return _own(path, modified), None
    except CalibrationError as error:
        return packaged(), f"the calibration file cannot be used and is left aside ({error})"


COMPILED = "compiled blocks"
"""A kind of job of its own: nothing of it was measured on a GPU."""
_COMPILED = Bands(Band.symmetric(0.1), Band.symmetric(0.69), "CPU runs with Inductor (peak); an assumption (step time)")
_UNKNOWN = Bands(Band.symmetric(0.3), Band.symmetric(0.69), "nothing of this kind was measured", unreliable=True)


def bands_for(name: str) -> Bands:
    """The bands of a kind of job (see :func:`kind`)."""
    return current()[0].bands.get(name) or packaged().bands.get(name) or (_COMPILED if name == COMPILED else _UNKNOWN)


def card(name: str) -> Card | None:
    """What receipts say about a card; None: there are none."""
    return current()[0].cards.get(name)
