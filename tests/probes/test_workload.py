"""What a workload accepts, what it fills in, and how it says no."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from probes.catalogue import UnknownModelError, families
from probes.workload import (
    ADAPTERS,
    ATTENTION,
    ESTIMATED_PRECISIONS,
    MAX_BATCH,
    MAX_FRAMES,
    MAX_RANK,
    OPTIMIZERS,
    PRECISIONS,
    REQUEST_KEYS,
    NotYetError,
    WorkloadError,
    from_request,
    parse_resolution,
    reduced_copy,
)

# Defaults ------------------------------------------------------------------------------------------------------------


def test_only_the_model_has_to_be_named() -> None:
    w = from_request({"model": "flux"})
    assert (w.model, w.variant, w.height, w.width, w.frames, w.batch) == ("flux", "dev", 1024, 1024, 1, 1)
    assert (w.adapter, w.rank, w.alpha, w.lora_dropout) == ("lora", 16, 16.0, 0.1)
    assert (w.precision, w.optimizer, w.attention) == ("bf16", "adamw_bf16", "auto")
    assert (w.fuse_qkv, w.weights_offload, w.compile, w.reduced) == (False, "none", "none", False)
    assert w.lora_targets == families()["flux"].lora_targets


def test_null_means_the_default() -> None:
    assert from_request(dict.fromkeys(REQUEST_KEYS) | {"model": "wan"}) == from_request({"model": "wan"})


def test_alpha_is_the_rank_unless_given() -> None:
    assert from_request({"model": "flux", "rank": 64}).alpha == 64
    assert from_request({"model": "flux", "rank": 64, "alpha": 8}).alpha == 8


def test_resolution_is_width_by_height() -> None:
    w = from_request({"model": "flux", "resolution": "768x512"})
    assert (w.width, w.height, w.resolution) == (768, 512, "768x512")
    assert from_request({"model": "flux", "resolution": 512}).resolution == "512x512"


def test_a_caption_is_padded_to_the_familys_maximum_only_where_the_trainer_does_so() -> None:
    padded = from_request({"model": "flux", "caption_tokens": 10})
    assert (padded.caption_tokens, padded.text_tokens) == (10, 512)
    own = from_request({"model": "flux", "caption_tokens": 10, "text_padding": "longest"})
    assert (own.caption_tokens, own.text_tokens) == (10, 10)


@pytest.mark.parametrize(("caption", "tokens"), [(10, 41), (225, 256), (240, 256), (None, 256)])
def test_the_tokens_of_a_prompt_template_come_on_top_of_the_caption_up_to_the_familys_maximum(
    caption: int | None, tokens: int
) -> None:
    request = {"model": "lumina2"} if caption is None else {"model": "lumina2", "caption_tokens": caption}
    assert from_request(request).text_tokens == tokens


def test_whole_numbers_may_come_as_floats_as_json_writers_do() -> None:
    assert from_request({"model": "flux", "batch": 2.0, "rank": 8.0}) == from_request(
        {"model": "flux", "batch": 2, "rank": 8}
    )


def test_a_description_is_plain_json_with_the_resolution_as_text() -> None:
    described = from_request({"model": "wan", "batch": 2}).describe()
    assert described["resolution"] == "832x480"
    assert described["lora_targets"] == ["to_k", "to_q", "to_v", "to_out.0"]
    assert described["batch"] == 2


# Bad values ----------------------------------------------------------------------------------------------------------

NUMBERS = {"batch": MAX_BATCH, "rank": MAX_RANK}


@pytest.mark.parametrize("option", NUMBERS)
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2", "two", float("nan"), float("inf"), [1]])
def test_a_count_that_is_no_positive_whole_number_is_refused_with_its_range(option: str, value: Any) -> None:
    with pytest.raises(
        WorkloadError, match=rf"^--{option} must be (a whole number )?from 1 to {NUMBERS[option]}, not "
    ):
        from_request({"model": "flux", option: value})


@pytest.mark.parametrize(("option", "most"), NUMBERS.items())
def test_a_count_beyond_its_limit_is_refused(option: str, most: int) -> None:
    with pytest.raises(WorkloadError, match=f"^--{option} must be from 1 to {most}, not {most + 1}$"):
        from_request({"model": "wan", option: most + 1})


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("lora_dropout", -0.1, "--lora-dropout must be from 0 to 0.999, not -0.1"),
        ("lora_dropout", 1.0, "--lora-dropout must be from 0 to 0.999, not 1"),
        ("lora_dropout", "0.1", "--lora-dropout must be a number from 0 to 0.999, not '0.1'"),
        ("lora_dropout", float("nan"), "--lora-dropout must be a number"),
        ("alpha", 0, "--alpha must be from 1e-06 to 1e+06, not 0"),
        ("alpha", False, "--alpha must be a number"),
        ("alpha", float("inf"), "--alpha must be a number"),
    ],
)
def test_a_number_out_of_range_is_refused_with_its_range(option: str, value: Any, message: str) -> None:
    with pytest.raises(WorkloadError) as error:
        from_request({"model": "flux", option: value})
    assert str(error.value).startswith(message)


CHOICES = {"adapter": ADAPTERS, "precision": PRECISIONS, "attention": ATTENTION}


@pytest.mark.parametrize("value", ["nonsense", 7, [], {}, True])
def test_an_unknown_optimizer_is_refused_with_where_all_are_listed(value: Any) -> None:
    with pytest.raises(WorkloadError) as error:
        from_request({"model": "flux", "optimizer": value})
    assert str(error.value).startswith(f"--optimizer {value!r} is not valid")
    assert str(error.value).endswith("(docs/training_setups.md lists all)")
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("option", CHOICES)
@pytest.mark.parametrize("value", ["nonsense", 7, [], {}, True])
def test_a_value_that_is_not_among_the_valid_ones_is_refused_with_all_of_them(option: str, value: Any) -> None:
    with pytest.raises(WorkloadError) as error:
        from_request({"model": "flux", option: value})
    assert str(error.value).startswith(f"--{option} {value!r} is not valid")
    assert str(error.value).endswith("valid: " + ", ".join(CHOICES[option]))


@pytest.mark.parametrize(
    ("option", "typed", "meant"),
    [
        ("adapter", "loro", "lora"),
        ("precision", "BF-16", "bf16"),
        ("precision", "int8-sndq", "int8-sdnq"),
        ("optimizer", "adamw-bf16", "adamw_bf16"),
        ("attention", "Flash2", "flash"),
        ("compile", "regionel", "regional"),
    ],
)
def test_the_nearest_valid_value_is_suggested(option: str, typed: str, meant: str) -> None:
    with pytest.raises(WorkloadError, match=rf"did you mean {meant}\?"):
        from_request({"model": "flux", option: typed})


@pytest.mark.parametrize(
    "value", ["", "wide", "1024x", "x512", "-1024", "10.5", "1024x768x3", True, [1024, 1024], 1024.5]
)
def test_a_resolution_that_is_no_size_is_refused_with_an_example(value: Any) -> None:
    with pytest.raises(WorkloadError, match=r"^--resolution .* is not a size; write 1024 or 832x480"):
        from_request({"model": "flux", "resolution": value})


@pytest.mark.parametrize(
    ("model", "value", "nearest"),
    [
        ("flux", "1000", "992x992 and 1008x1008"),
        ("flux", "1030x500", "1024x496 and 1040x512"),
        ("sdxl", "1000x1010", "992x992 and 1024x1024"),
        ("wan", "830x480", "816x480 and 832x480"),
    ],
)
def test_a_resolution_that_the_models_patch_does_not_divide_is_refused_with_the_nearest(
    model: str, value: str, nearest: str
) -> None:
    with pytest.raises(WorkloadError, match=rf"multiples of {families()[model].pixel_multiple} \(nearest: {nearest}\)"):
        from_request({"model": model, "resolution": value})


@pytest.mark.parametrize(
    ("value", "side"), [("8x1024", "width"), ("1024x8", "height"), ("0", "width"), ("1024x99999", "height")]
)
def test_a_side_that_is_too_small_or_too_large_is_refused_by_name(value: str, side: str) -> None:
    with pytest.raises(WorkloadError, match=f"{side} must be from 16 to 16384 pixels for flux"):
        from_request({"model": "flux", "resolution": value})


VISUAL = sorted(name for name, family in families().items() if family.kind != "audio")


@given(st.sampled_from(VISUAL), st.integers(1, 17000), st.integers(1, 17000))
def test_the_nearest_resolution_that_is_offered_is_itself_accepted(model: str, width: int, height: int) -> None:
    with contextlib.suppress(WorkloadError):
        parse_resolution(f"{width}x{height}", families()[model])
        return
    offered = _offered(f"{width}x{height}", model)
    assert 1 <= len(offered) <= 2
    for near in offered:
        parsed = parse_resolution(near, families()[model])
        assert parsed == tuple(int(s) for s in reversed(near.split("x")))


def _offered(resolution: str, model: str) -> list[str]:
    """The sizes that a refusal offers instead."""
    with pytest.raises(WorkloadError) as error:
        parse_resolution(resolution, families()[model])
    found = re.search(r"\(nearest: ([\dx]+(?: and [\dx]+)?)\)$", str(error.value))
    assert found is not None, error.value
    return found[1].split(" and ")


@pytest.mark.parametrize(
    ("given_", "nearest"),
    [("2057x1000", "2048x992 and 2048x1008"), ("4096x1024", "2048x1024"), ("1000x1000", "992x992 and 1008x1008")],
)
def test_the_nearest_resolution_keeps_within_a_models_position_table(given_: str, nearest: str) -> None:
    assert families()["kandinsky5_image"].max_side == 2048
    assert " and ".join(_offered(given_, "kandinsky5_image")) == nearest


@pytest.mark.parametrize("frames", [MAX_FRAMES + 1, 10**30])
def test_more_frames_than_any_model_takes_are_refused_with_the_most(frames: int) -> None:
    with pytest.raises(WorkloadError, match=rf"^--frames {frames} is more frames than wan takes \(nearest: 4093\)$"):
        from_request({"model": "wan", "frames": frames})


def test_frames_of_an_image_model_are_refused() -> None:
    with pytest.raises(WorkloadError, match="--frames 9: flux is an image model; leave --frames out"):
        from_request({"model": "flux", "frames": 9})


@pytest.mark.parametrize(("frames", "below", "above"), [(80, 77, 81), (2, 1, 5), (84, 81, 85)])
def test_frames_that_the_vae_does_not_take_are_refused_with_the_nearest(frames: int, below: int, above: int) -> None:
    with pytest.raises(WorkloadError, match=rf"1 \+ n x 4 frames \(nearest: {below} and {above}\)"):
        from_request({"model": "wan", "frames": frames})


def test_more_caption_tokens_than_the_model_takes_are_refused_with_the_limit() -> None:
    with pytest.raises(WorkloadError, match=r"--caption-tokens 257 is more than flux takes \(at most 256\)"):
        from_request({"model": "flux", "variant": "schnell", "caption_tokens": 257})


@pytest.mark.parametrize("value", ["to_q", [], [""], [1], {"to_q": 1}.values(), 5])
def test_lora_targets_that_are_no_list_of_names_are_refused(value: Any) -> None:
    with pytest.raises(WorkloadError, match="--lora-targets must be a list of module names"):
        from_request({"model": "flux", "lora_targets": value})


@pytest.mark.parametrize("value", ["blocks:0", "blocks:", "ramtorch:0", "ramtorch:101", "ramtorch:", "cpu", 3])
def test_a_bad_weights_offload_is_refused_with_the_valid_ones(value: Any) -> None:
    with pytest.raises(
        WorkloadError, match=r"--weights-offload .* is not valid; valid: none, ramtorch, ramtorch:PERCENT, blocks:N"
    ):
        from_request({"model": "flux", "weights_offload": value})


def test_full_training_of_a_quantised_base_is_refused() -> None:
    with pytest.raises(WorkloadError, match="--precision int8-quanto does not go with --adapter full"):
        from_request({"model": "flux", "adapter": "full", "precision": "int8-quanto"})


@pytest.mark.parametrize(
    "request_",
    [{"precision": p} for p in PRECISIONS if p not in ESTIMATED_PRECISIONS],
    ids=str,
)
def test_what_cannot_be_estimated_yet_is_told_apart_from_what_is_not_valid(request_: dict[str, Any]) -> None:
    option = next(iter(request_)).replace("_", "-")
    with pytest.raises(NotYetError, match=f"^--{option} .*cannot be estimated yet"):
        from_request({"model": "flux", **request_})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # a shared machine, not the strategy
@given(st.dictionaries(st.sampled_from(REQUEST_KEYS), JSON, max_size=3), st.sampled_from(["flux", "wan", None]))
def test_any_json_gives_a_workload_or_an_error_of_this_layer(request_: dict[str, Any], model: str | None) -> None:
    with contextlib.suppress(WorkloadError, UnknownModelError):
        found = from_request(request_ if model is None else request_ | {"model": model})
        assert from_request({k: v for k, v in found.describe().items() if k in REQUEST_KEYS}) == found


# The small copy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", sorted(families()))
def test_the_reduced_copy_is_the_same_job_in_float32_at_the_sheets_small_shape(model: str) -> None:
    workload = from_request({"model": model, "rank": 64})
    small, sheet = reduced_copy(workload), families()[model].reduced
    assert (small.width, small.height, small.frames) == (sheet.resolution, sheet.resolution, sheet.frames)
    assert (small.precision, small.reduced, small.rank) == ("fp32", True, 8)
    assert (small.lora_targets, small.lora_dropout, small.adapter) == (
        workload.lora_targets,
        workload.lora_dropout,
        workload.adapter,
    )


def test_the_reduced_copy_keeps_pytorchs_optimizers_and_runs_every_other_as_adamw() -> None:
    workload = from_request({"model": "flux"})
    for name in OPTIMIZERS:
        expected = name if name.startswith(("sgd", "torch-a", "torch-r", "torch-n", "adamw-f")) else "adamw"
        assert reduced_copy(dataclasses.replace(workload, optimizer=name)).optimizer == expected


CHANGED: dict[str, Any] = {
    "variant": "schnell",
    "resolution": 768,
    "batch": 2,
    "caption_tokens": 100,
    "adapter": "lokr",
    "rank": 4,
    "alpha": 3.0,
    "lora_targets": ["to_q"],
    "lora_dropout": 0.25,
    "precision": "nf4",
    "optimizer": "sgd",
    "attention": "math",
    "fuse_qkv": True,
    "weights_offload": "ramtorch",
    "lokr_factor": 4,
    "lokr_full_matrix": True,
    "lokr_scalar": True,
    "lokr_rebuild": True,
    "dora": True,
    "rslora": True,
    "accumulate": 4,
    "ema": True,
    "master_weights": True,
}


@pytest.mark.parametrize("name", sorted(CHANGED))
def test_no_option_is_dropped_on_the_way(name: str) -> None:
    adapter = {"adapter": "lokr"} if name.startswith("lokr") else {}
    assert from_request({"model": "flux", **adapter, name: CHANGED[name]}) != from_request({"model": "flux", **adapter})
