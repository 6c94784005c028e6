"""The example scripts run: samples from a pipeline's encoders train, and a plain training loop runs under a plan."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from advisor.training import run
from advisor.training.data import slots
from estimators.schedule import Backend, Schedule
from probes.build import build_base
from probes.workload import from_request, reduced_copy

EXAMPLES = Path(__file__).parents[2] / "examples"


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _tokenizer() -> Any:
    from transformers import CLIPTokenizer

    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    words = [*letters, *(f"{c}</w>" for c in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={w: i for i, w in enumerate(words)}, merges=[], model_max_length=77)


def _text_encoder(width: int, projection: int | None = None) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=54, hidden_size=width, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=77, projection_dim=projection or width, bos_token_id=52, eos_token_id=53, pad_token_id=53,
    )  # fmt: skip
    return (CLIPTextModel if projection is None else CLIPTextModelWithProjection)(config)


def _t5() -> tuple[Any, Any]:
    from transformers import T5Config, T5EncoderModel, T5Tokenizer

    letters = [(chr(c), -2.0) for c in range(ord("a"), ord("z") + 1)]
    tokenizer = T5Tokenizer(
        vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -1.0), *letters], extra_ids=0
    )
    config = T5Config(vocab_size=len(tokenizer), d_model=96, d_kv=24, d_ff=64, num_layers=1, num_heads=4)
    return T5EncoderModel(config), tokenizer


def _vae(channels: int, shift: float | None = None) -> Any:
    from diffusers import AutoencoderKL

    down, up = ("DownEncoderBlock2D",) * 4, ("UpDecoderBlock2D",) * 4
    return AutoencoderKL(
        down_block_types=down, up_block_types=up, block_out_channels=(8,) * 4, layers_per_block=1, norm_num_groups=4,
        latent_channels=channels, scaling_factor=0.5, shift_factor=shift,
    )  # fmt: skip


def _pipeline(name: str, folder: Path) -> Path:
    """A diffusers pipeline folder with a small denoiser, VAE and text encoders, all random."""
    import diffusers

    torch.manual_seed(0)
    denoiser = build_base(reduced_copy(from_request({"model": name})))
    with torch.no_grad():
        for p in denoiser.parameters():
            if p.numel() > 1 and not p.any():
                p.normal_(std=0.02)
    unet = {"unet": denoiser, "vae": _vae(4), "scheduler": diffusers.DDIMScheduler(steps_offset=1, clip_sample=False)}
    flow = {
        "transformer": denoiser,
        "vae": _vae(16, shift=0.1),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
    }
    first = {"tokenizer": _tokenizer()}
    second = {"tokenizer_2": _tokenizer()}
    made: Any
    if name == "sd1x":
        checker = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        made = diffusers.StableDiffusionPipeline(text_encoder=_text_encoder(96), **checker, **first, **unet)
    elif name == "sdxl":
        encoders = {"text_encoder": _text_encoder(32), "text_encoder_2": _text_encoder(64, 64)}
        made = diffusers.StableDiffusionXLPipeline(**encoders, **first, **second, **unet)
    elif name == "sd3":
        encoder, tokenizer = _t5()
        encoders = {"text_encoder": _text_encoder(32, 32), "text_encoder_2": _text_encoder(32, 32)}
        encoders |= {"text_encoder_3": encoder, "tokenizer_3": tokenizer}
        made = diffusers.StableDiffusion3Pipeline(**encoders, **first, **second, **flow)
    else:
        encoder, tokenizer = _t5()
        encoders = {"text_encoder": _text_encoder(64), "text_encoder_2": encoder, "tokenizer_2": tokenizer}
        made = diffusers.FluxPipeline(**encoders, **first, **flow)
    made.save_pretrained(folder)
    return folder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for i, (size, caption) in enumerate([((200, 130), "a cat"), ((128, 128), "two dogs in a boat")]):
        Image.effect_noise(size, 80).convert("RGB").save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text(caption)
    return folder


@pytest.mark.parametrize(
    "name", ["sdxl", "sd3", pytest.param("sd1x", marks=pytest.mark.slow), pytest.param("flux", marks=pytest.mark.slow)]
)
def test_samples_made_with_a_pipeline_train_its_own_denoiser(name: str, photos: Path, tmp_path: Path) -> None:
    source, cache = _pipeline(name, tmp_path / "pipeline"), tmp_path / "cache"
    arguments = ["--pipeline", str(source), "--images", str(photos), "--output", str(cache), "--resolution", "128"]
    _script("cache_latents").main(arguments)
    first, second = (load_file(cache / f"{i}.safetensors") for i in range(2))
    main = {"sd3": (16, 16, 16), "flux": (64, 64)}.get(name, (4, 16, 16))
    assert main in {tuple(t.shape) for t in first.values()}
    assert not torch.equal(first["encoder_hidden_states"], second["encoder_hidden_states"])
    workload = from_request({"model": name, "resolution": 128, "rank": 4})
    plan = SimpleNamespace(workload=workload, schedule=Schedule(backend=Backend.TORCH))
    result = run(plan, steps=2, latents=cache, pretrained=str(source), output=tmp_path / "lora", device="cpu")
    assert result.saved is not None
    missing = [note for note in result.notes if "not in the cached samples" in note]
    assert missing == (["not in the cached samples: guidance (ones)"] if name == "flux" else [])
    assert not any("random" in note for note in result.notes)
    from diffusers import DiffusionPipeline

    DiffusionPipeline.from_pretrained(source).load_lora_weights(str(tmp_path / "lora"))


def test_the_latent_is_the_vaes(photos: Path, tmp_path: Path) -> None:
    script = _script("cache_latents")
    vae = _vae(4, shift=0.25)
    latent = script.encode_picture(SimpleNamespace(vae=vae), photos / "1.png", 128, 128)
    with Image.open(photos / "1.png") as picture:
        pixels = torch.tensor(list(picture.tobytes()), dtype=torch.float32).reshape(1, 128, 128, 3)
    wanted = (vae.encode(pixels.permute(0, 3, 1, 2) / 127.5 - 1).latent_dist.mean - 0.25) * 0.5
    assert torch.allclose(latent, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "0.txt").unlink(), r"0\.png: no caption; write it into 0\.txt"),
        (lambda folder: [p.unlink() for p in folder.glob("*.png")], "no pictures"),
    ],
)
def test_a_folder_without_pictures_or_captions_is_refused(
    photos: Path, tmp_path: Path, change: Callable[[Path], Any], message: str
) -> None:
    change(photos)
    with pytest.raises(SystemExit, match=message):
        _script("cache_latents").main(["--pipeline", "x", "--images", str(photos), "--output", str(tmp_path / "c")])


def test_a_plain_loop_under_a_plan_has_the_losses_of_the_same_loop_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan_text: str
) -> None:
    torch.manual_seed(0)
    workload = reduced_copy(from_request({"model": "sd3"}))
    model: Any = build_base(workload)
    model.save_pretrained(tmp_path / "model" / "transformer")
    (tmp_path / "cache").mkdir()
    for i in range(2):
        sample = {name: torch.randn(slot.shape) for name, slot in slots(workload, model).items()}
        save_file(sample, str(tmp_path / "cache" / f"{i}.safetensors"))
    plan = json.loads(plan_text)
    plan["recommended"]["controls"] = Schedule(backend=Backend.TORCH, interval=2).to_controls()
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    paths = [
        f"--plan={tmp_path / 'plan.json'}",
        f"--pretrained={tmp_path / 'model'}",
        f"--latents={tmp_path / 'cache'}",
    ]
    script = _script("train_with_plan")
    handles: list[Any] = []
    real = script.apply
    monkeypatch.setattr(script, "apply", lambda *args: handles.append(real(*args)) or handles[-1])
    losses = script.main([*paths, f"--output={tmp_path / 'lora'}", "--steps=3"])
    assert handles[0].counters.units_recomputed > 0
    assert (tmp_path / "lora" / "pytorch_lora_weights.safetensors").exists()
    monkeypatch.setattr(script, "apply", lambda *_: SimpleNamespace(counters=None))
    assert script.main([*paths, f"--output={tmp_path / 'plain'}", "--steps=3"]) == losses
