"""A run as a row of waits: how long given steps take with so many producers, ranks and slots. Pure.

Blocks are filled in plan order by whichever producer is free, each in a slot that was free before (DESIGN, work and
memory are granted together). A rank holds DEPTH blocks ahead, and a slot is free again when its block is on the device.
A micro-step begins when the blocks of all ranks are there, a step ends with its slowest rank. Nothing is random, and no
time falls when a part of it rises: whatever gets faster, the whole does not get slower.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from consumer.bounds import DEPTH
from protocol.packing import BlockSpec

Seconds = Callable[[BlockSpec], float]


def makespan_s(
    steps: Sequence[Sequence[BlockSpec]],
    ranks: int,
    block_s: Seconds,
    finish_s: float,
    producers: int,
    fill_s: Seconds,
    slots: int,
) -> float:
    """Seconds from the first step's beginning, the ring full by then, to the last one's end."""
    free_at = [0.0] * producers
    slot_at: list[float] = []  # when the slots that hold a block are free again
    begun: list[list[float]] = [[] for _ in range(ranks)]  # of each rank's micro-steps
    ended = [0.0] * ranks
    used = 0
    for blocks in steps:
        for first in range(0, len(blocks), ranks):
            go = 0.0
            for block in blocks[first : first + ranks]:
                own = begun[block.rank]
                # It may come as soon as the one before those that the rank holds is in training.
                credit = own[-DEPTH] if len(own) >= DEPTH else 0.0
                arrives = credit
                if block.samples:
                    if used < slots:
                        used, ready = used + 1, 0.0
                    else:
                        ready = max(heapq.heappop(free_at), heapq.heappop(slot_at)) + fill_s(block)
                        heapq.heappush(free_at, ready)
                    arrives = max(ready, credit)
                    heapq.heappush(slot_at, arrives)
                go = max(go, arrives)
            for block in blocks[first : first + ranks]:
                start = max(go, ended[block.rank])
                begun[block.rank].append(start)
                ended[block.rank] = start + (block_s(block) if block.samples else 0.0)
        ended = [max(ended) + finish_s] * ranks
    return ended[0]
