"""The benchmark of the runtime's overhead measures what it says; how fast this machine is, is not judged here."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from probes.build import real_job
from probes.workload import from_request, reduced_copy

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "runtime_overhead.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.mark.slow
def test_the_same_schedule_has_the_same_peak_as_by_hand(script: dict[str, Any]) -> None:
    torch.manual_seed(0)
    job = real_job(reduced_copy(from_request({"model": "sd3"})))
    names = (script["REFERENCE"], script["SAME"], "ours: torch offload-attention", "no schedule")
    rows = script["measure"](job, 3, {name: script["VARIANTS"][name] for name in names})
    by_hand, same, attention, nothing = (rows[name] for name in names)
    assert same.peak == pytest.approx(by_hand.peak, rel=0.01)
    assert nothing.peak > 1.5 * by_hand.peak
    assert attention.peak > by_hand.peak, "on a CPU host copies count as well"
    assert by_hand.ratio == 1
    lines = script["table"]("sd3", rows)
    assert len(lines) == 4 + len(names) + 1
    assert not any("forward" in vars(m) for m in job.model.modules())
