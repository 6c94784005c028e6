"""Our runtime against `torch.utils.checkpoint` around every block and `save_on_cpu`: step times and peaks in one run.

python benchmarks/runtime_overhead.py [--rounds N] [--device cpu|cuda]

Variants take turns within a round, so whatever else the machine does hits all of them; the ratio of a round is taken before the median.
On a CPU the peak is the profiler's sum of allocator events, on a GPU PyTorch's own counter. For tensors that are on the CPU already
`save_on_cpu` copies nothing, so there it only shows what hooks cost; our runtime does copy.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from advisor.runtime import apply
from estimators.schedule import Backend, Schedule
from probes.build import Job, device_job, real_job
from probes.cpu_memory import profiled_peak
from probes.discover import discover
from probes.step import forward_loss
from probes.workload import from_request, reduced_copy

Context = Callable[[Job], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def by_hand(job: Job) -> Iterator[None]:
    """What people write: every block's forward inside a checkpoint."""
    blocks = [job.model.get_submodule(b.name) for b in discover(job.model).blocks]
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


@contextlib.contextmanager
def saved_on_cpu(job: Job) -> Iterator[None]:
    """All saved tensors of the step on the host."""
    with torch.autograd.graph.save_on_cpu(pin_memory=next(job.model.parameters()).is_cuda):
        yield


def ours(schedule: Schedule) -> Context:
    return lambda job: apply(job.model, schedule)


VARIANTS: dict[str, Context] = {
    "torch.utils.checkpoint, each block": by_hand,
    "ours: torch": ours(Schedule(Backend.TORCH)),
    "ours: torch interval=2": ours(Schedule(Backend.TORCH, 2)),
    "ours: torch interval=2 stride=4": ours(Schedule(Backend.TORCH, 2, 4)),
    "ours: unsloth": ours(Schedule(Backend.UNSLOTH)),
    "ours: torch offload-attention": ours(Schedule(Backend.TORCH, offload_attention=True)),
    "save_on_cpu": saved_on_cpu,
    "ours: none offload-attention": ours(Schedule(offload_attention=True)),
    "no schedule": lambda job: contextlib.nullcontext(),
}
REFERENCE, SAME = "torch.utils.checkpoint, each block", "ours: torch"


@dataclass(frozen=True)
class Row:
    """Medians over the rounds. Seconds and bytes; ratios against the reference of the same round."""

    seconds: float
    ratio: float
    low: float
    high: float
    """Quartiles of the ratio."""
    peak: int


def _step(job: Job) -> None:
    forward_loss(job).backward()
    for p in job.model.parameters():
        p.grad = None
    if next(job.model.parameters()).is_cuda:
        torch.cuda.synchronize()


def _peak(job: Job) -> int:
    if not next(job.model.parameters()).is_cuda:
        return profiled_peak(lambda: _step(job), 0).peak
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _step(job)
    return torch.cuda.max_memory_allocated() - before


def measure(job: Job, rounds: int, variants: dict[str, Context] = VARIANTS) -> dict[str, Row]:
    """Times every variant `rounds` times, in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    peaks: dict[str, int] = {}
    for name, context in variants.items():
        with context(job):
            _step(job)
            peaks[name] = _peak(job)
    gc.collect()
    gc.disable()
    try:
        for i in range(rounds):
            order = list(variants.items())
            for name, context in order if i % 2 else reversed(order):
                with context(job):
                    _step(job)
                    start = time.perf_counter()
                    _step(job)
                    seconds[name].append(time.perf_counter() - start)
            gc.collect()
    finally:
        gc.enable()
    rows = {}
    for name, found in seconds.items():
        ratios = [a / b for a, b in zip(found, seconds[REFERENCE], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios * 3)
        rows[name] = Row(statistics.median(found), middle, low, high, peaks[name])
    return rows


def table(title: str, rows: dict[str, Row]) -> list[str]:
    """Markdown."""
    lines = [f"**{title}**", "", "| variant | ms a step | ratio to the reference (quartiles) | peak MiB | ratio |"]
    lines.append("|---|---|---|---|---|")
    for name, r in rows.items():
        peak = r.peak / rows[REFERENCE].peak
        lines.append(
            f"| {name} | {r.seconds * 1e3:.1f} | {r.ratio:.3f} ({r.low:.3f} to {r.high:.3f}) | {r.peak / 2**20:.1f} | {peak:.2f} |"
        )
    return [*lines, ""]


def jobs(device: str) -> dict[str, Job]:
    """Reduced copies with LoRA on a CPU (wide enough that operators outweigh Python), the models themselves on a GPU."""
    found: dict[str, Job] = {}
    for model in ("sd3", "wan"):
        workload = from_request({"model": model})
        found[model] = real_job(reduced_copy(workload)) if device == "cpu" else device_job(workload, device)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    torch.manual_seed(0)
    for model, job in jobs(options.device).items():
        assert isinstance(job.model, nn.Module)
        rows = measure(job, options.rounds)
        print("\n".join(table(f"{model} on {options.device}, {options.rounds} rounds", rows)))
        verdict = "not slower" if rows[SAME].ratio <= 1.02 else "SLOWER"
        print(f"{model}: the same schedule takes {rows[SAME].ratio:.3f} of the time by hand: {verdict}\n", flush=True)


if __name__ == "__main__":
    main()
