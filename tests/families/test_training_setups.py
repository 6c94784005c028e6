"""Every way of training that a CPU can run: the predicted peak is the profiler's, and no schedule changes a number."""

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
    ],
    ids=lambda r: "-".join(f"{k}={v}" for k, v in r.items()),
)
def test_the_predicted_cpu_peak_is_the_profilers_and_schedules_are_bit_equal(request_: dict[str, Any]) -> None:
    workload = reduced_copy(from_request({"model": "sd3", **request_}))
    for found in compare_on_cpu(workload, _schedules):
        assert abs(found.error) <= 0.02, found
        assert found.exact, found
