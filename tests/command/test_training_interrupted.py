"""`advise run` in a process of its own, stopped by signals: while it trains, while it saves, and by force."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command_helpers import Done, environment

SLOW_SAVE = """
import sys, time
import safetensors.torch
real = safetensors.torch.save_file
def slow(tensors, path, metadata=None):
    real(tensors, path, metadata=metadata)
    if "checkpoint" in str(path):
        print("SAVING", file=sys.stderr, flush=True)
        time.sleep(1.0)
safetensors.torch.save_file = slow
"""
MAIN = "from advisor.cli import main; import sys; sys.exit(main(sys.argv[1:]))"


class Running:
    """A run that goes on for ever."""

    def __init__(self, folder: Path, cache: Path, plan: str, *, before: str = "", steps: int = 100_000) -> None:
        self.output = folder / "out"
        self.metrics = folder / "metrics.jsonl"
        (folder / "plan.json").write_text(plan)
        args = ["run", str(folder / "plan.json"), "--steps", str(steps), "--metrics", str(self.metrics)]
        self.args = [*args, "--output", str(self.output), "--checkpoint-every", "3"]
        self.environment = environment(cache)
        self.process = subprocess.Popen(
            [sys.executable, "-c", before + MAIN, *self.args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
        )

    def wait_for(self, what: Callable[[], bool]) -> None:
        limit = time.monotonic() + 120
        while not what():
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < limit
            time.sleep(0.01)

    def wait_for_steps(self, count: int) -> None:
        self.wait_for(lambda: self.metrics.exists() and len(self.steps()) >= count)

    def wait_for_saving(self) -> None:
        assert self.process.stderr is not None
        while "SAVING" not in (line := self.process.stderr.readline()):
            assert line, "the run ended before it saved"

    def steps(self) -> list[int]:
        """Numbers of the steps in the metrics."""
        lines = self.metrics.read_text().splitlines()
        return [json.loads(line)["step"] for line in lines if line.endswith("}") and '"loss"' in line]

    def end(self) -> tuple[int, str]:
        """Exit status and the last line on standard error."""
        _, err = self.process.communicate(timeout=120)
        return self.process.returncode, err.splitlines()[-1] if err else ""

    def names(self) -> list[str]:
        folder = self.output / "checkpoints"
        return sorted(p.name for p in folder.iterdir()) if folder.exists() else []

    def resumes(self, steps: int, advise: Callable[..., Done]) -> None:
        """Two more steps after the `steps` that are done, and nothing but whole files is left."""
        self.args[self.args.index("--steps") + 1] = str(steps + 2)
        done = advise(*self.args, "--resume", "--json")
        assert done.status == 0, done.err
        assert json.loads(done.out)["first_step"] == steps + 1
        assert self.steps() == list(range(1, steps + 3))
        assert not [name for name in self.names() if name.startswith(".")]
        assert (self.output / "pytorch_lora_weights.safetensors").exists()


Advise = Callable[..., Done]


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_ends_the_step_saves_a_checkpoint_and_says_so(
    number: int, status: int, tmp_path: Path, cache: Path, plan_text: str, advise: Advise
) -> None:
    running = Running(tmp_path, cache, plan_text)
    running.wait_for_steps(4)
    running.process.send_signal(number)
    found, line = running.end()
    done = running.steps()[-1]
    assert found == status
    assert f"stopped by {signal.Signals(number).name} after step {done}" in line
    assert f"checkpoint-{done:08d}.safetensors is there, and --resume goes on from it" in line
    assert not (running.output / "pytorch_lora_weights.safetensors").exists()
    running.resumes(done, advise)


def test_a_signal_while_saving_lets_the_file_be_finished(
    tmp_path: Path, cache: Path, plan_text: str, advise: Advise
) -> None:
    running = Running(tmp_path, cache, plan_text, before=SLOW_SAVE)
    running.wait_for_saving()
    running.process.send_signal(signal.SIGINT)
    found, line = running.end()
    assert found == 130
    assert "after step 3; " in line
    assert running.names() == ["checkpoint-00000003.safetensors"]
    running.resumes(3, advise)


@pytest.mark.slow
def test_a_second_signal_while_saving_stops_at_once_and_leaves_the_earlier_checkpoint(
    tmp_path: Path, cache: Path, plan_text: str, advise: Advise
) -> None:
    running = Running(tmp_path, cache, plan_text, before=SLOW_SAVE)
    running.wait_for_saving()
    running.wait_for_saving()
    running.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    running.process.send_signal(signal.SIGTERM)
    found, line = running.end()
    assert found == 143
    assert "stopped by SIGTERM at once; " in line
    assert "checkpoint-00000003.safetensors is there" in line
    assert running.names() == ["checkpoint-00000003.safetensors"]
    running.resumes(3, advise)


@pytest.mark.slow
def test_a_run_that_is_killed_while_saving_resumes_from_the_earlier_checkpoint(
    tmp_path: Path, cache: Path, plan_text: str, advise: Advise
) -> None:
    running = Running(tmp_path, cache, plan_text, before=SLOW_SAVE)
    running.wait_for_saving()
    running.wait_for_saving()
    running.process.kill()
    running.end()
    whole = [name for name in running.names() if not name.startswith(".")]
    assert whole == ["checkpoint-00000003.safetensors"]
    running.resumes(3, advise)


def test_a_signal_before_the_first_step_ends_the_run_with_nothing_written(
    tmp_path: Path, cache: Path, plan_text: str
) -> None:
    before = "import advisor.training.loop as l\nl.real_job = lambda *a, **k: [print('SAVING', file=sys.stderr, flush=True), time.sleep(60)]\n"
    running = Running(tmp_path, cache, plan_text, before="import sys, time\n" + before)
    running.wait_for_saving()
    running.process.send_signal(signal.SIGTERM)
    found, line = running.end()
    assert (found, line) == (143, "advise: error: stopped by SIGTERM")
    assert running.names() == []
