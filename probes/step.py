"""One training step, shared by the traced probe, verification and `advise run`: what is predicted is what is run."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from probes.build import BuildError, Job


def predict(job: Job) -> Any:
    """The model's prediction under the job's autocast: a tensor, or one tensor a head where token ids are predicted.

    Raises:
        BuildError: the forward returns something that has no first output.
    """
    device = job.target.device.type
    context = torch.autocast(device, job.autocast) if job.autocast is not None else contextlib.nullcontext()
    cls: Any = type(job.model)
    extra = {"return_dict": False} if _takes_return_dict(cls) else {}
    with context:
        output = job.model(**job.inputs, **extra)
        if not isinstance(output, torch.Tensor):
            try:
                output = output[0]
            except (KeyError, IndexError, TypeError):
                raise BuildError(
                    f"{cls.__name__}.forward returns a {type(output).__name__}; it must return a tensor, or a tuple that "
                    "begins with one"
                ) from None
        return torch.stack(list(output)) if job.output_stack else output


@cache
def _takes_return_dict(cls: Any) -> bool:
    parameters = inspect.signature(cls.forward).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return "return_dict" in parameters or (anything and cls.__module__.startswith("diffusers."))


def forward_loss(job: Job) -> torch.Tensor:
    """Forward pass and loss, float32 scalar: mean squared error, or cross entropy where the target holds token ids."""
    output = predict(job)
    if not job.target.is_floating_point():
        return cross_entropy(output, job.target)
    return F.mse_loss(output.float(), job.target.float())


def cross_entropy(
    logits: Sequence[torch.Tensor], ids: torch.Tensor, counted: torch.Tensor | None = None
) -> torch.Tensor:
    """Mean over all positions, or over the `counted` ones (bool, shaped as `ids`; none of them: 0).

    Args:
        logits: [..., n, V] of several heads, whose n add up to the last axis of `ids`.
    """
    sizes = [part.shape[-2] for part in logits]
    losses = [
        F.cross_entropy(part.float().flatten(0, -2), wanted.flatten(), reduction="none")
        for part, wanted in zip(logits, ids.split(sizes, dim=-1), strict=True)
    ]
    every = torch.cat(losses)
    if counted is None:
        return every.mean()
    weights = torch.cat([part.flatten() for part in counted.split(sizes, dim=-1)]).to(every.dtype)
    return (every * weights).sum() / weights.sum().clamp(min=1)


def gradient_pass(job: Job, accumulate: int = 1) -> torch.Tensor:
    """Forward and backward, `accumulate` times, the gradients of their mean loss added up. Returns that loss (float32 scalar)."""
    total: torch.Tensor | None = None
    for _ in range(accumulate):
        loss = forward_loss(job)
        if accumulate > 1:
            loss = loss / accumulate
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
        del loss
    assert total is not None
    return total


def train_step(job: Job, optimizer: torch.optim.Optimizer, accumulate: int = 1) -> torch.Tensor:
    """`gradient_pass`, optimizer step, gradients dropped. Returns the detached loss (float32 scalar)."""
    loss = gradient_pass(job, accumulate)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss


_OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "adamw-fused": (torch.optim.AdamW, {"fused": True}),
    "torch-adam": (torch.optim.Adam, {}),
    "torch-radam": (torch.optim.RAdam, {}),
    "torch-nadam": (torch.optim.NAdam, {}),
    "torch-adamax": (torch.optim.Adamax, {}),
    "torch-adadelta": (torch.optim.Adadelta, {}),
    "torch-rmsprop": (torch.optim.RMSprop, {}),
    "torch-adagrad": (torch.optim.Adagrad, {}),
    "torch-asgd": (torch.optim.ASGD, {}),
    "torch-adafactor": (torch.optim.Adafactor, {}),
    "sgd": (torch.optim.SGD, {}),
    "sgd-momentum": (torch.optim.SGD, {"momentum": 0.9}),
}
"""PyTorch's own, which a run really uses."""


def runs_as_named(name: str) -> bool:
    """Whether a real run has that optimizer itself."""
    return name in _OPTIMIZERS


def make_optimizer(name: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a real run, learning rate 1e-4. Names that PyTorch does not have run as its AdamW."""
    cls, options = _OPTIMIZERS.get(name, (torch.optim.AdamW, {}))
    return cls(parameters, lr=1e-4, **options)
