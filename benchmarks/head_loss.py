"""Head and cross-entropy of a training step: ours against the libraries that fuse them, and the peak of products.

    python benchmarks/head_loss.py [--preset tiny|qwen3-8b] [--device cpu|cuda] [--repeats 5] [--json]

The work is that of one block: hidden states of the supervised slots against a frozen head, loss and its gradient. The
reference is the time that both products would take at the peak, measured in the same run; for memory, the logits of
all rows, once. liger-kernel and cut-cross-entropy are measured where they are installed and there is a GPU; neither is
needed by anything else. They give a sum, where ours also gives what the recipe asks of each slot: whether its greedy
choice is right, and weights that depend on the losses of a draft block (D-PACE).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from report import publish, row
from torch import Tensor

from consumer.loss import draft_loss

# Rows (blocks x slots), hidden size, vocabulary, size of the products that give the peak.
PRESETS = {"tiny": (64, 4, 64, 4096, 512), "qwen3-8b": (512, 16, 4096, 151936, 8192)}
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    supervised = torch.ones(labels.shape, dtype=torch.bool)
    supervised[:, 0] = False
    parts = draft_loss(hidden, head, labels, supervised)
    return parts.loss / parts.denominator


def liger(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    rows, wanted = hidden[:, 1:].flatten(0, 1), labels[:, 1:].flatten().to(hidden.device)
    found = LigerFusedLinearCrossEntropyFunction.apply(rows, head, wanted)
    return found[0] if isinstance(found, tuple) else found


def cut_cross_entropy(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    rows, wanted = hidden[:, 1:].flatten(0, 1), labels[:, 1:].flatten().to(hidden.device)
    return linear_cross_entropy(rows, head, wanted)  # type: ignore[no-any-return]


def measure(action: Callable[[], object], repeats: int, device: torch.device) -> float:
    """The median of `repeats`, after two that are not counted, in seconds."""
    times = []
    for _ in range(repeats + 2):
        _wait(device)
        started = time.perf_counter()
        action()
        _wait(device)
        times.append(time.perf_counter() - started)
    return float(np.median(times[2:]))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    blocks, slots, width, vocabulary, size = PRESETS[asked.preset]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(blocks, slots, width, generator=generator).to(device, torch.bfloat16).requires_grad_()
    head = (torch.randn(vocabulary, width, generator=generator) * width**-0.5).to(device, torch.bfloat16)
    labels = torch.randint(0, vocabulary, (blocks, slots), generator=generator)
    left = torch.randn(size, size, device=device).bfloat16()
    rows_of_all = blocks * (slots - 1)
    ways: dict[str, Loss] = {"ours": ours}
    if device.type == "cuda":
        ways |= {"liger-kernel": liger, "cut-cross-entropy": cut_cross_entropy}
    rows = []
    for name, way in ways.items():

        def step(way: Loss = way) -> None:
            hidden.grad = None
            way(hidden, head, labels).backward()  # type: ignore[no-untyped-call]

        try:
            step()
        except ImportError:
            continue
        held = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            held = torch.cuda.memory_allocated(device)
        seconds = measure(step, asked.repeats, device)
        peak = 2 * size**3 / measure(lambda: torch.matmul(left, left), asked.repeats, device)
        rows.append(row(f"{name}: time", seconds * 1e3, "ms", 4 * rows_of_all * width * vocabulary / peak * 1e3))
        if device.type == "cuda":
            extra = torch.cuda.max_memory_allocated(device) - held
            rows.append(row(f"{name}: memory", extra / 2**30, "GiB", rows_of_all * vocabulary * 2 / 2**30))
    publish(rows, asked.json)


if __name__ == "__main__":
    main()
