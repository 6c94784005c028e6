"""What is stored of a profile's simulations: the same numbers again, by the same code and of the same tape only."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from advisor.api import Session, profile_for
from estimators import memory, simulations
from estimators.devices import find_gpu
from estimators.estimate import Estimator, Semantics
from estimators.memory import Replay
from estimators.schedule import Action, Backend, Schedule
from estimators.simulations import Simulations
from estimators.swapping import Swap, Swapping, managed_blocks
from probes import collecting, store
from probes.profile import Profile
from probes.workload import Workload, from_request

CARD = find_gpu("RTX 4090")
WORKLOAD = from_request({"model": "sd3", "resolution": "512x512"})
SCHEDULES = [
    Schedule(),
    Schedule(Backend.TORCH, 2, 3),
    Schedule(Backend.UNSLOTH, offload_attention=True),
    Schedule(Backend.TORCH_FFN),
]


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profile_for(WORKLOAD, CARD, pytest.fail)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ADVISE_CACHE_DIR", str(tmp_path))
    return tmp_path


def refuse(*_args: object, **_options: object) -> None:
    raise AssertionError("simulated again")


def estimator(profile: Profile, known: Simulations, workload: Workload | None = None) -> Estimator:
    asked = dataclasses.replace(profile, workload=workload or profile.workload)
    return Estimator(asked, CARD, Semantics(), reserved_cache=known.reserved, step_cache=known.steps)


def stored(profile: Profile, schedules: list[Schedule], name: str = "a") -> Simulations:
    """Written by an estimator, read back."""
    known = Simulations.read(name, profile.tape)
    for schedule in schedules:
        estimator(profile, known).estimate(schedule)
    known.save()
    return Simulations.read(name, profile.tape)


def test_a_stored_step_is_the_same_again_without_a_simulation(
    profile: Profile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = [Estimator(profile, CARD, Semantics()).estimate(s) for s in SCHEDULES]
    known = stored(profile, SCHEDULES)
    monkeypatch.setattr(memory, "_Step", refuse)
    monkeypatch.setattr(Estimator, "_simulate", refuse)
    assert [estimator(profile, known).estimate(s) for s in SCHEDULES] == fresh
    assert known.trouble is None
    with pytest.raises(AssertionError, match="simulated again"):
        estimator(profile, known).estimate(Schedule(Backend.TORCH))


@pytest.mark.parametrize("how", [Swapping.BUNDLED, Swapping.TRAINER])
def test_a_stored_step_with_swapped_blocks_and_held_gradients_is_the_same_again(
    profile: Profile, how: Swapping
) -> None:
    e = Estimator(profile, CARD, Semantics())
    resident = dataclasses.replace(
        e.resident, swap=Swap(managed_blocks(profile.structure, 9), how), gradients_held=True, kept=7
    )
    resolution = e.semantics.resolve(SCHEDULES[1], profile)
    steps: dict[str, Any] = {}
    first = Replay(profile, e.counted, steps).run(resolution, resident, stored=True)
    assert len(steps) == 1
    assert Replay(profile, e.counted, json.loads(json.dumps(steps))).run(resolution, resident, stored=True) == first
    assert Replay(profile, e.counted).run(resolution, resident) == first


def test_steps_that_differ_in_what_they_depend_on_are_stored_apart(profile: Profile) -> None:
    e = Estimator(profile, CARD, Semantics())
    two, three = (Swap(managed_blocks(profile.structure, n), Swapping.BUNDLED) for n in (2, 3))
    residents = [
        e.resident,
        dataclasses.replace(e.resident, gradients_held=True),
        dataclasses.replace(e.resident, device_is_host=True),
        *(
            dataclasses.replace(e.resident, swap=swap)
            for swap in (two, three, dataclasses.replace(two, how=Swapping.TRAINER))
        ),
    ]
    steps: dict[str, Any] = {}
    for schedule in SCHEDULES:
        for resident in residents:
            Replay(profile, e.counted, steps).run(e.semantics.resolve(schedule, profile), resident, stored=True)
    assert len(steps) == len(SCHEDULES) * len(residents)


def test_what_other_code_or_another_tape_made_is_not_used(
    profile: Profile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stored(profile, [Schedule()]).reserved
    size = profile.tape.size.copy()
    size[0] += 1
    other = Simulations.read("a", dataclasses.replace(profile.tape, size=size))
    assert (other.reserved, other.steps, other.trouble) == ({}, {}, None)
    monkeypatch.setattr(store, "code_digest", lambda package: f"other {package}")
    other = Simulations.read("a", profile.tape)
    assert (other.reserved, other.steps, other.trouble) == ({}, {}, None)


def test_the_code_s_digest_tells_the_packages_apart_and_counts_their_facts() -> None:
    assert store.code_digest("estimators") != store.code_digest()
    assert store.code_digest() == store.code_digest("probes")


@pytest.mark.parametrize("column", ["size", "death", "released_at", "op_kind", "saved_movable"])
def test_a_tape_s_digest_counts_every_column(profile: Profile, column: str) -> None:
    values = getattr(profile.tape, column).copy()
    values[-1] = not values[-1] if values.dtype == np.bool_ else values[-1] + 1
    assert dataclasses.replace(profile.tape, **{column: values}).digest() != profile.tape.digest()
    assert dataclasses.replace(profile.tape).digest() == profile.tape.digest()


def _one_number_changed(content: bytes) -> bytes:
    head, _, body = content.partition(b"\n")
    results = json.loads(body)
    results["reserved"] = dict.fromkeys(results["reserved"], 5)
    return head + b"\n" + json.dumps(results).encode()


def _checksum_right_but_no_results(content: bytes) -> bytes:
    header = json.loads(content.partition(b"\n")[0])
    return json.dumps(header | {"checksum": hashlib.sha256(b"[]").hexdigest()}).encode() + b"\n[]"


@pytest.mark.parametrize(
    "damage",
    [
        _one_number_changed,
        _checksum_right_but_no_results,
        lambda content: content[:-20],
        lambda _: b"",
        lambda _: b"[1]\n{}",
        lambda _: b"\xff\xfe",
        lambda _: b"[" * 100_000,
    ],
)
def test_a_damaged_file_is_said_and_made_anew(profile: Profile, folder: Path, damage: Any) -> None:
    whole = stored(profile, [Schedule()])
    path = folder / whole.name
    path.write_bytes(damage(path.read_bytes()))
    found = Simulations.read("a", profile.tape)
    assert found.trouble is not None
    assert str(path) in found.trouble
    assert (found.reserved, found.steps) == ({}, {})
    found.save()
    assert Simulations.read("a", profile.tape).trouble is None


def test_only_news_are_written_and_only_so_many_kept(
    profile: Profile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = stored(profile, SCHEDULES)
    path = folder / known.name
    path.unlink()
    known.save()
    assert not path.exists()
    monkeypatch.setattr(simulations, "MOST_STEPS", 2)
    latest = list(known.steps)[-1]
    estimator(profile, known).estimate(Schedule(Backend.TORCH))
    known.save()
    again = Simulations.read("a", profile.tape)
    assert len(again.steps) == 2
    assert next(iter(again.steps)) == latest


def test_per_block_steps_are_not_stored(profile: Profile) -> None:
    known = Simulations("a", "")
    estimator(profile, known).estimate(Schedule(actions=(Action.RECOMPUTE,) * len(profile.structure.blocks)))
    assert known.steps == {}
    assert len(known.reserved) == 1


def test_a_session_answers_from_what_an_earlier_one_stored(
    profile: Profile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = store.key(WORKLOAD, profile.target, profile.source)
    store.atomic_write(folder / f"{name}.npz", store.to_bytes(profile, name))
    first = Session().plan(WORKLOAD, CARD)
    with monkeypatch.context() as patched:
        patched.setattr(memory, "_Step", refuse)
        patched.setattr(Estimator, "_simulate", refuse)
        assert Session().plan(WORKLOAD, CARD).to_json() == first.to_json()
    (path,) = folder.glob("*.simulated.jsonl")
    path.write_bytes(path.read_bytes()[:-9])
    session = Session()
    warned = session.plan(WORKLOAD, CARD)
    assert [w for w in warned.warnings if "not readable" in w]
    assert warned.schedules == first.schedules
    assert session.plan(WORKLOAD, CARD).warnings == first.warnings


def test_a_simulation_s_result_that_is_below_the_replayed_peak_is_no_damage(profile: Profile) -> None:
    """The replay counts blocks with the rest that a segment of their own would leave; a cached block may leave less."""
    known = Simulations("a", "")
    first = estimator(profile, known).estimate(Schedule())
    (key,) = known.reserved
    known.reserved[key] = first.peak - 1
    again = estimator(profile, known).estimate(Schedule())
    assert again.notes == first.notes
    assert again.reserved == first.peak - 1


def test_the_search_for_cycles_rests_while_an_answer_is_made_and_goes_on_after_it(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    original = Estimator.estimate

    def estimate(self: Estimator, *args: Any, **options: Any) -> Any:
        seen.append(gc.isenabled())
        if len(seen) == 3:
            raise RuntimeError("stopped")
        return original(self, *args, **options)

    monkeypatch.setattr(Estimator, "estimate", estimate)
    assert gc.isenabled()
    Session().plan(WORKLOAD, CARD, schedules=SCHEDULES[:2])
    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="stopped"):
        Session().plan(WORKLOAD, CARD)
    assert seen == [False] * 3
    assert gc.isenabled()
    gc.disable()
    try:
        with collecting.paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("reserved", "steps"),
    [([], []), ({"a": "1"}, {}), ({"a": 0}, {}), ({"a": [1, 2]}, {}), ({}, []), (None, {})],
    ids=str,
)
def test_results_of_another_form_are_made_anew_and_said(
    profile: Profile, folder: Path, reserved: Any, steps: Any
) -> None:
    known = Simulations.read("a", profile.tape)
    body = json.dumps({"reserved": reserved, "steps": steps}).encode()
    head = json.dumps({"made_of": known.made_of, "checksum": hashlib.sha256(body).hexdigest()}).encode()
    store.write_quietly(known.name, head + b"\n" + body)
    again = Simulations.read("a", profile.tape)
    assert (again.reserved, again.steps) == ({}, {})
    assert "is not readable; it is made anew" in str(again.trouble)


def test_a_step_of_another_form_is_simulated_again(profile: Profile, folder: Path) -> None:
    known = stored(profile, [Schedule()])
    right = json.dumps(known.steps)
    known.steps.update(dict.fromkeys(known.steps, "nothing"))
    assert estimator(profile, known).estimate(Schedule()) == Estimator(profile, CARD, Semantics()).estimate(Schedule())
    assert json.dumps(known.steps) == right


def test_no_cache_folder_is_no_damage(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADVISE_CACHE_DIR", "/dev/null/x")
    assert Simulations.read("a", profile.tape).trouble is None
