"""Print the kernels' sources with their compiler flags, a line each, separated by semicolons, for CMakeLists.txt.

The first line holds the flags of all. Usage: ``python cmake/kernel_flags.py ISA PROCESSOR``
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "ktlinear"))  # the package itself needs PyTorch

import _cpu  # noqa: E402

try:
    kernels = _cpu.kernel_flags(sys.argv[1], _cpu.tiers_of(sys.argv[2]))
except ValueError as error:
    raise SystemExit(str(error)) from None
print(";".join(_cpu.COMPILE_FLAGS))
for source, flags in kernels.items():
    print(";".join([source, *flags]))
