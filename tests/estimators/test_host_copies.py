"""What our runtime copies to the host: lifetimes on a device whose copies run beside the computation, and peaks against the profiler."""

from __future__ import annotations

from functools import cache

import pytest

from advisor.verification import compare_on_cpu
from estimators.devices import cpu_device, find_gpu
from estimators.estimate import Estimator, Semantics
from estimators.host_copies import AttentionCopies, Fetch, HostCopy, run_ahead
from estimators.placement import Placement
from estimators.schedule import Backend, Offloading, Schedule, resolve
from probes.profile import Profile
from probes.target import Target
from probes.traced import trace
from probes.workload import from_request, reduced_copy

ATTENTION = [
    Schedule(offload_attention=True),
    Schedule(Backend.TORCH, offload_attention=True),
    Schedule(Backend.TORCH, 2, 4, offload_attention=True),
    Schedule(Backend.UNSLOTH, 3, offload_attention=True),
]


@cache
def _profile(model: str, cuda: bool) -> Profile:
    return trace(reduced_copy(from_request({"model": model})), Target("cuda", (8, 9)) if cuda else Target("cpu"))


def test_a_source_lives_until_the_next_group_and_a_group_comes_back_one_early() -> None:
    copies = [HostCopy(i, 100, 10 * i, 10 * i, 200, [Fetch(190 - 10 * i, 195 - 10 * i, 10 * i)]) for i in range(1, 5)]
    run_ahead(copies)
    assert [c.copied for c in copies] == [20, 30, 40, 150], "the last one until backward asks for something"
    assert [c.fetches[0].start for c in copies] == [170, 160, 150, 150], "the last one when it is asked for"
    assert [c.fetches[0].end for c in copies] == [185, 175, 165, 155]


def test_the_rest_of_a_group_comes_back_with_its_first() -> None:
    copies = [HostCopy(i, 1, 7, 7, 99, [Fetch(50 + i, 90, 7)]) for i in range(3)]
    run_ahead(copies)
    assert {c.fetches[0].start for c in copies} == {50}


@pytest.mark.parametrize("schedule", ATTENTION, ids=lambda s: s.name)
def test_a_storage_is_copied_once_where_hooks_copy_every_saved_tensor(schedule: Schedule) -> None:
    profile = _profile("sd3", True)
    volumes = {}
    for offloading in Offloading:
        estimator = Estimator(profile, find_gpu("4090"), Semantics(offloading=offloading))
        resolution = estimator.semantics.resolve(schedule, profile)
        volumes[offloading] = estimator.replay.run(resolution, estimator.resident)
    ours, hooks = volumes[Offloading.BUNDLED], volumes[Offloading.HOOKS]
    assert 0 < ours.from_host == ours.to_host
    assert ours.to_host < (1.0 if schedule.backend is Backend.NONE else 0.8) * hooks.to_host
    if schedule.backend is not Backend.NONE:
        recomputed = [sum(end - start for s in m.recomputed for start, end in s.ranges) for m in (ours, hooks)]
        assert recomputed[0] < 0.8 * recomputed[1], "attention does not run again"


def test_on_a_gpu_offloading_lowers_the_peak_of_what_keeps_everything() -> None:
    profile = _profile("sd3", True)
    estimator = Estimator(profile, find_gpu("4090"), Semantics())
    assert estimator.measure(ATTENTION[0]).peak < 0.9 * estimator.measure(Schedule()).peak


@pytest.mark.parametrize("cuda", [True, False], ids=["cuda", "cpu"])
def test_views_that_leave_gaps_in_their_storage_are_copied_one_by_one(cuda: bool) -> None:
    """zlab_i1's attention saves queries and keys, but not the values, of one projection's output: two copies without the values, which
    come back with the gaps between their elements."""
    profile = _profile("zlab_i1", cuda)
    place = Placement(profile.tape, resolve(ATTENTION[0], profile.structure))
    copies = [c for c in AttentionCopies(place).copies() if 3 * c.size == profile.tape.size[c.storage]]
    blocks = len(profile.structure.blocks)
    assert len(copies) == 2 * 2 * blocks, "image and text of each block"
    assert len({c.storage for c in copies}) == 2 * blocks
    assert all(2.8 * c.size < c.device_size < 3 * c.size for c in copies)


def test_on_a_cpu_host_copies_count_and_gain_nothing() -> None:
    estimator = Estimator(_profile("sd3", False), cpu_device(), Semantics())
    assert estimator.measure(ATTENTION[0]).peak >= 0.99 * estimator.measure(Schedule()).peak


@pytest.mark.slow
@pytest.mark.parametrize("model", ["sd3", "wan", "flux", "sdxl", "zlab_i1"])
def test_the_predicted_peak_is_the_profilers(model: str) -> None:
    for found in compare_on_cpu(reduced_copy(from_request({"model": model})), lambda _: ATTENTION):
        assert found.exact, found.schedule.name
        assert abs(found.error) < 0.008, (found.schedule.name, found.error)
