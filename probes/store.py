"""Profiles on disk. A cache: keyed by all that changes a profile, written atomically, rebuilt when unreadable.

One npz file a profile: the tape's arrays, and everything else as JSON text inside it. Nothing in it is executed on reading.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import importlib.metadata
import io
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs

from probes import resources
from probes.companions import Run
from probes.profile import BUFFER, DESCRIBED, FROZEN, TRAINED, Profile, Weight
from probes.structure import Block, Chain, Structure
from probes.tape import NEVER, REDUCTION, Call, Tape
from probes.workload import Workload

FORMAT = 11
"""Raise when the meaning of a stored profile changes."""

_ARRAYS = [
    f.name
    for f in dataclasses.fields(Tape)
    if f.name not in ("length", "backward_start", "optimizer_start", "calls", "inner_reads")
]
_VERSIONED = ("torch", "diffusers", "peft", "checkpoint-advisor")


def cache_folder() -> Path:
    """Where profiles are kept: ``ADVISE_CACHE_DIR``, or the system's user cache folder."""
    override = os.environ.get("ADVISE_CACHE_DIR")
    return Path(override) if override else Path(platformdirs.user_cache_dir("checkpoint-advisor"))


def versions() -> dict[str, str]:
    """Versions of everything that changes a trace (read from package metadata; imports nothing)."""
    return dict(_versions())


@cache
def _versions() -> dict[str, str]:
    found = {}
    for name in _VERSIONED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@cache
def code_digest(package: str = "probes") -> str:
    """Digest of everything here that makes a profile (the modules of `probes`, the facts about quantised linears), or that makes the
    results of simulations from one (`estimators`, the facts about optimizers)."""
    facts = {"probes": ("quantized.csv", "quantized_skips.csv"), "estimators": ("optimizers.csv",)}[package]
    digest = hashlib.sha256()
    for path in sorted((Path(__file__).parents[1] / package).rglob("*.py")):
        digest.update(path.read_bytes())
    for name in facts:
        digest.update(resources.text(name).encode())
    return digest.hexdigest()


def key(workload: Workload, target: str, source: str) -> str:
    """Name of the profile of a workload; options that do not change the tape (optimizer, alpha) do not enter."""
    plain = dataclasses.asdict(workload.traced())
    sheet: Any
    name = workload.model
    if workload.sheet_json:
        sheet = json.loads(plain.pop("sheet_json"))
        label = sheet.pop("default_variant")
        sheet = {k: v for k, v in sheet.items() if k not in ("notes", "source", "title", "variants")} | {
            "variant": sheet["variants"][label]
        }
        del plain["variant"]  # where the config was found
    else:
        sheet = resources.text(f"families/{workload.model}.toml")
        name = f"{name}-{workload.variant}"
    parts = {
        "format": FORMAT,
        "workload": plain,
        "target": target,
        "source": source,
        "versions": versions(),
        "sheet": sheet,
        "code": code_digest(),
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    name = re.sub(r"[^\w.-]+", "_", name, flags=re.ASCII).lstrip(".")
    return f"{name[:80]}-{digest[:24]}"


def companion_key(run: Run, target: str) -> str:
    """Name of the profile of a VAE's or text encoder's call; nothing of the denoiser enters."""
    parts = {
        "format": FORMAT,
        "run": dataclasses.asdict(run),
        "target": target,
        "versions": {**versions(), "transformers": importlib.metadata.version("transformers")},
        "code": code_digest(),
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return f"{run.companion.name}-{digest[:24]}"


MOST_BYTES = 1 << 30
"""No file of the cache is larger; a profile has a few MiB."""


def read_file(path: Path, most: int = MOST_BYTES) -> bytes:
    """A regular file's content. Never waits: not for the other end of a pipe, nor for a device without end.

    Raises:
        OSError: it cannot be read, is a folder, pipe or device, or holds more than `most` bytes.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if found.st_size > most:
            raise OSError(errno.EFBIG, f"larger than {most / 2**20:.0f} MiB", str(path))
        return file.read(most + 1)


def atomic_write(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all.

    Raises:
        OSError: the folder cannot be written; nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def to_bytes(profile: Profile, name: str = "") -> bytes:
    """The stored form of a profile. `name`: what it is stored as."""
    t = profile.tape
    meta = {
        "format": FORMAT,
        "name": name,
        "workload": dataclasses.asdict(profile.workload),
        "source": profile.source,
        "target": profile.target,
        "versions": dict(profile.versions),
        "structure": dataclasses.asdict(profile.structure),
        "base_sizes": profile.base_sizes,
        "trained_shapes": profile.trained_shapes,
        "input_bytes": profile.input_bytes,
        "parameters": profile.parameters,
        "host_weight_bytes": profile.host_weight_bytes,
        "host_quantized_bytes": profile.host_quantized_bytes,
        "block_weights": dict(profile.block_weights),
        "notes": profile.notes,
        "measured": {k: dict(v) for k, v in profile.measured.items()},
        "bounds": [t.length, t.backward_start, t.optimizer_start],
        "calls": {n: [_call_values(c) for c in calls] for n, calls in t.calls.items()},
        "inner_reads": dict(t.inner_reads),
    }
    arrays = {name: getattr(t, name) for name in _ARRAYS}
    arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def _call_values(call: Call) -> list[Any]:
    return [getattr(call, field.name) for field in dataclasses.fields(call)]


def from_bytes(content: bytes, name: str = "") -> Profile:
    """Reads a stored profile. Data only: object arrays are refused.

    Args:
        name: what it was stored as.

    Raises:
        ValueError: not a profile of this format, or stored as another.
    """
    try:
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as file:
                meta: dict[str, Any] = json.loads(file["meta"].tobytes())
                arrays = {name: file[name] for name in _ARRAYS}
        except Exception:  # noqa: BLE001 - a damaged file may fail in any way; all of them mean the same
            raise ValueError("not a profile, or a damaged one") from None
        if meta["format"] != FORMAT:
            raise ValueError(f"profile format {meta['format']}, this version reads {FORMAT}")
        if meta["name"] != name:
            raise ValueError(f"it is that of {str(meta['name'])[:100] or 'no name'}")
        workload = dict(meta["workload"])
        for name in ("lora_targets", "buckets", "keep_resident"):
            workload[name] = tuple(workload[name])
        length, backward, optimizer = meta["bounds"]
        calls = {n: tuple(Call(c[0], c[1], *map(tuple, c[2:])) for c in made) for n, made in meta["calls"].items()}
        tape = Tape(
            length=length,
            backward_start=backward,
            optimizer_start=optimizer,
            **arrays,
            calls=calls,
            inner_reads={k: tuple(v) for k, v in meta["inner_reads"].items()},
        )
        _check_tape(tape)
        chains = tuple(
            Chain(
                c["path"],
                tuple(
                    Block(
                        b["name"],
                        b["kind"],
                        tuple(tuple(run) for run in b["feed_forward"]),
                        tuple(b["attention"]),
                        b["trainer_ffn_start"],
                    )
                    for b in c["blocks"]
                ),
                c["linked"],
                c["groupable"],
            )
            for c in meta["structure"]["chains"]
        )
        return Profile(
            workload=Workload(**workload),
            source=meta["source"],
            target=meta["target"],
            versions=meta["versions"],
            structure=Structure(chains),
            tape=tape,
            base_sizes=tuple((int(a), int(b)) for a, b in meta["base_sizes"]),
            trained_shapes=tuple(
                (tuple(int(d) for d in shape), int(b), int(c)) for shape, b, c in meta["trained_shapes"]
            ),
            input_bytes=tuple(meta["input_bytes"]),
            parameters=meta["parameters"],
            host_weight_bytes=meta["host_weight_bytes"],
            host_quantized_bytes=meta["host_quantized_bytes"],
            block_weights=_weights(meta["block_weights"]),
            notes=tuple(meta["notes"]),
            measured=meta["measured"],
        )
    except ValueError:
        raise
    except Exception as error:  # a damaged file may fail in any way; all of them mean the same
        raise ValueError(f"not a readable profile: {type(error).__name__}: {error}") from error


def _weights(stored: Mapping[str, Any]) -> dict[str, tuple[Weight, ...]]:
    """
    Raises:
        ValueError: not sizes and kinds.
    """
    found = {name: tuple((size, kind) for size, kind in weights) for name, weights in stored.items()}
    for size, kind in (w for weights in found.values() for w in weights):
        if type(size) is not int or not 0 <= size < 2**60 or kind not in (FROZEN, TRAINED, BUFFER, DESCRIBED):
            raise ValueError("the weights of a block are not valid")
    return found


_GROUPS = (
    ("size", "birth", "death", "scratch"),
    ("saved_storage", "saved_at", "unpacked_at", "released_at", "saved_movable", "saved_bytes", "saved_weight"),
    ("op_at", "op_kind", "op_flops", "op_bytes", "op_head"),
)
"""Arrays of a tape that are parallel."""
_KINDS = {"scratch": "bool", "saved_movable": "bool", "op_kind": "int8", "op_flops": "float64", "op_bytes": "float64"}
"""Types of their elements; int64 where none is named."""


def _check_tape(tape: Tape) -> None:
    """That a tape read from a file is one that a replay can walk: parallel arrays, positions in the step, storages that exist.

    Raises:
        ValueError: naming the array.
    """
    bounds = (0, tape.backward_start, tape.optimizer_start, tape.length)
    if any(type(b) is not int for b in bounds) or list(bounds) != sorted(bounds) or tape.length >= NEVER:
        raise ValueError("the parts of its step are not in order")
    for group in _GROUPS:
        for name in group:
            array = getattr(tape, name)
            if array.ndim != 1 or len(array) != len(getattr(tape, group[0])):
                raise ValueError(f"the arrays {group[0]} and {name} differ in length")
            if array.dtype != np.dtype(_KINDS.get(name, "int64")):
                raise ValueError(f"the array {name} holds {array.dtype}")
    count = len(tape.size)
    limits = {
        **dict.fromkeys(("birth", "saved_at", "op_at"), (0, tape.length, False)),
        **dict.fromkeys(("death", "unpacked_at", "released_at"), (0, tape.length, True)),
        **dict.fromkeys(("size", "saved_bytes"), (0, 2**60, False)),
        **dict.fromkeys(("op_flops", "op_bytes"), (0, 1e30, False)),
        "saved_storage": (-1, count - 1, False),
        "saved_weight": (-1, 2**31, False),
        "op_kind": (0, REDUCTION, False),
        "op_head": (0, 2**31, False),
    }
    for name, (least, most, may_last) in limits.items():
        array = getattr(tape, name)
        inside = (array >= least) & (array <= most)
        if may_last:
            inside |= array == NEVER
        if not inside.all():
            raise ValueError(f"the array {name} holds values out of range")
    for name, call in ((n, c) for n, made in tape.calls.items() for c in made):
        arguments, results = len(call.arguments), len(call.results)
        if not 0 <= call.start <= call.end <= tape.length:
            raise ValueError(f"the call of {name} lies outside the step")
        if len(call.movable) != arguments or len(call.argument_bytes) not in (0, arguments):
            raise ValueError(f"the call of {name} has lists that differ in length")
        if len(call.result_bytes) not in (0, results):
            raise ValueError(f"the call of {name} has lists that differ in length")
    named = [(*c.arguments, *c.results) for made in tape.calls.values() for c in made]
    for storages in (*named, *tape.inner_reads.values()):
        if any(type(s) is not int or not 0 <= s < count for s in storages):
            raise ValueError("a call names a storage that is not there")


def get(
    workload: Workload,
    target: str,
    source: str,
    build: Callable[[], Profile],
    warn: Callable[[str], None],
    *,
    refresh: bool = False,
) -> Profile:
    """The stored profile, or a new one from `build`, then stored.

    Args:
        warn: told when a stored file is unreadable or cannot be written; the answer is given all the same.
        refresh: build a new one in any case.
    """
    return get_named(key(workload, target, source), workload, build, warn, refresh=refresh)


def get_named(
    name: str, workload: Workload, build: Callable[[], Profile], warn: Callable[[str], None], *, refresh: bool = False
) -> Profile:
    """`get` for a profile whose name is known."""
    path = cache_folder() / f"{name}.npz"
    if not refresh and path.exists():
        try:
            stored = from_bytes(read_file(path), name)
            return dataclasses.replace(stored, workload=workload)
        except (ValueError, OSError) as error:
            warn(f"the stored profile {path} is not readable ({error}); it is rebuilt")
    profile = build()
    try:
        atomic_write(path, to_bytes(profile, name))
    except OSError as error:
        warn(
            f"the profile could not be stored in {path.parent} ({error.strerror}); the next answer will take as long as this one"
        )
    return profile


def stored(workload: Workload, target: str, source: str) -> Profile | None:
    """The stored profile, None when there is none or it is unreadable."""
    name = key(workload, target, source)
    try:
        return dataclasses.replace(from_bytes(read_file(cache_folder() / f"{name}.npz"), name), workload=workload)
    except (OSError, ValueError):
        return None


def read_small(name: str, warn: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """A small JSON object of the cache; empty when absent or unreadable.

    Args:
        warn: told when there is a file that is not readable.
    """
    path = cache_folder() / name
    try:
        found = json.loads(read_file(path))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        warn(f"the stored file {path} is not readable; it is made anew")
        return {}
    return found


def write_small(name: str, value: Mapping[str, Any]) -> None:
    """Stores a small JSON object in the cache; silently does without when it cannot be written."""
    write_quietly(name, json.dumps(value).encode())


def write_quietly(name: str, content: bytes) -> None:
    """Stores a file in the cache; silently does without when it cannot be written."""
    with contextlib.suppress(OSError):
        atomic_write(cache_folder() / name, content)
