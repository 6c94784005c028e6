"""Parts that several of the models share."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def float32_region(device_type: str) -> Iterator[None]:
    """Inside a 16-bit autocast: matrix products run in float32, as under a nested `torch.autocast` with that dtype, which
    PyTorch has for CUDA only. Frozen 16-bit weights are cast at each use, and autograd keeps the copies. Without an
    autocast it does nothing."""
    kind = "cpu" if device_type == "meta" else device_type
    if not torch.is_autocast_enabled(kind):
        yield
        return
    before = torch.get_autocast_dtype(kind)
    torch.set_autocast_dtype(kind, torch.float32)
    try:
        yield
    finally:
        torch.set_autocast_dtype(kind, before)


class Float32RMSNorm(nn.Module):
    """Root-mean-square norm written out in float32: autograd keeps a float32 copy of the input and the row statistics.

    Args:
        size: channels.
        scale_in_float32: multiply by the weight before the cast back to the input's dtype instead of after it.
    """

    def __init__(self, size: int, eps: float = 1e-6, *, scale_in_float32: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.scale_in_float32 = scale_in_float32
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.scale_in_float32:
            return (normed * self.weight.float()).to(x.dtype)
        return normed.to(x.dtype) * self.weight.to(x.dtype)


def sinusoid(position: torch.Tensor, size: int, *, max_period: float = 10000.0) -> torch.Tensor:
    """Cosines then sines of `position` [N] at size/2 geometric frequencies, float32 [N, size]."""
    half = size // 2
    frequency = torch.exp(
        torch.arange(half, dtype=torch.float32, device=position.device) * (-math.log(max_period) / half)
    )
    angle = position.float()[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def rotary_angles(position: torch.Tensor, size: int, *, theta: float = 10000.0) -> torch.Tensor:
    """Angles of one rotary axis, float32 [N, size / 2]."""
    exponent = torch.arange(0, size, 2, dtype=torch.float32, device=position.device) / size
    return position.float()[:, None] * theta**-exponent


def grid_positions(*sizes: int, device: torch.device | str | None = None) -> list[torch.Tensor]:
    """Positions along each axis of a row-major grid, flattened: for (h, w), the row and the column of every token."""
    axes = [torch.arange(n, device=device) for n in sizes]
    return [axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij")]


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates neighbouring channel pairs in float32 and casts back. x [..., D]; cos, sin broadcast to [..., D / 2]."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)


def rotate_full(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The same rotation with cosines and sines given for every channel: x cos + turned(x) sin, in float32, cast back."""
    wide = x.float()
    even, odd = wide.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([-odd, even], dim=-1).flatten(-2)
    return (wide * cos + turned * sin).to(x.dtype)


class SwiGLU(nn.Module):
    """silu(gate(x)) * up(x), projected back, with the gate and up projections fused as `w12`."""

    def __init__(self, size: int, inner: int, *, bias: bool = True) -> None:
        super().__init__()
        self.w12 = nn.Linear(size, 2 * inner, bias=bias)
        self.w3 = nn.Linear(inner, size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.w12(x).chunk(2, dim=-1)
        return self.w3(nn.functional.silu(gate) * up)
