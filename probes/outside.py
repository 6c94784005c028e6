"""Models outside the catalogue: a request that names a folder, a hub id or a class, turned into a complete fact sheet.

The sheet is all that the rest needs: it goes into the workload, the profile's key and the plan file. No torch here; what needs it
(`probes.infer`) is imported when a sheet has to be made, and a sheet of a folder or an id is kept beside the profiles.

Code is imported only from diffusers, from this project, and from where the user says so with --model-class (`allow`).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from probes import catalogue, hub, sheets
from probes.workload import WorkloadError

MOST_BYTES = 2**20

_allowed: set[str] = set()
_made: dict[str, str] = {}
"""Sheets of classes that this process has made, as JSON text; a class may change between processes."""


def allow(reference: str) -> None:
    """The user has asked for this class (``package.module:Class``) by name: it may be imported.

    Raises:
        WorkloadError: not written like that.
    """
    if sheets.CLASS.fullmatch(reference) is None:
        raise WorkloadError(f"--model-class {reference!r} must be written package.module:Class")
    _allowed.add(reference)


def find_beside() -> None:
    """Lets modules in the current folder be imported. It goes last: a user's data.py must not stand in for anything else."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)


def may_import(reference: str) -> bool:
    """Whether a class is one of diffusers, of the catalogue, or allowed by the user."""
    module, _, name = reference.partition(":")
    if module == "diffusers":
        return name.isidentifier() and not name.startswith("_")
    return reference in catalogue.classes() or reference in _allowed


def is_outside(request: Mapping[str, Any]) -> bool:
    """Whether a request is about a model outside the catalogue."""
    model = request.get("model")
    named = any(request.get(k) is not None for k in ("model_class", "model_config", "revision"))
    return named or (isinstance(model, str) and hub.is_outside(model))


def sheet_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """The complete fact sheet of the model that a request is about.

    Raises:
        WorkloadError: with one line that says which option is wrong, or what could not be found out.
    """
    get = {k: v for k, v in request.items() if v is not None}.get
    for key in ("model", "model_class", "model_config", "revision"):
        if not isinstance(get(key, ""), str):
            raise WorkloadError(f"--{key.replace('_', '-')} must be text, not {get(key)!r}")
    reference, file = get("model_class"), get("model_config")
    if reference is not None:
        if get("model") is not None:
            raise WorkloadError(
                "--model and --model-class exclude each other; --model-class takes its config from --model-config"
            )
        if file is None:
            raise WorkloadError(
                f"--model-class {reference} needs --model-config FILE, which holds its constructor arguments"
            )
        for key in ("variant", "revision"):
            if get(key) is not None:
                raise WorkloadError(f"--{key} {get(key)}: a class of your own has none; its config is --model-config")
        if sheets.CLASS.fullmatch(reference) is None:
            raise WorkloadError(f"--model-class {reference!r} must be written package.module:Class")
        if not may_import(reference):
            raise WorkloadError(
                f"--model-class {reference} has to be given on the command line: importing it runs its code"
            )
        return _of_class(reference, file)
    if file is not None:
        raise WorkloadError(f"--model-config {file} goes with --model-class package.module:Class")
    source = get("model", "")
    if not hub.is_outside(source):
        raise WorkloadError(f"--revision {get('revision')}: only a Hugging Face id (--model ORG/NAME) has revisions")
    return _of_source(source, get("revision"), get("variant"))


def _of_source(source: str, revision: str | None, variant: str | None) -> dict[str, Any]:
    component = hub.read(source, revision)
    config = {k: v for k, v in component.config.items() if not k.startswith("_")}
    name = component.config["_class_name"]
    who = f"--model {source}"
    try:
        sheets.config("", config)
        if not isinstance(name, str):
            raise sheets.SheetError(f"'_class_name' must be text, not {name!r}"[:200])
    except sheets.SheetError as error:
        raise WorkloadError(f"{who}: {component.place}: {error}") from None
    table = catalogue.families()
    candidates = [
        (f.name, v) for f in table.values() for v in f.variants if f.of(v).model_class.partition(":")[2] == name
    ]
    if variant is not None:
        fitting = []
        for family, v in candidates:
            try:
                fitting += [(family, v)] if table[family].variant(variant).name == v else []
            except catalogue.UnknownModelError:
                continue
        if not fitting:
            valid = ", ".join(dict.fromkeys(v for _, v in candidates)) or "none"
            raise WorkloadError(
                f"--variant {variant}: {name[:60]!r} is the class of no such variant of the catalogue; valid for {source}: {valid}"
            )
        candidates = fitting

    def make() -> dict[str, Any]:
        from probes import infer

        if not candidates:
            infer.diffusers_class(name, who)
            return infer.inferred(f"diffusers:{name}", {"config": config}, who, source, component.scheduler)
        adapted = infer.adapted(candidates, config, who, source, variant)
        if (problem := infer.fits(adapted, who)) is None:
            return adapted
        note = f"the fact sheet of {adapted['name']} does not fit this config ({problem})"
        try:
            guessed = infer.inferred(adapted["class"], {"config": config}, who, source, component.scheduler)
        except infer.InferenceError:
            return adapted | {"notes": [*adapted["notes"], note]}
        return guessed | {"notes": [f"{note}, so it is taken as a class without one", *guessed["notes"]]}

    sheet = _kept([source, name, config, candidates, variant, component.scheduler], make)
    sheet["notes"] = [*component.notes, *sheet["notes"]]
    return sheet


def _kept(parts: list[Any], make: Any) -> dict[str, Any]:
    """A sheet from the cache, or made now and stored. The cache is data, and checked like any sheet."""
    from probes import store

    facts: dict[str, Any] = {"code": store.code_digest(), "versions": store.versions(), "parts": parts}
    facts["sheets"] = [catalogue.specialised_sheet(f, v) for f, v in parts[3]]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]
    name = f"sheet-{digest}.json"
    if stored := store.read_small(name):
        try:
            catalogue.parse(json.dumps(stored, sort_keys=True))
            return stored
        except (sheets.SheetError, RecursionError):
            pass
    sheet: dict[str, Any] = make()
    store.write_small(name, sheet)
    return sheet


def _of_class(reference: str, file: str) -> dict[str, Any]:
    own = _own(file)
    find_beside()
    from probes import build, infer

    try:
        code = "" if reference.startswith("diffusers:") else source_digest(reference)
        key = json.dumps([reference, Path(file).name, own, code], sort_keys=False)
        if key not in _made:
            sheet = infer.inferred(reference, own, f"--model-class {reference}", Path(file).name, None)
            _made[key] = json.dumps(sheet | ({"code": code} if code else {}))
    except build.BuildError as error:
        raise WorkloadError(f"--model-class {error}") from None
    return dict(json.loads(_made[key]))


def _own(file: str) -> dict[str, Any]:
    """What --model-config holds: tables of a fact sheet with ``config``, or constructor arguments alone."""
    who = f"--model-config {file}"
    try:
        path = Path(file).expanduser()
        if not path.is_file():
            raise WorkloadError(f"{who}: {'is not a file' if path.exists() else 'no such file'}")
        if path.stat().st_size > MOST_BYTES:
            raise WorkloadError(f"{who}: is larger than a config can be ({MOST_BYTES // 2**20} MiB)")
        text = path.read_text("utf-8")
        content: Any = (
            json.loads(text) if path.suffix == ".json" or text.lstrip().startswith("{") else tomllib.loads(text)
        )
    except WorkloadError:
        raise
    except OSError as error:
        raise WorkloadError(f"{who}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise WorkloadError(f"{who}: not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise WorkloadError(
            f"{who}: not valid {'JSON' if path.suffix == '.json' else 'TOML or JSON'} ({error})"
        ) from None
    try:
        content = json.loads(json.dumps(content))  # dates are no settings
    except (TypeError, ValueError) as error:
        raise WorkloadError(f"{who}: {error}") from None
    if not isinstance(content, dict):
        raise WorkloadError(f"{who}: must be a table, not {type(content).__name__}")
    if "config" not in content and "inputs" not in content:
        content = {"config": {k: v for k, v in content.items() if not k.startswith("_")}}
    try:
        sheets.check_own(content)
    except sheets.SheetError as error:
        raise WorkloadError(f"{who}: {error}") from None
    if path.suffix != ".json":
        content["config"] = catalogue.without_none_text(content.get("config", {}))
    return dict(content)


def source_digest(reference: str) -> str:
    """Of the source of a class's module and of what it imports from beside it (same package, or same folder).

    The class has to be importable and allowed.
    """
    from probes import build

    module = sys.modules[build.model_class(reference).__module__]
    top = module.__name__.partition(".")[0]
    folder = Path(str(getattr(module, "__file__", ""))).parent
    beside = "." not in module.__name__ and "site-packages" not in folder.parts
    found = {}
    for name, other in list(sys.modules.items()):
        path = getattr(other, "__file__", None)
        if not isinstance(path, str) or not path.endswith(".py"):
            continue
        if name == "__main__":
            continue
        if name.partition(".")[0] == top or (beside and Path(path).parent == folder):
            found[name] = path
    digest = hashlib.sha256()
    for name in sorted(found):
        digest.update(name.encode() + b"\0")
        try:
            digest.update(Path(found[name]).read_bytes())
        except OSError:
            digest.update(b"?")
    return digest.hexdigest()[:24]
