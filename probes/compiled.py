"""Regional compile in a trace: every block runs as `torch.compile` with Inductor would run it.

PyTorch itself decides what matters: AOTAutograd traces a block's forward and backward into one graph, with Inductor's decompositions,
and its min-cut partitioner chooses what forward saves and what backward computes again. The two graphs then run under the recorder,
kernel by kernel (`probes.kernels`). Assumed: Dynamo captures a block as one graph, without breaks.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from probes import kernels
from probes.recorder import Recorder
from probes.targets import CudaFunctions
from probes.thinning import signature

GRAPH_CALL_LAUNCHES = 8
"""Host time of one call of a compiled graph, forward or backward, beside its kernels: guards, AOTAutograd's wrapper, the autograd
node. In operators of eager PyTorch; an assumption."""


class _Body(nn.Module):
    """A block's own forward, behind whatever was put in front of it."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.block = block
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


def _as_function(
    body: _Body, names: Sequence[str], constants: Sequence[Any], where: Sequence[int], spec: Any
) -> Callable[..., Any]:
    """A block as a function of its parameters and tensor arguments. Holds no tensor of the call that it is made for."""

    def flat(*tensors: torch.Tensor) -> Any:
        parameters = {f"block.{n}": t for n, t in zip(names, tensors[: len(names)], strict=True)}
        leaves = list(constants)
        for i, t in zip(where, tensors[len(names) :], strict=True):
            leaves[i] = t
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return torch.func.functional_call(body, parameters, args, kwargs)

    return flat


def _described(value: Any) -> Any:
    """Equal for arguments with which a compiled block need not be compiled again."""
    if not isinstance(value, torch.Tensor):
        return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)
    return tuple(value.shape), value.stride(), value.dtype, value.device.type, value.requires_grad


class CompiledBlocks:
    """Compiles blocks in place. Blocks that compute the same share their graphs.

    Args:
        recorder: sees the kernels.
        functions: what makes a model save what it does on CUDA, if that is active.
    """

    def __init__(self, recorder: Recorder, functions: CudaFunctions | None) -> None:
        self.recorder, self.functions = recorder, functions
        self.failed: dict[str, str] = {}
        """Kinds of block that could not be compiled and ran eagerly, with the reason."""
        self._known: dict[Any, Callable[..., Any] | None] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What an answer has to say about the compiled blocks."""
        return tuple(
            f"{kind} could not be compiled here ({why}): estimated as eager" for kind, why in self.failed.items()
        )

    def compile(self, block: nn.Module, index: int) -> None:
        """Puts a compiled call in place of the block's `forward`."""
        block.forward = functools.partial(self._call, block, index, block.forward)

    def _call(self, block: nn.Module, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        state = {**dict(block.named_parameters()), **dict(block.named_buffers())}
        where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        given = (*state.values(), *(leaves[i] for i in where))
        key = (signature(block, index), str(spec), tuple(map(_described, (*state.values(), *leaves))))
        if key not in self._known:
            constants = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            flat = _as_function(_Body(block, forward), tuple(state), constants, where, spec)
            try:
                self._known[key] = self._compile(flat, given, len(state))
            except Exception as error:  # noqa: BLE001  a block may do what no graph can hold
                self._known[key] = None
                self.failed[type(block).__name__] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        compiled = self._known[key]
        return forward(*args, **kwargs) if compiled is None else compiled(*given)

    def _compile(self, flat: Callable[..., Any], given: tuple[Any, ...], parameters: int) -> Callable[..., Any]:
        from torch._functorch import partitioners
        from torch._functorch.aot_autograd import aot_function
        from torch._inductor.decomposition import select_decomp_table
        from torch._inductor.fx_passes.post_grad import remove_noop_ops

        def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
            remove_noop_ops(joint.graph)
            options["static_lifetime_input_indices"] = list(range(parameters))
            # where it finds no cut, PyTorch writes the graph into the current folder
            with mock.patch.object(partitioners, "_get_unique_path", return_value=os.devnull, create=True):
                return partitioners.min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **options)

        compiled: Callable[..., Any] = aot_function(
            flat, self._graph, self._graph, partition, decompositions=select_decomp_table()
        )
        with ExitStack() as stack:
            stack.enter_context(self.recorder.paused())
            if self.functions is not None:
                stack.enter_context(self.functions.capturing())
            compiled(*given)  # compiles, and runs once unseen
        return compiled

    def _graph(self, module: fx.GraphModule, _: Any) -> Callable[[list[Any]], list[Any]]:
        """What runs in place of a graph's compiled code."""
        plan = kernels.Plan(module.graph, on_cpu=self.functions is None)

        def call(values: list[Any]) -> list[Any]:
            for _ in range(GRAPH_CALL_LAUNCHES):
                self.recorder.kernel(0.0)
            return kernels.run(plan, values, self.recorder.kernel)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call
