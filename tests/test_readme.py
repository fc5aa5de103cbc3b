"""The README's first lines of use run as they are written."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import ktlinear

README = Path(__file__).resolve().parent.parent / "README.md"


def test_first_lines_of_use() -> None:
    block = re.search(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    assert block is not None
    names: dict = {}
    exec(block[1], names)
    # The layer and the operator are two ways to the same numbers, and `unpatch` has left the original's kind.
    assert torch.equal(names["layer"](names["x"]), names["y"])
    assert {type(module) for module in names["model"]} == {torch.nn.Linear, torch.nn.GELU}
    assert isinstance(names["layer"], ktlinear.nn.Linear)
