"""Generates text from a GGUF file, computing with its quantized weights as they are.

python examples/generate.py --gguf model.gguf --prompt "Why is the sky blue?"
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from transformers import CompileConfig, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

import ktlinear

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def compiled() -> dict[str, object]:
    """Options of `generate` with which each token is one call of compiled code: a cache of fixed size, and
    torch.compile, which transformers by itself leaves out on CPUs. The first answer takes half a minute longer.
    """
    # What torch.compile asserts of every tensor of the graph, over a thousand a token, takes 7 % of SmolLM2's time.
    options = {"size_asserts": False, "alignment_asserts": False}
    # torch.compile takes options or a mode, and the config would name one by itself.
    config = CompileConfig(mode=None, fullgraph=True, options=options)  # type: ignore[arg-type]
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config}


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str) -> torch.Tensor:
    """The prompt's tokens [1, length], as a turn of a chat if the tokenizer knows how a chat is written."""
    if not tokenizer.chat_template:
        return tokenizer(prompt, return_tensors="pt").input_ids
    chat = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).input_ids


class _Clock(TextStreamer):
    """Prints tokens as they come, and notes when the first and the last one came."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        super().put(value)


@torch.inference_mode()
def stream(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, max_new_tokens: int, **options: object
) -> str:
    """Prints the model's greedy answer as it is generated. Returns a line on how fast that was."""
    ids = encode(tokenizer, prompt)
    clock = _Clock(tokenizer)
    start = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        streamer=clock,
        pad_token_id=tokenizer.pad_token_id,
        **options,
    )
    _, *times = clock.times  # the prompt comes first
    first, last, count = times[0], times[-1], len(times)
    decode = f", then {(count - 1) / (last - first):.1f} tokens/s" if count > 1 else ""
    return f"{ids.shape[1]} tokens of prompt in {first - start:.2f} s{decode} ({count} tokens)"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", required=True, metavar="FILE", help="the model, a .gguf file (llama or qwen family)")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the question, or the text to go on with")
    parser.add_argument(
        "--max-new-tokens", type=int, default=256, metavar="N", help="length of the answer (%(default)s)"
    )
    parser.add_argument("--threads", type=int, metavar="T", help=f"threads ({torch.get_num_threads()})")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="type of the activations (%(default)s)")
    parser.add_argument("--compile", action="store_true", help="torch.compile the decoding: faster, but slow to start")
    options = parser.parse_args(arguments)
    for name in ("max_new_tokens", "threads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"argument --{name.replace('_', '-')}: must be at least 1, got {value}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        model, tokenizer = ktlinear.from_gguf(options.gguf, dtype=DTYPES[options.dtype], fuse=True, fast_norms=True)
    except (OSError, ValueError, ImportError) as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 1
    more = compiled() if options.compile else {}
    print(stream(model, tokenizer, options.prompt, options.max_new_tokens, **more), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
