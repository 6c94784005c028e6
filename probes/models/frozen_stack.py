"""A plain stack of frozen pre-norm transformer blocks: what published figures of checkpointing backends were measured on.

Its every tensor is known, so it checks the estimator apart from any model: `benchmarks/synthetic_block.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Self-attention, q, k and v of one projection. [B, T, width] -> [B, T, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Normalisation and feed-forward, four times as wide inside. [B, T, width] -> [B, T, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.fc1 = nn.Linear(width, 4 * width, bias=False)
        self.fc2 = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(self.norm(x)), approximate="tanh"))


class Block(nn.Module):
    """One pre-norm block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.attn = Attention(width, heads)
        self.mlp = Mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class FrozenStack(nn.Module):
    """The blocks, and before them one small linear whose adapter is all that trains."""

    def __init__(self, width: int = 3072, depth: int = 16, heads: int = 24) -> None:
        super().__init__()
        self.entry = nn.Linear(16, width, bias=False)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))

    def forward(self, tokens: torch.Tensor, return_dict: bool = False) -> tuple[torch.Tensor]:
        """`tokens` [B, T, 16] -> ([B, T, width],)."""
        x = self.entry(tokens)
        with (
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
        ):  # pure bf16, as it was measured
            for block in self.blocks:
                x = block(x)
        return (x,)
