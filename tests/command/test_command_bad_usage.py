"""Every kind of bad input: one clear line on standard error, status 2, nothing written."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_helpers import SMALL, Done, environment, in_process_of_its_own

from probes.workload import NotYetError

Advise = Callable[..., Done]

FLUX = ("--model", "flux")
BAD = [
    # arguments, what the line has to say
    (("--model", "fluxx"), ("--model", "'fluxx'", "did you mean 'flux'", "z_image")),
    (("--model", "zzzz"), ("--model", "'zzzz'", "; valid: ", "flux, ")),
    (("--model", ""), ("--model needs a name; valid: ", "flux, ")),
    (("--model", "flux", "--variant", "dv"), ("--variant", "'dv'", "dev, schnell")),
    ((*FLUX, "--resolution", "1000"), ("--resolution", "1000", "multiples of 16", "992x992")),
    ((*FLUX, "--resolution", "0"), ("--resolution", "from 16 to")),
    ((*FLUX, "--resolution", "-512"), ("--resolution", "'-512'", "832x480")),
    ((*FLUX, "--resolution", "big"), ("--resolution", "'big'")),
    ((*FLUX, "--frames", "5"), ("--frames 5", "image model")),
    (("--model", "wan", "--frames", "80"), ("--frames 80", "77 and 81")),
    ((*FLUX, "--batch", "0"), ("--batch", "from 1 to 4096", "not 0")),
    ((*FLUX, "--batch", "-1"), ("--batch", "-1")),
    ((*FLUX, "--batch", "two"), ("--batch", "whole number", "'two'")),
    ((*FLUX, "--batch", "1.5"), ("--batch", "whole number", "1.5")),
    ((*FLUX, "--batch", "9" * 400), ("--batch", "whole number")),
    ((*FLUX, "--rank", "0"), ("--rank", "not 0")),
    ((*FLUX, "--alpha", "nan"), ("--alpha", "'nan'")),
    ((*FLUX, "--lora-dropout", "1"), ("--lora-dropout", "0.999")),
    ((*FLUX, "--lora-targets", "to_q,,to_k"), ("--lora-targets", "empty name")),
    ((*FLUX, "--caption-tokens", "513"), ("--caption-tokens 513", "512")),
    ((*FLUX, "--adapter", "lokr", "--lokr-factor", "4,8"), ("--lokr-factor '4,8'", "16,FeedForward=8")),
    ((*FLUX, "--adapter", "dora"), ("--adapter", "'dora'", "lora, lokr, loha, full")),
    ((*FLUX, "--precision", "bf17"), ("--precision", "'bf17'", "did you mean bf16", "nf4")),
    ((*FLUX, "--optimizer", "adamw-bf16"), ("--optimizer", "'adamw-bf16'", "did you mean adamw_bf16?")),
    ((*FLUX, "--dora", "--export", "x.json"), ("--export", "--dora", "no key")),
    ((*FLUX, "--accumulate", "0"), ("--accumulate", "not 0")),
    ((*FLUX, "--adapter", "full", "--master-weights"), ("--master-weights", "adamw_bf16", "--optimizer adamw")),
    ((*FLUX, "--adapter", "full", "--master-weights", "--precision", "fp32"), ("--master-weights", "leave it out")),
    ((*FLUX, "--dora", "--precision", "nf4"), ("--dora with --precision nf4", "bf16")),
    ((*FLUX, "--dora", "--weights-offload", "ramtorch"), ("--dora with --weights-offload ramtorch", "none")),
    ((*FLUX, "--attention", "fast"), ("--attention", "'fast'", "auto, flash")),
    ((*FLUX, "--compile", "full"), ("--compile", "'full'", "regional")),
    ((*FLUX, "--weights-offload", "disk"), ("--weights-offload", "'disk'", "ramtorch")),
    ((*FLUX, "--weights-offload", "group:1"), ("--weights-offload group:1", "in forward only", "blocks:N work")),
    ((*FLUX, "--executor", "kohya"), ("--executor", "'kohya'", "bundled, simpletuner, diffusers")),
    ((*FLUX, "--objective", "best"), ("--objective", "'best'", "ladder, fastest, smallest")),
    ((*FLUX, "--gpu", "rtx 4091"), ("--gpu", "'rtx 4091'", "RTX 4090", "advise gpus")),
    ((*FLUX, "--gpu", ""), ("--gpu", "unknown")),
    ((*FLUX, "--vram", "0"), ("--vram", "0")),
    ((*FLUX, "--vram", "-24"), ("--vram", "-24")),
    ((*FLUX, "--vram", "24GB"), ("--vram", "'24GB'", "GiB")),
    ((*FLUX, "--vram", "inf"), ("--vram", "'inf'")),
    ((*FLUX, "--vram", "24", "--gpu", "4090"), ("--gpu and --vram",)),
    ((*FLUX, "--vram", "24", "--headroom", "-1"), ("--headroom", "-1")),
    ((*FLUX, "--vram", "24", "--headroom", "24"), ("--headroom 24", "leaves nothing")),
    ((*FLUX, "--host-ram", "x"), ("--host-ram", "'x'")),
    ((*FLUX, "--host-ram", "-1"), ("--host-ram", "-1")),
    ((*FLUX, "--model", "sd3"), ("--model is given twice",)),
    ((*FLUX, "--nonsense", "1"), ("--nonsense",)),
    ((*FLUX, "--modle", "x"), ("--modle", "--model")),
    (("--model",), ("--model", "requires an argument")),
    (("--gpu", "4090"), ("--model is missing",)),
    (("flux",), ("unknown command 'flux'", "advise --model", "models")),
    (("--json", "models"), ("--json goes after the command 'models'",)),
    ((*FLUX, "gpus"), ("--model goes after the command 'gpus'",)),
    ((*FLUX, "--variant", ""), ("--variant ''", "empty")),
    ((*FLUX, "--executor", ""), ("--executor ''", "bundled")),
    ((*FLUX, "--objective", ""), ("--objective ''", "ladder")),
    ((*FLUX, "--headroom", ""), ("--headroom", "''")),
    ((*FLUX, "--weights-offload", ""), ("--weights-offload ''",)),
    ((*FLUX, "--batch", "\u0661"), ("--batch", "whole number", "'\u0661'")),
    ((*FLUX, "--resolution", "\u0665\u0661\u0662"), ("--resolution", "is not a size")),
    ((*FLUX, "--bucket", "\u0665\u0661\u0662x512"), ("--bucket", "is not a size")),
    (("max", *FLUX, "--gpu", "4090", "--executor", ""), ("--executor ''",)),
    (
        ("--model-class", "a.b:C", "--model-config", "/no/such.toml"),
        ("--model-config /no/such.toml: no such file",),
    ),
    (("models", ""), ("NAME ''", "flux")),
    (("verify", ""), ("PLAN ''", "not a file name")),
    (("run", ""), ("PLAN ''", "not a file name")),
    (("batch", ""), ("FILE ''", "not a file name")),
    (("import", ""), ("CONFIG ''", "not a file name")),
    (("calibrate", ""), ("RECEIPTS ''", "not a file name")),
    (("models", "fluxx"), ("'fluxx'", "flux")),
    (("models", "flux", "sd3"), ("sd3",)),
    (("gpus", "--csv"), ("--csv",)),
    (("batch",), ("FILE",)),
    (("batch", "/no/such/file"), ("/no/such/file", "does not exist")),
    (("batch", "/"), ("/", "is a folder")),
    (("probe",), ("--model is missing",)),
    (("probe", "--model", "flux", "--batch", "x"), ("--batch", "'x'")),
    (("verify",), ("PLAN",)),
    (("verify", "/no/such/plan.json"), ("/no/such/plan.json", "no such file")),
    (("verify", "plan.json", "--steps", "0"), ("--steps", "not 0")),
    (("verify", "plan.json", "--device", "tpu"), ("--device", "'tpu'", "auto, cpu, cuda")),
    (("run", "/no/such/plan.json"), ("/no/such/plan.json", "no such file")),
    (("run", "plan.json", "--steps", "many"), ("--steps", "'many'")),
    (("run", "plan.json", "--seed", "-1"), ("--seed", "-1")),
    (("run", "plan.json", "--lr", "0"), ("--lr must be a number above 0", "0")),
    (("run", "plan.json", "--lr", "fast"), ("--lr", "'fast'")),
    (("run", "plan.json", "--accumulate", "0"), ("--accumulate", "from 1")),
    (("run", "plan.json", "--checkpoint-every", "1.5"), ("--checkpoint-every", "1.5")),
    (("run", "plan.json", "--device", "gpu"), ("--device 'gpu'", "cuda")),
    (("run", "plan.json", "--metrics", "/no/such/m.jsonl"), ("--metrics /no/such/m.jsonl", "does not exist")),
    (("run", "plan.json", "--metrics", "/"), ("--metrics /", "folder")),
    (("run", "plan.json", "--latents", "/no/such"), ("--latents /no/such", "does not exist")),
    (("run", "plan.json", "--output", "/no/such/folder"), ("--output /no/such/folder", "does not exist")),
]


@pytest.mark.parametrize(("args", "parts"), BAD, ids=lambda value: " ".join(value)[:60] if value else "none")
def test_bad_input_is_one_line_that_names_it(advise: Advise, args: tuple[str, ...], parts: tuple[str, ...]) -> None:
    done = advise(*args)
    assert done.status == 2
    assert done.out == ""
    for part in parts:
        assert part in done.error


def test_what_is_valid_but_not_estimated_yet_says_so(advise: Advise, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_yet(_: Any) -> None:
        raise NotYetError("--weights-offload blocks:2 cannot be estimated yet; none can")

    monkeypatch.setattr("probes.workload.check_supported", not_yet)
    done = advise(*FLUX, "--weights-offload", "blocks:2")
    assert done.status == 2
    assert done.error == "--weights-offload blocks:2 cannot be estimated yet; none can"


def test_nothing_given_prints_the_help_and_is_bad_usage(advise: Advise) -> None:
    done = advise()
    assert done.status == 2
    assert done.out == ""
    assert "Usage: advise" in done.err


@pytest.fixture
def never_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(*_: Any, **__: Any) -> None:
        raise AssertionError("the slow part began")

    monkeypatch.setattr("advisor.api.Session.plan", plan)


@pytest.mark.usefixtures("never_traced")
@pytest.mark.parametrize("option", ["--export", "--plan"])
def test_a_bad_output_path_is_refused_before_anything_slow(advise: Advise, tmp_path: Path, option: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for target, part in (
        (tmp_path / "missing" / "a.json", "does not exist"),
        (tmp_path, "is a folder"),
        (tmp_path / "file" / "a.json", "is not a folder"),
        (tmp_path / "loop", ""),
        (tmp_path / ("n" * 300), "name too long"),
        ("/dev/null", "on a disk"),
        ("/dev/stdout", "on a disk"),
        ("", "is not a file name"),
        ("-", "is not a file name"),
        ("~nobody-of-that-name/a.json", ""),
    ):
        done = advise(*SMALL, "--gpu", "4090", option, str(target))
        assert done.status == 2
        assert option in done.error
        assert part in done.error
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.usefixtures("never_traced")
def test_outputs_that_cannot_be_both_are_refused(advise: Advise, tmp_path: Path) -> None:
    same = advise(*SMALL, "--gpu", "4090", "--export", f"{tmp_path}/a.json", "--plan", f"{tmp_path}/./a.json")
    assert "both name" in same.error
    assert "needs a card" in advise(*SMALL, "--export", f"{tmp_path}/a.json").error


@pytest.mark.usefixtures("never_traced")
def test_a_folder_that_cannot_be_written_is_refused(
    advise: Advise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    done = advise(*SMALL, "--gpu", "4090", "--export", f"{tmp_path}/a.json")
    assert f"--export {tmp_path}/a.json: cannot be written (Permission denied)" in done.error


@pytest.mark.parametrize("failing", [1, 2])
def test_no_disk_leaves_nothing_behind(
    advise: Advise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    replace, calls = os.replace, []

    def full(source: str, target: Any) -> None:
        if Path(target).parent == tmp_path:
            calls.append(target)
            if len(calls) == failing:
                raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr("os.replace", full)
    done = advise(*SMALL, "--gpu", "4090", "--export", f"{tmp_path}/a.json", "--plan", f"{tmp_path}/b.json")
    assert done.status == 2
    assert "No space left on device" in done.error
    assert f"--{'export' if failing == 1 else 'plan'}" in done.error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["probes.traced.TraceError", "probes.build.BuildError"])
def test_a_model_that_cannot_be_traced_is_one_line(
    advise: Advise, monkeypatch: pytest.MonkeyPatch, where: str, tmp_path: Path
) -> None:
    import importlib

    module, name = where.rsplit(".", 1)
    kind = getattr(importlib.import_module(module), name)

    def fail(*_: Any, **__: Any) -> None:
        raise kind("it cannot\nbe done")

    monkeypatch.setattr("probes.traced.trace", fail)
    monkeypatch.setenv("ADVISE_CACHE_DIR", str(tmp_path))
    done = advise(*SMALL, "--gpu", "4090")
    assert done.status == 2
    assert done.err.splitlines()[-1] == "advise: error: it cannot be done"
    assert "Traceback" not in done.err


def test_an_unexpected_error_is_one_line_too(advise: Advise, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("oops")

    monkeypatch.setattr("advisor.api.Session.plan", fail)
    done = advise(*SMALL, "--gpu", "4090")
    assert done.status == 2
    assert "unexpected KeyError" in done.error
    assert "ADVISE_DEBUG" in done.error


@pytest.mark.parametrize(
    ("number", "status", "line"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "stopped by SIGTERM")]
)
def test_interrupting_a_trace_is_one_line_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals, status: int, line: str
) -> None:
    cache, export = tmp_path / "cache", tmp_path / "a.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "advisor.cli", *SMALL, "--gpu", "4090", "--export", str(export)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(cache),
    )
    assert process.stderr is not None
    assert "tracing z_image" in process.stderr.readline()
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert out == ""
    assert err.strip() == f"advise: error: {line}"
    assert not export.exists()
    assert not cache.exists() or list(cache.iterdir()) == []


STOPPED_EARLY = """
import os, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "typer":
            os.kill(os.getpid(), int(sys.argv[1]))
sys.meta_path.insert(0, Finder())
from advisor.entry import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("number", "status", "line"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "stopped by SIGTERM")]
)
def test_a_signal_while_the_command_is_imported_is_one_line(
    cache: Path, number: signal.Signals, status: int, line: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STOPPED_EARLY, str(int(number))],
        capture_output=True,
        text=True,
        env=environment(cache),
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, "", f"advise: error: {line}\n")


def test_the_installed_command_starts_where_signals_are_answered(cache: Path) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"advise": "advisor.entry:main"}
    code = "import sys; from advisor.entry import main; sys.argv[1:] = ['--version']; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(cache), check=True
    )
    assert done.stdout.startswith("advise ")


def test_a_reader_that_goes_away_is_silent(cache: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        for args in (["gpus"], ["--help"], [*SMALL, "--gpu", "4090", "--json"]):
            done = subprocess.run(
                [sys.executable, "-m", "advisor.cli", *args],
                stdout=write,
                stderr=subprocess.PIPE,
                env=environment(cache),
                check=False,
            )
            assert done.stderr == b""
            assert done.returncode == 141
    finally:
        os.close(write)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("args", [["gpus"], ["models", "--json"], ["--help"]])
def test_a_full_disk_on_standard_output_is_one_line(cache: Path, args: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "advisor.cli", *args],
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment(cache),
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.decode() == "advise: error: standard output: No space left on device\n"


def test_an_ascii_terminal_is_no_reason_to_fail(cache: Path) -> None:
    done = in_process_of_its_own(["--help"], cache, PYTHONIOENCODING="ascii")
    assert done.status == 0
    assert "Usage: advise" in done.out
