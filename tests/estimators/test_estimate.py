"""Profile, schedule and device brought together: fit, bands, reserved memory, and the answer's JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from estimators import allocator, optimizers
from estimators.calibration import Band, Bands, bands_for, kind
from estimators.devices import Device, DeviceKind, cpu_device, find_gpu
from estimators.estimate import GIB, Estimate, Estimator, Semantics
from estimators.memory import Replay
from estimators.schedule import Backend, Offloading, Schedule
from probes.profile import Profile
from probes.target import Target
from probes.traced import trace
from probes.workload import from_request

SCHEDULES = (
    Schedule(),
    Schedule(Backend.TORCH),
    Schedule(Backend.TORCH_FFN),
    Schedule(Backend.TORCH, 2, 4),
    Schedule(Backend.UNSLOTH),
    Schedule(Backend.UNSLOTH_FFN),
    Schedule(Backend.TORCH, offload_attention=True),
)
CARD = find_gpu("rtx4090")
CACHE: dict[str, Any] = {}
"""Results of the allocator's simulation, which all tests share."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return trace(from_request({"model": "z_image", "resolution": 256, "caption_tokens": 32}), Target("cuda"))


@pytest.fixture(scope="module")
def replay(profile: Profile) -> Replay:
    return Replay(profile, allocator.block_bytes)


def card(usable: int) -> Device:
    return dataclasses.replace(CARD, usable_bytes=usable)


def estimator(profile: Profile, replay: Replay, usable: int | None = None, **options: Any) -> Estimator:
    device = CARD if usable is None else card(usable)
    options = {"reserved_cache": CACHE, "replay": replay} | options
    return Estimator(profile, device, options.pop("semantics", Semantics()), **options)


# Memory --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
def test_reserved_is_at_least_the_peak_and_the_driver_shows_the_context_on_top(
    profile: Profile, replay: Replay, schedule: Schedule
) -> None:
    found = estimator(profile, replay).estimate(schedule)
    assert found.supported
    assert found.peak <= found.reserved < 1.25 * found.peak
    assert found.device == found.reserved + CARD.context_bytes


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
def test_the_bands_contain_the_estimate(profile: Profile, replay: Replay, schedule: Schedule) -> None:
    found = estimator(profile, replay).estimate(schedule)
    assert found.peak_low < found.peak < found.peak_high
    assert found.step_seconds is not None
    assert found.step_seconds_low is not None
    assert found.step_seconds_high is not None
    assert 0 < found.step_seconds_low < found.step_seconds < found.step_seconds_high


def test_bands_are_shares_of_the_estimate() -> None:
    bands = Bands(Band.symmetric(0.02), Band.symmetric(0.25), "")
    assert bands.peak(10**6) == (round(10**6 * math.exp(-0.02)), round(10**6 * math.exp(0.02)))
    assert bands.time(8.0) == pytest.approx((8 * math.exp(-0.25), 8 * math.exp(0.25)))


@pytest.mark.parametrize("adapter", ["lora", "lokr", "full"])
@pytest.mark.parametrize("precision", ["bf16", "fp32", "int8-quanto", "nf4"])
@pytest.mark.parametrize("offload", ["none", "ramtorch", "blocks:4"])
@pytest.mark.parametrize("convolutional", [False, True])
def test_every_kind_of_job_has_bands_with_their_source(
    adapter: str, precision: str, offload: str, convolutional: bool
) -> None:
    workload = from_request({"model": "flux"})
    changes = {"adapter": adapter, "precision": precision, "weights_offload": offload}
    bands = bands_for(kind(dataclasses.replace(workload, **changes), convolutional=convolutional))  # type: ignore[arg-type]
    assert bands.source
    low, high = bands.peak(10**6)
    assert 0.6e6 < low < 10**6 < high <= 1.36e6
    fast, slow = bands.time(1.0)
    assert 0.4 < fast < 1 < slow <= 2.01


def test_checkpointing_lowers_the_peak_and_lengthens_the_step(profile: Profile, replay: Replay) -> None:
    none, ffn, whole = (estimator(profile, replay).estimate(s) for s in SCHEDULES[:1] + SCHEDULES[2:3] + SCHEDULES[1:2])
    assert none.peak > ffn.peak > whole.peak
    assert none.step_seconds < ffn.step_seconds < whole.step_seconds  # type: ignore[operator]
    assert none.recompute_seconds == 0


def test_offloading_uses_the_host_and_costs_copies(profile: Profile, replay: Replay) -> None:
    plain, moved = (estimator(profile, replay).estimate(Schedule(b)) for b in (Backend.TORCH, Backend.UNSLOTH))
    assert (plain.host, plain.copy_seconds) == (0, 0)
    assert moved.host > 0
    assert moved.copy_seconds > 0  # type: ignore[operator]
    assert moved.peak < plain.peak


def test_the_breakdown_adds_up_and_weights_are_the_bf16_model(profile: Profile, replay: Replay) -> None:
    found = estimator(profile, replay).estimate(Schedule())
    assert sum(found.breakdown.values()) == found.peak
    assert found.breakdown["weights"] == pytest.approx(2 * profile.parameters, rel=0.01)
    assert found.breakdown["adapter"] == pytest.approx(4 * profile.trained_elements, rel=0.01)
    assert found.breakdown["workspace"] == CARD.workspace_bytes


@pytest.mark.parametrize("optimizer", ["adamw_bf16", "adamw", "adamw8bit", "sgd", "optimi-lion"])
def test_optimizer_state_is_what_the_optimizer_keeps_for_a_float32_adapter(profile: Profile, optimizer: str) -> None:
    changed = dataclasses.replace(profile, workload=dataclasses.replace(profile.workload, optimizer=optimizer))
    resident = Estimator(changed, CARD, Semantics()).resident
    kept = sum(size * count for size, count in optimizers.state_sizes(optimizer, profile.trained_shapes))
    assert resident.optimizer == pytest.approx(kept, rel=0.02)


def _resident(profile: Profile, **changes: Any) -> Any:
    changed = dataclasses.replace(profile, workload=dataclasses.replace(profile.workload, **changes))
    return Estimator(changed, CARD, Semantics())


def test_a_running_average_is_one_more_copy_of_what_is_trained(profile: Profile) -> None:
    plain, averaged = (_resident(profile, ema=ema).resident for ema in (False, True))
    assert averaged.optimizer - plain.optimizer == plain.adapter


def test_accumulation_holds_one_set_of_gradients_however_many_batches(profile: Profile) -> None:
    for schedule in (Schedule(), Schedule(Backend.TORCH)):
        one, two, many = (_resident(profile, accumulate=n).estimate(schedule) for n in (1, 2, 64))
        assert two == many
        assert one.peak <= two.peak <= one.peak + 1.01 * 4 * profile.trained_elements
        assert two.breakdown["gradients"] == pytest.approx(4 * profile.trained_elements, rel=0.01)
        assert sum(two.breakdown.values()) == two.peak
        assert one.step_seconds == two.step_seconds


def test_with_full_training_the_trained_weights_are_weights_and_there_is_no_adapter(profile: Profile) -> None:
    full = dataclasses.replace(profile, workload=dataclasses.replace(profile.workload, adapter="full"))
    lora, resident = (Estimator(p, CARD, Semantics()).resident for p in (profile, full))
    assert resident.adapter == 0
    assert resident.weights == lora.weights + lora.adapter


# Fit -----------------------------------------------------------------------------------------------------------------


@given(usable=st.lists(st.integers(12 * GIB, 40 * GIB), min_size=2, max_size=4), schedule=st.sampled_from(SCHEDULES))
@settings(max_examples=25, deadline=None)
def test_what_fits_a_card_fits_a_larger_one(usable: list[int], schedule: Schedule) -> None:
    profile = _shared()
    found = [estimator(profile[0], profile[1], u).estimate(schedule) for u in sorted(usable)]
    fits = [e.fits for e in found]
    assert fits == sorted(fits)
    chances = [e.fit_probability for e in found]
    assert chances == sorted(chances)
    assert len({e.peak for e in found}) == 1


_PROFILES: list[tuple[Profile, Replay]] = []


@pytest.fixture(autouse=True)
def _share(profile: Profile, replay: Replay) -> None:
    if not _PROFILES:
        _PROFILES.append((profile, replay))


def _shared() -> tuple[Profile, Replay]:
    """The module's profile for tests whose arguments hypothesis draws."""
    return _PROFILES[0]


def test_a_card_with_one_byte_less_than_the_peak_does_not_fit(profile: Profile, replay: Replay) -> None:
    peak = estimator(profile, replay).estimate(Schedule()).peak
    needed = peak + CARD.context_bytes
    refused = estimator(profile, replay, needed - 1).estimate(Schedule())
    assert not refused.fits
    assert refused.fit_probability <= 0.5
    on_the_edge = estimator(profile, replay, needed).estimate(Schedule())
    assert 0.1 < on_the_edge.fit_probability < 0.6


def test_what_is_likelier_to_run_out_than_to_fit_is_no_fit_although_its_estimate_is_below_the_card(
    profile: Profile, replay: Replay
) -> None:
    roomy = estimator(profile, replay)
    usable = round(1.05 * roomy.estimate(Schedule()).reserved) + CARD.context_bytes
    sure, unsure = (estimator(profile, replay, usable) for _ in range(2))
    sure.bands = dataclasses.replace(sure.bands, peak_band=Band((0.025, 0.5, 0.975), (-0.05, 0.0, 0.04)))
    unsure.bands = dataclasses.replace(unsure.bands, peak_band=Band((0.025, 0.5, 0.975), (-0.02, 0.15, 0.3)))
    fits, refused = (e.estimate(Schedule()) for e in (sure, unsure))
    assert fits.fits
    assert refused.peak == fits.peak
    assert not refused.fits
    assert 0 < refused.fit_probability < 0.5
    assert any("likely to fit" in note for note in refused.notes)


def test_headroom_is_kept_free_byte_for_byte(profile: Profile, replay: Replay) -> None:
    plain, kept = (estimator(profile, replay, headroom=h) for h in (0, 3 * GIB))
    assert kept.capacity == plain.capacity - 3 * GIB
    reserved = plain.estimate(Schedule()).reserved
    exact, short = (estimator(profile, replay, headroom=plain.capacity - reserved + more) for more in (0, 2 * GIB))
    for made in (exact, short):
        made.bands = Bands(Band.symmetric(0.1), Band.symmetric(0.1), "unbiased")
    assert exact.estimate(Schedule()).fits
    assert not short.estimate(Schedule()).fits


def test_a_card_between_peak_and_reserved_is_simulated_at_its_cap(profile: Profile, replay: Replay) -> None:
    roomy = estimator(profile, replay).estimate(Schedule())
    usable = (roomy.peak + roomy.reserved) // 2 + CARD.context_bytes
    tight = estimator(profile, replay, usable).estimate(Schedule())
    if tight.fits:
        assert tight.reserved <= usable - CARD.context_bytes
        assert any("tries again" in note for note in tight.notes)
    else:
        assert any("fragmentation" in note for note in tight.notes)


def test_offloading_more_than_the_given_host_memory_is_refused_with_both_figures(
    profile: Profile, replay: Replay
) -> None:
    host = estimator(profile, replay).estimate(Schedule(Backend.UNSLOTH)).host
    enough = estimator(profile, replay, host_ram=host).estimate(Schedule(Backend.UNSLOTH))
    assert enough.fits
    short = estimator(profile, replay, host_ram=host - 1).estimate(Schedule(Backend.UNSLOTH))
    assert (short.fits, short.fit_probability) == (False, 0.0)
    assert any("GiB of host memory" in note for note in short.notes)
    assert estimator(profile, replay, host_ram=0).estimate(Schedule(Backend.TORCH)).fits


def test_on_a_cpu_reserved_is_the_peak(profile: Profile) -> None:
    device = dataclasses.replace(cpu_device(), usable_bytes=100 * GIB)
    found = Estimator(profile, device, Semantics()).estimate(Schedule())
    assert device.kind is DeviceKind.CPU
    assert found.reserved == found.peak
    assert found.fits


# Reuse ---------------------------------------------------------------------------------------------------------------


def test_a_known_result_of_the_allocator_is_not_simulated_again(
    profile: Profile, replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache: dict[str, Any] = {}
    first = estimator(profile, replay, reserved_cache=cache).estimate(Schedule())
    json.dumps(cache)  # it is stored as JSON

    def simulate(*_args: object, **_options: object) -> None:
        raise AssertionError("simulated again")

    monkeypatch.setattr(allocator, "simulate", simulate)
    assert estimator(profile, replay, reserved_cache=cache).estimate(Schedule()) == first
    with pytest.raises(AssertionError, match="simulated again"):
        estimator(profile, replay, reserved_cache=cache).estimate(Schedule(Backend.TORCH))


def test_two_per_block_schedules_with_equally_many_recomputed_blocks_are_told_apart(
    profile: Profile, replay: Replay
) -> None:
    n = len(profile.structure.blocks)
    few = n // 4
    ends = [
        Schedule.per_block(["recompute"] * few + ["keep"] * (n - few)),
        Schedule.per_block(["keep"] * (n - few) + ["recompute"] * few),
    ]
    cache: dict[str, Any] = {}
    together = [estimator(profile, replay, reserved_cache=cache).estimate(s).reserved for s in ends]
    apart = [estimator(profile, replay, reserved_cache={}).estimate(s).reserved for s in ends]
    assert ends[0].name == ends[1].name
    assert len(cache) == 2
    assert together == apart


def test_an_estimate_is_the_same_with_the_replay_of_another_estimator(profile: Profile, replay: Replay) -> None:
    for schedule in (Schedule(), Schedule(Backend.UNSLOTH)):
        alone = Estimator(profile, CARD, Semantics(), reserved_cache=CACHE).estimate(schedule)
        estimator(profile, replay, 80 * GIB).estimate(schedule)
        assert estimator(profile, replay).estimate(schedule) == alone


# JSON ----------------------------------------------------------------------------------------------------------------

CONTRACT = {
    "name", "controls", "supported", "reason", "peak_gib", "peak_gib_low", "peak_gib_high", "reserved_gib", "device_gib",
    "host_gib", "step_seconds", "step_seconds_low", "step_seconds_high", "fits", "fit_probability", "breakdown",
}  # fmt: skip


def test_an_answers_entry_has_the_contracts_keys_in_gib_and_seconds(profile: Profile, replay: Replay) -> None:
    found = estimator(profile, replay).estimate(Schedule(Backend.TORCH, 2, 4), notes=("said", "said"))
    entry = json.loads(json.dumps(found.to_json()))
    assert entry.keys() >= CONTRACT
    assert entry["name"] == "torch interval=2 stride=4"
    assert entry["controls"] == Schedule(Backend.TORCH, 2, 4).to_controls()
    assert entry["peak_gib"] == pytest.approx(found.peak / GIB, abs=1e-4)
    assert entry["breakdown"].keys() == {
        "weights", "adapter", "gradients", "optimizer", "saved", "transient", "workspace", "inputs",
    }  # fmt: skip
    assert sum(entry["breakdown"].values()) == pytest.approx(entry["peak_gib"], abs=1e-3)
    assert entry["notes"].count("said") == 1


def test_an_unsupported_schedules_entry_has_its_reason_and_no_figures() -> None:
    entry = Estimate(Schedule(Backend.TORCH_FFN), False, "rejected").to_json()
    assert (entry["supported"], entry["reason"]) == (False, "rejected")
    assert entry.keys() >= CONTRACT
    assert all(entry[k] is None for k in CONTRACT - {"name", "controls", "supported", "reason"})


def test_a_per_block_schedules_entry_lists_its_actions() -> None:
    entry = Estimate(Schedule.per_block(["keep", "recompute"]), True, None).to_json()
    assert entry["controls"] == {"actions": ["keep", "recompute"]}


def test_without_the_devices_rates_there_is_memory_but_no_time(profile: Profile, replay: Replay) -> None:
    unknown = dataclasses.replace(CARD, memory_bytes_per_second=None)
    found = Estimator(profile, unknown, Semantics(), reserved_cache=CACHE, replay=replay).estimate(Schedule())
    assert found.peak > 0
    entry = found.to_json()
    assert entry["step_seconds"] is entry["step_seconds_low"] is entry["recompute_seconds"] is None


def test_what_the_attention_kernel_saves_is_a_part_of_what_attention_saves(profile: Profile, replay: Replay) -> None:
    schedule = Schedule(offload_attention=True)
    found = {}
    for how in (Offloading.HOOKS, Offloading.KERNEL):
        e = estimator(profile, replay, semantics=Semantics(offloading=how))
        found[how] = e.replay.run(e.semantics.resolve(schedule, profile), e.resident)
    kernel, hooks = found[Offloading.KERNEL], found[Offloading.HOOKS]
    assert 0 < kernel.to_host < hooks.to_host
    width, blocks = 3840 * 2, 34
    tokens = 16 * 16 + 64  # 32 of the caption and 8 of its template, which the model rounds up to a multiple of 32
    # query, key, value and result of every block (the refiners see fewer tokens)
    assert 4 * tokens * width * 30 < kernel.to_host <= 4 * tokens * width * blocks
    assert hooks.peak < kernel.peak
