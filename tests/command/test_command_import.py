"""advise import: a trainer's configuration is data; what it asks for, what would be better, and what is not understood."""

import json
from pathlib import Path
from typing import Any

import pytest

from advisor import importing
from probes.workload import WorkloadError

CONFIG = {
    "--model_family": "sd3",
    "--model_flavour": "medium",
    "--model_type": "lora",
    "--lora_rank": 32,
    "--train_batch_size": "2",
    "--resolution": 512,
    "--resolution_type": "pixel",
    "--optimizer": "adamw_bf16",
    "--gradient_checkpointing": "true",
    "--gradient_checkpointing_interval": 2,
    "--seed": 42,
}


def write(folder: Path, content: Any) -> Path:
    path = folder / "config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_what_it_asks_for(tmp_path: Path) -> None:
    read = importing.read(write(tmp_path, CONFIG))
    assert read.request == {
        "model": "sd3",
        "variant": "medium",
        "resolution": 512,
        "batch": 2,
        "rank": 32,
        "optimizer": "adamw_bf16",
    }
    assert read.schedule.name == "torch interval=2"


def test_keys_without_dashes_are_the_same(tmp_path: Path) -> None:
    plain = {k.lstrip("-"): v for k, v in CONFIG.items()}
    assert importing.read(write(tmp_path, plain)).request == importing.read(write(tmp_path, CONFIG)).request


def test_the_patch_changes_checkpointing_keys_only(tmp_path: Path) -> None:
    read = importing.read(write(tmp_path, CONFIG))
    patched = read.patched({"gradient_checkpointing": True, "gradient_checkpointing_backend": "unsloth"})
    assert "--gradient_checkpointing_interval" not in patched
    assert patched["--gradient_checkpointing_backend"] == "unsloth"
    assert {k: v for k, v in patched.items() if "checkpointing" not in k} == {
        k: v for k, v in CONFIG.items() if "checkpointing" not in k
    }
    assert read.changes({"gradient_checkpointing": True, "gradient_checkpointing_backend": "unsloth"}) == [
        'gradient_checkpointing_backend: not set -> "unsloth"',
        "gradient_checkpointing_interval: 2 -> left out",
    ]


def test_absent_checkpointing_is_the_trainers_default(tmp_path: Path) -> None:
    config = {k: v for k, v in CONFIG.items() if "checkpointing" not in k}
    assert importing.read(write(tmp_path, config)).schedule.name == "torch"


def test_areas_are_megapixels(tmp_path: Path) -> None:
    read = importing.read(write(tmp_path, {**CONFIG, "--resolution": 1.0, "--resolution_type": "area"}))
    assert read.request["resolution"] == "1024x1024"
    assert any("megapixels" in note for note in read.notes)


def test_what_is_not_understood_is_said(tmp_path: Path) -> None:
    read = importing.read(
        write(tmp_path, {**CONFIG, "--musubi_blocks_to_swap": 4, "--optimizer": "adamw_bf17", "--lora_type": "lycoris"})
    )
    notes = " ".join(read.notes)
    assert "musubi_blocks_to_swap" in notes
    assert "adamw_bf17" in notes
    assert "lycoris" in notes


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ("[" * 100_000, "not valid JSON"),
        ({"learning_rate": 1}, "no model_family"),
        ({**CONFIG, "--model_family": "sd33"}, "model_family"),
        ({**CONFIG, "--base_model_precision": "int3"}, "base_model_precision"),
        ({**CONFIG, "--gradient_checkpointing_interval": -2}, "interval"),
    ],
)
def test_bad_configurations_get_one_line(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(WorkloadError, match=message) as caught:
        importing.read(write(tmp_path, content))
    assert "\n" not in str(caught.value)


def test_the_command_answers_and_writes(advise: Any, tmp_path: Path) -> None:
    path = write(tmp_path, CONFIG)
    done = advise("import", str(path), "--gpu", "4090", "--output", str(tmp_path / "new.json"))
    assert done.status == 0
    assert "configured" in done.out
    new = json.loads((tmp_path / "new.json").read_text())
    assert new["--seed"] == 42
    again = advise("import", str(tmp_path / "new.json"), "--gpu", "4090", "--json")
    found = json.loads(again.out)
    assert found["imported"]["schedule"]["name"] == found["recommended"]["name"]
    assert advise("import", str(tmp_path / "missing.json"), "--gpu", "4090").status == 2
