"""Training around quantized weights, and modules in other processes."""

from __future__ import annotations

import copy
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import torch.nn.functional as F
from conftest import small_llama
from torch import nn
from torch.utils.checkpoint import checkpoint

import ktlinear
from ktlinear.nn import Linear


def values_of(weight: torch.Tensor, weight_type: str) -> torch.Tensor:
    """The weight's values in a type, by the gguf package."""
    kind = gguf.GGMLQuantizationType[weight_type]
    return torch.from_numpy(gguf.dequantize(gguf.quantize(weight.detach().numpy(), kind), kind))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(64, 10)
        self.checkpointed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


def quantized() -> tuple[Model, Model]:
    """A quantized model, and a float one of the same values."""
    model = Model()
    reference = copy.deepcopy(model)
    for module in reference.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = values_of(module.weight, "Q8_0")
    ktlinear.patch(model, "Q8_0")
    return model, reference


# Derivatives


@pytest.fixture
def exact() -> Iterator[None]:
    with ktlinear.exact():
        yield


def test_gradient_checkpointing(exact: None) -> None:
    model, reference = quantized()
    x = torch.randn(5, 64, requires_grad=True)
    x2, x3 = (x.detach().clone().requires_grad_() for _ in range(2))
    model(x).square().sum().backward()
    bias = model.blocks[0].up.bias.grad.clone()
    model.zero_grad()
    model.checkpointed = True
    model(x2).square().sum().backward()
    assert torch.equal(x.grad, x2.grad) and torch.equal(model.blocks[0].up.bias.grad, bias)
    reference(x3).square().sum().backward()
    torch.testing.assert_close(x.grad, x3.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("packed", [True, False])
def test_function_transforms(exact: None, packed: bool) -> None:
    model, reference = quantized()
    if not packed:
        model.head = Linear.from_linear(reference.head, "Q8_0", packed=False)
    x = torch.randn(5, 64)

    def loss(m: nn.Module) -> Any:
        return lambda x: m(x).square().sum()

    torch.testing.assert_close(
        torch.func.grad(loss(model))(x), torch.func.grad(loss(reference))(x), rtol=1e-3, atol=1e-3
    )
    y, backward = torch.func.vjp(model, x)
    y2, backward2 = torch.func.vjp(reference, x)
    torch.testing.assert_close(backward(y)[0], backward2(y2)[0], rtol=1e-3, atol=1e-3)


def test_parametrizations_are_refused() -> None:
    module = Linear.from_linear(nn.Linear(64, 5))
    y = module(torch.ones(64))
    with pytest.raises((TypeError, ValueError, KeyError, RuntimeError)):
        nn.utils.parametrize.register_parametrization(module, "weight", nn.Identity())
    assert torch.equal(module(torch.ones(64)), y)


# Adapters


def lora(model: nn.Module, **options: Any) -> Any:
    peft = pytest.importorskip("peft", reason="it makes the adapters")
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["up", "down"], **options))


def train(model: nn.Module, steps: int = 30) -> list[float]:
    x, target = torch.randn(32, 64), torch.randint(10, (32,))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_adapters_train(options: dict[str, Any], tmp_path: Path) -> None:
    model, _ = quantized()
    rows = model.blocks[0].up.qweight.clone()
    x = torch.randn(3, 64)
    original = copy.deepcopy(model)
    adapted = lora(model, **options)
    torch.testing.assert_close(adapted(x), original(x), rtol=1e-4, atol=1e-4)
    losses = train(adapted)
    assert losses[-1] < 0.5 * losses[0]
    assert torch.equal(adapted.base_model.model.blocks[0].up.base_layer.qweight, rows)

    adapted.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 50_000
    import peft

    again = peft.PeftModel.from_pretrained(original, tmp_path)
    torch.testing.assert_close(again.eval()(x), adapted.eval()(x))


def test_merging_says_what_to_do() -> None:
    model, _ = quantized()
    adapted = lora(model)
    train(adapted, 3)
    x = torch.randn(3, 64)
    y = adapted.eval()(x)
    with pytest.raises(TypeError, match="read-only view.*dequantize.*"):
        adapted.merge_and_unload()
    torch.testing.assert_close(adapted(x), y)


def test_adapter_over_dequantized_weights_merges() -> None:
    """What the message on merging advises: back to float, merge, quantize again."""
    model, _ = quantized()
    adapted = lora(model)
    train(adapted, 3)
    x = torch.randn(3, 64)
    with ktlinear.exact():
        y = adapted.eval()(x)
    ktlinear.unpatch(adapted)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(x), y, rtol=1e-4, atol=1e-4)
    assert len(ktlinear.patch(merged, "Q8_0").changed) == 5


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_lora_on_a_language_model(gradient_checkpointing: bool) -> None:
    pytest.importorskip("transformers", reason="it has the models")
    peft = pytest.importorskip("peft", reason="it makes the adapters")
    model = small_llama(vocab_size=50, initializer_range=0.02, bos_token_id=1, eos_token_id=2, pad_token_id=None)
    ktlinear.patch(model, "Q8_0", fuse=True)
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "up_proj"]))
    if gradient_checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    ids = torch.randint(50, (4, 12))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-2)
    losses = []
    for _ in range(25):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


# Other processes


def _multiply(module: nn.Module, x: torch.Tensor, queue: Any) -> None:
    torch.set_num_threads(1)
    with torch.no_grad():
        queue.put((module(x).tolist(), module.qweight.is_shared()))


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize("shared", [True, False])
def test_in_another_process(method: str, shared: bool) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"{sys.platform} has no {method}")
    module, x = Linear.from_linear(nn.Linear(64, 5)).requires_grad_(False), torch.randn(3, 64)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a forked child has none of its parent's threads
    try:
        if shared:
            module.share_memory()
        context = torch.multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=_multiply, args=(module, x, queue))
        process.start()
        values, is_shared = queue.get()
        process.join(60)
        assert process.exitcode == 0 and torch.equal(torch.tensor(values), module(x))
        assert is_shared == (shared or method == "spawn")  # torch sends tensors in shared memory
    finally:
        torch.set_num_threads(threads)


# Packages for C++


def test_ahead_of_time_package(tmp_path: Path) -> None:
    model = Model().eval()
    ktlinear.patch(model, "Q8_0")
    x = torch.randn(4, 64)
    with torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("m", min=2, max=64)},))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        run = torch._inductor.aoti_load_package(package)
        for m in (2, 4, 33):
            x = torch.randn(m, 64)
            torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
        torch.export.save(program, tmp_path / "model.export.pt2")
        again = torch.export.load(tmp_path / "model.export.pt2")
        torch.testing.assert_close(again.module()(x), model(x))
