"""A job that is built directly on a device is the job that is built in float32 on the host."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from probes.build import build_base, device_job, inject_adapter, make_inputs
from probes.catalogue import families
from probes.step import forward_loss, predict
from probes.workload import from_request, reduced_copy

# families whose classes compute tables when they are constructed: as buffers, or as tensors that are neither buffer nor parameter
WITH_TABLES = ("kandinsky5_image", "kandinsky5_video", "lumina2", "qwen_image", "sd3", "wan", "cosmos3", "pixart")


def _compare(name: str, **more: Any) -> None:
    workload = reduced_copy(from_request({"model": name, "lora_dropout": 0.0, **more}))
    torch.manual_seed(3)
    base: Any = build_base(workload)
    with torch.no_grad():
        for p in base.parameters():
            p.normal_(std=0.05)
    state = {k: v.clone() for k, v in base.state_dict().items()}
    job = device_job(workload, "cpu", seed=1, state=state)
    inject_adapter(base, workload)
    with torch.no_grad():
        for n, p in job.trainable():
            base.get_parameter(n).copy_(p)
    inputs, _ = make_inputs(workload, base, seed=1)
    base.train()
    torch.manual_seed(0)
    wanted = base(**inputs, return_dict=False)
    torch.manual_seed(0)
    found = predict(job)
    wanted = wanted if isinstance(wanted, torch.Tensor) else wanted[0]
    wanted = torch.stack(list(wanted)) if job.output_stack else wanted
    pairs = zip(wanted, found, strict=True) if isinstance(wanted, tuple) else [(wanted, found)]
    for a, b in pairs:
        assert a.isfinite().all()
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", WITH_TABLES)
def test_the_output_is_that_of_the_same_weights_on_the_host(name: str) -> None:
    _compare(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in families() if n not in WITH_TABLES])
def test_every_familys_output_is_that_of_the_same_weights_on_the_host(name: str) -> None:
    _compare(name)


@pytest.mark.parametrize("more", [{"adapter": "lokr"}, {"adapter": "loha"}, {"dora": True}], ids=str)
def test_every_adapter_works_in_it_as_in_one_from_the_host(more: dict[str, Any]) -> None:
    _compare("sd3", **more)


@pytest.mark.parametrize(("master", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_master_weights_are_float32_under_autocast(master: bool, dtype: torch.dtype) -> None:
    asked = from_request({"model": "sd3", "adapter": "full", "optimizer": "adamw", "master_weights": master})
    job = device_job(dataclasses.replace(reduced_copy(asked), precision="bf16"), "cpu")
    assert {p.dtype for _, p in job.trainable()} == {dtype}
    assert job.autocast is torch.bfloat16
    forward_loss(job).backward()
    assert {p.grad.dtype for _, p in job.trainable() if p.grad is not None} == {dtype}
