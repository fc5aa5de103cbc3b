"""ktlinear.nn.ExpertsLinear and Experts, against one float64 product for each token and choice."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch.nn.functional import silu

import ktlinear
from ktlinear.nn import Experts, ExpertsLinear

E, N, K, TOP = 5, 13, 96, 2


def weight(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(E, N, K).to(dtype)


def ids(tokens: int = 7) -> torch.Tensor:
    return torch.randint(0, E, (tokens, TOP))


def expected(x: torch.Tensor, w: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    x = x.double() if x.dim() == 3 else x.double()[:, None]
    return torch.einsum("tjk,tjnk->tjn", x.expand(-1, TOP, -1), w.double()[i])


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("weight_type", ["Q4_0", "Q8_0", "MXFP4", "F32", "F16"])
def test_each_token_through_its_experts(weight_type, packed):
    layer = ExpertsLinear.from_weight(weight(), weight_type, packed)
    for x in (torch.randn(7, K), torch.randn(7, TOP, K), torch.randn(0, K)):
        i = ids(len(x))
        with ktlinear.exact():
            y = layer(x, i)
        assert y.dtype == x.dtype
        torch.testing.assert_close(y.double(), expected(x, layer.dequantize(), i), atol=1e-4, rtol=1e-4)
    assert layer.weight_type.name == weight_type and layer.packed == (packed and not weight_type.startswith("F"))


@pytest.mark.parametrize("assign", [True, False])
def test_state_dicts_hold_rows_and_fit_any_layout(assign):
    layer = ExpertsLinear.from_weight(weight(), "Q4_0")
    state = layer.state_dict()
    assert torch.equal(state["qweight"], torch.ops.kt.quantize(layer.dequantize(), 2)) and state["qweight"].dim() == 3
    for packed in (True, False):
        other = ExpertsLinear(E, K, N, "Q4_0", packed)
        assert not other.dequantize().any()
        other.load_state_dict(state, assign=assign)
        assert torch.equal(other.dequantize(), layer.dequantize())
    meta = ExpertsLinear(E, K, N, "Q4_0", device="meta")
    meta.load_state_dict(state, assign=True)
    x, i = torch.randn(3, K), ids(3)
    assert torch.equal(meta(x, i), layer(x, i))
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(again(x, i), layer(x, i))


def test_a_float_state_dict_is_quantized_and_a_wrong_one_refused():
    layer, w = ExpertsLinear(E, K, N, "Q8_0"), weight()
    layer.load_state_dict({"weight": w})
    assert (layer.dequantize() - w).abs().max() < 0.02
    for bad, message in (
        ({"weight": w[0]}, r"\(13, 96\), but a weight to be quantized is \(5, 13, 96\)"),
        ({"qweight": torch.zeros(E, N, 3, dtype=torch.uint8)}, r"rows of a \[5, 13, 96\] matrix are"),
        (ExpertsLinear(E, K, N, "Q4_0").state_dict(), r"the weight is Q4_0, and the module's Q8_0"),
    ):
        with pytest.raises(RuntimeError, match=message):
            layer.load_state_dict(bad)


def test_what_does_not_fit_is_said():
    layer = ExpertsLinear.from_weight(weight(), "Q8_0")
    with pytest.raises(IndexError):
        layer(torch.randn(1, K), torch.tensor([[0, E]]))
    with pytest.raises(TypeError, match=r"weight: Q8_0 experts have no float weight; dequantize\(\)"):
        layer.weight  # noqa: B018
    with pytest.raises(ValueError, match=r"weight: expected \[E, N, K\], got \[13, 96\]"):
        ExpertsLinear.from_weight(weight()[0])
    with pytest.raises(ValueError, match=r"rows: expected torch.uint8 \[E, N, 102\] for Q8_0 rows of 96"):
        ExpertsLinear.from_rows(torch.zeros(N, 102, dtype=torch.uint8), K, "Q8_0")
    with pytest.raises(ValueError, match=r"Q4_K"):
        ExpertsLinear(E, K, N, "Q4_K")
    with pytest.raises(ValueError, match=r"expected \[E, I, H\] twice and \[E, H, I\], got"):
        Experts(layer, layer, layer, silu)


def test_dtypes_change_without_the_bytes():
    layer = ExpertsLinear.from_weight(weight(), "Q8_0")
    before = layer.state_dict()["qweight"]
    layer.to(torch.bfloat16)
    assert layer.dequantize().dtype == torch.bfloat16 and torch.equal(layer.state_dict()["qweight"], before)
    assert layer.to("meta").qweight.is_meta


def mixture() -> Experts:
    gate, up, down = torch.randn(E, 64, 32), torch.randn(E, 64, 32), torch.randn(E, 32, 64)
    return Experts(*(ExpertsLinear.from_weight(w, "Q8_0") for w in (gate, up, down)), silu)


def test_a_mixture_its_gradient_and_its_compiled_form():
    experts, x, i, scores = mixture(), torch.randn(6, 32), ids(6), torch.rand(6, TOP)
    gate, up, down = (m.dequantize().double() for m in (experts.gate_proj, experts.up_proj, experts.down_proj))

    def reference(x: torch.Tensor) -> torch.Tensor:
        inner = silu(torch.einsum("tk,tjnk->tjn", x, gate[i])) * torch.einsum("tk,tjnk->tjn", x, up[i])
        return (torch.einsum("tjn,tjkn->tjk", inner, down[i]) * scores.double()[..., None]).sum(1)

    with ktlinear.exact():
        torch.testing.assert_close(experts(x, i, scores).double(), reference(x.double()), atol=1e-2, rtol=1e-4)
        compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x, i, scores), experts(x, i, scores))
        x.requires_grad_()
        experts(x, i, scores).square().sum().backward()
    other = x.detach().double().requires_grad_()
    reference(other).square().sum().backward()
    torch.testing.assert_close(x.grad.double(), other.grad, atol=1e-2 * other.grad.std().item(), rtol=1e-3)
    assert experts(x.bfloat16(), i, scores).dtype == torch.bfloat16
