"""Given weights are trained, and what is saved is what diffusers loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from advisor.training import run, weights
from estimators.schedule import Backend, Schedule
from probes.build import Job, build_base, model_class
from probes.catalogue import families
from probes.workload import Workload, WorkloadError, from_request, reduced_copy

SMALL: dict[str, dict[str, Any]] = {
    "sd3": {"resolution": 128, "caption_tokens": 16},
    "sdxl": {"resolution": 128, "caption_tokens": 16},
    "flux": {"resolution": 128, "caption_tokens": 16},
}


def _plan(name: str, **more: Any) -> Any:
    request = {"model": name, **SMALL[name], "rank": 4, "alpha": 10, **more}
    return SimpleNamespace(workload=from_request(request), schedule=Schedule(backend=Backend.TORCH))


def _given(name: str, folder: Path) -> Path:
    """A small model with random weights, as a diffusers pipeline folder holds it."""
    torch.manual_seed(7)
    model: Any = build_base(reduced_copy(from_request({"model": name})))
    with torch.no_grad():
        for p in model.parameters():
            if p.numel() > 1 and not p.any():
                p.normal_(std=0.02)
    model.save_pretrained(folder / weights.prefix_of(model))
    return folder


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[Job, Path, Any]]:
    """Trains a small given model for three steps; returns the job, the output folder and the result."""
    kept: list[Job] = []
    save = weights.save

    def spy(job: Job, workload: Workload, folder: Path) -> Path:
        kept.append(job)
        return save(job, workload, folder)

    monkeypatch.setattr(weights, "save", spy)

    def train(name: str, **more: Any) -> tuple[Job, Path, Any]:
        source = _given(name, tmp_path / "given")
        result = run(
            _plan(name, **more), steps=3, lr=0.02, output=tmp_path / "out", pretrained=str(source), device="cpu"
        )
        return kept[-1], tmp_path / "out", result

    return train


def _output(model: Any, job: Job) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(**job.inputs, return_dict=False)[0]


def _fresh(job: Job, tmp_path: Path) -> Any:
    part = weights.prefix_of(job.model)
    return type(job.model).from_pretrained(tmp_path / "given" / part)


@pytest.mark.parametrize("name", ["sd3", "sdxl", pytest.param("flux", marks=pytest.mark.slow)])
def test_diffusers_loads_the_lora_with_its_alpha(name: str, trained: Any, tmp_path: Path) -> None:
    job, out, result = trained(name)
    assert any("the given model itself trains on the CPU" in note for note in result.notes)
    assert any("the given model has" in note and "parameters, the planned" in note for note in result.notes)
    assert not any("random" in note and "weights" in note for note in result.notes)
    fresh = _fresh(job, tmp_path)
    before = _output(fresh, job)
    fresh.load_lora_adapter(str(out), prefix=weights.prefix_of(job.model), use_safetensors=True)
    after = _output(fresh, job)
    assert torch.allclose(after, _output(job.model, job), atol=1e-5)
    assert (after - before).abs().max() > 1e-2
    with safe_open(str(out / weights.ADAPTER_FILE), framework="pt") as file:
        metadata = json.loads(file.metadata()[weights.METADATA_KEY])
    prefix = weights.prefix_of(job.model)
    assert (metadata[f"{prefix}.lora_alpha"], metadata[f"{prefix}.r"]) == (10, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", families())
def test_diffusers_loads_the_lora_of_every_family_that_it_has_a_loader_for(name: str, tmp_path: Path) -> None:
    small = reduced_copy(from_request({"model": name}))
    if not hasattr(model_class(small.family.model_class), "load_lora_adapter"):
        pytest.skip("diffusers has no loader for this class")
    _given(name, tmp_path / "given")
    plan = SimpleNamespace(workload=small, schedule=Schedule(backend=Backend.TORCH))
    result = run(plan, steps=1, output=tmp_path / "out", pretrained=str(tmp_path / "given"), device="cpu")
    assert not any("no loader" in note for note in result.notes)
    cls: Any = model_class(small.family.model_class)
    model = cls.from_pretrained(tmp_path / "given" / ("unet" if "UNet" in cls.__name__ else "transformer"))
    model.load_lora_adapter(str(tmp_path / "out"), prefix=weights.prefix_of(model), use_safetensors=True)
    held = load_file(tmp_path / "out" / weights.ADAPTER_FILE)
    loaded = {n.replace(".default_0", ""): p for n, p in model.named_parameters() if ".lora_" in n}
    assert {f"{weights.prefix_of(model)}.{n}" for n in loaded} == set(held)
    assert all(torch.equal(p, held[f"{weights.prefix_of(model)}.{n}"]) for n, p in loaded.items())


def test_a_class_without_a_loader_is_noted_and_peft_loads_its_lora(tmp_path: Path) -> None:
    from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict

    _given("pixart", tmp_path / "given")
    plan = SimpleNamespace(workload=reduced_copy(from_request({"model": "pixart"})), schedule=Schedule())
    result = run(plan, steps=2, lr=0.02, output=tmp_path / "out", pretrained=str(tmp_path / "given"), device="cpu")
    assert any("PixArtTransformer2DModel has no loader for adapters in diffusers" in note for note in result.notes)
    cls: Any = model_class(plan.workload.family.model_class)
    model = cls.from_pretrained(tmp_path / "given" / "transformer")
    file = tmp_path / "out" / weights.ADAPTER_FILE
    state = {k.removeprefix("transformer."): v for k, v in load_file(file).items()}
    with safe_open(str(file), framework="pt") as opened:
        config = json.loads(opened.metadata()[weights.METADATA_KEY])
    inject_adapter_in_model(LoraConfig(**{k.removeprefix("transformer."): v for k, v in config.items()}), model)
    assert not set_peft_model_state_dict(model, state).unexpected_keys
    loaded = {n.replace(".default", ""): p for n, p in model.named_parameters() if ".lora_" in n}
    assert loaded.keys() == state.keys()
    assert all(torch.equal(p, state[n]) for n, p in loaded.items())


def test_a_diffusers_pipeline_loads_the_lora(trained: Any, tmp_path: Path) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    job, out, _ = trained("sd3")
    parts = dict.fromkeys(
        ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3")
    )
    pipeline = StableDiffusion3Pipeline(
        transformer=_fresh(job, tmp_path), scheduler=FlowMatchEulerDiscreteScheduler(), **parts
    )  # fmt: skip
    pipeline.load_lora_weights(str(out))
    assert torch.allclose(_output(pipeline.transformer, job), _output(job.model, job), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"adapter": "lokr", "lokr_factor": 4}, ".lokr_"),
        ({"adapter": "lokr", "lokr_factor": 4, "lokr_scalar": True, "lokr_rebuild": True}, ".lokr_"),
        ({"dora": True, "rslora": True}, ".lora_magnitude_vector"),
    ],
    ids=["lokr", "lokr-scalar", "dora"],
)
def test_diffusers_loads_the_adapter(trained: Any, tmp_path: Path, options: dict[str, Any], key: str) -> None:
    job, out, _ = trained("sd3", **options)
    of_kind = [key in name for name in load_file(out / weights.ADAPTER_FILE)]
    assert all(of_kind) if "adapter" in options else any(of_kind)
    fresh = _fresh(job, tmp_path)
    before = _output(fresh, job)
    fresh.load_lora_adapter(str(out), use_safetensors=True)
    after = _output(fresh, job)
    assert torch.allclose(after, _output(job.model, job), atol=1e-4)
    assert (after - before).abs().max() > 1e-3


def test_a_fully_trained_model_loads_with_from_pretrained(trained: Any, tmp_path: Path) -> None:
    job, out, _ = trained("sd3", adapter="full")
    loaded = type(job.model).from_pretrained(out)
    assert torch.equal(_output(loaded, job), _output(job.model, job))
    assert not torch.equal(_output(_fresh(job, tmp_path), job), _output(job.model, job))


def test_fused_projections_are_saved_as_separate_ones(trained: Any, tmp_path: Path) -> None:
    job, out, _ = trained("flux", adapter="full", fuse_qkv=True)
    loaded = type(job.model).from_pretrained(out)
    assert torch.allclose(_output(loaded, job), _output(job.model, job), atol=1e-4)
    assert not torch.allclose(_output(_fresh(job, tmp_path), job), _output(job.model, job), atol=1e-2)


def test_peft_loads_the_loha_adapter(trained: Any, tmp_path: Path) -> None:
    from peft import LoHaConfig, inject_adapter_in_model, set_peft_model_state_dict

    job, out, _ = trained("sd3", adapter="loha")
    state = {k.removeprefix("transformer."): v for k, v in load_file(out / weights.ADAPTER_FILE).items()}
    alphas = {k.removesuffix(".alpha"): float(v) for k, v in state.items() if k.endswith(".alpha")}
    assert set(alphas.values()) == {10.0}
    fresh = _fresh(job, tmp_path)
    before = _output(fresh, job)
    config = LoHaConfig(r=4, alpha=10, target_modules=list(alphas))
    inject_adapter_in_model(config, fresh)
    factors = {k: v for k, v in state.items() if ".hada_" in k}
    assert not set_peft_model_state_dict(fresh, factors).unexpected_keys
    after = _output(fresh, job)
    assert torch.allclose(after, _output(job.model, job), atol=1e-4)
    assert (after - before).abs().max() > 1e-2


@pytest.mark.parametrize("asked", [{}, {"adapter": "lokr"}, {"adapter": "loha"}, {"dora": True}], ids=str)
def test_an_adapter_starts_as_no_change(asked: dict[str, Any], tmp_path: Path) -> None:
    from probes.build import given_job

    _given("sd3", tmp_path)
    workload = _plan("sd3", **asked, precision="fp32").workload
    cls: Any = model_class(workload.family.model_class)
    config = json.dumps(cls.load_config(tmp_path / "transformer"))
    job = given_job(
        Workload(**{**vars(workload), "config_json": config}), cls.from_pretrained(tmp_path / "transformer"), "cpu"
    )
    weights.start_adapter(job.model)
    assert torch.equal(_output(job.model, job), _output(cls.from_pretrained(tmp_path / "transformer"), job))
    assert any(p.any() for _, p in job.trainable())


def test_a_model_that_does_not_fit_into_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    source = str(_given("sd3", tmp_path))
    for free in (2**20, 2**24):
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=free: SimpleNamespace(available=free))
        with pytest.raises(WorkloadError, match=r"on the CPU .* need .* GiB and 0\.0 GiB are free"):
            run(_plan("sd3"), steps=1, pretrained=source, device="cpu")


def test_weights_that_do_not_fill_the_model_are_refused(tmp_path: Path) -> None:
    source = _given("sd3", tmp_path)
    file = source / "transformer" / "diffusion_pytorch_model.safetensors"
    state = load_file(file)
    del state["proj_out.weight"]
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(WorkloadError, match=r"1 tensors of the model are missing, first proj_out\.weight"):
        run(_plan("sd3"), steps=1, pretrained=str(source), device="cpu")
    file.write_bytes(b"\x00" * 20)
    with pytest.raises(WorkloadError, match="--pretrained"):
        run(_plan("sd3"), steps=1, pretrained=str(source), device="cpu")
