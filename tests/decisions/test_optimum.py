"""The objective `optimum`: a decision for every block, against trying everything."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from advisor import api
from advisor.per_block import check, for_copy
from advisor.plan_files import load
from advisor.training import run
from decision_rules.optimum import _lower_hull, optimum
from estimators.devices import cpu_device, find_gpu
from estimators.estimate import Estimator, Semantics
from estimators.schedule import Action, Backend, Schedule
from probes.profile import Profile
from probes.target import Target
from probes.traced import trace
from probes.workload import WorkloadError, from_request, reduced_copy

CARD = find_gpu("4090")
SOME = (Action.RECOMPUTE, Action.KEEP_ATTENTION_ON_HOST, Action.RECOMPUTE_FFN, Action.KEEP)
"""From early blocks to late ones."""


@cache
def _profile(model: str) -> Profile:
    return trace(reduced_copy(from_request({"model": model})), Target("cuda", (8, 9)))


@cache
def _full() -> Estimator:
    workload = from_request({"model": "sd3", "resolution": "1024x1024", "batch": 2})
    return Estimator(trace(workload, Target("cuda", (8, 9))), CARD, Semantics())


def _estimator(model: str, capacity: int | None = None) -> Estimator:
    free = Estimator(_profile(model), CARD, Semantics())
    return free if capacity is None else Estimator(
        _profile(model), CARD, Semantics(), headroom=free.capacity - capacity, replay=free.replay
    )  # fmt: skip


def _peaks(model: str) -> tuple[int, int]:
    """Peaks with everything recomputed and with everything kept."""
    estimator = _estimator(model)
    n = len(_profile(model).structure.blocks)
    low = estimator.measure(Schedule(actions=(Action.RECOMPUTE_OFFLOAD,) * n)).peak
    return low, estimator.measure(Schedule(actions=(Action.KEEP,) * n)).peak


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_it_is_as_fast_as_the_best_of_all_mixes(share: float) -> None:
    """Against every way to give multiples of four blocks one of four actions."""
    free = _full()
    n = len(free.profile.structure.blocks)
    cuts = [c for c in itertools.product(range(0, n + 1, 4), repeat=len(SOME) - 1) if sum(c) <= n]
    mixes = [sum(((a,) * k for a, k in zip(SOME, (*c, n - sum(c)), strict=True)), ()) for c in cuts]
    measured = [free.measure(Schedule(actions=mix)) for mix in mixes]
    low, high = min(m.peak for m in measured), max(m.peak for m in measured)
    capacity = int(low + share * (high - low))
    estimator = Estimator(free.profile, CARD, Semantics(), headroom=free.capacity - capacity, replay=free.replay)
    found, reasons = optimum(estimator, free.profile.structure)
    fitting = sorted((m.step_seconds or 0.0, mix) for m, mix in zip(measured, mixes, strict=True) if m.peak <= capacity)
    assert len(fitting) > 1
    best = next(s for s, mix in fitting if estimator.estimate(Schedule(actions=mix)).fits)
    assert found is not None, reasons
    assert found.step_seconds is not None
    assert found.step_seconds <= 1.03 * best


def test_what_it_returns_is_a_replayed_schedule() -> None:
    low, high = _peaks("flux")
    estimator = _estimator("flux", (low + high) // 2)
    found, _ = optimum(estimator, _profile("flux").structure)
    assert found is not None
    again = estimator.estimate(found.schedule)
    assert (again.peak, again.step_seconds, again.fits) == (found.peak, found.step_seconds, True)
    assert found.peak <= estimator.capacity


def test_more_memory_is_never_slower() -> None:
    low, high = _peaks("flux")
    times = []
    for share in (0.1, 0.3, 0.5, 0.7, 0.9, 1.2):
        found, _ = optimum(_estimator("flux", int(low + share * (high - low))), _profile("flux").structure)
        times.append(float("inf") if found is None or found.step_seconds is None else found.step_seconds)
    assert times[-1] < float("inf")
    assert all(later <= earlier * 1.01 for earlier, later in itertools.pairwise(times))


def test_nothing_is_recomputed_where_everything_fits() -> None:
    found, _ = optimum(_estimator("sd3"), _profile("sd3").structure)
    assert found is not None
    assert set(found.schedule.actions or ()) == {Action.KEEP}


def test_where_nothing_fits_or_times_are_unknown_the_reason_is_given() -> None:
    found, reasons = optimum(_estimator("sd3", 2**20), _profile("sd3").structure)
    assert found is None
    assert "no per-block schedule fits" in reasons[0]
    slow = Estimator(_profile("sd3"), cpu_device(), Semantics())
    assert optimum(slow, _profile("sd3").structure) == (
        None,
        ("optimum: the step time is unknown on this device, so there is nothing to minimise",),
    )


def test_the_hull_drops_what_two_others_beat() -> None:
    points = [
        (Action.KEEP, 0, 0.0),
        (Action.RECOMPUTE, 10, 1.0),
        (Action.RECOMPUTE_FFN, 5, 0.2),
        (Action.KEEP_ATTENTION_ON_HOST, 6, 0.9),
        (Action.RECOMPUTE_OFFLOAD, 9, 1.5),
    ]
    assert [p[0] for p in _lower_hull(points)] == [Action.KEEP, Action.RECOMPUTE_FFN, Action.RECOMPUTE]


@pytest.mark.slow
def test_a_plan_with_it_survives_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADVISE_CACHE_DIR", str(tmp_path / "cache"))
    profile = _full().profile
    monkeypatch.setattr(api, "profile_for", lambda *a, **k: profile)
    plan = api.Session().plan(profile.workload, CARD, objective=api.Objective.OPTIMUM, headroom=10 * 2**30)
    assert plan.recommended is not None
    chosen = plan.schedule
    times = [e.step_seconds for e in plan.schedules if e.fits and e.step_seconds is not None]
    assert plan.recommended.step_seconds == min(times)
    assert chosen.actions is not None
    assert plan.export is None
    path = tmp_path / "plan.json"
    plan.save(path)
    assert json.loads(path.read_text())["recommended"]["export"] is None
    read = load(path)
    assert read.schedule == chosen
    assert read.objective is api.Objective.OPTIMUM
    assert Schedule(Backend.TORCH) in [e.schedule for e in read.schedules]


def test_a_reduced_copy_takes_evenly_spaced_decisions() -> None:
    structure = _profile("sd3").structure
    n = len(structure.blocks)
    plan = Schedule.per_block(["recompute"] * (2 * n) + ["keep"] * (2 * n))
    copied, notes = for_copy(plan, structure)
    assert copied == Schedule.per_block(["recompute"] * (n // 2) + ["keep"] * (n - n // 2))
    assert str(4 * n) in notes[0]
    assert for_copy(Schedule(Backend.TORCH), structure) == (Schedule(Backend.TORCH), [])


def test_a_schedule_of_another_length_names_the_file_and_both_numbers() -> None:
    workload = reduced_copy(from_request({"model": "sd3"}))
    n = len(_profile("sd3").structure.blocks)

    def plan(actions: list[str]) -> SimpleNamespace:
        return SimpleNamespace(workload=workload, schedule=Schedule.per_block(actions), path="p.json")

    check(plan(["keep"] * n))
    with pytest.raises(
        WorkloadError, match=rf"^p.json: the plan's model has {n} blocks, the plan lists {n + 1} actions$"
    ):
        check(plan(["keep"] * (n + 1)))


def test_a_per_block_plan_trains_on_the_reduced_copy() -> None:
    blocks = 24  # of SD3 medium; its copy has fewer
    plan = SimpleNamespace(
        workload=from_request({"model": "sd3", "optimizer": "sgd"}),
        schedule=Schedule.per_block(["recompute"] * (blocks // 2) + ["keep"] * (blocks // 2)),
        path="p.json",
    )
    result = run(plan, steps=1, device="cpu")
    assert any("evenly spaced decisions of the plan's 24" in note for note in result.notes)
    plan.schedule = Schedule.per_block(["keep"] * 5)
    with pytest.raises(WorkloadError, match="has 24 blocks, the plan lists 5 actions"):
        run(plan, steps=1, device="cpu")
