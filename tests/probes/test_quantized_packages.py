"""What `data/quantized*.csv` says of the quantisation packages, held against the packages themselves where they are installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from probes import build, quantized
from probes.workload import from_request

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
os.environ.setdefault("SDNQ_USE_TORCH_COMPILE", "0")

ROWS = (64, 8)
PACKAGES = {
    "int8-sdnq": "sdnq",
    "int8-sdnq-hadamard": "sdnq",
    "int8-quanto": "optimum.quanto",
    "fp8wo-torchao": "torchao",
    "fp8-torchao": "torchao",
    "nf4": "bitsandbytes",
}
MODELS = (
    "sd3",
    "chroma",
    "flux",
    "pixart",
    "sdxl",
    "cosmos2image",
    "kandinsky5-image",
    "ltxvideo",
    "auraflow",
    "hunyuanvideo",
)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("precision", sorted(PACKAGES))
def test_the_result_has_the_dtype_that_the_table_says(precision: str, rows: int) -> None:
    pytest.importorskip(PACKAGES[precision])
    import host_cost

    facts = quantized.table()[precision]
    x = torch.randn(1, rows, host_cost.SIZE, requires_grad=True)
    with host_cost.differentiable_scaled_mm(), torch.autocast("cpu", torch.bfloat16):
        out = host_cost.CASES[precision]()(x)
    few = facts.quantises_rows and rows < quantized.SMALLEST_QUANTISED_ROWS
    keeps = facts.returns_input_dtype and not facts.casts_input and not few
    assert out.dtype is (torch.float32 if keeps else torch.bfloat16)


@pytest.mark.parametrize("model", MODELS)
def test_sdnq_quantises_the_linears_that_the_table_says(model: str) -> None:
    utils: Any = pytest.importorskip("sdnq.utils")
    from sdnq.quantizer import SDNQConfig

    with torch.device("meta"):
        base = build.build_base(from_request({"model": model}))
    config = SDNQConfig(weights_dtype="int8")
    _, config = utils.add_module_skip_keys(base, config)
    found = {
        name
        for name, module in base.named_modules()
        if isinstance(module, nn.Linear)
        and not utils.check_param_name_in(f"{name}.weight", config.modules_to_not_convert)
        and utils.check_quant_is_allowed("Linear", module.weight, config)
    }
    assert found
    assert quantized.quantized_names(base, "int8-sdnq") == found
