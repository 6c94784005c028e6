"""Swapped blocks in the memory simulation: against real CPU runs for our runtime, against what the trainer does for its own."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest

from advisor.verification import compare_on_cpu
from decision_rules.support import Executor, semantics
from estimators.devices import find_gpu
from estimators.estimate import Estimator
from estimators.schedule import Backend, Schedule
from estimators.swapping import managed_blocks
from probes.profile import DESCRIBED, TRAINED, Profile
from probes.target import Target
from probes.traced import trace
from probes.workload import WorkloadError, from_request, reduced_copy

SCHEDULES = [
    Schedule(),
    Schedule(Backend.TORCH),
    Schedule(Backend.TORCH_FFN),
    Schedule(Backend.TORCH, 2),
    Schedule(Backend.UNSLOTH, 2, 3),
]
TORCH = Schedule(Backend.TORCH)


@cache
def profile() -> Profile:
    return trace(reduced_copy(from_request({"model": "flux"})), Target("cuda"))


def estimator(count: int, executor: Executor = Executor.BUNDLED, gpu: str = "rtx4090") -> Estimator:
    workload = dataclasses.replace(profile().workload, weights_offload=f"blocks:{count}" if count else "none")
    meaning = semantics(executor, "flux", swapped=count > 0)
    return Estimator(dataclasses.replace(profile(), workload=workload), find_gpu(gpu), meaning)


def block_bytes(kinds: tuple[int, ...], count: int) -> int:
    blocks = managed_blocks(profile().structure, count)
    return sum(size for b in blocks for size, kind in profile().block_weights[b] if kind in kinds)


@pytest.mark.parametrize("model", ["flux", "z_image"])
def test_the_peak_of_a_real_run_is_within_two_percent_and_no_bit_changes(model: str) -> None:
    workload = reduced_copy(from_request({"model": model, "weights_offload": "blocks:100"}))
    for found in compare_on_cpu(workload, lambda _: SCHEDULES):
        assert found.exact, found.schedule.name
        assert abs(found.error) < 0.02, f"{found.schedule.name}: {found.error:+.2%}"


def test_the_blocks_of_a_thinned_trace_have_their_weights() -> None:
    found = trace(from_request({"model": "flux", "resolution": 256}), Target("cuda"))
    assert set(found.block_weights) == {b.name for b in found.structure.blocks}
    trained = sum(size for weights in found.block_weights.values() for size, kind in weights if kind == TRAINED)
    assert trained == sum(n * size * count for n, size, count in found.trained_sizes)
    last = found.structure.blocks[-1].name
    assert found.block_weights[last] == found.block_weights[found.structure.blocks[30].name]


def test_with_our_runtime_more_swapped_blocks_mean_a_lower_peak_and_more_on_the_host() -> None:
    for schedule in SCHEDULES[:3]:
        found = [estimator(n).estimate(schedule) for n in (0, 2, 4, 7)]
        assert [f.peak for f in found] == sorted((f.peak for f in found), reverse=True)
        assert [f.host for f in found] == sorted(f.host for f in found)
        assert found[-1].host == block_bytes((0,), 7)
        for f in found:
            assert sum(f.breakdown.values()) == f.peak


def test_the_trainer_has_the_whole_model_on_the_card_at_the_end_of_backward() -> None:
    plain, swapped = (estimator(n, Executor.SIMPLETUNER).estimate(TORCH) for n in (0, 7))
    ours = estimator(7).estimate(TORCH)
    assert ours.peak < swapped.peak <= plain.peak
    memory = estimator(7, Executor.SIMPLETUNER)
    found = memory.replay.run(memory.semantics.resolve(TORCH, memory.profile), memory.resident)
    assert found.weights_to_host == found.weights_from_host == block_bytes((0, 1, 2), 7)


def test_without_recomputation_the_trainer_s_saved_weights_stay_on_the_card() -> None:
    """Autograd holds the copy that a weight had when it was saved, whatever `module.to` does to the parameter."""
    none = estimator(7, Executor.SIMPLETUNER).estimate(Schedule())
    whole = estimator(0, Executor.SIMPLETUNER).estimate(Schedule())
    ours = estimator(7).estimate(Schedule())
    assert whole.breakdown["weights"] - none.breakdown["weights"] < 0.5 * block_bytes((0,), 7)
    assert whole.breakdown["weights"] - ours.breakdown["weights"] > 0.5 * block_bytes((0,), 7)


def test_the_trainer_moves_what_a_quantised_weight_takes() -> None:
    request = {"model": "flux", "resolution": 256, "weights_offload": "blocks:20"}
    moved = {}
    for precision in ("bf16", "int8-quanto", "nf4"):
        found = trace(from_request({**request, "precision": precision}), Target("cuda"))
        made = Estimator(found, find_gpu("H100"), semantics(Executor.SIMPLETUNER, "flux", swapped=True))
        whole = Estimator(
            dataclasses.replace(found, workload=dataclasses.replace(found.workload, weights_offload="none")),
            find_gpu("H100"),
            semantics(Executor.SIMPLETUNER, "flux"),
        )
        memory = made.replay.run(made.semantics.resolve(TORCH, found), made.resident)
        moved[precision] = memory.weights_to_host
        described = sum(
            size for b in managed_blocks(found.structure, 20) for size, k in found.block_weights[b] if k == DESCRIBED
        )
        assert (described > 0) == (precision != "bf16")
        assert made.estimate(TORCH).peak <= whole.estimate(TORCH).peak
    assert moved["nf4"] < 0.35 * moved["bf16"]
    assert 0.45 * moved["bf16"] < moved["int8-quanto"] < 0.65 * moved["bf16"]


def test_copies_that_run_beside_the_computation_cost_less_than_those_that_are_waited_for() -> None:
    ours, theirs = (estimator(7, e).estimate(TORCH) for e in (Executor.BUNDLED, Executor.SIMPLETUNER))
    assert 0 < ours.copy_seconds < theirs.copy_seconds  # type: ignore[operator]


def test_swapping_blocks_does_not_change_the_trace() -> None:
    plain, swapped = (from_request({"model": "flux", "weights_offload": w}) for w in ("none", "blocks:20"))
    assert (plain.swapped_blocks, swapped.swapped_blocks) == (0, 20)
    assert plain.traced() == swapped.traced()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"adapter": "full"}, "--adapter full cannot be estimated yet"),
    ],
)
def test_what_is_not_known_of_swapped_blocks_is_refused(request_: dict[str, str], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        from_request({"model": "flux", "weights_offload": "blocks:4", **request_})
