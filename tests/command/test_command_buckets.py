"""Several aspect buckets on the command line, in batch requests and in plan files: the worst one is planned for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command_helpers import Done

from advisor import plan_files
from advisor.api import Session, plan
from decision_rules.support import Executor
from estimators.devices import find_gpu, from_vram
from estimators.schedule import Backend, Schedule
from probes.workload import from_request

Advise = Callable[..., Done]

ASKED = (
    "--model",
    "z_image",
    "--bucket",
    "256x256",
    "--bucket",
    "192x320",
    "--bucket",
    "320x192",
    "--bucket",
    "128x128",
)
SHAPE = ("--caption-tokens", "32", "--rank", "4", "--gpu", "4090")


def test_the_plan_is_for_the_bucket_with_the_highest_peak(advise: Advise, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    done = advise(*ASKED, *SHAPE, "--plan", str(file), "--json")
    assert done.status == 0
    answer = json.loads(done.out)
    buckets = answer["buckets"]
    assert buckets["all"] == 4
    assert [b["bucket"] for b in buckets["evaluated"]] == [
        buckets["worst"],
        *(b["bucket"] for b in buckets["evaluated"][1:]),
    ]
    assert {b["bucket"] for b in buckets["evaluated"]} == {
        "256x256",
        "192x320",
        "128x128",
    }  # one of the two turned ones
    peaks = {b["bucket"]: b["peak_gib"] for b in buckets["evaluated"]}
    assert buckets["worst"] == max(peaks, key=lambda b: peaks[b]) == answer["workload"]["resolution"]
    assert answer["workload"]["buckets"] == ["256x256", "192x320", "320x192", "128x128"]
    assert answer["recommended"]["peak_gib"] == peaks[buckets["worst"]]
    assert any(f"planned for {buckets['worst']}, the worst of 4 buckets" in w for w in answer["warnings"])
    # each figure is what that size alone gives
    for size, peak in peaks.items():
        alone = Session().plan(
            from_request({"model": "z_image", "resolution": size, "caption_tokens": 32, "rank": 4}),
            find_gpu("4090"),
            schedules=[Schedule.from_controls(answer["recommended"]["controls"])],
        )
        assert round(alone.schedules[0].peak / 2**30, 4) == peak
    loaded = plan_files.load(file)
    assert loaded.workload.resolution == buckets["worst"]
    assert loaded.workload.buckets == ("256x256", "192x320", "320x192", "128x128")


def test_the_text_says_how_many_and_which(advise: Advise) -> None:
    done = advise(*ASKED, *SHAPE)
    assert "256x256 pixels (of 4 buckets)" in done.flat
    assert "planned for 256x256, the worst of 4 buckets" in done.flat
    assert "the other 1 are those turned or smaller" in done.flat


def test_a_small_bucket_does_not_decide_the_fit() -> None:
    """On a card where only the small bucket would fit without checkpointing, checkpointing is recommended."""
    request = {"model": "z_image", "caption_tokens": 32, "rank": 4}
    none = [Schedule(), Schedule(Backend.TORCH)]
    session, h100 = Session(), find_gpu("H100")
    small, large = (
        session.plan(from_request({**request, "resolution": r}), h100, schedules=none).schedules[0].device / 2**30
        for r in (128, 512)
    )
    card = from_vram((small + large) / 2 + 0.6)
    both = session.plan(from_request({**request, "buckets": ["128", "512"]}), card, Executor.BUNDLED, schedules=none)
    assert both.buckets[0].bucket == "512x512"
    assert both.recommended is not None
    assert both.recommended.schedule == Schedule(Backend.TORCH)
    alone = session.plan(from_request({**request, "resolution": 128}), card, Executor.BUNDLED, schedules=none)
    assert alone.recommended is not None
    assert alone.recommended.schedule == Schedule()


def test_batch_and_the_python_api_understand_buckets(advise: Advise, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    shape = {"caption_tokens": 32, "rank": 4}
    requests = [
        {"model": "z_image", "buckets": ["128x128", "256x256"], "gpu": "4090", **shape},
        {"model": "z_image", "buckets": "256x256", "gpu": "4090", **shape},
        {"model": "z_image", "aspect_buckets": 256, "bucket_step": 64, "gpu": "4090", **shape},
    ]
    file.write_text("\n".join(json.dumps(r) for r in requests))
    done = advise("batch", str(file))
    first, second, third = (json.loads(line) for line in done.out.splitlines())
    assert done.status == 1
    assert first["buckets"]["worst"] == "256x256"
    assert second == {"error": "--bucket must be a list of sizes such as 832x1216, not '256x256'"}
    assert third["buckets"]["worst"] == "256x256"
    found = plan("z_image", gpu="4090", buckets=["128x128", "256x256"], caption_tokens=32, rank=4)
    assert found.to_json()["buckets"] == first["buckets"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--bucket", "1000x1000"), "--bucket 1000x1000 does not fit z_image"),
        (("--bucket-step", "64"), "--bucket-step 64 has no effect"),
        (("--aspect-buckets", "big"), "--aspect-buckets must be a whole number"),
        (("--text-padding", "no"), "--text-padding 'no' is not valid"),
    ],
)
def test_a_bucket_that_cannot_be_is_one_line(advise: Advise, args: tuple[str, ...], words: str) -> None:
    done = advise("--model", "z_image", *args, *SHAPE)
    assert done.status == 2
    assert words in done.error


def test_a_padded_caption_says_that_its_length_does_nothing(advise: Advise) -> None:
    done = advise("--model", "sd3", "--resolution", "256", "--caption-tokens", "10", "--gpu", "4090")
    assert "--caption-tokens 10 has no effect: sd3 pads every caption to 154 tokens" in done.flat
    done = advise(
        "--model", "sd3", "--resolution", "256", "--caption-tokens", "10", "--gpu", "4090", "--text-padding", "longest"
    )
    assert "has no effect" not in done.flat
    assert "10 text tokens" in done.flat


def test_tokens_of_a_prompt_template_are_said(advise: Advise) -> None:
    done = advise("--model", "z_image", "--resolution", "256", "--caption-tokens", "10", "--gpu", "4090")
    assert "the prompt template of z_image adds 8 tokens to each caption: 18 are planned for" in done.flat
    assert "18 text tokens" in done.flat


def test_a_second_sample_of_guidance_costs_what_a_doubled_batch_costs(advise: Advise) -> None:
    shape = ("--model", "z_image", "--resolution", "256", *SHAPE, "--json")
    twice, doubled = (json.loads(advise(*shape, *more).out) for more in (("--cfg-batch",), ("--batch", "2")))
    assert twice["workload"]["batch"] == 1
    assert twice["workload"]["cfg_batch"] is True
    assert [s["peak_gib"] for s in twice["schedules"]] == [s["peak_gib"] for s in doubled["schedules"]]
