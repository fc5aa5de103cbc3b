"""transformers' own packed GGUF loading on the CPU, with ktlinear's kernel, against its dequantized loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from conftest import relative_error

import ktlinear
from ktlinear.gguf import GGUFFile
from ktlinear.nn import Embedding, Experts, Linear

transformers = pytest.importorskip("transformers", reason="needs the transformers package")
from transformers import AutoModelForCausalLM, GgufConfig  # noqa: E402
from transformers.integrations.gguf import kernels as slot  # noqa: E402
from transformers.quantizers.quantizer_gguf import GgufHfQuantizer  # noqa: E402

from ktlinear.integrations import gguf_slot  # noqa: E402
from ktlinear.integrations.transformers import enable  # noqa: E402

K, VOCABULARY = 64, 50


@pytest.fixture(autouse=True)
def _enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `enable` does lasts for this test only."""
    monkeypatch.setattr(slot, "_gguf_kernel", False)
    process = GgufHfQuantizer._process_model_after_weight_loading
    monkeypatch.setattr(GgufHfQuantizer, "_process_model_after_weight_loading", process)
    enable()


def write(path: Path, architecture: str, metadata: dict[str, Any], shapes: dict[str, tuple[int, ...]], **types) -> Path:
    """A file of random tensors: norms near one, matrices of a type by the last word of their name, else Q8_0."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_token_list([f"t{i}" for i in range(VOCABULARY)])
    for key, value in metadata.items():
        add = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}[type(value)]
        add(f"{architecture}.{key}", value)
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        values = rng.standard_normal(shape, dtype=np.float32) * 0.2
        kind = gguf.GGMLQuantizationType[types.get(name.split(".")[-2], "Q8_0")]
        if len(shape) == 1 or "conv" in name and "proj" not in name:
            kind, values = gguf.GGMLQuantizationType.F32, values + 1
        if name.endswith("ssm_a"):
            values = -np.abs(values) - 0.1
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def lfm2(path: Path, **types: str) -> Path:
    metadata = {
        "context_length": 128,
        "embedding_length": K,
        "feed_forward_length": 96,
        "block_count": 2,
        "attention.head_count": 4,
        "attention.head_count_kv": [0, 2],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "shortconv.l_cache": 3,
        "rope.freq_base": 10000.0,
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCABULARY, K), "token_embd_norm.weight": (K,)}
    for i in range(2):
        block = {"attn_norm": (K,), "ffn_norm": (K,), "ffn_gate": (96, K), "ffn_up": (96, K), "ffn_down": (K, 96)}
        if i:
            block |= {"attn_q": (K, K), "attn_k": (32, K), "attn_v": (32, K), "attn_output": (K, K)}
            block |= {"attn_q_norm": (16,), "attn_k_norm": (16,)}
        else:
            block |= {"shortconv.in_proj": (3 * K, K), "shortconv.out_proj": (K, K), "shortconv.conv": (K, 3)}
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
    return write(path, "lfm2", metadata, shapes, **types)


def qwen35moe(path: Path, **types: str) -> Path:
    """A layer of linear attention with 2 key and 4 value heads of 16, and one of attention; 4 experts of 32."""
    metadata = {
        "context_length": 128,
        "embedding_length": K,
        "block_count": 2,
        "full_attention_interval": 2,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 32,
        "expert_shared_feed_forward_length": 32,
        "ssm.conv_kernel": 3,
        "ssm.state_size": 16,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 4,
        "ssm.inner_size": 64,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": 8,
        "rope.dimension_sections": [2, 1, 1, 0],
    }
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCABULARY, K),
        "output.weight": (VOCABULARY, K),
        "output_norm.weight": (K,),
    }
    for i in range(2):
        block = {"attn_norm": (K,), "post_attention_norm": (K,), "ffn_gate_inp": (4, K), "ffn_gate_inp_shexp": (1, K)}
        block |= {"ffn_gate_exps": (4, 32, K), "ffn_up_exps": (4, 32, K), "ffn_down_exps": (4, K, 32)}
        block |= {"ffn_gate_shexp": (32, K), "ffn_up_shexp": (32, K), "ffn_down_shexp": (K, 32)}
        if i:
            block |= {"attn_q": (128, K), "attn_k": (32, K), "attn_v": (32, K), "attn_output": (K, K)}
            block |= {"attn_q_norm": (16,), "attn_k_norm": (16,)}
        else:
            block |= {"attn_qkv": (128, K), "attn_gate": (64, K), "ssm_alpha": (4, K), "ssm_beta": (4, K)}
            block |= {"ssm_conv1d": (128, 3), "ssm_norm": (16,), "ssm_out": (K, 64)}
            shapes |= {f"blk.{i}.ssm_a": (4,), f"blk.{i}.ssm_dt.bias": (4,)}
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
    return write(path, "qwen35moe", metadata, shapes, ffn_gate_inp="F32", ffn_gate_inp_shexp="F32", **types)


def load(path: Path, **options: Any) -> torch.nn.Module:
    options = {"dtype": torch.float32, "attn_implementation": "eager"} | options
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **options).eval()


@pytest.mark.parametrize(
    "make, types",
    [(lfm2, {}), (lfm2, {"ffn_up": "Q4_0", "in_proj": "Q4_1"}), (qwen35moe, {}), (qwen35moe, {"ssm_out": "Q4_0"})],
)
def test_stays_packed_with_the_logits_of_the_dequantized_model(tmp_path, make, types):
    path = make(tmp_path / "tiny.gguf", **types)
    expected = load(path, quantization_config=GgufConfig(dequantize=True))
    model = load(path)
    kinds = [type(module) for module in model.modules()]
    assert (gguf_slot.PermutedInput in kinds) == (make is qwen35moe)
    assert Linear in kinds and Embedding in kinds and not any("GgufLinear" in str(kind) for kind in kinds)
    quantized = {name for name, module in model.named_modules() if isinstance(module, (Linear, Embedding))}
    for name, module in expected.named_modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)) and name + ".linear" not in quantized:
            router = name.endswith(("mlp.gate", "shared_expert_gate"))
            assert (name in quantized) != router, name
    for length in (1, 5, 12):  # transformers' own way differs above 8 rows
        ids = torch.randint(0, VOCABULARY, (1, length))
        with torch.no_grad(), ktlinear.exact():
            logits = model(ids).logits
        assert torch.allclose(logits, expected(ids).logits, rtol=1e-3, atol=1e-4)


def test_a_tied_head_holds_the_table(tmp_path):
    model = load(lfm2(tmp_path / "tiny.gguf"))
    assert model.lm_head._stored() is model.get_input_embeddings()._stored()
    model.tie_weights()
    assert model.lm_head._stored() is model.get_input_embeddings()._stored()
    model.generate(torch.tensor([[1, 2]]), max_new_tokens=3)


def test_experts_keep_the_files_bytes(tmp_path):
    path = qwen35moe(tmp_path / "tiny.gguf")
    experts, file = load(path).model.layers[0].mlp.experts, GGUFFile(path)
    assert isinstance(experts, Experts) and experts.up_proj.packed
    for name in ("gate", "up", "down"):
        rows = getattr(experts, f"{name}_proj").state_dict()["qweight"]
        assert torch.equal(rows, file.rows(f"blk.0.ffn_{name}_exps.weight"))


@pytest.mark.parametrize("weight_type", sorted(t.name for t in map(ktlinear.WeightType, gguf_slot.GEMV_TYPES)))
def test_each_function_of_the_kernel(weight_type):
    kind = int(ktlinear.WeightType[weight_type])
    rows = torch.ops.kt.quantize(torch.randn(3, 13, 256), kind, torch.ones(256))
    values = torch.ops.kt.dequantize(rows, kind, torch.float32)
    kernel, x, ids = slot._gguf_kernel, torch.randn(5, 256), torch.randint(0, 3, (5, 2), dtype=torch.int32)
    assert kernel.supports(kind) and not kernel.supports(0)
    with ktlinear.exact():
        assert relative_error(kernel.mul_mat_vec(rows[1], x, kind, 13), x, values[1]) < 1e-5
        assert kernel.mul_mat_vec(rows[1], x.bfloat16(), kind, 13).dtype == torch.bfloat16
        y = kernel.mul_mat_id(rows, x.half(), ids, kind, 13)
    expected = torch.einsum("tk,tjnk->tjn", x.half().double(), values[ids.long()].double())
    assert y.dtype == torch.float32 and torch.allclose(y.double(), expected, atol=1e-3 * expected.abs().max().item())
    assert torch.equal(kernel.dequantize(rows[2], kind, 13, 256, torch.float32), values[2])
    assert torch.equal(kernel.get_rows(rows[2], torch.tensor([4, 0]), kind, 256, torch.float32), values[2][[4, 0]])


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(transformers, "__version__", "5.25.1")
    with pytest.raises(ImportError, match=r"written for transformers 5\.24; found 5\.25\.1"):
        enable()
    monkeypatch.setattr(transformers, "__version__", "5.24.9")
    monkeypatch.delattr(slot, "GgufKernel")
    with pytest.raises(ImportError, match=r"5\.24\.9 lacks what it uses: .*GgufKernel"):
        enable()


def test_enabling_twice_swaps_once(tmp_path):
    process = GgufHfQuantizer._process_model_after_weight_loading
    enable()
    assert GgufHfQuantizer._process_model_after_weight_loading is process
