"""RMS norms by torch.rms_norm: which are taken, and that they compute the same as before."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import ktlinear

transformers = pytest.importorskip("transformers", reason="it has the models")


class ScaledRMSNorm(nn.Module):
    """Another function, of the same name and parameters."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class EpsilonRMSNorm(ScaledRMSNorm):
    """Its epsilon is elsewhere, which shows only at small inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)


def model_of(architecture: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    config = transformers.AutoConfig.for_model(
        architecture,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=50,
        pad_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, 1.0, 0.3)
    return model


@pytest.mark.parametrize(("architecture", "count"), [("llama", 5), ("qwen3", 9), ("gemma3_text", 13), ("phi3", 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models(architecture: str, count: int, dtype: torch.dtype) -> None:
    model = model_of(architecture, dtype)
    other = copy.deepcopy(model)
    ktlinear.patch(other, "Q8_0")
    report = ktlinear.patch(model, "Q8_0", fast_norms=True)
    assert len(report.norms) == count and "by torch.rms_norm: model.layers.0." in str(report)
    assert list(model.state_dict()) == list(other.state_dict())
    norm, old = model.model.norm, other.model.norm
    assert type(norm) is not type(old) and isinstance(norm, type(old)) and repr(norm) == repr(old)
    ids = torch.randint(50, (2, 7))
    # Norms in fp64: nothing of this package in it. Rounded inputs, as the layers quantize them, may fall either way.
    x = torch.randn(3, 64, dtype=dtype)
    w = old.weight.double() + (1 if architecture == "gemma3_text" else 0)
    exact = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * w
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 0.02, "atol": 0.01}
    torch.testing.assert_close(norm(x).double(), exact, **tolerance)
    a, b = model(ids).logits.float(), other(ids).logits.float()
    assert (a - b).norm() < 0.03 * b.norm()
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(again.model.norm) is type(norm) and torch.equal(again(ids).logits, model(ids).logits)
    ktlinear.unpatch(model)
    assert type(model.model.norm) is type(old)


def test_other_norms_are_left() -> None:
    model = nn.Sequential(nn.Linear(64, 64), ScaledRMSNorm(64), EpsilonRMSNorm(64), nn.RMSNorm(64), nn.LayerNorm(64))
    types = [type(module) for module in model]
    assert ktlinear.patch(model, "Q8_0", fast_norms=True).norms == []
    assert [type(module) for module in model][1:] == types[1:]


def test_an_input_of_another_dtype_is_computed_as_before() -> None:
    model = model_of("llama")
    norm, old = model.model.norm, copy.deepcopy(model.model.norm)
    ktlinear.patch(model, "Q8_0", fast_norms=True)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert norm(x).dtype == old(x).dtype == torch.float32 and torch.equal(norm(x), old(x))
