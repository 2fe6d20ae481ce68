"""Drafter steps against the matrix-product peak of the same device, measured in the same run.

    python benchmarks/trainer.py [--preset quickstart|qwen3-8b] [--case NAME ...] [--device cpu|cuda]
                                 [--repeats 5] [--json]

A step is the trainer's own: anchors and masks on the host, context, drafter, fused head and loss, backward, clipping,
AdamW on fp32 masters; where samples do not fit one block, several micro-steps, cut as the plan of a run cuts them. The
reference is the time that its floating-point operations, counted as in launch/flops.py, would take at the peak of a
large bf16 product, measured in turn with the steps: a GPU's clock falls as it gets warm. Memory is what the allocator
held at most; the first step is the time from a loaded drafter to the end of its step, all compiling counted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from report import publish, row

from consumer.config import TrainConfig
from consumer.drafter import Drafter, initialise
from consumer.feed import DeviceBlock
from consumer.gpu_step import masks_for
from consumer.shape import DrafterShape
from consumer.trainer import Trainer
from launch.flops import drafter_flop
from protocol.packing import Item, cut


class Case(NamedTuple):
    """A step: lengths of its samples, every token of which is supervised, anchors of each, and the bounds of a block,
    tokens and draft tokens."""

    lengths: tuple[int, ...]
    anchors: int
    most_tokens: int
    most_draft_tokens: int


def mix() -> tuple[int, ...]:
    """335 tokens on average, log-normal, 3,072 at most: as short chats are. About 4,000 tokens."""
    draw = np.random.default_rng(2)
    lengths = np.clip(np.exp(draw.normal(5.49, 0.8, 12)), 8, 3072)
    return tuple(int(length) for length in lengths)


# layers, block, hidden, mlp, (heads, kv heads, head dim), vocabulary, peak's matrix size, cases
PRESETS = {
    "quickstart": (2, 4, 576, 1536, (9, 3, 64), 49152, 1024, {"4x154": Case((154,) * 4, 64, 616, 1024)}),
    "qwen3-8b": (
        5,
        16,
        4096,
        12288,
        (32, 8, 128),
        151936,
        8192,
        {
            "1x3072": Case((3072,), 512, 3072, 8192),
            "2x2048": Case((2048,) * 2, 512, 4096, 16384),
            "2x768": Case((768,) * 2, 256, 1536, 8192),
            "mix-335": Case(mix(), 512, 4096, 8192),
        },
    ),
}


def make_shape(preset: str) -> DrafterShape:
    layers, block, hidden, mlp, (heads, kv_heads, head_dim), vocabulary, _, _ = PRESETS[preset]
    return DrafterShape(
        hidden_size=hidden,
        target_layer_ids=(1, 8, 14, 20, 27),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=mlp,
        block_size=block,
        rope_theta=1e5,
        rms_norm_eps=1e-5,
        vocab_size=vocabulary,
        mask_token_id=3,
        layer_types=("full_attention",) * layers,
        sliding_window=None,
        is_causal=None,
        num_target_layers=30,
        max_position_embeddings=8192,
        eos_token_ids=(2,),
        pad_token_id=2,
        bos_token_id=1,
        input_embedding_scale=1.0,
    )


def make_blocks(shape: DrafterShape, case: Case, device: torch.device) -> list[DeviceBlock]:
    """The blocks of a step, as one consumer gets them."""
    items = [
        Item(sample, length, min(case.anchors, length - 1) * shape.block_size)
        for sample, length in enumerate(case.lengths)
    ]
    return [
        make_block(shape, tuple(case.lengths[sample] for sample in spec.samples), device)
        for spec in cut(0, items, 1, case.most_tokens, case.most_draft_tokens)
    ]


def make_block(shape: DrafterShape, lengths: tuple[int, ...], device: torch.device) -> DeviceBlock:
    total = sum(lengths)
    rng = np.random.default_rng(0)
    return DeviceBlock(
        step=0,
        micro_step=0,
        micro_steps=1,
        epoch=0,
        samples=np.arange(len(lengths), dtype=np.int64),
        token_ids=rng.integers(4, 1000, total, dtype=np.int32),
        loss_mask=np.ones(total, np.uint8),
        offsets=np.cumsum([0, *lengths]).astype(np.int32),
        features=torch.randn(total, len(shape.target_layer_ids) * shape.hidden_size, device=device).bfloat16(),
    )


def in_turn(actions: list[Callable[[], object]], repeats: int, device: torch.device) -> list[float]:
    """The medians of `repeats` rounds, after two that are not counted, of three in a row each: the host is free to run
    ahead, as it is in a run."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(repeats + 2):
        for action, taken in zip(actions, times, strict=True):
            wait(device)
            started = time.perf_counter()
            for _ in range(3):
                action()
            wait(device)
            taken.append((time.perf_counter() - started) / 3)
    return [float(np.median(taken[2:])) for taken in times]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="quickstart")
    parser.add_argument("--case", action="append", help="of the preset; all of them when left out")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    peak_size, cases = PRESETS[arguments.preset][-2:]
    chosen = {name: case for name, case in cases.items() if not arguments.case or name in arguments.case}
    shape = make_shape(arguments.preset)
    if device.type == "cpu":
        torch.set_num_threads(1)

    left = torch.randn(peak_size, peak_size, device=device).bfloat16()
    rows = []
    drafter = Drafter(shape, torch.bfloat16).to(device)
    initialise(drafter, 0)
    vocabulary = torch.randn(shape.vocab_size, shape.hidden_size, device=device).bfloat16()
    head = vocabulary.clone()
    fields = msgspec.to_builtins(shape)
    for name, case in chosen.items():
        anchors = [min(case.anchors, length - 1) for length in case.lengths]
        tokens, drafts = sum(case.lengths), sum(anchors) * shape.block_size
        blocks = make_blocks(shape, case, device)
        started = time.perf_counter()
        masks = masks_for(drafter, case.most_tokens, case.most_draft_tokens)
        trainer = Trainer(drafter, vocabulary, head, TrainConfig(anchors=case.anchors), 100, masks)

        def step(trainer: Trainer = trainer, blocks: list[DeviceBlock] = blocks) -> None:
            for block in blocks:
                trainer.micro_step(block)
            trainer.finish_step(1)

        step()
        wait(device)
        first_s = time.perf_counter() - started
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds, product_s = in_turn([step, lambda: torch.matmul(left, left)], arguments.repeats, device)
        peak = 2 * peak_size**3 / product_s
        context = float(np.average(case.lengths, weights=anchors)) / 2
        limit = drafter_flop(fields, tokens, sum(anchors), context) / peak
        rows += [
            row(f"{name}: optimiser step", seconds * 1e3, "ms", limit * 1e3),
            row(
                f"{name}: rate",
                drafter_flop(fields, tokens, sum(anchors), context) / seconds / 1e12,
                "TFLOP/s",
                peak / 1e12,
            ),
            row(f"{name}: context tokens", tokens / seconds, "tokens/s", tokens / limit),
            row(f"{name}: draft tokens", drafts / seconds, "tokens/s", drafts / limit),
            row(f"{name}: first step", first_s, "s", 60.0),
        ]
        if device.type == "cuda":
            rows.append(row(f"{name}: memory", torch.cuda.max_memory_allocated() / 2**30, "GiB", 26.0))
        del trainer, blocks, masks, step
    publish(rows, arguments.json)


if __name__ == "__main__":
    main()
