"""Aspect buckets, the second sample of guidance, and how captions are padded."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from probes import build, store
from probes.catalogue import families
from probes.workload import (
    MAX_BUCKETS,
    Workload,
    WorkloadError,
    aspect_buckets,
    from_request,
    parse_resolution,
    reduced_copy,
)

VISUAL = sorted(name for name, family in families().items() if family.kind != "audio")


def request(model: str = "sdxl", **more: Any) -> Workload:
    return from_request({"model": model, **more})


# The list ------------------------------------------------------------------------------------------------------------


def test_the_usual_list_of_a_megapixel_model() -> None:
    sizes = [f"{width}x{height}" for height, width in aspect_buckets(1024, 64, families()["sdxl"])]
    assert sizes[0] == "512x2048"
    assert sizes[-1] == "2048x512"
    assert {"1024x1024", "832x1216", "1216x832", "896x1152", "768x1344"} <= set(sizes)
    assert len(sizes) == len(set(sizes)) == 33


@given(st.sampled_from(VISUAL), st.integers(128, 3000), st.sampled_from([1, 8, 16, 32, 64, 100, 128]))
def test_every_bucket_of_the_list_is_a_size_that_the_family_takes_and_no_larger_than_asked(
    model: str, edge: int, step: int
) -> None:
    family = families()[model]
    try:
        sizes = aspect_buckets(edge, step, family)
    except WorkloadError as error:
        assert "--aspect-buckets" in str(error)  # noqa: PT017  either way is right, the property is about both
        return
    assert sizes
    for height, width in sizes:
        assert parse_resolution(f"{width}x{height}", family) == (height, width)
        assert height * width <= edge * edge
        assert height % step == width % step == 0
        assert (width, height) in sizes


def test_a_bucket_step_is_made_to_suit_the_models_patch() -> None:
    assert families()["sana"].pixel_multiple == 32
    assert all(h % 96 == w % 96 == 0 for h, w in aspect_buckets(1024, 48, families()["sana"]))


# Requests ------------------------------------------------------------------------------------------------------------


def test_buckets_are_kept_and_the_one_with_the_most_pixels_is_the_size() -> None:
    w = request(buckets=["512x512", "832x1216", "1024x1024"])
    assert w.buckets == ("512x512", "832x1216", "1024x1024")
    assert w.resolution == "1024x1024"


def test_a_resolution_beside_buckets_is_one_of_them_and_the_size() -> None:
    w = request(resolution=768, buckets=["832x1216", "1024x1024"])
    assert w.buckets == ("768x768", "832x1216", "1024x1024")
    assert w.resolution == "768x768"
    assert request(resolution="832x1216", buckets=["832x1216", "1024x1024"]).buckets == ("832x1216", "1024x1024")


def test_a_video_bucket_has_frames_of_its_own() -> None:
    w = request("wan", buckets=["832x480x81", "480x832x33", "1280x720"], frames=17)
    assert w.buckets == ("832x480x81", "480x832x33", "1280x720x17")
    assert (w.resolution, w.frames) == ("832x480", 81)
    sizes = [(v.resolution, v.frames) for v in w.largest_buckets(9)]
    assert sizes == [("832x480", 81), ("1280x720", 17), ("480x832", 33)]


def test_of_two_turned_buckets_one_is_evaluated_and_squarer_ones_come_first() -> None:
    w = request(aspect_buckets=1024)
    largest = [v.resolution for v in w.largest_buckets(33)]
    assert largest[0] == "1024x1024"
    assert len(largest) == 17
    areas = [v.width * v.height for v in w.largest_buckets(33)]
    assert areas == sorted(areas, reverse=True)
    assert len(w.largest_buckets(4)) == 4


REFUSED = [
    ({"buckets": ["1000x1000"]}, "--bucket 1000x1000 does not fit sdxl: width and height must be multiples of 32"),
    ({"buckets": ["big"]}, "--bucket 'big' is not a size"),
    ({"buckets": "1024"}, "--bucket must be a list of sizes"),
    ({"buckets": []}, "--bucket must be a list of sizes"),
    ({"buckets": ["64x64"] * (MAX_BUCKETS + 1)}, f"at most {MAX_BUCKETS} sizes"),
    ({"buckets": ["1024x1024x5"]}, "--bucket 1024x1024x5: sdxl is an image model"),
    ({"model": "wan", "buckets": ["832x480x80"]}, "--bucket 832x480x80 does not fit wan: its VAE takes 1 + n x 4 frames (nearest: 77 and 81)"),
    ({"aspect_buckets": 0}, "--aspect-buckets must be from 1"),
    ({"aspect_buckets": 16}, "at least 64"),
    ({"aspect_buckets": "1024x1024"}, "--aspect-buckets must be a whole number"),
    ({"aspect_buckets": 1024, "bucket_step": 0}, "--bucket-step must be from 1"),
    ({"bucket_step": 64}, "--bucket-step 64 has no effect without --aspect-buckets"),
    ({"buckets": ["1024"], "bucket_step": 64}, "--bucket-step 64 has no effect without --aspect-buckets"),
    ({"model": "flux", "aspect_buckets": 16000, "bucket_step": 16}, "use a larger --bucket-step"),
    ({"model": "ace_step", "aspect_buckets": 1024}, "--aspect-buckets: ace_step is an audio model"),
    ({"model": "heartmula", "buckets": ["1024"]}, "--bucket: heartmula is an audio model"),
    ({"model": "auraflow", "aspect_buckets": 4096}, "--aspect-buckets 4096"),
    ({"model": "cosmos3", "cfg_batch": True}, "--cfg-batch: cosmos3 takes at most 1 sample a step"),
    ({"cfg_batch": "yes"}, "--cfg-batch must be true or false"),
    ({"text_padding": "left"}, "--text-padding 'left' is not valid (did you mean longest?); valid: auto, max_length, longest"),
]  # fmt: skip


@pytest.mark.parametrize(("given_", "words"), REFUSED, ids=[str(r)[:60] for r, _ in REFUSED])
def test_what_cannot_be_is_refused_by_name(given_: dict[str, Any], words: str) -> None:
    with pytest.raises(WorkloadError) as refusal:
        from_request({"model": "sdxl"} | given_)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


# Guidance and captions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["sd3", "z_image", "sdxl"])
def test_guidance_puts_two_samples_for_each_one_through_the_model(model: str) -> None:
    twice, four = (reduced_copy(request(model, **r)) for r in ({"batch": 2, "cfg_batch": True}, {"batch": 4}))
    assert twice.samples == four.samples == 4
    with torch.device("meta"):
        built = build.build_base(four)
        targets = [build.make_inputs(w, built)[1].shape for w in (twice, four)]
    assert targets[0] == targets[1]
    assert targets[0][0] == 4


def test_what_changes_no_trace_changes_no_stored_profile() -> None:
    plain = request(resolution=1024, batch=2)
    same = (
        request(resolution=1024, batch=2, optimizer="sgd"),
        request(resolution=1024, batch=1, cfg_batch=True),
        request(resolution=1024, batch=2, buckets=["1024x1024", "512x512"]),
        request(resolution=1024, batch=2, text_padding="max_length"),
    )
    assert {store.key(w, "cuda", "traced") for w in same} == {store.key(plain, "cuda", "traced")}
    assert store.key(request(resolution=1024, batch=4), "cuda", "traced") != store.key(plain, "cuda", "traced")


@pytest.mark.parametrize(
    ("model", "padding", "tokens"),
    [("flux", "auto", 512), ("flux", "longest", 40), ("z_image", "auto", 48), ("z_image", "max_length", 512)],
)
def test_a_caption_is_padded_as_the_trainer_does_or_as_asked(model: str, padding: str, tokens: int) -> None:
    assert request(model, caption_tokens=40, text_padding=padding).text_tokens == tokens


@pytest.mark.parametrize("name", VISUAL)
def test_the_default_size_is_among_the_buckets_of_its_own_edge_or_no_larger(name: str) -> None:
    """The list of a family's own edge exists, and its square is not far below what was asked."""
    family = families()[name]
    edge = math.isqrt(math.prod(family.default_resolution))
    largest = max(h * w for h, w in aspect_buckets(edge, 64, family))
    assert largest > 0.8 * edge * edge
