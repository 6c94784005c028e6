"""LoKr: what it computes is the base plus the Kronecker product of its factors, which is never built."""

import pytest
import torch
from torch import nn

from probes.lokr import LokrLinear, factors


@pytest.mark.parametrize(("rank", "factor", "full"), [(2, 4, False), (2, 4, True), (100, 8, False), (3, -1, False)])
def test_the_update_is_the_kronecker_product(rank: int, factor: int, full: bool) -> None:
    torch.manual_seed(0)
    layer = LokrLinear(nn.Linear(48, 32), rank, factor, full)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_()
    x = torch.randn(2, 5, 48)
    large = layer.lokr_w2_a @ layer.lokr_w2_b if layer.low_rank else layer.lokr_w2
    weight = layer.base_layer.weight + torch.kron(layer.lokr_w1, large)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, weight, layer.base_layer.bias), rtol=1e-4, atol=1e-3)


def test_a_full_matrix_has_no_rank() -> None:
    layer = LokrLinear(nn.Linear(64, 64), 1, 4, True)
    assert not layer.low_rank
    assert layer.lokr_w2.shape == (16, 16)


def test_backward_keeps_no_tensor_of_the_weights_size() -> None:
    layer = LokrLinear(nn.Linear(256, 256).requires_grad_(False), 4, 8, True)
    saved: list[int] = []
    x = torch.randn(3, 256, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        layer(x)
    weight = layer.base_layer.weight.numel()
    assert saved.count(weight) == 1  # the frozen weight itself
    assert max(s for s in saved if s != weight) <= 32 * 32


@pytest.mark.parametrize(("dimension", "factor", "expected"), [(48, 4, (4, 12)), (7, 4, (1, 7)), (36, -1, (6, 6))])
def test_factors(dimension: int, factor: int, expected: tuple[int, int]) -> None:
    assert factors(dimension, factor) == expected
