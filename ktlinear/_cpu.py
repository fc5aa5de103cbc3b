"""The instruction-set tiers: what each asks of the CPU and of the compiler.

``setup.py`` (which builds them) and the loader (which chooses one) read the same table, so this module imports nothing
but the standard library.
"""

from __future__ import annotations

import array
import os
import platform
from pathlib import Path
from typing import NamedTuple


class Tier(NamedTuple):
    """One row of the table.

    Attributes:
        features: what the CPU must have, as ``/proc/cpuinfo`` spells it. The kernel lists a feature only if it also
            saves the registers, so these names imply the operating system's support.
        cflags: the compiler flags for GCC and Clang.
        quantizer: the tier whose quantizers this one uses, the first with vectors as wide.
        mixmul: the tier whose kernels for quantized weights this one uses; empty if it has its own. Those kernels are
            nearly all of the library, so a tier whose own instructions serve float weights alone adds no second copy.
    """

    features: tuple[str, ...]
    cflags: tuple[str, ...]
    quantizer: str
    mixmul: str = ""


_AVX2 = ("avx", "fma", "f16c", "avx2", "bmi2")
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
_AVX512_FLAGS = (*_AVX2_FLAGS, "-mprfchw", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")

# Best first.
_X86_TIERS = {
    "amd_zen4": Tier(
        (*_AVX512, "avx512_vnni", "avx512_bf16"),
        (*_AVX512_FLAGS, "-mavx512vnni", "-mavx512bf16"),
        "amd_avx512f",
        "amd_avx512vnni",
    ),
    "amd_avx512vnni": Tier((*_AVX512, "avx512_vnni"), (*_AVX512_FLAGS, "-mavx512vnni"), "amd_avx512f"),
    "amd_avx512f": Tier(_AVX512, _AVX512_FLAGS, "amd_avx512f"),
    "amd_avxvnni": Tier((*_AVX2, "avx_vnni"), (*_AVX2_FLAGS, "-mprfchw", "-mavxvnni"), "amd_avx"),
    "amd_avx2": Tier(_AVX2, _AVX2_FLAGS, "amd_avx"),
    "amd_fma": Tier(("avx", "fma", "f16c"), ("-mavx", "-mfma", "-mf16c"), "amd_avx"),
    "amd_avx": Tier(("avx",), ("-mavx",), "amd_avx"),
}
# By features and not by version: A64FX is ARMv8.2 and has no dot products. GCC 12 wants a version all the same, and may
# use what that stands for.
_ARM82 = ("asimd", "crc32", "atomics", "asimdrdm", "fphp", "asimdhp", "asimddp")
_ARM_TIERS = {
    "arm86": Tier((*_ARM82, "i8mm"), ("-march=armv8.2-a+fp16+dotprod+i8mm",), "unsupported"),
    "arm82": Tier(_ARM82, ("-march=armv8.2-a+fp16+dotprod",), "unsupported"),
    "arm80": Tier(("asimd",), ("-march=armv8-a",), "unsupported"),
}
_PORTABLE_TIER = {"unsupported": Tier((), ("-DKT_PORTABLE",), "unsupported")}
_ALL_TIERS = {**_X86_TIERS, **_ARM_TIERS, **_PORTABLE_TIER}


def tiers_of(machine: str) -> dict[str, Tier]:
    """Name -> tier, of an architecture as ``platform.machine()`` names it, best first."""
    machine = machine.lower()
    if machine in ("x86_64", "amd64"):
        return {**_X86_TIERS, **_PORTABLE_TIER}
    return {**(_ARM_TIERS if machine in ("aarch64", "arm64") else {}), **_PORTABLE_TIER}


IS_X86 = platform.machine().lower() in ("x86_64", "amd64")

TIERS: dict[str, Tier] = tiers_of(platform.machine())
"""Name -> tier, of this machine's architecture, best first."""

# Arm's bits of AT_HWCAP and AT_HWCAP2 that the table asks for (arch/arm64/include/uapi/asm/hwcap.h).
_HWCAP = {"asimd": 1, "crc32": 7, "atomics": 8, "fphp": 9, "asimdhp": 10, "asimdrdm": 12, "asimddp": 20}
_HWCAP2 = {"i8mm": 13}


def features_of_hwcap(hwcap: int, hwcap2: int) -> frozenset[str]:
    """The features of an Arm CPU, of those that the table asks for, from what ``getauxval`` returns."""
    return frozenset(
        name for bits, names in ((hwcap, _HWCAP), (hwcap2, _HWCAP2)) for name, i in names.items() if bits >> i & 1
    )


def features() -> frozenset[str]:
    """The CPU's instruction-set features, as Linux names them; empty on another system.

    On Arm they come from the kernel's capability bits and are only those that the table asks for; else from
    ``/proc/cpuinfo``.

    The environment variable ``KTLINEAR_CPU_FEATURES`` (names separated by spaces or commas) takes their place. It is
    for tests: a feature claimed but missing ends the process with an illegal instruction.
    """
    override = os.environ.get("KTLINEAR_CPU_FEATURES")
    if override is not None:
        return frozenset(override.replace(",", " ").split())
    if "arm80" in TIERS and (hwcap := _auxiliary(16)):
        return features_of_hwcap(hwcap, _auxiliary(26))
    return frozenset((_cpuinfo("flags") or _cpuinfo("Features")).split())


def _auxiliary(kind: int) -> int:
    """The entry of the process's auxiliary vector with this number (AT_HWCAP is 16, AT_HWCAP2 26), or 0."""
    try:
        entries = iter(array.array("L", Path("/proc/self/auxv").read_bytes()))
    except (OSError, ValueError):
        return 0
    return dict(zip(entries, entries, strict=False)).get(kind, 0)


def model() -> str:
    """The CPU's name, as far as the system tells."""
    return _cpuinfo("model name") or platform.processor() or "unknown CPU"


def _cpuinfo(field: str) -> str:
    """The first value of a field of ``/proc/cpuinfo``; empty if there is none."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as cpuinfo:
            for line in cpuinfo:
                name, _, value = line.partition(":")
                if name.strip() == field:
                    return value.strip()
    except OSError:
        pass
    return ""


def missing(tier: str, have: frozenset[str]) -> list[str]:
    """The features of `tier` that are not in `have`, in the table's order."""
    return [name for name in _ALL_TIERS[tier].features if name not in have]


def runnable(tiers: list[str] | tuple[str, ...], have: frozenset[str]) -> list[str]:
    """Those of `tiers` that a CPU with these features can execute, best first."""
    return [name for name in _ALL_TIERS if name in tiers and not missing(name, have)]


COMPILE_FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-fvisibility=hidden")
"""What every source is compiled with. Without -ffp-contract=off tiers would differ by compiler: the sum of a product is
fused only where a kernel says so."""


def built_tiers(isa: str, tiers: dict[str, Tier]) -> list[str]:
    """Those of `tiers` that a build with ``KTLINEAR_ISA=isa`` holds, best first. ValueError if it names none."""
    if isa == "all":
        return list(tiers)
    if isa == "native":
        return runnable(list(tiers), features())[:1]
    if isa in tiers:
        return [isa]
    raise ValueError(f"KTLINEAR_ISA is {isa!r}; expected native, all, or one of: {', '.join(tiers)}")


def kernel_flags(isa: str, tiers: dict[str, Tier]) -> dict[str, list[str]]:
    """The kernels' sources (in csrc/tinyblas), each with the flags that only it gets, slowest to compile first.

    Nothing but a tier's own files sees its -m flags: an inline function compiled with them elsewhere could be picked by
    the linker for every tier. tiers.cpp is what selects the tier of a single-tier build, by these very flags.
    """
    built = built_tiers(isa, tiers)
    flags: dict[str, list[str]] = {}
    for tier in built:
        row = tiers[tier]
        parts = {"sgemm_": tier, "mixmul_": row.mixmul or tier} if tier != "unsupported" else {"": tier}
        flags |= {f"tinyblas_cpu_{part}{of}.cpp": list(tiers[of].cflags) for part, of in parts.items()}
        # Quantizers are vectors already; what -O3 would unroll makes them twice as large and no faster.
        flags[f"tinyblas_cpu_quantize_{row.quantizer}.cpp"] = [*tiers[row.quantizer].cflags, "-O2"]
    flags["tiers.cpp"] = ["-DKT_ALL_TIERS"] if isa == "all" else list(tiers[built[0]].cflags)
    return flags
