"""A rank that trains nothing: `python -P -m consumer.sink RUN_DIR RANK RING_FD`, started by `draftwire tune`.

It takes every block to its device, verifies it, gives the slot back and lets the block go: what producers reach when
nobody is slower than they are. It has no weights, no collective and no checkpoint.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

from consumer.feed import Feed
from consumer.prefetch import pinned_ring
from consumer.rank_peer import RankPeer
from protocol.arena import Arena
from protocol.child import run_child
from protocol.dataset import TokenDataset
from protocol.job import read_job
from protocol.messages import Reached, Report
from protocol.plan import Plan


def main(run_dir: Path, rank: int, ring_fd: int) -> None:
    """To the end of the plan, or until the coordinator ends it (RunError)."""
    job = read_job(run_dir)
    device = torch.device(job.consumers[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dataset = TokenDataset.open(Path(job.dataset_dir))
    plan = Plan(dataset.lengths, dataset.eligible, job.plan, dataset.fingerprint)
    arena = Arena(ring_fd, job.slots, job.slot_bytes)
    with pinned_ring(arena, device):
        peer = RankPeer(job, rank)
        feed = Feed(peer, arena, device, len(job.taps), rows=dataset)
        peer.send(Reached(step=0))
        for step in range(plan.total_steps):
            if not _step(peer, feed, plan, step, rank):
                break
        peer.close()


def _step(peer: RankPeer, feed: Feed, plan: Plan, step: int, rank: int) -> bool:
    """Lets all blocks of a step pass; False when the run is to end before it."""
    started_s, feed.waited_s = time.monotonic(), 0.0
    for micro_step in range(plan.micro_steps(step)):
        if feed.next(step, micro_step) is None:
            return False
    peer.orders.pop(step)
    peer.progress = step + 1
    if rank == 0:
        tokens = sum(block.tokens for block in plan.blocks(step))
        spent_s = time.monotonic() - started_s
        row: dict[str, Any] = {
            "step": step + 1,
            "epoch": plan.locate(step)[0],
            "loss": None,
            "accuracy": [],
            "anchors": 0,
        }
        figures = {"tokens": tokens, "step_s": spent_s, "wait_s": feed.waited_s, "skipped": False}
        peer.send(Report(kind="step", row=row | figures))
    peer.send(Reached(step=step + 1))
    return True


if __name__ == "__main__":
    arguments = (Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    run_child(f"consumer-{arguments[1]}", lambda: main(*arguments))
