"""CPU runs of the reduced copies: predicted peak against the profiler's, and exactness. Prints a markdown table.

python benchmarks/cpu_accuracy.py [model ...]
"""

from __future__ import annotations

import sys
import time

from advisor.verification import Comparison, compare_on_cpu
from decision_rules.support import Executor, candidates
from probes.catalogue import families
from probes.workload import from_request, reduced_copy


def compare(model: str) -> list[Comparison]:
    """Every schedule that the bundled runtime supports for a model."""
    workload = reduced_copy(from_request({"model": model}))
    return compare_on_cpu(workload, lambda profile: candidates(Executor.BUNDLED, model, profile.structure))


def table(results: dict[str, list[Comparison]]) -> list[str]:
    """Markdown lines."""
    lines = ["| model | schedule | predicted MiB | measured MiB | error | bit-equal |", "|---|---|---|---|---|---|"]
    for model, comparisons in results.items():
        for c in comparisons:
            exact = "yes" if c.exact else "NO"
            lines.append(
                f"| {model} | {c.schedule.name} | {c.predicted / 2**20:.2f} | {c.measured / 2**20:.2f} | {c.error:+.2%} | {exact} |"
            )
    return lines


def main() -> None:
    results: dict[str, list[Comparison]] = {}
    for model in sys.argv[1:] or families():
        start = time.perf_counter()
        results[model] = compare(model)
        worst = max(results[model], key=lambda c: abs(c.error))
        print(
            f"{model}: {len(results[model])} schedules, worst {worst.error:+.2%} ({worst.schedule.name}), "
            f"all bit-equal: {all(c.exact for c in results[model])}, {time.perf_counter() - start:.0f} s",
            file=sys.stderr,
        )
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
