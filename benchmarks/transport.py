"""What it costs to hand a block from one process to another, in memcpys of the same bytes.

    python benchmarks/transport.py [--mb 1 16 128] [--repeats 5] [--methods ring ipc tcp safetensors] [--parts] [--json]

    ring         the producer writes into a slot of the ring, which the consumer maps; messages carry descriptors
    ipc, tcp     the payload itself as ZeroMQ frames to an ingest process, which places it into the same ring
    safetensors  a file in /dev/shm for each block: saved, loaded, deleted

Producer, ingest and consumer are processes with the product's own classes; this one stands in for the coordinator
with a bounded number of blocks under way. "CPU" is what producer, ingest and consumer use for a GB, all threads, beside
one thread's memcpy between warm buffers of the block's size, measured before and after each cell. It hardly depends
on what else the machine does, unlike "rate", blocks that arrive by the clock beside what memcpy does in a CPU second.
Cells come in another order in each repetition; a row is the repetition with the median ratio.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash
from msgspec import Struct
from numpy.typing import NDArray
from report import publish, row
from transport_roles import FILES, RING
from transport_stage import stage

from protocol.block import checksum
from protocol.chunks import pieces

METHODS = (RING, "ipc", "tcp", FILES)
AIM, AIM_MB = 0.75, 128
GB = 1e9
# Of one pass: enough that starting and ending do not matter and that every slot is used several times.
PASS_BYTES, LEAST_BLOCKS, MOST_BLOCKS = 2 << 30, 8, 512
MEASURE_S = 0.3

Bytes = NDArray[np.uint8]


def xxh3(block: Bytes) -> None:
    view = memoryview(block)
    for piece in pieces([(0, len(view))]):
        xxhash.xxh3_64_intdigest(view[piece.start : piece.stop])


# What both ends do to a block besides: over every chunk with ipc and tcp, and over features that the CPU checks.
SUMS: dict[str, Callable[[Bytes], Any]] = {"xxh3 of the same bytes, once": xxh3, "block sum, once": checksum}


class Cell(Struct):
    """One pass: CPU seconds a GB of each process, of one memcpy, and GB/s by the clock."""

    cpu: dict[str, float]
    memcpy: float
    rate: float

    @property
    def cost(self) -> float:
        """In memcpys."""
        return sum(self.cpu.values()) / self.memcpy


def cpu_per_gb(action: Callable[[], Any], nbytes: int) -> float:
    """CPU seconds of this thread for a GB, where each `action` deals with `nbytes`."""
    action()
    turns, started = 0, time.thread_time()
    while (spent := time.thread_time() - started) < MEASURE_S:
        action()
        turns += 1
    return spent / turns / nbytes * GB


def measure(method: str, source: Bytes, target: Bytes) -> Cell:
    """One cell of one repetition, for blocks of the size of `source`."""
    nbytes = source.nbytes

    def memcpy() -> float:
        return cpu_per_gb(lambda: np.copyto(target, source), nbytes)

    before = memcpy()
    if method in SUMS:
        spent = cpu_per_gb(lambda: SUMS[method](source), nbytes)
        return Cell({method: spent}, (before + memcpy()) / 2, 1 / spent)
    blocks = max(LEAST_BLOCKS, min(MOST_BLOCKS, PASS_BYTES // nbytes))
    with stage(method, nbytes) as one:
        one.transfer(max(LEAST_BLOCKS, blocks // 4))  # warms up
        seconds, cpu = one.transfer(blocks)
    moved = blocks * nbytes / GB
    return Cell({name: spent / moved for name, spent in cpu.items()}, (before + memcpy()) / 2, moved / seconds)


def rows_of(method: str, mb: int, cells: list[Cell], parts: bool) -> list[dict[str, Any]]:
    name = f"{method}, {mb} MB"
    middle = sorted(cells, key=lambda cell: cell.cost)[len(cells) // 2]
    rows = [row(f"{name}: CPU", sum(middle.cpu.values()), "s/GB", middle.memcpy)]
    if method in SUMS:
        return rows
    if parts:
        rows += [row(f"{name}: CPU of {who}", spent, "s/GB", middle.memcpy) for who, spent in middle.cpu.items()]
    if (method, mb) == (RING, AIM_MB):
        rows.append(row(f"{name}: memcpy's CPU over its own", 1 / middle.cost, "share", AIM))
    middle = sorted(cells, key=lambda cell: cell.rate * cell.memcpy)[len(cells) // 2]
    return [*rows, row(f"{name}: rate", middle.rate, "GB/s", 1 / middle.memcpy)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--parts", action="store_true", help="also what each process uses")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # files in /dev/shm are memory: none stays behind
    sources = {mb: np.resize(np.arange(251, dtype=np.uint8), mb << 20) for mb in arguments.mb}
    targets = {mb: np.zeros_like(source) for mb, source in sources.items()}
    cells: dict[tuple[str, int], list[Cell]] = {
        (method, mb): [] for mb in arguments.mb for method in (*arguments.methods, *SUMS)
    }
    for _ in range(arguments.repeats):
        for method, mb in random.sample(list(cells), len(cells)):
            cells[method, mb].append(measure(method, sources[mb], targets[mb]))
    rows = [rows_of(method, mb, measured, arguments.parts) for (method, mb), measured in cells.items()]
    publish([entry for some in rows for entry in some], arguments.json)


if __name__ == "__main__":
    main()
