"""The vocabulary of fact sheets: what the catalogue says is what a person may say."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes import catalogue, sheets


@pytest.mark.parametrize("name", catalogue.families())
def test_every_sheet_of_the_catalogue_is_in_the_vocabulary(name: str) -> None:
    sheets.check(catalogue._sheets()[name], overrides=True)


@pytest.mark.parametrize("name", catalogue.families())
def test_a_familys_sheet_as_json_is_the_family(name: str) -> None:
    family = catalogue.families()[name]
    variant = family.variant(None)
    sheet = dict(catalogue.specialised_sheet(name, variant.name))
    base = {"config": dict(variant.config), "skip_inputs": list(variant.skip_inputs)}
    if variant.text_tokens is not None:
        base["text_tokens"] = variant.text_tokens
    sheet["variants"] = {variant.name: base}
    sheet["reduced"] = {**sheet["reduced"], "config": dict(family.of(variant.name).reduced.config)}
    found = catalogue.parse(json.dumps(sheet))
    wanted = family.of(variant.name)
    assert (found.inputs, found.regions, found.output_shape) == (wanted.inputs, wanted.regions, wanted.output_shape)
    assert (found.model_class, found.pixel_multiple, found.reduced) == (
        wanted.model_class,
        wanted.pixel_multiple,
        wanted.reduced,
    )
    assert found.variant(None).config == variant.config


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(table=st.sampled_from(sorted(sheets.TABLES)), value=VALUES)
def test_whatever_a_table_holds_is_read_or_refused(table: str, value: Any) -> None:
    sheet = copy.deepcopy(dict(catalogue.specialised_sheet("flux", "dev")))
    sheet["variants"] = {"dev": {"config": {}}}
    sheet[table] = value
    try:
        sheets.check(sheet)
    except sheets.SheetError:
        return
    catalogue.parse(json.dumps(sheet))


@pytest.mark.parametrize(
    ("config", "ok"),
    [
        ({"rope_theta": 100_000_000, "vocab_size": 256_000, "num_layers": 64}, True),
        ({"num_layers": 10_001}, False),
        ({"depth": 10**6}, False),
        ({"dim": 10**8}, False),
        ({"sample_size": 10**5}, False),
        ({"a": [[[[[[[[[[1]]]]]]]]]]}, False),
        ({"a": float("nan")}, False),
        ({"a": "x" * 5000}, False),
    ],
)
def test_a_config_of_insane_size_is_refused(config: dict[str, Any], ok: bool) -> None:
    if ok:
        sheets.config("", config)
        return
    with pytest.raises(sheets.SheetError):
        sheets.config("", config)
