"""What a run is trained on: cached samples from a folder, or one synthetic batch.

A cached sample is a safetensors file with the tensors that the model's forward takes, by the argument's name
(``added_cond_kwargs.text_embeds`` for one in a dictionary) and without the batch axis. The first argument is the clean sample, the
others are conditioning. Every file is checked, values too, before anything is trained.

Nothing here has a state: batch `i` is a function of the folder, the seed and `i`, so a resumed run sees what it would have seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from advisor.training.objective import TIME_FILLS
from probes.build import Job, autocast_dtype, symbols
from probes.expressions import evaluate
from probes.workload import Workload, WorkloadError


def step_seed(seed: int, *parts: object) -> int:
    """A seed of its own for every place in a run where random numbers are drawn, 0 to 2**63 - 1."""
    text = ":".join(str(p) for p in (seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True)
class Slot:
    """One tensor of a sample."""

    shape: tuple[int, ...]
    """Without the batch axis."""
    dtype: torch.dtype
    batch_axis: int | None
    """Where samples are stacked; None: the argument is a list with one tensor a sample, or all samples share the tensor."""
    listed: bool
    fill: str
    """What it holds where no file says it: `InputSpec.fill`."""

    @property
    def invented(self) -> bool:
        """Whether that is no value that training could use."""
        return self.fill in ("normal", "arange")


def slots(workload: Workload, model: nn.Module) -> dict[str, Slot]:
    """The tensors that a cached sample can hold, by name, the clean sample first.

    Args:
        model: only its config is read; it may be on the meta device.
    """
    family = workload.family
    names = symbols(workload, model)
    skipped = family.variant(workload.variant).skip_inputs
    compute = autocast_dtype(workload) or torch.float32
    found: dict[str, Slot] = {}
    for spec in family.inputs:
        if spec.name in skipped or not evaluate(spec.when, names):
            continue
        if spec.value is not None or spec.fill in (*TIME_FILLS, "axes"):
            continue
        axis = spec.shape.index("B") if "B" in spec.shape and not spec.list_of else None
        shape = tuple(evaluate(e, names) for i, e in enumerate(spec.shape) if i != axis)
        dtype = compute if spec.dtype == "compute" else getattr(torch, spec.dtype)
        found[spec.name] = Slot(shape, dtype, axis, bool(spec.list_of), spec.fill)
    return found


class Synthetic:
    """The job's own batch, again and again."""

    fingerprint = "synthetic"
    notes: tuple[str, ...] = (
        "the data is synthetic: one random batch, again and again; --latents FOLDER trains on yours",
    )

    def batch(self, index: int, job: Job) -> dict[str, Any]:
        return job.inputs


class Cached:
    """A folder of cached samples, all of them checked.

    Args:
        wanted: what a sample can hold (`slots`).
        batch: samples a batch.
        shape_of: whose shapes are wanted, for messages.
        complete: a tensor that would have to be invented is refused (else noted).

    Raises:
        WorkloadError: no samples, or one that does not suit the model; names the file and the tensor.
    """

    def __init__(
        self,
        folder: Path,
        wanted: Mapping[str, Slot],
        batch: int,
        seed: int,
        say: Callable[[str], None],
        *,
        shape_of: str = "the planned shape",
        complete: bool = False,
    ) -> None:
        self.files = sample_files(folder)
        self.wanted = wanted
        self.size = batch
        self.shape_of = shape_of
        self.seed = seed
        say(f"checking {len(self.files)} cached samples")
        self.held = sorted(self._checked(self.files[0]))
        for file in self.files[1:]:
            if (names := sorted(self._checked(file))) != self.held:
                raise WorkloadError(
                    f"--latents {file}: holds {', '.join(names)}, where {self.files[0].name} holds {', '.join(self.held)}"
                )
        digest = hashlib.sha256("\n".join(f"{f.name} {f.stat().st_size}" for f in self.files).encode())
        self.fingerprint = digest.hexdigest()
        self.per_epoch = max(1, len(self.files) // batch)
        notes = [f"{len(self.files)} cached samples, {self.per_epoch} batches of {batch} an epoch"]
        missing = [name for name in wanted if name not in self.held]
        invented = [name for name in missing if wanted[name].invented]
        if invented and complete:
            raise WorkloadError(
                f"--latents {folder}: the samples have no {', '.join(invented)}, and the given weights cannot learn from made-up ones"
            )
        if missing:
            how = [f"{name} (made up)" if name in invented else f"{name} ({wanted[name].fill})" for name in missing]
            notes.append(f"not in the cached samples: {', '.join(how)}")
        if len(self.files) < batch:
            notes.append(f"fewer cached samples ({len(self.files)}) than the batch of {batch}: they are repeated in it")
        elif spare := len(self.files) % batch:
            notes.append(f"{spare} samples, other ones in each epoch, are left out of it to fill the batches")
        self.notes = tuple(notes)

    def batch(self, index: int, job: Job) -> dict[str, Any]:
        """Batch `index` of the endless order: each epoch is a random order of its own.

        Raises:
            WorkloadError: a file has changed since it was checked.
        """
        epoch, place = divmod(index, self.per_epoch)
        generator = torch.Generator().manual_seed(step_seed(self.seed, "order", epoch))
        order = torch.randperm(len(self.files), generator=generator).tolist()
        order *= -(-self.size // len(order))
        samples = [self._checked(self.files[i]) for i in order[place * self.size : (place + 1) * self.size]]
        batch = dict(job.inputs)
        for name in self.held:
            outer, _, inner = name.partition(".")
            like = job.inputs[outer][inner] if inner else job.inputs[outer]
            value = self._collate(name, [s[name] for s in samples], like)
            batch[outer] = {**batch[outer], inner: value} if inner else value
        return batch

    def _collate(self, name: str, values: list[torch.Tensor], like: Any) -> Any:
        slot = self.wanted[name]
        reference = like[0] if isinstance(like, list) else like
        moved = [v.to(reference.device, reference.dtype) for v in values]
        if slot.listed:
            return moved
        if slot.batch_axis is not None:
            return torch.stack(moved, slot.batch_axis)
        if any(not torch.equal(v, moved[0]) for v in moved[1:]):
            raise WorkloadError(f"--latents: {name} is shared by the samples of a batch, but their files differ in it")
        return moved[0]

    def _checked(self, file: Path) -> dict[str, torch.Tensor]:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            tensors = load_file(str(file))
        except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:  # a type that torch has not
            raise WorkloadError(f"--latents {file}: not a readable safetensors file ({error})") from None
        main = next(iter(self.wanted))
        if main not in tensors:
            raise WorkloadError(f"--latents {file}: has no tensor {main!r}; it has: {_some(sorted(tensors))}")
        for name, tensor in tensors.items():
            _check(file, name, tensor, self.wanted, self.shape_of)
        return tensors


def sample_files(folder: Path) -> list[Path]:
    """The cached samples of a folder, in order.

    Raises:
        WorkloadError: there are none.
    """
    found = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not found:
        raise WorkloadError(f"--latents {folder}: no safetensors files in it")
    return found


def _check(file: Path, name: str, tensor: torch.Tensor, wanted: Mapping[str, Slot], shape_of: str) -> None:
    slot = wanted.get(name)
    if slot is None:
        raise WorkloadError(f"--latents {file}: the model takes no {name!r}; a sample can hold: {', '.join(wanted)}")
    if tuple(tensor.shape) != slot.shape:
        raise WorkloadError(f"--latents {file}: {name} is {tuple(tensor.shape)}, {shape_of} is {slot.shape}")
    kind, needed = _kind(tensor.dtype), _kind(slot.dtype)
    if kind != needed:
        given = str(tensor.dtype).removeprefix("torch.")
        raise WorkloadError(f"--latents {file}: {name} holds {kind} ({given}), the model takes {needed}")
    if tensor.is_floating_point() and tensor.dtype.itemsize < 2:
        given = str(tensor.dtype).removeprefix("torch.")
        raise WorkloadError(
            f"--latents {file}: {name} is {given}, which is too coarse to train on; valid: float16, bfloat16, float32, float64"
        )
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        raise WorkloadError(f"--latents {file}: {name} holds values that are not finite")


def _some(names: list[str]) -> str:
    """The first few of many names."""
    return (", ".join(names[:6]) or "none") + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _kind(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "true and false"
    return (
        "floating-point numbers"
        if dtype.is_floating_point
        else "complex numbers"
        if dtype.is_complex
        else "whole numbers"
    )
