"""A family's VAE and text encoders: which classes they are, and how large. No torch here; `companion_traces` runs them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from probes import resources
from probes.expressions import evaluate

VAE, TEXT = "vae", "text-encoder"
KINDS = (TEXT, VAE)
"""As `--keep-resident` names them."""
PRECISIONS = {"bf16": 2, "fp32": 4}
"""Of a VAE; bytes a parameter. Text encoders are taken to be bf16."""


@dataclass(frozen=True)
class Companion:
    """One VAE or text encoder as a family uses it."""

    kind: str
    """`VAE` or `TEXT`."""
    name: str
    """In `data/companions.toml`."""
    model_class: str
    """``module:Class``."""
    config_class: str
    """``module:Class`` of a transformers config; empty: the class takes the config's entries itself."""
    config_json: str
    """Constructor arguments as JSON text."""
    parameters: int
    source: str
    """Where the config comes from."""
    video: bool = False
    """A VAE whose pictures have an axis of frames, of images too."""
    tokens: str = ""
    """Of a text encoder: the length that it sees, an expression over T, the denoiser's text length."""
    mask: bool = False
    """It is given a padding mask."""
    arguments_json: str = "{}"
    """What else its call is given, as JSON text."""

    @property
    def config(self) -> dict[str, Any]:
        return dict(json.loads(self.config_json))

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(json.loads(self.arguments_json))

    def weight_bytes(self, precision: str = "bf16") -> int:
        """Bytes of its weights in that precision."""
        return self.parameters * PRECISIONS[precision]

    def length(self, text_tokens: int) -> int:
        """Tokens that it sees for a denoiser's text length; at least one."""
        return max(1, evaluate(self.tokens, {"T": text_tokens}))


@dataclass(frozen=True)
class Run:
    """One call of a companion: everything that changes its trace."""

    companion: Companion
    decode: bool = False
    """Of a VAE: latents to pictures; else pictures to latents."""
    batch: int = 1
    height: int = 0
    """Pixels."""
    width: int = 0
    frames: int = 1
    tokens: int = 0
    """Of a text encoder."""
    precision: str = "bf16"
    tiling: bool = False
    slicing: bool = False


@dataclass(frozen=True)
class Companions:
    """What is known to train beside one variant of a family."""

    vae: Companion | None = None
    text: tuple[Companion, ...] = ()
    """All of them, in the pipeline's order. Empty: not known."""

    def of_kind(self, kind: str) -> tuple[Companion, ...]:
        """Those of one of `KINDS`."""
        if kind == TEXT:
            return self.text
        return () if self.vae is None else (self.vae,)


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads(resources.text("companions.toml"))


def _companion(kind: str, name: str, use: Mapping[str, Any]) -> Companion:
    facts = _file()["vae" if kind == VAE else "text"][name]
    return Companion(
        kind=kind,
        name=name,
        model_class=facts["class"],
        config_class=facts.get("config_class", ""),
        config_json=json.dumps(facts["config"], sort_keys=True),
        parameters=facts["parameters"],
        source=facts["source"],
        video=facts.get("video", False),
        tokens=str(use.get("tokens", "")),
        mask=use.get("mask", False),
        arguments_json=json.dumps(use.get("arguments", {}), sort_keys=True),
    )


@cache
def of(family: str, variant: str) -> Companions:
    """What is known of a catalogue family's variant; empty where nothing is."""
    known = _file()["families"].get(family, {})
    known = {**known, **known.get("variants", {}).get(variant, {})}
    uses: Sequence[Mapping[str, Any]] = known.get("text", ())
    return Companions(
        vae=_companion(VAE, known["vae"], {}) if known.get("vae") else None,
        text=tuple(_companion(TEXT, use["of"], use) for use in uses),
    )


def families() -> tuple[str, ...]:
    """Those of which something is known."""
    return tuple(_file()["families"])
