"""The model catalogue: one fact sheet (TOML) a family, read from package data. No torch here."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from probes import resources, sheets


class UnknownModelError(ValueError):
    """No family, or no variant of a family, has that name."""


@dataclass(frozen=True)
class InputSpec:
    """One argument of the model's forward."""

    name: str
    """Argument name; ``a.b`` puts the tensor under key ``b`` of a dictionary argument ``a``."""
    shape: tuple[str, ...]
    """Expressions over B (batch), H, W (pixels), F (frames), T (text tokens), S (seconds), R (reference images) and the
    model's config values."""
    dtype: str = "compute"
    """``compute`` (the training precision) or a torch dtype name."""
    fill: str = "normal"
    """Values for a real run: normal, uniform (0 to 1), timestep (0 to 999), ones, zeros, arange (remainders of 64), range
    (`start`, `start` + 1, ...), runs (see `runs`), grid or axes (see `grid`)."""
    list_of: str | None = None
    """Expression: the argument is a list of that many tensors of this shape (or of that many copies of `value`)."""
    start: str = "0"
    """Expression: first value of ``range``."""
    runs: tuple[tuple[str, str], ...] = ()
    """For ``runs``: (how many, value) expressions, one after the other along the last axis."""
    grid: tuple[str, ...] = ()
    """For ``grid``, shape [N, axes] or [B, N, axes]: row-major positions in a grid of these sizes. For ``axes``: a list of
    one 1-D tensor an axis, 0 to its size - 1."""
    value: Any = None
    """Not a tensor but this: nested lists and tables, where texts are expressions (``none`` stands for None) and a list
    without lists inside becomes a tuple."""
    when: str = "1"
    """Expression: left out where it is 0."""
    needs_values: bool = False
    """The model reads these values to decide what it does, so a trace gives it real ones. Whole numbers and booleans always
    have them where a trace has to."""


@dataclass(frozen=True)
class Regions:
    """Names of the regions in the blocks of one list; relative to the block."""

    attention: tuple[str, ...] = ()
    feed_forward: tuple[tuple[str, ...], ...] = ()
    trainer_ffn_start: str | None = None
    groupable: bool = True
    checkpointed: bool = True
    """False: no trainer checkpoints these blocks (an adapter, a refiner that runs outside), so the list is no chain."""


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
    overrides: Mapping[str, Any]
    """Tables of the fact sheet that are different for this variant."""


@dataclass(frozen=True)
class NoiseSchedule:
    """How a DDPM model's noise grows. Defaults: Stable Diffusion's."""

    kind: str = "scaled_linear"
    """``linear`` betas, ``scaled_linear`` (linear in their square root), or ``cosine`` (of time, without betas)."""
    start: float = 0.00085
    """First beta."""
    end: float = 0.012
    """Last beta."""
    steps: int = 1000


@dataclass(frozen=True)
class Reduced:
    """A small copy of the model, for runs on a CPU: same class, fewer and narrower blocks, smaller shape."""

    config: Mapping[str, Any]
    resolution: int
    frames: int
    text_tokens: int
    seconds: int
    symbols: Mapping[str, int]


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
    """Frames per latent frame; valid frame counts are `first_frames` + n * factor."""
    first_frames: int
    min_side: int
    """Shortest side in pixels."""
    max_side: int | None
    """Longest side in pixels, where a position table limits it."""
    max_pixels: int | None
    """Largest width x height in pixels, where a position table limits it."""
    max_frames: int | None
    max_batch: int | None
    """Samples that one forward takes, where the model has no batch axis."""
    default_resolution: tuple[int, int]
    """Height, width in pixels."""
    default_frames: int
    default_seconds: int
    """Length of an audio clip; 0: the model makes no audio of its own length."""
    max_seconds: int
    default_references: int
    """Reference images a sample (edit models)."""
    max_references: int
    text_tokens: int
    """Longest text the trainer feeds."""
    padding: str
    """``max_length``: always padded to `text_tokens`; ``longest``: the caption's own length."""
    template_tokens: int
    """Of the prompt template around each caption, those whose embeddings the model is given too."""
    variants: Mapping[str, Variant]
    symbols: Mapping[str, int]
    """Further names for the shape expressions (lengths that are fixed, but smaller in the reduced copy)."""
    inputs: tuple[InputSpec, ...]
    output_shape: tuple[str, ...]
    output_stack: bool
    """The model returns a list of per-sample tensors."""
    output_order: str
    """How the axes of the first input (stacked, where it is a list) become the output's: ``b c h w -> 1 (b h w) c``. Empty: they
    are the same."""
    output_sizes: Mapping[str, int]
    """Of the axes that `output_order` splits off."""
    objective: str
    """What it is trained on: ``flow`` (rectified flow), ``epsilon`` (DDPM noise prediction), ``velocity`` (DDPM v-prediction) or ``tokens`` (cross entropy
    against token ids; the model returns logits [..., n, V] of one or several heads, the output's shape is that of the ids)."""
    reversed_flow: bool
    """The model gets 1 - sigma and predicts data minus noise, the negative of the others."""
    negated_flow: bool
    """The model gets sigma as the others do, but predicts data minus noise."""
    noise: NoiseSchedule
    """For ``epsilon`` and ``velocity``."""
    lora_targets: tuple[str, ...]
    regions: Mapping[str, Regions]
    """By list path; ``*`` stands for any text."""
    reads_values: bool
    """The model's forward reads values of its inputs, so that a trace without values cannot run."""
    unknown_selection: str
    """Expression: one in so many entries is assumed to be selected where the model indexes by values that a trace does not
    know (expert routing: the number of experts over the number that each token takes). Empty: no such place."""
    reduced: Reduced
    notes: tuple[str, ...] = ()
    """For a model outside the catalogue: where it comes from and what was guessed about it."""
    code: str = ""
    """For a class of the user's own: digest of its source, so that a profile of other code is never taken for its."""

    @property
    def pixel_multiple(self) -> int:
        """Width and height in pixels must be multiples of this."""
        return self.vae_factor * self.patch

    def variant(self, name: str | None) -> Variant:
        """
        Raises:
            UnknownModelError: naming the variants that exist.
        """
        if name is not None and (exact := self.variants.get(str(name))) is not None:
            return exact
        wanted = _plain(str(name or self.default_variant))
        for v in self.variants.values():
            if wanted in {_plain(v.name), *map(_plain, v.aliases)}:
                return v
        raise UnknownModelError(f"{self.name} has no variant {name!r}; it has: {', '.join(self.variants)}")

    def of(self, variant: str | None) -> Family:
        """The family as that variant is: what the variant says takes the place of what the family says.

        Raises:
            UnknownModelError: naming the variants that exist.
        """
        chosen = self.variant(variant)
        return _specialised(self.name, chosen.name) if chosen.overrides else self


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    width, height = (int(x) for x in str(value).split("x"))
    return height, width


def _family(sheet: Mapping[str, Any], read: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None) -> Family:
    read = read or without_none_text
    pixels, text = sheet.get("pixels", {}), sheet["text"]
    variants = {
        name: Variant(
            name=name,
            title=v.get("title", name),
            aliases=tuple(v.get("aliases", ())),
            config=read(v.get("config", {})),
            parameters=v.get("parameters"),
            text_tokens=v.get("text_tokens"),
            skip_inputs=tuple(v.get("skip_inputs", ())),
            overrides={k: v[k] for k in _OVERRIDES if k in v},
        )
        for name, v in sheet["variants"].items()
    }
    inputs = tuple(_input(name, spec) for name, spec in sheet["inputs"].items())
    audio, references, tracing = (sheet.get(table, {}) for table in ("audio", "references", "tracing"))
    regions = {
        path: Regions(
            attention=tuple(r.get("attention", ())),
            feed_forward=tuple(tuple(run) for run in r.get("feed_forward", ())),
            trainer_ffn_start=r.get("trainer_ffn_start"),
            groupable=r.get("groupable", True),
            checkpointed=r.get("checkpointed", True),
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
        vae_factor=pixels.get("vae_factor", 1),
        patch=pixels.get("patch", 1),
        temporal_factor=pixels.get("temporal_factor", 1),
        first_frames=pixels.get("first_frames", 1),
        min_side=pixels.get("min_side", pixels.get("vae_factor", 1) * pixels.get("patch", 1)),
        max_side=pixels.get("max_side"),
        max_pixels=pixels.get("max_pixels"),
        max_frames=pixels.get("max_frames"),
        max_batch=sheet["training"].get("max_batch"),
        default_resolution=_pair(pixels.get("default_resolution", 1)),
        default_frames=pixels.get("default_frames", 1),
        default_seconds=audio.get("default_seconds", 0),
        max_seconds=audio.get("max_seconds", 3600 if audio else 0),
        default_references=references.get("default", 0),
        max_references=references.get("most", 0),
        text_tokens=text["tokens"],
        padding=text["padding"],
        template_tokens=text.get("template_tokens", 0),
        variants=variants,
        symbols=sheet.get("symbols", {}),
        inputs=inputs,
        output_shape=tuple(map(str, sheet["output"]["shape"])),
        output_stack=sheet["output"].get("stack", False),
        output_order=sheet["output"].get("order", ""),
        output_sizes=sheet["output"].get("sizes", {}),
        objective=sheet["training"]["objective"],
        reversed_flow=sheet["training"].get("reversed", False),
        negated_flow=sheet["training"].get("negated", False),
        noise=NoiseSchedule(**sheet["training"].get("noise", {})),
        lora_targets=tuple(sheet["lora"]["targets"]),
        regions=regions,
        reads_values=tracing.get("reads_values", False),
        unknown_selection=str(tracing.get("unknown_selection", "")),
        reduced=Reduced(
            config=read(reduced.get("config", {})),
            resolution=reduced.get("resolution", 1),
            frames=reduced.get("frames", 1),
            text_tokens=reduced["text_tokens"],
            seconds=reduced.get("seconds", 1),
            symbols=reduced.get("symbols", {}),
        ),
        notes=tuple(sheet.get("notes", ())),
        code=sheet.get("code", ""),
    )


_OVERRIDES = (
    "class", "symbols", "pixels", "audio", "references", "text", "inputs", "output", "training", "lora", "regions",
    "tracing", "reduced", "notes",
)  # fmt: skip
"""What a variant may say differently: tables are merged key by key. A variant with a class of its own shares no inputs,
regions, tracing hints or reduced copy with the family."""


def without_none_text(given: Mapping[str, Any]) -> dict[str, Any]:
    """Constructor arguments. TOML has no null: the text ``none`` stands for None."""
    return {k: None if v == "none" else v for k, v in given.items()}


def _input(name: str, spec: Mapping[str, Any]) -> InputSpec:
    return InputSpec(
        name=name,
        shape=tuple(map(str, spec.get("shape", ()))),
        dtype=spec.get("dtype", "compute"),
        fill=spec.get("fill", "normal"),
        list_of=None if spec.get("list") is None else str(spec["list"]),
        start=str(spec.get("start", "0")),
        runs=tuple((str(count), str(value)) for count, value in spec.get("runs", ())),
        grid=tuple(map(str, spec.get("grid", ()))),
        value=spec.get("value"),
        when=str(spec.get("when", "1")),
        needs_values=spec.get("needs_values", False),
    )


@lru_cache(maxsize=256)
def parse(sheet_json: str) -> Family:
    """The family that a complete sheet, as JSON text, describes: a model outside the catalogue.

    Raises:
        SheetError: not a valid sheet.
    """
    sheet = json.loads(sheet_json)
    sheets.check(sheet)
    return _family(sheet, dict)


@cache
def _sheets() -> Mapping[str, Mapping[str, Any]]:
    found = {}
    for name in resources.names("families"):
        if name.endswith(".toml"):
            sheet = tomllib.loads(resources.text(f"families/{name}"))
            found[sheet["name"]] = sheet
    return found


@cache
def _specialised(name: str, variant: str) -> Family:
    return _family(_merged(name, variant))


def _merged(name: str, variant: str) -> dict[str, Any]:
    sheet = dict(_sheets()[name])
    own = sheet["variants"][variant]
    if "class" in own:
        for table in ("inputs", "output", "regions", "tracing", "reduced", "audio", "references", "symbols"):
            sheet.pop(table, None)
    for key in _OVERRIDES:
        if key in own:
            given, base = own[key], sheet.get(key, {})
            sheet[key] = {**base, **given} if isinstance(given, dict) else given
            if key == "reduced" and "config" in given:
                sheet[key]["config"] = {**base.get("config", {}), **given["config"]}
    return sheet


def specialised_sheet(name: str, variant: str) -> Mapping[str, Any]:
    """The raw sheet of a family as one of its variants is."""
    return _merged(name, variant)


@cache
def classes() -> frozenset[str]:
    """Every ``module:Class`` that the catalogue uses."""
    return frozenset(f.of(v).model_class for f in families().values() for v in f.variants)


@cache
def families() -> Mapping[str, Family]:
    """All families of the catalogue by name, in alphabetical order."""
    return {name: _family(sheet) for name, sheet in sorted(_sheets().items())}


@cache
def _spellings() -> Mapping[str, Family]:
    """All families by each of their names, without case and punctuation."""
    return {_plain(s): f for f in families().values() for s in (f.name, f.title, *f.aliases)}


def find(name: str) -> Family:
    """The family with that name or alias, ignoring case and punctuation.

    Raises:
        UnknownModelError: naming the nearest matches and the valid names.
    """
    table, spellings = families(), _spellings()
    if not isinstance(name, str) or not name.strip():
        raise UnknownModelError(f"--model needs a name; valid: {', '.join(table)}")
    if (found := spellings.get(_plain(name))) is not None:
        return found
    near = difflib.get_close_matches(_plain(name), spellings, n=1, cutoff=0.6)
    hint = f" (did you mean {spellings[near[0]].name!r}?)" if near else ""
    if Path(name).is_dir():
        hint = f" (there is a folder of that name: --model ./{name})"
    raise UnknownModelError(f"unknown model {name!r}{hint}; valid: {', '.join(table)}")
