"""How long one schedule takes to evaluate, by family. Prints a markdown table of medians over all schedules of the family.

python benchmarks/estimate_speed.py [--gpu H100] [model ...]

``simulation`` is the memory simulation alone (`Replay.run`), ``estimate`` all of it with the allocator's simulation, and
``known`` an estimate whose allocator result is in the cache and whose step is simulated. Nothing is reused between runs
except the profile. Profiles come from the cache or are traced first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from advisor.api import profile_for
from decision_rules.support import Executor, candidates, semantics
from estimators.devices import Device, find_gpu
from estimators.estimate import Estimator
from estimators.memory import Replay
from probes.profile import Profile
from probes.workload import from_request

FIVE = ("flux", "sd3", "wan", "sdxl", "z_image")


@dataclass(frozen=True)
class Speed:
    """Milliseconds; medians over schedules, the slowest one beside them."""

    model: str
    blocks: int
    storages: int
    schedules: int
    prepare: float
    """Once for a profile and a device."""
    simulation: float
    slowest_simulation: float
    estimate: float
    slowest_estimate: float
    known: float


def _milliseconds(run: Callable[[], object], repeats: int = 3) -> float:
    """Shortest of a few runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def measure(model: str, device: Device) -> Speed:
    """Times every schedule that SimpleTuner supports for a model at its default shape."""
    profile: Profile = profile_for(from_request({"model": model}), device, lambda text: print(text, file=sys.stderr))
    meaning = semantics(Executor.SIMPLETUNER, model)
    schedules = candidates(Executor.SIMPLETUNER, model, profile.structure)
    prepared = Estimator(profile, device, meaning)
    simulation, whole, known = [], [], []
    for schedule in schedules:
        resolution = meaning.resolve(schedule, profile)
        cache: dict[str, Any] = {}

        def simulate(resolution: Any = resolution) -> None:
            _fresh(prepared.replay).run(resolution, prepared.resident)

        def estimate(schedule: Any = schedule, cache: dict[str, Any] | None = None) -> None:
            one = Estimator(
                profile,
                device,
                meaning,
                clock=prepared.clock,
                replay=_fresh(prepared.replay),
                reserved_cache={} if cache is None else cache,
            )
            one.estimate(schedule)

        simulation.append(_milliseconds(simulate))
        whole.append(_milliseconds(estimate))
        estimate(cache=cache)
        known.append(_milliseconds(lambda estimate=estimate, cache=cache: estimate(cache=cache)))  # type: ignore[misc]
    return Speed(
        model,
        len(profile.structure.blocks),
        len(profile.tape.size),
        len(schedules),
        _milliseconds(lambda: Estimator(profile, device, meaning)),
        statistics.median(simulation),
        max(simulation),
        statistics.median(whole),
        max(whole),
        statistics.median(known),
    )


def _fresh(replay: Replay) -> Replay:
    """The same preparation without remembered results."""
    copy = object.__new__(Replay)
    copy.__dict__.update({**replay.__dict__, "_known": {}, "_stored": {}, "_last": None})
    return copy


def table(rows: list[Speed], device: Device) -> list[str]:
    """Markdown lines."""
    lines = [
        f"Milliseconds on {device.name}, one CPU thread: median over the schedules (slowest).",
        "",
        "| model | blocks | storages | schedules | prepare | simulation | estimate | known |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r.model} | {r.blocks} | {r.storages} | {r.schedules} | {r.prepare:.1f} "
            f"| {r.simulation:.1f} ({r.slowest_simulation:.1f}) | {r.estimate:.1f} ({r.slowest_estimate:.1f}) | {r.known:.1f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(FIVE))
    parser.add_argument("--gpu", default="H100")
    given = parser.parse_args()
    device = find_gpu(given.gpu)
    print("\n".join(table([measure(model, device) for model in given.models], device)))


if __name__ == "__main__":
    main()
