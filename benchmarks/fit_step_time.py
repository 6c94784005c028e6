"""Fits the shared rates of the step-time model on published step times and writes `data/step_time.json`.

    python benchmarks/fit_step_time.py [--write]

Eight physical rates for all models and cards together (matrix, attention and memory efficiency, cache, launch and hook cost, copy
cost), least squares on the logarithm of predicted over measured, held near their starting values by a weak prior.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np
from published import Answered, estimates
from scipy.optimize import least_squares

from estimators.step_time import Clock, default_rates, rates_from

START = {
    "gemm": (0.7, 0.4, 0.9),
    "attention": (0.4, 0.1, 0.8),
    "memory": (0.8, 0.4, 0.95),
    "cache_speedup": (2.0, 1.0, 6.0),
    "launch_seconds": (1.2e-5, 2e-6, 6e-5),
    "hook_seconds": (2e-5, 1e-9, 2e-4),
    "copy_seconds": (5e-5, 1e-9, 1e-3),
    "exposed_copy_out": (0.3, 1e-3, 1.0),
}
"""Starting value and bounds."""
PRIOR = 0.1
FAMILIES = ("SD3", "Z-Image Turbo")
"""The other families' rows stay unseen, so that `docs/accuracy.md` shows predictions for them."""


def fit(cases: list[Answered]) -> dict[str, float]:
    """The rates that explain `cases` best."""
    names = list(START)
    start = np.log([START[n][0] for n in names])
    memories = [
        c.estimator.replay.run(
            c.estimator.semantics.resolve(c.estimate.schedule, c.estimator.profile), c.estimator.resident
        )
        for c in cases
    ]

    def residuals(z: np.ndarray) -> np.ndarray:
        rates = rates_from(dict(zip(names, np.exp(z), strict=True)))
        out = []
        for c, memory in zip(cases, memories, strict=True):
            time = Clock(c.estimator.profile, c.estimator.device, rates).step(
                memory, copies_out_overlap=c.estimator.semantics.copies_out_overlap
            )
            assert time is not None
            out.append(np.log(time.total / (c.row.seconds or 1)))
        return np.concatenate([out, PRIOR * (z - start)])

    low, high = (np.log([START[n][i] for n in names]) for i in (1, 2))
    found = least_squares(residuals, start, bounds=(low, high), loss="soft_l1")
    return {n: float(f"{v:.4g}") for n, v in zip(names, np.exp(found.x), strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write data/step_time.json")
    args = parser.parse_args()
    answered, _ = estimates()
    cases = [a for a in answered if a.row.seconds and a.row.family in FAMILIES and a.row.precision == "bf16"]
    families = sorted({a.row.family for a in cases})
    fitted = fit(cases)
    print(f"{len(cases)} rows of {', '.join(families)}")
    for name, value in fitted.items():
        print(f"  {name:18s} {value:.4g}")
    for family in families:
        others = [c for c in cases if c.row.family != family]
        if others:
            held_out = fit(others)
            print(f"left out {family}: " + ", ".join(f"{n} {v:.3g}" for n, v in held_out.items()))
    if args.write:
        rates = {**dataclasses.asdict(default_rates()), **fitted}
        source = f"benchmarks/fit_step_time.py on {len(cases)} published step times of {', '.join(families)} (H100, L40S); convolution, kernel tail, blend and the Hopper share are assumptions"
        path = Path(__file__).parents[1] / "data" / "step_time.json"
        path.write_text(json.dumps({"rates": rates, "source": source}, indent=2) + "\n")
        print(f"written: {path}")


if __name__ == "__main__":
    main()
