"""Counts the instructions of the Arm kernels per multiplication, and writes docs/arm.md: ``make count-arm``.

Emulation tells no time, but it tells how many instructions a kernel executes. A tier's own multiplying instruction
gives the least that there can be; what a kernel executes beyond it loads, decodes, scales, and rounds the input.
"""

from __future__ import annotations

import subprocess

import arm_python
import test_arm
from test_arm import OUT, PREFIX, ROOT

PAGE = ROOT / "docs" / "arm.md"
N, K = 192, 1024
MS = (1, 64, 480)
# A tier's instructions for 16 products of int8, and what they are. Floats: one fmla for 4 products in all of them.
INT8 = {"arm80": (3, "`smull`, `smlal2`, `sadalp`"), "arm82": (1, "`sdot`"), "arm86": (1, "`usdot`")}
FLOATS = ("F32", "F16", "BF16")
HEAD = """# Arm, counted

Written by `make count-arm`. There was no Arm machine to measure on, so this is what can be known without one: the
instructions that a kernel executes in an emulator (QEMU's, with a plugin that counts), beside the least that its tier's
multiplying instruction allows, as a ratio. Conversion of the input, loads, decoding of the weights, scaling and loops
are included; N = {n}, K = {k}, one thread, fp32 input, quantized weights packed, int8 arithmetic.

The least per 16 products: {least};
floats: four `fmla` of four lanes on every tier.

A ratio says nothing of the memory that a kernel waits for, nor of instructions that run side by side. At M = 1 each
weight is decoded for one product, so the ratio is that of decoding; the memory is what limits that case on any machine.
"""


def build() -> tuple[str, str]:
    """The program for Arm and the emulator's plugin."""
    arm_python.install_toolchain()
    test_arm.build()
    kernels = [str(path) for prefix, source, _, path in test_arm.objects() if prefix and source.startswith("csrc/")]
    program, plugin = str(OUT / "count"), str(OUT / "count_plugin.so")
    flags = [*test_arm.FLAGS, "-static", "tests/cpp/count.cpp"]
    subprocess.run([*test_arm.compiler(PREFIX), *flags, *kernels, "-o", program], cwd=ROOT, check=True)
    flags = [*test_arm.FLAGS, "-shared", "tests/cpp/count_plugin.cpp"]
    subprocess.run([*test_arm.compiler(""), *flags, "-o", plugin], cwd=ROOT, check=True)
    return program, plugin


def ratios(program: str, plugin: str, tier: str, m: int) -> dict[str, float]:
    """Weight type -> instructions executed, relative to the least that the tier's multiplications take."""
    command = ["qemu-aarch64", "-cpu", "max", "-plugin", plugin, program, tier, str(m), str(N), str(K)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    counts = [int(line) for line in done.stderr.split()][1::2]  # of the calls, not of what lies between them
    names = done.stdout.split()
    return {
        name: count / (m * N * K) * (4 if name in FLOATS else 16 / INT8[tier][0])
        for name, count in zip(names, counts, strict=True)
    }


def main() -> None:
    """Count and write the page."""
    program, plugin = build()
    columns = [ratios(program, plugin, tier, m) for tier in INT8 for m in MS]
    least = ", ".join(f"`{tier}` {number} ({what})" for tier, (number, what) in INT8.items())
    lines = [HEAD.format(n=N, k=K, least=least)]
    lines.append("| weight | " + " | ".join(f"`{tier}`, M = {m}" for tier in INT8 for m in MS) + " |")
    lines.append("|---|" + "---|" * len(columns))
    lines += [f"| {name} | " + " | ".join(f"{column[name]:.2f}" for column in columns) + " |" for name in columns[0]]
    text = PAGE.read_text() if PAGE.exists() else ""
    _, mark, notes = text.partition("\n## ")  # what was written by hand
    PAGE.write_text("\n".join(lines) + "\n" + mark + notes)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
