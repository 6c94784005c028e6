"""Plan files: what is written is read back; whatever else a file holds is one clear error."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_helpers import SMALL, Done
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from advisor import plan_files
from advisor.api import PLAN_FORMAT, PlanError
from decision_rules.support import Executor
from estimators.devices import DeviceKind
from estimators.schedule import Backend
from probes.workload import from_request, reduced_copy

Advise = Callable[..., Done]


@pytest.fixture
def plan(plan_text: str, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(plan_text)
    return path


@pytest.fixture
def content(plan_text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan_text)
    return found


def test_the_command_writes_a_plan_that_reads_back(advise: Advise, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert advise(*SMALL, "--gpu", "4090", "--plan", str(path)).status == 0
    assert plan_files.load(path).device_name == "RTX 4090"


def test_a_byte_order_mark_is_no_damage(plan: Path) -> None:
    plan.write_bytes(b"\xef\xbb\xbf" + plan.read_bytes())
    assert plan_files.load(plan).device_name == "14 GiB card"


def test_a_plan_comes_back_as_it_was_made(plan: Path, content: dict[str, Any]) -> None:
    loaded = plan_files.load(plan)
    assert loaded.workload == from_request({"model": "z_image", "resolution": 256, "caption_tokens": 32, "rank": 4})
    assert loaded.device_name == "14 GiB card"
    assert loaded.device_kind is DeviceKind.CUDA
    assert loaded.usable_bytes / 2**30 == pytest.approx(content["device"]["usable_gib"])
    assert loaded.executor is Executor.SIMPLETUNER
    assert loaded.schedule.name == content["recommended"]["name"]
    assert loaded.recommended.to_json() == {
        k: content["recommended"][k] if k not in ("recompute_seconds", "copy_seconds", "launch_bound") else v
        for k, v in loaded.recommended.to_json().items()
    }
    assert loaded.versions == content["versions"]
    assert loaded.profile_source == "traced"


def test_a_reduced_copys_workload_comes_back(content: dict[str, Any], tmp_path: Path) -> None:
    reduced = reduced_copy(from_request({"model": "z_image", "rank": 64}))
    content["workload"] = reduced.describe()
    assert plan_files.load(_save(content, tmp_path)).workload == reduced


def _save(content: Any, folder: Path) -> Path:
    path = folder / "changed.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def _refused(path: Path, *parts: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan_files.load(path)
    text = str(caught.value)
    assert "\n" not in text
    for part in (str(path), *parts):
        assert part in text


def test_files_that_are_no_plans(tmp_path: Path, content: dict[str, Any]) -> None:
    _refused(tmp_path / "missing.json", "no such file")
    _refused(tmp_path, "not a file")
    _refused(_save("", tmp_path), "not complete JSON")
    _refused(_save("hello", tmp_path), "not complete JSON")
    _refused(_save("[1]", tmp_path), "a plan is a JSON object")
    _refused(_save("{}", tmp_path), "no plan_format")
    _refused(_save("[" * 200_000, tmp_path), "not a JSON text")
    (tmp_path / "binary.json").write_bytes(b"\xff\x00\x01")
    _refused(tmp_path / "binary.json", "not a JSON text")
    with open(tmp_path / "huge.json", "wb") as file:
        file.truncate(plan_files.MAX_BYTES + 1)
    _refused(tmp_path / "huge.json", "too large")


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_a_truncated_plan_says_where_it_ends(plan: Path, share: float) -> None:
    text = plan.read_text()
    plan.write_text(text[: int(len(text) * share)])
    _refused(plan, "not complete JSON", "line", "make it again")


@pytest.mark.parametrize("found", [PLAN_FORMAT + 1, 0, "1", None, True, [1], float(PLAN_FORMAT)])
def test_a_plan_of_another_format_names_both(content: dict[str, Any], tmp_path: Path, found: Any) -> None:
    content["plan_format"] = found
    _refused(_save(content, tmp_path), f"plan format {found!r}", f"reads format {PLAN_FORMAT}", "made by version")


DAMAGE: list[tuple[tuple[str, ...], Any, str]] = [
    (("workload", "model"), "fluxx", "unknown model 'fluxx'"),
    (("workload", "model"), 3, "'workload.model' must be text"),
    (("workload", "variant"), "none-such", "has no variant"),
    (("workload", "precision"), "bf17", "--precision 'bf17'"),
    (("workload", "batch"), 0, "--batch"),
    (("workload", "batch"), "1", "--batch"),
    (("workload", "height"), 255, "--resolution"),
    (("workload", "lora_targets"), "to_q", "--lora-targets"),
    (("workload", "text_tokens"), 77, "text_tokens 77"),
    (("workload", "reduced"), "no", "'workload.reduced' must be true or false"),
    (("workload", "reduced"), True, "this version has"),
    (("workload", "surprise"), 1, "'workload.surprise' is not known"),
    (("workload",), [], "workload must be a JSON object"),
    (("device",), None, "device must be a JSON object"),
    (("device", "name"), 4090, "'device.name' must be text"),
    (("device", "usable_gib"), "24", "'device.usable_gib' must be a number"),
    (("device", "usable_gib"), -1, "'device.usable_gib' must be a number"),
    (("device", "kind"), "tpu", "'device.kind' is 'tpu'"),
    (("executor",), "kohya", "'executor' is 'kohya'"),
    (("objective",), 5, "'objective' must be text"),
    (("profile",), "guessed", "'profile' is 'guessed'"),
    (("recommended",), None, "nothing fits in this plan"),
    (("recommended",), "torch", "recommended must be a JSON object"),
    (("recommended", "controls"), None, "recommended.controls must be a JSON object"),
    (("recommended", "controls"), {"gradient_checkpointing": "yes"}, "the plan's schedule is not valid"),
    (("recommended", "controls"), {"__import__('os').system('false')": 1}, "unknown schedule control"),
    (("recommended", "controls"), {"gradient_checkpointing": True, "gradient_checkpointing_backend": []}, "not valid"),
    (("recommended", "controls"), {"actions": "keep"}, "must be a list"),
    (("recommended", "controls"), {"actions": ["keep", "burn"]}, "valid actions"),
    (("recommended", "peak_gib"), None, "'recommended.peak_gib' must be a number"),
    (("recommended", "peak_gib"), True, "'recommended.peak_gib' must be a number"),
    (("recommended", "fit_probability"), 5, "'recommended.fit_probability' must be a number from 0 to 1, not 5"),
    (("workload", "frames"), True, "the plan says frames True where this version has 1"),
    (("workload", "buckets"), True, "--bucket must be a list"),
    (("recommended", "fits"), 1, "'recommended.fits' must be true or false"),
    (("recommended", "reasons"), "because", "'recommended.reasons' must be a list of texts"),
    (("recommended", "breakdown"), [1], "recommended.breakdown must be a JSON object"),
    (("versions",), {"torch": 2}, "'versions.torch' must be text"),
]


@pytest.mark.parametrize(("path", "value", "part"), DAMAGE, ids=[f"{'.'.join(p)}={v!r}"[:50] for p, v, _ in DAMAGE])
def test_a_damaged_value_is_named(
    content: dict[str, Any], tmp_path: Path, path: tuple[str, ...], value: Any, part: str
) -> None:
    _set(content, path, value)
    _refused(_save(content, tmp_path), part)


@pytest.mark.parametrize(
    "path",
    [
        ("workload",),
        ("device",),
        ("executor",),
        ("recommended",),
        ("versions",),
        ("workload", "rank"),
        ("recommended", "peak_gib"),
    ],
    ids=".".join,
)
def test_a_missing_key_is_named(content: dict[str, Any], tmp_path: Path, path: tuple[str, ...]) -> None:
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    _refused(_save(content, tmp_path), path[-1])


def _set(content: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        content = content[key]
    content[path[-1]] = value


def _paths(value: Any, before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(value, dict):
        return [before]
    return [p for k, v in value.items() for p in ([(*before, k)] + _paths(v, (*before, k)))]


junk = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just([]) | st.just({})


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_value_is_read_or_refused(content: dict[str, Any], tmp_path: Path, data: st.DataObject) -> None:
    changed = copy.deepcopy(content)
    changed["schedules"] = []
    _set(changed, data.draw(st.sampled_from(_paths(changed))), data.draw(junk))
    with contextlib.suppress(PlanError):
        assert plan_files.load(_save(changed, tmp_path)).schedule.backend in Backend


def test_the_command_says_it_in_one_line(advise: Advise, plan: Path) -> None:
    plan.write_text(plan.read_text()[:100])
    for command in ("verify", "run"):
        done = advise(command, str(plan))
        assert done.status == 2
        assert "perhaps cut off" in done.error
