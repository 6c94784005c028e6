"""Given weights: a diffusers folder or a Hugging Face id. Reads config JSON and safetensors; runs no code from either."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from probes.build import model_class, quiet
from probes.hub import COMPONENTS
from probes.infer import accepted
from probes.workload import Workload, WorkloadError

SUBFOLDERS = COMPONENTS


def _config_file(source: str) -> Path:
    """The model's `config.json`, local or downloaded (only that file).

    Raises:
        WorkloadError: no such folder or repository, or no config in it.
    """
    root = Path(source).expanduser()
    if root.exists():
        for folder in (root, *(root / s for s in SUBFOLDERS)):
            if (found := folder / "config.json").is_file():
                return found
        raise WorkloadError(f"--pretrained {source}: no config.json in it, nor in its {' or '.join(SUBFOLDERS)} folder")
    if source.startswith((".", "/", "~")):
        raise WorkloadError(f"--pretrained {source}: no such folder")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    for name in (*(f"{s}/config.json" for s in SUBFOLDERS), "config.json"):
        try:
            return Path(hf_hub_download(source, name))
        except (LocalEntryNotFoundError, HFValidationError) as error:
            reason = str(error).splitlines()[0]
            raise WorkloadError(
                f"--pretrained {source}: not a local folder, and the hub cannot be reached ({reason})"
            ) from None
        except HfHubHTTPError:
            continue
        except OSError as error:
            raise WorkloadError(f"--pretrained {source}: {str(error).splitlines()[0]}") from None
    raise WorkloadError(f"--pretrained {source}: the repository has no diffusers model config")


def pretrained_config(source: str, workload: Workload) -> str:
    """Constructor arguments of the given model, as JSON text for `Workload.config_json`.

    Raises:
        WorkloadError: not readable, or a model of another class than the plan's.
    """
    path = _config_file(source)
    try:
        config: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise WorkloadError(f"--pretrained {source}: {path.name} is not readable JSON ({error})") from None
    if not isinstance(config, dict):
        raise WorkloadError(f"--pretrained {source}: {path.name} is not a JSON object")
    cls = model_class(workload.family.model_class)
    wanted = cls.__name__
    if not hasattr(cls, "from_pretrained"):
        raise WorkloadError(
            f"--pretrained {source}: {workload.model} is no model class of diffusers; its weights cannot be loaded"
        )
    if config.get("_class_name", wanted) != wanted:
        raise WorkloadError(
            f"--pretrained {source}: it holds a {config['_class_name']}, {workload.model} is a {wanted}"
        )
    taken, _ = accepted(cls, {k: v for k, v in sorted(config.items()) if not k.startswith("_")})
    return json.dumps(taken)


def load_state(source: str, workload: Workload) -> dict[str, torch.Tensor]:
    """The given weights, float32 on the CPU. safetensors only.

    Raises:
        WorkloadError: they cannot be loaded.
    """
    state: dict[str, torch.Tensor] = load_model(source, workload, torch.float32)[0].state_dict()
    return state


def load_model(source: str, workload: Workload, dtype: torch.dtype) -> tuple[Any, tuple[str, ...]]:
    """The given model with its weights, on the CPU, and what is to be said about them. safetensors only.

    Args:
        dtype: of the weights; what the model library keeps in float32 stays so.

    Raises:
        WorkloadError: they cannot be loaded, or do not fill the model.
    """
    folder = _config_file(source).parent
    cls: Any = model_class(workload.family.model_class)
    options = {"use_safetensors": True, "torch_dtype": dtype, "output_loading_info": True}
    try:
        with quiet():
            if Path(source).expanduser().exists():
                model, info = cls.from_pretrained(str(folder), local_files_only=True, **options)
            else:
                subfolder = folder.name if folder.name in SUBFOLDERS else None
                model, info = cls.from_pretrained(source, subfolder=subfolder, **options)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise WorkloadError(
            f"--pretrained {source}: {(str(error).splitlines() or [type(error).__name__])[0]}"
        ) from None
    if missing := sorted(info["missing_keys"]):
        raise WorkloadError(
            f"--pretrained {source}: {len(missing)} tensors of the model are missing, first {missing[0]}"
        )
    notes = []
    if unexpected := sorted(info["unexpected_keys"]):
        notes.append(f"{source} has {len(unexpected)} tensors that the model does not use, first {unexpected[0]}")
    return model, tuple(notes)
