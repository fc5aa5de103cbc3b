"""The logical weight: reads are right, writes fail."""

import copy
import operator
import pickle

import gguf
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ktlinear
from ktlinear._logical import LogicalWeight
from ktlinear.nn import Linear
from ktlinear.ops import WeightType

TYPES = ["Q4_0", "Q5_1", "Q8_0"]


def values(linear: nn.Linear, weight_type: str) -> torch.Tensor:
    """What the gguf package makes of the weight: quantized and dequantized again."""
    qtype = gguf.GGMLQuantizationType[weight_type]
    return torch.from_numpy(gguf.dequantize(gguf.quantize(linear.weight.detach().numpy(), qtype), qtype))


@pytest.fixture(params=[(t, packed) for t in TYPES for packed in (True, False)], ids=str)
def pair(request) -> tuple[Linear, torch.Tensor]:
    """A quantized module (K = 3 blocks, N no multiple of a panel) and its weight's values."""
    weight_type, packed = request.param
    torch.manual_seed(0)
    linear = nn.Linear(96, 37)
    return Linear.from_linear(linear, weight_type, packed=packed), values(linear, weight_type)


@pytest.fixture
def weight() -> LogicalWeight:
    torch.manual_seed(0)
    view = Linear.from_linear(nn.Linear(96, 37), "Q8_0").weight
    assert isinstance(view, LogicalWeight)
    return view


def test_attributes(pair):
    module, expected = pair
    weight = module.weight
    assert weight.shape == (37, 96) and weight.stride() == (96, 1) and weight.ndim == 2
    assert weight.dtype == torch.float32 and weight.device == torch.device("cpu")
    assert not weight.requires_grad and weight.is_floating_point()
    assert weight.qweight.data_ptr() == module.qweight.data_ptr()
    torch.testing.assert_close(weight.dequantize(), expected, rtol=0, atol=0)
    assert type(weight.dequantize()) is torch.Tensor
    torch.testing.assert_close(weight.half().dequantize(), expected.half(), rtol=0, atol=0)
    assert "37, 96" in repr(weight) and module.weight_type.name in repr(weight)


@pytest.mark.parametrize("shape", [(96,), (1, 96), (5, 96), (2, 3, 96), (0, 96)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_by_every_way(pair, shape, bias):
    module, expected = pair
    x, b = torch.randn(shape), module.bias if bias else None
    reference = F.linear(x.double(), expected.double(), None if b is None else b.double()).float()

    def close(y: torch.Tensor) -> None:
        assert type(y) is torch.Tensor and y.dtype == x.dtype
        torch.testing.assert_close(y, reference, rtol=1e-4, atol=1e-5)

    with ktlinear.exact():
        close(F.linear(x, module.weight, b))
        close(torch._C._nn.linear(x, module.weight, b))
        # What F.multi_head_attention_forward does: __torch_function__ is off, __torch_dispatch__ alone must do.
        with torch._C.DisableTorchFunctionSubclass():
            close(F.linear(x, module.weight, b))
            with torch.no_grad():
                close(F.linear(x, module.weight, b))
            with torch.inference_mode():
                close(F.linear(x, module.weight, b))
        if not bias:
            close(x @ module.weight.T)
            close(torch.matmul(x, module.weight.t()))
        elif len(shape) == 2:
            close(torch.addmm(b, x, module.weight.t()))
            close(torch.addmm(b, x, module.weight.t(), beta=0.5) + 0.5 * b)


def test_gradient_without_torch_function(pair):
    module, expected = pair
    x = torch.randn(4, 96, requires_grad=True)
    with ktlinear.exact(), torch._C.DisableTorchFunctionSubclass():
        F.linear(x, module.weight, module.bias).square().sum().backward()
    reference = x.detach().double().requires_grad_()
    b = module.bias.detach().double().requires_grad_()
    F.linear(reference, expected.double(), b).square().sum().backward()
    torch.testing.assert_close(x.grad, reference.grad.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(module.bias.grad, b.grad.float(), rtol=1e-4, atol=1e-4)


def test_views_of_the_bytes(pair):
    module, expected = pair
    weight = module.weight
    for view, reference in [
        (weight.detach(), expected),
        (weight.data, expected),
        (weight.clone(), expected),
        (weight.contiguous(), expected),
        (copy.deepcopy(weight), expected),
        (weight.t(), expected.t()),
        (weight.T, expected.T),
        (weight.mT, expected.mT),
        (weight.transpose(0, 1).transpose(-1, -2), expected),
        (weight.permute(1, 0), expected.t()),
        (weight.to(torch.bfloat16), expected.bfloat16()),
        (weight[:16], expected[:16]),
        (weight[16:], expected[16:]),
        (weight[3:29], expected[3:29]),
        (weight[-5:], expected[-5:]),
        (weight[20:4], expected[20:4]),
    ]:
        assert isinstance(view, LogicalWeight)
        assert view.shape == reference.shape and view.dtype == reference.dtype
        torch.testing.assert_close(view.dequantize(), reference, rtol=0, atol=0)
    assert weight.detach().qweight.data_ptr() == weight.qweight.data_ptr()
    assert weight.bfloat16().qweight.data_ptr() == weight.qweight.data_ptr()
    assert weight.clone().qweight.data_ptr() != weight.qweight.data_ptr()


def test_computing_with_the_values(pair):
    module, expected = pair
    weight, other = module.weight, torch.randn(37, 96)
    for result, reference in [
        (weight + other, expected + other),
        (other.clone().add_(weight), expected + other),
        (torch.zeros(37, 96).copy_(weight), expected),
        (weight.norm(dim=1), expected.norm(dim=1)),
        (weight.abs().max(), expected.abs().max()),
        (torch.cat([weight, other]), torch.cat([expected, other])),
        (other.t() @ weight, other.t() @ expected),
        (weight.double(), expected.double()),
        (torch.zeros_like(weight), torch.zeros(37, 96)),
        (F.embedding(torch.tensor([[3, 36], [0, 3]]), weight), expected[torch.tensor([[3, 36], [0, 3]])]),
    ]:
        assert type(result) is torch.Tensor and result.dtype == reference.dtype
        torch.testing.assert_close(result, reference)
    assert torch.equal(weight, expected)


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.zero_(),
        lambda w: w.data.add_(1),
        lambda w: w.detach().mul_(2),
        lambda w: w.copy_(torch.zeros(37, 96)),
        lambda w: w.T.zero_(),
        lambda w: w[:16].zero_(),
        lambda w: w.__setitem__(0, 1.0),
        lambda w: operator.iadd(w, 1),
        lambda w: operator.itruediv(w.data, w),
        lambda w: w.clone().add_(1),
        lambda w: w.view(-1),
        lambda w: w.reshape(-1),
        lambda w: w[0],
        lambda w: w[:, :3],
        lambda w: w.unbind(),
        lambda w: setattr(w, "data", torch.zeros(37, 96)),
        lambda w: setattr(w, "requires_grad", True),
        lambda w: w.requires_grad_(),
        lambda w: w.requires_grad_(requires_grad=True),
        lambda w: w.resize_(3),
        lambda w: w.t_(),
        lambda w: nn.init.kaiming_uniform_(w),
        lambda w: torch.add(torch.ones(37, 96), 1, out=w),
        lambda w: w.numpy(),
        lambda w: w.data_ptr(),
        lambda w: w.untyped_storage(),
        lambda w: torch.from_dlpack(w),
        lambda w: pickle.dumps(w),
    ],
)
def test_no_write_is_silent(weight, write):
    before = weight.qweight.clone()
    with pytest.raises(TypeError, match="dequantize"):
        write(weight)
    assert torch.equal(weight.qweight, before)
    assert not weight.requires_grad


def test_harmless_calls_on_requires_grad(weight):
    assert weight.requires_grad_(False) is weight
    weight.requires_grad = False
    assert not weight.requires_grad


def test_share_memory(weight):
    expected = weight.dequantize()
    assert weight.share_memory_() is weight
    assert weight.qweight.is_shared()
    assert torch.equal(weight.dequantize(), expected)


def test_meta(weight):
    meta = weight.to("meta")
    assert meta.shape == (37, 96) and meta.is_meta and meta.weight_type == WeightType.Q8_0
    assert meta.dequantize().is_meta and meta.dequantize().shape == (37, 96)


def test_flatten_and_unflatten(weight):
    names, context = weight.T.__tensor_flatten__()
    again = LogicalWeight.__tensor_unflatten__({n: getattr(weight, n) for n in names}, context, None, None)
    assert again.shape == (96, 37) and torch.equal(again.dequantize(), weight.dequantize().T)
