"""Swap the linear layers of a model for `ktlinear.nn.Linear`, and back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from tqdm import tqdm

from . import _cpu, _fuse, _norm
from ._logical import LOGICAL_DTYPES
from ._types import TypeRules, fitting_type
from .nn import FLOAT_DTYPES, Embedding, Linear
from .ops import WeightType, needs_importance

__all__ = ["PatchReport", "PatchRow", "patch", "unpatch"]

# Scales are stored in fp16. No type's scale is larger than its block's largest weight, so up to here none overflows.
LARGEST_WEIGHT = 65504.0

# CPU features with which PyTorch's own linear computes in a float type, and is not slow in it.
NATIVE = {
    WeightType.BF16: ("amx_bf16", "avx512_bf16"),
    WeightType.F16: ("amx_fp16", "avx512_fp16"),
}

# Seconds of work before a progress bar appears.
PROGRESS_DELAY = 2.0


@dataclass
class PatchRow:
    """What happened to one module.

    Attributes:
        name: qualified name in the model.
        before: type of the weight before, as a dtype or a `WeightType` name.
        after: the same afterwards, or None if the module was left alone.
        note: why it was left, or what else is to be known.
        bytes_before, bytes_after: size of the weight; a weight shared by several modules counts at the first.
    """

    name: str
    before: str
    after: str | None
    note: str
    bytes_before: int
    bytes_after: int


@dataclass
class PatchReport:
    """What `patch` or `unpatch` did, module by module; ``str()`` is a table.

    `fused` has the names of the layers that are computed together, group by group; `norms` those of the norms that are
    one operator call.
    """

    rows: list[PatchRow] = field(default_factory=list)
    fused: list[tuple[str, ...]] = field(default_factory=list)
    norms: list[str] = field(default_factory=list)

    @property
    def changed(self) -> list[PatchRow]:
        """The modules that were swapped."""
        return [row for row in self.rows if row.after is not None]

    @property
    def left(self) -> list[PatchRow]:
        """The modules that were left alone."""
        return [row for row in self.rows if row.after is None]

    def __str__(self) -> str:
        header = ("module", "before", "after", "MB before", "MB after", "note")
        table = [
            (r.name, r.before, r.after or "-", f"{r.bytes_before / 1e6:.2f}", f"{r.bytes_after / 1e6:.2f}", r.note)
            for r in self.rows
        ]
        before, after = (sum(getattr(r, name) for r in self.rows) / 1e6 for name in ("bytes_before", "bytes_after"))
        total = f"{len(self.changed)} changed, {len(self.left)} left"
        last = ("total", "", "", f"{before:.2f}", f"{after:.2f}", total)
        fused = [f"computed together: {', '.join(group)}" for group in self.fused]
        norms = [f"norms in one call: {', '.join(self.norms)}"] if self.norms else []
        return "\n".join([format_table(header, table, last, numbers=(3, 4)), *fused, *norms])


def format_table(
    header: tuple[str, ...], rows: Sequence[tuple[str, ...]], total: tuple[str, ...], numbers: tuple[int, ...]
) -> str:
    """Lines of cells of equal width, with rules below the header and above the total; `numbers` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, total, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [header, *rows, total]
    ]
    rule = "-" * max(map(len, lines))
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


def patch(
    model: nn.Module,
    weight_type: WeightType | str | int = "Q8_0",
    *,
    filter_fn: Callable[[str, nn.Module], bool] | None = None,
    rules: Mapping[str, WeightType | str | int | None] | None = None,
    fuse: bool = False,
    fast_norms: bool = False,
) -> PatchReport:
    """Swap every plain ``nn.Linear`` inside `model`, in place, for a `ktlinear.nn.Linear` of `weight_type`.

    Only modules whose type is exactly ``nn.Linear`` are swapped: a subclass may use its weight in a way of its own, as
    the output projection of ``nn.MultiheadAttention`` does. Weights tied to other linear layers stay tied. A weight
    tied to an ``nn.Embedding``, as a language model's output head is, is quantized together with the table, which
    becomes a `ktlinear.nn.Embedding` on the same bytes; a rule or `filter_fn` that leaves one of them leaves both. Any
    other embedding is left as it is unless one of the `rules` matches it. A weight that has the float type asked for is
    left where the CPU computes in that type, since there PyTorch's own linear is fast. Everything that could go wrong
    with a module is looked at before the first one is swapped; then they are converted one by one, each original
    dropped as soon as its replacement is in place, so that the model is never in memory twice. An interrupt in between
    leaves a model that works, with its first modules swapped.

    Args:
        model: changed in place.
        weight_type: a `WeightType`, its name or its GGML id. A K-quant is mixed with better ones as llama.cpp does;
            Q4_K gives what it calls Q4_K_M: the output head is Q6_K, fused q/k/v projections Q5_K, and the value and
            down projections of half the layers Q6_K. If a type's block does not divide a module's K, the next best
            type by llama.cpp's rule is taken (Q4_K: Q5_0, Q5_K: Q5_1, Q6_K: Q8_0, Q2_K, Q3_K and TQ:
            Q4_0, IQ1 to IQ3 and IQ4_XS: IQ4_NL), or the module is left alone.
        filter_fn: called with a module's qualified name and the module; False leaves it alone.
        rules: ``{pattern: type}``, as in ``{"*.down_proj": "Q6_K", "lm_head": None}``. The first pattern that matches
            a module's qualified name (`fnmatch`) decides, and None as the type leaves the module alone; what no
            pattern matches gets `weight_type`. ``{"*": "Q4_K"}`` puts everything in that type, embeddings as well.
        fuse: compute layers that their module calls on the same input, as q/k/v and gate/up projections are, in one
            operator call: layers of the same type, width and presence of a bias. Names, parameters and state dicts stay
            as they are. The module's class is exchanged for a subclass of the same name whose forward makes the calls
            together; that is done only where the source of its forward shows that nothing happens to the input between
            them. It then computes its rotary embedding, if it is transformers' usual one, in one call as well. Where
            a gradient is wanted, or a layer has a hook, the layers are called one by one, as before.
        fast_norms: let the RMS norms (modules of such a name, with a weight w or 1 + w, that compute the same on a
            trial) be one operator call (in fp32 and without gradients our own, else ``torch.rms_norm``) in place of six
            to nine. Names and state dicts stay as they are; the last bits of results may change.

    Returns:
        A report of every linear layer: type before and after, or why it was left. The merged experts of a mixture, one
        parameter of three dimensions for all of them, stay floats, and the report says so.

    Raises:
        TypeError: `model` is not an ``nn.Module``, or `rules` no mapping.
        ValueError: an unknown type in `weight_type` or `rules`; a pattern in `rules` that matches no linear layer and
            no embedding; `model` is itself the linear layer to be swapped.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    if type(model) is nn.Linear:
        raise ValueError("model: an nn.Linear cannot be swapped in place; use ktlinear.nn.Linear.from_linear(model)")
    plans = _plans(model, weight_type, rules, filter_fn)
    places = _places(model)
    report = PatchReport()
    with _progress("patch", sum(plan.nbytes for plan in plans if plan.weight_type is not None)) as bar:
        for plan in plans:
            if plan.weight_type is None:
                report.rows += [_left(name, module, plan.note) for name, module in plan.members]
                continue
            report.rows += _convert(model, plan, places)
            plan.members.clear()  # or the originals would stay in memory until all are done
            bar.update(plan.nbytes)
    report.rows += _merged_experts(model)
    if fuse:
        report.fused = fuse_layers(model)
    if fast_norms:
        report.norms = swap_norms(model)
    set_quantizers(model)
    return report


def set_quantizers(model: nn.Module, quantized: bool = True) -> None:
    """Give the transformers models in `model` the quantizer that writes what they hold, or take it away.

    Without one, ``save_pretrained`` writes names that ``from_pretrained`` makes nothing of, but random weights.
    """
    if "transformers.modeling_utils" not in sys.modules:
        return
    try:
        from .integrations import transformers as integration
    except ImportError:  # a version that has not been tried
        return
    for module in model.modules():
        integration.set_quantizer(module, quantized)


def fuse_layers(model: nn.Module) -> list[tuple[str, ...]]:
    """Do what ``patch(fuse=True)`` does to the `ktlinear.nn.Linear` layers of `model`; return their names by group."""
    return [
        tuple(f"{name}.{attribute}" if name else attribute for attribute in group)
        for name, module in model.named_modules()
        for group in _fuse.fuse(module)
    ]


def swap_norms(model: nn.Module) -> list[str]:
    """Do what ``patch(fast_norms=True)`` does; return the names of the norms."""
    return [name for name, module in model.named_modules() if _norm.swap(module)]


def unpatch(model: nn.Module) -> PatchReport:
    """Swap every `ktlinear.nn.Linear` and `Embedding` inside `model`, in place, for its counterpart in ``torch.nn``.

    The new weights have the dtype that the original ones had, but their values are the quantized ones: what `patch`
    rounded stays rounded. Tied weights stay tied.

    Args:
        model: changed in place.

    Returns:
        A report of every module: type before and after, or why it was left.

    Raises:
        TypeError: `model` is not an ``nn.Module``.
        ValueError: `model` is itself the module to be swapped.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    if type(model) in (Linear, Embedding):
        raise ValueError(f"model: a {type(model).__name__} cannot be swapped in place; it must be inside a module")
    for module in model.modules():
        _fuse.unfuse(module)
        _norm.restore(module)
    modules = [(name, module) for name, module in model.named_modules() if type(module) in (Linear, Embedding)]
    places = _places(model)
    weights: dict[nn.Parameter, nn.Parameter] = {}  # old -> new
    report = PatchReport()
    with _progress("unpatch", sum(module._stored().nbytes for _, module in modules)) as bar:
        while modules:
            name, module = modules.pop(0)
            if _has_hooks(module):
                report.rows.append(_left(name, module, _HOOKS))
                continue
            old = module._stored()
            tied = old in weights
            if not tied:
                weights[old] = _float_parameter(module)
            new = _float_module(module, weights[old])
            _carry_attributes(module, new)
            _replace(places[module], new)
            _rename_tied_keys(model, {name}, "qweight", "weight")
            sizes = (0, 0) if tied else (old.nbytes, weights[old].nbytes)
            report.rows.append(PatchRow(name, _type_name(module), _dtype_name(weights[old]), "", *sizes))
            bar.update(0 if tied else old.nbytes)
    set_quantizers(model, False)
    return report


_Layer = nn.Linear | nn.Embedding  # with what it becomes, since ours are subclasses


@dataclass
class _Plan:
    """One weight, the modules that hold it, and what shall become of them (`weight_type` None: nothing)."""

    members: list[tuple[str, _Layer]]
    weight_type: WeightType | None
    note: str
    nbytes: int


_HOOKS = "it has hooks or a forward of its own, which a swap would drop"


def _plans(
    model: nn.Module,
    weight_type: WeightType | str | int,
    rules: Mapping[str, WeightType | str | int | None] | None,
    filter_fn: Callable[[str, nn.Module], bool] | None = None,
) -> list[_Plan]:
    """What shall become of each weight of `model`; arguments and errors are those of `patch`."""
    names = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Embedding))]
    types = TypeRules(weight_type, rules, names)
    cpu = _cpu.features()
    return [_plan(group, types, filter_fn, cpu) for group in _weight_groups(model, types)]


def _holders(model: nn.Module) -> dict[int, list[tuple[str, nn.Module, str]]]:
    """For the id of each parameter the modules that hold it: (module's name, module, parameter's name)."""
    holders: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for name, module in model.named_modules():
        for parameter_name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((name, module, parameter_name))
    return holders


def _weight_groups(model: nn.Module, types: TypeRules) -> list[list[tuple[str, nn.Module, str]]]:
    """The linear layers of `model`, and the embeddings that a rule names, with whatever shares their weights.

    Each is a list of (module's name, module, parameter's name).
    """
    holders = _holders(model)
    groups: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Embedding) and types.pattern(name) is not None):
            weight = module._parameters.get("weight", module._parameters.get("qweight"))
            alone: list[tuple[str, nn.Module, str]] = [(name, module, "weight")]
            groups.setdefault(id(module if weight is None else weight), holders.get(id(weight), alone))
    return list(groups.values())


def _plan(
    group: list[tuple[str, nn.Module, str]],
    types: TypeRules,
    filter_fn: Callable[[str, nn.Module], bool] | None,
    cpu: frozenset[str],
) -> _Plan:
    # Linear layers first: their place in the report is that of the group.
    linears: list[tuple[str, _Layer]] = [(name, module) for name, module, _ in group if isinstance(module, nn.Linear)]
    embeddings: list[tuple[str, _Layer]] = [
        (name, module) for name, module, _ in group if isinstance(module, nn.Embedding)
    ]

    def leave(reason: str) -> _Plan:
        return _Plan(linears or embeddings, None, reason, 0)

    asked: dict[WeightType, str] = {}  # type that a rule asks for -> a module for which it does
    for name, module, parameter_name in group:
        reason = _obstacle(module, parameter_name)
        if reason is None and filter_fn is not None and not filter_fn(name, module):
            reason = "filter_fn"
        pattern = types.pattern(name)
        if reason is None and pattern is not None and types.rules[pattern] is None:
            reason = f"rule {pattern!r}"
        if reason is not None:
            return leave(reason if len(group) == 1 else f"weight shared with {name}: {reason}")
        if pattern is not None:
            asked.setdefault(types.rules[pattern], name)  # type: ignore[arg-type]
    if len(asked) > 1:
        return leave("tied modules got different types: " + ", ".join(f"{n} {t.name}" for t, n in asked.items()))

    members = linears + embeddings
    name, module = members[0]
    weight = module.weight
    wanted = next(iter(asked)) if asked else types.default_type(name, head=bool(linears and embeddings))
    chosen = fitting_type(wanted, weight.shape[1])
    if chosen is None:
        return leave(f"the block of {wanted.name} does not divide K = {weight.shape[1]}")
    if needs_importance(chosen) and not weight.is_meta:
        return leave(f"{chosen.name} needs an importance matrix, which only `python -m ktlinear quantize` takes")
    if chosen in FLOAT_DTYPES and embeddings:
        tied = f"tied to {embeddings[0][0]}; " if linears else ""
        return leave(f"{tied}embeddings are changed for quantized types only")
    native = [feature for feature in NATIVE.get(chosen, ()) if feature in cpu]
    if native and weight.dtype == FLOAT_DTYPES[chosen]:
        return leave(f"it is {_dtype_name(weight)} already, in which this CPU computes ({native[0]})")
    reason = _unfit_values(weight)
    if reason is not None:
        return leave(reason)
    note = "" if chosen is wanted else f"the block of {wanted.name} does not divide K = {weight.shape[1]}"
    return _Plan(members, chosen, note, weight.nbytes)


def _merged_experts(model: nn.Module) -> list[PatchRow]:
    """What transformers makes of a mixture's experts: stacks of matrices, which no linear layer holds."""
    note = "merged experts, which stay floats (ktlinear.nn.Experts computes quantized ones)"
    rows = []
    for name, module in model.named_modules():
        for parameter_name, stack in module._parameters.items():
            if stack is not None and stack.dim() == 3 and stack.dtype in LOGICAL_DTYPES and "experts" in name:
                label = f"{name}.{parameter_name}"
                rows.append(PatchRow(label, _dtype_name(stack), None, note, stack.nbytes, stack.nbytes))
    return rows


def _obstacle(module: nn.Module, parameter_name: str) -> str | None:
    """Why `module` cannot be swapped, whatever the type, or None."""
    if type(module) not in (nn.Linear, nn.Embedding):
        if isinstance(module, (Linear, Embedding)):
            return f"already ktlinear.nn.{type(module).__name__}, {module.weight_type.name}"
        return f"its type is {type(module).__name__}, not nn.Linear"
    weight = module._parameters.get(parameter_name)
    if weight is None:
        return "its weight is computed from other parameters"
    if _has_hooks(module):
        return _HOOKS
    more = [
        *module._buffers,
        *module._modules,
        *(name for name in module._parameters if name not in ("weight", "bias")),
    ]
    if more:
        return f"it holds more than a weight and a bias: {', '.join(more)}"
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
        return "it is an embedding with max_norm or sparse gradients"
    if type(weight) is not nn.Parameter or weight.layout != torch.strided:
        return f"its weight is a {type(weight.data).__name__} of layout {weight.layout}"
    if weight.device.type not in ("cpu", "meta"):
        return f"its weight is on {weight.device}, not the CPU"
    if weight.dtype not in LOGICAL_DTYPES:
        return f"its weight is {_dtype_name(weight)}, not float32, float16 or bfloat16"
    if weight.numel() == 0:
        return "its weight is empty"
    return None


def _unfit_values(weight: torch.Tensor) -> str | None:
    if weight.is_meta:
        return None
    low, high = torch.aminmax(weight.detach())
    largest = max(-float(low), float(high)) if low == low else float("nan")
    if not largest <= LARGEST_WEIGHT:
        return f"its largest weight is {largest:g}; at most {LARGEST_WEIGHT:g} can be stored"
    return None


def _has_hooks(module: nn.Module) -> bool:
    if "forward" in module.__dict__:
        return True
    return any(bool(value) for name, value in module.__dict__.items() if name.endswith("_hooks"))


def _places(model: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Where each module hangs: (parent, attribute), several for a shared module."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for attribute, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, []).append((parent, attribute))
    return places


def _replace(places: list[tuple[nn.Module, str]], module: nn.Module) -> None:
    for parent, attribute in places:
        setattr(parent, attribute, module)


def _carry_attributes(old: nn.Module, new: nn.Module) -> None:
    """Give `new` what others have set on `old`, such as the marks that transformers leaves."""
    own = ("_type", "_dtype", "_weight_requires_grad", "packed")
    for name, value in old.__dict__.items():
        if name not in own:
            new.__dict__.setdefault(name, value)


def _rename_tied_keys(model: nn.Module, modules: set[str], old: str, new: str) -> None:
    """Tell a transformers model what its tied weights are called now, or it will not save or tie them."""

    def renamed(key: str) -> str:
        module, _, parameter = key.rpartition(".")
        return f"{module}.{new}" if module in modules and parameter == old else key

    for attribute in ("all_tied_weights_keys", "_tied_weights_keys"):
        keys = getattr(model, attribute, None)
        if isinstance(keys, dict):
            setattr(model, attribute, {renamed(target): renamed(source) for target, source in keys.items()})


def _convert(
    model: nn.Module,
    plan: _Plan,
    places: dict[nn.Module, list[tuple[nn.Module, str]]],
    rows: torch.Tensor | None = None,
    packed: bool = True,
) -> list[PatchRow]:
    """Swap the members of `plan`. Their weight becomes `rows` if given (GGUF rows), else it is quantized."""
    assert plan.weight_type is not None
    report = []
    first: Linear | Embedding | None = None
    first_name = ""
    for name, module in plan.members:
        before = _type_name(module)
        if first is None:
            new = first = _quantized(module, plan.weight_type, rows, packed)
            first_name, note, sizes = name, plan.note, (plan.nbytes, first._stored().nbytes)
        else:
            new = _tied(module, first)
            note, sizes = f"tied to {first_name}", (0, 0)
        _carry_attributes(module, new)
        _replace(places.pop(module), new)
        report.append(PatchRow(name, before, plan.weight_type.name, note, *sizes))
    if len(plan.members) > 1 and plan.weight_type not in FLOAT_DTYPES:
        _rename_tied_keys(model, {name for name, _ in plan.members}, "weight", "qweight")
    return report


def _quantized(
    module: _Layer, weight_type: WeightType, rows: torch.Tensor | None, packed: bool = True
) -> Linear | Embedding:
    """The replacement of `module`, with its own weight in `weight_type` or with `rows` of that type."""
    new: Linear | Embedding
    if rows is None:
        if isinstance(module, nn.Linear):
            return Linear.from_linear(module, weight_type, packed)
        return Embedding.from_embedding(module, weight_type, packed)
    k, dtype = module.weight.shape[1], module.weight.dtype
    if isinstance(module, nn.Linear):
        new = Linear.from_rows(rows, k, weight_type, module.bias, dtype, packed)
    else:
        new = Embedding.from_rows(rows, k, weight_type, module.padding_idx, dtype, packed)
    return new.train(module.training)


def _tied(module: _Layer, other: Linear | Embedding) -> Linear | Embedding:
    """The replacement of `module`, whose weight was that of the module that `other` has replaced."""
    n, k = module.weight.shape
    dtype = module.weight.dtype
    new: Linear | Embedding
    if isinstance(module, nn.Embedding):
        new = Embedding(n, k, module.padding_idx, other.weight_type, device="meta", dtype=dtype)
    else:
        new = Linear(k, n, False, other.weight_type, device="meta", dtype=dtype)
        new.bias = module.bias
    new._share_matrix(other)
    return new.train(module.training)


def _float_parameter(module: Linear | Embedding) -> nn.Parameter:
    weight = module.weight
    if module._type is None:
        return nn.Parameter(weight.detach().to(module._dtype), requires_grad=weight.requires_grad)
    return nn.Parameter(weight.dequantize(), requires_grad=module._weight_requires_grad)


def _float_module(module: Linear | Embedding, weight: nn.Parameter) -> _Layer:
    if isinstance(module, Embedding):
        n, k = module.num_embeddings, module.embedding_dim
        new: _Layer = nn.Embedding(n, k, module.padding_idx, device="meta", dtype=weight.dtype)
    else:
        new = nn.Linear(module.in_features, module.out_features, False, device="meta", dtype=weight.dtype)
        new.bias = module.bias
    new.weight = weight
    return new.train(module.training)


def _type_name(module: _Layer) -> str:
    if isinstance(module, (Linear, Embedding)):
        return module.weight_type.name
    return _dtype_name(module.weight)


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _left(name: str, module: _Layer, reason: str) -> PatchRow:
    held = module._parameters.get("weight", module._parameters.get("qweight"))
    size = 0 if held is None else held.nbytes
    return PatchRow(name, _type_name(module), None, reason, size, size)


def _progress(what: str, nbytes: int) -> tqdm:
    """A bar on stderr, which appears only if the work takes some seconds."""
    return tqdm(total=nbytes, desc=what, unit="B", unit_scale=True, delay=PROGRESS_DELAY)
