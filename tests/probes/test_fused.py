"""Fused projections: the same numbers, one product in place of three, the originals still in memory."""

import pytest
import torch
from torch import nn

from probes import build, fused
from probes.workload import WorkloadError, from_request, reduced_copy


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        return torch.cat([self.to_q(x), self.to_k(x), self.to_v(x)], -1)


def test_a_fused_attention_computes_what_it_did():
    torch.manual_seed(0)
    module = nn.Sequential(Attention())
    x = torch.randn(3, 8)
    before = module(x)
    assert fused.fuse(module) == 1
    torch.testing.assert_close(module(x), before)
    assert sum(p.numel() for p in module.parameters()) == 2 * (8 * 16 + 16)


def test_one_product_runs_in_place_of_three():
    module = nn.Sequential(Attention())
    fused.fuse(module)
    calls = []
    module[0].to_qkv.register_forward_hook(lambda *_: calls.append(1))
    module(torch.randn(3, 8))
    module(torch.randn(3, 8))
    assert len(calls) == 2


def test_a_model_without_separate_projections_is_refused():
    with pytest.raises(WorkloadError, match="no self-attention"):
        fused.fuse(nn.Sequential(nn.Linear(4, 4)))


def test_cross_attention_stays_as_it_is():
    module = nn.ModuleDict({"attn1": Attention(), "attn2": Attention()})
    assert fused.fuse(module) == 1
    assert not hasattr(module["attn2"], "to_qkv")


def test_default_targets_follow_and_dead_ones_are_refused():
    assert from_request({"model": "krea2", "fuse_qkv": True}).lora_targets == ("to_qkv", "to_out.0")
    with pytest.raises(WorkloadError, match="name to_qkv instead"):
        from_request({"model": "krea2", "fuse_qkv": True, "lora_targets": ["to_q"]})


def test_given_weights_are_put_together():
    workload = reduced_copy(from_request({"model": "krea2", "fuse_qkv": True}))
    plain = build.build_base(reduced_copy(from_request({"model": "krea2"})))
    state = plain.state_dict()
    model = build.build_base(workload, state)
    name = "transformer_blocks.0.attn.to_qkv.weight"
    parts = [state[f"transformer_blocks.0.attn.{p}.weight"] for p in ("to_q", "to_k", "to_v")]
    assert torch.equal(model.state_dict()[name], torch.cat(parts))
    found = fused.given_weight(name, state)
    assert found is not None
    assert torch.equal(found, torch.cat(parts))
    assert fused.given_weight("transformer_blocks.0.attn.to_out.0.weight", state) is None


def test_the_job_trains_on_the_fused_linear():
    job = build.real_job(reduced_copy(from_request({"model": "krea2", "fuse_qkv": True})))
    names = [n for n, _ in job.trainable()]
    assert any("to_qkv.lora_A" in n for n in names)
    assert not any(".to_q." in n for n in names)
