"""Writes csrc/tinyblas/decode/grids.h, the codebook grids of the IQ formats, from the tables of the `gguf` package.

Usage::

    python scripts/make_grids.py           # write the header
    python scripts/make_grids.py --check   # compare it with the tables; exit status 1 if they differ
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import gguf
import numpy as np

HEADER = Path(__file__).resolve().parent.parent / "csrc" / "tinyblas" / "decode" / "grids.h"
# IQ1_M shares IQ1_S's grid.
GRIDS = {"IQ2_XXS": "kGridIQ2_XXS", "IQ2_XS": "kGridIQ2_XS", "IQ2_S": "kGridIQ2_S"}
GRIDS |= {"IQ3_XXS": "kGridIQ3_XXS", "IQ3_S": "kGridIQ3_S", "IQ1_S": "kGridIQ1"}

INTRODUCTION = """\
// Written by scripts/make_grids.py from the tables of the `gguf` package; do not edit.
//
// Entry i is grid point i: eight 2-bit digits or four 4-bit ones, the first element's in the lowest bits. kDigits...
// says what a digit means: a weight's magnitude, in IQ1 the weight.
#pragma once

#include <cstdint>

namespace ktlinear::tinyblas {
"""


def grid(name: str) -> tuple[np.ndarray, tuple[int, ...]]:
    """The grid of one format: digits [points, 8 or 4] and what each digit means."""
    cls = getattr(gguf.quants, name)
    cls.init_grid()
    values = np.asarray(cls.grid).reshape(cls.grid_shape)
    digits = np.searchsorted(np.array(cls.grid_map), values)
    assert np.array_equal(np.array(cls.grid_map)[digits], values)
    return digits, tuple(int(v) for v in cls.grid_map)


def render() -> str:
    """The text of the header."""
    text = [INTRODUCTION]
    for name, constant in GRIDS.items():
        digits, meaning = grid(name)
        bits = 16 // digits.shape[1]
        words = (digits << (bits * np.arange(digits.shape[1]))).sum(axis=1)
        suffix = constant.removeprefix("kGrid")
        text.append(f"inline constexpr int kDigits{suffix}[] = {{{', '.join(map(str, meaning))}}};")
        text.append(f"inline constexpr uint16_t {constant}[{len(words)}] = {{")
        text += ["    " + " ".join(f"0x{w:04X}," for w in words[i : i + 14]) for i in range(0, len(words), 14)]
        text.append("};\n")
    text.append("}  // namespace ktlinear::tinyblas")
    return "\n".join(text) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare the header with the tables instead of writing it")
    text = render()
    if not parser.parse_args().check:
        HEADER.write_text(text)
    elif HEADER.read_text() != text:
        print(f"{HEADER.name} differs from the tables of gguf; run scripts/make_grids.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
