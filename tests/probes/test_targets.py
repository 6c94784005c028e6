"""What a CUDA run saves, emulated on tensors without a device."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from probes import build, traced
from probes.cpu_memory import profiled_peak
from probes.discover import discover
from probes.recorder import Recorder
from probes.tape import Tape
from probes.target import Target
from probes.targets import AttentionError, CudaFunctions, attention_backend, cpu_scratch, cuda_scratch
from probes.workload import from_request, reduced_copy

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
B, H, S, D = 2, 3, 40, 64


def meta(*shape: int, dtype: torch.dtype = BF16, grad: bool = True) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=dtype, requires_grad=grad)


@contextlib.contextmanager
def saving(target: Target, *, autocast: bool = True) -> Iterator[list[torch.Tensor]]:
    """Collects what autograd saves on the target."""
    saved: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved.append(t)
        return t

    context = torch.autocast("cpu", BF16) if autocast else contextlib.nullcontext()
    with context, CudaFunctions(target), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield saved


def shapes(saved: list[torch.Tensor]) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    return [(t.dtype, tuple(t.shape)) for t in saved]


# Choice of the attention backend -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "given"),
    [
        ("flash", {}),
        ("flash", {"dtype": FP16}),
        ("flash", {"head_dim": 256, "head_dim_v": 256}),
        ("flash", {"gqa": True}),
        ("flash", {"capability": (12, 0)}),
        ("efficient", {"has_mask": True}),
        ("efficient", {"dtype": FP32}),
        ("efficient", {"head_dim": 264, "head_dim_v": 264}),
        ("efficient", {"head_dim_v": 32}),
        ("efficient", {"dtype": FP16, "capability": (7, 5)}),
        ("math", {"capability": (7, 5)}),
        ("math", {"has_mask": True, "head_dim": 36, "head_dim_v": 36}),
        ("math", {"has_mask": True, "gqa": True}),
    ],
)
def test_auto_takes_the_first_backend_that_accepts_the_tensors(expected: str, given: dict[str, Any]) -> None:
    options = {"dtype": BF16, "head_dim": 64, "head_dim_v": 64, "has_mask": False, "gqa": False} | given
    target = Target("cuda", options.pop("capability", (9, 0)))
    assert attention_backend(target, **options) == expected


@pytest.mark.parametrize("backend", ["flash", "efficient", "cudnn", "math"])
def test_a_backend_that_was_asked_for_is_taken_where_it_accepts_the_tensors(backend: str) -> None:
    assert attention_backend(Target("cuda", attention=backend), BF16, 64, 64, False, False) == backend


@pytest.mark.parametrize(
    ("backend", "given", "usable"),
    [
        ("flash", {"has_mask": True}, "efficient, cudnn, math"),
        ("flash", {"dtype": FP32}, "efficient, math"),
        ("cudnn", {"head_dim": 192, "head_dim_v": 192}, "flash, efficient, math"),
        ("efficient", {"head_dim": 36, "head_dim_v": 36}, "flash, math"),
        ("flash", {"capability": (7, 5), "dtype": FP16}, "efficient, math"),
    ],
)
def test_a_backend_that_does_not_accept_the_tensors_is_refused_with_the_usable_ones(
    backend: str, given: dict[str, Any], usable: str
) -> None:
    options = {"dtype": BF16, "head_dim": 64, "head_dim_v": 64, "has_mask": False, "gqa": False} | given
    target = Target("cuda", options.pop("capability", (9, 0)), backend)
    with pytest.raises(AttentionError, match=f"--attention {backend} .*usable: {usable}$"):
        attention_backend(target, **options)


def test_the_refusal_reaches_the_caller_of_scaled_dot_product_attention() -> None:
    q = meta(B, H, S, D)
    with saving(Target("cuda", attention="flash")), pytest.raises(AttentionError, match="masked"):
        F.scaled_dot_product_attention(q, q, q, attn_mask=meta(S, S, dtype=torch.bool, grad=False))


# What attention saves ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "log_sum_exp"), [("flash", (B, H, S)), ("efficient", (B, H, 64)), ("cudnn", (B, H, S, 1))]
)
def test_attention_saves_query_key_value_output_and_the_backends_log_sum_exp(
    backend: str, log_sum_exp: tuple[int, ...]
) -> None:
    q, k, v = (meta(B, H, S, D) for _ in range(3))
    with saving(Target("cuda", attention=backend)) as saved:
        F.scaled_dot_product_attention(q, k, v)
    found = shapes(saved)
    assert found.count((BF16, (B, H, S, D))) == 4
    assert found.count((FP32, log_sum_exp)) == 1
    rest = (
        sum(t.numel() * t.element_size() for t in saved) - 4 * B * H * S * D * 2 - 4 * torch.Size(log_sum_exp).numel()
    )
    assert rest <= 32  # seeds and offsets


def test_math_attention_saves_the_score_matrix() -> None:
    q, k, v = (meta(B, H, S, D) for _ in range(3))
    with saving(Target("cuda", attention="math")) as saved:
        F.scaled_dot_product_attention(q, k, v)
    assert any(t.shape == (B, H, S, S) for t in saved)


def test_attention_in_float32_is_computed_in_half_precision_under_autocast() -> None:
    q = meta(B, H, S, D, dtype=FP32)
    with saving(Target("cuda")) as saved:
        out = F.scaled_dot_product_attention(q, q, q)
    assert out.dtype is BF16
    assert (BF16, (B, H, S)) not in shapes(saved)
    assert (FP32, (B, H, S)) in shapes(saved)


def test_a_boolean_mask_is_saved_as_a_bias_in_the_querys_dtype_once_for_all_heads() -> None:
    q = meta(B, H, S, D)
    mask = meta(B, 1, S, S, dtype=torch.bool, grad=False)
    with saving(Target("cuda")) as saved:
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    (bias,) = [t for t in saved if t.shape[-2:] == (S, S)]
    assert bias.dtype is BF16
    assert bias.untyped_storage().nbytes() == B * S * S * 2


def test_efficient_attention_repeats_the_keys_of_grouped_queries_and_flash_does_not() -> None:
    q, kv = meta(B, 4, S, D), meta(B, 2, S, D)
    for backend, heads in (("flash", 2), ("math", 4)):
        with saving(Target("cuda", attention=backend)) as saved:
            F.scaled_dot_product_attention(q, kv, kv, enable_gqa=True)
        assert any(t.dim() == 4 and t.shape[1] == heads and t.shape[2] == S for t in saved), backend


def test_attention_arguments_may_be_keywords() -> None:
    q = meta(B, H, S, D)
    with saving(Target("cuda")) as by_keyword:
        F.scaled_dot_product_attention(query=q, key=q, value=q, dropout_p=0.0, is_causal=False, scale=0.5)
    with saving(Target("cuda")) as by_position:
        F.scaled_dot_product_attention(q, q, q, None, 0.0, False)
    assert shapes(by_keyword) == shapes(by_position)


# Dropout -------------------------------------------------------------------------------------------------------------


def test_dropout_saves_a_mask_of_one_byte_an_element_and_nothing_else() -> None:
    x = meta(B, S, D)
    with saving(Target("cuda")) as saved:
        nn.Dropout(0.1)(x)
    assert shapes(saved) == [(torch.bool, (B, S, D))]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.dropout(x, p=0.1),
        lambda x: F.dropout(input=x, p=0.1, training=True),
        lambda x: F.dropout(x, 0.1, True),
        lambda x: torch.dropout(x, 0.1, True),
        lambda x: torch.dropout(x, p=0.1, train=True),
    ],
)
def test_dropout_is_native_however_it_is_called(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with saving(Target("cuda")) as saved:
        call(meta(B, S, D))
    assert shapes(saved) == [(torch.bool, (B, S, D))]


@pytest.mark.parametrize("module", [nn.Dropout(0.0), nn.Dropout(0.5).eval()])
def test_dropout_that_drops_nothing_saves_nothing(module: nn.Module) -> None:
    with saving(Target("cuda")) as saved:
        out = module(meta(B, S, D))
    assert out.shape == (B, S, D)
    assert saved == []


# Norms and other lists of autocast -----------------------------------------------------------------------------------


def test_layer_norm_runs_in_float32_under_autocast_and_saves_a_float32_copy_of_its_input() -> None:
    norm = nn.LayerNorm(D, device="meta", dtype=BF16)
    with saving(Target("cuda")) as saved:
        out = norm(meta(B, S, D))
    assert out.dtype is FP32
    assert (FP32, (B, S, D)) in shapes(saved)
    assert (BF16, (B, S, D)) not in shapes(saved)


def test_layer_norm_stays_in_bf16_without_autocast() -> None:
    norm = nn.LayerNorm(D, device="meta", dtype=BF16)
    with saving(Target("cuda"), autocast=False) as saved:
        out = norm(meta(B, S, D))
    assert out.dtype is BF16
    assert (BF16, (B, S, D)) in shapes(saved)


def test_group_norm_runs_in_float32_under_autocast() -> None:
    norm = nn.GroupNorm(4, 16, device="meta", dtype=BF16)
    with saving(Target("cuda")) as saved:
        out = norm(meta(B, 16, 8, 8))
    assert out.dtype is FP32
    assert (FP32, (B, 16, 8, 8)) in shapes(saved)


@pytest.mark.parametrize("by_keyword", [False, True])
def test_softmax_and_sums_return_float32_without_a_copy_of_their_input(by_keyword: bool) -> None:
    x = meta(B, S)
    with saving(Target("cuda")) as saved:
        out = F.softmax(input=x, dim=-1) if by_keyword else F.softmax(x, -1)
        total = x.sum()
    assert (out.dtype, total.dtype) == (FP32, FP32)
    assert all(t.dtype is FP32 for t in saved)


def test_rms_norm_is_fused_and_saves_one_number_a_row_when_the_weight_has_the_inputs_dtype() -> None:
    norm = nn.RMSNorm(D, device="meta", dtype=BF16)
    with saving(Target("cuda"), autocast=False) as saved:
        norm(meta(B, S, D))
    assert sorted(shapes(saved), key=str) == sorted([(BF16, (B, S, D)), (BF16, (D,)), (FP32, (B, S, 1))], key=str)


def test_rms_norm_is_one_kernel() -> None:
    recorder, norm = Recorder("meta"), nn.RMSNorm(D, device="meta")
    with recorder, CudaFunctions(Target("cuda")):
        norm(meta(B, S, D, dtype=FP32))
    assert len(recorder.op_at) == 1


def test_rms_norm_is_composite_and_saves_a_float32_copy_when_the_dtypes_differ() -> None:
    norm = nn.RMSNorm(D, device="meta", dtype=FP32)
    with saving(Target("cuda"), autocast=False) as saved, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        norm(meta(B, S, D))
    assert (FP32, (B, S, D)) in shapes(saved)


def test_rms_norm_with_a_frozen_weight_keeps_one_float32_copy_of_its_input_under_autocast() -> None:
    norm = nn.RMSNorm(D, device="meta", dtype=BF16).requires_grad_(False)
    with saving(Target("cuda")) as saved:
        out = F.rms_norm(input=meta(B, S, D), normalized_shape=(D,), weight=norm.weight, eps=1e-6)
    assert out.dtype is FP32
    large = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in saved if t.shape == (B, S, D)}
    assert list(large.values()) == [4 * B * S * D]


# Casts of weights ----------------------------------------------------------------------------------------------------


def _cast_births(layer: nn.Linear, *, by_keyword: bool = False) -> Tape:
    recorder = Recorder("meta")
    x = meta(B, 8)
    with recorder, torch.autocast("cpu", BF16), CudaFunctions(Target("cuda")):
        for _ in range(3):
            if by_keyword:
                F.linear(input=x, weight=layer.weight)
            else:
                layer(x)
    with recorder, CudaFunctions(Target("cuda")):
        meta(1) * 1.0
    return recorder.tape(recorder.now, recorder.now)


@pytest.mark.parametrize("by_keyword", [False, True])
def test_the_cast_of_a_trained_float32_weight_is_made_once_for_an_autocast_context(by_keyword: bool) -> None:
    layer = nn.Linear(8, 24, bias=False, device="meta")
    tape = _cast_births(layer, by_keyword=by_keyword)
    (cast,) = [i for i, size in enumerate(tape.size) if size == 8 * 24 * 2]
    outputs = [i for i, size in enumerate(tape.size) if size == B * 24 * 2]
    assert tape.death[cast] > max(tape.birth[o] for o in outputs)
    assert tape.death[cast] < tape.length


def test_the_cast_of_a_frozen_float32_weight_is_made_at_every_use() -> None:
    layer = nn.Linear(8, 24, bias=False, device="meta").requires_grad_(False)
    assert (_cast_births(layer).size == 8 * 24 * 2).sum() == 3


def test_a_weight_in_half_precision_is_not_cast() -> None:
    layer = nn.Linear(8, 24, bias=False, device="meta", dtype=BF16)
    assert (_cast_births(layer).size == 8 * 24 * 2).sum() == 0


# Scratch -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "expected"),
    [("flash", 4 * B * H * 128 * (64 + 1)), ("efficient", 4 * B * H * S * (D + 1)), ("cudnn", 0)],
)
def test_attentions_backward_takes_an_accumulator_and_row_sums(backend: str, expected: int) -> None:
    recorder = Recorder("meta", cuda_scratch)
    q, k, v = (meta(B, H, S, D) for _ in range(3))
    with recorder:
        with CudaFunctions(Target("cuda", attention=backend)):
            loss = F.scaled_dot_product_attention(q, k, v).sum()
        loss.backward()
    tape = recorder.tape(0, recorder.now)
    assert tape.size[tape.scratch].sum() == expected


# Both ways to trace --------------------------------------------------------------------------------------------------


def _both(model: str, layers: dict[str, Any]) -> tuple[Tape, Tape]:
    workload = dataclasses.replace(reduced_copy(from_request({"model": model})), precision="bf16")
    tapes = []
    for on_meta in (True, False):
        with torch.device("meta"), build.quiet():
            base = build.model_class(workload.family.model_class)(**build.config_of(workload) | layers)
        structure = discover(base, workload.family.regions)
        tapes.append(traced._trace(workload, Target("cuda"), base, structure, [], on_meta).tape)
    return tapes[0], tapes[1]


def test_meta_and_fake_tensors_give_the_same_tape() -> None:
    a, b = _both("sd3", {"num_layers": 2, "dual_attention_layers": [0]})
    assert sorted(a.size) == sorted(b.size)
    assert sorted(a.saved_bytes) == sorted(b.saved_bytes)
    assert (a.saved_storage >= 0).sum() == (b.saved_storage >= 0).sum()
    assert len(a.op_at) == len(b.op_at)
    assert a.op_flops.sum() == b.op_flops.sum()
    assert a.op_bytes.sum() == b.op_bytes.sum()
    assert list(a.calls) == list(b.calls)


def test_fake_tensors_also_count_a_models_small_host_tensors() -> None:
    """On fake tensors everything is on the CPU, so rotary tables that a model builds on the host look like the device's."""
    a, b = _both("z_image", {"n_layers": 1, "n_refiner_layers": 1})
    assert a.op_flops.sum() == b.op_flops.sum()
    assert a.size.sum() <= b.size.sum() <= a.size.sum() * 1.005


# Scratch on the CPU ---------------------------------------------------------------------------------------------------


def _beyond(run: Callable[[], Any]) -> int:
    """Bytes that a call holds at its peak beyond what it returns, by the profiler's allocator events."""
    kept: list[Any] = []
    peak = profiled_peak(lambda: kept.append(run()), 0)
    return peak.peak - peak.left


@pytest.mark.usefixtures("quick_collections")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("queries", "keys", "size"), [(20, 60, 16), (100, 60, 16), (191, 20, 24), (192, 513, 24), (1000, 700, 24)]
)
@pytest.mark.parametrize("layout", ["heads first", "tokens first"])
def test_scratch_of_the_cpus_attention_is_what_its_kernel_allocates(
    threads: int, queries: int, keys: int, size: int, layout: str
) -> None:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    q, k, v = (torch.randn(2, n, 3, size).transpose(1, 2) for n in (queries, keys, keys))
    gradient = torch.randn(2, 3, queries, size)
    if layout == "tokens first":
        gradient = gradient.transpose(1, 2).contiguous().transpose(1, 2)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out, sums = op(q, k, v)
        args = (gradient, q, k, v, out, sums, 0.0, False)
        assert _beyond(lambda: op(q, k, v)) == cpu_scratch(op.default, (q, k, v), {}, (out, sums))
        assert _beyond(lambda: backward(*args)) == cpu_scratch(backward.default, args, {}, ())
    finally:
        torch.set_num_threads(before)


def test_other_kernels_of_the_cpu_have_no_scratch_on_the_tape() -> None:
    x = torch.randn(4, 4)
    assert cpu_scratch(torch.ops.aten.mm.default, (x, x), {}, x @ x) == 0
