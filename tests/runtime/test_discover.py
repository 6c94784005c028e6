"""Chains and regions found from module trees alone."""

from __future__ import annotations

import re
from typing import Any

import diffusers
import pytest
import torch
from runtime_models import REAL, Block, Stack, with_lora
from torch import nn

from probes.catalogue import Regions
from probes.discover import StructureError, discover
from probes.structure import Structure


def _summary(structure: Structure) -> dict[str, tuple[int, set[bool | None], set[str], set[str]]]:
    """By list path with ``*`` for indices: number of blocks, linked, feed-forward runs, attention names."""
    out: dict[str, tuple[int, set[bool | None], set[str], set[str]]] = {}
    for chain in structure.chains:
        path = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", chain.path)
        count, linked, feed_forward, attention = out.get(path, (0, set(), set(), set()))
        linked.add(chain.linked)
        for b in chain.blocks:
            feed_forward |= {" ".join(part[len(b.name) + 1 :] for part in run) for run in b.feed_forward}
            attention |= {a[len(b.name) + 1 :] for a in b.attention}
        out[path] = (count + len(chain.blocks), linked, feed_forward, attention)
    return out


def _build(class_name: str, **config: Any) -> nn.Module:
    with torch.device("meta"):
        return getattr(diffusers, class_name)(**config)


CASES: dict[str, tuple[str, dict[str, Any], dict[str, tuple[int, set[str], set[str]]]]] = {
    "flux": (
        "FluxTransformer2DModel",
        {"num_layers": 2, "num_single_layers": 3},
        {
            "transformer_blocks": (2, {"ff", "ff_context"}, {"attn"}),
            "single_transformer_blocks": (3, {"proj_mlp act_mlp"}, {"attn"}),
        },
    ),
    "sd3": (
        "SD3Transformer2DModel",
        {"num_layers": 3, "dual_attention_layers": (0,)},
        {"transformer_blocks": (3, {"ff", "ff_context"}, {"attn", "attn2"})},
    ),
    "wan": ("WanTransformer3DModel", {"num_layers": 2}, {"blocks": (2, {"ffn"}, {"attn1", "attn2"})}),
    "z_image": (
        "ZImageTransformer2DModel",
        {"n_layers": 3},
        {
            "noise_refiner": (2, {"feed_forward"}, {"attention"}),
            "context_refiner": (2, {"feed_forward"}, {"attention"}),
            "layers": (3, {"feed_forward"}, {"attention"}),
        },
    ),
    "pixart": ("PixArtTransformer2DModel", {"num_layers": 2}, {"transformer_blocks": (2, {"ff"}, {"attn1", "attn2"})}),
    "sana": ("SanaTransformer2DModel", {"num_layers": 2}, {"transformer_blocks": (2, {"ff"}, {"attn1", "attn2"})}),
    "auraflow": (
        "AuraFlowTransformer2DModel",
        {"num_mmdit_layers": 2, "num_single_dit_layers": 3},
        {
            "joint_transformer_blocks": (2, {"ff", "ff_context"}, {"attn"}),
            "single_transformer_blocks": (3, {"ff"}, {"attn"}),
        },
    ),
    "chroma": (
        "ChromaTransformer2DModel",
        {"num_layers": 2, "num_single_layers": 3},
        {
            "transformer_blocks": (2, {"ff", "ff_context"}, {"attn"}),
            "single_transformer_blocks": (3, {"proj_mlp act_mlp"}, {"attn"}),
        },
    ),
    "qwen_image": (
        "QwenImageTransformer2DModel",
        {"num_layers": 2},
        {"transformer_blocks": (2, {"img_mlp", "txt_mlp"}, {"attn"})},
    ),
    "hunyuan_video_15": (
        "HunyuanVideo15Transformer3DModel",
        {"num_layers": 2},
        {
            "context_embedder.token_refiner.refiner_blocks": (2, {"ff"}, {"attn"}),
            "transformer_blocks": (2, {"ff", "ff_context"}, {"attn"}),
        },
    ),
    "hidream (blocks wrap blocks, experts are no blocks)": (
        "HiDreamImageTransformer2DModel",
        {
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 16,
            "num_layers": 1,
            "num_single_layers": 2,
            "num_attention_heads": 20,
            "caption_channels": [4096, 4096],
            "text_emb_dim": 2048,
            "num_routed_experts": 4,
            "num_activated_experts": 2,
            "axes_dims_rope": (64, 32, 32),
            "max_resolution": (128, 128),
            "llama_layers": [0, 1, 2],
        },
        {
            "double_stream_blocks": (1, {"block.ff_i", "block.ff_t"}, {"block.attn1"}),
            "single_stream_blocks": (2, {"block.ff_i"}, {"block.attn1"}),
        },
    ),
    "flux2 (fused single blocks)": (
        "Flux2Transformer2DModel",
        {"num_layers": 1, "num_single_layers": 2, "num_attention_heads": 2},
        {
            "transformer_blocks": (1, {"ff", "ff_context"}, {"attn"}),
            "single_transformer_blocks": (2, set(), {"attn"}),
        },
    ),
    "stable cascade (lists of lists)": (
        "StableCascadeUNet",
        {
            "block_out_channels": (64, 64),
            "num_attention_heads": (2, 2),
            "down_num_layers_per_block": (1, 2),
            "up_num_layers_per_block": (2, 1),
            "down_blocks_repeat_mappers": (1, 1),
            "up_blocks_repeat_mappers": (1, 1),
            "block_types_per_layer": (("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),) * 2,
        },
        {"down_blocks.*": (9, {"channelwise"}, {"attention"}), "up_blocks.*": (9, {"channelwise"}, {"attention"})},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_finds_the_chains_and_regions_of_a_transformer(case: str) -> None:
    class_name, config, want = CASES[case]
    found = _summary(discover(_build(class_name, **config)))
    assert {p: (n, ff, attention) for p, (n, _, ff, attention) in found.items()} == want
    assert all(linked == {None} for _, linked, _, _ in found.values())


def test_descends_into_the_levels_of_a_unet() -> None:
    model = _build(
        "UNet2DConditionModel",
        block_out_channels=(32, 64, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2, 5),
        attention_head_dim=(2, 4, 4),
        cross_attention_dim=32,
    )
    residual: tuple[set[bool | None], set[str], set[str]] = ({False}, set(), set())
    transformer: tuple[set[bool | None], set[str], set[str]] = ({None}, {"ff"}, {"attn1", "attn2"})
    assert list(_summary(discover(model)).items()) == [
        ("down_blocks.*.resnets", (6, *residual)),
        ("down_blocks.*.attentions.*.transformer_blocks", (14, *transformer)),
        ("mid_block.resnets", (2, *residual)),
        ("mid_block.attentions.*.transformer_blocks", (5, *transformer)),
        ("up_blocks.*.resnets", (9, *residual)),
        ("up_blocks.*.attentions.*.transformer_blocks", (21, *transformer)),
    ]


@pytest.mark.parametrize("name", REAL)
def test_adapters_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime_models.with_lora", lambda model, *_: model)
    model = REAL[name]().model
    before = discover(model)
    with_lora(model, ["to_q", "to_out.0", "net.2", "w2", "proj_mlp", "conv1"])
    assert discover(model) == before


def test_block_names_lead_to_the_blocks() -> None:
    model = Stack(3)
    structure = discover(model)
    assert [model.get_submodule(b.name) for b in structure.blocks] == list(model.blocks)
    assert {b.kind for b in structure.blocks} == {"Block"}
    assert structure.blocks[1].feed_forward == (("blocks.1.ff",),)
    assert structure.blocks[1].attention == ("blocks.1.attn",)


def test_a_sequential_of_equal_blocks_is_a_chain_and_one_of_layers_is_not() -> None:
    model = nn.Module()
    model.stages = nn.Sequential(Block(), Block())
    model.head = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    assert [c.path for c in discover(model).chains] == ["stages"]


def test_a_model_without_blocks_has_no_chains() -> None:
    assert discover(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))).chains == ()


def test_given_regions_come_before_guesses() -> None:
    regions = {"blocks": Regions(attention=("norm",), feed_forward=(("attn", "ff"),), groupable=False)}
    chain = discover(Stack(2), regions).chains[0]
    assert not chain.groupable
    assert chain.blocks[0].feed_forward == (("blocks.0.attn", "blocks.0.ff"),)
    assert chain.blocks[0].attention == ("blocks.0.norm",)


def test_an_exact_path_wins_over_a_pattern() -> None:
    model = nn.ModuleDict({"a": Stack(1), "b": Stack(1)})
    regions = {"*.blocks": Regions(attention=("norm",)), "b.blocks": Regions(attention=("attn",))}
    assert [c.blocks[0].attention for c in discover(model, regions).chains] == [
        ("a.blocks.0.norm",),
        ("b.blocks.0.attn",),
    ]


def test_regions_that_a_block_lacks_are_left_out() -> None:
    model = _build("SD3Transformer2DModel", num_layers=2, dual_attention_layers=(0,))
    regions = Regions(
        attention=("attn", "attn2"), feed_forward=(("ff",), ("ff_context",)), trainer_ffn_start="norm2_context"
    )
    first, last = discover(model, {"transformer_blocks": regions}).blocks
    assert len(first.feed_forward) == 2
    assert len(last.feed_forward) == 1
    assert len(last.attention) == 1


def test_a_region_that_no_block_has_is_an_error() -> None:
    with pytest.raises(StructureError, match=r"no block of blocks \(Block\) has a submodule 'ffn'.*norm, attn, ff"):
        discover(Stack(2), {"blocks": Regions(feed_forward=(("ffn",),))})
