"""VAEs and text encoders: what is known of them, and their traces against real runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from estimators import devices
from estimators.estimate import Estimator, Semantics
from estimators.schedule import Schedule
from probes import catalogue, companions, store
from probes.companion_traces import DTYPES, call, latent_shape, module, trace
from probes.companions import TEXT, VAE, Companion, Run
from probes.cpu_memory import profiled_peak
from probes.profile import Profile
from probes.target import Target
from probes.workload import from_request

WORKLOAD = from_request({"model": "flux"})

KNOWN_COUNTS = {
    "sdxl": 83.65e6, "clip-l": 123.06e6, "clip-h": 340.4e6, "clip-bigg": 694.7e6, "t5-xxl": 4.762e9, "umt5-xxl": 5.68e9, "gemma-2-2b": 2.614e9,
    "qwen-3-4b": 4.02e9, "qwen-3-8b-lm": 8.19e9, "qwen-2.5-vl-7b": 8.29e9, "chatglm3-6b": 6.24e9, "dc-f32c32": 312e6, "wan": 127e6, "byt5-small": 219e6,
}  # fmt: skip
"""Published or widely quoted parameter counts."""


def small(kind: str, model_class: str, config: dict[str, Any], **more: Any) -> Companion:
    return Companion(kind, "small", model_class, more.pop("config_class", ""), json.dumps(config), 0, "a test", **more)


KL = small(
    VAE,
    "diffusers:AutoencoderKL",
    {
        "down_block_types": ["DownEncoderBlock2D"] * 3,
        "up_block_types": ["UpDecoderBlock2D"] * 3,
        "block_out_channels": [32, 64, 64],
        "latent_channels": 4,
    },
)
WAN = small(VAE, "diffusers:AutoencoderKLWan", {"base_dim": 16, "z_dim": 4}, video=True)
DC = small(
    VAE,
    "diffusers:AutoencoderDC",
    {
        "encoder_block_types": ["ResBlock", "EfficientViTBlock"],
        "decoder_block_types": ["ResBlock", "EfficientViTBlock"],
        "encoder_block_out_channels": [64, 128],
        "decoder_block_out_channels": [64, 128],
        "encoder_layers_per_block": [1, 1],
        "decoder_layers_per_block": [1, 1],
        "encoder_qkv_multiscales": [[], [5]],
        "decoder_qkv_multiscales": [[], [5]],
    },
)
CLIP = small(
    TEXT,
    "transformers:CLIPTextModel",
    {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 500},
    config_class="transformers:CLIPTextConfig",
)
T5 = small(
    TEXT,
    "transformers:T5EncoderModel",
    {"d_model": 64, "d_kv": 16, "d_ff": 160, "num_layers": 3, "num_heads": 4, "feed_forward_proj": "gated-gelu", "vocab_size": 500},
    config_class="transformers:T5Config",
    mask=True,
)  # fmt: skip
QWEN = small(
    TEXT,
    "transformers:Qwen3Model",
    {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
     "head_dim": 16, "vocab_size": 500},
    config_class="transformers:Qwen3Config",
    mask=True,
    arguments_json=json.dumps({"output_hidden_states": True}),
)  # fmt: skip

RUNS = {
    "kl encodes": Run(KL, batch=2, height=192, width=128),
    "kl decodes": Run(KL, decode=True, batch=2, height=192, width=128),
    "kl encodes sliced": Run(KL, batch=2, height=192, width=128, slicing=True),
    "wan encodes": Run(WAN, height=96, width=64, frames=9),
    "wan decodes": Run(WAN, decode=True, height=96, width=64, frames=9),
    "dc encodes": Run(DC, height=128, width=128),
    "dc decodes": Run(DC, decode=True, height=128, width=128),
    "clip": Run(CLIP, batch=4, tokens=77),
    "t5": Run(T5, batch=4, tokens=128),
    "qwen": Run(QWEN, batch=4, tokens=128),
}


def peak(profile: Profile, device: devices.Device) -> int:
    return Estimator(profile, device, Semantics()).estimate(Schedule()).peak


@pytest.mark.parametrize("name", RUNS)
def test_the_peak_of_a_real_call_is_within_two_percent(name: str) -> None:
    run = dataclasses.replace(RUNS[name], precision="fp32")
    if run.companion.kind == TEXT:  # a text encoder is bf16 whatever the VAE is
        run = dataclasses.replace(run, precision="bf16")
    predicted = peak(trace(run, Target("cpu"), WORKLOAD), devices.cpu_device())
    model = module(run.companion)
    torch.nn.Module.to(model, DTYPES[run.precision])
    inputs, go = call(model, run, latent_shape(run) if run.decode else ())
    resident = sum(t.untyped_storage().nbytes() for t in [*model.parameters(), *model.buffers(), *inputs])

    def once() -> None:
        with torch.no_grad():
            go()

    once()
    measured = profiled_peak(once, resident)
    assert predicted == pytest.approx(measured.peak, rel=0.02)
    assert measured.peak > 1.1 * resident


ALL = sorted(
    {
        c.name: c
        for family in companions.families()
        for variant in catalogue.find(family).variants
        for kind in companions.KINDS
        for c in companions.of(family, variant).of_kind(kind)
    }.items()
)


@pytest.mark.parametrize(("name", "companion"), ALL)
def test_the_class_has_the_parameters_that_the_file_says(name: str, companion: Companion) -> None:
    with torch.device("meta"):
        model = module(companion)
    assert sum(p.numel() for p in model.parameters()) == companion.parameters
    assert companion.weight_bytes("bf16") == 2 * companion.parameters
    assert "general knowledge" in companion.source or "class defaults" in companion.source
    if name in KNOWN_COUNTS:
        assert companion.parameters == pytest.approx(KNOWN_COUNTS[name], rel=0.005)


def test_every_definition_is_used_and_every_known_count_is_checked() -> None:
    file = companions._file()
    assert {n for n, _ in ALL} == {*file["vae"], *file["text"]}
    assert {n for n, _ in ALL} >= set(KNOWN_COUNTS)


def test_every_vae_matches_the_latents_of_its_denoiser() -> None:
    """Channels, factors and frames that the family's fact sheet has for the model's own input."""
    seen = set()
    for family, variant in (
        ("flux", "dev"), ("sd3", "medium"), ("sdxl", "base-1.0"), ("sana", "sana1.5-1.6b-1024"), ("wan", "t2v-480p-1.3b-2.1"),
        ("wan", "ti2v-5b-2.2"), ("hunyuanvideo", "t2v-480p"), ("ltxvideo", "0.9.5"), ("ltxvideo", "0.9.1"), ("ltxvideo", "0.9.0"),
        ("sanavideo", "2b-480p"), ("kandinsky5_video", "t2v-lite-sft-5s"), ("qwen_image", "v1.0"), ("z_image", "turbo"), ("cosmos", "2b"),
    ):  # fmt: skip
        vae = companions.of(family, variant).vae
        assert vae is not None
        sheet = catalogue.find(family).of(variant)
        frames = sheet.first_frames + 2 * sheet.temporal_factor if sheet.kind == "video" else 1
        shape = latent_shape(Run(vae, height=128, width=192, frames=frames))
        factor = sheet.vae_factor
        assert shape[-2:] == (128 // factor, 192 // factor), family
        if sheet.kind == "video":
            assert shape[2] == 3, family
        seen.add(vae.name)
    assert len(seen) >= 8


def test_tiling_and_slicing_lower_the_peak_and_change_the_stored_profile_s_name() -> None:
    card = devices.find_gpu("rtx4090")
    vae = companions.of("sd1x", "1.5").vae
    assert vae is not None
    plain = Run(vae, batch=2, height=1024, width=1024)
    tiled, sliced = dataclasses.replace(plain, tiling=True), dataclasses.replace(plain, slicing=True)
    peaks = [peak(trace(r, Target("cuda"), WORKLOAD), card) for r in (plain, sliced, tiled)]
    assert peaks[0] > peaks[1] > peaks[2] / 1.5
    assert peaks[2] < peaks[0]
    assert len({store.companion_key(r, "cuda") for r in (plain, tiled, sliced)}) == 3


def test_everything_that_changes_a_call_changes_its_name() -> None:
    run = Run(KL, batch=2, height=192, width=128)
    others = [
        dataclasses.replace(run, **{name: value})
        for name, value in {
            "decode": True, "batch": 1, "height": 64, "width": 64, "frames": 5, "tokens": 7, "precision": "fp32", "tiling": True,
            "slicing": True, "companion": dataclasses.replace(KL, config_json="{}"),
        }.items()
    ]  # fmt: skip
    assert {f.name for f in dataclasses.fields(Run)} == {
        "companion", "decode", "batch", "height", "width", "frames", "tokens", "precision", "tiling", "slicing"
    }  # fmt: skip
    names = {store.companion_key(r, "cuda") for r in [run, *others]} | {store.companion_key(run, "cpu")}
    assert len(names) == len(others) + 2


def test_the_wide_head_of_a_vae_takes_the_efficient_kernel_with_its_accumulator() -> None:
    vae = companions.of("flux", "dev").vae
    assert vae is not None
    tape = trace(Run(vae, height=512, width=512), Target("cuda"), WORKLOAD).tape
    assert tape.op_head.max() == 512
    tokens, channels = 64 * 64, 512
    assert list(tape.size[tape.scratch]) == [4 * tokens * channels]
    full = trace(Run(vae, height=512, width=512, precision="fp32"), Target("cuda"), WORKLOAD).tape
    assert not full.scratch.any()


def test_the_documentation_lists_what_the_file_holds() -> None:
    page = (Path(__file__).parents[2] / "docs" / "phases.md").read_text(encoding="utf-8")

    def shown(found: tuple[Companion, ...]) -> str:
        return ", ".join(f"{c.name} ({c.parameters / 1e6:.0f})" for c in found) or "not known"

    rows = set()
    for family in companions.families():
        same: dict[str, list[str]] = {}
        for variant in catalogue.find(family).variants:
            known = companions.of(family, variant)
            same.setdefault(f"| {shown(known.of_kind(VAE))} | {shown(known.text)} |", []).append(variant)
        rows |= {f"| {family}{'' if len(same) == 1 else ' ' + ', '.join(v)} {cells}" for cells, v in same.items()}
    assert rows == {line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| family")}
