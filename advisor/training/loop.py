"""The training loop. A step is a function of the weights, the seed and its number, so it can be run again: after an interruption,
or under another schedule when memory runs out, and the losses are the same bits."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from advisor.interruption import Interruption, Stopped
from advisor.per_block import check, for_copy
from advisor.pretrained import load_model, pretrained_config
from advisor.runtime import Handle, RuntimeRefused, apply, compile_blocks
from advisor.training import checkpoints, memory, weights
from advisor.training.data import Cached, Synthetic, sample_files, slots, step_seed
from advisor.training.metrics import Metrics
from advisor.training.objective import Objective
from advisor.verification import Verifiable
from estimators.estimate import GIB, Estimate
from estimators.schedule import Schedule, ScheduleError
from estimators.swapping import managed_blocks
from probes.build import Job, autocast_dtype, build_base, device_job, given_job, real_job
from probes.discover import discover
from probes.step import make_optimizer, runs_as_named
from probes.structure import Structure
from probes.workload import Workload, WorkloadError, reduced_copy

DEFAULT_LR = 1e-4
CHECKPOINTS = "checkpoints"
"""Their folder inside the output folder, where diffusers looks for one safetensors file."""


class OutOfMemory(WorkloadError):
    """Memory ran out, and no smaller schedule of the plan is left."""


@dataclass(frozen=True)
class RunResult:
    """What a run did."""

    workload: Workload
    schedule: str
    """The last one, where memory ran out."""
    first_step: int
    """1, or the one after the checkpoint's."""
    steps: int
    """Number of the last step."""
    losses: tuple[float, ...]
    """Of the steps of this run."""
    lr: float
    seed: int
    accumulate: int
    seconds_per_step: float | None
    """Median over the steps after the first; None: no step was left to do."""
    saved: Path | None
    checkpoint: Path | None
    """The newest."""
    metrics: Path | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "workload": self.workload.describe(),
            "reduced_copy": self.workload.reduced,
            "schedule": self.schedule,
            "first_step": self.first_step,
            "steps": self.steps,
            "losses": list(self.losses),
            "lr": self.lr,
            "seed": self.seed,
            "accumulate": self.accumulate,
            "seconds_per_step": self.seconds_per_step,
            "saved": None if self.saved is None else str(self.saved),
            "checkpoint": None if self.checkpoint is None else str(self.checkpoint),
            "metrics": None if self.metrics is None else str(self.metrics),
            "notes": list(self.notes),
        }


def run(
    plan: Verifiable,
    *,
    steps: int,
    latents: Path | None = None,
    output: Path | None = None,
    pretrained: str | None = None,
    seed: int | None = None,
    lr: float | None = None,
    accumulate: int | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
    metrics: Path | None = None,
    device: str = "auto",
    on_step: Callable[[int, float, float], None] | None = None,
    say: Callable[[str], None] | None = None,
    interruption: Interruption | None = None,
) -> RunResult:
    """Trains.

    Args:
        steps: optimizer steps, those before a checkpoint included.
        latents: folder of cached samples; None: synthetic data.
        output: folder for checkpoints and for what was trained, which is written at the end, whole or not at all.
        pretrained: a diffusers folder or Hugging Face id with the base's weights; None: random ones.
        seed: of adapter, data order and noise (and of random weights). None: the checkpoint's, or 0.
        lr: learning rate. None: the checkpoint's, or 1e-4.
        accumulate: batches a step. None: the checkpoint's, or 1.
        checkpoint_every: steps from one checkpoint to the next; None: only when the run is stopped.
        resume: go on from the newest checkpoint in `output`.
        metrics: file for JSON lines.
        on_step: called after every step with its number (from 1), loss and seconds.
        say: told what is going on, one line at a time.
        interruption: asked after every step whether to stop.

    Raises:
        WorkloadError: what is asked for cannot be done; the message names the option, the file or the tensor.
        OutOfMemory: memory ran out under the plan's smallest schedule.
        RuntimeRefused: the runtime cannot execute the schedule.
        Stopped: the run was interrupted; the message says which checkpoint is there.
    """
    tell = say or (lambda _: None)
    if latents is not None:
        sample_files(latents)
    check(plan)
    checkpoint = _checkpoint(output, resume, checkpoint_every)
    settings = _settings(plan, checkpoint, seed, lr, accumulate, pretrained)
    if checkpoint is not None and checkpoint.step > steps:
        raise WorkloadError(f"--steps {steps}: {checkpoint.path} is at step {checkpoint.step} already; give more steps")
    use_cuda = torch.cuda.is_available() if device == "auto" else device == "cuda"
    notes: list[str] = list(plan.workload.family.notes)
    if checkpoint is not None:
        notes.append(f"resumed from {checkpoint.path}, step {checkpoint.step}")
        if (before := checkpoint.settings.get("lr")) != settings["lr"]:
            notes.append(f"the learning rate is {settings['lr']:g}, before it was {before}")
    workload = _what_trains(plan, pretrained, use_cuda, notes)
    with torch.device("meta"):
        shape_only = build_base(workload)
    objective = Objective(workload, shape_only)
    source: Cached | Synthetic = Synthetic()
    if latents is not None:
        wanted = slots(workload, shape_only)
        source = Cached(
            latents,
            wanted,
            workload.samples,
            settings["seed"],
            tell,
            shape_of="the shape of the reduced copy, which trains without --pretrained on a CPU,"
            if workload.reduced
            else "the planned shape",
            complete=pretrained is not None,
        )
    settings["data"] = source.fingerprint
    if checkpoint is not None:
        _same_run(checkpoint, settings)
    notes += [*source.notes, *objective.notes]
    start = 0 if checkpoint is None else checkpoint.step
    log = Metrics(metrics, after=start)
    try:
        tell("building the model")
        schedule = _first_schedule(plan, checkpoint, notes)
        try:
            job = _job(workload, schedule, pretrained, use_cuda, settings["seed"], notes, tell)
        except Exception as error:
            if not memory.is_out_of_memory(error):
                raise
            raise OutOfMemory(f"the weights of {workload.model} do not fit into the memory that is free here") from None
        trainer = _Trainer(job, workload, objective, source, plan, schedule, settings, tell, log, output)
        if settings["accumulate"] > 1 and plan.workload.accumulate == 1:
            held = sum(p.numel() * p.element_size() for _, p in job.trainable())
            notes.append(
                f"with --accumulate the gradients ({held / GIB:.3f} GiB) are held while the next batch runs forward; the plan does "
                "not count that"
            )
        if checkpoint is not None:
            checkpoints.restore(checkpoint, job, trainer.optimizer)
            trainer.set_lr()
            trainer.newest = checkpoint.path
        log.start()
        try:
            with interruption.deferred() if interruption is not None else contextlib.nullcontext():
                trainer.train(start, steps, checkpoint_every, on_step, interruption)
                saved = None if output is None else _save_result(trainer, workload, output)
        except Stopped as stop:
            raise stop if stop.left else Stopped(stop.number, f"at once; {trainer.left()}") from None
    finally:
        log.close()
    notes += trainer.notes
    if saved is not None and workload.adapter == "loha":
        notes.append("diffusers has no loader for LoHa; docs/training.md says how PEFT loads it")
    elif saved is not None and workload.adapter != "full" and not hasattr(job.model, "load_lora_adapter"):
        notes.append(
            f"{type(job.model).__name__} has no loader for adapters in diffusers; docs/training.md shows how PEFT loads it"
        )
    if log.failed is not None:
        notes.append(log.failed)
    tail = sorted(trainer.seconds[1:] or trainer.seconds)
    return RunResult(
        workload=workload,
        schedule=trainer.schedule.name,
        first_step=start + 1,
        steps=steps,
        losses=tuple(trainer.losses),
        lr=settings["lr"],
        seed=settings["seed"],
        accumulate=settings["accumulate"],
        seconds_per_step=tail[len(tail) // 2] if tail else None,
        saved=saved,
        checkpoint=trainer.newest,
        metrics=metrics,
        notes=tuple(dict.fromkeys(notes)),
    )


def _save_result(trainer: _Trainer, workload: Workload, output: Path) -> Path:
    """
    Raises:
        WorkloadError: the folder cannot be written (any more); says which checkpoint is there.
    """
    name = weights.MODEL_FILE if workload.adapter == "full" else weights.ADAPTER_FILE
    if (output / name).exists() and trainer.newest is None:
        trainer.notes.append(f"{output / name} of an earlier run was replaced")
    try:
        return weights.save(trainer.job, workload, output)
    except OSError as error:
        raise WorkloadError(
            f"--output {output}: what was trained could not be written ({error.strerror or error}); {trainer.left()}"
        ) from None


def _checkpoint(output: Path | None, resume: bool, every: int | None) -> checkpoints.Checkpoint | None:
    if output is None:
        if resume or every is not None:
            option = "--resume" if resume else "--checkpoint-every"
            raise WorkloadError(f"{option} needs --output FOLDER, where the checkpoints are")
        return None
    if resume:
        checkpoints.clear_leftovers(output / CHECKPOINTS)
        return checkpoints.load_newest(output / CHECKPOINTS)
    if earlier := checkpoints.found(output / CHECKPOINTS):
        raise WorkloadError(
            f"--output {output} holds an earlier run ({earlier[-1].name}); --resume goes on with it, or give another folder"
        )
    return None


def _settings(
    plan: Verifiable,
    checkpoint: checkpoints.Checkpoint | None,
    seed: int | None,
    lr: float | None,
    accumulate: int | None,
    pretrained: str | None,
) -> dict[str, Any]:
    """What the loss curve depends on: as asked, else the checkpoint's, else the default."""
    before: Mapping[str, Any] = {} if checkpoint is None else checkpoint.settings
    values = {
        "seed": before.get("seed", 0) if seed is None else seed,
        "lr": before.get("lr", DEFAULT_LR) if lr is None else lr,
        "accumulate": before.get("accumulate", plan.workload.accumulate) if accumulate is None else accumulate,
    }
    for key, kind in (("seed", int), ("lr", float), ("accumulate", int)):
        if isinstance(values[key], bool) or not isinstance(values[key], (int, kind)):
            raise WorkloadError(f"--resume: the checkpoint's {key} is {values[key]!r}; it cannot be used")
    return {**values, "workload": plan.workload.describe(), "pretrained": pretrained}


def _first_schedule(plan: Verifiable, checkpoint: checkpoints.Checkpoint | None, notes: list[str]) -> Schedule:
    """The plan's schedule; or the smaller one that the checkpoint's run had come to."""
    name = plan.schedule.name if checkpoint is None else checkpoint.settings.get("schedule")
    later = next((e.schedule for e in getattr(plan, "schedules", ()) if e.schedule.name == name), plan.schedule)
    if later != plan.schedule:
        notes.append(f"the run had come to the schedule {later.name}, because memory ran out under a larger one")
    return later


_OPTIONS = {"data": "--latents", "workload": "the plan"}


def _same_run(checkpoint: checkpoints.Checkpoint, settings: Mapping[str, Any]) -> None:
    """
    Raises:
        WorkloadError: the checkpoint's run had other settings, so that its loss curve could not go on.
    """
    for key in ("workload", "pretrained", "data", "seed", "accumulate"):
        before = checkpoint.settings.get(key)
        if before == settings[key]:
            continue
        what = _OPTIONS.get(key, f"--{key}")
        shown = "" if key in _OPTIONS else f" ({before!r} then, {settings[key]!r} now)"
        raise WorkloadError(f"--resume: {what} is not what {checkpoint.path} was trained with{shown}")


def _what_trains(plan: Verifiable, pretrained: str | None, use_cuda: bool, notes: list[str]) -> Workload:
    """The workload that really runs; differences to the planned one go to the notes."""
    planned = plan.workload
    if pretrained is None:
        notes.append(
            "base weights are random: this run shows memory and speed; its losses mean nothing and its adapter is of no use"
        )
    if not use_cuda and pretrained is None:
        workload = reduced_copy(planned)
        notes.append(
            f"on the CPU a reduced copy of {workload.model} trains (fewer and narrower blocks, {workload.resolution}, float32)"
        )
    elif not use_cuda:
        config = pretrained_config(pretrained or "", planned)
        workload = dataclasses.replace(planned, config_json=config, precision="fp32", attention="auto")
        notes.append(f"the given model itself trains on the CPU at {workload.resolution}, float32")
    else:
        config = "" if pretrained is None else pretrained_config(pretrained, planned)
        workload = dataclasses.replace(planned, config_json=config)
        if planned.precision not in ("bf16", "fp16", "fp32"):
            notes.append(
                f"--precision {planned.precision}: this runtime keeps the base in bfloat16, which takes more memory than planned"
            )
        if planned.precision == "fp16":
            notes.append(
                "--precision fp16: the loss is not scaled here, so small gradients may vanish; bf16 does not need it"
            )
    if planned.streamed_percent:
        notes.append(f"--weights-offload {planned.weights_offload}: this runtime keeps the weights on the device")
    if planned.buckets:
        notes.append(f"one size of the plan's {len(planned.buckets)} is trained here: {workload.resolution}")
    if workload.cfg_batch:
        notes.append("with --cfg-batch the second sample of each is an ordinary one here, not one without its caption")
    if workload.fuse_qkv and workload.adapter != "full":
        notes.append(
            "the adapter is for fused projections: call fuse_qkv_projections() on a model before loading it there"
        )
    if planned.ema:
        notes.append("no running average is kept here (--ema): the plan counts it")
    if not runs_as_named(planned.optimizer):
        notes.append(f"the optimizer is torch.optim.AdamW with float32 states, in place of {planned.optimizer}")
    return workload


def _job(
    workload: Workload,
    schedule: Schedule,
    pretrained: str | None,
    use_cuda: bool,
    seed: int,
    notes: list[str],
    say: Callable[[str], None],
) -> Job:
    """The model with an adapter at its usual start, and one batch."""
    place = "cuda" if use_cuda else "cpu"
    if pretrained is not None:
        if not use_cuda:
            _check_host_memory(workload, schedule, pretrained, say)
        dtype = autocast_dtype(workload) or torch.float32
        say("loading the weights")
        model, more = load_model(pretrained, workload, dtype)
        notes += more
        size, planned = sum(p.numel() for p in model.parameters()), workload.family.variant(workload.variant).parameters
        if planned is not None and size != planned:
            notes.append(f"the given model has {size:,} parameters, the planned {workload.variant} {planned:,}")
        job = given_job(workload, model, place, seed=seed, host_blocks=_waiting(workload, model))
    elif use_cuda:
        with torch.device("meta"):
            waiting = _waiting(workload, build_base(workload))
        job = device_job(workload, place, seed=seed, host_blocks=waiting)
    else:
        job = real_job(workload, seed=seed)
    torch.manual_seed(step_seed(seed, "adapter"))
    weights.start_adapter(job.model)
    return job


def _waiting(workload: Workload, model: torch.nn.Module) -> tuple[str, ...]:
    """Blocks whose weights wait on the host."""
    return managed_blocks(discover(model, workload.family.regions), workload.swapped_blocks)


def _check_host_memory(workload: Workload, schedule: Schedule, pretrained: str, say: Callable[[str], None]) -> None:
    """
    Raises:
        WorkloadError: the given model does not fit into this machine's memory; says by how much.
    """
    import psutil

    from estimators import devices
    from estimators.estimate import Estimator, Semantics
    from probes.target import Target
    from probes.traced import trace

    free = int(psutil.virtual_memory().available)

    def refuse(needed: float, what: str) -> WorkloadError:
        return WorkloadError(
            f"--pretrained {pretrained}: on the CPU {what} need {needed / GIB:.1f} GiB and {free / GIB:.1f} GiB are free; "
            "train on a CUDA device, or plan a smaller resolution"
        )

    with torch.device("meta"):
        model = build_base(workload)
    if (bytes_ := sum(p.numel() * 4 for p in model.parameters())) > free:
        raise refuse(bytes_, "its float32 weights")
    say("tracing, to see whether the model fits into this machine's memory")
    profile = trace(workload, Target("cpu"))
    peak = Estimator(profile, devices.cpu_device(), Semantics()).estimate(schedule).peak
    if peak > free:
        raise refuse(peak, f"training steps under the schedule {schedule.name}")


class _Trainer:
    """The state of a run."""

    def __init__(
        self,
        job: Job,
        workload: Workload,
        objective: Objective,
        source: Cached | Synthetic,
        plan: Verifiable,
        schedule: Schedule,
        settings: Mapping[str, Any],
        say: Callable[[str], None],
        log: Metrics,
        output: Path | None,
    ) -> None:
        self.job = job
        self.workload = workload
        self.objective = objective
        self.source = source
        self.estimates: Sequence[Estimate] = getattr(plan, "schedules", ())
        self.schedule = schedule
        self.settings = settings
        self.say = say
        self.log = log
        self.output = output
        self.device = job.target.device
        self.optimizer = make_optimizer(plan.workload.optimizer, [p for _, p in job.trainable()])
        self.set_lr()
        self.newest: Path | None = None
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.notes: list[str] = []
        if workload.compiles:
            say("compiling the blocks (the first steps take long)")
            compile_blocks(job.model, self._structure(), self.device.type)

    def set_lr(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings["lr"]

    def _structure(self) -> Structure:
        found = discover(self.job.model, self.workload.family.regions)
        return found.without_regions() if self.workload.compiles else found

    def _apply(self, schedule: Schedule) -> Handle:
        """A schedule of the plan on the model that trains, which may be the reduced copy."""
        structure = self._structure()
        if self.workload.reduced:
            schedule, notes = for_copy(schedule, structure)
            self.notes += notes
        return apply(self.job.model, schedule, structure=structure, swap_blocks=self.workload.swapped_blocks)

    def train(
        self,
        done: int,
        steps: int,
        every: int | None,
        on_step: Callable[[int, float, float], None] | None,
        interruption: Interruption | None,
    ) -> None:
        """Steps `done` + 1 to `steps`."""
        handle = self._apply(self.schedule)
        try:
            for number in range(done + 1, steps + 1):
                if interruption is not None and interruption.asked is not None:
                    raise self._stopped(number - 1, interruption.asked)
                begin = time.perf_counter()
                self._start_counters()
                handle, loss = self._gradients(number, handle)
                if not math.isfinite(loss):
                    raise WorkloadError(
                        f"the loss of step {number} is {loss}; the run is stopped and the step is not kept"
                        + ("" if self.newest is None else f"; the newest checkpoint is {self.newest}")
                    )
                self._update(number)
                took = time.perf_counter() - begin
                self.losses.append(loss)
                self.seconds.append(took)
                self._record(number, loss, took)
                if on_step is not None:
                    on_step(number, loss, took)
                if every is not None and (number % every == 0 or number == steps):
                    self._save(number)
        finally:
            self.notes += handle.notes
            handle.remove()

    def _gradients(self, number: int, handle: Handle) -> tuple[Handle, float]:
        """Forward and backward of one step; under smaller schedules where memory runs out.

        Raises:
            OutOfMemory: the plan has no smaller schedule.
        """
        while True:
            try:
                return handle, self._forward_backward(number)
            except Exception as error:
                if not memory.is_out_of_memory(error):
                    raise
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            self.optimizer.zero_grad(set_to_none=True)
            self.notes += handle.notes
            handle.remove()
            memory.give_back()
            handle = self._smaller(number, reason)

    def _forward_backward(self, number: int) -> float:
        """Gradients of step `number`; returns the mean loss of its batches."""
        count: int = self.settings["accumulate"]
        total = 0.0
        for part in range(count):
            torch.manual_seed(step_seed(self.settings["seed"], "noise", number, part))
            batch = self.source.batch((number - 1) * count + part, self.job)
            loss = self.objective.loss(self.job, batch)
            (loss / count).backward()
            total += float(loss.detach())
        return total / count

    def _smaller(self, number: int, reason: str) -> Handle:
        """Applies the next smaller schedule of the plan that the runtime takes."""
        before = self.schedule
        for estimate in memory.smaller(self.estimates, before, memory.room_on(self.device)):
            try:
                handle = self._apply(estimate.schedule)
            except (RuntimeRefused, ScheduleError) as refusal:
                self.notes.append(f"{estimate.schedule.name} was not tried: {refusal}")
                continue
            self.schedule = estimate.schedule
            text = (
                f"out of memory in step {number} under {before.name}; the step is run again under {self.schedule.name} "
                f"(predicted peak {estimate.peak / GIB:.2f} GiB)"
            )
            self.say(text)
            self.notes.append(text)
            self.log.write(
                event="out_of_memory",
                step=number,
                schedule=before.name,
                next_schedule=self.schedule.name,
                reason=reason,
            )
            return handle
        raise OutOfMemory(
            f"out of memory in step {number} under {before.name}, and the plan has no smaller schedule that fits; "
            "a smaller resolution, batch or rank needs less" + self._kept()
        )

    def _update(self, number: int) -> None:
        """
        Raises:
            OutOfMemory: in the optimizer, whose memory does not depend on the schedule.
        """
        try:
            self.optimizer.step()
        except Exception as error:
            if not memory.is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"out of memory in the optimizer's update of step {number}, which no schedule makes smaller; a smaller rank, "
                "or an adapter instead of full training, needs less" + self._kept()
            ) from None
        self.optimizer.zero_grad(set_to_none=True)

    def _kept(self) -> str:
        return "" if self.newest is None else f"; the newest checkpoint is {self.newest}"

    def _save(self, number: int) -> None:
        """Writes a checkpoint. Where that fails (a full disk) the run goes on, and says so."""
        assert self.output is not None
        settings = {**self.settings, "schedule": self.schedule.name}
        try:
            self.newest = checkpoints.save(self.output / CHECKPOINTS, number, self.job, self.optimizer, settings)
        except OSError as error:
            text = f"the checkpoint of step {number} could not be written ({error.strerror or error})"
            self.say(text)
            self.notes.append(text)
            self.log.write(event="checkpoint_failed", step=number, reason=str(error))
            return
        self.log.write(event="checkpoint", step=number, path=str(self.newest))

    def _stopped(self, number: int, asked: int) -> Stopped:
        """Saves a checkpoint of step `number`, where there is a folder for it."""
        if self.output is not None and number and checkpoints.step_of(self.newest) != number:
            self._save(number)
        return Stopped(asked, f"after step {number}; {self.left()}")

    def left(self) -> str:
        """What a run that stops now leaves behind."""
        if self.newest is not None:
            return f"{self.newest} is there, and --resume goes on from it"
        return "nothing was saved" + ("" if self.output is not None else " (no --output)")

    def _start_counters(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def _record(self, number: int, loss: float, took: float) -> None:
        on_cuda = self.device.type == "cuda"
        self.log.write(
            step=number,
            loss=loss,
            seconds=took,
            lr=self.settings["lr"],
            schedule=self.schedule.name,
            allocated_bytes=torch.cuda.max_memory_allocated(self.device) if on_cuda else None,
            reserved_bytes=torch.cuda.max_memory_reserved(self.device) if on_cuda else None,
        )
