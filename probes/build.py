"""Builds what is trained: the real model class, its adapter, one batch of inputs. On meta, as fake tensors, or for real."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import json
import logging
import math
import sys
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from probes import fused, loha, lokr, outside, stand_ins
from probes.catalogue import InputSpec
from probes.expressions import evaluate, evaluate_all
from probes.workload import ADAPTER_NAMES, LOKR_TARGETS, LYCORIS, Workload, WorkloadError

MOST_MODULES = 50_000
"""No model has more; those of the catalogue have up to 4000."""
BUILD_SECONDS = 60.0
MOST_ELEMENTS = 2**33
"""No input of a model is larger."""


class BuildError(RuntimeError):
    """The model could not be built as asked."""


@dataclass
class Job:
    """A model in training mode with one batch; the same object serves a trace and a real run."""

    model: nn.Module
    inputs: dict[str, Any]
    target: torch.Tensor
    output_stack: bool
    autocast: torch.dtype | None
    """None: no autocast."""

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences the import-time chatter of the model libraries."""
    names = ("transformers", "diffusers", "peft")
    levels = {n: logging.getLogger(n).level for n in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in names:
            logging.getLogger(n).setLevel(logging.ERROR)
        try:
            yield
        finally:
            for n, level in levels.items():
                logging.getLogger(n).setLevel(level)


def model_class(reference: str) -> type[nn.Module]:
    """``module:Class`` as a class.

    Raises:
        BuildError: no such module or class; its module fails on import; or it is neither of diffusers nor of the catalogue and
            the user has not allowed it (`outside.allow`).
    """
    if not outside.may_import(reference):
        raise BuildError(f"{reference}: importing it runs its code, so it has to be named with --model-class")
    module_name, _, class_name = reference.partition(":")
    with quiet(), contextlib.redirect_stdout(sys.stderr):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise BuildError(f"{reference}: {error}") from None
        except (Exception, SystemExit) as error:  # noqa: BLE001  a user's module may fail in any way
            raise BuildError(f"{reference}: importing {module_name} failed ({type(error).__name__}: {error})") from None
        try:
            found = getattr(module, class_name)
        except (AttributeError, ImportError, RuntimeError) as error:
            near = difflib.get_close_matches(class_name, [n for n in dir(module) if not n.startswith("_")], n=1)
            raise BuildError(f"{reference}: {error}{f' (did you mean {near[0]}?)' if near else ''}") from None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise BuildError(f"{reference} is not a torch module class (torch.nn.Module)")
    stand_ins.install(found)
    return found


def config_of(workload: Workload) -> dict[str, Any]:
    """Constructor arguments of the workload's model."""
    if workload.config_json:
        return dict(json.loads(workload.config_json))
    family = workload.family
    config = dict(family.variant(workload.variant).config)
    if workload.reduced:
        config |= family.reduced.config
    return config


def build_limited(cls: type[nn.Module], config: Mapping[str, Any]) -> nn.Module:
    """A model from a config that may say anything, on the current default device.

    Raises:
        BuildError: the class does not take the config, or that asks for absurdly many modules.
    """
    count, end = 0, time.monotonic() + BUILD_SECONDS

    def registered(*_: Any) -> None:
        nonlocal count
        count += 1
        if count > MOST_MODULES or (count % 256 == 0 and time.monotonic() > end):
            raise BuildError(
                f"the config asks for more than {min(count, MOST_MODULES)} modules; that is no model to train"
            )

    hook = register_module_module_registration_hook(registered)
    try:
        with quiet(), contextlib.redirect_stdout(sys.stderr):
            return cls(**config)
    except BuildError:
        raise
    except MemoryError:
        raise BuildError("the config asks for more memory than this machine has") from None
    except Exception as error:  # noqa: BLE001  a class may refuse its config in any way
        text = " ".join(str(error).split())[:300]
        raise BuildError(f"{cls.__name__} does not take this config ({type(error).__name__}: {text})") from None
    finally:
        hook.remove()


def build_base(workload: Workload, state: Mapping[str, torch.Tensor] | None = None) -> nn.Module:
    """The model without adapter, float32, on the current default device (use ``torch.device("meta")`` for no memory); its
    projections fused if the workload says so.

    Args:
        state: weights to load.
    """
    cls, config = model_class(workload.family.model_class), config_of(workload)
    if workload.sheet_json or workload.config_json:
        model = build_limited(cls, config)
    else:
        with quiet():
            model = cls(**config)
    if state is not None:
        model.load_state_dict(state)
    if workload.fuse_qkv:
        fused.fuse(model)
    return model


def symbols(workload: Workload, model: nn.Module) -> dict[str, int]:
    """What the shape expressions of a fact sheet may name."""
    settings = getattr(model, "config", None)
    known = dict(settings) if isinstance(settings, Mapping) else config_of(workload)
    names: dict[str, int] = {k: v for k, v in known.items() if isinstance(v, int)}
    if "out_channels" not in names and "in_channels" in names:
        names["out_channels"] = names["in_channels"]
    names |= workload.family.symbols
    if workload.reduced:
        names |= workload.family.reduced.symbols
    return names | {
        "B": workload.samples,
        "H": workload.height,
        "W": workload.width,
        "F": workload.frames,
        "T": workload.text_tokens,
        "S": workload.seconds,
        "R": workload.references,
    }


def lokr_targets(model: nn.Module, workload: Workload) -> tuple[str, ...]:
    """What gets a LoKr or LoHa: as asked; where the default classes are not in the model, its attention and feed-forward modules."""
    if workload.lora_targets != LOKR_TARGETS or any(type(m).__name__ in LOKR_TARGETS for m in model.modules()):
        return workload.lora_targets
    regions = workload.family.regions.values()
    names = [n for r in regions for n in (*r.attention, *(part for side in r.feed_forward for part in side))]
    return tuple(dict.fromkeys(names)) or workload.lora_targets


def _inject_lycoris(model: nn.Module, workload: Workload) -> int:
    default, factors = workload.lokr_factors
    nearest = lokr.linears(model, tuple(factors))

    def wrap(name: str, linear: nn.Linear) -> nn.Module:
        if workload.adapter == "loha":
            return loha.LohaLinear(linear, workload.rank, workload.alpha / workload.rank)
        factor = factors[nearest[name]] if name in nearest else default
        return lokr.LokrLinear(
            linear,
            workload.rank,
            factor,
            workload.lokr_full_matrix,
            trained_scalar=workload.lokr_scalar,
            rebuild=workload.lokr_rebuild,
        )

    return lokr.inject(model, lokr_targets(model, workload), wrap)


def unmatched_names(model: nn.Module, workload: Workload) -> list[str]:
    """A sentence for each module class or name that does nothing: a target of a LoKr or LoHa without a linear, one of ``--lokr-factor`` that
    is nearest around no linear with a LoKr."""
    _, factors = workload.lokr_factors if workload.adapter == "lokr" else (0, {})
    nearest = lokr.linears(model, tuple(factors))
    targets = lokr_targets(model, workload)
    used = {nearest[name] for name in lokr.linears(model, targets) if name in nearest}
    kinds = sorted({type(m).__name__ for m in model.modules()})

    def near(name: str) -> str:
        found = [k for k in kinds if k.endswith(name)]
        return f" (but class {' and '.join(found)})" if found else ""

    return [
        f"{name} gets no {ADAPTER_NAMES[workload.adapter]}: {workload.model} has no linear inside a module of that class or name{near(name)}"
        for name in targets
        if not lokr.linears(model, (name,))
    ] + [
        f"--lokr-factor {name}={factor} has no effect: {name} decides for none of the linears that get a LoKr (in {', '.join(targets)})"
        for name, factor in factors.items()
        if name not in used
    ]


def inject_adapter(model: nn.Module, workload: Workload, *, random_b: bool = False) -> None:
    """Freezes the base and adds the adapter (or, for ``full``, makes every parameter trainable).

    Args:
        random_b: start B from random values instead of zeros, so that every gradient of a test run is non-zero.

    Raises:
        WorkloadError: no linear of the model has any of the target names.
    """
    if workload.adapter == "full":
        model.requires_grad_(True)
        return
    model.requires_grad_(False)
    if workload.adapter in LYCORIS:
        if not _inject_lycoris(model, workload):
            classes = sorted(
                {type(m).__name__ for m in model.modules() if any(isinstance(c, nn.Linear) for c in m.children())}
            )
            raise WorkloadError(
                f"--lora-targets {','.join(workload.lora_targets)}: {workload.model} has no module of that class or name; "
                f"classes with linears: {', '.join(classes)}"
            )
        if random_b:
            with torch.no_grad():
                for name, p in model.named_parameters():
                    if ("lokr_w2" in name or "hada_w2" in name) and not p.any():
                        p.normal_(std=0.02)
                    elif name.endswith(".scalar"):
                        p.fill_(1)
        return
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=workload.rank,
        lora_alpha=workload.alpha,
        lora_dropout=workload.lora_dropout,
        target_modules=list(workload.lora_targets),
        init_lora_weights=not random_b,
        use_dora=workload.dora,
        use_rslora=workload.rslora,
    )
    on_meta = next(model.parameters()).device.type == "meta"
    with quiet():
        try:
            inject_adapter_in_model(config, model, low_cpu_mem_usage=on_meta)
        except ValueError as error:
            if "not found in the base model" in str(error) or "No modules were targeted" in str(error):
                raise WorkloadError(
                    f"--lora-targets {','.join(workload.lora_targets)}: {workload.model} has no module of that name"
                ) from None
            raise


def autocast_dtype(workload: Workload) -> torch.dtype | None:
    """What the forward runs in, and the base is kept in; None: float32 throughout."""
    return {"fp32": None, "fp16": torch.float16}.get(workload.precision, torch.bfloat16)


def is_kept_float32(model: nn.Module, parameter_name: str) -> bool:
    """Whether the model library keeps this parameter in float32 when it loads a 16-bit model."""
    patterns = getattr(model, "_keep_in_fp32_modules", None) or ()
    return any(p in parameter_name.split(".") for p in patterns)


def parameter_dtype(
    model: nn.Module, name: str, tensor: torch.Tensor, workload: Workload, trained: torch.dtype
) -> torch.dtype:
    """Dtype in which a parameter or buffer stays on the device."""
    half = autocast_dtype(workload)
    if not tensor.is_floating_point() or half is None:
        return tensor.dtype
    trains = isinstance(tensor, nn.Parameter) and tensor.requires_grad
    if trains and (workload.adapter != "full" or workload.master_weights):
        return trained
    return torch.float32 if is_kept_float32(model, name) else half


_FILLS = ("normal", "uniform", "timestep", "ones", "zeros", "arange", "range", "runs", "grid", "axes")


def _tensor(spec: InputSpec, names: Mapping[str, int], compute: torch.dtype, generator: Any) -> Any:
    shape = tuple(evaluate(e, names) for e in spec.shape)
    if min(shape, default=0) < 0 or math.prod(shape) > MOST_ELEMENTS:
        raise BuildError(f"input {spec.name}: {list(spec.shape)} is {list(shape)}, which no tensor can be here")
    dtype = compute if spec.dtype == "compute" else getattr(torch, spec.dtype)
    match spec.fill:
        case "range":
            start = evaluate(spec.start, names)
            return torch.arange(start, start + torch.Size(shape).numel()).reshape(shape).to(dtype)
        case "runs":
            parts = [torch.full((evaluate(n, names),), evaluate(v, names)) for n, v in spec.runs]
            return torch.cat(parts).expand(shape).to(dtype).contiguous()
        case "axes":
            return [torch.arange(evaluate(n, names)).to(dtype) for n in spec.grid]
        case "grid":
            axes = [torch.arange(evaluate(n, names)) for n in spec.grid]
            positions = torch.stack([axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij")], -1)
            return positions.expand(shape).to(dtype).contiguous()
    return _fill(shape, dtype, spec.fill, generator)


def _fill(shape: tuple[int, ...], dtype: torch.dtype, fill: str, generator: torch.Generator | None) -> torch.Tensor:
    match fill:
        case "normal":
            return torch.randn(shape, generator=generator).to(dtype)
        case "uniform":
            return torch.rand(shape, generator=generator).to(dtype)
        case "timestep":
            return torch.randint(0, 1000, shape, generator=generator).to(dtype)
        case "ones":
            return torch.ones(shape, dtype=dtype)
        case "zeros":
            return torch.zeros(shape, dtype=dtype)
        case "arange":
            return torch.arange(torch.Size(shape).numel()).remainder(64).reshape(shape).to(dtype)
    raise BuildError(f"unknown fill {fill!r}; valid: {', '.join(_FILLS)}")


def make_inputs(
    workload: Workload, model: nn.Module, *, seed: int | None = None, known_values: bool = False
) -> tuple[dict[str, Any], torch.Tensor]:
    """One batch for the model's forward and the target of its loss, as float/bf16 CPU tensors (fake under a fake mode).

    Args:
        known_values: whole numbers, booleans and what the sheet marks so are real CPU tensors whatever the default device.
    """
    family = workload.family
    names = symbols(workload, model)
    compute = autocast_dtype(workload) or torch.float32
    generator = torch.Generator().manual_seed(seed) if seed is not None else None
    skip = family.variant(workload.variant).skip_inputs
    inputs: dict[str, Any] = {}
    for spec in family.inputs:
        if spec.name in skip or not evaluate(spec.when, names):
            continue
        whole = spec.dtype != "compute" and not getattr(torch, spec.dtype).is_floating_point
        host = torch.device("cpu") if known_values and (whole or spec.needs_values) else contextlib.nullcontext()

        def one(spec: InputSpec = spec) -> Any:
            return (
                evaluate_all(spec.value, names) if spec.value is not None else _tensor(spec, names, compute, generator)
            )

        with host:
            value: Any = [one() for _ in range(evaluate(spec.list_of, names))] if spec.list_of else one()
        outer, dot, inner = spec.name.partition(".")
        if dot:
            inputs.setdefault(outer, {})[inner] = value
        else:
            inputs[outer] = value
    target_shape = tuple(evaluate(e, names) for e in family.output_shape)
    if family.objective == "tokens":
        return inputs, _fill(target_shape, torch.int64, "arange", generator)
    return inputs, _fill(target_shape, compute, "normal", generator)


def _check_host_memory(workload: Workload) -> None:
    import psutil

    with torch.device("meta"):
        needed = 4 * sum(p.numel() for p in build_base(workload).parameters())
    free = psutil.virtual_memory().available
    if needed > free:
        raise WorkloadError(
            f"the float32 weights of {workload.model} need {needed / 2**30:.1f} GiB and this machine has {free / 2**30:.1f} GiB "
            "free; a smaller [reduced] config in --model-config makes the copy that runs on a CPU smaller"
        )


def real_job(
    workload: Workload, *, seed: int = 0, device: str = "cpu", state: Mapping[str, torch.Tensor] | None = None
) -> Job:
    """A real, initialised job. Deterministic in `seed`.

    Args:
        state: weights to load into the base before the adapter is added (else random).

    Raises:
        WorkloadError: a model outside the catalogue whose float32 weights do not fit into this machine's memory.
    """
    if workload.sheet_json:
        _check_host_memory(workload)
    torch.manual_seed(seed)
    model = build_base(workload, state)
    if state is None:
        _randomise_zeros(model)
    inject_adapter(model, workload, random_b=True)
    if workload.precision != "fp32":
        for name, p in list(model.named_parameters()) + list(model.named_buffers()):
            p.data = p.data.to(parameter_dtype(model, name, p, workload, torch.float32))
    model.train().to(device)
    inputs, target = make_inputs(workload, model, seed=seed)
    autocast = autocast_dtype(workload)
    return Job(
        model,
        {k: _move(v, device) for k, v in inputs.items()},
        target.to(device),
        workload.family.output_stack,
        autocast,
    )


def device_job(
    workload: Workload,
    device: str,
    *,
    seed: int = 0,
    state: Mapping[str, torch.Tensor] | None = None,
    host_blocks: Collection[str] = (),
) -> Job:
    """A job built directly on a device in its training dtypes, without a float32 copy on the host.

    Args:
        state: weights of the base; None: small random values, which cost the same memory and time.
        host_blocks: names of blocks whose frozen weights are left in host memory (`advisor.runtime.apply` with ``swap_blocks``).
    """
    from accelerate import init_empty_weights

    torch.manual_seed(seed)
    with init_empty_weights(include_buffers=False):  # buffers and other tables are computed, not loaded
        model = build_base(workload)
    inject_adapter(model, workload)
    with torch.no_grad():
        for prefix, module in model.named_modules():
            for table in (module._parameters, module._buffers):
                for key, t in list(table.items()):
                    if t is None:
                        continue
                    name = f"{prefix}.{key}" if prefix else key
                    dtype = parameter_dtype(model, name, t, workload, torch.float32)
                    place = "cpu" if _waits(name, t, host_blocks) else device
                    data = torch.empty(t.shape, dtype=dtype, device=place)
                    given = _given(name.replace(".base_layer", ""), state) if state is not None else None
                    if given is not None:
                        data.copy_(given)
                    elif not t.is_meta:
                        data.copy_(t)
                    elif data.is_floating_point() and isinstance(t, nn.Parameter):
                        data.normal_(std=0.02)
                    else:
                        data.zero_()
                    table[key] = (
                        nn.Parameter(data, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else data
                    )
    model.train()
    inputs, target = make_inputs(workload, model, seed=seed)
    autocast = autocast_dtype(workload)
    moved = {k: _move(v, device) for k, v in inputs.items()}
    return Job(model, moved, target.to(device), workload.family.output_stack, autocast)


def _given(name: str, state: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    found = state.get(name)
    return fused.given_weight(name, state) if found is None else found


def _waits(name: str, t: torch.Tensor, host_blocks: Collection[str]) -> bool:
    """Whether a tensor is a frozen weight of one of some blocks."""
    frozen = isinstance(t, nn.Parameter) and not t.requires_grad
    return frozen and any(name.startswith(block + ".") for block in host_blocks)


def given_job(
    workload: Workload, model: nn.Module, device: str, *, seed: int = 0, host_blocks: Collection[str] = ()
) -> Job:
    """A job on a model that is there already, with its weights: adapter added, in its training dtypes, on the device.

    Args:
        host_blocks: as in `device_job`.

    Raises:
        WorkloadError: the adapter's targets are not in the model.
    """
    torch.manual_seed(seed)
    if workload.fuse_qkv:
        fused.fuse(model)
    inject_adapter(model, workload)
    for name, p in list(model.named_parameters()) + list(model.named_buffers()):
        dtype = parameter_dtype(model, name, p, workload, torch.float32)
        p.data = p.data.to("cpu" if _waits(name, p, host_blocks) else device, dtype)
    model.train()
    inputs, target = make_inputs(workload, model, seed=seed)
    autocast = autocast_dtype(workload)
    moved = {k: _move(v, device) for k, v in inputs.items()}
    return Job(model, moved, target.to(device), workload.family.output_stack, autocast)


def _move(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, list):
        return [_move(v, device) for v in value]
    if isinstance(value, dict):
        return {k: _move(v, device) for k, v in value.items()}
    return value


def _randomise_zeros(model: nn.Module) -> None:
    """Random values where a class starts from zeros, so that no gradient is zero by construction."""
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point() and p.numel() > 1 and not p.any():
                p.normal_(std=0.02)
