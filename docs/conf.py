"""Sphinx: ``make docs`` builds the pages of this folder, with the docstrings of the built package, in build/docs."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

project = "ktlinear"
author = "the ktlinear authors"
copyright = author
version = release = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"ktlinear {version}"
html_copy_source = False
html_show_copyright = False

# A name in single backticks is a link where it is one of ours, and code anywhere else.
default_role = "py:obj"

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
# PyTorch's operators and `torch.nn.Module`'s members are not documented here.
autodoc_inherit_docstrings = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
# Diagrams and shell commands, in the READMEs that are included here.
highlight_language = "none"

copybutton_prompt_text = ">>> "
