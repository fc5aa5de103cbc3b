"""The KTransformers-style API on raw pointers, `ktlinear.linear`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import is_rounded_linear

import ktlinear
from ktlinear.linear import HiddenType, Linear, LinearConfig, WeightType
from ktlinear.ops import FORMATS, needs_importance

DTYPES = {HiddenType.F32: torch.float32, HiddenType.F16: torch.float16, HiddenType.BF16: torch.bfloat16}
GUARD = 7.0


def make_weight(kind: WeightType, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What is stored, and the same as fp32."""
    dense = torch.randn(n, k)
    if FORMATS[kind].block == 1:
        stored = dense.to(DTYPES[HiddenType(kind)])
        return stored, stored.float()
    rows = torch.ops.kt.quantize(dense, kind, torch.ones(k) if needs_importance(kind) else None)
    return rows, torch.ops.kt.dequantize(rows, kind, torch.float32)


def run(layer: Linear, x: torch.Tensor, n: int) -> torch.Tensor:
    """forward, with guards before and after the output."""
    y = torch.full((x.shape[0] + 2, n), GUARD, dtype=x.dtype)
    assert layer.forward(qlen=x.shape[0], input=x.data_ptr(), output=y[1:].data_ptr()) is None
    assert (y[0] == GUARD).all() and (y[-1] == GUARD).all()
    return y[1:-1]


@pytest.mark.parametrize("hidden", HiddenType, ids=lambda t: t.name)
@pytest.mark.parametrize("kind", WeightType, ids=lambda t: t.name)
def test_equals_linear_in_float64(kind: WeightType, hidden: HiddenType) -> None:
    k = 3 * max(FORMATS[kind].block, 11)
    for n in (1, 13, 40):  # of a stride of 16: less than one, one not whole, two and a half
        stored, dense = make_weight(kind, n, k)
        layer = Linear(LinearConfig(k, n, 16, 4, stored.data_ptr(), kind, hidden))
        for qlen in (1, 3, 4, 9):  # of groups of 4 tokens
            x = torch.randn(qlen, k).to(DTYPES[hidden])
            with ktlinear.exact():
                y = run(layer, x, n)
            assert is_rounded_linear(y, x, dense), (n, qlen)


def test_int8_mode_equals_the_operator() -> None:
    stored, _ = make_weight(WeightType.Q4_K, 45, 512)
    layer = Linear(LinearConfig(512, 45, 16, 64, stored.data_ptr(), WeightType.Q4_K, HiddenType.F32))
    for qlen in (1, 70):
        x = torch.randn(qlen, 512)
        torch.testing.assert_close(run(layer, x, 45), torch.ops.kt.linear(x, stored, None, 12), rtol=0, atol=0)


def test_positional_and_keyword_arguments() -> None:
    stored, dense = make_weight(WeightType.F32, 5, 8)
    x, y = torch.randn(2, 8), torch.empty(2, 5)
    Linear(LinearConfig(8, 5, 16, 64, stored.data_ptr(), 0, 0)).forward(2, x.data_ptr(), y.data_ptr())
    assert is_rounded_linear(y, x, dense)
    config = LinearConfig(
        in_features=8,
        out_features=5,
        stride=16,
        group_max_len=64,
        weight_ptr=stored.data_ptr(),
        weight_type="f32",
        hidden_type="F32",
    )
    assert (config.weight_type, config.hidden_type) == (WeightType.F32, HiddenType.F32)
    y.zero_()
    Linear(config=config).forward(output=y.data_ptr(), input=x.data_ptr(), qlen=2)
    assert is_rounded_linear(y, x, dense)


def test_no_tokens() -> None:
    stored, _ = make_weight(WeightType.F32, 5, 8)
    x, y = torch.randn(1, 8), torch.full((1, 5), GUARD)
    Linear(LinearConfig(8, 5, 16, 64, stored.data_ptr(), 0, 0)).forward(0, x.data_ptr(), y.data_ptr())
    assert (y == GUARD).all()


def test_output_in_place_of_the_input() -> None:
    stored, dense = make_weight(WeightType.F32, 16, 16)
    x = torch.randn(5, 16)
    y = x.clone()
    Linear(LinearConfig(16, 16, 16, 64, stored.data_ptr(), 0, 0)).forward(5, y.data_ptr(), y.data_ptr())
    assert is_rounded_linear(y, x, dense)


def test_the_weight_is_read_in_place_and_blocks_may_begin_anywhere() -> None:
    stored, _ = make_weight(WeightType.Q4_0, 5, 64)
    memory = torch.zeros(stored.numel() + 1, dtype=torch.uint8)
    x = torch.randn(3, 64)
    layer = Linear(LinearConfig(64, 5, 16, 64, memory.data_ptr() + 1, "q4_0", "f32"))
    assert (run(layer, x, 5) == 0).all()
    memory[1:] = stored.flatten()
    torch.testing.assert_close(run(layer, x, 5), torch.ops.kt.linear(x, stored, None, 2), rtol=0, atol=0)


GOOD: dict[str, Any] = {
    "in_features": 64,
    "out_features": 5,
    "stride": 16,
    "group_max_len": 64,
    "weight_ptr": 4096,
    "weight_type": WeightType.Q4_0,
    "hidden_type": HiddenType.F32,
}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"in_features": 0}, ValueError, "in_features is 0; expected at least 1"),
        ({"in_features": 33}, ValueError, "in_features is 33; expected a multiple of 32 for weight_type Q4_0"),
        ({"out_features": -1}, ValueError, "out_features is -1; expected at least 1"),
        ({"out_features": 5.0}, TypeError, "out_features: expected an int, got float"),
        ({"stride": 0}, ValueError, "stride is 0; expected at least 1"),
        ({"group_max_len": True}, TypeError, "group_max_len: expected an int, got bool"),
        ({"weight_ptr": 0}, ValueError, "weight_ptr is a null pointer; expected the address of 180 bytes"),
        ({"weight_ptr": None}, TypeError, "weight_ptr: expected an address as an int"),
        ({"weight_ptr": -8}, ValueError, "weight_ptr is -0x8; 180 bytes from there are not in the address space"),
        ({"weight_ptr": 4097, "weight_type": "F16"}, ValueError, "weight_ptr is 0x1001; expected a multiple of 2"),
        ({"weight_type": 4}, ValueError, "weight_type is 4; expected one of F32"),
        ({"hidden_type": 2}, ValueError, r"hidden_type is 2; expected one of F32 \(0\), F16 \(1\), BF16 \(30\)"),
        ({"hidden_type": "Q8_0"}, ValueError, "hidden_type is 'Q8_0'; expected one of"),
        ({"out_features": 2**62}, ValueError, "are not in the address space"),
    ],
)
def test_bad_configuration(change: dict[str, Any], error: type[Exception], message: str) -> None:
    LinearConfig(**GOOD)
    with pytest.raises(error, match=message):
        LinearConfig(**(GOOD | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"qlen": -1}, ValueError, "qlen is -1; expected at least 0"),
        ({"qlen": 1.0}, TypeError, "qlen: expected an int, got float"),
        ({"input": 0}, ValueError, "input is a null pointer; expected the address of 64 bytes"),
        ({"output": 0}, ValueError, "output is a null pointer; expected the address of 40 bytes"),
        ({"input": torch.zeros(1)}, TypeError, "input: expected an address as an int, .* got Tensor"),
        ({"output": 4098}, ValueError, "output is 0x1002; expected a multiple of 4"),
        ({"qlen": math.factorial(20)}, ValueError, "input is .* are not in the address space"),
    ],
)
def test_bad_call(change: dict[str, Any], error: type[Exception], message: str) -> None:
    stored, _ = make_weight(WeightType.F32, 5, 8)
    x, y = torch.randn(2, 8), torch.full((2, 5), GUARD)
    layer = Linear(LinearConfig(8, 5, 16, 64, stored.data_ptr(), 0, 0))
    good = {"qlen": 2, "input": x.data_ptr(), "output": y.data_ptr()}
    with pytest.raises(error, match=message):
        layer.forward(**(good | change))
    assert (y == GUARD).all()


def test_config_has_to_be_one() -> None:
    with pytest.raises(TypeError, match="config: expected a LinearConfig, got dict"):
        Linear({})  # type: ignore[arg-type]
