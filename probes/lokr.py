"""LoKr adapters (LyCORIS form): the update of a linear is the Kronecker product of two small trained matrices.

As LyCORIS runs it with ``bypass_mode``, which the trainer's presets set and most quantised bases need: the product is never built,
the input passes through one factor and then the other, which keeps the input and one more tensor of the output's size for
backward. Or as it runs without: the product is built whole, added to the weight and taken off again, and kept for backward. Written
from the published description of the method and its Apache-2.0 implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn


def factors(dimension: int, factor: int) -> tuple[int, int]:
    """`dimension` as a product (small, large) whose small part is `factor` if that divides it, else the largest divisor
    pair with a small part of at most `factor`."""
    if factor > 0 and dimension % factor == 0:
        return min(factor, dimension // factor), max(factor, dimension // factor)
    limit = factor if factor > 0 else dimension
    best = (1, dimension)
    for small in range(2, int(dimension**0.5) + 1):
        if dimension % small == 0 and small <= limit:
            best = (small, dimension // small)
    return best


class LokrLinear(nn.Module):
    """A frozen linear with a LoKr update.

    Args:
        rank: below half of the large factor, the large matrix is itself a product of two of this rank.
        full_matrix: never do that.
        trained_scalar: the update is multiplied by a trained number (LyCORIS' ``use_scalar``).
        rebuild: build the product (LyCORIS without ``bypass_mode``).
    """

    def __init__(
        self,
        base: nn.Linear,
        rank: int,
        factor: int,
        full_matrix: bool,
        *,
        trained_scalar: bool = False,
        rebuild: bool = False,
    ) -> None:
        super().__init__()
        self.base_layer = base
        self.rebuild, self.trained_scalar = rebuild, trained_scalar
        self.scale = 1.0
        out_small, out_large = factors(base.out_features, factor)
        in_small, in_large = factors(base.in_features, factor)
        device = base.weight.device
        self.lokr_w1 = nn.Parameter(torch.empty(out_small, in_small, device=device))
        self.low_rank = not full_matrix and rank < max(out_large, in_large) / 2
        if self.low_rank:
            self.lokr_w2_a = nn.Parameter(torch.empty(out_large, rank, device=device))
            self.lokr_w2_b = nn.Parameter(torch.empty(rank, in_large, device=device))
        else:
            self.lokr_w2 = nn.Parameter(torch.empty(out_large, in_large, device=device))
        if trained_scalar:
            self.scalar = nn.Parameter(torch.zeros((), device=base.weight.device))
        else:
            self.register_buffer("scalar", torch.ones((), device="cpu"), persistent=False)  # not meta: its value counts
        self.reset()

    def reset(self) -> None:
        """Random factors and a last one, or else the trained scalar, that is zero: an update of nothing."""
        nn.init.kaiming_uniform_(self.lokr_w1, a=5**0.5)
        if self.low_rank:
            nn.init.kaiming_uniform_(self.lokr_w2_a, a=5**0.5)
        last = self.lokr_w2_b if self.low_rank else self.lokr_w2
        if self.trained_scalar:
            nn.init.kaiming_uniform_(last, a=5**0.5)
            nn.init.zeros_(self.scalar)
        else:
            nn.init.zeros_(last)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        base = self.base_layer(input)
        if self.rebuild:
            return self._rebuilt(input, base)
        grouped = input.unflatten(-1, (self.lokr_w1.shape[1], -1))
        if self.low_rank:
            small = F.linear(F.linear(grouped, self.lokr_w2_b), self.lokr_w2_a)
        else:
            small = F.linear(grouped, self.lokr_w2)
        crossed = F.linear(small.transpose(-1, -2), self.lokr_w1).transpose(-1, -2)
        # As LyCORIS does, all of these live while it multiplies, by a number and by a tensor that some presets train.
        update = crossed.flatten(-2)
        result: torch.Tensor = base + update * self.scale * self.scalar
        return result

    def _rebuilt(self, input: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        # Each of these matrices of the weight's size lives until the end, as in LyCORIS.
        weight = self.base_layer.weight.detach()
        large = self.lokr_w2_a @ self.lokr_w2_b if self.low_rank else self.lokr_w2
        update = torch.kron(self.lokr_w1, large).to(weight.dtype) * self.scalar
        merged = weight + update
        delta = merged - weight
        return base + F.linear(input, delta)


def linears(model: nn.Module, targets: Sequence[str]) -> dict[str, str]:
    """Names of all linears inside modules whose class, or whose name's end, is one of `targets`; with the target that is nearest
    around each: that of the innermost such module, the last in `targets` if several are."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():  # outer modules come before what is in them
        kind = type(module).__name__
        own = [t for t in targets if kind == t or name == t or name.endswith(f".{t}")]
        if own:
            inside = (n for n, m in module.named_modules() if isinstance(m, nn.Linear))
            found |= {".".join(filter(None, (name, n))): own[-1] for n in inside}
    return found


def inject(model: nn.Module, targets: Sequence[str], wrap: Callable[[str, nn.Linear], nn.Module]) -> int:
    """Wraps every linear inside modules whose class, or whose name's end, is one of `targets`. Returns how many.

    Args:
        wrap: gives a linear, told by its name and itself, its adapter.
    """
    chosen = linears(model, targets)
    for name in chosen:
        parent, _, key = name.rpartition(".")
        owner = model.get_submodule(parent)
        linear = owner.get_submodule(key)
        assert isinstance(linear, nn.Linear)
        setattr(owner, key, wrap(name, linear))
    return len(chosen)
