"""What a run leaves: the adapter or the model, as diffusers loads it. And how an adapter starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from advisor.training.checkpoints import write_safetensors
from probes import store
from probes.build import Job
from probes.loha import LohaLinear
from probes.lokr import LokrLinear
from probes.workload import FUSED, LYCORIS, Workload

ADAPTER_FILE = "pytorch_lora_weights.safetensors"
MODEL_FILE = "diffusion_pytorch_model.safetensors"
METADATA_KEY = "lora_adapter_metadata"
"""Where diffusers looks for the adapter's configuration."""


def start_adapter(model: nn.Module) -> None:
    """Gives every adapter its usual start, at which it changes nothing: LoRA's A random and B zero, LoKr's second factor zero, one
    factor of LoHa's second product zero, DoRA's lengths those of the weights."""
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if isinstance(module, (LokrLinear, LohaLinear)):
            module.reset()
        elif isinstance(module, LoraLayer):
            for name in module.lora_A:
                module.reset_lora_parameters(name, True)
            for dora in module.lora_magnitude_vector.values():
                with torch.no_grad():
                    weight = module.get_base_layer().weight
                    dora.weight.copy_(
                        torch.linalg.vector_norm(weight.flatten(1), dim=1, dtype=torch.float32).view_as(dora.weight)
                    )


def prefix_of(model: nn.Module) -> str:
    """What diffusers' pipelines call the model: ``unet`` or ``transformer``."""
    return "unet" if "UNet" in type(model).__name__ else "transformer"


def save(job: Job, workload: Workload, folder: Path) -> Path:
    """Writes what was trained into `folder`, whole or not at all; returns the file's path.

    A LoRA is `pytorch_lora_weights.safetensors` with PEFT's names and, in the metadata, its configuration (rank, alpha, targets) as
    diffusers reads it. A LoKr adapter is the same file with `lokr_w1`, `lokr_w2` (or `lokr_w2_a`, `lokr_w2_b`), a LoHa with
    `hada_w1_a` to `hada_w2_b` and `alpha`, as LyCORIS names them. A whole model is `diffusion_pytorch_model.safetensors` with `config.json`.

    Raises:
        OSError: the folder cannot be written.
    """
    if workload.adapter == "full":
        return _save_model(job.model, folder)
    prefix = prefix_of(job.model)
    metadata = {"format": "pt"}
    if workload.adapter in LYCORIS:
        state = {n: p for n, p in job.model.named_parameters() if ".lokr_" in n or ".hada_" in n}
        for name, module in job.model.named_modules():
            if isinstance(module, LokrLinear) and module.trained_scalar:
                state[f"{name}.lokr_w1"] = module.lokr_w1 * module.scalar
        alphas = {f"{n.removesuffix('hada_w1_a')}alpha" for n in state if n.endswith(".hada_w1_a")}
        state |= {n: torch.tensor(float(workload.alpha)) for n in alphas}
    else:
        from peft import get_peft_model_state_dict

        state = get_peft_model_state_dict(job.model)
        configuration = {f"{prefix}.{k}": v for k, v in _configuration(job.model).items()}
        metadata[METADATA_KEY] = json.dumps(configuration, indent=2, sort_keys=True)
    path = folder / ADAPTER_FILE
    write_safetensors(path, {f"{prefix}.{k}": _stored(v) for k, v in state.items()}, metadata)
    return path


def _configuration(model: nn.Module) -> dict[str, Any]:
    """The adapter's PEFT configuration as plain JSON values."""
    configs: Any = model.peft_config
    values = configs["default"].to_dict()
    return {k: sorted(v) if isinstance(v, (set, frozenset)) else v for k, v in values.items()}


def _save_model(model: Any, folder: Path) -> Path:
    path = folder / MODEL_FILE
    write_safetensors(path, _unfused({k: _stored(v) for k, v in model.state_dict().items()}), {"format": "pt"})
    store.atomic_write(folder / "config.json", model.to_json_string().encode())
    return path


def _unfused(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fused projections as the separate ones that diffusers loads."""
    out = dict(state)
    for name, tensor in state.items():
        owner, _, rest = name.rpartition(".")
        prefix, _, fused = owner.rpartition(".")
        parts = [f"{prefix}.{part}.{rest}" for part in FUSED.get(fused, ())]
        if parts and all(part in state for part in parts):
            del out[name]
            sizes = [state[part].shape[0] for part in parts]
            out |= {part: t.contiguous() for part, t in zip(parts, tensor.split(sizes), strict=True)}
    return out


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
