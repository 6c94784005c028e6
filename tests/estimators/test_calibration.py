"""Bands, their file, and the fit on measurements whose truth is known."""

import dataclasses
import itertools
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from estimators import calibration, fitting
from estimators.calibration import Band, Bands, Calibration, CalibrationError
from estimators.devices import find_gpu
from estimators.fitting import Case
from estimators.step_time import Kernels, Load, Work, rates_from
from probes.tape import ATTENTION, ATTENTION_BACKWARD, GEMM, MEMORY


def work(scale: float, launches: int, gpu: str = "H100", hooks: int = 0) -> Work:
    kernels = Kernels(
        np.array([GEMM, MEMORY, ATTENTION, ATTENTION_BACKWARD], np.int8),
        np.array([1e12, 0.0, 2e11, 4e11]) * scale,
        np.array([1e8, 4e9, 1e8, 2e8]) * scale,
        np.array([0, 0, 64, 64], np.int64),
    )
    ones = np.ones(4)
    load = Load(launches, hooks, 0, 0, 0, False, 0, 0)
    return Work(find_gpu(gpu), 9e14, kernels, 10 * ones, 0 * ones, 3 * ones, load)


def cases(truth: dict[str, float], *, bias: float = 0.0) -> list[Case]:
    rates = rates_from(truth)
    found = []
    for i in range(12):
        for gpu in ("H100", "L40S"):
            w = work(0.2 + i / 4, 1000 * (1 + (7 * i) % 12), gpu, 3000 * (i % 3))
            seconds = w.step(rates).total * math.exp(bias if i % 4 == 0 else 0)
            found.append(Case(f"family {i % 4}", gpu, "lora, float base", 10**9, 1.01e9, w, seconds))
    return found


TRUTH = {"gemm": 0.55, "memory": 0.75, "launch_seconds": 3.2e-5, "hook_seconds": 1.1e-5}


def test_the_fit_predicts_what_its_own_rates_made() -> None:
    made = cases(TRUTH)
    rates = rates_from(fitting.fit_rates(made))
    errors = [
        abs(math.log(c.work.step(rates).total / c.measured_seconds)) for c in made if c.work and c.measured_seconds
    ]
    assert max(errors) < 0.03


def test_every_rate_stays_within_what_hardware_can_do() -> None:
    wild = [dataclasses.replace(c, measured_seconds=(c.measured_seconds or 1) * 100) for c in cases(TRUTH)]
    for name, value in fitting.fit_rates(wild).items():
        _, low, high = fitting.SEARCH[name]
        assert low * 0.999 <= value <= high * 1.001


def test_left_out_families_are_estimated_without_their_own_rows() -> None:
    made = cases(TRUTH, bias=0.7)  # family 0 is slower for a reason that no rate knows
    errors = fitting.left_out(made, lambda c: c.family)
    own = [e for e, c in zip(errors, made, strict=True) if c.family == "family 0"]
    assert np.median(own) > 0.4


def test_quantiles_weigh_families_alike() -> None:
    values = np.array([0.0] * 98 + [1.0, 1.0])
    low, middle, high = fitting.quantiles(values, ["a"] * 98 + ["b"] * 2, (0.1, 0.5, 0.9))
    assert (low, high) == (0.0, 1.0)
    assert 0 <= middle <= 1


def test_the_whole_calibration_survives_its_file() -> None:
    made = fitting.calibrate(cases(TRUTH), "a test")
    again = Calibration.from_json(json.loads(json.dumps(made.to_json())))
    assert again == made
    assert made.errors["time, families left out"]["rows"] == 24
    band = made.bands["lora, float base"]
    low, high = band.peak(10**9)
    assert low <= 10**9 <= high
    assert high >= 1.0099e9


def test_receipts_move_and_narrow_their_card_and_no_other() -> None:
    general = cases(TRUTH)
    rates = rates_from(fitting.fit_rates(general))
    own = []
    for i in range(1, 9):
        w = work(0.5 * i, 2000, "RTX 4090")
        seconds = w.step(rates).total * 1.2
        own.append(Case("receipt flux", "RTX 4090", "lora, float base", 10**9, 1e9, w, seconds, own=True))
    found = fitting.cards([*general, *own], rates, fitting.bands(general, np.linspace(-0.4, 0.4, len(general))))
    assert list(found) == ["RTX 4090"]
    card = found["RTX 4090"]
    assert 0.5 * math.log(1.2) < card.time_log_ratio < math.log(1.2)
    assert card.time_scale < 1
    assert card.receipts == 8


def test_a_useless_residual_is_not_used() -> None:
    made = cases(TRUTH)
    noise = np.random.default_rng(0).normal(0, 0.1, len(made))
    coefficients, gain = fitting.residual_model(made, rates_from({}), noise)
    assert coefficients == ()
    assert gain < fitting.WORTH


def test_a_residual_that_unseen_families_confirm_is_used() -> None:
    made = cases(TRUTH)
    rates = rates_from({})
    share = np.array([0.2 * fitting._features(c, rates)[0] for c in made])
    coefficients, gain = fitting.residual_model(made, rates, share)
    assert gain > fitting.WORTH
    assert coefficients[1] > 0.05


BAND = Band((0.025, 0.5, 0.975), (-0.1, 0.0, 0.2))


@pytest.mark.parametrize(("ratio", "expected"), [(-0.1, 0.025), (0.0, 0.5), (0.2, 0.975), (0.1, 0.7375)])
def test_a_bands_probabilities(ratio: float, expected: float) -> None:
    assert BAND.below(ratio) == pytest.approx(expected)


def test_probabilities_rise_and_never_leave_their_range() -> None:
    values = [BAND.below(r) for r in np.linspace(-3, 3, 301)]
    assert all(0 <= a <= b <= 1 for a, b in itertools.pairwise(values))
    assert values[0] < 1e-6
    assert values[-1] > 1 - 1e-6


def test_what_does_not_fit_at_all_has_no_chance() -> None:
    bands = Bands(BAND, BAND, "")
    assert bands.fits(10**9, 0) == 0
    assert bands.fits(10**9, 10**12) > 0.999


BROKEN = {
    "format": ("calibration_format", 99),
    "rates": ("rates", {"gemm": -1.0}),
    "text for a number": ("rates", {"gemm": "fast"}),
    "bands": ("bands", {"x": {"levels": [0.1]}}),
    "residual": ("time_residual", [1.0]),
    "a rate of no hardware": ("rates", {**calibration.packaged().rates, "launch_seconds": 1e300}),
    "a rate that is missing": ("rates", {"gemm": 0.7}),
    "a rate that is not known": ("rates", {**calibration.packaged().rates, "luck": 0.5}),
    "a rate beyond floats": ("rates", {**calibration.packaged().rates, "gemm": 10**400}),
    "an absurd residual": ("time_residual", [1e308] * 5),
    "an absurd card": (
        "cards",
        {"RTX 4090": {"receipts": 1, "time_log_ratio": 1e4, "time_scale": 1, "peak_scale": 1}},
    ),
}


@pytest.mark.parametrize("case", sorted(BROKEN))
def test_a_broken_calibration_is_told(case: str) -> None:
    key, value = BROKEN[case]
    with pytest.raises(CalibrationError):
        Calibration.from_json({**calibration.packaged().to_json(), key: value})


def test_an_own_calibration_counts_and_a_broken_one_is_left_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADVISE_CACHE_DIR", str(tmp_path))
    assert calibration.current() == (calibration.packaged(), None)
    own = dataclasses.replace(calibration.packaged(), source="own")
    (tmp_path / "calibration.json").write_text(json.dumps(own.to_json()))
    assert calibration.current()[0].source == "own"
    for broken in ("{", "[" * 100_000):
        (tmp_path / "calibration.json").write_text(broken)
        found, warning = calibration.current()
        assert found == calibration.packaged()
        assert warning is not None
        assert "calibration.json" in warning


def _spread(families: int, wide: float) -> tuple[list[Case], "np.ndarray"]:
    made, residuals = [], []
    for f in range(families):
        for i in range(10):
            made.append(Case(f"family {f}", "H100", "lora, float base", 10**9, 1e9, None, None))
            residuals.append(0.01 * (i - 5) + wide * (f - families // 2))
    return made, np.array(residuals)


def test_families_that_differ_widen_the_bands_and_alike_ones_do_not() -> None:
    assert fitting.widening(*_spread(6, 0.0)) == 1.0
    assert fitting.widening(*_spread(3, 1.0)) > 1.0


def test_two_families_say_nothing_of_a_third() -> None:
    assert fitting.widening(*_spread(2, 1.0)) == 1.0


def test_coverage_grows_with_the_band() -> None:
    made, residuals = _spread(5, 0.03)
    shares = [fitting.coverage(made, residuals, w)[0] for w in (0.5, 1.0, 2.0, 4.0)]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_an_own_calibration_that_is_a_pipe_is_left_aside_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADVISE_CACHE_DIR", str(tmp_path))
    os.mkfifo(calibration.own_file())
    found, warning = calibration.current()
    assert found is calibration.packaged()
    assert warning is not None
    assert "not a regular file" in warning
