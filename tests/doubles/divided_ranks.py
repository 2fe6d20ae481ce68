"""Two ranks that hold one target after another, `python -P divided_ranks.py MODELS OUT [compile]`: what each target
gives whole and divided, as OUT/KIND.pt for every folder MODELS/KIND.

Ranks are processes of their own: a collective that goes wrong ends or stops a process, and no test with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from producer.compiled import compile_target
from producer.config import TargetConfig
from producer.drafter_init import write_drafter_init
from producer.follower import follow
from producer.forward import features_of
from producer.generate import greedy_answers
from producer.group import join_group
from producer.mirror import Command, commands, encode
from producer.selfcheck import self_check
from producer.taps import Taps
from producer.target import Target, load_target
from producer.target_io import write_target_io

DEVICES = ("cpu", "cpu")
WHOLE, DIVIDED = TargetConfig(dtype="float32"), TargetConfig(dtype="float32", tensor_parallel=2)
# All layers, one of them (which ends the pass, on both ranks), and two out of order.
TAPS = ((0, 1, 2, 3), (1,), (2, 0))
PLAIN = ("llama", "qwen3")  # of which a drafter can start


class Second:
    """Has the second rank run what this one runs."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def tell(self, command: Command) -> None:
        os.write(self._pipe, encode(command))


def samples() -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    draw = np.random.default_rng(0)
    return [draw.integers(0, 400, length).astype(np.int32) for length in (64, 60, 23, 7, 1)]


def features(target: Target, ids: tuple[int, ...]) -> torch.Tensor:
    out = np.empty((155, len(ids) * 32), np.float32)
    with Taps(target.layers, ids) as taps:
        assert features_of(target, taps, samples(), out) == 0
    return torch.from_numpy(out)


def observed(target: Target, kind: str, out: Path, compiled: bool) -> dict[str, Any]:
    """What a target gives; its written files lie in `out`."""
    out.mkdir(parents=True)
    parts = [getattr(weight, "_local_tensor", weight) for weight in target.layers.parameters()]
    found: dict[str, Any] = {"held": sum(part.numel() for part in parts)}
    found["features"] = [features(target, ids) for ids in TAPS]
    prompts = [sample[:20] for sample in samples()]
    found["answers"] = greedy_answers(target, prompts, max_new_tokens=5, stop_ids=frozenset({3, 399}))
    write_target_io(out / "target_io", target, "weights")
    if kind in PLAIN:
        write_drafter_init(out / "drafter_init", target, 2, "weights")
    padding_mask, checks = self_check(target, (0, 3), samples(), compiled=False)
    found["self_check"] = (padding_mask, [check.tap for check in checks])
    if compiled:  # last of all: they stay compiled
        compile_target(target, len(target.layers))
        found["compiled"] = [features(target, TAPS[0]) for _ in range(2)]
    return found


def first_rank(models: Path, out: Path, compiled: bool) -> None:
    store_fd = os.memfd_create("ranks")
    kinds = sorted(path.name for path in models.iterdir())
    ends = {kind: os.pipe() for kind in kinds}
    pipes = [f"{models / kind}={read_fd}" for kind, (read_fd, _) in ends.items()]
    given = [store_fd, *(read_fd for read_fd, _ in ends.values())]
    second = subprocess.Popen([sys.executable, "-P", __file__, str(store_fd), *pipes], pass_fds=given)
    join_group(0, DEVICES, store_fd)
    for kind, (_, pipe) in ends.items():
        whole = observed(load_target(models / kind, WHOLE, "cpu"), kind, out / f"{kind}-whole", False)
        target = replace(load_target(models / kind, DIVIDED, "cpu"), mirror=Second(pipe))
        divided = observed(target, kind, out / f"{kind}-divided", compiled)
        os.close(pipe)
        torch.save({"whole": whole, "divided": divided}, out / f"{kind}.pt")
    dist.destroy_process_group()
    sys.exit(second.wait())


def second_rank(store_fd: int, pipes: list[str]) -> None:
    join_group(1, DEVICES, store_fd)
    for folder, _, read_fd in (pipe.rpartition("=") for pipe in pipes):
        target = load_target(Path(folder), DIVIDED, "cpu")
        with os.fdopen(int(read_fd), "rb") as stream:
            follow(target, commands(stream))
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1].isdecimal():
        second_rank(int(sys.argv[1]), sys.argv[2:])
    else:
        first_rank(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] == ["compile"])
