"""Models outside the catalogue: folders, classes of diffusers without a fact sheet, classes of one's own."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_helpers import Done, environment, in_process_of_its_own

from advisor import plan_files
from advisor.api import PlanError
from probes import outside, store
from probes.workload import WorkloadError, from_request

Advise = Callable[..., Done]

FLUX: dict[str, Any] = {
    "_class_name": "FluxTransformer2DModel",
    "_diffusers_version": "0.30.0",
    "attention_head_dim": 32,
    "guidance_embeds": True,
    "in_channels": 64,
    "joint_attention_dim": 96,
    "num_attention_heads": 4,
    "num_layers": 2,
    "num_single_layers": 3,
    "pooled_projection_dim": 64,
    "axes_dims_rope": [8, 12, 12],
}
DIT = {
    "_class_name": "DiTTransformer2DModel",
    **{"num_attention_heads": 2, "attention_head_dim": 32, "in_channels": 4, "out_channels": 8, "num_layers": 3},
    **{"sample_size": 16, "num_embeds_ada_norm": 100, "norm_type": "ada_norm_zero"},
}
COGVIDEO = {
    "_class_name": "CogVideoXTransformer3DModel",
    **{
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "time_embed_dim": 32,
        "text_embed_dim": 24,
    },
    **{"num_layers": 3, "sample_width": 16, "sample_height": 16, "sample_frames": 9, "max_text_seq_length": 8},
}
MOCHI = {
    "_class_name": "MochiTransformer3DModel",
    **{"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 3, "pooled_projection_dim": 32},
    **{"in_channels": 4, "text_embed_dim": 24, "time_embed_dim": 16},
}
SIZE = ("--resolution", "128", "--rank", "4", "--vram", "24")


def folder(path: Path, config: Any, *, inside: str = "") -> Path:
    (path / inside).mkdir(parents=True, exist_ok=True)
    (path / inside / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def warnings(done: Done) -> str:
    assert done.status == 0, done.err
    return " | ".join(json.loads(done.out)["warnings"])


# --- folders --------------------------------------------------------------------------------------------------------------


def test_a_folder_is_planned_verified_and_trained_with_its_familys_sheet(advise: Advise, tmp_path: Path) -> None:
    model, plan = folder(tmp_path / "mine", FLUX), tmp_path / "plan.json"
    done = advise("--model", str(model), *SIZE, "--plan", str(plan), "--json")
    answer = json.loads(done.out)
    assert answer["workload"]["model"] == "flux"
    assert answer["workload"]["variant"] == str(model)
    assert "is the class of flux: its fact sheet, variant dev" in warnings(done)
    assert "num_layers=2" in warnings(done)
    verified = advise("verify", str(plan), "--steps", "1", "--device", "cpu", "--json")
    receipt = json.loads(verified.out)
    assert verified.status == 0, verified.out
    assert receipt["exact"] is True
    assert receipt["predicted"]["peak_gib"] == pytest.approx(receipt["measured"]["peak_gib"], rel=0.02)
    trained = advise("run", str(plan), "--steps", "3", "--device", "cpu", "--json")
    assert trained.status == 0, trained.err
    assert len(json.loads(trained.out)["losses"]) == 3


@pytest.mark.parametrize("inside", ["", "transformer"])
def test_a_component_and_a_pipeline_folder_are_read(advise: Advise, tmp_path: Path, inside: str) -> None:
    model = folder(tmp_path / "mine", FLUX, inside=inside)
    if inside:
        index = {"transformer": ["diffusers", FLUX["_class_name"]], "unet": [None, None], "transformer_2": ["a", "b"]}
        (model / "model_index.json").write_text(json.dumps(index))
    text = warnings(advise("--model", str(model), *SIZE, "--json"))
    assert ("also holds" in text and "transformer_2" in text) is bool(inside)


def test_a_config_that_equals_a_variant_is_named(advise: Advise, tmp_path: Path) -> None:
    from probes.outside import sheet_of

    model = folder(tmp_path / "dev", {"_class_name": "FluxTransformer2DModel", "guidance_embeds": True, "old": 1})
    sheet = sheet_of({"model": str(model)})
    assert "its config equals the catalogue's flux dev, flux krea, flux kontext" in sheet["notes"]
    assert "ignored: old, which FluxTransformer2DModel does not take" in sheet["notes"]
    assert outside.sheet_of({"model": str(model), "variant": "kontext"})["references"] == {"default": 1, "most": 1}


@pytest.mark.parametrize(
    ("config", "family", "note"),
    [
        ({"_class_name": "WanTransformer3DModel", "in_channels": 36, "num_layers": 2}, "wan", "variant i2v-14b-2.2"),
        (
            {"_class_name": "WanTransformer3DModel", "in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120},
            "wan",
            "equals the catalogue's wan i2v-480p-14b-2.1, wan i2v-720p-14b-2.1",
        ),
        ({"_class_name": "FluxTransformer2DModel", "guidance_embeds": False, "num_layers": 1}, "flux", "schnell"),
    ],
)
def test_the_nearest_variant_gives_what_a_config_does_not_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], family: str, note: str
) -> None:
    monkeypatch.setenv("ADVISE_CACHE_DIR", str(tmp_path / "cache"))
    sheet = outside.sheet_of({"model": str(folder(tmp_path / "mine", config))})
    assert sheet["name"] == family
    assert any(note in text for text in sheet["notes"]), sheet["notes"]


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ("{not json", "is not JSON text"),
        ("[]", "is not a JSON object"),
        ({"num_layers": 2}, "names no _class_name"),
        (FLUX | {"num_layers": 2_000_000_000}, "'num_layers' is 2000000000; no model has more than 10000"),
        (FLUX | {"num_attention_heads": 10**30}, "no model has more than"),
        (FLUX | {"axes_dims_rope": [1] * 5000}, "a list of at most 2000 entries"),
        (FLUX | {"num_layers": "many"}, "does not take this config"),
        (DIT | {"sample_size": 10**9}, "'sample_size' is 1000000000"),
        (json.dumps(FLUX)[:-1] + ', "x": ' + "[" * 100_000 + "]" * 100_000 + "}", "is not JSON text"),
        ({"_class_name": "UVit2DModel"}, "--model-class package.module:Class --model-config FILE"),
    ],
)
def test_a_config_that_is_none_is_one_line(advise: Advise, tmp_path: Path, config: Any, error: str) -> None:
    began = time.monotonic()
    done = advise("--model", str(folder(tmp_path / "mine", config)), "--vram", "24")
    assert done.status == 2
    assert error in done.error
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "__import__",
        "os.system",
        "../evil",
        "ModelMixin",
        "DiffusionPipeline",
        "utils",
        "FluxTransformer2DMode",
        "",
    ],
)
def test_a_hostile_class_name_is_refused(advise: Advise, tmp_path: Path, name: str) -> None:
    done = advise("--model", str(folder(tmp_path / "mine", {"_class_name": name})), "--vram", "24")
    assert done.status == 2
    assert f"names the class {name!r}, which is not a model class of diffusers" in done.error


def test_a_class_name_that_is_no_text_is_refused(advise: Advise, tmp_path: Path) -> None:
    done = advise("--model", str(folder(tmp_path / "mine", {"_class_name": ["os", "system"]})), "--vram", "24")
    assert "'_class_name' must be text" in done.error


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["--model", "./none"], "no such folder"),
        (["--model", "a/b/c"], "no such folder, and no Hugging Face id"),
        (["--model", "/etc/hostname"], "is a file"),
        (["--model", "./mine", "--revision", "main"], "is a local folder"),
        (["--model", "flux", "--revision", "main"], "only a Hugging Face id"),
        (["--model", "flux", "--model-config", "x.toml"], "goes with --model-class"),
        (["--model-config", "x.toml"], "goes with --model-class"),
        (["--model", "flux", "--model-class", "a:B", "--model-config", "x"], "exclude each other"),
        (["--model-class", "a:B"], "needs --model-config"),
        (["--model-class", "a.B", "--model-config", "x"], "package.module:Class"),
        (["--model-class", "a:B", "--model-config", "none.toml"], "no such file"),
        (["--model", "./mine", "--variant", "nope"], "valid for ./mine: dev, schnell"),
    ],
)
def test_bad_usage_is_one_line(
    advise: Advise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], error: str
) -> None:
    folder(tmp_path / "mine", FLUX)
    monkeypatch.chdir(tmp_path)
    done = advise(*args, "--vram", "24")
    assert done.status == 2
    assert error in done.error


def test_profiles_belong_to_the_contents_of_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADVISE_CACHE_DIR", str(tmp_path / "cache"))

    def key(name: str, **changes: Any) -> str:
        path = folder(tmp_path / name, FLUX | changes)
        return store.key(from_request({"model": str(path)}), "target", "traced")

    assert key("a") == key("b")
    assert key("a") != key("c", num_layers=3)
    assert key("a") != key("d", axes_dims_rope=[12, 8, 12])
    before = key("e")
    assert key("e", num_single_layers=4) != before  # the same folder, changed


def test_a_stored_answer_about_a_folder_imports_no_torch(cache: Path, tmp_path: Path) -> None:
    args = ["--model", str(folder(tmp_path / "mine", FLUX)), *SIZE]
    assert in_process_of_its_own(args, cache).status == 0
    code = (
        "import sys\nfrom advisor.cli import main\n"
        f"main({args!r})\n"
        "bad = {'torch', 'diffusers', 'huggingface_hub'} & set(sys.modules)\nassert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], env=environment(cache), check=True, capture_output=True)


def test_the_name_of_a_folder_decides_between_equal_variants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADVISE_CACHE_DIR", str(tmp_path / "cache"))
    config = {"_class_name": "FluxTransformer2DModel", "guidance_embeds": True}
    for name, variant in (("FLUX.1-Kontext-dev", "kontext"), ("FLUX.1-dev", "dev"), ("FLUX.1-Krea-dev", "krea")):
        sheet = outside.sheet_of({"model": str(folder(tmp_path / name, config))})
        assert f"what no config says (text length, inputs, default size) is taken from flux {variant}" in sheet["notes"]


def test_a_sheet_that_does_not_fit_a_config_gives_way_to_guesses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADVISE_CACHE_DIR", str(tmp_path / "cache"))
    config = {
        "_class_name": "UNet2DConditionModel",
        **{"block_out_channels": [32, 64], "cross_attention_dim": 32, "attention_head_dim": 8, "sample_size": 16},
        **{"down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"]},
        **{"up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"]},
    }
    assert outside.sheet_of({"model": str(folder(tmp_path / "plain", config))})["name"].startswith("sd")
    sheet = outside.sheet_of({"model": str(folder(tmp_path / "classes", config | {"num_class_embeds": 10}))})
    assert sheet["name"] == "UNet2DConditionModel"
    assert re.search(r"the fact sheet of sd\dx does not fit this config \(.*class_labels", sheet["notes"][0])
    assert "class_labels" in sheet["inputs"]


def test_rotary_tables_are_inputs_where_a_config_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADVISE_CACHE_DIR", str(tmp_path / "cache"))
    plain = outside.sheet_of({"model": str(folder(tmp_path / "a", COGVIDEO))})
    turned = outside.sheet_of(
        {"model": str(folder(tmp_path / "b", COGVIDEO | {"use_rotary_positional_embeddings": True}))}
    )
    assert "image_rotary_emb" not in plain["inputs"]
    assert turned["inputs"]["image_rotary_emb"]["shape"] == ["(1+(F-1)//4)*(H//16)*(W//16)", "attention_head_dim"]


# --- classes that no family has -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "inputs"),
    [
        (DIT, ["hidden_states [B, in_channels, H//8, W//8]", "class_labels [B]"]),
        (
            COGVIDEO,
            ["hidden_states [B, 1+(F-1)//4, in_channels, H//8, W//8]", "encoder_hidden_states [B, T, text_embed_dim]"],
        ),
        (MOCHI, ["hidden_states [B, in_channels, 1+(F-1)//4, H//8, W//8]", "encoder_attention_mask [B, T]"]),
    ],
    ids=["dit", "cogvideox", "mochi"],
)
def test_a_class_without_a_sheet_is_planned_verified_and_trained(
    advise: Advise, tmp_path: Path, config: dict[str, Any], inputs: list[str]
) -> None:
    plan = tmp_path / "plan.json"
    frames = ("--frames", "9") if "3D" in config["_class_name"] else ()
    done = advise("--model", str(folder(tmp_path / "mine", config)), *SIZE, *frames, "--plan", str(plan), "--json")
    text = warnings(done)
    for guess in (
        *inputs,
        "guessed: LoRA targets to_k, to_q, to_v, to_out.0",
        "guessed: blocks: transformer_blocks (3 ",
    ):
        assert guess in text
    verified = advise("verify", str(plan), "--steps", "1", "--device", "cpu", "--json")
    receipt = json.loads(verified.out)
    assert verified.status == 0, verified.out
    assert receipt["exact"] is True
    assert receipt["predicted"]["peak_gib"] == pytest.approx(receipt["measured"]["peak_gib"], rel=0.02)
    assert any("guessed: inputs" in note for note in receipt["notes"])
    trained = advise("run", str(plan), "--steps", "3", "--device", "cpu", "--json")
    assert trained.status == 0, trained.err


def test_a_pipelines_scheduler_says_what_the_model_is_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADVISE_CACHE_DIR", str(tmp_path / "cache"))
    for scheduler, objective in (("DDIMScheduler", "epsilon"), ("FlowMatchEulerDiscreteScheduler", "flow")):
        model = folder(tmp_path / scheduler, DIT, inside="transformer")
        index = {"transformer": ["diffusers", DIT["_class_name"]], "scheduler": ["diffusers", scheduler]}
        (model / "model_index.json").write_text(json.dumps(index))
        assert outside.sheet_of({"model": str(model)})["training"]["objective"] == objective


# --- classes of one's own -------------------------------------------------------------------------------------------------

NETS = """
    import os, pathlib, sys
    import torch
    from torch import nn
    from beside import Block

    print("a module that prints")
    if where := os.environ.get("WAS_IMPORTED"):
        pathlib.Path(where).write_text("yes")

    class Net(nn.Module):
        def __init__(self, channels=4, width=32, depth=3, text_width=16, n=0):
            super().__init__()
            self.into = nn.Conv2d(channels, width, 2, stride=2)
            self.time, self.text = nn.Linear(1, width), nn.Linear(text_width, width)
            self.layers = nn.ModuleList([Block(width) for _ in range(depth + n)])
            self.out = nn.Linear(width, 4 * channels)

        def forward(self, latents, t, text):
            x = self.into(latents)
            h, w = x.shape[-2:]
            x = torch.cat([self.text(text), x.flatten(2).transpose(1, 2)], 1) + self.time(t[:, None].to(x.dtype))[:, None]
            for layer in self.layers:
                x = layer(x)
            x = self.out(x[:, text.shape[1]:]).transpose(1, 2).unflatten(2, (h, w))
            return nn.functional.pixel_shuffle(x, 2)

    class Talker(Net):
        def forward(self, latents, t, text):
            return {"sample": super().forward(latents, t, text)}

    class Hungry(nn.Module):
        def __init__(self, width=8):
            super().__init__()
            self.proj = nn.Linear(width, width)

        def forward(self, latents, phase_of_the_moon):
            return latents

    not_a_module = dict
    class Plain:
        pass
"""
BESIDE = """
    from torch import nn

    class Attention(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            return self.proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.attn = Attention(width)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x):
            x = x + self.attn(self.norm1(x))
            return x + self.mlp(self.norm2(x))
"""
SHEET = """
    [config]
    width = 64
    depth = 4

    [inputs]
    latents = { shape = ["B", "channels", "H//8", "W//8"] }
    t = { shape = ["B"], fill = "uniform" }
    text = { shape = ["B", "T", "text_width"] }

    [text]
    tokens = 12
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with modules and a sheet, current; nothing of it is imported yet."""
    for name, text in (("own_nets.py", NETS), ("beside.py", BESIDE), ("net.toml", SHEET)):
        (tmp_path / name).write_text(textwrap.dedent(text))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(outside, "_allowed", set())
    monkeypatch.setattr(outside, "_made", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("own_nets", "beside", "broken", "leaving", "torn"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


OWN = ("--model-class", "own_nets:Net", "--model-config", "net.toml")


def advise_there(own: Path, *args: str, given: str = "", **more: str) -> Done:
    """In a process of its own, in the folder."""
    return in_process_of_its_own(list(args), own / "cache", given=given, WAS_IMPORTED=str(own / "imported"), **more)


def last_error(done: Done) -> str:
    """The error below whatever the user's module has printed."""
    assert done.status == 2
    line = done.err.splitlines()[-1]
    assert line.startswith("advise: error: "), done.err
    assert "Traceback" not in done.err
    return line


def test_an_own_class_is_planned_verified_and_trained(advise: Advise, own: Path) -> None:
    done = advise_there(own, *OWN, *SIZE, "--plan", "plan.json", "--json")
    answer = json.loads(done.out)  # although the module prints
    text = warnings(done)
    assert answer["workload"]["model"] == "own_nets:Net"
    assert "guessed: LoRA targets proj, qkv (linears of the attention)" in text
    assert "blocks: layers (4 Block; attention attn; feed-forward mlp)" in text
    assert "guessed: width and height in multiples of 16 pixels" in text
    verified = advise(
        "verify", "plan.json", "--model-class", "own_nets:Net", "--steps", "1", "--json", "--device", "cpu"
    )
    receipt = json.loads(verified.out)
    assert verified.status == 0, verified.out
    assert receipt["predicted"]["peak_gib"] == pytest.approx(receipt["measured"]["peak_gib"], rel=0.02)
    trained = advise("run", "plan.json", "--model-class", "own_nets:Net", "--steps", "3", "--json", "--device", "cpu")
    assert trained.status == 0, trained.err
    assert len(json.loads(trained.out)["losses"]) == 3


def test_a_plan_imports_no_code_unless_its_class_is_named_again(own: Path) -> None:
    assert advise_there(own, *OWN, *SIZE, "--plan", "plan.json").status == 0
    (own / "imported").unlink()
    for command in ("verify", "run"):
        done = advise_there(own, command, "plan.json", "--steps", "1")
        assert done.status == 2
        assert "importing that runs its code; give --model-class own_nets:Net" in done.error
        done = advise_there(own, command, "plan.json", "--steps", "1", "--model-class", "own_nets:Other")
        assert "the plan is for own_nets:Net" in done.error
    assert not (own / "imported").exists()


def test_a_plan_of_diffusers_takes_no_class(advise: Advise, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert advise("--model", str(folder(tmp_path / "mine", FLUX)), *SIZE, "--plan", str(plan)).status == 0
    with pytest.raises(PlanError, match="the plan is for diffusers:FluxTransformer2DModel"):
        plan_files.load(plan, model_class="os:system")


def test_a_batch_imports_only_what_the_command_line_names(own: Path) -> None:
    line = json.dumps({"model_class": "own_nets:Net", "model_config": "net.toml", "vram": 24, "resolution": 128})
    refused = advise_there(own, "batch", "-", given=line)
    assert refused.status == 1
    assert "has to be given on the command line" in json.loads(refused.out)["error"]
    assert not (own / "imported").exists()
    folder(own / "mine", FLUX)
    other = json.dumps({"model": "./mine", "vram": 24, "resolution": 128})
    done = advise_there(own, "batch", "-", "--model-class", "own_nets:Net", given=f"{line}\n{other}\n{line}")
    first, second, third = map(json.loads, done.out.splitlines())
    assert done.status == 0
    assert first == third
    assert second["workload"]["model"] == "flux"


@pytest.mark.slow
def test_a_changed_module_gets_a_profile_of_its_own(own: Path) -> None:
    assert advise_there(own, *OWN, *SIZE, "--plan", "plan.json").status == 0
    (own / "beside.py").write_text((own / "beside.py").read_text().replace("4 * width", "2 * width"))
    done = advise_there(own, *OWN, *SIZE, "--plan", "narrow.json")
    assert "tracing" in done.err
    peaks = [json.loads((own / f).read_text())["recommended"]["peak_gib"] for f in ("plan.json", "narrow.json")]
    assert peaks[1] < peaks[0]
    again = advise_there(own, "verify", "plan.json", "--model-class", "own_nets:Net", "--steps", "1")
    assert "the source of own_nets:Net has changed since plan.json was made" in again.err


@pytest.mark.parametrize(
    ("reference", "error"),
    [
        ("own_nets:Nett", "did you mean Net?"),
        ("own_nets:Plain", "is not a torch module class"),
        ("own_nets:not_a_module", "is not a torch module class"),
        ("own_nothing:Net", "No module named 'own_nothing'"),
        ("broken:Net", "importing broken failed (ZeroDivisionError: division by zero)"),
        ("leaving:Net", "importing leaving failed (SystemExit: 3)"),
        ("torn:Net", "importing torn failed (SyntaxError"),
        ("own_nets:Talker", "returns a dict"),
    ],
)
def test_a_class_that_cannot_be_had_is_one_line(advise: Advise, own: Path, reference: str, error: str) -> None:
    (own / "broken.py").write_text("1 / 0")
    (own / "leaving.py").write_text("import sys; sys.exit(3)")
    (own / "torn.py").write_text("def (")
    done = advise("--model-class", reference, "--model-config", "net.toml", "--vram", "24")
    assert error in last_error(done)


@pytest.mark.parametrize(
    ("sheet", "error"),
    [
        ("[config\n", "not valid TOML or JSON"),
        ("[config]\nwidth = 'wide'", "does not take this config"),
        ("[config]\nwidht = 64", "does not take this config"),
        ("[config]\nn = 5000000", "more than 50000 modules"),
        ("[config]\ndepth = 5000000", "no model has more than 10000"),
        ("[config]\n[input]\n", "'input' is not known (did you mean 'inputs'?)"),
        ("[config]\n[inputs]\nlatents = { shap = ['B'] }", "did you mean 'shape'"),
        ("[config]\n[inputs]\nlatents = { shape = ['B', '4', 'H//8', 'W//8'], dtype = 'compile' }", "must be one of"),
        ("[config]\n[inputs]\nlatents = { shape = ['B', '4', 'H//8', 'Q'] }", "'Q' in 'Q' is not a known whole number"),
        (
            "[config]\n[inputs]\nlatents = { shape = ['B', '3', 'H//8', 'W//8'] }",
            "does not run with the declared inputs",
        ),
        ("[config]\n[inputs]\n", "'inputs' is empty"),
        ("[config]\nwhen = 1979-05-27", "is not JSON serializable"),
        ("[text]\ntokens = 0\n[config]", "'text.tokens' must be a whole number"),
    ],
)
def test_a_bad_sheet_is_one_line(advise: Advise, own: Path, sheet: str, error: str) -> None:
    (own / "net.toml").write_text(sheet)
    done = advise(*OWN, "--vram", "24")
    assert error in last_error(done)


def test_inputs_that_nobody_declares_are_guessed_or_asked_for(advise: Advise, own: Path) -> None:
    (own / "net.json").write_text(json.dumps({"width": 64, "depth": 4}))
    done = advise("--model-class", "own_nets:Net", "--model-config", "net.json", *SIZE, "--json")
    assert "guessed: inputs latents [B, channels, H//8, W//8]; t [B]; text [B, T, text_width]" in warnings(done)
    (own / "net.json").write_text("{}")
    done = advise("--model-class", "own_nets:Hungry", "--model-config", "net.json", *SIZE)
    assert "nothing is known about 'phase_of_the_moon'" in last_error(done)
    assert "--model-config FILE" in last_error(done)


def test_the_python_api_takes_folders_and_classes(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import advisor

    monkeypatch.setenv("ADVISE_CACHE_DIR", str(own / "cache"))
    plan = advisor.plan(str(folder(own / "mine", FLUX)), resolution=128, vram_gib=24)
    assert plan.recommended is not None
    with pytest.raises(WorkloadError, match="either model or model_class"):
        advisor.plan(vram_gib=24)
    plan = advisor.plan(model_class="own_nets:Net", model_config=own / "net.toml", resolution=128, vram_gib=24)
    assert plan.workload.family.code


# --- plan files from elsewhere --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"class": "os:system"}, "the plan is for os:system, and importing that runs its code"),
        ({"class": "diffusers:__loader__"}, "importing that runs its code|importing it runs its code"),
        ({"class": "x; import os"}, "must be package.module:Class"),
        ({"inputs": {}}, "'inputs' is empty"),
        ({"inputs": {"x": {"shape": ["B"], "dtype": "load"}}}, "must be one of"),
        ({"inputs": {"x": {"shape": ["9*" * 200 + "9"]}}}, "must be a whole number or an expression"),
        ({"lora": {}}, "'lora.targets'"),
        ({"evil": 1}, "'evil' is not known"),
        ({"pixels": {"vae_factor": 0}}, "'pixels.vae_factor' must be a whole number from 1"),
        ({"default_variant": "none"}, "none of the variants"),
        (None, "must be a JSON object"),
    ],
)
def test_a_hostile_sheet_in_a_plan_is_one_line(advise: Advise, tmp_path: Path, change: Any, error: str) -> None:
    plan = tmp_path / "plan.json"
    assert advise("--model", str(folder(tmp_path / "mine", FLUX)), *SIZE, "--plan", str(plan)).status == 0
    content = json.loads(plan.read_text())
    content["workload"]["sheet"] = None if change is None else content["workload"]["sheet"] | change
    plan.write_text(json.dumps(content))
    done = advise("verify", str(plan), "--steps", "1")
    assert done.status == 2
    assert re.search(error, done.err.splitlines()[-1]), done.err
    assert "Traceback" not in done.err


def test_a_plan_needs_neither_folder_nor_hub(advise: Advise, tmp_path: Path) -> None:
    model, plan = folder(tmp_path / "mine", FLUX), tmp_path / "plan.json"
    assert advise("--model", str(model), *SIZE, "--plan", str(plan)).status == 0
    (model / "config.json").unlink()
    model.rmdir()
    loaded = plan_files.load(plan)
    assert loaded.workload.family.variant(None).config["num_layers"] == 2
    assert advise("run", str(plan), "--steps", "1", "--device", "cpu").status == 0


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"num_layers": 9999}, "more than 50000 modules"),
        ({"num_layers": 9, "num_attention_heads": 4096, "attention_head_dim": 128}, "need .* GiB and this machine has"),
        ({"no_such_argument": 1}, "does not take this config"),
    ],
)
def test_a_plan_of_an_impossible_model_is_one_line(
    advise: Advise, tmp_path: Path, config: dict[str, Any], error: str
) -> None:
    plan = tmp_path / "plan.json"
    assert advise("--model", str(folder(tmp_path / "mine", FLUX)), *SIZE, "--plan", str(plan)).status == 0
    content = json.loads(plan.read_text())
    variants = content["workload"]["sheet"]["variants"]
    variants[next(iter(variants))]["config"] |= config
    plan.write_text(json.dumps(content))
    done = advise("verify", str(plan), "--steps", "1", "--device", "cpu")
    assert done.status == 2
    assert re.search(error, done.err.splitlines()[-1]), done.err


def test_given_weights_of_a_class_without_a_sheet_are_trained(advise: Advise, tmp_path: Path) -> None:
    from diffusers import DiTTransformer2DModel

    model, plan = tmp_path / "mine", tmp_path / "plan.json"
    config = {k: v for k, v in DIT.items() if not k.startswith("_")}
    DiTTransformer2DModel(**config).save_pretrained(model)
    stored = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(stored | {"of_an_older_version": True}))
    assert advise("--model", str(model), *SIZE, "--plan", str(plan)).status == 0
    done = advise("verify", str(plan), "--pretrained", str(model), "--steps", "1", "--device", "cpu", "--json")
    assert done.status == 0, done.err + done.out
    assert json.loads(done.out)["exact"] is True


def test_weights_cannot_be_given_for_a_class_that_loads_none(advise: Advise, own: Path) -> None:
    assert advise(*OWN, *SIZE, "--plan", "plan.json").status == 0
    folder(own / "weights", {"width": 64})
    done = advise("verify", "plan.json", "--model-class", "own_nets:Net", "--pretrained", "./weights", "--steps", "1")
    assert "is no model class of diffusers; its weights cannot be loaded" in last_error(done)


def test_models_says_all_about_a_folder(advise: Advise, tmp_path: Path) -> None:
    model = folder(tmp_path / "mine", FLUX)
    done = advise("models", str(model), "--json")
    facts = json.loads(done.out)
    assert done.status == 0, done.err
    assert facts["class"].endswith(":FluxTransformer2DModel")
    assert facts["block_lists"] == ["transformer_blocks", "single_transformer_blocks"]
    assert set(facts["executors"]) == {"bundled", "simpletuner", "diffusers"}
    assert "is the class of flux: its fact sheet, variant dev" in " ".join(facts["notes"])
    assert "Checkpointing, executor bundled:" in advise("models", str(model)).out
    missing = advise("models", str(tmp_path / "none"))
    assert missing.status == 2
    assert str(tmp_path / "none") in missing.error
