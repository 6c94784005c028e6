"""Per-block schedules of plan files: whether they suit the plan's model, and what becomes of them on its reduced copy."""

from __future__ import annotations

from typing import Any

import torch

from estimators.schedule import Action, Schedule, ScheduleError, resolve
from probes.build import build_base
from probes.discover import discover
from probes.structure import Structure
from probes.workload import WorkloadError


def check(plan: Any) -> None:
    """That a plan's per-block schedule is one of its own model. Builds the model without memory to see; other schedules cost nothing.

    Args:
        plan: its `workload` and `schedule`; where it has a `path`, messages name it.

    Raises:
        WorkloadError: another number of actions than the model has blocks, or an action that its block cannot take.
    """
    schedule, workload = plan.schedule, plan.workload
    if schedule.actions is None:
        return
    with torch.device("meta"):
        structure = discover(build_base(workload), workload.family.regions)
    where = f"{path}: " if (path := getattr(plan, "path", None)) is not None else ""
    blocks, actions = len(structure.blocks), len(schedule.actions)
    if blocks != actions:
        raise WorkloadError(f"{where}the plan's model has {blocks} blocks, the plan lists {actions} actions")
    try:
        resolve(schedule, structure)
    except ScheduleError as error:
        raise WorkloadError(f"{where}{error}") from None


def for_copy(schedule: Schedule, structure: Structure) -> tuple[Schedule, list[str]]:
    """A per-block schedule of the whole model for a copy with fewer blocks: evenly spaced decisions of the original ones, KEEP where a
    block lacks the part that a decision names; and a note that says so. Other schedules stay as they are."""
    n, blocks = len(schedule.actions or ()), structure.blocks
    if schedule.actions is None or n <= len(blocks):
        return schedule, []
    chosen = [schedule.actions[i * n // len(blocks)] for i in range(len(blocks))]
    fitting = [a if a.suits(b) else Action.KEEP for a, b in zip(chosen, blocks, strict=True)]
    note = f"the copy's {len(blocks)} blocks take evenly spaced decisions of the plan's {n}"
    return Schedule.per_block(fitting), [note]
