"""A run can be stopped, resumed and squeezed into less memory without a change to its losses."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from advisor.interruption import Interruption, Stopped
from advisor.training import OutOfMemory, checkpoints, loop, run
from advisor.training.memory import is_out_of_memory, smaller
from advisor.verification import verify
from estimators.estimate import Estimate
from estimators.schedule import Backend, Schedule
from probes.workload import WorkloadError, from_request

NONE, FFN, TORCH, UNSLOTH = (
    Schedule(backend=b) for b in (Backend.NONE, Backend.TORCH_FFN, Backend.TORCH, Backend.UNSLOTH)
)


def _estimate(schedule: Schedule, peak: int, *, fits: bool = True, supported: bool = True) -> Estimate:
    return Estimate(schedule, supported, None, peak=peak, reserved=peak, fits=fits)


TABLE = (
    _estimate(NONE, 40),
    _estimate(FFN, 30),
    _estimate(Schedule.per_block(["recompute"]), 25),  # of a model with one block
    _estimate(TORCH, 20),
    _estimate(UNSLOTH, 10),
)
PLAN = SimpleNamespace(workload=from_request({"model": "sd3"}), schedule=NONE, schedules=TABLE)


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latents")
    for i in range(5):
        save_file({"hidden_states": torch.randn(16, 32, 32)}, str(folder / f"{i}.safetensors"))
    return folder


@pytest.fixture(scope="module")
def uninterrupted(latents: Path) -> tuple[float, ...]:
    return run(PLAN, steps=7, latents=latents, accumulate=2, lr=0.01, device="cpu").losses


class _StopAfter(Interruption):
    """Asks for a stop when that many steps are done."""

    def __init__(self, steps: int) -> None:
        super().__init__(lambda _: None)
        self.steps = steps

    def on_step(self, number: int, loss: float, seconds: float) -> None:
        if number == self.steps:
            self.asked = int(signal.SIGTERM)


def test_the_losses_are_those_of_the_same_seed_only(uninterrupted: tuple[float, ...], latents: Path) -> None:
    again = run(PLAN, steps=2, latents=latents, accumulate=2, lr=0.01, device="cpu")
    assert again.losses == uninterrupted[:2]
    assert run(PLAN, steps=1, latents=latents, accumulate=2, lr=0.01, seed=1, device="cpu").losses != again.losses[:1]
    assert run(PLAN, steps=1, latents=latents, accumulate=1, lr=0.01, device="cpu").losses != again.losses[:1]
    slower = run(PLAN, steps=2, latents=latents, accumulate=2, lr=0.001, device="cpu").losses
    assert slower[0] == again.losses[0]
    assert slower[1] != again.losses[1]


@pytest.mark.parametrize(
    ("adapter", "optimizer"),
    [("lora", "adamw"), ("lokr", "adamw"), ("loha", "torch-nadam"), ("full", "adamw"), ("lora", "sgd-momentum")],
)
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(tmp_path: Path, adapter: str, optimizer: str) -> None:
    request = {"model": "sd3", "adapter": adapter, "optimizer": optimizer}
    plan = SimpleNamespace(workload=from_request(request), schedule=TORCH)
    whole = run(plan, steps=5, lr=0.01, device="cpu").losses
    first = run(plan, steps=3, lr=0.01, output=tmp_path, checkpoint_every=3, device="cpu")
    second = run(plan, steps=5, output=tmp_path, resume=True, device="cpu")
    assert first.losses + second.losses == whole
    assert (second.first_step, second.lr) == (4, 0.01)


def test_training_lowers_the_loss() -> None:
    plan = SimpleNamespace(workload=from_request({"model": "z_image"}), schedule=NONE)
    still, learning = (run(plan, steps=30, lr=lr, device="cpu").losses[-10:] for lr in (1e-12, 0.02))
    assert sum(learning) < 0.97 * sum(still)


def test_a_stopped_run_saves_its_step_and_resumes_to_the_same_losses(
    tmp_path: Path, latents: Path, uninterrupted: tuple[float, ...]
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    more: dict[str, Any] = {"latents": latents, "output": tmp_path, "metrics": metrics, "device": "cpu"}
    stop = _StopAfter(4)
    with pytest.raises(Stopped, match=r"stopped by SIGTERM after step 4; .*checkpoint-00000004.* --resume") as raised:
        run(PLAN, steps=7, accumulate=2, lr=0.01, on_step=stop.on_step, interruption=stop, checkpoint_every=3, **more)
    assert raised.value.status == 143
    assert [p.name[-9:] for p in checkpoints.found(tmp_path / "checkpoints")] != []
    result = run(PLAN, steps=7, resume=True, **more)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert tuple(line["loss"] for line in lines if "loss" in line) == uninterrupted
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 8))
    assert result.losses == uninterrupted[4:]


def test_without_an_output_folder_a_stopped_run_says_that_nothing_is_saved() -> None:
    stop = _StopAfter(1)
    with pytest.raises(Stopped, match=r"after step 1; nothing was saved \(no --output\)"):
        run(PLAN, steps=3, device="cpu", on_step=stop.on_step, interruption=stop)


def test_a_checkpoint_is_data_with_its_settings(tmp_path: Path) -> None:
    result = run(PLAN, steps=1, output=tmp_path, checkpoint_every=1, seed=5, device="cpu")
    assert result.checkpoint is not None
    with safe_open(str(result.checkpoint), framework="pt") as file:
        content = json.loads(file.metadata()["advise_checkpoint"])
        names = set(file.keys())
    assert (content["step"], content["settings"]["seed"], content["settings"]["lr"]) == (1, 5, 1e-4)
    assert {name.partition(".")[0] for name in names} == {"model", "optimizer"}
    assert sum(name.endswith(".exp_avg") for name in names) == sum(name.startswith("model.") for name in names)
    assert not list(tmp_path.rglob(".*"))


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run(PLAN, steps=2, output=folder, checkpoint_every=1, device="cpu")
    return folder


@pytest.fixture
def copied(two_checkpoints: Path, tmp_path: Path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    for path in checkpoints.found(two_checkpoints / "checkpoints"):
        (tmp_path / "checkpoints" / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other"])
def test_a_damaged_checkpoint_is_named_with_what_to_do(copied: Path, damage: str) -> None:
    newest = checkpoints.found(copied / "checkpoints")[-1]
    content = bytearray(newest.read_bytes())
    if damage == "cut":
        newest.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        content[-3] ^= 4
        newest.write_bytes(content)
    elif damage == "empty":
        newest.write_bytes(b"")
    else:
        save_file({"a": torch.zeros(1)}, str(newest))
    with pytest.raises(WorkloadError) as raised:
        run(PLAN, steps=3, output=copied, resume=True, device="cpu")
    message = str(raised.value)
    assert "\n" not in message
    assert f"{newest} is damaged" in message
    assert "delete it, and --resume goes on from checkpoint-00000001.safetensors" in message
    newest.unlink()
    assert run(PLAN, steps=3, output=copied, resume=True, device="cpu").first_step == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"seed": 1}, r"--seed is not what .* was trained with \(0 then, 1 now\)"),
        ({"accumulate": 3}, r"--accumulate is not what"),
        ({"plan": SimpleNamespace(workload=from_request({"model": "sd3", "rank": 2}), schedule=NONE)}, "the plan is not what"),
        ({"steps": 1}, "--steps 1: .* is at step 2 already; give more steps"),
    ],
)  # fmt: skip
def test_a_checkpoint_of_another_run_is_refused(copied: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        run(**{"plan": PLAN, "steps": 3, "output": copied, "resume": True, "device": "cpu", **more})


def test_other_data_is_refused_and_another_rate_is_said(copied: Path, latents: Path) -> None:
    with pytest.raises(WorkloadError, match="--latents is not what"):
        run(PLAN, steps=3, output=copied, resume=True, latents=latents, device="cpu")
    result = run(PLAN, steps=3, output=copied, resume=True, lr=0.5, device="cpu")
    assert "the learning rate is 0.5, before it was 0.0001" in result.notes


def test_a_run_that_was_done_only_saves_its_result(copied: Path) -> None:
    result = run(PLAN, steps=2, output=copied, resume=True, device="cpu")
    assert (result.losses, result.seconds_per_step) == ((), None)
    assert result.saved is not None
    assert result.saved.exists()


def test_checkpoints_need_a_folder_and_a_new_run_another_one(copied: Path, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="--resume needs --output"):
        run(PLAN, steps=1, resume=True)
    with pytest.raises(WorkloadError, match="--checkpoint-every needs --output"):
        run(PLAN, steps=1, checkpoint_every=1)
    with pytest.raises(WorkloadError, match=r"holds an earlier run \(checkpoint-00000002"):
        run(PLAN, steps=1, output=copied)
    with pytest.raises(WorkloadError, match=r"no checkpoint in .*; leave --resume out"):
        run(PLAN, steps=1, output=tmp_path / "new", resume=True)


@pytest.mark.parametrize("where", ["write", "sync", "rename"])
def test_an_error_or_interruption_while_saving_leaves_the_earlier_checkpoint_and_nothing_else(
    copied: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    target = {"write": "safetensors.torch.save_file", "sync": "os.fsync", "rename": "os.replace"}[where]
    before = {p: p.read_bytes() for p in (copied / "checkpoints").iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(target, fail)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.write_safetensors(copied / "checkpoints" / "checkpoint-00000002.safetensors", {}, {})
    assert {p: p.read_bytes() for p in (copied / "checkpoints").iterdir()} == before


class _Memory:
    """Raises an out-of-memory error in the forward pass of a chosen step, as often as asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: int, times: int, part: int = 1) -> None:
        self.left, self.step, self.part, self.calls = times, step, part, 0
        self.real = loop.apply
        monkeypatch.setattr(loop, "apply", self.apply)
        self.hooked: set[int] = set()
        self.number = 0

    def apply(self, model: Any, schedule: Any, **more: Any) -> Any:
        if id(model) not in self.hooked:
            self.hooked.add(id(model))
            block = model.transformer_blocks[2]
            block.register_forward_pre_hook(self.hook)
        return self.real(model, schedule, **more)

    def hook(self, module: Any, args: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # a recomputation in backward
        self.calls += 1
        if self.left and self.calls >= 2 * (self.step - 1) + self.part:
            self.left -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize(("times", "last", "part"), [(1, FFN, 2), (2, TORCH, 1), (3, UNSLOTH, 2)])
def test_out_of_memory_goes_on_under_the_next_smaller_schedule_with_the_same_losses(
    times: int,
    last: Schedule,
    part: int,
    latents: Path,
    uninterrupted: tuple[float, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = _Memory(monkeypatch, step=3, times=times, part=part)
    said: list[str] = []
    metrics = tmp_path / "metrics.jsonl"
    result = run(PLAN, steps=7, latents=latents, accumulate=2, lr=0.01, device="cpu", metrics=metrics, say=said.append)
    assert fake.left == 0
    assert result.losses == uninterrupted
    assert result.schedule == last.name
    events = [json.loads(line) for line in metrics.read_text().splitlines() if "event" in line]
    assert [e["next_schedule"] for e in events] == [s.name for s in (FFN, TORCH, UNSLOTH)][:times]
    assert {e["step"] for e in events} == {3}
    assert all("out of memory in step 3" in text for text in said if "memory" in text)
    assert sum("the step is run again under" in note for note in result.notes) == times
    if times > 1:
        assert any("was not tried" in note and "blocks" in note for note in result.notes)


def test_out_of_memory_in_backward_is_answered_alike(
    latents: Path, uninterrupted: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [1]
    real = loop.Objective.loss

    def loss(self: Any, job: Any, clean: Any) -> torch.Tensor:
        handle = job.model.transformer_blocks[1].register_forward_hook(lambda m, a, out: (out[0], watched(out[1])))
        try:
            return real(self, job, clean)
        finally:
            handle.remove()

    def watched(tensor: torch.Tensor) -> torch.Tensor:
        tensor.register_hook(fail)
        return tensor

    def fail(gradient: torch.Tensor) -> None:
        if left and left.pop():
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loop.Objective, "loss", loss)
    result = run(PLAN, steps=2, latents=latents, accumulate=2, lr=0.01, device="cpu")
    assert not left
    assert result.schedule == FFN.name
    assert result.losses == uninterrupted[:2]


def test_out_of_memory_with_nothing_smaller_is_one_line_and_keeps_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _Memory(monkeypatch, step=2, times=9)
    with pytest.raises(OutOfMemory, match=r"step 2 under unsloth, and the plan has no smaller schedule") as raised:
        run(PLAN, steps=3, accumulate=2, output=tmp_path, checkpoint_every=1, device="cpu")
    assert "\n" not in str(raised.value)
    assert "checkpoint-00000001.safetensors" in str(raised.value)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["checkpoint-00000001.safetensors"]


def test_a_resumed_run_goes_on_under_the_schedule_that_it_had_come_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(PLAN, steps=3, accumulate=2, device="cpu").losses
    with monkeypatch.context() as patch:
        _Memory(patch, step=1, times=2)
        first = run(PLAN, steps=2, accumulate=2, output=tmp_path, checkpoint_every=2, device="cpu")
    second = run(PLAN, steps=3, output=tmp_path, resume=True, device="cpu")
    assert (first.schedule, second.schedule) == (TORCH.name, TORCH.name)
    assert first.losses + second.losses == whole
    assert any("had come to the schedule torch" in note for note in second.notes)


def test_weights_that_do_not_fit_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loop, "real_job", fail)
    with pytest.raises(OutOfMemory, match="the weights of sd3 do not fit into the memory that is free here"):
        run(PLAN, steps=1, device="cpu")


def test_a_plan_with_ramtorch_is_run_and_verified_with_the_weights_on_the_device_and_both_say_so() -> None:
    streamed = SimpleNamespace(
        **{**vars(PLAN), "workload": from_request({"model": "sd3", "weights_offload": "ramtorch"})}
    )
    said = "--weights-offload ramtorch: this runtime keeps the weights on the device"
    assert any(n.startswith(said) for n in run(streamed, steps=1, device="cpu").notes)
    found = verify(streamed, steps=1, device="cpu")
    assert any(n.startswith(said) for n in found.notes)
    assert found.memory_within


def test_gradients_that_are_held_between_batches_are_noted() -> None:
    assert any("with --accumulate the gradients (0.000 GiB)" in n for n in run(PLAN, steps=1, accumulate=2).notes)
    assert not any("--accumulate" in n for n in run(PLAN, steps=1).notes)


def test_out_of_memory_in_the_optimizer_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.optim.AdamW, "step", fail)
    with pytest.raises(OutOfMemory, match="in the optimizer's update of step 1, which no schedule makes smaller"):
        run(PLAN, steps=1, device="cpu")


def test_other_errors_are_not_taken_for_missing_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(loop.Objective, "loss", fail)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        run(PLAN, steps=1, device="cpu")
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(ValueError("not enough memory"))


def test_smaller_schedules_are_supported_fit_and_come_largest_first() -> None:
    table = [
        _estimate(NONE, 40),
        _estimate(UNSLOTH, 10),
        _estimate(TORCH, 20),
        dataclasses.replace(_estimate(Schedule(backend=Backend.TORCH, interval=2), 20), step_seconds=-1.0),
        _estimate(FFN, 30, fits=False),
        _estimate(Schedule(backend=Backend.UNSLOTH_FFN), 25, supported=False),
    ]
    names = [e.schedule.name for e in smaller(table, NONE, None)]
    assert names == ["torch interval=2", "torch", "unsloth"]
    assert next(e.schedule for e in smaller(table, NONE, 15)) == UNSLOTH
    assert smaller(table, UNSLOTH, None) == []
    assert smaller([], NONE, None) == []
    nothing_fits = [dataclasses.replace(e, fits=False) for e in table]
    assert next(e.schedule for e in smaller(nothing_fits, NONE, None)) == FFN


def test_metrics_have_a_line_a_step_and_replace_an_earlier_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 9}\n{"step": 2, "lo')
    result = run(PLAN, steps=2, metrics=path, device="cpu")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["loss"] for line in lines] == list(result.losses)
    keys = {"step", "loss", "seconds", "lr", "schedule", "allocated_bytes", "reserved_bytes"}
    assert all(set(line) == keys and line["allocated_bytes"] is None for line in lines)


def test_a_run_that_does_not_start_leaves_the_metrics_of_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 9}\n')
    monkeypatch.setattr(loop, "real_job", fail)
    with pytest.raises(OutOfMemory):
        run(PLAN, steps=2, metrics=path, device="cpu")
    assert path.read_text() == '{"step": 1, "loss": 9}\n'
    path = tmp_path / "folder" / "metrics.jsonl"
    path.parent.mkdir()
    monkeypatch.undo()
    monkeypatch.setattr(
        "probes.store.os.replace", lambda *_: (_ for _ in ()).throw(OSError(30, "Read-only file system"))
    )
    with pytest.raises(WorkloadError, match=r"--metrics .* cannot be written \(Read-only file system\)"):
        run(PLAN, steps=1, metrics=path, device="cpu")


def test_metrics_are_on_disk_when_a_step_is_done(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    seen: list[int] = []
    run(PLAN, steps=3, metrics=path, device="cpu", on_step=lambda *_: seen.append(len(path.read_text().splitlines())))
    assert seen == [1, 2, 3]


@pytest.mark.parametrize("content", ["name,value\n", '{"other": 1}\n', "\xff\n"])
def test_metrics_never_replace_another_file(tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "real_job", lambda *a, **k: pytest.fail("built a model"))
    path = tmp_path / "notes.txt"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(WorkloadError, match="give another name"):
        run(PLAN, steps=1, metrics=path, device="cpu")
    assert path.read_bytes() == content.encode("latin-1")


def test_a_full_disk_ends_the_metrics_but_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = loop.Metrics.write

    def write(self: Any, **values: Any) -> None:
        if values["step"] == 2:
            self._file.close()
            self._file = _Full()
        real_write(self, **values)

    class _Full:
        def write(self, _: str) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            pass

    monkeypatch.setattr(loop.Metrics, "write", write)
    result = run(PLAN, steps=3, metrics=tmp_path / "m.jsonl", device="cpu")
    assert len(result.losses) == 3
    assert any("no longer written (No space left on device)" in note for note in result.notes)


def test_a_checkpoint_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checkpoints.write_safetensors

    def full(path: Path, *rest: Any) -> None:
        if "00000002" in path.name:
            raise OSError(28, "No space left on device")
        real(path, *rest)

    monkeypatch.setattr(checkpoints, "write_safetensors", full)
    result = run(PLAN, steps=3, output=tmp_path, checkpoint_every=1, metrics=tmp_path / "m.jsonl", device="cpu")
    assert "the checkpoint of step 2 could not be written (No space left on device)" in result.notes
    assert [p.name for p in checkpoints.found(tmp_path / "checkpoints")] == [
        f"checkpoint-0000000{i}.safetensors" for i in (1, 3)
    ]
    assert '"event": "checkpoint_failed", "step": 2' in (tmp_path / "m.jsonl").read_text()


def test_a_result_that_cannot_be_written_names_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(loop.weights, "write_safetensors", full)
    with pytest.raises(
        WorkloadError, match=r"could not be written \(No space left on device\); .*-00000002\.safetensors"
    ):
        run(PLAN, steps=2, output=tmp_path, checkpoint_every=2, device="cpu")


def test_an_earlier_result_that_is_replaced_is_noted(tmp_path: Path) -> None:
    first, second = (run(PLAN, steps=1, output=tmp_path, device="cpu") for _ in range(2))
    assert not any("was replaced" in note for note in first.notes)
    assert f"{tmp_path / 'pytorch_lora_weights.safetensors'} of an earlier run was replaced" in second.notes


def test_a_loss_that_is_not_finite_stops_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loop._Trainer, "_forward_backward", lambda self, number: float("nan"))
    with pytest.raises(WorkloadError, match="the loss of step 1 is nan; the run is stopped"):
        run(PLAN, steps=2, output=tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def handlers() -> Iterator[None]:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.usefixtures("handlers")
def test_the_first_signal_waits_and_the_second_does_not() -> None:
    said: list[str] = []
    with Interruption(said.append) as interruption:
        with interruption.deferred():
            signal.raise_signal(signal.SIGTERM)
            assert interruption.asked == signal.SIGTERM
            with pytest.raises(Stopped) as raised:
                signal.raise_signal(signal.SIGINT)
            assert raised.value.status == 130
        assert len(said) == 1
        with pytest.raises(Stopped, match="stopped by SIGTERM"):
            signal.raise_signal(signal.SIGTERM)


def test_the_saved_adapter_of_a_resumed_run_is_that_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(PLAN, steps=4, lr=0.01, output=whole, device="cpu")
    run(PLAN, steps=2, lr=0.01, output=parts, checkpoint_every=2, device="cpu")
    run(PLAN, steps=4, output=parts, resume=True, device="cpu")
    a, b = (load_file(folder / "pytorch_lora_weights.safetensors") for folder in (whole, parts))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[k], b[k]) for k in a)
