"""LongCat Video: 48 single-stream blocks with modulation per latent frame (13.6 B parameters).

Norms, modulation, residuals and the whole feed-forward side run in float32; the feed-forward's residual adds to the
modulated stream. Lengths are Python numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from probes.models.common import Float32RMSNorm, float32_region, grid_positions, rotary_angles, rotate_full, sinusoid


class Float32LayerNorm(nn.LayerNorm):
    """On a float32 copy of the input, with the result in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = (None if p is None else p.float() for p in (self.weight, self.bias))
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps)


def modulated(normed: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """normed [B, N, C] with shift and scale [B, frames, 1, C], which hold for all tokens of a frame."""
    return (normed.unflatten(1, (shift.shape[1], -1)) * (1 + scale) + shift).flatten(1, 2)


def gated(gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (gate * x.unflatten(1, (gate.shape[1], -1))).flatten(1, 2)


class SelfAttention(nn.Module):
    """
    Args:
        over_heads: attend over the head axis instead of the tokens, as one trainer's copy of the model does (its tensors
            reach the attention call transposed): the same saved tensors, but no quadratic cost.
    """

    def __init__(self, size: int, heads: int, over_heads: bool) -> None:
        super().__init__()
        self.heads = heads
        self.over_heads = over_heads
        self.qkv = nn.Linear(size, 3 * size)
        self.q_norm = Float32RMSNorm(size // heads)
        self.k_norm = Float32RMSNorm(size // heads)
        self.proj = nn.Linear(size, size)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        cos, sin = angles.cos(), angles.sin()
        q, k = rotate_full(self.q_norm(q), cos, sin), rotate_full(self.k_norm(k), cos, sin)
        if self.over_heads:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v)
        if not self.over_heads:
            out = out.transpose(1, 2)
        return self.proj(out.flatten(2))


class CrossAttention(nn.Module):
    """One attention call per sample over its text tokens, without a mask."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_linear = nn.Linear(size, size)
        self.kv_linear = nn.Linear(size, 2 * size)
        self.q_norm = Float32RMSNorm(size // heads)
        self.k_norm = Float32RMSNorm(size // heads)
        self.proj = nn.Linear(size, size)

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        q = self.q_norm(self.q_linear(x).unflatten(-1, (self.heads, -1)))
        k, v = self.kv_linear(text).unflatten(-1, (2, self.heads, -1)).unbind(2)
        k = self.k_norm(k)
        out = [
            F.scaled_dot_product_attention(*(t[i : i + 1].transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
            for i in range(x.shape[0])
        ]
        return self.proj(torch.cat(out).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU without biases, in float32 under autocast."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(size, inner, bias=False)
        self.w2 = nn.Linear(inner, size, bias=False)
        self.w3 = nn.Linear(size, inner, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with float32_region(x.device.type):
            return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LongCatVideoBlock(nn.Module):
    def __init__(self, size: int, heads: int, inner: int, time_size: int, over_heads: bool) -> None:
        super().__init__()
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(time_size, 6 * size))
        self.mod_norm_attn = Float32LayerNorm(size, eps=1e-6, elementwise_affine=False)
        self.mod_norm_ffn = Float32LayerNorm(size, eps=1e-6, elementwise_affine=False)
        self.pre_crs_attn_norm = Float32LayerNorm(size, eps=1e-6)
        self.attn = SelfAttention(size, heads, over_heads)
        self.cross_attn = CrossAttention(size, heads)
        self.ffn = FeedForward(size, inner)

    def forward(self, x: torch.Tensor, y: torch.Tensor, t: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        with float32_region(x.device.type):
            shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = self.adaLN_modulation(t)[:, :, None].chunk(6, dim=-1)
        inner = self.attn(modulated(self.mod_norm_attn(x), shift, scale).to(dtype), angles)
        x = (x + gated(gate, inner)).to(dtype)
        x = x + self.cross_attn(self.pre_crs_attn_norm(x).to(dtype), y)
        x = modulated(self.mod_norm_ffn(x), ffn_shift, ffn_scale).to(dtype)
        return (x + gated(ffn_gate, self.ffn(x))).to(dtype)


class PatchEmbed(nn.Module):
    def __init__(self, channels: int, size: int, patch: tuple[int, int, int]) -> None:
        super().__init__()
        self.proj = nn.Conv3d(channels, size, tuple(patch), stride=tuple(patch))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class TimeEmbedder(nn.Module):
    def __init__(self, frequencies: int, size: int) -> None:
        super().__init__()
        self.frequencies = frequencies
        self.mlp = nn.Sequential(nn.Linear(frequencies, size), nn.SiLU(), nn.Linear(size, size))

    def forward(self, timestep: torch.Tensor) -> torch.Tensor:
        """timestep [B, frames] -> float32 [B, frames, size]."""
        with float32_region(timestep.device.type):
            return self.mlp(sinusoid(timestep.flatten(), self.frequencies)).unflatten(0, tuple(timestep.shape))


class CaptionEmbedder(nn.Module):
    def __init__(self, text_size: int, size: int) -> None:
        super().__init__()
        self.y_proj = nn.Sequential(nn.Linear(text_size, size), nn.GELU(approximate="tanh"), nn.Linear(size, size))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.y_proj(text)


class FinalLayer(nn.Module):
    def __init__(self, size: int, time_size: int, out: int) -> None:
        super().__init__()
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(time_size, 2 * size))
        self.norm_final = Float32LayerNorm(size, eps=1e-6, elementwise_affine=False)
        self.linear = nn.Linear(size, out)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        with float32_region(x.device.type):
            shift, scale = self.adaLN_modulation(t)[:, :, None].chunk(2, dim=-1)
            return self.linear(modulated(self.norm_final(x), shift, scale))


class LongCatVideoTransformer3DModel(ModelMixin, ConfigMixin):
    """
    Args:
        ffn_size: width of the SwiGLU.
        attention_over_heads: see `SelfAttention`.
    """

    @register_to_config
    def __init__(
        self,
        in_channels: int = 16,
        hidden_size: int = 4096,
        depth: int = 48,
        num_heads: int = 32,
        ffn_size: int = 11008,
        caption_channels: int = 4096,
        adaln_tembed_dim: int = 512,
        frequency_embedding_size: int = 256,
        patch_size: tuple[int, int, int] = (1, 2, 2),
        attention_over_heads: bool = False,
    ) -> None:
        super().__init__()
        self.x_embedder = PatchEmbed(in_channels, hidden_size, patch_size)
        self.t_embedder = TimeEmbedder(frequency_embedding_size, adaln_tembed_dim)
        self.y_embedder = CaptionEmbedder(caption_channels, hidden_size)
        self.blocks = nn.ModuleList(
            [
                LongCatVideoBlock(hidden_size, num_heads, ffn_size, adaln_tembed_dim, attention_over_heads)
                for _ in range(depth)
            ]
        )
        patch = patch_size[0] * patch_size[1] * patch_size[2]
        self.final_layer = FinalLayer(hidden_size, adaln_tembed_dim, patch * in_channels)

    def _angles(self, frames: int, height: int, width: int, device: torch.device) -> torch.Tensor:
        """Angle of every channel, float32 [N, head_dim]: time first, then rows and columns with a third (even) each."""
        head = self.config.hidden_size // self.config.num_heads
        side = head // 6 * 2
        positions = grid_positions(frames, height, width, device=device)
        sizes = (head - 2 * side, side, side)
        angles = torch.cat([rotary_angles(p, d) for p, d in zip(positions, sizes, strict=True)], dim=-1)
        return angles.repeat_interleave(2, dim=-1)

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_attention_mask: torch.Tensor,
        return_dict: bool = False,
    ) -> tuple[torch.Tensor]:
        """
        Args:
            hidden_states: latents [B, C, F, H, W].
            timestep: [B], or [B, F] for one a latent frame.
            encoder_hidden_states: [B, T, caption_channels].
            encoder_attention_mask: [B, T]; features of padding are zeroed, their tokens stay.
        """
        pt, ph, pw = self.config.patch_size
        frames, height, width = (n // p for n, p in zip(hidden_states.shape[2:], (pt, ph, pw), strict=True))
        x = self.x_embedder(hidden_states)
        if timestep.ndim == 1:
            timestep = timestep[:, None].expand(-1, frames)
        t = self.t_embedder(timestep)
        y = self.y_embedder(encoder_hidden_states)
        y = y * encoder_attention_mask[..., None].to(y.dtype)
        angles = self._angles(frames, height, width, x.device)
        for block in self.blocks:
            x = block(x, y, t, angles)
        out = self.final_layer(x, t).unflatten(1, (frames, height, width)).unflatten(-1, (pt, ph, pw, -1))
        return (out.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6).flatten(4, 5).flatten(2, 3).float(),)
