"""Modules for test_fuse.py whose forwards call linear layers on one input, in ways that may and may not be changed.

In a file of their own, since pytest rewrites the files of its tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Base(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(64, n, bias=bias) for n in (48, 48, 48))


class Plain(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.a(x)) * self.b(x) + self.c(x)


class Statements(Base):
    def forward(self, x: torch.Tensor, *, scale: float = 2.0) -> torch.Tensor:
        shape = (*x.shape[:-1], -1, 16)
        first = self.a(x).view(shape).transpose(-2, -3)
        second = self.b(x).view(shape).transpose(-2, -3)
        if self.training:
            return first
        return (first + second).sum() * scale + self.c(x).sum()


def doubled(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return 2 * forward(*args, **kwargs)

    return wrapper


class Decorated(Base):
    @doubled
    @doubled
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(x)


class OneOfTwo(Base):
    """Only b and c are called together: a is called on another input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        first = self.a(x)
        return first + self.b(y) * self.c(y)


# What must be left alone


class WrittenInPlace(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.a(x)
        x.mul_(2)
        return first + self.b(x)


class WrittenByOperator(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.a(x)
        x *= 2
        return first + self.b(x)


class WrittenByIndex(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.a(x)
        x[0] = 0
        return first + self.b(x)


class WrittenUnderAnotherName(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        same = x
        first = self.a(x)
        same.mul_(2)
        return first + self.b(x)


class WrittenByAFunction(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        same = x
        first = self.a(x)
        other = F.relu(same, True)
        return first + self.b(x) + other.sum()


class WrittenAsOutput(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        same = x
        first = self.a(x)
        torch.neg(self.c.weight[:1], out=same[:1])
        return first + self.b(x)


class Reassigned(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.a(x)
        x = x + 1
        return first + self.b(x)


class Conditional(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) if self.training else self.b(x)


class Repeated(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(self.a(x) + self.b(x) for _ in range(2))


class CalledTwice(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        first = self.a(x) + self.b(x)
        return first + self.a(y) + self.b(y)


class Closure(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.a(x) + self.b(x)


class Swapped(Base):
    def forward(self, x: torch.Tensor, other: Any) -> torch.Tensor:
        self = other
        return self.a(x) + self.b(x)


LEFT = [
    WrittenInPlace,
    WrittenByOperator,
    WrittenByIndex,
    WrittenUnderAnotherName,
    WrittenByAFunction,
    WrittenAsOutput,
    Reassigned,
    Conditional,
    Repeated,
    CalledTwice,
    Closure,
    Swapped,
]
