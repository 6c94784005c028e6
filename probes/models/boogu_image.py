"""Boogu Image 0.1: double-stream then single-stream blocks over [instruction; references; image] (10.3 B parameters).

Key masks are always passed to attention, key and value heads are repeated, and streams are joined by slice copies into
zeroed buffers, as in the original. Lengths are Python numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from diffusers.models.normalization import RMSNorm as WrittenOutRMSNorm
from torch import nn

from probes.models.common import grid_positions, rotary_angles, rotate_pairs, sinusoid

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, float32 [tokens, 1, head_dim / 2]."""


def joined(*parts: torch.Tensor) -> torch.Tensor:
    """Parts [B, Ti, ...] one after the other, copied into a zeroed buffer."""
    first = parts[0]
    out = first.new_zeros(first.shape[0], sum(p.shape[1] for p in parts), *first.shape[2:])
    start = 0
    for part in parts:
        out[:, start : start + part.shape[1]] = part
        start += part.shape[1]
    return out


class ModulatedNorm(nn.Module):
    """RMSNorm scaled by the time embedding; also returns the three other modulations, each [B, 1, size]."""

    def __init__(self, size: int, time_size: int, eps: float) -> None:
        super().__init__()
        self.linear = nn.Linear(time_size, 4 * size)
        self.norm = nn.RMSNorm(size, eps=eps)

    def forward(
        self, x: torch.Tensor, temb: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        scale, gate, mlp_scale, mlp_gate = self.linear(F.silu(temb))[:, None].chunk(4, dim=-1)
        return self.norm(x) * (1 + scale), gate, mlp_scale, mlp_gate


class FeedForward(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(size, inner, bias=False)
        self.linear_2 = nn.Linear(inner, size, bias=False)
        self.linear_3 = nn.Linear(size, inner, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_2(F.silu(self.linear_1(x)) * self.linear_3(x))


class HeadAttention(nn.Module):
    """Head norms, rotation, repeated key and value heads, masked attention. q, k, v [B, T, heads * head_dim]."""

    def __init__(self, size: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.kv_heads = kv_heads
        self.norm_q = WrittenOutRMSNorm(size // heads, eps=1e-5)
        self.norm_k = WrittenOutRMSNorm(size // heads, eps=1e-5)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, rotary: Rotary
    ) -> torch.Tensor:
        dtype = q.dtype
        q = q.unflatten(-1, (self.heads, -1))
        k, v = (t.unflatten(-1, (self.kv_heads, -1)) for t in (k, v))
        q = rotate_pairs(self.norm_q(q), *rotary).to(dtype)
        k = rotate_pairs(self.norm_k(k), *rotary).to(dtype)
        times = self.heads // self.kv_heads
        k, v = (t.unsqueeze(3).repeat(1, 1, 1, times, 1).flatten(2, 3) for t in (k, v))
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask[:, None, None, :]
        )
        return out.transpose(1, 2).flatten(2).to(dtype)


class SelfAttention(HeadAttention):
    def __init__(self, size: int, heads: int, kv_heads: int) -> None:
        super().__init__(size, heads, kv_heads)
        kv_size = size // heads * kv_heads
        self.to_q = nn.Linear(size, size, bias=False)
        self.to_k = nn.Linear(size, kv_size, bias=False)
        self.to_v = nn.Linear(size, kv_size, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(size, size, bias=False)])

    def forward(self, x: torch.Tensor, mask: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        return self.to_out[0](self.attend(self.to_q(x), self.to_k(x), self.to_v(x), mask, rotary))


class JointAttention(HeadAttention):
    """Attention over [instruction; image] with projections per stream and one more projection for both."""

    def __init__(self, size: int, heads: int, kv_heads: int) -> None:
        super().__init__(size, heads, kv_heads)
        kv_size = size // heads * kv_heads
        for stream in ("img", "instruct"):
            setattr(self, f"{stream}_q", nn.Linear(size, size, bias=False))
            setattr(self, f"{stream}_k", nn.Linear(size, kv_size, bias=False))
            setattr(self, f"{stream}_v", nn.Linear(size, kv_size, bias=False))
            setattr(self, f"{stream}_out", nn.Linear(size, size, bias=False))
        self.to_out = nn.ModuleList([nn.Linear(size, size, bias=False)])

    def forward(
        self, image: torch.Tensor, instruct: torch.Tensor, mask: torch.Tensor, rotary: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor]:
        length = instruct.shape[1]
        q = joined(self.instruct_q(instruct), self.img_q(image))
        k = joined(self.instruct_k(instruct), self.img_k(image))
        v = joined(self.instruct_v(instruct), self.img_v(image))
        out = self.attend(q, k, v, mask, rotary)
        out = self.to_out[0](joined(self.instruct_out(out[:, :length]), self.img_out(out[:, length:])))
        return joined(out[:, length:]), joined(out[:, :length])


class BasicBlock(nn.Module):
    """Self attention and SwiGLU between sandwich norms, with or without modulation by the time embedding."""

    def __init__(
        self, size: int, heads: int, kv_heads: int, inner: int, time_size: int, eps: float, *, modulation: bool = True
    ) -> None:
        super().__init__()
        self.modulation = modulation
        self.attn = SelfAttention(size, heads, kv_heads)
        self.feed_forward = FeedForward(size, inner)
        self.norm1 = ModulatedNorm(size, time_size, eps) if modulation else nn.RMSNorm(size, eps=eps)
        self.ffn_norm1 = nn.RMSNorm(size, eps=eps)
        self.norm2 = nn.RMSNorm(size, eps=eps)
        self.ffn_norm2 = nn.RMSNorm(size, eps=eps)

    def forward(
        self, hidden_states: torch.Tensor, mask: torch.Tensor, rotary: Rotary, temb: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = hidden_states
        if not self.modulation:
            x = x + self.norm2(self.attn(self.norm1(x), mask, rotary))
            return x + self.ffn_norm2(self.feed_forward(self.ffn_norm1(x)))
        normed, gate, mlp_scale, mlp_gate = self.norm1(x, temb)
        x = x + gate.tanh() * self.norm2(self.attn(normed, mask, rotary))
        return x + mlp_gate.tanh() * self.ffn_norm2(self.feed_forward(self.ffn_norm1(x) * (1 + mlp_scale)))


class DoubleBlock(nn.Module):
    """Joint attention over both streams and a second attention over the image alone, then a SwiGLU per stream.

    The feed-forward sides start from the second norm of the block's input, not from the updated stream.
    """

    def __init__(self, size: int, heads: int, kv_heads: int, inner: int, time_size: int, eps: float) -> None:
        super().__init__()
        self.img_instruct_attn = JointAttention(size, heads, kv_heads)
        self.img_self_attn = SelfAttention(size, heads, kv_heads)
        self.img_feed_forward = FeedForward(size, inner)
        self.instruct_feed_forward = FeedForward(size, inner)
        for name in ("img_norm1", "img_norm2", "img_norm3", "instruct_norm1", "instruct_norm2"):
            setattr(self, name, ModulatedNorm(size, time_size, eps))
        for stream in ("img", "instruct"):
            for name in ("attn_norm", "ffn_norm1", "ffn_norm2"):
                setattr(self, f"{stream}_{name}", nn.RMSNorm(size, eps=eps))
        self.img_self_attn_norm = nn.RMSNorm(size, eps=eps)

    def forward(
        self,
        image: torch.Tensor,
        instruct: torch.Tensor,
        image_mask: torch.Tensor,
        joint_mask: torch.Tensor,
        image_rotary: Rotary,
        joint_rotary: Rotary,
        temb: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        image_1, image_gate, image_mlp_scale, image_mlp_gate = self.img_norm1(image, temb)
        image_2, image_mlp_shift, *_ = self.img_norm2(image, temb)
        image_3, image_self_gate, *_ = self.img_norm3(image, temb)
        text_1, text_gate, text_mlp_scale, text_mlp_gate = self.instruct_norm1(instruct, temb)
        text_2, text_mlp_shift, *_ = self.instruct_norm2(instruct, temb)

        image_joint, text_joint = self.img_instruct_attn(image_1, text_1, joint_mask, joint_rotary)
        image_self = self.img_self_attn(image_3, image_mask, image_rotary)
        image = image + image_gate.tanh() * self.img_attn_norm(image_joint)
        image = image + image_self_gate.tanh() * self.img_self_attn_norm(image_self)
        inner = self.img_feed_forward(self.img_ffn_norm1((1 + image_mlp_scale) * image_2 + image_mlp_shift))
        image = image + image_mlp_gate.tanh() * self.img_ffn_norm2(inner)

        instruct = instruct + text_gate.tanh() * self.instruct_attn_norm(text_joint)
        inner = self.instruct_feed_forward(self.instruct_ffn_norm1((1 + text_mlp_scale) * text_2 + text_mlp_shift))
        return image, instruct + text_mlp_gate.tanh() * self.instruct_ffn_norm2(inner)


class TimeCaptionEmbed(nn.Module):
    def __init__(self, size: int, caption_size: int, time_size: int, timestep_scale: float, eps: float) -> None:
        super().__init__()
        self.timestep_scale = timestep_scale
        self.timestep_embedder = nn.Sequential(nn.Linear(256, time_size), nn.SiLU(), nn.Linear(time_size, time_size))
        self.caption_embedder = nn.Sequential(nn.RMSNorm(caption_size, eps=eps), nn.Linear(caption_size, size))

    def forward(self, timestep: torch.Tensor, caption: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        time = sinusoid(timestep * self.timestep_scale, 256).to(caption.dtype)
        return self.timestep_embedder(time), self.caption_embedder(caption)


class OutputNorm(nn.Module):
    def __init__(self, size: int, time_size: int, out: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(time_size, size)
        self.norm = nn.LayerNorm(size, elementwise_affine=False, eps=1e-6)
        self.linear_2 = nn.Linear(size, out)

    def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        scale = self.linear_1(F.silu(temb))[:, None]
        return self.linear_2(self.norm(x) * (1 + scale))


class BooguImageTransformer2DModel(ModelMixin, ConfigMixin):
    """
    Args:
        num_layers: double and single blocks together.
        ffn_size: width of every SwiGLU.
        time_size: width of the time embedding.
    """

    @register_to_config
    def __init__(
        self,
        in_channels: int = 16,
        patch_size: int = 2,
        hidden_size: int = 3360,
        num_attention_heads: int = 28,
        num_kv_heads: int = 7,
        num_layers: int = 40,
        num_double_stream_layers: int = 8,
        num_refiner_layers: int = 2,
        ffn_size: int = 13568,
        time_size: int = 1024,
        instruction_dim: int = 4096,
        axes_dim_rope: tuple[int, int, int] = (40, 40, 40),
        timestep_scale: float = 1000.0,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        size, patch_channels = hidden_size, patch_size * patch_size * in_channels
        dims = (size, num_attention_heads, num_kv_heads, ffn_size, time_size, norm_eps)
        self.x_embedder = nn.Linear(patch_channels, size)
        self.ref_image_patch_embedder = nn.Linear(patch_channels, size)
        self.time_caption_embed = TimeCaptionEmbed(size, instruction_dim, time_size, timestep_scale, norm_eps)
        self.image_index_embedding = nn.Parameter(torch.randn(5, size))
        self.noise_refiner = nn.ModuleList([BasicBlock(*dims) for _ in range(num_refiner_layers)])
        self.ref_image_refiner = nn.ModuleList([BasicBlock(*dims) for _ in range(num_refiner_layers)])
        self.context_refiner = nn.ModuleList([BasicBlock(*dims, modulation=False) for _ in range(num_refiner_layers)])
        self.double_stream_layers = nn.ModuleList([DoubleBlock(*dims) for _ in range(num_double_stream_layers)])
        self.single_stream_layers = nn.ModuleList(
            [BasicBlock(*dims) for _ in range(num_layers - num_double_stream_layers)]
        )
        self.norm_out = OutputNorm(size, time_size, patch_channels)

    def _patches(self, x: torch.Tensor) -> torch.Tensor:
        p = self.config.patch_size
        return x.unflatten(2, (-1, p)).unflatten(4, (-1, p)).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)

    def _rotary(self, *positions: torch.Tensor) -> Rotary:
        axes = zip(positions, self.config.axes_dim_rope, strict=True)
        angle = torch.cat([rotary_angles(p, d) for p, d in axes], dim=-1)[:, None]
        return angle.cos(), angle.sin()

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        instruction_hidden_states: torch.Tensor,
        instruction_attention_mask: torch.Tensor,
        ref_image_hidden_states: torch.Tensor | None = None,
        return_dict: bool = False,
    ) -> tuple[torch.Tensor]:
        """
        Args:
            hidden_states: latents [B, C, H, W].
            timestep: 1 - sigma, [B].
            instruction_hidden_states: [B, T, instruction_dim].
            instruction_attention_mask: bool [B, T].
            ref_image_hidden_states: latents [B, references, C, h, w] of an edit; None: text to image.
        """
        p = self.config.patch_size
        device, batch = hidden_states.device, hidden_states.shape[0]
        height, width = hidden_states.shape[2] // p, hidden_states.shape[3] // p
        temb, instruct = self.time_caption_embed(timestep, instruction_hidden_states)
        length, tokens = instruct.shape[1], height * width
        image = self.x_embedder(self._patches(hidden_states))

        steps = torch.arange(length, device=device)
        references, reference_positions = self._references(ref_image_hidden_states, image, length)
        rows, columns = grid_positions(height, width, device=device)
        last = length + (0 if ref_image_hidden_states is None else ref_image_hidden_states.shape[1])
        image_positions = [torch.full_like(rows, last), rows, columns]
        parts = [[steps] * 3, reference_positions, image_positions]
        joint_rotary = self._rotary(*(torch.cat(axis) for axis in zip(*parts, strict=True)))
        text_rotary, ref_rotary, noise_rotary = (self._rotary(*positions) for positions in parts)
        image_rotary: Rotary = (joint_rotary[0][length:].contiguous(), joint_rotary[1][length:].contiguous())
        mask, noise_mask = (
            instruction_attention_mask.bool(),
            torch.ones(batch, tokens, dtype=torch.bool, device=device),
        )
        ref_mask = torch.ones(batch, references.shape[1], dtype=torch.bool, device=device)

        for block in self.context_refiner:
            instruct = block(instruct, mask, text_rotary)
        for block in self.noise_refiner:
            image = block(image, noise_mask, noise_rotary, temb)
        for block in self.ref_image_refiner:
            references = block(references, ref_mask, ref_rotary, temb)
        image = torch.cat([references, image], dim=1)
        image_mask = torch.cat([ref_mask, noise_mask], dim=1)
        joint_mask = torch.cat([mask, image_mask], dim=1)
        for block in self.double_stream_layers:
            image, instruct = block(image, instruct, image_mask, joint_mask, image_rotary, joint_rotary, temb)
        x = joined(instruct, image)
        for block in self.single_stream_layers:
            x = block(x, joint_mask, joint_rotary, temb)
        x = self.norm_out(x, temb)[:, -tokens:]
        x = x.unflatten(1, (height, width)).unflatten(-1, (p, p, -1))
        return (x.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3),)

    def _references(
        self, latents: torch.Tensor | None, image: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Reference tokens [B, R, size] (R = 0 without references) and their positions on the three axes."""
        if latents is None:
            nothing = torch.zeros(0, dtype=torch.long, device=image.device)
            return image[:, :0], [nothing] * 3
        p = self.config.patch_size
        count, height, width = latents.shape[1], latents.shape[3] // p, latents.shape[4] // p
        tokens = self.ref_image_patch_embedder(torch.stack([self._patches(r) for r in latents.unbind(1)], dim=1))
        tokens = (tokens + self.image_index_embedding[:count, None].to(tokens.dtype)).flatten(1, 2)
        index, rows, columns = grid_positions(count, height, width, device=latents.device)
        return tokens, [length + index, rows, columns]
