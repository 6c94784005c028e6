"""The model catalogue: one fact sheet (TOML) a family, read from package data. No torch here."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from probes import resources


class UnknownModelError(ValueError):
    """No family, or no variant of a family, has that name."""


@dataclass(frozen=True)
class InputSpec:
    """One argument of the model's forward."""

    name: str
    """Argument name; ``a.b`` puts the tensor under key ``b`` of a dictionary argument ``a``."""
    shape: tuple[str, ...]
    """Expressions over B (batch), H, W (pixels), F (frames), T (text tokens) and the model's config values."""
    dtype: str = "compute"
    """``compute`` (the training precision) or a torch dtype name."""
    fill: str = "normal"
    """Values for a real run: normal, uniform (0 to 1), timestep (0 to 999), ones, zeros or arange."""
    list_of: str | None = None
    """Expression: the argument is a list of that many tensors of this shape."""


@dataclass(frozen=True)
class Regions:
    """Names of the regions in the blocks of one list; relative to the block."""

    attention: tuple[str, ...] = ()
    feed_forward: tuple[tuple[str, ...], ...] = ()
    trainer_ffn_start: str | None = None
    groupable: bool = True


@dataclass(frozen=True)
class Variant:
    name: str
    title: str
    aliases: tuple[str, ...]
    config: Mapping[str, Any]
    parameters: int | None
    """Published parameter count."""
    text_tokens: int | None
    skip_inputs: tuple[str, ...]


@dataclass(frozen=True)
class Reduced:
    """A small copy of the model, for runs on a CPU: same class, fewer and narrower blocks, smaller shape."""

    config: Mapping[str, Any]
    resolution: int
    frames: int
    text_tokens: int


@dataclass(frozen=True)
class Family:
    name: str
    title: str
    kind: str
    aliases: tuple[str, ...]
    model_class: str
    """``module:Class``."""
    default_variant: str
    source: str
    vae_factor: int
    """Pixels per latent, each side."""
    patch: int
    """Latents per token (or the deepest level's latent), each side; width and height must be multiples of both."""
    temporal_factor: int
    """Frames per latent frame; valid frame counts are 1 + n * factor."""
    default_resolution: tuple[int, int]
    """Height, width in pixels."""
    default_frames: int
    text_tokens: int
    """Longest text the trainer feeds."""
    padding: str
    """``max_length``: always padded to `text_tokens`; ``longest``: the caption's own length."""
    variants: Mapping[str, Variant]
    inputs: tuple[InputSpec, ...]
    output_shape: tuple[str, ...]
    output_stack: bool
    """The model returns a list of per-sample tensors."""
    objective: str
    """What it is trained on: ``flow`` (rectified flow) or ``epsilon`` (DDPM noise prediction)."""
    reversed_flow: bool
    """The model gets 1 - sigma and predicts data minus noise, the negative of the others."""
    lora_targets: tuple[str, ...]
    regions: Mapping[str, Regions]
    """By list path; ``*`` stands for any text."""
    reduced: Reduced

    @property
    def pixel_multiple(self) -> int:
        """Width and height in pixels must be multiples of this."""
        return self.vae_factor * self.patch

    def variant(self, name: str | None) -> Variant:
        """
        Raises:
            UnknownModelError: naming the variants that exist.
        """
        wanted = _plain(name or self.default_variant)
        for v in self.variants.values():
            if wanted in {_plain(v.name), *map(_plain, v.aliases)}:
                return v
        raise UnknownModelError(f"{self.name} has no variant {name!r}; it has: {', '.join(self.variants)}")


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    width, height = (int(x) for x in str(value).split("x"))
    return height, width


def _family(sheet: Mapping[str, Any]) -> Family:
    pixels, text = sheet["pixels"], sheet["text"]
    variants = {
        name: Variant(
            name=name,
            title=v.get("title", name),
            aliases=tuple(v.get("aliases", ())),
            config=v.get("config", {}),
            parameters=v.get("parameters"),
            text_tokens=v.get("text_tokens"),
            skip_inputs=tuple(v.get("skip_inputs", ())),
        )
        for name, v in sheet["variants"].items()
    }
    inputs = tuple(
        InputSpec(
            name=name,
            shape=tuple(spec["shape"]),
            dtype=spec.get("dtype", "compute"),
            fill=spec.get("fill", "normal"),
            list_of=spec.get("list"),
        )
        for name, spec in sheet["inputs"].items()
    )
    regions = {
        path: Regions(
            attention=tuple(r.get("attention", ())),
            feed_forward=tuple(tuple(run) for run in r.get("feed_forward", ())),
            trainer_ffn_start=r.get("trainer_ffn_start"),
            groupable=r.get("groupable", True),
        )
        for path, r in sheet.get("regions", {}).items()
    }
    reduced = sheet["reduced"]
    return Family(
        name=sheet["name"],
        title=sheet["title"],
        kind=sheet["kind"],
        aliases=tuple(sheet.get("aliases", ())),
        model_class=sheet["class"],
        default_variant=sheet["default_variant"],
        source=sheet["source"],
        vae_factor=pixels["vae_factor"],
        patch=pixels["patch"],
        temporal_factor=pixels.get("temporal_factor", 1),
        default_resolution=_pair(pixels["default_resolution"]),
        default_frames=pixels.get("default_frames", 1),
        text_tokens=text["tokens"],
        padding=text["padding"],
        variants=variants,
        inputs=inputs,
        output_shape=tuple(sheet["output"]["shape"]),
        output_stack=sheet["output"].get("stack", False),
        objective=sheet["training"]["objective"],
        reversed_flow=sheet["training"].get("reversed", False),
        lora_targets=tuple(sheet["lora"]["targets"]),
        regions=regions,
        reduced=Reduced(
            config=reduced.get("config", {}),
            resolution=reduced["resolution"],
            frames=reduced.get("frames", 1),
            text_tokens=reduced["text_tokens"],
        ),
    )


@cache
def families() -> Mapping[str, Family]:
    """All families of the catalogue by name, in alphabetical order."""
    found = {}
    for name in sorted(resources.names("families")):
        if name.endswith(".toml"):
            family = _family(tomllib.loads(resources.text(f"families/{name}")))
            found[family.name] = family
    return found


def find(name: str) -> Family:
    """The family with that name or alias, ignoring case and punctuation.

    Raises:
        UnknownModelError: naming the nearest matches and the valid names.
    """
    table = families()
    spellings = {_plain(s): f for f in table.values() for s in (f.name, f.title, *f.aliases)}
    if not isinstance(name, str) or not name.strip():
        raise UnknownModelError(f"--model needs a name; valid: {', '.join(table)}")
    if (found := spellings.get(_plain(name))) is not None:
        return found
    near = difflib.get_close_matches(_plain(name), spellings, n=1, cutoff=0.6)
    hint = f" (did you mean {spellings[near[0]].name!r}?)" if near else ""
    raise UnknownModelError(f"unknown model {name!r}{hint}; valid: {', '.join(table)}")
