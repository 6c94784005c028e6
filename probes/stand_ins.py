"""Small replacements that let a trace run where values are missing, and what each of them assumes.

* `KnownValues`: the floats of a step have no values, its whole numbers and booleans (masks, lengths, token ids) do. Needed by
  models that read such values to decide shapes.
* An assumed count: where a model indexes by a mask that only a real run could know (expert routing), one in so many entries
  is taken to be selected.
* torchvision's resize, for model modules that call it and run where it is not installed.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

LARGEST_KNOWN = 2**22
"""Elements; larger integer and boolean tensors (a mask of every token with every token) go without values."""

aten = torch.ops.aten

_FACTORIES = {"aten::arange", "aten::ones", "aten::zeros", "aten::full", "aten::scalar_tensor"}
_INDEXING = {"aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class UnknownValuesError(RuntimeError):
    """The model reads values that no trace can know, and its fact sheet assumes nothing about them."""


class KnownValues(TorchDispatchMode):
    """Runs operators whose inputs are all real for real, and the others on meta tensors.

    Args:
        one_in: of entries selected by an unknown mask; None: such a selection raises UnknownValuesError.
    """

    def __init__(self, one_in: int | None = None) -> None:
        super().__init__()
        self.one_in = one_in
        self.assumed = 0
        """Selections whose size was assumed."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        unknown = any(t.is_meta for t in tensors)
        if not unknown:
            return self._known(func, name, tensors, args, kwargs)
        if name in _INDEXING:
            args = (args[0], self._indices(args[1]), *args[2:])
        elif name == "aten::nonzero":
            return self._selected(args[0])
        elif args and isinstance(args[0], torch.Tensor) and not args[0].is_meta and _writes_first(func):
            return args[0]
        if name == "aten::_to_copy":
            kwargs = {k: v for k, v in kwargs.items() if k != "device"}
        args, kwargs = pytree.tree_map_only(torch.Tensor, _without_values, (args, kwargs))
        return func(*args, **kwargs)

    def _known(
        self, func: Any, name: str, tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        to_meta = "device" in kwargs and kwargs["device"] is not None and torch.device(kwargs["device"]).type == "meta"
        if to_meta and name in _FACTORIES and not tensors:
            made = func(*args, **kwargs)
            if made.is_floating_point() or made.numel() > LARGEST_KNOWN:
                return made
            return func(*args, **{**kwargs, "device": torch.device("cpu")})
        if to_meta and name == "aten::_to_copy":
            dtype = kwargs.get("dtype") or args[0].dtype
            if not dtype.is_floating_point:
                return func(*args, **{**kwargs, "device": torch.device("cpu")})
            return func(_without_values(args[0]), **kwargs)
        if _result_size(name, tensors, args) > LARGEST_KNOWN:
            args, kwargs = pytree.tree_map_only(torch.Tensor, _without_values, (args, kwargs))
        return func(*args, **kwargs)

    def _indices(self, indices: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Boolean indices as whole numbers."""
        found: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                found.append(index)
            elif index.is_meta:
                found.extend(self._selected(index).unbind(1))
            else:
                found.extend(index.nonzero().unbind(1))
        return found

    def _selected(self, mask: torch.Tensor) -> torch.Tensor:
        if self.one_in is None:
            raise UnknownValuesError("the model selects by values that depend on its activations")
        self.assumed += 1
        return torch.empty((mask.numel() // self.one_in, mask.dim()), dtype=torch.long, device="meta")


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _writes_first(func: Any) -> bool:
    first = func._schema.arguments[0]
    return first.alias_info is not None and first.alias_info.is_write


def _result_size(name: str, tensors: list[torch.Tensor], args: tuple[Any, ...]) -> int:
    """Elements of what an operator reads or returns, as far as its inputs tell."""
    largest = max((t.numel() for t in tensors), default=0)
    if name == "aten::repeat":
        return largest * math.prod(args[1])
    try:
        return max(largest, math.prod(torch.broadcast_shapes(*(t.shape for t in tensors))))
    except RuntimeError:
        return largest


def _resize(image: torch.Tensor, size: list[int], interpolation: Any = None, **_: Any) -> torch.Tensor:
    return F.interpolate(image, size=tuple(size), mode="nearest")


def install(cls: type) -> None:
    """Gives the module of `cls` a stand-in for torchvision's transforms, where it wants them and they are not installed."""
    module = sys.modules[cls.__module__]
    if hasattr(module, "is_torchvision_available") and not hasattr(module, "transforms"):
        modes = types.SimpleNamespace(NEAREST="nearest")
        functional = types.SimpleNamespace(resize=_resize)
        module.transforms = types.SimpleNamespace(functional=functional, InterpolationMode=modes)  # type: ignore[attr-defined]


def notes(cls: type) -> list[str]:
    """What is stood in for in the module of `cls`."""
    transforms = getattr(sys.modules[cls.__module__], "transforms", None)
    if isinstance(transforms, types.SimpleNamespace):
        return ["torchvision is not installed: its nearest-neighbour resize is stood in for by torch's"]
    return []
