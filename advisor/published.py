"""Published measurements as requests, and the estimates for them. For `advise calibrate` and the accuracy page."""

from __future__ import annotations

import csv
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from advisor.api import Session
from decision_rules.support import Executor
from estimators.devices import find_gpu
from estimators.estimate import Estimate, Estimator
from estimators.schedule import Backend, Schedule
from probes import outside, resources
from probes.traced import TraceError
from probes.workload import Workload, WorkloadError, from_request

_TYPES: Mapping[str, Any] = {
    "frames": int,
    "batch": int,
    "rank": int,
    "caption_tokens": int,
    "alpha": float,
    "lora_dropout": float,
    "lokr_full_matrix": lambda v: v in ("True", "1"),
    "fuse_qkv": lambda v: v in ("True", "1"),
    "lora_targets": json.loads,
}
_KEYS = ("model", "variant", "resolution", "frames", "batch", "caption_tokens", "adapter", "rank", "alpha", "lora_dropout", "lokr_factor", "lokr_full_matrix",
         "lora_targets", "optimizer", "precision", "attention", "fuse_qkv", "weights_offload", "compile")  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One published measurement."""

    id: str
    family: str
    gpu: str
    precision: str
    schedule: Schedule
    request: Mapping[str, Any]
    peak_gib: float | None
    seconds: float | None
    out_of_memory: bool


def rows() -> list[Row]:
    """All rows of `data/measured.csv` that have a resolution; figures marked unfit for comparison are None."""
    out = []
    for r in csv.DictReader(resources.text("measured.csv").splitlines()):
        if not r["resolution"]:
            continue
        request = {k: _TYPES.get(k, str)(r[k]) for k in _KEYS if r.get(k)}
        controls: dict[str, Any] = {"gradient_checkpointing": r["backend"] != "none"}
        if r["backend"] != "none":
            controls["gradient_checkpointing_backend"] = r["backend"]
        for column, key in (
            ("interval", "gradient_checkpointing_interval"),
            ("stride", "gradient_checkpointing_segment_stride"),
        ):
            if r[column]:
                controls[key] = int(r[column])
        if r["offload_attention"] == "True":
            controls["gradient_checkpointing_offload_attention"] = True
        measured = r["status"] == "measured"
        out.append(
            Row(
                id=r["id"],
                family=r["family"],
                gpu=r["gpu"],
                precision=r["precision"],
                schedule=Schedule.from_controls(controls),
                request=request,
                peak_gib=float(r["peak_vram_gib"]) if measured and r["use_memory"] == "1" else None,
                seconds=float(r["sec_per_step"]) if measured and r["use_time"] == "1" else None,
                out_of_memory=r["status"] == "OOM",
            )
        )
    return out


@dataclass(frozen=True)
class Synthetic:
    """One published figure of a plain stack of frozen blocks."""

    gpu: str
    tokens: int
    layers: int
    workload: Workload
    schedule: Schedule
    peak_gib: float
    seconds: float


CLASS = "probes.models.frozen_stack:FrozenStack"
SHEET = """
[config]
width = {width}
depth = {depth}
heads = {heads}

[inputs]
tokens = {{ shape = ["B", "(H//16)*(W//16)", "16"] }}

[output]
shape = ["B", "(H//16)*(W//16)", "width"]

[pixels]
vae_factor = 16
patch = 1
default_resolution = 512

[lora]
targets = ["entry"]
"""
HEAD = 128


def synthetic() -> list[Synthetic]:
    """All rows of `data/synthetic_block.csv`, with the stack of `probes/models/frozen_stack.py` as their model. What trains is one
    adapter of rank 1 before the first block, so that gradients pass through every block."""
    outside.allow(CLASS)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for row in csv.DictReader(resources.text("synthetic_block.csv").splitlines()):
            tokens, layers, width = (int(row[f"{k}_inferred"]) for k in ("tokens", "layers", "width"))
            sheet = Path(folder) / f"{layers}.toml"
            sheet.write_text(SHEET.format(width=width, depth=layers, heads=width // HEAD))
            request = {
                "model_class": CLASS,
                "model_config": str(sheet),
                "resolution": 16 * round(tokens**0.5),
                "rank": 1,
                "lora_dropout": 0.0,
                "optimizer": "sgd",
            }
            found.append(
                Synthetic(
                    row["gpu"],
                    tokens,
                    layers,
                    from_request(request),
                    Schedule(Backend(row["mode"])),
                    float(row["gib"]),
                    float(row["sec"]),
                )
            )
    return found


@dataclass
class Answered:
    """A row with its estimator and estimate."""

    row: Row
    workload: Workload
    estimator: Estimator
    estimate: Estimate


def estimates(chosen: Sequence[Row] | None = None) -> tuple[list[Answered], dict[str, int]]:
    """Rows that can be estimated under SimpleTuner's semantics, and for the others why not with how many rows. Of all rows, or of
    those `chosen`."""
    from decision_rules.support import job_check, job_semantics

    session = Session()
    refused: dict[str, int] = defaultdict(int)
    answered: list[Answered] = []
    for row in rows() if chosen is None else chosen:
        try:
            workload = from_request(row.request)
        except WorkloadError as error:
            refused[_short(error)] += 1
            continue
        except ValueError as error:
            refused[_short(error)] += 1
            continue
        device = find_gpu(row.gpu)
        try:
            _, profile, _ = session.profile(workload, device, Executor.SIMPLETUNER)
        except (TraceError, WorkloadError) as error:
            refused[_short(error)] += 1
            continue
        verdict = job_check(Executor.SIMPLETUNER, workload, profile.structure, row.schedule)
        if not verdict.supported:
            refused[verdict.reason or "not supported"] += 1
            continue
        estimator = Estimator(profile, device, job_semantics(Executor.SIMPLETUNER, workload))
        answered.append(Answered(row, workload, estimator, estimator.estimate(verdict.effective)))
    return answered, dict(refused)


def _short(error: Exception) -> str:
    text = str(error)
    return text.split("; valid:")[0].split(" valid: ")[0].split("; ")[0]


def by_family(answered: list[Answered]) -> Iterator[tuple[str, list[Answered]]]:
    """Groups in alphabetical order of family."""
    groups: dict[str, list[Answered]] = defaultdict(list)
    for a in answered:
        groups[a.row.family].append(a)
    yield from sorted(groups.items())
