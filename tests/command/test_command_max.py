"""advise max: the search itself on made-up answers, and the command on a real model."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from advisor import cli, largest
from probes.workload import Workload, WorkloadError, from_request

SMALL = {"model": "sd3", "resolution": "512x512"}


def plans(most: float) -> Any:
    """Answers by a made-up memory: fits as long as batch x frames x megapixels x rank stays below `most`; and what was asked."""
    asked: list[Workload] = []

    def plan_for(w: Workload) -> Any:
        asked.append(w)
        size = w.batch * w.frames * (w.width * w.height / 2**18) * w.rank
        peak = SimpleNamespace(supported=True, peak=int(size * 1000))
        return SimpleNamespace(
            recommended=object() if size <= most else None,
            schedules=[peak],
            device=SimpleNamespace(usable_bytes=int(most * 1000), context_bytes=0),
        )

    return plan_for, asked


@pytest.mark.parametrize("most", [16, 17, 100, 1000, 16 * 93.5, 16 * 4095, 16 * 4096, 10**9])
def test_the_largest_batch_is_exact(most: float) -> None:
    plan_for, asked = plans(most)
    found = largest.search(SMALL, "batch", plan_for)
    expected = min(int(most // 16), 4096)
    assert found.best is not None
    assert found.best.value == str(expected)
    assert len(asked) <= largest.MOST_TRIED
    assert (found.limit is not None) == (expected == 4096)


def test_it_starts_at_the_given_value_and_comes_down() -> None:
    plan_for, asked = plans(16 * 3)
    found = largest.search({**SMALL, "batch": 64}, "batch", plan_for)
    assert found.best is not None
    assert found.best.value == "3"
    assert asked[0].batch == 64


def test_nothing_fits() -> None:
    plan_for, _ = plans(1)
    found = largest.search(SMALL, "batch", plan_for)
    assert found.best is None
    assert found.tried[0].value == "1"


def test_buckets_are_a_size_and_so_no_size_is_varied_beside_them() -> None:
    plan_for, asked = plans(16 * 8)
    buckets = {"model": "sd3", "buckets": ["512x512", "384x640"]}
    with pytest.raises(WorkloadError, match="--vary resolution goes with one size"):
        largest.search(buckets, "resolution", plan_for)
    found = largest.search(buckets, "batch", plan_for)
    assert found.best is not None
    assert found.best.value == "8"
    assert asked[0].buckets == ("512x512", "384x640")


def test_resolutions_keep_their_aspect_and_the_models_steps() -> None:
    plan_for, asked = plans(16 * 8)
    found = largest.search({"model": "sd3", "resolution": "768x512"}, "resolution", plan_for)
    assert found.best is not None
    width, height = (int(v) for v in found.best.value.split("x"))
    assert width / height == pytest.approx(1.5, rel=0.05)
    assert width % 16 == height % 16 == 0
    assert width * height / 2**18 * 16 <= 16 * 8
    bigger = [w for w in asked if w.width * w.height > width * height]
    assert bigger
    assert min(w.width for w in bigger) == width + 16


def test_frames_are_those_of_the_vae() -> None:
    plan_for, asked = plans(16 * 100)
    found = largest.search({"model": "wan", "resolution": "512x512"}, "frames", plan_for)
    assert found.best is not None
    assert int(found.best.value) == 97
    assert all(w.frames % 4 == 1 for w in asked)


@pytest.mark.parametrize(("most", "rank"), [(5, 5), (100, 96), (777.7, 776), (10**9, 65536)])
def test_ranks_are_refined_to_multiples_of_eight(most: float, rank: int) -> None:
    plan_for, asked = plans(most)
    found = largest.search(SMALL, "rank", plan_for)
    assert found.best is not None
    assert found.best.value == str(rank)
    assert len(asked) <= largest.MOST_TRIED
    assert found.limit == ("this command tries nothing larger than 65536" if rank == 65536 else None)


@pytest.mark.parametrize(
    ("request_", "vary", "message"),
    [
        (SMALL, "frames", "image model"),
        ({**SMALL, "adapter": "full"}, "rank", "has no rank"),
        ({**SMALL, "adapter": "lokr", "lokr_full_matrix": True}, "rank", "--lokr-full-matrix has no rank"),
        ({"model": "ace_step"}, "resolution", "audio model"),
    ],
)
def test_what_cannot_vary_is_told(request_: dict[str, Any], vary: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        largest.values(vary, from_request(request_))


def test_the_command(advise: Any) -> None:
    done = advise(
        "max", "--model", "sd3", "--resolution", "256", "--vary", "rank", "--rank", "2048", "--gpu", "3060", "--json"
    )
    found = json.loads(done.out)
    fits = [t["fits"] for t in found["tried"]]
    assert fits == sorted(fits, reverse=True)
    assert done.status == (0 if found["largest"] else 1)


def test_options_without_effect_are_in_the_answer(advise: Any) -> None:
    options = ("--resolution", "256", "--batch", "4096", "--lokr-factor", "4", "--text-padding", "longest")
    found = json.loads(advise("max", "--model", "sd3", *options, "--gpu", "3060", "--json").out)
    assert [w.partition(" has no effect")[0] for w in found["warnings"]] == ["--text-padding longest", "--lokr-factor"]


def test_the_command_needs_a_card(advise: Any) -> None:
    done = advise("max", "--model", "sd3")
    assert done.status == 2
    assert "--gpu or --vram" in done.err
    assert advise("max", "--model", "sd3", "--gpu", "4090", "--vary", "colour").status == 2


def test_it_takes_every_option_of_the_main_command_but_the_version() -> None:
    group: Any = typer.main.get_command(cli.app)
    known = {p.name for p in group.params}
    assert known - {"version"} < {p.name for p in group.commands["max"].params}
    of_the_model = {"model", "variant", "model_class", "model_config", "revision"}
    asked_elsewhere = {"executor", "export"}  # the configuration is SimpleTuner's, and --output is its export
    assert known - {"version"} - of_the_model - asked_elsewhere < {p.name for p in group.commands["import"].params}


def test_what_else_is_on_the_card_counts(advise: Any) -> None:
    options = (
        "max",
        "--model",
        "sd3",
        "--resolution",
        "256",
        "--vary",
        "rank",
        "--rank",
        "1",
        "--vram",
        "12",
        "--json",
    )
    found = json.loads(advise(*options, "--resident-gib", "11").out)
    assert found["largest"] is None
    assert [t["value"] for t in found["tried"]] == ["1"]


@pytest.mark.parametrize("vary", ["resolution", "frames"])
def test_buckets_say_the_sizes(advise: Any, vary: str) -> None:
    done = advise("max", "--model", "wan", "--bucket", "256x256x17", "--vary", vary, "--vram", "12")
    assert done.status == 2
    assert f"--vary {vary} goes with one size" in done.err


@pytest.mark.slow
def test_the_largest_batch_of_buckets_and_its_plan(advise: Any, tmp_path: Path) -> None:
    options = ("--model", "sd3", "--bucket", "256x256", "--bucket", "192x320", "--batch", "4", "--vram", "12")
    file = tmp_path / "plan.json"
    found = json.loads(advise("max", *options, "--ema", "--accumulate", "2", "--plan", str(file), "--json").out)
    assert [b["bucket"] for b in found["answer"]["buckets"]["evaluated"]] == ["256x256", "192x320"]
    assert found["answer"]["workload"]["ema"]
    assert json.loads(file.read_text())["workload"]["batch"] == int(found["largest"])


@pytest.mark.slow
@pytest.mark.parametrize("vary", ["batch", "rank"])
def test_swapped_blocks_are_searched_too(advise: Any, vary: str) -> None:
    options = ("--model", "flux", "--resolution", "512", "--weights-offload", "blocks:50", "--gpu", "3090", "--json")
    found = json.loads(advise("max", *options, "--vary", vary).out)
    assert found["answer"]["workload"]["weights_offload"] == "blocks:50"
    assert found["tried"][-1]["fits"] is False
