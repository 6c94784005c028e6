"""Every way of training that a CPU can run: the predicted peak is the profiler's, and no schedule changes a number."""

import dataclasses
from typing import Any

import pytest

from advisor.verification import compare_on_cpu
from estimators.schedule import Backend, Schedule
from probes.profile import Profile
from probes.workload import from_request, reduced_copy

SCHEDULES = [Schedule(), Schedule(Backend.TORCH_FFN), Schedule(Backend.TORCH), Schedule(Backend.UNSLOTH, interval=2)]


def _schedules(_: Profile) -> list[Schedule]:
    return SCHEDULES


@pytest.mark.parametrize(
    "request_",
    [
        {"adapter": "full", "optimizer": "adamw-fused"},
        {"adapter": "full", "optimizer": "torch-radam"},
        {"adapter": "full", "optimizer": "torch-adagrad"},
        {"adapter": "full", "optimizer": "torch-adafactor"},
        {"adapter": "full", "accumulate": 3},
        {"rank": 64, "accumulate": 2},
        {"dora": True},
        {"dora": True, "rslora": True, "lora_dropout": 0.0, "rank": 4},
        {"adapter": "loha", "rank": 4},
        {"adapter": "lokr", "lokr_factor": 4},
        {"adapter": "lokr", "lokr_factor": "4,FeedForward=8,to_out=2"},
        {"adapter": "lokr", "lokr_scalar": True, "lokr_factor": 4, "rank": 4},
        {"adapter": "lokr", "lokr_rebuild": True, "lokr_factor": 4},
    ],
    ids=lambda r: "-".join(f"{k}={v}" for k, v in r.items()),
)
def test_the_predicted_cpu_peak_is_the_profilers_and_schedules_are_bit_equal(request_: dict[str, Any]) -> None:
    workload = reduced_copy(from_request({"model": "sd3", **request_}))
    for found in compare_on_cpu(workload, _schedules):
        assert abs(found.error) <= 0.02, found
        assert found.exact, found


@pytest.mark.parametrize("master_weights", [False, True])
def test_so_is_a_full_fine_tunes_in_bf16_with_and_without_master_weights(master_weights: bool) -> None:
    asked = {"model": "sd3", "adapter": "full", "optimizer": "adamw", "master_weights": master_weights}
    workload = dataclasses.replace(reduced_copy(from_request(asked)), precision="bf16")
    for found in compare_on_cpu(workload, lambda _: [Schedule(), Schedule(Backend.TORCH)]):
        assert abs(found.error) <= 0.02, found
        assert found.exact, found
