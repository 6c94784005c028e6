"""`advise batch`: JSON lines in, JSON lines out, in the same order, in one process. The contract is in the product's documentation.

Blank lines are skipped. A request that cannot be answered gives ``{"error": "..."}`` on its line; the others still run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from advisor import options
from advisor.api import Session
from decision_rules.ladder import Objective
from decision_rules.support import Executor
from estimators.devices import Device
from estimators.schedule import Schedule, ScheduleError
from probes.workload import EXECUTORS, REQUEST_KEYS

ASKING_KEYS = ("gpu", "vram", "headroom", "host_ram", "executor", "objective", "schedules", "os")
"""What a request may hold besides the workload."""

_TEXTS = (
    "model",
    "model_class",
    "model_config",
    "revision",
    "variant",
    "adapter",
    "precision",
    "optimizer",
    "attention",
    "weights_offload",
    "compile",
    "gpu",
    "executor",
    "objective",
    "text_padding",
    "vae_precision",
    "os",
)
_FLAGS = (
    "fuse_qkv",
    "lokr_full_matrix",
    "lokr_scalar",
    "lokr_rebuild",
    "cfg_batch",
    "dora",
    "rslora",
    "ema",
    "master_weights",
    "caching",
    "vae_tiling",
    "vae_slicing",
)
_NUMBERS = (
    "vram",
    "headroom",
    "host_ram",
    "accumulate",
    "resident_gib",
    "caching_batch",
    "caching_text_batch",
)


class RequestError(ValueError):
    """A line that is not a request; the message names the key."""


def run(
    lines: Iterable[bytes], write: Callable[[str], None], *, session: Session, detect: Callable[[], Device | None]
) -> bool:
    """Answers every line. Returns whether all could be answered.

    Args:
        lines: one request each, UTF-8.
        write: takes one line of JSON without its line end, as soon as it is known.
        detect: finds this machine's GPU, for requests that name no device; called at most once.
    """
    found: list[Device | None] = []

    def detect_once() -> Device | None:
        if not found:
            found.append(detect())
        return found[0]

    all_answered = True
    for line in lines:
        if not line.strip():
            continue
        try:
            result = answer(line, session=session, detect=detect_once)
        except Exception as error:  # noqa: BLE001  one bad request must not end the others
            result = {"error": options.describe(error)}
            all_answered = False
        write(json.dumps(result))
    return all_answered


def answer(line: bytes, *, session: Session, detect: Callable[[], Device | None]) -> dict[str, Any]:
    """One request's answer.

    Raises:
        RequestError: not a JSON object, an unknown key, a value of the wrong type.
        Otherwise whatever `Session.plan` raises.
    """
    request = parse(line)
    workload = options.workload({k: v for k, v in request.items() if k in REQUEST_KEYS})
    executor = Executor(options.choice("executor", request.get("executor", "bundled"), EXECUTORS))
    objective = Objective(options.choice("objective", request.get("objective", "ladder"), options.OBJECTIVES))
    headroom = options.gib("headroom", request.get("headroom", 0))
    host_ram = options.gib("host-ram", request["host_ram"]) if "host_ram" in request else None
    schedules = _schedules(request["schedules"]) if "schedules" in request else None
    own = "gpu" not in request and "vram" not in request
    device = options.on_system(
        options.device(request.get("gpu"), request.get("vram"), detect), request.get("os"), own=own
    )
    if device is None:
        raise RequestError("this machine has no GPU; give 'gpu' (a name that `advise gpus` lists) or 'vram' (GiB)")
    options.check_headroom(headroom, device)
    plan = session.plan(
        workload, device, executor, objective, headroom=headroom, host_ram=host_ram, schedules=schedules
    )
    result = plan.to_json()
    # As asked, also where a value at its default would be left out, so that the asker can match entries by it.
    for entry, asked in zip(result["schedules"], request.get("schedules", ()), strict=False):
        entry["controls"] |= asked
    result["warnings"] += options.without_effect(request, workload)
    return result


def parse(line: bytes) -> dict[str, Any]:
    """A line as a request whose keys are known and whose values have the right JSON type; nulls are left out.

    Raises:
        RequestError: naming the key, or where the JSON ends.
    """
    try:
        content = json.loads(
            line.decode("utf-8").removeprefix("\ufeff"),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_int=lambda text: int(text) if len(text) < 20 else float(text),
        )
    except json.JSONDecodeError as error:
        raise RequestError(f"not valid JSON: {error.msg} at column {error.colno}") from None
    except UnicodeDecodeError:
        raise RequestError("not UTF-8 text") from None
    except RecursionError:
        raise RequestError("not valid JSON: nested too deeply") from None
    except RequestError:
        raise
    except ValueError as error:
        raise RequestError(f"not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise RequestError(f"a request is a JSON object, not {json.dumps(content)[:60]}")
    valid = (*REQUEST_KEYS, *ASKING_KEYS)
    for key in content:
        if key not in valid:
            raise RequestError(f"unknown key {key!r}; valid: {', '.join(valid)}")
    request = {k: v for k, v in content.items() if v is not None}
    for key, value in request.items():
        if key in _TEXTS and not isinstance(value, str):
            raise RequestError(f"{key!r} must be text, not {json.dumps(value)[:60]}")
        if key in _FLAGS and not isinstance(value, bool):
            raise RequestError(f"{key!r} must be true or false, not {json.dumps(value)[:60]}")
        if key in _NUMBERS and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise RequestError(f"{key!r} must be a number, not {json.dumps(value)[:60]}")
    if "model" not in request and "model_class" not in request:
        raise RequestError("'model' is missing")
    return request


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise RequestError(f"the key {key!r} is given twice")
        result[key] = value
    return result


def _no_constant(name: str) -> Any:
    raise RequestError(f"{name} is not a JSON number")


def _schedules(value: Any) -> list[Schedule]:
    if not isinstance(value, list) or not value:
        raise RequestError(
            "'schedules' must be a list of objects with the trainer's keys; leave it out for all schedules"
        )
    schedules = []
    for position, controls in enumerate(value, 1):
        if not isinstance(controls, dict):
            raise RequestError(
                f"schedule {position} must be an object with the trainer's keys, not {json.dumps(controls)[:60]}"
            )
        try:
            schedules.append(Schedule.from_controls(controls))
        except ScheduleError as error:
            raise ScheduleError(f"schedule {position}: {error}") from None
    return schedules
