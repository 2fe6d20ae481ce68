"""A rank that computes nothing: a block takes FAKE_COST_S for each unit of its cost.

Started like consumer.worker: `python -P -m fake_trainer RUN_DIR RANK RING_FD`. Ranks wait for each other as real ones
do in the reduction: a step begins when all have come to it.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

from consumer.bounds import DEPTH
from protocol.child import run_child
from protocol.dataset import TokenDataset
from protocol.errors import RunError
from protocol.job import read_job, run_token
from protocol.messages import Credit, Deliver, Go, Reached, Release, Report, Stop, Verified
from protocol.packing import DRAFT_TOKEN_COST
from protocol.peer import Peer, hello
from protocol.plan import Plan


def receive(peer: Peer, orders: queue.Queue[Go | Stop]) -> None:
    """Takes deliveries at once, as a prefetch does, and hands on orders."""
    while True:
        message = peer.inbox.get()
        if isinstance(message, Deliver):
            key = {"step": message.step, "index": message.index, "attempt": message.attempt}
            peer.send(Verified(**key))
            peer.send(Release(**key))
        elif isinstance(message, Go | Stop):
            orders.put(message)
            if isinstance(message, Stop):
                return


def main(run_dir: Path, rank: int) -> None:
    job, cost_s = read_job(run_dir), float(os.environ["FAKE_COST_S"])
    dataset = TokenDataset.open(Path(job.dataset_dir))
    plan = Plan(dataset.lengths, dataset.eligible, job.plan, dataset.fingerprint)
    peer = Peer(job.address, job.run_id, hello("consumer", f"consumer-{rank}", rank, run_token(), job.schema), 300)
    orders: queue.Queue[Go | Stop] = queue.Queue()
    threading.Thread(target=receive, args=(peer, orders), daemon=True).start()
    peer.send(Credit(blocks=DEPTH))
    peer.send(Reached(step=0))
    settled_s = done_s = time.monotonic()
    for step in range(plan.total_steps):
        waited_s = 0.0
        own = [block for block in plan.blocks(step) if block.rank == rank]
        for block in own:
            started_s = time.monotonic()
            order = orders.get()
            now = time.monotonic()
            waited_s += now - started_s
            if isinstance(order, Stop):
                raise RunError(order.reason)
            if order.stop:
                peer.close()
                return
            peer.send(Credit(blocks=1))
            cost = block.tokens + DRAFT_TOKEN_COST * block.draft_tokens
            done_s = max(done_s, now - 0.02) + cost * cost_s
            time.sleep(max(done_s - time.monotonic(), 0.0))
        peer.progress = step + 1
        before_s, settled_s = settled_s, time.monotonic()
        if rank == 0:
            tokens = sum(block.tokens for block in plan.blocks(step))
            row: dict[str, Any] = {"step": step + 1, "epoch": 0, "tokens": tokens, "step_s": settled_s - before_s}
            learned = {"loss": None, "accuracy": [], "anchors": 0, "skipped": False, "wait_s": waited_s}
            peer.send(Report(kind="step", row=row | learned))
        peer.send(Reached(step=step + 1))
    peer.close()


if __name__ == "__main__":
    arguments = (Path(sys.argv[1]), int(sys.argv[2]))
    run_child(f"consumer-{arguments[1]}", lambda: main(*arguments))
