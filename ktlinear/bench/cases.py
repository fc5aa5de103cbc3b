"""What is measured. Every function returns plain dictionaries, as they go into the JSON file."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import ktlinear
from ktlinear.nn import FLOAT_DTYPES
from ktlinear.ops import FORMATS, WeightType

from . import limits
from .timing import calls_for, in_turn, ratio, seconds, spread
from .weights import Arena

Shape = tuple[int, int]


@dataclass(frozen=True)
class Effort:
    """How much time a measurement may take.

    Attributes:
        repeats: rounds at most.
        budget: seconds per cell, after which no round begins (three there always are).
        batch: seconds of calls in a row that make one measurement.
    """

    repeats: int
    budget: float
    batch: float


@dataclass
class Bench:
    """What the cases share: the memory of the weights, ours and F.linear's, and the effort."""

    ours: Arena
    theirs: Arena
    effort: Effort
    packed: bool


def linear_op(weight_type: WeightType, n: int, packed: bool) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """y = op(x, weight) through the operator itself."""
    if weight_type in FLOAT_DTYPES:
        return torch.ops.kt._linear.default
    if packed:
        op = torch.ops.kt._linear_packed.default
        return lambda x, weight: op(x, weight, None, n, x.shape[-1], weight_type)
    plain = torch.ops.kt._linear.default
    return lambda x, weight: plain(x, weight, None, weight_type)


def batch_seconds(
    op: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    weights: Iterator[torch.Tensor],
    batch: float,
) -> Callable[[], float]:
    """Return a measure: seconds per call, each on the next of `weights`, over about `batch` seconds."""

    def call() -> None:
        op(x, next(weights))

    return functools.partial(seconds, call, calls_for(call, batch))


def peak_of(weight_type: WeightType) -> tuple[str, Callable[[], float]]:
    """The instruction that bounds a type's large products, and a measure of it in operations/s."""
    own = "dot" if weight_type not in FLOAT_DTYPES else "bf16" if weight_type == WeightType.BF16 else "fma"
    for instruction in (own, "fma"):
        if measure := limits.peak(instruction):
            return instruction, measure
    raise AssertionError("a tier without fp32")


def linears(
    bench: Bench, weight_type: WeightType, shape: Shape, ms: list[int], yardstick: torch.dtype | None = None
) -> list[dict[str, Any]]:
    """One cell per M: our linear and F.linear on cold weights in turn with the limits that bound ours.

    F.linear is in `yardstick`, or else in the same dtype for float types, fp32 for quantized ones.
    The roofline is max(bytes of the weight / read bandwidth, 2 M N K / peak): a lower bound of the time.
    """
    n, k = shape
    dtype = FLOAT_DTYPES.get(weight_type, torch.float32)
    bench.ours.fill(weight_type, n, k, bench.packed)
    yardstick = yardstick or dtype
    bench.theirs.fill(ktlinear.nn.FLOAT_TYPES[yardstick], n, k, False)
    instruction, peak = peak_of(weight_type)
    read = limits.read(bench.ours.memory)
    ours, theirs = bench.ours.cycle(), bench.theirs.cycle()
    cells = []
    for m in ms:
        x = torch.randn(m, k).to(dtype)
        times = in_turn(
            {
                "ours": batch_seconds(linear_op(weight_type, n, bench.packed), x, ours, bench.effort.batch),
                "peak": peak,
                "read": read,
                "theirs": batch_seconds(F.linear, x.to(yardstick), theirs, bench.effort.batch),
            },
            bench.effort.repeats,
            bench.effort.budget,
        )
        t, flinear = spread(times["ours"]), spread(times["theirs"])
        best, bandwidth = spread(times["peak"]), spread(times["read"])
        operations, nbytes = 2 * m * n * k, bench.ours.weight_bytes
        cells.append(
            {
                "isa": ktlinear.isa(),
                "type": weight_type.name,
                "packed": bench.packed and weight_type not in FLOAT_DTYPES,
                "n": n,
                "k": k,
                "m": m,
                "seconds": t._asdict(),
                "flinear_seconds": flinear._asdict(),
                "operations": operations,
                "weight_bytes": nbytes,
                "instruction": instruction,
                "peak": best._asdict(),
                "read": bandwidth._asdict(),
                "rate": operations / t.median,
                "flinear_rate": operations / flinear.median,
                "times_flinear": ratio(times["theirs"], times["ours"])._asdict(),
                "of_peak": operations / t.median / best.median,
                "of_read": nbytes / t.median / bandwidth.median,
                "of_roofline": max(nbytes / bandwidth.median, operations / best.median) / t.median,
                "repeats": len(times["ours"]),
            }
        )
    return cells


def experts_op(weight_type: WeightType, n: int, packed: bool) -> Callable[..., torch.Tensor]:
    """y = op(x, weight, expert_ids) through the operator itself."""
    if weight_type in FLOAT_DTYPES:
        return torch.ops.kt._linear_experts.default
    if packed:
        op = torch.ops.kt._linear_experts_packed.default
        return lambda x, weight, ids: op(x, weight, ids, n, x.shape[-1], weight_type)
    plain = torch.ops.kt._linear_experts.default
    return lambda x, weight, ids: plain(x, weight, ids, weight_type)


def routes(tokens: int, experts: int, top_k: int, count: int) -> list[torch.Tensor]:
    """`count` random choices of top_k different experts for each token, [tokens, top_k].

    Choices of a single token follow each other without an expert twice, until all experts have been read.
    """
    if tokens > 1:
        return [torch.rand(tokens, experts).topk(top_k).indices for _ in range(count)]
    choices = list(torch.randperm(experts)[: experts // top_k * top_k].view(-1, 1, top_k))
    return (choices * count)[:count]


def experts(
    bench: Bench, weight_type: WeightType, shape: Shape, count: int, top_k: int, ms: list[int]
) -> list[dict[str, Any]]:
    """One cell per number of tokens: the expert-routed product beside one linear of ours for each expert in use.

    The linears get their rows of the input gathered beforehand and leave their outputs where they are. Float types are
    compared with F.linear in the same way.
    """
    n, k = shape
    bench.ours.fill(weight_type, n, k, bench.packed, least=count)
    layers = bench.ours.layers(count)
    by_expert = [list(layer.unbind()) for layer in layers]
    read = limits.read(bench.ours.memory)
    op, one = experts_op(weight_type, n, bench.packed), linear_op(weight_type, n, bench.packed)
    cells = []
    for m in ms:
        x = torch.randn(m, k).to(FLOAT_DTYPES.get(weight_type, torch.float32))
        choices = routes(m, count, top_k, 4 * count // top_k)
        grouped = [[(e, x[(ids == e).any(dim=1)]) for e in ids.unique().tolist()] for ids in choices]
        # Every function walks through layers and choices on its own.
        turns = {name: itertools.cycle(range(len(layers) * len(choices))) for name in ("ours", "linears", "theirs")}

        def where(name: str) -> tuple[int, int]:
            choice, layer = divmod(next(turns[name]), len(layers))  # noqa: B023
            return layer, choice

        def ours() -> None:
            layer, choice = where("ours")
            op(x, layers[layer], choices[choice])  # noqa: B023

        def loop(name: str, linear: Callable[..., torch.Tensor]) -> None:
            layer, choice = where(name)
            for e, rows in grouped[choice]:  # noqa: B023
                linear(rows, by_expert[layer][e])

        functions: dict[str, Callable[[], None]] = {"ours": ours, "linears": functools.partial(loop, "linears", one)}
        if weight_type in FLOAT_DTYPES:
            functions["theirs"] = functools.partial(loop, "theirs", F.linear)
        times = in_turn(
            {
                "read": read,
                **{
                    name: functools.partial(seconds, f, calls_for(f, bench.effort.batch))
                    for name, f in functions.items()
                },
            },
            bench.effort.repeats,
            bench.effort.budget,
        )
        t = spread(times["ours"])
        used = sum(len(groups) for groups in grouped) / len(grouped)
        bandwidth = spread(times["read"])
        cells.append(
            {
                "isa": ktlinear.isa(),
                "type": weight_type.name,
                "packed": bench.packed and weight_type not in FLOAT_DTYPES,
                "n": n,
                "k": k,
                "experts": count,
                "top_k": top_k,
                "m": m,
                "seconds": t._asdict(),
                "experts_in_use": used,
                "read": bandwidth._asdict(),
                "of_read": used * bench.ours.weight_bytes / t.median / bandwidth.median,
                "times_linears": ratio(times["linears"], times["ours"])._asdict(),
                "times_flinears": ratio(times["theirs"], times["ours"])._asdict() if "theirs" in times else None,
                "repeats": len(times["ours"]),
            }
        )
    return cells


def odd_shape(weight_type: WeightType, shape: Shape) -> Shape:
    """The nearest smaller shape that is a multiple of nothing but the type's block."""
    n, k = shape
    return n - 3, k - (5 if weight_type in FLOAT_DTYPES else FORMATS[weight_type].block)


def odd_shapes(bench: Bench, weight_type: WeightType, shape: Shape, ms: list[int]) -> list[dict[str, Any]]:
    """What a shape that is a multiple of nothing costs per operation, beside the round one next to it."""
    odd = odd_shape(weight_type, shape)
    if min(odd) <= 0:
        return []
    # Two sets of copies: F.linear's arena holds the odd ones here.
    bench.ours.fill(weight_type, *shape, bench.packed)
    bench.theirs.fill(weight_type, *odd, bench.packed)
    round_weights, odd_weights = bench.ours.cycle(), bench.theirs.cycle()
    dtype = FLOAT_DTYPES.get(weight_type, torch.float32)
    results = []
    for m in ms:
        times = in_turn(
            {
                name: batch_seconds(
                    linear_op(weight_type, s[0], bench.packed),
                    torch.randn(m, s[1]).to(dtype),
                    weights,
                    bench.effort.batch,
                )
                for name, s, weights in (("round", shape, round_weights), ("odd", odd, odd_weights))
            },
            bench.effort.repeats,
            bench.effort.budget,
        )
        work = shape[0] * shape[1] / (odd[0] * odd[1])
        cost = ratio(times["odd"], times["round"])
        results.append(
            {
                "isa": ktlinear.isa(),
                "type": weight_type.name,
                "round": list(shape),
                "odd": list(odd),
                "m": m,
                "seconds": spread(times["odd"])._asdict(),
                "round_seconds": spread(times["round"])._asdict(),
                "cost": cost.median * work - 1,
            }
        )
    return results


def call_cost(effort: Effort, size: int = 64) -> dict[str, Any]:
    """Seconds per call on one row of `size` and a [size, size] weight: what is left is the way to the kernel."""
    x, weight = torch.randn(1, size), torch.randn(size, size)
    linear = torch.nn.Linear(size, size, bias=False)
    modules = {name: ktlinear.nn.Linear.from_linear(linear, weight_type=name) for name in ("F32", "Q8_0")}
    op = torch.ops.kt._linear.default
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "F.linear": lambda: F.linear(x, weight),
        "kt::_linear": lambda: op(x, weight),
        "nn.Linear": lambda: linear(x),
        "ktlinear.nn.Linear, F32": lambda: modules["F32"](x),
        "ktlinear.nn.Linear, Q8_0": lambda: modules["Q8_0"](x),
    }
    times = in_turn(
        {name: functools.partial(seconds, call, calls_for(call, effort.batch)) for name, call in calls.items()},
        3 * effort.repeats,
        effort.budget,
    )
    return {
        name: {"seconds": spread(t)._asdict(), "of_flinear": ratio(t, times["F.linear"]).median}
        for name, t in times.items()
    }
