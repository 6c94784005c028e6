"""Wan 2.2 speech-to-video: Wan 14B blocks over [video; reference] tokens with audio written in after twelve of them
(16.3 B parameters).

As trainers build it: no q/k/v biases and no q/k norms, no motion frames. The audio cross attention writes in place into the
stream between two blocks, so those blocks are not linked. Lengths are Python numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from diffusers.models.normalization import FP32LayerNorm
from torch import nn

from probes.models.common import grid_positions, sinusoid

REFERENCE_FRAME = 30
"""Position of the reference image on the time axis."""
PACKED_FRAMES = (1, 2, 16)
"""Latent frames of the motion buffer that each packing convolution sees."""


class Attention(nn.Module):
    """Self attention, or cross attention onto `context`; rotated in complex float64, sample by sample."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(size, size, bias=False)
        self.to_k = nn.Linear(size, size, bias=False)
        self.to_v = nn.Linear(size, size, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(size, size)])

    def forward(
        self, x: torch.Tensor, context: torch.Tensor | None = None, rotary: torch.Tensor | None = None
    ) -> torch.Tensor:
        context = x if context is None else context
        q, k, v = (
            projection(t).unflatten(-1, (self.heads, -1))
            for projection, t in ((self.to_q, x), (self.to_k, context), (self.to_v, context))
        )
        if rotary is not None:
            q, k = rotate_float64(q, rotary), rotate_float64(k, rotary)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.to_out[0](out.transpose(1, 2).flatten(2))


def rotate_float64(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """x [B, N, heads, D] times unit complex128 numbers [N, 1, D / 2], cast back."""
    turned = [
        torch.view_as_real(torch.view_as_complex(sample.double().unflatten(-1, (-1, 2))) * rotary).flatten(-2)
        for sample in x.unbind(0)
    ]
    return torch.stack(turned).to(x.dtype)


class FeedForward(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(size, inner), nn.GELU(approximate="tanh"), nn.Linear(inner, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class WanS2VBlock(nn.Module):
    """
    Args:
        injector: which audio injector runs after this block; None: none does.
    """

    def __init__(self, size: int, heads: int, inner: int, eps: float, injector: int | None) -> None:
        super().__init__()
        self.injector = injector
        self.norm1 = FP32LayerNorm(size, eps, elementwise_affine=False)
        self.attn1 = Attention(size, heads)
        self.norm2 = FP32LayerNorm(size, eps, elementwise_affine=True)
        self.attn2 = Attention(size, heads)
        self.norm3 = FP32LayerNorm(size, eps, elementwise_affine=False)
        self.ffn = FeedForward(size, inner)
        self.scale_shift_table = nn.Parameter(torch.randn(1, 6, size) / size**0.5)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        rotary: torch.Tensor,
        video_tokens: int,
    ) -> torch.Tensor:
        """temb float32 [B, 6, 2, size]: for the video tokens, and for those after them."""
        x, dtype = hidden_states, hidden_states.dtype
        modulation = self.scale_shift_table.unsqueeze(2) + temb.float()
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = modulation.unbind(1)
        normed = _modulated(self.norm1(x.float()), shift, scale, video_tokens).to(dtype)
        x = (x.float() + _gated(self.attn1(normed, rotary=rotary), gate, video_tokens)).to(dtype)
        x = x + self.attn2(self.norm2(x.float()).to(dtype), encoder_hidden_states)
        normed = _modulated(self.norm3(x.float()), ffn_shift, ffn_scale, video_tokens).to(dtype)
        return (x.float() + _gated(self.ffn(normed), ffn_gate, video_tokens)).to(dtype)


def _modulated(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, cut: int) -> torch.Tensor:
    """x [B, N, C]; shift and scale [B, 2, C], the first for the tokens before `cut`, the second for the others."""
    parts = (x[:, :cut], x[:, cut:])
    return torch.cat([part * (1 + scale[:, i : i + 1]) + shift[:, i : i + 1] for i, part in enumerate(parts)], dim=1)


def _gated(x: torch.Tensor, gate: torch.Tensor, cut: int) -> torch.Tensor:
    return torch.cat([part * gate[:, i : i + 1] for i, part in enumerate((x[:, :cut], x[:, cut:]))], dim=1)


class CausalConv1d(nn.Module):
    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, out, 3, stride=stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, C], padded to the left with the first value."""
        return self.conv(F.pad(x.transpose(1, 2), (2, 0), mode="replicate")).transpose(1, 2)


class AudioEncoder(nn.Module):
    """Weighted mean of the audio model's layers, then convolutions that shorten it by four: one global and `heads` local
    tokens a step, and a learned padding token."""

    def __init__(self, layers: int, audio_size: int, size: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.weights = nn.Parameter(torch.full((1, layers, 1, 1), 0.01))
        self.conv1_local = CausalConv1d(audio_size, size // 4 * heads)
        self.conv1_global = CausalConv1d(audio_size, size // 4)
        self.conv2 = CausalConv1d(size // 4, size // 2, stride=2)
        self.conv3 = CausalConv1d(size // 2, size, stride=2)
        self.norms = nn.ModuleList([nn.LayerNorm(n, elementwise_affine=False) for n in (size // 4, size // 2, size)])
        self.final_linear = nn.Linear(size, size)
        self.padding_tokens = nn.Parameter(torch.zeros(1, 1, 1, size))

    def _shortened(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.norms[0](x))
        x = F.silu(self.norms[1](self.conv2(x)))
        return F.silu(self.norms[2](self.conv3(x)))

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """features [B, layers, C, T] -> global [B, t, size], local [B, t, heads + 1, size]."""
        weights = F.silu(self.weights)
        x = ((features * weights) / weights.sum(dim=1, keepdim=True)).sum(dim=1).transpose(1, 2)
        local = self.conv1_local(x).unflatten(-1, (self.heads, -1)).transpose(1, 2).flatten(0, 1)
        local = self._shortened(local).unflatten(0, (-1, self.heads)).transpose(1, 2)
        padding = self.padding_tokens.expand(local.shape[0], local.shape[1], 1, -1).to(local.dtype)
        overall = self.final_linear(self._shortened(self.conv1_global(x)))
        return overall, torch.cat([local, padding], dim=2)


class ConditionEmbedder(nn.Module):
    def __init__(
        self, size: int, text_size: int, frequencies: int, pose_channels: int, audio_layers: int, audio_size: int
    ) -> None:
        super().__init__()
        self.frequencies = frequencies
        self.time_embedder = nn.Sequential(nn.Linear(frequencies, size), nn.SiLU(), nn.Linear(size, size))
        self.time_proj = nn.Linear(size, 6 * size)
        self.text_embedder = nn.Sequential(
            nn.Linear(text_size, size), nn.GELU(approximate="tanh"), nn.Linear(size, size)
        )
        self.causal_audio_encoder = AudioEncoder(audio_layers, audio_size, size)
        self.pose_embedder = nn.Conv3d(pose_channels, size, (1, 2, 2), stride=(1, 2, 2))

    def time(self, timestep: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """[B] -> the embedding [B, size] and its projection [B, 6, size]."""
        parameter = self.time_embedder[0].weight.dtype
        temb = self.time_embedder(sinusoid(timestep, self.frequencies).to(parameter)).to(dtype)
        return temb, self.time_proj(F.silu(temb)).unflatten(1, (6, -1))


class AdaptiveNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, 2 * size)
        self.norm = nn.LayerNorm(size, eps=1e-5, elementwise_affine=False)

    def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        shift, scale = self.linear(F.silu(temb))[:, None].chunk(2, dim=-1)
        return self.norm(x) * (1 + scale) + shift


class AudioInjector(nn.Module):
    """Cross attention of the video tokens onto the audio, once a listed layer."""

    def __init__(self, size: int, heads: int, layers: int) -> None:
        super().__init__()
        self.injector = nn.ModuleList([Attention(size, heads) for _ in range(layers)])
        self.injector_adain_layers = nn.ModuleList([AdaptiveNorm(size) for _ in range(layers)])

    def forward(
        self, index: int, hidden_states: torch.Tensor, overall: torch.Tensor, local: torch.Tensor, video_tokens: int
    ) -> torch.Tensor:
        """Writes into the video tokens of `hidden_states` in place and returns it.

        Args:
            overall: global audio vectors [B, groups, size].
            local: audio tokens [B, groups, 5, size]; each group of video tokens attends to its own.
        """
        video = hidden_states[:, :video_tokens].clone()
        groups = overall.shape[1]
        length = -(-video_tokens // groups)
        if padding := groups * length - video_tokens:
            video = F.pad(video, (0, 0, 0, padding))
        video = video.unflatten(1, (groups, length)).flatten(0, 1)
        normed = self.injector_adain_layers[index](video, overall.flatten(0, 1))
        out = self.injector[index](normed, local.flatten(0, 1))
        out = out.unflatten(0, (-1, groups)).flatten(1, 2)[:, :video_tokens]
        hidden_states[:, :video_tokens] = hidden_states[:, :video_tokens] + out
        return hidden_states


class FramePacker(nn.Module):
    """Embeds the motion buffer at three scales. Trainers evaluate it on zeros even when its tokens are dropped."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        sizes = ((1, 2, 2), (2, 4, 4), (4, 8, 8))
        self.scales = nn.ModuleList([nn.Conv3d(channels, size, s, stride=s) for s in sizes])

    def forward(self, latents: torch.Tensor) -> list[torch.Tensor]:
        buffer = latents.new_zeros(*latents.shape[:2], sum(PACKED_FRAMES), *latents.shape[3:])
        parts = buffer.split(PACKED_FRAMES, dim=2)
        return [scale(part).flatten(2).transpose(1, 2) for scale, part in zip(self.scales, parts, strict=True)]


class WanS2VTransformer3DModel(ModelMixin, ConfigMixin):
    """
    Args:
        audio_inject_layers: blocks after which audio is written in.
        motion_frames: video and latent frames of motion that precede the clip's audio.
    """

    _keep_in_fp32_modules = ("time_embedder", "scale_shift_table", "norm1", "norm2", "norm3", "causal_audio_encoder")

    @register_to_config
    def __init__(
        self,
        in_channels: int = 16,
        num_attention_heads: int = 40,
        attention_head_dim: int = 128,
        ffn_dim: int = 13824,
        num_layers: int = 40,
        text_dim: int = 4096,
        freq_dim: int = 256,
        audio_dim: int = 1024,
        num_audio_layers: int = 25,
        audio_inject_layers: tuple[int, ...] = (0, 4, 8, 12, 16, 20, 24, 27, 30, 33, 36, 39),
        pose_dim: int = 16,
        motion_frames: tuple[int, int] = (17, 5),
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        size = num_attention_heads * attention_head_dim
        patch = (1, 2, 2)
        self.patch_embedding = nn.Conv3d(in_channels, size, patch, stride=patch)
        self.frame_packer = FramePacker(in_channels, size)
        self.trainable_condition_mask = nn.Embedding(3, size)
        self.condition_embedder = ConditionEmbedder(size, text_dim, freq_dim, pose_dim, num_audio_layers, audio_dim)
        places = {layer: i for i, layer in enumerate(audio_inject_layers)}
        self.blocks = nn.ModuleList(
            [WanS2VBlock(size, num_attention_heads, ffn_dim, eps, places.get(i)) for i in range(num_layers)]
        )
        self.audio_injector = AudioInjector(size, num_attention_heads, len(audio_inject_layers))
        self.norm_out = FP32LayerNorm(size, eps, elementwise_affine=False)
        self.proj_out = nn.Linear(size, 4 * in_channels)
        self.scale_shift_table = nn.Parameter(torch.randn(1, 2, size) / size**0.5)

    def _rotary(self, frames: int, height: int, width: int, device: torch.device) -> torch.Tensor:
        """Unit complex128 numbers [N, 1, head_dim / 2] of the video tokens, then of the reference image's."""
        head = self.config.attention_head_dim
        side = head // 6 * 2
        video = grid_positions(frames, height, width, device=device)
        reference = grid_positions(1, height, width, device=device)
        reference[0] = reference[0] + REFERENCE_FRAME
        angles = []
        for position, channels in zip(zip(video, reference, strict=True), (head - 2 * side, side, side), strict=True):
            exponent = torch.arange(0, channels, 2, dtype=torch.float64, device=device) / channels
            angles.append(torch.cat(position).double()[:, None] * 10000.0**-exponent)
        angle = torch.cat(angles, dim=-1)[:, None]
        return torch.polar(torch.ones_like(angle), angle)

    def _audio(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Global and local audio tokens of the clip: the motion frames' share of the shortened sequence is cut off."""
        before, dropped = self.config.motion_frames
        features = torch.cat([features[..., :1].expand(*features.shape[:-1], before), features], dim=-1)
        overall, local = self.condition_embedder.causal_audio_encoder(features)
        start = min(dropped, overall.shape[1] - 1)
        return overall[:, start:], local[:, start:]

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        audio_embeds: torch.Tensor,
        image_latents: torch.Tensor,
        pose_latents: torch.Tensor,
        return_dict: bool = False,
    ) -> tuple[torch.Tensor]:
        """
        Args:
            hidden_states: latents [B, C, F, H, W].
            timestep: [B].
            encoder_hidden_states: text [B, T, text_dim].
            audio_embeds: features of every layer of the audio model [B, layers, audio_dim, F].
            image_latents: the reference image [B, C, 1, H, W].
            pose_latents: [B, pose_dim, F, H, W].
        """
        batch, _, frames, height, width = hidden_states.shape
        height, width = height // 2, width // 2
        x = self.patch_embedding(hidden_states) + self.condition_embedder.pose_embedder(pose_latents)
        x = x.flatten(2).transpose(1, 2)
        reference = self.patch_embedding(image_latents).flatten(2).transpose(1, 2)
        self.frame_packer(hidden_states)
        video_tokens, dtype = x.shape[1], x.dtype
        x = torch.cat([x, reference], dim=1)
        kinds = torch.arange(x.shape[1], device=x.device).ge(video_tokens).long()
        x = x + self.trainable_condition_mask(kinds).to(dtype)

        temb, projected = self.condition_embedder.time(torch.cat([timestep, torch.zeros_like(timestep[:1])]), dtype)
        temb, at_zero = temb[:-1], projected[-1:].expand(batch, -1, -1)
        modulation = torch.stack([projected[:-1], at_zero], dim=2).float()
        text = self.condition_embedder.text_embedder(encoder_hidden_states)
        overall, local = self._audio(audio_embeds)
        overall, local = overall.to(dtype), local.to(dtype)
        rotary = self._rotary(frames, height, width, x.device)

        for block in self.blocks:
            x = block(x, text, modulation, rotary, video_tokens)
            if block.injector is not None:
                x = self.audio_injector(block.injector, x, overall, local, video_tokens)

        x = x[:, :video_tokens]
        shift, scale = (self.scale_shift_table + temb.float().unsqueeze(1)).chunk(2, dim=1)
        x = (self.norm_out(x.float()) * (1 + scale) + shift).to(dtype)
        out = self.proj_out(x).unflatten(1, (frames, height, width)).unflatten(-1, (2, 2, -1))
        return (out.permute(0, 6, 1, 2, 4, 3, 5).flatten(5).flatten(3, 4),)
