"""Takes the arguments or results of a call apart into leaves and puts them together again.

Containers are those that `torch.utils._pytree` knows (tuples, lists, dictionaries, named tuples, the output classes of
diffusers and transformers) and every dataclass that holds a tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree


class Layout:
    """The structure of a value without its leaves."""

    __slots__ = ("_objects", "_spec")

    def __init__(self, spec: Any, objects: Sequence[_Object | None] | None) -> None:
        self._spec = spec
        self._objects = objects
        """For every leaf of the spec: the dataclass instance that stands there, or None. None: no instance anywhere."""

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """A new value of this structure from as many leaves as `flatten` returned."""
        if self._objects is None:
            return pytree.tree_unflatten(list(leaves), self._spec)
        values, at = [], 0
        for item in self._objects:
            if item is None:
                values.append(leaves[at])
                at += 1
            else:
                values.append(item.rebuild(leaves[at : at + item.leaves]))
                at += item.leaves
        return pytree.tree_unflatten(values, self._spec)


@dataclasses.dataclass(frozen=True)
class _Object:
    """A dataclass instance without the leaves of its fields."""

    kind: type
    layout: Layout
    leaves: int
    others: dict[str, Any]
    """Instance attributes that are no fields."""

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        new: Any = object.__new__(self.kind)
        for name, value in {**self.others, **self.layout.rebuild(leaves)}.items():
            object.__setattr__(new, name, value)
        return new


def flatten(value: Any) -> tuple[list[Any], Layout]:
    """The leaves of `value` in a fixed order, and its structure. The structure holds no tensor."""
    values, spec = pytree.tree_flatten(value)
    if not any(dataclasses.is_dataclass(v) and not isinstance(v, type) for v in values):
        return values, Layout(spec, None)
    leaves: list[Any] = []
    objects: list[_Object | None] = []
    for v in values:
        taken = _take_apart(v)
        if taken is None:
            objects.append(None)
            leaves.append(v)
        else:
            objects.append(taken[1])
            leaves.extend(taken[0])
    return leaves, Layout(spec, objects)


def _take_apart(value: Any) -> tuple[list[Any], _Object] | None:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    leaves, layout = flatten(fields)
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return None
    others = {k: v for k, v in getattr(value, "__dict__", {}).items() if k not in fields}
    return leaves, _Object(type(value), layout, len(leaves), others)


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensor leaves of `value`, in the order of `flatten`."""
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def version(tensor: torch.Tensor) -> int:
    """Number of in-place changes so far; inference tensors, which do not count them, are always at 0."""
    return 0 if tensor.is_inference() else tensor._version
