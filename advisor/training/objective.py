"""What a model is asked in training: how a clean sample is noised, and what the answer is compared with. Losses are float32.

* ``flow``, rectified flow: the model sees (1 - s) data + s noise and answers noise - data. Liu et al., arXiv:2209.03003. Times are
  logit-normal, s = sigmoid(n) with a standard normal n: Esser et al., arXiv:2403.03206, section 3.1.
* ``epsilon``: the model sees sqrt(a) data + sqrt(1 - a) noise and answers the noise; steps are uniform. Ho et al., arXiv:2006.11239.
* ``velocity``: the same noising, the answer is sqrt(a) noise - sqrt(1 - a) data. Salimans and Ho, arXiv:2202.00512.
* ``tokens``: cross entropy of the ids that come next.

Which part of a model's input is the sample follows from the fact sheet's shapes:

* a packed sequence holds the text first, then the sample, then the references: the text is what an axis loses when T is 0, the
  references are what it loses when R is 0;
* where the input is longer than the output on another axis (the channels), its beginning is the sample and the rest is conditioning;
* where the output is longer (a learned variance, padding), its beginning answers for the sample.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from probes.build import Job, symbols
from probes.catalogue import InputSpec, NoiseSchedule
from probes.expressions import evaluate
from probes.step import cross_entropy, predict
from probes.workload import Workload, WorkloadError

TIME_FILLS = ("timestep", "uniform")
FULL_TIME = 1000.0
"""What the models that count time in steps are given at the noisy end."""


def kept_fractions(schedule: NoiseSchedule) -> torch.Tensor:
    """How much of the data's variance is left after each step, float64 [steps]: the cumulative product of 1 - beta.

    ``linear`` betas: Ho et al. 2020; ``scaled_linear``: linear in their square root (Stable Diffusion); ``cosine``: Nichol and
    Dhariwal, arXiv:2102.09672, equation 17 with s = 0.008, kept from 0.0001 to 0.9999.

    Raises:
        WorkloadError: another kind.
    """
    steps = schedule.steps
    match schedule.kind:
        case "linear":
            return torch.cumprod(1 - torch.linspace(schedule.start, schedule.end, steps, dtype=torch.float64), 0)
        case "scaled_linear":
            roots = torch.linspace(schedule.start**0.5, schedule.end**0.5, steps, dtype=torch.float64)
            return torch.cumprod(1 - roots**2, 0)
        case "cosine":
            offset = 0.008
            time = (torch.arange(steps, dtype=torch.float64) + 1) / steps
            curve = torch.cos((time + offset) / (1 + offset) * math.pi / 2) ** 2
            return (curve / math.cos(offset / (1 + offset) * math.pi / 2) ** 2).clamp(0.0001, 0.9999)
    raise WorkloadError(f"unknown noise schedule {schedule.kind!r}; valid: linear, scaled_linear, cosine")


def rearrange(tensor: torch.Tensor, order: str, sizes: Mapping[str, int]) -> torch.Tensor:
    """Splits, permutes and merges axes: ``b c (h p) (w q) -> b c (h w) (p q)`` with sizes p and q; ``1`` adds an axis.

    Raises:
        WorkloadError: the order does not fit the tensor.
    """
    left, _, right = (part.strip() for part in order.partition("->"))
    known: dict[str, int] = {"1": 1, **sizes}
    groups = _groups(left)
    if len(groups) != tensor.ndim:
        raise WorkloadError(f"order {order!r} does not fit a tensor with {tensor.ndim} axes")
    for names, length in zip(groups, tensor.shape, strict=True):
        rest = [name for name in names if name not in known]
        given = math.prod(known[name] for name in names if name in known)
        if len(rest) > 1 or length % given or (not rest and length != given):
            raise WorkloadError(f"order {order!r} does not fit an axis of {length}")
        if rest:
            known[rest[0]] = length // given
    flat = [name for names in groups for name in names]
    wanted = _groups(right)
    split = tensor.reshape([known[name] for name in flat])
    moved = split.permute([flat.index(name) for names in wanted for name in names if name != "1"])
    return moved.reshape([math.prod(known[name] for name in names) for names in wanted])


def _groups(text: str) -> list[list[str]]:
    return [found.strip("()").split() for found in re.findall(r"\([^)]*\)|\S+", text)]


def _part(expressions: Sequence[str], names: Mapping[str, int]) -> list[slice]:
    """Of every axis, what belongs to the sample: not the text before it, not the references after it."""
    found = []
    for text in expressions:
        with_text = evaluate(text, {**names, "R": 0})
        bare = evaluate(text, {**names, "R": 0, "T": 0})
        found.append(slice(with_text - bare, with_text) if bare > 0 else slice(0, evaluate(text, names)))
    return found


def _length(part: slice) -> int:
    return int(part.stop) - int(part.start)


class Objective:
    """The training question of one workload's model.

    Args:
        model: the workload's model; only its config is read.

    Raises:
        WorkloadError: the fact sheet's input and output cannot be put side by side.
    """

    def __init__(self, workload: Workload, model: nn.Module) -> None:
        self.family = family = workload.family
        names = symbols(workload, model)
        skipped = family.variant(workload.variant).skip_inputs
        self.inputs: list[InputSpec] = [s for s in family.inputs if s.name not in skipped and evaluate(s.when, names)]
        self.main = self.inputs[0]
        self.notes: list[str] = []
        if family.objective == "tokens":
            self.ids_shape = [evaluate(e, names) for e in family.output_shape]
            return
        self.times = [s for s in self.inputs[1:] if s.fill in TIME_FILLS]
        main_shape = ((self.main.list_of,) if self.main.list_of else ()) + self.main.shape
        self.sample = _part(main_shape, names)
        self.answer = _part(family.output_shape, names)
        for axis, (expression, part) in enumerate(zip(main_shape, self.sample, strict=True)):
            if _length(part) < (whole := evaluate(expression, names)):
                self.notes.append(
                    f"of {self.main.name}'s {whole} positions on axis {axis}, {part.start} to {part.stop - 1} are the sample"
                )
        if not family.output_order:
            self._match_axes(main_shape, names)
        self.kept = kept_fractions(family.noise) if family.objective in ("epsilon", "velocity") else None

    def _match_axes(self, main_shape: Sequence[str], names: Mapping[str, int]) -> None:
        if len(self.answer) != len(self.sample):
            raise WorkloadError(
                f"{self.family.name} cannot be trained: {self.main.name} has {len(self.sample)} axes and the output "
                f"{len(self.answer)}; its fact sheet needs an `order` in [output]"
            )
        for axis, answer in enumerate(self.answer):
            whole, count = _length(self.sample[axis]), _length(answer)
            if count < whole:
                self.sample[axis] = slice(0, count)
                self.notes.append(
                    f"noise goes to the first {count} of {whole} channels of {self.main.name}; the others are conditioning"
                )
            elif count > whole:
                self.notes.append(f"the loss compares the first {whole} of the model's {count} output channels")

    def loss(self, job: Job, clean: Mapping[str, Any]) -> torch.Tensor:
        """Noises one batch with PyTorch's global generators, asks the model, compares. A float32 scalar with gradient.

        Args:
            clean: the model's inputs with the clean sample in the first one; its times are replaced.

        Raises:
            WorkloadError: the model's answer has not the shape that the fact sheet says.
        """
        if self.family.objective == "tokens":
            return self._token_loss(job, clean)
        given = clean[self.main.name]
        full = torch.stack(list(given)) if isinstance(given, list) else given
        where = tuple(self.sample)
        data = full[where].float()
        noise = torch.randn_like(data)
        own = data.shape[0] if all(s.shape[:1] == ("B",) for s in self.times) else 1
        noisy, wanted, moment = self._noised(data, noise, own)
        mixed = full.clone()
        mixed[where] = noisy.to(full.dtype)
        inputs = dict(clean)
        inputs[self.main.name] = list(mixed) if isinstance(given, list) else mixed
        for spec in self.times:
            like = clean[spec.name]
            value = moment * (FULL_TIME if spec.fill == "timestep" else 1.0)
            inputs[spec.name] = value.reshape(own, *[1] * (like.dim() - 1)).expand(like.shape).to(like.dtype)
        prediction = predict(dataclasses.replace(job, inputs=inputs))
        if self.family.output_order:
            wanted = rearrange(wanted, self.family.output_order, self.family.output_sizes)
        return F.mse_loss(self._answer(prediction, wanted).float(), wanted)

    def _noised(
        self, data: torch.Tensor, noise: torch.Tensor, own: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Noisy sample, wanted answer, and the time that the model is told, 0 to 1, [own]."""
        view = (own, *[1] * (data.dim() - 1))
        family = self.family
        if family.objective == "flow":
            sigma = torch.sigmoid(torch.randn(own, device=data.device))
            noisy = (1 - sigma.view(view)) * data + sigma.view(view) * noise
            turned = family.reversed_flow or family.negated_flow
            return noisy, data - noise if turned else noise - data, 1 - sigma if family.reversed_flow else sigma
        assert self.kept is not None
        steps = len(self.kept)
        step = torch.randint(0, steps, (own,), device=data.device)
        left = self.kept.to(data.device)[step]
        signal, spread = left.sqrt().float().view(view), (1 - left).sqrt().float().view(view)
        wanted = noise if family.objective == "epsilon" else signal * noise - spread * data
        moment = (step + 1) / steps if family.noise.kind == "cosine" else step / FULL_TIME
        return signal * data + spread * noise, wanted, moment

    def _answer(self, prediction: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        if prediction.dim() == wanted.dim():
            part = prediction[tuple(self.answer)]
            part = part[tuple(slice(0, n) for n in wanted.shape)]
            if part.shape == wanted.shape:
                return part
        raise WorkloadError(
            f"{self.family.name} cannot be trained: it answers with {tuple(prediction.shape)} where the sample is "
            f"{tuple(wanted.shape)}"
        )

    def _token_loss(self, job: Job, clean: Mapping[str, Any]) -> torch.Tensor:
        ids = clean[self.main.name]
        following, heads = self.ids_shape[1], self.ids_shape[2]
        counted = next(
            (v for k, v in clean.items() if k != self.main.name and v.shape == ids.shape and v.dtype == torch.bool),
            None,
        )
        logits = predict(dataclasses.replace(job, inputs=dict(clean)))
        wanted = ids[:, -following:, :heads]
        return cross_entropy(logits, wanted, None if counted is None else counted[:, -following:, :heads])
