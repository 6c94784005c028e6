"""The main job: tables, JSON, memory tiers, exports, exit status."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_helpers import SMALL, SMALL_REQUEST, Done, in_process_of_its_own

from advisor import options as command_options
from advisor import plan_files, reports
from advisor.api import Plan, Session
from advisor.nearest import MOST_TRACED, nearest
from advisor.reports import nearest_lines
from estimators import devices
from estimators.estimate import GIB, Estimate
from estimators.schedule import KEYS, Schedule
from probes.workload import Workload, from_request

Advise = Callable[..., Done]

CONTRACT = {
    "name", "controls", "supported", "reason", "peak_gib", "peak_gib_low", "peak_gib_high", "reserved_gib", "device_gib",
    "host_gib", "step_seconds", "step_seconds_low", "step_seconds_high", "fits", "fit_probability", "breakdown",
}  # fmt: skip


def test_json_keeps_the_contract(advise: Advise) -> None:
    done = advise(*SMALL, "--gpu", "4090", "--json")
    answer = json.loads(done.out)
    assert done.status == 0
    assert {"workload", "device", "executor", "profile", "schedules", "recommended", "warnings", "versions"} <= set(
        answer
    )
    assert all(set(entry) >= CONTRACT for entry in answer["schedules"])
    assert set(answer["recommended"]) >= CONTRACT | {"export", "reasons"}
    assert answer["device"]["name"] == "RTX 4090"
    assert answer["device"]["usable_gib"] == pytest.approx(23.65, abs=0.1)
    assert answer["profile"] == "traced"
    assert "torch" in answer["versions"]
    assert "tiers" not in answer


def test_the_table_names_every_schedule_with_units_and_a_fit_word(advise: Advise) -> None:
    answer = json.loads(advise(*SMALL, "--gpu", "4090", "--json").out)
    text = advise(*SMALL, "--gpu", "4090").out
    rows = [line.split() for line in text.splitlines() if re.match(r"(none|torch|unsloth)\S*\s+(-|\d)", line)]
    assert len(rows) == len(answer["schedules"])
    assert [row[0].rstrip("*").removesuffix("+A") for row in rows] == [
        entry["name"].split()[0] for entry in answer["schedules"]
    ]
    assert {row[-1] for row in rows} <= {"yes", "tight", "no"}
    assert all(word in text for word in ("GiB", "alloc", "reserved", "device", "host", "s/step", "95% band"))
    assert "weights" in text
    assert "workspace" in text
    assert "in all" in text
    assert sum(row[0].endswith("*") for row in rows) == 1
    assert json.dumps(answer["recommended"]["export"], indent=2) in text


def test_the_breakdown_adds_up_to_the_peak(advise: Advise) -> None:
    best = json.loads(advise(*SMALL, "--gpu", "4090", "--json").out)["recommended"]
    assert sum(best["breakdown"].values()) == pytest.approx(best["peak_gib"], abs=0.001)


@pytest.mark.parametrize("columns", ["40", "80", ""])
def test_piped_text_has_no_colour_and_no_cut_number(cache: Path, columns: str) -> None:
    more = {"COLUMNS": columns} if columns else {}
    done = in_process_of_its_own([*SMALL, "--gpu", "4090"], cache, FORCE_COLOR="1", **more)
    assert done.status == 0
    assert "\x1b" not in done.out
    assert "…" not in done.out
    assert max(map(len, done.out.splitlines())) <= (100 if not columns else 80)
    assert not any(line.endswith(" ") for line in done.out.splitlines())


def test_without_a_device_every_memory_tier_is_answered(advise: Advise) -> None:
    done = advise(*SMALL, "--json")
    answer = json.loads(done.out)
    assert done.status == 0
    assert answer["device"]["name"] == devices.TIERS[24]
    assert [tier["tier_gb"] for tier in answer["tiers"]] == list(devices.TIERS)
    for tier in answer["tiers"]:
        assert tier["device"]["name"] == devices.TIERS[tier["tier_gb"]]
        assert (tier["recommended"] is None) == (tier["tier_gb"] < 16)
        assert tier["reasons"]


def test_the_tier_table_says_where_nothing_fits_and_what_would_help(advise: Advise) -> None:
    done = advise(*SMALL)
    text = done.out
    assert re.search(r"^ +8 RTX 3070 .* nothing fits .* no$", text, re.MULTILINE)
    assert re.search(r"^ +24 RTX 4090 .* yes$", text, re.MULTILINE)
    assert "8, 10, 12 GB: nothing fits; with 12 GB the smallest schedule" in done.flat
    assert "--precision" in text
    assert "In full, 24 GB cards:" in text


def test_nothing_fits_is_status_1_with_the_way_out(advise: Advise) -> None:
    done = advise(*SMALL, "--vram", "8")
    assert done.status == 1
    assert "Nothing fits on the 8 GiB card." in done.out
    assert "which checkpointing cannot lower" in done.flat
    done = advise(*SMALL, "--vram", "8", "--json")
    assert done.status == 1
    assert json.loads(done.out)["recommended"] is None


def test_the_nearest_change_that_fits_is_estimated_and_holds(advise: Advise) -> None:
    asked = (*SMALL, "--vram", "8")
    near = json.loads(advise(*asked, "--json").out)["nearest"]
    assert near["recommended"]["fits"]
    options = [part for key, value in near["options"].items() for part in (f"--{key.replace('_', '-')}", str(value))]
    assert f"fits with {' '.join(options)}: {near['recommended']['name']}, peak" in advise(*asked).flat
    with_it = advise(*asked, *options, "--json")
    assert with_it.status == 0
    assert json.loads(with_it.out)["recommended"]["peak_gib"] == near["recommended"]["peak_gib"]


def test_where_no_change_helps_what_was_tried_is_said(
    advise: Advise, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADVISE_CACHE_DIR", str(cache))
    workload = from_request(SMALL_REQUEST)
    answer = Session().plan(workload, devices.from_vram(8))
    asked = []

    def never_fits(job: Workload) -> Plan:
        asked.append(job)
        return answer

    found = nearest(SMALL_REQUEST, answer, 0, never_fits)
    assert found.change is None
    assert found.to_json()["recommended"] is None
    assert len({job.traced() for job in asked} - {workload.traced()}) == MOST_TRACED
    (line,) = nearest_lines(found)
    assert line.startswith("tried, and nothing fits either: --precision ")


def test_nothing_fits_in_any_tier_is_status_1(advise: Advise) -> None:
    assert advise(*SMALL, "--host-ram", "0").status == 0
    assert advise(*SMALL, "--headroom", "138").status == 1


@pytest.mark.parametrize("executor", ["bundled", "simpletuner", "diffusers"])
@pytest.mark.parametrize("objective", ["ladder", "fastest", "smallest"])
def test_executors_and_objectives(advise: Advise, executor: str, objective: str) -> None:
    done = advise(*SMALL, "--gpu", "L40S", "--executor", executor, "--objective", objective, "--json")
    answer = json.loads(done.out)
    assert (answer["executor"], answer["objective"]) == (executor, objective)
    fitting = [entry for entry in answer["schedules"] if entry["fits"]]
    best = answer["recommended"]
    if objective == "fastest":
        assert best["step_seconds"] == min(entry["step_seconds"] for entry in fitting)
    if objective == "smallest":
        assert best["peak_gib"] == min(entry["peak_gib"] for entry in fitting)


def test_what_the_executor_does_not_run_is_said(advise: Advise) -> None:
    text = advise(*SMALL, "--gpu", "4090", "--executor", "diffusers").flat
    assert "unsloth: unsupported: diffusers has no unsloth backend" in text


def test_headroom_can_take_the_answer_away(advise: Advise) -> None:
    assert advise(*SMALL, "--vram", "16").status == 0
    assert advise(*SMALL, "--vram", "16", "--headroom", "6").status == 1


def test_an_option_without_effect_is_said(advise: Advise) -> None:
    assert (
        "--lokr-factor has no effect with --adapter lora" in advise(*SMALL, "--gpu", "4090", "--lokr-factor", "4").flat
    )


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        (["--adapter", "lokr", "--lora-dropout", "0.2"], ["--lora-dropout has no effect with --adapter lokr"]),
        (["--adapter", "lokr", "--rank", "8"], []),
        (
            ["--adapter", "lokr", "--lokr-full-matrix", "--rank", "8", "--alpha", "2"],
            [f"{option} has no effect with --adapter lokr --lokr-full-matrix" for option in ("--rank", "--alpha")],
        ),
        (["--text-padding", "longest"], ["--text-padding longest has no effect without --caption-tokens"]),
        (["--text-padding", "longest", "--caption-tokens", "64"], []),
        (["--rank", "8", "--lora-dropout", "0"], []),
    ],
)
def test_every_option_without_effect_is_known(options: list[str], warned: list[str]) -> None:
    keys = {"--adapter": "adapter", "--lora-dropout": "lora_dropout", "--rank": "rank", "--alpha": "alpha"}
    keys |= {"--text-padding": "text_padding", "--caption-tokens": "caption_tokens"}
    params: dict[str, Any] = {"model": "sd3", "lokr_full_matrix": "--lokr-full-matrix" in options}
    texts = [o for o in options if o != "--lokr-full-matrix"]
    params |= {keys[name]: value for name, value in zip(texts[::2], texts[1::2], strict=True)}
    request = command_options.request(params)
    found = command_options.without_effect(request, command_options.workload(request))
    assert len(found) == len(warned)
    assert all(text.startswith(start) for text, start in zip(found, warned, strict=True))


def test_export_holds_only_the_trainers_keys(advise: Advise, tmp_path: Path) -> None:
    done = advise(*SMALL, "--gpu", "4090", "--export", str(tmp_path / "config.json"))
    assert done.status == 0
    found = json.loads((tmp_path / "config.json").read_text())
    assert found
    assert set(found) <= KEYS
    options = Path(__file__).parents[2] / ".." / "shared" / "facts" / "options.csv"
    if options.exists():
        with options.open() as file:
            assert set(found) <= {row["json_key"] for row in csv.DictReader(file)}
    assert f"wrote export: {tmp_path / 'config.json'}" in done.out


def test_export_and_plan_replace_their_own_kind_only(advise: Advise, tmp_path: Path) -> None:
    export, plan = tmp_path / "config.json", tmp_path / "plan.json"
    both = ("--export", str(export), "--plan", str(plan))
    assert advise(*SMALL, "--gpu", "4090", *both).status == 0
    assert advise(*SMALL, "--gpu", "4090", *both).status == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "plan.json"]
    export.write_text('{"model_family": "flux", "gradient_checkpointing": true}')
    assert "holds something else" in advise(*SMALL, "--gpu", "4090", *both).error
    assert "model_family" in export.read_text()
    assert "holds something else" in advise(*SMALL, "--gpu", "4090", "--plan", str(export)).error


def test_nothing_is_written_when_nothing_fits(advise: Advise, tmp_path: Path) -> None:
    done = advise(*SMALL, "--vram", "8", "--export", str(tmp_path / "a.json"), "--plan", str(tmp_path / "b.json"))
    assert done.status == 1
    assert list(tmp_path.iterdir()) == []
    assert "--export was not written" in done.err
    assert "--plan was not written" in done.err


def test_two_devices_share_one_simulation_with_equal_results(advise: Advise) -> None:
    alone = json.loads(advise(*SMALL, "--gpu", "H200", "--json").out)["recommended"]
    tiers = json.loads(advise(*SMALL, "--json").out)["tiers"]
    assert tiers[-1]["recommended"] == alone


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (0.03, 0.05, "0.03-0.05"),
        (5.5, 5.95, "5.50-5.95"),
        (9.5, 10.3, "9.5-10.3"),
        (21.5, 23.3, "21.5-23.3"),
        (92.7, 100.5, "93-100"),
    ],
)
def test_bands_keep_to_nine_characters(low: float, high: float, text: str) -> None:
    estimate = Estimate(
        Schedule(),
        True,
        None,
        peak_low=round(low * GIB),
        peak_high=round(high * GIB),
        step_seconds_low=low,
        step_seconds_high=high,
    )
    assert reports.gib_band(estimate) == text
    assert len(reports.seconds_band(estimate)) <= (9 if high > 0.1 else 11)


def test_a_fit_whose_band_does_not_fit_is_called_tight() -> None:
    words = [
        reports.fit_word(Estimate(Schedule(), supported, None, fits=fits, fit_probability=sure))
        for supported, fits, sure in ((True, True, 0.99), (True, True, 0.9), (True, False, 0.4), (False, False, 0.0))
    ]
    assert words == ["yes", "tight", "no", "unsupported"]


def test_this_machines_gpu_is_the_device_unless_one_is_named(advise: Advise, monkeypatch: pytest.MonkeyPatch) -> None:
    present = devices.detected_gpu("NVIDIA H200", 139 * GIB, (9, 0))
    monkeypatch.setattr("advisor.present.detect_gpu", lambda: present)
    assert json.loads(advise(*SMALL, "--json").out)["device"]["name"] == "H200"
    assert json.loads(advise(*SMALL, "--gpu", "3090", "--json").out)["device"]["name"] == "RTX 3090"
    assert json.loads(advise(*SMALL, "--vram", "20", "--json").out)["device"]["name"] == "20 GiB card"


def test_an_output_file_that_holds_something_else_than_json_is_not_replaced(advise: Advise, tmp_path: Path) -> None:
    script = tmp_path / "lib.sh"
    script.write_text("echo kept\n")
    assert "holds something else" in advise(*SMALL, "--gpu", "4090", "--plan", str(script)).error
    assert script.read_text() == "echo kept\n"


@pytest.mark.parametrize("columns", ["60", "80"])
@pytest.mark.parametrize("args", [("--gpu", "h100"), (), ("--vram", "8")])
def test_answers_fit_80_columns(
    advise: Advise, monkeypatch: pytest.MonkeyPatch, columns: str, args: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = advise(*SMALL, *args).out.splitlines()
    assert max(map(len, lines)) <= 80


def test_launch_bound_times_are_marked_and_explained(advise: Advise) -> None:

    for args in ((), ("--gpu", "h100")):
        answer = json.loads(advise(*SMALL, *args, "--json").out)
        entries = [t["recommended"] for t in answer["tiers"]] if not args else answer["schedules"]
        bound = any(entry and entry["launch_bound"] for entry in entries)
        text = advise(*SMALL, *args).flat
        assert ("^: limited by kernel launches" in text) == bound
        assert bound == bool(re.search(r"\d\^ ", text))


def test_an_ambiguous_card_is_named_beside_the_device(advise: Advise) -> None:
    lines = advise(*SMALL, "--gpu", "h100").out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("H100 80GB SXM, "))
    note = next(i for i, line in enumerate(lines) if line.startswith("note: 'h100' is taken as H100 80GB SXM"))
    assert at < note <= at + 2  # the device's line may be wrapped
    assert sum("is taken as" in line for line in lines) == 1


def test_windows_is_warned_of_where_a_step_may_spill(advise: Advise) -> None:
    """`--os windows`: only where the band reaches over what the card has."""
    spilling = "NVIDIA's driver moves what does not fit on the card to system memory"
    assert spilling in advise(*SMALL, "--vram", "8", "--os", "windows").flat
    assert spilling not in advise(*SMALL, "--vram", "8").flat
    assert spilling not in advise(*SMALL, "--vram", "80", "--os", "windows").flat
    done = advise(*SMALL, "--vram", "8", "--os", "window")
    assert done.status == 2
    assert "--os 'window' is not valid (did you mean windows?); valid: linux, windows" in done.error


def test_what_stays_on_the_card_and_validation_are_shown(advise: Advise) -> None:
    args = ("--gpu", "4090", "--resident-gib", "2", "--validation-resolution", "256", "--validation-samples", "1")
    done = advise(*SMALL, *args)
    assert (
        "Beside the training step, validation: one forward pass of the model without gradients, 1 sample of 256x256"
        in done.flat
    )
    assert "kept 2.00" in done.flat


def test_kept_encoders_caching_and_the_largest_phase_are_shown(advise: Advise) -> None:
    args = ("--gpu", "4090", "--keep-resident", "text-encoder,vae", "--caching", "--caching-batch", "2")
    done = advise(*SMALL, *args)
    assert (
        "vae caching: the VAE encodes 2 samples together of 256x256 (kl-16, bf16); the model is not loaded yet"
        in done.flat
    )
    assert (
        "text caching: qwen-3-4b (40 tokens) encodes 1 caption, bf16; the model is not loaded yet, the VAE is kept"
        in done.flat
    )
    assert "The largest of these peaks is that of the training step." in done.flat
    assert "kept on the card the whole time: text encoder qwen-3-4b 7.49 GiB, VAE kl-16 0.16 GiB" in done.flat
    assert "kept 7.65" in done.flat
    assert "--keep-resident 'clip' is not valid" in advise(*SMALL, "--gpu", "4090", "--keep-resident", "vae,clip").error


def test_a_plan_with_phases_is_read_back(advise: Advise, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    args = ("--gpu", "4090", "--keep-resident", "vae", "--vae-precision", "fp32", "--plan", str(plan))
    for more in ((), ("--caching", "--caching-batch", "2", "--vae-slicing")):
        assert advise(*SMALL, *args, *more).status == 0
        written = json.loads(plan.read_text())
        workload = plan_files.load(plan).workload
        assert workload.keep_resident == ("vae",)
        assert workload.caching_batch == (2 if more else 0)
        assert json.loads(json.dumps(workload.describe())) == written["workload"]
