"""Builds in a temporary folder, and loading on CPUs that lack what was compiled in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest
from instructions import beyond

import ktlinear
from ktlinear import _cpu, _loader

ROOT = Path(__file__).resolve().parent.parent

SMOKE = """
import torch, ktlinear
kt = torch.ops.kt
x, weight = torch.randn(5, 64), torch.randn(20, 64)
torch.testing.assert_close(kt.linear(x, weight), torch.nn.functional.linear(x, weight), rtol=1e-4, atol=1e-4)
rows = kt.quantize(weight, 8)
with ktlinear.exact():
    y = kt.linear_packed(x, kt.pack(rows, 8), None, 20, 64, 8)
torch.testing.assert_close(y, x @ kt.dequantize(rows, 8, torch.float32).t(), rtol=1e-4, atol=1e-4)
print(ktlinear.isa(), ",".join(ktlinear.available_isas()), ktlinear.__file__)
"""


def run(*command: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, "PATH": path, **env}, capture_output=True, text=True, timeout=900
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the source distribution holds, without anything built."""
    copy = tmp_path / "source"
    copy.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy)
    ignore = shutil.ignore_patterns("*.so", "_build_info.py", "__pycache__")
    for folder in ("csrc", "ktlinear"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignore)
    return copy


def best_tier() -> str:
    return _cpu.runnable(list(_cpu.TIERS), _cpu.features())[0]


@pytest.mark.parametrize("build", ("native", "unsupported"))
def test_pip_install_of_one_tier(build: str, tree: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = ("-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--target", str(site))
    result = run(sys.executable, *pip, str(tree), KTLINEAR_ISA=build)
    assert result.returncode == 0, result.stdout + result.stderr
    result = run(sys.executable, "-c", SMOKE, cwd=tmp_path, PYTHONPATH=str(site))
    assert result.returncode == 0, result.stderr
    expected = best_tier() if build == "native" else build
    assert result.stdout.split() == [expected, expected, str(site / "ktlinear" / "__init__.py")]


def test_unknown_tier_lists_the_known_ones(tree: Path) -> None:
    result = run(sys.executable, "setup.py", "build_ext", cwd=tree, KTLINEAR_ISA="pdp11")
    assert result.returncode != 0
    assert f"KTLINEAR_ISA is 'pdp11'; expected native, all, or one of: {', '.join(_cpu.TIERS)}" in result.stderr


def test_every_tier_has_its_sources() -> None:
    names = {path.name for path in (ROOT / "csrc" / "tinyblas").glob("tinyblas_cpu_*.cpp")}
    expected = {"tinyblas_cpu_unsupported.cpp"}
    for machine in ("x86_64", "aarch64"):
        tiers = _cpu.tiers_of(machine)
        for name, tier in tiers.items():
            expected.add(f"tinyblas_cpu_quantize_{tier.quantizer}.cpp")
            if name != "unsupported":
                expected |= {f"tinyblas_cpu_sgemm_{name}.cpp", f"tinyblas_cpu_mixmul_{tier.mixmul or name}.cpp"}
            # A tier's code must not ask for more than the tier.
            assert set(tiers[tier.quantizer].features) <= set(tier.features), name
    assert names == expected


# AT_HWCAP and AT_HWCAP2 as qemu-aarch64 gives them for Cortex-A57, Cortex-A76, A64FX (no asimddp) and all it knows.
@pytest.mark.parametrize(
    ("hwcap", "hwcap2", "best"),
    ((0x8FB, 0, "arm80"), (0x119FFB, 0, "arm82"), (0x415FFB, 0, "arm80"), (0xECFFFFFB, 0x7F877FFF, "arm86")),
)
def test_arm_tiers_are_chosen_by_capability_bits(hwcap: int, hwcap2: int, best: str) -> None:
    tiers = list(_cpu.tiers_of("aarch64"))
    assert _cpu.runnable(tiers, _cpu.features_of_hwcap(hwcap, hwcap2))[0] == best
    assert _cpu.runnable(tiers, frozenset()) == ["unsupported"]


def test_tiers_of_other_architectures() -> None:
    assert list(_cpu.tiers_of("arm64")) == ["arm86", "arm82", "arm80", "unsupported"]
    assert list(_cpu.tiers_of("AMD64"))[-2:] == ["amd_avx", "unsupported"]
    assert list(_cpu.tiers_of("riscv64")) == ["unsupported"]


@pytest.mark.parametrize("tier", list(_cpu.TIERS))
def test_no_object_of_a_tier_holds_an_instruction_beyond_it(tier: str) -> None:
    folder = ROOT / "build" / "objects-all" / "csrc" / "tinyblas"
    if not folder.exists():
        pytest.skip("no objects of an `all` build in build/")
    if not shutil.which("objdump"):
        pytest.skip("no objdump to read them with (binutils)")
    tiers, arm = list(_cpu.TIERS), "arm80" in _cpu.TIERS
    row, lower = _cpu.TIERS[tier], _cpu.TIERS[tiers[min(tiers.index(tier) + 1, len(tiers) - 1)]]
    parts = [f"sgemm_{tier}"] + [f"mixmul_{tier}"] * (not row.mixmul) if tier != "unsupported" else ["unsupported"]
    for part in parts + [f"quantize_{tier}"] * (row.quantizer == tier):
        path = folder / f"tinyblas_cpu_{part}.o"
        assert not beyond(path, row.features, arm)
        # The search finds what it should: the tier's own instructions are beyond the next lower one.
        if not part.startswith(("quantize", "unsupported")) and tier != "arm80":
            assert beyond(path, lower.features, arm)


def test_only_stable_symbols() -> None:
    audit = Path(sys.executable).parent / "torch-abi-audit"
    result = run(str(audit), "--check", "torch", "--verbose", str(_loader._library()))
    assert result.returncode == 0, result.stdout
    assert "unstable=0" in result.stdout and "min-torch=2.10.0" in result.stdout


def import_with(**env: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-c", "import ktlinear; print(ktlinear.isa())", cwd=ROOT, **env)


def test_old_cpu_gets_an_import_error_not_an_illegal_instruction(tree: Path) -> None:
    # A library of one demanding tier is only pretended: the check has to come before anything is loaded.
    (tree / "ktlinear" / "_build_info.py").write_text("TIERS = ('amd_avx2',)\n")
    (tree / "ktlinear" / "_C.abi3.so").write_text("not a library")
    if not _cpu.IS_X86:
        pytest.skip("amd_avx2 is a tier of x86 only")
    result = run(sys.executable, "-c", "import ktlinear", cwd=tree, KTLINEAR_CPU_FEATURES="avx fma f16c")
    assert result.returncode == 1
    message = result.stderr.strip().splitlines()[-1]
    assert message.startswith("ImportError: this CPU cannot run ktlinear as it was built. Compiled in: amd_avx2")
    assert "amd_avx2 needs avx2, bmi2" in message


@pytest.mark.parametrize("tier", [t for t in _cpu.TIERS if t != "unsupported"])
def test_the_best_tier_of_an_older_cpu_is_chosen(tier: str) -> None:
    if tier not in ktlinear.available_isas():
        pytest.skip(f"{tier} is not compiled in, or this CPU cannot run it")
    result = import_with(KTLINEAR_CPU_FEATURES=" ".join(_cpu.TIERS[tier].features))
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == tier


def test_forced_tier() -> None:
    for tier in ktlinear.available_isas():
        assert import_with(KTLINEAR_FORCE_ISA=tier).stdout.strip() == tier


def test_forced_tier_that_is_not_compiled_in() -> None:
    result = import_with(KTLINEAR_FORCE_ISA="pdp11")
    assert result.returncode == 1
    assert "ImportError: KTLINEAR_FORCE_ISA is 'pdp11', but it is not compiled in. Compiled in: " in result.stderr


def test_forced_tier_that_the_cpu_lacks() -> None:
    tier = _loader.compiled_isas()[0]
    if tier == "unsupported":
        pytest.skip("this build holds only the tier that asks nothing of the CPU")
    result = import_with(KTLINEAR_FORCE_ISA=tier, KTLINEAR_CPU_FEATURES="")
    assert result.returncode == 1
    assert f"ImportError: KTLINEAR_FORCE_ISA is '{tier}', but the CPU lacks avx" in result.stderr
    assert "possible on this CPU: " in result.stderr


def test_missing_build_is_explained(tree: Path) -> None:
    result = run(sys.executable, "-c", "import ktlinear", cwd=tree)
    assert result.returncode == 1
    assert "ImportError: ktlinear is not built" in result.stderr


def test_info_prints_what_is_in_use() -> None:
    result = run(sys.executable, "-m", "ktlinear", "info", cwd=ROOT, KTLINEAR_FORCE_ISA=ktlinear.available_isas()[-1])
    assert result.returncode == 0, result.stderr
    lines = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    assert lines["compiled tiers"].strip() == ", ".join(_loader.compiled_isas())
    assert lines["tier in use"].strip() == f"{ktlinear.available_isas()[-1]} (KTLINEAR_FORCE_ISA asks for it)"
    assert {"ktlinear", "PyTorch", "CPU features", "threads"} <= set(lines)


def test_import_does_not_need_numpy() -> None:
    code = "import sys; sys.modules['numpy'] = None; import ktlinear; print(ktlinear.isa())"
    result = run(sys.executable, "-c", code, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() in ktlinear.available_isas()


def test_the_source_distribution_is_the_repository() -> None:
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("not a git checkout: nothing says which files there are")
    tracked = set(run("git", "ls-files", cwd=ROOT).stdout.split())
    script = "import sys, setuptools.build_meta as b; print(b.build_sdist(sys.argv[1]))"
    with tempfile.TemporaryDirectory() as folder:
        result = run(sys.executable, "-c", script, folder, cwd=ROOT)
        assert result.returncode == 0, result.stderr
        with tarfile.open(next(Path(folder).iterdir())) as archive:
            members = {"/".join(Path(name).parts[1:]) for name in archive.getnames()}
    assert {name for name in tracked - members if not name.startswith((".ci/", ".github/", ".gitignore"))} == set()
    assert not {name for name in members if name.endswith((".so", ".o", "_build_info.py"))}
