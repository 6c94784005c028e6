"""Every family: variants against their published counts, chains, shapes, refusals, and the full size traced for a GPU."""

from __future__ import annotations

import inspect
import json
import time
from typing import Any

import pytest
import torch
from families_list import CASES, FAMILIES, check_linked, expected

from decision_rules import support
from probes import build, catalogue
from probes.discover import discover
from probes.target import Target
from probes.traced import trace
from probes.workload import WorkloadError, from_request

ASSUMPTIONS = {"cosmos": "resize", "hidream": "balanced routing"}
"""What the profile of a family says that it assumes."""


def test_every_family_has_a_line() -> None:
    assert set(FAMILIES) == set(catalogue.families())


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
    blocks_by_list, _, single = expected(name)
    assert {c.path: len(c.blocks) for c in found.chains} == blocks_by_list
    assert {c.path for c in found.chains if not c.groupable} == single


@pytest.mark.parametrize(("name", "variant"), CASES)
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
    assert names <= set(inspect.signature(build.model_class(family.model_class).forward).parameters)


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_the_full_size_is_traced_for_a_gpu(name: str, variant: str | None) -> None:
    workload = from_request({"model": name, "variant": variant})
    start = time.process_time()
    profile = trace(workload, Target("cuda"))
    assert time.process_time() - start < 20  # twice what it may take where nothing else runs
    said = " ".join(profile.notes)
    assert "failed" not in said
    assert (ASSUMPTIONS[name] in said) if name in ASSUMPTIONS else not profile.notes
    assert profile.parameters == workload.family.variant(workload.variant).parameters
    check_linked(name, profile.structure.chains)


def test_rows_of_the_trainers_matrix_are_of_families_that_exist() -> None:
    """A family without a row gets plain checkpointing and says so; a row whose family was renamed would be lost."""
    known = {row.family for row in support._matrix()}
    assert known - set(FAMILIES) == {"infinitetalk", "minimaxmusic", "z_image_omni"}  # the trainer's, not here
    assert support.trainer_support("new").note == "not in the trainer's matrix"


REFUSED = [
    ({"model": "qwen_image", "resolution": "1000"}, "multiples of 16 (nearest: 992x992 and 1008x1008)"),
    (
        {"model": "qwen_image", "variant": "2.1", "resolution": "1000"},
        "multiples of 32 (nearest: 992x992 and 1024x1024)",
    ),
    ({"model": "sd1x", "resolution": "500x700"}, "(nearest: 448x640 and 512x704)"),
    ({"model": "auraflow", "resolution": "5000"}, "position table ends at 1536 pixels a side (nearest: 1536x1536)"),
    (
        {"model": "flux", "variant": "dev", "references": 2},
        "flux dev takes no reference images; --variant kontext does",
    ),
    (
        {"model": "wan_s2v", "resolution": "48x480"},
        "width must be from 64 to 16384 pixels for wan_s2v, not 48 (nearest: 64x480)",
    ),
    ({"model": "minimaxh3", "frames": 5000}, "more frames than minimaxh3 takes (nearest: 1450)"),
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
    ({"model": "qwen_image", "references": 9}, "from 0 to 3"),
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
