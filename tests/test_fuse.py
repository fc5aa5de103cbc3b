"""Linear layers computed together: the same bits as one by one, and only where that cannot make a difference."""

from __future__ import annotations

import contextlib
import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fuse_models as models
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ktlinear
from ktlinear import ops
from ktlinear.nn import Linear, linear_group

GROUP = torch.ops.kt._linear_packed_group.default


class Recorder(TorchDispatchMode):
    """Counts the calls of the operator for groups, by their number of weights, and of that for rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[int] = []
        self.rotaries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is GROUP:
            self.groups.append(len(args[1]))
        self.rotaries += func is torch.ops.kt._rotary.default
        return func(*args, **(kwargs or {}))


def layers(k: int, *ns: int, bias: bool = True, weight_type: str = "Q8_0", packed: bool = True) -> list[Linear]:
    return [Linear.from_linear(nn.Linear(k, n, bias=bias), weight_type, packed) for n in ns]


def groups_of(run: Any) -> list[int]:
    with Recorder() as recorder:
        run()
    return recorder.groups


# The operator


@pytest.mark.parametrize("weight_type", ["Q4_0", "Q4_1", "Q6_K"])
@pytest.mark.parametrize("m", [0, 1, 3, 17, 513])
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_a_group_has_the_bits_of_its_parts(isa: str, weight_type: str, m: int, bias: bool) -> None:
    group = layers(256, 37, 1, 0, 144, bias=bias, weight_type=weight_type)
    x = torch.randn(2, m, 512)[..., ::2]
    for run in (lambda: linear_group(x, *group), lambda: linear_group(x.bfloat16(), *group)):
        assert groups_of(run) == [4]
    for exact in (False, True):
        with ktlinear.exact() if exact else contextlib.nullcontext():
            for layer, y in zip(group, linear_group(x, *group), strict=True):
                assert y.is_contiguous() and torch.equal(y, layer(x))
    x[:] = 1e36  # too large for int8 activations
    for layer, y in zip(group, linear_group(x, *group), strict=True):
        assert torch.equal(y, layer(x))


@torch.inference_mode()
def test_no_inputs_features() -> None:
    group = layers(0, 5, 3)
    for layer, y in zip(group, linear_group(torch.zeros(2, 0), *group), strict=True):
        assert torch.equal(y, layer.bias.expand(2, -1))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"weights": []}, "weights has 0 tensors; expected 1 to 8"),
        ({"weights": 9}, "weights has 9 tensors; expected 1 to 8"),
        ({"out_features": [5]}, "out_features has 1 numbers; expected one for each of 2 weights"),
        ({"out_features": [5, 33]}, r"weight has shape \[1, .*expected"),
        ({"biases": 1}, "biases has 1 tensors; expected none or one for each of 2 weights"),
        ({"biases": [torch.zeros(4), torch.zeros(3)]}, r"bias has shape \[4\]; expected \[5\]"),
        ({"in_features": 32}, "input has shape .*in_features, 32"),
        ({"weight_type": 99}, "weight_type is 99"),
        ({"input": torch.zeros(3, 64, dtype=torch.float64)}, "input has dtype float64"),
    ],
)
def test_errors_name_the_argument(change: dict[str, Any], message: str) -> None:
    weights = [layer.qweight for layer in layers(64, 5, 3)]
    arguments = {
        "input": torch.zeros(3, 64),
        "weights": weights,
        "biases": [],
        "out_features": [5, 3],
        "in_features": 64,
        "weight_type": 8,
    } | change
    if arguments["weights"] == 9:
        arguments["weights"] = 9 * weights[:1]
    if arguments["biases"] == 1:
        arguments["biases"] = [torch.zeros(5)]
    with pytest.raises(RuntimeError, match=message):
        GROUP(**arguments)


@pytest.mark.parametrize("bias", [True, False])
def test_opcheck(bias: bool) -> None:
    group = layers(96, 37, 16, bias=bias)
    arguments = (
        torch.randn(3, 96),
        [layer.qweight for layer in group],
        [layer.bias.detach() for layer in group if bias],
    )
    torch.library.opcheck(GROUP, (*arguments, [37, 16], 96, 8))


# linear_group: one by one wherever it could make a difference


@pytest.mark.parametrize(
    "change",
    [
        lambda group: group[1].register_forward_hook(lambda module, args, output: output + 1),
        lambda group: group[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
        lambda group: setattr(group[0], "forward", lambda x: torch.zeros(*x.shape[:-1], 48)),
        lambda group: group.__setitem__(1, nn.Linear(64, 48)),
        lambda group: group.__setitem__(0, nn.Linear(64, 48)),
        lambda group: group.__setitem__(2, nn.Sequential(group[2], nn.ReLU())),
        lambda group: group.__setitem__(2, layers(64, 48, packed=False)[0]),
        lambda group: group.__setitem__(2, layers(64, 48, weight_type="Q4_0")[0]),
        lambda group: group.__setitem__(2, layers(64, 48, weight_type="BF16")[0]),
        lambda group: group.__setitem__(2, layers(64, 48, bias=False)[0]),
        lambda group: group[1].compile(backend="eager"),
    ],
)
def test_one_by_one(change: Any) -> None:
    group: list[Any] = layers(64, 48, 48, 48)
    x = torch.randn(3, 64)
    with torch.inference_mode():
        assert groups_of(lambda: linear_group(x, *group)) == [3]
        change(group)
        assert groups_of(lambda: linear_group(x, *group)) == []
        for layer, y in zip(group, linear_group(x, *group), strict=True):
            assert torch.equal(y, layer(x))


def test_global_hooks_are_called() -> None:
    seen: list[nn.Module] = []
    group = layers(64, 48, 48)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
    try:
        with torch.inference_mode():
            linear_group(torch.randn(3, 64), *group)
    finally:
        handle.remove()
    assert seen == group


def test_gradients_and_autocast() -> None:
    group, x = layers(64, 48, 13), torch.randn(3, 64, requires_grad=True)
    sum(y.square().sum() for y in linear_group(x, *group)).backward()
    gradients = [x.grad, *(layer.bias.grad for layer in group)]
    x2 = x.detach().clone().requires_grad_()
    for layer in group:
        layer.bias.grad = None
    sum(layer(x2).square().sum() for layer in group).backward()
    for gradient, other in zip(gradients, [x2.grad, *(layer.bias.grad for layer in group)], strict=True):
        assert torch.equal(gradient, other)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert {y.dtype for y in linear_group(x, *group)} == {torch.bfloat16}


# patch(fuse=True)


def patched(cls: type[nn.Module], **options: Any) -> tuple[nn.Module, nn.Module, ktlinear.patch.PatchReport]:
    """The module in a model, fused and not, with the same weights."""
    model = nn.ModuleList([cls()]).eval()
    other = copy.deepcopy(model)
    ktlinear.patch(other)
    report = ktlinear.patch(model, fuse=True, **options)
    return model[0], other[0], report


@pytest.mark.parametrize(
    "cls, groups",
    [
        (models.Plain, [("0.a", "0.b", "0.c")]),
        (models.Statements, [("0.a", "0.b")]),
        (models.Decorated, [("0.a", "0.b")]),
        (models.OneOfTwo, [("0.b", "0.c")]),
    ],
)
@torch.no_grad()
def test_patch(cls: type[nn.Module], groups: list[tuple[str, ...]]) -> None:
    module, other, report = patched(cls)
    x = torch.randn(5, 64)
    assert report.fused == groups and f"computed together: {', '.join(groups[0])}" in str(report)
    assert groups_of(lambda: module(x)) == [len(groups[0])] and groups_of(lambda: other(x)) == []
    assert torch.equal(module(x), other(x))
    assert isinstance(module, cls) and type(module).__name__ == cls.__name__ and repr(module) == repr(other)
    assert module.state_dict().keys() == other.state_dict().keys()
    if cls is models.Statements:
        assert torch.equal(module(x, scale=3.0), other(x, scale=3.0))
        assert torch.equal(module.train()(x), other.train()(x))


@pytest.mark.parametrize("cls", models.LEFT)
@torch.no_grad()
def test_what_is_not_plain_is_left(cls: type[nn.Module]) -> None:
    module, other, report = patched(cls)
    assert report.fused == [] and type(module) is cls
    if cls is not models.Swapped:
        x = torch.randn(5, 64)
        x2 = x.clone()
        assert torch.equal(module(x), other(x2)) and torch.equal(x, x2)


def test_without_source() -> None:
    scope: dict[str, Any] = {"Base": models.Base}
    exec("class Made(Base):\n    def forward(self, x):\n        return self.a(x) + self.b(x)", scope)
    assert patched(scope["Made"])[2].fused == []


def test_source_that_is_not_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import fuse_models\nclass Made(fuse_models.Base):\n    def forward(self, x):\n"
    text += "        return self.a(x) {} self.b(x)"
    (tmp_path / "stale_forward.py").write_text(text.format("+"))
    monkeypatch.syspath_prepend(tmp_path)
    import stale_forward  # type: ignore[import-not-found]

    (tmp_path / "stale_forward.py").write_text(text.format("-") + "  # edited")
    assert patched(stale_forward.Made)[2].fused == []


def test_only_what_fits_together() -> None:
    module, other, report = patched(models.Plain, rules={"0.b": "Q4_0"})
    assert report.fused == [("0.a", "0.c")]
    module, other, report = patched(models.Plain, rules={"0.b": "Q4_0", "0.c": None})
    assert report.fused == [] and type(module) is models.Plain


def test_unpatch_and_again() -> None:
    model = nn.Sequential(models.Plain())
    ktlinear.patch(model, fuse=True)
    assert ktlinear.patch(model, fuse=True).fused == []
    ktlinear.unpatch(model)
    assert type(model[0]) is models.Plain
    assert ktlinear.patch(model).fused == [] and type(model[0]) is models.Plain


@torch.no_grad()
def test_names_and_state_dicts_stay() -> None:
    module, other, _ = patched(models.Plain)
    fresh = models.Plain()
    x = torch.randn(2, 64)
    assert module.a.weight.shape == (48, 64) and torch.equal(
        module.a.weight[:16].dequantize(), module.a.weight.dequantize()[:16]
    )
    for assign in (False, True):
        module.load_state_dict(fresh.state_dict(), assign=assign)
        other.load_state_dict(fresh.state_dict(), assign=assign)
        assert torch.equal(module(x), other(x)) and groups_of(lambda: module(x)) == [3]
    module.b = nn.Linear(64, 48)
    other.b = module.b
    assert torch.equal(module(x), other(x)) and groups_of(lambda: module(x)) == []


@torch.no_grad()
def test_copies() -> None:
    module, other, _ = patched(models.Plain)
    x = torch.randn(2, 64)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(copied) is type(module) and torch.equal(copied(x), other(x))
        assert groups_of(lambda copied=copied: copied(x)) == [3]
        copied.a.qweight.zero_()
        assert not torch.equal(copied(x), other(x))


@torch.no_grad()
def test_functional_call_and_threads() -> None:
    module, other, _ = patched(models.Plain)
    x, fresh = torch.randn(2, 64), copy.deepcopy(other)
    fresh.load_state_dict(models.Plain().state_dict())
    parameters = dict(fresh.named_parameters())
    assert torch.equal(torch.func.functional_call(module, parameters, (x,)), fresh(x))
    inputs = [torch.randn(3, 64) for _ in range(4)]
    expected = [other(x) for x in inputs]

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            return [module(x) for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(run, inputs))
    assert all(torch.equal(y, e) for ys, e in zip(results, expected, strict=True) for y in ys)


def test_training_through_it() -> None:
    module, other, _ = patched(models.Plain)
    x = torch.randn(3, 64, requires_grad=True)
    x2 = x.detach().clone().requires_grad_()
    module(x).sum().backward()
    other(x2).sum().backward()
    assert torch.equal(x.grad, x2.grad) and torch.equal(module.a.bias.grad, other.a.bias.grad)


@torch.no_grad()
def test_compile_and_export() -> None:
    torch._dynamo.reset()
    module, other, _ = patched(models.Plain)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=True)
    for m in (2, 5, 9):
        x = torch.randn(m, 64)
        torch.testing.assert_close(compiled(x), other(x))
    assert len(graphs) == 1 and [node.target for node in graphs[0].graph.nodes].count(GROUP) == 1
    compiled = torch.compile(module, fullgraph=True)
    torch.testing.assert_close(compiled(x), other(x))
    program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    torch.testing.assert_close(program.module()(x[:4]), other(x[:4]))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3_text", "mistral"])
@torch.inference_mode()
def test_transformers_models(architecture: str) -> None:
    transformers = pytest.importorskip("transformers", reason="it has the models")
    config = transformers.AutoConfig.for_model(
        architecture,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=50,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    other = copy.deepcopy(model)
    ktlinear.patch(other, "Q8_0")
    report = ktlinear.patch(model, "Q8_0", fuse=True)
    assert report.fused[:2] == [
        tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkv"),
        ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"),
    ]
    ids = torch.randint(50, (2, 7))
    assert groups_of(lambda: model(ids)) == [3, 2, 3, 2]
    assert torch.equal(model(ids).logits, other(ids).logits)
    tokens = [m.generate(ids[:1], max_new_tokens=4, do_sample=False) for m in (model, other)]
    assert torch.equal(*tokens)


# Rotary embeddings


def usual_rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama", reason="it has the function")
    return llama.apply_rotary_pos_emb(q, k, cos, sin)


def interleaved_rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    turned = [torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) for x in (q, k)]
    return tuple(x * cos.unsqueeze(1) + y * sin.unsqueeze(1) for x, y in zip((q, k), turned, strict=True))


@pytest.mark.parametrize(
    ("b", "h", "g", "s", "d"), [(1, 9, 3, 1, 64), (2, 4, 1, 7, 6), (3, 1, 1, 0, 2), (1, 8, 2, 300, 128)]
)
@torch.inference_mode()
def test_rotary_has_the_bits_of_pytorchs_operators(b: int, h: int, g: int, s: int, d: int) -> None:
    q, k = torch.randn(b, s, h, d).transpose(1, 2), torch.randn(b, s, g, d).transpose(1, 2)
    for cos, sin in (torch.randn(2, b, s, d), torch.randn(2, 1, s, d), torch.randn(2, b, s, 2 * d)[..., ::2]):
        for x, y in ((q, k), (q.contiguous(), k), (torch.randn(b, h, d, s).transpose(2, 3), k)):
            expected = usual_rotary(x, y, cos, sin)
            for results in (ops.rotary(usual_rotary, x, y, cos, sin), torch.ops.kt._rotary(x, y, cos, sin)):
                assert all(torch.equal(result, other) for result, other in zip(results, expected, strict=True))


def test_rotary_of_other_kinds() -> None:
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8)
    cos, sin = torch.randn(2, 2, 5, 8)

    def equal(apply: Any, *arguments: torch.Tensor) -> bool:
        results = zip(ops.rotary(apply, *arguments), apply(*arguments), strict=True)
        return all(torch.equal(result, other) for result, other in results)

    with torch.inference_mode():
        assert equal(interleaved_rotary, q, k, cos, sin)
        assert equal(usual_rotary, q.bfloat16(), k.bfloat16(), cos.bfloat16(), sin.bfloat16())
        assert equal(usual_rotary, q.double(), k.double(), cos, sin)
    gradients = torch.autograd.grad(ops.rotary(usual_rotary, q.requires_grad_(), k, cos, sin)[0].sum(), q)
    assert gradients[0].norm() > 0


@pytest.mark.parametrize(("argument", "shape"), [(0, (2, 3, 5, 7)), (1, (1, 1, 5, 8)), (2, (2, 4, 8)), (3, (3, 5, 8))])
@torch.inference_mode()
def test_rotary_errors(argument: int, shape: tuple[int, ...]) -> None:
    arguments = [torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 8)]
    name = ("query", "key", "cos", "sin")[argument]
    for wrong, what in ((torch.randn(shape), "shape"), (arguments[argument].half(), "dtype float16; expected float32")):
        with pytest.raises(RuntimeError, match=f"kt::rotary: {name} has {what}"):
            torch.ops.kt._rotary(*arguments[:argument], wrong, *arguments[argument + 1 :])


def test_rotary_opcheck() -> None:
    x = torch.randn(2, 5, 3, 8).transpose(1, 2)
    torch.library.opcheck(torch.ops.kt._rotary.default, (x, x[:, :1], torch.randn(1, 5, 8), torch.randn(2, 5, 8)))


def test_a_decoder_calls_it() -> None:
    transformers = pytest.importorskip("transformers", reason="it has the models")
    for architecture in ("llama", "qwen3", "gemma3_text"):
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 50}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(architecture, **sizes, **heads)
        ).eval()
        ktlinear.patch(model, "Q8_0")
        ids = torch.randint(50, (2, 7))
        with torch.inference_mode():
            expected = model(ids).logits
            ktlinear.patch(model, fuse=True)
            with Recorder() as recorder:
                assert torch.equal(model(ids).logits, expected), architecture
        assert recorder.rotaries == 2, architecture
