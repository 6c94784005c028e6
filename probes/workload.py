"""What is trained: model, shape, adapter, precision, optimizer. Checked once, here; every layer above can rely on it."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from probes import catalogue, optimizer_facts
from probes import companions as beside


class WorkloadError(ValueError):
    """A value that no workload can have; the message names the option, the value and the valid ones."""


class NotYetError(WorkloadError):
    """A value that is valid but that this version cannot estimate."""


ADAPTERS = ("lora", "lokr", "loha", "full")
ADAPTER_NAMES = {"lora": "LoRA", "lokr": "LoKr", "loha": "LoHa", "full": "full fine-tune"}
LYCORIS = ("lokr", "loha")
"""Of these, the ones that go into module classes, as LyCORIS puts them."""
PRECISIONS = (
    "bf16",
    "fp16",
    "fp32",
    "bf16-upcast",
    "int8-sdnq",
    "int8-sdnq-hadamard",
    "uint4-sdnq",
    "int8-quanto",
    "int4-quanto",
    "int2-quanto",
    "fp8-quanto",
    "int8-torchao",
    "int4-torchao",
    "fp8-torchao",
    "fp8wo-torchao",
    "fp8-native",
    "fp8-cast",
    "fp8-scaled",
    "nf4",
    "int8-bnb",
    "gguf-q4_0",
    "gguf-q5_0",
    "gguf-q4_k",
    "gguf-q5_k",
    "gguf-q6_k",
    "gguf-q8_0",
    "gguf",
)
FLOAT_PRECISIONS = ("bf16", "fp16", "fp32", "bf16-upcast")
"""Those that keep weights as they are."""
NOT_YET = {
    "int4-torchao": "PyTorch's int4 product has no derivative, so nothing trains through it; int4-quanto and nf4 are 4-bit too",
    "gguf": "name the format: gguf-q8_0, gguf-q4_k, ...",
}
"""Precisions that are known but cannot be estimated, and why."""
ESTIMATED_PRECISIONS = tuple(p for p in PRECISIONS if p not in NOT_YET)
ATTENTION = ("auto", "flash", "efficient", "cudnn", "math")
COMPILE = ("none", "regional")
EXECUTORS = ("bundled", "simpletuner", "diffusers")
OPTIMIZERS = tuple(optimizer_facts.table())
LOKR_TARGETS = ("Attention", "FeedForward")
"""Module classes that a LoKr or LoHa adapter goes into by default (the trainer's example presets)."""
DEFAULT_FACTOR = 16
FUSED = {"to_qkv": ("to_q", "to_k", "to_v"), "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj")}
"""What --fuse-qkv makes of which projections of a self-attention."""
REPLACED = {part: fused for fused, parts in FUSED.items() for part in parts}
MAX_PIXELS = 16384
MAX_FRAMES = 4096
MAX_BATCH = 4096
MAX_RANK = 65536
MAX_BUCKETS = 512
MAX_ACCUMULATE = 100_000
MOST_BLOCKS = 999_999
"""Of ``blocks:N``; more than any model has."""
GROUP_OFFLOAD = (
    "diffusers' group offload moves weights out in forward only: what recomputation brings in stays, so the peak of a step is that of "
    "the whole model; and with a stream it sets trained weights back to their first values at every use"
)
"""Why it is not planned for. Seen by running the hooks of diffusers 0.42.1 (`tests/runtime/test_runtime_company.py`)."""
TEXT_PADDING = ("auto", "max_length", "longest")


_NO_VALIDATION: dict[str, Any] = {"validation_resolution": "", "validation_frames": 0, "validation_samples": 0}
_NO_CACHING: dict[str, Any] = {"caching": False, "caching_batch": 0, "caching_text_batch": 0}
_ALONE: dict[str, Any] = {
    **_NO_VALIDATION,
    **_NO_CACHING,
    "resident_gib": 0.0,
    "keep_resident": (),
    "vae_precision": "bf16",
    "vae_tiling": False,
    "vae_slicing": False,
}
"""Nothing beside the training step, in time or on the card."""


@dataclass(frozen=True)
class Workload:
    """One training job on one model. Build with :func:`from_request`."""

    model: str
    variant: str
    height: int
    """Pixels."""
    width: int
    """Pixels."""
    frames: int
    batch: int
    caption_tokens: int
    """The longest caption's real length."""
    text_tokens: int
    """Text length that the model sees (after padding)."""
    adapter: str
    rank: int
    alpha: float
    lora_targets: tuple[str, ...]
    lora_dropout: float
    precision: str
    """Of the frozen base (and of the trained weights for ``full``)."""
    optimizer: str
    attention: str
    fuse_qkv: bool
    weights_offload: str
    compile: str
    lokr_factor: int | str = DEFAULT_FACTOR
    """One for all linears, or ``16,FeedForward=8``: see :attr:`lokr_factors`."""
    lokr_full_matrix: bool = False
    lokr_scalar: bool = False
    """A trained number multiplies each update (LyCORIS' ``use_scalar``)."""
    lokr_rebuild: bool = False
    """Every update is built whole (LyCORIS without ``bypass_mode``)."""
    reduced: bool = False
    """The small copy of the model that a CPU run uses."""
    seconds: int = 0
    """Length of the clip, for audio models; else 0."""
    references: int = 0
    """Reference images a sample, for edit models; else 0."""
    buckets: tuple[str, ...] = ()
    """All sizes that are trained, ``WIDTHxHEIGHT`` or ``WIDTHxHEIGHTxFRAMES``; `height`, `width` and `frames` are one of them.
    Empty: there is only that one."""
    cfg_batch: bool = False
    """Every step puts a second sample beside each one (the unconditional one): twice `batch` through the model."""
    text_padding: str = "auto"
    """``auto`` (as the family's trainer does), ``max_length`` or ``longest``."""
    dora: bool = False
    """LoRA with a trained length for each row of a weight (PEFT's ``use_dora``)."""
    rslora: bool = False
    """LoRA scaled by alpha / sqrt(rank) (PEFT's ``use_rslora``)."""
    accumulate: int = 1
    """Batches whose gradients are added up for one step of the optimizer."""
    ema: bool = False
    """A running average of what is trained is kept on the device."""
    master_weights: bool = False
    """``full`` trains float32 weights under autocast; else weights in `precision`."""
    config_json: str = ""
    """Constructor arguments as JSON text, where they come from given weights instead of the catalogue."""
    sheet_json: str = ""
    """The complete fact sheet as JSON text, for a model outside the catalogue; else empty."""

    resident_gib: float = 0.0
    """GiB of anything else that stays on the card (text encoder, VAE), as the user says."""
    validation_resolution: str = ""
    """``WIDTHxHEIGHT`` of sampled images or videos; empty: no validation is asked about."""
    validation_frames: int = 0
    validation_samples: int = 0
    """Samples that go through the model together in validation."""
    keep_resident: tuple[str, ...] = ()
    """Of `companions.KINDS`, those that stay on the card the whole time."""
    caching: bool = False
    """The encoding of pictures and captions before training is asked about."""
    caching_batch: int = 0
    """Pictures or videos that the VAE encodes together in caching."""
    caching_text_batch: int = 0
    """Captions that a text encoder takes together in caching."""
    vae_precision: str = "bf16"
    vae_tiling: bool = False
    vae_slicing: bool = False

    @property
    def family(self) -> catalogue.Family:
        """As the variant is."""
        if self.sheet_json:
            return catalogue.parse(self.sheet_json)
        return catalogue.find(self.model).of(self.variant)

    @property
    def companions(self) -> beside.Companions:
        """What is known of its VAE and text encoders; of a model outside the catalogue nothing is."""
        return beside.Companions() if self.sheet_json else beside.of(self.model, self.variant)

    @property
    def kept_companions(self) -> tuple[tuple[beside.Companion, int], ...]:
        """What stays on the card of `keep_resident`, each with the bytes of its weights."""
        found = [c for kind in self.keep_resident for c in self.companions.of_kind(kind)]
        return tuple((c, c.weight_bytes(self.vae_precision if c.kind == beside.VAE else "bf16")) for c in found)

    @property
    def kept_bytes(self) -> int:
        """All that stays on the card beside the model."""
        return round(self.resident_gib * 2**30) + sum(size for _, size in self.kept_companions)

    @property
    def resolution(self) -> str:
        """``WIDTHxHEIGHT`` in pixels."""
        return f"{self.width}x{self.height}"

    @property
    def samples(self) -> int:
        """Samples that go through the model together."""
        return self.batch * (2 if self.cfg_batch else 1)

    @property
    def lokr_factors(self) -> tuple[int, dict[str, int]]:
        """The LoKr factor of linears, and those of linears inside modules of a class or with a name's end (as `lora_targets`
        are found). The innermost such module decides, of its class and its name the one that comes later."""
        if isinstance(self.lokr_factor, int):
            return self.lokr_factor, {}
        default, *named = self.lokr_factor.split(",")
        return int(default), {name: int(n) for name, _, n in (part.partition("=") for part in named)}

    @property
    def module_names(self) -> tuple[str, ...]:
        """Module classes and ends of names that say where an adapter goes and how large it is."""
        return (*self.lora_targets, *self.lokr_factors[1])

    @property
    def bucket(self) -> str:
        """The size as `buckets` writes it."""
        return _bucket_name(self.height, self.width, self.frames, self.family)

    @property
    def compiles(self) -> bool:
        """Whether blocks are compiled."""
        return self.compile != "none"

    @property
    def streamed_percent(self) -> int:
        """Of the linears, those whose weights RamTorch streams from the host; 0: it is off."""
        kind, _, percent = self.weights_offload.partition(":")
        return int(percent or 100) if kind == "ramtorch" else 0

    @property
    def swapped_blocks(self) -> int:
        """Blocks whose weights wait on the host; 0: none."""
        kind, _, count = self.weights_offload.partition(":")
        return int(count) if kind == "blocks" else 0

    def traced(self) -> Workload:
        """The workload with everything at its default that does not change a trace."""
        return dataclasses.replace(
            self,
            optimizer="",
            alpha=0.0,
            rslora=False,
            accumulate=1,
            ema=False,
            caption_tokens=0,
            text_padding="auto",
            buckets=(),
            batch=self.samples,
            cfg_batch=False,
            weights_offload="none" if self.swapped_blocks else self.weights_offload,
            **_ALONE,
        )

    @property
    def validating(self) -> Workload | None:
        """The job's validation as a workload of its own: shape and samples of one forward pass. None: it was not asked about."""
        if not self.validation_resolution:
            return None
        width, height = (int(n) for n in self.validation_resolution.split("x"))
        return dataclasses.replace(
            self,
            height=height,
            width=width,
            frames=self.validation_frames,
            batch=self.validation_samples,
            cfg_batch=False,
            buckets=(),
            accumulate=1,
            **_NO_VALIDATION,
            **_NO_CACHING,
        )

    def largest_buckets(self, most: int) -> list[Workload]:
        """The workload at the sizes of its buckets, one of each two that are turned, those with the most pixels (times frames)
        first, squarer ones before longer ones."""
        sizes: dict[tuple[int, ...], Workload] = {}
        for text in self.buckets:
            width, height, *frames = (int(n) for n in text.split("x"))
            sized = dataclasses.replace(self, height=height, width=width, frames=frames[0] if frames else self.frames)
            sizes.setdefault((*sorted((height, width)), sized.frames), sized)
        return sorted(sizes.values(), key=lambda w: (-w.height * w.width * w.frames, abs(w.height - w.width)))[:most]

    def describe(self) -> dict[str, Any]:
        """As a JSON object (the ``workload`` of an answer)."""
        out = dataclasses.asdict(self)
        out["lora_targets"] = list(self.lora_targets)
        out["buckets"] = list(self.buckets)
        out["keep_resident"] = list(self.keep_resident)
        out["resolution"] = self.resolution
        del out["config_json"]
        if sheet := out.pop("sheet_json"):
            out["sheet"] = json.loads(sheet)
        return out


def _choice(option: str, value: Any, valid: Sequence[str]) -> str:
    if value in valid:
        return str(value)
    near = difflib.get_close_matches(str(value).lower(), valid, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise WorkloadError(f"--{option} {value!r} is not valid{hint}; valid: {', '.join(valid)}")


def _optimizer(value: Any) -> str:
    """By any of its names."""
    found = optimizer_facts.canonical(value) if isinstance(value, str) else None
    if found is None:
        near = difflib.get_close_matches(str(value).lower(), optimizer_facts.spellings(), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"valid: {', '.join(OPTIMIZERS[:5])}, ..."
        raise WorkloadError(f"--optimizer {value!r} is not valid; {hint} (docs/training_setups.md lists all)")
    return found


def _whole(option: str, value: Any, most: int, least: int = 1) -> int:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or (isinstance(value, float) and not value.is_integer())
    ):
        raise WorkloadError(f"--{option} must be a whole number from {least} to {most}, not {value!r}")
    if not least <= value <= most:
        raise WorkloadError(f"--{option} must be from {least} to {most}, not {int(value)}")
    return int(value)


def _number(option: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise WorkloadError(f"--{option} must be a number from {low:g} to {high:g}, not {value!r}")
    if not low <= value <= high:
        raise WorkloadError(f"--{option} must be from {low:g} to {high:g}, not {value:g}")
    return float(value)


def _lokr_factor(value: Any) -> int | str:
    """-1: as even a split as possible. Text: a number, numbers for module classes or names, or both; as `Workload.lokr_factor` writes it."""

    def one(value: Any) -> int:
        try:
            return -1 if value == -1 else _whole("lokr-factor", value, MAX_RANK)
        except WorkloadError as error:
            raise WorkloadError(f"{error}; -1 and text such as 16,FeedForward=8 are also taken") from None

    if not isinstance(value, str):
        return one(value)
    default, named = DEFAULT_FACTOR, {}
    for place, part in enumerate(value.split(",")):
        match = re.fullmatch(r"\s*(?:([A-Za-z_][\w.]*)\s*=\s*)?(-?[0-9]{1,18})\s*", part, re.ASCII)
        if match is None or (match[1] is None and place):
            raise WorkloadError(
                f"--lokr-factor {value!r} is not a factor; write 16, or 16,FeedForward=8 (a number first, then NAME=NUMBER for "
                "module classes or ends of names)"
            )
        if match[1] is None:
            default = one(int(match[2]))
        elif match[1] in named:
            raise WorkloadError(f"--lokr-factor {value!r} has {match[1]} twice")
        else:
            named[match[1]] = one(int(match[2]))
    return ",".join([str(default), *(f"{name}={n}" for name, n in named.items())]) if named else default


def _yes_no(option: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise WorkloadError(f"--{option} must be true or false, not {value!r}")
    return value


def parse_resolution(value: Any, family: catalogue.Family, option: str = "resolution") -> tuple[int, int]:
    """``1024`` or ``WIDTHxHEIGHT`` as (height, width) in pixels.

    Raises:
        WorkloadError: not a size, or one that the model's VAE and patch do not divide (names the nearest that they do).
    """
    match = re.fullmatch(r"\s*([0-9]{1,9})(?:\s*[xX*]\s*([0-9]{1,9}))?\s*", str(value))
    if isinstance(value, bool) or match is None:
        raise WorkloadError(f"--{option} {value!r} is not a size; write 1024 or 832x480 (width x height, pixels)")
    width = int(match[1])
    height = int(match[2]) if match[2] else width
    step = family.pixel_multiple
    near = " and ".join(_nearest_sizes(width, height, family))
    most = (family.max_side or MAX_PIXELS) // step * step
    for name, side in (("width", width), ("height", height)):
        if side < family.min_side or side > MAX_PIXELS:
            raise WorkloadError(
                f"--{option} {value}: {name} must be from {family.min_side} to {most} pixels for {family.name}, not {side} (nearest: {near})"
            )
    longest = family.max_side
    if longest is not None and max(width, height) > longest:
        raise WorkloadError(
            f"--{option} {value} is too large for {family.name}: its position table ends at {longest} pixels a side "
            f"(nearest: {near})"
        )
    if family.max_pixels is not None and width * height > family.max_pixels:
        raise WorkloadError(
            f"--{option} {value} is too large for {family.name}: width x height must be at most {family.max_pixels} pixels "
            f"(nearest: {near})"
        )
    if width % step or height % step:
        raise WorkloadError(
            f"--{option} {value} does not fit {family.name}: width and height must be multiples of {step} (nearest: {near})"
        )
    return height, width


def _nearest_sizes(width: int, height: int, family: catalogue.Family) -> list[str]:
    """Sizes near the given one that the model takes: with both sides rounded down, then up; one where they are the same."""
    step, longest = family.pixel_multiple, (family.max_side or MAX_PIXELS) // family.pixel_multiple
    most, least = (family.max_pixels or MAX_PIXELS**2) // step**2, family.min_side // step
    found = []
    for rounded in ((width // step, height // step), (-(-width // step), -(-height // step))):
        sides = [min(longest, max(least, s)) for s in rounded]
        if sides[0] * sides[1] > most:
            scale = math.sqrt(most / (sides[0] * sides[1]))
            sides = [max(least, int(s * scale)) for s in sides]
            sides = [min(s, most // min(sides)) for s in sides]
        found.append(f"{sides[0] * step}x{sides[1] * step}")
    return list(dict.fromkeys(found))


def _bucket_name(height: int, width: int, frames: int, family: catalogue.Family) -> str:
    return f"{width}x{height}" + (f"x{frames}" if family.kind == "video" else "")


def aspect_buckets(edge: Any, step: Any, family: catalogue.Family) -> list[tuple[int, int]]:
    """The usual list of aspect buckets, as (height, width) in pixels from the tallest to the widest.

    For every width from half to twice `edge`, in steps, the largest height in that range whose area is not above that of the
    square; and each of them turned. Sizes that the family cannot take (its longest side, its position table) are left out.

    Args:
        edge: side of the square bucket.
        step: sides are multiples of this, and of what the family's VAE and patch need.

    Raises:
        WorkloadError: not whole numbers, or no bucket is left.
    """
    most = family.max_side or MAX_PIXELS
    edge = _whole("aspect-buckets", edge, MAX_PIXELS)
    step = math.lcm(_whole("bucket-step", step, 1024), family.pixel_multiple)
    if edge < step:
        raise WorkloadError(
            f"--aspect-buckets {edge}: {family.name} needs sides that are multiples of {step} with this --bucket-step, so at "
            f"least {step}"
        )
    low, high, area = (
        -(-max(edge // 2, family.min_side) // step) * step,
        min(2 * edge, most) // step * step,
        edge * edge,
    )
    found: set[tuple[int, int]] = set()
    for width in range(low, high + 1, step):
        height = min(area // width // step * step, high)
        if height >= low and (family.max_pixels is None or width * height <= family.max_pixels):
            found |= {(height, width), (width, height)}
    if not found:
        square = edge // step * step
        raise WorkloadError(
            f"--aspect-buckets {edge}: {family.name} takes none of these sizes (nearest edge: "
            f"{min(square, most // step * step, math.isqrt(family.max_pixels or area) // step * step)})"
        )
    return sorted(found, key=lambda size: (size[1], -size[0]))


def _buckets(get: Callable[..., Any], family: catalogue.Family, frames: int) -> list[tuple[int, int, int]]:
    """All sizes of a request that has several, as (height, width, frames)."""
    listed, edge, step = get("buckets"), get("aspect_buckets"), get("bucket_step")
    if step is not None and edge is None:
        raise WorkloadError(f"--bucket-step {step} has no effect without --aspect-buckets; leave it out or add that")
    if listed is None and edge is None:
        return []
    if family.kind == "audio":
        option = "bucket" if listed is not None else "aspect-buckets"
        raise WorkloadError(f"--{option}: {family.name} is an audio model; its length is --seconds")
    found: list[tuple[int, int, int]] = []
    if listed is not None:
        if isinstance(listed, (str, Mapping)) or not isinstance(listed, Sequence) or not listed:
            raise WorkloadError(f"--bucket must be a list of sizes such as 832x1216, not {listed!r}")
        if len(listed) > MAX_BUCKETS:
            raise WorkloadError(f"--bucket: at most {MAX_BUCKETS} sizes, not {len(listed)}")
        for value in listed:
            match = re.fullmatch(r"\s*([0-9]+\s*[xX*]\s*[0-9]+)\s*[xX*]\s*([0-9]{1,9})\s*", str(value))
            if match is None:
                found.append((*parse_resolution(value, family, "bucket"), frames))
            elif family.kind != "video":
                raise WorkloadError(
                    f"--bucket {value}: {family.name} is an image model; write width x height without frames"
                )
            else:
                found.append(
                    (
                        *parse_resolution(match[1], family, "bucket"),
                        _frames(int(match[2]), family, shown=f"--bucket {value}"),
                    )
                )
    if edge is not None:
        found += [(*size, frames) for size in aspect_buckets(edge, 64 if step is None else step, family)]
        if len(found) > MAX_BUCKETS:
            raise WorkloadError(
                f"--aspect-buckets {edge} gives {len(found)} sizes; at most {MAX_BUCKETS}: use a larger --bucket-step"
            )
    return list(dict.fromkeys(found))


def _frames(value: Any, family: catalogue.Family, option: str = "frames", shown: str | None = None) -> int:
    """
    Args:
        shown: how an error names the value; default: the option and the value.
    """
    too_many = (
        family.kind == "video" and isinstance(value, int) and value > MAX_FRAMES
    )  # refused below, with the nearest
    frames = _whole(option, value, value if too_many else MAX_FRAMES)
    name = shown or f"--{option} {frames}"
    if family.kind != "video" and frames != 1:
        raise WorkloadError(f"{name}: {family.name} is an {family.kind} model; leave --{option} out")
    if family.kind != "video":
        return frames
    step, first, most = family.temporal_factor, family.first_frames, family.max_frames or MAX_FRAMES
    if frames < first:
        raise WorkloadError(f"{name} does not fit {family.name}: it takes at least {first} frames (nearest: {first})")
    below = frames - (frames - first) % step
    if frames > most:
        nearest = most - (most - first) % step
        raise WorkloadError(f"{name} is more frames than {family.name} takes (nearest: {nearest})")
    if below != frames:
        near = str(below) if below + step > most else f"{below} and {below + step}"
        raise WorkloadError(
            f"{name} does not fit {family.name}: its VAE takes {first} + n x {step} frames (nearest: {near})"
        )
    return frames


def _seconds(value: Any, family: catalogue.Family) -> int:
    if family.kind != "audio":
        if value is not None:
            raise WorkloadError(f"--seconds {value}: {family.name} is no audio model; leave --seconds out")
        return 0
    return _whole("seconds", family.default_seconds if value is None else value, family.max_seconds)


def _validation(get: Callable[..., Any], family: catalogue.Family, frames: int) -> dict[str, Any]:
    """Fields of a workload: size and number of what validation samples together."""
    size = get("validation_resolution")
    if size is None:
        for key in ("validation_frames", "validation_samples"):
            if get(key) is not None:
                raise WorkloadError(
                    f"--{key.replace('_', '-')} {get(key)} has no effect without --validation-resolution; add that"
                )
        return dict(_NO_VALIDATION)
    if family.kind == "audio":
        raise WorkloadError(
            f"--validation-resolution {size}: {family.name} is an audio model, whose validation is not planned for"
        )
    height, width = parse_resolution(size, family, "validation-resolution")
    most = family.max_batch or MAX_BATCH
    return {
        "validation_resolution": f"{width}x{height}",
        "validation_frames": _frames(get("validation_frames", frames), family, "validation-frames"),
        "validation_samples": _whole("validation-samples", get("validation_samples", min(2, most)), most),
    }


def _beside(get: Callable[..., Any]) -> dict[str, Any]:
    """Fields of a workload: VAE and text encoders, and the caching phase."""
    kept = get("keep_resident", ())
    if isinstance(kept, str):
        kept = [part.strip() for part in kept.split(",")]
    if not isinstance(kept, Sequence):
        raise WorkloadError(f"--keep-resident must be a list of {' and '.join(beside.KINDS)}, not {kept!r}")
    found: dict[str, Any] = {
        "keep_resident": tuple(dict.fromkeys(_choice("keep-resident", kind, beside.KINDS) for kind in kept)),
        "vae_precision": _choice("vae-precision", get("vae_precision", "bf16"), tuple(beside.PRECISIONS)),
        "vae_tiling": _yes_no("vae-tiling", get("vae_tiling", False)),
        "vae_slicing": _yes_no("vae-slicing", get("vae_slicing", False)),
    }
    if _yes_no("caching", get("caching", False)):
        batches = {k: _whole(k.replace("_", "-"), get(k, 1), MAX_BATCH) for k in _NO_CACHING if k != "caching"}
        return {**found, "caching": True, **batches}
    for key in _NO_CACHING:
        if get(key):
            raise WorkloadError(f"--{key.replace('_', '-')} {get(key)} has no effect without --caching; add that")
    return {**found, **_NO_CACHING}


def _check_companions(w: Workload) -> None:
    """
    Raises:
        WorkloadError: what is asked about is not known for the model, or an option has no effect.
    """
    who = w.model if w.sheet_json else f"{w.model} {w.variant}"
    for kind in w.keep_resident:
        if not w.companions.of_kind(kind):
            raise WorkloadError(f"--keep-resident {kind}: not known for {who}; say how large it is with --resident-gib")
    if w.caching and not any(map(w.companions.of_kind, beside.KINDS)):
        raise WorkloadError(f"--caching: neither the VAE nor the text encoders of {who} are known here; leave it out")
    runs_vae = w.companions.vae is not None and (w.caching or bool(w.validation_resolution))
    asked = {"--vae-tiling": w.vae_tiling, "--vae-slicing": w.vae_slicing}
    if w.vae_precision != "bf16" and beside.VAE not in w.keep_resident:
        asked[f"--vae-precision {w.vae_precision}"] = True
    for option in (option for option, given in asked.items() if given and not runs_vae):
        if w.companions.vae is None:
            raise WorkloadError(f"{option}: the VAE of {who} is not known here; leave it out")
        raise WorkloadError(f"{option} has no effect without --caching or --validation-resolution; add one")


def _references(value: Any, family: catalogue.Family, variant: str) -> int:
    if value is None:
        return family.default_references
    if value == 0 and not isinstance(value, bool):
        return 0
    if family.max_references == 0:
        others = [v for v in family.variants if v != variant and family.of(v).max_references]
        what = f"--variant {' or '.join(others)} does" if others else "leave --references out"
        raise WorkloadError(f"--references {value}: {family.name} {variant} takes no reference images; {what}")
    return _whole("references", value, family.max_references, least=0)


REQUEST_KEYS = (
    "model",
    "model_class",
    "model_config",
    "revision",
    "variant",
    "resolution",
    "frames",
    "batch",
    "caption_tokens",
    "adapter",
    "rank",
    "alpha",
    "lora_targets",
    "lora_dropout",
    "dora",
    "rslora",
    "accumulate",
    "ema",
    "master_weights",
    "lokr_factor",
    "lokr_full_matrix",
    "lokr_scalar",
    "lokr_rebuild",
    "precision",
    "optimizer",
    "attention",
    "fuse_qkv",
    "weights_offload",
    "compile",
    "seconds",
    "references",
    "buckets",
    "aspect_buckets",
    "bucket_step",
    "cfg_batch",
    "text_padding",
    "resident_gib",
    "validation_resolution",
    "validation_frames",
    "validation_samples",
    "keep_resident",
    "caching",
    "caching_batch",
    "caching_text_batch",
    "vae_precision",
    "vae_tiling",
    "vae_slicing",
)


def from_request(request: Mapping[str, Any], *, sheet: Mapping[str, Any] | None = None) -> Workload:
    """Checks a request (the command's options, or one line of ``advise batch``) and fills in the defaults.

    Args:
        sheet: the model's complete fact sheet (of a plan file); what the request says about model and variant is not read then.

    Raises:
        UnknownModelError: no such model or variant.
        WorkloadError: a value out of range; NotYetError where the value is valid but cannot be estimated yet.
        SheetError: `sheet` is not valid.
    """
    get = {k: v for k, v in request.items() if v is not None}.get
    for key in ("variant", "revision", "model_config", "model_class", "weights_offload"):
        if get(key) == "":
            raise WorkloadError(f"--{key.replace('_', '-')} '' is empty; give a value or leave it out")
    sheet_json = ""
    if sheet is None:
        from probes import outside

        sheet = outside.sheet_of(request) if outside.is_outside(request) else None
    if sheet is not None:
        sheet_json = json.dumps(sheet, sort_keys=False, separators=(",", ":"))
        family = catalogue.parse(sheet_json)
        variant = family.variant(None)
    else:
        family = catalogue.find(get("model", ""))
        variant = family.variant(get("variant"))
        family = family.of(variant.name)
    height, width = family.default_resolution
    if (size := get("resolution")) is not None:
        if family.kind == "audio":
            raise WorkloadError(f"--resolution {size}: {family.name} is an audio model; its length is --seconds")
        height, width = parse_resolution(size, family)
    frames = _frames(get("frames", family.default_frames), family)
    buckets = _buckets(get, family, frames)
    if buckets and size is None:
        height, width, frames = max(buckets, key=math.prod)
    elif buckets and (height, width, frames) not in buckets:
        buckets.insert(0, (height, width, frames))
    batch = _whole("batch", get("batch", 1), MAX_BATCH)
    if family.max_batch is not None and batch > family.max_batch:
        raise WorkloadError(
            f"--batch {batch}: {family.name} takes at most {family.max_batch} a step; accumulate gradients over more steps"
        )
    cfg_batch = _yes_no("cfg-batch", get("cfg_batch", False))
    if cfg_batch and family.max_batch is not None and 2 * batch > family.max_batch:
        raise WorkloadError(
            f"--cfg-batch: {family.name} takes at most {family.max_batch} sample a step, so no second one beside it"
        )
    text_limit = variant.text_tokens or family.text_tokens
    caption = _whole("caption-tokens", get("caption_tokens", text_limit), 1_000_000)
    if caption > text_limit:
        raise WorkloadError(f"--caption-tokens {caption} is more than {family.name} takes (at most {text_limit})")
    text_padding = _choice("text-padding", get("text_padding", "auto"), TEXT_PADDING)
    padding = family.padding if text_padding == "auto" else text_padding
    adapter = _choice("adapter", get("adapter", "lora"), ADAPTERS)
    rank = _whole("rank", get("rank", 16), MAX_RANK)
    targets = get("lora_targets", family.lora_targets if adapter == "lora" else LOKR_TARGETS)
    if (
        isinstance(targets, str)
        or not isinstance(targets, Sequence)
        or not all(isinstance(t, str) and t for t in targets)
        or not targets
    ):
        raise WorkloadError(f"--lora-targets must be a list of module names, not {targets!r}")
    fuse = _yes_no("fuse-qkv", get("fuse_qkv", False))
    if fuse and adapter == "lora":
        if get("lora_targets", None) is None:
            targets = fused_targets(targets)
        elif lost := [t for t in targets if t in REPLACED]:
            raise WorkloadError(
                f"--lora-targets {','.join(lost)}: does not run once --fuse-qkv is on; name {REPLACED[lost[0]]} instead"
            )
    workload = Workload(
        model=family.name,
        variant=variant.name,
        height=height,
        width=width,
        frames=frames,
        batch=batch,
        caption_tokens=caption,
        text_tokens=text_limit if padding == "max_length" else min(text_limit, caption + family.template_tokens),
        adapter=adapter,
        rank=rank,
        alpha=_number("alpha", get("alpha", rank), 1e-6, 1e6),
        lora_targets=tuple(targets),
        lora_dropout=_number("lora-dropout", get("lora_dropout", 0.1), 0.0, 0.999),
        precision=_choice("precision", get("precision", "bf16"), PRECISIONS),
        optimizer=_optimizer(get("optimizer", "adamw_bf16")),
        attention=_choice("attention", get("attention", "auto"), ATTENTION),
        fuse_qkv=fuse,
        weights_offload=str(get("weights_offload", "none")),
        compile=_choice("compile", get("compile", "none"), COMPILE),
        seconds=_seconds(get("seconds"), family),
        references=_references(get("references"), family, variant.name),
        lokr_factor=_lokr_factor(get("lokr_factor", DEFAULT_FACTOR)),
        lokr_full_matrix=_yes_no("lokr-full-matrix", get("lokr_full_matrix", False)),
        lokr_scalar=_yes_no("lokr-scalar", get("lokr_scalar", False)),
        lokr_rebuild=_yes_no("lokr-rebuild", get("lokr_rebuild", False)),
        sheet_json=sheet_json,
        buckets=tuple(_bucket_name(*size, family) for size in buckets),
        cfg_batch=cfg_batch,
        text_padding=text_padding,
        dora=_yes_no("dora", get("dora", False)),
        rslora=_yes_no("rslora", get("rslora", False)),
        accumulate=_whole("accumulate", get("accumulate", 1), MAX_ACCUMULATE),
        ema=_yes_no("ema", get("ema", False)),
        master_weights=_yes_no("master-weights", get("master_weights", False)),
        resident_gib=_number("resident-gib", get("resident_gib", 0.0), 0.0, 4096.0),
        **_validation(get, family, frames),
        **_beside(get),
    )
    check_supported(workload)
    _check_companions(workload)
    if workload.adapter == "full" and workload.master_weights:
        if workload.precision == "fp32":
            raise WorkloadError("--master-weights: with --precision fp32 the weights are float32 already; leave it out")
        if workload.optimizer == "adamw_bf16":
            raise WorkloadError("--master-weights: adamw_bf16 takes bf16 weights alone; --optimizer adamw goes with it")
    return workload


def fused_targets(targets: Sequence[str]) -> tuple[str, ...]:
    """LoRA target names once the projections are fused: a fused linear in place of the three that no longer run."""
    return tuple(dict.fromkeys(REPLACED.get(t, t) for t in targets))


def check_supported(w: Workload) -> None:
    """That a workload's options go together.

    Raises:
        WorkloadError: they do not; NotYetError where they do but cannot be estimated yet.
    """
    if w.precision not in ESTIMATED_PRECISIONS:
        raise NotYetError(
            f"--precision {w.precision} cannot be estimated yet ({NOT_YET[w.precision]}); {', '.join(ESTIMATED_PRECISIONS)} can"
        )
    if w.adapter == "full" and w.precision not in ("bf16", "fp16", "fp32"):
        raise WorkloadError(
            f"--precision {w.precision} does not go with --adapter full: a quantised weight cannot be trained"
        )
    if w.adapter == "lora" and w.dora and w.precision not in FLOAT_PRECISIONS:
        raise NotYetError(
            f"--dora with --precision {w.precision} cannot be estimated yet (it dequantises every weight); with "
            f"{', '.join(FLOAT_PRECISIONS)} it can"
        )
    if w.adapter == "lora" and w.dora and w.weights_offload != "none":
        raise NotYetError(
            f"--dora with --weights-offload {w.weights_offload} cannot be estimated yet; with none it can"
        )
    if w.adapter == "lokr" and w.lokr_rebuild and (w.precision not in FLOAT_PRECISIONS or w.weights_offload != "none"):
        what = (
            f"--weights-offload {w.weights_offload}"
            if w.precision in FLOAT_PRECISIONS
            else f"--precision {w.precision}"
        )
        raise NotYetError(
            f"--lokr-rebuild with {what} cannot be estimated yet; without --lokr-rebuild (LyCORIS' bypass_mode: true) it can, and "
            f"with {', '.join(FLOAT_PRECISIONS)} and weights on the card"
        )
    if w.weights_offload.partition(":")[0] == "group":
        raise WorkloadError(f"--weights-offload {w.weights_offload}: {GROUP_OFFLOAD}; ramtorch or blocks:N work")
    if w.weights_offload != "none":
        if not re.fullmatch(r"ramtorch(:([1-9][0-9]?|100))?|blocks:[1-9][0-9]{0,5}", w.weights_offload):
            raise WorkloadError(
                f"--weights-offload {w.weights_offload!r} is not valid; valid: none, ramtorch, ramtorch:PERCENT, blocks:N"
            )
        if w.adapter == "full":
            raise NotYetError(f"--weights-offload {w.weights_offload} with --adapter full cannot be estimated yet")


def check_compile(w: Workload) -> None:
    """
    Raises:
        NotYetError: compiled blocks beside something whose kernels are not known then.
    """
    if w.compiles and (w.precision not in FLOAT_PRECISIONS or w.weights_offload != "none"):
        what = f"--precision {w.precision}" if w.weights_offload == "none" else f"--weights-offload {w.weights_offload}"
        raise NotYetError(
            f"--compile regional with {what} cannot be estimated yet (what would fuse there is not known); --compile none can, "
            f"or {', '.join(FLOAT_PRECISIONS)} with weights on the card"
        )


def reduced_copy(workload: Workload) -> Workload:
    """The same job on the small copy of the model: smaller shape, same adapter, precision float32."""
    family = workload.family
    small = family.reduced
    text = small.text_tokens
    return dataclasses.replace(
        workload,
        height=small.resolution,
        width=small.resolution,
        frames=small.frames,
        buckets=(),
        seconds=small.seconds if family.kind == "audio" else 0,
        text_tokens=text,
        caption_tokens=text,
        rank=workload.rank
        if workload.adapter == "lokr"
        else min(workload.rank, 8),  # which decides where LoKr has full matrices
        precision="fp32",
        optimizer=workload.optimizer if optimizer_facts.table()[workload.optimizer].cpu else "adamw",
        attention="auto",
        accumulate=min(workload.accumulate, 2),
        ema=False,
        weights_offload="none" if workload.streamed_percent else workload.weights_offload,
        **_ALONE,
        reduced=True,
    )
