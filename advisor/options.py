"""The command's options as data: names, help texts, defaults and units; and the one-line form of every error.

All values are taken as text and converted here, so that every message names the option, the value and what is valid.
Imports neither torch nor numpy: `advise --help` reads this module.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from probes import catalogue
from probes.workload import (
    ADAPTERS,
    ATTENTION,
    EXECUTORS,
    PRECISIONS,
    REQUEST_KEYS,
    Workload,
    WorkloadError,
    from_request,
)

if TYPE_CHECKING:
    from estimators.devices import Device

OBJECTIVES = ("ladder", "fastest", "smallest", "optimum")
MAX_GIB = 65536.0

NUMBERS = (
    "frames", "seconds", "references", "batch", "caption_tokens", "rank", "alpha", "lora_dropout", "lokr_factor", "accumulate",
    "aspect_buckets", "bucket_step", "resident_gib", "validation_frames", "validation_samples", "caching_batch", "caching_text_batch",
)  # fmt: skip
"""The request's keys whose values are numbers."""

MODEL, TRAINING, EXECUTION, DEVICE, OUTPUT = "Model", "Training", "Execution", "Device", "Output"


def _option(*names: str, panel: str, metavar: str | None, text: str) -> Any:
    return typer.Option(*names, rich_help_panel=panel, metavar=metavar, help=text, show_default=False)


Model = Annotated[
    str | None,
    _option(
        "--model",
        panel=MODEL,
        metavar="NAME",
        text="Model family, as `advise models` lists it; or a model outside the catalogue: ORG/NAME (a Hugging Face id, only its "
        "config is downloaded) or ./FOLDER with a diffusers config.json. Required, unless --model-class is given.",
    ),
]
ModelClass = Annotated[
    str | None,
    _option(
        "--model-class",
        panel=MODEL,
        metavar="CLASS",
        text="A model of your own, as package.module:Class, instead of --model. Importing the module runs its code: name only code "
        "that you trust. Needs --model-config.",
    ),
]
ModelConfig = Annotated[
    str | None,
    _option(
        "--model-config",
        panel=MODEL,
        metavar="FILE",
        text="For --model-class: a TOML or JSON file with its constructor arguments and, where they should not be guessed, its "
        "inputs (docs/adding_a_model.md).",
    ),
]
Revision = Annotated[
    str | None,
    _option(
        "--revision",
        panel=MODEL,
        metavar="NAME",
        text="Branch, tag or commit of a Hugging Face id. Default: main.",
    ),
]
PlanModelClass = Annotated[
    str | None,
    _option(
        "--model-class",
        panel=MODEL,
        metavar="CLASS",
        text="For a plan of a class of your own: the class that it names, package.module:Class. Allows importing it, which runs "
        "its code; without this option no plan imports code.",
    ),
]
VariantName = Annotated[
    str | None,
    _option(
        "--variant",
        panel=MODEL,
        metavar="NAME",
        text="Variant of the family; for ORG/NAME or ./FOLDER the one whose text length, inputs and default size are used. "
        "Default: the family's first choice, or the one that the config is nearest to.",
    ),
]
Resolution = Annotated[
    str | None,
    _option(
        "--resolution",
        panel=MODEL,
        metavar="PIXELS",
        text="Training size in pixels: 1024, or 832x480 (width x height). Default: the model's own.",
    ),
]
Buckets = Annotated[
    list[str] | None,
    _option(
        "--bucket",
        panel=MODEL,
        metavar="PIXELS",
        text="An aspect bucket, 832x1216 (video: or 832x480x81 with frames); give it once for each. The plan is for the worst.",
    ),
]
AspectBuckets = Annotated[
    str | None,
    _option(
        "--aspect-buckets",
        panel=MODEL,
        metavar="EDGE",
        text="The usual buckets of about EDGE x EDGE pixels, sides from half to twice EDGE. The plan is for the worst.",
    ),
]
BucketStep = Annotated[
    str | None,
    _option(
        "--bucket-step",
        panel=MODEL,
        metavar="PIXELS",
        text="Sides of --aspect-buckets are multiples of this. Default: 64.",
    ),
]
Frames = Annotated[
    str | None,
    _option(
        "--frames", panel=MODEL, metavar="N", text="Video frames in a sample. Default: the model's own; 1 for images."
    ),
]
Batch = Annotated[
    str | None, _option("--batch", panel=MODEL, metavar="N", text="Samples in one step on this GPU. Default: 1.")
]
CfgBatch = Annotated[
    bool,
    _option(
        "--cfg-batch",
        panel=MODEL,
        metavar=None,
        text="Each step trains on a second sample beside each one (classifier-free guidance: the unconditional one): twice the "
        "batch goes through the model, with gradients. Default: off.",
    ),
]
Seconds = Annotated[
    str | None,
    _option(
        "--seconds",
        panel=MODEL,
        metavar="N",
        text="Length of a clip in seconds, for audio models. Default: the model's own.",
    ),
]
References = Annotated[
    str | None,
    _option(
        "--references",
        panel=MODEL,
        metavar="N",
        text="Reference images a sample, for edit models. Default: the model's own.",
    ),
]
CaptionTokens = Annotated[
    str | None,
    _option(
        "--caption-tokens",
        panel=MODEL,
        metavar="N",
        text="Length of the longest caption in tokens. Default: the model's maximum.",
    ),
]
TextPadding = Annotated[
    str | None,
    _option(
        "--text-padding",
        panel=MODEL,
        metavar="KIND",
        text="Captions are padded to the model's maximum (max_length) or keep the longest one's length (longest). Default: auto, as "
        "the model's trainer does.",
    ),
]
Adapter = Annotated[
    str | None,
    _option(
        "--adapter", panel=TRAINING, metavar="KIND", text=f"What is trained: {', '.join(ADAPTERS)}. Default: lora."
    ),
]
Rank = Annotated[str | None, _option("--rank", panel=TRAINING, metavar="N", text="LoRA rank. Default: 16.")]
Alpha = Annotated[str | None, _option("--alpha", panel=TRAINING, metavar="X", text="LoRA alpha. Default: the rank.")]
LoraTargets = Annotated[
    str | None,
    _option(
        "--lora-targets",
        panel=TRAINING,
        metavar="A,B",
        text="Names of the linears that get a LoRA, comma-separated. Default: the trainer's, see `advise models NAME`.",
    ),
]
LoraDropout = Annotated[
    str | None,
    _option("--lora-dropout", panel=TRAINING, metavar="P", text="LoRA dropout probability, 0 to 0.999. Default: 0.1."),
]
Dora = Annotated[
    bool,
    _option(
        "--dora",
        panel=TRAINING,
        metavar=None,
        text="LoRA with a trained length for each row of a weight (DoRA); only with --adapter lora. Default: off.",
    ),
]
RsLora = Annotated[
    bool,
    _option(
        "--rslora",
        panel=TRAINING,
        metavar=None,
        text="LoRA scaled by alpha / sqrt(rank); only with --adapter lora; costs nothing. Default: off.",
    ),
]
Accumulate = Annotated[
    str | None,
    _option(
        "--accumulate",
        panel=TRAINING,
        metavar="N",
        text="Batches whose gradients are added up for one step of the optimizer. From 2 on the gradients are there all the time. "
        "Default: 1.",
    ),
]
Ema = Annotated[
    bool,
    _option(
        "--ema",
        panel=TRAINING,
        metavar=None,
        text="Keep a running average (EMA) of what is trained on the card. Default: off.",
    ),
]
MasterWeights = Annotated[
    bool,
    _option(
        "--master-weights",
        panel=TRAINING,
        metavar=None,
        text="--adapter full trains float32 weights under autocast (mixed precision) instead of weights in --precision. Default: off.",
    ),
]
LokrFactor = Annotated[
    str | None,
    _option(
        "--lokr-factor",
        panel=TRAINING,
        metavar="N",
        text="LoKr factor; only with --adapter lokr. 16, or 16,FeedForward=8 with others for module classes or ends of names (the "
        "innermost module that is named decides; without a number first, 16 is it). Default: 16.",
    ),
]
LokrFullMatrix = Annotated[
    bool,
    _option(
        "--lokr-full-matrix",
        panel=TRAINING,
        metavar=None,
        text="LoKr with full second factors; only with --adapter lokr. Default: off.",
    ),
]
LokrScalar = Annotated[
    bool,
    _option(
        "--lokr-scalar",
        panel=TRAINING,
        metavar=None,
        text="LoKr with a trained number that multiplies each update (LyCORIS' use_scalar), which keeps the update for backward; only "
        "with --adapter lokr. Default: off.",
    ),
]
LokrRebuild = Annotated[
    bool,
    _option(
        "--lokr-rebuild",
        panel=TRAINING,
        metavar=None,
        text="LoKr as LyCORIS runs it without bypass_mode: every update is built whole and kept for backward; only with --adapter "
        "lokr on a float base. Default: off.",
    ),
]
Precision = Annotated[
    str | None,
    _option(
        "--precision",
        panel=TRAINING,
        metavar="KIND",
        text=f"Of the base weights: {', '.join(PRECISIONS)}. Default: bf16.",
    ),
]
Optimizer = Annotated[
    str | None,
    _option(
        "--optimizer",
        panel=TRAINING,
        metavar="NAME",
        text="Optimizer, by the trainer's or its package's name: adamw_bf16, adamw, "
        "adamw8bit, optimi-lion, prodigy, came, adafactor, muon, soap, sgd, ... (docs/training_setups.md lists all). Default: adamw_bf16.",
    ),
]
Attention = Annotated[
    str | None,
    _option(
        "--attention", panel=EXECUTION, metavar="KIND", text=f"Attention kernel: {', '.join(ATTENTION)}. Default: auto."
    ),
]
FuseQkv = Annotated[
    bool, _option("--fuse-qkv", panel=EXECUTION, metavar=None, text="Fuse the q, k and v projections. Default: off.")
]
Compile = Annotated[
    str | None,
    _option(
        "--compile",
        panel=EXECUTION,
        metavar="KIND",
        text="torch.compile: none, or regional (every block on its own, Inductor; docs/schedules.md says what then works). Default: none.",
    ),
]
WeightsOffload = Annotated[
    str | None,
    _option(
        "--weights-offload",
        panel=EXECUTION,
        metavar="KIND",
        text="Keep base weights on the host: none, ramtorch (or ramtorch:PERCENT of the linears), or blocks:N (block swap of the last N blocks). Default: none.",
    ),
]
ExecutorName = Annotated[
    str | None,
    _option(
        "--executor", panel=EXECUTION, metavar="NAME", text=f"Who trains: {', '.join(EXECUTORS)}. Default: bundled."
    ),
]
ObjectiveName = Annotated[
    str | None,
    _option(
        "--objective",
        panel=EXECUTION,
        metavar="KIND",
        text="Choose by: ladder (the first rung that fits, then its fastest form), fastest, smallest, optimum (fastest with a decision for every block). Default: ladder.",
    ),
]
Gpu = Annotated[
    str | None,
    _option(
        "--gpu",
        panel=DEVICE,
        metavar="NAME",
        text="Card to plan for (`advise gpus` lists them). Default: this machine's GPU; without one, all memory tiers.",
    ),
]
NeededGpu = Annotated[
    str | None,
    _option(
        "--gpu",
        panel=DEVICE,
        metavar="NAME",
        text="Card to plan for (`advise gpus` lists them). Default: this machine's GPU; without one, this or --vram is needed.",
    ),
]
Vram = Annotated[
    str | None,
    _option(
        "--vram", panel=DEVICE, metavar="GIB", text="Plan for a card with this much memory, in GiB, instead of --gpu."
    ),
]
Headroom = Annotated[
    str | None,
    _option("--headroom", panel=DEVICE, metavar="GIB", text="Device memory to leave free, in GiB. Default: 0."),
]
HostRam = Annotated[
    str | None,
    _option(
        "--host-ram",
        panel=DEVICE,
        metavar="GIB",
        text="Host memory that offloading may use, in GiB. Default: not checked.",
    ),
]
ResidentGib = Annotated[
    str | None,
    _option(
        "--resident-gib",
        panel=DEVICE,
        metavar="GIB",
        text="What else stays on the card the whole time (text encoder, VAE), in GiB: it counts in every peak. Default: 0.",
    ),
]
ValidationResolution = Annotated[
    str | None,
    _option(
        "--validation-resolution",
        panel=DEVICE,
        metavar="SIZE",
        text="Also predict the peak of sampling at this size: the model's forward pass, without gradients. Default: not asked.",
    ),
]
ValidationFrames = Annotated[
    str | None,
    _option(
        "--validation-frames", panel=DEVICE, metavar="N", text="Frames of a sampled video. Default: those of training."
    ),
]
ValidationSamples = Annotated[
    str | None,
    _option(
        "--validation-samples",
        panel=DEVICE,
        metavar="N",
        text="Samples that go through the model together then. Default: 2 (with and without the prompt).",
    ),
]
KeepResident = Annotated[
    str | None,
    _option(
        "--keep-resident",
        panel=DEVICE,
        metavar="LIST",
        text="text-encoder, vae or both with a comma: their weights stay on the card and count in every peak. Default: neither.",
    ),
]
Caching = Annotated[
    bool,
    _option(
        "--caching",
        panel=DEVICE,
        metavar=None,
        text="Also predict the peaks of caching: the VAE's encode and the text encoders, before the model is loaded. Default: off.",
    ),
]
CachingBatch = Annotated[
    str | None,
    _option(
        "--caching-batch",
        panel=DEVICE,
        metavar="N",
        text="Pictures or videos that the VAE encodes together then. Default: 1; give your trainer's.",
    ),
]
CachingTextBatch = Annotated[
    str | None,
    _option(
        "--caching-text-batch",
        panel=DEVICE,
        metavar="N",
        text="Captions that a text encoder takes together then. Default: 1; give your trainer's.",
    ),
]
VaePrecision = Annotated[
    str | None,
    _option(
        "--vae-precision",
        panel=DEVICE,
        metavar="NAME",
        text="bf16 or fp32: the VAE's weights and pictures. Default: bf16; give your trainer's.",
    ),
]
VaeTiling = Annotated[
    bool,
    _option(
        "--vae-tiling", panel=DEVICE, metavar=None, text="The VAE works tile by tile (enable_tiling). Default: off."
    ),
]
VaeSlicing = Annotated[
    bool,
    _option(
        "--vae-slicing",
        panel=DEVICE,
        metavar=None,
        text="The VAE takes the samples of a batch one by one (enable_slicing). Default: off.",
    ),
]
OsName = Annotated[
    str | None,
    _option(
        "--os",
        panel=DEVICE,
        metavar="NAME",
        text="Where it trains: linux, or windows, whose driver spills to system memory. Default: this machine's for its own GPU, "
        "else linux.",
    ),
]
AsJson = Annotated[
    bool, _option("--json", panel=OUTPUT, metavar=None, text="Print one JSON object instead of tables. Default: off.")
]
ExportFile = Annotated[
    str | None,
    _option(
        "--export", panel=OUTPUT, metavar="FILE", text="Write the recommended schedule as SimpleTuner's JSON keys."
    ),
]
PlanFile = Annotated[
    str | None,
    _option("--plan", panel=OUTPUT, metavar="FILE", text="Write the whole plan, for `advise verify` and `advise run`."),
]
Refresh = Annotated[
    bool, _option("--refresh", panel=OUTPUT, metavar=None, text="Make the profile anew even when one is stored.")
]

# Which command takes which of them, by the names of its parameters (`takes`).
NAMED: dict[str, Any] = {
    "model": Model,
    "variant": VariantName,
    "model_class": ModelClass,
    "model_config": ModelConfig,
    "revision": Revision,
}
"""Which model."""
BUCKETS: dict[str, Any] = {"buckets": Buckets, "aspect_buckets": AspectBuckets, "bucket_step": BucketStep}
SHAPE: dict[str, Any] = {
    "frames": Frames,
    "seconds": Seconds,
    "references": References,
    "batch": Batch,
    "cfg_batch": CfgBatch,
    "caption_tokens": CaptionTokens,
    "text_padding": TextPadding,
}
"""What a sample is, besides its resolution."""
TRAINED: dict[str, Any] = {
    "adapter": Adapter,
    "rank": Rank,
    "alpha": Alpha,
    "lora_targets": LoraTargets,
    "lora_dropout": LoraDropout,
    "dora": Dora,
    "rslora": RsLora,
    "accumulate": Accumulate,
    "ema": Ema,
    "master_weights": MasterWeights,
    "lokr_factor": LokrFactor,
    "lokr_full_matrix": LokrFullMatrix,
    "lokr_scalar": LokrScalar,
    "lokr_rebuild": LokrRebuild,
    "precision": Precision,
    "optimizer": Optimizer,
    "attention": Attention,
    "fuse_qkv": FuseQkv,
    "compile": Compile,
    "weights_offload": WeightsOffload,
}
"""What is trained, and how."""
SIZED: dict[str, Any] = {"resolution": Resolution, **SHAPE}
JOB: dict[str, Any] = {"resolution": Resolution, **BUCKETS, **SHAPE, **TRAINED}
ROOM: dict[str, Any] = {
    "vram": Vram,
    "headroom": Headroom,
    "host_ram": HostRam,
    "resident_gib": ResidentGib,
    "validation_resolution": ValidationResolution,
    "validation_frames": ValidationFrames,
    "validation_samples": ValidationSamples,
    "keep_resident": KeepResident,
    "caching": Caching,
    "caching_batch": CachingBatch,
    "caching_text_batch": CachingTextBatch,
    "vae_precision": VaePrecision,
    "vae_tiling": VaeTiling,
    "vae_slicing": VaeSlicing,
    "os_name": OsName,
}
"""The memory that there is and what else is in it, besides --gpu."""
ANSWER: dict[str, Any] = {"as_json": AsJson, "export": ExportFile, "plan": PlanFile}


def takes(*groups: Mapping[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the options of groups behind its own; their values come as keyword arguments, and in ``ctx.params``.

    None stands for an option that was not given, False for a flag.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [p for p in own if p.kind is not p.VAR_KEYWORD]
        for name, option in (item for group in groups for item in group.items()):
            default = False if get_args(option)[0] is bool else None
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option)
            )
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def request(params: Mapping[str, Any]) -> dict[str, Any]:
    """The command's parameters as a request for `from_request`; those not given are left out.

    Raises:
        WorkloadError: an empty name among the LoRA targets.
    """
    given = {k: v for k in REQUEST_KEYS if (v := params.get(k)) is not None and v != []}
    if (text := given.get("lora_targets")) is not None:
        targets = [part.strip() for part in text.split(",")]
        if not all(targets):
            raise WorkloadError(
                f"--lora-targets {text!r} has an empty name; write names with commas between, such as to_q,to_k"
            )
        given["lora_targets"] = targets
    return {k: number(v) if k in NUMBERS else v for k, v in given.items()}


def number(text: str) -> Any:
    """The finite number that a text stands for; the text itself where it is none, for the check that follows to refuse.

    Only ASCII digits are numbers; Python's int() would take those of any script."""
    if not text.isascii():
        return text
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        return value if "_" not in text and abs(value) < 2**63 else text
    return text


def whole(option: str, text: str, least: int, most: int) -> int:
    """A whole number.

    Raises:
        WorkloadError: not one, or out of range.
    """
    value = number(text)
    if not isinstance(value, int) or not least <= value <= most:
        raise WorkloadError(f"--{option} must be a whole number from {least} to {most}, not {value!r}")
    return value


def positive(option: str, text: str, most: float) -> float:
    """A number above 0.

    Raises:
        WorkloadError: not one, or out of range.
    """
    value = number(text)
    if not isinstance(value, (int, float)) or not math.isfinite(value) or not 0 < value <= most:
        raise WorkloadError(f"--{option} must be a number above 0 and at most {most:g}, not {value!r}")
    return float(value)


def workload(request: Mapping[str, Any]) -> Workload:
    """`from_request`, with the option named where a model or variant is unknown.

    Raises:
        UnknownModelError, WorkloadError: as `from_request`.
    """
    from probes import outside

    if outside.is_outside(request):
        return from_request(request)
    try:
        catalogue.find(request.get("model", ""))
    except catalogue.UnknownModelError as error:
        text = str(error) if str(error).startswith("--") else f"--model: {error}"
        raise catalogue.UnknownModelError(f"{text}; or ORG/NAME, ./FOLDER, or --model-class") from None
    try:
        return from_request(request)
    except catalogue.UnknownModelError as error:
        raise catalogue.UnknownModelError(f"--variant: {error}") from None


def device(gpu: str | None, vram_gib: float | None, detect: Callable[[], Device | None]) -> Device | None:
    """`device_for`, with the option named in an error.

    Raises:
        DeviceError, WorkloadError: as `device_for`.
    """
    from advisor.api import device_for
    from estimators.devices import DeviceError

    if vram_gib is not None:
        gib("vram", vram_gib, least=1)
    try:
        return device_for(gpu=gpu, vram_gib=vram_gib, detect=detect)
    except DeviceError as error:
        raise DeviceError(f"{'--vram' if gpu is None else '--gpu'}: {error}") from None


SYSTEMS = ("linux", "windows")


def on_system(device: Device | None, name: str | None, *, own: bool) -> Device | None:
    """The device under an operating system.

    Args:
        name: of `SYSTEMS`; None: this machine's for its own GPU, else linux.
        own: the device is this machine's.

    Raises:
        WorkloadError: no such system.
    """
    windows = sys.platform == "win32" and own if name is None else choice("os", name, SYSTEMS) == "windows"
    return dataclasses.replace(device, windows=True) if windows and device is not None else device


def check_headroom(headroom: int, device: Device) -> None:
    """
    Raises:
        WorkloadError: less than nothing of the device would be left.
    """
    if headroom >= device.usable_bytes - device.context_bytes:
        usable = f"{device.usable_bytes / 2**30:.1f} GiB"
        raise WorkloadError(
            f"--headroom {headroom / 2**30:g} leaves nothing of the {usable} that the {device.name} has"
        )


def choice(option: str, value: Any, valid: Sequence[str]) -> str:
    """`value` if it is one of the valid ones.

    Raises:
        WorkloadError: naming the option, the value, the nearest match and the valid ones.
    """
    if isinstance(value, str) and value in valid:
        return value
    near = difflib.get_close_matches(str(value).lower(), valid, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise WorkloadError(f"--{option} {value!r} is not valid{hint}; valid: {', '.join(valid)}")


def gib(option: str, value: Any, *, least: float = 0.0) -> int:
    """An amount of memory in GiB as bytes.

    Raises:
        WorkloadError: not a finite number of at least `least`.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise WorkloadError(f"--{option} must be a number of GiB, not {value!r}")
    if not least <= value <= MAX_GIB:
        raise WorkloadError(f"--{option} must be from {least:g} to {MAX_GIB:g} GiB, not {value:g}")
    return round(value * 2**30)


def without_effect(given: Mapping[str, Any], workload: Workload) -> tuple[str, ...]:
    """A sentence for each option that was given although it does nothing for this workload."""
    lora, lokr = ("lora_dropout", "dora", "rslora"), ("lokr_factor", "lokr_full_matrix", "lokr_scalar", "lokr_rebuild")
    does_nothing = {
        "lora": (*lokr, "master_weights"),
        "lokr": (*lora, "master_weights", *(("rank", "alpha") if workload.lokr_full_matrix else ())),
        "loha": (*lora, *lokr, "master_weights"),
        "full": ("rank", "alpha", "lora_targets", *lora, *lokr),
    }
    caption = () if given.get("caption_tokens") is None else _padded(workload)
    if given.get("caption_tokens") is None and given.get("text_padding") == "longest":
        caption = (
            f"--text-padding longest has no effect without --caption-tokens: captions of {workload.text_tokens} tokens are planned for",
        )
    full_matrix = workload.lokr_full_matrix and workload.adapter == "lokr"
    adapter = workload.adapter + (" --lokr-full-matrix" if full_matrix else "")
    return caption + tuple(
        f"--{key.replace('_', '-')} has no effect with --adapter {workload.adapter if key in lora else adapter}"
        for key in does_nothing.get(workload.adapter, ())
        if given.get(key) not in (None, False)
    )


def _padded(w: Workload) -> tuple[str, ...]:
    if w.caption_tokens == w.text_tokens:
        return ()
    if w.text_tokens == w.caption_tokens + w.family.template_tokens:
        return (
            f"the prompt template of {w.model} adds {w.family.template_tokens} tokens to each caption: {w.text_tokens} are planned for",
        )
    return (
        f"--caption-tokens {w.caption_tokens} has no effect: {w.model} pads every caption to {w.text_tokens} tokens "
        "(--text-padding longest: if your trainer does not)",
    )


def input_file(name: str, text: str) -> Path:
    """The file or folder that an argument names.

    Raises:
        WorkloadError: an empty name, or one that no file can have.
    """
    if not text or "\0" in text:
        raise WorkloadError(f"{name} {text!r} is not a file name")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # a home folder of nobody
        raise WorkloadError(f"{name} {text}: {error}") from None


def check_replaced(option: str, text: str, path: Path, ours: Callable[[Any], bool], kind: str) -> None:
    """That a file which an option would write is new, empty, or of the same kind.

    Args:
        path: what `output_file` made of `text`.
        ours: whether a JSON value is of that kind.
        kind: its name, for the message.

    Raises:
        WorkloadError: the file holds something else.
    """
    try:
        if not path.exists() or path.stat().st_size == 0:
            return
        found = json.loads(path.read_text("utf-8-sig")) if path.stat().st_size < 2**24 else None
    except (OSError, ValueError, RecursionError):
        found = None
    if found is None or not ours(found):
        raise WorkloadError(
            f"--{option} {text}: the file holds something else and would be replaced by {kind}; give another name"
        )


def output_file(option: str, text: str) -> Path:
    """The file that an option names, resolved, after a check that it can be written. Leaves nothing behind.

    Raises:
        WorkloadError: a folder or device, or its folder does not exist or cannot be written.
    """
    path = _named(option, text)
    try:
        if path.is_dir():
            raise WorkloadError(f"--{option} {text}: is a folder; give a file name in it")
        if path.exists() and not path.is_file():
            raise WorkloadError(f"--{option} {text}: is not a regular file")
        _check_folder(option, text, path.parent)
        if path.exists() and not os.access(path, os.W_OK):
            raise WorkloadError(f"--{option} {text}: the file is write-protected")
    except OSError as error:
        raise WorkloadError(f"--{option} {text}: cannot be written ({error.strerror})") from None
    return path


def output_folder(option: str, text: str) -> Path:
    """The folder that an option names, resolved, after a check that files can be written to it or that it can be made.

    Raises:
        WorkloadError: a file, or neither it nor its parent can be written.
    """
    path = _named(option, text)
    try:
        _check_folder(option, text, path if path.exists() else path.parent)
    except OSError as error:
        raise WorkloadError(f"--{option} {text}: cannot be written ({error.strerror})") from None
    return path


def _named(option: str, text: str) -> Path:
    if text in ("", "-"):
        raise WorkloadError(f"--{option} {text!r} is not a file name")
    try:
        path = Path(text).expanduser().absolute()
        if path.parts[1:2] in (("dev",), ("proc",), ("sys",)):  # resolving would replace what a stream is redirected to
            raise WorkloadError(f"--{option} {text}: give a file on a disk")
        return path.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links; a home folder of nobody
        raise WorkloadError(f"--{option} {text}: {error}") from None


def _check_folder(option: str, text: str, folder: Path) -> None:
    import tempfile  # takes as long to import as everything else here

    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise WorkloadError(f"--{option} {text}: {folder} {what}")
    with tempfile.TemporaryFile(dir=folder):
        pass


_OWN = ("advisor", "decision_rules", "estimators", "probes")


def is_expected(error: BaseException) -> bool:
    """Whether the error is one of the project's own, or the system's, whose message says what is wrong."""
    return type(error).__module__.partition(".")[0] in _OWN or isinstance(error, (OSError, MemoryError))


def describe(error: BaseException) -> str:
    """An error as one line for the user."""
    if isinstance(error, OSError):
        what = error.strerror or str(error)
        text = f"{error.filename}: {what}" if error.filename else what
    elif isinstance(error, MemoryError):
        text = "this machine has not enough memory for that"
    elif is_expected(error):
        text = str(error)
    else:
        text = f"unexpected {type(error).__name__}: {error}; set ADVISE_DEBUG=1 to see where"
    return " ".join(text.split())
