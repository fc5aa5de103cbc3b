"""``python -m ktlinear info``: what was built, what this CPU can run, and what is in use."""

from __future__ import annotations

import argparse
import platform

import torch

import ktlinear
from ktlinear import _cpu, _loader


def info() -> str:
    """Return the report as text."""
    have = _cpu.features()
    used = {name for tier in _cpu.TIERS.values() for name in tier.features}
    compiled = _loader.compiled_isas()
    rows = [
        ("ktlinear", ktlinear.__version__),
        ("PyTorch", torch.__version__),
        ("Python", platform.python_version()),
        ("machine", f"{platform.machine()}, {_cpu.model()}"),
        ("threads", str(torch.get_num_threads())),
        ("compiled tiers", ", ".join(compiled)),
        ("tier in use", f"{ktlinear.isa()} ({_loader.REASON})"),
        ("CPU features", ", ".join(sorted(used & have)) or "none that a tier asks for"),
    ]
    rows += [
        (f"not usable: {name}", f"the CPU lacks {', '.join(lack)}")
        for name in compiled
        if (lack := _cpu.missing(name, have))
    ]
    width = max(len(label) for label, _ in rows) + 2
    return "\n".join(f"{label:<{width}}{value}" for label, value in rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ktlinear", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="print versions, tiers, CPU features and threads")
    parser.parse_args()
    print(info())


if __name__ == "__main__":
    main()
