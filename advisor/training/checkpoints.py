"""Checkpoints of a run: what is trained, the optimizer's state, the step, and the settings that the loss curve depends on.

One safetensors file a checkpoint (``checkpoint-00000020.safetensors``): tensors ``model.NAME`` and ``optimizer.NAME.KEY``, and one
JSON text, ``advise_checkpoint``, in the file's metadata. Written to a temporary file beside it and renamed, so that a file with that
name is whole; a digest over every tensor finds damage that comes later. No pickle. Random numbers and the order of the data are
functions of seed and step, so nothing of them needs to be stored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from probes.build import Job
from probes.workload import WorkloadError

FORMAT = 1
_KEY = "advise_checkpoint"
_NAME = re.compile(r"checkpoint-(\d{8,})\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as read back."""

    path: Path
    step: int
    """Optimizer steps that were done."""
    settings: Mapping[str, Any]
    """What the run was started with."""
    tensors: Mapping[str, torch.Tensor]


def found(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    matches = [(int(m[1]), p) for p in folder.glob("checkpoint-*.safetensors") if (m := _NAME.fullmatch(p.name))]
    return [path for _, path in sorted(matches)]


def clear_leftovers(folder: Path) -> None:
    """Removes what a run that was killed while saving has left in a folder."""
    for path in folder.glob(".checkpoint-*.safetensors.*"):
        with contextlib.suppress(OSError):
            path.unlink()


def step_of(path: Path | None) -> int | None:
    """The step in a checkpoint's name."""
    match = None if path is None else _NAME.fullmatch(path.name)
    return None if match is None else int(match[1])


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Writes CPU tensors, whole or not at all: on any error or interruption the earlier file, if any, stays.

    Raises:
        OSError: the folder cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        try:
            save_file(dict(tensors), temporary, metadata=dict(metadata))
        except SafetensorError as error:
            raise OSError(f"{path}: {error}") from None
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def save(folder: Path, step: int, job: Job, optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]) -> Path:
    """Writes the checkpoint of a finished step; returns its path.

    Raises:
        OSError: the folder cannot be written; an earlier checkpoint stays.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in job.trainable():
        tensors[f"model.{name}"] = _stored(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{name}.{key}"] = _stored(value)
            elif value is not None:
                raise TypeError(f"optimizer state {key} of {name} is a {type(value).__name__}, not a tensor")
    content = {"format": FORMAT, "step": step, "settings": dict(settings), "sha256": _digest(tensors)}
    path = folder / f"checkpoint-{step:08d}.safetensors"
    write_safetensors(path, tensors, {"format": "pt", _KEY: json.dumps(content, sort_keys=True)})
    return path


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name]
        digest.update(f"{name} {t.dtype} {tuple(t.shape)}\n".encode())
        digest.update(memoryview(t.contiguous().reshape(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()


def load_newest(folder: Path) -> Checkpoint:
    """The newest checkpoint of a folder.

    Raises:
        WorkloadError: there is none, or it is damaged; says what to do.
    """
    paths = found(folder)
    if not paths:
        raise WorkloadError(f"--resume: no checkpoint in {folder}; leave --resume out to start from the beginning")
    path = paths[-1]
    try:
        return _load(path)
    except (ValueError, KeyError, TypeError, OSError) as error:
        reason = str(error) or type(error).__name__
        rest = (
            f"delete it, and --resume goes on from {paths[-2].name}"
            if len(paths) > 1
            else "delete it and start without --resume"
        )
        raise WorkloadError(f"--resume: {path} is damaged ({reason}); {rest}") from None


def _load(path: Path) -> Checkpoint:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    if _KEY not in metadata:
        raise ValueError("it is not a checkpoint of `advise run`")
    content = json.loads(metadata[_KEY])
    if content["format"] != FORMAT:
        raise ValueError(f"its format is {content['format']!r}, this version reads {FORMAT}")
    if content["sha256"] != _digest(tensors):
        raise ValueError("its contents do not have the digest that was stored with them")
    step, settings = content["step"], content["settings"]
    if not isinstance(step, int) or step < 0 or not isinstance(settings, dict):
        raise ValueError("its step or settings are not valid")
    return Checkpoint(path, step, settings, tensors)


def restore(checkpoint: Checkpoint, job: Job, optimizer: torch.optim.Optimizer) -> None:
    """Puts a checkpoint's values into the model and the optimizer.

    Raises:
        WorkloadError: it belongs to another model or adapter.
    """
    trainable = job.trainable()
    given = {k.removeprefix("model."): v for k, v in checkpoint.tensors.items() if k.startswith("model.")}
    shapes = {name: tuple(p.shape) for name, p in trainable}
    if {name: tuple(t.shape) for name, t in given.items()} != shapes:
        raise WorkloadError(f"--resume: {checkpoint.path} belongs to another model or adapter than the plan's")
    state: dict[int, dict[str, torch.Tensor]] = {}
    with torch.no_grad():
        for index, (name, parameter) in enumerate(trainable):
            parameter.copy_(given[name])
            prefix = f"optimizer.{name}."
            own = {k.removeprefix(prefix): v for k, v in checkpoint.tensors.items() if k.startswith(prefix)}
            if own:
                state[index] = own
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
