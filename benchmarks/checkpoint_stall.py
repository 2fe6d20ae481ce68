"""What a checkpoint takes from the step loop, against one copy of the same bytes measured in the same run.

    python benchmarks/checkpoint_stall.py [--parameters 50e6] [--device cpu|cuda] [--repeats 5] [--json]

A snapshot is fp32 masters and both moments of a drafter with about so many parameters. The product copies them into
memory that was allocated, touched and, for a GPU, pinned before the first step; the way before it copied them, and the
weights in bf16, into fresh pageable memory. The reference is one copy of the snapshot's bytes, in one piece, between
the same two memories: memcpy on a CPU, one transfer over the link from a GPU. Smaller is better.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import msgspec
import numpy as np
import torch
from report import publish, row
from trainer import make_shape

from consumer.drafter import Drafter
from consumer.shape import DrafterShape
from consumer.staging import Staging
from consumer.state import capture_weights, live_state
from consumer.zlab import tensor_shapes


def count(shape: DrafterShape) -> int:
    return sum(math.prod(size) for size in tensor_shapes(shape).values())


def shape_of(parameters: float) -> DrafterShape:
    """The narrowest drafter of the qwen3-8b preset's proportions with so many parameters."""
    widest = make_shape("qwen3-8b")
    for hidden in range(128, 16384, 128):
        sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden}
        heads = {"num_heads": hidden // 128, "num_kv_heads": max(1, hidden // 512)}
        shape = msgspec.structs.replace(widest, **sizes, **heads)
        if count(shape) >= parameters:
            return shape
    raise SystemExit(f"--parameters {parameters:g}: more than this benchmark makes")


def seconds(action: Callable[[], object], repeats: int, device: torch.device) -> float:
    """The median of `repeats` calls, after one that is not counted. What an action returns is dropped at once."""
    times = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return float(np.median(times[1:]))


def copy_seconds(memory: torch.Tensor, repeats: int, device: torch.device) -> float:
    """One copy of as many bytes from the device into `memory`, in one piece."""
    whole = torch.ones_like(memory, device=device)
    return seconds(lambda: memory.copy_(whole, non_blocking=True), repeats, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=50e6)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(1)

    with device:
        drafter = Drafter(shape_of(arguments.parameters), torch.bfloat16)
    optimiser = torch.optim.AdamW(drafter.parameters(), fused=True)
    for parameter in drafter.parameters():
        torch.nn.init.ones_(parameter)
        parameter.grad = torch.ones_like(parameter)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    shapes = {name: parameter.shape for name, parameter in drafter.named_parameters()}
    started = time.perf_counter()
    staging = Staging(shapes, device)
    prepared_s = time.perf_counter() - started

    state = live_state(drafter, optimiser)
    copy_s = copy_seconds(staging.memory, arguments.repeats, device)

    def before() -> object:
        return [tensor.to("cpu", copy=True) for tensor in state.values()], capture_weights(drafter)

    stall_s = seconds(lambda: staging.capture(state), arguments.repeats, device)
    before_s = seconds(before, arguments.repeats, device)
    pinned = "pinned" if device.type == "cuda" and staging.memory.is_pinned() else "pageable"
    publish(
        [
            row(f"stall of one snapshot, {count(drafter.shape):,} parameters", stall_s, "s", copy_s),
            row("the same into fresh pageable memory, as before", before_s, "s", copy_s),
            row(f"{pinned} memory for it, once, before the first step", prepared_s, "s", copy_s),
            row("bytes of a snapshot over its stall", staging.memory.nbytes / stall_s / 1e9, "GB/s",
                staging.memory.nbytes / copy_s / 1e9),
        ],
        arguments.json,
    )  # fmt: skip


if __name__ == "__main__":
    main()
