"""Other estimators beside ours, on the same published rows: what each says, how far off it is, and what it takes for a fit.

    python benchmarks/other_tools.py [family ...]

Rows: published measurements of bf16 LoRA training without host offloading (`data/measured.csv`), and the bf16 ones that ran out of
memory. Peak:

* ``accelerate estimate-memory``: `calculate_maximum_sizes` on the real meta model, then the Adam figure that the command prints;
* DeepSpeed's `estimate_zero2_model_states_mem_needs`, one GPU, no offload;
* `torch.distributed._tools.mem_tracker.MemTracker` on a training step of the real model with its LoRA on fake CPU tensors, the schedule
  applied by our runtime: as a CPU dispatches it, and once more with what a CUDA device does differently (`probes/targets.py`).

Step time: `torch.distributed._tools.runtime_estimator.RuntimeEstimator` in the same run, with the card's data-sheet rates (it would ask the
GPU of this machine for them), and a plain roofline of our own: FLOPs of the step over the card's dense rate plus bytes over its
bandwidth, recomputation included, no launch cost, no efficiency.

Sizes are GiB, times seconds. A tool that is not installed is named and left out.
"""

from __future__ import annotations

import contextlib
import importlib
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from advisor import apply
from advisor.api import Session
from advisor.published import Row, rows
from decision_rules.support import Executor, job_check, job_semantics
from estimators.devices import Device, find_gpu
from estimators.estimate import GIB, Estimator, Semantics
from estimators.memory import Memory
from estimators.schedule import Backend, Schedule, resolve
from probes import build
from probes.profile import Profile
from probes.step import forward_loss, make_optimizer
from probes.structure import Structure
from probes.target import Target
from probes.targets import CudaFunctions
from probes.traced import placeholders
from probes.workload import Workload, from_request

FAMILIES = ("SD3", "Lumina2", "Z-Image Turbo", "Kandinsky 5 Image")
"""Which take ten minutes or more together; of Kandinsky only the rows that ran out of memory (a LoKr), on which MemTracker is not asked."""
OURS, ACCELERATE, DEEPSPEED = (
    "advise",
    "accelerate estimate-memory, training with Adam",
    "DeepSpeed ZeRO-2 estimate, one GPU",
)
TRACKED, TRACKED_CUDA = "torch MemTracker, as a CPU dispatches", "torch MemTracker, as a GPU dispatches"
TIMED, PLAIN = "torch RuntimeEstimator, operator-level-cost-model", "plain roofline"


@dataclass
class Said:
    """What the tools say about one row. Bytes and seconds."""

    row: Row
    device: Device
    peak: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def chosen(families: Sequence[str]) -> list[Row]:
    """The rows to compare on, by family and schedule."""
    found = []
    for r in rows():
        plain = r.precision == "bf16" and r.request.get("weights_offload", "none") == "none"
        moved = r.schedule.offload_attention or r.schedule.backend.offloads_inputs
        ran = r.request["adapter"] == "lora" and (r.peak_gib or r.seconds)
        if plain and not moved and (r.out_of_memory or ran) and r.family in families:
            found.append(r)
    return sorted(found, key=lambda r: r.family)


def accelerate_bytes(workload: Workload) -> int:
    """What ``accelerate estimate-memory`` prints under "Training using Adam" for the model in bf16's size: four times its weights."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    with torch.device("meta"):
        total, _ = calculate_maximum_sizes(build.build_base(workload))
    return max(estimate_training_usage(total, "bfloat16").values())


def deepspeed_bytes(workload: Workload) -> int:
    """DeepSpeed's figure for parameters, gradients and optimizer states on one GPU; activations are not in it."""
    module = importlib.import_module("deepspeed.runtime.zero.stage_1_and_2")
    with torch.device("meta"):
        total = sum(p.numel() for p in build.build_base(workload).parameters())
    return int(module.estimate_zero2_model_states_mem_needs(total, 1, 1, cpu_offload=False)[1])


def _lora_tracker() -> Any:
    """A MemTracker that takes frozen parameters (unchanged, it asks each one for a gradient hook and stops at the first) and keeps no peaks
    of single modules (which it looks through at every operator: minutes a step for a model with a thousand LoRA modules)."""
    from torch.distributed._tools.mem_tracker import MemTracker

    class LoraTracker(MemTracker):
        memory_tracking: Any

        def _track_module_params_and_buffers(self, module: Any, install_grad_hooks: bool = True) -> Any:
            return super()._track_module_params_and_buffers(module, install_grad_hooks=False)

        def _update_peak_stats(self, peak_state: Any) -> None:
            modules, self.memory_tracking = self.memory_tracking, {}
            try:
                super()._update_peak_stats(peak_state)
            finally:
                self.memory_tracking = modules

    return LoraTracker()


@contextlib.contextmanager
def _timing(cards: Mapping[str, Device]) -> Iterator[tuple[Any, dict[str, float]]]:
    """A RuntimeEstimator for cards that are not here, and the seconds that it adds up for each.

    Changed: where it takes the rates from; and operators with outputs of two types (flash attention's log-sum-exp is float32), at
    which it would stop, count with the first one.
    """
    from torch.distributed._tools import runtime_estimator
    from torch.utils import _runtime_estimation

    compute_time, transfer_time = runtime_estimator.get_compute_time, runtime_estimator.get_transfer_time
    seconds, transfers = dict.fromkeys(cards, 0.0), dict.fromkeys(cards, 0.0)
    card = next(iter(cards.values()))

    def tflops(dtype: torch.dtype) -> float:
        rates = {torch.float32: card.fp32_flops, torch.bfloat16: card.bf16_flops, torch.float16: card.fp16_flops}
        return (rates.get(dtype) or 0.0) / 1e12

    def bandwidth() -> float:
        return (card.memory_bytes_per_second or 0.0) / 1e9

    def transfer(*args: Any) -> float:
        nonlocal card
        for name in cards:
            card = cards[name]
            transfers[name] = transfer_time(*args)
        return 0.0

    def compute(func: Any, args: Any, kwargs: Any, out: Any, types: Any) -> float:
        nonlocal card
        first = {next(t.dtype for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor))} if types else types
        for name in cards:
            card = cards[name]
            seconds[name] += max(transfers[name], compute_time(func, args, kwargs, out, set(first))) / 1e9
        return 0.0

    estimator = runtime_estimator.RuntimeEstimator()
    with (
        mock.patch.object(_runtime_estimation, "get_device_tflops", tflops),
        mock.patch.object(_runtime_estimation, "get_gpu_dram_gbps", bandwidth),
        mock.patch.object(runtime_estimator, "get_compute_time", compute),
        mock.patch.object(runtime_estimator, "get_transfer_time", transfer),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(runtime_estimator, "print", create=True),
    ):
        yield estimator(estimate_mode_type="operator-level-cost-model"), seconds


def as_run(schedule: Schedule, structure: Structure, meaning: Semantics) -> Schedule:
    """The schedule for our runtime that checkpoints what the trainer does: block by block, where it does not group them."""
    units = resolve(schedule, structure, meaning.interval_form).units
    if schedule.backend is Backend.NONE or schedule.backend.feed_forward_only or any(len(u.modules) > 1 for u in units):
        return schedule
    names = {u.modules[0] for u in units}
    return Schedule.per_block(["recompute" if b.name in names else "keep" for b in structure.blocks])


def fake_step(workload: Workload, schedule: Schedule, structure: Structure, target: Target | None, watch: Any) -> None:
    """One training step on fake CPU tensors, with optimizer states already there, inside ``watch(job, optimizer)``.

    Args:
        target: dispatch as this device does, in the forward pass and in recomputation; None: as a CPU does.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.device("meta"):
        model = build.build_base(workload)
    build.inject_adapter(model, workload)
    placeholders(model, fake, workload)
    model.train()
    functions = CudaFunctions(target) if target is not None else contextlib.nullcontext()
    for block in structure.blocks if target is not None else ():
        _inside(model.get_submodule(block.name), functions)
    with fake, contextlib.ExitStack() as stack:
        inputs, wanted = build.make_inputs(workload, model)
        job = build.Job(model, inputs, wanted, workload.family.output_stack, build.autocast_dtype(workload))
        trained = [p for _, p in job.trainable()]
        optimizer = make_optimizer(workload.optimizer, trained)
        for p in trained:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()
        if schedule != Schedule():
            stack.enter_context(apply(model, schedule, structure=structure))
        with watch(job, optimizer):
            with functions:
                loss = forward_loss(job)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def _inside(module: Any, functions: Any) -> None:
    """A block's forward under `functions`, also when a checkpoint runs it again (function modes are not active there)."""
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        with functions:
            return forward(*args, **kwargs)

    module.forward = run


def tracked(
    workload: Workload, schedule: Schedule, structure: Structure, target: Target | None, cards: Mapping[str, Device]
) -> tuple[float, dict[str, float]]:
    """MemTracker's peak (bytes) and, for each card, RuntimeEstimator's step time (seconds)."""
    tracker = _lora_tracker()

    @contextlib.contextmanager
    def memory(job: build.Job, optimizer: Any) -> Iterator[None]:
        tensors = [t for t in pytree.tree_leaves(job.inputs) if isinstance(t, torch.Tensor)]
        tracker.track_external(job.model, optimizer, *tensors, job.target)
        with tracker:
            yield

    fake_step(workload, schedule, structure, target, memory)
    peak = sum(snapshot["Total"] for snapshot in tracker.get_tracker_snapshot("peak").values())
    if not cards:
        return peak, {}
    with _timing(cards) as (estimator, seconds):
        fake_step(workload, schedule, structure, target, lambda *_: estimator)
    return peak, seconds


def plain_roofline(profile: Profile, memory: Memory, device: Device) -> float:
    """FLOPs over the dense bf16 rate plus bytes over the bandwidth, of a step with its recomputation. Seconds."""
    tape = profile.tape
    flops, moved = float(tape.op_flops.sum()), float(tape.op_bytes.sum())
    for span in memory.recomputed:
        for start, end in span.ranges:
            inside = (tape.op_at >= start) & (tape.op_at < min(end, span.stop + 1))
            flops += float(tape.op_flops[inside].sum())
            moved += float(tape.op_bytes[inside].sum())
    return flops / (device.bf16_flops or 1) + moved / (device.memory_bytes_per_second or 1)


def ask(families: Sequence[str], say: Callable[[str], None]) -> tuple[list[Said], list[str]]:
    """All tools on all rows, and what was left out and why."""
    session, said, missing = Session(), [], []
    weights: list[tuple[str, Callable[[Workload], int]]] = [(ACCELERATE, accelerate_bytes)]
    try:
        importlib.import_module("deepspeed.runtime.zero.stage_1_and_2")
        weights.append((DEEPSPEED, deepspeed_bytes))
    except Exception as error:  # noqa: BLE001  an optional package may fail to import in any way
        missing.append(f"DeepSpeed's estimator: not asked ({type(error).__name__}: {error}); pip install deepspeed")
    jobs: dict[Any, list[Row]] = defaultdict(list)
    for row in chosen(families):
        jobs[from_request(row.request).traced(), row.schedule].append(row)
    of_weights: dict[tuple[str, str, str], int] = {}
    for (_, schedule), members in jobs.items():
        began = time.perf_counter()
        workload = from_request(members[0].request)
        cards = {r.gpu: find_gpu(r.gpu) for r in members}
        timed = {r.gpu: cards[r.gpu] for r in members if r.seconds}
        _, profile, _ = session.profile(workload, next(iter(cards.values())), Executor.SIMPLETUNER)
        verdict = job_check(Executor.SIMPLETUNER, workload, profile.structure, schedule)
        if not verdict.supported:
            missing.append(f"{members[0].family}, {schedule.name}: {verdict.reason}")
            continue
        meaning = job_semantics(Executor.SIMPLETUNER, workload)
        run = as_run(verdict.effective, profile.structure, meaning)
        runs: dict[str, tuple[float, dict[str, float]]] = {}
        ways = [(TRACKED, None), (TRACKED_CUDA, Target("cuda", (9, 0), workload.attention))]
        for name, target in ways if any(not r.out_of_memory for r in members) else ():
            try:
                wanted = timed if target is not None else {}
                runs[name] = tracked(workload, run, profile.structure, target, wanted)
            except Exception as error:  # noqa: BLE001  what a tool does not take is a result
                text = " ".join(str(error).split())[:160]
                missing.append(f"{members[0].family}: {name} stopped ({type(error).__name__}: {text})")
        for row in members:
            device = cards[row.gpu]
            estimator = Estimator(profile, device, meaning)
            estimate = estimator.estimate(verdict.effective)
            memory = estimator.replay.run(meaning.resolve(verdict.effective, profile), estimator.resident)
            one = Said(row, device, {OURS: estimate.peak})
            if estimate.step_seconds:
                one.seconds[OURS] = estimate.step_seconds
            one.seconds[PLAIN] = plain_roofline(profile, memory, device)
            for name, figure in weights:
                key = (name, workload.model, workload.variant)
                if key not in of_weights:
                    of_weights[key] = figure(workload)
                one.peak[name] = of_weights[key]
            for name, (peak, seconds) in runs.items():
                one.peak[name] = peak
                if row.gpu in seconds:
                    one.seconds[TIMED] = seconds[row.gpu]
            said.append(one)
        say(f"{members[0].family} {schedule.name}: {time.perf_counter() - began:.0f} s")
    return said, missing


def quantile(values: list[float], q: float) -> float:
    """Of absolute values."""
    ordered = sorted(map(abs, values))
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def report(said: list[Said], missing: list[str]) -> list[str]:
    """Markdown lines (a fit: the peak is not above the card's usable memory, for every tool alike): a table of peaks, one of step times, each row's figures, and what was left out."""
    ran = [s for s in said if not s.row.out_of_memory]
    failed = [s for s in said if s.row.out_of_memory]
    families = sorted({s.row.family for s in said})
    out = [
        f"{len(ran)} rows that ran and {len(failed)} rows that ran out of memory (bf16, no host offloading): {', '.join(families)}.",
        "",
        "| peak | rows | median absolute error | 95th percentile | bias (median) | taken for a fit, ran out of memory | taken for too large, ran |",
        "|---|---|---|---|---|---|---|",
    ]
    shared = [s for s in ran if TRACKED_CUDA in s.peak and s.row.peak_gib]
    for name in (OURS, TRACKED_CUDA, TRACKED, ACCELERATE, DEEPSPEED):
        errors = [s.peak[name] / GIB / s.row.peak_gib - 1 for s in ran if s.row.peak_gib and name in s.peak]
        if not errors:
            continue
        asked = [s for s in failed if name in s.peak]
        called = sum(s.peak[name] <= s.device.usable_bytes for s in asked)
        refused = sum(s.peak[name] > s.device.usable_bytes for s in ran if name in s.peak)
        out.append(
            _line(name, errors)
            + f" {f'{called} of {len(asked)}' if asked else 'not asked'} | {refused} of {len(errors)} |"
        )
    if shared:
        out.append(
            _line(
                f"{OURS}, on the rows that MemTracker takes",
                [s.peak[OURS] / GIB / (s.row.peak_gib or 1) - 1 for s in shared],
            )
            + " | |"
        )
    out += [
        "",
        "| step time | rows | median absolute error | 95th percentile | bias (median) |",
        "|---|---|---|---|---|",
    ]
    for name in (OURS, TIMED, PLAIN):
        errors = [s.seconds[name] / s.row.seconds - 1 for s in ran if s.row.seconds and name in s.seconds]
        if errors:
            out.append(_line(name, errors))
    names = [n for n in (OURS, TRACKED_CUDA, TRACKED, ACCELERATE, DEEPSPEED) if any(n in s.peak for s in said)]
    out += [
        "",
        f"Peaks in GiB, in this order: published; {'; '.join(names)}. Step times in seconds: published; {OURS}; {TIMED}; {PLAIN}.",
        "",
        "| family | GPU | schedule | published |" + " |" * len(names) + " s/step published | | | |",
        "|---|---|---|---|" + "---|" * (len(names) + 4),
    ]
    for s in said:
        published = "out of memory" if s.row.out_of_memory else f"{s.row.peak_gib:.2f}" if s.row.peak_gib else "-"
        peaks = [f"{s.peak[n] / GIB:.2f}" if n in s.peak else "-" for n in names]
        seconds = [f"{s.row.seconds:.3f}" if s.row.seconds else "-"]
        seconds += [f"{s.seconds[n]:.3f}" if n in s.seconds else "-" for n in (OURS, TIMED, PLAIN)]
        out.append(f"| {' | '.join([s.row.family, s.row.gpu, s.row.schedule.name, published, *peaks, *seconds])} |")
    if missing:
        out += ["", "Left out:", "", *(f"* {text}" for text in dict.fromkeys(missing))]
    return out


def _line(name: str, errors: list[float]) -> str:
    median = statistics.median(map(abs, errors))
    return (
        f"| {name} | {len(errors)} | {median:.1%} | {quantile(errors, 0.95):.0%} | {statistics.median(errors):+.1%} |"
    )


def measured(families: Sequence[str] = FAMILIES) -> list[str]:
    """The whole comparison as markdown; progress goes to standard error."""
    return report(*ask(families, lambda text: print(text, file=sys.stderr, flush=True)))


def main() -> None:
    known = sorted({r.family for r in rows()})
    if unknown := [f for f in sys.argv[1:] if f not in known]:
        sys.exit(f"unknown family {unknown[0]!r}; valid: {', '.join(known)}")
    print("\n".join(measured(sys.argv[1:] or FAMILIES)))


if __name__ == "__main__":
    main()
