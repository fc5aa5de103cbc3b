"""Pictures: the roofline with ours and F.linear; for many types, a map of each cell's share of it; models as bars."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import LogLocator, NullFormatter  # noqa: E402

from ktlinear.bench.timing import spread  # noqa: E402

from .report import Cell, group  # noqa: E402

COLORS = {
    "F32": "#1f77b4",
    "F16": "#e67e22",
    "BF16": "#2ca02c",
    "Q4_0": "#c0392b",
    "Q4_1": "#8e44ad",
    "Q8_0": "#16a085",
}
GREY = "#808080"
PANELS = (
    ("fma", "Float weights", "GFLOP/s"),
    ("bf16", "bf16 weights and inputs", "GFLOP/s"),
    ("dot", "Quantized weights (int8 products)", "GOP/s"),
)


def panel(axes: Axes, cells: list[Cell], title: str, unit: str) -> None:
    """One roof (read bandwidth, then a peak), our types as lines over M, and F.linear's fp32.

    The roof is that of the median limits. A point keeps the distance to the roof that it had when it was measured,
    beside limits of its own: on a shared machine those drift from cell to cell.
    """
    peak = spread([c["peak"]["median"] for c in cells]).median / 1e9
    read = spread([c["read"]["median"] for c in cells]).median / 1e9

    def placed(cell: Cell, rate: float, intensity: float) -> float:
        own = min(cell["peak"]["median"], cell["read"]["median"] * intensity)
        return rate / own * min(peak, read * intensity)

    lines = []  # label, color, style, [(operations per byte, rate)]
    for (name,), of_type in group(cells, "type").items():
        points = []
        for c in of_type:
            x = c["operations"] / c["weight_bytes"]
            points.append((x, placed(c, c["rate"], x)))
        lines.append((name, COLORS.get(name), "o-", points))
    fp32 = [c for c in cells if c["type"] not in ("F16", "BF16")]
    fp32 = [c for c in fp32 if c["type"] == fp32[0]["type"]]
    # F.linear: 2 M N K operations on 4 N K bytes.
    points = [(c["m"] / 2, placed(c, c["flinear_rate"], c["m"] / 2)) for c in fp32]
    if points:
        lines.append(("F.linear, fp32", GREY, "x--", points))
    for label, color, style, points in lines:
        axes.plot(*zip(*points, strict=True), style, color=color, markersize=4.5, linewidth=1.2, label=label)

    intensities = [x for *_, points in lines for x, _ in points]
    left, right = min(intensities) / 1.6, max(intensities) * 1.6
    axes.plot([left, peak / read, right], [left * read, peak, peak], color="black", linewidth=1.4, zorder=1)
    limits = f"read {read:.0f} GB/s\npeak {peak:.0f} {unit}"
    axes.text(0.03, 0.96, limits, transform=axes.transAxes, va="top", fontsize=8.5)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    rates = [y for *_, points in lines for _, y in points]
    axes.set_ylim(min(left * read, min(rates) / 1.5), max(1.6 * peak, 1.3 * max(rates)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("operations per byte of the weight = 2 M / bytes per element", fontsize=8.5)
    axes.set_ylabel(unit, fontsize=8.5)
    axes.tick_params(labelsize=8)
    axes.grid(True, which="major", color="#e6e6e6", linewidth=0.6)
    axes.legend(fontsize=8, loc="lower right", frameon=False)


def draw(results: dict[str, Any], path: Path) -> None:
    """Write a picture of the run's tier to `path`: the roofline of the first shape; for more types than lines a map."""
    tier = results["machine"]["tier"]
    cells = [c for c in results["cells"] if c["isa"] == tier]
    path.parent.mkdir(parents=True, exist_ok=True)
    if "models" in results:
        figure = bars(results)
    elif len({c["type"] for c in cells}) > len(COLORS):
        figure = shares(cells, f"% of the roofline\n{results['machine']['threads']} threads, {tier}, cold weights")
    else:
        figure = roofline([c for c in cells if (c["n"], c["k"]) == (cells[0]["n"], cells[0]["k"])], results)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def bars(results: dict[str, Any]) -> Figure:
    """A panel per model and task, a bar per runtime: tokens/s, with the quartiles."""
    panels = list(group(results["models"], "model", "task").items())
    rows = -(-len(panels) // 2)
    figure, axes = plt.subplots(rows, 2, figsize=(8.6, 2.6 * rows), squeeze=False)
    for ax, ((model, task), of_task) in zip(axes.flat, panels, strict=True):  # two tasks of each model
        rates = [c["rate"] for c in of_task]
        errors = [[r["median"] - r["q1"] for r in rates], [r["q3"] - r["median"] for r in rates]]
        names = [c["runtime"].replace(" ", "\n", 1) for c in of_task]
        colors = [COLORS["Q4_0"] if name.startswith("ktlinear") else GREY for name in names]
        drawn = ax.bar(names, [r["median"] for r in rates], yerr=errors, color=colors, width=0.65)
        ax.bar_label(drawn, fmt="{:.0f}", fontsize=8, padding=2)
        ax.margins(y=0.15)
        ax.set_title(f"{model}\n{task}, tokens/s", fontsize=9)
        ax.tick_params(labelsize=7.5)
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{results['machine']['threads']} threads, {results['machine']['tier']}", fontsize=9)
    figure.tight_layout()
    return figure


def shares(cells: list[Cell], title: str) -> Figure:
    """A column of squares per M, a row per type, a panel per shape: the percentage of the roofline."""
    shapes = list(group(cells, "n", "k").items())
    names, ms = list(dict.fromkeys(c["type"] for c in cells)), sorted({c["m"] for c in cells})
    size = (1.8 + len(shapes) * (0.5 + 0.36 * len(ms)), 1.3 + 0.25 * len(names))
    figure, axes = plt.subplots(1, len(shapes), figsize=size, squeeze=False, sharey=True)
    for ax, ((n, k), of_shape) in zip(axes[0], shapes, strict=True):
        values = [[math.nan] * len(ms) for _ in names]  # left blank: the block does not divide K
        for c in of_shape:
            values[names.index(c["type"])][ms.index(c["m"])] = 100 * c["of_roofline"]
        ax.imshow(values, cmap="RdYlGn", vmin=20, vmax=100, aspect="auto")
        for i, row in enumerate(values):
            for j, value in enumerate(row):
                if not math.isnan(value):
                    ax.text(j, i, f"{value:.0f}", ha="center", va="center", fontsize=7)
        ax.set_xticks(range(len(ms)), [str(m) for m in ms], fontsize=8)
        ax.set_yticks(range(len(names)), names, fontsize=8)
        ax.set_title(f"{n} x {k}", fontsize=9)
        ax.set_xlabel("M", fontsize=8)
        ax.tick_params(length=0)
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    return figure


def roofline(cells: list[Cell], results: dict[str, Any]) -> Figure:
    """A panel for each instruction: fp32 FMAs, bf16 products where the tier has them, int8 products."""
    tier = results["machine"]["tier"]
    of_panel = [(p, [c for c in cells if (c["instruction"] == p[0])]) for p in PANELS]
    of_panel = [(p, found) for p, found in of_panel if found]
    figure, axes = plt.subplots(1, len(of_panel), figsize=(4.7 * len(of_panel), 4.0), squeeze=False)
    for ax, ((_, title, unit), found) in zip(axes[0], of_panel, strict=True):
        panel(ax, found, title, unit)
    machine = results["machine"]
    ms = ", ".join(str(m) for m in sorted({c["m"] for c in cells}))
    figure.suptitle(
        f"N = {cells[0]['n']}, K = {cells[0]['k']}, M = {ms}; cold weights, {machine['threads']} threads, {tier}",
        fontsize=9,
    )
    figure.tight_layout()
    return figure
