"""Validation as a phase of its own, and what else stays on the card."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch

from advisor.api import Session
from advisor.phases import Phase, asked_phases
from decision_rules.support import Executor
from estimators import devices
from estimators.estimate import GIB, Estimate, Estimator, Semantics
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
    phase, decode = plan.to_json()["phases"]
    assert (phase["name"], decode["name"]) == ("validation", "validation decode")
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


def plan_of(**more: Any) -> Any:
    return Session().plan(
        from_request({"model": "sd1x", "resolution": 256, "rank": 4, **more}),
        devices.find_gpu("rtx4090"),
        advising=False,
    )


def phases_of(plan: Any) -> dict[str, Any]:
    return {p.name: p.estimate for p in plan.phases}


def test_kept_encoders_are_in_the_training_peak_with_their_names_and_sizes() -> None:
    plain, kept = plan_of(), plan_of(keep_resident=["text-encoder", "vae"])
    weights = 2 * (83_653_863 + 123_060_480)
    for before, after in zip(plain.schedules, kept.schedules, strict=True):
        if before.supported:
            assert after.breakdown["kept"] == after.peak - before.peak == pytest.approx(weights, abs=2**20)
    answer = kept.to_json()
    assert [(k["kind"], k["name"], k["gib"]) for k in answer["kept"]] == [
        ("text-encoder", "clip-l", 0.2292),
        ("vae", "sd1", 0.1558),
    ]
    assert "kept on the card the whole time: text encoder clip-l 0.23 GiB, VAE sd1 0.16 GiB" in answer["warnings"]
    assert "kept" not in plain.to_json()
    assert "phases" not in plain.to_json()
    double = plan_of(keep_resident=["vae"], vae_precision="fp32")
    assert double.schedules[0].breakdown["kept"] == pytest.approx(4 * 83_653_863, abs=2**20)


def test_caching_has_a_peak_for_the_vae_and_one_for_the_text_encoders() -> None:
    plan = plan_of(caching=True, caching_batch=4)
    found = phases_of(plan)
    assert list(found) == ["vae caching", "text caching"]
    vae, text = found["vae caching"], found["text caching"]
    assert vae.breakdown["weights"] == pytest.approx(2 * 83_653_863, rel=0.01)
    assert text.breakdown["weights"] == pytest.approx(2 * 123_060_480, rel=0.01)
    assert vae.breakdown["adapter"] == vae.breakdown["optimizer"] == vae.breakdown["saved"] == 0
    single = phases_of(plan_of(caching=True))["vae caching"]
    assert vae.breakdown["transient"] == pytest.approx(4 * single.breakdown["transient"], rel=0.05)
    wide = phases_of(plan_of(caching=True, vae_precision="fp32"))["vae caching"]
    assert wide.breakdown["weights"] == pytest.approx(2 * single.breakdown["weights"], rel=0.01)
    assert wide.breakdown["transient"] == pytest.approx(2 * single.breakdown["transient"], rel=0.1)
    assert plan.largest_phase == plan.to_json()["largest_phase"] == "training"
    assert any("cuDNN" in w for w in plan.warnings)


def test_tiling_that_takes_one_tile_is_said_to_change_nothing() -> None:
    one, several = (plan_of(caching=True, vae_tiling=True, resolution=side) for side in (256, 1024))
    assert any("tiling changes nothing, encode 256x256" in w for w in one.warnings)
    assert not any("tiling changes nothing" in w for w in several.warnings)


def test_a_kept_encoder_is_on_the_card_while_the_other_kind_is_cached_and_counts_once() -> None:
    plain = phases_of(plan_of(caching=True))
    kept = phases_of(plan_of(caching=True, keep_resident=["text-encoder"]))
    assert kept["vae caching"].peak - plain["vae caching"].peak == pytest.approx(2 * 123_060_480, abs=2**20)
    assert kept["text caching"].peak == plain["text caching"].peak


def test_the_largest_phase_may_be_caching_and_says_when_it_does_not_fit() -> None:
    plan = plan_of(caching=True, caching_batch=900)
    assert plan.largest_phase == "vae caching"
    assert not phases_of(plan)["vae caching"].fits
    assert any(w.startswith("vae caching does not fit") for w in plan.warnings)


def test_the_decode_after_sampling_has_model_and_vae_on_the_card() -> None:
    plan = plan_of(validation_resolution=512)
    sampled, decoded = phases_of(plan)["validation"], phases_of(plan)["validation decode"]
    vae = decoded.breakdown["weights"] - sampled.breakdown["weights"]
    assert vae == pytest.approx(2 * 83_653_863, rel=0.01)
    assert decoded.breakdown["optimizer"] == sampled.breakdown["optimizer"] > 0
    assert decoded.breakdown["adapter"] == sampled.breakdown["adapter"] > 0
    kept = phases_of(plan_of(validation_resolution=512, keep_resident=["vae"]))["validation decode"]
    assert kept.breakdown["weights"] == sampled.breakdown["weights"]
    assert kept.peak == pytest.approx(decoded.peak, abs=2**21)


def test_swapped_blocks_wait_on_the_host_while_the_vae_decodes() -> None:
    def decode(offload: str) -> Any:
        workload = from_request({**SMALL, "validation_resolution": 256, "weights_offload": offload})
        return phases_of(Session().plan(workload, devices.find_gpu("rtx4090"), advising=False))["validation decode"]

    whole, swapped = decode("none"), decode("blocks:10")
    moved = whole.breakdown["weights"] - swapped.breakdown["weights"]
    assert moved == pytest.approx(swapped.host, rel=0.01)
    assert swapped.host > GIB
    assert whole.host == 0


def test_a_stored_phase_is_read_without_torch_and_equal() -> None:
    code = (
        "import sys\nfrom advisor.api import Session\nfrom estimators import devices\nfrom probes.workload import from_request\n"
        "w = from_request({'model': 'sd1x', 'resolution': 256, 'rank': 4, 'caching': True, 'keep_resident': ['vae']})\n"
        "p = Session().plan(w, devices.find_gpu('rtx4090'), advising=False)\n"
        "print('torch' in sys.modules, *[x.estimate.peak for x in p.phases])"
    )
    first = phases_of(plan_of(caching=True, keep_resident=["vae"]))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", *(str(e.peak) for e in first.values())]


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        ("flux", {"keep_resident": ["unet"]}, "--keep-resident 'unet' is not valid"),
        ("flux", {"keep_resident": 3}, "--keep-resident must be a list"),
        ("ace_step", {"keep_resident": ["vae"]}, "--keep-resident vae: not known for ace_step .*--resident-gib"),
        (
            "flux2",
            {"variant": "dev", "keep_resident": ["text-encoder"]},
            "--keep-resident text-encoder: not known for flux2 dev; .*--resident-gib",
        ),
        ("heartmula", {"caching": True}, "--caching: neither the VAE nor the text encoders of heartmula"),
        ("flux", {"caching_batch": 2}, "--caching-batch 2 has no effect without --caching"),
        ("flux", {"caching": True, "caching_text_batch": 0}, "--caching-text-batch must be from 1"),
        ("flux", {"vae_tiling": True}, "--vae-tiling has no effect without --caching or --validation-resolution"),
        ("flux", {"vae_precision": "fp32"}, "--vae-precision fp32 has no effect without"),
        ("flux", {"vae_precision": "fp16", "caching": True}, "--vae-precision 'fp16' is not valid"),
        ("hidream", {"vae_slicing": True, "validation_resolution": 1024}, "the VAE of hidream .* is not known"),
        ("flux", {"caching": 1}, "--caching must be true or false"),
    ],
)
def test_bad_values_about_encoders_are_named(model: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        from_request({"model": model, **more})


def test_caching_does_not_change_the_training_step_s_trace() -> None:
    asked = from_request(
        {**SMALL, "caching": True, "keep_resident": ["vae"], "vae_precision": "fp32", "vae_tiling": True}
    )
    assert asked.traced() == from_request(SMALL).traced()


def test_an_unknown_half_of_caching_is_said() -> None:
    workload = from_request({"model": "flux2", "variant": "dev", "resolution": 256, "caching": True, "rank": 4})
    phases, notes = asked_phases(Session(), workload, devices.find_gpu("rtx4090"), Executor.BUNDLED, 0)
    assert [p.name for p in phases] == ["vae caching"]
    assert "caching: the text encoders of flux2 dev are not known here, so their peak is left out" in notes


def test_a_vae_has_the_band_of_a_job_whose_convolutions_do_not_count() -> None:
    plan = plan_of(caching=True, validation_resolution=512)
    found = phases_of(plan)
    wide = {name: e.peak_high / e.peak for name, e in found.items()}
    assert wide["vae caching"] == pytest.approx(wide["text caching"])
    assert wide["validation decode"] == pytest.approx(wide["vae caching"])
    assert wide["validation"] > wide["validation decode"]


def test_why_a_phase_does_not_fit_is_said() -> None:
    why = "the allocator's fragmentation does not leave room"
    phase = Phase("vae caching", "4 samples", Estimate(Schedule(), True, None, peak=GIB, fits=False, notes=(why,)))
    assert phase.text.endswith(f"; {why}")
    assert phase.to_json()["notes"] == [why]
