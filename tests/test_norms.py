"""RMS norms in one operator call: which are taken, and that they compute the same as before."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import ktlinear
from ktlinear import ops

RMS_NORM = torch.ops.kt._rms_norm.default

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
    assert len(report.norms) == count and "norms in one call: model.layers.0." in str(report)
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


def rms_norm64(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w.double()


@pytest.mark.parametrize("shape", [(1,), (1, 17), (3, 1), (0, 5), (2, 3, 576), (700, 63), (2, 0)])
@pytest.mark.parametrize("one_added", [False, True])
@torch.inference_mode()
def test_the_operator(shape: tuple[int, ...], one_added: bool) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    wide = torch.randn(*shape[:-1], 2 * shape[-1], generator=generator)
    weight = torch.randn(2 * shape[-1], generator=generator)
    for x, w in (
        (wide[..., : shape[-1]].contiguous(), weight[: shape[-1]]),
        (wide[..., ::2], weight[::2]),
        (wide[..., : shape[-1]], weight[: shape[-1]]),
        (wide[..., : shape[-1]].flip(0) * 1e-4, weight[: shape[-1]]),
    ):
        y = ops.rms_norm(x, w, 1e-6, one_added)
        assert y.shape == x.shape and y.is_contiguous()
        torch.testing.assert_close(y.double(), rms_norm64(x, w + 1.0 if one_added else w, 1e-6), rtol=1e-5, atol=1e-6)


def test_opcheck() -> None:
    torch.library.opcheck(RMS_NORM, (torch.randn(2, 3, 17), torch.randn(17), 1e-6, 1.0))


@torch.inference_mode()
def test_errors() -> None:
    x, w = torch.randn(2, 17), torch.randn(17)
    with pytest.raises(RuntimeError, match=r"kt::rms_norm: input has dtype float64; expected float32"):
        RMS_NORM(x.double(), w, 1e-6, 0.0)
    with pytest.raises(RuntimeError, match=r"kt::rms_norm: weight has shape \[16\]; expected \[17\]"):
        RMS_NORM(x, w[1:], 1e-6, 0.0)
    with pytest.raises(RuntimeError, match=r"kt::rms_norm: input has no dimensions"):
        RMS_NORM(x[0, 0], w, 1e-6, 0.0)


def test_where_the_operator_does_not_know_what_to_do() -> None:
    """Derivatives, casts, transforms and compiled code come from PyTorch's own operator."""
    x, w = torch.randn(3, 17), torch.randn(17)
    expected = torch.rms_norm(x, (17,), w, 1e-6)
    y = ops.rms_norm(x.requires_grad_(), w, 1e-6)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient.norm() > 0 and torch.equal(y, expected)
    with torch.no_grad():
        assert torch.equal(torch.func.vmap(lambda row: ops.rms_norm(row, w, 1e-6))(x), expected)
        _, tangent = torch.func.jvp(lambda x: ops.rms_norm(x, w, 1e-6), (x.detach(),), (torch.ones(3, 17),))
        assert tangent.norm() > 0
        assert ops.rms_norm(x.half(), w.half(), 1e-6).dtype == torch.float16
        compiled = torch.compile(lambda x: ops.rms_norm(x, w, 1e-6), fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), expected)
