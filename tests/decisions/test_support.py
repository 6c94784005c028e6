"""What each executor does with each control."""

from __future__ import annotations

import csv
import fnmatch
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.exporters import simpletuner
from advisor.published import estimates, rows
from decision_rules import support
from decision_rules.support import (
    Executor,
    Ffn,
    as_run,
    candidates,
    check,
    job_semantics,
    semantics,
    smaller_weights,
    trainer_support,
    training_mode_note,
    weights_note,
    weights_refused,
)
from estimators.estimate import GIB
from estimators.schedule import Action, Backend, IntervalForm, Schedule, resolve
from probes import catalogue, resources
from probes.structure import Block, Chain, Structure
from probes.workload import from_request

NONE, TORCH, FFN = Schedule(), Schedule(Backend.TORCH), Schedule(Backend.TORCH_FFN)
FIVE = ("flux", "sd3", "sdxl", "wan", "z_image")
FAMILIES = sorted({row.family for row in support._matrix()})


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


@pytest.mark.parametrize(
    ("family", "variant", "effective"),
    [
        ("flux", None, Schedule(Backend.TORCH, 2)),
        ("flux2", None, TORCH),
        ("sd3", None, Schedule(Backend.TORCH, 2, 4)),
        ("qwen_image", "v2.1", Schedule(Backend.TORCH, 2, 4)),
    ],
)
def test_swapped_blocks_end_the_trainer_s_segments(family: str, variant: str | None, effective: Schedule) -> None:
    verdict = check(Executor.SIMPLETUNER, family, STRUCTURE, Schedule(Backend.TORCH, 2, 4), variant, swapped=True)
    assert verdict.effective == effective
    assert "makes no segments" in verdict.notes[0]
    assert semantics(Executor.SIMPLETUNER, family, variant, swapped=True).interval_form is IntervalForm.EVERY_KTH
    assert semantics(Executor.SIMPLETUNER, family, variant).interval_form is IntervalForm.SEGMENTS


def test_hunyuanvideo_keeps_its_segments_with_swapped_blocks() -> None:
    schedule = Schedule(Backend.TORCH, 2, 4)
    verdict = check(Executor.SIMPLETUNER, "hunyuanvideo", STRUCTURE, schedule, swapped=True)
    assert (verdict.effective, verdict.notes) == (schedule, ())
    assert semantics(Executor.SIMPLETUNER, "hunyuanvideo", swapped=True).interval_form is IntervalForm.SEGMENTS


def test_our_runtime_has_either_swapped_blocks_or_attention_offload() -> None:
    schedule = Schedule(Backend.TORCH, offload_attention=True)
    assert check(Executor.BUNDLED, "flux", STRUCTURE, schedule).supported
    assert "leave one of them off" in str(check(Executor.BUNDLED, "flux", STRUCTURE, schedule, swapped=True).reason)


def test_diffusers_swaps_no_blocks() -> None:
    assert weights_refused(Executor.BUNDLED, "blocks:4") is None
    assert "--executor simpletuner or bundled does" in str(weights_refused(Executor.DIFFUSERS, "blocks:4"))


def test_blocks_of_a_quantised_base_are_swapped_by_the_trainer_alone() -> None:
    assert weights_refused(Executor.SIMPLETUNER, "blocks:4", "int8-sdnq") is None
    refused = str(weights_refused(Executor.BUNDLED, "blocks:4", "int8-sdnq"))
    assert "--precision bf16 or --executor simpletuner does" in refused
    assert weights_refused(Executor.SIMPLETUNER, "ramtorch", "int8-sdnq") is None


def test_ramtorch_is_the_trainers_and_a_plan_for_our_runtime_says_so() -> None:
    streamed = from_request({"model": "sd3", "weights_offload": "ramtorch:50"})
    assert str(weights_refused(Executor.DIFFUSERS, "ramtorch:50")).endswith("--executor simpletuner does")
    assert "blocks:N is what they do" in str(weights_note(Executor.BUNDLED, streamed))
    assert weights_note(Executor.SIMPLETUNER, streamed) is None
    assert weights_note(Executor.BUNDLED, from_request({"model": "sd3", "weights_offload": "blocks:3"})) is None


def test_checkpointing_that_needs_training_mode_is_doubted_for_lycoris_in_the_trainer() -> None:
    lokr = from_request({"model": "sana", "adapter": "lokr"})
    assert "training mode only" in str(training_mode_note(Executor.SIMPLETUNER, lokr))
    assert training_mode_note(Executor.BUNDLED, lokr) is None
    assert training_mode_note(Executor.SIMPLETUNER, from_request({"model": "sana"})) is None
    assert training_mode_note(Executor.SIMPLETUNER, from_request({"model": "pixart", "adapter": "lokr"})) is None


@pytest.mark.parametrize(
    ("executor", "job", "named", "not_named"),
    [
        (Executor.SIMPLETUNER, {}, ("int8-torchao", "ramtorch or blocks:N"), ()),
        (Executor.BUNDLED, {}, ("int8-torchao", "--weights-offload blocks:N"), ("ramtorch",)),
        (Executor.DIFFUSERS, {}, ("int8-torchao",), ("offload",)),
        (Executor.SIMPLETUNER, {"precision": "nf4"}, ("--weights-offload ramtorch or blocks:N",), ("int8",)),
        (Executor.BUNDLED, {"weights_offload": "blocks:2"}, ("int8-torchao",), ("offload",)),
        (Executor.BUNDLED, {"precision": "nf4"}, ("a card with more memory",), ("--",)),
        (Executor.SIMPLETUNER, {"adapter": "full"}, ("--adapter lora",), ("int8", "offload")),
    ],
)
def test_only_what_the_executor_does_and_the_job_may_have_makes_its_weights_smaller(
    executor: Executor, job: dict[str, Any], named: tuple[str, ...], not_named: tuple[str, ...]
) -> None:
    text = smaller_weights(executor, from_request({"model": "sd3", **job}))
    assert all(word in text for word in named)
    assert not any(word in text for word in not_named)


def test_the_trainer_s_keys_say_where_the_weights_wait() -> None:
    assert simpletuner(NONE, "blocks:7") == {"gradient_checkpointing": False, "musubi_blocks_to_swap": 7}
    assert simpletuner(NONE, "ramtorch") == {"gradient_checkpointing": False, "ramtorch": True}
    part = {"gradient_checkpointing": False, "ramtorch": True, "ramtorch_transformer_percent": 75}
    assert simpletuner(NONE, "ramtorch:75") == part


def test_a_supported_interval_runs_as_it_is_without_a_note() -> None:
    schedule = Schedule(Backend.TORCH, 2, 4)
    verdict = check(Executor.SIMPLETUNER, "sd3", STRUCTURE, schedule)
    assert (verdict.supported, verdict.effective, verdict.notes) == (True, schedule, ())


@pytest.mark.parametrize("backend", [Backend.TORCH_FFN, Backend.UNSLOTH_FFN])
@pytest.mark.parametrize("family", ["sd3", "sdxl", "pixart"])
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


def test_a_trainers_lists_that_are_one_sequence_are_segmented_as_one() -> None:
    assert semantics(Executor.SIMPLETUNER, "zlab_i1").interval_form is IntervalForm.SEGMENTS_OVERALL
    assert semantics(Executor.SIMPLETUNER, "hidream").interval_form is IntervalForm.EVERY_KTH_OVERALL


def test_every_family_of_the_matrix_has_a_known_meaning() -> None:
    matrix = support._matrix()
    assert len(matrix) > 40
    for row in matrix:
        assert row.unsloth in ("yes", "ignored") or row.unsloth.startswith("only with interval"), row.family
        assert row.interval or row.interval_form is IntervalForm.IGNORED, row.family
        assert trainer_support(row.family, row.variant.replace("*", "base") or None) is row
        segments = row.interval_form in (IntervalForm.SEGMENTS, IntervalForm.SEGMENTS_OVERALL)
        assert bool(row.per_block_when) == bool(row.per_block_loop) == segments, row.family
        assert bool(row.ffn_scope) <= (row.ffn is not Ffn.NO), row.family
        assert bool(row.offload_scope) == row.attention_offload or row.family == "infinitetalk"


def test_every_row_is_of_a_variant_that_exists() -> None:
    for row in support._matrix():
        if row.variant:
            assert fnmatch.filter(catalogue.find(row.family).variants, row.variant), row


def test_variants_of_one_family_may_have_rows_of_their_own() -> None:
    first, second = (trainer_support("qwen_image", v) for v in ("edit-v1", "v2.1"))
    assert (first.form, second.form) == (IntervalForm.EVERY_KTH, IntervalForm.SEGMENTS)
    assert semantics(Executor.SIMPLETUNER, "qwen_image", "v2.1").interval_form is IntervalForm.SEGMENTS
    assert trainer_support("qwen_image") == first


def test_controls_that_a_loader_does_not_pass_on_are_named() -> None:
    verdict = check(Executor.SIMPLETUNER, "ace_step", STRUCTURE, Schedule(Backend.TORCH, 2), "v15-base")
    assert verdict.effective == TORCH
    assert verdict.notes == (
        "SimpleTuner does not pass the interval on to ace_step: this runs as torch on every block",
    )


def test_a_family_without_checkpointing_code_cannot_be_checkpointed() -> None:
    verdict = check(Executor.SIMPLETUNER, "heartmula", STRUCTURE, TORCH)
    assert not verdict.supported
    assert "no checkpointing for heartmula" in str(verdict.reason)
    assert candidates(Executor.SIMPLETUNER, "heartmula", STRUCTURE) == [NONE]


def test_chromas_torch_ffn_stops_and_its_unsloth_ffn_runs() -> None:
    assert "stops with an error" in str(check(Executor.SIMPLETUNER, "chroma", STRUCTURE, FFN).reason)
    schedule = Schedule(Backend.UNSLOTH_FFN, 2, 4)
    assert check(Executor.SIMPLETUNER, "chroma", STRUCTURE, schedule).effective == schedule


def test_krea2_runs_a_feed_forward_backend_with_an_interval_on_whole_blocks() -> None:
    assert not check(Executor.SIMPLETUNER, "krea2", STRUCTURE, FFN).supported
    verdict = check(Executor.SIMPLETUNER, "krea2", STRUCTURE, Schedule(Backend.UNSLOTH_FFN, 2, 4))
    assert verdict.effective == Schedule(Backend.UNSLOTH, 2, 4)
    assert "whole blocks" in verdict.notes[0]


@pytest.mark.parametrize("family", ["wan", "z_image", "ltxvideo2", "mageflow"])
def test_an_interval_does_nothing_with_a_feed_forward_backend_where_every_block_gets_it(family: str) -> None:
    verdict = check(Executor.SIMPLETUNER, family, STRUCTURE, Schedule(Backend.TORCH_FFN, 2))
    assert verdict.effective == FFN
    assert "ignores the interval" in verdict.notes[0]


def test_flux_ignores_the_stride_with_a_feed_forward_backend_and_minimax_does_not() -> None:
    strided = Schedule(Backend.TORCH_FFN, 2, 4)
    assert check(Executor.SIMPLETUNER, "flux", STRUCTURE, strided).effective == Schedule(Backend.TORCH_FFN, 2)
    assert check(Executor.SIMPLETUNER, "minimaxh3", STRUCTURE, strided).effective == strided


def test_blocks_are_counted_on_over_the_lists_where_the_trainer_does_so() -> None:
    def chain(path: str, n: int) -> Chain:
        return Chain(path, tuple(Block(f"{path}.{i}", "Kind") for i in range(n)), True)

    model = Structure((chain("text", 2), chain("visual", 6)))

    def recomputed(family: str, schedule: Schedule) -> tuple[str, ...]:
        meaning = semantics(Executor.SIMPLETUNER, family)
        done = resolve(schedule, model, meaning.interval_form)
        return done.recomputed_blocks

    assert recomputed("kandinsky5_video", Schedule(Backend.TORCH, 3)) == ("text.0", "visual.1", "visual.4")
    assert recomputed("auraflow", Schedule(Backend.TORCH, 3)) == ("text.0", "visual.0", "visual.3")
    assert recomputed("hidream", Schedule(Backend.TORCH, 1, 2)) == tuple(b.name for b in model.blocks)
    assert recomputed("hidream", Schedule(Backend.TORCH, 2, 3)) == (
        "text.0", "text.1", "visual.1", "visual.2", "visual.4", "visual.5",
    )  # fmt: skip


def test_an_offload_of_the_kernel_alone_says_that_the_estimate_moves_more() -> None:
    verdict = check(Executor.SIMPLETUNER, "flux2", STRUCTURE, Schedule(offload_attention=True))
    assert "only what the attention kernel saves" in verdict.notes[0]
    assert check(Executor.SIMPLETUNER, "flux", STRUCTURE, Schedule(offload_attention=True)).notes == ()


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
    st.sampled_from(FAMILIES),
    st.integers(1, 60),
    st.booleans(),
    st.sampled_from([True, False, None]),
)
def test_no_two_candidates_do_the_same_to_a_model(
    executor: Executor, family: str, n: int, ffn: bool, linked: bool | None
) -> None:
    effects = _effects(executor, family, structure(n, ffn, linked))
    assert len(effects) == len(set(effects))


@given(st.sampled_from(Executor), st.sampled_from(FAMILIES), st.integers(1, 60), st.booleans())
def test_every_candidate_is_supported_and_runs_as_it_is_written(
    executor: Executor, family: str, n: int, ffn: bool
) -> None:
    model = structure(n, ffn)
    found = candidates(executor, family, model)
    assert found[0] == NONE
    for schedule in found:
        verdict = check(executor, family, model, schedule)
        assert (verdict.supported, verdict.effective) == (True, schedule)
        assert schedule.offload_attention or verdict.notes == ()


def test_whole_block_checkpointing_is_a_candidate_wherever_there_is_code_for_it() -> None:
    for executor in Executor:
        for family in FAMILIES:
            row = trainer_support(family)
            there = {Executor.SIMPLETUNER: row.checkpoints, Executor.DIFFUSERS: row.diffusers}.get(executor, True)
            assert (TORCH in candidates(executor, family, STRUCTURE)) is there


def test_diffusers_has_no_class_for_the_models_that_the_project_defines_itself() -> None:
    variants = [(n, v, f.of(v)) for n, f in catalogue.families().items() for v in f.variants]
    own = {(n, v) for n, v, f in variants if f.model_class.startswith("probes.models") and n != "anima"}
    # anima's core is a class of diffusers
    assert {(n, v) for n, v, _ in variants if not trainer_support(n, v).diffusers} == own
    verdict = check(Executor.DIFFUSERS, "mageflow", STRUCTURE, TORCH)
    assert verdict.reason == "diffusers has no model class for mageflow; --executor bundled runs this"


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


# regional compile ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule",
    [
        FFN,
        Schedule(offload_attention=True),
        Schedule.per_block([Action("keep+offload-attention")] * len(STRUCTURE.blocks)),
        Schedule.per_block([Action("recompute-ffn")] * len(STRUCTURE.blocks)),
    ],
    ids=lambda s: s.name,
)
def test_the_bundled_runtime_does_not_reach_into_compiled_blocks(schedule: Schedule) -> None:
    verdict = check(Executor.BUNDLED, "flux", STRUCTURE, schedule, compiled=True)
    assert not verdict.supported
    assert "--compile none" in str(verdict.reason)
    assert check(Executor.BUNDLED, "flux", STRUCTURE, schedule).supported


def test_whole_compiled_blocks_are_checkpointed_by_the_bundled_runtime() -> None:
    found = candidates(Executor.BUNDLED, "flux", STRUCTURE, compiled=True)
    assert NONE in found
    assert {s.backend for s in found} == {Backend.NONE, Backend.TORCH, Backend.UNSLOTH}
    assert not any(s.offload_attention for s in found)


def test_compile_works_where_the_executor_does_it() -> None:
    compiled = from_request({"model": "krea2", "compile": "regional"})
    assert job_semantics(Executor.BUNDLED, compiled).compile_works
    assert not job_semantics(Executor.SIMPLETUNER, compiled).compile_works
    assert job_semantics(Executor.SIMPLETUNER, from_request({"model": "krea2"})).compile_works


def test_in_simpletuner_compile_takes_checkpointing_away_and_leaves_attention_offload() -> None:
    verdict = check(
        Executor.SIMPLETUNER, "flux", STRUCTURE, Schedule(Backend.TORCH, 2, offload_attention=True), compiled=True
    )
    assert verdict.effective == Schedule(offload_attention=True)
    assert "without checkpointing" in verdict.notes[-1]
    assert "eager" in check(Executor.SIMPLETUNER, "flux", STRUCTURE, NONE, compiled=True).notes[-1]
    found = candidates(Executor.SIMPLETUNER, "flux", STRUCTURE, compiled=True)
    assert found == [NONE, Schedule(offload_attention=True)]


def test_only_simpletuners_step_is_traced_without_compile() -> None:
    asked = from_request({"model": "flux", "compile": "regional"})
    assert as_run(Executor.SIMPLETUNER, asked) == from_request({"model": "flux"})
    assert as_run(Executor.BUNDLED, asked) == as_run(Executor.DIFFUSERS, asked) == asked


def test_hooks_around_norm_modulation_and_attention_are_known() -> None:
    assert semantics(Executor.SIMPLETUNER, "krea2").attention_from_block
    assert not semantics(Executor.SIMPLETUNER, "flux").attention_from_block
    assert not semantics(Executor.BUNDLED, "krea2").attention_from_block


def test_published_peaks_with_regional_compile_are_those_of_eager_training_without_checkpointing() -> None:
    wanted = {r.id: r for r in rows() if r.request.get("compile") == "regional"}
    peaks = {r["id"]: r["peak_vram_gib"] for r in csv.DictReader(resources.text("measured.csv").splitlines())}
    answered, _ = estimates([*wanted.values()])
    assert len(answered) == len(wanted) == 36
    seen = [(a.estimate.peak / GIB, float(peaks[a.row.id])) for a in answered if peaks[a.row.id]]
    assert len(seen) == 32
    assert all(predicted == pytest.approx(measured, rel=0.015) for predicted, measured in seen)
    out = [a for a in answered if not peaks[a.row.id]]
    assert all(a.row.out_of_memory and not a.estimate.fits for a in out)
