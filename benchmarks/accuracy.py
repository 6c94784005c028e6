"""Everything that `docs/accuracy.md` says, measured anew. Prints the page; with --write it replaces it, and `data/calibration.json`.

    python benchmarks/accuracy.py [--write] [--skip-cpu] [--tools]

Three parts: CPU runs of reduced copies against PyTorch's profiler, the published GPU measurements in `data/measured.csv`, and other
estimators on some of these (`other_tools.py`; kept as they are unless asked for).
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from pathlib import Path

import other_tools
from cpu_accuracy import compare, table

from advisor.calibrating import case_of, synthetic_cases
from advisor.published import Answered, by_family, estimates
from estimators.calibration import Calibration
from estimators.estimate import GIB
from estimators.fitting import calibrate
from probes import resources
from probes.catalogue import families

ROOT = Path(__file__).parents[1]
CPU_MODELS = ("flux", "sd3", "wan", "sdxl", "z_image")
CPU_START, CPU_END = "<!-- CPU runs -->", "<!-- end of CPU runs -->"
TOOLS_START, TOOLS_END = "<!-- other tools -->", "<!-- end of other tools -->"


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


def regional(answered: list[Answered]) -> str:
    """The rows with regional compile, whose figures are marked unfit for comparison and take part in nothing else."""
    figures = {r["id"]: r for r in csv.DictReader(resources.text("measured.csv").splitlines())}
    seen = [(a.estimate, figures[a.row.id]) for a in answered if a.workload.compiles]
    peak = [e.peak / GIB / float(r["peak_vram_gib"]) - 1 for e, r in seen if r["peak_vram_gib"]]
    seconds = [e.step_seconds / float(r["sec_per_step"]) - 1 for e, r in seen if e.step_seconds and r["sec_per_step"]]
    ran_out = [e for e, r in seen if r["status"] == "OOM"]
    return (
        f"Regional compile, as eager without checkpointing ({len(seen)} rows, Krea 2): peak median absolute error "
        f"{statistics.median(map(abs, peak)):.1%}, worst {max(peak, key=abs):+.1%}; step time {statistics.median(map(abs, seconds)):.0%}, worst "
        f"{max(seconds, key=abs):+.0%}; {sum(not e.fits for e in ran_out)} of {len(ran_out)} that ran out of memory are predicted not to fit."
    )


def published() -> tuple[list[str], Calibration]:
    """Markdown lines and the calibration that follows."""
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
        for name in sorted({a.estimator.kind for a in members}):
            peaks, times, _ = errors([a for a in members if a.estimator.kind == name])
            if peaks:
                timed = f"{statistics.median(map(abs, times)):.0%}" if times else "-"
                out.append(
                    f"| {family} | {name} | {len(peaks)} | {statistics.median(map(abs, peaks)):.1%} | {max(peaks, key=abs):+.1%} | {timed} |"
                )
    out += ["", regional(answered)]
    plain = [a for a in answered if a.row.precision == "bf16" and not a.row.schedule.offload_attention]
    for names in (("SD3", "Z-Image Turbo"),):
        peaks = errors([a for a in plain if a.row.family in names])[0]
        out += [
            "",
            f"{' and '.join(names)}, bf16, without attention offload: median absolute peak error {statistics.median(map(abs, peaks)):.2%} ({len(peaks)} rows).",
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
    found = calibrate(
        [*(case_of(a) for a in answered if a.row.peak_gib or a.row.seconds), *synthetic_cases()],
        f"{len(answered)} published rows",
    )
    out += ["", "## Calibration", "", *_calibration(found)]
    return out, found


def _calibration(found: Calibration) -> list[str]:
    out = ["| left out in turn | rows | median absolute | 95th percentile | bias |", "|---|---|---|---|---|"]
    for name in ("peak", "time, families left out", "time, cards left out"):
        e = found.errors[name]
        said = "peak (nothing is fitted to it)" if name == "peak" else name
        out.append(
            f"| {said} | {e['rows']} | {e['median_absolute']:.1%} | {e['p95_absolute']:.0%} | {e['bias']:+.1%} |"
        )
    for name in ("peaks inside the band of the other families", "times inside the band of the other families"):
        e = found.errors[name]
        out.append(f"\n{name}: {e['share']:.1%} of {e['rows']}.")
    r = found.errors["residual model"]
    out.append(
        f"\nA ridge regression on top of the rates (what kind of step it is) changes the median error on unseen families by "
        f"{-r['gain on unseen families']:+.0%}; it is {'used' if r['used'] else 'not used'} (needed: -{r['needed']:.0%})."
    )
    out += ["", "Rates: " + ", ".join(f"{k} {v:.3g}" for k, v in found.rates.items()) + "."]
    out += ["", "95 % bands by kind of job:", "", "| kind | peak | step time | from |", "|---|---|---|---|"]
    for name, b in found.bands.items():
        (low, high), (fast, slow) = b.peak(10**9), b.time(1.0)
        rough = " (a rough guess)" if b.unreliable else ""
        out.append(
            f"| {name}{rough} | {low / 1e9 - 1:+.1%} to {high / 1e9 - 1:+.1%} | {fast - 1:+.0%} to {slow - 1:+.0%} | {b.source} |"
        )
    return out


def kept(page: str, start: str, end: str) -> str:
    """A marked section of the page as it is."""
    return page.partition(start)[2].partition(end)[0].strip() or "Not run."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/accuracy.md and data/calibration.json")
    parser.add_argument(
        "--skip-cpu", action="store_true", help="only the published rows; keeps the CPU table of docs/accuracy.md"
    )
    parser.add_argument("--tools", action="store_true", help="ask the other estimators anew (a quarter of an hour)")
    args = parser.parse_args()
    gpu, found = published()
    page = (ROOT / "docs" / "accuracy.in.md").read_text()
    old = (ROOT / "docs" / "accuracy.md").read_text()
    cpu: list[str] = []
    if args.skip_cpu:
        cpu = [kept(old, CPU_START, CPU_END)]
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
    tools = other_tools.measured() if args.tools else [kept(old, TOOLS_START, TOOLS_END)]
    for mark, lines in (("{{cpu}}", cpu), ("{{published}}", gpu), ("{{tools}}", tools)):
        page = page.replace(mark, "\n".join(lines))
    print(page)
    if args.write:
        (ROOT / "docs" / "accuracy.md").write_text(page)
        (ROOT / "data" / "calibration.json").write_text(json.dumps(found.to_json(), indent=1) + "\n")


if __name__ == "__main__":
    main()
