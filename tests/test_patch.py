"""patch and unpatch: what is swapped, what is left and why, and that models compute the same."""

import copy
import gc
import re
import weakref

import gguf
import pytest
import torch
from conftest import small_llama
from safetensors.torch import load_file
from torch import nn

import ktlinear
from ktlinear import _cpu
from ktlinear._types import NEXT_BEST, TypeRules, fitting_type
from ktlinear.nn import Embedding, Linear
from ktlinear.ops import FORMATS, WeightType
from ktlinear.patch import PatchReport, PatchRow


class Subclass(nn.Linear):
    pass


class Model(nn.Module):
    """One of everything: plain, shared, tied, a subclass, and K that no block divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 96)
        self.body = nn.Sequential(nn.Linear(96, 96, bias=False), nn.GELU(), nn.Linear(96, 33))
        self.odd = nn.Linear(33, 64)
        self.special = Subclass(64, 64)
        self.again = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.special(self.odd(self.body(self.first(x)))))


class Tied(nn.Module):
    def __init__(self, k: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, k, padding_idx=3)
        self.inner = nn.Linear(k, k)
        self.head = nn.Linear(k, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embed(indices)))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def row(report: PatchReport, name: str) -> PatchRow:
    (found,) = [r for r in report.rows if r.name == name]
    return found


def relative_error(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.detach() - expected.detach()).norm() / expected.detach().norm())


def test_patch_swaps_plain_linears_only():
    model, x = Model().eval(), torch.randn(5, 64)
    expected = model(x)
    report = ktlinear.patch(model)
    assert isinstance(model.first, Linear) and model.again is model.first and not model.first.training
    assert isinstance(model.body[0], Linear) and isinstance(model.body[2], Linear)
    assert type(model.odd) is nn.Linear and type(model.special) is Subclass
    assert relative_error(model(x), expected) < 0.02

    assert [r.name for r in report.rows] == ["first", "body.0", "body.2", "odd", "special"]
    assert [r.name for r in report.changed] == ["first", "body.0", "body.2"]
    assert row(report, "first").before == "float32" and row(report, "first").after == "Q8_0"
    assert row(report, "first").bytes_before == 64 * 96 * 4
    assert row(report, "first").bytes_after == 96 * 64 // 32 * 34
    assert "33" in row(report, "odd").note and "Subclass" in row(report, "special").note
    assert row(report, "odd").after is None and row(report, "odd").bytes_after == 64 * 33 * 4

    lines = str(report).splitlines()
    assert lines[0].split() == ["module", "before", "after", "MB", "before", "MB", "after", "note"]
    assert len(lines) == 1 + 1 + 5 + 1 + 1 and lines[-1].endswith("3 changed, 2 left")
    assert any(line.startswith("body.2") and "Q8_0" in line for line in lines)


def test_patching_again_changes_nothing():
    model = Model()
    ktlinear.patch(model, "Q4_0")
    first = model.first
    report = ktlinear.patch(model, "Q8_0")
    assert not report.changed and model.first is first
    assert "Q4_0" in row(report, "first").note and row(report, "first").before == "Q4_0"


@pytest.mark.parametrize("weight_type, dtype", [("F32", torch.float32), ("f16", torch.float16), (30, torch.bfloat16)])
def test_float_types(weight_type, dtype):
    model, x = Model(), torch.randn(5, 64)
    expected = model(x)
    report = ktlinear.patch(model, weight_type)
    assert type(model.odd) is Linear and model.odd.weight.dtype == dtype and model.odd.weight.requires_grad
    assert model.odd.bias.dtype == torch.float32
    assert len(report.changed) == 4
    assert relative_error(model(x), expected) < 0.02
    ktlinear.unpatch(model)
    assert type(model.odd) is nn.Linear and model.odd.weight.dtype == torch.float32
    assert relative_error(model(x), expected) < 0.02


@pytest.mark.parametrize(
    "weight_type, dtype, features",
    [("BF16", torch.bfloat16, "avx512_bf16"), ("BF16", torch.bfloat16, "amx_bf16"), ("F16", torch.float16, "amx_fp16")],
)
def test_a_type_that_the_cpu_computes_in_is_left_to_pytorch(monkeypatch, weight_type, dtype, features):
    model = Model().to(dtype)
    monkeypatch.setattr(_cpu, "features", lambda: frozenset([features]))
    report = ktlinear.patch(model, weight_type)
    assert not report.changed and type(model.first) is nn.Linear
    assert f"already, in which this CPU computes ({features})" in row(report, "first").note
    assert ktlinear.patch(Model(), weight_type).changed  # PyTorch has no linear of fp32 inputs on such a weight
    monkeypatch.setattr(_cpu, "features", lambda: frozenset(["avx2"]))
    assert len(ktlinear.patch(model, weight_type).changed) == 4 and model.first.weight.dtype == dtype


def test_modules_that_hold_more_are_left_and_attributes_go_along():
    model = nn.Sequential(*(nn.Linear(64, 32) for _ in range(4)))
    model[0].register_buffer("running", torch.ones(3))
    model[1].gain = nn.Parameter(torch.ones(2))
    model[2].act = nn.ReLU()
    model[3].mark = "mine"
    keys = set(model.state_dict())
    report = ktlinear.patch(model)
    assert [(r.name, r.note) for r in report.left] == [
        (str(i), f"it holds more than a weight and a bias: {what}") for i, what in enumerate(("running", "gain", "act"))
    ]
    assert model[3].mark == "mine" and set(model.state_dict()) == keys - {"3.weight"} | {"3.qweight", "3._extra_state"}
    model[3].mark = "changed"
    ktlinear.unpatch(model)
    assert model[3].mark == "changed" and type(model[3]) is nn.Linear
    assert not any(name.startswith("_type") or name == "packed" for name in vars(model[3]))


def test_filter_and_rules():
    seen: list[str] = []

    def keep(name: str, module: nn.Module) -> bool:
        seen.append(name)
        return name != "first"

    model = Model()
    rules = {"body.2": None, "body.*": "Q4_1", "odd": "BF16"}
    report = ktlinear.patch(model, WeightType.Q4_0, filter_fn=keep, rules=rules)
    assert seen == ["first", "body.0", "body.2", "odd"]
    assert [(r.name, r.after) for r in report.rows] == [
        ("first", None),
        ("body.0", "Q4_1"),
        ("body.2", None),
        ("odd", "BF16"),
        ("special", None),
    ]
    assert "filter_fn" in row(report, "first").note and "'body.2'" in row(report, "body.2").note


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda m: ktlinear.patch(m, "Q9_9"), ValueError, "Q9_9.*Q8_0"),
        (lambda m: ktlinear.patch(m, rules={"body.*": "Q9_9"}), ValueError, "Q9_9.*Q8_0"),
        (lambda m: ktlinear.patch("model"), TypeError, "model.*str"),
        (lambda m: ktlinear.patch(m.first), ValueError, "model.*from_linear"),
        (lambda m: ktlinear.unpatch("model"), TypeError, "model.*str"),
        (lambda m: ktlinear.unpatch(Linear(64, 4)), ValueError, "model.*Linear"),
        (lambda m: ktlinear.patch(m, filter_fn=lambda name, module: 1 / 0), ZeroDivisionError, "division"),
    ],
)
def test_errors_leave_the_model_as_it_was(call, error, message):
    model = Model()
    before = list(model.named_modules())
    with pytest.raises(error, match=message):
        call(model)
    assert list(model.named_modules()) == before


def test_late_filter_error_comes_before_the_first_swap():
    model = Model()

    def fails_late(name: str, module: nn.Module) -> bool:
        if name == "odd":
            raise RuntimeError("late")
        return True

    with pytest.raises(RuntimeError, match="late"):
        ktlinear.patch(model, "F16", filter_fn=fails_late)
    assert type(model.first) is nn.Linear


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated", "ignore:Initializing zero-element")
def test_what_cannot_be_converted_is_left_with_the_reason():
    model = nn.ModuleDict(
        {
            "nan": nn.Linear(32, 4),
            "huge": nn.Linear(32, 4),
            "wide": nn.Linear(32, 4).double(),
            "hooked": nn.Linear(32, 4),
            "normed": nn.utils.weight_norm(nn.Linear(32, 4)),
            "parametrized": nn.utils.parametrizations.weight_norm(nn.Linear(32, 4)),
            "empty": nn.Linear(32, 0),
            "shared": nn.Linear(32, 32),
            "sharer": nn.Bilinear(1, 1, 1),
        }
    )
    with torch.no_grad():
        model["nan"].weight[1, 2] = float("nan")
        model["huge"].weight[1, 2] = -1e6
    model["hooked"].register_forward_hook(lambda module, args, output: output + 1)
    model["sharer"].weight = model["shared"].weight
    report = ktlinear.patch(model, "Q4_0")
    assert not report.changed
    for name, reason in {
        "nan": "nan",
        "huge": r"1e\+06",
        "wide": "float64",
        "hooked": "hooks",
        "normed": "computed|hooks",
        "parametrized": "Parametrized",
        "empty": "empty",
        "shared": "sharer.*Bilinear",
    }.items():
        assert re.search(reason, row(report, name).note), name


def test_next_best_type():
    assert fitting_type(WeightType.Q8_0, 96) is WeightType.Q8_0
    assert fitting_type(WeightType.Q8_0, 33) is None
    assert fitting_type(WeightType.F16, 33) is WeightType.F16
    expected = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
    expected |= dict.fromkeys(("Q2_K", "Q3_K", "TQ1_0", "TQ2_0"), "Q4_0")
    iq = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS")
    expected |= dict.fromkeys(iq, "IQ4_NL")
    assert {kind.name: best.name for kind, best in NEXT_BEST.items()} == expected
    assert set(NEXT_BEST) == {kind for kind in WeightType if FORMATS[kind].block == 256}
    for kind, best in expected.items():
        assert fitting_type(WeightType[kind], 256) is WeightType[kind] and fitting_type(WeightType[kind], 33) is None
        assert fitting_type(WeightType[kind], 96) is WeightType[best]
    model = Model()
    report = ktlinear.patch(model, "IQ2_XXS")  # which needs an importance matrix itself; what it falls back to, none
    assert row(report, "first").after == "IQ4_NL" and "IQ2_XXS does not divide K = 64" in row(report, "first").note
    model = Model()
    report = ktlinear.patch(model, "Q5_K")
    assert row(report, "first").after == "Q5_1" and "Q5_K does not divide K = 64" in row(report, "first").note
    assert row(report, "odd").after is None and "Q5_K does not divide K = 33" in row(report, "odd").note


def stack(layers: int, k: int = 256) -> nn.Module:
    """The names of a decoder of transformers."""
    names = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    model = nn.Module()
    with torch.device("meta"):
        model.embed_tokens = nn.Embedding(10, k)
        model.layers = nn.ModuleList(nn.Module() for _ in range(layers))
        for layer in model.layers:
            layer.self_attn, layer.mlp = nn.Module(), nn.Module()
            for name in names:
                layer.set_submodule(name, nn.Linear(k, 8))
        model.lm_head = nn.Linear(k, 10)
    return model


@pytest.mark.parametrize("layers, better", [(32, {0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31}), (1, {0})])
@pytest.mark.parametrize("weight_type, high", [("Q4_K", "Q6_K"), ("Q5_K", "Q6_K")])
def test_k_quants_are_mixed_as_llama_cpp_does(layers, better, weight_type, high):
    """The layers are those of llama.cpp's use_more_bits: of 32, the first and last four, and every third between."""
    report = ktlinear.patch(stack(layers), weight_type)
    for i in range(layers):
        after = {name: row(report, f"layers.{i}.{name}").after for name in ("self_attn.v_proj", "mlp.down_proj")}
        assert set(after.values()) == {high if i in better else weight_type}, i
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj"):
            assert row(report, f"layers.{i}.{name}").after == weight_type
    assert row(report, "lm_head").after == "Q6_K" and all(r.name != "embed_tokens" for r in report.rows)


def test_other_mixes_and_none():
    def types(weight_type, rules=None, k=256):
        rows = ktlinear.patch(stack(3, k), weight_type, rules=rules).rows
        return {r.name.removeprefix("layers.1."): r.after for r in rows if "layers" not in r.name or ".1." in r.name}

    names = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj", "lm_head")
    for weight_type, expected in {
        "Q2_K": ("Q2_K", "Q3_K", "Q3_K", "Q2_K", "Q3_K", "Q6_K"),
        "Q3_K": ("Q3_K", "Q4_K", "Q4_K", "Q3_K", "Q4_K", "Q6_K"),
        "Q6_K": ("Q6_K",) * 6,
        "Q4_0": ("Q4_0",) * 6,
        "IQ4_XS": ("IQ4_XS",) * 6,
    }.items():
        assert types(weight_type) == dict(zip(names, expected, strict=True))
    # Rules come before the mix, and one that matches everything leaves nothing to it.
    assert types("Q4_K", {"lm_head": None, "*.v_proj": "Q8_0"}) == dict(
        zip(names, ("Q4_K", "Q8_0", "Q4_K", "Q4_K", "Q4_K", None), strict=True)
    )
    assert types("Q2_K", {"*": "Q2_K"}) == dict.fromkeys((*names, "embed_tokens"), "Q2_K")
    # A mixed type falls back as any other does: Q6_K to Q8_0.
    assert types("Q4_K", k=64)["lm_head"] == "Q8_0" and types("Q4_K", k=64)["self_attn.q_proj"] == "Q5_0"


@pytest.mark.parametrize(
    "name, role",
    [
        ("model.layers.0.self_attn.qkv_proj", "qkv"),
        ("encoder.layer.0.attention.self.value", "value"),
        ("encoder.layer.0.attention.output.dense", "output"),
        ("encoder.layer.0.output.dense", "down"),
        ("encoder.layer.0.intermediate.dense", ""),
        ("encoder.block.0.layer.0.SelfAttention.v", "value"),
        ("decoder.block.0.layer.1.EncDecAttention.o", "output"),
        ("encoder.block.0.layer.1.DenseReluDense.wo", "down"),
        ("layers.0.attention.wo", "output"),
        ("cls.predictions.decoder", "head"),
        ("lm_head", "head"),
        ("model.decoder.layers.0.fc2", "down"),
    ],
)
def test_roles_of_layers_by_their_names(name, role):
    # Of a stack of eight, layer 0 is one of those with more bits.
    rules = TypeRules("Q5_K", None, [name, name.replace("0", "7")])
    expected = {"qkv": "Q6_K", "value": "Q6_K", "down": "Q6_K", "head": "Q6_K", "output": "Q5_K", "": "Q5_K"}
    assert rules.default_type(name).name == expected[role]
    rules = TypeRules("Q3_K", None, [name])
    expected = {"head": "Q6_K", "": "Q3_K"}
    assert rules.default_type(name).name == expected.get(role, "Q4_K")


def test_a_rule_that_matches_nothing_is_an_error():
    model = Model()
    with pytest.raises(ValueError, match=r"rules: 'bodi\.\*' matches no linear layer.*first, body\.0"):
        ktlinear.patch(model, rules={"first": "Q4_0", "bodi.*": "Q4_0"})
    assert type(model.first) is nn.Linear
    with pytest.raises(ValueError, match="'body.1'"):  # a module, but nothing that could be quantized
        ktlinear.patch(model, rules={"body.1": None})
    with pytest.raises(TypeError, match="rules.*list"):
        ktlinear.patch(model, rules=[("first", "Q4_0")])


def test_embeddings_are_quantized_where_a_rule_names_them():
    model = nn.ModuleDict({"a": nn.Embedding(7, 64, padding_idx=1), "b": nn.Embedding(7, 64), "c": nn.Embedding(3, 32)})
    model["b"].weight = model["a"].weight
    expected, indices = model["a"].weight.detach().clone(), torch.tensor([0, 6, 1])
    report = ktlinear.patch(model, "Q4_0", rules={"b": "Q8_0", "a": "Q8_0"})
    assert [(r.name, r.after) for r in report.rows] == [("a", "Q8_0"), ("b", "Q8_0")]
    assert model["a"].qweight is model["b"].qweight and type(model["c"]) is nn.Embedding
    assert model["a"].padding_idx == 1 and model["b"].padding_idx is None
    oracle = gguf.dequantize(gguf.quantize(expected.numpy(), gguf.GGMLQuantizationType.Q8_0), 8)
    for name in ("a", "b"):
        torch.testing.assert_close(model[name](indices), torch.from_numpy(oracle)[indices], rtol=0, atol=1e-6)
    again = ktlinear.patch(model, "Q4_0", rules={"*": "Q4_0"})
    assert [(r.name, r.after) for r in again.rows] == [("a", None), ("b", None), ("c", "Q4_0")]
    assert "already ktlinear.nn.Embedding, Q8_0" in again.rows[0].note
    report = ktlinear.patch(nn.ModuleDict({"a": nn.Embedding(7, 64)}), rules={"a": "BF16"})
    assert report.rows[0].after is None and "quantized types only" in report.rows[0].note


def test_originals_are_freed_as_the_work_goes_on(monkeypatch):
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(5)])
    originals = [weakref.ref(layer.weight) for layer in model]
    alive = []
    convert = Linear.from_linear.__func__

    def counting(cls, *args, **kwargs):
        gc.collect()
        alive.append(sum(ref() is not None for ref in originals))
        return convert(cls, *args, **kwargs)

    monkeypatch.setattr(Linear, "from_linear", classmethod(counting))
    ktlinear.patch(model)
    # The one just replaced may still be referred to by the loop.
    assert len(alive) == 5 and all(count <= 5 - i + 1 for i, count in enumerate(alive))
    gc.collect()
    assert all(ref() is None for ref in originals)


def test_tied_embedding_and_head_become_one_quantized_table():
    model, indices = Tied().eval(), torch.tensor([[0, 49, 3, 7]])
    expected = model(indices)
    report = ktlinear.patch(model)
    assert isinstance(model.embed, Embedding) and isinstance(model.head, Linear)
    assert model.embed.qweight is model.head.qweight and model.embed.padding_idx == 3
    assert relative_error(model(indices), expected) < 0.03
    assert row(report, "embed").after == row(report, "head").after == "Q8_0"
    assert "head" in row(report, "embed").note and row(report, "embed").bytes_after == 0
    assert sum(r.bytes_after for r in report.rows) == sum(p.nbytes for p in [model.head.qweight, model.inner.qweight])

    ktlinear.unpatch(model)
    assert type(model.embed) is nn.Embedding and type(model.head) is nn.Linear
    assert model.head.weight is model.embed.weight and model.embed.padding_idx == 3
    assert relative_error(model(indices), expected) < 0.03


@pytest.mark.parametrize(
    "arguments, reason",
    [
        ({"weight_type": "F16"}, "tied to embed"),
        ({"rules": {"embed": None}}, "embed.*rule 'embed'"),
        ({"filter_fn": lambda name, module: isinstance(module, nn.Linear)}, "embed.*filter_fn"),
        ({"rules": {"embed": "Q4_0", "head": "Q8_0"}}, "embed Q4_0.*head Q8_0|head Q8_0.*embed Q4_0"),
    ],
)
def test_tied_weight_is_left_if_either_side_is(arguments, reason):
    model = Tied()
    report = ktlinear.patch(model, **arguments)
    assert type(model.embed) is nn.Embedding and model.head.weight is model.embed.weight
    assert isinstance(model.inner, Linear)
    assert row(report, "head").after is None
    assert re.search(reason, row(report, "head").note)


@pytest.mark.parametrize("name", ["embed", "head"])
def test_a_rule_for_either_side_of_a_tied_weight_decides_for_both(name):
    model = Tied()
    report = ktlinear.patch(model, rules={name: "Q4_0"})
    assert row(report, "head").after == row(report, "embed").after == "Q4_0" and row(report, "inner").after == "Q8_0"
    assert model.embed.qweight is model.head.qweight


def test_tied_linears_stay_tied():
    for weight_type in ("Q4_1", "F16"):
        model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        model[2].weight = model[0].weight
        x = torch.randn(3, 32)
        expected = model(x)
        ktlinear.patch(model, weight_type)
        first, second = model[0], model[2]
        assert first._stored() is second._stored() and first.bias is not second.bias
        assert relative_error(model(x), expected) < 0.2
        ktlinear.unpatch(model)
        assert model[0].weight is model[2].weight and type(model[2]) is nn.Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpatch_restores_dtype_and_keeps_the_quantized_values(dtype):
    model = Model().to(dtype)
    model.first.weight.requires_grad_(False)
    ktlinear.patch(model, "Q4_0")
    expected = model.first.weight.dequantize()
    bias = model.first.bias
    report = ktlinear.unpatch(model)
    assert type(model.first) is nn.Linear and model.again is model.first and model.first.bias is bias
    assert model.first.weight.dtype == dtype and torch.equal(model.first.weight, expected)
    assert not model.first.weight.requires_grad and model.body[0].weight.requires_grad
    assert [(r.name, r.before, r.after) for r in report.rows][0] == ("first", "Q4_0", str(dtype).removeprefix("torch."))
    assert len(report.changed) == 3


def test_meta_skeleton_takes_a_quantized_state_dict():
    full = Model().eval()
    with torch.device("meta"):
        skeleton = Model().eval()
    report = ktlinear.patch(skeleton, "Q4_0")
    assert len(report.changed) == 3 and skeleton.first.qweight.is_meta
    ktlinear.patch(full, "Q4_0")
    skeleton.load_state_dict(full.state_dict(), assign=True)
    x = torch.randn(2, 64)
    assert torch.equal(skeleton(x), full(x))


# What PyTorch's attention modules read past their linears' forward


def transformer() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(64, 4, dim_feedforward=128, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval()


@pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("padded", [True, False])
def test_transformer_encoder_in_eval_mode(context, padded):
    model = transformer()
    x = torch.randn(3, 7, 64)
    mask = torch.arange(7)[None] >= torch.tensor([7, 4, 2])[:, None] if padded else None
    report = ktlinear.patch(model, "Q8_0")
    assert {r.name for r in report.changed} == {f"layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)}
    assert all("NonDynamicallyQuantizableLinear" in r.note for r in report.left)
    oracle = copy.deepcopy(model)
    ktlinear.unpatch(oracle)
    assert type(oracle.layers[0].linear1) is nn.Linear
    with context(), ktlinear.exact():
        y, expected = model(x, src_key_padding_mask=mask), oracle(x, src_key_padding_mask=mask)
    keep = ~mask if padded else torch.ones(3, 7, dtype=torch.bool)
    torch.testing.assert_close(y[keep], expected[keep], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_multihead_attention_with_a_quantized_out_proj(context):
    """patch leaves it alone; set by hand, F.multi_head_attention_forward takes the logical weight past forward."""
    attention = nn.MultiheadAttention(64, 4, batch_first=True).eval()
    ktlinear.patch(nn.ModuleDict({"attention": attention}))
    assert type(attention.out_proj) is nn.modules.linear.NonDynamicallyQuantizableLinear
    oracle = copy.deepcopy(attention)
    attention.out_proj = Linear.from_linear(attention.out_proj, "Q8_0")
    with torch.no_grad():
        oracle.out_proj.weight.copy_(attention.out_proj.weight.dequantize())
    x = torch.randn(2, 5, 64)
    with context(), ktlinear.exact():
        y, expected = attention(x, x, x)[0], oracle(x, x, x)[0]
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


# transformers


@pytest.mark.parametrize("tied", [True, False])
def test_llama(tied, tmp_path):
    pytest.importorskip("transformers", reason="needs the transformers package")
    model = small_llama(tie_word_embeddings=tied).eval()
    ids = torch.randint(1, 97, (2, 9))
    with torch.no_grad():
        expected = model(ids).logits
        report = ktlinear.patch(model)
        y = model(ids).logits
    assert len(report.changed) == 2 * 7 + 1 + tied and not report.left
    assert isinstance(model.get_input_embeddings(), Embedding) == tied
    assert relative_error(y, expected) < 0.06
    model.tie_weights()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    state = model.state_dict()
    extra = {"lm_head.weight"} if tied else set()
    names = {name.replace("qweight", "weight"): name for name in state if not name.endswith("_extra_state")}
    assert set(saved) == set(names) - extra
    assert all(torch.equal(saved[name], state[names[name]]) for name in saved)
    if tied:
        assert model.lm_head.qweight is model.model.embed_tokens.qweight
    generated = model.generate(ids, max_new_tokens=5, do_sample=False)
    with ktlinear.exact():
        exact = model.generate(ids, max_new_tokens=5, do_sample=False)
        ktlinear.unpatch(model)
        model.tie_weights()
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert torch.equal(exact, model.generate(ids, max_new_tokens=5, do_sample=False))
    assert generated.shape == (2, 14) and torch.equal(generated[:, :9], ids)
