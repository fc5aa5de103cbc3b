"""The operators against float64 and the `gguf` package, and what PyTorch expects of an operator."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import relative_error

import ktlinear
from ktlinear import WeightType, ops

kt = torch.ops.kt
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
QUANTIZED = [t for t, f in ops.FORMATS.items() if f.packed_k]
ROUNDING = {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}  # RMS of rounding the result, with room
MS = (1, 2, 3, 5, 8, 13, 16, 17, 33, 70)


def oracle_quantize(weight: torch.Tensor, t: WeightType) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType(t)))


def oracle_dequantize(rows: torch.Tensor, t: WeightType) -> torch.Tensor:
    with np.errstate(invalid="ignore", over="ignore"):  # infinity times zero, the largest scales
        return torch.from_numpy(gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType(t)))


SPREAD = -1  # in the upper nibbles of the block's last four words

# Where the fp16 scales of a block are, for types that the oracle decodes but does not quantize.
HALVES: dict[WeightType, tuple[int, ...]] = {
    WeightType.Q2_K: (80, 82),
    WeightType.Q3_K: (108,),
    WeightType.Q4_K: (0, 2),
    WeightType.Q5_K: (0, 2),
    WeightType.Q6_K: (208,),
    WeightType.IQ2_XXS: (0,),
    WeightType.IQ2_XS: (0,),
    WeightType.IQ2_S: (0,),
    WeightType.IQ3_XXS: (0,),
    WeightType.IQ3_S: (0,),
    WeightType.IQ1_S: (0,),
    WeightType.IQ1_M: (SPREAD,),
    WeightType.IQ4_NL: (0,),
    WeightType.IQ4_XS: (0,),
    WeightType.NVFP4: (),
}


def put_half(blocks: torch.Tensor, offset: int, values: torch.Tensor) -> None:
    """Write fp16 `values` [...] into `blocks` uint8 [..., block_bytes]."""
    if offset != SPREAD:
        blocks[..., offset : offset + 2] = values.half().unsqueeze(-1).view(torch.uint8)
        return
    bits = values.half().view(torch.int16).int()
    for i in range(4):
        upper = (bits >> (4 * i) & 15) << 4
        at = blocks.shape[-1] - 7 + 2 * i
        blocks[..., at] = (blocks[..., at] & 15) | upper.to(torch.uint8)


def whole_blocks(t: WeightType, k: int) -> int:
    """`k` rounded up to a multiple of the block."""
    block = ops.FORMATS[t].block
    return -(-k // block) * block


def random_rows(n: int, k: int, t: WeightType) -> torch.Tensor:
    """GGUF rows uint8 [n, row_bytes]: normal weights with outliers, quantized by the oracle where it can.

    Else random bytes, of which only the fp16 scales are chosen: 0.005 to 0.015 and of either sign.
    """
    if t in HALVES:
        f = ops.FORMATS[t]
        blocks = torch.randint(0, 256, (n, k // f.block, f.block_bytes), dtype=torch.uint8)
        for offset in HALVES[t]:
            scale = (torch.rand(n, k // f.block) * 0.01 + 0.005) * (torch.randint(0, 2, (n, k // f.block)) * 2 - 1)
            put_half(blocks, offset, scale)
        return blocks.view(n, -1)
    weight = torch.randn(n, k)
    weight[torch.rand(n, k) < 0.01] *= 8
    return oracle_quantize(weight, t)


# ------------------------------------------------------------------------------------------------ floats


@pytest.mark.parametrize("weight_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_float_weights_match_float64(isa: str, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    for n, k in ((1, 1), (13, 33), (35, 160), (100, 515)):
        weight, bias = torch.randn(n, k).to(weight_dtype), torch.randn(n).to(weight_dtype)
        for m in MS:
            x = torch.randn(m, k).to(dtype)
            y = kt.linear(x, weight, bias)
            assert y.dtype == dtype and y.shape == (m, n)
            assert relative_error(y, x, weight, bias) < ROUNDING[dtype], (m, n, k)


@pytest.mark.parametrize("bias_dtype", FLOATS)
def test_bias_of_any_float_type(isa: str, bias_dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(5, 40), torch.randn(19, 40), torch.randn(19).to(bias_dtype)
    assert relative_error(kt.linear(x, weight, bias), x, weight, bias) < 1e-6


def test_many_rows_are_computed_in_chunks(isa: str) -> None:
    x, weight = torch.randn(1100, 48), torch.randn(21, 48)
    assert relative_error(kt.linear(x, weight), x, weight) < 1e-6
    rows = kt.quantize(weight[:, :32], WeightType.Q8_0)
    with ktlinear.exact():
        y = kt.linear(x[:, :32], rows, None, WeightType.Q8_0)
    assert relative_error(y, x[:, :32], oracle_dequantize(rows, WeightType.Q8_0)) < 1e-6


# ------------------------------------------------------------------------------------------------ quantized weights


@pytest.mark.parametrize("weight_type", QUANTIZED)
@pytest.mark.parametrize("packed", (False, True), ids=("rows", "packed"))
def test_quantized_weights_match_gguf(isa: str, weight_type: WeightType, packed: bool) -> None:
    block = ops.FORMATS[weight_type].block
    for n, blocks in ((1, 1), (13, 3), (35, 5), (64, 2), (100, 17 if block == 32 else 3)):
        k = blocks * block
        rows = random_rows(n, k, weight_type)
        weight = oracle_dequantize(rows, weight_type)
        panels = kt.pack(rows, weight_type)
        bias = torch.randn(n)
        for m in MS:
            x = torch.randn(m, k)

            def linear(x: torch.Tensor) -> torch.Tensor:
                if packed:
                    return kt.linear_packed(x, panels, bias, n, k, weight_type)  # noqa: B023
                return kt.linear(x, rows, bias, weight_type)  # noqa: B023

            with ktlinear.exact():
                assert relative_error(linear(x), x, weight, bias) < 1e-5, ("exact", m, n, k)
            # Small matrices average little, so a single one may lie above the 0.6 % of many.
            assert relative_error(linear(x), x, weight, bias) < (0.02 if m * n < 64 else 0.01), ("int8", m, n, k)


@pytest.mark.parametrize("dtype", FLOATS)
def test_quantized_weights_take_any_input_type(isa: str, dtype: torch.dtype) -> None:
    rows = random_rows(50, 320, WeightType.Q4_1)
    weight = oracle_dequantize(rows, WeightType.Q4_1)
    for m in (1, 4, 40):
        x = torch.randn(m, 320).to(dtype)
        y = kt.linear(x, rows, None, WeightType.Q4_1)
        assert y.dtype == dtype
        assert relative_error(y, x, weight) < 0.011
        with ktlinear.exact():
            assert relative_error(kt.linear(x, rows, None, WeightType.Q4_1), x, weight) < ROUNDING[dtype]


@pytest.mark.parametrize("m", (1, 20))
def test_activations_too_large_for_int8_are_computed_exactly(isa: str, m: int) -> None:
    rows = random_rows(24, 64, WeightType.Q8_0)
    x = torch.randn(m, 64) * 2.0**101
    with ktlinear.exact():
        expected = kt.linear(x, rows, None, WeightType.Q8_0)
    assert expected.isfinite().all()
    y = kt.linear(x, rows, None, WeightType.Q8_0)
    assert relative_error(y / 2.0**101, x / 2.0**101, oracle_dequantize(rows, WeightType.Q8_0)) < 0.01


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_nan_and_infinity_are_never_made_finite(isa: str, value: float) -> None:
    rows = random_rows(20, 96, WeightType.Q4_0)
    for m in (1, 3, 33):
        x = torch.randn(m, 96)
        x[m // 2, 40] = value
        for y in (kt.linear(x, rows, None, WeightType.Q4_0), kt.linear(x, torch.randn(20, 96))):
            finite = y.isfinite().all(dim=1)
            assert finite.sum() == m - 1 and not y[m // 2].isfinite().any()


# ------------------------------------------------------------------------------------------------ geometry


def test_strided_transposed_and_expanded_tensors(isa: str) -> None:
    base = torch.randn(12, 80)
    weight = torch.randn(40, 27)
    inputs = {
        "every second column": base[:, ::2],
        "a slice of columns": base[:, 10:50],
        "transposed": torch.randn(40, 9).t(),
        "every second row": base[::2, :40],
        "expanded": torch.randn(1, 40).expand(6, 40),
        "expanded to three dimensions": torch.randn(3, 1, 40).expand(3, 5, 40),
        "three dimensions, two swapped": torch.randn(4, 3, 40).transpose(0, 1),
        "three dimensions with one leading stride": torch.randn(4, 3, 80)[..., :40],
        "misaligned": torch.randn(9 * 40 + 1)[1:].view(9, 40),
    }
    weights = {
        "transposed": weight.t(),
        "contiguous": weight.t().contiguous(),
        "a slice of columns": torch.randn(27, 90)[:, 3:43],
        "every second row": torch.randn(54, 40)[::2],
        "expanded": torch.randn(1, 40).expand(27, 40),
    }
    for name, x in inputs.items():
        for weight_name, w in weights.items():
            bias = torch.randn(54)[::2]
            y = kt.linear(x, w, bias)
            assert y.is_contiguous() and y.shape == (*x.shape[:-1], 27)
            assert relative_error(y, x, w, bias) < 1e-6, (name, weight_name)


def test_strided_quantized_rows(isa: str) -> None:
    rows = random_rows(30, 64, WeightType.Q4_0)
    wide = torch.zeros(30, rows.shape[1] + 5, dtype=torch.uint8)
    wide[:, 3:-2] = rows
    x = torch.randn(2, 64)
    for m in (1, 2):
        expected = kt.linear(x[:m], rows, None, WeightType.Q4_0)
        assert torch.equal(kt.linear(x[:m], wide[:, 3:-2], None, WeightType.Q4_0), expected)
        assert torch.equal(kt.linear(x[:m], rows.t().contiguous().t(), None, WeightType.Q4_0), expected)
        assert torch.equal(kt.linear(x[:m], wide[::2, 3:-2], None, WeightType.Q4_0), expected[:, ::2])


def test_float_weights_as_bytes() -> None:
    x = torch.randn(3, 20)
    for t, dtype in (
        (WeightType.F32, torch.float32),
        (WeightType.F16, torch.float16),
        (WeightType.BF16, torch.bfloat16),
    ):
        weight = torch.randn(7, 20).to(dtype)
        rows = weight.view(torch.uint8)
        odd = torch.zeros(rows.numel() + 1, dtype=torch.uint8)[1:].view(rows.shape).copy_(rows)
        assert torch.equal(kt.linear(x, rows, None, t), kt.linear(x, weight))
        assert torch.equal(kt.linear(x, odd, None, t), kt.linear(x, weight))
        assert torch.equal(kt.dequantize(odd, t, torch.float32), weight.float())


@pytest.mark.parametrize("shape", ((20,), (1, 20), (2, 3, 20), (2, 1, 3, 2, 20)))
def test_any_number_of_leading_dimensions(shape: tuple[int, ...]) -> None:
    x, weight, bias = torch.randn(shape), torch.randn(6, 20), torch.randn(6)
    torch.testing.assert_close(kt.linear(x, weight, bias), F.linear(x, weight, bias))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("m, n, k", ((0, 5, 32), (3, 0, 32), (3, 5, 0), (0, 0, 0), (0, 5, 0)))
def test_empty_dimensions_give_what_linear_gives(isa: str, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(2, m, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
    assert torch.equal(kt.linear(x, weight, bias), F.linear(x, weight, bias))
    assert torch.equal(kt.linear(x, weight), F.linear(x, weight))
    t = WeightType.Q4_0
    rows = torch.zeros(n, ops.row_bytes(t, k), dtype=torch.uint8)
    panels = kt.pack(rows, t)
    assert panels.shape == ops.packed_shape(t, n, k)
    assert torch.equal(kt.linear(x, rows, bias, t), F.linear(x, torch.zeros(n, k).to(dtype), bias))
    assert torch.equal(kt.linear_packed(x, panels, bias, n, k, t), F.linear(x, torch.zeros(n, k).to(dtype), bias))
    assert torch.equal(kt.unpack(panels, n, k, t), rows)
    assert kt.dequantize(rows, t, dtype).shape == (n, k)


# ------------------------------------------------------------------------------------------------ conversions


@pytest.mark.parametrize("weight_type", QUANTIZED)
def test_conversions_match_gguf(isa: str, weight_type: WeightType) -> None:
    for n, k in ((1, 32), (17, 96), (40, 2080)):
        k = whole_blocks(weight_type, k)
        if weight_type in HALVES:
            rows = random_rows(n, k, weight_type)
        else:
            weight = torch.randn(n, k) * torch.rand(n, 1) * 3
            weight[0, :32] = 0
            rows = kt.quantize(weight, weight_type)
            assert torch.equal(rows, oracle_quantize(weight, weight_type))
            for dtype in (torch.float16, torch.bfloat16):
                half = weight.to(dtype)
                assert torch.equal(kt.quantize(half, weight_type), oracle_quantize(half.float(), weight_type))
        floats = oracle_dequantize(rows, weight_type)
        panels = kt.pack(rows, weight_type)
        assert panels.shape == ops.packed_shape(weight_type, n, k)
        assert torch.equal(kt.unpack(panels, n, k, weight_type), rows)
        indices = torch.randint(0, n, (3, 5))
        for dtype in FLOATS:
            assert torch.equal(kt.dequantize(rows, weight_type, dtype), floats.to(dtype))
            assert torch.equal(kt.embedding(indices, rows, weight_type, dtype), floats.to(dtype)[indices])
            y = kt.embedding_packed(indices.int(), panels, n, k, weight_type, dtype)
            assert torch.equal(y, floats.to(dtype)[indices])


@pytest.mark.parametrize("weight_type", list(HALVES))
def test_special_scales_are_decoded_as_gguf_does(isa: str, weight_type: WeightType) -> None:
    special = torch.tensor([0.0, -0.0, 2**-24, -(2**-24), 2**-15, 65504.0, -65504.0, torch.inf, -torch.inf, torch.nan])
    n, f = len(special) ** 2, ops.FORMATS[weight_type]
    rows = random_rows(n, f.block, weight_type)
    for offset, values in zip(HALVES[weight_type], (special.repeat(10), special.repeat_interleave(10)), strict=False):
        put_half(rows, offset, values)
    expected = oracle_dequantize(rows, weight_type)
    actual = kt.dequantize(rows, weight_type, torch.float32)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    panels = kt.pack(rows, weight_type)
    assert torch.equal(kt.unpack(panels, n, f.block, weight_type), rows)
    with ktlinear.exact():  # columns of the identity pick single weights
        y = kt.linear_packed(torch.eye(f.block)[:40], panels, None, n, f.block, weight_type)
    finite = expected.isfinite().all(dim=1)
    torch.testing.assert_close(y[:, finite], expected[finite, :40].t(), rtol=1e-6, atol=1e-9)
    assert finite.sum() > n // 3 and y[:, ~finite].isfinite().logical_not().any(dim=0).all()


def any_rows(t: WeightType, k: int) -> torch.Tensor:
    """Rows of any bytes: 256 random ones, then each value repeated."""
    width = ops.row_bytes(t, k)
    same = torch.arange(256, dtype=torch.uint8)[:, None].expand(-1, width)
    return torch.cat((torch.randint(0, 256, (256, width), dtype=torch.uint8), same))


@pytest.mark.parametrize("weight_type", QUANTIZED)
def test_any_bytes_are_decoded_as_gguf_does(isa: str, weight_type: WeightType) -> None:
    rows = any_rows(weight_type, 512)
    expected = oracle_dequantize(rows, weight_type)
    actual = kt.dequantize(rows, weight_type, torch.float32)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("weight_type", QUANTIZED)
@pytest.mark.parametrize("exact", (False, True))
def test_any_bytes_are_multiplied_as_gguf_decodes_them(isa: str, weight_type: WeightType, exact: bool) -> None:
    """127 at one place and 0 elsewhere is its own int8 code, so each product is a weight."""
    k = ops.FORMATS[weight_type].block
    rows = any_rows(weight_type, k)
    n, weight = rows.shape[0], oracle_dequantize(rows, weight_type)
    usual = weight.abs().amax(1) < 1e36  # not NaN either
    assert usual.sum() > n / 2
    panels = kt.pack(rows, weight_type)
    kt._set_exact(exact)
    try:
        for m in (1, 6, 40):
            place = torch.randint(0, k, (m,))
            x = torch.zeros(m, k).scatter_(1, place[:, None], 127)
            expected = 127 * weight[usual][:, place].t()
            room = 127 * 3e-7 * weight[usual].abs().amax(1)  # d * sc * q - dmin * m is rounded once, or twice
            for y in (kt.linear(x, rows, None, weight_type), kt.linear_packed(x, panels, None, n, k, weight_type)):
                assert ((y[:, usual] - expected).abs() <= room).all(), m
    finally:
        kt._set_exact(False)


def test_grids_are_those_of_gguf() -> None:
    script = Path(__file__).resolve().parent.parent / "scripts" / "make_grids.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


QUANTIZABLE = [t for t in QUANTIZED if not ops.needs_importance(t)]


def patterns() -> dict[str, torch.Tensor]:
    """Weights [3, 512] of magnitude 1 at most, which a search for scales may stumble over."""
    noise = torch.rand(3, 512) * 2 - 1
    last = torch.zeros(3, 512)
    last[:, 31::32] = -1
    outlier = noise / 1000
    outlier[:, ::256] = 1
    return {
        "noise": noise,
        "one sign": noise.abs(),
        "far from zero": 0.98 - noise.abs() / 50,
        "alternating": (torch.arange(512) % 2 * 2.0 - 1).repeat(3, 1),
        "equal": torch.full((3, 512), -0.7),
        "one element a block": last,
        "an outlier": outlier,
        "mostly zeros": noise * (torch.rand(3, 512) < 0.05),
    }


@pytest.mark.parametrize("weight_type", QUANTIZABLE)
@pytest.mark.parametrize("scale", (1e-2, 1.0, 65504.0))
def test_no_pattern_misleads_a_quantizer(weight_type: WeightType, scale: float) -> None:
    """No value is off by more than a step of so many bits; where gguf has a quantizer, it says the same."""
    step = {1: 0.6, 2: 0.5, 3: 0.3, 4: 0.3, 5: 0.1, 6: 0.05, 8: 0.01}[8 * ops.row_bytes(weight_type, 256) // 256]
    if weight_type.name.startswith(("IQ1", "IQ2", "IQ3")):  # not every combination of elements is a point of the grid
        step = 0.85
    if weight_type == WeightType.NVFP4:  # its largest weight is 2688
        scale = min(scale, 2600.0)
    for name, pattern in patterns().items():
        weight = pattern * scale
        values = oracle_dequantize(kt.quantize(weight, weight_type), weight_type)
        assert (values - weight).abs().max() <= step * weight.abs().max(), name
        if weight_type not in HALVES:
            expected = oracle_dequantize(oracle_quantize(weight, weight_type), weight_type)
            assert torch.equal(values, expected), name


@pytest.mark.parametrize("weight_type", [t for t in QUANTIZABLE if t != WeightType.MXFP4])  # its scale is no fp16
@pytest.mark.parametrize("scale", (1e-45, 1e-38, 1e-12))
def test_weights_below_all_scales_are_stored_as_zeros(weight_type: WeightType, scale: float) -> None:
    for pattern in patterns().values():
        zeros = kt.quantize(torch.zeros_like(pattern), weight_type)
        values = oracle_dequantize(kt.quantize(pattern * scale, weight_type), weight_type)
        assert not values.any()
        if scale < 2**-126:  # subnormal: no code is defined, so all are those of zeros
            assert torch.equal(kt.quantize(pattern.abs() * scale, weight_type), zeros)


def test_conversions_of_float_types_and_strides(isa: str) -> None:
    weight = torch.randn(6, 40)
    for t, dtype in (
        (WeightType.F32, torch.float32),
        (WeightType.F16, torch.float16),
        (WeightType.BF16, torch.bfloat16),
    ):
        rows = kt.quantize(weight, t)
        assert torch.equal(rows.view(dtype), weight.to(dtype))
        assert torch.equal(kt.embedding(torch.tensor([4, 0]), rows, t, torch.float32), weight.to(dtype).float()[[4, 0]])
    rows = kt.quantize(torch.randn(2, 3, 64).transpose(0, 1), WeightType.Q8_0)
    assert rows.shape == (3, 2, 68)
    floats = oracle_dequantize(rows, WeightType.Q8_0)
    assert torch.equal(kt.dequantize(rows.transpose(0, 1), WeightType.Q8_0, torch.float32), floats.transpose(0, 1))


def test_pack_into_memory_of_the_caller() -> None:
    rows = random_rows(20, 96, WeightType.Q4_1)
    out = torch.empty(ops.packed_shape(WeightType.Q4_1, 20, 96), dtype=torch.uint8)
    assert kt._pack_out(out, rows, WeightType.Q4_1) is None
    assert torch.equal(out, kt.pack(rows, WeightType.Q4_1))


@pytest.mark.parametrize("weight_type", QUANTIZED)
def test_packed_weights_in_any_memory(weight_type: WeightType) -> None:
    k = whole_blocks(weight_type, 96)
    rows, x = random_rows(33, k, weight_type), torch.randn(2, k)
    panels = kt.pack(rows, weight_type)
    expected, floats = kt.linear(x, rows, None, weight_type), oracle_dequantize(rows, weight_type)
    count, width = panels.shape
    wide = torch.zeros(2 * count, width + 7, dtype=torch.uint8)
    views = [wide[::2, 3:-4], torch.empty_like(panels.t()).t()]
    views += [torch.empty(panels.numel() + 64, dtype=torch.uint8)[i : i - 64].view_as(panels) for i in (1, 8, 32)]
    for view in views:
        view.copy_(panels)
        assert torch.equal(kt.linear_packed(x, view, None, 33, k, weight_type), expected)
        assert torch.equal(kt.unpack(view, 33, k, weight_type), rows)
        y = kt.embedding_packed(torch.arange(33), view, 33, k, weight_type, torch.float32)
        assert torch.equal(y, floats)
    assert torch.equal(kt.linear_packed(x, panels[1:], None, 17, k, weight_type), expected[:, 16:])
    assert torch.equal(kt.unpack(panels[1:2], 16, k, weight_type), rows[16:32])


def test_geometry_matches_gguf() -> None:
    assert set(ops.FORMATS) == set(WeightType)
    for t, f in ops.FORMATS.items():
        assert (f.block, f.block_bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(t)]
        if f.packed_k:  # lossless, and hardly larger than 16 rows of blocks, but for points and digits written out
            plain = 16 * f.packed_k // f.block * f.block_bytes
            limit = 1.58 if t.name.startswith(("IQ1", "IQ2", "IQ3", "TQ1")) else 1.06 if f.block == 256 else 1
            assert f.packed_bytes % 64 == 0 and plain <= f.packed_bytes <= limit * plain
    assert ops.row_bytes("q4_0", 96) == 54
    assert ops.packed_shape(WeightType.Q8_0, 17, 96) == (2, 2176)


def test_weight_type_accepts_enum_name_and_id() -> None:
    for value in (WeightType.Q4_1, "Q4_1", "q4_1", 3):
        assert ops.weight_type(value) is WeightType.Q4_1
    for value in ("Q9", 1234, None, 2.0, True):
        with pytest.raises(ValueError, match=r"weight_type is .*; expected one of F32 \(0\)"):
            ops.weight_type(value)
    with pytest.raises(ValueError, match="in_features is 33; expected a multiple of 32 for weight_type Q4_0"):
        ops.row_bytes("Q4_0", 33)
    with pytest.raises(ValueError, match="expected one that has a packed layout: Q4_0"):
        ops.panel_bytes("F32", 32)


# ------------------------------------------------------------------------------------------------ PyTorch


def samples() -> list[tuple[str, tuple]]:
    t = WeightType.Q4_0
    x, weight, bias = torch.randn(2, 5, 64), torch.randn(20, 64), torch.randn(20)
    rows = kt.quantize(weight, t)
    panels = kt.pack(rows, t)
    trained = [v.clone().requires_grad_() for v in (x, weight, bias)]
    return [
        ("linear", (*trained,)),
        ("linear", (x, weight.bfloat16(), None)),
        ("linear", (trained[0], rows, trained[2], int(t))),
        ("linear_packed", (trained[0], panels, None, 20, 64, int(t))),
        ("_linear", (x, rows, bias, int(t))),
        ("_linear_packed", (x, panels, bias, 20, 64, int(t))),
        ("pack", (rows, int(t))),
        ("_pack_out", (torch.empty_like(panels), rows, int(t))),
        ("unpack", (panels, 20, 64, int(t))),
        ("quantize", (weight, int(t))),
        ("dequantize", (rows, int(t), torch.float16)),
        ("embedding", (torch.tensor([[1, 2]]), rows, int(t), torch.float32)),
        ("embedding_packed", (torch.tensor([3]), panels, 20, 64, int(t), torch.bfloat16)),
    ]


@pytest.mark.parametrize("index", range(13))
def test_opcheck(index: int) -> None:
    """Schema, fake kernel and autograd registration; test_aot_dispatch_dynamic covers dynamic shapes."""
    name, args = samples()[index]
    torch.library.opcheck(getattr(kt, name).default, args)


def test_compile_with_varying_batch() -> None:
    rows, bias = random_rows(24, 64, WeightType.Q4_0), torch.randn(24)
    weight = torch.randn(24, 24)

    @torch.compile(fullgraph=True, dynamic=True)
    def f(x: torch.Tensor) -> torch.Tensor:
        return ops.linear(torch.relu(ops.linear(x, rows, bias, WeightType.Q4_0)), weight)

    for m in (3, 7, 12):
        x = torch.randn(m, 64)
        expected = kt.linear(torch.relu(kt.linear(x, rows, bias, WeightType.Q4_0)), weight)
        torch.testing.assert_close(f(x), expected)


def test_gradients_of_floats() -> None:
    for shape in ((4, 6), (2, 3, 6), (6,)):
        leaves = [torch.randn(s).requires_grad_() for s in (shape, (5, 6), (5,))]
        doubles = [v.detach().double().requires_grad_() for v in leaves]
        grad = torch.randn(*shape[:-1], 5)
        actual = torch.autograd.grad(kt.linear(*leaves), leaves, grad)
        expected = torch.autograd.grad(F.linear(*doubles), doubles, grad.double())
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e.float())


def test_gradients_keep_each_tensors_type() -> None:
    x, bias = torch.randn(3, 8).bfloat16().requires_grad_(), torch.randn(4).half().requires_grad_()
    weight = torch.randn(4, 8).requires_grad_()
    grads = torch.autograd.grad(kt.linear(x, weight, bias).float().sum(), (x, weight, bias))
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.float32, torch.float16]
    torch.testing.assert_close(grads[0].float(), weight.detach().sum(0).expand(3, 8), rtol=0.02, atol=0.05)
    torch.testing.assert_close(grads[1], x.detach().float().sum(0).expand(4, 8), rtol=0.02, atol=0.05)
    assert torch.equal(grads[2], torch.full((4,), 3.0).half())


@pytest.mark.parametrize("packed", (False, True), ids=("rows", "packed"))
def test_gradients_through_quantized_weights(packed: bool) -> None:
    t = WeightType.Q4_1
    rows = random_rows(20, 64, t)
    x, bias = torch.randn(3, 64, requires_grad=True), torch.randn(20, requires_grad=True)
    y = kt.linear_packed(x, kt.pack(rows, t), bias, 20, 64, t) if packed else kt.linear(x, rows, bias, t)
    grad = torch.randn(3, 20)
    y.backward(grad)
    torch.testing.assert_close(x.grad, grad @ oracle_dequantize(rows, t))
    torch.testing.assert_close(bias.grad, grad.sum(0))


@pytest.mark.parametrize(("m", "n", "k"), ((0, 4, 64), (3, 0, 64), (3, 4, 0)))
def test_gradients_of_empty_dimensions(m: int, n: int, k: int) -> None:
    tensors = [torch.randn(shape, requires_grad=True) for shape in ((m, k), (n, k), (n,))]
    kt.linear(*tensors).sum().backward()
    for tensor, expected in zip(tensors, ((m, k), (n, k), (n,)), strict=True):
        assert tensor.grad.shape == expected
    assert torch.equal(tensors[2].grad, torch.full((n,), float(m)))


@pytest.mark.parametrize("argument", ("input", "weight", "bias"))
def test_forward_mode_differentiation_is_refused_not_dropped(argument: str) -> None:
    tensors = {"input": torch.randn(2, 64), "weight": torch.randn(5, 64), "bias": torch.randn(5)}
    with torch.autograd.forward_ad.dual_level():
        ops.linear(**tensors)
        tensors[argument] = torch.autograd.forward_ad.make_dual(tensors[argument], torch.ones_like(tensors[argument]))
        with pytest.raises(NotImplementedError, match=f"^{argument} has a tangent; expected none"):
            ops.linear(**tensors)
    with pytest.raises(NotImplementedError, match="^input has a tangent"):
        x = torch.randn(2, 64)
        torch.func.jvp(lambda x: ops.linear(x, tensors["weight"].detach()), (x,), (x,))


def test_compiled_gradients() -> None:
    rows = random_rows(20, 64, WeightType.Q4_0)
    weight = torch.randn(8, 20, requires_grad=True)

    @torch.compile(fullgraph=True)
    def f(x: torch.Tensor) -> torch.Tensor:
        return kt.linear(kt.linear(x, rows, None, 2), weight).square().sum()

    x = torch.randn(3, 64, requires_grad=True)
    actual = torch.autograd.grad(f(x), (x, weight))
    expected = torch.autograd.grad(kt.linear(kt.linear(x, rows, None, 2), weight).square().sum(), (x, weight))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-3)


def test_python_linear_chooses_by_gradient_and_casts_under_autocast() -> None:
    x, weight = torch.randn(2, 32), torch.randn(4, 32, requires_grad=True)
    assert ops.linear(x, weight).requires_grad
    with torch.no_grad():
        assert not ops.linear(x, weight).requires_grad
    rows = kt.quantize(weight.detach(), WeightType.Q8_0)
    y = ops.linear(x, rows, weight_type="q8_0")
    assert torch.equal(y, kt._linear(x, rows, None, WeightType.Q8_0))
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.linear(x, rows, weight_type=8)
        assert y.dtype == F.linear(x, weight).dtype == torch.bfloat16
    assert torch.equal(y, kt._linear(x.bfloat16(), rows, None, 8))


META = {"device": "meta"}
REFUSED = {
    "input dtype": ("linear", (torch.empty(2, 64, dtype=torch.float64, **META), torch.empty(5, 64, **META)), "input"),
    "weight dtype": ("linear", (torch.empty(2, 64, **META), torch.empty(5, 64, dtype=torch.int8, **META)), "weight"),
    "bias length": (
        "linear",
        (torch.empty(2, 64, **META), torch.empty(5, 64, **META), torch.empty(99, **META)),
        "bias",
    ),
    "part of a block": (
        "linear",
        (torch.empty(2, 32, **META), torch.empty(5, 35, dtype=torch.uint8, **META), None, 8),
        "weight .* multiple of 34",
    ),
    "panels": (
        "linear_packed",
        (torch.empty(2, 64, **META), torch.empty(3, 576, dtype=torch.uint8, **META), None, 20, 64, 2),
        r"weight .* expected \[2, 576\]",
    ),
    "packed K": (
        "linear_packed",
        (torch.empty(2, 65, **META), torch.empty(2, 576, dtype=torch.uint8, **META), None, 20, 65, 2),
        "in_features is 65",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernels_refuse_is_refused_while_tracing(name: str) -> None:
    op, args, message = REFUSED[name]
    with pytest.raises(RuntimeError, match=f"kt.*{message}"):
        getattr(kt, op)(*args)


def test_meta_tensors_give_shapes() -> None:
    x = torch.empty(2, 3, 64, device="meta", dtype=torch.bfloat16)
    rows = torch.empty(20, 36, device="meta", dtype=torch.uint8)
    y = kt.linear(x, rows, None, WeightType.Q4_0)
    assert y.device.type == "meta" and y.shape == (2, 3, 20) and y.dtype == torch.bfloat16


@pytest.mark.parametrize("weight_type", QUANTIZED)
def test_fake_kernels_give_what_the_kernels_give(weight_type: WeightType) -> None:
    t, k = int(weight_type), whole_blocks(weight_type, 96)
    rows, x, indices = random_rows(17, k, weight_type), torch.randn(2, 3, k).half(), torch.tensor([[0, 16, 3]])
    panels = kt.pack(rows, t)
    calls = [
        (kt.linear, x, rows, None, t),
        (kt.linear_packed, x, panels, None, 17, k, t),
        (kt.pack, rows, t),
        (kt.unpack, panels, 17, k, t),
        (kt.dequantize, rows, t, torch.bfloat16),
        (kt.embedding, indices, rows, t, torch.float16),
        (kt.embedding_packed, indices, panels, 17, k, t, torch.float32),
    ]
    calls.append((kt.quantize, x, t, torch.ones(k)))
    for op, *args in calls:
        real, fake = op(*args), op(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in args))
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype), op


def test_limits_are_positive(isa: str) -> None:
    assert kt._limit("fma", 1000, None) > 0
    assert (kt._limit("bf16", 1000, None) > 0) == (isa == "amd_zen4")
    assert kt._limit("dot", 1000, None) >= 0
    assert kt._limit("read", 2, torch.ones(1 << 20)) == 2 * (4 << 20)
