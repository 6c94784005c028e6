"""The file that a trainer's ``lycoris_config`` names, as parts of a request. Data only: nothing in it is run.

What its keys mean is read off LyCORIS' own ``create_lycoris`` and modules (Apache-2.0, 3.4.0 and 4.1.3): its defaults count here, and
a key that changes memory and is not planned for is said in a note.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from probes.workload import FLOAT_PRECISIONS, MAX_RANK, WorkloadError

ALGORITHMS = {"lokr": "lokr", "loha": "loha", "lora": "lora", "locon": "lora"}
"""LyCORIS' name -> ours."""
OPTIONS = {
    "--rank": "linear_dim", "--alpha": "linear_alpha", "--lokr-factor": "factor", "--lora-targets": "apply_preset",
    "--lora-dropout": "dropout", "--adapter": "algo",
}  # fmt: skip
"""The file's keys behind the command's options."""
_FORCED = ("nf4", "int8-bnb", "int8-quanto", "int4-quanto", "int2-quanto", "fp8-quanto")
"""Bases on which LyCORIS takes its bypass mode whatever is asked."""
_UNPLANNED = {
    "dora_wd": "its trained lengths (DoRA)",
    "decompose_both": "small first factors",
    "unbalanced_factorization": "swapped factors of the outputs",
    "train_norm": "adapters of norms",
    "use_tucker": "adapters of convolutions",
    "use_cp": "adapters of convolutions",
    "use_conv_cp": "adapters of convolutions",
    "conv_dim": "adapters of convolutions",
}
"""Keys that change memory, and what is not planned for where they are on."""
_FREE = ("multiplier", "rs_lora", "conv_alpha", "rank_dropout_scale", "disable_conv_cp", "wd_on_output", "block_size", "constraint", "rescaled", "warn_on_unmatched")  # fmt: skip
"""Keys that cost nothing, or nothing without those above."""
_READ = ("algo", "linear_dim", "linear_alpha", "factor", "full_matrix", "use_scalar", "bypass_mode", "weight_decompose", "dropout", "rank_dropout", "module_dropout", "apply_preset", "preset")  # fmt: skip
_PRESET_READ = ("target_module", "target_name", "module_algo_map", "name_algo_map", "exclude_name")
_PRESET_FREE = ("enable_conv", "use_fnmatch", "lora_prefix", "unet_target_module", "unet_target_name", "text_encoder_target_module", "text_encoder_target_name")  # fmt: skip
_NAME = re.compile(r"[A-Za-z_][\w.]*", re.ASCII)
_ALIKE = ("algo", "factor", "alpha", "rs_lora")
"""Keys of an entry of an algorithm map that are read, or that cost nothing."""


def request(content: Any, base: Mapping[str, Any], given: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """What the file asks for, as parts of a request.

    Args:
        content: the file's JSON value.
        base: the request so far: the base's precision and where its weights are.
        given: parts of a request that count instead.
        notes: gets a sentence for each key that changes memory and is not planned for.

    Raises:
        WorkloadError: a value that LyCORIS cannot take, or a form that cannot be planned for; the key is named.
    """
    if not isinstance(content, Mapping):
        raise WorkloadError("is not a JSON object")
    adapter = _algorithm(content.get("algo") or "lora", given)
    asked: dict[str, Any] = {"adapter": adapter}
    rank = 4 if content.get("linear_dim") is None else _whole(content, "linear_dim")
    if (
        rank > MAX_RANK and adapter == "lokr"
    ):  # at least half of every factor, which is where LyCORIS takes full matrices
        asked["lokr_full_matrix"] = True
    else:
        asked["rank"] = rank
        if alpha := _number(content, "linear_alpha", 1.0):  # 0: the rank
            asked["alpha"] = alpha
    if adapter == "lora":
        asked["lora_dropout"] = _number(content, "dropout", 0.0)
    if adapter == "lokr" and _on(content, "full_matrix"):
        asked["lokr_full_matrix"] = True
    if _on(content, "use_scalar"):
        if adapter == "lokr":
            asked["lokr_scalar"] = True
        else:
            notes.append(
                f"use_scalar is on and is not planned for with {adapter}: the update that it multiplies is kept for backward"
            )
    _bypass(content, adapter, {**base, **given}, asked, notes)
    _dropouts(content, asked, notes)
    notes += [
        f"{key} is on and is not planned for: {what}" for key, what in _UNPLANNED.items() if _is_set(content, key)
    ]
    if _is_set(content, "weight_decompose"):
        notes.append("weight_decompose does nothing here: LyCORIS reads dora_wd in its place")
    if content.get("preset", "full") != "full":
        notes.append(f"preset {content['preset']!r} is not taken into account; apply_preset is")
    if unknown := [str(k) for k in content if k not in (*_READ, *_FREE, *_UNPLANNED)]:
        notes.append(f"not known here and not taken into account: {', '.join(unknown)}")
    _targets(content, adapter, asked, notes)
    return asked


def _algorithm(value: Any, given: Mapping[str, Any]) -> str:
    if "adapter" in given:
        return str(given["adapter"])
    found = ALGORITHMS.get(value.lower()) if isinstance(value, str) else None
    if found is None:
        raise WorkloadError(
            f"algo {str(value)[:60]!r} cannot be planned for; {', '.join(ALGORITHMS)} can, or name another with --adapter"
        )
    return found


def _on(values: Mapping[str, Any], key: str) -> bool:
    """As LyCORIS reads it: anything but false is true, also as text."""
    return key in values and str(values[key]).lower() != "false"


def _is_set(values: Mapping[str, Any], key: str) -> bool:
    """A switch or a number that is on."""
    return values.get(key) not in (None, 0, "", "0") and _on(values, key)


def _number(values: Mapping[str, Any], key: str, default: float) -> float:
    value = values.get(key)
    if value is None:
        return default
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError
        return float(value)
    except (ValueError, OverflowError):
        raise WorkloadError(f"{key} must be a number, not {str(value)[:60]!r}") from None


def _whole(values: Mapping[str, Any], key: str) -> int:
    value = _number(values, key, 0.0)
    if not value.is_integer():
        raise WorkloadError(f"{key} must be a whole number, not {values[key]!r}")
    return int(value)


def _bypass(
    content: Mapping[str, Any], adapter: str, base: Mapping[str, Any], asked: dict[str, Any], notes: list[str]
) -> None:
    precision, offload = base.get("precision", "bf16"), base.get("weights_offload", "none")
    if _on(content, "bypass_mode") or precision in _FORCED:
        return
    text = "bypass_mode is not on: LyCORIS then builds every update whole"
    if precision not in FLOAT_PRECISIONS:
        notes.append(
            f"bypass_mode is not on: with {precision} LyCORIS then stops, trains nothing or builds every update whole, by the package "
            "(docs/training_setups.md); planned as if it were on"
        )
    elif adapter != "lokr" or offload != "none":
        what = "" if adapter != "lokr" else " with weights on the host"
        notes.append(f"{text}, which is not planned for{what}: planned as if it were on")
    else:
        asked["lokr_rebuild"] = True
        notes.append(f"{text} and keeps it for backward; planned so")


def _dropouts(content: Mapping[str, Any], asked: Mapping[str, Any], notes: list[str]) -> None:
    """LoKr's own rules: dropout in bypass mode alone, rank_dropout without it alone."""
    adapter, rebuild = asked["adapter"], asked.get("lokr_rebuild", False)
    ignored = (
        {"dropout" if rebuild else "rank_dropout"} if adapter == "lokr" else {"dropout"} if adapter == "lora" else set()
    )
    for key, what in (
        ("dropout", "its masks and the tensors after them are not planned for"),
        ("rank_dropout", "its masks are not planned for"),
        ("module_dropout", "steps are planned with every adapter running"),
    ):
        if (value := _number(content, key, 0.0)) and key not in ignored:
            notes.append(f"{key} {value:g}: {what}")


def _names(preset: Mapping[str, Any], key: str) -> list[str]:
    value = preset.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
        raise WorkloadError(f"apply_preset: {key} must be a list of names")
    return value


def _map(preset: Mapping[str, Any], key: str) -> dict[str, Mapping[str, Any]]:
    value = preset.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(v, dict) for v in value.values()):
        raise WorkloadError(f"apply_preset: {key} must map names to objects")
    return value


def _plain(key: str, names: list[str], notes: list[str]) -> Iterator[str]:
    """Those of a list of patterns on names that are plain names."""
    plain = [n for n in names if _NAME.fullmatch(n)]
    if plain:
        notes.append(
            f"{key}: LyCORIS looks for {', '.join(plain)} at the start of a module's name; planned for names that end so"
        )
    if patterns := [n for n in names if n not in plain]:
        notes.append(f"{key}: patterns are not planned for: {', '.join(patterns)}")
    return iter(plain)


def _targets(content: Mapping[str, Any], adapter: str, asked: dict[str, Any], notes: list[str]) -> None:
    """Where adapters go, and with which factors."""
    preset = content.get("apply_preset") or {}
    if not isinstance(preset, Mapping):
        raise WorkloadError("apply_preset must be an object")
    if unknown := [str(k) for k in preset if k not in (*_PRESET_READ, *_PRESET_FREE)]:
        raise WorkloadError(f"apply_preset: LyCORIS does not know {', '.join(unknown)}")
    if preset.get("exclude_name"):
        notes.append("exclude_name is not planned for: what it leaves out gets an adapter here")
    by_class, by_name = _map(preset, "module_algo_map"), _map(preset, "name_algo_map")
    classes = [*_names(preset, "target_module"), *by_class]
    if preset.get("target_module") is None:
        notes.append(
            "no target_module in it: LyCORIS then takes every linear, and every convolution, which is not planned for"
        )
        classes.append("Linear")
    entries: dict[str, Mapping[str, Any]] = dict(by_class)
    names = list(_plain("target_name", _names(preset, "target_name"), notes))
    for name in _plain("name_algo_map", list(by_name), notes):
        names.append(name)
        entries[name] = by_name[name]
    for name, entry in entries.items() if adapter in ALGORITHMS.values() else ():
        algorithm = entry.get("algo", adapter)
        if ALGORITHMS.get(str(algorithm).lower()) != adapter:
            notes.append(f"{name} gets {algorithm}, which is not planned for beside {adapter}: planned as {adapter}")
        if other := [k for k in entry if k not in _ALIKE and not (k == "dim" and entry[k] == asked.get("rank"))]:
            notes.append(f"{name}: not planned for one class or name alone: {', '.join(map(str, other))}")
    if adapter == "lora":
        notes.append(
            "LyCORIS' LoRA is planned as PEFT's, in the linears that the trainer's usual targets name; --lora-targets names others"
        )
        return
    asked["lora_targets"] = list(dict.fromkeys((*classes, *names)))
    if adapter == "lokr":
        factor = _whole(content, "factor") if content.get("factor") is not None else -1
        own = {n: _whole(e, "factor") if e.get("factor") is not None else factor for n, e in entries.items()}
        differ = any(n != factor for n in own.values())
        asked["lokr_factor"] = ",".join([str(factor), *(f"{n}={f}" for n, f in own.items())]) if differ else factor
