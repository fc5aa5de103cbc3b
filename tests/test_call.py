"""Calling a module: what nn.Module does around forward, and ktlinear.nn.Linear's short cut past it, agree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules import module as torch_module

from ktlinear.nn import Linear


@pytest.fixture(params=[("Q8_0", True), ("Q4_1", False), ("BF16", True)], ids=["packed", "rows", "float"])
def layer(request: pytest.FixtureRequest) -> Linear:
    weight_type, packed = request.param
    return Linear.from_linear(nn.Linear(96, 13), weight_type, packed=packed)


def expected(layer: Linear, x: torch.Tensor) -> torch.Tensor:
    """What the layer computes, by the ops alone."""
    return F.linear(x, layer.weight.to(x.dtype), layer.bias)


def test_without_hooks_forward_is_called_at_once(layer: Linear, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 96)
    y = layer(x)
    monkeypatch.setattr(nn.Module, "_call_impl", None)
    assert torch.equal(layer(x), y)
    layer.register_forward_hook(lambda *args: None)
    with pytest.raises(TypeError, match="NoneType"):
        layer(x)


def test_forward_hooks(layer: Linear) -> None:
    x, seen = torch.randn(3, 96), []
    plain, doubled = layer(x), layer(2 * x)

    def double(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append((len(args), list(kwargs)))
        return tuple(2 * a for a in args), {name: 2 * a for name, a in kwargs.items()}

    handles = [
        layer.register_forward_pre_hook(double, with_kwargs=True),
        layer.register_forward_hook(lambda module, args, output: output + 1),
    ]
    assert torch.equal(layer(x), doubled + 1) and torch.equal(layer(input=x), doubled + 1)
    assert seen == [(1, []), (0, ["input"])]
    handles[1].remove()
    assert torch.equal(layer(x), doubled)
    handles[0].remove()
    assert torch.equal(layer(x), plain)


@pytest.mark.parametrize("kind", ["register_full_backward_pre_hook", "register_full_backward_hook"])
def test_backward_hooks(layer: Linear, kind: str) -> None:
    x, seen = torch.randn(3, 96, requires_grad=True), []
    handle = getattr(layer, kind)(lambda module, *grads: seen.append(grads[0][0]))
    layer(x).sum().backward()
    assert torch.equal(seen.pop(), torch.ones(3, 13) if kind.endswith("pre_hook") else x.grad)
    handle.remove()
    layer(x).sum().backward()
    assert not seen


@pytest.fixture
def global_hooks() -> Iterator[list[str]]:
    seen: list[str] = []

    def note(name: str) -> Any:
        return lambda module, *args: seen.append(name)

    handles = [
        torch_module.register_module_forward_pre_hook(note("before")),
        torch_module.register_module_forward_hook(note("after")),
        torch_module.register_module_full_backward_pre_hook(note("before backward")),
        torch_module.register_module_full_backward_hook(note("after backward")),
    ]
    yield seen
    for handle in handles:
        handle.remove()


def test_global_hooks(layer: Linear, global_hooks: list[str]) -> None:
    layer(torch.randn(3, 96, requires_grad=True)).sum().backward()
    assert global_hooks == ["before", "after", "before backward", "after backward"]


@pytest.mark.parametrize("which", range(4))
def test_each_global_hook_alone(layer: Linear, which: int) -> None:
    register = [
        torch_module.register_module_forward_pre_hook,
        torch_module.register_module_forward_hook,
        torch_module.register_module_full_backward_pre_hook,
        torch_module.register_module_full_backward_hook,
    ][which]
    seen: list[nn.Module] = []
    handle = register(lambda module, *args: seen.append(module))
    try:
        layer(torch.randn(3, 96, requires_grad=True)).sum().backward()
    finally:
        handle.remove()
    assert seen == [layer]


def test_functional_call(layer: Linear) -> None:
    other = Linear.from_linear(nn.Linear(96, 13), layer.weight_type, packed=layer.packed)
    x = torch.randn(3, 96)
    before = layer(x)
    parameters = {name: parameter.detach() for name, parameter in other.named_parameters()}
    assert torch.equal(torch.func.functional_call(layer, parameters, (x,)), other(x))
    assert torch.equal(layer(x), before) and not torch.equal(before, other(x))


class Scaled(Linear):
    def forward(self, input: torch.Tensor, scale: float = 1.0) -> torch.Tensor:  # type: ignore[override]
        return scale * super().forward(input)


def test_other_forwards() -> None:
    linear, x = nn.Linear(96, 13), torch.randn(3, 96)
    layer, scaled = Linear.from_linear(linear), Scaled.from_linear(linear)
    y = layer(x)
    assert torch.equal(scaled(x, 3.0), 3 * y) and torch.equal(scaled(input=x, scale=2.0), 2 * y)
    forward = layer.forward
    layer.forward = lambda input: -forward(input)  # as accelerate does
    assert torch.equal(layer(x), -y)


def test_compile_of_the_module_itself(layer: Linear) -> None:
    torch._dynamo.reset()
    x, graphs = torch.randn(3, 96), []

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    y = layer(x)
    layer.compile(backend=backend, fullgraph=True)
    assert torch.equal(layer(x), y) and len(graphs) == 1


def test_compile_with_hooks(layer: Linear) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(layer)
    layer.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    layer.register_forward_hook(lambda module, args, output: output + 1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for m in (2, 3, 7):
        x = torch.randn(m, 96)
        torch.testing.assert_close(compiled(x), expected(layer, 2 * x) + 1, rtol=1e-4, atol=1e-4)


class LeafTracer(fx.Tracer):
    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear)


def test_symbolic_trace_sees_the_module(layer: Linear) -> None:
    model, x = nn.Sequential(layer, nn.ReLU()), torch.randn(3, 96)
    graph = LeafTracer().trace(model)
    assert [node.target for node in graph.nodes if node.op == "call_module"][0] == "0"
    assert torch.equal(fx.GraphModule(model, graph)(x), model(x))


def test_export_knows_which_module_an_op_is_of(layer: Linear) -> None:
    model, x = nn.Sequential(nn.ReLU(), layer), torch.randn(3, 96)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    nodes = [node for node in program.graph.nodes if "kt." in str(node.target)]
    assert [list(node.meta["nn_module_stack"].values())[-1][0] for node in nodes] == ["1"]
    torch.testing.assert_close(program.module()(x[:2]), model(x[:2]))


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
@torch.no_grad()
def test_jit_trace_names_scopes(layer: Linear) -> None:
    model, x = nn.Sequential(nn.ReLU(), layer), torch.randn(3, 96)
    traced = torch.jit.trace(model, x)
    assert torch.equal(traced(x), model(x))
    nodes = [node for node in traced.inlined_graph.nodes() if node.kind().startswith("kt::")]
    assert nodes and all(node.scopeName() == "__module.1" for node in nodes)
