"""``python -m ktlinear quantize``: a safetensors model in, a quantized one of the same names out.

Which matrices are quantized, and to what, is decided as `ktlinear.patch` decides it: by planning on a model without
memory. For a folder of the Hugging Face layout that is the class that its config names, if transformers has it. For
anything else it is made from the names: a matrix ``X.weight`` is a linear layer, unless X is named like an embedding or
a router. `ktlinear.checkpoint` says how the result is stored.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn
from tqdm import tqdm

from . import imatrix as _imatrix
from ._types import check_quantized_types
from .checkpoint import (
    DTYPES,
    Entry,
    Header,
    QuantizedTensor,
    index_file,
    quantized_tensors,
    read_header,
    safetensors_files,
    type_metadata,
)
from .ops import WeightType, needs_importance, row_bytes
from .ops import weight_type as to_weight_type
from .patch import _plans, _progress, _unfit_values, format_table

__all__ = ["QuantizeReport", "QuantizeRow", "quantize_checkpoint"]

# What a matrix's rows are read, quantized and written in, so that memory does not depend on the model.
CHUNK_BYTES = 4 << 20

# Where only the names are known.
EMBEDDINGS = ("*embed*", "*.wte", "wte", "*.wpe", "wpe", "shared", "*.shared", "*.relative_attention_bias")
ROUTERS = ("*.gate", "*.router", "*.router.*", "*.shared_expert_gate")

# Weights in other formats; neither read nor copied.
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".onnx_data", ".gguf", ".ot", ".tflite")


@dataclass
class QuantizeRow:
    """What became of one tensor.

    Attributes:
        name: of the tensor.
        shape: logical, as in the source.
        before: its dtype in the source.
        after: its type in the result: a `WeightType` name, or `before` if it is kept.
        bytes_before, bytes_after: its size.
        error: of a quantized tensor, the root mean square of the differences relative to that of the values.
        note: why it was kept or got another type than asked for; "imatrix" if weighted by importance.
    """

    name: str
    shape: tuple[int, ...]
    before: str
    after: str
    bytes_before: int
    bytes_after: int
    error: float | None = None
    note: str = ""

    @property
    def bits(self) -> float:
        """Bits per weight in the result."""
        return 8 * self.bytes_after / max(1, math.prod(self.shape))


@dataclass
class QuantizeReport:
    """What `quantize_checkpoint` did, tensor by tensor; ``str()`` is a table of the matrices and a summary."""

    rows: list[QuantizeRow] = field(default_factory=list)
    planned_on: str = ""
    seconds: float = 0.0
    not_copied: list[str] = field(default_factory=list)
    unused_importances: list[str] = field(default_factory=list)

    @property
    def quantized(self) -> list[QuantizeRow]:
        """The tensors that were quantized."""
        return [row for row in self.rows if row.error is not None]

    @property
    def bits(self) -> float:
        """Bits per weight over all tensors."""
        return 8 * sum(r.bytes_after for r in self.rows) / max(1, sum(math.prod(r.shape) for r in self.rows))

    def __str__(self) -> str:
        # Norms and biases would be most of the lines.
        shown = [row for row in self.rows if row.error is not None or len(row.shape) > 1]
        table = [
            (
                row.name,
                "x".join(map(str, row.shape)),
                row.before,
                row.after if row.error is not None else "kept",
                f"{row.bits:.3f}",
                "" if row.error is None else f"{row.error:.4f}",
                row.note,
            )
            for row in shown
        ]
        before, after = (sum(getattr(r, name) for r in self.rows) / 1e6 for name in ("bytes_before", "bytes_after"))
        vectors = len(self.rows) - len(shown)
        note = f"{len(self.quantized)} quantized, {len(self.rows) - len(self.quantized)} kept"
        total = ("total", "", "", "", f"{self.bits:.3f}", "", f"{note}, {vectors} vectors (norms, biases) among them")
        header = ("tensor", "shape", "before", "after", "bits/weight", "error", "note")
        lines = [
            format_table(header, table, total, numbers=(4, 5)),
            f"{before:.1f} MB -> {after:.1f} MB in {self.seconds:.1f} s; planned on {self.planned_on}",
        ]
        if self.not_copied:
            lines.append(f"not copied: {', '.join(self.not_copied)}")
        if self.unused_importances:
            some = ", ".join(self.unused_importances[:3]) + (", ..." if len(self.unused_importances) > 3 else "")
            lines.append(f"{len(self.unused_importances)} entries of the imatrix belong to no quantized tensor: {some}")
        return "\n".join(lines)


def quantize_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    weight_type: WeightType | str | int = "Q4_K",
    *,
    rules: Mapping[str, WeightType | str | int | None] | None = None,
    imatrix: str | os.PathLike[str] | None = None,
) -> QuantizeReport:
    """Quantize a safetensors model, tensor by tensor, into a new file or folder.

    Linear layers get the types that `ktlinear.patch` gives them, with the same mixes, fallbacks and `rules`. Everything
    else is copied as it is: norms, biases and other vectors, convolutions, embeddings, unless a token table is tied to
    the output head or a rule names it. The files of a folder keep their names; what is not a weight is copied, and
    ``config.json`` gets the ``quantization_config`` by which transformers knows the model again.

    The result appears under its name when it is complete. Until then it lies beside it, under a temporary name, and is
    removed if anything goes wrong, an interrupt included.

    Args:
        source: a safetensors file, or a folder of the Hugging Face layout.
        target: a file or folder that does not exist yet.
        weight_type: a quantized `WeightType`, its name or its GGML id.
        rules: as for `ktlinear.patch`; names are those of the modules, without ``.weight``.
        imatrix: an importance matrix of llama.cpp (see `ktlinear.imatrix`).

    Returns:
        A report of every tensor.

    Raises:
        ValueError: an argument, or what the source holds, does not fit; the message says what is expected.
        FileExistsError, FileNotFoundError, OSError: of the files.
    """
    start = time.monotonic()
    source, target = Path(source), Path(target)
    check_quantized_types(weight_type, rules)
    files = safetensors_files(source)
    headers = {file: read_header(file) for file in files}
    _check_paths(source, target)
    if quantized_tensors(files):
        raise ValueError(f"{source}: it is quantized by ktlinear already")
    config = _read_config(source)
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method")
        raise ValueError(f"{source}: it is quantized already (quant_method {method!r}); expected a float model")

    entries = {name: entry for header in headers.values() for name, entry in header.tensors.items()}
    skeleton, names, planned_on = _skeleton(source, config, entries)
    types, notes = _choose(skeleton, names, entries, weight_type, rules)
    if not types:
        some = "; ".join(f"{name}: {note}" for name, note in list(notes.items())[:3])
        raise ValueError(f"{source}: there is nothing to quantize ({some or 'it has no matrix of floats'})")
    importances: dict[str, torch.Tensor] = {}
    report = QuantizeReport(planned_on=planned_on)
    if imatrix is not None:
        importances, report.unused_importances = _importances(imatrix, types, entries, config.get("model_type"))

    for name, tensor in types.items():
        if needs_importance(tensor.weight_type) and name not in importances:
            kind = tensor.weight_type.name
            raise ValueError(f"{name}: {kind} needs its importance; expected an imatrix that has it, or another type")

    layouts = {file: _Layout(header, types) for file, header in headers.items()}
    _check_space(target, sum(layout.size for layout in layouts.values()))
    with _Finished(target, folder=source.is_dir()) as place:
        with _progress("quantize", sum(entry.nbytes for entry in entries.values())) as bar:
            for file, layout in layouts.items():
                out = place / file.name if source.is_dir() else place
                report.rows += _write_file(file, out, headers[file], layout, importances, notes, bar)
        if source.is_dir():
            _write_index(source, place, report)
            report.not_copied = _copy_others(source, place, files)
            if config:
                config["quantization_config"] = _quantization_config(weight_type, rules)
                (place / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    order = {name: i for i, name in enumerate(entries)}
    report.rows.sort(key=lambda row: order[row.name])
    report.seconds = time.monotonic() - start
    return report


def _check_paths(source: Path, target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise FileExistsError(f"{target}: it exists already; remove it or choose another name")
    if not target.absolute().parent.is_dir():
        raise FileNotFoundError(f"{target.absolute().parent}: no such folder to write {target.name} into")
    if source.is_dir() and source.resolve() in target.resolve().parents:
        raise ValueError(f"{target}: it would lie inside the source, {source}; choose a place outside")


def _check_space(target: Path, needed: int) -> None:
    free = shutil.disk_usage(target.absolute().parent).free
    if free < needed:
        raise OSError(f"{target}: the result takes {needed / 1e6:.0f} MB, but only {free / 1e6:.0f} MB are free there")


def _read_config(source: Path) -> dict[str, Any]:
    path = source / "config.json"
    if not source.is_dir() or not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected an object, got {type(config).__name__}")
    return config


def _quantization_config(
    weight_type: WeightType | str | int, rules: Mapping[str, WeightType | str | int | None] | None
) -> dict[str, Any]:
    """What `ktlinear.KtConfig` writes, which needs transformers."""
    names = [[pattern, None if t is None else to_weight_type(t).name] for pattern, t in (rules or {}).items()]
    return {"quant_method": "ktlinear", "weight_type": to_weight_type(weight_type).name, "rules": names}


# Which tensors


def _skeleton(
    source: Path, config: Mapping[str, Any], entries: Mapping[str, Entry]
) -> tuple[nn.Module, Mapping[str, str], str]:
    """A model without memory, its parameters' names for the tensors that they are, and what it was made from."""
    architectures = config.get("architectures") or []
    made_from = "the names of the tensors"
    if architectures and config.get("model_type"):
        try:
            from transformers import AutoConfig

            from .integrations.transformers import parameter_names, transformers

            model_class = getattr(transformers, architectures[0])
            with torch.device("meta"):
                model = model_class(AutoConfig.from_pretrained(source))
            return model, parameter_names(model, entries), f"transformers' {architectures[0]}"
        except (ImportError, AttributeError, ValueError, TypeError, KeyError, OSError, RuntimeError) as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            made_from += f", since transformers does not make {architectures[0]}: {why}"
    return _from_names(entries), {name: name for name in entries}, made_from


def _from_names(entries: Mapping[str, Entry]) -> nn.Module:
    root = nn.Module()
    for name, entry in entries.items():
        prefix, _, attribute = name.rpartition(".")
        if attribute != "weight" or not prefix or len(entry.shape) != 2 or DTYPES.get(entry.dtype) not in _FLOATS:
            continue
        if any(fnmatchcase(prefix, pattern) for pattern in ROUTERS):
            continue
        n, k = entry.shape
        leaf: nn.Module
        if any(fnmatchcase(prefix, pattern) for pattern in EMBEDDINGS):
            leaf = nn.Embedding(n, k, device="meta")
        else:
            leaf = nn.Linear(k, n, bias=False, device="meta")
        parent = root
        *path, last = prefix.split(".")
        for part in path:
            if part not in parent._modules:
                parent._modules[part] = nn.Module()
            parent = parent._modules[part]  # type: ignore[assignment]
        parent._modules[last] = leaf
    return root


_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def _choose(
    skeleton: nn.Module,
    names: Mapping[str, str],
    entries: Mapping[str, Entry],
    weight_type: WeightType | str | int,
    rules: Mapping[str, WeightType | str | int | None] | None,
) -> tuple[dict[str, QuantizedTensor], dict[str, str]]:
    """What each tensor to be quantized becomes, and notes on matrices; `names` are those in the skeleton."""
    planned: dict[str, tuple[WeightType | None, str]] = {}
    for plan in _plans(skeleton, weight_type, rules):
        for name, _ in plan.members:
            planned[f"{name}.weight"] = (plan.weight_type, plan.note)
    known = dict(skeleton.named_parameters(remove_duplicate=False))
    embeddings = {name for name, module in skeleton.named_modules() if isinstance(module, nn.Embedding)}
    types, notes = {}, {}
    for name, entry in entries.items():
        if len(entry.shape) < 2:
            continue
        there = names.get(name, "")
        kind, note = planned.get(there, (None, "not a linear layer" if there else "no parameter of the model"))
        if there.removesuffix(".weight") in embeddings and there not in planned:
            note = "an embedding; a rule that names it quantizes it"
        if kind is not None and tuple(known[there].shape) != entry.shape:
            kind, note = None, f"the model has it as {list(known[there].shape)}"
        if kind is not None and DTYPES.get(entry.dtype) not in _FLOATS:
            kind, note = None, f"{entry.dtype} is not a type that can be quantized"
        if kind is not None:
            n, k = entry.shape
            types[name] = QuantizedTensor(kind, (n, k))
        notes[name] = note
    return types, notes


def _importances(
    path: str | os.PathLike[str],
    types: Mapping[str, QuantizedTensor],
    entries: Mapping[str, Entry],
    architecture: str | None,
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The importance of each quantized tensor that has one, and the entries that none of them uses."""
    everything = _imatrix.read(path)
    found = _imatrix.for_names(everything, types, architecture)
    if not found:
        raise ValueError(
            f"{path}: none of its {len(everything)} entries ({', '.join(list(everything)[:3])}, ...) belongs to a "
            f"tensor of the model ({', '.join(list(types)[:3])}, ...)"
        )
    for name, values in found.items():
        if values.shape != (types[name].shape[1],):
            raise ValueError(
                f"{path}: the importance of {name} has shape {list(values.shape)}; expected [{types[name].shape[1]}]"
            )
    used = {id(values) for values in found.values()}
    return found, [name for name, values in everything.items() if id(values) not in used]


# Files


class _Layout:
    """Where each tensor of an output file goes. All sizes are known beforehand, so that the header comes first."""

    def __init__(self, header: Header, types: Mapping[str, QuantizedTensor]) -> None:
        self.types = {name: types[name] for name in header.tensors if name in types}
        self.sizes = {name: entry.nbytes for name, entry in header.tensors.items()}
        for name, (kind, (n, k)) in self.types.items():
            self.sizes[name] = n * row_bytes(kind, k)

        def alignment(name: str) -> int:
            dtype = DTYPES.get(header.tensors[name].dtype)
            return 1 if name in self.types or dtype is None else dtype.itemsize

        # The format has no gaps; the widest types first, so that each tensor is aligned to its own.
        self.order = sorted(header.tensors, key=lambda name: (-alignment(name), name in self.types))
        values: dict[str, Any] = {"__metadata__": {**header.metadata, **type_metadata(self.types)}}
        offset = 0
        for name in self.order:
            entry = header.tensors[name]
            dtype, shape = entry.dtype, list(entry.shape)
            if name in self.types:
                dtype, shape = "U8", [shape[0], self.sizes[name] // max(1, shape[0])]
            values[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + self.sizes[name]]}
            offset += self.sizes[name]
        text = json.dumps(values, separators=(",", ":")).encode()
        self.header = text.ljust((len(text) + 7) // 8 * 8)
        self.size = 8 + len(self.header) + offset


class _Finished:
    """A path beside `target` to write to, which becomes `target` at the end, or is removed if that is not reached."""

    def __init__(self, target: Path, folder: bool) -> None:
        self.target, self.folder = target, folder
        self.temporary = target.absolute().parent / f".{target.name}.{os.getpid()}.partial"

    def __enter__(self) -> Path:
        if self.folder:
            self.temporary.mkdir()
        return self.temporary

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if kind is None:
                for path in [*self.temporary.rglob("*"), self.temporary] if self.folder else [self.temporary]:
                    _sync(path)
                # A rename would replace a file that has come in between, and an empty folder.
                if self.target.exists():
                    raise FileExistsError(f"{self.target}: it has come into being meanwhile")
                os.rename(self.temporary, self.target)
        finally:
            if self.folder:
                shutil.rmtree(self.temporary, ignore_errors=True)
            else:
                self.temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_file(
    source: Path,
    target: Path,
    header: Header,
    layout: _Layout,
    importances: Mapping[str, torch.Tensor],
    notes: Mapping[str, str],
    bar: tqdm,
) -> list[QuantizeRow]:
    rows = []
    with open(source, "rb") as reader, open(target, "xb") as writer:
        writer.write(len(layout.header).to_bytes(8, "little"))
        writer.write(layout.header)
        for name in layout.order:
            entry = header.tensors[name]
            bar.set_postfix_str(name, refresh=False)
            reader.seek(entry.offset)
            row = QuantizeRow(name, entry.shape, entry.dtype, entry.dtype, entry.nbytes, layout.sizes[name])
            row.note = notes.get(name, "")
            if name in layout.types:
                kind = layout.types[name].weight_type
                importance = importances.get(name)
                row.after = kind.name
                row.error = _quantize(reader, writer, name, entry, kind, importance, bar.update)
                if importance is not None:
                    row.note = ", ".join(filter(None, (row.note, "imatrix")))
            else:
                for start in range(0, entry.nbytes, CHUNK_BYTES):
                    writer.write(_read(reader, min(CHUNK_BYTES, entry.nbytes - start), name))
                    bar.update(min(CHUNK_BYTES, entry.nbytes - start))
            rows.append(row)
    return rows


def _read(reader: IO[bytes], count: int, name: str) -> bytearray:
    data = bytearray(count)
    if reader.readinto(data) != count:  # type: ignore[attr-defined]
        raise ValueError(f"{reader.name}: cut off within {name}")
    return data


def _quantize(
    reader: IO[bytes],
    writer: IO[bytes],
    name: str,
    entry: Entry,
    kind: WeightType,
    importance: torch.Tensor | None,
    advance: Callable[[int], Any],
) -> float:
    """Quantize one matrix, some rows at a time; returns the relative error."""
    n, k = entry.shape
    dtype = DTYPES[entry.dtype]
    step = max(1, CHUNK_BYTES // (4 * k)) if k else n
    differences = squares = 0.0
    for first in range(0, n, step):
        rows = min(step, n - first)
        nbytes = rows * k * dtype.itemsize
        weight = torch.frombuffer(_read(reader, nbytes, name), dtype=dtype).view(rows, k)
        reason = _unfit_values(weight)
        if reason is not None:
            raise ValueError(f"{name}: {reason}; the rule {name.removesuffix('.weight')!r} = none leaves it as it is")
        quantized = torch.ops.kt.quantize(weight, int(kind), importance)
        writer.write(quantized.numpy().data)
        values = torch.ops.kt.dequantize(quantized, int(kind), torch.float32)
        squares += float(torch.linalg.vector_norm(weight, dtype=torch.float32)) ** 2
        differences += float(torch.linalg.vector_norm(values.sub_(weight))) ** 2
        advance(nbytes)
    return math.sqrt(differences / squares) if squares else 0.0


def _write_index(source: Path, target: Path, report: QuantizeReport) -> None:
    index = index_file(source)
    if index is None:
        return
    values = json.loads(index.read_text())
    values["metadata"] = {**values.get("metadata", {}), "total_size": sum(row.bytes_after for row in report.rows)}
    (target / index.name).write_text(json.dumps(values, indent=2) + "\n")


def _copy_others(source: Path, target: Path, files: list[Path]) -> list[str]:
    """Copy what is not a weight: config, tokenizer, code. Returns the files that were left behind."""
    left = []
    for folder, folders, names in os.walk(source):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        here = Path(folder)
        for name in sorted(names):
            path = here / name
            relative = path.relative_to(source)
            if path in files or (target / relative).exists() or name.startswith("."):
                continue
            if path.suffix in (*OTHER_WEIGHTS, ".safetensors") or name.endswith(".index.json"):
                left.append(str(relative))
                continue
            (target / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / relative)
    return left
