"""The Arm kernels under emulation: ``make test-arm``.

Compiles ``tests/cpp/parity.cpp`` with every Arm tier into one static program. The same program, built for this machine
with the portable kernels alone, writes a file of inputs and results; the emulated CPUs, each with the tiers that it
would get, are checked against it. Last, the objects of each tier are disassembled: none may hold an instruction that
its tier does not ask for. All that is without PyTorch. Then a part of the pytest suite runs in an emulated Python with
PyTorch (arm_python.py), every tier forced in turn.

The cross compiler and the emulator are installed with apt-get if they are missing (as root).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "ktlinear"), str(ROOT / "tests")]  # the package itself needs PyTorch

import _cpu  # noqa: E402
import arm_python  # noqa: E402
from arm_python import PREFIX  # noqa: E402
from instructions import beyond  # noqa: E402

OUT = ROOT / "build" / "test-arm"
FLAGS = [*_cpu.COMPILE_FLAGS, *"-fPIC -Wall -Wextra -Werror -iquote csrc".split()]
TIERS = _cpu.tiers_of("aarch64")
# Emulated CPUs and the tiers that they can run, best first. A64FX is ARMv8.2, but has no dot products.
CPUS = {
    "cortex-a57": ("arm80", "unsupported"),
    "cortex-a76": ("arm82", "arm80", "unsupported"),
    "a64fx": ("arm80", "unsupported"),
    "max": ("arm86", "arm82", "arm80", "unsupported"),
}
# What pytest runs on which CPU (-k). Emulated, a test takes 10 to 100 times as long: packed weights stand for all, and
# a tier that the smaller CPU has already run is on the larger one only seen to work.
PARITY = (
    "float_weights_match or (quantized_weights_match and packed) or any_input_type or nan_and_infinity or bias_of_any"
    " or too_large_for_int8 or in_chunks or strided or empty_dimensions or sums_of_16_bit or special_activation"
)
PYTEST = {
    "cortex-a76": PARITY,
    "max": f"(arm86 and ({PARITY})) or float_weights_match or any_input_type",
}
FILES = ("tests/test_ops.py", "tests/test_numbers.py")


def objects() -> list[tuple[str, str, list[str], Path]]:
    """Compiler prefix, source, flags and object of everything, slowest to compile first."""
    rows = []
    for prefix, isa in ((PREFIX, "all"), ("", "unsupported")):
        kernels = {f"csrc/tinyblas/{name}": own for name, own in _cpu.kernel_flags(isa, TIERS).items()}
        for source, own in (kernels | {"tests/cpp/parity.cpp": ["-O1"]}).items():
            rows.append((prefix, source, [*FLAGS, *own], OUT / f"{prefix or 'host-'}{Path(source).stem}.o"))
    return rows


def build() -> tuple[Path, Path]:
    """The program for this machine and the one for Arm; compiles only what is older than the sources."""
    OUT.mkdir(parents=True, exist_ok=True)
    kernels = [*ROOT.glob("csrc/tinyblas/**/*"), ROOT / "ktlinear" / "_cpu.py"]
    newest = max(path.stat().st_mtime for path in kernels)
    newest_test = max(newest, *(path.stat().st_mtime for path in ROOT.glob("tests/cpp/*")))

    def compile_one(row: tuple[str, str, list[str], Path]) -> None:
        prefix, source, flags, path = row
        if not path.exists() or path.stat().st_mtime < (newest_test if source.startswith("tests/") else newest):
            subprocess.run([*compiler(prefix), *flags, "-c", source, "-o", str(path)], cwd=ROOT, check=True)

    rows = objects()
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
        list(pool.map(compile_one, rows))
    programs = []
    for prefix in ("", PREFIX):
        programs.append(OUT / f"{prefix or 'host-'}parity")
        own = [str(path) for of, _, _, path in rows if of == prefix]
        static = ["-static"] if prefix else []
        subprocess.run([*compiler(prefix), *static, *own, "-o", str(programs[-1])], check=True)
    return programs[0], programs[1]


def compiler(prefix: str) -> list[str]:
    return [prefix + "g++"] if prefix else [os.environ.get("CXX", "c++")]


def check_instructions() -> bool:
    """Disassemble the objects of every tier."""
    good = True
    for tier, row in TIERS.items():
        for path in sorted(OUT.glob(f"{PREFIX}tinyblas_cpu_*{tier}.o")):
            wrong = beyond(path, row.features, True, PREFIX + "objdump")
            print(f"{path.name}: {len(wrong)} instructions beyond {tier}", *wrong[:5], sep="\n  ")
            good &= not wrong
    return good


def check_with_pytorch() -> bool:
    """Set up the emulated Python, build the extension for it and run pytest there, a process for each CPU."""
    begin = time.monotonic()
    arm_python.install_python()
    print(f"emulated Python and PyTorch: {time.monotonic() - begin:.0f} s", flush=True)
    begin = time.monotonic()
    arm_python.build_package()
    print(f"ktlinear, cross-built: {time.monotonic() - begin:.0f} s", flush=True)
    begin = time.monotonic()
    good = True
    running = {
        cpu: arm_python.python(cpu, "-m", "pytest", "-q", "-p", "no:cacheprovider", *FILES, "-k", k)
        for cpu, k in PYTEST.items()
    }
    for cpu, process in running.items():
        output = process.communicate()[0]
        print(f"{cpu}: pytest {' '.join(FILES)} -k '{PYTEST[cpu]}'\n{output}")
        good &= process.returncode == 0
    print(f"pytest: {time.monotonic() - begin:.0f} s", flush=True)
    return good


def main() -> int:
    """Build, emulate, disassemble, run pytest; the exit status."""
    arm_python.install_toolchain()
    host, arm = build()
    data = OUT / "results"
    subprocess.run([host, "make", data], check=True)
    good = True
    for name, expected in CPUS.items():
        emulator = ["qemu-aarch64", "-cpu", name, str(arm)]
        words = subprocess.run([*emulator, "hwcap"], check=True, capture_output=True, text=True).stdout.split()
        tiers = _cpu.runnable(list(TIERS), _cpu.features_of_hwcap(int(words[0]), int(words[1])))
        print(f"{name}: {', '.join(tiers)}", flush=True)
        if tuple(tiers) != expected:
            print(f"{name}: expected {', '.join(expected)}")
            good = False
        # The portable kernels once: what they do depends on no CPU, and their quantizers are slow here.
        names = tiers if name == "cortex-a57" else tiers[:-1]
        good &= subprocess.run([*emulator, "check", str(data), *names]).returncode == 0
    good &= check_instructions()
    good &= check_with_pytorch()
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
