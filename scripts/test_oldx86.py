"""Old x86 CPUs under emulation: ``make test-oldx86``.

A part of the pytest suite runs from the one build that holds every tier on emulated CPUs, whose missing instructions
fault as on real ones: that the tiers they get hold none of these is what is proven. (AVX-512 and AVX-VNNI have no
emulation here; disassembly in tests/test_build.py stands for those.) Then a build of one tier alone has to give each
CPU that lacks it the ImportError that says so, and to load on the one that has it.

The emulator passes this machine's /proc/cpuinfo on, so KTLINEAR_CPU_FEATURES says what each CPU has.
It is installed with apt-get if it is missing (as root).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from test_arm import FILES, PARITY, ROOT

ALONE = "amd_avx2"  # the tier of the build that holds one alone
# Emulated CPUs: their features, of those that the tiers ask for, the tiers they can run, and what pytest runs (-k). The
# portable tier runs emulated as fast as any, and what it computes depends on no CPU, so it is tried on the first alone.
CPUS = {
    "Nehalem": ("", ("unsupported",), f"unsupported and ({PARITY})"),
    "SandyBridge": ("avx", ("amd_avx", "unsupported"), f"amd_avx- and ({PARITY})"),
    "IvyBridge": ("avx f16c", ("amd_avx", "unsupported"), f"amd_avx- and ({PARITY})"),
    "Haswell": (
        "avx f16c fma avx2 bmi2",
        ("amd_avx2", "amd_fma", "amd_avx", "unsupported"),
        f"(amd_fma or amd_avx2) and ({PARITY})",
    ),
}


def python(cpu: str, features: str, package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python on an emulated CPU with the ktlinear that lies in `package`; stderr goes to stdout."""
    environment = {"KTLINEAR_CPU_FEATURES": features, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        ["qemu-x86_64", "-cpu", cpu, sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | environment | {"PYTHONSAFEPATH": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = result.stdout.splitlines(keepends=True)
    result.stdout = "".join(line for line in lines if "warning: TCG" not in line)
    return result


def build_alone() -> Path:
    """A build of one tier; returns the folder to import it from."""
    folder = ROOT / "build" / "oldx86"
    subprocess.run(
        [
            sys.executable,
            "setup.py",
            "-q",
            "build",
            "--build-base",
            folder / "objects",
            "--build-lib",
            folder / "package",
        ],
        cwd=ROOT,
        env=os.environ | {"KTLINEAR_ISA": ALONE},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return folder / "package"


def parity(cpu: str) -> tuple[bool, str]:
    """Whether the CPU gets the tiers that it should, and the tests pass there; and what to print of it."""
    features, expected, tests = CPUS[cpu]
    found = python(cpu, features, ROOT, "-c", "import ktlinear; print(*ktlinear.available_isas())")
    if tuple(found.stdout.split()) != expected:
        return False, f"{cpu}: expected {', '.join(expected)}; found {found.stdout}"
    result = python(cpu, features, ROOT, "-m", "pytest", "-q", "-p", "no:cacheprovider", *FILES, "-k", tests)
    passed = result.returncode == 0 and " passed" in result.stdout
    return passed, f"{cpu}: {', '.join(expected)}; pytest {' '.join(FILES)} -k '{tests}'\n{result.stdout}"


def alone(cpu: str, package: Path) -> tuple[bool, str]:
    """Whether a build of one tier loads where it can, and says why where it cannot."""
    features, tiers, _ = CPUS[cpu]
    result = python(cpu, features, package, "-c", "import ktlinear; print(ktlinear.isa())")
    last = result.stdout.strip().splitlines()[-1]
    if ALONE in tiers:
        good = result.returncode == 0 and last == ALONE
    else:
        start = (
            f"ImportError: this CPU cannot run ktlinear as it was built. Compiled in: {ALONE}; missing: {ALONE} needs"
        )
        good = result.returncode == 1 and last.startswith(start)
    return good, f"{cpu}, {ALONE} alone: {last}"


def main() -> int:
    if not shutil.which("qemu-x86_64"):
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        subprocess.run(["apt-get", "install", "-qq", "-y", "--no-install-recommends", "qemu-user"], check=True)
    begin, good = time.monotonic(), True
    package = build_alone()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(alone, cpu, package) for cpu in CPUS] + [pool.submit(parity, cpu) for cpu in CPUS]
        for job in jobs:
            passed, text = job.result()
            good &= passed
            print(("" if passed else "FAILED ") + text, flush=True)
    print(f"{'All is well' if good else 'FAILED'}: {time.monotonic() - begin:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
