"""Every family that diffusers has: variants against their published counts, chains, shapes, and the small copies trained.

A family is one line of `FAMILIES`: how many blocks each of its lists has, and which lists are not handed on unchanged from
block to block. UNets have lists of many levels; for those the line says how many blocks there are in all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from advisor.verification import compare_on_cpu
from decision_rules.support import trainer_support
from estimators.schedule import Backend, Schedule
from probes import build, catalogue
from probes.discover import discover
from probes.profile import Profile
from probes.target import Target
from probes.traced import trace
from probes.workload import WorkloadError, from_request, reduced_copy

pytestmark = pytest.mark.slow
"""Minutes: every family is built, traced and trained. `pytest -m slow` runs them."""

# "path blocks", with ~ where each block gets something of its own (so several do not fit into one checkpoint) and ! where a
# trainer treats each block by itself.
FAMILIES = {
    "ace_step": "layers 24~",  # every second block has a window mask, the others none
    "auraflow": "joint_transformer_blocks 4, single_transformer_blocks 32",
    "chroma": "transformer_blocks 19~, single_transformer_blocks 38~",
    "cosmos": "transformer_blocks 28",
    "cosmos3": "layers 28",
    "ernie": "layers 36",
    "flux": "transformer_blocks 19, single_transformer_blocks 38",
    "flux2": "transformer_blocks 8, single_transformer_blocks 24",
    "flux3_image": "mode_blocks.image 5, mode_blocks.image_cond 5, txt_mode_blocks 5, single_transformer_blocks 28",
    "hidream": "double_stream_blocks 16~, single_stream_blocks 32~",
    "hunyuanvideo": "transformer_blocks 54",
    "ideogram": "layers 34",
    "kandinsky5_image": "text_transformer_blocks 2, visual_transformer_blocks 50",
    "kandinsky5_video": "text_transformer_blocks 2, visual_transformer_blocks 32",
    "kolors": "87 in 18",
    "krea2": "transformer_blocks 28",
    "longcat_image": "transformer_blocks 10, single_transformer_blocks 20",
    "ltxvideo": "transformer_blocks 28",
    "ltxvideo2": "transformer_blocks 48",
    "lumina2": "layers 26",
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
    "z_image": "noise_refiner 2!, context_refiner 2!, layers 30",
}

OTHER_VARIANTS = (
    ("qwen_image", "v2.1"),
    ("qwen_image", "edit-v2+"),
    ("wan", "i2v-480p-14b-2.1"),
    ("wan", "ti2v-5b-2.2"),
    ("cosmos3", "nano"),
    ("sana", "sana1.0-1.6b-1024"),
)
"""Variants whose class or inputs differ from the family's first one."""

HEAVY = {"ltxvideo2", "sdxl", "hidream", "kolors", "sd2x", "kandinsky5_video", "ace_step", "longcat_image"}
"""Their small copies take longest, and others have the same blocks."""

ASSUMPTIONS = {"cosmos": "resize", "hidream": "balanced routing"}
"""What the profile of a family says that it assumes."""

QUICK = (Schedule(Backend.TORCH, 2, 4),)
ALL = (
    Schedule(),
    Schedule(Backend.TORCH),
    Schedule(Backend.TORCH, 2),
    Schedule(Backend.TORCH, 2, 4),
    Schedule(Backend.UNSLOTH),
)


def _cases(heavy: bool) -> list[Any]:
    pairs = [(name, None) for name in FAMILIES] + list(OTHER_VARIANTS)
    marks = {name: (pytest.mark.slow,) if heavy and name in HEAVY else () for name, _ in pairs}
    return [pytest.param(*p, marks=marks[p[0]], id="-".join(filter(None, p))) for p in pairs]


def _expected(name: str) -> tuple[dict[str, int], set[str], set[str]]:
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


def test_every_family_of_diffusers_has_a_line() -> None:
    assert set(FAMILIES) == {n for n, f in catalogue.families().items() if f.model_class.startswith("diffusers:")}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_variant_has_its_published_parameter_count(name: str) -> None:
    counts: dict[str, int] = {}
    for variant in catalogue.find(name).variants.values():
        workload = from_request({"model": name, "variant": variant.name})
        key = workload.family.model_class + json.dumps(build.config_of(workload), sort_keys=True)
        if key not in counts:
            with torch.device("meta"):
                counts[key] = sum(p.numel() for p in build.build_base(workload).parameters())
        assert counts[key] == variant.parameters, variant.name


@pytest.mark.parametrize("name", FAMILIES)
def test_the_lists_of_blocks_are_found(name: str) -> None:
    workload = from_request({"model": name})
    with torch.device("meta"):
        model = build.build_base(workload)
    found = discover(model, workload.family.regions)
    if " in " in FAMILIES[name]:
        blocks, lists = map(int, FAMILIES[name].split(" in "))
        assert (len(found.blocks), len(found.chains)) == (blocks, lists)
        return
    expected, _, single = _expected(name)
    assert {c.path: len(c.blocks) for c in found.chains} == expected
    assert {c.path for c in found.chains if not c.groupable} == single


@pytest.mark.parametrize(("name", "variant"), _cases(heavy=False))
def test_inputs_follow_the_shape_of_the_job(name: str, variant: str | None) -> None:
    """Batch, width and height all change something, and no argument is unknown to the model's forward."""
    family = catalogue.find(name).of(variant)

    def shapes(**request: Any) -> tuple[list[tuple[int, ...]], set[str]]:
        workload = from_request({"model": name, "variant": variant} | request)
        with torch.device("meta"):
            inputs, target = build.make_inputs(workload, build.build_base(workload))
        tensors = [t for t in torch.utils._pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor)]
        return [tuple(t.shape) for t in [*tensors, target]], set(inputs)

    plain, names = shapes()
    step = family.pixel_multiple
    height, width = (max(step, side // 2 // step * step) for side in family.default_resolution)
    if family.kind == "audio":
        assert shapes(seconds=7)[0] != plain
    else:
        assert shapes(resolution=f"{width}x{height + step}")[0] != plain
    if family.max_batch is None:
        assert shapes(batch=2)[0] != plain
    import inspect

    assert names <= set(inspect.signature(build.model_class(family.model_class).forward).parameters)


def _check_small_copy(name: str, variant: str | None, schedules: Sequence[Schedule]) -> Profile:
    workload = reduced_copy(from_request({"model": name, "variant": variant}))
    profiles: list[Profile] = []

    def choose(profile: Profile) -> list[Schedule]:
        profiles.append(profile)
        return [*schedules, *([Schedule(Backend.TORCH_FFN)] if profile.structure.has_feed_forward else [])]

    for found in compare_on_cpu(workload, choose):
        assert found.exact, found.schedule.name
        assert abs(found.error) < 0.02, f"{found.schedule.name}: {found.error:+.2%}"
    return profiles[0]


@pytest.mark.parametrize(("name", "variant"), _cases(heavy=True))
def test_the_small_copy_trains_exactly_and_as_predicted(name: str, variant: str | None) -> None:
    profile = _check_small_copy(name, variant, QUICK)
    if " in " not in FAMILIES[name]:
        _, varying, _ = _expected(name)
        for chain in profile.structure.chains:
            assert chain.linked is (chain.path not in varying), chain.path


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant"), _cases(heavy=False))
def test_the_small_copy_trains_under_every_kind_of_schedule(name: str, variant: str | None) -> None:
    _check_small_copy(name, variant, ALL)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant"), _cases(heavy=False))
def test_the_full_size_is_traced_for_a_gpu(name: str, variant: str | None) -> None:
    workload = from_request({"model": name, "variant": variant})
    profile = trace(workload, Target("cuda"))
    said = " ".join(profile.notes)
    assert "failed" not in said
    assert (ASSUMPTIONS[name] in said) if name in ASSUMPTIONS else not profile.notes
    assert profile.parameters == workload.family.variant(workload.variant).parameters


def test_the_trainers_matrix_has_every_family() -> None:
    assert [n for n in FAMILIES if trainer_support(n).note.startswith("not in the trainer")] == []


REFUSED = [
    ({"model": "qwen_image", "resolution": "1000"}, "multiples of 16 (nearest: 992x992 and 1008x1008)"),
    (
        {"model": "qwen_image", "variant": "2.1", "resolution": "1000"},
        "multiples of 32 (nearest: 992x992 and 1024x1024)",
    ),
    ({"model": "sd1x", "resolution": "500x700"}, "(nearest: 448x640 and 512x704)"),
    ({"model": "auraflow", "resolution": "2048x1024"}, "(nearest: 1536x1024)"),
    ({"model": "sd3", "variant": "large", "resolution": "4096"}, "ends at 3072 pixels a side"),
    ({"model": "hidream", "resolution": "1536"}, "(nearest: 1024x1024)"),
    ({"model": "hidream", "resolution": "2048x1024"}, "(nearest: 1440x720)"),
    ({"model": "wan", "frames": 80}, "(nearest: 77 and 81)"),
    ({"model": "ltxvideo", "frames": 40}, "1 + n x 8 frames (nearest: 33 and 41)"),
    ({"model": "minimaxh3", "frames": 40}, "5 + n x 17 frames (nearest: 39 and 56)"),
    ({"model": "minimaxh3", "frames": 2}, "(nearest: 5)"),
    ({"model": "kandinsky5_video", "frames": 601}, "(nearest: 509)"),
    ({"model": "flux", "references": 1}, "flux dev takes no reference images"),
    ({"model": "qwen_image", "references": 9}, "from 1 to 3"),
    ({"model": "cosmos3", "batch": 2}, "at most 1 a step"),
    ({"model": "ace_step", "resolution": 512}, "its length is --seconds"),
    ({"model": "ace_step", "seconds": 0}, "from 1 to 600"),
    ({"model": "flux", "seconds": 5}, "no audio model"),
    ({"model": "wan", "variant": "3b"}, "wan has no variant '3b'; it has: t2v-480p-1.3b-2.1"),
]


@pytest.mark.parametrize(("request_", "words"), REFUSED, ids=[" ".join(map(str, r.values())) for r, _ in REFUSED])
def test_a_shape_that_a_family_cannot_take_is_refused_with_the_nearest_one(
    request_: dict[str, Any], words: str
) -> None:
    with pytest.raises((WorkloadError, catalogue.UnknownModelError)) as refusal:
        from_request(request_)
    assert words in str(refusal.value)


def test_names_that_differ_only_in_punctuation_stay_apart() -> None:
    assert from_request({"model": "qwen_image", "variant": "edit-v2+"}).variant == "edit-v2+"
    assert from_request({"model": "qwen_image", "variant": "edit-v2"}).variant == "edit-v2"
    assert from_request({"model": "qwen_image", "variant": "Edit V2"}).variant == "edit-v2"


def test_reference_images_lengthen_the_sequence() -> None:
    lengths = []
    for count in (0, 1, 3):
        workload = from_request({"model": "qwen_image", "variant": "edit", "references": count})
        with torch.device("meta"):
            inputs, _ = build.make_inputs(workload, build.build_base(workload))
        assert len(inputs["img_shapes"][0]) == 1 + count
        lengths.append(inputs["hidden_states"].shape[1])
    assert lengths == [4096, 8192, 16384]


def test_a_picture_that_is_not_square_is_padded_by_hidream() -> None:
    workload = from_request({"model": "hidream", "resolution": "832x1024"})
    assert trace(workload, Target("cuda")).parameters == 17_105_733_184
