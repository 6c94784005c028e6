"""Everything that `docs/accuracy.md` says, measured anew. Prints the page; with --write it replaces it, and `data/bands.json`.

    python benchmarks/accuracy.py [--write] [--skip-cpu]

Two parts: CPU runs of reduced copies against PyTorch's profiler, and the published GPU measurements in `data/measured.csv`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from cpu_accuracy import compare, table
from published import Answered, by_family, estimates

from estimators.bands import kind
from estimators.estimate import GIB
from probes.catalogue import families

ROOT = Path(__file__).parents[1]
CPU_MODELS = ("flux", "sd3", "wan", "sdxl", "z_image")
CPU_START, CPU_END = "<!-- CPU runs -->", "<!-- end of CPU runs -->"
UNSEEN = 1.25
"""The bands are this many times the error that 95 % of the rows of a kind stay within: other families may differ by more."""


WIDEST = 0.35
"""A wider band of the peak would say nothing; such a kind of job is marked unreliable instead."""


def quantile(values: list[float], q: float) -> float:
    """Of absolute values."""
    ordered = sorted(abs(v) for v in values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def errors(answered: list[Answered]) -> tuple[list[float], list[float], list[float]]:
    """Relative errors of peak, of step time, and of the step-time ratio to the same workload's plainest row."""
    peak = [a.estimate.peak / GIB / a.row.peak_gib - 1 for a in answered if a.row.peak_gib]
    timed = [a for a in answered if a.row.seconds and a.estimate.step_seconds]
    seconds = [a.estimate.step_seconds / a.row.seconds - 1 for a in timed]  # type: ignore[operator]
    ratios = []
    groups: dict[tuple[str, str], list[Answered]] = {}
    for a in timed:
        groups.setdefault((json.dumps(a.row.request, sort_keys=True), a.row.gpu), []).append(a)
    for members in groups.values():
        base = members[0]
        for a in members[1:]:
            predicted = a.estimate.step_seconds / base.estimate.step_seconds  # type: ignore[operator]
            ratios.append(predicted / (a.row.seconds / base.row.seconds) - 1)  # type: ignore[operator]
    return peak, seconds, ratios


def _band(answered: list[Answered]) -> dict[str, Any]:
    peak, seconds, _ = errors(answered)
    low, high = UNSEEN * quantile(peak, 0.95), UNSEEN * quantile(seconds, 0.95)
    unreliable = low > WIDEST
    low, high = min(low, WIDEST), min(high, 1.0)
    return {
        "unreliable": unreliable,
        "peak_below": round(low, 3),
        "peak_above": round(low, 3),
        "time_below": round(1 - 1 / (1 + high), 3),
        "time_above": round(high, 3),
        "source": f"benchmarks/accuracy.py: {UNSEEN:g} times the 95th percentile of the error over {len(peak)} published peaks and "
        f"{len(seconds)} step times of {len({a.row.family for a in answered})} families",
    }


def published() -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Markdown lines and the bands that follow."""
    answered, refused = estimates()
    lines = [
        "| family | base | GPU | schedule | peak published GiB | predicted | error | s/step published | predicted | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for _, members in by_family(answered):
        for a in members:
            r, e = a.row, a.estimate
            peak = (
                f"{r.peak_gib:.2f} | {e.peak / GIB:.2f} | {e.peak / GIB / r.peak_gib - 1:+.1%}"
                if r.peak_gib
                else f"- | {e.peak / GIB:.2f} | -"
            )
            if r.seconds and e.step_seconds:
                seconds = f"{r.seconds:.3f} | {e.step_seconds:.3f} | {e.step_seconds / r.seconds - 1:+.0%}"
            else:
                seconds = f"- | {e.step_seconds or 0:.3f} | -"
            lines.append(f"| {r.family} | {r.precision} | {r.gpu} | {r.schedule.name} | {peak} | {seconds} |")
    peak_errors, time_errors, ratio_errors = errors(answered)
    out = [
        f"{len(answered)} of {len(answered) + sum(refused.values())} published rows can be estimated by this version "
        f"({', '.join(sorted({a.row.family for a in answered}))}).",
        "",
        "| | rows | median absolute error | 95th percentile | bias (median) |",
        "|---|---|---|---|---|",
    ]
    for name, values in (
        ("peak", peak_errors),
        ("step time", time_errors),
        ("step-time ratio between schedules", ratio_errors),
    ):
        out.append(
            f"| {name} | {len(values)} | {statistics.median(map(abs, values)):.2%} | {quantile(values, 0.95):.2%} | {statistics.median(values):+.2%} |"
        )
    out += [
        "",
        "By family, median absolute errors:",
        "",
        "| family | kind of job | rows | peak | worst peak | step time |",
    ]
    out.append("|---|---|---|---|---|---|")
    for family, members in by_family(answered):
        for name in sorted({kind(a.workload) for a in members}):
            peak, seconds, _ = errors([a for a in members if kind(a.workload) == name])
            if peak:
                times = f"{statistics.median(map(abs, seconds)):.0%}" if seconds else "-"
                out.append(
                    f"| {family} | {name} | {len(peak)} | {statistics.median(map(abs, peak)):.1%} | {max(peak, key=abs):+.1%} | {times} |"
                )
    plain = [a for a in answered if a.row.precision == "bf16" and not a.row.schedule.offload_attention]
    for names in (("SD3", "Z-Image Turbo"),):
        peak = errors([a for a in plain if a.row.family in names])[0]
        out += [
            "",
            f"{' and '.join(names)}, bf16, without attention offload: median absolute peak error {statistics.median(map(abs, peak)):.2%} ({len(peak)} rows).",
        ]
    out += [
        "",
        "Every row:",
        "",
        *lines,
        "",
        "Rows that this version refuses, and why:",
        "",
        "| rows | reason |",
        "|---|---|",
    ]
    out += [f"| {n} | {why} |" for why, n in sorted(refused.items(), key=lambda kv: -kv[1])]
    kinds: dict[str, list[Answered]] = {}
    for a in answered:
        kinds.setdefault(kind(a.workload), []).append(a)
    bands = {name: _band(members) for name, members in sorted(kinds.items())}
    out += ["", "Bands by kind of job:", "", "| kind | peak | step time |", "|---|---|---|"]
    out += [
        f"| {n}{' (unreliable)' if b['unreliable'] else ''} | ±{b['peak_above']:.1%} | -{b['time_below']:.0%} to +{b['time_above']:.0%} |"
        for n, b in bands.items()
    ]
    return out, bands


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/accuracy.md and data/bands.json")
    parser.add_argument(
        "--skip-cpu", action="store_true", help="only the published rows; keeps the CPU table of docs/accuracy.md"
    )
    args = parser.parse_args()
    gpu, bands = published()
    page = (ROOT / "docs" / "accuracy.in.md").read_text()
    cpu: list[str] = []
    if args.skip_cpu:
        old = (ROOT / "docs" / "accuracy.md").read_text()
        cpu = [old.partition(CPU_START)[2].partition(CPU_END)[0].strip() or "Not run."]
    else:
        results = {}
        for model in CPU_MODELS if len(families()) > len(CPU_MODELS) else families():
            print(f"running {model} on the CPU ...", file=sys.stderr)
            results[model] = compare(model)
        every = [c for cs in results.values() for c in cs]
        cpu = [
            f"{len(every)} runs: largest error {max(abs(c.error) for c in every):.2%}, median "
            f"{statistics.median(abs(c.error) for c in every):.2%}; "
            f"bit-equal in {sum(c.exact for c in every)} of {len(every)}.",
            "",
            *table(results),
        ]
    page = page.replace("{{cpu}}", "\n".join(cpu)).replace("{{published}}", "\n".join(gpu))
    print(page)
    if args.write:
        (ROOT / "docs" / "accuracy.md").write_text(page)
        (ROOT / "data" / "bands.json").write_text(json.dumps(bands, indent=2) + "\n")


if __name__ == "__main__":
    main()
