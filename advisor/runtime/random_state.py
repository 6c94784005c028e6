"""Random state around a call that is to be replayed or skipped."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import get_device_states, set_device_states


class RandomState:
    """Random state of the CPU, and of the devices of some tensors."""

    __slots__ = ("_cpu", "_device_type", "_devices", "_states")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._cpu = torch.get_rng_state()
        self._device_type = next((t.device.type for t in tensors if t.device.type not in ("cpu", "meta")), "cuda")
        started = getattr(getattr(torch, self._device_type, None), "_initialized", False)
        self._devices, self._states = get_device_states(*tensors) if started else ([], [])

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._devices:
            set_device_states(self._devices, self._states, device_type=self._device_type)

    def same_as(self, other: RandomState) -> bool:
        pairs = zip([self._cpu, *self._states], [other._cpu, *other._states], strict=True)
        with _disable_current_modes():  # states are real where the model's tensors are fake
            return all(torch.equal(a, b) for a, b in pairs)
