"""The CPU kernel that transformers lacks for GGUF weights which it keeps packed itself (qwen35, qwen35moe, lfm2).

transformers has one slot for a kernel module of five names, and without one dequantizes the file. `install` fills it
with this module's functions. On the CPU transformers calls them for a few rows only and unpacks for more, so the
layers are also swapped after loading: for their counterparts in `ktlinear.nn`, over the same bytes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from torch import nn

from ..nn import FLOAT_DTYPES, Embedding, Experts, ExpertsLinear, Linear
from ..ops import FORMATS
from ..patch import _places, _rename_tied_keys, _replace, _tied

# All of it is private to transformers, so each version has to be tried before it is let in.
VERSIONS = ("5.24",)

GEMV_TYPES = frozenset(int(t) for t in FORMATS if t not in FLOAT_DTYPES)

kt = torch.ops.kt


def mul_mat_vec(weight: torch.Tensor, x: torch.Tensor, ggml_type: int, out_features: int) -> torch.Tensor:
    """GGUF rows [N, row_bytes] and x [M, K] -> [M, N] in the dtype of `x`."""
    return kt.linear(x, weight, None, ggml_type)


def mul_mat_id(
    blocks: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, ggml_type: int, out_features: int
) -> torch.Tensor:
    """Experts' rows [E, N, row_bytes], x [T, K] and ids [T, n_used] -> fp32 [T, n_used, N]."""
    return kt.linear_experts(x.float(), blocks, ids, ggml_type)


def dequantize(weight: torch.Tensor, ggml_type: int, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """GGUF rows -> [rows, cols]."""
    return kt.dequantize(weight.reshape(rows, -1), ggml_type, dtype)


def get_rows(
    weight: torch.Tensor, indices: torch.Tensor, ggml_type: int, cols: int, dtype: torch.dtype
) -> torch.Tensor:
    """The rows `indices` of a table of GGUF rows -> [indices, cols]."""
    return kt.embedding(indices, weight, ggml_type, dtype)


class PermutedInput(nn.Module):
    """A linear layer whose weight's columns are in the file's order: x[..., order] @ W.T, a reorder of the input.

    Not an ``nn.Linear``: its `weight` would have to be in the input's order, and a quantized row's block cannot be.
    """

    order: torch.Tensor

    def __init__(self, linear: Linear, order: torch.Tensor) -> None:
        super().__init__()
        self.linear = linear
        self.register_buffer("order", order, persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.linear(input.index_select(-1, self.order))


def install() -> None:
    """Fill transformers' slot, once.

    Raises:
        ImportError: transformers is of a version that this was not written for.
    """
    found = ".".join(transformers.__version__.split(".")[:2])
    needed = f"ktlinear's kernel for packed GGUF weights is written for transformers {', '.join(VERSIONS)}"
    if found not in VERSIONS:
        raise ImportError(
            f"{needed}; found {transformers.__version__}. ktlinear.from_gguf and KtConfig do not depend on it"
        )
    try:
        import transformers.integrations.gguf.kernels as slot
        from transformers.integrations.gguf.utils import GgufEmbedding, GgufExperts, GgufLinear
        from transformers.quantizers.quantizer_gguf import GgufHfQuantizer

        kernel = slot.GgufKernel(_Kernel)
        process = GgufHfQuantizer._process_model_after_weight_loading
        slot._gguf_kernel  # noqa: B018
    except (ImportError, AttributeError) as error:
        raise ImportError(f"{needed}; {transformers.__version__} lacks what it uses: {error}") from error
    slot._gguf_kernel = kernel  # type: ignore[assignment]
    if hasattr(process, "_ktlinear"):
        return

    @functools.wraps(process)
    def process_and_swap(self: Any, model: nn.Module, **kwargs: Any) -> nn.Module:
        model = process(self, model, **kwargs)
        if self.packed_modules:
            self.packed_modules = {}  # or it would keep the bytes of what is swapped
            _swap(model, GgufLinear, GgufEmbedding, self.dtype)
            _swap_experts(model, GgufExperts, self.dtype)
        return model

    process_and_swap._ktlinear = True  # type: ignore[attr-defined]
    GgufHfQuantizer._process_model_after_weight_loading = process_and_swap  # type: ignore[method-assign]


class _Kernel:
    """What the slot takes, by its names."""

    GEMV_TYPES = GEMV_TYPES
    mul_mat_vec = staticmethod(mul_mat_vec)
    mul_mat_id = staticmethod(mul_mat_id)
    dequantize = staticmethod(dequantize)
    get_rows = staticmethod(get_rows)


def _swap(model: nn.Module, linear: Any, embedding: Any, dtype: torch.dtype) -> None:
    places = _places(model)
    swapped: dict[nn.Parameter, tuple[str, Linear | Embedding]] = {}  # by what held the bytes
    tied = set()
    modules: list[tuple[str, Any]] = list(model.named_modules())
    for name, module in modules:
        if not isinstance(module, (linear, embedding)) or module.weight.device.type != "cpu":
            continue
        new: Any
        rows: Any = module.weight
        if rows in swapped:
            first_name, first = swapped[rows]
            tied |= {first_name, name}
            new = _tied(_float_twin(module, dtype), first)
        elif isinstance(module, linear):
            new = Linear.from_rows(rows.detach(), module.in_features, module.ggml_type, module.bias, dtype)
        else:
            new = Embedding.from_rows(rows.detach(), module.embedding_dim, module.ggml_type, dtype=dtype)
        swapped.setdefault(rows, (name, new))
        new.train(module.training)
        order = getattr(module, "input_permutation", None)
        _replace(places.pop(module), new if order is None else PermutedInput(new, order))
    _rename_tied_keys(model, tied, "weight", "qweight")


def _float_twin(module: Any, dtype: torch.dtype) -> nn.Linear | nn.Embedding:
    """The float layer, without values, that a packed one stands for."""
    if hasattr(module, "num_embeddings"):
        return nn.Embedding(module.num_embeddings, module.embedding_dim, device="meta", dtype=dtype)
    twin = nn.Linear(module.in_features, module.out_features, False, device="meta", dtype=dtype)
    twin.bias = module.bias
    return twin


def _swap_experts(model: nn.Module, experts: Any, dtype: torch.dtype) -> None:
    def layer(rows: torch.Tensor, k: int, ggml_type: int) -> ExpertsLinear:
        return ExpertsLinear.from_rows(rows, k, ggml_type, dtype)

    modules: list[tuple[str, Any]] = list(model.named_modules())
    for name, module in modules:
        if isinstance(module, experts) and module.down_proj.device.type == "cpu":
            gate, up = module.gate_up_proj.detach().chunk(2, dim=1)
            new = Experts(
                layer(gate, module.hidden_dim, module.gate_up_type),
                layer(up, module.hidden_dim, module.gate_up_type),
                layer(module.down_proj.detach(), module.intermediate_dim, module.down_type),
                module.act_fn,
            )
            model.set_submodule(name, new.train(module.training))
