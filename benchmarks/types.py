"""Each weight type's size, speed in a whole model, and what it costs in perplexity.

The file at hand is SmolLM2-135M in Q4_1. Its dequantized weights lie on a grid that some types have as well (Q5_1 with
an importance loses nothing) and others just miss. So noise as large as what Q4_1 has rounded away is added to them, and
the baseline is that fp32 model. Its K, 576, is no multiple of 256: `patch` would take other types for most of its
matrices, and the table would be one of those. So

- quality: each matrix of the layers is quantized as if it were one row after another without a break, in blocks of 256
  that may span two rows, and computed in fp32. The token table, which is also the head, stays.
- speed: of a model of the same depth and kind whose sizes are rounded up to multiples of 256, with random weights, with
  fused layers and fast norms; the table is Q8_0 for all types.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import ktlinear
from ktlinear import WeightType, imatrix
from ktlinear.bench.timing import in_turn, spread
from ktlinear.nn import FLOAT_DTYPES, Linear
from ktlinear.ops import needs_importance, panel_bytes, row_bytes
from ktlinear.patch import fuse_layers, swap_norms

from .models import PROMPT, demo

SUPER_BLOCK = 256
CALIBRATION = 2048
"""Tokens of the project's own README and CONTRIBUTING that the importances come from."""

# These ignore an importance.
_INDIFFERENT = {*FLOAT_DTYPES, WeightType.Q8_0, WeightType.TQ1_0, WeightType.TQ2_0}


def load() -> tuple[Any, torch.Tensor, list[torch.Tensor]]:
    """The fp32 model, the text's tokens [1, length], and batches of another text."""
    file, root = demo.model_file(), Path(__file__).resolve().parent.parent
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    other = (root / "README.md").read_text() + (root / "CONTRIBUTING.md").read_text()
    tokens = tokenizer(other, return_tensors="pt").input_ids[:, :CALIBRATION]
    model = demo.load_transformers(file)
    leave_grid(model)
    return model, tokenizer(demo.TEXT, return_tensors="pt").input_ids, list(tokens.split(512, 1))


@torch.no_grad()
def leave_grid(model: nn.Module) -> None:
    """Add to the layers' weights noise, uniform over a step of Q4_1: (maximum - minimum) / 15 of 32 in a row."""
    generator = torch.Generator().manual_seed(0)
    for layer in layers_of(model).values():
        blocks = layer.weight.view(-1, 32)
        step = (blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)) / 15
        blocks += (torch.rand(blocks.shape, generator=generator) - 0.5) * step


def layers_of(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers that are quantized: all but the head."""
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in n}


def quality(
    model: nn.Module, ids: torch.Tensor, batches: list[torch.Tensor], types: list[WeightType]
) -> dict[WeightType, dict[str, Any]]:
    """Perplexity of the text, and the mean divergence KL(baseline || quantized) of its predictions, for each type.

    Keys of a type: ``plain`` and ``importance``, each ``{"perplexity", "divergence"}``, or None if there is no such.
    """
    layers = layers_of(model)
    originals = {name: layer.weight.clone() for name, layer in layers.items()}
    importances = imatrix.collect(model, batches)
    baseline = log_probabilities(model, ids)

    def measure(t: WeightType, weighted: bool) -> dict[str, float]:
        for name, layer in layers.items():
            importance = importances[f"{name}.weight"] if weighted else None
            layer.weight.copy_(rounded(originals[name], t, importance))
        found = log_probabilities(model, ids)
        return {
            "perplexity": perplexity(found, ids),
            "divergence": (baseline.exp() * (baseline - found)).sum(-1).mean().item(),
        }

    results: dict[WeightType, dict[str, Any]] = {}
    for t in tqdm(types, unit="type", desc="quality", disable=None):
        results[t] = {
            "plain": None if needs_importance(t) else measure(t, False),
            "importance": None if t in _INDIFFERENT else measure(t, True),
        }
    for name, layer in layers.items():
        layer.weight.copy_(originals[name])
    return results


def rounded(weight: torch.Tensor, t: WeightType, importance: torch.Tensor | None) -> torch.Tensor:
    """The weight's values in a type, in blocks that run on from row to row."""
    blocks = weight.reshape(-1, SUPER_BLOCK)
    if importance is not None:
        importance = importance.expand(weight.shape).reshape(blocks.shape)
    rows = torch.ops.kt.quantize(blocks, int(t), importance)
    return torch.ops.kt.dequantize(rows, int(t), torch.float32).view(weight.shape)


def log_probabilities(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """[length, vocabulary], of the token after each."""
    return model(ids).logits[0].float().log_softmax(-1)


def perplexity(found: torch.Tensor, ids: torch.Tensor) -> float:
    """exp of the mean negative log-likelihood of all tokens but the first."""
    return found[:-1].gather(1, ids[0, 1:, None]).mean().neg().exp().item()


def speed_model(config: Any) -> nn.Module:
    """A model of the same kind, its widths rounded up to super-blocks; its layers are still to be installed."""
    config = copy.deepcopy(config)
    config.hidden_size, config.intermediate_size = (
        -(-size // SUPER_BLOCK) * SUPER_BLOCK for size in (config.hidden_size, config.intermediate_size)
    )
    config.num_attention_heads = config.hidden_size // config.head_dim
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ktlinear.patch(model, "Q8_0", rules={"*.layers.*": None})
    swap_norms(model)
    return model


def layers_in(model: nn.Module, t: WeightType) -> dict[str, Linear]:
    """Layers of a type for `model`. All blocks get copies of the first, since quantizing is slow."""
    rows: dict[str, torch.Tensor] = {}
    made = {}
    for name, layer in layers_of(model).items():
        kind = name.rpartition(".")[2]
        if kind not in rows:
            importance = torch.ones(layer.in_features) if needs_importance(t) else None
            rows[kind] = torch.ops.kt.quantize(layer.weight.detach(), int(t), importance)
        own = rows[kind].clone() if t in FLOAT_DTYPES else rows[kind]
        made[name] = Linear.from_rows(own, layer.in_features, t)
    return made


def speed(config: Any, types: list[WeightType], repeats: int) -> dict[WeightType, dict[str, Any]]:
    """Tokens/s of prefill and decode with each type, the types taking turns, and the MB of their layers."""
    model = speed_model(config)
    made = {t: layers_in(model, t) for t in tqdm(types, unit="type", desc="making models", disable=None)}
    ids = torch.randint(config.vocab_size, (1, demo.PREFILL), generator=torch.Generator().manual_seed(0))
    decodes: dict[str, list[float]] = {t.name: [] for t in types}

    def measure(t: WeightType) -> float:
        for name, layer in made[t].items():
            model.set_submodule(name, layer)
        fuse_layers(model)
        demo.prefill(model, ids[:, :PROMPT])  # a warm-up
        prefill = demo.PREFILL / demo.seconds(lambda: demo.prefill(model, ids))
        decodes[t.name].append(demo.decode(model, ids[:, :PROMPT])[0])
        return prefill

    prefills = in_turn({t.name: lambda t=t: measure(t) for t in types}, repeats, budget=180, least=1)
    return {
        t: {
            "prefill": spread(prefills[t.name])._asdict(),
            "decode": spread(decodes[t.name])._asdict(),
            "megabytes": sum(layer._stored().nbytes for layer in made[t].values()) / 1e6,
        }
        for t in types
    }


@torch.inference_mode()
def run(types: list[WeightType], quick: bool, notes: list[str]) -> dict[str, Any]:
    """The baseline's perplexity and a cell for each type; `notes` gets what the numbers are of."""
    model, ids, batches = load()
    fast = speed(model.config, types, 1 if quick else 3)
    good = quality(model, ids, batches, types)
    notes.append(
        f"Perplexity and KL divergence from the fp32 model: {ids.shape[1]} tokens of examples/lighthouse.txt, "
        f"importances from {sum(batch.shape[1] for batch in batches)} tokens of another text."
    )
    cells = []
    for t in types:
        packed = t not in FLOAT_DTYPES
        cells.append(
            {
                "type": t.name,
                "bits": 8 * row_bytes(t, SUPER_BLOCK) / SUPER_BLOCK,
                "bits_in_memory": 8
                * (panel_bytes(t, SUPER_BLOCK) / 16 if packed else row_bytes(t, SUPER_BLOCK))
                / SUPER_BLOCK,
                **fast[t],
                **good[t],
            }
        )
    return {"baseline": perplexity(log_probabilities(model, ids), ids), "cells": cells}
