"""Linear layers on the CPU for every weight format people have, computed as they are stored.

    >>> import ktlinear
    >>> report = ktlinear.patch(model, weight_type="Q4_0")

See `ktlinear.nn` for the modules, `ktlinear.ops` for the operators and ``python -m ktlinear info`` for this machine.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from . import linear, nn, ops
from ._loader import available_isas, exact, isa, use_isa
from .checkpoint import load_quantized
from .ops import WeightType
from .patch import patch, unpatch

try:
    __version__ = version("ktlinear")
except PackageNotFoundError:  # imported from a source tree that was built in place
    __version__ = "0+unknown"

__all__ = [
    "WeightType",
    "available_isas",
    "exact",
    "isa",
    "linear",
    "load_quantized",
    "nn",
    "ops",
    "patch",
    "unpatch",
    "use_isa",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # Needs transformers, which everything else does without.
    if name == "from_gguf":
        from .loading import from_gguf

        return from_gguf
    if name == "KtConfig":
        from .integrations.transformers import KtConfig

        return KtConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
