"""The results as text: a block per shape with a row per type and a column per M, then what stands out."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from ktlinear.bench.cli import spread_percent, table
from ktlinear.bench.timing import Spread, spread

CLIFF = 0.25
"""A throughput that falls by more from one M to the next larger one is flagged."""
ODD_COST = 0.15
"""An odd shape that costs more per operation than the round one next to it is flagged."""

Cell = dict[str, Any]

METRICS: list[tuple[str, Callable[[Cell], float], str]] = [
    ("GOP/s (median)", lambda c: c["rate"] / 1e9, "{:.1f}"),
    ("spread of the time, (q3 - q1) / median, %", lambda c: spread_percent(c["seconds"]), "{:.0f}"),
    ("times F.linear's speed (same dtype; fp32 for quantized types)", lambda c: c["times_flinear"]["median"], "{:.2f}"),
    ("% of the roofline", lambda c: 100 * c["of_roofline"], "{:.0f}"),
    (
        "% of the peak (fp32 FMA; products of bf16 and of int8 where the tier has them)",
        lambda c: 100 * c["of_peak"],
        "{:.0f}",
    ),
    ("% of the read bandwidth", lambda c: 100 * c["of_read"], "{:.0f}"),
]


def group(cells: list[Cell], *keys: str) -> dict[tuple[Any, ...], list[Cell]]:
    """Cells by the values of `keys`, in the order of their first appearance."""
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(tuple(cell[key] for key in keys), []).append(cell)
    return groups


def shape_block(cells: list[Cell]) -> str:
    """All metrics of one tier and shape."""
    ms = sorted({cell["m"] for cell in cells})
    blocks = []
    for title, metric, form in METRICS:
        rows = []
        for (name,), of_type in group(cells, "type").items():
            by_m = {cell["m"]: form.format(metric(cell)) for cell in of_type}
            rows.append((name, [by_m.get(m, "") for m in ms]))
        blocks.append(f" {title}\n" + table([f"M={m}" for m in ms], rows))
    return "\n".join(blocks)


def limit_text(name: str, s: Spread, unit: str) -> str:
    """One limit's median and quartiles."""
    return f"{name} {s.median / 1e9:.1f} {unit} ({s.q1 / 1e9:.1f} to {s.q3 / 1e9:.1f})"


def limits_line(cells: list[Cell]) -> str:
    """The limits that these cells were compared with, and how far they drifted from cell to cell."""
    limits = [
        ("fma", [c["peak"]["median"] for c in cells if c["instruction"] == "fma"], "GFLOP/s"),
        ("bf16", [c["peak"]["median"] for c in cells if c["instruction"] == "bf16"], "GFLOP/s"),
        ("dot", [c["peak"]["median"] for c in cells if c["instruction"] == "dot"], "GOP/s"),
        ("read", [c["read"]["median"] for c in cells], "GB/s"),
    ]
    parts = []
    for name, rates, unit in limits:
        if rates:
            parts.append(limit_text(name, spread(rates), unit))
    return ", ".join(parts)


def cliffs(cells: list[Cell]) -> list[str]:
    """One line for each M at which the throughput is more than `CLIFF` below that of the next smaller M."""
    lines = []
    for (isa, name, n, k), of_type in group(cells, "isa", "type", "n", "k").items():
        for a, b in pairwise(sorted(of_type, key=lambda c: c["m"])):
            if b["rate"] < (1 - CLIFF) * a["rate"]:
                fall = f"{a['rate'] / 1e9:.0f} at M = {a['m']}, {b['rate'] / 1e9:.0f} at M = {b['m']}"
                lines.append(f"{isa} {name} {n} x {k}: {fall}")
    return lines


def odd_block(results: list[Cell]) -> str:
    """What odd shapes cost; costs above `ODD_COST` are marked."""
    ms = sorted({r["m"] for r in results})
    rows = []
    for (name, odd, round_shape), of_type in group(
        [{**r, "odd": tuple(r["odd"]), "round": tuple(r["round"])} for r in results], "type", "odd", "round"
    ).items():
        by_m = {r["m"]: f"{100 * r['cost']:+.0f}{'!' if r['cost'] > ODD_COST else ' '}" for r in of_type}
        label = f"{name} {odd[0]} x {odd[1]} beside {round_shape[0]} x {round_shape[1]}"
        rows.append((label, [by_m.get(m, "") for m in ms]))
    return table([f"M={m} " for m in ms], rows)


def experts_block(cells: list[Cell]) -> str:
    """The expert-routed product of one tier and shape."""
    ms = sorted({c["m"] for c in cells})
    read = spread([c["read"]["median"] for c in cells])
    metrics: list[tuple[str, Callable[[Cell], float | None], str]] = [
        ("us (median)", lambda c: 1e6 * c["seconds"]["median"], "{:.0f}"),
        ("% of the read bandwidth, for the experts in use", lambda c: 100 * c["of_read"], "{:.0f}"),
        ("times the speed of one linear for each expert", lambda c: c["times_linears"]["median"], "{:.2f}"),
        (
            "times the speed of one F.linear for each expert (float types)",
            lambda c: c["times_flinears"] and c["times_flinears"]["median"],
            "{:.2f}",
        ),
    ]
    layout = "packed" if any(c["packed"] for c in cells) else "plain rows"
    blocks = [
        "{experts} experts, {top_k} a token, N = {n}, K = {k}   {isa}".format(**cells[0])
        + f"   quantized weights: {layout}\nlimits: {limit_text('read', read, 'GB/s')}"
    ]
    for title, metric, form in metrics:
        rows = []
        for (name,), of_type in group(cells, "type").items():
            by_m = {c["m"]: metric(c) for c in of_type}
            if None not in by_m.values():
                rows.append((name, [form.format(by_m[m]) for m in ms]))
        if rows:
            blocks.append(f" {title}\n" + table([f"T={m}" for m in ms], rows))
    return "\n".join(blocks)


def calls_block(calls: dict[str, Any]) -> str:
    """Microseconds per call of the smallest linears."""
    rows = [
        (name, [f"{1e6 * c['seconds']['median']:.2f}", f"{spread_percent(c['seconds']):.0f}", f"{c['of_flinear']:.2f}"])
        for name, c in calls.items()
    ]
    return table(["us", "spread %", "of F.linear's time"], rows)


def models_text(cells: list[Cell]) -> str:
    """A table per model and task: tokens/s, and times the yardsticks' of the same rounds."""
    blocks = []
    for (model, task), of_task in group(cells, "model", "task").items():
        yardsticks = list(of_task[0]["times"])
        rows = [
            (
                c["runtime"],
                [
                    f"{c['rate']['median']:.1f}",
                    f"{spread_percent(c['rate']):.0f}",
                    *(f"{c['times'][key]['median']:.2f}" for key in yardsticks),
                ],
            )
            for c in of_task
        ]
        columns = ["tokens/s", "spread %", *(f"times {key}" for key in yardsticks)]
        blocks.append(f"{model}, {task}\n{table(columns, rows)}")
    return "\n\n".join(blocks)


def types_block(results: dict[str, Any]) -> str:
    """A row per weight type: size, speed, and perplexity with its divergence from the baseline."""

    def cells_of(c: Cell) -> list[str]:
        qualities = [
            text
            for found in (c["plain"], c["importance"])
            for text in ((f"{found['perplexity']:.2f}", f"{found['divergence']:.4f}") if found else ("-", "-"))
        ]
        rates = [f"{c[key]['median']:.0f}" for key in ("prefill", "decode")]
        return [f"{c['bits']:.2f}", f"{c['bits_in_memory']:.2f}", f"{c['megabytes']:.1f}", *rates, *qualities]

    columns = ["bits", "in memory", "MB", "prefill/s", "decode/s", "perplexity", "KL", "with imatrix", "KL "]
    rows = [(c["type"], cells_of(c)) for c in results["cells"]]
    return f"Weight types; the baseline's perplexity is {results['baseline']:.2f}\n{table(columns, rows)}"


def text(results: dict[str, Any]) -> str:
    """Return the whole report."""
    machine = results["machine"]
    parts = ["\n".join(f"{name:<10}{value}" for name, value in machine.items())]
    cells = results["cells"]
    for (isa, n, k), of_shape in group(cells, "isa", "n", "k").items():
        layout = "packed" if any(c["packed"] for c in of_shape) else "plain rows"
        parts.append(
            f"N = {n}, K = {k}   {isa}   quantized weights: {layout}\nlimits: {limits_line(of_shape)}\n"
            + shape_block(of_shape)
        )
    parts += [experts_block(of_shape) for of_shape in group(results["experts"], "isa", "n", "k").values()]
    if cells:
        found = "\n  ".join(["", *cliffs(cells)]) or "none"
        parts.append(f"Throughput that falls by more than {CLIFF:.0%} with M: {found}")
    if results["odd_shapes"]:
        parts.append(
            f"Odd shapes: time per operation beside the round shape's, % (! above {ODD_COST:.0%})\n"
            + odd_block(results["odd_shapes"])
        )
    if results["calls"]:
        parts.append("A call, 64 x 64, M = 1\n" + calls_block(results["calls"]))
    if "models" in results:
        parts.append(models_text(results["models"]))
    if "types" in results:
        parts.append(types_block(results["types"]))
    parts += results["notes"]
    return "\n\n".join(parts)
