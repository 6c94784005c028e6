"""LoHa: what it computes, and that it costs what LyCORIS' own modules cost."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from probes.loha import LohaLinear
from probes.lokr import LokrLinear

Saved = list[tuple[torch.dtype, tuple[int, ...]]]


def _filled(layer: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if "hada" in name or "lokr" in name or name == "scalar":
                p.normal_()
    return layer


def test_the_update_is_the_product_of_two_products() -> None:
    layer = _filled(LohaLinear(nn.Linear(48, 32), 4, 0.5))
    x = torch.randn(2, 5, 48)
    update = 0.5 * (layer.hada_w1_a @ layer.hada_w1_b) * (layer.hada_w2_a @ layer.hada_w2_b)
    expected = nn.functional.linear(x, layer.base_layer.weight + update, layer.base_layer.bias)
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-3)


def test_its_gradients_are_those_of_the_formula() -> None:
    layer = _filled(LohaLinear(nn.Linear(12, 8).double(), 3, 2.0)).double()
    x = torch.randn(5, 12, dtype=torch.float64)
    parameters = [p for n, p in layer.named_parameters() if "hada" in n]

    def run(*given: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, dict(zip([n for n, _ in layer.named_parameters() if "hada" in n], given, strict=True)), x)  # fmt: skip

    assert torch.autograd.gradcheck(run, tuple(parameters))


def test_at_its_start_it_changes_nothing() -> None:
    layer = LohaLinear(nn.Linear(16, 16), 2, 1.0)
    x = torch.randn(3, 16)
    assert torch.equal(layer(x), layer.base_layer(x))


def test_backward_keeps_the_update_and_no_product_of_its_factors() -> None:
    layer = LohaLinear(nn.Linear(256, 128).requires_grad_(False), 4, 1.0)
    of_matrix_size = [shape for _, shape in _run(layer, torch.randn(3, 256))[2] if shape in ((128, 256), (256, 128))]
    assert len(of_matrix_size) == 2  # the frozen weight and the update


def _run(layer: nn.Module, x: torch.Tensor, autocast: bool = False) -> tuple[torch.Tensor, list[torch.Tensor], Saved]:
    """(output, gradients of the trained parameters and the input, dtypes and shapes of what is saved)."""
    saved: Saved = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved.append((t.dtype, tuple(t.shape)))
        return t

    x = x.clone().requires_grad_(True)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
    ):
        out = layer(x)
    out.float().square().sum().backward()
    trained = sorted((n, p.grad) for n, p in layer.named_parameters() if p.grad is not None)
    return out, [g for _, g in trained] + [x.grad], saved


def _real_loha(base: nn.Linear) -> tuple[nn.Module, nn.Module]:
    from lycoris.modules.loha import LohaModule

    real = LohaModule("l", base, 1.0, 4, 4, bypass_mode=True)
    return real, LohaLinear(base, 4, 1.0)


def _real_lokr(base: nn.Linear) -> tuple[nn.Module, nn.Module]:
    from lycoris.modules.lokr import LokrModule

    real = LokrModule("l", base, 1.0, 4, 4, factor=8, bypass_mode=True)
    return real, LokrLinear(base, 4, 8, False)


def _real_scalar(base: nn.Linear) -> tuple[nn.Module, nn.Module]:
    from lycoris.modules.lokr import LokrModule

    real = LokrModule("l", base, 1.0, 4, 4, factor=8, bypass_mode=True, use_scalar=True)
    return real, LokrLinear(base, 4, 8, False, trained_scalar=True)


def _real_rebuilt(base: nn.Linear) -> tuple[nn.Module, nn.Module]:
    from lycoris.modules.lokr import LokrModule

    real = LokrModule("l", base, 1.0, 4, 4, factor=8, use_scalar=True)
    return real, LokrLinear(base, 4, 8, False, trained_scalar=True, rebuild=True)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("pair", [_real_loha, _real_lokr, _real_scalar, _real_rebuilt])
def test_it_computes_and_saves_what_lycoris_own_module_does(
    pair: Callable[[nn.Linear], tuple[nn.Module, nn.Module]], autocast: bool
) -> None:
    pytest.importorskip("lycoris")
    base = nn.Linear(256, 128).requires_grad_(False)
    real, ours = (_filled(m) for m in pair(base))
    real.train()
    x = torch.randn(2, 7, 256)
    real_out, real_gradients, real_saved = _run(real, x, autocast)
    out, gradients, saved = _run(ours, x, autocast)
    assert torch.equal(out, real_out)
    assert len(gradients) == len(real_gradients)
    assert all(torch.equal(a, b) for a, b in zip(gradients, real_gradients, strict=True))

    def matrices(found: Saved) -> Saved:  # LyCORIS saves single numbers too
        return sorted(((d, s) for d, s in found if len(s) > 1), key=str)

    assert matrices(saved) == matrices(real_saved)
