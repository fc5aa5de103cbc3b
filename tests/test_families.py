"""patch on the kinds of models that people have: each against itself, unpatched, with the same quantized values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ktlinear
from ktlinear.nn import Linear

transformers = pytest.importorskip("transformers", reason="needs the transformers package")

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}
Case = tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]


class SentenceEncoder(nn.Sequential):
    """As sentence-transformers has it: modules that hand on a dict of features, one of them a transformers model."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.auto_model = transformers.BertModel(transformers.BertConfig(vocab_size=50, **SMALL))

        def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return features | {"token_embeddings": self.auto_model(**features).last_hidden_state}

    class Pooling(nn.Module):
        def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            mask = features["attention_mask"][..., None]
            return features | {"sentence": (features["token_embeddings"] * mask).sum(1) / mask.sum(1)}

    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 32)

        def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return features | {"sentence": F.normalize(torch.tanh(self.linear(features["sentence"])), dim=-1)}

    def __init__(self) -> None:
        super().__init__(self.Words(), self.Pooling(), self.Dense())


class DiffusionBlock(nn.Module):
    """As diffusers has it: convolutions around attention with `to_out` in a list, a gated feed-forward, a timestep."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(4, 64, 3, padding=1)
        self.norm = nn.GroupNorm(8, 64)
        self.time_embedding = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 64))
        self.to_q = nn.Linear(64, 64, bias=False)
        self.to_k = nn.Linear(96, 64, bias=False)
        self.to_v = nn.Linear(96, 64, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(64, 64), nn.Dropout(0.1)])
        self.ff = nn.ModuleList([nn.Linear(64, 256), nn.Linear(128, 64)])
        self.conv_out = nn.Conv2d(64, 4, 3, padding=1)

    def forward(self, sample: torch.Tensor, time: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv_in(sample)) + self.time_embedding(time)[:, :, None, None]
        batch, channels, height, width = x.shape
        rows = x.permute(0, 2, 3, 1).reshape(batch, -1, channels)
        heads = (
            t.unflatten(-1, (4, 16)).transpose(1, 2) for t in (self.to_q(rows), self.to_k(context), self.to_v(context))
        )
        attended = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        for layer in self.to_out:
            attended = layer(attended)
        rows = rows + attended
        value, gate = self.ff[0](rows).chunk(2, dim=-1)
        rows = rows + self.ff[1](value * F.gelu(gate))
        return self.conv_out(rows.reshape(batch, height, width, channels).permute(0, 3, 1, 2))


def sentences() -> Case:
    mask = torch.ones(3, 7, dtype=torch.int64)
    mask[1, 4:] = 0
    features = {"input_ids": torch.randint(0, 50, (3, 7)), "attention_mask": mask}
    return SentenceEncoder(), lambda model: model(features)["sentence"]


def diffusion() -> Case:
    inputs = torch.randn(2, 4, 6, 5), torch.randn(2, 32), torch.randn(2, 7, 96)
    return DiffusionBlock(), lambda model: model(*inputs)


def t5() -> Case:
    config = transformers.T5Config(
        vocab_size=50, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"
    )
    ids, labels = torch.randint(0, 50, (2, 9)), torch.randint(0, 50, (2, 4))
    model = transformers.T5ForConditionalGeneration(config)
    return model, lambda model: model(input_ids=ids, decoder_input_ids=labels).logits


def bart() -> Case:
    config = transformers.BartConfig(
        vocab_size=50,
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        init_std=0.2,
    )
    ids = torch.randint(4, 50, (2, 9))
    model = transformers.BartForConditionalGeneration(config)
    return model, lambda model: model(input_ids=ids, decoder_input_ids=ids[:, :4]).logits


def vit() -> Case:
    config = transformers.ViTConfig(image_size=32, patch_size=16, num_labels=5, **SMALL)
    pixels = torch.randn(2, 3, 32, 32)
    return transformers.ViTForImageClassification(config), lambda model: model(pixels).logits


def clip() -> Case:
    config = transformers.CLIPConfig(
        text_config=SMALL | {"vocab_size": 50, "eos_token_id": 49},
        vision_config=SMALL | {"image_size": 32, "patch_size": 16},
        projection_dim=32,
    )
    ids, pixels = torch.randint(0, 50, (2, 6)), torch.randn(2, 3, 32, 32)
    return transformers.CLIPModel(config), lambda model: model(input_ids=ids, pixel_values=pixels).logits_per_image


CASES = [sentences, diffusion, t5, bart, vit, clip]


@pytest.mark.parametrize("make", CASES)
@torch.no_grad()
def test_a_patched_model_computes_what_its_quantized_values_give(make):
    model, run = make()
    model.eval()
    linears = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    before = run(model)
    report = ktlinear.patch(model, "Q8_0")
    left = {row.name: row.note for row in report.left}
    if make is bart:  # whose table scales what it reads, by a class of its own
        assert "weight shared with" in left.pop("lm_head")
        linears.remove("lm_head")
    assert linears and {row.name for row in report.changed} >= linears and not left
    assert all(type(model.get_submodule(name)) is Linear for name in linears)
    rounded, floats = run(model), copy.deepcopy(model)
    ktlinear.unpatch(floats)
    expected = run(floats)
    with ktlinear.exact():
        torch.testing.assert_close(run(model), expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())
    spread = (before - before.mean()).square().mean().sqrt()
    assert spread > 0 and (rounded - before).square().mean().sqrt() < 0.15 * max(spread, before.square().mean().sqrt())


@pytest.mark.parametrize("make", [t5, bart, vit, clip])
@torch.no_grad()
def test_it_is_saved_and_loaded(make, tmp_path):
    model, run = make()
    ktlinear.patch(model.eval(), "Q4_0")
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(run(again), run(model))


@torch.no_grad()
def test_the_inner_model_of_a_sentence_encoder_is_saved_and_loaded(tmp_path):
    model, run = sentences()
    ktlinear.patch(model.eval(), "Q4_0")
    expected = run(model)
    model[0].auto_model.save_pretrained(tmp_path)
    model[0].auto_model = transformers.AutoModel.from_pretrained(tmp_path)
    assert torch.equal(run(model), expected)
