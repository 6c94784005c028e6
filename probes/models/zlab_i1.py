"""ZLab i1: a U-shaped two-stream transformer for images without timestep conditioning (3.17 B parameters).

Out block j gets the outputs of in block depth/2 - 1 - j as its skip. The skips that are still to be used travel through the
out blocks as arguments and results, so that several out blocks can share a checkpoint.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from probes.models.common import Float32RMSNorm, SwiGLU, grid_positions, rotary_angles, rotate_pairs

Freqs = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, float32 [tokens, 1, head_dim / 2]."""


class RotaryTable(nn.Module):
    """Cosines and sines of one rotary axis; the original keeps them as frozen parameters."""

    def __init__(self, length: int, size: int, theta: float) -> None:
        super().__init__()
        angle = rotary_angles(torch.arange(length), size, theta=theta)
        self.cos = nn.Parameter(angle.cos(), requires_grad=False)
        self.sin = nn.Parameter(angle.sin(), requires_grad=False)

    def forward(self, position: torch.Tensor) -> Freqs:
        return self.cos[position].float(), self.sin[position].float()


class JointAttention(nn.Module):
    """One attention over image and text tokens, with projections per stream and shared head norms."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv_image = nn.Linear(size, 3 * size)
        self.qkv_text = nn.Linear(size, 3 * size)
        self.q_norm = Float32RMSNorm(size // heads)
        self.k_norm = Float32RMSNorm(size // heads)
        self.proj_image = nn.Linear(size, size)
        self.proj_text = nn.Linear(size, size)

    def _qkv(self, x: torch.Tensor, projection: nn.Module, freqs: Freqs) -> tuple[torch.Tensor, ...]:
        q, k, v = projection(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return rotate_pairs(self.q_norm(q), *freqs), rotate_pairs(self.k_norm(k), *freqs), v

    def forward(
        self, image: torch.Tensor, text: torch.Tensor, image_freqs: Freqs, text_freqs: Freqs, text_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = zip(
            self._qkv(image, self.qkv_image, image_freqs), self._qkv(text, self.qkv_text, text_freqs), strict=True
        )
        q, k, v = (torch.cat(pair, dim=1).transpose(1, 2) for pair in parts)
        tokens = image.shape[1]
        mask = F.pad(text_mask, (tokens, 0), value=True)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        out = out.transpose(1, 2).flatten(2) * mask[..., None].to(out.dtype)
        return self.proj_image(out[:, :tokens]), self.proj_text(out[:, tokens:])


class I1Block(nn.Module):
    """Attention and SwiGLU on two streams, each between two norms. With `skip`, first merges the newest skip pair.

    Returns (image, text), and with `skip` the skip tensors that are left.
    """

    def __init__(self, size: int, heads: int, inner: int, *, position: int, skip: bool = False) -> None:
        super().__init__()
        self.position = position
        if skip:
            self.skip_linear_image = nn.Linear(2 * size, size)
            self.skip_linear_text = nn.Linear(2 * size, size)
        self.norm1 = Float32RMSNorm(size)
        self.norm2 = Float32RMSNorm(size)
        self.norm3 = Float32RMSNorm(size)
        self.norm4 = Float32RMSNorm(size)
        self.attn = JointAttention(size, heads)
        self.mlp_image = SwiGLU(size, inner)
        self.mlp_text = SwiGLU(size, inner)

    def forward(
        self,
        image: torch.Tensor,
        text: torch.Tensor,
        image_freqs: Freqs,
        text_freqs: Freqs,
        text_mask: torch.Tensor,
        skips: tuple[torch.Tensor, ...] | None = None,
    ) -> tuple[torch.Tensor | tuple[torch.Tensor, ...], ...]:
        if skips is not None:
            image = self.skip_linear_image(torch.cat([image, skips[-2]], dim=-1))
            text = self.skip_linear_text(torch.cat([text, skips[-1]], dim=-1))
        a, b = self.attn(self.norm1(image), self.norm1(text), image_freqs, text_freqs, text_mask)
        image = image + self.norm3(a)
        text = text + self.norm3(b)
        image = image + self.norm4(self.mlp_image(self.norm2(image)))
        text = text + self.norm4(self.mlp_text(self.norm2(text)))
        text = text * text_mask[..., None].to(text.dtype)
        return (image, text) if skips is None else (image, text, skips[:-2])


class TextLayer(nn.Module):
    """A plain pre-norm layer over the text tokens, without mask or positions."""

    def __init__(self, size: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = Float32RMSNorm(size)
        self.qkv = nn.Linear(size, 3 * size)
        self.q_norm = Float32RMSNorm(size // heads)
        self.k_norm = Float32RMSNorm(size // heads)
        self.proj = nn.Linear(size, size)
        self.norm2 = Float32RMSNorm(size)
        self.mlp = SwiGLU(size, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        x = x + self.proj(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class TextAdapter(nn.Module):
    """Projects the text features and refines them in two layers."""

    def __init__(self, text_size: int, tokens: int, size: int, heads: int, inner: int) -> None:
        super().__init__()
        self.null_caption = nn.Parameter(torch.zeros(1, tokens, text_size))
        self.proj_in = nn.Linear(text_size, size)
        self.layers = nn.ModuleList([TextLayer(size, heads, inner) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.proj_in(x)
        for layer in self.layers:
            x = layer(x)
        return x


class FinalLayer(nn.Module):
    def __init__(self, size: int, out: int) -> None:
        super().__init__()
        self.norm = Float32RMSNorm(size)
        self.linear = nn.Linear(size, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


class PatchEmbed(nn.Module):
    def __init__(self, channels: int, size: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, size, patch, stride=patch)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class TimeEmbedder(nn.Module):
    """Resident in the original, never called."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(256, size), nn.SiLU(), nn.Linear(size, size))


def sincos_table(size: int, height: int, width: int) -> np.ndarray:
    """Fixed two-dimensional position table, float32 [height * width, size]: half the channels for rows, half for columns."""
    frequency = 1.0 / 10000 ** (np.arange(size // 4) / (size / 4))
    rows, columns = (p.reshape(-1, 1) * frequency for p in np.mgrid[:height, :width])
    return np.concatenate([np.sin(rows), np.cos(rows), np.sin(columns), np.cos(columns)], axis=1).astype(np.float32)


class I1Transformer2DModel(ModelMixin, ConfigMixin):
    """
    Args:
        depth: blocks in all, odd: (depth - 1) / 2 in, one mid, (depth - 1) / 2 out.
        grid: tokens on a side at the native resolution.
    """

    @register_to_config
    def __init__(
        self,
        in_channels: int = 32,
        patch_size: int = 2,
        hidden_size: int = 2016,
        num_heads: int = 28,
        depth: int = 29,
        mlp_size: int = 5376,
        text_embed_dim: int = 2304,
        text_num_tokens: int = 256,
        grid: int = 64,
        axes_dim: tuple[int, int, int] = (36, 18, 18),
        theta: float = 10000.0,
    ) -> None:
        super().__init__()
        half = depth // 2
        self.grid = grid
        self.x_embedder = PatchEmbed(in_channels, hidden_size, patch_size)
        self.pos_embed = nn.Parameter(torch.zeros(1, grid * grid, hidden_size), requires_grad=False)
        self.t_embedder = TimeEmbedder(hidden_size).requires_grad_(False)
        self.text_encoder_adapter = TextAdapter(text_embed_dim, text_num_tokens, hidden_size, num_heads, mlp_size)
        lengths = (text_num_tokens + 1, grid, grid)
        self.rope = nn.ModuleList([RotaryTable(n, d, theta) for n, d in zip(lengths, axes_dim, strict=True)])
        self.in_blocks = nn.ModuleList([I1Block(hidden_size, num_heads, mlp_size, position=i) for i in range(half)])
        self.mid_block = nn.ModuleList([I1Block(hidden_size, num_heads, mlp_size, position=half)])
        self.out_blocks = nn.ModuleList(
            [I1Block(hidden_size, num_heads, mlp_size, position=half + 1 + i, skip=True) for i in range(half)]
        )
        self.final_layer = FinalLayer(hidden_size, patch_size * patch_size * in_channels)

    def _freqs(self, *positions: torch.Tensor) -> Freqs:
        tables = [table(p) for table, p in zip(self.rope, positions, strict=True)]
        cos, sin = (torch.cat([t[i] for t in tables], dim=-1)[:, None] for i in (0, 1))
        return cos, sin

    def _positions(self, height: int, width: int, x: torch.Tensor) -> torch.Tensor:
        if height == width == self.grid:
            return self.pos_embed.to(x.dtype)
        table = sincos_table(x.shape[-1], height, width)
        return torch.from_numpy(table).to(x.device, x.dtype)[None]

    def forward(
        self, x: torch.Tensor, t: torch.Tensor, caption: torch.Tensor, mask: torch.Tensor, return_dict: bool = False
    ) -> tuple[torch.Tensor]:
        """
        Args:
            x: latents [B, C, H, W].
            t: ignored.
            caption: text features [B, T, text_embed_dim].
            mask: valid text tokens, bool [B, T].
        """
        patch = self.config.patch_size
        height, width = x.shape[2] // patch, x.shape[3] // patch
        image = self.x_embedder(x)
        image = image + self._positions(height, width, image)
        text = self.text_encoder_adapter(caption)
        length = text.shape[1]
        rows, columns = grid_positions(height, width, device=x.device)
        steps = torch.arange(length, device=x.device)
        constants = (
            self._freqs(torch.full_like(rows, self.config.text_num_tokens), rows, columns),
            self._freqs(steps, torch.zeros_like(steps), torch.zeros_like(steps)),
            mask,
        )
        skips: tuple[torch.Tensor, ...] = ()
        for block in self.in_blocks:
            image, text = block(image, text, *constants)
            skips = (*skips, image, text)
        for block in self.mid_block:
            image, text = block(image, text, *constants)
        for block in self.out_blocks:
            image, text, skips = block(image, text, *constants, skips)
        out = self.final_layer(image).unflatten(1, (height, width)).unflatten(-1, (patch, patch, -1))
        return (out.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3),)
