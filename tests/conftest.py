"""Fixtures and the measure of error that all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

# Read when the OpenMP runtime is loaded. Threads that spin while they wait make each parallel region take milliseconds
# on a machine that has other work to do.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest  # noqa: E402
import torch  # noqa: E402

import ktlinear  # noqa: E402
from ktlinear import _cpu, _loader  # noqa: E402


@pytest.fixture(params=list(_cpu.TIERS))
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every tier of this architecture, in use while the test runs."""
    name = request.param
    if name not in _loader.compiled_isas():
        pytest.skip(f"{name} is not compiled in (this is a build of {', '.join(_loader.compiled_isas())})")
    if lacks := _cpu.missing(name, _cpu.features()):
        pytest.skip(f"this CPU cannot run {name}: it lacks {', '.join(lacks)}")
    with ktlinear.use_isa(name):
        yield name


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def relative_error(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> float:
    """RMS of y - (x @ weight.T + bias), computed in float64, relative to the RMS of what such a sum amounts to.

    The scale is the root of the sum of the squared products, not the sum itself, which may cancel.
    """
    x, weight = x.double().reshape(-1, x.shape[-1]), weight.double()
    expected = torch.nn.functional.linear(x, weight, None if bias is None else bias.double())
    scale = (x.square() @ weight.square().t() + (0 if bias is None else bias.double().square())).mean().sqrt()
    return ((y.double().reshape(expected.shape) - expected).square().mean().sqrt() / scale).item()


def is_rounded_linear(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Whether each y is x @ weight.T + bias, rounded once to y's dtype, but for the rounding of fp32 sums.

    Element by element: a single sum may be several times what `relative_error` divides by.
    """
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    size = (x.double().square() @ weight.double().square().t() + (0 if bias is None else bias.double().square())).sqrt()
    unit = torch.finfo(y.dtype).eps / 2
    allowed = unit * expected.abs() + 1e-5 * size + torch.finfo(y.dtype).smallest_normal * unit
    return bool(((y.double() - expected).abs() <= allowed).all())


def small_llama(**changes: Any) -> torch.nn.Module:
    """A Llama of two layers with random weights; `changes` of its configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds to import, and few tests need it

    config = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**config | changes))
