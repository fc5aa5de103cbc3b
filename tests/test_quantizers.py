"""``kt::quantize``: as good as ggml's quantizers, the same on every tier, weighted by an importance."""

from __future__ import annotations

import gguf
import pytest
import torch
from test_ops import QUANTIZED, oracle_dequantize

import ktlinear
from ktlinear import WeightType, ops

kt = torch.ops.kt

# The error of ggml 0.13's quantizers, on normal weights [256, 2048] (`normal_weights`): the RMS of the differences
# relative to that of the weights, without an importance; with `importances`, and both sums weighted by them.
GGML_ERRORS: dict[str, tuple[float | None, float]] = {
    "Q4_0": (0.0859, 0.0753),
    "Q4_1": (0.0783, 0.0608),
    "Q5_0": (0.0427, 0.0374),
    "Q5_1": (0.0379, 0.0295),
    "Q8_0": (0.0053, 0.0053),
    "Q2_K": (0.2969, 0.2171),
    "Q3_K": (0.1507, 0.1276),
    "Q4_K": (0.0714, 0.0620),
    "Q5_K": (0.0361, 0.0319),
    "Q6_K": (0.0177, 0.0155),
    "IQ4_NL": (0.0761, 0.0682),
    "IQ4_XS": (0.0767, 0.0690),
    "MXFP4": (0.1149, 0.1144),
    "NVFP4": (0.0953, 0.0955),
    "IQ3_S": (0.1662, 0.1068),
    "IQ3_XXS": (0.2130, 0.1255),
    "IQ2_S": (0.2650, 0.2090),
    "IQ2_XS": (None, 0.2229),
    "IQ2_XXS": (None, 0.3562),
    "IQ1_M": (0.5812, 0.3530),
    "IQ1_S": (None, 0.4176),
}
IGNORE_IMPORTANCE = {WeightType.Q8_0, WeightType.TQ1_0, WeightType.TQ2_0}


def normal_weights() -> torch.Tensor:
    return torch.randn(256, 2048)


def importances(k: int) -> torch.Tensor:
    """From almost nothing to 1, a tenth of the inputs having half of the sum."""
    return ((torch.arange(k) + 0.5) / k)[torch.randperm(k)] ** 4


def error(rows: torch.Tensor, weight: torch.Tensor, t: WeightType, importance: torch.Tensor | None = None) -> float:
    values = oracle_dequantize(rows, t).double()
    q = torch.ones(()) if importance is None else importance.double()
    return (((values - weight).square() * q).sum() / (weight.double().square() * q).sum()).sqrt().item()


def maybe_ones(t: WeightType, k: int) -> torch.Tensor | None:
    return torch.ones(k) if ops.needs_importance(t) else None


@pytest.mark.parametrize("name", list(GGML_ERRORS))
def test_errors_are_not_above_ggmls(isa: str, name: str) -> None:
    t = WeightType[name]
    weight = normal_weights()
    importance = importances(2048)
    plain, weighted = GGML_ERRORS[name]
    if plain is not None:
        assert error(kt.quantize(weight, t), weight, t) < 1.01 * plain
    assert error(kt.quantize(weight, t, importance), weight, t, importance) < 1.01 * weighted


@pytest.mark.parametrize("t", QUANTIZED)
def test_importance_lessens_the_weighted_error(isa: str, t: WeightType) -> None:
    weight, importance = torch.randn(64, 1024), importances(1024)
    without = kt.quantize(weight, t, maybe_ones(t, 1024))
    rows = kt.quantize(weight, t, importance)
    if t in IGNORE_IMPORTANCE:
        assert torch.equal(rows, without)
    else:
        assert error(rows, weight, t, importance) < 0.98 * error(without, weight, t, importance)


@pytest.mark.parametrize("t", QUANTIZED)
def test_all_tiers_give_the_same_bytes(isa: str, t: WeightType) -> None:
    weight = torch.randn(7, 1280) * torch.rand(7, 1).exp2()
    weight[torch.rand(7, 1280) < 0.02] *= 6
    importance = importances(1280)
    rows, weighted = kt.quantize(weight, t, maybe_ones(t, 1280)), kt.quantize(weight, t, importance)
    with ktlinear.use_isa(ktlinear.available_isas()[-1]):
        assert torch.equal(rows, kt.quantize(weight, t, maybe_ones(t, 1280)))
        assert torch.equal(weighted, kt.quantize(weight, t, importance))


@pytest.mark.parametrize("t", QUANTIZED)
def test_rows_do_not_depend_on_their_neighbours_or_the_dtype(isa: str, t: WeightType) -> None:
    f = ops.FORMATS[t]
    weight = torch.randn(3, 2, 7 * f.block).half()
    rows = kt.quantize(weight, t, maybe_ones(t, weight.shape[-1]))
    assert rows.shape == (3, 2, 7 * f.block_bytes)
    for blocks in (1, 2, 5):
        part = weight[..., : blocks * f.block]
        assert torch.equal(
            kt.quantize(part.float(), t, maybe_ones(t, part.shape[-1])), rows[..., : blocks * f.block_bytes]
        )
    importance = importances(weight.numel()).view(weight.shape)
    rows = kt.quantize(weight, t, importance)
    for i in range(3):
        for j in range(2):
            assert torch.equal(kt.quantize(weight[i, j], t, importance[i, j]), rows[i, j])
    strided = importance.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(kt.quantize(weight, t, strided), rows)


@pytest.mark.parametrize("t", QUANTIZED)
def test_only_ratios_of_importance_matter(isa: str, t: WeightType) -> None:
    weight, importance = torch.randn(5, 512), importances(512)
    rows = kt.quantize(weight, t, importance)
    for factor in (2.0**100, 2.0**-60):
        assert torch.equal(kt.quantize(weight, t, importance * factor), rows)


@pytest.mark.parametrize("t", QUANTIZED)
def test_inputs_without_importance_are_still_quantized(isa: str, t: WeightType) -> None:
    """An expert that no text has reached has zeros; a few more may be zero by chance."""
    weight = torch.randn(9, 512)
    zeros = torch.zeros(512)
    rows = kt.quantize(weight, t, zeros)
    assert torch.equal(rows, kt.quantize(weight, t, torch.ones(512)))
    some = torch.where(torch.rand(512) < 0.3, 0.0, torch.rand(512))
    values = oracle_dequantize(kt.quantize(weight, t, some), t)
    assert values.isfinite().all()
    assert torch.nn.functional.cosine_similarity(values.flatten(), weight.flatten(), dim=0) > 0.5


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("t", QUANTIZED)
def test_constant_and_extreme_weights(isa: str, t: WeightType, weighted: bool) -> None:
    importance = importances(512) if weighted else maybe_ones(t, 512)
    zeros = kt.quantize(torch.zeros(2, 512), t, importance)
    assert torch.equal(oracle_dequantize(zeros, t), torch.zeros(2, 512))
    for value in (65504.0, 3.0, -2.5, 1e-5, -65504.0):
        weight = torch.full((2, 512), value)
        rows = kt.quantize(weight, t, importance)
        values = oracle_dequantize(rows, t)
        assert values.abs().max() <= 1.75 * abs(value) + 1e-5
        # The largest scale of an NVFP4 block is 448; its smallest, and those of fp16, are subnormal.
        if abs(value) > 1e-3 and (t is not WeightType.NVFP4 or abs(value) < 2600):
            # Few points of a grid have equal elements.
            coarse = t in (WeightType.MXFP4, WeightType.NVFP4) or t.name.startswith(("IQ1", "IQ2", "IQ3"))
            assert error(rows, weight, t, importance) < (0.35 if coarse else 0.02 if weighted else 1e-3)
    spike = torch.zeros(1, 512)
    spike[0, 300] = 7.0
    values = oracle_dequantize(kt.quantize(spike, t, maybe_ones(t, 512)), t)
    assert values.isfinite().all() and values.argmax() == 300 and 4 < values[0, 300] < 10


@pytest.mark.parametrize("t", [t for t in QUANTIZED if ops.needs_importance(t)])
def test_types_of_two_bits_ask_for_an_importance(t: WeightType) -> None:
    with pytest.raises(RuntimeError, match=f"importance is None; expected one for weight_type {t.name}, as of an"):
        kt.quantize(torch.randn(1, 256), t)
    assert kt.quantize(torch.randn(1, 256), t, torch.ones(256)).shape == (1, ops.row_bytes(t, 256))
    assert ops.needs_importance(t.name.lower()) and not ops.needs_importance("Q4_K")


def test_where_gguf_can_quantize_bytes_are_equal_on_unusual_weights(isa: str) -> None:
    weight = torch.cat(
        [torch.randn(20, 512) * 10.0 ** torch.randint(-6, 5, (20, 1)), torch.randint(-3, 4, (20, 512)).float()]
    )
    weight.clamp_(-65000, 65000)
    for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"):
        expected = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[name])
        assert torch.equal(kt.quantize(weight, WeightType[name]), torch.from_numpy(expected)), name
