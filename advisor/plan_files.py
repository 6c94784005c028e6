"""Reads plan files back: what `Plan.save` wrote, checked as strictly as a request. A plan is data; nothing in it is executed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from advisor.api import PLAN_FORMAT, PlanError
from decision_rules.ladder import Objective
from decision_rules.support import Executor
from estimators.devices import DeviceKind
from estimators.estimate import GIB, Estimate
from estimators.schedule import Schedule
from probes import catalogue, outside
from probes.catalogue import UnknownModelError
from probes.sheets import SheetError
from probes.workload import REQUEST_KEYS, Workload, WorkloadError, from_request, reduced_copy

MAX_BYTES = 16 * 2**20
"""No plan is larger; a bigger file is something else."""

MOST = 1e9
"""No figure of a plan is larger."""

_AGAIN = "make it again with `advise --model ... --plan FILE`"


@dataclass(frozen=True)
class LoadedPlan:
    """A plan as read from a file: what to train, on what, how, and what was predicted."""

    path: Path
    workload: Workload
    device_name: str
    device_kind: DeviceKind
    usable_bytes: int
    """The device's memory that a process can take, as planned."""
    executor: Executor
    objective: Objective
    profile_source: str
    """``traced`` or ``measured``."""
    recommended: Estimate
    """The chosen schedule and its predicted figures (rounded as the file is)."""
    schedules: tuple[Estimate, ...]
    """The supported schedules of the plan's table, in its order."""
    reasons: tuple[str, ...]
    versions: Mapping[str, str]
    """Of the packages that the plan was made with."""
    notes: tuple[str, ...] = ()
    """What is different now from when the plan was made."""

    @property
    def schedule(self) -> Schedule:
        return self.recommended.schedule


class _Reader:
    """Typed access to a JSON object; errors name the key by its path in the file."""

    def __init__(self, name: str, content: Any, where: str = "", kind: str = "plan", again: str = _AGAIN) -> None:
        self.name, self.where, self.kind, self.again = name, where, kind, again
        if not isinstance(content, dict):
            raise PlanError(f"{name}: {where or f'the {kind}'} must be a JSON object, not {_kind(content)}; {again}")
        self.content: dict[str, Any] = content

    def _path(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def value(self, key: str) -> Any:
        if key not in self.content:
            raise PlanError(f"{self.name}: {self._path(key)!r} is missing; {self.again}")
        return self.content[key]

    def _wrong(self, key: str, wanted: str) -> PlanError:
        return PlanError(
            f"{self.name}: {self._path(key)!r} must be {wanted}, not {_kind(self.content[key])}; {self.again}"
        )

    def object(self, key: str) -> _Reader:
        return _Reader(self.name, self.value(key), self._path(key), self.kind, self.again)

    def text(self, key: str) -> str:
        if not isinstance(value := self.value(key), str):
            raise self._wrong(key, "text")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        if not isinstance(value := self.value(key), list) or not all(isinstance(v, str) for v in value):
            raise self._wrong(key, "a list of texts")
        return tuple(value)

    def flag(self, key: str) -> bool:
        if not isinstance(value := self.value(key), bool):
            raise self._wrong(key, "true or false")
        return value

    def number(self, key: str, most: float = MOST) -> float:
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
            raise self._wrong(key, f"a number from 0 to {most:g}")
        return float(value)

    def number_or_none(self, key: str) -> float | None:
        return None if self.value(key) is None else self.number(key)

    def bytes(self, key: str) -> int:
        return round(self.number(key) * GIB)

    def one_of(self, key: str, valid: list[str]) -> str:
        if (value := self.text(key)) not in valid:
            raise PlanError(f"{self.name}: {self._path(key)!r} is {value!r}; valid: {', '.join(valid)}")
        return value


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return json.dumps(value)
    names = {dict: "an object", list: "a list", type(None): "null"}
    return names.get(type(value), repr(value)[:60])


def load(path: str | Path, *, model_class: str | None = None) -> LoadedPlan:
    """Reads a plan file.

    Args:
        model_class: allows importing this class (``package.module:Class``) if it is the one that the plan is for. Without it
            only classes of diffusers and of the catalogue are.

    Raises:
        PlanError: the file is missing, too large, not a plan, of another format or damaged; one line that says which.
    """
    path = Path(path)
    content = _parse(path)
    top = _Reader(str(path), content)
    if "plan_format" not in content:
        raise PlanError(f"{path}: not a plan file (no plan_format); {_AGAIN}")
    if type(content["plan_format"]) is not int or content["plan_format"] != PLAN_FORMAT:
        versions = content.get("versions")
        made_by = versions.get("checkpoint-advisor") if isinstance(versions, dict) else None
        by = f" (made by version {made_by})" if isinstance(made_by, str) else ""
        raise PlanError(
            f"{path}: plan format {content['plan_format']!r}{by}, this version reads format {PLAN_FORMAT}; {_AGAIN}"
        )
    device = top.object("device")
    if top.value("recommended") is None:
        raise PlanError(f"{path}: nothing fits in this plan, so it has no schedule to run")
    recommended = top.object("recommended")
    workload = _workload(top.object("workload"))
    notes = _check_class(path, workload.family, model_class)
    versions_found = top.object("versions")
    return LoadedPlan(
        path=path,
        workload=workload,
        device_name=device.text("name"),
        device_kind=DeviceKind(device.one_of("kind", [k.value for k in DeviceKind])),
        usable_bytes=device.bytes("usable_gib"),
        executor=Executor(top.one_of("executor", [e.value for e in Executor])),
        objective=Objective(top.one_of("objective", [o.value for o in Objective])),
        profile_source=top.one_of("profile", ["traced", "measured"]),
        recommended=_estimate(recommended),
        schedules=_table(top),
        reasons=recommended.texts("reasons"),
        versions={key: versions_found.text(key) for key in versions_found.content},
        notes=notes,
    )


load_plan = load
"""The name that `import advisor` offers."""


def _table(top: _Reader) -> tuple[Estimate, ...]:
    entries = top.value("schedules")
    if not isinstance(entries, list):
        raise PlanError(f"{top.name}: 'schedules' must be a list, not {_kind(entries)}; {_AGAIN}")
    readers = [_Reader(top.name, entry, f"schedules[{i}]") for i, entry in enumerate(entries)]
    return tuple(_estimate(reader) for reader in readers if reader.flag("supported"))


def _check_class(path: Path, family: catalogue.Family, allowed: str | None) -> tuple[str, ...]:
    """Code is imported only where the user names it. Returns what has changed since the plan was made."""
    reference = family.model_class
    own = reference.partition(":")[0] != "diffusers" and reference not in catalogue.classes()
    if allowed is not None and allowed != reference:
        raise PlanError(f"{path}: --model-class {allowed}: the plan is for {reference}")
    if not own:
        return ()
    if allowed is None:
        raise PlanError(
            f"{path}: the plan is for {reference}, and importing that runs its code; give --model-class {reference} to allow it"
        )
    outside.allow(reference)
    outside.find_beside()
    from probes.build import BuildError

    try:
        now = outside.source_digest(reference)
    except BuildError as error:
        raise PlanError(f"{path}: --model-class {error}") from None
    return () if now == family.code else (f"the source of {reference} has changed since {path} was made",)


def _parse(path: Path) -> dict[str, Any]:
    try:
        if not path.exists():
            raise PlanError(f"{path}: no such file; {_AGAIN}")
        if not path.is_file():
            raise PlanError(f"{path}: not a file; give the plan file itself")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise PlanError(
                f"{path}: {size / 2**20:.0f} MiB is too large for a plan (at most {MAX_BYTES // 2**20} MiB)"
            )
        raw = path.read_bytes()
    except OSError as error:
        raise PlanError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        content = json.loads(raw.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise PlanError(
            f"{path}: not complete JSON (line {error.lineno}, column {error.colno}: {error.msg}), perhaps cut off; {_AGAIN}"
        ) from None
    except (ValueError, RecursionError):
        raise PlanError(f"{path}: not a JSON text; {_AGAIN}") from None
    if not isinstance(content, dict):
        raise PlanError(f"{path}: a plan is a JSON object, this is {_kind(content)}; {_AGAIN}")
    return content


SIZES = ("resolution", "frames", "seconds", "references", "caption_tokens")


def workload_of(content: Any, name: str, kind: str, again: str) -> Workload:
    """The job that another file describes as plans do (`Workload.describe`). Imports no code and asks no network.

    Args:
        name: of the file, for messages; `kind`: what it is; `again`: how to make a new one.

    Raises:
        PlanError: it cannot be read back exactly.
    """
    workload = _workload(_Reader(name, content, "workload", kind, again))
    reference = workload.family.model_class
    if reference.partition(":")[0] != "diffusers" and reference not in catalogue.classes():
        raise PlanError(f"{name}: the {kind} is for {reference}, and importing that would run its code")
    return workload


def _workload(stored: _Reader) -> Workload:
    name, kind = stored.name, stored.kind
    for key in ("model", "variant"):
        stored.text(key)
    reduced = stored.flag("reduced")
    height, width = stored.value("height"), stored.value("width")
    given = {k: stored.content[k] for k in REQUEST_KEYS if k in stored.content} | {"resolution": f"{width}x{height}"}
    given["buckets"] = stored.value("buckets") or None
    if given.get("validation_resolution") == "":  # not asked about; what the other two say is compared below
        given = {k: v for k, v in given.items() if not k.startswith("validation_")}
    if given.get("caching") is False:
        given = {k: v for k, v in given.items() if not k.startswith("caching_")}
    sheet = stored.object("sheet").content if "sheet" in stored.content else None
    if sheet is None and outside.is_outside(given):
        raise PlanError(
            f"{name}: the {kind}'s model {stored.text('model')!r} is not in the catalogue and it holds no sheet; {stored.again}"
        )

    def sized(key: str) -> bool:
        return key == "resolution" and given["buckets"] is not None

    try:
        # Sizes at their default are left out: some do not apply to this kind of model. A reduced copy brings its own.
        usual = from_request({k: given[k] for k in ("model", "variant")}, sheet=sheet).describe()
        asked = {k: v for k, v in given.items() if k not in SIZES or sized(k) or not (reduced or v == usual[k])}
        workload = from_request(asked, sheet=sheet)
    except UnknownModelError as error:
        raise PlanError(f"{name}: {error}") from None
    except SheetError as error:
        raise PlanError(f"{name}: the {kind}'s 'sheet' is not valid: {error}") from None
    except (WorkloadError, ArithmeticError, TypeError, AttributeError) as error:
        raise PlanError(f"{name}: the {kind}'s workload is not valid here: {error}") from None
    if reduced:
        workload = reduced_copy(workload)
    found = workload.describe()
    for key in dict.fromkeys((*found, *stored.content)):
        if key not in found:
            raise PlanError(f"{name}: 'workload.{key}' is not known to this version; {stored.again}")
        if not _same(stored.value(key), found[key]):
            raise PlanError(
                f"{name}: the {kind} says {key} {stored.content[key]!r} where this version has {found[key]!r}; {stored.again}"
            )
    return workload


def _same(given: Any, known: Any) -> bool:
    """Equal, and true or false only where that is meant (JSON's true would equal 1)."""
    if isinstance(given, list) and isinstance(known, list):
        return len(given) == len(known) and all(map(_same, given, known))
    return isinstance(given, bool) == isinstance(known, bool) and given == known


def _estimate(entry: _Reader) -> Estimate:
    controls = entry.object("controls").content
    try:
        if "actions" in controls:
            actions = controls["actions"]
            if not isinstance(actions, list):
                raise PlanError(f"{entry.name}: '{entry.where}.controls.actions' must be a list, not {_kind(actions)}")
            schedule = Schedule.per_block(actions)
        else:
            schedule = Schedule.from_controls(controls)
    except PlanError:
        raise
    except (ValueError, TypeError) as error:
        raise PlanError(f"{entry.name}: the plan's schedule is not valid: {error}") from None
    breakdown = entry.object("breakdown")
    return Estimate(
        schedule=schedule,
        supported=True,
        reason=None,
        peak=entry.bytes("peak_gib"),
        peak_low=entry.bytes("peak_gib_low"),
        peak_high=entry.bytes("peak_gib_high"),
        reserved=entry.bytes("reserved_gib"),
        device=entry.bytes("device_gib"),
        host=entry.bytes("host_gib"),
        step_seconds=entry.number_or_none("step_seconds"),
        step_seconds_low=entry.number_or_none("step_seconds_low"),
        step_seconds_high=entry.number_or_none("step_seconds_high"),
        fits=entry.flag("fits"),
        fit_probability=entry.number("fit_probability", 1),
        phase=entry.text("peak_phase"),
        breakdown={key: breakdown.bytes(key) for key in breakdown.content},
        notes=entry.texts("notes"),
    )
