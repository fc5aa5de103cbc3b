"""The documentation names everything that is public, as it is. Sphinx is not needed: the pages are read as text."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ktlinear  # noqa: F401  (defines torch.ops.kt)

DOCS = Path(__file__).resolve().parent.parent / "docs"
REFERENCE = "\n".join(page.read_text() for page in sorted((DOCS / "reference").glob("*.md")))
DOCUMENTED = set(re.findall(r"^\.\. (?:auto|py:)\w+:: (\S+)$", REFERENCE, re.MULTILINE))

MODULES = [
    "ktlinear",
    "ktlinear.checkpoint",
    "ktlinear.gguf",
    "ktlinear.imatrix",
    "ktlinear.integrations.transformers",
    "ktlinear.linear",
    "ktlinear.loading",
    "ktlinear.nn",
    "ktlinear.ops",
    "ktlinear.patch",
    "ktlinear.quantize",
]
# Imported when they are asked for, and so not in __all__.
LAZY = {"ktlinear": ["KtConfig", "from_gguf"]}

OPERATORS = sorted(
    name.removeprefix("kt::")
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("kt::") and not name.startswith("kt::_")
)


def test_every_public_module_is_known() -> None:
    package = Path(ktlinear.__file__).parent
    files = [path for path in package.rglob("*.py") if "__all__ = [" in path.read_text()]
    names = {"ktlinear." + ".".join(path.relative_to(package).with_suffix("").parts) for path in files}
    public = {name.removesuffix(".__init__") for name in names if "._" not in name.removesuffix(".__init__")}
    assert public == set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_public_names_are_in_the_reference(name: str) -> None:
    # By importing them: the attribute ktlinear.patch of the package is the function.
    modules = {other: importlib.import_module(other) for other in MODULES}
    for member in [*modules[name].__all__, *LAZY.get(name, [])]:
        value = getattr(modules[name], member)
        places = {f"{other}.{member}" for other, module in modules.items() if getattr(module, member, None) is value}
        # A submodule has a page: it is named there.
        assert places & DOCUMENTED or f"`{name}.{member}`" in REFERENCE, f"{name}.{member}"


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_what_is_documented_exists(name: str) -> None:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            value = getattr(value, part)
        return
    pytest.fail(f"there is no {name}")


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_have_their_schema_in_the_reference(name: str) -> None:
    schema = str(getattr(torch.ops.kt, name).default._schema)
    page = (DOCS / "reference" / "operators.md").read_text()
    section = re.search(rf"^## kt::{name}$(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    assert section is not None
    assert f"```text\n{schema}\n```" in section[1]


def test_operators_in_the_reference_exist() -> None:
    page = (DOCS / "reference" / "operators.md").read_text()
    assert sorted(re.findall(r"^## kt::(\w+)$", page, re.MULTILINE)) == OPERATORS


@pytest.mark.parametrize("command", ["quantize", "bench"])
def test_options_of_commands_are_in_the_reference(command: str) -> None:
    text = subprocess.run(
        [sys.executable, "-m", "ktlinear", command, "--help"], check=True, capture_output=True, text=True
    ).stdout
    page = (DOCS / "reference" / "cli.md").read_text()
    section = re.search(rf"^## {command}$(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    assert section is not None
    options = set(re.findall(r"--\w+", text)) - {"--help"}
    assert options == set(re.findall(r"--\w+", section[1]))
