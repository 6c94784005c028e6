"""Arithmetic over named whole numbers, for the shapes in fact sheets. Data, not code: nothing else is evaluated."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


MOST_REPEATS = 100_000


class ExpressionError(ValueError):
    """Not arithmetic over the given names."""


def evaluate(text: str, names: Mapping[str, Any]) -> int:
    """Value of e.g. ``(H//16)*(W//16)``. Operators: + - * // % and parentheses; ``-(-H//32)`` rounds up.

    Raises:
        ExpressionError: anything else, or a name that is not a whole number.
    """

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name):
                found = names.get(name)
                if isinstance(found, bool) or not isinstance(found, int):
                    raise ExpressionError(f"{name!r} in {text!r} is not a known whole number")
                return found
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return _BINARY[type(op)](value(left), value(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
        raise ExpressionError(f"{text!r} is not arithmetic over whole numbers")

    try:
        return value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, ExpressionError):
            raise
        raise ExpressionError(f"{text!r} is not an expression") from None
    except ZeroDivisionError:
        raise ExpressionError(f"{text!r} divides by zero") from None


def evaluate_all(value: Any, names: Mapping[str, Any]) -> Any:
    """A nested value with every text in it evaluated; ``none`` is None, and a list without lists inside becomes a tuple.
    ``{repeat = "R", of = x}`` inside a list stands for R times x.

    Raises:
        ExpressionError: as `evaluate`.
    """
    match value:
        case str():
            return None if value == "none" else evaluate(value, names)
        case list():
            found: list[Any] = []
            for v in value:
                if isinstance(v, dict) and v.keys() == {"repeat", "of"}:
                    times = evaluate(v["repeat"], names)
                    if times > MOST_REPEATS:
                        raise ExpressionError(f"{v['repeat']!r} repeats {times} times; at most {MOST_REPEATS}")
                    found += [evaluate_all(v["of"], names)] * times
                else:
                    found.append(evaluate_all(v, names))
            return found if any(isinstance(v, (list, tuple, dict)) for v in found) else tuple(found)
        case dict():
            return {k: evaluate_all(v, names) for k, v in value.items()}
    return value
