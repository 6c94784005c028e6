"""LoHa adapters (LyCORIS form): the update of a linear is the elementwise product of two matrices of low rank.

As LyCORIS runs it with ``bypass_mode``, as the LoKr adapters here do, with PyTorch's operators: the update is built as a whole for
every call and kept for backward beside the input, in the input's precision; its factors are saved and the two products made again in
backward. Written from the published description of the method and its Apache-2.0 implementation (lycoris-lora 4.1.3), with whose
modules it was compared: the same numbers, the same bytes saved.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

NOTE = (
    "LoHa is planned as LyCORIS runs it in bypass mode with PyTorch's operators, which build every update whole; the Triton kernels "
    "of lycoris-lora 4 keep less. Which of them a trainer runs is not known here"
)


class _Update(torch.autograd.Function):
    """(w1_a w1_b) * (w2_a w2_b) * scale. Saves the factors; backward multiplies them again."""

    @staticmethod
    def forward(
        ctx: Any,
        w1_b: torch.Tensor,
        w1_a: torch.Tensor,
        w2_b: torch.Tensor,
        w2_a: torch.Tensor,
        scale: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(w1_b, w1_a, w2_b, w2_a, scale)
        return ((w1_a @ w1_b) * (w2_a @ w2_b)) * scale

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        w1_b, w1_a, w2_b, w2_a, scale = ctx.saved_tensors
        gradient = gradients[0] * scale
        part = gradient * (w2_a @ w2_b)
        for_w1_a = part @ w1_b.T
        for_w1_b = w1_a.T @ part
        part = gradient * (w1_a @ w1_b)
        for_w2_a = part @ w2_b.T
        for_w2_b = w2_a.T @ part
        return for_w1_b, for_w1_a, for_w2_b, for_w2_a, None


class LohaLinear(nn.Module):
    """A frozen linear with a LoHa update.

    Args:
        scale: of the update (alpha / rank).
    """

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base_layer = base
        self.scale = scale
        device = base.weight.device
        self.hada_w1_a = nn.Parameter(torch.empty(base.out_features, rank, device=device))
        self.hada_w1_b = nn.Parameter(torch.empty(rank, base.in_features, device=device))
        self.hada_w2_a = nn.Parameter(torch.empty(base.out_features, rank, device=device))
        self.hada_w2_b = nn.Parameter(torch.empty(rank, base.in_features, device=device))
        self.reset()

    def reset(self) -> None:
        """Random factors and one that is zero: an update of nothing."""
        nn.init.normal_(self.hada_w1_a, std=0.1)
        nn.init.normal_(self.hada_w1_b, std=1)
        nn.init.zeros_(self.hada_w2_a)
        nn.init.normal_(self.hada_w2_b, std=1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        base = self.base_layer(input)
        scale = torch.tensor(self.scale, dtype=input.dtype, device=input.device)
        factors = (self.hada_w1_b, self.hada_w1_a, self.hada_w2_b, self.hada_w2_a)
        update = _Update.apply(*(w.to(input) for w in factors), scale)
        result: torch.Tensor = base + F.linear(input, update) * 1.0  # LyCORIS' own scalar, which is 1
        return result
