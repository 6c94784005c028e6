"""Every kind of fault in docs/fault_classes.md has a test, and every test named there exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

FILES = {path.name: path for path in Path(__file__).parents[1].rglob("test_*.py")}
PAGE = Path(__file__).parents[2] / "docs" / "fault_classes.md"
KINDS = range(1, 32)


@cache
def _rows() -> dict[int, tuple[str, ...]]:
    """Tests, as file::name, by the number of the fault."""
    rows: dict[int, tuple[str, ...]] = {}
    for line in PAGE.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0].isdigit():
            rows[int(cells[0])] = tuple(re.findall(r"`(test_\w+\.py::\w+)`", cells[2]))
    return rows


@cache
def _tests(file: str) -> dict[str, frozenset[int]]:
    """The kinds of fault that each test of a file says it is about."""
    found = {}
    for node in ast.walk(ast.parse(FILES[file].read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            named = re.search(r"Fault class(?:es)? ([\d, ]+)", ast.get_docstring(node) or "")
            found[node.name] = frozenset(map(int, re.findall(r"\d+", named.group(1)))) if named else frozenset()
    return found


def test_every_kind_of_fault_has_its_row() -> None:
    assert sorted(_rows()) == list(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_names_tests_that_exist_and_are_about_it(kind: int) -> None:
    assert _rows()[kind], "a kind of fault without a test"
    for name in _rows()[kind]:
        file, test = name.split("::")
        assert test in _tests(file), f"{name} does not exist"
        assert kind in _tests(file)[test], f"{name} does not say that it is about {kind}"


def test_no_test_that_is_about_a_kind_of_fault_is_missing_in_the_table() -> None:
    for file in sorted(FILES):
        for test, kinds in _tests(file).items():
            for kind in kinds:
                assert f"{file}::{test}" in _rows()[kind]
