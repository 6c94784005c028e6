"""LoKr: what it computes is the base plus the Kronecker product of its factors, which is never built."""

import pytest
import torch
from torch import nn

from probes import build
from probes.lokr import LokrLinear, factors, inject, linears
from probes.workload import WorkloadError, from_request


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


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Part(), Part()
        self.last = nn.Linear(8, 8)


def test_the_innermost_module_that_is_named_decides_and_of_its_class_and_name_the_later_one() -> None:
    a = {"first.inner.a", "second.inner.a"}
    found = linears(Whole(), ("a", "Whole", "Part"))
    assert {n for n, t in found.items() if t == "a"} == a
    assert {n for n, t in found.items() if t == "Part"} == {n.replace(".a", ".b") for n in a}
    assert found["last"] == "Whole"
    assert linears(Whole(), ("Part", "second"))["second.inner.a"] == "second"
    assert linears(Whole(), ("second", "Part"))["second.inner.a"] == "Part"


def test_what_wraps_a_linear_is_told_its_name() -> None:
    model = Whole()
    told: dict[str, nn.Linear] = {}
    before = dict(model.named_modules())
    assert inject(model, ("Part",), lambda name, linear: told.setdefault(name, linear)) == 4
    assert all(before[name] is linear for name, linear in told.items())


FACTORS = {"model": "sd3", "adapter": "lokr", "rank": 10000}


def _first_factors(factor: int | str, targets: list[str] | None = None) -> dict[str, int]:
    """Small sides of the first factors, by the last part of the linear's block."""
    workload = from_request({**FACTORS, "lokr_factor": factor, "lora_targets": targets})
    with torch.device("meta"):
        model = build.build_base(workload)
        build.inject_adapter(model, workload)
    block = model.get_submodule("transformer_blocks.0")
    return {n: m.lokr_w1.shape[0] for n, m in block.named_modules() if isinstance(m, LokrLinear)}


def test_module_classes_and_names_get_factors_of_their_own() -> None:
    found = _first_factors("4,FeedForward=8,to_out.0=2")
    assert found["attn.to_q"] == 4
    assert found["ff.net.2"] == found["ff_context.net.2"] == 8
    assert found["attn.to_out.0"] == 2


def test_a_factor_for_what_gets_no_lokr_is_told() -> None:
    workload = from_request({**FACTORS, "lokr_factor": "4,FeedForward=8,Foo=2", "lora_targets": ["Attention"]})
    with torch.device("meta"):
        found = build.unmatched_names(build.build_base(workload), workload)
    assert [text.partition(" has no effect")[0] for text in found] == [
        "--lokr-factor FeedForward=8",
        "--lokr-factor Foo=2",
    ]
    assert set(_first_factors("4,FeedForward=8,Foo=2", ["Attention"]).values()) == {4}


@pytest.mark.parametrize(
    ("given", "kept"),
    [(8, 8), ("8", 8), (" 8 , A=-1,b.c = 2", "8,A=-1,b.c=2"), ("A=4", "16,A=4"), (-1, -1), ("-1", -1)],
)
def test_factors_are_written_one_way(given: int | str, kept: int | str) -> None:
    workload = from_request({**FACTORS, "lokr_factor": given})
    assert workload.lokr_factor == kept
    assert from_request({**FACTORS, "lokr_factor": workload.lokr_factor}) == workload


@pytest.mark.parametrize("bad", ["", "x", "4,8", "4,A=0", "A=1,A=2", "4.5", "A=", "=4", "A B=4", True, [4], 4.5])
def test_bad_factors_get_one_line(bad: object) -> None:
    with pytest.raises(WorkloadError, match="--lokr-factor") as caught:
        from_request({**FACTORS, "lokr_factor": bad})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("adapter", ["lokr", "loha"])
def test_a_target_that_the_model_does_not_have_is_told(adapter: str) -> None:
    workload = from_request(
        {"model": "sd3", "adapter": adapter, "lora_targets": ["Attention", "TransformerBlock", "to_out.0"]}
    )
    with torch.device("meta"):
        [note] = build.unmatched_names(build.build_base(workload), workload)
    assert note.startswith("TransformerBlock gets no Lo")
    assert note.endswith("(but class JointTransformerBlock)")
