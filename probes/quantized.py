"""Quantised and host-resident (RamTorch) linears in a trace: what they store, keep for backward and need for a moment.

The trace does not run the quantisation packages. A frozen linear is replaced by a stand-in that allocates and saves what the
package's linear does, per weight and per input element as in `data/quantized.csv` (measured on the real modules, or read from
their source; each row says which). Modules that a package skips are in `data/quantized_skips.csv`.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from probes import fused, resources
from probes.workload import Workload

SMALLEST_SDNQ_WEIGHT = 16384
SMALLEST_SDNQ_INPUT = 32
SMALLEST_QUANTISED_ROWS = 32
"""Below, sdnq multiplies with the dequantised weight, as an ordinary linear does."""
ADDS_BIAS = ("quanto",)
"""Packages that add the bias in an operator of its own."""
HADAMARD_GROUP = 256
ROW_LAUNCHES = 12
"""Operators around a product with quantised rows beyond those written out here: sdnq 0.2.8 runs 16 in forward with Hadamard
(14 without) and 24 (22) in backward, weight included; counted on the CPU."""
WEIGHT_LAUNCHES = 7


@dataclass(frozen=True)
class QuantizedLinear:
    """Bytes per weight unless said otherwise."""

    precision: str
    package: str
    weight_bytes: float
    """Stored, scales included."""
    copy_bytes: float
    """Kept from forward to backward."""
    saves_input: bool
    """Keeps its bf16 input although the weight is frozen."""
    holds_input: bool
    """Keeps it as a plain attribute, which no checkpoint releases."""
    forward_transient_bytes: float
    backward_transient_bytes: float
    quantises_rows: bool
    """Activations (and their gradients) are quantised row by row in eager operators."""
    hadamard: bool
    """They are rotated first."""
    scales_input: bool
    """The input is scaled to float8 as a whole, by operators that autograd records; the result has the input's dtype."""
    casts_input: bool
    """Autocast casts the input before the package sees it; otherwise the package takes the call first."""
    returns_input_dtype: bool
    """The result has the input's dtype, whatever autocast says: behind a float32 norm the whole feed-forward is float32."""
    requantises_weight: str
    """The weight is quantised anew for the product: ``backward``, ``both`` or ``no``."""
    forward_launches: int
    """Host time of the package's Python (tensor subclasses, compiled regions) in operators, beyond those written out here:
    measured on the CPU by `benchmarks/host_cost.py`; for sdnq, whose compiled kernels cost more to launch on a GPU, from
    the published step times of Z-Image Turbo."""
    backward_launches: int
    note: str
    source: str


@cache
def table() -> dict[str, QuantizedLinear]:
    """By the trainer's name of the precision."""
    return {
        r["precision"]: QuantizedLinear(
            precision=r["precision"],
            package=r["package"],
            weight_bytes=float(r["weight_bytes"]),
            copy_bytes=float(r["copy_bytes"]),
            saves_input=r["saves_input"] == "1",
            holds_input=r["saves_input"] == "2",
            forward_transient_bytes=float(r["forward_transient_bytes"]),
            backward_transient_bytes=float(r["backward_transient_bytes"]),
            quantises_rows=r["quantises_rows"] == "1",
            hadamard=r["hadamard"] == "1",
            scales_input=r["scales_input"] == "1",
            casts_input=r["casts_input"] == "1",
            returns_input_dtype=r["returns_input_dtype"] == "1",
            requantises_weight=r["requantises_weight"],
            forward_launches=int(r["forward_launches"]),
            backward_launches=int(r["backward_launches"]),
            note=r["note"],
            source=r["source"],
        )
        for r in csv.DictReader(resources.text("quantized.csv").splitlines())
    }


@cache
def _skips() -> dict[tuple[str, str], str]:
    rows = csv.DictReader(resources.text("quantized_skips.csv").splitlines())
    return {(r["package"], r["class"]): r["patterns"] for r in rows}


def quantized_names(model: nn.Module, precision: str) -> set[str]:
    """Qualified names of the linears that the precision's package quantises in this model (before adapters)."""
    facts = table().get(precision)
    if facts is None:
        return set()
    name_of_class = type(model).__name__
    patterns = _skips().get((facts.package, name_of_class)) or _skips().get((facts.package, "*"), "")
    if facts.package == "sdnq" and (facts.package, name_of_class) not in _skips():
        # sdnq takes these for names of modules, not for patterns: "norm" does not keep norm1.linear.
        casting = getattr(model, "_skip_layerwise_casting_patterns", None) or ()
        patterns = "|".join([patterns, *(rf"(^|\.){re.escape(name)}(\.|$)" for name in casting)])
    kept_float32 = getattr(model, "_keep_in_fp32_modules", None) or ()
    found = set()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or (patterns and re.search(patterns, name)):
            continue
        if any(part in name.split(".") for part in kept_float32):
            continue
        rows, columns = module.weight.shape
        if facts.package == "sdnq" and (rows * columns < SMALLEST_SDNQ_WEIGHT or columns < SMALLEST_SDNQ_INPUT):
            continue
        if facts.package == "torchao16" and (rows % 16 or columns % 16):
            continue
        found.add(name)
    return found


class StandIn(nn.Linear):
    """A frozen linear that costs what a quantised one does. Only for traces: its values mean nothing."""

    def __init__(self, like: nn.Linear, facts: QuantizedLinear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = like.in_features, like.out_features
        self.weight = like.weight
        self.bias = like.bias
        self.facts = facts

    @property
    def stored_bytes(self) -> int:
        """Of the quantised weight with its scales."""
        return round(self.weight.numel() * self.facts.weight_bytes)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.facts.scales_input and input.numel():
            _launch(self.facts.forward_launches, input)
            scaled: torch.Tensor = _ScaledProduct.apply(_to_float8(input), self.weight, input.dtype, self.facts)
            return scaled if self.bias is None else scaled + self.bias.to(scaled.dtype)
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else input.dtype
        if self.facts.casts_input or (self.facts.quantises_rows and _rows(input) < SMALLEST_QUANTISED_ROWS):
            input = input.to(autocast)
        dtype = input.dtype if self.facts.returns_input_dtype else autocast
        with torch.autocast("cpu", enabled=False):
            out: torch.Tensor = _Product.apply(input, self.weight, dtype, self.facts)
            return out if self.bias is None or self.facts.package not in ADDS_BIAS else out + self.bias.to(dtype)


def _to_float8(input: torch.Tensor) -> torch.Tensor:
    """One scale for the whole tensor, as torchao's ``_choose_scale_float8`` and ``_quantize_affine_float8`` compute it."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    scale = (input.abs().amax(tuple(range(input.dim())), keepdim=True) / limit).to(torch.float32)
    clamped = (input.to(torch.float32) / scale).clamp(min=-limit, max=limit)
    rounded: torch.Tensor = _Round.apply(clamped)
    return rounded


class _Round(torch.autograd.Function):
    """To float8; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor) -> torch.Tensor:
        return input.to(torch.float8_e4m3fn)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0]


class _ScaledProduct(torch.autograd.Function):
    """The product of float8 rows with the float8 weight: keeps the weight alone. Backward dequantises it."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, facts: QuantizedLinear
    ) -> torch.Tensor:
        ctx.facts, ctx.weight = facts, weight
        return torch.empty((*rows.shape[:-1], weight.shape[0]), dtype=dtype, device=rows.device)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        _launch(ctx.facts.backward_launches, gradient)
        _transient(gradient, ctx.weight, ctx.facts.backward_transient_bytes)
        return torch.matmul(gradient.to(torch.bfloat16), ctx.weight.to(torch.bfloat16)), None, None, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, facts: QuantizedLinear
    ) -> torch.Tensor:
        ctx.facts = facts
        ctx.weight = weight
        saved = []
        _launch(facts.forward_launches, input)
        _transient(input, weight, max(0.0, facts.forward_transient_bytes - facts.copy_bytes))
        if facts.requantises_weight == "both":
            _requantise(weight)
        if facts.copy_bytes:
            saved.append(_bytes(input, facts.copy_bytes * weight.numel()))
        out = _product(input, weight.t(), facts).to(dtype)
        if facts.saves_input:
            saved.append(input)
        if facts.holds_input:
            ctx.held = input
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        _ = ctx.saved_tensors
        ctx.held = None
        facts: QuantizedLinear = ctx.facts
        _launch(facts.backward_launches, gradient)
        _transient(gradient, ctx.weight, facts.backward_transient_bytes)
        if facts.requantises_weight != "no":
            _requantise(ctx.weight)
        return _product(gradient, ctx.weight, facts), None, None, None


def _product(rows: torch.Tensor, weight: torch.Tensor, facts: QuantizedLinear) -> torch.Tensor:
    """The matrix product; with quantised rows: rotated, row maxima, int8 copy, product, scaled back. The elementwise passes
    leave no full-size intermediate (on CUDA the package compiles them), but each is still launched by the host."""
    if not facts.quantises_rows:
        return torch.matmul(rows.to(weight.dtype), weight)
    if facts.hadamard:
        rows = _rotate(rows)
    scale = rows.amax(-1, keepdim=True)
    quantised = rows.to(torch.int8)
    for _ in range(ROW_LAUNCHES):
        scale.mul_(1)
    out = _matmul(rows, weight)
    del quantised
    return out.mul_(scale)


def _matmul(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product in the dtype of the rows."""
    if rows.dtype == weight.dtype:
        return torch.matmul(rows, weight)
    stored = torch.empty(1, dtype=weight.dtype, device=rows.device).expand(_rows(rows), rows.shape[-1])
    return torch.mm(stored, weight, out_dtype=rows.dtype).view(*rows.shape[:-1], weight.shape[-1])


def _rows(input: torch.Tensor) -> int:
    return input.numel() // input.shape[-1]


def _rotate(rows: torch.Tensor) -> torch.Tensor:
    size = math.gcd(HADAMARD_GROUP, rows.shape[-1])
    groups = rows.reshape(-1, size)
    matrix = torch.empty(groups.shape[-1], groups.shape[-1], dtype=rows.dtype, device=rows.device)
    return torch.matmul(groups, matrix).reshape(rows.shape)


def _requantise(weight: torch.Tensor) -> None:
    """The stored weight quantised anew along its other axis: an int8 copy for a moment."""
    scale = weight.amax(-1, keepdim=True)
    copy = weight.to(torch.int8)
    for _ in range(WEIGHT_LAUNCHES):
        scale.mul_(1)
    del copy


def _launch(count: int, like: torch.Tensor) -> None:
    """Operators that move nothing: they stand for the host's time."""
    if count:
        nothing = torch.empty(1, device=like.device)
        for _ in range(count):
            nothing.mul_(1)


def _bytes(like: torch.Tensor, count: float) -> torch.Tensor:
    return torch.empty(max(1, round(count)), dtype=torch.uint8, device=like.device)


def _transient(like: torch.Tensor, weight: torch.Tensor, per_weight: float) -> None:
    """Allocates, passes over and frees what (de)quantising needs for a moment."""
    if per_weight:
        _bytes(like, per_weight * weight.numel()).zero_()


_PLAIN = QuantizedLinear(
    "bf16", "", 2.0, 0.0, False, False, 0.0, 0.0, False, False, False, True, False, "no", 0, 0, "", "an ordinary linear"
)


def _streamed(facts: QuantizedLinear) -> QuantizedLinear:
    """The same linear under RamTorch: its weight waits on the host and passes through a buffer in forward and in backward, and
    its input is always kept, even though the weight is frozen (read from its source). The trainer converts a base after it is
    quantised, so the product is RamTorch's own, with the weight dequantised for it."""
    dequantised = 0.0 if facts is _PLAIN else 2.0
    return dataclasses.replace(
        facts,
        weight_bytes=0.0,
        copy_bytes=0.0,
        saves_input=True,
        holds_input=False,
        forward_transient_bytes=facts.weight_bytes + dequantised,
        backward_transient_bytes=facts.weight_bytes + dequantised,
        quantises_rows=False,
        hadamard=False,
        scales_input=False,
        casts_input=True,
        returns_input_dtype=False,
        requantises_weight="no",
        forward_launches=0,
        backward_launches=0,
    )


def described_linears(model: nn.Module, workload: Workload) -> dict[str, QuantizedLinear]:
    """Qualified names of the linears (before adapters) that a trace replaces by stand-ins, with what they cost."""
    quantised = quantized_names(model, workload.precision)
    found = {name: table()[workload.precision] for name in quantised}
    for name in streamed(model, workload):
        facts = found.pop(name, _PLAIN)
        found[name] = _streamed(facts)
    return found


def streamed(model: nn.Module, workload: Workload) -> list[str]:
    """Qualified names of the linears whose weights RamTorch keeps on the host: the given share of them, from the model's
    beginning on. How the trainer rounds that share is not known; a part of a linear stays."""
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return linears[: len(linears) * workload.streamed_percent // 100]


def host_weight_bytes(model: nn.Module, workload: Workload) -> tuple[int, int]:
    """Weights that wait in host memory: bytes in all, and of quantised ones."""
    names = quantized_names(model, workload.precision)
    plain = quantised = 0.0
    for name in streamed(model, workload):
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        if name in names:
            quantised += linear.weight.numel() * table()[workload.precision].weight_bytes
        else:
            plain += linear.weight.numel() * _PLAIN.weight_bytes
    return round(plain + quantised), round(quantised)


def replace(model: nn.Module, workload: Workload) -> int:
    """Puts stand-ins in place of the described linears; how many."""
    found = described_linears(model, workload)
    for name, facts in found.items():
        parent, _, key = name.rpartition(".")
        owner = model.get_submodule(parent)
        linear = owner.get_submodule(key)
        assert isinstance(linear, nn.Linear)
        if isinstance(linear, fused.Slice):
            continue
        setattr(owner, key, StandIn(linear, facts))
    return len(found)
