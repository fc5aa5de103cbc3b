"""The expert-routed product: against float64, and to the last bit against one `kt::linear` for each expert."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import relative_error
from test_ops import FLOATS, QUANTIZED, ROUNDING, oracle_dequantize, random_rows, whole_blocks

import ktlinear
from ktlinear import WeightType, ops

kt = torch.ops.kt
Q4 = int(WeightType.Q4_0)

# (T, top_k, E): one token, few experts with many tokens, many experts with few, one expert, more than a chunk of rows.
LOADS = ((1, 4, 9), (5, 2, 3), (7, 3, 40), (19, 1, 1), (40, 2, 2))


def random_ids(tokens: int, top_k: int, experts: int) -> torch.Tensor:
    """[T, top_k], the first expert more often than the others, with duplicates inside a token."""
    ids = torch.randint(0, experts, (tokens, top_k))
    return torch.where(torch.rand(tokens, top_k) < 0.3, 0, ids)


def experts_rows(experts: int, n: int, k: int, t: WeightType) -> torch.Tensor:
    return random_rows(experts * n, k, t).view(experts, n, -1)


def by_expert(
    linear: Callable[[torch.Tensor, int], torch.Tensor], x: torch.Tensor, ids: torch.Tensor, n: int
) -> torch.Tensor:
    """y [T, top_k, N], where linear(rows of x, expert) computes all rows of one expert together."""
    choices = x if x.dim() == 3 else x.unsqueeze(1).expand(-1, ids.shape[1], -1)
    y = torch.full((*ids.shape, n), torch.nan, dtype=x.dtype)
    for expert in ids.unique().tolist():
        y[ids == expert] = linear(choices[ids == expert], expert)
    return y


def error(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> float:
    """The largest relative error of any expert's outputs; `weight` is [E, N, K] in float."""
    choices = x if x.dim() == 3 else x.unsqueeze(1).expand(-1, ids.shape[1], -1)
    return max(relative_error(y[ids == e], choices[ids == e], weight[e]) for e in ids.unique().tolist())


# ------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("weight_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_float_weights(isa: str, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    for n, k in ((1, 1), (13, 33), (100, 515)):
        for tokens, top_k, experts in LOADS:
            weight, ids = torch.randn(experts, n, k).to(weight_dtype), random_ids(tokens, top_k, experts)
            for x in (torch.randn(tokens, k).to(dtype), torch.randn(tokens, top_k, k).to(dtype)):
                y = kt.linear_experts(x, weight, ids)
                assert y.dtype == dtype and y.shape == (tokens, top_k, n) and y.is_contiguous()
                assert error(y, x, weight, ids) < 2 * ROUNDING[dtype]
                assert torch.equal(y, by_expert(lambda rows, e: kt.linear(rows, weight[e]), x, ids, n))  # noqa: B023


@pytest.mark.parametrize("weight_type", QUANTIZED)
def test_quantized_weights(isa: str, weight_type: WeightType) -> None:
    for n, k in ((1, 32), (13, 96), (35, 352)):
        k = whole_blocks(weight_type, k)
        for tokens, top_k, experts in LOADS:
            rows, ids = experts_rows(experts, n, k, weight_type), random_ids(tokens, top_k, experts).int()
            panels = kt.pack(rows, weight_type)
            weight = oracle_dequantize(rows.flatten(0, 1), weight_type).view(experts, n, k)
            for x in (torch.randn(tokens, k), torch.randn(tokens, top_k, k)):
                y = kt.linear_experts(x, rows, ids, weight_type)
                # Small matrices average little, so a single one may lie above the 0.6 % of many.
                assert error(y, x, weight, ids) < 0.025
                expected = by_expert(lambda x, e: kt.linear(x, rows[e], None, weight_type), x, ids, n)  # noqa: B023
                assert torch.equal(y, expected)
                assert torch.equal(kt.linear_experts_packed(x, panels, ids, n, k, weight_type), expected)
                with ktlinear.exact():
                    y = kt.linear_experts_packed(x, panels, ids, n, k, weight_type)
                assert error(y, x, weight, ids) < 1e-5


@pytest.mark.parametrize("dtype", FLOATS)
def test_many_rows_of_one_expert_and_few_of_others(isa: str, dtype: torch.dtype) -> None:
    """More rows than a chunk, and more activations than are prepared at a time."""
    n, k, experts = 21, 4160, 3
    x, rows = torch.randn(1100, k).to(dtype), experts_rows(experts, n, k, WeightType.Q8_0)
    ids = torch.where(torch.rand(1100, 2) < 0.02, torch.randint(0, experts, (1100, 2)), 1)
    ids[5] = torch.tensor([0, 2])
    y = kt.linear_experts(x, rows, ids, WeightType.Q8_0)
    assert torch.equal(y, by_expert(lambda x, e: kt.linear(x, rows[e], None, WeightType.Q8_0), x, ids, n))


def test_one_token_on_several_experts_shares_its_activations_only_with_itself(isa: str) -> None:
    rows = experts_rows(6, 40, 64, WeightType.Q4_0)
    x, ids = torch.randn(3, 64), torch.tensor([[5, 0], [3, 1], [2, 4]])  # every expert has a single row
    expected = by_expert(lambda x, e: kt.linear(x, rows[e], None, Q4), x, ids, 40)
    assert torch.equal(kt.linear_experts(x, rows, ids, Q4), expected)


@pytest.mark.parametrize("top_k", (1, 3))
@pytest.mark.parametrize("tokens", (1, 20))
def test_rows_too_large_for_int8_are_computed_exactly(isa: str, tokens: int, top_k: int) -> None:
    rows, ids = experts_rows(4, 24, 64, WeightType.Q8_0), random_ids(tokens, top_k, 4)
    x = torch.randn(tokens, 64)
    x[tokens // 2] *= 2.0**101
    y = kt.linear_experts(x, rows, ids, WeightType.Q8_0)
    assert torch.equal(y, by_expert(lambda x, e: kt.linear(x, rows[e], None, WeightType.Q8_0), x, ids, 24))
    weight = oracle_dequantize(rows.flatten(0, 1), WeightType.Q8_0).view(4, 24, 64)
    scale = torch.ones(tokens, 1)
    scale[tokens // 2] = 2.0**-101
    assert error(y * scale.unsqueeze(1), x * scale, weight, ids) < 0.02


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_nan_and_infinity_stay_in_their_token(isa: str, value: float) -> None:
    rows, weight, ids = experts_rows(3, 20, 96, WeightType.Q4_0), torch.randn(3, 20, 96), random_ids(9, 2, 3)
    x = torch.randn(9, 96)
    x[4, 40] = value
    for y in (kt.linear_experts(x, rows, ids, Q4), kt.linear_experts(x, weight, ids)):
        finite = y.isfinite().flatten(1).all(dim=1)
        assert finite.sum() == 8 and not y[4].isfinite().any()


@pytest.mark.parametrize("tokens", (1, 3, 30, 600))
def test_same_bits_for_any_number_of_threads(isa: str, tokens: int) -> None:
    n, k, experts, before = 333, 1056, 5, torch.get_num_threads()
    x, weight, ids = torch.randn(tokens, k), torch.randn(experts, n, k), random_ids(tokens, 2, experts)
    rows = kt.quantize(weight, Q4)
    panels = kt.pack(rows, Q4)
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(
                (
                    kt.linear_experts(x, weight, ids),
                    kt.linear_experts(x, weight.half(), ids),
                    kt.linear_experts(x, rows, ids, Q4),
                    kt.linear_experts_packed(x, panels, ids, n, k, Q4),
                    kt.pack(rows, Q4),
                )
            )
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


# ------------------------------------------------------------------------------------------------ geometry


def test_strides() -> None:
    """Slices of the weights, such as the gate half of gate_up_proj, and inputs and ids that are not contiguous."""
    tokens, top_k, experts, n, k = 6, 2, 4, 18, 64
    whole = torch.randn(2 * experts, 2 * n, k)
    rows = kt.quantize(whole, Q4)
    panels = kt.pack(rows[:, :n], Q4)
    inputs = {
        "every second column": torch.randn(tokens, 2 * k)[:, ::2],
        "a slice of columns": torch.randn(tokens, 3 * k)[:, 5 : 5 + k],
        "expanded": torch.randn(1, k).expand(tokens, k),
        "choices, expanded": torch.randn(tokens, 1, k).expand(tokens, top_k, k),
        "choices, swapped": torch.randn(top_k, tokens, k).transpose(0, 1),
        "choices, a slice": torch.randn(tokens, top_k, 2 * k)[..., k:],
    }
    weights: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "whole": lambda w: w[:experts],
        "a half of the rows": lambda w: w[:experts, n:],
        "every second expert": lambda w: w[::2],
        "every second row": lambda w: w[:experts, ::2],
        "expanded": lambda w: w[:1].expand(experts, -1, -1),
        "experts in the middle": lambda w: w[:experts].transpose(0, 1).contiguous().transpose(0, 1),
        "transposed": lambda w: w[:experts].transpose(1, 2).contiguous().transpose(1, 2),
    }
    ids = random_ids(top_k, tokens, experts).t()
    for name, x in inputs.items():
        for weight_name, of in weights.items():
            weight, stored = of(whole), of(rows)
            y = kt.linear_experts(x, weight, ids)
            assert error(y, x, weight, ids) < 2e-6, (name, weight_name)
            y = kt.linear_experts(x, stored, ids, Q4)
            expected = by_expert(lambda x, e: kt.linear(x, stored[e], None, Q4), x, ids, weight.shape[1])  # noqa: B023
            assert torch.equal(y, expected), (name, weight_name)
        misaligned = torch.zeros(panels.numel() + 1, dtype=torch.uint8)[1:].view(panels.shape).copy_(panels)
        wide = torch.cat((panels, panels), dim=1)  # experts lie apart
        for stored in (
            panels[::2],
            misaligned[::2],
            wide[::2, : panels.shape[1]],
            panels.transpose(0, 1).contiguous().transpose(0, 1)[::2],
        ):
            expected = by_expert(lambda x, e: kt.linear(x, rows[2 * e, :n], None, Q4), x, ids, n)
            assert torch.equal(kt.linear_experts_packed(x, stored, ids, n, k, Q4), expected), name


@pytest.mark.parametrize("tokens, top_k, experts, n, k", (
    (0, 2, 3, 5, 32), (3, 0, 4, 5, 32), (3, 2, 4, 0, 32), (3, 2, 4, 5, 0), (0, 2, 0, 5, 32), (3, 0, 0, 5, 32)
))  # fmt: skip
def test_empty_dimensions(isa: str, tokens: int, top_k: int, experts: int, n: int, k: int) -> None:
    ids = torch.zeros(tokens, top_k, dtype=torch.int64)
    rows = torch.zeros(experts, n, ops.row_bytes(Q4, k), dtype=torch.uint8)
    panels = kt.pack(rows, Q4)
    assert panels.shape == (experts, *ops.packed_shape(Q4, n, k))
    assert torch.equal(kt.unpack(panels, n, k, Q4), rows)
    for x in (torch.ones(tokens, k), torch.ones(tokens, top_k, k)):
        for y in (
            kt.linear_experts(x, torch.ones(experts, n, k), ids),
            kt.linear_experts(x, rows, ids, Q4),
            kt.linear_experts_packed(x, panels, ids, n, k, Q4),
        ):
            expected = 1.0 * k if y.numel() and k else 0.0
            assert y.shape == (tokens, top_k, n) and (y == expected).all()


@pytest.mark.parametrize("weight_type", QUANTIZED)
def test_experts_are_packed_one_by_one(isa: str, weight_type: WeightType) -> None:
    n, k = 35, whole_blocks(weight_type, 96)
    rows = experts_rows(3, n, k, weight_type)
    panels = kt.pack(rows, weight_type)
    assert torch.equal(panels, torch.stack([kt.pack(r, weight_type) for r in rows]))
    assert torch.equal(kt.pack(rows[:, ::2], weight_type)[1], kt.pack(rows[1, ::2], weight_type))
    assert torch.equal(kt.unpack(panels, n, k, weight_type), rows)
    out = torch.empty_like(panels)
    kt._pack_out(out, rows, weight_type)
    assert torch.equal(out, panels)


# ------------------------------------------------------------------------------------------------ errors

X = torch.zeros(2, 64)
W = torch.zeros(3, 20, 64)
ROWS = torch.zeros(3, 20, 36, dtype=torch.uint8)
PANELS = torch.zeros(3, 2, 576, dtype=torch.uint8)
IDS = torch.zeros(2, 4, dtype=torch.int64)

BAD = {
    "input 1-D": ((X[0], W, IDS), r"input has shape \[64\]; expected \[T, in_features\] or \[T, top_k, in_features\]"),
    "input 4-D": ((X[None, None], W, IDS), r"input has shape \[1, 1, 2, 64\]; expected \[T, in_features\]"),
    "input dtype": ((X.double(), W, IDS), "input has dtype float64; expected float32, float16 or bfloat16"),
    "input's choices": (
        (X[:, None].repeat(1, 3, 1), W, IDS),
        r"expert_ids has shape \[2, 4\]; expected \[2, 3\] to match input's shape, \[2, 3, 64\]",
    ),
    "weight 2-D": ((X, W[0], IDS), r"weight has shape \[20, 64\]; expected three dimensions, \[experts, out_features"),
    "weight dtype": ((X, W.double(), IDS), "weight has dtype float64; expected float32, float16, bfloat16, or uint8"),
    "another K": ((X, W[..., :60], IDS), r"weight has shape \[3, 20, 60\]; expected \[E, N, 64\] to match input's"),
    "no weight_type": ((X, ROWS, IDS), "weight is uint8 and weight_type is None"),
    "unknown weight_type": ((X, ROWS, IDS, 999), "weight_type is 999; expected one of F32"),
    "another weight_type": ((X, W, IDS, Q4), "weight has dtype float32 and weight_type is Q4_0"),
    "row bytes": (
        (X, ROWS[..., :35], IDS, Q4),
        r"weight has shape \[3, 20, 35\]; a row of Q4_0 takes a multiple of 18",
    ),
    "K no multiple": ((X[:, :40], ROWS, IDS, Q4), r"input has shape \[2, 40\].* multiple of 32"),
    "ids 1-D": ((X, W, IDS[0]), r"expert_ids has shape \[4\]; expected \[2, top_k\] to match input's shape, \[2, 64\]"),
    "ids of other tokens": ((X, W, IDS[:1]), r"expert_ids has shape \[1, 4\]; expected \[2, top_k\]"),
    "ids dtype": ((X, W, IDS.float()), "expert_ids has dtype float32; expected int64 or int32"),
    "weight sparse": ((X, W.to_sparse(), IDS), "weight is sparse"),
    "ids sparse": ((X, W, IDS.to_sparse()), "expert_ids is sparse"),
    "weight on meta": ((X, W.to("meta"), IDS), "on several devices"),
}

BAD_PACKED = {
    "panels": (
        (X, PANELS[:, :1], IDS, 20, 64, Q4),
        r"weight has shape \[3, 1, 576\]; expected \[..., 2, 576\]: panels of",
    ),
    "panels of one": ((X, PANELS[0], IDS, 20, 64, Q4), r"weight has shape \[2, 576\]; expected \[..., 2, 576\]"),
    "panels' dtype": ((X, PANELS.char(), IDS, 20, 64, Q4), "weight has dtype int8; expected uint8 panels"),
    "out_features": ((X, PANELS, IDS, -1, 64, Q4), r"\[-1, 64\]; expected no negative"),
    "in_features": ((X[:, :33], PANELS, IDS, 20, 33, Q4), "in_features is 33; expected a multiple of 32"),
    "input's in_features": (
        (X[:, :32], PANELS, IDS, 20, 64, Q4),
        r"input has shape \[2, 32\]; its last .* in_features, 64",
    ),
    "unpackable": ((X, PANELS, IDS, 20, 64, 0), "weight_type is 0; expected one that has a packed layout"),
    "ids dtype": ((X, PANELS, IDS.bool(), 20, 64, Q4), "expert_ids has dtype bool; expected int64 or int32"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    args, message = BAD[name]
    with pytest.raises(RuntimeError, match=f"kt::linear_experts: .*{message}"):
        kt.linear_experts(*args)


@pytest.mark.parametrize("name", BAD_PACKED)
def test_bad_arguments_of_packed_experts(name: str) -> None:
    args, message = BAD_PACKED[name]
    with pytest.raises(RuntimeError, match=f"kt::linear_experts_packed: .*{message}"):
        kt.linear_experts_packed(*args)


@pytest.mark.parametrize("dtype", (torch.int64, torch.int32))
@pytest.mark.parametrize("bad", (3, -1, 2**31 - 1, -(2**31)))
def test_ids_out_of_range(dtype: torch.dtype, bad: int) -> None:
    ids = IDS.to(dtype).clone()
    ids[1, 3] = bad
    message = rf"expert_ids holds {bad}; expected 0 <= index < 3 \(experts of weight\)"
    with pytest.raises(IndexError, match=message):
        kt.linear_experts(X, W, ids)
    with pytest.raises(IndexError, match=message):
        kt.linear_experts_packed(X, PANELS, ids, 20, 64, Q4)
    with pytest.raises(IndexError, match="expert_ids holds 0; expected 0 <= index < 0"):
        kt.linear_experts(X, W[:0], IDS)


# ------------------------------------------------------------------------------------------------ PyTorch


def samples() -> list[tuple[str, tuple]]:
    x, weight, ids = torch.randn(5, 64), torch.randn(3, 20, 64), random_ids(5, 2, 3)
    rows = kt.quantize(weight, Q4)
    panels = kt.pack(rows, Q4)
    trained, choices = x.clone().requires_grad_(), torch.randn(5, 2, 64).requires_grad_()
    return [
        ("linear_experts", (trained, weight.clone().requires_grad_(), ids)),
        ("linear_experts", (choices, rows, ids.int(), Q4)),
        ("linear_experts_packed", (trained, panels, ids, 20, 64, Q4)),
        ("_linear_experts", (x, weight, ids)),
        ("_linear_experts_packed", (x, panels, ids, 20, 64, Q4)),
        ("pack", (rows, Q4)),
        ("unpack", (panels, 20, 64, Q4)),
    ]


@pytest.mark.parametrize("index", range(7))
def test_opcheck(index: int) -> None:
    name, args = samples()[index]
    torch.library.opcheck(getattr(kt, name).default, args)


def reference(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    choices = x if x.dim() == 3 else x.unsqueeze(1).expand(-1, ids.shape[1], -1)
    return torch.einsum("tjk,tjnk->tjn", choices, weight[ids])


@pytest.mark.parametrize("choices", (False, True), ids=("tokens", "choices"))
@pytest.mark.parametrize("weight_dtype", (torch.float32, torch.bfloat16))
def test_gradients_of_floats(choices: bool, weight_dtype: torch.dtype) -> None:
    ids = random_ids(7, 3, 5)
    x, weight = torch.randn((7, 3, 12) if choices else (7, 12)).requires_grad_(), torch.randn(5, 9, 12)
    weight = weight.to(weight_dtype).requires_grad_()
    doubles = [v.detach().double().requires_grad_() for v in (x, weight)]
    grad = torch.randn(7, 3, 9)
    actual = torch.autograd.grad(kt.linear_experts(x, weight, ids), (x, weight), grad)
    expected = torch.autograd.grad(reference(*doubles, ids), doubles, grad.double())
    torch.testing.assert_close(actual[0], expected[0].float())
    assert actual[1].dtype == weight_dtype
    torch.testing.assert_close(
        actual[1], expected[1].to(weight_dtype), rtol=1e-2 if weight_dtype.itemsize == 2 else 1e-5, atol=1e-5
    )


@pytest.mark.parametrize("packed", (False, True), ids=("rows", "packed"))
def test_gradients_through_quantized_weights(packed: bool) -> None:
    t, ids = WeightType.Q4_1, random_ids(6, 2, 4)
    rows, x, grad = experts_rows(4, 20, 64, t), torch.randn(6, 64, requires_grad=True), torch.randn(6, 2, 20)
    if packed:
        y = ops.linear_experts(x, kt.pack(rows, t), ids, "q4_1", packed_shape=(20, 64))
    else:
        y = ops.linear_experts(x, rows, ids, t)
    y.backward(grad)
    weight = oracle_dequantize(rows.flatten(0, 1), t).view(4, 20, 64)
    torch.testing.assert_close(x.grad, torch.einsum("tjn,tjnk->tk", grad, weight[ids]))


@pytest.mark.parametrize("tokens, top_k", ((0, 2), (3, 0)))
def test_gradients_of_empty_dimensions(tokens: int, top_k: int) -> None:
    x, weight = torch.randn(tokens, 8, requires_grad=True), torch.randn(4, 5, 8, requires_grad=True)
    kt.linear_experts(x, weight, torch.zeros(tokens, top_k, dtype=torch.int64)).sum().backward()
    assert torch.equal(x.grad, torch.zeros(tokens, 8)) and torch.equal(weight.grad, torch.zeros(4, 5, 8))


def test_compiled_with_gradients_and_varying_tokens() -> None:
    rows = experts_rows(4, 32, 64, WeightType.Q4_0)
    weight = torch.randn(4, 16, 32)

    def layer(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return ops.linear_experts(torch.relu(ops.linear_experts(x, rows, ids, Q4)), weight, ids).sum(dim=1)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for tokens in (3, 7, 12):
        x, ids = torch.randn(tokens, 64, requires_grad=True), random_ids(tokens, 2, 4)
        expected = layer(x, ids)
        actual = compiled(x, ids)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(
            *(torch.autograd.grad(y.square().sum(), x)[0] for y in (actual, expected)), rtol=1e-4, atol=1e-3
        )


def test_python_function_chooses_by_gradient_and_casts_under_autocast() -> None:
    x, weight, ids = torch.randn(2, 32), torch.randn(3, 4, 32, requires_grad=True), random_ids(2, 2, 3)
    assert ops.linear_experts(x, weight, ids).requires_grad
    with torch.no_grad():
        assert not ops.linear_experts(x, weight, ids).requires_grad
    rows = kt.quantize(weight.detach(), WeightType.Q8_0)
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.linear_experts(x, rows, ids, "q8_0")
    assert y.dtype == torch.bfloat16 and torch.equal(y, kt._linear_experts(x.bfloat16(), rows, ids, 8))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="^input has a tangent"):
            ops.linear_experts(dual, rows, ids, 8)
    with pytest.raises(ValueError, match="weight_type is 'Q9'"):
        ops.linear_experts(x, rows, ids, "Q9")


META = {"device": "meta"}
META_X, META_IDS = torch.empty(2, 64, **META), torch.empty(2, 4, dtype=torch.int64, **META)
META_ROWS = torch.empty(3, 20, 36, dtype=torch.uint8, **META)
REFUSED = {
    "input 4-D": (
        "linear_experts",
        (META_X[None, None], META_ROWS, META_IDS, Q4),
        r"input .* expected \[T, in_features\]",
    ),
    "weight 2-D": ("linear_experts", (META_X, META_ROWS[0], META_IDS, Q4), "weight .* expected 3 dimensions"),
    "another K": ("linear_experts", (META_X[:, :32], META_ROWS, META_IDS, Q4), "weight .* in_features, 64"),
    "ids dtype": ("linear_experts", (META_X, META_ROWS, META_IDS.float(), Q4), "expert_ids has dtype torch.float32"),
    "ids": ("linear_experts", (META_X, META_ROWS, META_IDS[:1], Q4), r"expert_ids has shape \[1, 4\]"),
    "panels": (
        "linear_experts_packed",
        (META_X, META_ROWS, META_IDS, 20, 64, Q4),
        r"weight .* expected \[..., 2, 576\]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernels_refuse_is_refused_while_tracing(name: str) -> None:
    op, args, message = REFUSED[name]
    with pytest.raises(RuntimeError, match=f"kt::{op}: {message}"):
        getattr(kt, op)(*args)
