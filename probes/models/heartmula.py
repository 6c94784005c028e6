"""HeartMuLa: an autoregressive music model, trained with cross entropy (4.7 B parameters).

A Llama backbone reads one token a frame, the sum of eight codebook embeddings and one of text; a small Llama over eight
positions a frame predicts the codebooks after the first. Attention is causal and takes no mask tensors.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from probes.models.common import Float32RMSNorm

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of every channel, [positions, head_dim] in the compute dtype."""


def llama3_frequencies(
    size: int, theta: float, factor: float = 32.0, low: float = 1.0, high: float = 4.0, original: int = 8192
) -> torch.Tensor:
    """Rotary frequencies with Llama 3's scaling: long wavelengths are stretched by `factor`, short ones kept, those
    between blended; float32 [size / 2]."""
    frequency = theta ** -(torch.arange(0, size, 2, dtype=torch.float32) / size)
    turns = original * frequency / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * (smooth + (1 - smooth) / factor)


def rotate_halves(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rotates channel i with channel i + D / 2, in the dtype of `x`."""
    first, second = x.chunk(2, dim=-1)
    return x * rotary[0] + torch.cat([-second, first], dim=-1) * rotary[1]


class SelfAttention(nn.Module):
    """Causal attention with fewer key and value heads than query heads."""

    def __init__(self, size: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = size // heads
        self.q_proj = nn.Linear(size, size, bias=False)
        self.k_proj = nn.Linear(size, self.head_dim * kv_heads, bias=False)
        self.v_proj = nn.Linear(size, self.head_dim * kv_heads, bias=False)
        self.o_proj = nn.Linear(size, size, bias=False)

    def forward(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate_halves(q, rotary), rotate_halves(k, rotary)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nn.Module):
    def __init__(self, size: int, heads: int, kv_heads: int, inner: int) -> None:
        super().__init__()
        self.input_layernorm = Float32RMSNorm(size, 1e-5)
        self.self_attn = SelfAttention(size, heads, kv_heads)
        self.post_attention_layernorm = Float32RMSNorm(size, 1e-5)
        self.mlp = FeedForward(size, inner)

    def forward(self, hidden_states: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        x = hidden_states + self.self_attn(self.input_layernorm(hidden_states), rotary)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaStack(nn.Module):
    """Works on embeddings; its own embedding table is resident and never used."""

    def __init__(
        self, vocabulary: int, size: int, layers: int, heads: int, kv_heads: int, inner: int, theta: float
    ) -> None:
        super().__init__()
        self.head_dim = size // heads
        self.theta = theta
        self.embed_tokens = nn.Embedding(vocabulary, size)
        self.layers = nn.ModuleList([LlamaLayer(size, heads, kv_heads, inner) for _ in range(layers)])
        self.norm = Float32RMSNorm(size, 1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frequency = llama3_frequencies(self.head_dim, self.theta).to(x.device)
        angle = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)[:, None] * frequency
        angle = torch.cat([angle, angle], dim=-1)
        rotary = (angle.cos().to(x.dtype), angle.sin().to(x.dtype))
        for layer in self.layers:
            x = layer(x, rotary)
        return self.norm(x)


class HeartMuLaModel(ModelMixin, ConfigMixin):
    """
    Args:
        audio_vocab_size: entries of each of the `codebooks`.
        muq_dim: channels of the music features whose projection training does not use.
    """

    @register_to_config
    def __init__(
        self,
        text_vocab_size: int = 128256,
        audio_vocab_size: int = 8197,
        codebooks: int = 8,
        hidden_size: int = 3072,
        ffn_size: int = 8192,
        backbone_layers: int = 28,
        backbone_heads: int = 24,
        backbone_kv_heads: int = 8,
        decoder_layers: int = 3,
        decoder_heads: int = 8,
        decoder_kv_heads: int = 4,
        muq_dim: int = 512,
        rope_theta: float = 500000.0,
    ) -> None:
        super().__init__()
        self.text_embeddings = nn.Embedding(text_vocab_size, hidden_size)
        self.audio_embeddings = nn.Embedding(audio_vocab_size * codebooks, hidden_size)
        self.unconditional_text_embedding = nn.Embedding(1, hidden_size)
        self.muq_linear = nn.Linear(muq_dim, hidden_size)
        self.backbone = LlamaStack(
            text_vocab_size, hidden_size, backbone_layers, backbone_heads, backbone_kv_heads, ffn_size, rope_theta
        )
        self.projection = nn.Linear(hidden_size, hidden_size, bias=False)
        self.decoder = LlamaStack(
            text_vocab_size, hidden_size, decoder_layers, decoder_heads, decoder_kv_heads, ffn_size, rope_theta
        )
        self.codebook0_head = nn.Linear(hidden_size, audio_vocab_size, bias=False)
        self.audio_head = nn.Parameter(torch.randn(codebooks - 1, hidden_size, audio_vocab_size) * 0.02)

    def _embed_audio(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes [..., n] of codebooks 0 to n - 1 -> [..., n, hidden_size]."""
        offset = torch.arange(codes.shape[-1], device=codes.device) * self.config.audio_vocab_size
        return self.audio_embeddings(codes + offset)

    def forward(
        self, tokens: torch.Tensor, tokens_mask: torch.Tensor, return_dict: bool = False
    ) -> tuple[tuple[torch.Tensor, torch.Tensor]]:
        """
        Args:
            tokens: ids [B, S, codebooks + 1], the last one of text.
            tokens_mask: which of them count, bool, same shape.

        Returns:
            Logits for frames 1 to S - 1: of the first codebook [B, S - 1, 1, V] and of the others [B, S - 1, n, V].
        """
        codes = tokens[..., :-1]
        embedded = torch.cat([self._embed_audio(codes), self.text_embeddings(tokens[..., -1:])], dim=-2)
        x = (embedded * tokens_mask[..., None].to(embedded.dtype)).sum(dim=2).to(embedded.dtype)
        hidden = self.backbone(x)[:, :-1]
        first = self.codebook0_head(hidden)

        depth = torch.cat([hidden[:, :, None], self._embed_audio(codes[:, 1:, :-1])], dim=2)
        depth = self.decoder(self.projection(depth).flatten(0, 1))[:, 1:]
        others = torch.matmul(depth.transpose(0, 1), self.audio_head)
        others = others.transpose(0, 1).unflatten(0, tuple(hidden.shape[:2]))
        return ((first[:, :, None], others),)
