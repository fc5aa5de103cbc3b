"""Several functions timed in turn, so that a machine that changes speed changes it for all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch


class Spread(NamedTuple):
    """Median and quartiles of repeated measurements."""

    median: float
    q1: float
    q3: float


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the quartiles (linear interpolation) of at least one value."""
    q1, median, q3 = (
        torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.25, 0.5, 0.75]).double()).tolist()
    )
    return Spread(median, q1, q3)


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """The spread of the ratios of values that were measured one after another."""
    return spread([a / b for a, b in zip(numerators, denominators, strict=True)])


def seconds(function: Callable[[], object], calls: int) -> float:
    """Seconds per call of `calls` calls in a row."""
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def calls_for(function: Callable[[], object], minimum: float) -> int:
    """How many calls take at least `minimum` seconds, by a trial that also warms up."""
    calls = 1
    while True:
        taken = seconds(function, calls) * calls
        if taken >= minimum / 4:
            return max(1, math.ceil(calls * minimum / taken))
        calls *= 4


def in_turn(
    measures: Mapping[str, Callable[[], float]], repeats: int, budget: float, least: int = 3
) -> dict[str, list[float]]:
    """Take each measure once per round, in rounds.

    Args:
        measures: name -> a function that returns one measurement (seconds, or a rate).
        repeats: rounds at most.
        budget: seconds after which no further round begins, once there are `least` of them.

    Returns:
        name -> the measurements; the i-th of all names were taken in the same round.
    """
    results: dict[str, list[float]] = {name: [] for name in measures}
    start = time.perf_counter()
    for done in range(repeats):
        if done >= least and time.perf_counter() - start > budget:
            break
        for name, measure in measures.items():
            results[name].append(measure())
    return results
