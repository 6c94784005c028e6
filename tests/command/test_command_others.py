"""models, gpus, probe, verify, run, --version."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_helpers import SMALL, Done

import advisor
from estimators import devices
from probes import catalogue

Advise = Callable[..., Done]


def test_version(advise: Advise) -> None:
    done = advise("--version")
    assert done.status == 0
    assert done.out.startswith("advise 0.")


def test_models_as_json_holds_name_variants_aliases_kind(advise: Advise) -> None:
    found = json.loads(advise("models", "--json").out)
    assert {m["name"] for m in found} == set(catalogue.families())
    assert all(
        m["kind"] in ("image", "video", "audio") and m["variants"] and isinstance(m["aliases"], list) for m in found
    )


@pytest.mark.parametrize("name", list(catalogue.families()))
def test_one_model_in_detail(advise: Advise, name: str) -> None:
    family = catalogue.families()[name]
    done = advise("models", name.upper())
    assert done.status == 0
    for text in (
        family.title,
        *family.variants,
        *family.of(None).lora_targets,
        "simpletuner",
        "diffusers",
    ):
        assert text in done.out
    found = json.loads(advise("models", name, "--json").out)
    assert found["name"] == name
    assert set(found["executors"]) == {"bundled", "simpletuner", "diffusers"}
    assert [v["name"] for v in found["variant_details"]] == list(family.variants)


def test_every_model_and_card_is_in_its_table(advise: Advise) -> None:
    text = advise("models").out
    assert all(name in text for name in catalogue.families())
    done = advise("gpus")
    assert all(card.name in done.out for card in devices.gpus())
    assert "GiB" in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    assert [g["name"] for g in json.loads(advise("gpus", "--json").out)] == [card.name for card in devices.gpus()]


def test_probe_says_what_was_found_and_where_it_is(advise: Advise, cache: Path) -> None:
    done = advise("probe", *SMALL)
    assert done.status == 0
    assert "the profile is traced, not measured" in done.err
    assert "tracing" not in done.err.splitlines()[-1] or len(done.err.splitlines()) == 1
    for text in (
        "traced",
        "parameters",
        "6,154,908,736 base",
        "layers",
        "noise_refiner",
        "ZImageTransformerBlock",
        "linked",
        "kernels",
    ):
        assert text in done.out
    stored = [p for p in cache.iterdir() if p.suffix == ".npz"]
    assert any(str(p) in done.out.replace("\n", "").replace(" ", "") for p in stored)


def test_probe_says_which_options_do_nothing(advise: Advise) -> None:
    assert "--lokr-factor has no effect with --adapter lora" in advise("probe", *SMALL, "--lokr-factor", "4").flat


def test_probe_with_refresh_makes_the_profile_again(
    advise: Advise, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from probes import store

    path = next(p for p in cache.iterdir() if p.suffix == ".npz")
    made = []
    monkeypatch.setattr(
        "probes.traced.trace", lambda *_: made.append(1) or store.from_bytes(path.read_bytes(), path.stem)
    )
    monkeypatch.setenv("ADVISE_CACHE_DIR", str(tmp_path))  # what is stored is not what the other tests' cache says
    assert advise("probe", *SMALL, "--refresh").status == 0
    assert advise("probe", *SMALL).status == 0
    assert made == [1]


def test_probe_measures_where_there_is_a_gpu(
    advise: Advise, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import dataclasses

    from probes import store

    path = next(p for p in cache.iterdir() if p.suffix == ".npz")
    profile = dataclasses.replace(
        store.from_bytes(path.read_bytes(), path.stem),
        source="measured",
        measured={"ABlock": {"forward_seconds": 0.25}},
    )
    fake = types.ModuleType("probes.measured")
    fake.measure = lambda workload, device: profile  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "probes.measured", fake)
    monkeypatch.setattr("probes.measured", fake, raising=False)
    monkeypatch.setattr("advisor.present.detect_gpu", lambda: devices.find_gpu("H200"))
    monkeypatch.setenv("ADVISE_CACHE_DIR", str(tmp_path))
    done = advise("probe", *SMALL)
    assert done.status == 0
    assert "measuring z_image" in done.err
    assert "profile" in done.out
    assert "measured, for cuda" in done.out
    assert "ABlock: forward_seconds 0.25" in done.out


class FakeReceipt:
    def __init__(self, within: bool) -> None:
        self.within_band = within

    def to_json(self) -> dict[str, Any]:
        return {"within_band": self.within_band}

    def lines(self) -> list[str]:
        return ["predicted 1.0 GiB", "measured 1.1 GiB [/not markup]"]


@pytest.fixture
def plan(plan_text: str, tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    path.write_text(plan_text)
    return str(path)


@pytest.mark.parametrize("within", [True, False])
def test_verify_exits_with_1_outside_the_band(
    advise: Advise, plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: bool
) -> None:
    asked: dict[str, Any] = {}

    def verify(loaded: Any, **more: Any) -> FakeReceipt:
        asked.update(more, model=loaded.workload.model)
        more["progress"]("step 1 of 3")
        return FakeReceipt(within)

    monkeypatch.setattr(advisor, "verification", types.SimpleNamespace(verify=verify), raising=False)
    receipt = tmp_path / "receipt.json"
    done = advise("verify", plan, "--steps", "3", "--device", "cpu", "--receipt", str(receipt))
    assert done.status == (0 if within else 1)
    assert "measured 1.1 GiB [/not markup]" in done.out
    assert done.err == "step 1 of 3\n"
    assert json.loads(receipt.read_text()) == {"within_band": within}
    assert (asked["model"], asked["steps"], asked["device"], asked["pretrained"]) == ("z_image", 3, "cpu", None)
    assert json.loads(advise("verify", plan, "--json").out) == {"within_band": within}


def test_verify_refuses_to_replace_its_plan_and_a_gpu_that_is_not_there(advise: Advise, plan: str) -> None:
    assert "is the plan itself" in advise("verify", plan, "--receipt", plan).error
    assert "--device cuda: this machine has no CUDA GPU" in advise("verify", plan, "--device", "cuda").error


def test_run_hands_over_what_was_asked_and_reports(
    advise: Advise, plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    result = {
        "workload": {"model": "z_image", "variant": "turbo", "resolution": "256x256", "batch": 1},
        "reduced_copy": True,
        "schedule": "torch",
        "first_step": 11,
        "steps": 20,
        "losses": [2.0, 1.0],
        "lr": 0.001,
        "seed": 7,
        "accumulate": 4,
        "seconds_per_step": 0.5,
        "saved": None,
        "checkpoint": "/some/checkpoint",
        "metrics": None,
        "notes": ["synthetic data"],
    }

    def run(
        loaded: Any, *, on_step: Callable[[int, float, float], None], say: Any, interruption: Any, **more: Any
    ) -> Any:
        asked.update(more)
        for step in range(1, 21):
            on_step(step, 2.0 / step, 0.5)
        return types.SimpleNamespace(to_json=lambda: result)

    monkeypatch.setattr(advisor, "training", types.SimpleNamespace(run=run), raising=False)
    done = advise(
        *("run", plan, "--steps", "20", "--seed", "7", "--latents", str(tmp_path), "--output", str(tmp_path / "out")),
        *("--lr", "1e-3", "--accumulate", "4", "--checkpoint-every", "5", "--resume", "--pretrained", "some/model"),
        *("--metrics", str(tmp_path / "metrics.jsonl")),
    )
    assert done.status == 0
    assert asked == {
        "steps": 20,
        "seed": 7,
        "latents": tmp_path,
        "output": tmp_path / "out",
        "lr": 0.001,
        "accumulate": 4,
        "checkpoint_every": 5,
        "resume": True,
        "pretrained": "some/model",
        "metrics": tmp_path / "metrics.jsonl",
        "device": "auto",
    }
    assert len(done.err.splitlines()) == 10
    assert "step 20 of 20: loss 0.1, 0.5 s" in done.err
    assert "2 at first, 1 at last" in done.out
    assert "11 to 20" in done.out
    assert "learning rate 0.001, 4 batches a step, seed 7" in done.out
    assert "/some/checkpoint" in done.out
    assert "note: synthetic data" in done.out
    assert json.loads(advise("run", plan, "--json").out) == result


def test_ctrl_c_in_a_run_is_one_line(advise: Advise, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(advisor, "training", types.SimpleNamespace(run=run, OutOfMemory=ValueError), raising=False)
    done = advise("run", plan)
    assert done.status == 130
    assert done.error == "interrupted"


def test_a_model_says_what_each_executor_makes_of_the_controls(advise: Advise) -> None:
    text = advise("models", "flux").flat
    for words in (
        "executor bundled: - interval k puts k consecutive blocks into one checkpoint",
        "block by block every k-th block, stride ignored, instead of segments, with: feed-forward backend, TREAD routing",
        "interval: every k-th, stride ignored",
        "attention offload yes: attention module with its q, k, v and output projections",
        "executor diffusers: - interval none: every block or nothing",
    ):
        assert words in text
    assert "executor simpletuner: - interval no checkpointing at all" in advise("models", "heartmula").flat


def test_a_variant_that_the_trainer_treats_in_another_way_is_shown_apart(advise: Advise) -> None:
    assert "Checkpointing of v2.1, executor simpletuner" in advise("models", "qwen_image").flat
    found = json.loads(advise("models", "qwen_image", "--json").out)
    assert found["executors"]["simpletuner"]["interval"] == "every-kth"
    assert list(found["variant_executors"]) == ["v2.1"]
    newer = found["variant_executors"]["v2.1"]["simpletuner"]
    assert newer["interval"] == "segments"
    assert newer["per_block_when"] == ["block swapping", "hidden-state capture", "a KV cache"]
