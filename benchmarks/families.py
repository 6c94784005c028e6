"""Plans every family and variant at its default shape and prints what came out, as a markdown table.

    python benchmarks/families.py [FAMILY ...]

Peaks are allocated bytes of LoRA training (rank 16, bf16) on an H100, without and with whole-block checkpointing.
"""

from __future__ import annotations

import json
import resource
import sys
import time

from estimators.devices import find_gpu
from estimators.estimate import GIB, Estimator, Semantics
from estimators.schedule import Backend, Schedule
from probes import catalogue
from probes.build import config_of
from probes.profile import Profile
from probes.target import Target
from probes.traced import trace
from probes.workload import Workload, from_request


def shape_of(w: Workload) -> str:
    """The default shape in words."""
    kind = w.family.kind
    parts = [f"{w.seconds} s" if kind == "audio" else w.resolution]
    if kind == "video":
        parts.append(f"{w.frames} f")
    if w.references:
        parts.append(f"{w.references} ref.")
    return f"{', '.join(parts)}, {w.text_tokens} text"


def lists_of(profile: Profile) -> str:
    """The model's lists of blocks, those of a UNet's levels counted together."""
    chains = profile.structure.chains
    if len(chains) > 4:
        return f"{len(chains)} lists"
    return ", ".join(f"{c.path} {len(c.blocks)}" for c in chains)


def row(w: Workload, profile: Profile, seconds: float) -> str:
    estimator = Estimator(profile, find_gpu("H100"), Semantics())
    peaks = [f"{estimator.estimate(Schedule(b)).peak / GIB:.2f}" for b in (Backend.NONE, Backend.TORCH)]
    blocks = len(profile.structure.blocks)
    cells = [
        w.model,
        w.variant,
        f"{profile.parameters / 1e9:.2f} B",
        lists_of(profile),
        str(blocks),
        shape_of(w),
        f"{seconds:.1f}",
        *peaks,
        "; ".join(profile.notes) or "-",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    print("| family | variant | parameters | lists | blocks | shape | traced s | none GiB | torch GiB | notes |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in sys.argv[1:] or catalogue.families():
        done: dict[str, tuple[Profile, float]] = {}
        for variant in catalogue.find(name).variants:
            w = from_request({"model": name, "variant": variant})
            key = json.dumps([w.family.model_class, config_of(w), shape_of(w)], sort_keys=True)
            if key not in done:
                start = time.perf_counter()
                profile = trace(w, Target("cuda"))
                done[key] = profile, time.perf_counter() - start
            print(row(w, *done[key]), flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    print(f"largest memory of this process: {peak:.2f} GiB", file=sys.stderr)


if __name__ == "__main__":
    main()
