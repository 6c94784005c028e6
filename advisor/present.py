"""Which GPU this machine has. Asks the driver, not torch, so that nothing is allocated and nothing slow is imported."""

from __future__ import annotations

import ctypes
import os

from estimators import devices
from estimators.devices import Device


def _first_visible(setting: str | None) -> int | None:
    """Index of the first GPU that ``CUDA_VISIBLE_DEVICES`` leaves visible; None: it hides all. A name instead of a number
    counts as the first."""
    if setting is None:
        return 0
    first = setting.split(",")[0].strip()
    if not first or first.startswith("-"):
        return None
    return int(first) if first.isdigit() else 0


def detect_gpu() -> Device | None:
    """The first visible NVIDIA GPU of the machine through the driver's management library, None when there is none.

    Touches no GPU memory: NVML creates no CUDA context.
    """
    index = _first_visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if index is None:
        return None
    library = None
    for name in ("libnvidia-ml.so.1", "nvml.dll"):
        try:
            library = ctypes.CDLL(name)
            break
        except OSError:
            continue
    if library is None or library.nvmlInit_v2() != 0:
        return None
    try:
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0 or count.value <= index:
            return None
        handle = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
            return None
        text = ctypes.create_string_buffer(96)
        if library.nvmlDeviceGetName(handle, text, 96) != 0:
            return None

        class _Memory(ctypes.Structure):
            _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]

        memory = _Memory()
        if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
            return None
        major, minor = ctypes.c_int(), ctypes.c_int()
        known = library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)) == 0
        capability = (major.value, minor.value) if known else None
        return devices.detected_gpu(text.value.decode(errors="replace"), int(memory.total), capability)
    finally:
        library.nvmlShutdown()
