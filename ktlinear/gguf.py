"""Memory-mapped GGUF files: metadata, and tensors as raw rows of quantized blocks.

The layout read here (all little-endian, versions 2 and 3)::

    "GGUF"  u32 version  u64 tensor count  u64 metadata count
    metadata     string key, u32 value type, value                 (string: u64 length, UTF-8 bytes)
    tensors      string name, u32 dimensions, u64 each (K first), u32 type, u64 offset into the data
    padding      up to the next multiple of `general.alignment` (32 if the file does not say)
    data         each tensor at a multiple of the alignment

Source: the format's description in ggml, docs/gguf.md. Opening a file walks the header only, and long arrays (the
vocabulary) are decoded when they are asked for: a vocabulary of 49 152 tokens opens in some 20 ms.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from .ops import FORMATS, WeightType, row_bytes

__all__ = ["GGUFError", "GGUFFile", "TensorInfo"]

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {
    type_id: struct.Struct(code)
    for type_id, code in {
        0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
    }.items()
}  # fmt: skip
_U32, _U64 = _SCALARS[4], _SCALARS[10]

_MAX_DIMENSIONS = 4
# The smallest possible entries: an empty key with a one-byte value, an empty name with one dimension.
_MIN_METADATA_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8

_FLOAT_DTYPES = {WeightType.F32: torch.float32, WeightType.F16: torch.float16, WeightType.BF16: torch.bfloat16}


class GGUFError(ValueError):
    """A file that is not a readable GGUF file, or that holds what ktlinear does not support. Names the file."""


class TensorInfo(NamedTuple):
    """Where a tensor lies in the file and how it is stored."""

    shape: tuple[int, ...]
    """In torch order: [out_features, in_features] for a matrix."""
    weight_type: WeightType
    offset: int
    """In bytes from the start of the file."""
    nbytes: int


class _Array(NamedTuple):
    element_type: int
    length: int
    offset: int


class _Cursor:
    """A position in the mapped file. Every read is checked against the file's end."""

    def __init__(self, data: mmap.mmap, path: str, position: int = 0) -> None:
        self.data = data
        self.path = path
        self.position = position

    def error(self, message: str) -> GGUFError:
        return GGUFError(f"{self.path}: {message}")

    @property
    def remaining(self) -> int:
        return len(self.data) - self.position

    def skip(self, count: int, what: str) -> int:
        """Moves past `count` bytes and returns where they start."""
        if count > self.remaining:
            raise self.error(
                f"truncated or damaged: {what} takes {count} bytes from byte {self.position} on, but the file ends at "
                f"byte {len(self.data)}"
            )
        start = self.position
        self.position += count
        return start

    def read(self, layout: struct.Struct, what: str) -> Any:
        return layout.unpack_from(self.data, self.skip(layout.size, what))[0]

    def count(self, what: str, smallest: int) -> int:
        """A u64 number of entries of at least `smallest` bytes each."""
        count = self.read(_U64, f"the number of {what}")
        if count > self.remaining // smallest:
            raise self.error(f"truncated or damaged: {count} {what} do not fit in the remaining {self.remaining} bytes")
        return count

    def string(self, what: str) -> str:
        length = self.read(_U64, f"the length of {what}")
        start = self.skip(length, what)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"damaged: {what} at byte {start} is not valid UTF-8 ({error.reason})") from None

    def value(self, what: str) -> Any:
        """A metadata value; an array is skipped and returned as an `_Array`."""
        value_type = self.read(_U32, f"the type of {what}")
        if value_type == _ARRAY:
            return self._array(what)
        if value_type == _STRING:
            return self.string(what)
        if value_type in _SCALARS:
            return self.read(_SCALARS[value_type], what)
        raise self.error(f"{what} has value type {value_type}; accepted are {_accepted(_STRING, _ARRAY)}")

    def _array(self, what: str) -> _Array:
        element_type = self.read(_U32, f"the element type of {what}")
        if element_type != _STRING and element_type not in _SCALARS:
            raise self.error(f"{what} is an array of value type {element_type}; accepted are {_accepted(_STRING)}")
        smallest = _U64.size if element_type == _STRING else _SCALARS[element_type].size
        count = self.count(f"elements of {what}", smallest)
        array = _Array(element_type, count, self.position)
        if element_type != _STRING:
            self.skip(count * smallest, what)
            return array
        # Strings have no index: their lengths must be walked. This loop is most of the time of opening a file.
        data, position, end = self.data, self.position, len(self.data) - _U64.size
        unpack = _U64.unpack_from
        for _ in range(count):
            if position > end:
                break
            position += _U64.size + unpack(data, position)[0]
        else:
            self.skip(position - self.position, what)
            return array
        raise self.error(f"truncated or damaged: the strings of {what} run past the file's end at byte {len(data)}")


def _accepted(*others: int) -> str:
    return ", ".join(map(str, sorted((*_SCALARS, *others))))


class _Metadata(Mapping[str, Any]):
    """Metadata by key: numbers, booleans, strings, and lists of them. Lists are decoded anew on every access."""

    def __init__(self, data: mmap.mmap, path: str) -> None:
        self._data = data
        self._path = path
        self._values: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if not isinstance(value, _Array):
            return value
        if value.element_type == _STRING:
            cursor = _Cursor(self._data, self._path, value.offset)
            return [cursor.string(f"an element of {key!r}") for _ in range(value.length)]
        code = _SCALARS[value.element_type].format[1:]
        return list(struct.unpack_from(f"<{value.length}{code}", self._data, value.offset))

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values


class GGUFFile:
    """A GGUF file, mapped read-only. Opening it reads and checks the header; no tensor is touched.

    Args:
        path: the file.

    Attributes:
        metadata: the file's keys and values.
        tensors: name -> :class:`TensorInfo`, in the file's order.

    The tensors that :meth:`rows` and :meth:`tensor` return are views of the mapping and keep it alive. It is a private
    mapping: writing to them changes no file, but is lost with :meth:`release`. As with every mapped file, another
    process must not shorten it meanwhile.

    Raises:
        GGUFError: the file is damaged, truncated, big-endian, of another version, or holds a tensor of a type that
            ktlinear does not have. The message names the file, what was found and what is accepted.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        with open(self.path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise GGUFError(f"{self.path}: an empty file, not a GGUF file")
            # A private writable mapping, since torch.frombuffer warns about memory it must not write to.
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        cursor = _Cursor(self._data, self.path)
        self.version, tensor_count, metadata_count = self._read_counts(cursor)
        metadata = _Metadata(self._data, self.path)
        for _ in range(metadata_count):
            key = cursor.string("a metadata key")
            if key in metadata:
                raise cursor.error(f"damaged: the metadata key {key!r} appears twice")
            metadata._values[key] = cursor.value(f"the metadata value {key!r}")
        self.metadata: Mapping[str, Any] = metadata
        self.alignment = metadata.get("general.alignment", 32)
        if type(self.alignment) is not int or self.alignment < 8 or self.alignment & (self.alignment - 1):
            raise cursor.error(f"general.alignment is {self.alignment!r}; accepted is a power of two, at least 8")
        self.tensors = self._read_tensors(cursor, tensor_count)

    @staticmethod
    def _read_counts(cursor: _Cursor) -> tuple[int, int, int]:
        start = cursor.skip(4, "the magic bytes")
        magic = cursor.data[start : cursor.position]
        if magic != b"GGUF":
            raise cursor.error(f"not a GGUF file: it starts with {magic!r}, not with b'GGUF'")
        version = cursor.read(_U32, "the version")
        if version not in _VERSIONS:
            accepted = " and ".join(map(str, _VERSIONS))
            if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
                raise cursor.error(f"a big-endian GGUF file; accepted are little-endian files of version {accepted}")
            raise cursor.error(f"GGUF version {version}; accepted are {accepted}")
        tensor_count = cursor.count("tensors", _MIN_TENSOR_BYTES)
        metadata_count = cursor.count("metadata values", _MIN_METADATA_BYTES)
        return version, tensor_count, metadata_count

    def _read_tensors(self, cursor: _Cursor, tensor_count: int) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for _ in range(tensor_count):
            name = cursor.string("a tensor's name")
            if name in tensors:
                raise cursor.error(f"damaged: the tensor {name!r} appears twice")
            tensors[name] = self._read_tensor(cursor, name)
        data_start = (cursor.position + self.alignment - 1) // self.alignment * self.alignment
        # The offsets count from the data section, whose start is known only now.
        tensors = {name: info._replace(offset=data_start + info.offset) for name, info in tensors.items()}
        end, before = data_start, "the header"
        for name, info in sorted(tensors.items(), key=lambda item: item[1].offset):
            if info.offset < end:
                raise cursor.error(
                    f"damaged: tensor {name!r} at byte {info.offset} overlaps {before}, up to byte {end}"
                )
            end, before = info.offset + info.nbytes, f"tensor {name!r}"
            if end > len(self._data):
                raise cursor.error(
                    f"truncated or damaged: tensor {name!r} takes {info.nbytes} bytes from byte {info.offset} on, but "
                    f"the file ends at byte {len(self._data)}"
                )
        return tensors

    def _read_tensor(self, cursor: _Cursor, name: str) -> TensorInfo:
        """One entry of the tensor table, its offset still relative to the data section."""
        what = f"tensor {name!r}"
        dimensions = cursor.read(_U32, f"the number of dimensions of {what}")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise cursor.error(f"{what} has {dimensions} dimensions; accepted are 1 to {_MAX_DIMENSIONS}")
        shape = tuple(cursor.read(_U64, f"the shape of {what}") for _ in range(dimensions))[::-1]
        if 0 in shape:
            raise cursor.error(f"{what} has the shape {list(shape)}; every dimension must be at least 1")
        type_id = cursor.read(_U32, f"the type of {what}")
        offset = cursor.read(_U64, f"the offset of {what}")
        if type_id not in FORMATS:
            accepted = ", ".join(f"{t.name} ({t.value})" for t in FORMATS)
            raise cursor.error(f"{what} has the weight type {_type_name(type_id)}; supported are {accepted}")
        weight_type = WeightType(type_id)
        block = FORMATS[weight_type].block
        if shape[-1] % block:
            raise cursor.error(
                f"{what} has rows of {shape[-1]} elements; {weight_type.name} takes a multiple of {block}"
            )
        if offset % self.alignment:
            raise cursor.error(f"damaged: {what} has the offset {offset}, not a multiple of {self.alignment}")
        return TensorInfo(shape, weight_type, offset, math.prod(shape[:-1]) * row_bytes(weight_type, shape[-1]))

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise GGUFError(f"{self.path}: no tensor {name!r} among the file's {len(self.tensors)}")
        return self.tensors[name]

    def rows(self, name: str) -> torch.Tensor:
        """The tensor's bytes, uint8 [..., row_bytes(weight_type, K)]: a view of the mapping, nothing is copied."""
        info = self._info(name)
        flat = torch.frombuffer(self._data, dtype=torch.uint8, count=info.nbytes, offset=info.offset)
        return flat.view(*info.shape[:-1], row_bytes(info.weight_type, info.shape[-1]))

    def tensor(self, name: str) -> torch.Tensor:
        """A float tensor in its own type, fp32, fp16 or bf16 [...]: a view of the mapping, nothing is copied."""
        info = self._info(name)
        if info.weight_type not in _FLOAT_DTYPES:
            accepted = ", ".join(t.name for t in _FLOAT_DTYPES)
            raise GGUFError(
                f"{self.path}: tensor {name!r} is {info.weight_type.name}; accepted here are {accepted}, use rows()"
            )
        return self.rows(name).view(_FLOAT_DTYPES[info.weight_type])

    def release(self, name: str) -> None:
        """Gives the memory of the tensor's pages back to the system; they are read from the file again if needed."""
        if hasattr(mmap, "MADV_DONTNEED"):
            info = self._info(name)
            start = info.offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._data.madvise(mmap.MADV_DONTNEED, start, info.offset + info.nbytes - start)

    def __repr__(self) -> str:
        return f"GGUFFile({self.path!r}, version={self.version}, {len(self.tensors)} tensors)"


def _type_name(type_id: int) -> str:
    """The GGML name of a type that ktlinear lacks, for a message."""
    try:
        from gguf import GGMLQuantizationType

        return f"{GGMLQuantizationType(type_id).name} ({type_id})"
    except (ImportError, ValueError):
        return str(type_id)
