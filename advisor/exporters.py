"""A schedule as a trainer's own configuration keys."""

from __future__ import annotations

from typing import Any

from estimators.schedule import Schedule


def simpletuner(schedule: Schedule) -> dict[str, Any]:
    """SimpleTuner's JSON keys (`facts/options.csv`); only keys and values that the trainer knows.

    Raises:
        ScheduleError: a per-block schedule, which the trainer cannot express.
    """
    return schedule.to_controls()
