"""What the models are asked in training: known answers, known values, every family."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from advisor.training import run
from advisor.training.objective import Objective, kept_fractions, rearrange
from estimators.schedule import Backend, Schedule
from probes.build import Job, build_base, make_inputs, real_job
from probes.catalogue import NoiseSchedule, families
from probes.step import cross_entropy
from probes.workload import Workload, WorkloadError, from_request, reduced_copy

Given = dict[str, Any]


class Oracle(nn.Module):
    """Answers what a perfect model would, given that it knows the clean sample."""

    def __init__(self, answer: Callable[[Given], Any]) -> None:
        super().__init__()
        self.answer = answer
        self.asked: Given = {}

    def forward(self, return_dict: bool = False, **inputs: Any) -> tuple[Any]:
        self.asked = inputs
        return (self.answer(inputs),)


def _job(workload: Workload, answer: Callable[[Given], Any]) -> tuple[Objective, Job]:
    with torch.device("meta"):
        model = build_base(workload)
    inputs, target = make_inputs(workload, model, seed=3)
    return Objective(workload, model), Job(Oracle(answer), inputs, target, workload.family.output_stack, None)


def _reduced(model: str, **more: Any) -> Workload:
    return reduced_copy(from_request({"model": model, **more}))


def _view(time: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return time.float().reshape(-1, *[1] * (like.dim() - 1))


def _tokens(image: torch.Tensor) -> torch.Tensor:
    """[B, C, h, w] -> [1, B h w, C]."""
    return image.permute(0, 2, 3, 1).reshape(1, -1, image.shape[1])


def _patches(image: torch.Tensor) -> torch.Tensor:
    """[B, C, h, w] -> [B, C, h w / 4, 4]."""
    b, c, h, w = image.shape
    return image.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 1, 2, 4, 3, 5).reshape(b, c, h * w // 4, 4)


# family, its first argument and its time, sigma from that time, sign of the answer (1: noise - data), the answer's form
FLOW: list[tuple[str, dict[str, Any], str, str, Callable[[Any], Any], int, Callable[[Any], Any]]] = [
    ("sd3", {"batch": 2}, "hidden_states", "timestep", lambda t: t / 1000, 1, lambda v: v),
    ("flux", {"batch": 2}, "hidden_states", "timestep", lambda t: t, 1, lambda v: v),
    ("lumina2", {"batch": 2}, "hidden_states", "timestep", lambda t: 1 - t, -1, lambda v: v),
    ("z_image", {"batch": 2}, "x", "t", lambda t: 1 - t, -1, list),
    ("hidream", {"batch": 2}, "hidden_states", "timesteps", lambda t: t / 1000, -1, _patches),
    ("mageflow", {"batch": 2}, "img", "timesteps", lambda t: t, 1, _tokens),
    ("wan", {"batch": 2}, "hidden_states", "timestep", lambda t: t / 1000, 1, lambda v: v),
    ("minimaxh3", {}, "hidden_states", "timestep", lambda t: 1 - t, -1, lambda v: v),
    ("cosmos3", {}, "vision_tokens", "vision_timesteps", lambda t: t[:1] / 1000, 1, list),
]


@pytest.mark.parametrize("row", FLOW, ids=lambda row: row[0])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_model_that_knows_the_velocity_has_no_loss_and_its_opposite_has_much(row: Any, sign: int) -> None:
    name, more, main, time, to_sigma, direction, form = row

    def answer(given: Given) -> Any:
        noisy = torch.stack(given[main]) if isinstance(given[main], list) else given[main]
        return form(sign * direction * (noisy - clean) / _view(to_sigma(given[time]), noisy))

    objective, job = _job(_reduced(name, **more), answer)
    clean = torch.stack(job.inputs[main]) if isinstance(job.inputs[main], list) else job.inputs[main].clone()
    torch.manual_seed(1)
    loss = float(objective.loss(job, job.inputs))
    assert loss == pytest.approx(0, abs=1e-5) if sign == 1 else loss > 4


def test_conditioning_channels_get_no_noise() -> None:
    def answer(given: Given) -> torch.Tensor:
        noisy = given["hidden_states"]
        assert torch.equal(noisy[:, 32:], clean[:, 32:])
        assert not torch.equal(noisy[:, :32], clean[:, :32])
        return (noisy[:, :32] - clean[:, :32]) / _view(given["timestep"] / 1000, noisy)

    objective, job = _job(_reduced("hunyuanvideo"), answer)
    clean = job.inputs["hidden_states"].clone()
    assert clean.shape[1] == 65
    assert float(objective.loss(job, job.inputs)) == pytest.approx(0, abs=1e-5)
    assert any("first 32 of 65 channels" in note for note in objective.notes)


def test_conditioning_channels_that_come_last_get_no_noise() -> None:
    def answer(given: Given) -> torch.Tensor:
        noisy = given["hidden_states"]
        assert torch.equal(noisy[..., 16:], clean[..., 16:])
        return (noisy[..., :16] - clean[..., :16]) / _view(given["timestep"] / 1000, noisy)

    objective, job = _job(_reduced("kandinsky5_video"), answer)
    clean = job.inputs["hidden_states"].clone()
    assert clean.shape[-1] == 33
    assert float(objective.loss(job, job.inputs)) == pytest.approx(0, abs=1e-5)


def test_text_positions_of_a_packed_sequence_get_no_noise_and_no_loss() -> None:
    def answer(given: Given) -> torch.Tensor:
        noisy = given["hidden_states"]
        assert torch.equal(noisy[:, :32], clean[:, :32])
        out = (clean - noisy) / _view(1 - given["timestep"], noisy)
        out[:, :32] = 1e6
        return out

    objective, job = _job(_reduced("ideogram"), answer)
    clean = job.inputs["hidden_states"].clone()
    assert clean.shape[1] == 32 + 256
    assert float(objective.loss(job, job.inputs)) == pytest.approx(0, abs=1e-5)


def test_reference_images_get_no_noise_and_no_loss() -> None:
    def answer(given: Given) -> torch.Tensor:
        noisy = given["hidden_states"]
        assert torch.equal(noisy[:, 256:], clean[:, 256:])
        out = (noisy - clean) / _view(given["timestep"], noisy)
        out[:, 256:] = 1e6
        return out

    objective, job = _job(_reduced("flux", variant="kontext"), answer)
    clean = job.inputs["hidden_states"].clone()
    assert clean.shape[1] == 512
    assert float(objective.loss(job, job.inputs)) == pytest.approx(0, abs=1e-5)


def test_all_times_that_a_model_takes_are_the_same_time() -> None:
    objective, job = _job(_reduced("ltxvideo2"), lambda given: torch.zeros_like(given["hidden_states"]))
    objective.loss(job, job.inputs)
    asked = job.model.asked
    assert torch.allclose(asked["timestep"], 1000 * asked["sigma"])


def _kept(name: str, given: Given, noisy: torch.Tensor) -> torch.Tensor:
    """Variance of the data that is left at the time that the model was told, by diffusers' schedulers."""
    from diffusers import DDPMScheduler, DDPMWuerstchenScheduler

    if name == "stable_cascade":
        time = given["timestep_ratio"]
        return _view(DDPMWuerstchenScheduler()._alpha_cumprod(time, time.device), noisy)
    linear = name == "pixart"
    scheduler = DDPMScheduler(
        beta_schedule="linear" if linear else "scaled_linear",
        beta_start=0.0001 if linear else 0.00085,
        beta_end=0.02 if linear else 0.014 if name == "kolors" else 0.012,
        num_train_timesteps=1100 if name == "kolors" else 1000,
    )
    return _view(scheduler.alphas_cumprod[given["timestep"].long()], noisy)


@pytest.mark.parametrize(
    ("name", "main"),
    [("sdxl", "sample"), ("sd1x", "sample"), ("kolors", "sample"), ("pixart", "hidden_states"), ("stable_cascade", "sample")],
)  # fmt: skip
def test_a_model_that_knows_the_noise_has_no_loss(name: str, main: str) -> None:
    def answer(given: Given) -> torch.Tensor:
        noisy = given[main]
        kept = _kept(name, given, noisy)
        noise = (noisy - kept.sqrt() * clean) / (1 - kept).sqrt()
        return torch.cat([noise, 1e6 * torch.ones_like(noise)], 1) if name == "pixart" else noise

    objective, job = _job(_reduced(name, batch=2), answer)
    clean = job.inputs[main].clone()
    torch.manual_seed(2)
    assert float(objective.loss(job, job.inputs)) == pytest.approx(0, abs=1e-3)


def test_velocity_is_what_diffusers_schedulers_call_velocity(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers import DDPMScheduler

    workload = _reduced("sd2x", batch=2)
    family = dataclasses.replace(workload.family, objective="velocity")
    monkeypatch.setattr(Workload, "family", property(lambda _: family))
    scheduler = DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)

    def answer(given: Given) -> torch.Tensor:
        noisy, step = given["sample"], given["timestep"].long()
        kept = _view(scheduler.alphas_cumprod[step], noisy)
        noise = (noisy - kept.sqrt() * clean) / (1 - kept).sqrt()
        return scheduler.get_velocity(clean, noise, step)

    objective, job = _job(workload, answer)
    clean = job.inputs["sample"].clone()
    assert float(objective.loss(job, job.inputs)) == pytest.approx(0, abs=1e-4)


def test_noise_schedules_have_the_published_values() -> None:
    assert float(kept_fractions(NoiseSchedule())[-1]) == pytest.approx(0.004660, rel=1e-3)
    assert float(kept_fractions(NoiseSchedule("linear", 0.0001, 0.02))[-1]) == pytest.approx(4.0358e-5, rel=1e-3)
    assert float(kept_fractions(NoiseSchedule("linear", 0.0001, 0.02))[0]) == pytest.approx(0.9999)
    with pytest.raises(WorkloadError, match="unknown noise schedule 'sigmoid'"):
        kept_fractions(NoiseSchedule("sigmoid"))


def test_flow_times_are_logit_normal() -> None:
    objective, _ = _job(_reduced("sd3"), lambda given: given["hidden_states"])
    torch.manual_seed(0)
    n = 20_000
    _, _, sigma = objective._noised(torch.zeros(n, 1), torch.zeros(n, 1), n)
    logit = torch.log(sigma / (1 - sigma))
    assert float(logit.mean()) == pytest.approx(0, abs=0.03)
    assert float(logit.std()) == pytest.approx(1, abs=0.03)


def test_cross_entropy_of_uniform_logits_is_the_logarithm_of_the_vocabulary_and_masks_count() -> None:
    logits = [torch.zeros(1, 3, 1, 10), torch.zeros(1, 3, 2, 10)]
    ids = torch.zeros(1, 3, 3, dtype=torch.int64)
    assert float(cross_entropy(logits, ids)) == pytest.approx(math.log(10))
    logits[0][0, 0, 0, 0] = 1000.0  # certain and right
    counted = torch.zeros(1, 3, 3, dtype=torch.bool)
    counted[0, 0, 0] = True
    assert float(cross_entropy(logits, ids, counted)) == 0
    counted[0, 2, 2] = True
    assert float(cross_entropy(logits, ids, counted)) == pytest.approx(math.log(10) / 2)
    assert float(cross_entropy(logits, ids, torch.zeros_like(counted))) == 0


def test_token_models_are_asked_for_the_ids_that_come_next() -> None:
    def answer(given: Given) -> tuple[torch.Tensor, ...]:
        wanted = given["tokens"][:, 1:, :4]
        logits = 1000.0 * nn.functional.one_hot(wanted, 67).float()
        return (logits[:, :, :1], logits[:, :, 1:])

    objective, job = _job(_reduced("heartmula"), answer)
    assert float(objective.loss(job, job.inputs)) == 0


def test_rearranging_is_what_hidream_does_to_its_own_output() -> None:
    model: Any = real_job(_reduced("hidream")).model
    tokens = torch.randn(2, 16, 2 * 2 * 16)
    image = model.unpatchify(tokens, [(4, 4), (4, 4)], False)
    family = families()["hidream"]
    assert torch.equal(
        rearrange(image, family.output_order, family.output_sizes), model.unpatchify(tokens, [(4, 4)] * 2, True)
    )


@pytest.mark.parametrize("order", ["a b -> b a", "a b (c d) -> a b c d", "a b (c 7) -> a b c 7"])
def test_an_order_that_does_not_fit_is_refused(order: str) -> None:
    with pytest.raises(WorkloadError, match="does not fit"):
        rearrange(torch.zeros(2, 3, 4), order, {"7": 7})


def test_an_answer_of_another_shape_is_refused() -> None:
    objective, job = _job(_reduced("sd3"), lambda given: given["hidden_states"][:, :8])
    with pytest.raises(WorkloadError, match=r"answers with \(1, 8, 32, 32\) where the sample is \(1, 16, 32, 32\)"):
        objective.loss(job, job.inputs)


HANDFUL = (
    *("cosmos3", "flux", "heartmula", "hidream", "hunyuanvideo", "ideogram", "kandinsky5_video", "mageflow"),
    *("pixart", "sdxl", "stable_cascade", "wan", "z_image"),
)


def _trains(name: str, variant: str | None = None) -> None:
    plan = SimpleNamespace(
        workload=from_request({"model": name, "variant": variant, "lora_dropout": 0.0}),
        schedule=Schedule(backend=Backend.TORCH),
    )
    result = run(plan, steps=3, device="cpu", lr=1e-3)
    assert all(math.isfinite(loss) for loss in result.losses)
    assert result.schedule == "torch"


@pytest.mark.parametrize("name", HANDFUL)
def test_a_family_trains(name: str) -> None:
    _trains(name)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant"), [(f.name, v) for f in families().values() for v in f.variants])
def test_every_variant_of_every_family_trains(name: str, variant: str) -> None:
    _trains(name, variant)
