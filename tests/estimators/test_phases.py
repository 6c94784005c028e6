"""Validation as a phase of its own, and what else stays on the card."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch

from advisor.api import Session
from decision_rules.support import Executor
from estimators import devices
from estimators.estimate import GIB, Estimator, Semantics
from estimators.schedule import Backend, Schedule
from probes.build import real_job
from probes.cpu_memory import profiled_peak, resident_bytes
from probes.profile import Profile
from probes.step import make_optimizer, predict, train_step
from probes.target import Target
from probes.traced import trace
from probes.workload import Workload, WorkloadError, from_request, reduced_copy

SMALL = {"model": "z_image", "resolution": 256, "caption_tokens": 32, "rank": 4}


@cache
def profile() -> Profile:
    return trace(reduced_copy(from_request({"model": "flux"})), Target("cuda"))


@pytest.mark.parametrize("model", ["flux", "sdxl"])
def test_the_peak_of_a_real_forward_without_gradients_is_within_two_percent(model: str) -> None:
    workload = dataclasses.replace(reduced_copy(from_request({"model": model})), batch=2)
    found = Estimator(trace(workload, Target("cpu"), forward_only=True), devices.cpu_device(), Semantics())
    job = real_job(workload)
    optimizer = make_optimizer(workload.optimizer, [p for _, p in job.trainable()])
    train_step(job, optimizer)
    job.model.eval()

    def sample() -> None:
        with torch.no_grad():
            predict(job)

    measured = profiled_peak(sample, resident_bytes(job, optimizer) - job.target.nbytes).peak
    assert found.estimate(Schedule()).peak - job.target.nbytes == pytest.approx(measured, rel=0.02)


def test_validation_needs_less_than_training_without_checkpointing_and_has_no_gradients() -> None:
    forward = trace(profile().workload, Target("cuda"), forward_only=True)
    card = devices.find_gpu("rtx4090")
    sampled = Estimator(forward, card, Semantics()).estimate(Schedule())
    trained = Estimator(profile(), card, Semantics()).estimate(Schedule())
    assert sampled.peak < trained.peak
    assert (sampled.breakdown["gradients"], sampled.breakdown["saved"]) == (0, 0)
    assert sampled.breakdown["optimizer"] == trained.breakdown["optimizer"] > 0


def test_what_stays_on_the_card_is_in_every_peak() -> None:
    kept = dataclasses.replace(profile(), workload=dataclasses.replace(profile().workload, resident_gib=1.5))
    card = devices.find_gpu("rtx4090")
    for schedule in (Schedule(), Schedule(Backend.TORCH)):
        plain, more = (Estimator(p, card, Semantics()).estimate(schedule) for p in (profile(), kept))
        assert more.peak - plain.peak == more.breakdown["kept"] == 1.5 * GIB
        assert more.reserved - plain.reserved >= GIB
        assert "kept" not in plain.breakdown
        # what the user says is not uncertain: the bands move with it and grow no wider
        assert (more.peak_low - plain.peak_low, more.peak_high - plain.peak_high) == (1.5 * GIB, 1.5 * GIB)


def test_a_plan_shows_the_validation_that_was_asked_about() -> None:
    request = {**SMALL, "validation_resolution": "512x256", "weights_offload": "blocks:10"}
    plan = Session().plan(from_request(request), devices.find_gpu("rtx4090"), Executor.BUNDLED)
    (phase,) = plan.to_json()["phases"]
    assert phase["name"] == "validation"
    assert "2 samples together of 512x256" in phase["what"]
    assert phase["fits"] is True
    assert phase["breakdown"]["weights"] < 10
    tight = Session().plan(from_request({**request, "resident_gib": 20}), devices.find_gpu("rtx4090"))
    assert any(w.startswith("validation does not fit") for w in tight.warnings)


def test_the_shape_of_validation_does_not_change_the_training_step_s_trace() -> None:
    plain = from_request(SMALL)
    asked = from_request({**SMALL, "validation_resolution": 1024, "validation_samples": 1, "resident_gib": 3})
    assert asked.traced() == plain.traced()
    assert plain.validating is None
    sampled = asked.validating
    assert isinstance(sampled, Workload)
    assert (sampled.height, sampled.width, sampled.batch, sampled.validation_resolution) == (1024, 1024, 1, "")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"validation_samples": 2}, "--validation-samples 2 has no effect without --validation-resolution"),
        ({"validation_resolution": "7x7"}, "--validation-resolution 7x7"),
        ({"validation_resolution": 512, "validation_frames": 9}, "leave --validation-frames out"),
        ({"validation_resolution": ""}, "--validation-resolution '' is not a size"),
        ({"validation_resolution": 512, "validation_samples": 0}, "--validation-samples must be from 1"),
        ({"validation_frames": 0}, "--validation-frames 0 has no effect"),
        ({"resident_gib": -1}, "--resident-gib must be from 0 to 4096"),
        ({"resident_gib": "much"}, "--resident-gib must be a number"),
    ],
)
def test_bad_values_are_named(more: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        from_request({**SMALL, **more})
