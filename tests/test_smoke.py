"""What has to work where only PyTorch, pytest and an installed wheel are: no compiler, no other package."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import ktlinear
from ktlinear.ops import FORMATS, needs_importance

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@pytest.mark.parametrize("weight_type", list(FORMATS), ids=lambda t: t.name)
@pytest.mark.parametrize("m", [1, 5, 40])
def test_every_type(weight_type: ktlinear.WeightType, m: int) -> None:
    generator = torch.Generator().manual_seed(m)
    n, k = 21, 768
    weight, x = torch.randn(n, k, generator=generator), torch.randn(m, k, generator=generator)
    importance = torch.rand(k, generator=generator) if needs_importance(weight_type) else None
    if weight_type.name in FLOATS:
        rows = weight.to(FLOATS[weight_type.name])
        y, values = torch.ops.kt.linear(x, rows), rows
    else:
        rows = torch.ops.kt.quantize(weight, weight_type, importance)
        values = torch.ops.kt.dequantize(rows, weight_type, torch.float32)
        with ktlinear.exact():
            y = torch.ops.kt.linear(x, rows, None, weight_type)
            packed = torch.ops.kt.pack(rows, weight_type)
            torch.testing.assert_close(torch.ops.kt.linear_packed(x, packed, None, n, k, weight_type), y)
        assert torch.equal(torch.ops.kt.unpack(packed, n, k, weight_type), rows)
    expected = x.double() @ values.double().T
    assert (y.double() - expected).norm() <= 1e-5 * expected.norm()


def test_a_model() -> None:
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 13))
    x = torch.randn(3, 256)
    expected = model(x)
    ktlinear.patch(model, "Q8_0")
    assert (model(x) - expected).norm() < 0.03 * expected.norm()


def test_every_tier_this_cpu_runs() -> None:
    weight, x = torch.randn(33, 256), torch.randn(9, 256)
    expected = (x.double() @ weight.double().T).float()
    for tier in ktlinear.available_isas():
        with ktlinear.use_isa(tier):
            torch.testing.assert_close(torch.ops.kt.linear(x, weight), expected, rtol=1e-4, atol=1e-4)


def test_the_command() -> None:
    result = subprocess.run([sys.executable, "-m", "ktlinear", "info"], capture_output=True, text=True)
    assert result.returncode == 0 and ktlinear.isa() in result.stdout, result.stderr
