"""A schedule's controls, and which checkpoint units they mean on a model's chains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.schedule import (
    KEYS,
    Action,
    Backend,
    IntervalForm,
    Schedule,
    ScheduleError,
    Unit,
    resolve,
)
from probes.structure import Block, Chain, Structure

CHECKPOINTING = [b for b in Backend if b is not Backend.NONE]
WHOLE = [Backend.TORCH, Backend.UNSLOTH]
FFN = [Backend.TORCH_FFN, Backend.UNSLOTH_FFN]


def chain(
    n: int,
    path: str = "blocks",
    *,
    linked: bool | None = True,
    groupable: bool = True,
    ffn: bool = True,
    start: str | None = None,
) -> Chain:
    blocks = tuple(
        Block(
            f"{path}.{i}", "Kind", ((f"{path}.{i}.ff",),) if ffn else (), (f"{path}.{i}.attn",), trainer_ffn_start=start
        )
        for i in range(n)
    )
    return Chain(path, blocks, linked, groupable)


def groups(
    schedule: Schedule, *chains: Chain, form: IntervalForm = IntervalForm.SEGMENTS, **options: bool
) -> list[list[str]]:
    """Modules of every unit, without the path of the first chain."""
    units = resolve(schedule, Structure(chains), form, **options).units
    return [[m.removeprefix("blocks.") for m in u.modules] for u in units]


def test_segments_of_lists_that_are_one_sequence_reach_from_one_into_the_next() -> None:
    lists = (chain(3, "a"), chain(1, "mid"), chain(3, "b"), chain(2, "alone", groupable=False))
    form = IntervalForm.SEGMENTS_OVERALL
    assert groups(Schedule(Backend.TORCH, 2), *lists, form=form) == [
        ["a.0", "a.1"],
        ["a.2", "mid.0"],
        ["b.0", "b.1"],
        ["b.2"],
        ["alone.0"],
        ["alone.1"],
    ]
    strided = groups(Schedule(Backend.TORCH, 2, 3), *lists, form=form)
    assert strided == [["a.0", "a.1"], ["mid.0", "b.0"], ["b.2"], ["alone.0"], ["alone.1"]]
    assert len(groups(Schedule(Backend.TORCH), *lists, form=form)) == 9


# Controls ------------------------------------------------------------------------------------------------------------


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    interval = draw(st.none() | st.integers(1, 9))
    stride = draw(st.none() | st.integers(interval or 1, 20))
    offload = draw(st.booleans())
    return Schedule(
        draw(st.sampled_from(Backend)),
        interval,
        stride,
        offload,
        draw(st.integers(0, 99)) if offload else 12,
        draw(st.booleans()) if offload else False,
    )


@given(schedules())
def test_controls_of_a_schedule_read_back_as_the_same_schedule(schedule: Schedule) -> None:
    controls = schedule.to_controls()
    assert Schedule.from_controls(controls) == schedule
    assert set(controls) <= KEYS
    assert None not in controls.values()


@pytest.mark.parametrize(
    ("schedule", "controls"),
    [
        (Schedule(), {"gradient_checkpointing": False}),
        (Schedule(Backend.TORCH), {"gradient_checkpointing": True, "gradient_checkpointing_backend": "torch"}),
        (
            Schedule(Backend.UNSLOTH_FFN, 2, 4),
            {
                "gradient_checkpointing": True,
                "gradient_checkpointing_backend": "unsloth-ffn",
                "gradient_checkpointing_interval": 2,
                "gradient_checkpointing_segment_stride": 4,
            },
        ),
        (
            Schedule(offload_attention=True, pin_memory_max_buckets=0, prefetch=True),
            {
                "gradient_checkpointing": False,
                "gradient_checkpointing_offload_attention": True,
                "gradient_checkpointing_offload_pin_memory_max_buckets": 0,
                "gradient_checkpointing_offload_prefetch": True,
            },
        ),
    ],
)
def test_controls_are_the_trainers_keys_without_those_at_their_default(
    schedule: Schedule, controls: dict[str, Any]
) -> None:
    assert schedule.to_controls() == controls


def test_the_backend_is_torch_when_checkpointing_is_on_and_none_is_named() -> None:
    assert Schedule.from_controls({"gradient_checkpointing": True}) == Schedule(Backend.TORCH)


@pytest.mark.parametrize(
    "controls", [{}, {"gradient_checkpointing": False, "gradient_checkpointing_backend": "unsloth"}]
)
def test_checkpointing_is_off_unless_it_is_switched_on(controls: dict[str, Any]) -> None:
    assert Schedule.from_controls(controls) == Schedule()


@pytest.mark.parametrize("value", [None, 1])
def test_an_interval_of_one_is_no_interval_and_drops_the_stride(value: int | None) -> None:
    assert Schedule(Backend.TORCH, value, 4) == Schedule(Backend.TORCH)


def test_interval_and_stride_mean_nothing_without_checkpointing() -> None:
    assert Schedule(Backend.NONE, 2, 4) == Schedule()


@pytest.mark.parametrize(
    ("controls", "message"),
    [
        ({"gradient_checkpointing_bakend": "torch"}, r"gradient_checkpointing_bakend.*valid: .*gradient_checkpointing_backend"),
        ({"gradient_checkpointing": "yes"}, r"gradient_checkpointing must be true or false, not 'yes'"),
        ({"gradient_checkpointing": 1}, r"must be true or false, not 1"),
        ({"gradient_checkpointing_backend": "deepspeed"}, r"'deepspeed' is unknown; valid: torch-ffn, torch, unsloth-ffn, unsloth"),
        ({"gradient_checkpointing_backend": "none"}, r"'none' is unknown"),
        ({"gradient_checkpointing_interval": 0}, r"interval must be at least 1, not 0"),
        ({"gradient_checkpointing_interval": -2}, r"interval must be at least 1, not -2"),
        ({"gradient_checkpointing_interval": 2.0}, r"interval must be an integer .*not 2\.0"),
        ({"gradient_checkpointing_interval": True}, r"interval must be an integer .*not True"),
        ({"gradient_checkpointing_interval": "2"}, r"interval must be an integer .*not '2'"),
        ({"gradient_checkpointing_interval": 4, "gradient_checkpointing_segment_stride": 3}, r"stride 3 is below the interval 4.*at least 4"),
        ({"gradient_checkpointing_segment_stride": 0}, r"stride must be at least 1, not 0"),
        ({"gradient_checkpointing_offload_attention": None}, r"offload_attention must be true or false"),
        ({"gradient_checkpointing_offload_prefetch": "on"}, r"prefetch must be true or false, not 'on'"),
        ({"gradient_checkpointing_offload_pin_memory_max_buckets": -1}, r"buckets must be at least 0, not -1"),
        ({"gradient_checkpointing_offload_pin_memory_max_buckets": 1.5}, r"buckets must be an integer"),
    ],
)  # fmt: skip
def test_a_bad_control_is_refused_with_its_key_and_what_is_valid(controls: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_controls({"gradient_checkpointing": True, **controls})


def test_names_tell_schedules_apart() -> None:
    assert [
        s.name
        for s in (
            Schedule(),
            Schedule(Backend.TORCH, 2, 4),
            Schedule(Backend.UNSLOTH, 3, offload_attention=True),
            Schedule.per_block(["keep", "recompute", "recompute-ffn"]),
        )
    ] == ["none", "torch interval=2 stride=4", "unsloth interval=3 offload-attention", "per block (2 of 3 recomputed)"]


# Segments ------------------------------------------------------------------------------------------------------------


def test_nothing_is_checkpointed_without_a_backend() -> None:
    resolution = resolve(Schedule(), Structure((chain(4),)))
    assert (resolution.units, resolution.recomputed_blocks) == ((), ())


@pytest.mark.parametrize("backend", WHOLE)
def test_without_an_interval_every_block_is_a_checkpoint_of_its_own(backend: Backend) -> None:
    assert groups(Schedule(backend), chain(3)) == [["0"], ["1"], ["2"]]


@pytest.mark.parametrize(
    ("n", "interval", "stride", "expected"),
    [
        (6, 2, None, [["0", "1"], ["2", "3"], ["4", "5"]]),
        (5, 2, None, [["0", "1"], ["2", "3"], ["4"]]),
        (8, 2, 4, [["0", "1"], ["4", "5"]]),
        (7, 2, 3, [["0", "1"], ["3", "4"], ["6"]]),
        (4, 2, 2, [["0", "1"], ["2", "3"]]),
        (3, 9, None, [["0", "1", "2"]]),
        (9, 2, 100, [["0", "1"]]),
        (1, 2, 4, [["0"]]),
    ],
)
def test_segments_start_a_stride_apart_and_the_last_may_be_shorter(
    n: int, interval: int, stride: int | None, expected: list[list[str]]
) -> None:
    assert groups(Schedule(Backend.TORCH, interval, stride), chain(n)) == expected


def test_each_chain_is_segmented_from_its_own_first_block() -> None:
    found = groups(Schedule(Backend.TORCH, 2), chain(3), chain(3, "single"))
    assert found == [["0", "1"], ["2"], ["single.0", "single.1"], ["single.2"]]


def test_blocks_of_an_unlinked_chain_are_checkpointed_one_by_one_and_the_gap_stays_free() -> None:
    resolution = resolve(Schedule(Backend.TORCH, 2, 4), Structure((chain(8, linked=False),)))
    assert [u.modules for u in resolution.units] == [(f"blocks.{i}",) for i in (0, 1, 4, 5)]
    assert any("not directly connected" in note for note in resolution.notes)


def test_a_chain_that_was_not_watched_yet_is_segmented() -> None:
    assert groups(Schedule(Backend.TORCH, 2), chain(4, linked=None)) == [["0", "1"], ["2", "3"]]


@pytest.mark.parametrize("form", IntervalForm)
@pytest.mark.parametrize("stride", [None, 4])
def test_every_block_of_an_ungroupable_chain_is_its_own_checkpoint(form: IntervalForm, stride: int | None) -> None:
    assert groups(Schedule(Backend.TORCH, 2, stride), chain(3, groupable=False), form=form) == [["0"], ["1"], ["2"]]


# Other meanings of an interval ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval", "stride", "expected"),
    [(2, None, "0 2 4 6"), (3, None, "0 3 6"), (2, 4, "0 1 4 5"), (2, 3, "0 1 3 4 6"), (2, 2, "0 1 2 3 4 5 6")],
)
def test_every_kth_takes_the_blocks_whose_index_is_a_multiple_or_lies_early_in_a_stride(
    interval: int, stride: int | None, expected: str
) -> None:
    found = groups(Schedule(Backend.TORCH, interval, stride), chain(7), form=IntervalForm.EVERY_KTH)
    assert found == [[i] for i in expected.split()]


def test_an_executor_that_ignores_the_interval_checkpoints_every_block_and_says_so() -> None:
    resolution = resolve(Schedule(Backend.TORCH, 2, 4), Structure((chain(3),)), IntervalForm.IGNORED)
    assert len(resolution.units) == 3
    assert any("ignores gradient_checkpointing_interval" in note for note in resolution.notes)


# Feed-forward sides --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", FFN)
def test_a_feed_forward_backend_checkpoints_only_the_feed_forward_sides(backend: Backend) -> None:
    assert groups(Schedule(backend), chain(2)) == [["0.ff"], ["1.ff"]]


def test_each_feed_forward_run_of_a_block_is_a_checkpoint_of_its_own() -> None:
    block = Block("blocks.0", "Kind", (("blocks.0.a", "blocks.0.b"), ("blocks.0.c",)))
    assert groups(Schedule(Backend.TORCH_FFN), Chain("blocks", (block,), True)) == [["0.a", "0.b"], ["0.c"]]


def test_blocks_without_a_feed_forward_side_keep_everything_and_are_counted_in_a_note() -> None:
    resolution = resolve(Schedule(Backend.TORCH_FFN), Structure((chain(1), chain(3, "single", ffn=False))))
    assert resolution.recomputed_blocks == ("blocks.0",)
    assert any("3 blocks (Kind) have no separate feed-forward side" in note for note in resolution.notes)


def test_with_a_feed_forward_backend_an_interval_chooses_blocks() -> None:
    assert groups(Schedule(Backend.TORCH_FFN, 2), chain(5)) == [["0.ff"], ["2.ff"], ["4.ff"]]
    assert groups(Schedule(Backend.TORCH_FFN, 2, 3), chain(5)) == [["0.ff"], ["1.ff"], ["3.ff"], ["4.ff"]]


def test_where_an_executor_ignores_the_interval_of_a_feed_forward_backend_every_block_is_taken_and_a_note_says_so() -> (
    None
):
    resolution = resolve(Schedule(Backend.TORCH_FFN, 2), Structure((chain(3),)), interval_selects_ffn=False)
    assert len(resolution.units) == 3
    assert any("interval is ignored with torch-ffn" in note for note in resolution.notes)


def test_the_trainers_feed_forward_scope_reaches_from_a_child_to_the_end_of_the_block() -> None:
    structure = Structure((chain(1, start="norm2"), chain(1, "other")))
    units = resolve(Schedule(Backend.UNSLOTH_FFN), structure, trainer_ffn_scope=True).units
    assert units == (Unit(("blocks.0",), True, "norm2"), Unit(("other.0.ff",), True))
    assert resolve(Schedule(Backend.UNSLOTH_FFN), structure).units[0] == Unit(("blocks.0.ff",), True)


# Offloading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", CHECKPOINTING)
def test_only_the_unsloth_backends_move_checkpoint_inputs_to_the_host(backend: Backend) -> None:
    units = resolve(Schedule(backend, 2), Structure((chain(4),))).units
    assert {u.offload_inputs for u in units} == {backend in (Backend.UNSLOTH, Backend.UNSLOTH_FFN)}


@pytest.mark.parametrize("backend", Backend)
def test_attention_offload_names_every_attention_whatever_is_recomputed(backend: Backend) -> None:
    structure = Structure((chain(2), chain(1, "single")))
    resolution = resolve(Schedule(backend, offload_attention=True), structure)
    assert resolution.offloaded_attention == ("blocks.0.attn", "blocks.1.attn", "single.0.attn")
    assert resolve(Schedule(backend), structure).offloaded_attention == ()


# One action a block --------------------------------------------------------------------------------------------------


def test_each_action_becomes_its_unit_in_call_order_over_all_chains() -> None:
    schedule = Schedule.per_block(["keep", "recompute", "recompute-ffn", "recompute+offload", "recompute-ffn+offload"])
    units = resolve(schedule, Structure((chain(2), chain(3, "single")))).units
    assert units == (
        Unit(("blocks.1",)),
        Unit(("single.0.ff",)),
        Unit(("single.1",), True),
        Unit(("single.2.ff",), True),
    )


@pytest.mark.parametrize("n", [0, 1, 3])
def test_a_per_block_schedule_needs_one_action_a_block(n: int) -> None:
    with pytest.raises(ScheduleError, match=f"each of the model's 2 blocks, got {n}"):
        resolve(Schedule.per_block(["keep"] * n), Structure((chain(2),)))


def test_a_feed_forward_action_for_a_block_without_that_side_is_refused_by_name() -> None:
    with pytest.raises(ScheduleError, match=r"blocks\.1 \(Kind\) has no separate feed-forward side"):
        resolve(Schedule.per_block(["keep", "recompute-ffn"]), Structure((chain(2, ffn=False),)))


def test_an_unknown_action_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(
        ScheduleError, match=r"'drop'.*valid actions: keep, recompute, recompute-ffn, recompute\+offload"
    ):
        Schedule.per_block(["keep", "drop"])


def test_a_per_block_schedule_has_no_trainer_controls() -> None:
    with pytest.raises(ScheduleError, match="per-block"):
        Schedule.per_block([Action.KEEP]).to_controls()


# Rules for any schedule and any model --------------------------------------------------------------------------------


@st.composite
def structures(draw: st.DrawFn) -> Structure:
    return Structure(
        tuple(
            chain(
                draw(st.integers(1, 12)),
                f"chain{i}",
                linked=draw(st.sampled_from([True, False, None])),
                groupable=draw(st.booleans()),
                ffn=draw(st.booleans()),
                start=draw(st.sampled_from([None, "norm2"])),
            )
            for i in range(draw(st.integers(1, 3)))
        )
    )


@given(schedules(), structures(), st.sampled_from(IntervalForm), st.booleans(), st.booleans())
def test_every_block_is_in_at_most_one_unit_and_units_follow_call_order(
    schedule: Schedule, structure: Structure, form: IntervalForm, selects: bool, scope: bool
) -> None:
    resolution = resolve(schedule, structure, form, interval_selects_ffn=selects, trainer_ffn_scope=scope)
    modules = [m for u in resolution.units for m in u.modules]
    assert len(modules) == len(set(modules))
    order = {b.name: i for i, b in enumerate(structure.blocks)}
    owners = [order[m.removesuffix(".ff")] for m in modules]
    if form is IntervalForm.SEGMENTS_OVERALL:  # a list that takes no part may lie between two blocks of one segment
        owners.sort()
    assert owners == sorted(set(owners))
    assert [order[b] for b in resolution.recomputed_blocks] == owners


@given(schedules(), structures(), st.sampled_from([f for f in IntervalForm if f is not IntervalForm.SEGMENTS_OVERALL]))
def test_units_never_span_two_chains_and_only_linked_groupable_chains_have_segments(
    schedule: Schedule, structure: Structure, form: IntervalForm
) -> None:
    chains = {c.path: c for c in structure.chains}
    for unit in resolve(schedule, structure, form).units:
        (path,) = {m.partition(".")[0] for m in unit.modules}
        indices = [int(m.split(".")[1]) for m in unit.modules]
        assert indices == list(range(indices[0], indices[0] + len(indices)))
        if len(indices) > 1:
            assert chains[path].linked is not False
            assert chains[path].groupable
            assert form is IntervalForm.SEGMENTS
            assert len(indices) <= (schedule.interval or 1)


def _count(n: int, k: int | None, s: int | None, form: IntervalForm) -> int:
    """Recomputed blocks of one groupable chain, from the documented rules."""
    if k is None or form is IntervalForm.IGNORED:
        return n
    if s is not None:
        return n // s * k + min(n % s, k)
    return n if form in (IntervalForm.SEGMENTS, IntervalForm.SEGMENTS_OVERALL) else math.ceil(n / k)


@given(schedules(), st.integers(1, 40), st.sampled_from(IntervalForm))
def test_how_many_blocks_are_recomputed(schedule: Schedule, n: int, form: IntervalForm) -> None:
    resolution = resolve(schedule, Structure((chain(n),)), form)
    if schedule.backend is Backend.NONE:
        expected = 0
    elif schedule.backend.feed_forward_only:
        expected = _count(n, schedule.interval, schedule.stride, IntervalForm.EVERY_KTH)
    else:
        expected = _count(n, schedule.interval, schedule.stride, form)
    assert len(resolution.recomputed_blocks) == expected


@given(schedules(), st.integers(1, 40))
def test_both_meanings_of_interval_and_stride_recompute_the_same_blocks(schedule: Schedule, n: int) -> None:
    if schedule.stride is None:
        return
    structure = Structure((chain(n),))
    found: list[Sequence[str]] = [
        resolve(schedule, structure, form).recomputed_blocks for form in (IntervalForm.SEGMENTS, IntervalForm.EVERY_KTH)
    ]
    assert found[0] == found[1]


@given(st.lists(st.sampled_from(Action), min_size=1, max_size=12))
def test_a_per_block_schedule_recomputes_exactly_the_blocks_that_it_does_not_keep(actions: list[Action]) -> None:
    structure = Structure((chain(len(actions)),))
    resolution = resolve(Schedule.per_block(actions), structure)
    recomputed = [(i, a) for i, a in enumerate(actions) if a.value.startswith("recompute")]
    assert list(resolution.recomputed_blocks) == [f"blocks.{i}" for i, _ in recomputed]
    assert [u.offload_inputs for u in resolution.units] == ["offload" in a.value.split("+") for _, a in recomputed]
    attending = [i for i, a in enumerate(actions) if a.value.endswith("offload-attention")]
    assert list(resolution.offloaded_attention) == [f"blocks.{i}.attn" for i in attending]
    assert list(resolution.attention_blocks) == [f"blocks.{i}" for i in attending]
