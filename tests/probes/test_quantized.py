"""Stand-ins for quantised linears: what they store, keep and give back."""

from __future__ import annotations

from importlib import resources
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from probes import quantized
from probes.quantized import StandIn, table
from probes.workload import ESTIMATED_PRECISIONS, NOT_YET, PRECISIONS, NotYetError, from_request

WIDTH, ROWS = 256, 64
FLOATS = ("bf16", "bf16-upcast", "fp16", "fp32")


def stand_in(precision: str) -> StandIn:
    linear = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    return StandIn(linear, table()[precision])


def saved_by(module: nn.Module, x: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    kept: list[torch.Tensor] = []
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
    ):
        out = module(x * 1)
    return kept, out


def test_every_precision_is_described_or_refused_with_a_reason() -> None:
    assert set(table()) | set(FLOATS) | set(NOT_YET) == set(PRECISIONS)
    assert set(ESTIMATED_PRECISIONS) == set(PRECISIONS) - set(NOT_YET)
    assert all(facts.source for facts in table().values())


@pytest.mark.parametrize("precision", sorted(table()))
def test_backward_runs_and_reaches_the_input(precision: str) -> None:
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    _, out = saved_by(stand_in(precision), x)
    out.sum().backward()
    assert x.grad is not None
    assert out.shape == (ROWS, WIDTH)


@pytest.mark.parametrize("precision", sorted(table()))
def test_what_is_kept_per_weight_is_what_the_table_says(precision: str) -> None:
    facts = table()[precision]
    kept, _ = saved_by(stand_in(precision), torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True))
    copies = [t for t in kept if t.dtype is torch.uint8]
    assert sum(t.numel() for t in copies) == round(facts.copy_bytes * WIDTH * WIDTH)
    inputs = [t for t in kept if t.shape == (ROWS, WIDTH) and t.dtype is torch.bfloat16]
    assert len(inputs) == (2 if facts.scales_input else int(facts.saves_input))


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, 12), (torch.float32, 12)])
def test_dynamic_float8_keeps_its_input_in_pieces_and_its_dtype(dtype: torch.dtype, expected: int) -> None:
    kept, out = saved_by(stand_in("fp8-torchao"), torch.randn(ROWS, WIDTH, dtype=dtype, requires_grad=True))
    assert out.dtype is dtype
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept if t.numel() == ROWS * WIDTH}
    assert sum(storages.values()) == expected * ROWS * WIDTH


def test_a_held_input_is_invisible_to_checkpoints() -> None:
    kept, out = saved_by(stand_in("int8-bnb"), torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True))
    assert not [t for t in kept if t.numel() == ROWS * WIDTH]
    assert out.grad_fn is not None
    held: Any = out.grad_fn
    assert held.held.shape == (ROWS, WIDTH)
    out.sum().backward()
    assert held.held is None


@pytest.mark.parametrize(
    ("precision", "rows", "result"),
    [
        ("int8-sdnq", 64, torch.float32),
        ("int8-sdnq-hadamard", 64, torch.float32),
        ("int8-sdnq-hadamard", 8, torch.bfloat16),
        ("nf4", 64, torch.float32),
        ("fp8-torchao", 64, torch.float32),
        ("fp8wo-torchao", 64, torch.bfloat16),
        ("int8-quanto", 64, torch.bfloat16),
        ("fp8-cast", 64, torch.bfloat16),
    ],
)
def test_behind_a_float32_norm_some_packages_stay_in_float32(precision: str, rows: int, result: torch.dtype) -> None:
    """As the real modules do (`tests/probes/test_quantized_packages.py`)."""
    with FakeTensorMode():  # the product of bf16 matrices with a float32 result exists on GPUs only
        x = torch.empty(rows, WIDTH, requires_grad=True)
        kept, out = saved_by(stand_in(precision), x)
        assert out.dtype is result
        inputs = [t for t in kept if t.shape == (rows, WIDTH)]
        assert all(t.dtype is torch.float32 for t in inputs)
        out.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is torch.float32


@pytest.mark.parametrize("precision", ["int8-sdnq-hadamard", "fp8-torchao"])
def test_a_streamed_linear_multiplies_as_ramtorch_does_whatever_its_weights_are(precision: str) -> None:
    model = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH, device="meta")})
    workload = from_request({"model": "flux", "weights_offload": "ramtorch", "precision": precision})
    facts = quantized.described_linears(model, workload)["a"]
    linear = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    kept, out = saved_by(StandIn(linear, facts), torch.randn(ROWS, WIDTH, requires_grad=True))
    assert out.dtype is torch.bfloat16
    assert [(tuple(t.shape), t.dtype) for t in kept] == [((ROWS, WIDTH), torch.bfloat16)]
    stored = round(WIDTH * WIDTH * table()[precision].weight_bytes)
    assert quantized.host_weight_bytes(model, workload) == (stored, stored)
    plain = from_request({"model": "flux", "weights_offload": "ramtorch"})
    assert quantized.host_weight_bytes(model, plain) == (2 * WIDTH * WIDTH, 0)


def test_names_that_sdnq_leaves_alone_are_names_and_not_patterns() -> None:
    def linears(*names: str) -> dict[str, nn.Module]:
        return {name: nn.Linear(256, 256, device="meta") for name in names}

    class Some(nn.Module):
        _skip_layerwise_casting_patterns = ("pos_embed", "norm")

    def model(name: str) -> nn.Module:
        found: nn.Module = type(name, (Some,), {})()
        block = nn.ModuleDict({"norm1": nn.ModuleDict(linears("linear")), "norm": nn.ModuleDict(linears("linear"))})
        block.update(linears("proj_out", "ff"))
        found.blocks = nn.ModuleList([block])
        found.proj_out = linears("x")["x"]
        return found

    inside = {f"blocks.0.{name}" for name in ("norm1.linear", "proj_out", "ff")}
    assert quantized.quantized_names(model("SD3Transformer2DModel"), "int8-sdnq") == inside
    assert quantized.quantized_names(model("ChromaTransformer2DModel"), "int8-sdnq") == inside | {
        "blocks.0.norm.linear"
    }


def test_a_share_of_the_linears_is_streamed_from_the_models_beginning_on() -> None:
    model = nn.ModuleDict({name: nn.Linear(64, 64, device="meta") for name in "abcdefgh"})
    part = from_request({"model": "flux", "weights_offload": "ramtorch:30", "precision": "int8-quanto"})
    assert part.streamed_percent == 30
    assert quantized.streamed(model, part) == ["a", "b"]
    found = quantized.described_linears(model, part)
    stored = {name: facts.weight_bytes for name, facts in found.items()}
    assert stored["a"] == stored["b"] == 0
    assert all(stored[name] == quantized.table()["int8-quanto"].weight_bytes for name in "cdefgh")
    stored_on_host = round(2 * 64 * 64 * quantized.table()["int8-quanto"].weight_bytes)
    assert quantized.host_weight_bytes(model, part) == (stored_on_host, stored_on_host)
    assert not quantized.described_linears(model, from_request({"model": "flux"}))


def test_linears_that_the_package_skips_stay_as_they_are() -> None:
    model = nn.ModuleDict({"odd": nn.Linear(30, 64, device="meta"), "even": nn.Linear(64, 64, device="meta")})
    assert quantized.quantized_names(model, "fp8-torchao") == {"even"}
    assert quantized.quantized_names(model, "int8-quanto") == {"odd", "even"}


def test_pytorchs_int4_product_still_has_no_derivative() -> None:
    """Why int4-torchao is refused; the operator for CUDA is declared beside this one."""
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.zeros(64, 256, dtype=torch.int32), 2)
    scales = torch.ones(2, 64, 2, dtype=torch.bfloat16)
    x = torch.randn(4, 256, dtype=torch.bfloat16, requires_grad=True)
    out = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, 128, scales)
    with pytest.raises(RuntimeError, match="derivative for aten::_weight_int4pack_mm_for_cpu is not implemented"):
        out.sum().backward()
    declared = resources.files("torchgen").joinpath("packaged", "autograd", "derivatives.yaml").read_text()
    assert "_weight_int4pack_mm" not in declared
    with pytest.raises(NotYetError, match=r"int4-torchao cannot be estimated yet .* has no derivative"):
        from_request({"model": "flux", "precision": "int4-torchao"})
