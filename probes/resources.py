"""Reads the facts in `data/` as package resources, so that they are found in a checkout and in an installed wheel alike.

Names are relative to `data/` with forward slashes (``gpus.csv``, ``families/flux.toml``); contents are UTF-8 text.
"""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable

_PACKAGE = "checkpoint_advisor_data"


class ResourceError(LookupError):
    """A file or folder that the package does not carry was asked for."""


def text(name: str) -> str:
    """The contents of one file.

    Raises:
        ResourceError: there is no such file; the message lists the ones beside it.
    """
    resource = _find(name)
    if not resource.is_file():
        folder = name.rpartition("/")[0]
        valid = names(folder) if _find(folder).is_dir() else names("")
        raise ResourceError(f"no data file {name!r}; valid in {folder or 'data'!r}: {', '.join(valid) or 'none'}")
    return resource.read_text(encoding="utf-8")


def names(folder: str = "") -> list[str]:
    """The names of the data files directly inside `folder` (the empty string: `data/` itself), sorted, without the folder.

    Raises:
        ResourceError: there is no such folder.
    """
    resource = _find(folder)
    if not resource.is_dir():
        raise ResourceError(f"no data folder {folder!r}")
    return sorted(
        entry.name for entry in resource.iterdir() if entry.is_file() and not entry.name.endswith((".py", ".pyc"))
    )


def _find(name: str) -> Traversable:
    parts = [part for part in name.split("/") if part]
    if ".." in parts:
        raise ResourceError(f"a data file's name stays inside data/, {name!r} does not")
    resource: Traversable = files(_PACKAGE)
    for part in parts:
        resource = resource.joinpath(part)
    return resource
