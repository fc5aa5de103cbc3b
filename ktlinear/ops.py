"""Weight types, their geometry, and what PyTorch needs beside the operators' kernels: fake kernels and gradients.

The operators themselves are C++ (``torch.ops.kt``):

========================================================================== ========================================
``kt::linear(input, weight, bias=None, weight_type=None)``                  [..., K] -> [..., N], with gradients
``kt::linear_packed(input, weight, bias, out_features, in_features, weight_type)``
``kt::linear_experts(input, weight, expert_ids, weight_type=None)``         [T, K] or [T, top_k, K] -> [T, top_k, N]
``kt::linear_experts_packed(input, weight, expert_ids, out_features, in_features, weight_type)``
``kt::_linear``, ``kt::_linear_packed``, ``kt::_linear_experts`` ...        these without gradients, cheaper to call
``kt::_linear_packed_group(input, weights, biases, out_features, in_features, weight_type)``, a list of outputs
``kt::_rms_norm(input, weight, eps, added)``, ``kt::_rotary(query, key, cos, sin)``        fp32, no gradients
``kt::pack(weight, weight_type)``                                           GGUF rows -> panels
``kt::unpack(weight, out_features, in_features, weight_type)``              panels -> GGUF rows
``kt::quantize(weight, weight_type, importance=None)``                      floats -> GGUF rows
``kt::dequantize(weight, weight_type, dtype)``                              GGUF rows -> floats
``kt::embedding(indices, weight, weight_type, dtype)``                      rows of a table -> floats
``kt::embedding_packed(indices, weight, num_embeddings, embedding_dim, weight_type, dtype)``
========================================================================== ========================================

``weight_type`` is the GGML id (a `WeightType` passes as one). Float weights are fp32, fp16 or bf16 [N, K]; quantized
ones uint8 [N, row_bytes], rows of blocks as in a GGUF file; experts' weights, ``pack`` and ``unpack`` have or take one
more dimension in front. A bad argument is a RuntimeError that names it; a bad index
is an IndexError.

``kt::quantize`` takes a float weight [..., K] and gives uint8 [..., row_bytes]: the bytes of the ``gguf`` package where
that can quantize, elsewhere those of a search as good as ggml's. ``importance`` weighs the squared errors: fp32, finite
and not negative, [K] as an importance matrix has it, or of the weight's shape; only ratios matter. Q8_0, TQ1_0, TQ2_0
and float types ignore it. IQ2_XXS, IQ2_XS and IQ1_S are refused without one (`needs_importance`).
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad as _forward_ad

from . import _loader  # noqa: F401  (loads the library that defines torch.ops.kt)

__all__ = [
    "FORMATS",
    "PANEL_ROWS",
    "Format",
    "WeightType",
    "linear",
    "linear_experts",
    "needs_importance",
    "packed_shape",
    "panel_bytes",
    "row_bytes",
    "weight_type",
]

PANEL_ROWS = 16
"""Rows of a packed panel."""


class WeightType(enum.IntEnum):
    """How a weight is stored. The values are the GGML type ids, as in a GGUF file."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40


class Format(NamedTuple):
    """The geometry of a weight type; the same table as csrc/tinyblas/formats.h.

    Attributes:
        block: elements per block; K is a multiple of it.
        block_bytes: bytes per block.
        packed_k: elements of K per packed record of 16 rows; 0 where there is no packed layout.
        packed_bytes: bytes per packed record.
    """

    block: int
    block_bytes: int
    packed_k: int
    packed_bytes: int


FORMATS: dict[WeightType, Format] = {
    WeightType.F32: Format(1, 4, 0, 0),
    WeightType.F16: Format(1, 2, 0, 0),
    WeightType.BF16: Format(1, 2, 0, 0),
    WeightType.Q4_0: Format(32, 18, 64, 576),
    WeightType.Q4_1: Format(32, 20, 64, 640),
    WeightType.Q5_0: Format(32, 22, 64, 704),
    WeightType.Q5_1: Format(32, 24, 64, 768),
    WeightType.Q8_0: Format(32, 34, 64, 1088),
    WeightType.Q2_K: Format(256, 84, 256, 1344),
    WeightType.Q3_K: Format(256, 110, 256, 1856),
    WeightType.Q4_K: Format(256, 144, 256, 2368),
    WeightType.Q5_K: Format(256, 176, 256, 2880),
    WeightType.Q6_K: Format(256, 210, 256, 3392),
    WeightType.IQ4_NL: Format(32, 18, 64, 576),
    WeightType.MXFP4: Format(32, 17, 128, 1088),
    WeightType.NVFP4: Format(64, 36, 64, 576),
    WeightType.IQ4_XS: Format(256, 136, 256, 2176),
    WeightType.TQ1_0: Format(256, 54, 256, 1088),
    WeightType.TQ2_0: Format(256, 66, 256, 1088),
    WeightType.IQ2_XXS: Format(256, 66, 256, 1664),
    WeightType.IQ2_XS: Format(256, 74, 256, 1728),
    WeightType.IQ2_S: Format(256, 82, 256, 1728),
    WeightType.IQ3_XXS: Format(256, 98, 256, 2176),
    WeightType.IQ3_S: Format(256, 110, 256, 2176),
    WeightType.IQ1_S: Format(256, 50, 256, 1152),
    WeightType.IQ1_M: Format(256, 56, 256, 1216),
}
"""The geometry of each weight type."""

# The same as in csrc/tinyblas/formats.h.
_NEED_IMPORTANCE = {WeightType.IQ2_XXS, WeightType.IQ2_XS, WeightType.IQ1_S}

_FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def weight_type(value: WeightType | str | int) -> WeightType:
    """Return the `WeightType` that `value` means: one itself, a name in any case ("q4_0"), or a GGML id.

    Raises:
        ValueError: there is no such type; the message lists those accepted.
    """
    if isinstance(value, str):
        if value.upper() in WeightType.__members__:
            return WeightType[value.upper()]
    elif isinstance(value, int) and not isinstance(value, bool) and value in FORMATS:
        return WeightType(value)
    accepted = ", ".join(f"{t.name} ({t.value})" for t in WeightType)
    raise ValueError(f"weight_type is {value!r}; expected one of {accepted}")


def needs_importance(t: WeightType | str | int) -> bool:
    """Whether ``kt::quantize`` makes rows of `t` only with an importance. ValueError if there is no such type."""
    return weight_type(t) in _NEED_IMPORTANCE


def _geometry(value: WeightType | str | int) -> tuple[WeightType, Format]:
    kind = weight_type(value)
    return kind, FORMATS[kind]


def _packed_geometry(value: WeightType | str | int) -> tuple[WeightType, Format]:
    kind, f = _geometry(value)
    if not f.packed_k:
        accepted = ", ".join(f"{t.name} ({t.value})" for t, f in FORMATS.items() if f.packed_k)
        raise ValueError(f"weight_type is {kind.name}; expected one that has a packed layout: {accepted}")
    return kind, f


def _check_block(kind: WeightType, f: Format, k: int) -> None:
    if k % f.block:
        raise ValueError(f"in_features is {k}; expected a multiple of {f.block} for weight_type {kind.name}")


def row_bytes(t: WeightType | str | int, k: int) -> int:
    """Bytes of one row of `k` elements. ValueError if `k` is not a multiple of the block."""
    kind, f = _geometry(t)
    _check_block(kind, f, k)
    return k // f.block * f.block_bytes


def panel_bytes(t: WeightType | str | int, k: int) -> int:
    """Bytes of one packed panel of 16 rows of `k` elements, K padded to a whole record.

    Raises:
        ValueError: `t` has no packed layout, or `k` is not a multiple of the block.
    """
    kind, f = _packed_geometry(t)
    _check_block(kind, f, k)
    return (k + f.packed_k - 1) // f.packed_k * f.packed_bytes


def packed_shape(t: WeightType | str | int, n: int, k: int) -> tuple[int, int]:
    """The shape of a packed [n, k] weight, uint8 [panels, panel_bytes]. Raises as `panel_bytes` does."""
    return (n + PANEL_ROWS - 1) // PANEL_ROWS, panel_bytes(t, k)


# OpOverloads, since a packet (torch.ops.kt.linear) looks for its overload on every call.
_linear = torch.ops.kt._linear.default
_linear_with_autograd = torch.ops.kt.linear.default
_linear_packed = torch.ops.kt._linear_packed.default
_linear_packed_with_autograd = torch.ops.kt.linear_packed.default
_linear_experts = torch.ops.kt._linear_experts.default
_linear_experts_with_autograd = torch.ops.kt.linear_experts.default
_linear_experts_packed = torch.ops.kt._linear_experts_packed.default
_linear_experts_packed_with_autograd = torch.ops.kt.linear_experts_packed.default
_rms_norm = torch.ops.kt._rms_norm.default
_rotary = torch.ops.kt._rotary.default
_is_autocast_enabled = torch.is_autocast_enabled
_any_autocast = torch._C._is_any_autocast_enabled  # a third of the time, since it parses no device's name
_is_grad_enabled = torch.is_grad_enabled


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, weight_type: WeightType | str | int | None = None
) -> Tensor:
    """y = input @ weight.T + bias, as `torch.nn.functional.linear`, also on quantized rows.

    Args:
        input: [..., K], fp32, fp16 or bf16. Under ``torch.autocast("cpu")`` it is cast to the autocast dtype, as
            F.linear's is; the weight is used as it is stored.
        weight: [N, K] fp32, fp16 or bf16, in any combination with the input; or uint8 [N, row_bytes] of `weight_type`.
        bias: [N], fp32, fp16 or bf16, or None.
        weight_type: the type of the rows of a uint8 weight.

    Returns:
        [..., N] in the (cast) input's dtype. Gradients flow to the input, and to a float weight and bias.

    Raises:
        RuntimeError: an argument's shape, dtype, layout or device does not fit; the message names it.
        ValueError: there is no such `weight_type`.
    """
    # An operator takes a plain int sooner than the enum, by 0.7 us.
    if weight_type is not None and (type(weight_type) is not int or weight_type not in FORMATS):
        weight_type = int(_as_weight_type(weight_type))
    return linear_stored(input, weight, bias, weight_type, None)


_as_weight_type = weight_type  # the argument of `linear` hides the function


def linear_stored(
    input: Tensor, weight: Tensor, bias: Tensor | None, weight_type: int | None, packed_shape: tuple[int, int] | None
) -> Tensor:
    """y = input @ weight.T + bias on a weight as a module stores it, by the cheapest of the operators that will do.

    Args:
        input: [..., K], fp32, fp16 or bf16; under ``torch.autocast("cpu")`` it is cast as F.linear would.
        weight: packed panels (uint8) if `packed_shape` is given, else GGUF rows (uint8) or a float matrix [N, K].
        bias: [N] or None.
        weight_type: the GGML id of quantized bytes, a plain int; None for a float weight.
        packed_shape: (N, K) of a packed weight, None for any other.

    Returns:
        [..., N] in the (cast) input's dtype.

    Raises:
        RuntimeError: a shape, dtype or device does not fit; the message names the argument.
        NotImplementedError: forward-mode differentiation.
    """
    # F.linear's autocast rule casts floating-point CPU tensors except float64.
    if _any_autocast() and _is_autocast_enabled("cpu") and input.dtype in _FLOAT_DTYPES:
        input = input.to(torch.get_autocast_dtype("cpu"))
    # Operators without a formula for it drop a tangent silently.
    if _forward_ad._current_level >= 0:
        _refuse_tangents(input=input, weight=weight, bias=bias)
    # An operator with Python autograd costs 5 us a call more, under no_grad too.
    with_autograd = _is_grad_enabled() and (
        input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    if with_autograd and not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        if packed_shape is None:
            return _linear_function(input, weight, bias, weight_type)
        return _linear_packed_function(input, weight, bias, *packed_shape, weight_type)
    if packed_shape is None:
        return (_linear_with_autograd if with_autograd else _linear)(input, weight, bias, weight_type)
    out_features, in_features = packed_shape
    op = _linear_packed_with_autograd if with_autograd else _linear_packed
    return op(input, weight, bias, out_features, in_features, weight_type)


def linear_experts(
    input: Tensor,
    weight: Tensor,
    expert_ids: Tensor,
    weight_type: WeightType | str | int | None = None,
    packed_shape: tuple[int, int] | None = None,
) -> Tensor:
    """y[t, j] = input[t] @ weight[expert_ids[t, j]].T: each token through the experts chosen for it.

    Tokens are grouped by expert, so that the weights of each expert in use are read once (once per 512 of its tokens).

    Args:
        input: [T, K], or [T, top_k, K] with an input for each choice, fp32, fp16 or bf16. Under
            ``torch.autocast("cpu")`` it is cast to the autocast dtype.
        weight: of E experts: [E, N, K] fp32, fp16 or bf16; uint8 [E, N, row_bytes] of `weight_type`; or, with
            `packed_shape`, uint8 [E, panels, panel_bytes], what ``kt::pack`` makes of the latter. Experts may lie
            apart, and so may rows that are not packed: slices are not copied.
        expert_ids: [T, top_k], int64 or int32, each 0 <= id < E. An expert may be chosen twice.
        weight_type: the type of the rows or panels of a uint8 weight.
        packed_shape: (N, K) of packed experts.

    Returns:
        [T, top_k, N] in the (cast) input's dtype. Gradients flow to the input, and to a float weight.

    Raises:
        IndexError: an id is out of range; nothing has been computed.
        RuntimeError: an argument's shape, dtype, layout or device does not fit; the message names it.
        ValueError: there is no such `weight_type`.
        NotImplementedError: forward-mode differentiation.
    """
    kind = None if weight_type is None else int(_as_weight_type(weight_type))
    if _is_autocast_enabled("cpu") and input.dtype in _FLOAT_DTYPES:
        input = input.to(torch.get_autocast_dtype("cpu"))
    if _forward_ad._current_level >= 0:
        _refuse_tangents(input=input, weight=weight)
    with_autograd = _is_grad_enabled() and (input.requires_grad or weight.requires_grad)
    if packed_shape is None:
        return (_linear_experts_with_autograd if with_autograd else _linear_experts)(input, weight, expert_ids, kind)
    op = _linear_experts_packed_with_autograd if with_autograd else _linear_experts_packed
    return op(input, weight, expert_ids, *packed_shape, kind)


def without_derivatives() -> bool:
    """Whether nothing is differentiated and nothing cast now: an operator that knows of neither may be called."""
    return not (_is_grad_enabled() or _forward_ad._current_level >= 0 or _any_autocast())


def _plain() -> bool:
    """Whether operators that know of no derivative, cast or transform may be called, and nothing is being compiled,
    for which PyTorch's own operators are better: they are fused."""
    return (
        without_derivatives()
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._get_tracing_state()
    )


def rms_norm(input: Tensor, weight: Tensor, eps: float, one_added: bool = False) -> Tensor:
    """``torch.rms_norm(input, weight.shape, weight, eps)``, in one pass where it can be: fp32, without gradients.

    Args:
        input: [..., K].
        weight: [K]; with `one_added`, 1 + weight is meant, as Gemma's models keep it.
        eps: added to the mean of the squares.

    Returns:
        [..., K], input / sqrt(mean(input^2) + eps) * weight.
    """
    if input.dtype is weight.dtype is torch.float32 and input.is_cpu and _plain():
        return _rms_norm(input, weight, eps, 1.0 if one_added else 0.0)
    return torch.rms_norm(input, weight.shape, 1.0 + weight if one_added else weight, eps)


def rotary(apply: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """``apply(query, key, cos, sin)``, where `apply` is a model's function for rotary embeddings.

    If it is the usual one (x * cos + rotate_half(x) * sin, found out by trying it once), for fp32 and without
    gradients, it is computed in one operator call with the same bits.

    Args:
        query, key: [batch, heads, tokens, head_dim].
        cos, sin: [1 or batch, tokens, head_dim].
    """
    if (
        query.dtype is key.dtype is cos.dtype is sin.dtype is torch.float32
        and query.is_cpu
        and _plain()
        and cos.shape[-1] == query.shape[-1]
        and _is_usual_rotary(apply)
    ):
        return _rotary(query, key, cos, sin)
    return apply(query, key, cos, sin)


@functools.lru_cache(maxsize=64)
def _is_usual_rotary(apply: Any) -> bool:
    generator = torch.Generator().manual_seed(0)  # the global one stays as it is
    shapes = ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 8), (2, 5, 8))
    query, key, cos, sin = (torch.randn(shape, generator=generator) for shape in shapes)
    try:
        results = apply(query, key, cos, sin)
    except Exception:
        return False
    expected = _rotary(query, key, cos, sin)
    return len(results) == 2 and all(
        torch.equal(result, other) for result, other in zip(results, expected, strict=True)
    )


def _refuse_tangents(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and _forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                f"{name} has a tangent; expected none, since the operators have no forward-mode derivative "
                "(torch.autograd.functional.jvp and jacobian do without)"
            )


# Fake kernels: shapes and dtypes only. Sizes may be symbolic, so they are compared only with torch._check.


def _check(condition: Any, message: str) -> None:
    torch._check(condition, lambda: message)


def _check_devices(op: str, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None:
            devices = {t.device for t in tensors.values() if t is not None}
            _check(len(devices) == 1, f"kt::{op}: the tensors are on several devices ({name} on {tensor.device})")


def _in_features(weight: Tensor, weight_type: int | None) -> int:
    """K of a weight's rows."""
    if weight.dtype != torch.uint8:
        return weight.shape[-1]
    if weight_type is None:
        raise RuntimeError("kt::linear: weight is uint8 and weight_type is None; expected the type of its GGUF rows")
    t, f = _geometry(weight_type)
    _check(
        weight.shape[-1] % f.block_bytes == 0,
        f"kt: weight has shape {list(weight.shape)}; a row of {t.name} takes a multiple of {f.block_bytes} bytes",
    )
    return weight.shape[-1] // f.block_bytes * f.block


def _check_input(op: str, input: Tensor, weight: Tensor, in_features: Any) -> None:
    accepted = "expected float32, float16 or bfloat16"
    _check(input.dtype in _FLOAT_DTYPES, f"kt::{op}: input has dtype {input.dtype}; {accepted}")
    _check(
        input.shape[-1] == in_features,
        f"kt::{op}: weight has shape {list(weight.shape)} and input {list(input.shape)}; "
        f"its last dimension is to be in_features, {in_features}",
    )


def _check_linear_arguments(
    op: str, input: Tensor, weight: Tensor, in_features: Any, bias: Tensor | None, out_features: Any
) -> None:
    _check(input.dim() >= 1, f"kt::{op}: input has no dimensions; expected [..., in_features]")
    _check_input(op, input, weight, in_features)
    if bias is not None:
        accepted = "expected float32, float16 or bfloat16"
        _check(bias.dtype in _FLOAT_DTYPES, f"kt::{op}: bias has dtype {bias.dtype}; {accepted}")
        _check(bias.dim() == 1, f"kt::{op}: bias has shape {list(bias.shape)}; expected one dimension")
        _check(
            bias.shape[0] == out_features,
            f"kt::{op}: bias has shape {list(bias.shape)}; expected [{out_features}]",
        )


def _check_experts_arguments(op: str, input: Tensor, weight: Tensor, in_features: Any, expert_ids: Tensor) -> None:
    _check(
        input.dim() in (2, 3),
        f"kt::{op}: input has shape {list(input.shape)}; expected [T, in_features] or [T, top_k, in_features]",
    )
    _check_input(op, input, weight, in_features)
    _check(
        expert_ids.dtype in (torch.int64, torch.int32),
        f"kt::{op}: expert_ids has dtype {expert_ids.dtype}; expected int64 or int32",
    )
    message = f"kt::{op}: expert_ids has shape {list(expert_ids.shape)}, input {list(input.shape)}; expected [T, top_k]"
    _check(expert_ids.dim() == 2, message)
    for dim in range(input.dim() - 1):
        _check(expert_ids.shape[dim] == input.shape[dim], message)


def _check_weight(op: str, weight: Tensor, dims: int, weight_type: int | None) -> Any:
    """Return in_features of plain rows or floats, of `dims` dimensions."""
    shape = "[N, K]" if dims == 2 else "[E, N, K]"
    _check(
        weight.dim() == dims, f"kt::{op}: weight has shape {list(weight.shape)}; expected {dims} dimensions, {shape}"
    )
    _check(
        weight.dtype == torch.uint8 or weight.dtype in _FLOAT_DTYPES,
        f"kt::{op}: weight has dtype {weight.dtype}; expected float32, float16, bfloat16, or uint8 with weight_type",
    )
    return _in_features(weight, weight_type)


def _check_panels(op: str, weight: Tensor, dims: int, out_features: int, in_features: int, weight_type: int) -> None:
    t, f = _packed_geometry(weight_type)
    _check(in_features % f.block == 0, f"kt::{op}: in_features is {in_features}; {t.name} has {f.block} a block")
    _check(weight.dtype == torch.uint8, f"kt::{op}: weight has dtype {weight.dtype}; expected uint8 panels")
    _check(weight.dim() == dims, f"kt::{op}: weight has shape {list(weight.shape)}; expected {dims} dimensions")
    panels, bytes_each = packed_shape(t, out_features, in_features)
    _check(
        weight.shape[-2] == panels and weight.shape[-1] == bytes_each,
        f"kt::{op}: weight has shape {list(weight.shape)}; expected [{'..., ' * (dims - 2)}{panels}, {bytes_each}]",
    )


def _fake_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, weight_type: int | None = None) -> Tensor:
    _check_devices("linear", input=input, weight=weight, bias=bias)
    in_features = _check_weight("linear", weight, 2, weight_type)
    _check_linear_arguments("linear", input, weight, in_features, bias, weight.shape[0])
    return input.new_empty([*input.shape[:-1], weight.shape[0]])


def _fake_linear_packed(
    input: Tensor, weight: Tensor, bias: Tensor | None, out_features: int, in_features: int, weight_type: int
) -> Tensor:
    _check_devices("linear_packed", input=input, weight=weight, bias=bias)
    _check_panels("linear_packed", weight, 2, out_features, in_features, weight_type)
    _check_linear_arguments("linear_packed", input, weight, in_features, bias, out_features)
    return input.new_empty([*input.shape[:-1], out_features])


def _fake_linear_experts(input: Tensor, weight: Tensor, expert_ids: Tensor, weight_type: int | None = None) -> Tensor:
    _check_devices("linear_experts", input=input, weight=weight, expert_ids=expert_ids)
    in_features = _check_weight("linear_experts", weight, 3, weight_type)
    _check_experts_arguments("linear_experts", input, weight, in_features, expert_ids)
    return input.new_empty([*expert_ids.shape, weight.shape[1]])


def _fake_linear_experts_packed(
    input: Tensor, weight: Tensor, expert_ids: Tensor, out_features: int, in_features: int, weight_type: int
) -> Tensor:
    _check_devices("linear_experts_packed", input=input, weight=weight, expert_ids=expert_ids)
    _check_panels("linear_experts_packed", weight, 3, out_features, in_features, weight_type)
    _check_experts_arguments("linear_experts_packed", input, weight, in_features, expert_ids)
    return input.new_empty([*expert_ids.shape, out_features])


def _register_fakes() -> None:
    fake = torch.library.register_fake
    for prefix in ("", "_"):
        fake(f"kt::{prefix}linear")(_fake_linear)
        fake(f"kt::{prefix}linear_packed")(_fake_linear_packed)
        fake(f"kt::{prefix}linear_experts")(_fake_linear_experts)
        fake(f"kt::{prefix}linear_experts_packed")(_fake_linear_experts_packed)

    @fake("kt::_linear_packed_group")
    def _(
        input: Tensor,
        weights: list[Tensor],
        biases: list[Tensor],
        out_features: list[int],
        in_features: int,
        weight_type: int,
    ) -> list[Tensor]:
        _check(
            len(out_features) == len(weights), "kt::linear_packed_group: expected one of out_features for each weight"
        )
        _check(len(biases) in (0, len(weights)), "kt::linear_packed_group: expected no biases or one for each weight")
        return [
            _fake_linear_packed(input, weight, bias, n, in_features, weight_type)
            for weight, bias, n in itertools.zip_longest(weights, biases, out_features)
        ]

    @fake("kt::_rms_norm")
    def _(input: Tensor, weight: Tensor, eps: float, added: float) -> Tensor:
        return input.new_empty(input.shape)

    @fake("kt::_rotary")
    def _(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return query.new_empty(query.shape), key.new_empty(key.shape)

    @fake("kt::pack")
    def _(weight: Tensor, weight_type: int) -> Tensor:
        _, f = _packed_geometry(weight_type)
        records = (_in_features(weight, weight_type) + f.packed_k - 1) // f.packed_k
        panels = (weight.shape[-2] + PANEL_ROWS - 1) // PANEL_ROWS
        return weight.new_empty([*weight.shape[:-2], panels, records * f.packed_bytes])

    @fake("kt::_pack_out")
    def _(out: Tensor, weight: Tensor, weight_type: int) -> None:
        return None

    @fake("kt::unpack")
    def _(weight: Tensor, out_features: int, in_features: int, weight_type: int) -> Tensor:
        f = FORMATS[_as_weight_type(weight_type)]
        return weight.new_empty([*weight.shape[:-2], out_features, in_features // f.block * f.block_bytes])

    @fake("kt::quantize")
    def _(weight: Tensor, weight_type: int, importance: Tensor | None = None) -> Tensor:
        f = FORMATS[_as_weight_type(weight_type)]
        _check(weight.shape[-1] % f.block == 0, f"kt::quantize: in_features has to be a multiple of {f.block}")
        if importance is None:
            _check(not needs_importance(weight_type), f"kt::quantize: importance is None; {weight_type} needs one")
        else:
            _check(importance.dtype == torch.float32, f"kt::quantize: importance has dtype {importance.dtype}")
            of_weight = importance.shape == weight.shape or importance.shape == weight.shape[-1:]
            _check(of_weight, f"kt::quantize: importance has shape {tuple(importance.shape)}; expected [in_features]")
        size = [*weight.shape[:-1], weight.shape[-1] // f.block * f.block_bytes]
        return weight.new_empty(size, dtype=torch.uint8)

    @fake("kt::dequantize")
    def _(weight: Tensor, weight_type: int, dtype: torch.dtype) -> Tensor:
        return weight.new_empty([*weight.shape[:-1], _in_features(weight, weight_type)], dtype=dtype)

    @fake("kt::embedding")
    def _(indices: Tensor, weight: Tensor, weight_type: int, dtype: torch.dtype) -> Tensor:
        return weight.new_empty([*indices.shape, _in_features(weight, weight_type)], dtype=dtype)

    @fake("kt::embedding_packed")
    def _(
        indices: Tensor, weight: Tensor, num_embeddings: int, embedding_dim: int, weight_type: int, dtype: torch.dtype
    ) -> Tensor:
        return weight.new_empty([*indices.shape, embedding_dim], dtype=dtype)


# Gradients of y = x @ W.T + b: dx = dy @ W, dW = dy.T @ x, db = the sum of dy over all leading dimensions.


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, bias, *rest = inputs
    needs_input, needs_weight, *needs_bias = ctx.needs_input_grad  # ends where the caller's arguments do
    ctx.save_for_backward(input if needs_weight else None, weight if needs_input else None)
    ctx.input_dtype, ctx.weight_dtype = input.dtype, weight.dtype
    ctx.bias_dtype = bias.dtype if any(needs_bias) else None
    ctx.rest = rest


def _float_weight(weight: Tensor, weight_type: int | None, dtype: torch.dtype) -> Tensor:
    if weight.dtype != torch.uint8 or weight_type is None:
        return weight.to(dtype)
    return torch.ops.kt.dequantize(weight, weight_type, dtype)


def _matrix(tensor: Tensor) -> Tensor:
    """[..., K] as [M, K]. Not reshape(-1, K), which cannot tell M where K is 0."""
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.unsqueeze(0)


def _gradients(
    ctx: Any, grad: Tensor, input: Tensor | None, weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    grad_input = grad_weight = grad_bias = None
    if weight is not None:
        grad_input = torch.matmul(grad, weight)
    if input is not None:
        dtype = torch.promote_types(grad.dtype, ctx.weight_dtype)
        grad_weight = torch.mm(_matrix(grad).to(dtype).t(), _matrix(input).to(dtype)).to(ctx.weight_dtype)
    if ctx.bias_dtype is not None:
        grad_bias = grad.sum(dim=tuple(range(grad.dim() - 1)), dtype=torch.float32) if grad.dim() > 1 else grad
        grad_bias = grad_bias.to(ctx.bias_dtype)
    return grad_input, grad_weight, grad_bias


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (weight_type,) = ctx.rest
    input, weight = ctx.saved_tensors  # once: gradient checkpointing gives them out no second time
    floats = None if weight is None else _float_weight(weight, weight_type, grad.dtype)
    return (*_gradients(ctx, grad, input, floats), None)


def _linear_packed_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    out_features, in_features, weight_type = ctx.rest
    input, weight = ctx.saved_tensors
    floats = None
    if weight is not None:
        rows = torch.ops.kt.unpack(weight, out_features, in_features, weight_type)
        floats = _float_weight(rows, weight_type, grad.dtype)
    return (*_gradients(ctx, grad, input, floats), None, None, None)


def _function(operator: Any, gradients: Any) -> Any:
    """The operator as a function that torch.func.grad and vjp take: register_autograd makes none that they do."""

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            return operator(*args)

        setup_context = staticmethod(_save_for_backward)
        backward = staticmethod(gradients)

    return Linear.apply


_linear_function = _function(_linear, _linear_backward)
_linear_packed_function = _function(_linear_packed, _linear_packed_backward)


# Of experts: the gradient of each choice [T, top_k, K], then the sum over a token's choices if they had one input; and
# dW of each expert from its tokens. Which tokens these are depends on the values of expert_ids, hence operators.


def _choices_of(expert_ids: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Each expert in use with the indices of its choices, counted over [T, top_k]."""
    flat = expert_ids.flatten()
    for expert in flat.unique().tolist():
        yield expert, (flat == expert).nonzero().squeeze(1)


@torch.library.custom_op("kt::_experts_input_gradient", mutates_args=())
def _experts_input_gradient(
    grad: Tensor,
    weight: Tensor,
    expert_ids: Tensor,
    in_features: int,
    weight_type: int | None,
    packed: bool,
) -> Tensor:
    result = grad.new_empty([*expert_ids.shape, in_features])
    rows, out_features = result.flatten(0, 1), grad.shape[-1]
    for expert, indices in _choices_of(expert_ids):
        matrix = weight[expert]
        if packed:
            matrix = torch.ops.kt.unpack(matrix, out_features, in_features, weight_type)
        rows[indices] = grad.flatten(0, 1)[indices] @ _float_weight(matrix, weight_type, grad.dtype)
    return result


@_experts_input_gradient.register_fake
def _(
    grad: Tensor, weight: Tensor, expert_ids: Tensor, in_features: int, weight_type: int | None, packed: bool
) -> Tensor:
    return grad.new_empty([*expert_ids.shape, in_features])


@torch.library.custom_op("kt::_experts_weight_gradient", mutates_args=())
def _experts_weight_gradient(
    grad: Tensor, input: Tensor, expert_ids: Tensor, experts: int, dtype: torch.dtype
) -> Tensor:
    result = grad.new_zeros([experts, grad.shape[-1], input.shape[-1]], dtype=dtype)
    for expert, indices in _choices_of(expert_ids):
        x = input.flatten(0, 1)[indices] if input.dim() == 3 else input[indices // expert_ids.shape[1]]
        wide = torch.promote_types(grad.dtype, dtype)
        result[expert] = torch.mm(grad.flatten(0, 1)[indices].to(wide).t(), x.to(wide)).to(dtype)
    return result


@_experts_weight_gradient.register_fake
def _(grad: Tensor, input: Tensor, expert_ids: Tensor, experts: int, dtype: torch.dtype) -> Tensor:
    return grad.new_empty([experts, grad.shape[-1], input.shape[-1]], dtype=dtype)


def _save_experts_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, expert_ids, *rest = inputs
    needs_input, needs_weight, *_ = ctx.needs_input_grad
    ctx.save_for_backward(input if needs_weight else None, weight if needs_input else None, expert_ids)
    ctx.input_shape, ctx.experts, ctx.weight_dtype = input.shape, weight.shape[0], weight.dtype
    ctx.rest = rest  # weight_type, or out_features, in_features, weight_type of packed ones


def _linear_experts_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    input, weight, expert_ids = ctx.saved_tensors
    grad_input = grad_weight = None
    if weight is not None:
        in_features, packed = ctx.input_shape[-1], len(ctx.rest) > 1
        weight_type = ctx.rest[-1] if ctx.rest else None
        grad_input = _experts_input_gradient(grad, weight, expert_ids, in_features, weight_type, packed)
        if len(ctx.input_shape) == 2:
            grad_input = grad_input.sum(dim=1)
    if input is not None:
        grad_weight = _experts_weight_gradient(grad, input, expert_ids, ctx.experts, ctx.weight_dtype)
    return (grad_input, grad_weight, None, *(None for _ in ctx.rest))


_register_fakes()
for _name, _setup, _backward in (
    ("linear", _save_for_backward, _linear_backward),
    ("linear_packed", _save_for_backward, _linear_packed_backward),
    ("linear_experts", _save_experts_for_backward, _linear_experts_backward),
    ("linear_experts_packed", _save_experts_for_backward, _linear_experts_backward),
):
    torch.library.register_autograd(f"kt::{_name}", _backward, setup_context=_setup)
