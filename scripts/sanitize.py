"""Run the kernels under AddressSanitizer and UBSan, without PyTorch: ``make sanitize``.

Compiles ``tests/cpp/sanitize.cpp`` with the sources of a tier, once per tier, and runs it. Tiers that this CPU cannot
run are left out.

Usage: ``python scripts/sanitize.py [TIER ...]``
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "ktlinear"))  # the package itself needs PyTorch

import _cpu  # noqa: E402

TIERS = ("unsupported", "amd_avx2", "amd_avx512vnni")
# All of -fsanitize=undefined takes twice as long to compile, and with it GCC 12 rejects constant expressions.
FLAGS = "-std=c++20 -Og -g1 -ffp-contract=off -Wall -Wextra -iquote csrc -fno-sanitize-recover=all"
SANITIZERS = "-fsanitize=address,signed-integer-overflow,shift,bounds,float-cast-overflow"


def check(tier: str) -> int:
    """Compile and run one tier; the exit status of what failed, or 0."""
    program = ROOT / "build" / "sanitize" / tier
    program.parent.mkdir(parents=True, exist_ok=True)
    sources = ["tests/cpp/sanitize.cpp", "csrc/tinyblas/tiers.cpp"]
    folder, row = ROOT / "csrc" / "tinyblas", _cpu.TIERS[tier]
    kernels = {*folder.glob(f"tinyblas_cpu*_{tier}.cpp"), folder / f"tinyblas_cpu_quantize_{row.quantizer}.cpp"}
    if row.mixmul:
        kernels.update(folder.glob(f"tinyblas_cpu*_{row.mixmul}.cpp"))
    sources += sorted(str(path.relative_to(ROOT)) for path in kernels)
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, *FLAGS.split(), SANITIZERS, *_cpu.TIERS[tier].cflags, *sources, "-o", str(program)]
    return subprocess.run(command, cwd=ROOT).returncode or subprocess.run([program], cwd=ROOT).returncode


def main() -> int:
    names = sys.argv[1:] or [tier for tier in TIERS if tier in _cpu.TIERS]
    if unknown := [name for name in names if name not in _cpu.TIERS]:
        raise SystemExit(f"{', '.join(unknown)}: no such tier; expected some of {', '.join(_cpu.TIERS)}")
    tiers = _cpu.runnable(names, _cpu.features())
    for name in set(names) - set(tiers):
        print(f"{name}: left out, this CPU lacks {', '.join(_cpu.missing(name, _cpu.features()))}")
    jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
    with ThreadPoolExecutor(jobs) as pool:
        return max(pool.map(check, tiers), default=0, key=abs)


if __name__ == "__main__":
    raise SystemExit(main())
