"""Fits a calibration: physical rates by robust least squares, bands by leaving families out. Needs scipy and scikit-learn.

The rates are few, positive and shared by all models and cards. A residual model on top (ridge regression on what kind of step
it is) is tried each time and kept out unless families that it has not seen come out better with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estimators.calibration import CARD_PRIOR, NARROWEST, SEARCH, WIDEST, Band, Bands, Calibration, Card, step_features
from estimators.step_time import Rates, Work, rates_from
from probes.tape import Floats

PRIOR = 0.3
"""Pull of a rate's logarithm towards what is expected; a family's rows together weigh 4."""
OUTLIER = 0.3
"""Log error from which a row counts less and less."""
LEVELS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.975, 0.99)
COVERED = 0.9
"""Share of the rows of a family left out that its band should hold; with a handful of families no more can be shown."""
WIDER = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5)
WORTH = 0.05
"""A residual model has to lower the error on unseen families by this share to be kept."""


@dataclass(frozen=True)
class Case:
    """One measurement beside its estimate."""

    family: str
    gpu: str
    kind: str
    peak: int
    """Estimate, bytes."""
    measured_peak: float | None
    """Bytes."""
    work: Work | None
    measured_seconds: float | None
    own: bool = False
    """From a receipt."""


def fit_rates(cases: Sequence[Case]) -> dict[str, float]:
    """The rates that explain the cases' step times best; every family weighs the same."""
    from scipy.optimize import least_squares

    used = [c for c in cases if c.work is not None and c.measured_seconds]
    names = list(SEARCH)
    start, low, high = (np.log([SEARCH[n][i] for n in names]) for i in range(3))
    if not used:
        return {n: SEARCH[n][0] for n in names}
    count = {f: sum(c.family == f for c in used) for f in {c.family for c in used}}
    weight = np.array([4 / math.sqrt(count[c.family]) for c in used])
    measured = np.log([c.measured_seconds or 1.0 for c in used])

    def residuals(z: Floats) -> Floats:
        rates = rates_from(dict(zip(names, np.exp(z).tolist(), strict=True)))
        found: Floats = np.concatenate([weight * (np.log(_seconds(used, rates)) - measured), PRIOR * (z - start)])
        return found

    found = least_squares(residuals, start, bounds=(low, high), loss="cauchy", f_scale=OUTLIER, max_nfev=40)
    return {n: float(f"{v:.4g}") for n, v in zip(names, np.exp(found.x), strict=True)}


def _seconds(cases: Sequence[Case], rates: Rates) -> Floats:
    return np.array([c.work.step(rates).total for c in cases if c.work is not None])


def left_out(cases: Sequence[Case], group: Callable[[Case], str]) -> Floats:
    """log(measured / estimate) of every case's step time, the estimate made without the case's group; nan without one."""
    found = np.full(len(cases), np.nan)
    for name in sorted({group(c) for c in cases}):
        rates = rates_from(fit_rates([c for c in cases if group(c) != name]))
        members = [i for i, c in enumerate(cases) if group(c) == name and c.work is not None and c.measured_seconds]
        for i in members:
            case = cases[i]
            assert case.work is not None
            assert case.measured_seconds is not None
            found[i] = math.log(case.measured_seconds / case.work.step(rates).total)
    return found


def peak_residuals(cases: Sequence[Case]) -> Floats:
    """log(measured / estimate) of every case's peak; nothing is fitted to a peak."""
    return np.array([math.log(c.measured_peak / c.peak) if c.measured_peak else np.nan for c in cases])


def quantiles(values: Floats, families: Sequence[str], levels: Sequence[float] = LEVELS) -> tuple[float, ...]:
    """Quantiles with every family weighing the same, and one further family assumed as far out as the worst row."""
    known = ~np.isnan(values)
    kept, owners = values[known], [f for f, k in zip(families, known, strict=True) if k]
    if not len(kept):
        return tuple(0.0 for _ in levels)
    count = {f: owners.count(f) for f in set(owners)}
    weight = np.array([1 / count[f] for f in owners])
    order = np.argsort(kept)
    kept, weight = kept[order], weight[order]
    total = len(count) + 1.0
    below = (0.5 + np.cumsum(weight) - weight / 2) / total
    return tuple(float(v) for v in np.interp(levels, below, kept))


def bands(cases: Sequence[Case], time_residuals: Floats) -> dict[str, Bands]:
    """By kind of job; wide enough that families that took no part in them are inside COVERED of the time."""
    found = {}
    peaks = peak_residuals(cases)
    wider_peak, wider_time = widening(cases, peaks), widening(cases, time_residuals)
    for name in sorted({c.kind for c in cases if c.measured_peak}):
        of_kind = np.array([c.kind == name for c in cases])
        families = [c.family for c in cases if c.kind == name]
        peak, time = quantiles(peaks[of_kind], families), quantiles(time_residuals[of_kind], families)
        n_peaks, n_times = int((~np.isnan(peaks[of_kind])).sum()), int((~np.isnan(time_residuals[of_kind])).sum())
        found[name] = Bands(
            Band(LEVELS, peak).scaled(wider_peak),
            Band(LEVELS, time).scaled(wider_time),
            f"{n_peaks} measured peaks and {n_times} step times of {len(set(families))} families, each family left out in turn; "
            f"{wider_peak:g} and {wider_time:g} times as wide as they lie, for families that are not among them",
            unreliable=max(abs(v) for v, level in zip(peak, LEVELS, strict=True) if 0.1 <= level <= 0.9)
            > math.log1p(WIDEST),
        )
    return found


def coverage(
    cases: Sequence[Case], residuals: Floats, wider: float = 1.0, least_families: int = 2
) -> tuple[float, int]:
    """Share of rows inside the 95 % band that the other families of their kind give, and how many rows had one.

    Args:
        wider: the band is this many times as wide.
        least_families: kinds with fewer families do not count.
    """
    inside = total = 0
    for name in {c.kind for c in cases}:
        index = [i for i, c in enumerate(cases) if c.kind == name and not np.isnan(residuals[i])]
        families = {cases[i].family for i in index}
        if len(families) < max(2, least_families):
            continue
        for family in families:
            others = [i for i in index if cases[i].family != family]
            low, high = quantiles(residuals[others], [cases[i].family for i in others], (0.025, 0.975))
            low, high = min(low, -NARROWEST) * wider, max(high, NARROWEST) * wider
            own = [residuals[i] for i in index if cases[i].family == family]
            total += len(own)
            inside += sum(bool(low <= r <= high) for r in own)
    return (inside / total if total else math.nan), total


def widening(cases: Sequence[Case], residuals: Floats) -> float:
    """How much wider bands have to be for families that took no part in them. Kinds with two families say nothing of that."""
    for wider in WIDER:
        share, rows = coverage(cases, residuals, wider, least_families=3)
        if not rows or share >= COVERED:
            return wider
    return WIDER[-1]


def residual_model(cases: Sequence[Case], rates: Rates, residuals: Floats) -> tuple[tuple[float, ...], float]:
    """A ridge regression on the kind of step, and by which share it lowers the median error on families that it has not seen.

    Empty where that is less than WORTH.
    """
    from sklearn.linear_model import Ridge
    from sklearn.model_selection import LeaveOneGroupOut

    index = [i for i, c in enumerate(cases) if c.work is not None and not np.isnan(residuals[i])]
    groups = [cases[i].family for i in index]
    if len(set(groups)) < 3:
        return (), 0.0
    features = np.array([_features(cases[i], rates) for i in index])
    count = {g: groups.count(g) for g in set(groups)}
    weight = np.array([1 / count[g] for g in groups])
    wanted = residuals[index]
    clipped = np.clip(wanted, -1, 1)
    corrected = np.zeros(len(index))
    for train, test in LeaveOneGroupOut().split(features, wanted, groups):
        model = Ridge(alpha=1.0).fit(features[train], clipped[train], sample_weight=weight[train])
        corrected[test] = wanted[test] - model.predict(features[test])
    before, after = (float(np.median(np.abs(v))) for v in (wanted, corrected))
    gain = 1 - after / before if before else 0.0
    if gain < WORTH:
        return (), gain
    model = Ridge(alpha=1.0).fit(features, clipped, sample_weight=weight)
    return tuple(float(f"{v:.4g}") for v in (model.intercept_, *model.coef_)), gain


def _features(case: Case, rates: Rates) -> tuple[float, ...]:
    assert case.work is not None
    time = case.work.step(rates)
    return step_features(time.gpu, time.host, time.recompute, time.copies, "quantised" in case.kind)


def cards(cases: Sequence[Case], rates: Rates, found: dict[str, Bands]) -> dict[str, Card]:
    """What one's own receipts say about each card."""
    out = {}
    for name in sorted({c.gpu for c in cases if c.own}):
        own = [c for c in cases if c.own and c.gpu == name]
        times = np.array(
            [math.log(c.measured_seconds / c.work.step(rates).total) for c in own if c.work and c.measured_seconds]
        )
        peaks = np.array([math.log(c.measured_peak / c.peak) for c in own if c.measured_peak])
        n = len(times)
        mean = float(times.sum() / (n + CARD_PRIOR)) if n else 0.0
        out[name] = Card(
            receipts=len(own),
            time_log_ratio=mean,
            time_scale=_narrowed(times - mean, [found[c.kind].time_band for c in own if c.work and c.measured_seconds]),
            peak_scale=_narrowed(peaks, [found[c.kind].peak_band for c in own if c.measured_peak]),
        )
    return out


def _narrowed(residuals: Floats, general: Sequence[Band]) -> float:
    """Width that the residuals of a card support as a share of the general bands', whose rows count as CARD_PRIOR receipts."""
    if not len(residuals):
        return 1.0
    wide = np.array([max(abs(b.at(0.025)), abs(b.at(0.975)), 1e-3) / 1.96 for b in general])
    share = (CARD_PRIOR + float(((residuals / wide) ** 2).sum())) / (CARD_PRIOR + len(residuals))
    return math.sqrt(share)


def calibrate(cases: Sequence[Case], source: str) -> Calibration:
    """Everything: rates, bands, cards, and the errors on what was left out."""
    fitted = fit_rates(cases)
    rates = rates_from(fitted)
    by_family, by_gpu = left_out(cases, lambda c: c.family), left_out(cases, lambda c: c.gpu)
    found = bands(cases, by_family)
    peaks = peak_residuals(cases)
    peak_cover, time_cover = (coverage(cases, r, widening(cases, r)) for r in (peaks, by_family))
    residual, gain = residual_model(cases, rates, by_family)
    errors: dict[str, Any] = {
        "peak": _summary(peaks),
        "time, families left out": _summary(by_family),
        "time, cards left out": _summary(by_gpu),
        "peaks inside the band of the other families": {"share": round(peak_cover[0], 4), "rows": peak_cover[1]},
        "times inside the band of the other families": {"share": round(time_cover[0], 4), "rows": time_cover[1]},
        "residual model": {"gain on unseen families": round(gain, 4), "used": bool(residual), "needed": WORTH},
    }
    rest = {k: v for k, v in vars(rates).items() if k not in fitted}
    return Calibration({**fitted, **rest}, found, source, cards(cases, rates, found), residual, errors)


def _summary(log_ratios: Floats) -> dict[str, float]:
    known: NDArray[np.float64] = log_ratios[~np.isnan(log_ratios)]
    if not len(known):
        return {"rows": 0}
    relative = np.exp(-known) - 1
    return {
        "rows": len(known),
        "median_absolute": round(float(np.median(np.abs(relative))), 4),
        "p95_absolute": round(float(np.quantile(np.abs(relative), 0.95)), 4),
        "bias": round(float(np.median(relative)), 4),
    }
