"""The families that diffusers does not have: our definitions against their published counts, and their tiny copies trained."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from probes import build, thinning
from probes.catalogue import find
from probes.discover import discover
from probes.models.common import rotate_pairs
from probes.workload import from_request, reduced_copy

OWN = ("anima", "boogu_image", "heartmula", "longcat_video", "mageflow", "wan_s2v", "zlab_i1")

LORA = {
    # adapters, parameters a rank
    "anima": (224, 860_160),
    "boogu_image": (192, 1_058_400),
    "heartmula": (217, 1_685_504),
    "longcat_video": (241, 2_560_064),  # 240 linears and the patch embedder, a convolution over 16 x 1 x 2 x 2
    "mageflow": (96, 589_824),
    "wan_s2v": (368, 3_768_320),
    "zlab_i1": (237, 1_913_312),
}

WHOLE = ("wan_s2v", "zlab_i1")
"""Blocks differ in what is between them, so every block is traced."""


def on_meta(model: str, variant: str | None = None) -> nn.Module:
    with torch.device("meta"):
        return build.build_base(from_request({"model": model, "variant": variant}))


# Against the published facts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", OWN)
def test_the_default_lora_targets_reach_the_modules_that_trainers_adapt(model: str) -> None:
    workload = from_request({"model": model, "rank": 4})
    built = on_meta(model)
    build.inject_adapter(built, workload)
    trained = [(n, p) for n, p in built.named_parameters() if p.requires_grad]
    assert (sum("lora_A" in n for n, _ in trained), sum(p.numel() for _, p in trained) // 4) == LORA[model]


@pytest.mark.parametrize("model", OWN)
def test_every_block_has_an_attention_and_a_feed_forward_side(model: str) -> None:
    structure = discover(on_meta(model), find(model).regions)
    assert all(b.attention and b.feed_forward for b in structure.blocks)


def test_wan_s2v_keeps_in_float32_what_trainers_keep() -> None:
    built = on_meta("wan_s2v")
    kept = sum(p.numel() for n, p in built.named_parameters() if build.is_kept_float32(built, n))
    assert kept == 124_235_545


@pytest.mark.parametrize("model", WHOLE)
def test_blocks_with_something_of_their_own_between_them_are_not_traced_through_others(model: str) -> None:
    built = on_meta(model)
    assert thinning.find_runs(built, discover(built, find(model).regions)) == []


# Small copies on the CPU ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "variant"), [("boogu_image", "v0.1-edit"), ("mageflow", "edit")])
def test_a_reference_image_lengthens_the_stream_of_an_edit_model_but_not_its_output(model: str, variant: str) -> None:
    losses = []
    for references in (1, 2):
        job = build.real_job(reduced_copy(from_request({"model": model, "variant": variant, "references": references})))
        with torch.no_grad():
            output = job.model(**job.inputs, return_dict=False)[0]
        assert output.shape == job.target.shape
        losses.append(output.std().item())
    assert losses[0] != losses[1]


@pytest.mark.parametrize("model", OWN)
def test_a_batch_of_two_gives_every_sample_its_own_prediction(model: str) -> None:
    job = build.real_job(reduced_copy(from_request({"model": model, "batch": 2})))
    with torch.no_grad():
        output = job.model(**job.inputs, return_dict=False)[0]
    parts = output if isinstance(output, tuple) else (output,)
    assert (
        sum(p.shape[-2] for p in parts) == job.target.shape[-1]
        if len(parts) > 1
        else parts[0].shape == job.target.shape
    )
    assert all(p.isfinite().all() for p in parts)


def test_mageflow_attends_within_each_sample_whatever_the_lengths() -> None:
    """Two samples of different size packed together are predicted as each of them alone."""
    job = build.real_job(reduced_copy(from_request({"model": "mageflow", "lora_dropout": 0.0})))
    generator = torch.Generator().manual_seed(0)
    channels, text_channels = job.model.config.in_channels, job.model.config.context_in_dim
    pictures = [torch.randn(channels, *size, generator=generator) for size in ((4, 6), (8, 4))]
    texts = [torch.randn(n, text_channels, generator=generator) for n in (5, 9)]
    times = torch.tensor([0.2, 0.8])
    with torch.no_grad():
        together = job.model(pictures, texts, times)[0]
        alone = [job.model([p], [t], times[i : i + 1])[0] for i, (p, t) in enumerate(zip(pictures, texts, strict=True))]
    torch.testing.assert_close(together, torch.cat(alone, dim=1), atol=1e-4, rtol=1e-4)


def test_heartmula_does_not_look_ahead() -> None:
    job = build.real_job(reduced_copy(from_request({"model": "heartmula", "lora_dropout": 0.0})))
    tokens, mask = job.inputs["tokens"], job.inputs["tokens_mask"]
    changed = tokens.clone()
    changed[:, 20:] = (changed[:, 20:] + 7) % 60
    with torch.no_grad():
        first, others = job.model(tokens, mask)[0]
        first_changed, others_changed = job.model(changed, mask)[0]
    torch.testing.assert_close(first[:, :19], first_changed[:, :19])
    torch.testing.assert_close(others[:, :18], others_changed[:, :18])
    assert not torch.equal(first[:, 20:], first_changed[:, 20:])


def test_ace_step_1_does_not_listen_to_masked_lyrics_and_frames() -> None:
    """What is behind a mask changes nothing in the frames that count."""
    asked = {"model": "ace_step", "variant": "1.0", "lora_dropout": 0.0}
    job = build.real_job(reduced_copy(from_request(asked)))
    plain = job.inputs
    lyrics, frames = plain["lyric_mask"].clone(), plain["attention_mask"].clone()
    lyrics[:, 10:] = False
    frames[:, 100:] = False
    masked = {**plain, "lyric_mask": lyrics, "attention_mask": frames}
    words, latents = plain["lyric_token_idx"].clone(), plain["hidden_states"].clone()
    words[:, 20:] = 1  # beyond the reach of the encoder's convolution, which sees masked neighbours
    with torch.no_grad():
        first = job.model(**masked)[0]
        other = job.model(**{**masked, "lyric_token_idx": words})[0]
        heard = job.model(**{**plain, "lyric_token_idx": words})[0]
        everything = job.model(**plain)[0]
    torch.testing.assert_close(first[..., :100], other[..., :100])
    assert not torch.allclose(everything, heard)
    assert not torch.allclose(everything[..., :90], first[..., :90])
    assert first.shape == latents.shape


def test_ace_step_1_attends_linearly_as_its_quadratic_form_does() -> None:
    """Normalised products of rectified queries and keys, written with a token-by-token score matrix."""
    job = build.real_job(reduced_copy(from_request({"model": "ace_step", "variant": "1.0", "lora_dropout": 0.0})))
    attention = job.model.get_submodule("transformer_blocks.0.attn")
    x = torch.randn(2, 7, 128, generator=torch.Generator().manual_seed(0))
    rotary = job.model._rotary(7, x.device)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[:, 5:] = False
    with torch.no_grad():
        q, k, v = (
            p(x).unflatten(-1, (4, -1)).transpose(1, 2) for p in (attention.to_q, attention.to_k, attention.to_v)
        )
        q, k = (rotate_pairs(t, *rotary).relu() for t in (q, k))
        scores = (q @ k.transpose(-1, -2)) * mask[:, None, None]
        out = (scores @ v) / scores.sum(-1, keepdim=True)
        wanted = attention.to_out[0](out.transpose(1, 2).flatten(2))
        torch.testing.assert_close(attention(x, rotary, mask)[:, :5], wanted[:, :5], atol=1e-4, rtol=1e-4)
