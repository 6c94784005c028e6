"""Finds a model's chains of blocks, and the regions inside each block, from its module tree alone.

No model names are involved: a chain is a list of modules that look like blocks, wherever it is. What a fact sheet says about
the regions of a list comes before what the names suggest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from probes.catalogue import Regions
from probes.structure import Block, Chain, Structure


class StructureError(ValueError):
    """A fact sheet names a region that no block of its list has."""


_ATTENTION = re.compile(r"attn\d*|attention\d*")
_FEED_FORWARD = re.compile(r"(ff|ffn|mlp)\d?|feedforward|channelwise")
_HELPER = re.compile(
    r"(layer)?norm\d*|rms|ln\d*|adaln|ada|mod|modulation|gate|gates|scale|shift|embed(der|ding)?|drop(out)?|act|proj|bias|table"
)
"""Words that mark a child as something beside the attention or feed-forward submodule (`attn_norm`, `proj_mlp`)."""
_NOT_A_BLOCK = re.compile(
    r"(Attention|Attn|FeedForward|SwiGLU|MLP|Mlp|MoE|Projection|Embedding|Embeddings|Norm|Sampler|Adapter)$"
)
_ORDER = (("down", "in", "input", "encoder"), ("mid", "middle"), ("up", "out", "output", "decoder"))


def discover(model: nn.Module, regions: Mapping[str, Regions] | None = None) -> Structure:
    """The chains of `model`, in call order as far as names tell it.

    A list (`nn.ModuleList`, or an `nn.Sequential` of several equal blocks) is a chain when most of its elements look like
    blocks: several linear or convolution layers beside a norm or an attention. When its elements contain such lists
    themselves (a UNet's levels), those are the chains. Blocks of a level's residual and attention lists take turns, so such
    lists are never linked; for all others `Chain.linked` is None.

    Args:
        model: any module; parameters may be on the meta device and adapters may be injected.
        regions: regions by list path, where ``*`` stands for any text. An exact path wins over a pattern, an earlier pattern
            over a later one. Submodules that a block of the list lacks (a last block without a text side) are left out.

    Raises:
        StructureError: a region names a submodule that no block of its list has.
    """
    chains = [
        Chain(path, _blocks(path, modules, given), linked, given.groupable if given else True)
        for path, modules, linked in _lists(model, "", in_level=False)
        for given in (_given(path, regions or {}),)
        if given is None or given.checkpointed
    ]
    return Structure(tuple(chains))


def _lists(module: nn.Module, prefix: str, in_level: bool) -> Iterator[tuple[str, list[nn.Module], bool | None]]:
    """Path, blocks and `linked` of every chain below `module`, which is an element of a descended list if `in_level`."""
    children = sorted(_named_children(module), key=lambda item: _position(item[0]))
    found = [chains for name, child in children if (chains := list(_child_lists(child, f"{prefix}{name}")))]
    own = {path for chains in found for path, _, _ in chains if "." not in path.removeprefix(prefix)}
    residual = any(path.endswith("resnets") for path in own)
    if in_level or residual:
        found.sort(key=lambda chains: chains[0][0] not in own)
    taking_turns = residual or (in_level and len(found) > 1)
    for chains in found:
        for path, modules, linked in chains:
            yield path, modules, False if taking_turns and path in own else linked


def _child_lists(child: nn.Module, path: str) -> Iterator[tuple[str, list[nn.Module], bool | None]]:
    if not _is_list(child):
        yield from _lists(child, f"{path}.", in_level=False)
        return
    elements = [element for _, element in _named_children(child)]
    inner = [list(_element_lists(e, f"{path}.{i}")) for i, e in enumerate(elements)]
    if any(inner):
        for chains in inner:
            yield from chains
    elif _is_chain(child, elements):
        yield path, elements, None


def _element_lists(element: nn.Module, path: str) -> Iterator[tuple[str, list[nn.Module], bool | None]]:
    if _is_list(element):
        yield from _child_lists(element, path)
    else:
        yield from _lists(element, f"{path}.", in_level=True)


def _named_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Like `named_children`, but a module that occurs twice is listed twice."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential)


def _is_chain(module: nn.Module, elements: list[nn.Module]) -> bool:
    blocks = sum(map(_looks_like_block, elements))
    if isinstance(module, nn.Sequential):
        return blocks == len(elements) >= 2 and len({type(e) for e in elements}) == 1
    return blocks > 0 and 2 * blocks >= len(elements)


def _looks_like_block(module: nn.Module) -> bool:
    if _is_list(module) or _NOT_A_BLOCK.search(type(module).__name__) or not any(True for _ in module.children()):
        return False
    inside = list(module.named_modules())[1:]
    weighted = sum(1 for _, m in inside if _is_weighted(m))
    normed = any("norm" in type(m).__name__.lower() for _, m in inside)
    attends = any(_is_attention(name.rpartition(".")[2]) for name, _ in inside)
    return weighted >= 2 and (normed or attends)


def _is_weighted(module: nn.Module) -> bool:
    """A linear or convolution layer, whichever library it comes from."""
    kind = type(module).__name__
    return ("Linear" in kind or "Conv" in kind) and any(True for _ in module.parameters())


def _position(name: str) -> int:
    """Sorts children that say where they are called (``down_blocks``, ``mid_block``, ``up_blocks``); others stay in place."""
    first = name.split("_")[0]
    return next((i for i, words in enumerate(_ORDER) if first in words), 0)


def _words(name: str) -> list[str]:
    return name.replace("feed_forward", "ff").lower().split("_")


def _is_attention(name: str) -> bool:
    words = _words(name)
    return any(map(_ATTENTION.fullmatch, words)) and not any(map(_HELPER.fullmatch, words))


def _is_feed_forward(name: str) -> bool:
    words = _words(name)
    return any(map(_FEED_FORWARD.fullmatch, words)) and not any(map(_HELPER.fullmatch, words))


def _given(path: str, regions: Mapping[str, Regions]) -> Regions | None:
    if path in regions:
        return regions[path]
    return next((r for pattern, r in regions.items() if fnmatchcase(path, pattern)), None)


def _blocks(path: str, modules: list[nn.Module], given: Regions | None) -> tuple[Block, ...]:
    if given is not None:
        _check(path, modules, given)
    blocks = []
    for i, module in enumerate(modules):
        name = f"{path}.{i}"
        if given is None:
            feed_forward, attention = _guess(module)
            start = None
        else:
            feed_forward = tuple(run for run in given.feed_forward if all(_has(module, part) for part in run))
            attention = tuple(part for part in given.attention if _has(module, part))
            start = given.trainer_ffn_start
            start = start if start is not None and _has(module, start) else None
        blocks.append(
            Block(
                name=name,
                kind=type(module).__name__,
                feed_forward=tuple(tuple(f"{name}.{part}" for part in run) for run in feed_forward),
                attention=tuple(f"{name}.{part}" for part in attention),
                trainer_ffn_start=start,
            )
        )
    return tuple(blocks)


def _check(path: str, modules: list[nn.Module], given: Regions) -> None:
    named = [part for run in given.feed_forward for part in run]
    if not any(_has(m, part) for m in modules for part in given.attention):
        named += (
            given.attention
        )  # one that is missing may belong to other variants of the family (SD3's second attention)
    if given.trainer_ffn_start is not None:
        named.append(given.trainer_ffn_start)
    for part in named:
        if not any(_has(m, part) for m in modules):
            kinds = ", ".join(sorted({type(m).__name__ for m in modules}))
            children = ", ".join(dict.fromkeys(name for m in modules for name, _ in _named_children(m)))
            raise StructureError(f"no block of {path} ({kinds}) has a submodule {part!r}; children: {children}")


def _has(module: nn.Module, path: str) -> bool:
    try:
        module.get_submodule(path)
    except AttributeError:
        return False
    return True


def _guess(module: nn.Module) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """Feed-forward runs and attention names by the names of the children; one level deeper when a block only wraps another."""
    children = _named_children(module)
    feed_forward: list[tuple[str, ...]] = []
    names = {name for name, _ in children}
    for name, child in children:
        if _is_feed_forward(name) and sum(map(_is_weighted, child.modules())) >= 2:
            feed_forward.append((name,))
        kind, _, rest = name.partition("_")
        activation = f"act_{rest}"
        if kind == "proj" and _FEED_FORWARD.fullmatch(rest) and activation in names and _is_weighted(child):
            feed_forward.append((name, activation))
    attention = tuple(
        name for name, child in children if _is_attention(name) and any(map(_is_weighted, child.modules()))
    )
    if not feed_forward and not attention and len(children) == 1:
        name, child = children[0]
        inner, deeper = _guess(child)
        return tuple(tuple(f"{name}.{part}" for part in run) for run in inner), tuple(f"{name}.{a}" for a in deeper)
    return tuple(feed_forward), attention


def owned_tensors(model: nn.Module, blocks: Sequence[str]) -> dict[str, list[torch.Tensor]]:
    """By block, the parameters and buffers that no other module of the model has."""
    places: dict[int, set[str]] = {}
    inside: dict[str, dict[int, torch.Tensor]] = {name: {} for name in blocks}
    for tensors in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, t in tensors:
            block = next((b for b in _parents(name) if b in inside), "")
            places.setdefault(id(t), set()).add(block)
            if block:
                inside[block][id(t)] = t
    return {b: [t for key, t in found.items() if len(places[key]) == 1] for b, found in inside.items()}


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
