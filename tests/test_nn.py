"""The modules: values, layouts, state dicts, conversions, gradients, compilation."""

import copy
import io
import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import gguf
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_model, save_model
from torch import nn

import ktlinear
from ktlinear._logical import LogicalWeight
from ktlinear.nn import Embedding, Linear
from ktlinear.ops import WeightType, packed_shape, row_bytes

QUANTIZED = ["Q4_0", "Q4_1", "Q8_0"]
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def rows_of(weight: torch.Tensor, weight_type: str) -> torch.Tensor:
    """GGUF rows by the gguf package."""
    return torch.from_numpy(gguf.quantize(weight.detach().float().numpy(), gguf.GGMLQuantizationType[weight_type]))


def values_of(weight: torch.Tensor, weight_type: str) -> torch.Tensor:
    """The weight's values in a type, by the gguf package or PyTorch's own casts."""
    if weight_type in FLOATS:
        return weight.detach().to(FLOATS[weight_type]).double()
    qtype = gguf.GGMLQuantizationType[weight_type]
    return torch.from_numpy(gguf.dequantize(rows_of(weight, weight_type).numpy(), qtype)).double()


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, weight_type: str) -> torch.Tensor:
    return F.linear(x.double(), values_of(weight, weight_type), None if bias is None else bias.double())


def make_linear(n: int = 37, k: int = 96, bias: bool = True) -> nn.Linear:
    torch.manual_seed(n + k)
    return nn.Linear(k, n, bias=bias)


# Values


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("weight_type", [*QUANTIZED, *FLOATS])
@pytest.mark.parametrize("shape", [(1, 32), (13, 96), (16, 64), (37, 160)])
@pytest.mark.parametrize("bias", [True, False])
def test_from_linear_computes_with_the_quantized_values(weight_type, packed, shape, bias):
    linear = make_linear(*shape, bias=bias)
    module = Linear.from_linear(linear, weight_type, packed=packed)
    for lead in [(), (1,), (7,), (2, 3), (0,)]:
        x = torch.randn(*lead, shape[1])
        with ktlinear.exact():
            y = module(x)
        expected = reference(x, linear.weight, linear.bias, weight_type)
        torch.testing.assert_close(y, expected.float(), rtol=1e-4, atol=1e-5)
    x = torch.randn(40, shape[1])
    y, expected = module(x).double(), reference(x, linear.weight, linear.bias, weight_type)
    assert (y - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize("weight_type", ["Q8_0", "BF16"])
@pytest.mark.parametrize("dtype", list(FLOATS.values()))
def test_output_has_the_inputs_dtype(weight_type, dtype):
    linear = make_linear()
    x = torch.randn(5, 96).to(dtype)
    with ktlinear.exact():
        y = Linear.from_linear(linear, weight_type)(x)
    assert y.dtype == dtype
    expected = reference(x, linear.weight, linear.bias, weight_type)
    torch.testing.assert_close(
        y.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-2 if dtype != torch.float32 else 1e-5
    )


def test_is_a_linear():
    linear = make_linear().eval()
    module = Linear.from_linear(linear)
    assert isinstance(module, nn.Linear) and not module.training
    assert (module.in_features, module.out_features) == (96, 37)
    assert module.weight.shape == (37, 96) and module.weight.dtype == torch.float32
    assert module.bias is linear.bias
    assert module.weight_type is WeightType.Q8_0 and module.packed
    assert [name for name, _ in module.named_parameters()] == ["qweight", "bias"]
    assert module.qweight.dtype == torch.uint8 and not module.qweight.requires_grad
    assert tuple(module.qweight.shape) == packed_shape("Q8_0", 37, 96)
    assert module.qweight.data_ptr() % 64 == 0
    assert repr(module) == "Linear(in_features=96, out_features=37, bias=True, weight_type=Q8_0, packed=True)"


def test_float_types_hold_an_ordinary_weight():
    linear = make_linear()
    half = Linear.from_linear(linear, "F16")
    assert isinstance(half.weight, nn.Parameter) and half.weight.dtype == torch.float16 and half.weight.requires_grad
    assert [name for name, _ in half.named_parameters()] == ["weight", "bias"]
    assert repr(half) == "Linear(in_features=96, out_features=37, bias=True, weight_type=F16)"
    assert Linear.from_linear(linear, "F32").weight is linear.weight
    half.weight = nn.Parameter(torch.zeros(37, 96))
    assert half.weight_type is WeightType.F32
    assert torch.equal(half(torch.ones(96)), linear.bias)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("weight_type", QUANTIZED)
def test_from_rows(weight_type, packed):
    linear = make_linear()
    rows = rows_of(linear.weight, weight_type)
    module = Linear.from_rows(rows, 96, weight_type, bias=linear.bias.detach(), packed=packed)
    x = torch.randn(3, 96)
    with ktlinear.exact():
        torch.testing.assert_close(
            module(x), reference(x, linear.weight, linear.bias, weight_type).float(), rtol=1e-4, atol=1e-5
        )
    assert (module.qweight.data_ptr() == rows.data_ptr()) == (not packed)
    assert Linear.from_rows(rows, 96, weight_type, dtype=torch.bfloat16).weight.dtype == torch.bfloat16


def test_from_rows_of_floats():
    weight = torch.randn(5, 7).half()
    module = Linear.from_rows(weight.view(torch.uint8), 7, "F16")
    assert torch.equal(module.weight, weight)


def test_new_module_is_zero_or_initialized():
    module = Linear(64, 5)
    assert torch.equal(module(torch.randn(3, 64)), torch.zeros(3, 5))
    assert not Linear(64, 5, weight_type="Q4_0").weight.dequantize().any()
    bound = 1 / math.sqrt(64)
    weight = Linear(64, 5, weight_type="BF16").weight
    assert weight.dtype == torch.bfloat16 and 0 < weight.abs().max() <= bound * 1.01


# Errors


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: Linear(33, 4), ValueError, "33.*32"),
        (lambda: Linear(64, 4, weight_type="Q9"), ValueError, "Q9.*Q8_0"),
        (lambda: Linear(64, 4, dtype=torch.float64), ValueError, "float64"),
        (lambda: Linear.from_linear(nn.Linear(33, 4), "Q4_0"), ValueError, "33.*32"),
        (lambda: Linear.from_linear(nn.Linear(64, 4).double(), "Q4_0"), ValueError, "weight.*float64"),
        (lambda: Linear.from_linear(nn.ReLU()), TypeError, "linear.*ReLU"),
        (
            lambda: Linear.from_rows(torch.zeros(4, 33, dtype=torch.uint8), 32, "Q8_0"),
            ValueError,
            r"rows.*34.*\[4, 33\]",
        ),
        (lambda: Linear.from_rows(torch.zeros(4, 34), 32, "Q8_0"), ValueError, "rows.*uint8.*float32"),
        (
            lambda: Linear.from_rows(torch.zeros(4, 34, dtype=torch.uint8), 32, "Q8_0", bias=torch.zeros(5)),
            ValueError,
            r"bias.*\(4,\).*\(5,\)",
        ),
        (lambda: Linear(64, 4).tie(Embedding(5, 64)), ValueError, r"\(4, 64\).*\(5, 64\)"),
        (lambda: Linear(64, 4).double(), TypeError, "float64"),
        (lambda: Embedding(5, 64, weight_type="F16"), ValueError, "F16"),
        (lambda: Embedding(5, 64, padding_idx=5), ValueError, "padding_idx.*5"),
        (lambda: Embedding.from_embedding(nn.Embedding(5, 64, max_norm=1.0)), ValueError, "max_norm"),
        (lambda: Embedding.from_embedding(nn.Linear(64, 4)), TypeError, "embedding.*Linear"),
        (lambda: Embedding.from_linear(nn.Linear(64, 4)), TypeError, "head"),
        (lambda: Embedding.from_linear(Linear(64, 4, weight_type="F16")), TypeError, "head"),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_weight_cannot_be_assigned():
    module = Linear(64, 4)
    with pytest.raises(TypeError, match="Q8_0 Linear cannot be assigned"):
        module.weight = nn.Parameter(torch.zeros(4, 64))
    with pytest.raises(AttributeError, match="weight"):
        module.weight = torch.zeros(4, 64)
    with pytest.raises(TypeError, match="read-only"):
        module.reset_parameters()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("k", [32, 96, 0])
def test_input_of_another_width(packed, k):
    """Packed panels of K = 32 and K = 64 have the same size: a confusion that only the module can see."""
    module = Linear(64, 4, packed=packed)
    with pytest.raises(RuntimeError, match=f"input.*{k}"):
        module(torch.zeros(3, k))
    with pytest.raises(RuntimeError, match=f"input.*{k}"):
        F.linear(torch.zeros(3, k), module.weight)


# Gradients and autocast


@pytest.mark.parametrize("weight_type, packed", [("Q8_0", True), ("Q4_1", False), ("F32", True), ("BF16", True)])
def test_gradients(weight_type, packed):
    linear = make_linear()
    module = Linear.from_linear(copy.deepcopy(linear), weight_type, packed=packed)
    x = torch.randn(2, 3, 96, requires_grad=True)
    with ktlinear.exact():
        module(x).square().sum().backward()
    x2 = x.detach().double().requires_grad_()
    w2 = values_of(linear.weight, weight_type).requires_grad_()
    b2 = linear.bias.detach().double().requires_grad_()
    F.linear(x2, w2, b2).square().sum().backward()
    torch.testing.assert_close(x.grad, x2.grad.float(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(module.bias.grad, b2.grad.float(), rtol=1e-3, atol=1e-3)
    if weight_type in FLOATS:
        torch.testing.assert_close(module.weight.grad.double(), w2.grad, rtol=2e-2, atol=2e-2)
    else:
        assert module.qweight.grad is None


def test_no_graph_when_none_is_wanted():
    module = Linear.from_linear(make_linear()).requires_grad_(False)
    assert not module(torch.randn(3, 96)).requires_grad
    assert module(torch.randn(3, 96, requires_grad=True)).requires_grad
    with torch.no_grad():
        assert not module(torch.randn(3, 96, requires_grad=True)).requires_grad


@pytest.mark.parametrize("weight_type, packed", [("Q8_0", True), ("Q8_0", False), ("F32", True)])
def test_autocast_as_f_linear(weight_type, packed):
    linear = make_linear()
    module, x = Linear.from_linear(linear, weight_type, packed=packed), torch.randn(4, 96)
    with torch.autocast("cpu", dtype=torch.bfloat16), ktlinear.exact():
        y, y2 = module(x), F.linear(x, module.weight, module.bias)
        assert y.dtype == y2.dtype == linear(x).dtype == torch.bfloat16
    expected = reference(x.bfloat16(), linear.weight, linear.bias, weight_type)
    torch.testing.assert_close(y.double(), expected, rtol=2e-2, atol=2e-2)


# Moving and copying


def test_to_dtype_changes_the_logical_dtype_only():
    module = Linear.from_linear(make_linear())
    parameter, before = module.qweight, module.qweight.clone()
    for cast, dtype in [
        (lambda: module.to(torch.bfloat16), torch.bfloat16),
        (lambda: module.half(), torch.float16),
        (lambda: module.float(), torch.float32),
        (lambda: module.type(torch.float16), torch.float16),
        (lambda: module.to(dtype=torch.float32, device="cpu"), torch.float32),
    ]:
        assert cast() is module
        assert module.weight.dtype == module.bias.dtype == dtype
        assert module.qweight is parameter and torch.equal(module.qweight, before)
    assert Linear.from_linear(make_linear(), "F16").to(torch.bfloat16).weight_type is WeightType.BF16


def test_meta_and_to_empty():
    linear = make_linear()
    module = Linear.from_linear(linear)
    state, x = module.state_dict(), torch.randn(2, 96)
    expected = module(x)
    meta = module.to("meta")
    assert meta.qweight.is_meta and meta.weight.is_meta and meta(x.to("meta")).shape == (2, 37)
    empty = meta.to_empty(device="cpu")
    assert tuple(empty.qweight.shape) == packed_shape("Q8_0", 37, 96)
    empty.load_state_dict(state)
    assert torch.equal(empty(x), expected)


def test_built_on_the_meta_device():
    with torch.device("meta"):
        module = Linear(96, 37)
        converted = Linear.from_linear(nn.Linear(96, 37), "Q4_0")
    assert module.qweight.is_meta and converted.qweight.is_meta
    assert tuple(converted.qweight.shape) == packed_shape("Q4_0", 37, 96)
    state = Linear.from_linear(make_linear()).state_dict()
    with pytest.raises(RuntimeError, match="qweight.*meta"), pytest.warns(UserWarning, match="bias"):
        module.load_state_dict(state)
    module.load_state_dict(state, assign=True)
    assert torch.equal(module.state_dict()["qweight"], state["qweight"])
    assert module.qweight.data_ptr() % 64 == 0


@pytest.mark.parametrize("packed", [True, False])
def test_deepcopy_and_pickle(packed):
    module = Linear.from_linear(make_linear(), "Q4_1", packed=packed)
    x = torch.randn(3, 96)
    expected = module(x)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert isinstance(other, Linear) and other.weight_type is WeightType.Q4_1 and other.packed == packed
        assert other.qweight.data_ptr() != module.qweight.data_ptr()
        assert torch.equal(other(x), expected)


def test_share_memory():
    module = Linear.from_linear(make_linear())
    x = torch.randn(3, 96)
    expected = module(x)
    assert module.share_memory().qweight.is_shared()
    assert torch.equal(module(x), expected)


# State dicts


@pytest.mark.parametrize("weight_type", QUANTIZED)
@pytest.mark.parametrize("packed", [True, False])
def test_state_dict_holds_gguf_rows(weight_type, packed):
    linear = make_linear()
    state = Linear.from_linear(linear, weight_type, packed=packed).state_dict()
    assert list(state) == ["qweight", "bias", "_extra_state"]
    assert state["_extra_state"].tolist() == [1, WeightType[weight_type]]
    assert torch.equal(state["qweight"], rows_of(linear.weight, weight_type))
    assert torch.equal(state["bias"], linear.bias)


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("packed_from, packed_to", [(True, True), (True, False), (False, True)])
def test_load_state_dict(assign, packed_from, packed_to):
    source = nn.Sequential(nn.ReLU(), Linear.from_linear(make_linear(), "Q4_0", packed=packed_from))
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    target = nn.Sequential(nn.ReLU(), Linear(96, 37, weight_type="Q4_0", packed=packed_to))
    result = target.load_state_dict(state, strict=True, assign=assign)
    assert not result.missing_keys and not result.unexpected_keys
    x = torch.randn(3, 96)
    with ktlinear.exact():
        torch.testing.assert_close(target(x), source(x), rtol=1e-5, atol=1e-6)
    assert torch.equal(target.state_dict()["1.qweight"], state["1.qweight"])


@pytest.mark.parametrize("assign", [True, False])
def test_float_checkpoint_is_quantized(assign):
    linear = make_linear()
    module = Linear(96, 37, weight_type="Q4_1")
    result = module.load_state_dict(linear.state_dict(), assign=assign)
    assert not result.missing_keys and not result.unexpected_keys
    assert torch.equal(module.state_dict()["qweight"], rows_of(linear.weight, "Q4_1"))
    assert torch.equal(module.bias, linear.bias)


def test_float_checkpoint_that_no_scale_can_hold():
    """Collected with the other errors, under the name of its key; nothing is loaded half."""
    state = nn.Sequential(make_linear(), make_linear()).state_dict()
    state["0.weight"][3, 5] = 1e6
    module = nn.Sequential(Linear(96, 37, weight_type="Q4_1"), Linear(96, 37, weight_type="Q4_1"))
    with pytest.raises(RuntimeError, match=r"Error\(s\) in loading[\s\S]*0\.weight: kt::quantize: weight holds"):
        module.load_state_dict(state)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: s | {"qweight": s["qweight"][:, :-1]}, r"qweight.*\(37, 101\).*Q8_0.*\(37, 102\)"),
        (lambda s: s | {"qweight": s["qweight"].float()}, "qweight.*float32.*uint8"),
        (lambda s: s | {"qweight": rows_of(torch.zeros(37, 96), "Q4_0")}, r"\(37, 54\).*Q8_0"),
        (lambda s: {"bias": s["bias"], "weight": torch.zeros(37, 64)}, r"weight.*\(37, 64\).*\(37, 96\)"),
        (lambda s: {"bias": s["bias"], "weight": torch.zeros(37, 96).double()}, "weight.*float64"),
        (lambda s: {"bias": s["bias"]}, "Missing key.*qweight"),
        (lambda s: s | {"weight": torch.zeros(37, 96)}, "Unexpected key.*weight"),
        (lambda s: s | {"scale": torch.zeros(37)}, "Unexpected key.*scale"),
    ],
)
def test_bad_state_dict(packed, change, message):
    module = Linear.from_linear(make_linear(), packed=packed)
    before = module.state_dict()["qweight"].clone()
    with pytest.raises(RuntimeError, match=message.replace(".*", "(.|\n)*")):
        module.load_state_dict(change(module.state_dict()))
    assert torch.equal(module.state_dict()["qweight"], before)


def test_rows_of_another_type_of_the_same_size(tmp_path):
    """Q4_0, IQ4_NL and Q4_K rows of 256 elements have 144 bytes."""
    make = lambda weight_type: Linear.from_linear(nn.Linear(256, 13), weight_type)  # noqa: E731
    source, target = nn.Sequential(make("Q4_K")), nn.Sequential(make("Q4_0"))
    before = target.state_dict()["0.qweight"].clone()
    message = "0.qweight: the weight is Q4_K, and the module's Q4_0"
    for assign in (False, True):
        with pytest.raises(RuntimeError, match=message):
            target.load_state_dict(source.state_dict(), assign=assign)
    save_model(source, str(tmp_path / "model.safetensors"))
    with pytest.raises(RuntimeError, match=message):
        load_model(target, str(tmp_path / "model.safetensors"))
    assert torch.equal(target.state_dict()["0.qweight"], before)
    same = nn.Sequential(make("Q4_K"))
    load_model(same, str(tmp_path / "model.safetensors"))
    x = torch.randn(3, 256)
    assert torch.equal(same(x), source(x))
    with pytest.raises(RuntimeError, match="the weight is Q4_K, and the module's F32"):
        nn.Sequential(make("F32")).load_state_dict(source.state_dict())


@pytest.mark.parametrize("assign", [True, False])
def test_rows_without_a_description(assign):
    source = Linear.from_linear(make_linear())
    state = {key: value for key, value in source.state_dict().items() if key != "_extra_state"}
    target = Linear(96, 37)
    target.load_state_dict(state, strict=True, assign=assign)
    assert torch.equal(target.state_dict()["qweight"], state["qweight"])


@pytest.mark.parametrize(
    "state, message",
    [
        (torch.tensor([2, 8], dtype=torch.uint8), r"_extra_state is \[2, 8\]; expected \[1, 8\]"),
        (torch.tensor([1], dtype=torch.uint8), r"_extra_state is \[1\]"),
        (torch.tensor([1, 99], dtype=torch.uint8), "of the unknown type 99"),
        ({"type": 8}, "_extra_state is"),
    ],
)
def test_bad_description(state, message):
    module = Linear(96, 37)
    with pytest.raises(RuntimeError, match=message):
        module.load_state_dict(module.state_dict() | {"_extra_state": state})


@pytest.mark.parametrize("module", [Linear(96, 37), Embedding(5, 64), Linear(96, 37, weight_type="F16")])
def test_pickle_of_another_version(module):
    state = module.__getstate__()
    assert state["_format_version"] == 1
    for version in (state | {"_format_version": 2}, {k: v for k, v in state.items() if k != "_format_version"}):
        with pytest.raises(ValueError, match="format version"):
            type(module).__new__(type(module)).__setstate__(version)
    assert "_format_version" not in pickle.loads(pickle.dumps(module)).__dict__


def test_state_dict_is_a_snapshot_of_current_bytes():
    module, other = Linear.from_linear(make_linear()), Linear.from_linear(make_linear(37, 96, bias=False))
    first = module.state_dict()["qweight"]
    module.load_state_dict({"qweight": other.state_dict()["qweight"].flip(0), "bias": module.bias})
    second = module.state_dict()["qweight"]
    assert torch.equal(second, first.flip(0)) and not torch.equal(first, second)
    second.zero_()
    assert torch.equal(module.state_dict()["qweight"], first.flip(0))


# Embeddings and ties


@pytest.mark.parametrize("weight_type", QUANTIZED)
@pytest.mark.parametrize("packed", [True, False])
def test_embedding(weight_type, packed):
    torch.manual_seed(0)
    table = nn.Embedding(37, 96, padding_idx=-1)
    module = Embedding.from_embedding(table, weight_type, packed=packed)
    assert isinstance(module, nn.Embedding) and module.padding_idx == 36
    expected = values_of(table.weight, weight_type).float()
    for indices in (torch.tensor([[0, 36, 3], [3, 3, 16]]), torch.tensor(5), torch.empty(0, dtype=torch.long)):
        assert torch.equal(module(indices), expected[indices])
    assert torch.equal(module(torch.tensor([1, 2], dtype=torch.int32)), expected[1:3])
    assert torch.equal(module.bfloat16()(torch.tensor([1])), expected[1:2].bfloat16())
    assert torch.equal(module.state_dict()["qweight"], rows_of(table.weight, weight_type))
    again = Embedding.from_rows(module.state_dict()["qweight"], 96, weight_type, padding_idx=36, packed=packed)
    assert torch.equal(again(torch.tensor([7])), expected[7:8])
    assert f"37, 96, padding_idx=36, weight_type={weight_type}" in repr(module)


@pytest.mark.parametrize("index", [37, -1])
def test_embedding_index_out_of_range(index):
    with pytest.raises(IndexError):
        Embedding(37, 96)(torch.tensor([0, index]))


class Tied(nn.Module):
    def __init__(self, head: Linear):
        super().__init__()
        self.embed = Embedding.from_linear(head)
        self.head = head


def test_tied_head_shares_one_parameter(tmp_path):
    linear = make_linear(bias=False)
    model = Tied(Linear.from_linear(linear, "Q4_0"))
    assert model.embed.qweight is model.head.qweight
    assert len(list(model.parameters())) == 1
    assert torch.equal(model.embed(torch.tensor([3])), values_of(linear.weight, "Q4_0")[3:4].float())

    state = model.state_dict()
    assert state["embed.qweight"].data_ptr() == state["head.qweight"].data_ptr()
    save_model(model, str(tmp_path / "tied.safetensors"))
    assert (tmp_path / "tied.safetensors").stat().st_size < 1.5 * 37 * row_bytes("Q4_0", 96)

    with torch.device("meta"):
        target = Tied(Linear(96, 37, bias=False, weight_type="Q4_0"))
    target.load_state_dict(state, assign=True)
    assert target.embed.qweight is target.head.qweight and not target.head.qweight.is_meta
    other = Tied(Linear(96, 37, bias=False, weight_type="Q4_0"))
    load_model(other, str(tmp_path / "tied.safetensors"))
    x = torch.randn(2, 96)
    assert torch.equal(target.head(x), model.head(x)) and torch.equal(other.head(x), model.head(x))

    again = Linear(96, 37, bias=False).tie(model.embed)
    assert again.qweight is model.head.qweight and again.weight_type is WeightType.Q4_0
    assert torch.equal(again(x), model.head(x))
    both = copy.deepcopy(model)
    assert both.embed.qweight is both.head.qweight
    assert model.bfloat16().embed.qweight is model.head.qweight


# Compilation and threads


@pytest.mark.parametrize("weight_type, packed", [("Q8_0", True), ("Q8_0", False), ("BF16", True)])
def test_compile(weight_type, packed):
    torch._dynamo.reset()
    model = nn.Sequential(Linear.from_linear(make_linear(64, 96), weight_type, packed=packed), nn.ReLU())
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (2, 5, 9):
        x = torch.randn(m, 96)
        torch.testing.assert_close(compiled(x), model(x))
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))
    x = torch.randn(4, 96, requires_grad=True)
    x2 = x.detach().clone().requires_grad_()
    compiled(x).sum().backward()
    model(x2).sum().backward()
    torch.testing.assert_close(x.grad, x2.grad)


class ReadsWeight(nn.Module):
    """As T5 does: casts its input to the weight's dtype."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.to(self.linear.weight.dtype))


def test_compile_of_code_that_reads_the_weight():
    torch._dynamo.reset()
    model = ReadsWeight(Linear.from_linear(make_linear()).bfloat16())
    x = torch.randn(3, 96)
    with torch.no_grad():
        y = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y, model(x))


def test_eight_threads_on_one_module():
    module = Linear.from_linear(make_linear())
    inputs = [torch.randn(3, 96) for _ in range(8)]
    expected = [module(x) for x in inputs]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda x: [module(x) for _ in range(50)], inputs))
    assert all(torch.equal(y, e) for ys, e in zip(results, expected, strict=True) for y in ys)


def test_lora_style_use_of_the_weight():
    """What adapters do: read shape, dtype and device, add a low-rank product to the output, norm of the weight."""
    linear = make_linear()
    module = Linear.from_linear(linear)
    weight = module.weight
    assert isinstance(weight, LogicalWeight)
    a = torch.randn(4, weight.shape[1], dtype=weight.dtype, device=weight.device, requires_grad=True)
    b = torch.randn(weight.shape[0], 4, requires_grad=True)
    expected = (values_of(linear.weight, "Q8_0") + (b @ a).double()).norm(dim=1)
    torch.testing.assert_close((weight + b @ a).norm(dim=1).double(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match="read-only"):
        module.weight.data += b.detach() @ a.detach()
