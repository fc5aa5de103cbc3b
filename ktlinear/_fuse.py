"""Computes linear layers that a module calls on the same input, as q/k/v and gate/up are, in one operator call.

The layers stay what and where they are: their names, parameters and state dicts do not change, and nothing is held
twice. What changes is the forward of the module that calls them: a subclass with the same name takes its place, whose
forward is the original's source with ::

    a = self.q_proj(x).view(shape)            y0, y1 = self._linear_group(x, self.q_proj, self.k_proj)
    b = self.k_proj(x).view(shape)     ->     a = y0.view(shape)
                                              b = y1.view(shape)

and ``apply_rotary_pos_emb(q, k, cos, sin)``, as transformers' decoders call it, by `ops.rotary`.

So which calls belong together is known before anything runs. Results kept from one call to the next would need to know
that the input has not changed in between, and in inference mode tensors have no version to tell that by. Where the
source does not show it plainly, the module is left alone.
"""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from .nn import Linear, linear_group
from .ops import rotary

_Calls = tuple[tuple[str, ...], ...]  # attributes called together, for each group


def fuse(module: nn.Module) -> list[tuple[str, ...]]:
    """Make `module` call its own linear layers in groups where it can. Returns the groups, by attribute."""
    cls: Any = type(module)
    if _is_fused(module) or cls.__reduce_ex__ is not object.__reduce_ex__ or "forward" in module.__dict__:
        return []
    layers = {name: layer for name, layer in module._modules.items() if type(layer) is Linear and layer.packed}
    groups: list[tuple[str, ...]] = []
    for calls in _groups_of(cls) if len(layers) > 1 else ():
        kinds: dict[Any, list[str]] = {}
        for name in calls:
            if name in layers:
                layer = layers[name]
                kinds.setdefault((layer._type, layer.in_features, layer.bias is None), []).append(name)
        groups += [tuple(names) for names in kinds.values() if len(names) > 1]
    if groups:
        module.__class__ = _fused_class(cls, tuple(groups))
    return groups


def unfuse(module: nn.Module) -> None:
    """Undo `fuse`."""
    if _is_fused(module):
        (module.__class__,) = type(module).__bases__


def _is_fused(module: nn.Module) -> bool:
    return "_fused_groups" in type(module).__dict__


@functools.cache
def _fused_class(base: Any, groups: _Calls) -> type[nn.Module]:
    """A subclass of `base` for all modules that call the same groups, so that compiled code is shared as well."""

    def reduce(self: nn.Module, protocol: Any) -> Any:
        # The class is in no module for pickle to find it by.
        state = nn.Module.__getstate__(self)
        return _new, (base, groups), state

    members = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": reduce,
        "_fused_groups": groups,
        "_linear_group": staticmethod(linear_group),
        "_rotary": staticmethod(rotary),
        "forward": _rewritten(base, groups),
    }
    return type(base.__name__, (base,), members)


def _new(base: Any, groups: _Calls) -> nn.Module:
    cls = _fused_class(base, groups)
    return cls.__new__(cls)


@functools.cache
def _groups_of(cls: Any) -> _Calls:
    """The attributes of `self` that the forward of `cls` calls, each once, on one and the same variable."""
    source = _source(cls)
    if source is None:
        return ()
    definition, code = source.definition, source.function.__code__
    others = {*code.co_varnames, *code.co_cellvars}
    if code.co_varnames[:1] != ("self",) or "self" in _stored(definition):
        return ()
    counts: dict[str, int] = {}
    for _, name, _ in _calls(definition):
        counts[name] = counts.get(name, 0) + 1
    groups: list[tuple[str, ...]] = []
    for block in _blocks(definition):
        by_variable: dict[str, list[tuple[int, str]]] = {}
        for index, statement in enumerate(block):
            for _, name, variable in _calls(statement) if _is_plain(statement) else ():
                if counts[name] == 1:
                    by_variable.setdefault(variable, []).append((index, name))
        for variable, calls in by_variable.items():
            while calls:
                # As many of them as nothing comes between.
                counts_down = range(len(calls), 1, -1)
                count = next((n for n in counts_down if _leaves(block, calls[:n], variable, others)), 1)
                groups.append(tuple(name for _, name in calls[:count]))
                calls = calls[count:]
    return tuple(group for group in groups if len(group) > 1)


# Methods whose arguments are sizes, whatever they are called.
_SHAPING = {"chunk", "flatten", "movedim", "permute", "reshape", "split", "transpose", "unflatten", "unsqueeze", "view"}


def _leaves(block: list[ast.stmt], calls: list[tuple[int, str]], variable: str, others: set[str]) -> bool:
    """Whether the statements of these calls do nothing with the variable but pass it to the layers, and write to no
    tensor that may be the same one: the function's other variables are not passed to anything that could."""
    others = others - {"self", variable}
    uses = 0
    for statement in block[calls[0][0] : calls[-1][0] + 1]:
        if not _is_plain(statement):
            return False
        for node in ast.walk(statement):
            match node:
                case ast.Name(id=name) if name == variable:
                    uses += 1
                case ast.Subscript(ctx=ast.Store() | ast.Del()) | ast.Attribute(ctx=ast.Store() | ast.Del()):
                    return False
                case ast.Attribute(attr=name) if name.endswith("_"):  # PyTorch's mark of what works in place
                    return False
                case ast.Call() if _passed(node) & others:
                    return False
        others -= _stored(statement)  # what comes out of the layers
    return uses == len(calls)


def _stored(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _passed(node: ast.AST) -> set[str]:
    """The variables in an expression, except those that only say a shape."""
    match node:
        case ast.Name(id=name):
            return {name}
        case ast.Call(func=ast.Attribute(value=receiver, attr=name)) if name in _SHAPING:
            return _passed(receiver)
    return {name for child in ast.iter_child_nodes(node) for name in _passed(child)}


def _is_plain(statement: ast.stmt) -> bool:
    """An assignment, expression or return all of whose parts are evaluated, once."""
    conditional = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.NamedExpr, ast.Yield, ast.YieldFrom, ast.Await)
    repeated = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    return isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return)) and not any(
        isinstance(node, (*conditional, *repeated)) for node in ast.walk(statement)
    )


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every list of statements that run one after another, but not those of nested functions."""
    for _, value in ast.iter_fields(node):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            yield value
            for statement in value:
                if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    yield from _blocks(statement)
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, (ast.ExceptHandler, ast.match_case)):
                    yield from _blocks(item)


def _calls(node: ast.AST) -> Iterator[tuple[ast.Call, str, str]]:
    """Calls `self.name(variable)`, in the order of the text: the call, the name, the variable."""
    calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
    for call in sorted(calls, key=lambda call: (call.end_lineno, call.end_col_offset)):
        match call:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="self"), attr=name), args=[ast.Name(id=variable)], keywords=[]
            ):
                yield call, name, variable


class _Source(NamedTuple):
    """The forward of a class: its function without decorators, and the text that made it."""

    function: Any  # a types.FunctionType, which mypy would take for a method
    wrappers: list[types.FunctionType]  # what its decorators made of it, the outermost first
    module: ast.Module
    definition: ast.FunctionDef  # within the module

    def code(self) -> types.CodeType | None:
        """Compile the definition, in the module, since a few instructions depend on what surrounds it."""
        names = self.function.__qualname__.split(".")
        code = compile(self.module, self.function.__code__.co_filename, "exec", dont_inherit=True)
        for name in names:
            nested = [c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name]
            if len(nested) != 1:
                return None
            code = nested[0]
        return code


def _source(cls: type[nn.Module]) -> _Source | None:
    """None if the text is not there, is not what runs, or could not be run anew."""
    wrappers: list[types.FunctionType] = []
    function: Any = cls.forward
    while isinstance(function, types.FunctionType) and hasattr(function, "__wrapped__"):
        wrappers.append(function)
        function = function.__wrapped__
        if sum(cell.cell_contents is function for cell in wrappers[-1].__closure__ or ()) != 1:
            return None
    # A closure of the function itself, such as that of super() without arguments, may hold anything.
    if not isinstance(function, types.FunctionType) or function.__closure__:
        return None
    try:
        module = ast.parse("".join(inspect.findsource(function)[0]))
    except (OSError, SyntaxError, ValueError):
        return None
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and node.name == function.__name__:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first == function.__code__.co_firstlineno:
                source = _Source(function, wrappers, module, node)
                return source if source.code() == function.__code__ else None
    return None


def _rewritten(cls: type[nn.Module], groups: _Calls) -> types.FunctionType:
    """The forward of `cls` with the calls of each group made at once, where the first of them was."""
    source = _source(cls)
    assert source is not None
    for number, group in enumerate(groups):
        results = {name: f"_group{number}_{name}" for name in group}
        block, index = next(
            (block, index)
            for block in _blocks(source.definition)
            for index, statement in enumerate(block)
            if _is_plain(statement) and any(name in group for _, name, _ in _calls(statement))
        )
        variable = next(variable for _, name, variable in _calls(block[index]) if name in group)
        for statement in block[index:]:
            for call, name, _ in _calls(statement):
                if name in results:
                    _Replace(call, ast.Name(results[name], ast.Load())).visit(statement)
        layers = ", ".join(f"self.{name}" for name in group)
        (together,) = ast.parse(f"{', '.join(results.values())} = self._linear_group({variable}, {layers})").body
        for node in ast.walk(together):
            ast.copy_location(node, block[index])
        block.insert(index, together)
    for node in ast.walk(source.definition):
        match node:
            case ast.Call(func=ast.Name("apply_rotary_pos_emb") as apply, args=[_, _, _, _], keywords=[]):
                node.func = ast.copy_location(ast.Attribute(_named("self", node), "_rotary", ast.Load()), apply)
                node.args.insert(0, apply)
    code = source.code()
    assert code is not None
    forward = _like(source.function, code, None)
    for wrapper in reversed(source.wrappers):
        inner = inspect.getattr_static(wrapper, "__wrapped__")
        cells = [types.CellType(forward) if c.cell_contents is inner else c for c in wrapper.__closure__ or ()]
        outer = _like(wrapper, wrapper.__code__, tuple(cells))
        outer.__dict__["__wrapped__"] = forward
        forward = outer
    return forward


def _named(name: str, at: ast.AST) -> ast.expr:
    return ast.copy_location(ast.Name(name, ast.Load()), at)


def _like(function: types.FunctionType, code: types.CodeType, closure: Any) -> types.FunctionType:
    new = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    new.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(new, function)
    del new.__dict__["__wrapped__"]
    return new


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return ast.copy_location(self.new, node) if node is self.old else super().visit(node)
