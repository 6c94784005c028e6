"""ACE-Step 1.0: a transformer with linear self-attention for music, one token a latent frame, conditioned on prompt, voice and lyrics.

Own definition of the released 3.5B model from what is publicly known of it. The heads that compare hidden states with speech and
music encoders are resident, as in a checkpoint; their extra loss is not part of the step.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from probes.models.common import rotary_angles, rotate_pairs, sinusoid

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, float32 [tokens, head_dim / 2]."""


def _rms(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Root-mean-square norm without a weight, in float32, cast back."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


class LinearAttention(nn.Module):
    """Self-attention whose scores are products of rectified queries and keys, so that it is linear in the tokens; in float32."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(size, size) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(size, size), nn.Dropout(0.0)])

    def forward(self, x: torch.Tensor, rotary: Rotary, mask: torch.Tensor) -> torch.Tensor:
        """x [B, N, size], mask [B, N] of ones and zeros."""
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.to_q, self.to_k, self.to_v))
        q, k = rotate_pairs(q, *rotary), rotate_pairs(k, *rotary)
        valid = mask[:, None, :, None].float()
        q, k, v = q.float().relu() * valid, k.float().relu() * valid, v.float() * valid
        v = F.pad(v, (0, 1), value=1.0)
        out = q @ (k.transpose(-1, -2) @ v)
        out = (out[..., :-1] / (out[..., -1:] + 1e-15)).to(x.dtype)
        return self.to_out[0](out.transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    """Attention of the audio tokens onto the conditions. The joint-stream projections of the class that the release is built
    from are in its checkpoint and never called."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(size, size) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(size, size), nn.Dropout(0.0)])
        self.add_q_proj, self.add_k_proj, self.add_v_proj, self.to_add_out = (nn.Linear(size, size) for _ in range(4))

    def forward(
        self, x: torch.Tensor, context: torch.Tensor, rotary: Rotary, context_rotary: Rotary, mask: torch.Tensor
    ) -> torch.Tensor:
        """x [B, N, size], context [B, M, size], mask bool [B, 1, N, M]."""
        q = self.to_q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (p(context).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.to_k, self.to_v))
        q, k = rotate_pairs(q, *rotary), rotate_pairs(k, *context_rotary)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.to_out[0](out.transpose(1, 2).flatten(2))


class GatedConvolution(nn.Module):
    """Feed-forward side: 1-wide, depthwise 3-wide and 1-wide convolutions over the tokens with a gate."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.inverted_conv = nn.Conv1d(size, 2 * inner, 1)
        self.depth_conv = nn.Conv1d(2 * inner, 2 * inner, 3, padding=1, groups=2 * inner)
        self.point_conv = nn.Conv1d(inner, size, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.depth_conv(F.silu(self.inverted_conv(x.transpose(1, 2))))
        x, gate = x.chunk(2, dim=1)
        return self.point_conv(x * F.silu(gate)).transpose(1, 2)


class AceStepV1Block(nn.Module):
    def __init__(self, size: int, heads: int, mlp_ratio: float) -> None:
        super().__init__()
        self.attn = LinearAttention(size, heads)
        self.cross_attn = CrossAttention(size, heads)
        self.ff = GatedConvolution(size, int(size * mlp_ratio))
        self.scale_shift_table = nn.Parameter(torch.randn(6, size) / size**0.5)

    def forward(
        self,
        hidden_states: torch.Tensor,
        context: torch.Tensor,
        temb: torch.Tensor,
        rotary: Rotary,
        context_rotary: Rotary,
        mask: torch.Tensor,
        cross_mask: torch.Tensor,
    ) -> torch.Tensor:
        modulation = self.scale_shift_table[None] + temb.unflatten(1, (6, -1))
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = modulation.chunk(6, dim=1)
        normed = _rms(hidden_states) * (1 + scale_a) + shift_a
        hidden_states = hidden_states + gate_a * self.attn(normed, rotary, mask)
        hidden_states = hidden_states + self.cross_attn(hidden_states, context, rotary, context_rotary, cross_mask)
        normed = _rms(hidden_states) * (1 + scale_f) + shift_f
        return hidden_states + gate_f * self.ff(normed)


class LyricLayer(nn.Module):
    """A conformer layer with relative positions: attention, a 15-wide convolution, a feed-forward."""

    def __init__(self, size: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.linear_q, self.linear_k, self.linear_v, self.linear_out = (nn.Linear(size, size) for _ in range(4))
        self.linear_pos = nn.Linear(size, size, bias=False)
        self.pos_bias_u, self.pos_bias_v = (nn.Parameter(torch.zeros(heads, size // heads)) for _ in range(2))
        self.pointwise_conv1 = nn.Conv1d(size, 2 * size, 1)
        self.depthwise_conv = nn.Conv1d(size, size, 15, padding=7, groups=size)
        self.conv_norm = nn.LayerNorm(size)
        self.pointwise_conv2 = nn.Conv1d(size, size, 1)
        self.w_1, self.w_2 = nn.Linear(size, inner), nn.Linear(inner, size)
        self.norm_mha, self.norm_conv, self.norm_ff, self.norm_final = (nn.LayerNorm(size) for _ in range(4))

    def forward(self, x: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """x [B, N, size], positions [2 N - 1, size], mask bool [B, N]."""
        y, n = self.norm_mha(x), x.shape[1]
        q, k, v = (p(y).unflatten(-1, (self.heads, -1)) for p in (self.linear_q, self.linear_k, self.linear_v))
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        p = self.linear_pos(positions).unflatten(-1, (self.heads, -1)).transpose(0, 1)
        content = (q + self.pos_bias_u).transpose(1, 2) @ k.transpose(-1, -2)
        relative = (q + self.pos_bias_v).transpose(1, 2) @ p.transpose(-1, -2)
        relative = F.pad(relative, (1, 0)).flatten(2)[..., n:].unflatten(2, (n, 2 * n - 1))[..., :n]
        scores = (content + relative) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~mask[:, None, None], -1e4).softmax(-1)
        x = x + self.linear_out((weights @ v).transpose(1, 2).flatten(2))
        y = F.glu(self.pointwise_conv1(self.norm_conv(x).transpose(1, 2)), dim=1)
        y = F.silu(self.conv_norm(self.depthwise_conv(y).transpose(1, 2)))
        x = x + self.pointwise_conv2(y.transpose(1, 2)).transpose(1, 2)
        return self.norm_final(x + self.w_2(F.silu(self.w_1(self.norm_ff(x)))))


class LyricEncoder(nn.Module):
    def __init__(self, size: int, heads: int, inner: int, layers: int) -> None:
        super().__init__()
        self.size = size
        self.embed, self.embed_norm = nn.Linear(size, size), nn.LayerNorm(size)
        self.encoders = nn.ModuleList([LyricLayer(size, heads, inner) for _ in range(layers)])
        self.after_norm = nn.LayerNorm(size)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed_norm(self.embed(x)) * self.size**0.5
        distance = torch.arange(x.shape[1] - 1, -x.shape[1], -1, device=x.device)
        positions = sinusoid(distance, self.size).to(x.dtype)
        for layer in self.encoders:
            x = layer(x, positions, mask)
        return self.after_norm(x)


class AceStepV1Transformer(ModelMixin, ConfigMixin):
    """
    Args:
        height: rows of a latent frame, all of them in one token.
        ssl_sizes: channels of the encoders that the comparison heads look at.
    """

    @register_to_config
    def __init__(
        self,
        in_channels: int = 8,
        out_channels: int = 8,
        height: int = 16,
        num_layers: int = 24,
        attention_head_dim: int = 128,
        num_attention_heads: int = 20,
        mlp_ratio: float = 2.5,
        speaker_dim: int = 512,
        text_dim: int = 768,
        lyric_vocabulary: int = 6693,
        lyric_dim: int = 1024,
        lyric_heads: int = 16,
        lyric_inner: int = 4096,
        lyric_layers: int = 6,
        stem_factor: int = 256,
        ssl_sizes: tuple[int, ...] = (1024, 768),
        rope_theta: float = 1_000_000.0,
    ) -> None:
        super().__init__()
        size, stem = num_attention_heads * attention_head_dim, in_channels * stem_factor
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, stem, (height, 1), stride=(height, 1)),
            nn.GroupNorm(32, stem, eps=1e-6),
            nn.Conv2d(stem, size, 1),
        )
        self.timestep_embedder = nn.Sequential(nn.Linear(256, size), nn.SiLU(), nn.Linear(size, size))
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(size, 6 * size))
        self.speaker_embedder = nn.Linear(speaker_dim, size)
        self.genre_embedder = nn.Linear(text_dim, size)
        self.lyric_embs = nn.Embedding(lyric_vocabulary, lyric_dim)
        self.lyric_encoder = LyricEncoder(lyric_dim, lyric_heads, lyric_inner, lyric_layers)
        self.lyric_proj = nn.Linear(lyric_dim, size)
        self.projectors = nn.ModuleList(
            [
                nn.Sequential(
                    nn.Linear(size, 2 * size),
                    nn.SiLU(),
                    nn.Linear(2 * size, 2 * size),
                    nn.SiLU(),
                    nn.Linear(2 * size, n),
                )
                for n in ssl_sizes
            ]
        )
        self.transformer_blocks = nn.ModuleList(
            [AceStepV1Block(size, num_attention_heads, mlp_ratio) for _ in range(num_layers)]
        )
        self.final_scale_shift = nn.Parameter(torch.randn(2, size) / size**0.5)
        self.final_linear = nn.Linear(size, height * out_channels)

    def _rotary(self, tokens: int, device: torch.device) -> Rotary:
        position = torch.arange(tokens, device=device)
        angle = rotary_angles(position, self.config.attention_head_dim, theta=self.config.rope_theta)
        return angle.cos(), angle.sin()

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        attention_mask: torch.Tensor,
        encoder_text_hidden_states: torch.Tensor,
        text_attention_mask: torch.Tensor,
        speaker_embeds: torch.Tensor,
        lyric_token_idx: torch.Tensor,
        lyric_mask: torch.Tensor,
        return_dict: bool = False,
    ) -> tuple[torch.Tensor]:
        """
        Args:
            hidden_states: latents [B, C, height, frames].
            timestep: 0 to 1000, [B].
            attention_mask: valid frames, bool [B, frames].
            encoder_text_hidden_states: [B, T, text_dim].
            text_attention_mask: bool [B, T].
            speaker_embeds: [B, speaker_dim].
            lyric_token_idx: [B, lyrics].
            lyric_mask: bool [B, lyrics].
        """
        x = self.stem(hidden_states).flatten(2).transpose(1, 2)
        lyrics = self.lyric_proj(self.lyric_encoder(self.lyric_embs(lyric_token_idx).to(x.dtype), lyric_mask))
        context = torch.cat(
            [self.speaker_embedder(speaker_embeds)[:, None], self.genre_embedder(encoder_text_hidden_states), lyrics],
            dim=1,
        )
        valid = torch.cat([torch.ones_like(text_attention_mask[:, :1]), text_attention_mask, lyric_mask], dim=1)
        cross_mask = (attention_mask[:, :, None] & valid[:, None, :])[:, None]
        embedded = self.timestep_embedder(sinusoid(timestep, 256).to(x.dtype))
        temb = self.t_block(embedded)
        rotary, context_rotary = self._rotary(x.shape[1], x.device), self._rotary(context.shape[1], x.device)
        for block in self.transformer_blocks:
            x = block(x, context, temb, rotary, context_rotary, attention_mask, cross_mask)
        shift, scale = (self.final_scale_shift[None] + embedded[:, None]).chunk(2, dim=1)
        out = self.final_linear(_rms(x) * (1 + scale) + shift).unflatten(-1, (self.config.height, -1))
        return (out.permute(0, 3, 2, 1),)
