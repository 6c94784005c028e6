"""The table of optimizers (`data/optimizers.csv`) beside the real packages: state bytes of parameters of many shapes.

    python benchmarks/optimizer_state.py [NAME ...]

Steps every optimizer of each installed package on the CPU and compares the bytes of its state tensors with what
`estimators.optimizers` computes; one line for every difference of more than 1 %. A package that is missing is left out, and
says so: came-pytorch, prodigyopt, prodigy-plus-schedule-free, lion-pytorch, torch-optimi, bitsandbytes, dadaptation,
transformers, sdnq, torchao, pytorch-optimizer. Also prints the temporaries of a step, a trained element, which on CUDA
differ where a package has kernels of its own. Exit status 1 where something differs.
"""

from __future__ import annotations

import gc
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from estimators.optimizers import state_tensors
from probes.optimizer_facts import table
from probes.step import make_optimizer, runs_as_named

SHAPES = ((512, 1024), (16, 3072), (3072, 16), (5000,), (1000,), (8, 64), (64, 32, 3, 3), (1000, 17))
PACKAGES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "adamw8bit": ("bitsandbytes.optim", "AdamW8bit", {}),
    "bnb-adamw": ("bitsandbytes.optim", "AdamW", {}),
    "lion8bit": ("bitsandbytes.optim", "Lion8bit", {}),
    "bnb-lion": ("bitsandbytes.optim", "Lion", {}),
    "bnb-adagrad8bit": ("bitsandbytes.optim", "Adagrad8bit", {}),
    "bnb-adagrad": ("bitsandbytes.optim", "Adagrad", {}),
    "bnb-ademamix8bit": ("bitsandbytes.optim", "AdEMAMix8bit", {}),
    "bnb-ademamix": ("bitsandbytes.optim", "AdEMAMix", {}),
    "optimi-adamw": ("optimi", "AdamW", {"lr": 1e-3, "kahan_sum": True, "foreach": False}),
    "optimi-lion": ("optimi", "Lion", {"lr": 1e-3, "kahan_sum": True, "foreach": True}),
    "optimi-stableadamw": ("optimi", "StableAdamW", {"lr": 1e-3, "kahan_sum": True, "foreach": True}),
    "optimi-radam": ("optimi", "RAdam", {"lr": 1e-3, "kahan_sum": True, "foreach": True}),
    "optimi-ranger": ("optimi", "Ranger", {"lr": 1e-3, "kahan_sum": True, "foreach": True}),
    "optimi-adan": ("optimi", "Adan", {"lr": 1e-3, "kahan_sum": True, "foreach": True}),
    "optimi-sgd": ("optimi", "SGD", {"lr": 1e-3, "kahan_sum": True, "foreach": True}),
    "ao-adamw8bit": ("torchao.optim", "AdamW8bit", {}),
    "ao-adamw4bit": ("torchao.optim", "AdamW4bit", {}),
    "ao-adamwfp8": ("torchao.optim", "AdamWFp8", {}),
    "prodigy": ("prodigyplus", "ProdigyPlusScheduleFree", {}),
    "prodigyopt": ("prodigyopt", "Prodigy", {}),
    "prodigyopt-slice11": ("prodigyopt", "Prodigy", {"slice_p": 11}),
    "came": ("came_pytorch", "CAME", {"lr": 1e-3}),
    "adafactor": ("transformers.optimization", "Adafactor", {}),
    "adafactor-beta1": ("transformers.optimization", "Adafactor", {"beta1": 0.9}),
    "lion": ("lion_pytorch", "Lion", {}),
    "dadapt-adam": ("dadaptation", "DAdaptAdam", {}),
    "dadapt-lion": ("dadaptation", "DAdaptLion", {}),
    "dadapt-sgd": ("dadaptation", "DAdaptSGD", {}),
    "dadapt-adagrad": ("dadaptation", "DAdaptAdaGrad", {}),
    "sdnq-adamw": ("sdnq.optim", "AdamW", {"use_quantized_buffers": True}),
    "sdnq-adafactor": ("sdnq.optim", "Adafactor", {"use_quantized_buffers": True}),
    "sdnq-came": ("sdnq.optim", "CAME", {"use_quantized_buffers": True}),
    "sdnq-lion": ("sdnq.optim", "Lion", {"use_quantized_buffers": True}),
    "sdnq-muon": ("sdnq.optim", "Muon", {"use_quantized_buffers": True}),
    "sdnq-adamw+no_quant": ("sdnq.optim", "AdamW", {}),
    "ademamix": ("pytorch_optimizer", "AdEMAMix", {}),
    "pytorch-optimizer-soap": ("pytorch_optimizer", "SOAP", {}),
    "pytorch-optimizer-came": ("pytorch_optimizer", "CAME", {}),
    "schedulefreeadamw": ("pytorch_optimizer", "ScheduleFreeAdamW", {}),
    "tiger": ("pytorch_optimizer", "Tiger", {}),
    "adopt": ("pytorch_optimizer", "ADOPT", {}),
    "adan": ("pytorch_optimizer", "Adan", {}),
    "laprop": ("pytorch_optimizer", "LaProp", {}),
    "simplifiedademamix": ("pytorch_optimizer", "SimplifiedAdEMAMix", {}),
    "mars": ("pytorch_optimizer", "MARS", {}),
    "torch-muon": ("torch.optim", "Muon", {"lr": 1e-3}),
}
SHARED_MAP = 1024
"""bitsandbytes' quantile maps, one a state, are shared by all parameters; one parameter alone has them to itself."""


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Plain tensors in a state entry, those inside tensor subclasses too."""
    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                yield from tensors(getattr(value, name))
        else:
            yield value
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors(part)


def step_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What one step allocates at its largest."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    gc.collect()
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        optimizer.step()
    current = peak = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak


def measure(make: Callable[[list[Any]], Any], shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, float]:
    """(state bytes, step's temporaries a trained element) of one parameter after three steps."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(shape).to(dtype))
    optimizer = make([parameter])
    if hasattr(optimizer, "train"):
        optimizer.train()
    for _ in range(3):
        parameter.grad = torch.randn(shape).to(dtype)
        optimizer.step()
    parameter.grad = torch.randn(shape).to(dtype)
    extra = step_bytes(optimizer) / parameter.numel()
    found = {t.data_ptr(): t.untyped_storage().nbytes() for t in tensors(dict(optimizer.state[parameter]))}
    return sum(found.values()), extra


def maker(name: str) -> Callable[[list[Any]], Any]:
    """Builds the real optimizer.

    Raises:
        ImportError: its package is missing.
    """
    if runs_as_named(name):
        return lambda parameters: make_optimizer(name, parameters)
    module, attribute, options = PACKAGES[name]
    cls = getattr(importlib.import_module(module), attribute)
    return lambda parameters: cls(parameters, **options)


def main() -> int:
    warnings.simplefilter("ignore")
    torch.compile = lambda *functions, **_: functions[0] if functions else lambda function: function
    differing = compared = 0
    for name in sys.argv[1:] or table():
        if name not in PACKAGES and not runs_as_named(name):
            continue
        try:
            make = maker(name)
        except ImportError as error:
            print(f"{name}: left out ({error})")
            continue
        extras = []
        for dtype in (torch.bfloat16, torch.float32):
            for shape in SHAPES:
                try:
                    measured, extra = measure(make, shape, dtype)
                except Exception as error:  # noqa: BLE001  a package may refuse a shape in any way
                    print(f"{name} {dtype} {shape}: {type(error).__name__}: {str(error)[:80]}")
                    continue
                expected = sum(state_tensors(name, shape, dtype.itemsize, on_cpu=True))
                maps = range(0, 3 * SHARED_MAP, SHARED_MAP) if "bitsandbytes" in table()[name].source else (0,)
                compared += 1
                if shape == SHAPES[0]:
                    extras.append(f"{extra:.2f}")
                if not any(abs(measured - expected - more) <= max(16, 0.01 * measured) for more in maps):
                    differing += 1
                    print(f"{name} {str(dtype)[6:]} {shape}: {measured} bytes, the table gives {expected}")
        print(f"{name}: temporaries of a step on the CPU, bf16 and float32: {' and '.join(extras)} bytes an element")
    print(f"{compared} compared, {differing} differ")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
