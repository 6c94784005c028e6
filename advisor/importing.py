"""`advise import`: a trainer's configuration in, an answer and the keys to change out. Data only: nothing in it is run."""

from __future__ import annotations

import difflib
import json
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from advisor import lycoris_config
from estimators.schedule import CONTROLS, Schedule, ScheduleError
from probes import catalogue, optimizer_facts
from probes.catalogue import UnknownModelError
from probes.workload import GROUP_OFFLOAD, PRECISIONS, Workload, WorkloadError, from_request

LARGEST = 4 * 2**20
DEFAULT_BATCH = 4
"""The trainer's own."""
MODEL_TYPES = ("lora", "full")
LORA_TYPES = ("standard", "lycoris")
SIZES = ("pixel", "area", "pixel_area")
"""What ``resolution_type`` can be."""

_PRECISION = {"no_change": "bf16", "nf4-bnb": "nf4"}
"""The trainer's names that differ from the command's."""
_MEMORY = (
    "dynamo_backend", "feed_forward_chunk_size",
    "enable_chunked_feed_forward", "controlnet", "fsdp_enable", "deepspeed_config", "ramtorch_target_modules",
    "fsdp_activation_checkpointing", "tread_config", "layersync_enabled", "crepa_enabled", "distillation_method",
)  # fmt: skip
"""Keys that change memory or time and are not read; said in a note where they are on."""
_PHASES = (
    "vae_batch_size",
    "vae_enable_tiling",
    "vae_enable_slicing",
    "validation_resolution",
)
"""Keys of what happens beside the training step."""


_BUCKETS = (
    "aspect buckets live in the data backend's file, not in this one; give them with --bucket or --aspect-buckets"
)


@dataclass(frozen=True)
class Imported:
    """What a configuration asks for."""

    path: Path
    config: Mapping[str, Any]
    request: Mapping[str, Any]
    schedule: Schedule
    """Its own."""
    notes: tuple[str, ...]
    given: tuple[str, ...] = ()
    """Of the request what is not from it."""
    lycoris: bool = False
    """Whether its adapter is from the file that its ``lycoris_config`` names."""

    def patched(self, controls: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration with other keys for checkpointing, in its own spelling of keys (with dashes or without)."""
        spelled = {_plain(k): k for k in self.config}
        dashed = any(k.startswith("--") for k in self.config)
        out = {k: v for k, v in self.config.items() if _plain(k) not in CONTROLS}
        for key, value in controls.items():
            out[spelled.get(key, f"--{key}" if dashed else key)] = value
        return out

    def changes(self, controls: Mapping[str, Any]) -> list[str]:
        """What the patch changes, one line a key."""
        if Schedule.from_controls({k: v for k, v in controls.items() if k in CONTROLS}) == self.schedule:
            return []
        have = {_plain(k): v for k, v in self.config.items() if _plain(k) in CONTROLS}
        out = []
        for key in CONTROLS:
            before, after = have.get(key), controls.get(key)
            if key in have and key not in controls:
                out.append(f"{key}: {json.dumps(before)} -> left out")
            elif key in controls and _number(before) != after:
                out.append(f"{key}: {json.dumps(before) if key in have else 'not set'} -> {json.dumps(after)}")
        return out


def _plain(key: str) -> str:
    return key.lstrip("-").replace("-", "_")


def read(path: Path, given: Mapping[str, Any] | None = None) -> Imported:
    """Reads a SimpleTuner `config.json`.

    Args:
        given: parts of a request that count instead of what is in it.

    Raises:
        WorkloadError: not readable, or it names a model or values that cannot be planned for; the file and the key are named.
    """
    content = _json(path)
    if not is_configuration(content):
        if not isinstance(content, dict):
            raise WorkloadError(f"{path}: not a JSON object")
        near = difflib.get_close_matches("model_family", [_plain(k) for k in content], 1)
        raise WorkloadError(
            f"{path}: has no model_family, so it is not a SimpleTuner configuration"
            + (f" ({near[0]}?)" if near else "")
        )
    values: dict[str, Any] = {}
    for key, value in content.items():
        if _plain(key) in values:
            raise WorkloadError(f"{path}: {_plain(key)} is in it twice, with dashes and without")
        values[_plain(key)] = value
    try:
        return _imported(path, content, values, given or {})
    except (WorkloadError, UnknownModelError, ScheduleError) as error:
        raise WorkloadError(f"{path}: {error}") from None


def _json(path: Path) -> Any:
    """
    Raises:
        WorkloadError: not readable, or not JSON; the file is named.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise WorkloadError(f"{path}: {'is a folder' if stat.S_ISDIR(mode) else 'is not a regular file'}")
        if path.stat().st_size > LARGEST:
            raise WorkloadError(f"{path}: too large for a configuration")
        return json.loads(path.read_text(encoding="utf-8-sig"), parse_constant=_no_constant)
    except FileNotFoundError:
        raise WorkloadError(f"{path}: no such file") from None
    except WorkloadError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    except (ValueError, RecursionError) as error:
        raise WorkloadError(f"{path}: not valid JSON ({str(error).splitlines()[0]})") from None


def is_configuration(content: Any) -> bool:
    """Whether a JSON value is a SimpleTuner configuration: an object that names a model family."""
    return isinstance(content, dict) and any(_plain(k) == "model_family" for k in content)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


_KEYS = {
    "--model": "model_family", "--variant": "model_flavour", "--batch": "train_batch_size", "--rank": "lora_rank",
    "--alpha": "lora_alpha", "--lora-dropout": "lora_dropout", "--precision": "base_model_precision", "--adapter": "model_type",
    "--optimizer": "optimizer", "--resolution": "resolution", "--fuse-qkv": "fuse_qkv_projections",
    "--weights-offload ramtorch": "ramtorch", "--weights-offload": "musubi_blocks_to_swap",
    "--accumulate": "gradient_accumulation_steps", "--dora": "use_dora", "--rslora": "use_rslora",
}  # fmt: skip
"""The configuration's keys behind the command's options."""


def workload(read: Imported) -> Workload:
    """The job that a configuration asks for.

    Raises:
        WorkloadError: a value that the model cannot have; the file and its key are named, or the option that stands for it.
    """
    try:
        return from_request(read.request)
    except (WorkloadError, UnknownModelError) as error:
        named = re.search(r"--[a-z][a-z-]*", str(error))
        if named is not None and named[0][2:].replace("-", "_") in read.given:
            raise
        keys = _KEYS | {k: f"lycoris_config: {v}" for k, v in lycoris_config.OPTIONS.items() if read.lycoris}
        text = re.sub(r"--weights-offload ramtorch|--[a-z][a-z-]*", lambda m: keys.get(m[0], m[0]), str(error))
        if isinstance(error, UnknownModelError):
            text = f"model_flavour: {text}"
        raise WorkloadError(f"{read.path}: {text}") from None


def _imported(path: Path, content: Mapping[str, Any], values: Mapping[str, Any], given: Mapping[str, Any]) -> Imported:
    notes: list[str] = []
    request: dict[str, Any] = {"model": _text(values, "model_family")}
    try:
        family = catalogue.find(request["model"])
    except UnknownModelError as error:
        raise WorkloadError(f"model_family: {str(error).removeprefix('--model ')}") from None
    if (flavour := _text(values, "model_flavour")) is not None:
        request["variant"] = flavour
    _size(values, family, request, [] if "resolution" in given else notes)
    if (batch := _number(values.get("train_batch_size"))) in (None, ""):
        request["batch"] = DEFAULT_BATCH
        if "batch" not in given:
            notes.append(f"no train_batch_size in it: the trainer's default of {DEFAULT_BATCH} is taken")
    else:
        request["batch"] = batch
    _base(values, request, notes)
    if _flag(values, "fuse_qkv_projections"):
        request["fuse_qkv"] = True
    _weights_offload(values, request, notes)
    lycoris = _adapter(path, values, request, given, notes)
    if (steps := values.get("gradient_accumulation_steps")) not in (None, "", 1, "1"):
        request["accumulate"] = _number(steps)
        notes.append(f"gradient_accumulation_steps {_shown(steps)}: step times here are of one batch")
    if _flag(values, "use_ema"):
        if _text(values, "ema_device", default="cpu") == "accelerator":
            request["ema"] = True
        else:
            notes.append(
                "use_ema is on: its average is taken to wait on the host, where ema_device accelerator is not set"
            )
    notes += [f"{k} is on and is not taken into account" for k in _MEMORY if not _is_off(values.get(k))]
    if beside := [k for k in _PHASES if not _is_off(values.get(k))]:
        notes.append(
            f"{', '.join(beside)}: caching and validation are planned for with --caching, --caching-batch, --vae-tiling, --vae-slicing "
            "and --validation-resolution"
        )
    if not _is_off(values.get("enable_group_offload")):
        notes.append(f"enable_group_offload is on and is not planned for: {GROUP_OFFLOAD}")
    controls = {k: _number(values[k]) for k in CONTROLS if values.get(k) not in (None, "", "None")}
    controls.setdefault("gradient_checkpointing", True)  # the trainer's default
    if {"buckets", "aspect_buckets"} & set(given):
        notes = [n for n in notes if n != _BUCKETS]
    for key, value in given.items():
        if (had := request.get(key, value)) != value:
            notes.append(
                f"--{key.replace('_', '-')} {value} counts instead of its {had}, which stays in the configuration"
            )
    return Imported(
        path, content, {**request, **given}, Schedule.from_controls(controls), tuple(notes), tuple(given), lycoris
    )


def _shown(value: Any) -> str:
    return json.dumps(value)[:60]


def _flag(values: Mapping[str, Any], key: str) -> bool:
    """True or false, also as text; absent, null and the empty text are false.

    Raises:
        WorkloadError: anything else.
    """
    value = _number(values.get(key))
    if value in (None, "") or isinstance(value, bool):
        return value is True
    raise WorkloadError(f"{key} must be true or false, not {_shown(values[key])}")


def _text(values: Mapping[str, Any], key: str, valid: Sequence[str] = (), default: str | None = None) -> str | None:
    """A text, one of `valid` if there are any; the default where it is absent, null, empty or "None".

    Raises:
        WorkloadError: no text, or not a valid one.
    """
    value = values.get(key)
    if value in (None, "", "None"):
        return default
    if not isinstance(value, str):
        raise WorkloadError(f"{key} must be text, not {_shown(value)}")
    if valid and value not in valid:
        near = difflib.get_close_matches(value.lower(), valid, 1, 0.5)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise WorkloadError(f"{key} {value!r} is not known here{hint}; known: {', '.join(valid)}")
    return value


def _is_off(value: Any) -> bool:
    if isinstance(value, (dict, list)):
        return not value
    return value in _OFF


_OFF = (None, False, 0, "", "no", "No", "false", "False", "none", "0", 100, "100")


def _number(value: Any) -> Any:
    """Numbers, true and false that the trainer takes as text too."""
    if isinstance(value, str):
        if value.lower() in ("true", "false"):
            return value.lower() == "true"
        if re.fullmatch(r"[0-9]{1,18}", value):
            return int(value)
        if re.fullmatch(r"[0-9]{1,18}\.[0-9]{0,18}", value):
            return float(value)
    return value


def _size(values: Mapping[str, Any], family: catalogue.Family, request: dict[str, Any], notes: list[str]) -> None:
    size, kind = _number(values.get("resolution")), _text(values, "resolution_type", SIZES, "pixel_area")
    if size in (None, ""):
        notes.append("no resolution in it: the model's default is taken")
        return
    if isinstance(size, bool) or not isinstance(size, (int, float, str)):
        raise WorkloadError(f"resolution must be a number, not {_shown(size)}")
    step = family.pixel_multiple
    if kind == "area" and not isinstance(size, str):
        side = step * round(_root(float(size) * 2**20) / step)
        notes.append(f"resolution {size} megapixels of 2^20: taken as {side}x{side}")
        request["resolution"] = f"{side}x{side}"
    else:
        request["resolution"] = int(size) if isinstance(size, float) and size.is_integer() else size
    notes.append(_BUCKETS)


def _root(value: float) -> float:
    """Square root of a size that may be nonsense."""
    return float(value**0.5) if 0 < value < 1e12 else 0.0


def _adapter(
    path: Path, values: Mapping[str, Any], request: dict[str, Any], given: Mapping[str, Any], notes: list[str]
) -> bool:
    """Returns whether what `lycoris_config` names was read."""
    default = "full" if "lora_rank" not in values else "lora"
    kind = _text(values, "lora_type", LORA_TYPES, "standard")
    if _text(values, "model_type", MODEL_TYPES, default) == "full":
        request["adapter"] = "full"
        return False
    if kind == "lycoris":
        return _lycoris(path, values, request, given, notes)
    for key, name in (("use_dora", "dora"), ("use_rslora", "rslora")):
        if _flag(values, key):
            request[name] = True
    for key, name in (("lora_rank", "rank"), ("lora_alpha", "alpha"), ("lora_dropout", "lora_dropout")):
        if values.get(key) not in (None, ""):
            request[name] = _number(values[key])
    return False


def _lycoris(
    path: Path, values: Mapping[str, Any], request: dict[str, Any], given: Mapping[str, Any], notes: list[str]
) -> bool:
    name = _text(values, "lycoris_config")
    try:
        if name is None:
            raise WorkloadError("no lycoris_config in it")
        folders = (path.parent, Path())
        found = next((f for f in (folder / Path(name).expanduser() for folder in folders) if f.exists()), None)
        if found is None:
            raise WorkloadError(
                f"lycoris_config {name}: no such file beside the configuration or in the current folder"
            )
        content = _json(found)
    except (OSError, ValueError, RuntimeError) as error:  # a name that no file can have, a home folder of nobody
        request["adapter"] = "lokr"
        notes.append(
            f"lora_type lycoris: {error}, which says which form and factor; taken as LoKr, with factor 16 unless --lokr-factor says another"
        )
        return False
    own: list[str] = []
    try:
        request |= lycoris_config.request(content, request, given, own)
    except WorkloadError as error:
        raise WorkloadError(f"lycoris_config {name}: {error}") from None
    notes += [f"lycoris_config {name}: {text}" for text in own]
    return True


def _weights_offload(values: Mapping[str, Any], request: dict[str, Any], notes: list[str]) -> None:
    swapped = _number(values.get("musubi_blocks_to_swap"))
    if swapped in (None, "", 0):
        swapped = 0
    elif isinstance(swapped, bool) or not isinstance(swapped, int):
        raise WorkloadError(f"musubi_blocks_to_swap must be a number of blocks, not {_shown(swapped)}")
    if _flag(values, "ramtorch"):
        if swapped:
            raise WorkloadError(
                "ramtorch and musubi_blocks_to_swap exclude each other: the trainer stops; leave one out"
            )
        share = _number(values.get("ramtorch_transformer_percent"))
        if share in (None, "", 100):
            request["weights_offload"] = "ramtorch"
        elif isinstance(share, bool) or not isinstance(share, int) or not 0 <= share <= 100:
            raise WorkloadError(f"ramtorch_transformer_percent must be from 0 to 100, not {_shown(share)}")
        elif share:
            request["weights_offload"] = f"ramtorch:{share}"
    elif swapped:
        request["weights_offload"] = f"blocks:{swapped}"
        if (device := _text(values, "musubi_block_swap_device", default="cpu")) != "cpu":
            notes.append(
                f"musubi_block_swap_device {device} is not taken into account: blocks are planned to wait on the host"
            )


def _base(values: Mapping[str, Any], request: dict[str, Any], notes: list[str]) -> None:
    known = (*_PRECISION, *PRECISIONS)
    precision = _text(values, "base_model_precision", known)
    if precision is not None:
        request["precision"] = _PRECISION.get(precision, precision)
    mixed = _text(values, "mixed_precision", default="bf16")
    if mixed != "bf16":
        notes.append(f"mixed_precision {mixed} is not taken into account: the step is planned in bf16")
    attention = _text(values, "attention_mechanism", default="diffusers")
    if attention != "diffusers":
        notes.append(
            f"attention_mechanism {attention} is not taken into account: attention is planned as PyTorch runs it (diffusers)"
        )
    name = _text(values, "optimizer")
    if name is None or optimizer_facts.canonical(name):
        request |= {} if name is None else {"optimizer": name}
        return
    near = difflib.get_close_matches(name.lower(), optimizer_facts.spellings(), 1, 0.4)
    notes.append(f"optimizer {name} is not known here; {near[0] if near else 'adamw_bf16'} is taken in its place")
    if near:
        request["optimizer"] = near[0]
