"""A target divided over two GPUs against the same one on one: the same features, and how fast.

    python benchmarks/tensor_parallel.py [--shape qwen3-8b|tiny] [--device cuda|cpu] [--layers 12] [--compile] [--json]

A target of the shape's width with random weights and fewer layers is written to a folder, and loaded from there as a
producer loads it: whole by this process, then divided over this process and a follower. Both compute the same samples
in bf16, and the whole one in fp32 too: the errors of both against that (99th percentile, relative to the states' size)
are compared, since two arrangements of one model differ by rounding. Tokens a second are of equal lengths, one pass
each, eager unless `--compile`. The weights that a device holds are compared with what `draftwire run` plans for it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from report import publish, row
from safetensors.torch import load_file

from producer.compiled import compile_and_warm_up
from producer.config import TargetConfig
from producer.division import elsewhere_bytes
from producer.forward import one_batch
from producer.generate import greedy_answers
from producer.locate import weight_size
from producer.ranks import loaded
from producer.taps import Taps
from producer.target import Target
from producer.target_io import write_target_io

# The vocabulary is not measured, and its size is mostly time to write it.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "vocab_size": 32768,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
}
LENGTHS = (512, 480, 301, 77, 12)
PERCENTILE = 99.0

Samples = Sequence[NDArray[np.int32]]


class Found:
    """What one arrangement computed. Features are `[tokens, taps * H]` in fp32 on the host."""

    def __init__(self, target: Target, taps: Taps, samples: Samples, equal: Samples, repeats: int, io: Path) -> None:
        self.together = one_batch(target, taps, samples).float().cpu()
        self.weight_bytes = sum(
            getattr(weight, "_local_tensor", weight).nbytes for weight in set(target.model.parameters())
        )
        write_target_io(io, target, "weights")
        self.ends = load_file(io)
        self.answers = greedy_answers(
            target, [sample[:12] for sample in samples], max_new_tokens=16, stop_ids=frozenset()
        )
        self.tokens_a_second = sum(map(len, equal)) / _median_s(lambda: one_batch(target, taps, equal), target, repeats)


def _median_s(action: Callable[[], object], target: Target, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        _wait(target)
        started = time.perf_counter()
        action()
        _wait(target)
        times.append(time.perf_counter() - started)
    return float(np.median(times[1:]))


def _wait(target: Target) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)


def write_target(folder: Path, shape: str, layers: int, device: str) -> None:
    sizes = SHAPES[shape] | {"num_hidden_layers": layers, "tie_word_embeddings": False}
    auto: Any = transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    with torch.device(device):
        model = auto.from_config(transformers.AutoConfig.for_model("qwen3", **sizes), dtype=torch.bfloat16)
    model.save_pretrained(folder)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    scale = float(expected.square().mean().sqrt())
    return float(np.percentile((found - expected).abs().numpy(), PERCENTILE)) / scale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny", choices=sorted(SHAPES))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    draw = np.random.default_rng(0)
    vocabulary, hidden = SHAPES[asked.shape]["vocab_size"], SHAPES[asked.shape]["hidden_size"]
    samples = [draw.integers(0, vocabulary, length).astype(np.int32) for length in LENGTHS]
    rows_of_equal, length = (16, 1024) if asked.device == "cuda" else (4, 64)
    equal = [draw.integers(0, vocabulary, length).astype(np.int32) for _ in range(rows_of_equal)]
    tap_ids = tuple(np.unique(np.linspace(0, asked.layers - 1, 5).astype(int)).tolist())
    first = "cuda:0" if asked.device == "cuda" else "cpu"
    found: dict[int, Found] = {}
    planned_bytes: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "target"
        write_target(folder, asked.shape, asked.layers, asked.device)
        fp32 = TargetConfig(dtype="float32")
        with loaded(folder, fp32, [first], folder) as target, Taps(target.layers, tap_ids) as taps:
            exact = one_batch(target, taps, samples).cpu()
        del target  # before the next one is loaded
        for ranks in (1, 2):
            config = TargetConfig(dtype="bfloat16", tensor_parallel=ranks)
            devices = [f"cuda:{rank}" if asked.device == "cuda" else "cpu" for rank in range(ranks)]
            planned_bytes[ranks] = weight_size(folder)[1] - elsewhere_bytes(folder, config)
            with (
                loaded(folder, config, devices, Path(name) / "ranks.log") as target,
                Taps(target.layers, tap_ids) as taps,
            ):
                if asked.compile:
                    compile_and_warm_up(target, taps)
                found[ranks] = Found(target, taps, samples, equal, asked.repeats, Path(name) / "io.safetensors")
            del target
            if asked.device == "cuda":
                torch.cuda.empty_cache()
    whole, divided = found[1], found[2]
    if not all(torch.equal(divided.ends[key], tensor) for key, tensor in whole.ends.items()):
        raise SystemExit("the embedding or the head of the divided target is not the whole one's")
    rows = []
    for place, tap in enumerate(tap_ids):
        columns = slice(place * hidden, (place + 1) * hidden)
        truth, expected, ours = exact[:, columns], whole.together[:, columns], divided.together[:, columns]
        errors = error(ours, truth), error(expected, truth)
        cosine = float(torch.nn.functional.cosine_similarity(ours, expected, dim=-1).mean())
        rows += [
            row(f"tap {tap}: mean cosine, two devices against one, aim 0.999", cosine, "", 0.999),
            row(f"tap {tap}: p99 error of two devices, against that of one", errors[0], "", errors[1]),
        ]
    said, meant = (np.concatenate(each.answers) for each in (divided, whole))
    rows += [
        row("answers: share of the same ids", float((said == meant).mean()), "", 1.0),
        row("weights on a device of two, against the plan", divided.weight_bytes / 1e9, "GB", planned_bytes[2] / 1e9),
        row("weights on a device of two, against one", divided.weight_bytes / 1e9, "GB", whole.weight_bytes / 1e9),
        row(
            f"{rows_of_equal} samples of {length} a pass, two devices against one",
            divided.tokens_a_second, "tokens/s", whole.tokens_a_second,
        ),
    ]  # fmt: skip
    publish(rows, asked.json)


if __name__ == "__main__":
    main()
