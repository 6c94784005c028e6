"""`advise import`: a trainer's configuration in, an answer and the keys to change out. Data only: nothing in it is run."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from estimators.schedule import Schedule, ScheduleError
from probes import catalogue
from probes.catalogue import UnknownModelError
from probes.workload import OPTIMIZERS, PRECISIONS, WorkloadError

LARGEST = 4 * 2**20

_PRECISION = {"no_change": "bf16", "nf4-bnb": "nf4"}
"""The trainer's names that differ from the command's."""
_CONTROLS = (
    "gradient_checkpointing",
    "gradient_checkpointing_backend",
    "gradient_checkpointing_interval",
    "gradient_checkpointing_segment_stride",
    "gradient_checkpointing_offload_attention",
    "gradient_checkpointing_offload_pin_memory_max_buckets",
    "gradient_checkpointing_offload_prefetch",
)
_READ = {
    *_CONTROLS, "model_family", "model_flavour", "resolution", "resolution_type", "train_batch_size", "lora_rank", "lora_alpha",
    "lora_dropout", "lora_type", "model_type", "optimizer", "base_model_precision", "mixed_precision", "fuse_qkv_projections", "ramtorch",
    "gradient_accumulation_steps", "attention_mechanism",
}  # fmt: skip
_MEMORY = (
    "musubi_blocks_to_swap", "enable_group_offload", "dynamo_backend", "ramtorch_transformer_percent", "feed_forward_chunk_size",
    "enable_chunked_feed_forward", "use_ema", "controlnet", "fsdp_enable", "deepspeed_config", "ramtorch_target_modules",
)  # fmt: skip
"""Keys that change memory or time and are not read; said in a note where they are on."""


@dataclass(frozen=True)
class Imported:
    """What a configuration asks for."""

    path: Path
    config: Mapping[str, Any]
    request: Mapping[str, Any]
    schedule: Schedule
    """Its own."""
    notes: tuple[str, ...]

    def patched(self, controls: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration with other checkpointing keys, in its own spelling of keys (with dashes or without)."""
        spelled = {_plain(k): k for k in self.config}
        dashed = any(k.startswith("--") for k in self.config)
        out = {k: v for k, v in self.config.items() if _plain(k) not in _CONTROLS}
        for key, value in controls.items():
            out[spelled.get(key, f"--{key}" if dashed else key)] = value
        return out

    def changes(self, controls: Mapping[str, Any]) -> list[str]:
        """What the patch changes, one line a key."""
        if Schedule.from_controls(controls) == self.schedule:
            return []
        have = {_plain(k): v for k, v in self.config.items() if _plain(k) in _CONTROLS}
        out = []
        for key in _CONTROLS:
            before, after = have.get(key), controls.get(key)
            if key in have and key not in controls:
                out.append(f"{key}: {json.dumps(before)} -> left out")
            elif key in controls and _number(before) != after:
                out.append(f"{key}: {json.dumps(before) if key in have else 'not set'} -> {json.dumps(after)}")
        return out


def _plain(key: str) -> str:
    return key.lstrip("-").replace("-", "_")


def read(path: Path) -> Imported:
    """Reads a SimpleTuner `config.json`.

    Raises:
        WorkloadError: not readable, or it names a model or values that cannot be planned for.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise WorkloadError(f"{path}: too large for a configuration")
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise WorkloadError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    except (ValueError, RecursionError) as error:
        raise WorkloadError(f"{path}: not valid JSON ({str(error).splitlines()[0]})") from None
    if not isinstance(content, dict) or not all(isinstance(k, str) for k in content):
        raise WorkloadError(f"{path}: not a JSON object")
    values = {_plain(k): v for k, v in content.items()}
    if "model_family" not in values:
        near = difflib.get_close_matches("model_family", list(values), 1)
        raise WorkloadError(
            f"{path}: has no model_family, so it is not a SimpleTuner configuration"
            + (f" ({near[0]}?)" if near else "")
        )
    return _imported(path, content, values)


def _imported(path: Path, content: Mapping[str, Any], values: Mapping[str, Any]) -> Imported:
    notes: list[str] = []
    request: dict[str, Any] = {"model": str(values["model_family"])}
    try:
        family = catalogue.find(request["model"])
    except UnknownModelError as error:
        raise WorkloadError(f"{path}: model_family: {error}") from None
    if (flavour := values.get("model_flavour")) is not None:
        request["variant"] = str(flavour)
    _size(values, family, request, notes)
    if (batch := _number(values.get("train_batch_size"))) is not None:
        request["batch"] = batch
    _adapter(values, request, notes)
    _base(values, request, notes)
    if values.get("fuse_qkv_projections") is True:
        request["fuse_qkv"] = True
    if values.get("ramtorch") is True:
        request["weights_offload"] = "ramtorch"
    if (steps := values.get("gradient_accumulation_steps")) not in (None, 1, "1"):
        notes.append(
            f"gradient_accumulation_steps {steps}: does not raise the peak; a step here is one forward and backward"
        )
    notes += [f"{k} is on and is not taken into account" for k in _MEMORY if values.get(k) not in _OFF]
    try:
        controls = {k: _number(values[k]) for k in _CONTROLS if values.get(k) not in (None, "", "None")}
        controls.setdefault("gradient_checkpointing", True)  # the trainer's default
        schedule = Schedule.from_controls(controls)
    except ScheduleError as error:
        raise WorkloadError(f"{path}: {error}") from None
    return Imported(path, content, request, schedule, tuple(notes))


_OFF = (None, False, 0, "", "no", "No", "false", "False", "none", "0", 100, "100")


def _number(value: Any) -> Any:
    """Numbers that the trainer takes as text too."""
    if isinstance(value, str):
        if value.lower() in ("true", "false"):
            return value.lower() == "true"
        if value.isascii() and value.isdecimal():
            return int(value)
    return value


def _size(values: Mapping[str, Any], family: catalogue.Family, request: dict[str, Any], notes: list[str]) -> None:
    size, kind = _number(values.get("resolution")), values.get("resolution_type", "pixel_area")
    if size is None:
        notes.append("no resolution in it: the model's default is taken")
        return
    step = family.pixel_multiple
    if kind == "area" and isinstance(size, int | float):
        side = step * round(_root(float(size) * 2**20) / step)
        notes.append(f"resolution {size} megapixels of 2^20: taken as {side}x{side}")
        request["resolution"] = f"{side}x{side}"
    else:
        request["resolution"] = size
    notes.append("aspect buckets live in the data backend's file, not in this one; plan for the largest with --bucket")


def _root(value: float) -> float:
    """Square root of a size that may be nonsense."""
    return float(value**0.5) if 0 < value < 1e12 else 0.0


def _adapter(values: Mapping[str, Any], request: dict[str, Any], notes: list[str]) -> None:
    if values.get("model_type", "full" if "lora_rank" not in values else "lora") == "full":
        request["adapter"] = "full"
        return
    if values.get("lora_type", "standard") == "lycoris":
        request["adapter"] = "lokr"
        notes.append("lora_type lycoris: its own file says which form and factor; taken as LoKr with factor 16")
    for key, name in (("lora_rank", "rank"), ("lora_alpha", "alpha"), ("lora_dropout", "lora_dropout")):
        if request.get("adapter") != "lokr" and values.get(key) not in (None, ""):
            request[name] = _number(values[key])


def _base(values: Mapping[str, Any], request: dict[str, Any], notes: list[str]) -> None:
    precision = values.get("base_model_precision")
    if precision is not None:
        found = _PRECISION.get(str(precision), str(precision))
        if found not in PRECISIONS:
            raise WorkloadError(
                f"base_model_precision {precision!r} is not known here; known: {', '.join([*_PRECISION, *PRECISIONS])}"
            )
        request["precision"] = found
    optimizer = values.get("optimizer")
    if optimizer is not None:
        name = str(optimizer)
        if name in OPTIMIZERS:
            request["optimizer"] = name
        else:
            near = difflib.get_close_matches(name, OPTIMIZERS, 1, 0.4)
            notes.append(
                f"optimizer {name} is not known here; {near[0] if near else 'adamw_bf16'} is taken in its place"
            )
            if near:
                request["optimizer"] = near[0]
