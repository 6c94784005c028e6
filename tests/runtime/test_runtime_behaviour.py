"""How the runtime behaves around a model: arguments of every kind, broken chains, errors, copies, removal, lifetimes."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import pickle
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from runtime_models import Block, Stack, assert_same, loss_of, result_of, step, tensor, with_lora
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import advisor.runtime.units
from advisor.runtime import Handle, RuntimeRefused, apply, remove
from estimators.schedule import Backend, Schedule, ScheduleError
from probes.discover import discover
from probes.structure import Block as BlockName
from probes.structure import Chain, Structure

NONE, TORCH, UNSLOTH = Schedule(), Schedule(Backend.TORCH), Schedule(Backend.UNSLOTH)
PAIRS, THREES, UNSLOTH_PAIRS = Schedule(Backend.TORCH, 2), Schedule(Backend.TORCH, 3), Schedule(Backend.UNSLOTH, 2)
EVERY = pytest.mark.parametrize("schedule", [TORCH, PAIRS, THREES, UNSLOTH, UNSLOTH_PAIRS], ids=lambda s: s.name)
X = {"x": tensor(3, 8)}


def _blocks(model: nn.Module) -> list[Any]:
    return list(model.get_submodule("blocks"))


def _own(handle: Handle) -> list[str]:
    """Blocks that were found to need a checkpoint of their own."""
    return [note.split()[0] for note in handle.notes if "of its own:" in note]


# --- scope: what runs when -------------------------------------------------------------------------------------------


def test_without_gradients_nothing_is_checkpointed() -> None:
    """Fault class 12."""
    model = Stack()
    with apply(model, PAIRS) as handle:
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                model(**X)
        assert handle.counters == type(handle.counters)()


def test_eval_mode_with_gradients_is_checkpointed() -> None:
    """Fault class 12."""
    model = Stack().eval()
    plain = step(model, X)
    with apply(model, PAIRS) as handle:
        assert_same(step(model, X), plain)
    assert handle.counters.units_recomputed == 2


@pytest.mark.parametrize(
    ("interval", "stride", "covered"),
    [
        (2, None, "aabbccd"),
        (3, None, "aaabbbc"),
        (2, 3, "aa.bb.c"),
        (2, 4, "aa..bb."),
        (3, 5, "aaa..bb"),
        (9, None, "a" * 7),
    ],
)
def test_an_interval_groups_and_a_stride_leaves_gaps(interval: int, stride: int | None, covered: str) -> None:
    """Fault class 13."""
    model = Stack(7)
    plain = step(model, X)
    with apply(model, Schedule(Backend.TORCH, interval, stride)) as handle:
        assert_same(step(model, X), plain)
        groups = [[int(m.name.split(".")[1]) for m in unit.members] for unit in handle.units]
    want: dict[str, list[int]] = {}
    for i, letter in enumerate(covered):
        want.setdefault(letter, []).append(i)
    want.pop(".", None)
    assert groups == list(want.values())
    assert handle.counters.checkpoint_calls == len(groups)
    assert handle.counters.blocks_recomputed == sum(map(len, groups))


def test_checkpoints_are_never_reentrant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault class 3."""
    seen: list[Any] = []

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["use_reentrant"])
        return real(*args, **kwargs)

    real = advisor.runtime.units.checkpoint
    monkeypatch.setattr(advisor.runtime.units, "checkpoint", spy)
    with apply(model := Stack(), PAIRS):
        step(model, X)
    assert seen == [False, False]


def test_a_per_block_schedule_does_what_it_says_to_each_block() -> None:
    model = Stack(5)
    plain = step(model, X)
    actions = ["keep", "recompute", "recompute-ffn", "recompute+offload", "recompute-ffn+offload"]
    with apply(model, Schedule.per_block(actions)) as handle:
        assert_same(step(model, X), plain)
    assert [(u.members[0].name, u.engine is not None) for u in handle.units] == [
        ("blocks.1", False),
        ("blocks.2.ff", False),
        ("blocks.3", True),
        ("blocks.4.ff", True),
    ]
    assert handle.counters.tensors_offloaded == 2


def test_a_feed_forward_run_of_two_submodules_is_one_checkpoint() -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attn = nn.LayerNorm(8), nn.Linear(8, 8)
            self.proj_mlp, self.act_mlp = nn.Linear(8, 16), nn.GELU()
            self.proj_out = nn.Linear(24, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n = self.norm(x)
            mlp = self.act_mlp(self.proj_mlp(n))
            return x + self.proj_out(torch.cat([self.attn(n), mlp], -1))

    model = Stack(3, Single)
    plain = step(model, X)
    with apply(model, Schedule(Backend.TORCH_FFN)) as handle:
        assert_same(step(model, X), plain)
    assert handle.counters.checkpoint_calls == handle.counters.units_recomputed == 3
    assert handle.counters.blocks_recomputed == 6


# --- arguments of every kind -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Conditions:
    shift: torch.Tensor
    scale: float
    nested: dict[str, tuple[torch.Tensor, ...]]
    name: str = "conditions"


class Rich(nn.Module):
    """Keywords only; tensors in tuples, dictionaries and dataclasses; a callable; a dataclass as its result."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn, self.ff = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(
        self, *, state: Any, rope: tuple[torch.Tensor, Any], conditions: Conditions, act: Any, flag: bool, none: None
    ) -> Any:
        h = state["sample"] if isinstance(state, dict) else state.sample
        cos, (sin,) = rope
        h = h * cos + self.attn(self.norm(h)) * sin
        h = h + act(self.ff(h)) * conditions.scale + conditions.shift + conditions.nested["a"][1]
        assert flag
        assert none is None
        assert conditions.name == "conditions"
        return Transformer2DModelOutput(sample=h)


class RichModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Rich() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        derived = self.table(x)
        conditions = Conditions(derived * 0.5, 0.3, {"a": (x, derived.sin())})
        rope, state = (derived.cos(), [x.sin()]), Transformer2DModelOutput(sample=derived)
        for block in self.blocks:
            state = block(state=state, rope=rope, conditions=conditions, act=torch.tanh, flag=True, none=None)
        return state.sample


@EVERY
def test_tensors_anywhere_in_keywords_get_their_gradients(schedule: Schedule) -> None:
    """Fault classes 4, 5."""
    model = RichModel()
    plain = step(model, X)
    with apply(model, schedule) as handle:
        assert_same(step(model, X), plain)
    assert not _own(handle)
    # every unit's state; once, what all take: cos, shift and one nested tensor have a history; x and sin(x) have none
    assert handle.counters.tensors_offloaded == (len(handle.units) + 3 if schedule.backend is Backend.UNSLOTH else 0)


@EVERY
def test_a_frozen_input_does_not_cut_the_graph(schedule: Schedule) -> None:
    """Fault class 1."""
    model = with_lora(Stack(), ["attn", "ff.0"])
    plain = step(model, X)
    with apply(model, schedule):
        assert_same(step(model, X), plain)


@EVERY
def test_blocks_without_anything_trainable_pass_gradients_on(schedule: Schedule) -> None:
    """Fault class 2."""
    model = Stack(6)
    for i in (0, 2, 3, 5):
        model.blocks[i].requires_grad_(False)
    plain = step(model, X)
    model.embed.requires_grad_(False)
    frozen_start = step(model, X)
    assert "blocks.1.attn.weight" in frozen_start.grads
    with apply(model, schedule):
        assert_same(step(model, X), frozen_start)
        model.embed.requires_grad_(True)
        assert_same(step(model, X), plain)


@EVERY
def test_a_per_step_tensor_with_gradient_collects_it_over_all_blocks(schedule: Schedule) -> None:
    """Fault classes 4, 5."""
    model = Stack()
    temb = tensor(3, 8, seed=2)
    grads = []
    for s in (NONE, schedule):
        leaf = temb.clone().requires_grad_()
        with apply(model, s):
            step(model, {**X, "temb": leaf.sin()})
        grads.append(leaf.grad)
    assert torch.equal(*grads)


@EVERY
def test_tensors_made_in_inference_mode_can_be_arguments(schedule: Schedule) -> None:
    """Fault class 10: such a tensor cannot be saved for backward, so it must not become a checkpoint input."""

    class Adds(Block):
        def forward(self, x: torch.Tensor, temb: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x + temb)

    model = Stack(4, Adds)
    with torch.inference_mode():
        inputs = {**X, "temb": tensor(3, 8, seed=2)}
    plain = step(model, inputs)
    with apply(model, schedule) as handle:
        assert_same(step(model, inputs), plain)
    assert not _own(handle)


def test_the_block_sees_the_callers_own_containers() -> None:
    class Writes(Block):
        def forward(self, x: torch.Tensor, log: Any = None) -> torch.Tensor:  # type: ignore[override]
            log.append(x.shape)
            return super().forward(x)

    model, log = Stack(2, Writes), []
    with apply(model, TORCH):
        model(**X, log=log)
    assert len(log) == 2


# --- random state and autocast ---------------------------------------------------------------------------------------


class DrawsBetween(Stack):
    def between(self, i: int, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        return h


@EVERY
def test_dropout_is_replayed_even_when_the_model_draws_between_blocks(schedule: Schedule) -> None:
    """Fault class 6."""
    model = DrawsBetween()
    plain = step(model, X)
    with apply(model, schedule) as handle:
        assert_same(step(model, X), plain)
        after = torch.rand(1)
    assert not _own(handle)
    step(model, X)
    assert torch.equal(after, torch.rand(1)), "the random state after the step differs"


@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast_inside_the_model_is_replayed(backward_inside: bool) -> None:
    """Fault class 7."""

    class Inside(Stack):
        def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x, **kwargs)

    model = Inside()

    def run() -> Any:
        model.zero_grad()
        torch.manual_seed(0)
        loss = loss_of(model(**X))
        with torch.autocast("cpu", torch.bfloat16, enabled=backward_inside):
            loss.backward()
        return result_of(model, loss)

    plain = run()
    for schedule in (TORCH, PAIRS, UNSLOTH_PAIRS):
        with apply(model, schedule):
            assert_same(run(), plain)


def test_switching_autocast_between_blocks_splits_the_segment() -> None:
    """Fault class 7."""

    class Switches(Stack):
        def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            h = self.embed(x)
            for i, block in enumerate(self.blocks):
                with torch.autocast("cpu", torch.bfloat16, enabled=i % 2 == 1):
                    h = block(h)
            return h

    model = Switches()
    plain = step(model, X)
    with apply(model, PAIRS) as handle:
        assert_same(step(model, X), plain)
    assert _own(handle) == ["blocks.1", "blocks.3"]
    assert "autocast" in handle.notes[0]


# --- broken chains ---------------------------------------------------------------------------------------------------


class Residual(Stack):
    def between(self, i: int, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return h + x if i == 0 else h


class InPlace(Stack):
    def between(self, i: int, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return h.add_(x) if i == 0 else h


class ExtraTensor(Stack):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        h = self.embed(x)
        for i, block in enumerate(self.blocks):
            h = block(h, temb=x.cos() if i < 2 else None)
        return h


class Sliced(Stack):
    def between(self, i: int, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return h[:, :] if i == 0 else h


@EVERY
@pytest.mark.parametrize("kind", [Residual, InPlace, ExtraTensor, Sliced])
def test_a_chain_that_is_broken_between_two_blocks_is_split_there(kind: type[Stack], schedule: Schedule) -> None:
    """Fault class 10 and chains that only look linked: numbers stay right from the first step on."""
    model = kind(6)
    plain = step(model, X)
    with apply(model, schedule) as handle:
        for _ in range(2):
            assert_same(step(model, X), plain)
        calls = handle.counters.checkpoint_calls
        members = [len(u.members) for u in handle.units]
    if members == [1] * 6:
        assert not _own(handle)
    else:
        assert _own(handle) == ["blocks.1"]
        assert calls == 2 * (len(members) + 1)


def test_a_split_is_permanent() -> None:
    class Sometimes(Stack):
        adds = True

        def between(self, i: int, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return h + x if self.adds else h

    model = Sometimes(2)
    with apply(model, PAIRS) as handle:
        step(model, X)
        model.adds = False
        step(model, X)
        assert handle.counters.checkpoint_calls == 4
        assert len(_own(handle)) == 1
    with apply(model, PAIRS) as handle:
        step(model, X)
        model.adds = True
        plain_calls = handle.counters.checkpoint_calls
        got = step(model, X)
        assert handle.counters.checkpoint_calls == plain_calls + 2
    assert_same(got, step(model, X))


class Skips(Stack):
    """Collects what comes out of the first half and adds it in the second, as a U-shaped transformer does."""

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        h, skips = self.embed(x), []
        for i, block in enumerate(self.blocks):
            if i >= 3:
                h = h + skips.pop()
            h = block(h)
            if i < 3:
                skips.append(h)
        return h


class Collects(Stack):
    """Returns every block's output, and changes one of them afterwards."""

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        h, states = self.embed(x), []
        for block in self.blocks:
            h = block(h)
            states.append(h)
        return [*states[:-1], states[-1].clone()]


@EVERY
@pytest.mark.parametrize("kind", [Skips, Collects])
def test_outputs_that_the_model_also_uses_elsewhere_are_the_real_ones(kind: type[Stack], schedule: Schedule) -> None:
    model = kind(6)
    plain = step(model, X)
    with apply(model, schedule):
        assert_same(step(model, X), plain)
        assert_same(step(model, X), plain)


def _double(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 2


@EVERY
def test_hooks_of_others_are_called_once_and_obeyed(schedule: Schedule) -> None:
    """Fault class 9."""
    model = Stack(4)
    calls: list[str] = []
    blocks = _blocks(model)
    blocks[0].register_forward_hook(lambda *_: calls.append("forward 0"))
    blocks[1].register_forward_pre_hook(lambda m, args: (calls.append("pre 1"), (args[0] + 1,))[1])
    blocks[2].register_forward_hook(_double)
    blocks[3].register_full_backward_hook(lambda *_: calls.append("backward 3"))
    plain = step(model, X)
    once = list(calls)
    calls.clear()
    with apply(model, schedule):
        assert_same(step(model, X), plain)
    assert calls == once == ["forward 0", "pre 1", "backward 3"]


def test_a_block_that_changes_its_input_in_place_is_refused() -> None:
    """Fault class 10."""

    class Writes(Block):
        def forward(self, x: torch.Tensor, temb: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x.add_(1))

    model = Stack(3, Writes)
    for schedule, name in ((TORCH, "blocks.0"), (UNSLOTH_PAIRS, "blocks.0")):
        with (
            apply(model, schedule),
            pytest.raises(RuntimeRefused, match=rf"{name} changes one of its inputs in place.*keep"),
        ):
            step(model, X)
    plain = step(model, X)
    with apply(model, Schedule.per_block(["keep"] * 3)):
        assert_same(step(model, X), plain)


def test_a_block_that_writes_into_its_neighbours_output_is_replayed_within_a_segment() -> None:
    """Fault class 10: the replay makes its own intermediate, so the write happens to that."""

    class Writes(Block):
        def forward(self, x: torch.Tensor, temb: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x.add_(1))

    class Mixed(Stack):
        def __init__(self) -> None:
            super().__init__(2)
            self.blocks[1] = Writes()

    torch.manual_seed(0)
    model = Mixed()
    plain = step(model, X)
    with apply(model, PAIRS):
        assert_same(step(model, X), plain)


def test_an_input_changed_in_place_before_backward_is_an_error() -> None:
    """Fault class 10: with offloading on, PyTorch's own check is off and ours steps in."""
    for schedule, error in ((TORCH, RuntimeError), (UNSLOTH, RuntimeRefused)):
        model, temb = Stack(2), tensor(3, 8)
        with apply(model, schedule):
            loss = loss_of(model(**X, temb=temb))
            temb.add_(1)
            with pytest.raises(error, match=r"in.?place"):
                loss.backward()


def test_switching_between_train_and_eval_before_backward_is_an_error() -> None:
    """Fault classes 6, 9: the replay would silently use other dropout."""
    model = Stack(2)
    with apply(model, PAIRS):
        loss = loss_of(model(**X))
        model.eval()
        with pytest.raises(RuntimeRefused, match=r"blocks\.0 ran in train mode and is in eval mode in backward"):
            loss.backward()


def test_a_block_that_is_used_twice_gets_a_checkpoint_each_time() -> None:
    model = Stack(4)
    model.blocks[2] = model.blocks[1]
    plain = step(model, X)
    with apply(model, Schedule(Backend.TORCH, 4)) as handle:
        assert_same(step(model, X), plain)
    assert handle.counters.checkpoint_calls == 4
    assert any("blocks.1 is used 2 times" in note for note in handle.notes)


def test_a_skipped_block_leaves_the_rest_right() -> None:
    class SkipLayers(Stack):
        skip: tuple[int, ...] = ()

        def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            h = self.embed(x)
            for i, block in enumerate(self.blocks):
                if i not in self.skip:
                    h = block(h)
            return h

    model = SkipLayers(6)
    for skip in ((), (0,), (1,), (2,), (4, 5), (0, 1, 2)):
        model.skip = skip
        plain = step(model, X)
        with apply(model, THREES):
            assert_same(step(model, X), plain)
            assert_same(step(model, X), plain)


def test_part_of_the_model_under_no_grad_is_left_alone() -> None:
    class Half(Stack):
        def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            h = self.embed(x)
            for i, block in enumerate(self.blocks):
                with torch.set_grad_enabled(i != 1):
                    h = block(h)
            return h

    model = Half(4)
    plain = step(model, X)
    with apply(model, Schedule(Backend.TORCH, 4)) as handle:
        assert_same(step(model, X), plain)
    assert handle.counters.blocks_checkpointed == 3


# --- several passes --------------------------------------------------------------------------------------------------


@EVERY
def test_retain_graph_and_two_losses_fetch_and_replay_again(schedule: Schedule) -> None:
    """Fault class 24."""
    model = Stack()

    def run() -> Any:
        model.zero_grad()
        torch.manual_seed(0)
        out = model(**X)
        first, second = out.sum(), loss_of(out)
        first.backward(retain_graph=True)
        second.backward()
        return result_of(model, second)

    plain = run()
    with apply(model, schedule) as handle:
        assert_same(run(), plain)
    assert handle.counters.units_recomputed == 2 * len(handle.units)


@EVERY
def test_gradient_accumulation_over_two_forwards_before_any_backward(schedule: Schedule) -> None:
    model = Stack()

    def run() -> Any:
        model.zero_grad()
        torch.manual_seed(0)
        losses = [loss_of(model(tensor(n, 8))) for n in (3, 5)]
        for loss in reversed(losses):
            loss.backward()
        loss_of(model(tensor(2, 8))).backward()
        return result_of(model, losses[0])

    plain = run()
    with apply(model, schedule):
        assert_same(run(), plain)


@EVERY
def test_second_derivatives_are_right(schedule: Schedule) -> None:
    """Fault class 24."""
    model = Stack(3).eval()

    def run() -> Any:
        model.zero_grad()
        x = X["x"].clone().requires_grad_()
        (grad,) = torch.autograd.grad(loss_of(model(x)), x, create_graph=True)
        loss = loss_of(grad)
        loss.backward()
        return result_of(model, loss)

    plain = run()
    with apply(model, schedule):
        assert_same(run(), plain)


@EVERY
def test_an_outer_saved_tensor_hook_still_works(schedule: Schedule) -> None:
    """Fault class 14: a user's offload around the whole step."""
    model = Stack()
    plain = step(model, X)
    with apply(model, schedule), torch.autograd.graph.save_on_cpu():
        assert_same(step(model, X), plain)


def test_a_checkpoint_around_the_whole_model_still_works() -> None:
    """Fault class 14."""
    model = Stack()
    plain = step(model, X)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    outer = Outer()
    for schedule in (TORCH, PAIRS, UNSLOTH_PAIRS):
        with apply(outer, schedule):
            got = step(outer, X)
        assert torch.equal(got.loss, plain.loss)
        assert all(torch.equal(got.grads[f"inner.{n}"], g) for n, g in plain.grads.items())


class Fails(Stack):
    fail_at = -1

    def between(self, i: int, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if i == self.fail_at:
            raise ValueError("between blocks")
        return h


@EVERY
def test_the_step_after_an_exception_is_right(schedule: Schedule) -> None:
    """Fault class 20: nothing of the failed step is left."""
    model = Fails(5)
    plain = step(model, X)
    with apply(model, schedule) as handle:
        for i in range(5):
            model.fail_at = i
            with pytest.raises(ValueError, match="between"):
                model(**X)
            model.fail_at = -1
            assert all(unit._open is None for unit in handle.units)
            assert_same(step(model, X), plain)
        hook = model.blocks[2].attn.register_forward_hook(_raise)
        with pytest.raises(ArithmeticError):
            model(**X)
        hook.remove()
        assert_same(step(model, X), plain)
        loss = loss_of(model(**X))
        hook = model.blocks[2].attn.register_forward_hook(_raise)
        with pytest.raises(ArithmeticError):
            loss.backward()
        hook.remove()
        del loss
        assert_same(step(model, X), plain)
    assert handle.counters.host_bytes == 0
    assert not _own(handle)


def _raise(*_: Any) -> None:
    raise ArithmeticError


# --- lifetimes -------------------------------------------------------------------------------------------------------


@pytest.fixture
def _no_cycle_collector() -> Iterator[None]:
    """Memory has to go by reference counts alone; a first step pays for lazy imports."""
    with apply(model := Stack(2), PAIRS):
        step(model, X)
    gc.disable()
    yield
    gc.enable()


def _watch_outputs(model: nn.Module) -> list[weakref.ref[torch.Tensor]]:
    watched: list[weakref.ref[torch.Tensor]] = []
    for block in _blocks(model):
        block.register_forward_hook(lambda m, args, out: watched.append(weakref.ref(out)))
    return watched


@pytest.mark.usefixtures("_no_cycle_collector")
@pytest.mark.parametrize(
    ("schedule", "alive"),
    [(TORCH, "111111"), (PAIRS, "010101"), (THREES, "001001"), (UNSLOTH, "000001"), (UNSLOTH_PAIRS, "000001")],
    ids=lambda v: v if isinstance(v, str) else v.name,
)
def test_after_forward_only_checkpoint_inputs_are_alive(schedule: Schedule, alive: str) -> None:
    """The estimator's memory model: of all block outputs, the boundaries stay; offloaded, none does."""
    model = Stack(6)
    watched = _watch_outputs(model)
    with apply(model, schedule) as handle:
        out = model(**X)
        assert "".join(str(int(r() is not None)) for r in watched) == alive
        boundaries = len(handle.units) if schedule.backend is Backend.UNSLOTH else 0
        assert handle.counters.host_bytes == boundaries * X["x"].nbytes
        loss_of(out).backward()
        del out
    assert not any(r() is not None for r in watched)
    assert handle.counters.host_bytes == 0


@pytest.mark.usefixtures("_no_cycle_collector")
@EVERY
def test_a_forward_without_backward_leaves_nothing_behind(schedule: Schedule) -> None:
    """Fault class 20."""
    for kind in (Stack, Residual, Fails):
        model = kind(6)
        watched = _watch_outputs(model)
        if isinstance(model, Fails):
            model.fail_at = 4
        with apply(model, schedule) as handle:
            for _ in range(3):
                if isinstance(model, Fails):
                    with pytest.raises(ValueError, match="between"):
                        model(**X)
                else:
                    model(**X)
        assert not any(r() is not None for r in watched)
        assert handle.counters.host_bytes == 0


class LiveBytes(TorchDispatchMode):
    """Bytes of storage alive after every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.after: list[int] = []
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and (key := (storage := t.untyped_storage())._cdata) not in self._live:
                self._live[key] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, key, None)
        self.after.append(sum(self._live.values()))
        return out


class ByHand(Stack):
    """A loop with checkpoints written into it: segments of `interval` blocks, one every `stride`."""

    interval, stride = 1, 1

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        h, i = self.embed(x), 0
        while i < len(self.blocks):
            some = self.blocks[i : i + self.interval] if i % self.stride == 0 else self.blocks[i : i + 1]
            i += len(some)
            if (i - len(some)) % self.stride == 0:
                h = torch.utils.checkpoint.checkpoint(self._run, some, h, kwargs["temb"], use_reentrant=False)
            else:
                h = some[0](h, **kwargs)
        return h

    @staticmethod
    def _run(blocks: Any, h: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            h = block(h, temb=temb)
        return h


@pytest.mark.usefixtures("_no_cycle_collector")
@pytest.mark.parametrize(("interval", "stride"), [(1, None), (2, None), (3, None), (2, 4), (7, None)])
def test_memory_is_that_of_checkpoints_written_by_hand(interval: int, stride: int | None) -> None:
    """Op for op over forward and backward, from the first step on: the estimator may take a segment for one checkpoint."""
    inputs = {"x": tensor(16, 8), "temb": tensor(16, 8, seed=1)}
    by_hand, model = ByHand(7), Stack(7)
    by_hand.interval, by_hand.stride = interval, stride or interval
    live = []
    with apply(model, Schedule(Backend.TORCH, interval, stride)):
        for m in (by_hand, model):
            with LiveBytes() as mode:
                loss_of(m(**inputs)).backward()
            live.append(mode.after)
    assert live[0] == live[1]


def test_many_steps_do_not_grow() -> None:
    """Fault class 20."""
    model = Stack(4)

    def tensors_alive() -> int:
        gc.collect()
        return sum(1 for o in gc.get_objects() if isinstance(o, torch.Tensor))

    with apply(model, UNSLOTH_PAIRS):
        for _ in range(2):
            step(model, X)
        before = tensors_alive()
        for _ in range(10):
            step(model, X)
        assert tensors_alive() == before


def test_a_model_with_a_schedule_can_be_freed() -> None:
    model = Stack(2)
    apply(model, PAIRS)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_backward_works_after_remove() -> None:
    model = Stack()
    plain = step(model, X)
    model.zero_grad()
    torch.manual_seed(3)
    with apply(model, UNSLOTH_PAIRS):
        loss = loss_of(model(**X))
    loss.backward()
    assert_same(result_of(model, loss), plain)


# --- putting on and taking off ---------------------------------------------------------------------------------------


def _patched(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if "forward" in m.__dict__]


def test_applying_again_replaces() -> None:
    model = Stack()
    first = apply(model, TORCH)
    second = apply(model, Schedule.per_block(["keep", "recompute", "keep", "keep"]))
    step(model, X)
    assert not first.active
    assert second.active
    assert first.counters.checkpoint_calls == 0
    assert second.counters.checkpoint_calls == 1
    first.remove()
    assert _patched(model) == ["blocks.1"]
    remove(model)
    assert _patched(model) == []


def test_applying_to_a_wrapper_replaces_what_is_inside() -> None:
    model = Stack()
    inner = apply(model, PAIRS)
    outer = apply(nn.ModuleDict({"module": model}), TORCH)
    assert not inner.active
    step(model, X)
    assert outer.counters.checkpoint_calls == 4


def test_a_refused_apply_leaves_the_earlier_schedule() -> None:
    model = Stack()
    handle = apply(model, PAIRS)
    with pytest.raises(ScheduleError):
        apply(model, Schedule.per_block(["keep"]))
    assert handle.active


def test_none_takes_an_earlier_schedule_off() -> None:
    model = Stack()
    apply(model, PAIRS)
    handle = apply(model, NONE)
    assert _patched(model) == []
    assert not handle.active


def test_removing_what_is_not_there_does_nothing() -> None:
    remove(Stack())


def test_leaving_the_context_restores_the_model_even_after_an_error() -> None:
    model = Stack()
    with pytest.raises(ZeroDivisionError), apply(model, PAIRS):
        raise ZeroDivisionError
    assert _patched(model) == []
    assert model.forward.__func__ is Stack.forward


def test_an_instance_forward_of_others_is_used_and_restored() -> None:
    model = Stack(2)
    original = model.blocks[0].forward
    model.blocks[0].forward = lambda *args, **kwargs: original(*args, **kwargs) * 3
    mine = model.blocks[0].forward
    plain = step(model, X)
    with apply(model, PAIRS):
        assert_same(step(model, X), plain)
    assert model.blocks[0].forward is mine


def test_a_forward_wrapped_later_by_others_survives_remove() -> None:
    model = Stack(2)
    handle = apply(model, TORCH)
    ours = model.blocks[0].forward
    model.blocks[0].forward = lambda *args, **kwargs: ours(*args, **kwargs) * 3
    with_both = step(model, X)
    handle.remove()
    assert_same(step(model, X), with_both)
    assert handle.counters.checkpoint_calls == 2


def test_the_signature_of_forward_stays_visible() -> None:
    import inspect

    model = Stack(2)
    before = [inspect.signature(m.forward) for m in (model, *model.blocks)]
    with apply(model, PAIRS):
        assert [inspect.signature(m.forward) for m in (model, *model.blocks)] == before


def test_a_plan_brings_schedule_and_structure() -> None:
    model = Stack(4)
    structure = Structure((Chain("blocks", tuple(BlockName(f"blocks.{i}", "Block") for i in (1, 3)), linked=False),))
    handle = apply(model, types.SimpleNamespace(schedule=PAIRS, structure=structure))
    step(model, X)
    assert handle.counters.checkpoint_calls == 2
    assert [u.members[0].name for u in handle.units] == ["blocks.1", "blocks.3"]
    assert "not directly connected" in handle.notes[0]


def test_a_structure_of_the_inner_model_fits_its_wrapper() -> None:
    model = Stack(4)
    wrapper = nn.ModuleDict({"base_model": nn.ModuleDict({"model": model})})
    handle = apply(wrapper, PAIRS, structure=discover(model))
    step(model, X)
    assert handle.counters.checkpoint_calls == 2


# --- refusals --------------------------------------------------------------------------------------------------------


def test_own_checkpointing_is_refused() -> None:
    from diffusers import WanTransformer3DModel

    with torch.device("meta"):
        model = WanTransformer3DModel(num_layers=2, num_attention_heads=1)
    model.enable_gradient_checkpointing()
    with pytest.raises(RuntimeRefused, match=r"own gradient checkpointing on; call disable_gradient_checkpointing\(\)"):
        apply(model, TORCH)
    model.disable_gradient_checkpointing()
    apply(model, TORCH)


def test_a_schedule_that_could_do_nothing_is_refused() -> None:
    """Fault class 11."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attn, self.out = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    with pytest.raises(RuntimeRefused, match=r"torch has nothing to recompute in Linear: found no list of blocks"):
        apply(nn.Linear(2, 2), TORCH)
    with pytest.raises(RuntimeRefused, match=r"found blocks \(Bare\).*no separate feed-forward side"):
        apply(Stack(2, Bare), Schedule(Backend.TORCH_FFN))
    assert not apply(nn.Linear(2, 2), NONE).active
    assert not apply(Stack(2), Schedule.per_block(["keep", "keep"])).active


def test_a_structure_of_another_model_is_refused() -> None:
    with pytest.raises(RuntimeRefused, match=r"Stack has no module blocks\.2"):
        apply(Stack(2), TORCH, structure=discover(Stack(4)))


def test_sharded_models_are_refused() -> None:
    """Fault class 27."""

    class FSDPStack(Stack):
        pass

    with pytest.raises(RuntimeRefused, match="sharded"):
        apply(FSDPStack(), TORCH)
    model = Stack()
    next(model.parameters()).ds_id = 0
    with pytest.raises(RuntimeRefused, match="ZeRO-3"):
        apply(model, TORCH)


def test_what_is_no_schedule_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="needs a Schedule or a plan"):
        apply(Stack(), "torch")


# --- copies ----------------------------------------------------------------------------------------------------------


def _pickled(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


def _saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", [copy.deepcopy, _pickled, _saved])
def test_a_copy_is_an_independent_model_without_a_schedule(how: Callable[[nn.Module], Any]) -> None:
    """Fault class 30."""
    model = Stack()
    plain = step(model, X)
    with apply(model, UNSLOTH_PAIRS) as handle:
        step(model, X)
        twin = how(model)
        done = handle.counters.checkpoint_calls
        assert_same(step(twin, X), plain)
        assert handle.counters.checkpoint_calls == done
        assert list(twin.state_dict()) == list(model.state_dict())
        with torch.no_grad():
            twin.embed.weight.zero_()
        assert_same(step(model, X), plain)
        with apply(twin, PAIRS) as other:
            step(twin, X)
        assert other.counters.checkpoint_calls == 2
        assert handle.active


# --- compiled and distributed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "schedule"),
    [
        (("blocks", "before"), TORCH),
        (("blocks", "before"), UNSLOTH_PAIRS),
        (("blocks", "after"), UNSLOTH_PAIRS),
        (("model", "before"), UNSLOTH_PAIRS),
        (("model", "after"), UNSLOTH_PAIRS),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, tuple) else v.name,
)
def test_compiling_before_or_after_keeps_checkpoints_and_gradients(order: tuple[str, str], schedule: Schedule) -> None:
    """Fault class 25."""
    torch._dynamo.reset()
    model = Stack(2).eval()
    plain = step(model, X)
    run: nn.Module = model

    def compile_it() -> None:
        nonlocal run
        if order[0] == "blocks":
            for block in model.blocks:
                block.compile(backend="aot_eager")
        else:
            run = torch.compile(model, backend="aot_eager")

    if order[1] == "before":
        compile_it()
        handle = apply(run, schedule)
    else:
        handle = apply(model, schedule)
        compile_it()
    for _ in range(2):
        got = step(run, X)
    assert torch.allclose(got.loss, plain.loss)
    for name, grad in got.grads.items():
        torch.testing.assert_close(grad, plain.grads[name.removeprefix("_orig_mod.")])
    assert handle.counters.units_recomputed == handle.counters.checkpoint_calls == 2 * len(handle.units)
    noticed = any("uncompiled" in note for note in handle.notes)
    assert noticed == (order in [("blocks", "after"), ("model", "before")])


def test_distributed_data_parallel_reduces_each_parameter_once(tmp_path: Any) -> None:
    """Fault class 26."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        model = Stack()
        plain = step(model, X)
        wrapped = nn.parallel.DistributedDataParallel(model)
        for schedule in (TORCH, UNSLOTH_PAIRS):
            with apply(wrapped, schedule) as handle:
                got = step(wrapped, X)
            assert handle.counters.units_recomputed == len(handle.units)
            assert all(torch.equal(got.grads[f"module.{n}"], g) for n, g in plain.grads.items())
    finally:
        torch.distributed.destroy_process_group()
