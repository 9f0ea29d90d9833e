"""Native norms give what the modules gave, and everything that is not such a norm is left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from common.engine import kernel_norm
from common.engine.kernel_norm import accelerate_norms


def norm_of(kind, width: int) -> nn.Module:
    module = kind(width, eps=1e-6)
    module.weight.data = torch.randn(width, generator=torch.Generator().manual_seed(width))
    return module


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma3RMSNorm])
@pytest.mark.parametrize("width", [16, 64, 576, 640])
@torch.inference_mode()
def test_results_are_those_of_the_module(kind, width):
    own, fast = norm_of(kind, width), nn.Sequential(norm_of(kind, width))
    assert accelerate_norms(fast) == 1
    for shape in [(1, 1), (3, 5), (2, 2, 7)]:
        x = torch.randn(*shape, width, generator=torch.Generator().manual_seed(1)) * 10
        torch.testing.assert_close(fast(x), own(x), rtol=2e-6, atol=1e-6)
        rows = [fast(row[None]) for row in x.reshape(-1, width)]
        assert torch.equal(torch.cat(rows), fast(x).reshape(-1, width))
    assert fast(torch.empty(0, width)).shape == (0, width)


@torch.inference_mode()
def test_what_is_not_contiguous_float32_goes_the_modules_own_way():
    own, fast = norm_of(LlamaRMSNorm, 64), nn.Sequential(norm_of(LlamaRMSNorm, 64))
    accelerate_norms(fast)
    x = torch.randn(64, 6).T
    assert torch.equal(fast(x), own(x))
    assert torch.equal(fast(x.bfloat16()), own(x.bfloat16()))


@torch.inference_mode()
def test_nan_and_infinity_propagate():
    fast = nn.Sequential(norm_of(LlamaRMSNorm, 64))
    accelerate_norms(fast)
    x = torch.ones(3, 64)
    x[0, 5], x[1, 9] = torch.nan, torch.inf
    out = fast(x)
    assert out[0].isnan().all() and out[1, 9].isnan() and out[2].isfinite().all()


@pytest.mark.parametrize(
    "module",
    [norm_of(LlamaRMSNorm, 12), nn.LayerNorm(64), nn.Linear(64, 64), LlamaRMSNorm(64).bfloat16()],
    ids=["odd width", "layer norm", "linear", "bfloat16"],
)
def test_everything_else_is_left_alone(module):
    assert accelerate_norms(nn.Sequential(module)) == 0


@torch.inference_mode()
def test_a_gate_is_not_lost():
    own, fast = norm_of(KimiLinearRMSNormGated, 64), norm_of(KimiLinearRMSNormGated, 64)
    accelerate_norms(fast)
    x, gate = torch.randn(2, 3, 64), torch.randn(2, 3, 64)
    assert torch.equal(fast(x, gate), own(x, gate))


def test_without_kernels_nothing_changes(monkeypatch):
    monkeypatch.setattr(kernel_norm, "rms_norm", lambda: None)
    assert accelerate_norms(norm_of(LlamaRMSNorm, 64)) == 0
