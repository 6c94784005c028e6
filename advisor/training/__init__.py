"""`advise run`: trains what a plan says with the bundled runtime, from cached latents or on synthetic data.

`loop` trains; `objective` is what the model is asked; `data` reads cached samples; `checkpoints` and `advisor.interruption` make a run safe
to stop; `memory` chooses what follows an out-of-memory error; `weights` saves what was trained; `metrics` writes JSON lines.
`docs/training.md` is the page for people who train.
"""

from advisor.interruption import Interruption, Stopped
from advisor.training.loop import OutOfMemory, RunResult, run

__all__ = ["Interruption", "OutOfMemory", "RunResult", "Stopped", "run"]
