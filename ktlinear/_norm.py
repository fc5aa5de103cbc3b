"""Lets the RMS norms of a model compute by `ops.rms_norm`: one operator call instead of six to nine.

As in `_fuse`, a subclass with the same name takes the class's place, so names, parameters and state dicts stay. Sums
are added in another order, so the last bits may differ.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn

from .ops import rms_norm

# Largest difference of one result, relative to the largest there is.
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def swap(module: nn.Module) -> bool:
    """Make `module` use `ops.rms_norm` if it is an RMS norm, by its name and by what it computes now."""
    cls: Any = type(module)
    weight, eps = module._parameters.get("weight"), _eps(module)
    if (
        not cls.__name__.endswith("RMSNorm")
        or cls is nn.RMSNorm
        or _is_swapped(module)
        or cls.__reduce_ex__ is not object.__reduce_ex__
        or "forward" in module.__dict__
        or len(module._parameters) != 1
        or module._buffers
        or module._modules
        or len(inspect.signature(cls.forward).parameters) != 2
        or eps is None
        or weight is None
        or weight.dim() != 1
        or weight.is_meta
        or weight.dtype not in _TOLERANCE
    ):
        return False
    for one_added in (False, True):
        if _agrees(module, weight.detach(), eps, one_added):
            module.__class__ = _swapped_class(cls, one_added)
            return True
    return False


def restore(module: nn.Module) -> None:
    """Undo `swap`."""
    if _is_swapped(module):
        (module.__class__,) = type(module).__bases__


def _is_swapped(module: nn.Module) -> bool:
    return "_one_added" in type(module).__dict__


def _eps(module: nn.Module) -> Any:
    for name in ("variance_epsilon", "eps"):
        value = module.__dict__.get(name)
        if isinstance(value, float):
            return value
    return None


@torch.no_grad()
def _agrees(module: nn.Module, weight: torch.Tensor, eps: float, one_added: bool) -> bool:
    # Rows around the root of eps, where it counts, and far above. With a generator: the global one stays as it is.
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([[eps**0.5], [1.0], [30.0]])
    x = (torch.randn(3, weight.numel(), generator=generator) * scales).to(weight.dtype)
    y = module.forward(x)
    expected = rms_norm(x, weight, eps, one_added)
    if not isinstance(y, torch.Tensor) or (y.shape, y.dtype) != (x.shape, x.dtype):
        return False
    difference = (y - expected).float().abs().max()
    return bool(difference <= _TOLERANCE[weight.dtype] * expected.float().abs().max())


@functools.cache
def _swapped_class(base: Any, one_added: bool) -> type[nn.Module]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        weight = self._parameters["weight"]
        if x.dtype != weight.dtype:
            return base.forward(self, x)
        return rms_norm(x, weight, _eps(self), one_added)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        # The class is in no module for pickle to find it by.
        return _new, (base, one_added), nn.Module.__getstate__(self)

    members = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": reduce,
        "_one_added": one_added,
        "forward": forward,
    }
    return type(base.__name__, (base,), members)


def _new(base: Any, one_added: bool) -> nn.Module:
    cls = _swapped_class(base, one_added)
    return cls.__new__(cls)
