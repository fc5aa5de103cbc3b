"""Modules that hold a quantized (GGUF) or half-precision weight and compute with it as it is.

`Linear` is an ``nn.Linear`` and `Embedding` an ``nn.Embedding``: the same attributes, the same call. A quantized one
holds its bytes once, in the uint8 parameter `qweight`; `weight` is a read-only logical view of the same bytes. In
memory the bytes are packed for speed unless ``packed=False``; every state dict holds plain GGUF rows, whatever the
layout in memory, so files depend on no CPU.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _module
from torch.utils.weak import WeakTensorKeyDictionary

from . import _logical, _memory
from ._logical import LOGICAL_DTYPES, LogicalWeight
from .ops import FORMATS, WeightType, linear_experts, linear_stored, packed_shape, row_bytes, without_derivatives
from .ops import weight_type as to_weight_type

__all__ = ["Embedding", "Experts", "ExpertsLinear", "Linear", "linear_group"]

kt = torch.ops.kt

_Module = nn.Module
_module_call = nn.Module.__call__
_tracing_state = torch._C._get_tracing_state
_NOT_GIVEN = object()
_linear_packed_group = kt._linear_packed_group.default

FORMAT_VERSION = 1
"""Of what state dicts and pickles hold: the rows' layout and, in pickles, the panels'."""

FLOAT_DTYPES = {WeightType.F32: torch.float32, WeightType.F16: torch.float16, WeightType.BF16: torch.bfloat16}
FLOAT_TYPES = {dtype: weight_type for weight_type, dtype in FLOAT_DTYPES.items()}


class _QuantizedWeight(nn.Module):
    """The weight of a module as one matrix [N, K] in a `WeightType`, mixed into an nn.Module with a `weight`.

    Quantized types hold `qweight` and present `weight` as a `LogicalWeight`; float types hold an ordinary parameter
    `weight`. `_dtype` is the logical dtype: that of the module this one stands for.
    """

    packed: bool
    _type: int | None  # the GGML id; None: a float weight. An IntEnum would cost an operator 1 us per call.
    _dtype: torch.dtype
    _leading: tuple[int, ...] = ()  # dimensions in front of the matrix: a stack of them

    def _matrix_shape(self) -> tuple[int, int]:
        raise NotImplementedError

    def _set_matrix(self, weight: torch.Tensor, weight_type: WeightType, packed: bool, requires_grad: bool) -> None:
        """Take `weight` as it is: the bytes in the layout that `packed` says, or a float matrix."""
        quantized = weight_type not in FLOAT_DTYPES
        self._type = int(weight_type) if quantized else None
        self.packed = packed and quantized
        self._weight_requires_grad = requires_grad
        name = "qweight" if quantized else "weight"
        # Not setattr: `weight` is a property of this class, and register_parameter would take it for a clash.
        self._parameters[name] = nn.Parameter(weight, requires_grad=requires_grad and not quantized)

    def _stored(self) -> nn.Parameter:
        """The parameter that holds the weight: `qweight`, or `weight` of a float type."""
        stored = self._parameters["weight" if self._type is None else "qweight"]
        assert stored is not None
        return stored

    @property
    def weight_type(self) -> WeightType:
        """The type of the stored weight."""
        return FLOAT_TYPES[self._stored().dtype] if self._type is None else WeightType(self._type)

    @property
    def weight(self) -> torch.Tensor:
        """[N, K]: the parameter of a float type, a read-only view of the bytes (`LogicalWeight`) of any other."""
        if self._type is None:
            return self._stored()
        return LogicalWeight(self._stored(), WeightType(self._type), self.packed, *self._matrix_shape(), self._dtype)

    def _share_matrix(self, other: _QuantizedWeight) -> None:
        """Hold the same Parameter as `other`."""
        for name in ("weight", "qweight"):
            self._parameters.pop(name, None)
        self._type = other._type
        self.packed = other.packed
        self._weight_requires_grad = other._weight_requires_grad
        self._parameters["weight" if other._type is None else "qweight"] = other._stored()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name == "weight" and self._type is not None:
            raise TypeError(
                f"weight: the weight of a {self.weight_type.name} {type(self).__name__} cannot be assigned; "
                "use load_state_dict, or make a new module with from_linear or from_rows"
            )
        super().register_parameter(name, param)

    def _rows(self) -> torch.Tensor:
        """The bytes as plain GGUF rows, uint8 [N, row_bytes]. Modules that share `qweight` get one tensor."""
        qweight = self._stored()
        if not self.packed:
            return qweight.detach()
        if qweight.is_meta or qweight.is_inference():
            return kt.unpack(qweight.detach(), *self._matrix_shape(), self._type)
        # safetensors and torch.save write a tied weight once only if both keys of the state dict share a storage.
        state = (qweight.data_ptr(), qweight._version)
        cached = _unpacked.get(qweight)
        if cached is not None and cached[0] == state:
            rows = cached[1]()
            if rows is not None and rows._version == cached[2]:
                return rows
        rows = kt.unpack(qweight.detach(), *self._matrix_shape(), self._type)
        _unpacked[qweight] = (state, weakref.ref(rows), rows._version)
        return rows

    def get_extra_state(self) -> torch.Tensor:
        """What the bytes of a state dict are: uint8 [2], the version of the format and the GGML id of the type.

        Rows of several types have the same size (Q4_0, IQ4_NL and Q4_K among them), so a state dict has to say it. A
        tensor, since safetensors files hold nothing else.
        """
        return torch.tensor([FORMAT_VERSION, self.weight_type], dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Check that the rows which come with this `get_extra_state` are of this module's type.

        Raises:
            ValueError: they are not, or of a version that is not known here.
        """
        if isinstance(state, torch.Tensor) and state.is_meta:
            return
        values = state.tolist() if isinstance(state, torch.Tensor) else state
        if not isinstance(values, list) or len(values) != 2 or values[0] != FORMAT_VERSION:
            raise ValueError(
                f"_extra_state is {values!r}; expected [{FORMAT_VERSION}, {int(self.weight_type)}]: the version of the "
                "format that this ktlinear reads, and the weight's type"
            )
        if values[1] != self.weight_type:
            given = WeightType(values[1]).name if values[1] in FORMATS else f"of the unknown type {values[1]}"
            raise ValueError(
                f"the weight is {given}, and the module's {self.weight_type.name}; load it into a module of the same "
                "type (weight_type=), or quantize the float weights"
            )

    def __getstate__(self) -> dict[str, Any]:
        # A pickle holds the packed layout as it is in memory.
        return super().__getstate__() | {"_format_version": FORMAT_VERSION}

    def __setstate__(self, state: dict[str, Any]) -> None:
        version = state.pop("_format_version", None)
        if version != FORMAT_VERSION:
            raise ValueError(
                f"pickle: a {type(self).__name__} of the format version {version}, and this ktlinear reads "
                f"{FORMAT_VERSION}; save the state_dict with the ktlinear that made it, which later ones can load"
            )
        super().__setstate__(state)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._type is None:
            del destination[prefix + "_extra_state"]
        elif self.packed:
            destination[prefix + "qweight"] = self._rows()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        state_dict = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        extra_state = prefix + "_extra_state"
        described = state_dict.pop(extra_state, None)
        key = prefix + ("weight" if self._type is None else "qweight")
        try:
            if described is not None:
                self._check_description(key, described)
            if self._type is not None:
                if key in state_dict:
                    rows = self._checked_rows(key, state_dict[key])
                elif prefix + "weight" in state_dict:
                    rows = self._quantized_rows(prefix + "weight", state_dict.pop(prefix + "weight"))
                else:
                    rows = None
                if rows is not None:
                    state_dict[key] = self._load_rows(key, rows, local_metadata)
        except (ValueError, TypeError) as error:
            error_msgs.append(str(error))
            state_dict[key] = self._stored()
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        # Rows that come from elsewhere, and float weights, have no description.
        if extra_state in missing_keys:
            missing_keys.remove(extra_state)

    def _check_description(self, key: str, described: Any) -> None:
        try:
            self.set_extra_state(described)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None

    def _checked_rows(self, key: str, rows: torch.Tensor) -> torch.Tensor:
        n, k = self._matrix_shape()
        shape = (*self._leading, n, row_bytes(self.weight_type, k))
        if rows.dtype != torch.uint8 or tuple(rows.shape) != shape:
            raise ValueError(
                f"{key}: got {rows.dtype} {tuple(rows.shape)}, but {self.weight_type.name} rows of a "
                f"{[*self._leading, n, k]} matrix are torch.uint8 {shape}"
            )
        return rows

    def _quantized_rows(self, key: str, weight: torch.Tensor) -> torch.Tensor:
        """A float checkpoint: its weight, in this module's type."""
        shape = (*self._leading, *self._matrix_shape())
        if weight.dtype not in LOGICAL_DTYPES or tuple(weight.shape) != shape:
            raise ValueError(
                f"{key}: got {weight.dtype} {tuple(weight.shape)}, but a weight to be quantized is {shape} of "
                "torch.float32, float16 or bfloat16"
            )
        try:
            return kt.quantize(weight.detach(), self._type)
        except RuntimeError as error:  # values that no scale can hold, a type that needs an importance
            raise ValueError(f"{key}: {error}") from None

    def _load_rows(self, key: str, rows: torch.Tensor, local_metadata: dict[str, Any]) -> torch.Tensor:
        """Return what nn.Module's own loading shall copy or assign for `rows`."""
        qweight = self._stored()
        assign = local_metadata.get("assign_to_params_buffers", False)
        if qweight.is_meta and not rows.is_meta and not assign:
            raise ValueError(f"{key}: the module is on the meta device; load with assign=True or call to_empty() first")
        if not self.packed:
            return rows
        if rows.is_meta:
            return kt.pack(rows, self._type)
        if qweight.is_meta:
            # Exchange the parameter's contents, not the parameter, so that a tied module keeps sharing it.
            packed = _pack(rows, self.weight_type, self._matrix_shape()[1])
            torch.utils.swap_tensors(qweight, nn.Parameter(packed, requires_grad=False))
        else:
            with torch.no_grad():
                kt._pack_out(qweight, rows.contiguous(), self._type)
        return qweight

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        qweight = self._parameters.get("qweight")

        def keep_bytes(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            if tensor is qweight and moved.dtype != torch.uint8:
                return tensor.to(moved.device)
            return moved

        # Ask on an empty tensor what `fn` does to a float: .to(dtype) changes the logical dtype, never the bytes.
        dtype = fn(torch.empty(0, dtype=self._dtype)).dtype
        if dtype.is_floating_point and dtype not in LOGICAL_DTYPES:
            raise TypeError(f"dtype: {type(self).__name__} computes in torch.float32, float16 or bfloat16, got {dtype}")
        super()._apply(keep_bytes, recurse)
        if dtype.is_floating_point:
            self._dtype = dtype
        return self

    def _type_repr(self) -> str:
        layout = "" if self._type is None else f", packed={self.packed}"
        return f"weight_type={self.weight_type.name}{layout}"


# qweight -> (its state, a reference to the rows unpacked from it, their version)
_unpacked: MutableMapping[torch.Tensor, Any] = WeakTensorKeyDictionary()


class Linear(_QuantizedWeight, nn.Linear):  # type: ignore[override]
    """y = x * W^T + b with W in any `WeightType`: an ``nn.Linear`` with a quantized or half-precision weight.

    A new module's quantized weight is zero until it is loaded; `from_linear` and `from_rows` make a filled one.

    Args:
        in_features: K, a multiple of the type's block.
        out_features: N.
        bias: whether to add a learned bias [N].
        weight_type: a `WeightType`, its name, or its GGML id. Float types hold an ordinary `weight` parameter.
        packed: hold quantized bytes in the packed layout (fast), or as plain GGUF rows.
        device: of the parameters.
        dtype: the logical dtype of `weight`, and the bias's: fp32, fp16 or bf16.

    Shapes: input [..., K] in fp32, fp16 or bf16, whatever `dtype` is; output [..., N] in the input's dtype.

    Raises:
        ValueError: an unknown `weight_type`, a `dtype` that is none of the three, a K that the block does not divide.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        weight_type: WeightType | str | int = "Q8_0",
        packed: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        wt = to_weight_type(weight_type)
        dtype = _checked_dtype(dtype)
        if wt in FLOAT_DTYPES:
            weight = torch.empty(out_features, in_features, dtype=FLOAT_DTYPES[wt], device=device)
        else:
            weight = _zeros(wt, out_features, in_features, packed, device)
        self._init(weight, in_features, out_features, None, wt, packed, dtype, requires_grad=True)
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device))
        if wt in FLOAT_DTYPES:
            self.reset_parameters()

    def _init(
        self,
        weight: torch.Tensor,
        in_features: int,
        out_features: int,
        bias: nn.Parameter | None,
        weight_type: WeightType,
        packed: bool,
        dtype: torch.dtype,
        requires_grad: bool,
    ) -> None:
        # Not nn.Linear.__init__: it would allocate and fill a float weight.
        nn.Module.__init__(self)
        self.in_features = in_features
        self.out_features = out_features
        self._dtype = dtype
        self._set_matrix(weight, weight_type, packed, requires_grad)
        self.register_parameter("bias", bias)

    def _matrix_shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, weight_type: WeightType | str | int = "Q8_0", packed: bool = True
    ) -> Linear:
        """Convert an ``nn.Linear``; the bias parameter is shared with it, and so is a weight that has the type already.

        Raises:
            TypeError: `linear` is not an nn.Linear.
            ValueError: an unknown `weight_type`, or one whose block does not divide K; a weight that is not fp32,
                fp16 or bf16.
            RuntimeError: values, or a type, that ``kt::quantize`` refuses.
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear: expected an nn.Linear, got {type(linear).__name__}")
        wt = to_weight_type(weight_type)
        weight = _convert(linear.weight, wt, packed)
        n, k = linear.weight.shape
        self = cls.__new__(cls)
        self._init(weight, k, n, linear.bias, wt, packed, linear.weight.dtype, linear.weight.requires_grad)
        if FLOAT_DTYPES.get(wt) == linear.weight.dtype:
            self._parameters["weight"] = linear._parameters["weight"]
        return self.train(linear.training)

    @classmethod
    def from_rows(
        cls,
        rows: torch.Tensor,
        in_features: int,
        weight_type: WeightType | str | int,
        bias: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        packed: bool = True,
    ) -> Linear:
        """Take GGUF rows, uint8 [N, row_bytes]. With ``packed=False`` the module uses `rows` itself, without a copy.

        Raises:
            ValueError: `rows` is not uint8 [N, row_bytes] for `weight_type` and `in_features`; a bias that is not [N].
        """
        wt = to_weight_type(weight_type)
        weight = _from_rows(rows, in_features, wt, packed)
        n = rows.shape[0]
        if bias is not None and tuple(bias.shape) != (n,):
            raise ValueError(f"bias: expected shape ({n},), got {tuple(bias.shape)}")
        if bias is not None and not isinstance(bias, nn.Parameter):
            bias = nn.Parameter(bias)
        self = cls.__new__(cls)
        self._init(weight, in_features, n, bias, wt, packed, _checked_dtype(dtype), requires_grad=True)
        return self

    def tie(self, other: Linear | Embedding) -> Linear:
        """Use the weight of `other` as this module's: one Parameter, one storage, as a tied output head does.

        Raises:
            ValueError: the other weight is not [out_features, in_features].
        """
        if other._matrix_shape() != self._matrix_shape():
            raise ValueError(f"other: expected a weight of shape {self._matrix_shape()}, got {other._matrix_shape()}")
        self._share_matrix(other)
        return self

    def __call__(self, input: Any = _NOT_GIVEN, /, *args: Any, **kwargs: Any) -> Any:
        # nn.Module's own takes 1 us, as long as a small product. Without a hook, a trace or a patch of it (torch.fx's),
        # there is nothing for it to do but to call forward.
        if (
            self._forward_hooks
            or self._forward_pre_hooks
            or self._backward_hooks
            or self._backward_pre_hooks
            or _module._global_forward_hooks
            or _module._global_forward_pre_hooks
            or _module._global_backward_hooks
            or _module._global_backward_pre_hooks
            or self._compiled_call_impl is not None
            or _tracing_state()
            or _Module.__call__ is not _module_call
            or input is _NOT_GIVEN
            or args
            or kwargs
        ):
            return super().__call__(*(() if input is _NOT_GIVEN else (input,)), *args, **kwargs)
        return self.forward(input)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # nn.Module.__getattr__ is slow; this is called hundreds of times per generated token.
        parameters: dict[str, Any] = self._parameters
        weight_type = self._type
        weight = parameters["weight" if weight_type is None else "qweight"]
        shape = (self.out_features, self.in_features) if self.packed else None
        return linear_stored(input, weight, parameters["bias"], weight_type, shape)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self._type_repr()}"


def linear_group(input: torch.Tensor, *layers: nn.Module) -> list[torch.Tensor]:
    """``[layer(input) for layer in layers]``, in one operator call where that makes no difference but to the time.

    It makes none for packed `Linear` layers of one K and one quantized type, of which all or none have a bias, where no
    gradient is wanted. The input is then quantized once and the threads meet once.
    """
    first = layers[0]
    if (
        without_derivatives()
        and type(first) is Linear
        and first.packed
        and _Module.__call__ is _module_call
        and not (_module._global_forward_hooks or _module._global_forward_pre_hooks or _tracing_state())
        and not (_module._global_backward_hooks or _module._global_backward_pre_hooks)
    ):
        weights, biases, sizes = [], [], []
        for layer in layers:
            # A hook, an adapter in the layer's place, a forward or a call of its own: all of these are to be called.
            if (
                type(layer) is not Linear
                or not layer.packed
                or layer._type != first._type
                or layer.in_features != first.in_features
                or "forward" in layer.__dict__
                or layer._forward_hooks
                or layer._forward_pre_hooks
                or layer._backward_hooks
                or layer._backward_pre_hooks
                or layer._compiled_call_impl is not None
            ):
                break
            parameters: dict[str, Any] = layer._parameters
            weights.append(parameters["qweight"])
            sizes.append(layer.out_features)
            if parameters["bias"] is not None:
                biases.append(parameters["bias"])
        else:
            if len(biases) in (0, len(weights)):
                return _linear_packed_group(input, weights, biases, sizes, first.in_features, first._type)
    return [layer(input) for layer in layers]


class Embedding(_QuantizedWeight, nn.Embedding):  # type: ignore[override]
    """Rows of a quantized table [num_embeddings, embedding_dim], dequantized to the logical dtype as they are read.

    A new module's table is zero until it is loaded; `from_embedding`, `from_linear` and `from_rows` make a filled one.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: K, a multiple of the type's block.
        padding_idx: kept as nn.Embedding does; a quantized table has no gradient, so nothing else depends on it.
        weight_type: a quantized `WeightType`, its name, or its GGML id.
        packed: hold the bytes in the packed layout (fast as a tied output head), or as plain GGUF rows.
        device: of the table.
        dtype: of the output: fp32, fp16 or bf16.

    Shapes: input [...] int32 or int64; output [..., embedding_dim].

    Raises:
        ValueError: an unknown or float `weight_type`, a `dtype` that is none of the three, a width that the block does
            not divide.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        weight_type: WeightType | str | int = "Q8_0",
        packed: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        wt = _quantized_type(weight_type)
        qweight = _zeros(wt, num_embeddings, embedding_dim, packed, device)
        self._init(qweight, num_embeddings, embedding_dim, padding_idx, wt, packed, _checked_dtype(dtype))

    def _init(
        self,
        qweight: torch.Tensor,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None,
        weight_type: WeightType,
        packed: bool,
        dtype: torch.dtype,
        requires_grad: bool = True,
    ) -> None:
        # Not nn.Embedding.__init__: it would allocate and fill a float table.
        nn.Module.__init__(self)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx: must be within the {num_embeddings} rows, got {padding_idx}")
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx % num_embeddings if padding_idx is not None else None
        self.max_norm = None
        self.norm_type = 2.0
        self.scale_grad_by_freq = False
        self.sparse = False
        self._dtype = dtype
        self._set_matrix(qweight, weight_type, packed, requires_grad)

    def _matrix_shape(self) -> tuple[int, int]:
        return self.num_embeddings, self.embedding_dim

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, weight_type: WeightType | str | int = "Q8_0", packed: bool = True
    ) -> Embedding:
        """Quantize the table of an ``nn.Embedding``.

        Raises:
            TypeError: `embedding` is not an nn.Embedding.
            ValueError: as `Embedding`; also an embedding with `max_norm`, which rewrites rows as it reads them.
            RuntimeError: values, or a type, that ``kt::quantize`` refuses.
        """
        if not isinstance(embedding, nn.Embedding):
            raise TypeError(f"embedding: expected an nn.Embedding, got {type(embedding).__name__}")
        if embedding.max_norm is not None:
            raise ValueError(
                f"embedding: max_norm is {embedding.max_norm}; expected None, since the table is read-only"
            )
        wt = _quantized_type(weight_type)
        qweight = _convert(embedding.weight, wt, packed)
        n, k = embedding.weight.shape
        self = cls.__new__(cls)
        weight = embedding.weight
        self._init(qweight, n, k, embedding.padding_idx, wt, packed, weight.dtype, weight.requires_grad)
        return self.train(embedding.training)

    @classmethod
    def from_linear(cls, head: Linear, padding_idx: int | None = None) -> Embedding:
        """The table of a quantized output head, sharing its Parameter.

        Raises:
            TypeError: `head` is not a quantized `Linear`.
        """
        if not isinstance(head, Linear) or head._type is None:
            raise TypeError(f"head: expected a quantized ktlinear.nn.Linear, got {head!r}")
        n, k = head._matrix_shape()
        self = cls.__new__(cls)
        self._init(head._stored(), n, k, padding_idx, head.weight_type, head.packed, head._dtype)
        self._share_matrix(head)
        return self

    @classmethod
    def from_rows(
        cls,
        rows: torch.Tensor,
        embedding_dim: int,
        weight_type: WeightType | str | int,
        padding_idx: int | None = None,
        dtype: torch.dtype | None = None,
        packed: bool = True,
    ) -> Embedding:
        """Take GGUF rows, uint8 [num_embeddings, row_bytes]. With ``packed=False`` `rows` itself is used.

        Raises:
            ValueError: `rows` does not fit `weight_type` and `embedding_dim`.
        """
        wt = _quantized_type(weight_type)
        qweight = _from_rows(rows, embedding_dim, wt, packed)
        self = cls.__new__(cls)
        self._init(qweight, rows.shape[0], embedding_dim, padding_idx, wt, packed, _checked_dtype(dtype))
        return self

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight_type = self._type
        assert weight_type is not None
        return _logical.embedding(input, self._stored(), weight_type, self.packed, *self._matrix_shape(), self._dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self._type_repr()}"


class ExpertsLinear(_QuantizedWeight, nn.Module):
    """y[t, j] = x[t] * W[e]^T with e = expert_ids[t, j]: one linear layer for each of several experts, without bias.

    A new module's weight is zero until it is loaded; `from_weight` and `from_rows` make a filled one.

    Args:
        num_experts: E.
        in_features: K, a multiple of the type's block.
        out_features: N.
        weight_type: a `WeightType`, its name, or its GGML id. Float types hold a parameter `weight` [E, N, K].
        packed: hold quantized bytes in the packed layout (fast), or as plain GGUF rows.
        device: of the weight.
        dtype: the dtype of the weight this one stands for: fp32, fp16 or bf16.

    Shapes: input [T, K], or [T, top_k, K] with one for each choice; expert_ids [T, top_k], int64 or int32; output
        [T, top_k, N] in the input's dtype.

    Raises:
        ValueError: an unknown `weight_type`, a `dtype` that is none of the three, a K that the block does not divide.
        IndexError: on a call, an id that is not that of an expert.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        weight_type: WeightType | str | int = "Q8_0",
        packed: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        wt = to_weight_type(weight_type)
        if wt in FLOAT_DTYPES:
            weight = torch.zeros(num_experts, out_features, in_features, dtype=FLOAT_DTYPES[wt], device=device)
        else:
            weight = _zeros(wt, out_features, in_features, packed, device, (num_experts,))
        self._init(weight, (num_experts, out_features, in_features), wt, packed, _checked_dtype(dtype), True)

    def _init(
        self,
        weight: torch.Tensor,
        shape: tuple[int, ...],
        weight_type: WeightType,
        packed: bool,
        dtype: torch.dtype,
        requires_grad: bool,
    ) -> None:
        nn.Module.__init__(self)
        self.num_experts, self.out_features, self.in_features = shape
        self._leading = (self.num_experts,)
        self._dtype = dtype
        self._set_matrix(weight, weight_type, packed, requires_grad)

    def _matrix_shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def weight(self) -> torch.Tensor:
        """[E, N, K]: the parameter of a float type. Quantized experts have none; `dequantize` makes one."""
        if self._type is None:
            return self._stored()
        # Not an AttributeError, which nn.Module would report as a missing attribute.
        raise TypeError(f"weight: {self.weight_type.name} experts have no float weight; dequantize() makes one")

    def dequantize(self) -> torch.Tensor:
        """The weight as floats of the logical dtype, [E, N, K]."""
        if self._type is None:
            return self._stored().detach().to(self._dtype)
        return kt.dequantize(self._rows(), self._type, self._dtype)

    @classmethod
    def from_weight(
        cls, weight: torch.Tensor, weight_type: WeightType | str | int = "Q8_0", packed: bool = True
    ) -> ExpertsLinear:
        """Quantize a float weight [E, N, K].

        Raises:
            ValueError: as `ExpertsLinear`; a weight that is not fp32, fp16 or bf16 [E, N, K].
            RuntimeError: values, or a type, that ``kt::quantize`` refuses.
        """
        if weight.dim() != 3:
            raise ValueError(f"weight: expected [E, N, K], got {list(weight.shape)}")
        wt = to_weight_type(weight_type)
        self = cls.__new__(cls)
        self._init(_convert(weight, wt, packed), tuple(weight.shape), wt, packed, weight.dtype, weight.requires_grad)
        return self

    @classmethod
    def from_rows(
        cls,
        rows: torch.Tensor,
        in_features: int,
        weight_type: WeightType | str | int,
        dtype: torch.dtype | None = None,
        packed: bool = True,
    ) -> ExpertsLinear:
        """Take GGUF rows, uint8 [E, N, row_bytes]. With ``packed=False`` the module uses `rows` itself.

        Raises:
            ValueError: `rows` is not uint8 [E, N, row_bytes] for `weight_type` and `in_features`.
        """
        wt = to_weight_type(weight_type)
        weight = _from_rows(rows, in_features, wt, packed, "E, ")
        self = cls.__new__(cls)
        self._init(weight, (*rows.shape[:2], in_features), wt, packed, _checked_dtype(dtype), True)
        return self

    def forward(self, input: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        shape = self._matrix_shape() if self.packed else None
        return linear_experts(input, self._stored(), expert_ids, self._type, shape)

    def extra_repr(self) -> str:
        sizes = f"num_experts={self.num_experts}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, {self._type_repr()}"


class Experts(nn.Module):
    """The gated experts of a mixture: sum over a token's choices of score * down(act(gate(x)) * up(x)).

    Called as transformers calls the merged experts of its models.

    Args:
        gate_proj, up_proj: [E, I, H].
        down_proj: [E, H, I].
        act_fn: the activation, a module or a function.

    Shapes: hidden_states [T, H]; top_k_index [T, top_k], experts' ids; top_k_weights [T, top_k], their scores; output
        [T, H] in the dtype of `hidden_states`.

    Raises:
        ValueError: the three do not fit each other.
    """

    def __init__(
        self,
        gate_proj: ExpertsLinear,
        up_proj: ExpertsLinear,
        down_proj: ExpertsLinear,
        act_fn: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__()
        shapes = [(m.num_experts, m.out_features, m.in_features) for m in (gate_proj, up_proj, down_proj)]
        experts, inner, hidden = shapes[0]
        if shapes != [(experts, inner, hidden), (experts, inner, hidden), (experts, hidden, inner)]:
            raise ValueError(f"gate_proj, up_proj, down_proj: expected [E, I, H] twice and [E, H, I], got {shapes}")
        self.num_experts, self.intermediate_dim, self.hidden_dim = experts, inner, hidden
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj
        self.act_fn = act_fn

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        inner = self.act_fn(self.gate_proj(hidden_states, top_k_index)) * self.up_proj(hidden_states, top_k_index)
        chosen = self.down_proj(inner, top_k_index) * top_k_weights.unsqueeze(-1)
        return chosen.sum(dim=1).to(hidden_states.dtype)


def _checked_dtype(dtype: torch.dtype | None) -> torch.dtype:
    dtype = dtype or torch.get_default_dtype()
    if dtype not in LOGICAL_DTYPES:
        raise ValueError(f"dtype: expected torch.float32, float16 or bfloat16, got {dtype}")
    return dtype


def _quantized_type(weight_type: WeightType | str | int) -> WeightType:
    wt = to_weight_type(weight_type)
    if wt in FLOAT_DTYPES:
        raise ValueError(f"weight_type: expected a quantized type, got {wt.name}; an nn.Embedding holds a float table")
    return wt


def _zeros(
    wt: WeightType, n: int, k: int, packed: bool, device: torch.device | str | None, leading: tuple[int, ...] = ()
) -> torch.Tensor:
    rows = (n, row_bytes(wt, k))
    shape = packed_shape(wt, n, k) if packed else rows
    device = torch.get_default_device() if device is None else torch.device(device)
    if device.type == "cpu":
        return _memory.zeros(math.prod(leading) * shape[0], shape[1]).view(*leading, *shape)
    return torch.zeros(*leading, *shape, dtype=torch.uint8, device=device)


def _pack(rows: torch.Tensor, wt: WeightType, k: int) -> torch.Tensor:
    """Pack GGUF rows into memory of our own."""
    if rows.is_meta:
        return kt.pack(rows, wt)
    leading, (panels, width) = rows.shape[:-2], packed_shape(wt, rows.shape[-2], k)
    out = _memory.zeros(math.prod(leading) * panels, width).view(*leading, panels, width)
    kt._pack_out(out, rows.contiguous(), wt)
    return out


def _convert(weight: torch.Tensor, wt: WeightType, packed: bool) -> torch.Tensor:
    """A float matrix [N, K] in the type `wt`; itself if it has that type."""
    if weight.dtype not in LOGICAL_DTYPES:
        raise ValueError(f"weight: expected torch.float32, float16 or bfloat16, got {weight.dtype}")
    weight = weight.detach()
    if wt in FLOAT_DTYPES:
        return weight.to(FLOAT_DTYPES[wt])
    row_bytes(wt, weight.shape[-1])  # a ValueError if the block does not divide K
    rows = kt.quantize(weight, wt)
    return _pack(rows, wt, weight.shape[-1]) if packed else rows


def _from_rows(rows: torch.Tensor, k: int, wt: WeightType, packed: bool, leading: str = "") -> torch.Tensor:
    width = row_bytes(wt, k)
    if rows.dtype != torch.uint8 or rows.dim() != (3 if leading else 2) or rows.shape[-1] != width:
        raise ValueError(
            f"rows: expected torch.uint8 [{leading}N, {width}] for {wt.name} rows of {k} elements, "
            f"got {rows.dtype} {list(rows.shape)}"
        )
    if wt in FLOAT_DTYPES:
        return rows.contiguous().view(FLOAT_DTYPES[wt])
    return _pack(rows, wt, k) if packed else rows
