"""`advise batch`: the JSON lines contract."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_helpers import SMALL_REQUEST, Done, environment
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor import batch

Advise = Callable[..., Done]
TORCH = {"gradient_checkpointing": True, "gradient_checkpointing_backend": "torch"}
GOOD = {**SMALL_REQUEST, "gpu": "H100", "schedules": [TORCH]}


@pytest.fixture
def ask(advise: Advise, tmp_path: Path) -> Callable[..., tuple[int, list[dict[str, Any]]]]:
    """Asks lines (objects or raw bytes); returns the exit status and the answers."""

    def run(*lines: Any) -> tuple[int, list[dict[str, Any]]]:
        raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        file = tmp_path / "requests.jsonl"
        file.write_bytes(b"\n".join(raw))
        done = advise("batch", str(file))
        assert done.err == ""
        return done.status, [json.loads(line) for line in done.out.splitlines()]

    return run


Ask = Callable[..., tuple[int, list[dict[str, Any]]]]


def test_answers_come_in_order_and_bad_lines_do_not_stop_the_others(ask: Ask) -> None:
    status, answers = ask(GOOD, b"not json", {**GOOD, "gpu": "L40S"}, b"", {"model": "fluxx", "gpu": "H100"}, GOOD)
    assert status == 1
    assert ["error" in a for a in answers] == [False, True, False, True, False]
    assert [a["device"]["name"] for a in answers if "device" in a] == ["H100 80GB SXM", "L40S", "H100 80GB SXM"]


def test_all_answered_is_status_0(ask: Ask) -> None:
    assert ask(GOOD)[0] == 0
    assert ask() == (0, [])


def test_requested_schedules_come_back_with_the_controls_as_asked(ask: Ask) -> None:
    asked = [
        {"gradient_checkpointing": False},
        {**TORCH, "gradient_checkpointing_interval": 1},
        {**TORCH, "gradient_checkpointing_interval": 2, "gradient_checkpointing_segment_stride": 4},
        {**TORCH, "gradient_checkpointing_offload_attention": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_backend": "unsloth-ffn"},
    ]
    _, [answer] = ask({**GOOD, "executor": "simpletuner", "schedules": asked})
    assert len(answer["schedules"]) == len(asked)
    for entry, wanted in zip(answer["schedules"], asked, strict=True):
        assert wanted.items() <= entry["controls"].items()
        assert entry["supported"]
        assert entry["peak_gib"] > 0


def test_an_unsupported_schedule_is_an_entry_with_a_reason(ask: Ask) -> None:
    status, [answer] = ask(
        {**GOOD, "executor": "diffusers", "schedules": [{**TORCH, "gradient_checkpointing_offload_attention": True}]}
    )
    [entry] = answer["schedules"]
    assert status == 0
    assert entry["supported"] is False
    assert "bundled" in entry["reason"]
    assert entry["peak_gib"] is None


def test_without_schedules_the_whole_list_is_answered(ask: Ask) -> None:
    _, [answer] = ask({k: v for k, v in GOOD.items() if k != "schedules"})
    assert len(answer["schedules"]) > 20


def test_other_keys_of_a_request_count(ask: Ask) -> None:
    status, answers = ask(
        {**GOOD, "gpu": None, "vram": 16, "headroom": 6},
        {**GOOD, "gpu": None, "vram": 16, "objective": "smallest", "executor": "diffusers", "host_ram": 8},
        {**GOOD, "lokr_factor": 4, "lokr_full_matrix": False},
        {**GOOD, "adapter": "lokr", "lokr_factor": "4,FeedForward=8"},
    )
    assert status == 0
    assert answers[0]["recommended"] is None
    assert (answers[1]["objective"], answers[1]["executor"]) == ("smallest", "diffusers")
    assert "--lokr-factor has no effect with --adapter lora" in answers[2]["warnings"]
    assert answers[3]["workload"]["lokr_factor"] == "4,FeedForward=8"


def test_phases_of_a_request_are_answered_and_their_keys_have_types(ask: Ask) -> None:
    status, answers = ask(
        {**GOOD, "caching": True, "caching_batch": 2, "keep_resident": ["vae"], "vae_precision": "fp32"},
        {**GOOD, "caching": "yes"},
        {**GOOD, "keep_resident": 3},
        {**GOOD, "keep_resident": "vae, text-encoder"},
    )
    assert status == 1
    assert [p["name"] for p in answers[0]["phases"]] == ["vae caching", "text caching"]
    assert answers[0]["largest_phase"] == "training"
    assert [(k["name"], k["gib"]) for k in answers[0]["kept"]] == [("kl-16", 0.3123)]
    assert "'caching' must be true or false" in answers[1]["error"]
    assert "--keep-resident must be a list" in answers[2]["error"]
    assert answers[3]["workload"]["keep_resident"] == ["vae", "text-encoder"]


REFUSED = [
    (b"[1, 2]", "a JSON object, not [1, 2]"),
    (b'"flux"', "a JSON object"),
    (b'{"model": "flux"', "not valid JSON"),
    (b"\xff\xfe{}", "not UTF-8"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"model": "flux", "gpu": "H100", "batch": NaN}', "NaN"),
    (b'{"model": "flux", "gpu": "H100", "batch": 1e999}', "--batch"),
    *(
        (b'{"model": "flux", "gpu": "H100", "%s": ""}' % key, part)
        for key, part in (
            (b"variant", "--variant ''"),
            (b"executor", "--executor ''"),
            (b"objective", "--objective ''"),
            (b"headroom", "'headroom' must be a number"),
            (b"revision", "--revision ''"),
        )
    ),
    (b'{"model": "flux", "gpu": "H100", "alpha": ' + b"9" * 6000 + b"}", "--alpha"),
    (b'{"model": "flux", "gpu": "H100", "rank": 16, "rank": 8}', "'rank' is given twice"),
    ({"gpu": "H100"}, "'model' is missing"),
    ({"model": None, "gpu": "H100"}, "'model' is missing"),
    ({**GOOD, "resolutoin": 512}, "unknown key 'resolutoin'"),
    ({**GOOD, "model": 7}, "'model' must be text"),
    ({**GOOD, "variant": ["dev"]}, "'variant' must be text"),
    ({**GOOD, "fuse_qkv": "no"}, "'fuse_qkv' must be true or false"),
    ({**GOOD, "vram": "24"}, "'vram' must be a number"),
    ({**GOOD, "resolution": "255"}, "--resolution"),
    ({**GOOD, "resolution": [256, 256]}, "--resolution"),
    ({**GOOD, "batch": "2"}, "--batch"),
    ({**GOOD, "batch": True}, "--batch"),
    ({**GOOD, "lora_targets": "to_q"}, "--lora-targets"),
    ({**GOOD, "lora_targets": []}, "--lora-targets"),
    ({**GOOD, "precision": "nf3"}, "--precision 'nf3'"),
    ({**GOOD, "gpu": "H101"}, "unknown GPU 'H101'"),
    ({**GOOD, "vram": 80}, "exclude each other"),
    ({**GOOD, "headroom": -1}, "--headroom"),
    ({**GOOD, "headroom": 500}, "leaves nothing"),
    ({**GOOD, "host_ram": -1}, "--host-ram"),
    ({**GOOD, "executor": "kohya"}, "--executor 'kohya'"),
    ({**GOOD, "objective": "best"}, "--objective 'best'"),
    ({**GOOD, "schedules": []}, "'schedules' must be a list"),
    ({**GOOD, "schedules": TORCH}, "'schedules' must be a list"),
    ({**GOOD, "schedules": [TORCH, "torch"]}, "schedule 2 must be an object"),
    ({**GOOD, "schedules": [{**TORCH, "interval": 2}]}, "unknown schedule control 'interval'"),
    ({**GOOD, "schedules": [{**TORCH, "gradient_checkpointing_backend": "tf"}]}, "'tf' is unknown"),
    (
        {**GOOD, "schedules": [{**TORCH, "gradient_checkpointing_interval": 0}]},
        "schedule 1: gradient_checkpointing_interval",
    ),
    (SMALL_REQUEST, "has no GPU; give 'gpu'"),
]


@pytest.mark.parametrize(("line", "part"), REFUSED, ids=[part for _, part in REFUSED])
def test_a_bad_request_gives_an_error_that_names_it(ask: Ask, line: Any, part: str) -> None:
    status, [answer] = ask(line)
    assert status == 1
    assert list(answer) == ["error"]
    assert part in answer["error"]
    assert "\n" not in answer["error"]
    assert "unexpected" not in answer["error"]


def test_a_bug_on_one_line_does_not_end_the_others(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = batch.answer

    def sometimes(line: bytes, **more: Any) -> dict[str, Any]:
        if b"L40S" in line:
            raise KeyError("oops")
        return answer(line, **more)

    monkeypatch.setattr("advisor.batch.answer", sometimes)
    status, answers = ask(GOOD, {**GOOD, "gpu": "L40S"}, GOOD)
    assert status == 1
    assert "unexpected KeyError" in answers[1]["error"]
    assert "error" not in answers[2]


def test_every_answer_is_written_before_the_next_request_is_read(cache: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "advisor.cli", "batch", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(cache),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    for gpu in ("H100", "nonsense"):
        process.stdin.write(json.dumps({**GOOD, "gpu": gpu}) + "\n")
        process.stdin.flush()
        assert ("error" in json.loads(process.stdout.readline())) == (gpu == "nonsense")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err == ""


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(
    st.binary(max_size=60)
    | json_values.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(st.sampled_from([*SMALL_REQUEST, *batch.ASKING_KEYS, "fuse_qkv", "variant"]), json_values).map(
        lambda value: json.dumps(value).encode()
    )
)
def test_whatever_a_line_holds_the_answer_is_one_json_object(line: bytes) -> None:
    class NoSession:
        def plan(self, *_: Any, **__: Any) -> Any:
            raise batch.RequestError("good")

    written: list[str] = []
    batch.run([line.replace(b"\n", b" ")], written.append, session=NoSession(), detect=lambda: None)  # type: ignore[arg-type]
    for text in written:
        answer = json.loads(text)
        assert list(answer) == ["error"]
        assert "unexpected" not in answer["error"]
