"""What a card (or the host CPU) can hold and do: the GPU table, name look-up, hypothetical cards, memory tiers.

Bytes are `int`, rates are FLOP/s (or integer operations/s) and bytes/s, all dense and nominal. The figures and their
sources are in `data/gpus.csv`; blank cells become None, meaning not available or not known.
"""

from __future__ import annotations

import csv
import difflib
import io
import math
import os
import re
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

from probes import resources

GIB = 1 << 30
MIB = 1 << 20

TIERS = {
    8: "RTX 3070",
    10: "RTX 3080 10GB",
    12: "RTX 3060 12GB",
    16: "RTX 4060 Ti 16GB",
    24: "RTX 4090",
    32: "RTX 5090",
    48: "L40S",
    80: "H100 80GB SXM",
    96: "RTX PRO 6000 Blackwell",
    141: "H200",
}
"""Memory tier in GB, as cards are sold, and the card in the table that stands for it."""


class DeviceError(ValueError):
    """No such card, no such amount of memory, or the host's memory cannot be read."""


class DeviceKind(StrEnum):
    """Which PyTorch backend drives the device."""

    CUDA = "cuda"
    ROCM = "rocm"
    MPS = "mps"
    CPU = "cpu"


@dataclass(frozen=True)
class Device:
    """One device that a workload may run on."""

    name: str
    kind: DeviceKind
    total_bytes: int
    """What the driver reports."""
    usable_bytes: int
    """What a process can take in all, its CUDA context included: PyTorch's "total capacity". Fit is decided on it."""
    aliases: tuple[str, ...] = ()
    vendor: str = ""
    architecture: str = ""
    compute_target: str = ""
    """CUDA compute capability (``8.9``) or AMD target (``gfx942``)."""
    bf16_flops: float | None = None
    """With float32 accumulation. None: no bf16 matrix units."""
    fp16_flops: float | None = None
    """With float32 accumulation."""
    fp8_flops: float | None = None
    int8_ops: float | None = None
    fp32_flops: float | None = None
    """Without TF32."""
    memory_bytes_per_second: float | None = None
    host_link: str = ""
    """PCIe generation and lanes (``4 x16``), ``NVLink-C2C`` or ``unified``."""
    host_to_device_bytes_per_second: float | None = None
    """From pinned memory. None: memory is shared with the host, or not known."""
    device_to_host_bytes_per_second: float | None = None
    """Assumed equal to the other direction: PCIe is symmetric."""
    sm_count: int | None = None
    l2_bytes: int | None = None
    workspace_bytes: int = 0
    """cuBLAS workspaces that PyTorch takes from its own allocator: two equal ones, see :attr:`workspaces`."""
    context_bytes: int = 0
    """What the process holds outside PyTorch's allocator (CUDA context and kernels); an assumption, see the table."""
    rounding_bytes: int = 512
    """The allocator's rounding of a request."""
    source: str = ""
    remarks: str = ""
    """The table's notes on this card."""
    windows: bool = False
    """Its driver is NVIDIA's for Windows."""
    note: str = ""
    """How this device was chosen where the request left a choice, for the user to read. Empty: it did not."""

    @property
    def capability(self) -> tuple[int, int] | None:
        """CUDA compute capability, None for other devices."""
        major, dot, minor = self.compute_target.partition(".")
        return (int(major), int(minor)) if dot else None

    @property
    def workspaces(self) -> tuple[int, ...]:
        """The workspaces as single allocations in bytes: the forward thread's, then that of the autograd thread."""
        return (self.workspace_bytes // 2,) * 2 if self.workspace_bytes else ()

    def to_json(self) -> dict[str, object]:
        """The entry that ``advise gpus --json`` prints: GiB, TFLOP/s and GB/s (10^9)."""

        def scaled(value: float | None, unit: float) -> float | None:
            return None if value is None else round(value / unit, 3)

        return {
            "name": self.name,
            "aliases": list(self.aliases),
            "kind": str(self.kind),
            "vendor": self.vendor,
            "architecture": self.architecture,
            "compute_target": self.compute_target,
            "total_gib": scaled(self.total_bytes, GIB),
            "usable_gib": scaled(self.usable_bytes, GIB),
            "bf16_tflops": scaled(self.bf16_flops, 1e12),
            "fp16_tflops": scaled(self.fp16_flops, 1e12),
            "fp8_tflops": scaled(self.fp8_flops, 1e12),
            "int8_tops": scaled(self.int8_ops, 1e12),
            "fp32_tflops": scaled(self.fp32_flops, 1e12),
            "memory_gbs": scaled(self.memory_bytes_per_second, 1e9),
            "host_link": self.host_link,
            "host_to_device_gbs": scaled(self.host_to_device_bytes_per_second, 1e9),
            "sm_count": self.sm_count,
            "workspace_gib": scaled(self.workspace_bytes, GIB),
            "context_gib": scaled(self.context_bytes, GIB),
            "remarks": self.remarks,
            "source": self.source,
        }


@lru_cache(maxsize=1)
def gpus() -> tuple[Device, ...]:
    """Every card of the table, in its order."""
    return tuple(_device(row) for row in _rows())


def tiers() -> tuple[Device, ...]:
    """One card for each memory tier of :data:`TIERS`, smallest first; the note names the tier."""
    by_name = {device.name: device for device in gpus()}
    return tuple(replace(by_name[name], note=f"stands for {gb} GB cards") for gb, name in TIERS.items())


def find_gpu(text: str) -> Device:
    """The card that a user or a driver calls `text`.

    Case, spaces and punctuation do not count, nor do leading makers' words (NVIDIA, GeForce, RTX, Tesla, AMD, Radeon, ...).
    Memory size and form factor may be left out or, for the size, added ("A100", "a100-40gb", "L40S 48 GB"). Where several
    cards remain, the table's `default_for` decides (the one most in use: A100 and H100 mean the 80 GB SXM cards; among a
    consumer card's sizes the table names one), else the one with the most memory, then the most bandwidth; the device's
    `note` then names the others.

    Raises:
        DeviceError: no card is called so; the message names the nearest ones.
    """
    candidates = _candidates(text)
    if not candidates:
        near = _nearest(text)
        raise DeviceError(
            f"unknown GPU {text!r}; nearest: {', '.join(near)} (`advise gpus` lists all; a memory size can be given instead)"
        )
    if len(candidates) == 1:
        return candidates[0]
    key = _query_keys(text)[1]
    defaults = {
        row["name"] for row in _rows() if any(key == _query_keys(short)[1] for short in _split(row["default_for"]))
    }
    chosen = max(candidates, key=lambda d: (d.name in defaults, d.total_bytes, d.memory_bytes_per_second or 0))
    others = ", ".join(device.name for device in candidates if device is not chosen)
    return replace(chosen, note=f"{text!r} is taken as {chosen.name}; also known: {others}")


def detected_gpu(name: str, usable_bytes: int, capability: tuple[int, int] | None = None) -> Device:
    """The card in this machine, as PyTorch's device properties describe it.

    Args:
        name: ``torch.cuda.get_device_name()``.
        usable_bytes: ``torch.cuda.get_device_properties().total_memory``, which replaces the table's figure.
        capability: ``torch.cuda.get_device_capability()``, for a card that the table does not have.

    A name that several cards share means the one nearest in memory. An unknown card gets the rates of the tier's card
    nearest in memory; the note says so.

    Raises:
        DeviceError: `usable_bytes` is not positive.
    """
    if usable_bytes <= 0:
        raise DeviceError(f"{name} reports {usable_bytes} bytes of memory; a positive number expected")
    candidates = _candidates(name)
    if candidates:
        card = min(candidates, key=lambda d: abs(d.usable_bytes - usable_bytes))
        return replace(card, usable_bytes=usable_bytes, total_bytes=max(card.total_bytes, usable_bytes))
    card = _nearest_tier(usable_bytes / GIB)
    known = replace(
        card,
        name=name,
        aliases=(),
        usable_bytes=usable_bytes,
        total_bytes=usable_bytes,
        note=f"{name} is not in the table; rates are those of the {card.name}",
        source=f"memory: the device's properties; rest: {card.name}",
        remarks="",
    )
    if capability is None:
        return known
    return replace(
        known,
        architecture="",
        compute_target=f"{capability[0]}.{capability[1]}",
        workspace_bytes=2 * cublas_workspace_bytes(capability),
        bf16_flops=known.bf16_flops if capability >= (8, 0) else None,
        fp8_flops=known.fp8_flops if capability >= (8, 9) else None,
    )


def from_vram(gib: float) -> Device:
    """A hypothetical card with `gib` GiB in all.

    Usable memory is interpolated between the NVIDIA cards of the table (for each size the card with the least usable
    memory), so more memory never means less usable. Rates, workspaces and context are those of the tier's card nearest in
    memory (the smaller one where two are equally near); the note names it.

    Raises:
        DeviceError: `gib` is not a positive finite number.
    """
    if not math.isfinite(gib) or gib <= 0:
        raise DeviceError(f"a card with {gib} GiB of memory; a positive number of GiB expected, such as 24")
    card = _nearest_tier(gib)
    return replace(
        card,
        name=f"{gib:g} GiB card",
        aliases=(),
        total_bytes=round(gib * GIB),
        usable_bytes=int(_usable_gib(gib) * GIB),
        note=f"rates are those of the {card.name}",
        source=f"usable memory: interpolated in the table; rest: {card.name}",
        remarks="",
    )


def cpu_device(
    host_ram_bytes: int | None = None,
    *,
    bf16_flops: float | None = None,
    fp32_flops: float | None = None,
    memory_bytes_per_second: float | None = None,
) -> Device:
    """This machine's CPU as a training device: no workspaces, no context, no rounding.

    Args:
        host_ram_bytes: RAM to plan with; None: what is available now (:func:`host_memory`).
        bf16_flops, fp32_flops, memory_bytes_per_second: rates where somebody measured them.

    Raises:
        DeviceError: `host_ram_bytes` is not positive, or is None and the machine does not tell.
    """
    if host_ram_bytes is None:
        total, usable = host_memory()
    elif host_ram_bytes <= 0:
        raise DeviceError(f"host RAM of {host_ram_bytes} bytes; a positive number expected")
    else:
        total = usable = host_ram_bytes
    return Device(
        name="CPU",
        kind=DeviceKind.CPU,
        total_bytes=total,
        usable_bytes=usable,
        bf16_flops=bf16_flops,
        fp16_flops=None,
        fp32_flops=fp32_flops,
        memory_bytes_per_second=memory_bytes_per_second,
        host_link="unified",
        rounding_bytes=1,
        source="this machine",
    )


def host_memory() -> tuple[int, int]:
    """RAM of this machine in bytes: in all, and available now. A cgroup's limit lowers both.

    Raises:
        DeviceError: neither /proc/meminfo nor sysconf tells.
    """
    total, available = _system_memory()
    limit = _number(Path("/sys/fs/cgroup/memory.max"))
    if limit is not None and limit < total:
        used = _number(Path("/sys/fs/cgroup/memory.current")) or 0
        total, available = limit, min(available, max(limit - used, 0))
    return total, available


def cublas_workspace_bytes(capability: tuple[int, int]) -> int:
    """Bytes of one cuBLAS workspace at PyTorch's defaults.

    PyTorch keeps one for each pair of handle and stream, so a training process has two: the main thread's and the
    autograd thread's (handles are per thread). cuBLASLt shares them. Source: at::cuda::parseChosenWorkspaceSize, read in
    the torch 2.14.1 binary: 32 MiB for capability 9 to 12, else ``:4096:2:16:8``. Torch 2.6 has the 32 MiB for 9.0 only.
    """
    return 32 * MIB if 9 <= capability[0] <= 12 else 2 * 4096 * 1024 + 8 * 16 * 1024


_MAKERS = ("nvidia", "geforce", "quadro", "tesla", "rtx", "amd", "radeon", "instinct", "rx", "apple")
_MEMORY = re.compile(r"\s\d+GB(?=\s|$)")
_FORM_FACTOR = re.compile(r"\s(?:SXM|PCIe|NVL)$")
_KINDS = {"NVIDIA": DeviceKind.CUDA, "AMD": DeviceKind.ROCM, "Apple": DeviceKind.MPS}


@lru_cache(maxsize=1)
def _rows() -> tuple[dict[str, str], ...]:
    return tuple(csv.DictReader(io.StringIO(resources.text("gpus.csv"))))


def _device(row: dict[str, str]) -> Device:
    def number(column: str, unit: float = 1.0) -> float | None:
        return float(row[column]) * unit if row[column] else None

    def count(column: str, unit: int = 1) -> int | None:
        return round(float(row[column]) * unit) if row[column] else None

    transfer = number("pinned_h2d_gbs", 1e9)
    return Device(
        name=row["name"],
        kind=_KINDS[row["vendor"]],
        total_bytes=count("driver_total_mib", MIB) or count("total_gib", GIB) or 0,
        usable_bytes=count("usable_gib", GIB) or 0,
        aliases=tuple(_split(row["aliases"])),
        vendor=row["vendor"],
        architecture=row["architecture"],
        compute_target=row["compute_capability"],
        bf16_flops=number("bf16_dense_tflops", 1e12),
        fp16_flops=number("fp16_dense_tflops", 1e12),
        fp8_flops=number("fp8_dense_tflops", 1e12),
        int8_ops=number("int8_dense_tops", 1e12),
        fp32_flops=number("fp32_tflops", 1e12),
        memory_bytes_per_second=number("mem_bandwidth_gbs", 1e9),
        host_link=f"{row['pcie_gen']} x{row['pcie_lanes']}" if row["pcie_lanes"] else row["pcie_gen"],
        host_to_device_bytes_per_second=transfer,
        device_to_host_bytes_per_second=transfer,
        sm_count=count("sm_count"),
        l2_bytes=count("l2_mb", MIB),
        workspace_bytes=count("workspace_mib", MIB) or 0,
        context_bytes=count("context_mib", MIB) or 0,
        source=row["source"],
        remarks=row["notes"],
    )


def _split(cell: str) -> list[str]:
    return [part for part in cell.split("|") if part]


def _key(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.casefold())


def _query_keys(text: str) -> list[str]:
    """The normalised text, and the same without makers' words in front."""
    key = bare = _key(text)
    while maker := next((word for word in _MAKERS if bare.startswith(word) and bare != word), None):
        bare = bare.removeprefix(maker)
    return [key, bare]


@lru_cache(maxsize=1)
def _index() -> dict[str, list[Device]]:
    """Normalised names to cards: names and aliases, each also without makers' words, size and form factor."""
    index: dict[str, list[Device]] = {}
    for device, row in zip(gpus(), _rows(), strict=True):
        spellings = {device.name, *device.aliases, *_split(row["default_for"])}
        spellings |= {_MEMORY.sub("", device.name), _FORM_FACTOR.sub("", device.name)}
        spellings.add(_FORM_FACTOR.sub("", _MEMORY.sub("", device.name)))
        for key in {key for spelling in spellings for key in _query_keys(spelling)}:
            index.setdefault(key, []).append(device)
    return index


def _candidates(text: str) -> list[Device]:
    index = _index()
    for key in _query_keys(text):
        if key in index:
            return index[key]
    for key in _query_keys(text):
        sized = re.sub(r"g(?:b|ib)?$", "", key)
        for digits in (1, 2, 3):
            name, size = sized[:-digits], sized[-digits:]
            if sized != key and size.isdecimal() and (fitting := _with_memory(index.get(name, ()), int(size))):
                return fitting
    return []


def _with_memory(devices: Iterable[Device], gb: int) -> list[Device]:
    """The cards sold with `gb` GB: the driver shows up to 8 % less (units, ECC) and never more."""
    return [device for device in devices if 0.92 * gb <= device.total_bytes / GIB <= 1.001 * gb]


def _nearest(text: str, count: int = 3) -> list[str]:
    index = _index()
    keys = difflib.get_close_matches(_query_keys(text)[1][:64], index, n=4 * count, cutoff=0.0)
    return list(dict.fromkeys(index[key][0].name for key in keys))[:count]


def _nearest_tier(gib: float) -> Device:
    gb = min(TIERS, key=lambda tier: abs(tier - gib))
    return next(device for device in gpus() if device.name == TIERS[gb])


@lru_cache(maxsize=1)
def _usable_points() -> tuple[list[float], list[float]]:
    least: dict[float, float] = {}
    for device in gpus():
        if device.kind is DeviceKind.CUDA:
            sold = float(math.ceil(device.total_bytes / GIB))
            least[sold] = min(device.usable_bytes / GIB, least.get(sold, math.inf))
    sizes = sorted(least)
    return sizes, [least[size] for size in sizes]


def _usable_gib(gib: float) -> float:
    """Linear between the cards' sizes, in proportion beyond the smallest and the largest."""
    sizes, usable = _usable_points()
    if gib <= sizes[0] or gib >= sizes[-1]:
        end = 0 if gib <= sizes[0] else -1
        return gib * usable[end] / sizes[end]
    right = bisect_left(sizes, gib)
    share = (gib - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
    return usable[right - 1] + share * (usable[right] - usable[right - 1])


def _system_memory() -> tuple[int, int]:
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        kib = {
            match[1]: int(match[2]) for match in re.finditer(r"^(\w+):\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
        }
        if "MemTotal" in kib:
            return kib["MemTotal"] * 1024, kib.get("MemAvailable", kib["MemTotal"]) * 1024
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total = os.sysconf("SC_PHYS_PAGES") * page
    except (AttributeError, OSError, ValueError):
        raise DeviceError("this system does not tell its RAM; give it in GiB (--host-ram)") from None
    try:
        return total, os.sysconf("SC_AVPHYS_PAGES") * page
    except (OSError, ValueError):
        return total, total


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
