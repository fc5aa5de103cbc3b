"""Which weight type a matrix gets: the rules that `patch`, ``python -m ktlinear quantize`` and `KtConfig` share."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from .ops import FORMATS, WeightType, row_bytes
from .ops import weight_type as to_weight_type

__all__ = ["TypeRules", "check_quantized_types", "fitting_type"]

# llama.cpp's rule for rows that a 256-element block does not divide.
NEXT_BEST = {
    WeightType.Q2_K: WeightType.Q4_0,
    WeightType.Q3_K: WeightType.Q4_0,
    WeightType.Q4_K: WeightType.Q5_0,
    WeightType.Q5_K: WeightType.Q5_1,
    WeightType.Q6_K: WeightType.Q8_0,
    WeightType.TQ1_0: WeightType.Q4_0,
    WeightType.TQ2_0: WeightType.Q4_0,
    WeightType.IQ1_S: WeightType.IQ4_NL,
    WeightType.IQ1_M: WeightType.IQ4_NL,
    WeightType.IQ2_XXS: WeightType.IQ4_NL,
    WeightType.IQ2_XS: WeightType.IQ4_NL,
    WeightType.IQ2_S: WeightType.IQ4_NL,
    WeightType.IQ3_XXS: WeightType.IQ4_NL,
    WeightType.IQ3_S: WeightType.IQ4_NL,
    WeightType.IQ4_XS: WeightType.IQ4_NL,
}

# What the layers do, by the names that transformers' models give them; the first role that matches.
ROLES = {
    "head": ("lm_head", "*.lm_head", "embed_out", "*.predictions.decoder"),
    "qkv": ("*.qkv_proj", "*.qkv", "*.query_key_value", "*.Wqkv", "*.W_pack"),
    "value": ("*.v_proj", "*.value", "*.v_lin", "*Attention.v"),
    "output": ("*.o_proj", "*.out_proj", "*.out_lin", "*Attention.o", "*attention.wo", "*attention.output.dense"),
    "down": ("*.down_proj", "*.fc2", "*.w2", "*.lin2", "*.linear2", "*.wo", "*.dense_4h_to_h", "*.output.dense"),
}

# llama.cpp's mixes Q2_K, Q3_K_M, Q4_K_M, Q5_K_M and Q6_K: the types of the layers that matter most. A pair is for the
# layers of `_more_bits` and for the others. Its exceptions for single architectures and first layers are left out.
MIXES: dict[WeightType, dict[str, tuple[WeightType, WeightType]]] = {
    WeightType.Q2_K: {role: (WeightType.Q3_K, WeightType.Q3_K) for role in ("value", "output", "down")},
    WeightType.Q3_K: {role: (WeightType.Q4_K, WeightType.Q4_K) for role in ("qkv", "value", "output", "down")},
    WeightType.Q4_K: {
        "qkv": (WeightType.Q5_K, WeightType.Q5_K),
        "value": (WeightType.Q6_K, WeightType.Q4_K),
        "down": (WeightType.Q6_K, WeightType.Q4_K),
    },
    WeightType.Q5_K: {
        "qkv": (WeightType.Q6_K, WeightType.Q6_K),
        "value": (WeightType.Q6_K, WeightType.Q5_K),
        "down": (WeightType.Q6_K, WeightType.Q5_K),
    },
    WeightType.Q6_K: {},
}


def fitting_type(weight_type: WeightType, k: int) -> WeightType | None:
    """`weight_type` if its block divides K, else the next best type whose block does, else None."""
    candidate: WeightType | None = weight_type
    while candidate is not None:
        try:
            row_bytes(candidate, k)
            return candidate
        except ValueError:
            candidate = NEXT_BEST.get(candidate)
    return None


def check_quantized_types(
    weight_type: WeightType | str | int, rules: Mapping[str, WeightType | str | int | None] | None
) -> None:
    """Check that everything asked for is a type that floats can be quantized to.

    Raises:
        TypeError: `rules` is not a mapping.
        ValueError: a type that is unknown, or a float type.
    """
    if rules is not None and not isinstance(rules, Mapping):
        raise TypeError(f"rules: expected a mapping of name patterns to types, got {type(rules).__name__}")
    accepted = [t.name for t in WeightType if FORMATS[t].block > 1]
    asked = {"weight_type": weight_type, **{f"rules[{p!r}]": t for p, t in (rules or {}).items() if t is not None}}
    for what, value in asked.items():
        kind = to_weight_type(value)
        if kind.name not in accepted:
            raise ValueError(f"{what}: {kind.name} is no type to quantize to; expected one of {', '.join(accepted)}")


class TypeRules:
    """The type that each layer of one model is to have.

    The first pattern of `rules` that matches a layer's name (`fnmatch`) decides. A layer that none matches gets
    `weight_type`; where that is a K-quant, it gets what llama.cpp's mix of that name gives it (Q4_K: that of Q4_K_M):
    the output head Q6_K, half of the value and down projections a better type, and so on; see `ROLES` and `MIXES`.
    The rule ``{"*": "Q4_K"}`` is therefore a model in nothing but Q4_K.

    Args:
        weight_type: a `WeightType`, its name or its GGML id.
        rules: pattern -> type, or None for a layer that is to stay as it is.
        names: the qualified names of the model's linear layers and embeddings.

    Raises:
        TypeError: `rules` is not a mapping.
        ValueError: an unknown type; a pattern that matches none of `names`.
    """

    def __init__(
        self,
        weight_type: WeightType | str | int,
        rules: Mapping[str, WeightType | str | int | None] | None,
        names: Collection[str],
    ) -> None:
        if rules is not None and not isinstance(rules, Mapping):
            raise TypeError(f"rules: expected a mapping of name patterns to types, got {type(rules).__name__}")
        self.default = to_weight_type(weight_type)
        self.rules = {pattern: None if t is None else to_weight_type(t) for pattern, t in (rules or {}).items()}
        for pattern in self.rules:
            if not any(fnmatchcase(name, pattern) for name in names):
                some = ", ".join(list(names)[:3]) + (", ..." if len(names) > 3 else "")
                raise ValueError(
                    f"rules: {pattern!r} matches no linear layer and no embedding of the model; its {len(names)} are "
                    f"named {some}"
                )
        self._depth: dict[str, int] = {}  # of a stack of layers, by its name
        for name in names:
            stack, layer = _layer(name)
            self._depth[stack] = max(self._depth.get(stack, 0), layer + 1)

    def pattern(self, name: str) -> str | None:
        """The rule that decides on `name`, or None."""
        return next((pattern for pattern in self.rules if fnmatchcase(name, pattern)), None)

    def default_type(self, name: str, head: bool = False) -> WeightType:
        """The type of a layer that no rule matches; `head`: its weight is tied to a token table."""
        mix = MIXES.get(self.default)
        if mix is None:
            return self.default
        role = "head" if head else _role(name)
        if role == "head":
            return WeightType.Q6_K
        stack, layer = _layer(name)
        more, other = mix.get(role, (self.default, self.default))
        return more if _more_bits(layer, self._depth.get(stack, 1)) else other


def _role(name: str) -> str:
    return next((role for role, patterns in ROLES.items() if any(fnmatchcase(name, p) for p in patterns)), "")


def _layer(name: str) -> tuple[str, int]:
    """The stack of layers that a module is part of, and its place: ("model.layers", 3) of "model.layers.3.mlp.up"."""
    match = re.match(r"(|.*?\.)(\d+)\.", name)
    return (match[1], int(match[2])) if match else ("", 0)


def _more_bits(layer: int, layers: int) -> bool:
    """llama.cpp's choice of half the layers: the first and last eighth, and every third in between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
