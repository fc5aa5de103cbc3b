"""An emulated aarch64 Python 3.11 with the CPU build of PyTorch 2.10, and ktlinear cross-built for it.

All of it lies in ``build/arm``, and what is there is not made again: ``root``, the Debian packages of Python and what
it needs (without touching the machine's own packages), ``site``, the wheels, and ``package``, ktlinear as it would be
installed. PyTorch 2.10 is the oldest that ktlinear serves; later aarch64 wheels need CUDA's libraries.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / "build" / "arm"
PREFIX = "aarch64-linux-gnu-"
TOOLCHAIN = ("qemu-user", "g++-aarch64-linux-gnu", "libc6-dev-arm64-cross")
DEBS = ("python3.11-minimal", "libpython3.11-stdlib", "libstdc++6", "libgomp1")
WHEELS = (
    "torch==2.10.0 sympy mpmath networkx jinja2 markupsafe fsspec filelock typing-extensions "  # what it imports
    "setuptools numpy gguf tqdm pyyaml requests pytest pluggy iniconfig packaging pygments hypothesis sortedcontainers"
)


def install_toolchain() -> None:
    """Install the cross compiler and the emulator unless they are there (as root)."""
    if shutil.which(PREFIX + "g++") and shutil.which("qemu-aarch64"):
        return
    run("apt-get", "update", "-qq")
    run("apt-get", "install", "-qq", "-y", "--no-install-recommends", *TOOLCHAIN)


def run(*command: object, **changes: str) -> None:
    """Run a command, with `changes` of the environment; its output is shown if it fails."""
    done = subprocess.run(
        [str(word) for word in command], cwd=ROOT, env=os.environ | changes, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(done.args)}\n{done.stdout}{done.stderr}")


def install_python() -> None:
    """Lay out ``root`` and ``site`` unless they are there: a minute, and 760 MB."""
    if (HOME / "ready").exists():
        return
    shutil.rmtree(HOME, ignore_errors=True)
    # A state of apt's own for another architecture; the machine's configuration says where packages come from.
    apt = HOME / "apt"
    for folder in ("lists/partial", "cache/archives/partial"):
        (apt / folder).mkdir(parents=True)
    (apt / "status").touch()
    options = [f"Dir::State={apt}", f"Dir::State::status={apt}/status", f"Dir::Cache={apt}/cache"]
    options += ["APT::Architecture=arm64", "APT::Architectures::=arm64"]
    command = ["apt-get", "-qq", *(word for option in options for word in ("-o", option))]
    run(*command, "update")
    run(*command, "install", "-y", "--download-only", "--no-install-recommends", *DEBS)
    for deb in (apt / "cache" / "archives").glob("*.deb"):
        run("dpkg", "-x", deb, HOME / "root")

    platforms = [f"--platform=manylinux_{glibc}_aarch64" for glibc in ("2_28", "2_27", "2_17")]
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--python-version=311"]
    run(*download, *platforms, "--platform=manylinux2014_aarch64", "--dest", HOME / "wheels", *WHEELS.split())
    for wheel in (HOME / "wheels").glob("*.whl"):
        with zipfile.ZipFile(wheel) as file:
            file.extractall(HOME / "site")
    shutil.rmtree(HOME / "wheels")
    shutil.rmtree(apt)
    # Any other Python writes files that 3.11 would not read; it takes half a minute for its first import then.
    if sys.version_info[:2] == (3, 11):
        subprocess.run([sys.executable, "-m", "compileall", "-q", "-j0", str(HOME / "site")], stdout=subprocess.DEVNULL)
    (HOME / "ready").touch()


def build_package() -> None:
    """Cross-build ``package``; compiles what changed. The headers are those of this Python's own PyTorch."""
    shutil.rmtree(HOME / "package", ignore_errors=True)
    link = PREFIX + "g++ -shared"
    run(
        *(sys.executable, "setup.py", "build", "--build-base", HOME / "objects", "--build-lib", HOME / "package"),
        _PYTHON_HOST_PLATFORM="linux-aarch64",
        KTLINEAR_ISA="all",
        CC=PREFIX + "gcc",
        CXX=PREFIX + "g++",
        LDSHARED=link,
        LDCXXSHARED=link,
        LDFLAGS=f"-L{HOME / 'site' / 'torch' / 'lib'} -Wl,--no-as-needed",  # the machine's own would not do
        PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    )


def python(cpu: str, *arguments: str, **changes: str) -> subprocess.Popen[str]:
    """Start the emulated Python, which sees ``package`` and ``site``, on an emulated CPU; its output is a pipe."""
    environment = {
        "PYTHONHOME": str(HOME / "root" / "usr"),
        "PYTHONPATH": f"{HOME / 'package'}:{HOME / 'site'}",
        "PYTHONSAFEPATH": "1",  # the ktlinear of the working directory is the machine's own
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = ["qemu-aarch64", "-cpu", cpu, "-L", str(HOME / "root"), str(HOME / "root" / "usr" / "bin" / "python3.11")]
    return subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        env=os.environ | environment | changes,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
