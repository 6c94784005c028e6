"""What the runtime counts is what the estimator assumes: recomputed units, copied tensors and bytes, for every schedule."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from advisor.runtime import apply, remove
from estimators import devices
from estimators.estimate import Estimator, Semantics
from estimators.schedule import Action, Backend, Schedule
from probes.build import Job, real_job
from probes.profile import Profile
from probes.step import forward_loss
from probes.target import Target
from probes.traced import trace
from probes.workload import from_request, reduced_copy

GROUPS: tuple[tuple[int | None, int | None], ...] = ((None, None), (2, None), (3, None), (2, 3), (2, 4), (99, None))
SCHEDULES = [
    Schedule(backend, *group, offload_attention=attention)
    for attention in (False, True)
    for backend in Backend
    for group in (GROUPS if backend in (Backend.TORCH, Backend.UNSLOTH) else GROUPS[:2])
    if backend is not Backend.NONE or group == GROUPS[0]
]
SLOW = pytest.mark.slow
MODELS = ("flux", "sd3", pytest.param("wan", marks=SLOW), pytest.param("sdxl", marks=SLOW))
"""Two stacks with a joint one; two kinds of attention in a block; self- and cross-attention; a U-Net."""


@dataclass(frozen=True)
class Case:
    profile: Profile
    estimator: Estimator
    job: Job


@cache
def _case(model: str) -> Case:
    workload = reduced_copy(from_request({"model": model}))
    profile = trace(workload, Target("cpu"))
    return Case(profile, Estimator(profile, devices.cpu_device(), Semantics()), real_job(workload))


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    found = _case(request.param)
    yield found
    remove(found.job.model)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.name)
def test_counted_volumes_are_the_assumed_ones(case: Case, schedule: Schedule) -> None:
    _check(case, schedule)


@pytest.mark.parametrize("seed", range(6))
def test_counted_volumes_of_per_block_schedules_are_the_assumed_ones(case: Case, seed: int) -> None:
    draw = random.Random(seed)
    blocks = case.profile.structure.blocks
    _check(case, Schedule.per_block([draw.choice([a for a in Action if a.suits(b)]) for b in blocks]))


def _check(case: Case, schedule: Schedule) -> None:
    resolution = case.estimator.semantics.resolve(schedule, case.profile)
    memory = case.estimator.replay.run(resolution, case.estimator.resident)
    with apply(case.job.model, schedule, structure=case.profile.structure) as handle:
        torch.manual_seed(0)
        forward_loss(case.job).backward()
    for p in case.job.model.parameters():
        p.grad = None
    c = handle.counters
    assert c.units_recomputed == len(memory.recomputed)
    assert c.blocks_checkpointed == sum(len(u.modules) for u in resolution.units)
    assert (c.bytes_offloaded, c.bytes_fetched) == (memory.to_host, memory.from_host)
    assert c.tensors_offloaded == memory.copied_tensors
    assert c.attention_calls == len(resolution.offloaded_attention)
    assert c.host_bytes == 0
    did = c.units_recomputed + c.bytes_offloaded
    assert (did > 0) == (schedule != Schedule())
