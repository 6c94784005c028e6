"""A plain diffusers and PEFT training loop that runs under a plan: the two lines marked below are all that it takes.

    advise --model sd3 --resolution 512 --gpu 4090 --plan plan.json
    python examples/train_with_plan.py --plan plan.json --pretrained ./stable-diffusion-3.5-medium --latents ./cache --output ./lora

The samples are those of `examples/cache_latents.py`. A Stable Diffusion 3 transformer learns a LoRA by rectified flow.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import SD3Transformer2DModel
from peft import LoraConfig
from safetensors.torch import load_file

from advisor import apply, load_plan


def main(arguments: list[str] | None = None) -> list[float]:
    """Trains; returns the losses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--plan", required=True, type=Path)
    parser.add_argument("--pretrained", required=True, help="diffusers folder or Hugging Face id")
    parser.add_argument("--latents", required=True, type=Path, help="folder of cached samples")
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)

    torch.manual_seed(given.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    transformer = SD3Transformer2DModel.from_pretrained(
        given.pretrained, subfolder="transformer", torch_dtype=dtype, use_safetensors=True
    ).to(device)
    transformer.requires_grad_(False)
    transformer.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    trained = [p for p in transformer.parameters() if p.requires_grad]
    for p in trained:
        p.data = p.data.float()
    optimizer = torch.optim.AdamW(trained, lr=given.lr)
    samples = [load_file(file) for file in sorted(given.latents.glob("*.safetensors"))]
    transformer.train()

    plan = load_plan(given.plan)  # the first line
    handle = apply(transformer, plan)  # the second line

    losses = []
    for step in range(given.steps):
        sample = {name: t[None].to(device, dtype) for name, t in samples[step % len(samples)].items()}
        data = sample.pop("hidden_states")
        noise = torch.randn_like(data)
        sigma = torch.sigmoid(torch.randn(len(data), device=device)).view(-1, 1, 1, 1).to(dtype)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            answer = transformer(
                hidden_states=(1 - sigma) * data + sigma * noise,
                timestep=1000 * sigma.flatten(),
                **sample,
                return_dict=False,
            )[0]
        loss = F.mse_loss(answer.float(), (noise - data).float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        if (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {losses[-1]:.4f}")
    print(f"{plan.schedule.name}: {handle.counters}")
    transformer.save_lora_adapter(given.output)
    return losses


if __name__ == "__main__":
    main()
