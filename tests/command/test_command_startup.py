"""What is imported, and how long it takes."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from command_helpers import SMALL, environment

HEAVY = ("torch", "huggingface_hub", "numpy", "pandas", "diffusers", "peft", "transformers", "pydantic")
OPTIONS = (
    *("model", "variant", "model-class", "model-config", "revision", "resolution", "frames", "batch", "caption-tokens"),
    *(
        "adapter",
        "rank",
        "alpha",
        "lora-targets",
        "lora-dropout",
        "dora",
        "rslora",
        "accumulate",
        "ema",
        "master-weights",
        "lokr-factor",
        "lokr-full-matrix",
        "lokr-scalar",
        "lokr-rebuild",
        "precision",
        "optimizer",
    ),
    *("attention", "fuse-qkv", "compile", "weights-offload", "executor", "objective"),
    *("gpu", "vram", "headroom", "host-ram", "json", "export", "plan", "version"),
)
LOADED = """
import contextlib, io, json, sys
from advisor.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    status = main(sys.argv[1:])
print(json.dumps([status, sorted(m for m in sys.modules if "." not in m)]))
"""


def _imported(args: list[str], cache: Path) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *args], capture_output=True, text=True, env=environment(cache), check=True
    )
    status, modules = json.loads(done.stdout)
    assert status == 0, done.stderr
    return set(modules)


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["verify", "--help"], ["models", "--json", "--help"]])
def test_help_imports_nothing_heavy(tmp_path: Path, args: list[str]) -> None:
    assert not _imported(args, tmp_path) & set(HEAVY)


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = f"import sys, advisor; sys.exit(bool(set({HEAVY!r}) & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("device", [["--gpu", "4090"], []])
def test_an_answer_from_a_stored_profile_imports_no_torch(cache: Path, device: list[str]) -> None:
    subprocess.run(
        [sys.executable, "-m", "advisor.cli", *SMALL, *device], env=environment(cache), capture_output=True, check=True
    )
    assert not _imported([*SMALL, *device], cache) & (set(HEAVY) - {"numpy"})


def _least_cpu_seconds(args: list[str], cache: Path, tries: int = 4) -> float:
    """User and system time of the quickest of some runs: other work on the machine counts less than in wall time."""
    found = []
    for _ in range(tries):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "advisor.cli", *args], env=environment(cache), capture_output=True, check=False
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found)


def test_help_is_quick(cache: Path) -> None:
    assert _least_cpu_seconds(["--help"], cache) < 0.6  # 0.2 s on an idle core


def test_a_stored_answer_is_quick(cache: Path) -> None:
    assert _least_cpu_seconds([*SMALL, "--gpu", "4090"], cache) < 1.5  # 0.6 s on an idle core


def test_help_groups_the_options_and_names_units(cache: Path) -> None:
    text = subprocess.run(
        [sys.executable, "-m", "advisor.cli", "--help"],
        env=environment(cache),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for panel in ("Model", "Training", "Execution", "Device", "Output", "Commands"):
        assert f"─ {panel} ─" in text
    for option in OPTIONS:
        assert f" --{option} " in text
    assert "in GiB" in text
    assert "pixels" in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
