"""Measures linears beside F.linear and the machine's limits, experts beside linears,
whole models beside other runtimes, or the weight types' size, speed and perplexity: in turn, in one process.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import ktlinear
from ktlinear import WeightType, _cpu
from ktlinear.bench import cases
from ktlinear.bench.cli import listed, positive, types
from ktlinear.bench.weights import Arena
from ktlinear.ops import FORMATS, weight_type

from . import report

SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336), (1536, 576)]
TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0")
MS = [1, 2, 4, 8, 16, 32, 64, 128, 512]
EXPERTS, TOP_K = 64, 8
EXPERTS_SHAPES, EXPERTS_MS = [(1408, 2048)], [1, 4, 32, 512]
FORCED_ISA, FORCED_TYPES = "amd_avx2", (WeightType.F32, WeightType.Q4_0)


def shape(text: str) -> tuple[int, int]:
    """ "4096x576" -> (4096, 576), N x K."""
    try:
        n, k = (int(part) for part in text.lower().split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"shape is {text!r}; expected NxK, such as 4096x4096") from None
    if n < 1 or k < 1:
        raise argparse.ArgumentTypeError(f"shape is {text!r}; expected positive numbers")
    return n, k


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "what",
        nargs="?",
        choices=("linears", "experts", "models", "types"),
        default="linears",
        help=f"linears; the expert-routed product of {EXPERTS} experts, {TOP_K} a token; SmolLM2 and Gemma 3, "
        "prefill and decode; or each weight type's size, speed and perplexity in SmolLM2 (default: linears)",
    )
    parser.add_argument("--types", type=types, help=f"weight types, or all (default: {','.join(TYPES)}; of types, all)")
    parser.add_argument("--m", type=listed(positive), help="rows of the input, or tokens")
    parser.add_argument("--shapes", type=listed(shape), help="N x K of the weights, such as 4096x4096,1536x576")
    parser.add_argument("--isa", choices=ktlinear.available_isas(), help="tier (default: the one in use)")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    parser.add_argument("--plain", action="store_true", help="quantized weights as GGUF rows, not packed")
    parser.add_argument("--quick", action="store_true", help="fewer shapes, Ms and repeats: under a minute")
    parser.add_argument(
        "--memory", type=positive, default=1536, metavar="MIB", help="copies of a weight (default: 1536)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number")
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help="write the roofline, a map of many types, or bars of models (needs matplotlib)",
    )
    args = parser.parse_args(argv)
    if args.what == "models":
        for option in ("types", "m", "shapes"):
            if getattr(args, option):
                parser.error(f"--{option}: the models' own are measured")
        if args.plain:
            parser.error("--plain: models are measured packed")
    if args.what == "types":
        for option in ("m", "shapes", "plain", "picture"):
            if getattr(args, option):
                parser.error(f"--{option}: types are measured in one whole model, packed, and have no picture")
    args.types = args.types or (list(FORMATS) if args.what == "types" else [weight_type(name) for name in TYPES])
    if args.what == "experts":
        if args.picture:
            parser.error("--picture: the roofline is one of linears")
        args.m, args.shapes = args.m or EXPERTS_MS, args.shapes or EXPERTS_SHAPES
    args.m = sorted(set(args.m or ([1, 16, 512] if args.quick else MS)))
    args.shapes = args.shapes or ([SHAPES[0], SHAPES[-1]] if args.quick else SHAPES)
    for t in args.types if args.what not in ("models", "types") else ():
        if not any(fits(t, s) for s in args.shapes):
            parser.error(f"--types {t.name}: K has to be a multiple of {FORMATS[t].block} in one of the shapes")
    return args


def fits(t: WeightType, s: cases.Shape) -> bool:
    """Whether the type's block divides the shape's K."""
    return s[1] % FORMATS[t].block == 0


@torch.inference_mode()
def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure everything; the result is what the JSON file holds."""
    start = time.perf_counter()
    results: dict[str, Any] = {"machine": {}, "cells": [], "odd_shapes": [], "experts": [], "calls": {}, "notes": []}
    if args.what == "models":
        from . import models  # needs transformers

        results["models"] = models.run(torch.get_num_threads(), args.quick, results["notes"])
        weights = "one GGUF file for all runtimes"
    elif args.what == "types":
        from . import types as weight_types  # needs transformers

        results["types"] = weight_types.run(args.types, args.quick, results["notes"])
        weights = "SmolLM2-135M Q4_1, dequantized; speeds of a random model of its size"
    else:
        run_matrices(args, results)
        weights = f"{args.memory} MiB of copies, each call on the next one"
    results["machine"] = {
        "cpu": _cpu.model(),
        "system": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "tier": ktlinear.isa(),
        "ktlinear": ktlinear.__version__,
        "PyTorch": torch.__version__,
        "weights": weights,
        "seconds": round(time.perf_counter() - start),
    }
    return results


def run_matrices(args: argparse.Namespace, results: dict[str, Any]) -> None:
    """Measure linears or experts, into `results`."""
    experts = args.what == "experts"
    effort = cases.Effort(3, 0.3, 0.003) if args.quick else cases.Effort(7, 0.8, 0.006)
    ours, theirs = Arena(args.memory << 20), Arena(0 if experts else args.memory << 20)
    bench = cases.Bench(ours, theirs, effort, packed=not args.plain)
    cells, odd, routed, notes = (results[key] for key in ("cells", "odd_shapes", "experts", "notes"))
    few_ms = sorted({args.m[0], args.m[len(args.m) // 2], args.m[-1]})

    few_shapes = args.shapes[-1:] if args.quick else list(dict.fromkeys((args.shapes[0], args.shapes[-1])))
    jobs = [(args.what, s, t) for s in args.shapes for t in args.types]
    if not experts:
        jobs += [("odd", s, t) for s in few_shapes for t in args.types]
        if FORCED_ISA not in ktlinear.available_isas():
            notes.append(f"{FORCED_ISA} was not measured: it is not compiled in, or this CPU lacks it.")
        elif ktlinear.isa() != FORCED_ISA:
            jobs += [("forced", args.shapes[0], t) for t in FORCED_TYPES if t in args.types]
    jobs = [(job, s, t) for job, s, t in jobs if fits(t, s)]
    if not experts:
        results["calls"] = cases.call_cost(effort)
    with tqdm(jobs, unit="weight", disable=None) as progress:
        for job, s, t in progress:
            progress.set_postfix_str(f"{t.name} {s[0]} x {s[1]}")
            if job == "linears":
                cells += cases.linears(bench, t, s, args.m)
            elif job == "odd":
                odd += cases.odd_shapes(bench, t, s, few_ms)
            elif job == "experts":
                routed += cases.experts(bench, t, s, EXPERTS, TOP_K, args.m)
            else:
                with ktlinear.use_isa(FORCED_ISA):
                    cells += cases.linears(bench, t, s, args.m)


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    if args.isa:
        torch.ops.kt._use_isa(args.isa)
    results = run(args)
    print(report.text(results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    if args.picture:
        from . import picture  # matplotlib takes a second to import, and only this needs it

        picture.draw(results, args.picture)


if __name__ == "__main__":
    main()
