"""C++ programs built with CMake: on tinyblas alone, as installed, and on LibTorch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

import ktlinear
from ktlinear import _cpu, _loader

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str | Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count())}
    result = subprocess.run([str(c) for c in command], env=env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_tinyblas_installed_for_a_program_without_torch(tmp_path: Path) -> None:
    build, prefix, consumer = tmp_path / "build", tmp_path / "prefix", tmp_path / "consumer"
    run("cmake", "-S", ROOT, "-B", build, "-DKTLINEAR_ISA=unsupported", f"-DPython3_EXECUTABLE={sys.executable}")
    run("cmake", "--build", build)
    run("cmake", "--install", build, "--prefix", prefix)
    run("cmake", "-S", ROOT / "tests" / "cpp" / "consumer", "-B", consumer, f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", consumer)
    assert run(consumer / "consumer").split() == ["unsupported"]


def test_cmake_compiles_every_source_with_the_flags_of_the_table(tmp_path: Path) -> None:
    run("cmake", "-S", ROOT, "-B", tmp_path, "-DKTLINEAR_ISA=all", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON")
    commands = (tmp_path / "compile_commands.json").read_text()
    lines = {line.rpartition("/")[2].rstrip('",'): line for line in commands.splitlines() if '"command"' in line}
    table = _cpu.kernel_flags("all", _cpu.TIERS)
    assert lines.keys() == table.keys()
    machine = {flag for tier in _cpu.TIERS.values() for flag in tier.cflags}
    for source, flags in table.items():
        words = lines[source].split()
        assert machine.intersection(words) == machine.intersection(flags), source
        assert set(_cpu.COMPILE_FLAGS) <= set(words)


def test_unknown_tier_lists_the_known_ones(tmp_path: Path) -> None:
    command = ("cmake", "-S", str(ROOT), "-B", str(tmp_path), "-DKTLINEAR_ISA=pdp11")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=600)
    assert result.returncode != 0
    assert "KTLINEAR_ISA is 'pdp11'; expected native, all" in " ".join(result.stderr.split())


def test_operator_in_a_libtorch_program(tmp_path: Path) -> None:
    prefix = torch.utils.cmake_prefix_path
    run("cmake", "-S", ROOT / "tests" / "cpp" / "libtorch", "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", tmp_path)
    tier = ktlinear.available_isas()[0]
    assert run(tmp_path / "linear", _loader._library(), tier).split()[0] == tier
