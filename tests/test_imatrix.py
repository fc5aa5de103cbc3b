"""ktlinear.imatrix.collect and save: the mean squares of the inputs, and the file that quantize reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import small_llama
from safetensors.torch import save_file
from torch import nn

import ktlinear
from ktlinear import imatrix
from ktlinear.quantize import quantize_checkpoint


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.unused = nn.Linear(64, 256), nn.Linear(256, 64, bias=False), nn.Linear(64, 3)
        self.again = nn.Linear(64, 256)
        self.again.weight = self.up.weight

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.again(self.down(input=self.up(x * scale).relu()))


def test_mean_squares_over_all_batches() -> None:
    model = Model()
    # Batches of different lengths: each token counts once. Tied layers share their sums.
    batches = [torch.randn(2, 3, 64), (torch.randn(5, 64), 2.0), {"x": torch.randn(64), "scale": 0.5}]
    entries = imatrix.collect(model, batches)
    assert set(entries) == {"up.weight", "down.weight", "again.weight"}
    x = torch.cat([batches[0].reshape(-1, 64), batches[1][0] * 2, batches[2]["x"][None] * 0.5]).double()
    double = Model().double()
    double.load_state_dict(model.state_dict())
    hidden = double.up(x).relu()
    expected = torch.cat([x, double.down(hidden)]).square().mean(0)
    torch.testing.assert_close(entries["up.weight"].double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entries["down.weight"].double(), hidden.square().mean(0), rtol=1e-5, atol=1e-6)
    assert torch.equal(entries["again.weight"], entries["up.weight"]) and entries["up.weight"].dtype == torch.float32
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_quantized_and_fused_model_gives_the_same_names() -> None:
    model = small_llama(tie_word_embeddings=True).eval()
    ids = torch.randint(97, (2, 16))
    expected = imatrix.collect(model, [ids])
    assert torch.equal(expected["lm_head.weight"], expected["model.embed_tokens.weight"])
    ktlinear.patch(model, "Q8_0", fuse=True)
    entries = imatrix.collect(model, [{"input_ids": ids}])
    assert entries.keys() == expected.keys()
    for name, values in entries.items():
        torch.testing.assert_close(values, expected[name], rtol=0.1, atol=0.1 * float(expected[name].mean()))


def test_what_is_saved_is_what_quantize_reads(tmp_path: Path) -> None:
    model = Model()
    entries = imatrix.collect(model, [torch.randn(9, 64)])
    imatrix.save(tmp_path / "imatrix.gguf", entries)
    again = imatrix.read(tmp_path / "imatrix.gguf")
    assert again.keys() == entries.keys() and all(torch.equal(again[name], entries[name]) for name in entries)
    save_file({"down.weight": model.down.weight.detach()}, tmp_path / "in")
    report = quantize_checkpoint(tmp_path / "in", tmp_path / "out", "IQ2_XXS", imatrix=tmp_path / "imatrix.gguf")
    assert [(row.after, row.note) for row in report.rows] == [("IQ2_XXS", "imatrix")]


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="model: expected an nn.Module, got list"):
        imatrix.collect([], [])
    with pytest.raises(ValueError, match="no linear layer of the model was called"):
        imatrix.collect(Model(), [])
    with pytest.raises(ValueError, match="up.weight: the inputs of its layer hold NaN"):
        imatrix.collect(Model(), [torch.full((64,), torch.nan)])
    with pytest.raises(ValueError, match="entries is empty"):
        imatrix.save(tmp_path / "x", {})
    for values in (torch.tensor([1.0, -1.0]), torch.tensor([torch.inf]), torch.ones(2, 2)):
        with pytest.raises(ValueError, match="entries: 'w' has shape .*; expected"):
            imatrix.save(tmp_path / "x", {"w": values})
    assert not (tmp_path / "x").exists()
