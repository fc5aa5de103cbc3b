"""``python -m benchmarks`` runs, and its numbers are consistent with each other. Nothing here depends on a speed."""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import small_llama

import ktlinear
from benchmarks import models, picture, report
from benchmarks import types as weight_types
from benchmarks.__main__ import arguments, run
from ktlinear.bench import cases, cli
from ktlinear.bench.timing import in_turn, ratio, spread
from ktlinear.ops import row_bytes

ROOT = Path(__file__).resolve().parent.parent


SMALL = ["--types", "F32,q4_0", "--m", "4,1", "--shapes", "96x160", "--quick", "--memory", "4"]


def test_a_small_run(tmp_path: Path) -> None:
    file, image = tmp_path / "results.json", tmp_path / "roofline.png"
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        *SMALL,
        "--threads",
        "2",
        "--json",
        str(file),
        "--picture",
        str(image),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text())
    assert results["machine"]["threads"] == 2
    check(results, packed=True)
    assert "N = 96, K = 160" in done.stdout and "times F.linear" in done.stdout
    assert image.read_bytes().startswith(b"\x89PNG")


def test_a_small_run_on_plain_rows() -> None:
    check(run(arguments([*SMALL, "--plain"])), packed=False)


def test_a_small_run_of_experts() -> None:
    results = run(arguments(["experts", *SMALL]))
    assert results["cells"] == results["odd_shapes"] == []
    cells = results["experts"]
    assert [(c["type"], c["n"], c["k"], c["m"]) for c in cells] == [
        (name, 96, 160, m) for name in ("F32", "Q4_0") for m in (1, 4)
    ]
    for cell in cells:
        nbytes = 96 * row_bytes(cell["type"], 192 if cell["packed"] else 160)
        assert cell["packed"] == (cell["type"] == "Q4_0")
        assert cell["experts_in_use"] == 8 if cell["m"] == 1 else 8 < cell["experts_in_use"] <= 32
        rate = cell["experts_in_use"] * nbytes / cell["seconds"]["median"]
        assert cell["of_read"] == pytest.approx(rate / cell["read"]["median"])
        assert cell["times_linears"]["median"] > 0 and (cell["times_flinears"] is None) == cell["packed"]
    text = report.text(results)
    assert "64 experts, 8 a token, N = 96, K = 160" in text and "T=4" in text and "falls by" not in text


def test_routes_read_every_expert_before_one_twice() -> None:
    routes = cases.routes(tokens=1, experts=20, top_k=3, count=12)
    assert sorted(torch.cat(routes[:6]).flatten().tolist()) == sorted(set(torch.cat(routes[:6]).flatten().tolist()))
    assert len(routes) == 12 and all(r.shape == (1, 3) for r in routes) and torch.equal(routes[6], routes[0])
    assert all(len(set(row)) == 3 for r in cases.routes(5, 20, 3, 2) for row in r.tolist())


def check(results: dict[str, Any], packed: bool) -> None:
    here = [c for c in results["cells"] if c["isa"] == results["machine"]["tier"]]
    assert [(c["type"], c["n"], c["k"], c["m"]) for c in here] == [
        (name, 96, 160, m) for name in ("F32", "Q4_0") for m in (1, 4)
    ]
    for cell in results["cells"]:
        for key in ("seconds", "flinear_seconds", "peak", "read", "times_flinear"):
            assert 0 < cell[key]["q1"] <= cell[key]["median"] <= cell[key]["q3"] < math.inf
        assert cell["packed"] == (packed and cell["type"] == "Q4_0")
        assert cell["operations"] == 2 * cell["m"] * 96 * 160
        # 160 elements are two and a half packed records: the last one is padded.
        k = 192 if cell["packed"] else 160
        assert cell["weight_bytes"] == 96 * row_bytes(cell["type"], k)
        assert cell["rate"] == pytest.approx(cell["operations"] / cell["seconds"]["median"])
        assert cell["of_roofline"] == pytest.approx(max(cell["of_peak"], cell["of_read"]))
        assert cell["repeats"] >= 3
    assert {(r["type"], *r["odd"]) for r in results["odd_shapes"]} == {("F32", 93, 155), ("Q4_0", 93, 128)}
    assert all(r["seconds"]["median"] > 0 and r["cost"] > -1 for r in results["odd_shapes"])
    assert results["calls"]["F.linear"]["of_flinear"] == 1
    assert all(c["seconds"]["median"] > 0 for c in results["calls"].values())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--types", "Q9"], "weight_type is 'Q9'"),
        (["--shapes", "64"], "shape is '64'; expected NxK"),
        (["--shapes", "64x0"], "shape is '64x0'; expected positive numbers"),
        (["--m", "0"], "'0' is not a positive integer"),
        (["--types", "Q4_0", "--shapes", "64x40"], "--types Q4_0: K has to be a multiple of 32 in one of the shapes"),
        (["--isa", "m68k"], "invalid choice: 'm68k'"),
        (["matrices"], "invalid choice: 'matrices'"),
        (["models", "--m", "4"], "--m: the models' own are measured"),
        (["models", "--plain"], "--plain: models are measured packed"),
        (["experts", "--picture", "x.png"], "--picture: the roofline is one of linears"),
    ],
)
def test_bad_arguments(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        arguments(argv)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_spread_and_ratio() -> None:
    assert spread([4.0, 1.0, 2.0, 3.0, 5.0]) == (3.0, 2.0, 4.0)
    assert ratio([2.0, 6.0, 4.0], [1.0, 2.0, 1.0]) == (3.0, 2.5, 3.5)


def test_in_turn_interleaves() -> None:
    order: list[str] = []

    def measure(name: str) -> float:
        order.append(name)
        return len(order)

    results = in_turn({"a": lambda: measure("a"), "b": lambda: measure("b")}, repeats=9, budget=0, least=3)
    assert order == ["a", "b"] * 3
    assert results == {"a": [1, 3, 5], "b": [2, 4, 6]}


def test_cliffs_are_flagged() -> None:
    def cell(m: int, rate: float) -> report.Cell:
        return {"isa": "x", "type": "F32", "n": 8, "k": 8, "m": m, "rate": rate * 1e9}

    assert report.cliffs([cell(4, 76), cell(1, 50), cell(2, 100)]) == []
    assert report.cliffs([cell(1, 50), cell(2, 100), cell(4, 74)]) == ["x F32 8 x 8: 100 at M = 2, 74 at M = 4"]


def test_many_types_make_a_map(tmp_path: Path) -> None:
    """A square for each type, M and shape; blank where the block does not divide K."""
    cells = [
        {"isa": "t", "n": 64, "k": k, "type": f"T{i}", "m": m, "of_roofline": (i + m) / 20}
        for k in (96, 256)
        for i in range(12)
        for m in (1, 4)
        if k == 256 or i < 6
    ]
    figure = picture.shares(cells, "title")
    assert [len(ax.texts) for ax in figure.axes] == [12, 24]
    assert figure.axes[1].texts[3].get_text() == "25"  # T1, M = 4
    picture.draw({"machine": {"tier": "t", "threads": 2}, "cells": cells}, tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 10_000


def test_models_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every runtime is measured in every round, and the ratios are those of one round's rates."""
    order: list[str] = []

    def runtime(name: str, **tasks: float) -> dict[str, Any]:
        def measure(task: str) -> float:
            order.append(f"{name} {task}")
            return tasks[task] * (1 + len(order))

        return {task: lambda task=task: measure(task) for task in tasks}

    fakes = iter([runtime("fp32", prefill=2, decode=1), runtime("ours", prefill=4, decode=3), runtime("c", decode=6)])
    monkeypatch.setattr(models, "of_transformers", lambda *args, **options: next(fakes))
    monkeypatch.setattr(models, "of_llama_cpp", lambda *args: None)
    monkeypatch.setattr(models.demo, "load_transformers", lambda file: None)
    monkeypatch.setattr(models.ktlinear, "from_gguf", lambda file, **options: (None, None))
    notes: list[str] = []
    cells = models.measure("model", tmp_path, 2, 3, notes)
    assert order == ["fp32 prefill", "ours prefill"] * 4 + ["fp32 decode", "ours decode", "c decode"] * 4
    assert [(c["runtime"], c["task"], c["repeats"]) for c in cells] == [
        ("transformers fp32", "prefill of 512", 3),
        ("ktlinear", "prefill of 512", 3),
        ("transformers fp32", "decode of 64", 3),
        ("ktlinear", "decode of 64", 3),
        ("ktlinear compiled", "decode of 64", 3),
    ]
    # Of the rounds (4, 5), (6, 7), (8, 9) of prefill, each times its rate.
    assert cells[1]["times"]["transformers fp32"]["median"] == pytest.approx(7 * 4 / (6 * 2))
    assert notes == ["model: llama.cpp was not measured (pip install -r requirements-models.txt)."]
    text = report.models_text(cells)
    assert "model, decode of 64" in text and "times transformers fp32" in text and text.count("compiled") == 1
    machine = {"threads": 2, "tier": "t"}
    figure = picture.bars({"machine": machine, "models": cells})
    assert [len(ax.patches) for ax in figure.axes] == [2, 3]
    picture.draw({"machine": machine, "cells": [], "models": cells}, tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_bench_of_own_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    parsed = parser.parse_args("--m 1,3 --n 96 --k 160 --types q4_0 --memory 4".split())
    cli.bench(parser, parsed)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Q4_0, N = 96, K = 160, packed")
    assert [line.split()[0] for line in lines[2:4]] == [
        "1",
        "3",
    ]
    assert all(float(cell) > 0 for line in lines[2:4] for cell in line.split())
    for argv, message in (
        ("--n 0", "'0' is not a positive integer"),
        ("--types Q9", "weight_type is 'Q9'"),
        ("--types Q4_K --k 160", "--k: 160 is no multiple of 256, the block of Q4_K"),
    ):
        with pytest.raises(SystemExit):
            cli.bench(parser, parser.parse_args(argv.split()))
        assert message in capsys.readouterr().err


def test_types_in_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_llama(hidden_size=256, intermediate_size=512, num_key_value_heads=4, tie_word_embeddings=True).eval()
    ids = torch.randint(97, (1, 40))
    monkeypatch.setattr(weight_types, "load", lambda: (model, ids, [torch.randint(97, (1, 64))]))
    monkeypatch.setattr(models.demo, "PREFILL", 20)
    monkeypatch.setattr(models.demo, "DECODE", 4)
    results = run(arguments("types --quick --types F32,Q4_K,IQ2_XXS".split()))
    baseline, cells = results["types"]["baseline"], {c["type"]: c for c in results["types"]["cells"]}
    assert list(cells) == ["F32", "Q4_K", "IQ2_XXS"]
    assert cells["F32"]["plain"] == {"perplexity": pytest.approx(baseline), "divergence": pytest.approx(0, abs=1e-6)}
    assert (cells["F32"]["bits"], cells["Q4_K"]["bits"], cells["IQ2_XXS"]["bits"]) == (32, 4.5, 2.0625)
    assert cells["IQ2_XXS"]["plain"] is cells["F32"]["importance"] is None
    layers = 2 * (4 * 256 * 256 + 3 * 256 * 512)
    assert cells["F32"]["megabytes"] == pytest.approx(4e-6 * layers)
    assert all(c[key]["median"] > 0 for c in cells.values() for key in ("prefill", "decode"))
    assert "IQ2_XXS" in report.text(results)

    # K is a multiple of 256 here: the same as what patch makes, computed exactly.
    with torch.inference_mode(), ktlinear.exact():
        assert torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:]).exp() == pytest.approx(baseline)
        ktlinear.patch(model, rules={"*.layers.*": "Q4_K", "*": None})
        loss = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:])
    assert cells["Q4_K"]["plain"]["perplexity"] == pytest.approx(loss.exp().item(), rel=1e-3)


def test_noise_stays_within_a_step_of_q4_1() -> None:
    model = small_llama()
    before = {name: layer.weight.detach().clone() for name, layer in weight_types.layers_of(model).items()}
    head = model.lm_head.weight.detach().clone()
    weight_types.leave_grid(model)
    for name, layer in weight_types.layers_of(model).items():
        blocks = before[name].view(-1, 32)
        half = (blocks.max(1).values - blocks.min(1).values)[:, None] / 30
        noise = (layer.weight.detach().view(-1, 32) - blocks) / half
        assert noise.abs().max() <= 1.001 and noise.std() == pytest.approx(3**-0.5, rel=0.05)
    assert torch.equal(model.lm_head.weight, head)
