"""Builds ``ktlinear._C``: the kernels, once per instruction-set tier, and the operators.

Environment:
    KTLINEAR_ISA: ``native`` (default: the best tier of this machine, and only that), the name of a tier, or ``all``.
    KTLINEAR_WERROR: ``1`` makes warnings errors.
    MAX_JOBS: how many compilers run at once (default: one per CPU).
"""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).resolve().parent


def load_cpu_table():
    """Import ktlinear/_cpu.py by its path: the package itself needs the library that is yet to be built."""
    spec = importlib.util.spec_from_file_location("ktlinear_cpu", ROOT / "ktlinear" / "_cpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cpu = load_cpu_table()
# The target's, which is not the machine's in a cross build (where _PYTHON_HOST_PLATFORM says linux-aarch64).
MACHINE = sysconfig.get_platform().rpartition("-")[2]
CROSS = [MACHINE] if MACHINE != platform.machine().lower() else []
TIERS = cpu.tiers_of(MACHINE)

ISA = os.environ.get("KTLINEAR_ISA") or "native"
try:
    BUILT = cpu.built_tiers(ISA, TIERS)
except ValueError as error:
    raise SystemExit(str(error)) from None

# -iquote csrc: kernels are included as "tinyblas/...", so that none of their headers hides one of the system's.
COMMON_FLAGS = [*cpu.COMPILE_FLAGS, "-Wall", "-Wextra", "-iquote", "csrc"]
if os.environ.get("KTLINEAR_WERROR") == "1":
    COMMON_FLAGS.append("-Werror")
# The oldest PyTorch whose stable ABI is used (torch/csrc/stable/version.h); one binary serves all later ones.
OPS_FLAGS = ["-DTORCH_TARGET_VERSION=0x020a000000000000"]


def source_flags() -> dict[str, list[str]]:
    """Each source with the flags that only it gets, slowest to compile first."""
    flags = {f"csrc/tinyblas/{source}": own for source, own in cpu.kernel_flags(ISA, TIERS).items()}
    for source in sorted((ROOT / "csrc" / "ops").glob("*.cpp")):
        flags[source.relative_to(ROOT).as_posix()] = OPS_FLAGS
    return flags


class BuildTiers(BuildExtension):
    """BuildExtension with compiler flags of their own for every source, through one ninja file."""

    def finalize_options(self):
        super().finalize_options()
        # An editable install would compile in a temporary folder, and so everything every time.
        self.build_temp = os.path.join("build", "-".join(["objects", *CROSS, ISA]))

    def build_extension(self, ext):
        # BuildExtension has put its own compile step in place by now.
        self.compiler.compile = self.compile_with_ninja
        super().build_extension(ext)

    def compile_with_ninja(
        self, sources, output_dir=None, macros=None, include_dirs=None, debug=0, extra_postargs=None, depends=None, **_
    ):
        """Takes the place of ``CCompiler.compile``: compiles what changed and returns the paths of all objects."""
        flags = source_flags()
        torch_flags = [f"-isystem {path}" for path in include_dirs or []]
        lines = [
            f"builddir = {escape(os.path.abspath(output_dir))}",
            "rule compile",
            "  command = $cxx -MMD -MF $out.d -fPIC $flags -c $in -o $out",
            "  description = compile $in",
            "  depfile = $out.d",
            "  deps = gcc",
            f"cxx = {os.environ.get('CXX', 'c++')}",
        ]
        objects = []
        for source in sources:
            obj = os.path.abspath(os.path.join(output_dir, os.path.splitext(source)[0] + ".o"))
            objects.append(obj)
            own = COMMON_FLAGS + flags[source] + (torch_flags if source.startswith("csrc/ops/") else [])
            lines += [f"build {escape(obj)}: compile {escape(source)}", f"  flags = {' '.join(own)}"]
        os.makedirs(output_dir, exist_ok=True)
        ninja_file = Path(output_dir, "build.ninja")
        ninja_file.write_text("\n".join(lines) + "\n")
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        ninja = [found] if (found := shutil.which("ninja")) else [sys.executable, "-m", "ninja"]
        subprocess.run([*ninja, "-f", str(ninja_file), "-j", jobs], check=True)
        return objects

    def run(self):
        super().run()
        # What the loader compares the CPU with, before it maps a library that may hold instructions it lacks.
        text = f'"""Written by setup.py."""\n\nTIERS = {tuple(BUILT)!r}\nISA = {ISA!r}\n'
        folders = [Path(self.build_lib, "ktlinear")]
        if self.inplace:
            folders.append(ROOT / "ktlinear")
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "_build_info.py").write_text(text)


class AnyPython(bdist_wheel):
    """One wheel for every Python 3: the library calls PyTorch's stable ABI and nothing of Python's."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


def escape(path: str) -> str:
    """A path as ninja reads it."""
    return path.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


os.chdir(ROOT)
setup(
    ext_modules=[CppExtension("ktlinear._C", list(source_flags()), py_limited_api=True, depends=[])],
    cmdclass={"build_ext": BuildTiers, "bdist_wheel": AnyPython},
)
