"""Fused projections: one linear computes query, key and value of a self-attention; the originals stay in memory, unused.

As diffusers' ``fuse_projections`` leaves a model, for any attention that has the three linears, whatever its processor does.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from probes.workload import FUSED, WorkloadError


class _Shared:
    """The fused linear's last result, until all three have taken their part of it."""

    def __init__(self, owner: nn.Module, name: str) -> None:
        self.owner, self.name = owner, name
        self.input: torch.Tensor | None = None
        self.result: torch.Tensor | None = None
        self.left = 0

    def take(self, input: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        if self.left == 0 or self.input is not input:
            self.input, self.result, self.left = input, getattr(self.owner, self.name)(input), 3
        assert self.result is not None
        part = self.result[..., start:stop]
        self.left -= 1
        if self.left == 0:
            self.input = self.result = None
        return part


class Slice(nn.Linear):
    """Stands where a fused linear's part was: keeps the original weight, returns its part of the fused result."""

    def __init__(self, original: nn.Linear, shared: _Shared, start: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = original.in_features, original.out_features
        self.weight, self.bias = original.weight, original.bias
        self._place = (shared, start, start + original.out_features)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        shared, start, stop = self._place
        return shared.take(input, start, stop)


def _is_cross(name: str, module: nn.Module) -> bool:
    return bool(
        getattr(module, "is_cross_attention", False)
        or "cross" in name
        or name.rpartition(".")[2] == "attn2"
        or getattr(module, "is_cross", False)
    )


def fuse(model: nn.Module) -> int:
    """Fuses in place every self-attention that has separate projections; how many.

    Raises:
        WorkloadError: the model has none.
    """
    found: list[tuple[nn.Module, str, list[nn.Linear]]] = []
    for name, module in model.named_modules():
        if _is_cross(name, module):
            continue
        for fused, parts in FUSED.items():
            linears = [module._modules.get(p) for p in parts]
            if all(type(m) is nn.Linear for m in linears) and len({m.in_features for m in linears if m}) == 1:
                found.append((module, fused, linears))
    if not found:
        raise WorkloadError(
            "--fuse-qkv: this model has no self-attention with separate query, key and value projections"
        )
    for owner, fused, linears in found:
        first = linears[0]
        joint = nn.Linear(
            first.in_features,
            sum(m.out_features for m in linears),
            bias=first.bias is not None,
            device=first.weight.device,
            dtype=first.weight.dtype,
        )
        with torch.no_grad():
            joint.weight.copy_(torch.cat([m.weight for m in linears]))
            if joint.bias is not None:
                joint.bias.copy_(torch.cat([m.bias for m in linears]))
        setattr(owner, fused, joint)
        shared, start = _Shared(owner, fused), 0
        for part, linear in zip(FUSED[fused], linears, strict=True):
            setattr(owner, part, Slice(linear, shared, start))
            start += linear.out_features
    return len(found)


def given_weight(name: str, state: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The fused parameter `name` put together from the weights of a model that is not fused; None if it has none."""
    owner, _, rest = name.rpartition(".")
    prefix, _, fused = owner.rpartition(".")
    parts = [state.get(f"{prefix}.{p}.{rest}" if prefix else f"{p}.{rest}") for p in FUSED.get(fused, ())]
    if not parts or any(p is None for p in parts):
        return None
    return torch.cat([p for p in parts if p is not None])
