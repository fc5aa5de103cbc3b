"""llama.cpp's importance matrices: for each weight [N, K], how much each of its K inputs matters.

A number is the mean square of that input over some text. `collect` computes them and `save` writes them to a file for
``python -m ktlinear quantize --imatrix FILE``, which reads llama.cpp's (``llama-imatrix``) as well. Of files there are
two kinds:

- GGUF: tensors ``NAME.in_sum2`` [K], the sums of the squares, and ``NAME.counts`` [1], of how many.
- the older ``imatrix.dat``, little-endian: i32 entries; for each an i32 length and the name, i32 calls, i32 K and
  K floats, the mean squares times the calls; more may follow.

`save` writes the first.

Source: llama.cpp, tools/imatrix and tools/quantize.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .gguf import GGUFFile

__all__ = ["collect", "for_names", "read", "save"]

_MAX_NAME = 4096


@torch.no_grad()
def collect(model: nn.Module, batches: Iterable[Any]) -> dict[str, torch.Tensor]:
    """The importances of the linear layers of `model` on some text: the mean squares of their inputs.

    The model runs once on each batch. Some thousand tokens of text like that which it is meant for are enough, in
    batches without padding, whose tokens would count like any other. A quantized model (`ktlinear.patch`, `from_gguf`)
    will do if the float one is too large.

    Args:
        model: any module; its ``nn.Linear`` layers, `ktlinear.nn.Linear` among them, are watched. It is run in the mode
            it is in: call ``model.eval()`` before.
        batches: what to call the model with: a mapping is passed as keyword arguments, as a tokenizer makes it, a tuple
            or list as positional ones, and anything else as the only one.

    Returns:
        fp32 [K] by the name of the weight, as in ``model.layers.0.mlp.up_proj.weight``; under each of its names if it
        is tied. Layers that were not called have none.

    Raises:
        TypeError: `model` is not an ``nn.Module``.
        ValueError: no layer was called, or a layer's input held NaN or infinity; the message names it.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    names: dict[int, list[str]] = {}  # the id of a weight -> its names
    for name, parameter in model.named_parameters(remove_duplicate=False):
        prefix, dot, attribute = name.rpartition(".")
        if attribute in ("weight", "qweight"):
            names.setdefault(id(parameter), []).append(f"{prefix}{dot}weight")
    sums: dict[int, torch.Tensor] = {}
    counts: dict[int, int] = {}

    def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["input"]
        x = x.reshape(-1, x.shape[-1])
        weight = id(module._parameters.get("qweight", module._parameters.get("weight")))
        sums[weight] = sums.get(weight, torch.zeros((), dtype=torch.float64)) + x.double().square().sum(0)
        counts[weight] = counts.get(weight, 0) + len(x)

    handles = [
        module.register_forward_pre_hook(watch, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        for batch in batches:
            if isinstance(batch, Mapping):
                model(**batch)
            else:
                model(*batch if isinstance(batch, (tuple, list)) else (batch,))
    finally:
        for handle in handles:
            handle.remove()
    entries = {
        name: (total / counts[weight]).float()
        for weight, total in sums.items()
        if counts[weight]
        for name in names.get(weight, ())
    }
    for name, values in entries.items():
        if not bool(torch.isfinite(values).all()):
            raise ValueError(f"{name}: the inputs of its layer hold NaN, infinity or numbers too large to square")
    if not entries:
        raise ValueError("no linear layer of the model was called with an input; expected batches that reach one")
    return entries


def save(path: str | os.PathLike[str], entries: Mapping[str, torch.Tensor]) -> None:
    """Write importances, as `collect` returns them, to a GGUF file that `read` reads.

    Args:
        path: the file; one that is there is replaced.
        entries: [K] by the name of the weight, finite and not negative.

    Raises:
        ValueError: `entries` is empty, or one of them does not fit; the message names it.
        ImportError: the package gguf is missing.
        OSError: the file cannot be written.
    """
    try:
        from gguf import GGUFWriter
    except ImportError as error:
        raise ImportError(f"ktlinear.imatrix.save needs the package gguf: {error}") from error
    if not entries:
        raise ValueError("entries is empty; expected at least one importance, as collect returns them")
    for name, values in entries.items():
        if values.dim() != 1 or not bool(torch.isfinite(values).all()) or bool((values < 0).any()):
            raise ValueError(
                f"entries: {name!r} has shape {list(values.shape)}; expected [K] of finite numbers, none negative"
            )
    writer = GGUFWriter(os.fspath(path), "imatrix")
    writer.add_type("imatrix")
    for name, values in entries.items():
        writer.add_tensor(f"{name}.in_sum2", values.float().numpy())
        writer.add_tensor(f"{name}.counts", torch.ones(1).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
