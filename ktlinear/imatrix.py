"""llama.cpp's importance matrices: for each weight [N, K], how much each of its K inputs matters.

A number is the mean square of that input over some text (``llama-imatrix``). Two kinds of file are read:

- GGUF: tensors ``NAME.in_sum2`` [K], the sums of the squares, and ``NAME.counts`` [1], of how many.
- the older ``imatrix.dat``, little-endian: i32 entries; for each an i32 length and the name, i32 calls, i32 K and
  K floats, the mean squares times the calls; more may follow.

Source: llama.cpp, tools/imatrix and tools/quantize.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from .gguf import GGUFFile

__all__ = ["for_names", "read"]

_MAX_NAME = 4096


def read(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """The importances in a file by the name of the weight, fp32 [K], or [experts, K] of an expert-routed one.

    Entries that no text has reached are left out.

    Raises:
        ValueError: the file is neither of the two kinds, or damaged; the message names it.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        magic = file.read(4)
    entries = _read_gguf(path) if magic == b"GGUF" else _read_legacy(path)
    for name, values in entries.items():
        if not bool(torch.isfinite(values).all()) or bool((values < 0).any()):
            raise ValueError(f"{path}: the importance of {name!r} holds negative numbers or NaN")
    if not entries:
        raise ValueError(f"{path}: an importance matrix without entries")
    return entries


def _read_gguf(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    file = GGUFFile(path)
    entries = {}
    for name in file.tensors:
        if not name.endswith(".in_sum2"):
            continue
        weight = name.removesuffix(".in_sum2")
        if f"{weight}.counts" not in file.tensors:
            raise ValueError(f"{path}: {name!r} has no {weight + '.counts'!r}")
        sums, counts = file.tensor(name).float(), file.tensor(f"{weight}.counts").float().reshape(-1, 1)
        sums = sums.reshape(-1, sums.shape[-1])
        if len(sums) != len(counts):
            raise ValueError(f"{path}: {name!r} has {len(sums)} rows and {len(counts)} counts")
        if bool((counts > 0).all()):
            entries[weight] = (sums / counts).squeeze(0)
    if not entries and not any(name.endswith(".in_sum2") for name in file.tensors):
        raise ValueError(f"{path}: a GGUF file, but no importance matrix: it has no tensor *.in_sum2")
    return entries


def _read_legacy(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    data = Path(path).read_bytes()
    position = 0

    def take(count: int) -> bytes:
        nonlocal position
        if not 0 <= count <= len(data) - position:
            raise ValueError(f"{path}: neither a GGUF file nor an imatrix.dat, or cut off at byte {len(data)}")
        position += count
        return data[position - count : position]

    def integer() -> int:
        return struct.unpack("<i", take(4))[0]

    entries = {}
    for _ in range(integer()):
        length = integer()
        name = take(length if length <= _MAX_NAME else -1).decode("utf-8", errors="replace")
        calls, k = integer(), integer()
        values = torch.frombuffer(bytearray(take(4 * k)), dtype=torch.float32) if k else torch.empty(0)
        if calls > 0:
            entries[name] = values / calls
    return entries


def for_names(
    entries: dict[str, torch.Tensor], names: Iterable[str], architecture: str | None
) -> dict[str, torch.Tensor]:
    """The importances by the names of transformers' tensors.

    A tensor takes the entry of its own name, or of the name that llama.cpp has for it, by the table in the package
    ``gguf`` for the model's architecture. A tied token table takes that of the output head if there is one.

    Args:
        entries: what `read` returns.
        names: of the tensors, as in ``model.layers.0.mlp.up_proj.weight``.
        architecture: the ``model_type`` of the model's config, if it is known; without one, llama's names are tried.
    """
    translate = _gguf_names(architecture)
    found = {}
    for name in names:
        translated = translate(name)
        candidates = [name, translated, "output.weight" if translated == "token_embd.weight" else None]
        key = next((candidate for candidate in candidates if candidate in entries), None)
        if key is not None:
            found[name] = entries[key]
    return found


def _gguf_names(architecture: str | None) -> Callable[[str], str | None]:
    """llama.cpp's name for each of transformers'."""
    try:
        from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map
    except ImportError as error:
        raise ImportError(f"an importance matrix needs the package gguf, for llama.cpp's names: {error}") from error
    plain = {name.replace("-", "").replace("_", ""): arch for arch, name in MODEL_ARCH_NAMES.items()}
    key = (architecture or "llama").removesuffix("_text").replace("_", "")
    table = get_tensor_name_map(plain.get(key, MODEL_ARCH.LLAMA), _MOST_LAYERS)
    return lambda name: table.get_name(name, try_suffixes=(".weight",))


_MOST_LAYERS = 256  # more than any model has; the table lists each layer's names
