"""What the tests of families know about each: one line a family.

A line says how many blocks each list of the full model has. UNets have lists of many levels; for those it says how many blocks
there are in all and in how many lists.
"""

from __future__ import annotations

from typing import Any

import pytest

# "path blocks", with ~ where each block gets something of its own (so several do not fit into one checkpoint) and ! where a
# trainer treats each block by itself.
FAMILIES = {
    "ace_step": "layers 24~",  # every second block has a window mask, the others none
    "anima": "core.transformer_blocks 28",
    "auraflow": "joint_transformer_blocks 4, single_transformer_blocks 32",
    "boogu_image": "double_stream_layers 8, single_stream_layers 32",
    "chroma": "transformer_blocks 19~, single_transformer_blocks 38~",
    "cosmos": "transformer_blocks 28",
    "cosmos3": "layers 28",
    "ernie": "layers 36",
    "flux": "transformer_blocks 19, single_transformer_blocks 38",
    "flux2": "transformer_blocks 8, single_transformer_blocks 24",
    "flux3_image": "mode_blocks.image 5, mode_blocks.image_cond 5, txt_mode_blocks 5, single_transformer_blocks 28",
    "heartmula": "backbone.layers 28, decoder.layers 3",
    "hidream": "double_stream_blocks 16~, single_stream_blocks 32~",
    "hunyuanvideo": "transformer_blocks 54",
    "ideogram": "layers 34",
    "kandinsky5_image": "text_transformer_blocks 2, visual_transformer_blocks 50",
    "kandinsky5_video": "text_transformer_blocks 2, visual_transformer_blocks 32",
    "kolors": "87 in 18",
    "krea2": "transformer_blocks 28",
    "longcat_image": "transformer_blocks 10, single_transformer_blocks 20",
    "longcat_video": "blocks 48",
    "ltxvideo": "transformer_blocks 28",
    "ltxvideo2": "transformer_blocks 48",
    "lumina2": "layers 26",
    "mageflow": "transformer_blocks 12",
    "minimaxh3": "token_refiner.refiner_blocks 2!, transformer_blocks 50",
    "omnigen": "layers 32",
    "pixart": "transformer_blocks 42",
    "qwen_image": "transformer_blocks 60",
    "sana": "transformer_blocks 60",
    "sanavideo": "transformer_blocks 20",
    "sd1x": "38 in 25",
    "sd2x": "38 in 25",
    "sd3": "transformer_blocks 24",
    "sdxl": "87 in 18",
    "stable_cascade": "down_blocks.0 24~, down_blocks.1 72~, up_blocks.0 72~, up_blocks.1 24~",
    "wan": "blocks 30",
    "wan_s2v": "blocks 40~",  # audio is written into the stream in place between blocks
    "z_image": "noise_refiner 2!, context_refiner 2!, layers 30",
    "zlab_i1": "in_blocks 14, mid_block 1, out_blocks 14",
}

OTHER_VARIANTS = (
    ("ace_step", "v1.0"),
    ("qwen_image", "v2.1"),
    ("qwen_image", "edit-v2+"),
    ("boogu_image", "v0.1-edit"),
    ("mageflow", "edit"),
    ("wan", "i2v-480p-14b-2.1"),
    ("wan", "ti2v-5b-2.2"),
    ("cosmos3", "nano"),
    ("sana", "sana1.0-1.6b-1024"),
)
"""Variants whose class or inputs differ from the family's first one."""

CASES = [
    pytest.param(name, variant, id="-".join(filter(None, (name, variant))))
    for name, variant in (*((n, None) for n in FAMILIES), *OTHER_VARIANTS)
]


def expected(name: str) -> tuple[dict[str, int], set[str], set[str]]:
    """Blocks by path, paths of lists with `~`, paths of lists with `!`."""
    blocks, varying, single = {}, set(), set()
    for part in FAMILIES[name].split(", "):
        path, count = part.split()
        blocks[path] = int(count.rstrip("~!"))
        if count.endswith("~"):
            varying.add(path)
        if count.endswith("!"):
            single.add(path)
    return blocks, varying, single


def check_linked(name: str, chains: Any) -> None:
    """Lists are linked as the line says (where it lists them)."""
    if " in " not in FAMILIES[name]:
        _, varying, _ = expected(name)
        for chain in chains:
            assert chain.linked is (chain.path not in varying), chain.path
