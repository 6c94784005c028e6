"""checkpoint-advisor: which gradient-checkpointing schedule trains a diffusion model fastest without running out of memory.

`plan` answers, `load_plan` reads a saved answer, `apply` executes, `remove` undoes. Importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from advisor.api import Plan, plan
    from advisor.plan_files import load_plan
    from advisor.runtime import apply, remove
    from estimators.schedule import Schedule

__all__ = ["Plan", "Schedule", "apply", "load_plan", "plan", "remove"]

_HOME = {
    "plan": "advisor.api",
    "Plan": "advisor.api",
    "load_plan": "advisor.plan_files",
    "apply": "advisor.runtime",
    "remove": "advisor.runtime",
    "Schedule": "estimators.schedule",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'advisor' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
