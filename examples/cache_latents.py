"""Makes the cached samples that `advise run --latents` trains on, with a diffusers pipeline's VAE and text encoders.

    python examples/cache_latents.py --pipeline ./stable-diffusion-xl --images ./photos --output ./cache --resolution 1024

`--images` is a folder of pictures, each with its caption in a text file of the same name (`cat.png`, `cat.txt`). `--pipeline` is a
diffusers folder or a Hugging Face id; its denoiser is not loaded. Pictures are scaled and cropped to the planned resolution.

One safetensors file a picture holds the tensors that the model's forward takes, by the argument's name, without the batch axis.
Stable Diffusion 1 and 2, SDXL, Stable Diffusion 3 and Flux are written below; another family is one more function of that kind.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from PIL import Image, ImageOps
from safetensors.torch import save_file

Sample = dict[str, torch.Tensor]
PICTURES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")


def encode_picture(pipeline: Any, file: Path, width: int, height: int) -> torch.Tensor:
    """The scaled latent [1, C, h, w] of a picture: the mean of the VAE's distribution."""
    with Image.open(file) as opened:
        picture = ImageOps.fit(
            ImageOps.exif_transpose(opened).convert("RGB"), (width, height), Image.Resampling.LANCZOS
        )
    pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).reshape(1, height, width, 3)
    vae = pipeline.vae
    scaled = pixels.permute(0, 3, 1, 2).to(vae.device, vae.dtype) / 127.5 - 1
    latent: torch.Tensor = vae.encode(scaled).latent_dist.mode()
    return (latent - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor


def stable_diffusion(pipeline: Any, latent: torch.Tensor, caption: str, width: int, height: int) -> Sample:
    text, _ = pipeline.encode_prompt(caption, pipeline.device, 1, False)
    return {"sample": latent[0], "encoder_hidden_states": text[0]}


def stable_diffusion_xl(pipeline: Any, latent: torch.Tensor, caption: str, width: int, height: int) -> Sample:
    text, _, pooled, _ = pipeline.encode_prompt(caption, do_classifier_free_guidance=False)
    sizes = torch.tensor([height, width, 0, 0, height, width], dtype=torch.float32)  # original, crop corner, target
    return {
        "sample": latent[0],
        "encoder_hidden_states": text[0],
        "added_cond_kwargs.text_embeds": pooled[0],
        "added_cond_kwargs.time_ids": sizes,
    }


def stable_diffusion_3(pipeline: Any, latent: torch.Tensor, caption: str, width: int, height: int) -> Sample:
    text, _, pooled, _ = pipeline.encode_prompt(
        caption, caption, caption, do_classifier_free_guidance=False, max_sequence_length=77
    )
    return {"hidden_states": latent[0], "encoder_hidden_states": text[0], "pooled_projections": pooled[0]}


def flux(pipeline: Any, latent: torch.Tensor, caption: str, width: int, height: int) -> Sample:
    text, pooled, text_ids = pipeline.encode_prompt(caption, caption)
    _, channels, rows, columns = latent.shape
    image_ids = pipeline._prepare_latent_image_ids(1, rows // 2, columns // 2, latent.device, latent.dtype)
    return {
        "hidden_states": pipeline._pack_latents(latent, 1, channels, rows, columns)[0],
        "encoder_hidden_states": text[0],
        "pooled_projections": pooled[0],
        "img_ids": image_ids,
        "txt_ids": text_ids,
    }


MAKERS: Mapping[str, Callable[[Any, torch.Tensor, str, int, int], Sample]] = {
    "StableDiffusionPipeline": stable_diffusion,
    "StableDiffusionXLPipeline": stable_diffusion_xl,
    "StableDiffusion3Pipeline": stable_diffusion_3,
    "FluxPipeline": flux,
}


def pictures(folder: Path) -> list[tuple[Path, str]]:
    """The pictures of a folder with their captions."""
    files = sorted(p for p in folder.iterdir() if p.suffix.lower() in PICTURES)
    if not files:
        sys.exit(f"{folder}: no pictures ({', '.join(PICTURES)})")
    for file in files:
        if not file.with_suffix(".txt").is_file():
            sys.exit(f"{file}: no caption; write it into {file.with_suffix('.txt').name}")
    return [(file, file.with_suffix(".txt").read_text("utf-8").strip()) for file in files]


def size(text: str) -> tuple[int, int]:
    """``1024`` or ``832x480`` as (width, height)."""
    parts = text.split("x")
    if not 1 <= len(parts) <= 2 or not all(part.isdigit() for part in parts):
        sys.exit(f"--resolution {text}: write 1024 or 832x480")
    return int(parts[0]), int(parts[-1])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pipeline", required=True, help="diffusers folder or Hugging Face id")
    parser.add_argument("--images", required=True, type=Path, help="folder of pictures and captions")
    parser.add_argument("--output", required=True, type=Path, help="folder for the samples")
    parser.add_argument("--resolution", default="1024", help="as in the plan: 1024, or 832x480 (width x height)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    width, height = size(given.resolution)
    found = pictures(given.images)

    denoiser = {"unet": None} if _has_unet(given.pipeline) else {"transformer": None}
    pipeline = DiffusionPipeline.from_pretrained(given.pipeline, use_safetensors=True, **denoiser).to(given.device)
    maker = MAKERS.get(type(pipeline).__name__)
    if maker is None:
        sys.exit(f"{given.pipeline} is a {type(pipeline).__name__}; this script knows {', '.join(MAKERS)}")
    given.output.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        for number, (file, caption) in enumerate(found, 1):
            sample = maker(pipeline, encode_picture(pipeline, file, width, height), caption, width, height)
            tensors = {name: t.to("cpu", torch.float32).contiguous() for name, t in sample.items()}
            save_file(tensors, given.output / f"{file.stem}.safetensors")
            print(f"{number} of {len(found)}: {file.name}")


def _has_unet(source: str) -> bool:
    return "unet" in DiffusionPipeline.load_config(source)


if __name__ == "__main__":
    main()
