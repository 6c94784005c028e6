"""A complete fact sheet for a model that has none: from its class and config, by trying forward passes on the meta device.

Shapes of inputs follow from the names of the forward's arguments and of the config's entries, and a guess counts only when
the model runs with it. Everything guessed becomes a note of the sheet. Nothing here knows a model by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from probes import build, catalogue, stand_ins, thinning
from probes.discover import discover
from probes.expressions import ExpressionError, evaluate
from probes.step import predict
from probes.traced import meta_autocast, one_in
from probes.workload import Workload, WorkloadError, from_request

SEARCH_SECONDS = 45.0
MOST_TRIES = 400
MOST_VIDEO_PIXELS = 1920 * 1088
SMALL_PARAMETERS = 60_000_000
"""A model up to this size runs on a CPU as it is."""

DECLARE = "declare its inputs: --model-class package.module:Class --model-config FILE (see docs/adding_a_model.md)"


class InferenceError(WorkloadError):
    """A model whose inputs or structure could not be found out."""


def build_limited(cls: type[nn.Module], config: Mapping[str, Any], who: str) -> nn.Module:
    """The model on the meta device; a config that asks for absurdly many modules is given up on.

    Raises:
        InferenceError: the class does not take the config.
    """
    try:
        with torch.device("meta"):
            model = build.build_limited(cls, config)
    except build.BuildError as error:
        raise InferenceError(f"{who}: {error}") from None
    if next(model.parameters(), None) is None:
        raise InferenceError(f"{who}: {cls.__name__} has no parameters")
    return model


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def accepted(cls: type[nn.Module], config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The part of a config that the constructor takes, and the names of the rest."""
    parameters = inspect.signature(cls.__init__).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and not hasattr(cls, "load_config"):
        return dict(config), []
    own = {k: v for k, v in config.items() if k in parameters and k != "self"}
    return own, sorted(set(config) - set(own))


def defaults(cls: type[nn.Module]) -> dict[str, Any]:
    """The constructor's default values, as plain values."""
    parameters = inspect.signature(cls.__init__).parameters.values()
    return {p.name: _plain(p.default) for p in parameters if p.default is not p.empty}


def _is_setting(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_setting, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def diffusers_class(name: str, who: str) -> type[nn.Module]:
    """A model class of diffusers by the name in a config, which may say anything.

    Raises:
        InferenceError: diffusers has no model class of that name.
    """
    import difflib

    import diffusers

    found = None
    if re.fullmatch(r"[A-Za-z]\w{0,99}", name, re.ASCII) and name in dir(diffusers):
        with contextlib.suppress(build.BuildError, RuntimeError):
            found = build.model_class(f"diffusers:{name}")
    if found is None or not issubclass(found, diffusers.ModelMixin) or found is diffusers.ModelMixin:
        near = difflib.get_close_matches(name, [n for n in dir(diffusers) if "Model" in n or "UNet" in n], n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise InferenceError(
            f"{who}: its config names the class {name[:100]!r}, which is not a model class of diffusers "
            f"{diffusers.__version__}{hint}; for a class of your own give --model-class and --model-config"
        )
    return found


def adapted(
    candidates: Sequence[tuple[str, str]], config: Mapping[str, Any], who: str, label: str, wanted: str | None
) -> dict[str, Any]:
    """The sheet of a catalogue family with the dimensions of a config.

    Args:
        candidates: (family, variant) whose class the config has.
        label: name of the new variant.
        wanted: a variant's name, where one was asked for: the facts that no config holds are its.

    Raises:
        InferenceError: the class does not take the config.
    """
    reference = catalogue.families()[candidates[0][0]].of(candidates[0][1]).model_class
    cls = build.model_class(reference)
    own, ignored = accepted(cls, config)
    usual = defaults(cls)
    given = usual | _plain_table(own)
    ranked = []
    for i, (family, variant) in enumerate(candidates):
        theirs = usual | _plain_table(catalogue.families()[family].variant(variant).config)
        mentioned = max(
            (len(_squeezed(n)) for n in _names(family, variant) if _squeezed(n) in _squeezed(who)), default=0
        )
        ranked.append((_distance(given, theirs), -mentioned, i, family, variant))
    equal = [f"{f} {v}" for d, _, _, f, v in ranked if d == 0]
    if wanted is not None:
        ranked = [r for r in ranked if catalogue.families()[r[3]].variant(wanted).name == r[4]]
    _, _, _, family, variant = min(ranked)
    model = build_limited(cls, own, who)
    parameters = sum(p.numel() for p in model.parameters())
    sheet = {k: v for k, v in catalogue.specialised_sheet(family, variant).items() if k != "aliases"}
    base = dict(sheet["variants"][variant])
    kept = {k: base[k] for k in ("text_tokens", "skip_inputs") if k in base}
    sheet["variants"] = {label: {"config": own, **kept}}
    sheet["default_variant"] = label
    sheet["source"] = who
    sheet["reduced"] = dict(sheet["reduced"])
    if parameters <= SMALL_PARAMETERS:
        sheet["reduced"]["config"] = {}
    else:
        sheet["reduced"]["config"] = catalogue.without_none_text(sheet["reduced"].get("config", {}))
    patch, theirs_patch = (_last(c.get("patch_size")) for c in (given, usual | _plain_table(base.get("config", {}))))
    if patch and patch != theirs_patch:
        sheet["pixels"] = {**sheet.get("pixels", {}), "patch": patch}
    notes = []
    if equal:
        notes.append(f"its config equals the catalogue's {', '.join(equal)}")
        if f"{family} {variant}" not in equal or len(equal) > 1:
            notes.append(f"what no config says (text length, inputs, default size) is taken from {family} {variant}")
    else:
        other = [k for k in given if given[k] != (usual | _plain_table(base.get("config", {}))).get(k)]
        notes.append(
            f"{cls.__name__} is the class of {family}: its fact sheet, variant {variant}, is used with this config's "
            f"dimensions ({_some([f'{k}={json.dumps(given[k])}' for k in other])} differ)"
        )
    if ignored:
        notes.append(f"ignored: {_some(ignored)}, which {cls.__name__} does not take")
    sheet["notes"] = notes
    return sheet


def fits(sheet: Mapping[str, Any], who: str) -> str | None:
    """Whether the model runs on the meta device with the sheet's inputs: None, or what goes wrong."""
    (variant,) = sheet["variants"].values()
    model = build_limited(build.model_class(sheet["class"]), variant["config"], who)
    search = _Search(model, sheet, who)
    reads_values = bool(sheet.get("tracing", {}).get("reads_values"))
    for known_values in (True,) if reads_values else (False, True):
        if search.try_one(sheet, known_values) is not None:
            return None
    return search.error


def _last(size: Any) -> int | None:
    """Of a patch size: that of width and height."""
    size = size[-1] if isinstance(size, list) and size else size
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None


def _names(family: str, variant: str) -> list[str]:
    v = catalogue.families()[family].variant(variant)
    return [n for n in (v.name, *v.aliases) if len(_squeezed(n)) >= 3]


def _squeezed(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _plain_table(config: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _plain(v) for k, v in config.items()}


def _distance(a: Mapping[str, Any], b: Mapping[str, Any]) -> int:
    """How much two configs differ: a switch, or a part that one lacks, counts more than a size."""
    total = 0
    for k in a.keys() | b.keys():
        x, y = a.get(k), b.get(k)
        if x != y:
            sizes = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (x, y))
            total += 1 if sizes or (isinstance(x, list) and isinstance(y, list)) else 10
    return total


def _some(texts: Sequence[str], most: int = 8) -> str:
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


# --- the search ----------------------------------------------------------------------------------------------------------

_TEXT = ("encoder_hidden_states", "context", "text", "caption", "cap_feats", "prompt", "txt", "text_embeds", "cond")
_TIME = ("timestep", "timesteps", "t", "time", "sigma", "sigmas", "noise_level", "timestep_r", "r_timestep")
_LEFT_OUT = re.compile(r"kwargs$|^return_|cache|residual|control|block_samples|lora|^args$")
_TEXT_DIM = re.compile(
    r"cross_attention_dim|joint_attention_dim|text_|caption|encoder_hid|context|cap_feat|txt|prompt|cond_dim"
)


@dataclasses.dataclass(frozen=True)
class _Guess:
    """One way to fill an argument: None leaves it out."""

    spec: Mapping[str, Any] | None
    facts: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Tables that go with it (pixels, ...)."""
    kind: str | None = None


class _Search:
    """Finds inputs under which the model's forward runs."""

    def __init__(self, model: nn.Module, sheet: Mapping[str, Any], who: str) -> None:
        self.model, self.sheet, self.who = model, sheet, who
        config: Any = getattr(model, "config", None)
        settings = dict(config) if isinstance(config, Mapping) else {}
        settings |= dict(sheet["variants"][sheet["default_variant"]]["config"])
        self.settings = {k: _plain(v) for k, v in settings.items() if not k.startswith("_")}
        self.ints = {k: v for k, v in self.settings.items() if isinstance(v, int) and not isinstance(v, bool) and v > 0}
        self.tries = 0
        self.error = ""
        self.reached = -1

    # sizes ------------------------------------------------------------------------------------------------------------

    def _first(self, *names: str) -> int | None:
        return next((self.ints[n] for n in names if n in self.ints), None)

    def _channels(self) -> list[str]:
        names = ("in_channels", "channels", "num_channels", "latent_channels", "in_dim", "num_latent_channels")
        found = [n for n in names if n in self.ints]
        return found or [n for n in self.ints if "channels" in n and "out" not in n and "caption" not in n][:3]

    def _patch(self) -> int:
        patch = self.settings.get("patch_size")
        if isinstance(patch, list) and patch and isinstance(patch[-1], int):
            return max(1, patch[-1])
        if isinstance(patch, int) and patch > 0:
            return patch
        levels = self.settings.get("block_out_channels") or self.settings.get("down_block_types")
        return 2 ** (len(levels) - 1) if isinstance(levels, list) else 2

    def _pixels(self, video: bool, factor: int, patch: int) -> dict[str, Any]:
        height = self._first("sample_height", "sample_size", "latent_height")
        width = self._first("sample_width", "sample_size", "latent_width")
        size = self.settings.get("sample_size")
        if isinstance(size, list) and len(size) == 2 and all(isinstance(s, int) for s in size):
            height, width = size
        usual = (480, 832) if video else (1024, 1024)
        sides = [usual[i] if s is None else s * factor for i, s in enumerate((height, width))]
        if video and sides[0] * sides[1] > MOST_VIDEO_PIXELS:  # the end of a position table rather than a usual size
            sides = list(usual)
        step = factor * patch
        sides = [max(step, min(16384, s) // step * step) for s in sides]
        return {"vae_factor": factor, "patch": patch, "default_resolution": f"{sides[1]}x{sides[0]}"}

    def _times(self) -> list[tuple[int, int, int]]:
        """(frames a latent frame, first valid count, default frames)."""
        factor = (
            self._first("temporal_compression_ratio", "vae_scale_factor_temporal", "temporal_vae_scale_factor") or 4
        )
        patch = self.settings.get("patch_size_t", self.settings.get("patch_size"))
        patch = patch[0] if isinstance(patch, list) and len(patch) == 3 and isinstance(patch[0], int) else patch
        patch = (
            patch
            if isinstance(patch, int)
            and patch > 0
            and ("patch_size_t" in self.settings or isinstance(self.settings.get("patch_size"), list))
            else 1
        )
        first = factor * (patch - 1) + 1
        out = []
        if (fixed := self._first("video_length", "num_latent_frames")) is not None:
            out.append((1, 1, fixed))
        given = self._first("sample_frames", "num_frames")
        if given is not None and given > 1:
            if (given - first) % (factor * patch) == 0:
                out.append((factor, first, given))
            out.append((factor, first, (given - 1) * factor + 1))
        out.append((factor, first, first + 12 * factor * patch))
        out.append((1, 1, 16))
        return out

    # candidates -------------------------------------------------------------------------------------------------------

    def _main(self) -> list[_Guess]:
        channels = self._channels()
        if not channels:
            channels = ["4", "16"]
        pixel_space = self.ints.get(channels[0]) == 3
        factor, patch = (1 if pixel_space else 8), self._patch()
        images, videos = [], []
        for c in channels:
            h, w = (f"H//{factor}", f"W//{factor}") if factor > 1 else ("H", "W")
            pixels = self._pixels(False, factor, patch)
            images.append(_Guess({"shape": ["B", c, h, w]}, {"pixels": pixels}, "image"))
            step = factor * 2
            tokens = f"(H//{step})*(W//{step})"
            images.append(_Guess({"shape": ["B", tokens, c]}, {"pixels": self._pixels(False, factor, 2)}, "image"))
            for ratio, first, frames in self._times():
                f = f"1+(F-1)//{ratio}" if ratio > 1 else "F"
                table = self._pixels(True, factor, patch) | {
                    "temporal_factor": ratio * max(1, (first - 1) // ratio + 1), "first_frames": first, "default_frames": frames,
                }  # fmt: skip
                videos.append(_Guess({"shape": ["B", c, f, h, w]}, {"pixels": table}, "video"))
                videos.append(_Guess({"shape": ["B", f, c, h, w]}, {"pixels": table}, "video"))
                if {"num_frames", "height", "width"} <= set(self._parameters()):
                    videos.append(
                        _Guess({"shape": ["B", f"({f})*{h}*{w}", c]}, {"pixels": table | {"patch": 1}}, "video")
                    )
        vectors = [
            _Guess({"shape": ["B", n]}, {"pixels": self._pixels(False, factor, 1)}, "image")
            for n in ("embedding_dim",)
            if n in self.ints
        ]
        volume = any(isinstance(m, nn.Conv3d) for m in self.model.modules())
        name = type(self.model).__name__.lower()
        if volume or "3d" in name or "video" in name or "video_length" in self.ints or "sample_frames" in self.ints:
            return videos + images + vectors
        return images + vectors + videos

    def _parameters(self) -> dict[str, inspect.Parameter]:
        found = dict(inspect.signature(type(self.model).forward).parameters)
        found.pop(next(iter(found), ""), None)
        return {
            k: p for k, p in found.items()
            if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and (p.default is p.empty or not _LEFT_OUT.search(k))
        }  # fmt: skip

    def _text_dims(self, argument: str) -> list[str]:
        suffix = next((s for s in ("_t5", "_2", "_3") if argument.endswith(s)), "")
        names = [
            n
            for n in self.ints
            if _TEXT_DIM.search(n) and not re.search(r"pooled|length|len$|num|layers|theta|tokens|seq", n)
        ]
        names.sort(key=lambda n: n.endswith(suffix) if suffix else not re.search(r"_t5$|_[23]$", n), reverse=True)
        if "image" in argument:
            names = [n for n in self.ints if "image" in n and "dim" in n]
        return names

    def _others(self, name: str, required: bool) -> list[_Guess]:
        """Ways to fill an argument beside the first, likely ones first."""
        tokens = "(H//{s})*(W//{s})"
        found: list[_Guess] = []
        if name in _TIME:
            found = [
                _Guess({"shape": ["B"], "fill": "timestep"}),
                _Guess({"shape": ["B"], "fill": "timestep", "dtype": "int64"}),
            ]
        elif "mask" in name:
            found = [_Guess({"shape": ["B", "T"], "dtype": d, "fill": "ones"}) for d in ("bool", "int64")]
            return found if required else [_Guess(None), *found]
        elif "pooled" in name:
            dims = [n for n in self.ints if "pooled" in n]
            found = [_Guess({"shape": ["B", n]}) for n in dims or self._text_dims(name)]
            return found if required or dims else [_Guess(None), *found]
        elif name in ("class_labels", "labels", "y", "class_label"):
            found = [_Guess({"shape": ["B"], "dtype": "int64", "fill": "arange"})]
            wanted = any(self.ints.get(n) for n in ("num_class_embeds", "num_embeds_ada_norm", "num_classes"))
            return found if required else [*found, _Guess(None)] if wanted else [_Guess(None), *found]
        elif name in ("img_ids", "image_ids"):
            found = [_Guess({"shape": [tokens.format(s=16), "3"], "fill": "arange"})]
        elif name in ("txt_ids", "text_ids"):
            found = [_Guess({"shape": ["T", "3"], "fill": "zeros"})]
        elif name == "guidance":
            found = [_Guess({"shape": ["B"], "dtype": "float32", "fill": "ones"})]
            return [_Guess(None), *found] if not self.settings.get("guidance_embeds") and not required else found
        elif name in ("original_size", "target_size", "crop_coords"):
            found = [_Guess({"shape": ["B", "2"], "dtype": "float32", "fill": "arange"})]
        elif name == "added_time_ids":
            each, total = (
                self.ints.get("addition_time_embed_dim", 0),
                self.ints.get("projection_class_embeddings_input_dim", 0),
            )
            found = [_Guess({"shape": ["B", str(total // each if each else 3)]})]
        elif "rotary" in name and any("rotary" in k and v for k, v in self.settings.items()):
            side = f"(H//{8 * self._patch()})*(W//{8 * self._patch()})"
            heads = [n for n in ("attention_head_dim", "head_dim") if n in self.ints]
            frames = [f"(1+(F-1)//{ratio})" if ratio > 1 else "F" for ratio, _, _ in self._times()[:1]]
            thick = self._first("patch_size_t")
            frames = [f"({f}//{thick})" if thick else f for f in frames]
            found = [
                _Guess({"shape": [tokens, head], "dtype": "float32", "list": "2"})
                for head in heads
                for tokens in (*(f"{f}*{side}" for f in frames), side)
            ]
        elif name == "fps":
            found = [_Guess({"shape": ["B"], "dtype": "int64", "fill": "ones"})]
        elif name == "num_frames":
            found = [_Guess({"value": t}) for t in ("1+(F-1)//4", "F")]
        elif name in ("height", "width"):
            found = [_Guess({"value": f"{name[0].upper()}//8"})]
        elif name == "proj_embedding":
            found = [_Guess({"shape": ["B", n]}) for n in ("embedding_dim",) if n in self.ints]
        elif name == "latent_cond" or name.endswith(("noise_cond",)):
            return [_Guess(None)] if not required else []
        elif name.startswith(_TEXT):
            dims = self._text_dims(name)
            found = [_Guess({"shape": ["B", "T", n]}) for n in dims]
            extra = not (name in _TEXT or required)
            if extra or (not dims and not required):
                return [_Guess(None), *found]
        if required:
            return found
        return [*found, _Guess(None)] if found else [_Guess(None)]

    # trying -----------------------------------------------------------------------------------------------------------

    def inputs(self) -> dict[str, Any]:
        """The sheet with inputs, and the tables that go with them.

        Raises:
            InferenceError: no combination runs.
        """
        parameters = self._parameters()
        names = list(parameters)
        if not names:
            raise InferenceError(f"{self.who}: {type(self.model).__name__}.forward takes no arguments; {DECLARE}")
        choices: list[list[_Guess]] = [self._main()]
        for name in names[1:]:
            required = parameters[name].default is inspect.Parameter.empty
            options = self._others(name, required)
            if not options:
                raise InferenceError(
                    f"{self.who}: nothing is known about {name!r}, which {type(self.model).__name__} needs; {DECLARE}"
                )
            choices.append(options)
        end = time.monotonic() + SEARCH_SECONDS
        for known_values in (False, True):
            for picked in _nearest_first(choices):
                if self.tries >= MOST_TRIES * (1 + known_values) or time.monotonic() > end:
                    break
                sheet = self._filled(names, picked, known_values)
                if self.try_one(sheet, known_values) is not None:
                    return sheet
        raise InferenceError(
            f"{self.who}: the inputs of {type(self.model).__name__} could not be found out "
            f"({self.tries} ways tried; the one that got furthest ended with {self.error}); {DECLARE}"
        )

    def _filled(self, names: Sequence[str], picked: Sequence[_Guess], known_values: bool) -> dict[str, Any]:
        sheet = dict(self.sheet)
        sheet["inputs"] = {n: dict(g.spec) for n, g in zip(names, picked, strict=True) if g.spec is not None}
        for guess in picked:
            for table, facts in guess.facts.items():
                sheet[table] = {**facts, **sheet.get(table, {})}
        if "kind" not in self.sheet:
            sheet["kind"] = next((g.kind for g in picked if g.kind), "image")
        if known_values:
            sheet["tracing"] = {"reads_values": True, **sheet.get("tracing", {})}
        return sheet

    def try_one(self, sheet: Mapping[str, Any], known_values: bool, **changes: Any) -> tuple[int, ...] | None:
        """Runs the forward once on the meta device. The output's shape, or None (`error` says what went wrong)."""
        self.tries += 1
        entered = 0

        def enter(*_: Any) -> None:
            nonlocal entered
            entered += 1

        hook = module_hooks.register_module_forward_pre_hook(enter)
        try:
            w = self.workload(sheet, **changes)
            known = stand_ins.KnownValues(one_in(w, self.model)) if known_values else contextlib.nullcontext()
            with build.quiet(), torch.no_grad(), torch.device("meta"):
                inputs, target = build.make_inputs(w, self.model, known_values=known_values)
                with known, meta_autocast():
                    output = predict(build.Job(self.model, inputs, target, w.family.output_stack, None))
            if not isinstance(output, torch.Tensor):
                raise InferenceError(
                    f"the forward returns a {type(output).__name__}, not a tensor or a tuple that begins with one"
                )
            return tuple(output.shape)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001  a wrong guess may fail in any way
            if entered > self.reached:
                self.reached, self.error = entered, _line(error)
            return None
        finally:
            hook.remove()

    def workload(self, sheet: Mapping[str, Any], **changes: Any) -> Workload:
        return from_request({"precision": "fp32", **changes}, sheet=_complete(sheet))


def _nearest_first(choices: Sequence[Sequence[_Guess]]) -> Iterator[tuple[_Guess, ...]]:
    """All combinations; those that depart from the likeliest in few places first, the first argument varied most."""
    main, rest = choices[0], choices[1:]
    indices = list(itertools.islice(itertools.product(*(range(len(c)) for c in rest)), 4096))
    indices.sort(key=lambda picked: (sum(i > 0 for i in picked), sum(picked)))
    for picked in indices:
        for first in main:
            yield (first, *(c[i] for c, i in zip(rest, picked, strict=True)))


def _complete(sheet: Mapping[str, Any]) -> dict[str, Any]:
    """A sheet with what is still missing stood in for, so that it can be tried."""
    text = {"tokens": 64, "padding": "longest", **sheet.get("text", {})}
    return {
        "kind": "image",
        "title": sheet["name"],
        "source": "",
        **sheet,
        "text": text,
        "output": {"shape": ["B"], **sheet.get("output", {})},
        "training": {"objective": "flow", **sheet.get("training", {})},
        "lora": {"targets": ["to_q"], **sheet.get("lora", {})},
        "reduced": {"text_tokens": text["tokens"], **sheet.get("reduced", {})},
    }


# --- what follows once the inputs are known --------------------------------------------------------------------------------


def inferred(reference: str, own: Mapping[str, Any], who: str, label: str, scheduler: str | None) -> dict[str, Any]:
    """The complete sheet of a class that no family has.

    Args:
        reference: ``module:Class``; it must be allowed to be imported.
        own: ``config``, and whatever tables of a sheet its owner declares; the rest is guessed.
        label: name of the variant.
        scheduler: class of the pipeline's scheduler, where known.

    Raises:
        InferenceError: see `DECLARE`.
        BuildError: the class cannot be imported.
    """
    cls = build.model_class(reference)
    config = dict(own.get("config", {}))
    notes: list[str] = []
    if reference.startswith("diffusers:"):
        config, ignored = accepted(cls, config)
        if ignored:
            notes.append(f"ignored: {_some(ignored)}, which {cls.__name__} does not take")
    else:  # a class of diffusers keeps its defaults in `config`; here the sheet does
        config = {k: v for k, v in defaults(cls).items() if _is_setting(v)} | config
    model = build_limited(cls, config, who)
    parameters = sum(p.numel() for p in model.parameters())
    sheet: dict[str, Any] = {
        **{k: v for k, v in own.items() if k != "config"},
        "name": cls.__name__ if reference.startswith("diffusers:") else reference,
        "title": own.get("title", cls.__name__),
        "class": reference,
        "default_variant": label,
        "source": who,
        "variants": {label: {"config": config}},
    }
    structure = discover(model, _regions(sheet))
    if "tokens" not in sheet.get("text", {}):
        sheet["text"] = {"tokens": _text_tokens(model, config), "padding": "longest", **sheet.get("text", {})}
        text_guessed = True
    else:
        sheet["text"] = {"padding": "longest", **sheet["text"]}
        text_guessed = False
    thin = build_limited(cls, config, who)
    thinning.thin(thin, thinning.find_runs(thin, structure))
    sheet, search = _with_inputs(
        sheet, [thin, model] if thinning.find_runs(model, structure) else [model], who, own, notes
    )
    known_values = bool(sheet.get("tracing", {}).get("reads_values"))
    if text_guessed and any(re.search(r"\bT\b", str(leaf)) for s in sheet["inputs"].values() for leaf in _leaves(s)):
        notes.append(f"guessed: text of up to {sheet['text']['tokens']} tokens")
    elif text_guessed:
        sheet["text"] = {**sheet["text"], "tokens": 1}
    if "shape" not in sheet.get("output", {}):
        sheet["output"] = {**sheet.get("output", {}), "shape": _output(search, sheet, known_values, who)}
        if "output" not in own and "inputs" in own:
            notes.append(f"guessed: output [{', '.join(sheet['output']['shape'])}]")
    if not {"vae_factor", "patch"} & own.get("pixels", {}).keys():
        _granularity(search, sheet, known_values, notes)
    training = dict(sheet.get("training", {}))
    if "objective" not in training:
        training["objective"], why = _objective(cls, scheduler)
        notes.append(f"guessed: trained on {training['objective']} ({why}); only `advise run` uses it")
    sheet["training"] = training
    if not sheet.get("lora", {}).get("targets"):
        targets, where = lora_targets(model, structure)
        sheet["lora"] = {"targets": targets}
        notes.append(f"guessed: LoRA targets {', '.join(targets)} ({where})")
    notes.append(_chains_note(structure, bool(sheet.get("regions"))))
    if "reduced" not in own:
        sheet["reduced"] = _reduced(cls, sheet, config, parameters, known_values, who, notes)
    else:
        small = dict(sheet["reduced"])
        w = search.workload(sheet)
        small.setdefault("text_tokens", min(32, sheet["text"]["tokens"]))
        small.setdefault("resolution", min(w.height, w.width))
        small.setdefault("frames", w.frames)
        sheet["reduced"] = small
    sheet["notes"] = notes
    return _complete(sheet)


def _regions(sheet: Mapping[str, Any]) -> dict[str, Any]:
    return dict(catalogue.parse(json.dumps(_complete({**sheet, "inputs": {"x": {"shape": ["B"]}}}))).regions)


def _with_inputs(
    sheet: dict[str, Any], models: list[nn.Module], who: str, own: Mapping[str, Any], notes: list[str]
) -> tuple[dict[str, Any], _Search]:
    """Fills in the inputs where they are not declared; where they are, checks that the model runs with them."""
    if "inputs" in own:
        found = _declared(sheet, notes)
        search = _Search(models[-1], found, who)
        for known_values in (False, True):
            if search.try_one(found, known_values) is not None:
                if known_values:
                    found["tracing"] = {"reads_values": True, **found.get("tracing", {})}
                return found, search
        raise InferenceError(
            f"{who}: {type(models[-1]).__name__} does not run with the declared inputs ({search.error})"
        )
    for i, model in enumerate(models):
        search = _Search(model, sheet, who)
        try:
            found = search.inputs()
        except InferenceError:
            if i == len(models) - 1:
                raise
            continue
        break
    listed = "; ".join(f"{n} {_shown(spec)}" for n, spec in found["inputs"].items())
    left_out = [n for n in search._parameters() if n not in found["inputs"]]
    notes.append(f"guessed: inputs {listed}" + (f"; left out: {', '.join(left_out)}" if left_out else ""))
    pixels = found.get("pixels", {})
    if "pixels" not in own and pixels:
        text = f"guessed: {pixels['vae_factor']} pixels a latent each side"
        if found.get("kind") == "video":
            ratio = next(iter(re.findall(r"\(F-1\)//(\d+)", json.dumps(found["inputs"]))), None)
            text += f", {ratio} frames a latent frame" if ratio else ""
            text += f", {pixels['default_frames']} frames by default"
        notes.append(f"{text}, {pixels['default_resolution']} pixels by default")
    return found, search


def _shown(spec: Mapping[str, Any]) -> str:
    if "shape" not in spec:
        return str(spec.get("value"))
    times = f"{spec['list']} x " if "list" in spec else ""
    return f"{times}[{', '.join(map(str, spec['shape']))}]"


def _declared(sheet: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """A sheet whose owner declares the inputs: kind and pixel geometry follow from the expressions."""
    import math

    texts = " ".join(str(v) for spec in sheet["inputs"].values() for v in _leaves(spec))
    uses = {name for name in "HWFST" if re.search(rf"\b{name}\b", texts)}
    sheet = dict(sheet)
    if "kind" not in sheet:
        sheet["kind"] = "video" if "F" in uses else "audio" if "S" in uses else "image"
    given = dict(sheet.get("pixels", {}))
    if uses & {"H", "W"}:
        divisor = math.lcm(1, *(int(n) for n in re.findall(r"[HW]\s*//\s*(\d{1,4})", texts) if int(n)))
        if "vae_factor" not in given and "patch" not in given:
            given |= {"vae_factor": divisor, "patch": 1}
        if "default_resolution" not in given:
            step = given.get("vae_factor", 1) * given.get("patch", 1)
            given["default_resolution"] = max(1, 1024 // step) * step
            notes.append(f"guessed: {given['default_resolution']} pixels by default")
    if "F" in uses:
        ratios = [int(n) for n in re.findall(r"\(F\s*-\s*1\)\s*//\s*(\d{1,3})", texts)]
        given.setdefault("temporal_factor", ratios[0] if ratios and ratios[0] else 1)
        if "default_frames" not in given:
            given["default_frames"] = given.get("first_frames", 1) + 12 * given["temporal_factor"]
            notes.append(f"guessed: {given['default_frames']} frames by default")
    if given:
        sheet["pixels"] = given
    if sheet["kind"] == "audio":
        sheet["audio"] = {"default_seconds": 30, **sheet.get("audio", {})}
    return sheet


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for v in value.values():
            yield from _leaves(v)
    elif isinstance(value, list):
        for v in value:
            yield from _leaves(v)
    else:
        yield value


def _text_tokens(model: nn.Module, config: Mapping[str, Any]) -> int:
    names = (
        "max_text_seq_length",
        "text_len",
        "max_sequence_length",
        "max_text_length",
        "num_embeddings",
        "caption_length",
    )
    settings: Any = getattr(model, "config", None)
    table = {**(dict(settings) if isinstance(settings, Mapping) else {}), **config}
    return next((table[n] for n in names if isinstance(table.get(n), int) and 0 < table[n] <= 8192), 256)


def _output(search: _Search, sheet: Mapping[str, Any], known_values: bool, who: str) -> list[str]:
    """Expressions for the output's shape, that hold at two sizes where the model takes two."""
    first = search.workload(sheet)
    family = first.family
    multiple = family.pixel_multiple
    changes: list[dict[str, Any]] = [{}]
    if family.kind != "audio":
        # far enough apart, and in steps coarse enough for any patch
        changes.append({"resolution": f"{first.width + 16 * multiple}x{first.height + 32 * multiple}", "batch": 3})
        if family.kind == "video":
            changes[-1]["frames"] = first.frames + family.temporal_factor
    changes.append({"batch": 3})
    main = next(iter(family.inputs)).shape
    points = []
    for change in changes:
        if (shape := search.try_one(sheet, known_values, **change)) is not None:
            points.append((shape, build.symbols(search.workload(sheet, **change), search.model)))
    if not points:
        raise InferenceError(f"{who}: the output's shape could not be found out ({search.error}); {DECLARE}")
    rank = len(points[0][0])
    channels = [
        f"{k}*{n}" if k > 1 else n for n in ("out_channels", "in_channels") for k in (1, 2) if n in points[0][1]
    ]
    out = []
    for axis in range(rank):
        options = [main[axis]] if axis < len(main) and len(main) == rank else []
        options += [*main, "B", *channels, "H", "W", "F", "T", str(points[0][0][axis])]
        for text in options:
            try:
                if all(len(shape) == rank and evaluate(text, names) == shape[axis] for shape, names in points):
                    out.append(text)
                    break
            except ExpressionError:
                continue
        else:
            raise InferenceError(f"{who}: the output's shape {points[0][0]} follows from no input; {DECLARE}")
    return out


def _granularity(search: _Search, sheet: dict[str, Any], known_values: bool, notes: list[str]) -> None:
    """Makes the steps of width and height coarser where the model rounds finer ones (a patch that no config names)."""
    if "pixels" not in sheet:
        return
    first = search.workload(sheet)
    for patch in (1, 2, 4, 8, 16, 32):
        trial = dict(sheet)
        trial["pixels"] = {**sheet["pixels"], "patch": sheet["pixels"].get("patch", 1) * patch}
        step = trial["pixels"]["vae_factor"] * trial["pixels"]["patch"]
        sides = [-(-side // step) * step + step for side in (first.width, first.height)]
        asked = {"resolution": f"{sides[0]}x{sides[1]}"}
        shape = search.try_one(trial, known_values, **asked)
        if shape is None:
            continue
        names = build.symbols(search.workload(trial, **asked), search.model)
        if shape == tuple(evaluate(str(e), names) for e in sheet["output"]["shape"]):
            if patch > 1:
                sheet["pixels"] = trial["pixels"]
                notes.append(f"guessed: width and height in multiples of {step} pixels")
                usual = [-(-s // step) * step for s in (first.width, first.height)]
                sheet["pixels"]["default_resolution"] = f"{usual[0]}x{usual[1]}"
            return


def _objective(cls: type, scheduler: str | None) -> tuple[str, str]:
    if scheduler is not None:
        flow = "Flow" in scheduler
        return ("flow" if flow else "epsilon"), f"its scheduler is {scheduler}"
    if "UNet" in cls.__name__:
        return "epsilon", "it is a UNet"
    return "flow", "no scheduler is known"


_STANDARD = ("to_k", "to_q", "to_v", "to_out.0")


def lora_targets(model: nn.Module, structure: Any) -> tuple[list[str], str]:
    """Names of linears that a LoRA goes into, and what they are: the attention's, else all inside the blocks, else all.

    Raises:
        InferenceError: the model has no linear layer.
    """

    def inside(paths: Sequence[str]) -> list[str]:
        found: Counter[str] = Counter()
        for path in paths:
            for name, m in model.get_submodule(path).named_modules():
                if isinstance(m, nn.Linear):
                    found[
                        name
                        if path in attention
                        else name.rpartition(".")[2]
                        if not name[-1:].isdigit()
                        else ".".join(name.split(".")[-2:])
                    ] += 1
        return [n for n in found if n]

    attention = {a for b in structure.blocks for a in b.attention}
    names = inside(sorted(attention))
    if set(_STANDARD) <= set(names):
        return list(_STANDARD), "linears of the attention"
    names = [n for n in names if "norm" not in n]
    if names:
        return sorted(names)[:16], "linears of the attention"
    names = inside([b.name for b in structure.blocks])
    if names:
        return sorted(names)[:32], "linears of the blocks; no attention was recognised"
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n]
    if not names:
        raise InferenceError(
            f"{type(model).__name__} has no linear layer for a LoRA; give --adapter full with [lora] targets in --model-config"
        )
    return names[:32], "all linears; no blocks were recognised"


def _chains_note(structure: Any, declared: bool) -> str:
    if not structure.chains:
        return "no list of blocks was recognised: nothing can be checkpointed"
    grouped: dict[str, list[Any]] = {}
    for chain in structure.chains:
        grouped.setdefault(re.sub(r"\.\d+\.", ".*.", chain.path), []).extend(chain.blocks)
    parts = []
    for path, blocks in grouped.items():
        kinds = Counter(b.kind for b in blocks)
        regions = sorted({p.removeprefix(f"{b.name}.") for b in blocks for p in b.attention})
        feed = sorted({p.removeprefix(f"{b.name}.") for b in blocks for run in b.feed_forward for p in run})
        text = f"{path} ({', '.join(f'{n} {k}' for k, n in kinds.items())}"
        text += (
            f"; attention {', '.join(regions) or 'not recognised'}; feed-forward {', '.join(feed) or 'not recognised'})"
        )
        parts.append(text)
    return f"{'blocks' if declared else 'guessed: blocks'}: {_some(parts, 6)}"


_DEPTH = re.compile(r"(^|_)(layers|depth|blocks)(_|$)")
_HEADS = re.compile(r"(^|_)(heads)(_|$)")
_WIDTH = re.compile(r"(^|_)(dim|hidden|width|size|channels|features)(_|$)")


def _reduced(
    cls: type[nn.Module],
    sheet: dict[str, Any],
    config: dict[str, Any],
    parameters: int,
    known_values: bool,
    who: str,
    notes: list[str],
) -> dict[str, Any]:
    """A small copy for runs on a CPU: as it is where it is small, else with fewer and narrower blocks, if it runs so."""
    model = build_limited(cls, config, who) if parameters > SMALL_PARAMETERS else None
    base = _Search(build_limited(cls, config, who), sheet, who)
    full = base.workload(_complete(sheet))
    family = full.family
    step = family.pixel_multiple
    sides = sorted({-(-128 // step) * step, -(-256 // step) * step, min(full.height, full.width)})
    frames = sorted({family.first_frames + 2 * family.temporal_factor, full.frames}) if family.kind == "video" else [1]
    texts = sorted({min(32, sheet["text"]["tokens"]), sheet["text"]["tokens"]})
    configs: list[dict[str, Any]] = [{}] if model is None else [*_smaller(base.settings), {}]
    for change in configs:
        try:
            small = base.model if not change else build_limited(cls, {**config, **change}, who)
        except InferenceError:
            continue
        search = _Search(small, sheet, who)
        for side, count, tokens in itertools.product(sides, frames, texts):
            found = {"config": change, "resolution": side, "frames": count, "text_tokens": tokens, "seconds": 1}
            asked: dict[str, Any] = {"resolution": side, "caption_tokens": tokens}
            if family.kind == "video":
                asked["frames"] = count
            trial = dict(sheet)
            trial["variants"] = {sheet["default_variant"]: {"config": {**config, **change}}}
            if search.try_one(trial, known_values, **asked) is not None:
                if change:
                    changed = ", ".join(f"{k}={json.dumps(v)}" for k, v in change.items())
                    notes.append(f"guessed: the reduced copy for a CPU has {changed}")
                elif model is not None:
                    notes.append("no reduced copy was found that runs: a CPU run takes the whole model")
                return found
    notes.append("no reduced copy was found that runs: a CPU run takes the whole model at its own size")
    return {
        "config": {},
        "resolution": min(full.height, full.width),
        "frames": full.frames,
        "text_tokens": full.text_tokens,
    }


def _smaller(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Changes to a config that make a model smaller, most effective first."""
    ints = {k: v for k, v in settings.items() if isinstance(v, int) and not isinstance(v, bool)}
    depth: dict[str, Any] = {k: 4 for k, v in ints.items() if _DEPTH.search(k) and v > 4}
    heads = [k for k, v in ints.items() if _HEADS.search(k) and v > 1]
    each = next((v for k, v in ints.items() if k in ("attention_head_dim", "head_dim")), None)
    for divisor in (8, 6, 4, 3, 2):
        if not heads or any(ints[k] % divisor for k in heads):
            continue
        width: dict[str, Any] = {k: ints[k] // divisor for k in heads}
        inner = {ints[k] * each for k in heads} if each else set()
        tied = {
            k: v // divisor
            for k, v in ints.items()
            if k not in width and (v in inner or (not each and _WIDTH.search(k) and v >= 256)) and v % divisor == 0
        }
        yield {**depth, **width, **tied}
        if tied:
            yield {**depth, **width}
    channels = settings.get("block_out_channels")
    if isinstance(channels, list) and all(isinstance(c, int) for c in channels):
        yield {**depth, "block_out_channels": [64] * len(channels)}
        yield {**depth, "block_out_channels": [max(32, c // 4) for c in channels]}
    if depth:
        yield depth
        yield dict.fromkeys(depth, 2)
