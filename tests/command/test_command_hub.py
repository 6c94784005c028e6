"""Hugging Face ids: only the config is downloaded, whatever the server does is one line, and the cache serves offline."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_helpers import Done, in_process_of_its_own
from hub_server import COMMIT, Hub, serving
from test_command_outside import DIT, FLUX, SIZE

Answer = dict[str, Any]
NAME = "org/small-flux"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving() as hub:
        index = {
            "_class_name": "FluxPipeline",
            "transformer": ["diffusers", FLUX["_class_name"]],
            "vae": ["diffusers", "X"],
        }
        hub.add(NAME, "model_index.json", index)
        hub.add(NAME, "transformer/config.json", FLUX)
        hub.add(NAME, "transformer/diffusion_pytorch_model.safetensors", b"weights")
        hub.add(NAME, "vae/config.json", {"_class_name": "AutoencoderKL"})
        yield hub


def ask(hub: Hub, home: Path, name: str, *args: str, **more: str) -> Done:
    """In a process of its own: the hub's client reads its settings when it is imported."""
    settings = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home / "hf"),
        "HF_HUB_ETAG_TIMEOUT": "2",
        "HF_HUB_DOWNLOAD_TIMEOUT": "2",
    }
    hub.asked.clear()
    return in_process_of_its_own(["--model", name, *SIZE, *args], home / "advise", **settings | more)


def test_only_the_config_of_an_id_is_downloaded(hub: Hub, tmp_path: Path) -> None:
    done = ask(hub, tmp_path, NAME, "--json", HF_TOKEN="hf_secret")
    answer = json.loads(done.out)
    assert done.status == 0, done.err
    assert hub.downloaded() == ["model_index.json", "transformer/config.json"]
    assert set(hub.tokens) == {"Bearer hf_secret"}
    assert answer["workload"]["model"] == "flux"
    assert answer["workload"]["variant"] == NAME
    assert f"the config of {NAME} at revision {COMMIT[:12]}" in answer["warnings"]
    assert "hf_secret" not in done.out + done.err
    again = ask(hub, tmp_path, NAME, "--json")
    assert hub.downloaded() == []
    assert json.loads(again.out)["schedules"] == answer["schedules"]


def test_offline_mode_answers_from_the_cache_and_asks_nobody(hub: Hub, tmp_path: Path) -> None:
    done = ask(hub, tmp_path, NAME, HF_HUB_OFFLINE="1")
    assert done.status == 2
    assert done.error == f"--model {NAME}: HF_HUB_OFFLINE is set, and its config is not in the cache"
    assert ask(hub, tmp_path, NAME).status == 0
    done = ask(hub, tmp_path, NAME, HF_HUB_OFFLINE="1")
    assert done.status == 0
    assert hub.asked == []
    assert "from the cache (HF_HUB_OFFLINE is set)" in done.flat
    assert "tracing" not in done.err  # the same config: the same profile


def test_a_server_that_is_gone_is_made_up_for_by_the_cache(hub: Hub, tmp_path: Path) -> None:
    assert ask(hub, tmp_path, NAME).status == 0
    done = ask(hub, tmp_path, NAME, HF_ENDPOINT="http://127.0.0.1:9")
    assert done.status == 0
    assert "from the cache (http://127.0.0.1:9 cannot be reached" in done.flat
    done = ask(hub, tmp_path, "org/other", HF_ENDPOINT="http://127.0.0.1:9")
    assert "http://127.0.0.1:9 cannot be reached" in done.error
    assert "its config is not in the cache" in done.error


@pytest.mark.parametrize(
    ("mood", "error"),
    [
        ("hangs", "cannot be reached (no answer in 3 s)"),
        ("garbage", "is not JSON text"),
        ("headless", "could not be downloaded"),
        ("broken", "answers with status 503"),
        ("gated", "is gated: accept its terms"),
    ],
)
def test_a_server_that_misbehaves_is_one_line_soon(hub: Hub, tmp_path: Path, mood: str, error: str) -> None:
    hub.mood = mood
    began = time.monotonic()
    assert error in ask(hub, tmp_path, NAME).error
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("name", "args", "error"),
    [
        ("org/none", [], "no such repository at"),
        (NAME, ["--revision", "v9"], "it has no revision 'v9'"),
        ("org/words", [], "names no _class_name"),
        ("org/torn", [], "is not JSON text"),
        ("org/weights", [], "no diffusers config in it (looked for config.json, transformer/config.json"),
        ("org/na me", [], "no Hugging Face id (ORG/NAME)"),
        ("org/..", [], "no Hugging Face id (ORG/NAME)"),
    ],
)
def test_an_id_without_a_model_is_one_line(hub: Hub, tmp_path: Path, name: str, args: list[str], error: str) -> None:
    hub.add("org/words", "config.json", {"architectures": ["Bert"]})
    hub.add("org/torn", "config.json", b'{"_class_name": ')
    hub.add("org/weights", "model.safetensors", b"")
    done = ask(hub, tmp_path, name, *args)
    assert done.status == 2
    assert error in done.error


def test_a_component_repository_and_a_revision_are_read(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/dit", "config.json", DIT)
    done = ask(hub, tmp_path, "org/dit", "--revision", "v1", "--json")
    assert done.status == 0, done.err
    assert all("/resolve/v1/" in path for _, path in hub.asked if "/resolve/" in path)
    assert any("guessed: inputs hidden_states" in w for w in json.loads(done.out)["warnings"])
