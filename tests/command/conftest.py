"""One cache for the whole session, filled by one real trace of a small shape; everything else answers from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from command_helpers import SMALL_REQUEST, Done

from advisor import cli


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that holds the small workload's profile."""
    return _fill(tmp_path_factory.mktemp("cache"), None)


@pytest.fixture(scope="session")
def plan_text(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A plan file's text: the small workload, simpletuner, a card of 14 GiB."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    _fill(cache, path)
    return path.read_text()


def _fill(folder: Path, save: Path | None) -> Path:
    from advisor.api import Session
    from decision_rules.support import Executor
    from estimators.devices import find_gpu, from_vram
    from probes.workload import from_request

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ADVISE_CACHE_DIR", str(folder))
        device = find_gpu("4090") if save is None else from_vram(14)
        plan = Session().plan(from_request(SMALL_REQUEST), device, Executor.SIMPLETUNER if save else Executor.BUNDLED)
    if save is not None:
        plan.save(save)
    return folder


@pytest.fixture
def advise(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs the command in this process, as on a machine without a GPU."""
    monkeypatch.setenv("ADVISE_CACHE_DIR", str(cache))
    monkeypatch.delenv("ADVISE_DEBUG", raising=False)
    monkeypatch.setattr("advisor.present.detect_gpu", lambda: None)

    def run(*args: str) -> Done:
        capsys.readouterr()
        status = cli.main(args)
        captured = capsys.readouterr()
        return Done(status, captured.out, captured.err)

    return run
