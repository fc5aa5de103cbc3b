"""A GGUF file as a transformers model whose matrices stay quantized."""

from __future__ import annotations

import os
from typing import Any, cast

import torch

from . import _memory
from .gguf import GGUFError, GGUFFile
from .nn import FLOAT_DTYPES, FLOAT_TYPES, Embedding, Experts, ExpertsLinear, Linear
from .ops import WeightType
from .patch import fuse_layers, set_quantizers, swap_norms

try:
    import numpy as np
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    from huggingface_hub.errors import StrictDataclassError  # of a config's own checks
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

    # Private to transformers: which metadata make a config, and how llama.cpp has reordered rows.
    from transformers.integrations import GGUF_CONFIG_MAPPING
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor
except ImportError as error:
    raise ImportError(
        f"ktlinear.from_gguf needs the packages gguf and transformers, written for version 5.24 of the latter: {error}"
    ) from error

__all__ = ["from_gguf"]

# GGUF architectures whose tensors differ from transformers' in names and in the order of rows, but not in values.
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "gemma2", "gemma3", "phi3")
# transformers' name of the model, where it is another.
_MODEL_TYPES = {"gemma3": "gemma3_text", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
# Which architecture's names and order of rows a file has, where it is another's. llama.cpp has no "mistral".
_TENSORS_LIKE = {"mistral": "llama"}

# Metadata that are read apart from those that transformers maps, and others with the value that changes nothing.
_KEYS_READ = {
    *("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.scaling.type", "vocab_size"),
    *("rope.scaling.factor", "rope.scaling.original_context_length", "rope.scale_linear", "rope.scaling.finetuned"),
    "tensor_data_layout",
}
_KEYS_READ_BY_ARCHITECTURE = {
    "gemma2": {"attn_logit_softcapping", "final_logit_softcapping"},
    "mistral": {"attention.sliding_window"},
    "phi3": {"attention.sliding_window"},
    "qwen2moe": {"expert_feed_forward_length", "expert_shared_feed_forward_length"},
    "qwen3moe": {"expert_feed_forward_length"},
}
_HARMLESS: dict[str, Any] = {
    "attention.sliding_window": 0,
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
    "use_parallel_residual": False,
    "expert_group_count": 0,
    "leading_dense_block_count": 0,
}

# Factors on the rotary frequencies, one per pair of dimensions (Llama 3.1 and later): inv_freq / factor.
_ROPE_FACTORS = "rope_freqs.weight"


def from_gguf(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    packed: bool = True,
    tokenizer: bool = True,
    fuse: bool = False,
    fast_norms: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Loads a GGUF file into a transformers causal language model without dequantizing any matrix.

    Every ``nn.Linear`` becomes a :class:`ktlinear.nn.Linear` and the token table a :class:`ktlinear.nn.Embedding`, both
    over the file's own bytes, experts a :class:`ktlinear.nn.Experts`; a tied output head shares the table's. Norms and
    biases become ordinary `dtype` parameters.

    Args:
        path: the file. Its architecture must be one of ``llama`` (Mistral and SmolLM among them), ``qwen2``, ``qwen3``,
            ``qwen2moe``, ``qwen3moe``, ``gemma2``, ``gemma3`` (text), ``phi3``, or ``mistral``.
        dtype: type of the activations, norms and biases: torch.float32, float16 or bfloat16.
        packed: copy the quantized matrices into panels of 16 rows, which compute faster; the size is the same. If not,
            they stay where they are, in the mapped file, which must then not change.
        tokenizer: load the file's tokenizer too. This takes transformers some seconds.
        fuse: compute q/k/v and gate/up projections together, and rotary embeddings in one call, as `ktlinear.patch`
            does with ``fuse=True``.
        fast_norms: let the norms be one operator call each, as `ktlinear.patch` does with ``fast_norms=True``.

    Returns:
        The model, in eval mode, and its tokenizer (None if not asked for).

    Raises:
        GGUFError: the file is damaged, its architecture, one of its weight types or something in its metadata is not
            supported, or its tensors do not fit the model. Nothing has been loaded then.
        ImportError: transformers or gguf is missing, or transformers is of another version than this was written for.
    """
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"dtype is {dtype}; accepted are torch.float32, torch.float16 and torch.bfloat16")
    file = GGUFFile(path)
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise GGUFError(
            f"{file.path}: general.architecture is {architecture!r}; supported are {', '.join(ARCHITECTURES)}"
        )
    model = _skeleton(file, architecture, dtype)
    _Loader(file, architecture, model, dtype, packed).load()
    set_quantizers(model)
    if fuse:
        fuse_layers(model)
    if fast_norms:
        swap_norms(model)
    loaded_tokenizer = None
    if tokenizer:
        directory, name = os.path.split(os.path.abspath(file.path))
        loaded_tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=name)
    return model.eval(), loaded_tokenizer


def _skeleton(file: GGUFFile, architecture: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model that the file's metadata describe, on the meta device."""
    values = _config_values(file, architecture)
    try:
        config = AutoConfig.for_model(_MODEL_TYPES.get(architecture, architecture), **values)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (ArithmeticError, RuntimeError, StrictDataclassError, TypeError, ValueError) as error:
        raise GGUFError(f"{file.path}: its metadata make no {architecture} model: {error}") from error


def _config_values(file: GGUFFile, architecture: str) -> dict[str, Any]:
    """Arguments for the transformers config of the architecture."""
    metadata = {
        key.removeprefix(f"{architecture}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{architecture}.")
    }
    mapped = _MODEL_TYPES.get(architecture, architecture).removesuffix("_text")
    names = cast(dict[str, str | None], GGUF_CONFIG_MAPPING[mapped])
    known = _KEYS_READ | _KEYS_READ_BY_ARCHITECTURE.get(architecture, set()) | names.keys()
    for key, value in metadata.items():
        if key not in known and not (key in _HARMLESS and value == _HARMLESS[key]):
            raise GGUFError(f"{file.path}: {architecture}.{key} is {value!r}, which is not supported")
    # What llama.cpp takes where a file does not say.
    metadata.setdefault("attention.head_count_kv", metadata.get("attention.head_count"))
    metadata.setdefault("rope.freq_base", 10000.0)

    if architecture == "gemma2":
        metadata.setdefault("attention.sliding_window", 4096)
    if architecture.endswith("moe"):
        metadata.setdefault("feed_forward_length", metadata.get("expert_feed_forward_length"))

    def positive(key: str, kind: type[float]) -> Any:
        value = metadata.get(key)
        if type(value) is not kind or not value > 0 or value == float("inf"):
            raise GGUFError(f"{file.path}: {architecture}.{key} is {value!r}; accepted is a positive {kind.__name__}")
        return value

    values: dict[str, Any] = {}
    for key, name in names.items():
        if name in (None, "head_dim", "vocab_size"):
            continue
        values[name] = positive(key, float if name in ("rope_theta", "rms_norm_eps") else int)
    if values["num_hidden_layers"] > len(file.tensors):
        raise GGUFError(
            f"{file.path}: {architecture}.block_count is {values['num_hidden_layers']}, but the file has only "
            f"{len(file.tensors)} tensors"
        )
    head_dim = metadata.get("attention.key_length", values["hidden_size"] // values["num_attention_heads"])
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        if metadata.get(key, head_dim) != head_dim or type(head_dim) is not int:
            raise GGUFError(
                f"{file.path}: {architecture}.{key} is {metadata.get(key)!r}; accepted is one size for the keys, the "
                f"values and the rotary embeddings of a head, here {head_dim!r}"
            )
    values["head_dim"] = head_dim
    theta = values.pop("rope_theta")
    rope = {"rope_theta": theta, **_rope_scaling(file, architecture, metadata, positive)}
    values["rope_parameters"] = rope
    if architecture == "gemma3":
        _add_gemma3_values(values)
    elif architecture == "gemma2":
        _add_gemma2_values(values)
        for name, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
            values[name] = positive(name, float) if name in metadata else default
    elif architecture.endswith("moe"):
        inner = values["intermediate_size"]
        metadata.setdefault("expert_feed_forward_length", inner // values["num_experts_per_tok"])
        values["moe_intermediate_size"] = positive("expert_feed_forward_length", int)
        # llama.cpp has in its code whether the scores of the chosen are made to sum to one.
        values["norm_topk_prob"] = architecture == "qwen3moe"
        if architecture == "qwen2moe":
            metadata.setdefault("expert_shared_feed_forward_length", inner)
            values["shared_expert_intermediate_size"] = positive("expert_shared_feed_forward_length", int)
        if values["num_experts_per_tok"] > values["num_experts"]:
            raise GGUFError(
                f"{file.path}: {architecture}.expert_used_count is {values['num_experts_per_tok']}; there are "
                f"{values['num_experts']} experts"
            )
    elif architecture in ("phi3", "mistral"):
        values["sliding_window"] = (
            positive("attention.sliding_window", int) if metadata.get("attention.sliding_window") else None
        )
    if "token_embd.weight" in file.tensors:
        values["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    values["tie_word_embeddings"] = "output.weight" not in file.tensors

    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        values[f"{name}_token_id"] = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    # Generation ends at the end of a chat's turn too.
    ends = {values["eos_token_id"], file.metadata.get("tokenizer.ggml.eot_token_id")} - {None}
    if len(ends) > 1:
        values["eos_token_id"] = sorted(ends)
    return values


def _rope_scaling(file: GGUFFile, architecture: str, metadata: dict[str, Any], positive: Any) -> dict[str, Any]:
    """How the rotary embeddings are stretched, as transformers has it: not, linearly, or by YaRN.

    llama.cpp takes a factor without a type for a linear one. Its constants of YaRN are transformers' defaults.
    """
    kind = metadata.get("rope.scaling.type", "linear")
    key = "rope.scale_linear" if "rope.scale_linear" in metadata else "rope.scaling.factor"
    factor = positive(key, float) if key in metadata else 1.0
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn" or architecture in ("gemma2", "gemma3"):
        raise GGUFError(f"{file.path}: {architecture}.rope.scaling.type is {kind!r}, which is not supported")
    original = positive("rope.scaling.original_context_length", int)
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}


def _add_gemma2_values(values: dict[str, Any]) -> None:
    """What llama.cpp has in its code: every other layer has a window, from the first on; queries are scaled by a head's
    size but in the 27B model."""
    layers = values["num_hidden_layers"]
    values["layer_types"] = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    values["query_pre_attn_scalar"] = (
        values["hidden_size"] // values["num_attention_heads"] if layers == 46 else values["head_dim"]
    )


def _add_gemma3_values(values: dict[str, Any]) -> None:
    """What llama.cpp has in its code and not in the file: one layer in six sees everything, and the others a window,
    with rotary embeddings of their own; queries are scaled by a head's size but in the 27B model."""
    layers = values["num_hidden_layers"]
    kinds = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(layers)]
    values["layer_types"] = kinds
    values["rope_parameters"] = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": values["rope_parameters"],
    }
    is_27b = layers == 62
    values["query_pre_attn_scalar"] = (
        values["hidden_size"] // values["num_attention_heads"] if is_27b else values["head_dim"]
    )


class _ScaledEmbedding(Embedding):
    """A token table whose rows are multiplied by a constant, as Gemma's are."""

    embed_scale: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = super().forward(input)
        return rows * self.embed_scale.to(rows.dtype)


class _Loader:
    """Fills a model on the meta device from a file."""

    def __init__(
        self, file: GGUFFile, architecture: str, model: PreTrainedModel, dtype: torch.dtype, packed: bool
    ) -> None:
        self.file = file
        self.architecture = architecture
        self.model = model
        self.dtype = dtype
        self.packed = packed
        tensors_like = _TENSORS_LIKE.get(architecture, architecture)
        # Those of mixtures merge experts, which is done here otherwise.
        processor = TensorProcessor if self._is_mixture() else TENSOR_PROCESSORS.get(tensors_like, TensorProcessor)
        self.processor = processor(config=model.config.to_dict())
        arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == tensors_like)
        name_map = get_tensor_name_map(arch, model.config.num_hidden_layers)
        # Parameter's name -> tensor's name. A tied head is no parameter of its own.
        self.names = {name: name_map.get_name(name, try_suffixes=(".weight", ".bias")) or "" for name in self._shapes()}
        self._check()

    def _is_mixture(self) -> bool:
        return self.architecture.endswith("moe")

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters of the model by name; gate and up of merged experts apart, as files have them."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, parameter in self.model.named_parameters():
            if name.endswith("experts.gate_up_proj"):
                experts, rows, k = parameter.shape
                for half in ("gate_proj", "up_proj"):
                    shapes[name.replace("gate_up_proj", f"{half}.weight")] = (experts, rows // 2, k)
            elif name.endswith("experts.down_proj"):
                shapes[f"{name}.weight"] = tuple(parameter.shape)
            else:
                shapes[name] = tuple(parameter.shape)
        return shapes

    def _check(self) -> None:
        """Every parameter has its tensor of the same shape, and every tensor of the file is used."""
        path, tensors = self.file.path, self.file.tensors
        for name, shape in self._shapes().items():
            tensor = self.names[name]
            if tensor not in tensors:
                raise GGUFError(f"{path}: the model's {name} has no tensor {tensor!r} in the file")
            given = tensors[tensor].shape
            if given != shape and (1, *given) != shape:  # a matrix of one row may be a vector
                raise GGUFError(
                    f"{path}: tensor {tensor!r} has the shape {list(given)}, but the model's {name} has {list(shape)}"
                )
        if _ROPE_FACTORS in tensors and tensors[_ROPE_FACTORS].shape != (self.model.config.head_dim // 2,):
            raise GGUFError(
                f"{path}: tensor {_ROPE_FACTORS!r} has the shape {list(tensors[_ROPE_FACTORS].shape)}; accepted is "
                f"[{self.model.config.head_dim // 2}], half of a head's dimensions"
            )
        unused = sorted(tensors.keys() - set(self.names.values()) - {_ROPE_FACTORS})
        if unused:
            listed = ", ".join(unused[:5]) + (", ..." if len(unused) > 5 else "")
            raise GGUFError(f"{path}: {len(unused)} tensors have no place in the model: {listed}")

    def load(self) -> None:
        model, modules = self.model, dict(self.model.named_modules())
        names = {module: name for name, module in modules.items()}
        table, head = names[model.get_input_embeddings()], names[model.get_output_embeddings()]
        tied = f"{head}.weight" not in self.names
        for name, module in modules.items():
            if tied and name == head:
                continue
            if self._is_mixture() and ".experts." in name:
                continue  # the activation of experts that have been replaced
            if type(module) is torch.nn.Linear:
                model.set_submodule(name, self._linear(name, module))
            elif name.endswith(".experts") and f"{name}.gate_proj.weight" in self.names:
                model.set_submodule(name, self._experts(name, module))
            elif isinstance(module, torch.nn.Embedding):
                model.set_submodule(name, self._embedding(name, module))
            else:
                self._fill(name, module)
        if tied:
            self._tie(table, head)
        left = [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
        if left:
            raise GGUFError(f"{self.file.path}: no values for the model's {', '.join(left)}")

    def _linear(self, name: str, module: torch.nn.Linear) -> Linear:
        bias = None if module.bias is None else self._floats(f"{name}.bias")
        rows, weight_type = self._rows(f"{name}.weight")
        linear = Linear.from_rows(rows, module.in_features, weight_type, bias, self.dtype, self.packed)
        self._release(f"{name}.weight")
        return linear

    def _experts(self, name: str, module: Any) -> Experts:
        def linear(weight: str) -> ExpertsLinear:
            rows, weight_type = self._rows(weight)
            k = self.file.tensors[self.names[weight]].shape[-1]
            layer = ExpertsLinear.from_rows(rows, k, weight_type, self.dtype, self.packed)
            self._release(weight)
            return layer

        gate, up, down = (linear(f"{name}.{key}.weight") for key in ("gate_proj", "up_proj", "down_proj"))
        return Experts(gate, up, down, module.act_fn)

    def _embedding(self, name: str, module: torch.nn.Embedding) -> torch.nn.Embedding:
        """The token table; a float one becomes an ordinary module, in the model's type."""
        rows, weight_type = self._rows(f"{name}.weight")
        scale = getattr(module, "scalar_embed_scale", None)
        if weight_type in FLOAT_DTYPES:
            weight = self._floats(f"{name}.weight")
            n, k = weight.shape
            if scale is None:
                return torch.nn.Embedding(n, k, module.padding_idx, _weight=weight)
            table = type(module)(n, k, module.padding_idx, scale)
            table.weight = torch.nn.Parameter(weight)
            return table
        cls = Embedding if scale is None else _ScaledEmbedding
        embedding = cls.from_rows(rows, module.embedding_dim, weight_type, module.padding_idx, self.dtype, self.packed)
        if scale is not None:
            embedding.register_buffer("embed_scale", torch.tensor(scale), persistent=False)
        self._release(f"{name}.weight")
        return embedding

    def _tie(self, table: str, head: str) -> None:
        """Makes the output head of the token table's own parameter."""
        embedding = self.model.get_submodule(table)
        if isinstance(embedding, Embedding):
            n, k = embedding.num_embeddings, embedding.embedding_dim
            tied = Linear(k, n, False, embedding.weight_type, self.packed, device="meta", dtype=self.dtype)
            tied.tie(embedding)
            # save_pretrained looks here for which parameter belongs to which.
            self.model._tied_weights_keys = {f"{head}.qweight": f"{table}.qweight"}
            self.model.all_tied_weights_keys = dict(self.model._tied_weights_keys)
        else:
            linear = cast(torch.nn.Linear, self.model.get_submodule(head))
            linear.weight = cast(torch.nn.Embedding, embedding).weight
            tied = Linear.from_linear(linear, FLOAT_TYPES[self.dtype])
        self.model.set_submodule(head, tied)

    def _fill(self, name: str, module: torch.nn.Module) -> None:
        """The parameters and buffers of any other module, a norm or the rotary frequencies."""
        prefix = f"{name}." if name else ""
        for key, _ in list(module.named_parameters(recurse=False)):
            setattr(module, key, torch.nn.Parameter(self._floats(prefix + key)))
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            # Rotary frequencies are in no file and no state dict: their module computes them where it is made.
            module = type(module)(self.model.config)
            self.model.set_submodule(name, module)
            if _ROPE_FACTORS in self.file.tensors:
                factors = self.file.tensor(_ROPE_FACTORS).float()
                for buffer in module.buffers(recurse=False):
                    buffer.div_(factors)

    def _rows(self, name: str) -> tuple[torch.Tensor, WeightType]:
        """A matrix's bytes, uint8 [N, row_bytes], and its type: a view of the file unless its rows are reordered."""
        tensor = self.names[name]
        weight_type = self.file.tensors[tensor].weight_type
        rows = self._ordered(tensor, self.file.rows(tensor))
        rows = rows if rows.dim() > 1 else rows[None]
        # A quantized matrix is copied where it is packed; a float one is used as it is, and must not be the file's.
        if weight_type in FLOAT_DTYPES:
            rows = _memory.zeros(rows.shape[:-1].numel(), rows.shape[-1]).view(rows.shape).copy_(rows)
        return rows, weight_type

    def _floats(self, name: str) -> torch.Tensor:
        """A copy of a float tensor in the model's type."""
        tensor = self.names[name]
        values = self.file.tensor(tensor)
        if self.architecture in ("gemma2", "gemma3") and tensor.endswith("norm.weight"):
            return (values.float() - 1).to(self.dtype)  # llama.cpp stores 1 + weight
        return self._ordered(tensor, values).to(self.dtype, copy=True)

    def _ordered(self, tensor: str, values: torch.Tensor) -> torch.Tensor:
        """A tensor's elements or rows of bytes [N, ...] in the model's order of rows.

        llama.cpp interleaves the two halves of each rotated head of q and k. Quantized blocks lie within a row, so the
        order is undone by moving whole rows. Which order it is, transformers' own processor tells.
        """
        numbers = np.arange(len(values))[:, None]
        order = self.processor.process(weights=numbers, name=tensor).weights
        return values if (order == numbers).all() else values[torch.from_numpy(order[:, 0].copy())]

    def _release(self, name: str) -> None:
        """Gives back a copied matrix's pages of the file, so that no two copies of the model pile up in memory."""
        if self.packed:
            self.file.release(self.names[name])
