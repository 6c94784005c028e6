"""The fact sheets: names, sizes, and that the models they describe are the published ones."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from probes import build, catalogue
from probes.catalogue import UnknownModelError, families, find
from probes.discover import discover
from probes.expressions import evaluate
from probes.step import forward_loss
from probes.workload import from_request, parse_resolution, reduced_copy

FIVE = ("flux", "sd3", "sdxl", "wan", "z_image")
VARIANTS = [(name, v) for name in FIVE for v in families()[name].variants]


# Names ---------------------------------------------------------------------------------------------------------------


def test_the_catalogue_needs_no_torch() -> None:
    code = "import sys, probes.catalogue as c; c.families(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", FIVE)
def test_a_family_is_found_by_name_title_and_alias_whatever_the_case_and_punctuation(name: str) -> None:
    family = families()[name]
    for spelling in (family.name, family.title, *family.aliases):
        assert find(spelling) is family
        assert find(spelling.upper().replace("-", " ").replace("_", ".")) is family


def test_no_two_families_share_a_spelling() -> None:
    seen: dict[str, str] = {}
    for family in families().values():
        for spelling in {catalogue._plain(s) for s in (family.name, family.title, *family.aliases)}:
            assert seen.setdefault(spelling, family.name) == family.name, spelling


def test_no_two_variants_of_a_family_share_a_spelling() -> None:
    for family in (families()[name] for name in FIVE):
        spellings = [s for v in family.variants.values() for s in {catalogue._plain(s) for s in (v.name, *v.aliases)}]
        assert len(spellings) == len(set(spellings)), family.name


@pytest.mark.parametrize(
    ("typed", "meant"), [("fluxx", "flux"), ("sd4", "sd3"), ("z imag", "z_image"), ("wam2.1", "wan")]
)
def test_an_unknown_model_is_refused_with_the_nearest_match_and_all_names(typed: str, meant: str) -> None:
    with pytest.raises(UnknownModelError) as error:
        find(typed)
    assert f"did you mean {meant!r}?" in str(error.value)
    assert all(name in str(error.value) for name in families())


def test_a_model_that_resembles_nothing_is_refused_without_a_guess() -> None:
    with pytest.raises(UnknownModelError, match="unknown model 'qqqqqq'") as error:
        find("qqqqqq")
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize("name", ["", "   ", None, 7, ["flux"]])
def test_a_model_needs_a_name(name: Any) -> None:
    with pytest.raises(UnknownModelError, match="--model needs a name; valid: "):
        find(name)


def test_the_default_variant_is_taken_when_none_is_named() -> None:
    assert find("flux").variant(None).name == "dev"
    assert find("flux").variant("").name == "dev"


@pytest.mark.parametrize(
    ("model", "typed", "name"), [("sd3", "3.5-Medium", "medium"), ("wan", "14B", "t2v-480p-14b-2.1")]
)
def test_a_variant_is_found_by_its_aliases(model: str, typed: str, name: str) -> None:
    assert find(model).variant(typed).name == name


@pytest.mark.parametrize("typed", ["huge", 5])
def test_an_unknown_variant_is_refused_with_those_that_exist(typed: Any) -> None:
    with pytest.raises(UnknownModelError, match=r"flux has no variant .*; it has: dev, schnell"):
        find("flux").variant(typed)


# Sheets --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", families().values(), ids=families().keys())
def test_a_sheet_agrees_with_itself(family: catalogue.Family) -> None:
    assert family.default_variant in family.variants
    assert family.kind in ("image", "video", "audio")
    assert family.padding in ("max_length", "longest")
    assert {family.of(v).objective for v in family.variants} <= {"flow", "epsilon", "velocity", "tokens"}
    assert family.source
    # its defaults, and the small copy's shape, are shapes that it takes
    default = from_request({"model": family.name})
    small = reduced_copy(default)
    assert from_request({"model": family.name, "frames": small.frames if family.kind == "video" else None})
    if family.kind != "audio":
        assert parse_resolution(default.resolution, family) == (default.height, default.width)
        assert parse_resolution(small.resolution, family) == (small.height, small.width)
    assert len({i.name for i in family.inputs}) == len(family.inputs)
    for variant in family.variants.values():
        assert set(variant.skip_inputs) <= {i.name for i in family.inputs}


def test_width_comes_before_height_in_a_written_default_resolution() -> None:
    assert find("wan").default_resolution == (480, 832)  # height, width of 832x480


# Against the real classes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "variant"), VARIANTS)
def test_a_variants_parameter_count_is_the_published_one(model: str, variant: str) -> None:
    workload = from_request({"model": model, "variant": variant})
    with torch.device("meta"):
        built = build.build_base(workload)
    assert sum(p.numel() for p in built.parameters()) == find(model).variant(variant).parameters
    structure = discover(built, find(model).regions)
    assert structure.blocks
    assert all(b.attention or "resnets" in b.name for b in structure.blocks)


@pytest.mark.parametrize("model", FIVE)
def test_the_inputs_that_are_built_run_through_the_real_class_and_give_the_outputs_shape(model: str) -> None:
    workload = reduced_copy(from_request({"model": model, "batch": 2}))
    job = build.real_job(workload, seed=1)
    with torch.no_grad():
        output = job.model(**job.inputs, return_dict=False)[0]
        if job.output_stack:
            output = torch.stack(list(output))
        assert torch.isfinite(forward_loss(job))
    assert output.shape == job.target.shape
    assert all(t.isfinite().all() for t in pytree.tree_leaves(job.inputs))


@pytest.mark.parametrize("model", FIVE)
def test_the_batch_size_reaches_every_input_that_has_one(model: str) -> None:
    workloads = [dataclasses.replace(from_request({"model": model}), batch=b) for b in (1, 3)]
    with torch.device("meta"):
        built = build.build_base(reduced_copy(workloads[0]))
        (one, _), (three, target) = (build.make_inputs(w, built) for w in workloads)
    for spec in find(model).inputs:
        if spec.list_of is not None:
            assert (len(one[spec.name]), len(three[spec.name])) == (1, 3)
        elif spec.shape[0] == "B":
            outer, _, inner = spec.name.partition(".")
            tensor = three[outer][inner] if inner else three[outer]
            assert tensor.shape[0] == 3
    assert target.shape[0] == 3


def test_text_and_image_sizes_of_flux_follow_the_request() -> None:
    workload = from_request({"model": "flux", "variant": "schnell", "resolution": "768x512"})
    with torch.device("meta"):
        inputs, target = build.make_inputs(workload, build.build_base(reduced_copy(workload)))
    assert inputs["hidden_states"].shape[1] == 48 * 32
    assert inputs["encoder_hidden_states"].shape[1] == 256  # schnell's own limit
    assert "guidance" not in inputs
    assert target.shape == inputs["hidden_states"].shape


@pytest.mark.parametrize("model", FIVE)
def test_every_shape_expression_is_arithmetic_over_known_names(model: str) -> None:
    workload = from_request({"model": model})
    with torch.device("meta"):
        names = build.symbols(workload, build.build_base(reduced_copy(workload)))
    for spec in find(model).inputs:
        assert all(evaluate(e, names) > 0 for e in spec.shape)
