"""Tiny models for the runtime tests: copies of real diffusers classes with LoRA, and plain modules with one trait each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model, and a function from a size (latent side or token count) to its inputs."""

    model: nn.Module
    inputs: Callable[[int], Inputs]
    size: int


@dataclass(frozen=True)
class Result:
    loss: torch.Tensor
    grads: dict[str, torch.Tensor]


def with_lora(model: nn.Module, targets: list[str], dropout: float = 0.1) -> nn.Module:
    """Frozen base, float32 adapters with non-zero weights on both sides."""
    model.requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=2, lora_alpha=2, lora_dropout=dropout, target_modules=targets), model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    return model.train()


@contextlib.contextmanager
def remove_dropout(model: nn.Module) -> Iterator[None]:
    """No dropout within the context."""
    found = {m: m.p for m in model.modules() if isinstance(m, nn.Dropout)}
    for m in found:
        m.p = 0.0
    try:
        yield
    finally:
        for m, p in found.items():
            m.p = p


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def flux() -> Case:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=8,
        num_layers=3,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        pooled_projection_dim=12,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )

    def inputs(n: int) -> Inputs:
        return {
            "hidden_states": tensor(2, n, 8),
            "encoder_hidden_states": tensor(2, 4, 24),
            "pooled_projections": tensor(2, 12),
            "timestep": torch.tensor([0.3, 0.7]),
            "guidance": torch.ones(2),
            "img_ids": torch.arange(n * 3).reshape(n, 3).float() % 4,
            "txt_ids": torch.zeros(4, 3),
            "return_dict": False,
        }

    targets = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "proj_mlp", "net.2"]
    return Case(with_lora(model, targets), inputs, 6)


def sd3() -> Case:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        caption_projection_dim=32,
        pooled_projection_dim=12,
        pos_embed_max_size=16,
        dual_attention_layers=(0, 1),
        qk_norm="rms_norm",
    )

    def inputs(n: int) -> Inputs:
        return {
            "hidden_states": tensor(2, 4, n, n),
            "encoder_hidden_states": tensor(2, 4, 24),
            "pooled_projections": tensor(2, 12),
            "timestep": torch.tensor([300.0, 700.0]),
            "return_dict": False,
        }

    return Case(with_lora(model, ["to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2"]), inputs, 4)


def wan() -> Case:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=24,
        freq_dim=16,
        ffn_dim=48,
        num_layers=4,
    )

    def inputs(n: int) -> Inputs:
        return {
            "hidden_states": tensor(1, 4, 2, n, n),
            "encoder_hidden_states": tensor(1, 4, 24),
            "timestep": torch.tensor([300]),
            "return_dict": False,
        }

    return Case(with_lora(model, ["to_q", "to_k", "to_v", "to_out.0", "net.2"]), inputs, 4)


def sdxl() -> Case:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=24,
        transformer_layers_per_block=(1, 3),
        attention_head_dim=(1, 2),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=36,
    )

    def inputs(n: int) -> Inputs:
        return {
            "sample": tensor(2, 4, n, n),
            "timestep": torch.tensor([300, 700]),
            "encoder_hidden_states": tensor(2, 4, 24),
            "added_cond_kwargs": {"text_embeds": tensor(2, 12), "time_ids": torch.ones(2, 6)},
            "return_dict": False,
        }

    return Case(with_lora(model, ["to_q", "to_k", "to_v", "to_out.0", "conv1", "net.2"]), inputs, 8)


def z_image() -> Case:
    from diffusers import ZImageTransformer2DModel

    model = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=4,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=24,
        axes_dims=[4, 6, 6],
        axes_lens=[128, 16, 16],
    )

    def inputs(n: int) -> Inputs:
        return {
            "x": [tensor(4, 1, n, n, seed=s) for s in range(2)],
            "t": torch.tensor([0.3, 0.7]),
            "cap_feats": [tensor(5, 24, seed=s) for s in range(2)],
            "return_dict": False,
        }

    return Case(with_lora(model, ["to_q", "to_k", "to_v", "to_out.0", "w2"]), inputs, 8)


REAL = {"flux": flux, "sd3": sd3, "wan": wan, "sdxl": sdxl, "z_image": z_image}


class Block(nn.Module):
    """norm, mixing layer and feed-forward with dropout; a per-step tensor comes in as a keyword."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = nn.Linear(width, width)
        self.ff = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor, temb: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attn(self.norm(x))
        x = x + self.ff(x)
        return x if temb is None else x * temb


class Stack(nn.Module):
    """Blocks called one after the other, with whatever `between` does in between."""

    def __init__(self, depth: int = 4, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([block() for _ in range(depth)])
        self.train()

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        h = self.embed(x)
        for i, block in enumerate(self.blocks):
            h = self.between(i, block(h, **kwargs), x)
        return h

    def between(self, i: int, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return h


def leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for v in value.values():
            yield from leaves(v)
    elif isinstance(value, list | tuple):
        for v in value:
            yield from leaves(v)


def loss_of(output: Any) -> torch.Tensor:
    return torch.stack([t.float().pow(2).mean() for t in leaves(output)]).sum()


def step(model: nn.Module, inputs: Inputs, autocast: bool = False, seed: int = 3) -> Result:
    """One forward and backward from zero gradients and a fixed random state. Gradients of all parameters that have one."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    context = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    with context:
        loss = loss_of(model(**inputs))
    loss.backward()
    return result_of(model, loss)


def result_of(model: nn.Module, loss: torch.Tensor) -> Result:
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Result(loss.detach().clone(), grads)


def assert_same(got: Result, want: Result) -> None:
    assert torch.equal(got.loss, want.loss)
    assert got.grads.keys() == want.grads.keys()
    assert want.grads, "nothing was trained, so nothing was compared"
    different = [name for name, grad in want.grads.items() if not torch.equal(got.grads[name], grad)]
    assert not different
    assert any(bool(g.any()) for g in want.grads.values())
