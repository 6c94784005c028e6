"""MageFlow: 12 double-stream blocks over packed sequences of different lengths (4.1 B parameters).

All samples lie in one row of tokens; modulation is expanded to one row a token, and attention works on [text, image] of each
sample, brought into that order by index. Lengths are Python numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from diffusers.models.normalization import RMSNorm
from torch import nn

from probes.models.common import grid_positions, rotary_angles


@dataclass(frozen=True)
class Packing:
    """How the samples lie in the two packed streams, in tokens a sample."""

    text: tuple[int, ...]
    image: tuple[int, ...]


class PackedAttention(nn.Module):
    """Attention within each sample. q, k, v of both streams [tokens, heads, head_dim]; results [1, tokens, size]."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        head = size // heads
        self.to_q = nn.Linear(size, size)
        self.to_k = nn.Linear(size, size)
        self.to_v = nn.Linear(size, size)
        self.add_q_proj = nn.Linear(size, size)
        self.add_k_proj = nn.Linear(size, size)
        self.add_v_proj = nn.Linear(size, size)
        self.norm_q = RMSNorm(head, eps=1e-6)
        self.norm_k = RMSNorm(head, eps=1e-6)
        self.norm_added_q = RMSNorm(head, eps=1e-6)
        self.norm_added_k = RMSNorm(head, eps=1e-6)
        self.to_out = nn.ModuleList([nn.Linear(size, size)])
        self.to_add_out = nn.Linear(size, size)

    def forward(
        self,
        image: torch.Tensor,
        text: torch.Tensor,
        rotary: torch.Tensor,
        image_index: torch.Tensor,
        text_index: torch.Tensor,
        packing: Packing,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def heads(x: torch.Tensor) -> torch.Tensor:
            return x[0].unflatten(-1, (self.heads, -1))

        q, k, v = heads(self.to_q(image)), heads(self.to_k(image)), heads(self.to_v(image))
        q, k = rotate_complex(self.norm_q(q), rotary), rotate_complex(self.norm_k(k), rotary)
        text_q, text_k, text_v = (
            heads(self.add_q_proj(text)),
            heads(self.add_k_proj(text)),
            heads(self.add_v_proj(text)),
        )
        text_q, text_k = self.norm_added_q(text_q), self.norm_added_k(text_k)
        joint = [
            _scattered(a, b.to(a.dtype), image_index, text_index) for a, b in ((q, text_q), (k, text_k), (v, text_v))
        ]
        out = _attend(joint, [t + i for t, i in zip(packing.text, packing.image, strict=True)]).flatten(1)
        return self.to_out[0](out[image_index][None]), self.to_add_out(out[text_index][None])


def rotate_complex(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, D] times unit complex numbers [tokens, D / 2], in float32, cast back."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotary[:, None]).flatten(-2).to(x.dtype)


def _scattered(
    image: torch.Tensor, text: torch.Tensor, image_index: torch.Tensor, text_index: torch.Tensor
) -> torch.Tensor:
    out = image.new_empty(image.shape[0] + text.shape[0], *image.shape[1:])
    out[text_index] = text
    out[image_index] = image
    return out


def _attend(qkv: list[torch.Tensor], lengths: list[int]) -> torch.Tensor:
    """Attention inside each run of tokens, as one variable-length call has it. [tokens, heads, D] in and out."""
    if len(set(lengths)) == 1:
        q, k, v = (t.unflatten(0, (len(lengths), -1)).transpose(1, 2) for t in qkv)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)
    runs = zip(*(t[None].transpose(1, 2).split(lengths, dim=2) for t in qkv), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*run) for run in runs], dim=2).transpose(1, 2)[0]


def _per_token(x: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """One row a sample [B, C] -> one row a token [1, tokens, C], copied."""
    return torch.cat([row.expand(n, -1) for row, n in zip(x.split(1), lengths, strict=True)])[None]


class MageFlowBlock(nn.Module):
    def __init__(self, size: int, heads: int, inner: int) -> None:
        super().__init__()
        self.img_mod = nn.Sequential(nn.SiLU(), nn.Linear(size, 6 * size))
        self.txt_mod = nn.Sequential(nn.SiLU(), nn.Linear(size, 6 * size))
        self.img_norm1 = nn.LayerNorm(size, elementwise_affine=False, eps=1e-6)
        self.txt_norm1 = nn.LayerNorm(size, elementwise_affine=False, eps=1e-6)
        self.attn = PackedAttention(size, heads)
        self.img_norm2 = nn.LayerNorm(size, elementwise_affine=False, eps=1e-6)
        self.img_mlp = _mlp(size, inner)
        self.txt_norm2 = nn.LayerNorm(size, elementwise_affine=False, eps=1e-6)
        self.txt_mlp = _mlp(size, inner)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        rotary: torch.Tensor,
        image_index: torch.Tensor,
        text_index: torch.Tensor,
        packing: Packing,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (text, image)."""
        image, text = hidden_states, encoder_hidden_states
        image_1, image_2 = self.img_mod(temb).chunk(2, dim=-1)
        text_1, text_2 = self.txt_mod(temb).chunk(2, dim=-1)

        image_normed, image_gate = _modulated(self.img_norm1(image), image_1, packing.image)
        text_normed, text_gate = _modulated(self.txt_norm1(text), text_1, packing.text)
        image_out, text_out = self.attn(image_normed, text_normed, rotary, image_index, text_index, packing)
        image = image + image_gate * image_out
        text = text + text_gate * text_out

        image_normed, image_gate = _modulated(self.img_norm2(image), image_2, packing.image)
        image = image + image_gate * self.img_mlp(image_normed)
        text_normed, text_gate = _modulated(self.txt_norm2(text), text_2, packing.text)
        return text + text_gate * self.txt_mlp(text_normed), image


def _modulated(
    normed: torch.Tensor, modulation: torch.Tensor, lengths: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The modulated input and the gate, from shift, scale and gate of each sample expanded to its tokens."""
    shift, scale, gate = (_per_token(m, lengths) for m in modulation.chunk(3, dim=-1))
    return normed * (1 + scale) + shift, gate


def _mlp(size: int, inner: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size, inner), nn.GELU(approximate="tanh"), nn.Linear(inner, size))


class OutputNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, 2 * size)
        self.norm = nn.LayerNorm(size, elementwise_affine=False, eps=1e-6)

    def forward(self, x: torch.Tensor, temb: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        scale, shift = (_per_token(m, lengths) for m in self.linear(F.silu(temb)).chunk(2, dim=-1))
        return self.norm(x) * (1 + scale) + shift


class TimeEmbed(nn.Module):
    """Sinusoid of t * 1000 with frequencies rounded to bfloat16, then two linears."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.timestep_embedder = nn.Sequential(nn.Linear(256, size), nn.SiLU(), nn.Linear(size, size))

    def forward(self, timestep: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        steps = torch.arange(128, dtype=torch.float32, device=timestep.device)
        frequency = torch.exp(steps * (-math.log(10000.0) / 128)).bfloat16().float()
        angle = 1000.0 * timestep.float()[:, None] * frequency
        return self.timestep_embedder(torch.cat([angle.cos(), angle.sin()], dim=-1).to(dtype))


class MageFlowTransformer2DModel(ModelMixin, ConfigMixin):
    """
    Args:
        context_in_dim: channels of the text features.
    """

    @register_to_config
    def __init__(
        self,
        in_channels: int = 128,
        context_in_dim: int = 2560,
        hidden_size: int = 3072,
        num_heads: int = 24,
        depth: int = 12,
        mlp_ratio: float = 4.0,
        axes_dim: tuple[int, int, int] = (16, 56, 56),
        theta: float = 10000.0,
    ) -> None:
        super().__init__()
        self.img_in = nn.Linear(in_channels, hidden_size)
        self.txt_norm = RMSNorm(context_in_dim, eps=1e-6)
        self.txt_in = nn.Linear(context_in_dim, hidden_size)
        self.time_text_embed = TimeEmbed(hidden_size)
        self.transformer_blocks = nn.ModuleList(
            [MageFlowBlock(hidden_size, num_heads, int(hidden_size * mlp_ratio)) for _ in range(depth)]
        )
        self.norm_out = OutputNorm(hidden_size)
        self.proj_out = nn.Linear(hidden_size, in_channels)

    def _rotary(self, height: int, width: int, index: int, device: torch.device) -> torch.Tensor:
        """Unit complex numbers [tokens, head_dim / 2] of the image with that index in its sample; rows and columns are
        counted from the middle."""
        rows, columns = grid_positions(height, width, device=device)
        positions = (torch.full_like(rows, index), rows - height // 2, columns - width // 2)
        axes = zip(positions, self.config.axes_dim, strict=True)
        angle = torch.cat([rotary_angles(p, d, theta=self.config.theta) for p, d in axes], dim=-1)
        return torch.polar(torch.ones_like(angle), angle)

    def forward(
        self,
        img: list[torch.Tensor],
        txt: list[torch.Tensor],
        timesteps: torch.Tensor,
        ref: list[torch.Tensor] | None = None,
        return_dict: bool = False,
    ) -> tuple[torch.Tensor]:
        """
        Args:
            img: latents of each sample [C, H, W]; they are packed into one row of tokens.
            txt: text features of each sample [T, context_in_dim].
            timesteps: [B], 0 to 1.
            ref: reference latents of each sample [references, C, h, w], for edits.

        Returns:
            The prediction for the tokens of `img`, packed: [1, tokens, C].
        """
        device = timesteps.device
        pictures = [[sample] if ref is None else [sample, *ref[i]] for i, sample in enumerate(img)]
        image = torch.cat([p.flatten(1).T for sample in pictures for p in sample])[None]
        text = torch.cat(txt)[None]
        packing = Packing(
            tuple(t.shape[0] for t in txt), tuple(sum(p[0].numel() for p in sample) for sample in pictures)
        )
        rotary = torch.cat(
            [self._rotary(p.shape[1], p.shape[2], j, device) for sample in pictures for j, p in enumerate(sample)]
        )
        image_index, text_index = self._order(packing, device)
        image = self.img_in(image)
        text = self.txt_in(self.txt_norm(text))
        temb = self.time_text_embed(timesteps, image.dtype)
        for block in self.transformer_blocks:
            text, image = block(image, text, temb, rotary, image_index, text_index, packing)
        out = self.proj_out(self.norm_out(image, temb, packing.image))
        if ref is not None:
            own = [p[0][0].numel() for p in pictures]
            parts = zip(out.split(list(packing.image), dim=1), own, strict=True)
            out = torch.cat([part[:, :n] for part, n in parts], dim=1)
        return (out,)

    @staticmethod
    def _order(packing: Packing, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Places of the image and of the text tokens when every sample's text is followed by its image."""
        images, texts, start = [], [], 0
        for t, i in zip(packing.text, packing.image, strict=True):
            texts.append(torch.arange(start, start + t, device=device))
            images.append(torch.arange(start + t, start + t + i, device=device))
            start += t + i
        return torch.cat(images), torch.cat(texts)
