"""Stored profiles: read back equal, rebuilt when damaged, never in the way of an answer."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes import store
from probes.profile import Profile
from probes.structure import Block, Chain, Structure
from probes.tape import NEVER, Call, Tape
from probes.workload import from_request

TARGET = "cuda flash=True attention=auto"


def make_profile(**changes: Any) -> Profile:
    tape = Tape(
        length=40,
        backward_start=20,
        optimizer_start=39,
        size=np.array([512, 2**40, 0], np.int64),
        birth=np.array([1, 2, 21], np.int64),
        death=np.array([5, int(NEVER), 22], np.int64),
        scratch=np.array([False, False, True]),
        saved_storage=np.array([-1, 0], np.int64),
        saved_at=np.array([3, 4], np.int64),
        unpacked_at=np.array([30, int(NEVER)], np.int64),
        released_at=np.array([31, 35], np.int64),
        saved_movable=np.array([True, False]),
        saved_bytes=np.array([7, 512], np.int64),
        saved_view=np.array([1, 0], np.int64),
        saved_weight=np.array([2, -1], np.int64),
        view_start=np.array([0, 16], np.int64),
        view_extent=np.array([512, 2**40], np.int64),
        view_bytes=np.array([512, 7], np.int64),
        view_type=np.array([0, 1], np.int64),
        op_at=np.array([1, 2, 21], np.int64),
        op_kind=np.array([0, 3, 2], np.int8),
        op_flops=np.array([1e15, 0.0, 0.5], np.float64),
        op_bytes=np.array([3.0, 4.0, 5.0], np.float64),
        op_head=np.array([0, 64, 0], np.int64),
        calls={
            "blocks.0": (Call(2, 9, (0, 1), (True, False), (512, 100)),),
            "blocks.0.ff": (Call(3, 4, (), (), ()), Call(5, 6, (1,), (True,), (9,), (0,), (8,))),
        },
        inner_reads={"blocks.0@ff": (0,), "blocks.1@ff": ()},
    )
    block = Block("blocks.0", "Kind", (("blocks.0.a", "blocks.0.b"), ("blocks.0.c",)), ("blocks.0.attn",), "norm2")
    plain = Profile(
        workload=from_request({"model": "flux"}),
        source="traced",
        target=TARGET,
        versions={"torch": "2.13.0"},
        structure=Structure((Chain("blocks", (block, Block("blocks.1", "Kind")), True), Chain("x", (), None, False))),
        tape=tape,
        base_sizes=((512, 3), (1024, 1)),
        trained_shapes=(((4, 16), 4, 2),),
        input_bytes=(8, 16),
        parameters=12_345,
        block_weights={"blocks.0": ((512, 0), (64, 1)), "blocks.1": ()},
        notes=("a note with ünicode",),
        measured={"blocks/Kind": {"saved_bytes": 5.0, "forward_seconds": 0.25}},
    )
    return dataclasses.replace(plain, **changes)


def same(a: Profile, b: Profile) -> bool:
    for field in dataclasses.fields(Tape):
        left, right = getattr(a.tape, field.name), getattr(b.tape, field.name)
        if isinstance(left, np.ndarray):
            if left.dtype != right.dtype or not np.array_equal(left, right):
                return False
        elif left != right:
            return False
    return all(getattr(a, f.name) == getattr(b, f.name) for f in dataclasses.fields(Profile) if f.name != "tape")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ADVISE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Builder:
    """Counts how often a profile is built."""

    def __init__(self) -> None:
        self.built = 0
        self.warnings: list[str] = []

    def get(self, **options: bool) -> Profile:
        profile = make_profile()
        return store.get(profile.workload, TARGET, "traced", self._build, self.warnings.append, **options)

    def _build(self) -> Profile:
        self.built += 1
        return make_profile()


@pytest.fixture
def builder() -> Builder:
    return Builder()


def _file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


# Round trip ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"source": "measured", "measured": {}},
        {"notes": (), "base_sizes": (), "trained_shapes": (), "input_bytes": ()},
        {"workload": from_request({"model": "wan", "lora_targets": ["to_q"], "batch": 3})},
    ],
)
def test_a_profile_reads_back_equal(changes: dict[str, Any]) -> None:
    profile = make_profile(**changes)
    assert same(store.from_bytes(store.to_bytes(profile)), profile)


def test_a_profile_of_an_empty_tape_reads_back_equal() -> None:
    profile = make_profile()
    empty = {
        f.name: getattr(profile.tape, f.name)[:0]
        for f in dataclasses.fields(Tape)
        if isinstance(getattr(profile.tape, f.name), np.ndarray)
    }
    profile = dataclasses.replace(profile, tape=dataclasses.replace(profile.tape, **empty, calls={}, inner_reads={}))
    assert same(store.from_bytes(store.to_bytes(profile)), profile)


def test_the_second_request_reads_what_the_first_one_stored(builder: Builder) -> None:
    first, second = builder.get(), builder.get()
    assert builder.built == 1
    assert same(first, second)
    assert builder.warnings == []


def test_a_refresh_builds_again_and_stores_the_new_one(builder: Builder, folder: Path) -> None:
    builder.get()
    before = _file(folder).stat().st_mtime_ns
    builder.get(refresh=True)
    assert builder.built == 2
    assert _file(folder).stat().st_mtime_ns > before


def test_a_stored_profile_is_returned_with_the_workload_that_was_asked_for(builder: Builder) -> None:
    builder.get()
    other = dataclasses.replace(make_profile().workload, optimizer="sgd", alpha=3.0)
    found = store.get(other, TARGET, "traced", builder._build, builder.warnings.append)
    assert builder.built == 1
    assert found.workload == other


# Damage --------------------------------------------------------------------------------------------------------------


def _truncate(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes(b ^ 0xFF for b in content[middle : middle + 64]) + content[middle + 64 :]


@pytest.mark.parametrize(
    "damage",
    [_truncate, _flip, lambda _: b"", lambda _: b"not a profile", lambda c: c[:-1], lambda c: b"x" + c],
    ids=["truncated", "flipped", "empty", "text", "last byte", "shifted"],
)
def test_a_damaged_file_is_rebuilt_with_a_warning_and_then_read_again(
    builder: Builder, folder: Path, damage: Any
) -> None:
    builder.get()
    path = _file(folder)
    path.write_bytes(damage(path.read_bytes()))
    assert same(builder.get(), make_profile())
    assert builder.built == 2
    (warning,) = builder.warnings
    assert str(path) in warning
    assert "rebuilt" in warning
    builder.get()
    assert builder.built == 2
    assert len(builder.warnings) == 1


def test_the_file_of_another_job_is_rebuilt_with_a_warning(builder: Builder, folder: Path) -> None:
    builder.get()
    path = _file(folder)
    path.write_bytes(store.to_bytes(make_profile(), "flux-dev-0123"))
    assert same(builder.get(), make_profile())
    assert builder.built == 2
    assert "it is that of flux-dev-0123" in builder.warnings[0]


def test_every_truncation_is_an_error_of_one_kind() -> None:
    content = store.to_bytes(make_profile())
    for length in range(0, len(content), 97):
        with pytest.raises(ValueError, match=r"."):
            store.from_bytes(content[:length])


def _rewritten(**arrays: Any) -> bytes:
    with np.load(io.BytesIO(store.to_bytes(make_profile()))) as file:
        found = {name: file[name] for name in file.files}
    buffer = io.BytesIO()
    np.savez(buffer, **found | arrays)
    return buffer.getvalue()


def _meta(**changes: Any) -> np.ndarray[Any, Any]:
    import json

    with np.load(io.BytesIO(store.to_bytes(make_profile()))) as file:
        meta = json.loads(file["meta"].tobytes())
    return np.frombuffer(json.dumps(meta | changes).encode(), np.uint8)


@pytest.mark.parametrize(
    "changes", [{"format": store.FORMAT + 1}, {"workload": {}}, {"bounds": [1]}, {"calls": {"a": [[]]}}]
)
def test_a_profile_whose_content_has_another_form_is_no_profile(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        store.from_bytes(_rewritten(meta=_meta(**changes)))


NOT_A_TAPE = {
    "another length": {"birth": np.array([1, 2], np.int64)},
    "two axes": {"size": np.zeros((3, 1), np.int64)},
    "a birth after the step": {"birth": np.array([1, 2, 41], np.int64)},
    "a birth before it": {"birth": np.array([-1, 2, 21], np.int64)},
    "a storage that is not there": {"saved_storage": np.array([-1, 3], np.int64)},
    "no storage at all": {"saved_storage": np.array([-2, 0], np.int64)},
    "a negative size": {"size": np.array([512, -1, 0], np.int64)},
    "no number": {"op_flops": np.array([np.nan, 0.0, 0.5])},
    "endless work": {"op_bytes": np.array([np.inf, 4.0, 5.0])},
    "another kind of kernel": {"op_kind": np.array([0, 9, 2], np.int8)},
    "floats for places": {"death": np.array([5.0, 6.0, 22.0])},
    "a call of a storage that is not there": {"meta": _meta(calls={"a": [[2, 9, [7], [True], [512], [], []]]})},
    "a call with lists of other lengths": {"meta": _meta(calls={"a": [[2, 9, [0], [], [512], [], []]]})},
    "a call that ends before it starts": {"meta": _meta(calls={"a": [[9, 2, [], [], [], [], []]]})},
    "a read of a storage that is not there": {"meta": _meta(inner_reads={"a@b": [-1]})},
    "a backward pass after the step": {"meta": _meta(bounds=[40, 50, 39])},
}


@pytest.mark.parametrize("case", sorted(NOT_A_TAPE))
def test_a_tape_that_cannot_be_replayed_is_rebuilt_with_a_warning(builder: Builder, folder: Path, case: str) -> None:
    builder.get()
    _file(folder).write_bytes(_rewritten(**NOT_A_TAPE[case]))
    assert same(builder.get(), make_profile())
    assert builder.built == 2
    assert "rebuilt" in builder.warnings[0]


@pytest.mark.parametrize("content", ["{", "[1]", "[" * 100_000, "\udc80"])
def test_a_small_file_that_is_not_readable_is_told_and_counts_as_empty(folder: Path, content: str) -> None:
    folder.mkdir()
    told: list[str] = []
    assert store.read_small("a.json", told.append) == {}
    assert told == []
    (folder / "a.json").write_bytes(content.encode(errors="surrogateescape"))
    assert store.read_small("a.json", told.append) == {}
    assert str(folder / "a.json") in told[0]


def test_another_format_is_named_with_the_one_that_is_read() -> None:
    with pytest.raises(ValueError, match=f"profile format 99, this version reads {store.FORMAT}"):
        store.from_bytes(_rewritten(meta=_meta(format=99)))


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["ADVISE_CACHE_DIR"] + "/exploded",)


def test_pickled_objects_are_refused_and_not_run(folder: Path) -> None:
    folder.mkdir()
    for content in (_rewritten(size=np.array([_Bomb()], object)), pickle.dumps(_Bomb())):
        with pytest.raises(ValueError, match="not a profile"):
            store.from_bytes(content)
    assert list(folder.iterdir()) == []


# Writing -------------------------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_costs_a_warning_and_not_the_answer(builder: Builder, folder: Path) -> None:
    folder.write_text("a file where the folder should be")
    assert same(builder.get(), make_profile())
    (warning,) = builder.warnings
    assert str(folder) in warning
    assert "could not be stored" in warning


def test_a_full_disk_leaves_no_file_behind(builder: Builder, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_source: str, _target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert same(builder.get(), make_profile())
    assert list(folder.iterdir()) == []
    assert "No space left on device" in builder.warnings[0]


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "plan.json"
    store.atomic_write(path, b"old")

    def interrupted(_source: str, _target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.atomic_write(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(folder.iterdir()) == [path]


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def test_a_written_file_has_the_permissions_that_a_plain_one_would_have(folder: Path, umask: None) -> None:
    store.atomic_write(folder / "a", b"")
    assert (folder / "a").stat().st_mode & 0o777 == 0o640


# Keys ----------------------------------------------------------------------------------------------------------------


def _key(target: str = TARGET, source: str = "traced", **changes: Any) -> str:
    return store.key(dataclasses.replace(make_profile().workload, **changes), target, source)


@pytest.mark.parametrize(
    "changes",
    [
        {"height": 512},
        {"width": 512},
        {"batch": 2},
        {"text_tokens": 256},
        {"rank": 8},
        {"lora_targets": ("to_q",)},
        {"lora_dropout": 0.0},
        {"adapter": "full"},
        {"lokr_factor": "16,FeedForward=8"},
        {"lokr_scalar": True},
        {"lokr_rebuild": True},
        {"precision": "fp32"},
        {"attention": "math"},
        {"reduced": True},
        {"target": "cpu"},
        {"source": "measured"},
    ],
    ids=str,
)
def test_everything_that_changes_a_trace_changes_the_key(changes: dict[str, Any]) -> None:
    assert _key(**changes) != _key()


@pytest.mark.parametrize("changes", [{"optimizer": "sgd"}, {"alpha": 3.0}, {"caption_tokens": 5}], ids=str)
def test_what_does_not_change_a_trace_does_not_change_the_key(changes: dict[str, Any]) -> None:
    assert _key(**changes) == _key()


def test_another_version_of_a_library_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _key()
    assert {"torch", "diffusers", "peft"} <= store.versions().keys()
    monkeypatch.setattr(store, "versions", lambda: {"torch": "9.9"})
    assert _key() != before


def test_an_edited_fact_sheet_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _key()
    monkeypatch.setattr(store.resources, "text", lambda name: "edited")
    assert _key() != before


def test_a_key_names_model_and_variant_and_is_a_file_name() -> None:
    assert _key().startswith("flux-dev-")
    assert Path(_key()).name == _key()


# Small values --------------------------------------------------------------------------------------------------------


def test_small_values_read_back_and_absent_or_damaged_ones_are_empty(folder: Path) -> None:
    store.write_small("a.json", {"x": [1, 2]})
    assert store.read_small("a.json") == {"x": [1, 2]}
    assert store.read_small("b.json") == {}
    for damaged in ("", "{", "[1]", "\x00"):
        (folder / "a.json").write_text(damaged)
        assert store.read_small("a.json") == {}


def test_small_values_that_are_no_text_are_empty_too(folder: Path) -> None:
    folder.mkdir()
    (folder / "a.json").write_bytes(b"\xff\xfe\x00")
    assert store.read_small("a.json") == {}


def test_small_values_that_cannot_be_written_are_done_without(folder: Path) -> None:
    folder.write_text("a file where the folder should be")
    store.write_small("a.json", {"x": 1})
    assert store.read_small("a.json") == {}


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.mkdir()


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(store.MOST_BYTES + 1)  # sparse


@pytest.mark.parametrize("spoil", [_fifo, _folder, _endless, _huge])
def test_what_is_no_ordinary_file_is_never_waited_for(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    path = tmp_path / "it"
    spoil(path)
    with pytest.raises(OSError, match=r"regular file|directory|larger than"):
        store.read_file(path)


@pytest.mark.parametrize("spoil", [_fifo, _folder, _endless, _huge])
def test_the_cache_does_without_what_is_no_ordinary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None]
) -> None:
    monkeypatch.setenv("ADVISE_CACHE_DIR", str(tmp_path))
    spoil(tmp_path / "small.json")
    told: list[str] = []
    assert store.read_small("small.json", told.append) == {}
    assert "is not readable; it is made anew" in told[0]
