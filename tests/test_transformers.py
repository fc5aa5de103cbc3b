"""KtConfig: quantized while loading, saved and loaded again, the same bytes as patch and the command line give."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import small_llama
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import ktlinear
from ktlinear.nn import Embedding, Linear
from ktlinear.quantize import quantize_checkpoint

transformers = pytest.importorskip("transformers", reason="needs the transformers package")
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification  # noqa: E402

RULES = {"lm_head": None, "*embed_tokens": "Q8_0", "*.k_proj": "Q6_K"}


def llama(tied: bool, dtype: torch.dtype = torch.float32) -> nn.Module:
    return small_llama(hidden_size=256, num_key_value_heads=1, tie_word_embeddings=tied).to(dtype).eval()


def states_are_equal(*models: nn.Module) -> bool:
    """The same bytes under the same names, and the same logical dtypes."""

    def dtypes(model: nn.Module) -> dict:
        return {n: m.weight.dtype for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Embedding))}

    first, *others = models
    state = first.state_dict()
    return all(
        set(state) == set(other)
        and all(torch.equal(state[name], other[name]) for name in state)
        and dtypes(first) == dtypes(model)
        for model, other in ((model, model.state_dict()) for model in others)
    )


def names_and_metadata(folder: Path) -> tuple[set[str], dict]:
    names, metadata = set(), {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names |= set(opened.keys())
            metadata |= json.loads(opened.metadata().get("ktlinear.tensors", "{}"))
    return names, metadata


@pytest.mark.parametrize(
    "tied, dtype, rules",
    [
        (True, torch.float32, None),
        (True, torch.bfloat16, {"*.v_proj": "Q8_0"}),
        (False, torch.float16, None),
        (False, torch.float32, RULES),
    ],
)
def test_one_result_by_every_way(tmp_path, tied, dtype, rules):
    llama(tied, dtype).save_pretrained(tmp_path / "float")
    quantize_checkpoint(tmp_path / "float", tmp_path / "cli", "Q4_K", rules=rules)
    config = ktlinear.KtConfig(weight_type="Q4_K", rules=rules)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "float", quantization_config=config)
    patched = AutoModelForCausalLM.from_pretrained(tmp_path / "float")
    report = ktlinear.patch(patched, "Q4_K", rules=rules)
    loaded.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    from_cli = AutoModelForCausalLM.from_pretrained(tmp_path / "cli")
    by_hand = AutoModelForCausalLM.from_pretrained(tmp_path / "float")
    ktlinear.load_quantized(by_hand, tmp_path / "saved")
    models = (patched, loaded, again, from_cli, by_hand)
    assert states_are_equal(*models)

    ids = torch.arange(1, 12)[None]
    with torch.no_grad():
        expected = patched(ids).logits
        assert all(torch.equal(model(ids).logits, expected) for model in models)
    assert torch.equal(loaded.generate(ids, max_new_tokens=3), again.generate(ids, max_new_tokens=3))
    for model in models:
        assert model.dtype == dtype and not model.training
        assert isinstance(model.model.layers[0].mlp.up_proj, Linear) and model.model.layers[0].mlp.up_proj.packed
        head, table = model.lm_head, model.get_input_embeddings()
        assert (head._parameters.get("qweight") is table._parameters.get("qweight")) == tied
    # The report is that of patch, but for the order.
    changed = {row.name: row.after for row in report.changed}
    for model in (loaded, again, from_cli):
        assert {row.name: row.after for row in model.hf_quantizer.report.changed} == changed

    names, described = names_and_metadata(tmp_path / "saved")
    assert (names, described) == names_and_metadata(tmp_path / "cli")
    assert names == names_and_metadata(tmp_path / "float")[0]
    types = {name.removesuffix(".weight"): tensor["type"] for name, tensor in described.items()}
    assert types == {name: t for name, t in changed.items() if not (tied and name == "lm_head")}
    for folder in ("saved", "cli"):
        written = json.loads((tmp_path / folder / "config.json").read_text())["quantization_config"]
        assert written["quant_method"] == "ktlinear" and written["weight_type"] == "Q4_K"
        # transformers sorts what it writes, and the order of rules matters.
        assert [tuple(rule) for rule in written["rules"]] == list((rules or {}).items())


def test_shards_and_saving_twice(tmp_path):
    llama(False).save_pretrained(tmp_path / "float", max_shard_size="200KB")
    assert len(list((tmp_path / "float").glob("*.safetensors"))) > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "float", quantization_config=ktlinear.KtConfig("Q5_K"))
    loaded.save_pretrained(tmp_path / "a", max_shard_size="100KB")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 2
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    again.save_pretrained(tmp_path / "b")
    once_more = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert states_are_equal(loaded, again, once_more)


@pytest.mark.parametrize("duplicate", [True, False])
def test_a_checkpoint_with_the_tied_head_alone_or_twice(tmp_path, duplicate):
    model = llama(True)
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    table = state["model.embed_tokens.weight"]
    state["lm_head.weight"] = table.clone()
    if not duplicate:
        del state["model.embed_tokens.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=ktlinear.KtConfig("Q8_0"))
    assert loaded.lm_head.qweight is loaded.model.embed_tokens.qweight
    assert torch.equal(loaded.lm_head.state_dict()["qweight"], torch.ops.kt.quantize(table, ktlinear.WeightType.Q8_0))


@pytest.mark.parametrize("way", ["cli", "config"])
def test_another_class_than_the_one_saved(tmp_path, way):
    """A prefix goes, a head is missing or new: what transformers does for float models."""
    model = llama(False)
    model.save_pretrained(tmp_path / "float")
    if way == "cli":
        quantize_checkpoint(tmp_path / "float", tmp_path / "cli", "Q8_0")
        options, folder = {}, tmp_path / "cli"
    else:
        options, folder = {"quantization_config": ktlinear.KtConfig("Q8_0")}, tmp_path / "float"
    ktlinear.patch(model, "Q8_0")
    base = AutoModel.from_pretrained(folder, **options)
    assert states_are_equal(base, model.model)
    classifier = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3, **options)
    assert states_are_equal(classifier.model, model.model)
    assert type(classifier.score) is nn.Linear and classifier.score.weight.dtype == torch.float32
    assert 0 < classifier.score.weight.std() < 1
    # And back, with a prefix to be added.
    base.save_pretrained(tmp_path / "base")
    causal = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert states_are_equal(causal.model, model.model)


def test_an_encoder(tmp_path):
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=96
    )
    model = transformers.BertForMaskedLM(config).eval()
    model.save_pretrained(tmp_path / "float")
    quantize_checkpoint(tmp_path / "float", tmp_path / "cli", "Q4_K")
    loaded = transformers.BertForMaskedLM.from_pretrained(
        tmp_path / "float", quantization_config=ktlinear.KtConfig("Q4_K")
    )
    loaded.save_pretrained(tmp_path / "saved")
    again = transformers.BertForMaskedLM.from_pretrained(tmp_path / "saved")
    from_cli = transformers.BertForMaskedLM.from_pretrained(tmp_path / "cli")
    report = ktlinear.patch(model, "Q4_K")
    assert states_are_equal(model, loaded, again, from_cli)
    table = loaded.bert.embeddings.word_embeddings
    assert isinstance(table, Embedding) and table.qweight is loaded.cls.predictions.decoder.qweight
    assert type(loaded.bert.embeddings.position_embeddings) is nn.Embedding
    types = {row.name: row.after for row in report.changed}
    assert types["cls.predictions.decoder"] == "Q8_0" and types["bert.encoder.layer.0.attention.self.query"] == "Q5_0"
    ids = torch.arange(5)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def t5():
    """Three modules share the table, and its wo layers stay fp32 in an fp16 model."""
    config = transformers.T5Config(vocab_size=90, d_model=64, d_kv=16, d_ff=96, num_layers=1, num_heads=4)
    return transformers.T5ForConditionalGeneration(config).half(), 20


def gpt2():
    """Conv1D holds its weight transposed, and is no nn.Linear: only the tied head is quantized."""
    config = transformers.GPT2Config(
        vocab_size=90, n_embd=64, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    return transformers.GPT2LMHeadModel(config), 2


def llava():
    """The names in its files are not those in the model."""
    text = {"vocab_size": 90, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    vision = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "image_size": 32, "patch_size": 16}
    config = transformers.LlavaConfig(
        text_config={**text, "model_type": "llama", "num_attention_heads": 2},
        vision_config={**vision, "model_type": "clip_vision_model", "num_attention_heads": 2},
    )
    return transformers.LlavaForConditionalGeneration(config), 16


@pytest.mark.parametrize("make", [t5, gpt2, llava])
def test_other_architectures(tmp_path, make):
    model, count = make()
    model.save_pretrained(tmp_path / "float")
    quantize_checkpoint(tmp_path / "float", tmp_path / "cli", "Q4_K")
    load = type(model).from_pretrained
    patched = load(tmp_path / "float")
    assert len(ktlinear.patch(patched, "Q4_K").changed) == count
    loaded = load(tmp_path / "float", quantization_config=ktlinear.KtConfig("Q4_K"))
    loaded.save_pretrained(tmp_path / "saved")
    assert states_are_equal(patched, loaded, load(tmp_path / "saved"), load(tmp_path / "cli"))
    names = names_and_metadata(tmp_path / "float")[0]
    assert names == names_and_metadata(tmp_path / "saved")[0] == names_and_metadata(tmp_path / "cli")[0]


def test_names_that_transformers_changes_as_it_loads(tmp_path):
    """Mixtral's experts are merged into one tensor, and its old names are others: only the linear layers change."""
    config = transformers.MixtralConfig(
        vocab_size=60,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
    )
    model = transformers.MixtralForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "float")
    report = quantize_checkpoint(tmp_path / "float", tmp_path / "cli", "Q8_0")
    assert {row.name for row in report.quantized} == {
        "lm_head.weight",
        *(f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
    }
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "float", quantization_config=ktlinear.KtConfig("Q8_0"))
    loaded.save_pretrained(tmp_path / "saved")
    assert names_and_metadata(tmp_path / "saved")[0] == names_and_metadata(tmp_path / "float")[0]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    from_cli = AutoModelForCausalLM.from_pretrained(tmp_path / "cli")
    ktlinear.patch(model, "Q8_0")
    assert states_are_equal(model, loaded, again, from_cli)


def test_gradients_and_dequantize(tmp_path):
    llama(True).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=ktlinear.KtConfig("Q8_0"))
    ids = torch.arange(1, 9)[None]
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=embeddings, labels=ids).loss.backward()
    assert embeddings.grad.abs().sum() > 0
    with ktlinear.exact(), torch.no_grad():
        expected = model(ids).logits
        floats = model.dequantize()
        assert type(floats.lm_head) is nn.Linear and not hasattr(floats.config, "quantization_config")
        torch.testing.assert_close(floats(ids).logits, expected, rtol=1e-3, atol=1e-3)


def test_an_unpatched_model_is_saved_as_floats(tmp_path):
    llama(True).save_pretrained(tmp_path / "float")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "float", quantization_config=ktlinear.KtConfig("Q8_0"))
    ktlinear.unpatch(model)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert type(again.lm_head) is nn.Linear and states_are_equal(model, again)


def test_weights_that_no_type_holds(tmp_path):
    model = llama(False)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 3] = float("inf")
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="conversion"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=ktlinear.KtConfig("Q8_0"))
    rules = {"model.layers.1.mlp.up_proj": None}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=ktlinear.KtConfig("Q8_0", rules))
    assert type(loaded.model.layers[1].mlp.up_proj) is nn.Linear


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (("Q9_9",), ValueError, "weight_type is 'Q9_9'"),
        (("BF16",), ValueError, "weight_type: BF16 is no type to quantize to"),
        (("Q8_0", {"a": "Q9_9"}), ValueError, "Q9_9"),
        (("Q8_0", {"a": "F16"}), ValueError, r"rules\['a'\]: F16 is no type"),
        (("Q8_0", "a=Q8_0"), TypeError, "rules.*str"),
    ],
)
def test_configs_that_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        ktlinear.KtConfig(*arguments)


def test_loading_that_is_refused(tmp_path):
    llama(False).save_pretrained(tmp_path / "float")

    def refuses(message, error=ValueError, folder="float", weight_type="Q8_0", rules=None, **options):
        if weight_type is not None:
            options["quantization_config"] = ktlinear.KtConfig(weight_type, rules)
        with pytest.raises(error, match=message):
            AutoModelForCausalLM.from_pretrained(tmp_path / folder, **options)

    refuses("rules: 'heads' matches no", rules={"heads": None})
    refuses("device_map.*CPU", device_map="meta")
    refuses("dtype.*float64", dtype=torch.float64)
    quantize_checkpoint(tmp_path / "float", tmp_path / "q", "Q8_0")
    state = load_file(tmp_path / "q" / "model.safetensors")
    with safe_open(tmp_path / "q" / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    save_file(state, tmp_path / "q" / "model.safetensors", metadata={**metadata, "ktlinear.version": "9"})
    refuses("ktlinear.version is '9'", folder="q", weight_type=None)
    save_file(state, tmp_path / "q" / "model.safetensors", metadata={"format": "pt"})
    refuses("describe no quantized tensors", folder="q", weight_type=None)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**state, name: state[name][1:].clone()}, tmp_path / "q" / "model.safetensors", metadata=metadata)
    refuses("up_proj.weight has 95 rows", folder="q", weight_type=None)


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


def test_transformers_is_imported_only_where_it_is_wanted():
    done = python("import ktlinear, sys; ktlinear.load_quantized; print('transformers' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize("version", ["5.23.1", "6.0.0"])
def test_another_version_of_transformers(version):
    done = python(f"import transformers; transformers.__version__ = {version!r}; import ktlinear; ktlinear.KtConfig")
    assert f"needs transformers from 5.24 on and below 6; found {version}" in done.stderr


def test_a_type_that_needs_an_importance(tmp_path):
    llama(tied=False).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="IQ2_XXS, chosen for .*importance matrix.*--imatrix"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=ktlinear.KtConfig("IQ2_XXS"))


def moe(**options):
    config = transformers.Qwen3MoeConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        initializer_range=0.2,
        **options,
    )
    return transformers.Qwen3MoeForCausalLM(config).eval()


@pytest.mark.parametrize(
    "make, loader",
    [
        (lambda: llama(True), AutoModelForCausalLM),
        (lambda: llama(False), AutoModelForCausalLM),
        (moe, AutoModelForCausalLM),
    ],
)
def test_a_patched_model_is_saved_so_that_it_can_be_loaded(tmp_path, make, loader):
    """Also its inner model alone, after an unpatching, and patched with two types in two steps."""
    model, ids = make(), torch.arange(1, 12)[None]
    ktlinear.patch(model, "Q8_0", filter_fn=lambda name, module: "down" in name)
    ktlinear.patch(model, "Q4_0")
    model.save_pretrained(tmp_path / "patched")
    again = loader.from_pretrained(tmp_path / "patched")
    assert states_are_equal(model, again)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
        model.model.save_pretrained(tmp_path / "inner")
        inner = AutoModel.from_pretrained(tmp_path / "inner")
        assert torch.equal(inner(ids).last_hidden_state, model.model(ids).last_hidden_state)
    assert "quantization_config" in json.loads((tmp_path / "patched" / "config.json").read_text())
    model.half().float()  # which transformers refuses for models that it takes for quantized by itself
    ktlinear.unpatch(model)
    model.save_pretrained(tmp_path / "unpatched")
    assert "quantization_config" not in json.loads((tmp_path / "unpatched" / "config.json").read_text())
    plain = loader.from_pretrained(tmp_path / "unpatched")
    assert all(torch.equal(plain.state_dict()[name], value) for name, value in model.state_dict().items())


def test_float_types_are_saved_as_ever(tmp_path):
    model = llama(False)
    ktlinear.patch(model, "F16")
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert not isinstance(AutoModelForCausalLM.from_pretrained(tmp_path).lm_head, Linear)


def test_merged_experts_stay_floats_and_the_report_says_so(tmp_path):
    model = moe()
    report = ktlinear.patch(model, "Q8_0")
    left = {row.name: row for row in report.left}
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert len(left) == 4 and "merged experts, which stay floats" in left[name].note
    assert left[name].bytes_after == 4 * 64 * 64 * 4 and name in str(report)
    moe().save_pretrained(tmp_path)
    config = ktlinear.KtConfig("Q8_0")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert {row.name for row in loaded.hf_quantizer.report.left} == set(left)
