"""Operators on meta tensors whose results are known from an earlier call with inputs of the same layout.

A model of many equal blocks calls its operators a few hundred different ways, tens of thousands of times. PyTorch works out most results
on meta tensors in Python, which is most of what a trace costs.
"""

from __future__ import annotations

from typing import Any

import torch

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


class Remembered:
    """Calls operators. Results that are fresh dense tensors are made again from their layout."""

    def __init__(self) -> None:
        self._functional: dict[Any, bool] = {}
        self._known: dict[Any, tuple[bool, list[Layout]] | None] = {}
        """By operator and inputs: whether the result is a tuple, and the layouts in it. None: it has to be called."""

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operator returns."""
        functional = self._functional.get(func)
        if functional is None:
            functional = self._functional[func] = _is_functional(func)
        if not functional or kwargs:
            return func(*args, **kwargs)
        key = _described(args)
        if key is None:
            return func(*args)
        key = (func, key)
        if key not in self._known:
            result = func(*args)
            self._known[key] = _layouts(result, args)
            return result
        known = self._known[key]
        if known is None:
            return func(*args)
        several, layouts = known
        made = [torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in layouts]
        return tuple(made) if several else made[0]


def _is_functional(func: Any) -> bool:
    """Reads tensors, and returns nothing but new ones."""
    schema = func._schema
    return (
        not schema.is_mutable
        and all(r.alias_info is None and isinstance(r.type, torch.TensorType) for r in schema.returns)
        and any(isinstance(a.type, torch.TensorType) for a in schema.arguments)
    )


def _described(values: tuple[Any, ...] | list[Any]) -> tuple[Any, ...] | None:
    """Everything of some arguments that a result's layout can depend on. None: not known to be everything, as of a tensor with values,
    of a subclass, or without dimensions (which may stand for a Python number and then promotes types otherwise)."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type == "meta"
            if not plain or value.dim() == 0 or value.is_conj() or value.is_neg() or value.layout is not torch.strided:
                return None
            found.append((value.shape, value.stride(), value.dtype))
        elif isinstance(value, (list, tuple)):
            inner = _described(value)
            if inner is None:
                return None
            found.append(inner)
        elif value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
            found.append((type(value), value))  # 1, 1.0 and True are equal
        else:
            return None
    return tuple(found)


def _layouts(result: Any, args: tuple[Any, ...]) -> tuple[bool, list[Layout]] | None:
    """How to make the result again. None: `torch.empty_strided` would make another one."""
    results = result if isinstance(result, tuple) else (result,)
    storages = set()
    for t in results:
        if type(t) is not torch.Tensor or t.device.type != "meta" or t.is_conj() or t.is_neg() or t.storage_offset():
            return None
        alike = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
        if t.layout is not torch.strided or alike.untyped_storage().nbytes() != t.untyped_storage().nbytes():
            return None
        storages.add(t.untyped_storage()._cdata)
    given = {a.untyped_storage()._cdata for a in args if isinstance(a, torch.Tensor)}
    if len(storages) != len(results) or storages & given:
        return None
    return isinstance(result, tuple), [(t.shape, t.stride(), t.dtype) for t in results]
