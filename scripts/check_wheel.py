"""Checks a wheel: its tag, its size, its symbols, and the smoke tests in a fresh environment without a compiler.

python scripts/check_wheel.py dist/ktlinear-*.whl [--torch VERSION] [--python PYTHON]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_BYTES = 6 * 1024 * 1024

IMPORT_TIME = """
import time
import torch
start = time.perf_counter()
import ktlinear
print(f"import ktlinear, after torch {torch.__version__}: {1000 * (time.perf_counter() - start):.0f} ms")
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", default="2.13.0", metavar="VERSION", help="of PyTorch to test with (%(default)s)")
    parser.add_argument("--python", default=sys.executable, metavar="PYTHON", help="the interpreter to test with")
    options = parser.parse_args()
    wheel = options.wheel.resolve()
    if "-py3-none-manylinux_" not in wheel.name:
        raise SystemExit(f"{wheel.name}: expected the tag py3-none-manylinux_*")
    if wheel.stat().st_size > MAX_BYTES:
        raise SystemExit(f"{wheel.name} has {wheel.stat().st_size} bytes; expected at most {MAX_BYTES}")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with zipfile.ZipFile(wheel) as archive:
            library = archive.extract("ktlinear/_C.abi3.so", folder)
        audit = Path(sys.executable).with_name("torch-abi-audit")
        subprocess.run([str(audit), "--check", "torch", library], check=True)
        subprocess.run([options.python, "-m", "venv", str(folder / "env")], check=True)
        python = str(folder / "env" / "bin" / "python")
        pip = [python, "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
        # PyTorch first and alone: asked for together with others, pip may take a build with gigabytes of CUDA.
        subprocess.run([*pip, f"torch=={options.torch}"], check=True)
        subprocess.run([*pip, "pytest", str(wheel)], check=True)
        shutil.copy(ROOT / "tests" / "test_smoke.py", folder)
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "KTLINEAR"))}
        environment["PATH"] = str(folder / "env" / "bin")  # no compiler
        for command in (["-c", IMPORT_TIME], ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_smoke.py"]):
            subprocess.run([python, *command], check=True, cwd=folder, env=environment)
    return 0


if __name__ == "__main__":
    sys.exit(main())
