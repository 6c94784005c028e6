"""Every schedule on small copies of the real classes with LoRA and dropout: losses and gradients bit for bit, and counters
that prove that the schedule was executed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from runtime_models import REAL, Case, Result, assert_same, step

from advisor.runtime import apply, remove
from estimators.schedule import Action, Backend, Schedule, resolve
from probes.discover import discover
from probes.structure import Structure


def _mixed(structure: Structure) -> Schedule:
    """All actions in turn; a block that lacks a part takes the next action that suits it."""
    turn = itertools.cycle(Action)
    return Schedule.per_block([next(a for a in turn if a.suits(b)) for b in structure.blocks])


SCHEDULES: dict[str, Callable[[Structure], Schedule]] = {
    "none": lambda _: Schedule(),
    "torch": lambda _: Schedule(Backend.TORCH),
    "torch-ffn": lambda _: Schedule(Backend.TORCH_FFN),
    "torch-interval2": lambda _: Schedule(Backend.TORCH, 2),
    "torch-interval2-stride4": lambda _: Schedule(Backend.TORCH, 2, 4),
    "torch-interval3": lambda _: Schedule(Backend.TORCH, 3),
    "torch-interval99": lambda _: Schedule(Backend.TORCH, 99),
    "torch-ffn-interval2": lambda _: Schedule(Backend.TORCH_FFN, 2),
    "unsloth": lambda _: Schedule(Backend.UNSLOTH),
    "unsloth-ffn": lambda _: Schedule(Backend.UNSLOTH_FFN),
    "unsloth-interval3": lambda _: Schedule(Backend.UNSLOTH, 3),
    "none+attention": lambda _: Schedule(offload_attention=True),
    "torch+attention": lambda _: Schedule(Backend.TORCH, offload_attention=True),
    "torch-interval2-stride4+attention": lambda _: Schedule(Backend.TORCH, 2, 4, offload_attention=True),
    "torch-interval3+attention": lambda _: Schedule(Backend.TORCH, 3, offload_attention=True),
    "torch-ffn+attention": lambda _: Schedule(Backend.TORCH_FFN, offload_attention=True),
    "unsloth-interval2+attention": lambda _: Schedule(Backend.UNSLOTH, 2, offload_attention=True),
    "unsloth-ffn+attention": lambda _: Schedule(Backend.UNSLOTH_FFN, offload_attention=True),
    "mixed": _mixed,
}


@cache
def _case(name: str) -> Case:
    torch.manual_seed(0)
    return REAL[name]()


@cache
def _plain(name: str, autocast: bool) -> Result:
    case = _case(name)
    remove(case.model)
    return step(case.model, case.inputs(case.size), autocast)


@pytest.fixture(params=REAL)
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param
    remove(_case(request.param).model)


def _check(name: str, schedule_name: str, autocast: bool) -> None:
    case, plain = _case(name), _plain(name, autocast)
    structure = discover(case.model)
    schedule = SCHEDULES[schedule_name](structure)
    resolution = resolve(schedule, structure)
    units = resolution.units
    with apply(case.model, schedule) as handle:
        assert_same(step(case.model, case.inputs(case.size), autocast), plain)
    counters = handle.counters
    assert counters.checkpoint_calls == counters.units_recomputed == len(units)
    assert counters.blocks_checkpointed == counters.blocks_recomputed == sum(len(u.modules) for u in units)
    attention = resolution.offloaded_attention
    assert (counters.bytes_offloaded > 0) == (any(u.offload_inputs for u in units) or bool(attention))
    assert counters.attention_calls == len(attention)
    whole = {name for u in units for name in u.modules if name in {b.name for b in structure.blocks}}
    assert counters.attention_skipped == sum(any(a.startswith(f"{name}.") for name in whole) for a in attention)
    assert counters.bytes_fetched == counters.bytes_offloaded
    assert counters.host_bytes == 0
    assert not any("of its own:" in note for note in handle.notes)


@pytest.mark.parametrize("schedule_name", SCHEDULES)
def test_a_schedule_changes_no_bit_of_loss_and_gradients(name: str, schedule_name: str) -> None:
    """Fault classes 1, 4, 6, 11, 13."""
    _check(name, schedule_name, autocast=False)


@pytest.mark.parametrize("schedule_name", ["torch", "torch-ffn", "torch-interval3", "unsloth", "mixed"])
def test_a_schedule_changes_no_bit_under_autocast(name: str, schedule_name: str) -> None:
    """Fault class 7."""
    _check(name, schedule_name, autocast=True)


def test_two_shapes_can_alternate(name: str) -> None:
    """Fault class 31."""
    case = _case(name)
    plain = {case.size: _plain(name, autocast=False), case.size + 2: step(case.model, case.inputs(case.size + 2))}
    with apply(case.model, Schedule(Backend.UNSLOTH, 2)):
        for n in (case.size, case.size + 2, case.size):
            assert_same(step(case.model, case.inputs(n)), plain[n])


def test_the_modules_are_as_before_after_remove(name: str) -> None:
    model = _case(name).model
    before = {n: dict(m.__dict__) for n, m in model.named_modules()}
    keys = list(model.state_dict())
    apply(model, Schedule(Backend.TORCH, 2))
    assert list(model.state_dict()) == keys
    remove(model)
    assert {n: dict(m.__dict__) for n, m in model.named_modules()} == before
