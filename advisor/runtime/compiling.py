"""Regional compile of a live model."""

from __future__ import annotations

import torch
from torch import nn

from advisor.runtime.counters import RuntimeRefused
from probes.structure import Structure

MOST_GRAPHS = 64
"""Graphs that blocks of one class may have: sizes, and whether inputs need gradients. Beyond Dynamo's limit a block would run eagerly,
without a word."""


def compile_blocks(model: nn.Module, structure: Structure, device: str) -> None:
    """Compiles every block of the model's chains in place, with Inductor. To be called before `apply`.

    Raises:
        RuntimeRefused: this machine has no compiler for the device.
    """
    _check_compiler(device)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)
    for block in structure.blocks:
        model.get_submodule(block.name).compile(dynamic=False)


def _check_compiler(device: str) -> None:
    if device == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise RuntimeRefused("--compile regional needs Triton for this GPU and PyTorch; --compile none runs")
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise RuntimeRefused(
            "--compile regional needs a C++ compiler on a CPU, such as g++; --compile none runs"
        ) from None
