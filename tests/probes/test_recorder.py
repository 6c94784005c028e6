"""The tape of small hand-made modules whose storages, saved tensors and calls can be counted on paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from probes.recorder import Recorder
from probes.tape import ATTENTION, ATTENTION_BACKWARD, CONVOLUTION, GEMM, MEMORY, NEVER, REDUCTION, Tape

FLOAT = 4
BATCH, WIDTH = 8, 16
X_BYTES = BATCH * WIDTH * FLOAT


def record(
    run: Callable[..., torch.Tensor],
    *inputs: torch.Tensor,
    model: nn.Module | None = None,
    watch: dict[str, str | None] | None = None,
    scratch: Callable[..., int] | None = None,
) -> Tape:
    """The tape of `run(*inputs)` and of the backward from its sum."""
    recorder = Recorder("meta", scratch)
    for name, reads_from in (watch or {}).items():
        assert model is not None
        recorder.watch_module(name, model.get_submodule(name), reads_from)
    with recorder:
        with recorder.saved_tensors():
            loss = run(*inputs).sum()
        backward_start = recorder.now + 1
        loss.backward()
        optimizer_start = recorder.now
    return recorder.tape(backward_start, optimizer_start)


def meta(*shape: int, requires_grad: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=dtype, requires_grad=requires_grad)


def linear(trained: bool, bias: bool = False) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=bias, device="meta").requires_grad_(trained)


def storages(tape: Tape, size: int) -> np.ndarray[Any, Any]:
    return np.flatnonzero(tape.size == size)


# Saved tensors -------------------------------------------------------------------------------------------------------


def test_a_frozen_linear_saves_only_its_weight_which_is_resident() -> None:
    layer = linear(trained=False)
    tape = record(lambda x: layer(x * 1.0), meta(BATCH, WIDTH, requires_grad=True))
    assert list(tape.saved_storage) == [-1]
    assert list(tape.saved_bytes) == [WIDTH * WIDTH * FLOAT]


def test_a_trained_linear_saves_its_input_which_was_born_in_the_step() -> None:
    layer = linear(trained=True)
    tape = record(lambda x: layer(x * 1.0), meta(BATCH, WIDTH, requires_grad=True))
    own = tape.saved_storage[tape.saved_storage >= 0]
    assert list(tape.size[own]) == [X_BYTES]
    assert tape.birth[own[0]] < tape.saved_at[tape.saved_storage == own[0]][0]


def test_the_batch_is_resident_and_never_born() -> None:
    layer = linear(trained=True)
    tape = record(lambda x: layer(x), meta(BATCH, WIDTH))
    # the only forward storages are the linear's output and the scalar loss
    forward = tape.birth < tape.backward_start
    assert sorted(tape.size[forward]) == [FLOAT, X_BYTES]
    assert list(tape.saved_storage) == [-1]


def test_a_tensor_without_a_grad_fn_is_saved_but_not_movable() -> None:
    tape = record(lambda x: torch.native_dropout(x.exp(), 0.1, True)[0], meta(BATCH, WIDTH, requires_grad=True))
    by_size = dict(zip(tape.saved_bytes.tolist(), tape.saved_movable.tolist(), strict=True))
    assert by_size == {X_BYTES: True, BATCH * WIDTH: False}  # exp's output, and the mask of one byte an element


def test_relu_saves_the_storage_that_it_returns_and_gelu_the_one_that_it_was_given() -> None:
    for function, kept in ((F.relu, 1), (F.gelu, 0)):
        tape = record(lambda x, f=function: f(x * 1.0) * 2.0, meta(BATCH, WIDTH, requires_grad=True))
        big = storages(tape, X_BYTES)
        assert list(tape.saved_storage) == [big[kept]], function.__name__


def test_every_saved_tensor_is_asked_for_before_it_is_released_and_after_backward_has_begun() -> None:
    model = nn.Sequential(linear(True), nn.GELU(), linear(True))
    tape = record(lambda x: model(x), meta(BATCH, WIDTH))
    assert (tape.saved_at < tape.backward_start).all()
    assert (tape.unpacked_at >= tape.backward_start).all()
    assert (tape.released_at > tape.unpacked_at).all()
    assert (tape.released_at < tape.length).all()


def test_backward_asks_for_saved_tensors_in_reverse_order_of_layers() -> None:
    model = nn.Sequential(*(linear(True) for _ in range(4)))
    tape = record(lambda x: model(x * 1.0), meta(BATCH, WIDTH, requires_grad=True))
    inputs = tape.saved_storage >= 0
    assert (np.diff(tape.unpacked_at[inputs]) < 0).all()


# Lifetimes -----------------------------------------------------------------------------------------------------------


def test_a_storage_dies_when_python_lets_go_although_autograd_has_saved_it() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        h = x * 1.0
        y = F.gelu(h)
        del h
        return y * 2.0 * 3.0

    tape = record(run, meta(BATCH, WIDTH, requires_grad=True))
    h = storages(tape, X_BYTES)[0]
    assert tape.saved_storage[0] == h
    assert tape.saved_at[0] < tape.death[h] < tape.backward_start < tape.released_at[0]


def test_a_storage_that_python_keeps_lives_past_the_forward_pass() -> None:
    kept: list[torch.Tensor] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        kept.append(x * 1.0)
        return kept[0] * 2.0

    tape = record(run, meta(BATCH, WIDTH, requires_grad=True))
    assert tape.death[storages(tape, X_BYTES)[0]] == NEVER


def test_gradients_of_parameters_are_born_in_backward_and_never_die() -> None:
    model = nn.Sequential(linear(True, bias=True), nn.Linear(WIDTH, 3, device="meta"))
    tape = record(lambda x: model(x), meta(BATCH, WIDTH))
    gradients = (tape.death >= NEVER) & (tape.birth >= tape.backward_start)
    expected = sorted(p.numel() * FLOAT for p in model.parameters())
    assert sorted(tape.size[gradients]) == expected


def test_a_frozen_layer_gets_no_gradient_storage() -> None:
    model = nn.Sequential(linear(True), linear(False))
    tape = record(lambda x: model(x), meta(BATCH, WIDTH))
    gradients = (tape.death >= NEVER) & (tape.birth >= tape.backward_start)
    assert tape.size[gradients].tolist() == [WIDTH * WIDTH * FLOAT]


# Storages, not tensors -----------------------------------------------------------------------------------------------


def test_views_of_one_tensor_are_one_storage() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x * 1.0).reshape(BATCH, 3, WIDTH).unbind(1)
        return (q.exp() * k.exp() * v.exp()).sum(-1, keepdim=True)

    tape = record(run, meta(BATCH, 3 * WIDTH, requires_grad=True))
    assert (tape.birth[tape.size == 3 * X_BYTES] < tape.backward_start).sum() == 1


def test_two_saved_views_name_the_same_storage_with_their_own_bytes() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        a, b = (x * 1.0).chunk(2, dim=-1)
        return a * b

    tape = record(run, meta(BATCH, 2 * WIDTH, requires_grad=True))
    assert len(tape.saved_storage) == 2
    assert len(set(tape.saved_storage.tolist())) == 1
    assert tape.saved_bytes.tolist() == [X_BYTES, X_BYTES]
    assert tape.size[tape.saved_storage[0]] == 2 * X_BYTES


def test_a_change_in_place_gives_birth_to_nothing() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        y = x * 1.0
        y += 1.0
        y.mul_(2.0)
        return y

    tape = record(run, meta(BATCH, WIDTH, requires_grad=True))
    assert (tape.birth[tape.size == X_BYTES] < tape.backward_start).sum() == 1


def test_an_expanded_tensor_counts_its_storage_and_not_its_elements() -> None:
    tape = record(lambda x: (x * 1.0).expand(BATCH, WIDTH) * 2.0, meta(1, WIDTH, requires_grad=True))
    forward = tape.size[tape.birth < tape.backward_start].tolist()
    assert forward == [WIDTH * FLOAT, X_BYTES, FLOAT]


def test_tensors_on_another_device_are_not_counted() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        host = torch.ones(1000) * 2.0
        assert host.device.type == "cpu"
        return x * 1.0

    tape = record(run, meta(BATCH, WIDTH, requires_grad=True))
    assert 1000 * FLOAT not in tape.size


def test_scratch_of_a_kernel_lives_for_one_event() -> None:
    def scratch(func: Any, args: Any, kwargs: Any, outputs: Any) -> int:
        return 12345 if func._schema.name == "aten::mm" else 0

    layer = linear(trained=False)
    tape = record(lambda x: layer(x * 1.0), meta(BATCH, WIDTH, requires_grad=True), scratch=scratch)
    assert tape.size[tape.scratch].tolist() == [12345, 12345]  # forward and the input's gradient
    assert (tape.death - tape.birth)[tape.scratch].tolist() == [1, 1]
    assert (tape.size[~tape.scratch] != 12345).all()


# Kernels -------------------------------------------------------------------------------------------------------------


def test_a_linear_counts_two_flops_a_multiplication_forward_and_again_for_each_gradient() -> None:
    layer = linear(trained=True)
    tape = record(lambda x: layer(x * 1.0), meta(BATCH, WIDTH, requires_grad=True))
    product = 2 * BATCH * WIDTH * WIDTH
    assert tape.op_flops[tape.op_kind == GEMM].tolist() == [product] * 3


def test_an_elementwise_kernel_moves_its_inputs_and_its_output() -> None:
    a, b = meta(BATCH, WIDTH), meta(BATCH, WIDTH, requires_grad=True)
    tape = record(lambda x, y: x + y, a, b)
    assert tape.op_bytes[0] == 3 * X_BYTES
    assert tape.op_kind[0] == MEMORY
    assert tape.op_flops[0] == 0


def test_views_and_empty_tensors_are_no_kernels() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        torch.empty(7, device="meta")
        return x.view(WIDTH, BATCH).t().unsqueeze(0).detach().requires_grad_(True)

    tape = record(run, meta(BATCH, WIDTH, requires_grad=True))
    assert (tape.op_at < tape.backward_start).sum() == 1  # the sum


@pytest.mark.parametrize(
    ("kind", "run", "shape"),
    [
        (CONVOLUTION, lambda x: F.conv2d(x, meta(4, 3, 3, 3)), (2, 3, 8, 8)),
        (ATTENTION, lambda x: torch.ops.aten._scaled_dot_product_flash_attention(x, x, x, 0.0)[0], (1, 2, 32, 64)),
        (GEMM, lambda x: x @ x.mT, (2, 3, 8, 8)),
    ],
)
def test_kernels_are_told_apart_by_kind(kind: int, run: Callable[..., Any], shape: tuple[int, ...]) -> None:
    tape = record(run, meta(*shape, requires_grad=True, dtype=torch.bfloat16 if kind == ATTENTION else torch.float32))
    backward = ATTENTION_BACKWARD if kind == ATTENTION else kind
    of_kind = np.isin(tape.op_kind, (kind, backward))
    assert of_kind.sum() >= 2  # forward and backward
    assert (tape.op_kind == backward).any()
    assert (tape.op_flops[of_kind] > 0).all()
    assert (tape.op_head[of_kind] == (64 if kind == ATTENTION else 0)).all()


# Calls of modules ----------------------------------------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.ff = linear(True), linear(True)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        normed = x * scale
        x = x + self.attn(normed)
        return x + self.ff(x.exp()) + table


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Block(), _Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        scale, table = x[:, :1].exp(), torch.zeros(1, WIDTH, device="meta")
        for block in self.blocks:
            x = block(x, scale=scale, table=table)
        return x


def _watched(reads_from: str | None = None) -> Tape:
    model = _Model()
    watch = {"blocks.0": reads_from, "blocks.0.attn": None, "blocks.0.ff": None, "blocks.1": None}
    return record(lambda x: model(x), meta(BATCH, WIDTH, requires_grad=True), model=model, watch=watch)


def test_a_submodules_call_lies_inside_its_blocks_and_calls_do_not_overlap() -> None:
    calls = _watched().calls
    block, attn, ff, following = (calls[n][0] for n in ("blocks.0", "blocks.0.attn", "blocks.0.ff", "blocks.1"))
    assert block.start < attn.start < attn.end <= ff.start < ff.end < block.end <= following.start < following.end


def test_a_calls_arguments_are_its_tensors_by_position_and_by_keyword() -> None:
    tape = _watched()
    (call,) = tape.calls["blocks.0"]
    x, scale, table = call.arguments
    assert [int(tape.size[s]) for s in (x, scale, table)] == [X_BYTES, BATCH * FLOAT, WIDTH * FLOAT]
    assert call.movable == (True, True, False)
    assert call.argument_bytes == (X_BYTES, BATCH * FLOAT, WIDTH * FLOAT)


def test_the_next_block_takes_the_storage_that_the_previous_one_returned() -> None:
    tape = _watched()
    (first,), (second,) = tape.calls["blocks.0"], tape.calls["blocks.1"]
    assert second.arguments[1:] == first.arguments[1:]
    assert first.start < tape.birth[second.arguments[0]] < first.end


def test_a_resident_argument_is_left_out_of_a_calls_arguments() -> None:
    model = nn.ModuleDict({"layer": linear(True)})
    tape = record(lambda x: model["layer"](x), meta(BATCH, WIDTH), model=model, watch={"layer": None})
    assert [c.arguments for c in tape.calls["layer"]] == [()]


def test_inner_reads_are_the_blocks_own_storages_that_are_read_from_the_child_on() -> None:
    tape = _watched(reads_from="ff")
    (call,), (ff,) = tape.calls["blocks.0"], tape.calls["blocks.0.ff"]
    read = tape.inner_reads["blocks.0@ff"]
    assert all(call.start < tape.birth[s] < ff.start or s in call.arguments for s in read)
    # x after the attention (read by the last sum), x.exp() (the feed-forward's own input) and the argument `table`, but
    # neither `normed` nor the arguments x and scale
    x, scale, table = call.arguments
    assert len(read) == 3
    assert {ff.arguments[0], table} < set(read)
    assert not {x, scale} & set(read)
    assert set(read) != {s for s in storages(tape, X_BYTES) if call.start < tape.birth[s] < ff.start}


def test_every_call_of_a_module_is_kept_in_order_also_one_inside_another() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ff = linear(trained=True)

        def forward(self, x: torch.Tensor, times: int = 2) -> torch.Tensor:
            x = self.ff(x) + self.ff(x[:, :1].expand_as(x) * 2.0)
            return x if times == 1 else self(x, times - 1)

    model = Again()
    watch: dict[str, str | None] = {"": None, "ff": None}
    tape = record(lambda x: model(x), meta(BATCH, WIDTH, requires_grad=True), model=model, watch=watch)
    outer, inner = tape.calls[""]
    ff = tape.calls["ff"]
    assert outer.start < ff[0].start < ff[0].end < ff[1].start < ff[1].end < inner.start < ff[2].start < ff[3].end
    assert ff[3].end < inner.end < outer.end
    assert ff[0].results != ff[1].results
    assert outer.results == inner.results


def test_a_long_sum_into_one_tile_is_told_apart() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return (x.mT @ x).sum() + (x @ x.mT[..., :4]).sum()

    tape = record(run, meta(2**17, 4, requires_grad=True))
    forward = tape.op_kind[tape.op_at < tape.backward_start]
    assert (forward == REDUCTION).sum() == 1
    assert (forward == GEMM).sum() == 1


def test_a_saved_tensor_is_a_view_with_a_place_in_its_storage() -> None:
    def parts(x: torch.Tensor) -> torch.Tensor:
        first, second, _ = (x * 1.0).view(BATCH, 2, 8).split([2, 3, 3], dim=-1)
        return first.exp().sum() + (second * second).sum() + second.expand(4, BATCH, 2, 3).sin().sum()

    tape = record(parts, meta(BATCH, WIDTH, requires_grad=True))
    (whole,) = [s for s in storages(tape, X_BYTES) if (tape.saved_storage == s).any()]
    mine = tape.saved_storage == whole
    views = np.unique(tape.saved_view[mine])
    shown = sorted(zip(tape.view_start[views], tape.view_extent[views], tape.view_bytes[views], strict=True))
    start, extent = FLOAT * 2, FLOAT * (8 * (2 * BATCH - 1) + 3)  # behind the first part, from row to row
    # as multiplied by itself, with gaps; expanded, with more elements than it occupies
    assert shown == [(start, extent, FLOAT * 3 * 2 * BATCH), (start, extent, extent)]
    assert len(set(tape.view_type[views])) == 1
