"""The read-only logical view of a quantized weight: shape [out_features, in_features], a floating-point dtype, and the
quantized bytes underneath.

Code that reads ``linear.weight`` expects a float matrix: its shape, its dtype, ``F.linear(x, linear.weight)``.
`LogicalWeight` answers all of that from the one copy of the bytes. What it cannot do on those bytes it does on a
dequantized copy, unless the result would be taken for the weight itself: writing to it, or to a view of it, raises
instead of changing a copy that nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

from .ops import PANEL_ROWS, WeightType, linear_stored

aten = torch.ops.aten
kt = torch.ops.kt

LOGICAL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class LogicalWeight(torch.Tensor):
    """A read-only float matrix [N, K] over quantized bytes. `transposed` makes it the [K, N] transpose.

    Args:
        qweight: uint8, packed panels [ceil(N/16), panel_bytes] or GGUF rows [N, row_bytes].
        weight_type: the quantized type of the bytes.
        packed: whether `qweight` holds packed panels.
        out_features, in_features: N and K.
        dtype: the dtype it presents, and that `dequantize` returns: fp32, fp16 or bf16.
    """

    qweight: torch.Tensor
    weight_type: WeightType
    packed: bool
    out_features: int
    in_features: int
    transposed: bool

    @staticmethod
    def __new__(
        cls,
        qweight: torch.Tensor,
        weight_type: WeightType,
        packed: bool,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        transposed: bool = False,
    ) -> LogicalWeight:
        shape = (in_features, out_features) if transposed else (out_features, in_features)
        strides = (1, in_features) if transposed else (in_features, 1)
        self = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=dtype, device=qweight.device, requires_grad=False
        )
        # The bytes, not the module's Parameter: compiled code treats the two as different graph inputs.
        self.qweight = qweight.detach()
        self.weight_type = weight_type
        self.packed = packed
        self.out_features = out_features
        self.in_features = in_features
        self.transposed = transposed
        return self

    def _like(self, qweight: torch.Tensor | None = None, **changes: Any) -> LogicalWeight:
        fields: dict[str, Any] = {
            "weight_type": self.weight_type,
            "packed": self.packed,
            "out_features": self.out_features,
            "in_features": self.in_features,
            "dtype": self.dtype,
            "transposed": self.transposed,
        }
        return LogicalWeight(self.qweight if qweight is None else qweight, **(fields | changes))

    def rows(self) -> torch.Tensor:
        """The bytes as plain GGUF rows, uint8 [N, row_bytes]: a copy if packed, else the bytes themselves."""
        if not self.packed:
            return self.qweight
        return kt.unpack(self.qweight, self.out_features, self.in_features, int(self.weight_type))

    def dequantize(self) -> torch.Tensor:
        """An ordinary tensor with the logical shape and dtype: a new copy of the values, free to be changed."""
        values = kt.dequantize(self.rows(), int(self.weight_type), self.dtype)
        return values.t() if self.transposed else values

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        layout = "packed" if self.packed else "rows"
        return (
            f"LogicalWeight(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"{self.weight_type.name}, {layout})"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A pickled view would be a second copy of the module's weight, detached from it.
        raise TypeError(
            f"the weight of a quantized module is a view and is not pickled; save the module's state_dict, or {_ADVICE}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> LogicalWeight:
        return _clone(self)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["qweight"], (
            self.weight_type,
            self.packed,
            self.out_features,
            self.in_features,
            self.dtype,
            self.transposed,
        )

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> LogicalWeight:
        return LogicalWeight(inner["qweight"], *context)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            result = _functional_linear(*args, **kwargs)
            if result is not NotImplemented:
                return result
        elif func == torch.Tensor.dequantize:
            return args[0].dequantize()
        elif func == torch.Tensor.share_memory_:
            args[0].qweight.share_memory_()
            return args[0]
        elif func in _MEMORY:
            raise TypeError(f"{func.__name__}: the weight of a quantized module has no float memory; {_ADVICE}")
        elif func == _SET_DATA:
            _read_only("weight.data = ...")
        elif func in _REQUIRES_GRAD and (*args[1:], *kwargs.values(), True)[0]:
            _read_only("requires_grad = True")
        # Not super()'s version: it would make a LogicalWeight of an ordinary result.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        _refuse_writes_and_views(func, args, kwargs)
        args, kwargs = tree_map_only(LogicalWeight, LogicalWeight.dequantize, (args, kwargs))
        return func(*args, **kwargs)


_ADVICE = "take a copy of the values with `weight.dequantize()`"
_MEMORY = {
    torch.Tensor.__dlpack__,
    torch.Tensor.data_ptr,
    torch.Tensor.numpy,
    torch.Tensor.storage,
    torch.Tensor.untyped_storage,
}
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_REQUIRES_GRAD = {torch.Tensor.requires_grad.__set__, torch.Tensor.requires_grad_}  # type: ignore[attr-defined]


def _read_only(what: str) -> None:
    raise TypeError(
        f"{what}: the weight of a quantized module is a read-only view of its bytes, so this would change nothing; "
        f"{_ADVICE}, or put new values into the module with `ktlinear.nn.Linear.from_linear`"
    )


def _refusal(name: str) -> Callable[[LogicalWeight, Any], None]:
    return lambda self, other: _read_only(name)


# torch.Tensor's own turn a TypeError into NotImplemented, and Python would then take `w += x` for `w = w + x`.
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    setattr(LogicalWeight, f"__i{_name}__", _refusal(f"__i{_name}__"))


def _refuse_writes_and_views(func: Any, args: Any, kwargs: Any) -> None:
    schema = func._schema
    for index, argument in enumerate(schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        values = value if isinstance(value, (list, tuple)) else (value,)
        if argument.alias_info is None or not any(isinstance(v, LogicalWeight) for v in values):
            continue
        if argument.alias_info.is_write:
            _read_only(schema.name)
        # A view of a dequantized copy would look writable and change nothing.
        raise TypeError(f"{schema.name}: the weight of a quantized module has no such view; {_ADVICE}")


def _functional_linear(input: Any, weight: Any, bias: Any = None) -> Any:
    if not isinstance(weight, LogicalWeight) or weight.transposed or isinstance(input, LogicalWeight):
        return NotImplemented
    if isinstance(bias, LogicalWeight):
        return NotImplemented
    shape = (weight.out_features, weight.in_features) if weight.packed else None
    return linear_stored(input, weight.qweight, bias, int(weight.weight_type), shape)


def _mm(input: Any, weight: Any) -> Any:
    if not isinstance(weight, LogicalWeight) or not weight.transposed:
        return NotImplemented
    return _functional_linear(input, weight._like(transposed=False))


def _addmm(bias: Any, input: Any, weight: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if bias.dim() != 1 or bias.shape[0] != weight.shape[1] or beta != 1 or alpha != 1:
        return NotImplemented
    if not isinstance(weight, LogicalWeight) or not weight.transposed:
        return NotImplemented
    return _functional_linear(input, weight._like(transposed=False), bias)


def _same(weight: LogicalWeight) -> LogicalWeight:
    return weight._like()


def _clone(weight: LogicalWeight, *, memory_format: Any = None) -> LogicalWeight:
    return weight._like(weight.qweight.clone())


def _to_copy(
    weight: LogicalWeight,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **kwargs: Any,
) -> Any:
    if dtype is not None and dtype not in LOGICAL_DTYPES:
        return NotImplemented
    qweight = weight.qweight if device is None else weight.qweight.to(device, non_blocking=non_blocking)
    return weight._like(qweight, dtype=dtype or weight.dtype)


def _t(weight: LogicalWeight) -> LogicalWeight:
    return weight._like(transposed=not weight.transposed)


def _transpose(weight: LogicalWeight, dim0: int, dim1: int) -> Any:
    if not (-2 <= dim0 < 2 and -2 <= dim1 < 2):
        return NotImplemented
    return weight._like() if dim0 % 2 == dim1 % 2 else _t(weight)


def _permute(weight: LogicalWeight, dims: list[int]) -> Any:
    return _transpose(weight, 0, dims[0]) if sorted(d % 2 for d in dims) == [0, 1] else NotImplemented


def _slice(weight: LogicalWeight, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    if dim % 2 != int(weight.transposed) or step != 1:
        return NotImplemented
    first, last, _ = slice(start, end).indices(weight.out_features)
    last = max(first, last)
    whole_panels = first % PANEL_ROWS == 0 and (last % PANEL_ROWS == 0 or last == weight.out_features)
    if weight.packed and whole_panels:
        panels = weight.qweight[first // PANEL_ROWS : -(-last // PANEL_ROWS)]
        return weight._like(panels, out_features=last - first)
    return weight._like(weight.rows()[first:last], packed=False, out_features=last - first)


def _embedding(weight: Any, indices: Any, padding_idx: int = -1, *args: Any, **kwargs: Any) -> Any:
    if weight.transposed:
        return NotImplemented
    shape = weight.out_features, weight.in_features
    return embedding(indices, weight.qweight, int(weight.weight_type), weight.packed, *shape, weight.dtype)


def embedding(
    indices: torch.Tensor,
    qweight: torch.Tensor,
    weight_type: int,
    packed: bool,
    num_embeddings: int,
    embedding_dim: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Rows `indices` [...] of a quantized table, dequantized to `dtype`: [..., embedding_dim]."""
    if packed:
        return kt.embedding_packed(indices, qweight, num_embeddings, embedding_dim, weight_type, dtype)
    return kt.embedding(indices, qweight, weight_type, dtype)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.linear.default: _functional_linear,
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.t.default: _t,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.slice.Tensor: _slice,
    aten.embedding.default: _embedding,
}
