"""The machine's limits, measured with the instructions of the tier in use on every thread of the pool."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable

import torch

from .timing import seconds

LEAST_SECONDS = 0.012
"""How long one measurement runs: shorter ones catch the ramp of the clock, or one interruption."""

READ_BYTES = 384 << 20
"""Read at a time: the arena is walked piece by piece, so a piece has left the caches when its turn comes again."""


def _rate(kind: str, iterations: int, buffer: torch.Tensor | None = None) -> float:
    """Operations or bytes per second."""
    start = time.perf_counter()
    done = torch.ops.kt._limit(kind, iterations, buffer)
    return done / (time.perf_counter() - start)


def peak(kind: str) -> Callable[[], float] | None:
    """Return a measure of a peak in operations/s: "fma" (fp32), "bf16" (products of bf16), or "dot" (int8 products).

    None if the tier in use has no such instruction. The measure is for the tier in use now.
    """
    if torch.ops.kt._limit(kind, 1, None) == 0:
        return None
    # Milliseconds on any CPU: where a parallel region waits for a busy core, shorter trials would measure the wait.
    iterations = 2_000_000
    taken = min(seconds(functools.partial(torch.ops.kt._limit, kind, iterations, None), 1) for _ in range(3))
    iterations = math.ceil(iterations * max(1.0, LEAST_SECONDS / taken))
    return lambda: _rate(kind, iterations)


def read(arena: torch.Tensor) -> Callable[[], float]:
    """Return a measure of the read bandwidth in bytes/s over `arena` (uint8), a piece a time, in order."""
    pieces = arena.split(READ_BYTES)
    pieces = [piece for piece in pieces if piece.numel() == pieces[0].numel()]
    turn = 0

    def measure() -> float:
        nonlocal turn
        turn = (turn + 1) % len(pieces)
        return _rate("read", 1, pieces[turn])

    return measure
