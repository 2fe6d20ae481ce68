"""A rank other than the first of a divided target: `python -P -m producer.follower RANK STORE_FD COMMANDS_FD`.

Started by the first rank (`producer.ranks`), with which it dies. It loads its part of the target and runs what it is
told until the pipe ends. It knows nothing of a run: no ring, no coordinator, no folder of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from producer.compiled import compile_target
from producer.generate import answer_batch
from producer.group import Rank, join_group
from producer.mirror import Answers, Command, Compile, Pass, Whole, commands
from producer.taps import ending_behind
from producer.target import Target, load_target, run_text
from producer.whole import whole_parameter
from protocol.child import run_child


def follow(target: Target, told: Iterable[Command]) -> None:
    """Runs every command on this rank's part of the target; what comes out is the same on all ranks, and dropped."""
    for command in told:
        match command:
            case Pass(rows=rows, ids=ids, mask=mask, last=last):
                with ending_behind(target.layers, last):
                    run_text(target, _matrix(ids, rows), None if mask is None else _matrix(mask, rows))
            case Answers(rows=rows, ids=ids, mask=mask, max_new_tokens=most, sampling=sampling, seeds=seeds):
                stop_ids = frozenset(command.stop_ids)
                answer_batch(target, _matrix(ids, rows), _matrix(mask, rows), stop_ids, most, sampling, seeds)
            case Whole(name=name):
                whole_parameter(target, name)
            case Compile(count=count):
                compile_target(target, count)


def _matrix(data: bytes, rows: int) -> NDArray[np.int64]:
    return np.frombuffer(data, np.int64).reshape(rows, -1).copy()  # torch wants memory that may be written


def main(orders: Rank, store_fd: int, commands_fd: int) -> None:
    """Follows until the first rank closes the pipe. Raises RequestError when the target cannot be loaded."""
    join_group(orders.rank, orders.devices, store_fd)
    target = load_target(Path(orders.target_dir), orders.target, orders.device)
    with os.fdopen(commands_fd, "rb") as stream:
        follow(target, commands(stream))
    dist.destroy_process_group()


if __name__ == "__main__":
    rank = msgspec.json.decode(sys.argv[1], type=Rank)
    run_child(f"rank-{rank.rank}", lambda: main(rank, int(sys.argv[2]), int(sys.argv[3])))
