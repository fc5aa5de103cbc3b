"""The numbers that must hold, one test each, and properties over shapes, types and strides that hypothesis chooses."""

from __future__ import annotations

import mmap
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from conftest import is_rounded_linear, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ops import (
    HALVES,
    QUANTIZED,
    oracle_dequantize,
    oracle_quantize,
    put_half,
    random_rows,
    whole_blocks,
)

import ktlinear
from ktlinear import WeightType, ops

kt = torch.ops.kt
MS = (1, 4, 9, 20, 40)  # each of the kernels, with a tail

# Integer weights that a type holds exactly (scale 1, minimum 0) if every block begins with these two.
CODES = {"Q4_0": (-8, 7), "Q4_1": (0, 15), "Q5_0": (-16, 15), "Q5_1": (0, 31), "Q8_0": (-127, 127)}

# Bytes that make all scales of a block 1 and all minima 0, where the oracle cannot quantize: (offset, bytes).
ONES = {
    "Q2_K": ((0, "01" * 16), (80, "003C0000")),
    "Q3_K": ((96, "11" * 8 + "AA" * 4 + "003C"),),
    "Q4_K": ((0, "003C0000" + "01" * 4 + "00" * 4 + "01" * 4),),
    "Q5_K": ((0, "003C0000" + "01" * 4 + "00" * 4 + "01" * 4),),
    "Q6_K": ((192, "01" * 16 + "003C"),),
    "IQ4_NL": ((0, "003C"),),
    "IQ4_XS": ((0, "003C" + "AAAA" + "11" * 4),),
    "MXFP4": ((0, "80"),),
    "NVFP4": ((0, "40" * 4),),
    "TQ1_0": ((52, "003C"),),
    "TQ2_0": ((64, "003C"),),
    "IQ2_XXS": ((0, "0048"), *((9 + 8 * g, "00") for g in range(8))),
    "IQ2_XS": ((0, "0048"), (66, "00" * 8)),
    "IQ2_S": ((0, "0048"), (74, "00" * 8)),
    "IQ3_XXS": ((0, "0044"), *((69 + 4 * g, "00") for g in range(8))),
    "IQ3_S": ((0, "003C"), (106, "00" * 4)),
    "IQ1_S": ((0, "0048"), *((35 + 2 * g, "80" if g % 2 else "00") for g in range(8))),  # eighths of 8
    "IQ1_M": ((48, "0000" + "0000" + "0080" + "0040"),),
}
# The same for blocks of 32 elements.
ONE_PER_32 = {
    "Q4_0": ((0, "003C"),),
    "Q4_1": ((0, "003C0000"),),
    "Q5_0": ((0, "003C"),),
    "Q5_1": ((0, "003C0000"),),
    "Q8_0": ((0, "003C"),),
}
# d and dmin 1, sub-scales and minima at their ends.
LARGEST_SCALES = {
    "Q2_K": (((0, "FF" * 16), (80, "003C003C")),),
    "Q3_K": (((96, "FF" * 12 + "003C"),), ((96, "00" * 12 + "003C"),)),
    "Q4_K": (((0, "003C003C" + "FF" * 12),),),
    "Q5_K": (((0, "003C003C" + "FF" * 12),),),
    "Q6_K": (((192, "80" * 16 + "003C"),), ((192, "7F" * 16 + "003C"),)),
    "IQ4_XS": (((0, "003C" + "FF" * 6),), ((0, "003C" + "00" * 6),)),
}
# Where d is an fp16 number, for the types of which random_rows does not know it. (MXFP4: it is none.)
OTHER_HALVES: dict[WeightType, tuple[int, ...]] = {
    WeightType.TQ1_0: (52,),
    WeightType.TQ2_0: (64,),
    WeightType.MXFP4: (),
}
D_AT = {t: (HALVES | OTHER_HALVES).get(t, (0,))[:1] for t in QUANTIZED}


def linears(x: torch.Tensor, rows: torch.Tensor, t: WeightType, bias: torch.Tensor | None = None) -> list[torch.Tensor]:
    """The product on plain rows and on packed ones."""
    n, k = rows.shape[0], x.shape[-1]
    return [kt.linear(x, rows, bias, int(t)), kt.linear_packed(x, kt.pack(rows, int(t)), bias, n, k, int(t))]


def integer_rows(n: int, k: int, t: WeightType, extreme: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of integers, all of them lowest or highest codes if `extreme`, and their values."""
    if t.name in ONES:
        f = ops.FORMATS[t]
        blocks = torch.randint(0, 256, (n, k // f.block, f.block_bytes), dtype=torch.uint8)
        if extreme:
            blocks = torch.where(torch.rand(n, k // f.block, 1) < 0.5, 0, 255).to(torch.uint8).expand_as(blocks).clone()
        for offset, ones in ONES[t.name]:
            fixed = torch.tensor(list(bytes.fromhex(ones)), dtype=torch.uint8)
            blocks[..., offset : offset + len(fixed)] = fixed
        weight = oracle_dequantize(blocks.view(n, -1), t)
        assert torch.equal(weight, weight.round()) and weight.unique().numel() >= (2 if extreme else 3)
        return blocks.view(n, -1), weight
    low, high = CODES[t.name]
    weight = torch.randint(low, high + 1, (n, k // 32, 32)).float()
    if extreme:
        weight = torch.where(torch.rand(n, k // 32, 1) < 0.5, float(low), float(high)).expand(-1, -1, 32).clone()
    weight[..., 0], weight[..., 1] = low, high
    rows = oracle_quantize(weight.view(n, k), t)
    assert torch.equal(oracle_dequantize(rows, t), weight.view(n, k))
    return rows, weight.view(n, k)


# ------------------------------------------------------------------------------------------------ sums


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_sums_of_16_bit_floats_are_fp32(isa: str, dtype: torch.dtype) -> None:
    # 64 products of 40000 pass 65504, where fp16 ends; 1 is lost beside them in a 16-bit sum.
    x = torch.full((40, 130), 200.0, dtype=dtype)
    weight = torch.cat((torch.full((35, 64), 200.0), torch.full((35, 64), -200.0), torch.full((35, 2), 0.5)), 1).to(
        dtype
    )
    for m in MS:
        assert torch.equal(kt.linear(x[:m], weight), torch.full((m, 35), 200.0, dtype=dtype))


@pytest.mark.parametrize("weight_type", QUANTIZED)
@pytest.mark.parametrize("extreme", (False, True))
def test_group_sums_are_exact_in_int32(isa: str, weight_type: WeightType, extreme: bool) -> None:
    """Integers up to +-127 are their own int8 codes, so nothing may be rounded, saturate or wrap, in any product."""
    k = whole_blocks(weight_type, 96)
    rows, weight = integer_rows(35, k, weight_type, extreme)
    for m in MS:
        x = torch.randint(-127, 128, (m, k)).float()
        if extreme:
            x = torch.where(torch.rand(m, 1) < 0.5, -127.0, 127.0).expand(-1, k).clone()
        x[:, ::32] = 127
        for y in linears(x, rows, weight_type):
            assert torch.equal(y.double(), x.double() @ weight.double().t())


def same_bytes(t: WeightType, ones: tuple[tuple[int, str], ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """256 rows of one super-block (or 64 elements), each of one byte throughout but for `ones`; and their values."""
    f = ops.FORMATS[t]
    count = max(1, 64 // f.block)
    blocks = torch.arange(256, dtype=torch.uint8).view(-1, 1, 1).expand(256, count, f.block_bytes).clone()
    for offset, text in ones:
        fixed = torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
        blocks[..., offset : offset + len(fixed)] = fixed
    rows = blocks.view(256, -1)
    return rows, oracle_dequantize(rows, t)


@pytest.mark.parametrize("weight_type", QUANTIZED)
def test_extreme_codes_meet_extreme_activations_of_their_sign(isa: str, weight_type: WeightType) -> None:
    """Each point of a grid, each pair of nibbles, against +-127 that make its sums as large as they get."""
    rows, weight = same_bytes(weight_type, (ONES | ONE_PER_32)[weight_type.name])
    assert torch.equal(weight, weight.round())
    x = torch.where(weight < 0, -127.0, 127.0)
    expected = x.double() @ weight.double().t()
    for y in linears(x, rows, weight_type):
        assert torch.equal(y.double(), expected)
    for i in range(0, 256, 4):
        for y in linears(x[i : i + 4], rows, weight_type):
            assert torch.equal(y.double(), expected[i : i + 4])


@pytest.mark.parametrize("name", list(LARGEST_SCALES))
def test_extreme_sub_scales_are_exact(isa: str, name: str) -> None:
    """Sums that integers hold: codes, activations and sub-scales at their ends, and x zero but for one group."""
    t = WeightType[name]
    for ones in LARGEST_SCALES[name]:
        rows, weight = same_bytes(t, ones)
        rows, weight = rows[::51], weight[::51]  # 0x00, 0x33, ... 0xFF
        for m in (4, 16):
            x = torch.zeros(m, 256)
            for i in range(m):
                g = i % 8 * 32
                x[i, g : g + 32] = 127.0 if i < 8 else -127.0
            for y in linears(x, rows, t):
                assert torch.equal(y.double(), x.double() @ weight.double().t())


def test_a_weight_code_of_minus_128_is_exact(isa: str) -> None:
    rows, weight = integer_rows(17, 64, WeightType.Q8_0, extreme=True)
    rows.view(17, 2, 34)[:, :, 2:] = 0x80
    weight[:] = -128
    for m in MS:
        x = torch.full((m, 64), 127.0) * torch.tensor([1.0, -1.0]).repeat(m)[:m, None]
        for y in linears(x, rows, WeightType.Q8_0):
            assert torch.equal(y, x @ weight.t())


@pytest.mark.parametrize("weight_type", QUANTIZED)
@pytest.mark.parametrize("magnitude", (1e-30, 1e-9, 1e6, 1e25))
def test_scales_of_quantized_activations_are_fp32(isa: str, weight_type: WeightType, magnitude: float) -> None:
    k = whole_blocks(weight_type, 96)
    rows = random_rows(19, k, weight_type)
    x = torch.randn(40, k)
    for m in MS:
        for y in linears(x[:m] * magnitude, rows, weight_type):
            assert relative_error(y / magnitude, x[:m], oracle_dequantize(rows, weight_type)) < 0.02


@pytest.mark.parametrize("weight_type", QUANTIZED)
def test_a_group_of_subnormal_activations_counts_as_zero(isa: str, weight_type: WeightType) -> None:
    k = whole_blocks(weight_type, 64)
    rows = random_rows(19, k, weight_type)
    for m in MS:
        x = torch.randn(m, k)
        x[:, :32] = 0
        tiny = x.clone()
        tiny[:, :32] = 1e-40 * torch.randn(m, 32)
        for y, expected in zip(linears(tiny, rows, weight_type), linears(x, rows, weight_type), strict=True):
            if isa in ("amd_fma", "amd_avx", "unsupported"):  # activations are not quantized there: no group, no scale
                assert relative_error(y, tiny, oracle_dequantize(rows, weight_type)) < 1e-5
            else:
                assert torch.equal(y, expected)


@pytest.mark.parametrize("weight_type", QUANTIZED)
@pytest.mark.parametrize("value", (float("nan"), float("inf"), -float("inf"), 1e38, 1e-45))
def test_a_special_activation_stays_in_its_own_row(isa: str, weight_type: WeightType, value: float) -> None:
    k = whole_blocks(weight_type, 96)
    rows = random_rows(19, k, weight_type)
    weight = oracle_dequantize(rows, weight_type)
    for m in MS:
        x = torch.randn(m, k)
        x[m // 2, 40] = value
        others = torch.arange(m) != m // 2
        for y in linears(x, rows, weight_type):
            if not x.isfinite().all():
                assert not y[m // 2].isfinite().any()
            if m > 1:
                assert relative_error(y[others], x[others], weight) < 0.02


@pytest.mark.parametrize("weight_type", [t for t, d in D_AT.items() if d])
@pytest.mark.parametrize("bits", (0x7E00, 0x7C00))
def test_padding_is_zero_on_both_sides(isa: str, weight_type: WeightType, bits: int) -> None:
    """Zero times NaN is NaN: a NaN or infinite scale of the last row must not meet the padding of N, M or K."""
    k = whole_blocks(weight_type, 96)
    rows = random_rows(17, k, weight_type)
    block = rows[16, : ops.FORMATS[weight_type].block_bytes]
    put_half(block, D_AT[weight_type][0], torch.tensor(bits, dtype=torch.int16).view(torch.float16))
    for m in MS:
        for y in linears(torch.randn(m, k), rows, weight_type):
            assert y[:, :16].isfinite().all() and not y[:, 16].isfinite().any()


@pytest.mark.parametrize(("dtype", "step"), ((torch.float16, 2048), (torch.bfloat16, 256)))
def test_bias_is_added_in_fp32_and_the_sum_rounded_once(isa: str, dtype: torch.dtype, step: int) -> None:
    # step + 1 rounds to step (even), so rounding before the bias would lose both ones.
    x = torch.tensor([[1.0] * 40]).to(dtype).expand(40, 40)
    weight = torch.zeros(19, 40)
    weight[:, 0], weight[:, 39] = step, 1
    bias = torch.ones(19, dtype=dtype)
    for m in MS:
        assert torch.equal(kt.linear(x[:m], weight, bias), torch.full((m, 19), step + 2.0, dtype=dtype))


# ------------------------------------------------------------------------------------------------ bf16 x by bf16 W
#
# A tier may have an instruction that multiplies them as they are, in pairs of K.


def bf16_integers(rows: int, k: int, odd: bool) -> torch.Tensor:
    """Integers from -2 to 2, in rows whose neighbours in memory are NaN, at an address of odd elements or even."""
    wide = torch.full((rows, k + 2 + odd), float("nan"), dtype=torch.bfloat16)
    wide[:, 1 : k + 1] = torch.randint(-2, 3, (rows, k))
    return wide[:, 1 : k + 1]


@pytest.mark.parametrize("k", (1, 2, 31, 33, 64, 127, 515, 2113))
def test_bf16_products_are_summed_in_fp32_and_rounded_once(isa: str, k: int) -> None:
    for odd in (False, True):
        for n in (1, 13, 50, 100):
            x, weight, bias = bf16_integers(70, k, odd), bf16_integers(n, k, not odd), torch.randn(n)
            sums = x.double() @ weight.double().t()
            for m in (1, 2, 5, 6, 7, 13, 16, 24, 25, 32, 33, 50, 70):
                y = kt.linear(x[:m], weight, bias)
                assert torch.equal(y, (sums[:m].float() + bias).bfloat16()), (m, n, odd)


@pytest.mark.parametrize("value", (float("nan"), float("inf"), -float("inf")))
def test_bf16_specials_stay_in_their_row_and_column(isa: str, value: float) -> None:
    for m in (1, 5, 20, 70):
        x, weight = torch.ones(m, 67, dtype=torch.bfloat16), torch.ones(37, 67, dtype=torch.bfloat16)
        x[m // 2, 66] = value
        weight[36, 65] = value
        expected = torch.full((m, 37), 67.0)
        expected[m // 2], expected[:, 36] = value, value
        torch.testing.assert_close(kt.linear(x, weight).float(), expected, rtol=0, atol=0, equal_nan=True)
        weight[36, 66], weight[36, 65] = 0, 1  # infinity times zero
        assert kt.linear(x, weight)[m // 2, 36].isnan()


def test_bf16_range_is_that_of_fp32(isa: str) -> None:
    for m in (1, 5, 20, 70):
        x, weight = torch.zeros(m, 33, dtype=torch.bfloat16), torch.zeros(19, 33, dtype=torch.bfloat16)
        x[:, 32], weight[:, 32] = 2.0**-126, 2.0**127  # the least normal number
        assert torch.equal(kt.linear(x, weight), torch.full((m, 19), 2.0, dtype=torch.bfloat16))
        x[:, 32] = 4
        assert torch.equal(kt.linear(x, weight), torch.full((m, 19), float("inf"), dtype=torch.bfloat16))
        x[:, 32], weight[:, 32] = 2.0**-130, 2.0**127  # subnormal: counts in full, or as zero
        assert set(kt.linear(x, weight).unique().tolist()) <= {0.0, 0.125}


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *(t.name for t in QUANTIZED)])
def test_a_sum_does_not_depend_on_its_place(isa: str, kind: str) -> None:
    """Equal rows of W and of x give equal bits everywhere, in tails too."""
    t = WeightType[kind]
    k = whole_blocks(t, 1056)
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(kind)
    weight = torch.randn(1, k).to(dtype) if dtype else random_rows(1, k, t)
    for n, m in ((67, 1), (67, 7), (35, 41)):
        x = torch.randn(1, k).to(dtype or torch.float32).expand(m, -1)
        y = kt.linear(x, weight.expand(n, -1), None, int(t))
        assert torch.equal(y, y[:1, :1].expand(m, n))


# ------------------------------------------------------------------------------------------------ memory

GUARD = """
import ctypes, sys, warnings
import torch, ktlinear
from ktlinear import ops

warnings.simplefilter("ignore")
kt, page = torch.ops.kt, 4096
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(t, at_end):
    size = t.numel() * t.element_size()
    pages = -(-size // page)
    base = libc.mmap(None, (pages + 2) * page, 3, 0x22, -1, 0)  # read and write, private and anonymous
    for edge in (base, base + (pages + 1) * page):
        assert libc.mprotect(edge, page, 0) == 0
    start = base + (pages + 1) * page - size if at_end else base + page
    copy = torch.frombuffer((ctypes.c_char * size).from_address(start), dtype=t.dtype).view(t.shape)
    return copy.copy_(t)


def check(f, *tensors):
    expected = f(*tensors)
    for at_end in (False, True):
        assert torch.equal(f(*(guarded(t, at_end) for t in tensors)), expected)


floats = (torch.float32, torch.float16, torch.bfloat16)
quantized = [(int(t), -(-96 // f.block) * f.block) for t, f in ops.FORMATS.items() if f.packed_k]
with ktlinear.use_isa(sys.argv[1]):
    for i, (m, n) in enumerate((m, n) for m in (1, 3, 9, 40) for n in (1, 17, 35)):
        dtype, k = floats[i % 3], (7, 33, 70)[i // 3 % 3]
        bias = torch.randn(n).to(floats[(i + 1) % 3])
        for weight_dtype in floats:
            check(kt.linear, torch.randn(m, k).to(dtype), torch.randn(n, k).to(weight_dtype), bias)
        for t, k in quantized:
            rows = torch.randint(0, 256, (n, ops.row_bytes(t, k)), dtype=torch.uint8) & 0xBF  # no NaN, no infinity
            panels = kt.pack(rows, t)
            x = torch.randn(m, k).to(dtype)
            for exact in (False, True):
                kt._set_exact(exact)
                check(lambda x, w, b: kt.linear(x, w, b, t), x, rows, bias)
                check(lambda x, w, b: kt.linear_packed(x, w, b, n, k, t), x, panels, bias)
            kt._set_exact(False)
            check(lambda w: kt.pack(w, t), rows)
            check(lambda w: kt.unpack(w, n, k, t), panels)
            check(lambda w: kt.dequantize(w, t, dtype), rows)
            check(lambda w: kt.quantize(w, t, torch.ones(k)), torch.randn(n, k).to(dtype))
            check(lambda w: kt.embedding_packed(torch.tensor([n - 1]), w, n, k, t, dtype), panels)
print("ok")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the script places guard pages with Linux's mmap")
def test_nothing_is_read_outside_the_tensors(isa: str) -> None:
    """Each tensor begins or ends at a page that cannot be read, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", GUARD, isa], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stderr[-2000:]


@pytest.mark.parametrize("kind", ("BF16", "Q8_0"))
def test_more_than_2_to_the_31_elements(kind: str) -> None:
    """Untouched pages of a private mapping are all the same page of zeros, so 2^31 weights take no memory."""
    t, k = WeightType[kind], 32768
    n = 2**31 // k + 3
    width = ops.row_bytes(t, k)
    last = torch.randn(1, k)
    stored = last.bfloat16().view(torch.uint8) if kind == "BF16" else oracle_quantize(last, t)
    memory = mmap.mmap(-1, n * width, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[-width:] = stored.numpy().tobytes()
    x = torch.randn(1, k)
    y = kt.linear(x, torch.frombuffer(memory, dtype=torch.uint8).view(n, width), None, int(t))
    values = last.bfloat16() if kind == "BF16" else oracle_dequantize(stored, t)
    assert not y[:, :-1].any() and relative_error(y[:, -1:], x, values) < 0.02


# ------------------------------------------------------------------------------------------------ properties

sizes = st.integers(1, 70)
dtypes = st.sampled_from((torch.float32, torch.float16, torch.bfloat16))
seeds = st.integers(0, 2**32)


@st.composite
def inputs(draw: st.DrawFn, k: int) -> torch.Tensor:
    """[..., k] of any float type, one to four dimensions, contiguous, in a wider tensor, transposed or expanded."""
    torch.manual_seed(draw(seeds))
    shape = draw(st.lists(st.integers(0, 6), max_size=3))
    kind = draw(st.sampled_from(("contiguous", "columns", "transposed", "expanded")))
    dtype = draw(dtypes)
    if kind == "columns":
        return torch.randn(*shape, k + 9).to(dtype)[..., 5 : 5 + k]
    if kind == "transposed":
        return torch.randn(k, *shape).to(dtype).movedim(0, -1)
    if kind == "expanded":
        return torch.randn(k).to(dtype).expand(*shape, k)
    return torch.randn(*shape, k).to(dtype)


@settings(deadline=None, max_examples=100)
@given(data=st.data(), n=sizes, k=sizes, weight_dtype=dtypes, with_bias=st.booleans())
def test_linear_of_floats_is_f_linear(
    data: st.DataObject, n: int, k: int, weight_dtype: torch.dtype, with_bias: bool
) -> None:
    x = data.draw(inputs(k))
    weight, bias = torch.randn(n, k).to(weight_dtype), torch.randn(n) if with_bias else None
    y = kt.linear(x, weight, bias)
    assert y.dtype == x.dtype and y.shape == F.linear(x, weight.to(x.dtype)).shape
    assert is_rounded_linear(y, x, weight, bias)


@settings(deadline=None, max_examples=100)
@given(data=st.data(), n=sizes, blocks=st.integers(1, 9), t=st.sampled_from(QUANTIZED))
def test_linear_of_quantized_rows_is_f_linear_of_their_values(
    data: st.DataObject, n: int, blocks: int, t: WeightType
) -> None:
    k = whole_blocks(t, 32 * blocks)
    x = data.draw(inputs(k))
    rows = random_rows(n, k, t)
    weight = oracle_dequantize(rows, t)
    with ktlinear.exact():
        exact = linears(x, rows, t)
    approximate = linears(x, rows, t)
    for plain, packed in (exact, approximate):
        assert plain.dtype == x.dtype and plain.shape == (*x.shape[:-1], n) and torch.equal(plain, packed)
    if exact[0].numel():
        assert is_rounded_linear(exact[0], x, weight)
        assert relative_error(approximate[0], x, weight) < 0.03


@settings(deadline=None, max_examples=100)
@given(seed=seeds, n=sizes, blocks=st.integers(1, 9), t=st.sampled_from(QUANTIZED))
def test_packing_any_bytes_loses_nothing(seed: int, n: int, blocks: int, t: WeightType) -> None:
    torch.manual_seed(seed)
    k = whole_blocks(t, 32 * blocks)
    rows = torch.randint(0, 256, (n, ops.row_bytes(t, k)), dtype=torch.uint8)
    panels = kt.pack(rows, int(t))
    assert panels.shape == ops.packed_shape(t, n, k)
    assert torch.equal(kt.unpack(panels, n, k, int(t)), rows)


@settings(deadline=None, max_examples=100)
@given(seed=seeds, n=sizes, blocks=st.integers(1, 9), t=st.sampled_from(QUANTIZED))
def test_quantizing_again_changes_little(seed: int, n: int, blocks: int, t: WeightType) -> None:
    """The second rounding meets values that the first one made, so it costs less than the first."""
    torch.manual_seed(seed)
    weight = torch.randn(n, whole_blocks(t, 32 * blocks))
    importance = torch.ones(weight.shape[1]) if ops.needs_importance(t) else None
    once = kt.dequantize(kt.quantize(weight, int(t), importance), int(t), torch.float32)
    twice = kt.dequantize(kt.quantize(once, int(t), importance), int(t), torch.float32)
    assert (twice - once).norm() < (once - weight).norm()


@settings(deadline=None, max_examples=60)
@given(
    seed=seeds,
    blocks=st.integers(1, 3),
    power=st.integers(1, 7),
    t=st.sampled_from([t for t in QUANTIZED if t != WeightType.NVFP4]),
)
def test_quantizing_commutes_with_powers_of_two(seed: int, blocks: int, power: int, t: WeightType) -> None:
    """Nothing in a search for scales depends on the magnitude, while no fp16 scale is subnormal.

    Nor for NVFP4, but its scales end at 448.
    """
    torch.manual_seed(seed)
    weight = 8 * torch.randn(3, ops.FORMATS[t].block * blocks)
    importance = torch.ones(weight.shape[1]) if ops.needs_importance(t) else None
    values = oracle_dequantize(kt.quantize(weight, int(t), importance), t)
    larger = oracle_dequantize(kt.quantize(weight * 2**power, int(t), importance), t)
    assert torch.equal(larger, values * 2**power)


@pytest.mark.parametrize("packed", [False, True])
def test_small_scales_survive_flush_to_zero(isa: str, packed: bool) -> None:
    """Scales of a few 1e-7 are subnormal halves, but no subnormal fp32 may appear on their way."""
    t = int(WeightType.Q8_0)
    rows = kt.quantize(torch.full((17, 64), 7e-5), t)
    expected = oracle_dequantize(rows, WeightType.Q8_0)
    assert 6.7e-5 < expected[0, 0] < 7.3e-5
    x = torch.ones(3, 64)
    torch.set_flush_denormal(True)
    try:
        decoded = kt.dequantize(rows, t, torch.float32)
        if packed:
            y = kt.linear_packed(x, kt.pack(rows, t), None, 17, 64, t)
            row = kt.embedding_packed(torch.tensor([5]), kt.pack(rows, t), 17, 64, t, torch.float32)
        else:
            y, row = kt.linear(x, rows, None, t), kt.embedding(torch.tensor([5]), rows, t, torch.float32)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(decoded, expected) and torch.equal(row[0], expected[5])
    torch.testing.assert_close(y, expected.sum(1).expand(3, 17), rtol=1e-2, atol=0)


def test_exact_belongs_to_the_thread() -> None:
    """Two overlapping `with ktlinear.exact()` blocks: neither ends the other's, and nothing stays behind."""
    rows = kt.quantize(torch.randn(9, 64), WeightType.Q4_0)
    x = torch.randn(2, 64)
    rough = kt.linear(x, rows, None, int(WeightType.Q4_0))
    with ktlinear.exact():
        exact = kt.linear(x, rows, None, int(WeightType.Q4_0))
    entered, leave, seen = threading.Event(), threading.Event(), []

    def other() -> None:
        with ktlinear.exact():
            entered.set()
            leave.wait(10)
            seen.append(kt.linear(x, rows, None, int(WeightType.Q4_0)))

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(10)
    assert torch.equal(kt.linear(x, rows, None, int(WeightType.Q4_0)), rough)
    with ktlinear.exact():
        pass
    leave.set()
    thread.join()
    assert torch.equal(seen[0], exact) and torch.equal(kt.linear(x, rows, None, int(WeightType.Q4_0)), rough)
