"""The producer's forward pass and what streaming costs it, against the matrix peak and plain transformers.

    python benchmarks/producer_forward.py [--shape qwen3-8b|qwen3.6-27b|tiny] [--layers N] [--device cuda]
                                          [--repeats 5] [--json]

A target of the shape, or of its first layers, with random weights, five taps. On equal lengths the reference is the
time that the multiply-adds of the layers up to the last tap would take at the peak of a large bf16 product, measured in
the same run. On a mix of lengths as chats have them (log-normal, 350 tokens on average, 3,072 at most) the peer is the
same model with `output_hidden_states=True` on the same padded batches with their masks, and tokens are real tokens.
With the stream on, every block is summed on the device and copied into a ring slot by the GPU, as in a run; its
reference is the same blocks without. Compiling counts as time of its own.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from report import publish, row

from producer.compiled import compile_and_warm_up
from producer.forward import features_into
from producer.padding import batches
from producer.stage import make_stage
from producer.taps import Taps
from producer.target import Target, as_target
from protocol.arena import Arena, create_arena
from protocol.pinning import pin

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    # 24.4 billion layer parameters, 48 recurrent layers and 16 with attention.
    "qwen3.6-27b": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
}
BLOCK_TOKENS = 4096
SLOTS = 4

Samples = list[NDArray[np.int32]]


def make_target(shape: str, layers: int, device: str) -> Target:
    sizes = SHAPES[shape] | {"num_hidden_layers": layers}
    kind = {"model_type": "qwen3"} | sizes | {"tie_word_embeddings": False, "max_position_embeddings": 40960}
    config = transformers.AutoConfig.for_model(**kind)
    auto: Any = transformers.AutoModelForCausalLM
    with torch.device(device):
        model = auto.from_config(config, dtype=torch.bfloat16)
    facts = sizes | {"num_layers": sizes["num_hidden_layers"], "model": shape}
    return replace(as_target(model, facts), padding_mask=False)


def lengths_of_a_mix(tokens: int) -> list[int]:
    draw = np.random.default_rng(1)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(int(np.clip(np.exp(draw.normal(5.6, 0.9)), 8, 3072)))
    return lengths


def make_blocks(lengths: Sequence[int], vocabulary: int, most: int) -> list[Samples]:
    """Samples of similar length together, at most `most` tokens a block, as a step's plan cuts them."""
    draw = np.random.default_rng(0)
    blocks: list[Samples] = [[]]
    for length in sorted(lengths, reverse=True):
        if sum(map(len, blocks[-1])) + length > most:
            blocks.append([])
        blocks[-1].append(draw.integers(0, vocabulary, length).astype(np.int32))
    return blocks


def seconds(actions: dict[str, Callable[[], object]], repeats: int, device: str) -> dict[str, float]:
    """The medians of `repeats` rounds, after one that is not counted. In turn: a GPU's clock falls as it gets warm."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(repeats + 1):
        for name, action in actions.items():
            _wait(device)
            started = time.perf_counter()
            action()
            _wait(device)
            times[name].append(time.perf_counter() - started)
    return {name: float(np.median(found[1:])) for name, found in times.items()}


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


class Products:
    """Large bf16 products, half a second of them on an H200: what its matrix units reach when they are warm."""

    def __init__(self, device: str) -> None:
        self._size, self._count = (8192, 350) if device != "cpu" else (1024, 8)
        shape = (self._size, self._size)
        self._left, self._right = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))

    @property
    def flop(self) -> int:
        return self._count * 2 * self._size**3

    def __call__(self) -> None:
        for _ in range(self._count):
            self._left @ self._right


def plain(target: Target, blocks: Sequence[Samples]) -> None:
    """transformers as one would use it, without a head's logits."""
    for block in blocks:
        for places in batches([len(sample) for sample in block]):
            rows = [block[place] for place in places]
            ids = torch.zeros((len(rows), len(rows[0])), dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for line, sample in enumerate(rows):
                ids[line, : len(sample)] = torch.from_numpy(sample)
                mask[line, : len(sample)] = 1
            with torch.inference_mode():
                target.model.model(
                    input_ids=ids.to(target.device),
                    attention_mask=mask.to(target.device),
                    output_hidden_states=True,
                    use_cache=False,
                )


class Runner:
    """Blocks through the producer's own forward pass, with or without the way into a ring."""

    def __init__(self, target: Target, taps: Taps, width: int) -> None:
        self._target, self._taps = target, taps
        self._out = torch.empty((4 * BLOCK_TOKENS, width), dtype=torch.bfloat16, device=target.device)
        slot_bytes = BLOCK_TOKENS * width * 2
        fd = create_arena(SLOTS, slot_bytes, 1 << 40)
        self._arena = Arena(fd, SLOTS, slot_bytes)
        os.close(fd)
        if target.device.type == "cuda":
            pin(torch.cuda.cudart(), *self._arena.location, "the ring", torch.cuda.synchronize)
        self._stage = make_stage(target, slot_bytes, width)

    def compute(self, blocks: Sequence[Samples]) -> None:
        for block in blocks:
            features_into(self._out[: sum(map(len, block))], self._target, self._taps, block)

    def stream(self, blocks: Sequence[Samples]) -> None:
        waiting = []
        for place, block in enumerate(blocks):
            tokens = sum(map(len, block))
            slot = torch.frombuffer(self._arena.slot(place % SLOTS), dtype=torch.bfloat16)
            piece = slot[: tokens * self._out.shape[1]].view(tokens, -1)
            out = self._stage.begin([piece])
            features_into(out, self._target, self._taps, block)
            waiting.append(self._stage.end(out, [piece]))
            if len(waiting) >= self._stage.ahead:
                waiting.pop(0).wait()
        for filled in waiting:
            filled.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, help="all of them when left out; 8 at least")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--mix-tokens", type=int, default=120_000)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    device = asked.device
    torch.manual_seed(0)
    sizes = SHAPES[asked.shape]
    layers = asked.layers or sizes["num_hidden_layers"]
    target = make_target(asked.shape, layers, device)
    tap_ids = [round(1 + place * (layers - 4) / 4) for place in range(5)]
    last = max(tap_ids) + 1
    weights = sum(parameter.numel() for layer in target.layers[:last] for parameter in layer.parameters())
    products = Products(device)
    long = 1024 if device != "cpu" else 64
    equal = make_blocks([long] * (16 * BLOCK_TOKENS // long), sizes["vocab_size"], 4 * BLOCK_TOKENS)
    mix = make_blocks(lengths_of_a_mix(asked.mix_tokens), sizes["vocab_size"], BLOCK_TOKENS)
    tokens, equal_tokens = (sum(len(sample) for block in blocks for sample in block) for blocks in (mix, equal))
    padded = sum(
        len(places) * len(block[places[0]]) for block in mix for places in batches([len(sample) for sample in block])
    )
    with Taps(target.layers, tap_ids) as taps:
        runner = Runner(target, taps, len(tap_ids) * sizes["hidden_size"])
        before = {
            "plain": lambda: plain(target, mix),
            "eager": lambda: runner.compute(mix),
            "equal eager": lambda: runner.compute(equal),
        }
        took = seconds(before, max(1, asked.repeats // 2), device)
        started = time.perf_counter()
        compile_and_warm_up(target, taps)
        compile_s = time.perf_counter() - started
        took |= seconds(
            {
                "products": products,
                "equal": lambda: runner.compute(equal),
                "mix": lambda: runner.compute(mix),
                "stream": lambda: runner.stream(mix),
            },
            asked.repeats,
            device,
        )
    peak = products.flop / took["products"]
    nbytes = tokens * len(tap_ids) * sizes["hidden_size"] * 2
    rows = [
        row(f"16 samples of {long} a pass, against the peak", equal_tokens / took["equal"], "tokens/s",
            peak / (2 * weights)),
        row(f"16 samples of {long} a pass, against the same without compiling", equal_tokens / took["equal"],
            "tokens/s", equal_tokens / took["equal eager"]),
        row("mix, against output_hidden_states=True", tokens / took["mix"], "tokens/s",
            tokens / took["plain"]),
        row("mix, against the same without compiling", tokens / took["mix"], "tokens/s", tokens / took["eager"]),
        row("mix, the stream on, against off", tokens / took["stream"], "tokens/s", tokens / took["mix"]),
        row("mix, the stream on: bytes, against a link of 55 GB/s", nbytes / took["stream"] / 1e9, "GB/s", 55.0),
        row("mix: share of padding, aim 5 %", 1 - tokens / padded, "", 0.05),
        row("peak of large products", peak / 1e12, "TFLOP/s", peak / 1e12),
        row("compiling and warming up, aim 60 s", compile_s, "s", 60.0),
    ]  # fmt: skip
    publish(rows, asked.json)


if __name__ == "__main__":
    main()
