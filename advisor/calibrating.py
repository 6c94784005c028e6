"""`advise calibrate`: measurements in, a calibration out. Cases are published rows and receipts of `advise verify`."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from advisor.api import PlanError, Session
from advisor.plan_files import workload_of
from advisor.published import Answered, estimates, synthetic
from decision_rules.support import Executor, semantics
from estimators import fitting
from estimators.calibration import Calibration, own_file
from estimators.devices import DeviceError, find_gpu
from estimators.estimate import Estimator, Semantics
from estimators.fitting import Case
from estimators.schedule import Schedule, ScheduleError
from probes import store
from probes.traced import TraceError
from probes.workload import WorkloadError

LARGEST_RECEIPT = 4 * 2**20


@dataclass(frozen=True)
class Calibrated:
    """What was fitted, on what, and what was left aside."""

    calibration: Calibration
    published: int
    receipts: int
    left_aside: tuple[str, ...]
    saved: Path | None

    def lines(self) -> list[str]:
        """For people."""
        c = self.calibration
        out = [f"fitted on {c.source}"]
        for name in ("peak", "time, families left out", "time, cards left out"):
            e = c.errors[name]
            said = "peak, nothing fitted" if name == "peak" else name
            out.append(
                f"{said}: median error {e['median_absolute']:.1%}, 95 % within {e['p95_absolute']:.0%} ({e['rows']} rows)"
            )
        for name, b in c.bands.items():
            (low, high), (fast, slow) = b.peak(10**9), b.time(1.0)
            out.append(
                f"band, {name}: peak {low / 1e9 - 1:+.1%} to {high / 1e9 - 1:+.1%}, time {fast - 1:+.0%} to {slow - 1:+.0%}"
                + (" (a rough guess)" if b.unreliable else "")
            )
        out += [
            f"{name}: {card.receipts} receipts, step times {math.exp(card.time_log_ratio) - 1:+.0%}, bands at "
            f"{card.time_scale:.0%} (time) and {card.peak_scale:.0%} (peak) of the general width"
            for name, card in c.cards.items()
        ]
        out.append("kept nowhere (--dry-run)" if self.saved is None else f"written: {self.saved}")
        return out


def published_cases(say: Callable[[str], None] = lambda _: None) -> list[Case]:
    """Every published row that can be estimated."""
    say("tracing what was published")
    answered, _ = estimates()
    return [*(case_of(a) for a in answered if a.row.peak_gib or a.row.seconds), *synthetic_cases()]


def synthetic_cases() -> list[Case]:
    """The published step times of a plain frozen stack. Its peaks belong to no kind of job and say nothing of any band."""
    session = Session()
    found = []
    for row in synthetic():
        device = find_gpu(row.gpu)
        _, profile, _ = session.profile(row.workload, device, Executor.BUNDLED)
        estimator = Estimator(profile, device, Semantics())
        memory = estimator.replay.run(estimator.semantics.resolve(row.schedule, profile), estimator.resident)
        work = estimator.clock.work(memory)
        found.append(Case("frozen stack", device.name, "frozen stack", memory.peak, None, work, row.seconds))
    return found


def case_of(answered: Answered) -> Case:
    """A published row as a case."""
    e, row = answered.estimator, answered.row
    memory = e.replay.run(e.semantics.resolve(answered.estimate.schedule, e.profile), e.resident)
    return Case(
        family=row.family,
        gpu=e.device.name,
        kind=e.kind,
        peak=answered.estimate.peak,
        measured_peak=row.peak_gib * 2**30 if row.peak_gib else None,
        work=e.clock.work(memory, copies_out_overlap=e.semantics.copies_out_overlap),
        measured_seconds=row.seconds,
    )


class ReceiptError(ValueError):
    """A receipt cannot be used; the message says why."""


def _read(path: Path) -> dict[str, Any]:
    try:
        found_as = path.stat()
        if not stat.S_ISREG(found_as.st_mode):
            raise ReceiptError("not a regular file")
        if found_as.st_size > LARGEST_RECEIPT:
            raise ReceiptError("too large for a receipt")
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        if isinstance(error, ReceiptError):
            raise
        raise ReceiptError(f"not readable JSON ({str(error).splitlines()[0]})") from None
    if not isinstance(found, dict) or type(found.get("receipt_format")) is not int or found["receipt_format"] != 1:
        raise ReceiptError("not a receipt of advise verify")
    return found


def _measured(receipt: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """(peak in GiB, seconds a step); one of them may be missing."""
    values = receipt["measured"]["peak_gib"], receipt["measured"]["step_seconds"]
    for value in values:
        if value is not None and (type(value) not in (int, float) or not 0 < value < 1e6):
            raise ReceiptError("its measurements are not positive numbers")
    if values == (None, None):
        raise ReceiptError("it holds neither a peak nor a step time")
    return values


def _schedule(receipt: Mapping[str, Any]) -> Schedule:
    if receipt["controls"] is not None:
        return Schedule.from_controls(receipt["controls"])
    actions = receipt["actions"]
    if not isinstance(actions, list) or not actions or not all(isinstance(a, str) for a in actions):
        raise ReceiptError("its actions are no list of texts")
    return Schedule.per_block(actions)


def receipt_case(path: Path, session: Session) -> Case:
    """A receipt as a case: its job is traced again and estimated with the rates left open.

    A receipt is data: no code is imported and nothing is asked of the network because of one.

    Raises:
        ReceiptError: a receipt of a CPU run or a reduced copy, of a card that is not known, or of a job that cannot be estimated.
    """
    receipt = _read(path)
    try:
        if receipt["reduced_copy"] is not False or str(receipt["device"]).lower().startswith("cpu"):
            raise ReceiptError("a run of a reduced copy on the CPU says nothing about a card")
        workload = workload_of(receipt["workload"], path.name, "receipt", "verify again")
        schedule = _schedule(receipt)
        device = find_gpu(receipt["device"])
        peak, seconds = _measured(receipt)
        _, profile, _ = session.profile(workload, device, Executor.BUNDLED)
        estimator = Estimator(profile, device, semantics(Executor.BUNDLED, workload.model))
        memory = estimator.replay.run(estimator.semantics.resolve(schedule, profile), estimator.resident)
    except (KeyError, TypeError, AttributeError) as error:
        raise ReceiptError(f"incomplete ({type(error).__name__}: {error})") from None
    except (PlanError, WorkloadError, ScheduleError, DeviceError, TraceError) as error:
        raise ReceiptError(str(error).removeprefix(f"{path.name}: ")) from None
    return Case(
        family=f"receipt {workload.model}",
        gpu=device.name,
        kind=estimator.kind,
        peak=memory.peak,
        measured_peak=peak * 2**30 if peak else None,
        work=estimator.clock.work(memory),
        measured_seconds=seconds,
        own=True,
    )


def _receipts(folder: Path) -> Iterator[Path]:
    if folder.is_file():
        yield folder
        return
    if not folder.is_dir():
        what = "neither a folder nor a regular file" if folder.exists() else "no such folder of receipts"
        raise WorkloadError(f"{folder}: {what}")
    yield from sorted(folder.rglob("*.json"))


def calibrate(
    receipts: Path | None, *, save: bool, output: Path | None = None, say: Callable[[str], None] = lambda _: None
) -> Calibrated:
    """Fits a calibration on the published rows and the receipts of a folder (or one receipt).

    Args:
        save: keep it: in `output`, or where estimates look for it.

    Raises:
        WorkloadError: no such folder, or no usable receipt in it.
        OSError: it cannot be written.
    """
    own: list[Case] = []
    aside: list[str] = []
    if receipts is not None:
        session = Session()
        for path in _receipts(receipts):
            try:
                own.append(receipt_case(path, session))
            except ReceiptError as error:
                aside.append(f"{path.name}: {error}")
        if not own:
            why = f" ({aside[0]})" if aside else ""
            raise WorkloadError(f"{receipts}: no usable receipt in it{why}")
    published = published_cases(say)
    say("fitting")
    source = f"{len(published)} published rows" + (f" and {len(own)} receipts" if own else "")
    found = fitting.calibrate([*published, *own], source)
    target = (output or own_file()) if save else None
    if target is not None:
        store.atomic_write(target, (json.dumps(found.to_json(), indent=1) + "\n").encode())
    return Calibrated(found, len(published), len(own), tuple(aside), target)
