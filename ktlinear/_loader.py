"""Loads the library, after comparing the CPU with what was compiled in: a missing instruction is an ImportError."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from . import _cpu


def _compiled() -> tuple[str, ...]:
    try:
        # By name: setup.py writes the module, and a type checker may look at a tree that is not built.
        return importlib.import_module("ktlinear._build_info").TIERS
    except ModuleNotFoundError:
        raise ImportError(
            "ktlinear is not built: ktlinear/_build_info.py is missing. "
            "Install it with `pip install .`, or `pip install --no-build-isolation -e .` to work on it."
        ) from None


def _library() -> Path:
    folder = Path(__file__).resolve().parent
    for pattern in ("_C*.so", "_C*.pyd"):
        for path in sorted(folder.glob(pattern)):
            return path
    raise ImportError(f"ktlinear is not built: there is no _C library in {folder}")


def _choose() -> tuple[str, str]:
    """Return the tier to use and why.

    Raises:
        ImportError: the CPU can run none of the compiled tiers, or not the one that KTLINEAR_FORCE_ISA names.
    """
    compiled = _compiled()
    have = _cpu.features()
    usable = _cpu.runnable(compiled, have)
    forced = os.environ.get("KTLINEAR_FORCE_ISA")
    if forced and forced not in usable:
        reason = (
            f"the CPU lacks {', '.join(_cpu.missing(forced, have))}" if forced in compiled else "it is not compiled in"
        )
        raise ImportError(
            f"KTLINEAR_FORCE_ISA is {forced!r}, but {reason}. "
            f"Compiled in: {', '.join(compiled)}; possible on this CPU: {', '.join(usable) or 'none'}."
        )
    if forced:
        return forced, "KTLINEAR_FORCE_ISA asks for it"
    if not usable:
        lacks = "; ".join(f"{name} needs {', '.join(_cpu.missing(name, have))}" for name in compiled)
        raise ImportError(
            f"this CPU cannot run ktlinear as it was built. Compiled in: {', '.join(compiled)}; missing: {lacks}. "
            "Build it on this machine (KTLINEAR_ISA=native), or for every CPU (KTLINEAR_ISA=all)."
        )
    return usable[0], "the best compiled tier that this CPU can run"


def _load() -> str:
    tier, reason = _choose()
    torch.ops.load_library(_library())
    torch.ops.kt._use_isa(tier)
    return reason


REASON = _load()
"""Why the tier in use at load was chosen."""


def isa() -> str:
    """The name of the instruction-set tier in use, such as ``"amd_avx2"``."""
    return torch.ops.kt._isa()


def compiled_isas() -> tuple[str, ...]:
    """The tiers compiled into the library, best first."""
    return tuple(torch.ops.kt._available_isas().split(","))


def available_isas() -> tuple[str, ...]:
    """The tiers that can be used here, best first: compiled in, and the CPU can run them."""
    return tuple(_cpu.runnable(compiled_isas(), _cpu.features()))


@contextlib.contextmanager
def use_isa(name: str) -> Iterator[None]:
    """Use another tier inside a ``with`` block, in the calling thread. For tests and comparisons.

    Raises:
        ValueError: `name` is not one of ``available_isas()``.
    """
    available = available_isas()
    if name not in available:
        raise ValueError(f"name is {name!r}; available are {', '.join(available)}")
    previous = isa()
    torch.ops.kt._use_isa(name)
    try:
        yield
    finally:
        torch.ops.kt._use_isa(previous)


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """Compute quantized weights exactly inside a ``with`` block, in the calling thread.

    The weights are decoded to fp32 and the activations are left as they are, where the default on CPUs with fast
    integer products rounds the activations to int8 (one scale per 32 elements, about 0.6 % relative RMS error).
    """
    previous = torch.ops.kt._set_exact(True)
    try:
        yield
    finally:
        torch.ops.kt._set_exact(previous)
