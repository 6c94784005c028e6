"""Receipts of `advise verify` as `advise calibrate` reads them: data that comes back exactly, or is left aside with a reason."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_helpers import Done

from advisor import calibrating
from advisor.api import Session
from advisor.plan_files import workload_of
from advisor.verification import verify
from estimators.schedule import Schedule
from probes import outside
from probes.workload import from_request, reduced_copy

Advise = Callable[..., Done]
SHEET_OF = outside.sheet_of


@pytest.fixture(scope="module")
def receipt() -> dict[str, Any]:
    """A real run of a per-block schedule on the CPU, its copy and device relabelled as if a card had run it."""
    plan = SimpleNamespace(
        workload=from_request({"model": "sd3", "optimizer": "sgd"}),
        schedule=Schedule.per_block(["recompute"] * 12 + ["keep"] * 12),
    )
    made = json.loads(json.dumps(verify(plan, steps=1, device="cpu").to_json()))
    assert made["reduced_copy"] is True
    return {**made, "reduced_copy": False, "device": "RTX 4090"}


@pytest.fixture(autouse=True)
def no_code(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("ADVISE_CACHE_DIR", str(cache))
    monkeypatch.setattr("probes.outside.allow", lambda _: pytest.fail("a receipt allowed an import"))
    monkeypatch.setattr("probes.outside.sheet_of", lambda _: pytest.fail("a receipt asked for a sheet"))


def write(folder: Path, content: Any, name: str = "receipt.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_what_verify_writes_is_a_case(receipt: dict[str, Any], tmp_path: Path) -> None:
    case = calibrating.receipt_case(write(tmp_path, receipt), Session())
    assert (case.family, case.gpu, case.own) == ("receipt sd3", "RTX 4090", True)
    assert case.measured_peak == receipt["measured"]["peak_gib"] * 2**30
    assert case.measured_seconds == receipt["measured"]["step_seconds"]
    assert case.peak > 0
    assert receipt["controls"] is None
    assert set(receipt["actions"]) == {"recompute", "keep"}


@pytest.mark.parametrize(
    "request_",
    [
        {"model": "flux", "buckets": ["832x1216", "1024x1024"], "lora_targets": ["to_q"], "cfg_batch": True},
        {"model": "wan", "frames": 33, "text_padding": "longest", "caption_tokens": 77},
        {"model": "ace_step", "seconds": 30},
        {"model": "sdxl", "resolution": "768x1024", "adapter": "lokr", "lokr_factor": 8},
    ],
)
@pytest.mark.parametrize("small", [False, True])
def test_every_kind_of_workload_comes_back(request_: dict[str, Any], small: bool) -> None:
    workload = from_request(request_)
    workload = reduced_copy(workload) if small else workload
    assert workload_of(json.loads(json.dumps(workload.describe())), "r.json", "receipt", "verify again") == workload


def changed(receipt: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(receipt))
    *outer, key = path.split(".")
    inner = copy
    for part in outer:
        inner = inner[part]
    inner[key] = value
    return copy


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("workload.model", "sd33", "unknown model 'sd33'"),
        ("workload.variant", "huge", "has no variant 'huge'"),
        ("workload.model", "someone/model", "is not in the catalogue and it holds no sheet"),
        ("workload.model_class", "evil:Model", "not in the catalogue and it holds no sheet"),
        ("workload", None, "workload must be a JSON object"),
        ("workload.batch", True, "--batch"),
        ("device", "GeForce 256", "unknown GPU"),
        ("device", "CPU (x86_64)", "on the CPU"),
        ("device", 3, "incomplete"),
        ("reduced_copy", True, "reduced copy"),
        ("receipt_format", True, "not a receipt"),
        ("actions", ["keep"], "one action for each of the model's"),
        ("actions", "keep", "no list of texts"),
        ("actions", ["burn"], "valid actions"),
        ("measured.peak_gib", True, "not positive numbers"),
        ("measured.step_seconds", -1.0, "not positive numbers"),
        ("measured", {"peak_gib": None, "step_seconds": None}, "neither a peak nor a step time"),
        ("measured", {}, "incomplete"),
    ],
)
def test_what_cannot_be_used_is_left_aside_with_its_name(
    receipt: dict[str, Any], tmp_path: Path, path: str, value: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrating, "published_cases", lambda _: [])
    monkeypatch.setattr(calibrating.fitting, "calibrate", lambda *_: None)
    write(tmp_path, receipt, "good.json")
    write(tmp_path, changed(receipt, path, value), "bad.json")
    found = calibrating.calibrate(tmp_path, save=False)
    assert found.receipts == 1
    (aside,) = found.left_aside
    assert aside.startswith("bad.json: ")
    assert aside.count("bad.json") == 1
    assert reason in aside
    assert "\n" not in aside


def test_a_sheet_of_ones_own_class_is_not_imported(tmp_path: Path, receipt: dict[str, Any]) -> None:
    config = {"_class_name": "SD3Transformer2DModel", "num_layers": 2, "num_attention_heads": 2, "sample_size": 32}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(config))
    sheet = SHEET_OF({"model": str(tmp_path / "mine")})
    workload = from_request({}, sheet=sheet)
    content = workload.describe()
    assert workload_of(content, "r.json", "receipt", "verify again") == workload
    own = changed({**receipt, "workload": content}, "workload.sheet.class", "evil:Model")
    with pytest.raises(calibrating.ReceiptError, match=r"evil:Model, and importing that would run its code"):
        calibrating.receipt_case(write(tmp_path, own), Session())


def test_what_is_no_regular_file_is_not_read(advise: Advise, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    done = advise("calibrate", str(tmp_path), "--dry-run")
    assert done.status == 2
    assert "no usable receipt in it (pipe.json: not a regular file)" in done.error
    assert "neither a folder nor a regular file" in advise("calibrate", str(tmp_path / "pipe.json")).error


@pytest.mark.parametrize(
    ("args", "kind"),
    [(("calibrate", "--output"), "a calibration"), (("verify", "plan.json", "--receipt"), "a receipt")],
)
def test_files_of_another_kind_are_not_replaced(
    advise: Advise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan_text: str, args: tuple[str, ...], kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, plan_text, "plan.json")
    for text in ('{"my": "notes"}', "echo kept\n", "[1]", "[" * 100_000):
        other = write(tmp_path, text, "other.json")
        assert (
            f"other.json: the file holds something else and would be replaced by {kind}"
            in advise(*args, "other.json").error
        )
        assert other.read_text() == text
