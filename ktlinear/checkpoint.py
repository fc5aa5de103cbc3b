"""Quantized safetensors files: what they hold, and loading one into a model.

The convention, version 1. A quantized matrix [N, K] keeps its name (``model.layers.0.mlp.up_proj.weight``) and holds
its GGUF rows, U8 [N, row_bytes]. The file's metadata say what they are, since two types may have rows of one size::

    "ktlinear.version": "1"
    "ktlinear.tensors": '{"model.layers.0.mlp.up_proj.weight": {"type": "Q4_K", "shape": [1536, 576]}, ...}'

Every other tensor is stored as in any safetensors file. Of a model in several files, each describes at least its own.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from .nn import Embedding, Linear
from .ops import WeightType, row_bytes
from .patch import PatchReport, _convert, _holders, _obstacle, _places, _Plan, _progress

__all__ = ["QuantizedTensor", "load_quantized"]

VERSION = "1"
_VERSION_KEY, _TENSORS_KEY = "ktlinear.version", "ktlinear.tensors"

# safetensors' names of the types that torch has as well; tensors of any other are copied but not loaded.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

_LARGEST_HEADER = 100_000_000  # bytes; the format's own limit


class QuantizedTensor(NamedTuple):
    """What the bytes of a quantized tensor mean."""

    weight_type: WeightType
    shape: tuple[int, int]
    """[N, K], of the matrix."""


class Entry(NamedTuple):
    """A tensor of a safetensors file."""

    dtype: str
    """As the file names it: F32, BF16, U8, ..."""
    shape: tuple[int, ...]
    offset: int
    """In bytes from the start of the file."""
    nbytes: int


class Header(NamedTuple):
    """The header of a safetensors file."""

    tensors: dict[str, Entry]
    metadata: dict[str, str]


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read the header of a safetensors file and check that the file is as long as it says.

    Raises:
        ValueError: the file is no safetensors file, or damaged; the message names it.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER):
            raise ValueError(f"{path}: not a safetensors file, or cut off: its header would take {length} bytes")
        text = file.read(length)
    try:
        values = json.loads(text)
        metadata = values.pop("__metadata__", {})
        if not isinstance(metadata, dict):
            raise ValueError(f"its __metadata__ is {type(metadata).__name__}; expected an object")
        start, tensors = 8 + length, {}
        for name, value in values.items():
            begin, end = value["data_offsets"]
            tensors[name] = Entry(value["dtype"], tuple(value["shape"]), start + begin, end - begin)
            if not 0 <= begin <= end <= size - start:
                raise ValueError(f"tensor {name!r} takes the bytes {begin} to {end} of {size - start}; is it cut off?")
            dtype = DTYPES.get(value["dtype"])
            if dtype is not None and math.prod(value["shape"]) * dtype.itemsize != end - begin:
                raise ValueError(f"tensor {name!r} takes {end - begin} bytes, which is not its shape's size")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a safetensors file, or damaged: {error}") from None
    return Header(tensors, metadata)


def type_metadata(tensors: Mapping[str, QuantizedTensor]) -> dict[str, str]:
    """The metadata that describe `tensors` in a file."""
    described = {name: {"type": t.weight_type.name, "shape": list(t.shape)} for name, t in tensors.items()}
    return {_VERSION_KEY: VERSION, _TENSORS_KEY: json.dumps(described)}


def quantized_tensors(paths: Iterable[str | os.PathLike[str]]) -> dict[str, QuantizedTensor] | None:
    """What the metadata of safetensors files say of their quantized tensors; None if they do not say anything.

    Raises:
        ValueError: damaged metadata, or a version of the convention that is not known here.
    """
    tensors: dict[str, QuantizedTensor] = {}
    says = False
    for path in paths:
        metadata = read_header(path).metadata
        version = metadata.get(_VERSION_KEY)
        if version is None:
            continue
        if version != VERSION:
            raise ValueError(f"{path}: its ktlinear.version is {version!r}; this ktlinear reads {VERSION!r}")
        says = True
        try:
            for name, value in json.loads(metadata[_TENSORS_KEY]).items():
                n, k = value["shape"]
                tensors[name] = QuantizedTensor(WeightType[value["type"]], (int(n), int(k)))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: damaged metadata in {_TENSORS_KEY}: {error!r}") from None
    return tensors if says else None


def safetensors_files(path: str | os.PathLike[str]) -> list[Path]:
    """The safetensors files of a model: `path` itself, or those of a folder, by its index if it has one.

    Raises:
        ValueError: the folder has no such file, several without an index, or an index that names what is not there.
        OSError: `path` is not there.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    if not path.is_dir():
        return [path]
    index = index_file(path)
    if index is not None:
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{index}: not an index of safetensors files: {error!r}") from None
        for name in names:
            if Path(name).name != name or not (path / name).is_file():
                raise ValueError(f"{index}: it names {name!r}, which is no file of the folder")
        return [path / name for name in names]
    files = sorted(path.glob("*.safetensors"))
    if path / "model.safetensors" in files:
        files = [path / "model.safetensors"]
    if len(files) != 1:
        found = (
            "no *.safetensors file" if not files else "an index is missing, with " + ", ".join(f.name for f in files)
        )
        raise ValueError(f"{path}: {found}; expected a folder with one such file, or several and their index")
    return files


def index_file(folder: Path) -> Path | None:
    """The index of a model in several files."""
    indices = sorted(folder.glob("*.safetensors.index.json"))
    preferred = folder / "model.safetensors.index.json"
    return preferred if preferred in indices else indices[0] if indices else None


def load_quantized(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> PatchReport:
    """Load a quantized safetensors model (``python -m ktlinear quantize``) into `model`, in place.

    Each ``nn.Linear`` and ``nn.Embedding`` whose weight is quantized in the file is swapped for its counterpart in
    `ktlinear.nn`, as `ktlinear.patch` does, modules that it is tied to included. All other tensors are copied into the
    parameters and buffers of their names, in the model's dtype; `model` may be on the meta device. One tensor at a time
    is in memory beside the model.

    Args:
        model: changed in place.
        path: the file, or the folder of the Hugging Face layout.
        strict: every parameter and persistent buffer of the model has to be in the file, and everything in the file has
            to have its place in the model.

    Returns:
        A report of the modules that were swapped.

    Raises:
        TypeError: `model` is not an ``nn.Module``.
        ValueError: `path` is not such a file, or it does not fit the model. Nothing has been changed then.
        OSError: the file cannot be read.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    headers = {file: read_header(file) for file in safetensors_files(path)}
    entries = {name: entry for header in headers.values() for name, entry in header.tensors.items()}
    described = {name: t for name, t in (quantized_tensors(headers) or {}).items() if name in entries}
    if not described:
        raise ValueError(f"{path}: it describes no quantized tensor; load_state_dict loads what is not quantized")
    targets = _targets(model)
    problems = _misfits(model, targets, entries, described)
    if strict:
        problems += _unpaired(model, targets, entries)
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"{path} does not fit the model: {'; '.join(problems[:5])}{more}")

    holders, places = _holders(model), _places(model)
    groups: dict[str, list[Any]] = {}  # a quantized tensor -> the modules that are to hold it
    for name in described.keys() & targets.keys():
        members: list[Any] = [(module_name, module) for module_name, module, _ in holders[id(targets[name])]]
        for tied in (name, *(f"{module_name}.weight" for module_name, _ in members)):
            groups.setdefault(tied, members)
    # No reference is to keep alive what is swapped.
    swapped = {id(targets[name]) for name in described.keys() & targets.keys()}
    floats = {name: target for name, target in targets.items() if id(target) not in swapped}
    del holders, targets
    report = PatchReport()
    with _progress("load", sum(entry.nbytes for entry in entries.values())) as bar:
        for file, header in headers.items():
            for name, entry in header.tensors.items():
                if name in described and groups.get(name):
                    members = groups[name]
                    kind, nbytes = described[name].weight_type, _stored(members[0][1]).nbytes
                    plan = _Plan(members, kind, "", nbytes)
                    report.rows += _convert(model, plan, places, read_tensor(file, entry))
                    members.clear()  # a file may hold a tied weight under both its names
                elif name in floats:
                    _copy(floats[name], read_tensor(file, entry))
                bar.update(entry.nbytes)
    return report


def read_tensor(file: str | os.PathLike[str], entry: Entry) -> torch.Tensor:
    """A tensor of a safetensors file, in memory of its own."""
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    data = bytearray(entry.nbytes)
    with open(file, "rb") as stream:
        stream.seek(entry.offset)
        if stream.readinto(data) != entry.nbytes:
            raise ValueError(f"{file}: cut off while it was read")
    return torch.frombuffer(data, dtype=DTYPES[entry.dtype]).view(entry.shape)


def _targets(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers of `model`, a quantized weight under the name ``weight``."""
    targets: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        kept = {k: v for k, v in module._buffers.items() if k not in module._non_persistent_buffers_set}
        for name, tensor in (*module._parameters.items(), *kept.items()):
            if tensor is not None:
                name = "weight" if name == "qweight" and isinstance(module, (Linear, Embedding)) else name
                targets[f"{prefix}.{name}" if prefix else name] = tensor
    return targets


def _stored(module: nn.Module) -> torch.Tensor:
    return module._stored() if isinstance(module, (Linear, Embedding)) else cast(nn.Linear, module).weight


def _misfits(
    model: nn.Module,
    targets: Mapping[str, torch.Tensor],
    entries: Mapping[str, Entry],
    described: Mapping[str, QuantizedTensor],
) -> list[str]:
    """What of the file cannot be put into its place in `model`, and why."""
    problems = []
    for name, entry in entries.items():
        if name not in targets:
            continue
        prefix, _, attribute = name.rpartition(".")
        module = model.get_submodule(prefix)
        ours = isinstance(module, (Linear, Embedding))
        tensor = described.get(name)
        if tensor is None:
            if ours and module._type is not None and attribute == "weight":
                problems.append(f"{name} is {entry.dtype}, but {prefix} is a quantized {type(module).__name__}")
            elif entry.shape != tuple(targets[name].shape):
                problems.append(f"{name} has shape {list(entry.shape)}, but {list(targets[name].shape)} in the model")
            elif entry.dtype not in DTYPES:
                problems.append(f"{name} is {entry.dtype}, which cannot be loaded")
            continue
        n, k = tensor.shape
        holders = [m for m in model.modules() if any(p is targets[name] for p in m._parameters.values())]
        reasons = [_obstacle(m, "weight") for m in holders if type(m) not in (Linear, Embedding)]
        reason = next((r for r in reasons if r is not None), None)
        if reason is not None or attribute != "weight":
            problems.append(f"{name} is {tensor.weight_type.name}, but {prefix} cannot hold it: {reason or attribute}")
        elif tuple(shape := cast(nn.Linear, module).weight.shape) != (n, k):
            problems.append(f"{name} has shape [{n}, {k}], but {list(shape)} in the model")
        elif entry.dtype != "U8" or entry.shape != (n, row_bytes(tensor.weight_type, k)):
            problems.append(f"{name} is {entry.dtype} {list(entry.shape)}, not {tensor.weight_type.name} [{n}, {k}]")
    return problems


def _unpaired(model: nn.Module, targets: Mapping[str, torch.Tensor], entries: Mapping[str, Entry]) -> list[str]:
    """What only one of the two has. A tied weight need be in the file only once."""
    present = {id(targets[name]) for name in entries.keys() & targets.keys()}
    # Older files hold buffers that the model has since come to make by itself.
    buffers = {name for name, _ in model.named_buffers()}
    problems = [f"the model has no {name}" for name in entries if name not in targets and name not in buffers]
    problems += [f"the file has no {name}" for name, target in targets.items() if id(target) not in present]
    return [f"{problem} (strict=False does without)" for problem in problems]


@torch.no_grad()
def _copy(target: torch.Tensor, tensor: torch.Tensor) -> None:
    if target.is_meta:
        # The contents are exchanged, not the parameter, so that whatever is tied to it stays so.
        new = tensor.to(target.dtype)
        is_parameter = isinstance(target, nn.Parameter)
        torch.utils.swap_tensors(target, nn.Parameter(new, target.requires_grad) if is_parameter else new)
    else:
        target.copy_(tensor)
