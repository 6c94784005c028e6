"""`advise run` refuses cached latents that would train on nonsense before a model is built, and says what it made up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from advisor.training import run
from advisor.training.data import Cached, slots
from estimators.schedule import Schedule
from probes.build import build_base, real_job
from probes.workload import WorkloadError, from_request, reduced_copy

PLAN = SimpleNamespace(workload=from_request({"model": "wan"}), schedule=Schedule())
SHAPE = (16, 3, 16, 16)


def _quiet(_: str) -> None:
    pass


def _source(folder: Path, model: str = "wan", seed: int = 0, batch: int = 1) -> tuple[Cached, Any]:
    workload = reduced_copy(from_request({"model": model, "batch": batch}))
    with torch.device("meta"):
        shape_only = build_base(workload)
    return Cached(folder, slots(workload, shape_only), batch, seed, _quiet), real_job(workload)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("advisor.training.loop.real_job", lambda *a, **k: pytest.fail("built a model"))


@pytest.mark.usefixtures("no_model")
def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="no safetensors files"):
        run(PLAN, steps=1, latents=tmp_path)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"hidden_states": torch.full(SHAPE, torch.nan)}, r"a\.safetensors: hidden_states holds values that are not finite"),
        ({"hidden_states": torch.zeros(SHAPE, dtype=torch.int32)}, r"hidden_states holds whole numbers \(int32\), the model takes"),
        ({"hidden_states": torch.zeros(16, 3, 16, 8)}, r"hidden_states is \(16, 3, 16, 8\), the shape of the reduced copy, .* is \(16, 3, 16, 16\)"),
        ({"hidden_states": torch.zeros(SHAPE).to(torch.float8_e4m3fn)}, r"a\.safetensors: hidden_states is float8_e4m3fn, .*valid: float16"),
        ({"hidden_states": torch.zeros(SHAPE).to(torch.float8_e5m2)}, r"a\.safetensors: hidden_states is float8_e5m2, .*valid: float16"),
        ({"timestep": torch.zeros(1), "hidden_states": torch.zeros(SHAPE)}, "the model takes no 'timestep'; a sample can hold"),
        ({str(i): torch.zeros(1) for i in range(9)}, r"it has: 0, 1, 2, 3, 4, 5 and 3 more$"),
        ({"encoder_hidden_states": torch.zeros(8, 96)}, "has no tensor 'hidden_states'; it has: encoder_hidden_states"),
    ],
)  # fmt: skip
def test_a_tensor_that_does_not_suit_is_named(tmp_path: Path, tensors: dict[str, torch.Tensor], message: str) -> None:
    save_file(tensors, str(tmp_path / "a.safetensors"))
    with pytest.raises(WorkloadError, match=message):
        run(PLAN, steps=1, latents=tmp_path, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_model")
def test_the_last_file_is_checked_as_the_first_is(tmp_path: Path) -> None:
    save_file({"hidden_states": torch.zeros(SHAPE)}, str(tmp_path / "a.safetensors"))
    (tmp_path / "b.safetensors").write_bytes(b"\x40\0\0\0\0\0\0\0{cut")
    with pytest.raises(WorkloadError, match=r"b\.safetensors: not a readable safetensors file"):
        run(PLAN, steps=1, latents=tmp_path)
    save_file(
        {"hidden_states": torch.zeros(SHAPE), "encoder_hidden_states": torch.zeros(32, 96)},
        str(tmp_path / "b.safetensors"),
    )
    with pytest.raises(WorkloadError, match=r"b\.safetensors: holds encoder_hidden_states, hidden_states, where a"):
        run(PLAN, steps=1, latents=tmp_path)


def test_what_the_files_leave_out_is_said(tmp_path: Path) -> None:
    save_file({"hidden_states": torch.randn(SHAPE)}, str(tmp_path / "a.safetensors"))
    result = run(PLAN, steps=2, latents=tmp_path, output=tmp_path / "out", seed=1)
    assert len(result.losses) == 2
    assert any("encoder_hidden_states (made up)" in note for note in result.notes)
    assert result.saved == tmp_path / "out" / "pytorch_lora_weights.safetensors"


def test_given_weights_are_not_trained_on_made_up_tensors(tmp_path: Path) -> None:
    workload = reduced_copy(from_request({"model": "flux"}))
    with torch.device("meta"):
        wanted = slots(workload, build_base(workload))
    constant = ("txt_ids", "guidance")
    sample = {name: torch.zeros(slot.shape) for name, slot in wanted.items() if name not in constant}
    save_file(sample, str(tmp_path / "a.safetensors"))
    source = Cached(tmp_path, wanted, 1, 0, _quiet, complete=True)
    assert "not in the cached samples: txt_ids (zeros), guidance (ones)" in source.notes
    del sample["img_ids"]
    save_file(sample, str(tmp_path / "a.safetensors"))
    with pytest.raises(WorkloadError, match="the samples have no img_ids, and the given weights cannot learn"):
        Cached(tmp_path, wanted, 1, 0, _quiet, complete=True)


def test_every_sample_comes_once_an_epoch_and_the_order_depends_on_the_seed_only(tmp_path: Path) -> None:
    for i in range(6):
        save_file({"hidden_states": torch.full(SHAPE, float(i))}, str(tmp_path / f"{i}.safetensors"))

    def epochs(seed: int) -> list[list[float]]:
        source, job = _source(tmp_path, seed=seed, batch=2)
        seen = [source.batch(i, job)["hidden_states"][:, 0, 0, 0, 0].tolist() for i in range(6)]
        return [[value for batch in part for value in batch] for part in (seen[:3], seen[3:])]

    first, second = epochs(0)
    assert sorted(first) == sorted(second) == [0, 1, 2, 3, 4, 5]
    assert first != second
    assert epochs(0) == [first, second]
    assert epochs(1) != [first, second]


def test_fewer_samples_than_the_batch_are_repeated_and_that_is_said(tmp_path: Path) -> None:
    save_file({"hidden_states": torch.ones(SHAPE)}, str(tmp_path / "a.safetensors"))
    source, job = _source(tmp_path, batch=3)
    assert source.batch(0, job)["hidden_states"].shape == (3, *SHAPE)
    assert any("they are repeated" in note for note in source.notes)


def test_a_plan_with_sizes_and_doubled_batches_says_what_is_trained(tmp_path: Path) -> None:
    for i in range(2):
        save_file({"hidden_states": torch.ones(16, 32, 32)}, str(tmp_path / f"{i}.safetensors"))
    request = {"model": "sd3", "aspect_buckets": 512, "cfg_batch": True}
    plan = SimpleNamespace(workload=from_request(request), schedule=Schedule())
    notes = " ".join(run(plan, steps=1, latents=tmp_path, device="cpu").notes)
    assert "the second sample of each is an ordinary one" in notes
    assert "1 batches of 2 an epoch" in notes
    assert f"one size of the plan's {len(plan.workload.buckets)} is trained here" in notes


def test_tensors_in_dictionaries_and_lists_reach_the_model(tmp_path: Path) -> None:
    source_folder, listed = tmp_path / "sdxl", tmp_path / "z"
    source_folder.mkdir()
    listed.mkdir()
    workload = reduced_copy(from_request({"model": "sdxl"}))
    with torch.device("meta"):
        wanted = slots(workload, build_base(workload))
    sample = {name: torch.randn(slot.shape) for name, slot in wanted.items()}
    assert "added_cond_kwargs.text_embeds" in sample
    save_file(sample, str(source_folder / "a.safetensors"))
    source, job = _source(source_folder, "sdxl")
    batch = source.batch(0, job)
    for key in ("text_embeds", "time_ids"):
        assert torch.equal(batch["added_cond_kwargs"][key][0], sample[f"added_cond_kwargs.{key}"])
    assert torch.equal(batch["sample"][0], sample["sample"])
    assert not any("not in the cached" in note for note in source.notes)

    workload = reduced_copy(from_request({"model": "z_image"}))
    with torch.device("meta"):
        wanted = slots(workload, build_base(workload))
    save_file({name: torch.randn(slot.shape) for name, slot in wanted.items()}, str(listed / "a.safetensors"))
    source, job = _source(listed, "z_image", batch=2)
    batch = source.batch(0, job)
    assert [len(batch[name]) for name in ("x", "cap_feats")] == [2, 2]
    assert torch.equal(batch["x"][0], batch["x"][1])
