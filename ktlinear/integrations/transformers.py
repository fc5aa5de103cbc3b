"""transformers' own way to quantized models: ``from_pretrained(path, quantization_config=ktlinear.KtConfig("Q4_K"))``.

Importing this module (``ktlinear.KtConfig`` does) makes ``quant_method: ktlinear`` known to transformers, so that
``from_pretrained`` loads the folders that ``save_pretrained`` and ``python -m ktlinear quantize`` write. What their
files hold is in `ktlinear.checkpoint`.

How a model is loaded: it stays as transformers makes it, and the weight of a layer that is to be quantized arrives as
its GGUF rows, read from the file or quantized as soon as it is read. When all are there, each such layer is swapped for
its counterpart in `ktlinear.nn`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .._types import check_quantized_types
from ..checkpoint import QuantizedTensor, quantized_tensors, type_metadata
from ..nn import Embedding, Linear, _QuantizedWeight
from ..ops import WeightType, needs_importance
from ..ops import weight_type as to_weight_type
from ..patch import (
    PatchReport,
    _convert,
    _holders,
    _left,
    _merged_experts,
    _places,
    _Plan,
    _plans,
    _unfit_values,
    unpatch,
)

# The first version whose loading works as this module expects, and the first that has not been tried.
VERSIONS = ((5, 24), (6, 0))

try:
    import transformers
    from packaging.version import Version
except ImportError as error:
    raise ImportError(f"ktlinear.KtConfig needs the package transformers: {error}") from error

_found = Version(transformers.__version__).release[:2]
_expected = f"from {'.'.join(map(str, VERSIONS[0]))} on and below {VERSIONS[1][0]}"
if not VERSIONS[0] <= _found < VERSIONS[1]:
    raise ImportError(f"ktlinear.KtConfig needs transformers {_expected}; found {transformers.__version__}")
try:
    # Private to transformers: how the names in a file become those in the model, and back.
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        ConversionOps,
        WeightConverter,
        WeightRenaming,
        build_glob_alternation,
        rename_source_key,
        revert_weight_conversion,
    )
    from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise ImportError(
        f"ktlinear.KtConfig needs transformers {_expected}; {transformers.__version__} lacks what it uses: {error}"
    ) from error

__all__ = ["KtConfig", "KtQuantizer", "enable"]

METHOD = "ktlinear"


def enable() -> None:
    """Let transformers' own ``from_pretrained(..., gguf_file=...)`` keep GGUF weights packed on the CPU.

    It does so for the architectures qwen35, qwen35moe and lfm2, if it finds a kernel; this is one, for this process.
    Linear layers, token tables and experts then become those of `ktlinear.nn`. For other architectures it dequantizes
    as ever: `ktlinear.from_gguf` is for those. Calling it twice does no harm.

    Raises:
        ImportError: transformers is of a version that this was not written for: its slot for a kernel is private.
    """
    from .gguf_slot import install

    install()


@register_quantization_config(METHOD)
class KtConfig(QuantizationConfigMixin):
    """How ``from_pretrained`` quantizes a model: the arguments of `ktlinear.patch`.

    Args:
        weight_type: a quantized `WeightType`, its name or its GGML id.
        rules: ``{pattern: type or None}`` by name of module, as for `ktlinear.patch`.

    Raises:
        ValueError: a type that is unknown, or that nothing can be quantized to.
    """

    def __init__(
        self,
        weight_type: WeightType | str | int = "Q4_K",
        rules: Mapping[str, WeightType | str | int | None] | list[list[str | None]] | None = None,
        quant_method: str = METHOD,
    ) -> None:
        if isinstance(rules, list):  # as a file has it, since transformers sorts the keys of what it writes
            rules = {str(pattern): t for pattern, t in rules}
        check_quantized_types(weight_type, rules)
        self.quant_method = METHOD  # type: ignore[assignment]
        self.weight_type = to_weight_type(weight_type).name
        self.rules = {pattern: None if t is None else to_weight_type(t).name for pattern, t in (rules or {}).items()}

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "rules": [list(rule) for rule in self.rules.items()]}


class _ToRows(ConversionOps):  # type: ignore[misc]
    """Quantizes a weight between reading it and putting it into the model."""

    def __init__(self, types: Mapping[str, WeightType]) -> None:
        self.types = types

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: self._rows(name, value) for name, value in input_dict.items()}

    def _rows(self, name: str, value: Any) -> Any:
        weight_type = self.types.get(name)
        if weight_type is None:
            return value
        weight = value[0] if isinstance(value, list) else value
        reason = _unfit_values(weight)
        if reason is not None:
            raise ValueError(f"{name}: {reason}; rules={{{name.removesuffix('.weight')!r}: None}} leaves it as it is")
        return torch.ops.kt.quantize(weight, int(weight_type), None)


@register_quantizer(METHOD)
class KtQuantizer(HfQuantizer):  # type: ignore[misc]
    """Loads and saves transformers models whose linear layers are `ktlinear.nn.Linear`.

    Attributes:
        report: what has become of each layer, as `ktlinear.patch` returns it.
    """

    requires_calibration = False
    quantization_config: KtConfig

    def __init__(self, quantization_config: KtConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.report = PatchReport()
        self._types: dict[str, WeightType] = {}  # by the name of the parameter in the model
        self._dtype = torch.float32

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        places = device_map.values() if isinstance(device_map, dict) else [device_map]
        for place in places:
            if place is not None and torch.device(place).type != "cpu":
                raise ValueError(f"device_map: ktlinear computes on the CPU, but got {device_map!r}")

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"dtype: ktlinear computes in torch.float32, float16 or bfloat16, got {dtype}")
        self._dtype = dtype
        return dtype

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        if self.pre_quantized:
            files = [file for file in checkpoint_files or [] if str(file).endswith(".safetensors")]
            described = quantized_tensors(files)
            if described is None:
                raise ValueError(
                    "quantization_config says ktlinear, but the files' metadata describe no quantized tensors; neither "
                    "save_pretrained nor python -m ktlinear quantize has written them"
                )
            names = parameter_names(model, described)
            self._types = {names[name]: tensor.weight_type for name, tensor in described.items() if name in names}
            return
        config = self.quantization_config
        with _Tied(model):
            plans = _plans(model, config.weight_type, config.rules)
        self.report.rows += _merged_experts(model)
        for plan in plans:
            if plan.weight_type is not None and needs_importance(plan.weight_type):
                raise ValueError(
                    f"weight_type {plan.weight_type.name}, chosen for {plan.members[0][0]}, needs an importance "
                    "matrix, which from_pretrained has not; python -m ktlinear quantize --imatrix takes one"
                )
            if plan.weight_type is None:
                self.report.rows += [_left(name, module, plan.note) for name, module in plan.members]
            else:
                self._types |= {f"{name}.weight": plan.weight_type for name, _ in plan.members}

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return param_name in self._types

    def get_quantize_ops(self) -> _ToRows:
        return _ToRows(self._types)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        places = _places(model)
        # Some models want some of their layers in fp32 whatever the others are.
        plan = model._get_dtype_plan(self._dtype)
        in_fp32 = build_glob_alternation(list(plan))[0] if plan else None
        for group in list(_holders(model).values()):
            name, module, attribute = group[0]
            weight_type = self._types.get(f"{name}.{attribute}")
            rows = module._parameters[attribute]
            # A float one was in no file, and transformers has initialized it: a new head, to be trained.
            if weight_type is None or rows is None or rows.dtype != torch.uint8:
                continue
            members: list[Any] = [(name, module) for name, module, _ in group]
            for name, member in members:
                _check_rows(name, member, rows, weight_type)
                shape = _matrix_shape(member)
                dtype = torch.float32 if in_fp32 and in_fp32.search(f"{name}.weight") else self._dtype
                member._parameters["weight"] = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
            nbytes = members[0][1].weight.nbytes
            self.report.rows += _convert(model, _Plan(members, weight_type, "", nbytes), places, rows.detach())
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """The state dict under the names of an unquantized model, and the header's description of it.

        Raises:
            ValueError: the model holds what `from_pretrained` could not make again; nothing has been written.
        """
        for name, module in model.named_modules():
            if isinstance(module, _QuantizedWeight) and type(module) not in (Linear, Embedding):
                raise ValueError(
                    f"save_pretrained: {name} is a {type(module).__name__}, which from_pretrained could not make "
                    "again; keep the file that it was loaded from, or save a state_dict"
                )
        if not hasattr(model.config, "quantization_config"):
            model.config.quantization_config = self.quantization_config
        state, described = model.state_dict(), {}
        for target in getattr(model, "all_tied_weights_keys", {}):
            state.pop(target, None)
        modules = dict(model.named_modules())
        for key in [key for key in state if key.endswith("qweight")]:
            prefix = key.removesuffix("qweight")
            module = modules.get(prefix.removesuffix("."))
            if isinstance(module, (Linear, Embedding)):
                state[f"{prefix}weight"] = state.pop(key)
                described[f"{prefix}weight"] = QuantizedTensor(module.weight_type, module._matrix_shape())
        # The header says it.
        for name, module in modules.items():
            if isinstance(module, (Linear, Embedding)):
                state.pop(f"{name}._extra_state", None)
        # save_pretrained may go on to give them the names of the checkpoint that was loaded.
        markers = {name: torch.empty(0) for name in described}
        final = {id(marker): name for name, marker in revert_weight_conversion(model, markers).items()}
        described |= {final[id(markers[name])]: tensor for name, tensor in list(described.items())}
        return state, type_metadata(described)

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        unpatch(model)
        return model if dtype is None else model.to(dtype)

    def is_serializable(self, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # adapters: gradients flow through the quantized layers to their inputs

    @property
    def is_compileable(self) -> bool:
        return True


def set_quantizer(model: nn.Module, quantized: bool) -> None:
    """Make a transformers model that holds quantized layers one that knows how to save them, or no longer so.

    Its config says so from the first saving on. Models that have a quantizer of their own keep it.
    """
    if not isinstance(model, transformers.PreTrainedModel):
        return
    held = getattr(model, "hf_quantizer", None)
    ours = [m for m in model.modules() if isinstance(m, _QuantizedWeight)]
    types = [m.weight_type.name for m in ours if m._type is not None]
    changed = bool(types) or any(type(m) not in (Linear, Embedding) for m in ours)
    if quantized and changed and held is None:
        model.__dict__["hf_quantizer"] = KtQuantizer(KtConfig(max(types, key=types.count, default="Q8_0")))
    elif not quantized and not changed and isinstance(held, KtQuantizer) and not getattr(model, "is_quantized", False):
        del model.hf_quantizer
        model.config.__dict__.pop("quantization_config", None)


def parameter_names(model: Any, names: Iterable[str]) -> dict[str, str]:
    """For the names of a checkpoint's tensors those of the model's parameters that transformers makes of them.

    Tensors that are merged or split on the way are left out, as are those that have no place in the model.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    known: Any = dict(model.named_parameters(remove_duplicate=False))
    found = {}
    for name in names:
        renamed, converter = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if converter is None and renamed in known:
            found[name] = renamed
    return found


class _Tied:
    """A model on the meta device with its tied weights tied, which transformers does after loading."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.before: list[tuple[nn.Module, nn.Parameter | None]] = []

    def __enter__(self) -> None:
        keys: Mapping[str, str] = getattr(self.model, "all_tied_weights_keys", None) or {}
        for target, source in keys.items():
            if target.endswith(".weight") and source.endswith(".weight"):
                module = self.model.get_submodule(target.removesuffix(".weight"))
                self.before.append((module, module._parameters.get("weight")))
                module._parameters["weight"] = self.model.get_parameter(source)

    def __exit__(self, *error: object) -> None:
        for module, parameter in reversed(self.before):
            module._parameters["weight"] = parameter


def _matrix_shape(module: nn.Module) -> tuple[int, int]:
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    assert isinstance(module, nn.Embedding)
    return module.num_embeddings, module.embedding_dim


def _check_rows(name: str, module: nn.Module, rows: torch.Tensor, weight_type: WeightType) -> None:
    if not isinstance(module, (nn.Linear, nn.Embedding)):
        raise ValueError(f"{name}.weight is {weight_type.name}, but the model's {name} is a {type(module).__name__}")
    if rows.shape[0] != _matrix_shape(module)[0]:
        raise ValueError(f"{name}.weight has {rows.shape[0]} rows, but {list(_matrix_shape(module))} in the model")
