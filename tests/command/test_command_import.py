"""advise import: a trainer's configuration is data; what it asks for, what would be better, and what is not understood."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from advisor import importing
from probes import build
from probes.workload import WorkloadError, reduced_copy

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


def test_keys_of_caching_and_validation_name_the_options_for_them(tmp_path: Path) -> None:
    read = importing.read(write(tmp_path, {**CONFIG, "--vae_batch_size": 4, "--validation_resolution": "1024x1024"}))
    (note,) = (n for n in read.notes if "--caching-batch" in n)
    assert note.startswith("vae_batch_size, validation_resolution: ")
    assert not any("--caching" in n for n in importing.read(write(tmp_path, CONFIG)).notes)


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


# LyCORIS' own file ----------------------------------------------------------------------------------------------------

LYCORIS = {
    "algo": "lokr",
    "multiplier": 1.0,
    "linear_dim": 10000,
    "linear_alpha": 1,
    "factor": 16,
    "bypass_mode": True,
    "apply_preset": {
        "target_module": ["Attention"],
        "module_algo_map": {"Attention": {"factor": 16}, "FeedForward": {"factor": 8}},
    },
}


def lycoris(folder: Path, content: Any, given: dict[str, Any] | None = None, **more: Any) -> importing.Imported:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "lycoris.json").write_text(text)
    config = {
        **CONFIG,
        "--lora_type": "lycoris",
        "--lycoris_config": "lycoris.json",
        **{f"--{k}": v for k, v in more.items()},
    }
    return importing.read(write(folder, config), given)


def test_lycoris_own_file_is_read(tmp_path: Path) -> None:
    read = lycoris(tmp_path, LYCORIS)
    workload = importing.workload(read)
    assert (workload.adapter, workload.rank, workload.lokr_full_matrix) == ("lokr", 10000, False)
    assert workload.lokr_factor == "16,Attention=16,FeedForward=8"
    assert workload.lora_targets == ("Attention", "FeedForward")  # LyCORIS makes what its map names a target
    assert not any("lycoris" in n for n in read.notes)


def test_it_is_looked_for_beside_the_configuration_and_then_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(there)
    (there / "lycoris.json").write_text(json.dumps({**LYCORIS, "linear_dim": 3}))
    path = write(here, {**CONFIG, "--lora_type": "lycoris", "--lycoris_config": "lycoris.json"})
    assert importing.read(path).request["rank"] == 3
    (here / "lycoris.json").write_text(json.dumps({**LYCORIS, "linear_dim": 5}))
    assert importing.read(path).request["rank"] == 5


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"linear_dim": None}, {"rank": 4}),
        ({"linear_alpha": 0}, {"alpha": 10000.0}),
        ({"factor": None}, {"lokr_factor": "-1,Attention=16,FeedForward=8"}),
        ({"factor": "8"}, {"lokr_factor": "8,Attention=16,FeedForward=8"}),
        (
            {"factor": 4, "apply_preset": {"target_module": ["FeedForward"]}},
            {"lokr_factor": 4, "lora_targets": ("FeedForward",)},
        ),
        ({"apply_preset": None}, {"lora_targets": ("Linear",)}),
        ({"linear_dim": 1_000_000}, {"lokr_full_matrix": True}),
        ({"full_matrix": "true"}, {"lokr_full_matrix": True}),
        ({"full_matrix": False}, {"lokr_full_matrix": False}),
        ({"use_scalar": True}, {"lokr_scalar": True}),
        ({"bypass_mode": False}, {"lokr_rebuild": True}),
        ({"algo": "LoHa", "linear_dim": 8, "linear_alpha": 4}, {"adapter": "loha", "rank": 8, "alpha": 4.0}),
        (
            {"algo": None, "linear_dim": 8},
            {"adapter": "lora", "rank": 8, "lora_targets": ("to_k", "to_q", "to_v", "to_out.0")},
        ),
        ({"algo": "locon", "linear_dim": 8, "dropout": 0.2}, {"adapter": "lora", "lora_dropout": 0.2}),
    ],
    ids=str,
)
def test_each_key_of_it_counts(tmp_path: Path, change: dict[str, Any], expected: dict[str, Any]) -> None:
    workload = importing.workload(lycoris(tmp_path, {**LYCORIS, **change}))
    found = {k: getattr(workload, k) for k in expected}
    if "lora_targets" in expected:
        found["lora_targets"], expected = (
            tuple(sorted(found["lora_targets"])),
            expected | {"lora_targets": tuple(sorted(expected["lora_targets"]))},
        )
    assert found == expected


def test_bypass_mode_is_off_where_it_is_not_set_and_what_that_means_depends_on_the_base(tmp_path: Path) -> None:
    plain = {k: v for k, v in LYCORIS.items() if k != "bypass_mode"}
    told = {"bf16": "planned so", "int8-torchao": "planned as if it were on", "nf4-bnb": None, "int8-quanto": None}
    for precision, text in told.items():
        read = lycoris(tmp_path, plain, base_model_precision=None if precision == "bf16" else precision)
        assert importing.workload(read).lokr_rebuild is (precision == "bf16")
        notes = [n for n in read.notes if "bypass_mode" in n]
        assert (text in notes[0] and len(notes) == 1) if text else notes == []
    assert not importing.workload(lycoris(tmp_path, plain, {"precision": "int8-quanto"})).lokr_rebuild
    swapped = lycoris(tmp_path, plain, musubi_blocks_to_swap=4)
    assert not importing.workload(swapped).lokr_rebuild
    assert any("with weights on the host" in n for n in swapped.notes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dropout": 0.1}, "dropout 0.1"),
        ({"rank_dropout": 0.1, "bypass_mode": False}, "rank_dropout 0.1"),
        ({"module_dropout": 0.1}, "module_dropout 0.1"),
        ({"dora_wd": True}, "dora_wd is on"),
        ({"weight_decompose": True}, "weight_decompose does nothing here"),
        ({"train_norm": True}, "train_norm is on"),
        ({"decompose_both": True}, "decompose_both is on"),
        ({"conv_dim": 8}, "conv_dim is on"),
        ({"preset": "attn-mlp"}, "preset 'attn-mlp'"),
        ({"lienar_dim": 8}, "not known here and not taken into account: lienar_dim"),
        ({"algo": "loha", "linear_dim": 8, "use_scalar": True}, "use_scalar is on and is not planned for with loha"),
        ({"algo": "loha", "linear_dim": 8, "bypass_mode": False}, "bypass_mode is not on"),
        ({"algo": "lora", "linear_dim": 8}, "planned as PEFT's"),
        ({"apply_preset": {}}, "no target_module in it"),
        ({"apply_preset": {"target_module": [], "target_name": ["proj_out", "blocks.*"]}}, "patterns are not planned for: blocks.*"),
        ({"apply_preset": {"target_module": [], "target_name": ["proj_out"]}}, "names that end so"),
        ({"apply_preset": {"target_module": ["Attention"], "exclude_name": ["x"]}}, "exclude_name is not planned for"),
        ({"apply_preset": {"target_module": [], "module_algo_map": {"A": {"algo": "loha"}}}}, "A gets loha"),
        ({"apply_preset": {"target_module": [], "module_algo_map": {"A": {"dim": 4, "full_matrix": True}}}}, "alone: dim, full_matrix"),
    ],
    ids=str,
)  # fmt: skip
def test_what_changes_memory_and_is_not_planned_for_is_noted_by_its_key(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    notes = [n for n in lycoris(tmp_path, {**LYCORIS, **change}).notes if n.startswith("lycoris_config lycoris.json: ")]
    assert any(said in n for n in notes), notes


@pytest.mark.parametrize(
    ("key", "value"), [("rank_dropout", 0.1), ("multiplier", 0.5), ("dropout", 0), ("rs_lora", True)]
)
def test_what_costs_nothing_is_not(tmp_path: Path, key: str, value: Any) -> None:
    assert lycoris(tmp_path, {**LYCORIS, key: value}).notes == lycoris(tmp_path, LYCORIS).notes


@pytest.mark.parametrize("content", [None, "{", "[" * 100_000])
def test_a_file_that_is_missing_or_no_json_is_noted_and_lokr_taken(tmp_path: Path, content: str | None) -> None:
    read = lycoris(tmp_path, content or "{}", lycoris_config="lycoris.json" if content else "other.json")
    assert importing.workload(read).adapter == "lokr"
    [note] = [n for n in read.notes if "lycoris" in n]
    assert "taken as LoKr, with factor 16" in note
    assert "\n" not in note


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "lycoris_config lycoris.json: is not a JSON object"),
        ({**LYCORIS, "algo": "boft"}, "algo 'boft' cannot be planned for; lokr, loha, lora, locon can"),
        ({**LYCORIS, "linear_dim": "many"}, "linear_dim must be a number"),
        ({**LYCORIS, "linear_dim": 1.5}, "linear_dim must be a whole number"),
        ({**LYCORIS, "apply_preset": []}, None),
        ({**LYCORIS, "apply_preset": [1]}, "apply_preset must be an object"),
        ({**LYCORIS, "apply_preset": {"target_modules": []}}, "LyCORIS does not know target_modules"),
        ({**LYCORIS, "apply_preset": {"target_module": "Attention"}}, "target_module must be a list of names"),
        ({**LYCORIS, "apply_preset": {"module_algo_map": {"A": 4}}}, "module_algo_map must map names to objects"),
        ({**LYCORIS, "factor": 0, "apply_preset": {"target_module": ["A"]}}, "lycoris_config: factor must be from 1"),
        ({**LYCORIS, "linear_dim": 0}, "lycoris_config: linear_dim must be from 1"),
    ],
)
def test_what_lycoris_would_not_take_is_refused_with_its_key(tmp_path: Path, content: Any, message: str | None) -> None:
    if message is None:
        importing.workload(lycoris(tmp_path, content))
        return
    with pytest.raises(WorkloadError, match=message) as caught:
        importing.workload(lycoris(tmp_path, content))
    assert "\n" not in str(caught.value)


def test_another_adapter_may_be_given_in_place_of_one_that_cannot_be_planned_for(tmp_path: Path) -> None:
    read = lycoris(tmp_path, {**LYCORIS, "algo": "boft"}, {"adapter": "lokr"})
    assert importing.workload(read).adapter == "lokr"


def test_its_algorithms_say_nothing_beside_a_full_fine_tune(tmp_path: Path) -> None:
    read = lycoris(tmp_path, LYCORIS, {"adapter": "full"})
    assert importing.workload(read).adapter == "full"
    assert not any("not planned for beside" in note for note in read.notes)


@pytest.mark.parametrize(
    "preset",
    [
        LYCORIS["apply_preset"],
        {"target_module": ["JointTransformerBlock"], "module_algo_map": {"FeedForward": {"factor": 2}}},
        {"module_algo_map": {"JointTransformerBlock": {"factor": 2}, "Attention": {}}},
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize("rank", [2, 10000])
def test_its_adapters_are_those_that_lycoris_makes(tmp_path: Path, preset: dict[str, Any], rank: int) -> None:
    package = pytest.importorskip("lycoris")
    import torch

    content = {**LYCORIS, "linear_dim": rank, "factor": 4, "apply_preset": preset}
    workload = reduced_copy(importing.workload(lycoris(tmp_path, content)))
    model = build.build_base(workload)
    defaults = {"target_module": ["Linear"], "target_name": [], "module_algo_map": {}, "name_algo_map": {}}
    package.LycorisNetwork.apply_preset({**defaults, **preset})
    settings = {k: v for k, v in content.items() if k != "apply_preset"}
    network = package.create_lycoris(model, **settings)
    real = {m.lora_name: {n: p.shape for n, p in m.named_parameters()} for m in network.loras}
    model = build.build_base(workload)
    build.inject_adapter(model, workload)
    ours: dict[str, dict[str, torch.Size]] = {}
    for name, p in model.named_parameters():
        owner, _, key = name.rpartition(".")
        if key.startswith("lokr_"):
            ours.setdefault("lycoris_" + owner.replace(".", "_"), {})[key] = p.shape
    assert ours == real
