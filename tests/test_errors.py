"""Every bad argument is an exception that names it, what was given and what is accepted."""

from __future__ import annotations

import pytest
import torch

import ktlinear
from ktlinear import WeightType, ops

kt = torch.ops.kt
Q4 = int(WeightType.Q4_0)
X = torch.zeros(2, 64)
W = torch.zeros(5, 64)
ROWS = torch.zeros(20, 36, dtype=torch.uint8)
PANELS = torch.zeros(2, 576, dtype=torch.uint8)
SPARSE = torch.zeros(5, 64).to_sparse()
QUANTIZED_TENSOR = torch.quantize_per_tensor(torch.zeros(5, 64), 0.1, 0, torch.qint8)
INT = torch.zeros(3, dtype=torch.int64)
# Not contiguous, so that a copy would be wanted before anything else looks at the number of dimensions.
STRIDED_403 = torch.zeros(5, 3, 64).as_strided([1] * 400 + [3, 5, 64], [1] * 400 + [64, 192, 1])


def unfit(value: float) -> torch.Tensor:
    """A weight [5, 64] with `value` in row 3."""
    weight = torch.ones(5, 64)
    weight[3, 40] = value
    return weight


PACKED_TYPES = ", ".join(rf"{t.name} \({t.value}\)" for t, f in ops.FORMATS.items() if f.packed_k)
ACCEPTED = rf"expected one of F32 \(0\), F16 \(1\), BF16 \(30\), {PACKED_TYPES}"
PACKED = rf"expected one that has a packed layout: {PACKED_TYPES}"

BAD = {
    # linear: shapes
    "weight too narrow": ("linear", (X, W[:, :60]), r"weight has shape \[5, 60\]; expected \[N, 64\] to match input's"),
    "weight 1-D": ("linear", (X, W[0]), r"weight has shape \[64\]; expected two dimensions"),
    "weight 3-D": ("linear", (X, W[None]), r"weight has shape \[1, 5, 64\]; expected two dimensions"),
    "weight 0-D": ("linear", (X, torch.tensor(1.0)), r"weight has shape \[\]; expected two dimensions"),
    "input 0-D": ("linear", (torch.tensor(1.0), W), "input has no dimensions; expected"),
    "bias too long": ("linear", (X, W, torch.zeros(6)), r"bias has shape \[6\]; expected \[5\]"),
    "bias 2-D": ("linear", (X, W, torch.zeros(1, 5)), r"bias has shape \[1, 5\]; expected \[5\]"),
    # linear: dtypes
    "input float64": ("linear", (X.double(), W), "input has dtype float64; expected float32, float16 or bfloat16"),
    "input int64": ("linear", (X.long(), W), "input has dtype int64; expected float32"),
    "input complex": ("linear", (X.cfloat(), W), "input has dtype complex64; expected float32"),
    "weight float64": (
        "linear",
        (X, W.double()),
        "weight has dtype float64; expected float32, float16, bfloat16, or uint8",
    ),
    "weight int8": ("linear", (X, W.char()), "weight has dtype int8; expected float32"),
    "bias float64": ("linear", (X, W, torch.zeros(5).double()), "bias has dtype float64; expected float32"),
    # linear: placement and layout
    "weight sparse": ("linear", (X, SPARSE), r"weight is sparse .*; expected a dense \(strided\) tensor"),
    "weight sparse CSR": ("linear", (X, SPARSE.to_dense().to_sparse_csr()), "weight is sparse"),
    "input sparse": ("linear", (X.to_sparse(), W), "input is sparse"),
    "weight of PyTorch's quantized types": ("linear", (X, QUANTIZED_TENSOR), "weight has dtype .*; expected float32"),
    "weight on meta": ("linear", (X, W.to("meta")), "on several devices"),
    "input on meta": ("linear", (X.to("meta"), W), "on several devices"),
    # linear: quantized rows
    "no weight_type": ("linear", (X, ROWS), r"weight is uint8 and weight_type is None; expected .* Q4_0 \(2\)"),
    "unknown weight_type": ("linear", (X, ROWS, None, 999), "weight_type is 999; " + ACCEPTED),
    "negative weight_type": ("linear", (X, ROWS, None, -1), "weight_type is -1; " + ACCEPTED),
    "row bytes": (
        "linear",
        (X, ROWS[:, :35], None, Q4),
        r"weight has shape \[20, 35\]; a row of Q4_0 takes a multiple of 18",
    ),
    "rows of another K": ("linear", (X, ROWS[:, :18], None, Q4), r"weight has shape \[20, 18\]; expected \[N, 36\]"),
    "K no multiple": ("linear", (X[:, :40], ROWS, None, Q4), r"input has shape \[2, 40\].* multiple of 32 for .*Q4_0"),
    "float weight, other type": (
        "linear",
        (X, W, None, Q4),
        "weight has dtype float32 and weight_type is Q4_0; expected uint8",
    ),
    "65 dimensions": ("linear", (torch.zeros([1] * 64 + [64]), W), "65 dimensions; expected at most 64"),
    # linear_packed
    "panels": ("linear_packed", (X, PANELS[:1], None, 20, 64, Q4), r"weight has shape \[1, 576\]; expected \[2, 576\]"),
    "panel bytes": (
        "linear_packed",
        (X, PANELS[:, 1:], None, 20, 64, Q4),
        r"weight has shape \[2, 575\]; expected \[2, 576\]",
    ),
    "panels of floats": (
        "linear_packed",
        (X, PANELS.float(), None, 20, 64, Q4),
        "weight has dtype float32; expected uint8",
    ),
    "out_features": ("linear_packed", (X, PANELS, None, -1, 64, Q4), r"\[-1, 64\]; expected no negative"),
    "K of panels": (
        "linear_packed",
        (X[:, :33], PANELS, None, 20, 33, Q4),
        r"in_features is 33; expected a multiple of 32",
    ),
    "K of panels with the same bytes": (
        "linear_packed",
        (X[:, :32], PANELS, None, 20, 64, Q4),
        r"input has shape \[2, 32\]; its last dimension is to be in_features, 64",
    ),
    "unpackable": ("linear_packed", (X, PANELS, None, 20, 64, 0), "weight_type is 0; " + PACKED),
    "bias of packed": (
        "linear_packed",
        (X, PANELS, torch.zeros(5), 20, 64, Q4),
        r"bias has shape \[5\]; expected \[20\]",
    ),
    # pack, unpack
    "pack floats": ("pack", (W, Q4), "weight has dtype float32; expected uint8 GGUF rows"),
    "pack 1-D": ("pack", (ROWS[0], Q4), r"weight has shape \[36\]; expected two dimensions"),
    "pack row bytes": ("pack", (ROWS[:, 1:], Q4), "a row of Q4_0 takes a multiple of 18"),
    "pack F32": ("pack", (ROWS, 0), "weight_type is 0; " + PACKED),
    "pack into too little": (
        "_pack_out",
        (PANELS[:1], ROWS, Q4),
        r"out is uint8 \[1, 576\]; expected contiguous uint8 \[2, 576\]",
    ),
    "pack into floats": ("_pack_out", (PANELS.float(), ROWS, Q4), r"out is float32 \[2, 576\]; expected"),
    "pack into strides": ("_pack_out", (PANELS.repeat(1, 2)[:, ::2], ROWS, Q4), "not contiguous; expected"),
    "unpack shape": ("unpack", (PANELS, 33, 64, Q4), r"weight has shape \[2, 576\]; expected \[3, 576\]"),
    "unpack K": ("unpack", (PANELS, 20, 63, Q4), "in_features is 63; expected a multiple of 32"),
    "unpack K that overflows": (
        "unpack",
        (PANELS, 20, 2**62, 29),
        "in_features is 4611686018427387904; expected at most",
    ),
    "unpack negative": ("unpack", (PANELS, -1, 64, Q4), r"\[-1, 64\]; expected no negative"),
    # quantize, dequantize
    "quantize K": ("quantize", (W[:, :40], Q4), r"weight has shape \[5, 40\].* multiple of 32 for weight_type Q4_0"),
    "quantize ints": ("quantize", (W.int(), Q4), "weight has dtype int32; expected float32"),
    "quantize type": ("quantize", (W, 77), "weight_type is 77; " + ACCEPTED),
    "quantize 0-D": ("quantize", (torch.tensor(1.0), Q4), "weight has no dimensions"),
    "importance type": ("quantize", (W, Q4, torch.ones(64).double()), "importance has dtype float64; expected float32"),
    "importance K": (
        "quantize",
        (W, Q4, torch.ones(32)),
        r"importance has shape \[32\]; expected \[64\].*or weight's \[5,",
    ),
    "importance rows": ("quantize", (W, Q4, torch.ones(1, 64)), r"importance has shape \[1, 64\]; expected \[64\]"),
    "importance 0-D": ("quantize", (W, Q4, torch.tensor(1.0)), "importance has shape .*; expected"),
    "importance negative": ("quantize", (W, Q4, -torch.ones(64)), "importance holds NaN, infinity or a negative value"),
    "importance NaN": ("quantize", (W, 8, unfit(float("nan"))), r"importance holds NaN, .*\(row 3 of weight"),
    "importance infinite": ("quantize", (W, Q4, torch.full((64,), torch.inf)), "importance holds NaN, infinity or"),
    "quantize NaN": ("quantize", (unfit(float("nan")), 8), "weight holds NaN, .* in row 3; expected finite"),
    "quantize infinity": ("quantize", (unfit(float("-inf")), Q4), "weight holds NaN, .* in row 3; expected finite"),
    "quantize too large": ("quantize", (unfit(65536.0), 3), "magnitude above 65504 in row 3; expected finite"),
    "quantize 403 dimensions": ("quantize", (STRIDED_403, Q4), "weight has 403 dimensions; expected at most 64"),
    "dequantize 403 dimensions": (
        "dequantize",
        (STRIDED_403, 0, torch.float16),
        "weight has 403 dimensions; expected at most 64",
    ),
    "linear 403 dimensions": ("linear", (STRIDED_403, W), "input has 403 dimensions; expected at most 64"),
    "limit iterations": ("_limit", ("fma", -5, None), "iterations is -5; expected 1 or more"),
    "dequantize to ints": ("dequantize", (ROWS, Q4, torch.int32), "the result has dtype int32; expected float32"),
    "dequantize bytes": ("dequantize", (ROWS[:, :20], Q4, torch.float32), "a row of Q4_0 takes a multiple of 18"),
    "dequantize type": ("dequantize", (ROWS, 5, torch.float32), "weight_type is 5; " + ACCEPTED),
    "dequantize 0-D": ("dequantize", (ROWS[0, 0], Q4, torch.float32), "weight has no dimensions"),
    # embedding
    "embedding of floats": (
        "embedding",
        (X, ROWS, Q4, torch.float32),
        "indices has dtype float32; expected int64 or int32",
    ),
    "embedding 1-D": (
        "embedding",
        (INT, ROWS[0], Q4, torch.float32),
        r"weight has shape \[36\]; expected two dimensions",
    ),
    "embedding dtype": ("embedding", (INT, ROWS, Q4, torch.float64), "the result has dtype float64; expected float32"),
    "embedding panels": ("embedding_packed", (INT, PANELS, 50, 64, Q4, torch.float32), r"expected \[4, 576\]"),
    # the rest
    "limit kind": ("_limit", ("dance", 1, None), "kind is 'dance'; expected 'fma', 'bf16', 'dot' or 'read'"),
    "limit buffer": ("_limit", ("read", 1, None), "buffer is None; kind 'read' expects a tensor"),
    "tier": ("_use_isa", ("pdp11",), "name is 'pdp11'; compiled in are "),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_argument(name: str) -> None:
    op, args, message = BAD[name]
    kept = [a.clone() if isinstance(a, torch.Tensor) and a.layout == torch.strided else a for a in args]
    with pytest.raises(RuntimeError, match=f"^kt::{op}: .*{message}"):
        getattr(kt, op)(*args)
    for before, after in zip(kept, args, strict=True):
        if isinstance(after, torch.Tensor) and after.layout == torch.strided and after.device.type == "cpu":
            assert after.is_quantized or torch.equal(before.nan_to_num(7.0), after.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
@pytest.mark.parametrize("t", WeightType)
def test_every_type_refuses_an_unfit_importance(t: WeightType, dtype: torch.dtype) -> None:
    weight = torch.ones(5, 256, dtype=dtype)
    for value in (float("nan"), float("inf"), -1.0):
        importance = torch.ones(256)
        importance[200] = value
        with pytest.raises(RuntimeError, match="^kt::quantize: importance holds NaN, infinity or a negative value"):
            kt.quantize(weight, t, importance)
    kt.quantize(weight, t, torch.ones(256))


@pytest.mark.parametrize("index", (-1, 20, 2**40))
def test_index_out_of_range(index: int) -> None:
    message = rf"indices holds {index}; expected 0 <= index < 20"
    with pytest.raises(IndexError, match=message):
        kt.embedding(torch.tensor([0, index]), ROWS, Q4, torch.float32)
    with pytest.raises(IndexError, match=message):
        kt.embedding_packed(torch.tensor([[index]]), PANELS, 20, 64, Q4, torch.float32)


def test_fake_kernels_check_shapes_too() -> None:
    with pytest.raises(RuntimeError, match="weight has shape"):
        kt.linear(X.to("meta"), W[:, :60].to("meta"))
    with pytest.raises(ValueError, match="weight_type is 999; expected one of"):
        kt.linear(X.to("meta"), ROWS.to("meta"), None, 999)


def test_names_are_checked_in_python() -> None:
    with pytest.raises(ValueError, match="weight_type is 'Q9_9'; expected one of"):
        ops.linear(X, ROWS, weight_type="Q9_9")
    with pytest.raises(ValueError, match="name is 'pdp11'; available are"), ktlinear.use_isa("pdp11"):
        pass


def test_an_error_restores_the_tier_and_the_mode() -> None:
    tier = ktlinear.isa()
    with pytest.raises(KeyError), ktlinear.use_isa(ktlinear.available_isas()[-1]), ktlinear.exact():
        raise KeyError
    assert ktlinear.isa() == tier
    assert kt._set_exact(False) is False
