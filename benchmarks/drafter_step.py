"""One drafter step against the matrix-product peak of the same device, measured in the same run.

    python benchmarks/drafter_step.py [--preset quickstart|qwen3-8b] [--device cpu|cuda] [--repeats 5] [--json]

The step is the trainer's own: context, drafter, fused head and loss, backward, clipping, AdamW on fp32 masters. The
reference is what the counted multiply-adds would take at the peak: three times those of the drafter (forward and both
gradients) and twice those of the frozen head (forward and one gradient).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from report import publish, row

from consumer.config import TrainConfig
from consumer.drafter import Drafter, initialise
from consumer.feed import DeviceBlock
from consumer.shape import DrafterShape
from consumer.trainer import Trainer
from consumer.zlab import tensor_shapes

PRESETS = {
    # samples, tokens a sample, anchors, peak's matrix size, shape
    "quickstart": (4, 154, 64, 1024, {"layers": 2, "block": 4, "hidden": 576, "mlp": 1536, "heads": (9, 3, 64)}),
    "qwen3-8b": (1, 3072, 512, 8192, {"layers": 5, "block": 16, "hidden": 4096, "mlp": 12288, "heads": (32, 8, 128)}),
}
VOCABULARY = {"quickstart": 49152, "qwen3-8b": 151936}


def make_shape(preset: str) -> DrafterShape:
    sizes = PRESETS[preset][4]
    heads, kv_heads, head_dim = sizes["heads"]
    return DrafterShape(
        hidden_size=sizes["hidden"],
        target_layer_ids=(1, 8, 14, 20, 27),
        num_layers=sizes["layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=sizes["mlp"],
        block_size=sizes["block"],
        rope_theta=1e5,
        rms_norm_eps=1e-5,
        vocab_size=VOCABULARY[preset],
        mask_token_id=3,
        layer_types=("full_attention",) * sizes["layers"],
        sliding_window=None,
        is_causal=None,
        num_target_layers=30,
        max_position_embeddings=8192,
        eos_token_ids=(2,),
        pad_token_id=2,
        bos_token_id=1,
        input_embedding_scale=1.0,
    )


def make_block(shape: DrafterShape, samples: int, tokens: int, device: torch.device) -> DeviceBlock:
    total = samples * tokens
    rng = np.random.default_rng(0)
    return DeviceBlock(
        step=0,
        micro_step=0,
        micro_steps=1,
        epoch=0,
        samples=np.arange(samples, dtype=np.int64),
        token_ids=rng.integers(4, 1000, total, dtype=np.int32),
        loss_mask=np.ones(total, np.uint8),
        offsets=np.arange(0, total + 1, tokens, dtype=np.int32),
        features=torch.randn(total, len(shape.target_layer_ids) * shape.hidden_size, device=device).bfloat16(),
    )


def median_s(action: Callable[[], None], repeats: int, device: torch.device) -> float:
    times = []
    for _ in range(repeats + 1):  # the first warms up
        started = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return float(np.median(times[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="quickstart")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    samples, tokens, anchors, peak_size, _ = PRESETS[arguments.preset]
    shape = make_shape(arguments.preset)
    if device.type == "cpu":
        torch.set_num_threads(1)

    left = torch.randn(peak_size, peak_size, device=device).bfloat16()
    peak = 2 * peak_size**3 / median_s(lambda: torch.matmul(left, left), arguments.repeats, device)

    drafter = Drafter(shape, torch.bfloat16).to(device)
    initialise(drafter, 0)
    vocabulary = torch.randn(shape.vocab_size, shape.hidden_size, device=device).bfloat16()
    trainer = Trainer(drafter, vocabulary, vocabulary, TrainConfig(anchors=anchors), total_steps=100)
    block = make_block(shape, samples, tokens, device)

    def step() -> None:
        trainer.micro_step(block)
        trainer.finish_step(1)

    seconds = median_s(step, arguments.repeats, device)
    sizes = tensor_shapes(shape)
    per_context = sum(np.prod(size) for name, size in sizes.items() if name == "fc.weight" or "k_proj" in name)
    per_context += sum(np.prod(size) for name, size in sizes.items() if "v_proj" in name)
    per_draft = sum(np.prod(size) for name, size in sizes.items() if len(size) == 2 and name != "fc.weight")
    drafts = samples * min(anchors, tokens - 1) * shape.block_size
    head_rows = samples * min(anchors, tokens - 1) * (shape.block_size - 1)
    work = 6 * (samples * tokens * per_context + drafts * per_draft)
    work += 4 * head_rows * shape.vocab_size * shape.hidden_size
    limit = float(work) / peak
    publish(
        [
            row("optimiser step", seconds * 1e3, "ms", limit * 1e3),
            row("context tokens trained", samples * tokens / seconds, "tokens/s", samples * tokens / limit),
            row("draft tokens trained", drafts / seconds, "tokens/s", drafts / limit),
        ],
        arguments.json,
    )


if __name__ == "__main__":
    main()
