"""Tiny transformers models written as GGUF files, as llama.cpp's converter does, and read by from_gguf.

The other side of each comparison is the transformers model itself, made from a config that is written out here, with
the values that the `gguf` package dequantizes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import ktlinear
from ktlinear.gguf import GGUFError

transformers = pytest.importorskip("transformers", reason="needs the transformers package")
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

Types = gguf.GGMLQuantizationType

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "mlp.experts.gate_proj": "ffn_gate_exps.weight",
    "mlp.experts.up_proj": "ffn_up_exps.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
NORMS = {"post_attention_layernorm": "ffn_norm"}
GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}

CONFIG: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
METADATA: dict[str, Any] = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 500000.0,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS_METADATA = {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 32}
WINDOW = {"attention.sliding_window": 5}

# GGUF architecture -> transformers' name, config and metadata beside the above.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "mistral": ("mistral", {"sliding_window": 5}, WINDOW),
    "qwen3moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}, EXPERTS_METADATA),
    "qwen2moe": (
        "qwen2_moe",
        {**EXPERTS, "norm_topk_prob": False, "shared_expert_intermediate_size": 64, "head_dim": 16},
        {
            **EXPERTS_METADATA,
            "expert_shared_feed_forward_length": 64,
            "attention.key_length": 16,
            "attention.value_length": 16,
        },
    ),
    "gemma2": (
        "gemma2",
        {
            "sliding_window": 5,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 7.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
        {**WINDOW, "attn_logit_softcapping": 7.0, "final_logit_softcapping": 3.0},
    ),
}
KINDS = {
    "ffn_gate_exps": Types.Q4_0,
    "ffn_up_exps": Types.Q4_1,
    "ffn_down_exps": Types.Q8_0,
    "attn_q": Types.Q4_0,
    "ffn_gate_inp": Types.F32,
    "ffn_gate_inp_shexp": Types.F32,
}


def write(
    path: Path,
    architecture: str,
    config: dict[str, Any] | None = None,
    metadata: dict[str, Any] | None = None,
    kinds: dict[str, Types] | None = None,
    leave_out: str = "",
    reshape: str = "",
) -> torch.nn.Module:
    """Write a random model of the architecture, and return it with the values that the file holds."""
    kind_of_model, more_config, more_metadata = MODELS[architecture]
    values = CONFIG | more_config | (config or {})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind_of_model, **values)).eval()
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in (METADATA | more_metadata | (metadata or {})).items():
        if value is not None:
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}
            add[type(value)](f"{architecture}.{key}", value)

    def add_tensor(name: str, tensor: torch.Tensor) -> torch.Tensor:
        for theirs, ours in (NAMES | (GEMMA_NORMS if architecture == "gemma2" else NORMS)).items():
            name = name.replace(f".{theirs}", f".{ours}") if theirs in name and "." + theirs in name else name
            name = ours + name.removeprefix(theirs) if name.startswith(f"{theirs}.") else name
        leaf = name.split(".")[-2]
        kind = Types.F32 if tensor.dim() == 1 else (KINDS | (kinds or {})).get(leaf, Types.Q8_0)
        data = tensor.float().numpy()
        permuted = architecture in ("llama", "mistral") and leaf in ("attn_q", "attn_k")
        if permuted:  # as llama.cpp's converter does
            heads = data.shape[0] // values["head_dim"]
            data = np.ascontiguousarray(data.reshape(heads, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape))
        if architecture == "gemma2" and name.endswith("norm.weight"):
            data = data + 1
        if leaf == "ffn_gate_inp_shexp":
            data = data[0]
        stored = gguf.quants.quantize(data, kind)
        if name != leave_out:
            writer.add_tensor(name, stored[..., :-1, :].copy() if name == reshape else stored, raw_dtype=kind)
        data = gguf.quants.dequantize(stored, kind)
        if permuted:
            data = data.reshape(heads, -1, 2, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        data = data - 1 if architecture == "gemma2" and name.endswith("norm.weight") else data
        return torch.from_numpy(data.copy()).view(tensor.shape)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            if name.endswith("experts.gate_up_proj"):
                halves = zip(("gate_proj", "up_proj"), parameter.chunk(2, dim=1), strict=True)
                parts = [add_tensor(name.replace("gate_up_proj", half), part.contiguous()) for half, part in halves]
                parameter.copy_(torch.cat(parts, dim=1))
            else:
                parameter.copy_(add_tensor(name, parameter))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@torch.no_grad()
def assert_same_logits(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    ids = torch.randint(50, (2, 17))
    with ktlinear.exact():
        logits = ours(ids).logits
    expected = theirs(ids).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("architecture", MODELS)
def test_logits_are_those_of_the_model_that_was_written(tmp_path, architecture, packed):
    expected = write(tmp_path / "tiny.gguf", architecture)
    model, _ = ktlinear.from_gguf(tmp_path / "tiny.gguf", packed=packed, tokenizer=False)
    assert type(model) is type(expected)
    assert_same_logits(model, expected)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            assert type(module) is ktlinear.nn.Linear, name
    if architecture.endswith("moe"):
        experts = model.model.layers[1].mlp.experts
        assert [m.weight_type.name for m in (experts.gate_proj, experts.up_proj, experts.down_proj)] == [
            *("Q4_0", "Q4_1", "Q8_0")
        ]
        assert model.generate(torch.tensor([[1, 2]]), max_new_tokens=3).shape == (1, 5)


def test_experts_of_floats(tmp_path):
    kinds = {"ffn_gate_exps": Types.F16, "ffn_up_exps": Types.BF16, "ffn_down_exps": Types.F32}
    expected = write(tmp_path / "tiny.gguf", "qwen3moe", kinds=kinds)
    assert_same_logits(ktlinear.from_gguf(tmp_path / "tiny.gguf", tokenizer=False)[0], expected)


def test_what_llama_cpp_takes_where_a_file_does_not_say(tmp_path):
    """Gemma 2's caps, and the width of experts as a share of the feed-forward's."""
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096}
    expected = write(
        tmp_path / "gemma2.gguf", "gemma2", caps, {**dict.fromkeys(WINDOW), **dict.fromkeys(list(caps)[:2])}
    )
    assert_same_logits(ktlinear.from_gguf(tmp_path / "gemma2.gguf", tokenizer=False)[0], expected)
    lengths = {"expert_feed_forward_length": None, "feed_forward_length": 64}
    expected = write(tmp_path / "moe.gguf", "qwen3moe", metadata=lengths)
    assert_same_logits(ktlinear.from_gguf(tmp_path / "moe.gguf", tokenizer=False)[0], expected)


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe", "gemma2"])
@pytest.mark.parametrize(
    "metadata",
    [
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {"rope.scaling.factor": 4.0},
        {"rope.scale_linear": 4.0},
    ],
)
def test_linear_rope_scaling(tmp_path, architecture, metadata):
    rope = {"rope_type": "linear", "rope_theta": 500000.0, "factor": 4.0}
    expected = write(tmp_path / "tiny.gguf", architecture, {"rope_parameters": rope}, metadata)
    model, _ = ktlinear.from_gguf(tmp_path / "tiny.gguf", tokenizer=False)
    assert_same_logits(model, expected)
    frequencies = 500000.0 ** -(torch.arange(0, 32, 2) / 32) / 4
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, frequencies)


def test_yarn(tmp_path):
    """Against the formula of YaRN as ggml computes it (ggml_rope_yarn_corr_dims, rope_yarn)."""
    metadata = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
        "rope.freq_base": 10000.0,
    }
    write(tmp_path / "tiny.gguf", "qwen3moe", metadata=metadata)
    model, _ = ktlinear.from_gguf(tmp_path / "tiny.gguf", tokenizer=False)
    dims, base, context = 32, 10000.0, 32

    def corrected(rotations: float) -> float:
        return dims * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(0, math.floor(corrected(32))), min(dims - 1, math.ceil(corrected(1)))
    ramp = 1 - ((torch.arange(dims // 2) - low) / max(0.001, high - low)).clamp(0, 1)
    frequencies = base ** -(torch.arange(0, dims, 2) / dims)
    expected = frequencies / 4 * (1 - ramp) + frequencies * ramp
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, expected)
    assert model.model.rotary_emb.attention_scaling == pytest.approx(1 + 0.1 * math.log(4))


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        ("qwen3moe", {"leave_out": "blk.1.ffn_up_exps.weight"}, r"up_proj.weight has no tensor 'blk.1.ffn_up_exps"),
        ("qwen3moe", {"reshape": "blk.0.ffn_gate_exps.weight"}, r"has the shape \[5, 31, 64\].* has \[5, 32, 64\]"),
        ("qwen3moe", {"metadata": {"expert_used_count": 6}}, r"expert_used_count is 6; there are 5 experts"),
        ("qwen3moe", {"metadata": {"expert_count": None}}, r"expert_count is None; accepted is a positive int"),
        ("qwen3moe", {"metadata": {"expert_count": 10**9}}, r"has the shape \[5, .* has \[1000000000, "),
        ("qwen3moe", {"metadata": {"expert_weights_scale": 2.5}}, r"expert_weights_scale is 2.5, which is not supp"),
        (
            "qwen3moe",
            {"metadata": {"expert_feed_forward_length": "wide"}},
            r"expert_feed_forward_length is 'wide'; acc",
        ),
        (
            "qwen2moe",
            {"metadata": {"expert_shared_feed_forward_length": -1.0}},
            r"shared_feed_forward_length is -1.0; a",
        ),
        ("qwen3moe", {"kinds": {"ffn_gate_inp": Types.Q8_0}}, r"'blk.0.ffn_gate_inp.weight' is Q8_0; accepted here"),
        ("gemma2", {"metadata": {"rope.scaling.type": "yarn"}}, r"rope.scaling.type is 'yarn', which is not supp"),
        ("gemma2", {"metadata": {"attn_logit_softcapping": 0.0}}, r"attn_logit_softcapping is 0.0; accepted is a pos"),
        ("mistral", {"metadata": {"attention.sliding_window": "x"}}, r"sliding_window is 'x'; accepted"),
        ("llama", {"metadata": {"attention.head_count": 7}}, r"metadata make no llama model: .*not a multiple"),
        ("gemma2", {"metadata": {"embedding_length": 2**31 - 1}}, r"metadata make no gemma2 model: .*not a multiple"),
        ("llama", {"metadata": {"expert_count": 8}}, r"expert_count is 8, which is not supported"),
    ],
)
def test_what_cannot_be_loaded_is_said(tmp_path, architecture, options, message):
    write(tmp_path / "tiny.gguf", architecture, **options)
    with pytest.raises(GGUFError, match=f"(?s){message}") as error:
        ktlinear.from_gguf(tmp_path / "tiny.gguf", tokenizer=False)
    assert str(error.value).startswith(f"{tmp_path / 'tiny.gguf'}: ")


def test_saving_what_was_read(tmp_path):
    """In transformers' way where it can be read again, and else not at all."""
    write(tmp_path / "llama.gguf", "llama")
    model, _ = ktlinear.from_gguf(tmp_path / "llama.gguf", tokenizer=False)
    model.save_pretrained(tmp_path / "llama")
    again, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "llama"), torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    floats = dict.fromkeys(
        [*KINDS, "ffn_down_exps", "attn_k", "attn_v", "attn_output", "output", "token_embd"], Types.F32
    )
    for architecture, kinds, kind in (
        ("qwen3moe", {}, "ExpertsLinear"),
        ("qwen3moe", floats, "ExpertsLinear"),
        ("gemma2", {}, "_ScaledEmbedding"),
    ):
        write(tmp_path / "tiny.gguf", architecture, kinds=kinds)
        model, _ = ktlinear.from_gguf(tmp_path / "tiny.gguf", tokenizer=False)
        with pytest.raises(ValueError, match=rf"save_pretrained: .* is a {kind}, which from_pretrained could not make"):
            model.save_pretrained(tmp_path / "saved")
        assert not list((tmp_path / "saved").iterdir())
