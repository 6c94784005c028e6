"""Traces of what trains beside a model: a VAE's encode and decode, a text encoder's forward. Real classes, no weights, no gradients.

What they run is what a diffusers pipeline runs, in the dtype of their weights, without autocast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from probes import build, traced
from probes.companions import VAE, Companion, Run
from probes.profile import FORWARD, Profile
from probes.recorder import Recorder
from probes.stand_ins import KnownValues
from probes.store import versions
from probes.structure import Structure
from probes.target import Target
from probes.targets import CudaFunctions, cpu_scratch, cuda_scratch
from probes.workload import Workload, WorkloadError

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def module(companion: Companion) -> nn.Module:
    """The companion in eval mode, on the device that is current, with weights as its class starts them, in float32.

    Raises:
        ImportError, AttributeError: its package is not there, or has no such class.
    """

    def named(reference: str) -> Any:
        where, _, name = reference.partition(":")
        return getattr(importlib.import_module(where), name)

    with build.quiet():
        made = named(companion.model_class)
        config = companion.config
        model: nn.Module = made(named(companion.config_class)(**config)) if companion.config_class else made(**config)
    return model.eval()


def call(
    model: nn.Module, run: Run, latents: tuple[int, ...] = ()
) -> tuple[tuple[torch.Tensor, ...], Callable[[], torch.Tensor]]:
    """(inputs, what encodes or decodes them once). The inputs are on the device that is current.

    Args:
        latents: what decode is given (`latent_shape`).

    Raises:
        WorkloadError: tiling or slicing of a class that has none.
    """
    if run.companion.kind != VAE:
        return _text_call(model, run)
    for asked, name in ((run.tiling, "tiling"), (run.slicing, "slicing")):
        if asked and not hasattr(model, f"enable_{name}"):
            raise WorkloadError(f"--vae-{name}: {type(model).__name__} has none; leave it out")
        if asked:
            getattr(model, f"enable_{name}")()
    dtype = DTYPES[run.precision]
    vae: Any = model
    if not run.decode:
        axes = (run.batch, 3, *((run.frames,) if run.companion.video else ()), run.height, run.width)
        pixels = torch.zeros(axes, dtype=dtype)

        def encode() -> torch.Tensor:
            given = vae.encode(pixels)
            found: torch.Tensor = given.latent_dist.sample() if hasattr(given, "latent_dist") else given.latent
            return found

        return (pixels,), encode
    encoded = torch.zeros(latents, dtype=dtype)
    timed = {"temb": torch.zeros(run.batch, dtype=dtype)} if vae.config.get("timestep_conditioning") else {}

    def decode() -> torch.Tensor:
        pictures: torch.Tensor = vae.decode(encoded, **timed).sample
        return pictures

    return (encoded, *timed.values()), decode


def latent_shape(run: Run) -> tuple[int, ...]:
    """Of what the VAE makes of the run's pictures: it encodes one of them on the meta device."""
    one = dataclasses.replace(run, decode=False, tiling=False, slicing=False, batch=1)
    with torch.device("meta"), torch.no_grad():
        model = module(run.companion)
        traced.replace_tensors(model, None, lambda name, t: DTYPES[run.precision])
        _, encode = call(model, one)
        return (run.batch, *encode().shape[1:])


def _text_call(model: nn.Module, run: Run) -> tuple[tuple[torch.Tensor, ...], Callable[[], torch.Tensor]]:
    given = {"input_ids": torch.ones(run.batch, run.tokens, dtype=torch.int64)}
    if run.companion.mask:
        given["attention_mask"] = torch.ones(run.batch, run.tokens, dtype=torch.int64)
        given["attention_mask"][:, -1:] = 0  # transformers leaves an all-valid mask out

    def encode() -> torch.Tensor:
        found: torch.Tensor = model(**given, **run.companion.arguments)[0]
        return found

    return tuple(given.values()), encode


def trace(run: Run, target: Target, workload: Workload) -> Profile:
    """One call as a profile of `source` ``forward``: its weights are the frozen ones, nothing is trained.

    Args:
        workload: what the profile says it belongs to.

    Raises:
        TraceError: the class does not run without real tensors, or is not there.
        WorkloadError: an attention backend that does not take it.
    """
    ways = [traced.FAKE] if target.kind == "cpu" else [traced.META, traced.VALUES, traced.FAKE]
    for way in ways:
        try:
            return _trace(run, target, workload, way)
        except (WorkloadError, MemoryError):
            raise
        except Exception as error:
            if way == ways[-1]:
                what = f"{run.companion.name} ({run.companion.model_class.partition(':')[2]})"
                raise traced.TraceError(f"{what} could not be traced: {type(error).__name__}: {error}") from error
    raise AssertionError("unreachable")


def _trace(run: Run, target: Target, workload: Workload, way: traced.Way) -> Profile:
    latents = latent_shape(run) if run.decode else ()
    with torch.device("meta"):
        model = module(run.companion)
    dtype = DTYPES[run.precision]
    fake = FakeTensorMode(allow_non_fake_inputs=True) if way == traced.FAKE else None
    known = KnownValues() if way == traced.VALUES else None
    persistent = set(model.state_dict(keep_vars=True))
    traced.replace_tensors(
        model, fake, lambda name, t: dtype if t.is_floating_point() and name in persistent else t.dtype
    )
    recorder = Recorder(
        {traced.META: ("meta",), traced.VALUES: ("meta", "cpu")}.get(way, ("cpu",)),
        cuda_scratch if target.kind == "cuda" else cpu_scratch,
    )
    functions = CudaFunctions(target) if target.kind == "cuda" else contextlib.nullcontext()
    with fake or contextlib.nullcontext(), torch.no_grad():
        with torch.device("meta") if way.on_meta and not way.known_values else contextlib.nullcontext():
            inputs, go = call(model, run, latents)
        tiles = _tiles(model)
        with known or contextlib.nullcontext(), recorder, functions:
            result = go()
        end = recorder.now
        del result
    notes: tuple[str, ...] = ()
    if run.tiling and not tiles:
        what = f"{'decode' if run.decode else 'encode'} {run.width}x{run.height}"
        notes = (f"VAE {run.companion.name}: tiling changes nothing, {what} takes one tile",)
    sizes = Counter(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])
    return Profile(
        workload=workload,
        source=FORWARD,
        target=target.key(),
        versions=versions(),
        structure=Structure(()),
        tape=recorder.tape(end, end),
        base_sizes=tuple(sorted(sizes.items())),
        trained_shapes=(),
        input_bytes=tuple(t.untyped_storage().nbytes() for t in inputs),
        parameters=sum(p.numel() for p in model.parameters()),
        notes=notes,
    )


def _tiles(model: nn.Module) -> list[str]:
    """Gets an entry for every call of the class's way to work tile by tile."""
    found: list[str] = []

    def noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            found.append(name)
            return method(*args, **kwargs)

        return run

    for name in ("tiled_encode", "tiled_decode", "_tiled_encode", "_tiled_decode"):
        if hasattr(model, name):
            setattr(model, name, noted(name, getattr(model, name)))
    return found
