"""Runs a schedule on a live torch model: any module with block chains, in anyone's training loop, without touching its code.

`apply` sets an instance attribute ``forward`` on the blocks (or their feed-forward submodules) that the schedule recomputes;
`remove` deletes it again. Parameters, their names, `state_dict`, hooks, copies and pickles of the model are not affected.
Losses and gradients are bit for bit those of the model without a schedule.
"""

from advisor.runtime.compiling import compile_blocks
from advisor.runtime.handle import Handle, RuntimeRefused, apply, remove

__all__ = ["Handle", "RuntimeRefused", "apply", "compile_blocks", "remove"]
