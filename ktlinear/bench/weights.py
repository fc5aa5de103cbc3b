"""Copies of a weight, so many that each is read from memory: in a model, too, a weight comes round once per token."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from ktlinear import WeightType, _memory
from ktlinear.nn import FLOAT_DTYPES
from ktlinear.ops import needs_importance

SAMPLE_ROWS = 64


def sample(weight_type: WeightType, n: int, k: int, packed: bool) -> torch.Tensor:
    """Return a weight [n, k] in `weight_type`: a few normal rows over and over, since values do not change the speed.

    Floats are [n, k] of their dtype; quantized types uint8 [n, row_bytes], or panels if `packed`.
    """
    rows = torch.randn(SAMPLE_ROWS, k, generator=torch.Generator().manual_seed(0))
    if weight_type in FLOAT_DTYPES:
        rows = rows.to(FLOAT_DTYPES[weight_type])
    else:
        rows = torch.ops.kt.quantize(rows, weight_type, torch.ones(k) if needs_importance(weight_type) else None)
    rows = rows.repeat(-(-n // SAMPLE_ROWS), 1)[:n].contiguous()
    if packed and weight_type not in FLOAT_DTYPES:
        return torch.ops.kt.pack(rows, weight_type)
    return rows


class Arena:
    """Memory in huge pages, filled with as many copies of one weight as it holds.

    F.linear's weights lie in such memory too: what differs is the kernel alone.
    """

    def __init__(self, nbytes: int) -> None:
        self.memory = _memory.empty(nbytes)
        self.key: tuple[object, ...] = ()
        self.copies: list[torch.Tensor] = []
        self.step = 0

    def fill(self, weight_type: WeightType, n: int, k: int, packed: bool, least: int = 1) -> None:
        """Fill the memory with copies of `sample`; grow it if not even `least` of them fit."""
        key = (weight_type, n, k, packed)
        if key == self.key and len(self.copies) >= least:
            return
        weight = sample(*key)
        nbytes = weight.numel() * weight.element_size()
        self.step = step = -(-nbytes // _memory.ALIGNMENT) * _memory.ALIGNMENT
        if least * step > self.memory.numel():
            self.memory = _memory.empty(least * step)
        self.copies = []
        for start in range(0, self.memory.numel() - step + 1, step):
            copy = self.memory[start : start + nbytes].view(weight.dtype).view(weight.shape)
            self.copies.append(copy.copy_(weight))
        self.key = key

    def layers(self, experts: int) -> list[torch.Tensor]:
        """The copies as weights [experts, ...] of several layers."""
        stride = self.step // self.copies[0].element_size()
        return [
            first.as_strided((experts, *first.shape), (stride, *first.stride()), first.storage_offset())
            for first in self.copies[: len(self.copies) // experts * experts : experts]
        ]

    @property
    def weight_bytes(self) -> int:
        """Bytes of one copy."""
        return self.copies[0].numel() * self.copies[0].element_size()

    def cycle(self) -> Iterator[torch.Tensor]:
        """Endlessly, one copy after another."""
        return itertools.cycle(self.copies)
