"""Puts a schedule onto a model and takes it off again."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from advisor.runtime.attention import Region
from advisor.runtime.counters import Counters, RuntimeRefused
from advisor.runtime.offload import Engine
from advisor.runtime.swapping import SwappedBlock, Swapper, swappable
from advisor.runtime.units import Member, RunningUnit
from estimators.schedule import Backend, Schedule, resolve
from estimators.swapping import managed_blocks
from probes.discover import discover
from probes.structure import Structure

__all__ = ["Handle", "RuntimeRefused", "apply", "remove"]


class _Patch:
    """Stands in for a module's `forward` as an instance attribute; for a module on which `nn.Module.compile` was called,
    for its compiled call, so that compiled code runs inside the checkpoint.

    A deep copy or a pickle of the module gets the module's own forward instead: an independent model without a schedule.
    """

    def __init__(self, handle: Handle, module: nn.Module) -> None:
        self.handle = handle
        self.module = module
        self.slot = "forward" if module._compiled_call_impl is None else "_compiled_call_impl"
        self.inherited = self.slot not in module.__dict__
        self.original = getattr(module, self.slot)
        self.run: Callable[..., Any] | None = None
        """What is called instead when gradients are recorded; None: the original."""
        functools.update_wrapper(self, self.original, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.run is None or not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        return self.run(args, kwargs)

    def put_on(self) -> None:
        self.module.__dict__[self.slot] = self

    def take_off(self) -> None:
        """Restores the module; where something else has wrapped this patch since, it becomes transparent."""
        self.run = None
        if self.module.__dict__.get(self.slot) is self:
            if self.inherited:
                del self.module.__dict__[self.slot]
            else:
                self.module.__dict__[self.slot] = self.original

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.original, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, (self.module, self.slot)) if self.inherited else (_same, (self.original,))


def _same(value: Any) -> Any:
    return value


class _SwapPatch(_Patch):
    """The module with its block's weights on the device; under `torch.no_grad` too."""

    def __init__(self, handle: Handle, module: nn.Module, block: SwappedBlock, in_checkpoint: bool) -> None:
        super().__init__(handle, module)
        self.block, self.in_checkpoint = block, in_checkpoint
        self.run = torch.compiler.disable(functools.partial(block.run, self.original, in_checkpoint))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs) if self.run is None else self.run(args, kwargs)


class Handle:
    """A schedule on a model. Leaving it as a context manager, `remove` here, `advisor.runtime.remove` and another `apply`
    all restore the model."""

    def __init__(self, schedule: Schedule, structure: Structure, pinned_bytes: int | None = None) -> None:
        self.schedule = schedule
        self.structure = structure
        self.counters = Counters()
        self._notes: list[str] = []
        self._engine = Engine(
            self.counters,
            most_buckets=schedule.pin_memory_max_buckets,
            most_bytes=pinned_bytes,
            prefetch=schedule.prefetch,
            note=self._note,
        )
        self.units: tuple[RunningUnit, ...] = ()
        self._patches: list[_Patch] = []
        self._swapper: Swapper | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What was not done as asked, and why. Grows when a forward pass shows that blocks cannot share a checkpoint."""
        return tuple(self._notes)

    @property
    def active(self) -> bool:
        return any(patch.run is not None for patch in self._patches)

    def remove(self) -> None:
        """Restores the model. A backward pass through an earlier forward still works."""
        for unit in self.units:
            unit.close()
        for patch in reversed(self._patches):
            patch.take_off()
        self._patches.clear()
        self._engine.close()
        if self._swapper is not None:
            self._swapper.close()
            self._swapper = None

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        state = f"{len(self.units)} checkpoint units" if self.active else "not on a model"
        return f"Handle({self.schedule.name}, {state}, {self.counters})"

    def _swap(
        self, root: nn.Module, blocks: Sequence[str], checkpointed: Sequence[str], pinned_bytes: int | None
    ) -> None:
        """Sends the blocks' frozen weights to the host. To be called before anything else is put on.

        Args:
            checkpointed: modules that are called inside checkpoints.
        """
        found = swappable(root, blocks)
        swapped = {id(p) for parameters in found.values() for p in parameters}
        device = next((p.device for p in root.parameters() if id(p) not in swapped), torch.device("cpu"))
        self._swapper = Swapper(device, self.counters, self._note, pinned_bytes)
        for name, parameters in found.items():
            block = self._swapper.add(name, parameters)
            for part in dict.fromkeys([name, *(m for m in checkpointed if m.startswith(name + "."))]):
                patch = _SwapPatch(self, root.get_submodule(part), block, part in checkpointed)
                patch.put_on()
                self._patches.append(patch)

    def _put_on(
        self,
        model: nn.Module,
        groups: list[tuple[list[tuple[str, nn.Module]], bool]],
        attention: Mapping[str, tuple[str, ...]],
        check_values: bool,
    ) -> None:
        engine = self._engine
        regions = {name: Region(name, engine, self._note) for name in attention}
        inside = {name for named, _ in groups for name, _ in named}
        for name, region in regions.items():
            for part in attention[name]:
                module = model.get_submodule(part)
                patch = _Patch(self, module)
                patch.run = torch.compiler.disable(functools.partial(region.call, part, patch.original))
                self._patches.append(patch)
            if name not in inside:
                patch = _Patch(self, model.get_submodule(name))
                patch.run = torch.compiler.disable(functools.partial(region.run_block, patch.original))
                self._patches.append(patch)
        units = []
        for named, offload in groups:
            unit = RunningUnit(self.counters, self._note, engine if offload else None, check_values=check_values)
            call = torch.compiler.disable(unit.call)
            for index, (name, module) in enumerate(named):
                patch = _Patch(self, module)
                patch.run = functools.partial(call, index)
                unit.members.append(Member(name, module, patch.original, patch.slot != "forward", regions.get(name)))
                self._patches.append(patch)
            units.append(unit)
        self.units = tuple(units)
        spanning = [u for u in units if len(u.members) > 1]
        offloading = engine if regions or any(u.engine is not None for u in units) else None
        if spanning or offloading is not None:
            patch = _Patch(self, model)
            patch.run = functools.partial(_one_pass, patch.original, spanning, offloading)
            self._patches.append(patch)
        for patch in self._patches:
            if not isinstance(patch, _SwapPatch):
                patch.put_on()

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)


def _one_pass(
    forward: Callable[..., Any],
    units: list[RunningUnit],
    engine: Engine | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if engine is not None:
        engine.start_pass()
    try:
        return forward(*args, **kwargs)
    finally:
        for unit in units:
            unit.close()


def apply(
    model: nn.Module,
    schedule_or_plan: Any,
    *,
    structure: Structure | None = None,
    pinned_bytes: int | None = None,
    swap_blocks: int | None = None,
    check_values: bool = False,
) -> Handle:
    """Makes `model` run `schedule_or_plan` from its next forward pass on.

    An earlier schedule on the model or any part of it is replaced. Call this last: after adapters are injected, other
    libraries' hooks put on, and blocks compiled (`block.compile()`, `model.compile_repeated_blocks()`); what is compiled as
    a larger piece runs uncompiled inside checkpoints, and a note says so. Under `torch.no_grad` nothing is checkpointed; in
    eval mode with gradients everything is.

    Args:
        model: any module with block chains, or a wrapper around one (PEFT, DistributedDataParallel).
        schedule_or_plan: a `Schedule`, or an object with a `schedule` and perhaps a `structure`, such as a plan.
        structure: the model's chains; default: the plan's, else discovered from the module tree.
        pinned_bytes: page-locked host memory that offloading may hold for each GPU; default: half of the machine's memory. What
            does not fit goes to pageable memory, which is slower.
        swap_blocks: keep the frozen weights of the model's last so many blocks on the host and bring them when they are used; default:
            what the plan says, or 0. All blocks but the first at most.
        check_values: to find faults: compare what every replayed block returns with what it returned in forward (which is kept for
            that), and raise `RuntimeRefused` where they differ. PyTorch itself compares shapes only.

    Raises:
        RuntimeRefused: the model has its own checkpointing on, is sharded, or has nothing that the schedule could recompute;
            or the schedule offloads attention.
        ScheduleError: a per-block schedule does not fit the model.
    """
    schedule = (
        schedule_or_plan if isinstance(schedule_or_plan, Schedule) else getattr(schedule_or_plan, "schedule", None)
    )
    if not isinstance(schedule, Schedule):
        raise TypeError(f"apply needs a Schedule or a plan with one, not {type(schedule_or_plan).__name__}")
    _refuse(model)
    if structure is None:
        structure = getattr(schedule_or_plan, "structure", None) or discover(model)
    resolution = resolve(schedule, structure)
    if swap_blocks is None:
        swap_blocks = getattr(getattr(schedule_or_plan, "workload", None), "swapped_blocks", 0)
    swapped = managed_blocks(structure, swap_blocks)
    if swapped and resolution.offloaded_attention:
        raise RuntimeRefused("attention offload does not go with swapped blocks; leave one of them off")
    wanted = schedule.backend is not Backend.NONE
    attention = _attention(resolution.offloaded_attention, structure)
    if schedule.offload_attention and not attention and schedule.actions is None:
        raise RuntimeRefused(
            f"no block of {type(model).__name__} has an attention submodule; leave gradient_checkpointing_offload_attention off"
        )
    if wanted and not resolution.units:
        found = ", ".join(f"{c.path} ({c.blocks[0].kind})" for c in structure.chains) or "no list of blocks"
        raise RuntimeRefused(
            f"{schedule.name} has nothing to recompute in {type(model).__name__}: found {found}; "
            f"{'; '.join(resolution.notes) or 'pass structure= to say where the blocks are'}"
        )
    parts = [part for name, inside in attention.items() for part in (name, *inside)]
    root = _root(model, [*(name for unit in resolution.units for name in unit.modules), *parts, *swapped])
    _refuse_compiled(root, attention)
    handle = Handle(schedule, structure, pinned_bytes)
    for note in resolution.notes:
        handle._note(note)
    groups: list[tuple[list[tuple[str, nn.Module]], bool]] = []
    for unit in resolution.units:
        groups.append(([(name, root.get_submodule(name)) for name in unit.modules], unit.offload_inputs))
    groups = _without_repeats(groups, handle)
    _note_compiled(model, [module for named, _ in groups for _, module in named], handle)
    remove(model)
    if swapped:
        handle._swap(root, swapped, [name for unit in resolution.units for name in unit.modules], pinned_bytes)
    handle._put_on(root, groups, attention, check_values)
    return handle


def remove(model: nn.Module) -> None:
    """Takes whatever schedule is on `model`, or on any part of it, off again. Without one, does nothing."""
    found = (m.__dict__.get(slot) for m in model.modules() for slot in ("forward", "_compiled_call_impl"))
    for handle in {id(p.handle): p.handle for p in found if isinstance(p, _Patch)}.values():
        handle.remove()


def _refuse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if any(
            getattr(module, flag, False) is True for flag in ("gradient_checkpointing", "is_gradient_checkpointing")
        ):
            where = f" ({name})" if name else ""
            raise RuntimeRefused(
                f"{type(model).__name__}{where} has its own gradient checkpointing on; "
                "call disable_gradient_checkpointing() on it first"
            )
        if type(module).__name__.startswith(("FSDP", "FullySharded")):
            raise RuntimeRefused(
                f"{type(model).__name__} is sharded (FSDP): a replayed block would see empty parameters; "
                "use FSDP's own activation checkpointing"
            )
    if any(hasattr(p, "ds_id") for p in model.parameters()):
        raise RuntimeRefused(
            f"{type(model).__name__} is sharded (ZeRO-3): a replayed block would see empty parameters; use ZeRO-2 or less"
        )


def _root(model: nn.Module, names: list[str]) -> nn.Module:
    """The module in which `names` are found: `model` or something that it wraps."""
    for module in model.modules():
        if all(_has(module, name) for name in names):
            return module
    missing = next(name for name in names if not _has(model, name))
    raise RuntimeRefused(
        f"{type(model).__name__} has no module {missing}: the structure or plan belongs to another model"
    )


def _attention(chosen: Sequence[str], structure: Structure) -> dict[str, tuple[str, ...]]:
    """The chosen attention submodules by block."""
    wanted = set(chosen)
    found = {b.name: tuple(a for a in b.attention if a in wanted) for b in structure.blocks}
    return {name: parts for name, parts in found.items() if parts}


def _refuse_compiled(root: nn.Module, attention: Mapping[str, tuple[str, ...]]) -> None:
    for name in attention:
        module = root.get_submodule(name)
        if any(m._compiled_call_impl is not None or type(m).__name__ == "OptimizedModule" for m in module.modules()):
            raise RuntimeRefused(
                f"{name} is compiled: what its attention saves cannot be told apart; "
                "leave gradient_checkpointing_offload_attention off, or do not compile the blocks"
            )


def _has(module: nn.Module, name: str) -> bool:
    try:
        module.get_submodule(name)
    except AttributeError:
        return False
    return True


def _note_compiled(model: nn.Module, chosen: list[nn.Module], handle: Handle) -> None:
    inside = {id(m) for m in chosen}
    for module in model.modules():
        if module._compiled_call_impl is None and type(module).__name__ != "OptimizedModule":
            continue
        if n := sum(id(m) in inside for m in module.modules() if m is not module):
            handle._note(
                f"{n} recomputed modules lie inside a larger compiled {type(module).__name__} and run uncompiled; "
                "compile the recomputed modules one by one instead, before apply"
            )


def _without_repeats(
    groups: list[tuple[list[tuple[str, nn.Module]], bool]], handle: Handle
) -> list[tuple[list[tuple[str, nn.Module]], bool]]:
    """Gives a module that several names share a unit of its own, once: its calls cannot be told apart."""
    times: dict[int, int] = {}
    for named, _ in groups:
        for _, module in named:
            times[id(module)] = times.get(id(module), 0) + 1
    if all(n == 1 for n in times.values()):
        return groups
    out, done = [], set()
    for named, offload in groups:
        kept: list[tuple[str, nn.Module]] = []
        for name, module in named:
            if times[id(module)] == 1:
                kept.append((name, module))
                continue
            if kept:
                out.append((kept, offload))
                kept = []
            if id(module) not in done:
                done.add(id(module))
                handle._note(f"{name} is used {times[id(module)]} times and is a checkpoint of its own each time")
                out.append(([(name, module)], offload))
        if kept:
            out.append((kept, offload))
    return out
