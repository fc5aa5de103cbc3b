"""python -m ktlinear quantize: what is written, what loads it again, and that a failure leaves nothing."""

from __future__ import annotations

import json
import math
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import ktlinear
from ktlinear import checkpoint, imatrix
from ktlinear import quantize as cli
from ktlinear.__main__ import main
from ktlinear.nn import Embedding, Linear
from ktlinear.quantize import quantize_checkpoint

SHAPES = {
    "embed_tokens": (50, 256),
    "layers.0.up": (13, 256),
    "layers.0.odd": (64, 96),
    "layers.0.none": (5, 33),
    "head": (1, 256),
}


class Model(nn.Module):
    """K that each type's block divides, that only 32 divides, and that none does; rows few and odd."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(*SHAPES["embed_tokens"], dtype=dtype)
        self.layers = nn.ModuleList([nn.Module()])
        for name in ("up", "odd", "none"):
            n, k = SHAPES[f"layers.0.{name}"]
            self.layers[0].add_module(name, nn.Linear(k, n, bias=name == "up", dtype=dtype))
        self.layers[0].add_module("norm", nn.LayerNorm(96, dtype=dtype))
        self.layers[0].add_module("conv", nn.Conv1d(32, 2, 3, dtype=dtype))
        self.head = nn.Linear(256, 1, bias=False, dtype=dtype)
        self.register_buffer("steps", torch.arange(3))


def saved(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    state = Model(dtype).state_dict()
    save_file(state, path, metadata={"format": "pt", "kept": "too"})
    return state


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


def test_a_kept_embedding_says_how_to_quantize_it(tmp_path):
    saved(tmp_path / "in")
    report = quantize_checkpoint(tmp_path / "in", tmp_path / "out", "Q8_0")
    (row,) = [row for row in report.rows if row.name == "embed_tokens.weight"]
    assert row.error is None and row.note == "an embedding; a rule that names it quantizes it"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_file_keeps_its_names_and_holds_the_rows(tmp_path, dtype, monkeypatch):
    monkeypatch.setattr(cli, "CHUNK_BYTES", 5000)  # several chunks a tensor
    before = saved(tmp_path / "in.safetensors", dtype)
    report = quantize_checkpoint(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "Q8_0")
    after = load_file(tmp_path / "out.safetensors")
    assert set(after) == set(before)
    quantized = {"layers.0.up.weight", "layers.0.odd.weight", "head.weight"}
    described = json.loads(metadata(tmp_path / "out.safetensors")["ktlinear.tensors"])
    assert described == {name: {"type": "Q8_0", "shape": list(before[name].shape)} for name in quantized}
    assert metadata(tmp_path / "out.safetensors")["ktlinear.version"] == "1"
    assert metadata(tmp_path / "out.safetensors")["kept"] == "too"
    for name, tensor in before.items():
        if name in quantized:
            rows = gguf.quantize(tensor.float().numpy(), gguf.GGMLQuantizationType.Q8_0)
            assert after[name].dtype == torch.uint8 and np.array_equal(after[name].numpy(), rows)
            values = gguf.dequantize(rows, gguf.GGMLQuantizationType.Q8_0)
            error = np.linalg.norm(values - tensor.float().numpy()) / np.linalg.norm(tensor.float().numpy())
            (row,) = [r for r in report.rows if r.name == name]
            assert row.error == pytest.approx(error, rel=1e-4) and row.bits == 8.5 and row.after == "Q8_0"
        else:
            assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor)
    assert {r.name for r in report.quantized} == quantized
    assert [r.name for r in report.rows] == list(checkpoint.read_header(tmp_path / "in.safetensors").tensors)
    bits = 8 * sum(t.nbytes for t in after.values()) / sum(t.numel() for t in before.values())
    assert report.bits == pytest.approx(bits)


def test_fallback_rules_and_report(tmp_path):
    saved(tmp_path / "in.safetensors")
    rules = {"embed_tokens": "Q6_K", "head": None}
    report = quantize_checkpoint(tmp_path / "in.safetensors", tmp_path / "out", "Q4_K", rules=rules)
    after = {row.name.removesuffix(".weight"): row.after for row in report.rows if row.name.endswith("weight")}
    assert after == {
        "embed_tokens": "Q6_K",
        "layers.0.up": "Q4_K",
        "layers.0.odd": "Q5_0",
        "layers.0.none": "F32",
        "layers.0.norm": "F32",
        "layers.0.conv": "F32",
        "head": "F32",
    }
    lines = {line.split()[0]: line for line in str(report).splitlines()}
    assert "Q4_K does not divide K = 96" in lines["layers.0.odd.weight"] and "5.500" in lines["layers.0.odd.weight"]
    assert "K = 33" in lines["layers.0.none.weight"] and "kept" in lines["layers.0.none.weight"]
    assert "rule 'head'" in lines["head.weight"] and "not a linear layer" in lines["layers.0.conv.weight"]
    assert "layers.0.norm.weight" not in lines and "3 quantized, 8 kept, 5 vectors" in lines["total"]
    assert f"{report.bits:.3f}" in lines["total"]


@pytest.mark.parametrize("skeleton", ["real", "meta", "patched"])
def test_load_quantized_gives_what_patch_gives(tmp_path, skeleton):
    model = Model()
    save_file(model.state_dict(), tmp_path / "in.safetensors")
    quantize_checkpoint(tmp_path / "in.safetensors", tmp_path / "out", "Q4_K", rules={"embed_tokens": "Q6_K"})
    with torch.device("meta" if skeleton == "meta" else "cpu"):
        other = Model()
    if skeleton == "patched":
        ktlinear.patch(other, "Q4_0", rules={"*": "Q4_0"})
    report = ktlinear.load_quantized(other, tmp_path / "out")
    ktlinear.patch(model, "Q4_K", rules={"embed_tokens": "Q6_K"})
    expected, state = model.state_dict(), other.state_dict()
    assert set(state) == set(expected) and all(torch.equal(state[name], expected[name]) for name in expected)
    assert {row.name: row.after for row in report.rows} == {
        "embed_tokens": "Q6_K",
        "layers.0.up": "Q4_K",
        "layers.0.odd": "Q5_0",
        "head": "Q4_K",
    }
    assert isinstance(other.embed_tokens, Embedding) and other.layers[0].up.packed
    x = torch.randn(3, 256)
    assert torch.equal(other.layers[0].up(x), model.layers[0].up(x))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 64, padding_idx=2)
        self.first = nn.Linear(64, 8)
        self.again = self.first
        self.norm, self.copy = nn.LayerNorm(8), nn.LayerNorm(8)
        self.copy.weight = self.norm.weight
        self.head = nn.Linear(64, 40, bias=True)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("names", [("embed",), ("head",), ("embed", "head")])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_weights_stay_tied(tmp_path, names, device):
    source = Tied()
    state = {name: t.clone() for name, t in source.state_dict().items() if "embed" not in name and "head.w" not in name}
    del state["again.weight"], state["again.bias"], state["copy.weight"]
    save_file({**state, **{f"{name}.weight": source.embed.weight.data.clone() for name in names}}, tmp_path / "in")
    rules = {"embed": "Q8_0"} if "embed" in names else None
    quantize_checkpoint(tmp_path / "in", tmp_path / "out", "Q8_0", rules=rules)
    with torch.device(device):
        model = Tied()
    ktlinear.load_quantized(model, tmp_path / "out")
    assert model.embed.qweight is model.head.qweight and model.again is model.first
    assert model.norm.weight is model.copy.weight and torch.equal(model.copy.weight, source.norm.weight)
    rows = gguf.quantize(source.embed.weight.detach().numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(model.state_dict()["head.qweight"].numpy(), rows)
    assert torch.equal(model.head.bias, source.head.bias) and model.embed.padding_idx == 2


def test_load_quantized_says_what_does_not_fit(tmp_path):
    saved(tmp_path / "in.safetensors")
    quantize_checkpoint(tmp_path / "in.safetensors", tmp_path / "out", "Q8_0")

    def refuses(change, message, error=ValueError, path="out", **options):
        model = Model()
        change(model)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(error, match=message):
            ktlinear.load_quantized(model, tmp_path / path, **options)
        after = model.state_dict()
        assert set(after) == set(before) and all(torch.equal(after[name], before[name]) for name in before)

    refuses(
        lambda m: setattr(m, "head", nn.Linear(256, 2, bias=False)), r"head.weight has shape \[1, 256\].*\[2, 256\]"
    )
    refuses(lambda m: setattr(m, "head", nn.Bilinear(1, 1, 1)), "head.weight is Q8_0.*type is Bilinear")
    refuses(lambda m: setattr(m, "extra", nn.Linear(2, 2)), "the file has no extra.weight .strict=False")
    refuses(lambda m: delattr(m, "head"), "the model has no head.weight")
    refuses(lambda m: m.register_buffer("steps", torch.arange(4)), r"steps has shape \[3\], but \[4\]")
    refuses(lambda m: ktlinear.patch(m, rules={"embed_tokens": "Q8_0"}), "embed_tokens.weight is F32.*Embedding")
    refuses(lambda m: None, "describes no quantized tensor", path="in.safetensors")
    refuses(lambda m: None, "no such file", FileNotFoundError, path="nothing")
    with pytest.raises(TypeError, match="model.*str"):
        ktlinear.load_quantized("model", tmp_path / "out")

    model = Model()
    model._non_persistent_buffers_set.add("steps")  # as with position_ids, which old checkpoints hold
    ktlinear.load_quantized(model, tmp_path / "out")
    assert isinstance(model.head, Linear)

    model = Model()
    model.extra = nn.Linear(2, 2)
    del model.head
    kept = model.extra.weight.detach().clone()
    ktlinear.load_quantized(model, tmp_path / "out", strict=False)
    assert isinstance(model.layers[0].up, Linear) and torch.equal(model.extra.weight, kept)


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("ktlinear.version", "2", "ktlinear.version is '2'; this ktlinear reads '1'"),
        ("ktlinear.tensors", "{", "damaged metadata"),
        ("ktlinear.tensors", '{"head.weight": {"type": "Q9_9", "shape": [1, 256]}}', "damaged metadata.*Q9_9"),
        ("ktlinear.tensors", '{"head.weight": {"type": "Q8_0", "shape": [256]}}', "damaged metadata"),
        ("ktlinear.tensors", '{"head.weight": {"type": "Q4_0", "shape": [1, 256]}}', "head.weight is U8.*not Q4_0"),
    ],
)
def test_damaged_metadata(tmp_path, key, value, message):
    saved(tmp_path / "in.safetensors")
    quantize_checkpoint(tmp_path / "in.safetensors", tmp_path / "out", "Q8_0")
    save_file(load_file(tmp_path / "out"), tmp_path / "bad", metadata={**metadata(tmp_path / "out"), key: value})
    with pytest.raises(ValueError, match=message):
        ktlinear.load_quantized(Model(), tmp_path / "bad")


NO_METADATA = struct.pack("<Q", 22) + b'{"__metadata__": null}'


@pytest.mark.parametrize(
    "content", [b"", b"\x01", b"\xff" * 64, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 4), NO_METADATA]
)
def test_what_is_no_safetensors_file(tmp_path, content):
    (tmp_path / "in").write_bytes(content)
    with pytest.raises(ValueError, match="in: not a safetensors file"):
        quantize_checkpoint(tmp_path / "in", tmp_path / "out")
    assert os.listdir(tmp_path) == ["in"]


def test_a_cut_off_file(tmp_path):
    saved(tmp_path / "in")
    whole = (tmp_path / "in").read_bytes()
    (tmp_path / "in").write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="cut off"):
        quantize_checkpoint(tmp_path / "in", tmp_path / "out")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A model in two files with their index, a tokenizer, and weights in another format."""
    path = tmp_path / "model"
    (path / "1_Pooling").mkdir(parents=True)
    (path / ".cache").mkdir()
    state = Model(torch.bfloat16).state_dict()
    names = list(state)
    shards = {"a-1.safetensors": names[:4], "a-2.safetensors": names[4:]}
    for file, part in shards.items():
        save_file({name: state[name] for name in part}, path / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    index = {"metadata": {"total_size": sum(t.nbytes for t in state.values())}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text('{"model_type": "none-such", "architectures": ["NoneSuch"]}')
    for name in ("tokenizer.json", "1_Pooling/config.json", "pytorch_model.bin", "other.safetensors", ".cache/x"):
        (path / name).write_text("{}")
    return path


def test_a_folder_of_shards(folder, tmp_path):
    out = tmp_path / "out"
    report = quantize_checkpoint(folder, out, "Q8_0")
    assert sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()) == [
        "1_Pooling/config.json",
        "a-1.safetensors",
        "a-2.safetensors",
        "config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert report.not_copied == ["other.safetensors", "pytorch_model.bin"] and "NoneSuch" in report.planned_on
    index = json.loads((out / "model.safetensors.index.json").read_text())
    tensors = {}
    for name in ("a-1.safetensors", "a-2.safetensors"):
        part = load_file(out / name)
        assert all(index["weight_map"][key] == name for key in part)
        tensors |= part
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "ktlinear", "weight_type": "Q8_0", "rules": []}
    assert config["model_type"] == "none-such"
    model = Model(torch.bfloat16)
    ktlinear.load_quantized(model, out)
    assert torch.equal(model.state_dict()["head.qweight"], tensors["head.weight"])
    with pytest.raises(ValueError, match="quantized by ktlinear already"):
        quantize_checkpoint(out, tmp_path / "twice")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "not an index"),
        (lambda f: (f / "model.safetensors.index.json").unlink(), "an index is missing, with a-1.safetensors"),
        (lambda f: (f / "a-2.safetensors").unlink(), "names 'a-2.safetensors', which is no file"),
        (lambda f: (f / "config.json").write_text("{"), "config.json: not JSON"),
        (lambda f: (f / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}'), "'fp8'"),
        (lambda f: [p.unlink() for p in f.glob("*.safetensors*")], "no \\*.safetensors file"),
    ],
)
def test_folders_that_cannot_be_read(folder, tmp_path, change, message):
    change(folder)
    with pytest.raises(ValueError, match=message):
        quantize_checkpoint(folder, tmp_path / "out")
    assert os.listdir(tmp_path) == ["model"]


def test_arguments_are_refused(folder, tmp_path):
    def refuses(message, *arguments, error=ValueError, **options):
        with pytest.raises(error, match=message):
            quantize_checkpoint(*arguments, **options)
        assert sorted(os.listdir(tmp_path)) == ["model"] and sorted(os.listdir(folder)) == files

    files, out = sorted(os.listdir(folder)), tmp_path / "out"
    refuses("weight_type is 'Q9_9'.*Q4_K", folder, out, "Q9_9")
    refuses("BF16 is no type to quantize to; expected one of.*Q4_K", folder, out, "BF16")
    refuses("rules\\['head'\\]: F16 is no type", folder, out, rules={"head": "F16"})
    refuses("head.weight: IQ1_S needs its importance; expected an imatrix", folder, out, rules={"head": "IQ1_S"})
    refuses("rules: 'heads' matches no", folder, out, rules={"heads": None})
    refuses("exists already", folder, folder, error=FileExistsError)
    refuses("no such folder", folder, tmp_path / "a" / "b", error=FileNotFoundError)
    refuses("no such file or folder", tmp_path / "none", out, error=FileNotFoundError)
    refuses("inside the source", folder, folder / "1_Pooling" / "out")
    everything = {"head": None, "layers.*": None}
    refuses("nothing to quantize.*rule", folder, out, rules=everything)


def test_values_that_no_type_holds(tmp_path):
    state = saved(tmp_path / "in")
    state["head.weight"][0, 7] = float("nan")
    save_file(state, tmp_path / "in")
    with pytest.raises(ValueError, match="head.weight.*nan.*'head' = none"):
        quantize_checkpoint(tmp_path / "in", tmp_path / "out", "Q8_0")
    assert os.listdir(tmp_path) == ["in"]
    quantize_checkpoint(tmp_path / "in", tmp_path / "out", "Q8_0", rules={"head": None})
    assert math.isnan(load_file(tmp_path / "out")["head.weight"][0, 7])


def test_empty_matrices_and_foreign_types_are_copied(tmp_path):
    state = {
        "a.weight": torch.randn(3, 32),
        "empty.weight": torch.empty(0, 32),
        "wide.weight": torch.randn(3, 32).double(),
    }
    save_file(state, tmp_path / "in")
    report = quantize_checkpoint(tmp_path / "in", tmp_path / "out", "Q8_0")
    after = load_file(tmp_path / "out")
    assert [r.name for r in report.quantized] == ["a.weight"]
    assert after["empty.weight"].shape == (0, 32) and torch.equal(after["wide.weight"], state["wide.weight"])


def test_a_full_disk_leaves_nothing(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(cli.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(OSError, match="takes 0 MB, but only 0 MB are free"):
        quantize_checkpoint(folder, tmp_path / "out", "Q8_0")
    monkeypatch.undo()

    def full(*arguments):
        raise OSError(28, "No space left on device")

    for place in ("_quantize", "_copy_others", "_sync"):
        with monkeypatch.context() as patched:
            patched.setattr(cli, place, full)
            with pytest.raises(OSError, match="No space left"):
                quantize_checkpoint(folder, tmp_path / "out", "Q8_0")
        assert os.listdir(tmp_path) == ["model"]


def test_a_target_that_comes_into_being_meanwhile_is_kept(tmp_path, monkeypatch):
    saved(tmp_path / "in")
    monkeypatch.setattr(cli, "_sync", lambda path: (tmp_path / "out").write_text("mine"))
    with pytest.raises(FileExistsError, match="meanwhile"):
        quantize_checkpoint(tmp_path / "in", tmp_path / "out", "Q8_0")
    assert (tmp_path / "out").read_text() == "mine" and sorted(os.listdir(tmp_path)) == ["in", "out"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing(tmp_path, number):
    save_file({f"layers.{i}.up.weight": torch.randn(512, 2048) for i in range(200)}, tmp_path / "in")
    command = [sys.executable, "-m", "ktlinear", "quantize", str(tmp_path / "in"), str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(".out.*.partial")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    assert list(tmp_path.glob(".out.*.partial")), process.communicate()
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1 and "interrupted; there is no" in errors
    assert os.listdir(tmp_path) == ["in"]


def test_memory_does_not_grow_with_the_model(tmp_path):
    """Eight matrices of 24 MB: at no time is more than two of them in memory."""
    save_file({f"layers.{i}.up.weight": torch.randn(1536, 4096) for i in range(8)}, tmp_path / "in")
    script = """
import sys
import ktlinear
from ktlinear.quantize import quantize_checkpoint

def memory(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024

quantize_checkpoint(sys.argv[2], sys.argv[1] + "/warm-up", "Q8_0")
open("/proc/self/clear_refs", "w").write("5")
before = memory("VmRSS:")
quantize_checkpoint(sys.argv[1] + "/in", sys.argv[1] + "/out", "Q8_0")
print(memory("VmHWM:") - before)
"""
    save_file({"layers.0.up.weight": torch.randn(8, 256)}, tmp_path / "small")
    command = [sys.executable, "-c", script, str(tmp_path), str(tmp_path / "small")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if "clear_refs" in run.stderr:
        pytest.skip("the peak of this process's memory cannot be reset")
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 2 * 1536 * 4096 * 4 + (4 << 20)


def test_the_command(tmp_path, monkeypatch, capsys):
    def run(*arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["ktlinear", "quantize", *map(str, arguments)])
        main()

    saved(tmp_path / "in.safetensors")
    run(tmp_path / "in.safetensors", tmp_path / "out", "--type", "q6_k", "--rule", "head=none", "--rule", "*odd=Q4_0")
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert lines["layers.0.up.weight"][3:5] == ["Q6_K", "6.562"] and lines["layers.0.odd.weight"][3] == "Q4_0"
    assert lines["head.weight"][3] == "kept" and lines["written"][-1] == str(tmp_path / "out")
    for arguments, message in [
        ((tmp_path / "in.safetensors", tmp_path / "out"), "out: it exists already"),
        ((tmp_path / "none", tmp_path / "new"), "none: no such file or folder"),
        ((tmp_path / "in.safetensors", tmp_path / "new", "--type", "Q4_Z"), "'Q4_Z'; expected one of"),
        ((tmp_path / "in.safetensors", tmp_path / "new", "--rule", "head"), "'head' is not PATTERN=TYPE"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            run(*arguments)
        assert stopped.value.code and message in f"{stopped.value.code} {capsys.readouterr().err}"
    assert sorted(os.listdir(tmp_path)) == ["in.safetensors", "out"]


# Importance matrices


def write_gguf(path: Path, entries: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    writer = gguf.GGUFWriter(path, "imatrix")
    writer.add_type("imatrix")
    for name, (sums, counts) in entries.items():
        writer.add_tensor(f"{name}.in_sum2", sums.astype(np.float32))
        writer.add_tensor(f"{name}.counts", counts.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def legacy(entries: dict[str, tuple[int, np.ndarray]]) -> bytes:
    data = struct.pack("<i", len(entries))
    for name, (calls, values) in entries.items():
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, len(values))
        data += values.astype("<f4").tobytes()
    return data + struct.pack("<ii", 7, 4) + b"text"


def test_both_kinds_of_importance_matrix(tmp_path):
    means = np.random.default_rng(0).random(256) + 0.1
    experts = np.random.default_rng(1).random((3, 32))
    nothing = (np.zeros(32), np.zeros(1))
    write_gguf(
        tmp_path / "new",
        {
            "blk.0.ffn_up.weight": (means * 12, np.array([12.0])),
            "blk.0.ffn_up_exps.weight": (experts * 5, np.array([[5.0]] * 3)),
            "blk.1.ffn_up.weight": nothing,
        },
    )
    (tmp_path / "old").write_bytes(
        legacy({"blk.0.ffn_up.weight": (4, means * 4), "blk.0.attn_q.weight": (0, np.ones(8)), "none": (3, np.ones(0))})
    )
    new, old = imatrix.read(tmp_path / "new"), imatrix.read(tmp_path / "old")
    assert set(new) == {"blk.0.ffn_up.weight", "blk.0.ffn_up_exps.weight"}
    for entries in (new, old):
        np.testing.assert_allclose(entries["blk.0.ffn_up.weight"].numpy(), means, rtol=1e-6)
    np.testing.assert_allclose(new["blk.0.ffn_up_exps.weight"].numpy(), experts, rtol=1e-6)
    assert "blk.0.attn_q.weight" not in old


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "neither a GGUF file nor an imatrix.dat"),
        (b"abc", "neither a GGUF"),
        (b"\xff" * 40, "an importance matrix without entries"),
        (struct.pack("<ii", 1, -5), "neither a GGUF"),
        (struct.pack("<ii", 1, 3), "neither a GGUF"),
        (legacy({"a": (1, np.ones(8))})[:30], "neither a GGUF"),
        (struct.pack("<i", 0), "without entries"),
        (legacy({"a": (1, np.array([1.0, -1.0]))}), "'a' holds negative"),
        (legacy({"a": (1, np.array([1.0, np.nan]))}), "'a' holds negative"),
    ],
)
def test_damaged_importance_matrices(tmp_path, content, message):
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(ValueError, match=f"bad: .*{message}"):
        imatrix.read(tmp_path / "bad")


def test_a_model_is_no_importance_matrix(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model", "llama")
    writer.add_tensor("token_embd.weight", np.ones((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="no importance matrix"):
        imatrix.read(tmp_path / "model")


@pytest.mark.parametrize(
    "architecture, name, theirs",
    [
        ("llama", "model.layers.11.self_attn.q_proj.weight", "blk.11.attn_q.weight"),
        ("mistral", "model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
        (None, "model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
        ("gemma3_text", "model.layers.3.mlp.gate_proj.weight", "blk.3.ffn_gate.weight"),
        ("qwen3", "lm_head.weight", "output.weight"),
        ("qwen3", "model.embed_tokens.weight", "token_embd.weight"),
        ("qwen3", "model.embed_tokens.weight", "output.weight"),
        ("bert", "encoder.layer.0.attention.self.query.weight", "blk.0.attn_q.weight"),
        ("llama", "a.b.weight", "a.b.weight"),
    ],
)
def test_names_of_importances(architecture, name, theirs):
    values = torch.ones(4)
    found = imatrix.for_names(
        {theirs: values, "blk.99.attn_q.weight": torch.zeros(4)}, [name, "x.weight"], architecture
    )
    assert list(found) == [name] and found[name] is values


def test_an_importance_matrix_that_does_not_fit(tmp_path):
    saved(tmp_path / "in")
    for entries, message in [
        ({"blk.0.ffn_up.weight": (1, np.ones(256))}, "none of its 1 entries .blk.0.ffn_up.weight"),
        ({"layers.0.up.weight": (1, np.ones(255))}, r"layers.0.up.weight has shape \[255\]; expected \[256\]"),
    ]:
        (tmp_path / "imatrix").write_bytes(legacy(entries))
        with pytest.raises(ValueError, match=message):
            quantize_checkpoint(tmp_path / "in", tmp_path / "out", "Q8_0", imatrix=tmp_path / "imatrix")
        assert not (tmp_path / "out").exists()


def test_importances_reach_the_quantizer(tmp_path, monkeypatch):
    """Each matrix gets its own, and one without an entry none."""
    saved(tmp_path / "in")
    values = np.random.default_rng(0).random(256) + 0.5
    (tmp_path / "imatrix").write_bytes(
        legacy({"layers.0.up.weight": (2, values * 2), "blk.7.attn_q.weight": (1, values)})
    )
    seen, quantize = {}, torch.ops.kt.quantize

    def recording(weight, weight_type, importance):
        seen[tuple(weight.shape)] = importance
        return quantize(weight, weight_type)

    monkeypatch.setattr(torch.ops.kt, "quantize", recording)
    report = quantize_checkpoint(tmp_path / "in", tmp_path / "out", "Q8_0", imatrix=tmp_path / "imatrix")
    np.testing.assert_allclose(seen.pop((13, 256)).numpy(), values, rtol=1e-6)
    assert set(seen.values()) == {None} and set(seen) == {(64, 96), (1, 256)}
    assert {row.name for row in report.rows if "imatrix" in row.note} == {"layers.0.up.weight"}
    assert "1 entries of the imatrix belong to no quantized tensor: blk.7.attn_q.weight" in str(report)


def test_the_header_reader_is_safetensors_own(tmp_path):
    saved(tmp_path / "in", torch.bfloat16)
    header = checkpoint.read_header(tmp_path / "in")
    with safe_open(tmp_path / "in", "pt") as file:
        assert set(header.tensors) == set(file.keys()) and header.metadata == file.metadata()
        for name, entry in header.tensors.items():
            assert list(entry.shape) == file.get_slice(name).get_shape()
            assert torch.equal(checkpoint.read_tensor(tmp_path / "in", entry), file.get_tensor(name))
