"""Step time: a kernel's roofline, the host's launch rate, recomputation and copies, on tapes of a few kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators.devices import Device, DeviceKind, find_gpu
from estimators.memory import Memory, Span
from estimators.step_time import Clock, Rates, StepTime, default_rates, rates_from
from probes.profile import Profile
from probes.structure import Structure
from probes.tape import ATTENTION, ATTENTION_BACKWARD, CONVOLUTION, GEMM, MEMORY, REDUCTION, Tape
from probes.workload import from_request

DEVICE = Device(
    "card",
    DeviceKind.CUDA,
    2**34,
    2**34,
    architecture="Ada",
    bf16_flops=1e12,
    fp32_flops=1e11,
    memory_bytes_per_second=1e9,
    device_to_host_bytes_per_second=1e7,
    host_to_device_bytes_per_second=2e7,
)
RATES = Rates(
    gemm=0.5,
    convolution=0.25,
    attention=0.4,
    attention_backward=0.2,
    softmax_width=64.0,
    memory=0.8,
    cache_speedup=2.0,
    legacy_mma_on_hopper=0.5,
    matrix_on_ada=1.0,
    reduction_bytes_per_second=1e8,
    kernel_tail_seconds=1e-6,
    launch_seconds=1e-9,
    hook_seconds=1e-9,
    copy_seconds=1e-9,
    exposed_copy_out=0.25,
    streamed_quantised_bytes_per_second=1e8,
    blend=64.0,
)
"""The host costs almost nothing, so that the total is the GPU's time."""
HEAD = 64
"""As wide as the softmax, so attention reaches half its share."""
TAIL = RATES.kernel_tail_seconds

Kernel = tuple[int, float, float]
"""(kind, FLOPs, bytes)"""


def profile(
    kernels: Sequence[Kernel], *, precision: str = "bf16", trained: int = 0, saved_at: Sequence[int] = ()
) -> Profile:
    """Kernel i is at position 10 * (i + 1)."""
    n, none = len(kernels), np.zeros(0, np.int64)
    saved = np.array(saved_at, np.int64)
    tape = Tape(
        length=10 * n + 20,
        backward_start=10 * n + 10,
        optimizer_start=10 * n + 10,
        size=none,
        birth=none,
        death=none,
        scratch=none.astype(bool),
        saved_storage=saved,
        saved_at=saved,
        unpacked_at=saved,
        released_at=saved,
        saved_movable=saved.astype(bool),
        saved_bytes=saved,
        saved_view=saved,
        saved_weight=saved,
        **dict.fromkeys(("view_start", "view_extent", "view_bytes", "view_type"), none),
        op_at=np.arange(1, n + 1, dtype=np.int64) * 10,
        op_kind=np.array([k for k, _, _ in kernels], np.int8),
        op_flops=np.array([f for _, f, _ in kernels], np.float64),
        op_bytes=np.array([b for _, _, b in kernels], np.float64),
        op_head=np.array([HEAD if k in (ATTENTION, ATTENTION_BACKWARD) else 0 for k, _, _ in kernels], np.int64),
    )
    workload = from_request({"model": "flux", "precision": precision})
    shapes = (((trained,), 4, 1),) if trained else ()
    return Profile(workload, "traced", "cuda", {}, Structure(()), tape, (), shapes, (), 0)


def memory(*spans: Span, to_host: int = 0, from_host: int = 0, copied: int = 0) -> Memory:
    return Memory(0, "backward", {}, 0, to_host, from_host, copied, spans)


def step(
    found: Profile, what: Memory | None = None, device: Device = DEVICE, rates: Rates = RATES, **options: bool
) -> StepTime:
    time = Clock(found, device, rates).step(what or memory(), **options)
    assert time is not None
    return time


@pytest.mark.parametrize(
    ("kind", "share"), [(GEMM, 0.5), (CONVOLUTION, 0.25), (ATTENTION, 0.2), (ATTENTION_BACKWARD, 0.1)]
)
def test_a_kernel_that_computes_takes_its_share_of_the_matrix_rate(kind: int, share: float) -> None:
    assert step(profile([(kind, 1e12, 1.0)])).gpu == pytest.approx(1 / share + TAIL)


def test_a_kernel_that_moves_memory_takes_its_share_of_the_bandwidth() -> None:
    assert step(profile([(MEMORY, 0.0, 8e8)])).gpu == pytest.approx(1.0 + TAIL)


def test_a_kernel_takes_the_longer_of_computing_and_moving() -> None:
    assert step(profile([(GEMM, 5e11, 1.6e9)])).gpu == pytest.approx(2.0 + TAIL)
    assert step(profile([(GEMM, 1.5e12, 1.6e9)])).gpu == pytest.approx(3.0 + TAIL)


def test_every_kernel_has_a_tail_however_small() -> None:
    assert step(profile([(MEMORY, 0.0, 0.0)] * 1000)).gpu == pytest.approx(1000 * TAIL)


def test_float32_work_runs_at_the_float32_rate() -> None:
    assert step(profile([(GEMM, 1e11, 1.0)], precision="fp32")).gpu == pytest.approx(2.0 + TAIL)


def test_a_card_without_bf16_units_runs_half_precision_at_its_fp16_rate() -> None:
    turing = replace(DEVICE, bf16_flops=None, fp16_flops=5e11)
    assert step(profile([(GEMM, 1e12, 1.0)]), device=turing).gpu == pytest.approx(4.0 + TAIL)


def test_only_attention_is_slower_on_hopper() -> None:
    hopper = replace(DEVICE, architecture="Hopper")
    assert step(profile([(ATTENTION, 1e12, 1.0)]), device=hopper).gpu == pytest.approx(10.0 + TAIL)
    assert step(profile([(GEMM, 1e12, 1.0)]), device=hopper).gpu == pytest.approx(2.0 + TAIL)


def test_a_product_of_one_tile_reads_at_the_rate_of_one_multiprocessor() -> None:
    assert step(profile([(REDUCTION, 1e6, 1e8)])).gpu == pytest.approx(1.0 + TAIL)
    assert step(profile([(GEMM, 1e6, 1e8)])).gpu == pytest.approx(0.125 + TAIL)


def test_ada_sustains_less_of_its_matrix_rate() -> None:
    rates = replace(RATES, matrix_on_ada=0.5)
    assert step(profile([(GEMM, 1e12, 1.0)]), rates=rates).gpu == pytest.approx(4.0 + TAIL)
    assert step(profile([(MEMORY, 0.0, 8e8)]), rates=rates).gpu == pytest.approx(1.0 + TAIL)


def test_traffic_that_fits_the_cache_is_faster_and_twice_the_cache_gains_nothing() -> None:
    cached = replace(DEVICE, l2_bytes=10**8)
    times = [step(profile([(MEMORY, 0.0, b)]), device=cached).gpu - TAIL for b in (1.0, 1e8, 2e8, 4e8)]
    plain = [b / 8e8 for b in (1.0, 1e8, 2e8, 4e8)]
    assert [t / p for t, p in zip(times, plain, strict=True)] == pytest.approx([0.5, 0.75, 1.0, 1.0], rel=1e-6)


def test_the_optimizer_moves_28_bytes_a_trained_element() -> None:
    without, with_ = step(profile([(MEMORY, 0.0, 8.0)])), step(profile([(MEMORY, 0.0, 8.0)], trained=10**6))
    assert with_.gpu - without.gpu == pytest.approx(28e6 / 8e8)


# Host ----------------------------------------------------------------------------------------------------------------


def test_a_step_of_small_kernels_takes_the_hosts_time_to_launch_them() -> None:
    slow_host = replace(RATES, launch_seconds=1e-3)
    found = step(profile([(MEMORY, 0.0, 1.0)] * 100), rates=slow_host)
    assert found.launch_bound
    assert found.total == pytest.approx(0.1, rel=1e-3)


def test_a_step_of_large_kernels_does_not_wait_for_the_host() -> None:
    found = step(profile([(GEMM, 1e12, 1.0)]), rates=replace(RATES, launch_seconds=1e-3))
    assert not found.launch_bound
    assert found.total == pytest.approx(found.gpu)


def test_where_gpu_and_host_are_close_the_step_takes_a_little_more_than_either() -> None:
    found = step(profile([(GEMM, 5e11, 1.0)]), rates=replace(RATES, launch_seconds=1.0, blend=4.0))
    assert found.gpu == pytest.approx(found.host, rel=1e-3)
    assert found.total == pytest.approx(2**0.25, rel=1e-3)


# Recomputation -------------------------------------------------------------------------------------------------------

THREE: list[Kernel] = [(GEMM, 1e12, 1.0), (GEMM, 2e12, 1.0), (GEMM, 4e12, 1.0)]


def test_quantised_weights_from_the_host_are_waited_for_in_every_pass_and_others_are_not() -> None:
    plain = step(profile(THREE))
    found = replace(profile(THREE), host_weight_bytes=10**8, host_quantized_bytes=10**8)
    assert step(found).total == pytest.approx(plain.total + 2 * 1.0)
    again = step(found, memory(Span(((0, 40),), 39)))
    assert again.total == pytest.approx(again.gpu + 3 * 1.0, rel=0.02)
    beside = step(replace(found, host_quantized_bytes=0))
    assert beside.copies == 0


def test_a_recomputed_span_adds_its_kernels_once_more() -> None:
    plain = step(profile(THREE))
    again = step(profile(THREE), memory(Span(((5, 25),), 24)))
    assert again.recompute == pytest.approx(6.0, rel=1e-5)
    assert again.gpu == pytest.approx(plain.gpu + again.recompute)
    assert plain.recompute == 0


def test_what_follows_the_last_saved_tensor_is_not_recomputed() -> None:
    assert step(profile(THREE), memory(Span(((5, 35),), 20))).recompute == pytest.approx(6.0, rel=1e-5)
    assert step(profile(THREE), memory(Span(((5, 35),), 19))).recompute == pytest.approx(2.0, rel=1e-5)


def test_a_segment_recomputes_all_its_ranges() -> None:
    assert step(profile(THREE), memory(Span(((5, 15), (25, 35)), 34))).recompute == pytest.approx(10.0, rel=1e-5)


def test_recomputation_costs_the_host_launches_and_hooks() -> None:
    rates = replace(RATES, launch_seconds=1e-3, hook_seconds=1e-2)
    found = profile(THREE, saved_at=[6, 7, 30])
    plain, again = step(found, rates=rates), step(found, memory(Span(((5, 25),), 24)), rates=rates)
    assert again.host - plain.host == pytest.approx(2 * 1e-3 + 3 * 2 * 1e-2)


# Copies --------------------------------------------------------------------------------------------------------------


def test_copies_are_added_in_both_directions_at_their_own_rates() -> None:
    found = step(profile(THREE), memory(to_host=10**7, from_host=10**7))
    assert found.copies == pytest.approx(1.0 + 0.5)
    assert found.total == pytest.approx(found.gpu + 1.5)


def test_copies_out_on_a_stream_of_their_own_are_mostly_hidden() -> None:
    found = step(profile(THREE), memory(to_host=10**7, from_host=10**7), copies_out_overlap=True)
    assert found.copies == pytest.approx(0.25 + 0.5)


def test_each_copied_tensor_costs_the_host_something() -> None:
    rates = replace(RATES, copy_seconds=1e-2)
    found = [step(profile(THREE), memory(copied=n), rates=rates).host for n in (0, 5)]
    assert found[1] - found[0] == pytest.approx(0.05)


def test_where_memory_is_shared_with_the_host_copies_take_its_bandwidth() -> None:
    shared = replace(DEVICE, device_to_host_bytes_per_second=None, host_to_device_bytes_per_second=None)
    found = step(profile(THREE), memory(to_host=10**9, from_host=10**9), device=shared)
    assert found.copies == pytest.approx(2.0)


# Edges ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "missing", [{"memory_bytes_per_second": None}, {"bf16_flops": None, "fp16_flops": None, "fp32_flops": None}]
)
def test_without_the_devices_rates_there_is_no_step_time(missing: dict[str, None]) -> None:
    clock = Clock(profile(THREE), replace(DEVICE, **missing), RATES)
    assert not clock.available
    assert clock.step(memory()) is None


def test_the_stored_rates_are_shares_and_times() -> None:
    rates = default_rates()
    for share in (rates.gemm, rates.convolution, rates.attention, rates.memory, rates.exposed_copy_out):
        assert 0 < share <= 1
    for seconds in (rates.launch_seconds, rates.hook_seconds, rates.copy_seconds, rates.kernel_tail_seconds):
        assert 0 < seconds < 1e-3


def test_single_rates_can_be_replaced_for_calibration() -> None:
    assert rates_from({"gemm": 0.123}) == replace(default_rates(), gemm=0.123)


_KERNELS = st.lists(
    st.tuples(st.sampled_from([GEMM, CONVOLUTION, ATTENTION, MEMORY]), st.floats(0, 1e13), st.floats(0, 1e10)),
    min_size=1,
    max_size=8,
)


@given(_KERNELS, st.integers(0, 7), st.floats(1, 10))
def test_more_work_is_never_faster(kernels: list[Kernel], at: int, factor: float) -> None:
    more = [(k, f * factor, b * factor) if i == at % len(kernels) else (k, f, b) for i, (k, f, b) in enumerate(kernels)]
    for device in (DEVICE, replace(DEVICE, l2_bytes=10**8), find_gpu("h100"), find_gpu("rtx4090")):
        assert step(profile(more), device=device).total >= step(profile(kernels), device=device).total * (1 - 1e-9)


@given(_KERNELS, st.integers(0, 90), st.integers(0, 90), st.integers(0, 90))
def test_recomputing_takes_between_nothing_and_another_forward(
    kernels: list[Kernel], a: int, b: int, stop: int
) -> None:
    found = profile(kernels)
    plain, again = step(found), step(found, memory(Span(((min(a, b), max(a, b)),), stop)))
    assert plain.total <= again.total * (1 + 1e-9)
    assert -1e-9 <= again.recompute <= plain.gpu * (1 + 1e-9)


def test_copies_beside_the_computation_cost_what_it_does_not_hide() -> None:
    """The three kernels are all in forward: they hide copies out and none back."""
    found = step(profile(THREE), memory(to_host=10**3, from_host=10**3), copies_beside=True)
    assert found.copies == pytest.approx(10**3 / 2e7)
    alone = step(profile(THREE), memory()).total
    found = step(profile(THREE), memory(to_host=10**9, from_host=10**9), copies_beside=True)
    assert found.copies == pytest.approx(100 - alone + 50)


def test_copies_back_beside_recomputation_cost_the_first_group() -> None:
    again = replace(memory(Span(((0, 10**6),), 10**6), from_host=10**3), copy_groups=4)
    found = step(profile(THREE), again, copies_beside=True)
    assert found.recompute > 10**3 / 2e7
    assert found.copies == pytest.approx(10**3 / 2e7 / 4)
