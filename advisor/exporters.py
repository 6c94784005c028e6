"""A schedule as a trainer's own configuration keys."""

from __future__ import annotations

from typing import Any

from estimators.schedule import Schedule


def simpletuner(schedule: Schedule, weights_offload: str = "none") -> dict[str, Any]:
    """SimpleTuner's JSON keys (`facts/options.csv`); only keys and values that the trainer knows.

    Args:
        weights_offload: none, ramtorch, ramtorch:PERCENT or blocks:N.

    Raises:
        ScheduleError: a per-block schedule, which the trainer cannot express.
    """
    kind, _, count = weights_offload.partition(":")
    keys = schedule.to_controls()
    if kind == "ramtorch":
        keys["ramtorch"] = True
        if count:
            keys["ramtorch_transformer_percent"] = int(count)
    elif kind == "blocks":
        keys["musubi_blocks_to_swap"] = int(count)
    return keys
