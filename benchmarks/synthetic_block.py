"""Checks the estimator on a plain stack of frozen transformer blocks against published figures, model aside.

    python benchmarks/synthetic_block.py

`data/synthetic_block.csv` holds peaks and times of every checkpointing backend at three lengths and two depths on two cards. Nothing
is fitted: the stack is traced like any model. What trains is one adapter of rank 1 before the first block, so that gradients pass
through every block. The published peaks hold weights in bf16 without master copies, optimizer or adapter.
"""

from __future__ import annotations

import statistics

import torch
from rich.console import Console
from rich.table import Table

from advisor.api import Session
from advisor.published import synthetic
from decision_rules.support import Executor
from estimators.devices import find_gpu
from estimators.estimate import GIB

TOLERANCE = 0.05
"""GiB."""


def main() -> None:
    session = Session()
    table = Table(title="a frozen stack, allocated peak in GiB and seconds a step")
    for name in (
        "GPU",
        "tokens",
        "layers",
        "schedule",
        "published",
        "predicted",
        "difference",
        "s",
        "predicted s",
        "error",
    ):
        table.add_column(name, justify="left" if name in ("GPU", "schedule") else "right")
    misses, times = [], []
    for row in synthetic():
        found = session.plan(row.workload, find_gpu(row.gpu), Executor.BUNDLED, schedules=[row.schedule]).schedules[0]
        miss = found.peak / GIB - row.peak_gib
        misses.append(abs(miss))
        error = (found.step_seconds or 0) / row.seconds - 1
        times.append(abs(error))
        table.add_row(
            row.gpu, str(row.tokens), str(row.layers), row.schedule.name, f"{row.peak_gib:.2f}", f"{found.peak / GIB:.2f}",
            f"{miss:+.3f}", f"{row.seconds:.4f}", f"{found.step_seconds or 0:.4f}", f"{error:+.0%}",
        )  # fmt: skip
    Console(width=120).print(table)
    print(
        f"peak: {sum(m <= TOLERANCE for m in misses)} of {len(misses)} cells within {TOLERANCE} GiB, largest difference "
        f"{max(misses):.3f} GiB; time: median error {statistics.median(times):.1%}; torch {torch.__version__}"
    )


if __name__ == "__main__":
    main()
