"""The ladder and the other objectives on made-up estimates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decision_rules.ladder import NOTICEABLE, Choice, Objective, choose
from estimators.estimate import GIB, Estimate
from estimators.schedule import Backend, Schedule

CAPACITY = 24 * GIB
NONE, FFN, TORCH = Schedule(), Schedule(Backend.TORCH_FFN), Schedule(Backend.TORCH)
UNSLOTH_FFN, UNSLOTH = Schedule(Backend.UNSLOTH_FFN), Schedule(Backend.UNSLOTH)


def estimate(
    schedule: Schedule,
    peak: float,
    seconds: float | None = 1.0,
    *,
    fits: bool | None = None,
    largest: str = "saved",
    notes: tuple[str, ...] = (),
    probability: float = 1.0,
) -> Estimate:
    """An estimate of `peak` GiB, most of it in the part `largest`; it fits where the peak is within 24 GiB."""
    parts = dict.fromkeys(
        ("weights", "adapter", "gradients", "optimizer", "saved", "transient", "inputs", "workspace"), GIB // 100
    )
    parts[largest] = int(peak * GIB)
    return Estimate(
        schedule,
        True,
        None,
        peak=int(peak * GIB),
        step_seconds=seconds,
        fits=peak * GIB <= CAPACITY if fits is None else fits,
        fit_probability=probability,
        breakdown=parts,
        notes=notes,
    )


def unsupported(schedule: Schedule) -> Estimate:
    return Estimate(schedule, False, "rejected")


def ladder(*estimates: Estimate) -> Choice:
    return choose(estimates, Objective.LADDER, CAPACITY)


def chosen(choice: Choice) -> Schedule:
    assert choice.chosen is not None
    return choice.chosen.schedule


# Rungs ---------------------------------------------------------------------------------------------------------------


def test_checkpointing_stays_off_when_the_step_fits_without() -> None:
    choice = ladder(estimate(NONE, 20, 1.0), estimate(FFN, 18, 1.2), estimate(TORCH, 10, 1.5))
    assert chosen(choice) == NONE
    assert choice.reasons == ("no checkpointing: fits, peak 20.0 GiB of 24.0 GiB, 1 s a step",)
    assert choice.faster is None


@pytest.mark.parametrize("rung", [1, 2, 3, 4])
def test_the_first_rung_that_fits_is_taken_and_every_earlier_one_has_a_reason(rung: int) -> None:
    schedules = [NONE, FFN, TORCH, UNSLOTH_FFN, UNSLOTH]
    peaks = [40.0, 35.0, 30.0, 28.0, 26.0]
    peaks[rung] = 20.0
    peaks[rung + 1 :] = [19.0 - i for i in range(len(peaks) - rung - 1)]
    choice = ladder(*(estimate(s, p) for s, p in zip(schedules, peaks, strict=True)))
    assert chosen(choice) == schedules[rung]
    names = ["no checkpointing", "torch-ffn", "torch", "unsloth-ffn", "unsloth"]
    for name, reason in zip(names[:rung], choice.reasons, strict=False):
        assert reason.startswith(f"{name}: does not fit, peak ")
    assert choice.reasons[rung].startswith(f"{names[rung]}: fits, peak 20.0 GiB of 24.0 GiB")


def test_a_rung_that_is_not_supported_is_skipped_and_says_so() -> None:
    choice = ladder(estimate(NONE, 40), unsupported(FFN), estimate(TORCH, 20))
    assert chosen(choice) == TORCH
    assert choice.reasons[1] == "torch-ffn: skipped, not supported for this model here"


def test_a_rung_that_does_not_lower_the_peak_is_skipped_with_both_peaks() -> None:
    choice = ladder(estimate(NONE, 30), estimate(FFN, 30), estimate(TORCH, 20))
    assert chosen(choice) == TORCH
    assert choice.reasons[1] == "torch-ffn: skipped, its peak of 30.0 GiB is not below the previous rung's 30.0 GiB"


def test_a_higher_unsloth_ffn_rung_is_compared_with_the_lowest_rung_so_far() -> None:
    choice = ladder(
        estimate(NONE, 40), estimate(TORCH, 26), estimate(UNSLOTH_FFN, 35), estimate(UNSLOTH, 25.5, fits=True)
    )
    assert chosen(choice) == UNSLOTH
    assert any(r.startswith("unsloth-ffn: skipped, its peak of 35.0 GiB is not below") for r in choice.reasons)


def test_a_schedule_outside_the_rungs_is_taken_when_it_alone_fits() -> None:
    only = Schedule(Backend.TORCH, 2, offload_attention=True)
    choice = ladder(estimate(NONE, 40), estimate(TORCH, 30), estimate(only, 23))
    assert chosen(choice) == only
    assert f"{only.name}: the only kind of schedule that fits, peak 23.0 GiB" in choice.reasons


# Buying time back ----------------------------------------------------------------------------------------------------

GROUPED, STRIDED = Schedule(Backend.TORCH, 2), Schedule(Backend.TORCH, 2, 4)


def test_an_interval_that_fits_and_is_faster_is_taken_with_the_time_that_it_saves() -> None:
    choice = ladder(estimate(NONE, 40), estimate(TORCH, 10, 2.0), estimate(GROUPED, 20, 1.5))
    assert chosen(choice) == GROUPED
    assert choice.reasons[-1] == "torch interval=2: interval saves 25% of the step time and still fits, peak 20.0 GiB"


def test_a_stride_is_tried_after_the_interval() -> None:
    choice = ladder(
        estimate(NONE, 40), estimate(TORCH, 10, 2.0), estimate(GROUPED, 12, 1.8), estimate(STRIDED, 20, 1.35)
    )
    assert chosen(choice) == STRIDED
    assert [r.split(":")[0] for r in choice.reasons[-2:]] == ["torch interval=2", "torch interval=2 stride=4"]
    assert "segment_stride saves 25%" in choice.reasons[-1]


def test_of_several_intervals_the_fastest_that_fits_is_taken() -> None:
    three, four = Schedule(Backend.TORCH, 3), Schedule(Backend.TORCH, 4)
    choice = ladder(
        estimate(NONE, 40),
        estimate(TORCH, 10, 2.0),
        estimate(GROUPED, 15, 1.8),
        estimate(three, 20, 1.6),
        estimate(four, 25, 1.2),
    )
    assert chosen(choice) == three


@pytest.mark.parametrize(
    ("seconds", "taken"), [(2.0 * (1 - NOTICEABLE) + 0.001, False), (2.0 * (1 - NOTICEABLE) - 0.001, True)]
)
def test_a_gain_that_nobody_would_notice_is_not_taken(seconds: float, taken: bool) -> None:
    choice = ladder(estimate(NONE, 40), estimate(TORCH, 10, 2.0), estimate(GROUPED, 20, seconds))
    assert (chosen(choice) == GROUPED) is taken
    assert taken or choice.reasons[-1] == "interval: none that fits is noticeably faster than torch"


def test_intervals_of_another_backend_are_left_to_the_note_on_faster_schedules() -> None:
    choice = ladder(estimate(NONE, 40), estimate(TORCH, 10, 2.0), estimate(Schedule(Backend.UNSLOTH, 2, 4), 20, 1.0))
    assert chosen(choice) == TORCH
    assert choice.faster is not None
    assert choice.faster.schedule == Schedule(Backend.UNSLOTH, 2, 4)


def test_an_interval_with_attention_offload_is_not_the_ladders_interval() -> None:
    offloading = Schedule(Backend.TORCH, 2, 4, offload_attention=True)
    choice = ladder(estimate(NONE, 40), estimate(TORCH, 10, 2.0), estimate(offloading, 20, 1.0))
    assert chosen(choice) == TORCH


def test_without_step_times_the_ladder_stays_on_its_rung() -> None:
    choice = ladder(estimate(NONE, 40, None), estimate(TORCH, 10, None), estimate(GROUPED, 8, None))
    assert chosen(choice) == TORCH
    assert choice.faster is None
    assert "unknown time" in choice.reasons[2]


# Faster ones ---------------------------------------------------------------------------------------------------------


def test_a_faster_schedule_that_fits_is_shown_with_the_difference() -> None:
    choice = ladder(estimate(NONE, 40), estimate(FFN, 23, 2.0), estimate(TORCH, 10, 1.5))
    assert chosen(choice) == FFN
    assert choice.faster is not None
    assert choice.faster.schedule == TORCH
    assert (
        choice.reasons[-1]
        == "torch also fits and is predicted 25% faster (1.5 s a step, peak 10.0 GiB); --objective fastest takes it"
    )


def test_a_schedule_that_is_hardly_faster_is_not_shown() -> None:
    choice = ladder(estimate(NONE, 40), estimate(FFN, 23, 2.0), estimate(TORCH, 10, 1.99))
    assert choice.faster is None
    assert "also fits" not in " ".join(choice.reasons)


def test_a_faster_schedule_that_does_not_fit_is_not_shown() -> None:
    choice = ladder(estimate(NONE, 40, 0.5), estimate(TORCH, 10, 2.0))
    assert choice.faster is None


# Other objectives ----------------------------------------------------------------------------------------------------


def test_fastest_is_the_shortest_step_of_all_that_fit() -> None:
    found = choose(
        [estimate(NONE, 40, 0.5), estimate(FFN, 20, 2.0), estimate(TORCH, 10, 1.5)], Objective.FASTEST, CAPACITY
    )
    assert chosen(found) == TORCH
    assert found.reasons == ("torch is the fastest of 2 schedules that fit, 1.5 s a step",)


def test_of_two_equally_fast_schedules_the_smaller_is_taken() -> None:
    found = choose([estimate(FFN, 20, 1.0), estimate(TORCH, 10, 1.0)], Objective.FASTEST, CAPACITY)
    assert chosen(found) == TORCH


def test_smallest_is_the_lowest_peak_of_all_that_fit() -> None:
    given_ = [estimate(TORCH, 10, 1.0), estimate(UNSLOTH, 9, 3.0), estimate(UNSLOTH_FFN, 8, fits=False)]
    found = choose(given_, Objective.SMALLEST, CAPACITY)
    assert chosen(found) == UNSLOTH
    assert found.reasons == ("unsloth has the lowest predicted peak, 9.0 GiB",)


def test_of_two_equally_small_schedules_the_faster_is_taken() -> None:
    found = choose([estimate(FFN, 10, 2.0), estimate(TORCH, 10, 1.0)], Objective.SMALLEST, CAPACITY)
    assert chosen(found) == TORCH


# Nothing fits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", Objective)
@pytest.mark.parametrize(
    ("largest", "knob"),
    [
        ("weights", "a smaller base"),
        ("adapter", "--rank"),
        ("gradients", "--adapter lora"),
        ("optimizer", "--optimizer adamw8bit"),
        ("workspace", "a card with more memory"),
    ],
)
def test_when_nothing_fits_because_of_what_checkpointing_cannot_lower_the_knob_that_can_is_named(
    objective: Objective, largest: str, knob: str
) -> None:
    choice = choose(
        [estimate(NONE, 40, largest=largest), estimate(TORCH, 30, largest=largest)],
        objective,
        CAPACITY,
        "a smaller base",
    )
    assert choice.chosen is None
    assert choice.reasons[0] == (
        "nothing fits: the smallest schedule, torch, needs 30.0 GiB and 24.0 GiB are usable (6.0 GiB too much)"
    )
    assert f"is {largest} (30.0 GiB), which checkpointing cannot lower; " in choice.reasons[1]
    assert knob in choice.reasons[1]


@pytest.mark.parametrize("largest", ["saved", "transient", "inputs"])
def test_when_nothing_fits_because_of_activations_a_smaller_job_is_named(largest: str) -> None:
    choice = ladder(estimate(NONE, 40, largest=largest))
    assert choice.chosen is None
    assert f"is {largest} (40.0 GiB); a smaller batch" in choice.reasons[1]
    assert "cannot lower" not in choice.reasons[1]


def test_when_what_is_kept_is_all_that_is_too_much_it_is_named() -> None:
    found = estimate(NONE, 30, largest="weights")
    kept = dataclasses.replace(found, breakdown={**found.breakdown, "kept": 7 * GIB})
    assert "without that it would be 23.0 GiB" in ladder(kept).reasons[2]
    less = dataclasses.replace(found, breakdown={**found.breakdown, "kept": 5 * GIB})
    assert not any("without that" in reason for reason in ladder(less).reasons)


def test_when_the_peak_would_fit_the_reason_why_it_does_not_is_given() -> None:
    choice = ladder(estimate(NONE, 23, fits=False, notes=("first", "needs 9.0 GiB of host memory, 8.0 GiB given")))
    assert choice.chosen is None
    assert choice.reasons[0].endswith("needs 23.0 GiB of 24.0 GiB: needs 9.0 GiB of host memory, 8.0 GiB given")


def test_without_any_supported_schedule_that_is_the_reason() -> None:
    for objective in Objective:
        choice = choose([unsupported(NONE), unsupported(TORCH)], objective, CAPACITY)
        assert choice.chosen is None
        assert choice.reasons == ("no schedule is supported for this model by this executor",)


# Rules for any estimates ---------------------------------------------------------------------------------------------

SCHEDULES = [NONE, FFN, TORCH, UNSLOTH_FFN, UNSLOTH, GROUPED, STRIDED, Schedule(Backend.UNSLOTH, 2, 4)]


@st.composite
def _estimates(draw: st.DrawFn) -> list[Estimate]:
    found = []
    for schedule in SCHEDULES:
        if draw(st.integers(0, 3)):
            seconds = draw(st.none() | st.floats(0.1, 10))
            found.append(estimate(schedule, draw(st.floats(1, 48)), seconds))
        else:
            found.append(unsupported(schedule))
    return found


@given(_estimates(), st.sampled_from(Objective))
def test_what_is_chosen_is_supported_and_fits_and_something_is_chosen_whenever_something_fits(
    estimates: Sequence[Estimate], objective: Objective
) -> None:
    choice = choose(estimates, objective, CAPACITY)
    fitting = [e for e in estimates if e.supported and e.fits]
    assert (choice.chosen is not None) == bool(fitting)
    assert choice.reasons
    assert choice.chosen is None or choice.chosen in fitting
    assert choice.faster is None or choice.faster in fitting


@given(_estimates())
@settings(max_examples=50)
def test_a_faster_schedule_is_faster_and_no_fitting_one_is_faster_still(estimates: Sequence[Estimate]) -> None:
    choice = choose(estimates, Objective.LADDER, CAPACITY)
    if choice.faster is not None:
        assert choice.chosen is not None
        assert choice.faster.step_seconds is not None
        assert choice.chosen.step_seconds is not None
        assert choice.faster.step_seconds < choice.chosen.step_seconds
        assert choice.faster == choose(estimates, Objective.FASTEST, CAPACITY).chosen


@given(_estimates())
@settings(max_examples=50)
def test_a_rung_is_never_taken_when_an_earlier_supported_one_fits(estimates: Sequence[Estimate]) -> None:
    choice = choose(estimates, Objective.LADDER, CAPACITY)
    if choice.chosen is None:
        return
    rungs = [NONE, FFN, TORCH, UNSLOTH_FFN, UNSLOTH]
    fits = [s for s in rungs if any(e.schedule == s and e.supported and e.fits for e in estimates)]
    if fits:
        # the first that fits is taken unless its peak is not below an earlier rung's, which then did not fit either
        assert choice.chosen.schedule.backend == fits[0].backend


def test_a_faster_interval_that_is_a_tight_fit_is_named_but_not_chosen() -> None:
    choice = ladder(
        estimate(Schedule(), 30),
        estimate(Schedule(Backend.TORCH), 10, 2.0),
        estimate(Schedule(Backend.TORCH, 2, 4), 23, 1.5, probability=0.7),
    )
    assert chosen(choice) == Schedule(Backend.TORCH)
    assert any("tight fit" in reason and "70%" in reason for reason in choice.reasons)


def test_a_peak_below_the_capacity_that_does_not_fit_says_what_the_allocator_needs() -> None:
    fragmented = dataclasses.replace(estimate(NONE, 10), fits=False, reserved=30 * GIB)
    choice = ladder(fragmented, estimate(TORCH, 5))
    assert "no checkpointing: does not fit, peak 10.0 GiB, but the allocator needs 30.0 GiB of" in choice.reasons[0]
