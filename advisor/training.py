"""`advise run`: trains a plan's LoRA with the bundled runtime, from cached latents or on synthetic data.

Cached latents are a folder of safetensors files, one sample each. A file holds the tensors that the model's forward takes, under
the argument's name and without the batch dimension: the first one (the latents, as the model takes them) is the clean sample, the
others are conditioning (text embeddings, pooled embeddings, ...). Timesteps and whatever a file leaves out are made here.
`docs/training.md` shows an example.
"""

from __future__ import annotations

import dataclasses
import io
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from advisor.runtime import apply
from advisor.verification import Verifiable
from probes import store
from probes.build import Job, device_job, real_job
from probes.step import make_optimizer, predict
from probes.workload import Workload, WorkloadError, reduced_copy

DDPM_STEPS = 1000


@dataclass(frozen=True)
class RunResult:
    """What a run did."""

    workload: Workload
    schedule: str
    steps: int
    losses: tuple[float, ...]
    seconds_per_step: float
    """Median over the steps after the first."""
    saved: Path | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "workload": self.workload.describe(),
            "reduced_copy": self.workload.reduced,
            "schedule": self.schedule,
            "steps": self.steps,
            "losses": list(self.losses),
            "seconds_per_step": self.seconds_per_step,
            "saved": None if self.saved is None else str(self.saved),
            "notes": list(self.notes),
        }


def run(
    plan: Verifiable,
    *,
    steps: int,
    latents: Path | None = None,
    output: Path | None = None,
    seed: int = 0,
    device: str = "auto",
    on_step: Callable[[int, float, float], None] | None = None,
) -> RunResult:
    """Trains.

    Args:
        steps: optimizer steps.
        latents: folder of cached samples; None: synthetic data.
        output: folder for the trained LoRA (`pytorch_lora_weights.safetensors`); written at the end, whole or not at all.
        on_step: called after every step with its number (from 1), loss and seconds.

    Raises:
        WorkloadError: cached latents that do not suit the model; the message names the file and the tensor.
        RuntimeRefused: the runtime cannot execute the schedule.
    """
    use_cuda = torch.cuda.is_available() if device == "auto" else device == "cuda"
    notes: list[str] = []
    if latents is not None:
        _files(latents)
    torch.manual_seed(seed)
    if use_cuda:
        workload = plan.workload
        job = device_job(workload, "cuda", seed=seed)
    else:
        workload = reduced_copy(plan.workload)
        job = real_job(workload, seed=seed)
        notes.append(
            f"no CUDA device: a reduced copy of {workload.model} trains on the CPU ({workload.resolution}, float32)"
        )
    notes.append("base weights are random: this run shows memory, speed and a falling loss, not a usable LoRA")
    batches = _batches(job, workload, latents, seed)
    parameters = [p for _, p in job.trainable()]
    optimizer = make_optimizer(workload.optimizer, parameters)
    losses: list[float] = []
    seconds: list[float] = []
    with apply(job.model, plan.schedule) as handle:
        for number in range(1, steps + 1):
            start = time.perf_counter()
            loss = _loss(job, workload, next(batches))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                raise WorkloadError(
                    f"the loss of step {number} is {losses[-1]}; the run is stopped and nothing is saved"
                )
            seconds.append(time.perf_counter() - start)
            if on_step is not None:
                on_step(number, losses[-1], seconds[-1])
        notes += handle.notes
    saved = None if output is None else _save(job, workload, output)
    tail = sorted(seconds[1:] or seconds)
    return RunResult(
        workload, plan.schedule.name, steps, tuple(losses), tail[len(tail) // 2], saved, tuple(dict.fromkeys(notes))
    )


def _batches(job: Job, workload: Workload, folder: Path | None, seed: int) -> Iterator[dict[str, Any]]:
    """Endless batches of clean inputs, shaped like the job's own."""
    if folder is None:
        while True:
            yield job.inputs
    samples = [_sample(file, job) for file in _files(folder)]
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(samples), generator=generator).tolist()
        order = (order * (workload.batch // len(order) + 1))[: max(workload.batch, len(order))]
        for start in range(0, len(order) - workload.batch + 1, workload.batch):
            yield _collate(job, [samples[i] for i in order[start : start + workload.batch]])


def _files(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not found:
        raise WorkloadError(f"--latents {folder}: no safetensors files in it")
    return found


def _sample(file: Path, job: Job) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(str(file))
    except (SafetensorError, OSError) as error:
        raise WorkloadError(f"--latents {file}: not a readable safetensors file ({error})") from None
    main = next(iter(job.inputs))
    if main not in tensors:
        raise WorkloadError(f"--latents {file}: has no tensor {main!r}; it has: {', '.join(sorted(tensors)) or 'none'}")
    for name, t in tensors.items():
        wanted = job.inputs.get(name)
        if wanted is None:
            raise WorkloadError(f"--latents {file}: the model takes no {name!r}; it takes: {', '.join(job.inputs)}")
        shape = tuple(wanted[0].shape)
        if tuple(t.shape) != shape:
            raise WorkloadError(f"--latents {file}: {name} is {tuple(t.shape)}, the planned shape is {shape}")
        if t.is_floating_point() and not bool(t.isfinite().all()):
            raise WorkloadError(f"--latents {file}: {name} holds values that are not finite")
    return tensors


def _collate(job: Job, samples: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    batch = dict(job.inputs)
    for name in samples[0]:
        like = job.inputs[name]
        reference = like[0] if isinstance(like, list) else like
        values = [s[name].to(reference.device, reference.dtype) for s in samples]
        batch[name] = values if isinstance(like, list) else torch.stack(values)
    return batch


def _loss(job: Job, workload: Workload, clean: dict[str, Any]) -> torch.Tensor:
    """One training objective: noises the clean sample, asks the model, compares in float32."""
    family = workload.family
    main = next(iter(clean))
    time_name = next((s.name for s in family.inputs if s.fill in ("timestep", "uniform")), None)
    data = torch.stack(clean[main]) if isinstance(clean[main], list) else clean[main]
    noise = torch.randn_like(data)
    batch = data.shape[0]
    view = (batch, *([1] * (data.dim() - 1)))
    if family.objective == "flow":
        sigma = torch.sigmoid(torch.randn(batch, device=data.device)).to(data.dtype)
        noisy = (1 - sigma.view(view)) * data + sigma.view(view) * noise
        wanted = data - noise if family.reversed_flow else noise - data
        moment = 1 - sigma if family.reversed_flow else sigma
    else:
        step = torch.randint(0, DDPM_STEPS, (batch,), device=data.device)
        # Stable Diffusion's scaled-linear schedule, beta 0.00085 to 0.012
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, DDPM_STEPS, device=data.device) ** 2
        kept = torch.cumprod(1 - betas, 0)[step].to(data.dtype)
        noisy = kept.sqrt().view(view) * data + (1 - kept).sqrt().view(view) * noise
        wanted, moment = noise, step / DDPM_STEPS
    inputs = dict(clean)
    inputs[main] = list(noisy) if isinstance(clean[main], list) else noisy
    if time_name is not None:
        spec = next(s for s in family.inputs if s.name == time_name)
        scale = DDPM_STEPS if spec.fill == "timestep" else 1
        inputs[time_name] = (moment * scale).to(clean[time_name].dtype)
    trial = dataclasses.replace(job, inputs=inputs)
    prediction = predict(trial)
    return F.mse_loss(prediction.float(), wanted.reshape(prediction.shape).float())


def _save(job: Job, workload: Workload, folder: Path) -> Path:
    """The LoRA as diffusers loads it. Raises OSError when the folder cannot be written."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save

    prefix = "unet" if "UNet" in type(job.model).__name__ else "transformer"
    if workload.adapter == "full":
        state = {k: v.detach().cpu().contiguous() for k, v in job.model.state_dict().items()}
        name = "diffusion_pytorch_model.safetensors"
    else:
        state = {
            f"{prefix}.{k}": v.detach().cpu().contiguous() for k, v in get_peft_model_state_dict(job.model).items()
        }
        name = "pytorch_lora_weights.safetensors"
    buffer = io.BytesIO(save(state, metadata={"format": "pt"}))
    path = folder / name
    store.atomic_write(path, buffer.getvalue())
    return path
