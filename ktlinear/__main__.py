"""``python -m ktlinear info | quantize | bench``: this machine; a safetensors model, quantized; the speed of shapes."""

from __future__ import annotations

import argparse
import platform
import signal
import sys
from typing import Any

import torch

import ktlinear
from ktlinear import _cpu, _loader
from ktlinear.bench import cli
from ktlinear.quantize import quantize_checkpoint


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


def rule(text: str) -> tuple[str, str | None]:
    """Parse PATTERN=TYPE."""
    pattern, equals, kind = text.rpartition("=")
    if not equals or not pattern:
        raise argparse.ArgumentTypeError(f"{text!r} is not PATTERN=TYPE, as in '*.down_proj=Q6_K' or 'lm_head=none'")
    return pattern, None if kind.lower() == "none" else kind


def quantize(arguments: argparse.Namespace) -> None:
    """Run the command; any failure ends the process with a message and without a result."""
    try:
        report = quantize_checkpoint(
            arguments.source,
            arguments.target,
            arguments.type,
            rules=dict(arguments.rule),
            imatrix=arguments.imatrix,
        )
    except KeyboardInterrupt:
        sys.exit(f"python -m ktlinear quantize: interrupted; there is no {arguments.target}")
    except (ImportError, OSError, RuntimeError, ValueError) as error:  # RuntimeError: what an operator refuses
        sys.exit(f"python -m ktlinear quantize: {error}")
    print(report)
    print(f"written to {arguments.target}")


def stop(number: int, frame: Any) -> None:
    """End as after Ctrl-C, which cleans up."""
    raise KeyboardInterrupt


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ktlinear",
        description="Linear layers on the CPU for quantized weights.",
        epilog="COMMAND --help tells the options of a command.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("info", help="print versions, tiers, CPU features and threads")
    command = commands.add_parser(
        "quantize",
        help="quantize a safetensors model",
        description="Quantize a safetensors model into a new one of the same names, and report bits per weight and "
        "error of each tensor. ktlinear.load_quantized(model, OUT) and, for a folder, transformers' from_pretrained "
        "load it.",
    )
    command.add_argument("source", metavar="IN", help="a safetensors file, or a folder of the Hugging Face layout")
    command.add_argument("target", metavar="OUT", help="a file or folder that does not exist yet")
    command.add_argument(
        "--type",
        default="Q4_K",
        help="weight type of the linear layers (default: %(default)s, mixed as llama.cpp's Q4_K_M)",
    )
    command.add_argument(
        "--rule",
        type=rule,
        action="append",
        default=[],
        metavar="PATTERN=TYPE",
        help="another type, or none, for modules of that name, as in '*.down_proj=Q6_K' or 'lm_head=none'; the first "
        "rule that matches decides, and '*=Q4_K' puts everything in one type",
    )
    command.add_argument("--imatrix", metavar="FILE", help="an importance matrix of llama.cpp, GGUF or imatrix.dat")
    benchmark = commands.add_parser(
        "bench",
        help="measure linears of your shapes beside F.linear and the limits",
        description="Measure y = x W^T of your shapes, with weights that come from memory, beside F.linear in fp32 and "
        "bf16 and beside the peak and the memory bandwidth of this machine.",
    )
    cli.add_arguments(benchmark)
    arguments = parser.parse_args()
    if arguments.command == "info":
        print(info())
    elif arguments.command == "bench":
        cli.bench(benchmark, arguments)
    else:
        quantize(arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    main()
