"""Anima: the Cosmos Predict 2 image transformer with a text adapter that runs, with gradients, in every training step.

Both halves are diffusers classes; this module joins them as they are trained (2.09 B parameters).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import AnimaTextConditioner, CosmosTransformer3DModel
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from diffusers.models.normalization import RMSNorm
from torch import nn


class AnimaTransformer(ModelMixin, ConfigMixin):
    """
    Args:
        text_length: tokens that the adapter's output is padded to with zeros.
        fused_norms: PyTorch's fused RMSNorm, as trainers run it, instead of diffusers' written-out one.
    """

    @register_to_config
    def __init__(
        self,
        in_channels: int = 16,
        num_attention_heads: int = 16,
        attention_head_dim: int = 128,
        num_layers: int = 28,
        mlp_ratio: float = 4.0,
        text_embed_dim: int = 1024,
        adaln_lora_dim: int = 256,
        adapter_layers: int = 6,
        adapter_heads: int = 16,
        adapter_vocabulary: int = 32128,
        text_length: int = 512,
        fused_norms: bool = True,
    ) -> None:
        super().__init__()
        self.core = CosmosTransformer3DModel(
            in_channels=in_channels,
            out_channels=in_channels,
            num_attention_heads=num_attention_heads,
            attention_head_dim=attention_head_dim,
            num_layers=num_layers,
            mlp_ratio=mlp_ratio,
            text_embed_dim=text_embed_dim,
            adaln_lora_dim=adaln_lora_dim,
            max_size=(128, 240, 240),
            patch_size=(1, 2, 2),
            rope_scale=(1.0, 4.0, 4.0),
            concat_padding_mask=True,
            extra_pos_embed_type=None,
        )
        self.text_conditioner = AnimaTextConditioner(
            source_dim=text_embed_dim,
            target_dim=text_embed_dim,
            model_dim=text_embed_dim,
            num_layers=adapter_layers,
            num_attention_heads=adapter_heads,
            target_vocab_size=adapter_vocabulary,
            min_sequence_length=0,
        )
        if fused_norms:
            _fuse_norms(self.core)

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        t5xxl_ids: torch.Tensor,
        t5xxl_weights: torch.Tensor,
        padding_mask: torch.Tensor,
        return_dict: bool = False,
    ) -> tuple[torch.Tensor]:
        """
        Args:
            hidden_states: latents [B, C, 1, H, W].
            timestep: noise levels [B], 0 to 1.
            encoder_hidden_states: text encoder features [B, Tq, text_embed_dim].
            t5xxl_ids: token ids [B, T].
            t5xxl_weights: token weights [B, T, 1].
            padding_mask: [1, 1, H, W] of the latents' size.
        """
        text = self.text_conditioner(encoder_hidden_states, t5xxl_ids)
        text = text * t5xxl_weights.to(text.dtype)
        if text.shape[1] < self.config.text_length:
            text = F.pad(text, (0, 0, 0, self.config.text_length - text.shape[1]))
        return (self._core(hidden_states, timestep, text, padding_mask),)

    def _core(
        self, latents: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, padding_mask: torch.Tensor
    ) -> torch.Tensor:
        """The core's forward without its resize of the padding mask, which has the latents' size already."""
        core = self.core
        batch, _, frames, height, width = latents.shape
        padding = padding_mask.to(latents.dtype).unsqueeze(2).expand(batch, 1, frames, height, width)
        x = torch.cat([latents, padding], dim=1)
        rotary = core.rope(x)
        x = core.patch_embed(x).flatten(1, 3)
        temb, embedded = core.time_embed(x, timestep)
        for block in core.transformer_blocks:
            x = block(x, text, embedded, temb, rotary)
        x = core.proj_out(core.norm_out(x, embedded, temb))
        x = x.unflatten(2, (2, 2, 1, -1)).unflatten(1, (frames, height // 2, width // 2))
        return x.permute(0, 7, 1, 6, 2, 4, 3, 5).flatten(6, 7).flatten(4, 5).flatten(2, 3)


def _fuse_norms(model: nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, RMSNorm):
                fused = nn.RMSNorm(tuple(child.dim), eps=child.eps)
                fused.weight = child.weight
                setattr(module, name, fused)
