"""Reads a diffusers model's config: from a local folder, or from the Hugging Face hub, of which only the config is downloaded.

Nothing here imports torch or runs anything that it reads. The hub's own client does the downloading, so HF_ENDPOINT, HF_HOME,
HF_HUB_OFFLINE, tokens and the timeouts HF_HUB_ETAG_TIMEOUT and HF_HUB_DOWNLOAD_TIMEOUT (seconds) mean what they mean everywhere.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from probes.workload import WorkloadError

COMPONENTS = ("transformer", "unet", "prior")
"""Folders of a pipeline that hold the model that is trained."""
MOST_BYTES = 2**20
"""No config is larger."""
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
"""ORG/NAME."""


@dataclass(frozen=True)
class Component:
    """The config of one model, as it was found."""

    config: dict[str, Any]
    place: str
    """The file, for people."""
    scheduler: str | None = None
    """Class of the pipeline's scheduler, where there is a pipeline."""
    notes: tuple[str, ...] = ()


def is_outside(name: str) -> bool:
    """Whether a model's name is a folder or a hub id rather than a name of the catalogue."""
    return "/" in name or "\\" in name or name.startswith((".", "~"))


def read(source: str, revision: str | None = None) -> Component:
    """The config of a local folder (a component, or a pipeline that holds one) or of a hub repository.

    Raises:
        WorkloadError: there is none, or it cannot be had.
    """
    if "\0" in source or len(source) > LONGEST_NAME:
        raise WorkloadError(f"--model {source[:60]!r}: not a folder or a Hugging Face id")
    try:
        folder = Path(source).expanduser()
        exists = folder.exists()
    except (OSError, RuntimeError) as error:
        raise WorkloadError(f"--model {source}: {error}") from None
    if exists:
        if revision is not None:
            raise WorkloadError(
                f"--revision {revision}: {source} is a local folder; only a Hugging Face id has revisions"
            )
        return _local(source, folder)
    if source.startswith((".", "/", "~")) or REPOSITORY.fullmatch(source) is None:
        raise WorkloadError(f"--model {source}: no such folder, and no Hugging Face id (ORG/NAME) either")
    return _remote(source, revision)


LONGEST_NAME = 1000


def _local(source: str, folder: Path) -> Component:
    if not folder.is_dir():
        raise WorkloadError(f"--model {source}: is a file; give the folder that holds config.json")

    def fetch(name: str) -> Path | None:
        path = folder / name
        return path if path.is_file() else None

    return _component(source, fetch, folder.name)


def _component(source: str, fetch: Callable[[str], Path | None], here: str) -> Component:
    """The component in a folder whose files `fetch` finds (None: not there)."""
    index_file = fetch("model_index.json")
    index = {} if index_file is None else _json(source, index_file, "model_index.json")
    named = [c for c in COMPONENTS if _class_of(index, c) is not None]
    notes = []
    tried = [f"{c}/config.json" for c in named] if named else ["config.json", *(f"{c}/config.json" for c in COMPONENTS)]
    for name in tried:
        if (path := fetch(name)) is None:
            continue
        config = _json(source, path, name)
        if "_class_name" not in config:
            raise WorkloadError(
                f"--model {source}: {name} names no _class_name, so it is not a diffusers model's config; "
                "describe the model with --model-class and --model-config"
            )
        others = [k for k in index if k not in named[:1] and re.fullmatch(r"(transformer|unet|prior)(_\d+)?", k)]
        if others:
            notes.append(f"{source} also holds {', '.join(others)}; the plan is for {name.partition('/')[0]}")
        return Component(config, f"{source.rstrip('/')}/{name}", _class_of(index, "scheduler"), tuple(notes))
    raise WorkloadError(f"--model {source}: no diffusers config in it (looked for {', '.join(tried)})")


def _class_of(index: dict[str, Any], name: str) -> str | None:
    entry = index.get(name)
    if isinstance(entry, list) and len(entry) == 2 and all(isinstance(e, str) for e in entry):
        return str(entry[1])
    return None


def _json(source: str, path: Path, name: str) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            raise WorkloadError(f"--model {source}: {name} is larger than a config can be ({MOST_BYTES // 2**20} MiB)")
        content = json.loads(raw.decode("utf-8"))
    except OSError as error:
        raise WorkloadError(f"--model {source}: {name} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise WorkloadError(f"--model {source}: {name} is not JSON text ({path})") from None
    if not isinstance(content, dict):
        raise WorkloadError(f"--model {source}: {name} is not a JSON object")
    return content


@lru_cache(maxsize=64)
def _remote(source: str, revision: str | None) -> Component:
    from huggingface_hub import constants, hf_hub_download, utils
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    etag_seconds, download_seconds = constants.HF_HUB_ETAG_TIMEOUT, constants.HF_HUB_DOWNLOAD_TIMEOUT
    offline = bool(constants.HF_HUB_OFFLINE)
    why = "HF_HUB_OFFLINE is set" if offline else _unreachable(source, revision, etag_seconds)
    found: list[Path] = []

    def fetch(name: str) -> Path | None:
        def get() -> Path:
            with _without_bars(utils):
                return Path(
                    hf_hub_download(
                        source, name, revision=revision, etag_timeout=etag_seconds, local_files_only=why is not None
                    )
                )

        try:
            found.append(_within(etag_seconds + download_seconds, get))
        except LocalEntryNotFoundError:
            if why is None:
                raise
            return None
        except EntryNotFoundError:
            return None
        return found[-1]

    at = f"{constants.ENDPOINT}/{source}" + (f" (revision {revision})" if revision else "")
    try:
        component = _component(source, fetch, source)
    except WorkloadError:
        if why is None or found:
            raise
        raise WorkloadError(f"--model {source}: {why}, and its config is not in the cache") from None
    except Exception as error:  # noqa: BLE001  the hub's client raises what its HTTP library does
        raise WorkloadError(f"--model {source}: {_explained(error, at, revision)}") from None
    commit = re.search(r"snapshots[\\/]([0-9a-f]{7,40})[\\/]", str(found[-1]))
    origin = f"the config of {source} at revision {commit[1][:12] if commit else revision or 'main'}"
    if why is not None:
        origin += f", from the cache ({why})"
    return Component(component.config, component.place, component.scheduler, (origin, *component.notes))


def _unreachable(source: str, revision: str | None, seconds: float) -> str | None:
    """Why the hub does not answer; None: it does (whatever it says about the model)."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    def ask() -> Any:
        return get_hf_file_metadata(hf_hub_url(source, "model_index.json", revision=revision), timeout=seconds)

    try:
        _within(seconds + 1, ask)
    except HfHubHTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", 0)
        return f"{constants.ENDPOINT} answers with status {status}" if status >= 500 else None
    except Exception as error:  # noqa: BLE001  the hub's client raises what its HTTP library does
        return f"{constants.ENDPOINT} cannot be reached ({_first_line(error)})"
    return None


def _within(seconds: float, work: Callable[[], Any]) -> Any:
    """What `work` returns or raises, or TimeoutError. A worker that hangs is left behind; it ends with the process."""
    outcome: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            outcome.append((True, work()))
        except BaseException as error:  # noqa: BLE001  handed on to the caller
            outcome.append((False, error))

    worker = threading.Thread(target=run, daemon=True)
    worker.start()
    worker.join(seconds)
    if not outcome:
        raise TimeoutError(f"no answer in {seconds:g} s")
    done, value = outcome[0]
    if not done:
        raise value
    return value


class _without_bars:
    """The hub's progress bars off, for files of a few KiB."""

    def __init__(self, utils: Any) -> None:
        self.utils = utils

    def __enter__(self) -> None:
        self.off = self.utils.are_progress_bars_disabled()
        if not self.off and os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS") is None:
            self.utils.disable_progress_bars()

    def __exit__(self, *_: Any) -> None:
        if not self.off and os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS") is None:
            self.utils.enable_progress_bars()


def _explained(error: Exception, at: str, revision: str | None) -> str:
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    match error:
        case GatedRepoError():
            return (
                f"{at} is gated: accept its terms on the website and set HF_TOKEN (or describe it with --model-class)"
            )
        case RevisionNotFoundError():
            return f"it has no revision {revision!r}"
        case RepositoryNotFoundError():
            return f"no such repository at {at}, or a private one (set HF_TOKEN)"
        case HFValidationError():
            return f"not a Hugging Face id ({_first_line(error)})"
        case OSError() if getattr(error, "strerror", None) and getattr(error, "filename", None):
            return f"the hub's cache: {error.filename}: {error.strerror}"
    return f"the config could not be downloaded from {at} ({_first_line(error)})"


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
