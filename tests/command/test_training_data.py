"""`advise run` refuses cached latents that would train on nonsense, before and while it runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from advisor.training import run
from estimators.schedule import Schedule
from probes.workload import WorkloadError, from_request

PLAN = SimpleNamespace(workload=from_request({"model": "wan"}), schedule=Schedule())


def test_a_folder_without_files_is_refused_before_a_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("advisor.training.real_job", lambda *a, **k: pytest.fail("built a model"))
    with pytest.raises(WorkloadError, match="no safetensors files"):
        run(PLAN, steps=1, latents=tmp_path)


def test_values_that_are_not_finite_are_refused_and_nothing_is_saved(tmp_path: Path) -> None:
    save_file({"hidden_states": torch.full((16, 3, 16, 16), torch.nan)}, str(tmp_path / "a.safetensors"))
    with pytest.raises(WorkloadError, match=r"a\.safetensors: hidden_states holds values that are not finite"):
        run(PLAN, steps=1, latents=tmp_path, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_cached_latents_train_and_the_lora_is_saved(tmp_path: Path) -> None:
    save_file({"hidden_states": torch.randn(16, 3, 16, 16)}, str(tmp_path / "a.safetensors"))
    result = run(PLAN, steps=2, latents=tmp_path, output=tmp_path / "out", seed=1)
    assert len(result.losses) == 2
    assert (tmp_path / "out" / "pytorch_lora_weights.safetensors").stat().st_size > 0
