"""Python's search for reference cycles, paused while an answer is made, or while memory is measured."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """With PyTorch and diffusers loaded every search walks about a million objects, and a trace or a simulation, which makes many
    objects and hardly a cycle, causes one after the other; what is measured would change with the older garbage that one frees. Of the whole
    process; left as it was found."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
