"""What a quantised linear costs the host, in operators: the time that the package's Python takes, measured on the CPU.

    python benchmarks/host_cost.py

Runs the real module of each installed package on tensors so small that computing them costs next to nothing, forward and
backward, and divides by the time of an average eager operator on the same machine. An ordinary linear is printed for comparison.
Needs the packages (torchao, sdnq, optimum-quanto, bitsandbytes); one that is missing is left out, and says so.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

SIZE, ROWS = 64, 32
VIEWS = (
    "view",
    "t",
    "transpose",
    "_unsafe_view",
    "expand",
    "reshape",
    "detach",
    "unsqueeze",
    "squeeze",
    "slice",
    "alias",
)


class _Counter(TorchDispatchMode):
    """Counts operators that are not views."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func.overloadpacket.__name__ not in VIEWS
        return func(*args, **(kwargs or {}))


class _Chain(nn.Module):
    """What an average operator is measured on: linears, normalisation, element-wise operators."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([_linear() for _ in range(4)])
        self.norm = nn.LayerNorm(SIZE, elementwise_affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            x = x + torch.nn.functional.silu(linear(self.norm(x) * 1.1 + 0.1))
        return x


def _linear() -> nn.Linear:
    return nn.Linear(SIZE, SIZE, dtype=torch.bfloat16).requires_grad_(False)


def _quickest(call: Callable[[], object], repeats: int = 9, runs: int = 200) -> float:
    """Seconds a call, the smallest of several means: noise only adds."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(runs):
            call()
        found.append((time.perf_counter() - start) / runs)
    return min(found)


def measure(module: nn.Module) -> tuple[float, float, int]:
    """Seconds of forward, of forward and backward, and operators of both, under bf16 autocast."""
    x = torch.randn(1, ROWS, SIZE, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        gradient = torch.ones_like(module(x))
        forward = _quickest(lambda: module(x))
        both = _quickest(lambda: module(x).backward(gradient))
        with _Counter() as counter:
            module(x).backward(gradient)
    return forward, both, counter.count


def _torchao(config_name: str) -> nn.Module:
    from torchao import quantization
    from torchao.quantization import quant_api

    quant_api._check_hardware_support = lambda granularity: None
    model = nn.Sequential(_linear())
    quantization.quantize_(model, getattr(quantization, config_name)())
    return model


class _ScaledProduct(torch.autograd.Function):
    """torch._scaled_mm with a backward, which PyTorch does not have."""

    @staticmethod
    def forward(ctx: Any, product: Any, rows: torch.Tensor, weight: torch.Tensor, options: dict[str, Any]) -> Any:
        ctx.weight, ctx.scale = weight, options["scale_b"]
        return product(rows, weight, **options)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        weight = (ctx.weight.to(torch.float32) * ctx.scale).to(gradients[0].dtype)
        return None, gradients[0] @ weight.t(), None, None


@contextlib.contextmanager
def differentiable_scaled_mm() -> Any:
    """Gives PyTorch's scaled product a derivative for a while."""
    product = torch._scaled_mm
    torch._scaled_mm = lambda rows, weight, **options: _ScaledProduct.apply(product, rows, weight, options)
    try:
        yield
    finally:
        torch._scaled_mm = product


def _quanto() -> nn.Module:
    from optimum.quanto import freeze, qint8, quantize

    model = nn.Sequential(_linear())
    quantize(model, weights=qint8)
    freeze(model)
    return model.requires_grad_(False)


def _sdnq(**settings: Any) -> nn.Module:
    from sdnq.training import sdnq_training_post_load_quant

    model: nn.Module = sdnq_training_post_load_quant(
        nn.Sequential(_linear()),
        weights_dtype="int8",
        use_quantized_matmul=True,
        minimum_allowed_numel=0,
        **settings,
    )
    return model


def _nf4() -> nn.Module:
    import bitsandbytes

    source = _linear()
    module: nn.Module = bitsandbytes.nn.Linear4bit(SIZE, SIZE, compute_dtype=torch.bfloat16, quant_type="nf4")
    module.weight = bitsandbytes.nn.Params4bit(source.weight.data, requires_grad=False, quant_type="nf4")
    module.bias = source.bias
    return module.to("cpu")


CASES: dict[str, Callable[[], nn.Module]] = {
    "plain": _linear,
    "fp8-torchao": lambda: _torchao("Float8DynamicActivationFloat8WeightConfig"),
    "fp8wo-torchao": lambda: _torchao("Float8WeightOnlyConfig"),
    "int8-torchao": lambda: _torchao("Int8WeightOnlyConfig"),
    "int8-quanto": _quanto,
    "int8-sdnq": lambda: _sdnq(group_size=32),
    "int8-sdnq-hadamard": lambda: _sdnq(group_size=-1, use_hadamard=True),
    "nf4": _nf4,
}


def main() -> None:
    os.environ.setdefault("SDNQ_USE_TORCH_COMPILE", "0")  # operators can be counted only where nothing is compiled
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    _, both, operators = measure(_Chain())
    unit = both / operators
    table = Table(title=f"an average operator takes {unit * 1e6:.1f} us here")
    for name in ("linear", "forward", "backward", "operators run", "note"):
        table.add_column(name, justify="left" if name in ("linear", "note") else "right")
    for name, build in CASES.items():
        try:
            with differentiable_scaled_mm():
                forward, both, operators = measure(build())
        except ImportError as error:
            table.add_row(name, "", "", "", f"left out: {error}")
            continue
        table.add_row(name, f"{forward / unit:.1f}", f"{(both - forward) / unit:.1f}", str(operators), "")
    Console().print(table)
    print("forward and backward: host time in average operators")


if __name__ == "__main__":
    main()
