"""The kind of device that a probe works for. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """The device a trace is made for."""

    kind: str
    """``cuda`` or ``cpu``."""
    capability: tuple[int, int] = (9, 0)
    """CUDA compute capability; decides which attention backends exist."""
    attention: str = "auto"
    """auto, flash, efficient, cudnn or math."""

    def key(self) -> str:
        """Text that changes whenever a trace for this target could differ."""
        if self.kind == "cpu":
            return "cpu"
        flash = self.capability >= (8, 0)
        return f"cuda flash={flash} attention={self.attention}"
