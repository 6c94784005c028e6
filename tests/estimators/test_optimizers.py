"""Optimizer state: what is computed from shapes against PyTorch's real optimizers and against figures measured on real packages."""

import math
from pathlib import Path

import pytest
import torch

from estimators.optimizers import OptimizerError, facts, paged_bytes, state_sizes, state_tensors, step_transient
from probes.cpu_memory import profiled_peak
from probes.optimizer_facts import STATE, canonical, table
from probes.step import make_optimizer, runs_as_named

REAL = [name for name in table() if runs_as_named(name)]
SHAPES = ((96, 256), (16, 3072), (3072, 16), (500,), (8, 64), (16, 8, 3, 3))
FULL, LORA_A, LORA_B = (1536, 3072), (16, 3072), (3072, 16)


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_state_of_pytorchs_own_optimizers_is_the_bytes_that_they_really_keep(name: str, dtype: torch.dtype) -> None:
    parameters = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    optimizer = make_optimizer(name, parameters)
    for p in parameters:
        p.grad = torch.randn(p.shape).to(dtype)
    optimizer.step()
    for shape, p in zip(SHAPES, parameters, strict=True):
        kept = [v.untyped_storage().nbytes() for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)]
        assert sorted(kept) == sorted(state_tensors(name, shape, dtype.itemsize, on_cpu=True)), shape


def test_a_run_has_exactly_those_optimizers_whose_cost_on_a_cpu_is_known() -> None:
    assert set(REAL) == {name for name, f in table().items() if f.cpu is not None}


@pytest.mark.parametrize(
    ("name", "size", "full", "lora_a", "lora_b"),
    [
        ("adamw_bf16", 2, 6, 6, 6),
        ("adamw8bit", 4, 2.03125, 2.03125, 2.03125),
        ("lion8bit", 4, 1.015625, 1.015625, 1.015625),
        ("optimi-adamw", 2, 6, 6, 6),
        ("optimi-adamw", 4, 8, 8, 8),
        ("ao-adamw8bit", 4, 2.0317, 2.0729, 2.0729),
        ("ao-adamw4bit", 4, 1.0625, 1.0651, 1.0651),
        ("soap", 2, 24, 1540.0417, 1540.0417),
        ("pytorch-optimizer-soap", 2, 14, 772.0208, 772.0208),
        ("prodigy", 2, 2.3675, 2.615, 2.615),
        ("prodigy", 4, 4.3675, 4.615, 4.615),
        ("prodigyopt", 4, 16, 16, 16),
        ("came", 2, 4.0078, 4.5026, 4.5026),
        ("adafactor", 2, 0.0039, 0.2513, 0.2513),
        ("torch-adafactor", 4, 0.0039, 0.2513, 0.2513),
        ("sdnq-adamw", 2, 2.5, 2.5, 3.0),
        ("sdnq-came", 4, 1.2578, 1.7526, 2.0026),
        ("pytorch-optimizer-came", 2, 2.0039, 2.2513, 2.2513),
    ],
)  # fmt: skip
def test_state_follows_the_shape_as_measured_on_the_packages(
    name: str, size: int, full: float, lora_a: float, lora_b: float
) -> None:
    """Bytes a parameter of a whole matrix and of LoRA's two, measured on the real packages (`benchmarks/optimizer_state.py`)."""
    for shape, expected in ((FULL, full), (LORA_A, lora_a), (LORA_B, lora_b)):
        assert sum(state_tensors(name, shape, size)) / math.prod(shape) == pytest.approx(expected, rel=2e-3), shape


@pytest.mark.parametrize("name", ["adamw8bit", "bnb-ademamix8bit", "lion8bit", "ao-adamw8bit", "sdnq-adamw"])
def test_small_parameters_keep_state_that_is_not_quantised(name: str) -> None:
    f = facts(name)
    assert f.small is not None
    few = sum(state_tensors(name, (4, (f.small_below - 4) // 4), 4)) / (f.small_below - 4)
    assert few == 4 * len(f.small)
    assert sum(state_tensors(name, (4, f.small_below // 4), 4)) / f.small_below < 4 * len(f.small)


def test_paged_state_of_large_parameters_is_outside_the_allocator() -> None:
    trained = [((1000, 1000), 4, 2), ((16, 64), 4, 3)]
    assert paged_bytes("adamw8bit-paged", trained) == 2 * 2 * 1_000_000
    assert paged_bytes("adamw8bit", trained) == 0
    beside = sum(size * count for size, count in state_sizes("adamw8bit-paged", trained))
    assert beside == sum(size * count for size, count in state_sizes("adamw8bit", trained)) - 4_000_000


def test_a_foreach_step_makes_copies_of_every_parameter_and_a_loop_of_the_largest() -> None:
    trained = [((100, 100), 4, 5), ((10, 10), 4, 7)]
    assert step_transient("adamw", trained) == 4 * (5 * 10_000 + 7 * 100)
    assert step_transient("adamw", trained, on_cpu=True) == 8 * 10_000
    assert step_transient("adamw-fused", trained) == 0
    assert step_transient("came", trained) == 12 * 10_000


def test_clipping_gradients_allocates_a_number_a_parameter_and_no_copy() -> None:
    """Why clipping is in no estimate."""
    parameters = [torch.nn.Parameter(torch.randn(256, 256)) for _ in range(8)]
    for p in parameters:
        p.grad = torch.randn_like(p)
    peak = profiled_peak(lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0), 0).peak
    assert peak < 1024


def test_every_row_is_well_formed_and_no_name_means_two_things() -> None:
    kinds = {entry.partition(":")[0] for entry in STATE} | {"bfloat16", "uint8", "map16"}
    names = [*table(), *(a for f in table().values() for a in f.aliases)]
    assert len(names) == len(set(names))
    for f in table().values():
        assert [f.name, *f.aliases] == [f.name.lower(), *(a.lower() for a in f.aliases)]
        assert {e.partition(":")[0] for e in (*f.state, *(f.flat or ()), *(f.small or ()))} <= kinds
        assert f.transient_scope in ("largest", "all", "none")
        assert (max(f.transient_bytes) == 0) == (f.transient_scope == "none")
        assert f.source


@pytest.mark.parametrize(
    ("given", "name"),
    [("bnb-adamw8bit", "adamw8bit"), ("PagedAdamW8bit", "adamw8bit-paged"), ("ADAMW_8BIT", "adamw8bit"), ("torch-adamw", "adamw")],
)  # fmt: skip
def test_other_trainers_names_mean_the_same_optimizer(given: str, name: str) -> None:
    assert canonical(given) == name


def test_an_optimizer_without_figures_is_refused_with_where_the_others_are_listed() -> None:
    with pytest.raises(OptimizerError, match=r"no figures for optimizer 'rmsprop'; docs/"):
        facts("rmsprop")


def test_the_page_of_setups_lists_every_optimizer() -> None:
    page = (Path(__file__).parents[2] / "docs" / "training_setups.md").read_text(encoding="utf-8")
    assert [name for name in table() if f"`{name}`" not in page] == []
