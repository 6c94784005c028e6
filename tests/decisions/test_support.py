"""What each executor does with each control."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.exporters import simpletuner
from decision_rules import support
from decision_rules.support import Executor, candidates, check, semantics, trainer_support
from estimators.schedule import Action, Backend, IntervalForm, Schedule, resolve
from probes.structure import Block, Chain, Structure

NONE, TORCH, FFN = Schedule(), Schedule(Backend.TORCH), Schedule(Backend.TORCH_FFN)
FIVE = ("flux", "sd3", "sdxl", "wan", "z_image")


def structure(n: int = 30, ffn: bool = True, linked: bool | None = True) -> Structure:
    blocks = tuple(
        Block(f"blocks.{i}", "Kind", ((f"blocks.{i}.ff",),) if ffn else (), (f"blocks.{i}.attn",)) for i in range(n)
    )
    return Structure((Chain("blocks", blocks, linked),))


STRUCTURE = structure()

# SimpleTuner ---------------------------------------------------------------------------------------------------------


def test_a_dropped_interval_is_noted_and_gone_from_what_runs() -> None:
    verdict = check(Executor.SIMPLETUNER, "sdxl", STRUCTURE, Schedule(Backend.TORCH, 2, 4))
    assert verdict.supported
    assert verdict.effective == TORCH
    assert verdict.notes == ("SimpleTuner warns and drops the interval for sdxl: this runs as torch on every block",)


def test_a_supported_interval_runs_as_it_is_without_a_note() -> None:
    schedule = Schedule(Backend.TORCH, 2, 4)
    verdict = check(Executor.SIMPLETUNER, "sd3", STRUCTURE, schedule)
    assert (verdict.supported, verdict.effective, verdict.notes) == (True, schedule, ())


@pytest.mark.parametrize("backend", [Backend.TORCH_FFN, Backend.UNSLOTH_FFN])
@pytest.mark.parametrize("family", ["sd3", "sdxl", "chroma"])
def test_a_feed_forward_backend_is_rejected_where_the_trainer_rejects_it(family: str, backend: Backend) -> None:
    verdict = check(Executor.SIMPLETUNER, family, STRUCTURE, Schedule(backend))
    assert not verdict.supported
    assert verdict.reason == f"SimpleTuner rejects {backend} for {family}; torch works"


@pytest.mark.parametrize("family", ["flux", "wan", "z_image"])
def test_a_feed_forward_backend_runs_where_the_trainer_has_it(family: str) -> None:
    assert check(Executor.SIMPLETUNER, family, STRUCTURE, FFN).supported


def test_unsloth_runs_as_torch_where_the_trainer_ignores_it() -> None:
    verdict = check(Executor.SIMPLETUNER, "anima", STRUCTURE, Schedule(Backend.UNSLOTH, 2))
    assert verdict.supported
    assert verdict.effective == Schedule(Backend.TORCH, 2)
    assert verdict.notes == ("SimpleTuner runs unsloth as torch for anima: checkpoint inputs stay on the GPU",)


def test_krea2_offloads_inputs_only_with_an_interval() -> None:
    alone = check(Executor.SIMPLETUNER, "krea2", STRUCTURE, Schedule(Backend.UNSLOTH))
    assert alone.effective == TORCH
    grouped = check(Executor.SIMPLETUNER, "krea2", STRUCTURE, Schedule(Backend.UNSLOTH, 2))
    assert grouped.effective == Schedule(Backend.UNSLOTH, 2)


@pytest.mark.parametrize("family", ["sdxl", "pixart", "infinitetalk"])
def test_attention_offload_is_rejected_where_the_trainer_rejects_it(family: str) -> None:
    verdict = check(Executor.SIMPLETUNER, family, STRUCTURE, Schedule(offload_attention=True))
    assert verdict.reason == f"SimpleTuner rejects attention offload for {family}; leave it off"


def test_a_family_outside_the_trainers_matrix_gets_plain_checkpointing_only() -> None:
    assert check(Executor.SIMPLETUNER, "unheard-of", STRUCTURE, TORCH).supported
    assert not check(Executor.SIMPLETUNER, "unheard-of", STRUCTURE, FFN).supported
    assert check(Executor.SIMPLETUNER, "unheard-of", STRUCTURE, Schedule(Backend.TORCH, 2)).effective == TORCH


@pytest.mark.parametrize(
    ("family", "form"),
    [("flux", IntervalForm.SEGMENTS), ("chroma", IntervalForm.EVERY_KTH), ("sdxl", IntervalForm.IGNORED)],
)
def test_an_interval_means_what_the_trainers_code_does_for_the_family(family: str, form: IntervalForm) -> None:
    assert semantics(Executor.SIMPLETUNER, family).interval_form is form


@pytest.mark.parametrize(("family", "selects"), [("flux", True), ("chroma", True), ("wan", False), ("z_image", False)])
def test_with_a_feed_forward_backend_only_some_families_let_the_interval_choose_blocks(
    family: str, selects: bool
) -> None:
    assert semantics(Executor.SIMPLETUNER, family).interval_selects_ffn is selects


def test_the_trainer_rejects_schedules_of_single_blocks() -> None:
    verdict = check(Executor.SIMPLETUNER, "flux", STRUCTURE, Schedule.per_block([Action.KEEP] * 30))
    assert verdict.reason == "SimpleTuner has no per-block schedules; --executor bundled runs them"


def test_every_family_of_the_matrix_has_a_known_meaning() -> None:
    matrix = support._matrix()
    assert len(matrix) > 40
    for family, row in matrix.items():
        assert row.unsloth in ("yes", "ignored") or row.unsloth.startswith("only with interval"), family
        assert row.interval or row.interval_form is IntervalForm.IGNORED, family
        assert trainer_support(family) is row


# Others --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        (FFN, "diffusers has no torch-ffn backend; torch works"),
        (Schedule(Backend.UNSLOTH), "diffusers has no unsloth backend"),
        (Schedule(Backend.TORCH, 2), "diffusers has no interval or stride"),
        (Schedule(offload_attention=True), "diffusers does not offload attention"),
        (Schedule.per_block(["keep"]), "diffusers checkpoints all blocks or none"),
    ],
)
def test_diffusers_has_only_on_and_off(schedule: Schedule, reason: str) -> None:
    verdict = check(Executor.DIFFUSERS, "flux", STRUCTURE, schedule)
    assert verdict.reason is not None
    assert verdict.reason.startswith(reason)
    assert check(Executor.DIFFUSERS, "flux", STRUCTURE, NONE).supported
    assert check(Executor.DIFFUSERS, "flux", STRUCTURE, TORCH).supported


def test_the_bundled_runtime_takes_any_family_and_any_interval() -> None:
    for family in ("sdxl", "unheard-of"):
        for schedule in (
            Schedule(Backend.UNSLOTH, 2, 4),
            Schedule(Backend.UNSLOTH_FFN, 2),
            Schedule.per_block(["keep"]),
        ):
            verdict = check(Executor.BUNDLED, family, STRUCTURE, schedule)
            assert (verdict.supported, verdict.effective) == (True, schedule)


def test_a_feed_forward_backend_needs_a_model_with_feed_forward_sides() -> None:
    verdict = check(Executor.BUNDLED, "x", structure(ffn=False), FFN)
    assert verdict.reason == "torch-ffn: no block has a separate feed-forward side; torch works"


# Candidates ----------------------------------------------------------------------------------------------------------


def _effects(executor: Executor, family: str, model: Structure) -> list[tuple[Any, ...]]:
    meaning = semantics(executor, family)
    out = []
    for schedule in candidates(executor, family, model):
        done = resolve(
            schedule,
            model,
            meaning.interval_form,
            interval_selects_ffn=meaning.interval_selects_ffn,
            trainer_ffn_scope=meaning.trainer_ffn_scope,
        )
        out.append((done.units, done.offloaded_attention))
    return out


@given(
    st.sampled_from(Executor),
    st.sampled_from(sorted(support._matrix())),
    st.integers(1, 60),
    st.booleans(),
    st.sampled_from([True, False, None]),
)
def test_no_two_candidates_do_the_same_to_a_model(
    executor: Executor, family: str, n: int, ffn: bool, linked: bool | None
) -> None:
    effects = _effects(executor, family, structure(n, ffn, linked))
    assert len(effects) == len(set(effects))


@given(st.sampled_from(Executor), st.sampled_from(sorted(support._matrix())), st.integers(1, 60), st.booleans())
def test_every_candidate_is_supported_and_runs_as_it_is_written(
    executor: Executor, family: str, n: int, ffn: bool
) -> None:
    model = structure(n, ffn)
    found = candidates(executor, family, model)
    assert found[0] == NONE
    for schedule in found:
        verdict = check(executor, family, model, schedule)
        assert (verdict.supported, verdict.effective, verdict.notes) == (True, schedule, ())


def test_whole_block_checkpointing_is_a_candidate_everywhere() -> None:
    for executor in Executor:
        for family in support._matrix():
            assert TORCH in candidates(executor, family, STRUCTURE)


@pytest.mark.parametrize(("family", "has"), [("flux", True), ("sd3", False), ("sdxl", False), ("wan", True)])
def test_feed_forward_candidates_appear_only_where_the_trainer_has_them(family: str, has: bool) -> None:
    found = candidates(Executor.SIMPLETUNER, family, STRUCTURE)
    assert (FFN in found) is has
    assert (Schedule(Backend.UNSLOTH_FFN) in found) is has


def test_candidates_come_in_the_ladders_order() -> None:
    order = [NONE, FFN, TORCH, Schedule(Backend.UNSLOTH_FFN), Schedule(Backend.UNSLOTH)]
    found = candidates(Executor.BUNDLED, "flux", STRUCTURE)
    assert [s for s in found if s in order] == order


# Export --------------------------------------------------------------------------------------------------------------


def _at_least(least: int) -> Any:
    return lambda v: type(v) is int and v >= least


TRAINER_KEYS = {
    # the trainer's option registry: type, choices and validation of every key that concerns checkpointing
    "gradient_checkpointing": lambda v: type(v) is bool,
    "gradient_checkpointing_backend": lambda v: v in ("torch", "torch-ffn", "unsloth", "unsloth-ffn"),
    "gradient_checkpointing_interval": _at_least(1),
    "gradient_checkpointing_segment_stride": _at_least(1),
    "gradient_checkpointing_offload_attention": lambda v: type(v) is bool,
    "gradient_checkpointing_offload_pin_memory_max_buckets": _at_least(0),
    "gradient_checkpointing_offload_prefetch": lambda v: type(v) is bool,
}


@pytest.mark.parametrize("family", FIVE)
def test_every_candidate_is_exported_in_the_trainers_own_keys_and_values(family: str) -> None:
    for schedule in candidates(Executor.SIMPLETUNER, family, STRUCTURE):
        exported = simpletuner(schedule)
        for key, value in exported.items():
            assert key in TRAINER_KEYS
            assert TRAINER_KEYS[key](value), (key, value)
        assert Schedule.from_controls(exported) == schedule


def test_every_control_that_the_advisor_reads_is_one_of_the_trainers() -> None:
    from estimators.schedule import KEYS

    assert set(TRAINER_KEYS) == KEYS
