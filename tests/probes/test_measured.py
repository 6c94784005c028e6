"""The measured probe. Its logic runs on the CPU; the CUDA meter does the same with other counters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from probes import measured, store
from probes.measured import (
    DEVICE_KEY,
    BlockCall,
    CpuMeter,
    CudaMeter,
    DeviceMeter,
    MeasureError,
    TensorSpec,
    Usage,
    block_calls,
    measure,
    measure_block,
    measure_rates,
    meter_for,
)
from probes.profile import Profile
from probes.tape import NEVER
from probes.target import Target
from probes.workload import Workload, from_request, reduced_copy

CPU = torch.device("cpu")
MB = 2**20


def reduced(model: str) -> Workload:
    return reduced_copy(from_request({"model": model}))


@cache
def calls_of(model: str) -> list[BlockCall]:
    return block_calls(reduced(model), Target("cpu"))


@cache
def probed(model: str) -> Profile:
    return measure(reduced(model), device="cpu", repeats=2)


# Meters --------------------------------------------------------------------------------------------------------------


def test_the_cpu_meter_tells_what_is_left_from_what_was_needed_for_a_moment() -> None:
    kept: list[torch.Tensor] = []

    def run() -> None:
        temporary = torch.empty(2 * MB, dtype=torch.uint8)
        kept.append(torch.empty(MB, dtype=torch.uint8))
        del temporary

    assert CpuMeter(CPU).usage(run) == Usage(left=MB, peak=3 * MB)


def test_the_cpu_meter_counts_what_is_freed_as_negative() -> None:
    kept: list[torch.Tensor] = []
    meter = CpuMeter(CPU)
    meter.usage(lambda: kept.append(torch.empty(MB, dtype=torch.uint8)))
    assert meter.usage(kept.clear) == Usage(left=-MB, peak=0)


def test_the_cpu_meter_counts_kernels_without_views_and_in_backward_too() -> None:
    x = torch.ones(4, 4, requires_grad=True)
    meter = CpuMeter(CPU)
    assert meter.kernels(lambda: x.t().unsqueeze(0).detach()) == 0
    assert meter.kernels(lambda: (x * 2).exp()) == 2
    y = x.exp()
    assert meter.kernels(lambda: y.backward(torch.ones(4, 4))) >= 1


def test_the_cpu_meter_measures_seconds() -> None:
    meter = CpuMeter(CPU)
    start = meter.mark()
    sum(range(10_000))
    assert 0 < meter.between(start, meter.mark()) < 5


def test_a_cpu_has_no_link_to_the_host() -> None:
    assert CpuMeter(CPU).link_rates() == {}


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", "'gpu' is no device; valid: cuda, cuda:N, cpu"),
        ("meta", "device meta cannot be measured; valid: cuda, cuda:N, cpu"),
    ],
)
def test_a_device_that_cannot_be_measured_is_refused(device: str, message: str) -> None:
    with pytest.raises(MeasureError, match=message):
        meter_for(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_cuda_device_the_traced_probe_is_named() -> None:
    with pytest.raises(MeasureError, match="no CUDA device is present; the traced probe needs none"):
        measure(reduced("sd3"))


def test_rates_of_a_cpu_are_positive_and_quickly_measured() -> None:
    meter = CpuMeter(CPU)
    start = meter.mark()
    rates = measure_rates("cpu")
    assert meter.between(start, meter.mark()) < 10  # under a second on an idle machine
    assert rates.keys() == {"fp32_flops", "bf16_flops", "memory_bytes_per_second", "launch_seconds"}
    assert rates["fp32_flops"] > 1e8
    assert rates["memory_bytes_per_second"] > 1e7
    assert 1e-8 < rates["launch_seconds"] < 1e-2


# Arguments -----------------------------------------------------------------------------------------------------------


def make(spec: TensorSpec) -> torch.Tensor:
    return spec.make(CPU, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_an_argument_is_made_with_its_size_strides_dtype_and_gradient(dtype: torch.dtype) -> None:
    made = make(TensorSpec((2, 3, 4), (4, 8, 1), dtype, True))
    assert (tuple(made.size()), made.stride(), made.dtype, made.requires_grad) == ((2, 3, 4), (4, 8, 1), dtype, True)
    assert made.is_leaf
    assert made.detach().abs().sum() > 0


def test_an_expanded_argument_takes_the_memory_of_its_storage() -> None:
    made = make(TensorSpec((5, 4), (0, 1), torch.float32, False))
    assert made.untyped_storage().nbytes() == 16


def test_integers_are_zero_masks_let_everything_through_and_empty_tensors_are_empty() -> None:
    assert make(TensorSpec((3,), (1,), torch.int64, False)).tolist() == [0, 0, 0]
    assert make(TensorSpec((2,), (1,), torch.bool, False)).tolist() == [True, True]
    assert make(TensorSpec((0, 4), (4, 1), torch.float32, False)).shape == (0, 4)
    assert make(TensorSpec((), (), torch.float32, False)).shape == ()


# How blocks are called -----------------------------------------------------------------------------------------------


def specs(call: BlockCall) -> list[TensorSpec]:
    return [v for v in call.leaves if isinstance(v, TensorSpec)]


def test_blocks_of_one_class_that_differ_are_kinds_of_their_own_named_after_their_first_block() -> None:
    calls = block_calls(from_request({"model": "sd3"}), Target("cuda"))
    kind = "transformer_blocks/JointTransformerBlock"
    # two attentions in 0 to 12; one in the rest; no text output in the last
    assert [c.key for c in calls] == [kind, f"{kind}@13", f"{kind}@23"]


def test_a_large_models_blocks_are_found_without_data_and_with_the_shapes_of_the_real_job() -> None:
    (call,) = block_calls(
        from_request({"model": "wan", "variant": "14b", "resolution": "832x480", "frames": 81}), Target("cuda")
    )
    assert call.key == "blocks/WanTransformerBlock"
    assert all(p.is_meta for p in call.module.parameters())
    hidden = specs(call)[0]
    assert hidden.size == (1, 21 * 30 * 52, 5120)
    assert hidden.carries_gradient
    trained = {n for n, p in call.module.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in n for n in trained)
    assert {p.dtype for n, p in call.module.named_parameters() if n in trained} == {torch.float32}
    assert call.module.attn1.to_q.base_layer.weight.dtype is torch.bfloat16  # type: ignore[union-attr]


def test_a_block_is_called_as_in_the_model_with_keywords_and_values_that_are_no_tensors() -> None:
    call = next(c for c in block_calls(reduced("flux"), Target("cuda")) if c.key.startswith("transformer_blocks/"))
    args, kwargs = call.arguments(CPU, seed=0)
    assert args == ()
    assert {"hidden_states", "encoder_hidden_states", "temb", "image_rotary_emb"} <= kwargs.keys()
    assert [t.shape for t in kwargs["image_rotary_emb"]] == [(288, 32), (288, 32)]
    assert kwargs["hidden_states"].requires_grad
    assert not kwargs["temb"].requires_grad


def test_arguments_are_the_same_for_the_same_seed() -> None:
    call = block_calls(reduced("flux"), Target("cuda"))[0]
    first, again, other = (pytree.tree_leaves(call.arguments(CPU, seed=s)) for s in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True) if isinstance(a, torch.Tensor))
    assert not torch.equal(first[0], other[0])


# One block -----------------------------------------------------------------------------------------------------------


def block_call(module: nn.Module, *inputs: TensorSpec) -> BlockCall:
    leaves, layout = pytree.tree_flatten((inputs, {}))
    return BlockCall("list/Kind", "list.0", module, leaves, layout)


def meta_linear(trained: bool = True) -> nn.Module:
    return (
        nn.Sequential(nn.Linear(64, 256, bias=False), nn.GELU(), nn.Linear(256, 64, bias=False))
        .to("meta")
        .requires_grad_(trained)
    )


INPUT = TensorSpec((512, 64), (64, 1), torch.float32, True)
X, H, W = 512 * 64 * 4, 512 * 256 * 4, 64 * 256 * 4


def test_memory_of_a_block_is_what_can_be_worked_out_on_paper() -> None:
    found = measure_block(block_call(meta_linear(), INPUT), CpuMeter(CPU), reduced("sd3"), 1)
    assert found["saved_bytes"] == 2 * H  # the first linear's and the GELU's output; the input was there before
    assert found["output_bytes"] == X
    assert found["forward_peak_bytes"] == 2 * H + X
    assert found["gradient_bytes"] == X + 2 * W
    # the second linear's two gradients; GELU's comes when that linear's input and the output are gone
    assert found["backward_peak_bytes"] == H + W
    assert found["weight_bytes"] == 2 * W
    assert (found["forward_kernels"], found["backward_kernels"]) == (3, 5)
    assert found["forward_seconds"] > 0
    assert found["backward_seconds"] > 0


def test_a_frozen_block_saves_only_what_the_inputs_gradient_needs() -> None:
    found = measure_block(block_call(meta_linear(trained=False), INPUT), CpuMeter(CPU), reduced("sd3"), 1)
    assert found["saved_bytes"] == H
    assert found["gradient_bytes"] == X


def test_a_block_is_without_data_again_after_it_was_measured() -> None:
    module = meta_linear()
    measure_block(block_call(module, INPUT), CpuMeter(CPU), reduced("sd3"), 1)
    assert all(p.is_meta for p in module.parameters())


def test_weights_that_two_layers_share_are_built_once() -> None:
    module = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)).to("meta")
    module[1].weight = module[0].weight
    found = measure_block(block_call(module, INPUT), CpuMeter(CPU), reduced("sd3"), 1)
    assert found["weight_bytes"] == 64 * 64 * 4
    assert module[1].weight is module[0].weight


class _Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class _Constant(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach() * 2


def test_a_block_that_does_not_run_by_itself_is_named_with_the_error_and_left_without_data() -> None:
    module = _Broken()
    with pytest.raises(MeasureError, match="block list/Kind does not run by itself: RuntimeError: "):
        measure_block(block_call(module, INPUT), CpuMeter(CPU), reduced("sd3"), 1)
    assert module.weight.is_meta


def test_a_block_through_which_no_gradient_flows_is_refused() -> None:
    with pytest.raises(MeasureError, match=r"block list/Kind: no output carries a gradient"):
        measure_block(block_call(_Constant(), INPUT), CpuMeter(CPU), reduced("sd3"), 1)


class _Scripted(DeviceMeter):
    """A card with little memory, as far as the probe can tell."""

    name = "a small card"
    released = False

    def usage(self, run: Callable[[], object]) -> Usage:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore lines")

    def mark(self) -> float:
        return 0.0

    def between(self, start: float, end: float) -> float:
        return 0.0

    def kernels(self, run: Callable[[], object]) -> int:
        return 0

    def link_rates(self) -> dict[str, float]:
        return {}

    def release(self) -> None:
        self.released = True


def test_a_block_that_does_not_fit_is_named_in_one_line_and_its_memory_is_given_back() -> None:
    meter = _Scripted(CPU)
    with pytest.raises(
        MeasureError,
        match=r"one block list/Kind does not fit on a small card: CUDA out of memory\. Tried to allocate 9 GiB\.$",
    ):
        measure_block(block_call(meta_linear(), INPUT), meter, reduced("sd3"), 1)
    assert meter.released


# Against the trace ---------------------------------------------------------------------------------------------------


def traced_block(profile: Profile, name: str) -> dict[str, float]:
    """What the tape says of one block's forward."""
    tape, call = profile.tape, profile.tape.calls[name][0]
    own = np.flatnonzero((tape.birth > call.start) & (tape.birth < call.end))
    saves = (tape.saved_at > call.start) & (tape.saved_at < call.end) & (tape.saved_storage >= 0)
    until = tape.death.copy()
    np.maximum.at(until, tape.saved_storage[saves], tape.released_at[saves])
    is_output = tape.death[own] > call.end
    is_saved = until[own] > call.end
    events = np.zeros(call.end - call.start + 2, np.int64)
    np.add.at(events, tape.birth[own] - call.start, tape.size[own])
    dead = own[until[own] <= call.end]
    np.add.at(events, until[dead] - call.start, -tape.size[dead])
    inside = (tape.op_at > call.start) & (tape.op_at < call.end)
    return {
        "saved_bytes": float(tape.size[own[is_saved & ~is_output]].sum()),
        "output_bytes": float(tape.size[own[is_output]].sum()),
        "forward_peak_bytes": float(np.cumsum(events).max()),
        "forward_kernels": float(inside.sum()),
    }


@pytest.mark.parametrize(
    "model", ["sd3", *(pytest.param(m, marks=pytest.mark.slow) for m in ("flux", "wan", "z_image"))]
)
def test_a_reduced_block_saves_and_needs_what_its_trace_says(model: str) -> None:
    profile = probed(model)
    calls = calls_of(model)
    assert [c.key for c in calls] == list(measured.blocks_measured(profile))
    for call in calls:
        expected, found = traced_block(profile, call.name), profile.measured[call.key]
        for part, value in expected.items():
            assert found[part] == pytest.approx(value, rel=0.02), (call.key, part)
        assert found["backward_peak_bytes"] > 0
        assert found["gradient_bytes"] > 0


def test_a_measured_profile_is_the_traced_one_with_figures_beside_it() -> None:
    profile = probed("sd3")
    assert (profile.source, profile.target) == ("measured", "cpu")
    assert profile.structure.chains[0].linked
    assert profile.measured[DEVICE_KEY].keys() == {
        "fp32_flops",
        "bf16_flops",
        "memory_bytes_per_second",
        "launch_seconds",
    }
    assert profile.notes[-1] == "3 kinds of block measured on cpu, 2 runs each"
    assert NEVER in profile.tape.death


def test_a_measured_profile_can_be_stored() -> None:
    profile = probed("sd3")
    assert store.from_bytes(store.to_bytes(profile)).measured == profile.measured


def test_a_quantised_base_cannot_be_measured() -> None:
    workload = from_request({"model": "flux", "precision": "int8-quanto"})
    with pytest.raises(MeasureError, match="--precision int8-quanto cannot be measured"):
        measure(workload, device="cpu")


def test_at_least_one_run_is_needed() -> None:
    with pytest.raises(MeasureError, match="repeats must be at least 1, not 0"):
        measure(reduced("sd3"), device="cpu", repeats=0)


# On a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_a_block_saves_what_its_trace_says() -> None:
    workload = dataclasses.replace(from_request({"model": "sd3", "resolution": 512}))
    profile = measure(workload, device="cuda")
    for call in block_calls(workload, Target("cuda", torch.cuda.get_device_capability())):
        expected, found = traced_block(profile, call.name), profile.measured[call.key]
        assert found["saved_bytes"] == pytest.approx(expected["saved_bytes"], rel=0.02)
        assert found["forward_kernels"] == pytest.approx(expected["forward_kernels"], rel=0.2)
    rates: dict[str, Any] = dict(profile.measured[DEVICE_KEY])
    assert rates["bf16_flops"] > rates["fp32_flops"] > 1e12
    assert rates["host_to_device_bytes_per_second"] > 1e9
    assert isinstance(meter_for("cuda"), CudaMeter)
