"""The page on adding a model: its example is a real sheet, and one sheet and one line are really all that it takes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from families_list import FAMILIES

from advisor.verification import compare_on_cpu
from estimators.schedule import Backend, Schedule
from probes import catalogue, resources
from probes.workload import from_request, reduced_copy

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding_a_model.md"


def _block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE.read_text("utf-8"), re.S)
    assert found is not None
    return found[1]


def _within(part: Any, whole: Any) -> bool:
    if isinstance(part, dict):
        return all(key in whole and _within(value, whole[key]) for key, value in part.items())
    if isinstance(part, list):
        return set(map(str, part)) <= set(map(str, whole))
    return bool(part == whole)


def test_the_example_is_part_of_the_real_sheet() -> None:
    example = tomllib.loads(_block("toml"))
    sheet = tomllib.loads(resources.text(f"families/{example['name']}.toml"))
    assert _within(example, sheet)


def test_the_line_of_the_example_is_the_real_one() -> None:
    name, line = re.findall(r'"(.*?)"', _block("python"))
    assert FAMILIES[name] == line


def test_the_example_alone_makes_a_family_that_is_planned_and_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    example = tomllib.loads(_block("toml"))
    family = catalogue._family(example)
    monkeypatch.setattr(catalogue, "families", lambda: {family.name: family})
    workload = from_request({"model": "z-image"})
    assert workload.resolution == "1024x1024"
    results = compare_on_cpu(reduced_copy(workload), lambda _: [Schedule(), Schedule(Backend.TORCH, 2)])
    assert all(r.exact and abs(r.error) < 0.02 for r in results)
