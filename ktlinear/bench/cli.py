"""``python -m ktlinear bench``: one's own shapes, beside F.linear in fp32 and bf16 and the machine's limits."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from ..ops import FORMATS, WeightType, weight_type
from . import cases
from .weights import Arena


def positive(text: str) -> int:
    """A positive integer."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def listed(item: Any) -> Any:
    """A parser of comma-separated items."""

    def parse(text: str) -> list[Any]:
        try:
            return [item(part) for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def types(text: str) -> list[WeightType]:
    """ "Q4_0,Q8_0" or "all"."""
    return list(FORMATS) if text == "all" else listed(weight_type)(text)


def spread_percent(s: dict[str, float]) -> float:
    """Distance of the quartiles in % of the median."""
    return 100 * (s["q3"] - s["q1"]) / s["median"]


def table(columns: list[str], rows: list[tuple[str, list[str]]]) -> str:
    """Rows of a label and right-aligned cells under `columns`."""
    label_width = max(len(label) for label, _ in rows)
    widths = [max(6, len(column), *(len(cells[i]) for _, cells in rows)) for i, column in enumerate(columns)]
    lines = [("", columns), *rows]
    return "\n".join(
        f"  {label:<{label_width}}" + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for label, cells in lines
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "--m",
        type=listed(positive),
        default=[1, 16, 512],
        metavar="M,...",
        help="rows of the input (default: 1,16,512)",
    )
    parser.add_argument("--n", type=positive, default=4096, metavar="N", help="out_features (default: %(default)s)")
    parser.add_argument("--k", type=positive, default=4096, metavar="K", help="in_features (default: %(default)s)")
    parser.add_argument(
        "--types",
        type=types,
        default=[WeightType.Q4_K],
        metavar="TYPE,...",
        help="weight types, or all (default: Q4_K)",
    )
    parser.add_argument(
        "--threads",
        type=positive,
        default=torch.get_num_threads(),
        metavar="T",
        help="default: PyTorch's, here %(default)s",
    )
    parser.add_argument(
        "--memory",
        type=positive,
        default=256,
        metavar="MIB",
        help="MiB of copies of a weight, so that none is cached (default: %(default)s)",
    )


@torch.inference_mode()
def bench(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Measure and print a table for each type; an argument that does not fit ends the process with a message."""
    for t in args.types:
        if args.k % FORMATS[t].block:
            parser.error(f"--k: {args.k} is no multiple of {FORMATS[t].block}, the block of {t.name}")
    torch.set_num_threads(args.threads)
    shared = cases.Bench(Arena(args.memory << 20), Arena(args.memory << 20), cases.Effort(5, 0.5, 0.005), packed=True)
    for t in args.types:
        fp32, bf16 = (
            cases.linears(shared, t, (args.n, args.k), sorted(set(args.m)), dtype)
            for dtype in (torch.float32, torch.bfloat16)
        )
        rows = [(str(a["m"]), row(a, b)) for a, b in zip(fp32, bf16, strict=True)]
        layout = "packed, " if fp32[0]["packed"] else ""
        print(f"{t.name}, N = {args.n}, K = {args.k}, {layout}{args.threads} threads, {fp32[0]['isa']}, cold weights")
        print(table(COLUMNS, rows), end="\n\n")


COLUMNS = ["us", "GOP/s", "GB/s", "% of peak", "% of read", "% of roofline", "x F.linear fp32", "x F.linear bf16"]


def row(cell: dict[str, Any], beside_bf16: dict[str, Any]) -> list[str]:
    """The cells of one M."""
    seconds = cell["seconds"]["median"]
    shares = [f"{100 * cell[key]:.1f}" for key in ("of_peak", "of_read", "of_roofline")]
    times = [f"{c['times_flinear']['median']:.2f}" for c in (cell, beside_bf16)]
    return [
        f"{1e6 * seconds:.2f}",
        f"{cell['rate'] / 1e9:.1f}",
        f"{cell['weight_bytes'] / seconds / 1e9:.2f}",
        *shares,
        *times,
    ]
