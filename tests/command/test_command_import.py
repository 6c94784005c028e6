"""advise import: a trainer's configuration is data; what it asks for, what would be better, and what is not understood."""

import json
import os
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


def test_dora_and_its_scale_are_read(tmp_path: Path) -> None:
    read = importing.read(write(tmp_path, {**CONFIG, "--use_dora": True, "--use_rslora": "true"}))
    asked = importing.workload(read)
    assert (asked.dora, asked.rslora) == (True, True)


def test_dora_on_a_quantised_base_is_refused_with_its_key(tmp_path: Path) -> None:
    read = importing.read(write(tmp_path, {**CONFIG, "--use_dora": True, "--base_model_precision": "nf4-bnb"}))
    with pytest.raises(WorkloadError, match="use_dora with base_model_precision nf4 cannot be estimated yet"):
        importing.workload(read)


def test_what_is_not_understood_is_said(tmp_path: Path) -> None:
    read = importing.read(
        write(
            tmp_path, {**CONFIG, "--enable_group_offload": True, "--optimizer": "adamw_bf17", "--lora_type": "lycoris"}
        )
    )
    notes = " ".join(read.notes)
    assert "enable_group_offload" in notes
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
        ('{"--model_family": "sd3", "--lora_alpha": NaN}', "NaN is not a JSON number"),
        ({**CONFIG, "--model_family": 3}, "model_family must be text, not 3"),
        ({**CONFIG, "--model_flavour": ["medium"]}, "model_flavour must be text"),
        ({**CONFIG, "--ramtorch": "maybe"}, 'ramtorch must be true or false, not "maybe"'),
        ({**CONFIG, "--fuse_qkv_projections": 1}, "fuse_qkv_projections must be true or false, not 1"),
        (
            {**CONFIG, "--model_type": "loro"},
            "model_type 'loro' is not known here .did you mean lora..; known: lora, full",
        ),
        ({**CONFIG, "--model_type": True}, "model_type must be text, not true"),
        ({**CONFIG, "--lora_type": "dora"}, "lora_type 'dora' is not known here.*; known: standard, lycoris"),
        ({**CONFIG, "--lora_type": {}}, "lora_type must be text, not {}"),
        ({**CONFIG, "--optimizer": 7}, "optimizer must be text, not 7"),
        ({**CONFIG, "--base_model_precision": []}, "base_model_precision must be text"),
        ({**CONFIG, "--resolution": [512]}, r"resolution must be a number, not \[512\]"),
        ({**CONFIG, "--resolution_type": "pixels"}, "resolution_type 'pixels'.*did you mean pixel"),
        ({**CONFIG, "lora_rank": 8}, "lora_rank is in it twice"),
    ],
)
def test_bad_configurations_get_one_line(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(WorkloadError, match=message) as caught:
        importing.read(write(tmp_path, content))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("lora_rank", "many", "lora_rank must be a whole number from 1"),
        ("train_batch_size", 0, "train_batch_size must be from 1"),
        ("lora_dropout", 1.0, "lora_dropout must be from 0 to 0.999"),
        ("resolution", 100, "resolution 100 does not fit sd3"),
        ("model_flavour", "huge", "model_flavour: .*huge"),
    ],
)
def test_a_value_that_the_model_cannot_have_is_told_by_its_key(
    tmp_path: Path, key: str, value: Any, message: str
) -> None:
    read = importing.read(write(tmp_path, {**CONFIG, f"--{key}": value}))
    with pytest.raises(WorkloadError, match=message) as caught:
        importing.workload(read)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert f"--{key}" not in str(caught.value)


@pytest.mark.parametrize("on", [True, "true", "True"])
def test_true_may_be_text(tmp_path: Path, on: Any) -> None:
    read = importing.read(write(tmp_path, {**CONFIG, "--ramtorch": on, "--fuse_qkv_projections": on}))
    assert read.request["weights_offload"] == "ramtorch"
    assert read.request["fuse_qkv"] is True
    off = importing.read(write(tmp_path, {**CONFIG, "--ramtorch": "false", "--fuse_qkv_projections": ""}))
    assert not {"weights_offload", "fuse_qkv"} & set(off.request)


@pytest.mark.parametrize(
    ("percent", "offload"), [("75", "ramtorch:75"), (100, "ramtorch"), ("", "ramtorch"), (0, None)]
)
def test_the_share_of_linears_under_ramtorch_is_read(tmp_path: Path, percent: Any, offload: str | None) -> None:
    read = importing.read(write(tmp_path, {**CONFIG, "--ramtorch": True, "--ramtorch_transformer_percent": percent}))
    assert read.request.get("weights_offload") == offload
    assert not any("ramtorch" in n for n in read.notes)


@pytest.mark.parametrize("percent", ["many", 101, -1, 7.5, True])
def test_a_share_of_linears_that_cannot_be_is_refused(tmp_path: Path, percent: Any) -> None:
    config = write(tmp_path, {**CONFIG, "--ramtorch": True, "--ramtorch_transformer_percent": percent})
    with pytest.raises(WorkloadError, match="ramtorch_transformer_percent must be from 0 to 100"):
        importing.read(config)


def test_swapped_blocks_are_read(tmp_path: Path) -> None:
    read = importing.read(
        write(tmp_path, {**CONFIG, "--musubi_blocks_to_swap": "12", "--musubi_block_swap_device": "cpu"})
    )
    assert read.request["weights_offload"] == "blocks:12"
    assert not any("musubi" in n for n in read.notes)
    assert read.changes({**read.schedule.to_controls(), "musubi_blocks_to_swap": 12}) == []
    assert "weights_offload" not in importing.read(write(tmp_path, {**CONFIG, "--musubi_blocks_to_swap": 0})).request
    disk = {**CONFIG, "--musubi_blocks_to_swap": 12, "--musubi_block_swap_device": "meta"}
    assert any("musubi_block_swap_device meta" in n for n in importing.read(write(tmp_path, disk)).notes)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"--musubi_blocks_to_swap": 4, "--ramtorch": True}, "exclude each other"),
        ({"--musubi_blocks_to_swap": "many"}, "musubi_blocks_to_swap must be a number of blocks"),
    ],
)
def test_swapped_blocks_that_the_trainer_would_not_take(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        importing.read(write(tmp_path, {**CONFIG, **more}))


def test_what_changes_memory_and_is_not_read_is_noted(tmp_path: Path) -> None:
    more = {"--mixed_precision": "fp16", "--attention_mechanism": "sageattention", "--use_ema": True}
    read = importing.read(write(tmp_path, {**CONFIG, **more}))
    assert "ema" not in read.request
    notes = " ".join(read.notes)
    for key in ("mixed_precision fp16", "attention_mechanism sageattention", "use_ema is on"):
        assert key in notes
    usual = {"--mixed_precision": "bf16", "--attention_mechanism": "diffusers", "--use_ema": False}
    assert importing.read(write(tmp_path, {**CONFIG, **usual})).notes == importing.read(write(tmp_path, CONFIG)).notes


def test_an_average_on_the_card_is_counted(tmp_path: Path) -> None:
    read = importing.read(write(tmp_path, {**CONFIG, "--use_ema": True, "--ema_device": "accelerator"}))
    assert read.request["ema"] is True
    assert not any("ema" in n for n in read.notes)


def test_buckets_and_what_else_is_on_the_card_are_said_beside_a_configuration(tmp_path: Path) -> None:
    read = importing.read(write(tmp_path, CONFIG))
    assert any("--bucket" in n for n in read.notes)
    more = importing.read(read.path, {"buckets": ["1024x1024", "832x1216"], "resident_gib": 2})
    assert not any("--bucket" in n for n in more.notes)
    workload = importing.workload(more)
    assert (workload.buckets, workload.resident_gib) == (("512x512", "1024x1024", "832x1216"), 2.0)


def test_an_absent_batch_size_is_the_trainers(tmp_path: Path) -> None:
    read = importing.read(write(tmp_path, {k: v for k, v in CONFIG.items() if "batch" not in k}))
    assert read.request["batch"] == 4
    assert any("train_batch_size" in note for note in read.notes)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, message in (
        (tmp_path / "fifo", "not a regular file"),
        (Path("/dev/zero"), "not a regular"),
        (tmp_path, "folder"),
    ):
        with pytest.raises(WorkloadError, match=message):
            importing.read(path)


def test_output_replaces_configurations_only_and_says_when_it_is_the_source(advise: Any, tmp_path: Path) -> None:
    path = write(tmp_path, CONFIG)
    other = tmp_path / "other.json"
    other.write_text('{"my": "notes"}')
    done = advise("import", str(path), "--gpu", "4090", "--output", str(other))
    assert done.status == 2
    assert f"--output {other}: the file holds something else" in done.error
    assert other.read_text() == '{"my": "notes"}'
    done = advise("import", str(path), "--gpu", "4090", "--output", str(path))
    assert done.status == 0
    assert "is the configuration that was read; it is replaced" in done.err


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


def test_options_count_instead_of_the_configuration(advise: Any, tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"model_family": "sd3", "resolution": 256, "lora_rank": 8, "model_type": "lora", "train_batch_size": 1},
    )
    plan = tmp_path / "plan.json"
    options = (
        "--vram",
        "24",
        "--rank",
        "32",
        "--ema",
        "--resident-gib",
        "2",
        "--aspect-buckets",
        "256",
        "--plan",
        str(plan),
    )
    found = json.loads(advise("import", str(path), *options, "--lokr-factor", "4", "--json").out)
    job = found["workload"]
    assert (job["rank"], job["ema"], job["resident_gib"]) == (32, True, 2.0)
    assert len(job["buckets"]) > 1
    assert any("--rank 32 counts instead of its 8" in w for w in found["warnings"])
    assert any("--lokr-factor has no effect" in w for w in found["warnings"])
    assert found["patched"]["lora_rank"] == 8
    assert json.loads(plan.read_text())["workload"]["rank"] == 32


def test_a_bad_option_is_told_by_its_own_name(advise: Any, tmp_path: Path) -> None:
    path = write(tmp_path, {"model_family": "sd3", "lora_rank": 8, "model_type": "lora"})
    done = advise("import", str(path), "--vram", "24", "--rank", "0")
    assert done.status == 2
    assert "--rank must be" in done.err
    assert "lora_rank" not in done.err
