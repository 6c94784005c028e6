"""The GPU table, name look-up, hypothetical cards, tiers and the host."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators import devices
from estimators.devices import (
    GIB,
    MIB,
    TIERS,
    Device,
    DeviceError,
    DeviceKind,
    cpu_device,
    cublas_workspace_bytes,
    detected_gpu,
    find_gpu,
    from_vram,
    gpus,
    host_memory,
    tiers,
)
from probes import resources

# The table -----------------------------------------------------------------------------------------------------------


def test_names_are_unique_and_every_card_has_memory_and_a_source() -> None:
    names = [device.name for device in gpus()]
    assert len(set(names)) == len(names)
    for device in gpus():
        assert 7 * GIB < device.usable_bytes <= device.total_bytes < 193 * GIB, device.name
        assert device.source, device.name


@pytest.mark.parametrize("device", gpus(), ids=lambda device: device.name)
def test_figures_of_a_card_agree_with_each_other(device: Device) -> None:
    assert device.fp16_flops
    assert device.memory_bytes_per_second
    assert device.fp32_flops
    assert device.fp32_flops <= device.fp16_flops
    assert device.bf16_flops in (None, device.fp16_flops)
    if device.fp8_flops:
        assert device.fp8_flops == pytest.approx(2 * device.fp16_flops, rel=0.03)
    assert (device.capability is not None) == (device.kind is DeviceKind.CUDA)
    assert (device.host_to_device_bytes_per_second is None) == (device.kind is DeviceKind.MPS)


@pytest.mark.parametrize("device", [d for d in gpus() if d.kind is DeviceKind.CUDA], ids=lambda device: device.name)
def test_a_cuda_card_has_pytorchs_workspaces_a_context_and_bf16_from_ampere_on(device: Device) -> None:
    assert device.capability
    assert device.workspaces == (cublas_workspace_bytes(device.capability),) * 2
    assert 0.25 * GIB < device.context_bytes <= 0.5 * GIB
    assert (device.bf16_flops is not None) == (device.capability >= (8, 0))
    assert device.rounding_bytes == 512


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((7, 5), 8519680),
        ((8, 0), 8519680),
        ((8, 9), 8519680),
        ((9, 0), 32 * MIB),
        ((10, 0), 32 * MIB),
        ((12, 0), 32 * MIB),
    ],
)
def test_workspace_by_capability(capability: tuple[int, int], expected: int) -> None:
    assert cublas_workspace_bytes(capability) == expected


def test_hopper_and_ada_workspaces_differ_by_what_published_peaks_show() -> None:
    difference = find_gpu("H100").workspace_bytes - find_gpu("L40S").workspace_bytes
    assert difference / GIB == pytest.approx(0.0466, abs=1e-3)


def test_figures_carry_their_unit() -> None:
    card = find_gpu("RTX 4090")
    assert (card.usable_bytes, card.total_bytes) == (round(23.65 * GIB), 24564 * MIB)
    assert (card.bf16_flops, card.memory_bytes_per_second) == (165.2e12, 1008e9)
    assert card.host_to_device_bytes_per_second == card.device_to_host_bytes_per_second == 25e9
    assert (card.capability, card.l2_bytes, card.sm_count, card.host_link) == ((8, 9), 72 * MIB, 128, "4 x16")


def test_json_has_a_name_and_survives_serialising() -> None:
    entries = json.loads(json.dumps([device.to_json() for device in gpus()]))
    assert all(entry["name"] and entry["usable_gib"] > 0 for entry in entries)
    assert next(entry for entry in entries if entry["name"] == "L40S")["usable_gib"] == 44.42


# Look-up -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H100 80GB HBM3", "H100 80GB SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 80GB SXM"),
        ("H100 SXM", "H100 80GB SXM"),
        ("h100-pcie", "H100 80GB PCIe"),
        ("H100 NVL", "H100 NVL"),
        ("h100 94gb", "H100 NVL"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB PCIe"),
        ("rtx4090", "RTX 4090"),
        ("RTX_4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("4090 24GB", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("geforce 4070 ti super", "RTX 4070 Ti Super"),
        ("rtx 3080 12gb", "RTX 3080 12GB"),
        ("4060ti-8g", "RTX 4060 Ti 8GB"),
        ("3060", "RTX 3060 12GB"),
        ("L40S", "L40S"),
        ("L40S 48 GB", "L40S"),
        ("l40", "L40"),
        ("L4 24GiB", "L4"),
        ("a10", "A10"),
        ("A10G", "A10G"),
        ("a6000", "RTX A6000"),
        ("6000 Ada", "RTX 6000 Ada"),
        ("pro 6000", "RTX PRO 6000 Blackwell"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell"),
        ("v100 32gb", "V100 32GB"),
        ("Tesla T4", "T4"),
        ("h200", "H200"),
        ("B200 192GB", "B200"),
        ("AMD Instinct MI300X", "MI300X"),
        ("7900 XTX", "RX 7900 XTX"),
        ("M3 Max 128GB", "Apple M3 Max 128GB"),
    ],
)
def test_a_clear_name_finds_its_card_without_a_note(text: str, name: str) -> None:
    card = find_gpu(text)
    assert (card.name, card.note) == (name, "")


@pytest.mark.parametrize(
    ("text", "name", "other"),
    [
        ("H100", "H100 80GB SXM", "H100 NVL"),
        ("h100 80gb", "H100 80GB SXM", "H100 80GB PCIe"),
        ("a100", "A100 80GB SXM", "A100 40GB PCIe"),
        ("a100-40gb", "A100 40GB SXM", "A100 40GB PCIe"),
        ("A100 80 GB", "A100 80GB SXM", "A100 80GB PCIe"),
        ("a100 sxm", "A100 80GB SXM", "A100 40GB SXM"),
        ("V100", "V100 16GB", "V100 32GB"),
        ("NVIDIA GeForce RTX 3080", "RTX 3080 10GB", "RTX 3080 12GB"),
        ("5060 Ti", "RTX 5060 Ti 16GB", "RTX 5060 Ti 8GB"),
        ("m2 ultra", "Apple M2 Ultra 64GB", "Apple M2 Ultra 192GB"),
    ],
)
def test_an_ambiguous_name_takes_the_documented_card_and_says_so(text: str, name: str, other: str) -> None:
    card = find_gpu(text)
    assert card.name == name
    assert other in card.note
    assert repr(text) in card.note


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("rtx 5095", "RTX 5090"),
        ("RTX 4090 Laptop GPU", "RTX 4090"),
        ("4090 48GB", "RTX 4090"),
        ("h300", "H200"),
        ("L40SS", "L40S"),
        ("", ""),
        ("---", ""),
        ("x" * 100_000, ""),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_ones(text: str, nearest: str) -> None:
    with pytest.raises(DeviceError, match="unknown GPU") as error:
        find_gpu(text)
    assert nearest in str(error.value).partition("nearest:")[2]


@pytest.mark.parametrize("device", gpus(), ids=lambda device: device.name)
def test_every_card_is_found_by_its_name_in_any_spelling(device: Device) -> None:
    for text in (device.name, device.name.lower(), device.name.replace(" ", "-"), device.name.replace(" ", "")):
        assert find_gpu(text).name == device.name


@pytest.mark.parametrize("device", gpus(), ids=lambda device: device.name)
def test_every_alias_leads_to_the_card_or_to_one_that_shares_it(device: Device) -> None:
    for alias in device.aliases:
        found = find_gpu(alias)
        assert found.name == device.name or (alias in found.aliases and found.note)


# The card in the machine ---------------------------------------------------------------------------------------------


def test_a_detected_card_has_the_machines_memory_and_the_tables_rates() -> None:
    card = detected_gpu("NVIDIA GeForce RTX 4090", round(23.51 * GIB), (8, 9))
    assert (card.name, card.usable_bytes, card.bf16_flops) == ("RTX 4090", round(23.51 * GIB), 165.2e12)


@pytest.mark.parametrize(("gib", "name"), [(9.7, "RTX 3080 10GB"), (11.6, "RTX 3080 12GB")])
def test_cards_of_one_device_name_are_told_apart_by_memory(gib: float, name: str) -> None:
    assert detected_gpu("NVIDIA GeForce RTX 3080", round(gib * GIB)).name == name


def test_an_unknown_detected_card_says_whose_rates_it_has() -> None:
    card = detected_gpu("NVIDIA Quadro RTX 6000", round(23.6 * GIB), (7, 5))
    assert card.name == "NVIDIA Quadro RTX 6000"
    assert "RTX 4090" in card.note
    assert (card.capability, card.bf16_flops, card.fp8_flops, card.workspace_bytes) == ((7, 5), None, None, 2 * 8519680)
    assert detected_gpu("Mystery", 24 * GIB).capability == (8, 9)
    assert detected_gpu("Mystery", 24 * GIB, (10, 0)).workspace_bytes == 64 * MIB


def test_a_detected_card_without_memory_is_refused() -> None:
    with pytest.raises(DeviceError, match="0 bytes"):
        detected_gpu("NVIDIA A100", 0)


# Hypothetical cards and tiers ----------------------------------------------------------------------------------------


def test_a_hypothetical_card_has_a_bit_less_than_its_memory() -> None:
    card = from_vram(24)
    assert card.name == "24 GiB card"
    assert card.total_bytes == 24 * GIB
    assert card.usable_bytes / GIB == pytest.approx(23.65, abs=0.01)
    assert (card.bf16_flops, card.note) == (165.2e12, "rates are those of the RTX 4090")


@given(st.floats(0.01, 2000), st.floats(0.01, 2000))
def test_more_memory_never_means_less_usable(a: float, b: float) -> None:
    small, large = sorted((from_vram(a), from_vram(b)), key=lambda d: d.total_bytes)
    assert small.usable_bytes <= large.usable_bytes
    assert 0 <= small.usable_bytes <= small.total_bytes


@pytest.mark.parametrize("gib", [0, -1, float("nan"), float("inf"), -float("inf")])
def test_an_impossible_amount_of_memory_is_refused(gib: float) -> None:
    with pytest.raises(DeviceError, match="GiB of memory"):
        from_vram(gib)


def test_a_hypothetical_card_is_never_better_than_the_cards_of_that_size() -> None:
    for device in gpus():
        if device.kind is DeviceKind.CUDA:
            sold = -(-device.total_bytes // GIB)
            assert from_vram(sold).usable_bytes <= device.usable_bytes, device.name


def test_tiers_are_the_documented_ones_in_order() -> None:
    assert tuple(TIERS) == (8, 10, 12, 16, 24, 32, 48, 80, 96, 141)
    for gb, card in zip(TIERS, tiers(), strict=True):
        assert 0.92 * gb <= card.total_bytes / GIB <= gb
        assert card.note == f"stands for {gb} GB cards"
    usable = [card.usable_bytes for card in tiers()]
    assert usable == sorted(usable)


# The host ------------------------------------------------------------------------------------------------------------


def test_the_cpu_has_no_workspace_no_context_and_no_rounding() -> None:
    cpu = cpu_device(16 * GIB, fp32_flops=1e11)
    assert (cpu.kind, cpu.usable_bytes, cpu.fp32_flops, cpu.bf16_flops) == (DeviceKind.CPU, 16 * GIB, 1e11, None)
    assert (cpu.workspaces, cpu.context_bytes, cpu.rounding_bytes, cpu.capability) == ((), 0, 1, None)


def test_the_cpu_takes_this_machines_memory_by_default() -> None:
    total, available = host_memory()
    assert 0 < available <= total
    assert cpu_device().total_bytes == total


def test_an_impossible_amount_of_host_ram_is_refused() -> None:
    with pytest.raises(DeviceError, match="0 bytes"):
        cpu_device(0)


def test_a_cgroup_limit_lowers_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"memory.max": 8 * GIB, "memory.current": 3 * GIB}
    monkeypatch.setattr(devices, "_system_memory", lambda: (64 * GIB, 60 * GIB))
    monkeypatch.setattr(devices, "_number", lambda path: values[path.name])
    assert host_memory() == (8 * GIB, 5 * GIB)
    values["memory.max"] = 128 * GIB
    assert host_memory() == (64 * GIB, 60 * GIB)


# Resources -----------------------------------------------------------------------------------------------------------


def test_resources_are_read_by_name() -> None:
    assert resources.text("gpus.csv").startswith("name,")
    assert "gpus.csv" in resources.names("")
    assert not [name for name in resources.names("families") if name.endswith(".py")]


@pytest.mark.parametrize("name", ["nothing.csv", "families/nothing.toml", "nowhere/x", "families", "../pyproject.toml"])
def test_a_missing_resource_is_named(name: str) -> None:
    with pytest.raises(resources.ResourceError, match=name.rpartition("/")[2]):
        resources.text(name)


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(resources.ResourceError, match="nowhere"):
        resources.names("nowhere")


def test_devices_and_allocator_import_neither_torch_nor_pandas() -> None:
    code = "import sys, estimators.devices, estimators.allocator; estimators.devices.gpus(); "
    code += "print(sorted({'torch', 'pandas', 'sklearn'} & set(sys.modules)))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
