"""The vocabulary of fact sheets, checked: for sheets that people write, and for those that a plan file brings along.

A sheet is data. What it may hold is listed here, with bounds that keep a damaged or hostile one from doing harm (huge lists,
endless expressions). No torch here.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

DTYPES = (
    "compute", "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip
FILLS = ("normal", "uniform", "timestep", "ones", "zeros", "arange", "range", "runs", "grid", "axes")
KINDS = ("image", "video", "audio")
OBJECTIVES = ("flow", "epsilon", "velocity", "tokens")
NOISES = ("linear", "scaled_linear", "cosine")
PADDINGS = ("max_length", "longest")
CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
"""``package.module:Class``."""

LARGEST = 2**31
MOST_ENTRIES = 2000
LONGEST_TEXT = 4000
LARGEST_SETTING = 20_000_000
"""Whole numbers in a config that may be sizes; the largest that models have are vocabularies."""
MOST_BLOCKS = 10_000
LARGEST_SIDE = 16_384
_DEPTH = re.compile(r"(^|_)(layers?|depths?|blocks?|stages?)(_|$)")
_NO_SIZE = re.compile(r"theta|base|scale|factor")
_SIDE = re.compile(r"(^|_)(sample|image|input|latent)_(size|height|width)$")


class SheetError(ValueError):
    """A fact sheet is not valid; the message names the entry and what it may be."""


Check = Callable[[str, Any], None]


def _fail(where: str, wanted: str, value: Any) -> SheetError:
    shown = "a table" if isinstance(value, dict) else "a list" if isinstance(value, list) else repr(value)[:60]
    return SheetError(f"{where!r} must be {wanted}, not {shown}")


def _whole(least: int, most: int = LARGEST) -> Check:
    def check(where: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise _fail(where, f"a whole number from {least} to {most}", value)

    return check


def _fraction(where: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise _fail(where, "a number between 0 and 1", value)


def _text(where: str, value: Any) -> None:
    if not isinstance(value, str) or len(value) > LONGEST_TEXT:
        raise _fail(where, "text", value)


def _flag(where: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise _fail(where, "true or false", value)


def _expression(where: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (str, int)) or len(str(value)) > 200:
        raise _fail(where, "a whole number or an expression such as 'H//8'", value)


def _one_of(valid: tuple[str, ...]) -> Check:
    def check(where: str, value: Any) -> None:
        if value not in valid:
            near = difflib.get_close_matches(str(value), valid, n=1, cutoff=0.5)
            raise _fail(where, f"one of {', '.join(valid)}{f' (did you mean {near[0]}?)' if near else ''}", value)

    return check


def _list(entry: Check) -> Check:
    def check(where: str, value: Any) -> None:
        if not isinstance(value, list) or len(value) > MOST_ENTRIES:
            raise _fail(where, "a list", value)
        for i, v in enumerate(value):
            entry(f"{where}[{i}]", v)

    return check


def _pair(where: str, value: Any) -> None:
    if not isinstance(value, list) or len(value) != 2:
        raise _fail(where, "a pair (how many, value)", value)
    for v in value:
        _expression(where, v)


def _table(entry: Check) -> Check:
    def check(where: str, value: Any) -> None:
        if not isinstance(value, dict) or len(value) > MOST_ENTRIES:
            raise _fail(where, "a table", value)
        for k, v in value.items():
            _text(where, k)
            entry(f"{where}.{k}", v)

    return check


def _of(entries: Mapping[str, Check], needed: tuple[str, ...] = ()) -> Check:
    def check(where: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise _fail(where, "a table", value)
        for k, v in value.items():
            path = f"{where}.{k}" if where else str(k)
            if k not in entries:
                near = difflib.get_close_matches(str(k), list(entries), n=1, cutoff=0.6)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise SheetError(f"{path!r} is not known{hint}; valid here: {', '.join(entries)}")
            entries[k](path, v)
        for k in needed:
            if k not in value:
                raise SheetError(f"{f'{where}.{k}' if where else k!r} is missing")

    return check


def _size(where: str, value: Any) -> None:
    if isinstance(value, str) and (match := re.fullmatch(r"(\d{1,5})x(\d{1,5})", value)):
        sides = [int(s) for s in match.groups()]
    elif isinstance(value, int) and not isinstance(value, bool):
        sides = [value]
    else:
        raise _fail(where, "a size in pixels, 1024 or '832x480' (width x height)", value)
    if not all(1 <= s <= LARGEST_SIDE for s in sides):
        raise _fail(where, f"a size of at most {LARGEST_SIDE} pixels a side", value)


def _nested(where: str, value: Any, depth: int = 0) -> None:
    if depth > 8:
        raise SheetError(f"{where!r} is nested too deeply")
    if isinstance(value, list):
        if len(value) > MOST_ENTRIES:
            raise _fail(where, "a shorter list", value)
        for v in value:
            _nested(where, v, depth + 1)
    elif isinstance(value, dict):
        for v in value.values():
            _nested(where, v, depth + 1)
    elif isinstance(value, str):
        _expression(where, value)


def config(where: str, value: Any, depth: int = 0) -> None:
    """Constructor arguments: plain values of a sane size.

    Raises:
        SheetError: naming the entry.
    """
    if depth > 8:
        raise SheetError(f"{where!r} is nested too deeply")
    if isinstance(value, dict):
        if len(value) > MOST_ENTRIES:
            raise _fail(where, "a smaller table", value)
        for k, v in value.items():
            config(f"{where}.{k}" if where else str(k), v, depth + 1)
    elif isinstance(value, list):
        if len(value) > MOST_ENTRIES:
            raise _fail(where, f"a list of at most {MOST_ENTRIES} entries", value)
        for v in value:
            config(where, v, depth + 1)
    elif isinstance(value, str):
        _text(where, value)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise _fail(where, "a finite number", value)
    elif isinstance(value, int) and not isinstance(value, bool):
        name = where.rpartition(".")[2]
        most = LARGEST if _NO_SIZE.search(name) else LARGEST_SETTING
        most = MOST_BLOCKS if _DEPTH.search(name) else LARGEST_SIDE if _SIDE.search(name) else most
        if abs(value) > most:
            raise SheetError(f"{where!r} is {value}; no model has more than {most}")
    elif value is not None and not isinstance(value, bool):
        raise _fail(where, "a plain value", value)


def _class(where: str, value: Any) -> None:
    if not isinstance(value, str) or CLASS.fullmatch(value) is None:
        raise _fail(where, "package.module:Class", value)


_INPUT = _of(
    {
        "shape": _list(_expression), "dtype": _one_of(DTYPES), "fill": _one_of(FILLS), "list": _expression,
        "start": _expression, "runs": _list(_pair), "grid": _list(_expression), "value": _nested, "when": _expression,
        "needs_values": _flag,
    }
)  # fmt: skip
_REGIONS = _of(
    {
        "attention": _list(_text), "feed_forward": _list(_list(_text)), "trainer_ffn_start": _text, "groupable": _flag,
        "checkpointed": _flag,
    }
)  # fmt: skip
_SYMBOLS = _table(_whole(0))
TABLES: dict[str, Check] = {
    "symbols": _SYMBOLS,
    "pixels": _of(
        {
            "vae_factor": _whole(1, 1024), "patch": _whole(1, 1024), "temporal_factor": _whole(1, 1024),
            "first_frames": _whole(1, 4096), "min_side": _whole(1), "max_side": _whole(1), "max_pixels": _whole(1), "max_frames": _whole(1),
            "default_resolution": _size, "default_frames": _whole(1, 4096),
        }
    ),
    "audio": _of({"default_seconds": _whole(1, 36000), "max_seconds": _whole(1, 36000)}),
    "references": _of({"default": _whole(0, 100), "most": _whole(0, 100)}),
    "text": _of({"tokens": _whole(1, 1_000_000), "padding": _one_of(PADDINGS), "template_tokens": _whole(0, 1_000_000)}),
    "inputs": _table(_INPUT),
    "output": _of({"shape": _list(_expression), "stack": _flag, "order": _text, "sizes": _SYMBOLS}),
    "training": _of(
        {
            "objective": _one_of(OBJECTIVES), "reversed": _flag, "negated": _flag, "max_batch": _whole(1),
            "noise": _of({"kind": _one_of(NOISES), "start": _fraction, "end": _fraction, "steps": _whole(1, 100_000)}),
        }
    ),
    "lora": _of({"targets": _list(_text)}),
    "regions": _table(_REGIONS),
    "tracing": _of({"reads_values": _flag, "unknown_selection": _expression}),
    "reduced": _of(
        {
            "config": config, "resolution": _whole(1, LARGEST_SIDE), "frames": _whole(1, 4096),
            "text_tokens": _whole(1, 1_000_000), "seconds": _whole(1, 36000), "symbols": _SYMBOLS,
        }
    ),
}  # fmt: skip
"""What a sheet, or a variant of a sheet in the catalogue, may say."""

_HEAD: dict[str, Check] = {
    "name": _text, "title": _text, "kind": _one_of(KINDS), "aliases": _list(_text), "class": _class,
    "default_variant": _text, "source": _text, "notes": _list(_text), "code": _text,
}  # fmt: skip
_VARIANT: dict[str, Check] = {
    "title": _text, "aliases": _list(_text), "config": config, "parameters": _whole(1, 2**50), "text_tokens": _whole(1),
    "skip_inputs": _list(_text),
}  # fmt: skip
_NEEDED = (
    *("name", "title", "kind", "class", "default_variant", "source", "variants", "text", "inputs", "output"),
    *("training", "lora", "reduced"),
)


def check(sheet: Any, *, overrides: bool = False) -> None:
    """Checks a complete sheet.

    Args:
        overrides: variants may say tables anew, as those of the catalogue do.

    Raises:
        SheetError: naming the entry and what it may be.
    """
    variant = _VARIANT | (TABLES | {"class": _class, "notes": _list(_text)} if overrides else {})
    _of(_HEAD | TABLES | {"variants": _table(_of(variant))}, _NEEDED)("", sheet)
    if sheet["default_variant"] not in sheet["variants"]:
        raise SheetError(f"'default_variant' is {sheet['default_variant']!r}, which is none of the variants")
    for path, key in (("text", "tokens"), ("text", "padding"), ("output", "shape"), ("training", "objective")):
        if key not in sheet[path]:
            raise SheetError(f"'{path}.{key}' is missing")
    if not sheet["inputs"]:
        raise SheetError("'inputs' is empty; the model's forward takes at least one tensor")
    if not sheet["lora"].get("targets") or "text_tokens" not in sheet["reduced"]:
        raise SheetError("'lora.targets' or 'reduced.text_tokens' is missing")


def check_own(sheet: Any) -> None:
    """Checks what a person writes about a model of their own: any of the tables, and ``config``.

    Raises:
        SheetError: naming the entry and what it may be.
    """
    _of({"title": _text, "kind": _one_of(KINDS), "config": config, **TABLES})("", sheet)
