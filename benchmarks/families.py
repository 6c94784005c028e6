"""Plans every family and variant at its default shape and prints what came out, as a markdown table.

    python benchmarks/families.py [FAMILY ...] [--write]

Peaks are allocated bytes of LoRA training (rank 16, bf16) on an H100, without and with whole-block checkpointing. Every
workload is traced in a process of its own: its CPU seconds (user and system, so that a busy machine does not count) and its
largest memory are of that trace alone, after the libraries were imported.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from estimators.devices import find_gpu
from estimators.estimate import GIB, Estimator, Semantics
from estimators.schedule import Backend, Schedule
from probes import build, catalogue
from probes.profile import Profile
from probes.target import Target
from probes.traced import trace
from probes.workload import Workload, from_request

PAGE = Path(__file__).resolve().parents[1] / "docs" / "families.md"
SECONDS_LIMIT, MEMORY_LIMIT_GIB = 10.0, 4.0
COLUMNS = ("family", "variant", "parameters", "lists of blocks", "blocks", "shape", "CPU s", "memory GiB", "none GiB", "torch GiB", "notes")  # fmt: skip

HEAD = f"""# Families

Written by `python benchmarks/families.py --write`. Every family and variant at its default shape: LoRA rank 16, bf16, batch 1, on
an H100. *none* and *torch* are the predicted peaks (allocated GiB) without checkpointing and with every block recomputed. *CPU s*
and *memory* are what the trace took, in a process of its own; the limits are {SECONDS_LIMIT:g} s and {MEMORY_LIMIT_GIB:g} GiB.
Variants that are the same model at the same shape share a row.

"""


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


def measure(w: Workload) -> dict[str, Any]:
    """What one row says about a workload; run it in a fresh process."""

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    build.model_class(w.family.model_class)
    began = used()
    profile = trace(w, Target("cuda"))
    took = used() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    estimator = Estimator(profile, find_gpu("H100"), Semantics())
    return {
        "parameters": profile.parameters,
        "lists": lists_of(profile),
        "blocks": len(profile.structure.blocks),
        "seconds": took,
        "memory": memory,
        "peaks": [estimator.estimate(Schedule(b)).peak / GIB for b in (Backend.NONE, Backend.TORCH)],
        "notes": list(profile.notes),
    }


def in_own_process(w: Workload) -> dict[str, Any]:
    """`measure` in a forked process, which has the libraries already.

    Raises:
        RuntimeError: it failed; the process has said why.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with os.fdopen(writer, "w") as stream:
                json.dump(measure(w), stream)
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
        raise RuntimeError(f"{w.model} {w.variant} could not be traced")
    return dict(json.loads(text))


def row(w: Workload, variants: Iterable[str], found: dict[str, Any]) -> str:
    """One line of the table."""
    cells = [
        w.model,
        ", ".join(variants),
        f"{found['parameters'] / 1e9:.2f} B",
        found["lists"],
        str(found["blocks"]),
        shape_of(w),
        f"{found['seconds']:.1f}",
        f"{found['memory']:.2f}",
        *(f"{peak:.2f}" for peak in found["peaks"]),
        "; ".join(found["notes"]) or "-",
    ]
    return f"| {' | '.join(cells)} |"


def groups(names: Iterable[str]) -> Iterator[tuple[Workload, list[str]]]:
    """Workloads that differ, each with the variants that it stands for."""
    for name in names:
        found: dict[str, tuple[Workload, list[str]]] = {}
        for variant in catalogue.find(name).variants:
            w = from_request({"model": name, "variant": variant})
            key = json.dumps([w.family.model_class, build.config_of(w), shape_of(w)], sort_keys=True)
            found.setdefault(key, (w, []))[1].append(variant)
        yield from found.values()


def main() -> int:
    """Prints the table. Returns 1 when a trace went over a limit."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="default: all")
    parser.add_argument("--write", action="store_true", help=f"write the table of all families to {PAGE.name}")
    arguments = parser.parse_args()
    if arguments.write and arguments.families:
        parser.error("--write is for the table of all families")
    torch.set_num_threads(1)
    build.model_class("diffusers:FluxTransformer2DModel")
    import peft  # noqa: F401  so that every forked process has it

    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    print("\n".join(lines), flush=True)
    over = []
    for w, variants in groups(arguments.families or catalogue.families()):
        found = in_own_process(w)
        if found["seconds"] > SECONDS_LIMIT or found["memory"] > MEMORY_LIMIT_GIB:
            over.append(f"{w.model} {w.variant}: {found['seconds']:.1f} s, {found['memory']:.2f} GiB")
        lines.append(row(w, variants, found))
        print(lines[-1], flush=True)
    for text in over:
        print(f"over the limit: {text}", file=sys.stderr)
    if arguments.write:
        PAGE.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
