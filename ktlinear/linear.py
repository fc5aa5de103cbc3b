"""Linear layers on raw pointers, in the style of KTransformers: for engines that own their memory.

    >>> from ktlinear.linear import HiddenType, Linear, LinearConfig, WeightType
    >>> config = LinearConfig(4096, 1024, 64, 1024, weight.data_ptr(), WeightType.Q4_K, HiddenType.BF16)
    >>> Linear(config).forward(qlen, input.data_ptr(), output.data_ptr())

A pointer is an address, such as ``tensor.data_ptr()``. Nothing is copied or kept alive: the weight has to stay where it
is as long as the `Linear` is used, input and output until `Linear.forward` returns. **An address whose memory was
released or is too small cannot be told from a good one: reading it gives wrong numbers or ends the process.** So keep a
reference to whatever owns the memory; beware of ``tensor.contiguous().data_ptr()``, whose copy is gone at once.
"""

from __future__ import annotations

import ctypes
import enum
import sys
from dataclasses import dataclass

import torch

from .ops import FORMATS, WeightType, row_bytes
from .ops import weight_type as to_weight_type

__all__ = ["HiddenType", "Linear", "LinearConfig", "WeightType"]


class HiddenType(enum.IntEnum):
    """The type of input and output. The values are the GGML type ids."""

    F32 = 0
    F16 = 1
    BF16 = 30


_DTYPES = {HiddenType.F32: torch.float32, HiddenType.F16: torch.float16, HiddenType.BF16: torch.bfloat16}


@dataclass(frozen=True)
class LinearConfig:
    """What a `Linear` computes, and where its weight lies.

    Args:
        in_features: K, a multiple of the weight type's block.
        out_features: N. Any number: rows beyond the last whole `stride` are computed too.
        stride: rows of a unit of work in KTransformers. Any positive number; here the kernels choose their own.
        group_max_len: tokens computed at once in KTransformers. Any positive number; `Linear.forward` takes more, too.
        weight_ptr: the address of the weight, [out_features, in_features] without gaps: floats, or rows of blocks as in
            a GGUF file.
        weight_type: a `WeightType`, its name or its GGML id.
        hidden_type: a `HiddenType`, its name or its GGML id.

    Raises:
        TypeError: a number is not an int.
        ValueError: a number that is not positive, an unknown type, `in_features` that the block does not divide, or an
            address that is null or not a multiple of the element's size.
    """

    in_features: int
    out_features: int
    stride: int
    group_max_len: int
    weight_ptr: int
    weight_type: WeightType | str | int
    hidden_type: HiddenType | str | int

    def __post_init__(self) -> None:
        for name in ("in_features", "out_features", "stride", "group_max_len"):
            _check_int(name, getattr(self, name), least=1)
        kind = to_weight_type(self.weight_type)
        object.__setattr__(self, "weight_type", kind)
        object.__setattr__(self, "hidden_type", _hidden_type(self.hidden_type))
        size = self.out_features * row_bytes(kind, self.in_features)
        # A float is read as a whole; blocks may begin anywhere.
        _check_pointer("weight_ptr", self.weight_ptr, size, FORMATS[kind].block_bytes if _is_float(kind) else 1)


class Linear:
    """y = x @ weight.T on raw pointers. See the module about who owns the memory.

    Args:
        config: a `LinearConfig`. The weight is read in place, at every call.

    Raises:
        TypeError: `config` is not a `LinearConfig`.
    """

    def __init__(self, config: LinearConfig) -> None:
        if not isinstance(config, LinearConfig):
            raise TypeError(f"config: expected a LinearConfig, got {type(config).__name__}")
        self.config = config
        kind, hidden = to_weight_type(config.weight_type), _hidden_type(config.hidden_type)
        self._dtype = _DTYPES[hidden]
        columns = row_bytes(kind, config.in_features)
        weight = _view(config.weight_ptr, config.out_features, columns, torch.uint8)
        self._weight = weight.view(_DTYPES[HiddenType(kind)]) if _is_float(kind) else weight
        self._weight_type = None if _is_float(kind) else int(kind)

    def forward(self, qlen: int, input: int, output: int) -> None:
        """Compute `qlen` tokens.

        Args:
            qlen: M, any number of tokens; 0 does nothing.
            input: the address of x, [qlen, in_features] of the hidden type, without gaps.
            output: the address of y, [qlen, out_features] of the hidden type. It may be that of `input`.

        Raises:
            TypeError: an argument is not an int.
            ValueError: `qlen` is negative, or an address is null or not a multiple of the element's size.
        """
        k, n, element = self.config.in_features, self.config.out_features, self._dtype.itemsize
        _check_int("qlen", qlen, least=0)
        _check_pointer("input", input, qlen * k * element, element)
        _check_pointer("output", output, qlen * n * element, element)
        if qlen == 0:
            return
        y = torch.ops.kt._linear(_view(input, qlen, k, self._dtype), self._weight, None, self._weight_type)
        _view(output, qlen, n, self._dtype).copy_(y)


def _is_float(kind: WeightType) -> bool:
    return FORMATS[kind].block == 1


def _hidden_type(value: HiddenType | str | int) -> HiddenType:
    if isinstance(value, str):
        if value.upper() in HiddenType.__members__:
            return HiddenType[value.upper()]
    elif isinstance(value, int) and not isinstance(value, bool) and value in set(HiddenType):
        return HiddenType(value)
    accepted = ", ".join(f"{t.name} ({t.value})" for t in HiddenType)
    raise ValueError(f"hidden_type is {value!r}; expected one of {accepted}")


def _check_int(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} is {value}; expected at least {least}")


def _check_pointer(name: str, address: int, size: int, alignment: int) -> None:
    if not isinstance(address, int) or isinstance(address, bool):
        raise TypeError(
            f"{name}: expected an address as an int, such as tensor.data_ptr(), got {type(address).__name__}"
        )
    if address == 0:
        raise ValueError(f"{name} is a null pointer; expected the address of {size} bytes")
    if address < 0 or address + size > 2 * sys.maxsize + 1 or size > sys.maxsize:
        raise ValueError(f"{name} is {address:#x}; {size} bytes from there are not in the address space")
    if address % alignment:
        raise ValueError(f"{name} is {address:#x}; expected a multiple of {alignment}, the size of an element")


def _view(address: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """The memory at an address as a tensor [rows, columns]."""
    memory = (ctypes.c_char * (rows * columns * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(rows, columns)
