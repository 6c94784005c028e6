"""The arithmetic in fact sheets: it computes like Python, and evaluates nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.expressions import ExpressionError, evaluate

NAMES = {"B": 2, "H": 1024, "W": 832, "F": 81}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("B", 2),
        ("(H//16)*(W//16)", 64 * 52),
        ("1+(F-1)//4", 21),
        ("H%100-1", 23),
        ("-B*3", -6),
        ("2*(3+4)", 14),
        ("7//2*2", 6),
    ],
)
def test_value_of_an_expression(text: str, value: int) -> None:
    assert evaluate(text, NAMES) == value


@st.composite
def _expressions(draw: st.DrawFn, depth: int = 4) -> str:
    if depth == 0 or draw(st.booleans()):
        return draw(st.sampled_from([*NAMES, "1", "3", "16", "1000"]))
    left, right = draw(_expressions(depth=depth - 1)), draw(_expressions(depth=depth - 1))
    return f"({left}{draw(st.sampled_from(['+', '-', '*', '//', '%']))}{right})"


@given(_expressions())
def test_it_computes_as_python_does(text: str) -> None:
    try:
        expected = eval(text, {}, dict(NAMES))
    except ZeroDivisionError:
        with pytest.raises(ExpressionError, match="divides by zero"):
            evaluate(text, NAMES)
        return
    assert evaluate(text, NAMES) == expected


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "B.bit_length()",
        "[1][0]",
        "B if B else 1",
        "B and 1",
        "B < 3",
        "2**9",
        "7/2",
        "1.5",
        "'7'",
        "lambda: 1",
        "(B := 3)",
    ],
)
def test_anything_but_arithmetic_over_whole_numbers_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError, match="not arithmetic over whole numbers"):
        evaluate(text, NAMES)


@pytest.mark.parametrize("text", ["", "B B", "(B", "1 +"])
def test_text_that_does_not_parse_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError, match="not an expression"):
        evaluate(text, NAMES)


@pytest.mark.parametrize("names", [{}, {"X": True}, {"X": 1.0}, {"X": "1"}, {"X": None}])
def test_a_name_that_is_no_whole_number_is_refused_by_name(names: dict[str, object]) -> None:
    with pytest.raises(ExpressionError, match=r"'X' in 'X\+1' is not a known whole number"):
        evaluate("X+1", names)
